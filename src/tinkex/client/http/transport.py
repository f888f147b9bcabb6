"""Whole calls to a server: encoding, retries, decoding, typed errors.

Attempts are in `link`; sockets are in `http_exchange`, and the embedded backend in `tinkex.local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypedDict, Unpack

from tinkex import events
from tinkex.client.http.addresses import redirection, target
from tinkex.client.http.exchange import Exchange, Reply, StreamReply
from tinkex.client.http.limits import BillingPause, BreakerRegistry, ByteBudget
from tinkex.client.http.link import Attempts, Link, Patience
from tinkex.client.http.request_events import announced
from tinkex.client.settings.config import Config
from tinkex.types.account import AuthTokenResponse
from tinkex.types.sessions import Empty
from tinkex.wire import codec
from tinkex.wire.protocol import AUTH_TOKEN, BY_NAME, PREFIX, Operation

OFF_LOOP_BYTES = 64_000
"""Bodies above this are encoded and decoded in a thread, so that the loop stays responsive."""
RESPONSE_BYTES = 52_428_800
"""Bytes of announced results that are fetched at once, until the server sets another limit."""

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


class Transport:
    """The calls of one client.

    `await transport.call(op, request)` gives a decoded response or raises a typed error.
    """

    def __init__(self, config: Config, exchange: Exchange | None = None) -> None:
        self.billing = BillingPause()
        self.response_budget = ByteBudget(RESPONSE_BYTES)
        self.facts: dict[str, Any] = {}
        """Metadata of all events of this transport's requests."""
        self.is_older: bool | None = None
        """True if the server speaks an older dialect; None while that is unknown."""
        self.breakers = BreakerRegistry() if config.circuit_breaker else None
        self.link = Link(config, self._exchange_credential, exchange)
        self.keys, self.errors, self.place = (
            self.link.keys,
            self.link.errors,
            self.link.errors.place,
        )
        self.config = config

    async def close(self) -> None:
        """Release the connections; pending calls fail."""
        await self.link.close()

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
        settings = self.config
        limit, patience, max_retries = (
            options.get("timeout"),
            options.get("patience"),
            options.get("max_retries"),
        )
        limit = settings.timeout if limit is None else limit
        query = {**settings.default_query, **(options.get("query") or {})}
        url = url or target(op, options.get("path"), query)
        request = await self.link.request(op, url, body, limit, options.get("headers") or {})
        if without:
            for name in [name for name in request.headers if name.lower() in without]:
                del request.headers[name]
        allowed = Patience(
            settings.patience if patience is None else patience,
            settings.max_retries if max_retries is None else max_retries,
            options.get("final", ()),
        )
        started = time.monotonic()
        attempts = Attempts(self.link, op, request, allowed, self.billing, self.breakers, follow)
        with self._observed(op, options.get("metadata"), url) as outcome:
            reply = await attempts.reply()
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
        limit = self.config.timeout if timeout is None else timeout
        body = None if request is None else await _encode(request, False, True)
        url = url or target(op, None, self.config.default_query)
        wants = {"Accept": codec.EVENT_STREAM}
        prepared = await self.link.request(op, url, body, limit, wants, headers or {})
        with self._observed(op, None, url):
            async with self.link.stream(op, prepared) as reply:
                yield reply

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
        limit = self.config.timeout if timeout is None else timeout
        url = target(op, path, self.config.default_query)
        prepared = await self.link.request(op, url, body, limit, headers or {}, keyed=False)
        with self._observed(op, None) as outcome:
            reply = await self.link.send(op, prepared)
            # a server answers a long poll with 408 when there is no result yet
            is_good = reply.status < 300 or reply.status == 408 if body else reply.status < 400
            outcome["result"] = "ok" if is_good else "error"
            return reply

    def fetch(
        self, address: str, headers: Mapping[str, str], timeout: float
    ) -> AbstractAsyncContextManager[StreamReply]:
        """Get what is at a whole address, without the credential; see `Link.fetch`."""
        return self.link.fetch(address, headers, timeout)

    def redirection(
        self, op: Operation, path: Mapping[str, str] | None, reply: Reply
    ) -> str | None:
        """Return the whole address that the answer to a request redirects to, if it does."""
        return redirection(self.link.home + target(op, path), reply.status, reply.headers)

    def decode(self, op: Operation, kind: type[Any], reply: Reply) -> Any:
        """Decode a good answer; the error for a bad one names the endpoint and the fault."""
        try:
            return codec.decode(kind, reply.body or b"{}", reply.content_type or codec.JSON)
        except ValueError as error:
            problem = f"the answer is not a {kind.__name__}: {error}"
            raise self.errors.misread(op, reply, problem) from error

    async def _exchange_credential(self) -> str:
        patience = min(self.config.patience, self.config.timeout)
        answer: AuthTokenResponse = await self.call(AUTH_TOKEN, Empty(), patience=patience)
        return answer.jwt

    def _observed(
        self, op: Operation, metadata: Mapping[str, Any] | None, url: str | None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Emit the events of a request around a block, if there are listeners."""
        if not events.is_heard():
            return UNOBSERVED
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
