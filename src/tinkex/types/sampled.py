"""Results of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np

from tinkex.types.chunks import token_array
from tinkex.types.record import Wired, is_same, number, parse_literal, put, whole
from tinkex.types.tensors import Array, TensorData

StopReason: TypeAlias = Literal["length", "stop"]
"""Why a sample ended: at its longest, or at a stop token or string."""


TopkList: TypeAlias = list[list[tuple[int, float]] | None]
"""Likeliest tokens and log-probabilities at each position; None where none were computed."""


EMPTY_CELL = -99999.0
"""Log-probability of an unused cell in a top-k table; its token id is 0."""


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class TopkLogprobs:
    """The k likeliest tokens at each position, best first; unused cells hold EMPTY_CELL.

    Example:
        >>> table = TopkLogprobs(np.array([[464, 262]]), np.array([[-0.5, -1.5]]))
        >>> table.tolist()
        [[(464, -0.5), (262, -1.5)]]
    """

    token_ids: Array
    logprobs: Array

    def tolist(self) -> TopkList:
        """Pairs per position; None where nothing was computed.

        Example:
            >>> ids, logprobs = np.array([[0], [464]]), np.array([[EMPTY_CELL], [-0.5]])
            >>> TopkLogprobs(ids, logprobs).tolist()
            [None, [(464, -0.5)]]
        """
        if self.token_ids.size == 0:
            return []
        rows: TopkList = []
        for ids, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            row = [(i, p) for i, p in zip(ids, logprobs, strict=True) if p != EMPTY_CELL]
            rows.append(row or None)
        return rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        return is_same(self.token_ids, other.token_ids) and is_same(self.logprobs, other.logprobs)

    def __hash__(self) -> int:
        return hash(self.token_ids.shape)


class _Sampled(Wired):
    """A result with arrays, and with lists that were given instead or made of them when read."""

    __slots__ = ()

    def _listed(self, name: str) -> Any:
        """Return a field as a list; one that is made of an array is kept."""
        listed = getattr(self, f"_{name}_list")
        if listed is None and (array := getattr(self, f"{name}_np")) is not None:
            listed = array.tolist()
            put(self, f"_{name}_list", listed)
        return listed

    def _state(self) -> tuple[Any, ...]:
        """The fields, without lists that can be made again."""
        return tuple(
            None
            if name.endswith("_list") and getattr(self, f"{name[1:-5]}_np") is not None
            else getattr(self, name)
            for name in self._names()
        )


@dataclasses.dataclass(eq=False, repr=False, frozen=True, slots=True)
class SampledSequence(_Sampled):
    """One sample.

    `tokens` and `logprobs` read as lists; `tokens_np` and `logprobs_np` are the arrays behind them.

    Example:
        >>> told = {"tokens": [7, 2], "logprobs": [-0.5, -0.25], "stop_reason": "stop"}
        >>> sequence = SampledSequence.from_wire(told)  # sampler.sample(...).result().sequences[0]
        >>> sequence.tokens, sequence.logprobs, sequence.stop_reason
        ([7, 2], [-0.5, -0.25], 'stop')
    """

    FORM: ClassVar = ("tokens", list, "a sampled sequence must be an object with tokens")

    stop_reason: StopReason
    sequence_id: str = ""
    tokens_np: Array | None = None
    logprobs_np: Array | None = None
    topk_logprobs_np: TopkLogprobs | None = None
    # Lists that were given instead of arrays, or made of arrays when somebody asked for them.
    _tokens_list: list[int] | None = None
    _logprobs_list: list[float] | None = None
    _topk_logprobs_list: TopkList | None = None
    weights_versions_np: Array | None = None

    @property
    def weights_versions(self) -> list[int] | None:
        """Version of the weights that drew each token; only tinkex's in-flight samplers report it.

        Versions count a run's in-flight saves from 1.

        Example:
            >>> told = {"tokens": [7, 2], "stop_reason": "stop", "weights_versions": [1, 2]}
            >>> SampledSequence.from_wire(told).weights_versions
            [1, 2]
        """
        return None if self.weights_versions_np is None else self.weights_versions_np.tolist()

    @property
    def tokens(self) -> list[int]:
        """The sampled token ids, the stopping token included."""
        tokens: list[int] | None = self._listed("tokens")
        return tokens or []

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each sampled token, temperature applied."""
        listed: list[float] | None = self._listed("logprobs")
        return listed

    @property
    def topk_logprobs(self) -> TopkList | None:
        """The likeliest tokens at each position, when asked for."""
        listed: TopkList | None = self._listed("topk_logprobs")
        return listed

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) if self.tokens_np is None else int(self.tokens_np.size)

    def named(self, sequence_id: str) -> SampledSequence:
        """The same sample under another id.

        Args:
            sequence_id: The id.

        Returns:
            A new sample.

        Example:
            >>> SampledSequence("stop").named("seq-1").sequence_id
            'seq-1'
        """
        return SampledSequence(self.stop_reason, sequence_id, *self._state()[2:])

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it.

        Example:
            >>> SampledSequence("length", tokens_np=np.array([7, 2])).to_wire()
            {'stop_reason': 'length', 'tokens': [7, 2], 'logprobs': None}
        """
        wire: dict[str, Any] = {
            "stop_reason": self.stop_reason,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
        }
        if self.weights_versions_np is not None:
            wire["weights_versions"] = self.weights_versions
        return wire

    @classmethod
    def _read(cls, value: Any) -> Self:
        return cls(
            stop_reason=parse_literal(StopReason, value.get("stop_reason")),
            sequence_id=value.get("sequence_id") or "",
            tokens_np=token_array(value["tokens"]),
            logprobs_np=_floats(value.get("logprobs")),
            _topk_logprobs_list=_topk(value.get("topk_logprobs")),
            weights_versions_np=_versions(value.get("weights_versions"), len(value["tokens"])),
        )

    def __repr__(self) -> str:
        return f"SampledSequence({self.length} tokens, stop_reason={self.stop_reason!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Alternative tokens drawn at each prompt position after the first, `[P-1, k]`.

    Example:
        >>> tokens, logprobs = np.array([[464, 262]]), np.array([[-0.5, -1.5]])
        >>> alternatives = PromptAltTokens(
        ...     TensorData.from_numpy(tokens), TensorData.from_numpy(logprobs)
        ... )
        >>> alternatives.tokens.tolist()
        [[464, 262]]
    """

    tokens: TensorData
    logprobs: TensorData


