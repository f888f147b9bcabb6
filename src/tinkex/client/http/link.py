"""Requests on their way: single attempts, and attempts until there is an answer."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from tinkex.client.http.addresses import MOST_REDIRECTS, REDIRECTS, origin, redirection
from tinkex.client.http.exchange import Exchange, HttpRequest, Reply, StreamReply
from tinkex.client.http.http_exchange import HttpExchange
from tinkex.client.http.limits import BillingPause, BreakerRegistry
from tinkex.client.http.reply_errors import KEPT_BYTES, RejectedError, ReplyErrors
from tinkex.client.http.request_headers import client_headers, keyed_headers, merge
from tinkex.client.http.request_keys import RequestKeys
from tinkex.client.http.request_names import headers_of
from tinkex.client.http.retry import persist
from tinkex.client.settings.config import Config, is_embedded
from tinkex.client.settings.delays import Delays
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    BillingError,
    TinkerError,
    is_retryable,
)
from tinkex.wire import codec
from tinkex.wire.protocol import Operation
from tinkex.wire.redacted_http import redact_headers, redact_url

logger = logging.getLogger("tinkex")

DELAYS = Delays()
CONFLICT_PATIENCE = 2.0
REJECTED_ATTEMPTS = 16
"""Limit of retries after a 400 with an empty body."""
EMBEDDED_FACTORY = "tinkex.local:open_exchange"
"""Opens the exchange of an embedded base URL; imported when used."""
EMBEDDED_HOME = "http://local"


def open_exchange(config: Config) -> Exchange:
    """Return the exchange that the settings bring, or else the one for their base URL."""
    brought: Exchange | None = config.make_http_client()
    if brought is not None:
        return brought
    if is_embedded(config.base_url):
        module, name = EMBEDDED_FACTORY.split(":")
        factory: Callable[[str], Exchange] = getattr(import_module(module), name)
        return factory(config.base_url)
    return _http_exchange(config, config.base_url)


def _http_exchange(config: Config, base_url: str) -> HttpExchange:
    return HttpExchange(base_url, config.proxy_url, config.proxy_authorization, config.pool_sizes)


class _Route(NamedTuple):
    """The way to an address."""

    exchange: Exchange
    path: str
    """The address as the exchange takes it."""
    address: str
    place: str


class Link:
    """Sends a client's requests, one attempt each.

    Args:
        config: The settings.
        exchange_credential: Asks the server for a token in place of the credential.
        exchange: Carries the requests; by default the one that the settings ask for.
    """

    def __init__(
        self,
        config: Config,
        exchange_credential: Callable[[], Awaitable[str]],
        exchange: Exchange | None = None,
    ) -> None:
        self.config = config
        self.keys = RequestKeys(config, exchange_credential)
        self.home = EMBEDDED_HOME if is_embedded(config.base_url) else config.base_url
        place = config.base_url if is_embedded(config.base_url) else urlsplit(self.home).netloc
        self.errors = ReplyErrors(place, self.home, self.keys)
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

    async def request(
        self,
        op: Operation,
        url: str,
        body: codec.Body | None,
        timeout: float,
        *headers: Mapping[str, str],
        keyed: bool = True,
    ) -> HttpRequest:
        """Build a request; of the headers, later ones win over the configured ones and ours.

        Without `keyed`, a request has no idempotency key.
        """
        own = {
            **self._headers,
            **await self.keys.headers(op),
            "X-Stainless-Read-Timeout": f"{timeout:g}",
            **headers_of(op.name),
        }
        content = {} if body is None else body.headers
        if keyed and op.method != "GET":
            content = keyed_headers(content)
        merged = merge(own, self.config.default_headers, content, *headers)
        data = None if body is None else body.source
        return HttpRequest(op.method, url, merged, data, timeout, op.traffic)

    async def send(
        self, op: Operation, request: HttpRequest, *, replaces_key: bool = True
    ) -> Reply:
        """Send once and return any reply; a rejected token is replaced once."""
        self._check_usable(op)
        exchange, path, address, place = self._route(request.path)
        self._dump(op, address, request)
        sent = self._traced(request) if exchange is self._exchange else request
        if path is not request.path:
            sent = msgspec.structs.replace(sent, path=path)
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
            return await self.send(op, request, replaces_key=False)
        return Reply(reply.status, reply.headers, reply.body, address, spent)

    @contextlib.asynccontextmanager
    async def stream(self, op: Operation, request: HttpRequest) -> AsyncIterator[StreamReply]:
        """Send once and give the bytes of any reply as they come."""
        self._check_usable(op)
        address = self.home + request.path
        self._dump(op, address, request)
        async with contextlib.AsyncExitStack() as stack:

            async def begin() -> StreamReply:
                with self.errors.typed(op, self.errors.place, address):
                    return await stack.enter_async_context(
                        self._exchange.stream(self._traced(request))
                    )

            reply = await begin()
            if reply.status == 401 and await self.keys.replace(op, request.headers, reply.headers):
                await stack.aclose()
                reply = await begin()
            source = self._typed_chunks(op, address, reply.chunks)
            chunks = await stack.enter_async_context(contextlib.aclosing(source))
            if reply.status >= 300:
                text = await _beginning(chunks)
                bad = Reply(reply.status, reply.headers, text, address)
                raise self.errors.refusal(op, bad)
            yield replace(reply, chunks=chunks, url=address)

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
                    yield replace(reply, url=address)
                    return
            if address.startswith("https:") and not found.startswith("https:"):
                raise ConnectionError("an encrypted address sends on to one that is not")
            address = found

    async def follow(self, op: Operation, request: HttpRequest, reply: Reply) -> tuple[Reply, str]:
        """Follow the redirects of a GET, some steps at most; return the last reply and its place.

        The key and extra headers are for one origin only.
        """
        address, place = self.home + request.path, self.errors.place
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
            reply = await self.send(op, request)
        return reply, place

    def _route(self, url: str) -> _Route:
        """Find the exchange for a path below the base URL, or for a whole address."""
        if url.startswith("/"):
            return _Route(self._exchange, url, self.home + url, self.errors.place)
        if origin(url) == origin(self.home):
            path = url.removeprefix(EMBEDDED_HOME) if self.home == EMBEDDED_HOME else url
            return _Route(self._exchange, path, url, self.errors.place)
        if self._outside is None:
            self._outside = _http_exchange(self.config, "")
        return _Route(self._outside, url, url, urlsplit(url).hostname or "")

    async def _typed_chunks(
        self, op: Operation, address: str, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield an answer's bytes with typed errors; the reader's own errors stay as they are."""
        try:
            while True:
                with self.errors.typed(op, self.errors.place, address):
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
        """Log an attempt if the settings ask for that."""
        if self.config.dump_headers:
            scrub = self.keys.scrubber
            shown = {n: scrub.text(value) for n, value in redact_headers(request.headers).items()}
            place, size = scrub.without_keys(redact_url(address)), len(request.body or b"")
            logger.info("%s %s headers=%s body=%d bytes", op.method, place, shown, size)

    def _traced(self, request: HttpRequest) -> HttpRequest:
        """Add headers that name the request's trace, if the settings ask for that."""
        if not self.config.otel_propagate:
            return request
        from tinkex import otel

        return msgspec.structs.replace(request, headers=otel.inject(request.headers))


