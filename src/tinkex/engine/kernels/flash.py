"""Attention within packed sequences on a GPU. Import it only where Triton is installed.

A program has a tile of queries, or of keys, of one sequence and goes over all blocks of the other
side that belong to it. No kernel adds to memory, so the same numbers give the same bits.

Axes: T packed tokens, H query heads, G key/value heads, C channels, N tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.kernels.flash_gradients import (
    FORWARD,
    LOG2_E,
    Backward,
    Heads,
    Tiling,
    head_of,
    keys_gradient,
    keys_tiling,
    last_keys,
    places_of,
    queries_gradient,
    queries_tiling,
    row_numbers,
    rows_of,
    run_of_keys,
    sees_keys,
    strides_of,
    tile_of,
)
from tinkex.engine.torch.device_copies import to_device

LN_2 = 0.6931471805599453


def fits(channels: int) -> bool:
    """Return whether there are kernels for heads of this size."""
    return channels in (16, 32, 64, 128)


def tiles(lengths: Sequence[int], block: int, device: torch.device, *, of_keys: bool) -> Tensor:
    """Return the tiles of packed sequences, int32 `[N, 3]`: sequence start and end, tile start.

    The longest sequences come first, and of each the tiles with most work, so that all programs end
    at about the same time: a tile of keys goes over the queries after it, a tile of queries over
    the keys before it. Tiles of one sequence are neighbours, because they read the same numbers.
    """
    ends = np.cumsum(lengths)
    table = np.array(
        [
            (end - length, end, at)
            for end, length in zip(ends, lengths, strict=True)
            for at in range(end - length, end, block)
        ],
        dtype=np.int32,
    )
    start, end, tile = table.T
    order = np.lexsort((tile if of_keys else -tile, start, start - end))
    return to_device(table[order], device, torch.int32)


class Tables(NamedTuple):
    """The tiles of packed sequences, for each of the kernels."""

    forward_N3: Tensor
    keys_N3: Tensor
    queries_N3: Tensor


def tables(lengths: Sequence[int], channels: int, device: torch.device) -> Tables:
    """Return the tiles for heads of this size."""
    forward_N3 = tiles(lengths, FORWARD.block, device, of_keys=False)
    keys_N3 = tiles(lengths, keys_tiling(channels).block, device, of_keys=True)
    block = queries_tiling(channels).block
    return Tables(
        forward_N3,
        keys_N3,
        forward_N3 if block == FORWARD.block else tiles(lengths, block, device, of_keys=False),
    )


@triton.jit(do_not_specialize=["tokens", "heads", "shared", "window"])
def _forward(
    qkv,
    tiles_ptr,
    out_ptr,
    lse_ptr,
    tokens,
    heads,
    shared,
    base_two_scale,
    window,
    strides,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    LN_2: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Attend: a tile of queries of one head, over the keys before them.

    Weights are relative to the highest score so far.
    """
    q_ptr, k_ptr, v_ptr = qkv
    head, begin, end, start = tile_of(tiles_ptr, heads)
    q = rows_of(head_of(q_ptr, strides, 0, head), start, end, QUERIES, C, False)
    k_rows = head_of(k_ptr, strides, 1, head // shared)
    v_rows = head_of(v_ptr, strides, 2, head // shared)
    mixed = tl.zeros([QUERIES, C], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    near, far = last_keys(begin, start, window, KEYS, WINDOWED)
    for masked in tl.static_range(WINDOWED, 2):
        first, count = run_of_keys(begin, near, far, start, end, QUERIES, KEYS, masked)
        for n in range(count):
            key = first + n * KEYS
            k = rows_of(k_rows, key, end, KEYS, C, not masked)
            scores = tl.dot(q, tl.trans(k))
            if masked:
                seen = sees_keys(start, key, window, QUERIES, KEYS, WINDOWED)
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1) * base_two_scale)
            base = higher
            # a query may see nothing of a window's first blocks, and -inf - -inf is not a number
            if WINDOWED:
                base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.math.exp2(scores * base_two_scale - base[:, None])
            shrunk = tl.math.exp2(highest - base)
            v = rows_of(v_rows, key, end, KEYS, C, not masked)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * shrunk[:, None])
            total = total * shrunk + tl.sum(weights, 1)
            highest = higher
    at, inside = places_of(start, end, heads, head, QUERIES, C)
    mixed = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, mixed, mask=inside[:, None])
    lse_at = lse_ptr + head * tokens + start + tl.arange(0, QUERIES)
    tl.store(lse_at, (highest + tl.math.log2(total)) * LN_2, mask=inside)


def forward(
    qkv: Heads,
    tiles_N3: Tensor,
    scale: float,
    window: int | None,
    tiling: Tiling = FORWARD,
) -> tuple[Tensor, Tensor]:
    """Return the mixed values and the log-sum-exp of the scores `[H, T]`."""
    (tokens, heads, channels), shared = qkv[0].shape, qkv[0].shape[1] // qkv[1].shape[1]
    out_THC = qkv[0].new_empty(tokens, heads, channels)
    lse_HT = qkv[0].new_empty(heads, tokens, dtype=torch.float32)
    _forward[(tiles_N3.shape[0] * heads,)](
        *(qkv, tiles_N3, out_THC, lse_HT),
        *(tokens, heads, shared, scale * LOG2_E, window or 0, strides_of(*qkv)),
        **tiling.options("QUERIES", "KEYS"),
        C=channels,
        WINDOWED=window is not None,
        LN_2=LN_2,
    )
    return out_THC, lse_HT


class VarlenAttention(torch.autograd.Function):
    """Causal attention within packed sequences, by the kernels above."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        scale: float,
        window: int | None,
        tables: Tables,
    ) -> Tensor:
        """Return the mixed values."""
        out_THC, lse_HT = forward((q_THC, k_TGC, v_TGC), tables.forward_N3, scale, window)
        ctx.save_for_backward(q_THC, k_TGC, v_TGC, out_THC, lse_HT)
        ctx.scale, ctx.window, ctx.tables = scale, window, tables
        return out_THC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients by queries, keys and values."""
        q, k, v, out, lse = ctx.saved_tensors
        by_qkv = gradients(grads[0], (q, k, v), out, lse, ctx.tables, ctx.scale, ctx.window)
        return *by_qkv, None, None, None


def gradients(
    dout_THC: Tensor,
    qkv: Heads,
    out_THC: Tensor,
    lse_HT: Tensor,
    tables: Tables,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    channels = out_THC.shape[2]
    dout_THC = dout_THC.contiguous()
    given = Backward(qkv, dout_THC, row_numbers(dout_THC, out_THC, lse_HT), scale, window)
    dk_TGC, dv_TGC = keys_gradient(given, tables.keys_N3, keys_tiling(channels))
    dq_THC = queries_gradient(given, tables.queries_N3, queries_tiling(channels))
    return dq_THC, dk_TGC, dv_TGC
