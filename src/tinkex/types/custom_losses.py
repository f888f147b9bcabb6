"""Messages of custom losses: graphs for the server, and parts computed by the client."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tinkex.types.record import Record, check_depth

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
"""Dimensions of an input: 0 a scalar, 1 a value per token, 2 a value per candidate of a token."""
CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]
"""The kinds of steps in a graph, as torch.fx has them."""


class CustomLossInput(Record, frozen=True, kw_only=True):
    """Input of a custom loss: a scalar (rank 0), a value per token (1), or per candidate (2).

    Example:
        >>> CustomLossInput(name="advantages", rank=1).rank
        1
    """

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Record, frozen=True, kw_only=True):
    """One step of a traced loss.

    Arguments are JSON values, or objects of one key such as `{"ref": node}`.

    Example:
        >>> node = CustomLossNode(
        ...     op="call_method", name="total", target="sum", args=[{"ref": "logprobs"}]
        ... )
        >>> node.target, node.args
        ('sum', [{'ref': 'logprobs'}])
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_depth(self.args, "args")
        check_depth(self.kwargs, "kwargs")


class CustomLossGraph(Record, frozen=True, kw_only=True):
    """A traced loss as data: its steps in the order in which they run.

    Example:
        >>> graph = CustomLossGraph(
        ...     nodes=[CustomLossNode(op="placeholder", name="logprobs", target="logprobs")]
        ... )
        >>> [node.op for node in graph.nodes], graph.format
        (['placeholder'], 1)
    """

    nodes: list[CustomLossNode]
    format: Literal[1] = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RegularizerSpec:
    """A regularizer as a term of a loss.

    Attributes:
        fn: A callable that takes (data, logprobs) or (data, logprobs, opts), or an object with
            `compute`.
        weight: What its value is multiplied by; at least 0.
        name: What its numbers are called; may be left out when `fn` has a `name()`.
        async_: Whether it gives an awaitable or a future, to be waited for.
        opts: What is passed to a regularizer that takes options.

    Example:
        >>> RegularizerSpec(
        ...     lambda data, logprobs: (logprobs.abs().sum(), {}), weight=0.1, name="size"
        ... ).weight
        0.1
    """

    fn: Any
    weight: float
    name: str = ""
    async_: bool = False
    opts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "" and callable(getattr(self.fn, "name", None)):
            object.__setattr__(self, "name", self.fn.name())
        _check_form(self.fn)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):
            raise ValueError(f"the weight of a regularizer must be a number, got {self.weight!r}")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"the weight of a regularizer must be at least 0, got {self.weight!r}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a regularizer needs a name, got {self.name!r}")
        if not isinstance(self.async_, bool):
            raise ValueError(f"async_ must be true or false, got {self.async_!r}")
        if self.opts and not takes_opts(self.fn):
            raise ValueError(f"regularizer {self.name!r} takes no opts: they would have no effect")

    @classmethod
    def new(cls, fields: Mapping[str, Any] | None = None, /, **others: Any) -> Self:
        """Make a spec from a mapping, from keywords, or both; `async` is read as `async_`.

        Args:
            fields: The fields, as a mapping.
            others: Further fields.

        Returns:
            The spec.

        Raises:
            ValueError: Names what is missing, unknown or out of range.

        Example:
            >>> settings = {
            ...     "weight": 0.1,
            ...     "name": "size",
            ...     "async": False,
            ... }  # as a file of settings has them
            >>> spec = RegularizerSpec.new(
            ...     settings, fn=lambda data, logprobs: (logprobs.abs().sum(), {})
            ... )
            >>> spec.name, spec.async_
            ('size', False)
        """
        given = {
            "async_" if name == "async" else name: value
            for name, value in {**(fields or {}), **others}.items()
        }
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"a regularizer has no {min(unknown)!r}")
        for name in ("fn", "weight"):
            if name not in given:
                raise ValueError(f"a regularizer needs {name}")
        return cls(**given)


def _check_form(fn: Any) -> None:
    if callable(getattr(fn, "compute", None)):
        return
    if not callable(fn):
        raise ValueError(
            f"fn must be a callable or have compute(data, logprobs, opts), got {type(fn).__name__}"
        )
    if not (accepts(fn, 2) or accepts(fn, 3)):
        raise ValueError(
            f"fn must take (data, logprobs) or (data, logprobs, opts); {fn!r} takes something else"
        )


