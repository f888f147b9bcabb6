"""Promises: the futures a server has handed out, each by the id under which its result is fetched.

They live in memory. A result may be read more than once. Some time after it was read, or if it is
never read, it is forgotten, and its id answers "gone". Samples are noted in a log as they
end, for clients that poll for many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinkex.engine.api import EngineError
from tinkex.server.calls import FAILED, Call, facts_of, number_named
from tinkex.server.files.data_dir import is_full_disk
from tinkex.server.http_errors import Refusal, complain, internal
from tinkex.server.runs.journal import Entry, Journal
from tinkex.server.runs.result_log import Log, came_out_otherwise, first_cursor
from tinkex.server.workers.worker import EngineDied, Postponed
from tinkex.types.future_requests import RequestErrorCategory, RequestFailedResponse
from tinkex.types.sampled import SampleResponse
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import codec

logger = logging.getLogger("tinkex.server")

KEEP_READ = 600.0
JUST_READ = 60.0
"""A result that was read so lately may not have reached its reader."""
KEEP_READ_BYTES = 256 << 20
"""The most bytes of results that are kept after they were read, except the last read ones."""
KEEP_UNREAD = 24 * 3600.0
KEEP_GONE = 100_000
"""The number of expired ids that are remembered."""

OFF_LOOP_VALUES = 8_000
"""Results of more numbers than this are encoded in a thread."""


Target: TypeAlias = tuple[str, int]
"""A sampling session, and the number of one of its clients."""


@dataclass(slots=True)
class Promise:
    """One operation on its way."""

    request_id: str
    digest: bytes
    session_id: str
    target: Target | None = None
    """The client whose log notes its end."""
    owner: str | None = None
    """The account that asked, where the name does not tell it: of samples without a session."""
    cancel: Callable[[], object] | None = None
    """Cancels the work, where that is possible."""
    on_settled: Callable[[Promise], object] | None = None
    on_read: Callable[[], object] | None = None
    """Called once when the result is read or forgotten."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    kept: codec.Body | None = None
    """The encoded result, when it has been announced and not fetched yet."""
    recorded: asyncio.Future[None] | None = None
    """Done when the request is on disk: not before that is it acknowledged."""
    place: tuple[Journal, int] | None = None
    """The journal of its request, and the number there, if a failure would not be found in it."""
    is_lost: bool = False
    """True if the work was lost with its engine: it may be carried out again until that is told."""
    telling: asyncio.Future[Any] | None = None
    """Done when the loss is on disk: not before that is it told."""
    number: int = 0
    """Its place in the log."""
    is_sent: bool = False
    """True if the result was sent with the log: once that is acknowledged, it can be forgotten."""
    finished: float = 0.0
    read: float = 0.0
    size: int = 0
    """Bytes of the result as it was read."""

    def settle(self, result: Any) -> None:
        """Give the promise its result."""
        if not self.done.is_set():
            self.result = result
            self.finished = time.monotonic()
            self.done.set()
            self.cancel = None
            if self.on_settled is not None:
                self.on_settled(self)

    def take_back(self) -> bool:
        """Take back a failure that was not told, if it is one: the work is carried out again."""
        if not self.is_lost or self.telling is not None:
            return False
        self.done.clear()
        self.result, self.on_settled, self.is_lost = None, None, False
        return True

    def touch(self) -> None:
        """Note that the result has been read."""
        self.read = time.monotonic()
        self.let_go()

    def hand_over(self, body: codec.Body, *, is_inline: bool) -> None:
        """Keep the bytes of a result that was only announced; note that another one was read."""
        self.kept = None if is_inline else body
        if is_inline:
            self.touch()  # should no other poll come, it need not be kept for long

    def let_go(self) -> None:
        """Say that the result no longer waits for its reader."""
        on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read()

    def fail(
        self, message: str, category: RequestErrorCategory = RequestErrorCategory.User
    ) -> None:
        """Give the promise a failure."""
        self.settle(RequestFailedResponse(error=message, category=category))


