"""A check of the database's write-ahead log, made before SQLite opens it.

Each frame of the log has a checksum over all before it. SQLite ends the log silently at the first
wrong one, because a power loss leaves the same. A small file beside the log therefore records how
many frames were flushed: fewer valid ones than that are damage. The record itself is not flushed;
it can only be older than the log. Changes that were not flushed, such as counters, are not in it:
damage to them looks like a power loss, which may take them back.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tinkex.server.database.row_digests import damaged
from tinkex.types.tensors import Array

HEADER, FRAME = struct.Struct(">8I"), struct.Struct(">6I")
MAGIC = 0x377F0682
"""The log's first bytes; the last bit gives the byte order of its checksums."""
RECORD = struct.Struct("<8sII")
"""The salts of the log, the number of flushed frames, and a checksum of these."""
MASK = 0xFFFFFFFF
Sums: TypeAlias = tuple[int, int]


def log_of(database: Path) -> Path:
    """Return the write-ahead log of a database."""
    return database.with_name(f"{database.name}-wal")


def record_of(database: Path) -> Path:
    """Return the file that records what was flushed of it."""
    return database.with_name(f"{database.name}-flushed")


class _Log:
    """A write-ahead log as its header describes it."""

    def __init__(self, file: FileIO, header: bytes) -> None:
        magic, _, self._page, _, *_, one, two = HEADER.unpack(header)
        self._order, self._file, self.salts = ">u4" if magic & 1 else "<u4", file, header[16:24]
        self.sums: Sums = (one, two)
        is_page = 512 <= self._page <= 65536 and not self._page & (self._page - 1)
        known = magic & ~1 == MAGIC and is_page
        self.is_valid = known and self._after((0, 0), header[:24]) == self.sums

    def commits(self, frames: int = 0, sums: Sums | None = None) -> Iterator[tuple[int, Sums]]:
        """Yield the frames and sums up to each valid commit after a number of frames."""
        found = self.sums if sums is None else sums
        self._file.seek(HEADER.size + frames * (FRAME.size + self._page))
        while True:
            data = _read(self._file, FRAME.size + self._page)
            if len(data) < FRAME.size + self._page or data[8:16] != self.salts:
                return
            _, size, _, _, one, two = FRAME.unpack_from(data)
            found = self._after(found, data[:8] + data[FRAME.size :])
            if found != (one, two):
                return
            frames += 1
            if size:
                yield frames, found

    def _after(self, sums: Sums, data: bytes) -> Sums:
        words = np.frombuffer(data, self._order).astype(np.uint32)
        first, second, old = _weights(len(words))
        (a, b), (c, d) = old
        one = a * sums[0] + b * sums[1] + int((first * words).sum(dtype=np.uint32))
        two = c * sums[0] + d * sums[1] + int((second * words).sum(dtype=np.uint32))
        return one & MASK, two & MASK


@functools.lru_cache(maxsize=8)
def _weights(words: int) -> tuple[Array, Array, tuple[Sums, Sums]]:
    """Return the share of each word and earlier sum in the next two sums.

    A pair (x, y) makes of the sums (s, t): s + t + x, and t + y + that.
    """
    first, second = np.zeros(words, np.uint32), np.zeros(words, np.uint32)
    a, b, c, d = 1, 0, 0, 1
    for at in range(words - 2, -1, -2):
        first[at], first[at + 1] = (a + b) & MASK, b
        second[at], second[at + 1] = (c + d) & MASK, d
        a, b, c, d = (a + b) & MASK, (a + 2 * b) & MASK, (c + d) & MASK, (c + 2 * d) & MASK
    return first, second, ((a, b), (c, d))


def _read(file: FileIO, size: int) -> bytes:
    return file.read(size) or b""


def check(database: Path) -> None:
    """Refuse a log that has lost something that was flushed.

    Raises:
        DataDirError: It is damaged.
    """
    log = log_of(database)
    header = None
    while log.exists():  # again when another process has restarted it meanwhile
        with FileIO(log) as file:
            before, header = header, _read(file, HEADER.size)
            if len(header) < HEADER.size or not any(header):
                return
            found = _Log(file, header)
            flushed = _recorded(record_of(database), found.salts)
            commits = found.commits() if found.is_valid and flushed else ()
            valid = max((frames for frames, _ in commits), default=0)
            if found.is_valid and valid >= flushed:
                return
        if header == before:
            what = "its header has a wrong checksum"
            if found.is_valid:
                what = f"{valid} of {flushed} frames are valid"
            raise damaged(log.name, what)


def _recorded(path: Path, salts: bytes) -> int:
    """Return the known number of flushed frames of the log with these salts."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) != RECORD.size:
        return 0
    of, frames, checksum = RECORD.unpack(data)
    return int(frames) if of == salts and checksum == zlib.crc32(data[:-4]) else 0


class RecordingLock:
    """The lock of a database's connection; each flushed change leaves a record of it."""

    def __init__(self, database: Path) -> None:
        self._lock, self._database = threading.Lock(), database
        self._db: sqlite3.Connection | None = None
        self._noted = 0
        self._log: FileIO | None = None
        self._record: FileIO | None = None
        self._salts, self._frames, self._sums = b"", 0, (0, 0)

    def watch(self, db: sqlite3.Connection) -> None:
        """Record what is flushed through a connection."""
        self._db, self._noted = db, db.total_changes

    def skip(self) -> None:
        """Leave unflushed changes to the next record. Call it under the lock."""
        if self._db is not None:
            self._noted = self._db.total_changes

    def close(self) -> None:
        """Let go of the files. Under the lock, before the connection is closed."""
        self._db = None
        for file in (self._log, self._record):
            if file is not None:
                file.close()
        self._log = self._record = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._db is not None and self._db.total_changes != self._noted:
                if error is None:
                    with contextlib.suppress(OSError):  # a full disk: the check knows less
                        self._note()
                self.skip()
        finally:
            self._lock.release()

    def _note(self) -> None:
        """Record the last commit in the log, which has just been flushed."""
        if self._log is None:
            self._log = FileIO(log_of(self._database))
        if self._record is None:
            path = record_of(self._database)
            self._record = FileIO(path, "r+" if path.exists() else "x+")
        self._log.seek(0)
        header = _read(self._log, HEADER.size)
        if len(header) < HEADER.size:
            return
        log = _Log(self._log, header)
        if log.salts != self._salts:
            self._salts, self._frames, self._sums = log.salts, 0, log.sums
        for commit in log.commits(self._frames, self._sums):
            self._frames, self._sums = commit
        data = RECORD.pack(self._salts, self._frames, 0)[:-4]
        self._record.seek(0)
        self._record.write(data + zlib.crc32(data).to_bytes(4, "little"))
