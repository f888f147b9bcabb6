"""The order of work on a worker: what a run is asked for waits for the passes before it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinkex.engine.api import EngineError, EngineLost
from tinkex.server.workers.sample_jobs import settle


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
