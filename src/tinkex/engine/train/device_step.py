"""A step of training on the device: pieces of several passes, packed side by side.

Axes: T packed tokens of a step, M targets (one or several per token).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.engine.losses.objective import Evaluated, Piece
from tinkex.engine.model.attention import PackedAttention
from tinkex.engine.model.decoder import hidden_states
from tinkex.engine.torch.device_copies import mark, to_device, to_host
from tinkex.engine.torch.lora import Linear
from tinkex.engine.train.span_adapters import ROWS, Span, SpanAdapters
from tinkex.engine.train.target_logprobs import Wanted, chunks, target_logprobs
from tinkex.engine.train.training_pass import Pass, check_finite
from tinkex.types.tensors import Array


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device computes, and its results to be."""

    chosen: Sequence[tuple[Pass, list[int]]]
    losses: Sequence[Evaluated | EngineError]
    logprobs: Sequence[Tensor]
    largest: Mapping[str, Tensor]
    """The largest number in the gradient, by job, of each pass whose last step this was."""
    done: torch.cuda.Event | None

    def read(self) -> Iterator[tuple[Pass, Exception | None]]:
        """Wait for the results and store them; yield each pass with the error of its piece."""
        if self.done is not None:
            self.done.synchronize()
        for (work, piece), logprobs_M, loss in zip(
            self.chosen, self.logprobs, self.losses, strict=True
        ):
            work.left -= 1
            yield (
                work,
                loss if isinstance(loss, EngineError) else _put(work, piece, logprobs_M, loss),
            )


def launch(
    chosen: Sequence[tuple[Pass, list[int]]], *, keep_logits: bool, sparing: bool
) -> Launched:
    """Run pieces beside each other; a fault of one never reaches another's tokens.

    If `sparing`, layers are computed again in backward rather than kept; so are logits without
    `keep_logits`.
    """
    model, wants_gradient = chosen[0][0].adapter.model, chosen[0][0].backward
    packed = Packed.of(chosen, model.embed_VD)
    adapters = SpanAdapters(
        [_span(work, rows) for (work, _), rows in zip(chosen, packed.spans, strict=True)],
        packed.device,
    )
    with torch.set_grad_enabled(wants_gradient):
        attend = PackedAttention(packed.runs, model.attention, packed.device)
        hidden_TD = hidden_states(
            *(model, packed.tokens_T, packed.positions_T, attend, adapters),
            sparing=sparing and wants_gradient,
        )
        wanted = packed.wanted(model.head, adapters.spans)
        logprobs_M = target_logprobs(model, hidden_TD, wanted, adapters, keep=keep_logits)
        parts = torch.split(logprobs_M.detach(), packed.sizes)
        losses = [
            _evaluate(work, piece, part) for (work, piece), part in zip(chosen, parts, strict=True)
        ]
        if wants_gradient and not all(isinstance(loss, EngineError) for loss in losses):
            grads = [_gradient(loss, part) for loss, part in zip(losses, parts, strict=True)]
            logprobs_M.backward(torch.cat(grads))  # type: ignore[no-untyped-call]
    last = {
        work.job: work.scratch for work, _ in chosen if work.scratch is not None and not work.pieces
    }
    largest = {
        job: to_host(torch.linalg.vector_norm(scratch, math.inf)) for job, scratch in last.items()
    }
    logprobs = torch.split(to_host(logprobs_M.detach()), packed.sizes)
    losses = [loss if isinstance(loss, EngineError) else loss.to_host() for loss in losses]
    return Launched(chosen, losses, logprobs, largest, mark(packed.device))


def _span(work: Pass, rows: tuple[int, int]) -> Span:
    if not work.backward:
        return Span(*rows, work.adapter.factors())
    if work.scratch is None:
        work.scratch = torch.zeros_like(work.adapter.state.weights)
    return Span(*rows, work.adapter.factors(), work.adapter.layout.factors(work.scratch))


def _evaluate(work: Pass, piece: list[int], logprobs_M: Tensor) -> Evaluated | EngineError:
    """Return the loss of a piece and its gradient by the log-probabilities, or its error."""
    try:
        return work.objective.evaluate(Piece(logprobs_M, work.examples, piece, work.backward))
    except EngineError as error:
        return error


def _gradient(loss: Evaluated | EngineError, logprobs_M: Tensor) -> Tensor:
    if isinstance(loss, EngineError) or loss.grad_M is None:
        return torch.zeros_like(logprobs_M)
    return loss.grad_M


def _put(work: Pass, piece: list[int], logprobs_M: Tensor, loss: Evaluated) -> EngineError | None:
    """Store the results of a piece, or return the error if they are not finite."""
    try:
        own = work.examples.own(piece)
        work.results.put(piece, logprobs_M if own is None else logprobs_M[own], loss)
        if loss.grad_M is not None:
            starts = work.examples.starts() if work.examples.others else work.results.starts
            check_finite("gradient of the loss", loss.grad_M.numpy(), starts, piece)
    except EngineError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Packed:
    """The pieces of a step on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    runs: list[tuple[int, int]]
    rows: Array
    """The token of each target, ascending."""
    rows_M: Tensor
    """The same on the device."""
    targets_M: Tensor
    spans: list[tuple[int, int]]
    """The tokens of each piece, padded."""
    sizes: list[int]
    """The number of targets of each piece."""

    @property
    def device(self) -> torch.device:
        """The device that they are on."""
        return self.tokens_T.device

    def wanted(self, head: Linear, spans: Sequence[Span]) -> Wanted:
        """Return the targets, in chunks whose logits fit the budget."""
        distinct = bool((np.diff(self.rows) > 0).all())
        return Wanted(
            self.rows_M, self.targets_M, chunks(head, self.rows, spans, self.device), distinct
        )

    @classmethod
    def of(cls, chosen: Sequence[tuple[Pass, list[int]]], like: Tensor) -> Packed:
        """Concatenate pieces; each is padded with a sequence of its own that nothing reads."""
        tokens: list[Array] = []
        rows: list[Array] = []
        targets: list[Array] = []
        lengths: list[int] = []
        runs: list[tuple[int, int]] = []
        spans: list[tuple[int, int]] = []
        sizes: list[int] = []
        start = 0
        for work, piece in chosen:
            examples = work.examples
            sequences = [examples.tokens[index] for index in piece]
            wanted = [examples.wanted(index) for index in piece]
            flat, per_token = (
                [tokens for tokens, _ in wanted],
                np.concatenate([counts for _, counts in wanted]),
            )
            if padding := -per_token.size % ROWS:
                sequences.append(np.zeros(padding, dtype=np.int64))
            here = [sequence.size for sequence in sequences]
            tokens += sequences
            lengths += here
            runs += [(len(list(run)), length) for length, run in groupby(here)]
            rows.append(start + np.repeat(np.arange(per_token.size), per_token))
            targets += flat
            spans.append((start, start + sum(here)))
            sizes.append(sum(t.size for t in flat))
            start += sum(here)

        def put(array: Array) -> Tensor:
            return to_device(array, like.device)

        positions, flat_rows = np.concatenate([np.arange(n) for n in lengths]), np.concatenate(rows)
        return cls(
            put(np.concatenate(tokens)),
            put(positions),
            runs,
            flat_rows,
            put(flat_rows),
            put(np.concatenate(targets)),
            spans,
            sizes,
        )
