"""The background thread of a process: an asyncio loop that runs all network work.

It starts when first needed and is a daemon. A forked child starts another one.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread  # registers its own end first, so that ours comes before it
import contextvars
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 3.0
"""Longest wait at the end of a program for sessions that were not closed."""
EXIT_SECONDS = 30.0
"""Longest wait at the end of a program for running work; a busy engine would crash."""


class Inbox:
    """Passes functions to an event loop from any thread; several in a row wake it once.

    To wake a loop takes a system call on both sides, too much for each of many samples.
    """

    __slots__ = ("__weakref__", "_waiting", "_woken")

    def __init__(self) -> None:
        self._waiting: deque[tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]] = (
            deque()
        )
        self._woken = False

    def put(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any
    ) -> None:
        """Run a function on the loop soon, in the caller's context and in order."""
        self._waiting.append((contextvars.copy_context(), function, args))
        if self._woken:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._drain, loop)
        except RuntimeError:  # it is closed
            self._woken = False
            raise

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        self._woken = False  # first, so that later calls wake the loop again
        for _ in range(len(self._waiting)):
            context, function, args = self._waiting.popleft()
            try:
                context.run(function, *args)
            except Exception as error:
                loop.call_exception_handler({"message": f"{function!r} failed", "exception": error})


_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = weakref.WeakKeyDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> Inbox:
    """Return the inbox of a loop; on that loop's thread only."""
    found = _inboxes.get(loop)
    if found is None:
        found = _inboxes[loop] = Inbox()
    return found


class RuntimeFuture(concurrent.futures.Future[T]):
    """A future whose outcome may come from a runtime."""

    _runtime: Runtime | None = None


F = TypeVar("F", bound=RuntimeFuture[Any])


class Runtime:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopped = False
        self.pid = os.getpid()
        self._inbox = Inbox()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._closers: list[weakref.WeakMethod[Callable[[], Coroutine[Any, Any, None]]]] = []
        self.thread = threading.Thread(target=self._run, name="tinkex", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """Cancel the work on the loop, wait for its cleanup, and end the thread."""
        if os.getpid() != self.pid:
            return  # a forked child has no such thread
        asyncio.run_coroutine_threadsafe(self._wind_up(), self.loop)
        self.thread.join(EXIT_SECONDS)

    def at_stop(self, closer: weakref.WeakMethod[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Close something before the loop stops, if it still exists then."""
        self._closers.append(closer)
        self._closers = [kept for kept in self._closers if kept() is not None]

    def release(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that releases something; the loop's stop waits for it, within a limit."""
        if self.stopped:
            coroutine.close()
            return
        self.call(self._release, coroutine)

    def _release(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.task(coroutine)
        self._releases.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        if not task.cancelled():
            task.exception()  # mark as seen: its owner is gone

    async def _wind_up(self) -> None:
        closers = [
            asyncio.ensure_future(method())
            for closer in self._closers
            if (method := closer()) is not None
        ]
        closers += self._releases
        if closers:
            await asyncio.wait(closers, timeout=CLOSE_SECONDS)
        self.stopped = True
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=EXIT_SECONDS)
        self.loop.stop()

    @property
    def is_current(self) -> bool:
        """Return True on this loop's thread."""
        return threading.current_thread() is self.thread

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop soon."""
        self._inbox.put(self.loop, function, *args)

    def task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task from the loop's own thread; it is kept alive until it ends."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def feed(self, coroutine: Coroutine[Any, Any, Any], future: F) -> F:
        """Run a coroutine on the loop, and return the future that gets its outcome.

        Cancelling the future cancels the coroutine.
        """
        future._runtime = self
        if self.stopped:
            coroutine.close()
            future.set_exception(RuntimeError("the program is ending: tinkex can do no more"))
        else:
            self.call(self._start, coroutine, future)
        return future

    def _start(
        self, coroutine: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]
    ) -> None:
        if _Plain.cancelled(future):
            coroutine.close()
            return
        task = self.task(coroutine)
        task.add_done_callback(functools.partial(deliver, future=future))
        _Plain.add_done_callback(future, functools.partial(self._pass_cancel, task))

    def _pass_cancel(self, task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
        if _Plain.cancelled(future):
            self.call(task.cancel)


_Plain = concurrent.futures.Future
"""Its own methods are called here, since those of a subclass may warn."""


def give_up(future: concurrent.futures.Future[Any]) -> bool:
    """Cancel a future and wake its waiters; return False if it has already ended."""
    if _Plain.cancelled(future):
        return True
    if not _Plain.cancel(future):
        return False
    future.set_running_or_notify_cancel()
    return True


def deliver(task: asyncio.Future[T], future: concurrent.futures.Future[T]) -> None:
    """Copy the outcome of a finished task into a future."""
    if _Plain.done(future):
        if not task.cancelled():
            task.exception()  # mark as seen: the future was cancelled
        return
    if task.cancelled():
        give_up(future)
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


async def in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a user's code in its own thread, since it may wait for the shared pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            post(future.set_exception, error)
        else:
            post(future.set_result, result)

    def post(settle: Callable[[Any], None], outcome: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    threading.Thread(target=run, name="tinkex-user-code", daemon=True).start()
    return await future


def before_exit(function: Callable[[], None]) -> None:
    """Call a function at the end of the program, while threads still work; the last one first.

    `atexit` is too late: the pool of `asyncio.to_thread` has been shut down by then.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)


_lock = threading.Lock()
_current: Runtime | None = None


def runtime() -> Runtime:
    """Return this process's runtime."""
    global _current
    with _lock:
        if _current is None:
            _current = Runtime()
            before_exit(_current.stop)
        return _current


def _forget() -> None:
    global _current, _lock
    _current, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
