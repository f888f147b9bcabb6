"""Tensors, and the requests and results of forward_backward, in protobuf."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from tinkex.types.chunks import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
    text_chunk,
)
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.spans import SPANS, PromptProvenanceSpan, ProvenanceSpans
from tinkex.types.tensors import Array, TensorData, TensorDtype
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    in_order,
)
from tinkex.wire.pieces import Buffer, Pieces
from tinkex.wire.protobuf_schema import NotInProtobuf, message, parse

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
MAX_DATUMS = 1 << 20
"""Most datums of one result; one without tensors costs only its reader memory."""


def encode_forward_backward(request: ForwardBackwardRequest) -> Pieces:
    """ForwardBackwardRequest as bytes.

    The data are nearly all of it, and the runtime copies every array twice on its way out. So
    ordinary datums are written here, as small headers between views of the arrays, which are never
    all joined; a message may be concatenated from messages, so everything else is the runtime's.
    """
    body = request.forward_backward_input
    kind = message("ForwardBackwardRequest")
    tail = kind(loss_fn=body.loss_fn, forward_only=request.forward_only)
    for key, value in (body.loss_fn_config or {}).items():
        if isinstance(value, str):
            tail.loss_fn_config_v2[key].text = value
        else:
            tail.loss_fn_config[key] = float(value)
            tail.loss_fn_config_v2[key].number = float(value)
    parts: list[Buffer] = [
        kind(model_id=request.model_id, seq_id=request.seq_id or 0).SerializeToString()
    ]
    for datum in body.data:
        _add_datum(parts, datum)
    parts.append(tail.SerializeToString(deterministic=True))
    return Pieces(parts)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@lru_cache(1 << 14)  # a pass has thousands of fields, and many are of one size
def _delimited(field: int, size: int) -> bytes:
    """The header of a field of so many bytes."""
    return bytes((field << 3 | 2,)) + _varint(size)


_LITTLE = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "int64", "float32")}


def _view(array: Array, dtype: str) -> Array:
    """Little-endian raw bytes of an array, without a copy where it already has that form."""
    return np.ascontiguousarray(array, dtype=_LITTLE[dtype]).reshape(-1).view(np.uint8)


def _add_datum(parts: list[Buffer], datum: Datum) -> None:
    """Append a datum as field 3.

    A datum of text with dense tensors is written directly, others by the protobuf runtime.
    """
    is_plain = (
        datum.model_input_spans is None
        and datum.loss_fn_input_spans is None
        and datum.model_input.is_text
        and not any(tensor.is_sparse for tensor in datum.loss_fn_inputs.values())
    )
    if not is_plain:
        wire = message("Datum")()
        _put_datum(wire, datum)
        encoded = wire.SerializeToString(deterministic=True)
        parts += (_delimited(3, len(encoded)), encoded)
        return
    inner: list[Buffer] = []
    for chunk in datum.model_input.chunks:
        assert isinstance(chunk, EncodedTextChunk)
        tokens = _view(chunk.tokens_np, "int32")
        text = _delimited(1, len(tokens)) if len(tokens) else b""
        size = len(text) + len(tokens)
        header = _delimited(1, size)
        inner += (_delimited(1, len(header) + size) + header + text, tokens)
    for name in sorted(datum.loss_fn_inputs, key=str.encode):
        tensor = datum.loss_fn_inputs[name]
        inner += _tensor_entry(name.encode(), tensor.values, tensor.dtype, tensor.shape)
    parts.append(_delimited(3, sum(map(len, inner))))
    parts += inner


def _tensor_entry(
    name: bytes, array: Array, dtype: TensorDtype, dimensions: list[int] | None
) -> tuple[Buffer, ...]:
    """One entry of a datum's map of tensors."""
    values = _view(array, dtype)
    shape = b"".join(map(_varint, [array.size] if dimensions is None else dimensions))
    start = _delimited(1, len(values))
    end = b"\x18" + _varint(FLOAT32 if dtype == "float32" else INT64)
    if shape:
        end += _delimited(4, len(shape)) + shape
    head = (
        _delimited(1, len(name)) + name + _delimited(2, len(start) + len(values) + len(end)) + start
    )
    return _delimited(2, len(head) + len(values) + len(end)) + head, values, end


