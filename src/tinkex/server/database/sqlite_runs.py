"""Training runs and samplers in SQLite."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping

from tinkex.server.database.entities import Run, RunRecord, Sampler
from tinkex.server.database.sqlite_checkpoints import ALIVE, SqliteCheckpoints
from tinkex.server.database.sqlite_connection import Connection, insertion
from tinkex.server.database.sqlite_rows import record_of, row_of

KNOWN_SAMPLERS = 10_000
"""Samplers that are remembered beside the database."""
SHARED = (
    f"EXISTS (SELECT 1 FROM checkpoints c WHERE c.model_id = r.model_id AND c.public AND {ALIVE})"
)
PROJECT = """coalesce(
    (SELECT s.project_id FROM sessions s WHERE s.session_id = r.session_id),
    (SELECT c.project_id FROM checkpoints c
     WHERE c.model_id = r.model_id AND c.project_id IS NOT NULL LIMIT 1)
)"""
"""The project of a run is that of its session; a copied or imported run has no session, and is in
the project of its checkpoint."""


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
        self._connection.change(
            (
                "UPDATE runs SET last_request = max(last_request, ?) WHERE model_id = ?",
                [(when, model_id) for model_id, when in requests.items()],
            ),
            flush=False,
        )

    def mark_corrupted(self, model_id: str) -> None:
        """Note that a run cannot continue; its checkpoints stay usable."""
        self._connection.rows("UPDATE runs SET corrupted = 1 WHERE model_id = ?", model_id)

    def page(
        self, owner: str, *, accessible: bool, project_id: str | None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return a page of the runs that an owner has, or may see, newest first; and the count."""
        where = f"FROM runs r WHERE {_visible(accessible)}"
        if project_id is not None:
            where += f" AND {PROJECT} = :project"
        values = {"owner": owner, "project": project_id, "now": time.time()}
        page = f"SELECT r.* {where} ORDER BY r.created DESC, r.model_id LIMIT :limit OFFSET :offset"
        rows = self._connection.read(page, values | {"limit": limit, "offset": offset})
        total = self._connection.read(f"SELECT count(*) {where}", values)[0][0]
        return self._records(rows, owner), total

    def record(self, model_id: str, owner: str, *, accessible: bool) -> RunRecord | None:
        """Return a run that an owner has, or may see."""
        query = f"SELECT r.* FROM runs r WHERE r.model_id = :id AND {_visible(accessible)}"
        values = {"id": model_id, "owner": owner, "now": time.time()}
        records = self._records(self._connection.read(query, values), owner)
        return records[0] if records else None

    def _records(self, rows: list[sqlite3.Row], owner: str) -> list[RunRecord]:
        ids = [row["model_id"] for row in rows]
        training, sampler = (
            self._checkpoints.last(ids, owner, kind) for kind in ("weights", "sampler_weights")
        )
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
    return f"(r.owner = :owner OR {SHARED})" if accessible else "r.owner = :owner"


class SqliteSamplers:
    """Samplers; those that were asked for stay in memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, Sampler] = {}

    def add(self, sampler: Sampler) -> None:
        """Record a sampler; the same one again changes nothing."""
        self._connection.insert("samplers", row_of(sampler, created=time.time()), replace=True)
        self._known.pop(sampler.sampler_id, None)

    def add_inflight(self, sampler: Sampler, number: int) -> None:
        """Record an in-flight sampler, and the version that the request of this number made."""
        row = row_of(sampler, created=time.time())
        self._connection.change(
            (insertion("samplers", row, replace=True), [tuple(row.values())]),
            (
                "INSERT OR IGNORE INTO inflight VALUES (?, ?, ?)",
                [(sampler.model_id, number, sampler.version)],
            ),
        )
        self._known.pop(sampler.sampler_id, None)

    def inflight_versions(self, model_id: str, number: int) -> tuple[int, int]:
        """Return the version that belongs to a request, and the newest of its run; 0 if none."""
        newest = self.newest_version(model_id)
        row = self._connection.one(
            "SELECT version FROM inflight WHERE model_id = ? AND number = ?", model_id, number
        )
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
            row = db.execute(
                "SELECT * FROM samplers WHERE sampler_id = ?", (sampler_id,)
            ).fetchone()
            if row is None:
                return None
            if len(self._known) >= KNOWN_SAMPLERS:
                self._known.clear()
            self._known[sampler_id] = sampler = record_of(Sampler, row)
            return sampler

    def join(self, sampler_id: str) -> int:
        """Return the number of one more client of a sampler: 1, 2, …; no number occurs twice."""
        sql = (
            "INSERT INTO joins VALUES (?, 1) ON CONFLICT (sampler_id) DO UPDATE SET clients = "
            "clients + 1 RETURNING clients"
        )
        return int(self._connection.rows(sql, sampler_id)[0]["clients"])
