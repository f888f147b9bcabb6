"""Messages of custom losses: graphs that a server runs, and the parts of a loss that a client computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tinkex.types.record import Int64, Record, check_depth

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Record, frozen=True, kw_only=True):
    """An input of a custom loss: a scalar (rank 0), one value a token (1), or one a candidate of each token (2)."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Record, frozen=True, kw_only=True):
    """One step of a traced loss. Arguments are JSON values, or objects of one key such as `{"ref": node}`."""

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_depth(self.args, "args")
        check_depth(self.kwargs, "kwargs")


class CustomLossGraph(Record, frozen=True, kw_only=True):
    """A traced loss as data: its steps in the order in which they run."""

    nodes: list[CustomLossNode]
    format: Literal[1] = 1


class CreateCustomLossRequest(Record, frozen=True, kw_only=True):
    """Store a loss on the server; its first input is `logprobs`."""

    session_id: str
    custom_loss_seq_id: Int64
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Record, frozen=True, kw_only=True):
    """The id under which passes of the same session may use a loss."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegularizerSpec:
    """A term to add to a loss.

    Attributes:
        fn: Takes the data and their log-probabilities; returns the term's value and metrics.
        weight: What the value is multiplied by; at least 0.
        name: Under which the term is reported.
        is_async: Whether `fn` is a coroutine function.
    """

    fn: Callable[[Any, Any], Any]
    weight: float
    name: str
    is_async: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError("fn must be callable")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not self.weight >= 0:
            raise ValueError(f"weight must be a number >= 0, got {self.weight!r}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError("name must be a text that is not empty")


class RegularizerOutput(Record, frozen=True, kw_only=True):
    """What one term added to a loss, and how long its gradient is when that was asked for."""

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


class BaseLoss(Record, frozen=True, kw_only=True):
    """The loss before any terms were added."""

    value: float
    grad_norm: float | None = None
    custom: dict[str, Any] = msgspec.field(default_factory=dict)


class CustomLossOutput(Record, frozen=True, kw_only=True):
    """A loss and the terms it is made of."""

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
        """
        added = sum(output.contribution for output in outputs)
        return cls(
            loss_total=base + added,
            base_loss=BaseLoss(value=base, grad_norm=base_grad_norm, custom=dict(metrics or {})),
            regularizers={output.name: output for output in outputs},
            regularizer_total=added,
            total_grad_norm=total_grad_norm,
        )
