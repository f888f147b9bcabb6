"""Futures: what every call returns, how a result is fetched, and how the results of several chunks
become one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import logging
import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

import msgspec

from tinkex import events
from tinkex.client.futures.loop_thread import Inbox, Runtime, give_up, inbox_of, runtime
from tinkex.client.http.attempts import DELAYS, Patience
from tinkex.client.http.exchange import Reply
from tinkex.client.http.reply_errors import RejectedError
from tinkex.client.http.retry import persist
from tinkex.client.http.transport import OFF_LOOP_BYTES, Transport
from tinkex.client.settings.config import poll_delay
from tinkex.client.settings.delays import LONGEST_RETRY_AFTER, Delays
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    GoneError,
    RequestFailedError,
    TinkerError,
    is_retryable,
)
from tinkex.types.sessions import FutureRetrieveRequest, RequestErrorCategory
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import codec
from tinkex.wire.protocol import RETRIEVE_FUTURE, Operation

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger("tinkex")

POLL_TIMEOUT = 45.0
HELD = 1.0
"""A poll that the server held for this long and left without a result has run out: poll again at
once."""


class APIFuture(ABC, Generic[T]):
    """The outcome of a call that has begun: `await` it, or call `.result()`.

    Every call that uses the network returns one. `future()` is the `concurrent.futures.Future`
    behind it, with `done`, `cancel` and `add_done_callback`, for `concurrent.futures.wait` and
    `as_completed`.

    Example:
        >>> call: APIFuture[TrainingRun] = rest.get_training_run(client.model_id)
        >>> call.result(timeout=60).base_model
        'tinkex/tiny'
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Block until the outcome is there.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet.

        Example:
            >>> call: APIFuture[TrainingRun] = rest.get_training_run(client.model_id)
            >>> call.result(timeout=60).base_model
            'tinkex/tiny'
        """

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T:
        """Await the outcome.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet.

        Example:
            >>> import asyncio
            >>> async def main() -> str:
            ...     return (
            ...         await rest.get_training_run(client.model_id).result_async(timeout=60)
            ...     ).base_model
            >>> asyncio.run(main())
            'tinkex/tiny'
        """

    @abstractmethod
    def future(self) -> concurrent.futures.Future[T]:
        """The concurrent future behind this one: `done`, `cancel`, `add_done_callback` and the
        rest.

        Example:
            >>> rest.get_training_run(client.model_id).future().result().base_model
            'tinkex/tiny'
        """

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()  # which a program's own kind of future replaces

    async def coroutine(self) -> T:
        """Await the outcome: a coroutine, for `asyncio.create_task`, which takes nothing else.

        Returns:
            What the call gives.

        Example:
            >>> import asyncio
            >>> async def main() -> float:
            ...     task = asyncio.create_task(client.forward(data, "cross_entropy").coroutine())
            ...     return (await task).metrics["loss:sum"]
            >>> asyncio.run(main())
            10.6...
        """
        return await self


class Future(APIFuture[T], concurrent.futures.Future[T]):
    """The outcome of a call that has begun, and a `concurrent.futures.Future` itself.

    `await` it in any event loop, or call `.result(timeout)` in any thread. A timeout, or a
    cancelled waiter, never cancels the work; `cancel()` does. `concurrent.futures.wait` and
    `as_completed` take it too.

    Example:
        >>> future = client.forward(data, "cross_entropy")
        >>> future.result(timeout=60).metrics["loss:sum"]
        10.6...
    """

    def __init__(self, future: concurrent.futures.Future[T] | None = None) -> None:
        """Make a future to resolve by hand, or one that takes the outcome of another and passes a
        cancel on to it.
        """
        super().__init__()
        self._runtime: Runtime | None = None
        if future is not None:
            self._runtime = getattr(future, "_runtime", None)
            # The plain methods throughout: a sample's future warns of its own.
            _Plain.add_done_callback(future, lambda done: _copy_outcome(done, self))
            _Plain.add_done_callback(
                self, lambda mine: give_up(future) if _Plain.cancelled(mine) else None
            )

    def result(self, timeout: float | None = None) -> T:
        """Block until the outcome is there; `TimeoutError` after `timeout` seconds leaves the work
        running.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet; the work goes on.
            TinkerError: The call failed: see `tinkex.errors`.
            RuntimeError: Called on tinkex's own thread, which would wait for itself.

        Example:
            >>> client.forward(data, "cross_entropy").result(timeout=60).metrics["loss:sum"]
            10.6...
        """
        self._check_thread()
        return self._outcome(timeout)

    def _outcome(self, timeout: float | None = None) -> T:
        """Block as `result` does, without a word when an event loop runs here."""
        self._check_own_loop()
        try:
            return _Plain.result(self, timeout)
        except TimeoutError:
            if _Plain.done(self):
                raise
            raise TimeoutError(
                f"not done after {timeout} s; the work goes on, result() can be called again"
            ) from None

    if not TYPE_CHECKING:  # a checker would take it that every name is there

        def __getattr__(self, name: str) -> NoReturn:
            """Say what was forgotten: only names that are not there come here."""
            raise _missing(self, name)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the outcome is there and return its error, if it is one.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            The error, or None when the call succeeded.

        Example:
            >>> client.forward(data, "cross_entropy").exception() is None
            True
        """
        self._check_thread()
        return _Plain.exception(self, timeout)

    def cancel(self) -> bool:
        """Give the work up; False when it has already ended.

        Returns:
            Whether it was given up.

        Example:
            >>> client.forward(data, "cross_entropy").cancel()
            True
        """
        return give_up(self)

    def _check_thread(self) -> None:
        self._check_process()
        if _Plain.done(self):
            return
        self._check_own_loop()
        if in_users_loop():
            message = "result() blocks the running event loop; await the future instead"
            warnings.warn(message, RuntimeWarning, stacklevel=users_level())

    def _check_own_loop(self) -> None:
        """Refuse to wait on the loop that has to bring the outcome, or in a process that has no
        such loop.
        """
        self._check_process()
        if self._runtime is not None and self._runtime.is_current and not _Plain.done(self):
            raise RuntimeError(
                "result() would block tinkex's own event loop for ever: await the future instead"
            )

    def _check_process(self) -> None:
        """Refuse to wait in a forked child for a loop that only the parent has."""
        # The state is read without the lock: another thread may have held that when the process was
        # forked.
        if (
            self._runtime is not None
            and self._state in ("PENDING", "RUNNING")
            and self._runtime.is_inherited
        ):
            raise RuntimeError(
                "this call was pending when the process was forked, and only the parent process "
                "gets its result: wait "
                "for it before the fork, or make the call again with a client made after it"
            )

    async def _wait(self) -> T:
        self._check_process()
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        _Plain.add_done_callback(self, functools.partial(_wake, loop, inbox_of(loop), woken))
        await woken
        return _Plain.result(self, 0)

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the outcome; `TimeoutError` after `timeout` seconds leaves the work running.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet; the work goes on.

        Example:
            >>> import asyncio
            >>> async def main() -> float:
            ...     result = await client.forward(data, "cross_entropy").result_async(timeout=60)
            ...     return result.metrics["loss:sum"]
            >>> asyncio.run(main())
            10.6...
        """
        if timeout is None:
            return await self._wait()
        async with asyncio.timeout(timeout):
            return await self._wait()

    @property
    def _future(self) -> concurrent.futures.Future[T]:
        """The concurrent future, by the name under which programs find it in the official one."""
        return self.future()

    def future(self) -> concurrent.futures.Future[T]:
        """This future, as the plain concurrent one that it is.

        Example:
            >>> import concurrent.futures
            >>> futures = [client.forward(data, "cross_entropy").future() for _ in range(2)]
            >>> [
            ...     future.result().metrics["loss:sum"]
            ...     for future in concurrent.futures.as_completed(futures)
            ... ]
            [10.6..., 10.6...]
        """
        return self


class SampleFuture(Future[T]):
    """The outcome of `sample` or `compute_logprobs`: a `concurrent.futures.Future` and an
    `APIFuture`.

    `await`, `.result()`, `.future()` and `concurrent.futures.wait` are the ways to use it. `done`,
    `cancel` and the other methods of a concurrent future work, with a warning: they will be found
    on `.future()` alone.

    Example:
        >>> future = sampler.sample(prompt, 1, SamplingParams(max_tokens=8))
        >>> future.future().add_done_callback(lambda done: None)
        >>> future.result()
        SampleResponse([SampledSequence(...)])
    """

    _has_warned = False
    _view: Future[T] | None = None

    def _warn(self, name: str) -> None:
        """Warn once for each object."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"DEPRECATED: {name}() will be removed from the futures of samples: await the "
                "future, call .result(), "
                f"or use .future().{name}()",
                FutureWarning,
                stacklevel=3,
            )

    def future(self) -> concurrent.futures.Future[T]:
        """A plain concurrent future of the same outcome; cancelling it cancels the sample.

        Example:
            >>> sampler.sample(prompt, 1, SamplingParams(max_tokens=500)).future().cancel()
            True
        """
        if self._view is None:
            view = Future(self)
            view._runtime = self._runtime
            self.__dict__.setdefault("_view", view)  # another thread may have been first
        assert self._view is not None
        return self._view

    def cancel(self) -> bool:
        """Give the sample up. Deprecated: use `.future().cancel()`."""
        self._warn("cancel")
        return give_up(self)

    def cancelled(self) -> bool:
        """Return whether the sample was given up. Deprecated: use `.future().cancelled()`."""
        self._warn("cancelled")
        return _Plain.cancelled(self)

    def running(self) -> bool:
        """Return whether the sample is being drawn. Deprecated: use `.future().running()`."""
        self._warn("running")
        return _Plain.running(self)

    def done(self) -> bool:
        """Return whether there is an outcome. Deprecated: use `.future().done()`."""
        self._warn("done")
        return _Plain.done(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, if the sample failed. Deprecated: use `.future().exception()`."""
        self._warn("exception")
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have a function called at the end. Deprecated: use `.future().add_done_callback()`."""
        self._warn("add_done_callback")
        _Plain.add_done_callback(self, fn)


class AwaitableConcurrentFuture(APIFuture[T]):
    """The outcome of a call about things that are stored, such as those of `RestClient`.

    It has no `done`, `cancel` or `add_done_callback`; they are on `.future()`.

    Args:
        future: The concurrent future whose outcome this is.

    Example:
        >>> call = rest.list_checkpoints(client.model_id)
        >>> call.future().add_done_callback(lambda done: None)
        >>> call.result()
        CheckpointsListResponse(...)
    """

    __slots__ = ("__weakref__", "_future", "_own")

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self._future = future
        self._own: Future[T] = future if isinstance(future, Future) else Future(future)

    def result(self, timeout: float | None = None) -> T:
        """Block until the outcome is there; `TimeoutError` after `timeout` seconds leaves the work
        running.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet; the work goes on.

        Example:
            >>> rest.get_training_run(client.model_id).result(timeout=60).base_model
            'tinkex/tiny'
        """
        return self._own.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the outcome; `TimeoutError` after `timeout` seconds leaves the work running.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            What the call gives.

        Raises:
            TimeoutError: There is no outcome yet; the work goes on.

        Example:
            >>> import asyncio
            >>> async def main() -> str:
            ...     return (
            ...         await rest.get_training_run(client.model_id).result_async(timeout=60)
            ...     ).base_model
            >>> asyncio.run(main())
            'tinkex/tiny'
        """
        return await self._own.result_async(timeout)

    def future(self) -> concurrent.futures.Future[T]:
        """The concurrent future: `done`, `cancel`, `add_done_callback` and the rest.

        Example:
            >>> rest.get_training_run(client.model_id).future().result().base_model
            'tinkex/tiny'
        """
        return self._future

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what was forgotten, or where it is."""
            raise _missing(self, name)


_Plain = concurrent.futures.Future


def _missing(future: APIFuture[Any], name: str) -> AttributeError:
    """The error for a name that a future does not have."""
    message = f"{type(future).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        there = hasattr(_Plain, name)
        message += (
            ": `.future()` has it"
            if there
            else ": `.result()`, or `await`, gives the outcome of the call"
        )
    return AttributeError(message, name=name, obj=future)


def in_users_loop() -> bool:
    """Whether blocking here would block an event loop that ought to go on; a notebook's is meant to
    be blocked.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return "ipykernel" not in sys.modules


def _wake(
    loop: asyncio.AbstractEventLoop, inbox: Inbox, woken: asyncio.Future[None], _: object
) -> None:
    """Let whoever awaits a future in a loop of theirs look at it; the loop may be gone by now."""
    if not loop.is_closed():
        inbox.put(loop, _set, woken)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def _copy_outcome(source: concurrent.futures.Future[T], target: Future[T]) -> None:
    if _Plain.done(target):
        return
    if _Plain.cancelled(source):
        give_up(target)
    elif (error := _Plain.exception(source)) is not None:
        target.set_exception(error)
    else:
        target.set_result(_Plain.result(source))


def users_level() -> int:
    """How far up the stack, counted from the caller, the user's own line is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinkex."):
        level, frame = level + 1, frame.f_back
    return level


def unlisted(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let a coroutine function pass for a plain one that returns its coroutine: to be awaited as
    before.

    For what the official clients do not have. Programs that trace those look over their coroutine
    functions, and the cookbook will not go on when there is one that it does not know.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return method(*args, **kwargs)

    return called


def start(coroutine: Coroutine[Any, Any, T], kind: type[Future[T]] | None = None) -> Future[T]:
    """Run a coroutine on the runtime; the future is its outcome."""
    future: Future[T] = Future() if kind is None else kind()
    future._runtime = runtime()
    future._runtime.feed(coroutine, future)
    return future


MALFORMED_ATTEMPTS = 3
"""How often a refusal without a reason is asked about again."""
PAUSED_SECONDS = 1.0
"""The wait after an answer that says the queue is paused."""
EARLY_DELAYS = Delays(first=0.05, most=1.0)
"""Delays after polls that the server does not hold, which must not become a hot loop."""


class QueueNotice(Protocol):
    """Receives the queue's state and its reason from every answer that names them."""

    def __call__(
        self, queue_state: str, queue_state_reason: str | None = None, /, *, request_id: str = ""
    ) -> object:
        """Take note."""


async def retrieve(
    transport: Transport,
    op: Operation,
    request_id: str,
    submitted: float,
    *,
    timeout: float | None = None,
    notice: QueueNotice | None = None,
    metadata_only: bool = True,
) -> Any:
    """Poll until an operation has ended; return its result, or raise RequestFailedError.

    A poll that runs out is repeated without limit, or for `timeout` seconds. Faults are repeated
    within the transport's patience. At the timeout the last fault is raised, else APITimeoutError.
    """
    poll = _Poll(transport, op, request_id, submitted, notice)
    if timeout is None:
        return await poll.run(metadata_only)
    try:
        async with asyncio.timeout(timeout) as limit:
            return await poll.run(metadata_only)
    except TimeoutError:
        if limit.expired():
            raise poll.late() from None
        raise  # of one exchange, which has its own limit


class _Poll:
    """One operation's polls, until there is an outcome."""

    def __init__(
        self,
        transport: Transport,
        op: Operation,
        request_id: str,
        submitted: float,
        notice: QueueNotice | None,
    ) -> None:
        self.transport, self.op, self.request_id = transport, op, request_id
        self.submitted, self.notice = submitted, notice
        self.started = self.sent = self.failing_since = time.monotonic()
        self.iteration = self.failures = self.early = self.malformed = 0
        self.metadata_only = True
        self.last_failure: Exception | None = None
        self.asked: tuple[bool, codec.Body] | None = None
        """True if the last poll allowed an announcement, and its body: most are repeated."""

    async def run(self, metadata_only: bool) -> Any:
        """Poll; a result whose size was announced is fetched under the budget for large results."""
        self.metadata_only = metadata_only
        answer = await persist(self._ask, self._delay_after)
        if not isinstance(answer, _Announced):
            return answer
        if not metadata_only:
            raise self._told(
                APIResponseValidationError(
                    f"{self.op.title} at {self.transport.place}: the size of the result of "
                    f"{self.request_id} was announced a second time instead of the result"
                )
            )
        async with self.transport.response_budget.taken(answer.size):
            return await self.run(False)

    def _delay_after(self, outcome: Any) -> float | None:
        """Return the wait before the next poll; None at the end."""
        if isinstance(outcome, BillingError):
            outcome.request_id = self.request_id
            self.failures = 0  # earlier failures are long ago when it goes on
            delay = self.transport.billing.delay_after(outcome)
            if delay is None:
                self._told(outcome)
            return delay
        if isinstance(outcome, APIConnectionError | APIStatusError):
            return self._delay_after_failure(outcome)
        if isinstance(outcome, Exception):
            if isinstance(outcome, TinkerError):
                self._told(outcome)
            return None
        self.failures = 0
        return self._delay_after_pending(outcome) if isinstance(outcome, _Pending) else None

    def _delay_after_failure(self, error: APIConnectionError | APIStatusError) -> float | None:
        self.failures += 1
        self.failing_since = self.failing_since if self.failures > 1 else self.sent
        self.last_failure = error
        error.request_id, error.attempts = self.request_id, self.failures
        self._told(error)
        self.malformed = self.malformed + 1 if _says_nothing(error) else 0
        hopeless = (
            self.malformed > MALFORMED_ATTEMPTS if self.malformed else not is_retryable(error)
        )
        config = self.transport.config
        allowed = Patience(config.patience).of(error.status or 0)
        if hopeless or time.monotonic() - self.failing_since > allowed:
            if isinstance(error, GoneError) and error.hint is None:
                error.hint = "the result was kept for a time and is gone: submit the request again"
            return None
        if self.failures == 2:
            logger.warning("waiting for %s: %s; still trying", self.request_id, error.message)
        if config.poll_backoff is not None and (error.status or 0) >= 500:
            asked = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER)
            return max(poll_delay(config.poll_backoff, self.iteration - 1), asked)
        return DELAYS.after(self.failures, error.retry_after)

    def _delay_after_pending(self, pending: _Pending) -> float:
        """Return 0 after a poll that the server held."""
        if pending.delay is not None:
            return pending.delay
        if time.monotonic() - self.sent >= HELD:
            self.early = 0
            return 0.0
        self.early += 1
        return EARLY_DELAYS.after(self.early)

    def late(self) -> Exception:
        """What is raised at the end of the time: the failure that stood in the way, if one did."""
        waited = time.monotonic() - self.started
        error = self.last_failure or APITimeoutError(
            f"{self.op.title} at {self.transport.place}: request {self.request_id} had no result "
            f"after {waited:.1f} s",
            request_id=self.request_id,
            hint="the server carries it out all the same",
        )
        self._tell(events.FUTURE_TIMEOUT, {})
        return error

    def _told(self, error: TinkerError) -> TinkerError:
        """Tell whoever listens of a failure."""
        name = next((name for kind, name in _EVENTS.items() if isinstance(error, kind)), None)
        if name is not None:
            category = None if error.category is None else error.category.value
            self._tell(
                name, {"status": error.status, "category": category, "error_type": error.type}
            )
        return error

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        if events.is_heard(name):
            named = {
                "request_id": self.request_id,
                "request_type": self.op.request_type,
                "iteration": self.iteration - 1,
                **facts,
                **self.transport.facts,
                **(self.transport.config.user_metadata or {}),
            }
            events.emit(name, {"elapsed_time": (time.monotonic() - self.started) * 1000}, named)

    async def _ask(self) -> Any:
        """Poll once; return a result, an announcement or `_Pending`."""
        op, self.sent = self.op, time.monotonic()
        if self.asked is None or self.asked[0] is not self.metadata_only:
            request = FutureRetrieveRequest(
                request_id=self.request_id, allow_metadata_only=self.metadata_only
            )
            self.asked = self.metadata_only, codec.encode(request)
        wants_protobuf = op.result is not None and codec.has_protobuf(op.result)
        headers = {
            "Accept": codec.PROTOBUF if wants_protobuf else codec.JSON,
            "X-Tinker-Request-Type": op.request_type,
            "X-Tinker-Request-Iteration": str(self.iteration),
            "X-Stainless-Raw-Response": "raw",
        }
        if self.iteration == 0:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{self.sent - self.submitted:.6f}"
        self.iteration += 1
        reply = await self.transport.poll(RETRIEVE_FUTURE, self.asked[1], headers, POLL_TIMEOUT)
        if reply.status == 408:
            delay = self._heed(_mapping(reply.body))
            if (chosen := self.transport.config.poll_backoff) is not None:
                delay = max(delay or 0.0, poll_delay(chosen, self.iteration - 1))
            return _Pending(delay)
        if reply.status >= 300:
            raise self.transport.errors.refusal(op, reply)
        return await self._read(reply)

    async def _read(self, reply: Reply) -> Any:
        """Read a good answer."""
        if codec.PROTOBUF not in reply.content_type:
            # Only the small answers are JSON when protobuf was asked for; a look at the keys is
            # cheap either way.
            envelope = _mapping(reply.body)
            status = str(envelope.get("status", "")).lower()
            if str(envelope.get("type", "")).lower() == "try_again":
                return _Pending(self._heed(envelope, PAUSED_SECONDS))
            if status == "pending":
                return _Pending(self._heed(envelope))
            if status == "complete_metadata":
                size = envelope.get("response_payload_size")
                return _Announced(size if isinstance(size, int) and size > 0 else 0)
            if status == "completed" and "result" in envelope:
                reply = msgspec.structs.replace(reply, body=msgspec.json.encode(envelope["result"]))
                envelope = _mapping(reply.body)
            if "error" in envelope or status == "failed":
                raise failure_of(self.transport, self.op, envelope, self.request_id)
        return await decode_result(self.transport, self.op, reply)

    def _heed(self, envelope: Mapping[str, Any], paused: float | None = None) -> float | None:
        """Pass the queue's state on; the seconds to wait before the next poll, where the server
        says.
        """
        state, reason = envelope.get("queue_state"), envelope.get("queue_state_reason")
        reason = self.transport.errors.without_keys(reason) if isinstance(reason, str) else None
        if self.notice is not None and isinstance(state, str):
            self.notice(state, reason, request_id=self.request_id)
        asked = envelope.get("retry_after_ms")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            return min(asked / 1000, LONGEST_RETRY_AFTER)
        return (
            paused
            if isinstance(state, str) and state.strip().lower().startswith("paused")
            else None
        )


_EVENTS: dict[type[TinkerError], str] = {
    RequestFailedError: events.FUTURE_REQUEST_FAILED,
    APIStatusError: events.FUTURE_API_ERROR,
    APIConnectionError: events.FUTURE_CONNECTION_ERROR,
    APIResponseValidationError: events.FUTURE_VALIDATION_ERROR,
}


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer without a result."""

    delay: float | None
    """Seconds to wait before the next poll, if the server or the settings say so."""


@dataclass(frozen=True, slots=True)
class _Announced:
    """An answer that announces the size of a result, to be asked for again."""

    size: int


def read_result(transport: Transport, op: Operation, reply: Reply, request_id: str) -> Any:
    """The result in a reply that is known to hold one, or RequestFailedError."""
    assert op.result is not None
    if codec.PROTOBUF not in reply.content_type and "error" in (envelope := _mapping(reply.body)):
        raise failure_of(transport, op, envelope, request_id)
    return transport.decode(op, op.result, reply)


async def decode_result(transport: Transport, op: Operation, reply: Reply) -> Any:
    """The result in an answer; large ones are read in a thread."""
    assert op.result is not None
    if len(reply.body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(transport.decode, op, op.result, reply)
    return transport.decode(op, op.result, reply)


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        value = codec.loads(body) if body else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _says_nothing(error: APIError) -> bool:
    """Whether a 400 carries no reason: something on the way may have garbled the request."""
    if isinstance(error, RejectedError):
        return True
    if not isinstance(error, APIStatusError) or error.status_code != 400:
        return False
    body = error.body
    return not body or (
        isinstance(body, dict)
        and not any(body.get(name) for name in ("message", "error", "detail"))
    )


def failure_of(
    transport: Transport, op: Operation, envelope: Mapping[str, Any], request_id: str
) -> RequestFailedError:
    """The error that an answer in band reports, in any of the forms servers use."""
    told = envelope.get("error")
    inner: Mapping[str, Any] = told if isinstance(told, dict) else {}
    text = transport.errors.without_keys(
        str((inner.get("message") or inner.get("error")) if inner else told or "")
    )
    category = RequestErrorCategory.parse(inner.get("category") or envelope.get("category"))
    return RequestFailedError(
        f"{op.title} failed ({category.value} error): {text or 'the server gives no reason'}",
        request_id=request_id,
        category=category,
    )


# ── several futures ───────────────────────────────────────────────────────────────────────────────


def await_many(
    futures: Iterable[concurrent.futures.Future[T]], timeout: float | None = None
) -> list[T | BaseException]:
    """The outcome of each future, in the order given: its result, or the error in its place. Never
    raises.

    Each is waited for in turn, for `timeout` seconds at most; whoever is late has `TimeoutError` in
    its place.

    Args:
        futures: What to wait for.
        timeout: Seconds for each; for ever by default.

    Returns:
        A result or an error for each.

    Example:
        >>> params = SamplingParams(max_tokens=8)
        >>> await_many([sampler.sample(prompt, 1, params) for _ in range(2)])
        [SampleResponse(...), SampleResponse(...)]
    """
    outcomes: list[T | BaseException] = []
    for future in futures:
        try:
            outcomes.append(future.result(timeout))
        except Exception as error:
            outcomes.append(error)
    return outcomes


async def await_many_async(
    futures: Iterable[Awaitable[T]], timeout: float | None = None
) -> list[T | BaseException]:
    """Like `await_many`, in an event loop: all are waited for together, for `timeout` seconds at
    most.

    Args:
        futures: What to wait for; anything that can be awaited.
        timeout: Seconds for all of them; for ever by default.

    Returns:
        A result or an error for each.

    Example:
        >>> import asyncio
        >>> async def main() -> list[SampleResponse | BaseException]:
        ...     return await await_many_async(
        ...         [sampler.sample(prompt, 1, SamplingParams(max_tokens=8))]
        ...     )
        >>> asyncio.run(main())
        [SampleResponse(...)]
    """

    async def outcome(future: Awaitable[T]) -> T:
        async with asyncio.timeout(timeout):
            return await future

    return await asyncio.gather(*(outcome(future) for future in futures), return_exceptions=True)


# ── several chunks, one result ────────────────────────────────────────────────────────────────────


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def _hash_sum(values: Sequence[float]) -> float:
    """The sum of hashes, as 64 bits hold it; what is no hash spoils it."""
    return (
        float(sum(int(v) for v in values) % 2**64)
        if all(math.isfinite(v) for v in values)
        else math.nan
    )


def _hash_unordered(values: Sequence[float]) -> float:
    """A number that is the same for the same values in any order, and a double holds exactly."""
    text = ",".join(repr(float(value)) for value in sorted(values))
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _weighted_mean,
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: (
        max(values) - _weighted_mean(values, weights) if sum(weights) else 0.0
    ),
    "hash2": lambda values, _: _hash_sum(values),
    "hash_unordered": lambda values, _: _hash_unordered(values),
}


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Join the results of one call's chunks: outputs in order, metrics by the reduction their names
    end in.

    A name that ends in no known reduction is averaged; a chunk that lacks a metric, or has no
    number for it, does not count for it.

    Args:
        outputs: The results, in the order of the chunks.

    Returns:
        One result.

    Raises:
        ValueError: There are none.
    """
    if not outputs:
        raise ValueError("there is nothing to combine: expected at least one output")
    if len(outputs) == 1:
        return outputs[0]
    kind = outputs[0].loss_fn_output_type
    if any(output.loss_fn_output_type != kind for output in outputs):
        logger.warning("the chunks of one call have mixed loss_fn_output_type; %r is taken", kind)
    metrics: dict[str, float] = {}
    for key in dict.fromkeys(name for output in outputs for name in output.metrics):
        having = [output for output in outputs if isinstance(output.metrics.get(key), int | float)]
        values, weights = [o.metrics[key] for o in having], [len(o.loss_fn_outputs) for o in having]
        reduction = key.rpartition(":")[2]
        if reduction == "unique":
            metrics |= {key if i == 0 else f"{key}_{i}": value for i, value in enumerate(values)}
        elif values:
            metrics[key] = REDUCTIONS.get(reduction, _weighted_mean)(values, weights)
    joined = [item for output in outputs for item in output.loss_fn_outputs]
    return ForwardBackwardOutput(kind, joined, metrics)
