"""Bytes on the wire: exact samples, round trips, agreement with the official schema, and what is
malformed."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from tinkex import types
from tinkex.types.record import from_json, to_json
from tinkex.wire import codec, protobuf_passes, protobuf_samples, protobuf_schema, protocol
from tinkex.wire.pieces import Pieces

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

few = settings(max_examples=40, deadline=None)

# ── the byte-exact samples of the protocol's description ──────────────────────────────────────────

REQUEST_HEX = (
    "0a09733a747261696e3a3010011a380a0c0a0a0a08010000000200000012280a0d7461726765745f746f6b656e73"
    "12170a10020000000000000003000000000000001802220102220d63726f73735f656e74726f7079"
)
OUTPUT_HEX = (
    "0a0b41727261795265636f7264122e122a0a086c6f6770726f6273121e0a08000000bf000000bf1210"
    "00000000000000000800000000000000180118011a130a086c6f73733a73756d11000000000000f03f"
)
SAMPLE_HEX = "0a160801120807000000080000001a08000080bf000080bf"


def request(**changes: Any) -> types.ForwardBackwardRequest:
    datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    fields: dict[str, Any] = {
        "model_id": "s:train:0",
        "seq_id": 1,
        "forward_backward_input": types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"),
    }
    return types.ForwardBackwardRequest(**fields | changes)


def test_sample_of_a_request_is_matched_to_the_byte() -> None:
    assert codec.encode(request()).data.hex() == REQUEST_HEX
    decoded = protobuf_passes.decode_forward_backward(bytes.fromhex(REQUEST_HEX))
    assert (decoded.model_id, decoded.seq_id, decoded.forward_only) == ("s:train:0", 1, False)
    [datum] = decoded.forward_backward_input.data
    assert datum.model_input.to_ints() == [1, 2]
    assert datum.loss_fn_inputs["target_tokens"].data == [2, 3]
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert decoded.forward_backward_input.loss_fn == "cross_entropy"
    assert decoded.forward_backward_input.loss_fn_config is None


def test_sample_of_a_pass_result_is_matched_to_the_byte() -> None:
    logprobs = types.TensorData.from_any([-0.5, -0.5])
    output = types.ForwardBackwardOutput("ArrayRecord", [{"logprobs": logprobs}], {"loss:sum": 1.0})
    assert codec.encode(output).data.hex() == OUTPUT_HEX
    decoded = protobuf_passes.decode_forward_backward_output(bytes.fromhex(OUTPUT_HEX))
    assert decoded.loss_fn_output_type == "ArrayRecord"
    assert decoded.metrics == {"loss:sum": 1.0}
    [record] = decoded.loss_fn_outputs
    assert record["logprobs"].tolist() == [-0.5, -0.5]


def test_sample_of_a_sample_is_matched_to_the_byte() -> None:
    sequence = types.SampledSequence(
        "length", tokens_np=np.array([7, 8], np.int32), logprobs_np=np.array([-1, -1], np.float32)
    )
    assert codec.encode(types.SampleResponse([sequence])).data.hex() == SAMPLE_HEX
    decoded = protobuf_samples.decode_sample(bytes.fromhex(SAMPLE_HEX))
    [read] = decoded.sequences
    assert (read.tokens, read.logprobs, read.stop_reason) == ([7, 8], [-1.0, -1.0], "length")
    assert decoded.prompt_logprobs is None
    assert decoded.topk_prompt_logprobs is None


# ── round trips ───────────────────────────────────────────────────────────────────────────────────

floats = st.floats(width=32)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def tensors(draw: st.DrawFn, min_dims: int = 1, max_dims: int = 2) -> types.TensorData:
    dtype: Any = draw(st.sampled_from([np.int64, np.float32]))
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=max_dims, min_side=0, max_side=4))
    return types.TensorData.from_numpy(draw(hnp.arrays(dtype, shape)))


@st.composite
def sparse_tensors(draw: st.DrawFn) -> types.TensorData:
    mask = draw(hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=4)))
    rows, columns = np.nonzero(mask)
    crow = np.searchsorted(rows, np.arange(mask.shape[0] + 1))
    values = draw(hnp.arrays(np.int64, rows.size))
    return types.TensorData(values, "int64", mask.shape, crow, columns)


chunks = st.one_of(
    st.builds(types.EncodedTextChunk, tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5)),
    st.builds(
        types.ImageChunk,
        data=st.binary(max_size=8),
        format=st.sampled_from(["png", "jpeg"]),
        expected_tokens=st.none() | st.integers(0, 2**31 - 1),
    ),
    st.builds(types.DmelChunk, dmel=st.binary(max_size=8)),
)
data = st.builds(
    types.Datum,
    st.builds(types.ModelInput, chunks=st.lists(chunks, max_size=3)),
    st.dictionaries(names, tensors() | sparse_tensors(), max_size=3),
)
requests = st.builds(
    types.ForwardBackwardRequest,
    model_id=names,
    seq_id=st.none() | st.integers(1, 2**31 - 1),
    forward_only=st.booleans(),
    forward_backward_input=st.builds(
        types.ForwardBackwardInput,
        data=st.lists(data, max_size=3),
        loss_fn=names,
        loss_fn_config=st.none()
        | st.dictionaries(names, st.floats(allow_nan=False) | names, min_size=1, max_size=3),
    ),
)


def alike(a: types.TensorData, b: types.TensorData) -> None:
    assert a.dtype == b.dtype
    assert a.is_sparse == b.is_sparse
    np.testing.assert_array_equal(a.to_numpy(), b.to_numpy())
    assert a.to_numpy().shape == b.to_numpy().shape


@given(requests)
@few
def test_requests_come_back_as_they_went(original: types.ForwardBackwardRequest) -> None:
    body = codec.encode(original, compress=True)
    assert body.headers == {"Content-Type": codec.PROTOBUF, "Content-Encoding": "zstd"}
    plain = codec.decompress(body.data, body.encoding)
    back = codec.decode(types.ForwardBackwardRequest, plain, body.content_type)
    assert (back.model_id, back.seq_id, back.forward_only) == (
        original.model_id,
        original.seq_id,
        original.forward_only,
    )
    ours, theirs = original.forward_backward_input, back.forward_backward_input
    assert (ours.loss_fn, ours.loss_fn_config) == (theirs.loss_fn, theirs.loss_fn_config)
    for one, other in zip(ours.data, theirs.data, strict=True):
        assert one.model_input == other.model_input
        assert one.loss_fn_inputs.keys() == other.loss_fn_inputs.keys()
        for name in one.loss_fn_inputs:
            alike(one.loss_fn_inputs[name], other.loss_fn_inputs[name])
    assert codec.encode(back).data == codec.encode(original).data


@st.composite
def outputs(draw: st.DrawFn) -> types.ForwardBackwardOutput:
    """Every datum has the same fields; a field's trailing shape is the same for all, its rows are
    not."""
    count = draw(st.integers(0, 4))
    fields = draw(
        st.dictionaries(names, st.tuples(st.booleans(), st.none() | st.integers(1, 3)), max_size=3)
    )

    def tensor(is_float: bool, trailing: int | None) -> types.TensorData:
        rows = draw(st.integers(0, 3))
        shape = (rows,) if trailing is None else (rows, trailing)
        dtype: Any = np.float32 if is_float else np.int64
        return types.TensorData.from_numpy(draw(hnp.arrays(dtype, shape)))

    records = [{name: tensor(*kind) for name, kind in fields.items()} for _ in range(count)]
    metrics = draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=3))
    return types.ForwardBackwardOutput(draw(st.sampled_from(["ArrayRecord", ""])), records, metrics)


@given(outputs())
@few
def test_pass_results_come_back_as_they_went(original: types.ForwardBackwardOutput) -> None:
    back = codec.decode(types.ForwardBackwardOutput, codec.encode(original).data, codec.PROTOBUF)
    assert back.loss_fn_output_type == original.loss_fn_output_type
    assert back.metrics == original.metrics
    assert len(back.loss_fn_outputs) == len(original.loss_fn_outputs)
    for one, other in zip(original.loss_fn_outputs, back.loss_fn_outputs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            alike(one[name], other[name])


def test_result_type_follows_the_last_colon() -> None:
    wire = protobuf_schema.message("ForwardBackwardOutput")(
        loss_fn_output_type="module:ArrayRecord"
    )
    assert (
        protobuf_passes.decode_forward_backward_output(wire.SerializeToString()).loss_fn_output_type
        == "ArrayRecord"
    )


@st.composite
def topks(draw: st.DrawFn) -> types.TopkLogprobs | None:
    shape = draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
    if draw(st.booleans()):
        return None
    return types.TopkLogprobs(
        draw(hnp.arrays(np.int32, shape)),
        draw(hnp.arrays(np.float32, shape, elements=st.just(-99999.0) | floats)),
    )


@st.composite
def samples(draw: st.DrawFn) -> types.SampleResponse:
    def sequence() -> types.SampledSequence:
        size = draw(st.integers(0, 4))
        return types.SampledSequence(
            draw(st.sampled_from(["stop", "length"])),
            tokens_np=draw(hnp.arrays(np.int32, size)),
            logprobs_np=draw(st.none() | hnp.arrays(np.float32, size, elements=floats)),
            topk_logprobs_np=draw(topks()),
            weights_versions_np=draw(st.none() | hnp.arrays(np.int64, size)) if size else None,
        )

    alternatives = None
    if draw(st.booleans()):
        shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=3))
        alternatives = types.PromptAltTokens(
            types.TensorData.from_numpy(draw(hnp.arrays(np.int64, shape))),
            types.TensorData.from_numpy(draw(hnp.arrays(np.float32, shape))),
        )
    return types.SampleResponse(
        [sequence() for _ in range(draw(st.integers(0, 3)))],
        prompt_logprobs_np=draw(
            st.none() | hnp.arrays(np.float32, 3, elements=st.just(np.nan) | floats)
        ),
        topk_prompt_logprobs_np=draw(topks()),
        target_prompt_logprobs=draw(st.none() | tensors(2, 2)),
        prompt_cache_hit_tokens=draw(st.integers(0, 100)),
        prompt_alt_tokens=alternatives,
    )


def same(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        np.testing.assert_array_equal(a, b)
        assert a.shape == b.shape


def same_topk(a: types.TopkLogprobs | None, b: types.TopkLogprobs | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        same(a.token_ids, b.token_ids)
        same(a.logprobs, b.logprobs)


@given(samples())
@few
def test_samples_come_back_as_they_went(original: types.SampleResponse) -> None:
    back = codec.decode(types.SampleResponse, codec.encode(original).data, codec.PROTOBUF)
    for one, other in zip(original.sequences, back.sequences, strict=True):
        assert one.stop_reason == other.stop_reason
        same(one.tokens_np, other.tokens_np)
        same(one.logprobs_np, other.logprobs_np)
        same_topk(one.topk_logprobs_np, other.topk_logprobs_np)
        same(one.weights_versions_np, other.weights_versions_np)
    same(original.prompt_logprobs_np, back.prompt_logprobs_np)
    same_topk(original.topk_prompt_logprobs_np, back.topk_prompt_logprobs_np)
    assert original.prompt_cache_hit_tokens == back.prompt_cache_hit_tokens
    assert (original.target_prompt_logprobs is None) == (back.target_prompt_logprobs is None)
    if original.target_prompt_logprobs is not None and back.target_prompt_logprobs is not None:
        alike(original.target_prompt_logprobs, back.target_prompt_logprobs)
    assert (original.prompt_alt_tokens is None) == (back.prompt_alt_tokens is None)
    if original.prompt_alt_tokens is not None and back.prompt_alt_tokens is not None:
        alike(original.prompt_alt_tokens.tokens, back.prompt_alt_tokens.tokens)
        alike(original.prompt_alt_tokens.logprobs, back.prompt_alt_tokens.logprobs)


def test_numbers_in_a_loss_configuration_travel_twice_and_text_once() -> None:
    body = types.ForwardBackwardInput(
        data=[], loss_fn="ppo", loss_fn_config={"clip": 0.5, "mode": "x"}
    )
    wire = protobuf_schema.parse(
        "ForwardBackwardRequest", codec.encode(request(forward_backward_input=body)).data
    )
    assert dict(wire.loss_fn_config) == {"clip": 0.5}
    assert wire.loss_fn_config_v2["clip"].number == 0.5
    assert wire.loss_fn_config_v2["mode"].text == "x"


def test_newer_loss_configuration_wins() -> None:
    wire = protobuf_schema.message("ForwardBackwardRequest")(model_id="m", loss_fn="ppo")
    wire.loss_fn_config["clip"] = 0.1
    wire.loss_fn_config["old"] = 0.3
    wire.loss_fn_config_v2["clip"].number = 0.2
    decoded = protobuf_passes.decode_forward_backward(wire.SerializeToString())
    assert decoded.forward_backward_input.loss_fn_config == {"clip": 0.2, "old": 0.3}
    assert decoded.seq_id is None


@pytest.mark.covers("W12")
@pytest.mark.parametrize(
    ("dtype", "raw", "read_as", "values"),
    [
        (3, struct.pack("<2i", 5, -6), "int64", [5, -6]),
        (4, struct.pack("<2H", 0x3F80, 0xC000), "float32", [1.0, -2.0]),
    ],
    ids=["int32", "bfloat16"],
)
def test_narrow_tensors_are_widened(
    dtype: int, raw: bytes, read_as: str, values: list[float]
) -> None:
    wire = protobuf_schema.message("ForwardBackwardRequest")(model_id="m", loss_fn="ppo")
    tensor = wire.data.add().loss_fn_inputs["x"]
    tensor.dense, tensor.dtype = raw, dtype
    tensor.shape.extend([2])
    [datum] = protobuf_passes.decode_forward_backward(
        wire.SerializeToString()
    ).forward_backward_input.data
    assert datum.loss_fn_inputs["x"].dtype == read_as
    assert datum.loss_fn_inputs["x"].data == values
    answer = protobuf_schema.message("ForwardBackwardOutput")()
    batch = answer.loss_fn_outputs.add(num_datums=2).fields["x"]
    width = len(raw) // 2
    batch.data, batch.dtype, batch.offsets = raw, dtype, struct.pack("<3q", 0, width, 2 * width)
    decoded = protobuf_passes.decode_forward_backward_output(answer.SerializeToString())
    assert [record["x"].data for record in decoded.loss_fn_outputs] == [[values[0]], [values[1]]]


@pytest.mark.covers("W24")
def test_asset_pointers_cannot_be_trained_on() -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="there")
    body = types.ForwardBackwardInput(
        data=[types.Datum(types.ModelInput(chunks=[pointer]))], loss_fn="x"
    )
    with pytest.raises(ValueError, match="asset pointers"):
        codec.encode(request(forward_backward_input=body))


# ── agreement with the official schema ────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def official() -> Any:
    """The official package's generated messages, without importing the package itself."""
    import importlib.metadata
    import importlib.util

    # not by its module, for which our own may stand in
    written = importlib.metadata.distribution("tinker").locate_file(
        "tinker/proto/tinker_public_pb2.py"
    )
    spec = importlib.util.spec_from_file_location("official_messages", str(written))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def real_oneof(field: Any) -> str | None:
    """The oneof a field is in; those that only stand for "optional" do not show on the wire."""
    oneof = field.containing_oneof
    return None if oneof is None or oneof.name.startswith("_") else oneof.name


