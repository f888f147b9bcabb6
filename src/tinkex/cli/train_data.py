"""The examples of `tinkex train`: read, judged and rendered."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tinkex.cli.progress import waiting
from tinkex.cli.servers import capabilities_of, context_of, tokenizer_of
from tinkex.client.service import ServiceClient
from tinkex.errors import TinkerError
from tinkex.finetune import (
    BadLine,
    Example,
    Fitted,
    fit,
    hold_out,
    read_examples,
    render,
    without_answer,
)
from tinkex.text.chat_format import ChatFormat, Rendered

SHOWN = 20
"""Bad lines that are listed one by one."""


@dataclass(frozen=True)
class Material:
    """The examples to train on and those to evaluate on."""

    train: list[Rendered]
    held_out: list[Rendered]


class Loader:
    """Reads files of examples and renders them as tokens, as the options say.

    Args:
        options: The options of the command.
        note: Prints a line beside the result.
    """

    def __init__(self, options: Mapping[str, Any], note: Callable[[str], object]) -> None:
        self._options, self._note = options, note

    def read(self, path: Path) -> list[Example]:
        """Return the examples of a file; raise if it has none or bad ones."""
        try:
            examples, bad = read_examples(path)
        except OSError as error:
            told = f"{path} cannot be read: {error.strerror or error}"
            if self._options["resume"] and path == self._options["data"]:
                told += (
                    " (if it was moved: tinkex train --resume "
                    f"{shlex.quote(str(self._options['resume']))} FILE)"
                )
            raise click.ClickException(told) from None
        if not examples and not bad:
            raise click.ClickException(f"{path} is empty: it has no line to learn from")
        lines = len(examples) + len(bad)
        if self._options["train_on"] != "all" and (silent := without_answer(examples)):
            numbers = {one.number for one in silent}
            examples = [example for example in examples if example.number not in numbers]
            bad = sorted([*bad, *silent], key=lambda one: one.number)
        self._judge(path, bad, counted(lines, "line"), lines)
        return examples

    def _judge(self, path: Path, bad: Sequence[BadLine], among: str, lines: int) -> None:
        """Report bad lines; raise unless they may be left out."""
        if not bad:
            return
        for one in bad[:SHOWN]:
            self._note(f"{path}: {one}")
        if len(bad) > SHOWN:
            self._note(f"… and {len(bad) - SHOWN:,} more")
        told = f"{len(bad):,} of {among} of {path} {'is' if len(bad) == 1 else 'are'} bad"
        if not self._options["skip_bad"]:
            advice = _whole_file(path, all_bad=len(bad) == lines)
            raise click.ClickException(f"{told}: nothing was trained ({advice})")
        self._note(f"{told} and left out")
        if len(bad) == lines:
            raise click.ClickException(f"{path} has no valid line: nothing was trained")

    def early_material(
        self, service: ServiceClient, model: str, tokenizer_id: str, read: Sequence[list[Example]]
    ) -> Material | None:
        """Return the examples as tokens, or None if only a run can name the tokenizer."""
        try:
            offered = capabilities_of(service).model_names()
            return self.material(service, model, tokenizer_id, read) if model in offered else None
        except TinkerError:
            return None

    def material(
        self, service: ServiceClient, model: str, tokenizer_id: str, read: Sequence[list[Example]]
    ) -> Material:
        """Return the examples as tokens, split or with those of the evaluation file."""
        chat = ChatFormat(tokenizer_of(tokenizer_id))
        if not chat.has_template and any(one.messages for examples in read for one in examples):
            self._note(
                f'{model} has no chat template: chats are written as "User: …" and "Assistant: …"'
            )
        length = self._options["max_length"] or context_of(service, model)
        paths = (self._options["data"], self._options["eval_file"])
        fitted = [
            self._fitted(path, examples, chat, length)
            for path, examples in zip(paths, read, strict=False)
            if path
        ]
        rendered, held_out = hold_out(
            fitted[0], self._options["eval_split"] or 0.0, self._options["seed"]
        )
        if self._options["eval_split"] and not held_out:
            raise click.ClickException("one example cannot be split: leave out --eval-split")
        return Material(rendered, fitted[1] if len(fitted) > 1 else held_out)

    def _fitted(
        self, path: Path, examples: list[Example], chat: ChatFormat, length: int | None
    ) -> list[Rendered]:
        with waiting(f"tokenising {counted(len(examples), 'example')} …"):
            rendered, bad = render(
                examples, chat, train_on=self._options["train_on"], pairs=self._options["pairs"]
            )
        self._judge(path, bad, f"the {counted(len(examples), 'other line')}", len(examples))
        handling = self._options["too_long"]
        fitted = fit(rendered, length, cut=handling == "cut")
        self._tell_length(path, fitted, length, refuse=handling == "refuse")
        if not fitted.rendered:
            raise click.ClickException(f"{path}: no example is short enough: nothing was trained")
        return fitted.rendered

    def _tell_length(self, path: Path, fitted: Fitted, length: int | None, *, refuse: bool) -> None:
        for lines, done in ((fitted.cut, "cut"), (fitted.left_out, "left out")):
            if not lines:
                continue
            first = ", ".join(map(str, lines[:5])) + (", …" if len(lines) > 5 else "")
            told = f"{path}: {counted(len(lines), 'example')} longer than {length} tokens"
            if refuse:
                raise click.ClickException(
                    f"{told} (line {first}): nothing was trained (--too-long cut or skip goes on "
                    "without)"
                )
            self._note(f"{told} {done} (line {first})")


def _whole_file(path: Path, *, all_bad: bool) -> str:
    """Return advice about bad lines, or about a file of another form."""
    with path.open("rb") as file:
        begins = file.read(100)
    if begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it looks like UTF-16: save it as UTF-8"
    if not all_bad:
        return "--skip-bad leaves bad lines out"
    begins = begins.removeprefix(codecs.BOM_UTF8).lstrip()
    if begins.startswith(b"["):
        return (
            f"it looks like one JSON array: `jq -c '.[]' {shlex.quote(str(path))}` writes its "
            "items one a line"
        )
    return "each line must be one JSON object, a chat or a pair: see `tinkex train -h`"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
