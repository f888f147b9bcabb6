"""The two kinds of pass a sampler makes: chunks of prompts, and one more token for every row.

Both write keys and values before they attend, layer by layer, so that a prompt can share blocks
with another of the same pass. How a position is summed up depends on that position alone: its keys
reach from 0 to the end of its block, what lies beyond it is masked, and numbers of rows are padded
(see `row_adapters`). Where a chunk is cut, which rows are neighbours and whether a prefix was found
therefore change no bit on a CPU.

Decoding comes in two forms. `SlabDecoding`, for a CPU, keeps a copy of each running row's keys and
values in one piece, because products read those where they lie. `StaticDecoding`, for a GPU, reads
blocks where they are, has fixed shapes, and is recorded as CUDA graphs; on a CPU it runs the same
code without them.

Axes: T tokens of a pass, B rows, U tiles of queries, Q queries of a tile, S positions, N blocks of
a row, H query heads, G key/value heads, R query heads of a group times queries, C channels of a
head, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import (
    attend,
    flash,
    soft_cap,
    takes_packed,
    trusted,
    visible,
    widened,
)
from tinkex.engine.model.decoder import BARE, Decoder, Lora, hidden_states
from tinkex.engine.model.matmul_check import are_batches_steady, steady_batch
from tinkex.engine.model.mlp import Adaptation
from tinkex.engine.sample.blocks import BLOCK, NOTHING, RESERVED, SCRATCH
from tinkex.engine.sample.kv_pool import Pool, zeros
from tinkex.engine.sample.row_adapters import Bank, Products, RowAdapters, padded, widest
from tinkex.engine.torch.device_copies import mark, to_device
from tinkex.engine.torch.openmp import Threads

if TYPE_CHECKING:
    from tinkex.types.tensors import Array

SMALLEST_SLAB = 128
FIRST_SLOTS = 32
"""Room in a new slab. It takes memory where rows lie, so that more costs little; making room later
means a copy."""
CUDA_TILE = 512
"""Queries attended at once in prefill on a GPU, where its kernel cannot take whole prompts; on a
CPU a block of them, so that the bits do not depend on more."""
KEPT_SLAB = 512 << 20
"""An empty slab of up to so many bytes is kept: to touch fresh memory takes longer than many a job.
"""
LONG_ATTENTION = 1 << 18
"""From so many numbers in a layer's keys on, a CPU attends with all threads."""
PROMPT_ROWS = (16, 64, 256)
"""Numbers of tokens of prompts that are run as rows; what is more is run in chunks."""
LEAST_RANKS = 32
KERNEL_WIDTH = 16
KERNEL_ERROR = 0.03
"""How far results of standard normal keys and values may lie apart, in bfloat16."""


@dataclass(eq=False, slots=True)
class Row:
    """A sequence being decoded: its weights, its blocks, how many positions they hold, and the
    token that is next.
    """

    lora: Lora
    weights: int
    blocks: list[int]
    length: int
    token: int = 0
    drawn: int = -1
    """Which of the tokens drawn last is next, if that has not been read; else -1."""
    place: tuple[int, int] = (0, 0)
    """The slab it lies in, by length, and the slot in that."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The positions `[start, stop)` of a prompt, to be run in one pass."""

    lora: Lora
    weights: int
    tokens: Array
    blocks: Sequence[int]
    start: int
    stop: int


