"""Requests that are sent until there is an answer: the retry policy of whole calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Container

import msgspec

from tinkex.client.http.addresses import REDIRECTS
from tinkex.client.http.exchange import HttpRequest, Reply
from tinkex.client.http.limits import BillingPause, BreakerRegistry
from tinkex.client.http.link import Link
from tinkex.client.http.reply_errors import RejectedError
from tinkex.client.http.retry import persist
from tinkex.client.settings.delays import Delays
from tinkex.errors import APIConnectionError, APIStatusError, BillingError, is_retryable
from tinkex.wire.protocol import Operation

logger = logging.getLogger("tinkex")

DELAYS = Delays()
CONFLICT_PATIENCE = 2.0
REJECTED_ATTEMPTS = 16
"""How often a request is sent again after a 400 with an empty body."""


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


class Attempts:
    """One request, sent until there is an answer or its patience is over."""

    __slots__ = (
        "_billing",
        "_breakers",
        "_failures",
        "_follows",
        "_link",
        "_op",
        "_patience",
        "_request",
        "_since",
        "retries",
    )

    def __init__(
        self,
        link: Link,
        op: Operation,
        request: HttpRequest,
        patience: Patience,
        billing: BillingPause,
        breakers: BreakerRegistry | None,
        follows: bool,
    ) -> None:
        self._link, self._op, self._request, self._patience = link, op, request, patience
        self._billing, self._breakers, self._follows = billing, breakers, follows
        self._since = time.monotonic()
        self._failures = 0
        self.retries = 0
        """The number of the last attempt, from 0."""

    async def reply(self) -> Reply:
        """Send until there is a good reply; raise the last failure."""
        return await persist(self._attempt, self._delay_after)

    def _attempt(self) -> Awaitable[Reply]:
        """Send once, through the operation's circuit breaker if there is one."""
        self.retries = self._failures
        headers = self._request.headers
        assert isinstance(headers, dict)
        headers["X-Stainless-Retry-Count"] = str(self.retries)
        if self._breakers is None:
            return self._once()
        return self._breakers.get(f"{self._op.method} {self._op.path}").call(self._once)

    async def _once(self) -> Reply:
        op, request, link, place = self._op, self._request, self._link, ""
        if self.retries:  # the token may have expired
            assert isinstance(request.headers, dict)
            await link.keys.renew(request.headers)
        reply = await link.send(op, request)
        if reply.status in REDIRECTS:
            if not self._follows and "location" in reply.headers:
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
            is_final = 402 in self._patience.final or self._patience.seconds <= 0
            delay = None if is_final else self._billing.delay_after(outcome)
            self._since = time.monotonic() + (delay or 0.0)
            return delay
        if not isinstance(outcome, APIConnectionError | APIStatusError):
            return None
        delay = self._next(outcome.retry_after, status)
        outcome.attempts = self._failures
        rejected = isinstance(outcome, RejectedError) and self._failures > REJECTED_ATTEMPTS
        hopeless = status in self._patience.final or not is_retryable(outcome)
        if delay is None or rejected or hopeless:
            self._wear_out(outcome)
            return None
        if self._failures == 1:
            allowed = self._patience.of(status)
            logger.warning("%s; trying again for up to %.0f s", outcome.message, allowed)
        else:
            logger.debug("%s; attempt %d", outcome.message, self._failures + 1)
        return delay

    def _next(self, asked: float | None, status: int = 0) -> float | None:
        """Count a failure; return the delay after it, or None if the patience is over."""
        self._failures += 1
        delay = DELAYS.after(self._failures, asked)
        patience = self._patience
        if patience.max_retries is not None and self._failures > patience.max_retries:
            return None
        return delay if self._spent() + delay <= patience.of(status) else None

    def _spent(self) -> float:
        return time.monotonic() - self._since

    def _wear_out(self, error: APIConnectionError | APIStatusError) -> None:
        """Note in the last error of a series how long the series was."""
        if self._failures > 1:
            error.message += f" (after {self._failures} attempts in {self._spent():.1f} s)"
            error.args = (error.message,)
