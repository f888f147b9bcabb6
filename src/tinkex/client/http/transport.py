"""Requests to a server: encoding, single attempts, retries, decoding, typed errors.

Sockets are in `http_exchange`, and the embedded backend in `tinkex.local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Container, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypedDict, Unpack
from urllib.parse import urlsplit

import msgspec

from tinkex import events
from tinkex.client.http.exchange import (
    MOST_REDIRECTS,
    REDIRECTS,
    Exchange,
    HttpRequest,
    Reply,
    StreamReply,
    origin,
    redirection,
    target,
)
from tinkex.client.http.http_exchange import HttpExchange, open_exchange, outside_exchange
from tinkex.client.http.limits import BillingPause, BreakerRegistry, ByteBudget
from tinkex.client.http.reply_errors import KEPT_BYTES, ReplyErrors, announced
from tinkex.client.http.request_headers import (
    RequestKeys,
    client_headers,
    headers_of,
    keyed_headers,
    merge,
)
from tinkex.client.http.retry import Attempts, Patience, persist
from tinkex.client.settings.config import Config, is_embedded
from tinkex.errors import TinkerError
from tinkex.types.account import AuthTokenResponse
from tinkex.types.sessions import Empty
from tinkex.wire import codec
from tinkex.wire.protocol import AUTH_TOKEN, BY_NAME, PREFIX, Operation
from tinkex.wire.redacted_http import redact_headers, redact_url

logger = logging.getLogger("tinkex")

OFF_LOOP_BYTES = 64_000
"""Bodies above this are encoded and decoded in a thread, so that the loop stays responsive."""
RESPONSE_BYTES = 52_428_800
"""Bytes of announced results that are fetched at once, until the server sets another limit."""
EMBEDDED_HOME = "http://local"
UNOBSERVED: contextlib.nullcontext[dict[str, Any]] = contextlib.nullcontext({})
"""The block around a request without listeners; nothing reads its outcome."""


class CallOptions(TypedDict, total=False):
    """Options of a request."""

    path: Mapping[str, str] | None
    """Values of the fields in the operation's path."""
    query: Mapping[str, object] | None
    """Added to the configured query."""
    headers: Mapping[str, str] | None
    """Added to ours; they win."""
    timeout: float | None
    """Seconds that one attempt may take."""
    patience: float | None
    """Seconds after which a failed request is not sent again."""
    max_retries: int | None
    """Limit of retries."""
    final: Container[int]
    """Statuses that are raised at once, for the caller to deal with."""
    metadata: Mapping[str, Any] | None
    """Added to the events."""


class _Route(NamedTuple):
    """The way to an address."""

    exchange: Exchange
    path: str
    """The address as the exchange takes it."""
    address: str
    place: str


