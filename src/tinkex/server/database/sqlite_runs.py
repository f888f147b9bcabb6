"""Training runs, samplers and checkpoints in SQLite."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.server.database.interface import (
    NO_PROJECT,
    Run,
    RunRecord,
    Sampler,
    Save,
    SavedCheckpoint,
    StoredBytes,
)
from tinkex.server.database.sqlite_connection import (
    Condition,
    Connection,
    Table,
    addition,
    joined,
    record_of,
    row_of,
)
from tinkex.server.database.sqlite_sessions import metadata_conditions
from tinkex.types.checkpoints import KINDS
from tinkex.types.search_requests import CheckpointSearchRequest

JOIN = """
    INSERT INTO joins VALUES (?, 1)
    ON CONFLICT (sampler_id) DO UPDATE SET clients = clients + 1 RETURNING clients
"""
KNOWN_SAMPLERS = 10_000
"""Samplers that are remembered beside the database."""
ALIVE = "(c.expires IS NULL OR c.expires > :now)"
PUBLIC = "SELECT 1 FROM checkpoints c WHERE c.model_id = r.model_id AND c.public"
PROJECT_OF_RUN = """coalesce(
    (SELECT s.project_id FROM sessions s WHERE s.session_id = r.session_id),
    (SELECT c.project_id FROM checkpoints c
     WHERE c.model_id = r.model_id AND c.project_id IS NOT NULL LIMIT 1)
)"""
"""The project of a run is that of its session; a copied or imported run has no session, and is in
the project of its checkpoint."""
OWN = f"c.tinker_path = :path AND c.owner = :owner AND {ALIVE}"
MICROSECOND = "CAST(ROUND(c.created * 1000000) AS INTEGER)"
"""The time when a checkpoint was made, as exactly as a cursor can say."""
PROJECT = f"COALESCE(c.project_id, s.project_id, '{NO_PROJECT}')"
TABLES = """
    checkpoints c LEFT JOIN runs r ON r.model_id = c.model_id
    LEFT JOIN sessions s ON s.session_id = r.session_id
"""


class SqliteCheckpoints:
    """Checkpoints."""

    def __init__(self, connection: Connection, root: Path) -> None:
        self._connection, self._root = connection, root

    def put(self, saved: SavedCheckpoint, request_id: str | None = None) -> None:
        """Record a checkpoint, and that a request for it was met."""
        row = row_of(saved, directory=saved.directory.relative_to(self._root).as_posix())
        met = [] if request_id is None else [(request_id, saved.tinker_path, saved.size_bytes)]
        made = addition("checkpoints", row, replace=True)
        self._connection.change(made, ("INSERT INTO saves VALUES (?, ?, ?)", met))

    def save(self, request_id: str) -> Save | None:
        """Return the answer to a save that was done before, also before a restart."""
        sql = "SELECT tinker_path, size_bytes FROM saves WHERE request_id = ?"
        row = self._connection.one(sql, request_id)
        return None if row is None else Save(*row)

    def get(self, tinker_path: str) -> SavedCheckpoint | None:
        """Return a checkpoint by its path, unless it has expired."""
        sql = f"SELECT * FROM checkpoints c WHERE tinker_path = :path AND {ALIVE}"
        found = self._list(sql, path=tinker_path)
        return found[0] if found else None

    # ── lists ─────────────────────────────────────────────────────────────────────────────────────

    def page(
        self, owner: str, *, model_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[SavedCheckpoint], int]:
        """Return a page of an owner's checkpoints, newest first, and the count.

        With a run, these are the checkpoints of that run that the owner may see.
        """
        visible = "c.owner = :owner"
        if model_id is not None:
            visible = "c.model_id = :id AND (c.owner = :owner OR c.public)"
        values = {"owner": owner, "id": model_id, "now": time.time()}
        values |= {"limit": limit, "offset": offset}
        where = f"{visible} AND {ALIVE}"
        rows, total = self._connection.page("checkpoints c", where, "tinker_path", values)
        return [self._saved(row) for row in rows], total

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
        """Return an owner's sampler checkpoints of these base models, newest first."""
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
        where, values = joined(_conditions(request, owner))
        sql = f"""
            SELECT c.*, {MICROSECOND} AS microsecond FROM {TABLES}
            WHERE {where}
            ORDER BY microsecond DESC, c.tinker_path DESC LIMIT ?
        """
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
        """Remove an owner's checkpoint; return its directory, which can be deleted."""
        query = f"DELETE FROM checkpoints AS c WHERE {OWN} RETURNING directory"
        rows = self._own(query, path, owner)
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
        rows = self._connection.read(query, {"now": time.time()} | values)
        return [self._saved(row) for row in rows]

    def _saved(self, row: sqlite3.Row) -> SavedCheckpoint:
        return record_of(SavedCheckpoint, row, directory=self._directory(row))


def _conditions(request: CheckpointSearchRequest, owner: str) -> list[Condition]:
    found: list[Condition] = [("c.owner = ?", [owner])]
    found.append(("(c.expires IS NULL OR c.expires > ?)", [time.time()]))
    for column, wanted in ((PROJECT, request.project_ids), ("c.base_model", request.base_models)):
        if wanted is not None:
            values = json.dumps(list(wanted))
            found.append((f"{column} IN (SELECT value FROM json_each(?))", [values]))
    found += metadata_conditions("c", request.user_metadata)
    if request.checkpoint_type is not None:
        kind = next(kind for kind, type in KINDS.items() if type == request.checkpoint_type)
        found.append(("instr(c.tinker_path, ?) > 0", [f"/{kind}/"]))
    if request.cursor is not None:
        since = round(request.cursor.last_created_at.timestamp() * 1e6)
        last = request.cursor.last_checkpoint_uuid
        found.append((f"({MICROSECOND}, c.tinker_path) < (?, ?)", [since, last]))
    return found


