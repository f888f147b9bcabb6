"""Several adapters beside each other in one pass.

The product with the frozen weight is one for all tokens; each adapter adds its share to its own
span of them, and its gradients go to its own buffer. Where the product of a row does not depend on
the number of rows (on a CPU: from twelve rows on, or for a multiple of four), an adapter's results
do not depend on its neighbours, to the bit.

Axes: T packed tokens, D inputs, N outputs, R rank (times the projections that share an input, for
stacked A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.model.matmul import (
    MOST_FUSED,
    add_product,
    base_product,
    lowered,
    product,
    weighed,
    write_product,
)
from tinkex.engine.torch.lora import Factors, Linear

ROWS = 4
"""The tokens of a span are padded to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one adapter, its factors, and the buffer for their gradients."""

    start: int
    stop: int
    factors: Mapping[str, Factors]
    into: Mapping[str, Factors] | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one adapter in one linear layer."""

    start: int
    stop: int
    factors: Factors
    into: Factors | None


class SpanAdapters:
    """The adapters of a pass, span after span."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = spans
        self.anchor: Tensor | None = None
        """An empty tensor by which autograd records layers whose input needs no gradient."""
        if any(span.into is not None for span in spans):
            self.anchor = torch.zeros(0, device=device, requires_grad=True)

    def linear(self, x_TD: Tensor, linear: Linear, rows_T: Tensor | None = None) -> Tensor:
        """Return a linear layer's results with each adapter's share on its own tokens."""
        shares = self.shares(linear) if rows_T is None else self._shares_of(linear, rows_T)
        if self.anchor is None:
            return forward(x_TD, linear, shares)[0]
        y_TN: Tensor = _MixedLinear.apply(  # type: ignore[no-untyped-call]
            x_TD, self.anchor, linear, shares
        )
        return y_TN

    def gated(self, x_TD: Tensor, linear: Linear, activation: str) -> Tensor | None:
        """Return a gated projection whose shares are added within its gate.

        None if there is no kernel for that.
        """
        shares = self.shares(linear)
        whole = sum(share.stop - share.start for share in shares) == x_TD.shape[0]
        if (
            self.anchor is None
            or not whole
            or any(x.factors.b_NR[0].shape[1] > MOST_FUSED for x in shares)
        ):
            return None
        if x_TD.dtype != torch.bfloat16 or kernels_for(x_TD) is None:
            return None
        out_TF: Tensor = _MixedGate.apply(  # type: ignore[no-untyped-call]
            x_TD, self.anchor, linear, shares, activation
        )
        return out_TF

    def shares(self, linear: Linear, start: int = 0, stop: int | None = None) -> list[Share]:
        """Return the shares in a linear layer, of tokens from `start` to `stop`."""
        bounds = [
            (max(span.start, start) - start, min(span.stop, stop or span.stop) - start)
            for span in self.spans
        ]
        return self._shares_within(linear, bounds)

    def _shares_of(self, linear: Linear, rows_T: Tensor) -> list[Share]:
        bounds = torch.tensor(
            [(span.start, span.stop) for span in self.spans], device=rows_T.device
        )
        return self._shares_within(linear, torch.searchsorted(rows_T, bounds).tolist())

    def _shares_within(self, linear: Linear, bounds: Sequence[Sequence[int]]) -> list[Share]:
        """Return the shares of spans that have these bounds among the tokens."""
        name = linear.name
        return [
            Share(start, stop, span.factors[name], None if span.into is None else span.into[name])
            for span, (start, stop) in zip(self.spans, bounds, strict=True)
            if start < stop and name in span.factors
        ]


def forward(x_TD: Tensor, linear: Linear, shares: Sequence[Share]) -> tuple[Tensor, list[Tensor]]:
    """Return the product with every share added, and each share's x A^T."""
    lows = [lowered(x_TD[share.start : share.stop], share.factors.a_RD) for share in shares]
    onto = _go_first(shares, x_TD) and linear.bias_N is None and not linear.wide
    y_TN = (
        x_TD.new_empty(x_TD.shape[0], linear.weight_ND.shape[0])
        if onto
        else base_product(x_TD, linear)
    )
    add = write_product if onto else add_product
    for share, low_TR in zip(shares, lows, strict=True):
        here, factors = slice(share.start, share.stop), share.factors
        for y, low, b in zip(
            _parts(y_TN[here], linear), _each(low_TR, linear), factors.b_NR, strict=True
        ):
            add(y, low, b.t(), factors.scale)
    return y_TN.addmm_(x_TD, linear.weight_ND.t()) if onto else y_TN, lows


