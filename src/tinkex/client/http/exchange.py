"""Requests, answers and addresses as values, and the protocol of what carries them.

An `Exchange` moves bytes: over sockets (`tinkex.client.http.http_exchange`), straight into an ASGI
application (`tinkex.local`), or by an object that the settings bring.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from urllib.parse import quote, urldefrag, urlencode, urljoin, urlsplit

import msgspec

from tinkex.client.settings.config import is_address, is_embedded
from tinkex.client.settings.delays import LONGEST_RETRY_AFTER
from tinkex.wire.pieces import Pieces
from tinkex.wire.protocol import PREFIX, Operation, Traffic
from tinkex.wire.redacted_http import wait_asked

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5


class HttpRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: what is sent, and over which connections."""

    method: str
    path: str
    """The path and query below the base URL, or a whole address."""
    headers: dict[str, str]
    body: bytes | Pieces | None = None
    timeout: float = 60.0
    """Seconds without a byte from the server after which the request fails."""
    traffic: Traffic = "rest"

    @property
    def data(self) -> bytes | None:
        """The body in one piece."""
        return None if self.body is None else bytes(self.body)


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer; the names of its headers are lower-case."""

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
        """Seconds the server asks to wait, at most a minute; a date counts from now."""
        return bounded(wait_asked(self.headers))

    @property
    def should_retry(self) -> bool | None:
        """Return what the server says about sending the request again; None if it says nothing."""
        told = self.headers.get("x-should-retry")
        return None if told is None else {"true": True, "false": False}.get(told.strip().lower())


def bounded(seconds: float | None) -> float | None:
    """Return a wait that the server asks for if it is honoured, else None."""
    return seconds if seconds is not None and 0 < seconds <= LONGEST_RETRY_AFTER else None


class StreamReply(msgspec.Struct, frozen=True):
    """An answer that is still coming: its status and headers, and its bytes as they arrive."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    url: str = ""


class Exchange(Protocol):
    """Carries requests and brings back replies."""

    async def send(self, request: HttpRequest) -> Reply:
        """Send; raise ConnectionError, or TimeoutError after `request.timeout`."""

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamReply]:
        """Send, and give the answer's bytes as they come; leaving the block hangs up."""

    async def close(self) -> None:
        """Release what is held."""


def target(
    op: Operation, path: Mapping[str, str] | None = None, query: Mapping[str, object] | None = None
) -> str:
    """Return the path and query of a request; query values that are None are left out."""
    url = f"{PREFIX}/{op.path}"
    if path or "{" in url:
        url = url.format_map({name: quote(value, safe=":") for name, value in (path or {}).items()})
    if not query:
        return url
    pairs = [(name, str(value)) for name, value in query.items() if value is not None]
    return f"{url}?{urlencode(pairs, quote_via=quote, safe='')}" if pairs else url


def redirection(address: str, status: int, headers: Mapping[str, str]) -> str | None:
    """Return the address that an answer redirects to; None without a usable one."""
    if status not in REDIRECTS or "location" not in headers:
        return None
    try:
        found = urldefrag(urljoin(address, headers["location"])).url
    except ValueError:
        return None
    # A signed address must not change, except for characters that are not allowed in addresses.
    found = quote(found, safe="!$%&'()*+,/:;=?@[]~")
    return found if is_address(found) else None


def origin(address: str) -> tuple[str, str, int | None]:
    """Return the scheme, host and port of an address."""
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def origin_of(base_url: str) -> str:
    """Return a base URL without its path in one spelling, as a key of what its clients share."""
    if is_embedded(base_url):
        return base_url
    scheme, host, port = origin(base_url)
    return f"{scheme}://{host}:{port}"
