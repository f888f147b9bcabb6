"""Sessions in SQLite."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.server.database.interface import (
    CLIENT_REASONS,
    LOCAL_OWNER,
    NO_PROJECT,
    FoundSession,
    SessionRecord,
)
from tinkex.server.database.sqlite_connection import Condition, Table, joined, record_of
from tinkex.types.search_requests import (
    ClientFinishedSessionStatusQuery,
    SessionSearchRequest,
    SessionStatusQuery,
)

MICROSECOND = "CAST(ROUND(sessions.created * 1000000) AS INTEGER)"
FINISH = "UPDATE sessions SET finished = ?, reason = ?, detail = ? WHERE finished IS NULL"
OWNER = """
    SELECT session_id AS id, owner FROM sessions WHERE session_id = ?
    UNION ALL SELECT model_id, owner FROM runs WHERE model_id = ?
"""


class SqliteSessions(Table):
    """Sessions."""

    def add(self, session_id: str, request: Mapping[str, Any], owner: str = LOCAL_OWNER) -> None:
        """Record a new session."""
        now = time.time()
        self._connection.insert(
            "sessions",
            {
                "session_id": session_id,
                "owner": owner,
                "created": now,
                "heard": now,
                "project_id": request.get("project_id"),
                "display_name": request.get("display_name"),
                "tags": json.dumps(request.get("tags") or []),
                "user_metadata": json.dumps(request.get("user_metadata") or {}),
                "sdk_version": request.get("sdk_version") or "",
            },
        )

    def get(self, session_id: str) -> SessionRecord | None:
        """Return a session with its runs and samplers, or None."""
        row = self._connection.one("SELECT * FROM sessions WHERE session_id = ?", session_id)
        if row is None:
            return None
        run_ids, sampler_ids = (
            self._ids(f"{column} FROM {table} WHERE session_id = ? ORDER BY created", session_id)
            for column, table in (("model_id", "runs"), ("sampler_id", "samplers"))
        )
        metadata = json.loads(row["user_metadata"])
        return SessionRecord(row["display_name"], metadata, run_ids, sampler_ids)

    def _ids(self, query: str, *values: Any) -> list[str]:
        return [found for (found,) in self._connection.read(f"SELECT {query}", values)]

    def state(self, session_id: str) -> str | None:
        """Return "active", "finished", "expired", or None when there is no such session."""
        sql = "SELECT finished, reason FROM sessions WHERE session_id = ?"
        row = self._connection.one(sql, session_id)
        if row is None or row["finished"] is None:
            return None if row is None else "active"
        return "expired" if row["reason"] == "expired" else "finished"

    def open_ids(self) -> list[str]:
        """Return the sessions that have not ended."""
        return self._ids("session_id FROM sessions WHERE finished IS NULL")

    def finish(self, session_id: str, reason: str, detail: str | None) -> None:
        """Record how a session ended; the first reason stays.

        Its saves need not be told from new requests any more.
        """
        ended = [(time.time(), reason, detail, session_id)]
        of_session = [(session_id, session_id)]
        self._connection.change(
            (f"{FINISH} AND session_id = ?", ended),
            ("DELETE FROM saves WHERE request_id > ? || ':' AND request_id < ? || ';'", of_session),
            ("DELETE FROM inflight WHERE model_id > ? || ':' AND model_id < ? || ';'", of_session),
        )

    def note_heard(
        self, heard: Sequence[tuple[float, str]], silent_since: float, reason: str, detail: str
    ) -> None:
        """Record the last requests of sessions, and end those silent since a time."""
        self._connection.change(
            ("UPDATE sessions SET heard = MAX(heard, ?) WHERE session_id = ?", heard),
            (f"{FINISH} AND heard < ?", [(time.time(), reason, detail, silent_since)]),
            flush=False,
        )

    def set_project(self, session_id: str, project_id: str) -> bool:
        """Move a session and its checkpoints into a project; return whether it exists."""
        sql = "UPDATE sessions SET project_id = ? WHERE session_id = ? RETURNING session_id"
        if not self._connection.rows(sql, project_id, session_id):
            return False
        runs = "SELECT model_id FROM runs WHERE session_id = ?"
        sql = f"UPDATE checkpoints SET project_id = ? WHERE model_id IN ({runs})"
        self._connection.rows(sql, project_id, session_id)
        return True

    def owner_of(self, session_id: str, model_id: str) -> tuple[str, str] | None:
        """Return the id and owner of the session, or else of the run, or None."""
        row = self._connection.one(OWNER, session_id, model_id)
        return None if row is None else (row["id"], row["owner"])

    def ids(self, owner: str, limit: int, offset: int) -> list[str]:
        """Return a page of an owner's sessions, newest first."""
        order = "ORDER BY created DESC, session_id DESC LIMIT ? OFFSET ?"
        return self._ids(f"session_id FROM sessions WHERE owner = ? {order}", owner, limit, offset)

    def search(self, request: SessionSearchRequest, owner: str) -> list[FoundSession]:
        """Return an owner's sessions that match, newest first: the page and one more.

        Raises:
            TimeoutError: The search took too long.
        """
        where, values = joined(_conditions(request, owner))
        sql = f"""
            WITH page AS (
                SELECT sessions.*, {MICROSECOND} AS microsecond FROM sessions
                WHERE {where}
                ORDER BY microsecond DESC, session_id DESC LIMIT ?
            )
            SELECT page.*, COUNT(tinker_path) AS checkpoints,
                COALESCE(SUM(size_bytes), 0) AS size_bytes
            FROM page LEFT JOIN runs USING (session_id)
            LEFT JOIN checkpoints ON checkpoints.model_id = runs.model_id
                AND (expires IS NULL OR expires > ?)
            GROUP BY session_id ORDER BY microsecond DESC, session_id DESC
        """
        rows = self._connection.search(sql, [*values, request.limit + 1, time.time()])
        return [record_of(FoundSession, row) for row in rows]


