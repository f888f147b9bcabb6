"""Limits on what a client asks for at once: budgets, a shared pause, a gate, circuit breakers.

All of it is used on the runtime's loop. Clients with the same key share their limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

import msgspec

from tinkex.errors import APIStatusError, BillingError, TinkerError

T = TypeVar("T")
logger = logging.getLogger("tinkex")

SMALL_PROMPT_BYTES = 131_072
DISPATCHES = 400
THROTTLED_DISPATCHES = 10
THROTTLED_SECONDS = 10.0
THROTTLED_WEIGHT = 20


class ByteBudget:
    """Lets requests through while less than the budget is taken, in order.

    One request may overdraw the budget, so that a request larger than all of it still passes.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Take so many bytes for the time of a block."""
        await self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def give_back(self, size: int) -> None:
        """Return bytes that were taken."""
        self.left += size
        self._wake()

    async def take(self, size: int) -> None:
        """Take so many bytes; return them with `give_back`."""
        if self.left >= 0 and not self._waiting:
            self.left -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # cancelled after the bytes were granted: return them
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            raise

    def _wake(self) -> None:
        while self._waiting and self.left >= 0:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.left -= size
                turn.set_result(None)


class Backoff(msgspec.Struct):
    """A pause that several clients share; a later, shorter pause does not shorten it."""

    clock: Callable[[], float] = time.monotonic
    until: float = 0.0
    throttled: float = float("-inf")

    def pause(self, seconds: float) -> None:
        """Begin a pause of so many seconds."""
        self.throttled = self.clock()
        self.until = max(self.until, self.throttled + seconds)

    @property
    def recently(self) -> bool:
        """Return True during a pause and for ten seconds after it."""
        return self.clock() < max(self.until, self.throttled) + THROTTLED_SECONDS

    async def wait(self) -> None:
        """Wait until the pause is over, also if it is prolonged meanwhile."""
        while (left := self.until - self.clock()) > 0:  # noqa: ASYNC110 - nothing sets an event when time passes
            await asyncio.sleep(left)


class DispatchGate:
    """Limits the samples that are being submitted, by number and by bytes of their prompts.

    After back-pressure fewer may be. The limits hold while submitting, not while waiting for
    results.
    """

    def __init__(self, byte_budget: int, backoff: Backoff | None = None) -> None:
        self.backoff = backoff or Backoff()
        self._all = asyncio.Semaphore(DISPATCHES)
        self._few = asyncio.Semaphore(THROTTLED_DISPATCHES)
        self._bytes = ByteBudget(byte_budget)

    def passed(self, size: int) -> _Pass:
        """Return a context for the submission of a prompt; entering waits for the shared pause."""
        return _Pass(self, size)

    async def enter(self, size: int) -> tuple[bool, int]:
        """Wait to be let through; return what `leave` takes."""
        await self._all.acquire()
        throttled = self.backoff.recently
        try:
            if throttled:
                await self._few.acquire()
            try:
                taken = size * THROTTLED_WEIGHT if throttled else size
                await self._bytes.take(taken)
                try:
                    await self.backoff.wait()
                except BaseException:
                    self._bytes.give_back(taken)
                    raise
            except BaseException:
                if throttled:
                    self._few.release()
                raise
        except BaseException:
            self._all.release()
            raise
        return throttled, taken

    def leave(self, throttled: bool, taken: int) -> None:
        """Return what `enter` took."""
        self._bytes.give_back(taken)
        if throttled:
            self._few.release()
        self._all.release()

    def refused(self, size: int, retry_after: float | None) -> None:
        """Pause all clients, for as long as the prompt's size or the server asks for."""
        self.backoff.pause(max(1.0 if size <= SMALL_PROMPT_BYTES else 5.0, retry_after or 0.0))


class _Pass:
    """A context of a gate; a class, since every sample goes through it."""

    __slots__ = ("_gate", "_held", "_size")

    def __init__(self, gate: DispatchGate, size: int) -> None:
        self._gate, self._size = gate, size

    async def __aenter__(self) -> None:
        self._held = await self._gate.enter(self._size)

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(*self._held)


_gates: dict[Hashable, DispatchGate] = {}
_response_budgets: dict[Hashable, ByteBudget] = {}


def _forget() -> None:
    _gates.clear()
    _response_budgets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def shared_response_budget(key: Hashable, size: int) -> ByteBudget:
    """Return the budget for announced results of a key; on the runtime's loop only."""
    return _response_budgets.setdefault(key, ByteBudget(size))


def shared_gate(key: Hashable, byte_budget: int) -> DispatchGate:
    """Return the gate of a key, a server and an account; on the runtime's loop only."""
    return _gates.setdefault(key, DispatchGate(byte_budget))


# ── an account that must be topped up ─────────────────────────────────────────────────────────────

