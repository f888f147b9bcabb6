"""The ASGI application: routes from the table of operations, bodies through the shared codec."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkex._version import __version__
from tinkex.client.settings.config import LOOPBACK
from tinkex.engine.api import Engine, EngineError
from tinkex.server.access import bodies
from tinkex.server.access.accounts import Account
from tinkex.server.access.gate import check_held, check_room, fail_in_band
from tinkex.server.access.ownership import check_ownership, is_own
from tinkex.server.calls import Call
from tinkex.server.complaints import FULL_DISK, complain
from tinkex.server.database.interface import Database
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.files.data_dir import is_full_disk
from tinkex.server.http_errors import Refusal
from tinkex.server.routes import openai, openapi, uploads
from tinkex.server.routes.exports import download_route
from tinkex.server.routes.handler_table import HANDLERS, collect
from tinkex.server.routes.metrics_page import metrics_text
from tinkex.server.routes.records import misnamed_route
from tinkex.server.routes.session_records import signed_trace, trace_path
from tinkex.server.runs.encoded_results import encoding
from tinkex.server.runs.journals import DIRECT
from tinkex.server.runs.metering import watch
from tinkex.server.runs.unloading import UNLOAD
from tinkex.server.server_limits import Limits
from tinkex.server.state import State
from tinkex.server.tracing import Tracing
from tinkex.types.checkpoints import SCHEME
from tinkex.types.record import to_json
from tinkex.types.sessions import FutureRetrieveRequest
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire import codec
from tinkex.wire.prometheus import CONTENT_TYPE
from tinkex.wire.protocol import HEALTHZ, OPERATIONS, PREFIX, RETRIEVE_FUTURE, Operation

logger = logging.getLogger("tinkex.server")

LEAST_RATE = 10_000
"""Bytes a second that a body must have on average, beyond its first pause."""
DETAIL_CHARACTERS = 4_000


def create_app(
    engine: Engine | Mapping[str, Engine],
    data_dir: Path,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    tokens: bool = False,
    strict: bool = False,
    embedded: bool = False,
    tracing: Tracing | None = None,
    open_database: Callable[[Path], Database] = SqliteDatabase,
) -> Starlette:
    """The server as an ASGI application over an engine; its lifespan starts and stops the worker.

    Args:
        engine: What computes: one engine, or several by names that stay the same.
        data_dir: Where facts, keys and checkpoints are kept.
        limits: What is not to be exceeded.
        api_key: A key of the owner `local`, besides those made by `tinkex key create`.
        tokens: Whether clients are told to exchange their key for short-lived tokens.
        strict: Whether weights are loaded as a run's first operation only.
        embedded: Whether the only caller is this program, which then needs no key that others were
            given.
        tracing: Makes a span of each request, where that is wanted.
        open_database: Opens the database of the data directory.
    """
    state = State(
        engine,
        data_dir,
        limits or Limits(),
        open_database,
        api_key=api_key,
        tokens=tokens,
        strict=strict,
        embedded=embedded,
    )
    collect()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.workers.start()
        state.replay.take_up_sessions()
        tasks = [asyncio.create_task(state.tend()), asyncio.create_task(state.meter.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            # there the client ends with its server: to wait for another life would be to wait in
            # vain
            if not embedded:
                await state.leave()
                state.promises.are_closed = True
            await state.workers.stop()
            state.journals.close()
            try:
                await state.meter.flush()
            finally:
                state.searches.close()
                state.database.close()
                state.unlock()

    # What this server cannot do is not there, and 404 says so.
    served = [op for op in OPERATIONS if op is RETRIEVE_FUTURE or op.name in HANDLERS]
    endpoints = [(op, _traced(op, _endpoint(op, state), tracing)) for op in served]
    routes = [
        Route(f"{PREFIX}/{op.path}", endpoint, methods=[op.method], name=op.name)
        for op, endpoint in endpoints
    ]
    routes += [
        download_route(state),
        misnamed_route(),
        Route("/", _front(state), name="front"),
        Route(openapi.PATH, _description(op.name for op in served), name="openapi"),
        Route("/metrics", _metrics(state), name="metrics"),
        Route(trace_path("{session_id}"), _trace(state), name="trace"),
        *openai.routes(state, _authorize),
        uploads.upload_route(state),
    ]
    app = Application(
        routes=routes, lifespan=lifespan, exception_handlers={404: _no_route, 405: _no_route}
    )
    app.direct = {
        (op.method, f"{PREFIX}/{op.path}"): endpoint
        for op, endpoint in endpoints
        if "{" not in op.path
    }
    app.state.server = state
    return app


class Application(Starlette):
    """Calls operations whose path has no parts to be read without a search, which saves a sixth of
    a small call.
    """

    direct: Mapping[tuple[str, str], Endpoint]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        found = (
            self.direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        )
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            response = await found(Request(scope, receive, send))
            await response(scope, receive, send)


async def _no_route(request: Request, error: Exception) -> Response:
    return _error(404, f"there is no {request.method} {request.url.path} here")


def _error(status: int, detail: str) -> Response:
    return JSONResponse({"detail": _short(detail)}, status_code=status)


def _fault(what: str, error: Exception) -> Response:
    """Answer after a fault of the server; a full disk is named, and may have room later."""
    if is_full_disk(error):
        complain("a request failed", error, about=what)
        refusal = Refusal(
            503, f"{FULL_DISK}; ask again when there is room", headers={"Retry-After": "5"}
        )
        return _refused(refusal)
    logger.exception("%s failed", what)
    return _error(500, f"internal error: {type(error).__name__}")


def _short(detail: str) -> str:
    """What is wrong, without most of a long text that it quotes."""
    half = DETAIL_CHARACTERS // 2
    return detail if len(detail) <= DETAIL_CHARACTERS else f"{detail[:half]} … {detail[-half:]}"


def _refused(refusal: Refusal) -> Response:
    body = {"detail": _short(refusal.detail), **refusal.fields}
    return JSONResponse(body, status_code=refusal.status, headers=refusal.headers)


Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def _endpoint(op: Operation, state: State) -> Endpoint:
    """Everything an operation has in common with the others: key, body, errors, answer."""

    async def endpoint(request: Request) -> Response:
        began, account = time.perf_counter(), None
        try:
            account = await _authorize(request, state, needs_key=op is not HEALTHZ)
            call = await _read(op, request, state, account)
            response = await _dispatch(op, state, request, call)
        except Refusal as refusal:
            refusal.detail = state.without_paths(refusal.detail)
            response = _refused(refusal)
        except EngineError as error:
            response = _error(
                400 if error.category == "user" else 500, state.without_paths(str(error))
            )
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            response = _fault(op.name, error)
        told = request.state
        told.owner, told.request_id = (
            account.owner if account else None,
            getattr(told, "request_id", None),
        )
        seconds = time.perf_counter() - began
        state.metrics.observe(
            op.name, op.method, response.status_code, seconds, told.owner, told.request_id
        )
        return response

    return endpoint


def _traced(op: Operation, endpoint: Endpoint, tracing: Tracing | None) -> Endpoint:
    """The same, with a span around it."""
    if tracing is None:
        return endpoint

    async def traced(request: Request) -> Response:
        with tracing.request(op, request.headers) as told:
            response = await endpoint(request)
            told |= {"status": response.status_code, "owner": request.state.owner}
            told["request_id"] = request.state.request_id
            return response

    return traced


async def _dispatch(op: Operation, state: State, request: Request, call: Call) -> Response:
    await check_ownership(state, op, call.owner, call.path, call.request)
    if op is RETRIEVE_FUTURE:
        return await retrieve_future(op, state, request, call)
    why = check_room(state, op, call)
    if why is not None and op.traffic == "sample":
        raise Refusal(400, why)
    result = await (
        HANDLERS[op.name](state, call) if why is None else fail_in_band(state, op, call, why)
    )
    _note(op, state, call, result)
    request.state.request_id = getattr(result, "request_id", None)
    return _answer(result)


def _note(op: Operation, state: State, call: Call, result: Any) -> None:
    """See to it that what was done is on record: now, or when a future has its result."""
    if op.result is not None:
        assert isinstance(result, UntypedAPIFuture)
        watch(state, op.name, call, result.request_id)
        return
    run, path = call.path.get("training_run_id"), getattr(result, "tinker_path", None)
    if run is not None and "name" in call.path:
        path = f"{SCHEME}{run}/{call.path['kind']}/{call.path['name']}"
    wanted = ("project_id", "ttl_seconds", "source_path", "destination_project_id")
    details = {name: getattr(call.request, name) for name in wanted if hasattr(call.request, name)}
    if "session_id" in call.path:
        details["session_id"] = call.path["session_id"]
    state.meter.audit(call.owner, op.name, model_id=run, tinker_path=path, details=details)


# ── what is not in the table of operations ────────────────────────────────────────────────────────


def _front(state: State) -> Endpoint:
    async def front(request: Request) -> Response:
        access = "key required" if await state.accounts.needs_key() else "open"
        return JSONResponse(
            {"name": "tinkex", "version": __version__, "api": PREFIX, "access": access}
        )

    return front


def _description(served: Iterable[str]) -> Endpoint:
    names = frozenset(served)

    async def document(request: Request) -> Response:
        return Response(to_json(openapi.describe(names)), media_type=codec.JSON)

    return document


def _metrics(state: State) -> Endpoint:
    async def metrics(request: Request) -> Response:
        try:
            await _authorize(request, state)
        except Refusal as refusal:
            return _refused(refusal)
        return Response(metrics_text(state), media_type=CONTENT_TYPE)

    return metrics


def _trace(state: State) -> Endpoint:
    async def trace(request: Request) -> Response:
        given = request.query_params
        try:
            body = await signed_trace(
                state,
                request.path_params["session_id"],
                *(given.get(name, "") for name in ("expires", "key", "signature")),
            )
        except Refusal as refusal:
            return _refused(refusal)
        return Response(body, media_type=codec.JSON)

    return trace


# ── who asks, and what ────────────────────────────────────────────────────────────────────────────


async def _authorize(request: Request, state: State, *, needs_key: bool = True) -> Account:
    if await state.accounts.needs_key():
        if not needs_key:
            return Account()
        return await state.accounts.account(request.headers.get("x-api-key") or _bearer(request))
    # An open server is for programs of this machine: a web page that found it must not drive it.
    for name in ("host", "origin"):
        given = request.headers.getlist(name)
        if len(given) > 1 or not all(map(_is_here, given)):
            told = ", ".join(map(repr, given))
            raise Refusal(403, f"this server is open to this machine only; {name} is {told}")
    return Account()


def _bearer(request: Request) -> str | None:
    """The key as OpenAI's clients send it, on the routes made for them."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return (
        key.strip()
        if kind.lower() == "bearer" and request.url.path.startswith(openai.PREFIX)
        else None
    )


