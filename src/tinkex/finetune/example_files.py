"""Files of examples: one JSON object per line, a chat or a pair."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.text.chat_format import ASSISTANT, NO_ANSWER, Message

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
        raise ValueError(f"message {place} is no object with role and content")
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