def shape_of(descriptor: Any) -> dict[str, Any]:
    """Return the numbers, types and labels of a message's fields, nested maps included."""
    return {
        field.name: (
            field.number,
            field.type,
            bool(field.is_repeated),
            field.has_presence,
            real_oneof(field),
            field.enum_type.name if field.enum_type else None,
            (
                shape_of(field.message_type)
                if field.message_type.GetOptions().map_entry
                else field.message_type.name
            )
            if field.message_type
            else None,
        )
        for field in descriptor.fields
    }


ADDED = {"SampledSequence": {"weights_spans"}}
"""Fields of ours in official messages; their numbers are far above the official ones."""


@pytest.mark.parametrize("name", sorted(protobuf_schema.MESSAGES.keys() - {"WeightsSpan"}))
def test_messages_have_the_official_fields(official: Any, name: str) -> None:
    ours = shape_of(protobuf_schema.message(name).DESCRIPTOR)
    theirs = official.DESCRIPTOR.message_types_by_name[name]
    added = {field: ours.pop(field) for field in ADDED.get(name, ())}
    assert ours == shape_of(theirs)
    assert all(number > 1000 for number, *_ in added.values())


@pytest.mark.parametrize("name", protobuf_schema.ENUMS)
def test_enumerations_have_the_official_values(official: Any, name: str) -> None:
    theirs = official.DESCRIPTOR.enum_types_by_name[name]
    ours = protobuf_schema.message("Tensor").DESCRIPTOR.file.enum_types_by_name[name]
    found = [(value.name, value.number) for value in ours.values]
    assert [number for _, number in found] == [value.number for value in theirs.values]
    for (mine, _), value in zip(found, theirs.values, strict=True):
        assert value.name.endswith(mine.rpartition("_")[2])


