"""Create runs, train them, describe and unload them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence

from tinkex.engine.api import EngineError, EngineLost, PassJob, Recalled
from tinkex.engine.losses.table import CUSTOM, STABLE_REINFORCE
from tinkex.server.calls import Call
from tinkex.server.database.interface import Run
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler, run_operation
from tinkex.server.runs.admission import CARRY_ON
from tinkex.server.runs.work import Creation, Discard, LiveRun, Pass, Refused, Step, Work
from tinkex.server.samples.provenance import recall
from tinkex.server.state import State
from tinkex.server.workers.worker import Worker
from tinkex.types.optimizers import AdamParams, OptimizerConfigBase, OptimParamsBase
from tinkex.types.saves import LoadWeightsRequest
from tinkex.types.sessions import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    CreateModelRequest,
    CreateModelResponse,
    DropGradientsRequest,
    DropGradientsResponse,
    GetInfoRequest,
    GetInfoResponse,
    ModelData,
)
from tinkex.types.training import (
    ForwardBackwardRequest,
    ForwardRequest,
    LoraConfig,
    OptimStepRequest,
    OptimStepResponse,
    UntypedAPIFuture,
)

DEFAULT_RANK = 32


LOSS = ":loss:"
"""Separates a session's id from a number in the id of a custom loss."""


@run_operation
async def create_model(state: State, call: Call) -> Creation:
    """Start a training run; asking again for the same one gives the same."""
    request: CreateModelRequest = call.request
    await state.sessions.require(request.session_id)
    run = f"{request.session_id}:train:{request.model_seq_id}"
    lora = request.lora_config or LoraConfig(rank=DEFAULT_RANK)
    if not call.is_replayed:
        # a name that is not there is refused at once, as for samplers
        state.workers.base_model(request.base_model)

    async def make() -> CreateModelResponse:
        worker = await home_of(state, call, run, request.base_model)
        optimizer = request.optimizer_config
        made = await worker.run(
            new_run, state, worker, run, call, request.base_model, lora, optimizer
        )
        state.runs.enter(LiveRun(made, worker))
        return CreateModelResponse(model_id=run)

    def fits(known: Run) -> bool:
        return (known.base_model, known.lora) == (request.base_model, lora)

    return Creation(run, request.session_id, f"{run}:0", make, fits, request.base_model)


async def home_of(state: State, call: Call, run: str, base_model: str) -> Worker:
    """Return the worker for a run that is made: that of its record, if it was made before."""
    known = await asyncio.to_thread(state.database.runs.get, run) if call.is_replayed else None
    return state.workers.home(run, base_model, None if known is None else known.home)


def new_run(
    state: State,
    worker: Worker,
    name: str,
    call: Call,
    base_model: str,
    lora: LoraConfig,
    optimizer: OptimizerConfigBase,
) -> Run:
    """Make an adapter and put its run on record; on the worker."""
    request: CreateModelRequest | LoadWeightsRequest = call.request
    assert request.session_id is not None
    base = state.workers.base_model(base_model)
    known = state.database.runs.get(name)
    if known is not None and not call.is_replayed:  # it was unloaded
        raise EngineError(f"model {name!r} is no longer loaded; {CARRY_ON}")
    worker.engine.create(name, base_model, lora, optimizer)
    run = Run(
        name,
        request.session_id,
        base_model,
        lora,
        optimizer.to_wire(),
        request.user_metadata or {},
        call.owner,
        base.digest,
        worker.name,
    )
    if known is None:
        state.database.runs.add(run)
    return run


