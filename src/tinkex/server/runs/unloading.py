"""The end of a run at its client's word."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from pathlib import Path

from tinkex.engine.api import EngineError, Writer
from tinkex.server.calls import Call
from tinkex.server.files.seals import write_whole
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.admission import Runs
from tinkex.server.runs.work import LaneItem, LiveRun, Unload
from tinkex.server.workers.worker import OffThread
from tinkex.types.sessions import UnloadModelResponse
from tinkex.types.training import UntypedAPIFuture

logger = logging.getLogger("tinkex.server")

UNLOAD = ":unload"
"""The last part of the id of a request that unloads a run, after the run's id."""


class Unloading:
    """Drops runs, with what they hold in memory and in their journal."""

    def __init__(self, parts: Parts, runs: Runs) -> None:
        self._database, self._journals = parts.database, parts.journals
        self._promises, self._revivals = parts.promises, parts.revivals
        self._nameless, self._recordings = parts.nameless, parts.recordings
        self._runs = runs

    async def unload(self, call: Call) -> UntypedAPIFuture:
        """Drop a run after everything that was asked of it; to drop it again changes nothing."""
        run = call.request.model_id
        request_id = f"{run}{UNLOAD}"
        receipt = UntypedAPIFuture(request_id=request_id, model_id=run)
        await self._revivals.revived(run)
        known = self._promises.get(request_id)
        if known is not None:
            if known.recorded is not None:
                await asyncio.shield(known.recorded)
            return receipt
        live = self._runs.get(run)
        if live is None:
            if not await self.recall(run):
                raise Refusal(404, f"there is no model {run!r}")
            return receipt
        promise = self._promises.add(request_id, call.digest, live.run.session_id)
        live.last = self._runs.free(live)
        begin = functools.partial(self.begin, live, call, live.last)
        try:
            await self._promises.take(promise, self._journals.of_run(run), live.last, call, begin)
        except Refusal:
            live.last = None
            raise
        return receipt

    def begin(self, live: LiveRun, call: Call, number: int) -> None:
        """Unload a run when everything before a number is done; the request is on disk."""
        run = live.name
        promise = self._promises.repeat(
            f"{run}{UNLOAD}", call, live.run.session_id, self._journals.of_run(run), number
        )
        live.last = number
        self._runs.gaps.stop(live)  # it is set to a shorter time
        self._runs.offer(live, LaneItem(promise, number, Unload(self._drop, self._forget_unloaded)))

    def _forget_unloaded(self, live: LiveRun, _: None) -> UnloadModelResponse:
        run = live.name
        self._runs.remove(run)
        self._recordings.release(run, live.last or 0)
        self._journals.forget(self._journals.run_directory(run))
        return UnloadModelResponse(model_id=run, type="unload_model")

    def _drop(self, live: LiveRun) -> OffThread:
        """Drop a run's adapter when its nameless samplers are on disk, for its journal goes."""
        begun: dict[str, tuple[Writer, Path]] = {}
        for sampler in live.unsaved_samplers.copy():
            with contextlib.suppress(EngineError):  # it may have been dropped
                if (found := self._nameless.begin(sampler, live.worker)) is not None:
                    begun[sampler] = found

        def write() -> None:
            for sampler, (writer, scratch) in begun.items():
                try:
                    write_whole(writer.write, scratch)
                except Exception:
                    logger.exception(
                        "the sampler %s could not be written; a restart will lose it", sampler
                    )

        def drop(_: None) -> None:
            for sampler, (_write, scratch) in begun.items():
                if scratch.is_dir():
                    self._nameless.place(sampler, scratch)
            live.worker.engine.drop(live.name)

        return OffThread(write, drop)

    async def recall(self, run: str) -> bool:
        """Promise the unloading of a run that is not loaded; False when there is no such run."""
        known = await asyncio.to_thread(self._database.runs.get, run)
        if known is None or run in self._runs:
            return False
        response = UnloadModelResponse(model_id=run, type="unload_model")
        self._promises.add(f"{run}{UNLOAD}", b"", known.session_id).settle(response)
        return True
