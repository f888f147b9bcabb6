"""Messages of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np

from tinkex.types.inputs import ModelInput
from tinkex.types.record import Record
from tinkex.types.tensors import Array, TensorData

StopReason: TypeAlias = Literal["length", "stop"]

EMPTY_CELL = -99999.0
"""Log-probability of an unused cell in a top-k table; its token id is 0."""


class SamplingParams(Record, frozen=True, kw_only=True):
    """How to sample. `stop` absent ends at the end-of-text tokens; an empty list never stops early.

    Example:
        >>> SamplingParams(max_tokens=16, temperature=0.7).top_k
        -1
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop, list | tuple) and len({isinstance(item, str) for item in self.stop}) > 1:
            raise ValueError("stop must be all strings or all token ids")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError("max_tokens must be >= 0")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError("temperature must be a number >= 0")
        if self.top_k < -1 or self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p must be in (0, 1]")


class SampleRequest(Record, frozen=True, kw_only=True):
    """Ask for samples and, optionally, for log-probabilities of the prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class TopkLogprobs:
    """The k likeliest tokens at each of `length` positions, best first; unused cells hold EMPTY_CELL."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, token_ids: Array, logprobs: Array) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """Pairs per position; None where nothing was computed."""
        rows: list[list[tuple[int, float]] | None] = []
        for ids, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            row = [(i, p) for i, p in zip(ids, logprobs, strict=True) if p != EMPTY_CELL]
            rows.append(row or None)
        return rows


class SampledSequence:
    """One sample. `tokens` and `logprobs` read as lists; `tokens_np` and `logprobs_np` are the arrays behind them."""

    __slots__ = ("logprobs_np", "sequence_id", "stop_reason", "tokens_np", "topk_logprobs_np")

    def __init__(
        self,
        stop_reason: StopReason,
        sequence_id: str = "",
        tokens_np: Array | None = None,
        logprobs_np: Array | None = None,
        topk_logprobs_np: TopkLogprobs | None = None,
    ) -> None:
        self.stop_reason: StopReason = stop_reason
        self.sequence_id = sequence_id
        self.tokens_np = tokens_np
        self.logprobs_np = logprobs_np
        self.topk_logprobs_np = topk_logprobs_np

    @property
    def tokens(self) -> list[int]:
        """The sampled token ids, the stopping token included."""
        return [] if self.tokens_np is None else cast("list[int]", self.tokens_np.tolist())

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each sampled token, temperature applied."""
        return None if self.logprobs_np is None else cast("list[float]", self.logprobs_np.tolist())

    @property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """The likeliest tokens at each position, when asked for."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.tolist()

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it."""
        return {"stop_reason": self.stop_reason, "tokens": self.tokens, "logprobs": self.logprobs}

    def __repr__(self) -> str:
        return f"SampledSequence({len(self.tokens)} tokens, stop_reason={self.stop_reason!r})"

    def __reduce__(self) -> Any:
        state = (
            self.stop_reason,
            self.sequence_id,
            self.tokens_np,
            self.logprobs_np,
            self.topk_logprobs_np,
        )
        return (type(self), state)


class PromptAltTokens:
    """Alternative tokens drawn at each prompt position after the first, `[P-1, k]`."""

    __slots__ = ("logprobs", "tokens")

    def __init__(self, tokens: TensorData, logprobs: TensorData) -> None:
        self.tokens = tokens
        self.logprobs = logprobs


class SampleResponse:
    """The samples of one request and whatever was asked about its prompt."""

    __slots__ = (
        "prompt_alt_tokens",
        "prompt_cache_hit_tokens",
        "prompt_logprobs_np",
        "sequences",
        "target_prompt_logprobs",
        "topk_prompt_logprobs_np",
    )

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs_np: Array | None = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self.prompt_logprobs_np = prompt_logprobs_np
        self.topk_prompt_logprobs_np = topk_prompt_logprobs_np
        self.target_prompt_logprobs = target_prompt_logprobs
        self.prompt_cache_hit_tokens = prompt_cache_hit_tokens
        self.prompt_alt_tokens = prompt_alt_tokens

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One value per prompt token; None where there is none, as for the first."""
        if self.prompt_logprobs_np is None:
            return None
        return [None if p != p else p for p in self.prompt_logprobs_np.tolist()]

    @property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """The likeliest tokens at each prompt position, when asked for."""
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.tolist()

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it."""
        wire: dict[str, Any] = {"sequences": [s.to_wire() for s in self.sequences], "type": "sample"}
        if self.prompt_logprobs_np is not None:
            wire["prompt_logprobs"] = self.prompt_logprobs
        if self.topk_prompt_logprobs_np is not None:
            wire["topk_prompt_logprobs"] = self.topk_prompt_logprobs
        return wire

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        if not isinstance(value, Mapping) or not isinstance(value.get("sequences"), list):
            raise ValueError("a sample result must be an object with sequences")
        sequences = [
            SampledSequence(
                stop_reason=item["stop_reason"],
                tokens_np=np.asarray(item["tokens"], dtype=np.int32),
                logprobs_np=_floats(item.get("logprobs")),
            )
            for item in value["sequences"]
        ]
        return cls(sequences, prompt_logprobs_np=_floats(value.get("prompt_logprobs")))

    def __repr__(self) -> str:
        return f"SampleResponse({self.sequences!r})"

    def __reduce__(self) -> Any:
        return (type(self), tuple(getattr(self, name) for name in _RESPONSE_ORDER))


_RESPONSE_ORDER = (
    "sequences",
    "prompt_logprobs_np",
    "topk_prompt_logprobs_np",
    "target_prompt_logprobs",
    "prompt_cache_hit_tokens",
    "prompt_alt_tokens",
)


def _floats(values: list[float | None] | None) -> Array | None:
    if values is None:
        return None
    return np.asarray([np.nan if v is None else v for v in values], dtype=np.float32)


class CreateSamplingSessionRequest(Record, frozen=True, kw_only=True):
    """Bind a sampler to a base model or a saved checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Record, frozen=True, kw_only=True):
    """The id of a new sampler."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class GetSamplerResponse(Record, frozen=True, kw_only=True):
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
