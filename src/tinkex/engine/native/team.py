"""Threads that compute in C, owned by Python."""

from __future__ import annotations

import os
import weakref

from tinkex.engine.native.bindings import Library


class Team:
    """Threads for one caller at a time; they end with this object."""

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self.threads = library, threads
        self._address, self._process = self._gather(), os.getpid()

    @property
    def address(self) -> int:
        """Return the address of the threads.

        A forked child has none of its parent's threads and would wait for them forever, so it gets
        its own.
        """
        if self._process != os.getpid():
            self._address, self._process = self._gather(), os.getpid()
        return self._address

    def _gather(self) -> int:
        team: int | None = self.library.team_new(self.threads)
        if team is None:
            raise MemoryError("no memory for a team of threads")
        dismissal = weakref.finalize(self, _dismiss, self.library, team, os.getpid())
        # a daemon thread may be in a call at exit, and waiting for it would never end
        dismissal.atexit = False
        return team


def _dismiss(library: Library, team: int, process: int) -> None:
    if process == os.getpid():  # other processes have no such threads
        library.team_free(team)