def _go_first(shares: Sequence[Share], x_TD: Tensor) -> bool:
    """Return True if shares are written first, and the base product is added to them.

    On an accelerator the product reads them while it is made, which is quicker than to go over it
    again, and the sum is rounded once. Every token has to have a share. Autograd could not follow:
    `_MixedLinear` has the gradient by hand.
    """
    if not x_TD.is_cuda or torch.is_grad_enabled():
        return False
    return 0 < x_TD.shape[0] == sum(share.stop - share.start for share in shares)


def backward(
    dy_TN: Tensor,
    x_TD: Tensor,
    lows: Sequence[Tensor],
    linear: Linear,
    shares: Sequence[Share],
    *,
    wants_input: bool,
) -> Tensor | None:
    """Add the gradients of each share's A and B to its buffer.

    The result is the gradient of x, if it is wanted.
    """
    onto = wants_input and _go_first(shares, x_TD)
    dx_TD = None
    if wants_input:
        dx_TD = torch.empty_like(x_TD) if onto else weighed(dy_TN, linear.weight_ND.t())
    add = write_product if onto else add_product
    for share, low_TR in zip(shares, lows, strict=True):
        here, factors = slice(share.start, share.stop), share.factors
        dy, dlows = dy_TN[here], []
        into_b = [None] * len(factors.b_NR) if share.into is None else share.into.b_NR
        for part, low, b, db in zip(
            _parts(dy, linear), _each(low_TR, linear), factors.b_NR, into_b, strict=True
        ):
            if db is not None:
                db.add_(product(part.t(), low), alpha=factors.scale)
            dlows.append(lowered(part, b.t()))
        dlow_TR = (dlows[0] if len(dlows) == 1 else torch.cat(dlows, dim=1)).mul_(factors.scale)
        if share.into is not None:
            share.into.a_RD.add_(product(dlow_TR.t(), x_TD[here]))
        if dx_TD is not None:
            add(dx_TD[here], dlow_TR, factors.a_RD, 1.0)
    return dx_TD.addmm_(dy_TN, linear.weight_ND) if onto and dx_TD is not None else dx_TD


def _parts(y_TN: Tensor, linear: Linear) -> Sequence[Tensor]:
    return [y_TN] if len(linear.sizes) == 1 else torch.split(y_TN, linear.sizes, dim=1)


def _each(low_TR: Tensor, linear: Linear) -> Sequence[Tensor]:
    return low_TR.chunk(len(linear.sizes), dim=1)


class _MixedLinear(torch.autograd.Function):
    """A linear layer with its gradient by hand.

    W gets none, A and B add theirs to buffers, x gets one if it needs it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, linear: Linear, shares: Sequence[Share]
    ) -> Tensor:
        y_TN, lows = forward(x, linear, shares)
        ctx.save_for_backward(x, *lows)
        ctx.linear, ctx.shares = linear, shares
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TD, *lows = ctx.saved_tensors
        dy_TN = grads[0].to(x_TD.dtype)
        dx = backward(
            dy_TN, x_TD, lows, ctx.linear, ctx.shares, wants_input=ctx.needs_input_grad[0]
        )
        return dx, None, None, None


class _MixedGate(torch.autograd.Function):
    """A gated projection of several adapters' tokens.

    The results of the base weights are kept, and the sum is made again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        linear: Linear,
        shares: Sequence[Share],
        activation: str,
    ) -> Tensor:
        y_TN = F.linear(x, linear.weight_ND, linear.bias_N)
        lows = [F.linear(x[share.start : share.stop], share.factors.a_RD) for share in shares]
        out_TF = y_TN.new_empty(y_TN.shape[0], y_TN.shape[1] // 2)
        for share, low_TR in zip(shares, lows, strict=True):
            here = slice(share.start, share.stop)
            _fuse_gate(y_TN[here], low_TR, share, activation, out_TF[here])
        ctx.save_for_backward(x, y_TN, *lows)
        ctx.linear, ctx.shares, ctx.activation = linear, shares, activation
        return out_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TD, y_TN, *lows = ctx.saved_tensors
        dy_TN, grad_TF = torch.empty_like(y_TN), grads[0].contiguous()
        for share, low_TR in zip(ctx.shares, lows, strict=True):
            here = slice(share.start, share.stop)
            _fuse_gate(y_TN[here], low_TR, share, ctx.activation, dy_TN[here], grad_TF[here])
        dx = backward(
            dy_TN, x_TD, lows, ctx.linear, ctx.shares, wants_input=ctx.needs_input_grad[0]
        )
        return dx, None, None, None, None


def _fuse_gate(
    y_TN: Tensor,
    low_TR: Tensor,
    share: Share,
    activation: str,
    out: Tensor,
    grad_TF: Tensor | None = None,
) -> None:
    gate_FR, up_FR = share.factors.b_NR
    kernels_for(y_TN).shared_gate(
        y_TN, low_TR, (gate_FR, up_FR), share.factors.scale, activation, out, grad_TF
    )
