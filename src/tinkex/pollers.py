"""One poll for all samples of a client: it asks which have ended, and the results of many come in one answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Iterator

from tinkex import codec
from tinkex.errors import TinkerError
from tinkex.futures import POLL_TIMEOUT
from tinkex.protocol import RETRIEVE_FUTURES
from tinkex.runtime import runtime
from tinkex.transport import OFF_LOOP_BYTES, Reply, Transport, backoff
from tinkex.types.sessions import FuturesRetrieveRequest, FuturesRetrieveResponse, SamplingSessionFuturesTarget

logger = logging.getLogger("tinkex")

INLINE_BYTES = 4 << 20
"""How much of results one answer may bring along; what is larger is fetched by itself."""
HURRIED = 0.02
"""A poll that comes back empty sooner than this is not repeated at once."""


class BatchPoller:
    """Waits for the samples of one client together.

    `await poller.outcome(request_id)` gives the reply that holds a result, or None when it has to be fetched by
    itself: it is too large, the server brings none along, or the poll failed. It polls only while somebody waits.
    """

    def __init__(self, transport: Transport, sampling_session_id: str, clone: int, *, inline: bool) -> None:
        self._transport = transport
        self._target = SamplingSessionFuturesTarget(sampling_session_id=sampling_session_id, cloned_sampler_id=clone)
        self._inline = inline
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[Reply | None]] = {}
        self._ended: dict[str, Reply | None] = {}
        """Outcomes that came before their receipts did."""
        self._submitting = 0
        self._fetched: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self.is_usable = True

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Around a submission and the call of `outcome` for it: what ends in between is kept for it."""
        self._submitting += 1
        try:
            yield
        finally:
            self._submitting -= 1
            if not self._submitting:
                self._ended.clear()  # nobody is left who could ask for these

    def outcome(self, request_id: str) -> asyncio.Future[Reply | None]:
        """Wait for an operation to end."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        if request_id in self._ended:
            future.set_result(self._ended.pop(request_id))
        elif not self.is_usable:
            future.set_result(None)
        else:
            self._waiting[request_id] = future
            if self._task is None:
                self._task = runtime().task(_run(weakref.ref(self)))
        return future

    async def turn(self) -> bool:
        """One poll; False when nobody waits any more."""
        self._waiting = {name: future for name, future in self._waiting.items() if not future.done()}
        if not self._waiting:
            self._task = None
            return False
        fetched, self._fetched = self._fetched, []
        request = FuturesRetrieveRequest(
            target=self._target,
            prev_cursor=self._cursor,
            retrieved_request_ids=fetched,
            inline_bytes=INLINE_BYTES if self._inline else None,
        )
        sent = time.monotonic()
        try:
            reply = await self._transport.poll(RETRIEVE_FUTURES, request, {"Accept": codec.JSON}, POLL_TIMEOUT)
            if reply.status >= 300 and reply.status != 408:
                raise self._transport.refusal(RETRIEVE_FUTURES, reply)
            head, results = await self._read(reply)
        except TinkerError as error:
            self._give_up(error)
            return False
        if head.cursor < self._cursor:  # the server has begun anew: what was asked for may never be mentioned again
            self._release()
        self._cursor = head.cursor
        for completion in head.completions:
            self._settle(completion.request_id, results.get(completion.request_id))
        if not head.completions and time.monotonic() - sent < HURRIED:
            await asyncio.sleep(backoff(1, first=0.05))
        return True

    async def _read(self, reply: Reply) -> tuple[FuturesRetrieveResponse, dict[str, tuple[str, bytes]]]:
        if reply.status == 408:
            return FuturesRetrieveResponse(completions=[], cursor=self._cursor), {}
        if codec.BATCH not in reply.content_type:
            return self._transport.decode(RETRIEVE_FUTURES, FuturesRetrieveResponse, reply), {}
        if len(reply.body) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(codec.decode_batch, reply.body)
        return codec.decode_batch(reply.body)

    def _settle(self, request_id: str, result: tuple[str, bytes] | None) -> None:
        reply = None if result is None else Reply(200, {"content-type": result[0]}, result[1])
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(reply)
        elif self._submitting:
            self._ended[request_id] = reply

    def fetched(self, request_id: str) -> None:
        """Note that a result was fetched by itself, so that the server can forget it."""
        self._fetched.append(request_id)

    def _give_up(self, error: TinkerError) -> None:
        """Batched polling is a convenience: when it fails, each result is polled for by itself."""
        status = getattr(error, "status_code", None)
        if status in (404, 405, 501):
            self.is_usable = False
        logger.debug("batched polling: %s; %d results are polled for one by one", error, len(self._waiting))
        self._task = None
        self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)


async def _run(reference: weakref.ref[BatchPoller]) -> None:
    """Poll while somebody waits; the poller itself may be dropped meanwhile."""
    while (poller := reference()) is not None:
        turn = poller.turn()
        del poller
        if not await turn:
            return
