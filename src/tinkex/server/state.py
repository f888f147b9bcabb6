"""The parts of a running server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tinkex.engine.api import Engine, EngineError
from tinkex.server.access.accounts import Accounts
from tinkex.server.access.endpoints import Endpoint
from tinkex.server.access.searches import Searches
from tinkex.server.database.interface import Database
from tinkex.server.files.checkpoint_files import Checkpoints
from tinkex.server.files.data_dir import Lock, discard, make_directory
from tinkex.server.files.upload_files import sweep_uploads
from tinkex.server.http_errors import complain
from tinkex.server.meter import Meter
from tinkex.server.open_sessions import Sessions
from tinkex.server.parts import Parts
from tinkex.server.routes.handler_table import HANDLERS
from tinkex.server.runs.admission import CARRY_ON, Runs
from tinkex.server.runs.journals import RECORDINGS, Journals, Revivals
from tinkex.server.runs.promises import Promises
from tinkex.server.runs.replay import Replay
from tinkex.server.runs.snapshot import Snapshots
from tinkex.server.runs.unloading import Unloading
from tinkex.server.samples.sample_admission import Samples
from tinkex.server.samples.sampler_weights import LoadedWeights, NamelessSamplers
from tinkex.server.samples.samplers import Samplers
from tinkex.server.samples.sampling_records import SamplingRecords
from tinkex.server.server_limits import Limits
from tinkex.server.server_metrics import Metrics
from tinkex.server.workers.fleet import Fleet
from tinkex.server.workers.pool import Workers
from tinkex.server.workers.worker import Worker

logger = logging.getLogger("tinkex.server")

LEAVE_SECONDS = 10.0
"""The longest time that a stopping server takes to write its runs to disk."""
SWEEP_SECONDS = 15.0
"""The time between two cleanups."""


class State:
    """The parts of a running server.

    `create_app` makes them, and its lifespan starts and stops them.
    """

    def __init__(
        self,
        engines: Engine | Mapping[str, Engine] | Fleet,
        data_dir: Path,
        limits: Limits,
        open_database: Callable[[Path], Database],
        *,
        api_key: str | None = None,
        tokens: bool = False,
        strict: bool = False,
        embedded: bool = False,
    ) -> None:
        """Make the parts.

        Args:
            engines: One engine, several by name, or a fleet.
            data_dir: The directory of all files.
            limits: The limits of the server.
            open_database: Opens the database of a data directory.
            api_key: A key in addition to those on record.
            tokens: Whether clients must exchange their keys for tokens.
            strict: Whether weights are loaded as a run's first operation only.
            embedded: Whether the only caller is this program.
        """
        self.data_dir = data_dir = data_dir.expanduser().resolve()
        self.limits, self.tokens, self.strict = limits, tokens, strict
        self.mounted: tuple[tuple[str, Endpoint], ...] = ()
        """The endpoints of mounted groups, each after the prefix of its group."""
        make_directory(data_dir)
        self._lock = Lock(data_dir, shared=embedded)
        make_directory(data_dir / "checkpoints")
        self.upload_dir = data_dir / "uploads"
        self.database = open_database(data_dir)
        self.database.verify()
        self.fleet = engines if isinstance(engines, Fleet) else None
        if isinstance(engines, Fleet):
            engines = engines.connect(self.database.activity.begin_life())
        self.workers = Workers(engines)
        self._places = self._hidden_places()
        """Directories that others do not learn, the innermost first."""
        self.checkpoints = Checkpoints(self.database)
        self.accounts = Accounts(self.database, api_key, embedded=embedded)
        self.meter = Meter(self.database)
        self.metrics = Metrics()
        self.promises = Promises(conceal=self.without_paths)
        self.promises.compares = all(
            getattr(worker.engine, "repeats", True) for worker in self.workers
        )
        self.journals = Journals(data_dir)
        self.revivals = Revivals(data_dir)
        open_for = limits.session_seconds
        self.sessions = Sessions(self.database.sessions, open_for, self._forget_session)
        self.recordings = SamplingRecords(
            data_dir / RECORDINGS,
            self.journals.of,
            memory_bytes=limits.recordings_memory_bytes,
            disk_bytes=limits.recordings_disk_bytes,
            may_delete=lambda session: not self.revivals.has_sleeping_runs(session, self.runs),
        )
        self.loaded = loaded = LoadedWeights(limits.samplers)
        parts = Parts(
            self.database,
            self.journals,
            self.promises,
            self.workers,
            self.sessions,
            self.revivals,
            NamelessSamplers(self.journals, self.sessions, loaded, limits.snapshots),
            self.recordings,
            limits,
        )
        self.snapshots = Snapshots(parts)
        self.runs = Runs(parts, self.snapshots, lambda call: HANDLERS[call.op](self, call))
        self.unloading = Unloading(parts, self.runs)
        self.samplers = Samplers(
            parts, self.runs, loaded, self.checkpoints, self.meter, self.without_paths
        )
        self.samples = Samples(parts, self.samplers)
        self.replay = Replay(
            parts,
            self.checkpoints,
            self.snapshots,
            self.runs,
            self.unloading,
            self.samples,
        )
        self.arriving: set[Path] = set()
        """Files of uploads that are arriving."""
        self.finishing: set[str] = set()
        """Uploads that are becoming checkpoints."""
        self.owners: dict[str, str] = {}
        """Owners of sessions that have been looked up."""
        self.searches = Searches()
        self.expanding = asyncio.Semaphore(1)
        """Held while a large compressed body is expanded."""
        self.is_draining = False

    # ── workers ───────────────────────────────────────────────────────────────────────────────────

    def start_workers(self) -> None:
        """Start the workers, and watch over those that can be lost."""
        self.workers.start()
        if self.fleet is not None:
            self.fleet.start(self.workers, self._lose_weights, self._make_again)

    def _lose_weights(self, worker: Worker) -> None:
        """Forget the weights that went with the process of a worker."""
        self.loaded.lose(worker)
        self.samplers.targets.lose(self.samplers.nameless.lose(worker))

    def _make_again(self, run: str) -> None:
        # a run that is being made for the first time is tried again by itself
        if run in self.runs or self.revivals.task(run) is not None:
            self.promises.keep(self.replay.rebuild(run))

    async def stop_workers(self) -> None:
        """End the workers, and the processes of their engines."""
        await self.workers.stop()
        if self.fleet is not None:
            await asyncio.to_thread(self.fleet.close)

    # ── texts for others ──────────────────────────────────────────────────────────────────────────

    def _hidden_places(self) -> list[str]:
        models = self.workers.models().values()
        places = [model.directory.parent for model in models if model.directory is not None]
        return sorted({str(place) for place in (self.data_dir, *places)}, key=len, reverse=True)

    def without_paths(self, text: str) -> str:
        """Return a text without the paths of this server's files, for clients."""
        for place in self._places:
            text = text.replace(f"{place}/", "").replace(place, "the data directory")
        return text

    def after_loss(self, request_id: str) -> str | None:
        """Return advice after the loss of a request; None when there was no such request."""
        owner = request_id.rpartition(":")[0]
        if owner in self.runs:
            return None
        if self.database.runs.get(owner) is not None:
            return CARRY_ON
        return "ask for the sample again" if self.database.samplers.get(owner) is not None else None

    # ── tidying ───────────────────────────────────────────────────────────────────────────────────

    def _forget_session(self, session_id: str) -> None:
        """Free what a session that has ended holds in all parts."""
        of_session = [run for run, live in self.runs.items() if live.run.session_id == session_id]
        for run in of_session:
            self.runs.forget(run)
        self.workers.forget_session(session_id)
        next(iter(self.workers)).run(self.database.runs.touch, self._take_asked())
        self.samplers.forget_session(session_id)
        self.promises.forget_session(session_id)
        self.samples.forget_session(session_id)
        self.recordings.forget(session_id)
        self.journals.forget_session(session_id)

    def _take_asked(self) -> dict[str, float]:
        asked, self.runs.asked = self.runs.asked, {}
        return asked

    async def tend(self) -> None:
        """Forget expired results and silent sessions, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception as error:
                complain("a cleanup failed; it is tried again", error)

    async def sweep(self) -> None:
        """Delete everything that has expired."""
        self.promises.sweep()
        self.recordings.sweep()
        self.promises.sweep_logs(self.sessions)
        await self.samples.note_read()
        await self.sessions.sweep()
        await asyncio.to_thread(self.database.runs.touch, self._take_asked())
        for directory in await asyncio.to_thread(self.database.checkpoints.remove_expired):
            await asyncio.to_thread(discard, directory)
        await asyncio.to_thread(sweep_uploads, self.upload_dir)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    async def drain(self) -> None:
        """Refuse new requests; wait until the open ones end, or the time is up."""
        self.is_draining = True
        deadline = time.monotonic() + self.limits.drain_seconds
        while sum(self.meter.open.values()) > self._held_up() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _held_up(self) -> int:
        """Return the number of operations that wait for a request that is refused now."""
        return sum(
            not promise.done.is_set()
            for live in self.runs.values()
            if (missing := live.lane.missing) is not None
            for number, promise in live.recent.items()
            if number > missing
        )

    async def leave(self) -> None:
        """Start nothing new, and write the runs to disk, so that the next start is faster.

        The journals keep the runs that are not written in time.
        """
        if self.promises.are_left:
            return
        self.is_draining = True
        self.promises.leave()
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for live in list(self.runs.values()):
                    await live.worker.run(self.snapshots.freeze_last, live)
                    self.snapshots.commit(live)
                    if live.commit is not None:
                        await live.commit
        except (TimeoutError, EngineError) as error:
            why = str(error) or "it took too long"
            next_start = "the next start rebuilds them from their journals"
            logger.warning("some runs were not written to disk (%s); %s", why, next_start)

    def unlock(self) -> None:
        """Let another server use the data directory."""
        self._lock.close()
