"""The progress of long operations: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

import click

from tinkex.cli.output import plain_console, size

if TYPE_CHECKING:
    from rich.progress import Progress

    from tinkex.types.checkpoints import Cursor

T = TypeVar("T")

LINE_SECONDS = 5.0
"""Seconds between two lines of progress, where there is no terminal."""

Meter = Callable[[int, int], None]


def remaining(done: int, total: int, seconds: float) -> str:
    """Estimate the time left, from the time that the first part took.

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


class Display:
    """The progress of one operation, which the three functions below and `train` and `demo` draw.

    Args:
        bar: The bar to draw; without one, lines go to stderr.
        title: The bar's title.
        total: The number of parts, if it is known.
        done: The number of parts that are done already.
    """

    def __init__(
        self, bar: Progress | None = None, title: str = "", total: int | None = None, done: int = 0
    ) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=total, completed=done, text="") if bar else None
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, text: str) -> None:
        """Print a line; a bar stays below it."""
        if self._bar is None:
            click.echo(text, err=True)
        else:
            self._bar.console.print(text, soft_wrap=True, markup=False)

    def show(
        self,
        done: int,
        total: int | None = None,
        *,
        text: str = "",
        line: Callable[[], str] | None = None,
        at_once: bool = False,
    ) -> None:
        """Show how much is done.

        Args:
            done: The number of parts that are done.
            total: The number of parts, if it was not known before.
            text: Shown at the bar's right, by a column of its own.
            line: Makes the line that stands for a bar where there is none.
            at_once: Print the line even if the last one is recent.
        """
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, text=text)
            return
        now = time.monotonic()
        if line is not None and (at_once or now - self._said >= LINE_SECONDS):
            self._said = now
            self.say(line())

    def end(self, message: str | None = None) -> None:
        """Stop drawing; print a message about what comes next, if any."""
        if self._bar is not None:
            self._bar.stop()
        if message is not None:
            click.echo(message, err=True)


def _on_stderr(title: str, *, of_bytes: bool) -> Display:
    """Return a display on stderr that is erased at the end; rich is imported on a terminal only."""
    if not sys.stderr.isatty():
        return Display()
    from rich import progress as rich

    name = rich.TextColumn("{task.description}", markup=False)
    columns: tuple[rich.ProgressColumn, ...] = (
        rich.SpinnerColumn(),
        name,
        rich.TimeElapsedColumn(),
    )
    if of_bytes:
        bar = rich.BarColumn(bar_width=None)
        columns = (name, bar, rich.DownloadColumn(), rich.TimeRemainingColumn())
    console = plain_console(stderr=True)
    return Display(rich.Progress(*columns, console=console, transient=True), title)


class Transfer:
    """A meter of bytes."""

    def __init__(self, title: str, display: Display) -> None:
        self._title, self._display, self._began = title, display, time.monotonic()

    def __call__(self, done: int, total: int, /) -> None:
        """Show how many bytes of how many have come."""
        self._display.show(
            done, total, line=(lambda: self._line(done, total)) if done < total else None
        )

    def _line(self, done: int, total: int) -> str:
        left = remaining(done, total, time.monotonic() - self._began)
        return f"{self._title}: {size(done)} of {size(total)}" + (f", {left}" if left else "")

    def end(self, title: str) -> None:
        """Stop the meter and print what comes next; others may then write to the terminal."""
        self._display.end(title)


@contextmanager
def transfer(title: str) -> Iterator[Transfer]:
    """Show the progress of a transfer; call the result with the bytes that came and all bytes."""
    with _on_stderr(title, of_bytes=True) as display:
        yield Transfer(title, display)


def waiting(title: str) -> Display:
    """Show on a terminal that a call is waited for, and for how long."""
    return _on_stderr(title, of_bytes=False)


def fetch_pages(
    fetch: Callable[[int, int], tuple[Sequence[T], Cursor | None]],
    what: str,
    page: int,
    limit: int,
    offset: int,
) -> tuple[list[T], int]:
    """Fetch a list page by page.

    Args:
        fetch: Returns a page and the server's cursor, given a count and an offset.
        what: The name of the items, for the lines of progress.
        page: The most items of a page.
        limit: The most items to fetch; 0 for all.
        offset: The number of items to skip.

    Returns:
        The items, and the number of items on the server.
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
