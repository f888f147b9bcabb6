"""The `tinkex` command: a group whose commands are loaded when called, so that `--help` is quick."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from tinkex._version import __version__

COMMANDS = {
    "chat": ("tinkex.cli.chat:chat", "Talk to a model or a checkpoint."),
    "checkpoint": ("tinkex.cli.checkpoint:checkpoint", "Bring checkpoints in from elsewhere."),
    "demo": ("tinkex.cli.demo:demo", "Watch a small model learn to add, on this machine."),
    "key": ("tinkex.cli.key:key", "Make, list and revoke the keys of a server on this machine."),
    "serve": ("tinkex.cli.serve:serve", "Serve models on this machine to any Tinker client."),
    "train": ("tinkex.cli.train:train", "Fine-tune a model on a file of examples."),
}


class LazyGroup(click.Group):
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


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
def cli() -> None:
    """Train and sample language models through the Tinker API, on the hosted service or on this machine."""


def main() -> None:
    """Run the command line; what goes wrong on purpose is one line on stderr."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        code = 130
    except Exception as error:
        if not hasattr(error, "hint"):  # not one of ours: a traceback is worth more than a message
            raise
        click.echo(f"Error: {error}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
