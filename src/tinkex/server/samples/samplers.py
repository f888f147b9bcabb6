"""The weights behind samplers: found, loaded when needed, dropped when others need the room."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.api import EngineError, Listener
from tinkex.server.database.entities import Sampler
from tinkex.server.files.checkpoint_files import reading
from tinkex.server.files.seals import check
from tinkex.server.http_errors import Refusal
from tinkex.server.samples import inflight
from tinkex.server.state import State
from tinkex.types.sampling import SampleRequest, SampleResponse


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a sampler's weights are: the engine's name for them, and the files they can be loaded
    from.
    """

    name: str
    base_model: str
    directory: Path | None = None
    is_loadable: bool = True
    target: str | None = None
    """The in-flight target that is sampled from; the weights are those it points to."""
    version: int = 0
    cache: str = ""
    """The namespace of cached prompts, where it is not that of the weights."""


async def find_source(state: State, sampler: Sampler) -> WeightSource:
    """The weights behind a sampler, as they are now; refuses what is no longer there."""
    if sampler.version is not None:
        now = await inflight.find(state, sampler)
        return WeightSource(
            now.weights,
            sampler.base_model,
            now.directory,
            is_loadable=now.directory is not None,
            target=now.target,
            version=now.version,
            cache=inflight.cache_of(sampler),
        )
    if sampler.is_snapshot:
        if sampler.sampler_id not in state.snapshots:
            await _find_snapshot(state, sampler)
        if sampler.sampler_id not in state.snapshots:
            raise Refusal(
                410,
                f"the weights of sampler {sampler.sampler_id!r} went with their session; save them "
                "again",
            )
        directory = state.snapshots[sampler.sampler_id]
        return WeightSource(
            sampler.sampler_id, sampler.base_model, directory, is_loadable=directory is not None
        )
    if sampler.model_path is None:
        return WeightSource(f"base/{sampler.base_model}", sampler.base_model)
    saved = await asyncio.to_thread(state.database.checkpoints.get, sampler.model_path)
    bound = state.bound.get(sampler.sampler_id)
    if saved is not None and not saved.is_shown_to(sampler.owner):
        raise Refusal(410, f"checkpoint {sampler.model_path} is no longer published")
    if saved is not None:
        # The time belongs to the name: a path may be saved again once its first checkpoint is gone.
        name = f"{saved.tinker_path}@{saved.created}"
        if bound in (None, name):
            if sampler.session_id in state.heard:
                state.bound[sampler.sampler_id] = name
            state.check_base(saved.base_model, saved.base_digest, saved.tinker_path)
            return WeightSource(name, saved.base_model, saved.directory)
    # weights that are still in memory may be sampled from
    if bound is not None and bound in state.loading:
        return WeightSource(bound, sampler.base_model, is_loadable=False)
    raise Refusal(410, f"checkpoint {sampler.model_path} has been deleted or has expired")


async def _find_snapshot(state: State, sampler: Sampler) -> None:
    """Look for a nameless sampler of an earlier life: on disk, else in what its run does again."""
    directory = state.journals.snapshot_directory(sampler.sampler_id)
    if await asyncio.to_thread(directory.is_dir):
        state.snapshots[sampler.sampler_id] = directory
        return
    if sampler.model_id is None:
        return
    await state.revived(sampler.model_id)
    live = state.runs.get(sampler.model_id)
    for promise in list(live.recent.values()) if live is not None else ():
        if sampler.sampler_id in state.snapshots:
            return
        await promise.done.wait()


async def draw(
    state: State,
    job: str,
    source: WeightSource,
    request: SampleRequest,
    seed: int | None = None,
    listener: Listener | None = None,
    *,
    owner: str,
) -> SampleResponse:
    """Queue the loading of weights that are not there yet, then the sample, without a pause between
    the two.

    The worker keeps that order, and a job holds its weights: they cannot be dropped before it has
    them.
    """
    seed = request.sampling_params.seed if seed is None else seed
    loading = load(state, source) if source.is_loadable else None
    # the target went with the weights when they made room
    if source.target is not None and loading is not None:
        state.worker.run(state.engine.point, source.target, source.name, source.version)
    seed = secrets.randbits(63) if seed is None else seed
    sampler = source.target or source.name
    try:
        response, recordings = await state.worker.sample(
            job, sampler, request, seed, listener, owner, source.cache
        )
    except EngineError as refused:
        error = loading.exception() if loading is not None and loading.done() else None
        if isinstance(error, EngineError) or error is None:
            error = error or refused
            raise EngineError(state.without_paths(str(error)), error.category) from None
        raise error from None
    if recordings:
        await state.recordings.keep(job.partition(":")[0], job, request.prompt.length, recordings)
    return response


def load(state: State, source: WeightSource) -> asyncio.Future[None]:
    """Load weights unless they are there or on their way; the longest unused make room. A failure
    is not kept.
    """
    loading = state.loading.pop(source.name, None)
    if loading is None:
        loading = state.worker.run(_load, state, source)
        loading.add_done_callback(
            lambda done: state.loading.pop(source.name, None) if done.exception() else None
        )
    state.loading[source.name] = loading  # the last used comes last
    while len(state.loading) > state.limits.samplers:
        oldest = next(iter(state.loading))
        del state.loading[oldest]
        state.worker.run(state.engine.drop_sampler, oldest)
    return loading


def _load(state: State, source: WeightSource) -> None:
    """Load weights whose files are as they were written. On the worker."""
    if source.directory is None:
        state.engine.load_sampler(source.name, source.base_model, None)
        return
    with reading(source.directory, source.name.partition("@")[0]):
        check(source.directory)
        state.engine.load_sampler(source.name, source.base_model, source.directory)
