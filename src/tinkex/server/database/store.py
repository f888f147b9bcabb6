"""Facts that outlive the process, in SQLite: sessions, training runs, samplers, checkpoints.
Tensors are files.

One connection behind one lock: every statement is short, and callers that must not block go through
a thread.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.server.database import commit_log, row_digests
from tinkex.server.files.data_dir import DataDirError
from tinkex.types.training import LoraConfig

MIGRATIONS = (
    """
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY, created REAL NOT NULL, finished REAL, reason TEXT, detail TEXT,
        project_id TEXT, display_name TEXT, tags TEXT NOT NULL, user_metadata TEXT NOT NULL, sdk_version TEXT NOT NULL
    );
    CREATE TABLE runs (
        model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, base_model TEXT NOT NULL, lora TEXT NOT NULL,
        optimizer TEXT NOT NULL, user_metadata TEXT NOT NULL, created REAL NOT NULL
    );
    CREATE TABLE samplers (
        sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, base_model TEXT NOT NULL, model_path TEXT,
        is_snapshot INTEGER NOT NULL, created REAL NOT NULL
    );
    CREATE TABLE checkpoints (
        tinker_path TEXT PRIMARY KEY, model_id TEXT NOT NULL, directory TEXT NOT NULL, base_model TEXT NOT NULL,
        lora TEXT NOT NULL, optimizer TEXT NOT NULL, size_bytes INTEGER NOT NULL, created REAL NOT NULL,
        expires REAL, user_metadata TEXT NOT NULL
    );
    CREATE INDEX checkpoints_of_run ON checkpoints (model_id);
    """,
    "CREATE TABLE joins (sampler_id TEXT PRIMARY KEY, clients INTEGER NOT NULL)",
    """
    ALTER TABLE sessions ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE runs ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE runs ADD COLUMN last_request REAL NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN corrupted INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE samplers ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE checkpoints ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE checkpoints ADD COLUMN public INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE checkpoints ADD COLUMN project_id TEXT;
    CREATE INDEX sessions_of_owner ON sessions (owner, created);
    CREATE INDEX runs_of_owner ON runs (owner, created);
    CREATE INDEX checkpoints_of_owner ON checkpoints (owner, created)
    """,
    """
    ALTER TABLE samplers ADD COLUMN model_id TEXT;
    ALTER TABLE checkpoints ADD COLUMN request_id TEXT
    """,
    """
    CREATE TABLE keys (
        id INTEGER PRIMARY KEY AUTOINCREMENT, hash BLOB NOT NULL UNIQUE, owner TEXT NOT NULL, name TEXT NOT NULL,
        created REAL NOT NULL, last_used REAL, revoked REAL
    );
    CREATE TABLE usage (
        bucket INTEGER NOT NULL, owner TEXT NOT NULL, session_id TEXT NOT NULL, base_model TEXT NOT NULL,
        kind TEXT NOT NULL, amount REAL NOT NULL, PRIMARY KEY (bucket, owner, session_id, base_model, kind)
    ) WITHOUT ROWID;
    CREATE TABLE audit (
        at REAL NOT NULL, owner TEXT NOT NULL, category TEXT NOT NULL, event TEXT NOT NULL, model_id TEXT,
        tinker_path TEXT, details TEXT NOT NULL
    );
    CREATE INDEX audit_by_day ON audit (at);
    CREATE TABLE spans (
        session_id TEXT NOT NULL, request_id TEXT NOT NULL, operation TEXT NOT NULL, began REAL NOT NULL,
        ended REAL NOT NULL, error TEXT
    );
    CREATE INDEX spans_of_session ON spans (session_id, began);
    CREATE INDEX runs_of_session ON runs (session_id);
    CREATE INDEX samplers_of_session ON samplers (session_id);
    ALTER TABLE sessions ADD COLUMN heard REAL NOT NULL DEFAULT 0
    """,
    """
    CREATE TABLE saves (request_id TEXT PRIMARY KEY, tinker_path TEXT NOT NULL, size_bytes INTEGER NOT NULL);
    INSERT INTO saves SELECT request_id, tinker_path, size_bytes FROM checkpoints WHERE request_id IS NOT NULL;
    ALTER TABLE checkpoints DROP COLUMN request_id
    """,
    """
    ALTER TABLE runs ADD COLUMN base_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE checkpoints ADD COLUMN base_digest TEXT NOT NULL DEFAULT ''
    """,
    """
    ALTER TABLE samplers ADD COLUMN version INTEGER;
    CREATE TABLE inflight (
        model_id TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (model_id, number)
    ) WITHOUT ROWID
    """,
)

DATABASE = "tinkex.sqlite3"
"""The file of a data directory that holds its facts."""
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Errors at the start that only a damaged database gives; the last one is a schema that a migration
does not fit."""
KNOWN_SAMPLERS = 10_000
"""Samplers that are remembered beside the database."""
SEARCH_SECONDS = 5.0
"""How long a search may take."""
SEARCH_INSTRUCTIONS = 10_000
"""After so many instructions of SQLite a search looks at the clock."""
LOCAL_OWNER = "local"
"""Who owns what is made on an open server, or with the key that a server was started with."""


