"""Limits of connections: their number, and the time until a request has arrived.

A connection that does not send a whole header in time is closed. Beyond the limits a few more
connections are accepted for health checks only, so that a crowded server does not look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.server.server_limits import Limits
from tinkex.types.record import to_json
from tinkex.wire.protocol import HEALTHZ, PREFIX

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("tinkex.server")

RESERVE = 32
"""Connections beyond the limit that may still ask for the health check."""
RESERVED_SECONDS = 5.0
"""Seconds until these must have asked."""
OTHER_FILES = 256
"""Files that the server may have open besides connections."""
HEALTH_PATH = f"{PREFIX}/{HEALTHZ.path}"
FULL = to_json(
    {
        "detail": "this server has as many connections as it takes (connections, "
        "connections_per_address)"
    }
)

Protocol: TypeAlias = Any
"""A class of uvicorn for connections; uvicorn has no type stubs for its subclasses."""


class Doors:
    """The open connections, by address."""

    def __init__(self, limits: Limits, most_files: int | None = None) -> None:
        most = limits.connections
        if most_files is not None:
            most = min(most, max(1, most_files - OTHER_FILES - RESERVE))
        self.most, self.most_of_one, self.header_seconds = (
            most,
            limits.connections_per_address,
            limits.header_seconds,
        )
        self._by_address: Counter[str] = Counter()
        self._reserved = 0
        self._warned = False

    def enter(self, address: str) -> bool | None:
        """Return True to accept a connection, False for health checks only, None to refuse it."""
        is_full = self._by_address.total() - self._reserved >= self.most
        is_full = is_full or self._by_address[address] >= self.most_of_one
        if is_full:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "too many connections are open, the last from %s; refusing more", address
                )
            if self._reserved >= RESERVE:
                return None
            self._reserved += 1
        self._by_address[address] += 1
        return not is_full

    def leave(self, address: str, *, was_reserved: bool) -> None:
        """Note that a connection has ended."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self._reserved -= was_reserved
        self._warned = self._warned and bool(self._reserved)


async def _health_alone(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a health check, or 503 to anything else; the connection is closed afterwards."""
    if scope.get("path") == HEALTH_PATH:
        await app(scope, receive, send)
        return
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(FULL)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": FULL})


def guarded(doors: Doors) -> Protocol:
    """Build uvicorn's protocol for connections with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Protocol = AutoHTTPProtocol

    class Guarded(base):  # type: ignore[misc]
        """A connection whose headers must come in time."""

        _address: str | None = None
        _is_reserved = False
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            peer = transport.get_extra_info("peername")
            address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
            entered = doors.enter(address)
            if entered is None:  # before anything else is made: a crowd must cost little
                transport.abort()
                return
            super().connection_made(transport)
            self._address, self._is_reserved = address, not entered
            if self._is_reserved:
                app: Any = self.app
                self.app: Any = lambda scope, receive, send: _health_alone(
                    app, scope, receive, send
                )
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            if self._address is None:  # it was refused
                return
            doors.leave(self._address, was_reserved=self._is_reserved)
            self._address = None
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_at_work():
                self._stop_waiting()
            elif self._waiting is None and not self.transport.is_closing():
                self._wait()  # a part of the next request's header

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_reserved:
                self.transport.close()

        def _is_at_work(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            seconds = (
                min(doors.header_seconds, RESERVED_SECONDS)
                if self._is_reserved
                else doors.header_seconds
            )
            self._waiting = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            self._waiting = None
            if not self._is_at_work():
                self.transport.close()

    return Guarded


def raise_file_limit(wanted: int) -> int | None:
    """Raise the limit of open files up to a number; return it, or None where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return None if soft == resource.RLIM_INFINITY else soft


def protocol_of(limits: Limits) -> Protocol:
    """Make the protocol of a server with these limits."""
    return guarded(Doors(limits, raise_file_limit(limits.connections + OTHER_FILES + RESERVE)))
