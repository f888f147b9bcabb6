"""Trying again: how often, how long, and when to give up because nothing comes through any more."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkex import events
from tinkex.errors import APIConnectionError, APIStatusError, GoneError

T = TypeVar("T")
logger = logging.getLogger("tinkex")


@dataclass(frozen=True)
class RetryConfig:
    """How a sampling client treats samples that fail for a passing reason. Times are seconds.

    Example:
        >>> RetryConfig(max_retries=3, retry_delay_max=2.0).delay(10, jitter=0.5)
        2.0
    """

    max_connections: int = 1000
    """Samples under way at once; the server's own limit holds too."""
    progress_timeout: float = 7200.0
    """How long nothing may come through before it is all given up."""
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    """The share of a delay by which it may be longer or shorter."""
    enable_retry_logic: bool = True
    """False: every failure is final, and a request is sent once."""
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[BaseException], ...] = (TimeoutError, APIConnectionError, GoneError)
    """Tried again, besides the statuses 408, 409, 429 and 5xx."""
    max_retries: int | None = None
    """How often, at most; None: for as long as anything comes through."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_connections <= 0:
            raise ValueError(f"max_connections must be greater than 0, got {self.max_connections}")
        if self.progress_timeout <= 0:
            raise ValueError(f"progress_timeout must be greater than 0, got {self.progress_timeout}")
        if self.retry_delay_base <= 0 or self.retry_delay_max < self.retry_delay_base:
            raise ValueError("retry_delay_base must be greater than 0 and at most retry_delay_max")
        if not 0 <= self.jitter_factor <= 1:
            raise ValueError(f"jitter_factor must lie between 0 and 1, got {self.jitter_factor}")
        if self.max_retries is not None and self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {self.max_retries}")

    def delay(self, attempt: int, jitter: float | None = None) -> float:
        """Seconds to wait after the n-th failure, counted from 0; `jitter` in [0, 1] stands in for the dice."""
        plain: float = min(self.retry_delay_base * 2 ** min(attempt, 60), self.retry_delay_max)
        share = (random.random() if jitter is None else jitter) * 2 - 1
        return min(max(plain + share * self.jitter_factor * plain, 0.0), self.retry_delay_max)

    def is_retryable(self, error: BaseException) -> bool:
        """Whether a failure may be a passing one."""
        told = getattr(error, "should_retry", None)
        if told is not None:
            return bool(told)
        if isinstance(error, self.retryable_exceptions):
            return True
        return isinstance(error, APIStatusError) and (error.status_code in (408, 409, 429) or error.status_code >= 500)


class RetryHandler:
    """Runs calls under a `RetryConfig`: so many at once, tried again, given up when nothing comes through.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or RetryConfig()
        self.name = name
        self._limit = self.config.max_connections if limit is None else limit
        self._clock = clock
        self._slots: asyncio.Semaphore | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._stuck: set[asyncio.Task[Any]] = set()
        self._progress = clock()
        self._watch: asyncio.TimerHandle | None = None

    async def execute(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Call a function until it succeeds, or its failure is final; the last failure is raised."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._limit)
        async with self._slots:
            task = asyncio.current_task()
            assert task is not None
            self._begin(task)
            try:
                return await self._persist(function, args, kwargs)
            except asyncio.CancelledError:
                if task not in self._stuck:
                    raise
                task.uncancel()
                raise APIConnectionError(
                    f"{self.name}: nothing has come through for {self.config.progress_timeout:g} s",
                    hint="RetryConfig(progress_timeout=…) sets how long to wait",
                ) from None
            finally:
                self._end(task)

    async def _persist(self, function: Callable[..., Awaitable[T]], args: Any, kwargs: Any) -> T:
        attempt, started = 0, self._clock()
        while True:
            self._emit("start", attempt, {})
            begun = self._clock()
            try:
                result = await function(*args, **kwargs)
            except Exception as error:
                facts = {"error": error}
                over = self._clock() - max(started, self._progress) > self.config.progress_timeout
                spent = self.config.max_retries is not None and attempt >= self.config.max_retries
                if over or spent or not self.config.enable_retry_logic or not self.config.is_retryable(error):
                    self._emit("failed", attempt, {"duration": self._clock() - begun}, facts)
                    raise
                delay = max(self.config.delay(attempt), getattr(error, "retry_after", None) or 0.0)
                self._emit("retry", attempt, {"duration": self._clock() - begun, "delay_ms": delay * 1000}, facts)
                logger.warning("%s: %s; trying again in %.1f s", self.name, getattr(error, "message", error), delay)
                attempt += 1
                await asyncio.sleep(delay)
            else:
                self._emit("stop", attempt, {"duration": self._clock() - begun})
                return result

    def _emit(
        self, what: str, attempt: int, measurements: dict[str, float], facts: dict[str, Any] | None = None
    ) -> None:
        if events.is_heard():
            events.emit(
                f"retry.attempt.{what}", {"attempt": attempt, **measurements}, {"name": self.name} | (facts or {})
            )

    # ── when nothing comes through any more ──────────────────────────────────────────────────────────────────────

    def _begin(self, task: asyncio.Task[Any]) -> None:
        if not self._running:
            self._progress = self._clock()
        self._running.add(task)
        if self._watch is None and self.config.enable_stuck_detection:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(self.config.progress_timeout, self._look)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._progress = self._clock()
        self._running.discard(task)
        self._stuck.discard(task)
        if not self._running and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        """Give up what is under way if nothing has ended in all that time; else look again when it would be due."""
        left = self._progress + self.config.progress_timeout - self._clock()
        if left > 0:
            self._watch = asyncio.get_running_loop().call_later(left, self._look)
            return
        self._watch = None
        for task in self._running:
            self._stuck.add(task)
            task.cancel()
