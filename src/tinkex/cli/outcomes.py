"""The result of a command, returned to the program that ran it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command."""

    exit_code: int
    """0: done; 1: an error; 130: interrupted."""
    command: str
    """The command's full name, such as `checkpoint list`; empty if none was found."""
    data: Any = None
    """The data that `--json` prints, or None."""
    response: Any = None
    """The client's own response behind the data, such as a `SampleResponse`."""
    error: BaseException | None = None
    """The exception that was raised."""

    @property
    def ok(self) -> bool:
        """True if the command succeeded."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value of a command that returns more than its data."""

    data: Any
    response: Any = None
    exit_code: int = 0


@dataclass(slots=True)
class Invocation:
    """The state of one run of the command line, kept in the context."""

    command: str = ""
    format: str | None = None
    """The format that was given before the command."""


def invocation_of(context: click.Context) -> Invocation:
    """Return the run of a context."""
    found = context.find_root().ensure_object(Invocation)
    return found


class CommandError(click.ClickException):
    """A failure that is printed as one line; `cause` is the exception behind it."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of writing that do not name the file."""


def reason_of(error: BaseException) -> str:
    """Return the reason of an error; for one of the system, the file and the reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
