"""What each operation does: one function per row of the table, over the server's state.

A handler validates what must be known before anything is promised (and refuses with an HTTP
status), then hands the work to the worker and returns a receipt. Whatever fails after that fails in
band, in the future's result.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeAlias

from tinkex.engine.api import STABLE_REINFORCE, EngineError, Listener, Recalled, token_limit
from tinkex.server.access.accounts import auth_token, delete_api_key, get_api_key
from tinkex.server.access.ownership import is_own
from tinkex.server.database.store import Run, Sampler, Save
from tinkex.server.files.checkpoint_files import Wanted, find_checkpoint, readable, reading, saving
from tinkex.server.files.seals import check
from tinkex.server.routes.batch_poll import poll, target_of
from tinkex.server.routes.exports import (
    get_checkpoint_archive,
    get_external_weights_urls,
    save_weights_external,
)
from tinkex.server.routes.records import (
    copy_weights,
    delete_checkpoint,
    get_training_run,
    list_checkpoints,
    list_training_runs,
    list_user_checkpoints,
    publish_checkpoint,
    set_checkpoint_ttl,
    unpublish_checkpoint,
)
from tinkex.server.routes.sample_streams import SampleStream
from tinkex.server.routes.search_checkpoints import search_checkpoints
from tinkex.server.routes.session_records import (
    assign_session_project,
    export_session_trace,
    get_session,
    list_sessions,
    search_sessions,
)
from tinkex.server.routes.uploads import (
    external_weights_upload_finish,
    external_weights_upload_start,
)
from tinkex.server.routes.usage import (
    get_audit_log,
    get_billing_usage,
    get_current_checkpoint_storage_usage,
    metered,
    metered_stream,
)
from tinkex.server.runs.admission import (
    enqueue,
    enqueue_unload,
    failed_receipt,
    live_run,
    loaded_before,
    promise_once,
    settle_state,
    spend,
    take_sample,
    write_state,
)
from tinkex.server.runs.scheduler import CANCELLED, Beside
from tinkex.server.samples import inflight
from tinkex.server.samples.provenance import recall
from tinkex.server.samples.samplers import draw, find_source
from tinkex.server.state import CARRY_ON, DIRECT, EXPIRED, Call, LiveRun, Refusal, State, digest_of
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
from tinkex.types.custom_losses import CreateCustomLossRequest, CreateCustomLossResponse
from tinkex.types.record import to_json
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
)
from tinkex.types.sessions import (
    CancelFutureRequest,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    FuturesRetrieveResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SupportedModel,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.training import (
    AdamParams,
    CreateModelRequest,
    CreateModelResponse,
    DropGradientsRequest,
    DropGradientsResponse,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimizerConfigBase,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UntypedAPIFuture,
)
from tinkex.wire.codec import JSON, Body

DEFAULT_RANK = 32
LOSS = ":loss:"
"""Between a session's id and a number in the id of a custom loss."""


# ── sessions and configuration ────────────────────────────────────────────────────────────────────


async def client_config(state: State, call: Call) -> ClientConfigResponse:
    """How clients should behave: a call is one request, so that bad data in it leaves no half of
    its gradient.
    """
    assert isinstance(call.request, ClientConfigRequest)
    return ClientConfigResponse(
        pjwt_auth_enabled=state.tokens,
        fwdbwd_max_chunk_len=1_000_000,
        fwdbwd_max_chunk_bytes_count=256_000_000,
        create_model_via_load_weights=True,
        sample_join_sampling_session=True,
        # without the results in it a batched poll is one round trip more
        sample_use_retrieve_futures=False,
        custom_loss_server_side=True,
        batched_results=True,
        proto_write_fwdbwd=True,
        fwd_via_fwdbwd=True,
    )


