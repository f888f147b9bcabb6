"""Checkpoints and training runs, as lists show them."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Literal, Self, TypeAlias
from urllib.parse import quote

import msgspec

from tinkex.types.forms import Stamped
from tinkex.types.record import Record

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
"""Purpose of a checkpoint: training, sampling, or export."""


KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


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
        >>> saved = client.save_state("step-100").result()
        >>> page = rest.list_checkpoints(client.model_id).result()
        >>> [checkpoint.checkpoint_id for checkpoint in page.checkpoints]
        ['weights/step-100']
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
