"""Archives from elsewhere, unpacked with care: all members are checked before any is written."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tinkex.errors import TinkerError

CHUNK = 1 << 20
LONGEST_HEADER = 1 << 20
"""Limit of a header's names and attributes, in bytes, since the library reads them into memory."""


class UnsafeArchiveError(TinkerError, ValueError):
    """An archive that would write where it should not, make what it should not, or never end."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits on the contents of an archive."""

    files: int = 10_000
    bytes: int = 1 << 40
    ratio: float = 200.0
    """The size of the contents over that of the archive; `free_bytes` are always allowed."""
    free_bytes: int = 1 << 24


class _Member(tarfile.TarInfo):
    """A member whose header is refused if it is too large."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and not self.isdir() and self.size > LONGEST_HEADER:
            raise UnsafeArchiveError(f"a header of the archive has {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def extract(archive: Path, directory: Path, limits: ArchiveLimits | None = None) -> list[Path]:
    """Unpack a tar, plain or compressed, into an existing directory; return the new files.

    Raises:
        UnsafeArchiveError: A member has an absolute path or `..` in it, is no plain file or
            directory, comes twice, or all of them are too many or too large. Nothing has been
            written then.
        tarfile.TarError: It is no tar, or a broken one.
    """
    chosen = limits or ArchiveLimits()
    with tarfile.open(archive, "r:*", tarinfo=_Member) as opened:
        members = _checked(opened, archive.stat().st_size, chosen)
    written = []
    with tarfile.open(archive, "r:*", tarinfo=_Member) as opened:
        for member, expected in zip(opened, members, strict=True):
            if (member.name, member.size) != (expected.name, expected.size):
                raise UnsafeArchiveError("the archive changed while it was unpacked")
            path = directory.joinpath(*_parts(member.name))
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            source = opened.extractfile(member)
            assert source is not None
            with source, path.open("xb") as target:
                _copy(source, target, member.size)
            written.append(path)
    return written


def _checked(archive: tarfile.TarFile, size: int, limits: ArchiveLimits) -> list[tarfile.TarInfo]:
    """Return all members; raise if one is harmful, before its contents are read."""
    members: list[tarfile.TarInfo] = []
    seen: set[tuple[str, ...]] = set()
    total = 0
    most = min(limits.bytes, max(limits.free_bytes, int(size * limits.ratio)))
    for member in archive:
        parts = _parts(member.name)
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise UnsafeArchiveError(
                f"{member.name!r} in the archive is neither a plain file nor a directory"
            )
        if not member.isdir():
            folded = tuple(part.casefold() for part in parts)
            if folded in seen:
                raise UnsafeArchiveError(f"{member.name!r} is in the archive twice")
            seen.add(folded)
        members.append(member)
        if len(members) > limits.files:
            raise UnsafeArchiveError(f"the archive holds more than {limits.files} files")
        total += member.size
        if total > most:
            raise UnsafeArchiveError(f"the archive of {size} bytes holds more than {most} bytes")
    return members


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a member's path; raise if it leaves the directory."""
    path = PurePosixPath(name)
    odd = "\\" in name or "\0" in name or (len(name) > 1 and name[1] == ":" and name[0].isalpha())
    if path.is_absolute() or ".." in path.parts or odd:
        raise UnsafeArchiveError(f"the archive has an unsafe path: {name!r}")
    return path.parts


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    left = size
    while left:
        chunk = source.read(min(CHUNK, left))
        if not chunk:
            raise tarfile.ReadError("the archive ends in the middle of a file")
        target.write(chunk)
        left -= len(chunk)
