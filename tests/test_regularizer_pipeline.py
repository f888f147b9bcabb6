"""Regularizers as terms of a loss: execution, gradient norms, outputs, events, the log."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinkex import events as bus, regularizers
from tinkex.regularizers import (
    L1,
    Consistency,
    CustomLossOutput,
    Entropy,
    KLDivergence,
    Regularizer,
    RegularizerError,
    RegularizerOutput,
    RegularizerSpec,
    compute,
    compute_grad_norm,
    execute,
    execute_all,
    execute_one,
    grad_norm_for_regularizer,
    total_grad_norm,
)
from tinkex.types.custom_losses import BaseLoss

X = torch.tensor([1.0, 2.0, 3.0])


def total(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return logprobs.sum(), {"count": logprobs.numel()}


def squares(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return logprobs.square().sum(), {}


def mean(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return logprobs.mean(), {}


def constant(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.tensor(2.0), {}


def broken(_: Any, logprobs: torch.Tensor) -> Any:
    raise KeyError("mine")


def scaled(
    _: Any, logprobs: torch.Tensor, opts: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    return opts.get("scale", 1) * logprobs.sum(), {}


async def later(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    await asyncio.sleep(0)
    return logprobs.sum(), {"waited": True}


class Doubled:
    def name(self) -> str:
        return "doubled"

    def compute(self, data: Any, logprobs: Any, opts: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return 2 * logprobs.sum() + opts.get("more", 0), {}


def spec(
    fn: Any = total, weight: float = 1.0, name: str = "term", **others: Any
) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, **others)


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """Record the events of losses and regularizers."""
    said: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    names = regularizers.events()
    bus.attach(
        "test", names, lambda name, numbers, facts: said.append((name, dict(numbers), dict(facts)))
    )
    yield said
    bus.detach("test")


# ── what a regularizer is ─────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.2/1", "1.12.2/2", "Q-11")
def test_functions_of_two_and_three_arguments_and_objects_are_regularizers() -> None:
    assert isinstance(Doubled(), Regularizer)
    assert isinstance(L1(), Regularizer)
    assert not isinstance(total, Regularizer)
    opts = {"scale": 3}
    assert float(execute(total, [], X, opts)[0]) == 6
    assert float(execute(scaled, [], X, opts)[0]) == 18
    assert float(execute(scaled, [], X)[0]) == 6
    assert float(execute(Doubled(), [], X, {"more": 1})[0]) == 13
    assert (
        float(
            execute(
                lambda data, logprobs, opts=None: (logprobs.sum() * opts["scale"], {}), [], X, opts
            )[0]
        )
        == 18
    )
    assert (
        float(execute(lambda data, logprobs, other=5: (logprobs.sum() * other, {}), [], X, opts)[0])
        == 30
    )
    for fn, expected in ((total, 6), (scaled, 6), (Doubled(), 12), (L1(), 6)):
        assert execute_one(spec(fn), [], X).value == expected
    assert execute_one(spec(scaled, opts={"scale": 4}), [], X).value == 24
    assert execute_one(spec(L1(), opts={"lambda": 4}), [], X).value == 24


@pytest.mark.covers("1.12.2/3")
def test_specs_are_made_of_mappings_and_keywords() -> None:
    made = RegularizerSpec.new({"fn": total, "weight": 0.5, "name": "a", "async": True})
    assert made == RegularizerSpec.new(fn=total, weight=0.5, name="a", async_=True)
    assert made == RegularizerSpec(total, 0.5, "a", True)
    assert RegularizerSpec(total, 1, "a").async_ is False
    assert RegularizerSpec(Doubled(), 1).name == "doubled"
    assert RegularizerSpec(L1(), 1).name == "l1_sparsity"
    assert RegularizerSpec(L1(), 1, "other").name == "other"


@pytest.mark.covers("1.12.2/3")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fn": None}, "fn must be a callable or have compute"),
        ({"fn": lambda data: None}, "takes something else"),
        (
            {"fn": lambda a, b, c, d: None},
            r"must take \(data, logprobs\) or \(data, logprobs, opts\)",
        ),
        ({"weight": -0.1}, "at least 0, got -0.1"),
        ({"weight": "1"}, "must be a number, got '1'"),
        ({"weight": True}, "must be a number, got True"),
        ({"weight": math.nan}, "at least 0, got nan"),
        ({"name": ""}, "needs a name, got ''"),
        ({"name": 3}, "needs a name, got 3"),
        ({"name": None}, "needs a name, got None"),
        ({"async_": 1}, "async_ must be true or false"),
        ({"opts": {"a": 1}}, "takes no opts"),
        ({"colour": 1}, "has no 'colour'"),
    ],
)
def test_specs_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RegularizerSpec.new({"fn": total, "weight": 1.0, "name": "a", **fields})


@pytest.mark.parametrize("missing", ["fn", "weight"])
def test_specs_need_a_function_and_a_weight(missing: str) -> None:
    given = {"fn": total, "weight": 1.0, "name": "a"}
    del given[missing]
    with pytest.raises(ValueError, match=f"needs {missing}"):
        RegularizerSpec.new(given)


@pytest.mark.covers("Q-27")
@pytest.mark.parametrize("parallel", [True, False])
def test_value_that_is_no_single_number_is_summed_for_the_value_and_the_gradient(
    parallel: bool,
) -> None:
    each = spec(lambda data, logprobs: (logprobs * 2, {}))
    rows = spec(Entropy(reduction="none"), name="rows")
    x = torch.log_softmax(torch.tensor([[1.0, 2.0], [0.5, 3.0]]), -1)
    [found, entropy] = execute_all([each, rows], [], x, track_grad_norms=True, parallel=parallel)
    assert found.value == pytest.approx(float(2 * x.sum()))
    assert found.grad_norm == pytest.approx(4)
    assert entropy.value == pytest.approx(float(Entropy(reduction="sum").compute([], x)[0]))
    vector = compute([], X, lambda data, logprobs: (logprobs, {}), [])
    assert vector.loss == 6


def test_plain_numbers_and_tensors_among_metrics_are_taken() -> None:
    metrics = {"a": torch.tensor(2.0), "b": torch.tensor([1, 2]), "c": "text", 4: 5}
    found = execute_one(spec(lambda data, logprobs: (3, metrics)), [], X, track_grad_norms=True)
    assert (found.value, found.grad_norm) == (3.0, 0.0)
    assert found.custom == {"a": 2.0, "b": [1, 2], "c": "text", "4": 5}


# ── execution ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.3/1", "1.12.3/6")
@pytest.mark.parametrize("track", [True, False])
def test_parallel_and_sequential_regularizers_give_the_same_order(track: bool) -> None:
    def slow(data: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        time.sleep(0.05)
        return logprobs.sum(), {}

    specs = [
        spec(slow, 1, "slow"),
        *(spec(squares, weight, f"s{weight}") for weight in range(5)),
        spec(L1(), 2, "l1"),
    ]
    outputs = [
        execute_all(specs, [], X, parallel=parallel, track_grad_norms=track)
        for parallel in (True, False)
    ]
    assert outputs[0] == outputs[1]
    assert [output.name for output in outputs[0]] == [each.name for each in specs]
    assert execute_all(specs, [], X, max_concurrency=1, track_grad_norms=track) == outputs[0]


@pytest.mark.covers("1.12.3/1")
def test_empty_pipeline_gives_nothing() -> None:
    assert execute_all([], [], X) == []
    assert execute_all([], [], X, parallel=False) == []


def test_regularizers_run_side_by_side_but_no_more_than_asked() -> None:
    together = threading.Barrier(3)

    def meeting(data: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        together.wait(10)
        return logprobs.sum(), {}

    assert (
        len(execute_all([spec(meeting, name=name) for name in "abc"], [], X, max_concurrency=3))
        == 3
    )
    running, most, lock, pairs = 0, 0, threading.Lock(), threading.Barrier(2)

    def counted(data: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait(10)
        with lock:
            running -= 1
        return logprobs.sum(), {}

    execute_all([spec(counted, name=name) for name in "abcdef"], [], X, max_concurrency=2)
    assert most == 2


@pytest.mark.covers("1.12.3/1", "1.12.3/2")
@pytest.mark.parametrize("parallel", [True, False])
def test_first_failing_regularizer_in_order_is_named(parallel: bool) -> None:
    def late(data: Any, logprobs: Any) -> Any:
        time.sleep(0.05)
        raise ValueError("late but first")

    with pytest.raises(RegularizerError, match="late but first") as caught:
        execute_all(
            [spec(), spec(late, name="late"), spec(broken, name="broken")], [], X, parallel=parallel
        )
    assert (caught.value.kind, caught.value.name) == ("regularizer_failed", "late")
    assert isinstance(caught.value.__cause__, ValueError)
    revived = pickle.loads(pickle.dumps(caught.value))
    assert (revived.kind, revived.name, str(revived)) == (
        "regularizer_failed",
        "late",
        str(caught.value),
    )


@pytest.mark.covers("1.12.3/5")
def test_sequential_pipeline_stops_at_a_failure() -> None:
    calls: list[str] = []
    with pytest.raises(RegularizerError):
        execute_all(
            [spec(broken, name="a"), spec(lambda data, logprobs: calls.append("b"), name="b")],
            [],
            X,
            parallel=False,
        )
    assert calls == []


@pytest.mark.covers("1.12.3/4")
def test_slow_regularizer_times_out_alone() -> None:
    stop = threading.Event()

    def stuck(data: Any, logprobs: torch.Tensor) -> Any:
        stop.wait(20)
        return logprobs.sum(), {}

    began = time.monotonic()
    with pytest.raises(RegularizerError, match="took too long") as caught:
        execute_all(
            [spec(), spec(stuck, name="stuck"), spec(name="c")],
            [],
            X,
            timeout=0.5,
            max_concurrency=1,
        )
    stop.set()
    assert (caught.value.kind, caught.value.name) == ("timeout", "stuck")
    assert time.monotonic() - began < 15
    assert execute_one(spec(), [], X, timeout=None).value == 6


def test_thread_that_exits_is_not_waited_for() -> None:
    def leaving(data: Any, logprobs: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(RegularizerError, match="SystemExit: 3"):
        execute_all([spec(leaving)], [], X, timeout=None)


@pytest.mark.parametrize("answer", [None, 3, (1, 2), ("a", {}), (True, {})])
def test_malformed_answer_is_a_failure(answer: Any) -> None:
    with pytest.raises(RegularizerError) as caught:
        execute_one(spec(lambda data, logprobs: answer), [], X)
    assert caught.value.kind == "regularizer_failed"


@pytest.mark.parametrize("options", [{"timeout": 0}, {"max_concurrency": 0}])
def test_zero_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        execute_all([spec()], [], X, **options)


# ── asynchronous ones ─────────────────────────────────────────────────────────────────────────────


def pooled(_: Any, logprobs: torch.Tensor) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result((logprobs.sum(), {"waited": True}))
    return future


@pytest.mark.covers("1.12.2/4")
@pytest.mark.parametrize("fn", [later, pooled])
@pytest.mark.parametrize("parallel", [True, False])
def test_awaitables_and_futures_are_waited_for(fn: Any, parallel: bool) -> None:
    [found] = execute_all([spec(fn, 2.0, async_=True)], [], X, parallel=parallel)
    assert (found.value, found.contribution, found.custom) == (6, 12, {"waited": True})


async def test_awaitables_are_waited_for_inside_a_running_loop() -> None:
    assert execute_one(spec(later, async_=True), [], X).value == 6


async def forever(_: Any, logprobs: torch.Tensor) -> Any:
    await asyncio.sleep(100)


async def failing(_: Any, logprobs: torch.Tensor) -> Any:
    raise ValueError("inside")


async def given_up(_: Any, logprobs: torch.Tensor) -> Any:
    raise asyncio.CancelledError


@pytest.mark.covers("1.12.3/3")
@pytest.mark.parametrize(
    ("fn", "kind", "cause"),
    [
        (forever, "regularizer_exit", TimeoutError),
        (lambda data, logprobs: concurrent.futures.Future(), "regularizer_exit", TimeoutError),
        (failing, "regularizer_exit", ValueError),
        (given_up, "regularizer_exit", asyncio.CancelledError),
        (total, "regularizer_exit", TypeError),
        (broken, "regularizer_failed", KeyError),
    ],
    ids=["forever", "future", "failing", "given-up", "not-async", "raises"],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_waiting_that_ends_badly_is_an_exit(
    fn: Any, kind: str, cause: type[BaseException], parallel: bool
) -> None:
    with pytest.raises(RegularizerError) as caught:
        execute_all(
            [spec(fn, async_=True)],
            [],
            X,
            parallel=parallel,
            timeout=0.1 if cause is TimeoutError else 20,
        )
    assert caught.value.kind == kind
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.covers("Q-12")
def test_norm_of_an_asynchronous_regularizer_is_zero_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = spec(later, async_=True, name="remote")
    assert execute_one(one, [], X, track_grad_norms=True).grad_norm == 0.0
    assert grad_norm_for_regularizer(one, [], X) == 0.0
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("'remote'" in record.getMessage() for record in caplog.records)
    # but it trains, and the total says so
    output = compute([], X, mean, [one], track_grad_norms=True)
    assert output.total_grad_norm == pytest.approx(4 / 3 * math.sqrt(3))
    assert total_grad_norm(mean, [one], [], X) == pytest.approx(4 / 3 * math.sqrt(3))


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.4/1", "1.12.4/4", "1.12.4/5")
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.sum, math.sqrt(3)),
        (lambda x: x.square().sum(), math.sqrt(56)),
        (torch.mean, math.sqrt(1 / 3)),
        (lambda x: x.sum() + 0.5 * x.square().sum(), math.sqrt(29)),
        (lambda x: x * 2, math.sqrt(12)),
        (lambda x: torch.tensor(7.0), 0.0),
        (lambda x: 7.0, 0.0),
    ],
    ids=["sum", "squares", "mean", "both", "vector", "constant", "number"],
)
def test_norms_of_gradients(function: Any, expected: float) -> None:
    assert compute_grad_norm(function, X) == pytest.approx(expected)
    with torch.no_grad():
        assert compute_grad_norm(function, X) == pytest.approx(expected)


@pytest.mark.covers("1.12.4/1", "1.12.4/5")
def test_norms_of_gradients_of_any_shape() -> None:
    assert compute_grad_norm(torch.sum, torch.ones(2, 2)) == 2
    assert compute_grad_norm(torch.sum, torch.tensor(3.0)) == 1
    assert (
        compute_grad_norm(lambda xs: xs[0].sum() + 2 * xs[1].sum(), [torch.ones(5), torch.ones(1)])
        == 3
    )
    kept = X.clone().requires_grad_(True)
    compute_grad_norm(torch.sum, kept)
    assert kept.grad is None


@pytest.mark.covers("1.12.4/2", "1.12.4/3", "1.12.4/5", "1.12.5/4")
def test_norms_of_terms_and_of_the_whole() -> None:
    specs = [spec(total, 1.0, "a"), spec(total, 1.0, "b")]
    # not weighted
    assert grad_norm_for_regularizer(spec(squares, 0.1), [], X) == pytest.approx(math.sqrt(56))
    assert total_grad_norm(mean, specs, [], X) == pytest.approx(7 / 3 * math.sqrt(3))
    assert total_grad_norm(total, [spec(squares, 0.5)], [], X) == pytest.approx(math.sqrt(29))
    output = compute([], X, mean, specs, track_grad_norms=True)
    assert output.total_grad_norm == pytest.approx(7 / 3 * math.sqrt(3))
    assert output.base_loss is not None
    assert output.base_loss.grad_norm == pytest.approx(math.sqrt(1 / 3))
    found = compute([], X, mean, [spec(squares, 0.5)], track_grad_norms=True).regularizers["term"]
    assert found.grad_norm == pytest.approx(math.sqrt(56))
    assert found.grad_norm_weighted == pytest.approx(0.5 * math.sqrt(56))


@pytest.mark.covers("1.12.4/2", "1.12.4/3")
def test_norms_that_cannot_be_computed_are_zero_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert grad_norm_for_regularizer(spec(broken, name="bad"), [], X) == 0.0
    assert total_grad_norm(broken, [], [], X) == 0.0
    assert total_grad_norm(mean, [spec(broken)], [], X) == 0.0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "'bad'" in messages[0]


class Spoilt(torch.autograd.Function):
    """Has a value, and no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("no derivative")