def weigh(
    q_NRC: torch.Tensor,
    k_NSC: torch.Tensor,
    v_NSC: torch.Tensor,
    bias: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention by plain products; `bias` is 0 or -inf."""
    if rule.softcap is None:
        scores = torch.baddbmm(bias, q_NRC, k_NSC.transpose(1, 2), alpha=rule.scale)
    else:
        scores = (
            soft_cap(widened(torch.bmm(q_NRC * rule.scale, k_NSC.transpose(1, 2))), rule.softcap)
            + bias
        )
    return torch.bmm(scores.softmax(-1).to(v_NSC.dtype), v_NSC)


def put(array: Array | Sequence[int] | Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """Whole numbers, on the device of a tensor."""
    return to_device(array, like.device)


# --- Prefill
# -----------------------------------------------------------------------------------------------------


class Prompts(Protocol):
    """Runs pieces of prompts and leaves their keys and values in the pool."""

    def hidden(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The hidden states of all positions of the pieces, in order, which has equal weights side
        by side.
        """


class Prefill:
    """Runs pieces of prompts and leaves their keys and values in the pool."""

    def __init__(self, model: Decoder, pool: Pool, products: Products) -> None:
        self._model, self._pool, self._products = model, pool, products

    def hidden(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The hidden states of all positions of the pieces, in order, which has equal weights side
        by side.
        """
        count = sum(piece.stop - piece.start for piece in pieces)
        total = padded(count)
        tokens, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        places = np.full(total, SCRATCH * BLOCK, np.int64)
        lora_T: list[Lora] = []
        at = 0
        for piece in pieces:
            span = np.arange(piece.start, piece.stop)
            here = slice(at, at + span.size)
            tokens[here], positions[here] = piece.tokens[span], span
            places[here] = _places(piece.blocks, span)
            lora_T += [piece.lora] * span.size
            at += span.size
        embed = self._model.embed_VD
        attention = PrefillAttention(self._model, self._pool, pieces, put(places, embed))
        lora = RowAdapters.of(self._products, lora_T, total)
        return hidden_states(
            self._model, put(tokens, embed), put(positions, embed), attention, lora
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of queries that end at the same position, of several prompts: they attend in one call."""

    rows_UQ: torch.Tensor
    """Rows of the pass; those of a tile with fewer are repeated."""
    positions_UQ: torch.Tensor
    tables_UN: torch.Tensor
    taken: torch.Tensor
    """Which of the U*Q results are no repetitions."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def bias(self, rule: AttentionRule, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a key, else -inf: `[U, Q, S]`, made once for layers with the same
        window.
        """
        if rule.window not in self.masks:
            seen = self.seen(rule)
            self.masks[rule.window] = torch.zeros(seen.shape, dtype=dtype).masked_fill_(
                ~seen, -torch.inf
            )
        return self.masks[rule.window]

    def seen(self, rule: AttentionRule) -> torch.Tensor:
        """Which keys a query sees, `[U, Q, S]`."""
        keys_S = torch.arange(self.tables_UN.shape[1] * BLOCK, device=self.rows_UQ.device)
        return visible(self.positions_UQ, keys_S, rule)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Pieces as packed sequences, each with all keys up to its end: one call for them all, where a
    kernel takes that.

    What pads the pass is one more sequence, which nobody looks at.
    """

    places_K: torch.Tensor
    bounds_q: torch.Tensor
    bounds_k: torch.Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, pieces: Sequence[Piece], total: int, device: torch.device) -> _Whole:
        """For a pass of so many tokens."""
        queries = [piece.stop - piece.start for piece in pieces]
        places = [_places(piece.blocks, np.arange(piece.stop)) for piece in pieces]
        if rest := total - sum(queries):
            queries.append(rest)
            places.append(np.full(rest, SCRATCH * BLOCK))
        keys = [place.size for place in places]
        bounds_q, bounds_k = (
            to_device(np.cumsum([0, *sizes]), device, torch.int32) for sizes in (queries, keys)
        )
        return cls(
            to_device(np.concatenate(places), device), bounds_q, bounds_k, max(queries), max(keys)
        )


class PrefillAttention:
    """Attention of pieces of prompts to all that lies before them, at once or by tiles on a fixed
    grid of positions.
    """

    def __init__(
        self, model: Decoder, pool: Pool, pieces: Sequence[Piece], places_T: torch.Tensor
    ) -> None:
        self._rules, self._pool, self._places_T = model.attention, pool, places_T
        self._pieces = pieces
        self._exact = places_T.device.type == "cpu"

    @functools.cached_property
    def _tiles(self) -> list[_Tiles]:
        tile = BLOCK if self._exact else CUDA_TILE
        return [
            _tiles(end, tile, units, self._places_T)
            for end, units in _units(self._pieces, tile).items()
        ]

    @functools.cached_property
    def _whole(self) -> _Whole:
        return _Whole.of(self._pieces, self._places_T.shape[0], self._places_T.device)

    def __call__(
        self, layer: int, q_THC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor
    ) -> torch.Tensor:
        """Keep the keys and values, then attend."""
        self._pool.write(layer, self._places_T, k_TGC, v_TGC)
        rule = self._rules[layer]
        if takes_packed(q_THC, rule):
            return self._at_once(layer, q_THC, rule)
        mixed_TN = q_THC.new_zeros(q_THC.shape[0], q_THC.shape[1] * q_THC.shape[2])
        for tiles in self._tiles:
            k_USGC, v_USGC = self._pool.read(layer, tiles.tables_UN)
            q_UQHC = q_THC[tiles.rows_UQ]
            mix = _by_products if self._exact else _by_kernel
            mixed = mix(q_UQHC, k_USGC, v_USGC, tiles, rule).reshape(-1, mixed_TN.shape[1])
            mixed_TN[tiles.rows_UQ.view(-1)[tiles.taken]] = mixed[tiles.taken]
        return mixed_TN

    def _at_once(self, layer: int, q_THC: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        whole = self._whole
        k_KGC, v_KGC = self._pool.gather(layer, whole.places_K)
        keys = (whole.bounds_k, whole.longest_k)
        return flash(
            q_THC, k_KGC, v_KGC, whole.bounds_q, whole.longest_q, rule.scale, rule.window, keys
        )[0].flatten(1)


def _places(blocks: Sequence[int], positions: Array) -> Array:
    """Where positions of a sequence lie in the pool."""
    places: Array = np.asarray(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    return places


def _by_kernel(
    q_UQHC: torch.Tensor,
    k_USGC: torch.Tensor,
    v_USGC: torch.Tensor,
    tiles: _Tiles,
    rule: AttentionRule,
) -> torch.Tensor:
    return attend(q_UQHC, k_USGC, v_USGC, tiles.seen(rule), rule)


def _by_products(
    q_UQHC: torch.Tensor,
    k_USGC: torch.Tensor,
    v_USGC: torch.Tensor,
    tiles: _Tiles,
    rule: AttentionRule,
) -> torch.Tensor:
    """The same arithmetic for every query, however many there are: heads of a group are rows of one
    product.
    """
    units, queries, heads, channels = q_UQHC.shape
    positions, groups = k_USGC.shape[1:3]
    q = (
        q_UQHC.view(units, queries, groups, -1, channels)
        .permute(0, 2, 3, 1, 4)
        .reshape(units * groups, -1, channels)
    )
    k, v = (
        x.transpose(1, 2).reshape(units * groups, positions, channels) for x in (k_USGC, v_USGC)
    )
    bias_UQS = tiles.bias(rule, q.dtype)
    bias = (
        bias_UQS[:, None, None]
        .expand(-1, groups, heads // groups, -1, -1)
        .reshape(units * groups, -1, positions)
    )
    with steady_batch(units * groups):
        mixed = weigh(q, k, v, bias, rule)
    return mixed.view(units, groups, -1, queries, channels).permute(0, 3, 1, 2, 4)


def _units(pieces: Sequence[Piece], tile: int) -> dict[int, list[tuple[Piece, int, int, int]]]:
    """(piece, first row in the pass, first and last position) of every tile, by where the tile
    ends.
    """
    units: dict[int, list[tuple[Piece, int, int, int]]] = {}
    row = 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            end = (start // tile + 1) * tile
            stop = min(end, piece.stop)
            units.setdefault(end, []).append((piece, row, start, stop))
            row += stop - start
            start = stop
    return units


def _tiles(
    end: int, tile: int, units: Sequence[tuple[Piece, int, int, int]], like: torch.Tensor
) -> _Tiles:
    starts, stops = (
        np.array(edges)[:, None] for edges in zip(*(unit[2:] for unit in units), strict=True)
    )
    # every query at its own place: in a product, bits may depend on that and on the rows
    if like.device.type == "cpu":
        steps = np.arange(end - tile, end)
    else:
        steps = starts + np.arange(padded(int((stops - starts).max())))
    inside = np.clip(steps, starts, stops - 1) - starts
    tables = np.full((len(units), end // BLOCK), NOTHING, np.int64)
    for index, (piece, *_) in enumerate(units):
        known = piece.blocks[: end // BLOCK]
        tables[index, : len(known)] = known
    return _Tiles(
        put(inside + np.array([row for _, row, _, _ in units])[:, None], like),
        put(inside + starts, like),
        put(tables, like),
        put(np.flatnonzero((starts <= steps) & (steps < stops)), like),
    )


# --- Decoding
# ----------------------------------------------------------------------------------------------------


class Decoding(Protocol):
    """Gives every row its next logits."""

    ahead: bool
    """Whether a pass can be begun before the tokens of the one before have been read."""

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Take in a row, whose prompt lies in these blocks."""

    def leave(self, row: Row) -> None:
        """Let a row go."""

    def arrange(self, rows: list[Row]) -> list[Row]:
        """The order in which rows are to be decoded."""

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Feed each row its token, at the next position, and return the logits `[B, V]` behind it."""

    def keep(self, tokens_B: torch.Tensor) -> None:
        """Remember these tokens, for rows that go by their `drawn`."""

    def forget(self, weights: int) -> None:
        """Free what is kept of weights that rows have left."""


@dataclass(eq=False, slots=True)
class _Slab:
    """Keys and values of rows of like length, `[L, 2, slots, G, S, C]`; the first slots are in use,
    without gaps.
    """

    kv: torch.Tensor
    rows: list[Row]


class SlabDecoding:
    """Decoding on a CPU. Rows lie in slabs by length, of which each is a third or a half longer
    than the one before.

    Rows attend to all of their slab, what they have not reached being masked: the order in which a
    product sums up depends on how long it is, so that must not be for the neighbours to say.
    """

    ahead = False

    def __init__(self, model: Decoder, pool: Pool, products: Products) -> None:
        self._model, self._pool, self._products = model, pool, products
        self._slabs: dict[int, _Slab] = {}
        self._one_thread, self._all_threads = Threads(1), Threads(torch.get_num_threads())

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Copy the prompt's keys and values into a slot, which is taken last: there may be no
        memory for the others.
        """
        blocks = put(prompt, self._pool.kv)
        parts = self._pool.kv.index_select(2, blocks).flatten(2, 3)  # [L, 2, S, G, C]
        self._slot(row, row.length + 1)[..., : row.length, :] = parts[:, :, : row.length].transpose(
            2, 3
        )

    def leave(self, row: Row) -> None:
        """Close the gap that the row leaves; its own slot is zeroed, for what is masked must be
        finite.
        """
        length, slot = row.place
        slab = self._slabs[length]
        last = slab.rows.pop()
        if last is not row:
            slab.kv[:, :, slot] = slab.kv[:, :, last.place[1]]
            slab.rows[slot] = last
            last.place = (length, slot)
        # with what a pass that failed may have written
        slab.kv[:, :, len(slab.rows), :, : last.length + 1] = 0
        if not slab.rows and slab.kv.nbytes > KEPT_SLAB:
            del self._slabs[length]

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Equal weights side by side, and within them as they lie."""
        for row in rows:
            if row.length == row.place[0]:
                self._move(row)
        return sorted(rows, key=lambda row: (row.weights, row.place))

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decode one token of each row."""
        total, embed = padded(len(rows)), self._model.embed_VD
        tokens, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        tokens[: len(rows)], positions[: len(rows)] = (
            [r.token for r in rows],
            [r.length for r in rows],
        )
        lora = RowAdapters.of(self._products, [row.lora for row in rows], total)
        attention = _SlabAttention(self._model, self._slabs, rows, total, self._all_threads)
        # but for the products and long attention, waking another takes longer than the work
        with self._one_thread:
            hidden_TD = hidden_states(
                self._model, put(tokens, embed), put(positions, embed), attention, lora
            )
            for row in rows:
                row.length += 1
            return self._model.logits(hidden_TD, lora)[: len(rows)]

    def keep(self, tokens_B: torch.Tensor) -> None:
        """Tokens are always read at once."""

    def forget(self, weights: int) -> None:
        """Nothing is kept of weights."""

    def _slot(self, row: Row, length: int) -> torch.Tensor:
        """Room for a row of at least this length: `[L, 2, G, S, C]`."""
        size = _slab_size(length)
        layers, _, _, _, groups, channels = self._pool.shape
        slab = self._slabs.get(size)
        if slab is None:
            slab = _Slab(zeros((layers, 2, FIRST_SLOTS, groups, size, channels), self._pool.kv), [])
            self._slabs[size] = slab
        elif len(slab.rows) == slab.kv.shape[2]:
            slab.kv = torch.cat([slab.kv, torch.zeros_like(slab.kv)], dim=2)
        row.place = (size, len(slab.rows))
        slab.rows.append(row)
        return slab.kv[:, :, row.place[1]]

    def _move(self, row: Row) -> None:
        """To the slab of longer rows; if there is no memory for it, the row is still where it was."""
        size, slot = before = row.place
        self._slot(row, size + 1)[..., :size, :] = self._slabs[size].kv[:, :, slot]
        after, row.place = row.place, before
        self.leave(row)
        row.place = after


def _slab_size(length: int) -> int:
    """The least of 2, 3, 4, 6, 8, 12 … halves of the smallest that has room."""
    size = SMALLEST_SLAB
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


class _SlabAttention:
    """Attention of one new position of each row to what lies in its slot."""

    def __init__(
        self,
        model: Decoder,
        slabs: dict[int, _Slab],
        rows: Sequence[Row],
        total: int,
        threads: Threads,
    ) -> None:
        self._rules, self._total = model.attention, total
        index = {id(row): at for at, row in enumerate(rows)}
        self._parts = [
            _SlabPart(slab, [index[id(row)] for row in slab.rows], threads)
            for slab in slabs.values()
            if slab.rows
        ]
        self._plain = (
            len(self._parts) == 1 and isinstance(self._parts[0].rows, slice) and total == len(rows)
        )

    def __call__(
        self, layer: int, q_THC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor
    ) -> torch.Tensor:
        """Keep the keys and values, then attend, slab by slab."""
        rule = self._rules[layer]
        if self._plain:
            return self._parts[0].attend(layer, q_THC, k_TGC, v_TGC, rule)
        mixed_TN = q_THC.new_zeros(self._total, q_THC.shape[1] * q_THC.shape[2])
        for part in self._parts:
            rows = part.rows
            mixed_TN[rows] = part.attend(layer, q_THC[rows], k_TGC[rows], v_TGC[rows], rule)
        return mixed_TN


class _SlabPart:
    """The rows of a pass that lie in one slab."""

    def __init__(self, slab: _Slab, order: list[int], threads: Threads) -> None:
        straight = range(order[0], order[0] + len(order))
        self.rows = (
            slice(straight.start, straight.stop) if order == list(straight) else torch.tensor(order)
        )
        """Where they are in the pass, in the order of their slots."""
        self._slab = slab
        groups, size, channels = slab.kv.shape[3:]
        positions = np.array([row.length for row in slab.rows])
        # a single product may be split among threads, which shows in its last bits
        several = len(order) * groups
        is_long = several > 1 and several * size * channels >= LONG_ATTENTION
        self._threads = threads if is_long and are_batches_steady(threads.count) else nullcontext()
        heads = np.arange(len(order) * groups)
        self._places = torch.from_numpy(heads * size + positions.repeat(groups))
        self._positions_B1 = torch.from_numpy(positions)[:, None]
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q_BHC: torch.Tensor,
        k_BGC: torch.Tensor,
        v_BGC: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Query heads of a group read its keys where they lie."""
        count, groups, channels = k_BGC.shape
        keys, values = (part.view(-1, channels) for part in self._slab.kv[layer])
        keys.index_copy_(0, self._places, k_BGC.reshape(-1, channels))
        values.index_copy_(0, self._places, v_BGC.reshape(-1, channels))
        size, used = self._slab.kv.shape[4], count * groups
        k, v = (x.view(-1, size, channels)[:used] for x in (keys, values))
        q = q_BHC.reshape(used, -1, channels)
        with self._threads:
            return weigh(q, k, v, self._bias(rule, groups, q.shape[1], q.dtype), rule).view(
                count, -1
            )

    def _bias(
        self, rule: AttentionRule, groups: int, queries: int, dtype: torch.dtype
    ) -> torch.Tensor:
        if rule.window not in self._biases:
            seen_B1S = visible(self._positions_B1, torch.arange(self._slab.kv.shape[4]), rule)
            bias = torch.zeros(seen_B1S.shape, dtype=dtype).masked_fill_(~seen_B1S, -torch.inf)
            # Written out, because it is what products begin with, and a copy in one piece is the
            # quickest.
            self._biases[rule.window] = bias.repeat_interleave(groups, dim=0).repeat(1, queries, 1)
        return self._biases[rule.window]


class StaticDecoding:
    """Decoding with fixed shapes: numbers of rows and of blocks are rounded up, and each pair of
    them is recorded once.

    A row of padding writes to a block of its own kind and reads zeros. The tokens of a pass stay on
    the device for the next one, which can be begun while the host still looks at them.
    """

    ahead = True

    def __init__(self, model: Decoder, pool: Pool, most_rows: int) -> None:
        self._model, self._pool = model, pool
        self._bank = Bank(model, 0)
        self._kernel = find_kernel(model, pool)
        self._drawn = torch.zeros(most_rows, dtype=torch.int64, device=pool.kv.device)
        self._shapes: dict[tuple[int, int, int], _Shape] = {}
        self._seated = 0
        self._decoded: dict[int, Lora] = {}
        """The adapters of the rows that were decoded last, while there are any."""
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    @property
    def _captures(self) -> bool:
        """Whether passes are recorded; those of experts cannot be, for who gets which token is
        known only then.
        """
        return self._pool.kv.device.type == "cuda" and self._model.is_dense

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Give the row its own copy of the block in which the prompt ends."""
        if row.length % BLOCK:
            self._pool.copy(prompt[-1], row.blocks[len(prompt) - 1])
        self._seated += 1

    def leave(self, row: Row) -> None:
        """Nothing is kept besides the blocks, and the last rows' adapters."""
        self._seated -= 1
        if not self._seated:
            self._decoded = {}

    def arrange(self, rows: list[Row]) -> list[Row]:
        """As they are."""
        return rows

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decode one token of each row."""
        self._decoded = {row.weights: row.lora for row in rows}
        logits_BV = self._run(rows, _rounded(len(rows)))[1]
        for row in rows:
            row.length += 1
        return logits_BV

    def hidden(self, rows: Sequence[Row]) -> torch.Tensor:
        """What the head reads, for positions of prompts: rows that see each other if they share
        blocks.
        """
        size = next(size for size in PROMPT_ROWS if size >= len(rows))
        return self._run(rows, size)[0]

    def _run(self, rows: Sequence[Row], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        adapters = self._place(rows)
        width = self._width(max(len(row.blocks) for row in rows))
        shape = self._shapes.get((size, width, adapters))
        if shape is None:
            bank = _banked(self._bank, adapters)
            shape = _Shape(self._model, self._pool, bank, self._kernel, self._drawn, size, width)
            self._shapes[size, width, adapters] = shape
            shape.fill(rows)
            if self._memory is not None:
                shape.record(self._memory)
        else:
            shape.fill(rows)
        hidden_BD, logits_BV = shape.run()
        return hidden_BD[: len(rows)], logits_BV[: len(rows)]

    def keep(self, tokens_B: torch.Tensor) -> None:
        """On the device."""
        self._drawn[: tokens_B.shape[0]] = tokens_B

    def forget(self, weights: int) -> None:
        """The next pass writes over them in the bank."""

    def _width(self, blocks: int) -> int:
        """Room in the tables: the kernel reads what a row has, so few widths do; plain attention
        reads it all.
        """
        if self._kernel is None:
            return _rounded(blocks)
        width = KERNEL_WIDTH
        while width < blocks:
            width *= 4
        return width

    def _place(self, rows: Sequence[Row]) -> int:
        """See that the adapters of these rows are in the bank; 0 if there are none, 1 if all have
        one, else 2.

        Those of the rows that were decoded last stay: prompts run in between.
        """
        own = {row.weights: row.lora for row in rows}
        if not any(lora.factors for lora in own.values()):
            return 0
        adapters = {number: lora for number, lora in (self._decoded | own).items() if lora.factors}
        if not self._bank.place(adapters):
            ranks = sum(map(widest, adapters.values()))
            self._shapes = {key: shape for key, shape in self._shapes.items() if not key[2]}
            if self._memory is not None:  # one whose graphs are all gone cannot be used again
                self._memory = torch.cuda.graph_pool_handle()
            self._bank = Bank(self._model, max(LEAST_RANKS, 2 * self._bank.ranks, _rounded(ranks)))
            self._bank.place(adapters)
        return 1 if len(own) == len(adapters) == 1 else 2


Banked: TypeAlias = Callable[[torch.Tensor], Adaptation]
"""The adaptation of rows that belong to the adapters of these numbers."""


def _banked(bank: Bank, adapters: int) -> Banked:
    """With no adapter, one for all rows, or several."""
    if adapters == 0:
        return lambda _: BARE
    return (lambda _: bank.whole()) if adapters == 1 else bank.share


@dataclass(eq=False, slots=True)
class _Host:
    """Inputs of a pass, where the device copies them from."""

    values: torch.Tensor
    copied: torch.cuda.Event | None = None
    """When it has done so last."""


class _Shape:
    """A pass over a fixed number of rows with room for a fixed number of blocks: its inputs, and
    its graph.
    """

    def __init__(
        self,
        model: Decoder,
        pool: Pool,
        bank: Banked,
        kernel: Kernel | None,
        drawn: torch.Tensor,
        rows: int,
        width: int,
    ) -> None:
        self._model, self._pool, self._bank, self._kernel, self._drawn = (
            model,
            pool,
            bank,
            kernel,
            drawn,
        )
        pinned = pool.kv.device.type == "cuda"
        # Two, in turn: what is being filled may not be what the device is still to copy.
        self._hosts = [
            _Host(torch.zeros(rows, 5 + width, dtype=torch.int64, pin_memory=pinned))
            for _ in range(2)
        ]
        self._inputs = torch.zeros(rows, 5 + width, dtype=torch.int64, device=pool.kv.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, rows: Sequence[Row]) -> None:
        """Put tokens, positions, places, adapters and tables where the pass reads them."""
        self._hosts.reverse()
        # passes that draw nothing are waited for nowhere else
        if (copied := self._hosts[0].copied) is not None:
            copied.synchronize()
        host = self._hosts[0].values.numpy()
        host[:] = 0
        host[:, 2], host[:, 4] = SCRATCH * BLOCK, -1
        for at, row in enumerate(rows):
            place = row.blocks[row.length // BLOCK] * BLOCK + row.length % BLOCK
            host[at, : 5 + len(row.blocks)] = (
                row.token,
                row.length,
                place,
                row.weights,
                row.drawn,
                *row.blocks,
            )
        self._inputs.copy_(self._hosts[0].values, non_blocking=True)
        self._hosts[0].copied = mark(self._inputs.device)

    def record(self, memory: Any) -> None:
        """Record the pass as a CUDA graph; it is run twice before, as libraries want it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._pass()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may be copying weights to the host (copies.to_host_beside), which does not
        # concern the graph.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._outputs = self._pass()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads, and its logits `[B, V]`; under a graph they are overwritten by the
        next run.
        """
        if self._graph is None or self._outputs is None:
            return self._pass()
        self._graph.replay()
        return self._outputs

    def _pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_B, positions_B, places_B, weights_B, drawn_B = self._inputs[:, :5].unbind(1)
        tokens_B = torch.where(drawn_B < 0, tokens_B, self._drawn[drawn_B.clamp_min(0)])
        attention = _BlockAttention(
            self._model.attention,
            self._pool,
            self._kernel,
            self._inputs[:, 5:],
            positions_B,
            places_B,
        )
        lora = self._bank(weights_B)
        hidden_BD = hidden_states(self._model, tokens_B, positions_B, attention, lora)
        return hidden_BD, self._model.logits(hidden_BD, lora)


class ShortPrompts:
    """Prompts where decoding has fixed shapes: a few tokens are run as rows of a pass that has been
    recorded.

    The host takes longer to start a pass of prefill, kernel after kernel, than the device to run a
    short one.
    """

    def __init__(self, prefill: Prefill, decoding: StaticDecoding) -> None:
        self._prefill, self._decoding = prefill, decoding

    def hidden(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """As `Prefill.hidden`."""
        if sum(piece.stop - piece.start for piece in pieces) > PROMPT_ROWS[-1]:
            return self._prefill.hidden(pieces)
        rows = [
            Row(piece.lora, piece.weights, list(piece.blocks), position, token)
            for piece in pieces
            for position, token in enumerate(
                piece.tokens[piece.start : piece.stop].tolist(), piece.start
            )
        ]
        return self._decoding.hidden(rows)


class _BlockAttention:
    """Attention of one new position of each row to the blocks of its table, by the kernel or by
    plain means.
    """

    def __init__(
        self,
        rules: Sequence[AttentionRule],
        pool: Pool,
        kernel: Kernel | None,
        tables_BN: torch.Tensor,
        positions_B: torch.Tensor,
        places_B: torch.Tensor,
    ) -> None:
        self._rules, self._pool, self._kernel = rules, pool, kernel
        self._tables_BN, self._places_B = tables_BN.contiguous(), places_B.contiguous()
        self._positions_B = positions_B.contiguous()
        self._masks: dict[int | None, torch.Tensor] = {}

    def __call__(
        self, layer: int, q_BHC: torch.Tensor, k_BGC: torch.Tensor, v_BGC: torch.Tensor
    ) -> torch.Tensor:
        """Keep the keys and values, then attend."""
        self._pool.write(layer, self._places_B, k_BGC, v_BGC)
        rule = self._rules[layer]
        if self._kernel is None:
            return self._gathered(layer, q_BHC, rule)
        kv_2NSGC, softcap = self._pool.kv[layer], rule.softcap
        return self._kernel(
            q_BHC, kv_2NSGC, self._tables_BN, self._positions_B, rule.scale, rule.window, softcap
        )

    def _gathered(self, layer: int, q_BHC: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Over a copy of the blocks: the heads of a group are queries of one sequence."""
        k_BSGC, v_BSGC = self._pool.read(layer, self._tables_BN)
        count, _, groups, channels = k_BSGC.shape
        q_BRGC = q_BHC.view(count, groups, -1, channels).transpose(1, 2)
        seen = self._seen(rule).expand(-1, q_BRGC.shape[1], -1)
        mixed = attend(q_BRGC, k_BSGC, v_BSGC, seen, rule)
        return mixed.view(count, -1, groups, channels).transpose(1, 2).reshape(count, -1)

    def _seen(self, rule: AttentionRule) -> torch.Tensor:
        if rule.window not in self._masks:
            keys_S = torch.arange(self._tables_BN.shape[1] * BLOCK, device=self._tables_BN.device)
            self._masks[rule.window] = visible(self._positions_B[:, None], keys_S, rule)
        return self._masks[rule.window]


Kernel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None, float | None],
    torch.Tensor,
]
"""Attention from blocks, as `paged_kernel.paged_attention` does it."""


