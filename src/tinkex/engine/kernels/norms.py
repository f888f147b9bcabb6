"""Kernels of norms, in Triton.

A program takes one token. Everything is computed in float32 and rounded once.
`model/elementwise.py` has the same formulas for machines without Triton.

Axes: T packed tokens, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _wide(ptr, at, inside):
    """A row in float32; zeros beyond its end."""
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_forward(
    x,
    rest,
    share,
    weight,
    summed,
    left,
    out,
    D,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    kind = out.dtype.element_ty
    wide = _wide(x + row * D, at, inside)
    if ADD:
        if HAS_REST:
            wide += _wide(rest + row * D, at, inside)
        wide += _wide(share + row * D, at, inside)
        rounded = wide.to(kind)
        tl.store(summed + row * D + at, rounded, mask=inside)
        if HAS_LEFT:
            tl.store(left + row * D + at, (wide - rounded.to(tl.float32)).to(kind), mask=inside)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    w = _wide(weight, at, inside)
    tl.store(out + row * D + at, (wide * scale * w).to(kind), mask=inside)


@triton.jit
def _norm_backward(dsummed, dy, x, weight, out, D, eps, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    wide = _wide(x + row * D, at, inside)
    g = _wide(dy + row * D, at, inside)
    g *= _wide(weight, at, inside)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    pull = scale * scale * tl.sum(g * wide, axis=0) / D
    dx = scale * (g - wide * pull)
    if ADD:
        dx += _wide(dsummed + row * D, at, inside)
    tl.store(out + row * D + at, dx.to(out.dtype.element_ty), mask=inside)


def norm_forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the RMS norm."""
    out = torch.empty_like(x_TD)
    _norm_forward[(x_TD.shape[0],)](
        *(x_TD, x_TD, x_TD, weight_D, x_TD, x_TD, out, x_TD.shape[1], eps),
        **_row(x_TD),
        ADD=False,
        HAS_REST=False,
        HAS_LEFT=False,
    )
    return out


def add_norm_forward(
    x_TD: Tensor,
    rest_TD: Tensor | None,
    share_TD: Tensor,
    weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a sum, the part that rounding cut off, if it is rounded, and the norm of both."""
    summed, out = torch.empty_like(x_TD), torch.empty_like(x_TD)
    left = None if x_TD.dtype == torch.float32 else torch.empty_like(x_TD)
    _norm_forward[(x_TD.shape[0],)](
        *(x_TD, x_TD if rest_TD is None else rest_TD, share_TD.contiguous(), weight_D),
        *(summed, summed if left is None else left, out, x_TD.shape[1], eps),
        **_row(x_TD),
        ADD=True,
        HAS_REST=rest_TD is not None,
        HAS_LEFT=left is not None,
    )
    return summed, left, out


def norm_backward(
    dsummed_TD: Tensor | None,
    dy_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
) -> Tensor:
    """Return the gradient by the norm's input, plus the gradient of the sum, if there was one."""
    out = torch.empty_like(x_TD)
    added = x_TD if dsummed_TD is None else dsummed_TD.contiguous()
    _norm_backward[(x_TD.shape[0],)](
        added,
        dy_TD.contiguous(),
        x_TD,
        weight_D,
        out,
        x_TD.shape[1],
        eps,
        **_row(x_TD),
        ADD=dsummed_TD is not None,
    )
    return out


def _row(x_TD: Tensor) -> dict[str, object]:
    block = triton.next_power_of_2(x_TD.shape[1])
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}
