"""One poll for all samples of a client; one answer brings many results.

It only saves requests. A sample is polled for alone when a batched poll fails, when its result is
too large to come along, and when it has waited so long that the server may have lost it: a server
that was restarted looks like one without news.

The server keeps results until they are acknowledged. Each poll acknowledges the results of the one
before. When no sample is waited for, one poll with a timeout of 0 acknowledges the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import weakref

import msgspec

from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.result_polling import HELD, POLL_TIMEOUT
from tinkex.client.http.exchange import Reply
from tinkex.client.http.retry import persist
from tinkex.client.http.transport import OFF_LOOP_BYTES, Transport
from tinkex.client.settings.delays import Delays
from tinkex.errors import GoneError, TinkerError
from tinkex.types.future_requests import (
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinkex.wire import codec
from tinkex.wire.protocol import RETRIEVE_FUTURES

logger = logging.getLogger("tinkex")

INLINE_BYTES = 4 << 20
"""Limit of the results in one answer, in bytes; larger ones are fetched alone."""
GATHER_SECONDS = 0.005
"""Least time between two polls with news, so that samples that end together come together."""
REST_SECONDS = 5.0
"""Time after a failed poll in which results are polled for one by one."""
DOUBT_SECONDS = 60.0
"""Time after which a waiting sample may be polled for alone."""
DOUBTED = 16
"""Samples polled for alone in each such time; if the poll missed one, all as old are."""
ACK_DELAY = 0.2
"""Time without a waiting sample before results are acknowledged."""
LAST_ACK_SECONDS = 2.0
"""Longest wait of a close for the last acknowledgement."""
MOST_FETCHED = 10_000
"""Limit of fetched results that are remembered for the next poll to report."""
NO_ENDPOINT = frozenset({404, 405, 501})
EMPTY_POLL_DELAYS = Delays(first=0.05, most=1.0)


class _Waiter(msgspec.Struct):
    future: asyncio.Future[Reply | None]
    since: float


class BatchPoller:
    """Polls for the samples of one client together; on the runtime's loop only.

    A submission calls `begin()`, then `outcome(request_id)` after the receipt, then `end(…)`. The
    outcome's future gives the reply with the result, or None if the result must be fetched alone.

    Args:
        transport: Sends the polls.
        sampling_session_id: The sampling session.
        clone: The number of the client in that session.
        inline: Ask for results in the answers.
        owner: The client; the rest is acknowledged when it is collected.
    """

    def __init__(
        self,
        transport: Transport,
        sampling_session_id: str,
        clone: int,
        *,
        inline: bool,
        owner: object | None = None,
    ) -> None:
        self._transport = transport
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone
        )
        self._inline = inline
        self._cursor = self._acknowledged = 0
        """The cursor of the last answer, and the last one sent to the server."""
        self._waiting: dict[str, _Waiter] = {}
        """By request, the oldest first."""
        self._submissions = 0
        self._open: dict[int, None] = {}
        """The numbers of submissions without a receipt, the oldest first."""
        self._early: dict[str, tuple[int, Reply | None]] = {}
        """Outcomes without a receipt, each with the number of the latest possible submission."""
        self._fetched: dict[str, None] = {}
        """Results that were fetched alone, until a poll has reported them."""
        self._empty_polls = 0
        self._rests_until = self._doubted = float("-inf")
        self._in_doubt: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_usable = True
        """False after the server has refused such polls."""
        if owner is not None:
            weakref.finalize(owner, self._flush_soon).atexit = False

    # ── submissions ───────────────────────────────────────────────────────────────────────────────

    def begin(self) -> int:
        """Note a submission; its outcome may come before its receipt."""
        self._submissions += 1
        self._open[self._submissions] = None
        return self._submissions

    def end(self, submission: int) -> None:
        """Note the end of a submission, and drop outcomes that no other can belong to."""
        del self._open[submission]
        if self._early:
            oldest = next(iter(self._open), self._submissions + 1)
            while self._early and self._early[first := next(iter(self._early))][0] < oldest:
                del self._early[first]

    def outcome(self, request_id: str) -> asyncio.Future[Reply | None]:
        """Return a future of an operation's outcome; call `forget` to give it up."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        if request_id in self._early:
            future.set_result(self._early.pop(request_id)[1])
        elif not self.is_usable or now < self._rests_until:
            future.set_result(None)
        else:
            self._waiting[request_id] = _Waiter(future, now)
            if self._task is None:
                self._task = runtime().task(self._run())
        return future

    def forget(self, request_id: str) -> None:
        """Stop waiting for an operation; without any, the poll ends."""
        self._waiting.pop(request_id, None)
        self._in_doubt.discard(request_id)
        if not self._waiting and self._task is not None:
            self._task.cancel()
            self._task = None
            self._acknowledge_later()

    def fetched(self, request_id: str, seconds: float) -> None:
        """Note that a result was fetched alone in so many seconds, to report it to the server."""
        if self.is_usable:
            self._fetched[request_id] = None
            if len(self._fetched) > MOST_FETCHED:
                del self._fetched[next(iter(self._fetched))]
            self._acknowledge_later()
        if request_id in self._in_doubt:
            self._in_doubt.remove(request_id)
            if seconds < HELD:  # it had ended before, and the poll did not report it
                self._doubt(len(self._waiting))

    # ── polls ─────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        """Poll while any sample is waited for."""
        try:
            await persist(self._turn, self._delay_after)
        except (TinkerError, ValueError) as error:
            self._give_up(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None
                self._release(len(self._waiting))
                self._acknowledge_later()

    async def _turn(self) -> tuple[bool, float] | None:
        """Poll once; return True if anything has ended, and the seconds. None: no sample waits."""
        if not self._waiting:
            return None
        sent = time.monotonic()
        is_news = await self._poll()
        if time.monotonic() - self._doubted >= DOUBT_SECONDS:
            self._doubt(DOUBTED)
        return is_news, time.monotonic() - sent

    def _delay_after(self, turn: tuple[bool, float] | Exception | None) -> float | None:
        """Return the wait before the next poll; None when no sample waits, or after a failure."""
        if turn is None or isinstance(turn, Exception):
            return None
        is_news, spent = turn
        if is_news or spent >= HELD:
            self._empty_polls = 0
            # other samples often end soon after one that ended at once
            return max(GATHER_SECONDS - spent, 0.0) if self._waiting else None
        # a server that does not hold polls must not be polled in a hot loop
        self._empty_polls += 1
        return EMPTY_POLL_DELAYS.after(self._empty_polls)

    async def _poll(self, timeout: float | None = None) -> bool:
        """Poll once and take the answer; return True if anything has ended.

        Args:
            timeout: Seconds that the server may hold the poll; None leaves that to the server.
        """
        cursor, fetched = self._cursor, list(self._fetched)
        request = FuturesRetrieveRequest(
            target=self._target,
            prev_cursor=cursor,
            timeout=timeout,
            retrieved_request_ids=fetched,
            inline_bytes=INLINE_BYTES if self._inline else None,
        )
        reply = await self._transport.poll(
            RETRIEVE_FUTURES, request, {"Accept": codec.JSON}, POLL_TIMEOUT
        )
        if reply.status >= 300 and reply.status != 408:
            raise self._transport.errors.refusal(RETRIEVE_FUTURES, reply)
        head, results = await self._read(reply)
        for request_id in fetched:
            self._fetched.pop(request_id, None)
        self._acknowledged = cursor
        is_news = head.cursor > self._cursor
        # the server was restarted, and may never report older requests
        if head.cursor < self._cursor:
            self._release(len(self._waiting))
        self._cursor = head.cursor
        for completion in head.completions:
            self._settle(completion.request_id, results.get(completion.request_id))
        return is_news

    async def _read(
        self, reply: Reply
    ) -> tuple[FuturesRetrieveResponse, dict[str, tuple[str, bytes]]]:
        if reply.status == 408:
            return FuturesRetrieveResponse(completions=[], cursor=self._cursor), {}
        if codec.BATCH not in reply.content_type:
            return self._transport.decode(RETRIEVE_FUTURES, FuturesRetrieveResponse, reply), {}
        if len(reply.body) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(codec.decode_batch, reply.body)
        return codec.decode_batch(reply.body)

    def _settle(self, request_id: str, result: tuple[str, bytes] | None) -> None:
        reply = None if result is None else Reply(200, {"content-type": result[0]}, result[1])
        waiter = self._waiting.pop(request_id, None)
        if waiter is None:
            if self._open:
                self._early[request_id] = self._submissions, reply
        elif not waiter.future.done():
            waiter.future.set_result(reply)

    # ── acknowledgements ──────────────────────────────────────────────────────────────────────────

    @property
    def _owes(self) -> bool:
        """Return whether results wait to be acknowledged."""
        return self.is_usable and (bool(self._fetched) or self._acknowledged != self._cursor)

    def _acknowledge_later(self) -> None:
        """Acknowledge results after a short time without a waiting sample."""
        if self._timer is None and self._owes:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(ACK_DELAY, self._acknowledge_now)

    def _acknowledge_now(self) -> None:
        self._timer = None
        if self._task is None and self._owes:
            self._task = runtime().task(self._acknowledge())

    async def _acknowledge(self) -> None:
        """Poll with timeout 0 until all is acknowledged; leave failures to the next poll."""
        try:
            while self._owes and not self._waiting:
                await self._poll(timeout=0.0)
        except (TinkerError, ValueError) as error:
            self._learn(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None
        if self._waiting and self._task is None:
            self._task = runtime().task(self._run())

    async def flush(self) -> None:
        """Acknowledge all results before the connections close; give up after a short time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ACK_SECONDS):
                if self._task is not None and not self._waiting:
                    await asyncio.wait({self._task})
                elif self._task is None and self._owes:
                    self._task = runtime().task(self._acknowledge())
                    await asyncio.wait({self._task})

    def _flush_soon(self) -> None:
        """Acknowledge all results after the client was collected; safe in any thread."""
        if self._owes:
            runtime().release(self.flush())

    # ── when it cannot be relied on ───────────────────────────────────────────────────────────────

    def _learn(self, error: Exception) -> None:
        """Learn from a failed poll about the server."""
        if getattr(error, "status_code", None) in NO_ENDPOINT:
            self.is_usable = False
            self._fetched.clear()
        if isinstance(error, GoneError):
            self._cursor = self._acknowledged = 0  # it was from before a restart of the server

    def _give_up(self, error: Exception) -> None:
        """Poll for results one by one for a while, after a failed poll."""
        self._learn(error)
        self._rests_until = time.monotonic() + REST_SECONDS
        logger.debug(
            "batched polling: %s; %d results are polled for one by one", error, len(self._waiting)
        )

    def _doubt(self, most: int) -> None:
        """Release the oldest waiting samples, to be polled for alone."""
        now = time.monotonic()
        stale = 0
        for waiter in self._waiting.values():
            if stale >= most or now - waiter.since < DOUBT_SECONDS:
                break
            stale += 1
        if stale:
            self._doubted = now
            self._in_doubt.update(itertools.islice(self._waiting, stale))
            self._release(stale)

    def _release(self, count: int) -> None:
        """Release the first so many waiting samples, to be polled for alone."""
        for request_id in list(itertools.islice(self._waiting, count)):
            future = self._waiting.pop(request_id).future
            if not future.done():
                future.set_result(None)