class Transport:
    """The requests of one client.

    `await transport.call(op, request)` gives a decoded response or raises a typed error.
    """

    def __init__(self, config: Config, exchange: Exchange | None = None) -> None:
        self.config = config
        self.billing = BillingPause()
        self.response_budget = ByteBudget(RESPONSE_BYTES)
        self.facts: dict[str, Any] = {}
        """Metadata of all events of this transport's requests."""
        self.is_older: bool | None = None
        """True if the server speaks an older dialect; None while that is unknown."""
        self.breakers = BreakerRegistry() if config.circuit_breaker else None
        self.keys = RequestKeys(config, self._exchange_credential)
        embedded = is_embedded(config.base_url)
        self._home = EMBEDDED_HOME if embedded else config.base_url
        self.place = config.base_url if embedded else urlsplit(config.base_url).netloc
        self.errors = ReplyErrors(self.place, self._home, self.keys)
        self._exchange = exchange or open_exchange(config)
        self._outside: HttpExchange | None = None
        self._headers = client_headers(config)
        self._closed = False
        self._pid = os.getpid()

    async def close(self) -> None:
        """Release the connections; pending requests fail."""
        self._closed = True
        self.keys.stop_renewal()
        await self._exchange.close()
        if self._outside is not None:
            await self._outside.close()

    async def call(
        self,
        op: Operation,
        request: Any = None,
        *,
        compress: bool = False,
        as_protobuf: bool = True,
        **options: Unpack[CallOptions],
    ) -> Any:
        """Send a message, retry while that may help, and decode the answer."""
        body = None if request is None else await _encode(request, compress, as_protobuf)
        reply = await self.request(op, body, **options)
        if op.response is Empty:  # the status is the whole answer
            return Empty()
        return self.decode(op, op.response, reply)

    async def request(
        self,
        op: Operation,
        body: codec.Body | None = None,
        *,
        url: str | None = None,
        follow: bool = True,
        without: Container[str] = (),
        **options: Unpack[CallOptions],
    ) -> Reply:
        """Send bytes, and return a reply with a good status or raise a typed error.

        Args:
            op: The operation.
            body: The encoded message.
            url: Path and query, in place of the operation's.
            follow: False returns an answer that redirects as it is.
            without: Lower-case names of headers that are not sent.
            options: See `CallOptions`.

        Returns:
            The reply.
        """
        if not url:
            query = {**self.config.default_query, **(options.get("query") or {})}
            url = target(op, options.get("path"), query)
        request = await self._request(
            op, url, body, options.get("timeout"), options.get("headers") or {}
        )
        if without:
            for name in [name for name in request.headers if name.lower() in without]:
                del request.headers[name]
        patience, retries = options.get("patience"), options.get("max_retries")
        attempts = Attempts(
            functools.partial(self._attempt, op, request, follow),
            Patience(
                self.config.patience if patience is None else patience,
                self.config.max_retries if retries is None else retries,
                options.get("final", ()),
            ),
            self.billing,
            None if self.breakers is None else self.breakers.get(f"{op.method} {op.path}"),
        )
        started = time.monotonic()
        facts = options.get("metadata")
        with self._observed(op, facts, url) if events.is_heard() else UNOBSERVED as outcome:
            reply = await persist(attempts.send, attempts.delay_after)
            outcome["retry_count"] = attempts.retries
        self.errors.log_deprecation(op, reply.headers)
        spent = time.monotonic() - started
        return Reply(
            reply.status, reply.headers, reply.body, reply.url, spent, retries=attempts.retries
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
        """Give the bytes of an answer as they come; sent once, since no byte can be taken back."""
        body = None if request is None else await _encode(request, False, True)
        url = url or target(op, None, self.config.default_query)
        wants = {"Accept": codec.EVENT_STREAM}
        prepared = await self._request(op, url, body, timeout, wants, headers or {})
        with self._observed(op, None, url) if events.is_heard() else UNOBSERVED:
            self._check_usable(op)
            address = self._home + url
            if self.config.dump_headers:
                self._dump(op, address, prepared)
            async with contextlib.AsyncExitStack() as stack:

                async def begin() -> StreamReply:
                    with self.errors.typed(op, self.place, address):
                        sent = self._traced(prepared) if self.config.otel_propagate else prepared
                        return await stack.enter_async_context(self._exchange.stream(sent))

                reply = await begin()
                if reply.status == 401 and await self.keys.replace(
                    op, prepared.headers, reply.headers
                ):
                    await stack.aclose()
                    reply = await begin()
                source = self._typed_chunks(op, address, reply.chunks)
                chunks = await stack.enter_async_context(contextlib.aclosing(source))
                if reply.status >= 300:
                    text = await _beginning(chunks)
                    bad = Reply(reply.status, reply.headers, text, address)
                    raise self.errors.refusal(op, bad)
                yield msgspec.structs.replace(reply, chunks=chunks, url=address)

    async def poll(
        self,
        op: Operation,
        request: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        *,
        path: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send once and return any reply, for the caller to interpret its status.

        A request that is sent many times may be a `codec.Body` that was encoded before.
        """
        encoded = request is None or isinstance(request, codec.Body)
        body: codec.Body | None = request if encoded else codec.encode(request)
        url = target(op, path, self.config.default_query)
        prepared = await self._request(op, url, body, timeout, headers or {}, keyed=False)
        if not events.is_heard():
            return await self._send(op, prepared)
        with self._observed(op, None) as outcome:
            reply = await self._send(op, prepared)
            # a server answers a long poll with 408 when there is no result yet
            is_good = reply.status < 300 or reply.status == 408 if body else reply.status < 400
            outcome["result"] = "ok" if is_good else "error"
            return reply

    @contextlib.asynccontextmanager
    async def fetch(
        self, address: str, headers: Mapping[str, str], timeout: float
    ) -> AsyncIterator[StreamReply]:
        """Get what is at a whole address, such as a signed one, without the credential.

        Redirects are followed; all other statuses are returned. Failures are a plain
        ConnectionError or TimeoutError.
        """
        sent = {"User-Agent": self._headers["User-Agent"], **headers}
        for left in reversed(range(MOST_REDIRECTS + 1)):
            route = self._route(address)
            request = HttpRequest("GET", route.path, sent, None, timeout)
            async with route.exchange.stream(request) as reply:
                found = redirection(address, reply.status, reply.headers)
                if found is None or not left:
                    yield msgspec.structs.replace(reply, url=address)
                    return
            if address.startswith("https:") and not found.startswith("https:"):
                raise ConnectionError("an encrypted address sends on to one that is not")
            address = found

    def redirection(
        self, op: Operation, path: Mapping[str, str] | None, reply: Reply
    ) -> str | None:
        """Return the whole address that the answer to a request redirects to, if it does."""
        return redirection(self._home + target(op, path), reply.status, reply.headers)

    def decode(self, op: Operation, kind: type[Any], reply: Reply) -> Any:
        """Decode a good answer; the error for a bad one names the endpoint and the fault."""
        try:
            return codec.decode(kind, reply.body or b"{}", reply.content_type or codec.JSON)
        except ValueError as error:
            problem = f"the answer is not a {kind.__name__}: {error}"
            raise self.errors.misread(op, reply, problem) from error

    # ── single attempts ───────────────────────────────────────────────────────────────────────────

    async def _request(
        self,
        op: Operation,
        url: str,
        body: codec.Body | None,
        timeout: float | None,
        *headers: Mapping[str, str],
        keyed: bool = True,
    ) -> HttpRequest:
        """Build a request; of the headers, later ones win over the configured ones and ours.

        Without `keyed`, a request has no idempotency key.
        """
        limit = self.config.timeout if timeout is None else timeout
        own = {
            **self._headers,
            **await self.keys.headers(op),
            "X-Stainless-Read-Timeout": f"{limit:g}",
            **headers_of(op.name),
        }
        content = {} if body is None else body.headers
        if keyed and op.method != "GET":
            content = keyed_headers(content)
        merged = merge(own, self.config.default_headers, content, *headers)
        data = None if body is None else body.source
        return HttpRequest(op.method, url, merged, data, limit, op.traffic)

    async def _attempt(
        self, op: Operation, request: HttpRequest, follow: bool, number: int
    ) -> Reply:
        """Send once and return a good reply; attempts are counted from 0."""
        request.headers["X-Stainless-Retry-Count"] = str(number)
        if number:  # the token may have expired
            await self.keys.renew(request.headers)
        reply, place = await self._send(op, request), self.place
        if reply.status in REDIRECTS:
            if not follow and "location" in reply.headers:
                return reply
            if op.method == "GET":
                reply, place = await self._follow(op, request, reply)
        if reply.status >= 300:
            raise self.errors.refusal(op, reply, place)
        return reply

    async def _send(
        self, op: Operation, request: HttpRequest, *, replaces_key: bool = True
    ) -> Reply:
        """Send once and return any reply; a rejected token is replaced once."""
        self._check_usable(op)
        exchange, address, place = self._exchange, self._home + request.path, self.place
        sent = request
        if not request.path.startswith("/"):
            exchange, path, address, place = self._route(request.path)
            sent = msgspec.structs.replace(sent, path=path)
        if self.config.dump_headers:
            self._dump(op, address, request)
        if self.config.otel_propagate and exchange is self._exchange:
            sent = self._traced(sent)
        started = time.monotonic()
        try:
            reply = await exchange.send(sent)
        except TinkerError:
            raise
        except (TimeoutError, ConnectionError) as error:
            raise self.errors.unanswered(op, place, address, error) from error
        spent = time.monotonic() - started
        if (
            reply.status == 401
            and replaces_key
            and await self.keys.replace(op, request.headers, reply.headers)
        ):
            return await self._send(op, request, replaces_key=False)
        return Reply(reply.status, reply.headers, reply.body, address, spent)

    async def _follow(self, op: Operation, request: HttpRequest, reply: Reply) -> tuple[Reply, str]:
        """Follow the redirects of a GET, some steps at most; return the last reply and its place.

        The key and extra headers are for one origin only.
        """
        address, place = self._home + request.path, self.place
        for _ in range(MOST_REDIRECTS):
            found = redirection(address, reply.status, reply.headers)
            if found is None:
                break
            if origin(found) != origin(address):
                kept = {"user-agent", "accept"}
                headers = {n: value for n, value in request.headers.items() if n.lower() in kept}
                request = msgspec.structs.replace(request, headers=headers)
            address, place = found, urlsplit(found).hostname or ""
            request = msgspec.structs.replace(request, path=found, body=None)
            reply = await self._send(op, request)
        return reply, place

    def _route(self, address: str) -> _Route:
        """Find the exchange for a whole address."""
        if origin(address) == origin(self._home):
            embedded = self._home == EMBEDDED_HOME
            path = address.removeprefix(EMBEDDED_HOME) if embedded else address
            return _Route(self._exchange, path, address, self.place)
        if self._outside is None:
            self._outside = outside_exchange(self.config)
        return _Route(self._outside, address, address, urlsplit(address).hostname or "")

    async def _typed_chunks(
        self, op: Operation, address: str, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield an answer's bytes with typed errors; the reader's own errors stay as they are."""
        try:
            while True:
                with self.errors.typed(op, self.place, address):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()

    def _check_usable(self, op: Operation) -> None:
        if os.getpid() != self._pid:
            raise TinkerError(
                f"{op.name}: this client was made before the process forked",
                hint="make a new ServiceClient in the child",
            )
        if self._closed:
            raise TinkerError(f"{op.name}: the client was closed before there was an answer")

    def _dump(self, op: Operation, address: str, request: HttpRequest) -> None:
        """Log an attempt, for settings that ask for that."""
        scrub = self.keys.scrubber
        shown = {n: scrub.text(value) for n, value in redact_headers(request.headers).items()}
        place, size = scrub.without_keys(redact_url(address)), len(request.body or b"")
        logger.info("%s %s headers=%s body=%d bytes", op.method, place, shown, size)

    def _traced(self, request: HttpRequest) -> HttpRequest:
        """Add headers that name the request's trace, for settings that ask for that."""
        from tinkex import otel

        return msgspec.structs.replace(request, headers=otel.inject(request.headers))

    async def _exchange_credential(self) -> str:
        patience = min(self.config.patience, self.config.timeout)
        answer: AuthTokenResponse = await self.call(AUTH_TOKEN, Empty(), patience=patience)
        return answer.jwt

    def _observed(
        self, op: Operation, metadata: Mapping[str, Any] | None, url: str | None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Emit the events of a request around a block."""
        named = op.name in BY_NAME or not url
        facts = {
            "method": op.method,
            "path": f"{PREFIX}/{op.path}" if named or not url else url.partition("?")[0],
            "pool_type": op.traffic,
            "base_url": self.config.base_url,
            **self.facts,
            **(self.config.user_metadata or {}),
            **(metadata or {}),
        }
        return announced(facts, self.keys)


async def _encode(request: Any, compress: bool, as_protobuf: bool) -> codec.Body:
    size = getattr(request, "nbytes", 0)
    if codec.has_protobuf(type(request)) or size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(
            codec.encode, request, compress=compress, as_protobuf=as_protobuf
        )
    return codec.encode(request, compress=compress)


async def _beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """Read the part of an answer that an error keeps; the rest may never end."""
    data = b""
    async for chunk in chunks:
        data += chunk
        if len(data) >= KEPT_BYTES:
            break
    return data