class Promises:
    """All promises of a server."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        conceal: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._conceal = conceal
        """Removes secrets from the text of a failure."""
        self._promises: dict[str, Promise] = {}
        self._logs: dict[Target, Log[Promise]] = {}
        self._gone: dict[str, None] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._clock = clock
        self._held: set[asyncio.Timeout] = set()
        self.compares = True
        """True if an engine gives the same bits again, so that other ones are a fault."""
        self.differences = 0
        """The number of results that came out otherwise when they were made again."""
        self.are_left = False
        """True if the server stops: the next start does what has not begun, and polls end."""
        self.are_closed = False
        """True if the workers have ended; the next start does the unfinished work."""

    def __len__(self) -> int:
        return len(self._promises)

    def get(self, request_id: str) -> Promise | None:
        """Return a promise that can still be read, or None."""
        return self._promises.get(request_id)

    def is_gone(self, request_id: str) -> bool:
        """Return whether a promise was there and has expired."""
        return request_id in self._gone

    def add(
        self,
        request_id: str,
        digest: bytes,
        session_id: str,
        target: Target | None = None,
        cancel: Callable[[], object] | None = None,
        owner: str | None = None,
    ) -> Promise:
        """Make a new promise."""
        on_settled = None if target is None else self._note
        promise = Promise(request_id, digest, session_id, target, owner, cancel, on_settled)
        self._promises[request_id] = promise
        return promise

    def repeat(
        self, request_id: str, call: Call, session_id: str, journal: Journal, number: int
    ) -> Promise:
        """Return the promise of a call that is carried out again from a journal."""
        promise = self.get(request_id) or self.add(request_id, call.digest, session_id)
        promise.place = journal, number
        promise.take_back()
        return promise

    def follow(self, promise: Promise, work: Awaitable[Any]) -> asyncio.Future[None]:
        """Settle a promise with what some work gives, whenever it does; return that."""
        following = asyncio.ensure_future(self.fulfil(promise, work))
        self.keep(following)
        return following

    @contextlib.asynccontextmanager
    async def holding(self, seconds: float) -> AsyncIterator[None]:
        """Hold a poll while it waits.

        Raises:
            TimeoutError: It was held for so long.
            Refusal: The server stops; its next life keeps what was promised.
        """
        try:
            async with asyncio.timeout(0 if self.are_left else seconds) as limit:
                self._held.add(limit)
                try:
                    yield
                finally:
                    self._held.discard(limit)
        except TimeoutError:
            if not self.are_left:
                raise
            why = "this server is shutting down; ask again"
            raise Refusal(503, why, headers={"Retry-After": "1"}) from None

    def leave(self) -> None:
        """Begin nothing more, and end the polls that are held."""
        self.are_left = True
        for limit in self._held:
            limit.reschedule(asyncio.get_running_loop().time())

    def is_over(self, request_id: str) -> bool:
        """Return True if a result was dropped, or read a while ago."""
        promise = self._promises.get(request_id)
        return promise is None or bool(promise.read and self._clock() - promise.read > JUST_READ)

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Hold on to a task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take(
        self,
        promise: Promise,
        journal: Journal,
        number: int,
        call: Call,
        begin: Callable[[], None],
    ) -> None:
        """Put a call on disk, then begin with it: both or neither, even if its caller gives up."""

        async def taking() -> None:
            await journal.append(number, facts_of(call, promise.request_id), call.body)
            if call.op:  # it is on disk, and thousands may wait for their turn
                call.body = b""
            promise.place = journal, number
            begin()

        task = promise.recorded = asyncio.ensure_future(taking())
        self.keep(task)
        try:
            await asyncio.shield(task)
        except Exception as error:
            # it was never acknowledged, and who asks again must not wait for what is never done
            self._promises.pop(promise.request_id, None)
            if isinstance(error, OSError):
                why = f"the request was not accepted, as it cannot be written to disk: {error}"
                raise Refusal(503, why) from None
            raise

    def refuse_reused(
        self,
        request_id: str,
        session_id: str,
        digest: bytes,
        owner: str,
        target: Target | None = None,
    ) -> str:
        """Return the id of a failure for a request whose number belongs to another request."""
        failed_id = f"{request_id}:{digest.hex()[:12]}"
        if failed_id not in self._promises:
            promise = self.add(failed_id, digest, session_id, target, owner=owner)
            promise.fail(f"{number_named(request_id)} was used before, for another request")
        return failed_id

    async def all_recorded(self, session_id: str) -> None:
        """Wait until the requests of a session that are on their way to the disk are there."""
        coming = [p.recorded for p in self._promises.values() if p.session_id == session_id]
        await asyncio.gather(*filter(None, coming), return_exceptions=True)

    def sweep(self) -> None:
        """Forget the results whose time is over, and those beyond the room for them."""
        now = self._clock()
        for promise in list(self._promises.values()):
            if not promise.done.is_set():
                continue
            if now - promise.finished > KEEP_UNREAD or (
                promise.read and now - promise.read > KEEP_READ
            ):
                self.forget(promise)
        for request_id in list(self._gone)[:-KEEP_GONE]:
            del self._gone[request_id]
        # Those read longest ago go, beyond so many bytes. Those read lately may have to be sent
        # again, or be on their way to the disk.
        read = [p for p in self._promises.values() if p.read and now - p.read > 2 * JUST_READ]
        kept = 0
        for promise in sorted(read, key=lambda promise: promise.read, reverse=True):
            kept += promise.size
            if kept > KEEP_READ_BYTES:
                self.forget(promise)
                # a run may hold on to the promise until its next state
                promise.result = promise.kept = None

    def forget_session(self, session_id: str) -> None:
        """Drop everything of a session that is over for good."""
        for target in [
            target for target, log in self._logs.items() if log.session_id == session_id
        ]:
            self._logs.pop(target).close()
        for promise in [p for p in self._promises.values() if p.session_id == session_id]:
            promise.fail("the session has ended", RequestErrorCategory.User)
            self.forget(promise)

    def forget(self, promise: Promise) -> None:
        """Forget a result."""
        del self._promises[promise.request_id]
        promise.let_go()
        self._gone[promise.request_id] = None
        if promise.target is not None and (log := self._logs.get(promise.target)) is not None:
            log.remove(promise)

    # ── logs ──────────────────────────────────────────────────────────────────────────────────────

    def log(self, target: Target) -> Log[Promise] | None:
        """Return the log of a client that has polled for it, or None."""
        return self._logs.get(target)

    def open_log(self, target: Target, session_id: str) -> None:
        """Begin a log, with what has ended and was not read; one that is there is left alone."""
        if target in self._logs:
            return
        log = self._logs[target] = Log(session_id, first_cursor())
        ended = [
            p
            for p in self._promises.values()
            if p.target == target and p.done.is_set() and not p.read
        ]
        for promise in sorted(ended, key=lambda promise: promise.finished):
            log.add(promise)

    def acknowledge(self, log: Log[Promise], cursor: int) -> None:
        """Record that a client knows all results up to a number; drop those that were sent."""
        for promise in log.until(cursor):
            if promise.is_sent:
                self.forget(promise)
            else:
                log.remove(promise)
                promise.touch()

    def sweep_logs(self, sessions: Container[str]) -> None:
        """Forget logs that are not polled, if they are empty or their session has ended."""
        stale = self._clock() - KEEP_READ
        for target, log in list(self._logs.items()):
            if log.polled < stale and (log.is_untouched or log.session_id not in sessions):
                self._logs.pop(target).close()

    def _note(self, promise: Promise) -> None:
        assert promise.target is not None
        if (log := self._logs.get(promise.target)) is not None:
            log.add(promise)

    async def fulfil(self, promise: Promise, work: Awaitable[Any]) -> None:
        """Wait for some work, and settle a promise with what it gives."""
        try:
            result = await work
        except Postponed:
            return
        except EngineError as error:
            if not self.are_closed:
                await self._fail(promise, error, str(error), error.category)
        except Exception as error:
            if is_full_disk(error):
                complain("an operation failed", error, about=promise.request_id)
            else:
                logger.exception("%s failed", promise.request_id)
            await self._fail(promise, error, internal(error), "server")
        else:
            earlier = promise.place and promise.place[0].failing
            if earlier and not earlier.done():
                await asyncio.wait([earlier])  # its result depends on what failed
            if promise.done.is_set() and self.compares:
                self.differences += came_out_otherwise(promise.request_id, promise.result, result)
            promise.settle(result)

    async def _fail(self, promise: Promise, error: Exception, why: str, category: str) -> None:
        """Fail a promise: for good, unless its work was lost or is a sample, which changes nothing.

        What failed for good is on disk before any result after it is known.
        """
        if promise.done.is_set():
            return
        failure = RequestFailedResponse(
            error=self._conceal(why), category=RequestErrorCategory(category)
        )
        if promise.place is not None and (
            isinstance(error, EngineDied) or promise.target is not None
        ):
            promise.is_lost = category == "server"
        elif promise.place is not None:
            recording = asyncio.ensure_future(_record_failure(promise, failure))
            promise.recorded = promise.place[0].failing = recording
            try:
                await asyncio.shield(recording)
            except OSError as full:
                complain("a failure could not be put on disk", full, about=promise.request_id)
        promise.settle(failure)

    async def keep_failures(self, promises: Iterable[Promise]) -> None:
        """Put on disk which work was lost, before that is told: it stays undone from now on.

        Raises:
            Refusal: It cannot be put on disk, so it must not be told yet.
        """
        lost = [promise for promise in promises if promise.is_lost]
        for promise in lost:
            if promise.telling is None:
                promise.telling = promise.recorded = asyncio.ensure_future(
                    _record_failure(promise, promise.result)
                )
        told = [asyncio.shield(promise.telling) for promise in lost if promise.telling is not None]
        failures = await asyncio.gather(*told, return_exceptions=True)
        for promise, failure in zip(lost, failures, strict=True):
            promise.is_lost, promise.telling = failure is not None, None
        if any(failures):
            why = "the result cannot be put on disk; ask again"
            raise Refusal(503, why, headers={"Retry-After": "1"})


def fail_again(promise: Promise, failed: Entry) -> None:
    """Fail a promise as its journal says that it failed."""
    promise.place = None  # it is on disk
    promise.digest = bytes.fromhex(failed.facts["digest"])
    promise.fail(failed.body.decode(), RequestErrorCategory(failed.facts["category"]))


async def _record_failure(promise: Promise, failure: RequestFailedResponse) -> None:
    assert promise.place is not None
    journal, number = promise.place
    if not journal.is_closed:  # else nothing is carried out again
        facts = {"op": FAILED, "id": promise.request_id, "category": failure.category.value}
        facts["digest"] = promise.digest.hex()
        await journal.append(number, facts, failure.error.encode())


# ── results as bytes ──────────────────────────────────────────────────────────────────────────────


def size_of(result: object) -> int:
    """Estimate the bytes that a result takes in memory; small ones count as 0."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(
            tensor.values.nbytes for output in result.loss_fn_outputs for tensor in output.values()
        )
    if not isinstance(result, SampleResponse):
        return 0
    tables = [result.topk_prompt_logprobs_np, *(one.topk_logprobs_np for one in result.sequences)]
    size = sum(
        table.token_ids.nbytes + table.logprobs.nbytes for table in tables if table is not None
    )
    return (
        size
        + 8 * sum(one.length for one in result.sequences)
        + getattr(result.prompt_logprobs_np, "nbytes", 0)
    )


