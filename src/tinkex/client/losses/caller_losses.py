"""Custom losses that the client computes, trained through cross-entropy.

A loss may be any function of the log-probabilities. The server's cross-entropy is the sum of
-weight * logprob, so it computes the gradient of the loss if the weights are minus that gradient.
Torch is imported when a custom loss is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tinkex.types.inputs import Datum
from tinkex.types.tensors import TensorData
from tinkex.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

CustomLoss: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]"
)


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