async def client_dynamic_config(state: State, call: Call) -> ClientDynamicConfigResponse:
    """Nothing changes while a client runs."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


async def create_session(state: State, call: Call) -> CreateSessionResponse:
    """Open a session."""
    request: CreateSessionRequest = call.request
    session_id = str(uuid.uuid4())
    await asyncio.to_thread(
        state.store.add_session, session_id, request.model_dump(mode="json"), call.owner
    )
    state.heard[session_id] = time.monotonic()
    return CreateSessionResponse(session_id=session_id)


async def session_heartbeat(state: State, call: Call) -> SessionHeartbeatResponse:
    """Note that a client is alive."""
    request: SessionHeartbeatRequest = call.request
    await require_session(state, request.session_id)
    return SessionHeartbeatResponse()


async def require_session(state: State, session_id: str) -> None:
    """Refuse what comes for a session that is not open; a known one is heard from."""
    if session_id not in state.heard:
        known = await asyncio.to_thread(state.store.session_state, session_id)
        if known is None:
            raise Refusal(404, f"there is no session {session_id!r}")
        if known == EXPIRED:
            seconds = state.limits.session_seconds
            why = f"nothing was heard for {seconds:g} s (session_seconds)"
            raise Refusal(410, f"session {session_id!r} is finished: {why}")
        if known == "finished":
            raise Refusal(410, f"session {session_id!r} is finished")
    state.heard[session_id] = time.monotonic()


async def finish_session(state: State, call: Call) -> Empty:
    """Close a session; the first reason stays."""
    request: FinishSessionRequest = call.request
    session_id = call.path["session_id"]
    if await asyncio.to_thread(state.store.session_state, session_id) is None:
        raise Refusal(404, f"there is no session {session_id!r}")
    state.heard.pop(session_id, None)  # from here on the record says whether it is open
    await asyncio.to_thread(
        state.store.finish_session, session_id, request.reason.type, request.detail
    )
    state.end_session(session_id)
    return Empty()


class Capabilities(GetServerCapabilitiesResponse, frozen=True, kw_only=True):
    """The server's capabilities, with a field that the protocol does not have."""

    own_losses: dict[str, str]
    """Losses whose form is this server's own, though the protocol has their names, and how they are
    computed."""


OWN_LOSSES = {
    STABLE_REINFORCE: "tinkex's own form of this loss: the hosted service's is not published. Sum "
    "over sampled tokens "
    "of -min(r, tinkex_ratio_cap) * m * A * log p + kl_coeff * KL(p || sampler); m is 0 where p "
    "and the sampler differ "
    "by more than tinkex_divergence_limit in total variation and the step would take them further "
    "apart"
}


async def get_server_capabilities(state: State, call: Call) -> Capabilities:
    """The models on offer, and which losses have a form of our own."""
    return Capabilities(
        own_losses=OWN_LOSSES,
        supported_models=[
            SupportedModel(
                model_name=model.name,
                max_context_length=model.context_length,
                trainable=True,
                sampleable=True,
            )
            for model in state.engine.models()
        ],
    )


async def healthz(state: State, call: Call) -> HealthResponse:
    """The server answers, so it is well, unless the engine's thread has died."""
    state.refuse_if_dead()
    return HealthResponse(status="ok")


async def telemetry(state: State, call: Call) -> TelemetryResponse:
    """Client events are taken and not kept."""
    assert isinstance(call.request, TelemetrySendRequest)
    return TelemetryResponse(status="accepted")


# ── training ──────────────────────────────────────────────────────────────────────────────────────


