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
"""Purpose of a checkpoint: training, sampling, or export."""
KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
SamplingClientKind: TypeAlias = Literal["snapshot", "inflight"]
"""Weights of a sampling client: those it began with, or the run's newest in-flight save."""
SCHEME = "tinker://"
CONSOLE = "https://tinker.thinkingmachines.ai"


def console_url(path: str) -> str:
    """The page of a checkpoint in the hosted service's console.

    Example:
        >>> console_url("tinker://run-1/weights/step-100").rpartition("/checkpoints/")[2]
        'run-1/weights%2Fstep-100'
    """
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    run, checkpoint = (
        quote(part, safe="") for part in (parsed.training_run_id, parsed.checkpoint_id)
    )
    return f"{CONSOLE}/checkpoints/{run}/{checkpoint}"


class ParsedCheckpointTinkerPath(Record, frozen=True, kw_only=True):
    """The parts of `tinker://<run>/<kind>/<name>`.

    Example:
        >>> parsed = ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-1/weights/step-100")
        >>> parsed.training_run_id, parsed.checkpoint_type, parsed.name
        ('run-1', 'training', 'step-100')
    """

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

        Example:
            >>> ParsedCheckpointTinkerPath.from_tinker_path(
            ...     "tinker://run-1/sampler_weights/final"
            ... ).checkpoint_id
            'sampler_weights/final'
        """
        if not isinstance(tinker_path, str) or not tinker_path.startswith(SCHEME):
            raise ValueError(
                f"{tinker_path!r} is not a checkpoint path: it does not begin with {SCHEME}; "
                "expected tinker://<run>/<kind>/<name>"
            )
        parts = tinker_path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or not all(parts):
            raise ValueError(
                f"{tinker_path!r} is not a checkpoint path; expected tinker://<run>/<kind>/<name>"
            )
        run, kind, name = parts
        if kind not in KINDS:
            raise ValueError(
                f"{tinker_path!r} has kind {kind!r}; expected one of {', '.join(KINDS)}"
            )
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
    """Save weights and optimizer state, to resume from.

    Example:
        >>> SaveWeightsRequest(model_id="run-1", path="step-100", ttl_seconds=86_400).overwrite
        False
    """

    model_id: str
    path: str | None = None
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Record, frozen=True, kw_only=True):
    """Path of a saved training checkpoint.

    Example:
        >>> saved = SaveWeightsResponse(
        ...     path="tinker://run-1/weights/step-100"
        ... )  # save_state("step-100").result()
        >>> saved.path
        'tinker://run-1/weights/step-100'
    """

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted service's console.

        Example:
            >>> saved = SaveWeightsResponse(path="tinker://run-1/weights/step-100")
            >>> saved.get_console_url().rpartition("/checkpoints/")[2]
            'run-1/weights%2Fstep-100'
        """
        return console_url(self.path)


