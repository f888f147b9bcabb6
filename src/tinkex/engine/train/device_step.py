"""Passes under way, and a step of training on the device: pieces of passes side by side.

Axes: T packed tokens of a step, M targets (one or several per token), L values of a loss (one per
target, or one per datum), N data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.engine.losses.examples import Evaluated, Examples, Objective, Piece
from tinkex.engine.model.attention import PackedAttention
from tinkex.engine.model.decoder import hidden_states
from tinkex.engine.torch.device_copies import mark, to_device, to_host
from tinkex.engine.torch.lora import Linear
from tinkex.engine.train.optim import Adapter
from tinkex.engine.train.span_adapters import ROWS, Span, SpanAdapters
from tinkex.engine.train.target_logprobs import Wanted, chunks, target_logprobs
from tinkex.types.inputs import LossFnOutput
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import ForwardBackwardOutput


@dataclass(eq=False)
class Pass:
    """A pass under way."""

    job: str
    owner: str
    name: str
    """The adapter's name, by which passes of one adapter keep their order."""
    adapter: Adapter
    examples: Examples
    objective: Objective
    backward: bool
    pieces: deque[list[int]] = field(default_factory=deque)
    left: int = 0
    """The number of pieces that have not been run."""
    results: Results = field(init=False)
    scratch: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.results = Results.of(self.examples, self.objective)

    def begin(self, budget: int) -> None:
        """Cut into pieces, and drop earlier results."""
        self.pieces = deque(cut(self.examples, budget))
        self.left = len(self.pieces)
        self.results = Results.of(self.examples, self.objective)
        self.scratch = None

    def size(self, piece: list[int]) -> int:
        """Return the number of tokens of a piece."""
        return sum(self.examples.tokens[index].size for index in piece)

    def weight(self, piece: list[int], budget: int) -> int:
        """Return the tokens of a piece, and the work of its loss as tokens."""
        return sum(self.examples.weight(index, budget) for index in piece)

    def finish(self, largest: float) -> ForwardBackwardOutput:
        """Add the complete gradient, whose largest number is given, to the adapter's."""
        if self.scratch is not None and not math.isfinite(largest):
            raise EngineError("the gradient is not finite; nothing was added")
        # this may still fail, and must not after the gradient is added
        output = self.results.output(self.examples, self.objective)
        if self.scratch is not None:
            self.adapter.gather(self.scratch, largest, self.job)
        return output


def cut(examples: Examples, budget: int) -> Iterator[list[int]]:
    """Yield pieces of at most `budget` tokens, or of one datum, as indices.

    The shortest data come first.
    """
    piece: list[int] = []
    total = 0
    for index in sorted(range(len(examples.tokens)), key=lambda i: examples.tokens[i].size):
        size = examples.weight(index, budget)
        if piece and total + size > budget:
            yield piece
            piece, total = [], 0
        piece.append(index)
        total += size
    yield piece


@dataclass(frozen=True, slots=True)
class Results:
    """Log-probabilities of all targets and values of the loss, in the order of the data."""

    starts: Array
    logprobs_M: Array
    loss_starts: Array
    losses_L: Array
    metrics_N: dict[str, Array]

    @classmethod
    def of(cls, examples: Examples, objective: Objective) -> Results:
        """Return room for the results of these examples."""
        starts = np.cumsum([0, *(t.size for t in examples.targets)])
        loss_starts = np.cumsum([0, *objective.sizes(examples)])
        return cls(starts, np.zeros(starts[-1]), loss_starts, np.zeros(loss_starts[-1]), {})

    def put(self, indices: list[int], logprobs_M: torch.Tensor, evaluated: Evaluated) -> None:
        """Store the results of a piece; refuse losses that overflowed."""
        losses_L = evaluated.losses_L.double().numpy()
        check_finite("loss", losses_L, self.loss_starts, indices)
        self.losses_L[_places(self.loss_starts, indices)] = losses_L
        self.logprobs_M[_places(self.starts, indices)] = logprobs_M.double().numpy()
        for name, values in evaluated.metrics.items():
            self.metrics_N.setdefault(name, np.zeros(self.starts.size - 1))[indices] = values

    def output(self, examples: Examples, objective: Objective) -> ForwardBackwardOutput:
        """Return one record per datum, and the sums."""
        columns = {"logprobs": self.logprobs_M} | (
            {"elementwise_loss": self.losses_L} if objective.elementwise else {}
        )
        singles = {name: column.astype(np.float32) for name, column in columns.items()}
        outputs: list[LossFnOutput] = []
        for index, targets in enumerate(examples.targets):
            span = slice(self.starts[index], self.starts[index + 1])
            views = {name: column[span] for name, column in singles.items()}  # no copy per datum
            outputs.append(
                {name: TensorData(view, "float32", targets.shape) for name, view in views.items()}
            )
        tokens = sum(t.size for t in examples.tokens)
        metrics = {"loss:sum": float(self.losses_L.sum()), "tokens:sum": float(tokens)}
        for name, values_N in self.metrics_N.items():
            metrics[name] = float(values_N.mean() if name.endswith(":mean") else values_N.sum())
        return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


def _places(starts: Array, indices: list[int]) -> Array:
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])


def check_finite(what: str, values: Array, starts: Array, indices: list[int]) -> None:
    """Refuse values that overflowed, such as a ratio to a log-probability of -1000."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        index = int(np.searchsorted(starts, _places(starts, indices)[bad[0]], side="right")) - 1
        raise EngineError(f"datum {index}: the {what} is not finite; nothing was added")


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
            starts = work.examples.starts() if work.examples.recalled else work.results.starts
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
        rows_M = to_device(self.rows, self.device)
        distinct = bool((np.diff(self.rows) > 0).all())
        return Wanted(rows_M, self.targets_M, chunks(head, self.rows, spans, self.device), distinct)

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
            flat = [tokens for tokens, _ in wanted]
            per_token = np.concatenate([counts for _, counts in wanted])
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

        positions = [np.arange(length) for length in lengths]
        tokens_T, positions_T, targets_M = (
            to_device(np.concatenate(arrays), like.device)
            for arrays in (tokens, positions, targets)
        )
        return cls(tokens_T, positions_T, runs, np.concatenate(rows), targets_M, spans, sizes)
