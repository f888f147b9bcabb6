"""Tracing of losses: what can be sent, what it looks like on the wire, and the same loss computed
by the caller."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
import traced_losses
from tinkex.client.losses import custom_passes
from tinkex.client.losses.loss_graphs import (
    LossHandle,
    check_inputs,
    create_request,
    per_datum,
    trace,
    wire_graph,
)
from tinkex.types import Datum, ForwardBackwardOutput, ModelInput, TensorData
from tinkex.types.record import to_json
from traced_losses import EXAMPLES, Example

REPORT = """
import json
import tinker.lib.public_interfaces.custom_loss as official
from tinker import types
from traced_losses import EXAMPLES
found = {}
for number, (name, example) in enumerate(EXAMPLES.items()):
    handle = official.trace_loss(example.fn, example.ranks, "sess-1")
    request = types.CreateCustomLossRequest(
        session_id="sess-1", custom_loss_seq_id=number, name=handle.name,
        inputs=list(handle.inputs),
        graph=official.encode_graph(handle),
    )
    found[name] = [request.model_dump_json(), handle.key, repr(handle)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def official() -> dict[str, list[str]]:
    """Return the official package's request, key and text for every example."""
    paths = [str(Path(traced_losses.__file__).parent), str(Path(tinkex.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, list[str]] = json.loads(done.stdout)
    return report


def traced(example: Example) -> LossHandle:
    return trace(example.fn, example.ranks, "sess-1")


@pytest.mark.parametrize("name", EXAMPLES)
def test_request_key_and_text_are_those_of_the_official_package(
    name: str, official: dict[str, list[str]]
) -> None:
    handle = traced(EXAMPLES[name])
    request = create_request(handle, list(EXAMPLES).index(name))
    theirs, key, text = official[name]
    assert json.loads(to_json(request)) == json.loads(theirs)
    assert handle.key == key
    assert repr(handle) == text


def test_handles_compare_by_loss_not_by_graph() -> None:
    first, second = traced(EXAMPLES["ppo"]), traced(EXAMPLES["ppo"])
    assert first.graph is not second.graph
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, loss_id="loss-1")
    assert first.input_names == ("logprobs", "old", "advantages")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "other"  # type: ignore[misc]


def test_pass_key_depends_on_loss_and_ranks() -> None:
    keys = {traced(example).key for example in EXAMPLES.values()}
    assert len(keys) == len(EXAMPLES)
    scaled = {trace(times(factor), {"logprobs": 1}, "s").key for factor in (2.0, 2.0, 3.0)}
    assert len(scaled) == 2
    assert trace(times(2.0), {"logprobs": 2}, "s").key not in scaled


def times(factor: float) -> Any:
    return lambda logprobs: (logprobs.sum() * factor, {})


def test_every_kind_of_argument_has_its_form_on_the_wire() -> None:
    def loss(logprobs: Any) -> Any:
        x = logprobs.to(torch.device("cuda:0")).to("cpu")[..., 0:2, None]
        x = torch.zeros_like(
            x, dtype=torch.bfloat16, layout=torch.strided, memory_format=torch.contiguous_format
        )
        x = (
            torch.nan_to_num(x, nan=math.nan, posinf=-math.inf, neginf=np.float64(2.0))
            .sum(dim=(0, 1))
            .view([1])
        )
        return x.sum(), {}

    nodes = wire_graph(trace(loss, {"logprobs": 1}, "s")).nodes
    assert [(node.target, node.args[1:], node.kwargs) for node in nodes[1:-1]] == [
        ("to", [{"device": "cuda:0"}], {}),
        ("to", ["cpu"], {}),
        ("operator.getitem", [{"tuple": [{"ellipsis": True}, {"slice": [0, 2, None]}, None]}], {}),
        (
            "torch.zeros_like",
            [],
            {
                "dtype": {"dtype": "bfloat16"},
                "layout": {"layout": "strided"},
                "memory_format": {"memory_format": "contiguous_format"},
            },
        ),
        (
            "torch.nan_to_num",
            [],
            {"nan": {"float": "nan"}, "posinf": {"float": "-inf"}, "neginf": 2.0},
        ),
        ("sum", [], {"dim": {"tuple": [0, 1]}}),
        ("view", [[1]], {}),
        ("sum", [], {}),
    ]


class Callable:
    def __call__(self, logprobs: Any) -> Any:
        return logprobs.sum(), {}

    def method(self, logprobs: Any) -> Any:
        return logprobs.sum(), {}


def with_default(logprobs: Any, scale: float = 1.0) -> Any:
    return logprobs.sum() * scale, {}


def keyword_only(logprobs: Any, *, scale: Any) -> Any:
    return logprobs.sum() * scale, {}


def any_number(logprobs: Any, *rest: Any) -> Any:
    return logprobs.sum(), {}


def any_name(logprobs: Any, **rest: Any) -> Any:
    return logprobs.sum(), {}


def branches(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}


def loops(logprobs: Any) -> Any:
    return sum(value for value in logprobs), {}


CAPTURED = torch.ones(3)
MODULE = torch.nn.Linear(2, 2)
REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (Callable(), "is a Callable; give a plain function"),
    "a method": (Callable().method, "is a method; give a plain function"),
    "a partial": (
        functools.partial(with_default, scale=2.0),
        "is a partial; give a plain function",
    ),
    "not a function": (3, "is a int; give a plain function"),
    "no parameters": (lambda: (1, {}), "must take logprobs first"),
    "another first parameter": (
        lambda weights, logprobs: (logprobs.sum(), {}),
        "must take logprobs first",
    ),
    "a default": (with_default, "'scale' has a default.*remove the default"),
    "a keyword": (keyword_only, "must be a plain positional parameter"),
    "*args": (any_number, r"\*rest.*must be a plain positional parameter"),
    "**kwargs": (any_name, r"\*\*rest.*must be a plain positional parameter"),
    "an upper case name": (
        lambda logprobs, Weights: (logprobs.sum(), {}),
        "'Weights' must be .* lowercase",
    ),
    "a name of another script": (
        lambda logprobs, größe: (logprobs.sum(), {}),
        "'größe' must be .* lowercase",
    ),
    "a long name": (
        eval(f"lambda logprobs, {'x' * 65}: (logprobs.sum(), {{}})"),
        "at most 64 lowercase",
    ),
    "17 parameters": (
        eval(f"lambda logprobs, {', '.join(f'x{n}' for n in range(16))}: (logprobs.sum(), {{}})"),
        "takes 17 parameters; at most 16",
    ),
    "a branch": (branches, "cannot be traced.*torch.where instead of if"),
    "a loop": (loops, "cannot be traced.*whole tensors instead of loops"),
    "len": (
        lambda logprobs: (logprobs.sum() / len(logprobs), {}),
        r"cannot be traced.*x.shape\[0\] instead of len",
    ),
    "float": (lambda logprobs: (float(logprobs.sum()), {}), "cannot be traced"),
    "numpy's functions": (
        lambda logprobs: (np.exp(logprobs).sum(), {}),
        "cannot be traced.*torch or math instead",
    ),
    "assignment": (lambda logprobs: (operator.setitem(logprobs, 0, 1), {}), "cannot be traced"),
    "a failing function": (lambda logprobs: (undefined, {}), "cannot be traced: name 'undefined'"),  # type: ignore[name-defined]  # noqa: F821
    "item": (
        lambda logprobs: (logprobs.sum().item(), {}),
        r"item\(\), which leaves torch; keep every value a tensor",
    ),
    "numpy": (lambda logprobs: (logprobs.numpy(), {}), r"numpy\(\), which leaves torch"),
    "tolist": (lambda logprobs: (logprobs.tolist(), {}), r"tolist\(\), which leaves torch"),
    "backward": (
        lambda logprobs: (logprobs.sum().backward(), {}),
        r"backward\(\); return the loss",
    ),
    "an unknown method": (
        lambda logprobs: (logprobs.frobnicate(), {}),
        r"frobnicate\(\), which tensors do not have",
    ),
    "a captured tensor": (
        lambda logprobs: ((logprobs + CAPTURED).sum(), {}),
        "holds a tensor of its own.*zeros_like",
    ),
    "a tensor literal": (
        lambda logprobs: (logprobs.sum() + torch.tensor(1.0), {}),
        "write single values as numbers",
    ),
    "a module": (lambda logprobs: (MODULE(logprobs).sum(), {}), "cannot be traced"),
    "a range": (
        lambda logprobs: (logprobs[range(2)].sum(), {}),
        "passes a range, which cannot be sent",
    ),
    "a complex number": (
        lambda logprobs: ((logprobs * 1j).sum(), {}),
        "passes a complex, which cannot be sent",
    ),
    "a huge integer": (lambda logprobs: (logprobs.sum() + 2**63, {}), "write it as a float"),
    "only a loss": (lambda logprobs: logprobs.sum(), r"must return \(loss, metrics\)"),
    "three results": (lambda logprobs: (logprobs.sum(), {}, 1), r"must return \(loss, metrics\)"),
    "metrics in a list": (lambda logprobs: (logprobs.sum(), []), r"must return \(loss, metrics\)"),
    "a constant loss": (lambda logprobs: (1.0, {}), "computed from its inputs, it returns 1.0"),
    "a constant metric": (
        lambda logprobs: (logprobs.sum(), {"custom/a:sum": 1.0}),
        "must be a tensor computed",
    ),
    "a metric without prefix": (
        lambda logprobs: (logprobs.sum(), {"a:sum": logprobs.sum()}),
        "custom/NAME:sum",
    ),
    "a metric without ending": (
        lambda logprobs: (logprobs.sum(), {"custom/a": logprobs.sum()}),
        "custom/NAME:sum",
    ),
    "a metric with a line break": (
        lambda logprobs: (logprobs.sum(), {"custom/a:sum\n": logprobs.sum()}),
        "custom/NAME:sum",
    ),
    "a metric in capitals": (
        lambda logprobs: (logprobs.sum(), {"custom/A:sum": logprobs.sum()}),
        "lowercase",
    ),
    "a metric named by a number": (
        lambda logprobs: (logprobs.sum(), {1: logprobs.sum()}),
        "metric 1 must be named",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsendable_graph_is_refused_with_advice(case: str) -> None:
    fn, message = REFUSED[case]
    ranks: Any = dict.fromkeys(getattr(getattr(fn, "__code__", None), "co_varnames", ()), 1)
    with pytest.raises(ValueError, match=message):
        trace(fn, ranks, "s")


def test_functions_of_other_modules_are_refused_by_name() -> None:
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec("import torch.fx\n@torch.fx.wrap\ndef helper(x): return x", namespace)
    exec("def loss(logprobs): return helper(logprobs).sum(), {}", namespace)
    with pytest.raises(
        ValueError, match=r"calls elsewhere\.helper; only functions of torch, math and operator"
    ):
        trace(namespace["loss"], {"logprobs": 1}, "s")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"logprobs": 1}, "for each parameter .logprobs, scale."),
        ({}, "it has none"),
        ({"logprobs": 1, "scale": 1, "other": 1}, "and for nothing else"),
        ({"logprobs": 0, "scale": 0}, "logprobs has rank 1"),
        ({"logprobs": 1, "scale": 3}, "rank of 'scale' must be 0, 1 or 2, got 3"),
        ({"logprobs": 1, "scale": True}, "rank of 'scale' must be 0, 1 or 2, got True"),
        ({"logprobs": 1, "scale": "1"}, "rank of 'scale' must be 0, 1 or 2, got '1'"),
    ],
)
def test_ranks_must_cover_exactly_the_parameters(ranks: Any, message: str) -> None:
    def loss(logprobs: Any, scale: Any) -> Any:
        return logprobs.sum() * scale, {}

    with pytest.raises(ValueError, match=message):
        trace(loss, ranks, "s")


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.fx", None)
    with pytest.raises(ImportError, match=r"pip install 'tinkex\[local\]'"):
        trace(EXAMPLES["smooth"].fn, {"logprobs": 1}, "s")


