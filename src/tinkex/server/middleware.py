"""Everything that all endpoints have in common.

The key of a request, its body and the objects that it names are checked before the handler runs.
Every failure becomes an HTTP error, also after the first byte of a stream of events. Each request
is counted, logged and traced. Bodies are read within limits, and large ones are decoded in a
thread.

An id begins with the id of its session, and the owner of a session is on record. Each endpoint
declares the fields of its requests that must name objects of the caller's account (`owned_by`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.calls import Call, digest_of
from tinkex.server.http_errors import Refusal, refusal_of
from tinkex.server.meter import check_held
from tinkex.server.runs.journals import DIRECT
from tinkex.server.state import State
from tinkex.server.tracing import Tracing
from tinkex.types.record import to_json
from tinkex.wire import codec
from tinkex.wire.protocol import OWNED_FIELDS

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
KNOWN_OWNERS = 10_000
"""The number of sessions whose owners are remembered."""


class Unreadable(ValueError):
    """A body that is not the message it should be."""

    def __init__(self, message: str, numbered: tuple[str, int] | None, digest: bytes) -> None:
        super().__init__(message)
        self.numbered = numbered
        """The run and the number of the request, if they can be made out."""
        self.digest = digest


class GuardedEndpoint:
    """An endpoint behind the middleware, as an ASGI application."""

    def __init__(
        self, endpoint: Endpoint, group: Group, state: State, tracing: Tracing | None
    ) -> None:
        self._endpoint, self._group, self._state = endpoint, group, state
        self._tracing, self._owned_fields = tracing, endpoint.owned_fields
        self.method, self.path = endpoint.method, f"{group.prefix}{endpoint.path}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive, send)
        response = await (self._observed if self._tracing is None else self._traced)(request)
        await response(scope, receive, send)

    def route(self) -> Route:
        """Return the route of the endpoint."""
        return Route(self.path, self, methods=[self.method], name=self._endpoint.name)

    async def _traced(self, request: Request) -> Response:
        assert self._tracing is not None
        name = self._endpoint.name
        with self._tracing.request(self.method, self.path, name, request.headers) as told:
            return await self._observed(request, told)

    async def _observed(self, request: Request, told: dict[str, Any] | None = None) -> Response:
        endpoint, state = self._endpoint, self._state
        began, owner, request_id = time.perf_counter(), None, None
        try:
            account = await state.accounts.authorize(
                request.headers, endpoint.access, takes_bearer=self._group.takes_bearer
            )
            owner, scope = account.owner or None, request.scope
            call = Call(
                None,
                {name: str(value) for name, value in request.path_params.items()},
                b"",
                op=endpoint.name,
                owner=account.owner,
                query=dict(request.query_params) if scope["query_string"] else {},
                headers=(headers := request.headers),
                key_id=account.key_id,
                base_url=f"{scope['scheme']}://{headers['host']}" if "host" in headers else None,
            )
            if endpoint.request is None:
                call.http = request
            else:
                await _read_body(state, endpoint, call, request)
                request_id = getattr(call.request, "request_id", None)
            await self._check_ownership(call)
            result = await endpoint.answer(state, call)
            request_id = getattr(result, "request_id", request_id)
            if isinstance(result, Response):
                response = self._ending_well(result)
            elif isinstance(result, codec.Body):
                response = Response(result.data, media_type=result.content_type)
            else:
                response = Response(to_json(result), media_type=codec.JSON)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            response = self._refused(error)
        seconds, status = time.perf_counter() - began, response.status_code
        state.metrics.observe(endpoint.name, self.method, status, seconds, owner, request_id)
        if told is not None:
            told |= {"status": status, "owner": owner, "request_id": request_id}
        return response

    def _refused(self, error: Exception) -> Response:
        refusal = refusal_of(error, self._endpoint.name, self._state.without_paths)
        return self._group.refused(refusal)

    def _ending_well(self, response: Response) -> Response:
        """Let a stream of events that fails end with an event that says so."""
        kind = response.headers.get("content-type", "")
        if isinstance(response, StreamingResponse) and kind.startswith(codec.EVENT_STREAM):
            response.body_iterator = self._events(response.body_iterator)
        return response

    async def _events(self, chunks: AsyncIterable[Any]) -> AsyncIterator[Any]:
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            body = bytes(self._refused(error).body)
            data = b"".join(b"data: %b\n" % line for line in body.splitlines())
            yield b"\n\nevent: error\n%b\n" % data  # the last event may have been cut short

    async def _check_ownership(self, call: Call) -> None:
        """Answer 404, as for an object that does not exist, when a call names another owner's."""
        for declared in self._owned_fields:
            *places, field = declared.split(".")
            holder = call.request
            for place in places:
                holder = getattr(holder, place)
            name = call.path.get(field) or getattr(holder, field, None)
            if isinstance(name, str) and not await is_own(self._state, call.owner, field, name):
                raise Refusal(404, f"there is no {OWNED_FIELDS[field]} {name!r}")