def user_urn(owner: str) -> str:
    """An owner as clients see it."""
    return f"tml:user:{owner}"


@dataclass(frozen=True, slots=True)
class Run:
    """A training run."""

    model_id: str
    session_id: str
    base_model: str
    lora: LoraConfig
    optimizer: dict[str, Any]
    user_metadata: dict[str, Any] = field(default_factory=dict)
    owner: str = LOCAL_OWNER
    base_digest: str = ""
    """The digest of the base model's weights; empty when not known."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Something to sample from: a base model, a checkpoint, or a nameless snapshot."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    is_snapshot: bool = False
    owner: str = LOCAL_OWNER
    model_id: str | None = None
    """The run that a nameless snapshot was taken of."""
    version: int | None = None
    """Of an in-flight sampler: the version it was made with, the oldest it may have."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    tinker_path: str
    model_id: str
    directory: Path
    created: float
    base_model: str
    lora: LoraConfig
    optimizer: dict[str, Any]
    size_bytes: int
    expires: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    owner: str = LOCAL_OWNER
    public: bool = False
    project_id: str | None = None
    base_digest: str = ""

    def is_shown_to(self, owner: str) -> bool:
        """Whether someone may read it: its owner, and everyone once it is published."""
        return self.public or self.owner == owner


@dataclass(frozen=True, slots=True)
class Save:
    """What a request for saving was answered; its checkpoint may have been replaced or deleted
    since.
    """

    tinker_path: str
    size_bytes: int


