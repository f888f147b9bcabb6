"""The data directory: its lock, its signing key, and files set aside."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

logger = logging.getLogger("tinkex.server")

LOCK_FILE = "lock"
SECRET_FILE = "signing.key"
SECRET_BYTES = 32
REPLACE = (
    "restore both files from a backup, or delete signing.key: the server makes a new one, and "
    "tokens signed with the old one end"
)
SECRET_DIGEST = "signing.key.sha256"
"""The file with the digest of the secret: one that is damaged would end every token without a word.
"""
KEYED_FILE = "keyed"
"""Exists once a key has been made: from then on the server never opens without one."""
SET_ASIDE = "set-aside"
"""The folder for files that the server cannot use and should not delete."""


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error, of any library, says that the disk is full."""
    text = str(error)
    has_number = getattr(error, "errno", None) == errno.ENOSPC
    return has_number or f"(os error {errno.ENOSPC})" in text or "database or disk is full" in text


class DataDirError(RuntimeError):
    """A data directory that a server must not start with."""


class Lock:
    """A lock on a data directory, held until it is closed or the process ends.

    A server that listens needs the directory for itself. Programs with an embedded server share
    it with each other.

    Raises:
        DataDirError: Another server uses the directory.
    """

    def __init__(self, data_dir: Path, *, shared: bool) -> None:
        self._handle = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._handle, shared=shared)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            why = "another tinkex server uses it"
            how = "connect to that server, or use another directory"
            raise DataDirError(f"{why}; {how}") from None

    def close(self) -> None:
        """Let another server use the directory."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    __del__ = close


if os.name == "posix":
    import fcntl

    def _lock(handle: int, *, shared: bool) -> None:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

else:
    import msvcrt

    def _lock(handle: int, *, shared: bool) -> None:
        if not shared:  # this call has no shared lock
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]


def write_durably(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Create a file durably; keep a file that another process made first."""
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink()
    sync_path(path.parent)


def signing_secret(data_dir: Path) -> bytes:
    """Return the secret that signs tokens and addresses; make it on first use.

    Raises:
        DataDirError: The file does not hold a whole secret. With a short one anybody could sign.
    """
    path = data_dir / SECRET_FILE
    digest = data_dir / SECRET_DIGEST
    if not path.exists():
        digest.unlink(missing_ok=True)
        write_durably(path, secrets.token_bytes(SECRET_BYTES))
    found = path.read_bytes()
    if len(found) != SECRET_BYTES or not any(found):
        wrong = "only zeros" if found and not any(found) else f"{len(found)} bytes"
        raise DataDirError(f"{path} holds {wrong}, expected {SECRET_BYTES} random bytes; {REPLACE}")
    computed = hashlib.sha256(found).hexdigest().encode()
    if not digest.exists():
        write_durably(digest, computed)
    try:
        is_known = digest.read_bytes() == computed
    except FileNotFoundError:  # another process makes the secret now, and removed its digest
        is_known = True
    if not is_known:
        raise DataDirError(f"{path} or {digest.name} is damaged: they do not match; {REPLACE}")
    return found


def mark_keyed(data_dir: Path) -> None:
    """Note durably that keys exist, before the first one is made."""
    if not is_keyed(data_dir):
        text = b"Delete this file to let the server open without keys.\n"
        write_durably(data_dir / KEYED_FILE, text)


def is_keyed(data_dir: Path) -> bool:
    """Return whether a key was ever made in a data directory."""
    return (data_dir / KEYED_FILE).exists()


def set_aside(data_dir: Path, directory: Path, why: str) -> Path | None:
    """Move a directory out of use, and log the reason; return its new path."""
    place = data_dir / SET_ASIDE
    target = place / f"{directory.name}-{time.time_ns()}"
    try:
        place.mkdir(exist_ok=True)
        sync_path(data_dir)
        directory.rename(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.error("%s %s; it stays there, as moving it failed: %s", directory, why, error)
        return None
    sync_path(place)
    sync_path(directory.parent)
    logger.error("%s %s; it was set aside as %s", directory, why, target)
    return target


def discard(directory: Path) -> None:
    """Delete a directory at once for those who are about to open it, then its files."""
    doomed = directory.with_name(f".deleting-{secrets.token_hex(4)}")
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def make_directory(path: Path) -> None:
    """Make a directory and those above it; a power loss does not take them back."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_path(place.parent)


def sync_above(path: Path, levels: int) -> None:
    """Flush the names of a file and of directories above it, so many in all."""
    for directory in path.parents[:levels]:
        sync_path(directory)


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
