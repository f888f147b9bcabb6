"""One HTTP exchange: headers, encoding, retries, typed errors. The only file that knows HTTP.

An `Exchange` moves bytes: over sockets with aiohttp here, or straight into an ASGI application
(`tinkex.local`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import random
import time
import traceback
import uuid
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urldefrag, urlencode, urljoin, urlsplit

from tinkex import events
from tinkex._version import __version__
from tinkex.client.http.limits import BillingPause, BreakerRegistry, ByteBudget
from tinkex.client.http.request_names import headers_of
from tinkex.client.settings.config import POOL_SIZES, Config, is_address, is_embedded
from tinkex.client.settings.credentials import (
    Token,
    check_token,
    is_token,
    rejects_token,
    run_command,
)
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    Request,
    Response,
    TinkerError,
    describe_body,
    error_for,
    is_retryable,
)
from tinkex.types.account import AuthTokenResponse
from tinkex.types.sessions import Empty
from tinkex.wire import codec
from tinkex.wire.pieces import Pieces
from tinkex.wire.protocol import (
    AUTH_TOKEN,
    BY_NAME,
    CLIENT_CONFIG,
    PREFIX,
    PROTOCOL_VERSION,
    Operation,
    Traffic,
)
from tinkex.wire.redacted_http import redact_headers, redact_url, wait_asked
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber, secrets_in, secrets_of

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client import _RequestContextManager

logger = logging.getLogger("tinkex")

OFF_LOOP_BYTES = 64_000
"""Bodies above this are encoded and decoded in a thread, so that the loop stays responsive."""
CONFLICT_PATIENCE = 2.0
RESPONSE_BYTES = 52_428_800
"""Bytes of announced results that are fetched at once, until the server says otherwise."""
CONNECT_SECONDS = 5.0
LARGE_BODY = 1 << 16
"""Bodies from this size on are written piece by piece, so that the loop gets to other things in
between."""
PIECE_BYTES = 1 << 18
LONGEST_RETRY_AFTER = 60.0
REJECTED_ATTEMPTS = 16
"""How often a request is sent again that a proxy on the way rejected with a 400 that says nothing.
"""
ANSWER_BYTES = 1 << 30
"""Largest answer that is read, expanded."""
SHORT_ANSWER_BYTES = 16 << 20
"""Largest answer to a request of a session, such as a heartbeat."""
KEPT_BYTES = 65_536
"""How much of an answer an error keeps."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5
KEY_HEADER = "X-API-Key"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str = ""
    elapsed: float = 0.0
    """Seconds from the first attempt to the answer."""
    retries: int = 0

    @property
    def content_type(self) -> str:
        """The media type, or an empty string."""
        return self.headers.get("content-type", "")

    @property
    def retry_after(self) -> float | None:
        """Seconds the server asks to wait, no more than a minute; a date counts from now."""
        return _bounded(wait_asked(self.headers))


def _bounded(seconds: float | None) -> float | None:
    """A wait that is honoured: the waits that are longer than a minute are ours to choose."""
    return seconds if seconds is not None and 0 < seconds <= LONGEST_RETRY_AFTER else None


@dataclass(frozen=True, slots=True)
class StreamReply:
    """An answer that is still coming: its status and headers, and its bytes as they arrive."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    url: str = ""


class Exchange(Protocol):
    """Moves requests and replies. `traffic` says over which connections; header names come back
    lower-case.
    """

    async def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        traffic: Traffic = "rest",
    ) -> Reply:
        """Send; raise ConnectionError, or TimeoutError when nothing is heard for `timeout` seconds."""

    def stream(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        traffic: Traffic = "rest",
    ) -> AbstractAsyncContextManager[StreamReply]:
        """The same, with the answer's bytes as they come; leaving the block hangs up."""

    async def close(self) -> None:
        """Release what is held."""


