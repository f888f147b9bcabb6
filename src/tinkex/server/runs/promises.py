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
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinkex.engine.api import EngineError
from tinkex.server.calls import Call
from tinkex.server.complaints import FULL_DISK, complain
from tinkex.server.files.data_dir import is_full_disk
from tinkex.server.http_errors import Refusal
from tinkex.server.runs.call_records import facts_of
from tinkex.server.runs.journal import Journal
from tinkex.server.workers.worker import Postponed
from tinkex.types.future_requests import RequestErrorCategory, RequestFailedResponse
from tinkex.wire import codec
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex.server")

KEEP_READ = 600.0
JUST_READ = 60.0
"""A result that was read so lately may not have reached its reader."""
KEEP_READ_BYTES = 256 << 20
"""The most bytes of results that are kept after they were read, except the last read ones."""
KEEP_UNREAD = 24 * 3600.0
KEEP_GONE = 100_000
"""The number of expired ids that are remembered."""

_scrubber = Scrubber()


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


def first_cursor() -> int:
    """Return the first number of a new log, which is above those of all earlier logs.

    No log ends more samples than there are microseconds.
    """
    return time.time_ns() // 1000


class Log:
    """The samples of one client that have ended and that it has not acknowledged, by number.

    Numbers go up from one log to the next, so that a cursor of an earlier one, closed with its
    session or in an earlier life of the server, never hides anything.
    """

    def __init__(self, session_id: str, first: int) -> None:
        self.session_id = session_id
        self.cursor = self._first = first
        self.polled = time.monotonic()
        self.is_closed = False
        self._ended: dict[int, Promise] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def is_untouched(self) -> bool:
        """Return whether nothing was ever noted."""
        return self.cursor == self._first

    def add(self, promise: Promise) -> None:
        """Note the end of a sample."""
        self.cursor += 1
        promise.number = self.cursor
        self._ended[promise.number] = promise
        self._news.set()

    def remove(self, promise: Promise) -> None:
        """Forget a sample whose result is forgotten."""
        self._ended.pop(promise.number, None)

    def until(self, cursor: int) -> list[Promise]:
        """Return the samples that were noted up to a number."""
        return [promise for number, promise in self._ended.items() if number <= cursor]

    def after(self, cursor: int) -> list[Promise]:
        """Return the samples that were noted after a number."""
        return [promise for number, promise in self._ended.items() if number > cursor]

    async def wait(self, cursor: int) -> None:
        """Wait until something comes after a number, or the log is closed."""
        self.polled = time.monotonic()
        while not self.is_closed and not self.after(cursor):
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        """End all waiting."""
        self.is_closed = True
        self._ended.clear()
        self._news.set()


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
        self._logs: dict[Target, Log] = {}
        self._gone: dict[str, None] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._clock = clock
        self._held: set[asyncio.Timeout] = set()
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

    def follow(self, promise: Promise, work: Awaitable[Any]) -> None:
        """Settle a promise with what some work gives, whenever it does."""
        self.keep(asyncio.ensure_future(self.fulfil(promise, work)))

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
            begin()

        task = promise.recorded = asyncio.ensure_future(taking())
        self.keep(task)
        try:
            await asyncio.shield(task)
        except OSError as error:
            self.take_back(promise)
            raise Refusal(
                503, f"the request was not accepted, as it cannot be written to disk: {error}"
            ) from None
        except Exception:  # a fault of ours: who asks again must not wait for what is never done
            self.take_back(promise)
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
            promise.fail(f"{_number_of(request_id)} was used before, for another request")
        return failed_id

    async def all_recorded(self, session_id: str) -> None:
        """Wait until the requests of a session that are on their way to the disk are there."""
        coming = [p.recorded for p in self._promises.values() if p.session_id == session_id]
        await asyncio.gather(*filter(None, coming), return_exceptions=True)

    def take_back(self, promise: Promise) -> None:
        """Forget a promise that was never acknowledged."""
        self._promises.pop(promise.request_id, None)

    def sweep(self) -> None:
        """Forget the results whose time is over."""
        now = self._clock()
        for promise in list(self._promises.values()):
            if not promise.done.is_set():
                continue
            if now - promise.finished > KEEP_UNREAD or (
                promise.read and now - promise.read > KEEP_READ
            ):
                self._forget(promise)
        self._sweep_read(now)
        for request_id in list(self._gone)[:-KEEP_GONE]:
            del self._gone[request_id]

    def _sweep_read(self, now: float) -> None:
        """Forget the results that were read longest ago, beyond so many bytes."""
        # Those read lately may have to be sent again, or be on their way to the disk.
        read = [p for p in self._promises.values() if p.read and now - p.read > 2 * JUST_READ]
        kept = 0
        for promise in sorted(read, key=lambda promise: promise.read, reverse=True):
            kept += promise.size
            if kept > KEEP_READ_BYTES:
                self._forget(promise)
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
            self._forget(promise)

    def free(self, promise: Promise) -> None:
        """Forget a result that its reader says it has."""
        self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        del self._promises[promise.request_id]
        promise.let_go()
        self._gone[promise.request_id] = None
        if promise.target is not None and (log := self._logs.get(promise.target)) is not None:
            log.remove(promise)

    # ── logs ──────────────────────────────────────────────────────────────────────────────────────

    def log(self, target: Target) -> Log | None:
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

    def acknowledge(self, log: Log, cursor: int) -> None:
        """Record that a client knows all results up to a number; drop those that were sent."""
        for promise in log.until(cursor):
            if promise.is_sent:
                self._forget(promise)
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
            promise.settle(await work)
        except Postponed:
            return
        except EngineError as error:
            if not self.are_closed:
                promise.fail(self._conceal(str(error)), RequestErrorCategory(error.category))
        except Exception as error:
            if is_full_disk(error):
                complain("an operation failed", error, about=promise.request_id)
            else:
                logger.exception("%s failed", promise.request_id)
            promise.fail(self._conceal(internal(error)), RequestErrorCategory.Server)


def internal(error: Exception) -> str:
    """Return the text for clients after a fault of the server, without secrets."""
    if is_full_disk(error):
        return f"{FULL_DISK}; ask again when there is room"
    return f"internal error: {type(error).__name__}: {_scrubber.text(str(error))}"


def _number_of(request_id: str) -> str:
    """Return the number of a request with its name; a request that makes a run has the run's."""
    head, _, number = request_id.rpartition(":")
    prefix, _, run = head.rpartition(":")
    makes_run = number == "0" and prefix.endswith(":train")
    return f"model_seq_id {run}" if makes_run else f"request number {number}"
