"""Draw the next token of rows on the device, and hand tokens to their jobs once they are read.

Random numbers are counted (see `token_choice`): the token of a row depends on that row alone.

Recorded jobs get the likeliest tokens at each position, and their log-probabilities under the model
as it is: at temperature 1, before top-k and top-p. They are gathered for all recorded rows of a
step at once, on the device, and cost samples without a recording nothing.

Axes: B rows, V vocabulary, R recorded rows, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import RECORDED_TOKENS
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.native.c_passes import Native
from tinkex.engine.sample.jobs import Sample
from tinkex.engine.sample.logit_changes import Shaped, Shaper
from tinkex.engine.sample.passes import Row, put
from tinkex.engine.sample.step_scheduler import Running
from tinkex.engine.sample.token_choice import GREEDY_BELOW, choose, uniforms
from tinkex.engine.torch.device_copies import mark, to_device, to_host
from tinkex.engine.train.target_logprobs import log_softmax
from tinkex.types.sampled import TopkLogprobs
from tinkex.types.sampling import SampleRequest
from tinkex.types.tensors import Array


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens chosen in one step. They may not have arrived on the host yet."""

    samples: Sequence[tuple[Sample, Row | None]]
    """With the row that each had then."""
    jobs: Sequence[tuple[Running, list[int], int | None]]
    """Each job's samples, and the version of in-flight weights that drew them."""
    topk: Sequence[tuple[Tensor, Tensor] | None]
    """The likeliest tokens, for jobs that ask for them."""
    scores: Mapping[int, tuple[Scores, slice]]
    """The scores of recorded jobs by their place in `jobs`, and which rows of them."""
    both_2B: Tensor
    """Tokens and log-probabilities."""
    done: torch.cuda.Event | None

    def read(self) -> Iterator[tuple[Running, Sample]]:
        """Give samples their tokens, and yield those that have ended.

        Samples that have lost their row since then get none.
        """
        try:
            if self.done is not None:
                self.done.synchronize()
            both_2B = self.both_2B.numpy()
        except Exception as error:
            for running, *_ in self.jobs:
                running.fail(error)
            return
        tokens, logprobs = both_2B[0].astype(np.int64), both_2B[1].astype(np.float32)
        for number, (running, at_b, version) in enumerate(self.jobs):
            kept = [at for at in at_b if self.samples[at][0].row is self.samples[at][1]]
            samples = [self.samples[at][0] for at in kept]
            for sample in samples:
                sample.drawn -= 1
            if not kept or running.error is not None:
                continue
            try:
                topk, scores = self._listed(number, at_b, kept)
                running.job.commit(samples, tokens[kept], logprobs[kept], topk, scores, version)
            except Exception as error:
                running.error = error
                continue
            yield from ((running, sample) for sample in samples if sample.stop_reason is not None)

    def _listed(
        self, number: int, at_b: list[int], kept: list[int]
    ) -> tuple[TopkLogprobs | None, tuple[Array, Array, Array] | None]:
        """Return a job's likeliest tokens and scores, as far as its samples are kept."""
        topk, recorded = self.topk[number], self.scores.get(number)
        if topk is None and recorded is None:  # most jobs, and isin is slow
            return None, None
        chosen = np.isin(at_b, kept)
        return (
            None if topk is None else TopkLogprobs(*(x.numpy()[chosen] for x in topk)),
            None if recorded is None else recorded[0].rows(recorded[1], chosen),
        )


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of all tokens, of every sample of a step or of some."""

    logprobs_BV: Tensor
    rows: Mapping[int, int] | None = None
    """The row of each sample, if only some have one."""

    def likeliest(self, at_b: Sequence[int], k: int) -> tuple[Tensor, Tensor] | None:
        """Return tokens and log-probabilities of the k likeliest tokens of some samples."""
        if not k:
            return None
        rows = at_b if self.rows is None else [self.rows[at] for at in at_b]
        values, ids = self.logprobs_BV[put(rows, self.logprobs_BV)].topk(k, dim=-1)
        return to_host(ids), to_host(values)


class Drawer:
    """Chooses tokens for the samples of a model."""

    def __init__(self, model: Decoder, native: Native | None) -> None:
        self._native = native
        self._shaper = Shaper(model.embed_VD.device, model.config.vocab)

    def draw(
        self, logits_BV: Tensor, pairs: Sequence[tuple[Running, Sample]]
    ) -> tuple[Drawn, Tensor]:
        """Choose a token for every sample; return them also as they are on the device."""
        tokens_B, chosen_B, known = self._choose(logits_BV, pairs)
        rows_of: dict[Running, list[int]] = {}
        for at, (running, sample) in enumerate(pairs):
            rows_of.setdefault(running, []).append(at)
            sample.drawn += 1
            if sample.row is not None:
                sample.row.drawn = at
        jobs = [(running, at_b, running.job.source.version) for running, at_b in rows_of.items()]
        topk = [
            known.likeliest(at_b, running.job.request.topk_sample_logprobs)
            for running, at_b, _ in jobs
        ]
        scores = _scores(logits_BV, tokens_B, rows_of)
        both_2B = to_host(torch.stack([tokens_B.double(), chosen_B.double()]))  # one copy
        samples = [(sample, sample.row) for _, sample in pairs]
        return Drawn(samples, jobs, topk, scores, both_2B, mark(logits_BV.device)), tokens_B

    def forget(self, running: Running) -> None:
        """Free what is kept for a job's samples."""
        for sample in running.job.samples:
            self._shaper.forget(id(sample))

    def _choose(
        self, logits_BV: Tensor, pairs: Sequence[tuple[Running, Sample]]
    ) -> tuple[Tensor, Tensor, _Logprobs]:
        """Return a token for every sample, its log-probability, and those of all tokens if needed.

        C draws where its request truncates and lists nothing, so a sample's way depends on its own
        request.
        """
        requests, numbers_B = [running.job.request for running, _ in pairs], _numbers(pairs)
        if self._native is None:
            tokens_B, logprobs_BV = self._chosen(logits_BV, numbers_B, pairs)
            return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0], _Logprobs(logprobs_BV)
        temperatures = np.array([request.sampling_params.temperature for request in requests])
        drawn_B, chosen_B = self._native.draw(
            logits_BV, numbers_B, np.where(temperatures < GREEDY_BELOW, 0, temperatures)
        )
        rest = [at for at, request in enumerate(requests) if not _is_plain(request)]
        known = _Logprobs(logits_BV[:0])
        if rest:
            some_b, logprobs_bV = self._chosen(
                logits_BV[put(rest, logits_BV)], numbers_B[rest], [pairs[at] for at in rest]
            )
            drawn_B[rest] = some_b.numpy()
            chosen_B[rest] = logprobs_bV.gather(1, some_b[:, None])[:, 0].numpy()
            known = _Logprobs(logprobs_bV, {at: index for index, at in enumerate(rest)})
        return torch.from_numpy(drawn_B), torch.from_numpy(chosen_B), known

    def _chosen(
        self, logits_BV: Tensor, numbers_B: Array, pairs: Sequence[tuple[Running, Sample]]
    ) -> tuple[Tensor, Tensor]:
        """Choose as `choose` does; where a request changes logits, by the changed ones."""
        params_B = [running.job.request.sampling_params for running, _ in pairs]
        tokens_B, logprobs_BV = choose(logits_BV, numbers_B, params_B)
        changes = {
            at: Shaped(
                id(sample), running.job.shape, sample.tokens, len(sample.tokens) + sample.drawn
            )
            for at, (running, sample) in enumerate(pairs)
            if running.job.shape is not None
        }
        if changes:
            rows = list(changes)
            rows_b = put(rows, logits_BV)
            tokens_B[rows_b] = self._shaper.choose(
                logits_BV[rows_b],
                numbers_B[rows],
                [params_B[at] for at in rows],
                list(changes.values()),
            )
        return tokens_B, logprobs_BV


