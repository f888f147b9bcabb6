"""The `tinkex` command: a group whose commands are loaded when called, so that `--help` and
completion are quick.
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

from tinkex.cli.completion import VARIABLE
from tinkex.cli.options import CommandGroup
from tinkex.cli.outcomes import NO_ROOM, Invocation, Outcome, Result, invocation_of, reason_of

COMMANDS = {
    "auth": ("tinkex.cli.login:auth", "Log in and out, and see who the key belongs to."),
    "billing": ("tinkex.cli.billing:billing", "What was used, and what checkpoints take up."),
    "chat": ("tinkex.cli.chat:chat", "Talk to a model or a checkpoint."),
    "checkpoint": (
        "tinkex.cli.checkpoint:checkpoint",
        "Save, list, share, fetch and compare checkpoints.",
    ),
    "completion": (
        "tinkex.cli.completion:completion",
        "Print a script that completes commands in your shell.",
    ),
    "demo": ("tinkex.cli.demo:demo", "Watch a small model learn to add, on this machine."),
    "doctor": (
        "tinkex.cli.doctor:doctor",
        "Check this machine, the key and the server; say what to fix.",
    ),
    "key": ("tinkex.cli.key:key", "Make, list and revoke the keys of a server on this machine."),
    "model": ("tinkex.cli.models:model", "List the models that the server offers."),
    "run": ("tinkex.cli.runs:run", "Sample from a model; list and look up training runs."),
    "serve": ("tinkex.cli.serve:serve", "Serve models on this machine to any Tinker client."),
    "session": ("tinkex.cli.session_commands:session", "List, look up and finish sessions."),
    "train": ("tinkex.cli.train:train", "Fine-tune a model on a file of examples."),
    "version": ("tinkex.cli.versions:version", "Which version this is."),
}
INTERRUPTED = 130
WITHOUT_FORMAT = {"completion", "demo", "serve"}
"""Commands whose output has one form only."""
WITH_TEXT = {"chat", "train"}
"""Commands with a --format of their own, which knows no tables."""
RANGE = re.compile(r"is not a valid (integer|float) range(?=\.)")
"""How click says that a word is no number, where there are bounds."""


class LazyGroup(CommandGroup):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, context: click.Context) -> list[str]:
        """The names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(context)])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands from the table."""
        names = [name for name in self.list_commands(context) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name][1]) for name in names]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tinkex.cli.versions import describe

        click.echo(describe())
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(["table", "json"], case_sensitive=False),
    help="How to print what a command finds; may stand after the command as well.",
)
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
    """Train and sample language models through the Tinker API, on the hosted service or on this
    machine.

    Where to connect and with which key is said by TINKER_BASE_URL and TINKER_API_KEY, or by the
    options of a command; the base URL "local" means this process. `tinkex COMMAND -h` explains a
    command, and `tinkex completion -h` how to have commands completed by your shell.
    """
    command = context.invoked_subcommand
    if form is not None and command in WITH_TEXT:
        raise click.UsageError(f"give --format after the command: `tinkex {command} --format json`")
    if form is not None and command in WITHOUT_FORMAT:
        raise click.UsageError(f"--format has no effect on `{command}`")
    invocation_of(context).format = form


def run(argv: Sequence[str] | None = None) -> Result:
    """Run a command and say how it ended; what goes wrong on purpose is one error on stderr."""
    called = Invocation()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # Not `cli.main`, which ends the process when whoever reads its output goes away.
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
        told = _told(error)
        if told is None:  # nobody foresaw it: a traceback is worth more than a message
            raise
        click.echo(f"Error: {told}", err=True)
        return Result(1, called.command, error=error)
    return _result(called.command, returned)


def _told(error: Exception) -> str | None:
    """One line on an error of ours or of the system's: a folder that is read-only, a full disk
    behind a `>`.
    """
    if hasattr(error, "hint"):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return reason_of(error)
        if error.errno in NO_ROOM:
            _abandon_stdout()  # it may be that which could not be written
            return f"cannot write: {reason_of(error)}"
    return None


def _abandon_stdout() -> None:
    """Nobody reads any more: what is still to be flushed goes nowhere, without another error."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _result(command: str, returned: Any) -> Result:
    if isinstance(returned, Outcome):
        return Result(returned.exit_code, command, returned.data, returned.response)
    return Result(0, command, returned)


def _show(error: click.ClickException) -> None:
    """Print an error; after a usage error, one line that points to the help of its command."""
    click.echo(f"Error: {RANGE.sub(_kind_of_number, error.format_message())}", err=True)
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context is not None:
        click.echo(f"Try `{context.command_path} --help`.", err=True)


def _kind_of_number(found: re.Match[str]) -> str:
    """What a range is a range of; that a word is no range helps nobody."""
    return "is not a whole number" if found[1] == "integer" else "is not a number"


def _open_streams() -> None:
    """A program that was started with a stream closed has none there; nothing is read from it, or
    lost in it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (until the end)


def main() -> None:
    """Run the command line of this process, and end it."""
    _open_streams()
    if VARIABLE in os.environ:  # the shell asks for completions
        cli.main(prog_name="tinkex", complete_var=VARIABLE)
    code = run().exit_code
    # all is put away, and who wants out need not wait for threads such as those of an upload
    if code == INTERRUPTED:
        # which nothing else would call: the last spans of a server are sent by one
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
