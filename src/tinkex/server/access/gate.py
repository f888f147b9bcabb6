"""Limits that are checked before a handler runs."""

from __future__ import annotations

from typing import Any

from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.runs.call_records import UNKNOWN
from tinkex.server.runs.metering import lengths
from tinkex.server.state import State
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire.protocol import Operation

PASSES = ("forward_backward", "forward")
UNLIMITED = {"unload_model"}
"""Operations that free room: they are never refused for lack of room."""


def check_room(state: State, op: Operation, call: Call) -> str | None:
    """Return the limit that a request exceeds, or None.

    Raises:
        Refusal: The same request can succeed later.
    """
    if op.traffic not in ("train", "sample") or op.name in UNLIMITED or op.name == "cancel_future":
        return None
    state.workers.refuse_if_dead()
    if state.is_draining:
        raise Refusal(503, "this server is shutting down", headers={"Retry-After": "1"})
    limits = state.limits
    if (longest := _longest(call.request)) > limits.sequence_tokens:
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
    if (
        op.name in PASSES
        and (held := _journalled(state, call.request.model_id)) >= limits.journal_bytes
    ):
        return (
            f"the requests of this run since its last state take {held} bytes on disk, and the "
            "limit journal_bytes of "
            f"this server is {limits.journal_bytes}; take an optimizer step, or load a state"
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


def check_held(held: int, size: int, limit: int) -> None:
    """Refuse a request, to be sent again later, if its owner's requests take too much memory.

    A single request may take more than the limit.
    """
    if held > limit and held > size:
        raise Refusal(
            429,
            f"{held - size} bytes of other requests arrive or have not ended, and the limit "
            "held_bytes of this server "
            f"is {limit}; send this one again later",
            headers={"Retry-After": "1"},
        )


def _journalled(state: State, model_id: str) -> int:
    return state.journals.of_run(model_id).held_bytes if model_id in state.runs else 0


def _unread(unread: int, coming: str, limit: int) -> str:
    return (
        f"{unread} bytes of results wait to be read{coming}, and the limit unread_bytes of this "
        f"server is {limit}; "
        "read results before you ask for more"
    )


def _longest(request: Any) -> int:
    if isinstance(request, SampleRequest):
        try:
            return int(request.prompt.length)
        except ValueError:
            return 0
    return max(lengths(request), default=0)


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
