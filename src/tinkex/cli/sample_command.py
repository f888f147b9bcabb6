"""Sampling from a model for `tinkex run`, and the options that change a distribution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import (
    Connection,
    checked_path,
    explaining,
    option,
    switch,
    together,
    wait,
)
from tinkex.cli.output import CommandError, Outcome, check_place, print_text, write_file
from tinkex.cli.progress import waiting

if TYPE_CHECKING:
    from tinkex.types.inputs import ModelInput
    from tinkex.types.sampled import SampledSequence, SampleResponse
    from tinkex.types.sampling_params import SamplingParams

WRONG = "sampling failed (please check your inputs)"
OFF = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


top_p_option = option(
    "--top-p",
    "Sample from the likeliest tokens with this total probability.",
    default=1.0,
    type=click.FloatRange(0, 1, min_open=True),
)
shaping_options = together(
    option(
        "--min-p",
        "Leave out tokens less likely than this share of the likeliest.  [default: off]",
        default=0.0,
        show_default=False,
    ),
    option(
        "--repetition-penalty",
        "Make tokens of the prompt and the answer less likely: above 1.  [default: off]",
        default=1.0,
        show_default=False,
    ),
    option(
        "--presence-penalty",
        "Subtract from the logits of tokens already drawn.  [default: off]",
        default=0.0,
        show_default=False,
    ),
    option(
        "--frequency-penalty",
        "Subtract per occurrence from the logits of tokens already drawn.  [default: off]",
        default=0.0,
        show_default=False,
    ),
    option(
        "--logit-bias",
        "Add to a token's logit, -100 to 100. Repeatable.",
        multiple=True,
        metavar="ID=BIAS",
    ),
    option("--bad-word", "Text never to sample. Repeatable.", multiple=True, metavar="TEXT"),
)
"""Adds options whose values the command passes to `shaping_of`."""


sample_options = together(
    option("--base-model", "The model to sample from.", metavar="NAME"),
    option("--model-path", "A sampler checkpoint (tinker://…) to sample from.", metavar="PATH"),
    option("--prompt", "What to continue.", metavar="TEXT"),
    option(
        "--prompt-file",
        'A file with the prompt: text, or token ids as a JSON list or as {"tokens": [...]}.',
        metavar="FILE",
    ),
    option("--max-tokens", "Longest sample, in tokens.", least=1),
    option("--temperature", "0 is greedy.", default=1.0, type=click.FloatRange(0)),
    option("--top-k", "Sample from the k likeliest tokens; -1 means all.", default=-1),
    top_p_option,
    shaping_options,
    option("--num-samples", "How many samples.", default=1, least=1),
    option("--seed", "The same seed draws the same samples.", type=int),
    option("--stop", "Text that ends a sample. Repeatable.", multiple=True, metavar="TEXT"),
    option("--http-pool", "Number of connections.", metavar="N", least=1),
    option(
        "-o --output",
        "Write the samples to this file instead of printing them.",
        metavar="FILE",
    ),
    switch(
        "--json",
        help="Print the samples as one line of JSON: tokens, log-probabilities, stop reasons.",
    ),
)


PLAIN = ("max_tokens", "temperature", "top_k", "top_p", "seed")
"""Options that are fields of SamplingParams as they are."""


def params_of(given: Mapping[str, Any], shaping: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that the options ask for; `shaping` comes from `shaping_of`."""
    from tinkex.types.sampling_params import SamplingParams

    plain = {name: given[name] for name in PLAIN if name in given}
    return SamplingParams(**plain, stop=list(given.get("stop") or ()) or None, **shaping)


def shaping_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that were set.

    Raises:
        UsageError: One of them cannot be read, or is out of its limits.
    """
    from tinkex.types.sampling_params import SamplingParams

    fields = {name: given[name] for name, off in OFF.items() if given[name] != off}
    if given["logit_bias"]:
        fields["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    if given["bad_word"]:
        fields["bad_words"] = list(given["bad_word"])
    try:
        SamplingParams(**fields)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return fields


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.UsageError(
            f"--logit-bias takes ID=BIAS, such as 42=-100, got {text!r}"
        ) from None


# ── the command ────────────────────────────────────────────────────────────────────────────


def sample(
    *,
    connection: Connection,
    base_model: str | None,
    model_path: str | None,
    prompt: str | None,
    prompt_file: str | None,
    num_samples: int,
    http_pool: int | None,
    output: str | None,
    json: bool,
    **sampling: Any,
) -> Outcome:
    """Sample, and print or write the samples."""
    from tinkex.types.inputs import ModelInput

    if base_model is None and model_path is None:
        raise CommandError(f"{WRONG}: give --base-model or --model-path")
    given = read_prompt(prompt, prompt_file)
    if model_path is not None:
        checked_path(model_path)
    if output is not None:
        check_place(Path(output))
    changes = shaping_of(sampling)
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
            params = params_of(sampling, changes)
            response = wait(sampler.sample(tokens, num_samples, params), seconds)
    data = response_data(response)
    if json:
        content = dumps(data, ensure_ascii=False)
    else:
        described = (
            describe(number, one, tokenizer) for number, one in enumerate(response.sequences, 1)
        )
        content = "\n\n".join(described)
    if output is None:
        print_text(content)
    else:
        write_file(Path(output), content + "\n")
    click.echo(f"Sampling complete ({len(response.sequences)} sequences)", err=json)
    return Outcome(data, response)


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
        found = loads(text)
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
