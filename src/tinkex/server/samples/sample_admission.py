"""Samples are taken: each request is on disk with its seed before it is acknowledged."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable

from tinkex.server.calls import READ, Call
from tinkex.server.database.interface import Sampler
from tinkex.server.parts import Parts
from tinkex.server.runs.journal import Entry
from tinkex.server.runs.promises import Promise, Target, fail_again
from tinkex.server.samples.sampler_weights import WeightSource
from tinkex.server.samples.samplers import Samplers
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import UntypedAPIFuture

CLONE = 1_000_000_000
"""Each client of a sampling session numbers its requests in a block of its own."""


class Samples:
    """The samples of each session that may still be asked for."""

    def __init__(self, parts: Parts, samplers: Samplers) -> None:
        self._journals, self._promises = parts.journals, parts.promises
        self._workers = parts.workers
        self._sessions, self._samplers = parts.sessions, samplers
        self.numbers: dict[str, dict[str, int]] = {}
        """By session, the samples in its journal and their numbers there."""

    async def admit(self, call: Call, on_taken: Callable[[Promise], object]) -> UntypedAPIFuture:
        """Take a request: a repeated number gives the original receipt, and draws nothing.

        `on_taken` is called with the promise once it is on disk: it may have been drawn by then,
        and end at once.
        """
        request: SampleRequest = call.request
        sampler = await self._samplers.named(request, call.owner)
        number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
        request_id = f"{sampler.sampler_id}:{number}"
        target = _target_of(sampler, request)
        known = self._promises.get(request_id)
        if known is not None and known.digest != call.digest:
            request_id = self._promises.refuse_reused(
                request_id, sampler.session_id, call.digest, call.owner, target
            )
        elif known is not None:
            if known.recorded is not None:
                await asyncio.shield(known.recorded)
        elif not self._promises.is_gone(request_id):  # a late repetition draws nothing either
            is_waiting = self._workers.waiting_for(sampler.base_model) is not None
            source = None if is_waiting else await self._samplers.find(sampler)
            # the same request may have come twice while weights were sought
            if self._promises.get(request_id) is None:
                taken = self._begin(call, request_id, sampler, source)
                await self._take(call, *taken, on_taken)
        return UntypedAPIFuture(
            request_id=request_id,
            sample_sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
        )

    async def admit_again(self, call: Call, request_id: str, failed: Entry | None = None) -> None:
        """Draw a sample again that a journal has; one that failed fails again."""
        sampler = await self._samplers.named(call.request, call.owner, request_id)
        if failed is not None:
            assert call.number is not None
            self.numbers.setdefault(sampler.session_id, {})[request_id] = call.number
            target = _target_of(sampler, call.request)
            promise = self._promises.add(
                request_id, call.digest, sampler.session_id, target, owner=call.owner
            )
            fail_again(promise, failed)
            return
        source = await self._samplers.find(sampler)
        if self._promises.get(request_id) is None and not self._promises.is_gone(request_id):
            self._promises.follow(*self._begin(call, request_id, sampler, source))

    def _begin(
        self, call: Call, request_id: str, sampler: Sampler, source: WeightSource | None
    ) -> tuple[Promise, asyncio.Future[SampleResponse]]:
        """Promise a sample, and draw it.

        A sample changes nothing, so it need not wait for the disk; its receipt does, and all
        readers of its result.
        """
        request, session_id = call.request, sampler.session_id
        if request.record_stability_info and session_id not in self._sessions:
            # it could not be trained on
            request = request.model_copy(update={"record_stability_info": None})
        if call.seed is None:
            seed = request.sampling_params.seed
            call.seed = secrets.randbits(63) if seed is None else seed
        if call.number is None:
            call.number = time.time_ns()
        self.numbers.setdefault(session_id, {})[request_id] = call.number
        target = _target_of(sampler, request)
        promise = self._promises.add(
            request_id,
            call.digest,
            session_id,
            target,
            functools.partial(self._samplers.cancel, request_id),
            call.owner,
        )
        promise.place = self._journals.of_samples(session_id), call.number
        drawing = asyncio.ensure_future(
            self._samplers.draw(request_id, sampler, source, request, call.seed, owner=call.owner)
        )
        self._promises.keep(drawing)
        return promise, drawing

    async def _take(
        self,
        call: Call,
        promise: Promise,
        drawing: asyncio.Future[SampleResponse],
        on_taken: Callable[[Promise], object],
    ) -> None:
        """Put a request on disk with the seed that is used for it, and follow the sample."""

        def begin() -> None:
            on_taken(promise)
            self._promises.follow(promise, drawing)

        journal, cancel = self._journals.of_samples(promise.session_id), promise.cancel
        assert call.number is not None
        try:
            await self._promises.take(promise, journal, call.number, call, begin)
        except Exception:
            # the sample was not taken, and its failure has no reader
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


def _target_of(sampler: Sampler, request: SampleRequest) -> Target:
    """Return the client whose log a sample is noted in."""
    return sampler.sampler_id, (request.seq_id or 0) // CLONE
