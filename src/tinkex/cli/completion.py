"""`tinkex completion`: print the script for shell completion."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete, ShellComplete, get_completion_class

from tinkex.cli.commands import COMPLETION_VARIABLE

FISH = """\
function _tinkex_completion
    set -l asked %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp)
    set -l response (env $asked COMP_CWORD=(commandline -t) tinkex)

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
"""Click's own script cuts a command's summary at the first comma."""
HOW = """\b
bash, in ~/.bashrc:
  eval "$(tinkex completion bash)"
zsh, in ~/.zshrc, after compinit:
  eval "$(tinkex completion zsh)"
fish, once:
  tinkex completion fish > ~/.config/fish/completions/tinkex.fish
"""


class FishScript(FishComplete):
    """The completion of fish, with the script above."""

    source_template = FISH


@click.command(epilog=HOW)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> str:
    """Print a script that completes the commands and options of tinkex in your shell."""
    kind = FishScript if shell == "fish" else get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    # bash's own method would start a bash first, to learn its version
    script = ShellComplete.source(kind(root, {}, "tinkex", COMPLETION_VARIABLE))
    click.echo(script)
    return script
