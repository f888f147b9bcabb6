"""Sampling requests: what is asked, what is known about the prompt, which tokens the samples have,
and when they end.

Log-probabilities of sampled tokens are those of the temperature-scaled distribution before top-k
and top-p cut it (at temperature 0, of the unscaled one); those of prompts are at temperature 1.

Axes: T positions of a prompt, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.api import DrawnToken, EngineError, Listener, SampleDone, token_limit
from tinkex.engine.losses.examples import read_tokens
from tinkex.engine.sample.blocks import namespace, prompt_keys
from tinkex.engine.sample.logit_changes import Shape
from tinkex.engine.sample.recordings import Recorder
from tinkex.engine.sample.token_choice import choose, uniforms
from tinkex.engine.train.target_logprobs import LOGITS_BUDGET, log_softmax
from tinkex.types.sampling import (
    EMPTY_CELL,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinkex.types.tensors import Array, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenizers import Tokenizer

    from tinkex.engine.model.decoder import Decoder, Lora
    from tinkex.engine.sample.passes import Row

NOT_FINITE = "the model's logits are not finite: its weights are broken"
MAX_SAMPLES = 1024
MAX_TOPK = 1024
MARGIN = 8
BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of a character, and so most tokens."""
ALTERNATIVES = 1 << 32
"""Alternative tokens of prompts draw from streams beyond those of any sample."""
BARE_WEIGHTS = 0
_NUMBERS = count(BARE_WEIGHTS + 1)


@dataclass(frozen=True)
class Source:
    """What a sampler samples from: frozen weights, and what the model's files say about ending."""

    model: Decoder
    lora: Lora
    eos_tokens: frozenset[int]
    tokenizer: Callable[[], Tokenizer]
    version: int | None = None
    """The version of an in-flight target's weights."""

    def as_version(self, version: int) -> Source:
        """The same weights as a version of an in-flight target."""
        return replace(self, version=version)

    @cached_property
    def weights(self) -> int:
        """A number for these weights, never given to others; samplers of the bare model share
        theirs.
        """
        return next(_NUMBERS) if self.lora.factors else BARE_WEIGHTS


# --- Stopping
# ----------------------------------------------------------------------------------------------------


class StopRule:
    """Says which rows end with the token they have just got."""

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
        self._tokenizer = source.tokenizer  # not the source: that would keep its weights
        if self._strings:
            source.tokenizer()  # a model without one is told at once

    @cached_property
    def _texts(self) -> list[_Text]:
        return [_Text(self._tokenizer()) for _ in range(self._rows)]

    def __call__(self, rows: Array, tokens: Array) -> Array:
        """Whether each row, having got its token, is at its end."""
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        return np.array(
            [
                self._said(row, token) if self._strings else token in self._tokens
                for row, token in pairs
            ]
        )

    def _said(self, row: int, token: int) -> bool:
        text = self._texts[row].add(token, keep=max(map(len, self._strings)))
        return any(string in text for string in self._strings)


class _Text:
    """The end of a row's decoded text, from not many more tokens than a stop string can reach back
    over.

    Decoding a suffix of the tokens can spoil its first characters, such as a space that is
    stripped: the margin. One that begins within a character can spoil them all, where bytes side by
    side are decoded together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._patient = 0
        """Up to so many tokens it is not tried again to forget some."""

    def add(self, token: int, keep: int) -> str:
        """The text after one more token: its part, and at least the `keep` characters before it."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        enough, count = keep + MARGIN, len(self._tokens)
        if count > 2 * BYTES * enough:  # no text, perhaps; so many are enough for any
            self._forget(self._whole(count - BYTES * enough))
        elif len(text) > 2 * enough and count > self._patient:
            self._patient = count + enough // 2
            self._shorten(enough, count / len(text))
        return text

    def _shorten(self, enough: int, tokens_a_character: float) -> None:
        """Forget the first tokens, if what follows them is text, and enough of it."""
        for generous in (1.0, 1.25, 1.5):
            start = self._whole(
                len(self._tokens) - math.ceil(enough * tokens_a_character * generous)
            )
            rest = self._decode(self._tokens[start:])
            if len(rest) >= enough and BROKEN not in rest:
                self._forget(start)
                return

    def _whole(self, start: int) -> int:
        """The last place up to there at which a character begins."""
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


# --- Prompts
# -----------------------------------------------------------------------------------------------------


