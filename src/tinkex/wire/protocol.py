"""The table of endpoints: the client calls it, the server routes it, the docs list it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from tinkex.types.account import (
    ApiKeyResponse,
    AuditLogResponse,
    AuthTokenResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.types.checkpoint_search import CheckpointSearchRequest, CheckpointSearchResponse
from tinkex.types.checkpoints import CheckpointsListResponse, TrainingRun, TrainingRunsResponse
from tinkex.types.custom_losses import CreateCustomLossRequest, CreateCustomLossResponse
from tinkex.types.external_weights import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
)
from tinkex.types.future_requests import (
    CancelFutureRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from tinkex.types.model_requests import (
    CreateModelRequest,
    CreateModelResponse,
    DropGradientsRequest,
    DropGradientsResponse,
    GetInfoRequest,
    GetInfoResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleStreamChunk,
)
from tinkex.types.saves import (
    CheckpointArchiveUrlResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    SetCheckpointTtlRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.session_search import SessionSearchRequest, SessionSearchResponse
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    HealthResponse,
    ListSessionsResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionTraceExportResponse,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.training import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    OptimStepResponse,
    UntypedAPIFuture,
)

PREFIX = "/api/v1"
PROTOCOL_VERSION = "0.38.0"
"""The official SDK version whose protocol this package speaks."""

Traffic: TypeAlias = Literal["session", "train", "sample", "poll", "rest", "telemetry"]


class Unowned(Enum):
    """The two reasons why no field of a request is compared with an owner."""

    OPEN = "the request names no object with an owner"
    BY_HANDLER = "the handler checks the owner"


OPEN, BY_HANDLER = Unowned.OPEN, Unowned.BY_HANDLER
Ownership: TypeAlias = str | tuple[str, ...] | Unowned

OWNED_FIELDS = {
    "session_id": "session",
    "model_id": "model",
    "sampling_session_id": "sampling session",
    "sampler_id": "sampler",
    "request_id": "request",
    "training_run_id": "training run",
}
"""The fields that name an object with an owner, and what messages call the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Declares the fields of a request that must name objects of its own account."""

    owned_by: Ownership
    """One field, several, `OPEN` or `BY_HANDLER`. A field is one of the body or of the path; with
    a dot it is a field of a field."""

    @property
    def owned_fields(self) -> tuple[str, ...]:
        """The declared fields; none for `OPEN` and `BY_HANDLER`."""
        if isinstance(self.owned_by, Unowned):
            return ()
        return (self.owned_by,) if isinstance(self.owned_by, str) else self.owned_by

    def check_declaration(self, name: str, path: str, request: type[Any] | None = None) -> None:
        """Raise ValueError when the declaration and the fields of a request do not agree."""
        fields = {*re.findall(r"{(\w+)", path), *getattr(request, "__struct_fields__", ())}
        declared = {field.partition(".")[0] for field in self.owned_fields}
        if unknown := declared - fields:
            raise ValueError(f"{name}: owned_by names {sorted(unknown)}; there is no such field")
        if any(field.rpartition(".")[2] not in OWNED_FIELDS for field in self.owned_fields):
            raise ValueError(
                f"{name}: owned_by is {self.owned_by!r}; expected some of {[*OWNED_FIELDS]}"
            )
        open_fields = (fields & OWNED_FIELDS.keys()) - declared
        if open_fields and self.owned_by is not BY_HANDLER:
            raise ValueError(f"{name}: owned_by does not name {sorted(open_fields)}")


@dataclass(frozen=True, slots=True)
class Operation(Owned):
    """One endpoint. `result` is what the future gives, for operations that answer with a future."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    request: type[Any] | None
    response: type[Any]
    result: type[Any] | None = None
    traffic: Traffic = "rest"
    request_type: str = ""
    """The name a poller gives the operation in X-Tinker-Request-Type."""

    def __post_init__(self) -> None:
        self.check_declaration(self.name, self.path, self.request)

    @property
    def title(self) -> str:
        """The operation's name in messages: the client's method, or the wire's name."""
        return TITLES.get(self.name, self.name)


