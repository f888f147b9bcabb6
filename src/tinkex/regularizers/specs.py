"""What a regularizer is, and how it is called."""

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
"""One tensor, or what custom losses get: a list of tensors, one for each datum."""
Value: TypeAlias = "tuple[torch.Tensor, Mapping[str, Any]]"
"""A loss (one that is no single number is summed) and metrics."""
LossFn: TypeAlias = "Callable[[Any, Any], tuple[torch.Tensor, Mapping[str, Any]]]"
Kind: TypeAlias = Literal["regularizer_failed", "regularizer_exit", "timeout", "pipeline_failed"]


@runtime_checkable
class Regularizer(Protocol):
    """An object that computes a term of a loss; it may have a `name()`, which its spec then takes.

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
        """The term's value, not weighted, and metrics.

        Args:
            data: The data that the log-probabilities are of.
            logprobs: The log-probabilities: one tensor, or one for each datum.
            opts: What the spec's `opts` say.

        Returns:
            The value, and metrics by name.

        Example:
            >>> import torch
            >>> from tinkex.regularizers import L1
            >>> L1().compute([], torch.tensor([-1.0, -3.0]), {"reduction": "mean"})[0]
            tensor(2.)
        """


class RegularizerError(TinkerError):
    """A loss that could not be composed; the exception behind it is its `__cause__`, where there
    was one.

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
    """What went wrong: `regularizer_failed` when one raised, `regularizer_exit` when waiting for an
    asynchronous one did, `timeout` when one took too long beside others, `pipeline_failed` for
    specs and base losses."""
    name: str | None = None
    """Whose fault it is."""


def execute(
    fn: Any, data: Sequence[Datum], logprobs: Logprobs, opts: Mapping[str, Any] | None = None
) -> Any:
    """Call a regularizer in whichever form it is; an asynchronous one gives its awaitable or
    future.

    Args:
        fn: A callable of two or three arguments, or an object with `compute`.
        data: The data that the log-probabilities are of.
        logprobs: The log-probabilities: one tensor, or one for each datum.
        opts: Options for those that take any.

    Returns:
        What it gives: value and metrics, or an awaitable of them.

    Example:
        >>> execute(
        ...     lambda data, logprobs: (sum(logprobs), {"terms": len(logprobs)}), [], [1.0, 2.0]
        ... )
        (3.0, {'terms': 2})
    """
    call = fn.compute if callable(getattr(fn, "compute", None)) else fn
    return call(data, logprobs, dict(opts or {})) if takes_opts(fn) else call(data, logprobs)


def value_of(answer: Any, whose: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a loss or a regularizer gave, checked: one number as a tensor, and metrics as plain
    values.

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
    """The result behind a future or an awaitable.

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
            "an asynchronous regularizer must give an awaitable or a future, got "
            f"{type(answer).__name__}"
        )
    return _in_own_loop(answer, timeout)


def _in_own_loop(answer: Awaitable[Any], timeout: float | None) -> Any:
    """Await in a thread of its own: a loop may be running in this one."""
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
