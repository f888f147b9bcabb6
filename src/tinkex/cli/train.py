"""`tinkex train`: fine-tune a model on a file of examples, on any server, and go on where a run was
broken off.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

from tinkex._version import __version__
from tinkex.cli.options import API_KEY_HELP, BASE_URL_HELP, switch, timeout_option
from tinkex.cli.plot import plot
from tinkex.cli.progress import Display, waiting
from tinkex.cli.servers import (
    capabilities_of,
    context_of,
    model_of,
    open_service,
    place_of,
    tokenizer_of,
)
from tinkex.cli.svg import chart
from tinkex.cli.terminal import plain_console
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.client.training_client import TrainingClient
from tinkex.errors import NotFoundError, TinkerError
from tinkex.finetune import (
    BadLine,
    Example,
    FineTune,
    Fitted,
    Plan,
    Progress,
    RunFolder,
    digest,
    fit,
    hold_out,
    is_full,
    is_lost,
    read_examples,
    render,
    without_answer,
)
from tinkex.text.chat_format import ChatFormat, Rendered
from tinkex.tokenizers import get_tokenizer_id

EPOCHS = 3
KEPT = 3
"""Checkpoints that a run keeps, besides the best one."""
SHOWN = 20
"""Bad lines that are listed one by one."""
NARROW = 60
FULL = "make room where the server keeps checkpoints (`tinkex checkpoint delete`), then "
RECOVERIES = 3
"""How often a run that its server has lost is made anew, without a new checkpoint in between."""
WITH_RESUME = {"data", "resume", "base_url", "api_key", "timeout", "keep", "output_format"}
EITHER_OR = (("epochs", "steps"), ("eval_split", "eval_file"))
NOT_KEPT = {"resume", "config", "api_key", "output_format", "output"}


class Keep(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """How many checkpoints to keep; 0 stands for all."""

    name = "keep"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        """Read a count, or `all`."""
        if value == "all":
            return 0
        try:
            count = int(str(value))
        except ValueError:
            count = -1
        if count < 0:
            self.fail(
                f"{value!r} is neither a whole number from 0 up nor 'all'", parameter, context
            )
        return count


def _read_config(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Take options from a file; those on the command line win."""
    if path is None:
        return None
    try:
        text = path.read_text()
        options = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{path}: {reason}", context, parameter) from None
    known = {
        one.name: one for one in context.command.params if one.name not in ("config", "resume")
    }
    if not isinstance(options, dict):
        raise click.BadParameter(f"{path} holds no table of options", context, parameter)
    given = {name.replace("-", "_"): value for name, value in options.items()}
    given = {
        ("output_format" if name == "format" else name): value for name, value in given.items()
    }
    if unknown := sorted(given.keys() - known.keys()):
        raise click.BadParameter(f"{path}: there is no option {unknown[0]!r}", context, parameter)
    if wrong := [name for name, value in given.items() if not isinstance(value, str | int | float)]:
        raise click.BadParameter(f"{path}: {wrong[0]} must be one value", context, parameter)
    context.default_map = {**(context.default_map or {}), **given}
    return path


