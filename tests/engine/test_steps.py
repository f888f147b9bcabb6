"""Passes of several adapters in one step: nobody's results depend on who else is there, and turns
are fair."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.references import CASES, adapter_of
from engine.test_splits import examples
from tinkex.engine.api import EngineError, PassJob, run_pass
from tinkex.engine.model import decoder
from tinkex.engine.stepping import Shares
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train import device_step, trainer
from tinkex.types.optimizers import AdamParams
from tinkex.types.training import ForwardBackwardOutput, LoraConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.conftest import Checkpoint, Data
    from tinkex.types.inputs import Datum

ADAPTERS = {
    "a": LoraConfig(rank=4, seed=1),
    "b": LoraConfig(rank=8, seed=2, train_unembed=False),
    "c": LoraConfig(rank=2, seed=3, train_attn=False),
    "d": LoraConfig(rank=16, seed=4, train_mlp=False),
}


@pytest.fixture(params=[False, True], ids=["read at once", "read a step later"])
def shared(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> TorchEngine:
    engine = TorchEngine({"m": checkpoint("qwen3")}, micro_batch_tokens=64)
    engine._trainer.ahead = request.param  # as on a device that runs on its own
    for name, lora in ADAPTERS.items():
        engine.create(name, "m", lora)
    return engine


def together(
    engine: TorchEngine, passes: Mapping[str, tuple[str, Sequence[Datum]]], **given: Any
) -> dict[str, Any]:
    """Start passes, and step until all have ended; results by job."""
    for job, (name, data) in passes.items():
        engine.pass_start(PassJob(job, name, data, "cross_entropy", {}, **given))
    ended: dict[str, Any] = {}
    while engine.passing():
        ended |= {done.job: done.result for done in engine.pass_step()}
    return ended


def assert_same(ours: ForwardBackwardOutput, theirs: ForwardBackwardOutput) -> None:
    assert ours.metrics == theirs.metrics
    for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        assert one["logprobs"].to_numpy().tobytes() == other["logprobs"].to_numpy().tobytes()


@pytest.mark.covers("S14", "S15")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_passes_in_one_batch_give_the_same_bits_as_alone(
    checkpoint: Checkpoint, data: Data, family: str
) -> None:
    passes = {
        "1": ("a", data(9, 4, 12, 9, seed=1)),
        "2": ("b", data(1, seed=2)),
        "3": ("c", data(30, 7, 7, 7, 3, seed=3)),
        "4": ("d", data(2, 2, 2, seed=4)),
    }
    weights: list[list[torch.Tensor]] = []
    outputs: list[dict[str, Any]] = []
    for mixed in (True, False):
        engine = TorchEngine({"m": checkpoint(family)}, micro_batch_tokens=24)
        engine._trainer.ahead = mixed
        for name, lora in ADAPTERS.items():
            engine.create(name, "m", lora)
        for turn in range(3):
            if mixed:
                ended = together(
                    engine,
                    dict(sorted(passes.items(), key=lambda item: (int(item[0]) * 7 + turn) % 5)),
                )
            else:
                ended = {
                    job: run_pass(engine, name, given, "cross_entropy", {})
                    for job, (name, given) in passes.items()
                }
            for name in ADAPTERS:
                engine.optim_step(name, AdamParams(learning_rate=0.01))
        outputs.append(ended)
        weights.append([adapter_of(engine, name).state.weights for name in ADAPTERS])
    for job in passes:
        assert_same(outputs[0][job], outputs[1][job])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.equal(ours, theirs)


def steps_of(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs of each step, as it is made."""
    seen: list[list[str]] = []
    original = device_step.launch

    def watched(chosen: Any, **given: Any) -> Any:
        seen.append([work.job for work, _ in chosen])
        return original(chosen, **given)

    monkeypatch.setattr(trainer, "launch", watched)
    return seen


def test_small_passes_share_a_step_under_the_budget(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = steps_of(shared, monkeypatch)
    together(shared, {str(n): ("abcd"[n % 4], data(16)) for n in range(8)})
    assert [len(step) for step in seen] == [4, 4]
    assert set(seen[0]) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((name, torch.float32) for name in ("llama", "gemma3", "qwen3-moe")),
        ("llama", torch.bfloat16),
    ],
)
def test_datum_beyond_the_budget_keeps_little_and_gives_the_same_bits(
    checkpoint: Checkpoint,
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
) -> None:
    results = []
    for sparing in (False, True):
        monkeypatch.setattr(trainer, "SPARE_BEYOND", 1 if sparing else 100)
        engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, micro_batch_tokens=16)
        engine.create("a", "m", LoraConfig(rank=4, seed=1))
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = run_pass(engine, "a", data(40, 3), "cross_entropy", {})
        grad = adapter_of(engine, "a").grad
        assert grad is not None
        results.append((output, grad, kept))
    assert_same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][2] < results[0][2] / 2


