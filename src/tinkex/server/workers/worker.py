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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkex.engine.api import Engine, EngineError, PassDone
from tinkex.engine.fair_share import Shares
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
TRAINING, SAMPLING = "training", "sampling"


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


class EngineDied(EngineError):
    """The end of an engine's thread, with all that it had not finished."""


class Postponed(EngineError):
    """Work that is not done now; its promise stands, for it is done again from the journal."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "server")


@dataclass(slots=True)
class _Task:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]
    run: str | None = None
    """The run whose order it keeps, if it is one's."""


@dataclass(slots=True)
class _Pass(_Task):
    """Starts a pass; it waits for what its run was asked for before, other passes excepted."""

    job: str = ""


@dataclass(slots=True)
class _Save(_Task):
    """Begins a save; it does not wait for the saves of its run before it."""


class Worker:
    """The thread that owns the engine: runs operations in the order given, and advances passes and
    samples between.
    """

    def __init__(self, engine: Engine, name: str = "") -> None:
        self.engine, self.name = engine, name
        self.runs: set[str] = set()
        """The runs that are at home here; changed on the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._waiting: dict[str, deque[_Task]] = {}
        """By run, what waits for the passes before it."""
        self._passes: dict[str, _Pass] = {}
        """By job, what the engine has begun."""
        self._open: Counter[str] = Counter()
        """The number of passes that each run has on the engine."""
        self._saves: Counter[str] = Counter()
        """The number of saves of each run that are being written, one after the other."""
        self._files = ThreadPoolExecutor(1, "tinkex-files")
        self._shares = Shares()
        self.steps: Counter[str] = Counter()
        """By kind, how many steps the engine has made."""
        self.samples = SampleJobs(engine, self.run, self.post)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.ended = asyncio.Event()
        """Set when the thread has ended, and every call has its outcome."""
        self.failure: EngineError | None = None
        """The error of all calls once the thread has died."""

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

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a function for the worker; the future is resolved on the event loop."""
        return self._put(_Task(function, args, self._future()))

    def run_for(self, run: str, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a function that comes after everything that was queued for the same run; see
        `OffThread` for its end.
        """
        return self._put(_Task(function, args, self._future(), run))

    def run_save(self, run: str, function: Callable[[], OffThread]) -> asyncio.Future[Any]:
        """Queue a function that comes after what its run was asked for, other saves excepted: they
        end in order.
        """
        return self._put(_Save(function, (), self._future(), run))

    def run_pass(
        self, run: str, job: str, start: Callable[[], object]
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Queue a pass, which `start` starts on the engine under this job's name; the future has
        its output.
        """
        return self._put(_Pass(start, (), self._future(), run, job))

    def _future(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "the worker has not been started"
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(_seen)
        return future

    def _put(self, task: _Task) -> asyncio.Future[Any]:
        self._tasks.put(task)
        # else the thread takes it, or empties the queue after it has said so
        if self.failure is not None:
            settle(task.future, self.failure)
        return task.future

    def drop_run(self, run: str) -> asyncio.Future[None]:
        """Drop a run's adapter; what it is at fails."""
        self.runs.discard(run)
        return self.run(self.engine.drop, run)

    def release_run(self, run: str) -> asyncio.Future[None]:
        """Drop a run's adapter once its files are written; its other work is postponed."""
        self.run(self._postpone, run)

        def drop() -> None:
            self.engine.drop(run)
            # the engine reports its failed passes before others take their names
            self._pass_step()

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
            self._stop_all(why)
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
                is_idle = self._stopping or not (self._passes or self.engine.sampling())
                task = self._tasks.get(block=is_idle)
                if task is None:
                    return False
                if task.run is None:
                    self._execute(task)
                else:
                    self._waiting.setdefault(task.run, deque()).append(task)
                    self._release(task.run)
                if self.samples.cancelled:
                    self.samples.drop_cancelled()
                if time.perf_counter() > until:
                    return True
        except queue.Empty:
            return True

    def _postpone(self, run: str) -> None:
        """Forget the passes and the waiting work of a run; their promises stand."""
        jobs = [job for job, task in self._passes.items() if task.run == run]
        del self._open[run]
        for task in [*map(self._passes.pop, jobs), *self._waiting.pop(run, ())]:
            self.post(settle, task.future, Postponed("the run is being rebuilt"))

    def _advance(self) -> None:
        """Make a step of training or of sampling, whichever has had less time."""
        kinds = [TRAINING] * bool(self._passes) + [SAMPLING] * self.engine.sampling()
        if not kinds:
            return
        self._shares.note(kinds)
        kind = self._shares.first(kinds)
        began = time.perf_counter()
        if kind == TRAINING:
            self._pass_step()
        else:
            self.samples.step()
        self._shares.charge(kind, time.perf_counter() - began)
        self.steps[kind] += 1

    def _release(self, run: str) -> None:
        """Begin what nothing of its run is before any more."""
        waiting = self._waiting.get(run, deque())
        while waiting:
            task = waiting[0]
            is_free = not self._open[run] and (isinstance(task, _Save) or not self._saves[run])
            if not isinstance(task, _Pass) and not is_free:
                break
            self._execute(waiting.popleft())
        if not waiting:
            self._waiting.pop(run, None)

    def _pass_step(self) -> None:
        try:
            ended = self.engine.pass_step()
        except Exception as error:
            logger.exception("a step of training failed; the running passes are lost")
            ended = [PassDone(job, error) for job in self._passes]
        for done in ended:
            if (task := self._passes.pop(done.job, None)) is None:
                continue
            self._close(self._open, task, done.result)

    def _close(self, counter: Counter[str], task: _Task, outcome: Any) -> None:
        """Tell how an operation of a run ended, and let what waits for it begin."""
        assert task.run is not None
        counter[task.run] -= 1
        if not counter[task.run]:
            del counter[task.run]
        self.post(settle, task.future, outcome)
        self._release(task.run)

    def _work_beside(self, task: _Task, beside: OffThread) -> None:
        """Go on with an operation, on the thread for that; it comes back to the engine's."""
        outcome: Any = EngineError(STOPPED, "server")
        try:
            if not self._stopping:
                outcome = beside.work()
        except Exception as error:
            outcome = error
        finally:
            self._tasks.put(_Task(self._come_back, (task, beside, outcome), task.future))

    def _come_back(self, task: _Task, beside: OffThread, outcome: Any) -> None:
        try:
            if not isinstance(outcome, Exception):
                outcome = beside.then(outcome)
        except Exception as error:
            outcome = error
        self._close(self._saves, task, outcome)

    def _stop_all(self, why: EngineError) -> None:
        for task in [
            *self._passes.values(),
            *(task for tasks in self._waiting.values() for task in tasks),
        ]:
            self.post(settle, task.future, why)
        self._waiting.clear()
        self._empty_queue(why)
        self.samples.fail(why)

    def _empty_queue(self, why: EngineError) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                queued = self._tasks.get_nowait()
                if queued is not None and queued.function == self._come_back:
                    self._execute(queued)
                elif queued is not None:
                    self.post(settle, queued.future, why)

    def _execute(self, task: _Task) -> None:
        if self._stopping and task.function != self._come_back:
            self.post(settle, task.future, EngineError(STOPPED, "server"))
            return
        try:
            outcome = task.function(*task.args)
            if isinstance(outcome, OffThread):
                self._files.submit(self._work_beside, task, outcome)
        except Exception as error:
            self.post(settle, task.future, error)
        except BaseException as error:
            self.post(settle, task.future, _death(error))
            raise
        else:
            if isinstance(task, _Pass):
                self._passes[task.job] = task
            elif not isinstance(outcome, OffThread):
                self.post(settle, task.future, outcome)
                return
            assert task.run is not None, "nothing would wait for it"
            (self._open if isinstance(task, _Pass) else self._saves)[task.run] += 1

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
