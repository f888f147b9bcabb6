"""The table of top-level commands, read by main, completion, help, docs and tests."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


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
    "completion": CommandEntry(
        "tinkex.cli.completion:completion",
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
    "model": CommandEntry("tinkex.cli.models:model", "List the models that the server offers."),
    "run": CommandEntry(
        "tinkex.cli.runs:run", "Sample from a model; list and look up training runs."
    ),
    "serve": CommandEntry(
        "tinkex.cli.serve:serve", "Serve models on this machine to any Tinker client.", Form.FIXED
    ),
    "session": CommandEntry(
        "tinkex.cli.session_commands:session", "List, look up and finish sessions."
    ),
    "train": CommandEntry(
        "tinkex.cli.train:train", "Fine-tune a model on a file of examples.", Form.TEXT_OR_JSON
    ),
    "version": CommandEntry("tinkex.cli.versions:version", "Show the version."),
}
COMPLETION_VARIABLE = "_TINKEX_COMPLETE"
"""Environment variable by which a shell asks for completions."""
