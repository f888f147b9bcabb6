"""Passes and steps against plain transformers, peft, autograd and torch.optim."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.references import (
    CASES as LOSS_CASES,
    adapter_of,
    assert_near,
    gradients,
    randomise,
    reference_run,
)
from tinkex.engine.api import Directory, EngineError, run_pass
from tinkex.engine.losses.table import CUSTOM
from tinkex.engine.model import attention, decoder
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.lora import Layout
from tinkex.engine.train import device_step, target_logprobs
from tinkex.engine.train.optim import AdamState, State, make_state, step
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams, DimuonParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint, Data

LR = AdamParams(learning_rate=1e-2)


CASES: list[tuple[str, dict[str, bool], str, dict[str, Any]]] = [
    ("llama", {}, "cross_entropy", {}),
    ("llama", {}, "importance_sampling", {}),
    ("llama", {}, "ppo", {}),
    ("llama", {}, "ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}),
    ("llama", {}, "cispo", {}),
    ("qwen3", {}, "cispo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}),
    ("llama", {}, "dro", {"beta": 0.05}),
    ("llama", {}, "gspo", {}),
    ("qwen2", {}, "gspo", {"clip_low_threshold": 0.995, "clip_high_threshold": 1.001}),
    ("llama-tied", {}, "cross_entropy", {}),
    ("qwen2", {"train_unembed": False}, "ppo", {}),
    ("qwen3", {"train_mlp": False, "train_unembed": False}, "cross_entropy", {}),
    ("qwen3", {"train_attn": False, "train_unembed": False}, "importance_sampling", {}),
    ("llama3", {"train_attn": False, "train_mlp": False}, "cross_entropy", {}),
    ("mistral", {"train_attn": False}, "cross_entropy", {}),
]
ALL_CASES = CASES + [
    ("llama", {}, case.loss, case.config)
    for case in LOSS_CASES.values()
    if case.loss not in {CUSTOM, *(loss for _, _, loss, _ in CASES)}
]


@pytest.mark.covers("S10", "S15", "S16", "S21")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("dtype", "kept", "short"), [(torch.float32, 0, 64), (torch.float64, 1 << 20, 10)]
)
@pytest.mark.parametrize(("family", "flags", "loss", "settings"), ALL_CASES)
def test_pass_equals_float64_reference(
    family: str,
    flags: dict[str, bool],
    loss: str,
    settings: dict[str, float],
    dtype: torch.dtype,
    kept: int,
    short: int,
    checkpoint: Checkpoint,
    data: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_logprobs, "LOGITS_BUDGET", 10 * 96)  # several chunks of logits
    monkeypatch.setattr(attention, "SHORT", short)  # both kinds of attention
    monkeypatch.setattr(target_logprobs, "KEPT_LOGITS", kept)  # recomputed in backward, or not
    engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, threads=1, micro_batch_tokens=40)
    engine.create("a", "m", LoraConfig(rank=4, **flags))
    adapter = adapter_of(engine)
    randomise(adapter)
    adapter.state = make_state(
        AdamState, adapter.state.weights.float().to(dtype)
    )  # files hold float32
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    batch = data(5, 17, 9, 17, 1, 30, 9)
    total, logprobs, grads = reference_run(checkpoint(family), tmp_path, batch, loss, settings)

    output = run_pass(engine, "a", batch, loss, settings)

    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert output.metrics["tokens:sum"] == 88
    for ours, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs, 1e-5)
        assert ours["logprobs"].dtype == "float32"
        assert ("elementwise_loss" in ours) == (loss == "cross_entropy")
    ours_grads = gradients(adapter)
    assert ours_grads.keys() == grads.keys()
    for name, grad in ours_grads.items():
        assert_near(grad, grads[name], 1e-5)


@pytest.mark.covers("S21")
def test_elementwise_loss(engine: TorchEngine, data: Data) -> None:
    (datum,) = data(6)
    output = run_pass(engine, "a", [datum], "cross_entropy", {}).loss_fn_outputs[0]
    expected = -datum.loss_fn_inputs["weights"].to_numpy() * output["logprobs"].to_numpy()
    np.testing.assert_allclose(output["elementwise_loss"].to_numpy(), expected, rtol=1e-6)


@pytest.mark.covers("S17")
@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_per_position(
    sparse: bool, engine: TorchEngine, data: Data, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    randomise(adapter_of(engine))
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    random = np.random.default_rng(0)
    targets = random.integers(0, 96, (9, 3))
    weights = random.normal(size=(9, 3)).astype(np.float32)
    many = Datum(
        ModelInput.from_ints(random.integers(0, 96, 9)),
        {"target_tokens": targets, "weights": weights},
    )
    batch = [*data(9, 4), many]
    total, logprobs, grads = reference_run(
        checkpoint("llama"), tmp_path, batch, "cross_entropy", {}
    )
    if sparse:
        sent = {"target_tokens": csr(targets, "int64"), "weights": csr(weights, "float32")}
        batch = [*batch[:2], Datum(many.model_input, sent)]
    output = run_pass(engine, "a", batch, "cross_entropy", {})
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert output.loss_fn_outputs[2]["logprobs"].shape == [9, 3]
    assert_near(output.loss_fn_outputs[2]["logprobs"].to_numpy(), logprobs[2], 1e-5)
    for name, grad in gradients(adapter_of(engine)).items():
        assert_near(grad, grads[name], 1e-5)


def csr(dense: np.ndarray[Any, Any], dtype: Any) -> Any:
    from tinkex.types.tensors import TensorData

    rows, columns = dense.shape
    indices = np.tile(np.arange(columns), rows)
    return TensorData(
        dense.reshape(-1), dtype, dense.shape, np.arange(0, rows * columns + 1, columns), indices
    )


def test_absent_cells_of_sparse_targets_have_weight_zero(engine: TorchEngine) -> None:
    from tinkex.types.tensors import TensorData

    sparse = TensorData([5, 6, 7], "int64", [2, 2], [0, 2, 3], [0, 1, 0])
    output = run_pass(
        engine,
        "a",
        [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": sparse})],
        "cross_entropy",
        {},
    )
    p = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert output.metrics["loss:sum"] == pytest.approx(
        -float(p[0, 0] + p[0, 1] + p[1, 0]), rel=1e-6
    )


@pytest.mark.covers("S17")
def test_weights_default_to_one(engine: TorchEngine) -> None:
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    output = run_pass(engine, "a", [datum], "cross_entropy", {})
    assert output.metrics["loss:sum"] == pytest.approx(
        -output.loss_fn_outputs[0]["logprobs"].to_numpy().sum(), rel=1e-6
    )


@pytest.mark.covers("S17")
def test_zero_weights_give_zero(engine: TorchEngine, data: Data) -> None:
    output = run_pass(engine, "a", data(4, weights=np.zeros(4, np.float32)), "cross_entropy", {})
    assert output.metrics["loss:sum"] == 0
    assert adapter_of(engine).grad is not None
    assert not adapter_of(engine).grad.any()  # type: ignore[union-attr]
    assert (output.loss_fn_outputs[0]["logprobs"].to_numpy() < 0).all()


@pytest.mark.covers("S19")
def test_unused_inputs_are_ignored(engine: TorchEngine, data: Data) -> None:
    plain = data(5)
    mask = [
        Datum(d.model_input, {**d.loss_fn_inputs, "mask": np.ones(99, np.float32)}) for d in plain
    ]
    ours, theirs = (run_pass(engine, "a", d, "ppo", {}).metrics for d in (plain, mask))
    assert ours == theirs


@pytest.mark.covers("S14", "S15")
def test_accumulation_over_splits(checkpoint: Checkpoint, data: Data) -> None:
    batch = data(5, 17, 9, 17, 1, 30, 9)
    flats = []
    for split, budget in [((7,), 8192), ((1, 3, 3), 8192), ((7,), 16), ((7,), 1)]:
        engine = TorchEngine({"m": checkpoint("llama")}, threads=1, micro_batch_tokens=budget)
        engine.create("a", "m", LoraConfig(rank=4))
        randomise(adapter_of(engine))
        starts = np.cumsum([0, *split])
        for start, stop in itertools.pairwise(starts):
            run_pass(engine, "a", batch[start:stop], "cross_entropy", {})
        flats.append(adapter_of(engine).grad)
    for flat in flats[1:]:
        assert_near(flat, flats[0], 1e-6)


@pytest.mark.covers("S14", "S18")
def test_forward_adds_no_gradient(engine: TorchEngine, data: Data) -> None:
    batch = data(5, 8)
    alone = run_pass(engine, "a", batch, "cross_entropy", {}, backward=False)
    assert adapter_of(engine).grad is None
    both = run_pass(engine, "a", batch, "cross_entropy", {})
    for one, two in zip(alone.loss_fn_outputs, both.loss_fn_outputs, strict=True):
        assert np.array_equal(one["logprobs"].to_numpy(), two["logprobs"].to_numpy())
    assert alone.metrics == both.metrics


def test_logits_are_never_all_held(
    engine: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_logprobs, "LOGITS_BUDGET", 8 * 96)
    monkeypatch.setattr(target_logprobs, "LEAST_ROWS", 4)
    monkeypatch.setattr(target_logprobs, "KEPT_LOGITS", 0)
    seen: list[int] = []
    original = target_logprobs._log_sum

    def counting(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.shape[0])
        return original(logits)

    monkeypatch.setattr(target_logprobs, "_log_sum", counting)
    run_pass(engine, "a", data(40), "cross_entropy", {})
    assert max(seen) <= 8
    assert sum(seen) == 80  # each row twice: forward, and again for backward
    monkeypatch.setattr(target_logprobs, "KEPT_LOGITS", 1 << 28)
    # of a datum that is longer than a step none are kept, however few
    for budget, rows in ((40, 40), (39, 80)):
        seen.clear()
        engine._trainer.budget = budget
        run_pass(engine, "a", data(40), "cross_entropy", {})
        assert sum(seen) == rows


@pytest.mark.covers("S14")
def test_failed_pass_leaves_no_trace(
    engine: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._trainer.budget = 8
    run_pass(engine, "a", data(4), "cross_entropy", {})
    adapter = adapter_of(engine)
    state, grad = adapter.state, adapter.grad
    assert grad is not None
    before = grad.clone()
    original, calls = decoder.hidden_states, iter(range(9))

    def faulty(*args: Any, **given: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return original(*args, **given)

    monkeypatch.setattr(device_step, "hidden_states", faulty)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_pass(engine, "a", data(6, 7, 8, 8), "cross_entropy", {})
    assert adapter.state is state
    assert adapter.grad is not None
    assert torch.equal(adapter.grad, before)


@pytest.mark.covers("S14")
def test_overflowing_loss_is_refused(engine: TorchEngine, data: Data) -> None:
    bad = data(4, seed=1, logprobs=np.full(4, -1000, np.float32))
    with pytest.raises(EngineError, match="datum 2: the loss is not finite; nothing was added"):
        run_pass(engine, "a", [*data(6, 5), *bad], "importance_sampling", {})
    assert adapter_of(engine).grad is None


STEPS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=1e-2, weight_decay=0.5, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-3, grad_clip_norm=1e6),
]


@pytest.mark.covers("S22")
def test_adamw_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator)
    layout = Layout([], LoraConfig(rank=4))
    parameter = torch.nn.Parameter(weights.clone())
    theirs = torch.optim.AdamW([parameter])
    ours: State = make_state(AdamState, weights)
    for params in STEPS:
        grad = torch.randn(50, generator=generator)
        group = theirs.param_groups[0]
        group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
        }
        group["weight_decay"] = params.weight_decay
        scale = (
            min(1.0, params.grad_clip_norm / float(grad.norm())) if params.grad_clip_norm else 1.0
        )
        parameter.grad = grad * scale
        theirs.step()
        ours, norm = step(ours, grad, params, layout)
        assert norm == pytest.approx(float(grad.norm()))
        torch.testing.assert_close(ours.weights, parameter.data, rtol=1e-6, atol=1e-7)
    assert ours.step == len(STEPS)


def test_steps_never_change_weights_in_place(engine: TorchEngine, data: Data) -> None:
    before = adapter_of(engine).state.weights
    copy = before.clone()
    run_pass(engine, "a", data(5), "cross_entropy", {})
    engine.optim_step("a", AdamParams(learning_rate=0.1, weight_decay=0.1))
    assert torch.equal(before, copy)
    assert not torch.equal(adapter_of(engine).state.weights, copy)


@pytest.mark.covers("S14", "S22", "S23")
def test_step_metrics_and_clearing(engine: TorchEngine, data: Data) -> None:
    run_pass(engine, "a", data(5, 9), "cross_entropy", {})
    adapter = adapter_of(engine)
    assert adapter.grad is not None
    norm = float(adapter.grad.norm())
    assert engine.optim_step("a", LR) == {
        "grad_norm:mean": pytest.approx(norm),
        "learning_rate:mean": 1e-2,
    }
    assert adapter.grad is None
    state = adapter.state
    assert engine.optim_step("a", LR) == {"grad_norm:mean": 0.0, "learning_rate:mean": 1e-2}
    assert adapter.state is state
    assert state.step == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            AdamParams(learning_rate=float("nan")),
            "learning_rate must be a finite number >= 0, got nan",
        ),
        (AdamParams(learning_rate=-1.0), "learning_rate"),
        (AdamParams(beta1=1.0), r"beta1 must be in \[0, 1\)"),
        (AdamParams(beta2=-0.1), "beta2"),
        (AdamParams(eps=0.0), "eps must be a finite number > 0"),
        (AdamParams(weight_decay=float("inf")), "weight_decay"),
        (AdamParams(grad_clip_norm=-1.0), "grad_clip_norm"),
        (
            DimuonParams(learning_rate=1.0),
            "optimizer is adamw: a step takes AdamParams, not DimuonParams; the",
        ),
    ],
)
def test_bad_hyper_parameters(engine: TorchEngine, data: Data, params: Any, message: str) -> None:
    run_pass(engine, "a", data(5), "cross_entropy", {})
    state, grad = adapter_of(engine).state, adapter_of(engine).grad
    with pytest.raises(EngineError, match=message):
        engine.optim_step("a", params)
    assert (adapter_of(engine).state, adapter_of(engine).grad) == (state, grad)


def train(engine: TorchEngine, name: str, data: Data, between: Any = None) -> torch.Tensor:
    for seed in range(3):
        run_pass(engine, name, data(6, 9, 12, seed=seed), "cross_entropy", {})
        if between:
            between()
        engine.optim_step(name, LR)
    return adapter_of(engine, name).state.weights


@pytest.mark.covers("S22")
def test_neighbours_do_not_leak(checkpoint: Checkpoint, data: Data) -> None:
    alone = TorchEngine({"m": checkpoint("llama")}, threads=1)
    alone.create("a", "m", LoraConfig(rank=4))
    expected = train(alone, "a", data)

    crowded = TorchEngine({"m": checkpoint("llama")}, threads=1)
    crowded.create("b", "m", LoraConfig(rank=8, seed=5))
    crowded.create("a", "m", LoraConfig(rank=4))

    def meddle() -> None:
        run_pass(crowded, "b", data(20, 3, seed=9), "cross_entropy", {})
        crowded.optim_step("b", AdamParams(learning_rate=0.5, grad_clip_norm=0.1))

    assert torch.equal(train(crowded, "a", data, meddle), expected)


def test_training_learns(engine: TorchEngine) -> None:
    batch = [Datum(ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": [6, 7, 8, 9]})]
    losses = []
    for _ in range(20):
        losses.append(run_pass(engine, "a", batch, "cross_entropy", {}).metrics["loss:sum"])
        engine.optim_step("a", LR)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.covers("S9")
def test_fresh_adapters(checkpoint: Checkpoint, data: Data) -> None:
    engine = TorchEngine({"m": checkpoint("llama")}, threads=1)
    for name, seed, flags in [
        ("none", None, {}),
        ("zero", 0, {}),
        ("one", 1, {}),
        ("attn", 0, {"train_mlp": False}),
    ]:
        engine.create(name, "m", LoraConfig(rank=4, seed=seed, **flags))
    weights = {
        name: dict(a.layout.tensors(a.state.weights)) for name, a in engine._adapters.items()
    }
    for name, view in weights["none"].items():
        bound = 1 / view.shape[1] ** 0.5
        assert view.any() == name.endswith("lora_A")
        assert float(view.abs().max()) <= bound
        if name.endswith("lora_A"):
            assert float(view.abs().max()) > 0.8 * bound
        assert torch.equal(view, weights["zero"][name])
        assert torch.equal(view, weights["one"][name]) == name.endswith("lora_B")
    starts = [view for name, view in weights["zero"].items() if name.endswith("q_proj.lora_A")]
    assert len(starts) == 2
    assert not torch.equal(*starts)  # each module has its own stream
    # What a module starts from does not depend on which others are there.
    assert weights["attn"].keys() < weights["zero"].keys()
    assert all(torch.equal(view, weights["zero"][name]) for name, view in weights["attn"].items())
    zero, one = (
        run_pass(engine, name, data(6), "cross_entropy", {})
        .loss_fn_outputs[0]["logprobs"]
        .to_numpy()
        for name in ("zero", "one")
    )
    np.testing.assert_array_equal(zero, one)  # B is zero: every fresh adapter is the base model


@pytest.mark.covers("S9")
def test_scale_is_32_over_rank(checkpoint: Checkpoint) -> None:
    engine = TorchEngine({"m": checkpoint("llama")}, threads=1)
    engine.create("a", "m", LoraConfig(rank=4))
    assert {f.scale for f in adapter_of(engine).factors().values()} == {8.0}


def test_names_that_do_not_exist(engine: TorchEngine, data: Data, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no base model 'large'; there are small"):
        engine.create("b", "large", LoraConfig(rank=4))
    with pytest.raises(EngineError, match="there is no base model 'large'; there are small"):
        engine.load_sampler("s", "large", None)
    with pytest.raises(EngineError, match="there is an adapter 'a' already"):
        engine.create("a", "small", LoraConfig(rank=4))
    for call in (
        lambda: run_pass(engine, "b", data(3), "cross_entropy", {}),
        lambda: engine.optim_step("b", LR),
        lambda: engine.writer("b", optimizer=True).write(Directory(tmp_path)),
        lambda: engine.snapshot("b", "s"),
    ):
        with pytest.raises(EngineError, match="there is no adapter 'b'"):
            call()
    engine.drop("b")
    engine.drop("a")
    with pytest.raises(EngineError, match="there is no adapter 'a'"):
        engine.optim_step("a", LR)


@pytest.mark.parametrize("rank", [0, -1, 5000])
def test_bad_ranks(engine: TorchEngine, rank: int) -> None:
    with pytest.raises(EngineError, match=f"rank must be between 1 and 1024, got {rank}"):
        engine.create("b", "small", LoraConfig(rank=rank))


@pytest.mark.covers("S10")
def test_adapter_must_train_something(engine: TorchEngine) -> None:
    with pytest.raises(
        EngineError, match="at least one of train_attn, train_mlp and train_unembed"
    ):
        engine.create(
            "b", "small", LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
        )