class HttpExchange:
    """Exchanges over sockets, each class of traffic over connections of its own: none of them
    starves another.
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

    def _pool(self, traffic: Traffic) -> aiohttp.ClientSession:
        pool = self._pools.get(traffic)
        if pool is None or pool.closed:
            import aiohttp

            connector = aiohttp.TCPConnector(limit=self._pool_sizes[traffic], keepalive_timeout=30)
            pool = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            self._pools[traffic] = pool
        return pool

    def _begin(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes] | None,
        timeout: float,
        traffic: Traffic,
        *,
        streaming: bool = False,
    ) -> _RequestContextManager:
        """A request over HTTP/1.1; a whole address may stand in for the path."""
        from yarl import URL

        large = streaming or traffic in ("poll", "train")
        limits = self._timeouts.get((timeout, large))
        if limits is None:
            import aiohttp

            # Passes and results may be large: only silence ends those, not a slow line or a wait
            # for a connection. For the others, one timer for the whole request says all.
            limits = self._timeouts[timeout, large] = aiohttp.ClientTimeout(
                total=None if large else timeout,
                sock_connect=min(CONNECT_SECONDS, timeout),
                sock_read=timeout if large else None,
            )
        address = self._base_url + path if path.startswith("/") else path
        # aiohttp gives them to tunnels alone
        if self._proxy_headers and address.startswith("http:"):
            headers = {**headers, **self._proxy_headers}
        return self._pool(traffic).request(
            method,
            URL(address, encoded=True),
            data=body,
            headers=headers,
            timeout=limits,
            allow_redirects=False,
            proxy=self._proxy,
            proxy_headers=self._proxy_headers,
        )

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | Pieces | None,
        timeout: float,
        traffic: Traffic,
        *,
        streaming: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The same for any body: a large one is written piece by piece, and a peer that stops
        taking it is noticed.
        """
        async with asyncio.timeout(None) as deadline:
            data: bytes | AsyncIterator[bytes] | None
            if body is None or len(body) < LARGE_BODY:
                data = None if body is None else bytes(body)
            else:
                data, headers = (
                    _upload(body, deadline, timeout),
                    {**headers, "Content-Length": str(len(body))},
                )
            async with self._begin(
                method, path, headers, data, timeout, traffic, streaming=streaming
            ) as response:
                deadline.reschedule(None)  # from here on the HTTP library listens for silence
                yield response

    async def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | Pieces | None,
        timeout: float,
        traffic: Traffic = "rest",
    ) -> Reply:
        """Send over HTTP/1.1 and read the whole answer."""
        try:
            # read to its end, or failing, an answer lets its connection go
            if body is None or len(body) < LARGE_BODY:
                data = None if body is None else bytes(body)
                response = await self._begin(method, path, headers, data, timeout, traffic)
                return Reply(
                    response.status, _lower(response.headers), await _read(response, traffic)
                )
            async with self._request(method, path, headers, body, timeout, traffic) as response:
                return Reply(
                    response.status, _lower(response.headers), await _read(response, traffic)
                )
        except Exception as error:
            if (plain := _plain_error(error, timeout)) is None:
                raise
            raise plain from error

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        traffic: Traffic = "rest",
    ) -> AsyncIterator[StreamReply]:
        """Send over HTTP/1.1 and hand the answer's bytes on as they come."""
        async with contextlib.AsyncExitStack() as stack:
            with _plain_errors(timeout):
                request = self._request(
                    method, path, headers, body, timeout, traffic, streaming=True
                )
                response = await stack.enter_async_context(request)
            self._streams.add(response)
            stack.callback(self._streams.discard, response)

            async def chunks() -> AsyncIterator[bytes]:
                with _plain_errors(timeout):
                    async for chunk in response.content.iter_any():
                        yield chunk

            yield StreamReply(response.status, _lower(response.headers), chunks())

    async def close(self) -> None:
        """Close the pools; whoever reads a stream is told, which aiohttp would leave waiting."""
        for response in self._streams:
            response.content.set_exception(ConnectionError("the client was closed"))
        for pool in self._pools.values():
            await pool.close()

    def disown(self) -> None:
        """In a forked child: leave the connections to the parent, which goes on using them."""
        for pool in self._pools.values():
            _inherited.append(pool.connector)
            pool.detach()
        self._pools.clear()


_exchanges: weakref.WeakSet[HttpExchange] = weakref.WeakSet()
_inherited: list[object] = []
"""Connections of the process that this one was forked from: dropping them would close them."""


def _disown_all() -> None:
    for exchange in list(_exchanges):
        exchange.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


async def _read(response: aiohttp.ClientResponse, traffic: Traffic) -> bytes:
    """Read an answer to its end, unless it grows beyond what any may have."""
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
        response.close()  # what has not been read must not come with the next answer
        raise
    response.release()
    return b"".join(pieces)


