"""Parts of the attention kernels that forward and gradients share.

Axes: T packed tokens, H heads, C channels.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

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
