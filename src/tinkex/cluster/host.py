"""The host: an engine and its loop inside a worker process."""

from __future__ import annotations

import logging
import os
import platform
import queue
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tinkex._version import __version__
from tinkex.cluster.link import CHUNK, Call, HostInfo, LogLine, News, Recipe, StaleEpochError
from tinkex.engine.api import (
    Directory,
    DrawnToken,
    Engine,
    EngineError,
    PassDone,
    PassJob,
    SampleDone,
    SampleJob,
    Writer,
    no_tokenizer,
)
from tinkex.engine.stepping import TRAINING, Ended, Failed, Stepper

logger = logging.getLogger("tinkex.cluster")

LOG_LINES = 1_000
"""The most lines of a log that wait for the server; older ones are dropped."""
KINDS = ("adapter", "sampler", "pass", "job")
TAKING_SECONDS = 0.05
"""The longest time that steps wait while calls are taken in."""


def make_engine(recipe: Recipe) -> Engine:
    """Make the engine of a recipe."""
    if ":" in recipe.engine:
        module, _, function = recipe.engine.partition(":")
        made: Engine = getattr(import_module(module), function)(**recipe.options)
        return made
    from tinkex.engine.registry import find_engine

    kind = find_engine(recipe.engine)
    return kind.make(recipe.models, kind.pick_device(recipe.device), recipe.dtype)


