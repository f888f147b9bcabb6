"""However data are split and mixed, the gradient is that of their sum, and nobody's depends on
anybody else.

Every loss, over every way to divide the same data into requests, over micro-batches of every size,
with and without the passes of other adapters in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.references import CASES, Case, adapter_of, assert_near, randomise
from tinkex.client.losses.loss_graphs import create_request, trace
from tinkex.engine.api import EngineError, PassJob, run_pass
from tinkex.engine.losses.table import LOSSES, STABLE_REINFORCE
from tinkex.engine.model import decoder, matmul
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.lora import Linear
from tinkex.engine.train import device_step, span_adapters
from tinkex.engine.train.optim import AdamState
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams, DimuonOptimizerConfig, DimuonParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from engine.conftest import Checkpoint

LENGTHS = (9, 4, 12, 9)
BUDGETS = (1, 13, 8192)
"""Every datum alone, a few together, all together."""


def surprise(logprobs: Any, weights: Any, advantages: Any) -> Any:
    """Not a sum over tokens: what one token adds depends on the others."""
    loss = torch.logsumexp(weights * logprobs, 0) - (advantages * logprobs).sum() * logprobs.mean()
    return loss, {"custom/loss:mean": loss}


each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def test_every_loss_has_its_case() -> None:
    assert {case.loss for case in CASES.values()} == set(LOSSES) - {STABLE_REINFORCE}


def examples(
    case: Case, seed: int = 0, lengths: Sequence[int] = LENGTHS, **fixed: Any
) -> list[Datum]:
    """Random data with every input that the loss reads; those in `fixed` are constant."""
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length,) if case.targets == 1 else (length, case.targets)
        inputs = {
            "weights": random.normal(size=shape),
            "logprobs": -4.5 + 0.3 * random.normal(size=shape),
            "advantages": random.normal(size=shape),
        }
        if case.loss == "gspo":
            inputs["sequence_ratio_mask"] = (random.random(length) < 0.6).astype(float)
        for name, value in fixed.items():
            inputs[name] = np.full(shape, value)
        data.append(
            Datum(
                ModelInput.from_ints(random.integers(0, 96, length)),
                {
                    "target_tokens": random.integers(0, 96, shape),
                    **{name: array.astype(np.float32) for name, array in inputs.items()},
                },
            )
        )
    return data


@pytest.fixture(scope="module")
def make(checkpoint: Checkpoint) -> Any:
    """An engine of a budget, with a randomised adapter `a`; kept, for its weights are read once."""
    kept: dict[Any, TorchEngine] = {}

    def get(budget: int = 8192, dtype: torch.dtype = torch.float32) -> TorchEngine:
        if (budget, dtype) not in kept:
            engine = TorchEngine(
                {"m": checkpoint("llama")}, dtype=dtype, threads=1, micro_batch_tokens=budget
            )
            graph = trace(surprise, {"logprobs": 1, "weights": 1, "advantages": 1}, "s")
            engine.create_loss("surprise", create_request(graph, 0))
            kept[budget, dtype] = engine
        engine = kept[budget, dtype]
        for name in list(engine._adapters):
            engine.drop(name)
        engine.create("a", "m", LoraConfig(rank=4))
        randomise(adapter_of(engine))
        return engine

    return get


@pytest.mark.covers("S20")
@each
def test_metrics_name_their_reduction_and_include_the_loss(case: Case, make: Any) -> None:
    metrics = run_pass(make(), "a", examples(case), case.loss, case.config).metrics
    assert "loss:sum" in metrics
    for name in metrics:
        _, reduction = name.split(":")
        assert reduction in ("mean", "sum", "min", "max")


def partitions(indices: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide indices into groups."""
    if not indices:
        yield []
        return
    first, rest = indices[0], indices[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for place, group in enumerate(smaller):
            yield [*smaller[:place], [first, *group], *smaller[place + 1 :]]


def gradient(engine: TorchEngine, name: str = "a") -> torch.Tensor:
    grad = adapter_of(engine, name).grad
    assert grad is not None
    return grad


def meddle(engine: TorchEngine, turn: int) -> None:
    """Work of other tenants: passes of other losses, steps of other optimizers, failures."""
    if "b" not in engine._adapters:
        engine.create("b", "m", LoraConfig(rank=8, seed=5, train_unembed=False))
        engine.create("c", "m", LoraConfig(rank=2, seed=6), DimuonOptimizerConfig())
    case = list(CASES.values())[turn % len(CASES)]
    run_pass(engine, "b", examples(case, seed=turn, lengths=(20, 3)), case.loss, case.config)
    run_pass(engine, "c", examples(CASES["gspo"], seed=turn, lengths=(7,)), "gspo", {})
    with pytest.raises(EngineError):
        run_pass(engine, "b", examples(case, lengths=(6,), advantages=float("nan")), "ppo", {})
    engine.optim_step("b", AdamParams(learning_rate=0.5, grad_clip_norm=0.1))
    engine.optim_step("c", DimuonParams(learning_rate=0.5))


@pytest.mark.covers("S14", "S15")
@pytest.mark.parametrize(
    "stride", [pytest.param(1, id="every-way", marks=pytest.mark.slow), pytest.param(3, id="some")]
)
@pytest.mark.usefixtures("every_library")
@each
def test_gradient_is_the_same_however_the_data_are_split(
    case: Case, stride: int, make: Any
) -> None:
    data = examples(case)
    whole = make(dtype=torch.float64)
    total = run_pass(whole, "a", data, case.loss, case.config).metrics["loss:sum"]
    expected = gradient(whole)
    every = list(partitions(list(range(len(data)))))
    assert len(every) == 15
    first = None
    for budget in BUDGETS:
        for number, partition in enumerate(
            every[::stride] if budget == BUDGETS[-1] else every[:: 6 * stride]
        ):
            engine = make(budget)
            losses = []
            for group in partition:
                output = run_pass(engine, "a", [data[i] for i in group], case.loss, case.config)
                losses.append(output.metrics["loss:sum"])
                if number % 4 == 1:
                    meddle(engine, number)
            assert sum(losses) == pytest.approx(total, rel=1e-5, abs=1e-4)
            assert_near(gradient(engine), expected, 2e-6)
            first = gradient(engine).clone() if first is None else first
            assert_near(gradient(engine), first, 1e-6)


@pytest.mark.covers("S14")
@pytest.mark.usefixtures("every_library")
@each
def test_neighbours_change_no_bit(case: Case, make: Any) -> None:
    def train(engine: TorchEngine, between: Any) -> tuple[list[Any], AdamState]:
        told: list[Any] = []
        for turn in range(3):
            for part in (examples(case, seed=turn), examples(case, seed=10 + turn)):
                output = run_pass(engine, "a", part, case.loss, case.config)
                told.append(
                    (
                        output.metrics,
                        [o["logprobs"].to_numpy().tobytes() for o in output.loss_fn_outputs],
                    )
                )
                between(turn)
            told.append(
                engine.optim_step(
                    "a", AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.1)
                )
            )
        state = adapter_of(engine).state
        assert isinstance(state, AdamState)
        return told, state

    alone, expected = train(make(13), lambda turn: None)
    crowded = make(13)
    told, state = train(crowded, lambda turn: meddle(crowded, turn))
    assert told == alone
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(state, name), getattr(expected, name))