def find_kernel(model: Decoder, pool: Pool) -> Kernel | None:
    """The kernel, if Triton is here and it gives what plain attention gives on the heads of this
    model.
    """
    config = model.config
    if (
        pool.kv.device.type != "cuda"
        or config.head_dim & (config.head_dim - 1)
        or config.head_dim < 16
    ):
        return None

    def measured() -> tuple[Kernel, float]:
        from tinkex.engine.kernels.paged import paged_attention

        return paged_attention, _kernel_error(paged_attention, model)

    kernel: Kernel | None = trusted("decoding", measured, KERNEL_ERROR)
    return kernel


def _kernel_error(kernel: Kernel, model: Decoder) -> float:
    """How far the kernel is from plain attention, for a few rows of different lengths."""
    pool, config = Pool(model, 6), model.config
    generator = torch.Generator(pool.kv.device).manual_seed(0)
    for block in range(RESERVED, RESERVED + 6):
        pool.kv[:, :, block].normal_(generator=generator)
    tables_BN = put([[2, 3, 4], [5, 6, NOTHING], [7, NOTHING, NOTHING]], pool.kv)
    positions_B = put([3 * BLOCK - 2, BLOCK, 5], pool.kv)
    q_BHC = pool.kv.new_empty(3, config.heads, config.head_dim).normal_(generator=generator)
    worst = 0.0
    for layer in range(config.layers):
        rule = model.attention[layer]
        plain = _BlockAttention(model.attention, pool, None, tables_BN, positions_B, positions_B)
        expected = plain._gathered(layer, q_BHC, rule)
        got = kernel(
            q_BHC, pool.kv[layer], tables_BN, positions_B, rule.scale, rule.window, rule.softcap
        )
        worst = max(worst, float((got - expected).abs().max()))
    return worst


def _rounded(number: int) -> int:
    """Up to a power of two or the middle between two."""
    power = 1
    while power < number:
        if power >= 8 and power * 3 // 2 >= number:
            return power * 3 // 2
        power *= 2
    return power
