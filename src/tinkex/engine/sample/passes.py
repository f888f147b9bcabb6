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

Axes: T tokens of a pass, B rows, Q queries, S positions, R query heads of a group times queries, C
channels of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import soft_cap, widened
from tinkex.engine.model.decoder import Lora
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.kv_pool import Pool
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.tensors import Array


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
