"""Runs and checkpoints on record: listed, published, given a time to live, copied, deleted; each to
its owner."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from support import MODEL, Wire, make_data, pass_json, sample_json, serving, step_json, train
from tinkex import RestClient, types
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.database.sqlite_runs import SqliteCheckpoints
from tinkex.server.files.seals import SEAL
from tinkex.server.server_limits import Limits
from tinkex.server.state import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinkex import ServiceClient

DAY = 86400


@dataclass
class Records:
    """A server, and what it keeps on disk."""

    wire: Wire
    data_dir: Path
    engine: FakeEngine

    def change(self, table: str, assignment: str, *values: Any) -> None:
        """Change facts behind the server's back."""
        with closing(SqliteDatabase(self.data_dir)) as store:
            store.connection.rows(f"UPDATE {table} SET {assignment}", *values)

    def give(self, model: str, owner: str) -> None:
        """Make a run and its checkpoints another's."""
        for table in ("runs", "checkpoints"):
            self.change(table, "owner = ? WHERE model_id = ?", owner, model)

    def save(
        self, model: str, number: int, name: str, operation: str = "save_weights", **fields: Any
    ) -> Any:
        return self.wire.run(
            operation, {"model_id": model, "path": name, "seq_id": number, **fields}
        )

    def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        heard = self.wire.send(path, body, method=method)
        assert heard.status == status, heard
        return heard.json

    def files(self) -> set[str]:
        root = self.data_dir / "checkpoints"
        return {
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and path.name != SEAL
        }


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    engine = FakeEngine()
    with serving(engine, tmp_path) as url:
        yield Records(Wire(url), tmp_path, engine)


def names(listed: Any) -> list[str]:
    return [checkpoint["tinker_path"].split("/", 3)[3] for checkpoint in listed["checkpoints"]]


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_listed_newest_first_a_page_at_a_time(records: Records) -> None:
    wire = records.wire
    assert wire.get("training_runs") == {
        "training_runs": [],
        "cursor": {"offset": 0, "limit": 20, "total_count": 0},
    }
    session = wire.session()
    models = [wire.model(session, number) for number in range(3)]
    page = wire.get("training_runs?limit=2&offset=0&access_scope=owned")
    assert [run["training_run_id"] for run in page["training_runs"]] == models[:0:-1]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    rest = wire.get("training_runs?limit=2&offset=2&access_scope=accessible")
    assert [run["training_run_id"] for run in rest["training_runs"]] == models[:1]
    assert wire.get("training_runs?limit=99999")["cursor"]["limit"] == 1000


@pytest.mark.parametrize(
    "query", ["limit=x", "limit=-1", "offset=1.5", "limit=", "access_scope=all"]
)
def test_invalid_page_is_refused_by_name(records: Records, query: str) -> None:
    detail = records.call("GET", f"training_runs?{query}", status=400)["detail"]
    assert detail.startswith(query.split("=")[0])


def test_run_lists_its_last_request_and_save(records: Records) -> None:
    wire = records.wire
    model = wire.run(
        "create_model",
        {
            "session_id": wire.session(),
            "model_seq_id": 0,
            "base_model": "fake",
            "lora_config": {"rank": 4},
            "user_metadata": {"name": "first", "lr": 0.5},
        },
    )["model_id"]
    run = wire.get(f"training_runs/{model}")
    created = run.pop("last_request_time")
    assert run == {
        "training_run_id": model,
        "base_model": "fake",
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": 4,
        "user_metadata": {"name": "first", "lr": "0.5"},
        "loaded": True,
    }
    records.save(model, 1, "old")
    records.save(model, 2, "new", user_metadata={"step": "2"})
    records.save(model, 3, "new", "save_weights_for_sampler")
    run = wire.get(f"training_runs/{model}?access_scope=accessible")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/new"
    assert run["last_checkpoint"]["user_metadata"] == {"step": "2"}
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/new"
    assert moment(created) < moment(run["last_request_time"]) <= dt.datetime.now(dt.UTC)
    records.change("runs", "corrupted = 1 WHERE model_id = ?", model)
    assert wire.get(f"training_runs/{model}")["corrupted"] is True
    assert "'nobody'" in records.call("GET", "training_runs/nobody", status=404)["detail"]


