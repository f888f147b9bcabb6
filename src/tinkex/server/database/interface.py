"""The database of a data directory as the server sees it, and its records.

`sqlite.py` implements it. All calls may block: the event loop makes them in a thread, except for
`SamplerTable.known`. Another database is another class with these attributes, handed to
`create_app`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from tinkex.types.search_requests import CheckpointSearchRequest, SessionSearchRequest
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
    """The answer to a save; its checkpoint may have been replaced or deleted."""

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
    """A run, its last request, and its last checkpoints that the reader may see."""

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


class DatabaseError(Exception):
    """A statement failed, for example because the disk is full."""


class SessionTable(Protocol):
    """Sessions."""

    def add(self, session_id: str, request: Mapping[str, Any], owner: str = LOCAL_OWNER) -> None:
        """Record a new session."""

    def get(self, session_id: str) -> SessionRecord | None:
        """Return a session with its runs and samplers, or None."""

    def state(self, session_id: str) -> str | None:
        """Return "active", "finished", "expired", or None when there is no such session."""

    def open_ids(self) -> list[str]:
        """Return the sessions that have not ended."""

    def finish(self, session_id: str, reason: str, detail: str | None) -> None:
        """Record how a session ended; the first reason stays."""

    def note_heard(
        self, heard: Sequence[tuple[float, str]], silent_since: float, reason: str, detail: str
    ) -> None:
        """Record the last requests of sessions, and end those silent since a time.

        A power loss may take this back.
        """

    def set_project(self, session_id: str, project_id: str) -> bool:
        """Move a session and its checkpoints into a project; return whether it exists."""

    def owner_of(self, session_id: str, model_id: str) -> tuple[str, str] | None:
        """Return the id and owner of the session, or else of the run, or None."""

    def ids(self, owner: str, limit: int, offset: int) -> list[str]:
        """Return a page of an owner's sessions, newest first."""

    def search(self, request: SessionSearchRequest, owner: str) -> list[FoundSession]:
        """Return an owner's sessions that match, newest first: the page and one more.

        Raises:
            TimeoutError: The search took too long.
        """


