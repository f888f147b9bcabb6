"""Samplers: their weights are found, loaded when needed, and sampled from.

In-flight samplers: a run has one target, and each save moves it to the new weights. A save counts
the version up, freezes the weights under a name of that version, and points the target to them. All
sessions of a target follow it and never go back. A session's floor is the version it was made with.
What is put on disk, makes room in memory and is found again after a restart are the weights of the
newest version, like those of any nameless sampler.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any

from tinkex.engine.api import (
    DrawnToken,
    EngineError,
    EngineLost,
    Listener,
    SampleJob,
    token_limit,
)
from tinkex.server.database.interface import Run, Sampler
from tinkex.server.files.checkpoint_files import Checkpoints
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import Meter
from tinkex.server.parts import Parts
from tinkex.server.runs.admission import Runs
from tinkex.server.runs.journals import DIRECT
from tinkex.server.runs.work import LiveRun
from tinkex.server.samples.sampler_weights import LoadedWeights, WeightSource
from tinkex.server.workers.sample_jobs import CANCELLED, Sampled
from tinkex.server.workers.worker import EngineDied, Worker
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.saves import SaveWeightsForSamplerRequest


class Heard:
    """A listener that hears each token once, also when its sample is drawn again."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._told: dict[int, int] = {}
        """The number of tokens of each sample that the listener knows."""
        self._drawn: dict[int, int] = {}

    def begin_again(self) -> None:
        """Expect the tokens of every sample from the first one on."""
        self._drawn = {}

    def __call__(self, drawn: Sequence[DrawnToken]) -> None:
        """Hand on the tokens that the listener does not know."""
        new = []
        for token in drawn:
            at = self._drawn[token.index] = self._drawn.get(token.index, 0) + 1
            if at > self._told.get(token.index, 0):
                self._told[token.index] = at
                new.append(token)
        if new:
            self._listener(new)


class Samplers:
    """The samplers of a server."""

    def __init__(
        self,
        parts: Parts,
        runs: Runs,
        loaded: LoadedWeights,
        checkpoints: Checkpoints,
        meter: Meter,
        conceal: Callable[[str], str],
    ) -> None:
        """Take the parts; `conceal` removes places of files from a text for others."""
        self._database, self._workers, self._limits = parts.database, parts.workers, parts.limits
        self._sessions, self._checkpoints, self._meter = parts.sessions, checkpoints, meter
        self._runs, self._recordings, self._conceal = runs, parts.recordings, conceal
        self.nameless, self.loaded = parts.nameless, loaded
        self.targets = InflightTargets(parts, runs)
        self._bound: dict[str, str] = {}
        """The weights that samplers of open sessions began with: they never change to others of the
        same path."""
        self._drawing: dict[str, Worker | None] = {}
        """The worker that each sample is drawn on, if there is one."""

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

    async def base_of(self, owner: str, base_model: str | None, model_path: str | None) -> str:
        """Return the base model under what is to be sampled from; refuse what is not there."""
        try:
            if model_path is not None:
                saved = await asyncio.to_thread(
                    self._checkpoints.find, model_path, "sampler_weights", reader=owner
                )
                base_model = saved.base_model
            if base_model is None:
                raise EngineError("sampling needs a base_model or a model_path")
            return self._workers.base_model(base_model).name
        except EngineError as error:
            raise Refusal(400, str(error)) from None

    async def named(self, request: SampleRequest, owner: str, taken: str | None = None) -> Sampler:
        """Return the sampler that a request names, or one for the weights that it names instead.

        Args:
            request: The request; one that does not fit is refused.
            owner: The account that asks.
            taken: The id that the request was acknowledged under, if it was taken before.
        """
        most = self._limits.samples
        if not 1 <= request.num_samples <= most:
            raise Refusal(
                400,
                f"num_samples must lie between 1 and {most} (the limit samples), got "
                f"{request.num_samples}",
            )
        name = request.sampling_session_id
        if name is None:
            if request.base_model is None and request.model_path is None:
                raise Refusal(
                    400, "a sample needs a sampling_session_id, a base_model or a model_path"
                )
            base_model = await self.base_of(owner, request.base_model, request.model_path)
            name = taken.rpartition(":")[0] if taken else f"{DIRECT}:{uuid.uuid4()}"
            sampler = Sampler(name, DIRECT, base_model, request.model_path, owner=owner)
        else:
            found = self._database.samplers.known(name) or await asyncio.to_thread(
                self._database.samplers.get, name
            )
            if found is None:
                raise Refusal(404, f"there is no sampling session {name!r}")
            sampler = found
            self._sessions.note(sampler.session_id)
        self._check_window(sampler, request)
        return sampler

    def _check_window(self, sampler: Sampler, request: SampleRequest) -> None:
        """Refuse what does not fit the model's window at once.

        Programs look for this in the answer to their request.
        """
        window = self._workers.windows.get(sampler.base_model)
        if window is not None:
            try:
                size = request.prompt.length
            except ValueError:  # an image of unknown length: the engine says whether it sees images
                return
            try:
                token_limit(request, size, window)
            except EngineError as error:
                raise Refusal(400, str(error)) from None

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
            await self._runs.replayed(sampler.model_id, lambda: name in known)
        if name not in known:
            raise Refusal(
                410, f"the weights of sampler {name!r} ended with their session; save them again"
            )
        directory, home = known[name], self.nameless.home(name)
        worker = home or self._source(name, sampler.base_model).worker
        return WeightSource(
            worker, name, sampler.base_model, directory, is_loadable=directory is not None
        )

    def draw(
        self,
        job: str,
        sampler: Sampler,
        source: WeightSource | None,
        request: SampleRequest,
        seed: int | None = None,
        listener: Listener | None = None,
        *,
        owner: str,
    ) -> Coroutine[Any, Any, SampleResponse]:
        """Draw a sample, and count its tokens; it can be cancelled from now on.

        Without a source, the weights are sought when there is a worker. A sample whose worker is
        lost is drawn again on another one.
        """
        self._drawing[job] = None if source is None else source.worker
        return self._draw(job, sampler, source, request, seed, listener, owner)

    async def _draw(
        self,
        job: str,
        sampler: Sampler,
        source: WeightSource | None,
        request: SampleRequest,
        seed: int | None,
        listener: Listener | None,
        owner: str,
    ) -> SampleResponse:
        seed = request.sampling_params.seed if seed is None else seed
        seed = secrets.randbits(63) if seed is None else seed
        heard = None if listener is None else Heard(listener)
        try:
            while True:
                try:
                    if source is None:
                        await self._workers.available(sampler.base_model)
                        source = await self._found_again(sampler)
                    if job not in self._drawing:
                        raise EngineError(CANCELLED)
                    self._drawing[job] = source.worker
                    response, recordings = await self._draw_on(
                        source, job, request, seed, heard, owner
                    )
                    break
                except EngineLost as lost:
                    if job not in self._drawing:
                        raise EngineError(CANCELLED) from lost
                    source = None
                    if heard is not None:
                        heard.begin_again()
        finally:
            self._drawing.pop(job, None)
        if recordings:
            session_id = job.partition(":")[0]
            await self._recordings.keep(session_id, job, request.prompt.length, recordings)
        use = (owner, sampler.session_id, sampler.base_model)
        self._meter.count(*use, "prefill", request.prompt.length)
        self._meter.count(*use, "sample", sum(one.length for one in response.sequences))
        return response

    def cancel(self, job: str) -> None:
        """Drop a job, wherever it is drawn."""
        worker = self._drawing.pop(job, None)
        if worker is not None:
            worker.samples.cancel(job)

    async def _found_again(self, sampler: Sampler) -> WeightSource:
        try:
            return await self.find(sampler)
        except Refusal as refusal:
            raise EngineError(str(refusal.detail)) from None

    async def _draw_on(
        self,
        source: WeightSource,
        job: str,
        request: SampleRequest,
        seed: int,
        listener: Listener | None,
        owner: str,
    ) -> Sampled:
        """Draw a sample on the worker of its weights.

        The loading of weights that are not there yet is queued, and right behind it the sample. The
        worker keeps that order, and a job holds its weights: they cannot be dropped before it
        has them.
        """
        worker = source.worker
        loading = self.loaded.load(source) if source.is_loadable else None
        # the target went with the weights when they made room
        if source.target is not None and loading is not None:
            worker.run(worker.engine.point, source.target, source.name, source.version)
        weights = source.target or source.name
        try:
            return await worker.samples.draw(
                SampleJob(job, weights, request, seed, listener, owner, source.cache)
            )
        except (EngineLost, EngineDied):
            raise
        except EngineError as refused:
            error = loading.exception() if loading is not None and loading.done() else None
            if isinstance(error, EngineError) or error is None:
                error = error or refused
                raise EngineError(self._conceal(str(error)), error.category) from None
            raise error from None

    def forget_session(self, session_id: str) -> None:
        """Let the samplers of a session go."""
        self.nameless.forget_session(session_id)
        self.targets.forget_session(session_id)
        for sampler in [name for name in self._bound if name.startswith(f"{session_id}:")]:
            del self._bound[sampler]