# ── ownership ─────────────────────────────────────────────────────────────────────────────────────


async def is_own(state: State, owner: str, field: str, name: str) -> bool:
    """Return whether an object is an account's own; a missing object has no other owner."""
    return await _owner(state, field, name) in (None, owner)


async def _owner(state: State, field: str, name: str) -> str | None:
    """Return an object's owner, or None if there is no such object."""
    # a sample without a session: its promise has the owner
    if field == "request_id" and name.startswith(f"{DIRECT}:"):
        promise = state.promises.get(name)
        return None if promise is None else promise.owner
    session = name.partition(":")[0]
    for known in (session, name):
        if known in state.owners:
            return state.owners[known]
    found = await asyncio.to_thread(state.database.sessions.owner_of, session, name)
    if found is None:
        return None
    if len(state.owners) >= KNOWN_OWNERS:
        state.owners.clear()
    known, owner = found
    state.owners[known] = owner
    return owner


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


async def _read_body(state: State, endpoint: Endpoint, call: Call, request: Request) -> None:
    """Give a call its body and its request.

    Raises:
        Refusal: The body is too large or too slow, or cannot be decoded.
    """
    call.content_type = request.headers.get("content-type", codec.JSON)
    call.encoding = request.headers.get("content-encoding")
    limit, name = _limit_of(endpoint, call.content_type, state.limits.body_bytes)
    call.body = await _receive(state, call.owner, request, limit, name)
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


async def _receive(state: State, owner: str, request: Request, limit: int, name: str) -> bytes:
    """Return a body; it counts among the bytes that its owner holds until it has been read."""
    announced = request.headers.get("content-length", "")
    if (
        announced.isascii()
        and announced.isdigit()
        and (len(announced) > 18 or int(announced) > limit)
    ):
        raise Refusal(413, f"the body has {announced} bytes; the limit is {limit} ({name})")
    chunks: list[bytes] = []
    counted, size, stream = 0, 0, aiter(request.stream())
    loop, seconds, meter = asyncio.get_running_loop(), state.limits.body_seconds, state.meter
    latest = loop.time() + seconds
    try:
        while True:
            soonest = min(latest + size / LEAST_RATE, loop.time() + seconds)
            async with asyncio.timeout_at(soonest):
                chunk = await anext(stream, None)
            if chunk is None:
                return b"".join(chunks)
            size += len(chunk)
            if size > limit:
                raise Refusal(413, f"the body has more than {limit} bytes, the limit {name}")
            counted = size
            meter.held[owner] += len(chunk)
            if size > OFF_LOOP_BYTES:  # polls are small, and make room
                check_held(meter.held[owner], size, state.limits.held_bytes)
            chunks.append(chunk)
    except TimeoutError:
        why = (
            f"the body did not arrive in time: {size} bytes have arrived (the limit "
            f"body_seconds is {seconds:g})"
        )
        raise Refusal(408, why, headers={"Connection": "close"}) from None
    finally:
        meter.let_go(owner, counted)


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
