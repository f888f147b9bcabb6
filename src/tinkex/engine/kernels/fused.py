"""The fused kernels of the model, as one module, and those of norms and of the softmax, in Triton.

A program takes one row. Everything is computed in float32 and rounded once. `model/elementwise.py`
has the same formulas for machines without Triton. Import it only where Triton is installed.

Axes: T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.kernels.gates import (
    add_product as add_product,
    gate_backward as gate_backward,
    gate_forward as gate_forward,
    shared_gate as shared_gate,
)
from tinkex.engine.kernels.heads import (
    heads_backward as heads_backward,
    heads_forward as heads_forward,
    store as store,
)


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
        *(added, dy_TD.contiguous(), x_TD, weight_D, out, x_TD.shape[1], eps),
        **_row(x_TD),
        ADD=dsummed_TD is not None,
    )
    return out


def _row(x_TD: Tensor) -> dict[str, object]:
    block = triton.next_power_of_2(x_TD.shape[1])
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


HEAD_BLOCK = 4096


@triton.jit
def _log_sums(logits, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, value)
        # a lane that has seen only -inf adds nothing, and -inf - -inf is not a number
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.exp(value - base)
        highest = higher
    top = tl.max(highest, axis=0)
    tl.store(out + row, top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0)))


@triton.jit
def _softmax_gradient(logits, sums, row_grad, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    value = tl.load(logits + row * V + at, mask=inside, other=0.0).to(tl.float32)
    grad = -tl.exp(value - tl.load(sums + row)) * tl.load(row_grad + row)
    tl.store(out + row * V + at, grad.to(out.dtype.element_ty), mask=inside)


def log_sums(logits_TV: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, in one pass over it."""
    out = torch.empty(logits_TV.shape[0], 1, dtype=torch.float32, device=logits_TV.device)
    _log_sums[(logits_TV.shape[0],)](
        logits_TV, out, logits_TV.shape[1], BLOCK=HEAD_BLOCK, num_warps=8
    )
    return out


def softmax_gradient(
    logits_TV: Tensor, sums_T1: Tensor, row_grad_T1: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the negative softmax times a number for each row."""
    rows, vocab = logits_TV.shape
    out = torch.empty(logits_TV.shape, dtype=dtype, device=logits_TV.device)
    grid = (rows, triton.cdiv(vocab, HEAD_BLOCK))
    _softmax_gradient[grid](
        logits_TV, sums_T1, row_grad_T1.float(), out, vocab, BLOCK=HEAD_BLOCK, num_warps=8
    )
    return out
