"""`tinkex completion`: the script that has a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete, ShellComplete, get_completion_class

VARIABLE = "_TINKEX_COMPLETE"
FISH = """\
function _tinkex_completion
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) tinkex)

    for completion in $response
        set -l found (string split --max 1 "," -- $completion)

        switch $found[1]
            case dir
                __fish_complete_directories $found[2]
            case file
                __fish_complete_path $found[2]
            case plain
                echo $found[2]
        end
    end
end

complete --no-files --command tinkex --arguments "(_tinkex_completion)"
"""
"""As click's own, which cuts what it says of a command at the first comma."""
HOW = """\b
bash, in ~/.bashrc:
  eval "$(tinkex completion bash)"
zsh, in ~/.zshrc, after compinit:
  eval "$(tinkex completion zsh)"
fish, once:
  tinkex completion fish > ~/.config/fish/completions/tinkex.fish
"""


class FishScript(FishComplete):
    """What fish is given."""

    source_template = FISH


@click.command(epilog=HOW)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> str:
    """Print a script that completes the commands and options of tinkex in your shell."""
    from tinkex.cli.main import cli

    kind = FishScript if shell == "fish" else get_completion_class(shell)
    assert kind is not None
    # Not bash's own method, which starts a bash to learn its version first.
    script = ShellComplete.source(kind(cli, {}, "tinkex", VARIABLE))
    click.echo(script)
    return script
