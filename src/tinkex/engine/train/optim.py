"""Adapters in training, and optimizers on the flat buffer of each: functions to the next state.

AdamW is torch's. Dimuon is Muon on the two matrices of each LoRA pair; `docs/guides/optimizers.md`
says what of it is documented and what is our choice.

Axes: B matrices of one shape, R the shorter side of a matrix, D the longer one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from tinkex.engine.api import ADAMW, EngineError, check_optimizer
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.torch.lora import Factors, Layout
from tinkex.types.optimizers import (
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    OptimizerConfigBase,
    OptimParams,
)
from tinkex.types.training import LoraConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's iteration: five rounds bring singular values from 0.01 to between 0.7
and 1.2."""
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class AdamState:
    """Weights with their two moments, and the number of steps; never changed in place."""

    KIND: ClassVar = "adamw"
    PARAMS: ClassVar = AdamParams
    MOMENTS: ClassVar = ("exp_avg", "exp_avg_sq")

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0


@dataclass(frozen=True, slots=True)
class DimuonState:
    """Weights with the running average of their gradients, and the number of steps.

    It is never changed in place.
    """

    KIND: ClassVar = "dimuon"
    PARAMS: ClassVar = DimuonParams
    MOMENTS: ClassVar = ("momentum",)

    weights: Tensor
    momentum: Tensor
    step: int = 0


class Overflow(EngineError):
    """A step that would leave numbers which are not finite."""

    def __init__(self, norm: float) -> None:
        super().__init__(
            f"the step overflows: the gradient's norm is {norm:.3g}; scale the loss or clip the "
            "gradient"
        )
        self.norm = norm


State: TypeAlias = AdamState | DimuonState


def make_state(
    kind: type[State], weights: Tensor, moments: Sequence[Tensor] = (), step: int = 0
) -> State:
    """Return a state of these weights and moments; without moments, one before the first step."""
    make: Callable[..., State] = kind
    return make(weights, *(moments or [torch.zeros_like(weights) for _ in kind.MOMENTS]), step)


def state_type(config: OptimizerConfigBase) -> type[State]:
    """Return the kind of states of the optimizer that a run is created with."""
    check_optimizer(config)
    return DimuonState if isinstance(config, DimuonOptimizerConfig) else AdamState


def check(params: OptimParams, kind: type[State]) -> None:
    """Refuse the hyper-parameters of another optimizer, and values that make no sense.

    Values that would end in NaN are among them.
    """
    if not isinstance(params, kind.PARAMS):
        raise EngineError(
            f"this run's optimizer is {kind.KIND}: a step takes {kind.PARAMS.__name__}, not "
            f"{_described(params)}; the optimizer is chosen when a run is created"
        )
    if isinstance(params, AdamParams):
        _check_adam(params)
    elif isinstance(params, DimuonParams):
        _check_dimuon(params)


def _described(params: OptimParams) -> str:
    known = isinstance(params, AdamParams | DimuonParams)
    return type(params).__name__ if known else f"those of type {getattr(params, 'type', None)!r}"


