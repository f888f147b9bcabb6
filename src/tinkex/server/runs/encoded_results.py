"""Encode results, large ones in a thread; announced ones are encoded only once."""

from __future__ import annotations

import asyncio
import logging

from tinkex.server.runs.promises import Promise
from tinkex.types.future_requests import RequestErrorCategory, RequestFailedResponse
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import codec

logger = logging.getLogger("tinkex.server")

OFF_LOOP_VALUES = 8_000
"""Results of more numbers than this are encoded in a thread."""


def size_of(result: object) -> int:
    """Estimate the bytes that a result takes in memory; small ones count as 0."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(
            tensor.values.nbytes for output in result.loss_fn_outputs for tensor in output.values()
        )
    if not isinstance(result, SampleResponse):
        return 0
    tables = [result.topk_prompt_logprobs_np, *(one.topk_logprobs_np for one in result.sequences)]
    size = sum(
        table.token_ids.nbytes + table.logprobs.nbytes for table in tables if table is not None
    )
    return (
        size
        + 8 * sum(one.length for one in result.sequences)
        + getattr(result.prompt_logprobs_np, "nbytes", 0)
    )


async def encoding(promise: Promise, *, as_protobuf: bool) -> codec.Body:
    """Return the bytes of a promise's result, in the form that its reader accepts."""
    if is_heavy(promise):
        return await asyncio.to_thread(encode, promise, as_protobuf=as_protobuf)
    return encode(promise, as_protobuf=as_protobuf)


def is_heavy(promise: Promise) -> bool:
    """Estimate whether a result takes long to encode."""
    result = promise.result
    if promise.kept is not None or not codec.has_protobuf(type(result)):
        return False
    if isinstance(result, ForwardBackwardOutput):
        return size_of(result) > 4 * OFF_LOOP_VALUES
    is_columns = isinstance(result, SampleResponse) and not (
        result.target_prompt_logprobs or result.prompt_alt_tokens
    )
    return not is_columns or size_of(result) > 8 * OFF_LOOP_VALUES


def most_of(request: SampleRequest, window: int) -> int:
    """Estimate the most bytes that the result of a request for samples may take."""
    try:
        prompt = request.prompt.length
    except ValueError:  # an image without its number of tokens, which the engine refuses
        prompt = 0
    asked = request.sampling_params.max_tokens
    tokens = max(0, request.num_samples) * max(0, min(window, window if asked is None else asked))
    scores = prompt * (1 + max(0, request.topk_prompt_logprobs))
    return 8 * (tokens * (1 + max(0, request.topk_sample_logprobs)) + scores)


def encode(promise: Promise, *, as_protobuf: bool) -> codec.Body:
    """Return the bytes of a result; one that cannot be encoded becomes a failure."""
    wants_protobuf = as_protobuf and codec.has_protobuf(type(promise.result))
    if promise.kept is not None and (promise.kept.content_type == codec.PROTOBUF) == wants_protobuf:
        return promise.kept
    try:
        return codec.encode(promise.result, as_protobuf=as_protobuf)
    except ValueError as error:  # in band: a client would repeat a poll that gets a 500 forever
        logger.exception("the result of %s cannot be encoded", promise.request_id)
        promise.result = RequestFailedResponse(
            error=f"internal error: the result cannot be sent: {error}",
            category=RequestErrorCategory.Server,
        )
        return codec.encode(promise.result, as_protobuf=False)
