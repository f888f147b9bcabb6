"""The table of top-level commands, and their completion in a shell.

The table is read by main, completion, help, docs and tests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import click
from click.shell_completion import FishComplete, ShellComplete, get_completion_class


class Form(Enum):
    """The forms in which a command can print its result."""

    TABLE_OR_JSON = "table or json"
    TEXT_OR_JSON = "text or json"
    """The command has a --format of its own, without tables."""
    FIXED = "fixed"


class CommandEntry(NamedTuple):
    """A top-level command, which is imported when it is called."""

    target: str
    """Its address as `module:attribute`."""
    summary: str
    """One line for `tinkex --help` and for shell completion."""
    form: Form = Form.TABLE_OR_JSON


COMMANDS = {
    "auth": CommandEntry("tinkex.cli.login:auth", "Log in and out, and see who owns the key."),
    "billing": CommandEntry("tinkex.cli.billing:billing", "Show usage and checkpoint storage."),
    "chat": CommandEntry(
        "tinkex.cli.chat:chat", "Talk to a model or a checkpoint.", Form.TEXT_OR_JSON
    ),
    "checkpoint": CommandEntry(
        "tinkex.cli.checkpoint:checkpoint", "Save, list, share, fetch and compare checkpoints."
    ),
    "cluster": CommandEntry(
        "tinkex.cli.cluster:cluster", "List and drain the workers of a server."
    ),
    "completion": CommandEntry(
        "tinkex.cli.commands:completion",
        "Print a script that completes commands in your shell.",
        Form.FIXED,
    ),
    "demo": CommandEntry(
        "tinkex.cli.demo:demo", "Watch a small model learn to add, on this machine.", Form.FIXED
    ),
    "doctor": CommandEntry(
        "tinkex.cli.doctor:doctor", "Check this machine, the key and the server; say what to fix."
    ),
    "key": CommandEntry(
        "tinkex.cli.key:key", "Create, list and revoke the keys of a server on this machine."
    ),
    "model": CommandEntry("tinkex.cli.runs:model", "List the models that the server offers."),
    "run": CommandEntry(
        "tinkex.cli.runs:run", "Sample from a model; list and look up training runs."
    ),
    "serve": CommandEntry(
        "tinkex.cli.serve:serve", "Serve models on this machine to any Tinker client.", Form.FIXED
    ),
    "session": CommandEntry("tinkex.cli.runs:session", "List, look up and finish sessions."),
    "train": CommandEntry(
        "tinkex.cli.train:train", "Fine-tune a model on a file of examples.", Form.TEXT_OR_JSON
    ),
    "version": CommandEntry("tinkex.cli.versions:version", "Show the version."),
}
COMPLETION_VARIABLE = "_TINKEX_COMPLETE"
"""Environment variable by which a shell asks for completions."""

# ── completion ────────────────────────────────────────────────────────────────────────────────────

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
