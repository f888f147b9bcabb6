"""The protobuf half of the wire: the schema as a table, and conversions of three messages.

The messages are built at run time in a private descriptor pool, so no generated code can fall
behind the installed runtime. Packed arrays are little-endian raw bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from tinkex.types.inputs import (
    SPANS,
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    ProvenanceSpans,
    text_chunk,
)
from tinkex.types.sampling import (
    EMPTY_CELL,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkList,
    TopkLogprobs,
)
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    in_order,
)

PACKAGE = "tinker_public"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1
Buffer: TypeAlias = Any
"""Bytes, or an array of bytes; an array, unlike a memoryview, costs the garbage collector nothing.
"""


class Pieces:
    """Bytes in many buffers, joined piece by piece while they are sent; `bytes()` joins all.

    Example:
        >>> list(Pieces([b"abc", b"defgh", b"i"]).cut(4))
        [b'abcdefg', b'hi']
    """

    __slots__ = ("_buffers", "_size")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._size = sum(map(len, buffers))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._buffers)

    def cut(self, size: int) -> Iterator[bytes]:
        """All of it in pieces of this size or up to twice as long."""
        held: list[Buffer] = []
        length = 0
        for buffer in self._buffers:
            start = 0
            while len(buffer) - start > size:
                yield b"".join((*held, memoryview(buffer)[start : start + size]))
                held, length, start = [], 0, start + size
            held.append(buffer[start:] if start else buffer)
            length += len(buffer) - start
            if length >= size:
                yield b"".join(held)
                held, length = [], 0
        if held:
            yield b"".join(held)


MAX_DATUMS = 1 << 20
"""Most datums of one result: those without a tensor cost its sender nothing, and its reader memory.
"""

ENUMS: dict[str, list[str]] = {
    "StopReason": ["STOP", "LENGTH"],
    "DType": ["UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16"],
}

# message -> {field: (number, type)}; a type may be prefixed by "repeated", "optional", "oneof NAME"
# or be "map VALUE".
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "LossConfigValue": {"number": (1, "oneof value double"), "text": (2, "oneof value string")},
    "Datum": {
        "model_input": (1, "repeated Chunk"),
        "loss_fn_inputs": (2, "map Tensor"),
        "model_input_spans": (3, "repeated ProvenanceSpan"),
        "loss_fn_input_spans": (4, "repeated ProvenanceSpan"),
    },
    "ProvenanceSpan": {
        "prompt_tokens": (1, "oneof span PromptProvenanceSpan"),
        "sampled_tokens": (2, "oneof span SampledProvenanceSpan"),
    },
    "PromptProvenanceSpan": {
        "sequence_id": (1, "string"),
        "offset": (2, "int64"),
        "length": (3, "int64"),
    },
    "SampledProvenanceSpan": {
        "sequence_id": (1, "string"),
        "offset": (2, "int64"),
        "length": (3, "int64"),
    },
    "Chunk": {
        "encoded_text": (1, "oneof chunk EncodedTextChunk"),
        "image": (2, "oneof chunk ImageChunk"),
        "dmel": (3, "oneof chunk DmelChunk"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {
        "data": (1, "bytes"),
        "format": (2, "string"),
        "expected_tokens": (3, "optional int32"),
        "override_dimensions": (4, "optional ImageDimensions"),
    },
    "ImageDimensions": {"width": (1, "uint32"), "height": (2, "uint32")},
    "DmelChunk": {"dmel": (1, "bytes")},
    "Tensor": {
        "dense": (1, "oneof encoding bytes"),
        "sparse_csr": (2, "oneof encoding SparseCsr"),
        "dtype": (3, "DType"),
        "shape": (4, "repeated int64"),
    },
    "SparseCsr": {
        "values": (1, "bytes"),
        "crow_indices": (2, "bytes"),
        "col_indices": (3, "bytes"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "DType"),
        "trailing_shape": (4, "repeated int64"),
    },
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "optional bytes"),
        "topk_prompt_logprobs": (3, "optional TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "optional Tensor"),
        "prompt_alt_tokens": (6, "optional PromptAltTokens"),
    },
    "PromptAltTokens": {"tokens": (1, "Tensor"), "logprobs": (2, "Tensor")},
    "SampledSequence": {
        "stop_reason": (1, "StopReason"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "optional bytes"),
        "topk_sampled_logprobs": (4, "optional TopkLogprobs"),
        "weights_spans": (1001, "repeated WeightsSpan"),  # ours; official clients skip it
    },
    "WeightsSpan": {"version": (1, "int64"), "tokens": (2, "int64")},
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
}

SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
TYPE_MESSAGE, TYPE_ENUM = 11, 14
OPTIONAL, REPEATED = 1, 3


@cache
def message(name: str) -> Any:
    """The runtime's class for one of our messages."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(
        name="tinkex/wire.proto", package=PACKAGE, syntax="proto3"
    )
    for enum, labels in ENUMS.items():
        declared = file.enum_type.add(name=enum)
        for number, label in enumerate(labels):
            declared.value.add(name=f"{enum}_{label}", number=number)
    for name, fields in MESSAGES.items():
        _declare(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


class NotInProtobuf(ValueError):
    """Raised for data that the schema cannot hold; it can be sent as JSON."""


def _declare(entry: Any, fields: dict[str, tuple[int, str]]) -> None:
    """Fill one message of the descriptor.

    Oneofs of real unions come before those that proto3 makes for `optional`.
    """
    for _, spec in fields.values():
        if spec.startswith("oneof ") and spec.split()[1] not in [o.name for o in entry.oneof_decl]:
            entry.oneof_decl.add(name=spec.split()[1])
    for field, (number, spec) in fields.items():
        words = spec.split()
        if words[0] == "map":
            _declare_map(entry, field, number, words[1])
            continue
        declared = entry.field.add(name=field, number=number, label=OPTIONAL)
        if words[0] == "repeated":
            declared.label = REPEATED
        elif words[0] == "oneof":
            declared.oneof_index = [o.name for o in entry.oneof_decl].index(words[1])
        elif words[0] == "optional" and words[1] in SCALARS:
            declared.oneof_index = len(entry.oneof_decl)
            declared.proto3_optional = True
            entry.oneof_decl.add(name=f"_{field}")
        _set_type(declared, words[-1])


def _declare_map(entry: Any, field: str, number: int, value: str) -> None:
    nested = entry.nested_type.add(
        name="".join(part.title() for part in field.split("_")) + "Entry"
    )
    nested.options.map_entry = True
    _set_type(nested.field.add(name="key", number=1, label=OPTIONAL), "string")
    _set_type(nested.field.add(name="value", number=2, label=OPTIONAL), value)
    declared = entry.field.add(name=field, number=number, label=REPEATED, type=TYPE_MESSAGE)
    declared.type_name = f".{PACKAGE}.{entry.name}.{nested.name}"


def _set_type(declared: Any, kind: str) -> None:
    if kind in SCALARS:
        declared.type = SCALARS[kind]
        return
    declared.type = TYPE_ENUM if kind in ENUMS else TYPE_MESSAGE
    declared.type_name = f".{PACKAGE}.{kind}"


def parse(name: str, body: bytes) -> Any:
    """Parse one of our messages; `ValueError` when the bytes are not one."""
    from google.protobuf.message import DecodeError

    try:
        return message(name).FromString(body)
    except DecodeError:
        raise ValueError(f"malformed protobuf: the body is not a {name} message") from None


def packed(array: Array | Sequence[float | None], dtype: str) -> bytes:
    """Little-endian raw bytes of an array, or of a list of numbers; None among them is NaN."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain.tobytes() if sys.byteorder == "little" else plain.astype(f"<{dtype}").tobytes()


def unpacked(body: bytes, dtype: str, what: str) -> Array:
    """The array behind raw bytes, without a copy."""
    size = np.dtype(dtype).itemsize
    if len(body) % size:
        raise ValueError(
            f"malformed protobuf: {what} has {len(body)} bytes, not a multiple of {size}"
        )
    return np.frombuffer(body, dtype=np.dtype(dtype).newbyteorder("<"))


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────


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


def get_values(body: bytes, dtype: int, what: str) -> Array:
    """Read raw values as int64 or float32, widening the two narrower kinds."""
    match dtype:
        case 1:
            return unpacked(body, "float32", what)
        case 2:
            return unpacked(body, "int64", what)
        case 3:
            return unpacked(body, "int32", what).astype(np.int64)
        case 4:
            return (unpacked(body, "uint16", what).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"malformed protobuf: {what} has no known dtype")


def get_tensor(source: Any, what: str) -> TensorData:
    """Read a Tensor message."""
    encoding = source.WhichOneof("encoding")
    if encoding is None:
        raise ValueError(f"malformed protobuf: {what} has no values")
    shape = list(source.shape)
    raw = source.dense if encoding == "dense" else source.sparse_csr.values
    values = get_values(raw, source.dtype, what)
    dtype = "float32" if values.dtype == np.float32 else "int64"
    crow = col = None
    if encoding != "dense":
        crow = unpacked(source.sparse_csr.crow_indices, "int64", what)
        col = unpacked(source.sparse_csr.col_indices, "int64", what)
    try:
        return TensorData(values, dtype, shape or None, crow, col)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"malformed protobuf: {what}: {error}") from None


# ── forward_backward ──────────────────────────────────────────────────────────────────────────────


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
        inner += _tensor_entry(name.encode(), datum.loss_fn_inputs[name])
    parts.append(_delimited(3, sum(map(len, inner))))
    parts += inner


def _tensor_entry(name: bytes, tensor: TensorData) -> tuple[Buffer, ...]:
    """One entry of a datum's map of tensors."""
    values = _view(tensor.values, tensor.dtype)
    shape = b"".join(
        map(_varint, tensor.shape if tensor.shape is not None else [tensor.values.size])
    )
    start = _delimited(1, len(values))
    end = b"\x18" + _varint(FLOAT32 if tensor.dtype == "float32" else INT64)
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
    values = get_values(source.data, source.dtype, f"result field {name!r}")
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
    dtype = "float32" if values.dtype == np.float32 else "int64"
    trailing = list(source.trailing_shape)
    row = int(np.prod(trailing, dtype=np.int64)) if trailing else 1
    return [
        TensorData(values[a:b], dtype, [(b - a) // row if row else 0, *trailing])  # type: ignore[arg-type]
        for a, b in pairwise(bounds)
    ]


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


def encode_sample(response: SampleResponse) -> bytes:
    """SampleResponse as bytes."""
    wire = message("SampleResponse")(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        target = wire.sequences.add(stop_reason=STOP if sequence.stop_reason == "stop" else LENGTH)
        # What was given as a list, and not as an array, is sent all the same.
        tokens = sequence.tokens if sequence.tokens_np is None else sequence.tokens_np
        logprobs = sequence.logprobs if sequence.logprobs_np is None else sequence.logprobs_np
        if len(tokens) or sequence.tokens_np is not None:
            target.tokens = packed(tokens, "int32")
        if logprobs is not None:
            target.logprobs = packed(logprobs, "float32")
        _put_topk(
            target,
            "topk_sampled_logprobs",
            sequence.topk_logprobs_np or _table(sequence.topk_logprobs),
        )
        if sequence.weights_versions_np is not None:
            _put_versions(target, sequence.weights_versions_np)
    scores = (
        response.prompt_logprobs
        if response.prompt_logprobs_np is None
        else response.prompt_logprobs_np
    )
    if scores is not None:
        wire.prompt_logprobs = packed(scores, "float32")
    _put_topk(
        wire,
        "topk_prompt_logprobs",
        response.topk_prompt_logprobs_np or _table(response.topk_prompt_logprobs),
    )
    if response.target_prompt_logprobs is not None:
        put_tensor(wire.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        put_tensor(wire.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        put_tensor(wire.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    encoded: bytes = wire.SerializeToString(deterministic=True)
    return encoded


def _table(rows: TopkList | None) -> TopkLogprobs | None:
    """Pairs per position as a table."""
    if rows is None:
        return None
    width = max((len(row) for row in rows if row), default=0)
    ids, logprobs = (
        np.zeros((len(rows), width), np.int32),
        np.full((len(rows), width), EMPTY_CELL, np.float32),
    )
    for index, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row or ()):
            ids[index, place], logprobs[index, place] = token, logprob
    return TopkLogprobs(ids, logprobs)


def _put_versions(target: Any, versions: Array) -> None:
    """Neighbours of the same version as one span: there are few."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    for start, tokens in zip(
        starts.tolist(), np.diff([*starts, versions.size]).tolist(), strict=True
    ):
        target.weights_spans.add(version=int(versions[start]), tokens=tokens)


def _get_versions(source: Any, tokens: int) -> Array | None:
    if not source.weights_spans:
        return None
    counts = [span.tokens for span in source.weights_spans]
    if min(counts, default=0) < 0 or sum(counts) != tokens:
        raise ValueError(
            f"malformed protobuf: weights_spans cover {sum(counts)} tokens of {tokens}"
        )
    return np.repeat(np.array([span.version for span in source.weights_spans], np.int64), counts)


def _put_topk(target: Any, field: str, topk: TopkLogprobs | None) -> None:
    if topk is None:
        return
    table = getattr(target, field)
    table.token_ids = packed(topk.token_ids, "int32")
    table.logprobs = packed(topk.logprobs, "float32")
    table.length, table.k = topk.token_ids.shape


def decode_sample(body: bytes) -> SampleResponse:
    """SampleResponse from bytes."""
    wire = parse("SampleResponse", body)
    return SampleResponse(
        sequences=[_get_sequence(sequence) for sequence in wire.sequences],
        prompt_logprobs_np=_optional_floats(wire, "prompt_logprobs"),
        topk_prompt_logprobs_np=_get_topk(wire, "topk_prompt_logprobs"),
        target_prompt_logprobs=(
            get_tensor(wire.target_prompt_logprobs, "target_prompt_logprobs")
            if wire.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_cache_hit_tokens=wire.prompt_cache_hit_tokens,
        prompt_alt_tokens=(
            PromptAltTokens(
                get_tensor(wire.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
                get_tensor(wire.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
            )
            if wire.HasField("prompt_alt_tokens")
            else None
        ),
    )


def _get_sequence(source: Any) -> SampledSequence:
    if source.stop_reason not in (STOP, LENGTH):
        raise ValueError(f"malformed protobuf: unknown stop reason {source.stop_reason}")
    tokens = unpacked(source.tokens, "int32", "sampled tokens")
    return SampledSequence(
        stop_reason="stop" if source.stop_reason == STOP else "length",
        tokens_np=tokens,
        logprobs_np=_optional_floats(source, "logprobs"),
        topk_logprobs_np=_get_topk(source, "topk_sampled_logprobs"),
        weights_versions_np=_get_versions(source, tokens.size),
    )


def _optional_floats(source: Any, field: str) -> Array | None:
    return unpacked(getattr(source, field), "float32", field) if source.HasField(field) else None


def _get_topk(source: Any, field: str) -> TopkLogprobs | None:
    if not source.HasField(field):
        return None
    table = getattr(source, field)
    ids, logprobs = (
        unpacked(table.token_ids, "int32", field),
        unpacked(table.logprobs, "float32", field),
    )
    shape = (table.length, table.k)
    if ids.size != logprobs.size or ids.size != table.length * table.k:
        raise ValueError(f"malformed protobuf: {field} is not {table.length} x {table.k}")
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))
