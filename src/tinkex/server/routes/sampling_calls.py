"""Open samplers and draw samples."""

from __future__ import annotations

import asyncio
import functools
import secrets
import uuid

from tinkex.engine.api import EngineError, Listener, token_limit
from tinkex.server.calls import Call
from tinkex.server.database.interface import Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.future_calls import target_of
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.sample_streams import SampleStream
from tinkex.server.runs.journals import DIRECT
from tinkex.server.runs.metering import metered, streaming, watch
from tinkex.server.runs.promises import Promise
from tinkex.server.samples.loaded_weights import WeightSource
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
    base_model = await _source(state, call.owner, request.base_model, request.model_path)
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


async def _source(state: State, owner: str, base_model: str | None, model_path: str | None) -> str:
    """Return the base model under what is to be sampled from; refuse what is not there."""
    try:
        if model_path is not None:
            saved = await asyncio.to_thread(
                state.checkpoints.find, model_path, "sampler_weights", reader=owner
            )
            base_model = saved.base_model
        if base_model is None:
            raise EngineError("sampling needs a base_model or a model_path")
        return state.workers.base_model(base_model).name
    except EngineError as error:
        raise Refusal(400, str(error)) from None


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
    request: SampleRequest = call.request
    taken = None if call.recorded is None else call.recorded.request_id
    sampler = await _sampler_of(state, request, call.owner, taken)
    _check_window(state, sampler, request)
    number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
    request_id = taken or f"{sampler.sampler_id}:{number}"
    target = target_of(sampler.sampler_id, request.seq_id)
    known = state.promises.get(request_id)
    if known is not None and known.digest != call.digest:
        request_id = state.promises.refuse_reused(
            request_id, sampler.session_id, call.digest, call.owner, target
        )
    elif known is not None:
        if known.recorded is not None:
            await asyncio.shield(known.recorded)
    elif not state.promises.is_gone(request_id):  # a late repetition draws nothing either
        source = await state.samplers.find(sampler)
        # the same request may have come twice while weights were sought
        if state.promises.get(request_id) is None:
            cancel = functools.partial(source.worker.samples.cancel, request_id)
            promise = state.promises.add(
                request_id, call.digest, sampler.session_id, target, cancel, call.owner
            )
            await _take(state, call, promise, sampler, source)
    return UntypedAPIFuture(
        request_id=request_id,
        sample_sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
    )


async def _take(
    state: State, call: Call, promise: Promise, sampler: Sampler, source: WeightSource
) -> None:
    """Put a sample on disk, and draw it."""
    request: SampleRequest = call.request
    if request.record_stability_info and sampler.session_id not in state.sessions:
        # it could not be trained on
        request = request.model_copy(update={"record_stability_info": None})

    async def draw(seed: int) -> SampleResponse:
        drawing = state.samplers.draw(promise.request_id, source, request, seed, owner=call.owner)
        return await metered(state, call.owner, sampler, request, drawing)

    def on_taken() -> None:
        watch(state, call.op, call, promise.request_id)

    await state.sample_journal.take(promise, call, draw, on_taken)


@handler
async def stream_sample(state: State, call: Call) -> SampleStream:
    """Draw samples and send each token when it is there; the number is not used, for nothing is
    kept under it.
    """
    request: SampleRequest = call.request
    sampler = await _sampler_of(state, request, call.owner)
    _check_window(state, sampler, request)
    source = await state.samplers.find(sampler)
    request = request.model_copy(update={"record_stability_info": None})  # its samples have no ids
    job = f"{sampler.sampler_id}:stream:{secrets.token_hex(8)}"

    async def start(listener: Listener) -> SampleResponse:
        drawing = state.samplers.draw(job, source, request, listener=listener, owner=call.owner)
        with streaming(state, call.owner, sampler):
            return await metered(state, call.owner, sampler, request, drawing)

    return SampleStream(
        start, lambda: source.worker.samples.cancel(job), state.limits.quiet_seconds
    )


async def _sampler_of(
    state: State, request: SampleRequest, owner: str, taken: str | None = None
) -> Sampler:
    """Return the sampler that a request names, or one for the weights that it names instead.

    `taken` is the id that the request was acknowledged under, if it was taken before.
    """
    if not 1 <= request.num_samples <= state.limits.samples:
        most = state.limits.samples
        raise Refusal(
            400,
            f"num_samples must lie between 1 and {most} (the limit samples), got "
            f"{request.num_samples}",
        )
    if request.sampling_session_id is None:
        if request.base_model is None and request.model_path is None:
            raise Refusal(400, "a sample needs a sampling_session_id, a base_model or a model_path")
        base_model = await _source(state, owner, request.base_model, request.model_path)
        name = taken.rpartition(":")[0] if taken else f"{DIRECT}:{uuid.uuid4()}"
        return Sampler(name, DIRECT, base_model, request.model_path, owner=owner)
    sampler = state.database.samplers.known(request.sampling_session_id)
    if sampler is None:
        sampler = await asyncio.to_thread(state.database.samplers.get, request.sampling_session_id)
    if sampler is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    state.sessions.note(sampler.session_id)
    return sampler


def _check_window(state: State, sampler: Sampler, request: SampleRequest) -> None:
    """Refuse what does not fit the model's window at once: programs look for this in the answer to
    their request.
    """
    window = state.workers.windows.get(sampler.base_model)
    if window is not None:
        try:
            size = request.prompt.length
        except ValueError:  # an image of unknown length: the engine says whether it sees images
            return
        try:
            token_limit(request, size, window)
        except EngineError as error:
            raise Refusal(400, str(error)) from None


@handler
async def join_sampling_session(state: State, call: Call) -> JoinSamplingSessionResponse:
    """Give another client of a sampler its own number, under which it counts its requests."""
    request: JoinSamplingSessionRequest = call.request
    if await asyncio.to_thread(state.database.samplers.get, request.sampling_session_id) is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    number = await asyncio.to_thread(state.database.samplers.join, request.sampling_session_id)
    return JoinSamplingSessionResponse(client_counter=number)
