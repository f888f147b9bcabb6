"""Conversations as tokens: prompts and examples by a chat template, answers back to text.

A tokenizer without a chat template gets a plain format: each message as `User: …`, `Assistant: …`
or `System: …`, followed by a blank line. An answer ends with the end-of-text token, where there is
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tinkex.types.tensors import Array

Message: TypeAlias = Mapping[str, Any]
"""A message: its `role`, its `content`, and whatever else the template knows."""
TrainOn: TypeAlias = Literal["assistant", "last", "all"]

ASSISTANT: Literal["assistant"] = "assistant"
PLAIN_STOPS = ("\nUser:", "\nSystem:")
NO_ANSWER = "no message is the assistant's: there is nothing to learn"
HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, eq=False, slots=True)
class Rendered:
    """An example as tokens, with the weight of each token in the loss."""

    tokens: Array
    weights: Array

    @property
    def learned(self) -> int:
        """Number of tokens to learn; the first token has no context to be predicted from."""
        return int(np.count_nonzero(self.weights[1:]))

    def cut(self, length: int) -> Rendered:
        """The first so many tokens."""
        return Rendered(self.tokens[:length], self.weights[:length])


class ChatFormat:
    """Writes conversations for one tokenizer.

    Args:
        tokenizer: The tokenizer of a client, or any object with `encode` and `decode`.

    Example:
        >>> chat = ChatFormat(sampler.get_tokenizer())
        >>> chat.decode(chat.prompt([{"role": "user", "content": "Hello"}]))
        '...Hello...'
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        is_usual = hasattr(tokenizer, "apply_chat_template")
        self._encoding = {"add_special_tokens": False} if is_usual else {}
        self._decoding = {"skip_special_tokens": True} if is_usual else {}
        self.has_template = is_usual and bool(getattr(tokenizer, "chat_template", None))
        self._eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._eos_text: str = getattr(tokenizer, "eos_token", None) or ""
        # Templates write the begin token themselves.
        self._begin: list[int] = [] if self.has_template else list(tokenizer.encode(""))
        self.stop_tokens, self.stop_texts = self._stops()

    # ── tokens and text ───────────────────────────────────────────────────────────────────────────

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with nothing put around it."""
        return list(self.tokenizer.encode(text, **self._encoding))

    def decode(self, tokens: Sequence[int] | Array) -> str:
        """The text of tokens, without special ones."""
        ids = [int(token) for token in tokens]
        return str(self.tokenizer.decode(ids, **self._decoding))

    def _text(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return a conversation as text, complete or ready for an answer.

        `ValueError` tells why the template refuses it.
        """
        if not self.has_template:
            written = [
                f"{message['role'].capitalize()}: {message['content']}"
                f"{self._eos_text if message['role'] == ASSISTANT else ''}\n\n"
                for message in messages
            ]
            return "".join(written) + ("Assistant:" if generate else "")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # whatever a template does
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def _stops(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return the tokens that end an answer, and the texts where no token does."""
        ends = frozenset() if self._eos is None else frozenset({int(self._eos)})
        if not self.has_template:
            return ends, PLAIN_STOPS
        probe = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"}]
        try:
            tail = self._text(probe).rpartition("answer")[2]
        except ValueError:
            return ends, ()
        tokens = self.encode(tail)
        if tokens and not self.decode(tokens[:1]):  # a special token
            return ends | {tokens[0]}, ()
        return ends, (tail.rstrip(),) if tail.strip() else ()

    @property
    def stop(self) -> list[str | int] | None:
        """Return the `stop` to send: texts if any, else tokens, else None for the default."""
        return list(self.stop_texts) or sorted(self.stop_tokens) or None

    # ── prompts and examples ──────────────────────────────────────────────────────────────────────

    def prompt(self, messages: Sequence[Message]) -> Array:
        """The tokens after which the assistant's next message begins."""
        text, pieces = self._text(messages, generate=True), self._pieces(messages) or []
        known = "".join(piece for piece, _ in pieces)
        if not text.startswith(known):
            pieces, known = [], ""
        return self._joined([*pieces, (text[len(known) :], 0.0)]).tokens

    def conversation(
        self, messages: Sequence[Message], train_on: TrainOn = ASSISTANT
    ) -> list[Rendered]:
        """Return a conversation as examples: usually one.

        Some templates write earlier answers otherwise than the last, for example without thoughts.
        They give one example per answer, so that each is learned as it will be asked for.

        Args:
            messages: The conversation.
            train_on: The tokens to learn: all answers, the last one, or every token.

        Raises:
            ValueError: The template refuses it, or the assistant says nothing.
        """
        if train_on == "all":
            return [self._joined([(self._text(messages), 1.0)])]
        answers = _answers(messages)
        if not answers:
            raise ValueError(NO_ANSWER)
        if train_on == "last":
            return [self._turn(messages, answers[-1])]
        pieces = self._pieces(messages)
        return (
            [self._joined(pieces)] if pieces else [self._turn(messages, index) for index in answers]
        )

    def pair(self, prompt: str, completion: str, train_on: TrainOn = ASSISTANT) -> Rendered:
        """Join a text and its continuation; `train_on` "all" learns the prompt too."""
        begun = [int(token) for token in self.tokenizer.encode(prompt)]
        rest = self.encode(completion)
        if self._eos is not None and rest[-1:] != [self._eos]:
            rest.append(self._eos)
        weights = np.ones(len(begun) + len(rest), dtype=np.float32)
        if train_on != "all":
            weights[: len(begun)] = 0.0
        return Rendered(np.array([*begun, *rest], dtype=np.int64), weights)

    def _turn(self, messages: Sequence[Message], index: int) -> Rendered:
        whole, begin = self._answer(messages, index)
        return self._joined([(whole[:begin], 0.0), (whole[begin:], 1.0)])

    def _answer(self, messages: Sequence[Message], index: int) -> tuple[str, int]:
        """Return the text up to the end of an answer, and the position where the answer begins."""
        whole = self._text(messages[: index + 1])
        prompt = self._text(messages[:index], generate=True)
        if whole.startswith(prompt):
            return whole, len(prompt)
        # Some templates prompt for thoughts and leave them out afterwards.
        return whole, next(
            at
            for at, (one, other) in enumerate(zip(whole + "\0", prompt + "\1", strict=False))
            if one != other
        )

    def _pieces(self, messages: Sequence[Message]) -> list[tuple[str, float]] | None:
        """Cut a conversation's text where answers begin and end.

        The cut keeps tokens as in sampling, where a prompt is tokenised before its answer exists.
        Returns None if the template rewrites earlier answers.
        """
        answers = _answers(messages)
        text = self._text(messages[: answers[-1] + 1]) if answers else ""
        pieces: list[tuple[str, float]] = []
        done = 0
        for index in answers:
            whole, begin = self._answer(messages, index)
            if not text.startswith(whole) or begin < done:
                return None
            pieces += [(text[done:begin], 0.0), (text[begin : len(whole)], 1.0)]
            done = len(whole)
        return pieces

    def _joined(self, pieces: Sequence[tuple[str, float]]) -> Rendered:
        tokens: list[int] = list(self._begin)
        weights = [0.0] * len(tokens)
        for text, weight in pieces:
            encoded = self.encode(text)
            own = [weight] * len(encoded)
            if weight and len(pieces) > 1:  # what follows the end of a turn is never asked for
                last = max(
                    (at for at, token in enumerate(encoded) if token in self.stop_tokens),
                    default=len(encoded),
                )
                own[last + 1 :] = [0.0] * len(own[last + 1 :])
            tokens += encoded
            weights += own
        return Rendered(np.array(tokens, dtype=np.int64), np.array(weights, dtype=np.float32))


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]


