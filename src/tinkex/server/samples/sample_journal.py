"""The journals of samples: each request is on disk with its seed before it is acknowledged."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinkex.server.calls import Call
from tinkex.server.runs.call_records import READ
from tinkex.server.runs.journals import Journals
from tinkex.server.runs.promises import Promise, Promises


class SampleJournal:
    """The samples of each session that may still be asked for."""

    def __init__(self, journals: Journals, promises: Promises) -> None:
        self._journals, self._promises = journals, promises
        self.numbers: dict[str, dict[str, int]] = {}
        """By session, the samples in its journal and their numbers there."""

    async def take(
        self,
        promise: Promise,
        call: Call,
        draw: Callable[[int], Awaitable[Any]],
        on_taken: Callable[[], object],
    ) -> None:
        """Put a request on disk with the seed that is used for it, and draw meanwhile.

        A sample changes nothing, so it need not wait for the disk; its receipt does, and all
        readers of its result.
        """
        if call.seed is None:
            seed = call.request.sampling_params.seed
            call.seed = secrets.randbits(63) if seed is None else seed
        if call.number is None:
            call.number = time.time_ns()
        self.numbers.setdefault(promise.session_id, {})[promise.request_id] = call.number
        drawing = asyncio.ensure_future(draw(call.seed))
        self._promises.keep(drawing)
        if call.recorded is not None:
            self._promises.follow(promise, drawing)
            return

        def begin() -> None:
            on_taken()  # it may have been drawn, and end at once
            self._promises.follow(promise, drawing)

        journal, cancel = self._journals.of_samples(promise.session_id), promise.cancel
        try:
            await self._promises.take(promise, journal, call.number, call, begin)
        except Exception:
            # the sample was not taken, and nobody hears of its failure
            drawing.add_done_callback(lambda done: done.cancelled() or done.exception())
            if cancel is not None:
                cancel()
            raise

    async def note_read(self) -> None:
        """Record which results have reached their readers, and drop what is over."""
        for session_id, numbers in list(self.numbers.items()):
            over = [request_id for request_id in numbers if self._promises.is_over(request_id)]
            # the session may have ended while another's was written
            if not over or session_id not in self.numbers:
                continue
            journal = self._journals.of_samples(session_id)
            for request_id in over:
                del numbers[request_id]
            await journal.append(time.time_ns(), {"op": READ, "ids": over})
            journal.drop_until(min(numbers.values(), default=time.time_ns()) - 1)

    def forget_session(self, session_id: str) -> None:
        """Forget the samples of a session; its journal goes with its directory."""
        self.numbers.pop(session_id, None)
