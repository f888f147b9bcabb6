"""Regularizers: named and weighted terms of a custom loss.

Their values, and on request their gradient norms, are reported.

    loss_total = base_loss + sum(weight * value)

Names are resolved when first used. Regularizers import torch; specs and outputs do not.

Example:
    >>> import torch
    >>> from tinkex.regularizers import L1, RegularizerSpec, compute
    >>> loss = lambda data, logprobs: (-logprobs.mean(), {})
    >>> output = compute([], torch.tensor([-1.0, -3.0]), loss, [RegularizerSpec(L1(), weight=0.5)])
    >>> output.base_loss.value, output.regularizers["l1_sparsity"].contribution, output.loss
    (2.0, 2.0, 4.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import names_of

if TYPE_CHECKING:
    from tinkex.regularizers.divergences import (
        Consistency as Consistency,
        Entropy as Entropy,
        KLDivergence as KLDivergence,
    )
    from tinkex.regularizers.execution import (
        compute_grad_norm as compute_grad_norm,
        execute_all as execute_all,
        execute_one as execute_one,
        grad_norm_for_regularizer as grad_norm_for_regularizer,
        total_grad_norm as total_grad_norm,
    )
    from tinkex.regularizers.logs import (
        attach_logger as attach_logger,
        detach as detach,
        events as events,
    )
    from tinkex.regularizers.penalties import (
        L1 as L1,
        L2 as L2,
        ElasticNet as ElasticNet,
        GradientPenalty as GradientPenalty,
        Orthogonality as Orthogonality,
    )
    from tinkex.regularizers.pipeline import compute as compute, regularized as regularized
    from tinkex.regularizers.specs import (
        Regularizer as Regularizer,
        RegularizerError as RegularizerError,
        execute as execute,
    )
    from tinkex.types.custom_losses import (
        CustomLossOutput as CustomLossOutput,
        RegularizerOutput as RegularizerOutput,
        RegularizerSpec as RegularizerSpec,
    )

__all__, __getattr__, __dir__ = names_of(__name__, __file__)