def datum(**inputs: Any) -> Datum:
    length = len(inputs["weights"])
    return Datum(ModelInput.from_ints([1] * length), {"target_tokens": [2] * length, **inputs})


def scaled_sum(logprobs: Any, weights: Any, scale: Any) -> Any:
    total = (logprobs * weights).sum() * scale
    return total, {
        "custom/total:sum": total,
        "custom/average:mean": total,
        "custom/scale:mean": scale,
    }


RANKS: Any = {"logprobs": 1, "weights": 1, "scale": 0}


def scalar(value: float) -> TensorData:
    return TensorData([value], "float32", [])


def test_loss_computed_by_the_caller_sums_losses_and_combines_metrics_by_name() -> None:
    handle = trace(scaled_sum, RANKS, "s")
    data = [datum(weights=[1.0, 2.0], scale=scalar(3.0)), datum(weights=[1.0], scale=scalar(5.0))]
    logprobs = [
        torch.tensor([-1.0, -2.0], requires_grad=True),
        torch.tensor([-4.0], requires_grad=True),
    ]
    loss, metrics = per_datum(handle)(data, logprobs)
    assert loss.item() == -15.0 - 20.0
    assert metrics == {
        "custom/total:sum": -35.0,
        "custom/average:mean": -17.5,
        "custom/scale:mean": 4.0,
    }
    loss.backward()  # type: ignore[no-untyped-call]
    assert [each.grad.tolist() for each in logprobs if each.grad is not None] == [[3.0, 6.0], [5.0]]


