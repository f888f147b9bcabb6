"""Attention within packed sequences on a GPU, and its gradient. Import it only where Triton is
installed.

A program has a tile of queries, or of keys, of one sequence and goes over all that it meets on the
other side. Forward keeps the log-sum-exp of the scores, which makes the weights again; the keys'
gradient adds up the query heads of a group in registers. Nothing is added up in memory, so the same
numbers give the same bits.

Axes: T packed tokens, H query heads, G key/value heads, C channels, N tiles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tinkex.engine.torch.device_copies import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
DELTA_BLOCK = 64


class Tiling(NamedTuple):
    """How a kernel goes about it."""

    block: int
    """Tokens of a program: those for which it computes something."""
    step: int
    """Tokens of the other side that it takes at once."""
    warps: int
    stages: int
    """How many steps are in shared memory at a time; a step is loaded while another is computed
    from three on."""


FORWARD = Tiling(64, 64, 4, 3)
KEYS = {128: Tiling(64, 32, 4, 3), 64: Tiling(128, 64, 8, 3)}
QUERIES = {128: Tiling(64, 64, 4, 2), 64: Tiling(128, 64, 8, 3)}
"""By head size; for others `SMALL`."""
SMALL = Tiling(64, 64, 4, 3)


def fits(channels: int) -> bool:
    """Whether there are kernels for heads of this size."""
    return channels in (16, 32, 64, 128)


def keys_tiling(channels: int) -> Tiling:
    """For the gradient of keys and values."""
    return KEYS.get(channels, SMALL)


def queries_tiling(channels: int) -> Tiling:
    """For the gradient of queries."""
    return QUERIES.get(channels, SMALL)


def tiles(
    lengths: Sequence[int], block: int, device: torch.device, *, of_keys: bool
) -> torch.Tensor:
    """Tiles of sequences that lie side by side, int32 `[N, 3]`: where the sequence starts, its end,
    the tile's start.

    The longest sequences come first, and of each the tiles with most work, so that all end at about
    the same time: a tile of keys meets the queries from there on, a tile of queries the keys up to
    there. Tiles of one sequence read the same numbers, and are neighbours for that.
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

    forward_N3: torch.Tensor
    keys_N3: torch.Tensor
    queries_N3: torch.Tensor


def tables(lengths: Sequence[int], channels: int, device: torch.device) -> Tables:
    """For heads of this size."""
    forward_N3 = tiles(lengths, FORWARD.block, device, of_keys=False)
    keys_N3 = tiles(lengths, keys_tiling(channels).block, device, of_keys=True)
    block = queries_tiling(channels).block
    return Tables(
        forward_N3,
        keys_N3,
        forward_N3 if block == FORWARD.block else tiles(lengths, block, device, of_keys=False),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    ptr, first, end, stride, BLOCK: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr
):
    """A block of tokens; beyond the sequence its last one, which can be read without a mask and is
    never used.
    """
    row = tl.arange(0, BLOCK)
    if not WHOLE:
        row = tl.minimum(row, end - 1 - first)
    at = row[:, None] * stride + tl.arange(0, C)[None, :]
    return tl.load(ptr + first.to(tl.int64) * stride + at)


