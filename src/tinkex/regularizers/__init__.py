"""Regularizers: named, weighted terms added to a custom loss, with their values and gradient norms
reported.

    loss_total = base_loss + sum(weight * value)

Names are resolved when first used: what computes imports torch, specs and outputs do not.

Example:
    >>> import torch
    >>> from tinkex.regularizers import L1, RegularizerSpec, compute
    >>> loss = lambda data, logprobs: (-logprobs.mean(), {})
    >>> output = compute([], torch.tensor([-1.0, -3.0]), loss, [RegularizerSpec(L1(), weight=0.5)])
    >>> output.base_loss.value, output.regularizers["l1_sparsity"].contribution, output.loss
    (2.0, 2.0, 4.0)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.regularizers.divergences import Consistency as Consistency
    from tinkex.regularizers.divergences import Entropy as Entropy
    from tinkex.regularizers.divergences import KLDivergence as KLDivergence
    from tinkex.regularizers.execution import execute_all as execute_all
    from tinkex.regularizers.execution import execute_one as execute_one
    from tinkex.regularizers.gradients import compute_grad_norm as compute_grad_norm
    from tinkex.regularizers.gradients import grad_norm_for_regularizer as grad_norm_for_regularizer
    from tinkex.regularizers.gradients import total_grad_norm as total_grad_norm
    from tinkex.regularizers.logs import attach_logger as attach_logger
    from tinkex.regularizers.logs import detach as detach
    from tinkex.regularizers.logs import events as events
    from tinkex.regularizers.penalties import L1 as L1
    from tinkex.regularizers.penalties import L2 as L2
    from tinkex.regularizers.penalties import ElasticNet as ElasticNet
    from tinkex.regularizers.penalties import GradientPenalty as GradientPenalty
    from tinkex.regularizers.penalties import Orthogonality as Orthogonality
    from tinkex.regularizers.pipeline import compute as compute
    from tinkex.regularizers.pipeline import regularized as regularized
    from tinkex.regularizers.specs import Regularizer as Regularizer
    from tinkex.regularizers.specs import RegularizerError as RegularizerError
    from tinkex.regularizers.specs import execute as execute
    from tinkex.types.custom_losses import CustomLossOutput as CustomLossOutput
    from tinkex.types.custom_losses import RegularizerOutput as RegularizerOutput
    from tinkex.types.custom_losses import RegularizerSpec as RegularizerSpec

_HOMES = {
    "tinkex.regularizers.divergences": ["Consistency", "Entropy", "KLDivergence"],
    "tinkex.regularizers.execution": ["execute_all", "execute_one"],
    "tinkex.regularizers.gradients": [
        "compute_grad_norm",
        "grad_norm_for_regularizer",
        "total_grad_norm",
    ],
    "tinkex.regularizers.logs": ["attach_logger", "detach", "events"],
    "tinkex.regularizers.penalties": ["ElasticNet", "GradientPenalty", "L1", "L2", "Orthogonality"],
    "tinkex.regularizers.pipeline": ["compute", "regularized"],
    "tinkex.regularizers.specs": ["Regularizer", "RegularizerError", "execute"],
    "tinkex.types.custom_losses": ["CustomLossOutput", "RegularizerOutput", "RegularizerSpec"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Consistency",
    "CustomLossOutput",
    "ElasticNet",
    "Entropy",
    "GradientPenalty",
    "KLDivergence",
    "L1",
    "L2",
    "Orthogonality",
    "Regularizer",
    "RegularizerError",
    "RegularizerOutput",
    "RegularizerSpec",
    "attach_logger",
    "compute",
    "compute_grad_norm",
    "detach",
    "events",
    "execute",
    "execute_all",
    "execute_one",
    "grad_norm_for_regularizer",
    "regularized",
    "total_grad_norm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinkex.regularizers' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
