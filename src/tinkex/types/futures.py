"""Results of polls, and the states of queued work."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self, TypeAlias

from tinkex.types.future_requests import RequestFailedResponse, TryAgainResponse
from tinkex.types.model_requests import CreateModelResponse, UnloadModelResponse
from tinkex.types.saves import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse

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
"""Any result of an operation."""


class QueueState(StrEnum):
    """Progress of queued work: active or paused, and why.

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
        """Return the state that a text names, ignoring case and outer blanks; unknown otherwise.

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