@triton.jit  # type: ignore[untyped-decorator]
def _own_rows(first, end, heads, head, BLOCK: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a block of tokens of one head is written, and which of them are within the sequence."""
    row = tl.arange(0, BLOCK)
    base = first.to(tl.int64) * (heads * C) + head * C
    return base + row[:, None] * (heads * C) + tl.arange(0, C)[None, :], row < end - first


@triton.jit  # type: ignore[untyped-decorator]
def _seen(query, key, window, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a query sees a key, by their places in the sequence."""
    seen = query >= key
    if WINDOWED:
        seen = seen & (query < key + window)
    return seen


@triton.jit  # type: ignore[untyped-decorator]
def _row_numbers(  # type: ignore[no-untyped-def]
    ptr, first, end, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """The two numbers of each token of a block, read as one.

    Beyond the sequence the first is infinite: weights, which are divided by its power, are then
    none.
    """
    row = tl.arange(0, BLOCK)
    at = row
    if not WHOLE:
        at = tl.minimum(row, end - 1 - first)
    both = tl.load(ptr + first + at)
    lse = both.to(tl.int32).to(tl.float32, bitcast=True)
    if not WHOLE:
        lse = tl.where(row < end - first, lse, float("inf"))
    return lse, (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_step(  # type: ignore[no-untyped-def]
    mixed,
    total,
    highest,
    q,
    k_ptr,
    v_ptr,
    query_first,
    first,
    end,
    k_row,
    v_row,
    scale,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Add the values of a block of keys to a tile of queries, each by its weight, relative to the
    highest score yet.
    """
    k = _rows(k_ptr, first, end, k_row, KEYS, C, not MASKED)
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        query = (query_first - first + tl.arange(0, QUERIES))[:, None]
        seen = _seen(query, tl.arange(0, KEYS)[None, :], window, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    base = higher
    # there a query may see nothing of its first blocks, and -inf less -inf is no number
    if WINDOWED:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.math.exp2(scores * scale - base[:, None])
    shrunk = tl.math.exp2(highest - base)
    v = _rows(v_ptr, first, end, v_row, KEYS, C, not MASKED)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrunk[:, None])
    return mixed, total * shrunk + tl.sum(weights, 1), higher


@triton.jit(do_not_specialize=["tokens", "heads", "shared", "window"])  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    out_ptr,
    lse_ptr,
    tokens,
    heads,
    shared,
    base_two_scale,
    window,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    C: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    LN_2: tl.constexpr,
):
    """A tile of queries of one head: over the keys up to there."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tiles_ptr + tl.program_id(0) // heads * 3
    begin = tl.load(tile)
    end = tl.load(tile + 1)
    start = tl.load(tile + 2)
    q = _rows(q_ptr + head * q_head, start, end, q_row, QUERIES, C, False)
    k_ptr += head // shared * k_head
    v_ptr += head // shared * v_head
    mixed = tl.zeros([QUERIES, C], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    if WINDOWED:
        near = tl.maximum(begin, start - window + 1)
    else:
        far = (start - begin) // KEYS
        near = begin + far * KEYS
        for n in range(far):
            mixed, total, highest = _forward_step(
                mixed,
                total,
                highest,
                q,
                k_ptr,
                v_ptr,
                start,
                begin + n * KEYS,
                end,
                k_row,
                v_row,
                base_two_scale,
                window,
                QUERIES,
                KEYS,
                C,
                False,
                False,
            )
    for n in range(tl.cdiv(tl.minimum(end, start + QUERIES) - near, KEYS)):
        mixed, total, highest = _forward_step(
            mixed,
            total,
            highest,
            q,
            k_ptr,
            v_ptr,
            start,
            near + n * KEYS,
            end,
            k_row,
            v_row,
            base_two_scale,
            window,
            QUERIES,
            KEYS,
            C,
            True,
            WINDOWED,
        )
    at, inside = _own_rows(start, end, heads, head, QUERIES, C)
    tl.store(
        out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None]
    )
    lse_at = lse_ptr + head * tokens + start + tl.arange(0, QUERIES)
    tl.store(lse_at, (highest + tl.math.log2(total)) * LN_2, mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])  # type: ignore[untyped-decorator]
def _delta(  # type: ignore[no-untyped-def]
    out_ptr,
    dout_ptr,
    lse_ptr,
    numbers_ptr,
    tokens,
    heads,
    out_row,
    out_head,
    dout_row,
    dout_head,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """For each head and token, the log-sum-exp to base two, and the sum of output times its
    gradient.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    first = tl.program_id(0) // heads * BLOCK
    row = first + tl.arange(0, BLOCK)
    out = _rows(out_ptr + head * out_head, first, tokens, out_row, BLOCK, C, False).to(tl.float32)
    dout = _rows(dout_ptr + head * dout_head, first, tokens, dout_row, BLOCK, C, False).to(
        tl.float32
    )
    inside = row < tokens
    at = head * tokens + row
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    tl.store(numbers_ptr + 2 * at, lse * LOG2_E, mask=inside)
    tl.store(numbers_ptr + 2 * at + 1, tl.sum(out * dout, 1), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _keys_step(  # type: ignore[no-untyped-def]
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    numbers_ptr,
    key_first,
    first,
    end,
    q_row,
    dout_row,
    scale,
    window,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Add what a block of queries of one head gives to a tile of keys."""
    q = _rows(q_ptr, first, end, q_row, QUERIES, C, not MASKED)
    lse, delta = _row_numbers(numbers_ptr, first, end, QUERIES, not MASKED)
    weights = tl.math.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if MASKED:
        key = (key_first - first + tl.arange(0, KEYS))[:, None]
        seen = _seen(tl.arange(0, QUERIES)[None, :], key, window, WINDOWED)
        weights = tl.where(seen, weights, 0.0)
    dout = _rows(dout_ptr, first, end, dout_row, QUERIES, C, not MASKED)
    dv = tl.dot(weights.to(dout.dtype), dout, dv)
    dscores = weights * (tl.dot(v, tl.trans(dout)) - delta[None, :])
    dk = tl.dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "groups", "shared", "window"])  # type: ignore[untyped-decorator]
def _keys_gradient(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    numbers_ptr,
    tiles_ptr,
    dk_ptr,
    dv_ptr,
    tokens,
    groups,
    shared,
    scale,
    base_two_scale,
    window,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """A tile of keys of one head, and of their values: over the queries from there on of the heads
    that share them.
    """
    group = (tl.program_id(0) % groups).to(tl.int64)
    tile = tiles_ptr + tl.program_id(0) // groups * 3
    end = tl.load(tile + 1)
    start = tl.load(tile + 2)
    k = _rows(k_ptr + group * k_head, start, end, k_row, KEYS, C, False)
    v = _rows(v_ptr + group * v_head, start, end, v_row, KEYS, C, False)
    dk = tl.zeros([KEYS, C], tl.float32)
    dv = tl.zeros([KEYS, C], tl.float32)
    head = group * shared
    q_ptr += head * q_head
    dout_ptr += head * dout_head
    numbers_ptr += head * tokens
    # The blocks that need a mask: those beside the tile itself, and one that goes beyond the
    # sequence. The heads are part of one loop, which is then long enough to keep its loads ahead.
    if WINDOWED:
        beside = tl.cdiv(tl.minimum(end - start, KEYS - 1 + window), QUERIES)
        near = beside
    else:
        beside = tl.cdiv(tl.minimum(end - start, KEYS), QUERIES)
        near = tl.minimum(beside + ((end - start) % QUERIES != 0), tl.cdiv(end - start, QUERIES))
    far = (end - start) // QUERIES - beside
    for n in range(near * shared):
        r = (n // near).to(tl.int64)
        block = n % near
        dk, dv = _keys_step(
            dk,
            dv,
            k,
            v,
            q_ptr + r * q_head,
            dout_ptr + r * dout_head,
            numbers_ptr + r * tokens,
            start,
            start + (block + tl.where(block < beside, 0, far)) * QUERIES,
            end,
            q_row,
            dout_row,
            base_two_scale,
            window,
            KEYS,
            QUERIES,
            C,
            True,
            WINDOWED,
        )
    if not WINDOWED:
        for n in range(far * shared):
            r = (n // far).to(tl.int64)
            dk, dv = _keys_step(
                dk,
                dv,
                k,
                v,
                q_ptr + r * q_head,
                dout_ptr + r * dout_head,
                numbers_ptr + r * tokens,
                start,
                start + (beside + n % far) * QUERIES,
                end,
                q_row,
                dout_row,
                base_two_scale,
                window,
                KEYS,
                QUERIES,
                C,
                False,
                False,
            )
    at, inside = _own_rows(start, end, groups, group, KEYS, C)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _queries_step(  # type: ignore[no-untyped-def]
    dq,
    q,
    dout,
    lse,
    delta,
    k_ptr,
    v_ptr,
    query_first,
    first,
    end,
    k_row,
    v_row,
    scale,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Add what a block of keys gives to a tile of queries."""
    k = _rows(k_ptr, first, end, k_row, KEYS, C, not MASKED)
    v = _rows(v_ptr, first, end, v_row, KEYS, C, not MASKED)
    weights = tl.math.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        query = (query_first - first + tl.arange(0, QUERIES))[:, None]
        seen = _seen(query, tl.arange(0, KEYS)[None, :], window, WINDOWED)
        weights = tl.where(seen, weights, 0.0)
    dscores = weights * (tl.dot(dout, tl.trans(v)) - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["tokens", "heads", "shared", "window"])  # type: ignore[untyped-decorator]
def _queries_gradient(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    numbers_ptr,
    tiles_ptr,
    dq_ptr,
    tokens,
    heads,
    shared,
    scale,
    base_two_scale,
    window,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    C: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """A tile of queries of one head: over the keys up to there."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tiles_ptr + tl.program_id(0) // heads * 3
    begin = tl.load(tile)
    end = tl.load(tile + 1)
    start = tl.load(tile + 2)
    q = _rows(q_ptr + head * q_head, start, end, q_row, QUERIES, C, False)
    dout = _rows(dout_ptr + head * dout_head, start, end, dout_row, QUERIES, C, False)
    lse, delta = _row_numbers(numbers_ptr + head * tokens, start, end, QUERIES, False)
    k_ptr += head // shared * k_head
    v_ptr += head // shared * v_head
    dq = tl.zeros([QUERIES, C], tl.float32)
    if WINDOWED:
        near = tl.maximum(begin, start - window + 1)
    else:
        far = (start - begin) // KEYS
        near = begin + far * KEYS
        for n in range(far):
            dq = _queries_step(
                dq,
                q,
                dout,
                lse,
                delta,
                k_ptr,
                v_ptr,
                start,
                begin + n * KEYS,
                end,
                k_row,
                v_row,
                base_two_scale,
                window,
                QUERIES,
                KEYS,
                C,
                False,
                False,
            )
    for n in range(tl.cdiv(tl.minimum(end, start + QUERIES) - near, KEYS)):
        dq = _queries_step(
            dq,
            q,
            dout,
            lse,
            delta,
            k_ptr,
            v_ptr,
            start,
            near + n * KEYS,
            end,
            k_row,
            v_row,
            base_two_scale,
            window,
            QUERIES,
            KEYS,
            C,
            True,
            WINDOWED,
        )
    at, inside = _own_rows(start, end, heads, head, QUERIES, C)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


def forward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles_N3: torch.Tensor,
    scale: float,
    window: int | None,
    tiling: Tiling = FORWARD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries see, and the log-sum-exp of their scores `[H, T]`; tiles as the tiling says."""
    q_THC, k_TGC, v_TGC = qkv
    tokens, heads, channels = q_THC.shape
    out_THC = q_THC.new_empty(tokens, heads, channels)
    lse_HT = q_THC.new_empty(heads, tokens, dtype=torch.float32)
    _forward[(tiles_N3.shape[0] * heads,)](
        q_THC,
        k_TGC,
        v_TGC,
        tiles_N3,
        out_THC,
        lse_HT,
        tokens,
        heads,
        heads // k_TGC.shape[1],
        scale * LOG2_E,
        window or 0,
        *q_THC.stride()[:2],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        C=channels,
        QUERIES=tiling.block,
        KEYS=tiling.step,
        WINDOWED=window is not None,
        LN_2=LN_2,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out_THC, lse_HT


def row_numbers(
    dout_THC: torch.Tensor, out_THC: torch.Tensor, lse_HT: torch.Tensor
) -> torch.Tensor:
    """What both gradients need of each query: its log-sum-exp to base two, and its delta, two
    floats in 64 bits.
    """
    tokens, heads, channels = out_THC.shape
    numbers_HT2 = lse_HT.new_empty(heads, tokens, 2)
    _delta[(triton.cdiv(tokens, DELTA_BLOCK) * heads,)](
        out_THC,
        dout_THC,
        lse_HT,
        numbers_HT2,
        tokens,
        heads,
        *out_THC.stride()[:2],
        *dout_THC.stride()[:2],
        C=channels,
        BLOCK=DELTA_BLOCK,
        LOG2_E=LOG2_E,
        num_warps=4,
    )
    return numbers_HT2.view(torch.int64)[..., 0]


def keys_gradient(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout_THC: torch.Tensor,
    numbers_HT: torch.Tensor,
    tiles_N3: torch.Tensor,
    scale: float,
    window: int | None,
    tiling: Tiling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values; the tiles are of the size that the tiling says."""
    q_THC, k_TGC, v_TGC = qkv
    tokens, heads, channels = q_THC.shape
    groups = k_TGC.shape[1]
    dk_TGC, dv_TGC = (k_TGC.new_empty(tokens, groups, channels) for _ in range(2))
    _keys_gradient[(tiles_N3.shape[0] * groups,)](
        q_THC,
        k_TGC,
        v_TGC,
        dout_THC,
        numbers_HT,
        tiles_N3,
        dk_TGC,
        dv_TGC,
        tokens,
        groups,
        heads // groups,
        scale,
        scale * LOG2_E,
        window or 0,
        *q_THC.stride()[:2],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        *dout_THC.stride()[:2],
        C=channels,
        KEYS=tiling.block,
        QUERIES=tiling.step,
        WINDOWED=window is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return dk_TGC, dv_TGC


def queries_gradient(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout_THC: torch.Tensor,
    numbers_HT: torch.Tensor,
    tiles_N3: torch.Tensor,
    scale: float,
    window: int | None,
    tiling: Tiling,
) -> torch.Tensor:
    """Of queries; the tiles are of the size that the tiling says."""
    q_THC, k_TGC, v_TGC = qkv
    tokens, heads, channels = q_THC.shape
    dq_THC = q_THC.new_empty(tokens, heads, channels)
    _queries_gradient[(tiles_N3.shape[0] * heads,)](
        q_THC,
        k_TGC,
        v_TGC,
        dout_THC,
        numbers_HT,
        tiles_N3,
        dq_THC,
        tokens,
        heads,
        heads // k_TGC.shape[1],
        scale,
        scale * LOG2_E,
        window or 0,
        *q_THC.stride()[:2],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        *dout_THC.stride()[:2],
        C=channels,
        QUERIES=tiling.block,
        KEYS=tiling.step,
        WINDOWED=window is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return dq_THC


class VarlenAttention(torch.autograd.Function):
    """Causal attention within packed sequences, by the kernels above."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THC: torch.Tensor,
        k_TGC: torch.Tensor,
        v_TGC: torch.Tensor,
        scale: float,
        window: int | None,
        tables: Tables,
    ) -> torch.Tensor:
        """Attend."""
        out_THC, lse_HT = forward((q_THC, k_TGC, v_TGC), tables.forward_N3, scale, window)
        ctx.save_for_backward(q_THC, k_TGC, v_TGC, out_THC, lse_HT)
        ctx.scale, ctx.window, ctx.tables = scale, window, tables
        return out_THC

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """By queries, keys and values."""
        q, k, v, out, lse = ctx.saved_tensors
        return (
            *gradients(grads[0], (q, k, v), out, lse, ctx.tables, ctx.scale, ctx.window),
            None,
            None,
            None,
        )


def gradients(
    dout_THC: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out_THC: torch.Tensor,
    lse_HT: torch.Tensor,
    tables: Tables,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of queries, keys and values."""
    channels = out_THC.shape[2]
    dout_THC = dout_THC.contiguous()
    numbers = row_numbers(dout_THC, out_THC, lse_HT)
    tiling = keys_tiling(channels)
    dk_TGC, dv_TGC = keys_gradient(qkv, dout_THC, numbers, tables.keys_N3, scale, window, tiling)
    tiling = queries_tiling(channels)
    return (
        queries_gradient(qkv, dout_THC, numbers, tables.queries_N3, scale, window, tiling),
        dk_TGC,
        dv_TGC,
    )
