"""Messages of training: models, passes, optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tinkex.types.inputs import Datum, LossFnOutput
from tinkex.types.record import Record, pydantic_schema
from tinkex.types.tensors import TensorData

ModelID: TypeAlias = str
RequestID: TypeAlias = str
LossFnType: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
LossFnConfig: TypeAlias = Mapping[str, float | str]


class LoraConfig(Record, frozen=True, kw_only=True):
    """The shape of an adapter: its rank, the seed of its A matrices, and which layers it touches."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBase:
    """The optimizer a model is created with; kinds this version does not know are passed through unchanged."""

    __slots__ = ("_extra", "type")

    def __init__(self, *, type: str, **extra: Any) -> None:
        self.type = type
        self._extra = extra

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._extra:
            return self._extra[name]
        raise AttributeError(f"{self.__class__.__name__} has no field {name!r}")

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {"type": self.type, **self._extra}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form, as the class that its `type` names."""
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise ValueError("an optimizer must be an object with a type")
        kind = next((known for known in cls.__subclasses__() if value["type"] == known.KIND), cls)  # type: ignore[attr-defined]
        return kind(**value)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        return self.to_wire()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimizerConfigBase) and self.to_wire() == other.to_wire()

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({', '.join(f'{k}={v!r}' for k, v in self.to_wire().items())})"


class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW with decoupled weight decay, as torch's."""

    __slots__ = ()
    KIND = "adamw"

    def __init__(self, *, type: Literal["adamw"] = "adamw") -> None:
        super().__init__(type=type)


class DimuonOptimizerConfig(OptimizerConfigBase):
    """Muon on matrices."""

    __slots__ = ()
    KIND = "dimuon"

    def __init__(self, *, type: Literal["dimuon"] = "dimuon", version: int = 1) -> None:
        super().__init__(type=type, version=version)


OptimizerConfig: TypeAlias = OptimizerConfigBase


class AdamParams(Record, frozen=True, kw_only=True):
    """The hyper-parameters of one AdamW step; zero decay and zero clip norm mean off.

    Example:
        >>> AdamParams(learning_rate=1e-3).beta2
        0.95
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class DimuonParams(Record, frozen=True, kw_only=True):
    """The hyper-parameters of one Dimuon step."""

    learning_rate: float
    grad_clip_norm: float = 0.0
    beta1: float = 0.9
    type: Literal["dimuon"] = "dimuon"

    def __post_init__(self) -> None:
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError("learning_rate must be a number >= 0")
        if not 0 <= self.beta1 < 1:
            raise ValueError("beta1 must be in [0, 1)")


OptimParams: TypeAlias = AdamParams | DimuonParams


class CreateModelRequest(Record, frozen=True, kw_only=True):
    """Start a training run."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
    user_metadata: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Record, frozen=True, kw_only=True):
    """The id of a new training run."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class ModelData(Record, frozen=True, kw_only=True):
    """What a model is."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoRequest(Record, frozen=True, kw_only=True):
    """Ask about a training run."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class GetInfoResponse(Record, frozen=True, kw_only=True):
    """What a training run trains."""

    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    type: Literal["get_info"] | None = None


class UntypedAPIFuture(Record, frozen=True, kw_only=True):
    """A receipt: the id under which the result of a submitted operation can be fetched."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


class ForwardBackwardInput(Record, frozen=True, kw_only=True):
    """Data and loss of one pass."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(Record, frozen=True, kw_only=True):
    """A pass over data: forward only, or with its gradient added to the model's buffer."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None
    forward_only: bool = False


class ForwardRequest(Record, frozen=True, kw_only=True):
    """A forward pass, as clients before 0.25 send it."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


class ForwardBackwardOutput:
    """One record of tensors per datum, in the order of the data, and metrics named `name:reduction`."""

    __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")

    def __init__(
        self,
        loss_fn_output_type: str,
        loss_fn_outputs: list[LossFnOutput],
        metrics: dict[str, float] | None = None,
    ) -> None:
        self.loss_fn_output_type = loss_fn_output_type
        self.loss_fn_outputs = loss_fn_outputs
        self.metrics: dict[str, float] = metrics or {}

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it."""
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": [
                {name: tensor.to_wire() for name, tensor in output.items()} for output in self.loss_fn_outputs
            ],
            "metrics": self.metrics,
        }

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        if not isinstance(value, Mapping) or not isinstance(value.get("loss_fn_outputs"), list):
            raise ValueError("a forward_backward result must be an object with loss_fn_outputs")
        outputs = [
            {name: TensorData.from_wire(tensor) for name, tensor in output.items()}
            for output in value["loss_fn_outputs"]
        ]
        return cls(str(value.get("loss_fn_output_type", "")), outputs, dict(value.get("metrics") or {}))

    def __repr__(self) -> str:
        return f"ForwardBackwardOutput({len(self.loss_fn_outputs)} outputs, metrics={self.metrics!r})"

    def __reduce__(self) -> Any:
        return (type(self), (self.loss_fn_output_type, self.loss_fn_outputs, self.metrics))


class OptimStepRequest(Record, frozen=True, kw_only=True):
    """Apply the accumulated gradient; exactly one of the two parameter sets is given."""

    model_id: ModelID
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class OptimStepResponse(Record, frozen=True, kw_only=True):
    """What the step did."""

    metrics: dict[str, float] | None = None
    type: Literal["optim_step"] | None = None
