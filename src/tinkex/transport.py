"""One HTTP exchange: headers, encoding, retries, typed errors. The only file that knows HTTP.

An `Exchange` moves bytes: over sockets with aiohttp here, or straight into an ASGI application (`tinkex.local`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urldefrag, urlencode, urljoin, urlsplit

import msgspec

from tinkex import codec
from tinkex._version import __version__
from tinkex.config import Config, is_address, is_embedded, redact_headers
from tinkex.credentials import Token, run_command
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    TinkerError,
    error_for,
    is_retryable,
)
from tinkex.limits import BreakerRegistry
from tinkex.protocol import AUTH_TOKEN, CLIENT_CONFIG, PREFIX, Operation
from tinkex.types.account import AuthTokenResponse
from tinkex.types.sessions import Empty

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger("tinkex")

OFF_LOOP_BYTES = 64_000
"""Bodies above this are encoded and decoded in a thread, so that the loop stays responsive."""
CONFLICT_PATIENCE = 2.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """The media type, or an empty string."""
        return self.headers.get("content-type", "")

    @property
    def retry_after(self) -> float | None:
        """Seconds the server asks to wait, if it asks for no more than a minute."""
        for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
            try:
                seconds = float(self.headers[name]) * scale
            except (KeyError, ValueError):
                continue
            return seconds if 0 < seconds <= 60 else None
        return None


class Exchange(Protocol):
    """Moves one request and its reply."""

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Reply:
        """Send; raise ConnectionError or TimeoutError when there is no reply. `headers` names come back lower-case."""

    async def close(self) -> None:
        """Release what is held."""


class HttpExchange:
    """Exchanges over sockets."""

    def __init__(self, base_url: str, proxy: str | None = None, proxy_headers: Mapping[str, str] | None = None) -> None:
        self._base_url = base_url
        self._proxy = proxy
        self._proxy_headers = dict(proxy_headers or {}) if proxy else None
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Reply:
        """Send over HTTP/1.1; a whole address may stand in for the path."""
        import aiohttp
        from yarl import URL

        session = self._open()
        if self._proxy_headers and self._base_url.startswith("http:"):  # aiohttp gives them to tunnels alone
            headers = {**headers, **self._proxy_headers}
        try:
            async with session.request(
                method,
                URL(self._base_url + path if path.startswith("/") else path, encoded=True),
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=5),
                allow_redirects=False,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
            ) as response:
                data = await response.read()
                names = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, names, data)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the pool."""
        if self._session is not None:
            await self._session.close()


# A base URL whose scheme is listed here is served by the named factory instead of HTTP; imported when used.
EMBEDDED_FACTORY = "tinkex.local:open_exchange"


def open_exchange(config: Config) -> Exchange:
    """The exchange a base URL asks for."""
    if is_embedded(config.base_url):
        module, name = EMBEDDED_FACTORY.split(":")
        factory: Callable[[str], Exchange] = getattr(import_module(module), name)
        return factory(config.base_url)
    return HttpExchange(config.base_url, config.proxy_url, config.proxy_authorization)


