"""A loss with regularizers: `base_loss + sum(weight * value)`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tinkex import events
from tinkex.regularizers.execution import TIMEOUT, Execution, norm_or_none, run_all, traced
from tinkex.regularizers.specs import (
    Logprobs,
    LossFn,
    RegularizerError,
    RegularizerSpec,
    accepts,
    value_of,
)
from tinkex.types.custom_losses import CustomLossOutput
from tinkex.types.inputs import Datum


def compute(
    data: Sequence[Datum],
    logprobs: Logprobs,
    base_loss_fn: LossFn,
    regularizers: Sequence[RegularizerSpec] = (),
    *,
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float | None = TIMEOUT,
    max_concurrency: int | None = None,
) -> CustomLossOutput:
    """Compute a base loss and regularizers of some log-probabilities.

    Args:
        data: The examples.
        logprobs: A tensor, or a list of them, one for each datum.
        base_loss_fn: Takes the data and the log-probabilities; returns the loss and metrics.
        regularizers: The terms to add; their names must differ.
        track_grad_norms: Report the norms of all gradients.
        parallel: Compute each regularizer in a thread.
        timeout: Seconds that each regularizer may take in a thread.
        max_concurrency: The most threads at once.

    Returns:
        The loss, its terms and, if `track_grad_norms` is set, the norms of their gradients.

    Raises:
        RegularizerError: A regularizer failed; or, with kind `pipeline_failed`, the specs or the
            base loss are wrong.

    Example:
        >>> from tinkex.regularizers import L1
        >>> loss = lambda data, logprobs: (-logprobs.mean(), {})
        >>> output = compute(
        ...     [], torch.tensor([-1.0, -3.0]), loss, [RegularizerSpec(L1(), weight=0.5)]
        ... )
        >>> output.loss, output.base_loss.value, output.regularizers["l1_sparsity"].contribution
        (4.0, 2.0, 2.0)
    """
    execution = Execution(track_grad_norms, parallel, timeout, max_concurrency)
    return compose(data, logprobs, base_loss_fn, regularizers, execution)[1]


def compose(
    data: Sequence[Datum],
    logprobs: Logprobs,
    base_loss_fn: LossFn,
    regularizers: Sequence[RegularizerSpec],
    execution: Execution,
) -> tuple[torch.Tensor, CustomLossOutput]:
    """Return the composed loss as a differentiable tensor, and its numbers."""
    specs, track_grad_norms = list(regularizers), execution.track_grad_norms
    facts = {"regularizer_count": len(specs), "track_grad_norms": track_grad_norms}
    events.emit(events.CUSTOM_LOSS_START, {"system_time": time.time()}, facts)
    began = time.perf_counter()
    try:
        _check(base_loss_fn, specs)
        tracked = traced(logprobs) if track_grad_norms else logprobs
        with torch.enable_grad() if track_grad_norms else contextlib.nullcontext():
            total, custom = value_of(base_loss_fn(data, tracked), "the base loss")
        norm = norm_or_none(total, tracked, "the base loss") if track_grad_norms else None
        base = float(total.detach())
        terms = run_all(specs, data, tracked, execution)
        with torch.enable_grad() if track_grad_norms else contextlib.nullcontext():
            total = sum((term.output.weight * term.loss for term in terms), total)
        whole = norm
        if track_grad_norms and terms:
            whole = norm_or_none(total, tracked, "the composed loss") or 0.0
        outputs = [term.output for term in terms]
        output = CustomLossOutput.build(
            base, custom, outputs, base_grad_norm=norm, total_grad_norm=whole
        )
    except Exception as error:
        failure = error if isinstance(error, RegularizerError) else _failed(error)
        duration = {"duration": (time.perf_counter() - began) * 1000}
        events.emit(events.CUSTOM_LOSS_EXCEPTION, duration, {"reason": failure.message})
        if failure is error:
            raise
        raise failure from error
    numbers = {"loss_total": output.loss_total, "regularizer_total": output.regularizer_total}
    numbers["duration"] = (time.perf_counter() - began) * 1000
    events.emit(events.CUSTOM_LOSS_STOP, numbers, {"regularizer_count": len(specs)})
    return total, output


def regularized(
    loss_fn: LossFn,
    regularizers: Sequence[RegularizerSpec],
    *,
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float | None = TIMEOUT,
    max_concurrency: int | None = None,
    on_output: Callable[[CustomLossOutput], object] | None = None,
) -> Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]:
    """Add regularizers to a loss, for `TrainingClient.forward_backward_custom`.

    Args:
        loss_fn: Takes the data and the list of their log-probability tensors; returns the loss and
            metrics.
        regularizers: The terms to add.
        track_grad_norms: Report the norms of all gradients, among the metrics too.
        parallel: Compute each regularizer in a thread.
        timeout: Seconds that each regularizer may take in a thread.
        max_concurrency: The most threads at once.
        on_output: Called with the structured numbers of every loss that is computed.

    Returns:
        A function of data and log-probabilities that returns the loss and its metrics.

    Raises:
        ValueError: The specs or the loss are wrong.

    Example:
        >>> from tinkex.regularizers import L1
        >>> def base(
        ...     data: list[Datum], logprobs: list[torch.Tensor]
        ... ) -> tuple[torch.Tensor, dict[str, float]]:
        ...     return -torch.cat(logprobs).sum(), {}
        >>> loss = regularized(base, [RegularizerSpec(L1(), weight=0.5)])
        >>> total, metrics = loss(
        ...     [], [torch.tensor([-1.0, -3.0])]
        ... )  # as forward_backward_custom(data, loss) does
        >>> float(total), metrics["l1_sparsity/value"]
        (6.0, 4.0)
    """
    specs = list(regularizers)
    execution = Execution(track_grad_norms, parallel, timeout, max_concurrency)
    _check(loss_fn, specs)

    def loss(
        data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total, output = compose(data, logprobs, loss_fn, specs, execution)
        if on_output is not None:
            on_output(output)
        return total, output.metrics()

    return loss


def _check(base_loss_fn: Any, specs: Sequence[Any]) -> None:
    """Raise if the loss or a spec is wrong."""
    if not callable(base_loss_fn) or not accepts(base_loss_fn, 2):
        raise ValueError("the base loss must be a callable that takes (data, logprobs)")
    for index, spec in enumerate(specs):
        if not isinstance(spec, RegularizerSpec):
            raise ValueError(
                f"regularizers must be RegularizerSpec; item {index} is a {type(spec).__name__}"
            )
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise ValueError(
            f"regularizers need names that differ; these are repeated: {', '.join(repeated)}"
        )


def _failed(error: Exception) -> RegularizerError:
    said = str(error) or type(error).__name__
    return RegularizerError(f"the loss could not be composed: {said}", kind="pipeline_failed")
