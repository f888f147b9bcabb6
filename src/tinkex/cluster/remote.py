"""An engine in another process, as the server sees it."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tinkex.cluster.link import CHUNK, News
from tinkex.cluster.process import Role, WorkerProcess
from tinkex.engine.api import (
    ADAMW,
    BaseModel,
    Directory,
    Engine,
    EngineError,
    EngineLost,
    Optimizer,
    PassDone,
    PassJob,
    Place,
    SampleDone,
    SampleJob,
    Writer,
)
from tinkex.engine.stepping import Advancing, Ended, Kind
from tinkex.types.optimizers import OptimParams
from tinkex.types.sessions import CreateCustomLossRequest
from tinkex.types.training import LoraConfig


class RemoteSteps(Advancing):
    """The work of an engine in another process, which goes on by itself."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self.steps: Counter[str] = Counter()
        self.passes: dict[str, PassJob] = {}
        self.jobs: dict[str, SampleJob] = {}
        """The work under way, by names that are used once: an answer to work that was given up is
        never taken for one to work of the same name."""

    def has_work(self) -> bool:
        """Return True if `advance` has something to return."""
        return bool(self._process.news) or self._process.lost is not None

    def advance(self) -> Sequence[Ended]:
        """Return the work that has ended, and hand on the tokens that were drawn.

        Raises:
            EngineLost: The process is gone.
        """
        ended: list[Ended] = []
        while self._process.news:
            news = self._process.news.popleft()
            self.steps.update(news.steps)
            for job, drawn in news.drawn:
                work = self.jobs.get(job)
                if work is not None and work.listener is not None:
                    work.listener(drawn)
            for one in news.ended:
                ended += self._close(one)
        if not ended and self._process.lost is not None:
            raise self._process.lost
        return ended

    def _close(self, ended: PassDone | SampleDone) -> Sequence[Ended]:
        """Close work that ended; return nothing for what was given up meanwhile."""
        table = self.passes if isinstance(ended, PassDone) else self.jobs
        work = table.pop(ended.job, None)
        return [] if work is None else [replace(ended, job=work.job)]

    def step(self, kind: Kind) -> Sequence[Ended]:
        """Return the work that has ended."""
        return self.advance()


