"""The two kinds of pass a sampler runs: chunks of prompts, and one more token for every row.

Both write keys and values before they attend, layer by layer, so that a prompt can share blocks
with another of the same pass. The sums of a position depend on that position alone: its keys reach
from 0 to the end of its block, the keys beyond it are masked, and numbers of rows are padded (see
`row_adapters`). So the cut of a chunk, the neighbours of a row and a found prefix change no bit on
a CPU.

`prefill` runs prompts. Decoding has three forms: `c_passes` runs it in C; `slab_decoding`, for a
CPU, keeps a copy of each running row's keys and values in one piece, because products read those
where they are; `static_decoding`, for a GPU, reads blocks where they are, has fixed shapes and is
recorded as CUDA graphs. On a CPU it runs the same code without them.

Axes: T tokens of a pass, B rows, Q queries, S positions, R query heads of a group times queries, G
key/value heads, C channels of a head, V vocabulary, L layers, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import soft_cap, widened
from tinkex.engine.model.decoder import Decoder, Lora
from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.sample.blocks import BLOCK, RESERVED, Blocks
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.tensors import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BARE_WEIGHTS = 0
_NUMBERS = count(BARE_WEIGHTS + 1)


@dataclass(frozen=True)
class Source:
    """Frozen weights to sample from, and the stop tokens and tokenizer of their model."""

    model: Decoder
    lora: Lora
    eos_tokens: frozenset[int]
    tokenizer: Callable[[], Tokenizer]
    version: int | None = None
    """The version of an in-flight target's weights."""

    def as_version(self, version: int) -> Source:
        """Return the same weights as a version of an in-flight target."""
        return replace(self, version=version)

    @cached_property
    def weights(self) -> int:
        """A number of these weights alone; samplers of the bare model share theirs."""
        return next(_NUMBERS) if self.lora.factors else BARE_WEIGHTS


class Pool:
    """Keys and values in blocks, `[L, 2, N, S, G, C]`."""

    def __init__(self, model: Decoder, count: int) -> None:
        config, like = model.config, model.embed_VD
        self.shape = (config.layers, 2, count + RESERVED, BLOCK, config.kv_heads, config.head_dim)
        self.kv = zeros(self.shape, like)
        self.blocks = Blocks(count)

    def write(self, layer: int, places_T: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> None:
        """Put the keys and values of tokens at their places (block * BLOCK + offset)."""
        if (fused := kernels_for(k_TGC)) is not None:
            fused.store(self.kv[layer], places_T, k_TGC, v_TGC)
            return
        for part, x in zip(self.kv[layer], (k_TGC, v_TGC), strict=True):
            part.view(-1, *part.shape[2:]).index_copy_(0, places_T, x)

    def read(self, layer: int, tables_UN: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of U sequences, `[U, S, G, C]` each."""
        count = tables_UN.shape[0]
        keys, values = (
            part.index_select(0, tables_UN.view(-1)).view(count, -1, *part.shape[2:])
            for part in self.kv[layer]
        )
        return keys, values

    def gather(self, layer: int, places_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values at these places, `[K, G, C]` each."""
        keys, values = (part.flatten(0, 1).index_select(0, places_K) for part in self.kv[layer])
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        self.kv[:, :, target] = self.kv[:, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: masked values must still be finite."""
        self.kv[:, :, to_device(blocks, self.kv.device)] = 0


def block_bytes(model: Decoder) -> int:
    """Return the bytes of a block."""
    config = model.config
    numbers = config.layers * 2 * BLOCK * config.kv_heads * config.head_dim
    return numbers * model.embed_VD.element_size()


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros, which on a CPU take memory only where they are written."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(shape, dtype=str(like.dtype).removeprefix("torch.")))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


@dataclass(eq=False, slots=True)
class Row:
    """A sequence being decoded: its weights, its blocks, their filled positions, the next token."""

    lora: Lora
    weights: int
    blocks: list[int]
    length: int
    token: int = 0
    drawn: int = -1
    """The place of the next token among those drawn last, if it has not been read; else -1."""
    place: tuple[int, int] = (0, 0)
    """The length of its slab, and the slot there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The positions `[start, stop)` of a prompt, to be run in one pass."""

    lora: Lora
    weights: int
    tokens: Array
    blocks: Sequence[int]
    start: int
    stop: int


class Prompts(Protocol):
    """Runs pieces of prompts and leaves their keys and values in the pool."""

    def hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the hidden states of all positions of the pieces, in order.

        Pieces with equal weights are side by side.
        """


class Decoding:
    """Gives every row its next logits."""

    ahead = False
    """A pass can begin before the tokens of the previous one have been read."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Take in a row whose prompt is in these blocks; it gets its own copy of the last one."""
        if row.length % BLOCK:
            self._pool.copy(prompt[-1], row.blocks[len(prompt) - 1])

    def leave(self, row: Row) -> None:
        """Free what is kept of a row besides its blocks."""

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Return the order in which rows are to be decoded: equal weights side by side."""
        return sorted(rows, key=lambda row: row.weights)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Feed each row its token, at the next position, and return the logits `[B, V]` after it.

        The next call may overwrite them.
        """
        raise NotImplementedError

    def keep(self, tokens_B: Tensor) -> None:
        """Remember these tokens, for rows that go by their `drawn`."""

    def forget(self, weights: int) -> None:
        """Free what is kept of weights that rows have left."""


def weigh(
    q_NRC: Tensor,
    k_NSC: Tensor,
    v_NSC: Tensor,
    bias: Tensor,
    rule: AttentionRule,
) -> Tensor:
    """Return attention by plain products; `bias` is 0 or -inf."""
    if rule.softcap is None:
        scores = torch.baddbmm(bias, q_NRC, k_NSC.transpose(1, 2), alpha=rule.scale)
    else:
        scores = (
            soft_cap(widened(torch.bmm(q_NRC * rule.scale, k_NSC.transpose(1, 2))), rule.softcap)
            + bias
        )
    return torch.bmm(scores.softmax(-1).to(v_NSC.dtype), v_NSC)


def put(array: Array | Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Return whole numbers on the device of a tensor."""
    return to_device(array, like.device)
