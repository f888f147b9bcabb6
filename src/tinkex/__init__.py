"""tinkex: train and sample language models through the Tinker API, hosted or on this machine.

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

from typing import TYPE_CHECKING

from tinkex._lazy import names_of
from tinkex._version import __version__ as __version__

if TYPE_CHECKING:
    from tinkex import (
        adapters as adapters,
        auth as auth,
        metrics as metrics,
        regularizers as regularizers,
        types as types,
    )
    from tinkex.adapters.memory import (
        MemoryPlatform as MemoryPlatform,
    )
    from tinkex.adapters.peft import (
        PeftPlatform as PeftPlatform,
    )
    from tinkex.adapters.platforms import (
        SessionConfig as SessionConfig,
        TinkexPlatform as TinkexPlatform,
        TrainingPlatform as TrainingPlatform,
    )
    from tinkex.client.futures.api_future import (
        APIFuture as APIFuture,
        AwaitableConcurrentFuture as AwaitableConcurrentFuture,
        Future as Future,
    )
    from tinkex.client.futures.await_many import (
        await_many as await_many,
        await_many_async as await_many_async,
    )
    from tinkex.client.http.http_client import (
        HttpClient as HttpClient,
        RequestOptions as RequestOptions,
        Timeout as Timeout,
    )
    from tinkex.client.http.responses import APIResponse as APIResponse
    from tinkex.client.http.retry import RetryConfig as RetryConfig
    from tinkex.client.losses.loss_graphs import (
        LossHandle as LossHandle,
        PerDatumLossFn as PerDatumLossFn,
    )
    from tinkex.client.rest import AdminClient as AdminClient, RestClient as RestClient
    from tinkex.client.sampling_client import (
        BackcompatSamplingClientFuture as BackcompatSamplingClientFuture,
        SamplingClient as SamplingClient,
    )
    from tinkex.client.service import ServiceClient as ServiceClient
    from tinkex.client.service_parts.training_starts import (
        BackcompatTrainingClientFuture as BackcompatTrainingClientFuture,
    )
    from tinkex.client.settings.config import Config as Config, configure as configure
    from tinkex.client.training_client import TrainingClient as TrainingClient
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
        ExperimentalWarning as ExperimentalWarning,
        GoneError as GoneError,
        InternalServerError as InternalServerError,
        NotFoundError as NotFoundError,
        PermissionDeniedError as PermissionDeniedError,
        RateLimitError as RateLimitError,
        RequestFailedError as RequestFailedError,
        TinkerError as TinkerError,
        UnprocessableEntityError as UnprocessableEntityError,
    )
    from tinkex.hub.downloads import (
        DownloadError as DownloadError,
        download as download,
        download_async as download_async,
    )
    from tinkex.hub.pushes import (
        push_checkpoint_adapter as push_checkpoint_adapter,
        push_checkpoint_adapter_async as push_checkpoint_adapter_async,
    )
    from tinkex.local import (
        LocalBackend as LocalBackend,
    )
    from tinkex.recovery.policies import (
        RecoveryError as RecoveryError,
        RecoveryPolicy as RecoveryPolicy,
    )
    from tinkex.recovery.resilient import resilient as resilient
    from tinkex.regularizers.specs import (
        RegularizerError as RegularizerError,
    )
    from tinkex.types.checkpoints import (
        Checkpoint as Checkpoint,
        CheckpointType as CheckpointType,
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
        TrainingRun as TrainingRun,
    )
    from tinkex.types.chunks import (
        DmelChunk as DmelChunk,
        EncodedTextChunk as EncodedTextChunk,
        ImageAssetPointerChunk as ImageAssetPointerChunk,
        ImageChunk as ImageChunk,
        ModelInputChunk as ModelInputChunk,
    )
    from tinkex.types.custom_losses import (
        CustomLossOutput as CustomLossOutput,
        RegularizerOutput as RegularizerOutput,
        RegularizerSpec as RegularizerSpec,
    )
    from tinkex.types.inputs import (
        Datum as Datum,
        ModelInput as ModelInput,
    )
    from tinkex.types.optimizers import (
        AdamOptimizerConfig as AdamOptimizerConfig,
        AdamParams as AdamParams,
        DimuonOptimizerConfig as DimuonOptimizerConfig,
        DimuonParams as DimuonParams,
        OptimParams as OptimParams,
    )
    from tinkex.types.sampled import (
        SampledSequence as SampledSequence,
        SampleResponse as SampleResponse,
        StopReason as StopReason,
    )
    from tinkex.types.sampling import (
        SampleRequest as SampleRequest,
        SamplingParams as SamplingParams,
    )
    from tinkex.types.spans import (
        PromptProvenanceSpan as PromptProvenanceSpan,
        SampledProvenanceSpan as SampledProvenanceSpan,
    )
    from tinkex.types.tensors import (
        TensorData as TensorData,
        TensorDtype as TensorDtype,
    )
    from tinkex.types.training import (
        ForwardBackwardOutput as ForwardBackwardOutput,
        LoraConfig as LoraConfig,
        ModelID as ModelID,
        OptimStepRequest as OptimStepRequest,
        OptimStepResponse as OptimStepResponse,
    )
    from tinkex.wire.json_values import NOT_GIVEN as NOT_GIVEN, OMIT as OMIT

__title__ = "tinkex"

__all__, __getattr__, __dir__ = names_of(__name__, __file__, "__title__", "__version__")
