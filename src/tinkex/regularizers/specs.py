"""Regularizer specs, and the call of a regularizer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from tinkex.errors import TinkerError
from tinkex.types.custom_losses import (
    RegularizerSpec as RegularizerSpec,
    accepts as accepts,
    takes_opts,
)
from tinkex.types.inputs import Datum

if TYPE_CHECKING:
    import torch

Logprobs: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""One tensor, or a list of tensors, one for each datum, as custom losses get."""
Value: TypeAlias = "tuple[torch.Tensor, Mapping[str, Any]]"
"""A loss, which is summed if it is not a single number, and metrics."""
LossFn: TypeAlias = "Callable[[Any, Any], tuple[torch.Tensor, Mapping[str, Any]]]"
Kind: TypeAlias = Literal["regularizer_failed", "regularizer_exit", "timeout", "pipeline_failed"]


@runtime_checkable
class Regularizer(Protocol):
    """An object that computes a term of a loss; its `name()` names its spec.

    Example:
        >>> class Brevity:
        ...     def compute(self, data, logprobs, opts):
        ...         return sum(part.exp().sum() for part in logprobs), {}
        >>> (
        ...     isinstance(Brevity(), Regularizer),
        ...     RegularizerSpec(Brevity(), weight=0.1, name="brevity").weight,
        ... )
        (True, 0.1)
    """

    def compute(self, data: Sequence[Datum], logprobs: Logprobs, opts: Mapping[str, Any]) -> Value:
        """Return the term's value, not weighted, and metrics.

        Args:
            data: The examples.
            logprobs: Their log-probabilities: one tensor, or one for each datum.
            opts: The `opts` of the spec.

        Returns:
            The value, and metrics by name.

        Example:
            >>> import torch
            >>> from tinkex.regularizers import L1
            >>> L1().compute([], torch.tensor([-1.0, -3.0]), {"reduction": "mean"})[0]
            tensor(2.)
        """


class RegularizerError(TinkerError):
    """A loss that could not be composed; `__cause__` is the first exception.

    Example:
        >>> from tinkex.regularizers import execute_one
        >>> try:
        ...     execute_one(
        ...         RegularizerSpec(lambda data, logprobs: 1 / 0, weight=1.0, name="broken"), [], []
        ...     )
        ... except RegularizerError as error:
        ...     print(error.kind, error.name, type(error.__cause__).__name__)
        regularizer_failed broken ZeroDivisionError
    """

    kind: Kind = "pipeline_failed"
    """The kind of failure: `regularizer_failed` (it raised), `regularizer_exit` (an asynchronous
    one raised), `timeout` (it took too long in a thread), `pipeline_failed` (a spec or the base
    loss is wrong).
    """
    name: str | None = None
    """The name of the regularizer that failed."""


def execute(
    fn: Any, data: Sequence[Datum], logprobs: Logprobs, opts: Mapping[str, Any] | None = None
) -> Any:
    """Call a regularizer; an asynchronous one returns an awaitable or a future.

    Args:
        fn: A callable of two or three arguments, or an object with `compute`.
        data: The examples.
        logprobs: Their log-probabilities: one tensor, or one for each datum.
        opts: Options, if it takes any.

    Returns:
        Its value and metrics, or an awaitable of them.

    Example:
        >>> execute(
        ...     lambda data, logprobs: (sum(logprobs), {"terms": len(logprobs)}), [], [1.0, 2.0]
        ... )
        (3.0, {'terms': 2})
    """
    call = fn.compute if callable(getattr(fn, "compute", None)) else fn
    return call(data, logprobs, dict(opts or {})) if takes_opts(fn) else call(data, logprobs)


def value_of(answer: Any, whose: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Check the result of a loss: one number as a tensor, and metrics as plain values.

    Example:
        >>> value_of((3, {"terms": 2}), "the base loss")
        (tensor(3.), {'terms': 2})
    """
    import torch

    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
        raise ValueError(
            f"{whose} must return (loss, metrics), it returned a {type(answer).__name__}"
        )
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor):
        if isinstance(loss, bool) or not isinstance(loss, int | float):
            raise ValueError(f"the loss of {whose} must be a tensor, it is a {type(loss).__name__}")
        loss = torch.tensor(float(loss))
    plain = {
        str(name): (value.item() if value.numel() == 1 else value.tolist())
        if hasattr(value, "numel")
        else value
        for name, value in metrics.items()
    }
    return loss.sum(), plain


def waited(answer: Any, timeout: float | None) -> Any:
    """Wait for the result of a future or an awaitable.

    Example:
        >>> async def term() -> tuple[float, dict[str, float]]:
        ...     return 2.0, {}
        >>> waited(term(), timeout=30.0)
        (2.0, {})
    """
    if isinstance(answer, concurrent.futures.Future):
        return answer.result(timeout)
    if not inspect.isawaitable(answer):
        raise TypeError(
            "an asynchronous regularizer must return an awaitable or a future, got "
            f"{type(answer).__name__}"
        )
    return _in_own_loop(answer, timeout)


def _in_own_loop(answer: Awaitable[Any], timeout: float | None) -> Any:
    """Await in a new thread, because a loop may run in this one."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    async def wait() -> Any:
        return await asyncio.wait_for(answer, timeout)

    def run() -> None:
        try:
            future.set_result(asyncio.run(wait()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tinkex-regularizer-wait", daemon=True).start()
    return future.result()
