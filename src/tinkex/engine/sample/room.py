"""The shares of owners in rows and blocks, where there is no room for all.

Each owner that has work may have an equal part. Others may use what an owner leaves free, until it
comes back; then it gets a row or blocks of the owner that has most. An owner's only job never gives
way to another owner, so that all make progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.engine.sample.blocks import BLOCK, Blocks

if TYPE_CHECKING:
    from tinkex.engine.sample.jobs import Job, Sample
    from tinkex.engine.sample.passes import Source


@dataclass(eq=False, slots=True)
class Running:
    """An admitted job: the blocks of its prompt, how far that has been run, and its samples."""

    name: str
    job: Job
    owner: str
    blocks: list[int]
    done: int
    waiting: list[Sample]
    rows: list[Sample] = field(default_factory=list)
    ready: bool = False
    """The prompt has been run and every sample has its first token."""
    moved: Source | None = None
    """The weights it goes on with once its prompt has been scored."""
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Return whether every sample has ended."""
        return self.ready and not self.waiting and not self.rows

    def fail(self, error: Exception) -> None:
        """Keep the first error."""
        self.error = self.error or error


@dataclass(frozen=True, slots=True)
class Room:
    """Chooses the next owner, and the job or sample that gives way; the scheduler executes it."""

    _running: Sequence[Running]
    _queues: Mapping[str, object]
    _blocks: Blocks
    _max_rows: int

    @property
    def seated(self) -> int:
        """Return the number of rows that are taken."""
        return sum(len(running.rows) for running in self._running)

    def admits(self, owner: str) -> bool:
        """Return whether an owner's next job may begin: by free rows, or by its part."""
        held = Counter[str]()
        for running in self._running:
            held[running.owner] += len(running.rows) + len(running.waiting)
        return held.total() < self._max_rows or held[owner] < self._part(self._max_rows)

    def seating(self) -> Seating:
        """Return the order in which waiting samples get rows."""
        return Seating(
            [running for running in self._running if running.ready and running.waiting],
            self._rows(),
        )

    def row_for(self, owner: str) -> tuple[Running, Sample] | None:
        """Return a sample that must give its row to an owner below its part, or None."""
        rows, part = self._rows(), self._part(self._max_rows)
        richest = max(rows, key=rows.__getitem__, default=owner)
        if rows[owner] >= part or rows[richest] <= part:
            return None
        return self._cheapest(richest)

    def blocks_for(
        self, owner: str, needed: int, keep: Container[Running]
    ) -> Running | tuple[Running, Sample] | None:
        """Return a job or a sample that must give its blocks to an owner below its part, or None.

        Jobs to keep are about to run, and others may have found the blocks they will write.
        """
        used, part = self._used(), self._part(self._blocks.count)
        if used[owner] + needed > part:
            return None
        return next(
            (found for rich in _most_first(used, part) if (found := self._movable(rich, keep))),
            None,
        )

    def growing(self, owner: str) -> Running | tuple[Running, Sample]:
        """Return a job or a sample that must give its blocks for a row of an owner to grow.

        It is one of the owner that has most, if that is another and has more than one. Otherwise it
        is the youngest of this owner.
        """
        used = self._used()
        richest = max(used, key=used.__getitem__)
        if richest != owner and (found := self._movable(richest)) is not None:
            return found
        youngest = next(running for running in reversed(self._running) if running.owner == owner)
        return (youngest, youngest.rows[-1]) if youngest.rows else youngest

    def has_nothing(self, owner: str) -> bool:
        """Return whether no job of an owner has begun."""
        return all(running.owner != owner for running in self._running)

    def _movable(
        self, owner: str, keep: Container[Running] = ()
    ) -> Running | tuple[Running, Sample] | None:
        """Return the thing an owner can best do without; None if it has only one."""
        mine = [running for running in self._running if running.owner == owner]
        idle = [running for running in mine if not running.rows and running not in keep]
        if idle and len(mine) > 1:
            return idle[-1]
        return self._cheapest(owner) if sum(len(running.rows) for running in mine) > 1 else None

    def _cheapest(self, owner: str) -> tuple[Running, Sample]:
        """Return the sample with the fewest tokens to feed again, the youngest of those."""
        mine = [
            (running, sample)
            for running in self._running
            if running.owner == owner
            for sample in running.rows
        ]
        return min(reversed(mine), key=lambda pair: len(pair[1].tokens))

    def _part(self, total: int) -> int:
        """Return each owner's part of so many."""
        owners = {running.owner for running in self._running} | self._queues.keys()
        return max(1, total // max(1, len(owners)))

    def _rows(self) -> Counter[str]:
        rows = Counter[str]()
        for running in self._running:
            rows[running.owner] += len(running.rows)
        return rows

    def _used(self) -> Counter[str]:
        """Return the blocks each owner holds; those that samples share count once."""
        used = Counter[str]()
        for running in self._running:
            shared = running.job.prompt.size // BLOCK
            own = sum(
                len(sample.row.blocks) - shared for sample in running.rows if sample.row is not None
            )
            used[running.owner] += len(running.blocks) + own
        return used


class Seating:
    """Jobs whose samples wait for rows; next is the oldest job of the owner with fewest rows."""

    def __init__(self, running: Iterable[Running], rows: Counter[str]) -> None:
        self._rows = rows
        self._jobs: dict[str, list[Running]] = {}
        for one in running:
            self._jobs.setdefault(one.owner, []).append(one)

    def next(self) -> Running | None:
        """Return the next job, or None."""
        if not self._jobs:
            return None
        return self._jobs[min(self._jobs, key=self._rows.__getitem__)][0]

    def note(self, running: Running, *, is_seated: bool) -> None:
        """Note whether a job got a row; drop it if not, or if all its samples have rows."""
        self._rows[running.owner] += is_seated
        if not is_seated or not running.waiting:
            jobs = self._jobs[running.owner]
            jobs.remove(running)
            if not jobs:
                del self._jobs[running.owner]


def _most_first(used: Counter[str], part: int) -> list[str]:
    """Return the owners that hold more than their part, the richest first."""
    return [owner for owner, count in used.most_common() if count > part]
