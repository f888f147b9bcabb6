"""AdamW as torch's, on one flat buffer per adapter: a pure function from a state and a gradient to the next state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tinkex.engine import EngineError
from tinkex.types.training import AdamParams


@dataclass(frozen=True, slots=True)
class AdamState:
    """Weights with their two moments, and how many steps made them. Never changed in place."""

    weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int = 0

    @classmethod
    def fresh(cls, weights: torch.Tensor) -> AdamState:
        """A state before the first step."""
        return cls(weights, torch.zeros_like(weights), torch.zeros_like(weights))


def check(params: AdamParams) -> None:
    """Refuse hyper-parameters that mean nothing or would end in NaN."""
    if not isinstance(params, AdamParams):
        raise EngineError(f"only AdamW is supported here, got {type(params).__name__}")
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise EngineError(f"{name} must be a finite number >= 0, got {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise EngineError(f"{name} must be in [0, 1), got {getattr(params, name)}")
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise EngineError(f"eps must be a finite number > 0, got {params.eps}")


def adamw(state: AdamState, grad: torch.Tensor, params: AdamParams) -> tuple[AdamState, float]:
    """One step; returns the next state and the norm of the gradient before clipping.

    A gradient so large that its squares overflow is refused, with the state as it was.
    """
    norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
        grad = grad * (params.grad_clip_norm / norm)
    step = state.step + 1
    exp_avg = state.exp_avg.lerp(grad, 1 - params.beta1)
    exp_avg_sq = (state.exp_avg_sq * params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1, correction2 = 1 - params.beta1**step, 1 - params.beta2**step
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(params.eps)
    weights = state.weights * (1 - params.learning_rate * params.weight_decay)
    weights.addcdiv_(exp_avg, denominator, value=-params.learning_rate / correction1)
    if not bool(torch.isfinite(weights.sum() + exp_avg_sq.sum())):
        raise EngineError(f"the step overflows: the gradient's norm is {norm:.3g}; scale the loss or clip the gradient")
    return AdamState(weights, exp_avg, exp_avg_sq, step), norm
