"""The ASGI application: all endpoints behind the middleware, and the server's lifespan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex.engine.api import Engine
from tinkex.server.access.endpoints import Group
from tinkex.server.database.interface import Database
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.http_errors import Refusal, refused
from tinkex.server.middleware import GuardedEndpoint
from tinkex.server.routes.cluster_pages import CLUSTER
from tinkex.server.routes.handler_table import collect
from tinkex.server.routes.openai import OPENAI
from tinkex.server.routes.operations import operation_group
from tinkex.server.routes.server_pages import PAGES
from tinkex.server.server_limits import Limits
from tinkex.server.state import State
from tinkex.server.tracing import Tracing
from tinkex.server.workers.fleet import Fleet


def create_app(
    engine: Engine | Mapping[str, Engine] | Fleet,
    data_dir: Path,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    tokens: bool = False,
    strict: bool = False,
    embedded: bool = False,
    tracing: Tracing | None = None,
    open_database: Callable[[Path], Database] = SqliteDatabase,
    groups: Sequence[Group] = (),
) -> Starlette:
    """Return the server over an engine as an ASGI application.

    Its lifespan starts and stops the worker.

    Args:
        engine: One engine, several by names that stay the same, or a fleet of worker processes.
        data_dir: The directory of the database, keys and checkpoints.
        limits: The limits of the server.
        api_key: A key of the owner `local`, besides those made by `tinkex key create`.
        tokens: Whether clients are told to exchange their key for short-lived tokens.
        strict: Whether weights are loaded as a run's first operation only.
        embedded: Whether the only caller is this program, which then needs no key that others were
            given.
        tracing: Makes a span of each request.
        open_database: Opens the database of the data directory.
        groups: More endpoints, behind the same middleware.
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
        state.start_workers()
        state.replay.take_up_sessions()
        tasks = [asyncio.create_task(state.tend()), asyncio.create_task(state.meter.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if state.fleet is not None:
                await state.fleet.stop()
            # the client of an embedded server ends with it, and would wait for another life in vain
            if not embedded:
                await state.leave()
                state.promises.are_closed = True
            await state.stop_workers()
            state.journals.close()
            try:
                await state.meter.flush()
            finally:
                state.searches.close()
                state.database.close()
                state.unlock()

    mounted = (CLUSTER, OPENAI, *groups)
    state.mounted = tuple((group.prefix, one) for group in mounted for one in group.endpoints)
    groups = (operation_group(), PAGES, *mounted)
    guarded = [
        GuardedEndpoint(endpoint, group, state, tracing)
        for group in groups
        for endpoint in group.endpoints
    ]
    app = Application(
        routes=[one.route() for one in guarded],
        lifespan=lifespan,
        exception_handlers={404: _no_route, 405: _no_route},
    )
    app.direct = {(one.method, one.path): one for one in guarded if "{" not in one.path}
    app.state.server = state
    return app


class Application(Starlette):
    """Calls endpoints without variables in their path directly, which makes small calls faster."""

    direct: Mapping[tuple[str, str], GuardedEndpoint]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        found = (
            self.direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        )
        await (super().__call__ if found is None else found)(scope, receive, send)


async def _no_route(request: Request, error: Exception) -> Response:
    return refused(Refusal(404, f"there is no {request.method} {request.url.path} here"))
