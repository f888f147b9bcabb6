"""Losses: pure functions of log-probabilities, and the checks that data must pass before anything is computed.

A loss gets the log-probability of every target and the datum's other inputs as flat arrays, and returns one value per
target. Values are summed, never averaged: the gradient of a batch is the sum over however it was split.
To add a loss, write its function, add a row to `LOSSES`, and a float64 gradient test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from tinkex.engine import EngineError
from tinkex.types.inputs import Datum, EncodedTextChunk, ModelInput
from tinkex.types.tensors import Array, TensorData

Inputs: TypeAlias = Mapping[str, torch.Tensor]
Config: TypeAlias = Mapping[str, float]

TARGETS = "target_tokens"
KNOWN_INPUTS = (TARGETS, "weights", "logprobs", "advantages", "mask")
"""Inputs that any loss accepts; those it has no use for are ignored, because programs send them along."""

MAX_TARGETS = 1024
"""Most targets of one position."""

MEDIA = {"image": "image", "image_asset_pointer": "image", "dmel": "audio"}


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-w·p, with weights of either sign."""
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-r·A, with the ratio r = exp(p - q) to the policy that sampled."""
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(r·A, clip(r)·A)."""
    ratio = torch.exp(logprobs - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it takes: inputs a datum must have, inputs it may have (with their fill), configuration."""

    function: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    required: Sequence[str] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    several_targets: bool = False
    elementwise: bool = False

    @property
    def inputs(self) -> list[str]:
        """The inputs it reads, targets aside."""
        return [*self.required, *self.optional]


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional={"weights": 1.0}, several_targets=True, elementwise=True),
    "importance_sampling": Loss(importance_sampling, required=("logprobs", "advantages")),
    "ppo": Loss(
        ppo,
        required=("logprobs", "advantages"),
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """A loss by name and its configuration, defaults filled in."""
    loss = LOSSES.get(name)
    if loss is None:
        raise EngineError(f"unknown loss {name!r}; known are {', '.join(LOSSES)}")
    settings = dict(loss.config)
    for key, value in config.items():
        if key not in settings:
            raise EngineError(f"loss {name!r} has no setting {key!r}; known are {', '.join(settings) or 'none'}")
        if isinstance(value, str) or not np.isfinite(value):
            raise EngineError(f"loss {name!r}: setting {key!r} must be a finite number, got {value!r}")
        settings[key] = float(value)
    return loss, settings


@dataclass(frozen=True, slots=True)
class Examples:
    """Data that passed every check: per datum its tokens, its targets `[N]` or `[N, K]`, and inputs of their shape."""

    tokens: list[Array]
    targets: list[Array]
    inputs: dict[str, list[Array]]


def read_examples(data: Sequence[Datum], loss: Loss, *, vocab: int, context: int) -> Examples:
    """Check data for a loss and a model; an `EngineError` names the datum, the key and the values at fault."""
    if not data:
        raise EngineError("data is empty: a pass needs at least one datum")
    tokens = [read_tokens(datum.model_input, f"datum {index}", context) for index, datum in enumerate(data)]
    _check_range(tokens, "model_input", vocab)
    targets = [_targets(index, datum, tokens[index].size, loss) for index, datum in enumerate(data)]
    _check_range(targets, TARGETS, vocab)
    inputs: dict[str, list[Array]] = {}
    for key in loss.inputs:
        inputs[key] = [_input(index, datum, key, targets[index], loss) for index, datum in enumerate(data)]
        _check_finite(inputs[key], key)
    return Examples(tokens, targets, inputs)


def read_tokens(model_input: ModelInput, where: str, context: int) -> Array:
    """The tokens of a text input that fits the context window."""
    for chunk in model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise EngineError(f"{where}: {MEDIA.get(chunk.type, chunk.type)} chunks are not supported by this model")
    tokens = model_input.to_numpy()
    if tokens.size == 0:
        raise EngineError(f"{where}: the model input is empty")
    if tokens.size > context:
        raise EngineError(f"{where}: {tokens.size} tokens exceed the context window of {context}")
    return tokens


def _targets(index: int, datum: Datum, length: int, loss: Loss) -> Array:
    allowed = {*KNOWN_INPUTS, *loss.inputs}
    if unknown := datum.loss_fn_inputs.keys() - allowed:
        raise EngineError(f"datum {index}: unknown input {min(unknown)!r}; allowed are {', '.join(sorted(allowed))}")
    tensor = _present(index, datum, TARGETS)
    if tensor.dtype != "int64":
        raise EngineError(f"datum {index}: {TARGETS!r} must be int64, got {tensor.dtype}")
    shape = _check_shape(index, TARGETS, tensor, length)
    if len(shape) > 2 or (len(shape) == 2 and not loss.several_targets):
        raise EngineError(f"datum {index}: {TARGETS!r} has shape {shape}; one target per position is needed")
    return tensor.to_numpy()


def _input(index: int, datum: Datum, key: str, targets: Array, loss: Loss) -> Array:
    if key in loss.optional and key not in datum.loss_fn_inputs:
        return _filled(datum.loss_fn_inputs[TARGETS], targets, loss.optional[key])
    tensor = _present(index, datum, key)
    shape = _check_shape(index, key, tensor, len(targets))
    if shape != list(targets.shape):
        raise EngineError(f"datum {index}: {key!r} has shape {shape} but {TARGETS!r} has {list(targets.shape)}")
    return tensor.to_numpy()


def _filled(tensor: TensorData, targets: Array, value: float) -> Array:
    """The default of an input: the same value at every target, and zero where a sparse tensor lists none."""
    if tensor.csr is None:
        return np.full(targets.shape, value, dtype=np.float32)
    rows, columns = tensor.csr
    ones = np.full(columns.size, value, dtype=np.float32)
    return TensorData(ones, "float32", tensor.shape, rows, columns).to_numpy()


def _present(index: int, datum: Datum, key: str) -> TensorData:
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None:
        raise EngineError(f"datum {index}: input {key!r} is missing")
    return tensor


def _check_shape(index: int, key: str, tensor: TensorData, length: int) -> list[int]:
    """The shape of an input, checked before a sparse tensor is spread out: it may claim any."""
    shape = [tensor.values.size] if tensor.shape is None else tensor.shape
    found = shape[0] if shape else 1
    if found != length or not shape:
        raise EngineError(f"datum {index}: {key!r} has length {found} but the model input has length {length}")
    if len(shape) > 1 and max(shape[1:]) > MAX_TARGETS:
        raise EngineError(f"datum {index}: {key!r} has shape {shape}; at most {MAX_TARGETS} targets a position")
    return shape


def _check_range(arrays: Sequence[Array], key: str, vocab: int) -> None:
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    if flat.size == 0 or (flat.min() >= 0 and flat.max() < vocab):
        return
    for index, array in enumerate(arrays):
        bad = array[(array < 0) | (array >= vocab)]
        if bad.size:
            hint = "; to leave a position out, give it weight 0" if key == TARGETS and bad[0] < 0 else ""
            raise EngineError(f"datum {index}: {key!r} holds token {bad[0]}, outside the vocabulary of {vocab}{hint}")


def _check_finite(arrays: Sequence[Array], key: str) -> None:
    if np.isfinite(np.concatenate([array.reshape(-1) for array in arrays])).all():
        return
    index = next(index for index, array in enumerate(arrays) if not np.isfinite(array).all())
    raise EngineError(f"datum {index}: {key!r} holds NaN or infinity")
