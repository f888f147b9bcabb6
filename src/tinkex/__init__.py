"""tinkex: train and sample language models through the Tinker API, on the hosted service or on this
machine.

Names are resolved when first used, so that importing the package costs next to nothing.

The examples in docstrings use these, without making them each time:

    >>> from tinkex import *
    >>> service = ServiceClient(base_url="local")
    >>> client = service.create_lora_training_client("tinkex/tiny", rank=4).result()
    >>> sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
    >>> rest = RestClient(base_url="local")
    >>> tokenizer = sampler.get_tokenizer()
    >>> tokens = tokenizer.encode("12+34=46")
    >>> data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
    >>> prompt = ModelInput.from_ints(tokenizer.encode("12+34="))
    >>> path = client.save_state("step-100").result().path
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__

if TYPE_CHECKING:
    from tinkex import adapters as adapters
    from tinkex import auth as auth
    from tinkex import metrics as metrics
    from tinkex import regularizers as regularizers
    from tinkex import types as types
    from tinkex.adapters.clients import (
        TinkexPlatform as TinkexPlatform,
    )
    from tinkex.adapters.memory import (
        MemoryPlatform as MemoryPlatform,
    )
    from tinkex.adapters.peft import (
        PeftPlatform as PeftPlatform,
    )
    from tinkex.adapters.platforms import (
        SessionConfig as SessionConfig,
    )
    from tinkex.adapters.platforms import (
        TrainingPlatform as TrainingPlatform,
    )
    from tinkex.client.futures.api_future import APIFuture as APIFuture
    from tinkex.client.futures.api_future import (
        AwaitableConcurrentFuture as AwaitableConcurrentFuture,
    )
    from tinkex.client.futures.api_future import Future as Future
    from tinkex.client.futures.api_future import await_many as await_many
    from tinkex.client.futures.api_future import await_many_async as await_many_async
    from tinkex.client.futures.sampling_future import (
        BackcompatSamplingClientFuture as BackcompatSamplingClientFuture,
    )
    from tinkex.client.futures.training_future import (
        BackcompatTrainingClientFuture as BackcompatTrainingClientFuture,
    )
    from tinkex.client.http.http_client import HttpClient as HttpClient
    from tinkex.client.http.http_client import RequestOptions as RequestOptions
    from tinkex.client.http.http_client import Timeout as Timeout
    from tinkex.client.http.responses import APIResponse as APIResponse
    from tinkex.client.http.retry import RetryConfig as RetryConfig
    from tinkex.client.losses.loss_graphs import LossHandle as LossHandle
    from tinkex.client.losses.loss_graphs import PerDatumLossFn as PerDatumLossFn
    from tinkex.client.rest import AdminClient as AdminClient
    from tinkex.client.rest import RestClient as RestClient
    from tinkex.client.sampling_client import SamplingClient as SamplingClient
    from tinkex.client.service import ServiceClient as ServiceClient
    from tinkex.client.settings.config import Config as Config
    from tinkex.client.settings.config import configure as configure
    from tinkex.client.training_client import TrainingClient as TrainingClient
    from tinkex.errors import (
        APIConnectionError as APIConnectionError,
    )
    from tinkex.errors import (
        APIError as APIError,
    )
    from tinkex.errors import (
        APIResponseValidationError as APIResponseValidationError,
    )
    from tinkex.errors import (
        APIStatusError as APIStatusError,
    )
    from tinkex.errors import (
        APITimeoutError as APITimeoutError,
    )
    from tinkex.errors import (
        AuthenticationError as AuthenticationError,
    )
    from tinkex.errors import (
        BadRequestError as BadRequestError,
    )
    from tinkex.errors import (
        BillingError as BillingError,
    )
    from tinkex.errors import (
        ConfigurationError as ConfigurationError,
    )
    from tinkex.errors import (
        ConflictError as ConflictError,
    )
    from tinkex.errors import (
        ExperimentalWarning as ExperimentalWarning,
    )
    from tinkex.errors import (
        GoneError as GoneError,
    )
    from tinkex.errors import (
        InternalServerError as InternalServerError,
    )
    from tinkex.errors import (
        NotFoundError as NotFoundError,
    )
    from tinkex.errors import (
        PermissionDeniedError as PermissionDeniedError,
    )
    from tinkex.errors import (
        RateLimitError as RateLimitError,
    )
    from tinkex.errors import (
        RequestFailedError as RequestFailedError,
    )
    from tinkex.errors import (
        TinkerError as TinkerError,
    )
    from tinkex.errors import (
        UnprocessableEntityError as UnprocessableEntityError,
    )
    from tinkex.hub.downloads import DownloadError as DownloadError
    from tinkex.hub.downloads import download as download
    from tinkex.hub.downloads import download_async as download_async
    from tinkex.hub.pushes import push_checkpoint_adapter as push_checkpoint_adapter
    from tinkex.hub.pushes import push_checkpoint_adapter_async as push_checkpoint_adapter_async
    from tinkex.local import (
        LocalBackend as LocalBackend,
    )
    from tinkex.recovery.policies import RecoveryError as RecoveryError
    from tinkex.recovery.policies import RecoveryPolicy as RecoveryPolicy
    from tinkex.recovery.resilient import resilient as resilient
    from tinkex.regularizers.specs import (
        RegularizerError as RegularizerError,
    )
    from tinkex.types.checkpoints import (
        Checkpoint as Checkpoint,
    )
    from tinkex.types.checkpoints import (
        CheckpointType as CheckpointType,
    )
    from tinkex.types.checkpoints import (
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    )
    from tinkex.types.checkpoints import (
        TrainingRun as TrainingRun,
    )
    from tinkex.types.custom_losses import (
        CustomLossOutput as CustomLossOutput,
    )
    from tinkex.types.custom_losses import (
        RegularizerOutput as RegularizerOutput,
    )
    from tinkex.types.custom_losses import (
        RegularizerSpec as RegularizerSpec,
    )
    from tinkex.types.inputs import (
        Datum as Datum,
    )
    from tinkex.types.inputs import (
        DmelChunk as DmelChunk,
    )
    from tinkex.types.inputs import (
        EncodedTextChunk as EncodedTextChunk,
    )
    from tinkex.types.inputs import (
        ImageAssetPointerChunk as ImageAssetPointerChunk,
    )
    from tinkex.types.inputs import (
        ImageChunk as ImageChunk,
    )
    from tinkex.types.inputs import (
        ModelInput as ModelInput,
    )
    from tinkex.types.inputs import (
        ModelInputChunk as ModelInputChunk,
    )
    from tinkex.types.inputs import (
        PromptProvenanceSpan as PromptProvenanceSpan,
    )
    from tinkex.types.inputs import (
        SampledProvenanceSpan as SampledProvenanceSpan,
    )
    from tinkex.types.sampling import (
        SampledSequence as SampledSequence,
    )
    from tinkex.types.sampling import (
        SampleRequest as SampleRequest,
    )
    from tinkex.types.sampling import (
        SampleResponse as SampleResponse,
    )
    from tinkex.types.sampling import (
        SamplingParams as SamplingParams,
    )
    from tinkex.types.sampling import (
        StopReason as StopReason,
    )
    from tinkex.types.tensors import (
        TensorData as TensorData,
    )
    from tinkex.types.tensors import (
        TensorDtype as TensorDtype,
    )
    from tinkex.types.training import (
        AdamOptimizerConfig as AdamOptimizerConfig,
    )
    from tinkex.types.training import (
        AdamParams as AdamParams,
    )
    from tinkex.types.training import (
        DimuonOptimizerConfig as DimuonOptimizerConfig,
    )
    from tinkex.types.training import (
        DimuonParams as DimuonParams,
    )
    from tinkex.types.training import (
        ForwardBackwardOutput as ForwardBackwardOutput,
    )
    from tinkex.types.training import (
        LoraConfig as LoraConfig,
    )
    from tinkex.types.training import (
        ModelID as ModelID,
    )
    from tinkex.types.training import (
        OptimParams as OptimParams,
    )
    from tinkex.types.training import (
        OptimStepRequest as OptimStepRequest,
    )
    from tinkex.types.training import (
        OptimStepResponse as OptimStepResponse,
    )
    from tinkex.wire.json_values import NOT_GIVEN as NOT_GIVEN
    from tinkex.wire.json_values import OMIT as OMIT

_HOMES = {
    "tinkex.adapters.clients": ["TinkexPlatform"],
    "tinkex.adapters.memory": ["MemoryPlatform"],
    "tinkex.adapters.peft": ["PeftPlatform"],
    "tinkex.adapters.platforms": ["SessionConfig", "TrainingPlatform"],
    "tinkex.client.futures.sampling_future": ["BackcompatSamplingClientFuture"],
    "tinkex.client.futures.training_future": ["BackcompatTrainingClientFuture"],
    "tinkex.client.settings.config": ["Config", "configure"],
    "tinkex.hub.downloads": ["DownloadError", "download", "download_async"],
    "tinkex.errors": [
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ConfigurationError",
        "ConflictError",
        "ExperimentalWarning",
        "GoneError",
        "InternalServerError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "RequestFailedError",
        "TinkerError",
        "UnprocessableEntityError",
    ],
    "tinkex.client.futures.api_future": [
        "APIFuture",
        "AwaitableConcurrentFuture",
        "Future",
        "await_many",
        "await_many_async",
    ],
    "tinkex.client.http.http_client": ["HttpClient", "RequestOptions", "Timeout"],
    "tinkex.hub.pushes": ["push_checkpoint_adapter", "push_checkpoint_adapter_async"],
    "tinkex.local": ["LocalBackend"],
    "tinkex.client.losses.loss_graphs": ["LossHandle", "PerDatumLossFn"],
    "tinkex.regularizers.specs": ["RegularizerError"],
    "tinkex.recovery.policies": ["RecoveryError", "RecoveryPolicy"],
    "tinkex.recovery.resilient": ["resilient"],
    "tinkex.client.http.responses": ["APIResponse"],
    "tinkex.client.rest": ["AdminClient", "RestClient"],
    "tinkex.client.http.retry": ["RetryConfig"],
    "tinkex.client.sampling_client": ["SamplingClient"],
    "tinkex.client.service": ["ServiceClient"],
    "tinkex.client.training_client": ["TrainingClient"],
    "tinkex.wire.json_values": ["NOT_GIVEN", "OMIT"],
    "tinkex.types.checkpoints": [
        "Checkpoint",
        "CheckpointType",
        "ParsedCheckpointTinkerPath",
        "TrainingRun",
    ],
    "tinkex.types.custom_losses": ["CustomLossOutput", "RegularizerOutput", "RegularizerSpec"],
    "tinkex.types.inputs": [
        "Datum",
        "DmelChunk",
        "EncodedTextChunk",
        "ImageAssetPointerChunk",
        "ImageChunk",
        "ModelInput",
        "ModelInputChunk",
        "PromptProvenanceSpan",
        "SampledProvenanceSpan",
    ],
    "tinkex.types.sampling": [
        "SampledSequence",
        "SampleRequest",
        "SampleResponse",
        "SamplingParams",
        "StopReason",
    ],
    "tinkex.types.tensors": ["TensorData", "TensorDtype"],
    "tinkex.types.training": [
        "AdamOptimizerConfig",
        "AdamParams",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "ForwardBackwardOutput",
        "LoraConfig",
        "ModelID",
        "OptimParams",
        "OptimStepRequest",
        "OptimStepResponse",
    ],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("adapters", "auth", "metrics", "regularizers", "types")

__title__ = "tinkex"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponse",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "Config",
    "ConfigurationError",
    "ConflictError",
    "CustomLossOutput",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "DownloadError",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "Future",
    "GoneError",
    "HttpClient",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "InternalServerError",
    "LocalBackend",
    "LoraConfig",
    "LossHandle",
    "MemoryPlatform",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NOT_GIVEN",
    "NotFoundError",
    "OMIT",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PeftPlatform",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RecoveryError",
    "RecoveryPolicy",
    "RegularizerError",
    "RegularizerOutput",
    "RegularizerSpec",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "RetryConfig",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "SessionConfig",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TinkexPlatform",
    "TrainingClient",
    "TrainingPlatform",
    "TrainingRun",
    "UnprocessableEntityError",
    "__title__",
    "__version__",
    "adapters",
    "auth",
    "await_many",
    "await_many_async",
    "configure",
    "download",
    "download_async",
    "metrics",
    "push_checkpoint_adapter",
    "push_checkpoint_adapter_async",
    "regularizers",
    "resilient",
    "types",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tinkex.{name}")
    if name not in _HOME_OF:
        # With name and module, so that Python says what may have been meant.
        raise AttributeError(
            f"module 'tinkex' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
