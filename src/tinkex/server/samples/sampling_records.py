"""Sampling records: the recordings of samples, kept for the sessions that drew them.

A recording is on disk before its sample can be read, so that a restart changes nothing; memory
holds those used last, up to a budget. Each can be trained on for a day after it was sampled or last
used. Files are segments of an append-only log, one log for each session; a segment is deleted when
all in it has expired, or to make room: that of the session which takes the most room, and its
oldest first. What a pass in a journal needs is never deleted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.engine.api import EngineError, Recording
from tinkex.server.runs.journal import HEADER, Journal, Place, is_torn, read_record, record_sizes
from tinkex.types.tensors import Array

logger = logging.getLogger("tinkex.server")

TRAINABLE_SECONDS = 86_400.0
"""The time for which a recording can be trained on after it was sampled or used."""
MOST_REQUESTS = 1 << 20
"""The most sampling requests that have recordings at a time, however small these are."""
SAMPLED, USED = "sampled", "used"
FLAG = "record_stability_info"


@dataclass(slots=True)
class _Kept:
    """The recordings of one sampling request: their places, and how long each is valid."""

    segment: Path
    offset: int
    prompt: int
    lengths: list[int]
    width: int
    until: list[float]


@dataclass(slots=True)
class _Session:
    """The recordings of a session."""

    directory: Path
    kept: dict[str, _Kept] = field(default_factory=dict)
    sizes: defaultdict[Path, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of each segment."""
    until: defaultdict[Path, float] = field(default_factory=lambda: defaultdict(float))
    """The time at which everything in a segment has expired."""
    pins: dict[tuple[str, int], set[Path]] = field(default_factory=dict)
    """Segments that a pass in a journal needs, by its run and number."""
    loading: asyncio.Task[None] | None = None
    """Reads what an earlier life of the server left."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A sample that can be trained on."""

    prompt: int
    """The number of tokens of its prompt."""
    length: int
    recording: Recording | None
    """Its recording, if that was asked for."""