class PromptScores:
    """What a request wants to know about its prompt, gathered as chunks of logits pass by."""

    def __init__(self, prompt: Array, request: SampleRequest, seed: int, vocab: int) -> None:
        self._prompt, self._request, self._seed = prompt, request, seed
        self._k, self._alternatives = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self._wanted = bool(request.prompt_logprobs) or self._k > 0
        self._first = max(1, prompt.size - (request.prompt_logprobs_last_n or prompt.size))
        self._targets = _Targets.of(request.target_prompt_logprobs, prompt.size, vocab)

    @cached_property
    def logprobs_P(self) -> Array:
        """The log-probability of each token of the prompt. Like the tables below, it is made when
        it is needed.
        """
        return np.full(self._prompt.size, np.nan, dtype=np.float32)

    @cached_property
    def _topk(self) -> TopkLogprobs:
        return _empty_topk(self._prompt.size, self._k)

    @cached_property
    def _alt(self) -> list[Array]:
        return [
            np.zeros((self._prompt.size - 1, self._alternatives), t) for t in (np.int64, np.float32)
        ]

    @property
    def rows(self) -> range:
        """The prompt positions whose logits are needed."""
        if self._targets is not None or self._alternatives:
            return range(self._prompt.size - 1)
        return range(self._first - 1, self._prompt.size - 1) if self._wanted else range(0)

    def add(self, rows: range, logits_TV: torch.Tensor) -> None:
        """Take the logits of these positions; they score the token after each."""
        logprobs_TV = log_softmax(logits_TV)
        after = slice(rows.start + 1, rows.stop + 1)
        if self._wanted:
            targets = torch.from_numpy(self._prompt[after].astype(np.int64)).to(logits_TV.device)
            self.logprobs_P[after] = logprobs_TV.gather(1, targets[:, None])[:, 0].cpu().numpy()
        if self._k:
            _put_topk(self._topk, after, logprobs_TV, self._k)
        if self._targets is not None:
            self._targets.add(rows, logprobs_TV)
        if self._alternatives:
            self._draw(rows, logits_TV)

    def _draw(self, rows: range, logits_TV: torch.Tensor) -> None:
        positions = np.arange(rows.start + 1, rows.stop + 1, dtype=np.uint64)
        span = slice(rows.start, rows.stop)
        for column in range(self._alternatives):
            numbers = uniforms(self._seed, ALTERNATIVES + column, positions)
            tokens, logprobs = choose(
                logits_TV, numbers, [self._request.sampling_params] * len(rows)
            )
            self._alt[0][span, column] = tokens.cpu().numpy()
            self._alt[1][span, column] = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()

    def response(self, sequences: list[SampledSequence], reused: int) -> SampleResponse:
        """The result of the request, of whose prompt so many tokens were found in the cache."""
        if self._wanted:
            self.logprobs_P[: self._first] = np.nan
            _clear(self._topk, self._first)
        return SampleResponse(
            sequences,
            prompt_logprobs_np=self.logprobs_P if self._wanted else None,
            topk_prompt_logprobs_np=self._topk if self._k else None,
            target_prompt_logprobs=None if self._targets is None else self._targets.tensor(),
            prompt_cache_hit_tokens=reused,
            prompt_alt_tokens=PromptAltTokens(*map(TensorData.from_numpy, self._alt))
            if self._alternatives
            else None,
        )


class _Targets:
    """Log-probabilities of chosen tokens at prompt positions: row i of the request scores position
    i + 1.
    """

    def __init__(self, request: TensorData, rows: Array, tokens: Array) -> None:
        self._request, self._rows, self._tokens = request, rows, tokens
        self._logprobs = np.full(tokens.size, np.nan, dtype=np.float32)

    @classmethod
    def of(cls, request: TensorData | None, length: int, vocab: int) -> _Targets | None:
        if request is None:
            return None
        shape, tokens = request.shape or [], request.values
        if request.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
            raise EngineError(
                f"target_prompt_logprobs must be int64 of shape [{length - 1}, K], got {request!r}"
            )
        if tokens.size and (tokens.min() < -1 or tokens.max() >= vocab):
            raise EngineError(
                f"target_prompt_logprobs holds a token outside the vocabulary of {vocab}"
            )
        counts = np.diff(request.csr[0]) if request.csr else np.full(shape[0], shape[1])
        return cls(request, np.repeat(np.arange(shape[0]), counts), tokens)

    def add(self, rows: range, logprobs_TV: torch.Tensor) -> None:
        here = np.flatnonzero(
            (self._rows >= rows.start) & (self._rows < rows.stop) & (self._tokens >= 0)
        )
        at = (torch.from_numpy(self._rows[here] - rows.start), torch.from_numpy(self._tokens[here]))
        self._logprobs[here] = (
            logprobs_TV[tuple(x.to(logprobs_TV.device) for x in at)].cpu().numpy()
        )

    def tensor(self) -> TensorData:
        crow, col = self._request.csr or (None, None)
        return TensorData(self._logprobs, "float32", self._request.shape, crow, col)


