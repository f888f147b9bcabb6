"""Searches for sessions and checkpoints: conditions, states and results."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from tinkex.types.checkpoints import Checkpoint, CheckpointType
from tinkex.types.forms import Stamped, Variant
from tinkex.types.record import Int64, Record
from tinkex.types.sessions import ClientSessionFinishReasonType


class FinishMark(Variant):
    """Outcome of a session, as its client reported it."""

    __slots__ = ()


class ClientSessionFinishSuccess(Record, FinishMark, frozen=True, kw_only=True):
    """It went well.

    Example:
        >>> ClientSessionFinished(reason=ClientSessionFinishSuccess()).reason.type
        'success'
    """

    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Record, FinishMark, frozen=True, kw_only=True):
    """The program failed.

    Example:
        >>> ClientSessionFinished(reason=ClientSessionFinishErrored(), detail="out of data").detail
        'out of data'
    """

    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Record, FinishMark, frozen=True, kw_only=True):
    """The program was interrupted.

    Example:
        >>> ClientSessionFinished(reason=ClientSessionFinishInterrupted()).reason.type
        'interrupted'
    """

    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
"""Outcome of a session, as its client reports it."""


class FailedReasonMark(Variant):
    """Cause of a session's failure."""

    __slots__ = ()


class SessionFailedRequestReason(Record, FailedReasonMark, frozen=True, kw_only=True):
    """A request.

    Example:
        >>> SessionFailedRequestReason(
        ...     request_id="request-1", request_type="optim_step"
        ... ).request_type
        'optim_step'
    """

    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Record, FailedReasonMark, frozen=True, kw_only=True):
    """A training run.

    Example:
        >>> SessionFailedTrainingRunReason(training_run_id="run-1").training_run_id
        'run-1'
    """

    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Record, FailedReasonMark, frozen=True, kw_only=True):
    """A sampling session.

    Example:
        >>> SessionFailedSamplingSessionReason(sampling_session_id="sampler-1").sampling_session_id
        'sampler-1'
    """

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)
"""Why a session failed."""


class StatusMark(Variant):
    """Status of a session."""

    __slots__ = ()


class StatusQueryMark(Variant):
    """Status of the sessions to search."""

    __slots__ = ()


class OwnerMark(Variant):
    """Owner whose sessions are searched."""

    __slots__ = ()


class SessionActive(Record, StatusMark, frozen=True, kw_only=True):
    """It runs.

    Example:
        >>> SessionActive().type
        'active'
    """

    type: Literal["active"] = "active"


class SessionCancelled(Record, StatusMark, frozen=True, kw_only=True):
    """It was cancelled from outside.

    Example:
        >>> SessionCancelled(detail="by its owner").detail
        'by its owner'
    """

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Record, StatusMark, frozen=True, kw_only=True):
    """Its client said that it was done.

    Example:
        >>> status = ClientSessionFinished.model_validate(
        ...     {"reason": {"type": "errored"}, "detail": "out of data"}
        ... )
        >>> status.reason.type, status.detail
        ('errored', 'out of data')
    """

    type: Literal["client_finished"] = "client_finished"
    reason: _FinishReason
    detail: str | None = None


class SessionFailed(Record, StatusMark, frozen=True, kw_only=True):
    """It failed.

    Example:
        >>> reason = SessionFailedTrainingRunReason(training_run_id="run-1")
        >>> SessionFailed(
        ...     category="internal", reason=reason, message="the run is corrupted"
        ... ).message
        'the run is corrupted'
    """

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: _FailedReason
    message: str


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive
"""Status of a session: active, or its outcome."""


class OwnSearchOwner(Record, OwnerMark, frozen=True, kw_only=True):
    """One's own sessions.

    Example:
        >>> SessionSearchRequest().owner
        OwnSearchOwner(type='own')
    """

    type: Literal["own"] = "own"


class AccessibleSearchOwner(Record, OwnerMark, frozen=True, kw_only=True):
    """All sessions that one may see.

    Example:
        >>> SessionSearchRequest(owner=AccessibleSearchOwner()).owner.type
        'accessible'
    """

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Record, OwnerMark, frozen=True, kw_only=True):
    """The sessions of one to ten users.

    Example:
        >>> SessionSearchRequest(
        ...     owner=UserSearchOwner(owner_urns=["user:1", "user:2"])
        ... ).owner.owner_urns
        ['user:1', 'user:2']
    """

    type: Literal["user"] = "user"
    owner_urns: list[str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.owner_urns) <= 10:
            raise ValueError(f"owner_urns must name 1 to 10 users, got {len(self.owner_urns)}")


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner
"""Owner whose sessions are searched."""


class ActiveSessionStatusQuery(Record, StatusQueryMark, frozen=True, kw_only=True):
    """Sessions that run.

    Example:
        >>> SessionSearchRequest(statuses=[ActiveSessionStatusQuery()]).statuses[0].type
        'active'
    """

    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Record, StatusQueryMark, frozen=True, kw_only=True):
    """Sessions that were cancelled from outside.

    Example:
        >>> SessionSearchRequest(statuses=[CancelledSessionStatusQuery()]).statuses[0].type
        'cancelled'
    """

    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Record, StatusQueryMark, frozen=True, kw_only=True):
    """Sessions that failed.

    Example:
        >>> ended_badly = [
        ...     FailedSessionStatusQuery(),
        ...     ClientFinishedSessionStatusQuery(reasons=["errored"]),
        ... ]
        >>> [status.type for status in SessionSearchRequest(statuses=ended_badly).statuses]
        ['failed', 'client_finished']
    """

    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Record, StatusQueryMark, frozen=True, kw_only=True):
    """Sessions whose client said that it was done, for any of some reasons or for whichever.

    Example:
        >>> ClientFinishedSessionStatusQuery(reasons=["errored", "interrupted"]).reasons
        ['errored', 'interrupted']
    """

    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = None

    def __post_init__(self) -> None:
        if self.reasons is not None and not self.reasons:
            raise ValueError("reasons must not be empty; leave it out to match every reason")


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)
"""Status of the sessions to search."""


