"""Older servers: their form of a request, and of the receipt.

The newest protocol sends passes as protobuf and answers every long operation with the name of a
future. Older servers know only JSON, a separate endpoint for forward passes and fewer fields, and
may answer with the result at once.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import msgspec

from tinkex.client.futures.result_polling import Receipt, failure_of
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
"""Fields that older servers may refuse, with their default values, which are not sent."""
UNREADABLE = frozenset({400, 415, 422, 501})
"""Statuses with which a server refuses a body in an unknown form."""


def is_pass(op: Operation) -> bool:
    """Return True for an operation that the newest protocol sends as protobuf."""
    return op is protocol.FORWARD_BACKWARD


FORWARD_ONLY = replace(protocol.FORWARD, path=protocol.FORWARD_BACKWARD.path)
"""A forward pass as the newest protocol sends it: to the endpoint of all passes."""


def called(op: Operation, request: Any) -> Operation:
    """Return the operation under the name that its caller knows."""
    return FORWARD_ONLY if is_pass(op) and request.forward_only else op


def shows_dialect(op: Operation, request: Any) -> bool:
    """Return True if the answer shows the server's dialect; an empty pass is always refused."""
    return is_pass(op) and bool(request.forward_backward_input.data)


def write_pass(request: ForwardBackwardRequest, compress: bool) -> codec.Body:
    """Encode a pass as protobuf, or as JSON if the protobuf schema lacks something in it."""
    try:
        return codec.encode(request, compress=compress)
    except NotInProtobuf:
        return codec.encode(request, as_protobuf=False, compress=compress)


def for_older(op: Operation, request: Any) -> tuple[Operation, codec.Body]:
    """Encode a request for older servers: as JSON, without the newer fields."""
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
    """Read the answer to a submission, which may be the result itself."""
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
    """Return the fields of a result, by which it is recognised."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(inspect.signature(kind).parameters)


def sequence_ids(receipt: Receipt, request: SampleRequest) -> list[str]:
    """Return the ids of samples; made from the request's if the server sends none."""
    name = receipt.request_id or f"{request.sampling_session_id}:{request.seq_id}"
    return receipt.sample_sequence_ids or [
        f"{name}:{index}" for index in range(request.num_samples)
    ]
