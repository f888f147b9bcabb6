"""Where keys and values lie: a pool of blocks, who holds them, and how blocks of prompts are found
again.

A block has room for `BLOCK` positions of one sequence, in every layer. What a position holds
depends on its tokens and weights alone, to the bit: a block that is found by its key is as good as
one computed again. In-flight samplers are the exception: a session of theirs has a namespace of its
own, in which blocks of older weights are found.

Axes: L layers, N blocks, S positions, G key/value heads, C channels of a head, T tokens of a pass.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.torch.device_copies import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinkex.engine.model.decoder import Decoder
    from tinkex.types.tensors import Array

BLOCK = 64
"""Positions in a block. Lengths of keys are rounded up to it, so that how a row is summed up
depends on that row."""
NOTHING, SCRATCH = 0, 1
"""Two blocks that are nobody's: one is all zeros and only read, the other takes what padding rows
write."""
RESERVED = 2


def blocks_for(positions: int) -> int:
    """How many blocks hold so many positions."""
    return -(-positions // BLOCK)


class Blocks:
    """Who holds which block. Keyed blocks outlast their last holder, until their room is needed:
    oldest first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = list(range(RESERVED + count - 1, RESERVED - 1, -1))
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._unused) + len(self._idle)

    def take(self, number: int) -> list[int]:
        """Hold so many blocks; the caller has seen that there are enough."""
        taken = []
        for _ in range(number):
            if not self._unused:
                self._forget(next(iter(self._idle)))
            block = self._unused.pop()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._idle.pop(block, None)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of as many of the first keys as are known."""
        found: list[int] = []
        for key in keys:
            if key not in self._by_key:
                break
            found.append(self._by_key[key])
        self.hold(found)
        return found

    def held(self, block: int) -> bool:
        """Whether anybody holds this."""
        return block in self._holders

    def publish(self, block: int, key: bytes) -> None:
        """Let a block be found, unless another with the same contents can be."""
        if key not in self._by_key:
            self._by_key[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less. The end of a prompt is given up before its beginning, which others may
        share.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._unused.append(block)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Let these be found no more: what they hold is not what their key says."""
        for block in blocks:
            if block in self._key_of:
                del self._by_key[self._key_of.pop(block)]
                if block in self._idle:
                    del self._idle[block]
                    self._unused.append(block)

    def _forget(self, block: int) -> None:
        self.withdraw([block])


def namespace(weights: int, cache: str) -> bytes:
    """A name for the keys and values that one may find: those of a cache, else those of equal
    weights.
    """
    return (
        hashlib.blake2b(cache.encode(), digest_size=16).digest()
        if cache
        else weights.to_bytes(8, "little")
    )


def prompt_keys(space: bytes, prompt: Array) -> list[bytes]:
    """A key for each full block of a prompt: its tokens and all before them, within a namespace."""
    keys, key = [], space
    tokens = np.ascontiguousarray(prompt, dtype=np.int64)
    for start in range(0, prompt.size - BLOCK + 1, BLOCK):
        key = hashlib.blake2b(
            key + tokens[start : start + BLOCK].tobytes(), digest_size=16
        ).digest()
        keys.append(key)
    return keys


class Pool:
    """Keys and values in blocks, `[L, 2, N, S, G, C]`."""

    def __init__(self, model: Decoder, count: int) -> None:
        config, like = model.config, model.embed_VD
        self.shape = (config.layers, 2, count + RESERVED, BLOCK, config.kv_heads, config.head_dim)
        self.kv = zeros(self.shape, like)
        self.blocks = Blocks(count)

    def write(
        self, layer: int, places_T: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor
    ) -> None:
        """Put the keys and values of tokens at their places (block * BLOCK + offset)."""
        if (fused := kernels_for(k_TGC)) is not None:
            fused.store(self.kv[layer], places_T, k_TGC, v_TGC)
            return
        for part, x in zip(self.kv[layer], (k_TGC, v_TGC), strict=True):
            part.view(-1, *part.shape[2:]).index_copy_(0, places_T, x)

    def read(self, layer: int, tables_UN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of U sequences, `[U, S, G, C]` each, copied together from their
        blocks.
        """
        count = tables_UN.shape[0]
        keys, values = (
            part.index_select(0, tables_UN.view(-1)).view(count, -1, *part.shape[2:])
            for part in self.kv[layer]
        )
        return keys, values

    def gather(self, layer: int, places_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at these places, `[K, G, C]` each."""
        keys, values = (part.flatten(0, 1).index_select(0, places_K) for part in self.kv[layer])
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        self.kv[:, :, target] = self.kv[:, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: what is masked must still be finite."""
        self.kv[:, :, to_device(blocks, self.kv.device)] = 0


def block_bytes(model: Decoder) -> int:
    """What a block costs."""
    config = model.config
    return (
        config.layers
        * 2
        * BLOCK
        * config.kv_heads
        * config.head_dim
        * model.embed_VD.element_size()
    )


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros which on a CPU take memory only where they are written."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(shape, dtype=str(like.dtype).removeprefix("torch.")))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
