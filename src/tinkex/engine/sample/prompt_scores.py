"""Score prompts: log-probabilities of their tokens, likeliest tokens, alternatives, targets.

Scores of prompts are at temperature 1.

Axes: T positions of a prompt, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.engine.sample.token_choice import choose, uniforms
from tinkex.engine.train.target_logprobs import LOGITS_BUDGET, log_softmax
from tinkex.types.sampled import (
    EMPTY_CELL,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
)
from tinkex.types.sampling import SampleRequest
from tinkex.types.tensors import Array, TensorData

ALTERNATIVES = 1 << 32
"""Alternative tokens of prompts draw from streams beyond those of any sample."""


class PromptScores:
    """The scores of a prompt that a request asks for, gathered from chunks of logits."""

    def __init__(self, prompt: Array, request: SampleRequest, seed: int, vocab: int) -> None:
        self._prompt, self._request, self._seed, self._vocab = prompt, request, seed, vocab
        self._k, self._alternatives = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self._wanted = bool(request.prompt_logprobs) or self._k > 0
        self._first = max(1, prompt.size - (request.prompt_logprobs_last_n or prompt.size))
        self._targets = _Targets.of(request.target_prompt_logprobs, prompt.size, vocab)

    @cached_property
    def logprobs_P(self) -> Array:
        """The log-probability of each token; like the tables below, made when first needed."""
        return np.full(self._prompt.size, np.nan, dtype=np.float32)

    @cached_property
    def _topk(self) -> TopkLogprobs:
        shape = (self._prompt.size, self._k)
        return TopkLogprobs(np.zeros(shape, np.int32), np.full(shape, EMPTY_CELL, np.float32))

    @cached_property
    def _alt(self) -> list[Array]:
        return [
            np.zeros((self._prompt.size - 1, self._alternatives), t) for t in (np.int64, np.float32)
        ]

    @property
    def rows(self) -> range:
        """Return the prompt positions whose logits are needed."""
        if self._targets is not None or self._alternatives:
            return range(self._prompt.size - 1)
        return range(self._first - 1, self._prompt.size - 1) if self._wanted else range(0)

    def portions(self, start: int, stop: int) -> Iterator[range]:
        """Yield the positions in `[start, stop)` whose logits are needed, in portions of a size
        that the budget allows.
        """
        rows, step = self.rows, max(1, LOGITS_BUDGET // self._vocab)
        stop = min(rows.stop, stop)
        for first in range(max(rows.start, start), stop, step):
            yield range(first, min(first + step, stop))

    def add(self, rows: range, logits_TV: Tensor) -> None:
        """Take the logits of these positions; they score the token after each."""
        logprobs_TV = log_softmax(logits_TV)
        after = slice(rows.start + 1, rows.stop + 1)
        if self._wanted:
            targets = torch.from_numpy(self._prompt[after].astype(np.int64)).to(logits_TV.device)
            self.logprobs_P[after] = logprobs_TV.gather(1, targets[:, None])[:, 0].cpu().numpy()
        if self._k:
            values, ids = (x.cpu().numpy() for x in logprobs_TV.topk(self._k, dim=-1))
            self._topk.token_ids[after], self._topk.logprobs[after] = ids, values
        if self._targets is not None:
            self._targets.add(rows, logprobs_TV)
        if self._alternatives:
            self._draw(rows, logits_TV)

    def _draw(self, rows: range, logits_TV: Tensor) -> None:
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
        """Return the result; `reused` tokens of the prompt were found in the cache."""
        if self._wanted:
            self.logprobs_P[: self._first] = np.nan
            self._topk.token_ids[: self._first] = 0
            self._topk.logprobs[: self._first] = EMPTY_CELL
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
    """Log-probabilities of chosen tokens; row i of the request scores position i + 1."""

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

    def add(self, rows: range, logprobs_TV: Tensor) -> None:
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
