"""What was acknowledged, on disk before the acknowledgement: append-only logs that survive a killed process.

A log is a directory of segments. A record is a header with a checksum, a few facts as JSON, and a request's body as it
came. A torn record at the end (the process died while writing it) was never acknowledged and is cut off.
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
from typing import Any

HEADER = struct.Struct("<4sIIQq")
"""Magic, checksum of what follows, length of the facts, length of the body, number."""
MAGIC = b"TXJ1"
SEGMENT_BYTES = 16 << 20
FLUSHES = 16
"""Files that are flushed at the same time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record: the number of a request (or whatever orders a log), facts about it, its body."""

    number: int
    facts: dict[str, Any]
    body: bytes


class Segment:
    """A file of a log, made when it is first written to: by the threads that may wait for the disk."""

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
            sync_directory(self._path.parent)
        try:
            rest = memoryview(b"".join(pieces))
            while rest:
                rest = rest[self._file.write(rest) :]
            if flush:
                os.fdatasync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # what was refused must not come to life in a later one
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
    """Whether nothing more will come for this file, so that it is closed."""


class Committer:
    """Threads that write and flush for all logs: whoever comes while a flush is under way shares the next one.

    The files of a turn are flushed at the same time: the disk takes many flushes in about the time of one, and with a
    file for each of many runs, one after the other would make all of them wait for the sum.
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
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
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
        self._is_closed = False
        self.highest: dict[Path, int] = {}
        """The highest number in each segment: what can be dropped when everything up to a number can."""

    async def append(self, number: int, facts: dict[str, Any], body: bytes = b"") -> None:
        """Add a record; it is safe when this returns."""
        if self._is_closed:  # between the request for it and now; its directory is gone, and must not come back
            raise OSError(f"{self.directory} is closed: its run or session has ended")
        if self._file is None or self._size > SEGMENT_BYTES:
            self.rotate()
        assert self._file is not None
        record = encode(Entry(number, facts, body))
        self._size += len(record)
        segment = Path(self._file.name)
        self.highest[segment] = max(number, self.highest.get(segment, number))
        await self._committer.write(self._file, record)

    def rotate(self) -> None:
        """Go on in a new segment, unless this one is new; the old one is closed when it has been written to the end."""
        if self._file is not None and not self._size:
            return
        if self._last is None:
            taken = [int(path.stem.rpartition("-")[2]) for path in self.directory.glob("segment-*.log")]
            self._last = max(taken, default=0)
        self._last += 1
        if (old := self._file) is not None:
            self._committer.write(old, b"", last=True)
        self._file = Segment(self.directory / f"segment-{self._last:08d}.log")
        self._size = 0

    def read(self) -> list[Entry]:
        """Every record of earlier lives, in the order of writing; what was torn is cut off.

        The segment being written to is left alone: what looks torn there is on its way.
        """
        entries = []
        current = None if self._file is None else Path(self._file.name)
        for path in sorted(self.directory.glob("segment-*.log")):
            if path == current:
                continue
            data = path.read_bytes()
            end = 0
            for entry, after in decode(data):
                entries.append(entry)
                end = after
                self.highest[path] = max(entry.number, self.highest.get(path, entry.number))
            if end < len(data):
                with path.open("r+b") as file:
                    file.truncate(end)
        return entries

    def drop_until(self, number: int) -> None:
        """Delete the segments that hold nothing above a number; the one being written to stays."""
        current = None if self._file is None else Path(self._file.name)
        for path, highest in list(self.highest.items()):
            if highest <= number and path != current:
                path.unlink(missing_ok=True)
                del self.highest[path]

    def close(self) -> None:
        """Let go of the file; nothing more can be added."""
        self._is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None


def encode(entry: Entry) -> bytes:
    """A record as bytes."""
    facts = json.dumps(entry.facts, separators=(",", ":")).encode()
    checksum = zlib.crc32(entry.body, zlib.crc32(facts, entry.number & 0xFFFFFFFF))
    return b"".join((HEADER.pack(MAGIC, checksum, len(facts), len(entry.body), entry.number), facts, entry.body))


def decode(data: bytes) -> Iterator[tuple[Entry, int]]:
    """The whole records at the beginning of some bytes, each with where it ends."""
    start = 0
    while start + HEADER.size <= len(data):
        magic, checksum, facts_size, body_size, number = HEADER.unpack_from(data, start)
        facts_at = start + HEADER.size
        end = facts_at + facts_size + body_size
        if magic != MAGIC or end > len(data):
            return
        facts, body = data[facts_at : facts_at + facts_size], data[facts_at + facts_size : end]
        if zlib.crc32(body, zlib.crc32(facts, number & 0xFFFFFFFF)) != checksum:
            return
        yield Entry(number, json.loads(facts), body), end
        start = end


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory safe."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
