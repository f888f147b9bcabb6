"""Messages of sessions, client configuration, futures, capabilities and health."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from tinkex.types.forms import Stamped, Variant
from tinkex.types.record import Int64, Record, check_depth, settle, whole

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]
"""Outcome of a session, in one word."""


class ClientConfigRequest(Record, frozen=True, kw_only=True):
    """Ask how to behave.

    Example:
        >>> ClientConfigRequest(sdk_version="0.38.0").sdk_version
        '0.38.0'
    """

    sdk_version: str


class ClientConfigResponse(Record, frozen=True, kw_only=True):
    """Settings that the server gives its clients.

    Example:
        >>> ClientConfigResponse(fwdbwd_max_chunk_len=256).fwdbwd_max_chunk_len
        256
    """

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10_485_760
    inflight_response_bytes_semaphore_size: int = 52_428_800
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    batched_results: bool = False
    """True on tinkex servers, where a batched poll can carry the results; others ignore it."""
    proto_write_fwdbwd: bool = False
    """Asks clients before 0.25 to send passes as protobuf; later clients always do."""
    fwd_via_fwdbwd: bool = False
    """Of the same clients: a pass without a gradient goes the same way."""
    create_model_via_load_weights: bool = False
    """Read by clients before 0.38, which resume with one `load_weights` only when it is true."""


class ClientDynamicConfigResponse(Record, frozen=True, kw_only=True):
    """Configuration that may change while a client runs.

    Example:
        >>> ClientDynamicConfigResponse().refresh_interval_sec
        300
    """

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class CreateSessionRequest(Record, frozen=True, kw_only=True):
    """Open a session.

    Example:
        >>> CreateSessionRequest(tags=["sweep"], user_metadata={"lr": "1e-4"}).tags
        ['sweep']
    """

    tags: list[str] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"

    def __post_init__(self) -> None:
        check_depth(self.user_metadata, "user_metadata")


class CreateSessionResponse(Record, frozen=True, kw_only=True):
    """A session, and what the server wants its user to read.

    Example:
        >>> CreateSessionResponse(
        ...     session_id="session-1", warning_message="maintenance at noon"
        ... ).warning_message
        'maintenance at noon'
    """

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Record, frozen=True, kw_only=True):
    """Say that the client is alive.

    Example:
        >>> SessionHeartbeatRequest(session_id="session-1").type
        'session_heartbeat'
    """

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Record, frozen=True, kw_only=True):
    """Heard, whatever the answer is.

    Example:
        >>> SessionHeartbeatResponse().type
        'session_heartbeat'
    """

    type: str = "session_heartbeat"


class FinishReason(Record, frozen=True, kw_only=True):
    """Outcome of a session.

    Example:
        >>> FinishReason(type="errored").type
        'errored'
    """

    type: ClientSessionFinishReasonType


class FinishSessionRequest(Record, frozen=True, kw_only=True):
    """Close a session.

    Example:
        >>> FinishSessionRequest(
        ...     reason=FinishReason(type="errored"), detail="out of data"
        ... ).model_dump()
        {'reason': {'type': 'errored'}, 'detail': 'out of data'}
    """

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"detail"})

    reason: FinishReason
    detail: str | None = None


class Empty(Record, frozen=True, kw_only=True):
    """A message whose arrival says it all.

    Example:
        >>> Empty.model_validate({}) == Empty()
        True
    """


class SupportedModel(Record, frozen=True, kw_only=True):
    """A base model the server offers.

    Example:
        >>> model = SupportedModel(
        ...     model_name="Qwen/Qwen3-8B", max_context_length=32_768, trainable=True
        ... )
        >>> model.max_context_length
        32768
    """

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


if TYPE_CHECKING:
    Models: TypeAlias = list[SupportedModel]
else:
    # Some servers list names; those are read by hand.
    Models = list[Any]


class GetServerCapabilitiesResponse(Record, frozen=True, kw_only=True):
    """Models and features of a server; a model may be listed by its name alone.

    Example:
        >>> offer = GetServerCapabilitiesResponse.model_validate(
        ...     {"supported_models": ["tinkex/tiny"]}
        ... )
        >>> "tinkex/tiny" in offer.model_names()  # offer = rest.get_server_capabilities().result()
        True
    """

    supported_models: Models

    def __post_init__(self) -> None:
        listed = [model for model in self.supported_models if model is not None]
        models = [
            SupportedModel(model_name=model) if isinstance(model, str) else model
            for model in listed
        ]
        settle(self, "supported_models", [SupportedModel.model_validate(model) for model in models])

    def model_names(self) -> list[str | None]:
        """The names of the models, in their order; None for one that has no name.

        Example:
            >>> models = [
            ...     SupportedModel(model_name="tinkex/tiny"),
            ...     SupportedModel(model_name="Qwen/Qwen3-8B"),
            ... ]
            >>> GetServerCapabilitiesResponse(supported_models=models).model_names()
            ['tinkex/tiny', 'Qwen/Qwen3-8B']
        """
        return [model.model_name for model in self.supported_models]


class HealthResponse(Record, frozen=True, kw_only=True):
    """The server is up.

    Example:
        >>> HealthResponse(status="ok").status
        'ok'
    """

    status: str


class TelemetrySendRequest(Record, frozen=True, kw_only=True):
    """A batch of client events.

    Example:
        >>> len(
        ...     TelemetrySendRequest(
        ...         events=[{"event": "SESSION_START"}], session_id="session-1"
        ...     ).events
        ... )
        1
    """

    events: list[dict[str, Any]]
    platform: str = ""
    sdk_version: str = ""
    session_id: str = ""
    process_uuid: str = ""


class TelemetryResponse(Record, frozen=True, kw_only=True):
    """Events were taken.

    Example:
        >>> TelemetryResponse(status="accepted").status
        'accepted'
    """

    status: Literal["accepted"]


class FutureRetrieveRequest(Record, frozen=True, kw_only=True):
    """Ask for the result of a submitted operation.

    Example:
        >>> FutureRetrieveRequest(request_id="request-1").allow_metadata_only
        False
    """

    request_id: str
    allow_metadata_only: bool = False


class RequestErrorCategory(StrEnum):
    """Cause of a failed operation: the server, the user, or unknown.

    Example:
        >>> RequestErrorCategory("server").is_retryable, RequestErrorCategory("user").is_retryable
        (True, False)
    """

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The category a text names, in any case; anything else is unknown.

        Args:
            value: The text, if there is one.

        Returns:
            The category.

        Example:
            >>> RequestErrorCategory.parse("USER")
            <RequestErrorCategory.User: 'user'>
        """
        name = value.strip().lower() if isinstance(value, str) else ""
        return cls(name) if name in cls._value2member_map_ else cls("unknown")

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        # A category that a later server may have must not make its answer unreadable.
        return cls.parse(value) if isinstance(value, str) else None

    @property
    def is_retryable(self) -> bool:
        """True if the operation may succeed when it is submitted again."""
        return self != RequestErrorCategory.User


