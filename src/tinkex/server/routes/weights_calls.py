"""Save weights, export them, load them, and describe checkpoints."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tinkex.engine.api import EngineError
from tinkex.server.calls import Call, digest_of
from tinkex.server.database.interface import Run, Save as Saved
from tinkex.server.files.checkpoint_files import SaveSpec, reading
from tinkex.server.files.seals import check
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler, run_operation
from tinkex.server.routes.records import nothing_at, parsed_path
from tinkex.server.routes.training_calls import home_of, new_run
from tinkex.server.runs.work import Creation, LiveRun, Load, Save
from tinkex.server.samples.samplers import check_inflight
from tinkex.server.state import State
from tinkex.server.workers.worker import OffThread, Worker
from tinkex.types.optimizers import OptimizerConfigBase
from tinkex.types.record import to_json
from tinkex.types.saves import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.training import LoraConfig
from tinkex.wire.codec import JSON

RECIPIENTS, MOST_RECIPIENTS = "age_encryption_recipients", 10


def _save(
    state: State,
    call: Call,
    live: LiveRun,
    spec: SaveSpec,
    answer: Callable[[Saved], Any],
    *,
    optimizer: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> OffThread:
    """Save the files of a run; a repeated request finds its own work done."""
    write = live.worker.engine.writer(live.run.model_id, optimizer=optimizer)
    spec = replace(spec, request_id=f"{live.run.model_id}:{call.number}")
    return state.checkpoints.save(live.run, spec, write, answer, finish)


@run_operation
async def save_weights(state: State, call: Call) -> Save:
    """Save weights and optimizer state."""
    request: SaveWeightsRequest = call.request
    spec = SaveSpec(
        "weights",
        request.path or f"step-{request.seq_id}",
        request.ttl_seconds,
        request.user_metadata or {},
        request.overwrite,
    )

    def answer(saved: Saved) -> SaveWeightsResponse:
        return SaveWeightsResponse(path=saved.tinker_path, type="save_weights")

    return Save(lambda live: _save(state, call, live, spec, answer, optimizer=True))


@run_operation
async def save_weights_external(state: State, call: Call) -> Save:
    """Save weights as files to fetch, encrypted when there are recipients."""
    request: SaveWeightsExternalRequest = call.request
    spec = SaveSpec("external_weights", request.path, request.ttl_seconds)

    def answer(saved: Saved) -> SaveWeightsExternalResponseInternal:
        return SaveWeightsExternalResponseInternal(
            path=saved.tinker_path, size_bytes=saved.size_bytes, type="save_weights_external"
        )

    def work(live: LiveRun) -> OffThread:
        recipients = request.age_encryption_recipients
        finish = encryption(recipients) if recipients else None
        return _save(state, call, live, spec, answer, finish=finish)

    return Save(work)


@run_operation
async def save_weights_for_sampler(state: State, call: Call) -> Save:
    """Save weights to sample from, under a name or as a nameless sampler."""
    request: SaveWeightsForSamplerRequest = call.request
    # The official client counts sampling_session_seq_id up when it retries: it does not make
    # another request of it.
    same = to_json(request.model_copy(update={"sampling_session_seq_id": None}))
    call.digest = digest_of("", same)
    metadata = request.user_metadata or {}
    spec = SaveSpec("sampler_weights", request.path or "", request.ttl_seconds, metadata)
    answer: Callable[..., SaveWeightsForSamplerResponseInternal]
    answer = partial(SaveWeightsForSamplerResponseInternal, type="save_weights_for_sampler")
    version: int | None = None

    def save_in_memory(live: LiveRun) -> SaveWeightsForSamplerResponseInternal:
        nonlocal version
        sampler_id = _nameless_id(state, live.run, request)
        assert call.number is not None
        if request.kind == "inflight":
            version = state.samplers.targets.save(live, sampler_id, call.number)
        else:
            state.samplers.save(live, sampler_id, call.number)
        return answer(sampling_session_id=sampler_id)

    def work(live: LiveRun) -> SaveWeightsForSamplerResponseInternal | OffThread:
        if request.kind == "inflight":
            check_inflight(request)
        if request.path is None:
            return save_in_memory(live)
        return _save(state, call, live, spec, lambda saved: answer(path=saved.tinker_path))

    def after(
        live: LiveRun, saved: SaveWeightsForSamplerResponseInternal
    ) -> SaveWeightsForSamplerResponseInternal:
        if (sampler_id := saved.sampling_session_id) is not None:
            if request.kind != "inflight":
                state.samplers.nameless.keep(live.run.session_id, sampler_id, live.worker)
            elif version is not None:
                state.samplers.targets.publish(live, sampler_id, version)
        return saved

    return Save(work, after)


def _nameless_id(state: State, run: Run, request: SaveWeightsForSamplerRequest) -> str:
    """Return the id of the sampler that is saved without a path."""
    if request.sampling_session_seq_id is None:
        raise EngineError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
    sampler_id = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
    known = state.database.samplers.get(sampler_id)
    if known is not None and known.model_id != run.model_id:
        why = "was opened before, not for this run"
        raise EngineError(f"sampling session {sampler_id!r} {why}: use another number")
    return sampler_id


def encryption(recipients: Sequence[str]) -> Callable[[Path], None]:
    """Return a function that encrypts a directory; refuse bad recipients."""
    if len(recipients) > MOST_RECIPIENTS:
        raise EngineError(
            f"{RECIPIENTS}: at most {MOST_RECIPIENTS} are possible, got {len(recipients)}"
        )
    try:
        pyrage: Any = importlib.import_module("pyrage")
    except ImportError:
        why = "this server cannot encrypt, because pyrage is not installed there"
        how = "install it there (pip install pyrage), or leave the recipients out"
        raise EngineError(f"{RECIPIENTS}: {why}; {how}") from None
    keys = [_recipient(pyrage, text) for text in recipients]

    def encrypt(directory: Path) -> None:
        for path in list(directory.iterdir()):
            pyrage.encrypt_file(str(path), str(path.with_name(f"{path.name}.age")), keys)
            path.unlink()

    return encrypt


def _recipient(pyrage: Any, text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        why = f"{text!r} is no public key; give one that begins with age1 or ssh-"
        raise EngineError(f"{RECIPIENTS}: {why} ({error})") from None


@run_operation
async def load_weights(state: State, call: Call) -> Load | Creation:
    """Load a checkpoint into a run, or make a run of it."""
    request: LoadWeightsRequest = call.request
    reader = call.reader or await state.accounts.reader(call.owner, request.weights_access_token)
    # whose it is will do, and no secret is put on disk
    if request.weights_access_token is not None:
        call.reader, call.content_type, call.encoding = reader, JSON, None
        call.body = to_json(request.model_copy(update={"weights_access_token": None}))
    if request.model_id is None:
        return await _create_by_loading(state, call, request, reader)
    run = request.model_id

    def work(live: LiveRun) -> LoadWeightsResponse:
        assert call.number is not None
        engine = live.worker.engine
        if state.strict and call.number > 1:
            raise EngineError(
                "LoadWeights is not permitted after a run's first operation (this server is "
                "strict); create a run from the checkpoint instead"
            )
        if (loaded := _loaded_before(state, call, run, call.number)) is not None:
            check(loaded)
            engine.load(run, loaded, optimizer=True)
        else:
            base_model = live.run.base_model
            saved = state.checkpoints.find(request.path, "weights", base_model, reader=reader)
            with reading(saved.directory, request.path):
                check(saved.directory)
                state.workers.check_base(saved.base_model, saved.base_digest, request.path)
                engine.load(run, saved.directory, optimizer=request.optimizer)
        return LoadWeightsResponse(path=request.path, model_id=run, type="load_weights")

    return Load(work)


def _loaded_before(state: State, call: Call, run: str, number: int) -> Path | None:
    """Return the files of a load before a restart; its checkpoint may be gone."""
    return state.snapshots.loaded_before(run, number) if call.is_replayed else None


async def _create_by_loading(
    state: State, call: Call, request: LoadWeightsRequest, reader: str
) -> Creation:
    if request.session_id is None or request.model_seq_id is None:
        raise Refusal(400, "load_weights needs model_id, or session_id and model_seq_id")
    await state.sessions.require(request.session_id)
    run = f"{request.session_id}:train:{request.model_seq_id}"

    def source() -> tuple[str, LoraConfig, OptimizerConfigBase, Path, bool]:
        """Return what the run is made of, and whether it was loaded before."""
        loaded, known = _loaded_before(state, call, run, 0), state.database.runs.get(run)
        if loaded is not None and known is not None:
            optimizer = OptimizerConfigBase.from_wire(known.optimizer)
            return known.base_model, known.lora, optimizer, loaded, True
        saved = state.checkpoints.find(request.path, "weights", request.base_model, reader=reader)
        state.workers.check_base(saved.base_model, saved.base_digest, request.path)
        optimizer = request.optimizer_config or OptimizerConfigBase.from_wire(saved.optimizer)
        return saved.base_model, saved.lora, optimizer, saved.directory, False

    def work(worker: Worker) -> LiveRun:
        base_model, lora, optimizer, directory, is_loaded = source()
        live = LiveRun(new_run(state, worker, run, call, base_model, lora, optimizer), worker)
        try:
            with reading(directory, request.path):
                check(directory)
                worker.engine.load(run, directory, optimizer=request.optimizer or is_loaded)
            # the checkpoint may be deleted as soon as the client knows that it is loaded
            state.snapshots.write(live, 0)
        except BaseException:  # a run that is not what was asked for must not be trained by mistake
            worker.engine.drop(run)
            raise
        return live

    async def make() -> LoadWeightsResponse:
        base_model = (await asyncio.to_thread(source))[0]
        worker = await home_of(state, call, run, base_model)
        state.runs.enter(await worker.run(work, worker))
        return LoadWeightsResponse(path=request.path, model_id=run, type="load_weights")

    return Creation(run, request.session_id, f"{run}:0", make, base_model=request.base_model)


@handler
async def weights_info(state: State, call: Call) -> WeightsInfoResponse:
    """Describe a checkpoint."""
    request: WeightsInfoRequest = call.request
    parsed_path(request.tinker_path)
    saved = await asyncio.to_thread(state.checkpoints.readable, request.tinker_path, call.owner)
    if saved is None:
        raise nothing_at(request.tinker_path)
    return WeightsInfoResponse(
        base_model=saved.base_model,
        is_lora=True,
        lora_rank=saved.lora.rank,
        train_unembed=saved.lora.train_unembed,
        train_mlp=saved.lora.train_mlp,
        train_attn=saved.lora.train_attn,
        optimizer_config=OptimizerConfigBase.from_wire(saved.optimizer),
    )
