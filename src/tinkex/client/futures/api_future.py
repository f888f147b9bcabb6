"""Futures: results of calls, to be awaited in any loop or waited for in any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from tinkex.client.futures.loop_thread import Inbox, RuntimeFuture, give_up, inbox_of, runtime

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger("tinkex")


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
        """Like `result`, to be awaited.

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


class Future(APIFuture[T], RuntimeFuture[T]):
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
        """Make a future to resolve by hand, or one that follows another and cancels it."""
        super().__init__()
        if future is not None:
            self._runtime = getattr(future, "_runtime", None)
            # The plain methods, since those of a SampleFuture warn.
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
        return outcome_of(self, timeout)

    if not TYPE_CHECKING:  # a checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that says what was forgotten."""
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
        """Cancel the work; False if it has already ended.

        Returns:
            True if it was cancelled.

        Example:
            >>> client.forward(data, "cross_entropy").cancel()
            True
        """
        return give_up(self)

    def _check_thread(self) -> None:
        self._check_wait(blocks=True)
        if not _Plain.done(self) and in_users_loop():
            message = "result() blocks the running event loop; await the future instead"
            warnings.warn(message, RuntimeWarning, stacklevel=users_level())

    def _check_wait(self, *, blocks: bool) -> None:
        """Refuse to wait for a loop in a forked child, or to block it on its own thread."""
        # without the lock, which another thread may have held when the process was forked
        if self._runtime is None or self._state not in ("PENDING", "RUNNING"):
            return
        if os.getpid() != self._runtime.pid:
            raise RuntimeError(
                "this call was pending when the process was forked, and only the parent process "
                "gets its result: wait for it before the fork, or make the call again with a "
                "client made after it"
            )
        if blocks and threading.current_thread() is self._runtime.thread:
            raise RuntimeError(
                "result() would block tinkex's own event loop for ever: await the future instead"
            )

    async def _wait(self) -> T:
        self._check_wait(blocks=False)
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        _Plain.add_done_callback(self, functools.partial(_wake, loop, inbox_of(loop), woken))
        await woken
        return _Plain.result(self, 0)

    async def result_async(self, timeout: float | None = None) -> T:
        """Like `result`, to be awaited.

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
        """Like `APIFuture.result`."""
        return self._own.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Like `APIFuture.result_async`."""
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
            """Raise an error that says what was forgotten, or where the name is."""
            raise _missing(self, name)


_Plain = concurrent.futures.Future


def _missing(future: APIFuture[Any], name: str) -> AttributeError:
    """Return the error for a name that a future does not have."""
    message = f"{type(future).__name__!r} object has no attribute {name!r}"
    if hasattr(_Plain, name) and not name.startswith("_"):
        message += ": `.future()` has it"
    elif not name.startswith("_"):
        message += ": `.result()`, or `await`, gives the outcome of the call"
    return AttributeError(message, name=name, obj=future)


def outcome_of(future: Future[T] | AwaitableConcurrentFuture[T], timeout: float | None = None) -> T:
    """Block as `result` does, without a warning when an event loop runs here."""
    own = future if isinstance(future, Future) else future._own
    check_own_loop(own)
    try:
        return _Plain.result(own, timeout)
    except TimeoutError:
        if _Plain.done(own):
            raise
        raise TimeoutError(
            f"not done after {timeout} s; the work goes on, result() can be called again"
        ) from None


def check_own_loop(future: Future[Any]) -> None:
    """Refuse to block the loop that brings the outcome, or a process without such a loop."""
    future._check_wait(blocks=True)


def in_users_loop() -> bool:
    """Return True if blocking here would block a running loop, other than a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return "ipykernel" not in sys.modules


def _wake(
    loop: asyncio.AbstractEventLoop, inbox: Inbox, woken: asyncio.Future[None], _: object
) -> None:
    """Wake a loop that awaits a future; the loop may be closed by now."""
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
    """Return the stack level of the user's own line, counted from the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinkex."):
        level, frame = level + 1, frame.f_back
    return level


def unlisted(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Disguise a coroutine function as a plain function that returns its coroutine.

    For methods that the official clients lack. The cookbook's tracer lists a client's coroutine
    functions, and fails on an unknown one.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return method(*args, **kwargs)

    return called


def start(coroutine: Coroutine[Any, Any, T], kind: type[Future[T]] | None = None) -> Future[T]:
    """Run a coroutine on the runtime; the future is its outcome."""
    return runtime().feed(coroutine, Future() if kind is None else kind())
