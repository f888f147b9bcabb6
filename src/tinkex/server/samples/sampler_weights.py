"""Weights to sample from: those loaded from files, and those saved without a path.

Of the loaded ones those longest unused make room for others. A nameless sampler is saved for its
session: the newest are kept in memory, on the worker of their run. The others are on disk, and are
loaded when they are sampled from.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.api import EngineError, Writer
from tinkex.server.files.checkpoint_files import reading
from tinkex.server.files.data_dir import sync_above
from tinkex.server.files.seals import check, write_whole
from tinkex.server.open_sessions import Sessions
from tinkex.server.runs.journals import UNPLACED, Journals, file_name
from tinkex.server.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of a sampler: their worker, their name there, and the files behind them."""

    worker: Worker
    name: str
    base_model: str
    directory: Path | None = None
    is_loadable: bool = True
    target: str | None = None
    """The in-flight target that is sampled from; the weights are those it points to."""
    version: int = 0
    cache: str = ""
    """The namespace of cached prompts, where it is not that of the weights."""


class LoadedWeights:
    """The weights that each worker has loaded, those last used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loading: defaultdict[Worker, dict[str, asyncio.Future[None]]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._loading.values()))

    def count(self, worker: Worker) -> int:
        """Return how many weights a worker has loaded."""
        return len(self._loading.get(worker, ()))

    def having(self, name: str) -> Mapping[Worker, object]:
        """Return the workers that have some weights, or are loading them."""
        return {worker: name for worker, loading in self._loading.items() if name in loading}

    def load(self, source: WeightSource) -> asyncio.Future[None]:
        """Load weights unless they are there or on their way; a failure is not kept."""
        worker, name = source.worker, source.name
        here = self._loading[worker]
        loading = here.pop(name, None)
        if loading is None:
            loading = worker.run(_load, source)
            loading.add_done_callback(
                lambda done: here.pop(name, None) if done.exception() else None
            )
        here[name] = loading
        while len(here) > self._most:
            oldest = next(iter(here))
            del here[oldest]
            worker.run(worker.engine.drop_sampler, oldest)
        return loading

    def lose(self, worker: Worker) -> None:
        """Forget what a worker had loaded, whose process is gone."""
        self._loading.pop(worker, None)

    def drop_copies(self, sampler: str) -> None:
        """Drop the copies of a nameless sampler on workers that are not its home."""
        for worker, loading in self._loading.items():
            for name in [name for name in loading if name.startswith(f"{sampler}@")]:
                del loading[name]
                worker.run(worker.engine.drop_sampler, name)

    def disown(self, name: str) -> None:
        """Do not count weights as loaded ones any more; the engine keeps them."""
        for loading in self._loading.values():
            loading.pop(name, None)


def _load(source: WeightSource) -> None:
    """Load weights whose files are as they were written; on the worker."""
    engine = source.worker.engine
    if source.directory is None:
        engine.load_sampler(source.name, source.base_model, None)
        return
    with reading(source.directory, source.name.partition("@")[0]):
        check(source.directory)
        engine.load_sampler(source.name, source.base_model, source.directory)


class NamelessSamplers:
    """The nameless samplers of a server."""

    def __init__(
        self, journals: Journals, sessions: Sessions, loaded: LoadedWeights, most: int
    ) -> None:
        """Have no sampler yet; keep at most so many in memory."""
        self._journals, self._sessions = journals, sessions
        self._loaded, self._most = loaded, most
        self.directories: dict[str, Path | None] = {}
        """By sampler, the directory of its weights once they had to make room in memory."""
        self._homes: dict[str, Worker] = {}
        """The worker that a sampler was made on."""
        self._writing: dict[str, asyncio.Future[None]] = {}
        """The samplers that are being written for other workers."""
        self._unplaced: dict[str, Path] = {}
        """The directories that samplers are being written to; used on the workers only."""

    def in_memory(self) -> list[str]:
        """Return the samplers that are in memory, the oldest first."""
        return [name for name, directory in self.directories.items() if directory is None]

    def home(self, sampler: str) -> Worker | None:
        """Return the worker that has a sampler in memory, if one has."""
        return self._homes.get(sampler) if self.directories.get(sampler) is None else None

    async def find(self, sampler: str) -> bool:
        """Look for a sampler of an earlier life of the server on disk."""
        directory = self._journals.snapshot_directory(sampler)
        if not await asyncio.to_thread(directory.is_dir):
            return False
        self.directories.setdefault(sampler, directory)
        return True

    def keep(self, session_id: str, sampler: str, worker: Worker) -> None:
        """Take a sampler in; the oldest beyond what memory is to hold are put on disk."""
        if session_id not in self._sessions:
            worker.run(worker.engine.drop_sampler, sampler)
            raise EngineError("the session has ended")
        self.directories[sampler], self._homes[sampler] = None, worker
        # what was loaded in the meantime must not be dropped as such
        self._loaded.disown(sampler)
        self._loaded.drop_copies(sampler)  # they are of earlier weights
        for name in self.in_memory()[: -self._most]:
            # who asks from now on is queued behind the saving
            self.directories[name] = self._journals.snapshot_directory(name)
            self._homes[name].run(self._spill, name, self._homes[name])

    async def on_disk(self, sampler: str) -> Path:
        """Write the weights of a sampler for other workers, once; return their directory."""
        directory = self._journals.snapshot_directory(sampler)
        if not directory.is_dir():
            writing = self._writing.get(sampler)
            if writing is None:
                writing = self._writing[sampler] = asyncio.ensure_future(self.put(sampler))
                writing.add_done_callback(lambda _: self._writing.pop(sampler, None))
            await asyncio.shield(writing)
        return directory

    async def put(self, sampler: str) -> None:
        """Write a sampler's weights to disk, whole or not at all, unless they are there."""
        worker = self._homes.get(sampler)
        begun = await worker.run(self.begin, sampler, worker) if worker is not None else None
        if worker is not None and begun is not None:
            async with self._journals.writing:
                await asyncio.to_thread(write_whole, begun[0].write, begun[1])
            await worker.run(self.place, sampler, begun[1])

    def _spill(self, sampler: str, worker: Worker) -> None:
        """Write a sampler at once to make room in memory; mostly it is on disk. On the worker."""
        begun = self.begin(sampler, worker)
        if begun is not None:
            write_whole(begun[0].write, begun[1])
            self.place(sampler, begun[1])
        worker.engine.drop_sampler(sampler)

    def begin(self, sampler: str, worker: Worker) -> tuple[Writer, Path] | None:
        """Return a writer of a sampler's weights and its directory; None if they are on disk.

        On the worker.
        """
        directory = self._journals.snapshot_directory(sampler)
        if directory.is_dir():
            return None
        writer = worker.engine.sampler_writer(sampler)
        directory.parent.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}{UNPLACED}", dir=directory.parent))
        self._unplaced[sampler] = scratch
        return writer, scratch

    def place(self, sampler: str, scratch: Path) -> None:
        """Give written files to a sampler, unless it has newer ones. Runs on the worker."""
        directory = self._journals.snapshot_directory(sampler)
        if self._unplaced.get(sampler) != scratch or directory.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
            return
        del self._unplaced[sampler]
        scratch.rename(directory)
        sync_above(directory, 2)

    def clear_unplaced(self, session_id: str) -> None:
        """Delete what an earlier life of the server was writing for a session. On the worker."""
        written = set(self._unplaced.values())
        snapshots = self._journals.snapshot_directory(session_id).parent
        for scratch in snapshots.glob(f"{file_name(session_id)}_*{UNPLACED}*"):
            if scratch not in written:
                shutil.rmtree(scratch, ignore_errors=True)

    def drop_files(self, sampler: str) -> None:
        """Delete a sampler's files, and those that are being written. On the worker."""
        self._unplaced.pop(sampler, None)
        shutil.rmtree(self._journals.snapshot_directory(sampler), ignore_errors=True)

    def lose(self, worker: Worker) -> set[str]:
        """Forget the samplers that a worker had in memory, whose process is gone; return them.

        They come back from disk, or with their run.
        """
        lost = {name for name in self.in_memory() if self._homes.get(name) is worker}
        for name in lost:
            del self.directories[name]
        for name in [name for name, home in self._homes.items() if home is worker]:
            del self._homes[name]
        return lost

    def disown(self, sampler: str) -> None:
        """Forget a sampler whose weights are gone."""
        if self.directories.pop(sampler, None) is not None:
            self._loaded.disown(sampler)

    def forget(self, sampler: str) -> None:
        """Let a sampler go, in memory and on disk."""
        self.directories.pop(sampler, None)
        home = self._homes.pop(sampler, None)
        for worker in {*self._loaded.having(sampler), *([home] if home is not None else [])}:
            worker.run(worker.engine.drop_sampler, sampler)
        self._loaded.disown(sampler)
        self._loaded.drop_copies(sampler)
        if home is not None:
            home.run(self.drop_files, sampler)
        else:
            self.drop_files(sampler)

    def forget_session(self, session_id: str) -> None:
        """Let all samplers of a session go."""
        for sampler in [name for name in self.directories if name.startswith(f"{session_id}:")]:
            self.forget(sampler)
