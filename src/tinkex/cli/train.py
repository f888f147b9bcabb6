"""`tinkex train`: fine-tune a model on a file of examples, on any server, and resume runs."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tinkex.cli.options import API_KEY_HELP, BASE_URL_HELP, switch, timeout_option
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
    help="Peak learning rate.",
)
@click.option(
    "--schedule",
    default="linear",
    show_default=True,
    type=click.Choice(["constant", "linear", "cosine"]),
    help="Learning rate after the warm-up: constant, or falling to zero.",
)
@click.option(
    "--warmup-steps",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Steps of linear warm-up.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    help=f"Passes over the examples.  [default: {EPOCHS}]",
)
@click.option("--steps", type=click.IntRange(1), help="Number of steps, in place of --epochs.")
@click.option(
    "--batch-size",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Examples per step.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Longest example, in tokens.  [default: the model's context, if the server tells]",
)
@click.option(
    "--too-long",
    default="cut",
    show_default=True,
    type=click.Choice(["cut", "skip", "refuse"]),
    help="Longer examples: cut their end, skip them, or refuse to train.",
)
@click.option(
    "--train-on",
    default="assistant",
    show_default=True,
    type=click.Choice(["assistant", "last", "all"]),
    help="Tokens to learn: every answer, the last one, or all.",
)
@click.option(
    "--pairs",
    default="text",
    show_default=True,
    type=click.Choice(["text", "chat"]),
    help="A pair is plain text to continue, or a question and its answer.",
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
@click.option("--name", help="Prefix of checkpoint names.  [default: the name of the file]")
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
    help="Resume the run in this directory from its last checkpoint.",
)
@click.option("--skip-bad", is_flag=True, help="Skip bad lines, instead of training nothing.")
@click.option(
    "--format",
    "output_format",
    default="text",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="Format of the summary on standard output.",
)
@switch("--json", help="Same as --format json.")
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
