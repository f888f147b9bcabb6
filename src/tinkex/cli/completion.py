"""`tinkex completion`: the script that has a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

VARIABLE = "_TINKEX_COMPLETE"
HOW = """\b
bash, in ~/.bashrc:
  eval "$(tinkex completion bash)"
zsh, in ~/.zshrc, after compinit:
  eval "$(tinkex completion zsh)"
fish, once:
  tinkex completion fish > ~/.config/fish/completions/tinkex.fish
"""


@click.command(epilog=HOW)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> str:
    """Print a script that completes the commands and options of tinkex in your shell."""
    from tinkex.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    # Not bash's own method, which starts a bash to learn its version first.
    script = ShellComplete.source(kind(cli, {}, "tinkex", VARIABLE))
    click.echo(script)
    return script
