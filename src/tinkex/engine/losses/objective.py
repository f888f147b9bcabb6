"""The interface between a loss and a pass, for every kind of loss.

Axes: M targets of a piece, L values of a loss: one per target, or one per datum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tinkex.engine.losses.examples import Examples, Room
from tinkex.engine.torch.device_copies import to_host
from tinkex.types.inputs import Datum


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The values of a loss on a piece, their gradient, and metrics of each datum."""

    losses_L: Tensor
    grad_M: Tensor | None
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_host(self) -> Evaluated:
        """Return a copy that is complete once the device has come so far."""
        grad_M = None if self.grad_M is None else to_host(self.grad_M)
        return Evaluated(to_host(self.losses_L.detach()), grad_M, self.metrics)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some data of a pass, and the log-probabilities that their loss reads."""

    logprobs_M: Tensor
    examples: Examples
    indices: Sequence[int]
    backward: bool
    """True if the gradient is needed."""


class Objective(Protocol):
    """A kind of loss with its settings, as a pass minimises it."""

    @property
    def elementwise(self) -> bool:
        """True if its values are reported beside the log-probabilities."""
        return False

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""
        ...

    def sizes(self, examples: Examples) -> Sequence[int]:
        """Return the number of values of each datum: one for each target."""
        return [targets.size for targets in examples.targets]

    def evaluate(self, piece: Piece) -> Evaluated:
        """Return the loss of a piece, and its gradient if that is needed."""
        ...
