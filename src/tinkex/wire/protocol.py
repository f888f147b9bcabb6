"""The table of endpoints: the client calls it, the server routes it, the docs list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinkex.types.account import (
    ApiKeyResponse,
    AuditLogResponse,
    AuthTokenResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.types.checkpoint_search import CheckpointSearchRequest, CheckpointSearchResponse
from tinkex.types.checkpoints import (
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
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
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.custom_losses import CreateCustomLossRequest, CreateCustomLossResponse
from tinkex.types.external_weights import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
)
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
)
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    CancelFutureRequest,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    HealthResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    ListSessionsResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionTraceExportResponse,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.training import (
    CreateModelRequest,
    CreateModelResponse,
    DropGradientsRequest,
    DropGradientsResponse,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    UntypedAPIFuture,
)

PREFIX = "/api/v1"
PROTOCOL_VERSION = "0.38.0"
"""The official SDK version whose protocol this package speaks."""

Traffic: TypeAlias = Literal["session", "train", "sample", "poll", "rest", "telemetry"]


@dataclass(frozen=True, slots=True)
class Operation:
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

    @property
    def title(self) -> str:
        """The operation's name in messages: the client's method, or the wire's name."""
        return TITLES.get(self.name, self.name)


TITLES = {"asample": "sampling", "stream_sample": "sampling"}


def _future(
    name: str, request: type[Any], result: type[Any], request_type: str, traffic: Traffic = "train"
) -> Operation:
    return Operation(name, "POST", name, request, UntypedAPIFuture, result, traffic, request_type)


def _post(
    name: str, request: type[Any], response: type[Any], traffic: Traffic = "rest", path: str = ""
) -> Operation:
    return Operation(name, "POST", path or name, request, response, traffic=traffic)


def _get(name: str, path: str, response: type[Any]) -> Operation:
    return Operation(name, "GET", path, None, response)


CLIENT_CONFIG = _post(
    "client_config", ClientConfigRequest, ClientConfigResponse, "session", "client/config"
)
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    "session",
    "client/dynamic_config",
)
AUTH_TOKEN = _post("auth_token", Empty, AuthTokenResponse, "session", "auth/token")
GET_API_KEY = _get("get_api_key", "auth/apikey/me", ApiKeyResponse)
DELETE_API_KEY = Operation("delete_api_key", "DELETE", "auth/apikey/me", None, Empty)
CREATE_SESSION = _post("create_session", CreateSessionRequest, CreateSessionResponse, "session")
SESSION_HEARTBEAT = _post(
    "session_heartbeat", SessionHeartbeatRequest, SessionHeartbeatResponse, "session"
)
FINISH_SESSION = _post(
    "finish_session", FinishSessionRequest, Empty, "session", "sessions/{session_id}/finish"
)
CREATE_MODEL = _future("create_model", CreateModelRequest, CreateModelResponse, "CreateModel")
UNLOAD_MODEL = _future("unload_model", UnloadModelRequest, UnloadModelResponse, "UnloadModel")
DROP_GRADIENTS = _future(
    "drop_gradients", DropGradientsRequest, DropGradientsResponse, "DropGradients"
)
"""Ours alone: the hosted service has no such operation."""
CREATE_CUSTOM_LOSS = _future(
    "create_custom_loss", CreateCustomLossRequest, CreateCustomLossResponse, "CreateCustomLoss"
)
GET_INFO = _post("get_info", GetInfoRequest, GetInfoResponse)
FORWARD_BACKWARD = _future(
    "forward_backward", ForwardBackwardRequest, ForwardBackwardOutput, "ForwardBackward"
)
FORWARD = _future("forward", ForwardRequest, ForwardBackwardOutput, "Forward")
OPTIM_STEP = _future("optim_step", OptimStepRequest, OptimStepResponse, "OptimStep")
SAVE_WEIGHTS = _future("save_weights", SaveWeightsRequest, SaveWeightsResponse, "SaveWeights")
SAVE_WEIGHTS_FOR_SAMPLER = _future(
    "save_weights_for_sampler",
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
)
SAVE_WEIGHTS_EXTERNAL = _future(
    "save_weights_external",
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    "SaveWeightsExternal",
)
LOAD_WEIGHTS = _future("load_weights", LoadWeightsRequest, LoadWeightsResponse, "LoadWeights")
WEIGHTS_INFO = _post("weights_info", WeightsInfoRequest, WeightsInfoResponse)
COPY_WEIGHTS = _post("copy_weights", CopyWeightsRequest, CopyWeightsResponse)
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session",
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    "session",
)
JOIN_SAMPLING_SESSION = _post(
    "join_sampling_session", JoinSamplingSessionRequest, JoinSamplingSessionResponse, "session"
)
GET_SAMPLER = _get("get_sampler", "samplers/{sampler_id}", GetSamplerResponse)
ASAMPLE = _future("asample", SampleRequest, SampleResponse, "Sample", "sample")
STREAM_SAMPLE = _post("stream_sample", SampleRequest, SampleStreamChunk, "sample")
RETRIEVE_FUTURE = _post("retrieve_future", FutureRetrieveRequest, Empty, "poll")
RETRIEVE_FUTURES = _post(
    "retrieve_futures", FuturesRetrieveRequest, FuturesRetrieveResponse, "poll"
)
CANCEL_FUTURE = _post("cancel_future", CancelFutureRequest, Empty, "sample")

