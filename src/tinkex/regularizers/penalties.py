"""Regularizers of size and shape: L1, L2, elastic net, orthogonality, gradients.

Every regularizer is an object whose fields are its options; the `opts` of `compute` replace some of
them. It takes one tensor of log-probabilities x, and reads fields from the first datum; or it takes
a list of tensors, one for each datum, and reads fields from each. All are differentiable by x. The
elements of x are treated as independent: exp(x) is not normalised again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch

from tinkex.regularizers.execution import parts
from tinkex.regularizers.specs import Logprobs
from tinkex.types.inputs import Datum
from tinkex.types.tensors import TensorData

Target: TypeAlias = str | tuple[str, str]
"""`logprobs`, `probs`, or `("field", key)`: an input of the data."""

FLOOR = 1e-8
"""The smallest norm that is used as a divisor."""


Valued: TypeAlias = tuple[torch.Tensor, dict[str, Any]]
"""The value of a regularizer, not weighted, and metrics."""


class Penalty:
    """The base of the regularizers: a name, and options that a call may replace.

    Example:
        >>> penalty = L2(clip=2.0)
        >>> penalty.name(), penalty.compute([], torch.tensor([-1.0, -3.0]))[0]
        ('l2_weight_decay', tensor(5.))
    """

    __slots__ = ()
    NAME: ClassVar[str]

    def name(self) -> str:
        """The default name in a spec.

        Example:
            >>> RegularizerSpec(L1(), weight=0.01).name
            'l1_sparsity'
        """
        return self.NAME

    def compute(
        self, data: Sequence[Datum], logprobs: Logprobs, opts: Mapping[str, Any] | None = None
    ) -> Valued:
        """Return the value, not weighted, and metrics.

        Raises:
            ValueError: An option is unknown or out of range, or the data has no such field.

        Example:
            >>> value, metrics = L1().compute([], torch.tensor([-1.0, -3.0]), {"reduction": "mean"})
            >>> float(value), metrics["l1_mean"]
            (2.0, 2.0)
        """
        return self._with(opts or {})._value(data, logprobs)

    def _with(self, opts: Mapping[str, Any]) -> Self:
        given = {"lambda_" if name == "lambda" else name: value for name, value in opts.items()}
        known = [option.name for option in fields(self)]  # type: ignore[arg-type]
        if unknown := given.keys() - set(known):
            raise ValueError(
                f"{self.NAME} has no option {min(unknown)!r}; known are "
                f"{', '.join(known) or 'none'}"
            )
        return replace(self, **given) if given else self  # type: ignore[type-var]

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        raise NotImplementedError


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise if an option is not one of the choices."""
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; it must be one of {', '.join(allowed)}")


def check_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None
) -> None:
    """Raise if a setting is not a number, or is too small."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name} must be a number, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value!r}")
    if above is not None and value <= above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value!r}")


def as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return values as a tensor like another."""
    tensor = value.to_torch() if isinstance(value, TensorData) else torch.as_tensor(value)
    return tensor.to(dtype=like.dtype, device=like.device)


def field_parts(data: Sequence[Datum], key: str, logprobs: Logprobs) -> list[torch.Tensor]:
    """Return an input of the data for each part of the log-probabilities.

    A single tensor takes that of the first datum.
    """
    found = parts(logprobs)
    chosen = list(data)[:1] if isinstance(logprobs, torch.Tensor) else list(data)
    if not chosen:
        raise ValueError(f"there is no data to read {key!r} from")
    if len(chosen) != len(found):
        raise ValueError(f"there are {len(chosen)} data but log-probabilities of {len(found)}")
    for index, datum in enumerate(chosen):
        if key not in datum.loss_fn_inputs:
            known = ", ".join(sorted(datum.loss_fn_inputs)) or "none"
            raise ValueError(f"datum {index} has no input {key!r}; it has {known}")
    return [
        as_tensor(datum.loss_fn_inputs[key], part)
        for datum, part in zip(chosen, found, strict=True)
    ]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one row."""
    if not tensors:
        raise ValueError("there are no log-probabilities")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a single tensor as it is; join all elements of several in one row."""
    return tensors[0] if len(tensors) == 1 else flat(tensors)


