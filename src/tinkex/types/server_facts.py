"""Settings, models and health of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.types.record import Record, settle


class ClientConfigRequest(Record, frozen=True, kw_only=True):
    """Ask how to behave.

    Example:
        >>> ClientConfigRequest(sdk_version="0.38.0").sdk_version
        '0.38.0'
    """

    sdk_version: str


class ClientConfigResponse(Record, frozen=True, kw_only=True):
    """Settings that the server gives its clients.

    Example:
        >>> ClientConfigResponse(fwdbwd_max_chunk_len=256).fwdbwd_max_chunk_len
        256
    """

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10_485_760
    inflight_response_bytes_semaphore_size: int = 52_428_800
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    batched_results: bool = False
    """True on tinkex servers, where a batched poll can carry the results; others ignore it."""
    proto_write_fwdbwd: bool = False
    """Asks clients before 0.25 to send passes as protobuf; later clients always do."""
    fwd_via_fwdbwd: bool = False
    """Of the same clients: a pass without a gradient goes the same way."""
    create_model_via_load_weights: bool = False
    """Read by clients before 0.38, which resume with one `load_weights` only when it is true."""


class ClientDynamicConfigResponse(Record, frozen=True, kw_only=True):
    """Configuration that may change while a client runs.

    Example:
        >>> ClientDynamicConfigResponse().refresh_interval_sec
        300
    """

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class SupportedModel(Record, frozen=True, kw_only=True):
    """A base model the server offers.

    Example:
        >>> model = SupportedModel(
        ...     model_name="Qwen/Qwen3-8B", max_context_length=32_768, trainable=True
        ... )
        >>> model.max_context_length
        32768
    """

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


if TYPE_CHECKING:
    Models: TypeAlias = list[SupportedModel]
else:
    # Some servers list names; those are read by hand.
    Models = list[Any]


class GetServerCapabilitiesResponse(Record, frozen=True, kw_only=True):
    """Models and features of a server; a model may be listed by its name alone.

    Example:
        >>> offer = GetServerCapabilitiesResponse.model_validate(
        ...     {"supported_models": ["tinkex/tiny"]}
        ... )
        >>> "tinkex/tiny" in offer.model_names()  # offer = rest.get_server_capabilities().result()
        True
    """

    supported_models: Models

    def __post_init__(self) -> None:
        listed = [model for model in self.supported_models if model is not None]
        models = [
            SupportedModel(model_name=model) if isinstance(model, str) else model
            for model in listed
        ]
        settle(self, "supported_models", [SupportedModel.model_validate(model) for model in models])

    def model_names(self) -> list[str | None]:
        """The names of the models, in their order; None for one that has no name.

        Example:
            >>> models = [
            ...     SupportedModel(model_name="tinkex/tiny"),
            ...     SupportedModel(model_name="Qwen/Qwen3-8B"),
            ... ]
            >>> GetServerCapabilitiesResponse(supported_models=models).model_names()
            ['tinkex/tiny', 'Qwen/Qwen3-8B']
        """
        return [model.model_name for model in self.supported_models]


class HealthResponse(Record, frozen=True, kw_only=True):
    """The server is up.

    Example:
        >>> HealthResponse(status="ok").status
        'ok'
    """

    status: str
