"""Provenance: from the spans of training data to the recordings of the samples that they are made
of.

Only the loss `stable_reinforce` reads spans. Tokens of a prompt are not compared with it: programs
send zeros as targets there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from tinkex.engine.api import EngineError, Recalled, Recording
from tinkex.server.samples.sampling_records import Remembered, SamplingRecords, parts_of
from tinkex.types.inputs import Datum
from tinkex.types.spans import ProvenanceSpans, SampledProvenanceSpan


async def recall(
    records: SamplingRecords, session_id: str, data: Sequence[Datum], *, is_replayed: bool
) -> tuple[list[Recalled], frozenset[str]]:
    """The recording behind each datum, and the ids of all samples that the data name.

    Raises:
        EngineError: Spans are missing, do not fit their datum, or name a sample that cannot be
            trained on.
    """
    spans = [_spans_of(index, datum) for index, datum in enumerate(data)]
    names = frozenset(span.sequence_id for both in spans for side in both for span in side)
    wanted = {
        span.sequence_id
        for _, side in spans
        for span in side
        if isinstance(span, SampledProvenanceSpan)
    }
    found = await records.recall(session_id, names, wanted, expired=is_replayed)

    def resolve() -> list[Recalled]:
        return [_resolve(index, datum, *spans[index], found) for index, datum in enumerate(data)]

    return await asyncio.to_thread(resolve), names


def _spans_of(index: int, datum: Datum) -> tuple[ProvenanceSpans, ProvenanceSpans]:
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        raise EngineError(
            f"datum {index} has no provenance, which 'stable_reinforce' needs: say with "
            "Datum.with_provenance which "
            "samples its tokens come from"
        )
    return datum.model_input_spans, datum.loss_fn_input_spans


def _resolve(
    index: int,
    datum: Datum,
    inputs: ProvenanceSpans,
    targets: ProvenanceSpans,
    found: Mapping[str, Remembered],
) -> Recalled:
    try:
        length = datum.model_input.length
    except ValueError as error:
        raise EngineError(f"datum {index}: {error}") from None
    _check_side(index, "model_input", inputs, length, found)
    tensor = datum.loss_fn_inputs.get("target_tokens")
    if tensor is None:
        raise EngineError(f"datum {index}: input 'target_tokens' is missing")
    size = tensor.values.size if tensor.shape is None else int(np.prod(tensor.shape))
    _check_side(index, "target_tokens", targets, size, found)
    positions, parts, at = [], [], 0
    for span in targets:
        recording = found[span.sequence_id].recording
        if isinstance(span, SampledProvenanceSpan) and span.length and recording is not None:
            positions.append(np.arange(at, at + span.length))
            parts.append(_part(recording, slice(span.offset, span.offset + span.length)))
        at += span.length
    if not positions:
        raise EngineError(
            f"datum {index}: none of its targets was sampled; 'stable_reinforce' needs one at least"
        )
    if len({part.top_tokens.shape[1] for part in parts}) > 1:
        raise EngineError(
            f"datum {index}: its samples were drawn from models with different vocabularies"
        )
    return Recalled(np.concatenate(positions), _joined(parts))


def _check_side(
    index: int, field: str, spans: ProvenanceSpans, length: int, found: Mapping[str, Remembered]
) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise EngineError(
            f"datum {index}: the spans of {field} cover {covered} positions of {length}; they must "
            "cover each once"
        )
    for span in spans:
        sample = found[span.sequence_id]
        what, most = "sample", sample.length
        if not isinstance(span, SampledProvenanceSpan):
            what, most = "prompt", sample.prompt
        if span.offset + span.length > most:
            raise EngineError(
                f"datum {index}: a span of {field} names tokens {span.offset} to "
                f"{span.offset + span.length} of the "
                f"{what} of {span.sequence_id!r}, which has {most}"
            )


def _part(recording: Recording, which: slice) -> Recording:
    return Recording(*(array[which] for array in parts_of(recording)))


def _joined(parts: Sequence[Recording]) -> Recording:
    if len(parts) == 1:
        return parts[0]
    return Recording(*map(np.concatenate, zip(*map(parts_of, parts), strict=True)))
