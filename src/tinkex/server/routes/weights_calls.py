"""Save weights, load them, and describe checkpoints."""

from __future__ import annotations

import asyncio

from tinkex.engine.api import EngineError
from tinkex.server.calls import Call, digest_of
from tinkex.server.database.entities import Sampler, Save
from tinkex.server.files.checkpoint_files import Wanted, find_checkpoint, readable, reading, saving
from tinkex.server.files.seals import check
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.session_calls import require_session
from tinkex.server.routes.training_calls import enter, new_run
from tinkex.server.runs.admission import (
    enqueue,
    live_run,
    loaded_before,
    promise_once,
    settle_state,
    write_state,
)
from tinkex.server.runs.scheduler import Beside
from tinkex.server.samples import inflight
from tinkex.server.state import LiveRun, State
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.record import to_json
from tinkex.types.training import (
    OptimizerConfigBase,
    UntypedAPIFuture,
)
from tinkex.wire.codec import JSON


def _request_id(call: Call) -> str:
    return f"{call.request.model_id}:{call.number}"


@handler
async def save_weights(state: State, call: Call) -> UntypedAPIFuture:
    """Save weights and optimizer state."""
    request: SaveWeightsRequest = call.request
    run = (await live_run(state, request.model_id)).run

    def work() -> Beside:
        wanted = Wanted(
            "weights",
            request.path or f"step-{request.seq_id}",
            request.ttl_seconds,
            request.user_metadata or {},
            request.overwrite,
            request_id=_request_id(call),
        )

        def answer(saved: Save) -> SaveWeightsResponse:
            return SaveWeightsResponse(path=saved.tinker_path, type="save_weights")

        return saving(state, run, wanted, answer, optimizer=True)

    return await enqueue(state, call, request.model_id, request.seq_id, work, is_save=True)


@handler
async def save_weights_for_sampler(state: State, call: Call) -> UntypedAPIFuture:
    """Save weights to sample from: under a name, or as a nameless sampler that lives with the
    session.
    """
    request: SaveWeightsForSamplerRequest = call.request
    live = await live_run(state, request.model_id)
    run = live.run
    version: int | None = None

    def work() -> SaveWeightsForSamplerResponseInternal | Beside:
        if request.kind == "inflight":
            inflight.check(request)
        if request.path is not None:
            wanted = Wanted(
                "sampler_weights",
                request.path,
                request.ttl_seconds,
                request.user_metadata or {},
                request_id=_request_id(call),
            )

            def answer(saved: Save) -> SaveWeightsForSamplerResponseInternal:
                return SaveWeightsForSamplerResponseInternal(
                    path=saved.tinker_path, type="save_weights_for_sampler"
                )

            return saving(state, run, wanted, answer, optimizer=False)
        if request.sampling_session_seq_id is None:
            raise EngineError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
        assert call.number is not None
        known = state.database.samplers.get(sampler_id)
        if known is not None and known.model_id != run.model_id:
            raise EngineError(
                f"sampling session {sampler_id!r} was opened before, not for this run; use another "
                "number"
            )
        if request.kind == "inflight":
            nonlocal version
            version = inflight.save(state, live, sampler_id, call.number)
            return SaveWeightsForSamplerResponseInternal(
                sampling_session_id=sampler_id, type="save_weights_for_sampler"
            )
        # a client that uses a number again means the new weights
        state.drop_snapshot_files(sampler_id)
        state.engine.snapshot(run.model_id, sampler_id)
        live.unsaved_samplers[sampler_id] = call.number
        state.database.samplers.add(
            Sampler(
                sampler_id,
                run.session_id,
                run.base_model,
                None,
                is_snapshot=True,
                owner=run.owner,
                model_id=run.model_id,
            )
        )
        return SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )

    def after(
        saved: SaveWeightsForSamplerResponseInternal,
    ) -> SaveWeightsForSamplerResponseInternal:
        if saved.sampling_session_id is not None and request.kind == "inflight":
            if version is not None:
                inflight.publish(state, run, saved.sampling_session_id, version)
        elif saved.sampling_session_id is not None:
            state.keep_snapshot(run.session_id, saved.sampling_session_id)
        return saved

    # The official client counts sampling_session_seq_id up when it retries: it does not make
    # another request of it.
    call.digest = digest_of(
        "", to_json(request.model_copy(update={"sampling_session_seq_id": None}))
    )
    return await enqueue(state, call, request.model_id, request.seq_id, work, after, is_save=True)


