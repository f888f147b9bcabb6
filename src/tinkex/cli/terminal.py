"""The consoles that commands write to."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is.

    Rich would colour numbers, and turn `:train:` in the id of a run into a picture.
    """
    return Console(stderr=stderr, highlight=False, emoji=False)