@pytest.mark.parametrize("way", ["unload", "session"])
def test_run_that_has_ended_is_not_loaded(records: Records, way: str) -> None:
    wire = records.wire
    session = wire.session()
    fields = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "fake",
        "lora_config": {"rank": 4},
    }
    model = wire.run("create_model", fields)["model_id"]
    assert wire.get(f"training_runs/{model}")["loaded"] is True
    if way == "unload":
        wire.run("unload_model", {"model_id": model})
    else:
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert wire.get(f"training_runs/{model}")["loaded"] is False
    listed = wire.get("training_runs")["training_runs"]
    assert next(run for run in listed if run["training_run_id"] == model)["loaded"] is False


def moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def test_last_use_of_a_run_survives_a_restart(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        time.sleep(0.05)
        wire.run("forward_backward", pass_json(model, 1))
        used = wire.get(f"training_runs/{model}")["last_request_time"]
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    with serving(FakeEngine(), tmp_path) as url:
        assert Wire(url).get(f"training_runs/{model}")["last_request_time"] == used


def test_runs_can_be_listed_by_the_project_of_their_session(records: Records) -> None:
    wire = records.wire
    session = wire.post("create_session", {"tags": [], "sdk_version": "0.36.0", "project_id": "p"})[
        "session_id"
    ]
    model, _ = wire.model(session), wire.model()
    copied = wire.post(
        "copy_weights",
        {"source_path": records.save(model, 1, "a")["path"], "destination_project_id": "q"},
    )["tinker_path"]
    for project, expected in (("p", [model]), ("q", [copied.split("/")[2]]), ("r", [])):
        page = wire.get(f"training_runs?project_id={project}")
        assert [run["training_run_id"] for run in page["training_runs"]] == expected
        assert page["cursor"]["total_count"] == len(expected)


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S25", "S42")
def test_checkpoints_are_listed_by_run_and_by_user(records: Records) -> None:
    wire = records.wire
    first, second = wire.model(), wire.model()
    records.save(first, 1, "a", ttl_seconds=7200, user_metadata={"k": "v"})
    # of another kind, so that the name is free
    records.save(first, 2, "a", "save_weights_for_sampler")
    records.save(first, 3, "a", "save_weights_external")
    records.save(second, 1, "a")
    of_run = wire.get(f"training_runs/{first}/checkpoints")
    assert names(of_run) == ["external_weights/a", "sampler_weights/a", "weights/a"]
    assert of_run["cursor"] == {"offset": 0, "limit": 3, "total_count": 3}
    oldest = of_run["checkpoints"][-1]
    assert oldest["checkpoint_type"] == "training"
    assert oldest["tinker_path"] == f"tinker://{first}/weights/a"
    assert oldest["public"] is False
    assert oldest["user_metadata"] == {"k": "v"}
    assert oldest["size_bytes"] == sum(
        (records.data_dir / "checkpoints" / path).stat().st_size
        for path in records.files()
        if path.startswith(f"{first.replace(':', '_')}/weights/")
    )
    left = moment(oldest["expires_at"]) - dt.datetime.now(dt.UTC)
    assert 7100 < left.total_seconds() <= 7200
    assert of_run["checkpoints"][0].get("expires_at") is None
    mine = wire.get("checkpoints?limit=3&offset=0")
    assert len(mine["checkpoints"]) == 3
    assert mine["checkpoints"][0]["tinker_path"] == f"tinker://{second}/weights/a"
    assert mine["cursor"] == {"offset": 0, "limit": 3, "total_count": 4}
    assert names(wire.get("checkpoints?offset=3")) == ["weights/a"]
    assert names(wire.get(f"training_runs/{first}/checkpoints?limit=1&offset=1")) == [
        "sampler_weights/a"
    ]
    records.call("GET", "training_runs/nobody/checkpoints", status=404)


@pytest.mark.covers("S25")
def test_name_is_taken_once_by_run_and_kind(records: Records) -> None:
    model = records.wire.model()
    records.save(model, 1, "a")
    outcome = records.save(model, 2, "a")
    assert outcome["category"] == "user"
    assert "exists already; pass overwrite=True" in outcome["error"]
    records.wire.run("forward_backward", pass_json(model, 3))
    records.wire.run("optim_step", step_json(model, 4))
    before = records.files()
    assert records.save(model, 5, "a", overwrite=True, user_metadata={"new": "yes"})[
        "path"
    ].endswith("/weights/a")
    after = records.files()
    assert len(after) == 1
    assert before.isdisjoint(after)  # the old one stayed whole until the new one was on record
    listed = records.wire.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert [checkpoint["user_metadata"] for checkpoint in listed] == [{"new": "yes"}]


@pytest.mark.covers("S32")
def test_nameless_snapshots_are_not_listed(records: Records) -> None:
    model = records.wire.model()
    saved = records.wire.run(
        "save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 1}
    )
    assert saved.get("path") is None
    assert saved["sampling_session_id"].endswith(":sample:0")
    assert records.wire.get("checkpoints")["checkpoints"] == []
    assert records.wire.get(f"training_runs/{model}").get("last_sampler_checkpoint") is None


@pytest.mark.covers("S39")
@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("DELETE", "0001", "<kind>/<name>"),
        ("DELETE", "states/0001", "weights, sampler_weights, external_weights"),
        ("DELETE", "weights/.hidden", "letters, digits"),
        ("DELETE", "weights/a%20b", "letters, digits"),
        ("POST", "0001/publish", "<kind>/<name>"),
        ("PUT", "0001/ttl", "<kind>/<name>"),
        ("GET", "0001/archive", "<kind>/<name>"),
        ("GET", "states/a/archive", "'states' is not a kind"),
    ],
)
def test_malformed_checkpoint_id_names_the_rule(
    records: Records, method: str, path: str, words: str
) -> None:
    body = {"ttl_seconds": 7200} if method == "PUT" else None
    detail = records.call(
        method, f"training_runs/some:train:0/checkpoints/{path}", body, status=400
    )["detail"]
    assert words in detail


