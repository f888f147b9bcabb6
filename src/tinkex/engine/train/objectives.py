"""The objectives of passes: losses of the table, losses sent as graphs, and `stable_reinforce`.

Errors name their datum, and are known before the model's own gradient is begun.

Axes: N data, M targets of a piece, or all log-probabilities that its loss reads, L values of a
loss: one per target, or one per datum for a graph, S sampled targets, K likeliest tokens.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import RECORDED_TOKENS, EngineError, Recalled
from tinkex.engine.losses.examples import (
    STEP_WORK,
    Evaluated,
    Examples,
    Objective,
    Piece,
    Room,
    check_shape,
    present,
    read_examples,
    read_targets,
)
from tinkex.engine.losses.graph_loss import Allowance, CompiledLoss
from tinkex.engine.losses.table import (
    CUSTOM,
    DIVERGENCE_LIMIT,
    LOSSES,
    RATIO_CAP,
    SEQUENCE,
    STABLE_REINFORCE,
    TARGETS,
    Loss,
    fill_settings,
    find_loss,
)
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.inputs import Datum
from tinkex.types.tensors import Array

LOOKED_AT = 4
"""The number of data, of different sizes, whose work is estimated."""


def find_objective(
    name: str,
    config: Mapping[str, float | str],
    losses: Mapping[str, CompiledLoss],
    recalled: Sequence[Recalled] | None = None,
) -> Objective:
    """Return a loss with its settings: of the table, sent before, or one with recordings."""
    loss = find_loss(name)
    if name == CUSTOM:
        return GraphLoss(_sent_loss(config, losses))
    settings = fill_settings(name, config)
    if name != STABLE_REINFORCE:
        return TableLoss(loss, settings)
    settings = read_settings(settings)
    if recalled is None:
        raise EngineError(
            f"loss {name!r} is computed from recordings of its samples, and there are none"
        )
    return StableReinforce(settings, recalled)


def _sent_loss(
    config: Mapping[str, float | str], losses: Mapping[str, CompiledLoss]
) -> CompiledLoss:
    """Return the loss that was sent as a graph and has the id in the configuration."""
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or len(config) > 1:
        raise EngineError(
            f"loss {CUSTOM!r} takes one setting, 'loss_id': the text that create_custom_loss gave"
        )
    if loss_id not in losses:
        raise EngineError(
            f"there is no custom loss {loss_id!r}: create it, and again after a restart of the "
            "server"
        )
    return losses[loss_id]


@dataclass(frozen=True, slots=True)
class TableLoss(Objective):
    """A loss of the table with its settings."""

    loss: Loss
    settings: Mapping[str, float]

    @property
    def elementwise(self) -> bool:
        """True if its values are reported beside the log-probabilities."""
        return self.loss.elementwise

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""
        return read_examples(data, self.loss, self.settings, room)

    def evaluate(self, piece: Piece) -> Evaluated:
        """Return the loss of a piece, and its gradient if that is needed."""
        logprobs_M, examples, indices = piece.logprobs_M, piece.examples, piece.indices

        def put(arrays: Sequence[Array], dtype: torch.dtype) -> Tensor:
            flat = np.concatenate([array.reshape(-1) for array in arrays])
            return to_device(flat, logprobs_M.device, dtype)

        inputs = {
            key: put([v[i] for i in indices], logprobs_M.dtype)
            for key, v in examples.inputs.items()
        }
        inputs[SEQUENCE] = put(
            [np.full(examples.targets[i].size, n) for n, i in enumerate(indices)], torch.int64
        )
        leaf_M = logprobs_M.detach().requires_grad_(piece.backward)
        assert self.loss.function is not None
        losses_M = self.loss.function(leaf_M, inputs, self.settings)
        return Evaluated(
            losses_M, torch.autograd.grad(losses_M.sum(), leaf_M)[0] if piece.backward else None
        )


@dataclass(slots=True)
class GraphLoss(Objective):
    """A loss that was sent as a graph; it takes one datum at a time.

    All data of a pass share one allowance of work and time. A datum that is computed again gives
    back its earlier share.
    """

    compiled: CompiledLoss
    _allowance: Allowance = field(init=False)
    _used: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The work and the seconds that each datum took."""

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed; ignore inputs without use."""
        ranks = dict(self.compiled.input_ranks)
        rank = ranks.pop("logprobs")
        tokens, targets = read_targets(data, 2, room)
        for index, array in enumerate(targets):
            self._check_rank(index, TARGETS, list(array.shape), rank)
        inputs = {
            name: [self._input(index, datum, name, axes) for index, datum in enumerate(data)]
            for name, axes in ranks.items()
        }
        sizes = [
            [array.size, *(each[index].size for each in inputs.values())]
            for index, array in enumerate(targets)
        ]
        self._allowance = self.compiled.allowance(sum(map(sum, sizes)))
        shapes = [
            {"logprobs": array.shape}
            | {name: arrays[index].shape for name, arrays in inputs.items()}
            for index, array in enumerate(targets)
        ]
        return Examples(tokens, targets, inputs, work=self._work(shapes))

    def _work(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> list[int]:
        """Estimate the work of each datum by that of a larger one that was looked at."""
        keys = [tuple(tuple(shape) for shape in each.values()) for each in shapes]
        distinct = sorted(set(keys), key=lambda key: (sum(map(math.prod, key)), key))
        looked_at = sorted(
            {round(place * (len(distinct) - 1) / (LOOKED_AT - 1)) for place in range(LOOKED_AT)}
        )
        places = {key: place for place, key in enumerate(distinct)}
        works = []
        for place in looked_at:
            work = self.compiled.work(dict(zip(shapes[0], distinct[place], strict=True)))
            works.append(STEP_WORK // 8 if work is None else work)
        return [works[bisect.bisect_left(looked_at, places[key])] for key in keys]

    def _input(self, index: int, datum: Datum, name: str, rank: int) -> Array:
        tensor = present(index, datum, name)
        shape = [tensor.values.size] if tensor.shape is None else tensor.shape
        if rank == 0 and shape == [1]:  # protobuf has no other way to write a single number
            return tensor.to_numpy().reshape(())
        self._check_rank(index, name, shape, rank)
        if rank > 0:
            check_shape(index, name, tensor, datum.model_input.length)
        return tensor.to_numpy()

    def _check_rank(self, index: int, name: str, shape: Sequence[int], rank: int) -> None:
        if len(shape) != rank:
            raise EngineError(
                f"datum {index}: {name!r} has shape {list(shape)}, custom loss "
                f"{self.compiled.name!r} takes rank {rank}"
            )

    def sizes(self, examples: Examples) -> Sequence[int]:
        """Return one value for each datum."""
        return [1] * len(examples.targets)

    def evaluate(self, piece: Piece) -> Evaluated:
        """Return the loss of a piece, and its gradient if that is needed."""
        logprobs_M, examples, indices = piece.logprobs_M, piece.examples, piece.indices
        losses, grads = [], []
        metrics: dict[str, list[float]] = {name: [] for name in self.compiled.metrics}
        parts = torch.split(
            logprobs_M.detach(), [examples.targets[index].size for index in indices]
        )
        for index, part in zip(indices, parts, strict=True):
            leaf = part.view(examples.targets[index].shape).requires_grad_(piece.backward)
            inputs = {name: torch.tensor(arrays[index]) for name, arrays in examples.inputs.items()}
            loss, told, grad = self._evaluate(index, leaf, inputs, backward=piece.backward)
            losses.append(loss)
            for name, value in told.items():
                metrics[name].append(float(value))
            if grad is not None:
                grads.append(grad)
        losses_L = torch.stack([loss.to(logprobs_M.dtype) for loss in losses])
        return Evaluated(losses_L, torch.cat(grads) if piece.backward else None, metrics)

    def _evaluate(
        self, index: int, leaf: Tensor, inputs: Mapping[str, Tensor], *, backward: bool
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return the loss, metrics and gradient of a datum, within the allowance."""
        work, seconds = self._used.pop(index, (0.0, 0.0))
        self._allowance.work += work
        self._allowance.seconds += seconds
        before, began = replace(self._allowance), time.monotonic()
        try:
            loss, told = self.compiled(leaf, inputs, self._allowance)
            grad = self._gradient(loss, leaf) if backward else None
            self._allowance.spend_time(began)
        except EngineError as error:
            raise EngineError(f"datum {index}: {error}") from error
        used = self._allowance
        self._used[index] = (before.work - used.work, before.seconds - used.seconds)
        return loss.detach(), told, grad

    def _gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        try:
            (grad,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:  # an operation without a derivative
            text = str(error).partition("\n")[0][:300]
            raise EngineError(
                f"custom loss {self.compiled.name!r} has no gradient: {text}"
            ) from error
        return grad.reshape(-1)


LEAST_SHARE = 1e-6
"""The least share of the tokens beside the likeliest ones: less is rounding."""


def read_settings(settings: Mapping[str, float]) -> dict[str, float]:
    """Check settings, of which all are finite numbers."""
    for key, value in settings.items():
        if value < 0 or (key == RATIO_CAP and value == 0):
            least = "above 0" if key == RATIO_CAP else "at least 0"
            raise EngineError(
                f"loss 'stable_reinforce': setting {key!r} must be {least}, got {value!r}"
            )
    return dict(settings)


@dataclass(frozen=True, slots=True)
class StableReinforce(Objective):
    """REINFORCE for samples that another policy drew.

    Its form is tinkex's own. The sampler's distribution at each sampled token was recorded: its K
    likeliest tokens, and all others as one more bucket. With π the model now, μ that distribution,
    y the sampled token and A its advantage, the loss is the sum over sampled tokens of

        -min(r, c) · m · A · log π(y)  +  kl_coeff · KL(π‖μ)

    where r = π(y)/q(y) is the ratio to the probability that y was drawn with, a constant; m is 0
    where π and μ differ by more than δ in total variation and the step would take them further
    apart, else 1; KL and total variation are taken over the buckets. Where π is μ, its gradient is
    that of `importance_sampling`.
    """

    settings: Mapping[str, float]
    recalled: Sequence[Recalled]

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""
        examples = read_examples(data, LOSSES[STABLE_REINFORCE], {}, room)
        if len(self.recalled) != len(data):
            raise EngineError(f"{len(data)} data have {len(self.recalled)} recordings", "server")
        for index, (recalled, targets) in enumerate(
            zip(self.recalled, examples.targets, strict=True)
        ):
            _check(index, recalled, targets, examples.inputs["advantages"][index], room)
        return replace(examples, recalled=self.recalled)

    def evaluate(self, piece: Piece) -> Evaluated:
        """Return the loss of a piece, and its gradient if that is needed."""
        logprobs_M = piece.logprobs_M
        batch = _Batch.of(piece, [self.recalled[i] for i in piece.indices])
        leaf_M = logprobs_M.detach().double().requires_grad_(piece.backward)
        with torch.set_grad_enabled(piece.backward):
            losses_S = self._losses(leaf_M[batch.drawn_S], leaf_M[batch.top_SK], batch)
        losses_L = leaf_M.new_zeros(batch.targets).index_copy(0, batch.places_S, losses_S.detach())
        grad_M = None
        if piece.backward:
            grad_M = torch.autograd.grad(losses_S.sum(), leaf_M)[0].to(logprobs_M.dtype)
        return Evaluated(losses_L, grad_M)

    def _losses(self, drawn_S: Tensor, top_SK: Tensor, batch: _Batch) -> Tensor:
        now_SB, then_SB = _buckets(top_SK), _buckets(batch.recorded_SK)
        distance_S = 0.5 * (now_SB.detach().exp() - then_SB.exp()).abs().sum(-1)
        moved_S = drawn_S.detach() - batch.model_S
        leaves_S = (distance_S > self.settings[DIVERGENCE_LIMIT]) & (
            moved_S * batch.advantages_S > 0
        )
        cap = math.log(self.settings[RATIO_CAP])
        ratio_S = (drawn_S.detach() - batch.sampler_S).clamp(max=cap).exp()
        losses_S = -torch.where(leaves_S, 0.0, ratio_S) * batch.advantages_S * drawn_S
        divergence_S = (now_SB.exp() * (now_SB - then_SB)).sum(-1)
        return losses_S + self.settings["kl_coeff"] * divergence_S


def _buckets(top_SK: Tensor) -> Tensor:
    """Return the log-probabilities of the likeliest tokens, and of all others together."""
    rest_S1 = (1 - top_SK.exp().sum(-1, keepdim=True)).clamp(min=LEAST_SHARE).log()
    return torch.cat([top_SK, rest_S1], -1)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sampled targets of a piece, on the device."""

    drawn_S: Tensor
    """The places of their log-probabilities among those that the loss reads."""
    top_SK: Tensor
    """The places of those of the likeliest tokens."""
    places_S: Tensor
    """Their places among the targets."""
    targets: int
    """The number of targets."""
    advantages_S: Tensor
    sampler_S: Tensor
    """Log-probabilities that they were drawn with."""
    model_S: Tensor
    """Log-probabilities under the model of then, at temperature 1."""
    recorded_SK: Tensor
    """The same of the likeliest tokens."""

    @classmethod
    def of(cls, piece: Piece, recalled: Sequence[Recalled]) -> _Batch:
        examples = piece.examples
        drawn, top, places, advantages = [], [], [], []
        wanted = targets = 0
        for index, known in zip(piece.indices, recalled, strict=True):
            width = known.recording.top_tokens.shape[1]
            before = wanted + known.positions + width * np.arange(known.positions.size)
            drawn.append(before)
            top.append(before[:, None] + np.arange(1, width + 1))
            places.append(targets + known.positions)
            advantages.append(examples.inputs["advantages"][index][known.positions])
            targets += examples.targets[index].size
            wanted += examples.targets[index].size + width * known.positions.size

        def put(arrays: Sequence[Array], dtype: torch.dtype = torch.float64) -> Tensor:
            return to_device(np.concatenate(arrays), piece.logprobs_M.device, dtype)

        recordings = [known.recording for known in recalled]
        return cls(
            put(drawn, torch.int64),
            put(top, torch.int64),
            put(places, torch.int64),
            targets,
            put(advantages),
            put([recording.logprobs for recording in recordings]),
            put([recording.model_logprobs for recording in recordings]),
            put([recording.top_logprobs for recording in recordings]),
        )


def _check(index: int, recalled: Recalled, targets: Array, advantages: Array, room: Room) -> None:
    """Refuse a datum that does not agree with its recording."""
    positions, recording = recalled.positions, recalled.recording
    if not positions.size:
        raise EngineError(
            f"datum {index}: none of its targets was sampled; 'stable_reinforce' needs one at least"
        )
    elsewhere = np.delete(advantages, positions)
    if elsewhere.any():
        at = int(np.setdiff1d(np.flatnonzero(advantages), positions)[0])
        raise EngineError(
            f"datum {index}: 'advantages' is {advantages[at]:g} at position {at}, which was not "
            "sampled; 'stable_reinforce' takes advantages on sampled targets only"
        )
    wrong = np.flatnonzero(targets[positions] != recording.tokens)
    if wrong.size:
        at = int(positions[wrong[0]])
        raise EngineError(
            f"datum {index}: the target at position {at} is {targets[at]}, but its span names the "
            f"sampled token {recording.tokens[wrong[0]]}"
        )
    width = min(RECORDED_TOKENS, room.vocab)
    if recording.top_tokens.shape[1] != width or recording.top_tokens.max() >= room.vocab:
        raise EngineError(
            f"datum {index}: its samples were drawn from a model with another vocabulary"
        )