def test_short_pass_does_not_wait_for_a_long_one(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = steps_of(shared, monkeypatch)
    shared.pass_start(PassJob("long", "a", data(*[32] * 10), "cross_entropy", {}, owner="one"))
    shared.pass_step()
    shared.pass_start(PassJob("short", "b", data(8), "cross_entropy", {}, owner="two"))
    steps = 2 if shared._trainer.ahead else 1
    ended = [done.job for _ in range(steps) for done in shared.pass_step()]
    assert ended == ["short"], "its result goes back while the other goes on"
    assert shared.passing()
    assert seen[1] == ["short", "long"] or seen[1] == ["short"]


def test_turns_are_by_owner_not_by_run(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody with three runs gets no more than somebody with one."""
    seen = steps_of(shared, monkeypatch)
    for name in "abc":
        shared.pass_start(PassJob(name, name, data(*[40] * 6), "cross_entropy", {}, owner="many"))
    shared.pass_start(PassJob("d", "d", data(*[40] * 6), "cross_entropy", {}, owner="one"))
    while shared.passing():
        shared.pass_step()
    first = [job for step in seen[:12] for job in step]
    assert first.count("d") == 6
    assert [first.count(name) for name in "abc"] == [2, 2, 2]


def test_passes_of_one_adapter_end_in_order_and_add_up(shared: TorchEngine, data: Data) -> None:
    first, second = data(30, 30, seed=1), data(4, seed=2)
    ended = together(shared, {"1": ("a", first), "2": ("a", second)})
    assert list(ended) == ["1", "2"]
    grad = adapter_of(shared, "a").grad
    shared.create("alone", "m", ADAPTERS["a"])
    for given in (first, second):
        run_pass(shared, "alone", given, "cross_entropy", {})
    alone = adapter_of(shared, "alone").grad
    assert grad is not None
    assert alone is not None
    assert torch.equal(grad, alone)


def test_bad_pass_does_not_affect_its_neighbours(shared: TorchEngine, data: Data) -> None:
    good = data(9, 12)
    bad = examples(CASES["importance_sampling"], lengths=(6, 6), logprobs=-1000.0)
    shared.pass_start(PassJob("bad", "b", bad, "importance_sampling", {}))
    ended = together(shared, {"good": ("a", good)})
    assert isinstance(ended["bad"], EngineError)
    assert "datum 0" in str(ended["bad"])
    assert adapter_of(shared, "b").grad is None
    grad = adapter_of(shared, "a").grad
    shared.create("alone", "m", ADAPTERS["a"])
    assert_same(ended["good"], run_pass(shared, "alone", good, "cross_entropy", {}))
    alone = adapter_of(shared, "alone").grad
    assert grad is not None
    assert alone is not None
    assert torch.equal(grad, alone)


def test_passes_without_gradients_are_not_mixed_with_those_that_have_them(
    shared: TorchEngine, data: Data
) -> None:
    shared.pass_start(PassJob("forward", "a", data(9), "cross_entropy", {}, backward=False))
    ended = together(shared, {"both": ("b", data(9))})
    assert set(ended) == {"forward", "both"}
    assert adapter_of(shared, "a").grad is None
    assert adapter_of(shared, "b").grad is not None


def test_dropped_adapter_takes_its_passes_with_it(shared: TorchEngine, data: Data) -> None:
    shared.pass_start(PassJob("1", "a", data(9), "cross_entropy", {}))
    shared.drop("a")
    ended = together(shared, {"2": ("b", data(9))})
    assert isinstance(ended["1"], EngineError)
    assert isinstance(ended["2"], ForwardBackwardOutput)


class Memory:
    """Runs out above so many tokens in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.tokens, self.refused = tokens, list[int]()
        original = decoder.hidden_states

        def limited(model: Any, tokens_T: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
            if tokens_T.shape[0] > self.tokens:
                self.refused.append(tokens_T.shape[0])
                raise torch.OutOfMemoryError("no more memory")
            return original(model, tokens_T, *args, **given)

        monkeypatch.setattr(device_step, "hidden_states", limited)


def test_out_of_memory_halves_a_step_and_counts_once(
    shared: TorchEngine,
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"1": ("a", data(9, 4, 12, 9, seed=1)), "2": ("b", data(16, 8, seed=2))}
    expected = {
        job: run_pass(shared, name, d, "cross_entropy", {}) for job, (name, d) in given.items()
    }
    grads = [adapter_of(shared, name).grad for name in "ab"]
    for name in "ab":
        adapter_of(shared, name).grad = None
    memory = Memory(monkeypatch, 20)
    ended = together(shared, given)
    assert memory.refused
    assert "memory ran out" in caplog.text
    for job, output in expected.items():
        assert ended[job].metrics["loss:sum"] == pytest.approx(output.metrics["loss:sum"], rel=1e-5)
    for name, grad in zip("ab", grads, strict=True):
        again = adapter_of(shared, name).grad
        assert again is not None
        assert grad is not None
        torch.testing.assert_close(again, grad, rtol=1e-4, atol=1e-6)
    refusals = len(memory.refused)
    together(shared, given)
    assert len(memory.refused) == refusals, "the smaller budget stays"


def test_halved_budget_grows_again_after_many_steps(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "GROW_AFTER", 4)
    whole = shared._trainer.budget
    memory = Memory(monkeypatch, 20)
    together(shared, {"1": ("a", data(9, 4, 12, 9))})
    assert shared._trainer.budget < 20
    memory.tokens = whole
    refusals, grown = len(memory.refused), [shared._trainer.budget]
    while grown[-1] < whole:
        together(shared, {"2": ("a", data(4))})
        grown.append(shared._trainer.budget)
    assert len(memory.refused) == refusals
    assert len(grown) > 4, "not at once"
    assert all(
        after in (before, min(whole, 2 * before)) for before, after in itertools.pairwise(grown)
    )


def test_internal_fault_leaves_no_trace_of_its_passes(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as fault:
        fault.setattr(trainer.Trainer, "_choose", lambda self: 1 / 0)
        ended = together(shared, {"1": ("a", data(9)), "2": ("b", data(9))})
    assert all(isinstance(ended[job], ZeroDivisionError) for job in ("1", "2"))
    assert not shared.passing()
    assert isinstance(together(shared, {"3": ("a", data(9))})["3"], ForwardBackwardOutput)


def test_internal_error_keeps_earlier_results(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, 40)
    monkeypatch.setattr(trainer.Trainer, "_halve", lambda *_: 1 / 0)
    ended = together(shared, {"1": ("a", data(20)), "2": ("b", data(48))})
    assert isinstance(ended["1"], ForwardBackwardOutput)
    assert isinstance(ended["2"], ZeroDivisionError)


def test_datum_that_memory_has_no_room_for_is_named(
    shared: TorchEngine, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, 20)
    ended = together(shared, {"1": ("a", data(8, 30, 8)), "2": ("b", data(8))})
    assert "datum 1: 30 tokens need more memory" in str(ended["1"])
    assert ended["1"].category == "server"
    assert adapter_of(shared, "a").grad is None
    assert isinstance(ended["2"], ForwardBackwardOutput)


# ── shares ────────────────────────────────────────────────────────────────────────────────────────


def turns(shares: Shares, waiting: list[str], count: int, costs: dict[str, int]) -> str:
    """Return the order of turns."""
    taken = ""
    for _ in range(count):
        shares.note(waiting)
        taken += (party := shares.first(waiting))
        shares.charge(party, costs[party])
    return taken


def test_owner_with_the_least_service_comes_first() -> None:
    assert turns(Shares(), ["a", "b"], 8, {"a": 3, "b": 1}) == "abbbabbb"
    assert turns(Shares(), ["a", "b", "c"], 6, {"a": 1, "b": 1, "c": 1}) == "abcabc"


def test_rest_is_not_saved_up() -> None:
    shares, costs = Shares(), {"a": 1, "b": 1}
    turns(shares, ["a", "b"], 2, costs)
    turns(shares, ["a"], 50, costs)
    assert turns(shares, ["a", "b"], 6, costs).count("b") in (3, 4)


def test_shares_forget_level_parties() -> None:
    shares = Shares()
    for number in range(1000):
        turns(shares, [str(number), str(number + 1)], 2, {str(number): 1, str(number + 1): 1})
    assert len(shares._had) <= 3