class RequestFailedResponse(Record, frozen=True, kw_only=True):
    """An operation that failed; final.

    Example:
        >>> failed = RequestFailedResponse.model_validate(
        ...     {"error": "no such loss", "category": "user"}
        ... )
        >>> failed.error, failed.category.is_retryable
        ('no such loss', False)
    """

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


class TryAgainResponse(Record, frozen=True, kw_only=True):
    """Answer for an operation that is still running; raises `ValueError` if it is inconsistent.

    Example:
        >>> waiting = TryAgainResponse(
        ...     request_id="request-1", queue_state="paused_capacity", retry_after_ms=500
        ... )
        >>> waiting.queue_state, waiting.retry_after_ms
        ('paused_capacity', 500)
    """

    request_id: str
    queue_state: str
    queue_state_reason: str | None = None
    retry_after_ms: int | None = None
    type: str = "try_again"

    def __post_init__(self) -> None:
        for name in ("request_id", "queue_state", "type"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.type.lower() != "try_again":
            raise ValueError(f"type must be try_again, got {self.type!r}")
        if self.queue_state_reason is not None and not isinstance(self.queue_state_reason, str):
            raise ValueError(f"queue_state_reason must be a text, got {self.queue_state_reason!r}")
        if self.retry_after_ms is not None and whole(self.retry_after_ms, "retry_after_ms") < 0:
            raise ValueError(f"retry_after_ms must be 0 or more, got {self.retry_after_ms}")
        settle(self, "type", "try_again")


class CancelFutureRequest(Record, frozen=True, kw_only=True):
    """Give a submitted operation up.

    Example:
        >>> CancelFutureRequest(request_id="request-1").request_id
        'request-1'
    """

    request_id: str


class SamplingSessionFuturesTarget(Record, frozen=True, kw_only=True):
    """Sampler whose results a batched poll waits for.

    Example:
        >>> SamplingSessionFuturesTarget(sampling_session_id="sampler-1").type
        'sampling_session'
    """

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Int64 = 0


class FuturesRetrieveRequest(Record, frozen=True, kw_only=True):
    """Ask which operations have ended since the last time.

    Example:
        >>> target = SamplingSessionFuturesTarget(sampling_session_id="sampler-1")
        >>> FuturesRetrieveRequest(target=target, prev_cursor=12).prev_cursor
        12
    """

    target: SamplingSessionFuturesTarget
    prev_cursor: Int64 = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)
    inline_bytes: Int64 | None = None
    """Most bytes of results that the answer may carry; needs a server with `batched_results`."""


class CompletionMark(Variant):
    """Outcome of an operation."""

    __slots__ = ()
    TAG = "state"


