"""Messages of saved weights, and the grammar of `tinker://` paths."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

import msgspec

from tinkex.types.record import Record
from tinkex.types.training import AdamOptimizerConfig, OptimizerConfigBase

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
SCHEME = "tinker://"


class ParsedCheckpointTinkerPath(Record, frozen=True, kw_only=True):
    """The parts of `tinker://<run>/<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, path: str) -> Self:
        """Parse a path; `ValueError` says what is wrong with it."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or not all(parts):
            raise ValueError(f"{path!r} is not a checkpoint path; expected tinker://<run>/<kind>/<name>")
        run, kind, name = parts
        if kind not in KINDS:
            raise ValueError(f"{path!r} has kind {kind!r}; expected one of {', '.join(KINDS)}")
        return cls(
            tinker_path=path,
            training_run_id=run,
            checkpoint_type=KINDS[kind],
            checkpoint_id=f"{kind}/{name}",
        )

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.checkpoint_id.split("/", 1)[1]


class SaveWeightsRequest(Record, frozen=True, kw_only=True):
    """Save weights and optimizer state, to resume from."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Record, frozen=True, kw_only=True):
    """Where the training checkpoint lies."""

    path: str
    type: Literal["save_weights"] | None = None


class SaveWeightsForSamplerRequest(Record, frozen=True, kw_only=True):
    """Save weights to sample from: under a name, or nameless straight into a sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Record, frozen=True, kw_only=True):
    """Where the sampler checkpoint lies."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponseInternal(Record, frozen=True, kw_only=True):
    """Either a path (named) or a sampling session (nameless)."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class LoadWeightsRequest(Record, frozen=True, kw_only=True):
    """Load a checkpoint into a run: an existing one (model_id), or a new one (session_id and model_seq_id)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfigBase | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Record, frozen=True, kw_only=True):
    """What was loaded."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Record, frozen=True, kw_only=True):
    """Ask what a checkpoint holds."""

    tinker_path: str


class WeightsInfoResponse(Record, frozen=True, kw_only=True):
    """What a checkpoint holds."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
