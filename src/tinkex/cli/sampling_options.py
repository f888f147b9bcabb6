"""Options that change the distribution: min_p, penalties, biases and banned words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
OFF = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def shaping_options(function: F) -> F:
    """Add the options; the command passes them on to `shaping_of`."""
    options: tuple[Callable[[F], F], ...] = (
        click.option(
            "--min-p",
            type=float,
            default=0.0,
            help="Leave out tokens less likely than this share of the likeliest.  [default: off]",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            default=1.0,
            help="Make tokens of the prompt and the answer less likely: above 1.  [default: off]",
        ),
        click.option(
            "--presence-penalty",
            type=float,
            default=0.0,
            help="Subtract from the logits of tokens already drawn.  [default: off]",
        ),
        click.option(
            "--frequency-penalty",
            type=float,
            default=0.0,
            help="Subtract per occurrence from the logits of tokens already drawn.  [default: off]",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID=BIAS",
            help="Add to a token's logit, -100 to 100. Repeatable.",
        ),
        click.option(
            "--bad-word", multiple=True, metavar="TEXT", help="Text never to sample. Repeatable."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


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
