"""Regularizers of distributions: entropy, KL divergence, consistency.

The last axis is summed; the other axes are rows. In a list each datum has its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.regularizers.execution import parts
from tinkex.regularizers.penalties import (
    FLOOR,
    Penalty,
    Valued,
    as_tensor,
    check_choice,
    check_number,
    check_shapes,
    field_parts,
    flat,
    joined,
)
from tinkex.regularizers.specs import Logprobs
from tinkex.types.inputs import Datum

REDUCTIONS = ("mean", "sum", "none")
IMPOSSIBLE = -50.0
"""Log-probabilities at or below this add nothing to an entropy."""
UNLIKELY = 1e-10
"""Probabilities at or below this add nothing to a divergence."""
MOST_RATIO = 100.0
"""Log-ratios are clipped to this in a divergence."""


def _reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def _number(values: torch.Tensor) -> float:
    return float(values.detach().sum())


@dataclass(frozen=True)
class Entropy(Penalty):
    """The entropy H = −Σ p·x, with the sign that the mode needs.

    Attributes:
        mode: `minimize` (the value is H) or `maximize` (it is −H).
        reduction: The reduction over rows: `mean`, `sum` or `none`.
        normalize: Divide H by its greatest value, ln of the last axis.
        temperature: If it is not 1, divide x by it and normalise first.

    Example:
        >>> even = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25]]))
        >>> value, metrics = Entropy(mode="maximize", normalize=True).compute([], even)
        >>> round(float(value), 4)  # the least it can be: the rows are as even as can be
        -1.0
    """

    NAME = "entropy"
    mode: str = "minimize"
    reduction: str = "mean"
    normalize: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("minimize", "maximize"))
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_number("temperature", self.temperature, above=0)

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        found = parts(logprobs)
        if not found:
            raise ValueError("there are no log-probabilities")
        entropy = _reduced(joined([self._rows(part) for part in found]), self.reduction)
        value = entropy if self.mode == "minimize" else -entropy
        return value, {
            "entropy": _number(value),
            "mode": self.mode,
            "temperature": self.temperature,
        }

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.temperature != 1.0:
            x = torch.log_softmax(x / self.temperature, dim=-1)
        kept = torch.where(x > IMPOSSIBLE, x, 0.0)  # exp(0)·0: neither a value nor a gradient
        rows = -(kept.exp() * kept).sum(-1)
        if not self.normalize:
            return rows
        classes = x.shape[-1] if x.dim() else 1
        if classes < 2:
            raise ValueError("normalize needs at least two classes on the last axis")
        return rows / math.log(classes)


def _divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of two distributions, given their logarithms, by row."""
    probs = p.exp()
    counts = probs > UNLIKELY
    ratio = (torch.where(counts, p, 0.0) - torch.where(counts, q, 0.0)).clamp(
        -MOST_RATIO, MOST_RATIO
    )
    return (torch.where(counts, probs, 0.0) * ratio).sum(-1)


