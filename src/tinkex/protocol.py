"""The table of endpoints: the client calls it, the server routes it, the docs list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
)
from tinkex.types.sessions import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    FutureRetrieveRequest,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.training import (
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
    UntypedAPIFuture,
)

PREFIX = "/api/v1"
PROTOCOL_VERSION = "0.36.0"
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


def _future(
    name: str, request: type[Any], result: type[Any], request_type: str, traffic: Traffic = "train"
) -> Operation:
    return Operation(name, "POST", name, request, UntypedAPIFuture, result, traffic, request_type)


def _post(name: str, request: type[Any], response: type[Any], traffic: Traffic = "rest", path: str = "") -> Operation:
    return Operation(name, "POST", path or name, request, response, traffic=traffic)


CLIENT_CONFIG = _post("client_config", ClientConfigRequest, ClientConfigResponse, "session", "client/config")
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    "session",
    "client/dynamic_config",
)
CREATE_SESSION = _post("create_session", CreateSessionRequest, CreateSessionResponse, "session")
SESSION_HEARTBEAT = _post("session_heartbeat", SessionHeartbeatRequest, SessionHeartbeatResponse, "session")
FINISH_SESSION = _post("finish_session", FinishSessionRequest, Empty, "session", "sessions/{session_id}/finish")
CREATE_MODEL = _future("create_model", CreateModelRequest, CreateModelResponse, "CreateModel")
GET_INFO = _post("get_info", GetInfoRequest, GetInfoResponse)
FORWARD_BACKWARD = _future("forward_backward", ForwardBackwardRequest, ForwardBackwardOutput, "ForwardBackward")
FORWARD = _future("forward", ForwardRequest, ForwardBackwardOutput, "Forward")
OPTIM_STEP = _future("optim_step", OptimStepRequest, OptimStepResponse, "OptimStep")
SAVE_WEIGHTS = _future("save_weights", SaveWeightsRequest, SaveWeightsResponse, "SaveWeights")
SAVE_WEIGHTS_FOR_SAMPLER = _future(
    "save_weights_for_sampler",
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
)
LOAD_WEIGHTS = _future("load_weights", LoadWeightsRequest, LoadWeightsResponse, "LoadWeights")
WEIGHTS_INFO = _post("weights_info", WeightsInfoRequest, WeightsInfoResponse)
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session", CreateSamplingSessionRequest, CreateSamplingSessionResponse, "session"
)
GET_SAMPLER = Operation("get_sampler", "GET", "samplers/{sampler_id}", None, GetSamplerResponse)
ASAMPLE = _future("asample", SampleRequest, SampleResponse, "Sample", "sample")
RETRIEVE_FUTURE = _post("retrieve_future", FutureRetrieveRequest, Empty, "poll")
GET_SERVER_CAPABILITIES = Operation(
    "get_server_capabilities", "GET", "get_server_capabilities", None, GetServerCapabilitiesResponse
)
HEALTHZ = Operation("healthz", "GET", "healthz", None, HealthResponse)
TELEMETRY = _post("telemetry", TelemetrySendRequest, TelemetryResponse, "telemetry")

OPERATIONS: tuple[Operation, ...] = (
    CLIENT_CONFIG,
    CLIENT_DYNAMIC_CONFIG,
    CREATE_SESSION,
    SESSION_HEARTBEAT,
    FINISH_SESSION,
    CREATE_MODEL,
    GET_INFO,
    FORWARD_BACKWARD,
    FORWARD,
    OPTIM_STEP,
    SAVE_WEIGHTS,
    SAVE_WEIGHTS_FOR_SAMPLER,
    LOAD_WEIGHTS,
    WEIGHTS_INFO,
    CREATE_SAMPLING_SESSION,
    GET_SAMPLER,
    ASAMPLE,
    RETRIEVE_FUTURE,
    GET_SERVER_CAPABILITIES,
    HEALTHZ,
    TELEMETRY,
)