@dataclasses.dataclass(eq=False, repr=False, frozen=True, slots=True)
class SampleResponse(_Sampled):
    """The samples of one request and whatever was asked about its prompt.

    Example:
        >>> sequence = SampledSequence("stop", tokens_np=np.array([7, 2]))
        >>> answer = SampleResponse([sequence])  # sampler.sample(...).result()
        >>> [sequence.tokens for sequence in answer.sequences], answer.prompt_logprobs is None
        ([[7, 2]], True)
    """

    FORM: ClassVar = ("sequences", list, "a sample result must be an object with sequences")

    sequences: list[SampledSequence]
    prompt_logprobs_np: Array | None = None
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    # Lists that were given instead of arrays, or made of arrays when somebody asked for them.
    _prompt_logprobs_list: list[float | None] | None = None
    _topk_prompt_logprobs_list: TopkList | None = None

    def __post_init__(self) -> None:
        put(self, "sequences", list(self.sequences))

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One value per prompt token; None where there is none, as for the first."""
        if self._prompt_logprobs_list is None and self.prompt_logprobs_np is not None:
            listed = [None if p != p else p for p in self.prompt_logprobs_np.tolist()]
            put(self, "_prompt_logprobs_list", listed)
        return self._prompt_logprobs_list

    @property
    def topk_prompt_logprobs(self) -> TopkList | None:
        """The likeliest tokens at each prompt position, when asked for."""
        listed: TopkList | None = self._listed("topk_prompt_logprobs")
        return listed

    def named(self, sequence_ids: Sequence[str]) -> SampleResponse:
        """The same answer with these ids for its first so many samples.

        Args:
            sequence_ids: The ids.

        Returns:
            A new answer.

        Example:
            >>> SampleResponse([SampledSequence("stop")]).named(["seq-1"]).sequences[0].sequence_id
            'seq-1'
        """
        count = len(sequence_ids)
        named = [
            sequence.named(name)
            for sequence, name in zip(self.sequences, sequence_ids, strict=False)
        ]
        return SampleResponse(named + self.sequences[count:], *self._state()[1:])

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it.

        Example:
            >>> SampleResponse([SampledSequence("stop", tokens_np=np.array([7]))]).to_wire()[
            ...     "sequences"
            ... ]
            [{'stop_reason': 'stop', 'tokens': [7], 'logprobs': None}]
        """
        wire: dict[str, Any] = {
            "sequences": [s.to_wire() for s in self.sequences],
            "type": "sample",
        }
        if (logprobs := self.prompt_logprobs) is not None:
            wire["prompt_logprobs"] = logprobs
        if (topk := self.topk_prompt_logprobs) is not None:
            wire["topk_prompt_logprobs"] = topk
        if self.prompt_cache_hit_tokens:
            wire["prompt_cache_hit_tokens"] = self.prompt_cache_hit_tokens
        return wire

    @classmethod
    def _read(cls, value: Any) -> Self:
        return cls(
            [SampledSequence.from_wire(item) for item in value["sequences"]],
            prompt_logprobs_np=_floats(value.get("prompt_logprobs")),
            prompt_cache_hit_tokens=whole(
                value.get("prompt_cache_hit_tokens") or 0, "prompt_cache_hit_tokens"
            ),
            _topk_prompt_logprobs_list=_topk(value.get("topk_prompt_logprobs")),
        )

    def __repr__(self) -> str:
        return f"SampleResponse({self.sequences!r})"


def _floats(values: list[float | None] | None) -> Array | None:
    if values is None:
        return None
    return np.asarray([np.nan if v is None else v for v in values], dtype=np.float32)


def _versions(values: Any, tokens: int) -> Array | None:
    """The versions of the weights behind so many tokens."""
    if values is None:
        return None
    try:
        versions = np.array(values, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"malformed weights_versions: {error}") from None
    if versions.shape != (tokens,):
        raise ValueError(
            f"malformed weights_versions: there are {tokens} tokens, and {versions.size} versions"
        )
    return versions


def _topk(rows: Any) -> TopkList | None:
    """Tables of the JSON dialects: a row is absent, or a list of pairs or of objects."""
    if rows is None:
        return None
    try:
        return [None if row is None else [_pair(cell) for cell in row] for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"malformed top-k log-probabilities: {error!r}") from None


def _pair(cell: Any) -> tuple[int, float]:
    token, logprob = (cell["token_id"], cell["logprob"]) if isinstance(cell, Mapping) else cell
    return whole(token, "token_id"), number(logprob, "logprob")
