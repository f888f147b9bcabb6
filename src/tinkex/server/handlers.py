"""What each operation does: one function per row of the table, over the server's state.

A handler validates what must be known before anything is promised (and refuses with an HTTP status), then hands the
work to the worker and returns a receipt. Whatever fails after that fails in band, in the future's result.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.engine import BaseModel, Engine, EngineError
from tinkex.server.promises import Promise, Promises
from tinkex.server.scheduler import Lane, Worker
from tinkex.server.store import Run, Sampler, SavedCheckpoint, Store
from tinkex.types.checkpoints import (
    KINDS,
    SCHEME,
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
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
)
from tinkex.types.sessions import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SupportedModel,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.training import (
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimizerConfigBase,
    OptimStepRequest,
    OptimStepResponse,
    UntypedAPIFuture,
)

logger = logging.getLogger("tinkex.server")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
DEFAULT_RANK = 32
CARRY_ON = "carry on from a saved state with create_training_client_from_state_with_optimizer"
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600


class Refusal(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server will not exceed."""

    poll_seconds: float = 25.0
    gap_seconds: float = 60.0
    session_seconds: float = 1800.0
    body_bytes: int = 1 << 30
    samples: int = 1024
    samplers: int = 64
    snapshots: int = 64


@dataclass(frozen=True, slots=True)
class Queued:
    """An operation that waits for its turn."""

    promise: Promise
    work: Callable[[], Any]
    after: Callable[[Any], Any] | None = None
    """What is to be done with the work's result, on the event loop."""


@dataclass(slots=True)
class LiveRun:
    """A training run whose adapter is in the engine."""

    run: Run
    lane: Lane[Queued] = field(default_factory=lambda: Lane[Queued]())
    gap: int | None = None
    gap_timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Call:
    """A decoded request and what came with it."""

    request: Any
    path: dict[str, str]
    digest: bytes


