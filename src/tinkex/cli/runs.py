"""`tinkex run`: sample from a model, and look at training runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.options import (
    CommandGroup,
    Connection,
    checked_path,
    connecting,
    explaining,
    formatted,
    refuse_before,
    switch,
    wait,
)
from tinkex.cli.outcomes import CommandError, Outcome, invocation_of
from tinkex.cli.output import (
    Column,
    check_place,
    expiry,
    lora,
    print_fields,
    print_json,
    print_table,
    print_text,
    printable,
    run_data,
    status,
    when,
    write_file,
)
from tinkex.cli.progress import fetch_pages, waiting
from tinkex.cli.sampling_options import shaping_of, shaping_options

if TYPE_CHECKING:
    from tinkex.types.checkpoints import Checkpoint, TrainingRun
    from tinkex.types.inputs import ModelInput
    from tinkex.types.sampled import SampledSequence, SampleResponse

F = TypeVar("F", bound=Callable[..., Any])

PAGE = 100
WRONG = "sampling failed (please check your inputs)"
COLUMNS: dict[str, tuple[Column, Callable[[TrainingRun], object]]] = {
    "id": (Column("ID", heads=True), lambda run: run.training_run_id),
    "model": (Column("Base Model", folds=True), lambda run: run.base_model),
    "owner": (Column("Owner"), lambda run: run.model_owner),
    "lora": (Column("LoRA"), lambda run: lora(run.is_lora, run.lora_rank)),
    "status": (Column("Status"), lambda run: status(run.corrupted, run.loaded)),
    "updated": (Column("Last Update"), lambda run: when(run.last_request_time)),
    "checkpoint": (
        Column("Last Checkpoint"),
        lambda run: run.last_checkpoint and run.last_checkpoint.checkpoint_id,
    ),
    "checkpoint_time": (
        Column("Saved"),
        lambda run: when(run.last_checkpoint.time if run.last_checkpoint else None),
    ),
}
DEFAULT_COLUMNS = "id,model,owner,lora,status,updated"

scope_option = click.option(
    "--access-scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="List your own runs only, or all you may see.",
)


def sample_options(function: F) -> F:
    """Add the options of sampling."""
    options: Sequence[Callable[[F], F]] = (
        click.option("--base-model", metavar="NAME", help="The model to sample from."),
        click.option(
            "--model-path", metavar="PATH", help="A sampler checkpoint (tinker://…) to sample from."
        ),
        click.option("--prompt", metavar="TEXT", help="What to continue."),
        click.option(
            "--prompt-file",
            metavar="FILE",
            help='A file with the prompt: text, or token ids as a JSON list or as {"tokens": '
            "[...]}.",
        ),
        click.option("--max-tokens", type=click.IntRange(1), help="Longest sample, in tokens."),
        click.option(
            "--temperature",
            type=click.FloatRange(0),
            default=1.0,
            show_default=True,
            help="0 is greedy.",
        ),
        click.option(
            "--top-k",
            type=int,
            default=-1,
            show_default=True,
            help="Sample from the k likeliest tokens; -1 means all.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Sample from the likeliest tokens with this total probability.",
        ),
        shaping_options,
        click.option(
            "--num-samples",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="How many samples.",
        ),
        click.option("--seed", type=int, help="The same seed draws the same samples."),
        click.option(
            "--stop", multiple=True, metavar="TEXT", help="Text that ends a sample. Repeatable."
        ),
        click.option(
            "--http-pool", type=click.IntRange(1), metavar="N", help="Number of connections."
        ),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write the samples to this file instead of printing them.",
        ),
        switch(
            "--json",
            help="Print the samples as one line of JSON: tokens, log-probabilities, stop reasons.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.group(cls=CommandGroup, invoke_without_command=True)
@sample_options
@connecting
@click.pass_context
def run(context: click.Context, /, **given: Any) -> Any:
    """Sample from a model; or list training runs (`run list`), or show one (`run info`).

    For example: tinkex run --base-model NAME --prompt "Once upon a time" --max-tokens 64
    """
    if refuse_before(context):
        return None
    if invocation_of(context).format == "json":
        given["json"] = True
    return sample(**given)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


def sample(
    *,
    connection: Connection,
    base_model: str | None,
    model_path: str | None,
    prompt: str | None,
    prompt_file: str | None,
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    seed: int | None,
    stop: tuple[str, ...],
    http_pool: int | None,
    output: str | None,
    json: bool,
    **shaping: Any,
) -> Outcome:
    """Sample, and print or write the samples."""
    from tinkex.types.inputs import ModelInput
    from tinkex.types.sampling import SamplingParams

    if base_model is None and model_path is None:
        raise CommandError(f"{WRONG}: give --base-model or --model-path")
    given = read_prompt(prompt, prompt_file)
    if model_path is not None:
        checked_path(model_path)
    if output is not None:
        check_place(Path(output))
    changes = shaping_of(shaping)
    click.echo("Starting sampling...", err=json)
    pools = None if http_pool is None else {"sample": http_pool}
    with explaining("sampling"), connection.service(pool_sizes=pools) as service:
        seconds = service.holder.config.timeout
        with waiting("sampling"):
            sampler = wait(service.create_sampling_client(model_path, base_model), seconds)
            tokenizer = _Tokenizer(sampler.get_tokenizer)
            tokens: ModelInput = ModelInput.from_ints(
                tokenizer.encode(given) if isinstance(given, str) else given
            )
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=list(stop) or None,
                **changes,
            )
            response = wait(sampler.sample(tokens, num_samples, params), seconds)
    data = response_data(response)
    content = (
        _line(data)
        if json
        else "\n\n".join(
            describe(number, sequence, tokenizer)
            for number, sequence in enumerate(response.sequences, 1)
        )
    )
    if output is None:
        print_text(content)
    else:
        write_file(Path(output), content + "\n")
    click.echo(f"Sampling complete ({len(response.sequences)} sequences)", err=json)
    return Outcome(data, response)


def _line(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


class _Tokenizer:
    """A tokenizer that is loaded on first use; plain token ids need none."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load

    @functools.cached_property
    def _loaded(self) -> Any:
        from tinkex.errors import TinkerError

        try:
            return self._load(backend="tokenizers")  # loads in a tenth of the other library's time
        except TinkerError:
            return self._load()

    def encode(self, text: str) -> list[int]:
        """Return text as token ids."""
        return list(self._loaded.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return token ids as text, or a note in brackets if they cannot be decoded."""
        try:
            return str(self._loaded.decode(tokens))
        except Exception as error:  # of whatever kind: the samples are there, and are worth showing
            return f"[could not be decoded: {error}]"


def read_prompt(prompt: str | None, file: str | None) -> str | list[int]:
    """Return the prompt: text or token ids."""
    if (prompt is None) == (file is None):
        which = (
            "one of --prompt and --prompt-file, not both"
            if prompt is not None
            else "--prompt or --prompt-file"
        )
        raise CommandError(f"{WRONG}: give {which}")
    if file is None:
        return prompt or ""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{WRONG}: {file} cannot be read: {getattr(error, 'strerror', None) or error}", error
        ) from None
    try:
        found = json.loads(text)
    except ValueError:
        return text
    tokens = found.get("tokens") if isinstance(found, dict) else found
    if isinstance(tokens, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in tokens
    ):
        return tokens
    return text


def response_data(response: SampleResponse) -> dict[str, Any]:
    """Return samples as plain data."""
    topk = response.topk_prompt_logprobs
    return {
        "sequences": [
            {
                "tokens": list(sequence.tokens),
                "logprobs": None if sequence.logprobs is None else list(sequence.logprobs),
                "stop_reason": _text(sequence.stop_reason),
            }
            for sequence in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": topk
        and [pairs and [list(pair) for pair in pairs] for pairs in topk],
        "type": "sample",
    }


def _text(reason: object) -> str | None:
    return None if reason is None else str(getattr(reason, "value", reason))


def describe(number: int, sequence: SampledSequence, tokenizer: _Tokenizer) -> str:
    """Return a sample as text for people."""
    facts = [] if sequence.stop_reason is None else [f"stop_reason={_text(sequence.stop_reason)}"]
    if sequence.logprobs:
        facts.append(f"avg_logprob={sum(sequence.logprobs) / len(sequence.logprobs):.3f}")
    lines = [f"Sample {number}:", tokenizer.decode(sequence.tokens)]
    return "\n".join([*lines, " | ".join(facts)] if facts else lines)


# ── training runs ─────────────────────────────────────────────────────────────────────────────────


@run.command("list")
@click.option(
    "--limit", type=int, default=20, show_default=True, help="Number to list; 0 means all."
)
@click.option("--offset", type=int, default=0, show_default=True, help="Number to skip.")
@scope_option
@click.option(
    "-c",
    "--columns",
    default=DEFAULT_COLUMNS,
    show_default=True,
    help=f"Columns to show: {', '.join(COLUMNS)}.",
)
@formatted
@connecting
def list_command(
    limit: int, offset: int, access_scope: Any, columns: str, as_json: bool, connection: Connection
) -> Outcome:
    """List training runs, the newest first."""
    chosen = [name.strip() for name in columns.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in COLUMNS]:
        raise CommandError(f"--columns: there is no {unknown[0]!r}; there are {', '.join(COLUMNS)}")
    with connection.rest() as rest:

        def fetch(count: int, start: int) -> tuple[list[TrainingRun], Any]:
            found = wait(rest.list_training_runs(count, start, access_scope))
            return found.training_runs, found.cursor

        runs, total = fetch_pages(fetch, "training runs", PAGE, limit, offset)
    data = {"runs": [run_data(item) for item in runs], "total": total, "shown": len(runs)}
    if as_json:
        print_json(data)
    else:
        picked = [COLUMNS[name] for name in chosen]
        rows = [[value(item) or "N/A" for _, value in picked] for item in runs]
        print_table(f"Training runs ({len(runs)}/{total})", [column for column, _ in picked], rows)
    return Outcome(data, runs)


@run.command()
@click.argument("run_id")
@scope_option
@formatted
@connecting
def info(run_id: str, access_scope: Any, as_json: bool, connection: Connection) -> Outcome:
    """Show a training run."""
    with connection.rest() as rest:
        try:
            found = wait(rest.get_training_run(run_id, access_scope))
        except ValueError as error:
            raise CommandError(str(error), error) from None
    data = run_data(found)
    if as_json:
        print_json(data)
        return Outcome(data, found)
    click.echo(printable(f"{found.training_run_id} ({found.base_model})"))
    fields: dict[str, object] = {
        "Owner": found.model_owner,
        "LoRA": "Yes" if found.is_lora else "No",
    }
    if found.lora_rank is not None:
        fields["Rank"] = found.lora_rank
    fields |= {
        "Status": status(found.corrupted, found.loaded),
        "Last update": when(found.last_request_time),
    }
    shown = [*fields.items()]
    shown += _checkpoint_fields("Last training checkpoint", found.last_checkpoint)
    shown += _checkpoint_fields("Last sampler checkpoint", found.last_sampler_checkpoint)
    if found.user_metadata:
        shown.append(
            (
                "Metadata",
                ", ".join(f"{name}={value}" for name, value in found.user_metadata.items()),
            )
        )
    print_fields(shown)
    return Outcome(data, found)


def _checkpoint_fields(label: str, checkpoint: Checkpoint | None) -> list[tuple[str, object]]:
    if checkpoint is None:
        return []
    return [
        (label, checkpoint.checkpoint_id),
        ("  Time", when(checkpoint.time)),
        ("  Expires", expiry(checkpoint.expires_at)),
        ("  Path", checkpoint.tinker_path),
    ]