RUN = "training_runs/{training_run_id}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
"""A checkpoint's id is two parts of a path, so that ids never need a slash of their own."""

LIST_TRAINING_RUNS = _get("list_training_runs", "training_runs", TrainingRunsResponse)
GET_TRAINING_RUN = _get("get_training_run", RUN, TrainingRun)
LIST_CHECKPOINTS = _get("list_checkpoints", f"{RUN}/checkpoints", CheckpointsListResponse)
LIST_USER_CHECKPOINTS = _get("list_user_checkpoints", "checkpoints", CheckpointsListResponse)
DELETE_CHECKPOINT = Operation("delete_checkpoint", "DELETE", CHECKPOINT, None, Empty)
PUBLISH_CHECKPOINT = Operation("publish_checkpoint", "POST", f"{CHECKPOINT}/publish", None, Empty)
UNPUBLISH_CHECKPOINT = Operation(
    "unpublish_checkpoint", "DELETE", f"{CHECKPOINT}/publish", None, Empty
)
SET_CHECKPOINT_TTL = Operation(
    "set_checkpoint_ttl", "PUT", f"{CHECKPOINT}/ttl", SetCheckpointTtlRequest, Empty
)
GET_EXTERNAL_WEIGHTS_URLS = _get(
    "get_external_weights_urls", f"{CHECKPOINT}/external_weights_urls", ExternalWeightsUrlsResponse
)
GET_CHECKPOINT_ARCHIVE = _get(
    "get_checkpoint_archive", f"{CHECKPOINT}/archive", CheckpointArchiveUrlResponse
)
LIST_SESSIONS = _get("list_sessions", "sessions", ListSessionsResponse)
GET_SESSION = _get("get_session", "sessions/{session_id}", GetSessionResponse)
ASSIGN_SESSION_PROJECT = Operation(
    "assign_session_project",
    "PUT",
    "sessions/{session_id}/project",
    AssignSessionProjectRequest,
    Empty,
)
EXPORT_SESSION_TRACE = _get(
    "export_session_trace", "sessions/{session_id}/trace_export", SessionTraceExportResponse
)
EXTERNAL_WEIGHTS_UPLOAD_START = _post(
    "external_weights_upload_start",
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
)
EXTERNAL_WEIGHTS_UPLOAD_FINISH = _post(
    "external_weights_upload_finish",
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
)
SEARCH_CHECKPOINTS = _post(
    "search_checkpoints",
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    path="checkpoints/search",
)
SEARCH_SESSIONS = _post(
    "search_sessions", SessionSearchRequest, SessionSearchResponse, path="sessions/search"
)
GET_BILLING_USAGE = _get("get_billing_usage", "billing/usage/events", BillingUsageResponse)
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = _get(
    "get_current_checkpoint_storage_usage",
    "billing/usage/checkpoints/current",
    CurrentCheckpointStorageUsageResponse,
)
GET_AUDIT_LOG = _get("get_audit_log", "audit", AuditLogResponse)
GET_SERVER_CAPABILITIES = _get(
    "get_server_capabilities", "get_server_capabilities", GetServerCapabilitiesResponse
)
HEALTHZ = _get("healthz", "healthz", HealthResponse)
TELEMETRY = _post("telemetry", TelemetrySendRequest, TelemetryResponse, "telemetry")

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
