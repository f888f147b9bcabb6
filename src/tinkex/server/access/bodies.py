"""Bodies of requests: how large each may grow, and decoding them without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from tinkex.server.calls import Call, digest_of
from tinkex.wire import codec
from tinkex.wire.protocol import Operation

OFF_LOOP_BYTES = 64_000
"""Bodies that are larger than this once they are expanded are decoded in a thread."""
LARGE_BYTES = 16 << 20
"""Compressed bodies that may grow beyond this are expanded one at a time."""
BULKY = {"forward_backward", "forward", "asample", "stream_sample", "create_custom_loss"}
"""Operations that bring data. The bodies of all others are short."""
CONTROL_BYTES = 4 << 20
"""Largest body of an operation that brings no data."""
JSON_BYTES = 128 << 20
"""Largest body in JSON: reading it stops all other threads."""


class Unreadable(ValueError):
    """A body that is not the message it should be."""

    def __init__(self, message: str, numbered: tuple[str, int] | None, digest: bytes) -> None:
        super().__init__(message)
        self.numbered = numbered
        """The model and the number of the request, if they can be made out."""
        self.digest = digest


def limit_of(op: Operation, content_type: str, body_bytes: int) -> tuple[int, str]:
    """Return the most bytes that a body may have, sent and expanded, and the name of that limit."""
    limits = [(body_bytes, "body_bytes")]
    if op.name not in BULKY:
        limits.append((CONTROL_BYTES, f"of {op.name}"))
    elif codec.PROTOBUF not in content_type:
        limits.append((JSON_BYTES, "of JSON"))
    return min(limits)


async def decode(expanding: asyncio.Semaphore, op: Operation, call: Call, limit: int) -> None:
    """Decode a call's body, which stays as it was sent."""
    size = codec.expanded_size(call.body, call.encoding)
    bound = limit if size is None else min(size, limit)
    if bound <= OFF_LOOP_BYTES:
        _decode(op, call, limit)
        return
    async with expanding if call.encoding and bound > LARGE_BYTES else contextlib.nullcontext():
        await asyncio.to_thread(_decode, op, call, limit)


def _decode(op: Operation, call: Call, limit: int) -> None:
    assert op.request is not None
    plain = codec.decompress(call.body, call.encoding, limit)
    call.size = len(plain)
    try:
        call.request = codec.decode(op.request, plain or b"{}", call.content_type)
    except ValueError as error:
        raise Unreadable(
            str(error), codec.peek(plain, call.content_type), digest_of("", plain)
        ) from None
    call.digest = digest_of(op.path, plain)
