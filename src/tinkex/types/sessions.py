"""Sessions, their settings, and what is opened in them: runs, samplers and custom losses."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.types.custom_losses import CustomLossGraph, CustomLossInput
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfigBase
from tinkex.types.record import Int64, Record, check_depth, settle
from tinkex.types.training import LoraConfig, ModelID

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]
"""Outcome of a session, in one word."""


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


class CreateSessionRequest(Record, frozen=True, kw_only=True):
    """Open a session.

    Example:
        >>> CreateSessionRequest(tags=["sweep"], user_metadata={"lr": "1e-4"}).tags
        ['sweep']
    """

    tags: list[str] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"

    def __post_init__(self) -> None:
        check_depth(self.user_metadata, "user_metadata")


class CreateSessionResponse(Record, frozen=True, kw_only=True):
    """A session, and what the server wants its user to read.

    Example:
        >>> CreateSessionResponse(
        ...     session_id="session-1", warning_message="maintenance at noon"
        ... ).warning_message
        'maintenance at noon'
    """

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Record, frozen=True, kw_only=True):
    """Say that the client is alive.

    Example:
        >>> SessionHeartbeatRequest(session_id="session-1").type
        'session_heartbeat'
    """

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Record, frozen=True, kw_only=True):
    """Heard, whatever the answer is.

    Example:
        >>> SessionHeartbeatResponse().type
        'session_heartbeat'
    """

    type: str = "session_heartbeat"


class FinishReason(Record, frozen=True, kw_only=True):
    """Outcome of a session.

    Example:
        >>> FinishReason(type="errored").type
        'errored'
    """

    type: ClientSessionFinishReasonType


class FinishSessionRequest(Record, frozen=True, kw_only=True):
    """Close a session.

    Example:
        >>> FinishSessionRequest(
        ...     reason=FinishReason(type="errored"), detail="out of data"
        ... ).model_dump()
        {'reason': {'type': 'errored'}, 'detail': 'out of data'}
    """

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"detail"})

    reason: FinishReason
    detail: str | None = None


class Empty(Record, frozen=True, kw_only=True):
    """A message whose arrival says it all.

    Example:
        >>> Empty.model_validate({}) == Empty()
        True
    """


class GetSessionResponse(Record, frozen=True, kw_only=True):
    """Runs and samplers of a session.

    Example:
        >>> session = GetSessionResponse(training_run_ids=["run-1"], sampler_ids=["sampler-1"])
        >>> session.training_run_ids  # session = rest.get_session("session-1").result()
        ['run-1']
    """

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Record, frozen=True, kw_only=True):
    """The ids of sessions.

    Example:
        >>> ListSessionsResponse(sessions=["session-1", "session-2"]).sessions
        ['session-1', 'session-2']
    """

    sessions: list[str]


class AssignSessionProjectRequest(Record, frozen=True, kw_only=True):
    """Move a session into a project.

    Example:
        >>> AssignSessionProjectRequest(project_id="project-1").project_id
        'project-1'
    """

    project_id: str


class SessionTraceExportResponse(Record, frozen=True, kw_only=True):
    """Progress of the export of a session's timeline.

    Example:
        >>> export = SessionTraceExportResponse(
        ...     status="ready", url="https://files.example.org/trace.json"
        ... )
        >>> export.url if export.status == "ready" else export.error
        'https://files.example.org/trace.json'
    """

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class CreateModelRequest(Record, frozen=True, kw_only=True):
    """Start a training run.

    Example:
        >>> model = {"base_model": "Qwen/Qwen3-8B", "lora_config": LoraConfig(rank=32)}
        >>> CreateModelRequest(session_id="session-1", model_seq_id=0, **model).lora_config.rank
        32
    """

    session_id: str
    model_seq_id: Int64
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
    user_metadata: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"

    def __post_init__(self) -> None:
        check_depth(self.user_metadata, "user_metadata")


class CreateModelResponse(Record, frozen=True, kw_only=True):
    """The id of a new training run.

    Example:
        >>> CreateModelResponse(model_id="run-1").model_id
        'run-1'
    """

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(Record, frozen=True, kw_only=True):
    """Free what a training run holds on the server.

    Example:
        >>> UnloadModelRequest(model_id="run-1").model_id
        'run-1'
    """

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Record, frozen=True, kw_only=True):
    """The training run that was freed.

    Example:
        >>> UnloadModelResponse(model_id="run-1").model_id
        'run-1'
    """

    model_id: ModelID
    type: Literal["unload_model"] | None = None


class DropGradientsRequest(Record, frozen=True, kw_only=True):
    """Drop the gradient that a training run has gathered since its last step.

    Example:
        >>> DropGradientsRequest(model_id="run-1", seq_id=7).seq_id
        7
    """

    model_id: ModelID
    seq_id: Int64 | None = None
    type: Literal["drop_gradients"] = "drop_gradients"


class DropGradientsResponse(Record, frozen=True, kw_only=True):
    """The training run whose gradient was dropped.

    Example:
        >>> DropGradientsResponse(model_id="run-1").model_id
        'run-1'
    """

    model_id: ModelID
    type: Literal["drop_gradients"] | None = None


class ModelData(Record, frozen=True, kw_only=True):
    """Description of a model.

    A variant after a colon in the tokenizer's name is cut off.

    Example:
        >>> ModelData(model_name="Qwen/Qwen3-8B", tokenizer_id="Qwen/Qwen3-8B:chat").tokenizer_id
        'Qwen/Qwen3-8B'
    """

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer_id is not None:
            settle(self, "tokenizer_id", self.tokenizer_id.partition(":")[0])


class GetInfoRequest(Record, frozen=True, kw_only=True):
    """Ask about a training run.

    Example:
        >>> GetInfoRequest(model_id="run-1").model_id
        'run-1'
    """

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class GetInfoResponse(Record, frozen=True, kw_only=True):
    """Description of a training run.

    Example:
        >>> data = ModelData(model_name="Qwen/Qwen3-8B")
        >>> info = GetInfoResponse(
        ...     model_data=data, model_id="run-1", is_lora=True, lora_rank=32
        ... )  # training.get_info()
        >>> info.model_data.model_name, info.lora_rank
        ('Qwen/Qwen3-8B', 32)
    """

    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    type: Literal["get_info"] | None = None


class CreateCustomLossRequest(Record, frozen=True, kw_only=True):
    """Store a loss on the server; its first input is `logprobs`.

    Example:
        >>> fields = {
        ...     "session_id": "s-1",
        ...     "custom_loss_seq_id": 0,
        ...     "name": "nll",
        ...     "graph": CustomLossGraph(nodes=[]),
        ... }
        >>> CreateCustomLossRequest(
        ...     inputs=[CustomLossInput(name="logprobs", rank=1)], **fields
        ... ).inputs[0].name
        'logprobs'
    """

    session_id: str
    custom_loss_seq_id: Int64
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Record, frozen=True, kw_only=True):
    """The id under which passes of the same session may use a loss.

    Example:
        >>> CreateCustomLossResponse(loss_id="loss-1").loss_id
        'loss-1'
    """

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateSamplingSessionRequest(Record, frozen=True, kw_only=True):
    """Bind a sampler to a base model or a saved checkpoint.

    Example:
        >>> path = "tinker://run-1/sampler_weights/final"
        >>> CreateSamplingSessionRequest(
        ...     session_id="session-1", sampling_session_seq_id=0, model_path=path
        ... ).model_path
        'tinker://run-1/sampler_weights/final'
    """

    session_id: str
    sampling_session_seq_id: Int64
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Record, frozen=True, kw_only=True):
    """The id of a new sampler.

    Example:
        >>> CreateSamplingSessionResponse(sampling_session_id="sampler-1").sampling_session_id
        'sampler-1'
    """

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Record, frozen=True, kw_only=True):
    """Sample beside others from one sampling session.

    Example:
        >>> JoinSamplingSessionRequest(sampling_session_id="sampler-1").sampling_session_id
        'sampler-1'
    """

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Record, frozen=True, kw_only=True):
    """Number of this client among those of the session.

    Example:
        >>> JoinSamplingSessionResponse(client_counter=2).client_counter
        2
    """

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Record, frozen=True, kw_only=True):
    """Model and weights that a sampler draws from.

    Example:
        >>> rest.get_sampler(sampler.sampling_session_id).result().base_model
        'tinkex/tiny'
    """

    sampler_id: str
    base_model: str
    model_path: str | None = None