@run_operation
async def forward_backward(state: State, call: Call) -> Work:
    """Describe a pass, with or without its gradient."""
    request: ForwardBackwardRequest = call.request
    body, run = request.forward_backward_input, request.model_id
    config = body.loss_fn_config or {}
    recalled: Sequence[Recalled] | None = None
    admitted: Callable[[int], object] | None = None
    loss_id = config.get("loss_id") if body.loss_fn == CUSTOM else None
    if isinstance(loss_id, str):
        if LOSS in loss_id and not loss_id.startswith(f"{_session_of(run)}{LOSS}"):
            return Refused(
                f"the custom loss {loss_id!r} belongs to another session; create it in this one"
            )
        await state.revivals.revived(loss_id)
    if body.loss_fn == STABLE_REINFORCE:
        session_id, records = _session_of(run), state.recordings
        try:
            recalled, names = await recall(
                records, session_id, body.data, is_replayed=call.is_replayed
            )
        except EngineError as error:
            if call.is_replayed or error.category != "user":
                raise
            return Refused(str(error))
        admitted = functools.partial(records.hold, session_id, run, names=names)
        state.promises.keep(asyncio.ensure_future(records.note_use(session_id, names)))

    job = PassJob(
        "",
        run,
        body.data,
        body.loss_fn,
        config,
        backward=not request.forward_only,
        owner=call.owner,
        recalled=recalled,
    )
    return Pass(job, admitted)


def _session_of(run: str) -> str:
    return run.rpartition(":train:")[0]


@run_operation
async def forward(state: State, call: Call) -> Work:
    """Describe a forward pass as older clients ask for it."""
    request: ForwardRequest = call.request
    call.request = ForwardBackwardRequest(
        forward_backward_input=request.forward_input,
        model_id=request.model_id,
        seq_id=request.seq_id,
        forward_only=True,
    )
    return await forward_backward(state, call)


@run_operation
async def optim_step(state: State, call: Call) -> Step:
    """Apply the accumulated gradient."""
    request: OptimStepRequest = call.request
    params = request.optim_params
    assert isinstance(params, AdamParams | OptimParamsBase)

    def work(live: LiveRun) -> OptimStepResponse:
        metrics = live.worker.engine.optim_step(request.model_id, params)
        return OptimStepResponse(metrics=metrics)

    return Step(work)


@run_operation
async def drop_gradients(state: State, call: Call) -> Discard:
    """Drop the gradient that was gathered since the last step, after everything asked before."""
    request: DropGradientsRequest = call.request

    def work(live: LiveRun) -> DropGradientsResponse:
        live.worker.engine.drop_gradients(request.model_id)
        return DropGradientsResponse(model_id=request.model_id, type="drop_gradients")

    return Discard(work)


@run_operation
async def create_custom_loss(state: State, call: Call) -> Creation:
    """Take a loss that was sent as a graph, for the passes of its session."""
    request: CreateCustomLossRequest = call.request
    session_id = request.session_id
    await state.sessions.require(session_id)
    loss_id = f"{session_id}{LOSS}{request.custom_loss_seq_id}"

    async def make() -> CreateCustomLossResponse:
        for worker in state.workers:  # the runs of a session may be anywhere
            with contextlib.suppress(EngineLost):  # a worker gets it with its new process
                await worker.run(worker.engine.create_loss, loss_id, request)
            state.workers.losses[loss_id] = request
            if session_id not in state.sessions:
                state.workers.losses.pop(loss_id, None)
                worker.run(worker.engine.drop_losses, loss_id)
                raise EngineError("the session has ended")
        return CreateCustomLossResponse(loss_id=loss_id)

    return Creation(loss_id, session_id, loss_id, make)


@handler
async def unload_model(state: State, call: Call) -> UntypedAPIFuture:
    """Free what a run holds in memory, once everything asked of it so far is done."""
    return await state.unloading.unload(call)


@handler
async def get_info(state: State, call: Call) -> GetInfoResponse:
    """Describe a run."""
    request: GetInfoRequest = call.request
    run = await asyncio.to_thread(state.database.runs.get, request.model_id)
    if run is None:
        raise Refusal(404, f"there is no model {request.model_id!r}")
    model = state.workers.base_model(run.base_model)
    return GetInfoResponse(
        model_data=ModelData(arch=model.arch, model_name=model.name, tokenizer_id=model.name),
        model_id=run.model_id,
        optimizer_config=OptimizerConfigBase.from_wire(run.optimizer),
        is_lora=True,
        lora_rank=run.lora.rank,
        model_name=model.name,
        type="get_info",
    )