def _numbers(pairs: Sequence[tuple[Running, Sample]]) -> Array:
    seeds = [running.job.seed for running, _ in pairs]
    indices = np.array([sample.index for _, sample in pairs])
    return uniforms(
        seeds, indices, np.array([len(sample.tokens) + sample.drawn for _, sample in pairs])
    )


def _is_plain(request: SampleRequest) -> bool:
    """Return whether a request draws among all tokens and lists no others."""
    params = request.sampling_params
    is_whole = (
        params.top_k == -1 and params.top_p == 1 and not params.min_p
    ) or params.temperature < GREEDY_BELOW
    return is_whole and not request.topk_sample_logprobs and not params.changes_logits


def _scores(
    logits_BV: Tensor, tokens_B: Tensor, jobs: Mapping[Running, list[int]]
) -> dict[int, tuple[Scores, slice]]:
    """Record a step for all jobs that ask for it, at once."""
    places: dict[int, slice] = {}
    rows: list[int] = []
    for number, (running, at_b) in enumerate(jobs.items()):
        if running.job.recorder is not None:
            places[number] = slice(len(rows), len(rows) + len(at_b))
            rows += at_b
    if not rows:
        return {}
    scores = Scores.of(logits_BV, tokens_B, rows)
    return {number: (scores, place) for number, place in places.items()}
