"""Bytes in many buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

Buffer: TypeAlias = Any
"""Bytes, or an array of bytes; an array, unlike a memoryview, costs the garbage collector nothing.
"""


class Pieces:
    """Bytes in many buffers, joined piece by piece while they are sent; `bytes()` joins all.

    Example:
        >>> list(Pieces([b"abc", b"defgh", b"i"]).cut(4))
        [b'abcdefg', b'hi']
    """

    __slots__ = ("_buffers", "_size")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._size = sum(map(len, buffers))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._buffers)

    def cut(self, size: int) -> Iterator[bytes]:
        """Yield all of it in pieces of this size or up to twice as long."""
        held: list[Buffer] = []
        length = 0
        for buffer in self._buffers:
            start = 0
            while len(buffer) - start > size:
                yield b"".join((*held, memoryview(buffer)[start : start + size]))
                held, length, start = [], 0, start + size
            held.append(buffer[start:] if start else buffer)
            length += len(buffer) - start
            if length >= size:
                yield b"".join(held)
                held, length = [], 0
        if held:
            yield b"".join(held)