class SamplingRecords:
    """The recordings of all sessions of a server."""

    def __init__(
        self,
        directory: Path,
        journal: Callable[[Path], Journal],
        *,
        memory_bytes: int,
        disk_bytes: int,
        may_delete: Callable[[str], bool] = lambda session_id: True,
    ) -> None:
        """Keep them in a directory.

        Args:
            directory: Has a directory for each session, by its id.
            journal: Gives the journal in a directory.
            memory_bytes: How much is held in memory.
            disk_bytes: How much is kept on disk.
            may_delete: Whether all passes are known that need what a session has on disk.
        """
        self._directory, self._journal, self._may_delete = directory, journal, may_delete
        self._left = {found.name: _files_size(found) for found in directory.glob("*")}
        """Sizes of what an earlier life of the server left, until it is asked for."""
        self._coming = 0
        """Bytes that are on their way to the disk."""
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._sessions: dict[str, _Session] = {}
        self._cache: OrderedDict[str, tuple[Recording, ...]] = OrderedDict()
        self._cached = 0

    @property
    def bytes_in_memory(self) -> int:
        """The size of the recordings in memory."""
        return self._cached

    @property
    def bytes_on_disk(self) -> int:
        """The size of the recordings on disk."""
        kept = sum(sum(session.sizes.values()) for session in self._sessions.values())
        return kept + sum(self._left.values())

    # ── recording ─────────────────────────────────────────────────────────────────────────────────

    async def keep(
        self, session_id: str, request_id: str, prompt: int, recordings: Sequence[Recording]
    ) -> None:
        """Have the recordings of a request on disk.

        Raises:
            EngineError: They cannot be kept, or are not those that were kept of the same request
                before.
        """
        session = await self._session(session_id)
        if request_id in session.kept:  # drawn again after a restart
            known = await self._load(session, request_id)
            if not all(map(_same, known, recordings)):
                raise EngineError(
                    "the sample was drawn before, and is different now; ask for it again",
                    "server",
                )
            return
        now, body = time.time(), _pack(recordings)
        lengths, width = (
            [len(recording.tokens) for recording in recordings],
            recordings[0].top_tokens.shape[1],
        )
        facts = {
            "op": SAMPLED,
            "id": request_id,
            "at": now,
            "prompt": prompt,
            "lengths": lengths,
            "width": width,
        }
        await self._make_room(len(body))
        self._coming += len(body)
        try:
            place = await self._append(session, now, facts, body)
        finally:
            self._coming -= len(body)
        until = [now + TRAINABLE_SECONDS] * len(lengths)
        session.kept[request_id] = _Kept(place.segment, place.offset, prompt, lengths, width, until)
        self._cache_in(request_id, tuple(recordings))

    async def _append(
        self, session: _Session, now: float, facts: dict[str, Any], body: bytes = b""
    ) -> Place:
        try:
            facts["checksum"] = _checksum(facts)
            place = await self._journal(session.directory).append(int(now * 1e9), facts, body)
        except OSError as error:
            raise EngineError(
                f"the recording of a sample cannot be written: {error}", "server"
            ) from None
        session.sizes[place.segment] = max(session.sizes[place.segment], place.offset + place.size)
        session.until[place.segment] = max(session.until[place.segment], now + TRAINABLE_SECONDS)
        return place

    # ── using ─────────────────────────────────────────────────────────────────────────────────────

    async def recall(
        self,
        session_id: str,
        names: Collection[str],
        wanted: Collection[str],
        *,
        expired: bool = False,
    ) -> dict[str, Remembered]:
        """The samples of these ids, those that are `wanted` with their recordings.

        Args:
            session_id: Whose they must be.
            names: Ids of samples.
            wanted: Those of them whose recordings are needed.
            expired: Whether those will do that have expired: a pass that was accepted before is
                done again.

        Raises:
            EngineError: One of them cannot be trained on.
        """
        now, found = time.time(), {}
        session = await self._session(session_id)
        for name in names:
            request_id, _, number = name.rpartition(":")
            if not name.startswith(f"{session_id}:"):
                raise EngineError(
                    f"sequence {name!r} was sampled in another session than this run's"
                )
            kept = session.kept.get(request_id)
            if kept is None or not number.isdecimal() or not number.isascii() or len(number) > 9:
                raise EngineError(_unknown(name))
            if int(number) >= len(kept.lengths) or str(int(number)) != number:
                raise EngineError(_unknown(name))
            index = int(number)
            if not expired and kept.until[index] < now:
                hours = TRAINABLE_SECONDS / 3600
                raise EngineError(
                    f"sequence {name!r} can no longer be trained on: not used for {hours:g} hours"
                )
            recording = None
            if name in wanted:
                recording = (await self._load(session, request_id))[index]
            found[name] = Remembered(kept.prompt, kept.lengths[index], recording)
        return found

    def hold(self, session_id: str, run: str, number: int, names: Collection[str]) -> None:
        """Keep what a pass of a run needs until the run's state on disk covers it, and restart the
        day of each.
        """
        session, now = self._sessions.get(session_id), time.time()
        if session is None:  # it has ended
            return
        pinned = session.pins.setdefault((run, number), set())
        for name in names:
            request_id, _, index = name.rpartition(":")
            kept = session.kept.get(request_id)
            if kept is None:
                continue
            pinned.add(kept.segment)
            kept.until[int(index)] = now + TRAINABLE_SECONDS
            session.until[kept.segment] = now + TRAINABLE_SECONDS

    async def note_use(self, session_id: str, names: Collection[str]) -> None:
        """Have it on disk that samples were used, so that a restart does not shorten their day."""
        if (session := self._sessions.get(session_id)) is not None and names:
            now = time.time()
            try:
                await self._append(session, now, {"op": USED, "ids": sorted(names), "at": now})
            except EngineError as error:
                logger.warning("the use of %d samples could not be written: %s", len(names), error)

    def release(self, run: str, number: int) -> None:
        """Let go of what the passes of a run up to a number needed."""
        session = self._sessions.get(run.rpartition(":train:")[0])
        pins = session.pins if session is not None else {}
        for pinned, used in list(pins):
            if pinned == run and used <= number:
                del pins[pinned, used]

    # ── what goes ─────────────────────────────────────────────────────────────────────────────────

    def forget(self, session_id: str) -> None:
        """Forget a session; its files go with its directory."""
        self._left.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            if session.loading is not None:
                session.loading.cancel()
            for request_id in session.kept:
                self._cache_out(request_id)

    def sweep(self) -> None:
        """Delete the segments in which everything has expired."""
        now = time.time()
        for session_id, session in self._sessions.items():
            expired = {segment for segment, until in session.until.items() if until < now}
            for segment in self._deletable(session_id, session) if expired else ():
                if segment in expired:
                    self._drop(session, segment)

    def _deletable(self, session_id: str, session: _Session) -> list[Path]:
        if not self._may_delete(session_id):
            return []
        pinned = {segment for segments in session.pins.values() for segment in segments}
        pinned |= {self._journal(session.directory).current or Path()}
        return [segment for segment in sorted(session.sizes) if segment not in pinned]

    async def _make_room(self, size: int) -> None:
        """Drop the oldest segments of the session that has most, until so many bytes fit the budget
        on disk.
        """
        while self._is_full(size) and self._left:
            await self._session(next(iter(self._left)))
        while self._is_full(size):
            by_size = sorted(self._sessions.items(), key=lambda item: -sum(item[1].sizes.values()))
            for session_id, session in by_size:
                if not (deletable := self._deletable(session_id, session)):
                    self._journal(session.directory).rotate()
                    deletable = self._deletable(session_id, session)
                if deletable:
                    self._drop(session, deletable[0])
                    break
            else:
                raise EngineError(
                    f"there is no room for a recording of {size} bytes: the limit "
                    "recordings_disk_bytes is "
                    f"{self._disk_bytes}, and running passes need the others",
                    "server",
                )

    def _is_full(self, size: int) -> bool:
        requests = sum(len(session.kept) for session in self._sessions.values())
        return (
            self.bytes_on_disk + self._coming + size > self._disk_bytes or requests >= MOST_REQUESTS
        )

    def _drop(self, session: _Session, segment: Path) -> None:
        for request_id in [name for name, kept in session.kept.items() if kept.segment == segment]:
            del session.kept[request_id]
            self._cache_out(request_id)
        session.sizes.pop(segment, None)
        session.until.pop(segment, None)
        self._journal(session.directory).highest.pop(segment, None)
        segment.unlink(missing_ok=True)

    # ── memory and disk ───────────────────────────────────────────────────────────────────────────

    def _cache_in(self, request_id: str, recordings: tuple[Recording, ...]) -> None:
        self._cache_out(request_id)
        self._cache[request_id] = recordings
        self._cached += _size(recordings)
        while self._cached > self._memory_bytes:
            self._cache_out(next(iter(self._cache)))

    def _cache_out(self, request_id: str) -> None:
        self._cached -= _size(self._cache.pop(request_id, ()))

    async def _session(self, session_id: str) -> _Session:
        """A session, with what an earlier life of the server left of it."""
        session = self._sessions.get(session_id)
        if session is None:
            self._left.pop(session_id, None)
            session = self._sessions[session_id] = _Session(self._directory / session_id)
            session.loading = asyncio.create_task(self._read_all(session))
        if session.loading is not None:
            await asyncio.shield(session.loading)
        return session

    async def _read_all(self, session: _Session) -> None:
        for place, facts in await asyncio.to_thread(_scan, session.directory):
            until, segment = facts["at"] + TRAINABLE_SECONDS, place.segment
            session.sizes[segment] = place.offset + place.size
            session.until[segment] = max(session.until[segment], until)
            if facts["op"] == SAMPLED:
                lengths, untils = facts["lengths"], [until] * len(facts["lengths"])
                kept = _Kept(
                    segment, place.offset, facts["prompt"], lengths, facts["width"], untils
                )
                session.kept.setdefault(facts["id"], kept)
                continue
            for name in facts["ids"]:
                request_id, _, index = name.rpartition(":")
                if (used := session.kept.get(request_id)) is not None:
                    used.until[int(index)] = max(used.until[int(index)], until)
                    session.until[used.segment] = max(session.until[used.segment], until)
        session.loading = None

    async def _load(self, session: _Session, request_id: str) -> tuple[Recording, ...]:
        """The recordings of a request, from memory or disk."""
        recordings = self._cache.get(request_id)
        if recordings is not None:
            self._cache.move_to_end(request_id)
            return recordings
        recordings = await asyncio.to_thread(_read, session.kept[request_id], request_id)
        self._cache_in(request_id, recordings)
        return recordings


