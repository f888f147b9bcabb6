"""The journals' threads: files are flushed together, and what could not be written leaves nothing
behind."""

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

from tinkex.server.runs import journal
from tinkex.server.runs.journal import (
    HEADER,
    Committer,
    DamagedJournalError,
    Entry,
    Journal,
    encode,
    read_records,
)

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


def test_files_of_many_runs_are_flushed_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        appending = [
            asyncio.ensure_future(journal(tmp_path / str(n)).append(1, {"op": "x"}))
            for n in range(3)
        ]
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(before, *appending)

    committing(work)
    for number in range(3):
        assert [
            entry.facts["op"] for entry in Journal(tmp_path / str(number), Committer()).read()
        ] == ["x"]


def test_unflushed_record_does_not_return_with_later_ones(
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
    assert [entry.facts["op"] for entry in Journal(tmp_path, Committer()).read()] == [
        "first",
        "third",
    ]


def test_empty_segment_is_reused(tmp_path: Path) -> None:
    async def work(open_journal: Open) -> None:
        journal = open_journal(tmp_path)
        journal.rotate()
        journal.rotate()
        await journal.append(1, {"op": "first"})
        journal.rotate()
        journal.rotate()
        await journal.append(2, {"op": "second"})

    committing(work)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "segment-00000001.log",
        "segment-00000002.log",
    ]


def test_segment_that_is_closed_while_its_first_write_fails_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = journal.Segment(tmp_path / "run" / "segment-00000001.log")

    # the run is let go at this moment, and its directory with it
    def gone(path: Path, levels: int) -> None:
        segment.close()
        raise FileNotFoundError(path)

    monkeypatch.setattr(journal, "sync_above", gone)
    with pytest.raises(FileNotFoundError):
        segment.write([b"x"], flush=False)
    assert segment._file is not None
    assert segment._file.closed


def test_closed_journal_refuses_records(
    tmp_path: Path,
) -> None:
    async def work(opened: Open) -> None:
        log = opened(tmp_path / "run")
        await log.append(1, {"op": "first"})
        # begins when the loop comes round
        coming = asyncio.ensure_future(log.append(2, {"op": "late"}))
        log.close()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(OSError, match="its run or session has ended"):
            await coming

    committing(work)
    assert not (tmp_path / "run").exists()


RECORDS = [
    encode(Entry(n, {"op": f"op-{n}", "type": "json"}, bytes(range(n % 100, n % 100 + 60))))
    for n in (1, 2**40, 3)
]


def journal_of(directory: Path, data: bytes) -> tuple[Journal, Path]:
    directory.mkdir()
    path = directory / "segment-00000001.log"
    path.write_bytes(data)
    return Journal(directory, Committer()), path


def test_flipped_bit_in_a_journal_is_found_and_files_stay_unchanged(tmp_path: Path) -> None:
    data = b"".join(RECORDS)
    found, path = journal_of(tmp_path / "run", data)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(
            DamagedJournalError, match=r"segment-00000001.log is damaged: .* byte \d+"
        ):
            found.read()
        assert path.read_bytes() == flipped


def test_journal_that_ends_within_a_record_loses_that_record_only(tmp_path: Path) -> None:
    data, whole = b"".join(RECORDS), len(RECORDS[0]) + len(RECORDS[1])
    found, path = journal_of(tmp_path / "run", data)
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        assert [entry.number for entry in found.read()] == [1, 2**40]
        assert path.stat().st_size == whole


@pytest.mark.parametrize("written", [0, HEADER.size, HEADER.size + 30])
def test_journal_that_ends_in_zeros_loses_the_record_that_was_not_written(
    tmp_path: Path, written: int
) -> None:
    """A file system may make a file longer before it writes the bytes."""
    last = encode(Entry(9, {"op": "last"}, b"x" * 2000))
    found, path = journal_of(
        tmp_path / "run", RECORDS[0] + last[:written] + bytes(len(last) - written)
    )
    assert [entry.number for entry in found.read()] == [1]
    assert path.read_bytes() == RECORDS[0]


def test_damage_in_a_later_segment_leaves_the_torn_end_of_an_earlier_one(tmp_path: Path) -> None:
    found, path = journal_of(tmp_path / "run", RECORDS[0] + RECORDS[1][:-1])
    path.with_name("segment-00000002.log").write_bytes(b"!" + RECORDS[2][1:])
    with pytest.raises(DamagedJournalError, match=r"segment-00000002\.log"):
        found.read()
    assert path.stat().st_size == len(RECORDS[0]) + len(RECORDS[1]) - 1


def test_file_that_was_put_in_force_whole_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(DamagedJournalError, match=r"results\.log"):
        list(read_records(tmp_path / "results.log", RECORDS[0][:-1], may_be_torn=False))
