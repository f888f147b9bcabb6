"""Runs and samples of an earlier life of the server, until they are taken up again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.server.runs.journals import file_name
from tinkex.server.runs.work import LiveRun

Revive: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]


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

    async def replayed(
        self, run: str, runs: Mapping[str, LiveRun], is_found: Callable[[], bool]
    ) -> None:
        """Wait until what an earlier life had of a run gives something, or all of it is done."""
        await self.revived(run)
        live = runs.get(run)
        for promise in list(live.recent.values()) if live is not None else ():
            if is_found():
                return
            await promise.done.wait()

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