def test_shares_written_before_the_base_product_make_the_same_sums(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["cross_entropy"]

    def train(dtype: torch.dtype) -> list[torch.Tensor]:
        engine = make(dtype=dtype)
        engine.create("b", "m", LoraConfig(rank=8, seed=5, train_unembed=False))
        randomise(adapter_of(engine, "b"))
        for name in ("a", "b"):
            engine.pass_start(PassJob(name, name, examples(case), case.loss, case.config))
        done = [done for _ in range(2) if engine.passing() for done in engine.pass_step()]
        assert len(done) == 2
        return [gradient(engine, name) for name in ("a", "b")]

    expected = train(torch.float64)
    written: list[int] = []

    def go_first(shares: Sequence[span_adapters.Share], x_TD: torch.Tensor) -> bool:
        assert not torch.is_grad_enabled()  # or it would not be done there
        covered = sum(share.stop - share.start for share in shares)
        written.append(covered)
        return covered == x_TD.shape[0]

    monkeypatch.setattr(span_adapters, "_go_first", go_first)  # as on an accelerator
    for got, wanted in zip(train(torch.float32), expected, strict=True):
        assert_near(got, wanted, 2e-6)
    assert len(set(written)) == 2  # the head's are not of every token


WEIGHED = {name: case for name, case in CASES.items() if name not in ("dro", "custom")}
"""Losses without terms of their own at positions that weigh nothing."""


@pytest.mark.covers("S15", "S17")
@pytest.mark.parametrize("case", WEIGHED.values(), ids=WEIGHED.keys())
def test_data_without_weight_are_no_ops(case: Case, make: Any) -> None:
    data = examples(case)
    nothing = examples(case, seed=4, lengths=(5, 17, 2), weights=0.0, advantages=0.0)
    engine = make()
    run_pass(engine, "a", data, case.loss, case.config)
    before = gradient(engine).clone()
    output = run_pass(engine, "a", nothing, case.loss, case.config)
    assert output.metrics["loss:sum"] == 0
    assert torch.equal(gradient(engine), before), "a request of its own adds not a bit"
    for budget in BUDGETS:
        mixed = make(budget)
        run_pass(mixed, "a", [nothing[0], *data, *nothing[1:]], case.loss, case.config)
        assert_near(gradient(mixed), before, 1e-6)


@pytest.mark.covers("S14")
@each
def test_failed_pass_leaves_no_trace(
    case: Case, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = examples(case)
    engine = make(13)
    run_pass(engine, "a", data[:2], case.loss, case.config)
    run_pass(engine, "a", data[2:], case.loss, case.config)
    expected = gradient(engine).clone()

    engine = make(13)
    adapter = adapter_of(engine)

    def fails(kind: type[Exception], words: str, batch: list[Datum]) -> None:
        state, grad = adapter.state, adapter.grad
        kept = None if grad is None else grad.clone()
        with pytest.raises(kind, match=words):
            run_pass(engine, "a", batch, case.loss, case.config)
        assert adapter.state is state
        assert adapter.grad is grad
        assert grad is None or (kept is not None and torch.equal(grad, kept))

    # The longest datum comes last of all micro-batches: the others have been through by then.
    huge: dict[str, Any] = {"weights": 3e38, "advantages": -3e38, "logprobs": -100.0}
    overflowing = [*data, *examples(case, lengths=(30,), **huge)]
    fails(EngineError, "datum 4: .*not finite", overflowing)
    run_pass(engine, "a", data[:2], case.loss, case.config)
    fails(EngineError, "datum 4: .*not finite", overflowing)
    passes = iter(range(99))
    original = decoder.hidden_states

    def faulty(*args: Any, **given: Any) -> torch.Tensor:
        if next(passes) == 2:
            raise RuntimeError("out of memory")
        return original(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(device_step, "hidden_states", faulty)
        fails(RuntimeError, "out of memory", data)
    run_pass(engine, "a", data[2:], case.loss, case.config)
    assert torch.equal(gradient(engine), expected)


@pytest.mark.covers("S14")
@pytest.mark.usefixtures("every_library")
def test_rows_of_long_products_do_not_depend_on_their_number() -> None:
    """Small models have sums so short that most libraries add them in the same order."""
    random = torch.Generator().manual_seed(3)
    weight, x, dy = (
        torch.randn(shape, generator=random) for shape in ((700, 1500), (300, 1500), (300, 700))
    )
    linear = Linear("l", "mlp", weight, None, ["l"], [700])
    y = matmul.base_product(x, linear)
    dx = span_adapters.backward(dy, x, [], linear, [], wants_input=True)
    assert dx is not None
    assert_near(y, x.double() @ weight.double().T, 3e-6)
    assert_near(dx, dy.double() @ weight.double(), 3e-6)
    for rows in (slice(0, 4), slice(4, 12), slice(40, 52), slice(0, 156), slice(96, 300)):
        assert torch.equal(matmul.base_product(x[rows], linear), y[rows])
        part = span_adapters.backward(dy[rows], x[rows], [], linear, [], wants_input=True)
        assert part is not None
        assert torch.equal(part, dx[rows])
