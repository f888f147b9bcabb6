"""Optimizers against references of their own in float64, and what belongs to which run."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.references import adapter_of, assert_near, randomise
from tinkex.engine.api import Directory, EngineError, run_pass
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.optim import AdamState, DimuonState, make_state, orthogonalised
from tinkex.types.optimizers import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    OptimizerConfigBase,
    OptimParamsBase,
)
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint, Data

DIMUON = DimuonOptimizerConfig()
STEP = DimuonParams(learning_rate=0.01)


@pytest.fixture
def muon(checkpoint: Checkpoint) -> TorchEngine:
    """An engine whose adapter `a` is trained with Dimuon."""
    engine = TorchEngine({"small": checkpoint("llama")}, threads=1)
    engine.create("a", "small", LoraConfig(rank=4), DIMUON)
    adapter = adapter_of(engine)
    randomise(adapter)
    adapter.state = make_state(DimuonState, adapter.state.weights)
    return engine


def matrix_sign(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Muon's iteration on the whole matrix in float64, as it is usually written."""
    if matrix.shape[0] > matrix.shape[1]:
        return matrix_sign(matrix.T).T
    x: np.ndarray[Any, Any] = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def reference_step(
    weights: dict[str, Any],
    momenta: dict[str, Any],
    grads: dict[str, Any],
    params: DimuonParams,
    rank: int,
) -> None:
    """One Dimuon step in float64, matrix by matrix."""
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    scale = min(1.0, params.grad_clip_norm / norm) if params.grad_clip_norm > 0 else 1.0
    for name, grad in grads.items():
        momenta[name] = params.beta1 * momenta[name] + (1 - params.beta1) * scale * grad
        sign = matrix_sign(momenta[name])
        weights[name] = weights[name] - params.learning_rate * math.sqrt(
            rank
        ) * sign / np.linalg.norm(sign)


STEPS = [
    DimuonParams(learning_rate=0.02),
    DimuonParams(learning_rate=0.01, beta1=0.5, grad_clip_norm=0.1),
    DimuonParams(learning_rate=0.03, beta1=0.0, grad_clip_norm=-1.0),
    DimuonParams(learning_rate=0.01, grad_clip_norm=1e6),
]


def test_dimuon_equals_its_float64_reference(muon: TorchEngine, data: Data) -> None:
    adapter = adapter_of(muon)

    def arrays(flat: torch.Tensor) -> dict[str, Any]:
        return {name: view.double().numpy().copy() for name, view in adapter.layout.tensors(flat)}

    weights = arrays(adapter.state.weights)
    momenta = {name: np.zeros_like(value) for name, value in weights.items()}
    for seed, params in enumerate(STEPS):
        run_pass(muon, "a", data(9, 17, 30, seed=seed), "cross_entropy", {})
        assert adapter.grad is not None
        grads = arrays(adapter.grad)
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
        metrics = muon.optim_step("a", params)
        assert metrics == {
            "grad_norm:mean": pytest.approx(norm),
            "learning_rate:mean": params.learning_rate,
        }
        reference_step(weights, momenta, grads, params, rank=4)
        for name, view in adapter.layout.tensors(adapter.state.weights):
            assert_near(view, weights[name], 1e-6)
    assert adapter.state.step == len(STEPS)


def test_direction_has_nearly_equal_singular_values_and_norm_one() -> None:
    made = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(0))
    directions = orthogonalised(made)
    for before, after in zip(made, directions, strict=True):
        u, _, v = torch.linalg.svd(before, full_matrices=False)
        singular = torch.linalg.svdvals(after) * math.sqrt(8)
        assert float(singular.min()) > 0.6
        assert float(singular.max()) < 1.4
        assert float(torch.linalg.matrix_norm(after)) == pytest.approx(1, rel=1e-6)
        aligned = u.T @ after @ v.T  # the same singular vectors
        assert_near(
            aligned - torch.diag(torch.diagonal(aligned)) + torch.eye(8), torch.eye(8), 1e-5
        )


def test_matrix_without_a_gradient_stays(checkpoint: Checkpoint, data: Data) -> None:
    engine = TorchEngine({"small": checkpoint("llama")}, threads=1)
    engine.create("a", "small", LoraConfig(rank=4), DIMUON)
    adapter = adapter_of(engine)
    before = dict(adapter.layout.tensors(adapter.state.weights))
    run_pass(engine, "a", data(9), "cross_entropy", {})  # B is zero, so A has no gradient yet
    engine.optim_step("a", STEP)
    for name, after in adapter.layout.tensors(adapter.state.weights):
        assert torch.equal(after, before[name]) == name.endswith("lora_A")
        if name.endswith("lora_B"):
            # lr · sqrt(rank)
            assert float(torch.linalg.matrix_norm(after)) == pytest.approx(0.01 * 2, rel=1e-5)


def test_dimuon_learns(muon: TorchEngine, data: Data) -> None:
    batch = data(12, weights=np.ones(12, np.float32))
    losses = []
    for _ in range(30):
        losses.append(run_pass(muon, "a", batch, "cross_entropy", {}).metrics["loss:sum"])
        muon.optim_step("a", DimuonParams(learning_rate=0.01))
    assert losses[-1] < 0.2 * losses[0]


