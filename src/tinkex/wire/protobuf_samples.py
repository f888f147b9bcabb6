"""Results of sampling in protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinkex.types.sampled import (
    EMPTY_CELL,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkList,
    TopkLogprobs,
)
from tinkex.types.tensors import Array
from tinkex.wire.protobuf_passes import get_tensor, packed, put_tensor, unpacked
from tinkex.wire.protobuf_schema import message, parse

STOP, LENGTH = 0, 1


def encode_sample(response: SampleResponse) -> bytes:
    """Encode a SampleResponse."""
    wire = message("SampleResponse")(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        target = wire.sequences.add(stop_reason=STOP if sequence.stop_reason == "stop" else LENGTH)
        # A sequence may hold lists in place of arrays.
        tokens = sequence.tokens if sequence.tokens_np is None else sequence.tokens_np
        logprobs = sequence.logprobs if sequence.logprobs_np is None else sequence.logprobs_np
        if len(tokens) or sequence.tokens_np is not None:
            target.tokens = packed(tokens, "int32")
        if logprobs is not None:
            target.logprobs = packed(logprobs, "float32")
        topk = sequence.topk_logprobs_np
        _put_topk(target, "topk_sampled_logprobs", topk, sequence.topk_logprobs)
        if sequence.weights_versions_np is not None:
            _put_versions(target, sequence.weights_versions_np)
    scores = (
        response.prompt_logprobs
        if response.prompt_logprobs_np is None
        else response.prompt_logprobs_np
    )
    if scores is not None:
        wire.prompt_logprobs = packed(scores, "float32")
    topk = response.topk_prompt_logprobs_np
    _put_topk(wire, "topk_prompt_logprobs", topk, response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        put_tensor(wire.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        put_tensor(wire.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        put_tensor(wire.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    encoded: bytes = wire.SerializeToString(deterministic=True)
    return encoded


def _table(rows: TopkList | None) -> TopkLogprobs | None:
    """Return pairs per position as a table."""
    if rows is None:
        return None
    width = max((len(row) for row in rows if row), default=0)
    ids, logprobs = (
        np.zeros((len(rows), width), np.int32),
        np.full((len(rows), width), EMPTY_CELL, np.float32),
    )
    for index, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row or ()):
            ids[index, place], logprobs[index, place] = token, logprob
    return TopkLogprobs(ids, logprobs)


def _put_versions(target: Any, versions: Array) -> None:
    """Write runs of the same version as one span; there are few."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    for start, tokens in zip(
        starts.tolist(), np.diff([*starts, versions.size]).tolist(), strict=True
    ):
        target.weights_spans.add(version=int(versions[start]), tokens=tokens)


def _get_versions(source: Any, tokens: int) -> Array | None:
    if not source.weights_spans:
        return None
    counts = [span.tokens for span in source.weights_spans]
    if min(counts, default=0) < 0 or sum(counts) != tokens:
        raise ValueError(
            f"malformed protobuf: weights_spans cover {sum(counts)} tokens of {tokens}"
        )
    return np.repeat(np.array([span.version for span in source.weights_spans], np.int64), counts)


def _put_topk(target: Any, field: str, topk: TopkLogprobs | None, rows: TopkList | None) -> None:
    """Write a table, or pairs per position where there is no table."""
    topk = topk or _table(rows)
    if topk is None:
        return
    table = getattr(target, field)
    table.token_ids = packed(topk.token_ids, "int32")
    table.logprobs = packed(topk.logprobs, "float32")
    table.length, table.k = topk.token_ids.shape


def decode_sample(body: bytes) -> SampleResponse:
    """Decode a SampleResponse."""
    wire = parse("SampleResponse", body)
    return SampleResponse(
        sequences=[_get_sequence(sequence) for sequence in wire.sequences],
        prompt_logprobs_np=_optional_floats(wire, "prompt_logprobs"),
        topk_prompt_logprobs_np=_get_topk(wire, "topk_prompt_logprobs"),
        target_prompt_logprobs=(
            get_tensor(wire.target_prompt_logprobs, "target_prompt_logprobs")
            if wire.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_cache_hit_tokens=wire.prompt_cache_hit_tokens,
        prompt_alt_tokens=(
            PromptAltTokens(
                get_tensor(wire.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
                get_tensor(wire.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
            )
            if wire.HasField("prompt_alt_tokens")
            else None
        ),
    )


def _get_sequence(source: Any) -> SampledSequence:
    if source.stop_reason not in (STOP, LENGTH):
        raise ValueError(f"malformed protobuf: unknown stop reason {source.stop_reason}")
    tokens = unpacked(source.tokens, "int32", "sampled tokens")
    return SampledSequence(
        stop_reason="stop" if source.stop_reason == STOP else "length",
        tokens_np=tokens,
        logprobs_np=_optional_floats(source, "logprobs"),
        topk_logprobs_np=_get_topk(source, "topk_sampled_logprobs"),
        weights_versions_np=_get_versions(source, tokens.size),
    )


def _optional_floats(source: Any, field: str) -> Array | None:
    return unpacked(getattr(source, field), "float32", field) if source.HasField(field) else None


def _get_topk(source: Any, field: str) -> TopkLogprobs | None:
    if not source.HasField(field):
        return None
    table = getattr(source, field)
    ids, logprobs = (
        unpacked(table.token_ids, "int32", field),
        unpacked(table.logprobs, "float32", field),
    )
    shape = (table.length, table.k)
    if ids.size != logprobs.size or ids.size != table.length * table.k:
        raise ValueError(f"malformed protobuf: {field} is not {table.length} x {table.k}")
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))
