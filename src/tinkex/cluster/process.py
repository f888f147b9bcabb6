"""The process of an engine, as the server sees it."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinkex._version import __version__
from tinkex.cluster.link import Call, HostInfo, Launch, Link, News
from tinkex.engine.api import (
    BaseModel,
    EngineError,
    EngineLost,
    PassDone,
    PassJob,
    SampleDone,
    SampleJob,
)
from tinkex.engine.base_models import read_tokenizer

Role: TypeAlias = Literal["both", "trainer", "sampler"]


class WorkerProcess:
    """A process with an engine: it is started, reached, lost and started again.

    Its methods may be called on any thread.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        data_dir: Path | None = None,
        *,
        must_share: bool = False,
    ) -> None:
        """Know how a process is started; `connect` starts it.

        Args:
            name: The name of the replica.
            launch: Starts the process.
            data_dir: The directory that a process may see too; then files need not travel.
            must_share: True if a process that does not see the directory is an error.
        """
        self.name, self._launch, self.data_dir = name, launch, data_dir
        self._must_share = must_share
        self.wake: Callable[[], object] = lambda: None
        """Called when there are news, or the process is gone, on a thread of the link."""
        self.info: HostInfo | None = None
        self.epoch = 0
        self.lost: EngineLost | None = None
        """The reason why there is no process, once it is gone."""
        self._link: Link | None = None
        self.news: deque[News] = deque()
        self.models: Sequence[BaseModel] = ()
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
        self.news.clear()
        probe, token = None, secrets.token_hex(8)
        if self.data_dir is not None:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            probe = self.data_dir / f".probe-{self.name}-{token}"
            probe.write_text(token)
        current = object()
        self._current = current
        link = self._launch(
            lambda news: self._take(current, news), lambda why: self._lose(current, why)
        )
        try:
            info: HostInfo = link.call(Call(epoch, "reset", (probe, token))).result()
            self._check(info)
        except BaseException as error:
            self._current = object()
            link.close()
            if isinstance(error, EngineError) and not str(error).startswith("worker "):
                raise EngineError(f"worker {self.name!r}: {error}", "server") from None
            raise
        finally:
            if probe is not None:
                probe.unlink(missing_ok=True)
        self._link, self.info, self.epoch, self.lost = link, info, epoch, None
        self.models = [self._with_tokenizer(model) for model in info.models]
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
                f"{self.data_dir}; mount it there, or use --shared auto",
                "server",
            )

    def sees(self, directory: Path) -> bool:
        """Return True if the process can read and write a directory itself."""
        is_shared = self.data_dir is not None and directory.is_relative_to(self.data_dir)
        return is_shared and self.info is not None and self.info.sees

    def _take(self, sender: object, news: News) -> None:
        if sender is not self._current:
            return  # a process that was given up
        for line in news.logs:
            logging.getLogger(line.logger).log(line.level, "[%s] %s", self.name, line.text)
        if news.ended or news.drawn or news.steps:
            self.news.append(news)
            self.wake()

    def admit(
        self, method: str, done: type[PassDone | SampleDone], work: PassJob | SampleJob, *args: Any
    ) -> None:
        """Send work without waiting for its admission; a failure ends the work."""
        future = self.reach().call(Call(self.epoch, method, (work, *args)))
        sender = self._current

        def admitted(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, EngineLost):
                self._take(sender, News([done(work.job, error)]))

        future.add_done_callback(admitted)

    def tell(self, news: News) -> None:
        """Add news that did not come from the process."""
        self._take(self._current, news)

    def _lose(self, sender: object, why: str) -> None:
        if sender is not self._current or self.lost is not None:
            return
        self.lost = EngineLost(f"worker {self.name!r} is gone: {why}")
        self.wake()

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

    def _with_tokenizer(self, model: BaseModel) -> BaseModel:
        """Return a base model with its tokenizer, whose files may have to be fetched."""
        place = model.directory
        if place is None:
            return model
        if not place.is_dir():
            place = self._fetched / model.name.replace("/", "--")
            place.mkdir(parents=True, exist_ok=True)
            for name, content in self.call("text_files", model.name).items():
                (place / Path(name).name).write_bytes(content)
        tokenizer = functools.cache(functools.partial(read_tokenizer, model.name, place))
        return replace(model, directory=place, tokenizer=tokenizer)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Have the host call a method, and return its result.

        Raises:
            EngineLost: The process is gone; the call may or may not have taken place.
        """
        try:
            return self.reach().call(Call(self.epoch, method, args, named)).result()
        except EngineLost as error:
            raise self.lost or EngineLost(f"worker {self.name!r} is gone: {error}") from None

    def cast(self, method: str, *args: Any) -> None:
        """Send a call whose result nobody waits for; a process that is gone needs none."""
        if self.lost is None:
            with contextlib.suppress(EngineLost):
                self.reach().cast(Call(self.epoch, method, args))

    def reach(self) -> Link:
        """Return the link; raise EngineLost if the process is gone."""
        if self.lost is not None:
            raise self.lost
        assert self._link is not None, "the engine has not been connected"
        return self._link
