"""The sampling jobs of a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tinkex.engine.api import (
    DrawnToken,
    Engine,
    EngineError,
    Listener,
    Recording,
    SampleDone,
    SampleJob,
)
from tinkex.types.sampled import SampleResponse

logger = logging.getLogger("tinkex.server")

CANCELLED = "the request was cancelled"


class Sampled(NamedTuple):
    """The result of a sampling job, and the recordings of its samples if they were asked for."""

    response: SampleResponse
    recordings: Sequence[Recording] = ()


class SampleJobs:
    """The sampling jobs that an engine has; the worker's thread advances them."""

    def __init__(
        self,
        engine: Engine,
        run: Callable[..., asyncio.Future[None]],
        post: Callable[..., None],
    ) -> None:
        """Take what the worker has: an engine, and ways to its thread and to the event loop."""
        self._engine, self._run, self._post = engine, run, post
        self._jobs: dict[str, asyncio.Future[Sampled]] = {}
        self.cancelled: set[str] = set()
        """Jobs to drop before the next step, without waiting for what else is queued."""
        self.open = 0
        """The number of jobs that have been asked for and have not ended."""

    def __len__(self) -> int:
        return len(self._jobs)

    # ── on the event loop ─────────────────────────────────────────────────────────────────────────

    def draw(self, work: SampleJob) -> asyncio.Future[Sampled]:
        """Queue a sampling job.

        A listener is called on the event loop, for the last time before the job is done.
        """
        done: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.open += 1
        done.add_done_callback(self._end)
        admitted = self._run(self._admit, work, done)
        admitted.add_done_callback(lambda future: _pass_failure(future, done))
        return done

    def _end(self, _: asyncio.Future[Sampled]) -> None:
        self.open -= 1

    def cancel(self, job: str) -> None:
        """Drop a job, started or not; it fails. One that has ended is left alone."""
        self.cancelled.add(job)
        # wakes the thread; and behind this job's admission nothing has to be remembered
        self._run(self._uncancel, job)

    def cancel_all(self, prefix: str) -> None:
        """Drop the jobs whose names begin so, started or not; they fail."""
        self._run(self._cancel_all, prefix)

    # ── on the worker's thread ────────────────────────────────────────────────────────────────────

    def _admit(self, work: SampleJob, done: asyncio.Future[Sampled]) -> None:
        if work.job in self.cancelled:
            raise EngineError(CANCELLED)
        relay = None if work.listener is None else self._relay(work.listener)
        self._engine.sample_start(replace(work, listener=relay))
        self._jobs[work.job] = done

    def _relay(self, listener: Listener) -> Listener:
        def relay(drawn: Sequence[DrawnToken]) -> None:
            self._post(listener, drawn)

        return relay

    def _uncancel(self, job: str) -> None:
        self.drop_cancelled()
        self.cancelled.discard(job)

    def drop_cancelled(self) -> None:
        """Drop the started jobs that were cancelled."""
        for job in [job for job in self.cancelled.copy() if job in self._jobs]:
            self._drop(job, EngineError(CANCELLED))

    def _cancel_all(self, prefix: str) -> None:
        for job in [job for job in self._jobs if job.startswith(prefix)]:
            self._drop(job, EngineError("the session has ended"))

    def _drop(self, job: str, why: Exception) -> None:
        """Fail a job; other jobs are not concerned if the engine cannot drop it."""
        future = self._jobs.pop(job)
        try:
            self._engine.sample_cancel(job)
        except Exception:
            logger.exception("the engine cannot drop the sample %s", job)
        finally:
            self._post(settle, future, why)

    def end(self, ended: Sequence[SampleDone]) -> None:
        """Tell how jobs ended."""
        outcomes = [
            (self._jobs.pop(done.job), _outcome(done)) for done in ended if done.job in self._jobs
        ]
        if outcomes:  # together, so that a reader of several is woken once
            self._post(_settle_all, outcomes)

    def fail(self, error: Exception) -> None:
        """Drop all jobs."""
        for job in list(self._jobs):
            self._drop(job, error)


def _outcome(done: SampleDone) -> Sampled | Exception:
    return (
        done.result if isinstance(done.result, Exception) else Sampled(done.result, done.recordings)
    )


def settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Give a future its result or its failure, unless it has one."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _settle_all(outcomes: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in outcomes:
        settle(future, outcome)


def _pass_failure(source: asyncio.Future[Any], target: asyncio.Future[Any]) -> None:
    if not source.cancelled() and (error := source.exception()) is not None and not target.done():
        target.set_exception(error)
