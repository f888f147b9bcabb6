"""One result out of the results of a call's chunks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence

from tinkex.types.training import ForwardBackwardOutput

logger = logging.getLogger("tinkex")


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def _hash_sum(values: Sequence[float]) -> float:
    """Return the sum of hashes modulo 2**64; NaN if one is not finite."""
    return (
        float(sum(int(v) for v in values) % 2**64)
        if all(math.isfinite(v) for v in values)
        else math.nan
    )


def _hash_unordered(values: Sequence[float]) -> float:
    """Return a hash of values in any order, which a double holds exactly."""
    text = ",".join(repr(float(value)) for value in sorted(values))
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _weighted_mean,
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: (
        max(values) - _weighted_mean(values, weights) if sum(weights) else 0.0
    ),
    "hash2": lambda values, _: _hash_sum(values),
    "hash_unordered": lambda values, _: _hash_unordered(values),
}


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Join the results of one call's chunks.

    Outputs stay in order. Metrics are joined by the reduction at the end of their names.

    A name without a known reduction is averaged. Chunks without a number for a metric are left
    out.

    Args:
        outputs: The results, in the order of the chunks.

    Returns:
        One result.

    Raises:
        ValueError: There are none.
    """
    if not outputs:
        raise ValueError("there is nothing to combine: expected at least one output")
    if len(outputs) == 1:
        return outputs[0]
    kind = outputs[0].loss_fn_output_type
    if any(output.loss_fn_output_type != kind for output in outputs):
        logger.warning("the chunks of one call have mixed loss_fn_output_type; %r is taken", kind)
    metrics: dict[str, float] = {}
    for key in dict.fromkeys(name for output in outputs for name in output.metrics):
        having = [output for output in outputs if isinstance(output.metrics.get(key), int | float)]
        values, weights = [o.metrics[key] for o in having], [len(o.loss_fn_outputs) for o in having]
        reduction = key.rpartition(":")[2]
        if reduction == "unique":
            metrics |= {key if i == 0 else f"{key}_{i}": value for i, value in enumerate(values)}
        elif values:
            metrics[key] = REDUCTIONS.get(reduction, _weighted_mean)(values, weights)
    joined = [item for output in outputs for item in output.loss_fn_outputs]
    return ForwardBackwardOutput(kind, joined, metrics)
