"""Gated mlps, mixtures of them, and the Protocol by which adapters are added to linear layers.

A router sends each token to a few of many experts, which are mlps. Tokens are sorted by expert, and
the experts that got some run one after another: each sees its tokens in the order of the pass.
Their results are weighed and added. Each expert has LoRA factors of its own; the router is frozen,
yet gradients pass through its weights.

Axes: T packed tokens, D hidden, N outputs of a linear layer, F mlp, E experts, K experts of a
token, S = T K pairs of token and expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.elementwise import gated
from tinkex.engine.model.matmul import lowered
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


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse counterpart of an mlp."""

    router_ED: Tensor
    """In float32 at least: a route that flips between training and sampling costs more than all
    other rounding.

    For the same reason what is added to the states of a mixture is not rounded to half
    precision."""
    each: Sequence[Mlp]
    chosen: int
    normed: bool

    def __call__(self, x_TD: Tensor, lora: Adaptation, cut_TD: Tensor | None = None) -> Tensor:
        """Return what is added to the states of tokens, in float32 at least.

        The router also reads the part that rounding has cut off them.
        """
        weights_TK, experts_TK = self.route(x_TD, cut_TD)
        order_S = experts_TK.flatten().argsort(stable=True)
        tokens_S = order_S // self.chosen
        counts = torch.bincount(experts_TK.flatten(), minlength=len(self.each)).tolist()
        outputs = []
        parts = zip(
            self.each,
            *(torch.split(part, counts) for part in (x_TD[tokens_S], tokens_S)),
            strict=True,
        )
        for expert, part_TD, rows_T in parts:
            if rows_T.shape[0]:
                outputs.append(expert(part_TD, lora, rows_T))
        # each pair goes back beside its token, so that sums have one order on every device
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
        y_TKD = torch.cat(outputs)[places_S].view(*weights_TK.shape, -1)
        return torch.einsum("tkd,tk->td", y_TKD.to(weights_TK.dtype), weights_TK)

    def route(self, x_TD: Tensor, cut_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, likeliest first, and their weights."""
        wide_TD = x_TD.to(self.router_ED.dtype)
        wide_TD = wide_TD if cut_TD is None else wide_TD + cut_TD
        multiply = F.linear if wide_TD.requires_grad else lowered
        probs_TE = multiply(wide_TD, self.router_ED).softmax(-1)
        weights_TK, experts_TK = probs_TE.topk(self.chosen, dim=-1)
        if self.normed:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, experts_TK

    def linears(self) -> Iterator[Linear]:
        """Yield projections, those of one kind side by side.

        So the factors of all experts can be read as one tensor.
        """
        for kind in zip(*(expert.linears() for expert in self.each), strict=True):
            yield from kind
