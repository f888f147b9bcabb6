"""Samplers: their weights are found, loaded when needed, and sampled from."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from tinkex.engine.api import EngineError, Listener, SampleJob
from tinkex.server.database.interface import Sampler
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.admission import Runs
from tinkex.server.runs.work import LiveRun
from tinkex.server.samples.inflight import InflightTargets
from tinkex.server.samples.loaded_weights import LoadedWeights, WeightSource
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest


class Samplers:
    """The samplers of a server."""

    def __init__(
        self,
        parts: Parts,
        runs: Runs,
        loaded: LoadedWeights,
        conceal: Callable[[str], str],
    ) -> None:
        """Take the parts; `conceal` removes places of files from a text for others."""
        self._database, self._workers = parts.database, parts.workers
        self._sessions, self._revivals = parts.sessions, parts.revivals
        self._runs, self._recordings, self._conceal = runs, parts.recordings, conceal
        self.nameless, self.loaded = parts.nameless, loaded
        self.targets = InflightTargets(parts, runs)
        self._bound: dict[str, str] = {}
        """The weights that samplers of open sessions began with: they never change to others of the
        same path."""

    def save(self, live: LiveRun, sampler_id: str, seq_id: int) -> None:
        """Freeze a run's weights as a nameless sampler; on the worker."""
        run = live.run
        # a client that uses a number again means the new weights
        self.nameless.drop_files(sampler_id)
        live.worker.engine.snapshot(run.model_id, sampler_id)
        live.unsaved_samplers[sampler_id] = seq_id
        self._database.samplers.add(
            Sampler(sampler_id, run.session_id, run.base_model, None, True, run.owner, run.model_id)
        )

    async def find(self, sampler: Sampler) -> WeightSource:
        """Return the present weights of a sampler; refuse one whose weights are gone."""
        if sampler.version is not None:
            return await self.targets.find(sampler)
        if sampler.is_snapshot:
            return await self._find_nameless(sampler)
        if sampler.model_path is None:
            return self._source(f"base/{sampler.base_model}", sampler.base_model)
        saved = await asyncio.to_thread(self._database.checkpoints.get, sampler.model_path)
        bound = self._bound.get(sampler.sampler_id)
        if saved is not None and not saved.is_shown_to(sampler.owner):
            raise Refusal(410, f"checkpoint {sampler.model_path} is no longer published")
        if saved is not None:
            # a path may be saved again once its first checkpoint is gone
            name = f"{saved.tinker_path}@{saved.created}"
            if bound in (None, name):
                if sampler.session_id in self._sessions:
                    self._bound[sampler.sampler_id] = name
                self._workers.check_base(saved.base_model, saved.base_digest, saved.tinker_path)
                source = self._source(name, saved.base_model)
                return WeightSource(source.worker, name, saved.base_model, saved.directory)
        # weights that are still in memory may be sampled from
        if bound is not None and (having := self.loaded.having(bound)):
            worker = self._workers.for_sample(sampler.base_model, having)
            if worker not in having:
                worker = next(iter(having))
            return WeightSource(worker, bound, sampler.base_model, is_loadable=False)
        raise Refusal(410, f"checkpoint {sampler.model_path} has been deleted or has expired")

    def _source(self, name: str, base_model: str) -> WeightSource:
        """Return weights that any worker can load, on the worker that a sample is best drawn on."""
        worker = self._workers.for_sample(base_model, self.loaded.having(name))
        return WeightSource(worker, name, base_model)

    async def _find_nameless(self, sampler: Sampler) -> WeightSource:
        name, known = sampler.sampler_id, self.nameless.directories
        if name not in known and not await self.nameless.find(name) and sampler.model_id:
            # what an earlier life of the server had only in memory is made again by its run
            await self._revivals.replayed(sampler.model_id, self._runs, lambda: name in known)
        if name not in known:
            raise Refusal(
                410, f"the weights of sampler {name!r} ended with their session; save them again"
            )
        directory, home = known[name], self.nameless.home(name)
        worker = home or self._source(name, sampler.base_model).worker
        return WeightSource(
            worker, name, sampler.base_model, directory, is_loadable=directory is not None
        )

    async def draw(
        self,
        job: str,
        source: WeightSource,
        request: SampleRequest,
        seed: int | None = None,
        listener: Listener | None = None,
        *,
        owner: str,
    ) -> SampleResponse:
        """Queue the loading of weights that are not there yet, and right behind it the sample.

        The worker keeps that order, and a job holds its weights: they cannot be dropped before it
        has them.
        """
        worker = source.worker
        seed = request.sampling_params.seed if seed is None else seed
        loading = self.loaded.load(source) if source.is_loadable else None
        # the target went with the weights when they made room
        if source.target is not None and loading is not None:
            worker.run(worker.engine.point, source.target, source.name, source.version)
        seed = secrets.randbits(63) if seed is None else seed
        sampler = source.target or source.name
        try:
            response, recordings = await worker.samples.draw(
                SampleJob(job, sampler, request, seed, listener, owner, source.cache)
            )
        except EngineError as refused:
            error = loading.exception() if loading is not None and loading.done() else None
            if isinstance(error, EngineError) or error is None:
                error = error or refused
                raise EngineError(self._conceal(str(error)), error.category) from None
            raise error from None
        if recordings:
            session_id = job.partition(":")[0]
            await self._recordings.keep(session_id, job, request.prompt.length, recordings)
        return response

    def forget_session(self, session_id: str) -> None:
        """Let the samplers of a session go."""
        self.nameless.forget_session(session_id)
        self.targets.forget_session(session_id)
        for sampler in [name for name in self._bound if name.startswith(f"{session_id}:")]:
            del self._bound[sampler]