class Patience(msgspec.Struct, frozen=True):
    """The limits of a request's retries."""

    seconds: float
    """Time after which no further attempt begins; an account without credit is not counted."""
    max_retries: int | None = None
    final: Container[int] = ()
    """Statuses that are raised at once."""

    def of(self, status: int) -> float:
        """Return the seconds for one kind of failure: a conflict passes soon or not at all."""
        return min(CONFLICT_PATIENCE, self.seconds) if status == 409 else self.seconds


@dataclass(slots=True)
class Attempts:
    """One request, sent until there is an answer or its patience is over."""

    link: Link
    op: Operation
    request: HttpRequest
    patience: Patience
    billing: BillingPause
    breakers: BreakerRegistry | None
    follows: bool
    since: float = 0.0
    """The time from which the patience is counted."""
    failures: int = 0
    retries: int = 0
    """The number of the last attempt, from 0."""

    def reply(self) -> Awaitable[Reply]:
        """Send until there is a good reply; raise the last failure."""
        self.since = time.monotonic()
        return persist(self._attempt, self._delay_after)

    def _attempt(self) -> Awaitable[Reply]:
        """Send once, through the operation's circuit breaker if there is one."""
        self.retries = self.failures
        self.request.headers["X-Stainless-Retry-Count"] = str(self.retries)
        if self.breakers is None:
            return self._once()
        return self.breakers.get(f"{self.op.method} {self.op.path}").call(self._once)

    async def _once(self) -> Reply:
        op, request, link, place = self.op, self.request, self.link, ""
        if self.retries:  # the token may have expired
            await link.keys.renew(request.headers)
        reply = await link.send(op, request)
        if reply.status in REDIRECTS:
            if not self.follows and "location" in reply.headers:
                return reply
            if op.method == "GET":
                reply, place = await link.follow(op, request, reply)
        if reply.status >= 300:
            raise link.errors.refusal(op, reply, place)
        return reply

    def _delay_after(self, outcome: Reply | Exception) -> float | None:
        """Decide on the next attempt: exponential delays, the server's Retry-After, a time limit.

        A good answer with `x-should-retry: true` is the answer when the limit is reached. An
        account without credit is waited for much longer and is no failure.
        """
        if isinstance(outcome, Reply):
            return self._next(outcome.retry_after) if outcome.should_retry else None
        status = getattr(outcome, "status", None) or 0
        if isinstance(outcome, BillingError):
            is_final = 402 in self.patience.final or self.patience.seconds <= 0
            delay = None if is_final else self.billing.delay_after(outcome)
            self.since = time.monotonic() + (delay or 0.0)
            return delay
        if not isinstance(outcome, APIConnectionError | APIStatusError):
            return None
        delay = self._next(outcome.retry_after, status)
        outcome.attempts = self.failures
        rejected = isinstance(outcome, RejectedError) and self.failures > REJECTED_ATTEMPTS
        hopeless = status in self.patience.final or not is_retryable(outcome)
        if delay is None or rejected or hopeless:
            self._wear_out(outcome)
            return None
        if self.failures == 1:
            allowed = self.patience.of(status)
            logger.warning("%s; trying again for up to %.0f s", outcome.message, allowed)
        else:
            logger.debug("%s; attempt %d", outcome.message, self.failures + 1)
        return delay

    def _next(self, asked: float | None, status: int = 0) -> float | None:
        """Count a failure; return the delay after it, or None if the patience is over."""
        self.failures += 1
        delay = DELAYS.after(self.failures, asked)
        patience = self.patience
        if patience.max_retries is not None and self.failures > patience.max_retries:
            return None
        return delay if self._spent() + delay <= patience.of(status) else None

    def _spent(self) -> float:
        return time.monotonic() - self.since

    def _wear_out(self, error: APIConnectionError | APIStatusError) -> None:
        """Note in the last error of a series how long the series was."""
        if self.failures > 1:
            error.message += f" (after {self.failures} attempts in {self._spent():.1f} s)"
            error.args = (error.message,)


async def _beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """Read the part of an answer that an error keeps; the rest may never end."""
    data = b""
    async for chunk in chunks:
        data += chunk
        if len(data) >= KEPT_BYTES:
            break
    return data
