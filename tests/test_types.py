"""The nouns: what they take, what they refuse and in what words, and the methods programs expect of
them."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import json
import pickle
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings, strategies as st

import tinkex
from tinkex import types
from tinkex.types.chunks import token_array
from tinkex.types.record import Record, from_json, to_json
from tinkex.wire import codec, protobuf_passes, protobuf_schema

# ── tensors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W24")
@pytest.mark.parametrize(
    ("value", "dtype", "values"),
    [
        ([1.5, 2], "float32", [1.5, 2.0]),
        ([1, 2], "int64", [1, 2]),
        ([True, False], "int64", [1, 0]),
        (np.array([1.5, 2.5]), "float32", [1.5, 2.5]),
        (np.array([1, 2], dtype=np.uint8), "int64", [1, 2]),
        (np.array([3, 4], dtype=np.uint32), "int64", [3, 4]),
        (np.array([True, False]), "int64", [1, 0]),
        (np.array([1.5], dtype=np.float16), "float32", [1.5]),
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "float32", [1.5, -2.0]),
        (torch.tensor([1.5], requires_grad=True), "float32", [1.5]),
        (torch.tensor([1, 2], dtype=torch.int32), "int64", [1, 2]),
        (torch.tensor([True]), "int64", [1]),
    ],
    ids=str,
)
def test_tensors_are_made_of_anything(value: Any, dtype: str, values: list[float]) -> None:
    tensor = types.TensorData.from_any(value)
    assert tensor.dtype == dtype
    assert tensor.data == values
    assert tensor.shape == [len(values)]


def test_nested_values_keep_their_shape() -> None:
    for value in ([[1.0, 2.0], [3.0, 4.0]], torch.tensor([[1.0, 2.0], [3.0, 4.0]])):
        tensor = types.TensorData.from_any(value)
        assert tensor.shape == [2, 2]
        assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_wrapping_a_fitting_array_makes_no_copy() -> None:
    array = np.array([1.0, 2.0], dtype=np.float32)
    assert np.shares_memory(types.TensorData.from_numpy(array).to_numpy(), array)


def test_torch_goes_both_ways() -> None:
    original = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    back = types.TensorData.from_torch(original).to_torch()
    assert torch.equal(back, original)
    back[0, 0] = 9  # a copy: the original stays
    assert original[0, 0] == 0


@pytest.mark.parametrize("bad", [["a", "b"], [None], [[1], [1, 2]], np.array([1j])], ids=str)
def test_invalid_tensor_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="tensor"):
        types.TensorData.from_any(bad)


@pytest.mark.parametrize("shape", [[3], [2, 2], [-2], [-1, -2], [2**40, 2**40]])
def test_shape_that_does_not_fit_is_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="shape"):
        types.TensorData(data=[] if shape[0] > 2**20 else [1, 2], dtype="int64", shape=shape)


def test_dtype_is_needed_and_must_be_known() -> None:
    with pytest.raises(TypeError, match="dtype"):
        types.TensorData(data=[1])
    with pytest.raises(ValueError, match=r"float64.*'int64' or 'float32'"):
        types.TensorData(data=[1], dtype="float64")  # type: ignore[arg-type]


def sparse(**changes: Any) -> types.TensorData:
    fields: dict[str, Any] = {
        "data": [5, 6, 7],
        "dtype": "int64",
        "shape": [3, 4],
        "sparse_crow_indices": [0, 2, 2, 3],
        "sparse_col_indices": [1, 3, 0],
    }
    return types.TensorData(**fields | changes)


def test_sparse_tensors_read_as_dense() -> None:
    tensor = sparse()
    assert tensor.is_sparse
    assert tensor.tolist() == [[0, 5, 0, 6], [0, 0, 0, 0], [7, 0, 0, 0]]
    assert tensor.to_numpy(pad_value=-1)[1].tolist() == [-1, -1, -1, -1]
    assert tensor.sparse_crow_indices == [0, 2, 2, 3]
    assert tensor.nbytes == 3 * 8 + 4 * 8 + 3 * 8
    assert types.TensorData.from_wire(tensor.to_wire()).tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": None},
        {"shape": [3]},
        {"shape": [3, 4, 1]},
        {"shape": [2, 4]},
        {"shape": [3, 3]},
        {"sparse_col_indices": None},
        {"sparse_crow_indices": None},
        {"sparse_col_indices": [1, 3, -1]},
        {"sparse_col_indices": [1, 3]},
        {"sparse_crow_indices": [0, 2, 1, 3]},
        {"sparse_crow_indices": [1, 2, 2, 3]},
        {"sparse_crow_indices": [0, 2, 2, 2]},
        {"sparse_crow_indices": []},
        {"data": [5, 6]},
    ],
    ids=str,
)
def test_malformed_sparse_tensors_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sparse|CSR"):
        sparse(**changes)


def test_sparse_tensor_cannot_demand_excessive_memory() -> None:
    with pytest.raises(ValueError, match="sparse"):
        sparse(shape=[3, 2**50])


def test_repr_of_a_tensor_is_short() -> None:
    shown = repr(types.TensorData.from_numpy(np.arange(10_000)))
    assert len(shown) < 120
    assert "int64" in shown
    assert "shape=[10000]" in shown
    assert "sparse" in repr(sparse())


@pytest.mark.parametrize(
    "wire",
    [
        5,
        {},
        {"data": [1], "dtype": "int8"},
        {"data": ["a"], "dtype": "int64"},
        {"data": [1.5], "dtype": "int64"},
        {"data": [None], "dtype": "float32"},
        {"data": [1, 2], "dtype": "int64", "shape": [3]},
        {"data": [1, 2], "dtype": "int64", "shape": 2},
        {"data": [1, 2], "dtype": "int64", "shape": ["a"]},
        {"data": [2**70], "dtype": "int64"},
        {"data": [[1], [1, 2]], "dtype": "int64"},
        {"data": {"a": 1}, "dtype": "int64"},
    ],
    ids=str,
)
def test_malformed_tensors_on_the_wire_are_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="tensor"):
        types.TensorData.from_wire(wire)


# ── model inputs ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W24")
@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        np.array([1, 2, 3], np.int32),
    ],
    ids=repr,
)
def test_tokens_come_as_lists_and_arrays(tokens: Any) -> None:
    model_input = types.ModelInput.from_ints(tokens)
    assert model_input.to_ints() == [1, 2, 3]
    assert model_input.length == 3
    assert model_input.to_numpy().dtype == np.int32


@pytest.mark.parametrize(
    "tokens",
    [[1.0], [1.5, 2], [[1, 2]], [[1], [1, 2]], ["a"], [None], [True], np.array([1.0]), 5, "abc"],
    ids=repr,
)
def test_invalid_token_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="flat list of integers"):
        types.ModelInput.from_ints(tokens)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**31], [2**70], np.array([3, -1]), np.array([-1], dtype=np.int32), np.array([2**40])],
    ids=repr,
)
def test_tokens_out_of_range_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"token|integers"):
        types.ModelInput.from_ints(tokens)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
@settings(max_examples=30, deadline=None)
def test_tokens_come_back_as_they_went_in(tokens: list[int]) -> None:
    assert types.ModelInput.from_ints(tokens).to_ints() == tokens
    assert token_array(tokens).tolist() == tokens


def image(**changes: Any) -> types.ImageChunk:
    return types.ImageChunk(**{"data": b"\x89PNG", "format": "png", **changes})


def test_appending_makes_a_new_input() -> None:
    first = types.ModelInput.from_ints([1, 2])
    second = first.append_int(3)
    third = second.append(image(expected_tokens=4)).append_int(5)
    assert first.to_ints() == [1, 2]
    assert second.to_ints() == [1, 2, 3]
    assert len(second.chunks) == 1
    assert [chunk.type for chunk in third.chunks] == ["encoded_text", "image", "encoded_text"]
    assert third.length == 3 + 4 + 1
    assert types.ModelInput.empty().append_int(7).to_ints() == [7]
    assert types.ModelInput.empty().length == 0
    assert types.ModelInput.empty().to_ints() == []


def test_inputs_compare_by_content() -> None:
    first, same = types.ModelInput.from_ints([1, 2]), types.ModelInput.from_ints(np.array([1, 2]))
    assert first == same
    assert hash(first) == hash(same)
    assert first != first.append_int(3)


def test_media_cannot_be_read_as_tokens() -> None:
    mixed = types.ModelInput.from_ints([1]).append(image(expected_tokens=2))
    with pytest.raises(ValueError, match="'image'"):
        mixed.to_ints()
    assert not mixed.is_text


@pytest.mark.covers("C90")
def test_image_without_a_count_has_no_length() -> None:
    with pytest.raises(ValueError, match=r"ImageChunk.*expected_tokens"):
        _ = image().length
    pointer = types.ImageAssetPointerChunk(format="png", location="there")
    with pytest.raises(ValueError, match=r"ImageAssetPointerChunk.*expected_tokens"):
        _ = pointer.length


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (b"\x00\x02\x05\x50", 5),
        (b"\xfe\x03\x01\x07", 7),
        (b"\x01\x02\xac\x02\x50", 300),
    ],
)
def test_audio_length_is_read_from_the_container(header: bytes, rows: int) -> None:
    assert types.DmelChunk(dmel=header + b"\0" * 16).length == rows


@pytest.mark.parametrize(
    "header", [b"", b"\x00", b"\x00\x01", b"\x00\x01\x80", b"\xfe\x00", b"\x00\x00"]
)
def test_truncated_audio_is_a_clear_error(header: bytes) -> None:
    with pytest.raises(ValueError, match="audio tensor"):
        _ = types.DmelChunk(dmel=header).length


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (5, "must be an object"),
        ({"type": "video"}, "unknown chunk type 'video'"),
        ({"type": "encoded_text"}, "needs tokens"),
        ({"type": "image", "data": "!!", "format": "png"}, "base64"),
        ({"type": "image", "format": "png"}, "data"),
        ({"type": "image", "data": "aGk=", "format": "gif"}, "gif"),
    ],
)
def test_malformed_chunks_are_refused(chunk: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        types.ModelInput.model_validate({"chunks": [chunk]})


@pytest.mark.parametrize(
    "chunk",
    [
        types.EncodedTextChunk(tokens=[1, 2]),
        image(expected_tokens=3),
        types.ImageAssetPointerChunk(format="jpeg", location="there"),
        types.DmelChunk(dmel=b"\x00\x01\x05"),
    ],
    ids=lambda chunk: str(chunk.type),
)
def test_chunks_survive_the_wire(chunk: Any) -> None:
    model_input = types.ModelInput(chunks=[chunk])
    text = json.dumps(model_input.to_wire())
    assert types.ModelInput.from_wire(json.loads(text)) == model_input


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C90")
def test_inputs_of_a_datum_are_typed_by_their_names() -> None:
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {
            "target_tokens": [2, 3],
            "weights": [0, 1],
            "advantages": torch.tensor([1.0, 2.0]),
            "mask": np.array([True, False]),
        },
    )
    assert {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
        "mask": "int64",
    }
    assert datum.nbytes == 2 * 4 + 2 * 8 + 2 * 4 + 2 * 4 + 2 * 8


@pytest.mark.parametrize("bad", [["a"], [[1], [1, 2]], object(), None])
def test_bad_input_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_fn_inputs\['weights'\]"):
        types.Datum(types.ModelInput.from_ints([1]), {"weights": bad})


def test_fractional_target_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="target_tokens"):
        types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [1.5]})


def test_datum_survives_the_wire() -> None:
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.5, 1]}
    )
    back = types.Datum.from_wire(json.loads(json.dumps(datum.to_wire())))
    assert back.model_input == datum.model_input
    assert back.loss_fn_inputs["weights"].data == [0.5, 1.0]
    with pytest.raises(ValueError, match="model_input"):
        types.Datum.from_wire({"loss_fn_inputs": {}})


# ── sampling parameters ───────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.types.3")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"stop": ["a", 1]}, "stop"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 must be between -100 and 100"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(4097), 1.0)}, "logit_bias takes at most 4096"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[-1]]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "257 characters"),
        ({"bad_words": [[1]] * 1025}, "bad_words takes at most 1024"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sampling_parameters_out_of_range_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        types.SamplingParams(**fields)
    with pytest.raises(ValueError, match=words):
        types.SamplingParams.model_validate(fields)


def test_changes_of_logits_are_sent_when_they_are_set() -> None:
    plain = {"temperature", "top_k", "top_p"}
    assert (
        json.loads(to_json(types.SamplingParams(min_p=0, bad_words=[], logit_bias={}))).keys()
        == plain
    )
    assert types.SamplingParams().model_dump().keys() == plain | {"max_tokens", "seed", "stop"}
    changes = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {5: 1.5, 7: -100.0},
        "bad_words": ["no", [1, 2]],
    }
    params = types.SamplingParams(**changes)  # type: ignore[arg-type]
    sent = json.loads(to_json(params))
    assert sent["logit_bias"] == {"5": 1.5, "7": -100.0}
    assert {
        name: value for name, value in params.model_dump().items() if name in changes
    } == changes
    assert types.SamplingParams.model_validate(sent) == params
    assert types.SamplingParams.model_validate_json(json.dumps(sent)) == params
    request = types.SampleRequest(prompt=types.ModelInput.from_ints([1]), sampling_params=params)
    assert from_json(types.SampleRequest, to_json(request)).sampling_params == params
    assert types.SamplingParams(
        logit_bias={np.int64(5): np.float32(1)},  # type: ignore[dict-item]
        bad_words=[np.array([1, 2])],  # type: ignore[list-item]
    ) == (types.SamplingParams(logit_bias={5: 1.0}, bad_words=[[1, 2]]))


@pytest.mark.parametrize("stop", [None, "x", ["x", "y"], [1, 2], []])
def test_all_forms_of_stop_survive_the_wire(stop: Any) -> None:
    params = types.SamplingParams(stop=stop, max_tokens=0)
    back = types.SamplingParams.model_validate_json(params.model_dump_json())
    assert back.stop == stop
    assert back == params


# ── records ───────────────────────────────────────────────────────────────────────────────────────

EXAMPLES: list[Any] = [
    types.AdamParams(learning_rate=1e-3),
    types.LoraConfig(rank=8, seed=1),
    types.SamplingParams(max_tokens=4, stop=["x"]),
    types.OptimStepRequest(model_id="m", seq_id=3, adam_params=types.AdamParams()),
    types.OptimStepResponse(metrics={"a:sum": 1.0}),
    types.GetInfoResponse(model_data=types.ModelData(model_name="x"), model_id="m"),
    types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", lora_config=types.LoraConfig(rank=4)
    ),
    types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2]),
        sampling_params=types.SamplingParams(),
        num_samples=2,
    ),
    types.ForwardBackwardRequest(
        model_id="m",
        forward_backward_input=types.ForwardBackwardInput(
            data=[types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})],
            loss_fn="ppo",
        ),
    ),
    types.WeightsInfoResponse(base_model="b", is_lora=True),
    types.ParsedCheckpointTinkerPath.from_tinker_path("tinker://r/weights/n"),
    types.ImageChunk(data=b"\x00\xff", format="png"),
    types.DmelChunk(dmel=b"\x00\x01\x05"),
]
RECORD_IDS = [type(record).__name__ for record in EXAMPLES]


@pytest.mark.covers("C90", "24.types.5")
@pytest.mark.parametrize("record", EXAMPLES, ids=RECORD_IDS)
def test_records_survive_json(record: Record) -> None:
    kind = type(record)
    assert repr(kind.model_validate_json(record.model_dump_json())) == repr(record)
    assert repr(kind.model_validate(record.model_dump())) == repr(record)
    assert repr(kind.model_validate(record.model_dump(mode="json", exclude_none=True))) == repr(
        record
    )
    assert kind.model_validate(record) is record


@pytest.mark.parametrize("record", EXAMPLES, ids=RECORD_IDS)
def test_records_survive_pickling(record: Record) -> None:
    assert repr(pickle.loads(pickle.dumps(record))) == repr(record)


@pytest.mark.parametrize("record", EXAMPLES, ids=RECORD_IDS)
def test_unknown_keywords_are_refused_and_unknown_fields_ignored(record: Record) -> None:
    kind = type(record)
    with pytest.raises(TypeError, match="surprise"):
        kind(surprise=1)
    fields = record.model_dump(mode="json", exclude_none=True) | {"surprise": 1}
    assert repr(kind.model_validate(fields)) == repr(record)


@pytest.mark.parametrize("record", EXAMPLES, ids=RECORD_IDS)
def test_records_can_be_fields_of_pydantic_models(record: Record) -> None:
    model = pydantic.create_model("Holder", inner=(type(record), ...))
    held: Any = model(inner=record)
    assert held.inner is record
    again: Any = model.model_validate_json(held.model_dump_json())
    assert repr(again.inner) == repr(record)


def test_pydantic_errors_name_the_fault_of_a_record() -> None:
    class Settings(pydantic.BaseModel):
        params: types.AdamParams

    assert Settings.model_validate({"params": {"learning_rate": 0.5}}).params.learning_rate == 0.5
    with pytest.raises(pydantic.ValidationError, match="learning_rate"):
        Settings.model_validate({"params": {"learning_rate": "fast"}})


def test_bulk_types_can_be_fields_of_pydantic_models() -> None:
    class Row(pydantic.BaseModel):
        prompt: types.ModelInput
        datum: types.Datum
        tensor: types.TensorData
        chunk: types.EncodedTextChunk

    row = Row(
        prompt=types.ModelInput.from_ints([1, 2]),
        datum=types.Datum(types.ModelInput.from_ints([1]), {"weights": [0.5]}),
        tensor=types.TensorData.from_any([[1, 2]]),
        chunk=types.EncodedTextChunk(tokens=[3]),
    )
    back = Row.model_validate_json(row.model_dump_json())
    assert back.prompt == row.prompt
    assert back.datum.loss_fn_inputs["weights"].data == [0.5]
    assert back.tensor.tolist() == [[1, 2]]
    assert back.chunk == row.chunk


def test_copies_are_changed_and_originals_are_not() -> None:
    params = types.AdamParams(learning_rate=1e-3)
    changed = params.model_copy(update={"beta1": 0.5})
    assert (changed.learning_rate, changed.beta1) == (1e-3, 0.5)
    assert params.beta1 == 0.9
    with pytest.raises(AttributeError):
        params.beta1 = 0.1  # type: ignore[misc]


@pytest.mark.covers("C90", "24.types.4")
def test_absent_fields_are_left_out_on_request() -> None:
    lora = types.LoraConfig(rank=4)
    assert lora.model_dump()["seed"] is None
    assert "seed" not in lora.model_dump(exclude_none=True)
    assert json.loads(lora.model_dump_json(exclude_none=True)) == {
        "rank": 4,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }


def test_dumps_nest() -> None:
    request = types.OptimStepRequest(model_id="m", seq_id=3, adam_params=types.AdamParams())
    dumped = request.model_dump()
    assert dumped["adam_params"]["learning_rate"] == 1e-4
    assert types.OptimStepRequest.model_validate(dumped) == request


BULK: list[Any] = [
    types.TensorData.from_any([[1.0, 2.0]]),
    sparse(),
    types.EncodedTextChunk(tokens=[1, 2]),
    types.ModelInput.from_ints([1, 2]),
    types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]}),
    types.ForwardBackwardOutput(
        "x", [{"logprobs": types.TensorData.from_any([1.0])}], {"loss:sum": 1.0}
    ),
    types.SampledSequence("stop", "id", np.array([1], np.int32), np.array([-1.0], np.float32)),
    types.SampleResponse([types.SampledSequence("length")], np.array([np.nan], np.float32)),
    types.TopkLogprobs(np.array([[1]]), np.array([[-1.0]])),
    types.PromptAltTokens(types.TensorData.from_any([[1]]), types.TensorData.from_any([[-1.0]])),
    types.AdamOptimizerConfig(),
    types.DimuonOptimizerConfig(),
    types.DimuonParams(learning_rate=1e-3),
    types.OptimizerConfigBase(type="new", size=3),
]


@pytest.mark.parametrize("value", BULK, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(BULK)])
def test_bulk_types_survive_pickling_and_have_a_short_repr(value: Any) -> None:
    back = pickle.loads(pickle.dumps(value))
    assert type(back) is type(value)
    if "__repr__" in vars(type(value)):
        assert repr(pickle.loads(pickle.dumps(value, 2))) == repr(value)
    if hasattr(value, "to_wire"):
        assert json.dumps(back.to_wire()) == json.dumps(value.to_wire())
    assert len(repr(value)) < 400


def test_optimizers_unknown_here_pass_through() -> None:
    config = types.OptimizerConfigBase.from_wire({"type": "sgd", "momentum": 0.5})
    assert config.momentum == 0.5
    assert config.to_wire() == {"type": "sgd", "momentum": 0.5}
    assert isinstance(
        types.OptimizerConfigBase.from_wire({"type": "adamw"}), types.AdamOptimizerConfig
    )
    assert isinstance(
        types.OptimizerConfigBase.from_wire({"type": "dimuon"}), types.DimuonOptimizerConfig
    )
    with pytest.raises(AttributeError, match="nesterov"):
        _ = config.nesterov
    with pytest.raises(ValueError, match="type"):
        types.OptimizerConfigBase.from_wire({"momentum": 0.5})


@pytest.mark.parametrize("fields", [{"learning_rate": -1.0}, {"learning_rate": 1.0, "beta1": 1.0}])
def test_dimuon_parameters_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"learning_rate|beta1"):
        types.DimuonParams(**fields)


def test_sampled_sequences_read_as_lists() -> None:
    topk = types.TopkLogprobs(
        np.array([[3, 4], [0, 0]], np.int32),
        np.array([[-1.0, -2.0], [-99999.0, -99999.0]], np.float32),
    )
    sequence = types.SampledSequence(
        "stop", "id", np.array([7, 8], np.int32), np.array([-0.5, -1.0], np.float32), topk
    )
    assert sequence.tokens == [7, 8]
    assert sequence.logprobs == [-0.5, -1.0]
    assert sequence.topk_logprobs == [[(3, -1.0), (4, -2.0)], None]
    response = types.SampleResponse([sequence], np.array([np.nan, -1.5], np.float32), topk)
    assert response.prompt_logprobs == [None, -1.5]
    assert response.topk_prompt_logprobs == sequence.topk_logprobs
    empty = types.SampledSequence("length")
    assert (empty.tokens, empty.logprobs, empty.topk_logprobs) == ([], None, None)


# ── where tokens came from ────────────────────────────────────────────────────────────────────────


def traced() -> types.Datum:
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    spans: types.ProvenanceSpans = [
        types.PromptProvenanceSpan(sequence_id="a", length=1),
        types.SampledProvenanceSpan(sequence_id="a", offset=5, length=2),
    ]
    return datum.with_provenance(model_input=spans, loss_fn_inputs=spans)


def test_provenance_makes_a_new_datum_and_survives_json() -> None:
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    assert traced() != datum
    assert traced() == traced()
    assert datum.model_input_spans is None
    assert "provenance" in repr(traced())
    assert types.Datum.from_wire(json.loads(json.dumps(traced().to_wire()))) == traced()
    assert pickle.loads(pickle.dumps(traced())) == traced()


@pytest.mark.parametrize(
    "spans",
    [
        [{"prompt_tokens": {"length": 1}}],
        [{"else": {}}],
        [5],
        [{"prompt_tokens": {"sequence_id": "", "length": 1}}],
    ],
    ids=str,
)
def test_malformed_provenance_is_refused(spans: Any) -> None:
    wire = traced().to_wire() | {"model_input_spans": spans}
    with pytest.raises(ValueError, match=r"provenance|sequence_id"):
        types.Datum.from_wire(wire)


def wire_of(datum: types.Datum) -> Any:
    body = types.ForwardBackwardInput([datum], "cross_entropy")
    return protobuf_schema.parse(
        "ForwardBackwardRequest", codec.encode(types.ForwardBackwardRequest(body, "m", 1)).data
    )


def test_provenance_survives_protobuf() -> None:
    mixed = types.Datum(
        types.ModelInput.from_ints([1]).append(image()),
        {},
        traced().model_input_spans,
        traced().loss_fn_input_spans,
    )
    for datum in (traced(), mixed):
        back = protobuf_passes.decode_forward_backward(wire_of(datum).SerializeToString())
        assert back.forward_backward_input.data == [datum]


@pytest.mark.parametrize(
    "damage", ["one list", "an empty span", "a short span", "a negative span", "no sequence"]
)
def test_malformed_provenance_in_protobuf_is_refused(damage: str) -> None:
    wire = wire_of(traced())
    spans = wire.data[0].model_input_spans
    match damage:
        case "one list":
            del spans[:]
        case "an empty span":
            spans.add()
        case "a short span":
            spans[1].sampled_tokens.length = 1
        case "a negative span":
            spans[1].sampled_tokens.length = -2
        case "no sequence":
            spans[0].prompt_tokens.sequence_id = ""
    with pytest.raises(ValueError, match=r"malformed protobuf: data\[0\]"):
        protobuf_passes.decode_forward_backward(wire.SerializeToString())


def test_spans_of_target_tables_need_not_add_up() -> None:
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [[1, 2]]})
    span = types.SampledProvenanceSpan(sequence_id="a", length=1)
    assert datum.with_provenance([span], [span, span]).loss_fn_input_spans == [span, span]


def test_sparse_torch_inputs_are_named() -> None:
    cells = torch.zeros(4, 8)
    cells[2, 3] = 0.5
    datum = types.Datum(
        types.ModelInput.from_ints([1]),
        {"weights": cells, "advantages": cells, "target_tokens": [1]},
    )
    assert datum.loss_fn_inputs["weights"].is_sparse
    assert not datum.loss_fn_inputs["advantages"].is_sparse
    assert np.array_equal(datum.loss_fn_inputs["weights"].to_numpy(), cells.numpy())
    assert datum.loss_fn_inputs["weights"].nbytes < datum.loss_fn_inputs["advantages"].nbytes


@given(
    rows=st.integers(0, 6),
    cols=st.integers(0, 6),
    pad=st.integers(-2, 2),
    seed=st.integers(0, 2**16),
    whole=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sparse_tensors_equal_their_dense_form(
    rows: int, cols: int, pad: int, seed: int, whole: bool
) -> None:
    generator = np.random.default_rng(seed)
    cells = np.where(
        generator.random((rows, cols)) < 0.3, generator.integers(-9, 9, (rows, cols)), pad
    )
    dense = torch.from_numpy(cells if whole else cells.astype(np.float32))
    tensor = types.TensorData.from_torch_sparse(dense, pad)
    listed = int(np.count_nonzero(cells != pad))
    assert tensor.is_sparse == (rows + 1 + 2 * listed < rows * cols)
    assert np.array_equal(tensor.to_numpy(pad), dense.numpy())
    assert tensor.dtype == ("int64" if whole else "float32")


@pytest.mark.parametrize("pad", ["0", None, True, 0.5])
def test_pad_that_does_not_fit_is_refused(pad: Any) -> None:
    with pytest.raises(TypeError, match="pad_value"):
        sparse().to_numpy(pad)
    with pytest.raises(TypeError, match="pad_value"):
        types.TensorData.from_torch_sparse(torch.zeros(2, 2, dtype=torch.int64), pad)


# ── equality and copies ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "value", BULK + EXAMPLES, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(BULK + EXAMPLES)]
)
def test_copies_are_equal_and_deep_copies_share_no_data(value: Any) -> None:
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is type(value)
        assert same == value
    assert value != "something else"
    if hasattr(value, "model_copy"):
        assert value.model_copy() == value
        assert value.model_copy(deep=True) == value


def test_deep_copies_of_tensors_own_their_values() -> None:
    tensor = types.TensorData.from_any([1.0, 2.0])
    assert np.shares_memory(tensor.values, tensor.model_copy().values)
    assert not np.shares_memory(tensor.values, tensor.model_copy(deep=True).values)
    assert tensor.model_copy(update={"shape": [2, 1]}).tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1, 2], [1.0, 2.0], False),
        ([[1, 2]], [1, 2], False),
        ([1, 2], [1, 3], False),
    ],
    ids=str,
)
def test_tensors_compare_by_content(first: Any, second: Any, equal: bool) -> None:
    one, two = types.TensorData.from_any(first), types.TensorData.from_any(second)
    assert (one == two) is equal
    if equal:
        assert hash(one) == hash(two)
    assert one == types.TensorData(one.data, one.dtype, None if one.shape == [2] else one.shape)
    assert sparse() == sparse()
    assert sparse() != sparse(sparse_col_indices=[0, 3, 0])


def test_data_and_results_are_dataclasses() -> None:
    datum = dataclasses.replace(
        traced(), loss_fn_inputs={"weights": types.TensorData.from_any([1.0])}
    )
    assert datum.loss_fn_inputs["weights"].data == [1.0]
    assert datum.model_input_spans == traced().model_input_spans
    sequence = types.SampledSequence("stop", "a", np.array([1], np.int32))
    assert sequence.tokens == [1]
    assert dataclasses.replace(sequence, sequence_id="b").sequence_id == "b"
    with pytest.raises(AttributeError):
        datum.model_input = types.ModelInput.empty()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (types.TensorData.from_any([1]), "shape"),
        (types.EncodedTextChunk(tokens=[1]), "tokens_np"),
        (types.ModelInput.from_ints([1]), "chunks"),
        (types.DimuonParams(learning_rate=1), "learning_rate"),
        (types.AdamOptimizerConfig(), "type"),
        (types.ForwardBackwardOutput("x", []), "metrics"),
        (types.OptimStepRequest(model_id="m", optim_params=types.AdamParams()), "seq_id"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_values_do_not_change(value: Any, field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(value, field, None)
    with pytest.raises(AttributeError):
        delattr(value, field)


def test_pickles_do_not_carry_lists_that_were_only_read() -> None:
    sequence = types.SampledSequence("stop", "", np.arange(1000, dtype=np.int32))
    before = len(pickle.dumps(sequence))
    assert len(sequence.tokens) == 1000
    assert len(pickle.dumps(sequence)) == before
    assert sequence == types.SampledSequence("stop", "", np.arange(1000, dtype=np.int32))


# ── dumps ─────────────────────────────────────────────────────────────────────────────────────────


def test_dumps_can_be_narrowed() -> None:
    params = types.AdamParams(learning_rate=0.5)
    assert params.model_dump(include={"eps"}) == {"eps": 1e-12}
    assert (
        params.model_dump(exclude_defaults=True)
        == params.model_dump(exclude_unset=True)
        == {"learning_rate": 0.5}
    )
    assert "eps" not in params.model_dump(exclude={"eps"})
    assert params.model_dump_json(include={"beta1"}, indent=2) == '{\n  "beta1": 0.9\n}'
    request = types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b")
    assert request.model_dump(exclude_defaults=True).keys() == {
        "session_id",
        "model_seq_id",
        "base_model",
    }
    assert types.ModelInput.from_ints([1]).model_dump(exclude={"chunks"}) == {}


def test_models_that_hold_ours_have_a_schema() -> None:
    class Holder(pydantic.BaseModel):
        params: types.AdamParams
        prompt: types.ModelInput
        step: types.OptimStepRequest

    properties = Holder.model_json_schema()["properties"]
    assert properties.keys() == {"params", "prompt", "step"}


def test_numbers_of_numpy_can_be_sent() -> None:
    params = types.AdamParams(learning_rate=np.float32(0.5), eps=np.float64(1e-8))  # type: ignore[arg-type]
    assert json.loads(params.model_dump_json())["learning_rate"] == 0.5
    sampling = types.SamplingParams(max_tokens=np.int64(3), stop=(np.int64(1), 2), temperature=1)  # type: ignore[arg-type]
    assert json.loads(sampling.model_dump_json())["stop"] == [1, 2]
    assert isinstance(sampling.temperature, float)
    assert json.loads(codec.encode({"a": np.float64(0.5), "b": np.arange(2)}).data) == {
        "a": 0.5,
        "b": [0, 1],
    }


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C90", "24.types.3")
@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": "fast"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"weight_decay": -1.0},
        {"grad_clip_norm": float("inf")},
    ],
    ids=str,
)
def test_adam_parameters_are_checked_on_request(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        types.AdamParams(**fields).validate()
    params = types.AdamParams(learning_rate=1)
    assert params.validate() is params


def test_step_takes_its_parameters_once() -> None:
    adam, dimuon = types.AdamParams(), types.DimuonParams(learning_rate=1.0)
    for fields in ({}, {"optim_params": adam, "adam_params": types.AdamParams(eps=1.0)}):
        with pytest.raises(ValueError, match="once"):
            types.OptimStepRequest(model_id="m", **fields)  # type: ignore[arg-type]
    step = types.OptimStepRequest(model_id="m", optim_params=dimuon)
    assert (step.adam_params, step.optimizer_params) == (None, dimuon)
    assert step.model_copy(update={"seq_id": 2}).optim_params == dimuon
    assert step.model_copy(update={"adam_params": adam}).optim_params == adam


def test_later_versions_of_a_known_optimizer_pass_through() -> None:
    config = types.OptimizerConfigBase.from_wire({"type": "dimuon", "version": 2, "new": True})
    assert type(config) is types.OptimizerConfigBase
    assert config.to_wire() == {"type": "dimuon", "version": 2, "new": True}
    with pytest.raises(ValueError, match="DimuonParams"):
        types.DimuonParams.from_wire({"type": "dimuon"})


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U41")
def test_versions_of_weights_and_cache_hits_are_read() -> None:
    sequence = {
        "stop_reason": "stop",
        "tokens": [5, 6, 7],
        "logprobs": None,
        "weights_versions": [1, 1, 2],
    }
    wire = {"sequences": [sequence], "prompt_cache_hit_tokens": 64, "type": "sample"}
    response = types.SampleResponse.from_wire(wire)
    assert response.sequences[0].weights_versions == [1, 1, 2]
    assert response.prompt_cache_hit_tokens == 64
    assert response.to_wire() == wire
    assert response.sequences[0].named("x").weights_versions == [1, 1, 2]
    for bad in ([1, 1], [[1], [1], [2]], ["a", 1, 2], [2**70, 1, 1]):
        with pytest.raises(ValueError, match="weights_versions"):
            types.SampledSequence.from_wire(sequence | {"weights_versions": bad})


@pytest.mark.covers("C90", "24.types.7")
def test_tables_of_older_dialects_are_read() -> None:
    wire = {
        "sequences": [{"stop_reason": "stop", "tokens": [1], "logprobs": [-0.5]}],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [[3, -0.5], {"token_id": 4, "logprob": -1}]],
    }
    response = types.SampleResponse.from_wire(wire)
    assert response.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.0)]]
    assert types.SampleResponse.from_wire(json.loads(json.dumps(response.to_wire()))) == response
    for bad in ([[[1]]], [[{"token_id": 1}]], [5], [[["a", 1.0]]]):
        with pytest.raises(ValueError, match="top-k"):
            types.SampleResponse.from_wire(wire | {"topk_prompt_logprobs": bad})


@pytest.mark.covers("C90")
def test_stream_chunks_have_kinds() -> None:
    token = types.SampleStreamChunk.from_map(
        {"token": "a", "token_id": 3, "index": 0, "logprob": -0.5, "else": 1}
    )
    assert (token.event_type, token.is_done) == ("token", False)
    done = types.SampleStreamChunk.from_map({"finish_reason": "stop", "total_tokens": 4})
    assert done == types.SampleStreamChunk.done("stop", 4)
    assert done.is_done
    error = types.SampleStreamChunk.from_map({"error": "broken"})
    assert (error.event_type, error.token, error.is_done) == ("error", "broken", True)


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C90")
def test_custom_loss_adds_up() -> None:
    term = types.RegularizerOutput.from_computation("l2", 4.0, 0.5, grad_norm=0.0, custom={"a": 1})
    assert (term.contribution, term.grad_norm_weighted) == (2.0, 0.0)
    output = types.CustomLossOutput.build(1.5, {"kl": 0.1}, [term], base_grad_norm=3.0)
    assert (output.loss_total, output.regularizer_total) == (3.5, 2.0)
    dumped = json.loads(codec.encode(output).data)
    assert dumped["base_loss"] == {"value": 1.5, "grad_norm": 3.0, "custom": {"kl": 0.1}}
    assert "total_grad_norm" not in dumped
    assert types.CustomLossOutput.model_validate(dumped) == output
    bare = types.RegularizerOutput.from_computation("l1", 1.0, 1.0)
    assert "grad_norm_weighted" not in json.loads(codec.encode(bare).data)


@pytest.mark.covers("C90")
@pytest.mark.parametrize(
    "fields", [{"weight": -1}, {"weight": "1"}, {"name": ""}, {"fn": 5}], ids=str
)
def test_regularizers_are_checked(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"fn": lambda data, logprobs: 0, "weight": 1.0, "name": "l2"}
    assert not types.RegularizerSpec(**given).async_
    with pytest.raises(ValueError, match=next(iter(fields))):
        types.RegularizerSpec(**given | fields)


@pytest.mark.covers("C90")
@pytest.mark.parametrize(
    ("metrics", "loss"),
    [({"loss": 1.0, "loss:sum": 2.0}, 1.0), ({"loss:sum": 2.0}, 2.0), ({}, None)],
)
def test_result_knows_its_loss(metrics: dict[str, float], loss: float | None) -> None:
    assert types.ForwardBackwardOutput("x", [], metrics).loss == loss


# ── enumerations and other helpers ────────────────────────────────────────────────────────────────


@pytest.mark.covers("C90", "24.types.1")
def test_literals_are_parsed_or_none() -> None:
    assert types.literal_values(types.TensorDtype) == ("int64", "float32")
    assert types.literal_values(types.LossFnType)[:2] == ("cross_entropy", "importance_sampling")
    assert types.parse_literal(types.StopReason, "stop") == "stop"
    for other in ("STOP", "", None, 1, ["stop"]):
        assert types.parse_literal(types.StopReason, other) is None
    assert types.parse_literal(types.CustomLossInputRank, True) is None


@pytest.mark.covers("C90")
def test_losses_come_in_the_order_of_the_older_sdks() -> None:
    older = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
    assert types.literal_values(types.LossFnType)[:5] == older
    assert [
        types.parse_literal(types.LossFnType, name) for name in (*older, "PPO", "hinge", None)
    ] == [
        *older,
        *[None] * 3,
    ]


@pytest.mark.covers("C09", "C90")
@pytest.mark.parametrize(
    ("text", "category", "again"),
    [
        ("user", "user", False),
        (" User ", "user", False),
        ("SERVER", "server", True),
        ("unknown", "unknown", True),
        ("nobody", "unknown", True),
    ],
)
def test_categories_of_failures_are_parsed(text: str, category: str, again: bool) -> None:
    parsed = types.RequestErrorCategory.parse(text)
    assert (parsed, parsed.is_retryable) == (category, again)
    answer = types.RequestFailedResponse.model_validate({"error": "e", "category": text})
    assert answer.category is parsed
    assert types.RequestErrorCategory.parse(None) is types.RequestErrorCategory.Unknown


@pytest.mark.covers("C90", "D24", "24.types.8")
def test_continuing_operations_are_parsed_strictly() -> None:
    whole = {"type": "Try_Again", "request_id": "r", "queue_state": "active"}
    read = types.TryAgainResponse.model_validate(whole)
    assert (read.type, read.queue_state, read.retry_after_ms, read.queue_state_reason) == (
        "try_again",
        "active",
        None,
        None,
    )
    full = types.TryAgainResponse.model_validate(
        whole | {"retry_after_ms": 0, "queue_state_reason": "busy"}
    )
    assert (full.retry_after_ms, full.queue_state_reason) == (0, "busy")
    assert types.TryAgainResponse.model_validate(full.model_dump()) == full
    wrong: dict[str, list[Any]] = {
        "type": ["again", "", None, 1],
        "request_id": [None, 5],
        "queue_state": [None, 5],
        "retry_after_ms": [-1, 1.5, "10", True],
        "queue_state_reason": [5, []],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                types.TryAgainResponse.model_validate(whole | {name: value})
            with pytest.raises(ValueError, match=name):
                types.TryAgainResponse(**(whole | {name: value}))
    for name in ("request_id", "queue_state"):
        with pytest.raises(ValueError, match=name):
            types.TryAgainResponse.model_validate(
                {key: value for key, value in whole.items() if key != name}
            )


@pytest.mark.covers("C90")
def test_models_may_be_listed_by_their_names() -> None:
    listed = [
        "a",
        None,
        {"model_name": "b", "trainable": True, "news": 1},
        {"max_context_length": 5},
    ]
    read = types.GetServerCapabilitiesResponse.model_validate({"supported_models": listed})
    assert read.model_names() == ["a", "b", None]
    assert read.supported_models[1] == types.SupportedModel(model_name="b", trainable=True)
    assert types.GetServerCapabilitiesResponse.model_validate(read.model_dump()) == read
    made = types.GetServerCapabilitiesResponse(
        supported_models=[types.SupportedModel(model_name="c")]
    )
    assert made.model_names() == ["c"]
    for wrong in (5, {"model_name": 5}):
        with pytest.raises(ValueError, match=r"int|object"):
            types.GetServerCapabilitiesResponse.model_validate({"supported_models": [wrong]})


@pytest.mark.covers("C90", "D05")
def test_lora_config_is_read_unchanged() -> None:
    info = types.GetInfoResponse.model_validate(
        {"model_id": "m", "model_data": {"tokenizer_id": "org/name:variant:2"}, "is_lora": False}
    )
    assert info.is_lora is False
    assert info.model_data.tokenizer_id == "org/name"
    assert types.ModelData().tokenizer_id is None


@pytest.mark.covers("C90")
def test_unknown_stop_reason_is_none() -> None:
    for told, reason in (("stop", "stop"), ("length", "length"), ("eos", None), (None, None)):
        assert (
            types.SampledSequence.from_wire({"tokens": [1], "stop_reason": told}).stop_reason
            == reason
        )
    assert types.SampledSequence.from_wire({"tokens": [1]}).stop_reason is None
    assert types.SessionHeartbeatResponse.model_validate({"type": "anything", "more": 1})


@pytest.mark.covers("C90")
@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("active", "active"),
        (" PAUSED_capacity\n", "paused_capacity"),
        ("?", "unknown"),
        (None, "unknown"),
        (5, "unknown"),
    ],
)
def test_queue_states_are_parsed(text: Any, state: str) -> None:
    assert types.QueueState.parse(text) == state
    assert str(types.QueueState.parse(text)) == state


@pytest.mark.covers("C90")
def test_precision_loss_warns() -> None:
    for dtype, wire in ((np.float64, "float32"), (np.uint64, "int64")):
        lost = types.check_precision_loss(np.dtype(dtype))
        assert lost is not None
        assert lost[0] == wire
        with pytest.warns(UserWarning, match=wire):
            assert types.dtype_of(np.zeros(1, dtype), warn=True) == wire
    for kept in (np.float32, np.int32, np.uint8, np.bool_):
        assert types.check_precision_loss(np.zeros(1, kept)) is None
        types.dtype_of(np.zeros(1, kept), warn=True)


@pytest.mark.covers("C78", "1.19/6")
def test_sizes_are_estimated() -> None:
    prompt = types.ModelInput.from_ints([1, 2]).append(image())
    assert prompt.estimated_bytes == 20 + 4
    pointer = types.ImageAssetPointerChunk(format="png", location="there")
    prompt = prompt.append(pointer).append(types.DmelChunk(dmel=b"123"))
    assert prompt.estimated_bytes == 24 + 5 + 3
    assert types.Datum(prompt, {"weights": [1, 2, 3]}).estimated_bytes == 32 + 30


@pytest.mark.covers("C90")
def test_text_becomes_tokens() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + [ord(letter) for letter in text]

    assert types.ModelInput.from_text("ab", tokenizer=Letters()).to_ints() == [0, 97, 98]
    assert types.ModelInput.from_text(
        "ab", tokenizer=Letters(), add_special_tokens=False
    ).to_ints() == [97, 98]
    for name in (None, "", 5):
        with pytest.raises(ValueError, match="model_name"):
            types.ModelInput.from_text("ab", model_name=name)  # type: ignore[arg-type]
    assert types.ModelInput.from_text("1+1", model_name="tinkex/tiny").length > 0


@pytest.mark.covers("C90")
def test_unknown_events_are_dropped_when_a_batch_is_read() -> None:
    when = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    event = types.GenericEvent(
        event_id="a", event_session_index=0, timestamp=when, event_name="n", event_data={"k": 1}
    )
    fields = {"platform": "p", "sdk_version": "1", "session_id": "s", "process_uuid": "u"}
    batch = types.TelemetryBatch(events=[event], **fields)
    wire = json.loads(batch.model_dump_json())
    assert wire["events"][0]["event"] == "GENERIC_EVENT"
    wire["events"].append({"event": "NEWS"})
    back = types.TelemetryBatch.model_validate(wire)
    assert back == batch
    assert back.size == 1
    with pytest.raises(ValueError, match="event_name"):
        types.TelemetryBatch.model_validate(
            wire | {"events": [{**wire["events"][0], "event_name": 5}]}
        )


# ── paths ─────────────────────────────────────────────────────────────────────────────────────────

PART = st.text(
    st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=12
)


@pytest.mark.covers("C90", "C82")
@given(
    run=PART, kind=st.sampled_from(["weights", "sampler_weights", "external_weights"]), name=PART
)
@settings(max_examples=40, deadline=None)
def test_paths_are_parsed(run: str, kind: str, name: str) -> None:
    path = f"tinker://{run}/{kind}/{name}"
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.tinker_path == path
    assert parsed.training_run_id == run
    assert parsed.checkpoint_id == f"{kind}/{name}"
    assert parsed.name == name
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    assert parsed.checkpoint_type == kinds[kind]


@pytest.mark.covers("C82")
@given(
    parts=st.lists(st.sampled_from(["r", "weights", "n", "", "sampler_weights"]), max_size=5),
    scheme=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_other_paths_are_refused(parts: list[str], scheme: bool) -> None:
    path = ("tinker://" if scheme else "") + "/".join(parts)
    good = scheme and len(parts) == 3 and all(parts) and parts[1] in ("weights", "sampler_weights")
    if good:
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    else:
        with pytest.raises(ValueError, match="expected"):
            types.ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_public_names_are_the_same_everywhere() -> None:
    for name in types.__all__:
        assert getattr(types, name) is not None
        if name in tinkex.__all__:
            assert getattr(tinkex, name) is getattr(types, name)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W18")
@pytest.mark.parametrize(
    "error",
    [
        tinkex.TinkerError("m", hint="h"),
        tinkex.ConfigurationError("m"),
        tinkex.APIConnectionError("m", attempts=3, hint="h"),
        tinkex.APITimeoutError("m"),
        tinkex.APIResponseValidationError("m", body=b"x"),
        tinkex.RateLimitError(
            "m", status_code=429, retry_after=1.5, body={"detail": "x"}, request_id="r"
        ),
        tinkex.RequestFailedError("m", "r", "user"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: tinkex.TinkerError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_errors_can_be_caught_by_their_standard_kin() -> None:
    assert issubclass(tinkex.ConfigurationError, ValueError)
    assert issubclass(tinkex.APITimeoutError, TimeoutError)
    assert str(tinkex.TinkerError("what", hint="do this")) == "what\nhint: do this"
