"""Kernels of gated MLPs and of adapters' shares, in Triton.

A program takes one token. Everything is computed in float32 and rounded once.
`model/elementwise.py` has the same formulas for machines without Triton.

Axes: T packed tokens, F mlp, N outputs (2 F of a gated projection), R rank.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 2048
SHARE_ROWS = 64
TILE = 64
TILES = 8
"""Tiles of rows of a program: it reads its part of B once, and loads the next tile ahead."""


@triton.jit
def _share(gate, GELU: tl.constexpr):
    """The share of the gate that passes; gate * sigmoid(2 inner) is GELU's tanh form."""
    if GELU:
        gate = 2 * (0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    return tl.sigmoid(gate)


@triton.jit
def _slope(gate, share, GELU: tl.constexpr):
    """The derivative of gate * share."""
    if GELU:
        slope = share + gate * share * (1 - share) * 2 * 0.7978845608028654 * (
            1 + 3 * 0.044715 * gate * gate
        )
    else:
        slope = share * (1 + gate * (1 - share))
    return slope


@triton.jit
def _gate_forward(gate_up, out, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside).to(tl.float32)
    active = gate * _share(gate, GELU)
    tl.store(out + row * F + at, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(dy, gate_up, out, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=inside).to(tl.float32)
    grad = tl.load(dy + row * F + at, mask=inside).to(tl.float32)
    share = _share(gate, GELU)
    slope = _slope(gate, share, GELU)
    tl.store(out + row * 2 * F + at, (grad * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(
        out + row * 2 * F + F + at, (grad * gate * share).to(out.dtype.element_ty), mask=inside
    )


def gate_forward(gate_up_TN: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up."""
    rows, width = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    out = gate_up_TN.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _gate_forward[grid](gate_up_TN, out, width, BLOCK=GATE_BLOCK, GELU=activation != "silu")
    return out


def gate_backward(dy_TF: Tensor, gate_up_TN: Tensor, activation: str) -> Tensor:
    """Return its gradient by the fused projection."""
    rows, width = dy_TF.shape
    out = torch.empty_like(gate_up_TN)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _gate_backward[grid](
        dy_TF.contiguous(), gate_up_TN, out, width, BLOCK=GATE_BLOCK, GELU=activation != "silu"
    )
    return out


@triton.jit
def _add_product(
    y,
    left,
    right,
    scale,
    sizes,
    strides,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    T, N = sizes
    y_row, left_row, right_column, right_rank = strides
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, R_PADDED)
    inside = (row < T)[:, None] & (column < N)[None, :]
    at = y + row[:, None] * y_row + column[None, :]
    before = tl.load(at, mask=inside, other=0.0)
    low = tl.load(
        left + row[:, None] * left_row + rank[None, :],
        mask=(row < T)[:, None] & (rank < R)[None, :],
        other=0.0,
    )
    high = tl.load(
        right + column[None, :] * right_column + rank[:, None] * right_rank,
        mask=(column < N)[None, :] & (rank < R)[:, None],
        other=0.0,
    )
    share = tl.dot(low, high) * scale
    tl.store(at, (before.to(tl.float32) + share).to(y.dtype.element_ty), mask=inside)


def add_product(y_TN: Tensor, low_TR: Tensor, high_RN: Tensor, scale: float) -> None:
    """Add the scaled product of two low-rank factors, in one pass over y."""
    (rows, columns), rank = y_TN.shape, low_TR.shape[1]
    # measured: with these it moves 85 to 95 % of what a plain pass over y does
    wide = 64 if rank <= 32 else 128
    _add_product[(triton.cdiv(columns, wide), triton.cdiv(rows, SHARE_ROWS))](
        *(y_TN, low_TR, high_RN, scale, (rows, columns)),
        (y_TN.stride(0), low_TR.stride(0), high_RN.stride(1), high_RN.stride(0)),
        R=rank,
        R_PADDED=max(16, triton.next_power_of_2(rank)),
        ROWS=SHARE_ROWS,
        COLUMNS=wide,
        num_warps=4,
    )


@triton.jit
def _gate_tile(parts, high, scale, at, sizes, R: tl.constexpr, PART: tl.constexpr):
    """One half of the projection: the product with the base weights plus the adapter's share."""
    y, low = parts
    row, column, rank = at
    T, F, y_row, low_row = sizes
    inside = (row < T)[:, None] & (column < F)[None, :]
    before = tl.load(y + row[:, None] * y_row + PART * F + column[None, :], mask=inside, other=0.0)
    left = tl.load(
        low + row[:, None] * low_row + PART * R + rank[None, :],
        mask=(row < T)[:, None] & (rank < R)[None, :],
        other=0.0,
    )
    return before.to(tl.float32) + tl.dot(left, high) * scale


@triton.jit
def _shared_gate(
    dy,
    parts,
    highs,
    out,
    scale,
    sizes,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    T, F, y_row, _ = sizes
    gate_high, up_high = highs
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, R_PADDED)
    high_at = column[None, :] * R + rank[:, None]
    known = (column < F)[None, :] & (rank < R)[:, None]
    gate_right = tl.load(gate_high + high_at, mask=known, other=0.0)
    up_right = tl.load(up_high + high_at, mask=known, other=0.0)
    first = tl.program_id(1) * (TILES * ROWS)
    kind = out.dtype.element_ty
    for start in tl.range(first, tl.minimum(first + TILES * ROWS, T), ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < T)[:, None] & (column < F)[None, :]
        gate = _gate_tile(parts, gate_right, scale, (row, column, rank), sizes, R, 0)
        up = _gate_tile(parts, up_right, scale, (row, column, rank), sizes, R, 1)
        share = _share(gate, GELU)
        at = row[:, None] * F + column[None, :]
        if BACKWARD:
            grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            slope = _slope(gate, share, GELU)
            to = out + row[:, None] * y_row + column[None, :]
            tl.store(to, (grad * up * slope).to(kind), mask=inside)
            tl.store(to + F, (grad * gate * share).to(kind), mask=inside)
        else:
            tl.store(out + at, (gate * share * up).to(kind), mask=inside)


def shared_gate(
    y_TN: Tensor,
    low_TR: Tensor,
    high_FR: tuple[Tensor, Tensor],
    scale: float,
    activation: str,
    out: Tensor,
    dy_TF: Tensor | None = None,
) -> None:
    """Write activation(gate) * up of a projection plus an adapter's share, or its gradient.

    The sum is never written, which saves a pass over the widest activations of the model.
    """
    (rows, both), rank = y_TN.shape, high_FR[0].shape[1]
    width, padded = both // 2, max(16, triton.next_power_of_2(rank))
    _shared_gate[(triton.cdiv(width, TILE), triton.cdiv(rows, TILES * TILE))](
        *(out if dy_TF is None else dy_TF, (y_TN, low_TR), high_FR, out, scale),
        (rows, width, y_TN.stride(0), low_TR.stride(0)),
        R=rank,
        R_PADDED=padded,
        ROWS=TILE,
        COLUMNS=TILE,
        TILES=TILES,
        STAGES=_stages(padded, y_TN.device),
        GELU=activation != "silu",
        BACKWARD=dy_TF is not None,
        num_warps=4,
    )


@functools.cache
def _stages(rank: int, device: torch.device) -> int:
    """Return the tiles in shared memory at a time: three where two programs then fit, else two."""
    known = torch.cuda.get_device_properties(device)
    # older versions of PyTorch do not say
    room = getattr(known, "shared_memory_per_multiprocessor", 0)
    tile, factors = 2 * TILE * (3 * TILE + 2 * rank), 2 * 2 * TILE * rank
    if 2 * (factors + 3 * tile) <= room:
        return 3
    return 2 if factors + 2 * tile <= room else 1
