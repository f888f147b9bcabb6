"""Log-probabilities of targets, and their gradient, without ever holding all logits.

Axes: T packed tokens of a step, M targets (one or several per token), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.model.attention import soft_cap_slope
from tinkex.engine.model.decoder import Decoder, cap_logits
from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.model.matmul import lowered
from tinkex.engine.torch.lora import Linear
from tinkex.engine.train.span_adapters import (
    ROWS,
    Span,
    SpanAdapters,
    backward as mixed_backward,
    forward as mixed_forward,
)
from tinkex.types.tensors import Array

LOGITS_BUDGET = 1 << 24
"""The most logits that are computed at once on a CPU."""

LEAST_ROWS = 64
"""The least tokens of a chunk: with fewer, reading the head's weights takes most of the time."""

KEPT_LOGITS = 1 << 28
"""The most logits that a step on a CPU keeps for backward."""

KEPT_SHARE = 0.2
"""The largest share of free memory that kept logits take on an accelerator."""

ROOMIER = 16
"""The factor by which an accelerator computes more logits at once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The targets whose log-probabilities are wanted."""

    rows_M: Tensor
    targets_M: Tensor
    chunks: Sequence[tuple[slice, slice]]
    """Slices of tokens whose logits are computed at once, with their slices of targets."""
    distinct: bool
    """True if no token has two targets."""


def target_logprobs(
    model: Decoder, hidden_TD: Tensor, wanted: Wanted, adapters: SpanAdapters, *, keep: bool
) -> Tensor:
    """Return log-probabilities of targets; `keep` allows to keep few logits for backward."""
    logprobs_M: Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, adapters.anchor, model.head, wanted, adapters, model.config.logit_cap, keep
    )
    return logprobs_M


def _may_keep(logits: int, like: Tensor) -> bool:
    """Return True if so many logits may be kept."""
    if not like.is_cuda:
        return logits <= KEPT_LOGITS
    unused = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    free: int = torch.cuda.mem_get_info(like.device)[0] + unused
    return logits * torch.float32.itemsize <= KEPT_SHARE * free


