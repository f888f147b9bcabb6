"""The table of endpoints: the client calls it, the server routes it, the docs list it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

import tinkex.types as types

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
    traffic: Traffic = "train",
    *,
    owned_by: Ownership,
) -> Operation:
    return Operation(
        name,
        "POST",
        name,
        request,
        types.UntypedAPIFuture,
        result,
        traffic,
        request.__name__.removesuffix("Request"),
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
    types.ClientConfigRequest,
    types.ClientConfigResponse,
    "session",
    "client/config",
    owned_by=OPEN,
)
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    types.ClientConfigRequest,
    types.ClientDynamicConfigResponse,
    "session",
    "client/dynamic_config",
    owned_by=OPEN,
)
AUTH_TOKEN = _post(
    "auth_token", types.Empty, types.AuthTokenResponse, "session", "auth/token", owned_by=OPEN
)
GET_API_KEY = _get("get_api_key", "auth/apikey/me", types.ApiKeyResponse, owned_by=OPEN)
DELETE_API_KEY = Operation(
    "delete_api_key", "DELETE", "auth/apikey/me", None, types.Empty, owned_by=OPEN
)
CREATE_SESSION = _post(
    "create_session",
    types.CreateSessionRequest,
    types.CreateSessionResponse,
    "session",
    owned_by=OPEN,
)
SESSION_HEARTBEAT = _post(
    "session_heartbeat",
    types.SessionHeartbeatRequest,
    types.SessionHeartbeatResponse,
    "session",
    owned_by="session_id",
)
FINISH_SESSION = _post(
    "finish_session",
    types.FinishSessionRequest,
    types.Empty,
    "session",
    "sessions/{session_id}/finish",
    owned_by="session_id",
)
CREATE_MODEL = _future(
    "create_model", types.CreateModelRequest, types.CreateModelResponse, owned_by="session_id"
)
UNLOAD_MODEL = _future(
    "unload_model", types.UnloadModelRequest, types.UnloadModelResponse, owned_by="model_id"
)
DROP_GRADIENTS = _future(
    "drop_gradients", types.DropGradientsRequest, types.DropGradientsResponse, owned_by="model_id"
)
"""Ours alone: the hosted service has no such operation."""
CREATE_CUSTOM_LOSS = _future(
    "create_custom_loss",
    types.CreateCustomLossRequest,
    types.CreateCustomLossResponse,
    owned_by="session_id",
)
GET_INFO = _post("get_info", types.GetInfoRequest, types.GetInfoResponse, owned_by="model_id")
FORWARD_BACKWARD = _future(
    "forward_backward",
    types.ForwardBackwardRequest,
    types.ForwardBackwardOutput,
    owned_by="model_id",
)
FORWARD = _future("forward", types.ForwardRequest, types.ForwardBackwardOutput, owned_by="model_id")
OPTIM_STEP = _future(
    "optim_step", types.OptimStepRequest, types.OptimStepResponse, owned_by="model_id"
)
SAVE_WEIGHTS = _future(
    "save_weights", types.SaveWeightsRequest, types.SaveWeightsResponse, owned_by="model_id"
)
SAVE_WEIGHTS_FOR_SAMPLER = _future(
    "save_weights_for_sampler",
    types.SaveWeightsForSamplerRequest,
    types.SaveWeightsForSamplerResponseInternal,
    owned_by="model_id",
)
SAVE_WEIGHTS_EXTERNAL = _future(
    "save_weights_external",
    types.SaveWeightsExternalRequest,
    types.SaveWeightsExternalResponseInternal,
    owned_by="model_id",
)
LOAD_WEIGHTS = _future(
    "load_weights",
    types.LoadWeightsRequest,
    types.LoadWeightsResponse,
    owned_by=("session_id", "model_id"),
)
WEIGHTS_INFO = _post(
    "weights_info", types.WeightsInfoRequest, types.WeightsInfoResponse, owned_by=BY_HANDLER
)
COPY_WEIGHTS = _post(
    "copy_weights", types.CopyWeightsRequest, types.CopyWeightsResponse, owned_by="session_id"
)
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session",
    types.CreateSamplingSessionRequest,
    types.CreateSamplingSessionResponse,
    "session",
    owned_by="session_id",
)
JOIN_SAMPLING_SESSION = _post(
    "join_sampling_session",
    types.JoinSamplingSessionRequest,
    types.JoinSamplingSessionResponse,
    "session",
    owned_by="sampling_session_id",
)
GET_SAMPLER = _get(
    "get_sampler", "samplers/{sampler_id}", types.GetSamplerResponse, owned_by="sampler_id"
)
ASAMPLE = _future(
    "asample", types.SampleRequest, types.SampleResponse, "sample", owned_by="sampling_session_id"
)
STREAM_SAMPLE = _post(
    "stream_sample",
    types.SampleRequest,
    types.SampleStreamChunk,
    "sample",
    owned_by="sampling_session_id",
)
RETRIEVE_FUTURE = _post(
    "retrieve_future", types.FutureRetrieveRequest, types.Empty, "poll", owned_by="request_id"
)
RETRIEVE_FUTURES = _post(
    "retrieve_futures",
    types.FuturesRetrieveRequest,
    types.FuturesRetrieveResponse,
    "poll",
    owned_by="target.sampling_session_id",
)
CANCEL_FUTURE = _post(
    "cancel_future", types.CancelFutureRequest, types.Empty, "sample", owned_by=BY_HANDLER
)

RUN = "training_runs/{training_run_id}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
"""A checkpoint's id is two parts of a path, so that ids never need a slash of their own."""

