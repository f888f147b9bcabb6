"""The data of a pass, their checks, and the interface between a loss and a pass.

Axes: M targets of a piece, L values of a loss: one per target, or one per datum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from tinkex.engine.api import EngineError, Recalled
from tinkex.engine.losses.table import CLIPS, TARGETS, Config, Loss
from tinkex.engine.torch.device_copies import to_host
from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.tensors import Array, TensorData

KNOWN_INPUTS = (TARGETS, "weights", "logprobs", "advantages", "mask")
"""Inputs that any loss accepts and ignores without use for them: programs send them along."""
MAX_TARGETS = 1024
"""The most targets of one position."""
MEDIA = {"image": "image", "image_asset_pointer": "image", "dmel": "audio"}
STEP_WORK = 1 << 34
"""The multiplications of losses sent as graphs that fill a step: tenths of a second on a CPU."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Data that passed every check.

    Each datum has its tokens, its targets `[N]` or `[N, K]`, and inputs of the targets' shape.
    """

    tokens: list[Array]
    targets: list[Array]
    inputs: dict[str, list[Array]]
    recalled: Sequence[Recalled] = ()
    """The recording behind each datum, if the loss reads its tokens beside the targets."""
    work: Sequence[int] = ()
    """The work of the loss of each datum, if that is more than reading its targets."""

    def weight(self, index: int, budget: int) -> int:
        """Return the tokens of a datum, and the work of its loss as tokens.

        STEP_WORK counts as a step's budget.
        """
        tokens = self.tokens[index].size
        return tokens + self.work[index] * budget // STEP_WORK if self.work else tokens

    def wanted(self, index: int) -> tuple[Array, Array]:
        """Return the tokens that a loss reads, and their number by position."""
        targets, size = self.targets[index], self.tokens[index].size
        if not self.recalled:
            return targets.reshape(-1), np.full(size, targets.size // size)
        counts, own = self._counts(index), self._own(index)
        tokens = np.empty(int(counts.sum()), targets.dtype)
        beside = np.ones(tokens.size, bool)
        beside[own] = False
        tokens[own], tokens[beside] = targets, self._beside(index).reshape(-1)
        return tokens, counts

    def starts(self) -> Array:
        """Return where each datum's log-probabilities begin."""
        starts: Array = np.cumsum([0, *(self._size(index) for index in range(len(self.targets)))])
        return starts

    def own(self, indices: Sequence[int]) -> Array | None:
        """Return the places of the targets' log-probabilities; None if all are of targets."""
        if not self.recalled:
            return None
        starts = np.cumsum([0, *(self._size(index) for index in indices[:-1])])
        return np.concatenate(
            [start + self._own(index) for start, index in zip(starts, indices, strict=True)]
        )

    def _size(self, index: int) -> int:
        return self.targets[index].size + (self._beside(index).size if self.recalled else 0)

    def _beside(self, index: int) -> Array:
        """Return the tokens that a loss reads beside the targets of a datum."""
        return self.recalled[index].recording.top_tokens

    def _counts(self, index: int) -> Array:
        """Return the number at each position: a target, and at some others."""
        counts = np.ones(self.tokens[index].size, np.int64)
        counts[self.recalled[index].positions] += self._beside(index).shape[1]
        return counts

    def _own(self, index: int) -> Array:
        counts = self._counts(index)
        own: Array = np.cumsum(counts) - counts
        return own


@dataclass(frozen=True, slots=True)
class Room:
    """The bounds of a model's inputs."""

    vocab: int
    context: int


def read_examples(data: Sequence[Datum], loss: Loss, settings: Config, room: Room) -> Examples:
    """Check data for a loss and a model.

    Raises:
        EngineError: Something is wrong; it names the datum, the key and the values.
    """
    allowed = {*KNOWN_INPUTS, *loss.inputs}
    for index, datum in enumerate(data):
        if unknown := datum.loss_fn_inputs.keys() - allowed:
            names = ", ".join(sorted(allowed))
            raise EngineError(f"datum {index}: unknown input {min(unknown)!r}; allowed are {names}")
    tokens, targets = read_targets(data, 2 if loss.several_targets else 1, room)
    fills = {**loss.optional, **{key: settings[key] for key in loss.by_token}}
    inputs: dict[str, list[Array]] = {}
    for key in loss.inputs:
        inputs[key] = [
            _input(index, datum, key, targets[index], fills) for index, datum in enumerate(data)
        ]
        _check_finite(inputs[key], key)
    if loss.by_token == CLIPS:
        _check_thresholds(*(inputs[key] for key in CLIPS))
    return Examples(tokens, targets, inputs)


def read_targets(data: Sequence[Datum], rank: int, room: Room) -> tuple[list[Array], list[Array]]:
    """Return the tokens and the targets of each datum; targets have at most `rank` axes."""
    if not data:
        raise EngineError("data is empty: a pass needs at least one datum")
    tokens = [
        read_tokens(datum.model_input, f"datum {index}", room.context)
        for index, datum in enumerate(data)
    ]
    _check_range(tokens, "model_input", room.vocab)
    targets = [_targets(index, datum, tokens[index].size, rank) for index, datum in enumerate(data)]
    _check_range(targets, TARGETS, room.vocab)
    return tokens, targets