class _Cursor(Record, frozen=True, kw_only=True):
    last_created_at: dt.datetime

    def __post_init__(self) -> None:
        if self.last_created_at.tzinfo is None:
            raise ValueError("last_created_at must have a time zone")


class SessionSearchCursor(_Cursor, frozen=True, kw_only=True):
    """Start of the next page of a search.

    Example:
        >>> created = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> cursor = SessionSearchCursor(
        ...     last_created_at=created, last_session_id="session-9"
        ... )  # page.next_cursor
        >>> SessionSearchRequest(cursor=cursor).cursor.last_session_id
        'session-9'
    """

    last_session_id: str


MOST_CONDITIONS = 200


def _check_page(search: SessionSearchRequest | CheckpointSearchRequest, last: str) -> None:
    """Check the length of a page, and the fields whose items are conditions of a query."""
    if not 1 <= search.limit <= 200:
        raise ValueError(f"limit must be 1 to 200, got {search.limit}")
    for name in ("project_ids", "user_metadata", last):
        if (count := len(getattr(search, name) or ())) > MOST_CONDITIONS:
            raise ValueError(f"{name} must have at most {MOST_CONDITIONS} items, got {count}")


class SessionSearchRequest(Record, frozen=True, kw_only=True):
    """Search for sessions, newest first.

    Example:
        >>> SessionSearchRequest(display_name="nightly", owner=AccessibleSearchOwner()).limit
        50
    """

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    display_name: str | None = None
    owner: _Owner = msgspec.field(default_factory=OwnSearchOwner)
    statuses: list[_StatusQuery] | None = None
    limit: Int64 = 50
    cursor: SessionSearchCursor | None = None

    def __post_init__(self) -> None:
        if self.display_name == "":
            raise ValueError("display_name must have at least one character")
        if self.statuses is not None and not self.statuses:
            raise ValueError("statuses must not be empty; leave it out to match every status")
        _check_page(self, "statuses")


class SessionSummary(Stamped, frozen=True, kw_only=True):
    """A session that was found.

    Example:
        >>> fields = {
        ...     "owner": "user:1",
        ...     "project_id": "p-1",
        ...     "checkpoints_count": 3,
        ...     "status": {"type": "active"},
        ... }
        >>> told = {"session_id": "session-1", "created_at": "2026-01-02T00:00:00Z", **fields}
        >>> found = SessionSummary.model_validate(told)
        >>> found.status.type, found.checkpoints_count
        ('active', 3)
    """

    session_id: str
    created_at: dt.datetime
    owner: str
    project_id: str
    status: _Status | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Record, frozen=True, kw_only=True):
    """A page of sessions.

    Example:
        >>> fields = {"owner": "user:1", "project_id": "p-1", "checkpoints_count": 3}
        >>> found = {"session_id": "session-1", "created_at": "2026-01-02T00:00:00Z", **fields}
        >>> page = SessionSearchResponse.model_validate({"sessions": [found]})
        >>> [session.session_id for session in page.sessions], page.next_cursor is None
        (['session-1'], True)
    """

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class CheckpointSearchCursor(_Cursor, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a page, from which the next one goes on. It is passed back unchanged.

    Example:
        >>> created = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> cursor = CheckpointSearchCursor(last_created_at=created, last_checkpoint_uuid="c-9")
        >>> CheckpointSearchRequest(cursor=cursor).cursor.last_checkpoint_uuid
        'c-9'
    """

    last_checkpoint_uuid: str


class CheckpointSearchRequest(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoints to look for, newest first. What is left out matches everything.

    Example:
        >>> CheckpointSearchRequest(checkpoint_type="sampler", user_metadata={"task": "add"}).limit
        50
    """

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: _Owner = msgspec.field(default_factory=OwnSearchOwner)
    base_models: list[str] | None = None
    """None matches every base model, an empty list matches none."""
    limit: Int64 = 50
    cursor: CheckpointSearchCursor | None = None

    def __post_init__(self) -> None:
        _check_page(self, "base_models")


class CheckpointSearchResponse(Record, frozen=True, kw_only=True):
    """A page of checkpoints.

    Example:
        >>> saved = client.save_state("step-100").result()
        >>> page = rest.search_checkpoints(CheckpointSearchRequest(limit=1)).result()
        >>> page.checkpoints[0].tinker_path == saved.path
        True
    """

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None


# A field's annotation is a union for readers and type checkers, and the group's mark for msgspec,
# which reads by it.
if TYPE_CHECKING:
    _FinishReason: TypeAlias = ClientSessionFinishReason
    _FailedReason: TypeAlias = SessionFailedReason
    _Status: TypeAlias = SessionStatus
    _StatusQuery: TypeAlias = SessionStatusQuery
    _Owner: TypeAlias = SearchOwner
else:
    _FinishReason, _FailedReason, _Status = FinishMark, FailedReasonMark, StatusMark
    _StatusQuery, _Owner = StatusQueryMark, OwnerMark