@given(requests)
@few
def test_official_messages_read_our_requests(
    official: Any, original: types.ForwardBackwardRequest
) -> None:
    body = codec.encode(original).data
    theirs = official.ForwardBackwardRequest.FromString(body)
    assert theirs.model_id == original.model_id
    assert len(theirs.data) == len(original.forward_backward_input.data)
    assert theirs.SerializeToString(deterministic=True) == body


@given(outputs(), samples())
@few
def test_official_messages_read_our_results(
    official: Any, output: types.ForwardBackwardOutput, sample: types.SampleResponse
) -> None:
    for kind, value in (
        (official.ForwardBackwardOutput, output),
        (official.SampleResponse, sample),
    ):
        body = codec.encode(value).data
        assert kind.FromString(body).SerializeToString(deterministic=True) == body


# ── what is malformed ─────────────────────────────────────────────────────────────────────────────

VALID = {
    types.ForwardBackwardRequest: bytes.fromhex(REQUEST_HEX),
    types.ForwardBackwardOutput: bytes.fromhex(OUTPUT_HEX),
    types.SampleResponse: bytes.fromhex(SAMPLE_HEX),
}
KINDS = list(VALID)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@given(body=st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_read_or_refused(kind: Any, body: bytes) -> None:
    with contextlib.suppress(ValueError):
        codec.decode(kind, body, codec.PROTOBUF)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@given(
    cut=st.integers(0, 200),
    flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_damaged_messages_are_read_or_refused(
    kind: Any, cut: int, flips: list[tuple[int, int]]
) -> None:
    body = bytearray(VALID[kind])
    for where, value in flips:
        body[where % len(body)] = value
    with contextlib.suppress(ValueError):
        codec.decode(kind, bytes(body[: len(body) - cut % len(body)]), codec.PROTOBUF)


def test_messages_cut_short_are_refused() -> None:
    for kind, body in VALID.items():
        with pytest.raises(ValueError, match=f"malformed protobuf.*{kind.__name__}"):
            codec.decode(kind, body[:-1], codec.PROTOBUF)


def wire_request() -> Any:
    return protobuf_schema.parse("ForwardBackwardRequest", bytes.fromhex(REQUEST_HEX))


def tensor_of(wire: Any) -> Any:
    return wire.data[0].loss_fn_inputs["target_tokens"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda wire: setattr(tensor_of(wire), "dense", b"\0" * 15),
            r"data\[0\].*target_tokens.*15 bytes",
        ),
        (lambda wire: setattr(tensor_of(wire), "dtype", 0), r"data\[0\].*target_tokens.*dtype"),
        (
            lambda wire: setattr(tensor_of(wire), "dtype", 9),
            r"data\[0\].*target_tokens.*known dtype",
        ),
        (lambda wire: tensor_of(wire).ClearField("dense"), r"data\[0\].*target_tokens.*no values"),
        (lambda wire: tensor_of(wire).shape.append(7), r"data\[0\].*target_tokens.*shape"),
        (
            lambda wire: tensor_of(wire).sparse_csr.SetInParent(),
            r"data\[0\].*target_tokens.*sparse",
        ),
        (lambda wire: wire.data[0].model_input.add(), r"data\[0\].*empty chunk"),
        (
            lambda wire: setattr(wire.data[0].model_input[0].encoded_text, "tokens", b"\0"),
            r"data\[0\]",
        ),
        (lambda wire: wire.loss_fn_config_v2["x"].SetInParent(), r"loss_fn_config_v2\['x'\]"),
    ],
)
def test_requests_that_do_not_add_up_are_refused(damage: Any, words: str) -> None:
    wire = wire_request()
    damage(wire)
    with pytest.raises(ValueError, match=words):
        protobuf_passes.decode_forward_backward(wire.SerializeToString())


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": b""},
        {"offsets": b"\0" * 7},
        {"offsets": struct.pack("<2q", 0, 12)},
        {"offsets": struct.pack("<2q", 8, 0)},
        {"offsets": struct.pack("<2q", -8, 8)},
        {"offsets": struct.pack("<3q", 0, 4, 8)},
        {"data": b"\0" * 7},
        {"dtype": 0},
        {"trailing_shape": [3]},
        {"trailing_shape": [-1]},
        {"trailing_shape": [0]},
        {"trailing_shape": [2**62, 4]},
    ],
    ids=str,
)
def test_pass_results_that_do_not_add_up_are_refused(change: dict[str, Any]) -> None:
    wire = protobuf_schema.parse("ForwardBackwardOutput", bytes.fromhex(OUTPUT_HEX))
    field = wire.loss_fn_outputs[0].fields["logprobs"]
    for name, value in change.items():
        if isinstance(value, list):
            getattr(field, name).extend(value)
        else:
            setattr(field, name, value)
    with pytest.raises(ValueError, match=r"malformed|tensor"):
        protobuf_passes.decode_forward_backward_output(wire.SerializeToString())