@click.command()
@click.argument("data", required=False, type=click.Path(path_type=Path), metavar="DATA.jsonl")
@click.option(
    "--base-model",
    "--model",
    metavar="NAME",
    help="Base model to fine-tune.  [default: tinkex/tiny with local, else required]",
)
@click.option("--base-url", metavar="URL", help=BASE_URL_HELP)
@click.option("--api-key", metavar="KEY", help=API_KEY_HELP)
@timeout_option
@click.option(
    "--rank",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    help="Rank of the LoRA adapter.",
)
@click.option(
    "--train-unembed/--no-train-unembed",
    default=True,
    show_default="on",
    help="Adapt the output layer. Turn it off for models with tied embeddings whose adapter is to "
    "be merged.",
)
@click.option(
    "--learning-rate",
    default=3e-4,
    show_default=True,
    type=float,
    help="The highest learning rate.",
)
@click.option(
    "--schedule",
    default="linear",
    show_default=True,
    type=click.Choice(["constant", "linear", "cosine"]),
    help="How the learning rate goes on: it stays, or falls to zero.",
)
@click.option(
    "--warmup-steps",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Steps to rise over first.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    help=f"How often to go over the examples.  [default: {EPOCHS}]",
)
@click.option(
    "--steps", type=click.IntRange(1), help="How many steps to make, in place of --epochs."
)
@click.option(
    "--batch-size",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Examples in a step.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="The most tokens of an example.  [default: what the model takes, if the server says so]",
)
@click.option(
    "--too-long",
    default="cut",
    show_default=True,
    type=click.Choice(["cut", "skip", "refuse"]),
    help="What to do with longer ones: cut their end off, leave them out, or train nothing.",
)
@click.option(
    "--train-on",
    default="assistant",
    show_default=True,
    type=click.Choice(["assistant", "last", "all"]),
    help="What is learned: every answer, the last one, or all tokens.",
)
@click.option(
    "--pairs",
    default="text",
    show_default=True,
    type=click.Choice(["text", "chat"]),
    help="What a pair is: a text that goes on as it is, or a question and its answer.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Seed of adapter, order and split.",
)
@click.option(
    "--eval-split",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Fraction of examples to hold out.",
)
@click.option(
    "--eval-file", type=click.Path(path_type=Path), help="File of examples to evaluate on."
)
@click.option(
    "--eval-every",
    type=click.IntRange(1),
    help="Steps between evaluations.  [default: an epoch; always at the end]",
)
@click.option(
    "--save-every",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Steps between checkpoints.",
)
@click.option(
    "--keep",
    type=Keep(),
    metavar="N|all",
    help="Checkpoints to keep: the last N and the best by held-out loss; older ones of this run "
    "are deleted. "
    "0 or all: every one.  "
    f"[default: {KEPT}]",
)
@click.option("--name", help="What checkpoints are called.  [default: the name of the file]")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for metrics.jsonl, config.json, run.json and loss.svg.  [default: runs/NAME, "
    "numbered]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_read_config,
    help="TOML or JSON file of options, by their long names; the command line wins.",
)
@click.option(
    "--resume",
    type=click.Path(file_okay=False, path_type=Path),
    help="Go on with the run in this directory, from its last checkpoint.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out, instead of training nothing.")
@click.option(
    "--format",
    "output_format",
    default="text",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="Form of the summary on standard output.",
)
@switch("--json", help="The same as --format json.")
@click.pass_context
def train(context: click.Context, /, **options: Any) -> None:
    """Fine-tune a model on the examples in DATA.jsonl, one a line.

    With nothing configured, the small model that comes with tinkex is trained inside this process.
    A line is a chat or a pair:

    \b
      {"messages": [{"role": "user", "content": "…"},
                    {"role": "assistant", "content": "…"}]}
      {"prompt": "…", "completion": "…"}

    Chats are written by the model's chat template; without one, as "User: …" and "Assistant: …"
    with a blank line after each. A pair is plain text that goes on (or see --pairs). Of chats the
    answers are learned, of pairs the completions.

    \b
      tinkex train examples.jsonl
      tinkex train examples.jsonl --eval-split 0.1 --epochs 5
      tinkex train examples.jsonl --base-url URL --base-model NAME
      tinkex train --resume runs/examples

    Ctrl-C ends a run after its step, with a checkpoint; --resume goes on from there to the same
    result.
    """  # noqa: D301 (click's own sign for lines that are not to be filled)
    if options.pop("json"):
        options["output_format"] = "json"
    _choose_one(context, options)
    if options["resume"] is not None:
        _take_up(context, options)
    if (
        options["eval_every"] is not None
        and options["eval_split"] is None
        and options["eval_file"] is None
    ):
        raise click.UsageError(
            "--eval-every has no effect without --eval-split or --eval-file", context
        )
    if options["data"] is None:
        raise click.UsageError(
            "give a file of examples: tinkex train DATA.jsonl (or --resume DIR)", context
        )
    if not options["learning_rate"] > 0 or math.isinf(options["learning_rate"]):
        raise click.BadParameter(
            "must be a number above zero", context, param_hint="--learning-rate"
        )
    Command(options).run()


