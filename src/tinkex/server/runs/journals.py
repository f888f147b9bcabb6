"""The directories of runs, samples and nameless samplers, and the journals in them.

Runs and samples of an earlier life of the server are on disk only, until they are taken up again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.server.files.data_dir import discard, set_aside
from tinkex.server.runs.journal import Committer, Journal

DIRECT = "direct"
"""The id that stands for a session where samples are asked for without one."""
RECORDINGS = "recordings"
"""The directory of what is recorded of samples, with one directory for each session."""
UNPLACED = ".new-"
"""The suffix of a sampler's directory while its weights are written there."""
PLACES = ("runs", "samples", "snapshots", RECORDINGS)

Revive: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]


class Journals:
    """All journals of a data directory; each is opened when it is first asked for."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._committer = Committer()
        self._open: dict[Path, Journal] = {}
        self.writing = asyncio.Lock()
        """Held while weights are written: one at a time is enough for a disk, and for memory."""

    def run_directory(self, run: str) -> Path:
        """Return the directory of a run's journal and states."""
        return self.data_dir / "runs" / file_name(run)

    def samples_directory(self, session_id: str) -> Path:
        """Return the directory of the journal of a session's samples."""
        return self.data_dir / "samples" / file_name(session_id)

    def snapshot_directory(self, sampler: str) -> Path:
        """Return the directory of a nameless sampler's weights when they are on disk."""
        return self.data_dir / "snapshots" / file_name(sampler)

    def directories(self) -> Iterator[Path]:
        """Yield all directories of runs and sessions."""
        for place in PLACES:
            yield from (self.data_dir / place).glob("*")

    def of(self, directory: Path) -> Journal:
        """Return the journal in a directory."""
        journal = self._open.get(directory)
        if journal is None:
            journal = self._open[directory] = Journal(directory, self._committer)
        return journal

    def of_run(self, run: str) -> Journal:
        """Return the journal of a run."""
        return self.of(self.run_directory(run))

    def of_samples(self, session_id: str) -> Journal:
        """Return the journal of a session's samples."""
        return self.of(self.samples_directory(session_id))

    def forget(self, directory: Path) -> None:
        """Delete a directory with its journal."""
        self._close(directory)
        discard(directory)  # a half of it must not be taken for a run after a crash

    def forget_session(self, session_id: str) -> None:
        """Delete the directories of a session and of its runs."""
        prefix = file_name(session_id)
        for directory in list(self.directories()):
            if directory.name == prefix or directory.name.startswith(f"{prefix}_"):
                self.forget(directory)

    def set_aside(self, directory: Path, why: str) -> None:
        """Move a directory that cannot be used to a place where nothing deletes it."""
        self._close(directory)
        set_aside(self.data_dir, directory, why)

    def _close(self, directory: Path) -> None:
        journal = self._open.pop(directory, None)
        if journal is not None:
            journal.close()

    def close(self) -> None:
        """Finish all writing, and close all journals."""
        self._committer.stop()
        for journal in self._open.values():
            journal.close()
        self._open.clear()


def file_name(name: str) -> str:
    """Return an id as the name of a file; ids are ours, or made of ours."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


class Revivals:
    """Runs and samples that are on disk only, by the ids of runs and sessions."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._left = {
            found.name for place in ("runs", "samples") for found in (data_dir / place).glob("*")
        }
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.revive: Revive | None = None
        """Takes a run or the samples of a session up again."""

    async def revived(self, name: str) -> None:
        """Have what an earlier life left of a run or of a session's samples taken up, once."""
        task = self._tasks.get(name)
        if task is None:
            if self.revive is None or file_name(name) not in self._left:
                return
            task = self.begin(name, self.revive(name))
        await asyncio.shield(task)

    def task(self, name: str) -> asyncio.Task[None] | None:
        """Return the latest task that takes something up, or took it up."""
        return self._tasks.get(name)

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Take something up; what is asked for it waits until that is done."""
        task = self._tasks[name] = asyncio.create_task(work)
        return task

    def is_asleep(self, run: str) -> bool:
        """Return whether a run is on disk only."""
        name = file_name(run)
        return name in self._left and (self._data_dir / "runs" / name).is_dir()

    def has_sleeping_runs(self, session_id: str, awake: Collection[str]) -> bool:
        """Return whether a session has runs of an earlier life that are not awake."""
        prefix, loaded = f"{file_name(session_id)}_train_", set(map(file_name, awake))
        sleeping = [name for name in self._left if name.startswith(prefix) and name not in loaded]
        return any((self._data_dir / "runs" / name).is_dir() for name in sleeping)
