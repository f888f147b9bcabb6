"""A pass under way: its data, how they are cut into pieces, and the results so far.

Axes: M targets, L values of a loss (one per target, or one per datum), N data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from tinkex.engine.api import EngineError
from tinkex.engine.losses.examples import Examples
from tinkex.engine.losses.objective import Evaluated, Objective
from tinkex.engine.train.adapter import Adapter
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
            outputs.append(
                {
                    # a view: no copy per datum
                    name: TensorData(column[span], "float32", targets.shape)
                    for name, column in singles.items()
                }
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
