"""A server whose disk is full: the cause is told, the log stays short, and it goes on when there is
room."""

from __future__ import annotations

import logging
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from support import Clock, Wire, serving
from tinkex.engine.fake import FakeEngine
from tinkex.server import http_errors
from tinkex.server.database.interface import DatabaseError
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.database.sqlite_sessions import SqliteSessions
from tinkex.server.http_errors import complain


@contextmanager
def full(store: SqliteDatabase) -> Iterator[None]:
    """Make the disk full for SQLite: its file may not grow."""
    pages = store.connection.db.execute("PRAGMA page_count").fetchone()[0]
    most = store.connection.db.execute("PRAGMA max_page_count").fetchone()[0]
    store.connection.db.execute(f"PRAGMA max_page_count={pages}")
    try:
        yield
    finally:
        store.connection.db.execute(f"PRAGMA max_page_count={most}")


SQL = (
    "INSERT INTO sessions (session_id, created, tags, user_metadata, sdk_version) VALUES (?, 0, "
    "'', ?, '')"
)


@pytest.mark.parametrize("flush", [True, False])
def test_full_disk_is_reported_as_the_cause(tmp_path: Path, flush: bool) -> None:
    with closing(SqliteDatabase(tmp_path)) as store:
        with full(store), pytest.raises(DatabaseError, match="database or disk is full"):
            store.connection.change(
                (SQL, [(str(number), "x" * 100_000) for number in range(50)]), flush=flush
            )
        assert store.connection.rows("SELECT count(*) AS n FROM sessions")[0]["n"] == 0
        store.connection.change((SQL, [("a", "x")]), flush=flush)
        assert store.connection.rows("SELECT count(*) AS n FROM sessions")[0]["n"] == 1


@pytest.mark.parametrize("flush", [True, False])
def test_automatic_rollback_keeps_the_cause(tmp_path: Path, flush: bool) -> None:
    with closing(SqliteDatabase(tmp_path)) as store:
        told = "SELECT RAISE(ROLLBACK, 'database or disk is full')"
        store.connection.rows(
            f"CREATE TEMP TRIGGER full BEFORE INSERT ON sessions BEGIN {told}; END"
        )
        with pytest.raises(DatabaseError, match="database or disk is full"):
            store.connection.change((SQL, [("a", "x")]), flush=flush)
        store.connection.rows("DROP TRIGGER full")
        store.connection.change((SQL, [("a", "x")]), flush=flush)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http_errors, "time", clock)
    monkeypatch.setattr(http_errors, "_told", {})
    return clock


FULL = sqlite3.OperationalError("database or disk is full")


def test_same_fault_is_logged_once_in_ten_minutes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            complain("it failed", FULL, about=str(number))
        complain("it failed", ValueError("another"))
        complain("something else failed", FULL)
        assert len(caplog.records) == 3
        assert caplog.records[0].exc_info is None
        assert "it failed (0): the server's disk is full" in caplog.records[0].getMessage()
        assert caplog.records[1].exc_info is not None
        clock.ahead = 601
        complain("it failed", FULL)
    assert len(caplog.records) == 4


def test_requests_on_a_full_disk_may_retry(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SqliteSessions.add
    is_full = True

    def add_session(table: SqliteSessions, *args: object) -> None:
        if is_full:
            raise FULL
        add(table, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteSessions, "add", add_session)
    with serving(FakeEngine(), tmp_path) as url, caplog.at_level(logging.ERROR):
        wire = Wire(url)
        body = {"tags": [], "sdk_version": "1"}
        for _ in range(3):
            heard = wire.send("create_session", body)
            assert heard.status == 503
            assert heard.json["detail"] == "the server's disk is full; ask again when there is room"
            assert heard.headers["retry-after"] == "5"
        is_full = False
        assert wire.send("create_session", body).status == 200
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None


PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
from support import listening
from tinkex.cli.serve import run_app
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.server_limits import Limits
from tinkex.server.meter import Meter

async def full(meter):
    raise OSError(28, "No space left on device")

if sys.argv[2] == "full":
    Meter.flush = full
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
app = create_app(FakeEngine(), Path(sys.argv[1]), limits=Limits(drain_seconds=0.1))
asyncio.run(run_app(app, listening(), lambda: print("ready", flush=True)))
"""


@pytest.mark.parametrize(("disk", "code"), [("full", 1), ("roomy", 0)])
def test_stop_that_fails_is_seen_from_outside(tmp_path: Path, disk: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), disk]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parent
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert process.returncode == code, told.decode()
    assert (b"could not finish cleanly" in told) == (disk == "full")