def test_graph_serves_as_a_custom_loss() -> None:
    loss_fn: custom_passes.CustomLoss = per_datum(trace(scaled_sum, RANKS, "s"))
    data = [datum(weights=[1.0, 2.0], scale=scalar(3.0))]
    output = ForwardBackwardOutput(
        "ArrayRecord", [{"logprobs": TensorData([-1.0, -2.0], "float32", [2])}], {}
    )
    second, loss, metrics = custom_passes.evaluate(loss_fn, data, output)
    assert second[0].loss_fn_inputs["weights"].tolist() == [-3.0, -6.0]
    assert (loss, metrics["custom/scale:mean"]) == (-15.0, 3.0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"weights": [1.0, 2.0]}, "datum 1 has no 'scale', which loss 'scaled_sum' takes"),
        (
            {"weights": [1.0], "scale": TensorData([1.0], "float32")},
            "datum 1: 'scale' has rank 1.*with rank 0",
        ),
        (
            {"weights": TensorData([1.0, 2.0], "float32", [2, 1]), "scale": scalar(1.0)},
            r"'weights' has rank 2.*rank 1 \(\[T\]\)",
        ),
        (
            {
                "weights": [1.0],
                "scale": scalar(1.0),
                "target_tokens": TensorData([1], "int64", [1, 1]),
            },
            "'target_tokens' has rank 2, but loss 'scaled_sum' declares 'logprobs' with rank 1",
        ),
    ],
)
def test_data_without_an_input_or_with_another_rank_are_refused(
    inputs: dict[str, Any], message: str
) -> None:
    handle = trace(scaled_sum, RANKS, "s")
    good = datum(weights=[1.0, 2.0], scale=scalar(3.0))
    bad = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], **inputs})
    check_inputs(handle, [good])
    with pytest.raises(ValueError, match=message):
        check_inputs(handle, [good, bad])
    with pytest.raises(ValueError, match=message):
        per_datum(handle)([good, bad], [torch.zeros(2), torch.zeros(2)])