async def _upload(
    body: bytes | Pieces, deadline: asyncio.Timeout, seconds: float
) -> AsyncIterator[bytes]:
    """A large body, piece by piece while it is written; a peer that stops taking it is noticed.

    The HTTP library listens for silence only once all is written. After the last piece it has as
    much time again.
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
    """What the HTTP library raises, as one of the two errors that an exchange may raise; None for
    anything else.
    """
    import aiohttp

    if isinstance(error, TimeoutError):
        return TimeoutError(
            "no connection in time"
            if "connect" in str(error).lower()
            else f"no answer within {timeout:g} s"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        return ConnectionError(error.os_error.strerror or str(error.os_error))
    if isinstance(error, aiohttp.ClientError | OSError):
        return ConnectionError(str(error) or type(error).__name__)
    return None


@contextlib.contextmanager
def _plain_errors(timeout: float) -> Iterator[None]:
    """Around the parts of a stream: errors as an exchange may raise them."""
    try:
        yield
    except Exception as error:
        if (plain := _plain_error(error, timeout)) is None:
            raise
        raise plain from error


# A base URL whose scheme is listed here is served by the named factory instead of HTTP; imported
# when used.
EMBEDDED_FACTORY = "tinkex.local:open_exchange"


def open_exchange(config: Config) -> Exchange:
    """The exchange a base URL asks for, unless the settings bring one."""
    brought: Exchange | None = config.make_http_client()
    if brought is not None:
        return brought
    if is_embedded(config.base_url):
        module, name = EMBEDDED_FACTORY.split(":")
        factory: Callable[[str], Exchange] = getattr(import_module(module), name)
        return factory(config.base_url)
    return HttpExchange(
        config.base_url, config.proxy_url, config.proxy_authorization, config.pool_sizes
    )


class Transport:
    """`await transport.call(op, request)` gives a decoded response or raises a typed error."""

    def __init__(self, config: Config, exchange: Exchange | None = None) -> None:
        self.config = config
        self.place = (
            config.base_url if is_embedded(config.base_url) else urlsplit(config.base_url).netloc
        )
        self.billing = BillingPause()
        self.response_budget = ByteBudget(RESPONSE_BYTES)
        self.facts: dict[str, Any] = {}
        """What every event of this transport's requests says besides."""
        self.is_older: bool | None = None
        """Whether the server speaks an older dialect; None while nobody knows."""
        self._exchange = exchange or open_exchange(config)
        self._home = "http://local" if is_embedded(config.base_url) else config.base_url
        self._outside: HttpExchange | None = None
        self._closed = False
        self._pid = os.getpid()
        self._headers = {
            "User-Agent": config.user_agent or f"tinkex/{__version__} (python)",
            "Accept": codec.JSON,
            **_platform_headers(),
        }
        if config.cf_access_client_id and config.cf_access_client_secret:
            self._headers["CF-Access-Client-Id"] = config.cf_access_client_id
            self._headers["CF-Access-Client-Secret"] = config.cf_access_client_secret
        self._credential = config.api_key
        self._token: Token | None = None
        self._scrubber = Scrubber(secrets_of(config))
        self._keys = {config.api_key} if config.api_key else set()
        self.breakers = BreakerRegistry() if config.circuit_breaker else None

    async def close(self) -> None:
        """Release the connections; whoever still waits for an answer is told."""
        self._closed = True
        self.stop_renewal()
        await self._exchange.close()
        if self._outside is not None:
            await self._outside.close()

    def use_tokens(self) -> None:
        """From now on, send a short-lived token that the credential is exchanged for."""
        self._token = self._token or Token(self._exchange_credential)

    def stop_renewal(self) -> None:
        """Renew tokens no more in the background: few requests follow, if any."""
        if self._token is not None:
            self._token.stop()

    async def _exchange_credential(self) -> str:
        if self.config.credential_cmd and not self.config.api_key:
            self._credential = None  # ask the command anew
        answer: AuthTokenResponse = await self.call(
            AUTH_TOKEN, Empty(), patience=min(self.config.patience, self.config.timeout)
        )
        return answer.jwt

    async def _raw_key(self) -> str | None:
        """The credential itself; one that is a token is refused here if it cannot be used."""
        command = self.config.credential_cmd
        if self._credential is None and command:
            self._credential = await run_command(command)
        if (
            self._credential is not None
            and is_token(self._credential)
            and not is_embedded(self.config.base_url)
        ):
            try:
                check_token(self._credential, time.time())
            except TinkerError:
                if command and not self.config.api_key:
                    self._credential = None  # the next request asks the command again
                raise
        return self._credential

    async def _key_headers(self, op: Operation) -> dict[str, str]:
        """The credential of a request: the token, where tokens are used, except to get one."""
        if self._token is not None and op not in (AUTH_TOKEN, CLIENT_CONFIG):
            key: str | None = await self._token.value()
        else:
            key = await self._raw_key()
        if key is None:
            return {}
        self._keep_secret(key)
        return {KEY_HEADER: key}

    def _keep_secret(self, key: str) -> None:
        """Have a key left out of what is told; it is no setting, but no less a secret."""
        if key not in self._keys:
            self._keys = {known for known in (self._credential, key) if known}
            self._scrubber = Scrubber((*secrets_of(self.config), *self._keys))

    async def renew_key(self, headers: dict[str, str]) -> None:
        """Put a token that is good now into the headers of a request that is sent again."""
        if self._token is not None and self._token.gave(headers.get(KEY_HEADER)):
            headers[KEY_HEADER] = await self._token.value()
            self._keep_secret(headers[KEY_HEADER])

    async def _replace_key(
        self, op: Operation, headers: dict[str, str], told: Mapping[str, str]
    ) -> bool:
        """Put a new token into the headers of a request that was answered 401, if that may help."""
        rejected = headers.get(KEY_HEADER)
        if self._token is None or rejected is None or op in (AUTH_TOKEN, CLIENT_CONFIG):
            return False
        if not rejects_token(told) or not self._token.gave(rejected):
            return False
        headers[KEY_HEADER] = await self._token.replaced(rejected)
        self._keep_secret(headers[KEY_HEADER])
        logger.debug("%s: the token was rejected; sent once more with a new one", op.name)
        return True

    async def _all_headers(
        self, op: Operation, timeout: float, *more: Mapping[str, str]
    ) -> dict[str, str]:
        """Headers of a request, the later the stronger: ours, the configured ones, those of the
        request.
        """
        own = {
            **self._headers,
            **await self._key_headers(op),
            "X-Stainless-Read-Timeout": f"{timeout:g}",
            **headers_of(op.name),
        }
        if self.config.default_headers or not all(
            OUR_NAMES.issuperset(headers) for headers in more
        ):
            return _merged(own, self.config.default_headers, *more)
        for headers in more:
            own.update(headers)
        return own

    # ── whole calls ───────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        op: Operation,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        patience: float | None = None,
        max_retries: int | None = None,
        final: Container[int] = (),
        compress: bool = False,
        as_protobuf: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the exchange, trying again while that may help, and decode the answer.

        A status in `final` is raised at once, for the caller to deal with.
        """
        body = None if request is None else await _encode(request, compress, as_protobuf)
        reply = await self.request(
            op,
            body,
            path=path,
            query=query,
            headers=headers,
            timeout=timeout,
            patience=patience,
            max_retries=max_retries,
            final=final,
            metadata=metadata,
        )
        if op.response is Empty:  # the status has said it all, whatever the body is
            return Empty()
        return self.decode(op, op.response, reply)

    async def request(
        self,
        op: Operation,
        body: codec.Body | None = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        patience: float | None = None,
        max_retries: int | None = None,
        final: Container[int] = (),
        metadata: Mapping[str, Any] | None = None,
        url: str | None = None,
        follow: bool = True,
        without: Container[str] = (),
    ) -> Reply:
        """The same with bytes at both ends: a reply whose status is good, or a typed error.

        A `url` (from the base URL on) stands in for the operation's path and the query. Without
        `follow`, an answer that sends on to another address is returned as it is. Headers named in
        `without` are not sent.
        """
        limit = self.config.timeout if timeout is None else timeout
        merged = await self._all_headers(op, limit, _body_headers(op, body), headers or {})
        if without:
            merged = {name: value for name, value in merged.items() if name.lower() not in without}
        url = url or target(op, path, {**self.config.default_query, **(query or {})})
        sending = _Sending(self, op, url, merged, body.source if body else None, limit, follow)
        started = time.monotonic()
        patience = self.config.patience if patience is None else patience
        max_retries = self.config.max_retries if max_retries is None else max_retries
        with self._observed(op, metadata, url) as outcome:
            try:
                reply = await self.persist(sending, patience, final, max_retries)
            except AuthenticationError as error:
                if error.response is None or not await self._replace_key(
                    op, merged, error.response.headers
                ):
                    raise
                reply = await self.persist(sending, patience, final, max_retries)
            outcome["retry_count"] = sending.retries
        self._heed_deprecation(op, reply.headers)
        return Reply(
            reply.status,
            reply.headers,
            reply.body,
            reply.url,
            time.monotonic() - started,
            sending.retries,
        )

    @contextlib.asynccontextmanager
    async def stream(
        self,
        op: Operation,
        request: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        url: str | None = None,
    ) -> AsyncIterator[StreamReply]:
        """An answer whose bytes come as they are made. It is asked for once: what has been read
        cannot be unread.
        """
        limit = self.config.timeout if timeout is None else timeout
        body = None if request is None else await _encode(request, False, True)
        wants = {"Accept": codec.EVENT_STREAM}
        merged = await self._all_headers(op, limit, _body_headers(op, body), wants, headers or {})
        url = url or target(op, None, self.config.default_query)
        self._check_usable(op)
        data, address = body.data if body else None, self._home + url
        self._dump(op, address, merged, data)
        with self._observed(op, None, url):
            async with contextlib.AsyncExitStack() as stack:
                with self._typed_errors(op, self.place, address):
                    reply = await stack.enter_async_context(
                        self._exchange.stream(
                            op.method, url, self._traced(merged), data, limit, op.traffic
                        )
                    )
                if reply.status == 401 and await self._replace_key(op, merged, reply.headers):
                    await stack.aclose()
                    with self._typed_errors(op, self.place, address):
                        reply = await stack.enter_async_context(
                            self._exchange.stream(
                                op.method, url, self._traced(merged), data, limit, op.traffic
                            )
                        )
                source = self._typed_chunks(op, address, reply.chunks)
                chunks = await stack.enter_async_context(contextlib.aclosing(source))
                if reply.status >= 300:
                    text = await _beginning(chunks)
                    raise self.refusal(op, Reply(reply.status, reply.headers, text, address))
                yield replace(reply, chunks=chunks, url=address)

    @contextlib.asynccontextmanager
    async def fetch(
        self, url: str, headers: Mapping[str, str], timeout: float
    ) -> AsyncIterator[StreamReply]:
        """What is behind a whole address, such as a signed one, as it comes; our credential is for
        no one there.

        All statuses are returned, but that redirects are followed; what goes wrong is a plain
        ConnectionError or TimeoutError.
        """
        sent = {"User-Agent": self._headers["User-Agent"], **headers}
        for left in reversed(range(MOST_REDIRECTS + 1)):
            exchange: Exchange = self._abroad()
            place = url
            if _origin(url) == _origin(self._home):
                exchange = self._exchange
                place = (
                    url.removeprefix("http://local") if is_embedded(self.config.base_url) else url
                )
            async with exchange.stream("GET", place, sent, None, timeout) as reply:
                found = _next_address(url, Reply(reply.status, reply.headers, b""))
                if found is None or not left:
                    yield replace(reply, url=url)
                    return
            if url.startswith("https:") and not found.startswith("https:"):
                raise ConnectionError("an encrypted address sends on to one that is not")
            url = found

    async def _typed_chunks(
        self, op: Operation, address: str, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes]:
        """The bytes of an answer. Only what goes wrong on the way is ours: what a reader raises is
        the reader's.
        """
        try:
            while True:
                with self._typed_errors(op, self.place, address):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()

    async def poll(
        self, op: Operation, request: Any, headers: Mapping[str, str], timeout: float
    ) -> Reply:
        """One attempt at a long poll, with all statuses returned: the caller knows what they mean.

        A request that is sent again and again may come as the body that was made of it.
        """
        body = request if isinstance(request, codec.Body) else codec.encode(request)
        merged = await self._all_headers(op, timeout, body.headers, headers)
        with self._observed(op, None) as outcome:
            url = target(op, None, self.config.default_query)
            reply = await self.exchange(op, url, merged, body.data, timeout)
            if reply.status == 401 and await self._replace_key(op, merged, reply.headers):
                reply = await self.exchange(op, url, merged, body.data, timeout)
            # 408 is how a server says that there is nothing yet, after a while of waiting
            outcome["result"] = "ok" if reply.status < 300 or reply.status == 408 else "error"
            return reply

    async def once(
        self,
        op: Operation,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """One attempt at a request without a body, with all statuses returned: the caller knows
        what they mean.
        """
        limit = self.config.timeout if timeout is None else timeout
        merged = await self._all_headers(op, limit, headers or {})
        with self._observed(op, None) as outcome:
            url = target(op, path, self.config.default_query)
            reply = await self.exchange(op, url, merged, None, limit)
            if reply.status == 401 and await self._replace_key(op, merged, reply.headers):
                reply = await self.exchange(op, url, merged, None, limit)
            outcome["result"] = "ok" if reply.status < 400 else "error"
            return reply

    # ── single attempts ───────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        op: Operation,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Pieces | None,
        timeout: float,
        follow: bool = True,
    ) -> Reply:
        """One attempt: a reply with a good status, or a typed error."""
        reply, place = await self.exchange(op, url, headers, body, timeout), self.place
        if not follow and reply.status in REDIRECTS and "location" in reply.headers:
            return reply
        if op.method == "GET" and reply.status in REDIRECTS:
            reply, place = await self._follow(op, url, headers, reply, timeout)
        if reply.status >= 300:
            raise self.refusal(op, reply, place)
        return reply

    def address(self, op: Operation, path: Mapping[str, str] | None, reply: Reply) -> str | None:
        """The whole address that an answer to a request sends on to, if it does."""
        return _next_address(self._home + target(op, path), reply)

    async def _follow(
        self, op: Operation, url: str, headers: Mapping[str, str], reply: Reply, timeout: float
    ) -> tuple[Reply, str]:
        """Go where a GET is sent on to, some steps at most; the last reply, and who gave it.

        Only what no one minds being seen goes to another origin: the key and extra headers are for
        this one alone.
        """
        address, place = self._home + url, self.place
        for _ in range(MOST_REDIRECTS):
            found = _next_address(address, reply)
            if found is None:
                break
            if _origin(found) != _origin(address):
                headers = {
                    name: value
                    for name, value in headers.items()
                    if name.lower() in ("user-agent", "accept")
                }
            address, place = found, urlsplit(found).hostname or ""
            reply = await self.exchange(op, address, headers, None, timeout)
        return reply, place

    async def exchange(
        self,
        op: Operation,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Pieces | None,
        timeout: float,
    ) -> Reply:
        """One attempt: whatever reply comes, or APIConnectionError when none does."""
        self._check_usable(op)
        exchange, place = self._exchange, self.place
        address = self._home + url if url.startswith("/") else url
        if not url.startswith("/"):
            if _origin(url) == _origin(self._home):
                url = url.removeprefix("http://local") if is_embedded(self.config.base_url) else url
            else:
                exchange, place = self._abroad(), urlsplit(url).hostname or ""
        self._dump(op, address, headers, body)
        if exchange is self._exchange:
            headers = self._traced(headers)
        started = time.monotonic()
        try:
            if isinstance(exchange, HttpExchange):
                reply = await exchange.send(op.method, url, headers, body, timeout, op.traffic)
            else:
                data = None if body is None else bytes(body)
                reply = await exchange.send(op.method, url, headers, data, timeout, op.traffic)
        except (TimeoutError, ConnectionError) as error:
            if isinstance(error, TinkerError):
                raise
            raise self._typed_error(op, place, address, error) from error
        return Reply(reply.status, reply.headers, reply.body, address, time.monotonic() - started)

    def _dump(
        self, op: Operation, address: str, headers: Mapping[str, str], body: bytes | Pieces | None
    ) -> None:
        """Log an attempt, where that is wanted."""
        if self.config.dump_headers:
            shown = {
                name: self._scrubber.text(value) for name, value in redact_headers(headers).items()
            }
            place = self._scrubber.without_keys(redact_url(address))
            logger.info("%s %s headers=%s body=%d bytes", op.method, place, shown, len(body or b""))

    def _traced(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Headers that say which trace a request belongs to, where that is wanted."""
        if not self.config.otel_propagate:
            return headers
        from tinkex import otel

        return otel.inject(headers)

    def _check_usable(self, op: Operation) -> None:
        if os.getpid() != self._pid:
            raise TinkerError(
                f"{op.name}: this client was made before the process forked",
                hint="make a new ServiceClient in the child",
            )
        if self._closed:
            raise TinkerError(f"{op.name}: the client was closed before there was an answer")

    def _typed_error(
        self, op: Operation, place: str, address: str, error: Exception
    ) -> APIConnectionError:
        """The error behind an answer that did not come."""
        if isinstance(error, TimeoutError):
            return APITimeoutError(
                f"{op.title} at {place}: {error}", request=self._sent(op, address)
            )
        return APIConnectionError(
            self._scrubber.text(f"{op.title}: cannot reach {place}: {error}"),
            request=self._sent(op, address),
            hint="check the base URL, and that the server is running",
        )

    @contextlib.contextmanager
    def _typed_errors(self, op: Operation, place: str, address: str) -> Iterator[None]:
        """Around the parts of a stream: errors as `exchange` raises them."""
        try:
            yield
        except (TimeoutError, ConnectionError) as error:
            if isinstance(error, TinkerError):
                raise
            raise self._typed_error(op, place, address, error) from error

    def _observed(
        self, op: Operation, metadata: Mapping[str, Any] | None, url: str | None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Around a request: whoever listens is told of it, and how it went; the block may say so in
        the outcome.
        """
        return (
            self._announced(op, metadata, url) if events.is_heard() else contextlib.nullcontext({})
        )

    @contextlib.contextmanager
    def _announced(
        self, op: Operation, metadata: Mapping[str, Any] | None, url: str | None
    ) -> Iterator[dict[str, Any]]:
        outcome: dict[str, Any] = {}
        facts = {
            "method": op.method,
            "path": f"{PREFIX}/{op.path}"
            if op.name in BY_NAME or not url
            else url.partition("?")[0],
            "pool_type": op.traffic,
            "base_url": self.config.base_url,
            **self.facts,
            **(self.config.user_metadata or {}),
            **(metadata or {}),
        }
        started = time.monotonic()
        events.emit(events.HTTP_START, {"system_time": time.time()}, facts)
        try:
            yield outcome
        except APIError as error:
            facts |= {"result": "error", "retry_count": error.attempts - 1}
            events.emit(events.HTTP_STOP, {"duration": _milliseconds(started)}, facts)
            raise
        except (
            asyncio.CancelledError,
            GeneratorExit,
        ):  # whoever asked has gone: no failure, but an end
            facts |= {"result": "cancelled", "retry_count": outcome.get("retry_count", 0)}
            events.emit(events.HTTP_STOP, {"duration": _milliseconds(started)}, facts)
            raise
        except Exception as error:
            lines = self._scrubber.text(traceback.format_exc(), MOST_TRACEBACK, end=True)
            facts |= {
                "kind": type(error).__name__,
                "reason": self._scrubber.text(str(error)),
                "stacktrace": lines,
            }
            events.emit(events.HTTP_EXCEPTION, {"duration": _milliseconds(started)}, facts)
            raise
        facts = {**facts, "result": "ok", "retry_count": 0, **outcome}
        events.emit(events.HTTP_STOP, {"duration": _milliseconds(started)}, facts)

    def _abroad(self) -> HttpExchange:
        """The exchange for addresses that the server sends us on to."""
        if self._outside is None:
            config = self.config
            self._outside = HttpExchange(
                "", config.proxy_url, config.proxy_authorization, config.pool_sizes
            )
        return self._outside

    async def persist(
        self,
        sending: _Sending,
        patience: float,
        final: Container[int] = (),
        max_retries: int | None = None,
    ) -> Reply:
        """The retry policy: exponential with jitter, the server's Retry-After honoured, bounded by
        time.

        An account that must be topped up is waited for much longer, and counts for nothing. A good
        answer that the server wants asked for again (`x-should-retry: true`) is the answer when
        there has been enough of that.
        """
        started, number = time.monotonic(), sending.retries
        while True:
            try:
                reply = await sending.attempt(number)
                if not _should_retry(reply.headers):
                    return reply
                number += 1
                delay = backoff(number, reply.retry_after)
                spent = max_retries is not None and number > max_retries
                if spent or time.monotonic() - started + delay > patience:
                    return reply
                await asyncio.sleep(delay)
            except BillingError as error:
                if 402 in final or patience <= 0 or not await self.billing.waited(error):
                    raise
                started = time.monotonic()
            except (APIConnectionError, APIStatusError) as error:
                number += 1
                error.attempts = number
                delay = backoff(number, error.retry_after)
                status = error.status or 0
                allowed = min(CONFLICT_PATIENCE, patience) if status == 409 else patience
                spent = max_retries is not None and number > max_retries
                spent = spent or (isinstance(error, RejectedError) and number > REJECTED_ATTEMPTS)
                hopeless = status in final or not is_retryable(error)
                if spent or hopeless or time.monotonic() - started + delay > allowed:
                    raise _worn_out(error, number, time.monotonic() - started) from error.__cause__
                if number == 1:
                    logger.warning("%s; trying again for up to %.0f s", error.message, allowed)
                else:
                    logger.debug("%s; attempt %d", error.message, number + 1)
                await asyncio.sleep(delay)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    def decode(self, op: Operation, kind: type[Any], reply: Reply) -> Any:
        """Read a good answer; a bad one names the endpoint and what is wrong with it."""
        try:
            return codec.decode(kind, reply.body or b"{}", reply.content_type or codec.JSON)
        except ValueError as error:
            raise self.misread(
                op, reply, f"the answer is not a {kind.__name__}: {error}"
            ) from error

    def misread(self, op: Operation, reply: Reply, problem: str) -> APIResponseValidationError:
        """The error behind a good status with a body that cannot be read."""
        response = self._response(op, reply)
        message = self._scrubber.text(f"{op.name} at {self.place}: {problem}")
        return APIResponseValidationError(message, body=response.content, response=response)

    def refusal(self, op: Operation, reply: Reply, place: str = "") -> APIError:
        """The error behind a bad status. Secrets that the server may have been told and repeats are
        left out.
        """
        where = f"{op.title} at {place or self.place}"
        response = self._response(op, reply)
        error: APIError
        if reply.status == 400 and not reply.body:
            error = RejectedError(
                f"{where}: 400 without a word: a proxy on the way rejected it, not the server",
                request=response.request,
                response=response,
            )
        else:
            body = _loads(self._body(reply.body, reply.url))
            error = error_for(reply.status)(
                f"{where}: {reply.status}: {self._scrubber.text(describe_body(body))}",
                response,
                body,
                status_code=reply.status,
                retry_after=reply.retry_after,
            )
            error.retry_after = _bounded(error.retry_after)
            if (text := reply.headers.get("retry-after")) is not None and wait_asked(
                {"retry-after": text}
            ) is None:
                shown = self._scrubber.text(self._without_secrets(text, reply.url), 100)
                logger.warning("%s: a retry-after that cannot be read: %r", where, shown)
        error.should_retry = _should_retry(reply.headers)
        return error

    def _heed_deprecation(self, op: Operation, headers: Mapping[str, str]) -> None:
        if note := headers.get("x-deprecation-note"):
            level = (
                logging.ERROR if headers.get("x-deprecation-level") == "error" else logging.WARNING
            )
            logger.log(level, "%s: %s", op.name, self._scrubber.text(note))

    def without_keys(self, text: str) -> str:
        """The server's words, as they are but for our secrets and for what looks like a key."""
        return self._scrubber.without_keys(text)

    def _without_secrets(self, text: str, url: str) -> str:
        """What came from an address, as it is but for keys and for what the address itself was
        signed with.
        """
        return Scrubber(secrets_in(url)).without_keys(self.without_keys(text))

    def _body(self, data: bytes, url: str) -> bytes:
        text = data.decode(errors="surrogateescape")
        return self._without_secrets(text, url).encode(errors="surrogateescape")

    def _sent(self, op: Operation, address: str) -> Request:
        """A request as an error keeps it."""
        return Request(op.method, self._scrubber.without_keys(address))

    def _response(self, op: Operation, reply: Reply) -> Response:
        """An answer as an error keeps it."""
        headers = {
            name: self._without_secrets(value, reply.url) for name, value in reply.headers.items()
        }
        content = self._body(reply.body[:KEPT_BYTES], reply.url)
        return Response(
            reply.status, headers, content, self._sent(op, reply.url or self._home), reply.elapsed
        )


class _Sending:
    """A request that is sent until there is an answer."""

    __slots__ = ("body", "follow", "headers", "op", "retries", "timeout", "transport", "url")

    def __init__(
        self,
        transport: Transport,
        op: Operation,
        url: str,
        headers: dict[str, str],
        body: bytes | Pieces | None,
        timeout: float,
        follow: bool,
    ) -> None:
        self.transport, self.op, self.url, self.headers = transport, op, url, headers
        self.body, self.timeout, self.follow = body, timeout, follow
        self.retries = 0

    def attempt(self, number: int) -> Awaitable[Reply]:
        """Send it once more, under its own number; through the operation's breaker, where there are
        any.
        """
        self.retries = number
        self.headers["X-Stainless-Retry-Count"] = str(number)
        send = self._again if number else self._once
        breakers = self.transport.breakers
        return (
            send()
            if breakers is None
            else breakers.get(f"{self.op.method} {self.op.path}").call(send)
        )

    async def _again(self) -> Reply:
        """Send it with a token that is good now: retries may go on for longer than one lasts."""
        await self.transport.renew_key(self.headers)
        return await self._once()

    def _once(self) -> Awaitable[Reply]:
        return self.transport.send(
            self.op, self.url, self.headers, self.body, self.timeout, self.follow
        )


class RejectedError(APIConnectionError):
    """A 400 that says nothing: not the server's answer, but that of a proxy that did not let the
    request through.
    """


@functools.cache
def _platform_headers() -> dict[str, str]:
    """What the official SDK says of itself in every request; the version is that of the protocol."""
    system = {"Darwin": "MacOS"}.get(platform.system(), platform.system() or "Unknown")
    machine = platform.machine().lower()
    arch = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "i386": "x32", "i686": "x32"}.get(
        machine, machine
    )
    return {
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": system,
        "X-Stainless-Arch": arch or "unknown",
        "X-Stainless-Runtime": platform.python_implementation(),
        "X-Stainless-Runtime-Version": platform.python_version(),
        "X-Stainless-Async": "async:asyncio",
    }


