"""Each loss by its own rules: what it takes, what it refuses, and what its numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from engine.references import adapter_of, assert_near, gradients, randomise, reference_run
from tinkex.engine.api import Directory, EngineError, run_pass
from tinkex.engine.losses.table import LOSSES, SEQUENCE
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.training import OWN_LOSSES, LossFnType

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint, Data
    from tinkex.engine.torch.engine import TorchEngine


def with_inputs(batch: list[Datum], **ranges: tuple[float, float]) -> list[Datum]:
    """The same data with further inputs, uniform in the ranges given."""
    random = np.random.default_rng(1)
    return [
        Datum(
            datum.model_input,
            {
                **datum.loss_fn_inputs,
                **{
                    name: random.uniform(low, high, datum.model_input.length).astype(np.float32)
                    for name, (low, high) in ranges.items()
                },
            },
        )
        for datum in batch
    ]


def marked(batch: list[Datum], seed: int = 1) -> list[Datum]:
    """The same data, with about half of the positions marked for the ratio of the sequence; none in
    the last."""
    random = np.random.default_rng(seed)
    masks = [(random.random(datum.model_input.length) < 0.5).astype(np.float32) for datum in batch]
    masks[-1][:] = 0
    return [
        Datum(datum.model_input, {**datum.loss_fn_inputs, "sequence_ratio_mask": mask})
        for datum, mask in zip(batch, masks, strict=True)
    ]


NEAR = {"clip_low_threshold": (0.9, 0.99), "clip_high_threshold": (1.01, 1.1)}


@pytest.mark.covers("S16")
@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_thresholds_may_be_given_for_each_token(
    loss: str, engine: TorchEngine, data: Data, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    randomise(adapter_of(engine))
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    batch = with_inputs(data(9, 4, 17), **NEAR)
    if loss == "gspo":
        batch = marked(batch)
    total, _, grads = reference_run(checkpoint("llama"), tmp_path, batch, loss, {})
    output = run_pass(engine, "a", batch, loss, {"clip_low_threshold": 0.5})  # the tokens' own win
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for name, grad in gradients(adapter_of(engine)).items():
        assert_near(grad, grads[name], 1e-5)


@pytest.mark.covers("S16")
def test_thresholds_per_token_equal_a_global_one(engine: TorchEngine, data: Data) -> None:
    batch = data(9, 4)
    given = with_inputs(batch, clip_low_threshold=(0.95, 0.95))
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}
    ours = run_pass(engine, "a", given, "ppo", {"clip_high_threshold": 1.02})
    theirs = run_pass(engine, "a", batch, "ppo", config)
    assert ours.metrics == theirs.metrics


@pytest.mark.covers("S16")
def test_ratio_of_a_sequence_is_the_mean_over_its_marks(engine: TorchEngine, data: Data) -> None:
    batch = marked(data(9, 4, 9, 3))
    output = run_pass(
        engine, "a", batch, "gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    )
    total = 0.0
    for datum, result in zip(batch, output.loss_fn_outputs, strict=True):
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        kept = inputs["sequence_ratio_mask"] != 0
        gap = result["logprobs"].to_numpy()[kept] - inputs["logprobs"][kept]
        ratio = np.exp(gap.mean()) if kept.any() else 1.0
        total -= float((ratio * inputs["advantages"]).sum())
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.covers("S16")
def test_clipped_sequence_has_no_gradient(engine: TorchEngine, data: Data) -> None:
    above = data(6, logprobs=np.full(6, -60, np.float32), advantages=np.ones(6, np.float32))
    run_pass(engine, "a", above, "gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    grad = adapter_of(engine).grad
    assert grad is not None
    assert not grad.any()


@pytest.mark.covers("S16")
@pytest.mark.parametrize("loss", ["ppo", "importance_sampling"])
def test_masked_infinite_ratio_has_no_effect(engine: TorchEngine, data: Data, loss: str) -> None:
    """Its exponential is infinite, and nothing times infinity is no number."""
    advantages = np.array([0, 1.5, 2], np.float32)
    (near,) = data(3, advantages=advantages)
    expected = run_pass(engine, "a", [near], loss, {})
    grad = adapter_of(engine).grad
    assert grad is not None
    wanted = grad.clone()
    adapter_of(engine).grad = None
    q = near.loss_fn_inputs["logprobs"].to_numpy().copy()
    q[0] = -3000.0
    output = run_pass(engine, "a", data(3, advantages=advantages, logprobs=q), loss, {})
    assert output.metrics["loss:sum"] == expected.metrics["loss:sum"]
    grad = adapter_of(engine).grad
    assert grad is not None
    assert torch.equal(grad, wanted)


@pytest.mark.covers("S16")
def test_ratio_beyond_all_bounds_is_clipped(engine: TorchEngine, data: Data) -> None:
    above = data(6, logprobs=np.full(6, -3000, np.float32), advantages=np.full(6, 2, np.float32))
    output = run_pass(engine, "a", above, "ppo", {"clip_high_threshold": 1.5})
    assert output.metrics["loss:sum"] == -18
    grad = adapter_of(engine).grad
    assert grad is not None
    assert not grad.any()
    below = data(6, logprobs=np.full(6, -3000, np.float32), advantages=np.full(6, -1, np.float32))
    with pytest.raises(EngineError, match="not finite; nothing was added"):
        run_pass(engine, "a", below, "ppo", {})


def test_clients_know_the_losses_of_the_table() -> None:
    assert (*get_args(LossFnType), *OWN_LOSSES) == tuple(LOSSES)


@pytest.mark.parametrize("loss", sorted(name for name in LOSSES if LOSSES[name].function))
def test_gradients_of_losses_equal_finite_differences(loss: str) -> None:
    random = torch.Generator().manual_seed(3)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(12, generator=random, dtype=torch.float64)

    point = uniform(-2, -0.1)
    inputs = {
        "weights": uniform(-1, 1),
        "advantages": uniform(-1, 1),
        "logprobs": point + uniform(-0.3, 0.3),
        "sequence_ratio_mask": (uniform(0, 1) > 0.5).double(),
        "clip_low_threshold": uniform(0.7, 0.9),
        "clip_high_threshold": uniform(1.1, 1.3),
        SEQUENCE: torch.arange(3).repeat_interleave(4),
    }

    function, defaults = LOSSES[loss].function, LOSSES[loss].config
    settings = {name: 0.3 if value is None else value for name, value in defaults.items()}
    assert function is not None

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        # their ratios are weights, without a gradient: hold them where they are
        if loss in ("cispo", "gspo"):
            frozen = point.clone()
            swapped = inputs | {"logprobs": inputs["logprobs"] + (logprobs.detach() - frozen)}
            return function(logprobs, swapped, settings)
        return function(logprobs, inputs, settings)

    # its tokens have the value of the sequence's ratio, which moves with none of them
    if loss == "gspo":
        leaf = point.clone().requires_grad_()
        value(leaf).sum().backward()  # type: ignore[no-untyped-call]
        losses = value(point)
        low, high = inputs["clip_low_threshold"], inputs["clip_high_threshold"]
        ratio = -losses / inputs["advantages"]
        free = (ratio > low) & (ratio < high)
        torch.testing.assert_close(leaf.grad, torch.where(free, losses, 0.0))
    else:
        assert torch.autograd.gradcheck(value, (point.requires_grad_(),))


@pytest.mark.covers("S16")
def test_dro_needs_its_beta(engine: TorchEngine, data: Data) -> None:
    with pytest.raises(EngineError, match="loss 'dro' needs the setting 'beta': it has no default"):
        run_pass(engine, "a", data(5), "dro", {})
    assert run_pass(engine, "a", data(5), "dro", {"beta": 0.0}).metrics["loss:sum"] != 0


@pytest.mark.covers("S16")
def test_defaults_are_the_documented_ones() -> None:
    assert LOSSES["ppo"].config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert LOSSES["cispo"].config == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dro", {"beta": "much"}, {}, "loss 'dro': setting 'beta' must be a finite number, got 'much'"),
    ("dro", {"clip_low_threshold": 1.0}, {}, "loss 'dro' has no setting 'clip_low_threshold'; "
                                             "known are beta"),
    ("cispo", {"epsilon": 1.0}, {}, "known are clip_low_threshold, clip_high_threshold"),
    ("ppo", {"clip_low_threshold": 2.0}, {}, "datum 0: 'clip_low_threshold' is above "
                                             "'clip_high_threshold'"),
    ("gspo", {}, {"clip_high_threshold": [2.0, 0.1, 2.0]},
     "datum 0: 'clip_low_threshold' is above"),
    ("gspo", {}, {"sequence_ratio_mask": [1.0, 1.0]}, "'sequence_ratio_mask' has length 2 but .* "
                                                      "length 3"),
    ("gspo", {}, {"clip_high_threshold": [float("nan")] * 3}, "'clip_high_threshold' holds NaN or "
                                                              "infinity"),
    ("ppo", {}, {"sequence_ratio_mask": [1.0] * 3}, "unknown input 'sequence_ratio_mask'; allowed "
                                                    "are advantages"),
    ("cross_entropy", {}, {"clip_low_threshold": [1.0] * 3}, "unknown input 'clip_low_threshold'; "
                                                             "allowed are"),
    ("importance_sampling", {}, {"beta": np.ones(3)}, "allowed are advantages, logprobs, mask, "
                                                      "target_tokens, weights"),
]  # fmt: skip


@pytest.mark.covers("S16", "S19")
@pytest.mark.parametrize(("loss", "config", "inputs", "message"), BAD)
def test_unknown_loss_input_is_refused_with_the_known_ones(
    engine: TorchEngine,
    data: Data,
    loss: str,
    config: dict[str, Any],
    inputs: dict[str, Any],
    message: str,
) -> None:
    for backward in (True, False):
        with pytest.raises(EngineError, match=message) as caught:
            run_pass(engine, "a", data(3, **inputs), loss, config, backward=backward)
        assert caught.value.category == "user"
    assert adapter_of(engine).grad is None


@pytest.mark.covers("S19")
def test_inputs_that_programs_send_along_are_ignored(engine: TorchEngine, data: Data) -> None:
    (plain,) = data(5)
    few = Datum(
        plain.model_input,
        {k: v for k, v in plain.loss_fn_inputs.items() if k in ("target_tokens", "weights")},
    )
    more = Datum(plain.model_input, {**plain.loss_fn_inputs, "mask": np.ones(5, np.float32)})
    ours, theirs = (
        run_pass(engine, "a", [datum], "cross_entropy", {}).metrics for datum in (few, more)
    )
    assert ours == theirs


@pytest.mark.covers("S17")
def test_huge_and_opposite_weights_are_taken_as_they_are(engine: TorchEngine) -> None:
    weights = np.array([1e6, -1e6, 0.25, -3.0], np.float32)
    datum = Datum(
        ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": [2, 3, 4, 5], "weights": weights}
    )
    output = run_pass(engine, "a", [datum], "cross_entropy", {})
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    assert output.metrics["loss:sum"] == pytest.approx(-float((weights * logprobs).sum()), rel=1e-5)