@functools.lru_cache(64)
def _is_here(place: str) -> bool:
    """Return whether a Host or Origin header names this machine."""
    try:
        parts = urlsplit(place if "//" in place else f"//{place}")
        return "@" not in parts.netloc and parts.hostname in LOOPBACK
    except ValueError:  # what is no address is none of this machine
        return False


async def _read(op: Operation, request: Request, state: State, account: Account) -> Call:
    """The decoded request; a body that cannot be read is refused with what is wrong with it."""
    path = {name: str(value) for name, value in request.path_params.items()}
    place = (
        f"{request.scope['scheme']}://{request.headers['host']}"
        if "host" in request.headers
        else None
    )
    call = Call(
        None,
        path,
        b"",
        op=op.name,
        owner=account.owner,
        query=dict(request.query_params) if request.scope["query_string"] else {},
        headers=request.headers,
        key_id=account.key_id,
        base_url=place,
    )
    if op.request is None:
        return call
    call.content_type = request.headers.get("content-type", codec.JSON)
    call.encoding = request.headers.get("content-encoding")
    limit, name = bodies.limit_of(op, call.content_type, state.limits.body_bytes)
    arriving = Arriving(state, account.owner)
    with arriving:
        call.body = await _body(request, limit, name, state.limits.body_seconds, arriving)
    try:
        await bodies.decode(state.expanding, op, call, limit)
    except bodies.Unreadable as error:
        numbered = error.numbered if op.traffic == "train" else None
        if numbered is not None and await is_own(state, account.owner, "model_id", numbered[0]):
            await state.runs.consume_refused(*numbered, error.digest, f"{op.name}: {error}")
        raise Refusal(400, f"{op.name}: {error}") from None
    except codec.TooLarge as error:
        raise Refusal(413, f"{op.name}: {error} ({name})") from None
    except ValueError as error:
        raise Refusal(400, f"{op.name}: {error}") from None
    return call