def read_tokens(model_input: ModelInput, where: str, context: int) -> Array:
    """Return the tokens of a text input, which has to fit the context window."""
    for chunk in model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise EngineError(
                f"{where}: {MEDIA.get(chunk.type, chunk.type)} chunks are not supported by this "
                "model"
            )
    tokens = model_input.to_numpy()
    if tokens.size == 0:
        raise EngineError(f"{where}: the model input is empty")
    if tokens.size > context:
        raise EngineError(f"{where}: {tokens.size} tokens exceed the context window of {context}")
    return tokens


def _targets(index: int, datum: Datum, length: int, rank: int) -> Array:
    tensor = present(index, datum, TARGETS)
    if tensor.dtype != "int64":
        raise EngineError(f"datum {index}: {TARGETS!r} must be int64, got {tensor.dtype}")
    shape = check_shape(index, TARGETS, tensor, length)
    if len(shape) > rank:
        raise EngineError(
            f"datum {index}: {TARGETS!r} has shape {shape}; one target per position is needed"
        )
    return tensor.to_numpy()


def _input(index: int, datum: Datum, key: str, targets: Array, fills: Config) -> Array:
    if key in fills and key not in datum.loss_fn_inputs:
        return _filled(datum.loss_fn_inputs[TARGETS], targets, fills[key])
    tensor = present(index, datum, key)
    shape = check_shape(index, key, tensor, len(targets))
    if shape != list(targets.shape):
        raise EngineError(
            f"datum {index}: {key!r} has shape {shape} but {TARGETS!r} has {list(targets.shape)}"
        )
    return tensor.to_numpy()


def _filled(tensor: TensorData, targets: Array, value: float) -> Array:
    """Return the default of an input, at every target that a sparse tensor lists."""
    if tensor.csr is None:
        return np.full(targets.shape, value, dtype=np.float32)
    rows, columns = tensor.csr
    ones = np.full(columns.size, value, dtype=np.float32)
    return TensorData(ones, "float32", tensor.shape, rows, columns).to_numpy()


def present(index: int, datum: Datum, key: str) -> TensorData:
    """Return an input that a datum must have."""
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None:
        raise EngineError(f"datum {index}: input {key!r} is missing")
    return tensor


def check_shape(index: int, key: str, tensor: TensorData, length: int) -> list[int]:
    """Return the shape of an input.

    It is checked before a sparse tensor, which may claim any shape, is made dense.
    """
    shape = [tensor.values.size] if tensor.shape is None else tensor.shape
    found = shape[0] if shape else 1
    if found != length or not shape:
        raise EngineError(
            f"datum {index}: {key!r} has length {found} but the model input has length {length}"
        )
    if len(shape) > 1 and max(shape[1:]) > MAX_TARGETS:
        raise EngineError(
            f"datum {index}: {key!r} has shape {shape}; at most {MAX_TARGETS} targets a position"
        )
    return shape


def _check_range(arrays: Sequence[Array], key: str, vocab: int) -> None:
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    if flat.size == 0 or (flat.min() >= 0 and flat.max() < vocab):
        return
    for index, array in enumerate(arrays):
        bad = array[(array < 0) | (array >= vocab)]
        if bad.size:
            is_left_out = key == TARGETS and bad[0] < 0
            hint = "; to leave a position out, give it weight 0" if is_left_out else ""
            raise EngineError(
                f"datum {index}: {key!r} holds token {bad[0]}, outside the vocabulary of "
                f"{vocab}{hint}"
            )


def _check_finite(arrays: Sequence[Array], key: str) -> None:
    if np.isfinite(np.concatenate([array.reshape(-1) for array in arrays])).all():
        return
    index = next(index for index, array in enumerate(arrays) if not np.isfinite(array).all())
    raise EngineError(f"datum {index}: {key!r} holds NaN or infinity")


def _check_thresholds(low: Sequence[Array], high: Sequence[Array]) -> None:
    for index, (lowest, highest) in enumerate(zip(low, high, strict=True)):
        if (lowest > highest).any():
            raise EngineError(f"datum {index}: {CLIPS[0]!r} is above {CLIPS[1]!r}")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The values of a loss on a piece, their gradient, and metrics of each datum."""

    losses_L: Tensor
    grad_M: Tensor | None
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_host(self) -> Evaluated:
        """Return a copy that is complete once the device has reached it."""
        grad_M = None if self.grad_M is None else to_host(self.grad_M)
        return Evaluated(to_host(self.losses_L.detach()), grad_M, self.metrics)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some data of a pass, and the log-probabilities that their loss reads."""

    logprobs_M: Tensor
    examples: Examples
    indices: Sequence[int]
    backward: bool
    """True if the gradient is needed."""


class Objective(Protocol):
    """A kind of loss with its settings, as a pass minimises it."""

    @property
    def elementwise(self) -> bool:
        """True if its values are reported beside the log-probabilities."""
        return False

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""
        ...

    def sizes(self, examples: Examples) -> Sequence[int]:
        """Return the number of values of each datum: one for each target."""
        return [targets.size for targets in examples.targets]

    def evaluate(self, piece: Piece) -> Evaluated:
        """Return the loss of a piece, and its gradient if that is needed."""
        ...
