"""The loss `stable_reinforce`: REINFORCE for samples that another policy drew.

Its form is tinkex's own. The sampler's distribution at each sampled token was recorded: its K
likeliest tokens, and all others as one more bucket. With π the model now, μ that distribution, y
the sampled token and A its advantage, the loss is the sum over sampled tokens of

    -min(r, c) · m · A · log π(y)  +  kl_coeff · KL(π‖μ)

where r = π(y)/q(y) is the ratio to the probability that y was drawn with, a constant; m is 0 where
π and μ differ by more than δ in total variation and the step would take them further apart, else 1;
KL and total variation are taken over the buckets. Where π is μ, its gradient is that of
`importance_sampling`.

Axes: N data, M wanted log-probabilities of a piece, S sampled targets, K likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import RECORDED_TOKENS, EngineError, Recalled
from tinkex.engine.losses.examples import (
    Evaluated,
    Examples,
    Objective,
    Piece,
    Room,
    read_examples,
)
from tinkex.engine.losses.table import DIVERGENCE_LIMIT, LOSSES, RATIO_CAP, STABLE_REINFORCE
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.inputs import Datum
from tinkex.types.tensors import Array

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
    """The loss with its settings, and the recordings behind the data of a pass."""

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
