"""The scheduler of sampling, driven without tensors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tinkex.engine.api import EngineError
from tinkex.engine.sample.blocks import BLOCK, Blocks
from tinkex.engine.sample.step_scheduler import PATIENCE, Scheduler


def job_of(prompt: int, samples: int = 1, limit: int = 8, keys: str = "") -> Any:
    """A job of which only the numbers are there; `keys` has a letter for each block it shares."""
    each = [
        SimpleNamespace(index=index, tokens=[], drawn=0, fed=0, row=None, stop_reason=None)
        for index in range(samples)
    ]
    return SimpleNamespace(
        prompt=SimpleNamespace(size=prompt),
        limit=limit,
        samples=each,
        keys=[f"{id(each)}{at}" if at >= len(keys) else keys[: at + 1] for at in range(prompt)],
        first_scored=prompt - 1,
        reused=None,
        full=lambda sample: len(sample.tokens) + sample.drawn >= limit,
    )


@dataclass
class Machine:
    """Runs what a scheduler decides, by counting."""

    blocks: int = 12
    max_rows: int = 4
    chunk: int = 2 * BLOCK
    calls: list[tuple[str, Any]] = field(default_factory=list)
    is_full: bool = False

    def __post_init__(self) -> None:
        self.pool = Blocks(self.blocks)
        self.scheduler = Scheduler(
            self, self.pool, max_rows=self.max_rows, chunk=self.chunk, share_prefixes=True
        )

    def join(self, running: Any, blocks: list[int]) -> Any:
        if self.is_full:
            raise MemoryError
        self.calls.append(("join", running.name))
        return SimpleNamespace(blocks=blocks, length=running.job.prompt.size)

    def leave(self, sample: Any) -> None:
        self.calls.append(("leave", len(sample.tokens)))

    def settle(self) -> None:
        self.calls.append(("settle", None))
        self.take_out()

    def removed(self, running: Any) -> None:
        self.calls.append(("removed", running.name))

    def take_out(self) -> list[str]:
        ended = self.scheduler.ended()
        for running in ended:
            self.scheduler.finish(running)
        return [running.name for running in ended]

    def draw(self, running: Any, sample: Any) -> bool:
        sample.tokens.append(0)
        if len(sample.tokens) == running.job.limit:
            sample.stop_reason = "length"
        return sample.stop_reason is not None

    def step(self) -> tuple[list[str], dict[str, int], list[str]]:
        """The jobs whose rows ran, the tokens of prompts that ran, and the jobs that ended."""
        self.scheduler.seat()
        rows = self.scheduler.next_rows()
        for running, sample in rows:
            assert sample.row is not None
            sample.row.length += 1
            sample.fed += 1
            if sample.fed < len(sample.tokens):  # fed again
                continue
            if self.draw(running, sample):
                self.scheduler.unseat(running, sample, again=False)
        parts = self.scheduler.allot()
        for running, count in parts.items():
            running.done += count
            running.ready = running.done == running.job.prompt.size
            for sample in list(running.waiting) if running.ready else ():
                if not sample.tokens and self.draw(running, sample):
                    running.waiting.remove(sample)
        chunks = {running.name: count for running, count in parts.items()}
        return [running.name for running, _ in rows], chunks, self.take_out()


def finish(machine: Machine, steps: int = 500) -> list[str]:
    ended: list[str] = []
    for _ in range(steps):
        ended += machine.step()[2]
        if not machine.scheduler.queues and not machine.scheduler.running:
            assert machine.pool.free == machine.pool.count
            return ended
    pytest.fail(f"only {ended} have ended")


def test_prompts_run_in_chunks_and_rows_follow() -> None:
    machine = Machine()
    machine.scheduler.start("long", job_of(3 * BLOCK, limit=2), "a")
    assert machine.step() == ([], {"long": 2 * BLOCK}, [])
    assert machine.step() == ([], {"long": BLOCK}, [])
    assert machine.step() == (["long"], {}, ["long"])
    assert finish(machine) == []


def test_owners_share_a_chunk() -> None:
    machine = Machine()
    for name, owner in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        machine.scheduler.start(name, job_of(2 * BLOCK), owner)
    assert machine.step()[1] == {"a1": BLOCK, "b1": BLOCK}


def test_prefix_is_run_once() -> None:
    machine = Machine()
    machine.scheduler.start("one", job_of(2 * BLOCK + 3, keys="xy"), "a")
    finish(machine)
    machine.scheduler.start("two", second := job_of(2 * BLOCK + 5, keys="xy"), "a")
    assert machine.step()[1] == {"two": 5}
    assert second.reused == 2 * BLOCK


def test_new_owner_gets_a_row_from_the_largest_owner() -> None:
    machine = Machine()
    machine.scheduler.start("many", job_of(3, samples=6, limit=30), "a")
    for _ in range(3):
        machine.step()
    machine.scheduler.start("one", job_of(3, limit=30), "b")
    machine.step()
    rows, *_ = machine.step()
    assert sorted(rows) == ["many"] * 3 + ["one"]
    assert sorted(finish(machine)) == ["many", "one"]


def test_row_that_grows_takes_the_block_of_the_youngest() -> None:
    machine = Machine(blocks=5)
    for name in ("first", "second"):
        machine.scheduler.start(name, job_of(BLOCK - 2, limit=20), "a")
    ended = finish(machine)
    assert ended == ["first", "second"]
    assert ("settle", None) in machine.calls
    joined = [name for call, name in machine.calls if call == "join"]
    assert joined == ["first", "second", "second"]


def test_job_without_memory_for_a_row_fails_alone() -> None:
    machine = Machine(is_full=True)
    machine.scheduler.start("one", job_of(3), "a")
    machine.step()
    (running,) = machine.scheduler.running
    machine.scheduler.seat()
    assert isinstance(running.error, MemoryError)
    assert machine.take_out() == ["one"]
    assert machine.pool.free == machine.pool.count


def test_job_that_never_fits_is_refused() -> None:
    machine = Machine(blocks=2)
    with pytest.raises(EngineError, match="need 3 blocks of 64 positions"):
        machine.scheduler.start("large", job_of(2 * BLOCK), "a")


def test_large_job_is_admitted_after_some_patience() -> None:
    """One that finds no room among a stream of short jobs comes before them after a while."""
    machine = Machine(blocks=8)
    for step in range(2 * PATIENCE):
        if len(machine.scheduler.queues.get("stream", ())) < 3:
            machine.scheduler.start(f"{step}", job_of(BLOCK + 1, limit=9 + step % 5), "stream")
        if step == 5:
            machine.scheduler.start("large", job_of(5 * BLOCK, limit=1), "other")
        if "large" in machine.step()[2]:
            assert step > PATIENCE
            return
    pytest.fail("the large job never ran")


def test_cancelled_job_gives_everything_back() -> None:
    machine = Machine()
    machine.scheduler.start("runs", job_of(70, samples=3, limit=30), "a")
    machine.scheduler.start("waits", job_of(600), "b")
    for _ in range(3):
        machine.step()
    for name in ("runs", "waits"):
        machine.scheduler.cancel(name)
    assert finish(machine, 1) == []


def test_scheduler_runs_without_torch() -> None:
    program = f"""
import sys
sys.modules["torch"] = None
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
from test_step_scheduler import Machine, finish, job_of
machine = Machine()
machine.scheduler.start("job", job_of(200, samples=2), "a")
assert finish(machine) == ["job"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
