"""Losses: pure functions of log-probabilities, and the checks that data must pass before anything
is computed.

A loss gets the log-probability of every target and the data's other inputs as flat tensors, and
returns one value per target. Values are summed, never averaged: the gradient of a batch is the sum
over however it was split. To add a loss, write its function, add a row to `LOSSES`, and a float64
gradient test.

Axes: M targets of a micro-batch, N data in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from tinkex.engine.api import STABLE_REINFORCE, EngineError
from tinkex.engine.torch.device_copies import to_host
from tinkex.types.inputs import Datum, EncodedTextChunk, ModelInput
from tinkex.types.tensors import Array, TensorData

Inputs: TypeAlias = Mapping[str, torch.Tensor]
Config: TypeAlias = Mapping[str, float]

TARGETS = "target_tokens"
SEQUENCE = "sequence"
"""Beside a loss's inputs: for each target, the number of its datum in the micro-batch."""

KNOWN_INPUTS = (TARGETS, "weights", "logprobs", "advantages", "mask")
"""Inputs that any loss accepts; those it has no use for are ignored, because programs send them
along."""

CUSTOM = "custom"
"""The name under which passes use a loss that was sent as a graph."""

MAX_TARGETS = 1024
"""Most targets of one position."""

LARGEST = 88.0
"""Exponentials of this are still finite in single precision."""

MEDIA = {"image": "image", "image_asset_pointer": "image", "dmel": "audio"}