def accepts(fn: Callable[..., Any], count: int) -> bool:
    """Return True if a callable takes this many positional arguments, or if that is unknown.

    Example:
        >>> accepts(lambda data, logprobs: None, 2), accepts(lambda data, logprobs: None, 3)
        (True, False)
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_opts(fn: Any) -> bool:
    """Return True if options are passed to a callable.

    They are passed to objects, to callables of three arguments, and to those whose third is `opts`.

    Example:
        >>> takes_opts(lambda data, logprobs: None), takes_opts(lambda data, logprobs, opts: None)
        (False, True)
    """
    if callable(getattr(fn, "compute", None)) or not accepts(fn, 2):
        return True
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 2 and names[2] == "opts"


class RegularizerOutput(Record, frozen=True, kw_only=True):
    """Contribution of one term to a loss, with its gradient's norm if that was asked for.

    Example:
        >>> term = RegularizerOutput(name="l2", value=4.0, weight=0.5, contribution=2.0)
        >>> term.contribution, term.grad_norm is None
        (2.0, True)
    """

    name: str
    value: float
    weight: float
    contribution: float
    grad_norm: float | None = None
    grad_norm_weighted: float | None = None
    custom: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def from_computation(
        cls,
        name: str,
        value: float,
        weight: float,
        *,
        custom: Mapping[str, Any] | None = None,
        grad_norm: float | None = None,
    ) -> Self:
        """From a term's value and weight.

        Args:
            name: What the term is called.
            value: Its value, not weighted.
            weight: Its weight.
            custom: Its metrics.
            grad_norm: The norm of its gradient, where that was asked for.

        Returns:
            The output.

        Example:
            >>> RegularizerOutput.from_computation("l2", 4.0, 0.5, grad_norm=2.0).grad_norm_weighted
            1.0
        """
        return cls(
            name=name,
            value=value,
            weight=weight,
            contribution=weight * value,
            grad_norm=grad_norm,
            grad_norm_weighted=None if grad_norm is None else weight * grad_norm,
            custom=dict(custom or {}),
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; without the norms when there are none.

        Example:
            >>> RegularizerOutput.from_computation("l2", 4.0, 0.5).to_json()
            {'name': 'l2', 'value': 4.0, 'weight': 0.5, 'contribution': 2.0, 'custom': {}}
        """
        left_out = () if self.grad_norm is not None else ("grad_norm", "grad_norm_weighted")
        return self.model_dump(exclude=left_out)


class BaseLoss(Record, frozen=True, kw_only=True):
    """The loss before any terms were added.

    Example:
        >>> BaseLoss(value=1.5, custom={"tokens": 12}).value
        1.5
    """

    value: float
    grad_norm: float | None = None
    custom: dict[str, Any] = msgspec.field(default_factory=dict)


class CustomLossOutput(Record, frozen=True, kw_only=True):
    """A loss and the terms it is made of.

    Example:
        >>> output = CustomLossOutput.build(
        ...     1.0, outputs=[RegularizerOutput.from_computation("l2", 4.0, 0.5)]
        ... )
        >>> output.loss, output.regularizers["l2"].contribution
        (3.0, 2.0)
    """

    loss_total: float
    base_loss: BaseLoss | None = None
    regularizers: dict[str, RegularizerOutput] = msgspec.field(default_factory=dict)
    regularizer_total: float = 0.0
    total_grad_norm: float | None = None

    @classmethod
    def build(
        cls,
        base: float,
        metrics: Mapping[str, Any] | None = None,
        outputs: Sequence[RegularizerOutput] = (),
        *,
        base_grad_norm: float | None = None,
        total_grad_norm: float | None = None,
    ) -> Self:
        """Add the terms to a base loss.

        Args:
            base: The loss without terms.
            metrics: What the loss reported beside its value.
            outputs: The terms; their names are unique.
            base_grad_norm: The length of the base loss's gradient.
            total_grad_norm: The length of the whole gradient.

        Returns:
            The output.

        Example:
            >>> term = RegularizerOutput.from_computation("l2", 4.0, 0.5)
            >>> CustomLossOutput.build(1.0, {"tokens": 12}, [term]).loss_total
            3.0
        """
        added = sum(output.contribution for output in outputs)
        return cls(
            loss_total=base + added,
            base_loss=BaseLoss(value=base, grad_norm=base_grad_norm, custom=dict(metrics or {})),
            regularizers={output.name: output for output in outputs},
            regularizer_total=float(added),
            total_grad_norm=total_grad_norm,
        )

    @property
    def loss(self) -> float:
        """The loss that is minimised."""
        return self.loss_total

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: regularizers by name with all their numbers, also those that are null.

        Example:
            >>> CustomLossOutput.build(1.0).to_json()["base_loss"]
            {'value': 1.0, 'grad_norm': None, 'custom': {}}
        """
        terms = {
            name: output.model_dump(exclude={"name"}) for name, output in self.regularizers.items()
        }
        fields: dict[str, Any] = {
            "loss_total": self.loss_total,
            "regularizers": terms,
            "regularizer_total": self.regularizer_total,
        }
        if self.base_loss is not None:
            fields["base_loss"] = self.base_loss.model_dump()
        if self.total_grad_norm is not None:
            fields["total_grad_norm"] = self.total_grad_norm
        return fields

    def metrics(self) -> dict[str, float]:
        """The numbers in a flat form, as results of passes carry them; texts are left out.

        Example:
            >>> CustomLossOutput.build(
            ...     1.0, outputs=[RegularizerOutput.from_computation("l2", 4.0, 0.5)]
            ... ).metrics()
            {'base_loss': 1.0, 'regularizer_total': 2.0, 'l2/value': 4.0, 'l2/contribution': 2.0}
        """
        found: dict[str, Any] = dict(self.base_loss.custom) if self.base_loss is not None else {}
        if self.base_loss is not None:
            found |= {
                "base_loss": self.base_loss.value,
                "base_loss/grad_norm": self.base_loss.grad_norm,
            }
        found |= {
            "regularizer_total": self.regularizer_total,
            "total_grad_norm": self.total_grad_norm,
        }
        for name, output in self.regularizers.items():
            own = {
                "value": output.value,
                "contribution": output.contribution,
                "grad_norm": output.grad_norm,
            }
            found |= {f"{name}/{key}": value for key, value in {**output.custom, **own}.items()}
        numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
        return {key: float(value) for key, value in numbers.items()}