class Arriving:
    """Counts the bytes of a body among those that its owner holds, until it has been read."""

    def __init__(self, state: State, owner: str) -> None:
        self._meter, self._owner, self._limit = state.meter, owner, state.limits.held_bytes
        self._size = 0

    def __enter__(self) -> None:
        """Begin with nothing."""

    def add(self, size: int) -> None:
        """Count a piece, and refuse a large body when its owner holds too much."""
        self._size += size
        self._meter.held[self._owner] += size
        if self._size > bodies.OFF_LOOP_BYTES:  # polls are small, and make room
            check_held(self._meter.held[self._owner], self._size, self._limit)

    def __exit__(self, *_: object) -> None:
        self._meter.let_go(self._owner, self._size)


async def _body(
    request: Request, limit: int, name: str, seconds: float, arriving: Arriving
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
                f"the body did not arrive in time: {size} bytes have come (the limit "
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


def _answer(result: Any) -> Response:
    if isinstance(result, Response):
        return result
    if isinstance(result, codec.Body):
        return Response(result.data, media_type=result.content_type)
    return Response(to_json(result), media_type=codec.JSON)


async def _take_up(state: State, request_id: str) -> None:
    """Look for a request among those that an earlier life of the server took."""
    owner = request_id.rpartition(":")[0]
    for name in (owner, request_id):  # a custom loss is a request of its own
        await state.revivals.revived(name)
    if request_id.endswith(UNLOAD) and state.promises.get(request_id) is None:
        await state.unloading.recall(owner)
    if (sampler := await asyncio.to_thread(state.database.samplers.get, owner)) is not None:
        await state.revivals.revived(sampler.session_id)
    elif owner.startswith(f"{DIRECT}:"):
        await state.revivals.revived(DIRECT)


async def retrieve_future(op: Operation, state: State, request: Request, call: Call) -> Response:
    """Hold the request until the result is there, for as long as a poll may be held; then 408."""
    wanted: FutureRetrieveRequest = call.request
    request.state.request_id = wanted.request_id
    promise = state.promises.get(wanted.request_id)
    if promise is None and not state.promises.is_gone(wanted.request_id):
        await _take_up(state, wanted.request_id)
        # before, it was not known whose it is
        if not await is_own(state, call.owner, "request_id", wanted.request_id):
            raise Refusal(404, f"there is no request {wanted.request_id!r}")
        promise = state.promises.get(wanted.request_id)
    if promise is None:
        if state.promises.is_gone(wanted.request_id):
            raise Refusal(410, f"the result of request {wanted.request_id!r} has expired")
        if advice := await asyncio.to_thread(state.after_loss, wanted.request_id):
            raise Refusal(
                410,
                f"request {wanted.request_id!r} was lost when the server was restarted; {advice}",
            )
        raise Refusal(404, f"there is no request {wanted.request_id!r}")
    try:
        async with state.promises.holding(state.limits.poll_seconds):
            await promise.done.wait()
    except TimeoutError:
        state.refuse_if_stopping()
        return Response(to_json({"queue_state": "active"}), status_code=408, media_type=codec.JSON)
    promise.touch()
    body = await encoding(promise, as_protobuf=codec.PROTOBUF in request.headers.get("accept", ""))
    promise.size = len(body.data)
    if wanted.allow_metadata_only and len(body.data) > state.limits.announced_bytes:
        promise.kept = body
        announced = {"status": "complete_metadata", "response_payload_size": len(body.data)}
        return Response(to_json(announced), media_type=codec.JSON)
    promise.kept = None
    return Response(body.data, media_type=body.content_type)
