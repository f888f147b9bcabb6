"""The losses that a server has: their functions, and one table of what each takes.

The table is for the engine, for the fake engine and for the server; so this module does not import
torch, and functions use methods of tensors only. CONTRIBUTING.md says how to add a loss.

A loss gets the log-probability of every target and the data's other inputs as flat tensors, and
returns one value per target. Values are summed, never averaged: so the gradient of a batch is the
sum over its parts, however it was split.

Axes: M targets of a piece, N data in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tinkex.engine.api import EngineError

if TYPE_CHECKING:
    import torch

Inputs: TypeAlias = Mapping[str, "torch.Tensor"]
Config: TypeAlias = Mapping[str, float]

TARGETS = "target_tokens"
SEQUENCE = "sequence"
"""An input that every loss gets: for each target the number of its datum in the piece."""

CUSTOM, STABLE_REINFORCE = "custom", "stable_reinforce"
"""A loss that was sent as a graph, and one that is computed from recordings of its samples."""

LARGEST = 88.0
"""A number whose exponential is finite in single precision."""


def cross_entropy(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-w·p, with weights of either sign."""
    return -inputs["weights"] * logprobs_M


def importance_sampling(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-r·A, with the ratio r = exp(p - q) to the policy that sampled."""
    return -_log_ratio(logprobs_M, inputs).exp() * inputs["advantages"]


def ppo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(r·A, clip(r)·A)."""
    log_ratio_M = _log_ratio(logprobs_M, inputs)
    # a ratio above the clip has no effect where A is positive, and must not be infinite
    bounded_M = log_ratio_M.clamp(max=LARGEST).where(inputs["advantages"] > 0, log_ratio_M)
    return _clipped_objective(bounded_M.exp(), inputs)


def _log_ratio(logprobs_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return log r; zero without an advantage, as it may be out of all bounds there."""
    return (logprobs_M - inputs["logprobs"]).where(inputs["advantages"] != 0, 0.0)


def cispo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-clip(r)·p·A, where the clipped ratio is a weight: it has no gradient of its own."""
    ratio_M = (logprobs_M.detach() - inputs["logprobs"]).exp()
    return -_clip(ratio_M, inputs) * logprobs_M * inputs["advantages"]


def dro(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-(p·A - β/2·(p - q)²), which also holds positions without an advantage near q."""
    distance_M = logprobs_M - inputs["logprobs"]
    return 0.5 * config["beta"] * distance_M**2 - logprobs_M * inputs["advantages"]


def gspo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(s·A, clip(s)·A), with s the geometric mean of r over marked positions.

    Each token has the value of s and the gradient of its own log-probability. A datum without marks
    has s = 1.
    """
    marked_M = (inputs["sequence_ratio_mask"] != 0).to(logprobs_M.dtype)
    sequence_M = inputs[SEQUENCE]
    zeros_N = logprobs_M.new_zeros(int(sequence_M[-1]) + 1)
    totals_N = zeros_N.index_add(
        0, sequence_M, marked_M * (logprobs_M.detach() - inputs["logprobs"])
    )
    means_N = totals_N / zeros_N.index_add(0, sequence_M, marked_M).clamp(min=1)
    ratio_M = (means_N[sequence_M] + (logprobs_M - logprobs_M.detach())).exp()
    return _clipped_objective(ratio_M, inputs)


def _clip(ratio_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    low, high = CLIPS
    return ratio_M.clamp(inputs[low], inputs[high])


def _clipped_objective(ratio_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    advantages_M = inputs["advantages"]
    return -(ratio_M * advantages_M).minimum(_clip(ratio_M, inputs) * advantages_M)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it takes.

    Attributes:
        function: Its value for each target; None if it is an objective of its own kind.
        required: Inputs a datum must have.
        optional: Inputs it may have, with their fill.
        config: Settings and their defaults; one without a default must be given.
        by_token: Settings that a datum may give as an input instead, a value for each token.
        several_targets: True if a position may have several targets.
        elementwise: True if its values are reported.
        own_form: Its formula, if the protocol has its name but not its form.
    """

    function: Callable[[torch.Tensor, Inputs, Config], torch.Tensor] | None = None
    required: Sequence[str] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float | None] = field(default_factory=dict)
    by_token: Sequence[str] = ()
    several_targets: bool = False
    elementwise: bool = False
    own_form: str = ""

    @property
    def inputs(self) -> list[str]:
        """The inputs that it reads, targets aside."""
        return [*self.required, *self.optional, *self.by_token]


POLICY = ("logprobs", "advantages")
CLIPS = ("clip_low_threshold", "clip_high_threshold")
RATIO_CAP, DIVERGENCE_LIMIT = "tinkex_ratio_cap", "tinkex_divergence_limit"
"""Settings of `stable_reinforce` that are tinkex's own, as their names say."""


def _clipping(
    function: Callable[..., torch.Tensor], low: float, high: float, **optional: float
) -> Loss:
    config = dict(zip(CLIPS, (low, high), strict=True))
    return Loss(function, required=POLICY, optional=optional, config=config, by_token=CLIPS)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        cross_entropy, optional={"weights": 1.0}, several_targets=True, elementwise=True
    ),
    "importance_sampling": Loss(importance_sampling, required=POLICY),
    "ppo": _clipping(ppo, 0.8, 1.2),
    "cispo": _clipping(cispo, 0.0, 4.0),
    "dro": Loss(dro, required=POLICY, config={"beta": None}),
    "gspo": _clipping(gspo, 0.8, 1.2, sequence_ratio_mask=1.0),
    STABLE_REINFORCE: Loss(
        required=("advantages",),
        config={"kl_coeff": 0.01, RATIO_CAP: 20.0, DIVERGENCE_LIMIT: 0.15},
        own_form="tinkex's own form of this loss: the hosted service's is not published. Sum over "
        "sampled tokens of -min(r, tinkex_ratio_cap) * m * A * log p + kl_coeff * KL(p || "
        "sampler); m is 0 where p and the sampler differ by more than tinkex_divergence_limit in "
        "total variation and the step would take them further apart",
    ),
    CUSTOM: Loss(several_targets=True),
}


def find_loss(name: str) -> Loss:
    """Return a loss by its name.

    Raises:
        EngineError: There is none.
    """
    if name not in LOSSES:
        raise EngineError(f"unknown loss {name!r}; known are {', '.join(LOSSES)}")
    return LOSSES[name]


def fill_settings(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the settings of a loss, defaults filled in."""
    defaults = LOSSES[name].config
    known = ", ".join(defaults) or "none"
    for key, value in config.items():
        if key not in defaults:
            raise EngineError(f"loss {name!r} has no setting {key!r}; known are {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise EngineError(
                f"loss {name!r}: setting {key!r} must be a finite number, got {value!r}"
            )
    settings = {**defaults, **config}
    for key, setting in settings.items():
        if setting is None:
            raise EngineError(f"loss {name!r} needs the setting {key!r}: it has no default")
    return {key: float(setting) for key, setting in settings.items() if setting is not None}