def _put_datum(target: Any, datum: Datum) -> None:
    for chunk in datum.model_input.chunks:
        match chunk:
            case EncodedTextChunk():
                target.model_input.add().encoded_text.tokens = packed(chunk.tokens_np, "int32")
            case ImageChunk():
                image = target.model_input.add().image
                image.data, image.format = chunk.data, chunk.format
                if chunk.expected_tokens is not None:
                    image.expected_tokens = chunk.expected_tokens
            case DmelChunk():
                target.model_input.add().dmel.dmel = chunk.dmel
            case ImageAssetPointerChunk():
                raise NotInProtobuf("image asset pointers have no protobuf form")
    for name, tensor in datum.loss_fn_inputs.items():
        put_tensor(target.loss_fn_inputs[name], tensor)
    _put_spans(target.model_input_spans, datum.model_input_spans)
    _put_spans(target.loss_fn_input_spans, datum.loss_fn_input_spans)


def _put_spans(target: Any, spans: ProvenanceSpans | None) -> None:
    for span in spans or ():
        wire = target.add()
        arm = wire.prompt_tokens if isinstance(span, PromptProvenanceSpan) else wire.sampled_tokens
        arm.sequence_id, arm.offset, arm.length = span.sequence_id, span.offset, span.length


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """ForwardBackwardRequest from bytes."""
    wire = parse("ForwardBackwardRequest", body)
    config: dict[str, float | str] = dict(wire.loss_fn_config)
    for key, value in wire.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise ValueError(f"malformed protobuf: loss_fn_config_v2[{key!r}] has no value")
        config[key] = getattr(value, kind)
    return ForwardBackwardRequest(
        model_id=wire.model_id,
        seq_id=wire.seq_id or None,
        forward_only=wire.forward_only,
        forward_backward_input=ForwardBackwardInput(
            data=[_get_datum(item, index) for index, item in enumerate(wire.data)],
            loss_fn=wire.loss_fn,
            loss_fn_config=config or None,
        ),
    )


def _get_datum(source: Any, index: int) -> Datum:
    chunks = [_get_chunk(chunk, index) for chunk in source.model_input]
    tensors = {
        name: get_tensor(tensor, f"data[{index}].loss_fn_inputs[{name!r}]")
        for name, tensor in source.loss_fn_inputs.items()
    }
    model_input = ModelInput(chunks=chunks)
    if not source.model_input_spans and not source.loss_fn_input_spans:
        return Datum(model_input, tensors)
    try:
        spans = (_get_spans(source.model_input_spans), _get_spans(source.loss_fn_input_spans))
        if not model_input.is_text:  # how many positions media take, only the model knows
            return Datum(model_input, tensors, *spans)
        return Datum(model_input, tensors).with_provenance(*spans)
    except ValueError as error:
        raise ValueError(f"malformed protobuf: data[{index}]: {error}") from None


def _get_spans(source: Any) -> ProvenanceSpans:
    spans: ProvenanceSpans = []
    for wire in source:
        if (kind := wire.WhichOneof("span")) is None:
            raise ValueError("a provenance span is empty")
        span = getattr(wire, kind)
        spans.append(
            SPANS[kind](sequence_id=span.sequence_id, offset=span.offset, length=span.length)
        )
    return spans


def _get_chunk(source: Any, index: int) -> ModelInputChunk:
    match source.WhichOneof("chunk"):
        case "encoded_text":
            tokens = unpacked(source.encoded_text.tokens, "int32", f"data[{index}].model_input")
            return text_chunk(tokens)
        case "image":
            expected = (
                source.image.expected_tokens if source.image.HasField("expected_tokens") else None
            )
            return ImageChunk(
                data=source.image.data, format=source.image.format, expected_tokens=expected
            )
        case "dmel":
            return DmelChunk(dmel=source.dmel.dmel)
    raise ValueError(f"malformed protobuf: data[{index}].model_input has an empty chunk")


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """ForwardBackwardOutput as bytes: one record that batches all datums."""
    wire = message("ForwardBackwardOutput")(loss_fn_output_type=output.loss_fn_output_type)
    record = wire.loss_fn_outputs.add(num_datums=len(output.loss_fn_outputs))
    for name in output.loss_fn_outputs[0] if output.loss_fn_outputs else ():
        _put_batch(record.fields[name], [item[name] for item in output.loss_fn_outputs])
    for key, value in output.metrics.items():
        wire.metrics[key] = value
    encoded: bytes = wire.SerializeToString(deterministic=True)
    return encoded


