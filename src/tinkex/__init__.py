"""tinkex: train and sample language models through the Tinker API, on the hosted service or on this machine.

Names are resolved when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__

if TYPE_CHECKING:
    from tinkex import types as types
    from tinkex.config import (
        Config as Config,
    )
    from tinkex.errors import (
        APIConnectionError as APIConnectionError,
        APIError as APIError,
        APIResponseValidationError as APIResponseValidationError,
        APIStatusError as APIStatusError,
        APITimeoutError as APITimeoutError,
        AuthenticationError as AuthenticationError,
        BadRequestError as BadRequestError,
        BillingError as BillingError,
        ConfigurationError as ConfigurationError,
        ConflictError as ConflictError,
        GoneError as GoneError,
        InternalServerError as InternalServerError,
        NotFoundError as NotFoundError,
        PermissionDeniedError as PermissionDeniedError,
        RateLimitError as RateLimitError,
        RequestFailedError as RequestFailedError,
        TinkerError as TinkerError,
        UnprocessableEntityError as UnprocessableEntityError,
    )
    from tinkex.futures import (
        Future as Future,
    )
    from tinkex.local import (
        LocalBackend as LocalBackend,
    )
    from tinkex.sampling import (
        SamplingClient as SamplingClient,
    )
    from tinkex.service import (
        ServiceClient as ServiceClient,
    )
    from tinkex.training import (
        TrainingClient as TrainingClient,
    )
    from tinkex.types.checkpoints import (
        CheckpointType as CheckpointType,
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    )
    from tinkex.types.inputs import (
        Datum as Datum,
        DmelChunk as DmelChunk,
        EncodedTextChunk as EncodedTextChunk,
        ImageAssetPointerChunk as ImageAssetPointerChunk,
        ImageChunk as ImageChunk,
        ModelInput as ModelInput,
        ModelInputChunk as ModelInputChunk,
    )
    from tinkex.types.sampling import (
        SampledSequence as SampledSequence,
        SampleRequest as SampleRequest,
        SampleResponse as SampleResponse,
        SamplingParams as SamplingParams,
        StopReason as StopReason,
    )
    from tinkex.types.tensors import (
        TensorData as TensorData,
        TensorDtype as TensorDtype,
    )
    from tinkex.types.training import (
        AdamOptimizerConfig as AdamOptimizerConfig,
        AdamParams as AdamParams,
        DimuonOptimizerConfig as DimuonOptimizerConfig,
        DimuonParams as DimuonParams,
        ForwardBackwardOutput as ForwardBackwardOutput,
        LoraConfig as LoraConfig,
        ModelID as ModelID,
        OptimParams as OptimParams,
        OptimStepRequest as OptimStepRequest,
        OptimStepResponse as OptimStepResponse,
    )

_HOMES = {
    "tinkex.config": ["Config"],
    "tinkex.errors": ["APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError", "AuthenticationError", "BadRequestError", "BillingError", "ConfigurationError", "ConflictError", "GoneError", "InternalServerError", "NotFoundError", "PermissionDeniedError", "RateLimitError", "RequestFailedError", "TinkerError", "UnprocessableEntityError"],
    "tinkex.futures": ["Future"],
    "tinkex.local": ["LocalBackend"],
    "tinkex.sampling": ["SamplingClient"],
    "tinkex.service": ["ServiceClient"],
    "tinkex.training": ["TrainingClient"],
    "tinkex.types.checkpoints": ["CheckpointType", "ParsedCheckpointTinkerPath"],
    "tinkex.types.inputs": ["Datum", "DmelChunk", "EncodedTextChunk", "ImageAssetPointerChunk", "ImageChunk", "ModelInput", "ModelInputChunk"],
    "tinkex.types.sampling": ["SampledSequence", "SampleRequest", "SampleResponse", "SamplingParams", "StopReason"],
    "tinkex.types.tensors": ["TensorData", "TensorDtype"],
    "tinkex.types.training": ["AdamOptimizerConfig", "AdamParams", "DimuonOptimizerConfig", "DimuonParams", "ForwardBackwardOutput", "LoraConfig", "ModelID", "OptimParams", "OptimStepRequest", "OptimStepResponse"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "CheckpointType",
    "Config",
    "ConfigurationError",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "Future",
    "GoneError",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "InternalServerError",
    "LocalBackend",
    "LoraConfig",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TrainingClient",
    "UnprocessableEntityError",
    "__version__",
    "types",

]


def __getattr__(name: str) -> Any:
    if name == "types":
        return import_module("tinkex.types")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
