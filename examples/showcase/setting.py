"""What the eight programs share: where the server is, how text becomes data, and how a result is
stated.

TINKER_BASE_URL, TINKER_API_KEY and TINKER_BASE_MODEL name another server, its key and another
model; without them the bundled model is trained inside this process. SHOWCASE_SVG names a folder to
write the curves to as SVG files.
"""

from __future__ import annotations

import html
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import tinkex
from tinkex.cli.charts import plot
from tinkex.models import addition
from tinkex.types import Datum, ModelInput, SampledSequence, SamplingParams

BASE_URL = os.environ.get("TINKER_BASE_URL") or "local"
BASE_MODEL = os.environ.get("TINKER_BASE_MODEL") or "tinkex/tiny"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")

console = Console(highlight=False, emoji=False)  # the `:train:` of a run is no emoji
Problem = tuple[int, int]
_tokenizers: dict[str, Any] = {}


def connect() -> tinkex.ServiceClient:
    """A client of the server that the environment names, or of one inside this process."""
    return tinkex.ServiceClient(base_url=BASE_URL)  # reads TINKER_API_KEY by itself


# ── text and data ─────────────────────────────────────────────────────────────────────────────────


def problems(held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on, and so many others to test with: no training text has those, in either
    order.
    """
    return addition.training_problems(), random.Random(seed).sample(
        addition.held_out_problems(), held_out
    )


def tokenizer_of(sampler: tinkex.SamplingClient) -> Any:
    """The tokenizer of the base model. `get_tokenizer` asks the server which that is; here once is
    enough.
    """
    if BASE_MODEL not in _tokenizers:
        _tokenizers[BASE_MODEL] = sampler.get_tokenizer()
    return _tokenizers[BASE_MODEL]


def example(tokenizer: Any, prompt: str, answer: str) -> Datum:
    """A prompt with the answer to learn: the target of each token is the one after it, and only the
    answer counts.
    """
    asked = tokenizer.encode(prompt)
    tokens = np.array([*asked, *tokenizer.encode(answer, add_special_tokens=False)])
    weights = np.zeros(tokens.size - 1, dtype=np.float32)
    weights[len(asked) - 1 :] = 1.0
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
    )


def ask(
    sampler: tinkex.SamplingClient,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 8,
    stop: str = "\n",
    seed: int = 0,
) -> list[list[SampledSequence]]:
    """The answers to each prompt. All are asked before the first is waited for: the server draws
    them in one batch.
    """
    tokenizer = tokenizer_of(sampler)
    futures = []
    for number, text in enumerate(prompts):
        # A seed for each prompt: with one for all, all would be answered by the same luck.
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop=stop, seed=10_000 * seed + number
        )
        futures.append(
            sampler.sample(ModelInput.from_ints(tokenizer.encode(text)), samples, params)
        )
    return [future.result().sequences for future in futures]


def answers(
    sampler: tinkex.SamplingClient, prompts: Sequence[str], *, max_tokens: int = 8
) -> list[str]:
    """The likeliest answer to each prompt, without the line break that ends it."""
    tokenizer = tokenizer_of(sampler)
    found = ask(sampler, prompts, max_tokens=max_tokens)
    return [
        tokenizer.decode(group[0].tokens, skip_special_tokens=True).partition("\n")[0]
        for group in found
    ]


def accuracy(sampler: tinkex.SamplingClient, tested: Sequence[Problem]) -> float:
    """The share of sums that the likeliest answer gets right."""
    found = answers(
        sampler, [addition.prompt(a, b) for a, b in tested], max_tokens=addition.MAX_ANSWER_TOKENS
    )
    return sum(
        addition.reward(text, a, b) for text, (a, b) in zip(found, tested, strict=True)
    ) / len(tested)


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────


def draw(title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Curves in the terminal and, where SHOWCASE_SVG names a folder, as a file."""
    for label, values in curves.items():
        width = max(10, min(60, console.width - 12))
        console.print(plot(values, width=width, height=6, label=label), no_wrap=True)
    if folder := os.environ.get("SHOWCASE_SVG"):
        file = Path(folder) / f"{Path(sys.argv[0]).stem}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(svg(title, curves), encoding="utf-8")
        console.print(f"curves written to {file}", soft_wrap=True)


def svg(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """The same curves as an SVG picture, each between its own smallest and largest value."""
    width, height, margin = 640, 320, 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{margin}" y="22" font-size="16">{html.escape(title)}</text>',
    ]
    for number, (label, values) in enumerate(curves.items()):
        low, high = min(values), max(values)
        across = (width - 2 * margin) / max(len(values) - 1, 1)
        up = (height - 2.5 * margin) / ((high - low) or 1.0)
        points = " ".join(
            f"{margin + i * across:.1f},{height - margin - (value - low) * up:.1f}"
            for i, value in enumerate(values)
        )
        colour = COLOURS[number % len(COLOURS)]
        legend = f"{html.escape(label)} ({low:.3g} to {high:.3g})"
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        lines.append(
            f'<text x="{margin + 300 * number}" y="{height - 12}" font-size="13" '
            f'fill="{colour}">{legend}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def conclude(stated: str, measured: str, reached: bool) -> None:
    """Say what was stated and what was measured; a program that does not reach its result fails."""
    console.print(f"\nstated:   {stated}\nmeasured: {measured}", soft_wrap=True)
    console.print(
        f"result:   {'reached' if reached else 'NOT reached'}, {sum(os.times()[:4]):.0f} s of CPU "
        "time"
    )
    if not reached:
        sys.exit(1)
