"""Streams: answers read piece by piece, such as the tokens and the text of samples."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

from tinkex.client.futures.api_future import Future
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleStreamChunk

T = TypeVar("T")

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The sign of a character that has not come whole."""


class Stream(Generic[T]):
    """Pieces of an answer, for `for` in any thread or `async for` in any event loop.

    It has one reader at a time. Leaving a `with` block, or `close()`, hangs up, and the server
    stops. To stop reading does not hang up: the rest may be read later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: deque[T] = deque()
        self._reader: Future[None] | None = None
        self._source: Future[None] | None = None
        self._ended = False

    def begin(self, source: Future[None]) -> None:
        """Take the call that feeds this stream; the stream ends with it."""
        self._source = source
        source.add_done_callback(self._end)

    def put(self, chunk: T) -> None:
        """Pass a chunk to the reader."""
        with self._lock:
            self._chunks.append(chunk)
            reader, self._reader = self._reader, None
        _wake(reader)

    def _end(self, source: object) -> None:
        with self._lock:
            self._ended = True
            reader, self._reader = self._reader, None
        _wake(reader)

    def _take(self) -> tuple[T] | Future[None] | None:
        """Return a chunk, a future to wait for, or None at the end; raise the call's error."""
        with self._lock:
            if self._chunks:
                return (self._chunks.popleft(),)
            if not self._ended:
                if self._reader is not None and not self._reader.done():
                    raise RuntimeError(
                        "this stream is being read already: it has one reader at a time"
                    )
                self._reader = Future()
                return self._reader
        assert self._source is not None
        if not self._source.cancelled():
            self._source.result(0)
        return None

    def __iter__(self) -> Iterator[T]:
        while (taken := self._take()) is not None:
            if isinstance(taken, Future):
                try:
                    taken.result()
                finally:
                    # an interrupted reader has given up: let the next one wait
                    taken.cancel()
            else:
                yield taken[0]

    async def __aiter__(self) -> AsyncIterator[T]:
        while (taken := self._take()) is not None:
            if isinstance(taken, Future):
                try:
                    await taken
                finally:
                    taken.cancel()
            else:
                yield taken[0]

    def close(self) -> None:
        """Hang up."""
        if self._source is not None:
            self._source.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


SampleStream: TypeAlias = Stream[SampleStreamChunk]
"""Tokens of samples as they are drawn."""


def _wake(reader: Future[None] | None) -> None:
    if reader is not None and not reader.done():
        reader.set_result(None)


def chunks_of(response: SampleResponse) -> Iterator[SampleStreamChunk]:
    """Yield a whole answer as the chunks of a stream."""
    for index, sequence in enumerate(response.sequences):
        logprobs: Sequence[float | None] = sequence.logprobs or [None] * len(sequence.tokens)
        for token, logprob in zip(sequence.tokens, logprobs, strict=True):
            yield SampleStreamChunk(token_id=token, logprob=logprob, index=index)
        yield SampleStreamChunk(
            index=index,
            finish_reason=sequence.stop_reason,
            total_tokens=len(sequence.tokens),
            event_type="done",
        )


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
