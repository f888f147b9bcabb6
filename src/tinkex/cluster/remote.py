"""An engine in another process, as the server sees it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import secrets
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tinkex._version import __version__
from tinkex.cluster.link import CHUNK, Call, HostInfo, Launch, Link, News
from tinkex.engine.api import (
    ADAMW,
    BaseModel,
    Engine,
    EngineError,
    EngineLost,
    Optimizer,
    PassDone,
    PassJob,
    SampleDone,
    SampleJob,
)
from tinkex.engine.base_models import read_tokenizer
from tinkex.engine.places import Directory, Place, Writer
from tinkex.engine.stepping import TRAINING, Ended, Failed, Kind
from tinkex.types.custom_losses import CreateCustomLossRequest
from tinkex.types.optimizers import OptimParams
from tinkex.types.training import LoraConfig

logger = logging.getLogger("tinkex.server")


class RemoteEngine(Engine):
    """An engine behind a link. It advances by itself; `advance` returns what has ended.

    Methods are called on one thread, as those of any engine; `connect`, `ping` and `close` are
    called on others.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        data_dir: Path | None = None,
        role: Literal["both", "trainer", "sampler"] = "both",
        must_share: bool = False,
    ) -> None:
        """Know how a process is started; `connect` starts it.

        Args:
            name: The name of the replica.
            launch: Starts the process.
            data_dir: The directory that a process may see too; then files need not travel.
            role: The work that it is for.
            must_share: True if a process that does not see the directory is an error.
        """
        self.name, self._launch, self._data_dir = name, launch, data_dir
        self.role, self._must_share = role, must_share
        self.wake: Callable[[], object] = lambda: None
        """Called when there are news, on a thread of the link."""
        self.on_lost: Callable[[EngineLost], object] = lambda error: None
        """Called when the process is gone, on a thread of the link."""
        self.steps: Counter[str] = Counter()
        self.info: HostInfo | None = None
        self.epoch = 0
        self.lost: EngineLost | None = None
        """The reason why there is no process, once it is gone."""
        self._link: Link | None = None
        self._news: deque[News] = deque()
        self._lock = threading.Lock()
        self._passes: dict[str, PassJob] = {}
        self._jobs: dict[str, SampleJob] = {}
        """The work under way, by names that are used once: an answer to work that was given up is
        never taken for one to work of the same name."""
        self._numbers = itertools.count(1)
        self._models: Sequence[BaseModel] = ()
        self._current = object()
        """Stands for the present process; news of others are ignored."""

    @functools.cached_property
    def _fetched(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="tinkex-models-")
        return Path(self._folder.name)

    # ── the process ───────────────────────────────────────────────────────────────────────────────

    def connect(self, epoch: int) -> HostInfo:
        """Start the process, and have it belong to this epoch.

        Raises:
            EngineError: It cannot be started, or does not fit.
        """
        with self._lock:
            self._passes, self._jobs, self._news = {}, {}, deque()
        probe, token = None, secrets.token_hex(8)
        if self._data_dir is not None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            probe = self._data_dir / f".probe-{self.name}-{token}"
            probe.write_text(token)
        current = object()
        self._current = current
        link = self._launch(
            lambda news: self._take_news(current, news), lambda why: self._lose(current, why)
        )
        try:
            info: HostInfo = link.call(Call(epoch, "reset", (probe, token))).result()
            self._check(info)
        except BaseException:
            self._current = object()
            link.close()
            raise
        finally:
            if probe is not None:
                probe.unlink(missing_ok=True)
        self._link, self.info, self.epoch, self.lost = link, info, epoch, None
        self._models = [self._with_tokenizer(model) for model in info.models]
        return info

    def _check(self, info: HostInfo) -> None:
        if info.version != __version__:
            raise EngineError(
                f"worker {self.name!r} ({info.place}) runs tinkex {info.version}, this server "
                f"{__version__}; install the same version on both",
                "server",
            )
        if self._must_share and not info.sees:
            raise EngineError(
                f"worker {self.name!r} ({info.place}) does not see the data directory "
                f"{self._data_dir}; mount it there, or use --shared auto",
                "server",
            )

    def _take_news(self, sender: object, news: News) -> None:
        if sender is not self._current:
            return  # a process that was given up
        for line in news.logs:
            logging.getLogger(line.logger).log(line.level, "[%s] %s", self.name, line.text)
        if news.ended or news.drawn or news.steps:
            self._news.append(news)
            self.wake()

    def _lose(self, sender: object, why: str) -> None:
        if sender is not self._current or self.lost is not None:
            return
        self.lost = EngineLost(f"worker {self.name!r} is gone: {why}")
        self.wake()
        self.on_lost(self.lost)

    def give_up(self, why: str) -> None:
        """Take the process for gone, and end it if it can be reached."""
        link, sender = self._link, self._current
        self._lose(sender, why)
        self._current = object()
        if link is not None:
            link.close()

    def ping(self, seconds: float) -> bool:
        """Return False if the process does not answer in this time."""
        if self._link is None or self.lost is not None:
            return False
        try:
            self._link.ping().result(seconds)
        except (TimeoutError, EngineLost):
            return False
        return True

    def close(self) -> None:
        """End the process."""
        self._current = object()
        if self._link is not None:
            self._link.close()

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        try:
            return self._reach().call(Call(self.epoch, method, args, named)).result()
        except EngineLost as error:
            raise self.lost or EngineLost(f"worker {self.name!r} is gone: {error}") from None

    def _cast(self, method: str, *args: Any) -> None:
        """Send a call whose result nobody waits for; a process that is gone needs none."""
        if self.lost is None:
            with contextlib.suppress(EngineLost):
                self._reach().cast(Call(self.epoch, method, args))

    def _reach(self) -> Link:
        if self.lost is not None:
            raise self.lost
        assert self._link is not None, "the engine has not been connected"
        return self._link

    # ── advancing ─────────────────────────────────────────────────────────────────────────────────

    def has_work(self) -> bool:
        """Return True if `advance` has something to return."""
        return bool(self._news) or self.lost is not None

    def advance(self) -> Sequence[Ended]:
        """Return the work that has ended, and hand on the tokens that were drawn.

        Raises:
            EngineLost: The process is gone.
        """
        ended: list[Ended] = []
        while self._news:
            news = self._news.popleft()
            self.steps.update(news.steps)
            for job, drawn in news.drawn:
                work = self._jobs.get(job)
                if work is not None and work.listener is not None:
                    work.listener(drawn)
            for one in news.ended:
                ended += self._open(one)
        if not ended and self.lost is not None:
            raise self.lost
        return ended

    def _open(self, ended: Ended) -> Sequence[Ended]:
        """Close work that ended; return nothing for what was given up meanwhile."""
        if isinstance(ended, Failed):
            (self._passes if ended.kind == TRAINING else self._jobs).clear()
            return [ended]
        table = self._passes if isinstance(ended, PassDone) else self._jobs
        work = table.pop(ended.job, None)
        return [] if work is None else [replace(ended, job=work.job)]

    def step(self, kind: Kind) -> Sequence[Ended]:
        """Return the work that has ended."""
        return self.advance()

    # ── Engine ────────────────────────────────────────────────────────────────────────────────────

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""
        assert self.info is not None, "the engine has not been connected"
        return self._models

    def _with_tokenizer(self, model: BaseModel) -> BaseModel:
        """Return a base model with its tokenizer, whose files may have to be fetched."""
        place = model.directory
        if place is None:
            return model
        if not place.is_dir():
            place = self._fetched / model.name.replace("/", "--")
            place.mkdir(parents=True, exist_ok=True)
            for name, content in self._call("text_files", model.name).items():
                (place / Path(name).name).write_bytes(content)
        tokenizer = functools.cache(functools.partial(read_tokenizer, model.name, place))
        return replace(model, directory=place, tokenizer=tokenizer)

    def create(
        self, adapter: str, base_model: str, lora: LoraConfig, optimizer: Optimizer = ADAMW
    ) -> None:
        """Make a fresh adapter."""
        self._call("create", adapter, base_model, lora, optimizer)

    def drop(self, adapter: str) -> None:
        """Forget an adapter."""
        given_up = [name for name, work in self._passes.items() if work.adapter == adapter]
        why = EngineError("the run was dropped")
        if given_up:
            self._take_news(self._current, News([PassDone(name, why) for name in given_up]))
        if self.lost is None:
            self._call("drop", adapter)

    def pass_start(self, work: PassJob) -> None:
        """Admit a pass; one that is not valid ends with its error."""
        name = self._name(work.job)
        link = self._reach()
        self._passes[name] = work
        self._start(link, "pass_start", PassDone, replace(work, job=name))

    def _name(self, job: str) -> str:
        return f"{next(self._numbers)}/{job}"

    def _start(
        self,
        link: Link,
        method: str,
        done: type[PassDone | SampleDone],
        work: PassJob | SampleJob,
        *args: Any,
    ) -> None:
        """Send work without waiting for its admission."""
        future = link.call(Call(self.epoch, method, (work, *args)))
        current = self._current

        def admitted(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, EngineLost):
                self._take_news(current, News([done(work.job, error)]))

        future.add_done_callback(admitted)

    def pass_step(self) -> Sequence[PassDone]:
        """Return the passes that have ended."""
        return [one for one in self.advance() if isinstance(one, PassDone)]

    def passing(self) -> bool:
        """Return True if any pass is unfinished."""
        return bool(self._passes)

    def create_loss(self, loss_id: str, request: CreateCustomLossRequest) -> None:
        """Take a loss that was sent as a graph."""
        self._call("create_loss", loss_id, request)

    def drop_losses(self, prefix: str) -> None:
        """Forget the losses whose ids begin with this."""
        self._cast("drop_losses", prefix)

    def drop_gradients(self, adapter: str) -> None:
        """Clear the gradient buffer without a step."""
        self._call("drop_gradients", adapter)

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        """Apply and clear the gradient buffer."""
        metrics: dict[str, float] = self._call("optim_step", adapter, params)
        return metrics

    def writer(self, adapter: str, *, optimizer: bool) -> Writer:
        """Return the writer of an adapter as it is now."""
        return self._writer(self._call("writer", adapter, optimizer=optimizer))

    def sampler_writer(self, sampler: str) -> Writer:
        """Return the writer of a snapshot's weights."""
        return self._writer(self._call("sampler_writer", sampler))

    def _writer(self, number: int) -> Writer:
        assert self.info is not None
        shared = self._data_dir if self.info.sees else None
        return RemoteWriter(self._reach(), self.epoch, number, shared)

    def load(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Replace an adapter's weights by saved ones."""
        with Sent(self._reach(), self.epoch, self._travels(directory), next(self._numbers)) as sent:
            self._call("load", adapter, sent.place(directory), optimizer=optimizer)

    def snapshot(self, adapter: str, sampler: str) -> None:
        """Freeze an adapter's present weights as a sampler."""
        self._call("snapshot", adapter, sampler)

    def load_sampler(self, sampler: str, base_model: str, directory: Path | None) -> None:
        """Make a sampler of saved weights."""
        if directory is None:
            self._call("load_sampler", sampler, base_model, None)
            return
        with Sent(self._reach(), self.epoch, self._travels(directory), next(self._numbers)) as sent:
            place = sent.place(directory)
            method = "load_sampler_of" if isinstance(place, int) else "load_sampler"
            self._call(method, sampler, base_model, place)

    def _travels(self, directory: Path) -> Path | None:
        """Return the directory if its files must be sent; None if the process sees them."""
        assert self.info is not None
        is_shared = self._data_dir is not None and directory.is_relative_to(self._data_dir)
        return None if self.info.sees and is_shared else directory

    def point(self, target: str, sampler: str, version: int) -> None:
        """Give an in-flight target the weights of a sampler."""
        self._call("point", target, sampler, version)

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler once its jobs have ended."""
        self._cast("drop_sampler", sampler)

    def sample_start(self, work: SampleJob) -> None:
        """Admit a sampling job; one that is not valid ends with its error."""
        name = self._name(work.job)
        link = self._reach()
        self._jobs[name] = work
        sent = replace(work, job=name, listener=None)
        self._start(link, "sample_start", SampleDone, sent, work.listener is not None)

    def sample_step(self) -> Sequence[SampleDone]:
        """Return the jobs that have ended."""
        return [one for one in self.advance() if isinstance(one, SampleDone)]

    def sample_cancel(self, job: str) -> None:
        """Drop a job without a result."""
        for name in [name for name, work in self._jobs.items() if work.job == job]:
            del self._jobs[name]
            self._cast("sample_cancel", name)

    def sampling(self) -> bool:
        """Return True if any job is unfinished."""
        return bool(self._jobs)


class RemoteWriter(Writer):
    """The writer of an object in another process."""

    def __init__(self, link: Link, epoch: int, number: int, shared: Path | None) -> None:
        self._link, self._epoch, self._number, self._shared = link, epoch, number, shared
        self._release = weakref.finalize(self, _release, link, epoch, number)

    def write(self, place: Place) -> None:
        """Have the files written, and fetch them unless the process writes them there itself."""
        directory = place.path if isinstance(place, Directory) else None
        if self._shared is None or directory is None or not directory.is_relative_to(self._shared):
            directory = None
        try:
            sizes = self._call("write", self._number, directory)
            if directory is None:
                for name, size in sizes.items():
                    with place.file(name) as file:
                        for offset in range(0, size, CHUNK):
                            file.write(self._call("read", self._number, name, offset))
        finally:
            self._release()

    def _call(self, method: str, *args: Any) -> Any:
        return self._link.call(Call(self._epoch, method, args)).result()


def _release(link: Link, epoch: int, number: int) -> None:
    with contextlib.suppress(EngineError):  # the process is gone, and its files with it
        link.cast(Call(epoch, "release", (number,)))


class Sent:
    """The files of a directory, sent to a process for as long as they are read there."""

    def __init__(self, link: Link, epoch: int, source: Path | None, number: int) -> None:
        self._link, self._epoch, self._source = link, epoch, source
        self._number = number

    def place(self, directory: Path) -> Path | int:
        """Return how the process finds the files: by the number of what was sent, or by path."""
        return directory if self._source is None else self._number

    def __enter__(self) -> Sent:
        for path in sorted(self._source.iterdir()) if self._source is not None else ():
            if path.is_file():
                self._send(path)
        return self

    def _send(self, path: Path) -> None:
        with path.open("rb") as file:
            chunk = file.read(CHUNK)
            while True:
                self._link.call(
                    Call(self._epoch, "take", (self._number, path.name, chunk))
                ).result()
                chunk = file.read(CHUNK)
                if not chunk:
                    return

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            _release(self._link, self._epoch, self._number)
