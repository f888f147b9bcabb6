"""Gated mlps, and the Protocol by which adapters are added to linear layers.

Axes: T packed tokens, D hidden, N outputs of a linear layer, F mlp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tinkex.engine.model.elementwise import gated
from tinkex.engine.torch.lora import Linear


class Adaptation(Protocol):
    """The adapters of a pass: one, several beside each other, or none."""

    def linear(self, x_TD: Tensor, linear: Linear, rows_T: Tensor | None = None) -> Tensor:
        """Return a linear layer's results with the adapters' shares added.

        `rows_T`, ascending, names the tokens of the pass in x; None for all of them.
        """
        ...

    def gated(self, x_TD: Tensor, linear: Linear, activation: str) -> Tensor | None:
        """Return activation(gate) * up of a gated projection; None to use `linear` instead."""
        return None


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated mlp."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x_TD: Tensor, lora: Adaptation, rows_T: Tensor | None = None) -> Tensor:
        """Return what is added to the states; `rows_T` as for `Adaptation.linear`."""
        gated_TF = lora.gated(x_TD, self.gate_up, self.activation) if rows_T is None else None
        if gated_TF is None:
            gated_TF = gated(lora.linear(x_TD, self.gate_up, rows_T), self.activation)
        return lora.linear(gated_TF, self.down, rows_T)

    def linears(self) -> Iterator[Linear]:
        """Yield the two stacked projections up, and the one down."""
        yield from (self.gate_up, self.down)
