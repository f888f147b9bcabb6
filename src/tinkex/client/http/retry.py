"""Retries: the one loop that waits after a failure, of requests and of samples."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tinkex import events
from tinkex.client.http.exchange import Reply
from tinkex.client.http.limits import BillingPause, CircuitBreaker
from tinkex.client.http.reply_errors import RejectedError
from tinkex.client.settings.delays import Delays
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    BillingError,
    GoneError,
    is_retryable,
)

T = TypeVar("T")
logger = logging.getLogger("tinkex")

DELAYS = Delays()
CONFLICT_PATIENCE = 2.0
REJECTED_ATTEMPTS = 16
"""Limit of retries after a 400 with an empty body."""

Sleep: TypeAlias = Callable[[float], Awaitable[object]]
"""Waits for so many seconds."""


async def persist(
    attempt: Callable[[], Awaitable[T]],
    delay_after: Callable[[T | Exception], float | None],
    sleep: Sleep | None = None,
) -> T:
    """Repeat an attempt until its outcome is final, and return or raise that outcome.

    Args:
        attempt: Makes one attempt.
        delay_after: Returns the seconds to wait before the next attempt, given the outcome of the
            last one: its result or its exception. None makes that outcome final.
        sleep: Waits in place of `asyncio.sleep`.

    Returns:
        The last result.
    """
    while True:
        try:
            result = await attempt()
        except Exception as error:
            if (delay := delay_after(error)) is None:
                raise
        else:
            if (delay := delay_after(result)) is None:
                return result
        await (sleep or asyncio.sleep)(delay)


class Patience(msgspec.Struct, frozen=True, gc=False):
    """The limits of a request's retries."""

    seconds: float
    """Time after which no further attempt begins; an account without credit is not counted."""
    max_retries: int | None = None
    final: Container[int] = ()
    """Statuses that are raised at once."""

    def of(self, status: int) -> float:
        """Return the seconds for one kind of failure: a conflict passes soon or not at all."""
        return min(CONFLICT_PATIENCE, self.seconds) if status == 409 else self.seconds


class Attempts(msgspec.Struct):
    """One request, sent until there is an answer or its patience is over."""

    attempt: Callable[[int], Awaitable[Reply]]
    """Makes one attempt; they are counted from 0."""
    patience: Patience
    billing: BillingPause
    breaker: CircuitBreaker | None
    since: float = msgspec.field(default_factory=lambda: time.monotonic())
    """The time from which the patience is counted."""
    failures: int = 0
    retries: int = 0
    """The number of the last attempt."""

    def send(self) -> Awaitable[Reply]:
        """Send once, through the operation's circuit breaker if there is one."""
        self.retries = self.failures
        if self.breaker is None:
            return self.attempt(self.retries)
        return self.breaker.call(functools.partial(self.attempt, self.retries))

    def delay_after(self, outcome: Reply | Exception) -> float | None:
        """Decide on the next attempt: exponential delays, the server's Retry-After, a time limit.

        A good answer with `x-should-retry: true` is the answer when the limit is reached. An
        account without credit is waited for much longer and is no failure.
        """
        if isinstance(outcome, Reply):
            asks = "x-should-retry" in outcome.headers and outcome.should_retry
            return self._next(outcome.retry_after) if asks else None
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