@pytest.mark.covers("S39")
@pytest.mark.parametrize(
    "path",
    ["tinker://run/weights", "tinker://run/states/a", "run/weights/a", "tinker://r/weights/a/b"],
)
def test_malformed_path_names_the_grammar(records: Records, path: str) -> None:
    for operation, body in (
        ("weights_info", {"tinker_path": path}),
        ("copy_weights", {"source_path": path, "destination_project_id": "p"}),
    ):
        assert "expected" in records.call("POST", operation, body, status=400)["detail"]


def test_unknown_methods_on_a_checkpoint_are_not_found(records: Records) -> None:
    assert (
        "there is no PUT"
        in records.call("PUT", "training_runs/r/checkpoints/weights/a", {}, status=404)["detail"]
    )


def test_deleted_checkpoint_is_gone_with_its_files(records: Records) -> None:
    model = records.wire.model()
    for number, name in enumerate("ab", 1):
        records.save(model, number, name)
    place = f"training_runs/{model}/checkpoints/weights/a"
    records.call("DELETE", place)
    assert names(records.wire.get("checkpoints")) == ["weights/b"]
    assert [path.split("/")[2] for path in records.files()] == ["b"]
    for method, path in (
        ("DELETE", place),
        ("POST", f"{place}/publish"),
        ("GET", f"{place}/archive"),
    ):
        assert "there is no checkpoint" in records.call(method, path, status=404)["detail"]
    records.call("POST", "weights_info", {"tinker_path": f"tinker://{model}/weights/a"}, status=404)
    assert records.save(model, 3, "a")["path"].endswith("/a")


def sampler_of(records: Records, model: str, number: int = 0) -> str:
    body = {
        "session_id": model.split(":")[0],
        "sampling_session_seq_id": number,
        "model_path": f"tinker://{model}/sampler_weights/a",
    }
    return str(records.wire.post("create_sampling_session", body)["sampling_session_id"])


@pytest.mark.covers("S31")
def test_sampler_keeps_weights_that_are_deleted_and_saved_again(
    records: Records,
) -> None:
    wire, model = records.wire, records.wire.model()
    records.save(model, 1, "a", "save_weights_for_sampler")
    sampler = sampler_of(records, model)
    before = wire.run("asample", sample_json(sampler))["sequences"]
    records.call("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/a")
    assert (
        wire.run("asample", sample_json(sampler, 1))["sequences"][0]["logprobs"]
        == before[0]["logprobs"]
    )
    wire.run("forward_backward", pass_json(model, 2, tokens=(110, 111, 112)))
    wire.run("optim_step", step_json(model, 3))
    records.save(model, 4, "a", "save_weights_for_sampler")
    assert (
        wire.run("asample", sample_json(sampler, 2))["sequences"][0]["logprobs"]
        == before[0]["logprobs"]
    )
    fresh = wire.run("asample", sample_json(sampler_of(records, model, 1)))["sequences"]
    assert fresh[0]["logprobs"] != before[0]["logprobs"]


