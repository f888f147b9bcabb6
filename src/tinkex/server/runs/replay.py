"""Promises are kept: runs and samples are made again from what is on disk of them.

A run is rebuilt from its last snapshot and the requests that its journal holds after it, with the
same results. This is done when somebody asks for a run of an earlier life of the server, and
inside a running server when a run is to be made again. Samples are drawn again with the seeds that
were drawn for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tinkex.engine.api import EngineError, EngineLost
from tinkex.server.calls import FAILED, GIVEN_UP, READ, UNKNOWN, call_of
from tinkex.server.files.checkpoint_files import Checkpoints
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.admission import Runs
from tinkex.server.runs.journal import DamagedJournalError, Entry
from tinkex.server.runs.journals import DIRECT, UNPLACED
from tinkex.server.runs.promises import fail_again
from tinkex.server.runs.snapshot import Snapshots, thaw
from tinkex.server.runs.unloading import UNLOAD, Unloading
from tinkex.server.runs.work import Lane, LaneItem, LiveRun
from tinkex.server.samples.sample_admission import Samples
from tinkex.types.future_requests import RequestErrorCategory
from tinkex.types.sessions import CreateModelResponse

logger = logging.getLogger("tinkex.server")

SCRATCH = ("checkpoints/*/*/.saving-*", "checkpoints/*/*/.deleting-*", f"snapshots/*{UNPLACED}*")
"""Directories of saves and deletions that were not finished."""
ABANDONED_SECONDS = 3600.0
"""After this time no process can still be writing to one of these directories."""


class Replay:
    """Rebuilds runs, and draws samples again."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        runs: Runs,
        unloading: Unloading,
        samples: Samples,
    ) -> None:
        self._database, self._journals = parts.database, parts.journals
        self._promises, self._workers = parts.promises, parts.workers
        self._sessions, self._revivals = parts.sessions, parts.revivals
        self._nameless, self._checkpoints = parts.nameless, checkpoints
        self._snapshots, self._runs, self._unloading = snapshots, runs, unloading
        self._samples = samples
        parts.revivals.revive = self._revive

    def take_up_sessions(self) -> None:
        """Count the silence of open sessions from now on, and delete the files of ended ones.

        Files of a session that is not on record are set aside: the database may have lost it.
        """
        for session_id in self._database.sessions.open_ids():
            self._sessions.see(session_id)
        for directory in list(self._journals.directories()):
            session_id = re.split(r"_(?:train|sample|loss)_", directory.name)[0]
            known = "active" if session_id == DIRECT else self._database.sessions.state(session_id)
            if known is None:
                self._journals.set_aside(directory, "belongs to a session that is not on record")
            elif known != "active":
                shutil.rmtree(directory, ignore_errors=True)
        for pattern in SCRATCH:  # runs that are taken up again have theirs removed at once
            for directory in self._journals.data_dir.glob(pattern):
                if time.time() - directory.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(directory, ignore_errors=True)

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────

    def rebuild(self, run: str) -> asyncio.Task[None]:
        """Begin to make a run again from its snapshot and journal, unanswered work included.

        What its worker has of the run is dropped. Requests for the run wait, also when this is
        called while it is being made again; other runs go on.
        """
        if (live := self._runs.get(run)) is not None:
            live.is_rebuilding = live.is_parked = True
        return self._revivals.begin(run, self._rebuild(run, self._revivals.task(run)))

    async def _rebuild(self, run: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        live = self._runs.get(run)
        if live is None:  # it was unloaded, or its session has ended
            return
        live.is_rebuilding = live.is_parked = True
        await self._workers.available(live.run.base_model)
        live.is_parked = False
        if self._runs.get(run) is not live:
            return
        self._runs.remove(run)
        with contextlib.suppress(EngineError):  # a worker that has died has nothing to drop
            await live.worker.release_run(run)
        if live.worker.failure is not None and not live.worker.is_lost:
            await live.worker.ended.wait()  # until all that it had has failed
        asked = [*live.recent.values(), self._promises.get(f"{run}{UNLOAD}")]
        taken_back = [promise for promise in asked if promise is not None and promise.take_back()]
        # what was on its way to the disk is read back
        await self._promises.all_recorded(live.run.session_id)
        if live.commit is not None:
            await live.commit
        self._journals.of_run(run).rotate()
        await self._revive(run)
        if run not in self._runs:
            for promise in (*live.recent.values(), *taken_back):
                promise.fail("the run could not be rebuilt", RequestErrorCategory.Server)

    async def _revive(self, name: str) -> None:
        run = self._journals.run_directory(name)
        samples = self._journals.samples_directory(name)
        if await asyncio.to_thread(run.is_dir):
            await self._restore_run(name, run)
        elif await asyncio.to_thread(samples.is_dir):
            await self._restore_samples(name, samples)

    async def _restore_run(self, name: str, directory: Path) -> None:
        """Take a run up again, or set its journal aside."""
        try:
            await self._revive_on_a_worker(name)
        except Exception as error:
            logger.exception("%s could not be restored", name)
            self._runs.forget(name)
            # A server that stops, or has no memory left, says nothing about the run: the next
            # life tries again.
            if not (isinstance(error, EngineError) and error.category == "server"):
                await asyncio.to_thread(self._database.runs.mark_corrupted, name)
                self._journals.set_aside(directory, "cannot be restored")

    async def _restore_samples(self, name: str, directory: Path) -> None:
        """Take the samples of a session up again, or set their journal aside."""
        try:
            await self._revive_samples(name)
        except DamagedJournalError as error:
            logger.error("%s", error)
            self._journals.set_aside(directory, "is damaged: samples that nobody had read are lost")
        except Exception:
            logger.exception("the samples of %s could not be restored", name)

    async def _revive_on_a_worker(self, name: str) -> None:
        """Take a run up again; once more if its worker is lost meanwhile."""
        while True:
            try:
                await self._revive_run(name)
                return
            except EngineLost as error:
                logger.warning("%s is taken up once more: %s", name, error)
                self._runs.remove(name)
                self._workers.leave(name)

    async def _revive_run(self, name: str) -> None:
        started = time.monotonic()
        entries = await asyncio.to_thread(self._journals.of_run(name).read)
        failed = {entry.facts["id"]: entry for entry in entries if entry.facts["op"] == FAILED}
        entries = [entry for entry in entries if entry.facts["op"] != FAILED]
        for request_id in (name, f"{name}:0"):
            if request_id in failed:  # it was never made
                self._fail_again(request_id, entries[0], failed[request_id])
                return
        # a custom loss has a journal as runs have, of one request
        if entries and entries[0].facts["op"] == "create_custom_loss":
            await self._runs.create_again(call_of(entries[0]))
            return
        session_id = name.rpartition(":train:")[0]
        if await asyncio.to_thread(self._database.sessions.state, session_id) != "active":
            return
        self._sessions.see(session_id)
        await asyncio.to_thread(self._checkpoints.clear_leftovers, name)
        number, snapshot = await asyncio.to_thread(self._snapshots.in_force, name)
        live = await self._thaw(name, number, snapshot)
        if live is None:
            number = 0
            creation = next((entry for entry in entries if entry.number == 0), None)
            if creation is None:
                return
            await self._runs.create_again(call_of(creation))
            live = self._runs.get(name)
            if live is None:
                return
        live.is_rebuilding = True
        later = [entry for entry in entries if entry.number > number]
        for entry in later:
            await self._repeat(live, entry, failed)
        live.is_rebuilding = False
        logger.info(
            "%s is restored: %d requests after state %d, in %.2f s",
            name,
            len(later),
            number,
            time.monotonic() - started,
        )

    async def _thaw(self, name: str, number: int, snapshot: Path | None) -> LiveRun | None:
        """Make a run as it was in its last snapshot, if there is one."""
        run = await asyncio.to_thread(self._database.runs.get, name)
        if run is None:
            return None
        self._workers.check_base(run.base_model, run.base_digest, name, "server")
        await self._workers.available(run.base_model)
        worker = self._workers.home(name, run.base_model, run.home)
        await worker.run(self._nameless.clear_unplaced, run.session_id)
        if snapshot is None:
            return None
        live = LiveRun(run, worker, Lane[LaneItem](number + 1))
        await worker.run(thaw, worker, run, snapshot)
        await asyncio.to_thread(self._snapshots.read_results, live, snapshot)
        # not before its results are known: one that is asked for again is not a new one
        self._runs.put(live)
        if self._promises.get(f"{name}:0") is None:
            self._promises.add(f"{name}:0", UNKNOWN, run.session_id).settle(
                CreateModelResponse(model_id=name)
            )
        return live

    def _fail_again(self, request_id: str, entry: Entry, failed: Entry) -> None:
        """Promise a failure again that was on disk before it was told."""
        call, session_id = call_of(entry), request_id.partition(":")[0]
        promise = self._promises.get(request_id) or self._promises.add(
            request_id, call.digest, session_id
        )
        fail_again(promise, failed)

    async def _repeat(self, live: LiveRun, entry: Entry, failed: Mapping[str, Entry]) -> None:
        """Do again what one record of a journal says, as if what failed had not been asked for."""
        if entry.facts["op"] == GIVEN_UP:
            self._runs.gaps.give_up(live, entry.number)
            return
        call = await asyncio.to_thread(call_of, entry)
        run = live.name
        if call.op == "unload_model":
            if (known := failed.get(f"{run}{UNLOAD}")) is not None:
                self._fail_again(f"{run}{UNLOAD}", entry, known)
            else:
                self._unloading.begin(live, call, entry.number)
            return
        try:
            await self._runs.admit_again(live, call, failed.get(f"{run}:{entry.number}"))
        except Refusal as refusal:
            logger.warning(
                "request %d of %s cannot be repeated: %s",
                entry.number,
                live.name,
                refusal.detail,
            )

    # ── samples ───────────────────────────────────────────────────────────────────────────────────

    async def _revive_samples(self, session_id: str) -> None:
        """Draw the samples of a session again that were not read."""
        if session_id != DIRECT:
            if await asyncio.to_thread(self._database.sessions.state, session_id) != "active":
                return
            self._sessions.see(session_id)
        entries = await asyncio.to_thread(self._journals.of_samples(session_id).read)
        read = [entry.facts["ids"] for entry in entries if entry.facts["op"] == READ]
        over = {request_id for ids in read for request_id in ids}
        failed = {entry.facts["id"]: entry for entry in entries if entry.facts["op"] == FAILED}
        for entry in entries:
            if entry.facts["op"] in (READ, FAILED):
                continue
            request_id = entry.facts["id"]
            if request_id in over or self._promises.get(request_id) is not None:
                continue
            try:
                call = await asyncio.to_thread(call_of, entry)
                await self._samples.admit_again(call, request_id, failed.get(request_id))
            except Refusal as refusal:
                logger.warning("sample %s cannot be drawn again: %s", request_id, refusal.detail)