@pytest.mark.parametrize("count", [2**62, -1])
def test_count_without_fields_must_make_sense(count: int) -> None:
    wire = protobuf_schema.message("ForwardBackwardOutput")()
    wire.loss_fn_outputs.add(num_datums=count)
    with pytest.raises(ValueError, match="malformed"):
        protobuf_passes.decode_forward_backward_output(wire.SerializeToString())


def test_samples_that_do_not_add_up_are_refused() -> None:
    for damage in (
        lambda wire: setattr(wire.sequences[0], "stop_reason", 5),
        lambda wire: setattr(wire.sequences[0], "tokens", b"\0" * 7),
        lambda wire: setattr(wire.sequences[0], "logprobs", b"\0" * 7),
        lambda wire: setattr(wire, "prompt_logprobs", b"\0"),
        lambda wire: setattr(wire.topk_prompt_logprobs, "k", 5),
        lambda wire: wire.target_prompt_logprobs.SetInParent(),
        lambda wire: wire.prompt_alt_tokens.SetInParent(),
    ):
        wire = protobuf_schema.parse("SampleResponse", bytes.fromhex(SAMPLE_HEX))
        damage(wire)
        body = wire.SerializeToString()
        if wire.topk_prompt_logprobs.k:
            wire.topk_prompt_logprobs.length = 1
            body = wire.SerializeToString()
        with pytest.raises(ValueError, match="malformed"):
            protobuf_samples.decode_sample(body)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b'{"loss_fn_outputs":5}',
        b'{"sequences":5}',
        b'{"loss_fn_outputs":[5]}',
        b'{"loss_fn_outputs":[{"x":5}]}',
        b'{"loss_fn_outputs":[],"metrics":5}',
        b'{"sequences":[{}]}',
        b'{"sequences":[5]}',
        b'{"sequences":[{"stop_reason":"stop","tokens":["a"]}]}',
        b'{"sequences":[],"prompt_logprobs":["a"]}',
        b'{"sequences":[],"prompt_logprobs":5}',
        b'{"model_id":"m","forward_backward_input":{"data":[{"model_input":5}],"loss_fn":"x"}}',
        b'{"model_id":"m","forward_backward_input":{"data":[{"model_input":{"chunks":[]},'
        b'"loss_fn_inputs":5}]}}',
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_malformed_json_is_refused(kind: Any, body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        codec.decode(kind, body, codec.JSON)


def test_results_have_a_json_form_too() -> None:
    output = types.ForwardBackwardOutput(
        "ArrayRecord", [{"logprobs": types.TensorData.from_any([[-1.0, -2.0]])}], {"loss:sum": 1.5}
    )
    body = codec.encode(output, as_protobuf=False)
    assert body.content_type == codec.JSON
    back = codec.decode(types.ForwardBackwardOutput, body.data, body.content_type)
    assert back.loss_fn_outputs[0]["logprobs"].tolist() == [[-1.0, -2.0]]
    assert back.metrics == {"loss:sum": 1.5}
    sample = types.SampleResponse(
        [types.SampledSequence("stop", "", np.array([3], np.int32), np.array([-1.5], np.float32))],
        np.array([np.nan, -0.5], np.float32),
    )
    text = codec.encode(sample, as_protobuf=False).data
    assert json.loads(text)["prompt_logprobs"] == [None, -0.5]
    read = codec.decode(types.SampleResponse, text)
    assert read.sequences[0].tokens == [3]
    assert read.prompt_logprobs == [None, -0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_json_refuses_unserializable_values(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be sent as JSON"):
        to_json(types.AdamParams(learning_rate=value))
    with pytest.raises(ValueError, match="cannot be sent as JSON"):
        to_json(types.OptimStepRequest(model_id="m", adam_params=types.AdamParams(eps=value)))


SESSION = "sess-1"
RUN = "sess-1:train:0"
CHECKPOINT = "tinker://run-1/weights/0001"
REQUESTS: list[tuple[protocol.Operation, Any, str]] = [
    (
        protocol.CLIENT_CONFIG,
        types.ClientConfigRequest(sdk_version="0.36.0"),
        '{"sdk_version":"0.36.0"}',
    ),
    (
        protocol.CREATE_SESSION,
        types.CreateSessionRequest(tags=[], user_metadata={}, sdk_version="0.36.0"),
        '{"tags":[],"user_metadata":{},"sdk_version":"0.36.0","type":"create_session"}',
    ),
    (
        protocol.SESSION_HEARTBEAT,
        types.SessionHeartbeatRequest(session_id=SESSION),
        '{"session_id":"sess-1","type":"session_heartbeat"}',
    ),
    (
        protocol.FINISH_SESSION,
        types.FinishSessionRequest(reason=types.FinishReason(type="success"), detail="done"),
        '{"reason":{"type":"success"},"detail":"done"}',
    ),
    (
        protocol.FINISH_SESSION,
        types.FinishSessionRequest(reason=types.FinishReason(type="success")),
        '{"reason":{"type":"success"},"detail":null}',
    ),
    (
        protocol.CREATE_MODEL,
        types.CreateModelRequest(
            session_id=SESSION,
            model_seq_id=0,
            base_model="Qwen/Qwen3-8B",
            lora_config=types.LoraConfig(rank=8),
        ),
        '{"session_id":"sess-1","model_seq_id":0,"base_model":"Qwen/Qwen3-8B",'
        '"lora_config":{"rank":8,'
        '"train_unembed":true,"train_mlp":true,"train_attn":true},'
        '"optimizer_config":{"type":"adamw"},'
        '"type":"create_model"}',
    ),
    (
        protocol.GET_INFO,
        types.GetInfoRequest(model_id=RUN),
        '{"model_id":"sess-1:train:0","type":"get_info"}',
    ),
    (
        protocol.OPTIM_STEP,
        types.OptimStepRequest(model_id=RUN, seq_id=2, adam_params=types.AdamParams()),
        '{"model_id":"sess-1:train:0","seq_id":2,"type":"optim_step",'
        '"adam_params":{"learning_rate":0.0001,'
        '"beta1":0.9,"beta2":0.95,"eps":1e-12,"weight_decay":0.0,"grad_clip_norm":0.0}}',
    ),
    (
        protocol.OPTIM_STEP,
        types.OptimStepRequest(
            model_id=RUN,
            seq_id=2,
            optimizer_params={
                "type": "dimuon",
                "learning_rate": 0.01,
                "grad_clip_norm": 0.0,
                "beta1": 0.9,
            },
        ),
        '{"model_id":"sess-1:train:0","seq_id":2,"type":"optim_step",'
        '"optimizer_params":{"type":"dimuon",'
        '"learning_rate":0.01,"grad_clip_norm":0.0,"beta1":0.9}}',
    ),
    (
        protocol.SAVE_WEIGHTS,
        types.SaveWeightsRequest(model_id=RUN, path="s1", seq_id=4),
        '{"model_id":"sess-1:train:0","path":"s1","seq_id":4,"overwrite":false,'
        '"type":"save_weights"}',
    ),
    (
        protocol.SAVE_WEIGHTS_FOR_SAMPLER,
        types.SaveWeightsForSamplerRequest(model_id=RUN, path="w1", seq_id=5),
        '{"model_id":"sess-1:train:0","path":"w1","seq_id":5,"kind":"snapshot",'
        '"type":"save_weights_for_sampler"}',
    ),
    (
        protocol.SAVE_WEIGHTS_FOR_SAMPLER,
        types.SaveWeightsForSamplerRequest(model_id=RUN, sampling_session_seq_id=0, seq_id=7),
        '{"model_id":"sess-1:train:0","sampling_session_seq_id":0,"seq_id":7,"kind":"snapshot",'
        '"type":"save_weights_for_sampler"}',
    ),
    (
        protocol.LOAD_WEIGHTS,
        types.LoadWeightsRequest(
            model_id="sess-1:train:1", seq_id=1, path=CHECKPOINT, optimizer=False
        ),
        '{"model_id":"sess-1:train:1","seq_id":1,"path":"tinker://run-1/weights/0001",'
        '"optimizer":false,'
        '"type":"load_weights"}',
    ),
    (
        protocol.LOAD_WEIGHTS,
        types.LoadWeightsRequest(
            session_id=SESSION, model_seq_id=0, path=CHECKPOINT, optimizer=False
        ),
        '{"session_id":"sess-1","model_seq_id":0,"path":"tinker://run-1/weights/0001",'
        '"optimizer":false,'
        '"type":"load_weights"}',
    ),
    (
        protocol.WEIGHTS_INFO,
        types.WeightsInfoRequest(tinker_path=CHECKPOINT),
        '{"tinker_path":"tinker://run-1/weights/0001"}',
    ),
    (
        protocol.CREATE_SAMPLING_SESSION,
        types.CreateSamplingSessionRequest(
            session_id=SESSION, sampling_session_seq_id=1, base_model="Qwen/Qwen3-8B"
        ),
        '{"session_id":"sess-1","sampling_session_seq_id":1,"base_model":"Qwen/Qwen3-8B",'
        '"type":"create_sampling_session"}',
    ),
    (
        protocol.ASAMPLE,
        types.SampleRequest(
            num_samples=1,
            prompt=types.ModelInput.from_ints([5, 6, 7, 8]),
            sampling_params=types.SamplingParams(max_tokens=2),
            sampling_session_id="sess-1:sample:0",
            seq_id=0,
            prompt_logprobs=False,
            record_stability_info=False,
        ),
        '{"num_samples":1,"prompt":{"chunks":[{"tokens":[5,6,7,8],"type":"encoded_text"}]},'
        '"sampling_params":'
        '{"max_tokens":2,"temperature":1.0,"top_k":-1,"top_p":1.0},'
        '"sampling_session_id":"sess-1:sample:0",'
        '"seq_id":0,"prompt_logprobs":false,"topk_prompt_logprobs":0,"topk_sample_logprobs":0,'
        '"prompt_alt_tokens_k":0,"record_stability_info":false,"type":"sample"}',
    ),
    (
        protocol.RETRIEVE_FUTURE,
        types.FutureRetrieveRequest(request_id="r1", allow_metadata_only=True),
        '{"request_id":"r1","allow_metadata_only":true}',
    ),
]


@pytest.mark.covers("D23", "24.types.4")
@pytest.mark.parametrize(
    ("op", "value", "text"), REQUESTS, ids=[f"{n}-{op.name}" for n, (op, *_) in enumerate(REQUESTS)]
)
def test_requests_are_written_as_the_official_client_writes_them(
    op: protocol.Operation, value: Any, text: str
) -> None:
    assert type(value) is op.request
    assert json.loads(to_json(value)) == json.loads(text)
    assert repr(from_json(type(value), text.encode())) == repr(value)


# ── compression ───────────────────────────────────────────────────────────────────────────────────


def test_body_without_encoding_is_left_alone() -> None:
    assert codec.decompress(b"abc", None) == b"abc"
    assert codec.decompress(b"abc", "identity") == b"abc"
    with pytest.raises(ValueError, match=r"gzip.*not supported"):
        codec.decompress(b"abc", "gzip")


def test_bomb_is_refused_by_its_declared_size() -> None:
    bomb = zstd.compress(b"\0" * 10_000_000)
    assert len(bomb) < 2000
    with pytest.raises(ValueError, match=r"10000000 bytes.*limit is 1000000"):
        codec.decompress(bomb, "zstd", 1_000_000)
    assert len(codec.decompress(bomb, "zstd", 10_000_000)) == 10_000_000


def test_bomb_with_a_hidden_size_is_refused() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.content_size_flag: 0})
    bomb = compressor.compress(b"\0" * 10_000_000) + compressor.flush()
    assert zstd.get_frame_info(bomb).decompressed_size is None
    with pytest.raises(ValueError, match="more than 1000000 bytes"):
        codec.decompress(bomb, "zstd", 1_000_000)
    assert len(codec.decompress(bomb, "zstd", 10_000_000)) == 10_000_000


@pytest.mark.parametrize(
    "body", [b"", b"abc", zstd.compress(b"abc" * 100)[:-3], b"\x28\xb5\x2f\xfd"]
)
def test_malformed_zstd_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="malformed zstd"):
        codec.decompress(body, "zstd")


