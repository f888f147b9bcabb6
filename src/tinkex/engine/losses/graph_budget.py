"""The work, memory and time that the loss of a pass may still use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.api import EngineError
from tinkex.engine.losses.graph_checks import GraphLimits, Refusal, leaves


def count_numbers(value: Any) -> int:
    """Return the number of elements of all tensors in a value."""
    return sum(leaf.numel() for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


@dataclass(slots=True)
class Allowance:
    """The work and time that the loss of a pass has left, gradients included."""

    work: float
    seconds: float

    @classmethod
    def of(cls, limits: GraphLimits, given: int) -> Allowance:
        """Return the allowance for data whose inputs hold so many numbers."""
        return cls(
            work=max(limits.pass_work, limits.pass_growth * given),
            seconds=max(limits.seconds, limits.seconds_growth * given),
        )

    def spend_time(self, since: float) -> None:
        """Charge the time since then, that of a gradient too."""
        self.seconds -= time.monotonic() - since
        if self.seconds < 0:
            raise EngineError(
                "the custom loss takes too long for one pass, with its gradient; send less data in "
                "one"
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
        """Return the budget for inputs that hold so many numbers."""
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
        """Charge work before it is done."""
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
        """Charge a result."""
        self.total -= count_numbers(value)
