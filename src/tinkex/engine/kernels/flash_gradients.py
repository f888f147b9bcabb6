"""Parts of the attention kernels that forward and gradients share, and the gradient itself.

Forward keeps the log-sum-exp of the scores, which gives the weights again. The gradient of keys
adds up the query heads of a group in registers. No kernel adds to memory, so the same numbers give
the same bits.

Axes: T packed tokens, H query heads, G key/value heads, C channels, N tiles.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of packed sequences."""


class Tiling(NamedTuple):
    """The block sizes and launch options of a kernel."""

    block: int
    """Tokens a program computes a result for."""
    step: int
    """Tokens of the other side that it takes at a time."""
    warps: int
    stages: int
    """Steps in shared memory at a time. From three on, one is loaded while another is computed."""

    def options(self, block: str, step: str) -> dict[str, int]:
        """Return the options of a launch, with a kernel's names for block and step."""
        return {
            block: self.block,
            step: self.step,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


FORWARD = Tiling(64, 64, 4, 3)
KEYS = {128: Tiling(64, 32, 4, 3), 64: Tiling(128, 64, 8, 3)}
QUERIES = {128: Tiling(64, 64, 4, 2), 64: Tiling(128, 64, 8, 3)}
"""By head size; for others `SMALL`."""
SMALL = Tiling(64, 64, 4, 3)


def keys_tiling(channels: int) -> Tiling:
    """Return the tiling of the gradient of keys and values."""
    return KEYS.get(channels, SMALL)


def queries_tiling(channels: int) -> Tiling:
    """Return the tiling of the gradient of queries."""
    return QUERIES.get(channels, SMALL)


@triton.jit
def head_of(ptr, strides, number: tl.constexpr, head):
    """One head of a tensor: its pointer, and the stride of its tokens.

    `strides` has two numbers for each tensor of a kernel: the strides of tokens and of heads.
    """
    return ptr + head * strides[2 * number + 1], strides[2 * number]


@triton.jit
def rows_of(x, first, end, BLOCK: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr):
    """A block of tokens of one head.

    Rows beyond the sequence repeat its last token: they need no mask and are never used.
    """
    ptr, stride = x
    row = tl.arange(0, BLOCK)
    if not WHOLE:
        row = tl.minimum(row, end - 1 - first)
    at = row[:, None] * stride + tl.arange(0, C)[None, :]
    return tl.load(ptr + first.to(tl.int64) * stride + at)


@triton.jit
def tile_of(tiles_ptr, heads):
    """The head of this program; begin and end of its sequence; the start of its tile."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tiles_ptr + tl.program_id(0) // heads * 3
    return head, tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def places_of(first, end, heads, head, BLOCK: tl.constexpr, C: tl.constexpr):
    """The places of a block of tokens of one head in a result, and which are in the sequence."""
    row = tl.arange(0, BLOCK)
    base = first.to(tl.int64) * (heads * C) + head * C
    return base + row[:, None] * (heads * C) + tl.arange(0, C)[None, :], row < end - first


@triton.jit
def sees(query, key, window, WINDOWED: tl.constexpr):
    """Return whether a query sees a key, by their positions in the sequence."""
    seen = query >= key
    if WINDOWED:
        seen = seen & (query < key + window)
    return seen


@triton.jit
def sees_keys(
    query_first, first, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr
):
    """Return which keys of a block the queries of a tile see."""
    query = (query_first - first + tl.arange(0, QUERIES))[:, None]
    return sees(query, tl.arange(0, KEYS)[None, :], window, WINDOWED)


@triton.jit
def last_keys(begin, start, window, KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """The first key that needs a mask for a tile of queries, and the blocks of keys before it.

    With a window all blocks need a mask.
    """
    far = 0
    if WINDOWED:
        near = tl.maximum(begin, start - window + 1)
    else:
        far = (start - begin) // KEYS
        near = begin + far * KEYS
    return near, far


@triton.jit
def run_of_keys(
    begin, near, far, start, end, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr
):
    """The first key and the number of blocks of those that need a mask, or of those that do not."""
    first, count = begin, far
    if MASKED:
        first, count = near, tl.cdiv(tl.minimum(end, start + QUERIES) - near, KEYS)
    return first, count


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of tokens and of heads of tensors `[T, H, C]`."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


DELTA_BLOCK = 64


@triton.jit
def _row_numbers(ptr, first, end, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The two numbers of each token of a block, read as one.

    Beyond the sequence the first is infinite, which makes the weights there zero.
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


@triton.jit(do_not_specialize=["tokens", "heads"])
def _delta(
    out_ptr,
    dout_ptr,
    lse_ptr,
    numbers_ptr,
    tokens,
    heads,
    strides,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Write each head's and token's log-sum-exp to base two, and the sum of output * gradient."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    first = tl.program_id(0) // heads * BLOCK
    row = first + tl.arange(0, BLOCK)
    mixed = rows_of(head_of(out_ptr, strides, 0, head), first, tokens, BLOCK, C, False).to(
        tl.float32
    )
    grad = rows_of(head_of(dout_ptr, strides, 1, head), first, tokens, BLOCK, C, False).to(
        tl.float32
    )
    inside = row < tokens
    at = head * tokens + row
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    tl.store(numbers_ptr + 2 * at, lse * LOG2_E, mask=inside)
    tl.store(numbers_ptr + 2 * at + 1, tl.sum(mixed * grad, 1), mask=inside)


@triton.jit(do_not_specialize=["tokens", "groups", "shared", "window"])
def _keys_gradient(
    qkv,
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
    strides,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    C: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The gradient of a tile of keys and values of one head.

    It goes over the queries from there on, of all heads that share the keys.
    """
    q_ptr, k_ptr, v_ptr = qkv
    group, _, end, start = tile_of(tiles_ptr, groups)
    k = rows_of(head_of(k_ptr, strides, 1, group), start, end, KEYS, C, False)
    v = rows_of(head_of(v_ptr, strides, 2, group), start, end, KEYS, C, False)
    dk = tl.zeros([KEYS, C], tl.float32)
    dv = tl.zeros([KEYS, C], tl.float32)
    head = group * shared
    q_ptr += head * strides[1]
    dout_ptr += head * strides[7]
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
    for bare in tl.static_range(0, 1 if WINDOWED else 2):
        count = far if bare else near
        for n in range(count * shared):
            r = (n // count).to(tl.int64)
            block = n % count
            block = beside + block if bare else block + tl.where(block < beside, 0, far)
            q_rows = head_of(q_ptr, strides, 0, r)
            dout_rows = head_of(dout_ptr, strides, 3, r)
            numbers = numbers_ptr + r * tokens
            query = start + block * QUERIES
            q = rows_of(q_rows, query, end, QUERIES, C, bare)
            lse, delta = _row_numbers(numbers, query, end, QUERIES, bare)
            weights = tl.math.exp2(tl.dot(k, tl.trans(q)) * base_two_scale - lse[None, :])
            if not bare:
                key = (start - query + tl.arange(0, KEYS))[:, None]
                seen = sees(tl.arange(0, QUERIES)[None, :], key, window, WINDOWED)
                weights = tl.where(seen, weights, 0.0)
            dout = rows_of(dout_rows, query, end, QUERIES, C, bare)
            dv = tl.dot(weights.to(dout.dtype), dout, dv)
            dscores = weights * (tl.dot(v, tl.trans(dout)) - delta[None, :])
            dk = tl.dot(dscores.to(q.dtype), q, dk)
    at, inside = places_of(start, end, groups, group, KEYS, C)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens", "heads", "shared", "window"])
def _queries_gradient(
    qkv,
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
    strides,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The gradient of a tile of queries of one head, over the keys before them."""
    q_ptr, k_ptr, v_ptr = qkv
    head, begin, end, start = tile_of(tiles_ptr, heads)
    q = rows_of(head_of(q_ptr, strides, 0, head), start, end, QUERIES, C, False)
    dout = rows_of(head_of(dout_ptr, strides, 3, head), start, end, QUERIES, C, False)
    lse, delta = _row_numbers(numbers_ptr + head * tokens, start, end, QUERIES, False)
    k_rows = head_of(k_ptr, strides, 1, head // shared)
    v_rows = head_of(v_ptr, strides, 2, head // shared)
    near, far = last_keys(begin, start, window, KEYS, WINDOWED)
    dq = tl.zeros([QUERIES, C], tl.float32)
    for masked in tl.static_range(WINDOWED, 2):
        first, count = run_of_keys(begin, near, far, start, end, QUERIES, KEYS, masked)
        for n in range(count):
            key = first + n * KEYS
            k = rows_of(k_rows, key, end, KEYS, C, not masked)
            v = rows_of(v_rows, key, end, KEYS, C, not masked)
            weights = tl.math.exp2(tl.dot(q, tl.trans(k)) * base_two_scale - lse[:, None])
            if masked:
                seen = sees_keys(start, key, window, QUERIES, KEYS, WINDOWED)
                weights = tl.where(seen, weights, 0.0)
            dscores = weights * (tl.dot(dout, tl.trans(v)) - delta[:, None])
            dq = tl.dot(dscores.to(k.dtype), k, dq)
    at, inside = places_of(start, end, heads, head, QUERIES, C)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


def row_numbers(dout_THC: Tensor, out_THC: Tensor, lse_HT: Tensor) -> Tensor:
    """Return two numbers of each query, as 64 bits: its log-sum-exp to base two, and its delta."""
    tokens, heads, channels = out_THC.shape
    numbers_HT2 = lse_HT.new_empty(heads, tokens, 2)
    _delta[(triton.cdiv(tokens, DELTA_BLOCK) * heads,)](
        *(out_THC, dout_THC, lse_HT, numbers_HT2, tokens, heads, strides_of(out_THC, dout_THC)),
        C=channels,
        BLOCK=DELTA_BLOCK,
        LOG2_E=LOG2_E,
        num_warps=4,
    )
    return numbers_HT2.view(torch.int64)[..., 0]


class Backward(NamedTuple):
    """The inputs that both gradients share."""

    qkv: Heads
    dout_THC: Tensor
    numbers_HT: Tensor
    """As from `row_numbers`."""
    scale: float
    window: int | None


def keys_gradient(given: Backward, tiles_N3: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values; the tiles have the size that the tiling says."""
    qkv, dout_THC, numbers_HT, scale, window = given
    (tokens, heads, channels), groups = qkv[0].shape, qkv[1].shape[1]
    dk_TGC, dv_TGC = (qkv[1].new_empty(tokens, groups, channels) for _ in range(2))
    _keys_gradient[(tiles_N3.shape[0] * groups,)](
        *(qkv, dout_THC, numbers_HT, tiles_N3, dk_TGC, dv_TGC, tokens, groups, heads // groups),
        *(scale, scale * LOG2_E, window or 0, strides_of(*qkv, dout_THC)),
        **tiling.options("KEYS", "QUERIES"),
        C=channels,
        WINDOWED=window is not None,
    )
    return dk_TGC, dv_TGC


def queries_gradient(given: Backward, tiles_N3: Tensor, tiling: Tiling) -> Tensor:
    """Return the gradient of queries; the tiles have the size that the tiling says."""
    qkv, dout_THC, numbers_HT, scale, window = given
    (tokens, heads, channels), shared = qkv[0].shape, qkv[0].shape[1] // qkv[1].shape[1]
    dq_THC = qkv[0].new_empty(tokens, heads, channels)
    _queries_gradient[(tiles_N3.shape[0] * heads,)](
        *(qkv, dout_THC, numbers_HT, tiles_N3, dq_THC, tokens, heads, shared),
        *(scale, scale * LOG2_E, window or 0, strides_of(*qkv, dout_THC)),
        **tiling.options("QUERIES", "KEYS"),
        C=channels,
        WINDOWED=window is not None,
    )
    return dq_THC