def _check_adam(params: AdamParams) -> None:
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise EngineError(f"{name} must be a finite number >= 0, got {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise EngineError(f"{name} must be in [0, 1), got {getattr(params, name)}")
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise EngineError(f"eps must be a finite number > 0, got {params.eps}")


def _check_dimuon(params: DimuonParams) -> None:
    if not (math.isfinite(params.learning_rate) and params.learning_rate >= 0):
        raise EngineError(f"learning_rate must be a finite number >= 0, got {params.learning_rate}")
    if not math.isfinite(params.grad_clip_norm):
        raise EngineError(f"grad_clip_norm must be a finite number, got {params.grad_clip_norm}")
    if not 0 <= params.beta1 < 1:
        raise EngineError(f"beta1 must be in [0, 1), got {params.beta1}")


def step(state: State, grad: Tensor, params: OptimParams, layout: Layout) -> tuple[State, float]:
    """Make one step of a run's optimizer.

    The result is the next state, and the norm of the gradient before clipping. A gradient so large
    that the step overflows is refused, with the state as it was.
    """
    norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
        grad = grad * (params.grad_clip_norm / norm)
    after: State
    if isinstance(state, AdamState):
        assert isinstance(params, AdamParams)
        after = adamw(state, grad, params)
    else:
        assert isinstance(params, DimuonParams)
        after = dimuon(state, grad, params, layout)
    if not bool(
        torch.isfinite(
            sum((getattr(after, name).sum() for name in state.MOMENTS), after.weights.sum())
        )
    ):
        raise Overflow(norm)
    return after, norm


def adamw(state: AdamState, grad: Tensor, params: AdamParams) -> AdamState:
    """AdamW with bias correction by the adapter's own steps; decay is decoupled."""
    number = state.step + 1
    exp_avg = state.exp_avg.lerp(grad, 1 - params.beta1)
    exp_avg_sq = (state.exp_avg_sq * params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1, correction2 = 1 - params.beta1**number, 1 - params.beta2**number
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(params.eps)
    weights = state.weights * (1 - params.learning_rate * params.weight_decay)
    weights.addcdiv_(exp_avg, denominator, value=-params.learning_rate / correction1)
    return AdamState(weights, exp_avg, exp_avg_sq, number)


def dimuon(state: DimuonState, grad: Tensor, params: DimuonParams, layout: Layout) -> DimuonState:
    """Move each A and each B by its orthogonalised momentum.

    The norm of a move is the learning rate times the root of the rank.
    """
    momentum = state.momentum.lerp(grad, 1 - params.beta1)
    weights = state.weights.clone()
    for views, moments in zip(_by_shape(layout, weights), _by_shape(layout, momentum), strict=True):
        directions_BRD = orthogonalised(torch.stack(moments))
        for view, direction_RD in zip(views, directions_BRD, strict=True):
            view.sub_(direction_RD, alpha=params.learning_rate * math.sqrt(view.shape[0]))
    return DimuonState(weights, momentum, state.step + 1)


def _by_shape(layout: Layout, flat: Tensor) -> Iterable[list[Tensor]]:
    """Group the matrices of a flat buffer by shape, the shorter side first."""
    groups: defaultdict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for matrix in _matrices(layout, flat):
        groups[tuple(matrix.shape)].append(matrix)
    return groups.values()


def _matrices(layout: Layout, flat: Tensor) -> Iterator[Tensor]:
    for _, view in layout.tensors(flat):
        yield view if view.shape[0] <= view.shape[1] else view.t()


def orthogonalised(moments_BRD: Tensor) -> Tensor:
    """Return matrices of norm 1 with nearly equal singular values.

    The singular vectors are those of the given matrices. Newton-Schulz: each round multiplies by a
    polynomial of X X^T, so that the rounds need only that small square matrix. It is kept in
    float64, because they magnify the rounding of small singular values. Zero stays zero.
    """
    wide_BRD = moments_BRD.double()
    norms_B11 = torch.linalg.matrix_norm(wide_BRD, keepdim=True)
    wide_BRD = wide_BRD / norms_B11.where(norms_B11 > 0, 1.0)
    gram_BRR = wide_BRD @ wide_BRD.mT
    factor_BRR = eye_RR = torch.eye(
        gram_BRR.shape[-1], dtype=gram_BRR.dtype, device=gram_BRR.device
    )
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        round_BRR = first * eye_RR + third * gram_BRR + fifth * (gram_BRR @ gram_BRR)
        factor_BRR = round_BRR @ factor_BRR
        gram_BRR = round_BRR @ gram_BRR @ round_BRR
    out_BRD = factor_BRR @ wide_BRD
    norms_B11 = torch.linalg.matrix_norm(out_BRD, keepdim=True)
    directions_BRD: Tensor = out_BRD / norms_B11.where(norms_B11 > 0, 1.0)
    return directions_BRD.to(moments_BRD.dtype)


class Adapter:
    """Weights and optimizer state, and the gradient gathered since the last step."""

    def __init__(
        self,
        base_model: str,
        model: Decoder,
        lora: LoraConfig,
        optimizer: OptimizerConfigBase = ADAMW,
    ) -> None:
        kind = state_type(optimizer)
        self.base_model = base_model
        self.model = model
        self.layout = Layout(model.linears(), lora)
        dtype = torch.promote_types(model.embed_VD.dtype, torch.float32)
        self.state = make_state(kind, self.layout.initial(dtype, model.embed_VD.device))
        self.grad: Tensor | None = None
        self.largest: tuple[float, str] = (0.0, "")
        """The largest number in the gathered gradients, and the pass that it is from."""
        self._cast: tuple[Tensor, dict[str, Factors]] | None = None

    def factors(self) -> dict[str, Factors]:
        """Return the present weights, as the linear layers take them."""
        weights = self.state.weights
        if self._cast is None or self._cast[0] is not weights:
            self._cast = weights, self.layout.factors(weights.to(self.model.embed_VD.dtype))
        return self._cast[1]

    def step(self, params: OptimParams) -> dict[str, float]:
        """Apply the gathered gradient, if there is one."""
        check(params, type(self.state))
        norm = 0.0
        if self.grad is not None:
            try:
                self.state, norm = step(self.state, self.grad, params, self.layout)
            except Overflow as error:
                raise EngineError(self._stuck(error.norm)) from None
            self.drop_gradients()
        return {"grad_norm:mean": norm, "learning_rate:mean": float(params.learning_rate)}

    def gather(self, gradient: Tensor, largest: float, job: str) -> None:
        """Add the gradient of a pass."""
        self.grad = gradient if self.grad is None else self.grad + gradient
        self.largest = max(self.largest, (largest, job))

    def drop_gradients(self) -> None:
        """Clear the gradient."""
        self.grad, self.largest = None, (0.0, "")

    def _stuck(self, norm: float) -> str:
        """Explain why the step cannot be made; the gradient stays."""
        largest, job = self.largest
        clip = "clip the gradient (grad_clip_norm=1.0), " if math.isfinite(norm) else ""
        return (
            f"the step overflows: the gradient's norm is {norm:.3g}, and its largest number, "
            f"{largest:.3g}, is from request {job}. Nothing was changed, and the next step has "
            f"the same gradient: {clip}drop it (drop_gradients) or load a saved state (load_state)"
        )
