"""Decide what a step runs: which rows, which blocks of the cache, which chunks of prompts.

This is plain Python on integers and knows no tensors. A `Device` executes what is decided.

Owners share rows, blocks and the tokens of prompts. Each owner that has work may have an equal
part. Others may use what an owner leaves free, until it comes back; then it gets a row or blocks of
the owner that has most, in the next step. An owner's only job never gives way to another owner, so
that all make progress. A sample that gives way keeps its tokens, and is fed them again later. Jobs
of one owner are admitted in the order they came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tinkex.engine.api import EngineError
from tinkex.engine.sample.blocks import BLOCK, Blocks, blocks_for
from tinkex.engine.stepping import Shares

if TYPE_CHECKING:
    from tinkex.engine.sample.jobs import Job, Sample
    from tinkex.engine.sample.passes import Row, Source


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


PATIENCE = 200
"""After so many steps without an admitted job, an owner's next job comes before those of others."""


class Device(Protocol):
    """The tensors behind rows and blocks."""

    def join(self, running: Running, blocks: list[int]) -> Row:
        """Make a row in these blocks that follows the job's prompt; raise without memory for it."""

    def leave(self, sample: Sample) -> None:
        """Free what a sample's row has besides its blocks."""

    def settle(self) -> None:
        """Read the tokens drawn so far, and finish the jobs that have ended."""

    def removed(self, running: Running) -> None:
        """Free what is kept for a job that no longer runs."""


