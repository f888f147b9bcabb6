"""Kernels of the softmax over the vocabulary, in Triton.

A program takes one row. Everything is computed in float32 and rounded once.

Axes: T packed tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
