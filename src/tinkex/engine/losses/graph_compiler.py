"""The way from a graph that anyone may send to a loss that is safe to run.

Names are looked up in the tables of `graph_operations` and nowhere else: no attribute is followed,
nothing is imported or evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tinkex.engine.api import EngineError
from tinkex.engine.losses.graph_loss import (
    HERE,
    Arguments,
    CompiledLoss,
    GraphLimits,
    Keywords,
    Operation,
    Ref,
    Refusal,
    Step,
    at_node,
    leaves,
)
from tinkex.engine.losses.graph_operations import (
    DTYPES,
    FLOATS,
    FUNCTIONS,
    INERT,
    KEYWORDS,
    LAYOUTS,
    MEMORY_FORMATS,
    METHODS,
)
from tinkex.types.custom_losses import CustomLossNode
from tinkex.types.sessions import CreateCustomLossRequest

MAX_INPUTS = 16
INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
DEVICE_NAME = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]{1,3})?")
TABLES: dict[str, Mapping[str, Any]] = {
    "float": FLOATS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "memory_format": MEMORY_FORMATS,
}


@dataclass(slots=True)
class Reader:
    """Reads arguments; knows the nodes so far and counts the values of the whole graph."""

    limits: GraphLimits
    known: set[str] = field(default_factory=set)
    count: int = 0

    def read(self, value: Any, depth: int = 0) -> Any:
        """Read an argument of the wire: a plain value, a list, or an object of one key."""
        self.count += 1
        if self.count > self.limits.values:
            raise Refusal(f"the arguments of the graph hold more than {self.limits.values} values")
        if depth > self.limits.depth:
            raise Refusal(f"an argument is nested more than {self.limits.depth} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return self._items(value, depth)
        if isinstance(value, dict) and len(value) == 1:
            kind, content = next(iter(value.items()))
            return self._tagged(str(kind), content, depth)
        raise Refusal("an argument is neither a plain value, a list, nor an object of one key")

    def _number(self, value: float) -> float:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise Refusal("an integer does not fit 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refusal('NaN and infinity must be written as {"float": "nan"}')
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.limits.text:
            raise Refusal(f"a text is missing, or longer than {self.limits.text} characters")
        return value

    def _items(self, value: Any, depth: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > self.limits.pieces:
            raise Refusal(f"a list is missing, or longer than {self.limits.pieces} values")
        return [self.read(item, depth + 1) for item in value]

    def _tagged(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "ref":
            if not isinstance(content, str) or content not in self.known:
                raise Refusal(f"refers to {str(content)[:64]!r}, which is no earlier node")
            return Ref(content)
        if kind == "tuple":
            return tuple(self._items(content, depth))
        if kind == "slice":
            parts = self._items(content, depth)
            if len(parts) != 3:
                raise Refusal("a slice has three parts")
            return slice(*parts)
        if kind == "ellipsis" and content is True:
            return Ellipsis
        if kind == "device":
            if DEVICE_NAME.fullmatch(self._text(content)) is None:
                raise Refusal(f"names an unknown device {content[:64]!r}")
            return HERE
        if kind in TABLES:
            text = self._text(content)
            if text not in TABLES[kind]:
                raise Refusal(f"uses {kind} {text[:64]!r}; allowed are {', '.join(TABLES[kind])}")
            return TABLES[kind][text]
        raise Refusal(f"holds an argument of unknown kind {kind[:64]!r}")


def compile_graph(
    request: CreateCustomLossRequest,
    limits: GraphLimits = GraphLimits(),  # noqa: B008
) -> CompiledLoss:
    """Rebuild a loss from its graph, out of operations of the tables alone.

    Raises:
        EngineError: The graph cannot be rebuilt or would cost too much; the message names the node.
    """
    loss = request.name[:64]
    ranks = _input_ranks(loss, request)
    nodes = request.graph.nodes
    if not len(ranks) < len(nodes) <= limits.nodes:
        raise EngineError(
            f"custom loss {loss!r} has {len(nodes)} nodes; it needs its inputs and an output, at "
            f"most {limits.nodes}"
        )
    reader = Reader(limits)
    placeholders = {}
    for node, name in zip(nodes, ranks, strict=False):
        _check_name(loss, node, reader)
        if node.op != "placeholder" or node.target != name or node.args or node.kwargs:
            raise EngineError(at_node(loss, node) + f"must be the placeholder of input {name!r}")
        placeholders[node.name] = name
        reader.known.add(node.name)
    steps = []
    for node in nodes[len(ranks) : -1]:
        _check_name(loss, node, reader)
        try:
            steps.append(_step(node, reader))
        except Refusal as refusal:
            raise EngineError(at_node(loss, node) + str(refusal)) from None
        reader.known.add(node.name)
    output = _output(loss, nodes[-1], reader)
    used = _used(steps, {output[0], *output[1].values()})
    compiled = CompiledLoss(loss, ranks, tuple(output[1]), placeholders, used, output, limits)
    compiled.rehearse()
    return compiled


def _input_ranks(loss: str, request: CreateCustomLossRequest) -> dict[str, int]:
    ranks: dict[str, int] = {each.name: each.rank for each in request.inputs}
    if len(ranks) != len(request.inputs) or not 1 <= len(ranks) <= MAX_INPUTS:
        raise EngineError(
            f"custom loss {loss!r} must have 1 to {MAX_INPUTS} inputs, each with a name of its own"
        )
    if next(iter(ranks)) != "logprobs" or ranks["logprobs"] == 0:
        raise EngineError(
            f"custom loss {loss!r}: the first input must be logprobs, with rank 1 or 2"
        )
    for name, rank in ranks.items():
        if INPUT_NAME.fullmatch(name) is None or rank not in (0, 1, 2):
            raise EngineError(
                f"custom loss {loss!r}: input {name[:64]!r} needs a lowercase name and a rank of 0 "
                "to 2"
            )
    return ranks


def _check_name(loss: str, node: CustomLossNode, reader: Reader) -> None:
    if NODE_NAME.fullmatch(node.name) is None or node.name in reader.known:
        raise EngineError(
            at_node(loss, node) + "must have a name of its own, of letters, digits and underscores"
        )


def _step(node: CustomLossNode, reader: Reader) -> Step:
    """Look a node up in the tables, and read its arguments."""
    tables: dict[str, Mapping[str, Operation]] = {
        "call_function": FUNCTIONS,
        "call_method": METHODS,
    }
    if node.op not in tables:
        raise Refusal(
            f"a {node.op[:64]} cannot stand here; allowed are call_function and call_method"
        )
    operation = tables[node.op].get(node.target)
    if operation is None:
        raise Refusal("is not among the operations that a loss may use")
    args = tuple(reader.read(node.args))
    kwargs = dict(_keywords(node.kwargs, reader))
    if node.op == "call_method":
        if not args or not isinstance(args[0], Ref):
            raise Refusal("must be called on an earlier node")
        operation = _on_tensor(operation)
    if node.target == "to" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], reader.read({"device": args[1]}), *args[2:])
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, str) and operation.texts.fullmatch(leaf) is None:
            raise Refusal(f"uses the text {leaf[:64]!r}, which is not allowed there")
    return Step(node.name, node.target, operation, args, kwargs)


def _keywords(kwargs: Mapping[str, Any], reader: Reader) -> Iterator[tuple[str, Any]]:
    for name, value in kwargs.items():
        if name in INERT:
            if not any(
                value is inert or (type(value) is int and value == inert) for inert in INERT[name]
            ):
                raise Refusal(f"takes {name} only as {INERT[name][0]}")
        elif name not in KEYWORDS:
            raise Refusal(f"takes no keyword {name[:64]!r}")
        elif name == "device" and isinstance(value, str):
            yield name, reader.read({"device": value})
        else:
            yield name, reader.read(value)


def _on_tensor(operation: Operation) -> Operation:
    """Return a method that is called on nothing but tensors."""

    def check(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int | None:
        if not isinstance(args[0], torch.Tensor):
            raise Refusal(f"is a method of tensors, not of a {type(args[0]).__name__}")
        return operation.check(args, kwargs, limits)

    return Operation(operation.function, check, operation.texts, operation.makes, operation.bound)


def _output(loss: str, node: CustomLossNode, reader: Reader) -> tuple[str, dict[str, str]]:
    """Return the names of the nodes that are the loss and the metrics."""
    where = at_node(loss, node)
    if node.op != "output" or node.kwargs or len(node.args) != 1:
        raise EngineError(where + "the last node must be the output, with one argument")
    pair = node.args[0]
    if isinstance(pair, dict) and list(pair) == ["tuple"]:
        pair = pair["tuple"]
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not isinstance(pair[1], dict)
        or list(pair[1]) != ["dict"]
    ):
        raise EngineError(where + "must be a loss and a dict of metrics")
    metrics = pair[1]["dict"]
    if not isinstance(metrics, dict) or len(metrics) > reader.limits.metrics:
        raise EngineError(where + f"must hold a dict of at most {reader.limits.metrics} metrics")
    for name in metrics:
        if METRIC_NAME.fullmatch(name) is None:
            raise EngineError(
                where + f"metric {name[:64]!r} must be named custom/NAME:sum or custom/NAME:mean"
            )
    names = {name: _result_name(where, name, value, reader) for name, value in metrics.items()}
    return _result_name(where, "the loss", pair[0], reader), names


def _result_name(where: str, what: str, value: Any, reader: Reader) -> str:
    try:
        found = reader.read(value)
    except Refusal as refusal:
        raise EngineError(f"{where}{what} {refusal}") from None
    if not isinstance(found, Ref):
        raise EngineError(f"{where}{what} must refer to a node")
    return found.name


def _used(steps: Iterable[Step], wanted: set[str]) -> tuple[Step, ...]:
    """Return the steps that the output depends on, in their order."""
    kept = []
    for step in reversed(list(steps)):
        if step.name in wanted:
            kept.append(step)
            wanted.update(
                leaf.name for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, Ref)
            )
    return tuple(kept[::-1])
