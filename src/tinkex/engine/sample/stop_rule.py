"""Decide when samples end: at stop tokens and stop strings.

Text is decoded only where a request has stop strings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tinkex.engine.api import EngineError
from tinkex.engine.sample.passes import Source
from tinkex.types.tensors import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARGIN = 8
BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""The most bytes of a character, and so the most tokens."""


class StopRule:
    """Decides which rows end with the token they have just got."""

    def __init__(self, source: Source, stop: str | Sequence[str | int] | None, rows: int) -> None:
        items = (
            [stop]
            if isinstance(stop, str)
            else sorted(source.eos_tokens)
            if stop is None
            else list(stop)
        )
        ids = [item for item in items if not isinstance(item, str)]
        if any(not 0 <= item < source.model.config.vocab for item in ids):
            raise EngineError(
                f"stop holds a token outside the vocabulary of {source.model.config.vocab}"
            )
        self._tokens = frozenset(ids)
        self._strings = [item for item in items if isinstance(item, str)]
        if "" in self._strings:
            raise EngineError("a stop string must not be empty")
        self._rows = rows
        self._tokenizer = source.tokenizer  # not the source, which would keep its weights
        if self._strings:
            source.tokenizer()  # a model without one fails at once

    @cached_property
    def _texts(self) -> list[_Text]:
        return [_Text(self._tokenizer()) for _ in range(self._rows)]

    def __call__(self, rows: Array, tokens: Array) -> Array:
        """Return whether each row ends with its token."""
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        return np.array(
            [
                self._ends(row, token) if self._strings else token in self._tokens
                for row, token in pairs
            ]
        )

    def _ends(self, row: int, token: int) -> bool:
        text = self._texts[row].add(token, keep=max(map(len, self._strings)))
        return any(string in text for string in self._strings)


class _Text:
    """The end of a row's decoded text, from few more tokens than a stop string can span.

    Decoding a suffix of the tokens can spoil its first characters, such as a space that is
    stripped: the margin. A suffix that begins within a character can spoil all of them, where
    adjacent bytes are decoded together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._patient = 0
        """Up to so many tokens, none are forgotten."""

    def add(self, token: int, keep: int) -> str:
        """Return the text of one more token and at least `keep` characters before it."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        enough, count = keep + MARGIN, len(self._tokens)
        if count > 2 * BYTES * enough:  # perhaps no text; so many are enough for any
            self._forget(self._whole(count - BYTES * enough))
        elif len(text) > 2 * enough and count > self._patient:
            self._patient = count + enough // 2
            self._shorten(enough, count / len(text))
        return text

    def _shorten(self, enough: int, tokens_a_character: float) -> None:
        """Forget the first tokens, if enough text follows them."""
        for generous in (1.0, 1.25, 1.5):
            start = self._whole(
                len(self._tokens) - math.ceil(enough * tokens_a_character * generous)
            )
            rest = self._decode(self._tokens[start:])
            if len(rest) >= enough and BROKEN not in rest:
                self._forget(start)
                return

    def _whole(self, start: int) -> int:
        """Return the last place up to there at which a character begins."""
        for at in range(start, max(0, start - BYTES), -1):
            if any(
                BROKEN not in self._decode(self._tokens[at : at + some])
                for some in range(1, BYTES + 1)
            ):
                return at
        return max(0, start)

    def _forget(self, start: int) -> None:
        del self._tokens[:start]
        self._patient = 0

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