TITLES = {"asample": "sampling", "stream_sample": "sampling"}


def _future(
    name: str,
    request: type[Any],
    result: type[Any],
    request_type: str,
    traffic: Traffic = "train",
    *,
    owned_by: Ownership,
) -> Operation:
    return Operation(
        name,
        "POST",
        name,
        request,
        UntypedAPIFuture,
        result,
        traffic,
        request_type,
        owned_by=owned_by,
    )


def _post(
    name: str,
    request: type[Any],
    response: type[Any],
    traffic: Traffic = "rest",
    path: str = "",
    *,
    owned_by: Ownership,
) -> Operation:
    return Operation(
        name, "POST", path or name, request, response, traffic=traffic, owned_by=owned_by
    )


def _get(name: str, path: str, response: type[Any], *, owned_by: Ownership) -> Operation:
    return Operation(name, "GET", path, None, response, owned_by=owned_by)


CLIENT_CONFIG = _post(
    "client_config",
    ClientConfigRequest,
    ClientConfigResponse,
    "session",
    "client/config",
    owned_by=OPEN,
)
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    "session",
    "client/dynamic_config",
    owned_by=OPEN,
)
AUTH_TOKEN = _post("auth_token", Empty, AuthTokenResponse, "session", "auth/token", owned_by=OPEN)
GET_API_KEY = _get("get_api_key", "auth/apikey/me", ApiKeyResponse, owned_by=OPEN)
DELETE_API_KEY = Operation("delete_api_key", "DELETE", "auth/apikey/me", None, Empty, owned_by=OPEN)
CREATE_SESSION = _post(
    "create_session", CreateSessionRequest, CreateSessionResponse, "session", owned_by=OPEN
)
SESSION_HEARTBEAT = _post(
    "session_heartbeat",
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    "session",
    owned_by="session_id",
)
FINISH_SESSION = _post(
    "finish_session",
    FinishSessionRequest,
    Empty,
    "session",
    "sessions/{session_id}/finish",
    owned_by="session_id",
)
CREATE_MODEL = _future(
    "create_model", CreateModelRequest, CreateModelResponse, "CreateModel", owned_by="session_id"
)
UNLOAD_MODEL = _future(
    "unload_model", UnloadModelRequest, UnloadModelResponse, "UnloadModel", owned_by="model_id"
)
DROP_GRADIENTS = _future(
    "drop_gradients",
    DropGradientsRequest,
    DropGradientsResponse,
    "DropGradients",
    owned_by="model_id",
)
"""Ours alone: the hosted service has no such operation."""
CREATE_CUSTOM_LOSS = _future(
    "create_custom_loss",
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    "CreateCustomLoss",
    owned_by="session_id",
)
GET_INFO = _post("get_info", GetInfoRequest, GetInfoResponse, owned_by="model_id")
FORWARD_BACKWARD = _future(
    "forward_backward",
    ForwardBackwardRequest,
    ForwardBackwardOutput,
    "ForwardBackward",
    owned_by="model_id",
)
FORWARD = _future("forward", ForwardRequest, ForwardBackwardOutput, "Forward", owned_by="model_id")
OPTIM_STEP = _future(
    "optim_step", OptimStepRequest, OptimStepResponse, "OptimStep", owned_by="model_id"
)
SAVE_WEIGHTS = _future(
    "save_weights", SaveWeightsRequest, SaveWeightsResponse, "SaveWeights", owned_by="model_id"
)
SAVE_WEIGHTS_FOR_SAMPLER = _future(
    "save_weights_for_sampler",
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
    owned_by="model_id",
)
SAVE_WEIGHTS_EXTERNAL = _future(
    "save_weights_external",
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    "SaveWeightsExternal",
    owned_by="model_id",
)
LOAD_WEIGHTS = _future(
    "load_weights",
    LoadWeightsRequest,
    LoadWeightsResponse,
    "LoadWeights",
    owned_by=("session_id", "model_id"),
)
WEIGHTS_INFO = _post("weights_info", WeightsInfoRequest, WeightsInfoResponse, owned_by=BY_HANDLER)
COPY_WEIGHTS = _post("copy_weights", CopyWeightsRequest, CopyWeightsResponse, owned_by="session_id")
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session",
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    "session",
    owned_by="session_id",
)
JOIN_SAMPLING_SESSION = _post(
    "join_sampling_session",
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    "session",
    owned_by="sampling_session_id",
)
GET_SAMPLER = _get(
    "get_sampler", "samplers/{sampler_id}", GetSamplerResponse, owned_by="sampler_id"
)
ASAMPLE = _future(
    "asample", SampleRequest, SampleResponse, "Sample", "sample", owned_by="sampling_session_id"
)
STREAM_SAMPLE = _post(
    "stream_sample", SampleRequest, SampleStreamChunk, "sample", owned_by="sampling_session_id"
)
RETRIEVE_FUTURE = _post(
    "retrieve_future", FutureRetrieveRequest, Empty, "poll", owned_by="request_id"
)
RETRIEVE_FUTURES = _post(
    "retrieve_futures",
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    "poll",
    owned_by="target.sampling_session_id",
)
CANCEL_FUTURE = _post("cancel_future", CancelFutureRequest, Empty, "sample", owned_by=BY_HANDLER)

