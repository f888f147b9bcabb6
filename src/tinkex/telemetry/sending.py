"""Sending batches of telemetry, and whether a session does."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from tinkex.client.futures.api_future import start
from tinkex.client.http.retry import persist
from tinkex.client.settings import environment
from tinkex.client.settings.config import HOSTED_URL, Config
from tinkex.client.settings.delays import Delays
from tinkex.errors import APIStatusError, TinkerError, is_retryable
from tinkex.types.telemetry import TelemetryResponse, TelemetrySendRequest
from tinkex.wire.protocol import TELEMETRY, Operation
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex")

HTTP_SECONDS = 5.0
"""Longest time of one attempt to send a batch."""

Send: TypeAlias = Callable[[TelemetrySendRequest], Awaitable[TelemetryResponse | None]]
"""Posts one batch, or raises."""

is_sending: contextvars.ContextVar[bool] = contextvars.ContextVar("is_sending", default=False)
"""True while telemetry is sent, so that sending is not reported itself."""
_scrubber = Scrubber()


def is_enabled(config: Config, explicit: bool | None = None) -> bool:
    """Return True if telemetry is on: the argument, else the configuration, else the environment.

    Example:
        >>> is_enabled(Config(base_url="http://127.0.0.1:8000", telemetry=False))
        False
    """
    said = getattr(config, "telemetry", None) if explicit is None else explicit
    if not isinstance(said, bool):
        said = environment.flag("TINKER_TELEMETRY")
    return said is not False


def goes_by_itself(config: Config) -> bool:
    """Return True if a session reports by default: on the hosted service, if it is on.

    Example:
        >>> goes_by_itself(Config(base_url="http://127.0.0.1:8000"))  # not the hosted service
        False
    """
    return (
        is_enabled(config) and urlsplit(config.base_url).hostname == urlsplit(HOSTED_URL).hostname
    )


class Caller(Protocol):
    """Sends requests: a transport."""

    async def call(
        self,
        op: Operation,
        request: Any = None,
        *,
        timeout: float | None = None,
        patience: float | None = None,
    ) -> Any:
        """Make the exchange and decode the answer, or raise."""


def sender(transport: Caller, timeout: float = HTTP_SECONDS) -> Send:
    """Return a function that posts batches through a transport, with at most one retry."""

    async def post(batch: TelemetrySendRequest) -> TelemetryResponse:
        answer: TelemetryResponse = await transport.call(
            TELEMETRY, batch, timeout=timeout, patience=1.0
        )
        return answer

    return post


def send(sender: Send, request: TelemetrySendRequest) -> None:
    """Send a batch in the background and return at once; a failure is only logged.

    Example:
        >>> async def post(batch: TelemetrySendRequest) -> TelemetryResponse:
        ...     return TelemetryResponse(status="accepted")
        >>> send(post, TelemetrySendRequest(events=[], session_id="session-1"))
    """
    start(_send_quietly(sender, request))


async def _send_quietly(sender: Send, request: TelemetrySendRequest) -> None:
    is_sending.set(True)
    try:
        await sender(request)
    except TinkerError as error:
        logger.warning("telemetry could not be sent: %s", _scrubber.text(str(error)))
    except Exception as error:
        logger.error(
            "sending telemetry crashed: %s: %s",
            type(error).__qualname__,
            _scrubber.text(str(error)),
        )


def send_sync(
    sender: Send, request: TelemetrySendRequest, timeout: float = HTTP_SECONDS
) -> TelemetryResponse | None:
    """Send a batch and wait for the answer; the error, if there is one, is raised.

    Example:
        >>> async def post(batch: TelemetrySendRequest) -> TelemetryResponse:
        ...     return TelemetryResponse(status="accepted")
        >>> send_sync(post, TelemetrySendRequest(events=[], session_id="session-1")).status
        'accepted'
    """

    async def deliver() -> TelemetryResponse | None:
        is_sending.set(True)
        return await sender(request)

    return start(deliver()).result(timeout)


def retry_delay(attempt: int, base: float = 1.0) -> float:
    """Return the delay before a batch is sent again: doubled per attempt, plus 1 to 10 percent.

    Example:
        >>> 4.0 < retry_delay(2) < 4.5
        True
    """
    return round(Delays(base, math.inf, 1.01, 1.1).after(attempt + 1), 3)


async def deliver(
    send: Send,
    scrubber: Scrubber,
    request: TelemetrySendRequest,
    *,
    timeout: float,
    retries: int,
    base_delay: float,
) -> None:
    """Send a batch, again if that fails; a refused batch is dropped at once."""
    failures, count = 0, len(request.events)

    async def attempt() -> None:
        async with asyncio.timeout(timeout):
            await send(request)

    def delay_after(outcome: Exception | None) -> float | None:
        nonlocal failures
        if outcome is None:
            return None
        failures += 1
        reason = scrubber.text(str(outcome) or type(outcome).__qualname__)
        if isinstance(outcome, APIStatusError) and not is_retryable(outcome):
            message = "telemetry: %d events dropped, the server refused them: %s"
            logger.warning(message, count, reason)
        elif failures > retries:
            message = "telemetry: %d events given up after %d retries: %s"
            logger.warning(message, count, retries, reason)
        else:
            delay = retry_delay(failures - 1, base_delay)
            message = "telemetry could not be sent (attempt %d): %s; again in %.2f s"
            logger.warning(message, failures, reason, delay)
            return delay
        return None

    with contextlib.suppress(Exception):
        await persist(attempt, delay_after)