async def encoding(promise: Promise, *, as_protobuf: bool) -> codec.Body:
    """Return the bytes of a promise's result, in the form that its reader accepts."""
    if is_heavy(promise):
        return await asyncio.to_thread(encode, promise, as_protobuf=as_protobuf)
    return encode(promise, as_protobuf=as_protobuf)


def is_heavy(promise: Promise) -> bool:
    """Estimate whether a result takes long to encode."""
    result = promise.result
    if promise.kept is not None:
        return False
    if isinstance(result, ForwardBackwardOutput):
        return size_of(result) > 4 * OFF_LOOP_VALUES
    return isinstance(result, SampleResponse) and (
        bool(result.target_prompt_logprobs or result.prompt_alt_tokens)
        or size_of(result) > 8 * OFF_LOOP_VALUES
    )


def encode(promise: Promise, *, as_protobuf: bool) -> codec.Body:
    """Return the bytes of a result; one that cannot be encoded becomes a failure."""
    wants_protobuf = as_protobuf and codec.has_protobuf(type(promise.result))
    if promise.kept is not None and (promise.kept.content_type == codec.PROTOBUF) == wants_protobuf:
        return promise.kept
    try:
        return codec.encode(promise.result, as_protobuf=as_protobuf)
    except ValueError as error:  # in band: a client would repeat a poll that gets a 500 forever
        logger.exception("the result of %s cannot be encoded", promise.request_id)
        promise.result = RequestFailedResponse(
            error=f"internal error: the result cannot be sent: {error}",
            category=RequestErrorCategory.Server,
        )
        return codec.encode(promise.result, as_protobuf=False)
