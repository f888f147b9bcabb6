"""Facts that outlive the process: sessions, runs, samplers, checkpoints, keys and what was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from tinkex.types.training import LoraConfig

LOCAL_OWNER = "local"
"""The owner of what is made on an open server, or with the key that a server was started with."""
NO_PROJECT = "default"
"""The project of sessions that were given none."""
CLIENT_REASONS = ("success", "errored", "interrupted")
"""The reasons that clients give for the end of a session."""

UsageKind: TypeAlias = Literal["training", "prefill", "sample", "checkpoint", "storage"]
Use: TypeAlias = tuple[int, str, str, str, UsageKind]
"""The hour, the owner, the session, the base model, and the kind of use."""


def user_urn(owner: str) -> str:
    """Return an owner as clients see it."""
    return f"tml:user:{owner}"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with its training runs and samplers."""

    display_name: str | None
    user_metadata: dict[str, Any]
    run_ids: list[str]
    sampler_ids: list[str]


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session that a search found."""

    session_id: str
    microsecond: int
    """The time when it was made, as exactly as a cursor can say."""
    owner: str
    project_id: str | None
    reason: str | None
    detail: str | None
    display_name: str | None
    user_metadata: dict[str, Any]
    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """A training run."""

    model_id: str
    session_id: str
    base_model: str
    lora: LoraConfig
    optimizer: dict[str, Any]
    user_metadata: dict[str, Any] = field(default_factory=dict)
    owner: str = LOCAL_OWNER
    base_digest: str = ""
    """The digest of the base model's weights; empty when not known."""
    home: str = ""
    """The name of the worker that the run is at home on."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Something to sample from: a base model, a checkpoint, or a nameless snapshot."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    is_snapshot: bool = False
    owner: str = LOCAL_OWNER
    model_id: str | None = None
    """The run that a nameless snapshot was taken of."""
    version: int | None = None
    """The version that an in-flight sampler was made with, the oldest it may have."""


class Save(NamedTuple):
    """The answer to a request for saving; its checkpoint may be replaced or deleted by now."""

    tinker_path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    tinker_path: str
    model_id: str
    directory: Path
    created: float
    base_model: str
    lora: LoraConfig
    optimizer: dict[str, Any]
    size_bytes: int
    expires: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    owner: str = LOCAL_OWNER
    public: bool = False
    project_id: str | None = None
    base_digest: str = ""

    def is_shown_to(self, owner: str) -> bool:
        """Return whether an owner may read it: their own, or a published one."""
        return self.public or self.owner == owner


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run with its last request and checkpoints; for strangers only the published ones."""

    run: Run
    last_request: float
    corrupted: bool
    last_training: SavedCheckpoint | None
    last_sampler: SavedCheckpoint | None


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The room that the checkpoints of an owner take in a project."""

    project: str | None
    owner: str
    count: int
    size: int


class Key(NamedTuple):
    """A key on record; the key itself is not."""

    id: int
    owner: str
    name: str
    created: float
    last_used: float | None
    revoked: float | None


class Used(NamedTuple):
    """An amount that was used in an hour."""

    bucket: int
    owner: str
    session_id: str
    base_model: str
    kind: UsageKind
    amount: float
    project_id: str | None


class AuditEntry(NamedTuple):
    """An entry of the audit log; `details` is JSON."""

    at: float
    owner: str
    category: str
    event: str
    model_id: str | None
    tinker_path: str | None
    details: str


class Span(NamedTuple):
    """An operation of a session's timeline."""

    session_id: str
    request_id: str
    operation: str
    began: float
    ended: float
    error: str | None
