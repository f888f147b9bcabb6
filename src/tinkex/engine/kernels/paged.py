"""Attention of decoding on a GPU, from the blocks where they are: a Triton kernel.

Import it only where Triton is installed.

One program per row and key/value head goes through the row's blocks and keeps a running softmax;
the query heads of the group are the rows of its products.

Axes: B rows, H query heads, G key/value heads, R query heads of a group, C channels, N blocks, S
positions of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_ROWS = 16
"""The least rows of a product on tensor cores."""


@triton.jit
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    positions_ptr,
    rule,
    strides,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    scale, window, softcap = rule
    q_row, q_head, kv_block, kv_position, kv_head, table_row = strides
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + row)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, C)
    s = tl.arange(0, S)
    q_at = row * q_row + (group * R + r)[:, None] * q_head + c[None, :]
    q = tl.load(q_ptr + q_at, mask=(r < R)[:, None], other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, C], tl.float32)
    first = tl.zeros([], tl.int64)
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // S
    for n in range(first, position // S + 1):
        block = tl.load(tables_ptr + row * table_row + n)
        base = block * kv_block + group * kv_head
        k = tl.load(k_ptr + base + s[None, :] * kv_position + c[:, None])
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        at = n * S + s
        seen = at <= position
        if WINDOWED:
            seen = seen & (at > position - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(v_ptr + base + s[:, None] * kv_position + c[None, :])
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = higher
    mixed = mixed / total[:, None]
    tl.store(out_ptr + q_at, mixed.to(out_ptr.dtype.element_ty), mask=(r < R)[:, None])


def paged_attention(
    q_BHC: Tensor,
    kv_2NSGC: Tensor,
    tables_BN: Tensor,
    positions_B: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the attention `[B, H*C]` of each row's query to its position and all before it."""
    q_BHC = q_BHC.contiguous()
    rows, heads, channels = q_BHC.shape
    size, groups = kv_2NSGC.shape[2:4]
    out_BHC = torch.empty_like(q_BHC)
    shared = heads // groups
    _decode[rows, groups](
        *(q_BHC, kv_2NSGC[0], kv_2NSGC[1], out_BHC, tables_BN, positions_B),
        (scale, window or 0, softcap or 1.0),
        (*q_BHC.stride()[:2], *kv_2NSGC.stride()[1:4], tables_BN.stride(0)),
        R=shared,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(shared)),
        C=channels,
        S=size,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        PRECISION="ieee" if q_BHC.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return out_BHC.view(rows, -1)