BILLING_SECONDS = 5.0
BILLING_QUIET = 300.0
BILLING_NOTICE = 60.0


class BillingPause:
    """The pause after a 402, until the account has credit again; logged once a minute.

    All calls of a client share one pause. It is forgotten after five minutes without a 402. After
    `limit` seconds a 402 is an error like any other.
    """

    def __init__(self, limit: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._since = self._last = self._noticed = float("-inf")

    def delay_after(self, error: BillingError) -> float | None:
        """Return the seconds to wait before the next attempt; None when the pause is over."""
        now = self._clock()
        if now - self._last > BILLING_QUIET:
            self._since = now
        self._last = now
        left = self._since + self.limit - now
        if left <= 0:
            return None
        if now - self._noticed >= BILLING_NOTICE:
            self._noticed = now
            logger.warning(
                "paused: %s; the work goes on when the account is topped up, or fails in %.0f "
                "minutes",
                error.message,
                left / 60,
            )
        return min(BILLING_SECONDS, left)


# ── circuit breaker ───────────────────────────────────────────────────────────────────────────────

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]


class CircuitOpenError(TinkerError):
    """A call that was not made, because those before it failed."""


@dataclass
class CircuitBreaker:
    """Stops calls that keep failing.

    After `failure_threshold` failures in a row it is open for `reset_seconds`. Then it lets
    `half_open_calls` probes through: a success closes it, a failure opens it again. Refusals (4xx)
    are answers, not failures.

    Example:
        >>> breaker = CircuitBreaker("sample", failure_threshold=2)
        >>> breaker.state
        'closed'
    """

    name: str = ""
    failure_threshold: int = 5
    reset_seconds: float = 30.0
    half_open_calls: int = 1
    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    _opened: float | None = field(default=None, repr=False)
    _probes: int = field(default=0, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def state(self) -> BreakerState:
        """The state: closed lets calls pass, open does not, half_open lets a few pass on trial."""
        opened = self._opened
        if opened is None:
            return "closed"
        return "half_open" if self.clock() - opened >= self.reset_seconds else "open"

    def allows(self) -> bool:
        """Return True if a call would be let through now."""
        state = self.state
        return state == "closed" or (state == "half_open" and self._probes < self.half_open_calls)

    def succeed(self) -> None:
        """Note a success; it has no effect while open."""
        with self._lock:
            if self.state != "open":
                self.reset()

    def fail(self) -> None:
        """Note a failure."""
        with self._lock:
            if self.state == "half_open":
                self._opened, self._probes = self.clock(), 0
            elif self._opened is None:
                self.failures += 1
                if self.failures >= self.failure_threshold:
                    self._opened = self.clock()

    def reset(self) -> None:
        """Close and forget the failures."""
        with self._lock:
            self.failures, self._opened, self._probes = 0, None, 0

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function through the breaker; raise CircuitOpenError while it is open."""
        probing = self._enter()
        try:
            result = await function()
        except asyncio.CancelledError:
            with self._lock:
                self._probes -= probing and self._probes > 0
            raise
        except Exception as error:
            self.succeed() if _is_answer(error) else self.fail()
            raise
        self.succeed()
        return result

    def _enter(self) -> bool:
        """Let a call through or raise; return True if it is a probe."""
        with self._lock:
            if not self.allows():
                left = max(0.0, self.reset_seconds - (self.clock() - (self._opened or 0.0)))
                raise CircuitOpenError(
                    f"the circuit breaker {self.name!r} is open after {self.failures} failures in "
                    "a row",
                    hint=f"the next attempt is let through in {left:.0f} s",
                )
            probing = self.state == "half_open"
            self._probes += probing
            return probing


def _is_answer(error: Exception) -> bool:
    """Return True for an error that shows a working server: it understood and refused."""
    return isinstance(error, APIStatusError) and 400 <= error.status_code < 500


class BreakerRegistry:
    """Circuit breakers by name, all with the same settings; safe in any thread."""

    def __init__(self, **settings: float) -> None:
        self._settings = settings
        self._breakers: dict[str, CircuitBreaker] = {}

    def get(self, name: str) -> CircuitBreaker:
        """Return the breaker of a name, made when first asked for."""
        found = self._breakers.get(name)
        if found is None:
            made = CircuitBreaker(name, **self._settings)  # type: ignore[arg-type]
            found = self._breakers.setdefault(name, made)  # another thread may have been quicker
        return found

    def states(self) -> dict[str, BreakerState]:
        """Return the state of every breaker."""
        return {name: breaker.state for name, breaker in list(self._breakers.items())}

    def reset(self, name: str) -> None:
        """Close a breaker; an unknown name is fine."""
        if (breaker := self._breakers.get(name)) is not None:
            breaker.reset()

    def delete(self, name: str) -> None:
        """Forget a breaker; an unknown name is fine."""
        self._breakers.pop(name, None)
