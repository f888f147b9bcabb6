"""Places that engines write files to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol


class Place(Protocol):
    """A place for the files of one object: a directory here, or storage elsewhere.

    Its owner makes the files durable once they are written.
    """

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file of this name for writing."""


class Writer(Protocol):
    """The files of an object as it was when the writer was made."""

    def write(self, place: Place) -> None:
        """Write the files.

        It may be called later and on another thread, while the engine goes on.
        """


@dataclass(frozen=True, slots=True)
class Directory(Place):
    """A directory on this machine, which exists."""

    path: Path

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file of this name for writing."""
        return (self.path / name).open("wb")
