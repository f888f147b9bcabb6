"""Runs that are loaded, the kinds of work that they are asked for, and its order.

All functions of kinds of work but `after` are called on the thread of the run's worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from tinkex.engine.api import PassJob, Writer
from tinkex.server.database.interface import Run
from tinkex.server.runs.promises import Promise
from tinkex.server.workers.worker import Worker

T = TypeVar("T")


class Lane(Generic[T]):
    """The operations of one run, released in the order of their numbers.

    Example:
        >>> lane = Lane[str]()
        >>> lane.offer(2, "b"), lane.offer(1, "a")
        ([], ['a', 'b'])
    """

    def __init__(self, first: int = 1) -> None:
        self.next = first
        self._waiting: dict[int, T] = {}
        self._held: dict[int, int] = {}
        self.held_bytes = 0
        """Bytes of the operations that wait for a missing number, or are on their way to do so."""

    def offer(self, number: int, item: T) -> list[T]:
        """Take an operation in; returns those whose turn has come. A number that has passed is
        refused.
        """
        if number < self.next or number in self._waiting:
            raise ValueError(f"request number {number} has been used; the next one is {self.next}")
        self._waiting[number] = item
        return self._release()

    def _release(self) -> list[T]:
        released = []
        while self.next in self._waiting:
            released.append(self._waiting.pop(self.next))
            self.let_go(self.next)
            self.next += 1
        return released

    def hold(self, number: int, size: int) -> None:
        """Count the bytes of an operation that is about to be offered, until its turn has come."""
        self._held[number] = size
        self.held_bytes += size

    def let_go(self, number: int) -> None:
        """Count an operation's bytes no more."""
        self.held_bytes -= self._held.pop(number, 0)

    @property
    def free(self) -> int:
        """The first number that nothing has been offered under."""
        return max(self._waiting, default=self.next - 1) + 1

    @property
    def missing(self) -> int | None:
        """The number that holds others up, if any are held up."""
        return self.next if self._waiting else None

    def give_up(self) -> list[T]:
        """Stop waiting for the missing numbers; returns the operations that waited, which must now
        fail.
        """
        abandoned = [self._waiting[number] for number in sorted(self._waiting)]
        for number in self._waiting:
            self.let_go(number)
        self.next = self.free
        self._waiting.clear()
        return abandoned


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
    is_parked: bool = False
    """True while it waits for a worker: its requests are taken, and carried out later."""
    again: set[asyncio.Future[None]] = field(default_factory=set)
    """The operations of its journal that are being carried out again."""

    @property
    def name(self) -> str:
        """The run's id."""
        return self.run.model_id


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over data; it shares the engine's steps with those of other runs."""

    job: PassJob
    """The pass; it gets its name when it is started."""
    admitted: Callable[[int], object] | None = None
    """Called with the pass's number before it is put on disk, on the event loop."""


@dataclass(frozen=True)
class _Doing:
    """Work that is a call on the worker."""

    do: Callable[[LiveRun], Any]


class Step(_Doing):
    """An optimizer step; no gradient is left after it."""


class Discard(_Doing):
    """The loss of the gradient that was gathered."""


class Load(_Doing):
    """A change to saved weights; a snapshot is made at once, for they may be deleted afterwards."""


@dataclass(frozen=True)
class Save(_Doing):
    """A save; it waits for what its run was asked for before, other saves excepted."""

    after: Callable[[LiveRun, Any], Any] | None = None
    """Takes the result on the event loop, and returns the operation's."""


@dataclass(frozen=True)
class Unload(_Doing):
    """The end of a run; it comes even if a number before it never does."""

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
    base_model: str | None = None
    """The base model whose workers can make it; None for any."""


@dataclass(frozen=True, slots=True)
class LaneItem:
    """An operation that waits for its turn."""

    promise: Promise
    seq_id: int
    work: Work
