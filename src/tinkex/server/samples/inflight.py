"""In-flight samplers: a run has one target, and each save moves it to the new weights.

A save counts the version up, freezes the weights under a name of that version, and points the
target to them. All sessions of a target follow it and never go back. A session's floor is the
version it was made with. What is put on disk, makes room in memory and is found again after a
restart are the weights of the newest version, like those of any nameless sampler.
"""

from __future__ import annotations

import asyncio

from tinkex.engine.api import EngineError
from tinkex.server.database.interface import Run, Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.admission import Runs
from tinkex.server.runs.work import LiveRun
from tinkex.server.samples.loaded_weights import WeightSource
from tinkex.types.saves import SaveWeightsForSamplerRequest


def _target(run: str) -> str:
    return f"{run}:inflight"


def _weights(run: str, version: int) -> str:
    return f"{_target(run)}:{version}"


def check(request: SaveWeightsForSamplerRequest) -> None:
    """Refuse what an in-flight save cannot have."""
    for name in ("path", "ttl_seconds"):
        if getattr(request, name) is not None:
            raise EngineError(
                f"save_weights_for_sampler: kind 'inflight' takes no {name}; leave it out, or use "
                "kind 'snapshot'"
            )


class InflightTargets:
    """The in-flight targets of all runs."""

    def __init__(self, parts: Parts, runs: Runs) -> None:
        self._database, self._nameless = parts.database, parts.nameless
        self._revivals, self._runs = parts.revivals, runs
        self.versions: dict[str, int] = {}
        """By run, the newest version of its target."""

    def save(self, live: LiveRun, sampler_id: str, seq_id: int) -> int | None:
        """Move a run's target to its weights, for a new session; return the version.

        On the worker. What an earlier life of the server did is not done again if a later save has
        replaced it, for the target never goes back: None then.
        """
        run, engine = live.run, live.worker.engine
        version, newest = self._database.samplers.inflight_versions(run.model_id, seq_id)
        if version < newest:
            return None
        target, weights = _target(run.model_id), _weights(run.model_id, version)
        engine.snapshot(run.model_id, weights)
        engine.point(target, weights, version)
        for name in live.unsaved_samplers.copy():
            if name == sampler_id or name.startswith(f"{target}:"):
                live.unsaved_samplers.pop(name, None)
        live.unsaved_samplers[weights] = seq_id
        # the client may have used the number for a snapshot before
        self._nameless.drop_files(sampler_id)
        engine.drop_sampler(sampler_id)
        sampler = Sampler(
            sampler_id, run.session_id, run.base_model, None, True, run.owner, run.model_id, version
        )
        self._database.samplers.add_inflight(sampler, seq_id)
        return version

    def publish(self, live: LiveRun, sampler_id: str, version: int) -> None:
        """Let new requests find a version; the one before is freed."""
        run: Run = live.run
        present = self.versions.get(run.model_id, 0)
        self._nameless.disown(sampler_id)
        self._nameless.keep(run.session_id, _weights(run.model_id, version), live.worker)
        self.versions[run.model_id] = version
        if present not in (0, version):
            self._nameless.forget(_weights(run.model_id, present))

    async def find(self, sampler: Sampler) -> WeightSource:
        """Return the weights that a session's target has now."""
        run = sampler.model_id
        assert run is not None
        if run not in self.versions:
            await self._restore(run)
        version = self.versions.get(run, 0)
        if not version or sampler.version is None or version < sampler.version:
            why = (
                f"the weights of in-flight sampler {sampler.sampler_id!r} ended with their session"
            )
            raise Refusal(410, f"{why}; save them again")
        weights = _weights(run, version)
        directory = self._nameless.directories.get(weights)
        return WeightSource(
            await self._runs.worker_of(run),
            weights,
            sampler.base_model,
            directory,
            is_loadable=directory is not None,
            target=_target(run),
            version=version,
            # a session that is made again under its old id has other cached prompts
            cache=f"{sampler.sampler_id}@{sampler.version}",
        )

    async def _restore(self, run: str) -> None:
        """Find a target of an earlier life: its weights on disk, or in what its run does again."""
        version = await asyncio.to_thread(self._database.samplers.newest_version, run)
        if version and await self._nameless.find(_weights(run, version)):
            # else a request beside this one, or its run, was quicker
            self.versions.setdefault(run, version)
            return
        await self._revivals.replayed(run, self._runs, lambda: run in self.versions)

    def forget_session(self, session_id: str) -> None:
        """Forget the targets of a session's runs; their weights go as nameless samplers do."""
        for run in [name for name in self.versions if name.startswith(f"{session_id}:")]:
            del self.versions[run]
