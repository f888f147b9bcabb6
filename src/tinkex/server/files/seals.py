"""Digests of checkpoints, states and samplers, checked on load."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tinkex.engine.api import Directory, EngineError
from tinkex.server.files.data_dir import sync_path

SEAL = ".digests.json"
"""The file of a directory that holds the digests of the others."""


def contents(directory: Path) -> list[Path]:
    """Return the files of a directory without its seal, by name."""
    return sorted(path for path in directory.iterdir() if path.name != SEAL)


def seal(directory: Path) -> None:
    """Write down the digests of a directory's files, and flush all of them."""
    files = contents(directory)
    digests = {path.name: _digest_of(path) for path in files}
    path = directory / SEAL
    path.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    for written in (*files, path, directory):
        sync_path(written)


def digest_of_seal(directory: Path) -> str:
    """Return a short digest of all sealed files of a directory."""
    about = (directory / SEAL).stat()
    return _seal_digest(directory / SEAL, about.st_mtime_ns, about.st_ino)


@lru_cache(4096)
def _seal_digest(path: Path, modified: int, inode: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def check(directory: Path) -> None:
    """Refuse a directory whose sealed files are not as they were.

    Files that were added later are not looked at. A file that has not changed since it was checked
    is not read again.

    Raises:
        EngineError: A file is damaged or missing.
    """
    try:
        sealed = json.loads((directory / SEAL).read_bytes())
    except FileNotFoundError:
        raise _damaged(directory, SEAL, "is missing") from None
    except ValueError:
        sealed = None
    if not isinstance(sealed, dict) or not sealed:
        raise _damaged(directory, SEAL, "cannot be read")
    for name, digest in sealed.items():
        path = directory / Path(name).name
        try:
            about = path.stat()
            found = _known_digest(path, about.st_mtime_ns, about.st_ino)
        except OSError:
            raise _damaged(directory, name, "is missing") from None
        if found != digest:
            raise _damaged(directory, name, "does not have the digest that was recorded")


def _damaged(directory: Path, name: str, why: str) -> EngineError:
    """Return the error for files that are not as they were written."""
    return EngineError(f"the saved files are damaged: {name} of {directory.name} {why}")


@lru_cache(maxsize=4096)
def _known_digest(path: Path, changed: int, inode: int) -> str:
    """Return a file's digest, cached while its change time and inode stay."""
    return _digest_of(path)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(write: Callable[[Directory], None], scratch: Path) -> None:
    """Have a writer fill a directory and seal it; remove the directory if that fails."""
    try:
        write(Directory(scratch))
        seal(scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
