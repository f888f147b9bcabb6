"""Count operations that were taken, and follow each to its end."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from tinkex.server.calls import Call
from tinkex.server.database.entities import Sampler
from tinkex.server.meter import Meter
from tinkex.server.runs.encoded_results import most_of, size_of
from tinkex.server.runs.promises import Promise
from tinkex.server.state import State
from tinkex.types.sampling import SampleRequest, SampleResponse
from tinkex.types.sessions import RequestFailedResponse

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


@dataclass(slots=True)
class Watch:
    """Notes the end of one operation; its promise calls it, and it calls the one called before."""

    meter: Meter
    operation: str
    owner: str
    model_id: str | None
    base_model: str
    tokens: int
    path: str | None
    creates: bool
    began: float
    bound: int
    size: int
    """Bytes of the request, once it is expanded."""
    before: Any

    def __call__(self, promise: Promise) -> None:
        """Note how the operation ended, and call the next."""
        if self.before is not None:
            self.before(promise)
        meter, result = self.meter, promise.result
        meter.open[self.owner, self.operation] -= 1
        meter.expected[self.owner] -= self.bound
        meter.let_go(self.owner, self.size)
        if waiting := size_of(result):
            meter.unread[self.owner] += waiting
            promise.on_read = functools.partial(meter.was_read, self.owner, waiting)
        if self.creates:
            meter.creating[self.owner] -= 1
        failed = result.error if isinstance(result, RequestFailedResponse) else None
        meter.span(promise.session_id, promise.request_id, self.operation, self.began, failed)
        if failed is not None:
            return
        meter.count(self.owner, promise.session_id, self.base_model, "training", self.tokens)
        path = getattr(result, "path", None) or self.path
        if path is not None:  # a nameless snapshot is no checkpoint
            meter.count(
                self.owner,
                promise.session_id,
                self.base_model,
                "checkpoint",
                self.operation in SAVES,
            )
            meter.audit(self.owner, self.operation, model_id=self.model_id, tinker_path=path)


def watch(state: State, operation: str, call: Call, request_id: str) -> None:
    """Follow an operation that was just accepted to its end; a repeated one is followed already."""
    promise = state.promises.get(request_id)
    if promise is None or promise.done.is_set() or isinstance(promise.on_settled, Watch):
        return
    request, meter = call.request, state.meter
    model_id = getattr(request, "model_id", None)
    live = state.runs.get(model_id) if model_id else None
    creates = operation == "create_model" or (operation == "load_weights" and model_id is None)
    bound = (
        most_of(request, state.workers.longest_window) if isinstance(request, SampleRequest) else 0
    )
    promise.on_settled = Watch(
        meter,
        operation,
        call.owner,
        model_id,
        live.run.base_model if live else "",
        sum(lengths(request)),
        request.path if operation == "load_weights" else None,
        creates,
        time.time(),
        bound,
        call.size,
        promise.on_settled,
    )
    meter.open[call.owner, operation] += 1
    meter.expected[call.owner] += bound
    meter.held[call.owner] += call.size
    if creates:
        meter.creating[call.owner] += 1


def lengths(request: Any) -> list[int]:
    """Return the lengths of the sequences of a training request; 0 for an unknown one."""
    body = getattr(request, "forward_backward_input", None) or getattr(
        request, "forward_input", None
    )
    return [_length(datum.model_input) for datum in body.data] if body is not None else []


def _length(model_input: Any) -> int:
    try:
        return int(model_input.length)
    except ValueError:  # an image without its number of tokens, which the engine refuses
        return 0


async def metered_stream(
    state: State,
    call: Call,
    sampler: Sampler,
    request: SampleRequest,
    drawing: Awaitable[SampleResponse],
) -> SampleResponse:
    """Return a sample that has no promise; note its time and its tokens."""
    name, began, error = "stream_sample", time.time(), None
    state.meter.open[call.owner, name] += 1
    try:
        return await metered(state, call, sampler, request, drawing)
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        state.meter.open[call.owner, name] -= 1
        state.meter.span(
            sampler.session_id, f"{sampler.sampler_id}:{name}:{began}", name, began, error
        )


async def metered(
    state: State,
    call: Call,
    sampler: Sampler,
    request: SampleRequest,
    drawing: Awaitable[SampleResponse],
) -> SampleResponse:
    """Return a sample, and count its tokens."""
    response = await drawing
    session = sampler.session_id
    state.meter.count(call.owner, session, sampler.base_model, "prefill", _length(request.prompt))
    drawn = sum(sequence.length for sequence in response.sequences)
    state.meter.count(call.owner, session, sampler.base_model, "sample", drawn)
    return response
