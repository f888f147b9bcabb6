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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HEADER = struct.Struct("<4sIIQq")
"""Magic, checksum of what follows, length of the facts, length of the body, number."""
MAGIC = b"TXJ1"
SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A record: the number of a request (or whatever orders a log), facts about it, its body."""

    number: int
    facts: dict[str, Any]
    body: bytes


class Committer:
    """A thread that writes and flushes for all logs: whoever comes while a flush is under way shares the next one."""

    def __init__(self, *, flush: bool = True) -> None:
        self._flush = flush
        self._jobs: queue.SimpleQueue[tuple[BinaryIO, bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, file: BinaryIO, data: bytes) -> asyncio.Future[None]:
        """Append bytes to a file; the future is done when they are safe. Call it on the event loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinkex-journal", daemon=True)
            self._thread.start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((file, data, done))
        return done

    def stop(self) -> None:
        """Finish what was asked for, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(30)
            self._thread = None

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._jobs.get_nowait())
            stopping = None in batch
            self._commit([job for job in batch if job is not None])

    def _commit(self, batch: list[tuple[BinaryIO, bytes, asyncio.Future[None]]]) -> None:
        failed: dict[BinaryIO, OSError] = {}
        for file, data, _ in batch:
            if file not in failed:
                try:
                    file.write(data)
                except (OSError, ValueError) as error:  # closed, because its run or session has ended meanwhile
                    failed[file] = error if isinstance(error, OSError) else OSError(str(error))
        for file in {file for file, *_ in batch} - failed.keys():
            try:
                file.flush()
                if self._flush:
                    os.fdatasync(file.fileno())
            except (OSError, ValueError) as error:
                failed[file] = error if isinstance(error, OSError) else OSError(str(error))
        for file, _, done in batch:
            loop = done.get_loop()
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(_settle, done, failed.get(file))


def _settle(done: asyncio.Future[None], error: OSError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class Journal:
    """One append-only log in a directory of its own."""

    def __init__(self, directory: Path, committer: Committer) -> None:
        self.directory = directory
        self._committer = committer
        self._file: BinaryIO | None = None
        self._size = 0
        self.highest: dict[Path, int] = {}
        """The highest number in each segment: what can be dropped when everything up to a number can."""

    async def append(self, number: int, facts: dict[str, Any], body: bytes = b"") -> None:
        """Add a record; it is safe when this returns."""
        if self._file is None or self._size > SEGMENT_BYTES:
            self.rotate()
        assert self._file is not None
        record = encode(Entry(number, facts, body))
        self._size += len(record)
        segment = Path(self._file.name)
        self.highest[segment] = max(number, self.highest.get(segment, number))
        await self._committer.write(self._file, record)

    def rotate(self) -> None:
        """Go on in a new segment; the old one is closed when what is being written to it has been."""
        self.directory.mkdir(parents=True, exist_ok=True)
        taken = [int(path.stem.rpartition("-")[2]) for path in self.directory.glob("segment-*.log")]
        path = self.directory / f"segment-{max(taken, default=0) + 1:08d}.log"
        if (old := self._file) is not None:
            self._committer.write(old, b"").add_done_callback(lambda _: old.close())
        self._file = path.open("xb")
        self._size = 0
        sync_directory(self.directory)

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
        """Let go of the file."""
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