def test_steps_without_a_gradient_have_no_effect(muon: TorchEngine) -> None:
    state = adapter_of(muon).state
    assert muon.optim_step("a", STEP) == {"grad_norm:mean": 0.0, "learning_rate:mean": 0.01}
    assert adapter_of(muon).state is state


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            AdamParams(),
            "this run's optimizer is dimuon: a step takes DimuonParams, not AdamParams; .* is "
            "created",
        ),
        (
            OptimParamsBase(type="lion", learning_rate=1.0),
            "takes DimuonParams, not those of type 'lion'",
        ),
        (
            OptimParamsBase(type="dimuon", learning_rate=1.0, damping=1.0),
            "not those of type 'dimuon'",
        ),
    ],
)
def test_step_takes_the_parameters_of_the_run_s_optimizer(
    muon: TorchEngine, data: Data, params: Any, message: str
) -> None:
    run_pass(muon, "a", data(5), "cross_entropy", {})
    state, grad = adapter_of(muon).state, adapter_of(muon).grad
    with pytest.raises(EngineError, match=message) as caught:
        muon.optim_step("a", params)
    assert caught.value.category == "user"
    assert (adapter_of(muon).state, adapter_of(muon).grad) == (state, grad)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfigBase(type="lion"),
        OptimizerConfigBase(type="dimuon", version=2),
        OptimizerConfigBase(type="adamw", amsgrad=True),
    ],
)
def test_unknown_optimizers_are_refused_with_the_known_optimizers(
    muon: TorchEngine, config: OptimizerConfigBase
) -> None:
    message = (
        r"is not supported; supported are \{'type': 'adamw'\} and "
        r"\{'type': 'dimuon', 'version': 1\}"
    )
    with pytest.raises(EngineError, match=message):
        muon.create("b", "small", LoraConfig(rank=4), config)
    with pytest.raises(EngineError, match="there is no adapter 'b'"):
        muon.optim_step("b", STEP)


def train(engine: TorchEngine, name: str, data: Data, seeds: range) -> list[Any]:
    results = []
    for seed in seeds:
        output = run_pass(engine, name, data(6, 9, 12, seed=seed), "cross_entropy", {})
        results.append((output.metrics, engine.optim_step(name, STEP)))
    return results


def test_resumed_dimuon_run_continues_bit_equal(
    muon: TorchEngine, data: Data, tmp_path: Path
) -> None:
    train(muon, "a", data, range(3))
    muon.writer("a", optimizer=True).write(Directory(tmp_path))
    expected = train(muon, "a", data, range(3, 6))
    muon.create("b", "small", LoraConfig(rank=4, seed=5), DIMUON)
    muon.load("b", tmp_path, optimizer=True)
    assert train(muon, "b", data, range(3, 6)) == expected
    ours, theirs = (dataclasses.asdict(adapter_of(muon, name).state) for name in "ab")
    assert ours.pop("step") == theirs.pop("step") == 6
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    muon.create("c", "small", LoraConfig(rank=4), DIMUON)
    muon.load("c", tmp_path, optimizer=False)
    state = adapter_of(muon, "c").state
    assert isinstance(state, DimuonState)
    assert (state.step, bool(state.momentum.any())) == (0, False)


@pytest.mark.parametrize("saved", ["adamw", "dimuon"])
def test_state_of_another_optimizer_is_refused_and_its_weights_are_not(
    muon: TorchEngine, data: Data, saved: str, tmp_path: Path
) -> None:
    kinds: dict[str, OptimizerConfigBase] = {"adamw": AdamOptimizerConfig(), "dimuon": DIMUON}
    other = kinds.keys() - {saved}
    muon.create("saved", "small", LoraConfig(rank=4), kinds[saved])
    muon.create("other", "small", LoraConfig(rank=4), kinds[min(other)])
    muon.writer("saved", optimizer=True).write(Directory(tmp_path))
    with safe_open(tmp_path / "optimizer.safetensors", framework="pt") as opened:
        assert opened.metadata()["optimizer"] == saved
    run_pass(muon, "other", data(5), "cross_entropy", {})
    adapter = adapter_of(muon, "other")
    before = (adapter.state, adapter.grad)
    with pytest.raises(
        EngineError, match=f"holds the state of optimizer {saved}, this run's is {min(other)}: load"
    ):
        muon.load("other", tmp_path, optimizer=True)
    assert (adapter.state, adapter.grad) == before
    muon.load("other", tmp_path, optimizer=False)
    assert type(adapter.state) is type(before[0])
    assert len(load_file(tmp_path / "optimizer.safetensors")) == (60 if saved == "adamw" else 30)


@pytest.mark.covers("S22")
def test_clip_is_over_one_adapter_and_shows_in_its_step(engine: TorchEngine, data: Data) -> None:
    engine.create("b", "small", LoraConfig(rank=4, seed=3))
    for name, times in (("a", 1), ("b", 40)):
        for _ in range(times):
            run_pass(engine, name, data(9, 12), "cross_entropy", {})
    grad = adapter_of(engine, "a").grad
    assert grad is not None
    clip = 0.5 * float(grad.norm())
    # a large eps: the scale of gradients shows
    params = AdamParams(learning_rate=1e-3, grad_clip_norm=clip, eps=1.0)
    engine.optim_step("a", params)
    state = adapter_of(engine, "a").state
    assert isinstance(state, AdamState)
    assert float(state.exp_avg.norm()) == pytest.approx(0.1 * clip, rel=1e-5)
    other = adapter_of(engine, "b")
    assert other.grad is not None
    assert float(other.grad.norm()) > 10 * clip
