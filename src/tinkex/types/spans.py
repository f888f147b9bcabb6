"""Spans that say which sample an input's tokens came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tinkex.types.record import whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("length", "offset"):
            if whole(getattr(self, field), f"{name}.{field}") < 0:
                raise ValueError(f"{name}.{field} must be >= 0, got {getattr(self, field)}")
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise ValueError(f"{name}.sequence_id must be a text, and not empty")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptProvenanceSpan(_Span):
    """A run of tokens that stood in the prompt of an earlier sampling request.

    Attributes:
        sequence_id: A `SampledSequence.sequence_id` of that request.
        offset: Where the run starts in its prompt.
        length: How many tokens it takes.

    Example:
        >>> PromptProvenanceSpan(sequence_id="seq-1", length=12)  # the whole prompt of a sample
        PromptProvenanceSpan(sequence_id='seq-1', offset=0, length=12)
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampledProvenanceSpan(_Span):
    """A run of tokens that an earlier sampling request drew.

    The attributes are those of `PromptProvenanceSpan`; `offset` counts from the sample's start.

    Example:
        >>> SampledProvenanceSpan(
        ...     sequence_id="seq-1", offset=4, length=8
        ... )  # what follows the first four sampled tokens
        SampledProvenanceSpan(sequence_id='seq-1', offset=4, length=8)
    """


ProvenanceSpan: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan
"""Origin of some tokens of a datum: written by hand, or sampled."""


ProvenanceSpans: TypeAlias = list[ProvenanceSpan]
"""Origin of all tokens of a datum, in order."""


SPANS: dict[str, type[ProvenanceSpan]] = {
    "prompt_tokens": PromptProvenanceSpan,
    "sampled_tokens": SampledProvenanceSpan,
}


def spans(value: Any, name: str) -> ProvenanceSpans | None:
    """Spans as given, or read from JSON, where each is an object of one key that names its kind."""
    if value is None:
        return None
    spans: ProvenanceSpans = []
    for span in value:
        if isinstance(span, Mapping) and len(span) == 1 and (kind := next(iter(span))) in SPANS:
            span = SPANS[kind](**span[kind])
        if not isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan):
            known = "PromptProvenanceSpan or SampledProvenanceSpan"
            raise TypeError(f"{name} must hold {known}, got {type(span).__name__}")
        spans.append(span)
    return spans


def span_wire(span: ProvenanceSpan) -> dict[str, Any]:
    """Return a span as JSON has it."""
    kind = "prompt_tokens" if isinstance(span, PromptProvenanceSpan) else "sampled_tokens"
    return {kind: {"sequence_id": span.sequence_id, "offset": span.offset, "length": span.length}}


def check_tiling(name: str, spans: Sequence[ProvenanceSpan], length: int) -> None:
    """Raise ValueError unless the spans cover `length` positions."""
    if (covered := sum(span.length for span in spans)) != length:
        raise ValueError(
            f"the spans of {name} cover {covered} positions of {length}; they must cover each once"
        )
