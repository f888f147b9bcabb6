"""A worker: the one thread that owns an engine.

It hands passes to the engine as soon as nothing of their run is before them, so that those of
several runs can share its steps. Other work of a run waits until its passes have ended. Steps of
training and of sampling take turns by the time they take, so that neither stops the other. Files
are written on a thread of their own: the engine does not wait for them, the next step or load of
their run does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkex.engine.api import Engine, EngineError, EngineLost, PassDone
from tinkex.engine.stepping import SAMPLING, TRAINING, Advancing, Ended, Failed, Stepper
from tinkex.server.workers.run_order import (
    EngineDied,
    PassTask,
    Postponed,
    RunOrder,
    SaveTask,
    Task,
)
from tinkex.server.workers.sample_jobs import SampleJobs, settle
from tinkex.types.training import ForwardBackwardOutput

T = TypeVar("T")
logger = logging.getLogger("tinkex.server")

EXIT_SECONDS = 60.0
"""The longest time that the end of a program waits for the engine."""
STOPPED = "the server was stopped"
TAKING_SECONDS = 0.05
"""So long may steps wait while operations are taken in: what has come together is begun together.
"""


def _end(worker: weakref.ref[Worker], thread: threading.Thread, pid: int) -> None:
    """Let the engine finish what it is at, when the program ends."""
    if (living := worker()) is not None and thread.is_alive() and os.getpid() == pid:
        living.interrupt()
        thread.join(EXIT_SECONDS)


@dataclass(frozen=True, slots=True)
class OffThread:
    """The rest of an operation: work on another thread, while the engine goes on, and then
    something on the worker.

    Passes and saves of the same run do not wait for it: it must not depend on what they change.
    """

    work: Callable[[], Any]
    then: Callable[[Any], Any]
    """Takes what the work returned and gives the operation's result, before anything that waits for
    it begins."""


class Worker:
    """The thread that owns the engine: runs operations in the order given, and advances passes and
    samples between.
    """

    def __init__(self, engine: Engine, name: str = "") -> None:
        self.engine, self.name = engine, name
        self.role: str = getattr(engine, "role", "both")
        """The work it is for: a sampler has no runs, a trainer samples only when it must."""
        self.runs: set[str] = set()
        """The runs that are at home here; changed on the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._order = RunOrder(self._execute, self.post)
        self._files = ThreadPoolExecutor(1, "tinkex-files")
        self.stepper: Advancing = getattr(engine, "stepper", None) or Stepper(engine)
        """The stepper; an engine in another process advances by itself."""
        self.on_lost: Callable[[EngineLost], object] = lambda error: None
        """Called on the event loop when the engine's process is gone."""
        self.samples = SampleJobs(engine, self.run, self.post)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.ended = asyncio.Event()
        """Set when the thread has ended, and every call has its outcome."""
        self.failure: EngineError | None = None
        """The error of all calls once the thread has died, or while the engine is lost."""

    def start(self) -> None:
        """Begin; must be called on the event loop that results go to."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)
        self._thread.start()
        # A program must not end while the engine computes: the interpreter would be torn down under
        # it.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(functools.partial(_end, weakref.ref(self), self._thread, os.getpid()))

    async def stop(self) -> None:
        """Finish what has begun and end the thread; the rest fails."""
        if self._thread is not None:
            self._thread = None
            self.interrupt()
            await self.ended.wait()

    def interrupt(self) -> None:
        """Ask the thread to end after what it is at."""
        self._stopping = True
        self._tasks.put(None)

    def wake(self) -> None:
        """Have the thread look for news of the engine; called on any thread."""
        self._tasks.put(None)

    @property
    def is_lost(self) -> bool:
        """Return True while the engine's process is gone."""
        return isinstance(self.failure, EngineLost)

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a function for the worker; the future is resolved on the event loop."""
        return self._put(Task(function, args, self._future()))

    def run_for(self, run: str, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a function that comes after everything that was queued for the same run; see
        `OffThread` for its end.
        """
        return self._put(Task(function, args, self._future(), run))

    def run_save(self, run: str, function: Callable[[], OffThread]) -> asyncio.Future[Any]:
        """Queue a function that comes after what its run was asked for, other saves excepted: they
        end in order.
        """
        return self._put(SaveTask(function, (), self._future(), run))

    def run_pass(
        self, run: str, job: str, start: Callable[[], object]
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Queue a pass, which `start` starts on the engine under this job's name; the future has
        its output.
        """
        return self._put(PassTask(start, (), self._future(), run, job))

    def _future(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "the worker has not been started"
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(_seen)
        return future

    def _put(self, task: Task) -> asyncio.Future[Any]:
        self._tasks.put(task)
        # else the thread takes it, or empties the queue after it has said so
        if self.failure is not None and not self.is_lost:
            settle(task.future, self.failure)
        return task.future

    def drop_run(self, run: str) -> asyncio.Future[None]:
        """Drop a run's adapter; what it is at fails."""
        self.runs.discard(run)
        return self.run(self.engine.drop, run)

    def release_run(self, run: str) -> asyncio.Future[None]:
        """Drop a run's adapter once its files are written; its other work is postponed."""
        self.run(self._order.postpone, run)

        def drop() -> None:
            self.engine.drop(run)
            # the engine reports its failed passes before others take their names
            self._end(self.stepper.step(TRAINING))

        return self.run_for(run, drop)

    def _run(self) -> None:
        why = EngineError(STOPPED, "server")
        try:
            while self._take():
                if not self._stopping:
                    self._advance()
        except BaseException as error:  # it would go unseen, and all callers would wait for ever
            logger.critical(
                "the engine's thread has died; the server must be restarted", exc_info=True
            )
            why = self.failure = _death(error)
        self._stopping = True
        try:
            self._order.fail_all(why)
            self._empty_queue(why)
            self.samples.fail(why)
            # what is being written is finished; what has not begun sees that it is too late
            self._files.shutdown()
            self._empty_queue(why)
        finally:
            self.post(self.ended.set)

    def _take(self) -> bool:
        """Take what has been queued, and wait for something if there is nothing to do; false at the
        end.
        """
        until = time.perf_counter() + TAKING_SECONDS
        try:
            while True:
                is_idle = self._stopping or self.is_lost or not self.stepper.has_work()
                task = self._tasks.get(block=is_idle)
                if task is None:
                    if self._stopping:
                        return False
                elif task.run is None:
                    self._execute(task)
                else:
                    self._order.put(task.run, task)
                if self.samples.cancelled:
                    self.samples.drop_cancelled()
                if time.perf_counter() > until:
                    return True
        except queue.Empty:
            return True

    def _advance(self) -> None:
        """Let the engine go on, and tell what has ended."""
        if self.is_lost:
            return
        try:
            self._end(self.stepper.advance())
        except EngineLost as error:
            self._lose(error)

    def _end(self, ended: Sequence[Ended]) -> None:
        """Tell how passes and samples ended."""
        samples = []
        for one in ended:
            if isinstance(one, PassDone):
                self._order.end_pass(one.job, one.result)
            elif not isinstance(one, Failed):
                samples.append(one)
            elif one.kind == SAMPLING:
                self.samples.fail(one.error)
            else:
                for job in list(self._order.passes):
                    self._order.end_pass(job, one.error)
        if samples:
            self.samples.end(samples)

    def _attempt(self, task: Task, work: Callable[[], object]) -> bool:
        """Do a task's work; tell its failure and return False if it fails."""
        error: BaseException
        try:
            if task.function != self._come_back:
                if self._stopping:
                    raise EngineError(STOPPED, "server")
                if isinstance(self.failure, EngineLost):
                    raise self.failure
            work()
            return True
        except EngineLost as lost:
            self._lose(lost)
            # the work of a run is done when the run is made again
            error = lost if task.run is None else Postponed(str(lost))
        except Exception as failed:
            error = failed
        except BaseException as fatal:
            self.post(settle, task.future, _death(fatal))
            raise
        self.post(settle, task.future, error)
        return False

    def _lose(self, error: EngineLost) -> None:
        """Postpone the work of all runs, and fail everything else, until `restore`."""
        if self.is_lost:
            return
        self.failure = error
        # before anything else is told: what is woken then sees that its runs are made again
        self.post(self.on_lost, error)
        self._order.postpone_all()
        self.samples.fail(error)

    def _work_beside(self, task: Task, beside: OffThread) -> None:
        """Go on with an operation, on the thread for that; it comes back to the engine's."""
        outcome: Any = EngineError(STOPPED, "server")
        try:
            if not self._stopping:
                outcome = beside.work()
        except Exception as error:
            outcome = error
        finally:
            self._tasks.put(Task(self._come_back, (task, beside, outcome), task.future))

    def _come_back(self, task: Task, beside: OffThread, outcome: Any) -> None:
        try:
            if not isinstance(outcome, Exception):
                outcome = beside.then(outcome)
        except Exception as error:
            outcome = error
        self._order.close(self._order.saves, task, outcome)

    def _empty_queue(self, why: EngineError) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                queued = self._tasks.get_nowait()
                if queued is not None and queued.function == self._come_back:
                    self._execute(queued)
                elif queued is not None:
                    self.post(settle, queued.future, why)

    def _execute(self, task: Task) -> None:
        """Carry a task out, and tell its end; see `OffThread`."""

        def work() -> None:
            outcome = task.function(*task.args)
            if isinstance(outcome, OffThread):
                assert task.run is not None, "nothing would wait for it"
                self._files.submit(self._work_beside, task, outcome)
                self._order.saves[task.run] += 1
            elif isinstance(task, PassTask):
                self._order.begun(task)
            else:
                self.post(settle, task.future, outcome)

        self._attempt(task, work)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the event loop, unless that has been closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(function, *args)


def _death(error: BaseException) -> EngineDied:
    kind = type(error).__name__
    return EngineDied(
        f"the server's engine has died ({kind}): see the server's log, and restart it", "server"
    )


def _seen(future: asyncio.Future[Any]) -> None:
    """Not everyone waits for what they ask the worker to drop; asyncio would complain of its
    failure at the end.
    """
    if not future.cancelled():
        future.exception()