RUN = "training_runs/{training_run_id}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
"""A checkpoint's id is two parts of a path, so that ids never need a slash of their own."""

LIST_TRAINING_RUNS = _get(
    "list_training_runs", "training_runs", TrainingRunsResponse, owned_by=OPEN
)
GET_TRAINING_RUN = _get("get_training_run", RUN, TrainingRun, owned_by=BY_HANDLER)
LIST_CHECKPOINTS = _get(
    "list_checkpoints", f"{RUN}/checkpoints", CheckpointsListResponse, owned_by=BY_HANDLER
)
LIST_USER_CHECKPOINTS = _get(
    "list_user_checkpoints", "checkpoints", CheckpointsListResponse, owned_by=OPEN
)
DELETE_CHECKPOINT = Operation(
    "delete_checkpoint", "DELETE", CHECKPOINT, None, Empty, owned_by=BY_HANDLER
)
PUBLISH_CHECKPOINT = Operation(
    "publish_checkpoint", "POST", f"{CHECKPOINT}/publish", None, Empty, owned_by=BY_HANDLER
)
UNPUBLISH_CHECKPOINT = Operation(
    "unpublish_checkpoint", "DELETE", f"{CHECKPOINT}/publish", None, Empty, owned_by=BY_HANDLER
)
SET_CHECKPOINT_TTL = Operation(
    "set_checkpoint_ttl",
    "PUT",
    f"{CHECKPOINT}/ttl",
    SetCheckpointTtlRequest,
    Empty,
    owned_by=BY_HANDLER,
)
GET_EXTERNAL_WEIGHTS_URLS = _get(
    "get_external_weights_urls",
    f"{CHECKPOINT}/external_weights_urls",
    ExternalWeightsUrlsResponse,
    owned_by=BY_HANDLER,
)
GET_CHECKPOINT_ARCHIVE = _get(
    "get_checkpoint_archive",
    f"{CHECKPOINT}/archive",
    CheckpointArchiveUrlResponse,
    owned_by=BY_HANDLER,
)
LIST_SESSIONS = _get("list_sessions", "sessions", ListSessionsResponse, owned_by=OPEN)
GET_SESSION = _get(
    "get_session", "sessions/{session_id}", GetSessionResponse, owned_by="session_id"
)
ASSIGN_SESSION_PROJECT = Operation(
    "assign_session_project",
    "PUT",
    "sessions/{session_id}/project",
    AssignSessionProjectRequest,
    Empty,
    owned_by="session_id",
)
EXPORT_SESSION_TRACE = _get(
    "export_session_trace",
    "sessions/{session_id}/trace_export",
    SessionTraceExportResponse,
    owned_by="session_id",
)
EXTERNAL_WEIGHTS_UPLOAD_START = _post(
    "external_weights_upload_start",
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
    owned_by=OPEN,
)
EXTERNAL_WEIGHTS_UPLOAD_FINISH = _post(
    "external_weights_upload_finish",
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    owned_by=BY_HANDLER,
)
SEARCH_CHECKPOINTS = _post(
    "search_checkpoints",
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    path="checkpoints/search",
    owned_by=OPEN,
)
SEARCH_SESSIONS = _post(
    "search_sessions",
    SessionSearchRequest,
    SessionSearchResponse,
    path="sessions/search",
    owned_by="session_id",
)
GET_BILLING_USAGE = _get(
    "get_billing_usage", "billing/usage/events", BillingUsageResponse, owned_by=OPEN
)
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = _get(
    "get_current_checkpoint_storage_usage",
    "billing/usage/checkpoints/current",
    CurrentCheckpointStorageUsageResponse,
    owned_by=OPEN,
)
GET_AUDIT_LOG = _get("get_audit_log", "audit", AuditLogResponse, owned_by=OPEN)
GET_SERVER_CAPABILITIES = _get(
    "get_server_capabilities",
    "get_server_capabilities",
    GetServerCapabilitiesResponse,
    owned_by=OPEN,
)
HEALTHZ = _get("healthz", "healthz", HealthResponse, owned_by=OPEN)
TELEMETRY = _post(
    "telemetry", TelemetrySendRequest, TelemetryResponse, "telemetry", owned_by="session_id"
)