async def create_model(state: State, call: Call) -> UntypedAPIFuture:
    """Start a training run; asking again for the same one gives the same."""
    request: CreateModelRequest = call.request
    await require_session(state, request.session_id)
    model_id = f"{request.session_id}:train:{request.model_seq_id}"
    lora = request.lora_config or LoraConfig(rank=DEFAULT_RANK)
    if not call.is_replayed:
        # a name that is not there is refused at once, as for samplers
        state.base_model(request.base_model)
        await state.revived(model_id)
        # after a restart it may be all that is known of the first request
        live = state.runs.get(model_id)
        if live is not None and (live.run.base_model, live.run.lora) != (request.base_model, lora):
            receipt = failed_receipt(state, f"{model_id}:0", request.session_id, call)
            return UntypedAPIFuture(request_id=receipt, model_id=model_id)

    async def creating() -> CreateModelResponse:
        optimizer = request.optimizer_config
        run = await state.worker.run(
            new_run, state, model_id, call, request.base_model, lora, optimizer
        )
        enter(state, LiveRun(run))
        return CreateModelResponse(model_id=model_id)

    return await promise_once(state, f"{model_id}:0", request.session_id, call, creating, model_id)


def enter(state: State, live: LiveRun) -> None:
    """Take a run in whose adapter has been made; on the event loop, as all changes of what is live."""
    if live.run.session_id not in state.heard:
        state.worker.run(state.engine.drop, live.run.model_id)
        raise EngineError("the session has ended")
    if (creation := state.promises.get(f"{live.run.model_id}:0")) is not None:
        live.recent[0] = creation  # its result goes beside the first state, like any other
    state.runs[live.run.model_id] = live


def new_run(
    state: State,
    model_id: str,
    call: Call,
    base_model: str,
    lora: LoraConfig,
    optimizer: OptimizerConfigBase,
) -> Run:
    """Make an adapter and put its run on record; on the worker."""
    request: CreateModelRequest | LoadWeightsRequest = call.request
    assert request.session_id is not None
    base = state.base_model(base_model)
    known = state.store.run(model_id)
    if known is not None and not call.is_replayed:  # it was unloaded
        raise EngineError(f"model {model_id!r} is no longer loaded; {CARRY_ON}")
    state.engine.create(model_id, base_model, lora, optimizer)
    metadata = request.user_metadata or {}
    run = Run(
        model_id,
        request.session_id,
        base_model,
        lora,
        optimizer.to_wire(),
        metadata,
        call.owner,
        base.digest,
    )
    if known is None:
        state.store.add_run(run)
    return run


async def forward_backward(state: State, call: Call) -> UntypedAPIFuture:
    """A pass, with or without its gradient."""
    request: ForwardBackwardRequest = call.request
    body = request.forward_backward_input
    loss_id = (body.loss_fn_config or {}).get("loss_id") if body.loss_fn == "custom" else None
    if isinstance(loss_id, str):
        await state.revived(loss_id)

    def start(job: str) -> None:
        if body.loss_fn == "custom":
            require_own_loss(request.model_id, loss_id)
        state.engine.pass_start(
            job,
            request.model_id,
            body.data,
            body.loss_fn,
            body.loss_fn_config or {},
            backward=not request.forward_only,
            owner=call.owner,
            recalled=recalled,
        )

    recalled: Sequence[Recalled] | None = None
    names: Collection[str] = ()
    if body.loss_fn == STABLE_REINFORCE:
        await live_run(state, request.model_id)
        try:
            if not _is_known(state, call):
                recalled, names = await _recalled(state, call)
        except EngineError as error:
            if call.is_replayed or error.category != "user":
                raise
            spent = Call(None, {}, call.digest, op="", body=str(error).encode(), owner=call.owner)
            return await spend(state, spent, request.model_id, request.seq_id)
    receipt = await enqueue(state, call, request.model_id, request.seq_id, start, is_pass=True)
    if names and call.number is not None:
        state.recordings.hold(_session_of(request.model_id), request.model_id, call.number, names)
    return receipt


def _is_known(state: State, call: Call) -> bool:
    """Return whether a pass was taken before and only needs its receipt again."""
    promise = state.promises.get(f"{call.request.model_id}:{call.request.seq_id}")
    return promise is not None and promise.digest == call.digest


def _session_of(model_id: str) -> str:
    return model_id.rpartition(":train:")[0]


