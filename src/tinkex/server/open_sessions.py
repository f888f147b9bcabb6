"""The open sessions, and the time of the last request of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from tinkex.server.database.interface import SessionTable
from tinkex.server.http_errors import Refusal

EXPIRED = "expired"
"""The reason for the end of a session that was silent."""


class Sessions:
    """The open sessions of a server."""

    def __init__(
        self, table: SessionTable, seconds: float, forget: Callable[[str], object]
    ) -> None:
        """Start with no sessions.

        Args:
            table: The record of sessions.
            seconds: The longest time that a session may be silent.
            forget: Frees the memory and the disk space of a session that has ended.
        """
        self._table, self._seconds, self._forget = table, seconds, forget
        self.last_seen: dict[str, float] = {}
        """The time of the last request of each open session, by its id."""

    def __contains__(self, session_id: object) -> bool:
        return session_id in self.last_seen

    def __iter__(self) -> Iterator[str]:
        return iter(self.last_seen)

    def __len__(self) -> int:
        return len(self.last_seen)

    def see(self, session_id: str) -> None:
        """Note a request of a session; the session is open from now on."""
        self.last_seen[session_id] = time.monotonic()

    def note(self, session_id: str) -> None:
        """Note a request of a session, if it is open."""
        if session_id in self.last_seen:
            self.see(session_id)

    async def require(self, session_id: str) -> None:
        """Note a request of a session; refuse it if the session is not open."""
        if session_id not in self.last_seen:
            known = await asyncio.to_thread(self._table.state, session_id)
            if known is None:
                raise Refusal(404, f"there is no session {session_id!r}")
            if known == EXPIRED:
                raise Refusal(410, f"session {session_id!r} is finished: {self._silence()}")
            if known == "finished":
                raise Refusal(410, f"session {session_id!r} is finished")
        self.see(session_id)

    def _silence(self) -> str:
        return f"nothing was heard for {self._seconds:g} s (session_seconds)"

    def end(self, session_id: str) -> None:
        """Free the memory of a session; its runs and checkpoints stay on record."""
        self.last_seen.pop(session_id, None)
        self._forget(session_id)

    async def finish(self, session_id: str, reason: str, detail: str | None) -> None:
        """End a session for its client; the first reason stays on record."""
        self.last_seen.pop(session_id, None)  # from here on the record says whether it is open
        await asyncio.to_thread(self._table.finish, session_id, reason, detail)
        self.end(session_id)

    async def sweep(self) -> None:
        """End sessions that were silent too long; record the others' last requests."""
        now = time.monotonic()
        for session_id in [s for s, seen in self.last_seen.items() if seen < now - self._seconds]:
            # first, so that no reader of the record finds anything of it alive
            self.end(session_id)
            await asyncio.to_thread(self._table.finish, session_id, EXPIRED, self._silence())
            self.last_seen.pop(session_id, None)  # what came meanwhile came too late
        seen = [(time.time() - (now - seen), session) for session, seen in self.last_seen.items()]
        silent_since = time.time() - self._seconds
        # those that an earlier life of the server left open end as well
        end = (silent_since, EXPIRED, self._silence())
        await asyncio.to_thread(self._table.note_heard, seen, *end)