def _conditions(request: SessionSearchRequest, owner: str) -> list[Condition]:
    found: list[Condition] = [("sessions.owner = ?", [owner])]
    if request.session_id is not None:
        found.append(("session_id = ?", [request.session_id]))
    if request.project_ids is not None:
        project = f"COALESCE(sessions.project_id, '{NO_PROJECT}')"
        found.append((_among(project, request.project_ids), list(request.project_ids)))
    found += metadata_conditions("sessions", request.user_metadata)
    if request.display_name is not None:
        found.append(("instr(lower(display_name), lower(?)) > 0", [request.display_name]))
    if request.statuses is not None:
        any_of, values = joined([_status_condition(query) for query in request.statuses], "OR")
        found.append((f"({any_of})", values))
    if request.cursor is not None:
        since = round(request.cursor.last_created_at.timestamp() * 1e6)
        last = request.cursor.last_session_id
        found.append((f"({MICROSECOND}, session_id) < (?, ?)", [since, last]))
    return found


def metadata_conditions(table: str, user_metadata: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions that a table's metadata holds every pair."""
    pair = f"EXISTS (SELECT 1 FROM json_each({table}.user_metadata) WHERE key = ? AND value = ?)"
    return [(pair, [name, value]) for name, value in user_metadata.items()]


def _status_condition(query: SessionStatusQuery) -> Condition:
    if isinstance(query, ClientFinishedSessionStatusQuery):
        reasons = list(query.reasons or CLIENT_REASONS)
        return _among("reason", reasons), reasons
    if query.type == "active":
        return "reason IS NULL", []
    if query.type == "cancelled":
        others = _among("reason", CLIENT_REASONS, "NOT IN")
        return f"(reason IS NOT NULL AND {others})", list(CLIENT_REASONS)
    # no session fails here: operations fail, and the session goes on
    return "0", []


def _among(expression: str, values: Sequence[Any], relation: str = "IN") -> str:
    return f"{expression} {relation} ({', '.join('?' * len(values))})"