class FutureFinished(Record, CompletionMark, frozen=True, kw_only=True):
    """An operation whose result is there.

    Example:
        >>> FutureFinished(request_id="request-1").state
        'finished'
    """

    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None
    content_type: str | None = None
    inline_size: int | None = None
    """Bytes of the answer that hold this result, if it came along; see `codec.decode_batch`."""


class FutureFailed(Record, CompletionMark, frozen=True, kw_only=True):
    """An operation that failed.

    Example:
        >>> FutureFailed(request_id="request-1").state
        'failed'
    """

    state: Literal["failed"] = "failed"
    request_id: str
    content_type: str | None = None
    inline_size: int | None = None


FutureCompletion: TypeAlias = FutureFinished | FutureFailed
"""A sample that has ended, well or not."""


class FuturesRetrieveResponse(Record, frozen=True, kw_only=True):
    """Operations that have ended, and where to carry on.

    Example:
        >>> told = {"completions": [{"state": "finished", "request_id": "request-1"}], "cursor": 13}
        >>> answer = FuturesRetrieveResponse.model_validate(told)
        >>> (
        ...     [done.request_id for done in answer.completions if done.state == "finished"],
        ...     answer.cursor,
        ... )
        (['request-1'], 13)
    """

    completions: list[_Completion]
    cursor: int


class JoinSamplingSessionRequest(Record, frozen=True, kw_only=True):
    """Sample beside others from one sampling session.

    Example:
        >>> JoinSamplingSessionRequest(sampling_session_id="sampler-1").sampling_session_id
        'sampler-1'
    """

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Record, frozen=True, kw_only=True):
    """Number of this client among those of the session.

    Example:
        >>> JoinSamplingSessionResponse(client_counter=2).client_counter
        2
    """

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


# ── sessions as they are listed and searched ──────────────────────────────────────────────────────


class GetSessionResponse(Record, frozen=True, kw_only=True):
    """Runs and samplers of a session.

    Example:
        >>> session = GetSessionResponse(training_run_ids=["run-1"], sampler_ids=["sampler-1"])
        >>> session.training_run_ids  # session = rest.get_session("session-1").result()
        ['run-1']
    """

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Record, frozen=True, kw_only=True):
    """The ids of sessions.

    Example:
        >>> ListSessionsResponse(sessions=["session-1", "session-2"]).sessions
        ['session-1', 'session-2']
    """

    sessions: list[str]


class AssignSessionProjectRequest(Record, frozen=True, kw_only=True):
    """Move a session into a project.

    Example:
        >>> AssignSessionProjectRequest(project_id="project-1").project_id
        'project-1'
    """

    project_id: str


class SessionTraceExportResponse(Record, frozen=True, kw_only=True):
    """Progress of the export of a session's timeline.

    Example:
        >>> export = SessionTraceExportResponse(
        ...     status="ready", url="https://files.example.org/trace.json"
        ... )
        >>> export.url if export.status == "ready" else export.error
        'https://files.example.org/trace.json'
    """

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


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


class SessionSearchCursor(Record, frozen=True, kw_only=True):
    """Start of the next page of a search.

    Example:
        >>> created = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> cursor = SessionSearchCursor(
        ...     last_created_at=created, last_session_id="session-9"
        ... )  # page.next_cursor
        >>> SessionSearchRequest(cursor=cursor).cursor.last_session_id
        'session-9'
    """

    last_created_at: dt.datetime
    last_session_id: str

    def __post_init__(self) -> None:
        if self.last_created_at.tzinfo is None:
            raise ValueError("last_created_at must have a time zone")


MOST_CONDITIONS = 200


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
        if not 1 <= self.limit <= 200:
            raise ValueError(f"limit must be 1 to 200, got {self.limit}")
        if self.statuses is not None and not self.statuses:
            raise ValueError("statuses must not be empty; leave it out to match every status")
        # each of them is a condition of a query
        for name in ("project_ids", "user_metadata", "statuses"):
            if len(getattr(self, name) or ()) > MOST_CONDITIONS:
                raise ValueError(
                    f"{name} must have at most {MOST_CONDITIONS} items, got "
                    f"{len(getattr(self, name))}"
                )


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


# A field's annotation is a union for readers and type checkers, and the group's mark for msgspec,
# which reads by it.
if TYPE_CHECKING:
    _FinishReason: TypeAlias = ClientSessionFinishReason
    _FailedReason: TypeAlias = SessionFailedReason
    _Status: TypeAlias = SessionStatus
    _StatusQuery: TypeAlias = SessionStatusQuery
    _Owner: TypeAlias = SearchOwner
    _Completion: TypeAlias = FutureCompletion
else:
    _FinishReason, _FailedReason, _Status = FinishMark, FailedReasonMark, StatusMark
    _StatusQuery, _Owner, _Completion = StatusQueryMark, OwnerMark, CompletionMark