def _given(context: click.Context, name: str, *sources: ParameterSource) -> bool:
    return context.get_parameter_source(name) in (
        sources or (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    )


def _choose_one(context: click.Context, options: dict[str, Any]) -> None:
    """Of two options that exclude each other, the command line's wins over the file's."""
    for pair in EITHER_OR:
        given = [name for name in pair if options[name] is not None]
        if len(given) == 2:
            told = [name for name in given if _given(context, name, ParameterSource.COMMANDLINE)]
            if len(told) != 1:
                both = " and ".join(f"--{name.replace('_', '-')}" for name in pair)
                raise click.UsageError(f"{both} exclude each other", context)
            options[pair[0] if told == [pair[1]] else pair[1]] = None


def _take_up(context: click.Context, options: dict[str, Any]) -> None:
    """Replace the options by those of the run to go on with."""
    for name in sorted(options.keys() - WITH_RESUME):
        if _given(context, name):
            shown = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{shown} has no effect with --resume: a run goes on as it was started", context
            )
    try:
        folder = RunFolder.open(options["resume"])
        data = Path(folder.config["data"])
    except (ValueError, KeyError) as error:
        raise click.ClickException(str(error)) from None
    if folder.facts.get("sampler"):
        raise click.ClickException(
            f"the run in {folder.path} is finished: its model is {folder.facts['sampler']}"
        )
    kept = {
        name: value
        for name, value in folder.config.items()
        if name in options and name not in NOT_KEPT
    }
    kept.setdefault("keep", 0)  # who started it was not told that anything would be deleted
    now = {name: options[name] for name in WITH_RESUME if options[name] is not None}
    options.update({**kept, "data": data, **now})
    if options["eval_file"] is not None:
        options["eval_file"] = Path(options["eval_file"])


@dataclass(frozen=True)
class Material:
    """What is trained and evaluated on."""

    train: list[Rendered]
    held_out: list[Rendered]


