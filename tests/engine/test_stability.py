"""The loss `stable_reinforce`, and the recordings that it is computed from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.references import adapter_of, assert_near, gradients, randomise
from tinkex.engine.api import (
    RECORDED_TOKENS,
    Directory,
    EngineError,
    Recalled,
    Recording,
    SampleJob,
    run_pass,
)
from tinkex.engine.native.library import load
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.sample.step_scheduler import Scheduler
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint

FAMILIES = ("llama", "qwen3-moe")
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4], [20, 30])


class Drawn(NamedTuple):
    """Data made of samples, and what was recorded of them."""

    data: list[Datum]
    recalled: list[Recalled]


def engine_of(checkpoint: Checkpoint, family: str, way: Any = None) -> TorchEngine:
    engine = TorchEngine({"small": checkpoint(family)}, threads=1)
    engine._sampler = Sampler(Limits(way=way))
    engine.create("a", "small", LoraConfig(rank=4))
    return engine


def draw(
    engine: TorchEngine, *, recorded: bool = True, samples: int = 2, tokens: int = 9, **params: Any
) -> list[tuple[SampleResponse, Any]]:
    """Samples of every prompt, drawn beside each other."""
    found = {}
    for number, prompt in enumerate(PROMPTS):
        request = SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=tokens + number, stop=[], **params),
            num_samples=samples,
            record_stability_info=recorded,
        )
        engine.sample_start(SampleJob(str(number), "s", request, 11 + number))
    while engine.sampling():
        for done in engine.sample_step():
            assert isinstance(done.result, SampleResponse), done.result
            found[done.job] = done.result, done.recordings
    return [found[str(number)] for number in range(len(PROMPTS))]


def experience(engine: TorchEngine, **params: Any) -> Drawn:
    """Samples of the adapter as it is, with random advantages."""
    engine.snapshot("a", "s")
    random, data, recalled = np.random.default_rng(5), [], []
    for prompt, (response, recordings) in zip(PROMPTS, draw(engine, **params), strict=True):
        for sequence, recording in zip(response.sequences, recordings, strict=True):
            tokens = np.array([*prompt, *sequence.tokens])
            logprobs, advantages = np.zeros((2, tokens.size - 1), np.float32)
            positions = np.arange(len(prompt) - 1, tokens.size - 1)
            logprobs[positions] = sequence.logprobs
            advantages[positions] = random.normal(size=positions.size)
            inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
            recalled.append(Recalled(positions, recording))
    return Drawn(data, recalled)


def gradient(
    engine: TorchEngine, drawn: Drawn, loss: str, config: dict[str, float]
) -> tuple[Any, Any]:
    """The output of a pass, and its gradient alone."""
    adapter_of(engine).grad = None
    recalled = drawn.recalled if loss == "stable_reinforce" else None
    output = run_pass(engine, "a", drawn.data, loss, config, recalled=recalled)
    grad = adapter_of(engine).grad
    assert grad is not None
    return output, grad.clone()


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U54")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_on_policy_is_that_of_importance_sampling(
    family: str, temperature: float, checkpoint: Checkpoint
) -> None:
    engine = engine_of(checkpoint, family)
    randomise(adapter_of(engine))
    drawn = experience(engine, temperature=temperature)
    output, ours = gradient(engine, drawn, "stable_reinforce", {"kl_coeff": 0.0})
    plain, theirs = gradient(engine, drawn, "importance_sampling", {})
    assert_near(ours, theirs, 1e-5)
    for mine, other in zip(output.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(mine["logprobs"].to_numpy(), other["logprobs"].to_numpy())
    _, with_kl = gradient(engine, drawn, "stable_reinforce", {"kl_coeff": 0.01})
    assert_near(with_kl, theirs, 1e-4)  # the divergence is at its least


def reference(
    directory: Path, saved: Path, drawn: Drawn, kl_coeff: float, cap: float, limit: float
) -> tuple[float, list[Any], dict[str, torch.Tensor], int]:
    """Loss, log-probabilities and gradients by transformers in float64, token by token; and how
    many were masked."""
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    model = PeftModel.from_pretrained(
        base, str(saved), is_trainable=True, autocast_adapter_dtype=False
    ).double()
    total, masked, logprobs = torch.zeros((), dtype=torch.float64), 0, []
    for datum, (positions, recording) in zip(
        drawn.data, map(dataclasses.astuple, drawn.recalled), strict=True
    ):
        recording = Recording(*recording)
        p_TV = (
            model(torch.from_numpy(datum.model_input.to_numpy()).long()[None])
            .logits[0]
            .log_softmax(-1)
        )
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        logprobs.append(p_TV.detach().numpy()[np.arange(targets.size), targets])
        for number, at in enumerate(positions):
            advantage = float(datum.loss_fn_inputs["advantages"].to_numpy()[at])
            known = [int(token) for token in recording.top_tokens[number]]
            now = [p_TV[at, token].exp() for token in known]
            then = [float(np.exp(np.float64(value))) for value in recording.top_logprobs[number]]
            now.append(1 - sum(now, torch.zeros((), dtype=torch.float64)))
            then.append(1 - sum(then))
            distance = sum(abs(float(x.detach()) - y) for x, y in zip(now, then, strict=True)) / 2
            drawn_now = p_TV[at, targets[at]]
            above = float(drawn_now.detach()) > recording.model_logprobs[number]
            pushes = (advantage > 0 and above) or (advantage < 0 and not above)
            ratio = min(float(np.exp(float(drawn_now.detach()) - recording.logprobs[number])), cap)
            if distance > limit and pushes:
                masked += 1
            else:
                total = total - ratio * advantage * drawn_now
            divergence = sum(x * (x.log() - np.log(y)) for x, y in zip(now, then, strict=True))
            total = total + kl_coeff * divergence
    total.backward()  # type: ignore[no-untyped-call]
    grads = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(total.detach()), logprobs, grads, masked


@pytest.mark.covers("U54")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("kl_coeff", "cap", "limit"), [(0.01, 20.0, 0.15), (0.5, 1.1, 0.05), (0.0, 20.0, 10.0)]
)
def test_numbers_are_those_of_the_formula(
    kl_coeff: float,
    cap: float,
    limit: float,
    temperature: float,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    engine = engine_of(checkpoint, "llama")
    drawn = experience(engine, temperature=temperature)
    randomise(adapter_of(engine))  # the policy has moved since
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    total, logprobs, grads, masked = reference(
        checkpoint("llama"), tmp_path, drawn, kl_coeff, cap, limit
    )
    config = {"kl_coeff": kl_coeff, "tinkex_ratio_cap": cap, "tinkex_divergence_limit": limit}
    output, _ = gradient(engine, drawn, "stable_reinforce", config)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for name, grad in gradients(adapter_of(engine)).items():
        assert_near(grad, grads[name], 2e-5)
    for result, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert list(result) == ["logprobs"]
        np.testing.assert_allclose(result["logprobs"].to_numpy(), expected, atol=1e-4)
    assert (masked > 0) == (limit < 1)  # else the mask would not have been tested
    if (kl_coeff, cap, limit) == (0.01, 20.0, 0.15):  # the documented defaults
        assert gradient(engine, drawn, "stable_reinforce", {})[0].metrics == output.metrics


@pytest.mark.covers("U54")
@pytest.mark.parametrize("family", FAMILIES)
def test_pass_in_pieces_gives_the_same_as_whole(family: str, checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, family)
    drawn = experience(engine)
    randomise(adapter_of(engine))
    results = []
    for budget in (8192, 13, 1):
        engine._trainer.budget = budget
        results.append(
            gradient(
                engine,
                drawn,
                "stable_reinforce",
                {"kl_coeff": 0.3, "tinkex_divergence_limit": 0.05},
            )
        )
    (whole, grad), *others = results
    for output, other in others:
        assert output.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
        assert_near(other, grad, 1e-5)
        for mine, theirs in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(
                mine["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=1e-5
            )


@pytest.mark.covers("U54")
def test_gradient_of_several_passes_is_that_of_one(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, "llama")
    drawn = experience(engine)
    randomise(adapter_of(engine))
    _, whole = gradient(engine, drawn, "stable_reinforce", {})
    parts = [
        gradient(engine, Drawn(drawn.data[at::2], drawn.recalled[at::2]), "stable_reinforce", {})[1]
        for at in (0, 1)
    ]
    assert_near(sum(parts), whole, 1e-5)


@pytest.mark.covers("U54")
def test_forward_pass_gives_the_same_numbers_and_no_gradient(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, "llama")
    drawn = experience(engine)
    expected, _ = gradient(engine, drawn, "stable_reinforce", {})
    adapter_of(engine).grad = None
    output = run_pass(
        engine, "a", drawn.data, "stable_reinforce", {}, backward=False, recalled=drawn.recalled
    )
    assert adapter_of(engine).grad is None
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kl_coeff": -0.1}, "setting 'kl_coeff' must be at least 0, got -0.1"),
    ({"kl_coeff": float("nan")}, "setting 'kl_coeff' must be a finite number, got nan"),
    ({"kl_coeff": float("inf")}, "setting 'kl_coeff' must be a finite number, got inf"),
    ({"kl_coeff": "0.1"}, "setting 'kl_coeff' must be a finite number, got '0.1'"),
    (
        {"beta": 0.1},
        "has no setting 'beta'; known are kl_coeff, tinkex_ratio_cap, tinkex_divergence_limit",
    ),
    ({"tinkex_ratio_cap": 0.0}, "setting 'tinkex_ratio_cap' must be above 0, got 0"),
    (
        {"tinkex_divergence_limit": -1.0},
        "setting 'tinkex_divergence_limit' must be at least 0, got -1",
    ),
]


@pytest.mark.covers("U54")
@pytest.mark.parametrize(("config", "message"), BAD)
def test_bad_settings_are_refused(
    config: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    engine = engine_of(checkpoint, "llama")
    with pytest.raises(EngineError, match=message):
        run_pass(engine, "a", [], "stable_reinforce", config, recalled=[])


@pytest.mark.covers("U53")
def test_data_that_disagree_with_their_recording_are_refused(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, "llama")
    data, recalled = experience(engine)

    def refused(message: str, datum: Datum, known: Recalled) -> None:
        with pytest.raises(EngineError, match=message) as caught:
            run_pass(engine, "a", [datum], "stable_reinforce", {}, recalled=[known])
        assert caught.value.category == "user"

    first, known = data[0], recalled[0]
    inputs = {name: tensor.to_numpy().copy() for name, tensor in first.loss_fn_inputs.items()}
    inputs["advantages"][1] = 0.5
    refused(
        "'advantages' is 0.5 at position 1, which was not sampled",
        Datum(first.model_input, inputs),
        known,
    )
    inputs["advantages"][1] = 0
    inputs["target_tokens"][3] += 1
    refused(
        "datum 0: the target at position 3 is .* names the sampled token",
        Datum(first.model_input, inputs),
        known,
    )
    none = Recalled(
        known.positions[:0], Recording(*(x[:0] for x in dataclasses.astuple(known.recording)))
    )
    refused("none of its targets was sampled", first, none)
    strange = dataclasses.replace(known.recording, top_tokens=known.recording.top_tokens + 90)
    refused("another vocabulary", first, Recalled(known.positions, strange))
    with pytest.raises(
        EngineError, match="computed from recordings of its samples, and there are none"
    ):
        run_pass(engine, "a", data, "stable_reinforce", {})


# ── what is recorded ──────────────────────────────────────────────────────────────────────────────

WAYS = [
    pytest.param("native", marks=pytest.mark.skipif(load() is None, reason="no C compiler here")),
    "slabs",
    "static",
]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 3, "presence_penalty": 1.5},
    {"temperature": 0.0},
]


@pytest.mark.covers("U52")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_recording_is_of_the_model_as_it_is(
    way: str, params: dict[str, Any], checkpoint: Checkpoint
) -> None:
    engine = engine_of(checkpoint, "llama", way)
    engine.load_sampler("s", "small", None)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float64)
    for prompt, (response, recordings) in zip(
        PROMPTS, draw(engine, samples=3, **params), strict=True
    ):
        assert len(recordings) == 3
        for sequence, recording in zip(response.sequences, recordings, strict=True):
            tokens = sequence.tokens
            assert recording.tokens.tolist() == tokens
            np.testing.assert_array_equal(recording.logprobs, sequence.logprobs_np)
            with torch.no_grad():
                p_SV = (
                    model(torch.tensor([*prompt, *tokens])[None])
                    .logits[0, len(prompt) - 1 : -1]
                    .log_softmax(-1)
                )
            assert recording.top_tokens.shape == (len(tokens), RECORDED_TOKENS)
            values, ids = p_SV.topk(RECORDED_TOKENS, dim=-1)
            np.testing.assert_array_equal(recording.top_tokens, ids)
            np.testing.assert_allclose(recording.top_logprobs, values, atol=1e-4)
            np.testing.assert_allclose(
                recording.model_logprobs, p_SV[range(len(tokens)), tokens], atol=1e-4
            )


@pytest.mark.covers("U52")
@pytest.mark.parametrize("way", WAYS)
def test_recording_changes_no_bit_of_a_sample(way: str, checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, "llama", way)
    engine.load_sampler("s", "small", None)
    recorded, plain = (
        draw(engine, temperature=0.8, top_p=0.9),
        draw(engine, recorded=False, temperature=0.8, top_p=0.9),
    )
    assert [response for response, _ in recorded] == [response for response, _ in plain]
    assert all(not recordings for _, recordings in plain)


@pytest.mark.covers("U52")
def test_recording_outlives_a_sample_that_is_put_back(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for few blocks, samples are put back and fed again: what was recorded of them
    stays."""
    roomy, narrow = (TorchEngine({"small": checkpoint("long-narrow")}, threads=1) for _ in range(2))
    for engine in (roomy, narrow):
        engine.load_sampler("s", "small", None)
    narrow._sampler = Sampler(Limits(cache_bytes=7 * block_bytes(narrow._bases["small"].model)))
    returned, unseat = [], Scheduler.unseat

    def counted(scheduler: Scheduler, *args: Any, again: bool) -> None:
        returned.append(again)
        unseat(scheduler, *args, again=again)

    expected = draw(roomy, samples=4, tokens=150)
    monkeypatch.setattr(Scheduler, "unseat", counted)
    found = draw(narrow, samples=4, tokens=150)
    assert any(returned)
    for (_, recordings), (_, others) in zip(expected, found, strict=True):
        for recording, other in zip(recordings, others, strict=True):
            for mine, theirs in zip(
                dataclasses.astuple(recording), dataclasses.astuple(other), strict=True
            ):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.covers("U52")
def test_long_samples_are_recorded_to_their_end(checkpoint: Checkpoint) -> None:
    engine = TorchEngine({"small": checkpoint("long-narrow")}, threads=1)
    engine.load_sampler("s", "small", None)
    for response, recordings in draw(engine, samples=1, tokens=150):
        assert recordings[0].top_logprobs.shape[0] == response.sequences[0].length >= 150
        assert (recordings[0].top_logprobs[-1] < 0).all()