class SqliteRuns:
    """Training runs."""

    def __init__(self, connection: Connection, checkpoints: SqliteCheckpoints) -> None:
        self._connection, self._checkpoints = connection, checkpoints

    def add(self, run: Run) -> None:
        """Record a new training run."""
        self._connection.insert("runs", row_of(run, created=time.time()))

    def get(self, model_id: str) -> Run | None:
        """Return a training run of this or an earlier life of the server."""
        row = self._connection.one("SELECT * FROM runs WHERE model_id = ?", model_id)
        return None if row is None else record_of(Run, row)

    def touch(self, requests: Mapping[str, float]) -> None:
        """Note the times of the last requests of runs."""
        sql = "UPDATE runs SET last_request = max(last_request, ?) WHERE model_id = ?"
        values = [(when, model_id) for model_id, when in requests.items()]
        self._connection.change((sql, values), flush=False)

    def mark_corrupted(self, model_id: str) -> None:
        """Note that a run cannot continue; its checkpoints stay usable."""
        self._connection.rows("UPDATE runs SET corrupted = 1 WHERE model_id = ?", model_id)

    def page(
        self, owner: str, *, accessible: bool, project_id: str | None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return a page of an owner's or the visible runs, newest first, and the count."""
        where = _visible(accessible)
        if project_id is not None:
            where += f" AND {PROJECT_OF_RUN} = :project"
        values = {"owner": owner, "project": project_id, "now": time.time()}
        values |= {"limit": limit, "offset": offset}
        rows, total = self._connection.page("runs r", where, "model_id", values)
        return self._records(rows, owner), total

    def record(self, model_id: str, owner: str, *, accessible: bool) -> RunRecord | None:
        """Return a run that an owner has, or may see."""
        query = f"SELECT r.* FROM runs r WHERE r.model_id = :id AND {_visible(accessible)}"
        values = {"id": model_id, "owner": owner, "now": time.time()}
        records = self._records(self._connection.read(query, values), owner)
        return records[0] if records else None

    def _records(self, rows: list[sqlite3.Row], owner: str) -> list[RunRecord]:
        ids = [row["model_id"] for row in rows]
        training = self._checkpoints.last(ids, owner, "weights")
        sampler = self._checkpoints.last(ids, owner, "sampler_weights")
        return [
            RunRecord(
                run=record_of(Run, row),
                last_request=max(row["last_request"], row["created"]),
                corrupted=bool(row["corrupted"]),
                last_training=training.get(row["model_id"]),
                last_sampler=sampler.get(row["model_id"]),
            )
            for row in rows
        ]


def _visible(accessible: bool) -> str:
    shared = f" OR EXISTS ({PUBLIC} AND {ALIVE})" if accessible else ""
    return f"(r.owner = :owner{shared})"


class SqliteSamplers(Table):
    """Samplers; those that were asked for stay in memory."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._known: dict[str, Sampler] = {}

    def add(self, sampler: Sampler) -> None:
        """Record a sampler; the same one again changes nothing."""
        self._connection.insert("samplers", row_of(sampler, created=time.time()), replace=True)
        self._known.pop(sampler.sampler_id, None)

    def add_inflight(self, sampler: Sampler, number: int) -> None:
        """Record an in-flight sampler, and the version made by a numbered request."""
        made = addition("samplers", row_of(sampler, created=time.time()), replace=True)
        version = [(sampler.model_id, number, sampler.version)]
        self._connection.change(made, ("INSERT OR IGNORE INTO inflight VALUES (?, ?, ?)", version))
        self._known.pop(sampler.sampler_id, None)

    def inflight_versions(self, model_id: str, number: int) -> tuple[int, int]:
        """Return the version of a request, and the newest of its run; 0 if none."""
        newest = self.newest_version(model_id)
        sql = "SELECT version FROM inflight WHERE model_id = ? AND number = ?"
        row = self._connection.one(sql, model_id, number)
        return (newest + 1 if row is None else int(row["version"])), newest

    def newest_version(self, model_id: str) -> int:
        """Return the newest version of a run's in-flight target; 0 if it has none."""
        sql = "SELECT COALESCE(MAX(version), 0) FROM inflight WHERE model_id = ?"
        return int(self._connection.rows(sql, model_id)[0][0])

    def known(self, sampler_id: str) -> Sampler | None:
        """Return a sampler if it is in memory; this never blocks."""
        return self._known.get(sampler_id)

    def get(self, sampler_id: str) -> Sampler | None:
        """Return a sampler of this or an earlier life of the server."""
        with self._connection.held() as db:  # until it is known: it must not change in between
            sql = "SELECT * FROM samplers WHERE sampler_id = ?"
            row = db.execute(sql, [sampler_id]).fetchone()
            if row is None:
                return None
            if len(self._known) >= KNOWN_SAMPLERS:
                self._known.clear()
            self._known[sampler_id] = sampler = record_of(Sampler, row)
            return sampler

    def join(self, sampler_id: str) -> int:
        """Return the number of a new client of a sampler: 1, 2, …, each only once."""
        return int(self._connection.rows(JOIN, sampler_id)[0]["clients"])