class Command:
    """One call of `tinkex train`, with its options complete."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.json = options["output_format"] == "json"
        _never_fail_to_write()
        self.notes = plain_console(stderr=True)
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", options["name"] or options["data"].stem)
        self.name = given.lstrip(".-").rstrip("-")[:100] or "run"
        self.folder: RunFolder | None = None
        self.place = self.model = ""
        self.keep: int = KEPT if options["keep"] is None else options["keep"]
        self._service: ServiceClient | None = None
        self._services = contextlib.ExitStack()
        self._held = contextlib.ExitStack()

    def note(self, text: str) -> None:
        """Say something beside the result."""
        self.notes.print(text, soft_wrap=True, markup=False)

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Read, train, tell."""
        began = time.perf_counter()
        files = [
            self.options[name] for name in ("data", "eval_file") if self.options[name] is not None
        ]
        read = [self._read(path) for path in files]
        digests = [digest(path) for path in files]
        with self._held, self._services:
            if self.options["resume"]:
                self._hold(self.options["resume"])
            service = self._connect()
            model = model_of(service, self.options["base_model"], "--base-model")
            self.place, self.model = place_of(service), model
            place = None if self.options["resume"] else self._new_place()
            known = get_tokenizer_id(model)
            material = self._early_material(service, known, read)
            # after the checks: what is refused before it leaves no run
            client = self._client(service)
            try:
                told = get_tokenizer_id(model, client)
                if material is None or told != known:
                    material = self._material(service, told, read)
                plan = self._plan(len(material.train))
                self.folder = self._open_folder(service, place, plan, material, digests)
            except BaseException:
                # nothing will be trained: let the server forget it
                with contextlib.suppress(TinkerError):
                    client.unload_model()
                raise
            finished = self._train(client, plan, material)
            summary = self._summary(plan, finished, began)
        self._show(summary)
        if not finished:
            raise click.exceptions.Exit(130)

    def _connect(self) -> ServiceClient:
        """A client of the server; the one before it, if any, is let go."""
        with contextlib.suppress(TinkerError):
            self._services.close()
        service = open_service(
            self.options["base_url"], self.options["api_key"], self.options["timeout"], self.name
        )
        self._service = self._services.enter_context(service)
        return service

    def _client(self, service: ServiceClient) -> TrainingClient:
        """A fresh run, or one that goes on from the last checkpoint."""
        folder = self.folder or (
            RunFolder.open(self.options["resume"]) if self.options["resume"] else None
        )
        saved = folder.checkpoint if folder else None
        with waiting(f"starting {self.model} {self.place} …"):
            if saved is not None:
                return service.create_training_client_from_state_with_optimizer(saved[1]).result()
            return service.create_lora_training_client(
                self.model,
                rank=self.options["rank"],
                seed=self.options["seed"],
                train_unembed=self.options["train_unembed"],
                user_metadata={"name": self.name},
            ).result()

    # ── data ──────────────────────────────────────────────────────────────────────────────────────

    def _read(self, path: Path) -> list[Example]:
        try:
            examples, bad = read_examples(path)
        except OSError as error:
            told = f"{path} cannot be read: {error.strerror or error}"
            if self.options["resume"] and path == self.options["data"]:
                told += (
                    " (if it was moved: tinkex train --resume "
                    f"{shlex.quote(str(self.options['resume']))} FILE)"
                )
            raise click.ClickException(told) from None
        if not examples and not bad:
            raise click.ClickException(f"{path} is empty: it has no line to learn from")
        lines = len(examples) + len(bad)
        if self.options["train_on"] != "all" and (silent := without_answer(examples)):
            numbers = {one.number for one in silent}
            examples = [example for example in examples if example.number not in numbers]
            bad = sorted([*bad, *silent], key=lambda one: one.number)
        self._judge(path, bad, _count(lines, "line"), lines)
        return examples

    def _judge(self, path: Path, bad: Sequence[BadLine], among: str, lines: int) -> None:
        """Tell of bad lines; unless they may be left out, that is the end."""
        if not bad:
            return
        for one in bad[:SHOWN]:
            self.note(f"{path}: {one}")
        if len(bad) > SHOWN:
            self.note(f"… and {len(bad) - SHOWN:,} more")
        told = f"{len(bad):,} of {among} of {path} {'is' if len(bad) == 1 else 'are'} bad"
        if not self.options["skip_bad"]:
            advice = _whole_file(path, all_bad=len(bad) == lines)
            raise click.ClickException(f"{told}: nothing was trained ({advice})")
        self.note(f"{told} and left out")
        if len(bad) == lines:
            raise click.ClickException(f"{path} has no good line: nothing was trained")

    def _early_material(
        self, service: ServiceClient, tokenizer_id: str, read: Sequence[list[Example]]
    ) -> Material | None:
        """The examples as tokens, before there is a run; None if only a run can tell the tokenizer."""
        try:
            offered = capabilities_of(service).model_names()
            return self._material(service, tokenizer_id, read) if self.model in offered else None
        except TinkerError:
            return None

    def _material(
        self, service: ServiceClient, tokenizer_id: str, read: Sequence[list[Example]]
    ) -> Material:
        """The examples as tokens."""
        chat = ChatFormat(tokenizer_of(tokenizer_id))
        if not chat.has_template and any(one.messages for examples in read for one in examples):
            self.note(
                f'{self.model} has no chat template: chats are written as "User: …" and '
                '"Assistant: …"'
            )
        length = self.options["max_length"] or context_of(service, self.model)
        paths = (self.options["data"], self.options["eval_file"])
        fitted = [
            self._fitted(path, examples, chat, length)
            for path, examples in zip(paths, read, strict=False)
            if path
        ]
        rendered, held_out = hold_out(
            fitted[0], self.options["eval_split"] or 0.0, self.options["seed"]
        )
        if self.options["eval_split"] and not held_out:
            raise click.ClickException("one example cannot be split: leave out --eval-split")
        return Material(rendered, fitted[1] if len(fitted) > 1 else held_out)

    def _fitted(
        self, path: Path, examples: list[Example], chat: ChatFormat, length: int | None
    ) -> list[Rendered]:
        with waiting(f"tokenising {_count(len(examples), 'example')} …"):
            rendered, bad = render(
                examples, chat, train_on=self.options["train_on"], pairs=self.options["pairs"]
            )
        self._judge(path, bad, f"the {_count(len(examples), 'other line')}", len(examples))
        handling = self.options["too_long"]
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
            told = f"{path}: {_count(len(lines), 'example')} longer than {length} tokens"
            if refuse:
                raise click.ClickException(
                    f"{told} (line {first}): nothing was trained (--too-long cut or skip goes on "
                    "without)"
                )
            self.note(f"{told} {done} (line {first})")

    def _plan(self, examples: int) -> Plan:
        options = self.options
        per_epoch = math.ceil(examples / options["batch_size"])
        return Plan(
            examples=examples,
            steps=options["steps"] or (options["epochs"] or EPOCHS) * per_epoch,
            batch_size=options["batch_size"],
            seed=options["seed"],
            learning_rate=options["learning_rate"],
            schedule=options["schedule"],
            warmup_steps=options["warmup_steps"],
            eval_every=options["eval_every"] or per_epoch,
            save_every=options["save_every"],
        )

    # ── the folder ────────────────────────────────────────────────────────────────────────────────

    def _open_folder(
        self,
        service: ServiceClient,
        place: Path | None,
        plan: Plan,
        material: Material,
        digests: list[str],
    ) -> RunFolder:
        facts = {
            "tinkex": __version__,
            "digests": digests,
            "examples": plan.examples,
            "held_out": len(material.held_out),
            "tokens": int(sum(one.tokens.size for one in material.train)),
            "steps": plan.steps,
        }
        if self.options["resume"]:
            return self._same_folder(facts)
        told = {
            **self.options,
            "base_model": self.model,
            "base_url": service.holder.config.base_url,
            "keep": self.keep,
        }
        config = {
            name: value
            for name, value in told.items()
            if value is not None and name not in NOT_KEPT
        }
        for name in ("data", "eval_file"):
            if name in config:
                config[name] = str(config[name].resolve())
        assert place is not None
        try:
            return RunFolder.create(place, config, facts)
        except OSError as error:
            raise self._unwritable(place, error) from None

    def _new_place(self) -> Path:
        """The directory of a new run: made, held, and without a run in it."""
        place: Path = self.options["output"] or self._free_place()
        self._held.callback(
            _remove_empty, [one for one in (place, *place.parents) if not one.exists()]
        )
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._hold(place)
        except OSError as error:
            raise self._unwritable(place, error) from None
        if not (place / "config.json").exists():
            return place
        with contextlib.suppress(ValueError):
            if RunFolder.open(place).facts.get("sampler"):
                raise click.ClickException(f"{place} holds a finished run: give another --output")
        again = f"tinkex train --resume {shlex.quote(str(place))}"
        raise click.ClickException(f"{place} holds a run already: go on with it by `{again}`")

    def _unwritable(self, place: Path, error: OSError) -> click.ClickException:
        return click.ClickException(f"{place} cannot be written to: {error.strerror or error}")

    def _same_folder(self, facts: Mapping[str, Any]) -> RunFolder:
        folder = RunFolder.open(self.options["resume"])
        if folder.facts.get("digests") != facts["digests"]:
            raise click.ClickException(
                f"{self.options['data']} (or the --eval-file) is not what the run in {folder.path} "
                "was started with: "
                "it can only go on with the same examples"
            )
        if changed := [
            name
            for name in ("examples", "tokens", "steps")
            if folder.facts.get(name) != facts[name]
        ]:
            raise click.ClickException(
                f"the run in {folder.path} was started with {folder.facts.get(changed[0])} "
                f"{changed[0]}, and now there "
                f"are {facts[changed[0]]}: the model's tokenizer or its longest input has changed"
            )
        done = folder.checkpoint[0] if folder.checkpoint else 0
        self.note(f"going on with {folder.path} after step {done} of {facts['steps']}")
        return folder

    def _hold(self, place: Path) -> None:
        """Keep others out of the folder until the end: of two that write there, one would lose its
        checkpoints.

        Raises:
            click.ClickException: Another command is at work in it.
        """
        if os.name != "posix":
            return
        import fcntl

        with contextlib.suppress(OSError):  # some file systems have no locks
            folder = os.open(place, os.O_RDONLY)
            self._held.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise click.ClickException(
                    f"another `tinkex train` is at work in {place}"
                ) from None

    def _free_place(self) -> Path:
        numbers = (f"-{number}" if number > 1 else "" for number in range(1, sys.maxsize))
        return next(
            place
            for number in numbers
            if not (place := Path("runs", f"{self.name}{number}")).joinpath("config.json").exists()
        )

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def _train(self, client: TrainingClient, plan: Plan, material: Material) -> bool:
        """Train to the end, or until told to stop; whether it came to the end."""
        assert self.folder is not None
        folder = self.folder
        rows = (
            f"{_count(plan.examples, 'example')}, {_count(plan.steps, 'step')} of "
            f"{min(plan.batch_size, plan.examples)}"
        )
        self.note(
            f"{self.model} {self.place}: {rows}, rank {self.options['rank']}, into {folder.path}"
        )
        lost = 0
        with _StepDisplay(self.notes, plan, folder) as display:
            pruning = Pruning(folder, self.keep, self._delete, display.say)

            def listen(progress: Progress) -> None:
                display.show_step(progress)
                pruning.look()

            while True:
                before = folder.checkpoint
                tune = FineTune(
                    client,
                    plan,
                    material.train,
                    folder,
                    held_out=material.held_out,
                    name=self.name,
                    listener=listen,
                )
                try:
                    with _interrupts(tune, display.say):
                        finished = tune.run()
                        if finished:
                            self._finish(client)
                        pruning.look()
                    return finished
                except TinkerError as error:
                    lost = lost + 1 if folder.checkpoint == before else 1
                    if is_full(error):
                        raise click.ClickException(f"{error}\n{self._saved(FULL)}") from error
                    if not is_lost(error) or lost > RECOVERIES:
                        raise click.ClickException(f"{error}\n{self._saved()}") from error
                    display.say(
                        f"the run broke off ({error.message}): going on from the last checkpoint"
                    )
                except OSError as error:
                    told = f"{folder.path} cannot be written to: {error.strerror or error}"
                    raise click.ClickException(f"{told}\n{self._saved()}") from error
                except KeyboardInterrupt:
                    display.say(self._saved())
                    raise
                try:
                    client = self._client(self._connect())
                except TinkerError as error:
                    raise click.ClickException(f"{error}\n{self._saved()}") from error

    def _finish(self, client: TrainingClient) -> None:
        assert self.folder is not None
        self.folder.facts["sampler"] = client.save_weights_for_sampler(self.name).result().path
        self.folder.save()

    def _delete(self, path: str) -> None:
        assert self._service is not None
        with contextlib.suppress(NotFoundError):  # it has gone before
            RestClient(self._service.holder).delete_checkpoint_from_tinker_path(path).result()

    def _again(self) -> str:
        assert self.folder is not None
        return f"tinkex train --resume {shlex.quote(str(self.folder.path))}"

    def _saved(self, first: str = "") -> str:
        """What is left of a run that ended too soon, and how to go on; what to do first, if
        anything.
        """
        assert self.folder is not None
        if self.folder.checkpoint is None:
            return f"no checkpoint was saved; {first}`{self._again()}` starts over"
        step, path = self.folder.checkpoint
        return f"saved after step {step}: {path}\n{first}go on with: {self._again()}"

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def _summary(self, plan: Plan, finished: bool, began: float) -> dict[str, Any]:
        assert self.folder is not None
        metrics = self.folder.metrics()
        losses = [(record["step"], record["loss"]) for record in metrics if "loss" in record]
        evaluated = [
            (record["step"], record["eval_loss"]) for record in metrics if "eval_loss" in record
        ]
        drawn = chart({"training": losses, "held out": evaluated}, f"{self.name}: loss per token")
        with contextlib.suppress(OSError):  # of all that a run makes, it is missed the least
            (self.folder.path / "loss.svg").write_text(drawn, encoding="utf-8")
        step, state = self.folder.checkpoint or (0, None)
        sampler = self.folder.facts.get("sampler")
        return {
            "status": "finished" if finished else "interrupted",
            "model": self.model,
            "steps": step,
            "of_steps": plan.steps,
            "examples": plan.examples,
            "tokens": sum(record["tokens"] for record in metrics if "tokens" in record),
            "first_loss": losses[0][1] if losses else None,
            "loss": losses[-1][1] if losses else None,
            "eval_loss": evaluated[-1][1] if evaluated else None,
            "seconds": round(time.perf_counter() - began, 3),
            "state_path": state,
            "kept": len(self.folder.facts["checkpoints"]),
            "deleted": self.folder.facts.get("deleted", 0),
            "best_path": self.folder.best[1] if self.folder.best else None,
            "sampler_path": sampler,
            "output": str(self.folder.path),
            "resume": None if finished else self._again(),
            "chat": self._chat(sampler) if sampler else None,
        }

    def _chat(self, sampler: str) -> str:
        assert self.folder is not None
        url = str(self.folder.config["base_url"])
        return f"tinkex chat {sampler}" + (f" --base-url {url}" if self.options["base_url"] else "")

    def _show(self, summary: Mapping[str, Any]) -> None:
        assert self.folder is not None
        if self.json:
            click.echo(json.dumps(summary))
            return
        shown = plain_console()
        points = [
            (record["step"], record["loss"]) for record in self.folder.metrics() if "loss" in record
        ]
        losses = [loss for _, loss in points]
        if len(losses) >= 5:
            width = max(10, min(60, shown.width - 12))
            ends = (f"step {points[0][0]}", points[-1][0])
            shown.print(plot(losses, width=width, label="loss per token", ends=ends), no_wrap=True)
        said = [f"{summary['status']}: {summary['steps']} of {_count(summary['of_steps'], 'step')}"]
        said.append(f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s")
        if losses:
            said.append(f"loss {losses[0]:.4f} → {losses[-1]:.4f}")
        if summary["eval_loss"] is not None:
            evaluated = [
                record["eval_loss"] for record in self.folder.metrics() if "eval_loss" in record
            ]
            said.append(f"held out {evaluated[0]:.4f} → {evaluated[-1]:.4f}")
        shown.print(", ".join(said), markup=False, soft_wrap=True)
        kept, deleted = summary["kept"], summary["deleted"]
        for title, value in (
            ("checkpoint to go on from", summary["state_path"]),
            (
                "best by held-out loss",
                summary["best_path"] if summary["best_path"] != summary["state_path"] else None,
            ),
            ("model to sample from", summary["sampler_path"]),
            ("checkpoints kept", f"{kept} of {kept + deleted} (--keep)" if deleted else None),
            ("metrics and plot", summary["output"]),
            ("go on with", summary["resume"]),
            ("talk to it", summary["chat"]),
        ):
            if value:
                shown.print(f"{title}: {value}", markup=False, soft_wrap=True)


def _whole_file(path: Path, *, all_bad: bool) -> str:
    """What to do about bad lines; where the whole file is of another form, that."""
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
    return "every line is to be one JSON object, a chat or a pair: see `tinkex train -h`"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories in which nothing was put; the others stay."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _never_fail_to_write() -> None:
    """Better a question mark than a traceback where there are no such signs."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


@contextlib.contextmanager
def _interrupts(tune: FineTune, say: Callable[[str], object]) -> Iterator[None]:
    """The first Ctrl-C ends the run after its step, the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def handle(number: int, frame: object) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        tune.stop()
        say("stopping after this step, with a checkpoint (Ctrl-C again: at once)")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Pruning:
    """Deletes the checkpoints that are not to be kept, each after a newer one is there and noted."""

    def __init__(
        self,
        folder: RunFolder,
        keep: int,
        delete: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        self._folder, self._keep, self._delete, self._say = folder, keep, delete, say
        self._seen = folder.checkpoint
        self._complained = False

    def look(self) -> None:
        """Delete what is too much, if there is a new checkpoint; what cannot be deleted stays, and
        does no harm.
        """
        if not self._keep or self._folder.checkpoint == self._seen:
            return
        self._seen = self._folder.checkpoint
        for path in self._folder.surplus(self._keep):
            try:
                self._delete(path)
            except TinkerError as error:
                if not self._complained:
                    self._say(f"{path} was not deleted, and is left for later: {error.message}")
                self._complained = True
                return
            self._folder.forget(path)


class _StepDisplay(Display):
    """The display of a run's steps, with its losses, its speed and the time left."""

    def __init__(self, console: Console, plan: Plan, folder: RunFolder) -> None:
        self._steps, self._first = plan.steps, folder.checkpoint[0] if folder.checkpoint else 0
        self._wide = console.width >= NARROW
        self._loss = self._eval_loss = ""
        bar = None
        if console.is_terminal:
            count = "{task.completed}/{task.total}"
            columns = (
                TextColumn(f"step {count}" if self._wide else count),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", markup=False),
            )
            bar = Bar(*columns, console=console, expand=True)
        super().__init__(bar, total=plan.steps, done=self._first)

    def show_step(self, progress: Progress) -> None:
        """Show the progress of the run after a step."""
        if progress.loss is not None:
            self._loss = f"loss {progress.loss:.4f}"
        if progress.eval_loss is not None:
            self._eval_loss = f"held out {progress.eval_loss:.4f}"
        rate = progress.tokens / progress.seconds if progress.seconds else 0.0
        speed = f"{rate:,.0f} tokens/s" if progress.tokens else ""
        left = ""
        if progress.made:
            seconds = progress.seconds / progress.made * (self._steps - progress.step)
            left = f"{_duration(seconds)} left"
        facts = [self._loss, self._eval_loss, speed, left]
        line = [f"step {progress.step}/{self._steps}", *facts]
        ends = progress.step in (0, self._first + 1, self._steps)
        self.show(
            progress.step,
            text=" ".join(filter(None, facts if self._wide else [self._loss, left])),
            line=lambda: "  ".join(filter(None, line)),
            at_once=ends or progress.eval_loss is not None,
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
