"""What servers of other ages understand: how a request is written for them, and what their receipts
look like.

The newest protocol sends passes as protobuf and answers every long operation with the name of a
future. Older servers know JSON alone, a separate endpoint for forward passes, fewer fields, and may
answer with the result at once.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tinkex.client.futures.result_polling import failure_of
from tinkex.client.http.exchange import Reply
from tinkex.client.http.transport import Transport
from tinkex.types.record import to_builtins
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import ForwardBackwardRequest, ForwardRequest, UntypedAPIFuture
from tinkex.wire import codec, protocol
from tinkex.wire.protobuf_schema import NotInProtobuf
from tinkex.wire.protocol import Operation

NEWER_FIELDS: dict[Operation, dict[str, Any]] = {
    protocol.ASAMPLE: {
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "prompt_logprobs": False,
    },
    protocol.CREATE_MODEL: {"optimizer_config": {"type": "adamw"}},
    protocol.SAVE_WEIGHTS: {"overwrite": False},
    protocol.SAVE_WEIGHTS_FOR_SAMPLER: {"kind": "snapshot"},
    protocol.OPTIM_STEP: {"type": "optim_step"},
    protocol.FORWARD_BACKWARD: {"forward_only": False},
}
"""Fields that older servers may refuse, by the values that say nothing: those are not sent to them.
"""
UNREADABLE = frozenset({400, 415, 422, 501})
"""How a server refuses a body in a form that it does not know."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a submission gave: the name of a future, or, from some servers, the result itself."""

    op: Operation
    submitted: float
    """When the submission began, on the monotonic clock."""
    request_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    result: Any = None


def is_pass(op: Operation) -> bool:
    """Whether an operation is one that the newest protocol sends as protobuf."""
    return op is protocol.FORWARD_BACKWARD


FORWARD_ONLY = replace(protocol.FORWARD, path=protocol.FORWARD_BACKWARD.path)
"""A forward pass as the newest protocol sends it: to the endpoint of all passes."""


def called(op: Operation, request: Any) -> Operation:
    """The operation under the name that its caller knows it by."""
    return FORWARD_ONLY if is_pass(op) and request.forward_only else op


def shows_dialect(op: Operation, request: Any) -> bool:
    """Whether the answer to a request tells which form a server reads: a pass over nothing is
    refused in any.
    """
    return is_pass(op) and bool(request.forward_backward_input.data)


def write_pass(request: ForwardBackwardRequest, compress: bool) -> codec.Body:
    """A pass as protobuf; as JSON when it holds something that the protobuf schema has no place
    for.
    """
    try:
        return codec.encode(request, compress=compress)
    except NotInProtobuf:
        return codec.encode(request, as_protobuf=False, compress=compress)


def for_older(op: Operation, request: Any) -> tuple[Operation, codec.Body]:
    """A request as older servers know it: JSON, without the fields that they do not."""
    if isinstance(request, ForwardBackwardRequest) and request.forward_only:
        op, request = (
            protocol.FORWARD,
            ForwardRequest(
                forward_input=request.forward_backward_input,
                model_id=request.model_id,
                seq_id=request.seq_id,
            ),
        )
    plain: dict[str, Any] = to_builtins(request)
    silent = NEWER_FIELDS.get(op, {})
    kept = {
        name: value for name, value in plain.items() if name not in silent or value != silent[name]
    }
    return op, codec.Body(msgspec.json.encode(kept))


def read_receipt(transport: Transport, op: Operation, reply: Reply, submitted: float) -> Receipt:
    """Read the answer to a submission; a result that came at once is taken as it is."""
    assert op.result is not None
    try:
        told = codec.loads(reply.body)
    except ValueError:
        told = None
    if isinstance(told, dict) and "request_id" not in told:
        if "error" in told or told.get("status") == "failed":
            raise failure_of(transport, op, told, "")
        if told.get("status") == "completed" and isinstance(told.get("result"), dict):
            told = told["result"]
            reply = msgspec.structs.replace(reply, body=msgspec.json.encode(told))
        if told.keys() & set(_fields(op.result)):
            return Receipt(op, submitted, result=transport.decode(op, op.result, reply))
    named: UntypedAPIFuture = transport.decode(op, UntypedAPIFuture, reply)
    return Receipt(op, submitted, named.request_id, named.sample_sequence_ids)


def _fields(kind: type[Any]) -> tuple[str, ...]:
    """The names by which a result is recognised."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(inspect.signature(kind).parameters)


def sequence_ids(receipt: Receipt, request: SampleRequest) -> list[str]:
    """The ids of samples; servers that give none have theirs made up of the request's."""
    name = receipt.request_id or f"{request.sampling_session_id}:{request.seq_id}"
    return receipt.sample_sequence_ids or [
        f"{name}:{index}" for index in range(request.num_samples)
    ]
