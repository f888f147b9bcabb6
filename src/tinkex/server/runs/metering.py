"""Refuse operations beyond the limits; count the others, and follow each to its end."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Awaitable, Iterator
from typing import Any

from tinkex.server.calls import Call
from tinkex.server.database.interface import Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import check_held
from tinkex.server.runs.call_records import UNKNOWN
from tinkex.server.runs.encoded_results import most_of, size_of
from tinkex.server.runs.promises import Promise
from tinkex.server.state import State
from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.inputs import ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire.protocol import Operation

PASSES = ("forward_backward", "forward")
UNLIMITED = {"unload_model", "cancel_future"}
"""Operations that free room: they are never refused for lack of room."""
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


def check_room(state: State, op: Operation, call: Call) -> str | None:
    """Return the limit that a request exceeds, or None.

    Raises:
        Refusal: The same request can succeed later.
    """
    if op.traffic not in ("train", "sample") or op.name in UNLIMITED:
        return None
    state.workers.refuse_if_dead()
    if state.is_draining:
        raise Refusal(503, "this server is shutting down", headers={"Retry-After": "1"})
    limits = state.limits
    if (longest := max(lengths(call.request), default=0)) > limits.sequence_tokens:
        return (
            f"a sequence has {longest} tokens; the limit sequence_tokens of this server is "
            f"{limits.sequence_tokens}"
        )
    if state.meter.open_of(call.owner) >= limits.open_requests:
        why = (
            f"{limits.open_requests} requests are open, which is the limit open_requests of this "
            "server"
        )
        if op.traffic == "sample":
            paused = {"queue_state": "paused_capacity", "queue_state_reason": why}
            raise Refusal(429, why, headers={"Retry-After": "1"}, fields=paused)
        return why
    check_held(state.meter.held[call.owner] + call.size, call.size, limits.held_bytes)
    unread, expected = state.meter.unread[call.owner], state.meter.expected[call.owner]
    if op.traffic == "sample" and unread + expected >= limits.unread_bytes:
        coming = f" and those of open requests may take {expected} more" if expected else ""
        why = _unread(unread, coming, limits.unread_bytes)
        paused = {"queue_state": "paused_capacity", "queue_state_reason": why}
        raise Refusal(429, why, headers={"Retry-After": "1"}, fields=paused)
    if unread >= limits.unread_bytes:
        return _unread(unread, "", limits.unread_bytes)
    if op.name in PASSES and (model_id := call.request.model_id) in state.runs:
        held = state.journals.of_run(model_id).held_bytes
        if held >= limits.journal_bytes:
            return (
                f"the requests of this run since its last state take {held} bytes on disk, and "
                f"the limit journal_bytes of this server is {limits.journal_bytes}; take an "
                "optimizer step, or load a state"
            )
    if op.name == "create_model" or (op.name == "load_weights" and call.request.model_id is None):
        live = sum(live.run.owner == call.owner for live in state.runs.values())
        if live + state.meter.creating[call.owner] >= limits.adapters:
            return (
                f"{limits.adapters} training runs are loaded, which is the limit adapters of this "
                "server; "
                "unload one, or finish its session"
            )
    return None


def _unread(unread: int, coming: str, limit: int) -> str:
    return (
        f"{unread} bytes of results wait to be read{coming}, and the limit unread_bytes of this "
        f"server is {limit}; "
        "read results before you ask for more"
    )


async def fail_in_band(state: State, op: Operation, call: Call, why: str) -> UntypedAPIFuture:
    """Return a future that fails, for a request that there is no room for; its number is spent."""
    request = call.request
    model_id = getattr(request, "model_id", None)
    if model_id is not None:
        seq_id = getattr(request, "seq_id", None)
        return await state.runs.consume_seq_id(model_id, seq_id, call.digest, why, call.owner)
    if (
        getattr(request, "session_id", None) is None
        or getattr(request, "model_seq_id", None) is None
    ):
        raise Refusal(400, why)
    await state.sessions.require(request.session_id)
    model_id = f"{request.session_id}:train:{request.model_seq_id}"
    request_id = f"{model_id}:0"
    await state.revivals.revived(model_id)
    known = state.promises.get(request_id)
    if known is None:  # nothing was made, so nothing need be on disk
        state.promises.add(request_id, call.digest, request.session_id).fail(why)
    elif known.digest not in (call.digest, UNKNOWN):
        request_id = state.promises.refuse_reused(
            request_id, request.session_id, call.digest, call.owner
        )
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


# ── counting ──────────────────────────────────────────────────────────────────────────────────────


class Watch:
    """Notes the end of one operation; its promise calls it, and it calls the one called before."""

    def __init__(self, state: State, operation: str, call: Call, before: Any) -> None:
        request, meter = call.request, state.meter
        self.meter, self.operation, self.owner, self.before = meter, operation, call.owner, before
        self.model_id: str | None = getattr(request, "model_id", None)
        live = state.runs.get(self.model_id) if self.model_id else None
        self.base_model = live.run.base_model if live else ""
        self.tokens = self.bound = 0
        if isinstance(request, SampleRequest):
            self.bound = most_of(request, state.workers.longest_window)
        else:
            self.tokens = sum(lengths(request))
        is_load = operation == "load_weights"
        self.path: str | None = request.path if is_load else None
        self.creates = operation == "create_model" or (is_load and self.model_id is None)
        self.began, self.size = time.time(), call.size
        meter.open[self.owner, operation] += 1
        meter.expected[self.owner] += self.bound
        meter.held[self.owner] += self.size
        if self.creates:
            meter.creating[self.owner] += 1

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
    promise.on_settled = Watch(state, operation, call, promise.on_settled)


def lengths(request: Any) -> list[int]:
    """Return the lengths of the sequences of a request; 0 for an unknown one."""
    if isinstance(request, SampleRequest):
        return [_length(request.prompt)]
    body = getattr(request, "forward_backward_input", None) or getattr(
        request, "forward_input", None
    )
    return [_length(datum.model_input) for datum in body.data] if body is not None else []


def _length(model_input: ModelInput) -> int:
    try:
        return model_input.length
    except ValueError:  # an image without its number of tokens, which the engine refuses
        return 0


@contextlib.contextmanager
def streaming(state: State, owner: str, sampler: Sampler) -> Iterator[None]:
    """Note the time of a sample that has no promise."""
    name, began, error = "stream_sample", time.time(), None
    state.meter.open[owner, name] += 1
    try:
        yield
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        state.meter.open[owner, name] -= 1
        request_id = f"{sampler.sampler_id}:{name}:{began}"
        state.meter.span(sampler.session_id, request_id, name, began, error)


async def metered(
    state: State,
    owner: str,
    sampler: Sampler,
    request: SampleRequest,
    drawing: Awaitable[SampleResponse],
) -> SampleResponse:
    """Return a sample, and count its tokens."""
    response = await drawing
    use = (owner, sampler.session_id, sampler.base_model)
    state.meter.count(*use, "prefill", _length(request.prompt))
    state.meter.count(*use, "sample", sum(sequence.length for sequence in response.sequences))
    return response
