"""The database behind its Protocol: SQL in one place, and lists that no write waits for."""

from __future__ import annotations

import ast
import datetime as dt
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tinkex
from support import Wire, pass_json, serving, step_json
from tinkex.engine.fake import FakeEngine
from tinkex.server.database import interface
from tinkex.server.database.interface import (
    AuditEntry,
    Database,
    DatabaseError,
    Run,
    SavedCheckpoint,
    Span,
)
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.types.search_requests import CheckpointSearchRequest, SessionSearchRequest
from tinkex.types.training import LoraConfig

SOURCE = Path(tinkex.__file__).parent
SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA)\s+[\w*]", re.ASCII)
CHECKPOINT = "tinker://s:train:0/sampler_weights/a"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(SqliteDatabase(tmp_path)) as opened:
        database: Database = opened
        lora = LoraConfig(rank=8)
        database.sessions.add("s", {"project_id": "p"})
        database.runs.add(Run("s:train:0", "s", "m", lora, {}))
        directory = tmp_path / "checkpoints"
        database.checkpoints.put(
            SavedCheckpoint(CHECKPOINT, "s:train:0", directory, 1.0, "m", lora, {}, 5)
        )
        yield database


def test_sql_is_in_the_database_alone() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "server" / "database"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and SQL.match(str(node.value)):
                found.append(f"{path}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.Import | ast.ImportFrom) and "sqlite3" in ast.unparse(node):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not found


# ── lists and writes ──────────────────────────────────────────────────────────────────────────────

LISTS: dict[str, Callable[[Database], Any]] = {
    "runs": lambda db: db.runs.page("local", accessible=True, project_id=None, limit=20, offset=0)[
        1
    ],
    "run": lambda db: db.runs.record("s:train:0", "local", accessible=True),
    "checkpoints": lambda db: db.checkpoints.page("local", limit=20, offset=0)[1],
    "samplers": lambda db: db.checkpoints.samplers("local", ["m"], 5),
    "checkpoint search": lambda db: db.checkpoints.search(CheckpointSearchRequest(), "local"),
    "projects": lambda db: db.checkpoints.unknown_projects(["none"], "local"),
    "storage": lambda db: db.checkpoints.stored_bytes(None, None),
    "sizes": lambda db: db.checkpoints.sizes(),
    "sessions": lambda db: db.sessions.ids("local", 20, 0),
    "session search": lambda db: db.sessions.search(SessionSearchRequest(), "local"),
    "usage": lambda db: db.activity.used(0, 10, None)[0],
    "audit": lambda db: db.activity.audit(0, 10, None, None),
    "timeline": lambda db: db.activity.spans("s"),
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold each query while its rows are fetched; one event says so, the other lets go."""
    began, let_go = threading.Event(), threading.Event()

    class Cursor(sqlite3.Cursor):
        def fetchall(self) -> list[Any]:
            rows = super().fetchall()
            if threading.current_thread().name.startswith("list"):
                began.set()
                assert let_go.wait(20)
            return rows

    class Held(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            return self.cursor(Cursor).execute(*args)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **options: connect(*args, factory=Held, **options)
    )
    yield began, let_go
    let_go.set()


@pytest.mark.parametrize("name", LISTS)
def test_list_in_progress_does_not_block_a_write(
    held: tuple[threading.Event, threading.Event], database: Database, name: str
) -> None:
    began, let_go = held
    entry = AuditEntry(5.0, "local", "checkpoints", "checkpoint_saved", None, None, "{}")
    span = Span("s", "s:train:0:1", "forward", 5.0, 6.0, None)
    database.activity.add({(0, "local", "s", "m", "training"): 5.0}, [span], [entry])
    with ThreadPoolExecutor(1, "list") as lists, ThreadPoolExecutor(1, "write") as writes:
        listing = lists.submit(LISTS[name], database)
        assert began.wait(20)
        writing = writes.submit(database.sessions.add, "t", {})
        try:
            writing.result(10)
        except TimeoutError:
            pytest.fail("the write waits for the list")
        finally:
            let_go.set()
        assert listing.result(20)
    assert database.sessions.state("t") == "active"


def test_list_sees_the_last_write(database: Database) -> None:
    for number in range(20):
        database.sessions.add(f"s{number}", {})
        assert f"s{number}" in database.sessions.ids("local", 50, 0)


def test_usage_comes_with_its_sessions(database: Database) -> None:
    database.activity.add({(3600, "ada", "s", "m", "training"): 5.0}, [], [])
    database.activity.add({(3600, "ada", "s", "m", "training"): 2.0}, [], [])
    (used,), sessions = database.activity.used(0, 7200, "ada")
    assert (used.amount, used.project_id, sessions) == (7.0, "p", {"s": {}})
    assert database.activity.used(0, 3600, "ada") == ([], {})
    assert database.activity.used(0, 7200, "bob") == ([], {})


def test_errors_have_one_type(tmp_path: Path) -> None:
    with closing(SqliteDatabase(tmp_path)) as database:
        database.sessions.add("s", {})
        with pytest.raises(DatabaseError, match="UNIQUE"):
            database.sessions.add("s", {})
        with pytest.raises(DatabaseError):
            database.connection.read("SELECT nothing FROM nowhere")
    with pytest.raises(DatabaseError, match="unable to open"):
        SqliteDatabase(tmp_path / "nowhere")


def test_cursor_of_a_search_is_exact_to_the_microsecond(database: Database) -> None:
    (found,) = database.checkpoints.search(CheckpointSearchRequest(), "local")
    assert found[1] == dt.timedelta(seconds=1) // dt.timedelta(microseconds=1)


class Narrow:
    """An object with the methods of its Protocol and nothing else."""

    def __init__(self, protocol: type[Any], whole: Any) -> None:
        names = [name for name in vars(protocol) if not name.startswith("_")]
        vars(self).update({name: getattr(whole, name) for name in names})


class NarrowDatabase(Narrow):
    """A database that is not of SQLite, as far as the server can see."""

    def __init__(self, root: Path) -> None:
        whole, self.root = SqliteDatabase(root), root
        super().__init__(Database, whole)
        tables = {name: getattr(interface, f"{name[:-1].title()}Table") for name in PLURALS}
        for name, protocol in (tables | {"activity": interface.ActivityTable}).items():
            setattr(self, name, Narrow(protocol, getattr(whole, name)))


PLURALS = ("sessions", "runs", "samplers", "checkpoints", "keys")


def test_server_needs_nothing_of_a_database_but_its_protocol(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path, open_database=NarrowDatabase) as url:
        wire = Wire(url)
        model = wire.model()
        wire.run("forward_backward", pass_json(model, 1))
        wire.run("optim_step", step_json(model, 2))
        saved = wire.run("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "a"})
        lists = ("training_runs", "checkpoints", "sessions", "audit")
        found = {name: json.dumps(wire.get(name)) for name in lists}
        assert saved["path"] in found["checkpoints"]
        assert model in found["training_runs"]
        assert wire.post("sessions/search", {})["sessions"]
        assert wire.post("checkpoints/search", {})["checkpoints"]
    with serving(FakeEngine(), tmp_path, open_database=NarrowDatabase) as url:
        assert Wire(url).run("optim_step", step_json(model, 4))
