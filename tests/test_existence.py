"""Secrecy: others learn neither which objects exist nor the paths of files."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import Heard, Keyed, Wire, pass_json, sample_json, serving, step_json
from tinkex.engine.fake import STATE, FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.routes import exports


class Ids(NamedTuple):
    """A session with a run, a sampler and a request, of somebody's or of nobody's."""

    session: str
    model: str
    sampler: str
    request: str


def nobodys() -> Ids:
    session = str(uuid.uuid4())
    return Ids(session, f"{session}:train:0", f"{session}:sample:0", f"{session}:sample:0:0")


ASKED: list[tuple[str, str, Any]] = [
    ("DELETE", "training_runs/{model}/checkpoints/weights/a", None),
    ("DELETE", "training_runs/{model}/checkpoints/nonsense/a", None),
    ("POST", "training_runs/{model}/checkpoints/weights/a/publish", None),
    ("DELETE", "training_runs/{model}/checkpoints/weights/a/publish", None),
    ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 7200}),
    ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 1}),
    ("GET", "training_runs/{model}/checkpoints/weights/a/archive", None),
    ("GET", "training_runs/{model}/checkpoints/external_weights/a/external_weights_urls", None),
    ("GET", "training_runs/{model}", None),
    ("GET", "training_runs/{model}/checkpoints", None),
    ("POST", "cancel_future", {"request_id": "{request}"}),
    ("POST", "retrieve_future", {"request_id": "{request}"}),
    ("POST", "get_info", {"model_id": "{model}"}),
    ("POST", "unload_model", {"model_id": "{model}"}),
    ("POST", "forward_backward", pass_json("{model}", 1)),
    ("POST", "optim_step", step_json("{model}", 1)),
    ("POST", "save_weights", {"model_id": "{model}", "path": "b", "seq_id": 1}),
    ("POST", "load_weights",
     {"model_id": "{model}", "path": "tinker://x:train:0/weights/a", "optimizer": False}),
    ("POST", "weights_info", {"tinker_path": "tinker://{model}/weights/a"}),
    ("POST", "copy_weights",
     {"source_path": "tinker://{model}/weights/a", "destination_project_id": "p"}),
    ("POST", "session_heartbeat", {"session_id": "{session}"}),
    ("POST", "create_sampling_session",
     {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": "m"}),
    ("POST", "create_model", {"session_id": "{session}", "model_seq_id": 0, "base_model": "fake"}),
    ("GET", "sessions/{session}", None),
    ("GET", "sessions/{session}/trace_export", None),
    ("GET", "samplers/{sampler}", None),
    ("POST", "asample", sample_json("{sampler}")),
    ("POST", "stream_sample", sample_json("{sampler}")),
    ("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
]  # fmt: skip


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[tuple[Wire, Wire]]:
    """Two owners of one server."""
    with serving(FakeEngine(), tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        yield (
            Keyed(url, create_key(store, "ada", "ada")[1]),
            Keyed(url, create_key(store, "bob", "bob")[1]),
        )


def ask(wire: Wire, method: str, path: str, body: Any, ids: Ids) -> Heard:
    text = json.dumps(body)
    for name, value in ids._asdict().items():
        path, text = path.replace(f"{{{name}}}", value), text.replace(f"{{{name}}}", value)
    return wire.send(path, None if body is None else text.encode(), method=method)


def alike(heard: Heard, ids: Ids) -> tuple[int, str]:
    """An answer without the ids that it names."""
    text = heard.body.decode()
    for name, value in ids._asdict().items():
        text = text.replace(value, name)
    return heard.status, text


def test_object_of_another_owner_is_answered_as_missing(wires: tuple[Wire, Wire]) -> None:
    mine, other = wires
    session = mine.session()
    model = mine.model(session)
    mine.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = mine.post("create_sampling_session", body)["sampling_session_id"]
    request = mine.post("asample", sample_json(sampler, 0))["request_id"]
    mine.result(request)
    there, nowhere = Ids(session, model, sampler, request), nobodys()
    for method, path, body in ASKED:
        found, missing = (ask(other, method, path, body, ids) for ids in (there, nowhere))
        assert alike(found, there) == alike(missing, nowhere), (method, path)
    assert (
        mine.send(f"training_runs/{model}/checkpoints/weights/a/archive", method="GET").status
        == 302
    )


def test_cancelling_sample_of_another_owner_has_no_effect(tmp_path: Path) -> None:
    with (
        serving(FakeEngine(step_delay=0.01), tmp_path) as url,
        closing(SqliteDatabase(tmp_path)) as store,
    ):
        mine, other = (Keyed(url, create_key(store, name, name)[1]) for name in ("ada", "bob"))
        body = {"session_id": mine.session(), "sampling_session_seq_id": 0, "base_model": "fake"}
        sampler = mine.post("create_sampling_session", body)["sampling_session_id"]
        long = sample_json(sampler, 0, sampling_params={"max_tokens": 30, "seed": 1})
        request = mine.post("asample", long)["request_id"]
        assert other.send("cancel_future", {"request_id": request}).status == 200
        assert len(mine.result(request)["sequences"][0]["tokens"]) == 30


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(FakeEngine(), tmp_path) as url:
        yield Wire(url)


def saved(wire: Wire, operation: str = "save_weights") -> tuple[str, str]:
    """A run, and the path of a checkpoint of it."""
    model = wire.model()
    return model, wire.run(operation, {"model_id": model, "path": "a", "seq_id": 1})["path"]


def files_of(tmp_path: Path, path: str) -> Path:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return tmp_path / "checkpoints" / run.replace(":", "_") / kind / name


@pytest.mark.parametrize("operation", ["save_weights", "save_weights_for_sampler"])
def test_failed_load_does_not_reveal_file_paths(wire: Wire, tmp_path: Path, operation: str) -> None:
    model, path = saved(wire, operation)
    directory = files_of(tmp_path, path)
    (directory / ".digests.json").write_text(json.dumps({"other": "x"}))
    (directory / "other").mkdir()
    told = loaded(wire, model, path)
    assert str(tmp_path) not in told
    assert "other of a is missing" in told


def loaded(wire: Wire, model: str, path: str) -> str:
    """Return the error of a failed load."""
    if "/weights/" in path:
        load = {"model_id": model, "path": path, "optimizer": False, "seq_id": 2}
        return str(wire.run("load_weights", load)["error"])
    body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 7, "model_path": path}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    streamed = wire.send("stream_sample", sample_json(sampler)).body.decode()
    drawn = str(wire.run("asample", sample_json(sampler))["error"])
    assert drawn in streamed.replace('\\"', '"')
    return drawn


def test_engine_that_names_a_file_is_not_repeated(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: FakeEngine, adapter: str, directory: Path, *, optimizer: bool) -> None:
        raise OSError(5, "Input/output error", str(directory / STATE))

    model, path = saved(wire)
    monkeypatch.setattr(FakeEngine, "load", broken)
    told = loaded(wire, model, path)
    assert "Input/output error" in told
    assert str(tmp_path) not in told


@pytest.mark.parametrize("operation", ["save_weights", "save_weights_for_sampler"])
def test_checkpoint_that_is_deleted_while_it_is_read_is_gone(
    wire: Wire, tmp_path: Path, operation: str
) -> None:
    model, path = saved(wire, operation)
    shutil.rmtree(files_of(tmp_path, path))
    assert loaded(wire, model, path) == f"{path} was deleted while it was read"


@pytest.mark.parametrize("moment", ["_pieces", "_digest", "_opened"])
def test_download_of_a_deleted_checkpoint_is_not_found(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    model, path = saved(wire)
    directory, original = files_of(tmp_path, path), getattr(exports, moment)

    def late(*args: Any) -> Any:
        shutil.rmtree(directory, ignore_errors=True)
        return original(*args)

    exports._digest.cache_clear()
    monkeypatch.setattr(exports, moment, late)
    address = wire.send(
        f"training_runs/{model}/checkpoints/weights/a/archive", method="GET"
    ).headers["location"]
    heard = wire.send(address.partition("/api/v1/")[2], method="GET")
    assert heard.status == 404
    assert "there is no checkpoint" in heard.json["detail"]


def test_download_that_has_begun_is_finished(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved(wire)
    directory, original = files_of(tmp_path, path), exports._respond

    def late(*args: Any) -> Any:
        shutil.rmtree(directory)
        return original(*args)

    monkeypatch.setattr(exports, "_respond", late)
    address = wire.send(
        f"training_runs/{model}/checkpoints/weights/a/archive", method="GET"
    ).headers["location"]
    heard = wire.send(address.partition("/api/v1/")[2], method="GET")
    assert heard.status == 200
    assert len(heard.body) == int(heard.headers["content-length"])