async def _recalled(state: State, call: Call) -> tuple[Sequence[Recalled], Collection[str]]:
    """The recordings behind the data of a pass, which are kept for it from now on, and the ids of
    its samples.
    """
    request: ForwardBackwardRequest = call.request
    session_id, data = _session_of(request.model_id), request.forward_backward_input.data
    recalled, names = await recall(state.recordings, session_id, data, is_replayed=call.is_replayed)
    if request.seq_id is not None:  # before it is in the journal
        state.recordings.hold(session_id, request.model_id, request.seq_id, names)
    state.promises.keep(asyncio.ensure_future(state.recordings.note_use(session_id, names)))
    return recalled, names


async def forward(state: State, call: Call) -> UntypedAPIFuture:
    """A forward pass as older clients ask for it."""
    request: ForwardRequest = call.request
    call.request = ForwardBackwardRequest(
        forward_backward_input=request.forward_input,
        model_id=request.model_id,
        seq_id=request.seq_id,
        forward_only=True,
    )
    return await forward_backward(state, call)


async def optim_step(state: State, call: Call) -> UntypedAPIFuture:
    """Apply the accumulated gradient."""
    request: OptimStepRequest = call.request

    params = request.optim_params
    assert isinstance(params, AdamParams | OptimParamsBase)

    def work() -> OptimStepResponse:
        return OptimStepResponse(metrics=state.engine.optim_step(request.model_id, params))

    return await enqueue(state, call, request.model_id, request.seq_id, work)


async def drop_gradients(state: State, call: Call) -> UntypedAPIFuture:
    """Drop the gradient that was gathered since the last step, when everything asked for before is
    done.
    """
    request: DropGradientsRequest = call.request

    def work() -> DropGradientsResponse:
        state.engine.drop_gradients(request.model_id)
        return DropGradientsResponse(model_id=request.model_id, type="drop_gradients")

    return await enqueue(state, call, request.model_id, request.seq_id, work)


async def create_custom_loss(state: State, call: Call) -> UntypedAPIFuture:
    """Take a loss that was sent as a graph, for the passes of its session; its number again gives
    the same receipt.
    """
    request: CreateCustomLossRequest = call.request
    session_id = request.session_id
    await require_session(state, session_id)
    loss_id = f"{session_id}{LOSS}{request.custom_loss_seq_id}"

    async def creating() -> CreateCustomLossResponse:
        await state.worker.run(state.engine.create_loss, loss_id, request)
        if session_id not in state.heard:
            state.worker.run(state.engine.drop_losses, loss_id)
            raise EngineError("the session has ended")
        return CreateCustomLossResponse(loss_id=loss_id)

    receipt = await promise_once(state, loss_id, session_id, call, creating, loss_id)
    return UntypedAPIFuture(request_id=receipt.request_id)


def require_own_loss(model_id: str, loss_id: float | str | None) -> None:
    """Refuse a custom loss of another session."""
    session_id = _session_of(model_id)
    if (
        isinstance(loss_id, str)
        and LOSS in loss_id
        and not loss_id.startswith(f"{session_id}{LOSS}")
    ):
        raise EngineError(
            f"the custom loss {loss_id!r} belongs to another session; create it in this one"
        )


async def unload_model(state: State, call: Call) -> UntypedAPIFuture:
    """Free what a run holds in memory, once everything asked of it so far is done."""
    request: UnloadModelRequest = call.request
    return await enqueue_unload(state, call, request.model_id)


async def get_info(state: State, call: Call) -> GetInfoResponse:
    """What a run trains."""
    request: GetInfoRequest = call.request
    run = await asyncio.to_thread(state.store.run, request.model_id)
    if run is None:
        raise Refusal(404, f"there is no model {request.model_id!r}")
    model = state.base_model(run.base_model)
    return GetInfoResponse(
        model_data=ModelData(arch=model.arch, model_name=model.name, tokenizer_id=model.name),
        model_id=run.model_id,
        optimizer_config=OptimizerConfigBase.from_wire(run.optimizer),
        is_lora=True,
        lora_rank=run.lora.rank,
        model_name=model.name,
        type="get_info",
    )


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