@dataclass(frozen=True)
class RetryConfig:
    """A sampling client's policy for samples that fail for a passing reason. Times are seconds.

    Example:
        >>> RetryConfig(max_retries=3, retry_delay_max=2.0).delay(10, jitter=0.5)
        2.0
    """

    max_connections: int = 1000
    """Samples in flight at once; the server's own limit holds too."""
    progress_timeout: float = 7200.0
    """Time without any success after which all samples are given up."""
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    """The part of a delay by which it may be longer or shorter."""
    enable_retry_logic: bool = True
    """False: every failure is final, and a request is sent once."""
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[BaseException], ...] = (
        TimeoutError,
        APIConnectionError,
        GoneError,
    )
    """Tried again, besides the statuses 408, 409, 429 and 5xx."""
    max_retries: int | None = None
    """Limit of retries; None has no limit while other samples succeed."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.max_connections <= 0:
            raise ValueError(f"max_connections must be greater than 0, got {self.max_connections}")
        if self.progress_timeout <= 0:
            raise ValueError(
                f"progress_timeout must be greater than 0, got {self.progress_timeout}"
            )
        if self.retry_delay_base <= 0 or self.retry_delay_max < self.retry_delay_base:
            raise ValueError("retry_delay_base must be greater than 0 and at most retry_delay_max")
        if not 0 <= self.jitter_factor <= 1:
            raise ValueError(f"jitter_factor must lie between 0 and 1, got {self.jitter_factor}")
        if self.max_retries is not None and self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {self.max_retries}")

    def delay(self, attempt: int, jitter: float | None = None) -> float:
        """Return the seconds to wait after the n-th failure, counted from 0.

        Args:
            attempt: The number of earlier failures.
            jitter: A number in [0, 1] in place of a random one.

        Returns:
            Seconds.

        Example:
            >>> [
            ...     RetryConfig(retry_delay_base=0.5, jitter_factor=0).delay(attempt)
            ...     for attempt in range(4)
            ... ]
            [0.5, 1.0, 2.0, 4.0]
        """
        low, high = 1 - self.jitter_factor, 1 + self.jitter_factor
        delays = Delays(self.retry_delay_base, self.retry_delay_max, low, high)
        return delays.after(attempt + 1, jitter=jitter)

    def is_retryable(self, error: BaseException) -> bool:
        """Return True for a failure that may pass.

        Args:
            error: The failure.

        Returns:
            True to try again.

        Example:
            >>> config = RetryConfig()
            >>> (
            ...     config.is_retryable(TimeoutError()),
            ...     config.is_retryable(APIStatusError("no", status_code=400)),
            ... )
            (True, False)
        """
        told = getattr(error, "should_retry", None)
        if told is not None:
            return bool(told)
        if isinstance(error, self.retryable_exceptions):
            return True
        return isinstance(error, APIStatusError) and (
            error.status_code in (408, 409, 429) or error.status_code >= 500
        )


class RetryHandler:
    """Runs calls under a `RetryConfig`.

    Args:
        config: The policy.
        name: The name of these calls in the log and in events.
        limit: How many run at once; by default as the configuration says.
        metadata: Added to the events of the attempts.
        clock: Returns the time in seconds.

    Example:
        >>> import asyncio
        >>> async def call() -> int:
        ...     return 7
        >>> asyncio.run(RetryHandler().execute(call))
        7
    """

    def __init__(
        self,
        config: RetryConfig | None = None,
        name: str = "default",
        *,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or RetryConfig()
        self.name = name
        self.metadata = dict(metadata or {})
        self._limit = self.config.max_connections if limit is None else limit
        self.clock = clock
        self._slots: asyncio.Semaphore | None = None
        self._running: dict[asyncio.Task[Any], float] = {}
        """The start of each running call, the oldest first."""
        self._stuck: set[asyncio.Task[Any]] = set()
        self._progress = clock()
        self._watch: asyncio.TimerHandle | None = None

    async def execute(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Call a function until it succeeds, or its failure is final; the last failure is raised.

        Example:
            >>> answers = [TimeoutError("no answer"), 7]
            >>> async def call() -> int:
            ...     if isinstance(answer := answers.pop(0), Exception):
            ...         raise answer
            ...     return answer
            >>> asyncio.run(RetryHandler(RetryConfig(retry_delay_base=0.001)).execute(call))
            7
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._limit)
        await self._slots.acquire()
        try:
            task = asyncio.current_task()
            assert task is not None
            self._begin(task)
            try:
                call = _Call(self, function, args, kwargs, self.clock())
                result = await persist(call.attempt, call.delay_after)
            except asyncio.CancelledError:
                # cancelled by the caller, perhaps besides us
                if task not in self._stuck or task.uncancel() > 0:
                    raise
                raise APIConnectionError(
                    f"{self.name}: nothing has come through for {self.config.progress_timeout:g} s",
                    hint="RetryConfig(progress_timeout=…) sets how long to wait",
                ) from None
            except Exception:
                self._progress = self.clock()
                raise
            finally:
                self._end(task)
            self._progress = self.clock()
            return result
        finally:
            self._slots.release()

    def may_go_on(self, failures: int, started: float, error: Exception) -> bool:
        """Return True if another attempt follows the n-th failure, counted from 0."""
        config = self.config
        if not config.enable_retry_logic or (
            config.max_retries is not None and failures >= config.max_retries
        ):
            return False
        if self.clock() - max(started, self._progress) > config.progress_timeout:
            return False
        return config.is_retryable(error)

    # ── stuck calls ───────────────────────────────────────────────────────────────────────────────

    def _begin(self, task: asyncio.Task[Any]) -> None:
        now = self.clock()
        if not self._running:
            self._progress = now
        self._running[task] = now
        if self._watch is None and self.config.enable_stuck_detection:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(self.config.progress_timeout, self._look)

    def _end(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        self._stuck.discard(task)
        if not self._running and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        """Cancel the calls that are older than the timeout, if nothing has succeeded meanwhile."""
        self._watch, now = None, self.clock()
        for task, since in self._running.items():
            left = max(since, self._progress) + self.config.progress_timeout - now
            if left > 0:
                self._watch = asyncio.get_running_loop().call_later(left, self._look)
                return
            if task not in self._stuck:
                self._stuck.add(task)
                task.cancel()


class _Call(msgspec.Struct, Generic[T]):
    """One call of a handler; a class, since closures of every sample in flight cost more."""

    handler: RetryHandler
    function: Callable[..., Awaitable[T]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    started: float
    begun: float = 0.0
    """The start of the last attempt."""
    failures: int = 0

    def attempt(self) -> Awaitable[T]:
        """Call the function once."""
        self.begun = self.handler.clock()
        if events.is_heard():
            self._emit(events.RETRY_START, {"system_time": time.time()})
        return self.function(*self.args, **self.kwargs)

    def delay_after(self, outcome: T | Exception) -> float | None:
        """Return the wait before the next attempt; None at the end."""
        if not isinstance(outcome, Exception):
            if events.is_heard():
                self._emit(events.RETRY_STOP, self._spent(), result="ok")
            return None
        handler, spent = self.handler, self._spent()
        if not handler.may_go_on(self.failures, self.started, outcome):
            self._emit(events.RETRY_FAILED, spent, error=outcome)
            return None
        asked = getattr(outcome, "retry_after", None) or 0.0
        delay = max(handler.config.delay(self.failures), asked)
        self._emit(events.RETRY_RETRY, {**spent, "delay_ms": delay * 1000}, error=outcome)
        message = getattr(outcome, "message", outcome)
        logger.warning("%s: %s; trying again in %.1f s", handler.name, message, delay)
        self.failures += 1
        return delay

    def _spent(self) -> dict[str, float]:
        return {"duration": (self.handler.clock() - self.begun) * 1000}

    def _emit(self, name: str, measurements: dict[str, float], **facts: Any) -> None:
        handler = self.handler
        named = {"name": handler.name, "attempt": self.failures, **facts}
        events.emit(name, measurements, {**handler.metadata, **named})