@dataclass(frozen=True)
class KLDivergence(Penalty):
    """The divergence KL(P‖Q) of the model P from a reference Q.

    The log-probabilities of Q come from the first source that is given.

    Attributes:
        reference_logprobs: The reference: a tensor, or a list if the log-probabilities are a list.
        reference_field: The input of the data that holds the reference.
        compute_reference: Takes the data and returns the reference.
        reduction: The reduction over rows: `mean`, `sum` or `none`.
        direction: `forward` is KL(P‖Q), `reverse` KL(Q‖P).
        symmetric: Use the mean of both; the direction has no effect.

    Example:
        >>> ours, reference = (
        ...     torch.log(torch.tensor([[0.5, 0.5]])),
        ...     torch.log(torch.tensor([[0.9, 0.1]])),
        ... )
        >>> value, metrics = KLDivergence(reference_logprobs=reference).compute([], ours)
        >>> round(float(value), 4), metrics["kl_direction"]
        (0.5108, 'forward')
    """

    NAME = "kl_divergence"
    reference_logprobs: Any = None
    reference_field: str | None = None
    compute_reference: Callable[[Sequence[Datum]], Any] | None = None
    reduction: str = "mean"
    direction: str = "forward"
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("direction", self.direction, ("forward", "reverse"))

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        ours = parts(logprobs)
        theirs = self._reference(data, logprobs)
        check_shapes(ours, theirs, "the reference's log-probabilities")
        rows = joined([self._rows(x, q) for x, q in zip(ours, theirs, strict=True)])
        value = _reduced(rows, self.reduction)
        return value, {
            "kl_divergence": _number(value),
            "kl_direction": self.direction,
            "kl_symmetric": self.symmetric,
            "kl_max": float(rows.detach().max()),
            "kl_min": float(rows.detach().min()),
        }

    def _rows(self, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.symmetric:
            return 0.5 * (_divergence(x, q) + _divergence(q, x))
        return _divergence(x, q) if self.direction == "forward" else _divergence(q, x)

    def _reference(self, data: Sequence[Datum], logprobs: Logprobs) -> list[torch.Tensor]:
        if self.reference_logprobs is None and self.reference_field is not None:
            return field_parts(data, self.reference_field, logprobs)
        given = self.reference_logprobs
        if given is None:
            if self.compute_reference is None:
                raise ValueError(
                    "kl_divergence needs a reference: reference_logprobs, reference_field or "
                    "compute_reference"
                )
            given = self.compute_reference(data)
        ours = parts(logprobs)
        several = not isinstance(logprobs, torch.Tensor) and isinstance(given, list | tuple)
        tensors = list(given) if several else [given]
        if len(tensors) != len(ours):
            raise ValueError(
                f"the reference has {len(tensors)} tensors for log-probabilities of {len(ours)} "
                "data"
            )
        return [as_tensor(tensor, x) for tensor, x in zip(tensors, ours, strict=True)]


@dataclass(frozen=True)
class Consistency(Penalty):
    """The distance d(x, r) to the log-probabilities r of a pair.

    A pair is, for example, the same text before a change.

    Attributes:
        pair_field: The input of the data that holds r.
        metric: `mse`, `l1`, `cosine` (1 − cos of all elements in a row), or `kl` (the mean of both
            directions).
        reduction: `mean`, `sum` or `none`. The cosine has no reduction.

    Example:
        >>> datum = Datum(ModelInput.from_ints([1, 2]), {"original_logprobs": [-1.0, -2.0]})
        >>> value, metrics = Consistency(metric="l1").compute([datum], [torch.tensor([-1.5, -2.0])])
        >>> float(value)
        0.25
    """

    NAME = "consistency"
    pair_field: str = "original_logprobs"
    metric: str = "mse"
    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, ("mse", "l1", "cosine", "kl"))
        check_choice("reduction", self.reduction, REDUCTIONS)

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        ours = parts(logprobs)
        theirs = field_parts(data, self.pair_field, logprobs)
        check_shapes(ours, theirs, "the pair's log-probabilities")
        facts = {"consistency_metric": self.metric}
        if self.metric == "cosine":
            return _cosine_distance(flat(ours), flat(theirs)), facts
        distances = joined([self._distance(x, r) for x, r in zip(ours, theirs, strict=True)])
        return _reduced(distances, self.reduction), facts

    def _distance(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        if self.metric == "kl":
            # KL(P‖R) + KL(R‖P), taken together
            return 0.5 * ((x.exp() - r.exp()) * (x - r)).sum(-1)
        return (x - r).square() if self.metric == "mse" else (x - r).abs()


def _cosine_distance(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    ours, theirs = (torch.linalg.vector_norm(vector).clamp(min=FLOOR) for vector in (x, r))
    distance: torch.Tensor = 1 - (x @ r) / (ours * theirs)
    return distance