def test_deleted_unloaded_checkpoint_cannot_be_sampled(records: Records) -> None:
    wire, model = records.wire, records.wire.model()
    records.save(model, 1, "a", "save_weights_for_sampler")
    sampler = sampler_of(records, model)
    records.call("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/a")
    heard = wire.send("asample", sample_json(sampler))
    assert heard.status == 410
    assert "deleted" in heard.json["detail"]


def test_publishing_twice_is_not_a_conflict(records: Records) -> None:
    model = records.wire.model()
    records.save(model, 1, "a")
    place = f"training_runs/{model}/checkpoints/weights/a"
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        assert records.call(method, f"{place}/publish") == {}
        assert records.wire.get("checkpoints")["checkpoints"][0]["public"] is public


@pytest.mark.covers("S42")
def test_time_to_live_is_set_moved_and_removed(records: Records) -> None:
    model = records.wire.model()
    records.save(model, 1, "a", ttl_seconds=3600)
    place = f"training_runs/{model}/checkpoints/weights/a/ttl"

    def left() -> float | None:
        expires = records.wire.get("checkpoints")["checkpoints"][0].get("expires_at")
        return (
            None if expires is None else (moment(expires) - dt.datetime.now(dt.UTC)).total_seconds()
        )

    first = left()
    assert first is not None
    assert 3500 < first <= 3600
    records.call("PUT", place, {"ttl_seconds": 10 * 365 * DAY})
    assert (left() or 0) > 9.9 * 365 * DAY
    records.call("PUT", place, {"ttl_seconds": None})
    assert left() is None
    for seconds in (3599, 0, -1, 11 * 366 * DAY):
        detail = records.call("PUT", place, {"ttl_seconds": seconds}, status=400)["detail"]
        assert "between 3600 and" in detail
    assert left() is None
    assert "between 3600 and" in records.save(model, 2, "b", ttl_seconds=60)["error"]


@pytest.mark.covers("S42")
def test_expired_checkpoints_are_not_found(records: Records) -> None:
    model = records.wire.model()
    saved = records.save(model, 1, "a", ttl_seconds=3600)["path"]
    records.change("checkpoints", "expires = ?", time.time() - 1)
    assert records.wire.get("checkpoints") == {
        "checkpoints": [],
        "cursor": {"offset": 0, "limit": 100, "total_count": 0},
    }
    assert names(records.wire.get(f"training_runs/{model}/checkpoints")) == []
    assert records.wire.get(f"training_runs/{model}").get("last_checkpoint") is None
    place = f"training_runs/{model}/checkpoints/weights/a"
    records.call("DELETE", place, status=404)
    records.call("PUT", f"{place}/ttl", {"ttl_seconds": None}, status=404)
    records.call("POST", "weights_info", {"tinker_path": saved}, status=404)
    records.call(
        "POST", "copy_weights", {"source_path": saved, "destination_project_id": "p"}, status=404
    )
    assert records.save(model, 2, "a")["path"] == saved  # its name is free, and its files make room
    assert len(records.files()) == 1