def check_shapes(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], what: str) -> None:
    """Raise if the shapes differ, because broadcasting would compare other elements."""
    if len(ours) != len(theirs):
        raise ValueError(
            f"there are {len(theirs)} tensors of {what} for log-probabilities of {len(ours)} data"
        )
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            raise ValueError(
                f"{what} have shape {list(other.shape)}, log-probabilities {list(mine.shape)}"
            )


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────

SUM_OR_MEAN = ("sum", "mean")


@dataclass(frozen=True)
class _Size(Penalty):
    """A penalty on the size of a target."""

    target: Target = "logprobs"
    reduction: str = "sum"
    lambda_: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.target, tuple):
            check_choice("target", self.target, ("logprobs", "probs"))
        elif (
            len(self.target) != 2
            or self.target[0] != "field"
            or not isinstance(self.target[1], str)
        ):
            raise ValueError(f'unknown target {self.target!r}; a field is given as ("field", key)')
        check_choice("reduction", self.reduction, SUM_OR_MEAN)
        check_number("lambda", self.lambda_)

    def _target(self, data: Sequence[Datum], logprobs: Logprobs) -> torch.Tensor:
        if isinstance(self.target, tuple):
            return flat(field_parts(data, self.target[1], logprobs))
        return flat(parts(logprobs)) if self.target == "logprobs" else flat(parts(logprobs)).exp()

    def _reduced(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum() if self.reduction == "sum" else values.mean()


@dataclass(frozen=True)
class L1(_Size):
    """The penalty λ·R(|t|): pulls a target to zero and keeps it there.

    Attributes:
        target: The values to penalise.
        reduction: R, `sum` or `mean`.
        lambda_: λ; `lambda` among `opts`.

    Example:
        >>> value, metrics = L1(lambda_=0.5).compute(
        ...     [], [torch.tensor([-1.0, -3.0]), torch.tensor([-2.0])]
        ... )
        >>> float(value), metrics["l1_mean"]
        (3.0, 2.0)
    """

    NAME = "l1_sparsity"

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        sizes = self._target(data, logprobs).abs()
        value = self.lambda_ * self._reduced(sizes)
        return value, {"l1_raw": float(value.detach()), "l1_mean": float(sizes.detach().mean())}


@dataclass(frozen=True)
class L2(_Size):
    """The penalty λ·R(c²), where c is the target less its centre, clipped.

    Large values are pulled most.

    It has the attributes of `L1`, and two more.

    Attributes:
        clip: The largest c; values beyond it have no gradient.
        center: A number, `mean` for the target's own mean, or None for zero.

    Example:
        >>> value, metrics = L2(center="mean").compute([], torch.tensor([-1.0, -3.0]))
        >>> float(value), metrics["l2_mean"]
        (2.0, 5.0)
    """

    NAME = "l2_weight_decay"
    clip: float | None = None
    center: float | Literal["mean"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        if self.center is not None and self.center != "mean":
            check_number("center", self.center)

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        target = self._target(data, logprobs)
        centred = target
        if self.center is not None:
            centred = target - (target.mean() if self.center == "mean" else self.center)
        if self.clip is not None:
            centred = centred.clamp(-self.clip, self.clip)
        value = self.lambda_ * self._reduced(centred.square())
        return value, {
            "l2_raw": float(value.detach()),
            "l2_mean": float(target.detach().square().mean()),
            "center": "none" if self.center is None else self.center,
        }


@dataclass(frozen=True)
class ElasticNet(_Size):
    """The penalty λ·(α·R(|t|) + (1 − α)·R(t²)).

    It has the attributes of `L1`, and one more.

    Attributes:
        l1_ratio: α, from 0 to 1.

    Example:
        >>> value, metrics = ElasticNet(l1_ratio=0.25).compute([], torch.tensor([-1.0, -3.0]))
        >>> float(value)  # 0.25 * 4 + 0.75 * 10
        8.5
    """

    NAME = "elastic_net"
    l1_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("l1_ratio", self.l1_ratio, least=0)
        if self.l1_ratio > 1:
            raise ValueError(f"l1_ratio must be at most 1, got {self.l1_ratio!r}")

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        target = self._target(data, logprobs)
        first, second = self._reduced(target.abs()), self._reduced(target.square())
        value = self.lambda_ * (self.l1_ratio * first + (1 - self.l1_ratio) * second)
        return value, {"elastic_net": float(value.detach()), "l1_ratio": self.l1_ratio}


# ── shape ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Orthogonality(Penalty):
    """A penalty on rows of a matrix that are alike, by its Gram matrix G.

    Attributes:
        mode: `soft` is the sum of G² off the diagonal; `hard` that of (G − I)²; `spectral` is
            `soft` and (tr G − n)².
        normalize: Scale rows to unit vectors first.
        axis: The axis of the rows: `rows` (all axes but the last), `sequence`, or `vocabulary`.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> float(Orthogonality().compute([], rows)[0])  # the first two point the same way
        2.0
    """

    NAME = "orthogonality"
    mode: str = "soft"
    normalize: bool = True
    axis: str = "rows"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("soft", "hard", "spectral"))
        check_choice("axis", self.axis, ("rows", "sequence", "vocabulary"))

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        rows = self._rows(_stacked(parts(logprobs)))
        if self.normalize:
            rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=FLOOR)
        gram = rows @ rows.T
        if self.mode == "hard":
            value = (
                (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).square().sum()
            )
        else:
            value = (gram - torch.diag(gram.diagonal())).square().sum()
            if self.mode == "spectral":
                value = value + (gram.trace() - len(gram)) ** 2
        return value, {"orthogonality": float(value.detach())}

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.axis == "sequence" and tensor.dim() in (2, 3):
            return tensor if tensor.dim() == 2 else tensor.permute(1, 0, 2).flatten(1)
        if self.axis == "vocabulary" and tensor.dim() in (2, 3):
            return tensor.T if tensor.dim() == 2 else tensor.permute(2, 0, 1).flatten(1)
        return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a single tensor as it is; stack several along a new axis."""
    if not tensors:
        raise ValueError("there are no log-probabilities")
    if len(tensors) == 1:
        return tensors[0]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            f"orthogonality needs data of one shape, these have {sorted(map(list, shapes))}"
        )
    return torch.stack(list(tensors))


@dataclass(frozen=True)
class GradientPenalty(Penalty):
    """The penalty (‖∇f‖ − target)², which keeps a gradient norm near a target.

    Attributes:
        loss_fn: The function f of the log-probabilities, a tensor or a list of tensors.
        mode: `output` for the gradient at x; `interpolated` for that at a random point between x
            and a reference.
        target_norm: The norm to reach.
        reference_field: The input of the data that holds the reference.

    Example:
        >>> penalty = GradientPenalty(
        ...     loss_fn=lambda logprobs: logprobs.square().sum(), target_norm=1.0
        ... )
        >>> float(penalty.compute([], torch.tensor([-1.5, -2.0]))[0])  # (5 - 1) ** 2
        16.0
    """

    NAME = "gradient_penalty"
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    mode: str = "output"
    target_norm: float = 1.0
    reference_field: str = "reference_logprobs"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("output", "interpolated"))
        check_number("target_norm", self.target_norm)

    def _value(self, data: Sequence[Datum], logprobs: Logprobs) -> Valued:
        if self.loss_fn is None:
            raise KeyError("gradient_penalty needs the option loss_fn")
        given = parts(logprobs)
        with torch.enable_grad():
            points = [
                part if part.requires_grad else part.detach().requires_grad_(True) for part in given
            ]
            if self.mode == "interpolated":
                points = self._between(data, logprobs, points)
            loss = self.loss_fn(points[0] if isinstance(logprobs, torch.Tensor) else points)
            penalty = (_length(loss, points) - self.target_norm) ** 2
        return penalty if any(part.requires_grad for part in given) else penalty.detach(), {}

    def _between(
        self, data: Sequence[Datum], logprobs: Logprobs, points: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        references = field_parts(data, self.reference_field, logprobs)
        check_shapes(points, references, "the reference's log-probabilities")
        share = float(torch.rand(()))
        return [
            share * point + (1 - share) * other
            for point, other in zip(points, references, strict=True)
        ]


def _length(loss: torch.Tensor, points: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of a gradient, differentiable."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"loss_fn must return a tensor, got a {type(loss).__name__}")
    grads: Sequence[torch.Tensor | None] = [None] * len(points)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss.sum(), points, create_graph=True, allow_unused=True)
    known = [
        torch.zeros_like(point) if grad is None else grad
        for point, grad in zip(points, grads, strict=True)
    ]
    length: torch.Tensor = torch.linalg.vector_norm(flat(known))
    return length