def _put_batch(target: Any, tensors: list[TensorData]) -> None:
    dtype, shape = tensors[0].dtype, tensors[0].shape
    target.data = packed(
        np.concatenate([tensor.to_numpy().reshape(-1) for tensor in tensors]), dtype
    )
    sizes = np.array([0, *(tensor.to_numpy().nbytes for tensor in tensors)], dtype=np.int64)
    target.offsets = packed(np.cumsum(sizes), "int64")
    target.dtype = FLOAT32 if dtype == "float32" else INT64
    if shape is not None and len(shape) > 1:
        target.trailing_shape.extend(shape[1:])


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """ForwardBackwardOutput from bytes; the tensors are views of one buffer per field."""
    wire = parse("ForwardBackwardOutput", body)
    outputs: list[dict[str, TensorData]] = []
    for record in wire.loss_fn_outputs:
        fields = {name: _get_batch(field, name) for name, field in record.fields.items()}
        count = record.num_datums or max((len(rows) for rows in fields.values()), default=0)
        if any(len(rows) != count for rows in fields.values()):
            raise ValueError(
                "malformed protobuf: the fields of a result differ in their number of datums"
            )
        if not 0 <= count <= MAX_DATUMS:
            raise ValueError(f"malformed protobuf: a result of {count} datums")
        outputs.extend({name: rows[i] for name, rows in fields.items()} for i in range(count))
    kind = wire.loss_fn_output_type.rsplit(":", 1)[-1]
    # the map itself keeps no order
    return ForwardBackwardOutput(kind, outputs, in_order(wire.metrics))


def _get_batch(source: Any, name: str) -> list[TensorData]:
    values, dtype = _values(source.data, source.dtype, f"result field {name!r}")
    width = 2 if source.dtype == BFLOAT16 else 4 if source.dtype in (FLOAT32, INT32) else 8
    offsets = unpacked(source.offsets, "int64", f"offsets of result field {name!r}")
    bounds = (offsets // width).tolist()
    if (
        not bounds
        or bounds[0] < 0
        or bounds[-1] > values.size
        or any(a > b for a, b in pairwise(bounds))
    ):
        raise ValueError(f"malformed protobuf: offsets of result field {name!r}")
    trailing = list(source.trailing_shape)
    row = int(np.prod(trailing, dtype=np.int64)) if trailing else 1
    return [
        TensorData(values[a:b], dtype, [(b - a) // row if row else 0, *trailing])
        for a, b in pairwise(bounds)
    ]


def packed(array: Array | Sequence[float | None], dtype: str) -> bytes:
    """Return little-endian bytes of an array, or of a list in which None means NaN."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain.tobytes() if sys.byteorder == "little" else plain.astype(f"<{dtype}").tobytes()


def unpacked(body: bytes, dtype: str, what: str) -> Array:
    """Return the array of raw bytes, without a copy."""
    size = np.dtype(dtype).itemsize
    if len(body) % size:
        raise ValueError(
            f"malformed protobuf: {what} has {len(body)} bytes, not a multiple of {size}"
        )
    return np.frombuffer(body, dtype=np.dtype(dtype).newbyteorder("<"))


def put_tensor(target: Any, tensor: TensorData) -> None:
    """Write a tensor into a Tensor message."""
    values = packed(tensor.values, tensor.dtype)
    if (csr := tensor.csr) is not None:
        target.sparse_csr.values = values
        target.sparse_csr.crow_indices = packed(csr[0], "int64")
        target.sparse_csr.col_indices = packed(csr[1], "int64")
    else:
        target.dense = values
    target.dtype = FLOAT32 if tensor.dtype == "float32" else INT64
    target.shape.extend(tensor.shape if tensor.shape is not None else [tensor.values.size])


def _values(body: bytes, dtype: int, what: str) -> tuple[Array, TensorDtype]:
    """Read raw values as int64 or float32, widening the two narrower kinds."""
    match dtype:
        case 1:
            return unpacked(body, "float32", what), "float32"
        case 2:
            return unpacked(body, "int64", what), "int64"
        case 3:
            return unpacked(body, "int32", what).astype(np.int64), "int64"
        case 4:
            widened = unpacked(body, "uint16", what).astype(np.uint32) << 16
            return widened.view(np.float32), "float32"
    raise ValueError(f"malformed protobuf: {what} has no known dtype")


def get_tensor(source: Any, what: str) -> TensorData:
    """Read a Tensor message."""
    encoding = source.WhichOneof("encoding")
    if encoding is None:
        raise ValueError(f"malformed protobuf: {what} has no values")
    sparse = source.sparse_csr if encoding == "sparse_csr" else None
    values, dtype = _values(source.dense if sparse is None else sparse.values, source.dtype, what)
    crow = None if sparse is None else unpacked(sparse.crow_indices, "int64", what)
    col = None if sparse is None else unpacked(sparse.col_indices, "int64", what)
    try:
        return TensorData(values, dtype, list(source.shape) or None, crow, col)
    except ValueError as error:
        raise ValueError(f"malformed protobuf: {what}: {error}") from None