def _empty_topk(length: int, k: int) -> TopkLogprobs:
    return TopkLogprobs(
        np.zeros((length, k), np.int32), np.full((length, k), EMPTY_CELL, np.float32)
    )


def _put_topk(table: TopkLogprobs, where: slice, logprobs_TV: torch.Tensor, k: int) -> None:
    values, ids = logprobs_TV.topk(k, dim=-1)
    table.token_ids[where], table.logprobs[where] = ids.cpu().numpy(), values.cpu().numpy()


def _clear(table: TopkLogprobs, length: int) -> None:
    table.token_ids[:length], table.logprobs[:length] = 0, EMPTY_CELL


# --- Jobs
# --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Sample:
    """One of a job's samples: the tokens it has, and its row while it is being decoded.

    A sample that was put back has tokens which its new row must be fed again: `fed` of them have
    been. `drawn` counts tokens that have been chosen on the device and not been read.
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
    """Versions of in-flight weights, each with the number of tokens that were drawn before it."""


class Job:
    """One request: its prompt and what is known of it, its samples, and how they end.

    Thousands may wait. So what takes room for each sample, or for tables, is made when the job's
    turn has come.
    """

    def __init__(
        self,
        source: Source,
        request: SampleRequest,
        seed: int,
        listener: Listener | None = None,
        target: str | None = None,
        cache: str = "",
    ) -> None:
        config = source.model.config
        self._listener = listener
        self.source, self.request, self.seed = source, request, seed
        self.prompt = read_tokens(request.prompt, "prompt", config.context)
        _check(request, self.prompt, config.vocab)
        self.limit = token_limit(request, self.prompt.size, config.context)
        self.shape = Shape.of(request.sampling_params, self.prompt, config.vocab, source.tokenizer)
        self._stop = StopRule(source, request.sampling_params.stop, request.num_samples)
        self.scores = PromptScores(self.prompt, request, seed, config.vocab)
        self.keys = prompt_keys(namespace(source.weights, cache), self.prompt)
        self.target = target
        """The in-flight target whose weights it takes over as they change."""
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
        """Give samples a token each, tell the listener, and mark those that end. A recording takes
        the scores.
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
        """Whether a sample has all the tokens it may have, read or not."""
        return len(sample.tokens) + sample.drawn >= self.limit

    def score_rows(self, start: int, stop: int) -> Iterator[range]:
        """The positions in `[start, stop)` whose logits the request asks for, in portions that fit
        the budget.
        """
        wanted = self.scores.rows
        return _blocks(
            range(max(wanted.start, start), min(wanted.stop, stop)), self.source.model.config.vocab
        )

    @property
    def is_scored(self) -> bool:
        """Return whether the request asks for anything about its prompt."""
        return len(self.scores.rows) > 0

    @property
    def first_scored(self) -> int:
        """The first position whose hidden state is needed; only what lies before it may come from
        others.
        """
        rows = self.scores.rows
        return rows.start if len(rows) else self.prompt.size - 1

    def done(self, name: str) -> SampleDone:
        """The result, once every sample has ended, under the job's name."""
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
                np.zeros((len(sample.topk), k), np.int32),
                np.zeros((len(sample.topk), k), np.float32),
            )
            for at, row in enumerate(sample.topk):
                ids[at], values[at] = row.token_ids, row.logprobs
            table = TopkLogprobs(ids, values)
        return SampledSequence(
            stop_reason=sample.stop_reason or "length",
            tokens_np=np.array(sample.tokens, np.int32),
            logprobs_np=np.array(sample.logprobs, np.float32),
            topk_logprobs_np=table,
            weights_versions_np=None if self.target is None else _each_version(sample),
        )


def _each_version(sample: Sample) -> Array:
    """The version of the weights that drew each token."""
    starts = [start for start, _ in sample.versions]
    counts = np.diff([*starts, len(sample.tokens)]) if starts else 0
    return np.repeat(np.array([version for _, version in sample.versions], np.int64), counts)


def _blocks(rows: range, vocab: int) -> Iterator[range]:
    step = max(1, LOGITS_BUDGET // vocab)
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


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
