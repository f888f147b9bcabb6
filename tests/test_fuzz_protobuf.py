"""The protobuf decoder under whatever bytes: a `ValueError` or a message, soon, and in little
memory.

More examples than the few of every run: `FUZZ_EXAMPLES=100000 pytest -m slow
tests/test_fuzz_protobuf.py`.
"""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tinkex import types
from tinkex.types.future_requests import FuturesRetrieveResponse
from tinkex.types.sampled import SampledSequence, SampleResponse, TopkLogprobs
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)
from tinkex.wire import codec, protobuf_passes, protobuf_samples, protobuf_schema

FEW, MANY = 150, int(os.environ.get("FUZZ_EXAMPLES", "5000"))
MEMORY = 100_000_000
"""Bytes that a message of a kilobyte may take, read to the last tensor."""
SECONDS = 10.0


def datum(length: int = 3, **inputs: Any) -> types.Datum:
    tokens = list(range(length))
    return types.Datum(
        types.ModelInput.from_ints(tokens),
        {"target_tokens": tokens, "weights": [0.5] * length, **inputs},
    )


SPARSE = types.TensorData([1, 2], "int64", [3, 4], [0, 1, 1, 2], [0, 3])
REQUEST = ForwardBackwardRequest(
    model_id="a:train:0",
    seq_id=7,
    forward_backward_input=ForwardBackwardInput(
        data=[
            datum(),
            datum(target_tokens=SPARSE).with_provenance(
                [types.SampledProvenanceSpan(sequence_id="s", length=3)],
                [types.PromptProvenanceSpan(sequence_id="s", length=3)],
            ),
            types.Datum(
                types.ModelInput(
                    chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=2)]
                )
            ),
        ],
        loss_fn="ppo",
        loss_fn_config={"clip": 0.2, "loss_id": "x"},
    ),
)
OUTPUT = ForwardBackwardOutput(
    "ArrayRecord", [{"logprobs": types.TensorData([0.5, 1.0], "float32", [2])}] * 3, {"a": 1}
)
TABLE = TopkLogprobs(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
SAMPLE = SampleResponse(
    [
        SampledSequence(
            "stop", "", np.array([1, 2], np.int32), np.array([0.1, 0.2], np.float32), TABLE
        )
    ],
    prompt_logprobs_np=np.array([np.nan, 0.5], np.float32),
    topk_prompt_logprobs_np=TABLE,
    target_prompt_logprobs=types.TensorData([0.5], "float32", [1]),
)
GOOD: dict[type[Any], bytes] = {
    ForwardBackwardRequest: bytes(protobuf_passes.encode_forward_backward(REQUEST)),
    ForwardBackwardOutput: protobuf_passes.encode_forward_backward_output(OUTPUT),
    SampleResponse: protobuf_samples.encode_sample(SAMPLE),
}
KINDS = list(GOOD)


def examples(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count == FEW,
        suppress_health_check=list(HealthCheck),
    )


def tensors(message: Any) -> Iterator[types.TensorData]:
    """Every tensor of a decoded message."""
    if isinstance(message, ForwardBackwardRequest):
        for one in message.forward_backward_input.data:
            yield from one.loss_fn_inputs.values()
    elif isinstance(message, ForwardBackwardOutput):
        for output in message.loss_fn_outputs:
            yield from output.values()
    elif message.target_prompt_logprobs is not None:
        yield message.target_prompt_logprobs


def read(kind: type[Any], data: bytes) -> Any:
    """Decode, and use what comes of it; the message, or None when it is refused. Nothing else may
    happen."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        message = codec.decode(kind, data, codec.PROTOBUF)
        for tensor in tensors(message):
            tensor.to_numpy()
        if isinstance(message, SampleResponse):
            _ = [
                (sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
                for sequence in message.sequences
            ]
            _ = message.prompt_logprobs, message.topk_prompt_logprobs
    except ValueError:
        message = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert time.monotonic() - began < SECONDS
    assert peak < MEMORY, f"{len(data)} bytes took {peak}"
    return message


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """A good message with a few things done to its bytes."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, max(len(data) - 1, 0))) for _ in range(2))
        match draw(st.sampled_from(["flip", "cut", "grow", "repeat", "unknown", "long", "swap"])):
            case "flip":
                data[at : at + 1] = (
                    bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) if data else b""
                )
            case "cut":
                del data[at:]
            case "grow":
                data[at : at + 1] = bytes([draw(st.sampled_from([0x7F, 0x80, 0xFF]))])
            case "repeat":
                data[other:other] = data[min(at, other) : max(at, other)]
            case "unknown":
                data[at:at] = draw(
                    st.sampled_from(
                        [b"\xf8\x7f\x01", b"\xfa\x7f\x02ab", b"\xfb\x7f", b"\xfd\x7f\0\0\0\0"]
                    )
                )
            case "long":
                data[at:at] = b"\xff" * draw(st.integers(1, 12))
            case "swap":
                del data[min(at, other) : max(at, other)]
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
@examples(FEW)
@given(data=st.data())
def test_damaged_message_is_read_or_refused(kind: type[Any], data: st.DataObject) -> None:
    read(kind, data.draw(mutated(GOOD[kind])))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@examples(MANY)
