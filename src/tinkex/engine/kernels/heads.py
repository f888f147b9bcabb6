"""Kernels of attention heads, in Triton: norm, rotation, and the cache of keys and values.

A program takes one token. Everything is computed in float32 and rounded once.
`model/elementwise.py` has the same formulas for machines without Triton.

Axes: T packed tokens, H query heads, G key/value heads, C channels of a head, N = (H + 2 G) C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _places(HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The channels of the first halves, their places in a row of heads, and which of them exist."""
    head = tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    return channel, head * 2 * HALF + channel, (head < HEADS) & (channel < HALF)


@triton.jit
def _pair(ptr, at, inside, HALF: tl.constexpr):
    """Both halves of heads."""
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sums(first, second, other_first, other_second):
    """The sums over heads of a product."""
    return tl.sum(first * other_first, axis=1) + tl.sum(second * other_second, axis=1)


@triton.jit
def _turned(
    x, out, turn, HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Norm and rotate the heads of one token, from `x` to `out`, each a row of heads.

    `turn` has the norm's weight, the cosines and sines, and the norm's epsilon.
    """
    weight, cos, sin, eps = turn
    channel, at, inside = _places(HEADS, ROWS, HALF)
    first, second = _pair(x, at, inside, HALF)
    if NORM:
        scale = tl.rsqrt(_sums(first, second, first, second) / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + channel).to(tl.float32)
        second *= scale * tl.load(weight + channel + HALF).to(tl.float32)
    c = tl.load(cos + channel).to(tl.float32)
    s = tl.load(sin + channel).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + at, (first * c - second * s).to(kind), mask=inside)
    tl.store(out + at + HALF, (second * c + first * s).to(kind), mask=inside)


@triton.jit
def _turned_gradient(
    grads,
    out,
    turn,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Write the gradient by heads: rotated back, then through the norm.

    `grads` has the gradient by their rotated norm, and the heads themselves.
    """
    grad, x = grads
    weight, cos, sin, eps = turn
    channel, at, inside = _places(HEADS, ROWS, HALF)
    c = tl.load(cos + channel).to(tl.float32)
    s = tl.load(sin + channel).to(tl.float32)
    dfirst, dsecond = _pair(grad, at, inside, HALF)
    back_first = dfirst * c + dsecond * s
    back_second = dsecond * c - dfirst * s
    if NORM:
        first, second = _pair(x, at, inside, HALF)
        back_first *= tl.load(weight + channel).to(tl.float32)
        back_second *= tl.load(weight + channel + HALF).to(tl.float32)
        size = 2 * HALF
        scale = tl.rsqrt(_sums(first, second, first, second) / size + eps)
        pull = _sums(back_first, back_second, first, second) / size * scale * scale
        back_first = scale[:, None] * (back_first - first * pull[:, None])
        back_second = scale[:, None] * (back_second - second * pull[:, None])
    kind = out.dtype.element_ty
    tl.store(out + at, back_first.to(kind), mask=inside)
    tl.store(out + at + HALF, back_second.to(kind), mask=inside)


@triton.jit
def _heads_forward(
    qkv,
    q,
    k,
    turn,
    H: tl.constexpr,
    G: tl.constexpr,
    H_ROWS: tl.constexpr,
    G_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    q_weight, k_weight, cos, sin, eps = turn
    row = tl.program_id(0).to(tl.int64)
    size = 2 * HALF
    source = qkv + row * (H + 2 * G) * size
    c, s = cos + row * HALF, sin + row * HALF
    _turned(source, q + row * H * size, (q_weight, c, s, eps), H, H_ROWS, HALF, NORM)
    _turned(source + H * size, k + row * G * size, (k_weight, c, s, eps), G, G_ROWS, HALF, NORM)


@triton.jit
def _heads_backward(
    dq,
    dk,
    dv,
    qkv,
    out,
    turn,
    H: tl.constexpr,
    G: tl.constexpr,
    H_ROWS: tl.constexpr,
    G_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    q_weight, k_weight, cos, sin, eps = turn
    row = tl.program_id(0).to(tl.int64)
    size = 2 * HALF
    start = row * (H + 2 * G) * size
    c, s = cos + row * HALF, sin + row * HALF
    queries, keys = (q_weight, c, s, eps), (k_weight, c, s, eps)
    dq += row * H * size
    _turned_gradient((dq, qkv + start), out + start, queries, H, H_ROWS, HALF, NORM)
    start += H * size
    dk += row * G * size
    _turned_gradient((dk, qkv + start), out + start, keys, G, G_ROWS, HALF, NORM)
    at = tl.arange(0, G_ROWS * 2 * HALF)
    inside = at < G * size
    values = tl.load(dv + row * G * size + at, mask=inside)
    tl.store(out + start + G * size + at, values, mask=inside)


def heads_forward(
    qkv_TN: Tensor,
    sizes: tuple[int, int, int],
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and a view of the values."""
    rows, channels = qkv_TN.shape[0], qkv_TN.shape[1] // sum(sizes)
    heads, groups, _ = sizes
    q, k = qkv_TN.new_empty(rows, heads, channels), qkv_TN.new_empty(rows, groups, channels)
    turn = (*(weights or (qkv_TN, qkv_TN)), cos, sin, eps)
    _heads_forward[(rows,)](
        *(qkv_TN, q, k, turn),
        **_tiles(heads, groups, channels, weights is not None),
    )
    return q, k, qkv_TN.view(rows, -1, channels)[:, heads + groups :]


def heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv_TN: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Tensor:
    """Return the gradient by the fused projection."""
    (rows, heads, channels), groups = dq.shape, dk.shape[1]
    out = torch.empty_like(qkv_TN)
    turn = (*(weights or (qkv_TN, qkv_TN)), cos, sin, eps)
    _heads_backward[(rows,)](
        *(dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv_TN, out, turn),
        **_tiles(heads, groups, channels, weights is not None),
    )
    return out


def _tiles(heads: int, groups: int, channels: int, normed: bool) -> dict[str, object]:
    return {
        "H": heads,
        "G": groups,
        "H_ROWS": triton.next_power_of_2(heads),
        "G_ROWS": triton.next_power_of_2(groups),
        "HALF": channels // 2,
        "NORM": normed,
    }


@triton.jit
def _store(
    k,
    v,
    keys,
    values,
    places,
    strides,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
):
    k_row, k_head, v_row, v_head = strides
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, G_PADDED)[:, None]
    channel = tl.arange(0, C_PADDED)[None, :]
    inside = (head < G) & (channel < C)
    to = tl.load(places + row) * G * C + head * C + channel
    tl.store(
        keys + to, tl.load(k + row * k_row + head * k_head + channel, mask=inside), mask=inside
    )
    tl.store(
        values + to, tl.load(v + row * v_row + head * v_head + channel, mask=inside), mask=inside
    )


def store(kv_2NSGC: Tensor, places_T: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> None:
    """Put keys and values of tokens at their places in the cache of a layer."""
    rows, groups, channels = k_TGC.shape
    if k_TGC.stride(2) != 1 or v_TGC.stride(2) != 1:
        k_TGC, v_TGC = k_TGC.contiguous(), v_TGC.contiguous()
    _store[(rows,)](
        *(k_TGC, v_TGC, kv_2NSGC[0], kv_2NSGC[1], places_T.contiguous()),
        (*k_TGC.stride()[:2], *v_TGC.stride()[:2]),
        G=groups,
        G_PADDED=triton.next_power_of_2(groups),
        C=channels,
        C_PADDED=triton.next_power_of_2(channels),
    )
