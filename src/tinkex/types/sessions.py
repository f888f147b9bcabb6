"""Messages of sessions, client configuration, futures, capabilities and health."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.types.record import Record

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


class ClientConfigRequest(Record, frozen=True, kw_only=True):
    """Ask how to behave."""

    sdk_version: str


class ClientConfigResponse(Record, frozen=True, kw_only=True):
    """How the server wants its clients to behave."""

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
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(Record, frozen=True, kw_only=True):
    """Configuration that may change while a client runs."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class CreateSessionRequest(Record, frozen=True, kw_only=True):
    """Open a session."""

    tags: list[str] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Record, frozen=True, kw_only=True):
    """A session, and what the server wants its user to read."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Record, frozen=True, kw_only=True):
    """Say that the client is alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Record, frozen=True, kw_only=True):
    """Heard."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Record, frozen=True, kw_only=True):
    """How a session ended."""

    type: ClientSessionFinishReasonType


class FinishSessionRequest(Record, frozen=True, kw_only=True):
    """Close a session."""

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"detail"})

    reason: FinishReason
    detail: str | None = None


class Empty(Record, frozen=True, kw_only=True):
    """A message whose arrival says it all."""


class SupportedModel(Record, frozen=True, kw_only=True):
    """A base model the server offers."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(Record, frozen=True, kw_only=True):
    """What the server offers."""

    supported_models: list[SupportedModel]


class HealthResponse(Record, frozen=True, kw_only=True):
    """The server is up."""

    status: Literal["ok"]


class TelemetrySendRequest(Record, frozen=True, kw_only=True):
    """A batch of client events."""

    events: list[dict[str, Any]]
    platform: str = ""
    sdk_version: str = ""
    session_id: str = ""
    process_uuid: str = ""


class TelemetryResponse(Record, frozen=True, kw_only=True):
    """Events were taken."""

    status: Literal["accepted"]


class FutureRetrieveRequest(Record, frozen=True, kw_only=True):
    """Ask for the result of a submitted operation."""

    request_id: str
    allow_metadata_only: bool = False


class RequestErrorCategory(StrEnum):
    """Whose fault a failed operation is."""

    Unknown = "unknown"
    Server = "server"
    User = "user"


class RequestFailedResponse(Record, frozen=True, kw_only=True):
    """An operation that failed; final."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


class TryAgainResponse(Record, frozen=True, kw_only=True):
    """An operation that is still going on."""

    request_id: str = ""
    queue_state: str = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"
