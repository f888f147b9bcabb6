"""The results of commands, and their output.

Output is tables for people, tab-separated lines for pipes, and JSON for programs.

Sizes and times are rounded for people. JSON has them whole: bytes, and ISO 8601 times.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from tinkex.types.checkpoints import Checkpoint, TrainingRun

NARROWEST_FOLD = 24
"""Smallest width of a folded column; with less room, rows become records."""
GAP = 2
UNITS = ("B", "KB", "MB", "GB", "TB")


# ── results ───────────────────────────────────────────────────────────────────────────────────────


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
    show: str | Callable[[], object] = ""
    """The result for people: the text, or the function that prints it."""
    note: str = ""
    """A line for stderr, printed after the result in either format."""

    def print(self, *, as_json: bool) -> None:
        """Print the result, as JSON or for people."""
        if as_json:
            print_json(self.data)
        elif callable(self.show):
            self.show()
        elif self.show:
            click.echo(self.show)
        if self.note:
            click.echo(self.note, err=True)


@dataclass(slots=True)
class Invocation:
    """The state of one run of the command line, kept in the context."""

    command: str = ""
    format: str | None = None
    """The format that was given: `table`, `json` or none."""


def invocation_of(context: click.Context) -> Invocation:
    """Return the run of a context."""
    return context.find_root().ensure_object(Invocation)


def wants_json() -> bool:
    """Return True if the present command prints JSON."""
    return invocation_of(click.get_current_context()).format == "json"


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


# ── values ────────────────────────────────────────────────────────────────────────────────────────


def size(count: int | None) -> str:
    """Return a number of bytes for people.

    Example:
        >>> size(1536)
        '1.5 KB'
    """
    if count is None:
        return "N/A"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def when(moment: dt.datetime | str | None, now: dt.datetime | None = None) -> str:
    """Return a time relative to now; text that is no time stays as it is.

    Example:
        >>> when("2026-03-10T22:00:00Z", dt.datetime(2026, 3, 11, tzinfo=dt.UTC))
        '2 hours ago'
    """
    if moment is None:
        return "N/A"
    if isinstance(moment, str):
        text = moment
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            return text
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    seconds = ((now or dt.datetime.now(dt.UTC)) - moment).total_seconds()
    amount = _amount(abs(seconds))
    if amount is None:
        return moment.date().isoformat()
    if seconds < 0:
        return f"in {amount}" if amount else "in less than a minute"
    return f"{amount} ago" if amount else "just now"


def _amount(seconds: float) -> str | None:
    """Return a time span in its largest unit; empty if too short, None if too long."""
    days = int(seconds // 86_400)
    if days > 30:
        return None
    if days > 7:
        return counted(days // 7, "week")
    if days >= 1:
        return counted(days, "day")
    if seconds > 3_600:
        return counted(int(seconds // 3_600), "hour")
    return counted(int(seconds // 60), "minute") if seconds > 60 else ""


def counted(number: int, unit: str) -> str:
    """Return a number with its unit, in the plural unless it is one."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def expiry(moment: dt.datetime | str | None, now: dt.datetime | None = None) -> str:
    """Return when something expires."""
    return "Never" if moment is None else when(moment, now)


def lora(is_lora: bool, rank: int | None = None) -> str:
    """Return the rank of a LoRA adapter, or that there is none."""
    if not is_lora:
        return "No"
    return "Yes" if rank is None else f"Yes (rank {rank})"


def status(corrupted: bool, loaded: bool | None = None) -> str:
    """Return a run's state; a server that does not tell has active ones."""
    return "Failed" if corrupted else "Finished" if loaded is False else "Active"


def yes_no(value: bool | None) -> str:
    """Return a flag in words."""
    return "N/A" if value is None else "Yes" if value else "No"


def iso(moment: dt.datetime | None) -> str | None:
    """Return a time by ISO 8601, in UTC."""
    return None if moment is None else moment.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")


def printable(value: object) -> str:
    """Return text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in str(value))


def print_text(text: str) -> None:
    """Print text of several lines; on a terminal without control characters."""
    if is_terminal():
        text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    click.echo(text)


# ── objects ───────────────────────────────────────────────────────────────────────────────────────


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as plain data."""
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.checkpoint_type,
        "tinker_path": checkpoint.tinker_path,
        "training_run_id": checkpoint.training_run_id,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "time": iso(checkpoint.time),
        "expires_at": iso(checkpoint.expires_at),
    }


def run_data(run: TrainingRun) -> dict[str, Any]:
    """Return a training run as plain data."""
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.training_run_id,
        "base_model": run.base_model,
        "model_owner": run.model_owner,
        "is_lora": run.is_lora,
        "lora_rank": run.lora_rank,
        "corrupted": run.corrupted,
        "loaded": run.loaded,
        "last_request_time": iso(run.last_request_time),
        "last_checkpoint": None if last is None else checkpoint_data(last),
        "last_sampler_checkpoint": None if sampler is None else checkpoint_data(sampler),
        "user_metadata": run.user_metadata,
    }