def _target(run: str) -> str:
    return f"{run}:inflight"


def _weights(run: str, version: int) -> str:
    return f"{_target(run)}:{version}"


def check_inflight(request: SaveWeightsForSamplerRequest) -> None:
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
        self._database, self._workers = parts.database, parts.workers
        self._nameless, self._runs = parts.nameless, runs
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
            await self._worker_of(run),
            weights,
            sampler.base_model,
            directory,
            is_loadable=directory is not None,
            target=_target(run),
            version=version,
            # a session that is made again under its old id has other cached prompts
            cache=f"{sampler.sampler_id}@{sampler.version}",
        )

    async def _worker_of(self, run: str) -> Worker:
        """Return the worker that a run is at home on, loaded or not."""
        if (live := self._runs.get(run)) is not None:
            return live.worker
        known = await asyncio.to_thread(self._database.runs.get, run)
        if known is None:
            raise Refusal(404, f"there is no model {run!r}")
        return self._workers.home(run, known.base_model, known.home)

    async def _restore(self, run: str) -> None:
        """Find a target of an earlier life: its weights on disk, or in what its run does again."""
        version = await asyncio.to_thread(self._database.samplers.newest_version, run)
        if version and await self._nameless.find(_weights(run, version)):
            # else a request beside this one, or its run, was quicker
            self.versions.setdefault(run, version)
            return
        await self._runs.replayed(run, lambda: run in self.versions)

    def lose(self, samplers: Container[str]) -> None:
        """Forget the targets whose newest weights are among those that are lost."""
        for run, version in list(self.versions.items()):
            if _weights(run, version) in samplers:
                del self.versions[run]

    def forget_session(self, session_id: str) -> None:
        """Forget the targets of a session's runs; their weights go as nameless samplers do."""
        for run in [name for name in self.versions if name.startswith(f"{session_id}:")]:
            del self.versions[run]