def underivable(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return Spoilt.apply(logprobs), {}  # type: ignore[no-untyped-call]


@pytest.mark.covers("1.12.4/4")
def test_base_loss_without_a_gradient_has_no_norm(caplog: pytest.LogCaptureFixture) -> None:
    output = compute([], X, underivable, [spec(squares)], track_grad_norms=True)
    assert output.base_loss == BaseLoss(value=6.0, grad_norm=None)
    assert output.total_grad_norm == 0.0
    assert output.regularizers["term"].grad_norm == pytest.approx(math.sqrt(56))
    assert (
        compute([], X, mean, [spec(underivable)], track_grad_norms=True)
        .regularizers["term"]
        .grad_norm
        == 0.0
    )
    assert "no derivative" in caplog.text


@pytest.mark.covers("Q-12")
def test_divergence_and_consistency_have_true_gradients_beside_a_base_loss() -> None:
    x = torch.tensor([-0.5, -1.5], dtype=torch.float64)
    q = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    terms = {"kl": KLDivergence(q), "pair": Consistency("pair")}

    class Pair:
        loss_fn_inputs = {"pair": q}  # noqa: RUF012

    data: Any = [Pair()]
    specs = [spec(fn, 1.0, name) for name, fn in terms.items()]
    output = compute(data, x, constant, specs, track_grad_norms=True)
    by_hand = {"kl": x.exp() * (x - q + 1), "pair": x - q}
    for name, gradient in by_hand.items():
        assert output.regularizers[name].grad_norm == pytest.approx(float(gradient.norm()))
    assert output.total_grad_norm == pytest.approx(float((by_hand["kl"] + by_hand["pair"]).norm()))
    assert output.base_loss is not None
    assert output.base_loss.grad_norm == 0.0


@pytest.mark.parametrize("parallel", [True, False])
def test_every_function_is_called_once_also_when_norms_are_tracked(parallel: bool) -> None:
    calls: list[str] = []

    def noted(name: str) -> Any:
        def fn(data: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            calls.append(name)
            return logprobs.sum(), {}

        return fn

    with torch.no_grad():
        output = compute(
            [], X, noted("base"), [spec(noted("a"))], track_grad_norms=True, parallel=parallel
        )
    assert calls == ["base", "a"]
    assert output.total_grad_norm == pytest.approx(2 * math.sqrt(3))


# ── the pipeline ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.1/1", "1.12.5/3")
@pytest.mark.parametrize("parallel", [True, False])
def test_loss_is_its_base_and_the_weighted_terms(parallel: bool) -> None:
    specs = [spec(squares, 0.5, "a"), spec(total, 0.1, "b"), spec(total, 0, "c")]
    output = compute([], X, total, specs, parallel=parallel)
    assert output.loss_total == pytest.approx(6 + 7 + 0.6)
    assert output.loss == output.loss_total
    assert output.regularizer_total == pytest.approx(7.6)
    assert [found.contribution for found in output.regularizers.values()] == pytest.approx(
        [7, 0.6, 0]
    )
    assert output.base_loss == BaseLoss(value=6.0, custom={"count": 3})
    assert output.total_grad_norm is None


@pytest.mark.covers("1.12.5/4")
def test_total_norm_without_regularizers_is_the_base_norm() -> None:
    output = compute([], X, squares, track_grad_norms=True)
    assert output.base_loss is not None
    assert output.total_grad_norm == output.base_loss.grad_norm == pytest.approx(math.sqrt(56))
    assert (output.regularizers, output.regularizer_total, output.loss) == ({}, 0.0, 14)


@pytest.mark.covers("1.12.5/1", "1.12.5/2", "1.12.5/5", "1.12.7/3")
@pytest.mark.parametrize(
    ("base", "specs", "words"),
    [
        (lambda logprobs: None, [], r"takes \(data, logprobs\)"),
        (None, [], r"takes \(data, logprobs\)"),
        (total, [total], "item 0 is a function"),
        (total, [spec(name=name) for name in "abacb"], "these are repeated: a, b"),
        (broken, [], "mine"),
        (lambda data, logprobs: logprobs.sum(), [], r"the base loss must return \(loss, metrics\)"),
    ],
)
def test_uncomposable_loss_is_reported(base: Any, specs: Any, words: str, heard: list[Any]) -> None:
    with pytest.raises(RegularizerError, match=words) as caught:
        compute([], X, base, specs)
    assert (caught.value.kind, caught.value.name) == ("pipeline_failed", None)
    assert isinstance(caught.value.__cause__, Exception)
    assert [name for name, *_ in heard] == [bus.CUSTOM_LOSS_START, bus.CUSTOM_LOSS_EXCEPTION]


@pytest.mark.covers("1.12.5/5", "1.12.7/6")
@pytest.mark.parametrize("parallel", [True, False])
def test_regularizers_failure_is_passed_on_as_it_is(parallel: bool, heard: list[Any]) -> None:
    with pytest.raises(RegularizerError) as caught:
        compute([], X, total, [spec(broken, 0.5, "bad")], parallel=parallel)
    assert (caught.value.kind, caught.value.name) == ("regularizer_failed", "bad")
    names = [name for name, *_ in heard]
    assert names == [
        bus.CUSTOM_LOSS_START,
        bus.REGULARIZER_START,
        bus.REGULARIZER_EXCEPTION,
        bus.CUSTOM_LOSS_EXCEPTION,
    ]
    assert heard[2][2] == {"regularizer_name": "bad", "weight": 0.5, "reason": caught.value.message}


# ── outputs ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.6/1")
def test_regularizers_json_has_norms_only_if_computed() -> None:
    bare = RegularizerOutput.from_computation("a", 2.0, 0.5, custom={"x": 1})
    assert bare.to_json() == {
        "name": "a",
        "value": 2.0,
        "weight": 0.5,
        "contribution": 1.0,
        "custom": {"x": 1},
    }
    full = RegularizerOutput.from_computation("a", 2.0, 0.5, grad_norm=3.0)
    assert full.grad_norm_weighted == 1.5
    assert full.to_json() == {
        **bare.to_json(),
        "custom": {},
        "grad_norm": 3.0,
        "grad_norm_weighted": 1.5,
    }


@pytest.mark.covers("1.12.6/2")
def test_loss_json_keeps_inner_nulls() -> None:
    output = compute([], X, total, [spec(squares, 0.5, "a")])
    found = json.loads(json.dumps(output.to_json()))
    assert found == {
        "loss_total": 13.0,
        "regularizer_total": 7.0,
        "base_loss": {"value": 6.0, "grad_norm": None, "custom": {"count": 3}},
        "regularizers": {
            "a": {
                "value": 14.0,
                "weight": 0.5,
                "contribution": 7.0,
                "grad_norm": None,
                "grad_norm_weighted": None,
                "custom": {},
            }
        },
    }
    assert "total_grad_norm" in compute([], X, total, track_grad_norms=True).to_json()
    assert "base_loss" not in CustomLossOutput(loss_total=1.0).to_json()


def test_numbers_of_a_loss_as_flat_metrics() -> None:
    output = compute([], X, total, [spec(Entropy(), 0.5, "h")], track_grad_norms=True)
    found = output.metrics()
    assert found["count"] == 3.0
    assert found["base_loss"] == 6.0
    assert (
        found["h/contribution"]
        == output.regularizers["h"].contribution
        == found["regularizer_total"]
    )
    assert found["h/temperature"] == 1.0
    assert found["total_grad_norm"] == output.total_grad_norm
    assert "h/mode" not in found  # a text
    assert "total_grad_norm" not in compute([], X, total).metrics()


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers(
    "1.4.2/8", "1.12.5/1", "1.12.7/1", "1.12.7/2", "1.12.7/3", "1.12.7/4", "1.12.7/5", "1.12.7/6"
)
@pytest.mark.parametrize("track", [True, False])
def test_events_match_the_catalogue(track: bool, heard: list[Any]) -> None:
    compute([], X, total, [spec(squares, 0.5, "a")], track_grad_norms=track)
    with pytest.raises(RegularizerError):
        compute([], X, total, [spec(broken)])
    assert {name for name, *_ in heard} == set(regularizers.events())
    for name, numbers, facts in heard:
        contents = bus.CATALOGUE[name]
        untracked = {"grad_norm"} if name == bus.REGULARIZER_STOP and not track else set()
        assert set(numbers) == set(contents.measurements) - untracked, name
        assert set(facts) == set(contents.metadata), name
    by_name = {name: (numbers, facts) for name, numbers, facts in heard[:4]}
    assert by_name[bus.CUSTOM_LOSS_START][1] == {"regularizer_count": 1, "track_grad_norms": track}
    numbers, facts = by_name[bus.REGULARIZER_STOP]
    assert (numbers["value"], numbers["contribution"]) == (14, 7)
    assert facts == {"regularizer_name": "a", "weight": 0.5, "async": False}
    numbers, facts = by_name[bus.CUSTOM_LOSS_STOP]
    assert (numbers["loss_total"], numbers["regularizer_total"]) == (13, 7)
    assert 0 <= numbers["duration"] < 10_000


@pytest.mark.covers("1.12.3/7")
def test_parallel_starts_come_first_and_sequential_starts_in_turn(heard: list[Any]) -> None:
    specs = [spec(name=name) for name in "ab"]
    start, stop = bus.REGULARIZER_START, bus.REGULARIZER_STOP
    execute_all(specs, [], X, parallel=True)
    assert [(name, facts["regularizer_name"]) for name, _, facts in heard[:2]] == [
        (start, "a"),
        (start, "b"),
    ]
    assert {name for name, *_ in heard[2:]} == {stop}
    heard.clear()
    execute_all(specs, [], X, parallel=False)
    said = [(name, facts["regularizer_name"]) for name, _, facts in heard]
    assert said == [(start, "a"), (stop, "a"), (start, "b"), (stop, "b")]


@pytest.mark.covers("1.12.7/7")
def test_logger_writes_a_line_for_each_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    handler = regularizers.attach_logger()
    try:
        compute([], X, total, [spec(squares, 0.5, "a")], track_grad_norms=True)
        with pytest.raises(RegularizerError):
            compute([], X, total, [spec(broken, name="b")])
    finally:
        assert regularizers.detach(handler)
    assert not regularizers.detach(handler)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 8
    assert lines[0] == "custom loss start regularizers=1 grad_norms=True"
    assert lines[1] == "regularizer a weight=0.5 start async=False"
    assert lines[2].startswith(
        "regularizer a weight=0.5 stop value=14.0000 contribution=7.0000 grad_norm=7.4833 in "
    )
    assert lines[3].startswith(
        "custom loss stop loss_total=13.0000 regularizer_total=7.0000 regularizers=1 in "
    )
    assert lines[3].endswith(" ms")
    assert lines[3].split(" in ")[1].split()[0].isdigit()  # whole milliseconds
    assert lines[6].startswith("regularizer b weight=1.0 failed in ")
    assert lines[7].startswith("custom loss failed in ")
    compute([], X, total)
    assert len(caplog.records) == 8


@pytest.mark.covers("1.12.7/7")
def test_loggers_level_and_id_are_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    assert regularizers.attach_logger("mine", level="error") == "mine"
    with pytest.raises(ValueError, match="attached already"):
        regularizers.attach_logger("mine")
    with pytest.raises(ValueError, match="unknown level 'loud'"):
        regularizers.attach_logger(level="loud")
    compute([], X, total)
    assert regularizers.detach("mine")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


@pytest.mark.covers("1.12.7/7")
def test_pipeline_has_six_events() -> None:
    assert regularizers.events() == [
        name for name in bus.CATALOGUE if "custom_loss" in name or "regularizer" in name
    ]
    assert len(regularizers.events()) == 6


def test_package_has_exactly_the_listed_names() -> None:
    for name in regularizers.__all__:
        assert getattr(regularizers, name) is not None
    assert set(dir(regularizers)) == set(regularizers.__all__)
    with pytest.raises(AttributeError, match="surprise"):
        _ = regularizers.surprise
