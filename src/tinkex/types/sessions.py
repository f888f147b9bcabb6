"""Sessions, capabilities and health of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.types.record import Record, check_depth, settle

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
