"""What the custom loss of a pass may cost in all, and how its data are spread over steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.test_custom_graphs import REF, function, graph, method
from tinkex.engine.api import EngineError, PassDone, PassJob
from tinkex.engine.losses import examples as loss_examples
from tinkex.engine.losses.examples import STEP_WORK, Piece, Room
from tinkex.engine.losses.graph_compiler import compile_graph
from tinkex.engine.losses.graph_loss import WITH_GRADIENT, CompiledLoss, GraphLimits
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.objectives import GraphLoss
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from engine.conftest import Checkpoint

SIDE = 64
CONFIG = {"loss_id": "loss"}


def heavy(products: int = 1, side: int = SIDE, **limits: Any) -> CompiledLoss:
    """A loss that multiplies square matrices, whatever its data are."""
    steps = [
        function("torch.ones", side, side),
        function("operator.mul", {"ref": "a"}, {"ref": "s"}),
    ]
    names = ["b"]
    for number in range(products):
        steps.append(
            {**function("torch.matmul", {"ref": names[-1]}, {"ref": "a"}), "name": f"p{number}"}
        )
        names.append(f"p{number}")
    steps = [
        {**method("sum", REF), "name": "s"},
        {**steps[0], "name": "a"},
        {**steps[1], "name": "b"},
        *steps[2:],
    ]
    steps.append({**method("sum", {"ref": names[-1]}), "name": "end"})
    for step in steps:
        if step["target"] == "torch.matmul":
            step["target"] = "operator.matmul"
    return compile_graph(graph(*steps), GraphLimits(**limits))


def data(count: int, length: int = 1) -> list[Datum]:
    tokens = list(range(1, length + 1))
    return [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens}) for _ in range(count)]


def work_of(loss: CompiledLoss, length: int = 1) -> int:
    work = loss.work({"logprobs": (length,)})
    assert work is not None
    return work


@pytest.fixture
def engine(checkpoint: Checkpoint) -> TorchEngine:
    made = TorchEngine({"m": checkpoint("qwen3")}, micro_batch_tokens=64)
    for name in ("a", "b"):
        made.create(name, "m", LoraConfig(rank=4, seed=1))
    return made


def begin(engine: TorchEngine, loss: CompiledLoss, items: Sequence[Datum]) -> None:
    engine._losses["loss"] = loss
    engine.pass_start(PassJob("heavy", "a", items, "custom", CONFIG, owner="one"))


def outcome(engine: TorchEngine) -> Any:
    ended: list[PassDone] = []
    while engine.passing():
        ended += engine.pass_step()
    [done] = ended
    return done.result


def test_work_of_a_datum_is_known_from_its_shapes() -> None:
    one, two = work_of(heavy(1)), work_of(heavy(2))
    assert two - one >= WITH_GRADIENT * SIDE**3
    spent = heavy(1)
    allowance = spent.allowance(1)
    before = allowance.work
    spent(torch.zeros(1, requires_grad=True), {}, allowance)
    assert before - allowance.work == one


def test_data_of_a_heavy_loss_are_spread_over_steps(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight data of one token would fill an eighth of a step; another owner's pass ends between
    theirs."""
    loss = heavy()
    monkeypatch.setattr(loss_examples, "STEP_WORK", 2 * work_of(loss))
    begin(engine, loss, data(8))
    ended = list(engine.pass_step())
    engine.pass_start(PassJob("short", "b", data(2, 4), "cross_entropy", {}, owner="two"))
    steps, order = 1, [done.job for done in ended]
    while engine.passing():
        order += [done.job for done in engine.pass_step()]
        steps += 1
    assert order == ["short", "heavy"]
    assert steps >= 8  # one datum a step: two would weigh their tokens besides


