"""Digests of the database's rows, which show a flipped bit when a server starts.

SQLite checks the structure of its pages, not their contents. A table has a digest of each row.
Triggers of the connection keep it, so that no statement has to mention it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass

from tinkex.server.files.data_dir import DataDirError

TABLE = "row_digests"
VOLATILE = {"sessions": {"heard"}, "runs": {"last_request"}, "keys": {"last_used"}}
"""Columns that change often and matter little."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, the columns that its digests cover, and those that name a row."""

    name: str
    columns: list[str]
    keys: list[str]

    def key(self, row: str) -> str:
        """Return the expression for the name of a row."""
        return f"json_array({', '.join(f'{row}.{key}' for key in self.keys)})"

    def digest(self, row: str) -> str:
        """Return the expression for the digest of a row."""
        return f"row_digest({', '.join(f'{row}.{column}' for column in self.columns)})"


def _tables(db: sqlite3.Connection) -> list[_Table]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    found = []
    for (name,) in db.execute(query).fetchall():
        if name == TABLE:
            continue
        about = db.execute(f"PRAGMA table_info({name})").fetchall()
        columns = [row[1] for row in about if row[1] not in VOLATILE.get(name, ())]
        found.append(_Table(name, columns, [row[1] for row in about if row[5]] or ["rowid"]))
    return found


def write(db: sqlite3.Connection) -> None:
    """Write the digest of each row, after the tables have changed."""
    db.execute(
        f"CREATE TABLE IF NOT EXISTS {TABLE} (of_table TEXT NOT NULL, of_row TEXT NOT NULL, "
        "digest BLOB NOT NULL, PRIMARY KEY (of_table, of_row)) WITHOUT ROWID"
    )
    db.execute(f"DELETE FROM {TABLE}")
    for table in _tables(db):
        values = f"'{table.name}', {table.key('t')}, {table.digest('t')}"
        db.execute(f"INSERT INTO {TABLE} SELECT {values} FROM {table.name} t")


def keep(db: sqlite3.Connection) -> None:
    """Update the digest of each row that changes through this connection."""
    for table in _tables(db):
        values = f"'{table.name}', {table.key('NEW')}, {table.digest('NEW')}"
        forget = f"DELETE FROM {TABLE} WHERE of_table = '{table.name}' AND of_row = "
        drop, replace = forget + table.key("OLD"), forget + table.key("NEW")
        put = f"{replace}; INSERT INTO {TABLE} VALUES ({values})"
        for name, event, work in (
            ("added", "INSERT", put),
            ("changed", f"UPDATE OF {', '.join(table.columns)}", put),
            ("deleted", "DELETE", drop),
        ):
            trigger = f"{table.name}_{name} AFTER {event} ON main.{table.name}"
            db.execute(f"CREATE TEMP TRIGGER {trigger} BEGIN {work}; END")


def register(db: sqlite3.Connection) -> None:
    """Define the SQL function that computes a digest."""
    db.create_function("row_digest", -1, row_digest, deterministic=True)


def row_digest(*values: object) -> bytes:
    """Return the digest of a row's values; their types count."""
    return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()


def verify(db: sqlite3.Connection, name: str) -> None:
    """Refuse a damaged database.

    Raises:
        DataDirError: A page or a row is not as it was written.
    """
    try:
        found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise damaged(name, found)
        for table in _tables(db):
            own = f"d.of_table = '{table.name}'"
            same = f"{own} AND d.of_row = {table.key('t')} AND d.digest = {table.digest('t')}"
            sound, known = f"{table.name} t JOIN {TABLE} d ON {same}", f"{TABLE} d WHERE {own}"
            places = (sound, table.name, known)
            counts = [db.execute(f"SELECT count(*) FROM {of}").fetchone()[0] for of in places]
            if len(set(counts)) > 1:
                raise damaged(name, f"rows of {table.name} do not have their digests")
        others = ", ".join(f"'{table.name}'" for table in _tables(db))
        if db.execute(f"SELECT 1 FROM {TABLE} WHERE of_table NOT IN ({others})").fetchone():
            raise damaged(name, "there are digests of unknown rows")
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise damaged(name, str(error)) from None


def damaged(name: str, why: str) -> DataDirError:
    """Return the error for a damaged file of the database."""
    return DataDirError(f"{name} is damaged ({why}); restore the directory from a backup")