class SaveWeightsForSamplerRequest(Record, frozen=True, kw_only=True):
    """Save weights to sample from: under a name, or nameless straight into a sampler.

    Example:
        >>> SaveWeightsForSamplerRequest(model_id="run-1", path="final").path
        'final'
    """

    model_id: str
    path: str | None = None
    sampling_session_seq_id: Int64 | None = None
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    user_metadata: dict[str, str] | None = None
    kind: SamplingClientKind = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Record, frozen=True, kw_only=True):
    """Path of a saved sampler checkpoint.

    Like the official client, calls leave `type` None.

    Example:
        >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/final")
        >>> saved.path  # what create_sampling_client(model_path=...) takes
        'tinker://run-1/sampler_weights/final'
    """

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted service's console.

        Example:
            >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/final")
            >>> saved.get_console_url().rpartition("/checkpoints/")[2]
            'run-1/sampler_weights%2Ffinal'
        """
        return console_url(self.path)

    def get_playground_url(self) -> str:
        """Return the address of the hosted console's page where one can chat with the checkpoint.

        Example:
            >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/final")
            >>> saved.get_playground_url().partition("?")[2]
            'mode=checkpoint&checkpoint=tinker%3A%2F%2Frun-1%2Fsampler_weights%2Ffinal'
        """
        return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(Record, frozen=True, kw_only=True):
    """Either a path (named) or a sampling session (nameless).

    Example:
        >>> SaveWeightsForSamplerResponseInternal(
        ...     sampling_session_id="sampler-1"
        ... ).sampling_session_id
        'sampler-1'
    """

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class LoadWeightsRequest(Record, frozen=True, kw_only=True):
    """Request to load a checkpoint.

    Give `model_id` to load into an existing run, `session_id` and `model_seq_id` to load into a new
    one.

    Example:
        >>> LoadWeightsRequest(
        ...     path="tinker://run-1/weights/step-100", optimizer=True, model_id="run-2"
        ... ).optimizer
        True
    """

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
    """Checkpoint that was loaded, and its run.

    Example:
        >>> LoadWeightsResponse(path="tinker://run-1/weights/step-100", model_id="run-2").model_id
        'run-2'
    """

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Record, frozen=True, kw_only=True):
    """Ask what a checkpoint holds.

    Example:
        >>> WeightsInfoRequest(tinker_path="tinker://run-1/weights/step-100").tinker_path
        'tinker://run-1/weights/step-100'
    """

    tinker_path: str


class WeightsInfoResponse(Record, frozen=True, kw_only=True):
    """Description of a checkpoint's weights.

    Example:
        >>> info = WeightsInfoResponse(base_model="Qwen/Qwen3-8B", is_lora=True, lora_rank=32)
        >>> info.base_model, info.lora_rank
        ('Qwen/Qwen3-8B', 32)
    """

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)


class SaveWeightsExternalRequest(Record, frozen=True, kw_only=True):
    """Save weights as files to download; readable by the recipients alone when there are any.

    Example:
        >>> SaveWeightsExternalRequest(
        ...     model_id="run-1", path="export", ttl_seconds=3600
        ... ).ttl_seconds
        3600
    """

    model_id: str
    path: str
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Record, frozen=True, kw_only=True):
    """Path of an exported checkpoint.

    Example:
        >>> SaveWeightsExternalResponse(path="tinker://run-1/external_weights/export").path
        'tinker://run-1/external_weights/export'
    """

    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Record, frozen=True, kw_only=True):
    """Path and size of an exported checkpoint.

    Example:
        >>> answer = SaveWeightsExternalResponseInternal(
        ...     path="tinker://run-1/external_weights/a", size_bytes=2048
        ... )
        >>> answer.size_bytes
        2048
    """

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class ExternalWeightsUrlsResponse(Stamped, frozen=True, kw_only=True):
    """Signed addresses of an exported checkpoint's files, good until they expire.

    Example:
        >>> files = {"adapter_model.safetensors": "https://files.example.org/1"}
        >>> answer = ExternalWeightsUrlsResponse(urls=files, expires=dt.datetime(2026, 1, 2))
        >>> list(answer.urls), answer.expires.isoformat()
        (['adapter_model.safetensors'], '2026-01-02T00:00:00+00:00')
    """

    urls: dict[str, str]
    expires: dt.datetime


class CheckpointArchiveUrlResponse(Stamped, frozen=True, kw_only=True):
    """The signed address of a checkpoint packed into one file, good until it expires.

    Example:
        >>> until = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> answer = CheckpointArchiveUrlResponse(
        ...     url="https://files.example.org/1.tar", expires=until
        ... )
        >>> answer.url, answer.expires.isoformat()
        ('https://files.example.org/1.tar', '2026-01-02T00:00:00+00:00')
    """

    url: str
    expires: dt.datetime


class CopyWeightsRequest(Record, frozen=True, kw_only=True):
    """Copy a checkpoint into a project.

    Example:
        >>> CopyWeightsRequest(
        ...     source_path="tinker://run-1/weights/a", destination_project_id="p-1"
        ... ).source_path
        'tinker://run-1/weights/a'
    """

    session_id: str | None = None
    model_seq_id: Int64 | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Int64 | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Record, frozen=True, kw_only=True):
    """Path of a copied checkpoint.

    Example:
        >>> CopyWeightsResponse(tinker_path="tinker://run-2/weights/step-100").tinker_path
        'tinker://run-2/weights/step-100'
    """

    tinker_path: str


class SetCheckpointTtlRequest(Record, frozen=True, kw_only=True):
    """Let a checkpoint expire after so many seconds, or never.

    Example:
        >>> SetCheckpointTtlRequest(ttl_seconds=None).model_dump()  # never expires
        {'ttl_seconds': None}
    """

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"ttl_seconds"})

    ttl_seconds: Int64 | None = None


class Cursor(Record, frozen=True, kw_only=True):
    """Position of a page in a list.

    Example:
        >>> cursor = Cursor(offset=0, limit=20, total_count=45)
        >>> cursor.offset + cursor.limit < cursor.total_count  # there is another page
        True
    """

    offset: int
    limit: int
    total_count: int


class Checkpoint(Stamped, frozen=True, kw_only=True):
    """A saved state of a training run.

    Example:
        >>> fields = {
        ...     "checkpoint_id": "weights/a",
        ...     "checkpoint_type": "training",
        ...     "time": "2026-01-02T00:00:00Z",
        ... }
        >>> saved = Checkpoint.model_validate(
        ...     {**fields, "tinker_path": "tinker://run-1/weights/a", "size_bytes": 2048}
        ... )
        >>> saved.tinker_path, saved.training_run_id, saved.size_bytes
        ('tinker://run-1/weights/a', 'run-1', 2048)
    """

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: dt.datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: dt.datetime | None = None
    base_model: str | None = None
    """None in the lists of servers that do not say it."""

    @property
    def training_run_id(self) -> str:
        """The run that the checkpoint was saved from."""
        return ParsedCheckpointTinkerPath.from_tinker_path(self.tinker_path).training_run_id


class CheckpointsListResponse(Record, frozen=True, kw_only=True):
    """A page of checkpoints.

    Example:
        >>> fields = {
        ...     "checkpoint_id": "weights/a",
        ...     "checkpoint_type": "training",
        ...     "time": "2026-01-02T00:00:00Z",
        ... }
        >>> saved = Checkpoint.model_validate({**fields, "tinker_path": "tinker://run-1/weights/a"})
        >>> page = CheckpointsListResponse(
        ...     checkpoints=[saved]
        ... )  # rest.list_checkpoints("run-1").result()
        >>> [checkpoint.tinker_path for checkpoint in page.checkpoints]
        ['tinker://run-1/weights/a']
    """

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


if TYPE_CHECKING:
    Flag: TypeAlias = bool
else:
    Flag = bool | str  # some servers write it as text, in any letter case


class TrainingRun(Stamped, frozen=True, kw_only=True):
    """A training run and what was last saved of it.

    Example:
        >>> fields = {
        ...     "base_model": "Qwen/Qwen3-8B",
        ...     "model_owner": "ann",
        ...     "is_lora": True,
        ...     "lora_rank": 32,
        ... }
        >>> told = {
        ...     "training_run_id": "run-1",
        ...     "last_request_time": "2026-01-02T00:00:00Z",
        ...     **fields,
        ... }
        >>> run = TrainingRun.model_validate(told)
        >>> run.base_model, run.lora_rank, run.corrupted
        ('Qwen/Qwen3-8B', 32, False)
    """

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
    loaded: bool | None = None
    """False once the run takes no more requests: it was unloaded, or its session has ended.

    Only tinkex servers send it."""

    def __post_init__(self) -> None:
        """Have the flag as one."""
        super().__post_init__()
        msgspec.structs.force_setattr(
            self, "corrupted", str(self.corrupted).strip().lower() == "true"
        )


class TrainingRunsResponse(Record, frozen=True, kw_only=True):
    """Training runs.

    Example:
        >>> fields = {"base_model": "Qwen/Qwen3-8B", "model_owner": "ann", "is_lora": True}
        >>> run = {
        ...     "training_run_id": "run-1",
        ...     "last_request_time": "2026-01-02T00:00:00Z",
        ...     **fields,
        ... }
        >>> cursor = {"offset": 0, "limit": 20, "total_count": 1}
        >>> page = TrainingRunsResponse.model_validate({"training_runs": [run], "cursor": cursor})
        >>> [run.training_run_id for run in page.training_runs], page.cursor.total_count
        (['run-1'], 1)
    """

    training_runs: list[TrainingRun]
    cursor: Cursor
