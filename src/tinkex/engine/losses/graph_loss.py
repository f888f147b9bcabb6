"""A loss that was sent as a graph, bounded in size and time before it is computed.

The values that flow from step to step are tensors, numbers, dtypes, devices, and tuples of these.
Arguments are checked and the size of every result is bounded before the step is run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.types.custom_losses import CustomLossNode

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
META = torch.device("meta")
WITH_GRADIENT = 3
"""The factor by which its gradient multiplies the work of a step."""
WORDS = re.compile(r"mean|sum|none|floor|constant|fro|linear|lower|higher|nearest|midpoint|tanh")


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most that a graph may cost.

    Attributes:
        nodes: Most steps.
        values: Most values in its arguments, at any depth.
        depth: Deepest nesting of an argument.
        text: Longest text.
        metrics: Most metrics.
        pieces: Most tensors that one step may make, and most values in one list of an argument.
        elements: Most numbers in one step's result ...
        growth: ... or so many times those in the loss's inputs, if that is more.
        total_elements: Most numbers in the results of all steps of one datum ...
        total_growth: ... or so many times those in the loss's inputs, if that is more.
        work: Most multiplications in one matrix product.
        pass_work: Most multiplications for all data of a pass, with their gradients; a number that
            is read or made counts as `number_work` of them ...
        pass_growth: ... or so many times the numbers in the pass's inputs, if that is more. One
            datum may use half of the former, or so many times its own.
        number_work: How many multiplications a number counts as.
        seconds: Longest computation of the loss for all data of a pass; it is stopped between two
            steps ...
        seconds_growth: ... or so many seconds for each number in the pass's inputs, if that is
            more.
    """

    nodes: int = 1024
    values: int = 1 << 14
    depth: int = 8
    text: int = 256
    metrics: int = 64
    pieces: int = 1024
    elements: int = 1 << 24
    growth: int = 4
    total_elements: int = 1 << 26
    total_growth: int = 64
    work: int = 1 << 33
    pass_work: int = 1 << 36
    pass_growth: int = 1 << 22
    number_work: int = 32
    seconds: float = 10.0
    seconds_growth: float = 1e-3


class Refusal(Exception):
    """The reason for which a step is refused; the name of the step is added later."""


def _no_check(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Operation:
    """An entry of the tables.

    Attributes:
        function: What is called.
        check: Refuses arguments before the call; gives the multiplications of a matrix product.
        texts: What its texts may be.
        makes: Whether it makes a tensor from none, and must be told the device.
        bound: Most numbers in a tensor of the result. None, or a bound of None, leaves that to the
            meta device: it knows every operation, but takes longer than most of them.
    """

    function: Callable[..., Any]
    check: Callable[[Arguments, Keywords, GraphLimits], int | None] = _no_check
    texts: re.Pattern[str] = WORDS
    makes: bool = False
    bound: Callable[[Arguments, Keywords], int | None] | None = None


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in an argument, containers taken apart."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument with its leaves changed."""
    if isinstance(value, list):
        return [replace(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(replace(item, change) for item in value)
    if isinstance(value, dict):
        return {key: replace(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(replace(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def _tensors(args: Arguments, kwargs: Keywords) -> list[Tensor]:
    return [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def broadcast_bound(args: Arguments, kwargs: Keywords) -> int:
    """Return the size of the shape that the tensors make together."""
    sizes: list[int] = []
    for tensor in _tensors(args, kwargs):
        shape = tensor.shape
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        for place in range(1, len(shape) + 1):
            sizes[-place] = (
                max(sizes[-place], shape[-place]) if sizes[-place] != 1 else shape[-place]
            )
    return math.prod(sizes)


def sum_bound(args: Arguments, kwargs: Keywords) -> int:
    """Return the size of the tensors, for parts, other orders and other dtypes of them."""
    return sum(tensor.numel() for tensor in _tensors(args, kwargs))


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of an earlier node."""

    name: str


class Here:
    """The device of the computation, which replaces every device that a graph names."""


HERE = Here()


@dataclass(frozen=True, slots=True)
class Step:
    """A node with its operation and its arguments, in which references are still open."""

    name: str
    target: str
    operation: Operation
    args: Arguments
    kwargs: Keywords


def at_node(loss: str, node: CustomLossNode | Step) -> str:
    """Return the beginning of an error about a node."""
    return f"custom loss {loss!r}: node {node.name[:64]!r} ({node.target[:64]}): "


def count_numbers(value: Any) -> int:
    """Return the number of elements of all tensors in a value."""
    return sum(leaf.numel() for leaf in leaves(value) if isinstance(leaf, Tensor))


@dataclass(slots=True)
class Allowance:
    """The work and time that the loss of a pass has left, gradients included."""

    work: float
    seconds: float

    @classmethod
    def of(cls, limits: GraphLimits, given: int) -> Allowance:
        """Return the allowance for data whose inputs hold `given` numbers."""
        return cls(
            work=max(limits.pass_work, limits.pass_growth * given),
            seconds=max(limits.seconds, limits.seconds_growth * given),
        )

    def spend_time(self, since: float) -> None:
        """Charge the time since then, that of a gradient too."""
        self.seconds -= time.monotonic() - since
        if self.seconds < 0:
            raise EngineError(
                "the custom loss and its gradient take too long for one pass; send less data in a "
                "pass"
            )


@dataclass(slots=True)
class Budget:
    """The numbers, work and time that the computation of one datum has left."""

    node: int
    total: int
    work: float
    deadline: float
    allowance: Allowance

    @classmethod
    def of(cls, limits: GraphLimits, given: int, allowance: Allowance) -> Budget:
        """Return the budget for inputs that hold `given` numbers."""
        return cls(
            node=max(limits.elements, limits.growth * given),
            total=max(limits.total_elements, limits.total_growth * given),
            work=max(limits.pass_work / 2, limits.pass_growth * given),
            deadline=time.monotonic() + allowance.seconds,
            allowance=allowance,
        )

    def check(self, bound: int) -> None:
        """Refuse a result that may hold `bound` numbers, before it is computed."""
        if bound > self.node:
            raise Refusal(f"makes {bound} numbers; at most {self.node} are allowed for this datum")
        if bound > self.total:
            raise Refusal("the results of all nodes together hold too many numbers for this datum")
        if time.monotonic() > self.deadline:
            raise Refusal("the loss takes too long")

    def charge(self, work: int) -> None:
        """Charge work before it is done."""
        if work > self.work:
            raise Refusal("the loss and its gradient need more work than is allowed for this datum")
        if work > self.allowance.work:
            raise Refusal(
                "the data of this pass together need more work than is allowed; send less data in "
                "a pass"
            )
        self.work -= work
        self.allowance.work -= work

    def spend(self, value: Any) -> None:
        """Charge a result."""
        self.total -= count_numbers(value)


@dataclass(frozen=True, slots=True)
class CompiledLoss:
    """A loss rebuilt from its graph. Calling it computes the loss of one datum.

    Attributes:
        name: The name that its author gave it.
        input_ranks: The rank of each input, `logprobs` first.
        metrics: The names of its metrics; the ending says how to combine those of several data.
    """

    name: str
    input_ranks: Mapping[str, int]
    metrics: tuple[str, ...]
    _placeholders: Mapping[str, str]
    _steps: tuple[Step, ...]
    _output: tuple[str, Mapping[str, str]]
    _limits: GraphLimits

    def __call__(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        allowance: Allowance | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a datum, differentiable by `logprobs`, and its metrics.

        Args:
            logprobs: The log-probabilities of the datum's targets, `[T]` or `[T, K]`.
            inputs: The other inputs by name; inputs that the loss does not take are ignored.
            allowance: The allowance of the pass; that of a pass of this datum alone by default.

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

    def _single(self, value: Any, what: str) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim != 0:
            found = (
                f"shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise EngineError(
                f"custom loss {self.name!r}: {what} must be a tensor of a single number, it is "
                f"{found}"
            )
        return value

    def allowance(self, given: int) -> Allowance:
        """Return the budget of a pass over inputs of `given` numbers."""
        return Allowance.of(self._limits, given)

    def work(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """Estimate the work of a datum from its shapes; None if its values decide."""
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
        """Run the steps, and add their results to the values; return the work spent."""
        given = sum(value.numel() for value in values.values())
        budget = Budget.of(self._limits, given, allowance or Allowance.of(self._limits, given))
        whole = budget.work
        for step in self._steps:
            try:
                values[step.name] = self._result(step, values, device, budget)
            except Refusal as refusal:
                raise EngineError(at_node(self.name, step) + str(refusal)) from None
            except (
                Exception
            ) as error:  # torch raises a dozen kinds of errors for arguments that do not fit
                text = str(error).partition("\n")[0][:300] or type(error).__name__
                raise EngineError(at_node(self.name, step) + text) from error
        return whole - budget.work

    def _result(
        self, step: Step, values: Mapping[str, Any], device: torch.device, budget: Budget
    ) -> Any:
        def settle(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
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
            bound = count_numbers(sized)
        budget.check(bound)
        budget.charge(
            WITH_GRADIENT
            * (product + self._limits.number_work * (count_numbers((args, kwargs)) + bound))
        )
        value = _admitted(operation.function(*args, **kwargs))
        budget.spend(value)
        return value

    def rehearse(self) -> None:
        """Run on tensors without values, to refuse at once what no data can make right."""
        shapes: list[tuple[int, ...]] = [(), (8,), (8, 4)]
        values: dict[str, Any] = {
            node: torch.empty(shapes[self.input_ranks[name]], device=META)
            for node, name in self._placeholders.items()
        }
        try:
            self._run(values, META)
        except EngineError as error:
            # A refusal, and arguments that a function does not have, hold for any data. Other
            # errors may be due to the length, the dtypes or the missing values of the rehearsal.
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise


def _valueless(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to(META)
    return META if isinstance(leaf, torch.device) else leaf


def _admitted(value: Any) -> Any:
    """Return a result; refuse it if later steps may not use it."""
    for leaf in leaves(value):
        if isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63:
            raise Refusal("makes an integer that is too large")
        if not isinstance(leaf, Tensor | int | float | torch.dtype | torch.device):
            raise Refusal(f"gives a {type(leaf).__name__}, which cannot be used")
    return value