@handler
async def load_weights(state: State, call: Call) -> UntypedAPIFuture:
    """Load a checkpoint into a run, or make a run of it."""
    request: LoadWeightsRequest = call.request
    reader = call.reader or await state.accounts.reader(call.owner, request.weights_access_token)
    # whose it is will do, and no secret is put on disk
    if request.weights_access_token is not None:
        call.reader, call.content_type, call.encoding = reader, JSON, None
        call.body = to_json(request.model_copy(update={"weights_access_token": None}))
    if request.model_id is None:
        return await _create_by_loading(state, call, request, reader)
    model_id = request.model_id

    base_model = (await live_run(state, model_id)).run.base_model

    def work() -> LoadWeightsResponse:
        assert call.number is not None
        if state.strict and call.number > 1:
            raise EngineError(
                "LoadWeights is not permitted after a run's first operation (this server is "
                "strict); "
                "create a run from the checkpoint instead"
            )
        if (loaded := loaded_before(state, call, model_id, call.number)) is not None:
            check(loaded)
            state.engine.load(model_id, loaded, optimizer=True)
        else:
            saved = find_checkpoint(state, request.path, "weights", base_model, reader=reader)
            with reading(saved.directory, request.path):
                check(saved.directory)
                state.check_base(saved.base_model, saved.base_digest, request.path)
                state.engine.load(model_id, saved.directory, optimizer=request.optimizer)
        return LoadWeightsResponse(path=request.path, model_id=model_id, type="load_weights")

    return await enqueue(state, call, model_id, request.seq_id, work)


async def _create_by_loading(
    state: State, call: Call, request: LoadWeightsRequest, reader: str
) -> UntypedAPIFuture:
    if request.session_id is None or request.model_seq_id is None:
        raise Refusal(400, "load_weights needs model_id, or session_id and model_seq_id")
    await require_session(state, request.session_id)
    session_id, model_id = request.session_id, f"{request.session_id}:train:{request.model_seq_id}"

    def work() -> LiveRun:
        loaded, known = loaded_before(state, call, model_id, 0), state.database.runs.get(model_id)
        if loaded is not None and known is not None:
            optimizer = OptimizerConfigBase.from_wire(known.optimizer)
            base_model, lora, directory = known.base_model, known.lora, loaded
        else:
            saved = find_checkpoint(
                state, request.path, "weights", request.base_model, reader=reader
            )
            state.check_base(saved.base_model, saved.base_digest, request.path)
            optimizer = request.optimizer_config or OptimizerConfigBase.from_wire(saved.optimizer)
            base_model, lora, directory = saved.base_model, saved.lora, saved.directory
        live = LiveRun(new_run(state, model_id, call, base_model, lora, optimizer))
        try:
            with reading(directory, request.path):
                check(directory)
                state.engine.load(
                    model_id, directory, optimizer=request.optimizer or directory == loaded
                )
            # the checkpoint may be deleted as soon as the client knows that it is loaded
            write_state(state, live, 0)
        except BaseException:  # a run that is not what was asked for must not be trained by mistake
            state.engine.drop(model_id)
            raise
        return live

    async def creating() -> LoadWeightsResponse:
        live = await state.worker.run(work)
        enter(state, live)
        settle_state(state, live)
        return LoadWeightsResponse(path=request.path, model_id=model_id, type="load_weights")

    return await promise_once(state, f"{model_id}:0", session_id, call, creating, model_id)


@handler
async def weights_info(state: State, call: Call) -> WeightsInfoResponse:
    """What a checkpoint holds."""
    request: WeightsInfoRequest = call.request
    try:
        ParsedCheckpointTinkerPath.from_tinker_path(request.tinker_path)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    saved = await asyncio.to_thread(readable, state, request.tinker_path, call.owner)
    if saved is None:
        raise Refusal(404, f"there is no checkpoint {request.tinker_path}")
    return WeightsInfoResponse(
        base_model=saved.base_model,
        is_lora=True,
        lora_rank=saved.lora.rank,
        train_unembed=saved.lora.train_unembed,
        train_mlp=saved.lora.train_mlp,
        train_attn=saved.lora.train_attn,
        optimizer_config=OptimizerConfigBase.from_wire(saved.optimizer),
    )
