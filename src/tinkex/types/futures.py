"""What a poll may return, and the states of queued work."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self, TypeAlias

from tinkex.types.checkpoints import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.sessions import RequestFailedResponse, TryAgainResponse
from tinkex.types.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    OptimStepResponse,
    UnloadModelResponse,
)

FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""Whatever an operation may result in."""


class QueueState(StrEnum):
    """Whether work that is still to be done moves on.

    Example:
        >>> QueueState("paused_capacity") is QueueState.PAUSED_CAPACITY
        True
    """

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The state a text names, whatever its case and surrounding blanks; anything else is
        unknown.

        Args:
            value: The text.

        Returns:
            The state.

        Example:
            >>> QueueState.parse(" Paused_Capacity ")
            <QueueState.PAUSED_CAPACITY: 'paused_capacity'>
        """
        name = value.strip().lower() if isinstance(value, str) else "unknown"
        return cls(name) if name in cls._value2member_map_ else cls("unknown")