def test_trailing_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(ValueError, match="zstd"):
        codec.decompress(zstd.compress(b"abc") + b"more", "zstd")


@given(st.binary(max_size=60))
@few
def test_random_zstd_is_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        codec.decompress(b"\x28\xb5\x2f\xfd" + body, "zstd", 1000)


def test_only_bulk_messages_have_a_protobuf_form() -> None:
    with pytest.raises(ValueError, match=r"AdamParams.*protobuf"):
        codec.decode(types.AdamParams, b"", codec.PROTOBUF)
    assert codec.encode(types.AdamParams()).content_type == codec.JSON


def test_dimuon_parameters_have_the_wire_form() -> None:
    dumped = types.DimuonParams(learning_rate=0.01).model_dump()
    assert dumped == {"type": "dimuon", "learning_rate": 0.01, "grad_clip_norm": 0.0, "beta1": 0.9}


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_body_in_pieces_is_the_same_bytes_however_it_is_cut(size: int) -> None:
    buffers = [b"ab", np.arange(50, dtype=np.uint8), b"", b"c" * 20, np.arange(3, dtype=np.uint8)]
    pieces = Pieces(buffers)
    cut = list(pieces.cut(size))
    assert b"".join(cut) == bytes(pieces)
    assert len(pieces) == len(bytes(pieces)) == 75
    assert all(size <= len(piece) < 2 * size for piece in cut[:-1])


