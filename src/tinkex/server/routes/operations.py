"""The operations of the Tinker API as endpoints.

Operations beyond the limits are refused. The others are counted, and followed to their end.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from tinkex.server.access.endpoints import Access, Answer, Endpoint, Group
from tinkex.server.calls import UNKNOWN, Call
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import AUDITED, check_held
from tinkex.server.middleware import Unreadable, is_own
from tinkex.server.routes.handler_table import HANDLERS, JOURNALLED
from tinkex.server.runs.promises import Promise, size_of
from tinkex.server.state import State
from tinkex.types.checkpoints import SCHEME
from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire.protocol import HEALTHZ, OPERATIONS, PREFIX, Operation

BULKY = {"forward_backward", "forward", "asample", "stream_sample", "create_custom_loss"}
"""Operations that bring data. The bodies of all others are short."""
DETAILS = ("project_id", "ttl_seconds", "source_path", "destination_project_id")
"""Fields of requests that the audit log keeps."""
PASSES = ("forward_backward", "forward")
UNLIMITED = {"unload_model", "cancel_future"}
"""Operations that free room: they are never refused for lack of room."""
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


def operation_group() -> Group:
    """Return the operations that have a handler; for the others there is no route."""
    served = [op for op in OPERATIONS if op.name in HANDLERS]
    return Group(f"{PREFIX}/", [_endpoint(op) for op in served])


def _endpoint(op: Operation) -> Endpoint:
    return Endpoint(
        op.name,
        op.method,
        op.path,
        _answer(op),
        op.request,
        access=Access.NO_KEY if op is HEALTHZ else Access.KEY,
        is_bulky=op.name in BULKY,
        on_unreadable=_spend if op.traffic == "train" else None,
        owned_by=op.owned_by,
    )


def _answer(op: Operation) -> Answer:
    """Return the handler of an operation, with what it leaves on record."""
    handle, is_journalled = HANDLERS[op.name], op.name in JOURNALLED
    if op.result is None and op.name not in AUDITED and op.traffic not in ("train", "sample"):
        return handle

    async def answer(state: State, call: Call) -> Any:
        why = _check_room(state, op, call)
        if why is not None and op.traffic == "sample":
            raise Refusal(400, why)
        if why is not None:
            result = await _fail_in_band(state, call, why)
        else:
            result = await (state.runs.admit(call) if is_journalled else handle(state, call))
        if op.result is None:
            _audit(state, call, result)
        else:
            assert isinstance(result, UntypedAPIFuture)
            watch(state, op.name, call, state.promises.get(result.request_id))
        return result

    return answer


def _audit(state: State, call: Call, result: Any) -> None:
    run, path = call.path.get("training_run_id"), getattr(result, "tinker_path", None)
    if run is not None and "name" in call.path:
        path = f"{SCHEME}{run}/{call.path['kind']}/{call.path['name']}"
    details = {name: getattr(call.request, name) for name in DETAILS if hasattr(call.request, name)}
    if "session_id" in call.path:
        details["session_id"] = call.path["session_id"]
    state.meter.audit(call.owner, call.op, model_id=run, tinker_path=path, details=details)


async def _spend(state: State, call: Call, error: Unreadable) -> None:
    """Spend the number of a request of a run: those after it must not wait for it."""
    if error.numbered is not None and await is_own(
        state, call.owner, "model_id", error.numbered[0]
    ):
        run, seq_id = error.numbered
        if state.runs.is_loaded(run):
            await state.runs.consume_seq_id(run, seq_id, error.digest, f"{call.op}: {error}")


# ── room ──────────────────────────────────────────────────────────────────────────────────────────


def _check_room(state: State, op: Operation, call: Call) -> str | None:
    """Return the limit that a request exceeds, or None.

    Raises:
        Refusal: The same request can succeed later.
    """
    if op.traffic not in ("train", "sample") or op.name in UNLIMITED:
        return None
    state.workers.refuse_if_dead()
    if state.is_draining:
        raise Refusal(503, "this server is shutting down", headers={"Retry-After": "1"})
    limits, meter, is_sample = state.limits, state.meter, op.traffic == "sample"
    if (longest := max(_lengths(call.request), default=0)) > limits.sequence_tokens:
        return (
            f"a sequence has {longest} tokens; the limit sequence_tokens of this server is "
            f"{limits.sequence_tokens}"
        )
    if meter.open_of(call.owner) >= limits.open_requests:
        return _paused(
            f"{limits.open_requests} requests are open, which is the limit open_requests of this "
            "server",
            is_sample=is_sample,
        )
    check_held(meter.held[call.owner] + call.size, call.size, limits.held_bytes)
    unread, expected = meter.unread[call.owner], is_sample and meter.expected[call.owner]
    if unread + expected >= limits.unread_bytes:
        coming = f" and those of open requests may take {expected} more" if expected else ""
        return _paused(
            f"{unread} bytes of results wait to be read{coming}, and the limit unread_bytes of "
            f"this server is {limits.unread_bytes}; read results before you ask for more",
            is_sample=is_sample,
        )
    run = getattr(call.request, "model_id", None)
    if op.name in PASSES and run is not None and run in state.runs:
        held = state.journals.of_run(run).held_bytes
        if held >= limits.journal_bytes:
            return (
                f"the requests of this run since its last state take {held} bytes on disk, and "
                f"the limit journal_bytes of this server is {limits.journal_bytes}; take an "
                "optimizer step, or load a state"
            )
    if _creates(op.name, run):
        live = sum(live.run.owner == call.owner for live in state.runs.values())
        if live + meter.creating[call.owner] >= limits.adapters:
            return (
                f"{limits.adapters} training runs are loaded, which is the limit adapters of this "
                "server; "
                "unload one, or finish its session"
            )
    return None


def _paused(why: str, *, is_sample: bool) -> str:
    """Return a limit that is exceeded for now; samples are asked for again."""
    if is_sample:
        paused = {"queue_state": "paused_capacity", "queue_state_reason": why}
        raise Refusal(429, why, headers={"Retry-After": "1"}, fields=paused)
    return why


def _creates(operation: str, run: str | None) -> bool:
    """Return whether an operation makes a run."""
    return operation == "create_model" or (operation == "load_weights" and run is None)


async def _fail_in_band(state: State, call: Call, why: str) -> UntypedAPIFuture:
    """Return a future that fails, for a request that there is no room for; its number is spent."""
    request = call.request
    run = getattr(request, "model_id", None)
    if run is not None:
        seq_id = getattr(request, "seq_id", None)
        return await state.runs.consume_seq_id(run, seq_id, call.digest, why, call.owner)
    session_id, seq_id = (getattr(request, name, None) for name in ("session_id", "model_seq_id"))
    if session_id is None or seq_id is None:
        raise Refusal(400, why)
    await state.sessions.require(session_id)
    run = f"{session_id}:train:{seq_id}"
    request_id = f"{run}:0"
    await state.revivals.revived(run)
    known = state.promises.get(request_id)
    if known is None:  # nothing was made, so nothing need be on disk
        state.promises.add(request_id, call.digest, session_id).fail(why)
    elif known.digest not in (call.digest, UNKNOWN):
        request_id = state.promises.refuse_reused(request_id, session_id, call.digest, call.owner)
    return UntypedAPIFuture(request_id=request_id, model_id=run)


# ── counting ──────────────────────────────────────────────────────────────────────────────────────


class Watch:
    """Notes the end of one operation; its promise calls it, and it calls the one called before."""

    def __init__(self, state: State, operation: str, call: Call, before: Any) -> None:
        request, meter = call.request, state.meter
        self.meter, self.operation, self.owner, self.before = meter, operation, call.owner, before
        self.run: str | None = getattr(request, "model_id", None)
        live = state.runs.get(self.run) if self.run else None
        self.base_model = live.run.base_model if live else ""
        self.tokens = self.bound = 0
        if isinstance(request, SampleRequest):
            self.bound = _most_of(request, state.workers.longest_window)
        else:
            self.tokens = sum(_lengths(request))
        self.path: str | None = request.path if operation == "load_weights" else None
        self.creates = _creates(operation, self.run)
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
        use = (self.owner, promise.session_id, self.base_model)
        meter.count(*use, "training", self.tokens)
        path = getattr(result, "path", None) or self.path
        if path is not None:  # a nameless snapshot is no checkpoint
            meter.count(*use, "checkpoint", self.operation in SAVES)
            meter.audit(self.owner, self.operation, model_id=self.run, tinker_path=path)


def watch(state: State, operation: str, call: Call, promise: Promise | None) -> None:
    """Follow an operation that was just accepted to its end; a repeated one is followed already."""
    if promise is None or promise.done.is_set() or isinstance(promise.on_settled, Watch):
        return
    promise.on_settled = Watch(state, operation, call, promise.on_settled)


def _most_of(request: SampleRequest, window: int) -> int:
    """Estimate the most bytes that the result of a request for samples may take."""
    asked = request.sampling_params.max_tokens
    tokens = max(0, request.num_samples) * max(0, min(window, window if asked is None else asked))
    scores = _length(request.prompt) * (1 + max(0, request.topk_prompt_logprobs))
    return 8 * (tokens * (1 + max(0, request.topk_sample_logprobs)) + scores)


def _lengths(request: Any) -> list[int]:
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
