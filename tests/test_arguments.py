"""Arguments of records: unknown names get a suggestion, and values are checked when a record is
made."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex import types
from tinkex.types.record import to_json

PROMPT = types.ModelInput.from_ints([1, 2])
PARAMS = types.SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("kind", "fields", "meant"),
    [
        (
            types.AdamParams,
            {"lr": 0.1},
            "AdamParams: unexpected keyword argument 'lr'; did you mean learning_rate?",
        ),
        (types.AdamParams, {"learning_rat": 0.1}, "did you mean learning_rate?"),
        (types.AdamParams, {"betas": (0.9, 0.99)}, "did you mean beta1 and beta2?"),
        (types.DimuonParams, {"lr": 0.1}, "DimuonParams: .*did you mean learning_rate?"),
        (types.SamplingParams, {"max_new_tokens": 5}, "did you mean max_tokens?"),
        (types.SamplingParams, {"stop_sequences": ["x"]}, "did you mean stop?"),
        (types.LoraConfig, {"r": 8}, "did you mean rank?"),
        (
            types.LoraConfig,
            {"quux": 8},
            "it takes rank, seed, train_unembed, train_mlp, train_attn",
        ),
        (types.Datum, {"model_inputs": PROMPT}, "Datum: .*did you mean model_input?"),
        (
            types.SampleRequest,
            {"prompt": PROMPT, "sampling_params": PARAMS, "n": 2},
            "did you mean num_samples?",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_unknown_argument_gets_a_suggestion(kind: Any, fields: dict[str, Any], meant: str) -> None:
    with pytest.raises(TypeError, match=meant.replace("?", r"\?")):
        kind(**fields)


def test_copy_suggests_a_field() -> None:
    with pytest.raises(TypeError, match=r"'lr'; did you mean learning_rate\?"):
        types.AdamParams().model_copy(update={"lr": 0.1})


def test_other_type_errors_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="Missing required argument 'rank'"):
        types.LoraConfig()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got a list: use"):
        types.Datum([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["x", "1e-4", b"1", True, None])
@pytest.mark.parametrize("field", ["learning_rate", "beta1", "grad_clip_norm"])
def test_adam_parameters_are_numbers(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a number, got {type(value).__name__}"):
        types.AdamParams(**{field: value})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (types.SamplingParams, "max_tokens"),
        (types.SamplingParams, "seed"),
        (types.SamplingParams, "top_k"),
        (types.LoraConfig, "rank"),
        (types.LoraConfig, "seed"),
    ],
)
@pytest.mark.parametrize("value", [2**70, -(2**63) - 1, 1e30])
def test_integers_fit_in_64_bits(kind: Any, field: str, value: Any) -> None:
    fields = {"rank": 8} if kind is types.LoraConfig else {}
    with pytest.raises(ValueError, match=f"{field} must fit in 64 bits"):
        kind(**{**fields, field: value})


def test_sample_request_checks_its_parts() -> None:
    with pytest.raises(
        TypeError, match=r"prompt must be a ModelInput, got a list: use ModelInput.from_ints"
    ):
        types.SampleRequest(prompt=[1, 2], sampling_params=PARAMS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a str: use ModelInput.from_text"):
        types.SampleRequest(prompt="hello", sampling_params=PARAMS)  # type: ignore[arg-type]
    for name in ("num_samples", "topk_prompt_logprobs", "prompt_logprobs_last_n"):
        many: dict[str, Any] = {name: 2**70}
        with pytest.raises(ValueError, match=f"{name} must fit in 64 bits"):
            types.SampleRequest(prompt=PROMPT, sampling_params=PARAMS, **many)
    with pytest.raises(ValueError, match=r"max_tokens"):
        types.SampleRequest(prompt=PROMPT, sampling_params={"max_tokens": "x"})  # type: ignore[arg-type]
    given: Any = {"prompt": PROMPT.to_wire(), "sampling_params": {"max_tokens": 1}}
    assert types.SampleRequest(**given) == types.SampleRequest(
        prompt=PROMPT, sampling_params=PARAMS
    )


def test_unsendable_number_names_its_field() -> None:
    request = types.OptimStepRequest(
        model_id="m", optim_params=types.AdamParams(learning_rate=float("nan"))
    )
    with pytest.raises(
        ValueError, match=r"adam_params\.learning_rate is nan, which cannot be sent as JSON"
    ):
        to_json(request)
    with pytest.raises(ValueError, match=r"a\[1\]\.b is inf"):
        to_json({"a": [{"b": 1.0}, {"b": float("inf")}]})