class Transport:
    """`await transport.call(op, request)` gives a decoded response or raises a typed error."""

    def __init__(self, config: Config, exchange: Exchange | None = None) -> None:
        self.config = config
        self.place = config.base_url if is_embedded(config.base_url) else urlsplit(config.base_url).netloc
        self._exchange = exchange or open_exchange(config)
        self._home = "http://local" if is_embedded(config.base_url) else config.base_url
        self._outside: HttpExchange | None = None
        self._closed = False
        self._pid = os.getpid()
        self._headers = {
            "User-Agent": f"tinkex/{__version__} (python)",
            "Accept": codec.JSON,
            **config.default_headers,
        }
        if config.cf_access_client_id and config.cf_access_client_secret:
            self._headers["CF-Access-Client-Id"] = config.cf_access_client_id
            self._headers["CF-Access-Client-Secret"] = config.cf_access_client_secret
        self._credential = config.api_key
        self._token: Token | None = None
        self.breakers = BreakerRegistry() if config.circuit_breaker else None

    async def close(self) -> None:
        """Release the connections; whoever still waits for an answer is told."""
        self._closed = True
        await self._exchange.close()
        if self._outside is not None:
            await self._outside.close()

    def use_tokens(self) -> None:
        """From now on, send a short-lived token that the credential is exchanged for."""
        self._token = self._token or Token(self._exchange_credential)

    async def _exchange_credential(self) -> str:
        if self.config.credential_cmd and not self.config.api_key:
            self._credential = None  # ask the command anew
        answer: AuthTokenResponse = await self.call(AUTH_TOKEN, Empty())
        return answer.jwt

    async def _key_headers(self, op: Operation) -> dict[str, str]:
        """The credential of a request: the token, where tokens are used, except to get one."""
        if self._token is not None and op not in (AUTH_TOKEN, CLIENT_CONFIG):
            return {"X-API-Key": await self._token.value()}
        if self._credential is None and self.config.credential_cmd:
            self._credential = await run_command(self.config.credential_cmd)
        return {"X-API-Key": self._credential} if self._credential else {}

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
        final: Container[int] = (),
        compress: bool = False,
    ) -> Any:
        """Make the exchange, trying again while that may help, and decode the answer.

        A status in `final` is raised at once, for the caller to deal with.
        """
        body = None if request is None else await _encode(request, compress)
        key = {} if op.method == "GET" else {"X-Idempotency-Key": f"tinkex-{uuid.uuid4()}"}
        kind = {} if op.method == "GET" else {"Content-Type": codec.JSON}
        shared = {**self._headers, **await self._key_headers(op)}
        merged = {**shared, **kind, **(body.headers if body else {}), **key, **(headers or {})}
        url = target(op, path, {**self.config.default_query, **(query or {})})
        limit = self.config.timeout if timeout is None else timeout

        async def attempt(number: int) -> Reply:
            numbered = merged | {"X-Stainless-Retry-Count": str(number)}
            sending = functools.partial(self.send, op, url, numbered, body.data if body else None, limit)
            return await (self.breakers.get(f"{op.method} {op.path}").call(sending) if self.breakers else sending())

        reply = await self.persist(op, attempt, self.config.patience if patience is None else patience, final)
        if op.response is Empty:  # the status has said it all, whatever the body is
            return Empty()
        return self.decode(op, op.response, reply)

    async def send(
        self, op: Operation, url: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Reply:
        """One attempt: a reply with a good status, or a typed error."""
        reply, place = await self.exchange(op, url, headers, body, timeout), self.place
        if op.method == "GET" and reply.status in REDIRECTS:
            reply, place = await self._follow(op, url, headers, reply, timeout)
        if reply.status >= 300:
            raise self.refusal(op, reply, place)
        return reply

    async def once(
        self,
        op: Operation,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """One attempt at a request without a body, with all statuses returned: the caller knows what they mean."""
        limit = self.config.timeout if timeout is None else timeout
        return await self.exchange(
            op, target(op, path), {**self._headers, **await self._key_headers(op), **(headers or {})}, None, limit
        )

    def address(self, op: Operation, path: Mapping[str, str] | None, reply: Reply) -> str | None:
        """The whole address that an answer to a request sends on to, if it does."""
        return _next_address(self._home + target(op, path), reply)

    async def _follow(
        self, op: Operation, url: str, headers: Mapping[str, str], reply: Reply, timeout: float
    ) -> tuple[Reply, str]:
        """Go where a GET is sent on to, some steps at most; the last reply, and who gave it.

        Only what no one minds being seen goes to another origin: the key and extra headers are for this one alone.
        """
        address, place = self._home + url, self.place
        for _ in range(MOST_REDIRECTS):
            found = _next_address(address, reply)
            if found is None:
                break
            if _origin(found) != _origin(address):
                headers = {name: headers[name] for name in ("User-Agent", "Accept") if name in headers}
            address, place = found, urlsplit(found).hostname or ""
            reply = await self.exchange(op, address, headers, None, timeout)
        return reply, place

    async def exchange(
        self, op: Operation, url: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Reply:
        """One attempt: whatever reply comes, or APIConnectionError when none does."""
        if os.getpid() != self._pid:
            raise TinkerError(
                f"{op.name}: this client was made before the process forked",
                hint="make a new ServiceClient in the child",
            )
        if self._closed:
            raise TinkerError(f"{op.name}: the client was closed before there was an answer")
        exchange, place = self._exchange, self.place
        if not url.startswith("/"):
            if _origin(url) == _origin(self._home):
                url = url.removeprefix("http://local") if is_embedded(self.config.base_url) else url
            else:
                exchange, place = self._abroad(), urlsplit(url).hostname or ""
        if self.config.dump_headers:
            shown = redact_headers(headers)
            logger.info("%s %s%s headers=%s body=%d bytes", op.method, place, url, shown, len(body or b""))
        try:
            return await exchange.send(op.method, url, headers, body, timeout)
        except TimeoutError as error:
            raise APITimeoutError(f"{op.name} at {place}: {error}") from error
        except ConnectionError as error:
            raise APIConnectionError(
                f"{op.name}: cannot reach {place}: {error}",
                hint="check the base URL, and that the server is running",
            ) from error

    def _abroad(self) -> HttpExchange:
        """The exchange for addresses that the server sends us on to."""
        if self._outside is None:
            self._outside = HttpExchange("")
        return self._outside

    async def poll(self, op: Operation, request: Any, headers: Mapping[str, str], timeout: float) -> Reply:
        """One attempt at a long poll, with all statuses returned: the caller knows what they mean."""
        body = codec.encode(request)
        merged = {**self._headers, **await self._key_headers(op), **body.headers, **headers}
        return await self.exchange(op, f"{PREFIX}/{op.path}", merged, body.data, timeout)

    async def persist(
        self,
        op: Operation,
        attempt: Callable[[int], Awaitable[Reply]],
        patience: float,
        final: Container[int] = (),
    ) -> Reply:
        """The retry policy: exponential with jitter, the server's Retry-After honoured, bounded by time."""
        started, number = time.monotonic(), 0
        while True:
            try:
                return await attempt(number)
            except (APIConnectionError, APIStatusError) as error:
                number += 1
                error.attempts = number
                delay = backoff(number, getattr(error, "retry_after", None))
                status = getattr(error, "status_code", 0)
                allowed = min(CONFLICT_PATIENCE, patience) if status == 409 else patience
                spent = self.config.max_retries is not None and number > self.config.max_retries
                if spent or status in final or not is_retryable(error) or time.monotonic() - started + delay > allowed:
                    raise _worn_out(error, number, time.monotonic() - started) from error.__cause__
                if number == 1:
                    logger.warning("%s; trying again for up to %.0f s", error.message, allowed)
                await asyncio.sleep(delay)

    def decode(self, op: Operation, kind: type[Any], reply: Reply) -> Any:
        """Read a good answer; a bad one names the endpoint and what is wrong with it."""
        try:
            return codec.decode(kind, reply.body or b"{}", reply.content_type or codec.JSON)
        except ValueError as error:
            raise APIResponseValidationError(
                f"{op.name} at {self.place}: the answer is not a {kind.__name__}: {error}",
                body=reply.body[:2000],
            ) from error

    def refusal(self, op: Operation, reply: Reply, place: str = "") -> APIStatusError:
        """The error behind a bad status."""
        body = _loads(reply.body)
        detail = body.get("detail", body) if isinstance(body, dict) else body
        return error_for(reply.status)(
            f"{op.name} at {place or self.place}: {reply.status}: {detail}",
            status_code=reply.status,
            retry_after=reply.retry_after,
            body=body,
        )


def target(op: Operation, path: Mapping[str, str] | None = None, query: Mapping[str, object] | None = None) -> str:
    """The path and query of a request; what is None is left out of the query."""
    url = PREFIX + "/" + op.path.format_map({k: quote(v, safe=":") for k, v in (path or {}).items()})
    pairs = [(name, str(value)) for name, value in (query or {}).items() if value is not None]
    return f"{url}?{urlencode(pairs, quote_via=quote, safe='')}" if pairs else url


def _next_address(address: str, reply: Reply) -> str | None:
    """Where the answer from an address sends its reader on to, if it does and the place can be gone to."""
    if reply.status not in REDIRECTS or "location" not in reply.headers:
        return None
    try:
        found = urldefrag(urljoin(address, reply.headers["location"])).url
    except ValueError:
        return None
    # A signed address must arrive as it was written, but for the characters that no address may have.
    found = quote(found, safe="!$%&'()*+,/:;=?@[]~")
    return found if is_address(found) else None


def _origin(address: str) -> tuple[str, str, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def backoff(failures: int, retry_after: float | None = None, first: float = 0.5, most: float = 10.0) -> float:
    """Seconds to wait after the n-th failure in a row."""
    delay: float = min(first * 2 ** (failures - 1), most) * random.uniform(0.75, 1.0)
    return max(delay, retry_after or 0.0)


async def _encode(request: Any, compress: bool) -> codec.Body:
    size = getattr(request, "nbytes", 0)
    if codec.has_protobuf(type(request)) or size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(codec.encode, request, compress=compress)
    return codec.encode(request, compress=compress)


def _loads(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body else ""
    except msgspec.DecodeError:
        return body[:2000].decode(errors="replace")


def _worn_out(error: Any, attempts: int, seconds: float) -> Any:
    """The last error of a series, saying that it was one."""
    if attempts > 1:
        error.message = f"{error.message} (after {attempts} attempts in {seconds:.1f} s)"
        error.args = (error.message,)
    return error