def test_spreading_changes_no_result(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for steps in (1, 8):
        engine = TorchEngine({"m": checkpoint("qwen3")}, micro_batch_tokens=64)
        engine.create("a", "m", LoraConfig(rank=4, seed=1))
        loss = heavy()
        monkeypatch.setattr(
            loss_examples, "STEP_WORK", 100 * work_of(loss) if steps == 1 else work_of(loss)
        )
        begin(engine, loss, data(8, 3))
        results.append(outcome(engine))
    one, other = (
        np.concatenate([each["logprobs"].to_numpy() for each in r.loss_fn_outputs]) for r in results
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert results[0].metrics["loss:sum"] == pytest.approx(results[1].metrics["loss:sum"], rel=1e-5)


def test_data_of_a_pass_share_its_work(engine: TorchEngine) -> None:
    work = work_of(heavy())
    limits = {"pass_work": 2 * work + work // 2, "pass_growth": 0}
    begin(engine, heavy(**limits), data(2))
    assert outcome(engine).metrics["loss:sum"]
    begin(engine, heavy(**limits), data(3))
    refused = outcome(engine)
    assert isinstance(refused, EngineError)
    assert "together need more work than is allowed" in str(refused)
    assert str(refused).startswith("datum 2: ")


def test_datum_may_use_half_of_a_pass() -> None:
    work = work_of(heavy(), 8)  # as long as that of the rehearsal
    heavy(pass_work=2 * work, pass_growth=0)
    with pytest.raises(EngineError, match="more work than is allowed for this datum"):
        heavy(pass_work=2 * work - 2, pass_growth=0)


def test_large_passes_may_use_more(engine: TorchEngine) -> None:
    work = work_of(heavy(), 8)
    begin(engine, heavy(pass_work=1, pass_growth=work // 8 + 1), data(6, 8))
    assert outcome(engine).metrics["loss:sum"]


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("slow", ["forward", "backward"])
def test_time_of_all_data_counts_with_their_gradients(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    clock = Ticking()
    for module in ("losses.graph_loss", "train.objectives"):
        monkeypatch.setattr(f"tinkex.engine.{module}.time", clock)
    place, name = (torch.autograd, "grad") if slow == "backward" else (CompiledLoss, "_run")
    original = getattr(place, name)

    def late(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        clock.now += 4.0
        return result

    loss = heavy()
    monkeypatch.setattr(place, name, late)
    begin(engine, loss, data(2))
    assert outcome(engine).metrics["loss:sum"]
    begin(engine, loss, data(3))
    refused = outcome(engine)
    assert (
        str(refused)
        == "datum 2: the custom loss and its gradient take too long for one pass; send less data "
        "in a pass"
    )


def test_datum_that_is_computed_again_is_charged_once() -> None:
    """A pass that begins again after memory ran out."""
    work = work_of(heavy())
    objective = GraphLoss(heavy(pass_work=2 * work + work // 2, pass_growth=0))
    examples = objective.read(data(2), Room(vocab=100, context=100))
    for _ in range(4):
        objective.evaluate(Piece(torch.zeros(2), examples, [0, 1], backward=True))


def test_loss_with_value_dependent_work_runs_in_small_steps() -> None:
    chosen = graph(function("operator.getitem", REF, {"ref": "mask"}))
    masked = [{**function("operator.gt", REF, 0.5), "name": "mask"}]
    chosen = graph(
        *masked,
        {**function("operator.getitem", REF, {"ref": "mask"}), "name": "kept"},
        method("sum", {"ref": "kept"}),
    )
    loss = compile_graph(chosen)
    assert loss.work({"logprobs": (4,)}) is None
    examples = GraphLoss(loss).read(data(3, 4), Room(vocab=100, context=100))
    assert list(examples.work) == [STEP_WORK // 8] * 3


def test_estimate_is_fast_for_many_lengths() -> None:
    looked: list[Any] = []

    class Counting(CompiledLoss):
        __slots__ = ()

        def work(self, shapes: Any) -> int | None:
            looked.append(shapes)
            return super().work(shapes)

    made = heavy()
    counting = Counting(*(getattr(made, name) for name in CompiledLoss.__slots__))
    items = [one for length in range(1, 60) for one in data(1, length)]
    examples = GraphLoss(counting).read(items, Room(vocab=100, context=100))
    assert len(looked) == 4
    assert len(examples.work) == 59
    assert all(work >= work_of(made, length) for length, work in enumerate(examples.work, 1))


def test_four_one_token_data_do_not_hold_the_engine_for_long(engine: TorchEngine) -> None:
    """Within every other limit: large products, one after the other."""
    begin(engine, heavy(8, 1024), data(4))
    began = time.monotonic()
    refused = outcome(engine)
    assert "more work than is allowed" in str(refused)
    assert time.monotonic() - began < 30
    assert engine._adapters["a"].grad is None
