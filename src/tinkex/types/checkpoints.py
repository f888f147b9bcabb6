"""Messages of saved weights, and the grammar of `tinker://` paths."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias
from urllib.parse import quote

import msgspec

from tinkex.types.forms import Stamped
from tinkex.types.record import Int64, Record, check_depth
from tinkex.types.training import AdamOptimizerConfig, OptimizerConfigBase

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
"""What a checkpoint is for: to train on, to sample from, or to be taken away."""
KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
SCHEME = "tinker://"
CONSOLE = "https://tinker.thinkingmachines.ai"


def console_url(path: str) -> str:
    """The page of a checkpoint in the hosted service's console."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return f"{CONSOLE}/checkpoints/{quote(parsed.training_run_id, safe='')}/{quote(parsed.checkpoint_id, safe='')}"


class ParsedCheckpointTinkerPath(Record, frozen=True, kw_only=True):
    """The parts of `tinker://<run>/<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Parse a path; `ValueError` says what is wrong with it: the scheme, the shape or the kind.

        Args:
            tinker_path: `tinker://RUN/KIND/NAME`.

        Returns:
            Its parts.

        Raises:
            ValueError: The scheme, the shape or the kind is wrong; the message says which.
        """
        if not isinstance(tinker_path, str) or not tinker_path.startswith(SCHEME):
            raise ValueError(
                f"{tinker_path!r} is not a checkpoint path: it does not begin with {SCHEME}; "
                "expected tinker://<run>/<kind>/<name>"
            )
        parts = tinker_path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{tinker_path!r} is not a checkpoint path; expected tinker://<run>/<kind>/<name>")
        run, kind, name = parts
        if kind not in KINDS:
            raise ValueError(f"{tinker_path!r} has kind {kind!r}; expected one of {', '.join(KINDS)}")
        return cls(
            tinker_path=tinker_path,
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
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Record, frozen=True, kw_only=True):
    """Where the training checkpoint lies."""

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted service's console."""
        return console_url(self.path)


class SaveWeightsForSamplerRequest(Record, frozen=True, kw_only=True):
    """Save weights to sample from: under a name, or nameless straight into a sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: Int64 | None = None
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Record, frozen=True, kw_only=True):
    """Where the sampler checkpoint lies. Calls leave `type` None, whatever the server says, as the official client."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted service's console."""
        return console_url(self.path)

    def get_playground_url(self) -> str:
        """Where the checkpoint can be talked to in the hosted service's console."""
        return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


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
    seq_id: Int64 | None = None
    session_id: str | None = None
    model_seq_id: Int64 | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfigBase | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"

    def __post_init__(self) -> None:
        check_depth(self.user_metadata, "user_metadata")


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


class SaveWeightsExternalRequest(Record, frozen=True, kw_only=True):
    """Save weights as files to download; readable by the recipients alone when there are any."""

    model_id: str
    path: str
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Record, frozen=True, kw_only=True):
    """Where the exported checkpoint lies."""

    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Record, frozen=True, kw_only=True):
    """Where the exported checkpoint lies, and how large it is."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class ExternalWeightsUrlsResponse(Stamped, frozen=True, kw_only=True):
    """Signed addresses of an exported checkpoint's files, good until they expire."""

    urls: dict[str, str]
    expires: dt.datetime


class CheckpointArchiveUrlResponse(Stamped, frozen=True, kw_only=True):
    """The signed address of a checkpoint packed into one file, good until it expires."""

    url: str
    expires: dt.datetime


class CopyWeightsRequest(Record, frozen=True, kw_only=True):
    """Copy a checkpoint into a project."""

    session_id: str | None = None
    model_seq_id: Int64 | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Int64 | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Record, frozen=True, kw_only=True):
    """Where the copy lies."""

    tinker_path: str


class SetCheckpointTtlRequest(Record, frozen=True, kw_only=True):
    """Let a checkpoint expire after so many seconds, or never."""

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"ttl_seconds"})

    ttl_seconds: Int64 | None = None


class Cursor(Record, frozen=True, kw_only=True):
    """Which part of a list this is."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Stamped, frozen=True, kw_only=True):
    """A saved state of a training run."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: dt.datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: dt.datetime | None = None

    @property
    def training_run_id(self) -> str:
        """The run that the checkpoint was saved from."""
        return ParsedCheckpointTinkerPath.from_tinker_path(self.tinker_path).training_run_id


class CheckpointsListResponse(Record, frozen=True, kw_only=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


if TYPE_CHECKING:
    Flag: TypeAlias = bool
else:
    Flag = bool | str  # some servers write it as text, in any letter case


class TrainingRun(Stamped, frozen=True, kw_only=True):
    """A training run and what was last saved of it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: Flag = False
    lora_rank: int | None = None
    last_request_time: dt.datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Have the flag as one."""
        super().__post_init__()
        msgspec.structs.force_setattr(self, "corrupted", str(self.corrupted).strip().lower() == "true")


class TrainingRunsResponse(Record, frozen=True, kw_only=True):
    """Training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor
