"""Requests and results of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from tinkex.types.inputs import Datum, LossFnOutput
from tinkex.types.optimizers import AdamParams, OptimParams, OptimParamsBase, optim_params
from tinkex.types.record import Int64, Record, Wired, put, settle, settle_each, whole
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

OWN_LOSSES: tuple[str, ...] = ()
"""The losses that tinkex alone names."""


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
        settle_each(self, whole, ("rank",), optional=("seed",))


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


@dataclasses.dataclass(init=False, eq=False, repr=False, frozen=True, slots=True)
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

    FORM: ClassVar = (
        "loss_fn_outputs",
        list,
        "a forward_backward result must be an object with loss_fn_outputs",
    )

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
    def _read(cls, value: Any) -> Self:
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
        params = optim_params(*given.values())
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