def _request_id(call: Call) -> str:
    return f"{call.request.model_id}:{call.number}"


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
        known = state.store.sampler(sampler_id)
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
        state.store.add_sampler(
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
        loaded, known = loaded_before(state, call, model_id, 0), state.store.run(model_id)
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


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


async def create_sampling_session(state: State, call: Call) -> CreateSamplingSessionResponse:
    """Bind a sampler to a base model or a checkpoint."""
    request: CreateSamplingSessionRequest = call.request
    await require_session(state, request.session_id)
    base_model = await _source(state, call, request.base_model, request.model_path)
    sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = Sampler(
        sampler_id, request.session_id, base_model, request.model_path, owner=call.owner
    )
    known = await asyncio.to_thread(state.store.sampler, sampler_id)
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
    await asyncio.to_thread(state.store.add_sampler, sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


async def _source(state: State, call: Call, base_model: str | None, model_path: str | None) -> str:
    """The base model under what someone wants to sample from; refuses what is not there."""
    try:
        if model_path is not None:
            saved = await asyncio.to_thread(
                find_checkpoint, state, model_path, "sampler_weights", reader=call.owner
            )
            base_model = saved.base_model
        if base_model is None:
            raise EngineError("sampling needs a base_model or a model_path")
        return state.base_model(base_model).name
    except EngineError as error:
        raise Refusal(400, str(error)) from None


async def get_sampler(state: State, call: Call) -> GetSamplerResponse:
    """What a sampler samples from."""
    sampler = await asyncio.to_thread(state.store.sampler, call.path["sampler_id"])
    if sampler is None:
        raise Refusal(404, f"there is no sampler {call.path['sampler_id']!r}")
    return GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
    )


async def asample(state: State, call: Call) -> UntypedAPIFuture:
    """Draw samples; a repeated number gives the original receipt, and draws nothing."""
    request: SampleRequest = call.request
    sampler = await _sampler_of(state, call, request)
    _check_window(state, sampler, request)
    number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
    request_id = call.request_id or f"{sampler.sampler_id}:{number}"
    target = target_of(sampler.sampler_id, request.seq_id)
    known = state.promises.get(request_id)
    if known is not None and known.digest != call.digest:
        request_id = failed_receipt(state, request_id, sampler.session_id, call, target)
    elif known is None and not state.promises.is_gone(
        request_id
    ):  # a late repetition draws nothing either
        source = await find_source(state, sampler)
        # the same request may have come twice while weights were sought
        if state.promises.get(request_id) is None:
            cancel = functools.partial(state.worker.cancel, request_id)
            promise = state.promises.add(
                request_id, call.digest, sampler.session_id, target, cancel, call.owner
            )

            if request.record_stability_info and sampler.session_id not in state.heard:
                # nobody could train on it
                request = request.model_copy(update={"record_stability_info": None})

            async def drawing(seed: int) -> SampleResponse:
                drawing = draw(state, request_id, source, request, seed, owner=call.owner)
                return await metered(state, call, sampler, request, drawing)

            await take_sample(state, promise, call, request, drawing)
    elif known is not None and known.recorded is not None:
        await asyncio.shield(known.recorded)
    return UntypedAPIFuture(
        request_id=request_id,
        sample_sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
    )


async def stream_sample(state: State, call: Call) -> SampleStream:
    """Draw samples and send each token when it is there; the number is not used, for nothing is
    kept under it.
    """
    request: SampleRequest = call.request
    sampler = await _sampler_of(state, call, request)
    _check_window(state, sampler, request)
    source = await find_source(state, sampler)
    request = request.model_copy(update={"record_stability_info": None})  # its samples have no ids
    job = f"{sampler.sampler_id}:stream:{secrets.token_hex(8)}"

    def start(listener: Listener) -> Awaitable[SampleResponse]:
        drawing = draw(state, job, source, request, listener=listener, owner=call.owner)
        return metered_stream(state, call, sampler, request, drawing)

    return SampleStream(start, lambda: state.worker.cancel(job), state.limits.quiet_seconds)


async def _sampler_of(state: State, call: Call, request: SampleRequest) -> Sampler:
    """The sampler a request names, or one made for the model or checkpoint that it names instead."""
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
        base_model = await _source(state, call, request.base_model, request.model_path)
        name = call.request_id.rpartition(":")[0] if call.request_id else f"{DIRECT}:{uuid.uuid4()}"
        return Sampler(name, DIRECT, base_model, request.model_path, owner=call.owner)
    sampler = state.store.known_sampler(request.sampling_session_id)
    if sampler is None:
        sampler = await asyncio.to_thread(state.store.sampler, request.sampling_session_id)
    if sampler is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    state.hear(sampler.session_id)
    return sampler


def _check_window(state: State, sampler: Sampler, request: SampleRequest) -> None:
    """Refuse what does not fit the model's window at once: programs look for this in the answer to
    their request.
    """
    window = state.windows.get(sampler.base_model)
    if window is not None:
        try:
            size = request.prompt.length
        except ValueError:  # of an image nobody said how many tokens it takes: the engine will say whether it sees any
            return
        try:
            token_limit(request, size, window)
        except EngineError as error:
            raise Refusal(400, str(error)) from None


async def join_sampling_session(state: State, call: Call) -> JoinSamplingSessionResponse:
    """Give one more client of a sampler a number of its own, under which it numbers its requests."""
    request: JoinSamplingSessionRequest = call.request
    if await asyncio.to_thread(state.store.sampler, request.sampling_session_id) is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    number = await asyncio.to_thread(state.store.join_sampler, request.sampling_session_id)
    return JoinSamplingSessionResponse(client_counter=number)


# ── futures ───────────────────────────────────────────────────────────────────────────────────────


async def retrieve_futures(state: State, call: Call) -> FuturesRetrieveResponse | Body:
    """Say which samples of a client have ended, and bring their results along if that is asked for."""
    return await poll(state, call.request)


async def cancel_future(state: State, call: Call) -> Empty:
    """Give a sample up. Whatever has a place in a run's order is carried out all the same, and what
    has ended stays.
    """
    request: CancelFutureRequest = call.request
    promise = state.promises.get(request.request_id)
    if (
        promise is not None
        and promise.cancel is not None
        and await is_own(state, call.owner, "request_id", request.request_id)
    ):
        promise.cancel()
        promise.fail(CANCELLED)
    return Empty()


Handler: TypeAlias = Callable[[State, Call], Awaitable[Any]]

HANDLERS: dict[str, Handler] = {
    handler.__name__: handler
    for handler in (
        client_config,
        client_dynamic_config,
        create_session,
        session_heartbeat,
        finish_session,
        create_model,
        get_info,
        forward_backward,
        forward,
        optim_step,
        drop_gradients,
        create_custom_loss,
        unload_model,
        save_weights,
        save_weights_for_sampler,
        load_weights,
        weights_info,
        create_sampling_session,
        get_sampler,
        asample,
        stream_sample,
        join_sampling_session,
        retrieve_futures,
        cancel_future,
        get_server_capabilities,
        healthz,
        telemetry,
        save_weights_external,
        copy_weights,
        list_training_runs,
        get_training_run,
        list_checkpoints,
        list_user_checkpoints,
        delete_checkpoint,
        publish_checkpoint,
        unpublish_checkpoint,
        set_checkpoint_ttl,
        get_external_weights_urls,
        get_checkpoint_archive,
        auth_token,
        get_api_key,
        delete_api_key,
        get_session,
        list_sessions,
        search_sessions,
        search_checkpoints,
        external_weights_upload_start,
        external_weights_upload_finish,
        assign_session_project,
        export_session_trace,
        get_billing_usage,
        get_current_checkpoint_storage_usage,
        get_audit_log,
    )
}
