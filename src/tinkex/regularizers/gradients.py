"""L2 norms of the gradient of a loss by the log-probabilities."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tinkex.regularizers.specs import Logprobs, LossFn, RegularizerSpec, execute, value_of, waited
from tinkex.types.inputs import Datum

logger = logging.getLogger("tinkex")

UNTRACED = (
    "the gradient of the asynchronous regularizer %r is not followed: its norm is reported as 0.0"
)


def parts(logprobs: Logprobs) -> list[torch.Tensor]:
    """Return the tensors as a list.

    Example:
        >>> len(parts([torch.zeros(2), torch.zeros(3)])), len(parts(torch.zeros(2)))
        (2, 1)
    """
    return [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)


def traced(logprobs: Logprobs) -> Logprobs:
    """Return log-probabilities that can have a gradient: the same, or copies.

    Example:
        >>> traced(torch.zeros(2)).requires_grad
        True
    """
    found = parts(logprobs)
    if found and all(part.requires_grad for part in found):
        return logprobs
    return _copied(logprobs)


def _copied(logprobs: Logprobs) -> Logprobs:
    copies = [part.detach().clone().requires_grad_(True) for part in parts(logprobs)]
    return copies[0] if isinstance(logprobs, torch.Tensor) else copies


def norm_of(loss: torch.Tensor, logprobs: Logprobs) -> float:
    """Return the norm of a loss's gradient; 0 if the loss is constant.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> norm_of((3 * logprobs[0] + 4 * logprobs[1]), logprobs)
        5.0
    """
    found = parts(logprobs)
    if not loss.requires_grad or not found:
        return 0.0
    ones = torch.ones_like(loss)
    grads = torch.autograd.grad(loss, found, ones, retain_graph=True, allow_unused=True)
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads if grad is not None))


def compute_grad_norm(loss_fn: Callable[[Any], Any], logprobs: Logprobs) -> float:
    """Return the norm of the gradient of a function of log-probabilities of any shape.

    Args:
        loss_fn: Takes the log-probabilities and returns one number as a tensor.
        logprobs: Their log-probabilities: one tensor, or one for each datum.

    Returns:
        The norm.

    Example:
        >>> round(compute_grad_norm(torch.sum, torch.tensor([1.0, 2.0, 3.0])), 4)
        1.7321
    """
    leaves = _copied(logprobs)
    with torch.enable_grad():
        loss = loss_fn(leaves)
    return norm_of(loss, leaves) if isinstance(loss, torch.Tensor) else 0.0


def grad_norm_for_regularizer(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Logprobs
) -> float:
    """Return the norm of a regularizer's gradient, not weighted.

    If it fails or is asynchronous, log a warning and return 0.0.

    Args:
        spec: The regularizer.
        data: The examples.
        logprobs: Their log-probabilities: one tensor, or one for each datum.

    Returns:
        The norm.

    Example:
        >>> spec = RegularizerSpec(
        ...     lambda data, logprobs: (logprobs.square().sum(), {}), weight=0.5, name="square"
        ... )
        >>> grad_norm_for_regularizer(spec, [], torch.tensor([-3.0, -4.0]))
        10.0
    """
    if spec.async_:
        logger.warning(UNTRACED, spec.name)
        return 0.0

    def loss(leaves: Any) -> torch.Tensor:
        return value_of(execute(spec.fn, data, leaves, spec.opts), f"regularizer {spec.name!r}")[0]

    return _or_zero(loss, logprobs, f"regularizer {spec.name!r}")


def total_grad_norm(
    base_fn: LossFn, specs: Sequence[RegularizerSpec], data: Sequence[Datum], logprobs: Logprobs
) -> float:
    """Return the norm of the gradient of the composed loss.

    If it cannot be computed, log a warning and return 0.0.

    Args:
        base_fn: The base loss.
        specs: The regularizers.
        data: The examples.
        logprobs: Their log-probabilities: one tensor, or one for each datum.

    Returns:
        The norm.

    Example:
        >>> spec = RegularizerSpec(
        ...     lambda data, logprobs: (logprobs.square().sum(), {}), weight=0.5, name="square"
        ... )
        >>> total_grad_norm(
        ...     lambda data, logprobs: (logprobs.sum() * 0, {}),
        ...     [spec],
        ...     [],
        ...     torch.tensor([-3.0, -4.0]),
        ... )
        5.0
    """

    def loss(leaves: Any) -> torch.Tensor:
        total = value_of(base_fn(data, leaves), "the base loss")[0]
        for spec in specs:
            answer = execute(spec.fn, data, leaves, spec.opts)
            answer = waited(answer, None) if spec.async_ else answer
            total = total + spec.weight * value_of(answer, f"regularizer {spec.name!r}")[0]
        return total

    return _or_zero(loss, logprobs, "the composed loss")


def _or_zero(loss_fn: Callable[[Any], torch.Tensor], logprobs: Logprobs, whose: str) -> float:
    try:
        return compute_grad_norm(loss_fn, logprobs)
    except Exception as error:
        logger.warning(
            "the gradient norm of %s cannot be computed and is reported as 0.0: %s", whose, error
        )
        return 0.0
