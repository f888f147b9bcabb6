"""Append-only logs that hold each request before it is acknowledged.

A log is a directory of segments. A record is a header, a few facts as JSON, and a request's body
as it came. Header and contents have a checksum each. A torn record at the end of a segment (the
process or the machine stopped while it was written) was never acknowledged and is cut off. Any
other record with a wrong checksum was damaged later: reading it raises an error and changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from tinkex.server.files.data_dir import sync_above

HEADER = struct.Struct("<4sIQqII")
"""Magic, lengths of facts and body, number, checksum of facts and body, checksum of this header."""
MAGIC = b"TXJ2"
SECTOR = 512
"""Bytes that a disk writes at once: after a power loss a hole of zeros is at least that long."""
SEGMENT_BYTES = 16 << 20
OFF_LOOP_BYTES = 64_000
"""Bodies that are larger than this are made a record in a thread, which takes a second for each
GiB."""
FLUSHES = 16
"""Files that are flushed at the same time."""


class DamagedJournalError(Exception):
    """A record that was safe on disk does not have the bytes that were written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record: the number of a request (or whatever orders a log), facts about it, its body."""

    number: int
    facts: dict[str, Any]
    body: bytes


class Place(NamedTuple):
    """The place of a record in a log. Once a record could not be written, those after it lie
    elsewhere.
    """

    segment: Path
    offset: int
    size: int


class Segment:
    """A file of a log, created on its first write, by threads that may wait for the disk."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file: FileIO | None = None
        self._size = 0
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, pieces: Sequence[bytes], *, flush: bool) -> None:
        """Append to the file, and see it safe on disk: all of it, or nothing when that fails."""
        try:
            with self._writing:
                self._append(pieces, flush=flush)
        finally:
            if self._is_closed:  # meanwhile, and perhaps its directory is gone as well
                self.close()

    def _append(self, pieces: Sequence[bytes], *, flush: bool) -> None:
        if self._is_closed:
            raise OSError(f"{self.name} is closed: its run or session has ended")
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "xb")
            sync_above(self._path, 3)  # up to the data directory
        try:
            rest = memoryview(b"".join(pieces))
            while rest:
                rest = rest[self._file.write(rest) :]
            if flush:
                os.fdatasync(self._file.fileno())
        except OSError:
            # what was refused must not come to life in a later one
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size = self._file.tell()

    def close(self) -> None:
        """Let go of the file, at once or when what is being written to it has been."""
        self._is_closed = True
        if self._writing.acquire(blocking=False):
            try:
                if self._file is not None:
                    self._file.close()
            finally:
                self._writing.release()


@dataclass(frozen=True, slots=True)
class _Job:
    segment: Segment
    data: bytes
    done: asyncio.Future[None]
    last: bool = False
    """True if nothing more will come for this file, so that it is closed."""