class RemoteEngine(Engine):
    """An engine in another process.

    Methods are called on one thread, as those of any engine; those of `process` on any.
    """

    def __init__(self, process: WorkerProcess, role: Role = "both") -> None:
        """Take a process that has not been started; `connect` starts it."""
        self.process, self.role = process, role
        self.stepper = RemoteSteps(process)
        self._numbers = itertools.count(1)

    @property
    def name(self) -> str:
        """The name of the worker."""
        return self.process.name

    @property
    def repeats(self) -> bool:
        """True if the same calls give the same bits."""
        return self.process.info is not None and self.process.info.repeats

    def connect(self, epoch: int) -> None:
        """Start the process, without any adapter, and have it belong to this epoch."""
        self.stepper.passes.clear()
        self.stepper.jobs.clear()
        self.process.connect(epoch)

    # ── Engine ────────────────────────────────────────────────────────────────────────────────────

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""
        return self.process.models

    def create(
        self, adapter: str, base_model: str, lora: LoraConfig, optimizer: Optimizer = ADAMW
    ) -> None:
        """Make a fresh adapter."""
        self.process.call("create", adapter, base_model, lora, optimizer)

    def drop(self, adapter: str) -> None:
        """Forget an adapter."""
        given_up = [name for name, work in self.stepper.passes.items() if work.adapter == adapter]
        why = EngineError("the run was dropped")
        if given_up:
            self.process.tell(News([PassDone(name, why) for name in given_up]))
        if self.process.lost is None:
            self.process.call("drop", adapter)

    def pass_start(self, work: PassJob) -> None:
        """Admit a pass; one that is not valid ends with its error."""
        name = f"{next(self._numbers)}/{work.job}"
        self.stepper.passes[name] = work
        self.process.admit("pass_start", PassDone, replace(work, job=name))

    def pass_step(self) -> Sequence[PassDone]:
        """Return the passes that have ended."""
        return [one for one in self.stepper.advance() if isinstance(one, PassDone)]

    def passing(self) -> bool:
        """Return True if any pass is unfinished."""
        return bool(self.stepper.passes)

    def create_loss(self, loss_id: str, request: CreateCustomLossRequest) -> None:
        """Take a loss that was sent as a graph."""
        self.process.call("create_loss", loss_id, request)

    def drop_losses(self, prefix: str) -> None:
        """Forget the losses whose ids begin with this."""
        self.process.cast("drop_losses", prefix)

    def drop_gradients(self, adapter: str) -> None:
        """Clear the gradient buffer without a step."""
        self.process.call("drop_gradients", adapter)

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        """Apply and clear the gradient buffer."""
        metrics: dict[str, float] = self.process.call("optim_step", adapter, params)
        return metrics

    def writer(self, adapter: str, *, optimizer: bool) -> Writer:
        """Return the writer of an adapter as it is now."""
        return RemoteWriter(self.process, self.process.call("writer", adapter, optimizer=optimizer))

    def sampler_writer(self, sampler: str) -> Writer:
        """Return the writer of a snapshot's weights."""
        return RemoteWriter(self.process, self.process.call("sampler_writer", sampler))

    def load(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Replace an adapter's weights by saved ones."""
        with Sent(self.process, directory) as place:
            self.process.call("load", adapter, place, optimizer=optimizer)

    def snapshot(self, adapter: str, sampler: str) -> None:
        """Freeze an adapter's present weights as a sampler."""
        self.process.call("snapshot", adapter, sampler)

    def load_sampler(self, sampler: str, base_model: str, directory: Path | None) -> None:
        """Make a sampler of saved weights."""
        if directory is None:
            self.process.call("load_sampler", sampler, base_model, None)
            return
        with Sent(self.process, directory) as place:
            self.process.call("load_sampler", sampler, base_model, place)

    def point(self, target: str, sampler: str, version: int) -> None:
        """Give an in-flight target the weights of a sampler."""
        self.process.call("point", target, sampler, version)

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler once its jobs have ended."""
        self.process.cast("drop_sampler", sampler)

    def sample_start(self, work: SampleJob) -> None:
        """Admit a sampling job; one that is not valid ends with its error."""
        name = f"{next(self._numbers)}/{work.job}"
        self.stepper.jobs[name] = work
        sent = replace(work, job=name, listener=None)
        self.process.admit("sample_start", SampleDone, sent, work.listener is not None)

    def sample_step(self) -> Sequence[SampleDone]:
        """Return the jobs that have ended."""
        return [one for one in self.stepper.advance() if isinstance(one, SampleDone)]

    def sample_cancel(self, job: str) -> None:
        """Drop a job without a result."""
        for name in [name for name, work in self.stepper.jobs.items() if work.job == job]:
            del self.stepper.jobs[name]
            self.process.cast("sample_cancel", name)

    def sampling(self) -> bool:
        """Return True if any job is unfinished."""
        return bool(self.stepper.jobs)


class RemoteWriter(Writer):
    """The writer of an object in another process."""

    def __init__(self, process: WorkerProcess, number: int) -> None:
        self._process, self._number = process, number
        self._release = weakref.finalize(self, _release, process, process.epoch, number)

    def write(self, place: Place) -> None:
        """Have the files written, and fetch them unless the process writes them there itself."""
        directory = place.path if isinstance(place, Directory) else None
        if directory is not None and not self._process.sees(directory):
            directory = None
        try:
            sizes = self._process.call("write", self._number, directory)
            if directory is None:
                for name, size in sizes.items():
                    with place.file(name) as file:
                        for offset in range(0, size, CHUNK):
                            file.write(self._process.call("read", self._number, name, offset))
        finally:
            self._release()


def _release(process: WorkerProcess, epoch: int, number: int) -> None:
    if process.epoch == epoch:  # else the process is gone, and its files with it
        process.cast("release", number)


class Sent:
    """The files of a directory, for a process that reads them while the block lasts."""

    _numbers = itertools.count(1)

    def __init__(self, process: WorkerProcess, directory: Path) -> None:
        self._process, self._directory = process, directory
        self._number = next(self._numbers)

    def __enter__(self) -> Path | int:
        """Return how the process finds the files: by path, or by the number of what was sent."""
        if self._process.sees(self._directory):
            return self._directory
        for path in sorted(self._directory.iterdir()):
            if path.is_file():
                self._send(path)
        return self._number

    def _send(self, path: Path) -> None:
        with path.open("rb") as file:
            chunk = file.read(CHUNK)
            while True:
                self._process.call("take", self._number, path.name, chunk)
                chunk = file.read(CHUNK)
                if not chunk:
                    return

    def __exit__(self, *_: object) -> None:
        if not self._process.sees(self._directory):
            with contextlib.suppress(EngineLost):
                self._process.cast("release", self._number)