def chunks(
    head: Linear, rows: Array, spans: Sequence[Span], device: torch.device
) -> list[tuple[slice, slice]]:
    """Return slices of tokens whose logits fit the budget, with their slices of targets.

    A span that fits a chunk is never cut, and one that does not is cut by itself: its neighbours
    have no influence.
    """
    budget = LOGITS_BUDGET * (ROOMIER if device.type == "cuda" else 1)
    room = max(LEAST_ROWS, budget // head.weight_ND.shape[0]) // ROWS * ROWS
    stops: list[int] = []
    begun = end = 0
    for span in spans:
        if end > begun and span.stop - begun > room:
            stops.append(end)
            begun = end
        while span.stop - begun > room:
            begun += room
            stops.append(begun)
        end = span.stop
    bounds = [0, *stops, end]
    firsts = np.searchsorted(rows, bounds).tolist()
    return [
        (slice(start, stop), slice(first, last))
        for start, stop, first, last in zip(bounds, bounds[1:], firsts, firsts[1:], strict=False)
        if start < stop
    ]


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets.

    Backward needs the logits again: they are kept if there are few, else computed again by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        anchor: Tensor | None,
        head: Linear,
        wanted: Wanted,
        adapters: SpanAdapters,
        cap: float | None,
        keep: bool,
    ) -> Tensor:
        keep = (
            keep
            and anchor is not None
            and _may_keep(hidden_TD.shape[0] * head.weight_ND.shape[0], hidden_TD)
        )
        out, kept = [], []
        for rows, span in wanted.chunks:
            logits_TV, _ = mixed_forward(
                hidden_TD[rows], head, adapters.shares(head, rows.start, rows.stop)
            )
            scored = Scored.of(cap_logits(logits_TV, cap))
            out.append(scored.at(wanted.rows_M[span] - rows.start, wanted.targets_M[span]))
            if keep:
                kept.append(scored)
        ctx.save_for_backward(hidden_TD)
        ctx.head, ctx.wanted, ctx.adapters, ctx.cap, ctx.kept = head, wanted, adapters, cap, kept
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden_TD,), wanted = ctx.saved_tensors, ctx.wanted
        dhidden_TD = torch.empty_like(hidden_TD)
        for chunk, (rows, span) in enumerate(wanted.chunks):
            shares = ctx.adapters.shares(ctx.head, rows.start, rows.stop)
            x_TD = hidden_TD[rows]
            if ctx.kept:
                scored, ctx.kept[chunk] = ctx.kept[chunk], None
                lows = [
                    lowered(x_TD[share.start : share.stop], share.factors.a_RD) for share in shares
                ]
            else:
                logits_TV, lows = mixed_forward(x_TD, ctx.head, shares)
                scored = Scored.of(cap_logits(logits_TV, ctx.cap))
            slope_TV = None if ctx.cap is None else soft_cap_slope(scored.logits_TV, ctx.cap)
            here_M, targets_M = wanted.rows_M[span] - rows.start, wanted.targets_M[span]
            dtype = x_TD.dtype if slope_TV is None else slope_TV.dtype
            dlogits_TV = scored.gradient(
                here_M, targets_M, grads[0][span], dtype, distinct=wanted.distinct
            )
            if slope_TV is not None:
                dlogits_TV.mul_(slope_TV)
            dx_TD = mixed_backward(
                dlogits_TV.to(x_TD.dtype), x_TD, lows, ctx.head, shares, wants_input=True
            )
            assert dx_TD is not None
            dhidden_TD[rows] = dx_TD
        return dhidden_TD, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of some tokens, and the logarithms of the sums of their exponentials."""

    logits_TV: Tensor
    sums_T1: Tensor

    @classmethod
    def of(cls, logits_TV: Tensor) -> Scored:
        """Sum in float32 at least."""
        fused = kernels_for(logits_TV)
        return cls(logits_TV, _log_sum(logits_TV) if fused is None else fused.log_sums(logits_TV))

    def at(self, rows_M: Tensor, targets_M: Tensor) -> Tensor:
        """Return the log-probabilities of targets."""
        return self.logits_TV[rows_M, targets_M].to(self.sums_T1.dtype) - self.sums_T1[rows_M, 0]

    def gradient(
        self,
        rows_M: Tensor,
        targets_M: Tensor,
        grad_M: Tensor,
        dtype: torch.dtype,
        *,
        distinct: bool,
    ) -> Tensor:
        """Return the gradient of the logits, which may be overwritten.

        At a target it is the target's own, less softmax times the sum over the row. Where softmax
        is near one the two nearly cancel out: so they are subtracted before anything is rounded.
        """
        row_grad_T1 = torch.zeros(
            self.logits_TV.shape[0], 1, dtype=grad_M.dtype, device=grad_M.device
        )
        row_grad_T1.index_add_(0, rows_M, grad_M[:, None])
        if dtype == self.sums_T1.dtype:
            dlogits_TV = self.logits_TV.sub_(self.sums_T1).exp_().mul_(-row_grad_T1)
            return dlogits_TV.index_put_((rows_M, targets_M), grad_M, accumulate=True)
        if not distinct:  # targets of the same token and row become one
            places_M, back_M = torch.unique(
                rows_M * self.logits_TV.shape[1] + targets_M, return_inverse=True
            )
            summed_M = torch.zeros(places_M.shape[0], dtype=grad_M.dtype, device=grad_M.device)
            grad_M = summed_M.index_add_(0, back_M, grad_M)
            rows_M, targets_M = (
                places_M // self.logits_TV.shape[1],
                places_M % self.logits_TV.shape[1],
            )
        theirs_M = grad_M - self.at(rows_M, targets_M).exp() * row_grad_T1[rows_M, 0]
        dlogits_TV = self._softmax_gradient(row_grad_T1, dtype)
        return dlogits_TV.index_put_((rows_M, targets_M), theirs_M.to(dtype))

    def _softmax_gradient(self, row_grad_T1: Tensor, dtype: torch.dtype) -> Tensor:
        if (fused := kernels_for(self.logits_TV)) is not None:
            gradient: Tensor = fused.softmax_gradient(
                self.logits_TV, self.sums_T1, row_grad_T1, dtype
            )
            return gradient
        return (-torch.exp(self.logits_TV.float() - self.sums_T1) * row_grad_T1).to(dtype)


def _log_sum(logits_TV: Tensor) -> Tensor:
    return torch.logsumexp(
        logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), -1, keepdim=True
    )


def log_softmax(logits_TV: Tensor) -> Tensor:
    """Return log-softmax in float32 at least."""
    return torch.log_softmax(
        logits_TV, dim=-1, dtype=torch.promote_types(logits_TV.dtype, torch.float32)
    )
