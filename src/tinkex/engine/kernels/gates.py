"""Kernels for accelerators, in Triton: what compilers make poorly of two halves of one tensor.

A program takes one token. Everything is computed in float32 and rounded once. Imported only where
there is an accelerator; `elementwise.py` has the same formulas for everywhere else, and the tests
hold these against them.

Axes: T packed tokens, F mlp, H query heads, G key/value heads, C channels of a head, N = (H + 2 G)
C.
"""

from __future__ import annotations

import functools

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
        slope = share + gate * share * (1 - share) * 2 * 0.7978845608028654 * (
            1 + 3 * 0.044715 * gate * gate
        )
    else:
        share = tl.sigmoid(gate)
        slope = share * (1 + gate * (1 - share))
    tl.store(out + row * 2 * F + at, (grad * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(
        out + row * 2 * F + F + at, (grad * gate * share).to(out.dtype.element_ty), mask=inside
    )


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
    _gate_backward[grid](
        dy_TF.contiguous(), gate_up_TN, out, width, BLOCK=GATE_BLOCK, GELU=activation != "silu"
    )
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
        pull = (
            (tl.sum(back_first * first, axis=1) + tl.sum(back_second * second, axis=1))
            / size
            * scale
            * scale
        )
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
    _turned(
        source + H * size,
        k + row * G * size,
        k_weight,
        turn_cos,
        turn_sin,
        eps,
        G,
        G_PADDED,
        HALF,
        NORM,
    )


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
    _turned_gradient(
        dq + row * H * size, qkv + start, out + start, q_weight, c, s, eps, H, H_PADDED, HALF, NORM
    )
    keys = start + H * size
    _turned_gradient(
        dk + row * G * size, qkv + keys, out + keys, k_weight, c, s, eps, G, G_PADDED, HALF, NORM
    )
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


# ── shares of adapters ────────────────────────────────────────────────────────────────────────────

SHARE_ROWS = 64


@triton.jit
def _add_product(
    y,
    left,
    right,
    scale,
    T,
    N,
    y_row,
    left_row,
    right_column,
    right_rank,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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


def add_product(
    y_TN: torch.Tensor, low_TR: torch.Tensor, high_RN: torch.Tensor, scale: float
) -> None:
    """Add the scaled product of two low-rank factors: one pass over y, which is all that it costs."""
    (rows, columns), rank = y_TN.shape, low_TR.shape[1]
    # measured: with these it moves 85 to 95 % of what a plain pass over y does
    wide = 64 if rank <= 32 else 128
    _add_product[(triton.cdiv(columns, wide), triton.cdiv(rows, SHARE_ROWS))](
        *(y_TN, low_TR, high_RN, scale, rows, columns, y_TN.stride(0), low_TR.stride(0)),
        *(high_RN.stride(1), high_RN.stride(0)),
        R=rank,
        R_PADDED=max(16, triton.next_power_of_2(rank)),
        ROWS=SHARE_ROWS,
        COLUMNS=wide,
        num_warps=4,
    )


# ── gates of a projection whose shares have not been added yet ────────────────────────────────────

TILE = 64
TILES = 8
"""So many tiles of rows are one program's, under each other: it reads its part of B once, and the
next tile ahead."""


@triton.jit
def _gate_tile(
    y,
    low,
    high,
    scale,
    row,
    column,
    rank,
    T,
    F,
    y_row,
    low_row,
    R: tl.constexpr,
    PART: tl.constexpr,
):
    """One half of the projection: what the base weights gave, and the adapter's share of it."""
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
    y,
    low,
    gate_high,
    up_high,
    out,
    scale,
    T,
    F,
    y_row,
    low_row,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    BACKWARD: tl.constexpr,
):
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
        gate = _gate_tile(y, low, gate_right, scale, row, column, rank, T, F, y_row, low_row, R, 0)
        up = _gate_tile(y, low, up_right, scale, row, column, rank, T, F, y_row, low_row, R, 1)
        if GELU:  # gate * sigmoid(2 inner) is the tanh form
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            share = tl.sigmoid(2 * inner)
        else:
            share = tl.sigmoid(gate)
        at = row[:, None] * F + column[None, :]
        if BACKWARD:
            grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            if GELU:
                slope = share + gate * share * (1 - share) * 2 * 0.7978845608028654 * (
                    1 + 3 * 0.044715 * gate * gate
                )
            else:
                slope = share * (1 + gate * (1 - share))
            to = out + row[:, None] * y_row + column[None, :]
            tl.store(to, (grad * up * slope).to(kind), mask=inside)
            tl.store(to + F, (grad * gate * share).to(kind), mask=inside)
        else:
            tl.store(out + at, (gate * share * up).to(kind), mask=inside)


def shared_gate(
    y_TN: torch.Tensor,
    low_TR: torch.Tensor,
    high_FR: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    activation: str,
    out: torch.Tensor,
    dy_TF: torch.Tensor | None = None,
) -> None:
    """activation(gate) * up of a projection to which an adapter's share is added on the way, or its
    gradient.

    The sum is never written: that saves a pass over the widest activations there are.
    """
    (rows, both), rank = y_TN.shape, high_FR[0].shape[1]
    width, padded = both // 2, max(16, triton.next_power_of_2(rank))
    _shared_gate[(triton.cdiv(width, TILE), triton.cdiv(rows, TILES * TILE))](
        *(out if dy_TF is None else dy_TF, y_TN, low_TR, *high_FR, out, scale, rows, width),
        *(y_TN.stride(0), low_TR.stride(0)),
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
    """How many tiles lie in shared memory at a time: three where there is then room for two
    programs, else two.
    """
    known = torch.cuda.get_device_properties(device)
    # older versions of PyTorch do not say
    room = getattr(known, "shared_memory_per_multiprocessor", 0)
    tile, factors = 2 * TILE * (3 * TILE + 2 * rank), 2 * 2 * TILE * rank
    if 2 * (factors + 3 * tile) <= room:
        return 3
    return 2 if factors + 2 * tile <= room else 1


# ── keys and values ───────────────────────────────────────────────────────────────────────────────


@triton.jit
def _store(
    k,
    v,
    keys,
    values,
    places,
    k_row,
    k_head,
    v_row,
    v_head,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
):
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


def store(
    kv_2NSGC: torch.Tensor, places_T: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor
) -> None:
    """Put keys and values of tokens at their places in the cache of a layer."""
    rows, groups, channels = k_TGC.shape
    if k_TGC.stride(2) != 1 or v_TGC.stride(2) != 1:
        k_TGC, v_TGC = k_TGC.contiguous(), v_TGC.contiguous()
    _store[(rows,)](
        *(k_TGC, v_TGC, kv_2NSGC[0], kv_2NSGC[1], places_T.contiguous()),
        *(k_TGC.stride(0), k_TGC.stride(1), v_TGC.stride(0), v_TGC.stride(1)),
        G=groups,
        G_PADDED=triton.next_power_of_2(groups),
        C=channels,
        C_PADDED=triton.next_power_of_2(channels),
    )


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────


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
    wide = tl.load(x + row * D + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if HAS_REST:
            wide += tl.load(rest + row * D + at, mask=inside, other=0.0).to(tl.float32)
        wide += tl.load(share + row * D + at, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(kind)
        tl.store(summed + row * D + at, rounded, mask=inside)
        if HAS_LEFT:
            tl.store(left + row * D + at, (wide - rounded.to(tl.float32)).to(kind), mask=inside)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + at, (wide * scale * w).to(kind), mask=inside)


@triton.jit
def _norm_backward(dsummed, dy, x, weight, out, D, eps, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    wide = tl.load(x + row * D + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * D + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    pull = scale * scale * tl.sum(g * wide, axis=0) / D
    dx = scale * (g - wide * pull)
    if ADD:
        dx += tl.load(dsummed + row * D + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + at, dx.to(out.dtype.element_ty), mask=inside)


def norm_forward(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm."""
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
    x_TD: torch.Tensor,
    rest_TD: torch.Tensor | None,
    share_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A sum, what rounding cut off it, if it is rounded, and the norm of both."""
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
    dsummed_TD: torch.Tensor | None,
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The gradient by what was normed, and what comes through the sum besides, if there was one."""
    out = torch.empty_like(x_TD)
    added = x_TD if dsummed_TD is None else dsummed_TD.contiguous()
    _norm_backward[(x_TD.shape[0],)](
        added,
        dy_TD.contiguous(),
        x_TD,
        weight_D,
        out,
        x_TD.shape[1],
        eps,
        **_row(x_TD),
        ADD=dsummed_TD is not None,
    )
    return out


def _row(x_TD: torch.Tensor) -> dict[str, object]:
    block = triton.next_power_of_2(x_TD.shape[1])
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


# ── the head ──────────────────────────────────────────────────────────────────────────────────────

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
        # A lane that has seen nothing but -inf adds nothing, and -inf less -inf is no number.
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


def log_sums(logits_TV: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of exponentials of each row, in one pass over it."""
    out = torch.empty(logits_TV.shape[0], 1, dtype=torch.float32, device=logits_TV.device)
    _log_sums[(logits_TV.shape[0],)](
        logits_TV, out, logits_TV.shape[1], BLOCK=HEAD_BLOCK, num_warps=8
    )
    return out


def softmax_gradient(
    logits_TV: torch.Tensor, sums_T1: torch.Tensor, row_grad_T1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Less softmax times a number for each row."""
    rows, vocab = logits_TV.shape
    out = torch.empty(logits_TV.shape, dtype=dtype, device=logits_TV.device)
    grid = (rows, triton.cdiv(vocab, HEAD_BLOCK))
    _softmax_gradient[grid](
        logits_TV, sums_T1, row_grad_T1.float(), out, vocab, BLOCK=HEAD_BLOCK, num_warps=8
    )
    return out
