"""How a command ends: what it hands back to the program that ran it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    exit_code: int
    """0: done; 1: an error; 130: interrupted."""
    command: str
    """Which command it was, such as `checkpoint list`; empty when none was found."""
    data: Any = None
    """What `--json` prints, as plain data; None where the command has none."""
    response: Any = None
    """The client's own answer behind the data, where there is one, such as a `SampleResponse`."""
    error: BaseException | None = None
    """What went wrong, as it was raised."""

    @property
    def ok(self) -> bool:
        """Whether it went well."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command returns when it has more to say than its data."""

    data: Any
    response: Any = None
    exit_code: int = 0


@dataclass(slots=True)
class Invocation:
    """What one run of the command line knows of itself; the context's object."""

    command: str = ""
    format: str | None = None
    """The format that was asked for before the command."""


def invocation_of(context: click.Context) -> Invocation:
    """The run that a context belongs to."""
    found = context.find_root().ensure_object(Invocation)
    return found


class CommandError(click.ClickException):
    """A failure that is told in one line; `cause` is what was raised."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What writing fails with, without saying to which file."""


def reason_of(error: BaseException) -> str:
    """What an error says; of the system's own, the file and the reason, without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