def _merged(first: dict[str, str], *more: Mapping[str, str]) -> dict[str, str]:
    """Headers together, the later the stronger; names are told apart without regard to case."""
    known = {name.lower(): name for name in first}
    for headers in more:
        for name, value in headers.items():
            first.pop(known.get(name.lower(), ""), None)
            known[name.lower()] = name
            first[name] = value
    return first


OUR_NAMES = frozenset(
    {
        "Accept",
        "Content-Encoding",
        "Content-Type",
        "X-Idempotency-Key",
        "X-Stainless-Raw-Response",
        "X-Tinker-Create-Promise-Roundtrip-Time",
        "X-Tinker-Request-Iteration",
        "X-Tinker-Request-Type",
        "X-Tinker-Sampling-Backpressure",
    }
)
"""Headers of ours, always spelt so: these need not be compared without regard to case."""


def _milliseconds(since: float) -> float:
    return (time.monotonic() - since) * 1000


def _body_headers(op: Operation, body: codec.Body | None) -> dict[str, str]:
    if op.method == "GET":
        return {}
    content = body.headers if body else {"Content-Type": codec.JSON}
    return {**content, "X-Idempotency-Key": f"tinkex-{uuid.uuid4()}"}


def _should_retry(headers: Mapping[str, str]) -> bool | None:
    """What the server says about sending a request again; None when it leaves that to us."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower())


def target(
    op: Operation, path: Mapping[str, str] | None = None, query: Mapping[str, object] | None = None
) -> str:
    """The path and query of a request; what is None is left out of the query."""
    url = f"{PREFIX}/{op.path}"
    if path or "{" in url:
        url = url.format_map({name: quote(value, safe=":") for name, value in (path or {}).items()})
    if not query:
        return url
    pairs = [(name, str(value)) for name, value in query.items() if value is not None]
    return f"{url}?{urlencode(pairs, quote_via=quote, safe='')}" if pairs else url


def _next_address(address: str, reply: Reply) -> str | None:
    """Where the answer from an address sends its reader on to, if it does and the place can be gone
    to.
    """
    if reply.status not in REDIRECTS or "location" not in reply.headers:
        return None
    try:
        found = urldefrag(urljoin(address, reply.headers["location"])).url
    except ValueError:
        return None
    # A signed address must arrive as it was written, but for the characters that no address may
    # have.
    found = quote(found, safe="!$%&'()*+,/:;=?@[]~")
    return found if is_address(found) else None


def origin_of(base_url: str) -> str:
    """A base URL without its path, in one spelling: what connections and budgets are shared by."""
    if is_embedded(base_url):
        return base_url
    scheme, host, port = _origin(base_url)
    return f"{scheme}://{host}:{port}"


def _origin(address: str) -> tuple[str, str, int | None]:
    parts = urlsplit(address)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or {"http": 80, "https": 443}.get(parts.scheme),
    )


def backoff(
    failures: int, retry_after: float | None = None, first: float = 0.5, most: float = 10.0
) -> float:
    """Seconds to wait after the n-th failure in a row."""
    delay: float = min(first * 2 ** (failures - 1), most) * random.uniform(0.75, 1.0)
    return max(delay, retry_after) if retry_after and retry_after <= LONGEST_RETRY_AFTER else delay


async def _beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """As much of an answer as an error keeps; the rest, which may never end, is not waited for."""
    data = b""
    async for chunk in chunks:
        data += chunk
        if len(data) >= KEPT_BYTES:
            break
    return data


async def _encode(request: Any, compress: bool, as_protobuf: bool) -> codec.Body:
    size = getattr(request, "nbytes", 0)
    if codec.has_protobuf(type(request)) or size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(
            codec.encode, request, compress=compress, as_protobuf=as_protobuf
        )
    return codec.encode(request, compress=compress)


def _loads(body: bytes) -> Any:
    try:
        return codec.loads(body) if body else ""
    except ValueError:
        return body[:KEPT_BYTES].decode(errors="replace")


def _worn_out(error: Any, attempts: int, seconds: float) -> Any:
    """The last error of a series, saying that it was one."""
    if attempts > 1:
        error.message = f"{error.message} (after {attempts} attempts in {seconds:.1f} s)"
        error.args = (error.message,)
    return error
