"""The database's digests: no flipped bit in its file gives a different fact."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tinkex.server.access.keys import create_key
from tinkex.server.database.interface import DatabaseError, Run, Sampler
from tinkex.server.database.migrations import MIGRATIONS
from tinkex.server.database.row_digests import VOLATILE
from tinkex.server.database.sqlite import DATABASE, SqliteDatabase
from tinkex.server.database.sqlite_activity import ADD_USE
from tinkex.server.files.data_dir import DataDirError
from tinkex.types.training import LoraConfig

FLIPS = 300


def fill(store: SqliteDatabase) -> None:
    """Use each kind of statement that changes a row."""
    for number in range(30):
        store.sessions.add(f"session-{number}", {"tags": ["x"], "user_metadata": {"n": number}})
        store.runs.add(
            Run(f"session-{number}:train:0", f"session-{number}", "m", LoraConfig(rank=8), {})
        )
    store.sessions.finish("session-3", "finished", None)
    for _ in range(2):
        store.samplers.add(Sampler("s", "session-1", "m", None))
        store.connection.change((ADD_USE, [(1, "local", "session-1", "m", "sample", 1.5)]))
        assert store.samplers.join("s")
    create_key(store, "first")
    store.connection.rows("DELETE FROM sessions WHERE session_id = 'session-5'")


def facts(store: SqliteDatabase) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows, without what changes often."""
    names = store.connection.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
    found = {}
    for name in sorted(row["name"] for row in names if not row["name"].startswith("sqlite_")):
        hidden = VOLATILE.get(name, set())
        rows = store.connection.rows(f"SELECT * FROM {name}")
        found[name] = sorted(
            (tuple(row[key] for key in dict(row) if key not in hidden) for row in rows), key=repr
        )
    return found


def test_rows_keep_their_digests_through_every_kind_of_change(tmp_path: Path) -> None:
    with closing(SqliteDatabase(tmp_path)) as store:
        fill(store)
        store.verify()
        store.connection.rows("UPDATE runs SET last_request = 5")
        store.verify()
    with closing(SqliteDatabase(tmp_path)) as store:
        store.verify()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE runs SET lora = replace(lora, '8', '9') WHERE model_id = 'session-1:train:0'",
        "DELETE FROM keys",
        "INSERT INTO joins VALUES ('other', 1)",
        "DELETE FROM row_digests WHERE of_table = 'runs'",
    ],
)
def test_change_that_goes_past_the_store_is_refused(tmp_path: Path, change: str) -> None:
    with closing(SqliteDatabase(tmp_path)) as store:
        fill(store)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as db:
        db.execute(change)
    with closing(SqliteDatabase(tmp_path)) as store, pytest.raises(DataDirError, match="damaged"):
        store.verify()


def test_rows_of_an_older_database_get_their_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteDatabase(tmp_path)) as store:
        fill(store)
    more = (*MIGRATIONS, "ALTER TABLE keys ADD COLUMN note TEXT")
    monkeypatch.setattr("tinkex.server.database.sqlite_connection.MIGRATIONS", more)
    with closing(SqliteDatabase(tmp_path)) as store:
        store.verify()
        assert store.keys.all()


def test_flipped_bits_are_refused_or_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    with closing(SqliteDatabase(tmp_path)) as store:
        fill(store)
        before = facts(store)
    whole, rng, refused = path.read_bytes(), random.Random(7), 0
    for _ in range(FLIPS):
        data = bytearray(whole)
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        for left in tmp_path.glob(f"{DATABASE}-*"):
            left.unlink()
        path.write_bytes(data)
        try:
            with closing(SqliteDatabase(tmp_path)) as store:
                store.verify()
                assert facts(store) == before, f"bit {bit}"
        except (DataDirError, DatabaseError):
            refused += 1
    assert refused > FLIPS // 10