def _unknown(name: str) -> str:
    return (
        f"sequence {name!r} is not known: it was not sampled with {FLAG}, was dropped for want of "
        "room "
        "(recordings_disk_bytes), or was forgotten a day after its last use"
    )


def _size(recordings: Sequence[Recording]) -> int:
    return sum(recording.nbytes for recording in recordings)


def _same(one: Recording, other: Recording) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)


def parts_of(recording: Recording) -> list[Array]:
    """Return the arrays of a recording, in the order of its fields."""
    return [getattr(recording, field.name) for field in fields(Recording)]


def _pack(recordings: Sequence[Recording]) -> bytes:
    """Sample after sample, each its five arrays one after the other."""
    return b"".join(part.tobytes() for recording in recordings for part in parts_of(recording))


def _unpack(kept: _Kept, body: bytes) -> Iterator[Recording]:
    at = 0

    def take(dtype: type, *shape: int) -> Array:
        nonlocal at
        array: Array = np.frombuffer(body, dtype, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        return array

    for length in kept.lengths:
        table = (length, kept.width)
        yield Recording(
            take(np.int32, length),
            take(np.float32, length),
            take(np.float32, length),
            take(np.int32, *table),
            take(np.float32, *table),
        )


def _read(kept: _Kept, request_id: str) -> tuple[Recording, ...]:
    with kept.segment.open("rb") as file:
        for offset in _offsets(kept, request_id):
            file.seek(offset)
            head = file.read(HEADER.size)
            if (sizes := record_sizes(head)) is not None:
                entry = read_record(head + file.read(sum(sizes)))
                if entry is not None and entry.facts.get("id") == request_id:
                    return tuple(_unpack(kept, entry.body))
    logger.error("%s is damaged: the recording of %s cannot be read", kept.segment, request_id)
    raise EngineError(
        f"the recording of {request_id!r} is damaged on disk: sample again, or train without it"
    )


def _offsets(kept: _Kept, request_id: str) -> Iterator[int]:
    """The place a record should have, then the one it has: another record may not have been
    written.
    """
    yield kept.offset
    yield from (
        place.offset
        for place, facts in _scan_segment(kept.segment)
        if facts.get("id") == request_id
    )


def _scan_segment(segment: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every record of a segment without its body: where it lies, and its facts.

    A body is checked when it is read; what was torn at the end of a segment was never acknowledged.
    """
    whole, start = segment.stat().st_size, 0
    damage = f"{segment} is damaged at byte %d: the recording there cannot be trained on%s"
    with segment.open("rb") as file:
        while start + HEADER.size <= whole:
            sizes = record_sizes(file.read(HEADER.size))
            if sizes is None or start + (size := HEADER.size + sum(sizes)) > whole:
                file.seek(start)
                if not is_torn(file.read(), 0):
                    logger.error(damage, start, ", nor those behind it")
                return
            facts = _checked(file.read(sizes[0]))
            if facts is None:
                logger.error(damage, start, "")
            else:
                yield Place(segment, start, size), facts
            start += size
            file.seek(start)


def _checksum(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def _checked(data: bytes) -> dict[str, Any] | None:
    """Return the facts of a record, or None if they are damaged; they have a checksum without the
    body.
    """
    try:
        facts: dict[str, Any] = json.loads(data)
        checksum = facts.pop("checksum")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return facts if checksum == _checksum(facts) else None


def _scan(directory: Path) -> list[tuple[Place, dict[str, Any]]]:
    return [
        found
        for segment in sorted(directory.glob("segment-*.log"))
        for found in _scan_segment(segment)
    ]


def _files_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("segment-*.log"))
