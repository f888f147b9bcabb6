"""The command line. Each command lives in a module of its own that is imported when the command is
run.

Programs call `run`, with the words that a shell would give:

    >>> from tinkex.cli import run
    >>> run(["version"]).exit_code
    tinkex ...
    0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.cli.output import Result


def run(argv: Sequence[str] | None = None) -> Result:
    """Run a command and say how it ended; what it prints goes to stdout and stderr as ever.

    Args:
        argv: The words after `tinkex`; those of this process by default.
    """
    from tinkex.cli.main import run as run_command

    return run_command(argv)
