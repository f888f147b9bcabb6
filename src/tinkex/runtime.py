"""The one background thread of a process: an asyncio loop on which all network work runs.

It starts when first needed, is a daemon, and is forgotten in a forked child, which then starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_SECONDS = 30.0
"""How long the end of a program waits for what still runs: an interpreter that ends under a busy engine crashes."""


class Runtime:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="tinkex", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """End what runs on the loop, give it a moment to clean up, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._wind_up(), self.loop)
        self._thread.join(EXIT_SECONDS)

    async def _wind_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=EXIT_SECONDS)
        self.loop.stop()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop soon."""
        self.loop.call_soon_threadsafe(function, *args)

    def task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task from the loop's own thread; it is kept alive until it ends."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def feed(self, coroutine: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """Run a coroutine on the loop; its outcome goes to `future`, whose cancellation goes to it."""

        def start() -> None:
            if future.cancelled():
                coroutine.close()
                return
            task = self.task(coroutine)
            task.add_done_callback(lambda done: deliver(done, future))
            future.add_done_callback(lambda f: self.call(task.cancel) if f.cancelled() else None)

        self.call(start)


def deliver(task: asyncio.Future[T], future: concurrent.futures.Future[T]) -> None:
    """Copy the outcome of a finished task into a future that nobody else resolves."""
    if future.done():
        if not task.cancelled():
            task.exception()  # mark as seen: whoever cancelled the future does not want it
        return
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


_lock = threading.Lock()
_current: Runtime | None = None


def runtime() -> Runtime:
    """This process's runtime."""
    global _current
    with _lock:
        if _current is None:
            _current = Runtime()
            atexit.register(_current.stop)
        return _current


def _forget() -> None:
    global _current, _lock
    if _current is not None:
        atexit.unregister(_current.stop)
    _current, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