@pytest.mark.parametrize("as_protobuf", [True, False])
def test_metrics_have_the_same_order_in_every_dialect(as_protobuf: bool) -> None:
    """The maps of protobuf have an order of their own, another one in every process: here are
    enough to show it."""
    others = [f"loss_{letter}:mean" for letter in "qwertyuiopasdfghjkl"]
    output = types.ForwardBackwardOutput(
        "ArrayRecord", [], dict.fromkeys([*others, "tokens:sum", "loss:sum"], 1.0)
    )
    body = codec.encode(output, as_protobuf=as_protobuf)
    read = codec.decode(types.ForwardBackwardOutput, body.data, body.content_type)
    assert list(read.metrics) == ["loss:sum", "tokens:sum", *sorted(others)]


def test_sample_made_of_lists_is_sent_like_one_made_of_arrays() -> None:
    rows: list[list[tuple[int, float]] | None] = [None, [(3, -0.5), (4, -1.5)], [(5, -0.25)]]
    sequence = types.SampledSequence(
        "length",
        _tokens_list=[7, 8, 9],
        _logprobs_list=[-1.0, -2.0, -0.5],
        _topk_logprobs_list=rows,
    )
    sent = types.SampleResponse(
        [sequence], _prompt_logprobs_list=[None, -0.5], _topk_prompt_logprobs_list=rows
    )
    body = codec.encode(sent)
    assert body.content_type == codec.PROTOBUF
    read = codec.decode(types.SampleResponse, body.data, body.content_type)
    assert (read.sequences[0].tokens, read.sequences[0].logprobs) == ([7, 8, 9], [-1.0, -2.0, -0.5])
    assert read.sequences[0].topk_logprobs == read.topk_prompt_logprobs == rows
    assert read.prompt_logprobs == [None, -0.5]


def test_bomb_that_hides_its_size_takes_no_memory_to_refuse() -> None:
    """Joining a large result would hold up all other threads."""
    compressor = zstd.ZstdCompressor(1)
    bomb = b"".join(
        [*(compressor.compress(b" " * (1 << 20)) for _ in range(256)), compressor.flush()]
    )
    tracemalloc.start()
    try:
        with pytest.raises(codec.TooLarge, match="more than 134217728 bytes"):
            codec.decompress(bomb, "zstd", 128 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_body_that_hides_its_size_and_is_cut_short_is_refused() -> None:
    compressor = zstd.ZstdCompressor(1)
    body = compressor.compress(b"x" * 100_000) + compressor.flush()
    with pytest.raises(ValueError, match="truncated"):
        codec.decompress(body[:-3], "zstd", 1 << 20)
