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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkex.engine.api import Engine, EngineError, EngineLost, PassDone
from tinkex.engine.stepping import SAMPLING, TRAINING, Advancing, Ended, Failed, Stepper
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


# ── the order of work ─────────────────────────────────────────────────────────────────────────────


class Postponed(EngineError):
    """Work that is not done now; its promise stands, for it is done again from the journal."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "server")


class EngineDied(EngineError):
    """The end of an engine's thread, with all that it had not finished."""


@dataclass(slots=True)
class Task:
    """Something that a worker is asked to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]
    run: str | None = None
    """The run whose order it keeps, if it is one's."""


@dataclass(slots=True)
class PassTask(Task):
    """Starts a pass; it waits for what its run was asked for before, other passes excepted."""

    job: str = ""


@dataclass(slots=True)
class SaveTask(Task):
    """Begins a save; it does not wait for the saves of its run before it."""


class RunOrder:
    """The work of runs on a worker; used on its thread only.

    A pass begins as soon as nothing of its run is before it. Other work of the run waits until its
    passes have ended, and for its saves unless it is a save.
    """

    def __init__(
        self,
        execute: Callable[[Task], object],
        post: Callable[..., None],
    ) -> None:
        """Take what does the work.

        Args:
            execute: Carries a task out and tells its end.
            post: Calls a function on the event loop.
        """
        self._execute, self._post = execute, post
        self._waiting: dict[str, deque[Task]] = {}
        self.passes: dict[str, PassTask] = {}
        """By job, the passes that the engine has."""
        self.open: Counter[str] = Counter()
        """The number of passes that each run has on the engine."""
        self.saves: Counter[str] = Counter()
        """The number of saves of each run that are being written, one after the other."""

    def put(self, run: str, task: Task) -> None:
        """Take work of a run, and begin it if nothing is before it."""
        self._waiting.setdefault(run, deque()).append(task)
        self.release(run)

    def release(self, run: str) -> None:
        """Begin the work of a run that nothing is before any more."""
        waiting = self._waiting.get(run, deque())
        while waiting:
            task = waiting[0]
            is_free = not self.open[run] and (isinstance(task, SaveTask) or not self.saves[run])
            if not isinstance(task, PassTask) and not is_free:
                break
            self._execute(waiting.popleft())
        if not waiting:
            self._waiting.pop(run, None)

    def begun(self, task: PassTask) -> None:
        """Note that the engine has a pass."""
        assert task.run is not None
        self.passes[task.job] = task
        self.open[task.run] += 1

    def end_pass(self, job: str, outcome: Any) -> None:
        """Tell how a pass ended, if it is not forgotten."""
        if (task := self.passes.pop(job, None)) is not None:
            self.close(self.open, task, outcome)

    def close(self, counter: Counter[str], task: Task, outcome: Any) -> None:
        """Tell how an operation of a run ended, and let what waits for it begin."""
        assert task.run is not None
        if isinstance(outcome, EngineLost):
            outcome = Postponed(str(outcome))
        counter[task.run] -= 1
        if not counter[task.run]:
            del counter[task.run]
        self._post(settle, task.future, outcome)
        self.release(task.run)

    def postpone(self, run: str) -> None:
        """Forget the passes and the waiting work of a run; their promises stand."""
        jobs = [job for job, task in self.passes.items() if task.run == run]
        del self.open[run]
        for task in [*map(self.passes.pop, jobs), *self._waiting.pop(run, ())]:
            self._post(settle, task.future, Postponed("the run is being rebuilt"))

    def postpone_all(self) -> None:
        """Forget the passes and the waiting work of all runs; their promises stand."""
        for run in {*self._waiting, *self.open}:
            self.postpone(run)

    def fail_all(self, why: EngineError) -> None:
        """Fail the passes and the waiting work of all runs."""
        waiting = [task for tasks in self._waiting.values() for task in tasks]
        for task in [*self.passes.values(), *waiting]:
            self._post(settle, task.future, why)
        self._waiting.clear()


# ── the thread ────────────────────────────────────────────────────────────────────────────────────


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
        """Postpone the work of all runs, and fail everything else, until the engine is back."""
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
