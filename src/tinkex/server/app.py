"""The ASGI application: routes from the table of operations, bodies through the shared codec."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinkex import codec
from tinkex.config import LOOPBACK
from tinkex.engine import Engine, EngineError
from tinkex.protocol import OPERATIONS, PREFIX, RETRIEVE_FUTURE, Operation
from tinkex.server import revival
from tinkex.server.exports import download_route
from tinkex.server.handlers import HANDLERS
from tinkex.server.records import misnamed_route
from tinkex.server.results import encoding
from tinkex.server.state import Call, Limits, Refusal, State
from tinkex.server.submission import digest_of, spend_number
from tinkex.types.record import to_json
from tinkex.types.sessions import FutureRetrieveRequest

logger = logging.getLogger("tinkex.server")

OFF_LOOP_BYTES = 64_000


def create_app(
    engine: Engine, data_dir: Path, *, limits: Limits | None = None, api_key: str | None = None
) -> Starlette:
    """The server as an ASGI application over an engine; its lifespan starts and stops the worker."""
    state = State(engine, data_dir, limits or Limits())
    revival.enable(state, HANDLERS)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.worker.start()
        revival.take_up_sessions(state)
        tending = asyncio.create_task(state.tend())
        try:
            yield
        finally:
            tending.cancel()
            await state.worker.stop()
            state.close_journals()
            state.store.close()

    routes = [
        Route(f"{PREFIX}/{op.path}", _endpoint(op, state, api_key), methods=[op.method], name=op.name)
        for op in OPERATIONS
        if op is RETRIEVE_FUTURE or op.name in HANDLERS  # what this server cannot do is not there, and 404 says so
    ]
    routes += [download_route(state), misnamed_route()]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _no_route, 405: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    return _error(404, f"there is no {request.method} {request.url.path} here")


def _error(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=status)


def _endpoint(op: Operation, state: State, api_key: str | None) -> Callable[[Request], Awaitable[Response]]:
    """Everything an operation has in common with the others: key, body, errors, answer."""
    answer = retrieve_future if op is RETRIEVE_FUTURE else _answer

    async def endpoint(request: Request) -> Response:
        try:
            _authorize(request, api_key)
            call = await _read(op, request, state)
            return await answer(op, state, request, call)
        except Refusal as refusal:
            return _error(refusal.status, refusal.detail)
        except EngineError as error:
            return _error(400 if error.category == "user" else 500, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            logger.exception("%s failed", op.name)
            return _error(500, f"internal error: {type(error).__name__}")

    return endpoint


def _authorize(request: Request, api_key: str | None) -> None:
    if api_key is None:
        # An open server is for programs of this machine: a web page that found it must not drive it.
        for name in ("host", "origin"):
            if not _is_here(request.headers.get(name)):
                raise Refusal(403, f"this server is open to this machine only; {name} is {request.headers[name]!r}")
        return
    given = request.headers.get("x-api-key")
    if not given:
        raise Refusal(401, "this server needs an API key: send it as X-API-Key (TINKER_API_KEY in clients)")
    if not hmac.compare_digest(given.encode(), api_key.encode()):
        raise Refusal(403, "this API key is not known here: TINKER_API_KEY must be the server's TINKEX_SERVER_API_KEY")


def _is_here(place: str | None) -> bool:
    """Whether a Host or Origin header is absent or names this machine."""
    return place is None or urlsplit(place if "//" in place else f"//{place}").hostname in LOOPBACK


async def _read(op: Operation, request: Request, state: State) -> Call:
    """The decoded request; a body that cannot be read is refused with what is wrong with it."""
    limit = state.limits.body_bytes
    path = {name: str(value) for name, value in request.path_params.items()}
    if op.request is None:
        return Call(None, path, b"", query=dict(request.query_params), headers=request.headers)
    body = await _body(request, limit)
    content_type = request.headers.get("content-type", codec.JSON)
    encoding = request.headers.get("content-encoding")

    def decode() -> Call:
        assert op.request is not None
        plain = codec.decompress(body, encoding, limit)
        try:
            decoded = codec.decode(op.request, plain or b"{}", content_type)
        except ValueError as error:
            raise Unreadable(str(error), plain) from None
        return Call(
            decoded,
            path,
            digest_of(op.path, plain),
            op=op.name,
            body=plain,
            content_type=content_type,
            query=dict(request.query_params),
            headers=request.headers,
        )

    try:
        return await asyncio.to_thread(decode) if len(body) > OFF_LOOP_BYTES else decode()
    except Unreadable as error:
        if op.traffic == "train":
            await spend_number(state, codec.peek(error.body, content_type), error.body, f"{op.name}: {error}")
        raise Refusal(400, f"{op.name}: {error}") from None
    except ValueError as error:
        raise Refusal(400, f"{op.name}: {error}") from None


class Unreadable(ValueError):
    """A body that is not the message it should be."""

    def __init__(self, message: str, body: bytes) -> None:
        super().__init__(message)
        self.body = body


async def _body(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise Refusal(413, f"the body has {announced} bytes; the limit is {limit}")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refusal(413, f"the body has more than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _answer(op: Operation, state: State, request: Request, call: Call) -> Response:
    if op.traffic == "rest":
        call.base_url = str(request.base_url).rstrip("/")
    result = await HANDLERS[op.name](state, call)
    if isinstance(result, Response):
        return result
    if isinstance(result, codec.Body):
        return Response(result.data, media_type=result.content_type)
    return Response(to_json(result), media_type=codec.JSON)


async def _take_up(state: State, request_id: str) -> None:
    """Look for a request among those that an earlier life of the server took."""
    owner = request_id.rpartition(":")[0]
    for name in (owner, request_id):  # a custom loss is a request of its own
        await state.revived(name)
    if (sampler := await asyncio.to_thread(state.store.sampler, owner)) is not None:
        await state.revived(sampler.session_id)


async def retrieve_future(op: Operation, state: State, request: Request, call: Call) -> Response:
    """Hold the request until the result is there, for as long as a poll may be held; then 408."""
    wanted: FutureRetrieveRequest = call.request
    promise = state.promises.get(wanted.request_id)
    if promise is None and not state.promises.is_gone(wanted.request_id):
        await _take_up(state, wanted.request_id)
        promise = state.promises.get(wanted.request_id)
    if promise is None:
        if state.promises.is_gone(wanted.request_id):
            raise Refusal(410, f"the result of request {wanted.request_id!r} has expired")
        if advice := await asyncio.to_thread(state.after_loss, wanted.request_id):
            raise Refusal(410, f"request {wanted.request_id!r} was lost when the server was restarted; {advice}")
        raise Refusal(404, f"there is no request {wanted.request_id!r}")
    try:
        async with asyncio.timeout(state.limits.poll_seconds):
            await promise.done.wait()
    except TimeoutError:
        return Response(to_json({"queue_state": "active"}), status_code=408, media_type=codec.JSON)
    promise.touch()
    body = await encoding(promise, as_protobuf=codec.PROTOBUF in request.headers.get("accept", ""))
    if wanted.allow_metadata_only and len(body.data) > state.limits.announced_bytes:
        promise.kept = body
        announced = {"status": "complete_metadata", "response_payload_size": len(body.data)}
        return Response(to_json(announced), media_type=codec.JSON)
    promise.kept = None
    return Response(body.data, media_type=body.content_type)