LIST_TRAINING_RUNS = _get(
    "list_training_runs", "training_runs", types.TrainingRunsResponse, owned_by=OPEN
)
GET_TRAINING_RUN = _get("get_training_run", RUN, types.TrainingRun, owned_by=BY_HANDLER)
LIST_CHECKPOINTS = _get(
    "list_checkpoints", f"{RUN}/checkpoints", types.CheckpointsListResponse, owned_by=BY_HANDLER
)
LIST_USER_CHECKPOINTS = _get(
    "list_user_checkpoints", "checkpoints", types.CheckpointsListResponse, owned_by=OPEN
)
DELETE_CHECKPOINT = Operation(
    "delete_checkpoint", "DELETE", CHECKPOINT, None, types.Empty, owned_by=BY_HANDLER
)
PUBLISH_CHECKPOINT = Operation(
    "publish_checkpoint", "POST", f"{CHECKPOINT}/publish", None, types.Empty, owned_by=BY_HANDLER
)
UNPUBLISH_CHECKPOINT = Operation(
    "unpublish_checkpoint",
    "DELETE",
    f"{CHECKPOINT}/publish",
    None,
    types.Empty,
    owned_by=BY_HANDLER,
)
SET_CHECKPOINT_TTL = Operation(
    "set_checkpoint_ttl",
    "PUT",
    f"{CHECKPOINT}/ttl",
    types.SetCheckpointTtlRequest,
    types.Empty,
    owned_by=BY_HANDLER,
)
GET_EXTERNAL_WEIGHTS_URLS = _get(
    "get_external_weights_urls",
    f"{CHECKPOINT}/external_weights_urls",
    types.ExternalWeightsUrlsResponse,
    owned_by=BY_HANDLER,
)
GET_CHECKPOINT_ARCHIVE = _get(
    "get_checkpoint_archive",
    f"{CHECKPOINT}/archive",
    types.CheckpointArchiveUrlResponse,
    owned_by=BY_HANDLER,
)
LIST_SESSIONS = _get("list_sessions", "sessions", types.ListSessionsResponse, owned_by=OPEN)
GET_SESSION = _get(
    "get_session", "sessions/{session_id}", types.GetSessionResponse, owned_by="session_id"
)
ASSIGN_SESSION_PROJECT = Operation(
    "assign_session_project",
    "PUT",
    "sessions/{session_id}/project",
    types.AssignSessionProjectRequest,
    types.Empty,
    owned_by="session_id",
)
EXPORT_SESSION_TRACE = _get(
    "export_session_trace",
    "sessions/{session_id}/trace_export",
    types.SessionTraceExportResponse,
    owned_by="session_id",
)
EXTERNAL_WEIGHTS_UPLOAD_START = _post(
    "external_weights_upload_start",
    types.ExternalWeightsUploadStartRequest,
    types.ExternalWeightsUploadStartResponse,
    owned_by=OPEN,
)
EXTERNAL_WEIGHTS_UPLOAD_FINISH = _post(
    "external_weights_upload_finish",
    types.ExternalWeightsUploadFinishRequest,
    types.ExternalWeightsUploadFinishResponse,
    owned_by=BY_HANDLER,
)
SEARCH_CHECKPOINTS = _post(
    "search_checkpoints",
    types.CheckpointSearchRequest,
    types.CheckpointSearchResponse,
    path="checkpoints/search",
    owned_by=OPEN,
)
SEARCH_SESSIONS = _post(
    "search_sessions",
    types.SessionSearchRequest,
    types.SessionSearchResponse,
    path="sessions/search",
    owned_by="session_id",
)
GET_BILLING_USAGE = _get(
    "get_billing_usage", "billing/usage/events", types.BillingUsageResponse, owned_by=OPEN
)
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = _get(
    "get_current_checkpoint_storage_usage",
    "billing/usage/checkpoints/current",
    types.CurrentCheckpointStorageUsageResponse,
    owned_by=OPEN,
)
GET_AUDIT_LOG = _get("get_audit_log", "audit", types.AuditLogResponse, owned_by=OPEN)
GET_SERVER_CAPABILITIES = _get(
    "get_server_capabilities",
    "get_server_capabilities",
    types.GetServerCapabilitiesResponse,
    owned_by=OPEN,
)
HEALTHZ = _get("healthz", "healthz", types.HealthResponse, owned_by=OPEN)
TELEMETRY = _post(
    "telemetry",
    types.TelemetrySendRequest,
    types.TelemetryResponse,
    "telemetry",
    owned_by="session_id",
)

OPERATIONS: tuple[Operation, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Operation)
)

BY_NAME: dict[str, Operation] = {op.name: op for op in OPERATIONS}
