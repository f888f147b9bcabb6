"""The operations of the Tinker API as endpoints."""

from __future__ import annotations

from typing import Any

from tinkex.server.access.bodies import Unreadable
from tinkex.server.access.endpoints import Access, Answer, Endpoint, Group
from tinkex.server.access.ownership import is_own
from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import AUDITED
from tinkex.server.routes.handler_table import HANDLERS, JOURNALLED
from tinkex.server.runs.metering import check_room, fail_in_band, watch
from tinkex.server.state import State
from tinkex.types.checkpoints import SCHEME
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire.protocol import HEALTHZ, OPERATIONS, PREFIX, Operation

BULKY = {"forward_backward", "forward", "asample", "stream_sample", "create_custom_loss"}
"""Operations that bring data. The bodies of all others are short."""
DETAILS = ("project_id", "ttl_seconds", "source_path", "destination_project_id")
"""Fields of requests that the audit log keeps."""


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
        why = check_room(state, op, call)
        if why is not None and op.traffic == "sample":
            raise Refusal(400, why)
        if why is not None:
            result = await fail_in_band(state, op, call, why)
        else:
            result = await (state.runs.admit(call) if is_journalled else handle(state, call))
        if op.result is None:
            _audit(state, call, result)
        else:
            assert isinstance(result, UntypedAPIFuture)
            watch(state, op.name, call, result.request_id)
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
