"""The text of streamed samples: whole characters, as the tokens come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from tinkex.types.sampling import SampleStreamChunk

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The sign of a character that has not come whole."""


class StreamTexts:
    """Gives the chunks of a stream their text, which is worked out when it is first looked at.

    Args:
        load: Loads the tokenizer; called at most once, by the first reader.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer: Any = None
        self._lock = threading.Lock()
        self._samples: dict[int | None, _Sample] = {}

    def add(self, chunk: SampleStreamChunk) -> SampleStreamChunk:
        """The chunk, able to tell its text."""
        sample = self._samples.setdefault(chunk.index, _Sample())
        if chunk.token_id is not None:
            chunk.__dict__["_text"] = partial(self._text_at, sample, len(sample.tokens))
            sample.tokens.append(chunk.token_id)
        elif chunk.event_type == "done":
            chunk.__dict__["_text"] = partial(self._rest, sample)
        return chunk

    def _text_at(self, sample: _Sample, at: int) -> str:
        with self._lock:
            while len(sample.texts) <= at:
                sample.take(self._decode)
            return sample.texts[at]

    def _rest(self, sample: _Sample) -> str:
        with self._lock:
            while len(sample.texts) < len(sample.tokens):
                sample.take(self._decode)
            return sample.rest(self._decode)

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        except TypeError:  # a tokenizer of another kind, which has no such option
            return str(self._tokenizer.decode(tokens))


class _Sample:
    """The tokens of a sample, and the text that each of the first ones adds."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self._from = self._read = 0

    def take(self, decode: Callable[[list[int]], str]) -> None:
        """Work out the text of one more token; none as long as a character is not whole."""
        end = len(self.texts) + 1
        # From a little before, since tokens at the beginning may be written without their space.
        before = decode(self.tokens[self._from : self._read])
        after = decode(self.tokens[self._from : end])
        if len(after) <= len(before) or after.endswith(BROKEN):
            self.texts.append("")
            return
        self._from, self._read = self._read, end
        self.texts.append(after[len(before) :])

    def rest(self, decode: Callable[[list[int]], str]) -> str:
        """The text that no token could tell, such as half a character at the end."""
        before = decode(self.tokens[self._from : self._read])
        return decode(self.tokens[self._from :])[len(before) :]
