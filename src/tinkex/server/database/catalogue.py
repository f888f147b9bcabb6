"""What is on record of runs and checkpoints, as their readers ask for it: by owner, by page, by
what has expired.

The store writes single facts; this reads many. It shares the store's connection and lock.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.server.database.store import Run, SavedCheckpoint, Store
from tinkex.types.training import LoraConfig

ALIVE = "(c.expires IS NULL OR c.expires > :now)"
SHARED = (
    f"EXISTS (SELECT 1 FROM checkpoints c WHERE c.model_id = r.model_id AND c.public AND {ALIVE})"
)
PROJECT = """coalesce(
    (SELECT s.project_id FROM sessions s WHERE s.session_id = r.session_id),
    (SELECT c.project_id FROM checkpoints c WHERE c.model_id = r.model_id AND c.project_id IS NOT NULL LIMIT 1)
)"""
"""A run is where its session is; one that was copied or imported has none, and is where its
checkpoint was put."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, and what was last heard and saved of it; of a stranger's run only what was published."""

    run: Run
    last_request: float
    corrupted: bool
    last_training: SavedCheckpoint | None
    last_sampler: SavedCheckpoint | None


class Catalogue:
    """Lists of what a data directory holds, and the changes that its owners make there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _rows(self, query: str, **values: Any) -> list[sqlite3.Row]:
        with self._store._lock:
            return self._store._db.execute(query, {"now": time.time(), **values}).fetchall()

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────

    def runs(
        self, owner: str, *, accessible: bool, project_id: str | None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """A page of the runs that someone owns, or may see, the newest first; and how many there
        are.
        """
        where = f"FROM runs r WHERE {self._visible(accessible)}"
        if project_id is not None:
            where += f" AND {PROJECT} = :project"
        values = {"owner": owner, "project": project_id}
        total = self._rows(f"SELECT count(*) {where}", **values)[0][0]
        page = f"SELECT r.* {where} ORDER BY r.created DESC, r.model_id LIMIT :limit OFFSET :offset"
        return self._records(self._rows(page, **values, limit=limit, offset=offset), owner), total

    def run(self, model_id: str, owner: str, *, accessible: bool) -> RunRecord | None:
        """A run that someone owns, or may see."""
        query = f"SELECT r.* FROM runs r WHERE r.model_id = :id AND {self._visible(accessible)}"
        records = self._records(self._rows(query, id=model_id, owner=owner), owner)
        return records[0] if records else None

    @staticmethod
    def _visible(accessible: bool) -> str:
        return f"(r.owner = :owner OR {SHARED})" if accessible else "r.owner = :owner"

    def _records(self, rows: list[sqlite3.Row], owner: str) -> list[RunRecord]:
        training, sampler = (
            self._last(rows, owner, kind) for kind in ("weights", "sampler_weights")
        )
        return [
            RunRecord(
                run=_run(row),
                last_request=max(row["last_request"], row["created"]),
                corrupted=bool(row["corrupted"]),
                last_training=training.get(row["model_id"]),
                last_sampler=sampler.get(row["model_id"]),
            )
            for row in rows
        ]

    def _last(self, runs: list[sqlite3.Row], owner: str, kind: str) -> dict[str, SavedCheckpoint]:
        """The latest checkpoint of a kind of each run: SQLite gives the row that holds the maximum."""
        query = f"""
            SELECT c.*, max(c.created) FROM checkpoints c
            WHERE c.model_id IN (SELECT value FROM json_each(:ids)) AND instr(c.tinker_path, :kind)
              AND (c.owner = :owner OR c.public) AND {ALIVE}
            GROUP BY c.model_id"""
        ids = json.dumps([row["model_id"] for row in runs])
        rows = self._rows(query, ids=ids, kind=f"/{kind}/", owner=owner)
        return {row["model_id"]: self._store.saved(row) for row in rows}

    def touch(self, requests: Mapping[str, float]) -> None:
        """Note when something was last asked of runs."""
        with self._store.unflushed():
            self._store._db.executemany(
                "UPDATE runs SET last_request = max(last_request, ?) WHERE model_id = ?",
                [(when, model_id) for model_id, when in requests.items()],
            )

    def mark_corrupted(self, model_id: str) -> None:
        """Note that a run cannot be gone on with; its checkpoints can."""
        with self._store._lock:
            self._store._db.execute("UPDATE runs SET corrupted = 1 WHERE model_id = ?", (model_id,))

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def checkpoints(
        self, owner: str, *, model_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[SavedCheckpoint], int]:
        """A page of someone's checkpoints, or of those of a run that they may see; the newest
        first, and the count.
        """
        visible = (
            "c.owner = :owner"
            if model_id is None
            else "c.model_id = :id AND (c.owner = :owner OR c.public)"
        )
        where = f"FROM checkpoints c WHERE {visible} AND {ALIVE}"
        values = {"owner": owner, "id": model_id}
        total = self._rows(f"SELECT count(*) {where}", **values)[0][0]
        page = (
            f"SELECT c.* {where} ORDER BY c.created DESC, c.tinker_path LIMIT :limit OFFSET :offset"
        )
        rows = self._rows(page, **values, limit=limit, offset=offset)
        return [self._store.saved(row) for row in rows], total

    def samplers(self, owner: str, base_models: Sequence[str], limit: int) -> list[SavedCheckpoint]:
        """Someone's checkpoints to sample from, on these base models; the newest first."""
        query = f"""
            SELECT c.* FROM checkpoints c
            WHERE c.owner = :owner AND instr(c.tinker_path, '/sampler_weights/') AND {ALIVE}
              AND c.base_model IN (SELECT value FROM json_each(:bases))
            ORDER BY c.created DESC, c.tinker_path LIMIT :limit"""
        rows = self._rows(
            query, owner=owner, bases=json.dumps(list(base_models)), limit=max(0, limit)
        )
        return [self._store.saved(row) for row in rows]

    def set_public(self, path: str, owner: str, public: bool) -> bool:
        """Publish a checkpoint of someone's, or no longer; False when they have none of that path."""
        return self._change("public", path, owner, public)

    def set_expiry(self, path: str, owner: str, expires: float | None) -> bool:
        """Let a checkpoint expire at a time, or never; False when its owner has none of that path."""
        return self._change("expires", path, owner, expires)

    def _change(self, column: str, path: str, owner: str, value: float | None) -> bool:
        query = f"UPDATE checkpoints AS c SET {column} = :value WHERE {_OWN} RETURNING 1"
        return bool(self._rows(query, path=path, owner=owner, value=value))

    def remove(self, path: str, owner: str) -> Path | None:
        """Strike a checkpoint off; gives the directory, which is now nobody's."""
        rows = self._rows(
            f"DELETE FROM checkpoints AS c WHERE {_OWN} RETURNING directory", path=path, owner=owner
        )
        return self._directory(rows[0]) if rows else None

    def sweep(self) -> None:
        """Delete the checkpoints whose time is over, first from the record and then from the disk."""
        for row in self._rows("DELETE FROM checkpoints WHERE expires <= :now RETURNING directory"):
            discard(self._directory(row))

    def directory(self, path: str) -> Path | None:
        """Where the files of a checkpoint lie, even of an expired one."""
        rows = self._rows("SELECT directory FROM checkpoints WHERE tinker_path = :path", path=path)
        return self._directory(rows[0]) if rows else None

    def directories(self, model_id: str) -> set[Path]:
        """Where the files of a run's checkpoints lie, even of expired ones."""
        rows = self._rows("SELECT directory FROM checkpoints WHERE model_id = :id", id=model_id)
        return {self._directory(row) for row in rows}

    def _directory(self, row: sqlite3.Row) -> Path:
        return self._store.root / str(row["directory"])


def discard(directory: Path) -> None:
    """Delete files that are no longer on record, all at once for whoever is about to open them."""
    doomed = directory.with_name(f".deleting-{secrets.token_hex(4)}")
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


_OWN = f"c.tinker_path = :path AND c.owner = :owner AND {ALIVE}"


def _run(row: sqlite3.Row) -> Run:
    return Run(
        model_id=row["model_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        lora=LoraConfig.model_validate_json(row["lora"]),
        optimizer=json.loads(row["optimizer"]),
        user_metadata=json.loads(row["user_metadata"]),
        owner=row["owner"],
        base_digest=row["base_digest"],
    )