@given(data=st.data())
def test_many_damaged_messages(kind: type[Any], data: st.DataObject) -> None:
    read(kind, data.draw(mutated(GOOD[kind])))


@pytest.mark.parametrize("kind", KINDS)
@examples(FEW)
@given(data=st.binary(max_size=200))
@example(data=b"\x1a\x00" * 512)
@example(data=b"\x0a" * 1024)
@example(data=b"\x0b" * 1024)
def test_random_bytes_are_read_or_refused(kind: type[Any], data: bytes) -> None:
    read(kind, data)


# ── well formed, and senseless ────────────────────────────────────────────────────────────────────

LONGS = st.sampled_from(
    [0, 1, 2, 3, -1, 7, 2**16, 2**16 + 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
)
DTYPES = st.sampled_from([0, 1, 2, 3, 4, 5, 77, -1])
BLOBS = st.binary(max_size=24) | st.lists(LONGS, max_size=8).map(
    lambda numbers: struct.pack(f"<{len(numbers)}q", *numbers)
)


@st.composite
def tensor_message(draw: st.DrawFn) -> Any:
    tensor = protobuf_schema.message("Tensor")(
        dtype=draw(DTYPES), shape=draw(st.lists(LONGS, max_size=4))
    )
    if draw(st.booleans()):
        tensor.dense = draw(BLOBS)
    else:
        tensor.sparse_csr.values = draw(BLOBS)
        tensor.sparse_csr.crow_indices = draw(BLOBS)
        tensor.sparse_csr.col_indices = draw(BLOBS)
    return tensor


@st.composite
def request_message(draw: st.DrawFn) -> bytes:
    wire = protobuf_schema.message("ForwardBackwardRequest")(
        model_id="a", seq_id=draw(st.integers(-(2**31), 2**31 - 1))
    )
    datum = wire.data.add()
    datum.model_input.add().encoded_text.tokens = draw(BLOBS)
    datum.loss_fn_inputs["weights"].CopyFrom(draw(tensor_message()))
    for _ in range(draw(st.integers(0, 2))):
        span = datum.model_input_spans.add().prompt_tokens
        span.sequence_id, span.offset, span.length = (
            draw(st.sampled_from(["", "s"])),
            draw(LONGS),
            draw(LONGS),
        )
    return bytes(wire.SerializeToString())


@st.composite
def output_message(draw: st.DrawFn) -> bytes:
    wire = protobuf_schema.message("ForwardBackwardOutput")()
    record = wire.loss_fn_outputs.add(num_datums=draw(LONGS))
    for name in draw(st.sampled_from([(), ("a",), ("a", "b")])):
        field = record.fields[name]
        field.data, field.offsets, field.dtype = draw(BLOBS), draw(BLOBS), draw(DTYPES)
        field.trailing_shape.extend(draw(st.lists(LONGS, max_size=3)))
    return bytes(wire.SerializeToString())


@st.composite
def sample_message(draw: st.DrawFn) -> bytes:
    wire = protobuf_schema.message("SampleResponse")(prompt_logprobs=draw(BLOBS))
    sequence = wire.sequences.add(
        stop_reason=draw(st.sampled_from([0, 1, 2, 99])), tokens=draw(BLOBS)
    )
    for table in (wire.topk_prompt_logprobs, sequence.topk_sampled_logprobs):
        table.token_ids, table.logprobs = draw(BLOBS), draw(BLOBS)
        table.k, table.length = (
            draw(st.sampled_from([0, 1, 2, 2**31, 2**32 - 1])) for _ in range(2)
        )
    wire.target_prompt_logprobs.CopyFrom(draw(tensor_message()))
    return bytes(wire.SerializeToString())


SENSELESS: dict[type[Any], st.SearchStrategy[bytes]] = {
    ForwardBackwardRequest: request_message(),
    ForwardBackwardOutput: output_message(),
    SampleResponse: sample_message(),
}


@pytest.mark.parametrize("kind", KINDS)
@examples(FEW)
@given(data=st.data())
def test_senseless_message_is_read_or_refused(kind: type[Any], data: st.DataObject) -> None:
    read(kind, data.draw(SENSELESS[kind]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@examples(MANY)
@given(data=st.data())
def test_many_senseless_messages(kind: type[Any], data: st.DataObject) -> None:
    read(kind, data.draw(SENSELESS[kind]))


# ── what was found, and what is meant ─────────────────────────────────────────────────────────────


def tensor_in_request(**fields: Any) -> bytes:
    wire = protobuf_schema.message("ForwardBackwardRequest")(model_id="a", seq_id=1, loss_fn="x")
    wire.data.add().loss_fn_inputs["weights"].CopyFrom(protobuf_schema.message("Tensor")(**fields))
    return bytes(wire.SerializeToString())


def test_few_bytes_cannot_declare_millions_of_cells() -> None:
    rows = 100
    csr = protobuf_schema.message("SparseCsr")(crow_indices=bytes(8 * (rows + 1)))
    assert (
        read(
            ForwardBackwardRequest, tensor_in_request(sparse_csr=csr, dtype=1, shape=[rows, 2**21])
        )
        is None
    )
    assert (
        read(
            ForwardBackwardRequest, tensor_in_request(sparse_csr=csr, dtype=1, shape=[rows, 2**16])
        )
        is not None
    )


def test_few_bytes_cannot_declare_millions_of_datums() -> None:
    wire = protobuf_schema.message("ForwardBackwardOutput")()
    wire.loss_fn_outputs.add(num_datums=2**24)
    assert read(ForwardBackwardOutput, wire.SerializeToString()) is None


def test_result_with_negative_offsets_is_refused() -> None:
    wire = protobuf_schema.message("ForwardBackwardOutput")()
    field = wire.loss_fn_outputs.add(num_datums=1).fields["a"]
    field.data, field.offsets, field.dtype = (
        bytes(16),
        struct.pack("<2q", -8, 16),
        protobuf_passes.FLOAT32,
    )
    with pytest.raises(ValueError, match="offsets of result field 'a'"):
        codec.decode(ForwardBackwardOutput, wire.SerializeToString(), codec.PROTOBUF)


def test_shape_of_very_many_dimensions_is_refused_before_it_is_multiplied() -> None:
    data = tensor_in_request(dense=bytes(4), dtype=1, shape=[2**62] * 200_000)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"data\[0\].*weights.*200000 dimensions"):
        codec.decode(ForwardBackwardRequest, data, codec.PROTOBUF)
    assert time.monotonic() - began < SECONDS


def test_empty_tensor_with_a_dimension_that_no_array_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\[0\].*weights.*too large"):
        codec.decode(
            ForwardBackwardRequest,
            tensor_in_request(dense=b"", dtype=1, shape=[0, 2**62]),
            codec.PROTOBUF,
        )


def test_shape_may_be_packed_or_not() -> None:
    packed = tensor_in_request(dense=bytes(24), dtype=1, shape=[2, 3])
    assert packed.count(b"\x22\x02\x02\x03") == 1
    assert len(b"\x22\x02\x02\x03") == len(b"\x20\x02\x20\x03")
    loose = packed.replace(b"\x22\x02\x02\x03", b"\x20\x02\x20\x03")
    assert read(ForwardBackwardRequest, loose) == read(ForwardBackwardRequest, packed) is not None


@pytest.mark.parametrize("dtype", [0, 5, 77])
def test_unknown_dtype_is_named(dtype: int) -> None:
    with pytest.raises(ValueError, match=r"data\[0\].*weights.*dtype"):
        codec.decode(
            ForwardBackwardRequest, tensor_in_request(dense=bytes(8), dtype=dtype), codec.PROTOBUF
        )


@examples(FEW)
@given(
    data=st.binary(max_size=64)
    | st.integers(0, 2**32 - 1).map(lambda size: struct.pack("<I", size) + b'{"cursor":1}')
)
@example(
    data=struct.pack("<I", 75)
    + b'{"completions":[{"state":"finished","request_id":"a","inline_size":-5}],"cursor":1}'
)
def test_batch_is_read_or_refused(data: bytes) -> None:
    try:
        head, payloads = codec.decode_batch(data)
    except ValueError:
        return
    assert isinstance(head, FuturesRetrieveResponse)
    assert sum(len(body) for _, body in payloads.values()) <= len(data)


@examples(FEW)
@given(
    data=st.binary(max_size=64) | mutated(GOOD[ForwardBackwardRequest]),
    content_type=st.sampled_from([codec.JSON, codec.PROTOBUF]),
)
@example(data=b'{"model_id": "a", "seq_id": true}', content_type=codec.JSON)
@example(data=b'{"model_id": "a", "seq_id": 1' + b"0" * 30 + b"}", content_type=codec.JSON)
def test_glance_at_a_broken_request_never_fails(data: bytes, content_type: str) -> None:
    found = codec.peek(data, content_type)
    assert found is None or (type(found[1]) is int and 0 < found[1] < 2**63)