class Committer:
    """Threads that write and flush for all logs; writes during a flush share the next flush.

    The files of a turn are flushed at the same time: the disk takes many flushes in about the time
    of one, and with a file for each of many runs, one after the other would make all of them wait
    for the sum.
    """

    def __init__(self, *, flush: bool = True) -> None:
        self._flush = flush
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, segment: Segment, data: bytes, *, last: bool = False) -> asyncio.Future[None]:
        """Append bytes to a file; the future is done when they are safe. Call it on the event loop.

        After the `last` ones the file is closed.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinkex-journal", daemon=True)
            self._thread.start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(segment, data, done, last))
        return done

    def stop(self) -> None:
        """Finish what was asked for, and end the threads."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(30)
            self._thread = None

    def _run(self) -> None:
        stopping = False
        with ThreadPoolExecutor(FLUSHES, "tinkex-flush") as flushers:
            while not stopping:
                batch = [self._jobs.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        batch.append(self._jobs.get_nowait())
                stopping = None in batch
                self._commit([job for job in batch if job is not None], flushers)

    def _commit(self, batch: list[_Job], flushers: ThreadPoolExecutor) -> None:
        by_segment: defaultdict[Segment, list[_Job]] = defaultdict(list)
        for job in batch:
            by_segment[job.segment].append(job)
        if len(by_segment) == 1:
            self._write(batch)
        else:
            wait([flushers.submit(self._write, jobs) for jobs in by_segment.values()])

    def _write(self, jobs: list[_Job]) -> None:
        """Write what one file gets, and say so."""
        failed: OSError | None = None
        try:
            jobs[0].segment.write([job.data for job in jobs], flush=self._flush)
        except (OSError, ValueError) as error:
            failed = error if isinstance(error, OSError) else OSError(str(error))
        if any(job.last for job in jobs):  # here and not on the loop, which may have ended by then
            jobs[0].segment.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            jobs[0].done.get_loop().call_soon_threadsafe(_settle, jobs, failed)


def _settle(jobs: list[_Job], error: OSError | None) -> None:
    for job in jobs:
        if job.done.done():
            continue
        if error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(error)


class Journal:
    """One append-only log in a directory of its own."""

    def __init__(self, directory: Path, committer: Committer) -> None:
        self.directory = directory
        self._committer = committer
        self._file: Segment | None = None
        self._last: int | None = None
        self._size = 0
        self.is_closed = False
        self.failing: asyncio.Future[None] | None = None
        """The record of a failure that is on its way to the disk."""
        self.highest: dict[Path, int] = {}
        """The highest number in each segment: what can be dropped when everything up to a number
        can."""
        self._sizes: dict[Path, int] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes of all segments that have not been dropped."""
        return sum(list(self._sizes.values()))  # the worker asks as well

    @property
    def current(self) -> Path | None:
        """The segment that is being written to."""
        return None if self._file is None else Path(self._file.name)

    async def append(self, number: int, facts: dict[str, Any], body: bytes = b"") -> Place:
        """Add a record; it is safe when this returns where it lies."""
        entry = Entry(number, facts, body)
        record = (
            await asyncio.to_thread(encode, entry) if len(body) > OFF_LOOP_BYTES else encode(entry)
        )
        # between the request for it and now; its directory is gone, and must not come back
        if self.is_closed:
            raise OSError(f"{self.directory} is closed: its run or session has ended")
        if self._file is None or self._size > SEGMENT_BYTES:
            self.rotate()
        assert self._file is not None
        place = Place(Path(self._file.name), self._size, len(record))
        self._size += len(record)
        self._sizes[place.segment] = self._size
        self.highest[place.segment] = max(number, self.highest.get(place.segment, number))
        await self._committer.write(self._file, record)
        return place

    def rotate(self) -> None:
        """Go on in a new segment, unless this one is new; the old one is closed when it has been
        written to the end.
        """
        if self._file is not None and not self._size:
            return
        if self._last is None:
            taken = [
                int(path.stem.rpartition("-")[2]) for path in self.directory.glob("segment-*.log")
            ]
            self._last = max(taken, default=0)
        self._last += 1
        if (old := self._file) is not None:
            self._committer.write(old, b"", last=True)
        self._file = Segment(self.directory / f"segment-{self._last:08d}.log")
        self._size = 0

    def read(self) -> list[Entry]:
        """Return the records of earlier lives in the order of writing, and cut off a torn one.

        The segment being written to is left alone: what looks torn there is on its way.

        Raises:
            DamagedJournalError: A record is damaged. No file has been changed.
        """
        entries = []
        torn: dict[Path, int] = {}
        current = self.current
        for path in sorted(self.directory.glob("segment-*.log")):
            if path == current:
                continue
            data = path.read_bytes()
            end = 0
            for entry, after in read_records(path, data):
                entries.append(entry)
                end = after
                self.highest[path] = max(entry.number, self.highest.get(path, entry.number))
            self._sizes[path] = end
            if end < len(data):
                torn[path] = end
        for path, end in torn.items():  # not before all segments have been found sound
            with path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        return entries

    def drop_until(self, number: int) -> None:
        """Delete the segments that hold nothing above a number; the one being written to stays."""
        current = self.current
        for path, highest in list(self.highest.items()):
            if highest <= number and path != current:
                path.unlink(missing_ok=True)
                del self.highest[path]
                self._sizes.pop(path, None)

    def close(self) -> None:
        """Let go of the file; nothing more can be added."""
        self.is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None


def encode(entry: Entry) -> bytes:
    """Return a record as bytes."""
    facts = json.dumps(entry.facts, separators=(",", ":")).encode()
    checksum = zlib.crc32(entry.body, zlib.crc32(facts))
    fields = (MAGIC, len(facts), len(entry.body), entry.number, checksum)
    header = HEADER.pack(*fields, 0)[:-4]
    return b"".join((header, zlib.crc32(header).to_bytes(4, "little"), facts, entry.body))


def read_records(
    path: Path, data: bytes, *, may_be_torn: bool = True
) -> Iterator[tuple[Entry, int]]:
    """Yield the records of a file's bytes, each with the offset of its end.

    A torn record ends the file, unless the file was put in force whole (`may_be_torn=False`).

    Raises:
        DamagedJournalError: The bytes at some place are not those that were written.
    """
    start = 0
    while start < len(data):
        found = _record(data, start)
        if found is None:
            if may_be_torn and is_torn(data, start):
                return
            raise DamagedJournalError(
                f"{path} is damaged: the record at byte {start} of {len(data)} has a wrong checksum"
            )
        yield found
        start = found[1]


def record_sizes(header: bytes) -> tuple[int, int] | None:
    """Return the sizes of a record's facts and body from its header, or None if that is damaged."""
    found = _header(header, 0)
    return None if found is None else found[:2]


def read_record(data: bytes) -> Entry | None:
    """Return the record that some bytes begin with, or None if it is damaged."""
    found = _record(data, 0)
    return None if found is None else found[0]


def _header(data: bytes, start: int) -> tuple[int, int, int, int] | None:
    """Return the lengths, number and checksum of a whole header, or None."""
    if start + HEADER.size > len(data):
        return None
    magic, facts, body, number, checksum, own = HEADER.unpack_from(data, start)
    if magic != MAGIC or zlib.crc32(data[start : start + HEADER.size - 4]) != own:
        return None
    return facts, body, number, checksum


def _record(data: bytes, start: int) -> tuple[Entry, int] | None:
    """Return the record at an offset and the offset of its end; None if it is not whole."""
    header = _header(data, start)
    if header is None:
        return None
    facts_size, body_size, number, checksum = header
    body_at = start + HEADER.size + facts_size
    end = body_at + body_size
    if end > len(data):
        return None
    facts, body = data[start + HEADER.size : body_at], data[body_at:end]
    if zlib.crc32(body, zlib.crc32(facts)) != checksum:
        return None
    return Entry(number, json.loads(facts), body), end


def is_torn(data: bytes, start: int) -> bool:
    """Tell a record that was not written to its end from one that was damaged later.

    A torn record is the last one. Either the file ends within it, or the disk had made the file
    longer and not yet written the bytes: then they are zeros.
    """
    at = data.find(MAGIC, start + 1)
    while at >= 0:
        if _header(data, at) is not None:  # a record behind it was written later
            return False
        at = data.find(MAGIC, at + 1)
    if len(data) - start < HEADER.size:
        return True
    header = _header(data, start)
    if header is None:
        return not any(data[start + HEADER.size // 2 :])
    end = start + HEADER.size + header[0] + header[1]
    return end > len(data) or not any(data[max(start + HEADER.size, end - SECTOR) : end])
