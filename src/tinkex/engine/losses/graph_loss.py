"""Losses sent as graphs: rebuilt from tables of pure operations, bounded in size and time before
anything is computed.

A graph comes from anyone who may train. Its names are looked up in the tables of `operations.py`
and nowhere else: no attribute is followed, nothing is imported or evaluated. The values that flow
from step to step are tensors, numbers, dtypes, devices, and tuples of these. Arguments are checked
and the size of every result is bounded before the step is run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from tinkex.engine.api import EngineError
from tinkex.engine.losses.graph_operations import (
    DTYPES,
    FLOATS,
    FUNCTIONS,
    INERT,
    KEYWORDS,
    LAYOUTS,
    MEMORY_FORMATS,
    METHODS,
    Arguments,
    GraphLimits,
    Keywords,
    Operation,
    Refusal,
    leaves,
    replace,
)
from tinkex.types.custom_losses import CreateCustomLossRequest, CustomLossNode

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
META = torch.device("meta")
WITH_GRADIENT = 3
"""How many times the work of a step its gradient makes of it."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """The result of an earlier node."""

    name: str


class _Here:
    """The device of the computation, whatever device a graph names."""


HERE = _Here()


@dataclass(slots=True)
class _Reader:
    """Reads arguments; knows the nodes so far and counts the values of the whole graph."""

    limits: GraphLimits
    known: set[str] = field(default_factory=set)
    count: int = 0

    def read(self, value: Any, depth: int = 0) -> Any:
        """An argument as the wire has it: plain values, lists, and objects of one key."""
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
            return _Ref(content)
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


@dataclass(frozen=True, slots=True)
class _Step:
    """A node whose operation was found and whose arguments were read; references are still open."""

    name: str
    target: str
    operation: Operation
    args: Arguments
    kwargs: Keywords


@dataclass(slots=True)
class Allowance:
    """The work and time that the loss of a pass has left, gradients included."""

    work: float
    seconds: float

    @classmethod
    def of(cls, limits: GraphLimits, given: int) -> Allowance:
        """For data whose inputs hold so many numbers."""
        return cls(
            work=max(limits.pass_work, limits.pass_growth * given),
            seconds=max(limits.seconds, limits.seconds_growth * given),
        )

    def spend_time(self, since: float) -> None:
        """Take the time since then from it, that of a gradient too."""
        self.seconds -= time.monotonic() - since
        if self.seconds < 0:
            raise EngineError(
                "the custom loss takes too long for one pass, with its gradient; send less data in "
                "one"
            )


@dataclass(slots=True)
class _Budget:
    """What the computation of one datum may still use."""

    node: int
    total: int
    work: float
    deadline: float
    allowance: Allowance

    @classmethod
    def of(cls, limits: GraphLimits, given: int, allowance: Allowance) -> _Budget:
        """For inputs that hold so many numbers."""
        return cls(
            node=max(limits.elements, limits.growth * given),
            total=max(limits.total_elements, limits.total_growth * given),
            work=max(limits.pass_work / 2, limits.pass_growth * given),
            deadline=time.monotonic() + allowance.seconds,
            allowance=allowance,
        )

    def check(self, bound: int) -> None:
        """Refuse a result that may hold so many numbers, before it is computed."""
        if bound > self.node:
            raise Refusal(f"makes {bound} numbers; at most {self.node} are allowed for this datum")
        if bound > self.total:
            raise Refusal("the results of all nodes together hold too many numbers for this datum")
        if time.monotonic() > self.deadline:
            raise Refusal("the loss takes too long")

    def charge(self, work: int) -> None:
        """Take work from the budget before it is done."""
        if work > self.work:
            raise Refusal(
                "the loss needs more work than is allowed for this datum, with its gradient"
            )
        if work > self.allowance.work:
            raise Refusal(
                "the data of this pass together need more work than is allowed; send less data in "
                "one"
            )
        self.work -= work
        self.allowance.work -= work

    def spend(self, value: Any) -> None:
        """Take what was computed from the budget."""
        self.total -= _numbers(value)


def _numbers(value: Any) -> int:
    return sum(leaf.numel() for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True, slots=True)
class CompiledLoss:
    """A loss rebuilt from its graph. Calling it computes the loss of one datum.

    Attributes:
        name: As its author called it.
        input_ranks: The rank of each input, `logprobs` first.
        metrics: The names of its metrics; the ending says how those of several data are combined.
    """

    name: str
    input_ranks: Mapping[str, int]
    metrics: tuple[str, ...]
    _placeholders: Mapping[str, str]
    _steps: tuple[_Step, ...]
    _output: tuple[str, Mapping[str, str]]
    _limits: GraphLimits

    def __call__(
        self,
        logprobs: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        allowance: Allowance | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a datum and its metrics, each a single number; the loss is differentiable by
        `logprobs`.

        Args:
            logprobs: The log-probabilities of the datum's targets, `[T]` or `[T, K]`.
            inputs: The other inputs by name; those that the loss does not take are ignored.
            allowance: What the pass may still use; that of a pass of this datum alone by default.

        Raises:
            EngineError: An input is missing or has another rank, or a step failed or would cost too
                much.
        """
        given = {**inputs, "logprobs": logprobs}
        where = f"custom loss {self.name!r}"
        for name, rank in self.input_ranks.items():
            if name not in given:
                raise EngineError(f"{where}: input {name!r} is missing")
            if given[name].ndim != rank:
                raise EngineError(
                    f"{where}: input {name!r} must have rank {rank}, not shape "
                    f"{list(given[name].shape)}"
                )
        values = {
            node: given[name].to(logprobs.device) for node, name in self._placeholders.items()
        }
        self._run(values, logprobs.device, allowance)
        loss = self._single(values[self._output[0]], "the loss")
        if not loss.is_floating_point():
            raise EngineError(
                f"{where}: the loss must be a float, it is {str(loss.dtype).removeprefix('torch.')}"
            )
        if logprobs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
            raise EngineError(
                f"{where} does not depend on the log-probabilities: it has no gradient"
            )
        return loss, {
            name: self._single(values[node], name).detach()
            for name, node in self._output[1].items()
        }

    def _single(self, value: Any, what: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            found = (
                f"shape {list(value.shape)}"
                if isinstance(value, torch.Tensor)
                else f"a {type(value).__name__}"
            )
            raise EngineError(
                f"custom loss {self.name!r}: {what} must be a tensor of a single number, it is "
                f"{found}"
            )
        return value

    def allowance(self, given: int) -> Allowance:
        """Return the budget of a pass over inputs of so many numbers."""
        return Allowance.of(self._limits, given)

    def work(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """Estimate the work of a datum from the shapes of its inputs; None if its values decide."""
        allowance = Allowance(math.inf, self._limits.seconds)
        values: dict[str, Any] = {
            node: torch.empty(tuple(shapes[name]), device=META)
            for node, name in self._placeholders.items()
        }
        try:
            with torch.no_grad():
                spent = self._run(values, META, allowance)
        except EngineError:
            return None
        return int(spent)

    def _run(
        self, values: dict[str, Any], device: torch.device, allowance: Allowance | None = None
    ) -> float:
        """Run the steps, and add their results to the values; gives the work that it took."""
        given = sum(value.numel() for value in values.values())
        budget = _Budget.of(self._limits, given, allowance or Allowance.of(self._limits, given))
        whole = budget.work
        for step in self._steps:
            try:
                values[step.name] = self._result(step, values, device, budget)
            except Refusal as refusal:
                raise EngineError(_where(self.name, step) + str(refusal)) from None
            except (
                Exception
            ) as error:  # torch raises a dozen kinds of errors for arguments that do not fit
                text = str(error).partition("\n")[0][:300] or type(error).__name__
                raise EngineError(_where(self.name, step) + text) from error
        return whole - budget.work

    def _result(
        self, step: _Step, values: Mapping[str, Any], device: torch.device, budget: _Budget
    ) -> Any:
        def settle(leaf: Any) -> Any:
            if isinstance(leaf, _Ref):
                return values[leaf.name]
            return device if leaf is HERE else leaf

        operation = step.operation
        args, kwargs = replace(step.args, settle), replace(step.kwargs, settle)
        if (
            sum(1 for _ in islice(leaves((args, kwargs)), 2 * self._limits.pieces))
            == 2 * self._limits.pieces
        ):
            raise Refusal("has too many arguments")
        if operation.makes:
            kwargs["device"] = device
        product = operation.check(args, kwargs, self._limits) or 0
        bound = None if operation.bound is None else operation.bound(args, kwargs)
        if bound is None:
            with torch.no_grad():
                sized = operation.function(
                    *replace(args, _valueless), **replace(kwargs, _valueless)
                )
            bound = _numbers(sized)
        budget.check(bound)
        budget.charge(
            WITH_GRADIENT
            * (product + self._limits.number_work * (_numbers((args, kwargs)) + bound))
        )
        value = _admitted(operation.function(*args, **kwargs))
        budget.spend(value)
        return value

    def rehearse(self) -> None:
        """Run on tensors without values, to refuse at once what no data could make right."""
        shapes: list[tuple[int, ...]] = [(), (8,), (8, 4)]
        values: dict[str, Any] = {
            node: torch.empty(shapes[self.input_ranks[name]], device=META)
            for node, name in self._placeholders.items()
        }
        try:
            self._run(values, META)
        except EngineError as error:
            # A refusal, and arguments that a function does not have, hold for any data. What else
            # goes wrong may be due to the length, the dtypes or the missing values of the
            # rehearsal: the data will tell.
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise


def _valueless(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(META)
    return META if isinstance(leaf, torch.device) else leaf


def _admitted(value: Any) -> Any:
    """A result, if it is of a kind that may flow on."""
    for leaf in leaves(value):
        if isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63:
            raise Refusal("makes an integer that is too large")
        if not isinstance(leaf, torch.Tensor | int | float | torch.dtype | torch.device):
            raise Refusal(f"gives a {type(leaf).__name__}, which cannot be used")
    return value


def _where(loss: str, node: CustomLossNode | _Step) -> str:
    return f"custom loss {loss!r}: node {node.name[:64]!r} ({node.target[:64]}): "


def compile_graph(
    request: CreateCustomLossRequest,
    limits: GraphLimits = GraphLimits(),  # noqa: B008
) -> CompiledLoss:
    """Rebuild a loss from its graph; nothing but operations of the tables can come of it.

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
    reader = _Reader(limits)
    placeholders = {}
    for node, name in zip(nodes, ranks, strict=False):
        _check_name(loss, node, reader)
        if node.op != "placeholder" or node.target != name or node.args or node.kwargs:
            raise EngineError(_where(loss, node) + f"must be the placeholder of input {name!r}")
        placeholders[node.name] = name
        reader.known.add(node.name)
    steps = []
    for node in nodes[len(ranks) : -1]:
        _check_name(loss, node, reader)
        try:
            steps.append(_step(node, reader))
        except Refusal as refusal:
            raise EngineError(_where(loss, node) + str(refusal)) from None
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


def _check_name(loss: str, node: CustomLossNode, reader: _Reader) -> None:
    if NODE_NAME.fullmatch(node.name) is None or node.name in reader.known:
        raise EngineError(
            _where(loss, node) + "must have a name of its own, of letters, digits and underscores"
        )


def _step(node: CustomLossNode, reader: _Reader) -> _Step:
    """A node looked up in the tables, with its arguments read."""
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
        if not args or not isinstance(args[0], _Ref):
            raise Refusal("must be called on an earlier node")
        operation = _on_tensor(operation)
    if node.target == "to" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], reader.read({"device": args[1]}), *args[2:])
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, str) and operation.texts.fullmatch(leaf) is None:
            raise Refusal(f"uses the text {leaf[:64]!r}, which is not allowed there")
    return _Step(node.name, node.target, operation, args, kwargs)


def _keywords(kwargs: Mapping[str, Any], reader: _Reader) -> Iterator[tuple[str, Any]]:
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
    """A method: found on the class of tensors, it is called on nothing else."""

    def check(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int | None:
        if not isinstance(args[0], torch.Tensor):
            raise Refusal(f"is a method of tensors, not of a {type(args[0]).__name__}")
        return operation.check(args, kwargs, limits)

    return Operation(operation.function, check, operation.texts, operation.makes, operation.bound)


def _output(loss: str, node: CustomLossNode, reader: _Reader) -> tuple[str, dict[str, str]]:
    """The nodes that are the loss and the metrics."""
    where = _where(loss, node)
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


def _result_name(where: str, what: str, value: Any, reader: _Reader) -> str:
    try:
        found = reader.read(value)
    except Refusal as refusal:
        raise EngineError(f"{where}{what} {refusal}") from None
    if not isinstance(found, _Ref):
        raise EngineError(f"{where}{what} must refer to a node")
    return found.name


def _used(steps: Iterable[_Step], wanted: set[str]) -> tuple[_Step, ...]:
    """The steps that the output depends on, in their order; the others have no effect."""
    kept = []
    for step in reversed(list(steps)):
        if step.name in wanted:
            kept.append(step)
            wanted.update(
                leaf.name for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, _Ref)
            )
    return tuple(kept[::-1])