def cross_entropy(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-w·p, with weights of either sign."""
    return -inputs["weights"] * logprobs_M


def importance_sampling(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-r·A, with the ratio r = exp(p - q) to the policy that sampled."""
    return -torch.exp(_log_ratio(logprobs_M, inputs)) * inputs["advantages"]


def ppo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(r·A, clip(r)·A)."""
    log_ratio_M = _log_ratio(logprobs_M, inputs)
    # Where A is positive what lies above the clip is not seen, and need not be more than a number
    # can be.
    bounded_M = torch.where(inputs["advantages"] > 0, log_ratio_M.clamp(max=LARGEST), log_ratio_M)
    return _clipped_objective(torch.exp(bounded_M), inputs)


def _log_ratio(logprobs_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """To the policy that sampled; zero where no advantage makes use of it, which may be out of all
    bounds.
    """
    return torch.where(inputs["advantages"] != 0, logprobs_M - inputs["logprobs"], 0.0)


def cispo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-clip(r)·p·A, where the clipped ratio is a weight: it has no gradient of its own."""
    ratio_M = torch.exp(logprobs_M.detach() - inputs["logprobs"])
    return -_clip(ratio_M, inputs) * logprobs_M * inputs["advantages"]


def dro(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-(p·A - β/2·(p - q)²), which also holds positions without an advantage near q."""
    distance_M = logprobs_M - inputs["logprobs"]
    return 0.5 * config["beta"] * distance_M**2 - logprobs_M * inputs["advantages"]


def gspo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(s·A, clip(s)·A), with the ratio s of the whole sequence: the geometric mean over the
    positions marked.

    Each token has the value of s and the gradient of its own log-probability. A sequence without
    marks has s = 1.
    """
    marked_M = (inputs["sequence_ratio_mask"] != 0).to(logprobs_M.dtype)
    sequence_M = inputs[SEQUENCE]
    zeros_N = logprobs_M.new_zeros(int(sequence_M[-1]) + 1)
    totals_N = zeros_N.index_add(
        0, sequence_M, marked_M * (logprobs_M.detach() - inputs["logprobs"])
    )
    means_N = totals_N / zeros_N.index_add(0, sequence_M, marked_M).clamp(min=1)
    return _clipped_objective(
        torch.exp(means_N[sequence_M] + (logprobs_M - logprobs_M.detach())), inputs
    )


def _clip(ratio_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return ratio_M.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped_objective(ratio_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return -torch.minimum(
        ratio_M * inputs["advantages"], _clip(ratio_M, inputs) * inputs["advantages"]
    )


STEP_WORK = 1 << 34
"""Multiplications of losses that were sent as graphs which fill a step: some tenths of a second on
a CPU."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it takes.

    Attributes:
        function: Computes it.
        required: Inputs a datum must have.
        optional: Inputs it may have, with their fill.
        config: Settings and their defaults; one without a default must be given.
        by_token: Settings that a datum may give instead as an input, a value for each of its
            tokens.
        several_targets: Whether a position may have several targets.
        elementwise: Whether its values are reported.
    """

    function: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    required: Sequence[str] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float | None] = field(default_factory=dict)
    by_token: Sequence[str] = ()
    several_targets: bool = False
    elementwise: bool = False

    @property
    def inputs(self) -> list[str]:
        """The inputs it reads, targets aside."""
        return [*self.required, *self.optional, *self.by_token]


POLICY = ("logprobs", "advantages")
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def _clipping(
    function: Callable[..., torch.Tensor], low: float, high: float, **optional: float
) -> Loss:
    config = dict(zip(THRESHOLDS, (low, high), strict=True))
    return Loss(function, required=POLICY, optional=optional, config=config, by_token=THRESHOLDS)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        cross_entropy, optional={"weights": 1.0}, several_targets=True, elementwise=True
    ),
    "importance_sampling": Loss(importance_sampling, required=POLICY),
    "ppo": _clipping(ppo, 0.8, 1.2),
    "cispo": _clipping(cispo, 0.0, 4.0),
    "dro": Loss(dro, required=POLICY, config={"beta": None}),
    "gspo": _clipping(gspo, 0.8, 1.2, sequence_ratio_mask=1.0),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """A loss by name and its configuration, defaults filled in."""
    loss = LOSSES.get(name)
    if loss is None:
        raise EngineError(
            f"unknown loss {name!r}; known are {', '.join([*LOSSES, STABLE_REINFORCE, CUSTOM])}"
        )
    return loss, fill_settings(name, loss.config, config)


def fill_settings(
    name: str, defaults: Mapping[str, float | None], config: Mapping[str, float | str]
) -> dict[str, float]:
    """The configuration of a loss, defaults filled in."""
    known = ", ".join(defaults) or "none"
    for key, value in config.items():
        if key not in defaults:
            raise EngineError(f"loss {name!r} has no setting {key!r}; known are {known}")
        if isinstance(value, str) or not np.isfinite(value):
            raise EngineError(
                f"loss {name!r}: setting {key!r} must be a finite number, got {value!r}"
            )
    settings = {**defaults, **config}
    for key, setting in settings.items():
        if setting is None:
            raise EngineError(f"loss {name!r} needs the setting {key!r}: it has no default")
    return {key: float(setting) for key, setting in settings.items() if setting is not None}


@dataclass(frozen=True, slots=True)
class Others:
    """Tokens whose log-probabilities a loss reads beside those of the targets: as many at each of
    some positions.
    """

    positions: Array
    """Ascending."""
    tokens: Array
    """`[positions, tokens of each]`"""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The values of a loss on a micro-batch, their gradient by its log-probabilities, and metrics
    of each datum.
    """

    losses_L: torch.Tensor
    grad_M: torch.Tensor | None
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_host(self) -> Evaluated:
        """A copy that is there once the device has come so far."""
        grad_M = None if self.grad_M is None else to_host(self.grad_M)
        return Evaluated(to_host(self.losses_L.detach()), grad_M, self.metrics)


@dataclass(frozen=True, slots=True)
class Examples:
    """Data that passed every check: per datum its tokens, its targets `[N]` or `[N, K]`, and inputs
    of their shape.
    """

    tokens: list[Array]
    targets: list[Array]
    inputs: dict[str, list[Array]]
    others: Sequence[Others] = ()
    """By datum, what else its loss reads, if it reads anything else."""
    work: Sequence[int] = ()
    """By datum, the work of its loss, if that is more than reading its targets."""

    def weight(self, index: int, budget: int) -> int:
        """The tokens of a datum, and the work of its loss as tokens: STEP_WORK is as much as a
        step's budget.
        """
        tokens = self.tokens[index].size
        return tokens + self.work[index] * budget // STEP_WORK if self.work else tokens

    def wanted(self, index: int) -> tuple[Array, Array]:
        """The tokens whose log-probabilities the loss of a datum reads, and how many each of its
        positions has.
        """
        targets, size = self.targets[index], self.tokens[index].size
        if not self.others:
            return targets.reshape(-1), np.full(size, targets.size // size)
        counts, own = self._counts(index), self._own(index)
        tokens = np.empty(int(counts.sum()), targets.dtype)
        beside = np.ones(tokens.size, bool)
        beside[own] = False
        tokens[own], tokens[beside] = targets, self.others[index].tokens.reshape(-1)
        return tokens, counts

    def starts(self) -> Array:
        """Return where each datum's log-probabilities begin."""
        starts: Array = np.cumsum([0, *(self._size(index) for index in range(len(self.targets)))])
        return starts

    def own(self, indices: Sequence[int]) -> Array | None:
        """Return which log-probabilities are of targets; None if all are."""
        if not self.others:
            return None
        starts = np.cumsum([0, *(self._size(index) for index in indices[:-1])])
        return np.concatenate(
            [start + self._own(index) for start, index in zip(starts, indices, strict=True)]
        )

    def _size(self, index: int) -> int:
        return self.targets[index].size + (self.others[index].tokens.size if self.others else 0)

    def _counts(self, index: int) -> Array:
        """Return the number at each position: a target, and at some others."""
        counts = np.ones(self.tokens[index].size, np.int64)
        counts[self.others[index].positions] += self.others[index].tokens.shape[1]
        return counts

    def _own(self, index: int) -> Array:
        counts = self._counts(index)
        own: Array = np.cumsum(counts) - counts
        return own


@dataclass(frozen=True, slots=True)
class Room:
    """What a model has room for."""

    vocab: int
    context: int


def read_examples(data: Sequence[Datum], loss: Loss, settings: Config, room: Room) -> Examples:
    """Check data for a loss and a model; an `EngineError` names the datum, the key and the values
    at fault.
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
    if loss.by_token == THRESHOLDS:
        _check_thresholds(*(inputs[key] for key in THRESHOLDS))
    return Examples(tokens, targets, inputs)


def read_targets(data: Sequence[Datum], rank: int, room: Room) -> tuple[list[Array], list[Array]]:
    """The tokens and the targets of each datum; these have at most so many axes."""
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
    """The tokens of a text input that fits the context window."""
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
    """The default of an input: the same value at every target, and zero where a sparse tensor lists
    none.
    """
    if tensor.csr is None:
        return np.full(targets.shape, value, dtype=np.float32)
    rows, columns = tensor.csr
    ones = np.full(columns.size, value, dtype=np.float32)
    return TensorData(ones, "float32", tensor.shape, rows, columns).to_numpy()


def present(index: int, datum: Datum, key: str) -> TensorData:
    """An input that a datum must have."""
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None:
        raise EngineError(f"datum {index}: input {key!r} is missing")
    return tensor


def check_shape(index: int, key: str, tensor: TensorData, length: int) -> list[int]:
    """The shape of an input, checked before a sparse tensor is spread out: it may claim any."""
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
            hint = (
                "; to leave a position out, give it weight 0"
                if key == TARGETS and bad[0] < 0
                else ""
            )
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
            raise EngineError(f"datum {index}: {THRESHOLDS[0]!r} is above {THRESHOLDS[1]!r}")