@pytest.mark.covers("S42")
def test_sweep_deletes_expired_checkpoints_only(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        records = Records(Wire(url), tmp_path, FakeEngine())
        model = records.wire.model()
        for number, name in enumerate("abc", 1):
            records.save(model, number, name, ttl_seconds=3600 if name != "c" else None)
        records.change("checkpoints", "expires = 1 WHERE tinker_path LIKE '%/a'")
    state = State(FakeEngine(), tmp_path, Limits(), SqliteDatabase)
    asyncio.run(state.sweep())
    assert {path.split("/")[2] for path in records.files()} == {"b", "c"}
    assert not list(tmp_path.rglob(".*ing-*"))
    assert [
        saved.tinker_path[-1]
        for saved in state.database.checkpoints.page("local", limit=9, offset=0)[0]
    ] == ["c", "b"]
    state.database.close()


@pytest.mark.covers("S43")
def test_unwritable_checkpoint_leaves_no_files(records: Records) -> None:
    model = records.wire.model()

    def fail(method: str, subject: str) -> None:
        if method == "save":
            raise EngineError("the disk is full", "server")

    records.engine.fail = fail
    assert "the disk is full" in records.save(model, 1, "a")["error"]
    records.engine.fail = lambda method, subject: None
    assert records.wire.get("checkpoints")["checkpoints"] == []
    assert not list(records.data_dir.rglob(".saving-*"))
    assert records.save(model, 2, "a")["path"].endswith("/a")


@pytest.mark.covers("S43")
def test_files_are_flushed_and_in_place_before_they_are_on_record(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    steps: list[str] = []
    real = os.fsync, SqliteCheckpoints.put

    def fsync(handle: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real[0](handle)

    def put(table: SqliteCheckpoints, saved: Any, request_id: str | None = None) -> None:
        assert {file.name for file in saved.directory.iterdir()} == {"fake.json", SEAL}
        steps.append("record")
        real[1](table, saved, request_id)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(SqliteCheckpoints, "put", put)
    model = records.wire.model()
    steps.clear()
    records.save(model, 1, "a")
    assert steps[0] == "fake.json"
    assert steps[1] == SEAL
    assert steps[2].startswith(".saving-")
    assert steps[3] == "weights"
    assert steps[-2:] == ["checkpoints", "record"]


# ── copies ────────────────────────────────────────────────────────────────────────────────────────


def test_copied_run_outlives_its_source(records: Records) -> None:
    wire, model = records.wire, records.wire.model()
    wire.run("forward_backward", pass_json(model, 1))
    wire.run("optim_step", step_json(model, 2))
    source = records.save(model, 3, "a", user_metadata={"k": "v"})["path"]
    body = {"source_path": source, "destination_project_id": "p", "ttl_seconds": 7200}
    copied = wire.post("copy_weights", body)["tinker_path"]
    run = copied.split("/")[2]
    assert copied == f"tinker://{run}/weights/a"
    assert run != model
    listed = wire.get(f"training_runs/{run}/checkpoints")["checkpoints"][0]
    assert listed["user_metadata"] == {"k": "v"}
    assert listed["public"] is False
    assert listed["expires_at"]
    records.call("DELETE", f"training_runs/{model}/checkpoints/weights/a")
    assert wire.post("weights_info", {"tinker_path": copied})["lora_rank"] == 4
    loaded = wire.model()
    wire.run("load_weights", {"model_id": loaded, "path": copied, "optimizer": True, "seq_id": 1})
    ours, theirs = (
        wire.run("forward_backward", pass_json(name, number))["metrics"]
        for name, number in ((loaded, 2), (model, 4))
    )
    assert ours == theirs


def test_same_copy_asked_for_again_is_made_once(records: Records) -> None:
    source = records.save(records.wire.model(), 1, "a")["path"]
    body = {"source_path": source, "destination_project_id": "p"}

    def copy(key: str) -> str:
        heard = records.wire.send("copy_weights", body, headers={"X-Idempotency-Key": key})
        return str(heard.json["tinker_path"])

    assert copy("one") == copy("one")
    assert copy("one") != copy("two")
    assert records.wire.get("checkpoints")["cursor"]["total_count"] == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"destination_project_id": None}, "destination_project_id"),
        ({"ttl_seconds": 60}, "between 3600"),
        ({"session_id": "s", "model_seq_id": 0}, "a run of its own"),
    ],
)
def test_failed_copy_leaves_no_files(records: Records, fields: dict[str, Any], words: str) -> None:
    source = records.save(records.wire.model(), 1, "a")["path"]
    body = {"source_path": source, "destination_project_id": "p", **fields}
    assert words in records.call("POST", "copy_weights", body, status=400)["detail"]
    assert records.wire.get("training_runs")["cursor"]["total_count"] == 1


# ── owners ────────────────────────────────────────────────────────────────────────────────────────