class State:
    """Everything a running server knows; made by `create_app`, started and stopped by its lifespan."""

    def __init__(self, engine: Engine, data_dir: Path, limits: Limits) -> None:
        data_dir = data_dir.expanduser().resolve()
        self.engine = engine
        self.data_dir = data_dir
        self.limits = limits
        self.worker = Worker(engine)
        self.promises = Promises()
        self.runs: dict[str, LiveRun] = {}
        self.heard: dict[str, float] = {}
        self.snapshots: dict[str, Path | None] = {}
        """Nameless samplers, and where their weights are once they had to make room in memory."""
        self.loading: dict[str, asyncio.Future[None]] = {}
        data_dir.mkdir(parents=True, exist_ok=True)
        self.checkpoint_dir = data_dir / "checkpoints"
        self.checkpoint_dir.mkdir(exist_ok=True)
        self.store = Store(data_dir / "tinkex.sqlite3")

    def base_model(self, name: str) -> BaseModel:
        """A base model by name; the error lists the ones there are."""
        models = {model.name: model for model in self.engine.models()}
        if name not in models:
            raise EngineError(f"there is no base model {name!r}; this server has: {', '.join(sorted(models))}")
        return models[name]

    def end_session(self, session_id: str) -> None:
        """Free what a session holds in memory; its runs and checkpoints stay on record."""
        self.heard.pop(session_id, None)
        for model_id in [m for m, live in self.runs.items() if live.run.session_id == session_id]:
            live = self.runs.pop(model_id)
            if live.gap_timer is not None:
                live.gap_timer.cancel()
            self.worker.run(self.engine.drop, model_id)
        self.worker.cancel_samples(f"{session_id}:")
        for sampler in [name for name in self.snapshots if name.startswith(f"{session_id}:")]:
            self.worker.run(self._forget_snapshot, sampler, self.snapshots.pop(sampler))
            self.loading.pop(sampler, None)
        self.promises.forget_session(session_id)

    def was_known(self, request_id: str) -> bool:
        """Whether a request that is not known belongs to a run or sampler of an earlier life of the server."""
        owner = request_id.rpartition(":")[0]
        return owner not in self.runs and (self.store.run(owner) is not None or self.store.sampler(owner) is not None)

    def keep_snapshot(self, session_id: str, sampler: str) -> None:
        """Take a nameless sampler in; the oldest beyond what memory is to hold are put on disk."""
        if session_id not in self.heard:
            self.worker.run(self.engine.drop_sampler, sampler)
            raise EngineError("the session has ended")
        self.snapshots[sampler] = None
        in_memory = [name for name, directory in self.snapshots.items() if directory is None]
        for name in in_memory[: -self.limits.snapshots]:
            directory = self.data_dir / "snapshots" / name.replace(":", "_")
            self.snapshots[name] = directory  # whoever asks from now on is queued behind the saving
            self.worker.run(self._spill_snapshot, name, directory)

    def _spill_snapshot(self, sampler: str, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.engine.save_sampler(sampler, directory)
        self.engine.drop_sampler(sampler)

    def _forget_snapshot(self, sampler: str, directory: Path | None) -> None:
        self.engine.drop_sampler(sampler)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    async def tend(self) -> None:
        """Until cancelled: forget results whose time is over, and sessions that fell silent."""
        while True:
            await asyncio.sleep(15)
            try:
                await self._sweep()
            except Exception:
                logger.exception("tidying up failed; it is tried again")

    async def _sweep(self) -> None:
        self.promises.sweep()
        silent = time.monotonic() - self.limits.session_seconds
        for session_id in [s for s, heard in self.heard.items() if heard < silent]:
            await asyncio.to_thread(self.store.finish_session, session_id, "expired", "no heartbeat")
            self.end_session(session_id)


# ── sessions and configuration ───────────────────────────────────────────────────────────────────────────────────


async def client_config(state: State, call: Call) -> ClientConfigResponse:
    """How clients should behave: a call is one request, so that bad data in it leaves no half of its gradient."""
    assert isinstance(call.request, ClientConfigRequest)
    return ClientConfigResponse(fwdbwd_max_chunk_len=1_000_000, fwdbwd_max_chunk_bytes_count=256_000_000)


async def client_dynamic_config(state: State, call: Call) -> ClientDynamicConfigResponse:
    """Nothing changes while a client runs."""
    return ClientDynamicConfigResponse()


async def create_session(state: State, call: Call) -> CreateSessionResponse:
    """Open a session."""
    request: CreateSessionRequest = call.request
    session_id = str(uuid.uuid4())
    await asyncio.to_thread(state.store.add_session, session_id, request.model_dump(mode="json"))
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
        if known == "finished":
            raise Refusal(410, f"session {session_id!r} is finished")
    state.heard[session_id] = time.monotonic()


async def finish_session(state: State, call: Call) -> Empty:
    """Close a session; the first reason stays."""
    request: FinishSessionRequest = call.request
    session_id = call.path["session_id"]
    if await asyncio.to_thread(state.store.session_state, session_id) is None:
        raise Refusal(404, f"there is no session {session_id!r}")
    await asyncio.to_thread(state.store.finish_session, session_id, request.reason.type, request.detail)
    state.end_session(session_id)
    return Empty()


async def get_server_capabilities(state: State, call: Call) -> GetServerCapabilitiesResponse:
    """The models on offer."""
    return GetServerCapabilitiesResponse(
        supported_models=[
            SupportedModel(
                model_name=model.name,
                max_context_length=model.context_length,
                trainable=True,
                sampleable=True,
            )
            for model in state.engine.models()
        ]
    )


async def healthz(state: State, call: Call) -> HealthResponse:
    """The server answers, so it is well."""
    return HealthResponse(status="ok")


async def telemetry(state: State, call: Call) -> TelemetryResponse:
    """Client events are taken and not kept."""
    assert isinstance(call.request, TelemetrySendRequest)
    return TelemetryResponse(status="accepted")


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def create_model(state: State, call: Call) -> UntypedAPIFuture:
    """Start a training run; asking again for the same one gives the same."""
    request: CreateModelRequest = call.request
    await require_session(state, request.session_id)
    model_id = f"{request.session_id}:train:{request.model_seq_id}"
    lora = request.lora_config or LoraConfig(rank=DEFAULT_RANK)

    async def creating() -> CreateModelResponse:
        run = await state.worker.run(new_run, state, model_id, request.session_id, request.base_model, lora, request)
        enter(state, run)
        return CreateModelResponse(model_id=model_id)

    return promise_once(state, f"{model_id}:0", request.session_id, call, creating, model_id)


def enter(state: State, run: Run) -> None:
    """Take a run in whose adapter has been made; on the event loop, as all changes of what is live."""
    if run.session_id not in state.heard:
        state.worker.run(state.engine.drop, run.model_id)
        raise EngineError("the session has ended")
    state.runs[run.model_id] = LiveRun(run)


def new_run(
    state: State,
    model_id: str,
    session_id: str,
    base_model: str,
    lora: LoraConfig,
    request: CreateModelRequest | LoadWeightsRequest,
) -> Run:
    """Make an adapter and put its run on record; on the worker."""
    optimizer = request.optimizer_config.to_wire() if request.optimizer_config else {"type": "adamw"}
    if optimizer["type"] != "adamw":
        raise EngineError(f"optimizer {optimizer['type']!r} is not supported by this server; it has: adamw")
    state.base_model(base_model)
    if state.store.run(model_id) is not None:  # its live state went with an earlier life of the server
        raise EngineError(f"model {model_id!r} is no longer loaded; {CARRY_ON}")
    state.engine.create(model_id, base_model, lora)
    run = Run(model_id, session_id, base_model, lora, optimizer, request.user_metadata or {})
    state.store.add_run(run)
    return run


def promise_once(
    state: State,
    request_id: str,
    session_id: str,
    call: Call,
    begin: Callable[[], Awaitable[Any]],
    model_id: str | None = None,
) -> UntypedAPIFuture:
    """A receipt for work that has no place in a lane; the same request again gets the same receipt."""
    if state.promises.get(request_id) is None:
        promise = state.promises.add(request_id, call.digest, session_id)
        state.promises.follow(promise, begin())
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def live_run(state: State, model_id: str) -> LiveRun:
    """The run an operation is for."""
    live = state.runs.get(model_id)
    if live is not None:
        state.heard[live.run.session_id] = time.monotonic()
        return live
    if await asyncio.to_thread(state.store.run, model_id) is None:
        raise Refusal(404, f"there is no model {model_id!r}")
    raise Refusal(
        410,
        f"model {model_id!r} is no longer loaded (its session ended or the server was restarted); {CARRY_ON}",
    )


async def enqueue(
    state: State,
    call: Call,
    model_id: str,
    seq_id: int | None,
    work: Callable[[], Any],
    after: Callable[[Any], Any] | None = None,
) -> UntypedAPIFuture:
    """Put an operation into its run's lane; a repeated number gives the original receipt."""
    live = await live_run(state, model_id)
    number = live.lane.free if seq_id is None else seq_id
    if number < 1:
        raise Refusal(400, f"seq_id must be at least 1, got {number}")
    request_id = f"{model_id}:{number}"
    known = state.promises.get(request_id)
    if known is not None and known.digest == call.digest:
        return UntypedAPIFuture(request_id=request_id, model_id=model_id)
    if known is not None:
        receipt = failed_receipt(state, request_id, live.run.session_id, call)
        return UntypedAPIFuture(request_id=receipt, model_id=model_id)
    promise = state.promises.add(request_id, call.digest, live.run.session_id)
    try:
        released = live.lane.offer(number, Queued(promise, work, after))
    except ValueError:
        promise.fail(f"request number {number} of this run has passed; the next one is {live.lane.next}")
        released = []
    for queued in released:
        state.promises.follow(queued.promise, _execute(state.worker.run(queued.work), queued.after))
    _watch_gap(state, live)
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def spend_number(state: State, numbered: tuple[str, int] | None, body: bytes, why: str) -> None:
    """Let a refused request use its number up: its client has moved on, and later requests must not wait for it."""
    if numbered is None or numbered[0] not in state.runs:
        return

    def work() -> None:
        raise EngineError(why)

    await enqueue(state, Call(None, {}, digest_of("", body)), *numbered, work)


def failed_receipt(state: State, request_id: str, session_id: str, call: Call) -> str:
    """The id of a failure for a request whose number belongs to another: it is read like any other result."""
    failed_id = f"{request_id}:{call.digest.hex()[:12]}"
    if state.promises.get(failed_id) is None:
        number = request_id.rpartition(":")[2]
        promise = state.promises.add(failed_id, call.digest, session_id)
        promise.fail(f"request number {number} was used before, for another request")
    return failed_id


async def _execute(running: asyncio.Future[Any], after: Callable[[Any], Any] | None) -> Any:
    result = await running
    return after(result) if after else result


def _watch_gap(state: State, live: LiveRun) -> None:
    """Start, or stop, the clock of a missing number; others that arrive meanwhile do not set it back."""
    missing = live.lane.missing
    if missing == live.gap:
        return
    live.gap = missing
    if live.gap_timer is not None:
        live.gap_timer.cancel()
        live.gap_timer = None
    if missing is not None:
        loop = asyncio.get_running_loop()
        live.gap_timer = loop.call_later(state.limits.gap_seconds, _close_gap, live, missing)


def _close_gap(live: LiveRun, missing: int) -> None:
    live.gap = live.gap_timer = None
    abandoned = live.lane.give_up()
    for queued in abandoned:
        queued.promise.fail(
            f"request number {missing} of this run never arrived, so the {len(abandoned)} after it were not "
            "executed; the run goes on with the next request"
        )


async def forward_backward(state: State, call: Call) -> UntypedAPIFuture:
    """A pass, with or without its gradient."""
    request: ForwardBackwardRequest = call.request
    body = request.forward_backward_input

    def work() -> Any:
        return state.engine.forward_backward(
            request.model_id,
            body.data,
            body.loss_fn,
            body.loss_fn_config or {},
            backward=not request.forward_only,
        )

    return await enqueue(state, call, request.model_id, request.seq_id, work)


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

    def work() -> OptimStepResponse:
        if request.adam_params is None:
            raise EngineError("this server's optimizer is adamw: optim_step needs adam_params")
        return OptimStepResponse(metrics=state.engine.optim_step(request.model_id, request.adam_params))

    return await enqueue(state, call, request.model_id, request.seq_id, work)


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


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_checkpoint(
    state: State,
    run: Run,
    kind: str,
    name: str,
    *,
    optimizer: bool,
    overwrite: bool,
    ttl_seconds: int | None,
    user_metadata: dict[str, str] | None,
) -> str:
    """Write to a temporary name, rename, then record: a checkpoint is whole or not there. On the worker."""
    if not NAME.fullmatch(name):
        raise EngineError(
            f"checkpoint name {name!r} is not allowed: use letters, digits, '.', '_' and '-', at most 200"
        )
    if ttl_seconds is not None and not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise EngineError(f"ttl_seconds must lie between {MIN_TTL} and {MAX_TTL}, got {ttl_seconds}")
    path = f"{SCHEME}{run.model_id}/{kind}/{name}"
    existing = state.store.checkpoint(path)
    if existing is not None and not overwrite:
        hint = "; pass overwrite=True to replace it" if kind == "weights" else ""
        raise EngineError(f"checkpoint {path} exists already{hint}")
    parent = state.checkpoint_dir / run.model_id.replace(":", "_") / kind
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / (name if existing is None else f"{name}.{secrets.token_hex(4)}")
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        state.engine.save(run.model_id, scratch, optimizer=optimizer)
        if target.exists():  # an expired checkpoint, or one whose record was lost: the name is free
            shutil.rmtree(target)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _sync_directory(parent)
    state.store.put_checkpoint(
        SavedCheckpoint(
            tinker_path=path,
            model_id=run.model_id,
            directory=target,
            created=time.time(),
            base_model=run.base_model,
            lora=run.lora,
            optimizer=run.optimizer,
            size_bytes=sum(file.stat().st_size for file in target.iterdir()),
            expires=None if ttl_seconds is None else time.time() + ttl_seconds,
            user_metadata=user_metadata or {},
        )
    )
    if existing is not None:
        shutil.rmtree(existing.directory, ignore_errors=True)
    return path


def _sync_directory(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


async def save_weights(state: State, call: Call) -> UntypedAPIFuture:
    """Save weights and optimizer state."""
    request: SaveWeightsRequest = call.request
    run = (await live_run(state, request.model_id)).run

    def work() -> SaveWeightsResponse:
        path = save_checkpoint(
            state,
            run,
            "weights",
            request.path or f"step-{request.seq_id}",
            optimizer=True,
            overwrite=request.overwrite,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsResponse(path=path, type="save_weights")

    return await enqueue(state, call, request.model_id, request.seq_id, work)


async def save_weights_for_sampler(state: State, call: Call) -> UntypedAPIFuture:
    """Save weights to sample from: under a name, or as a nameless snapshot that lives with the session."""
    request: SaveWeightsForSamplerRequest = call.request
    run = (await live_run(state, request.model_id)).run

    def work() -> SaveWeightsForSamplerResponseInternal:
        if request.path is not None:
            path = save_checkpoint(
                state,
                run,
                "sampler_weights",
                request.path,
                optimizer=False,
                overwrite=False,
                ttl_seconds=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return SaveWeightsForSamplerResponseInternal(path=path, type="save_weights_for_sampler")
        if request.sampling_session_seq_id is None:
            raise EngineError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
        state.engine.snapshot(run.model_id, sampler_id)
        state.store.add_sampler(Sampler(sampler_id, run.session_id, run.base_model, None, is_snapshot=True))
        return SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id, type="save_weights_for_sampler")

    def after(saved: SaveWeightsForSamplerResponseInternal) -> SaveWeightsForSamplerResponseInternal:
        if saved.sampling_session_id is not None:
            state.keep_snapshot(run.session_id, saved.sampling_session_id)
        return saved

    # The official client counts sampling_session_seq_id up when it retries: it does not make another request of it.
    call.digest = digest_of("", to_json(request.model_copy(update={"sampling_session_seq_id": None})))
    return await enqueue(state, call, request.model_id, request.seq_id, work, after)


def find_checkpoint(state: State, path: str, kind: str, base_model: str | None = None) -> SavedCheckpoint:
    """A checkpoint of the kind (and the base model) an operation needs; each mistake gets its own message."""
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise EngineError(str(error)) from None
    if parsed.checkpoint_type != KINDS[kind]:
        raise EngineError(
            f"{path} is a {parsed.checkpoint_type} checkpoint; this needs a {KINDS[kind]} one "
            f"(tinker://<run>/{kind}/<name>)"
        )
    saved = state.store.checkpoint(path)
    if saved is None:
        raise EngineError(f"there is no checkpoint {path}; it was never saved, or has been deleted or expired")
    if base_model is not None and saved.base_model != base_model:
        raise EngineError(f"checkpoint {path} is of base model {saved.base_model!r}, this is {base_model!r}")
    return saved


async def load_weights(state: State, call: Call) -> UntypedAPIFuture:
    """Load a checkpoint into a run, or make a run of it."""
    request: LoadWeightsRequest = call.request
    if request.model_id is None:
        return await _create_by_loading(state, call, request)
    model_id = request.model_id

    base_model = (await live_run(state, model_id)).run.base_model

    def work() -> LoadWeightsResponse:
        saved = find_checkpoint(state, request.path, "weights", base_model)
        state.engine.load(model_id, saved.directory, optimizer=request.optimizer)
        return LoadWeightsResponse(path=request.path, model_id=model_id, type="load_weights")

    return await enqueue(state, call, model_id, request.seq_id, work)


async def _create_by_loading(state: State, call: Call, request: LoadWeightsRequest) -> UntypedAPIFuture:
    if request.session_id is None or request.model_seq_id is None:
        raise Refusal(400, "load_weights needs model_id, or session_id and model_seq_id")
    await require_session(state, request.session_id)
    session_id, model_id = request.session_id, f"{request.session_id}:train:{request.model_seq_id}"

    def work() -> Run:
        saved = find_checkpoint(state, request.path, "weights", request.base_model)
        run = new_run(state, model_id, session_id, saved.base_model, saved.lora, request)
        try:
            state.engine.load(model_id, saved.directory, optimizer=request.optimizer)
        except BaseException:  # a run that is not what was asked for must not be trained by mistake
            state.engine.drop(model_id)
            raise
        return run

    async def creating() -> LoadWeightsResponse:
        enter(state, await state.worker.run(work))
        return LoadWeightsResponse(path=request.path, model_id=model_id, type="load_weights")

    return promise_once(state, f"{model_id}:0", session_id, call, creating, model_id)


async def weights_info(state: State, call: Call) -> WeightsInfoResponse:
    """What a checkpoint holds."""
    request: WeightsInfoRequest = call.request
    try:
        ParsedCheckpointTinkerPath.from_tinker_path(request.tinker_path)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    saved = await asyncio.to_thread(state.store.checkpoint, request.tinker_path)
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


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def create_sampling_session(state: State, call: Call) -> CreateSamplingSessionResponse:
    """Bind a sampler to a base model or a checkpoint."""
    request: CreateSamplingSessionRequest = call.request
    await require_session(state, request.session_id)
    base_model = await _source(state, request.base_model, request.model_path)
    sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = Sampler(sampler_id, request.session_id, base_model, request.model_path)
    await asyncio.to_thread(state.store.add_sampler, sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


async def _source(state: State, base_model: str | None, model_path: str | None) -> str:
    """The base model under what someone wants to sample from; refuses what is not there."""
    try:
        if model_path is not None:
            saved = await asyncio.to_thread(find_checkpoint, state, model_path, "sampler_weights")
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
    if not 1 <= request.num_samples <= state.limits.samples:
        raise Refusal(400, f"num_samples must lie between 1 and {state.limits.samples}, got {request.num_samples}")
    sampler = await _sampler_of(state, request)
    number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
    request_id = f"{sampler.sampler_id}:{number}"
    known = state.promises.get(request_id)
    if known is not None and known.digest != call.digest:
        request_id = failed_receipt(state, request_id, sampler.session_id, call)
    elif known is None:
        source = await find_source(state, sampler)
        if state.promises.get(request_id) is None:  # the same request may have come twice while weights were sought
            seed = request.sampling_params.seed
            drawn = secrets.randbits(63) if seed is None else seed
            promise = state.promises.add(request_id, call.digest, sampler.session_id)
            state.promises.follow(promise, draw(state, request_id, source, request, drawn))
    return UntypedAPIFuture(
        request_id=request_id,
        sample_sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
    )


async def _sampler_of(state: State, request: SampleRequest) -> Sampler:
    """The sampler a request names, or one made for the model or checkpoint that it names instead."""
    if request.sampling_session_id is None:
        base_model = await _source(state, request.base_model, request.model_path)
        return Sampler(f"direct:{uuid.uuid4()}", "direct", base_model, request.model_path)
    sampler = await asyncio.to_thread(state.store.sampler, request.sampling_session_id)
    if sampler is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    if sampler.session_id in state.heard:
        state.heard[sampler.session_id] = time.monotonic()
    return sampler


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a sampler's weights are: the engine's name for them, and the files they can be loaded from."""

    name: str
    base_model: str
    directory: Path | None = None
    is_loadable: bool = True


async def find_source(state: State, sampler: Sampler) -> WeightSource:
    """The weights behind a sampler, as they are now; refuses what is no longer there."""
    if sampler.is_snapshot:
        if sampler.sampler_id not in state.snapshots:
            raise Refusal(
                410, f"the weights of sampler {sampler.sampler_id!r} went with their session; save them again"
            )
        directory = state.snapshots[sampler.sampler_id]
        return WeightSource(sampler.sampler_id, sampler.base_model, directory, is_loadable=directory is not None)
    if sampler.model_path is None:
        return WeightSource(f"base/{sampler.base_model}", sampler.base_model)
    saved = await asyncio.to_thread(state.store.checkpoint, sampler.model_path)
    if saved is None:
        raise Refusal(410, f"checkpoint {sampler.model_path} has been deleted or has expired")
    # The time belongs to the name: a path may be saved again once its first checkpoint has expired.
    return WeightSource(f"{saved.tinker_path}@{saved.created}", saved.base_model, saved.directory)


async def draw(
    state: State, request_id: str, source: WeightSource, request: SampleRequest, seed: int
) -> SampleResponse:
    """Queue the loading of weights that are not there yet, then the sample, without a pause between the two.

    The worker keeps that order, and a job holds its weights: they cannot be dropped before it has them.
    """
    loading = load(state, source) if source.is_loadable else None
    try:
        return await state.worker.sample(request_id, source.name, request, seed)
    except EngineError:
        if loading is not None and loading.done() and (error := loading.exception()) is not None:
            raise error from None
        raise


def load(state: State, source: WeightSource) -> asyncio.Future[None]:
    """Load weights unless they are there or on their way; the longest unused make room. A failure is not kept."""
    loading = state.loading.pop(source.name, None)
    if loading is None:
        loading = state.worker.run(state.engine.load_sampler, source.name, source.base_model, source.directory)
        loading.add_done_callback(lambda done: state.loading.pop(source.name, None) if done.exception() else None)
    state.loading[source.name] = loading  # the last used comes last
    while len(state.loading) > state.limits.samplers:
        oldest = next(iter(state.loading))
        del state.loading[oldest]
        state.worker.run(state.engine.drop_sampler, oldest)
    return loading


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
        save_weights,
        save_weights_for_sampler,
        load_weights,
        weights_info,
        create_sampling_session,
        get_sampler,
        asample,
        get_server_capabilities,
        healthz,
        telemetry,
    )
}


def digest_of(path: str, body: bytes) -> bytes:
    """What makes two requests the same request."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