class RunTable(Protocol):
    """Training runs."""

    def add(self, run: Run) -> None:
        """Record a new training run."""

    def get(self, model_id: str) -> Run | None:
        """Return a training run of this or an earlier life of the server."""

    def touch(self, requests: Mapping[str, float]) -> None:
        """Note the times of the last requests of runs. A power loss may take this back."""

    def mark_corrupted(self, model_id: str) -> None:
        """Note that a run cannot continue; its checkpoints stay usable."""

    def page(
        self, owner: str, *, accessible: bool, project_id: str | None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return a page of an owner's or the visible runs, newest first, and the count."""

    def record(self, model_id: str, owner: str, *, accessible: bool) -> RunRecord | None:
        """Return a run that an owner has, or may see."""


class SamplerTable(Protocol):
    """Samplers."""

    def add(self, sampler: Sampler) -> None:
        """Record a sampler; the same one again changes nothing."""

    def add_inflight(self, sampler: Sampler, number: int) -> None:
        """Record an in-flight sampler, and the version made by a numbered request."""

    def inflight_versions(self, model_id: str, number: int) -> tuple[int, int]:
        """Return the version of a request, and the newest of its run; 0 if none."""

    def newest_version(self, model_id: str) -> int:
        """Return the newest version of a run's in-flight target; 0 if it has none."""

    def known(self, sampler_id: str) -> Sampler | None:
        """Return a sampler if it is in memory; this never blocks."""

    def get(self, sampler_id: str) -> Sampler | None:
        """Return a sampler of this or an earlier life of the server."""

    def join(self, sampler_id: str) -> int:
        """Return the number of a new client of a sampler: 1, 2, …, each only once."""


class CheckpointTable(Protocol):
    """Checkpoints, whose files are in place before they are recorded."""

    def put(self, saved: SavedCheckpoint, request_id: str | None = None) -> None:
        """Record a checkpoint, and that a request for it was met."""

    def save(self, request_id: str) -> Save | None:
        """Return the answer to a save that was done before, also before a restart."""

    def get(self, tinker_path: str) -> SavedCheckpoint | None:
        """Return a checkpoint by its path, unless it has expired."""

    def page(
        self, owner: str, *, model_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[SavedCheckpoint], int]:
        """Return a page of an owner's checkpoints, newest first, and the count.

        With a run, these are the checkpoints of that run that the owner may see.
        """

    def samplers(self, owner: str, base_models: Sequence[str], limit: int) -> list[SavedCheckpoint]:
        """Return an owner's sampler checkpoints of these base models, newest first."""

    def search(
        self, request: CheckpointSearchRequest, owner: str
    ) -> list[tuple[SavedCheckpoint, int]]:
        """Return an owner's checkpoints that match, newest first: the page and one more.

        Each comes with the microsecond when it was made.
        """

    def unknown_projects(self, projects: Collection[str], owner: str) -> list[str]:
        """Return those of the projects in which an owner has nothing."""

    def set_public(self, path: str, owner: str, public: bool) -> bool:
        """Publish an owner's checkpoint or take that back; return whether it exists."""

    def set_expiry(self, path: str, owner: str, expires: float | None) -> bool:
        """Let an owner's checkpoint expire at a time, or never; return whether it exists."""

    def remove(self, path: str, owner: str) -> Path | None:
        """Remove an owner's checkpoint; return its directory, which can be deleted."""

    def remove_expired(self) -> list[Path]:
        """Remove the expired checkpoints; return their directories."""

    def directory(self, path: str) -> Path | None:
        """Return the directory of a checkpoint, even of an expired one."""

    def directories(self, model_id: str) -> set[Path]:
        """Return the directories of a run's checkpoints, even of expired ones."""

    def sizes(self) -> list[tuple[str, str, str, int]]:
        """Return owner, run, base model and bytes of what is stored."""

    def stored_bytes(self, owner: str | None, project_id: str | None) -> list[StoredBytes]:
        """Return the room taken by project and owner; None stands for all of them."""


class KeyTable(Protocol):
    """API keys, by their hashes."""

    def add(self, digest: bytes, owner: str, name: str) -> int:
        """Record a key; return its number."""

    def all(self) -> list[Key]:
        """Return all keys, revoked ones too."""

    def revoke(self, number: int) -> tuple[str, str] | None:
        """Revoke a key; return its owner and name, or None if there is no such valid key."""

    def use(self, digest: bytes) -> tuple[int, str] | None:
        """Return number and owner of a valid key, and note its use; None if there is none."""

    def is_valid(self, number: int) -> bool:
        """Return whether a key is on record and not revoked."""

    def name(self, number: int) -> str:
        """Return the name of a key."""


class ActivityTable(Protocol):
    """Usage by the hour, the audit log, the timelines of sessions, and the server's lives."""

    def begin_life(self) -> int:
        """Count a start of the server; return its number, which is above all earlier ones."""

    def add(
        self, uses: Mapping[Use, float], spans: Sequence[Span], entries: Sequence[AuditEntry]
    ) -> None:
        """Record uses, spans and audit entries, all or none.

        A power loss may take this back if there are no entries.
        """

    def used(
        self, start: int, end: int, owner: str | None
    ) -> tuple[list[Used], dict[str, dict[str, Any]]]:
        """Return the uses between two times, and the metadata of their sessions.

        They are those of an owner, or of all.
        """

    def audit(
        self, start: float, end: float, owner: str | None, category: str | None
    ) -> list[AuditEntry]:
        """Return the audit log between two times; None means all owners or categories."""

    def spans(self, session_id: str) -> list[Span]:
        """Return the timeline of a session."""

    def forget_spans(self, before: float) -> None:
        """Delete the spans that began before a time."""


class Database(Protocol):
    """The database of one data directory."""

    root: Path
    """The data directory."""
    sessions: SessionTable
    runs: RunTable
    samplers: SamplerTable
    checkpoints: CheckpointTable
    keys: KeyTable
    activity: ActivityTable

    def verify(self) -> None:
        """Check that everything is as it was written.

        Raises:
            DataDirError: It is damaged.
        """

    def close(self) -> None:
        """Close the database."""
