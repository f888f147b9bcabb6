"""Requests and answers as values, and the protocol of what carries them.

An `Exchange` moves bytes: over sockets (`tinkex.client.http.http_exchange`), straight into an ASGI
application (`tinkex.local`), or by an object that the settings bring.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tinkex.client.settings.delays import LONGEST_RETRY_AFTER
from tinkex.wire.pieces import Pieces
from tinkex.wire.protocol import Traffic
from tinkex.wire.redacted_http import wait_asked


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


@dataclass(frozen=True, slots=True)
class StreamReply:
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
