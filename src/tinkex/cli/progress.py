"""How far a long operation is, and how long it will take: on stderr, a bar on a terminal, else a
line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from tinkex.cli.output import size

if TYPE_CHECKING:
    from rich.progress import Progress

    from tinkex.types.checkpoints import Cursor

T = TypeVar("T")

LINE_SECONDS = 5.0
"""Where there is no terminal: how often a line says how far it is."""

Meter = Callable[[int, int], None]


def remaining(done: int, total: int, seconds: float) -> str:
    """An estimate of the time left, from the time that the first part took.

    Example:
        >>> remaining(1, 4, 60.0)
        'about 3 min left'
    """
    left = seconds * (total - done) / done if done else 0.0
    if not done or done >= total:
        return ""
    if left < 90:
        return f"about {max(1, round(left))} s left"
    return (
        f"about {round(left / 60)} min left" if left < 5400 else f"about {left / 3600:.1f} h left"
    )


class Transfer(Protocol):
    """A meter of bytes."""

    def __call__(self, done: int, total: int, /) -> None:
        """Show how many have come, and how many there are."""

    def end(self, title: str) -> None:
        """Show no more, and say what comes next; others may write to the terminal then."""


@contextmanager
def transfer(title: str) -> Iterator[Transfer]:
    """Give a meter of bytes: it is called with how many have come, and how many there are."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tinkex.cli.terminal import plain_console

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=plain_console(stderr=True), transient=True) as shown:
        yield _Bar(shown, title)


class _Bar:
    """A meter that draws."""

    def __init__(self, shown: Progress, title: str) -> None:
        self._shown, self._task = shown, shown.add_task(title, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._shown.update(self._task, completed=done, total=total)

    def end(self, title: str) -> None:
        self._shown.stop()
        click.echo(title, err=True)


class _Lines:
    """A meter that writes a line now and then."""

    def __init__(self, title: str) -> None:
        self._title, self._began = title, time.monotonic()
        self._told = self._began

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= LINE_SECONDS and done < total:
            self._told = now
            left = remaining(done, total, now - self._began)
            click.echo(f"{self._title}: {size(done)} of {size(total)}, {left}", err=True)

    def end(self, title: str) -> None:
        click.echo(title, err=True)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Say what is waited for, on a terminal, with the time it takes."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tinkex.cli.terminal import plain_console

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=plain_console(stderr=True), transient=True) as shown:
        shown.add_task(title, total=None)
        yield


def fetch_pages(
    fetch: Callable[[int, int], tuple[Sequence[T], Cursor | None]],
    what: str,
    page: int,
    limit: int,
    offset: int,
) -> tuple[list[T], int]:
    """Fetch a list page by page.

    Args:
        fetch: Gives a page, by how many to give and how many to pass over, with what the server
            says of the whole.
        what: What is listed, in words.
        page: How many a page has at most.
        limit: How many are wanted; 0 for all.
        offset: How many to pass over.

    Returns:
        What was found, and how many there are in all.
    """
    limit, offset = max(limit, 0), max(offset, 0)
    items: list[T] = []
    total: int | None = None
    wanted, began = limit, time.monotonic()
    while True:
        left = wanted - len(items) if wanted else page
        asked = min(page, left)
        found, cursor = fetch(asked, offset + len(items))
        items += found
        if cursor is not None:
            total = cursor.total_count
            there = max(0, total - offset)
            wanted = min(limit, there) if limit else there
        if not found or (wanted and len(items) >= wanted) or (total is None and len(found) < asked):
            break
        if total is not None and not wanted:
            break
        shown = f"{len(items)}/{wanted or '?'}"
        left_text = remaining(len(items), wanted, time.monotonic() - began) if wanted else ""
        click.echo(f"Fetching {what}: {shown}" + (f", {left_text}" if left_text else ""), err=True)
    if total is None:
        total = offset + len(items)
    return items, total
