"""Losses rebuilt from graphs: the same values and gradients as the function, and nothing for those
who mean harm."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tinkex.client.losses.loss_graphs import create_request, trace
from tinkex.engine.api import EngineError
from tinkex.engine.losses.graph_compiler import compile_graph
from tinkex.engine.losses.graph_loss import CompiledLoss, GraphLimits, Operation, leaves
from tinkex.engine.losses.graph_operations import DTYPES, FUNCTIONS, METHODS
from tinkex.types.record import from_json, to_json
from tinkex.types.sessions import CreateCustomLossRequest
from traced_losses import EXAMPLES, values


@functools.cache
def rebuilt(name: str) -> CompiledLoss:
    """A loss after its journey: traced, written as JSON, read and compiled."""
    example = EXAMPLES[name]
    body = to_json(create_request(trace(example.fn, example.ranks, "s"), 0))
    return compile_graph(from_json(CreateCustomLossRequest, body))


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 12).map(lambda half: 2 * half), seed=st.integers(0, 2**31))
def test_rebuilt_loss_has_the_value_metrics_and_gradient_of_its_function(
    name: str, length: int, seed: int
) -> None:
    example = EXAMPLES[name]
    compiled = rebuilt(name)
    inputs = values(example, length, seed)
    ours, theirs = (inputs["logprobs"].clone().requires_grad_() for _ in range(2))
    others = {key: value for key, value in inputs.items() if key != "logprobs"}
    expected, expected_metrics = example.fn(theirs, *others.values())
    loss, metrics = compiled(ours, others)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert list(metrics) == list(expected_metrics) == list(compiled.metrics)
    for key, value in expected_metrics.items():
        torch.testing.assert_close(metrics[key], value.detach(), rtol=0, atol=0)
        assert not metrics[key].requires_grad
    loss.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
    assert torch.any(ours.grad != 0) or name in (
        "masked",
        "filled",
        "best_of_candidates",
        "huber_to_target",
    )


def test_gradient_is_that_of_finite_differences() -> None:
    compiled = rebuilt("ppo")
    inputs = values(EXAMPLES["ppo"], 6, 3)
    others = {key: value for key, value in inputs.items() if key != "logprobs"}
    point = inputs["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logprobs: compiled(logprobs, others)[0], (point,))


def test_compiled_loss_lists_its_inputs() -> None:
    compiled = rebuilt("dpo_pairs")
    assert compiled.input_ranks == {"logprobs": 1, "reference": 1, "beta": 0}
    assert compiled.name == "dpo_pairs"


REF = {"ref": "logprobs"}


def function(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_function", "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_method", "target": target, "args": list(args), "kwargs": kwargs}


PLACEHOLDER = {
    "op": "placeholder",
    "name": "logprobs",
    "target": "logprobs",
    "args": [],
    "kwargs": {},
}


def output(loss: Any, metrics: Any) -> dict[str, Any]:
    pair = {"tuple": [loss, metrics]}
    return {"op": "output", "name": "output", "target": "output", "args": [pair], "kwargs": {}}


def request(nodes: list[Any], inputs: Any = None, name: str = "bad") -> CreateCustomLossRequest:
    """A request as it comes from a socket."""
    body = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": name,
        "inputs": inputs or [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }
    return from_json(CreateCustomLossRequest, json.dumps(body).encode())


def graph(*steps: dict[str, Any], rank: int = 1) -> CreateCustomLossRequest:
    """A graph of steps a, b, c …; its loss is the sum of the log-probabilities and of the last
    step."""
    named = [
        {**step, "name": step.get("name", chr(ord("a") + number))}
        for number, step in enumerate(steps)
    ]
    last = {"ref": named[-1]["name"]}
    end = [
        {**method("sum", REF), "name": "y"},
        {**function("operator.mul", {"ref": "y"}, last), "name": "z"},
    ]
    nodes = [PLACEHOLDER, *named, *end, output({"ref": "z"}, {"dict": {}})]
    return request(nodes, [{"name": "logprobs", "rank": rank}])


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


A, B = {"ref": "a"}, {"ref": "b"}
MANY = 10**12
SHAPE = function("getattr", REF, "shape")
LENGTH = function("operator.getitem", A, 0)
PICKLE = "cos\nsystem\n(S'touch owned'\ntR."

HOSTILE: dict[str, tuple[CreateCustomLossRequest, str]] = {
    # Ways to other objects
    "class": (graph(function("getattr", REF, "__class__")), "text '__class__'"),
    "class of a class": (
        graph(function("getattr", REF, "__class__"), function("getattr", A, "__mro__")),
        "'__class__'",
    ),
    "globals": (graph(function("getattr", REF, "__globals__")), "text '__globals__'"),
    "subclasses": (graph(method("__subclasses__", REF)), "is not among the operations"),
    "reduce": (graph(method("__reduce_ex__", REF, 4)), "is not among the operations"),
    "getattribute": (
        graph(method("__getattribute__", REF, "shape")),
        "is not among the operations",
    ),
    "system": (graph(function("os.system", "touch owned")), "is not among the operations"),
    "system by attribute": (graph(function("getattr", "os", "system")), "text 'os'"),
    "system by dots": (
        graph(function("torch.os.system", "touch owned")),
        "is not among the operations",
    ),
    "a module inside torch": (
        graph(function("torch.serialization.os.system", "x")),
        "is not among the operations",
    ),
    "eval": (graph(function("builtins.eval", "1")), "is not among the operations"),
    "import": (graph(function("builtins.__import__", "os")), "is not among the operations"),
    "methodcaller": (
        graph(function("operator.methodcaller", "numpy")),
        "is not among the operations",
    ),
    "attrgetter": (
        graph(function("operator.attrgetter", "__class__")),
        "is not among the operations",
    ),
    "getattr with a default": (
        graph(function("getattr", REF, "shape", 1)),
        "takes a value and the name",
    ),
    "a computed attribute": (
        graph(function("getattr", REF, A)),
        "refers to 'a', which is no earlier node",
    ),
    "attribute of a shape": (
        graph(SHAPE, function("getattr", A, "values")),
        "cannot read 'values' of a Size",
    ),
    "values of a tensor": (
        graph(function("getattr", REF, "values")),
        "cannot read 'values' of a Tensor",
    ),
    "data": (graph(function("getattr", REF, "data")), "text 'data'"),
    "grad_fn": (graph(function("getattr", REF, "grad_fn")), "text 'grad_fn'"),
    "get_attr": (
        graph({"op": "get_attr", "target": "weight", "args": [], "kwargs": {}}),
        "a get_attr cannot stand",
    ),
    "call_module": (
        graph({"op": "call_module", "target": "m", "args": [REF], "kwargs": {}}),
        "a call_module cannot",
    ),
    "aten": (graph(function("torch.ops.aten.exp.default", REF)), "is not among the operations"),
    # Files, pickles, code
    "load": (graph(function("torch.load", "/etc/passwd")), "is not among the operations"),
    "save": (graph(function("torch.save", REF, "owned")), "is not among the operations"),
    "from_file": (graph(function("torch.from_file", "/etc/passwd")), "is not among the operations"),
    "a pickle in a text": (
        graph(function("torch.mean", REF, dtype=PICKLE)),
        "which is not allowed there",
    ),
    "a pickle as a tag": (
        graph(function("torch.mean", {"pickle": PICKLE})),
        "argument of unknown kind 'pickle'",
    ),
    "compile": (graph(function("torch.compile", REF)), "is not among the operations"),
    "jit": (graph(function("torch.jit.load", "x")), "is not among the operations"),
    "load_library": (
        graph(function("torch.ops.load_library", "x.so")),
        "is not among the operations",
    ),
    # Methods with effects
    "item": (graph(method("item", REF)), "is not among the operations"),
    "tolist": (graph(method("tolist", REF)), "is not among the operations"),
    "numpy": (graph(method("numpy", REF)), "is not among the operations"),
    "data_ptr": (graph(method("data_ptr", REF)), "is not among the operations"),
    "storage": (graph(method("untyped_storage", REF)), "is not among the operations"),
    "apply_": (graph(method("apply_", REF, "x")), "is not among the operations"),
    "map_": (graph(method("map_", REF, REF, "x")), "is not among the operations"),
    "backward": (graph(method("backward", REF)), "is not among the operations"),
    "register_hook": (graph(method("register_hook", REF, "x")), "is not among the operations"),
    "requires_grad_": (graph(method("requires_grad_", REF, False)), "is not among the operations"),
    "set_": (graph(method("set_", REF)), "is not among the operations"),
    "share_memory_": (graph(method("share_memory_", REF)), "is not among the operations"),
    "in place": (graph(method("add_", REF, 1)), "is not among the operations"),
    "in place by a function": (graph(function("torch.exp_", REF)), "is not among the operations"),
    "in place by an operator": (
        graph(function("operator.iadd", REF, 1)),
        "is not among the operations",
    ),
    "setitem": (graph(function("operator.setitem", REF, 0, 1)), "is not among the operations"),
    "in place by a keyword": (
        graph(function("torch.nn.functional.relu", REF, inplace=True)),
        "inplace only as False",
    ),
    "in place by position": (
        graph(function("torch.nn.functional.celu", REF, 1.0, True)),
        "everything else by name",
    ),
    "out by position": (
        graph(function("torch.functional.norm", REF, 2, 0, False, REF)),
        "everything else by name",
    ),
    "out": (graph(function("torch.exp", REF, out=REF)), "out only as None"),
    "out as a pair": (
        graph(function("torch.sort", REF, out={"tuple": [REF, REF]})),
        "out only as None",
    ),
    "random": (graph(function("torch.rand_like", REF)), "is not among the operations"),
    "global state": (graph(function("torch.manual_seed", 0)), "is not among the operations"),
    "threads": (graph(function("torch.set_num_threads", 10000)), "is not among the operations"),
    "uninitialised memory": (graph(function("torch.empty", 4)), "is not among the operations"),
    "other memory": (
        graph(method("as_strided", REF, [100], [1], 4096)),
        "is not among the operations",
    ),
    "other bits": (graph(method("view", REF, {"dtype": "int32"})), "takes sizes that are integers"),
    # Memory
    "ones": (graph(function("torch.ones", MANY)), "makes 1000000000000 numbers"),
    "zeros of many dimensions": (
        graph(function("torch.zeros", [10**5, 10**5, 10**5])),
        "makes 10+ numbers",
    ),
    "arange": (graph(function("torch.arange", MANY)), "makes 1000000000000 numbers"),
    "arange in tiny steps": (graph(function("torch.arange", 0, 1, 1e-12)), "makes 10+ numbers"),
    "linspace": (graph(function("torch.linspace", 0, 1, MANY)), "makes 1000000000000 numbers"),
    "eye": (graph(function("torch.eye", 10**6)), "makes 1000000000000 numbers"),
    "full": (graph(function("torch.full", [MANY], 1.0)), "makes 1000000000000 numbers"),
    "repeat": (graph(method("repeat", REF, MANY)), "makes 8000000000000 numbers"),
    "tile": (graph(function("torch.tile", REF, [MANY])), "makes 8000000000000 numbers"),
    "expand": (graph(method("expand", REF, MANY, -1)), "makes 8000000000000 numbers"),
    "broadcast_to": (
        graph(function("torch.broadcast_to", REF, [MANY, 8])),
        "makes 8000000000000 numbers",
    ),
    "repeat_interleave": (
        graph(function("torch.repeat_interleave", REF, MANY)),
        "makes 8000000000000 numbers",
    ),
    "pad": (
        graph(function("torch.nn.functional.pad", REF, [0, MANY])),
        "makes 1000000000008 numbers",
    ),
    "one_hot": (
        graph(method("long", REF), function("torch._C._nn.one_hot", A, MANY)),
        "makes 8000000000000 numbers",
    ),
    "one_hot of unknown size": (
        graph(function("torch._C._nn.one_hot", REF)),
        "takes a tensor and num_classes",
    ),
    "outer": (
        graph(
            function("torch.ones", 4097),
            function("torch.outer", A, A),
            function("torch.outer", A, A),
        ),
        "makes 16785409 numbers",
    ),
    "broadcasting": (
        graph(method("new_ones", REF, [5000, 1]), method("t", A), function("operator.mul", A, B)),
        "makes 25000000 numbers",
    ),
    "broadcasting inside a loss": (
        graph(
            method("new_ones", REF, [10**6, 1]),
            method("t", A),
            function("torch.nn.functional.mse_loss", A, B, reduction="mean"),
        ),
        "takes tensors of one shape",
    ),
    "a batch of products": (
        graph(method("new_ones", REF, [9, 1, 9]), function("torch.matmul", A, A)),
        "at most two dim",
    ),
    "a product": (
        graph(method("new_ones", REF, [4000, 4000]), function("operator.matmul", A, A)),
        "needs 64000000000 multiplications",
    ),
    "einsum": (
        graph(
            method("new_ones", REF, [4000, 4000]),
            function("torch.functional.einsum", "ij,jk->ik", A, A),
        ),
        "needs 64000000000 multiplications",
    ),
    "einsum of three": (
        graph(function("torch.functional.einsum", "a,b,c->", REF, REF, REF)),
        "text 'a,b,c->'",
    ),
    "many large results": (
        graph(
            function("torch.ones", 1 << 23),
            *(function("torch.exp", {"ref": chr(ord("a") + number)}) for number in range(10)),
        ),
        "all nodes together",
    ),
    "many small tensors": (
        graph(method("new_ones", REF, 10**6), method("split", A, 1)),
        "more than 1024 tensors",
    ),
    "unbind": (
        graph(method("new_ones", REF, 10**6), method("unbind", A)),
        "more than 1024 tensors",
    ),
    "chunk": (
        graph(method("new_ones", REF, 10**6), method("chunk", A, 10**6)),
        "makes at most 1024 tensors",
    ),
    # Time and numbers
    "a power": (
        graph(SHAPE, LENGTH, function("operator.pow", B, 10**9)),
        "makes an integer that is too large",
    ),
    "a power of powers": (
        graph(
            SHAPE,
            LENGTH,
            function("operator.pow", B, 20),
            function("operator.pow", {"ref": "c"}, 60),
        ),
        "makes an integer that is too large",
    ),
    "a division that ends the process": (
        graph(method("long", REF), function("torch.div", A, -1, rounding_mode="trunc")),
        "text 'trunc'",
    ),
    "whole numbers by -1": (
        graph(method("long", REF), function("operator.mod", A, -1)),
        "cannot divide whole numbers by -1",
    ),
    "lshift": (
        graph(SHAPE, LENGTH, function("operator.lshift", B, MANY)),
        "is not among the operations",
    ),
    "factorial": (
        graph(SHAPE, LENGTH, function("math.factorial", 10**9)),
        "is not among the operations",
    ),
    "a text times a number": (
        graph(SHAPE, LENGTH, function("operator.mul", "mean", 10**9)),
        "numbers only",
    ),
    "a tuple times a number": (graph(SHAPE, function("operator.mul", A, 10**9)), "numbers only"),
    "text formatting": (
        graph(function("operator.mod", "%1000000000d", 5)),
        "which is not allowed there",
    ),
    "tuples of tuples": (
        graph(SHAPE, function("operator.add", {"tuple": [A, A]}, {"tuple": [A, A]})),
        "joins shapes",
    ),
    "many differences": (graph(function("torch.diff", REF, 10**9)), "an order n of at most 8"),
    "math of a tensor": (graph(function("math.sqrt", REF)), "takes plain numbers only"),
    "a range": (graph(function("builtins.range", MANY)), "is not among the operations"),
    "count": (graph(function("itertools.count", 0)), "is not among the operations"),
    "a huge integer": (graph(function("operator.add", REF, 2**63)), "does not fit 64 bits"),
    "sizes by values": (graph(function("torch.where", REF)), "takes a condition and two values"),
    "a size by a value": (
        graph(method("sum", REF), function("torch.ones", A)),
        "takes numbers, such as x.shape",
    ),
    "two masks": (
        graph(
            method("new_ones", REF, [4, 4, 4]),
            function("operator.gt", REF, 0),
            function("operator.getitem", A, {"tuple": [B, B]}),
        ),
        "takes a mask alone",
    ),
    "nonzero": (graph(method("nonzero", REF)), "is not among the operations"),
    # Structure
    "a loop": (
        graph(function("torch.exp", {"ref": "a"})),
        "refers to 'a', which is no earlier node",
    ),
    "a loop of two": (
        graph(function("torch.exp", B), function("torch.exp", A)),
        "refers to 'b', which is no earlier",
    ),
    "a reference to nothing": (
        graph(function("torch.exp", {"ref": "nowhere"})),
        "refers to 'nowhere'",
    ),
    "a reference to a number": (
        graph(function("torch.exp", {"ref": 0})),
        "which is no earlier node",
    ),
    "a name twice": (
        graph(function("torch.exp", REF), {**function("torch.exp", REF), "name": "a"}),
        "name of its own",
    ),
    "the name of an input": (
        graph({**function("torch.exp", REF), "name": "logprobs"}),
        "name of its own",
    ),
    "a name with dots": (
        graph({**function("torch.exp", REF), "name": "a.b"}),
        "of letters, digits",
    ),
    "an empty name": (graph({**function("torch.exp", REF), "name": ""}), "of letters, digits"),
    "deep nesting": (graph(function("torch.stack", nested(50))), "nested more than 8 deep"),
    "deeply tagged": (
        graph(function("torch.stack", {"tuple": [{"tuple": [nested(7)]}]})),
        "nested more than 8 deep",
    ),
    "a long list": (graph(function("torch.stack", [0] * 5000)), "longer than 1024 values"),
    "many lists": (
        graph(*(function("torch.stack", [0] * 1000) for _ in range(17))),
        "more than 16384 values",
    ),
    "a long text": (graph(function("torch.mean", "x" * 10**6)), "longer than 256 characters"),
    "many nodes": (
        graph(*({**function("torch.exp", REF), "name": f"n{number}"} for number in range(5000))),
        "at most 1024",
    ),
    "an object of two keys": (
        graph(function("torch.exp", {"ref": "logprobs", "tuple": []})),
        "an object of one key",
    ),
    "an empty object": (graph(function("torch.exp", {})), "an object of one key"),
    "a dict": (
        graph(function("torch.exp", {"dict": {"input": REF}})),
        "argument of unknown kind 'dict'",
    ),
    "half a slice": (
        graph(function("operator.getitem", REF, {"slice": [1]})),
        "a slice has three parts",
    ),
    "a slice of tensors": (
        graph(function("operator.getitem", REF, {"slice": [REF, None, None]})),
        "cannot index with",
    ),
    "an index that is a text": (
        graph(function("operator.getitem", REF, "mean")),
        "cannot index with a str",
    ),
    "an index that is a dtype": (
        graph(function("operator.getitem", REF, {"dtype": "bool"})),
        "index with a dtype",
    ),
    "an item of a number": (
        graph(SHAPE, LENGTH, function("operator.getitem", B, 0)),
        "indexes tensors and tuples",
    ),
    "a method without tensor": (graph(method("exp")), "must be called on an earlier node"),
    "a method of a number": (graph(method("exp", 3)), "must be called on an earlier node"),
    "a method of a shape": (
        graph(SHAPE, method("exp", A)),
        "is a method of tensors, not of a Size",
    ),
    "another float": (
        graph(function("operator.add", REF, {"float": "1e400"})),
        "uses float '1e400'",
    ),
    "a strange dtype": (graph(method("to", REF, {"dtype": "qint8"})), "uses dtype 'qint8'"),
    "a complex dtype": (graph(method("to", REF, {"dtype": "complex64"})), "uses dtype 'complex64'"),
    "a dtype with dots": (
        graph(method("to", REF, {"dtype": "os.system"})),
        "uses dtype 'os.system'",
    ),
    "a strange device": (graph(method("to", REF, {"device": "meta"})), "unknown device 'meta'"),
    "a device in a text": (
        graph(method("to", REF, "privateuseone:0")),
        "unknown device 'privateuseone:0'",
    ),
    "a sparse layout": (
        graph(function("torch.zeros_like", REF, layout={"layout": "sparse_coo"})),
        "uses layout",
    ),
    "an unknown keyword": (
        graph(function("torch.exp", REF, callback="x")),
        "takes no keyword 'callback'",
    ),
    "a keyword of another function": (
        graph(function("torch.exp", REF, dim=0)),
        r"node 'a' \(torch.exp\): exp\(\)",
    ),
    "too many arguments": (
        graph(function("torch.exp", REF, REF)),
        r"node 'a' \(torch.exp\): exp\(\) takes",
    ),
    "a hidden keyword": (
        graph(function("torch.exp", REF, __class__="x")),
        "takes no keyword '__class__'",
    ),
    "gradients asked for": (
        graph(function("torch.zeros_like", REF, requires_grad=True)),
        "requires_grad only as",
    ),
    # Inputs and outputs
    "no placeholders": (request([output(REF, {"dict": {}})]), "needs its inputs and an output"),
    "another first input": (
        request([PLACEHOLDER, output(REF, {"dict": {}})], [{"name": "x", "rank": 1}]),
        "the first input must be logprobs",
    ),
    "log-probabilities of rank 0": (
        request([PLACEHOLDER, output(REF, {"dict": {}})], [{"name": "logprobs", "rank": 0}]),
        "with rank 1 or 2",
    ),
    "an input twice": (
        request(
            [PLACEHOLDER] * 2 + [output(REF, {"dict": {}})], [{"name": "logprobs", "rank": 1}] * 2
        ),
        "each with a name of its own",
    ),
    "17 inputs": (
        request(
            [PLACEHOLDER],
            [{"name": "logprobs", "rank": 1}, *({"name": f"x{n}", "rank": 1} for n in range(16))],
        ),
        "must have 1 to 16 inputs",
    ),
    "a hidden input": (
        request(
            [PLACEHOLDER] * 3, [{"name": "logprobs", "rank": 1}, {"name": "__Class__", "rank": 1}]
        ),
        "needs a lowercase name",
    ),
    "a placeholder for nothing": (
        graph({**PLACEHOLDER, "name": "x", "target": "x"}),
        "a placeholder cannot",
    ),
    "a placeholder with a default": (
        request([{**PLACEHOLDER, "args": [1]}, output(REF, {"dict": {}})]),
        "must be the placeholder of input",
    ),
    "no output": (
        request([PLACEHOLDER, {**method("sum", REF), "name": "a"}]),
        "the last node must be the output",
    ),
    "two outputs": (
        request([PLACEHOLDER, output(REF, {"dict": {}}), output(REF, {"dict": {}})]),
        "a output cannot stand here",
    ),
    "only a loss": (
        request([PLACEHOLDER, {**output(0, 0), "args": [REF]}]),
        "must be a loss and a dict of metrics",
    ),
    "a constant loss": (
        request([PLACEHOLDER, output(1.0, {"dict": {}})]),
        "the loss must refer to a node",
    ),
    "a constant metric": (
        request([PLACEHOLDER, output(REF, {"dict": {"custom/a:sum": 1}})]),
        "custom/a:sum must refer to a node",
    ),
    "a metric of another name": (
        request([PLACEHOLDER, output(REF, {"dict": {"loss:sum": REF}})]),
        "metric 'loss:sum'",
    ),
    "many metrics": (
        request([PLACEHOLDER, output(REF, {"dict": {f"custom/{n}:sum": REF for n in range(65)}})]),
        "at most 64 metrics",
    ),
    "metrics of a node": (
        request([PLACEHOLDER, output(REF, REF)]),
        "must be a loss and a dict of metrics",
    ),
    "an output of nothing": (
        request([PLACEHOLDER, output({"ref": "__builtins__"}, {"dict": {}})]),
        "the loss refers to '__builtins__'",
    ),
}


class RealResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest result that was really computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self.largest = max(self.largest, each.numel())
        return result


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealResults]:
    """Keep calls away from the system, and record the operations."""

    def reached(*args: Any) -> None:
        raise AssertionError("a graph reached the system")

    for name in ("system", "popen", "remove", "open"):
        monkeypatch.setattr(os, name, reached)
    with RealResults() as results:
        yield results


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_graph_is_refused_quickly_without_computing(
    case: str, watched: RealResults
) -> None:
    hostile, message = HOSTILE[case]
    started = time.perf_counter()
    with pytest.raises(EngineError, match=message) as caught:
        compile_graph(hostile)
    assert time.perf_counter() - started < 15
    assert watched.largest == 0
    assert caught.value.category == "user"
    assert "custom loss 'bad'" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_numbers_that_are_not_json_are_refused_too() -> None:
    for value in (math.nan, math.inf):
        bad = graph(function("operator.add", REF, 1.0))
        bad.graph.nodes[1].args[1] = value
        with pytest.raises(EngineError, match="NaN and infinity must be written"):
            compile_graph(bad)


LATE: dict[str, tuple[CreateCustomLossRequest, Any, str]] = {
    "ones by length": (
        graph(
            SHAPE, LENGTH, function("operator.mul", B, 10**5), function("torch.ones", {"ref": "c"})
        ),
        torch.zeros(1000),
        "makes 100000000 numbers",
    ),
    "a matrix of a long datum": (
        graph(function("torch.outer", REF, REF), method("sum", A)),
        torch.zeros(5000),
        "makes 25000000 numbers",
    ),
    "an index too large": (
        graph(method("long", REF), function("operator.getitem", REF, A)),
        torch.full((4,), 4.0),
        r"node 'b' \(operator.getitem\): has an index outside -4 to 3",
    ),
    "an index too small": (
        graph(
            method("long", REF),
            function("operator.getitem", REF, {"tuple": [{"ellipsis": True}, A]}),
        ),
        torch.full((4, 2), -3.0),
        "index outside -2 to 1",
    ),
    "a list index": (
        graph(function("operator.getitem", REF, {"tuple": [None, [7]]})),
        torch.zeros(4),
        "index outside -4 to 3",
    ),
    "gather": (
        graph(method("long", REF), method("gather", REF, 0, A)),
        torch.full((4,), 4.0),
        "index outside 0 to 3",
    ),
    "a negative gather": (
        graph(method("long", REF), function("torch.gather", REF, dim=0, index=A)),
        torch.full((4,), -1.0),
        "index outside 0 to 3",
    ),
    "index_select": (
        graph(method("long", REF), method("index_select", REF, 0, A)),
        torch.full((4,), 9.0),
        "index outside 0 to 3",
    ),
    "scatter_add": (
        graph(method("long", REF), method("scatter_add", REF, 0, A, REF)),
        torch.full((4,), 9.0),
        "index outside 0 to 3",
    ),
    "one_hot": (
        graph(method("long", REF), function("torch._C._nn.one_hot", A, num_classes=3)),
        torch.full((4,), 3.0),
        "index outside 0 to 2",
    ),
    "an index of floats": (
        graph(function("operator.getitem", REF, REF)),
        torch.zeros(4),
        "takes an index of integers",
    ),
    "an index of bytes": (
        graph(method("to", REF, {"dtype": "uint8"}), function("operator.getitem", REF, A)),
        torch.zeros(4),
        "takes an index of integers, got uint8",
    ),
    "a size of a value": (
        graph(method("sum", REF), method("long", A), method("repeat", REF, B)),
        torch.ones(4),
        r"node 'c' \(repeat\)",
    ),
    "sizes beyond 64 bits": (
        graph(function("torch.zeros", [10**12, 10**12])),
        torch.ones(4),
        r"node 'a' \(torch.zeros\)",
    ),
    "negative sizes": (
        graph(method("new_zeros", REF, -5), method("sum", A)),
        torch.ones(4),
        r"node 'a' \(new_zeros\)",
    ),
    "a masked copy": (
        graph(
            function("torch.ones", [3000, 1]),
            function("operator.lt", REF, 0),
            function("torch.masked_select", REF, mask=B),
            method("repeat", {"ref": "c"}, 10**7),
        ),
        -torch.ones(4),
        "makes 40000000 numbers",
    ),
    "the least integer by -1": (
        graph(method("long", REF), function("torch.div", A, A, rounding_mode="floor")),
        torch.full((9,), -1.0),
        "cannot divide whole numbers by -1",
    ),
    "the least integer by -1, as an operator": (
        graph(method("long", REF), method("sum", A), function("operator.floordiv", A, B)),
        torch.tensor([-2.0, 1.0]),
        "cannot divide whole numbers by -1",
    ),
    "division by nothing": (
        graph(SHAPE, LENGTH, function("operator.truediv", 1, B)),
        torch.zeros(0),
        "division by zero",
    ),
    "another length": (
        graph(method("view", REF, -1, 2)),
        torch.zeros(5),
        r"node 'a' \(view\): shape",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_data_dependent_faults_are_refused_before_computing(
    case: str, watched: RealResults
) -> None:
    late, data, message = LATE[case]
    ranks = [{"name": "logprobs", "rank": data.ndim}]
    late = request([json.loads(to_json(node)) for node in late.graph.nodes], ranks)
    compiled = compile_graph(late)
    with pytest.raises(EngineError, match=message):
        compiled(data.clone(), {})
    assert watched.largest <= max(data.numel(), 3000)


def test_graph_that_fits_other_lengths_is_accepted() -> None:
    far = graph(function("operator.getitem", REF, 50))
    loss, _ = compile_graph(far)(torch.arange(60.0), {})
    assert loss.item() == 50 * sum(range(60))


def test_dead_steps_are_not_run(watched: RealResults) -> None:
    steps = [
        {**function("torch.ones", 1 << 20), "name": "dead"},
        {**method("sum", REF), "name": "a"},
    ]
    compiled = compile_graph(request([PLACEHOLDER, *steps, output(A, {"dict": {}})]))
    assert compiled(torch.ones(4), {})[0].item() == 4
    assert watched.largest <= 4


def test_limits_can_be_set() -> None:
    body = graph(function("torch.ones", 100))
    compile_graph(body)
    with pytest.raises(EngineError, match="makes 100 numbers; at most 99"):
        compile_graph(body, GraphLimits(elements=99))
    with pytest.raises(EngineError, match="all nodes together"):
        compile_graph(body, GraphLimits(total_elements=99, total_growth=1))
    with pytest.raises(EngineError, match=r"has 5 nodes.*at most 4"):
        compile_graph(body, GraphLimits(nodes=4))
    with pytest.raises(EngineError, match="takes too long"):
        compile_graph(body, GraphLimits(seconds=-1, seconds_growth=0))


def test_large_inputs_may_have_results_of_their_size() -> None:
    compiled = compile_graph(
        graph(function("torch.exp", REF), method("sum", A)), GraphLimits(elements=10, growth=2)
    )
    compiled(torch.zeros(1000), {})
    grown = compile_graph(
        graph(method("repeat", REF, 3), method("sum", A)), GraphLimits(elements=24, growth=2)
    )
    with pytest.raises(EngineError, match="makes 3000 numbers; at most 2000"):
        grown(torch.zeros(1000), {})


def test_tensors_stay_on_the_device_of_the_loss() -> None:
    moved = graph(
        method("to", REF, {"device": "cuda:3"}),
        method("to", A, "cuda"),
        method("cuda", B),
        method("cpu", {"ref": "c"}),
        function("torch.zeros", 2, device="cuda:1"),
        function("torch.ones", 2, device={"device": "mps"}),
        function("operator.add", {"ref": "e"}, {"ref": "f"}),
        method("sum", {"ref": "g"}),
    )
    assert compile_graph(moved)(torch.ones(3), {})[0].item() == 6


def test_inputs_are_checked_before_anything_is_computed() -> None:
    compiled = rebuilt("discounted")
    good = {"rewards": torch.ones(4), "gamma": torch.tensor(0.9)}
    with pytest.raises(EngineError, match="input 'gamma' is missing"):
        compiled(torch.zeros(4), {"rewards": torch.ones(4)})
    with pytest.raises(EngineError, match=r"input 'gamma' must have rank 0, not shape \[1\]"):
        compiled(torch.zeros(4), {**good, "gamma": torch.ones(1)})
    with pytest.raises(EngineError, match=r"input 'logprobs' must have rank 1, not shape \[4, 2\]"):
        compiled(torch.zeros(4, 2), good)
    with pytest.raises(EngineError, match="node 'mul' "):
        compiled(torch.zeros(5), good)
    compiled(
        torch.zeros(4), {**good, "logprobs": torch.full((4,), math.nan), "unused": torch.ones(2)}
    )


@pytest.mark.parametrize(
    ("steps", "loss", "message"),
    [
        (
            [function("torch.exp", REF)],
            A,
            r"the loss must be a tensor of a single number, it is shape \[3\]",
        ),
        ([SHAPE, LENGTH], B, "the loss must be a tensor of a single number, it is a int"),
        ([method("argmax", REF)], A, "the loss must be a float, it is int64"),
        ([method("detach", REF), method("sum", A)], B, "does not depend on the log-probabilities"),
    ],
)
def test_loss_is_one_number_that_depends_on_the_log_probabilities(
    steps: Any, loss: Any, message: str
) -> None:
    named = [{**step, "name": name} for step, name in zip(steps, "ab", strict=False)]
    compiled = compile_graph(request([PLACEHOLDER, *named, output(loss, {"dict": {}})]))
    with pytest.raises(EngineError, match=message):
        compiled(torch.ones(3, requires_grad=True), {})


def test_inputs_of_a_loss_are_never_changed() -> None:
    for name, example in EXAMPLES.items():
        inputs = values(example, 6, 1)
        before = {key: value.clone() for key, value in inputs.items()}
        others = {key: value for key, value in inputs.items() if key != "logprobs"}
        rebuilt(name)(inputs["logprobs"], others)
        for key, value in before.items():
            assert torch.equal(inputs[key], value), (name, key)


def test_no_name_of_the_tables_has_an_effect_or_leaves_torch() -> None:
    for name in (*METHODS, *(target.rpartition(".")[2] for target in FUNCTIONS)):
        assert not name.startswith("_"), name
        assert name in ("and_", "or_") or not name.endswith("_"), name
        assert name not in {
            "item",
            "tolist",
            "numpy",
            "apply",
            "map",
            "backward",
            "register_hook",
            "data_ptr",
        }, name
        assert not name.startswith(("rand", "set", "load", "save", "empty", "storage")), name


def attempts() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of many kinds, one of which suits any operation."""
    x, wide, square = torch.rand(6) + 0.1, torch.rand(4, 1) + 0.1, torch.rand(3, 3)
    index, mask = torch.tensor([0, 2, 2, 1]), torch.tensor([True, False] * 3)
    for first in (x, wide, square, index, mask, x.double()):
        for rest in (
            (),
            (0,),
            (2,),
            (1, 0),
            (0, 1),
            (0, 0, 2),
            (0.3,),
            (0.1, 0.9),
            (0, (2, -1)),
            ((0,), (1,)),
            (-1,),
        ):
            yield (first, *rest), {}
        for second in (x, wide, square, index, mask):
            yield (first, second), {}
            yield (first, second, second), {}
            yield (first, second, 0.5), {}
            yield (first, 0, second), {}
            yield (first, 0, index, second), {}
        yield ((first, first),), {}
        yield (first, (3, 6)), {}
        yield (first, (0,)), {}
        yield (first, (-1,)), {}
        yield (first, 3), {}
        yield (first, (3,), 0.5), {}
        yield (first, index, 0), {}
        yield (first, torch.rand(3)), {}
        yield (first, 2.0, 0, False, torch.rand(6)), {}
        yield (first, 1.0, True), {}
        yield (first,), {"threshold": 0.5, "value": 0.0}
        yield (first,), {"dim": 0}
        yield (first, 2, 0.5), {}
        yield (first, "shape"), {}
        yield ("i->i", first), {}
    yield (3,), {}
    yield (3, 2), {}
    yield ((3,), 0.5), {}
    yield (0.0, 1.0, 5), {}


@pytest.mark.parametrize("table", [FUNCTIONS, METHODS], ids=["functions", "methods"])
@pytest.mark.filterwarnings("ignore:.*")
def test_every_operation_works_stays_within_its_bound_and_changes_nothing(
    table: dict[str, Operation],
) -> None:
    """The result of a step is new or a view."""
    unused = []
    for name, operation in table.items():
        worked = 0
        for args, kwargs in attempts():
            if table is METHODS and not isinstance(args[0], torch.Tensor):
                continue
            tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
            versions = [tensor._version for tensor in tensors]
            result = None
            with contextlib.suppress(Exception):
                operation.check(args, kwargs, GraphLimits())
                result = operation.function(*args, **kwargs)
            assert [tensor._version for tensor in tensors] == versions, name
            if result is None:
                continue
            worked += 1
            bound = None if operation.bound is None else operation.bound(args, kwargs)
            parts = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
            if bound is not None and name != "getattr" and name not in ("cpu", "cuda"):
                assert all(part.numel() <= bound for part in parts), (name, args)
            for part in parts:
                assert part.dtype in (*DTYPES.values(),), name
        if not worked:
            unused.append(name)
    assert unused == []
