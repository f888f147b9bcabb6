"""Optimizers: configurations of a run and parameters of a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeAlias

from tinkex.types.record import Fixed, Record, check_depth, from_builtins, number, put, settle


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


def optim_params(value: Any) -> OptimParams:
    """Return a value as parameters of a step."""
    if isinstance(value, AdamParams | OptimParamsBase):
        return value
    if isinstance(value, Mapping) and "type" in value:
        return OptimParamsBase.from_wire(value)
    return from_builtins(AdamParams, value)
