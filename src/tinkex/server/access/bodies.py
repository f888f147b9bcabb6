"""Bodies of requests: read within limits, and decoded without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request

from tinkex.server.access.endpoints import Endpoint
from tinkex.server.calls import Call, digest_of
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import check_held
from tinkex.server.state import State
from tinkex.wire import codec

OFF_LOOP_BYTES = 64_000
"""Bodies that are larger than this once they are expanded are decoded in a thread."""
LARGE_BYTES = 16 << 20
"""Compressed bodies that may grow beyond this are expanded one at a time."""
CONTROL_BYTES = 4 << 20
"""Largest body of an endpoint that takes no data."""
JSON_BYTES = 128 << 20
"""Largest body in JSON: reading it stops all other threads."""
LEAST_RATE = 10_000
"""Bytes a second that a body must have on average, beyond its first pause."""


class Unreadable(ValueError):
    """A body that is not the message it should be."""

    def __init__(self, message: str, numbered: tuple[str, int] | None, digest: bytes) -> None:
        super().__init__(message)
        self.numbered = numbered
        """The model and the number of the request, if they can be made out."""
        self.digest = digest


async def read_body(state: State, endpoint: Endpoint, call: Call, request: Request) -> None:
    """Give a call its body and its request.

    Raises:
        Refusal: The body is too large or too slow, or cannot be decoded.
    """
    call.content_type = request.headers.get("content-type", codec.JSON)
    call.encoding = request.headers.get("content-encoding")
    limit, name = _limit_of(endpoint, call.content_type, state.limits.body_bytes)
    with _Arriving(state, call.owner) as arriving:
        call.body = await _receive(request, limit, name, state.limits.body_seconds, arriving)
    try:
        await _expand(state.expanding, endpoint, call, limit)
    except Unreadable as error:
        if endpoint.on_unreadable is not None:
            await endpoint.on_unreadable(state, call, error)
        raise Refusal(400, f"{endpoint.name}: {error}") from None
    except codec.TooLarge as error:
        raise Refusal(413, f"{endpoint.name}: {error} ({name})") from None
    except ValueError as error:
        raise Refusal(400, f"{endpoint.name}: {error}") from None


def _limit_of(endpoint: Endpoint, content_type: str, body_bytes: int) -> tuple[int, str]:
    """Return the most bytes that a body may have, sent and expanded, and the name of that limit."""
    limits = [(body_bytes, "body_bytes")]
    if not endpoint.is_bulky:
        limits.append((CONTROL_BYTES, f"of {endpoint.name}"))
    elif codec.PROTOBUF not in content_type:
        limits.append((JSON_BYTES, "of JSON"))
    return min(limits)


class _Arriving:
    """Counts the bytes of a body among those that its owner holds, until it has been read."""

    def __init__(self, state: State, owner: str) -> None:
        self._meter, self._owner, self._limit = state.meter, owner, state.limits.held_bytes
        self._size = 0

    def __enter__(self) -> _Arriving:
        return self

    def add(self, size: int) -> None:
        """Count a piece, and refuse a large body when its owner holds too much."""
        self._size += size
        self._meter.held[self._owner] += size
        if self._size > OFF_LOOP_BYTES:  # polls are small, and make room
            check_held(self._meter.held[self._owner], self._size, self._limit)

    def __exit__(self, *_: object) -> None:
        self._meter.let_go(self._owner, self._size)


async def _receive(
    request: Request, limit: int, name: str, seconds: float, arriving: _Arriving
) -> bytes:
    announced = request.headers.get("content-length", "")
    if (
        announced.isascii()
        and announced.isdigit()
        and (len(announced) > 18 or int(announced) > limit)
    ):
        raise Refusal(413, f"the body has {announced} bytes; the limit is {limit} ({name})")
    chunks: list[bytes] = []
    size, stream = 0, aiter(request.stream())
    loop = asyncio.get_running_loop()
    latest = loop.time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(min(latest + size / LEAST_RATE, loop.time() + seconds)):
                chunk = await anext(stream, None)
        except TimeoutError:
            why = (
                f"the body did not arrive in time: {size} bytes have arrived (the limit "
                f"body_seconds is {seconds:g})"
            )
            raise Refusal(408, why, headers={"Connection": "close"}) from None
        if chunk is None:
            return b"".join(chunks)
        size += len(chunk)
        if size > limit:
            raise Refusal(413, f"the body has more than {limit} bytes, the limit {name}")
        arriving.add(len(chunk))
        chunks.append(chunk)


async def _expand(expanding: asyncio.Semaphore, endpoint: Endpoint, call: Call, limit: int) -> None:
    """Decode a call's body, which stays as it was sent."""
    size = codec.expanded_size(call.body, call.encoding) if call.encoding else len(call.body)
    bound = limit if size is None else min(size, limit)
    if bound <= OFF_LOOP_BYTES:
        _decode(endpoint, call, limit)
        return
    async with expanding if call.encoding and bound > LARGE_BYTES else contextlib.nullcontext():
        await asyncio.to_thread(_decode, endpoint, call, limit)


def _decode(endpoint: Endpoint, call: Call, limit: int) -> None:
    assert endpoint.request is not None
    plain = codec.decompress(call.body, call.encoding, limit)
    call.size = len(plain)
    if endpoint.request is bytes:
        call.request = plain
        return
    try:
        call.request = codec.decode(endpoint.request, plain or b"{}", call.content_type)
    except ValueError as error:
        raise Unreadable(
            str(error), codec.peek(plain, call.content_type), digest_of("", plain)
        ) from None
    call.digest = digest_of(endpoint.path, plain)