# ── printing ──────────────────────────────────────────────────────────────────────────────────────


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=indent, ensure_ascii=False, default=str))


def never_fail_to_write() -> None:
    """Replace characters that a terminal cannot print, and bytes that cannot be read."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is.

    Rich would colour numbers, and turn `:train:` in the id of a run into a picture.
    """
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False)


def is_terminal() -> bool:
    """Return True if a user sees the output."""
    return sys.stdout.isatty()


def _bold(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else click.style(text, bold=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; only a folded one may span lines, and nothing is cut off."""

    title: str
    folds: bool = False
    right: bool = False
    heads: bool = False
    """True for the column that stands on a line of its own in a record."""
    repeats: bool = False
    """True for a part of that column, which a record leaves out."""


def print_table(title: str, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print rows: a table on a terminal, records if it is narrow, tab-separated in a pipe."""
    cells = [[printable(value) for value in row] for row in rows]
    click.echo(printable(title))
    if not is_terminal():
        for row in [[column.title for column in columns], *cells]:
            click.echo("\t".join(row))
        return
    filled = [index for index in range(len(columns)) if any(row[index] for row in cells)]
    if not filled:
        return
    _print_on_terminal(
        [columns[index] for index in filled], [[row[index] for index in filled] for row in cells]
    )


def _print_on_terminal(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = plain_console()
    widths = [
        max(len(column.title), *(len(row[index]) for row in cells))
        for index, column in enumerate(columns)
    ]
    least = [
        min(width, NARROWEST_FOLD) if column.folds else width
        for width, column in zip(widths, columns, strict=True)
    ]
    if sum(least) + GAP * (len(columns) - 1) > terminal.width:
        for row in cells:
            _print_record(list(zip(columns, row, strict=True)), terminal.width)
        return
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, GAP, 0, 0),
        header_style="" if os.environ.get("NO_COLOR") else "bold",
    )
    for column, width in zip(columns, least, strict=True):
        table.add_column(
            column.title,
            overflow="fold",
            no_wrap=not column.folds,
            min_width=width,
            justify="right" if column.right else "left",
        )
    for row in cells:
        table.add_row(*(Text(value) for value in row))
    terminal.print(table)


def _print_record(row: Sequence[tuple[Column, str]], width: int) -> None:
    """Print a row that is too wide for a table: its heading, then the rest in few lines."""
    heading = next((value for column, value in row if column.heads), None)
    if heading is None:
        click.echo()
        print_fields([(column.title, value) for column, value in row])
        return
    click.echo(_bold(heading))
    line = ""
    for column, value in row:
        if column.heads or column.repeats or not value:
            continue
        fact = f"{column.title} {value}"
        if line and len(line) + GAP + len(fact) > width:
            click.echo(line)
            line = ""
        line += " " * GAP + fact
    if line:
        click.echo(line)


def print_fields(fields: Mapping[str, object] | Sequence[tuple[str, object]]) -> None:
    """Print labelled lines; on a terminal the values are aligned.

    Long text wraps between words. An id or a path never does, so that it can be copied.
    """
    pairs = fields.items() if isinstance(fields, Mapping) else fields
    shown = [(label, printable(value)) for label, value in pairs]
    if not is_terminal():
        for label, value in shown:
            click.echo(f"{label}: {value}")
        return
    indent = max((len(label) for label, _ in shown), default=0) + GAP
    room = max(NARROWEST_FOLD, shutil.get_terminal_size().columns - indent)
    for label, value in shown:
        lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        name = label.ljust(indent)
        if lines:
            click.echo(_bold(name) + f"\n{' ' * indent}".join(lines))


def check_place(path: Path) -> None:
    """Fail early if `write_file` could not write there."""
    place = path.expanduser().absolute()
    above = next(parent for parent in place.parents if parent.exists())
    reason = None
    if place.is_dir():
        reason = errno.EISDIR
    elif not above.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(place if place.exists() and not place.is_file() else above, os.W_OK):
        reason = errno.EACCES
    if reason is not None:
        raise CommandError(f"{path} cannot be written: {os.strerror(reason)}")


def write_file(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file and its directories, atomically unless it is a device or a pipe.

    A private one, and directories that are made for it, are for their owner alone.
    """
    path = path.expanduser()
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if private else os.O_TRUNC)
    try:
        path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        opened = os.open(scratch, flags, 0o600 if private else 0o666)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise CommandError(f"{path} cannot be written: {error.strerror or error}", error) from None
