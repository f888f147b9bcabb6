"""Messages of the protocol, by the names that the protocol uses."""

from types import ModuleType as _ModuleType

from tinkex.types.account import (
    ApiKeyResponse as ApiKeyResponse,
    AuditEventType as AuditEventType,
    AuditLogEntry as AuditLogEntry,
    AuditLogResponse as AuditLogResponse,
    AuthTokenResponse as AuthTokenResponse,
    BillingEventInfo as BillingEventInfo,
    BillingUsageEvent as BillingUsageEvent,
    BillingUsageResponse as BillingUsageResponse,
    BillingUsageSession as BillingUsageSession,
    CheckpointBillingEvent as CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem as CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse as CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest as GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest as GetCurrentCheckpointStorageUsageRequest,
    SamplingPrefillBillingEvent as SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent as SamplingSampleBillingEvent,
    StorageBillingEvent as StorageBillingEvent,
    TrainingBillingEvent as TrainingBillingEvent,
    WhoamiResponse as WhoamiResponse,
)
from tinkex.types.checkpoint_search import (
    CheckpointSearchCursor as CheckpointSearchCursor,
    CheckpointSearchRequest as CheckpointSearchRequest,
    CheckpointSearchResponse as CheckpointSearchResponse,
)
from tinkex.types.checkpoints import (
    Checkpoint as Checkpoint,
    CheckpointsListResponse as CheckpointsListResponse,
    CheckpointType as CheckpointType,
    Cursor as Cursor,
    ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    TrainingRun as TrainingRun,
    TrainingRunsResponse as TrainingRunsResponse,
)
from tinkex.types.chunks import (
    DmelChunk as DmelChunk,
    EncodedTextChunk as EncodedTextChunk,
    ImageAssetPointerChunk as ImageAssetPointerChunk,
    ImageChunk as ImageChunk,
    ModelInputChunk as ModelInputChunk,
)
from tinkex.types.custom_losses import (
    BaseLoss as BaseLoss,
    CreateCustomLossRequest as CreateCustomLossRequest,
    CreateCustomLossResponse as CreateCustomLossResponse,
    CustomLossGraph as CustomLossGraph,
    CustomLossInput as CustomLossInput,
    CustomLossInputRank as CustomLossInputRank,
    CustomLossNode as CustomLossNode,
    CustomLossNodeOp as CustomLossNodeOp,
    CustomLossOutput as CustomLossOutput,
    RegularizerOutput as RegularizerOutput,
    RegularizerSpec as RegularizerSpec,
)
from tinkex.types.external_weights import (
    ExternalWeightsUploadFinishRequest as ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse as ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadFinishResult as ExternalWeightsUploadFinishResult,
    ExternalWeightsUploadStartRequest as ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse as ExternalWeightsUploadStartResponse,
    ExternalWeightsUploadStartResult as ExternalWeightsUploadStartResult,
)
from tinkex.types.future_requests import (
    CancelFutureRequest as CancelFutureRequest,
    FutureCompletion as FutureCompletion,
    FutureFailed as FutureFailed,
    FutureFinished as FutureFinished,
    FutureRetrieveRequest as FutureRetrieveRequest,
    FuturesRetrieveRequest as FuturesRetrieveRequest,
    FuturesRetrieveResponse as FuturesRetrieveResponse,
    JoinSamplingSessionRequest as JoinSamplingSessionRequest,
    JoinSamplingSessionResponse as JoinSamplingSessionResponse,
    RequestErrorCategory as RequestErrorCategory,
    RequestFailedResponse as RequestFailedResponse,
    SamplingSessionFuturesTarget as SamplingSessionFuturesTarget,
    TryAgainResponse as TryAgainResponse,
)
from tinkex.types.futures import (
    FutureRetrieveResponse as FutureRetrieveResponse,
    QueueState as QueueState,
)
from tinkex.types.inputs import (
    Datum as Datum,
    LossFnInputs as LossFnInputs,
    LossFnOutput as LossFnOutput,
    ModelInput as ModelInput,
)
from tinkex.types.model_requests import (
    CreateModelRequest as CreateModelRequest,
    CreateModelResponse as CreateModelResponse,
    DropGradientsRequest as DropGradientsRequest,
    DropGradientsResponse as DropGradientsResponse,
    GetInfoRequest as GetInfoRequest,
    GetInfoResponse as GetInfoResponse,
    ModelData as ModelData,
    UnloadModelRequest as UnloadModelRequest,
    UnloadModelResponse as UnloadModelResponse,
)
from tinkex.types.optimizers import (
    AdamOptimizerConfig as AdamOptimizerConfig,
    AdamParams as AdamParams,
    DimuonOptimizerConfig as DimuonOptimizerConfig,
    DimuonParams as DimuonParams,
    OptimizerConfig as OptimizerConfig,
    OptimizerConfigBase as OptimizerConfigBase,
    OptimParams as OptimParams,
    OptimParamsBase as OptimParamsBase,
)
from tinkex.types.record import (
    literal_values as literal_values,
    parse_literal as parse_literal,
)
from tinkex.types.sampled import (
    PromptAltTokens as PromptAltTokens,
    SampledSequence as SampledSequence,
    SampleResponse as SampleResponse,
    StopReason as StopReason,
    TopkLogprobs as TopkLogprobs,
)
from tinkex.types.sampling import (
    CreateSamplingSessionRequest as CreateSamplingSessionRequest,
    CreateSamplingSessionResponse as CreateSamplingSessionResponse,
    GetSamplerResponse as GetSamplerResponse,
    SampleRequest as SampleRequest,
    SampleStreamChunk as SampleStreamChunk,
    SamplingParams as SamplingParams,
)
from tinkex.types.saves import (
    CheckpointArchiveUrlResponse as CheckpointArchiveUrlResponse,
    CopyWeightsRequest as CopyWeightsRequest,
    CopyWeightsResponse as CopyWeightsResponse,
    ExternalWeightsUrlsResponse as ExternalWeightsUrlsResponse,
    LoadWeightsRequest as LoadWeightsRequest,
    LoadWeightsResponse as LoadWeightsResponse,
    SamplingClientKind as SamplingClientKind,
    SaveWeightsExternalRequest as SaveWeightsExternalRequest,
    SaveWeightsExternalResponse as SaveWeightsExternalResponse,
    SaveWeightsExternalResponseInternal as SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal as SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest as SaveWeightsRequest,
    SaveWeightsResponse as SaveWeightsResponse,
    SetCheckpointTtlRequest as SetCheckpointTtlRequest,
    WeightsInfoRequest as WeightsInfoRequest,
    WeightsInfoResponse as WeightsInfoResponse,
)
from tinkex.types.session_search import (
    AccessibleSearchOwner as AccessibleSearchOwner,
    ActiveSessionStatusQuery as ActiveSessionStatusQuery,
    CancelledSessionStatusQuery as CancelledSessionStatusQuery,
    ClientFinishedSessionStatusQuery as ClientFinishedSessionStatusQuery,
    ClientSessionFinished as ClientSessionFinished,
    ClientSessionFinishErrored as ClientSessionFinishErrored,
    ClientSessionFinishInterrupted as ClientSessionFinishInterrupted,
    ClientSessionFinishReason as ClientSessionFinishReason,
    ClientSessionFinishSuccess as ClientSessionFinishSuccess,
    FailedSessionStatusQuery as FailedSessionStatusQuery,
    OwnSearchOwner as OwnSearchOwner,
    SearchOwner as SearchOwner,
    SessionActive as SessionActive,
    SessionCancelled as SessionCancelled,
    SessionFailed as SessionFailed,
    SessionFailedReason as SessionFailedReason,
    SessionFailedRequestReason as SessionFailedRequestReason,
    SessionFailedSamplingSessionReason as SessionFailedSamplingSessionReason,
    SessionFailedTrainingRunReason as SessionFailedTrainingRunReason,
    SessionSearchCursor as SessionSearchCursor,
    SessionSearchRequest as SessionSearchRequest,
    SessionSearchResponse as SessionSearchResponse,
    SessionStatus as SessionStatus,
    SessionStatusQuery as SessionStatusQuery,
    SessionSummary as SessionSummary,
    UserSearchOwner as UserSearchOwner,
)
from tinkex.types.sessions import (
    AssignSessionProjectRequest as AssignSessionProjectRequest,
    ClientConfigRequest as ClientConfigRequest,
    ClientConfigResponse as ClientConfigResponse,
    ClientDynamicConfigResponse as ClientDynamicConfigResponse,
    ClientSessionFinishReasonType as ClientSessionFinishReasonType,
    CreateSessionRequest as CreateSessionRequest,
    CreateSessionResponse as CreateSessionResponse,
    Empty as Empty,
    FinishReason as FinishReason,
    FinishSessionRequest as FinishSessionRequest,
    GetServerCapabilitiesResponse as GetServerCapabilitiesResponse,
    GetSessionResponse as GetSessionResponse,
    HealthResponse as HealthResponse,
    ListSessionsResponse as ListSessionsResponse,
    SessionHeartbeatRequest as SessionHeartbeatRequest,
    SessionHeartbeatResponse as SessionHeartbeatResponse,
    SessionTraceExportResponse as SessionTraceExportResponse,
    SupportedModel as SupportedModel,
    TelemetryResponse as TelemetryResponse,
    TelemetrySendRequest as TelemetrySendRequest,
)
from tinkex.types.spans import (
    PromptProvenanceSpan as PromptProvenanceSpan,
    ProvenanceSpans as ProvenanceSpans,
    SampledProvenanceSpan as SampledProvenanceSpan,
)
from tinkex.types.telemetry import (
    EventType as EventType,
    GenericEvent as GenericEvent,
    SessionEndEvent as SessionEndEvent,
    SessionStartEvent as SessionStartEvent,
    Severity as Severity,
    TelemetryBatch as TelemetryBatch,
    TelemetryEvent as TelemetryEvent,
    UnhandledExceptionEvent as UnhandledExceptionEvent,
)
from tinkex.types.tensors import (
    TensorData as TensorData,
    TensorDtype as TensorDtype,
    check_precision_loss as check_precision_loss,
    dtype_of as dtype_of,
)
from tinkex.types.training import (
    ForwardBackwardInput as ForwardBackwardInput,
    ForwardBackwardOutput as ForwardBackwardOutput,
    ForwardBackwardRequest as ForwardBackwardRequest,
    ForwardRequest as ForwardRequest,
    LoraConfig as LoraConfig,
    LossFnConfig as LossFnConfig,
    LossFnType as LossFnType,
    ModelID as ModelID,
    OptimStepRequest as OptimStepRequest,
    OptimStepResponse as OptimStepResponse,
    RequestID as RequestID,
    UntypedAPIFuture as UntypedAPIFuture,
)

__all__ = [
    name
    for name, value in sorted(globals().items())
    if not name.startswith("_") and not isinstance(value, _ModuleType)
]
