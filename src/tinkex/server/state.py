"""Everything a running server knows, and the words its parts share."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinkex.engine.api import BaseModel, Engine, EngineError
from tinkex.engine.places import Writer
from tinkex.server.access.accounts import Accounts
from tinkex.server.access.searches import Searches
from tinkex.server.complaints import complain
from tinkex.server.database.entities import Run
from tinkex.server.database.interface import Database
from tinkex.server.files.data_dir import Lock, discard, make_directory, sync_above
from tinkex.server.files.seals import write_whole
from tinkex.server.files.upload_files import sweep_uploads

# for those who know the state, from one place
from tinkex.server.http_errors import Refusal as Refusal
from tinkex.server.meter import Meter
from tinkex.server.runs.journals import RECORDINGS, Journals, file_name
from tinkex.server.runs.promises import Promise, Promises
from tinkex.server.runs.scheduler import Lane, Worker
from tinkex.server.samples.sampling_records import SamplingRecords
from tinkex.server.server_limits import Limits
from tinkex.server.server_metrics import Metrics

logger = logging.getLogger("tinkex.server")

READ = "read"
"""What a journal of samples says where results have been read."""
UNPLACED = ".new-"
"""What follows a nameless sampler's name in that of a directory while its weights are written
there."""
EXPIRED = "expired"
"""Why a session ended from which nothing was heard."""
CARRY_ON = "carry on from a saved state with create_training_client_from_state_with_optimizer"


@dataclass(frozen=True, slots=True)
class Queued:
    """An operation that waits for its turn."""

    promise: Promise
    work: Callable[[], Any]
    after: Callable[[Any], Any] | None = None
    """What is to be done with the work's result, on the event loop."""
    is_due_anyway: bool = False
    """Whether the work is done even when a number before it never comes."""
    is_pass: bool = False
    """Whether the work only starts a pass on the engine."""
    is_save: bool = False
    """Whether it need not wait for the saves before it."""


@dataclass(slots=True)
class LiveRun:
    """A training run whose adapter is in the engine."""

    run: Run
    lane: Lane[Queued] = field(default_factory=lambda: Lane[Queued]())
    last: int | None = None
    """The number under which the run is unloaded; nothing comes after it."""
    gap: int | None = None
    gap_timer: asyncio.TimerHandle | None = None
    recent: dict[int, Promise] = field(default_factory=dict)
    """Promises by number, as long as their results may have to be kept beside the next state on
    disk."""
    since_state: int = 0
    """Operations since the last state was put on disk …"""
    state_time: float = field(default_factory=time.monotonic)
    """… and when that was."""
    state_rest: float = 0.0
    """For how many seconds after that there is no other, since it took so long."""
    new_state: tuple[int, Writer | None] | None = None
    """The number of a state that is not in force yet, and what writes its files if that is not
    done."""
    enforcing: asyncio.Lock = field(default_factory=asyncio.Lock)
    unsaved_samplers: dict[str, int] = field(default_factory=dict)
    """Nameless samplers of this run that are only in memory, and the numbers they were asked for
    under. The worker adds to it, so copy it before you go through it."""
    done: int = 0
    """The number of the operation that was carried out last."""
    is_between_steps: bool = True
    """Whether no gradient is pending: only then does a state stand for all that was done."""