class Scheduler:
    """The jobs on one base model: those that wait, and those that run."""

    def __init__(
        self, device: Device, blocks: Blocks, *, max_rows: int, chunk: int, share_prefixes: bool
    ) -> None:
        self._device, self._blocks, self._max_rows = device, blocks, max_rows
        self._chunk, self._share_prefixes = chunk, share_prefixes
        self.queues: dict[str, deque[tuple[str, Job]]] = {}
        """The waiting jobs of each owner; those that were put back come first."""
        self.running: list[Running] = []
        self.room = Room(self.running, self.queues, blocks, max_rows)
        self._shares = Shares()
        self._refused = Counter[str]()
        """For each owner without a running job, the steps since one was admitted."""

    def start(self, name: str, job: Job, owner: str) -> None:
        """Queue a job; refuse one that would not fit even alone."""
        end = job.prompt.size + max(0, job.limit - 1)
        needed = blocks_for(job.prompt.size) + blocks_for(end) - job.prompt.size // BLOCK
        if needed > self._blocks.count:
            raise EngineError(
                f"a prompt of {job.prompt.size} tokens and {job.limit} more need {needed} blocks "
                f"of {BLOCK} positions; the cache of this server has {self._blocks.count}"
            )
        self.queues.setdefault(owner, deque()).append((name, job))

    def cancel(self, name: str) -> None:
        """Drop a job."""
        for owner, queue in list(self.queues.items()):
            if any(waiting == name for waiting, _ in queue):
                self.queues[owner] = deque(item for item in queue if item[0] != name)
                self._forget_empty(owner)
        for running in [running for running in self.running if running.name == name]:
            self._remove(running)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────

    def seat(self) -> None:
        """Give rows to samples that wait for one, and each row the block its next token needs."""
        seating = self.room.seating()
        while (running := seating.next()) is not None:
            seating.note(running, is_seated=running in self.running and self._seat_next(running))
        for running in list(self.running):
            for sample in list(running.rows):
                row = sample.row
                if row is None or row.length < len(row.blocks) * BLOCK or running.job.full(sample):
                    continue
                if self._make_room(sample, running.owner):
                    row.blocks += self._blocks.take(1)

    def next_rows(self) -> list[tuple[Running, Sample]]:
        """Return the samples with a row that may have another token."""
        return [
            (running, sample)
            for running in self.running
            for sample in running.rows
            if sample.row is not None and not running.job.full(sample)
        ]

    def unseat(self, running: Running, sample: Sample, *, again: bool) -> None:
        """Take a sample's row away; it waits for another if it is to run again."""
        assert sample.row is not None
        self._device.leave(sample)
        self._blocks.release(sample.row.blocks)
        running.rows.remove(sample)
        sample.row, sample.drawn = None, 0
        if again:
            running.waiting.insert(0, sample)

    def _seat_next(self, running: Running) -> bool:
        """Give a row to the first of a job's waiting samples; return False without room for it."""
        sample, prompt = running.waiting[0], running.job.prompt.size
        shared = running.blocks[: prompt // BLOCK]
        needed = blocks_for(prompt + len(sample.tokens)) - len(shared)
        if self.room.seated >= self._max_rows:
            if (given := self.room.row_for(running.owner)) is None:
                return False
            self.unseat(*given, again=True)
        while not self._clear(running.owner, needed):
            if self.room.seated or running is not self.running[0] or self.running[-1] is running:
                return False
            self._put_back(self.running[-1])
        self._blocks.hold(shared)
        blocks = [*shared, *self._blocks.take(blocks_for(prompt) - len(shared))]
        try:
            sample.row = self._device.join(running, blocks)
        except Exception as error:  # no memory
            self._blocks.release(blocks)
            running.fail(error)
            return False
        sample.fed = 0
        running.rows.append(running.waiting.pop(0))
        return True

    def _clear(self, owner: str, needed: int, keep: Container[Running] = ()) -> bool:
        """Free blocks of owners with more than their part; return False if too few can be freed.

        One block for each row to grow is kept besides those that are needed.
        """
        while self._blocks.free < needed + self.room.seated:
            given = self.room.blocks_for(owner, needed, keep)
            if given is None:
                return False
            self._displace(given)
        return True

    def _make_room(self, sample: Sample, owner: str) -> bool:
        """Free a block for a row to grow; return False if the row itself had to go."""
        # a sample that is put back keeps all its tokens, and one that has ended makes room
        if not self._blocks.free:
            self._device.settle()
        while sample.row is not None and not self._blocks.free:
            self._displace(self.room.growing(owner))
        return sample.row is not None

    def _displace(self, given: Running | tuple[Running, Sample]) -> None:
        if isinstance(given, Running):
            self._put_back(given)
        else:
            self.unseat(*given, again=True)

    def _put_back(self, running: Running) -> None:
        """Put a job back to the head of its queue; it keeps its tokens but not its prompt."""
        self._remove(running)
        self.queues.setdefault(running.owner, deque()).appendleft((running.name, running.job))

    def _remove(self, running: Running) -> None:
        for sample in list(running.rows):
            self.unseat(running, sample, again=False)
        self._blocks.release(running.blocks)
        self.running.remove(running)
        self._device.removed(running)

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────

    def ended(self) -> list[Running]:
        """Return the jobs that have ended or failed."""
        return [running for running in self.running if running.error or running.ended]

    def finish(self, running: Running) -> list[int]:
        """Remove a job; return blocks whose contents may be broken and that no other job holds."""
        rows = [sample.row for sample in running.rows if sample.row is not None]
        held = [*running.blocks, *(block for row in rows for block in row.blocks)]
        self._remove(running)
        if running.error is None:
            return []
        self._blocks.withdraw(held)
        return [block for block in set(held) if not self._blocks.held(block)]

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────

    def allot(self) -> dict[Running, int]:
        """Return how many tokens of which prompts to run now: each owner's part, then the rest."""
        begun = [running.owner for running in self.running if not running.ready]
        # of two that had the same, the first to come
        owners = list(dict.fromkeys([*begun, *self.queues]))
        self._shares.note(owners)
        order = sorted(owners, key=self._shares.had)
        parts: dict[Running, int] = {}
        budget = self._chunk
        for most in (max(BLOCK, budget // max(1, len(owners))), budget):
            for owner in order:
                admits = self._patient(order) in (None, owner)
                budget -= self._allot_to(owner, min(most, budget), parts, admits=admits)
        self._refused = Counter(
            {owner: self._refused[owner] + 1 for owner in owners if self.room.has_nothing(owner)}
        )
        return parts

    def _patient(self, order: Sequence[str]) -> str | None:
        """Return an owner that has waited so long that no other is admitted before it."""
        return next((owner for owner in order if self._refused[owner] >= PATIENCE), None)

    def _allot_to(self, owner: str, budget: int, parts: dict[Running, int], *, admits: bool) -> int:
        left = budget
        for running in self.running:
            if left and running.owner == owner and not running.ready and running.error is None:
                left -= self._extend(running, left, parts)
        while (
            admits
            and left
            and owner in self.queues
            and (admitted := self._admit(owner, parts)) is not None
        ):
            left -= self._extend(admitted, left, parts)
        return budget - left

    def _extend(self, running: Running, most: int, parts: dict[Running, int]) -> int:
        """Allot more of a prompt, and share its full blocks.

        They are shared before they are written: a job that finds them attends later.
        """
        start = running.done + parts.get(running, 0)
        stop = min(running.job.prompt.size, start + most)
        if stop == start:
            return 0
        if self._share_prefixes:
            for index in range(start // BLOCK, stop // BLOCK):
                self._blocks.publish(running.blocks[index], running.job.keys[index])
        parts[running] = stop - running.done
        return stop - start

    def _admit(self, owner: str, parts: Container[Running]) -> Running | None:
        """Admit an owner's next job if its prompt fits and each row can still grow by a block."""
        name, job = self.queues[owner][0]
        if not self.room.admits(owner):
            return None
        known = job.keys[: job.first_scored // BLOCK] if self._share_prefixes else []
        blocks = self._blocks.find(known)
        needed = blocks_for(job.prompt.size) - len(blocks)
        if not self._clear(owner, needed, parts):
            self._blocks.release(blocks)
            return None
        self.queues[owner].popleft()
        self._forget_empty(owner)
        if job.reused is None:  # not when it comes back
            self._shares.charge(owner, job.prompt.size + len(job.samples) * job.limit)
            job.reused = len(blocks) * BLOCK
        waiting = [sample for sample in job.samples if sample.stop_reason is None]
        found = len(blocks) * BLOCK
        running = Running(name, job, owner, blocks + self._blocks.take(needed), found, waiting)
        self.running.append(running)
        return running

    def _forget_empty(self, owner: str) -> None:
        if not self.queues[owner]:
            del self.queues[owner]
