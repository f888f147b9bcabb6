"""Decode on a CPU by PyTorch, from slabs of keys and values.

Axes: T tokens of a pass, B rows, S positions, G key/value heads, C channels of a head, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import visible
from tinkex.engine.model.decoder import Decoder, hidden_states
from tinkex.engine.model.matmul_check import are_batches_steady
from tinkex.engine.sample.passes import Decoding, Pool, Row, put, weigh, zeros
from tinkex.engine.sample.row_adapters import Products, RowAdapters, padded
from tinkex.engine.torch.openmp import Threads

SMALLEST_SLAB = 128
FIRST_SLOTS = 32
"""Slots of a new slab. Only used ones take memory, and adding more means a copy."""
KEPT_SLAB = 512 << 20
"""The largest empty slab that is kept, in bytes: the first use of memory is slow."""
LONG_ATTENTION = 1 << 18
"""The least numbers in a layer's keys for which a CPU attends with all threads."""


@dataclass(eq=False, slots=True)
class _Slab:
    """Keys and values of rows of similar length, `[L, 2, slots, G, S, C]`; used slots are first."""

    kv: Tensor
    rows: list[Row]


class SlabDecoding(Decoding):
    """Decoding on a CPU. Rows are in slabs by length; each slab is a third or a half longer.

    Rows attend to all of their slab, with later positions masked: the order of a product's sums
    depends on its length, which must not depend on the neighbours.
    """

    def __init__(self, model: Decoder, pool: Pool, products: Products) -> None:
        super().__init__(pool)
        self._model, self._products = model, products
        self._slabs: dict[int, _Slab] = {}
        self._one_thread, self._all_threads = Threads(1), Threads(torch.get_num_threads())

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Copy the prompt's keys and values into a slot, taken last: memory may run out before."""
        blocks = put(prompt, self._pool.kv)
        parts = self._pool.kv.index_select(2, blocks).flatten(2, 3)  # [L, 2, S, G, C]
        self._slot(row, row.length + 1)[..., : row.length, :] = parts[:, :, : row.length].transpose(
            2, 3
        )

    def leave(self, row: Row) -> None:
        """Close the gap that the row leaves, and zero its slot: masked values must be finite."""
        length, slot = row.place
        slab = self._slabs[length]
        last = slab.rows.pop()
        if last is not row:
            slab.kv[:, :, slot] = slab.kv[:, :, last.place[1]]
            slab.rows[slot] = last
            last.place = (length, slot)
        # including the position that a failed pass may have written
        slab.kv[:, :, len(slab.rows), :, : last.length + 1] = 0
        if not slab.rows and slab.kv.nbytes > KEPT_SLAB:
            del self._slabs[length]

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Return the order of decoding: by weights, then by place."""
        for row in rows:
            if row.length == row.place[0]:
                self._move(row)
        return sorted(rows, key=lambda row: (row.weights, row.place))

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Decode one token of each row."""
        total, embed = padded(len(rows)), self._model.embed_VD
        tokens, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        tokens[: len(rows)], positions[: len(rows)] = (
            [r.token for r in rows],
            [r.length for r in rows],
        )
        lora = RowAdapters.of(self._products, [row.lora for row in rows], total)
        attention = _SlabAttention(self._model, self._slabs, rows, total, self._all_threads)
        # except for products and long attention, waking another thread takes longer than the work
        with self._one_thread:
            hidden_TD = hidden_states(
                self._model, put(tokens, embed), put(positions, embed), attention, lora
            )
            for row in rows:
                row.length += 1
            return self._model.logits(hidden_TD, lora)[: len(rows)]

    def _slot(self, row: Row, length: int) -> Tensor:
        """Return room for a row of at least this length: `[L, 2, G, S, C]`."""
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
        """Move a row to the slab of longer rows; without memory for it, the row stays in place."""
        size, slot = before = row.place
        self._slot(row, size + 1)[..., :size, :] = self._slabs[size].kv[:, :, slot]
        after, row.place = row.place, before
        self.leave(row)
        row.place = after


def _slab_size(length: int) -> int:
    """Return the least of 2, 3, 4, 6, 8, 12 … halves of the smallest slab that has room."""
    size = SMALLEST_SLAB
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


class _SlabAttention:
    """Attention of one new position of each row to its slot."""

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

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
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
        """Their places in the pass, in the order of their slots."""
        self._slab = slab
        groups, size, channels = slab.kv.shape[3:]
        positions = np.array([row.length for row in slab.rows])
        # threads may split a single product, which changes its last bits
        several = len(order) * groups
        is_long = several > 1 and several * size * channels >= LONG_ATTENTION
        self._threads = threads if is_long and are_batches_steady(threads.count) else nullcontext()
        heads = np.arange(len(order) * groups)
        self._places = torch.from_numpy(heads * size + positions.repeat(groups))
        self._positions_B1 = torch.from_numpy(positions)[:, None]
        self._biases: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        q_BHC: Tensor,
        k_BGC: Tensor,
        v_BGC: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
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

    def _bias(self, rule: AttentionRule, groups: int, queries: int, dtype: torch.dtype) -> Tensor:
        if rule.window not in self._biases:
            seen_B1S = visible(self._positions_B1, torch.arange(self._slab.kv.shape[4]), rule)
            bias = torch.zeros(seen_B1S.shape, dtype=dtype).masked_fill_(~seen_B1S, -torch.inf)
            # written out: products begin with it, and a copy in one piece is the fastest
            self._biases[rule.window] = bias.repeat_interleave(groups, dim=0).repeat(1, queries, 1)
        return self._biases[rule.window]
