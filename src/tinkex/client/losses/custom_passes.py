"""Custom losses: the passes they need, and the thread that they run on.

A custom pass is a forward pass over the data, the caller's loss on this machine, and a backward
pass over the same chunks. A loss that fails leaves a training run without a gradient that later
calls need, so they are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from tinkex.client.losses import caller_losses
from tinkex.errors import APITimeoutError
from tinkex.types.inputs import Datum
from tinkex.types.training import ForwardBackwardOutput

T = TypeVar("T")
Outcome: TypeAlias = Awaitable[ForwardBackwardOutput]
Submit: TypeAlias = Callable[[list[list[Datum]], bool], Awaitable[Callable[[], Outcome]]]
"""Sends chunks, forward only or not; returns a function that waits for the result."""

THREAD_NAME = "tinkex-custom-loss"


def check_torch() -> None:
    """Raise if PyTorch is not installed; this does not import it."""
    if sys.modules.get("torch") is None and importlib.util.find_spec("torch") is None:
        raise ImportError(
            "a custom loss is computed with PyTorch, which is not installed: pip install torch"
        )


# ── the thread ────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    settle: Callable[[Any, BaseException | None], None]


class LossThread:
    """The daemon thread that runs losses, one after the other.

    A running loss cannot be stopped. When it is given up, later losses get another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None

    def put(self, job: _Job) -> None:
        """Queue a job."""
        with self._changed:
            self._waiting.append(job)
            if self._thread is None:
                self._begin()
            self._changed.notify()

    def give_up(self, job: _Job) -> None:
        """Drop a job; if it runs, leave it its thread and use another one."""
        with self._changed:
            if job is self._running:
                self._running = self._thread = None
                if self._waiting:
                    self._begin()
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(job)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except BaseException as raised:
                error = raised
            job.settle(result, error)
            del job, result, error  # nothing is kept alive while the thread waits

    def _next(self) -> _Job | None:
        me = threading.current_thread()
        with self._changed:
            if self._thread is me:
                self._running = None
            while self._thread is me and not self._waiting:
                self._changed.wait()
            if self._thread is not me:
                return None
            self._running = self._waiting.popleft()
            return self._running


_thread = LossThread()


def _forget() -> None:
    global _thread
    _thread = LossThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


async def on_loss_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a user's loss on the thread of losses, in the caller's context."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, future, result, error)

    thread, job = _thread, _Job(lambda: context.run(function, *args), settle)
    thread.put(job)
    try:
        return await future
    except asyncio.CancelledError:
        thread.give_up(job)
        raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # on the event loop these would end the loop, or mean something else
        failure = RuntimeError(f"the custom loss raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)


# ── the passes ────────────────────────────────────────────────────────────────────────────────────


class CustomPass:
    """One call of a custom loss: forward passes, the loss, and backward passes.

    The backward passes use the chunks of the forward passes. The call keeps its turn until they are
    submitted, so their numbers follow those of the forward passes, and later calls come after both.
    """

    def __init__(self, data: list[Datum], loss: caller_losses.CustomLoss) -> None:
        check_torch()
        self._data, self._loss = data, loss
        self.prepared = caller_losses.forward_data(data)
        """The data of the forward passes."""

    async def run(
        self,
        chunks: list[list[Datum]],
        submit: Submit,
        spoil: Callable[[BaseException], None],
    ) -> Callable[[], Outcome]:
        """Make the passes up to the second submission.

        Args:
            chunks: The prepared data.
            submit: Sends chunks.
            spoil: Refuses all later calls of the client.

        Returns:
            A function that waits for the result.
        """
        fetch_first = await submit(chunks, True)
        try:
            first = await fetch_first()
        except APITimeoutError as error:  # given up here: the server would have gone on
            spoil(error)
            raise
        try:
            weighted, loss, metrics = await on_loss_thread(
                caller_losses.evaluate, self._loss, self._data, first
            )
        except Exception as error:
            spoil(error)
            raise
        fetch_second = await submit(_cut_like(chunks, weighted), False)

        async def fetch() -> ForwardBackwardOutput:
            return caller_losses.report(await fetch_second(), loss, metrics)

        return fetch


def _cut_like(chunks: Sequence[Sequence[Datum]], data: Sequence[Datum]) -> list[list[Datum]]:
    """Cut data at the same places as other chunks, however large they are now."""
    rest = iter(data)
    return [list(itertools.islice(rest, len(chunk))) for chunk in chunks]
