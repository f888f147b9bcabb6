"""A disk that is played from the records of `disk_recorder.c`, and what it may hold after a power
loss.

A flush of a file makes its data safe, a flush of a directory the names in it: both in the order of
the calls, and nothing else. Of what was not flushed, a file keeps the first writes (the last one
perhaps in part) and a directory the first changes of its names; how many is up to chance. The
memory of SQLite's processes (`-shm`) is no data.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADER = struct.Struct("<BiqII")


@dataclass(frozen=True, slots=True)
class Record:
    """A call of the process that was recorded."""

    op: str
    fd: int
    at: int
    first: bytes
    second: bytes


def records(log: Path) -> Iterator[Record]:
    data, start = log.read_bytes(), 0
    while start < len(data):
        op, fd, at, first, second = HEADER.unpack_from(data, start)
        middle = start + HEADER.size + first
        yield Record(
            chr(op), fd, at, data[start + HEADER.size : middle], data[middle : middle + second]
        )
        start = middle + second


@dataclass(eq=False)
class File:
    """The safe part of a file, and the writes (an offset and bytes) and cuts (an offset and None)
    that are not."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def flush(self) -> None:
        for at, data in self.pending:
            carry_out(self.safe, at, data)
        self.pending.clear()

    def left(self, rng: random.Random | None) -> bytes:
        """The bytes after a power loss; without chance, the safe ones."""
        data = bytearray(self.safe)
        kept = (
            0
            if rng is None
            else rng.choice((0, len(self.pending), rng.randint(0, len(self.pending))))
        )
        for at, piece in self.pending[:kept]:
            carry_out(data, at, piece)
        if rng is not None and kept < len(self.pending):
            at, piece = self.pending[kept]
            if piece is not None:
                carry_out(data, at, piece[: rng.randint(0, len(piece))])
        return bytes(data)


def carry_out(data: bytearray, at: int, piece: bytes | None) -> None:
    if piece is None:
        del data[at:]
        data.extend(bytes(at - len(data)))
    elif piece:
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + len(piece)] = piece


@dataclass(eq=False)
class Directory:
    """The names in a directory as the process sees them, those that are safe, and the changes that
    are not."""

    now: dict[bytes, File | Directory] = field(default_factory=dict)
    safe: dict[bytes, File | Directory] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)


@dataclass(eq=False)
class Change:
    """A change of names, carried out as one: for each a directory, the name, and what it stands for
    from now on."""

    number: int
    parts: list[tuple[Directory, bytes, File | Directory | None]]


class Disk:
    """Everything below the root."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = os.fsencode(root), Directory()
        self._open: dict[int, tuple[File | Directory, bytes]] = {}
        self._count = 0

    def play(self, record: Record) -> bytes | None:
        """Carry a record out; the path that was written to."""
        match record.op:
            case "o":
                self._open[record.fd] = (self._opened(record.first, record.at), record.first)
            case "c":
                self._open.pop(record.fd, None)
            case "w" | "t":
                node, path = self._open[record.fd]
                assert isinstance(node, File)
                node.pending.append((record.at, record.second if record.op == "w" else None))
                return path
            case "f":
                self._flush(self._open[record.fd][0])
            case "d":
                self._change((record.first, Directory()))
            case "u":
                self._change((record.first, None))
            case "l":
                self._change((record.second, self._at(record.first)))
            case "r":
                self._change((record.first, None), (record.second, self._at(record.first)))
        return None

    def _place(self, path: bytes) -> tuple[Directory, bytes]:
        names = path[len(self._root) :].strip(b"/").split(b"/")
        node = self.top
        for name in names[:-1]:
            inner = node.now[name]
            assert isinstance(inner, Directory)
            node = inner
        return node, names[-1]

    def _at(self, path: bytes) -> File | Directory:
        directory, name = self._place(path)
        return directory.now[name] if name else self.top

    def _opened(self, path: bytes, flags: int) -> File | Directory:
        directory, name = self._place(path)
        if name and name not in directory.now:
            assert flags & os.O_CREAT, path
            self._change((path, File()))
        node = directory.now[name] if name else self.top
        if isinstance(node, File) and flags & os.O_TRUNC:
            node.pending.append((0, None))
        return node

    def _change(self, *changes: tuple[bytes, File | Directory | None]) -> None:
        self._count += 1
        change = Change(self._count, [(*self._place(path), node) for path, node in changes])
        for directory, name, node in change.parts:
            _set(directory.now, name, node)
            if change not in directory.pending:
                directory.pending.append(change)

    def _flush(self, node: File | Directory) -> None:
        if isinstance(node, File):
            node.flush()
            return
        while node.pending:
            self._settle(node.pending[0])

    def _settle(self, change: Change) -> None:
        """Make a change safe, and with it what came before it in each of its directories."""
        for directory, _, _ in change.parts:
            while directory.pending and directory.pending[0].number < change.number:
                self._settle(directory.pending[0])
        for directory, name, node in change.parts:
            _set(directory.safe, name, node)
            if change in directory.pending:
                directory.pending.remove(change)

    def leave(self, target: Path, rng: random.Random | None) -> None:
        """Write what a power loss leaves now; without chance, that is what was flushed."""
        names: dict[Directory, dict[bytes, File | Directory]] = {}
        pending: dict[int, Change] = {}
        kept: dict[Directory, int] = {}
        for directory in self._directories():
            names[directory] = dict(directory.safe)
            many = len(directory.pending)
            kept[directory] = 0 if rng is None else rng.choice((0, many, rng.randint(0, many)))
            pending |= {change.number: change for change in directory.pending}
        for number in sorted(pending):
            change = pending[number]
            if all(kept.get(directory, 0) > 0 for directory, _, _ in change.parts):
                for directory, name, node in change.parts:
                    _set(names[directory], name, node)
                for directory in {directory for directory, _, _ in change.parts}:
                    kept[directory] -= 1
            else:
                kept |= dict.fromkeys((directory for directory, _, _ in change.parts), 0)
        _write(target, self.top, names, lambda file: file.left(rng))

    def _directories(self) -> list[Directory]:
        """Every directory that can be reached, now or after a power loss."""
        found = [self.top]
        for directory in found:
            nodes = [*directory.now.values(), *directory.safe.values()]
            nodes += [
                node
                for change in directory.pending
                for _, _, node in change.parts
                if node is not None
            ]
            found += [
                node
                for node in dict.fromkeys(nodes)
                if isinstance(node, Directory) and node not in found
            ]
        return found

    def everything(self, target: Path) -> None:
        """Write what the process sees: nothing is lost."""

        def whole(file: File) -> bytes:
            data = bytearray(file.safe)
            for at, piece in file.pending:
                carry_out(data, at, piece)
            return bytes(data)

        _write(
            target, self.top, {directory: directory.now for directory in self._directories()}, whole
        )


def _set(names: dict[bytes, File | Directory], name: bytes, node: File | Directory | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _write(
    target: Path, top: Directory, names: dict[Directory, dict[bytes, File | Directory]], of: object
) -> None:
    assert callable(of)
    target.mkdir()
    for name, node in names[top].items():
        place = target / os.fsdecode(name)
        if isinstance(node, Directory):
            _write(place, node, names, of)
        elif not place.name.endswith("-shm"):
            place.write_bytes(of(node))
