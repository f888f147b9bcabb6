"""`tinkex train`: fine-tune a model on a file of examples, on any server, and resume runs."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tinkex.cli.options import option, server_options, text_or_json
from tinkex.cli.train_run import EPOCHS, KEPT, NOT_KEPT, Command
from tinkex.finetune import RunFolder

WITH_RESUME = {"data", "resume", "base_url", "api_key", "timeout", "keep", "output_format"}
EITHER_OR = (("epochs", "steps"), ("eval_split", "eval_file"))


class Keep(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number of checkpoints to keep; 0 means all."""

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
                f"{value!r} is neither a whole number (0 or more) nor 'all'", parameter, context
            )
        return count


def _read_config(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Read options from a file; the command line wins."""
    if path is None:
        return None
    try:
        text = path.read_text()
        options = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{path}: {reason}", context, parameter) from None
    known = {one.name for one in context.command.params} - {"config", "resume"}
    if not isinstance(options, dict):
        raise click.BadParameter(f"{path} holds no table of options", context, parameter)
    given = {name.replace("-", "_"): value for name, value in options.items()}
    if "format" in given:
        given["output_format"] = given.pop("format")
    if unknown := sorted(given.keys() - known):
        raise click.BadParameter(f"{path}: there is no option {unknown[0]!r}", context, parameter)
    if wrong := [name for name, value in given.items() if not isinstance(value, str | int | float)]:
        raise click.BadParameter(f"{path}: {wrong[0]} must be one value", context, parameter)
    context.default_map = {**(context.default_map or {}), **given}
    return path


@click.command()
@click.argument("data", required=False, type=click.Path(path_type=Path), metavar="DATA.jsonl")
@option(
    "--base-model --model",
    "Base model to fine-tune.  [default: tinkex/tiny with local, else required]",
    metavar="NAME",
)
@server_options
@option("--rank", "Rank of the LoRA adapter.", default=32, least=1)
@option(
    "--train-unembed/--no-train-unembed",
    "Adapt the output layer. Turn it off for models with tied embeddings whose adapter is to be "
    "merged.",
    default=True,
    show_default="on",
)
@option("--learning-rate", "Peak learning rate.", default=3e-4)
@option(
    "--schedule",
    "Learning rate after the warm-up: constant, or falling to zero.",
    default="linear",
    choices=["constant", "linear", "cosine"],
)
@option("--warmup-steps", "Steps of linear warm-up.", default=0, least=0)
@option("--epochs", f"Passes over the examples.  [default: {EPOCHS}]", least=1)
@option("--steps", "Number of steps, in place of --epochs.", least=1)
@option("--batch-size", "Examples per step.", default=16, least=1)
@option(
    "--max-length",
    "Longest example, in tokens.  [default: the model's context, if the server tells]",
    least=2,
)
@option(
    "--too-long",
    "Longer examples: cut their end, skip them, or refuse to train.",
    default="cut",
    choices=["cut", "skip", "refuse"],
)
@option(
    "--train-on",
    "Tokens to learn: every answer, the last one, or all.",
    default="assistant",
    choices=["assistant", "last", "all"],
)
@option(
    "--pairs",
    "A pair is plain text to continue, or a question and its answer.",
    default="text",
    choices=["text", "chat"],
)
@option("--seed", "Seed of adapter, order and split.", default=0, least=0)
@option(
    "--eval-split",
    "Fraction of examples to hold out.",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
)
@option("--eval-file", "File of examples to evaluate on.", type=click.Path(path_type=Path))
@option(
    "--eval-every",
    "Steps between evaluations.  [default: an epoch; always at the end]",
    least=1,
)
@option("--save-every", "Steps between checkpoints.", default=50, least=1)
@option(
    "--keep",
    "Checkpoints to keep: the last N and the best by held-out loss; older ones of this run are "
    f"deleted. 0 or all: every one.  [default: {KEPT}]",
    type=Keep(),
    metavar="N|all",
)
@option("--name", "Prefix of checkpoint names.  [default: the name of the file]")
@option(
    "-o --output",
    "Directory for metrics.jsonl, config.json, run.json and loss.svg.  [default: runs/NAME, "
    "numbered]",
    type=click.Path(file_okay=False, path_type=Path),
)
@option(
    "--config",
    "TOML or JSON file of options, by their long names; the command line wins.",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_read_config,
)
@option(
    "--resume",
    "Resume the run in this directory from its last checkpoint.",
    type=click.Path(file_okay=False, path_type=Path),
)
@option("--skip-bad", "Skip bad lines, instead of training nothing.", is_flag=True)
@text_or_json("Format of the summary on standard output.")
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
    is_evaluated = options["eval_split"] is not None or options["eval_file"] is not None
    if options["eval_every"] is not None and not is_evaluated:
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
    """Let the command line win where two options exclude each other."""
    for pair in EITHER_OR:
        given = [name for name in pair if options[name] is not None]
        if len(given) == 2:
            told = [name for name in given if _given(context, name, ParameterSource.COMMANDLINE)]
            if len(told) != 1:
                both = " and ".join(f"--{name.replace('_', '-')}" for name in pair)
                raise click.UsageError(f"{both} exclude each other", context)
            options[pair[0] if told == [pair[1]] else pair[1]] = None


def _take_up(context: click.Context, options: dict[str, Any]) -> None:
    """Replace the options by those of the run to resume."""
    for name in sorted(options.keys() - WITH_RESUME):
        if _given(context, name):
            shown = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{shown} has no effect with --resume: a run resumes as it was started", context
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
    kept.setdefault("keep", 0)  # an older run promised to delete nothing
    now = {name: options[name] for name in WITH_RESUME if options[name] is not None}
    options.update({**kept, "data": data, **now})
    if options["eval_file"] is not None:
        options["eval_file"] = Path(options["eval_file"])
