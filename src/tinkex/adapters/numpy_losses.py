"""Losses and their gradients in numpy, for the platforms that compute here.

They are the losses of the engine, written again from their definitions, so that each checks the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.inputs import Datum
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import ForwardBackwardOutput

TARGETS = "target_tokens"

Slopes: TypeAlias = tuple[Array, Array]
"""The values of a loss and their derivatives by the log-probabilities."""


def _cross_entropy(
    logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Slopes:
    return -inputs["weights"] * logprobs, -inputs["weights"]


def _importance_sampling(
    logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Slopes:
    values = -np.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]
    return values, values


def _ppo(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Slopes:
    ratio, advantages = np.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    # where it is not, the clipped ratio counts, which is flat
    free = ratio * advantages <= clipped * advantages
    return -np.minimum(ratio * advantages, clipped * advantages), np.where(
        free, -ratio * advantages, 0.0
    )


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, its inputs with their defaults, and its settings.

    An input without a default must be given.
    """

    evaluate: Callable[[Array, Mapping[str, Array], Mapping[str, float]], Slopes]
    inputs: Mapping[str, float | None]
    config: Mapping[str, float]


_POLICY = {"logprobs": None, "advantages": None}
OBJECTIVES = {
    "cross_entropy": Objective(_cross_entropy, {"weights": 1.0}, {}),
    "importance_sampling": Objective(_importance_sampling, _POLICY, {}),
    "ppo": Objective(_ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A datum that passed every check: tokens, targets, and inputs of their shape."""

    tokens: Array
    targets: Array
    inputs: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Batch:
    """Data that passed every check, with the loss they are for."""

    objective: Objective
    config: dict[str, float]
    examples: list[Example]

    def evaluate(self, example: Example, logprobs: Array) -> Slopes:
        """The loss of one example."""
        return self.objective.evaluate(logprobs.astype(np.float64), example.inputs, self.config)


def read(
    data: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    vocab: int,
    context: int,
) -> Batch:
    """Check a call before anything is computed.

    Raises:
        ValueError: There is no such loss or setting, or a datum does not fit it; it is named.
    """
    objective = OBJECTIVES.get(loss_fn)
    if objective is None:
        raise ValueError(f"there is no loss {loss_fn!r} here; there are {', '.join(OBJECTIVES)}")
    settings = dict(objective.config)
    for name, value in (config or {}).items():
        if name not in settings:
            known = ", ".join(settings) or "none"
            raise ValueError(f"loss {loss_fn!r} has no setting {name!r}; known are {known}")
        settings[name] = float(value)
    if not data:
        raise ValueError("data is empty: there is nothing to compute")
    return Batch(
        objective,
        settings,
        [_example(i, datum, objective, vocab, context) for i, datum in enumerate(data)],
    )


def _example(index: int, datum: Datum, objective: Objective, vocab: int, context: int) -> Example:
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise ValueError(f"datum {index}: only text can be trained on here")
    tokens = datum.model_input.to_numpy().astype(np.int64)
    if not 1 <= tokens.size <= context:
        raise ValueError(
            f"datum {index}: {tokens.size} tokens, there must be between 1 and {context}"
        )
    if TARGETS not in datum.loss_fn_inputs:
        raise ValueError(f"datum {index}: input {TARGETS!r} is missing")
    targets = datum.loss_fn_inputs[TARGETS].to_numpy().astype(np.int64)
    if targets.shape[:1] != tokens.shape or targets.ndim > (
        2 if "weights" in objective.inputs else 1
    ):
        raise ValueError(
            f"datum {index}: {TARGETS!r} has shape {list(targets.shape)} for {tokens.size} tokens"
        )
    for name, found in (("model_input", tokens), (TARGETS, targets)):
        if found.size and not (found.min() >= 0 and found.max() < vocab):
            raise ValueError(
                f"datum {index}: {name!r} holds a token outside the vocabulary of {vocab}"
            )
    inputs = {
        key: _input(index, datum, key, targets, default)
        for key, default in objective.inputs.items()
    }
    return Example(tokens, targets, inputs)


def _input(index: int, datum: Datum, key: str, targets: Array, default: float | None) -> Array:
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None and default is None:
        raise ValueError(f"datum {index}: input {key!r} is missing")
    values = (
        np.full(targets.shape, default) if tensor is None else tensor.to_numpy().astype(np.float64)
    )
    if values.shape != targets.shape:
        raise ValueError(
            f"datum {index}: {key!r} has shape {list(values.shape)}, targets {list(targets.shape)}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"datum {index}: {key!r} holds NaN or infinity")
    return values


def output(
    batch: Batch, logprobs: Sequence[Array], values: Sequence[Array]
) -> ForwardBackwardOutput:
    """Return the result of a pass in the form of the engine."""
    records = [{"logprobs": TensorData.from_numpy(found.astype(np.float32))} for found in logprobs]
    tokens = sum(example.tokens.size for example in batch.examples)
    metrics = {"loss:sum": float(sum(found.sum() for found in values)), "tokens:sum": float(tokens)}
    return ForwardBackwardOutput("ArrayRecord", records, metrics)
