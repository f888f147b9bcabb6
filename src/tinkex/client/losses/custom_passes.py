"""Custom losses that the client computes: the passes they need, and the thread that they run on.

A custom pass is a forward pass over the data, the caller's loss on this machine, and a backward
pass over the same chunks. A loss that fails leaves a training run without a gradient that later
calls need, so they are refused.

A loss may be any function of the log-probabilities. The server's cross-entropy is the sum of
-weight * logprob, so it computes the gradient of the loss if the weights are minus that gradient.
Torch is imported when a custom loss is used.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import itertools
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from tinkex.errors import APITimeoutError
from tinkex.types.inputs import Datum
from tinkex.types.tensors import TensorData
from tinkex.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Outcome: TypeAlias = Awaitable[ForwardBackwardOutput]
CustomLoss: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]"
)
Submit: TypeAlias = Callable[[list[list[Datum]], bool], Awaitable[Callable[[], Outcome]]]
"""Sends chunks, forward only or not; returns a function that waits for the result."""

THREAD_NAME = "tinkex-custom-loss"


def check_torch() -> None:
    """Raise if PyTorch is not installed; this does not import it."""
    if sys.modules.get("torch") is None and importlib.util.find_spec("torch") is None:
        raise ImportError(
            "a custom loss is computed with PyTorch, which is not installed: pip install torch"
        )


# ── the thread ────────────────────────────────────────────────────────────────────────────────────


class LossThread:
    """The daemon thread that runs the losses of a loop, one after the other.

    A running loss cannot be stopped. When it is given up, later losses get another thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._turn = asyncio.Lock()  # hands over in the order of asking
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the caller's context when its turn comes."""
        context = contextvars.copy_context()
        future: asyncio.Future[T] = self.loop.create_future()

        def job() -> None:
            result, error = None, None
            try:
                result = context.run(function, *args)
            except BaseException as raised:
                error = raised
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(_settle, future, result, error)
            del result, error  # the error's traceback would keep them

        async with self._turn:
            jobs = self._jobs = self._jobs or self._begin()
            jobs.put(job)
            try:
                return await future
            except asyncio.CancelledError:
                self._jobs = None
                jobs.put(None)
                raise

    def _begin(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def work() -> None:
            while (job := jobs.get()) is not None:
                job()
                del job  # nothing is kept alive while the thread waits

        threading.Thread(target=work, name=THREAD_NAME, daemon=True).start()
        return jobs


_thread: LossThread | None = None


def loss_thread() -> LossThread:
    """Return the thread for losses of the running loop; a forked process has another loop."""
    global _thread
    loop = asyncio.get_running_loop()
    if _thread is None or _thread.loop is not loop:
        _thread = LossThread(loop)
    return _thread


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # on the event loop these would end the loop, or mean something else
        failure = RuntimeError(f"the custom loss raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the data of the first pass: targets, and the user's weights or zeros."""
    prepared = []
    for index, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise ValueError(f"a custom loss needs target_tokens; datum {index} has none")
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData.from_numpy(np.zeros(targets.to_numpy().shape, dtype=np.float32))
        prepared.append(_with_inputs(datum, targets, weights))
    return prepared


def _with_inputs(datum: Datum, targets: TensorData, weights: TensorData) -> Datum:
    inputs = {"target_tokens": targets, "weights": weights}
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)


def evaluate(
    loss_fn: CustomLoss, data: list[Datum], output: ForwardBackwardOutput
) -> tuple[list[Datum], float, dict[str, float]]:
    """Run a user's loss on the log-probabilities of the first pass.

    Return the data of the second pass, the loss and its metrics.
    """
    import torch

    logprobs = [torch.from_numpy(np.array(values)) for values in _logprobs(len(data), output)]
    for leaf in logprobs:
        leaf.requires_grad_(True)
    with torch.enable_grad():  # whatever an earlier loss left this thread with
        answer = loss_fn(data, logprobs)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
        raise ValueError(
            f"the custom loss must return (loss, metrics), it returned a {type(answer).__name__}"
        )
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise ValueError(
            "the custom loss does not depend on the log-probabilities: it has no gradient"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the custom loss must be a single number, it has shape {list(loss.shape)}"
        )
    loss.backward()  # type: ignore[no-untyped-call]
    weighted = []
    for datum, leaf in zip(data, logprobs, strict=True):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("the gradient of the custom loss holds NaN or infinity")
        weights = TensorData.from_numpy(-gradient.numpy())
        targets = datum.loss_fn_inputs["target_tokens"]
        weighted.append(_with_inputs(datum, targets, weights))
    return (
        weighted,
        float(loss.detach()),
        {str(name): float(value) for name, value in metrics.items()},
    )


def _logprobs(count: int, output: ForwardBackwardOutput) -> list[np.ndarray[Any, Any]]:
    """Return the log-probabilities of each datum; raise if they do not match the data."""
    records = output.loss_fn_outputs
    if len(records) != count:
        raise ValueError(f"the forward pass over {count} data gave {len(records)} outputs")
    for index, record in enumerate(records):
        if "logprobs" not in record:
            raise ValueError(f"the forward pass gave no logprobs for datum {index}")
    return [record["logprobs"].to_numpy() for record in records]


def report(
    output: ForwardBackwardOutput, loss: float, metrics: dict[str, float]
) -> ForwardBackwardOutput:
    """Return the result of the second pass with the user's loss and metrics.

    The surrogate loss is reported too. The user's metrics come first.
    """
    merged: dict[str, Any] = dict(output.metrics)
    if "loss:sum" in merged:
        merged["surrogate_loss:sum"] = merged.pop("loss:sum")
    return ForwardBackwardOutput(
        output.loss_fn_output_type, output.loss_fn_outputs, {**merged, "loss:sum": loss, **metrics}
    )


# ── the passes ────────────────────────────────────────────────────────────────────────────────────


class CustomPass:
    """One call of a custom loss: forward passes, the loss, and backward passes.

    The backward passes use the chunks of the forward passes. The call keeps its turn until they are
    submitted, so their numbers follow those of the forward passes, and later calls come after both.
    """

    def __init__(self, data: list[Datum], loss: CustomLoss) -> None:
        check_torch()
        self._data, self._loss = data, loss
        self.prepared = forward_data(data)
        """The data of the forward passes."""

    async def run(
        self,
        chunks: list[list[Datum]],
        submit: Submit,
        spoil: Callable[[BaseException], None],
    ) -> Callable[[], Outcome]:
        """Make the passes up to the second submission.

        Args:
            chunks: The prepared data.
            submit: Sends chunks.
            spoil: Refuses all later calls of the client.

        Returns:
            A function that waits for the result.
        """
        fetch_first = await submit(chunks, True)
        try:
            first = await fetch_first()
        except APITimeoutError as error:  # given up here: the server would have gone on
            spoil(error)
            raise
        try:
            weighted, loss, metrics = await loss_thread().run(
                evaluate, self._loss, self._data, first
            )
        except Exception as error:
            spoil(error)
            raise
        fetch_second = await submit(_cut_like(chunks, weighted), False)

        async def fetch() -> ForwardBackwardOutput:
            return report(await fetch_second(), loss, metrics)

        return fetch


def _cut_like(chunks: Sequence[Sequence[Datum]], data: Sequence[Datum]) -> list[list[Datum]]:
    """Cut data at the same places as other chunks, however large they are now."""
    rest = iter(data)
    return [list(itertools.islice(rest, len(chunk))) for chunk in chunks]
