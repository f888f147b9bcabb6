"""Exchanges straight into an ASGI application on the running loop, without a port."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from tinkex.client.http.exchange import HttpRequest, Reply, StreamReply


class AsgiExchange:
    """Exchanges with an ASGI application on the running loop."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lifespan: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def open(self) -> None:
        """Run the application's start-up, and raise its failure."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lifespan = asyncio.create_task(self._live(started))
        await started

    async def _live(self, started: asyncio.Future[None]) -> None:
        begun = False

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "lifespan.startup"}
            await self._stop.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: dict[str, Any]) -> None:
            if started.done():
                return
            if message["type"] == "lifespan.startup.complete":
                started.set_result(None)
            elif message["type"] == "lifespan.startup.failed":
                started.set_exception(
                    RuntimeError(message.get("message") or "the embedded server did not start")
                )

        await self._app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)

    async def send(self, request: HttpRequest) -> Reply:
        """Call the application; the call ends if its caller is cancelled."""
        async with self._running(request) as call:
            while not call.complete:
                await call.news(request.timeout)
            return Reply(call.status, call.headers, b"".join(call.chunks))

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamReply]:
        """Call the application and pass its answer's bytes on as they come."""
        async with self._running(request) as call:
            while not call.status:
                await call.news(request.timeout)

            async def chunks() -> AsyncIterator[bytes]:
                while True:
                    while call.chunks:
                        if chunk := call.chunks.popleft():
                            yield chunk
                    if call.complete:
                        return
                    await call.news(request.timeout)

            yield StreamReply(call.status, call.headers, chunks())

    @contextlib.asynccontextmanager
    async def _running(self, request: HttpRequest) -> AsyncIterator[_AsgiCall]:
        """Run the application on a request; on leaving the block, it sees a disconnect."""
        if self.is_closed:
            raise ConnectionError("the embedded backend is closed")
        call = _AsgiCall(request)
        call.task = asyncio.create_task(self._app(call.scope, call.receive, call.send))
        call.task.add_done_callback(call.wake)
        try:
            yield call
        finally:
            call.disconnected.set()
            if not call.complete:
                call.task.cancel()

    @property
    def is_closed(self) -> bool:
        """Return True once it is being closed."""
        return self._stop.is_set()

    async def close(self) -> None:
        """Run the application's shutdown."""
        self._stop.set()
        if self._lifespan is not None:
            await self._lifespan


class LateExchange:
    """An exchange that its first request opens, and the first one after it was closed."""

    def __init__(self, opened: Callable[[], Awaitable[AsgiExchange]]) -> None:
        self._opened = opened
        self._exchange: AsgiExchange | None = None

    async def _open(self) -> AsgiExchange:
        if self._exchange is None or self._exchange.is_closed:
            self._exchange = await self._opened()
        return self._exchange

    async def send(self, request: HttpRequest) -> Reply:
        """Send over the exchange, opened if need be."""
        return await (await self._open()).send(request)

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamReply]:
        """Stream over the exchange, opened if need be."""
        async with (await self._open()).stream(request) as reply:
            yield reply


class _AsgiCall:
    """One call of the application."""

    def __init__(self, request: HttpRequest) -> None:
        path, _, query = request.path.partition("?")
        headers = request.headers
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 0),
            "server": ("local", 80),
        }
        self._body: bytes | None = bytes(request.body or b"")
        self.disconnected = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.complete = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: deque[bytes] = deque()
        self._woken: asyncio.Future[None] | None = None

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode().lower(): value.decode() for name, value in message.get("headers", ())
            }
        elif message["type"] == "http.response.body":
            self.chunks.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        self.wake()

    def wake(self, _: object = None) -> None:
        """Wake the reader."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def news(self, timeout: float) -> None:
        """Wait until the application has sent something; raise if it ended without an answer."""
        assert self.task is not None
        if self.task.done():
            if not self.task.cancelled():
                self.task.result()  # the application's own error
            raise ConnectionError("the embedded server gave no answer")
        self._woken = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._woken
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