class HostFault(EngineError):
    """An internal fault of a worker process; its log has the traceback."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "server")


class Host:
    """An engine, the thread that owns it, and the files that travel.

    All methods may be called on any thread.
    """

    def __init__(self, make: Callable[[], Engine], tell: Callable[[News], None]) -> None:
        """Make an engine on a thread of its own; `tell` gets its news, on that thread."""
        self._make, self._tell = make, tell
        self._tasks: queue.SimpleQueue[tuple[Call, Future[Any]] | None] = queue.SimpleQueue()
        self._files = ThreadPoolExecutor(2, "tinkex-files")
        self._epoch = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="tinkex-worker-"))
        self._numbers = iter(range(1, 1 << 62))
        self._writers: dict[int, Writer] = {}
        self._names: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self._drawn: list[tuple[str, Sequence[DrawnToken]]] = []
        self._logs: deque[LogLine] = deque(maxlen=LOG_LINES)
        threading.Thread(target=self._run, name="tinkex-engine", daemon=True).start()

    def submit(self, call: Call) -> Future[Any]:
        """Queue a call; those on the engine are carried out in order."""
        if call.method in FILE_CALLS:
            return self._files.submit(self._carry_out, call)
        future: Future[Any] = Future()
        self._tasks.put((call, future))
        return future

    def log(self, line: LogLine) -> None:
        """Take a line of the log along with the next news."""
        self._logs.append(line)
        self._tasks.put(None)

    # ── the engine's thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._engine = self._make()
        except Exception as error:
            logger.exception("the engine cannot be made")
            why = EngineError(f"the engine cannot be made: {_told(error)}", "server")
            while True:
                if (task := self._tasks.get()) is not None:
                    self._tell(News(logs=_emptied(self._logs)))
                    task[1].set_exception(why)
        self._stepper = Stepper(self._engine)
        told: Counter[str] = Counter()
        while True:
            self._take()
            ended = [
                _sendable(done) for one in self._stepper.advance() for done in self._closed(one)
            ]
            drawn, self._drawn = self._drawn, []
            logs = _emptied(self._logs)
            if ended or drawn or logs:
                steps = self._stepper.steps - told
                told.update(steps)
                self._tell(News(ended, drawn, dict(steps), logs))

    def _take(self) -> None:
        """Carry out the calls that wait; wait for one if the engine has nothing to do."""
        until = time.perf_counter() + TAKING_SECONDS
        try:
            while time.perf_counter() < until:
                task = self._tasks.get(block=not self._stepper.has_work())
                if task is None:
                    return
                call, future = task
                try:
                    future.set_result(self._carry_out(call))
                except Exception as error:
                    future.set_exception(error)
        except queue.Empty:
            pass

    def _carry_out(self, call: Call) -> Any:
        if call.method == "reset":
            return self._reset(call.epoch, *call.args)
        if call.epoch != self._epoch:
            raise StaleEpochError(call.epoch, self._epoch)
        try:
            own = getattr(self, f"_do_{call.method}", None)
            method = own if own is not None else getattr(self._engine, call.method)
            return method(*call.args, **call.named)
        except EngineError:
            raise
        except Exception as error:
            logger.exception("%s failed", call.method)
            raise HostFault(_told(error)) from None

    def _closed(self, ended: Ended) -> Sequence[PassDone | SampleDone]:
        """Close what ended; after a step that failed, all work of its kind."""
        if isinstance(ended, Failed):
            names = self._names["pass" if ended.kind == TRAINING else "job"]
            done = PassDone if ended.kind == TRAINING else SampleDone
            lost = [done(name, ended.error) for name in names]
            names.clear()
            return lost
        self._names["pass" if isinstance(ended, PassDone) else "job"].discard(ended.job)
        return [ended]

    def _reset(self, epoch: int, probe: Path | None, token: str) -> HostInfo:
        """Belong to a newer server: whatever an older one made is dropped."""
        if epoch <= self._epoch:
            raise StaleEpochError(epoch, self._epoch)
        self._epoch = epoch
        for job in self._names["job"]:
            self._engine.sample_cancel(job)
        for adapter in self._names["adapter"]:
            self._engine.drop(adapter)
        for sampler in self._names["sampler"]:
            self._engine.drop_sampler(sampler)
        self._engine.drop_losses("")
        while self._engine.passing():  # the passes of dropped adapters fail
            self._engine.pass_step()
        for names in self._names.values():
            names.clear()
        self._writers.clear()
        self._drawn.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        sees = False
        if probe is not None:
            try:
                sees = probe.read_text() == token
            except OSError:
                sees = False
        return HostInfo(
            # the server reads tokenizers itself
            [replace(model, tokenizer=no_tokenizer) for model in self._engine.models()],
            __version__,
            platform.node(),
            f"{platform.node()}, process {os.getpid()}",
            getattr(self._engine, "repeats", True),
            sees,
        )

    # ── methods of an engine that need more than a call ───────────────────────────────────────────

    def _do_create(self, adapter: str, *args: Any) -> None:
        self._engine.create(adapter, *args)
        self._names["adapter"].add(adapter)

    def _do_drop(self, adapter: str) -> None:
        self._names["adapter"].discard(adapter)
        self._engine.drop(adapter)

    def _do_snapshot(self, adapter: str, sampler: str) -> None:
        self._engine.snapshot(adapter, sampler)
        self._names["sampler"].add(sampler)

    def _do_load_sampler(self, sampler: str, base_model: str, directory: Path | int | None) -> None:
        place = self._scratch / f"in-{directory}" if isinstance(directory, int) else directory
        self._engine.load_sampler(sampler, base_model, place)
        self._names["sampler"].add(sampler)

    def _do_drop_sampler(self, sampler: str) -> None:
        self._names["sampler"].discard(sampler)
        self._engine.drop_sampler(sampler)

    def _do_pass_start(self, work: PassJob) -> None:
        self._engine.pass_start(work)
        self._names["pass"].add(work.job)

    def _do_sample_start(self, work: SampleJob, is_streamed: bool) -> None:
        listener = None
        if is_streamed:

            def listener(drawn: Sequence[DrawnToken]) -> None:
                self._drawn.append((work.job, drawn))

        self._engine.sample_start(replace(work, listener=listener))
        self._names["job"].add(work.job)

    def _do_sample_cancel(self, job: str) -> None:
        self._names["job"].discard(job)
        self._engine.sample_cancel(job)

    def _do_text_files(self, base_model: str) -> Mapping[str, bytes]:
        """Return the files of a base model that are not weights: of its tokenizer, above all."""
        found = {model.name: model for model in self._engine.models()}[base_model]
        return {
            path.name: path.read_bytes()
            for path in (found.directory.iterdir() if found.directory is not None else ())
            if path.is_file() and path.suffix != ".safetensors"
        }

    # ── files ─────────────────────────────────────────────────────────────────────────────────────

    def _do_writer(self, adapter: str, *, optimizer: bool) -> int:
        return self._hold(self._engine.writer(adapter, optimizer=optimizer))

    def _do_sampler_writer(self, sampler: str) -> int:
        return self._hold(self._engine.sampler_writer(sampler))

    def _hold(self, writer: Writer) -> int:
        number = next(self._numbers)
        self._writers[number] = writer
        return number

    def _do_write(self, number: int, directory: Path | None) -> Mapping[str, int]:
        """Write a writer's files into a directory, or keep them to be read; return their sizes."""
        writer = self._writers.pop(number)
        if directory is None:
            directory = self._scratch / str(number)
            directory.mkdir()
        writer.write(Directory(directory))
        return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}

    def _do_read(self, number: int, name: str, offset: int) -> bytes:
        with (self._scratch / str(number) / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def _do_take(self, number: int, name: str, chunk: bytes) -> None:
        """Add a piece to a file that the server sends."""
        place = self._scratch / f"in-{number}"
        place.mkdir(exist_ok=True)
        with (place / name).open("ab") as file:
            file.write(chunk)

    def _do_release(self, number: int) -> None:
        """Forget a writer and its files."""
        self._writers.pop(number, None)
        for place in (str(number), f"in-{number}"):
            shutil.rmtree(self._scratch / place, ignore_errors=True)

    def _do_load(self, adapter: str, directory: Path | int, *, optimizer: bool) -> None:
        place = self._scratch / f"in-{directory}" if isinstance(directory, int) else directory
        self._engine.load(adapter, place, optimizer=optimizer)


FILE_CALLS = frozenset({"write", "read", "take", "release"})
"""Calls that are carried out beside the engine."""


def _emptied(lines: deque[LogLine]) -> Sequence[LogLine]:
    return [lines.popleft() for _ in range(len(lines))]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _sendable(ended: PassDone | SampleDone) -> PassDone | SampleDone:
    """Replace an error whose class the server may not have."""
    error = ended.result
    if not isinstance(error, Exception) or isinstance(error, EngineError):
        return ended
    logger.error("work failed", exc_info=error)
    return replace(ended, result=HostFault(_told(error)))
