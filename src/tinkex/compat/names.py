"""The names in the modules of `tinker`, and the place of each in tinkex.

The modules are those that programs import: the top level, `types` with a module for each type,
`auth`, the clients below `lib.public_interfaces`, the retries, and three private ones that many
programs use. There are no others.
"""

from __future__ import annotations

import re

CLIENTS = ("AdminClient", "RestClient", "SamplingClient", "ServiceClient", "TrainingClient")
CLIENT_FUTURES = ("BackcompatSamplingClientFuture", "BackcompatTrainingClientFuture")
LOSSES = ("LossHandle", "PerDatumLossFn")
ERRORS = (
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "ConflictError",
    "InternalServerError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "TinkerError",
    "UnprocessableEntityError",
)
TOP_TYPES = (
    "AdamOptimizerConfig",
    "AdamParams",
    "Checkpoint",
    "CheckpointType",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "LoraConfig",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PromptProvenanceSpan",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "TrainingRun",
)
TOP = (
    *CLIENTS,
    *LOSSES,
    *ERRORS,
    *TOP_TYPES,
    "APIFuture",
    *CLIENT_FUTURES,
    "ExperimentalWarning",
    "RequestOptions",
    "Timeout",
)
"""The names of `from tinker import *`, besides the modules `auth`, `types` and the version."""

GROUPS = {
    "billing_usage_request": ("GetBillingUsageRequest",),
    "billing_usage_response": (
        "BillingEventInfo",
        "BillingUsageEvent",
        "BillingUsageResponse",
        "BillingUsageSession",
        "CheckpointBillingEvent",
        "SamplingPrefillBillingEvent",
        "SamplingSampleBillingEvent",
        "StorageBillingEvent",
        "TrainingBillingEvent",
    ),
    "checkpoint": ("Checkpoint", "CheckpointType", "ParsedCheckpointTinkerPath"),
    "current_checkpoint_storage_usage_request": ("GetCurrentCheckpointStorageUsageRequest",),
    "current_checkpoint_storage_usage_response": (
        "CurrentCheckpointStorageUsageItem",
        "CurrentCheckpointStorageUsageResponse",
    ),
    "custom_loss_graph": ("CustomLossGraph", "CustomLossNode", "CustomLossNodeOp"),
    "custom_loss_input": ("CustomLossInput", "CustomLossInputRank"),
    "future_completion": ("FutureCompletion", "FutureFailed", "FutureFinished"),
    "futures_retrieve_request": ("FuturesRetrieveRequest", "SamplingSessionFuturesTarget"),
    "get_info_response": ("GetInfoResponse", "ModelData"),
    "get_server_capabilities_response": ("GetServerCapabilitiesResponse", "SupportedModel"),
    "optimizer": (
        "AdamOptimizerConfig",
        "AdamParams",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "OptimParams",
        "OptimParamsBase",
        "OptimizerConfig",
        "OptimizerConfigBase",
    ),
    "provenance_spans": ("PromptProvenanceSpan", "ProvenanceSpans", "SampledProvenanceSpan"),
    "save_weights_external_response": (
        "SaveWeightsExternalResponse",
        "SaveWeightsExternalResponseInternal",
    ),
    "save_weights_for_sampler_response": (
        "SaveWeightsForSamplerResponse",
        "SaveWeightsForSamplerResponseInternal",
    ),
    "search_owner": ("AccessibleSearchOwner", "OwnSearchOwner", "SearchOwner", "UserSearchOwner"),
    "session_status": (
        "ClientSessionFinishErrored",
        "ClientSessionFinishInterrupted",
        "ClientSessionFinishReason",
        "ClientSessionFinishSuccess",
        "ClientSessionFinished",
        "SessionActive",
        "SessionCancelled",
        "SessionFailed",
        "SessionFailedReason",
        "SessionFailedRequestReason",
        "SessionFailedSamplingSessionReason",
        "SessionFailedTrainingRunReason",
        "SessionStatus",
    ),
    "session_status_query": (
        "ActiveSessionStatusQuery",
        "CancelledSessionStatusQuery",
        "ClientFinishedSessionStatusQuery",
        "ClientSessionFinishReasonType",
        "FailedSessionStatusQuery",
        "SessionStatusQuery",
    ),
}
"""The modules of `tinker.types` that hold several types, or one of another name."""
ALONE = (
    "AuditLogEntry",
    "AuditLogResponse",
    "AuthTokenResponse",
    "CheckpointsListResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CreateModelRequest",
    "CreateModelResponse",
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "Cursor",
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "EventType",
    "ExternalWeightsUrlsResponse",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveResponse",
    "GenericEvent",
    "GetInfoRequest",
    "GetSamplerResponse",
    "GetSessionResponse",
    "HealthResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnInputs",
    "LossFnOutput",
    "LossFnType",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimStepRequest",
    "OptimStepResponse",
    "PromptAltTokens",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingClientKind",
    "SamplingParams",
    "SaveWeightsExternalRequest",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "SessionEndEvent",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStartEvent",
    "SessionSummary",
    "Severity",
    "StopReason",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "TensorData",
    "TensorDtype",
    "TopkLogprobs",
    "TrainingRun",
    "TrainingRunsResponse",
    "TryAgainResponse",
    "UnhandledExceptionEvent",
    "UnloadModelRequest",
    "UnloadModelResponse",
    "WeightsInfoResponse",
    "WhoamiResponse",
)
"""The types that have a module of their own, with their name."""
APART = (
    "CustomLossNodeOp",
    "GenericEvent",
    "OptimParamsBase",
    "OptimizerConfigBase",
    "TopkLogprobs",
    "TryAgainResponse",
)
"""The types that are in a module of their own, and not in `tinker.types`."""