class AnswerText:
    """Text of an answer while its tokens arrive, without half characters or end markers.

    Example:
        >>> answer = AnswerText(ChatFormat(tokenizer))
        >>> stream = sampler.sample_stream(prompt, SamplingParams(max_tokens=2, temperature=0))
        >>> (
        ...     "".join(
        ...         answer.add(chunk.token_id) for chunk in stream if chunk.token_id is not None
        ...     )
        ...     + answer.end()
        ... )
        '46'
    """

    def __init__(self, chat: ChatFormat, *, stop_texts: bool = True) -> None:
        self._chat = chat
        self._stops = chat.stop_texts if stop_texts else ()
        self._tokens: list[int] = []
        self._from = self._read = 0
        self._held = ""
        self.ended = False
        """True once the answer has ended; later tokens are not shown."""

    def add(self, token: int) -> str:
        """Take a token; the text that is certain by now."""
        if self.ended:
            return ""
        if token in self._chat.stop_tokens:
            return self.end()
        self._tokens.append(token)
        # From a little before, since tokens at the beginning may be written without their space.
        before = self._chat.decode(self._tokens[self._from : self._read])
        after = self._chat.decode(self._tokens[self._from :])
        if len(after) <= len(before) or after.endswith(HALF_CHARACTER):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return self._shown(after[len(before) :])

    def end(self) -> str:
        """The rest, when no more tokens come."""
        if self.ended:
            return ""
        before = self._chat.decode(self._tokens[self._from : self._read])
        rest = self._chat.decode(self._tokens[self._from :])[len(before) :]
        shown = self._shown(rest)
        if not self.ended:
            shown += self._held
        self._held, self.ended = "", True
        return shown

    def _shown(self, text: str) -> str:
        """Hold back what may be the beginning of a stop; end at a whole one."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.ended = "", True
            return text[: min(found)]
        held = max(
            (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
