"""Exchanges over sockets, with aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from tinkex.client.http.exchange import Exchange, HttpRequest, Reply, StreamReply
from tinkex.client.settings.config import Config, is_embedded
from tinkex.client.settings.setting_forms import POOL_SIZES
from tinkex.errors import APIResponseValidationError
from tinkex.wire.pieces import Pieces
from tinkex.wire.protocol import Traffic

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client import _RequestContextManager

EMBEDDED_FACTORY = "tinkex.local:open_exchange"
"""Opens the exchange of an embedded base URL; imported when used."""
CONNECT_SECONDS = 5.0
LARGE_BODY = 1 << 16
"""Bodies from this size on are written in pieces, so that the loop can do other work in between."""
PIECE_BYTES = 1 << 18
ANSWER_BYTES = 1 << 30
"""Size limit of an answer, decompressed."""
SHORT_ANSWER_BYTES = 16 << 20
"""Size limit of an answer to a request of a session, such as a heartbeat."""


class HttpExchange:
    """Exchanges over HTTP/1.1; each class of traffic has its own connections.

    So no class of traffic starves another.
    """

    def __init__(
        self,
        base_url: str,
        proxy: str | None = None,
        proxy_headers: Mapping[str, str] | None = None,
        pool_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._base_url = base_url
        self._proxy = proxy
        self._proxy_headers = dict(proxy_headers or {}) if proxy else None
        self._pool_sizes = {**POOL_SIZES, **(pool_sizes or {})}
        self._pools: dict[str, aiohttp.ClientSession] = {}
        self._timeouts: dict[tuple[float, bool], aiohttp.ClientTimeout] = {}
        self._streams: set[aiohttp.ClientResponse] = set()
        _exchanges.add(self)

    async def send(self, request: HttpRequest) -> Reply:
        """Send and read the whole answer."""
        try:
            # an answer that was read to its end, or failed, has returned its connection
            if request.body is None or len(request.body) < LARGE_BODY:
                return await _read(await self._begin(request, request.data), request.traffic)
            async with self._response(request) as response:
                return await _read(response, request.traffic)
        except Exception as error:
            if (plain := _plain_error(error, request.timeout)) is None:
                raise
            raise plain from error

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamReply]:
        """Send and pass the answer's bytes on as they come."""
        async with contextlib.AsyncExitStack() as stack:
            with _plain_errors(request.timeout):
                response = await stack.enter_async_context(self._response(request, streaming=True))
            self._streams.add(response)
            stack.callback(self._streams.discard, response)

            async def chunks() -> AsyncIterator[bytes]:
                with _plain_errors(request.timeout):
                    async for chunk in response.content.iter_any():
                        yield chunk

            yield StreamReply(response.status, _lower(response.headers), chunks())

    async def close(self) -> None:
        """Close the connections and fail the streams that are being read."""
        for response in self._streams:  # aiohttp would leave their readers waiting
            response.content.set_exception(ConnectionError("the client was closed"))
        for pool in self._pools.values():
            await pool.close()

    def disown(self) -> None:
        """Leave the connections to the parent, in a forked child."""
        for pool in self._pools.values():
            _inherited.append(pool.connector)
            pool.detach()
        self._pools.clear()

    @contextlib.asynccontextmanager
    async def _response(
        self, request: HttpRequest, *, streaming: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a body of any size; fail if the server stops reading it."""
        body, headers = request.body, request.headers
        async with asyncio.timeout(None) as deadline:
            data: bytes | AsyncIterator[bytes] | None = None
            if body is not None and len(body) >= LARGE_BODY:
                data = _upload(body, deadline, request.timeout)
                headers = {**headers, "Content-Length": str(len(body))}
            else:
                data = request.data
            async with self._begin(request, data, headers, streaming=streaming) as response:
                deadline.reschedule(None)  # from here on aiohttp watches for silence
                yield response

    def _begin(
        self,
        request: HttpRequest,
        body: bytes | AsyncIterator[bytes] | None,
        headers: Mapping[str, str] | None = None,
        *,
        streaming: bool = False,
    ) -> _RequestContextManager:
        from yarl import URL

        headers = request.headers if headers is None else headers
        path = request.path
        address = self._base_url + path if path.startswith("/") else path
        # aiohttp sends the proxy's headers through tunnels only
        if self._proxy_headers and address.startswith("http:"):
            headers = {**headers, **self._proxy_headers}
        large = streaming or request.traffic in ("poll", "train")
        return self._pool(request.traffic).request(
            request.method,
            URL(address, encoded=True),
            data=body,
            headers=headers,
            timeout=self._limits(request.timeout, large),
            allow_redirects=False,
            proxy=self._proxy,
            proxy_headers=self._proxy_headers,
        )

    def _limits(self, timeout: float, large: bool) -> aiohttp.ClientTimeout:
        """Return the time limits of a request, made once for each kind.

        Large answers end only by silence, not by a slow line or a wait for a connection. Other
        requests have one timer for all of it.
        """
        found = self._timeouts.get((timeout, large))
        if found is None:
            import aiohttp

            found = self._timeouts[timeout, large] = aiohttp.ClientTimeout(
                total=None if large else timeout,
                sock_connect=min(CONNECT_SECONDS, timeout),
                sock_read=timeout if large else None,
            )
        return found

    def _pool(self, traffic: Traffic) -> aiohttp.ClientSession:
        pool = self._pools.get(traffic)
        if pool is None or pool.closed:
            import aiohttp

            connector = aiohttp.TCPConnector(limit=self._pool_sizes[traffic], keepalive_timeout=30)
            pool = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            self._pools[traffic] = pool
        return pool


def open_exchange(config: Config) -> Exchange:
    """Return the exchange that the settings bring, or else the one for their base URL."""
    brought: Exchange | None = config.make_http_client()
    if brought is not None:
        return brought
    if is_embedded(config.base_url):
        module, name = EMBEDDED_FACTORY.split(":")
        factory: Callable[[str], Exchange] = getattr(import_module(module), name)
        return factory(config.base_url)
    return outside_exchange(config, config.base_url)


def outside_exchange(config: Config, base_url: str = "") -> HttpExchange:
    """Return an exchange over sockets with these settings; by default for whole addresses."""
    return HttpExchange(base_url, config.proxy_url, config.proxy_authorization, config.pool_sizes)


_exchanges: weakref.WeakSet[HttpExchange] = weakref.WeakSet()
_inherited: list[object] = []
"""Connections of the parent process; to drop them would close them there."""


def _disown_all() -> None:
    for exchange in list(_exchanges):
        exchange.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


async def _read(response: aiohttp.ClientResponse, traffic: Traffic) -> Reply:
    """Read a whole answer; one above the size limit is an error."""
    limit = SHORT_ANSWER_BYTES if traffic in ("session", "telemetry") else ANSWER_BYTES
    pieces, size = [], 0
    try:
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > limit:
                raise APIResponseValidationError(
                    f"{response.method} {response.url.path}: the answer has more than {limit} "
                    "bytes, the limit"
                )
            pieces.append(piece)
    except BaseException:
        response.close()  # unread bytes must not precede the next answer
        raise
    response.release()
    return Reply(response.status, _lower(response.headers), b"".join(pieces))


async def _upload(
    body: bytes | Pieces, deadline: asyncio.Timeout, seconds: float
) -> AsyncIterator[bytes]:
    """Yield the pieces of a large body; each must be sent within `seconds`.

    aiohttp watches for silence only after the whole body was written. After the last piece the
    limit is twice as long.
    """
    loop, left = asyncio.get_running_loop(), len(body)
    for piece in (Pieces([body]) if isinstance(body, bytes) else body).cut(PIECE_BYTES):
        left -= len(piece)
        deadline.reschedule(loop.time() + (seconds if left else 2 * seconds))
        yield piece
        await asyncio.sleep(0)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _plain_error(error: Exception, timeout: float) -> Exception | None:
    """Return one of the two errors that an exchange may raise; None for any other error."""
    import aiohttp

    if isinstance(error, TimeoutError):
        is_early = "connect" in str(error).lower()
        return TimeoutError(
            "no connection in time" if is_early else f"no answer within {timeout:g} s"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        return ConnectionError(error.os_error.strerror or str(error.os_error))
    if isinstance(error, aiohttp.ClientError | OSError):
        return ConnectionError(str(error) or type(error).__name__)
    return None


@contextlib.contextmanager
def _plain_errors(timeout: float) -> Iterator[None]:
    """Raise the errors of a block as an exchange may raise them."""
    try:
        yield
    except Exception as error:
        if (plain := _plain_error(error, timeout)) is None:
            raise
        raise plain from error
