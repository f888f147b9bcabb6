"""Create runs, train them, describe and unload them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from tinkex.engine.api import EngineError, Recalled
from tinkex.engine.losses.table import CUSTOM, STABLE_REINFORCE
from tinkex.server.calls import Call
from tinkex.server.database.entities import Run
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.session_calls import require_session
from tinkex.server.runs.admission import (
    enqueue,
    enqueue_unload,
    failed_receipt,
    live_run,
    promise_once,
    spend,
)
from tinkex.server.samples.provenance import recall
from tinkex.server.state import CARRY_ON, LiveRun, State
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
)
from tinkex.types.custom_losses import CreateCustomLossRequest, CreateCustomLossResponse
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

DEFAULT_RANK = 32


LOSS = ":loss:"
"""Separates a session's id from a number in the id of a custom loss."""


@handler
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
    known = state.database.runs.get(model_id)
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
        state.database.runs.add(run)
    return run


@handler
async def forward_backward(state: State, call: Call) -> UntypedAPIFuture:
    """A pass, with or without its gradient."""
    request: ForwardBackwardRequest = call.request
    body = request.forward_backward_input
    loss_id = (body.loss_fn_config or {}).get("loss_id") if body.loss_fn == CUSTOM else None
    if isinstance(loss_id, str):
        await state.revived(loss_id)

    def start(job: str) -> None:
        if body.loss_fn == CUSTOM:
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


@handler
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


@handler
async def optim_step(state: State, call: Call) -> UntypedAPIFuture:
    """Apply the accumulated gradient."""
    request: OptimStepRequest = call.request

    params = request.optim_params
    assert isinstance(params, AdamParams | OptimParamsBase)

    def work() -> OptimStepResponse:
        return OptimStepResponse(metrics=state.engine.optim_step(request.model_id, params))

    return await enqueue(state, call, request.model_id, request.seq_id, work)


@handler
async def drop_gradients(state: State, call: Call) -> UntypedAPIFuture:
    """Drop the gradient that was gathered since the last step, when everything asked for before is
    done.
    """
    request: DropGradientsRequest = call.request

    def work() -> DropGradientsResponse:
        state.engine.drop_gradients(request.model_id)
        return DropGradientsResponse(model_id=request.model_id, type="drop_gradients")

    return await enqueue(state, call, request.model_id, request.seq_id, work)


@handler
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


@handler
async def unload_model(state: State, call: Call) -> UntypedAPIFuture:
    """Free what a run holds in memory, once everything asked of it so far is done."""
    request: UnloadModelRequest = call.request
    return await enqueue_unload(state, call, request.model_id)


@handler
async def get_info(state: State, call: Call) -> GetInfoResponse:
    """What a run trains."""
    request: GetInfoRequest = call.request
    run = await asyncio.to_thread(state.database.runs.get, request.model_id)
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
