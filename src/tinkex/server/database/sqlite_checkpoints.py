"""Checkpoints in SQLite."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tinkex.server.database.entities import NO_PROJECT, Save, SavedCheckpoint, StoredBytes
from tinkex.server.database.sqlite_connection import Connection, insertion
from tinkex.server.database.sqlite_rows import record_of, row_of
from tinkex.server.database.sqlite_sessions import metadata_conditions
from tinkex.types.checkpoints import KINDS
from tinkex.types.search_requests import CheckpointSearchRequest

ALIVE = "(c.expires IS NULL OR c.expires > :now)"
OWN = f"c.tinker_path = :path AND c.owner = :owner AND {ALIVE}"
MICROSECOND = "CAST(ROUND(c.created * 1000000) AS INTEGER)"
"""The time when a checkpoint was made, as exactly as a cursor can say."""
PROJECT = f"COALESCE(c.project_id, s.project_id, '{NO_PROJECT}')"
TABLES = (
    "checkpoints c LEFT JOIN runs r ON r.model_id = c.model_id LEFT JOIN sessions s ON "
    "s.session_id = r.session_id"
)


class SqliteCheckpoints:
    """Checkpoints."""

    def __init__(self, connection: Connection, root: Path) -> None:
        self._connection, self._root = connection, root

    def put(self, saved: SavedCheckpoint, request_id: str | None = None) -> None:
        """Record a checkpoint, and that a request for it was met."""
        directory = saved.directory.relative_to(self._root).as_posix()
        row = row_of(saved, directory=directory)
        met = [] if request_id is None else [(request_id, saved.tinker_path, saved.size_bytes)]
        self._connection.change(
            (insertion("checkpoints", row, replace=True), [tuple(row.values())]),
            ("INSERT INTO saves VALUES (?, ?, ?)", met),
        )

    def save(self, request_id: str) -> Save | None:
        """Return the answer to a request for saving, if it was met in any life of the server."""
        row = self._connection.one(
            "SELECT tinker_path, size_bytes FROM saves WHERE request_id = ?", request_id
        )
        return None if row is None else Save(row["tinker_path"], row["size_bytes"])

    def get(self, tinker_path: str) -> SavedCheckpoint | None:
        """Return a checkpoint by its path, unless it has expired."""
        row = self._connection.one(
            "SELECT * FROM checkpoints WHERE tinker_path = ? AND (expires IS NULL OR expires > ?)",
            tinker_path,
            time.time(),
        )
        return None if row is None else self._saved(row)

    # ── lists ─────────────────────────────────────────────────────────────────────────────────────

    def page(
        self, owner: str, *, model_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[SavedCheckpoint], int]:
        """Return a page of an owner's checkpoints, newest first, and the count.

        With a run, these are the checkpoints of that run that the owner may see.
        """
        visible = (
            "c.owner = :owner"
            if model_id is None
            else "c.model_id = :id AND (c.owner = :owner OR c.public)"
        )
        where = f"FROM checkpoints c WHERE {visible} AND {ALIVE}"
        values = {"owner": owner, "id": model_id, "now": time.time()}
        total = self._connection.read(f"SELECT count(*) {where}", values)[0][0]
        page = (
            f"SELECT c.* {where} ORDER BY c.created DESC, c.tinker_path LIMIT :limit OFFSET :offset"
        )
        return self._list(page, **values, limit=limit, offset=offset), total

    def last(self, model_ids: Sequence[str], owner: str, kind: str) -> dict[str, SavedCheckpoint]:
        """Return the latest checkpoint of a kind of each run that an owner may see."""
        # SQLite gives the row that holds the maximum
        query = f"""
            SELECT c.*, max(c.created) FROM checkpoints c
            WHERE c.model_id IN (SELECT value FROM json_each(:ids)) AND instr(c.tinker_path, :kind)
              AND (c.owner = :owner OR c.public) AND {ALIVE}
            GROUP BY c.model_id"""
        found = self._list(query, ids=json.dumps(model_ids), kind=f"/{kind}/", owner=owner)
        return {saved.model_id: saved for saved in found}

    def samplers(self, owner: str, base_models: Sequence[str], limit: int) -> list[SavedCheckpoint]:
        """Return an owner's checkpoints to sample from, on these base models; newest first."""
        query = f"""
            SELECT c.* FROM checkpoints c
            WHERE c.owner = :owner AND instr(c.tinker_path, '/sampler_weights/') AND {ALIVE}
              AND c.base_model IN (SELECT value FROM json_each(:bases))
            ORDER BY c.created DESC, c.tinker_path LIMIT :limit"""
        bases = json.dumps(list(base_models))
        return self._list(query, owner=owner, bases=bases, limit=max(0, limit))

    def search(
        self, request: CheckpointSearchRequest, owner: str
    ) -> list[tuple[SavedCheckpoint, int]]:
        """Return an owner's checkpoints that match, newest first: the page and one more.

        Each comes with the microsecond when it was made.
        """
        conditions = _conditions(request, owner)
        sql = f"""
            SELECT c.*, {MICROSECOND} AS microsecond FROM {TABLES}
            WHERE {" AND ".join(sql for sql, _ in conditions)}
            ORDER BY microsecond DESC, c.tinker_path DESC LIMIT ?
        """
        values = [value for _, values in conditions for value in values]
        rows = self._connection.read(sql, [*values, request.limit + 1])
        return [(self._saved(row), row["microsecond"]) for row in rows]

    def unknown_projects(self, projects: Collection[str], owner: str) -> list[str]:
        """Return those of the projects in which an owner has nothing."""
        sql = f"""
            SELECT value FROM json_each(:projects) WHERE value NOT IN (
                SELECT {PROJECT} FROM {TABLES} WHERE c.owner = :owner
                UNION SELECT COALESCE(project_id, '{NO_PROJECT}') FROM sessions WHERE owner = :owner
                UNION SELECT '{NO_PROJECT}'
            )
        """
        values = {"projects": json.dumps(list(projects)), "owner": owner}
        return [row["value"] for row in self._connection.read(sql, values)]

    def sizes(self) -> list[tuple[str, str, str, int]]:
        """Return owner, run, base model and bytes of what is stored."""
        sql = f"""
            SELECT owner, model_id, base_model, SUM(size_bytes) FROM checkpoints c
            WHERE {ALIVE} GROUP BY owner, model_id, base_model
        """
        return [tuple(row) for row in self._connection.read(sql, {"now": time.time()})]

    def stored_bytes(self, owner: str | None, project_id: str | None) -> list[StoredBytes]:
        """Return the room taken by project and owner; None stands for all of them."""
        sql = f"""
            SELECT COALESCE(c.project_id, s.project_id) AS project, c.owner AS owner,
                COUNT(*) AS count, SUM(size_bytes) AS size
            FROM {TABLES} WHERE {ALIVE} AND (:owner IS NULL OR c.owner = :owner)
            GROUP BY project, c.owner HAVING :project IS NULL OR project = :project
            ORDER BY project, c.owner
        """
        values = {"now": time.time(), "owner": owner, "project": project_id}
        return [StoredBytes(*row) for row in self._connection.read(sql, values)]

    # ── changes ───────────────────────────────────────────────────────────────────────────────────

    def set_public(self, path: str, owner: str, public: bool) -> bool:
        """Publish an owner's checkpoint or take that back; return whether it exists."""
        return self._change("public", path, owner, public)

    def set_expiry(self, path: str, owner: str, expires: float | None) -> bool:
        """Let an owner's checkpoint expire at a time, or never; return whether it exists."""
        return self._change("expires", path, owner, expires)

    def _change(self, column: str, path: str, owner: str, value: float | None) -> bool:
        query = f"UPDATE checkpoints AS c SET {column} = :value WHERE {OWN} RETURNING 1"
        return bool(self._own(query, path, owner, value=value))

    def remove(self, path: str, owner: str) -> Path | None:
        """Remove an owner's checkpoint; return the directory, whose files can be deleted now."""
        rows = self._own(
            f"DELETE FROM checkpoints AS c WHERE {OWN} RETURNING directory", path, owner
        )
        return self._directory(rows[0]) if rows else None

    def _own(self, query: str, path: str, owner: str, **values: Any) -> list[sqlite3.Row]:
        values |= {"path": path, "owner": owner, "now": time.time()}
        with self._connection.held() as db:
            return db.execute(query, values).fetchall()

    def remove_expired(self) -> list[Path]:
        """Remove the expired checkpoints; return their directories."""
        sql = "DELETE FROM checkpoints WHERE expires <= ? RETURNING directory"
        return [self._directory(row) for row in self._connection.rows(sql, time.time())]

    def directory(self, path: str) -> Path | None:
        """Return the directory of a checkpoint, even of an expired one."""
        row = self._connection.one("SELECT directory FROM checkpoints WHERE tinker_path = ?", path)
        return None if row is None else self._directory(row)

    def directories(self, model_id: str) -> set[Path]:
        """Return the directories of a run's checkpoints, even of expired ones."""
        sql = "SELECT directory FROM checkpoints WHERE model_id = ?"
        return {self._directory(row) for row in self._connection.read(sql, [model_id])}

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────

    def _directory(self, row: sqlite3.Row) -> Path:
        return self._root / str(row["directory"])

    def _list(self, query: str, **values: Any) -> list[SavedCheckpoint]:
        return [
            self._saved(row) for row in self._connection.read(query, {"now": time.time()} | values)
        ]

    def _saved(self, row: sqlite3.Row) -> SavedCheckpoint:
        return record_of(SavedCheckpoint, row, directory=self._directory(row))


def _conditions(request: CheckpointSearchRequest, owner: str) -> list[tuple[str, list[Any]]]:
    found: list[tuple[str, list[Any]]] = [
        ("c.owner = ?", [owner]),
        ("(c.expires IS NULL OR c.expires > ?)", [time.time()]),
    ]
    for column, wanted in ((PROJECT, request.project_ids), ("c.base_model", request.base_models)):
        if wanted is not None:
            found.append(
                (f"{column} IN (SELECT value FROM json_each(?))", [json.dumps(list(wanted))])
            )
    found += metadata_conditions("c", request.user_metadata)
    if request.checkpoint_type is not None:
        kind = next(kind for kind, type in KINDS.items() if type == request.checkpoint_type)
        found.append(("instr(c.tinker_path, ?) > 0", [f"/{kind}/"]))
    if request.cursor is not None:
        since = round(request.cursor.last_created_at.timestamp() * 1e6)
        last = request.cursor.last_checkpoint_uuid
        found.append((f"({MICROSECOND}, c.tinker_path) < (?, ?)", [since, last]))
    return found
