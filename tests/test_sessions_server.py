"""Sessions on the server: listed, searched, moved, ended, and drawn as a timeline."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

import tinkex
from support import Clock, Heard, Keyed, Wire, pass_json, sample_json, serving, sqlite, step_json
from test_survival import life, played, until as until_so
from tinkex.client.rest import RestClient
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key, revoke_key
from tinkex.server.database import sqlite_connection
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.database.sqlite_sessions import SqliteSessions
from tinkex.server.server_limits import Limits


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with serving(
        FakeEngine(), tmp_path_factory.mktemp("server"), limits=Limits(poll_seconds=0.2)
    ) as url:
        yield Wire(url)


Serve = Callable[..., Wire]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: Wire(
            stack.enter_context(serving(FakeEngine(), tmp_path, **options))
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run periodic work every few hundredths of a second."""
    real = asyncio.sleep
    monkeypatch.setattr(
        "tinkex.server.state.asyncio.sleep", lambda seconds: real(min(seconds, 0.03))
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time as the server sees it."""
    made = Clock()
    for module in ("state", "open_sessions"):
        monkeypatch.setattr(f"tinkex.server.{module}.time", made)
    return made


def begin(wire: Wire, **fields: Any) -> str:
    return str(
        wire.post("create_session", {"tags": ["t"], "sdk_version": "0.36.0", **fields})[
            "session_id"
        ]
    )


def find(wire: Wire, **fields: Any) -> list[str]:
    return [found["session_id"] for found in wire.post("sessions/search", fields)["sessions"]]


def finish(wire: Wire, session: str, reason: str = "success", detail: str | None = None) -> None:
    wire.post(f"sessions/{session}/finish", {"reason": {"type": reason}, "detail": detail})


# ── one session ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S7")
def test_session_names_its_runs_and_samplers(wire: Wire) -> None:
    session = begin(wire, user_metadata={"a": "b", "n": 3}, display_name="Nightly")
    model = wire.model(session)
    again = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "fake",
        "lora_config": {"rank": 4},
    }
    assert wire.run("create_model", again)["model_id"] == model == f"{session}:train:0"
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    assert wire.get(f"sessions/{session}?access_scope=owned") == {
        "training_run_ids": [model],
        "sampler_ids": [sampler],
        "user_metadata": {"a": "b", "n": "3"},
        "display_name": "Nightly",
    }
    assert wire.send("sessions/nothing", method="GET").status == 404
    assert wire.send(f"sessions/{session}?access_scope=all", method="GET").status == 400


def test_session_moves_with_its_checkpoints_into_a_project(wire: Wire) -> None:
    session = begin(wire, project_id="old")
    model = wire.model(session)
    wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    assert find(wire, project_ids=["old"]) == [session]
    assert (
        wire.send(f"sessions/{session}/project", {"project_id": "new"}, method="PUT").status == 200
    )
    assert find(wire, project_ids=["old"]) == []
    assert find(wire, project_ids=["new", "other"]) == [session]
    held = wire.get("billing/usage/checkpoints/current?project_id=new")["data"]
    assert [item["checkpoint_count"] for item in held] == [1]
    moved = wire.get("audit?event_type=projects")["entries"]
    assert moved[-1]["event_details"] == {
        "owner": "local",
        "project_id": "new",
        "session_id": session,
    }
    assert wire.send(f"sessions/{session}/project", {"project_id": ""}, method="PUT").status == 400
    assert wire.send("sessions/nothing/project", {"project_id": "p"}, method="PUT").status == 404


# ── many ──────────────────────────────────────────────────────────────────────────────────────────


def test_sessions_are_listed_newest_first_a_page_at_a_time(serve: Serve) -> None:
    wire = serve()
    made = [begin(wire) for _ in range(5)][::-1]
    assert wire.get("sessions")["sessions"] == made
    assert wire.get("sessions?limit=2&offset=1")["sessions"] == made[1:3]
    assert wire.get("sessions?limit=0")["sessions"] == []
    for query in ("limit=-1", "limit=x", "limit=1001", "offset=1.5", "access_scope=mine"):
        assert wire.send(f"sessions?{query}", method="GET").status == 400, query


def test_search_matches_everything_that_is_asked(serve: Serve) -> None:
    wire = serve()
    one = begin(
        wire, display_name="Nightly eval", project_id="p", user_metadata={"team": "a", "seed": "1"}
    )
    two = begin(wire, display_name="nightly train", user_metadata={"team": "a", "seed": "2"})
    three = begin(wire)
    finish(wire, two, "errored", "out of luck")
    assert find(wire) == [three, two, one]
    assert find(wire, session_id=two) == [two]
    assert find(wire, display_name="NIGHTLY") == [two, one]
    assert find(wire, display_name="%") == []
    assert find(wire, user_metadata={"team": "a"}) == [two, one]
    assert find(wire, user_metadata={"team": "a", "seed": "1"}) == [one]
    assert find(wire, user_metadata={"team": "b"}) == []
    assert find(wire, project_ids=["p"]) == [one]
    assert find(wire, project_ids=["default"]) == [three, two]
    assert find(wire, project_ids=[]) == []
    assert find(wire, statuses=[{"type": "active"}]) == [three, one]
    assert find(wire, statuses=[{"type": "client_finished"}]) == [two]
    assert find(wire, statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    assert find(
        wire, statuses=[{"type": "client_finished", "reasons": ["errored"]}, {"type": "active"}]
    ) == [
        three,
        two,
        one,
    ]
    assert find(wire, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
    assert find(wire, owner={"type": "accessible"}, limit=1) == [three]
    assert find(wire, owner={"type": "user", "owner_urns": ["tml:user:local"]}, limit=1) == [three]
    assert find(wire, owner={"type": "user", "owner_urns": ["tml:user:else"]}) == []
    assert wire.send("sessions/search", {"limit": 0}).status == 400


def test_found_session_is_summed_up(wire: Wire) -> None:
    session = begin(wire, display_name="one", user_metadata={"k": "v"})
    model = wire.model(session)
    for number, name in enumerate(("a", "b"), 1):
        wire.run("save_weights", {"model_id": model, "path": name, "seq_id": number})
    wire.model(session, 1)
    (found,) = wire.post("sessions/search", {"session_id": session})["sessions"]
    assert found["checkpoint_storage_bytes"] > 0
    assert found["checkpoints_count"] == 2
    assert found["status"] == {"type": "active"}
    assert (found["owner"], found["project_id"]) == ("tml:user:local", "default")
    finish(wire, session, "interrupted", "by hand")
    finish(wire, session, "success")  # the first reason stays
    (found,) = wire.post("sessions/search", {"session_id": session})["sessions"]
    assert found["status"] == {
        "type": "client_finished",
        "reason": {"type": "interrupted"},
        "detail": "by hand",
    }


def test_pages_of_a_search_neither_omit_nor_repeat_sessions(serve: Serve, tmp_path: Path) -> None:
    wire = serve()
    made = [begin(wire) for _ in range(7)]
    with closing(SqliteDatabase(tmp_path)) as facts:  # some of them in the same microsecond
        facts.connection.rows("UPDATE sessions SET created = 1700000000.123457")
    begin(wire)
    with RestClient(base_url=wire.url) as rest:
        found, cursor, pages = [], None, 0
        while True:
            request = tinkex.types.SessionSearchRequest(limit=3, cursor=cursor)
            with pytest.warns(tinkex.ExperimentalWarning):
                page = rest.search_sessions(request).result(10)
            found += [session.session_id for session in page.sessions]
            cursor, pages = page.next_cursor, pages + 1
            if cursor is None:
                break
    assert pages == 3
    assert found[1:] == sorted(made, reverse=True)


# ── their end ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S6")
@pytest.mark.usefixtures("quick")
def test_silent_session_is_freed_but_keeps_checkpoints(serve: Serve, clock: Clock) -> None:
    wire = serve(limits=Limits(session_seconds=60))
    session = begin(wire)
    model = wire.model(session)
    path = wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]
    clock.ahead = 61
    found = until(
        lambda: wire.post("sessions/search", {"statuses": [{"type": "cancelled"}]})["sessions"]
    )
    assert found[0]["session_id"] == session
    assert "session_seconds" in found[0]["status"]["detail"]
    refused = wire.send("session_heartbeat", {"session_id": session})
    assert refused.status == 410
    assert "session_seconds" in refused.json["detail"]
    assert wire.send("optim_step", step_json(model, 2)).status == 410
    assert wire.post("weights_info", {"tinker_path": path})["base_model"] == "fake"
    assert wire.get(f"sessions/{session}")["training_run_ids"] == [model]


@pytest.mark.covers("S6")
@pytest.mark.usefixtures("quick")
def test_session_that_an_earlier_life_left_open_expires_too(tmp_path: Path, clock: Clock) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        left, alive = begin(Wire(url)), begin(Wire(url))
    with serving(FakeEngine(), tmp_path, limits=Limits(session_seconds=60)) as url:
        wire = Wire(url)
        for seconds in (20, 40, 60, 80):
            wire.post("session_heartbeat", {"session_id": alive})
            clock.ahead = seconds
        until(lambda: find(wire, statuses=[{"type": "cancelled"}]) == [left])
        for _ in range(5):
            time.sleep(0.05)  # it is looked at again and again
            wire.post("session_heartbeat", {"session_id": alive})
        assert find(wire, statuses=[{"type": "active"}]) == [alive]


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found


# ── timelines ─────────────────────────────────────────────────────────────────────────────────────


def fetch(url: str) -> Heard:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    with closing(connection):
        connection.request("GET", f"{parts.path}?{parts.query}")
        response = connection.getresponse()
        return Heard(response.status, {}, response.read())


def work(wire: Wire) -> str:
    session = wire.session()
    model = wire.model(session)
    wire.run("forward_backward", pass_json(model, 1))
    wire.run("optim_step", step_json(model, 2))
    wire.run(
        "load_weights",
        {"model_id": model, "path": f"tinker://{model}/weights/no", "seq_id": 3, "optimizer": True},
    )
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    wire.run("asample", sample_json(sampler))
    assert wire.send("stream_sample", sample_json(sampler)).status == 200
    return session


def spans(trace: Any) -> dict[str, tuple[float, float, Any]]:
    began = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in trace["traceEvents"] if event["ph"] == "e"}
    return {
        event["name"]: (event["ts"], ended[key], event["args"]["error"])
        for key, event in began.items()
    }


def test_trace_shows_the_timeline_of_a_session(wire: Wire) -> None:
    start = time.time() * 1e6
    session = work(wire)
    end = time.time() * 1e6
    with RestClient(base_url=wire.url) as rest:
        url = rest.export_session_trace(session).result(10)
    heard = fetch(url)
    assert heard.status == 200
    drawn = spans(heard.json)
    names = [
        "create_model",
        "forward_backward",
        "optim_step",
        "load_weights",
        "asample",
        "stream_sample",
    ]
    assert list(drawn) == names
    times = [moment for name in names for moment in drawn[name][:2]]
    assert times == sorted(times)
    assert start <= times[0] < times[-1] <= end
    assert "no checkpoint" in drawn["load_weights"][2]
    assert drawn["optim_step"][2] is None
    tracks = {
        event["args"]["name"]
        for event in heard.json["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert tracks == {f"{session}:train:0", f"{session}:sample:0"}
    assert wire.send("sessions/nothing/trace_export", method="GET").status == 404


def test_link_to_a_trace_cannot_be_made_up_or_used_later(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = work(wire), wire.session()
    url = wire.get(f"sessions/{one}/trace_export")["url"]
    assert fetch(url).status == 200
    assert fetch(url.replace(one, two)).status == 403
    assert fetch(url[:-1] + ("0" if url[-1] != "0" else "1")).status == 403
    assert fetch(url.replace("expires=", "expires=9")).status == 403
    assert fetch(url.split("?")[0]).status == 403
    monkeypatch.setattr("tinkex.server.routes.session_calls.LINK_SECONDS", -5)
    late = fetch(wire.get(f"sessions/{one}/trace_export")["url"])
    assert late.status == 403
    assert "expired" in late.json["detail"]


def test_link_to_a_trace_ends_with_its_key(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        number, key = create_key(store, "key")
        wire = Keyed(url, key)
        link = wire.get(f"sessions/{wire.session()}/trace_export")["url"]
        assert fetch(link).status == 200
        assert fetch(link.replace(f"key={number}", "key=0")).status == 403
        revoke_key(store, number)
        assert fetch(link).status == 403


def test_program_with_its_own_backend_gets_the_trace_as_a_file(tmp_path: Path) -> None:
    backend = tinkex.LocalBackend(engine=FakeEngine(), data_dir=tmp_path)
    with backend, tinkex.ServiceClient(base_url=backend.base_url) as service:
        service.create_lora_training_client("fake", rank=4).result()
        rest = RestClient(base_url=backend.base_url)
        (session,) = rest.list_sessions().result(10).sessions
        url = rest.export_session_trace(session).result(10)
        with urlopen(url) as file:
            assert list(spans(json.load(file))) == ["create_model"]


def test_timeline_has_a_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.server.meter.SPANS_PER_SESSION", 3)
    wire = serve()
    url = wire.get(f"sessions/{work(wire)}/trace_export")["url"]
    assert list(spans(fetch(url).json)) == ["create_model", "forward_backward", "optim_step"]


def test_search_is_bounded_and_blocks_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            keys = {
                name: create_key(server.state.database, name, name)[1] for name in ("ada", "ben")
            }
            for key in keys.values():
                await server.session(key)
            # what others do with the database and a search do not wait for each other
            with sqlite(server.state).lock:
                async with asyncio.timeout(5):
                    found = [await server.post("sessions/search", {}, key) for key in keys.values()]
            assert [len(page["sessions"]) for page in found] == [1, 1]
            held, original = threading.Event(), SqliteSessions.search

            def slow(self: SqliteSessions, request: Any, owner: str) -> Any:
                if owner == "ada":
                    assert held.wait(20)
                return original(self, request, owner)

            monkeypatch.setattr(SqliteSessions, "search", slow)
            first = asyncio.ensure_future(server.send("sessions/search", {}, keys["ada"]))
            await until_so(lambda: server.state.searches.owners == {"ada"})
            assert (await server.send("sessions/search", {}, keys["ada"]))[0] == 429
            assert (await server.send("sessions/search", {}, keys["ben"]))[0] == 200
            held.set()
            assert (await first)[0] == 200
            monkeypatch.setattr(sqlite_connection, "SEARCH_SECONDS", -1.0)
            monkeypatch.setattr(sqlite_connection, "SEARCH_INSTRUCTIONS", 1)
            status, answer = await server.send("sessions/search", {}, keys["ada"])
            assert status == 400
            assert "the search was stopped" in answer["detail"]
            monkeypatch.undo()
            assert (await server.send("sessions/search", {}, keys["ada"]))[0] == 200

    played(scenario)
