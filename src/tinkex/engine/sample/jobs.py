"""Sampling jobs: a request, the scores of its prompt, the tokens of its samples, and their ends.

Samples end at stop tokens and stop strings; text is decoded only where a request has stop strings.

Log-probabilities of sampled tokens are those of the temperature-scaled distribution before top-k
and top-p cut it (at temperature 0, of the unscaled one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tinkex.engine.api import (
    RECORDED_TOKENS,
    DrawnToken,
    EngineError,
    Recording,
    SampleDone,
    SampleJob,
    token_limit,
)
from tinkex.engine.losses.examples import read_tokens
from tinkex.engine.sample.blocks import namespace, prompt_keys
from tinkex.engine.sample.logit_changes import Shape
from tinkex.engine.sample.passes import Row, Source
from tinkex.engine.sample.prompt_scores import PromptScores
from tinkex.types.sampled import SampledSequence, StopReason, TopkLogprobs
from tinkex.types.sampling import SampleRequest
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
        """The number of tokens up to which none are forgotten."""

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


NOT_FINITE = "the model's logits are not finite: its weights are broken"
MAX_SAMPLES = 1024
MAX_TOPK = 1024
FIRST_ROOM = 64
"""The first capacity of a recorder, in positions."""


@dataclass(eq=False, slots=True)
class Sample:
    """One of a job's samples: the tokens it has, and its row while it is being decoded.

    A sample that was put back has tokens that its new row must be fed again: `fed` of them have
    been. `drawn` counts tokens that have been chosen on the device and not been read yet.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    topk: list[TopkLogprobs]
    stop_reason: StopReason | None = None
    row: Row | None = None
    fed: int = 0
    drawn: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of in-flight weights, each with the number of tokens drawn before it."""


class Recorder:
    """The recordings of a running job, in arrays that grow with the longest sample."""

    def __init__(self, samples: int, limit: int, vocab: int) -> None:
        room, width = min(limit, FIRST_ROOM), min(RECORDED_TOKENS, vocab)
        self._limit = limit
        self._tokens: Array = np.zeros((samples, room, width), np.int32)
        self._logprobs: Array = np.zeros((samples, room, width), np.float32)
        self._drawn: Array = np.zeros((samples, room), np.float32)

    def add(self, samples: Array, positions: Array, scores: tuple[Array, Array, Array]) -> None:
        """Take in one position of each of these samples."""
        if positions.max() >= self._drawn.shape[1]:
            self._grow()
        for array, numbers in zip((self._tokens, self._logprobs, self._drawn), scores, strict=True):
            array[samples, positions] = numbers

    def _grow(self) -> None:
        more = min(self._limit, 2 * self._drawn.shape[1]) - self._drawn.shape[1]
        self._tokens, self._logprobs, self._drawn = (
            np.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)])
            for array in (self._tokens, self._logprobs, self._drawn)
        )

    def recording(self, sample: int, tokens: Sequence[int], logprobs: Sequence[float]) -> Recording:
        """Return the recording of a sample that has ended, with its reported tokens."""
        count = len(tokens)
        return Recording(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            self._drawn[sample, :count].copy(),
            self._tokens[sample, :count].copy(),
            self._logprobs[sample, :count].copy(),
        )


class Job:
    """One request: its prompt, its samples, and when they end.

    Thousands may wait. So samples and tables are made only when the job runs.
    """

    def __init__(self, source: Source, work: SampleJob, target: str | None = None) -> None:
        config, request = source.model.config, work.request
        self._listener = work.listener
        self.source, self.request, self.seed = source, request, work.seed
        self.prompt = read_tokens(request.prompt, "prompt", config.context)
        _check(request, self.prompt, config.vocab)
        self.limit = token_limit(request, self.prompt.size, config.context)
        self.shape = Shape.of(request.sampling_params, self.prompt, config.vocab, source.tokenizer)
        self._stop = StopRule(source, request.sampling_params.stop, request.num_samples)
        self.scores = PromptScores(self.prompt, request, work.seed, config.vocab)
        self.keys = prompt_keys(namespace(source.weights, work.cache), self.prompt)
        self.target = target
        """The in-flight target whose weights it follows."""
        self.reused: int | None = None
        """The number of tokens of the prompt found in the cache, once known."""

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples, by index."""
        return [Sample(index, [], [], []) for index in range(self.request.num_samples)]

    @cached_property
    def recorder(self) -> Recorder | None:
        """The recording of the samples, if the request asks for it."""
        if not self.request.record_stability_info:
            return None
        return Recorder(self.request.num_samples, self.limit, self.source.model.config.vocab)

    def commit(
        self,
        samples: Sequence[Sample],
        tokens: Array,
        logprobs: Array,
        topk: TopkLogprobs | None,
        scores: tuple[Array, Array, Array] | None = None,
        version: int | None = None,
    ) -> None:
        """Give each sample a token, notify the listener, and mark samples that end.

        A recording takes the scores.
        """
        if not np.isfinite(logprobs).all():
            raise EngineError(NOT_FINITE, "server")
        indices = np.array([sample.index for sample in samples])
        if self.recorder is not None and scores is not None:
            self.recorder.add(indices, np.array([len(sample.tokens) for sample in samples]), scores)
        ended = self._stop(indices, tokens)
        drawn = []
        for at, (sample, token, logprob) in enumerate(
            zip(samples, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if version is not None and (not sample.versions or sample.versions[-1][1] != version):
                sample.versions.append((len(sample.tokens), version))
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if topk is not None:
                sample.topk.append(TopkLogprobs(topk.token_ids[at], topk.logprobs[at]))
            if ended[at]:
                sample.stop_reason = "stop"
            elif len(sample.tokens) == self.limit:
                sample.stop_reason = "length"
            drawn.append(
                DrawnToken(
                    sample.index, token, logprob, sample.stop_reason, version, self.reused or 0
                )
            )
        if self._listener is not None:
            self._listener(drawn)

    def full(self, sample: Sample) -> bool:
        """Return whether a sample has all the tokens it may have, read or not."""
        return len(sample.tokens) + sample.drawn >= self.limit

    @property
    def is_scored(self) -> bool:
        """Return whether the request asks for anything about its prompt."""
        return len(self.scores.rows) > 0

    @property
    def first_scored(self) -> int:
        """Return the first position whose hidden state is needed; earlier ones may be found."""
        rows = self.scores.rows
        return rows.start if len(rows) else self.prompt.size - 1

    def done(self, name: str) -> SampleDone:
        """Return the result under a name, once every sample has ended."""
        sequences = [self._sequence(sample) for sample in self.samples]
        response = self.scores.response(sequences, self.reused or 0)
        if self.recorder is None:
            return SampleDone(name, response)
        recorded = [self.recorder.recording(s.index, s.tokens, s.logprobs) for s in self.samples]
        return SampleDone(name, response, recorded)

    def _sequence(self, sample: Sample) -> SampledSequence:
        k = self.request.topk_sample_logprobs
        table = None
        if k:
            ids, values = (
                [row.token_ids for row in sample.topk],
                [row.logprobs for row in sample.topk],
            )
            table = TopkLogprobs(
                np.array(ids, np.int32).reshape(-1, k), np.array(values, np.float32).reshape(-1, k)
            )
        return SampledSequence(
            stop_reason=sample.stop_reason or "length",
            tokens_np=np.array(sample.tokens, np.int32),
            logprobs_np=np.array(sample.logprobs, np.float32),
            topk_logprobs_np=table,
            weights_versions_np=None if self.target is None else _each_version(sample),
        )


def _each_version(sample: Sample) -> Array:
    """Return the version of the weights that drew each token."""
    starts = [start for start, _ in sample.versions]
    counts = np.diff([*starts, len(sample.tokens)]) if starts else 0
    return np.repeat(np.array([version for _, version in sample.versions], np.int64), counts)


def _check(request: SampleRequest, prompt: Array, vocab: int) -> None:
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise EngineError(
            f"num_samples must be between 1 and {MAX_SAMPLES}, got {request.num_samples}"
        )
    if prompt.max() >= vocab:
        raise EngineError(f"prompt: token {prompt.max()} is outside the vocabulary of {vocab}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        most = min(vocab, MAX_TOPK)
        if not 0 <= getattr(request, name) <= most:
            raise EngineError(f"{name} must be between 0 and {most}, got {getattr(request, name)}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and (
        last_n < 1 or not (request.prompt_logprobs or request.topk_prompt_logprobs)
    ):
        raise EngineError("prompt_logprobs_last_n must be at least 1 and needs prompt_logprobs")
