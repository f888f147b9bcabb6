"""Open samplers and draw samples."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Iterator

from tinkex.engine.api import Listener
from tinkex.server.calls import Call
from tinkex.server.database.entities import Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.operations import watch
from tinkex.server.routes.sample_streams import SampleStream
from tinkex.server.state import State
from tinkex.types.future_requests import JoinSamplingSessionRequest, JoinSamplingSessionResponse
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
)
from tinkex.types.training import UntypedAPIFuture


@handler
async def create_sampling_session(state: State, call: Call) -> CreateSamplingSessionResponse:
    """Bind a sampler to a base model or a checkpoint."""
    request: CreateSamplingSessionRequest = call.request
    await state.sessions.require(request.session_id)
    base_model = await state.samplers.base_of(call.owner, request.base_model, request.model_path)
    sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = Sampler(
        sampler_id, request.session_id, base_model, request.model_path, owner=call.owner
    )
    known = await asyncio.to_thread(state.database.samplers.get, sampler_id)
    if known is not None and (known.base_model, known.model_path, known.model_id) != (
        base_model,
        request.model_path,
        None,
    ):
        raise Refusal(
            400,
            f"sampling session {sampler_id!r} was opened before, with other weights; "
            "use another sampling_session_seq_id",
        )
    await asyncio.to_thread(state.database.samplers.add, sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@handler
async def get_sampler(state: State, call: Call) -> GetSamplerResponse:
    """Describe a sampler."""
    sampler = await asyncio.to_thread(state.database.samplers.get, call.path["sampler_id"])
    if sampler is None:
        raise Refusal(404, f"there is no sampler {call.path['sampler_id']!r}")
    return GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
    )


@handler
async def asample(state: State, call: Call) -> UntypedAPIFuture:
    """Draw samples; a repeated number gives the original receipt, and draws nothing."""
    return await state.samples.admit(call, functools.partial(watch, state, call.op, call))


@handler
async def stream_sample(state: State, call: Call) -> SampleStream:
    """Draw samples and send each token when it is there; the number is not used, for nothing is
    kept under it.
    """
    request: SampleRequest = call.request
    sampler = await state.samplers.named(request, call.owner)
    source = await state.samplers.find(sampler)
    request = request.model_copy(update={"record_stability_info": None})  # its samples have no ids
    job = f"{sampler.sampler_id}:stream:{secrets.token_hex(8)}"

    async def start(listener: Listener) -> SampleResponse:
        with _streaming(state, call.owner, sampler):
            return await state.samplers.draw(
                job, sampler, source, request, listener=listener, owner=call.owner
            )

    return SampleStream(start, lambda: state.samplers.cancel(job), state.limits.quiet_seconds)


@contextlib.contextmanager
def _streaming(state: State, owner: str, sampler: Sampler) -> Iterator[None]:
    """Note the time of a sample that has no promise."""
    name, began, error = "stream_sample", time.time(), None
    state.meter.open[owner, name] += 1
    try:
        yield
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        state.meter.open[owner, name] -= 1
        request_id = f"{sampler.sampler_id}:{name}:{began}"
        state.meter.span(sampler.session_id, request_id, name, began, error)


@handler
async def join_sampling_session(state: State, call: Call) -> JoinSamplingSessionResponse:
    """Give another client of a sampler its own number, under which it counts its requests."""
    request: JoinSamplingSessionRequest = call.request
    if await asyncio.to_thread(state.database.samplers.get, request.sampling_session_id) is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    number = await asyncio.to_thread(state.database.samplers.join, request.sampling_session_id)
    return JoinSamplingSessionResponse(client_counter=number)