OPERATIONS: tuple[Operation, ...] = (
    CLIENT_CONFIG,
    CLIENT_DYNAMIC_CONFIG,
    AUTH_TOKEN,
    GET_API_KEY,
    DELETE_API_KEY,
    CREATE_SESSION,
    SESSION_HEARTBEAT,
    FINISH_SESSION,
    CREATE_MODEL,
    UNLOAD_MODEL,
    DROP_GRADIENTS,
    CREATE_CUSTOM_LOSS,
    GET_INFO,
    FORWARD_BACKWARD,
    FORWARD,
    OPTIM_STEP,
    SAVE_WEIGHTS,
    SAVE_WEIGHTS_FOR_SAMPLER,
    SAVE_WEIGHTS_EXTERNAL,
    LOAD_WEIGHTS,
    WEIGHTS_INFO,
    COPY_WEIGHTS,
    CREATE_SAMPLING_SESSION,
    JOIN_SAMPLING_SESSION,
    GET_SAMPLER,
    ASAMPLE,
    STREAM_SAMPLE,
    RETRIEVE_FUTURE,
    RETRIEVE_FUTURES,
    CANCEL_FUTURE,
    LIST_TRAINING_RUNS,
    GET_TRAINING_RUN,
    LIST_CHECKPOINTS,
    LIST_USER_CHECKPOINTS,
    DELETE_CHECKPOINT,
    PUBLISH_CHECKPOINT,
    UNPUBLISH_CHECKPOINT,
    SET_CHECKPOINT_TTL,
    GET_EXTERNAL_WEIGHTS_URLS,
    GET_CHECKPOINT_ARCHIVE,
    LIST_SESSIONS,
    GET_SESSION,
    ASSIGN_SESSION_PROJECT,
    EXPORT_SESSION_TRACE,
    EXTERNAL_WEIGHTS_UPLOAD_START,
    EXTERNAL_WEIGHTS_UPLOAD_FINISH,
    SEARCH_CHECKPOINTS,
    SEARCH_SESSIONS,
    GET_BILLING_USAGE,
    GET_CURRENT_CHECKPOINT_STORAGE_USAGE,
    GET_AUDIT_LOG,
    GET_SERVER_CAPABILITIES,
    HEALTHZ,
    TELEMETRY,
)

BY_NAME: dict[str, Operation] = {op.name: op for op in OPERATIONS}
