"""Requests for results, the answers of a poll, and the states of queued work."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import msgspec

from tinkex.types.forms import Variant
from tinkex.types.record import Int64, Record, settle, whole
from tinkex.types.saves import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.sessions import CreateModelResponse, UnloadModelResponse
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse


class FutureRetrieveRequest(Record, frozen=True, kw_only=True):
    """Ask for the result of a submitted operation.

    Example:
        >>> FutureRetrieveRequest(request_id="request-1").allow_metadata_only
        False
    """

    request_id: str
    allow_metadata_only: bool = False


class CancelFutureRequest(Record, frozen=True, kw_only=True):
    """Give a submitted operation up.

    Example:
        >>> CancelFutureRequest(request_id="request-1").request_id
        'request-1'
    """

    request_id: str


class LenientEnum(StrEnum):
    """Words of the wire with an `unknown` among them, for the words of later servers."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Return the member that a text names, ignoring case and outer blanks; unknown otherwise.

        Args:
            value: The text, if there is one.

        Returns:
            The member.

        Example:
            >>> RequestErrorCategory.parse("USER"), QueueState.parse(" Paused_Capacity ")
            (<RequestErrorCategory.User: 'user'>, <QueueState.PAUSED_CAPACITY: 'paused_capacity'>)
        """
        name = value.strip().lower() if isinstance(value, str) else "unknown"
        return cls(name if name in cls._value2member_map_ else "unknown")


class RequestErrorCategory(LenientEnum):
    """Cause of a failed operation: the server, the user, or unknown.

    Example:
        >>> RequestErrorCategory("server").is_retryable, RequestErrorCategory("user").is_retryable
        (True, False)
    """

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        # A category that a later server may have must not make its answer unreadable.
        return cls.parse(value) if isinstance(value, str) else None

    @property
    def is_retryable(self) -> bool:
        """True if the operation may succeed when it is submitted again."""
        return self != RequestErrorCategory.User


class RequestFailedResponse(Record, frozen=True, kw_only=True):
    """An operation that failed; final.

    Example:
        >>> failed = RequestFailedResponse.model_validate(
        ...     {"error": "no such loss", "category": "user"}
        ... )
        >>> failed.error, failed.category.is_retryable
        ('no such loss', False)
    """

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


class TryAgainResponse(Record, frozen=True, kw_only=True):
    """Answer for an operation that is still running; raises `ValueError` if it is inconsistent.

    Example:
        >>> waiting = TryAgainResponse(
        ...     request_id="request-1", queue_state="paused_capacity", retry_after_ms=500
        ... )
        >>> waiting.queue_state, waiting.retry_after_ms
        ('paused_capacity', 500)
    """

    request_id: str
    queue_state: str
    queue_state_reason: str | None = None
    retry_after_ms: int | None = None
    type: str = "try_again"

    def __post_init__(self) -> None:
        for name in ("request_id", "queue_state", "type"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.type.lower() != "try_again":
            raise ValueError(f"type must be try_again, got {self.type!r}")
        if self.queue_state_reason is not None and not isinstance(self.queue_state_reason, str):
            raise ValueError(f"queue_state_reason must be a text, got {self.queue_state_reason!r}")
        if self.retry_after_ms is not None and whole(self.retry_after_ms, "retry_after_ms") < 0:
            raise ValueError(f"retry_after_ms must be 0 or more, got {self.retry_after_ms}")
        settle(self, "type", "try_again")


class SamplingSessionFuturesTarget(Record, frozen=True, kw_only=True):
    """Sampler whose results a batched poll waits for.

    Example:
        >>> SamplingSessionFuturesTarget(sampling_session_id="sampler-1").type
        'sampling_session'
    """

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Int64 = 0


class FuturesRetrieveRequest(Record, frozen=True, kw_only=True):
    """Ask which operations have ended since the last time.

    Example:
        >>> target = SamplingSessionFuturesTarget(sampling_session_id="sampler-1")
        >>> FuturesRetrieveRequest(target=target, prev_cursor=12).prev_cursor
        12
    """

    target: SamplingSessionFuturesTarget
    prev_cursor: Int64 = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)
    inline_bytes: Int64 | None = None
    """Most bytes of results that the answer may carry; needs a server with `batched_results`."""


class CompletionMark(Variant):
    """Outcome of an operation."""

    __slots__ = ()
    TAG = "state"


class FutureFinished(Record, CompletionMark, frozen=True, kw_only=True):
    """An operation whose result is there.

    Example:
        >>> done = FutureFinished(request_id="request-1", content_type="application/json")
        >>> done.state, done.content_type
        ('finished', 'application/json')
    """

    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None
    content_type: str | None = None
    inline_size: int | None = None
    """Bytes of the answer that hold this result, if it came along; see `codec.decode_batch`."""


class FutureFailed(Record, CompletionMark, frozen=True, kw_only=True):
    """An operation that failed.

    Example:
        >>> told = {"completions": [{"state": "failed", "request_id": "request-1"}], "cursor": 13}
        >>> for ended in FuturesRetrieveResponse.model_validate(told).completions:
        ...     print(ended.request_id, ended.state)
        request-1 failed
    """

    state: Literal["failed"] = "failed"
    request_id: str
    content_type: str | None = None
    inline_size: int | None = None


FutureCompletion: TypeAlias = FutureFinished | FutureFailed
"""A sample that has ended, well or not."""


class FuturesRetrieveResponse(Record, frozen=True, kw_only=True):
    """Operations that have ended, and where to carry on.

    Example:
        >>> told = {"completions": [{"state": "finished", "request_id": "request-1"}], "cursor": 13}
        >>> answer = FuturesRetrieveResponse.model_validate(told)
        >>> (
        ...     [done.request_id for done in answer.completions if done.state == "finished"],
        ...     answer.cursor,
        ... )
        (['request-1'], 13)
    """

    completions: list[_Completion]
    cursor: int


class QueueState(LenientEnum):
    """Progress of queued work: active or paused, and why.

    Example:
        >>> QueueState("paused_capacity") is QueueState.PAUSED_CAPACITY
        True
    """

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"


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


if TYPE_CHECKING:  # a union for readers; msgspec reads by the mark
    _Completion: TypeAlias = FutureCompletion
else:
    _Completion = CompletionMark