def test_objects_of_other_owners_are_not_found(records: Records) -> None:
    wire = records.wire
    model, session = wire.model(), wire.session()
    paths = [
        records.save(model, number, "a", operation)["path"]
        for number, operation in enumerate(
            ("save_weights", "save_weights_for_sampler", "save_weights_external"), 1
        )
    ]
    records.give(model, "ann")
    for scope in ("owned", "accessible"):
        assert wire.get(f"training_runs?access_scope={scope}")["training_runs"] == []
        records.call("GET", f"training_runs/{model}?access_scope={scope}", status=404)
    assert wire.get("checkpoints")["checkpoints"] == []
    records.call("GET", f"training_runs/{model}/checkpoints", status=404)
    place = f"training_runs/{model}/checkpoints/weights/a"
    for method, path, body in (
        ("DELETE", place, None),
        ("POST", f"{place}/publish", None),
        ("DELETE", f"{place}/publish", None),
        ("PUT", f"{place}/ttl", {"ttl_seconds": 7200}),
        ("GET", f"{place}/archive", None),
        (
            "GET",
            f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls",
            None,
        ),
        ("POST", "weights_info", {"tinker_path": paths[0]}),
        ("POST", "copy_weights", {"source_path": paths[0], "destination_project_id": "p"}),
    ):
        assert "there is no checkpoint" in records.call(method, path, body, status=404)["detail"]
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": paths[1]}
    assert (
        "there is no checkpoint"
        in records.call("POST", "create_sampling_session", sampling, status=400)["detail"]
    )
    load = {"session_id": session, "model_seq_id": 0, "path": paths[0], "optimizer": False}
    assert "there is no checkpoint" in wire.run("load_weights", load)["error"]
    assert len(records.files()) == 3


@pytest.mark.covers("S42")
def test_published_checkpoint_is_read_only_for_others(records: Records) -> None:
    wire = records.wire
    model, session = wire.model(), wire.session()
    path = records.save(model, 1, "a")["path"]
    drawn = records.save(model, 2, "b", "save_weights_for_sampler")["path"]
    records.save(model, 3, "c")
    for name in ("weights/a", "sampler_weights/b"):
        records.call("POST", f"training_runs/{model}/checkpoints/{name}/publish")
    records.give(model, "ann")
    assert wire.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert wire.run("load_weights", load)["path"] == path
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": drawn}
    sampler = wire.post("create_sampling_session", sampling)["sampling_session_id"]
    assert wire.run("asample", sample_json(sampler))["sequences"]
    assert (
        wire.post("copy_weights", {"source_path": path, "destination_project_id": "p"})[
            "tinker_path"
        ]
        != path
    )
    assert (
        wire.send(f"training_runs/{model}/checkpoints/weights/a/archive", method="GET").status
        == 302
    )
    assert names(wire.get(f"training_runs/{model}/checkpoints")) == [
        "sampler_weights/b",
        "weights/a",
    ]
    accessible = wire.get("training_runs?access_scope=accessible")["training_runs"]
    [theirs] = [run for run in accessible if run["training_run_id"] == model]
    assert (theirs["model_owner"], theirs["last_checkpoint"]["checkpoint_id"]) == (
        "ann",
        "weights/a",
    )
    owned = wire.get("training_runs")["training_runs"]
    assert {run["model_owner"] for run in owned} == {"local"}
    assert len(owned) == len(accessible) - 1
    records.call("GET", f"training_runs/{model}?access_scope=owned", status=404)
    for method, suffix, body in (
        ("DELETE", "", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {}),
    ):
        records.call(
            method, f"training_runs/{model}/checkpoints/weights/a{suffix}", body, status=404
        )
    records.change("checkpoints", "public = 0")
    assert (
        "no longer published"
        in records.call("POST", "asample", sample_json(sampler, 1), status=410)["detail"]
    )


# ── through the clients ───────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S24")
def test_our_client_finds_copies_and_resumes(service: ServiceClient, base_url: str) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
    data = make_data(types)
    train(client, types, data, 2)
    saved = client.save_state("here").result(60).path
    straight = train(client, types, data, 2)
    rest = RestClient(base_url=base_url)
    run = rest.get_training_run_by_tinker_path(saved).result(20)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == saved
    copied = rest.copy_weights(saved, "project", ttl_seconds=7200).result(20)
    resumed = service.create_training_client_from_state_with_optimizer(copied).result()
    assert train(resumed, types, data, 2) == straight
    afresh = service.create_training_client_from_state(copied).result()
    assert train(afresh, types, data, 2) != straight
    rest.publish_checkpoint_from_tinker_path(copied).result(20)
    rest.set_checkpoint_ttl_from_tinker_path(copied, None).result(20)
    listed = rest.list_checkpoints(copied.split("/")[2]).result(20)
    assert [(checkpoint.public, checkpoint.expires_at) for checkpoint in listed.checkpoints] == [
        (True, None)
    ]
    rest.delete_checkpoint_from_tinker_path(copied).result(20)
    assert copied not in [
        kept.tinker_path for kept in rest.list_user_checkpoints().result(20).checkpoints
    ]
