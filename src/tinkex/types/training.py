"""Messages of training: models, passes, optimizer steps."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from tinkex.types.inputs import Datum, LossFnOutput
from tinkex.types.record import (
    Fixed,
    Int64,
    Record,
    Wired,
    check_depth,
    from_builtins,
    number,
    put,
    settle,
    whole,
)
from tinkex.types.tensors import TensorData

ModelID: TypeAlias = str
"""The id of a training run."""
RequestID: TypeAlias = str
"""The id of a submitted operation."""
LossFnType: TypeAlias = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]
"""The losses that the protocol names; a server need not have all of them."""
LossFnConfig: TypeAlias = Mapping[str, float | str]
"""The settings of a loss, by name."""


class LoraConfig(Record, frozen=True, kw_only=True):
    """The shape of an adapter: its rank, the seed of its A matrices, and which layers it touches.

    Example:
        >>> LoraConfig(rank=32, train_unembed=False).model_dump(exclude_defaults=True)
        {'rank': 32, 'train_unembed': False}
    """

    rank: Int64
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        settle(self, "rank", whole(self.rank, "rank"))
        if self.seed is not None:
            settle(self, "seed", whole(self.seed, "seed"))


class _Open(Fixed):
    """An object with a `type` and any other fields; unknown kinds pass through unchanged."""

    __slots__ = ("_extra", "type")
    KIND: ClassVar[str | None] = None

    type: str
    _extra: dict[str, Any]

    def __init__(self, *, type: str, **extra: Any) -> None:
        if self.KIND is not None and type != self.KIND:
            raise ValueError(f"{self.__class__.__name__}.type must be {self.KIND!r}, got {type!r}")
        put(self, "type", type)
        put(self, "_extra", extra)

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
        if not isinstance(value, Mapping) or not isinstance(value.get("type", cls.KIND), str):
            raise ValueError("an optimizer must be an object with a type")
        check_depth(value, "an optimizer")
        kind = next(
            (known for known in cls.__subclasses__() if value.get("type") == known.KIND), cls
        )
        try:
            return kind(**value)
        except (TypeError, ValueError) as error:
            if kind is not cls:  # a later version of a known kind, perhaps: kept as it is
                return cls(**value)
            raise ValueError(f"bad {kind.__name__}: {error}") from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields replaced."""
        return type(self)(**(copy.deepcopy(self) if deep else self).to_wire() | dict(update or {}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_wire() == other.to_wire()

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.to_wire().items())
        return f"{self.__class__.__name__}({fields})"

    def __reduce__(self) -> Any:
        return (_reopen, (type(self), self.to_wire()))


def _reopen(kind: type[_Open], fields: dict[str, Any]) -> _Open:
    return kind(**fields)


class OptimizerConfigBase(_Open):
    """Optimizer that a model is created with; unknown kinds pass through unchanged.

    Example:
        >>> OptimizerConfigBase(type="lion", version=2).to_wire()  # a kind of a later server
        {'type': 'lion', 'version': 2}
    """

    __slots__ = ()


class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW with decoupled weight decay, as torch's.

    Example:
        >>> AdamOptimizerConfig().to_wire()
        {'type': 'adamw'}
    """

    __slots__ = ()
    KIND = "adamw"

    def __init__(self, *, type: Literal["adamw"] = "adamw") -> None:
        super().__init__(type=type)


class DimuonOptimizerConfig(OptimizerConfigBase):
    """Muon on matrices.

    Example:
        >>> config = (
        ...     DimuonOptimizerConfig()
        ... )  # create_lora_training_client(..., optimizer_config=config)
        >>> config.to_wire()
        {'type': 'dimuon', 'version': 1}
    """

    __slots__ = ()
    KIND = "dimuon"

    def __init__(self, *, type: Literal["dimuon"] = "dimuon", version: Literal[1] = 1) -> None:
        if version != 1:
            raise ValueError(f"DimuonOptimizerConfig.version must be 1, got {version!r}")
        super().__init__(type=type, version=version)


OptimizerConfig: TypeAlias = AdamOptimizerConfig | OptimizerConfigBase
"""Optimizer that a run is created with."""


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

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if type(value := getattr(self, name)) is not float:
                settle(self, name, number(value, name))

    def validate(self) -> Self:
        """Check every value and return self; the constructor takes any numbers, as servers may.

        Raises:
            ValueError: Names the first field that is out of range.

        Example:
            >>> try:
            ...     AdamParams(learning_rate=-1e-4).validate()
            ... except ValueError as error:
            ...     print(error)
            learning_rate must be greater than 0, got -0.0001
        """
        rules: dict[str, tuple[bool, str]] = {
            "learning_rate": (self.learning_rate > 0, "greater than 0"),
            "beta1": (0 <= self.beta1 < 1, "in [0, 1)"),
            "beta2": (0 <= self.beta2 < 1, "in [0, 1)"),
            "eps": (self.eps > 0, "greater than 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "grad_clip_norm": (self.grad_clip_norm >= 0, "at least 0"),
        }
        for name, (holds, rule) in rules.items():
            if not holds or not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        return self


class OptimParamsBase(_Open):
    """Settings of one step of an optimizer other than AdamW; unknown kinds pass through unchanged.

    Example:
        >>> OptimParamsBase(
        ...     type="lion", learning_rate=1e-4
        ... ).learning_rate  # a kind of a later server
        0.0001
    """

    __slots__ = ()


class DimuonParams(OptimParamsBase):
    """The hyper-parameters of one Dimuon step; a clip norm of zero means off.

    Example:
        >>> params = DimuonParams(learning_rate=0.02)  # training.optim_step(params)
        >>> params.to_wire()
        {'type': 'dimuon', 'learning_rate': 0.02, 'grad_clip_norm': 0.0, 'beta1': 0.9}
    """

    __slots__ = ()
    KIND = "dimuon"

    learning_rate: float
    grad_clip_norm: float
    beta1: float

    def __init__(
        self,
        *,
        learning_rate: float,
        grad_clip_norm: float = 0.0,
        beta1: float = 0.9,
        type: Literal["dimuon"] = "dimuon",
    ) -> None:
        fields = {"learning_rate": learning_rate, "grad_clip_norm": grad_clip_norm, "beta1": beta1}
        fields = {name: number(value, name) for name, value in fields.items()}
        for name, value in fields.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number")
        if fields["learning_rate"] < 0:
            raise ValueError("learning_rate must be a number >= 0")
        if not 0 <= fields["beta1"] < 1:
            raise ValueError("beta1 must be in [0, 1)")
        super().__init__(type=type, **fields)


OptimParams: TypeAlias = AdamParams | OptimParamsBase
"""The hyper-parameters of one optimizer step."""


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


class UntypedAPIFuture(Record, frozen=True, kw_only=True):
    """A receipt: the id under which the result of a submitted operation can be fetched.

    Example:
        >>> UntypedAPIFuture(request_id="request-1", model_id="run-1").request_id
        'request-1'
    """

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


if TYPE_CHECKING:
    Data: TypeAlias = list[Datum]
else:
    # msgspec would take a dataclass apart by itself; data are read by their own rules below.
    Data = list[Any]


class ForwardBackwardInput(Record, frozen=True):
    """Data and loss of one pass.

    Example:
        >>> datum = Datum(
        ...     ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
        ... )
        >>> ForwardBackwardInput(data=[datum], loss_fn="cross_entropy").loss_fn
        'cross_entropy'
    """

    data: Data
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(datum, Datum) for datum in self.data):
            settle(self, "data", [_datum(datum, index) for index, datum in enumerate(self.data)])


def _datum(value: Any, index: int) -> Datum:
    try:
        return Datum.model_validate(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data[{index}]: {error}") from None


class ForwardBackwardRequest(Record, frozen=True):
    """A pass over data: forward only, or with its gradient added to the model's buffer.

    Example:
        >>> work = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        >>> ForwardBackwardRequest(
        ...     forward_backward_input=work, model_id="run-1", seq_id=3
        ... ).forward_only
        False
    """

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: Int64 | None = None
    forward_only: bool = False


class ForwardRequest(Record, frozen=True):
    """A forward pass, as clients before 0.25 send it.

    Example:
        >>> work = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        >>> ForwardRequest(forward_input=work, model_id="run-1").forward_input.loss_fn
        'cross_entropy'
    """

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: Int64 | None = None


@dataclasses.dataclass(init=False, repr=False, frozen=True, slots=True)
class ForwardBackwardOutput(Wired):
    """Tensors per datum, in the order of the data, and metrics named `name:reduction`.

    Example:
        >>> outputs = [{"logprobs": TensorData([-0.5, -0.25], "float32")}]
        >>> result = ForwardBackwardOutput(
        ...     "logprobs", outputs, {"loss:sum": 0.75, "tokens:sum": 2.0}
        ... )
        >>> (
        ...     result.metrics["loss:sum"] / result.metrics["tokens:sum"],
        ...     result.loss_fn_outputs[0]["logprobs"].tolist(),
        ... )
        (0.375, [-0.5, -0.25])
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("loss_fn_output_type", "loss_fn_outputs", "metrics")

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __init__(
        self,
        loss_fn_output_type: str,
        loss_fn_outputs: list[LossFnOutput],
        metrics: dict[str, float] | None = None,
    ) -> None:
        put(self, "loss_fn_output_type", loss_fn_output_type)
        put(self, "loss_fn_outputs", loss_fn_outputs)
        put(self, "metrics", {} if metrics is None else metrics)

    @property
    def loss(self) -> float | None:
        """The metric `loss`, else the sum of the losses, else None."""
        return self.metrics.get("loss", self.metrics.get("loss:sum"))

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it.

        Example:
            >>> ForwardBackwardOutput("scalar", [], {"loss:sum": 0.75}).to_wire()
            {'loss_fn_output_type': 'scalar', 'loss_fn_outputs': [], 'metrics': {'loss:sum': 0.75}}
        """
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": [
                {name: tensor.to_wire() for name, tensor in output.items()}
                for output in self.loss_fn_outputs
            ],
            "metrics": in_order(self.metrics),
        }

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form.

        Args:
            value: Decoded JSON.

        Returns:
            The value.

        Raises:
            ValueError: Something is missing or not of its kind.

        Example:
            >>> outputs = [{"logprobs": {"data": [-0.5], "dtype": "float32"}}]
            >>> ForwardBackwardOutput.from_wire(
            ...     {"loss_fn_outputs": outputs, "metrics": {"loss:sum": 0.5}}
            ... ).loss
            0.5
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("loss_fn_outputs"), list):
            raise ValueError("a forward_backward result must be an object with loss_fn_outputs")
        outputs = [
            {name: _read_tensor(tensor) for name, tensor in output.items()}
            for output in value["loss_fn_outputs"]
        ]
        return cls(
            str(value.get("loss_fn_output_type", "")), outputs, dict(value.get("metrics") or {})
        )

    def __hash__(self) -> int:
        return hash((self.loss_fn_output_type, len(self.loss_fn_outputs), *self.metrics))

    def __repr__(self) -> str:
        return (
            f"ForwardBackwardOutput({len(self.loss_fn_outputs)} outputs, metrics={self.metrics!r})"
        )

    def __reduce__(self) -> Any:
        return (type(self), (self.loss_fn_output_type, self.loss_fn_outputs, self.metrics))


FIRST_METRICS = ("loss:sum", "tokens:sum")


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics in their usual order: the loss, the tokens, then the others by name.

    Example:
        >>> in_order({"clipped:mean": 0.1, "tokens:sum": 8.0, "loss:sum": 2.0})
        {'loss:sum': 2.0, 'tokens:sum': 8.0, 'clipped:mean': 0.1}
    """
    first = [name for name in FIRST_METRICS if name in metrics]
    return {name: metrics[name] for name in (*first, *sorted(metrics.keys() - set(first)))}


def _read_tensor(value: Any) -> TensorData:
    """A tensor of a result; servers of old may have written a bare list of numbers."""
    return (
        TensorData.from_any(value, "float32")
        if isinstance(value, list)
        else TensorData.from_wire(value)
    )


if TYPE_CHECKING:
    AnyParams: TypeAlias = OptimParams | Mapping[str, Any] | None
else:
    AnyParams = dict[str, Any] | None


class OptimStepRequest(Record, frozen=True, kw_only=True):
    """Apply the accumulated gradient.

    The parameters may be given under any of three names, once. Afterwards `optim_params` has them;
    they are sent as `adam_params` when they are AdamW's, else as `optimizer_params`, and the other
    of the two is None.

    Example:
        >>> request = OptimStepRequest(
        ...     model_id="run-1", optim_params=AdamParams(learning_rate=1e-3)
        ... )
        >>> request.adam_params.learning_rate, request.optimizer_params is None
        (0.001, True)
    """

    NOT_SENT: ClassVar[frozenset[str]] = frozenset({"optim_params"})

    model_id: ModelID
    seq_id: Int64 | None = None
    optim_params: AnyParams = None
    adam_params: AdamParams | None = None
    optimizer_params: AnyParams = None
    type: Literal["optim_step"] = "optim_step"

    def __post_init__(self) -> None:
        given = {
            id(params): params for name in _PARAMS if (params := getattr(self, name)) is not None
        }
        if len(given) != 1:
            raise ValueError(
                "an optimizer step needs parameters, once: optim_params, adam_params or "
                "optimizer_params"
            )
        params = _optim_params(*given.values())
        settle(self, "optim_params", params)
        settle(self, "adam_params", params if isinstance(params, AdamParams) else None)
        settle(self, "optimizer_params", params if isinstance(params, OptimParamsBase) else None)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields as a dictionary, as they are sent.

        Args:
            options: As for every record; see `Record.model_dump`.

        Returns:
            The dictionary.

        Example:
            >>> sorted(
            ...     OptimStepRequest(
            ...         model_id="run-1", optim_params=DimuonParams(learning_rate=0.02)
            ...     ).model_dump()
            ... )
            ['model_id', 'optimizer_params', 'seq_id', 'type']
        """
        dumped = super().model_dump(**options)
        return {
            name: value
            for name, value in dumped.items()
            if value is not None or name not in _PARAMS
        }

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields replaced.

        Args:
            update: Fields to replace.
            deep: Copy what is inside, too.

        Returns:
            The copy.

        Example:
            >>> request = OptimStepRequest(model_id="run-1", optim_params=AdamParams())
            >>> request.model_copy(
            ...     update={"optim_params": DimuonParams(learning_rate=0.02)}
            ... ).adam_params is None
            True
        """
        update = dict(update or {})
        if not update.keys().isdisjoint(_PARAMS):
            update = dict.fromkeys(_PARAMS) | update
        return super().model_copy(update=update, deep=deep)


_PARAMS = ("optim_params", "adam_params", "optimizer_params")


def _optim_params(value: Any) -> OptimParams:
    if isinstance(value, AdamParams | OptimParamsBase):
        return value
    if isinstance(value, Mapping) and "type" in value:
        return OptimParamsBase.from_wire(value)
    return from_builtins(AdamParams, value)


class OptimStepResponse(Record, frozen=True, kw_only=True):
    """Result of an optimizer step.

    Example:
        >>> step = OptimStepResponse(
        ...     metrics={"grad_norm": 0.4}
        ... )  # training.optim_step(AdamParams()).result()
        >>> step.success, (step.metrics or {}).get("grad_norm")
        (True, 0.4)
    """

    metrics: dict[str, float] | None = None

    @property
    def success(self) -> bool:
        """Always true: a step that fails is an error instead."""
        return True
