"""The names in the modules of `tinker`, and the place of each in tinkex.

The modules are those that programs import: the top level, `types` with a module for each type,
`auth`, the clients below `lib.public_interfaces`, the retries, and three private ones that many
programs use. There are no others.
"""

from __future__ import annotations

import re
from pathlib import Path

from tinkex._lazy import NAME, homes_of

PACKAGE = Path(__file__).parents[1]
CLIENTS = ("AdminClient", "RestClient", "SamplingClient", "ServiceClient", "TrainingClient")
CLIENT_FUTURES = ("BackcompatSamplingClientFuture", "BackcompatTrainingClientFuture")
LOSSES = ("LossHandle", "PerDatumLossFn")
OURS = {
    "ApiKeyResponse",
    "AssignSessionProjectRequest",
    "AuditEventType",
    "BaseLoss",
    "CancelFutureRequest",
    "CheckpointArchiveUrlResponse",
    "CheckpointSearchCursor",
    "CheckpointSearchRequest",
    "CheckpointSearchResponse",
    "ConfigurationError",
    "CustomLossOutput",
    "DropGradientsRequest",
    "DropGradientsResponse",
    "Empty",
    "ExternalWeightsUploadFinishRequest",
    "ExternalWeightsUploadFinishResponse",
    "ExternalWeightsUploadFinishResult",
    "ExternalWeightsUploadStartRequest",
    "ExternalWeightsUploadStartResponse",
    "ExternalWeightsUploadStartResult",
    "FinishReason",
    "FinishSessionRequest",
    "GoneError",
    "LossFnConfig",
    "QueueState",
    "RegularizerOutput",
    "RegularizerSpec",
    "SampleStreamChunk",
    "SessionTraceExportResponse",
    "SetCheckpointTtlRequest",
    "UntypedAPIFuture",
    "WeightsInfoRequest",
    "check_precision_loss",
    "dtype_of",
    "literal_values",
    "parse_literal",
}
"""The errors and types of tinkex that have no module of their own in `tinker`."""
TOP_HOMES = {
    name: home for name, home in homes_of(str(PACKAGE / "__init__.py")).items() if name not in OURS
}
ERRORS = tuple(
    name
    for name, home in TOP_HOMES.items()
    if home == "tinkex.errors" and name != "ExperimentalWarning"
)
TOP = (
    *CLIENTS,
    *LOSSES,
    *ERRORS,
    *(
        name
        for name, home in TOP_HOMES.items()
        if home.startswith("tinkex.types.") and name not in ("ImageAssetPointerChunk", "ImageChunk")
    ),
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
TYPES = NAME.findall((PACKAGE / "types" / "__init__.py").read_text())
"""The names of `tinkex.types`, read from its source: importing it would take long."""
ALONE = {*TYPES} - OURS - {name for names in GROUPS.values() for name in names}
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


def _in(module: str, *names: str) -> dict[str, str]:
    """Return the places of names of one module, as `module:name`."""
    return {name: f"{module}:{name}" for name in names}


def _table() -> dict[str, dict[str, str]]:
    """Return the place in tinkex of each name, by the module of `tinker` that has it."""
    groups = {**GROUPS, **{module_name(name): (name,) for name in ALONE}}
    types = {name for names in groups.values() for name in names if name not in APART}
    futures = _in("tinkex.client.futures.api_future", "APIFuture", "AwaitableConcurrentFuture")
    retries = _in("tinkex.client.http.retry", "RetryConfig", "RetryHandler")
    version = {"__version__": "tinkex.wire.protocol:PROTOCOL_VERSION"}
    shared = _in("tinkex.types", "UntypedAPIFuture")
    public = {module_name(name): _in("tinkex", name) for name in (*CLIENTS, *CLIENT_FUTURES)}
    for client in ("sampling_client", "service_client", "training_client"):
        public[client] |= _in("tinkex.client.http.retry", "RetryConfig")
    public["api_future"] = futures
    public["backcompat_client_future"] = _in(
        "tinkex.client.futures.backcompat", "BackcompatClientFuture"
    )
    public["custom_loss"] = _in("tinkex", *LOSSES)
    interfaces = "tinker.lib.public_interfaces"
    return {
        "tinker": {
            **_in("tinkex", *TOP, "APIResponse"),
            **version,
            "AsyncAPIResponse": "tinkex:APIResponse",
        },
        "tinker.auth": _in(
            "tinkex.auth",
            "get_tinker_token",
            "raise_if_tinker_not_accessible",
            "tinker_has_credentials",
        ),
        "tinker._exceptions": _in("tinkex.errors", *ERRORS),
        "tinker._types": _in("tinkex", "NOT_GIVEN"),
        "tinker._version": version,
        "tinker.lib": {},
        "tinker.lib.retry_handler": retries,
        interfaces: futures | _in("tinkex", *CLIENTS, *LOSSES, *CLIENT_FUTURES),
        **{f"{interfaces}.{module}": held for module, held in public.items()},
        "tinker.types": _in("tinkex.types", *types) | shared,
        "tinker.types.shared": shared,
        "tinker.types.shared.untyped_api_future": shared,
        **{
            f"tinker.types.{module}": _in("tinkex.types", *names)
            for module, names in groups.items()
        },
    }


MODULES = _table()
PACKAGES = frozenset(name.rpartition(".")[0] for name in MODULES) - {""}
"""The packages: modules with modules below them."""
