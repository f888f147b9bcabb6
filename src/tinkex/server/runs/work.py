"""Runs that are loaded, and the kinds of work that they are asked for.

All functions here but `after` are called on the thread of the run's worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinkex.engine.api import Writer
from tinkex.server.database.entities import Run
from tinkex.server.runs.lane import Lane
from tinkex.server.runs.promises import Promise
from tinkex.server.workers.worker import Worker


@dataclass(slots=True)
class LiveRun:
    """A training run whose adapter is in an engine."""

    run: Run
    worker: Worker
    """The worker that the run is at home on."""
    lane: Lane[LaneItem] = field(default_factory=lambda: Lane[LaneItem]())
    last: int | None = None
    """The number under which the run is unloaded; nothing comes after it."""
    gap: int | None = None
    gap_timer: asyncio.TimerHandle | None = None
    recent: dict[int, Promise] = field(default_factory=dict)
    """Promises by number, while their results may have to be kept beside the next snapshot."""
    since_snapshot: int = 0
    """The number of operations since the last snapshot was made."""
    snapshot_time: float = field(default_factory=time.monotonic)
    """The time of the last snapshot."""
    snapshot_rest: float = 0.0
    """The seconds after it without another one, as it took so long to write."""
    new_snapshot: tuple[int, Writer | None] | None = None
    """The number of a snapshot that is not in force yet, and what has to write its files."""
    committing: asyncio.Lock = field(default_factory=asyncio.Lock)
    commit: asyncio.Future[None] | None = None
    """The last snapshot's coming into force."""
    unsaved_samplers: dict[str, int] = field(default_factory=dict)
    """Nameless samplers of this run that are only in memory, and the numbers of their saves. The
    worker adds to it, so copy it before you go through it."""
    done: int = 0
    """The number of the operation that was carried out last."""
    is_between_steps: bool = True
    """True if no gradient is pending: only then does a snapshot stand for all that was done."""
    is_rebuilding: bool = False
    """True while its journal is replayed: requests wait for that."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over data; it shares the engine's steps with those of other runs."""

    start: Callable[[LiveRun, str], object]
    """Starts the pass on the engine, under the name given."""
    adds_gradient: bool
    admitted: Callable[[int], object] | None = None
    """Called with the pass's number before it is put on disk, on the event loop."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step; no gradient is left after it."""

    do: Callable[[LiveRun], Any]


@dataclass(frozen=True, slots=True)
class Discard:
    """The loss of the gradient that was gathered."""

    do: Callable[[LiveRun], Any]


@dataclass(frozen=True, slots=True)
class Load:
    """A change to saved weights; a snapshot is made at once, for they may be deleted afterwards."""

    do: Callable[[LiveRun], Any]


@dataclass(frozen=True, slots=True)
class Save:
    """A save; it waits for what its run was asked for before, other saves excepted."""

    do: Callable[[LiveRun], Any]
    after: Callable[[LiveRun, Any], Any] | None = None
    """Takes the result on the event loop, and returns the operation's."""


@dataclass(frozen=True, slots=True)
class Unload:
    """The end of a run; it comes even if a number before it never does."""

    do: Callable[[LiveRun], Any]
    after: Callable[[LiveRun, Any], Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused; its number is used up all the same."""

    why: str


Work: TypeAlias = Pass | Step | Discard | Load | Save | Unload | Refused
"""The work of a loaded run, which is done in the order of numbers."""


@dataclass(frozen=True, slots=True)
class Creation:
    """The making of a run or of a custom loss, under an id of its own."""

    name: str
    session_id: str
    request_id: str
    make: Callable[[], Awaitable[Any]]
    fits: Callable[[Run], bool] = lambda run: True
    """Return whether a run that exists is the one that is asked for."""


@dataclass(frozen=True, slots=True)
class LaneItem:
    """An operation that waits for its turn."""

    promise: Promise
    seq_id: int
    work: Work