def module_name(name: str) -> str:
    """Return the name of the module of a type.

    Example:
        >>> module_name("ModelID"), module_name("LossFnType")
        ('model_id', 'loss_fn_type')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _table() -> dict[str, dict[str, str]]:
    """The place of each name of each module in tinkex, as `module:name`."""
    groups = {**GROUPS, **{module_name(name): (name,) for name in ALONE}}
    shared = "UntypedAPIFuture"
    types = {
        name: f"tinkex.types:{name}"
        for names in groups.values()
        for name in names
        if name not in APART
    }
    futures = {
        name: f"tinkex.client.futures.api_future:{name}"
        for name in ("APIFuture", "AwaitableConcurrentFuture")
    }
    client_futures = {name: f"tinkex:{name}" for name in CLIENT_FUTURES}
    backcompat = {
        "BackcompatClientFuture": "tinkex.client.futures.backcompat:BackcompatClientFuture"
    }
    retries = {name: f"tinkex.client.http.retry:{name}" for name in ("RetryConfig", "RetryHandler")}
    errors = {name: f"tinkex.errors:{name}" for name in ERRORS}
    clients = {name: f"tinkex:{name}" for name in (*CLIENTS, *LOSSES)}
    version = {"__version__": "tinkex.wire.protocol:PROTOCOL_VERSION"}
    responses = {"AsyncAPIResponse": "tinkex:APIResponse"}
    interfaces = "tinker.lib.public_interfaces"
    own = {f"{module_name(name)}": {name: clients[name]} for name in CLIENTS}
    return {
        "tinker": {name: f"tinkex:{name}" for name in (*TOP, "APIResponse")} | version | responses,
        "tinker.auth": {
            name: f"tinkex.auth:{name}"
            for name in (
                "get_tinker_token",
                "raise_if_tinker_not_accessible",
                "tinker_has_credentials",
            )
        },
        "tinker._exceptions": errors,
        "tinker._types": {"NOT_GIVEN": "tinkex:NOT_GIVEN"},
        "tinker._version": version,
        "tinker.lib": {},
        "tinker.lib.retry_handler": retries,
        interfaces: clients | futures | client_futures,
        **{f"{interfaces}.{name}": held for name, held in own.items()},
        f"{interfaces}.api_future": futures,
        f"{interfaces}.backcompat_client_future": backcompat,
        f"{interfaces}.backcompat_sampling_client_future": {
            CLIENT_FUTURES[0]: client_futures[CLIENT_FUTURES[0]]
        },
        f"{interfaces}.backcompat_training_client_future": {
            CLIENT_FUTURES[1]: client_futures[CLIENT_FUTURES[1]]
        },
        f"{interfaces}.custom_loss": {name: clients[name] for name in LOSSES},
        f"{interfaces}.sampling_client": own["sampling_client"]
        | {"RetryConfig": retries["RetryConfig"]},
        f"{interfaces}.service_client": own["service_client"]
        | {"RetryConfig": retries["RetryConfig"]},
        f"{interfaces}.training_client": own["training_client"]
        | {"RetryConfig": retries["RetryConfig"]},
        "tinker.types": types | {shared: f"tinkex.types:{shared}"},
        "tinker.types.shared": {shared: f"tinkex.types:{shared}"},
        "tinker.types.shared.untyped_api_future": {shared: f"tinkex.types:{shared}"},
        **{
            f"tinker.types.{module}": {name: f"tinkex.types:{name}" for name in names}
            for module, names in groups.items()
        },
    }


MODULES = _table()
PACKAGES = frozenset(name.rpartition(".")[0] for name in MODULES) - {""}
"""The packages: modules with modules below them."""
