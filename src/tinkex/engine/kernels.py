"""Kernels for accelerators, in Triton: what compilers make poorly of two halves of one tensor.

A program takes one token. Everything is computed in float32 and rounded once. Imported only where there is an
accelerator; `elementwise.py` has the same formulas for everywhere else, and the tests hold these against them.

Axes: T packed tokens, F mlp, H query heads, G key/value heads, C channels of a head, N = (H + 2 G) C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATE_BLOCK = 2048


@triton.jit
def _gate_forward(gate_up, out, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2 * inner)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row * F + at, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(dy, gate_up, out, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside).to(tl.float32)
    grad = tl.load(dy + row * F + at, mask=inside).to(tl.float32)
    if GELU:  # gate * sigmoid(2 inner) is the tanh form
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        share = tl.sigmoid(2 * inner)
        slope = share + gate * share * (1 - share) * 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
    else:
        share = tl.sigmoid(gate)
        slope = share * (1 + gate * (1 - share))
    tl.store(out + row * 2 * F + at, (grad * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * F + F + at, (grad * gate * share).to(out.dtype.element_ty), mask=inside)


def gate_forward(gate_up_TN: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up."""
    rows, width = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    out = gate_up_TN.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _gate_forward[grid](gate_up_TN, out, width, BLOCK=GATE_BLOCK, GELU=activation != "silu")
    return out


def gate_backward(dy_TF: torch.Tensor, gate_up_TN: torch.Tensor, activation: str) -> torch.Tensor:
    """Its gradient by the fused projection."""
    rows, width = dy_TF.shape
    out = torch.empty_like(gate_up_TN)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _gate_backward[grid](dy_TF.contiguous(), gate_up_TN, out, width, BLOCK=GATE_BLOCK, GELU=activation != "silu")
    return out


@triton.jit
def _turned(
    source,
    target,
    weight,
    cos,
    sin,
    eps,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and turn the heads of one token, from `source` to `target`, each a row of heads."""
    head = tl.arange(0, PADDED)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    at = head * 2 * HALF + channel
    inside = (head < HEADS) & (channel < HALF)
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        first *= scale * tl.load(weight + channel).to(tl.float32)
        second *= scale * tl.load(weight + channel + HALF).to(tl.float32)
    c = tl.load(cos + channel).to(tl.float32)
    s = tl.load(sin + channel).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + at, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + at + HALF, (second * c + first * s).to(kind), mask=inside)


@triton.jit
def _turned_gradient(
    grad,
    source,
    target,
    weight,
    cos,
    sin,
    eps,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Its gradient by `source`: turned back, then through the norm."""
    head = tl.arange(0, PADDED)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    at = head * 2 * HALF + channel
    inside = (head < HEADS) & (channel < HALF)
    c = tl.load(cos + channel).to(tl.float32)
    s = tl.load(sin + channel).to(tl.float32)
    dfirst = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    dsecond = tl.load(grad + at + HALF, mask=inside, other=0.0).to(tl.float32)
    back_first = dfirst * c + dsecond * s
    back_second = dsecond * c - dfirst * s
    if NORM:
        first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
        back_first *= tl.load(weight + channel).to(tl.float32)
        back_second *= tl.load(weight + channel + HALF).to(tl.float32)
        size = 2 * HALF
        square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / size
        scale = tl.rsqrt(square + eps)
        pull = (tl.sum(back_first * first, axis=1) + tl.sum(back_second * second, axis=1)) / size * scale * scale
        back_first = scale[:, None] * (back_first - first * pull[:, None])
        back_second = scale[:, None] * (back_second - second * pull[:, None])
    kind = target.dtype.element_ty
    tl.store(target + at, back_first.to(kind), mask=inside)
    tl.store(target + at + HALF, back_second.to(kind), mask=inside)


@triton.jit
def _heads_forward(
    qkv,
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    H_PADDED: tl.constexpr,
    G_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = 2 * HALF
    source = qkv + row * (H + 2 * G) * size
    turn_cos, turn_sin = cos + row * HALF, sin + row * HALF
    _turned(source, q + row * H * size, q_weight, turn_cos, turn_sin, eps, H, H_PADDED, HALF, NORM)
    _turned(source + H * size, k + row * G * size, k_weight, turn_cos, turn_sin, eps, G, G_PADDED, HALF, NORM)


@triton.jit
def _heads_backward(
    dq,
    dk,
    dv,
    qkv,
    out,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    H_PADDED: tl.constexpr,
    G_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = 2 * HALF
    start = row * (H + 2 * G) * size
    c, s = cos + row * HALF, sin + row * HALF
    _turned_gradient(dq + row * H * size, qkv + start, out + start, q_weight, c, s, eps, H, H_PADDED, HALF, NORM)
    keys = start + H * size
    _turned_gradient(dk + row * G * size, qkv + keys, out + keys, k_weight, c, s, eps, G, G_PADDED, HALF, NORM)
    at = tl.arange(0, G_PADDED * 2 * HALF)
    inside = at < G * size
    values = tl.load(dv + row * G * size + at, mask=inside)
    tl.store(out + keys + G * size + at, values, mask=inside)


def heads_forward(
    qkv_TN: torch.Tensor,
    sizes: tuple[int, int, int],
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and turned, and values, which stay where they are."""
    rows, channels = qkv_TN.shape[0], qkv_TN.shape[1] // sum(sizes)
    heads, groups, _ = sizes
    q, k = qkv_TN.new_empty(rows, heads, channels), qkv_TN.new_empty(rows, groups, channels)
    norms = weights or (qkv_TN, qkv_TN)
    _heads_forward[(rows,)](
        *(qkv_TN, q, k, *norms, cos, sin, eps),
        **_tiles(heads, groups, channels, weights is not None),
    )
    return q, k, qkv_TN.view(rows, -1, channels)[:, heads + groups :]


def heads_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv_TN: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The gradient by the fused projection."""
    (rows, heads, channels), groups = dq.shape, dk.shape[1]
    out = torch.empty_like(qkv_TN)
    norms = weights or (qkv_TN, qkv_TN)
    _heads_backward[(rows,)](
        *(dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv_TN, out, *norms, cos, sin, eps),
        **_tiles(heads, groups, channels, weights is not None),
    )
    return out


def _tiles(heads: int, groups: int, channels: int, normed: bool) -> dict[str, object]:
    return {
        "H": heads,
        "G": groups,
        "H_PADDED": triton.next_power_of_2(heads),
        "G_PADDED": triton.next_power_of_2(groups),
        "HALF": channels // 2,
        "NORM": normed,
    }
