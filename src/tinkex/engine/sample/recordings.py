"""Record the distributions that samples are drawn from.

A recording holds the likeliest tokens at each position and their log-probabilities under the model
as it is: at temperature 1, before top-k and top-p. It is gathered for all recorded rows of a step
at once, on the device, and costs samples without a recording nothing.

Axes: B rows of a step, R recorded ones, S tokens of a sample, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tinkex.engine.api import RECORDED_TOKENS, Recording
from tinkex.engine.torch.device_copies import to_device, to_host
from tinkex.engine.train.target_logprobs import log_softmax
from tinkex.types.tensors import Array

FIRST_ROOM = 64
"""The first capacity of a recorder, in positions."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The recording of one step: likeliest tokens of some rows, and the drawn ones."""

    tokens_RK: Tensor
    logprobs_RK: Tensor
    drawn_R: Tensor

    @classmethod
    def of(cls, logits_BV: Tensor, tokens_B: Tensor, rows: Sequence[int]) -> Scores:
        """Score rows; the results arrive when the device has computed them."""
        rows_R = to_device(np.asarray(rows), logits_BV.device)
        logprobs_RV = log_softmax(logits_BV[rows_R])
        logprobs_RK, tokens_RK = logprobs_RV.topk(
            min(RECORDED_TOKENS, logprobs_RV.shape[1]), dim=-1
        )
        drawn_R = logprobs_RV.gather(1, tokens_B.to(logits_BV.device)[rows_R][:, None])[:, 0]
        return cls(to_host(tokens_RK), to_host(logprobs_RK), to_host(drawn_R))

    def rows(self, rows: slice, kept: Array) -> tuple[Array, Array, Array]:
        """Return the scores of some rows that are kept."""
        tokens, logprobs, drawn = (
            x.numpy()[rows][kept] for x in (self.tokens_RK, self.logprobs_RK, self.drawn_R)
        )
        return tokens, logprobs, drawn


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
        (
            self._tokens[samples, positions],
            self._logprobs[samples, positions],
            self._drawn[samples, positions],
        ) = scores

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
