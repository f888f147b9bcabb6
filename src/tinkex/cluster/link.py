"""The link between the server and an engine in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tinkex.engine.api import BaseModel, DrawnToken, EngineError, PassDone, SampleDone

CHUNK = 8 << 20
"""The number of bytes of a file that travel in one message."""


class StaleEpochError(EngineError):
    """A call from a server that has lost this worker to a newer one."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(
            f"this worker belongs to epoch {newest}; a call of epoch {epoch} changes nothing",
            "server",
        )
        self._made_of = (epoch, newest)

    def __reduce__(self) -> tuple[type[StaleEpochError], tuple[int, int]]:
        return StaleEpochError, self._made_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """The engine that a worker process makes.

    Attributes:
        engine: The kind of engine, by its name in the registry; or `module:function` of a function
            that returns an engine.
        models: Directories or hub ids by model name.
        device: The device, or `auto`.
        dtype: The type of the base weights, or None for the engine's default.
        threads: The number of threads of a CPU, or None for the engine's choice.
        options: Arguments of a function that is named in `engine`.
    """

    engine: str
    models: Mapping[str, str | Path] = field(default_factory=dict)
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A method that a host calls, for a server of this epoch."""

    epoch: int
    method: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a worker's log."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class News:
    """Events of an engine since the last news.

    Attributes:
        ended: The work that ended.
        drawn: The tokens that jobs with a listener got, in order.
        steps: The number of steps that were made, by kind.
        logs: The lines that were logged.
    """

    ended: Sequence[PassDone | SampleDone] = ()
    drawn: Sequence[tuple[str, Sequence[DrawnToken]]] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    logs: Sequence[LogLine] = ()


@dataclass(frozen=True, slots=True)
class HostInfo:
    """A worker process after its reset.

    Attributes:
        models: The base models of its engine.
        version: The version of tinkex that it runs.
        node: The machine.
        place: The machine and process, for people.
        repeats: True if the same calls give the same bits.
        sees: True if it can read the file that the server wrote as a probe.
    """

    models: Sequence[BaseModel]
    version: str
    node: str
    place: str
    repeats: bool
    sees: bool


class Link(Protocol):
    """A way to one worker process; its methods may be called on any thread.

    When the process is gone, futures of calls fail with `EngineLost`.
    """

    def call(self, call: Call) -> Future[Any]:
        """Send a call; calls of one thread are carried out in order."""

    def cast(self, call: Call) -> None:
        """Send a call whose result nobody waits for."""

    def ping(self) -> Future[Any]:
        """Ask for a sign of life, which a busy engine does not delay."""

    def close(self) -> None:
        """End the process and the link."""


OnNews = Callable[[News], None]
OnLost = Callable[[str], None]


class Launch(Protocol):
    """Starts a worker process."""

    def __call__(self, on_news: OnNews, on_lost: OnLost) -> Link:
        """Start a process, or take over one that an earlier server left.

        Args:
            on_news: Called with the engine's news, on a thread of the link.
            on_lost: Called once with the reason when the process is gone.

        Raises:
            EngineError: It cannot be started.
        """
