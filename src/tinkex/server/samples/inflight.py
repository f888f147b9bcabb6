"""In-flight samplers: a run has one target, every save moves it, and all its sessions follow
without going back.

A save counts the version up, freezes the weights under a name of that version, and points the
target to them. A session is bound to the target; its floor is the version it was made with. What is
put on disk, makes room in memory and is found again after a restart are the weights of the newest
version, like those of any nameless sampler.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.api import EngineError
from tinkex.server.database.entities import Run, Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.state import LiveRun, State
from tinkex.types.checkpoints import SaveWeightsForSamplerRequest


@dataclass(frozen=True, slots=True)
class Present:
    """The weights that a target points to."""

    target: str
    weights: str
    version: int
    directory: Path | None
    """The files of weights that had to make room in memory."""


def _target(model_id: str) -> str:
    return f"{model_id}:inflight"


def _weights(model_id: str, version: int) -> str:
    return f"{_target(model_id)}:{version}"


def cache_of(sampler: Sampler) -> str:
    """The namespace of a session's cached prompts; a session that is made again under its old id
    has another.
    """
    return f"{sampler.sampler_id}@{sampler.version}"


def check(request: SaveWeightsForSamplerRequest) -> None:
    """Refuse what an in-flight save cannot have."""
    for name in ("path", "ttl_seconds"):
        if getattr(request, name) is not None:
            raise EngineError(
                f"save_weights_for_sampler: kind 'inflight' takes no {name}; leave it out, or use "
                "kind 'snapshot'"
            )


def save(state: State, live: LiveRun, sampler_id: str, number: int) -> int | None:
    """Move a run's target to its present weights, for a new session; returns the version. On the
    worker.

    What an earlier life of the server did is not done again if a later save has replaced it, for
    the target never goes back: None then.
    """
    run = live.run
    version, newest = state.database.samplers.inflight_versions(run.model_id, number)
    if version < newest:
        return None
    weights = _weights(run.model_id, version)
    state.engine.snapshot(run.model_id, weights)
    state.engine.point(_target(run.model_id), weights, version)
    for name in live.unsaved_samplers.copy():
        if name == sampler_id or name.startswith(f"{_target(run.model_id)}:"):
            live.unsaved_samplers.pop(name, None)
    live.unsaved_samplers[weights] = number
    # the client may have used the number for a snapshot before
    state.drop_snapshot_files(sampler_id)
    state.engine.drop_sampler(sampler_id)
    sampler = Sampler(
        sampler_id, run.session_id, run.base_model, None, True, run.owner, run.model_id, version
    )
    state.database.samplers.add_inflight(sampler, number)
    return version


def publish(state: State, run: Run, sampler_id: str, version: int) -> None:
    """Let new requests find a version; the one before is freed. On the event loop."""
    present = state.targets.get(run.model_id, 0)
    if state.snapshots.pop(sampler_id, None) is not None:
        state.loading.pop(sampler_id, None)
    state.keep_snapshot(run.session_id, _weights(run.model_id, version))
    state.targets[run.model_id] = version
    if present not in (0, version):
        state.forget_snapshot(_weights(run.model_id, present))


async def find(state: State, sampler: Sampler) -> Present:
    """The weights that an in-flight session's target has now."""
    model_id = sampler.model_id
    assert model_id is not None
    if model_id not in state.targets:
        await _restore(state, model_id)
    version = state.targets.get(model_id, 0)
    if not version or sampler.version is None or version < sampler.version:
        raise Refusal(
            410,
            f"the weights of in-flight sampler {sampler.sampler_id!r} went with their session; "
            "save them again",
        )
    weights = _weights(model_id, version)
    return Present(_target(model_id), weights, version, state.snapshots.get(weights))


async def _restore(state: State, model_id: str) -> None:
    """Find a target of an earlier life: its newest weights on disk, else in what its run does
    again.
    """
    version = await asyncio.to_thread(state.database.samplers.newest_version, model_id)
    weights = _weights(model_id, version)
    directory = state.journals.snapshot_directory(weights)
    if version and await asyncio.to_thread(directory.is_dir):
        if model_id not in state.targets:  # else a request beside this one, or its run, was quicker
            state.snapshots[weights] = directory
            state.targets[model_id] = version
        return
    await state.revived(model_id)
    live = state.runs.get(model_id)
    for promise in list(live.recent.values()) if live is not None else ():
        if model_id in state.targets:
            return
        await promise.done.wait()
