"""Connections to the database: one writes, behind a lock, the others read."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinkex.server.database import commit_log, row_digests
from tinkex.server.database.interface import DatabaseError
from tinkex.server.database.migrations import MIGRATIONS
from tinkex.server.files.data_dir import DataDirError
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Errors at the start that only a damaged database gives; the last one is a schema that a migration
does not fit."""
IDLE_READERS = 4
"""Connections for lists that are kept open."""
SEARCH_SECONDS = 5.0
"""Seconds that a search may take."""
SEARCH_INSTRUCTIONS = 10_000
"""After so many instructions of SQLite a search looks at the clock."""
DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "lora": LoraConfig.model_validate_json,
    "optimizer": json.loads,
    "user_metadata": json.loads,
    "is_snapshot": bool,
    "public": bool,
}
"""The columns that are not as their fields."""


class Connection:
    """The connections to one database file.

    Statements that change something, and those that find one row, are short and take turns on the
    connection `db`. Lists may be long: they have connections of their own, so that a write never
    waits for a list.

    Raises:
        DataDirError: The file is damaged, or of a newer version.
        DatabaseError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._readers_uri = f"{path.resolve().as_uri()}?mode=ro"
        self._readers: list[sqlite3.Connection] = []
        self._is_closed = False
        self.lock = commit_log.RecordingLock(path)
        """Held while `db` is used."""
        commit_log.check(path)
        with _translated():
            self.db = _connect(path)
        row_digests.register(self.db)
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=FULL")  # what is answered is on disk
            self.lock.watch(self.db)
            with self.lock:
                self._migrate()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # the damage may be in the schema, or in what SQLite says of it
            self.db.close()
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in DAMAGED:  # a full disk, for example
                raise DatabaseError(str(error)) from error
            raise row_digests.damaged(self._name, str(error)) from None

    def _migrate(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")  # two processes may open a new directory at once
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            self.db.execute("ROLLBACK")
            raise DataDirError(
                f"a newer version of tinkex wrote it (format {version}, this one knows "
                f"{len(MIGRATIONS)}); upgrade tinkex"
            )
        for script in MIGRATIONS[version:]:
            for statement in script.split(";"):
                self.db.execute(statement)
        if version < len(MIGRATIONS):
            row_digests.write(self.db)
        self.db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
        self.db.execute("COMMIT")
        row_digests.keep(self.db)

    def verify(self) -> None:
        """Refuse a database that is not as it was written.

        Raises:
            DataDirError: It is damaged.
        """
        with self.lock:
            row_digests.verify(self.db, self._name)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        while self._readers:  # first: the last connection to be closed tidies up the log
            self._readers.pop().close()
        with self.lock:
            self.lock.close()
            self.db.close()

    # ── single facts ──────────────────────────────────────────────────────────────────────────────

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Run one short statement; return its rows."""
        with self.held() as db:
            return db.execute(query, values).fetchall()

    def one(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Run one short statement; return its first row."""
        with self.held() as db:
            row: sqlite3.Row | None = db.execute(query, values).fetchone()
            return row

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> None:
        """Add one row."""
        query, [values] = addition(table, row, replace=replace)
        self.rows(query, *values)

    def change(self, *statements: Statement, flush: bool = True) -> None:
        """Run statements, each once for each of its rows of values; all of them or none.

        With `flush=False` a power loss may take the change back, as one piece.
        """
        with self.held() as db, contextlib.nullcontext() if flush else self._unflushed(db):
            db.execute("BEGIN IMMEDIATE")
            try:
                for query, rows in statements:
                    db.executemany(query, rows)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # on a full disk SQLite has rolled it back by itself
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection that writes."""
        with _translated(), self.lock:
            yield self.db

    @contextlib.contextmanager
    def _unflushed(self, db: sqlite3.Connection) -> Iterator[None]:
        db.execute("PRAGMA synchronous=NORMAL")
        try:
            yield
        finally:
            db.execute("PRAGMA synchronous=FULL")
            self.lock.skip()

    # ── lists ─────────────────────────────────────────────────────────────────────────────────────

    def read(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Run a query that may be long, beside everything else."""
        with self._reader() as db:
            return db.execute(query, values).fetchall()

    def page(
        self, table: str, where: str, name: str, values: Mapping[str, Any]
    ) -> tuple[list[sqlite3.Row], int]:
        """Return a page of a table, newest first and then by name, and the count."""
        order = f"ORDER BY created DESC, {name} LIMIT :limit OFFSET :offset"
        rows = self.read(f"SELECT * FROM {table} WHERE {where} {order}", values)
        return rows, self.read(f"SELECT count(*) FROM {table} WHERE {where}", values)[0][0]

    def search(self, query: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        """Run a query that is given up after a time.

        Raises:
            TimeoutError: It took longer than SEARCH_SECONDS.
        """
        until = time.monotonic() + SEARCH_SECONDS
        with self._reader() as db:
            db.set_progress_handler(lambda: time.monotonic() > until, SEARCH_INSTRUCTIONS)
            try:
                return db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if time.monotonic() <= until:
                    raise
                raise TimeoutError(f"the query took longer than {SEARCH_SECONDS:g} s") from error
            finally:
                db.set_progress_handler(None, 0)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with _translated():
            try:
                db = self._readers.pop()
            except IndexError:
                db = _connect(self._readers_uri, uri=True)
            try:
                yield db
            finally:
                if self._is_closed or len(self._readers) >= IDLE_READERS:
                    db.close()
                else:
                    self._readers.append(db)


def _connect(place: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(place, uri=uri, check_same_thread=False, isolation_level=None, timeout=30)
    db.row_factory = sqlite3.Row
    return db


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DatabaseError(str(error)) from error


class Table:
    """The rows of one kind."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


Statement: TypeAlias = tuple[str, Sequence[Sequence[Any]]]
"""A statement, and the rows of values that it is run with."""
Condition: TypeAlias = tuple[str, Sequence[Any]]
"""An SQL expression, and the values of its marks."""


def addition(table: str, row: Mapping[str, Any], *, replace: bool = False) -> Statement:
    """Return the statement that adds a row."""
    columns, marks = ", ".join(row), ", ".join("?" * len(row))
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table} ({columns}) VALUES ({marks})", [tuple(row.values())]


def joined(conditions: Sequence[Condition], word: str = "AND") -> tuple[str, list[Any]]:
    """Return one condition of several."""
    values = [value for _, values in conditions for value in values]
    return f" {word} ".join(sql for sql, _ in conditions), values


def row_of(record: DataclassInstance, **others: Any) -> dict[str, Any]:
    """Return the columns of a record, with JSON in place of structures, and others."""
    return {field.name: _encoded(getattr(record, field.name)) for field in fields(record)} | others


def _encoded(value: Any) -> Any:
    if isinstance(value, LoraConfig):
        return value.model_dump_json()
    return json.dumps(value) if isinstance(value, dict) else value


def record_of(kind: type[T], row: sqlite3.Row, **others: Any) -> T:
    """Return the record of a row; `others` are fields that are not as their column."""
    names = [field.name for field in fields(kind)]
    found = {name: DECODERS.get(name, _same)(row[name]) for name in names}
    return kind(**found | others)


def _same(value: Any) -> Any:
    return value