class State:
    """Everything a running server knows; made by `create_app`, started and stopped by its lifespan."""

    def __init__(
        self,
        engine: Engine,
        data_dir: Path,
        limits: Limits,
        open_database: Callable[[Path], Database],
        *,
        api_key: str | None = None,
        tokens: bool = False,
        strict: bool = False,
        embedded: bool = False,
    ) -> None:
        data_dir = data_dir.expanduser().resolve()
        self.engine = engine
        self.data_dir = data_dir
        self.limits = limits
        self.worker = Worker(engine)
        self.promises = Promises(conceal=self.without_paths)
        directories = [
            model.directory.parent for model in engine.models() if model.directory is not None
        ]
        self._places = sorted(
            {str(place) for place in (data_dir, *directories)}, key=len, reverse=True
        )
        """Directories that others are not told of, the innermost first."""
        self.windows = {model.name: model.context_length for model in engine.models()}
        """How many tokens each base model takes."""
        self.runs: dict[str, LiveRun] = {}
        self.heard: dict[str, float] = {}
        self.snapshots: dict[str, Path | None] = {}
        """Nameless samplers, and where their weights are once they had to make room in memory."""
        self.targets: dict[str, int] = {}
        """The newest version of each run's in-flight target, where there is one."""
        self.loading: dict[str, asyncio.Future[None]] = {}
        self.journals = Journals(data_dir)
        self.samples: dict[str, dict[str, int]] = {}
        """By session, the samples in its journal that may still be asked for, and their numbers
        there."""
        self.recordings = SamplingRecords(
            data_dir / RECORDINGS,
            self.journals.of,
            memory_bytes=limits.recordings_memory_bytes,
            disk_bytes=limits.recordings_disk_bytes,
            may_delete=lambda session_id: not self._has_sleeping_runs(session_id),
        )
        self._unplaced: dict[str, Path] = {}
        """Where the weights of nameless samplers are being written. Known to the worker alone."""
        self.writing = asyncio.Lock()
        """Held while the state of a run or a sampler is written: one at a time is enough for a
        disk, and for memory."""
        self.reviving: dict[str, asyncio.Task[None]] = {}
        self.revive: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Takes up again what an earlier life of the server had of a run or of a session's samples.
        """
        self.bound: dict[str, str] = {}
        """Which weights the samplers of open sessions began with: they never change to others of
        the same path."""
        make_directory(data_dir)
        self._lock = Lock(data_dir, shared=embedded)
        self.left = {
            found.name for place in ("runs", "samples") for found in (data_dir / place).glob("*")
        }
        """The names of what an earlier life left in its journals."""
        self.checkpoint_dir = data_dir / "checkpoints"
        make_directory(self.checkpoint_dir)
        self.upload_dir = data_dir / "uploads"
        self.finishing: set[str] = set()
        """Uploads that are just being made checkpoints of."""
        self.database = open_database(data_dir)
        self.database.verify()
        self.accounts = Accounts(self.database, api_key, embedded=embedded)
        self.tokens = tokens
        """Whether clients are to exchange their keys for tokens."""
        self.strict = strict
        """Whether weights are loaded as a run's first operation only."""
        self.meter = Meter(self.database)
        self.metrics = Metrics()
        self.owners: dict[str, str] = {}
        """Owners of sessions, as far as they have been asked for."""
        self.searches = Searches()
        self.is_draining = False
        self.expanding = asyncio.Semaphore(1)
        """Held while a compressed body grows large."""
        self.asked: dict[str, float] = {}
        """When something was last asked of runs, until it is on record."""

    # ── what is on disk of what is live ───────────────────────────────────────────────────────────

    def unlock(self) -> None:
        """Let another server use the data directory."""
        self._lock.close()

    async def revived(self, name: str) -> None:
        """Have what an earlier life left of a run (or of a session's samples) taken up, once."""
        if self.revive is None or file_name(name) not in self.left:
            return
        task = self.reviving.get(name)
        if task is None:
            task = self.reviving[name] = asyncio.create_task(self.revive(name))
        await asyncio.shield(task)

    def without_paths(self, text: str) -> str:
        """A text for others, without the places of this server's files."""
        for place in self._places:
            text = text.replace(f"{place}/", "").replace(place, "the data directory")
        return text

    def is_loaded(self, model_id: str) -> bool:
        """Return whether a run takes requests: at once, or after it is taken up again."""
        name = file_name(model_id)
        return model_id in self.runs or (
            name in self.left and (self.data_dir / "runs" / name).is_dir()
        )

    def _has_sleeping_runs(self, session_id: str) -> bool:
        """Return whether a session has runs of an earlier life that are not taken up."""
        prefix, awake = (
            f"{file_name(session_id)}_train_",
            {file_name(model_id) for model_id in self.runs},
        )
        sleeping = [name for name in self.left if name.startswith(prefix) and name not in awake]
        return any((self.data_dir / "runs" / name).is_dir() for name in sleeping)

    def base_model(self, name: str) -> BaseModel:
        """A base model by name; the error lists the ones there are."""
        models = {model.name: model for model in self.engine.models()}
        if name not in models:
            raise EngineError(
                f"there is no base model {name!r}; this server has: {', '.join(sorted(models))}"
            )
        return models[name]

    def check_base(
        self, name: str, digest: str, what: str, category: Literal["user", "server"] = "user"
    ) -> None:
        """Refuse weights that were trained on another base model of the same name."""
        if digest and (now := self.base_model(name).digest) and now != digest:
            raise EngineError(
                f"{what} was trained on other weights of {name!r} than this server has under that "
                "name; start the server with the base model it was trained on",
                category,
            )

    def hear(self, session_id: str) -> None:
        """Note that something came for a session, if it is open."""
        if session_id in self.heard:
            self.heard[session_id] = time.monotonic()

    def end_session(self, session_id: str) -> None:
        """Free what a session holds in memory; its runs and checkpoints stay on record."""
        self.heard.pop(session_id, None)
        for model_id in [m for m, live in self.runs.items() if live.run.session_id == session_id]:
            live = self.runs.pop(model_id)
            if live.gap_timer is not None:
                live.gap_timer.cancel()
            self.worker.run(self.engine.drop, model_id)
        self.worker.run(self.engine.drop_losses, f"{session_id}:")
        self.worker.run(self.database.runs.touch, self._take_asked())
        self.worker.cancel_samples(f"{session_id}:")
        for sampler in [name for name in self.snapshots if name.startswith(f"{session_id}:")]:
            self.forget_snapshot(sampler)
        for model_id in [name for name in self.targets if name.startswith(f"{session_id}:")]:
            del self.targets[model_id]
        for sampler in [name for name in self.bound if name.startswith(f"{session_id}:")]:
            del self.bound[sampler]
        self.promises.forget_session(session_id)
        self.samples.pop(session_id, None)
        self.recordings.forget(session_id)
        self.journals.forget_session(session_id)

    def after_loss(self, request_id: str) -> str | None:
        """What to do about a request that an earlier life of the server took; None when there was
        no such request.
        """
        owner = request_id.rpartition(":")[0]
        if owner in self.runs:
            return None
        if self.database.runs.get(owner) is not None:
            return CARRY_ON
        return "ask for the sample again" if self.database.samplers.get(owner) is not None else None

    def keep_snapshot(self, session_id: str, sampler: str) -> None:
        """Take a nameless sampler in; the oldest beyond what memory is to hold are put on disk."""
        if session_id not in self.heard:
            self.worker.run(self.engine.drop_sampler, sampler)
            raise EngineError("the session has ended")
        self.snapshots[sampler] = None
        # what was loaded in the meantime must not be dropped as such
        self.loading.pop(sampler, None)
        in_memory = [name for name, directory in self.snapshots.items() if directory is None]
        for name in in_memory[: -self.limits.snapshots]:
            # whoever asks from now on is queued behind the saving
            self.snapshots[name] = self.journals.snapshot_directory(name)
            self.worker.run(self._spill_snapshot, name)

    async def put_snapshot(self, sampler: str) -> None:
        """Have a nameless sampler's weights on disk, whole or not at all; once is enough."""
        begun = await self.worker.run(self.begin_snapshot, sampler)
        if begun is not None:
            async with self.writing:
                await asyncio.to_thread(write_whole, begun[0].write, begun[1])
            await self.worker.run(self.place_snapshot, sampler, begun[1])

    def _spill_snapshot(self, sampler: str) -> None:
        """The same at once, on the worker: room in memory is needed. Mostly a run's state has seen
        to it before.
        """
        begun = self.begin_snapshot(sampler)
        if begun is not None:
            write_whole(begun[0].write, begun[1])
            self.place_snapshot(sampler, begun[1])
        self.engine.drop_sampler(sampler)

    def begin_snapshot(self, sampler: str) -> tuple[Writer, Path] | None:
        """Return the writer of a nameless sampler, and the directory to write; None if it is on disk.

        Call it on the worker.
        """
        directory = self.journals.snapshot_directory(sampler)
        if directory.is_dir():
            return None
        writer = self.engine.sampler_writer(sampler)
        directory.parent.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}{UNPLACED}", dir=directory.parent))
        self._unplaced[sampler] = scratch
        return writer, scratch

    def place_snapshot(self, sampler: str, scratch: Path) -> None:
        """Let files that were written be a sampler's, unless it has others by now. On the worker."""
        directory = self.journals.snapshot_directory(sampler)
        if self._unplaced.get(sampler) != scratch or directory.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
            return
        del self._unplaced[sampler]
        scratch.rename(directory)
        sync_above(directory, 2)

    def clear_unplaced(self, session_id: str) -> None:
        """Delete what an earlier life had not written to its end of a session's samplers. On the
        worker.
        """
        written = set(self._unplaced.values())
        for scratch in (self.data_dir / "snapshots").glob(f"{file_name(session_id)}_*{UNPLACED}*"):
            if scratch not in written:
                shutil.rmtree(scratch, ignore_errors=True)

    def drop_snapshot_files(self, sampler: str) -> None:
        """Have nothing of a nameless sampler on disk, nor of what is being written. On the worker."""
        self._unplaced.pop(sampler, None)
        shutil.rmtree(self.journals.snapshot_directory(sampler), ignore_errors=True)

    def forget_snapshot(self, sampler: str) -> None:
        """Let a nameless sampler go, in memory and on disk."""
        self.snapshots.pop(sampler, None)
        self.loading.pop(sampler, None)
        self.worker.run(self._forget_snapshot, sampler)

    def _forget_snapshot(self, sampler: str) -> None:
        self.engine.drop_sampler(sampler)
        self.drop_snapshot_files(sampler)

    async def note_read_samples(self) -> None:
        """Let the journals of samples know which results have reached their readers, and drop what
        is over.
        """
        for session_id, numbers in list(self.samples.items()):
            over = [request_id for request_id in numbers if self.promises.is_over(request_id)]
            # it may have ended while another's was written
            if not over or session_id not in self.samples:
                continue
            journal = self.journals.of_samples(session_id)
            for request_id in over:
                del numbers[request_id]
            await journal.append(time.time_ns(), {"op": READ, "ids": over})
            journal.drop_until(min(numbers.values(), default=time.time_ns()) - 1)

    async def tend(self) -> None:
        """Until cancelled: forget results whose time is over, and sessions that fell silent."""
        while True:
            await asyncio.sleep(15)
            try:
                await self._sweep()
            except Exception as error:
                complain("tidying up failed; it is tried again", error)

    async def _sweep(self) -> None:
        self.promises.sweep()
        self.recordings.sweep()
        self.promises.sweep_logs(self.heard)
        await self.note_read_samples()
        now, seconds = time.monotonic(), self.limits.session_seconds
        for session_id in [s for s, heard in self.heard.items() if heard < now - seconds]:
            # first, so that nobody who reads the record finds anything of it alive
            self.end_session(session_id)
            await asyncio.to_thread(
                self.database.sessions.finish, session_id, EXPIRED, self._silence()
            )
            self.heard.pop(session_id, None)  # who was heard from meanwhile came too late
        heard = [
            (time.time() - (now - heard), session_id) for session_id, heard in self.heard.items()
        ]
        await asyncio.to_thread(self._note_heard, heard)
        await asyncio.to_thread(self.database.runs.touch, self._take_asked())
        for directory in await asyncio.to_thread(self.database.checkpoints.remove_expired):
            await asyncio.to_thread(discard, directory)
        await asyncio.to_thread(sweep_uploads, self.upload_dir)

    def _take_asked(self) -> dict[str, float]:
        asked, self.asked = self.asked, {}
        return asked

    def _silence(self) -> str:
        return f"nothing was heard for {self.limits.session_seconds:g} s (session_seconds)"

    def _note_heard(self, heard: list[tuple[float, str]]) -> None:
        """Record when sessions were heard from, and end those that an earlier life of the server
        left open.
        """
        silent_since = time.time() - self.limits.session_seconds
        self.database.sessions.note_heard(heard, silent_since, EXPIRED, self._silence())

    def refuse_if_stopping(self) -> None:
        """Send whoever waits away when the server stops: what was promised is kept by its next
        life.
        """
        if self.promises.are_left:
            raise Refusal(
                503, "this server is shutting down; ask again", headers={"Retry-After": "1"}
            )

    def refuse_if_dead(self) -> None:
        """Take nothing in that nobody would carry out; to ask again helps only after a restart."""
        if self.worker.failure is not None:
            raise Refusal(503, str(self.worker.failure), headers={"X-Should-Retry": "false"})

    async def drain(self) -> None:
        """Take nothing more in, and wait for what is under way: until it is done, or time is up."""
        self.is_draining = True
        deadline = time.monotonic() + self.limits.drain_seconds
        while sum(self.meter.open.values()) > self._held_up() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _held_up(self) -> int:
        """How many operations wait for one that has not come, and that is not let in any more."""
        return sum(
            not promise.done.is_set()
            for live in self.runs.values()
            if (missing := live.lane.missing) is not None
            for number, promise in live.recent.items()
            if number > missing
        )
