"""Requests about a run as a whole: creating, unloading, asking."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfigBase
from tinkex.types.record import Int64, Record, check_depth, settle
from tinkex.types.training import LoraConfig, ModelID


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