def test_targets_are_required_for_log_probabilities() -> None:
    lacking = Datum(ModelInput.from_ints([1]), {"weights": [1.0], "scale": scalar(1.0)})
    with pytest.raises(ValueError, match="datum 0 has no 'target_tokens'"):
        check_inputs(trace(scaled_sum, RANKS, "s"), [lacking])


def test_failure_inside_a_loss_names_the_datum(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loss_fn = per_datum(trace(scaled_sum, RANKS, "s"))
    data = [datum(weights=[1.0, 2.0], scale=scalar(3.0))] * 2
    with pytest.raises(ValueError, match=r"datum 1: loss 'scaled_sum' failed: .*size of tensor"):
        loss_fn(data, [torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="takes logprobs of rank 1, they have"):
        loss_fn(data, [torch.zeros(2), torch.zeros(2, 1)])
    with pytest.raises(ValueError, match="needs at least one datum"):
        loss_fn([], [])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda logprobs: (logprobs, {}), "the loss must be a tensor of a single number"),
        (
            lambda logprobs: (logprobs.shape[0], {}),
            "the loss must be a tensor of a single number, .* it is 2",
        ),
        (
            lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs}),
            "custom/a:sum must be a tensor of a single",
        ),
    ],
)
def test_losses_and_metrics_must_be_single_numbers(fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        per_datum(trace(fn, {"logprobs": 1}, "s"))([datum(weights=[1.0, 1.0])], [torch.zeros(2)])
