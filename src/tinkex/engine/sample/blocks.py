"""The holders of blocks of the cache, and the keys by which blocks of prompts are found again.

A block has room for the keys and values of `BLOCK` positions of one sequence, in every layer (see
`passes.Pool`). The contents of a position depend on its tokens and weights alone, to the bit: a
block that is found by its key is as good as one computed again. In-flight samplers are the
exception: a session of theirs has its own namespace, in which blocks of older weights are found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from tinkex.types.tensors import Array

BLOCK = 64
"""Positions in a block. Lengths of keys are rounded up to it, so that the order of a row's sums
depends on that row alone."""
NOTHING, SCRATCH = 0, 1
"""Two blocks that no job holds: one is all zeros and only read, padding rows write to the other."""
RESERVED = 2


def blocks_for(positions: int) -> int:
    """Return the number of blocks that hold so many positions."""
    return -(-positions // BLOCK)


class Blocks:
    """The holders of each block.

    Blocks with a key outlast their last holder until their room is needed, the oldest first.
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
        """Return the number of blocks that can be taken."""
        return len(self._unused) + len(self._idle)

    def take(self, number: int) -> list[int]:
        """Hold this number of free blocks; the caller has checked that there are enough."""
        taken = []
        for _ in range(number):
            if not self._unused:
                self.withdraw([next(iter(self._idle))])
            block = self._unused.pop()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._idle.pop(block, None)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Hold and return the blocks of the first keys, up to the first unknown one."""
        found: list[int] = []
        for key in keys:
            if key not in self._by_key:
                break
            found.append(self._by_key[key])
        self.hold(found)
        return found

    def held(self, block: int) -> bool:
        """Return whether a block has a holder."""
        return block in self._holders

    def publish(self, block: int, key: bytes) -> None:
        """Give a block its key, unless another block has it."""
        if key not in self._by_key:
            self._by_key[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of these.

        The end of a prompt becomes free before its beginning, which others may share.
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
        """Take the keys of these away: their contents are not what the key says."""
        for block in blocks:
            if block in self._key_of:
                del self._by_key[self._key_of.pop(block)]
                if block in self._idle:
                    del self._idle[block]
                    self._unused.append(block)


def namespace(weights: int, cache: str) -> bytes:
    """Return the namespace of a cache; without one, the namespace of equal weights."""
    return (
        hashlib.blake2b(cache.encode(), digest_size=16).digest()
        if cache
        else weights.to_bytes(8, "little")
    )


def prompt_keys(space: bytes, prompt: Array) -> list[bytes]:
    """Return a key for each full block of a prompt, made of all tokens up to its end."""
    keys, key = [], space
    tokens = np.ascontiguousarray(prompt, dtype=np.int64)
    for start in range(0, prompt.size - BLOCK + 1, BLOCK):
        key = hashlib.blake2b(
            key + tokens[start : start + BLOCK].tobytes(), digest_size=16
        ).digest()
        keys.append(key)
    return keys
