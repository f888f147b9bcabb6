"""Files of examples, and examples as tokens.

A file has one JSON object per line, a chat or a pair. Examples are rendered, cut to a length, split
and made into datums.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tinkex.text.chat_format import ASSISTANT, NO_ANSWER, ChatFormat, Message, Rendered, TrainOn
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.training import ForwardBackwardOutput

Pairs: TypeAlias = Literal["text", "chat"]
HELD_OUT = 1
"""Part of the seed of a split, beside the user's seed."""
FORMS = (
    'a chat is {"messages": [{"role": …, "content": …}, …]}, a pair {"prompt": …, "completion": …}'
)


@dataclass(frozen=True)
class BadLine:
    """A line of a file that is no valid example, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(frozen=True)
class Example:
    """A line of a file: a conversation, or a prompt with its completion."""

    number: int
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""

    @classmethod
    def parse(cls, number: int, line: bytes) -> Example:
        """Parse a line; raise ValueError with the reason if it is invalid."""
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"it is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}"
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {_kind(value)}, not an object: {FORMS}")
        if "messages" in value:
            return cls(number, messages=_messages(value["messages"]))
        if "prompt" in value and "completion" in value:
            return cls(
                number,
                prompt=_text(value, "prompt"),
                completion=_text(value, "completion", needed=True),
            )
        keys = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"it is neither a chat nor a pair; its keys are {keys} ({FORMS})")


def read_examples(path: str | os.PathLike[str]) -> tuple[list[Example], list[BadLine]]:
    """Return the examples of a file of JSON lines, and the invalid lines; skip blank ones.

    Raises:
        OSError: The file cannot be read.
    """
    examples: list[Example] = []
    bad: list[BadLine] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not line:
                continue
            try:
                examples.append(Example.parse(number, line))
            except ValueError as error:
                bad.append(BadLine(number, str(error)))
            except RecursionError:
                bad.append(BadLine(number, "it is nested too deeply"))
    return examples, bad


def without_answer(examples: Sequence[Example]) -> list[BadLine]:
    """Return the conversations without a turn of the assistant."""
    return [
        BadLine(example.number, NO_ANSWER)
        for example in examples
        if example.messages and all(message["role"] != ASSISTANT for message in example.messages)
    ]


def digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "truth value", type(None): "null"}
    return kinds.get(type(value), "number")


def _text(value: Mapping[str, Any], name: str, *, needed: bool = False) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ValueError(
            f"{name} must be text, not a JSON "
            f"{_kind(text) if not isinstance(text, dict) else 'object'}"
        )
    if needed and not text:
        raise ValueError(f"{name} is empty: there is nothing to learn")
    return text


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list with at least one message")
    return tuple(_message(place, message) for place, message in enumerate(value, 1))


def _message(place: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"message {place} must be an object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {place} has no role")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"message {place} holds parts that are not text")
        content = "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise ValueError(f"message {place}, of the {role}, has no text as content")
    return {**value, "content": content}


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────


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
        raise ValueError("it is too short: no token is learned")
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