class Store:
    """The database of one data directory."""

    def __init__(self, path: Path) -> None:
        # checkpoints are recorded relative to it, so that the directory can be moved
        self.root = path.parent
        self._lock = commit_log.RecordingLock(path)
        self._samplers: dict[str, Sampler] = {}
        self._uri = f"{path.resolve().as_uri()}?mode=ro"
        self.searchers = ThreadPoolExecutor(2, "tinkex-search")
        """Threads for searches: those of several owners take turns on them, and nothing else waits
        for them."""
        commit_log.check(path)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
        self._db.row_factory = sqlite3.Row
        row_digests.register(self._db)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # what is answered is on disk
            self._lock.watch(self._db)
            self._migrate()
        except (
            sqlite3.DatabaseError,
            UnicodeDecodeError,
        ) as error:  # in the schema, or in what SQLite says of it
            self._db.close()
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in DAMAGED:  # a full disk, say
                raise
            raise DataDirError(
                f"{DATABASE} is damaged ({error}); restore the directory from a backup"
            ) from None

    def _migrate(self) -> None:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")  # two processes may open a new directory at once
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                self._db.execute("ROLLBACK")
                raise DataDirError(
                    f"a newer version of tinkex wrote it (format {version}, this one knows "
                    f"{len(MIGRATIONS)}); upgrade tinkex"
                )
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    self._db.execute(statement)
            if version < len(MIGRATIONS):
                row_digests.write(self._db)
            self._db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
            self._db.execute("COMMIT")
            row_digests.keep(self._db)

    def verify(self) -> None:
        """Refuse a database that is not as it was written.

        Raises:
            DataDirError: It is damaged.
        """
        with self._lock:
            row_digests.verify(self._db, DATABASE)

    def search(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Run a query that may take long, on a connection of its own, so that nobody waits for it.

        Raises:
            TimeoutError: It took longer than SEARCH_SECONDS.
        """
        until = time.monotonic() + SEARCH_SECONDS
        with closing(sqlite3.connect(self._uri, uri=True, isolation_level=None, timeout=30)) as db:
            db.row_factory = sqlite3.Row
            db.set_progress_handler(lambda: time.monotonic() > until, SEARCH_INSTRUCTIONS)
            try:
                return db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"the query took longer than {SEARCH_SECONDS:g} s"
                    ) from error
                raise

    def close(self) -> None:
        """Close the database."""
        self.searchers.shutdown()
        with self._lock:
            self._lock.close()
            self._db.close()

    def _insert(self, table: str, row: dict[str, Any], *, replace: bool = False) -> None:
        with self._lock:
            self._db.execute(_insertion(table, row, replace=replace), tuple(row.values()))

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        with self._lock:
            row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
            return row

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Run one statement; what it gives."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def unflushed(self) -> Iterator[None]:
        """Skip the flush of changes that a power loss may take back, such as counters."""
        with self._lock:
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                yield
            finally:
                self._db.execute("PRAGMA synchronous=FULL")
                self._lock.skip()

    def change(self, *statements: tuple[str, Sequence[Sequence[Any]]], flush: bool = True) -> None:
        """Run statements, each once for each of its rows of values; all of them or none.

        With `flush=False` a power loss may take the change back, as one piece.
        """
        with self._lock if flush else self.unflushed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for query, rows in statements:
                    self._db.executemany(query, rows)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # on a full disk SQLite has rolled it back by itself
                    self._db.execute("ROLLBACK")
                raise

    # ── sessions ──────────────────────────────────────────────────────────────────────────────────

    def add_session(
        self, session_id: str, request: dict[str, Any], owner: str = LOCAL_OWNER
    ) -> None:
        """Record a new session."""
        self._insert(
            "sessions",
            {
                "session_id": session_id,
                "owner": owner,
                "created": time.time(),
                "heard": time.time(),
                "project_id": request.get("project_id"),
                "display_name": request.get("display_name"),
                "tags": json.dumps(request.get("tags") or []),
                "user_metadata": json.dumps(request.get("user_metadata") or {}),
                "sdk_version": request.get("sdk_version") or "",
            },
        )

    def session_state(self, session_id: str) -> str | None:
        """Give "active", "finished", "expired", or None when there is no such session."""
        row = self._one("SELECT finished, reason FROM sessions WHERE session_id = ?", session_id)
        if row is None or row["finished"] is None:
            return None if row is None else "active"
        return "expired" if row["reason"] == "expired" else "finished"

    def open_sessions(self) -> list[str]:
        """The sessions that have not ended."""
        with self._lock:
            rows = self._db.execute(
                "SELECT session_id FROM sessions WHERE finished IS NULL"
            ).fetchall()
        return [row["session_id"] for row in rows]

    def finish_session(self, session_id: str, reason: str, detail: str | None) -> None:
        """Record how a session ended; the first reason stays. What it saved need not be told from
        new requests now.
        """
        self.change(
            (
                "UPDATE sessions SET finished = ?, reason = ?, detail = ? WHERE session_id = ? AND "
                "finished IS NULL",
                [(time.time(), reason, detail, session_id)],
            ),
            (
                "DELETE FROM saves WHERE request_id > ? || ':' AND request_id < ? || ';'",
                [(session_id, session_id)],
            ),
            (
                "DELETE FROM inflight WHERE model_id > ? || ':' AND model_id < ? || ';'",
                [(session_id, session_id)],
            ),
        )

    # ── runs and samplers ─────────────────────────────────────────────────────────────────────────

    def add_run(self, run: Run) -> None:
        """Record a new training run."""
        self._insert(
            "runs",
            {
                "model_id": run.model_id,
                "session_id": run.session_id,
                "base_model": run.base_model,
                "base_digest": run.base_digest,
                "lora": run.lora.model_dump_json(),
                "optimizer": json.dumps(run.optimizer),
                "user_metadata": json.dumps(run.user_metadata),
                "created": time.time(),
                "owner": run.owner,
            },
        )

    def run(self, model_id: str) -> Run | None:
        """A training run of this or an earlier life of the server."""
        row = self._one("SELECT * FROM runs WHERE model_id = ?", model_id)
        if row is None:
            return None
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

    def add_sampler(self, sampler: Sampler) -> None:
        """Record a new sampler; the same one again is no news."""
        self._insert("samplers", _sampler_row(sampler), replace=True)
        self._samplers.pop(sampler.sampler_id, None)

    def add_inflight(self, sampler: Sampler, number: int) -> None:
        """Record an in-flight sampler, and the version that the request of this number made."""
        row = _sampler_row(sampler)
        self.change(
            (_insertion("samplers", row, replace=True), [tuple(row.values())]),
            (
                "INSERT OR IGNORE INTO inflight VALUES (?, ?, ?)",
                [(sampler.model_id, number, sampler.version)],
            ),
        )
        self._samplers.pop(sampler.sampler_id, None)

    def inflight_versions(self, model_id: str, number: int) -> tuple[int, int]:
        """The version that the request of this number made or is to make, and the newest of its
        run; 0 if none.
        """
        newest = self.newest_version(model_id)
        row = self._one(
            "SELECT version FROM inflight WHERE model_id = ? AND number = ?", model_id, number
        )
        return (newest + 1 if row is None else int(row["version"])), newest

    def newest_version(self, model_id: str) -> int:
        """The newest version of a run's in-flight target; 0 if it has none."""
        row = self._one("SELECT MAX(version) AS newest FROM inflight WHERE model_id = ?", model_id)
        return 0 if row is None or row["newest"] is None else int(row["newest"])

    def known_sampler(self, sampler_id: str) -> Sampler | None:
        """A sampler that was asked for before, without a look at the database: for the event loop."""
        return self._samplers.get(sampler_id)

    def sampler(self, sampler_id: str) -> Sampler | None:
        """A sampler of this or an earlier life of the server."""
        with self._lock:
            row = self._db.execute(
                "SELECT * FROM samplers WHERE sampler_id = ?", (sampler_id,)
            ).fetchone()
            if row is None:
                return None
            if len(self._samplers) >= KNOWN_SAMPLERS:
                self._samplers.clear()
            self._samplers[sampler_id] = sampler = Sampler(
                row["sampler_id"],
                row["session_id"],
                row["base_model"],
                row["model_path"],
                bool(row["is_snapshot"]),
                row["owner"],
                row["model_id"],
                row["version"],
            )
            return sampler

    def join_sampler(self, sampler_id: str) -> int:
        """The number of one more client of a sampler: 1, 2, …, and none twice, in any life of the
        server.
        """
        row = self._one(
            "INSERT INTO joins VALUES (?, 1) ON CONFLICT (sampler_id) DO UPDATE SET clients = "
            "clients + 1 "
            "RETURNING clients",
            sampler_id,
        )
        assert row is not None
        return int(row["clients"])

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def put_checkpoint(self, saved: SavedCheckpoint, request_id: str | None = None) -> None:
        """Record a checkpoint whose files are already in place, and with it that a request for it
        has been met.
        """
        row = {
            "tinker_path": saved.tinker_path,
            "model_id": saved.model_id,
            "directory": saved.directory.relative_to(self.root).as_posix(),
            "base_model": saved.base_model,
            "base_digest": saved.base_digest,
            "lora": saved.lora.model_dump_json(),
            "optimizer": json.dumps(saved.optimizer),
            "size_bytes": saved.size_bytes,
            "created": saved.created,
            "expires": saved.expires,
            "user_metadata": json.dumps(saved.user_metadata),
            "owner": saved.owner,
            "public": saved.public,
            "project_id": saved.project_id,
        }
        met = [] if request_id is None else [(request_id, saved.tinker_path, saved.size_bytes)]
        self.change(
            (_insertion("checkpoints", row, replace=True), [tuple(row.values())]),
            ("INSERT INTO saves VALUES (?, ?, ?)", met),
        )

    def save(self, request_id: str) -> Save | None:
        """What a request for saving was answered, if it has been met: it must not be met twice, in
        any life.
        """
        row = self._one(
            "SELECT tinker_path, size_bytes FROM saves WHERE request_id = ?", request_id
        )
        return None if row is None else Save(row["tinker_path"], row["size_bytes"])

    def checkpoint(self, tinker_path: str) -> SavedCheckpoint | None:
        """A checkpoint by its path, unless it has expired."""
        row = self._one(
            "SELECT * FROM checkpoints WHERE tinker_path = ? AND (expires IS NULL OR expires > ?)",
            tinker_path,
            time.time(),
        )
        return None if row is None else self.saved(row)

    def saved(self, row: sqlite3.Row) -> SavedCheckpoint:
        """A checkpoint from its row."""
        return SavedCheckpoint(
            tinker_path=row["tinker_path"],
            model_id=row["model_id"],
            directory=self.root / row["directory"],
            created=row["created"],
            base_model=row["base_model"],
            lora=LoraConfig.model_validate_json(row["lora"]),
            optimizer=json.loads(row["optimizer"]),
            size_bytes=row["size_bytes"],
            expires=row["expires"],
            user_metadata=json.loads(row["user_metadata"]),
            owner=row["owner"],
            public=bool(row["public"]),
            project_id=row["project_id"],
            base_digest=row["base_digest"],
        )


def _sampler_row(sampler: Sampler) -> dict[str, Any]:
    return {
        "sampler_id": sampler.sampler_id,
        "session_id": sampler.session_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
        "is_snapshot": sampler.is_snapshot,
        "created": time.time(),
        "owner": sampler.owner,
        "model_id": sampler.model_id,
        "version": sampler.version,
    }


def _insertion(table: str, row: dict[str, Any], *, replace: bool) -> str:
    columns, marks = ", ".join(row), ", ".join("?" * len(row))
    return f"INSERT {'OR REPLACE ' if replace else ''}INTO {table} ({columns}) VALUES ({marks})"
