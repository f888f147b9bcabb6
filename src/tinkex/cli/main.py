"""The `tinkex` command.

Commands are imported when they are called, so that `--help` and completion stay quick.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from tinkex.cli.commands import COMMANDS, COMPLETION_VARIABLE, Form
from tinkex.cli.options import CommandGroup, format_option
from tinkex.cli.output import NO_ROOM, Invocation, Outcome, Result, invocation_of, reason_of

INTERRUPTED = 130
RANGE = re.compile(r"is not a valid (integer|float) range(?=\.)")
"""Click's complaint about a value that is not a number, for an option with bounds."""


class LazyGroup(CommandGroup):
    """A group that lists its commands without importing them."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the sorted names."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].target.split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, COMMANDS[name].summary) for name in self.list_commands(context)]
            )

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands from the table."""
        names = [name for name in self.list_commands(context) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name].summary) for name in names]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tinkex.cli.versions import describe

        click.echo(describe())
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@format_option("Output format; may also stand after the command.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
@click.pass_context
def cli(context: click.Context, form: str | None) -> None:
    """Train and sample language models through the Tinker API.

    The server is the hosted service, another server, or this process (base URL "local"). Set it
    by TINKER_BASE_URL and TINKER_API_KEY, or by a command's options. `tinkex COMMAND -h` explains
    a command, `tinkex completion -h` shell completion.
    """
    command = context.invoked_subcommand
    if form is not None and command in COMMANDS:
        if COMMANDS[command].form is Form.TEXT_OR_JSON:
            raise click.UsageError(
                f"give --format after the command: `tinkex {command} --format json`"
            )
        if COMMANDS[command].form is Form.FIXED:
            raise click.UsageError(f"--format has no effect on `{command}`")
    invocation_of(context).format = form


def run(argv: Sequence[str] | None = None) -> Result:
    """Run a command and return its result; expected errors are one line on stderr."""
    called = Invocation()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # `cli.main` would end the process when the reader of its output goes away.
        with cli.make_context("tinkex", words, obj=called) as context:
            returned = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return Result(error.exit_code, called.command)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return Result(0, called.command)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        click.echo("stopped", err=True)
        return Result(INTERRUPTED, called.command, error=error)
    except click.ClickException as error:
        _show(error)
        return Result(1, called.command, error=getattr(error, "cause", None) or error)
    except BrokenPipeError as error:
        _abandon_stdout()
        return Result(1, called.command, error=error)
    except Exception as error:
        message = _message_of(error)
        if message is None:  # unexpected: a traceback helps more than a message
            raise
        click.echo(f"Error: {message}", err=True)
        return Result(1, called.command, error=error)
    return _result(called.command, returned)


def _message_of(error: Exception) -> str | None:
    """Return one line about an expected error, such as a read-only folder or a full disk."""
    if hasattr(error, "hint"):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return reason_of(error)
        if error.errno in NO_ROOM:
            _abandon_stdout()  # stdout itself may have failed
            return f"cannot write: {reason_of(error)}"
    return None


def _abandon_stdout() -> None:
    """Discard what is still to be flushed, so that it raises no second error."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _result(command: str, returned: Any) -> Result:
    if isinstance(returned, Outcome):
        return Result(returned.exit_code, command, returned.data, returned.response)
    return Result(0, command, returned)


def _show(error: click.ClickException) -> None:
    """Print an error; a usage error also points to the help of its command."""
    click.echo(f"Error: {RANGE.sub(_kind_of_number, error.format_message())}", err=True)
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context is not None:
        click.echo(f"Try `{context.command_path} --help`.", err=True)


def _kind_of_number(found: re.Match[str]) -> str:
    """Name the kind of number that an option takes."""
    return "is not a whole number" if found[1] == "integer" else "is not a number"


def _open_streams() -> None:
    """Open os.devnull in place of each standard stream that was closed at the start."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until the end)


def main() -> None:
    """Run the command line of this process and exit."""
    _open_streams()
    if COMPLETION_VARIABLE in os.environ:  # the shell asks for completions
        cli.main(prog_name="tinkex", complete_var=COMPLETION_VARIABLE)
    code = run().exit_code
    # everything is closed; an interrupt need not wait for threads, such as those of an upload
    if code == INTERRUPTED:
        # os._exit skips these, and one of them sends the server's last spans
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
