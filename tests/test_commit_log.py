"""The database's write-ahead log is checked before SQLite opens it, which would drop a damaged end
without a word."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.server.database import commit_log
from tinkex.server.database.interface import DatabaseError
from tinkex.server.database.sqlite import DATABASE, SqliteDatabase
from tinkex.server.files.data_dir import DataDirError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDatabase]:
    (tmp_path / "live").mkdir()
    store = SqliteDatabase(tmp_path / "live")
    for number in range(5):
        store.sessions.add(f"s{number}", {})
    yield store
    store.close()


def image(store: SqliteDatabase) -> Path:
    """Copy what kill -9 would leave now."""
    target = store.root.with_name("killed")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(store.root, target, ignore=shutil.ignore_patterns("*-shm"))
    return target / DATABASE


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def sessions(database: Path) -> list[str]:
    opened = SqliteDatabase(database.parent)
    try:
        return sorted(opened.sessions.open_ids())
    finally:
        opened.close()


def test_log_with_a_flipped_bit_is_refused(store: SqliteDatabase) -> None:
    rng, size = random.Random(1), commit_log.log_of(image(store)).stat().st_size
    for at in [3, 20, 30, size - 1, size - 4096 - 10, *(rng.randrange(size) for _ in range(20))]:
        log = commit_log.log_of(image(store))
        change(log, at)
        with pytest.raises(DataDirError, match=f"{log.name} is damaged"):
            SqliteDatabase(log.parent)


def image_of(log: Path) -> Path:
    return log.with_name(DATABASE)


def test_log_that_lost_its_last_commit_is_refused(store: SqliteDatabase) -> None:
    database = image(store)
    log = commit_log.log_of(database)
    os.truncate(log, log.stat().st_size - 1)
    with pytest.raises(DataDirError, match="is damaged"):
        SqliteDatabase(database.parent)


def test_log_that_lost_changes_that_were_not_flushed_is_opened(store: SqliteDatabase) -> None:
    flushed = commit_log.log_of(image(store)).stat().st_size
    store.connection.change(("UPDATE sessions SET display_name = ?", [("x",)]), flush=False)
    assert len(store.sessions.open_ids()) == 5  # a look at the database does not flush it
    with pytest.raises(DatabaseError):  # nor does a change that is taken back
        store.connection.change(("INSERT INTO joins VALUES (?, 1)", [("x",), ("x",)]))
    log = commit_log.log_of(image(store))
    os.truncate(log, flushed)
    assert sessions(image_of(log)) == ["s0", "s1", "s2", "s3", "s4"]


def test_restarted_commit_log_is_checked_to_its_end(store: SqliteDatabase) -> None:
    store.connection.rows("PRAGMA wal_checkpoint(RESTART)")
    store.sessions.add("s5", {})
    assert sessions(image(store))[-1] == "s5"
    log = commit_log.log_of(image(store))
    change(log, 32 + 24 + 5)
    with pytest.raises(DataDirError, match=r"0 of .* frames are valid"):
        SqliteDatabase(log.parent)


def test_record_of_another_log_and_damaged_record_are_ignored(store: SqliteDatabase) -> None:
    store.connection.rows("PRAGMA wal_checkpoint(RESTART)")
    old = commit_log.record_of(store.root / DATABASE).read_bytes()
    store.sessions.add("s5", {})
    for data in (old, b"", b"short", bytes(commit_log.RECORD.size)):
        database = image(store)
        commit_log.record_of(database).write_bytes(data)
        assert len(sessions(database)) == 6


def test_two_connections_record_the_same_log(store: SqliteDatabase) -> None:
    other = SqliteDatabase(store.root)
    other.sessions.add("o1", {})
    store.sessions.add("s5", {})
    other.sessions.add("o2", {})
    other.close()
    database = image(store)
    log = commit_log.log_of(database)
    os.truncate(log, log.stat().st_size - 1)
    with pytest.raises(DataDirError, match="is damaged"):
        SqliteDatabase(database.parent)


@pytest.mark.parametrize(
    ("at", "bit"),
    [(b"SQLite format 3", 4), (b"CREATE TABLE spans", 8), (b"", 8)],
    ids=["magic", "schema", "version"],
)
def test_database_that_cannot_be_opened_is_refused_by_name(
    tmp_path: Path, at: bytes, bit: int
) -> None:
    path = tmp_path / DATABASE
    SqliteDatabase(tmp_path).close()
    data = bytearray(path.read_bytes())
    data[data.index(at) + 3 if at else 63] ^= bit  # the format's number is at byte 60
    path.write_bytes(data)
    with pytest.raises(DataDirError, match=f"{DATABASE} is damaged"):
        SqliteDatabase(tmp_path).verify()
