"""Examples as tokens: rendered, cut to a length, split and made into datums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tinkex.finetune.example_files import BadLine, Example
from tinkex.text.chat_format import ASSISTANT, ChatFormat, Rendered, TrainOn
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.training import ForwardBackwardOutput

Pairs: TypeAlias = Literal["text", "chat"]
HELD_OUT = 1
"""Part of the seed of a split, beside the user's seed."""


def render(
    examples: Sequence[Example],
    chat: ChatFormat,
    *,
    train_on: TrainOn = ASSISTANT,
    pairs: Pairs = "text",
) -> tuple[list[tuple[int, Rendered]], list[BadLine]]:
    """Return examples as tokens with their line numbers, and the lines that failed.

    Args:
        examples: The examples.
        chat: The model's chat format.
        train_on: The tokens to learn; see `ChatFormat.conversation`.
        pairs: "text" continues the prompt with the completion; "chat" makes a question and its
            answer of them.
    """
    rendered: list[tuple[int, Rendered]] = []
    bad: list[BadLine] = []
    for example in examples:
        try:
            rendered += [(example.number, one) for one in _rendered(example, chat, train_on, pairs)]
        except ValueError as error:
            bad.append(BadLine(example.number, str(error)))
    return rendered, bad


def _rendered(
    example: Example, chat: ChatFormat, train_on: TrainOn, pairs: Pairs
) -> list[Rendered]:
    messages = example.messages
    if not messages and pairs == "text":
        found = [chat.pair(example.prompt, example.completion, train_on)]
    else:
        messages = messages or (
            {"role": "user", "content": example.prompt},
            {"role": ASSISTANT, "content": example.completion},
        )
        found = chat.conversation(messages, train_on)
    if not any(one.learned for one in found):
        raise ValueError("no token of it is learned: it is too short")
    return found


@dataclass(frozen=True)
class Fitted:
    """Examples within the limit of tokens, and the lines of those beyond it."""

    rendered: list[Rendered]
    cut: list[int]
    left_out: list[int]


def fit(
    rendered: Sequence[tuple[int, Rendered]], length: int | None, *, cut: bool = True
) -> Fitted:
    """Cut or leave out examples longer than `length`, and those with nothing left to learn."""
    kept: list[Rendered] = []
    shortened: list[int] = []
    left_out: list[int] = []
    for number, one in rendered:
        if length is None or one.tokens.size <= length:
            kept.append(one)
        elif cut and (shorter := one.cut(length)).learned:
            kept.append(shorter)
            shortened.append(number)
        else:
            left_out.append(number)
    return Fitted(kept, shortened, left_out)


def hold_out(
    rendered: Sequence[Rendered], fraction: float, seed: int
) -> tuple[list[Rendered], list[Rendered]]:
    """Split examples into those to train on and those held out, at least one, by the seed."""
    if not fraction or len(rendered) < 2:
        return list(rendered), []
    count = min(max(1, round(fraction * len(rendered))), len(rendered) - 1)
    chosen = {
        int(index)
        for index in np.random.default_rng([seed, HELD_OUT]).permutation(len(rendered))[:count]
    }
    held = [one for index, one in enumerate(rendered) if index in chosen]
    return [one for index, one in enumerate(rendered) if index not in chosen], held


def datum(one: Rendered) -> Datum:
    """Return an example as a datum: each token predicts the next."""
    inputs = {"target_tokens": one.tokens[1:], "weights": one.weights[1:]}
    return Datum(ModelInput.from_ints(one.tokens[:-1]), inputs)


def summed_loss(output: ForwardBackwardOutput, rendered: Sequence[Rendered]) -> tuple[float, float]:
    """Return the summed loss of a pass and its weight; their quotient is the loss per token."""
    total = weight = 0.0
    for one, tensors in zip(rendered, output.loss_fn_outputs, strict=True):
        weights = one.weights[1:].astype(np.float64)
        total -= float(weights @ tensors["logprobs"].to_numpy().astype(np.float64))
        weight += float(weights.sum())
    return total, weight
