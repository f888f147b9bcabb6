"""The journals' threads: files are flushed together, and what could not be written leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tinkex.server import journal
from tinkex.server.journal import Committer, Journal

Open = Callable[[Path], Journal]


def committing(work: Callable[[Open], Awaitable[None]]) -> None:
    """Do something with journals that share a committer."""

    async def go() -> None:
        committer, opened = Committer(), list[Journal]()

        def journal(directory: Path) -> Journal:
            opened.append(Journal(directory, committer))
            return opened[-1]

        try:
            await work(journal)
        finally:
            committer.stop()
            for each in opened:
                each.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_the_files_of_many_runs_are_flushed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, together = threading.Event(), threading.Barrier(3)
    flush, first = os.fdatasync, itertools.count()

    def flush_together(handle: int) -> None:
        if next(first) == 0:
            assert opened.wait(5)
        else:
            together.wait(5)
        flush(handle)

    monkeypatch.setattr(os, "fdatasync", flush_together)

    async def work(journal: Open) -> None:
        before = asyncio.ensure_future(journal(tmp_path / "before").append(1, {"op": "before"}))
        await asyncio.sleep(0.1)
        appending = [asyncio.ensure_future(journal(tmp_path / str(n)).append(1, {"op": "x"})) for n in range(3)]
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(before, *appending)

    committing(work)
    for number in range(3):
        assert [entry.facts["op"] for entry in Journal(tmp_path / str(number), Committer()).read()] == ["x"]


def test_what_could_not_be_flushed_does_not_come_to_life_with_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fdatasync

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async def work(open_journal: Open) -> None:
        journal = open_journal(tmp_path)
        await journal.append(1, {"op": "first"})
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="no space"):
            await journal.append(2, {"op": "refused"})
        monkeypatch.setattr(os, "fdatasync", flush)
        await journal.append(3, {"op": "third"})

    committing(work)
    assert [entry.facts["op"] for entry in Journal(tmp_path, Committer()).read()] == ["first", "third"]


def test_a_segment_that_nothing_was_written_to_is_gone_on_with(tmp_path: Path) -> None:
    async def work(open_journal: Open) -> None:
        journal = open_journal(tmp_path)
        journal.rotate()
        journal.rotate()
        await journal.append(1, {"op": "first"})
        journal.rotate()
        journal.rotate()
        await journal.append(2, {"op": "second"})

    committing(work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["segment-00000001.log", "segment-00000002.log"]


def test_a_segment_that_is_closed_while_its_first_write_fails_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = journal.Segment(tmp_path / "run" / "segment-00000001.log")

    def gone(path: Path) -> None:  # the run is let go at this moment, and its directory with it
        segment.close()
        raise FileNotFoundError(path)

    monkeypatch.setattr(journal, "sync_directory", gone)
    with pytest.raises(FileNotFoundError):
        segment.write([b"x"], flush=False)
    assert segment._file is not None
    assert segment._file.closed


def test_what_comes_for_a_journal_that_was_closed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def work(opened: Open) -> None:
        log = opened(tmp_path / "run")
        await log.append(1, {"op": "first"})
        coming = asyncio.ensure_future(log.append(2, {"op": "late"}))  # begins when the loop comes round
        log.close()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(OSError, match="its run or session has ended"):
            await coming

    committing(work)
    assert not (tmp_path / "run").exists()
