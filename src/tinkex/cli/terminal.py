"""The consoles that commands write to."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is.

    Numbers are not coloured, and `:train:` in the id of a run stays what it is: rich would make a
    picture of it.
    """
    return Console(stderr=stderr, highlight=False, emoji=False)
