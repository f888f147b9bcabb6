"""Run pieces of prompts by PyTorch.

Axes: T tokens of a pass, U tiles of queries, Q queries of a tile, S positions, N blocks of a row, K
keys of a pass, H query heads, G key/value heads, C channels of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import attend, flash, takes_packed, visible
from tinkex.engine.model.decoder import Decoder, Lora, hidden_states
from tinkex.engine.model.matmul_check import steady_batch
from tinkex.engine.sample.blocks import BLOCK, NOTHING, SCRATCH
from tinkex.engine.sample.passes import Piece, Pool, put, weigh
from tinkex.engine.sample.row_adapters import Products, RowAdapters, padded
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.tensors import Array

CUDA_TILE = 512
"""Queries attended at once on a GPU whose kernel cannot take whole prompts. A CPU takes a block of
them, so that the bits do not depend on more."""


class Prefill:
    """Runs pieces of prompts and leaves their keys and values in the pool."""

    def __init__(self, model: Decoder, pool: Pool, products: Products) -> None:
        self._model, self._pool, self._products = model, pool, products

    def hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the hidden states as `Prompts` says."""
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
    """Tiles of queries of several prompts that end at the same position and attend in one call."""

    rows_UQ: Tensor
    """Rows of the pass; those of a tile with fewer are repeated."""
    positions_UQ: Tensor
    tables_UN: Tensor
    taken: Tensor
    """The U*Q results that are no repetitions."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def bias(self, rule: AttentionRule, dtype: torch.dtype) -> Tensor:
        """Return 0 where a query sees a key, else -inf: `[U, Q, S]`, made once for each window."""
        if rule.window not in self.masks:
            seen = self.seen(rule)
            self.masks[rule.window] = torch.zeros(seen.shape, dtype=dtype).masked_fill_(
                ~seen, -torch.inf
            )
        return self.masks[rule.window]

    def seen(self, rule: AttentionRule) -> Tensor:
        """Return which keys a query sees, `[U, Q, S]`."""
        keys_S = torch.arange(self.tables_UN.shape[1] * BLOCK, device=self.rows_UQ.device)
        return visible(self.positions_UQ, keys_S, rule)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Pieces as packed sequences, each with all keys up to its end, for one call of a kernel.

    The padding of the pass is one more sequence, which is discarded.
    """

    places_K: Tensor
    bounds_q: Tensor
    bounds_k: Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, pieces: Sequence[Piece], total: int, device: torch.device) -> _Whole:
        """Make it for a pass of `total` tokens."""
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
    """Attention of pieces of prompts to all positions before them.

    One call of a kernel does it, or it goes by tiles on a fixed grid of positions.
    """

    def __init__(
        self, model: Decoder, pool: Pool, pieces: Sequence[Piece], places_T: Tensor
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

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        """Keep the keys and values, then attend."""
        self._pool.write(layer, self._places_T, k_TGC, v_TGC)
        rule = self._rules[layer]
        if takes_packed(q_THC, rule):
            return self._at_once(layer, q_THC, rule)
        mixed_TN = q_THC.new_zeros(q_THC.shape[0], q_THC.shape[1] * q_THC.shape[2])
        for tiles in self._tiles:
            k_USGC, v_USGC = self._pool.read(layer, tiles.tables_UN)
            q_UQHC = q_THC[tiles.rows_UQ]
            if self._exact:
                mixed = _by_products(q_UQHC, k_USGC, v_USGC, tiles, rule)
            else:
                mixed = attend(q_UQHC, k_USGC, v_USGC, tiles.seen(rule), rule)
            mixed = mixed.reshape(-1, mixed_TN.shape[1])
            mixed_TN[tiles.rows_UQ.view(-1)[tiles.taken]] = mixed[tiles.taken]
        return mixed_TN

    def _at_once(self, layer: int, q_THC: Tensor, rule: AttentionRule) -> Tensor:
        whole = self._whole
        k_KGC, v_KGC = self._pool.gather(layer, whole.places_K)
        keys = (whole.bounds_k, whole.longest_k)
        return flash(
            q_THC, k_KGC, v_KGC, whole.bounds_q, whole.longest_q, rule.scale, rule.window, keys
        )[0].flatten(1)


def _places(blocks: Sequence[int], positions: Array) -> Array:
    """Return the places of a sequence's positions in the pool."""
    places: Array = np.asarray(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    return places


def _by_products(
    q_UQHC: Tensor,
    k_USGC: Tensor,
    v_USGC: Tensor,
    tiles: _Tiles,
    rule: AttentionRule,
) -> Tensor:
    """Attend with the same arithmetic for every query, whatever their number.

    The heads of a group are rows of one product.
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
    """Return (piece, first row in the pass, first and last position) of every tile, by its end."""
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
    end: int, tile: int, units: Sequence[tuple[Piece, int, int, int]], like: Tensor
) -> _Tiles:
    starts, stops = (
        np.array(edges)[:, None] for edges in zip(*(unit[2:] for unit in units), strict=True)
    )
    # each query keeps its place: the bits of a product may depend on that and on the rows
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
