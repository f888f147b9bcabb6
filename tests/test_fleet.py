"""A server over engines in other processes: workers that are killed cost nobody anything."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from supervision import files_of, run_loop
from support import Wire, pass_json, sample_json, serving, step_json, wait_until
from test_survival import Life, life, played, until
from tinkex import LocalBackend, ServiceClient
from tinkex.cluster.layout import ReplicaPlan, WorkersOption, make_engines, read_plan
from tinkex.cluster.link import CHUNK, Call, LogLine, News, Recipe, StaleEpochError
from tinkex.cluster.process import Role, WorkerProcess
from tinkex.cluster.processes import ProcessLink, StartProcess
from tinkex.cluster.remote import RemoteEngine
from tinkex.engine.api import Directory, EngineError, EngineLost
from tinkex.engine.fake import FakeEngine
from tinkex.errors import ConfigurationError
from tinkex.server.server_limits import Limits
from tinkex.server.workers import fleet as fleets
from tinkex.server.workers.fleet import Fleet
from tinkex.types.training import LoraConfig

SLOW = Recipe("fleet_engines:slow")
KIND = os.environ.get("TINKEX_TEST_WORKERS", "local")
"""`make cluster` runs these tests over Ray too."""


def make_fleet(data_dir: Path, *recipes: Recipe, roles: tuple[Role, ...] = ()) -> Fleet:
    """A fleet of a worker for each recipe, named a, b, …"""
    roles = roles or tuple("both" for _ in recipes)
    plans = [
        ReplicaPlan("abcdefgh"[number], recipe, roles[number])
        for number, recipe in enumerate(recipes)
    ]
    option = WorkersOption.parse("local:1" if KIND == "local" else KIND)
    return Fleet(make_engines(option, plans, data_dir))


def gated(folder: Path, **options: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    return Recipe("fleet_engines:gated", options={"folder": str(folder), **options})


def pid_of(engine: RemoteEngine) -> int:
    assert engine.process.info is not None
    return int(engine.process.info.place.rpartition(" ")[2])


def kill(engine: RemoteEngine) -> None:
    """Kill a worker's process; return when the server knows."""
    os.kill(pid_of(engine), signal.SIGKILL)
    wait_until(lambda: engine.process.lost is not None)


def engines_of(fleet: Fleet) -> dict[str, RemoteEngine]:
    return {engine.name: engine for engine in fleet._engines}


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "FIRST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with serving(FakeEngine(), data_dir) as url:
        given = run_loop(url, "tinkex", "fake", 8)
    return given, files_of(data_dir)


def page(url: str, name: str) -> tuple[int, str]:
    """A page of the server beside its API."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    with closing(connection):
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        return response.status, response.read().decode()


class Killer(threading.Thread):
    """Kills the workers of a fleet, one after the other, while the block lasts."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        super().__init__(daemon=True)
        self.kills, self._fleet, self._seconds = 0, fleet, seconds
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(self._seconds):
            engine = self._fleet._engines[self.kills % len(self._fleet._engines)]
            if engine.process.lost is None and engine.process.info is not None:
                os.kill(pid_of(engine), signal.SIGKILL)
                self.kills += 1

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()


# ── the same results ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("K2")
@pytest.mark.parametrize("client", ["tinkex", pytest.param("tinker", marks=pytest.mark.slow)])
def test_fleet_gives_the_same_bits_as_one_process(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, client: str
) -> None:
    with serving(make_fleet(tmp_path, SLOW, SLOW), tmp_path) as url:
        assert run_loop(url, client, "fake", 8) == undisturbed[0]
    assert files_of(tmp_path) == undisturbed[1]


@pytest.mark.covers("K5")
@pytest.mark.timeout(180)
def test_dozen_kills_of_workers_lose_and_double_nothing(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    kills = 0
    for number in range(6):
        data_dir = tmp_path / str(number)
        fleet = make_fleet(data_dir, SLOW, SLOW)
        with serving(fleet, data_dir) as url, Killer(fleet, 0.4) as killer:
            assert run_loop(url, "tinkex", "fake", 8) == undisturbed[0]
        assert files_of(data_dir) == undisturbed[1]
        kills += killer.kills
        if kills >= 12:
            break
    assert kills >= 6


@pytest.mark.covers("K2")
@pytest.mark.timeout(180)
def test_killed_worker_of_the_real_engine_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    recipe = Recipe("torch", {"tinkex/tiny": ""}, "cpu", threads=1)
    told = []
    for name, deaths in (("quiet", 0), ("killed", 1)):
        fleet = make_fleet(tmp_path / name, recipe)
        with serving(fleet, tmp_path / name) as url:
            wire = Wire(url)
            model = wire.model(base_model="tinkex/tiny")
            results = [wire.run("forward_backward", pass_json(model, 1))]
            if deaths:
                kill(fleet._engines[0])
            results += [
                wire.run("forward_backward", pass_json(model, 2)),
                wire.run("optim_step", step_json(model, 3)),
                wire.run("forward_backward", pass_json(model, 4)),
            ]
            told.append(results)
    assert told[0] == told[1]


@pytest.mark.covers("K3")
def test_two_runs_train_at_the_same_time_on_two_workers(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    fleet = make_fleet(tmp_path / "data", *map(gated, folders))
    with serving(fleet, tmp_path / "data") as url:
        wire = Wire(url)
        models = [wire.model(), wire.model()]
        for folder in folders:
            (folder / "forward_backward").touch()
        ids = [wire.post("forward_backward", pass_json(m, 1))["request_id"] for m in models]
        for folder in folders:  # both have begun, and neither has ended
            wait_until((folder / "called-forward_backward").exists)
        for folder in folders:
            (folder / "forward_backward").unlink()
        assert all("metrics" in wire.result(request_id) for request_id in ids)


@pytest.mark.covers("K4")
def test_checkpoint_of_one_worker_samples_the_same_on_another(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW, SLOW)
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        wire.run("forward_backward", pass_json(model, 1))
        wire.run("optim_step", step_json(model, 2))
        saved = wire.run("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "x"})
        body = {
            "session_id": model.partition(":")[0],
            "sampling_session_seq_id": 7,
            "model_path": saved["path"],
        }
        sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
        first = wire.run("asample", sample_json(sampler, 0))
        home = next(one["name"] for one in wire.get("cluster")["workers"] if one["weights"])
        wire.post("cluster/drain", {"node": home})
        again = wire.run("asample", sample_json(sampler, 1))
        assert again["sequences"] == first["sequences"]
        having = [one["name"] for one in wire.get("cluster")["workers"] if one["weights"]]
        assert having
        assert having != [home]


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("K6")
def test_requests_wait_and_say_why_while_there_is_no_worker(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", gated(folder))
    limits = Limits(poll_seconds=0.2)
    with serving(fleet, tmp_path / "data", limits=limits) as url:
        wire = Wire(url)
        model = wire.model()
        first = wire.run("forward_backward", pass_json(model, 1))
        (folder / "no-start").touch()
        kill(fleet._engines[0])
        request_id = wire.post("forward_backward", pass_json(model, 2))["request_id"]
        heard = wire.send("retrieve_future", {"request_id": request_id})
        assert heard.status == 408
        assert heard.json["queue_state"] == "paused_capacity"
        assert "waiting for a worker: worker 'a' is gone: " in heard.json["queue_state_reason"]
        status, ready = page(url, "readyz")
        assert (status, json.loads(ready)["status"]) == (503, "not ready")
        (folder / "no-start").unlink()
        second = wire.result(request_id)
        assert "metrics" in second
        assert wire.result(f"{model}:1") == first


@pytest.mark.covers("K6")
def test_runs_of_a_worker_that_is_lost_for_good_move(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", gated(folder), SLOW)
    with serving(fleet, tmp_path / "data") as url:
        wire = Wire(url)
        models = [wire.model(), wire.model()]
        trained = [wire.run("forward_backward", pass_json(model, 1)) for model in models]
        assert trained[0] == trained[1]
        (folder / "no-start").touch()
        kill(engines_of(fleet)["a"])
        stepped = [wire.run("optim_step", step_json(model, 2)) for model in models]
        assert stepped[0] == stepped[1]
        runs = {one["name"]: one["runs"] for one in wire.get("cluster")["workers"]}
        assert runs == {"a": 0, "b": 2}


@pytest.mark.covers("K6")
@pytest.mark.parametrize(
    "method", ["forward_backward", "optim_step", "save", "load", "snapshot", "create"]
)
def test_operation_that_a_death_interrupts_is_carried_out_once(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", gated(folder))

    def calls(wire: Wire, model: str) -> list[Any]:
        saved = {"model_id": model, "seq_id": 3, "path": "x"}
        nameless = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
        loaded = {"model_id": model, "seq_id": 4, "optimizer": True}
        asked = [
            ("forward_backward", pass_json(model, 1)),
            ("optim_step", step_json(model, 2)),
            ("save_weights", saved),
            ("load_weights", loaded | {"path": f"tinker://{model}/weights/x"}),
            ("save_weights_for_sampler", nameless),
            ("forward_backward", pass_json(model, 6)),
        ]
        ids = [wire.post(path, body)["request_id"] for path, body in asked]
        if method != "create" and (folder / method).exists():
            wait_until((folder / f"called-{method}").exists)
            kill(fleet._engines[0])
            (folder / method).unlink()
        results = [wire.result(request_id) for request_id in ids]
        sampler = results[4]["sampling_session_id"]
        return [*results[:2], results[5], wire.run("asample", sample_json(sampler))["sequences"]]

    with serving(fleet, tmp_path / "data") as url:
        wire = Wire(url)
        quiet = calls(wire, wire.model())
        (folder / f"called-{method}").unlink(missing_ok=True)
        (folder / method).touch()
        if method == "create":
            body = {"session_id": wire.session(), "model_seq_id": 0, "base_model": "fake"}
            body["lora_config"] = {"rank": 4}
            made = wire.post("create_model", body)["request_id"]
            wait_until((folder / "called-create").exists)
            kill(fleet._engines[0])
            (folder / method).unlink()
            model = wire.result(made)["model_id"]
        else:
            model = wire.model()
        assert calls(wire, model) == quiet


def test_stream_goes_on_after_the_death_of_its_worker(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, Recipe("fleet_engines:slow", options={"delay": 0.02}))
    with (
        LocalBackend(data_dir=tmp_path, engine=fleet) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        from tinkex import ModelInput, SamplingParams

        sampler = service.create_sampling_client(base_model="fake").result()
        params = SamplingParams(max_tokens=30, seed=5)
        prompt = ModelInput.from_ints([1, 2, 3])
        whole = sampler.sample(prompt, 1, params).result().sequences[0]
        tokens, deaths = [], 0
        for chunk in sampler.sample_stream(prompt, params):
            tokens += [chunk.token_id] if chunk.token_id is not None else []
            if len(tokens) == 5 and not deaths:
                kill(fleet._engines[0])
                deaths += 1
        assert tokens == list(whole.tokens)


def test_custom_loss_is_there_after_the_death_of_its_worker(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW)
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        session = model.partition(":")[0]
        body: dict[str, Any] = {"session_id": session, "custom_loss_seq_id": 1, "name": "x"}
        body |= {"inputs": [], "graph": {"nodes": []}}
        loss_id = wire.run("create_custom_loss", body)["loss_id"]
        work = pass_json(model, 1)
        work["forward_backward_input"] |= {
            "loss_fn": "custom",
            "loss_fn_config": {"loss_id": loss_id},
        }
        first = wire.run("forward_backward", work)
        kill(fleet._engines[0])
        wait_until(lambda: fleet._engines[0].process.lost is None)
        assert wire.run("forward_backward", work | {"seq_id": 2}) == first


@pytest.mark.covers("K7")
def test_host_refuses_calls_of_an_older_server(tmp_path: Path) -> None:
    [engine] = make_fleet(tmp_path, SLOW)._engines
    engine.connect(5)
    engine.create("x", "fake", LoraConfig(rank=4))
    link = engine.process.reach()
    for epoch in (4, 6):
        with pytest.raises(StaleEpochError, match="belongs to epoch 5"):
            link.call(Call(epoch, "drop_gradients", ("x",))).result(10)
    with pytest.raises(StaleEpochError):
        link.call(Call(5, "reset", (None, ""))).result(10)
    link.call(Call(6, "reset", (None, ""))).result(10)
    with pytest.raises(StaleEpochError, match="a call of epoch 5 changes nothing"):
        engine.create("y", "fake", LoraConfig(rank=4))
    # what the older server made is gone
    with pytest.raises(EngineError, match="there is no adapter 'x'"):
        link.call(Call(6, "drop_gradients", ("x",))).result(10)
    engine.process.close()


@pytest.mark.covers("K7")
@pytest.mark.skipif(KIND != "local", reason="a stopped process is given up by its link")
def test_process_that_was_given_up_changes_nothing_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombies: list[ProcessLink] = []
    monkeypatch.setattr(ProcessLink, "close", lambda link: zombies.append(link))
    fleet = make_fleet(tmp_path, SLOW)
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        os.kill(zombie := pid_of(fleet._engines[0]), signal.SIGSTOP)
        waiting = wire.post("forward_backward", pass_json(model, 1))["request_id"]
        fleet._engines[0].process.give_up("it has not answered")
        result = wire.result(waiting)
        assert pid_of(fleet._engines[0]) != zombie
        os.kill(zombie, signal.SIGCONT)
        stepped = wire.run("optim_step", step_json(model, 2))
        time.sleep(0.2)
        assert wire.result(waiting) == result
        assert stepped["metrics"]["grad_norm:mean"] > 0
        assert wire.run("optim_step", step_json(model, 3))["metrics"]["grad_norm:mean"] == 0
    monkeypatch.undo()
    for link in zombies:
        link.close()


@pytest.mark.covers("K7")
def test_news_of_a_process_that_was_given_up_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[Any] = []

    def launch(on_news: Any, on_lost: Any) -> Any:
        listeners.append(on_news)
        return StartProcess(SLOW)(on_news, on_lost)

    process = WorkerProcess("a", launch)
    process.connect(1)
    process.give_up("it has not answered")
    process.connect(2)
    listeners[0](News(steps={"training": 1}, logs=[LogLine("tinkex.server", 40, "of a zombie")]))
    assert not process.news
    assert "of a zombie" not in caplog.text
    listeners[1](News(logs=[LogLine("tinkex.server", 40, "of the new one")]))
    assert "[a] of the new one" in caplog.text
    process.close()


@pytest.mark.covers("K8")
@pytest.mark.skipif(KIND != "local", reason="only a process can be stopped without a death")
def test_worker_that_hangs_delays_no_other(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW, SLOW)
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        stuck, free = wire.model(), wire.model()
        hung = pid_of(engines_of(fleet)["a"])
        os.kill(hung, signal.SIGSTOP)
        try:
            waiting = wire.post("optim_step", step_json(stuck, 1))["request_id"]
            for number in range(1, 20):
                assert "metrics" in wire.run("forward_backward", pass_json(free, number))
        finally:
            os.kill(hung, signal.SIGCONT)
        assert "metrics" in wire.result(waiting)


def test_process_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "PING_SECONDS", 0.05)
    monkeypatch.setattr(fleets, "SILENT_SECONDS", 0.3)
    fleet = make_fleet(tmp_path, SLOW)
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        os.kill(hung := pid_of(fleet._engines[0]), signal.SIGSTOP)
        assert "metrics" in wire.run("forward_backward", pass_json(model, 1))
        assert pid_of(fleet._engines[0]) != hung


def test_run_is_made_again_once_more_when_its_second_worker_dies(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", SLOW, gated(folder))
    engines = engines_of(fleet)

    async def scenario() -> None:
        async with life(tmp_path / "data", fleet) as server:
            model = await server.model()
            first = await server.run("forward_backward", pass_json(model, 1))
            (folder / "create").touch()
            await asyncio.to_thread(kill, engines["a"])
            await until((folder / "called-create").exists)  # it is being made on the other one
            await asyncio.to_thread(kill, engines["b"])
            (folder / "create").unlink()
            second = await server.run("forward_backward", pass_json(model, 2))
            assert second["loss_fn_outputs"] == first["loss_fn_outputs"]
            assert await server.result(f"{model}:1") == first

    played(scenario)


# ── what is made again is compared ────────────────────────────────────────────────────────────────


def test_result_that_comes_out_otherwise_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with life(tmp_path, make_fleet(tmp_path, SLOW)) as server:
            model = await server.model()
            told = await server.run("forward_backward", pass_json(model, 1))
            await server.state.replay.rebuild(model)
            await _settled(server, model)
            assert server.state.promises.differences == 0
            promise = server.state.promises.get(f"{model}:1")
            assert promise is not None
            promise.result.metrics["loss:sum"] += 1.0
            await server.state.replay.rebuild(model)
            await _settled(server, model)
            assert server.state.promises.differences == 1
            assert f"{model}:1 has come out otherwise" in caplog.text
            again = await server.result(f"{model}:1")  # what was told never changes
            assert again["metrics"]["loss:sum"] == told["metrics"]["loss:sum"] + 1.0

    played(scenario)


async def _settled(server: Life, model: str) -> None:
    await until(lambda: not server.state.runs[model].again)


# ── the head ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("K10")
def test_files_travel_in_pieces_where_the_data_directory_is_not_shared(tmp_path: Path) -> None:
    engine = RemoteEngine(WorkerProcess("a", StartProcess(Recipe("fleet_engines:slow"))))
    engine.connect(1)
    engine.create("x", "fake", LoraConfig(rank=4))
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    back.mkdir()
    engine.writer("x", optimizer=True).write(Directory(there))
    assert [path.name for path in there.iterdir()] == ["fake.json"]
    (there / "large").write_bytes(os.urandom(CHUNK + 17))
    engine.load("x", there, optimizer=True)
    engine.load_sampler("s", "fake", there)
    engine.sampler_writer("s").write(Directory(back))
    assert (back / "fake.json").exists()
    engine.process.close()


@pytest.mark.covers("K13")
def test_metrics_readiness_and_status_name_the_worker(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", gated(folder), SLOW)
    with serving(fleet, tmp_path / "data") as url:
        wire = Wire(url)
        wire.model()
        (folder / "no-start").touch()
        kill(engines_of(fleet)["a"])
        about = {one["name"]: one for one in wire.get("cluster")["workers"]}
        assert [about[name]["state"] for name in "ab"] == ["lost", "ready"]
        assert about["a"]["reason"].startswith("worker 'a' is gone: ")
        assert about["b"]["epoch"] > 1_000_000
        status, ready = page(url, "readyz")
        assert status == 200
        assert list(json.loads(ready)["workers"]) == ["a"]
        metrics = page(url, "metrics")[1]
        assert 'tinkex_worker_up{replica="a"} 0' in metrics
        assert 'tinkex_worker_up{replica="b"} 1' in metrics


@pytest.mark.covers("K13")
def test_log_of_a_worker_is_in_the_log_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gate"
    fleet = make_fleet(tmp_path / "data", gated(folder, longest_prompt=2))
    with serving(fleet, tmp_path / "data") as url:
        wire = Wire(url)
        wire.model()
        (folder / "no-start").touch()
        kill(fleet._engines[0])
        wait_until(lambda: "[a] the engine cannot be made" in caplog.text)
        (folder / "no-start").unlink()
        wait_until(lambda: fleet._engines[0].process.lost is None)


# ── plans and messages ────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("K11")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modles = 1", "unknown key 'modles'.*did you mean 'models'"),
        ("", "names no model"),
        ('[models."x"]\ntrainer = {}', "unknown key 'trainer'.*did you mean 'trainers'"),
        ('[models."x"]\ntrainers = 3', "trainers must be a table, got 3"),
        ('[models."x".trainers]\nreplicas = 0', "nothing could be trained"),
        ('[models."x".trainers]\nreplicas = "2"', "must be a whole number, got '2'"),
        ('[models."x".trainers]\ngpus = 2', "gpus must be between 0 and 1, got 2"),
        ('[models."x".samplers]\nkind = "vllm"', "kind 'vllm' is not supported"),
        ('[models."x"', "is not TOML"),
    ],
)
def test_mistake_in_a_cluster_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"(?s){told}"):
        read_plan(path)


@pytest.mark.covers("K11")
def test_workers_option_of_another_form_is_refused() -> None:
    for text in ("local:0", "local:x", "raj", "ray:", "ray:host", "8"):
        with pytest.raises(ConfigurationError, match="not understood"):
            WorkersOption.parse(text)


@pytest.mark.covers("K11")
def test_worker_that_cannot_start_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    recipe = gated(folder)
    (folder / "no-start").touch()
    fleet = make_fleet(tmp_path / "data", SLOW, recipe)
    with pytest.raises(
        EngineError, match=r"worker 'b': the engine cannot be made: .*no GPU is free"
    ):
        fleet.connect(1)


@pytest.mark.covers("K11")
def test_worker_with_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.cluster.process.__version__", "99.0")
    fleet = make_fleet(tmp_path, SLOW)
    with pytest.raises(EngineError, match=r"runs tinkex .*, this server 99\.0; install the same"):
        fleet.connect(1)


@pytest.mark.covers("K11")
def test_different_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW, SLOW)
    fleet.connect(1)
    engine = engines_of(fleet)["b"]
    engine.process.models = [_other(model) for model in engine.models()]
    with pytest.raises(EngineError, match="'a' and 'b' have different weights of 'fake'"):
        fleets._check_digests(fleet._engines)
    fleet.close()


def _other(model: Any) -> Any:
    from dataclasses import replace

    return replace(model, digest="other")


def test_last_worker_of_a_model_is_not_drained(tmp_path: Path) -> None:
    with serving(make_fleet(tmp_path, SLOW), tmp_path) as url:
        heard = Wire(url).send("cluster/drain", {"node": "a"})
        assert heard.status == 409
        assert "the last one for 'fake'" in heard.json["detail"]
        assert Wire(url).send("cluster/drain", {"node": "z"}).status == 404


def test_samplers_have_no_runs_and_trainers_sample_when_they_must(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW, SLOW, roles=("trainer", "sampler"))
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        for _ in range(3):
            wire.model()
        body = {"session_id": wire.session(), "sampling_session_seq_id": 1, "base_model": "fake"}
        sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
        wire.run("asample", sample_json(sampler))
        about = {one["name"]: one for one in wire.get("cluster")["workers"]}
        assert [about[name]["runs"] for name in "ab"] == [3, 0]
        assert [about[name]["weights"] for name in "ab"] == [0, 1]


def test_nameless_sampler_of_a_trainer_is_drawn_by_a_sampler(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, SLOW, SLOW, roles=("trainer", "sampler"))
    with serving(fleet, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        session, drawn = model.partition(":")[0], []
        for number in range(2):  # saved twice under one id: the second time with other weights
            wire.run("forward_backward", pass_json(model, 3 * number + 1))
            wire.run("optim_step", step_json(model, 3 * number + 2))
            saved = {"model_id": model, "seq_id": 3 * number + 3, "sampling_session_seq_id": 0}
            sampler = wire.run("save_weights_for_sampler", saved)["sampling_session_id"]
            drawn.append(wire.run("asample", sample_json(sampler, number))["sequences"])
            about = {one["name"]: one for one in wire.get("cluster")["workers"]}
            assert [about[name]["weights"] for name in "ab"] == [0, 1]
        assert drawn[0] != drawn[1]
        engine = engines_of(fleet)["b"]
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        wait_until(lambda: wire.get("cluster")["workers"][1]["weights"] == 0)
        assert engine.process.lost is None


def test_call_after_a_death_names_the_worker(tmp_path: Path) -> None:
    [engine] = make_fleet(tmp_path, SLOW)._engines
    engine.connect(1)
    kill(engine)
    with pytest.raises(EngineLost, match="worker 'a' is gone: "):
        engine.create("x", "fake", LoraConfig(rank=4))
    engine.process.close()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    from multiprocessing import active_children

    assert not active_children()


# ── Ray ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("K12")
@pytest.mark.skipif(KIND == "local", reason="make cluster has Ray")
def test_cluster_off_loopback_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_link = pytest.importorskip("tinkex.cluster.ray_link")
    monkeypatch.setattr(ray_link.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigurationError, match=r"10\.1\.2\.3:6379 is not on loopback"):
        ray_link.join("10.1.2.3:6379")


@pytest.mark.covers("K11")
@pytest.mark.skipif(KIND != "local", reason="make cluster has Ray")
def test_ray_that_is_not_installed_is_named(tmp_path: Path) -> None:
    plans = [ReplicaPlan("a", SLOW)]
    with pytest.raises(ConfigurationError, match=r"(?s)Ray cannot be imported.*tinkex\[ray\]"):
        make_engines(WorkersOption.parse("ray"), plans, tmp_path)


@pytest.mark.covers("K11")
@pytest.mark.skipif(KIND == "local", reason="make cluster has Ray")
def test_worker_that_finds_no_gpu_is_named(tmp_path: Path) -> None:
    fleet = Fleet(
        make_engines(WorkersOption.parse(KIND), [ReplicaPlan("a", SLOW, gpus=1)], tmp_path)
    )
    with pytest.raises(EngineError, match="worker 'a' needs 1 GPU, and the cluster has 0"):
        fleet.connect(1)


@pytest.mark.covers("K1")
def test_help_of_serve_imports_neither_ray_nor_links() -> None:
    code = (
        "import sys, tinkex.__main__\n"
        "from click.testing import CliRunner\n"
        "from tinkex.cli.main import cli\n"
        "assert '--workers' in CliRunner().invoke(cli, ['serve', '--help']).output\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('ray', 'torch')\n"
        "       or name.startswith('tinkex.cluster')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
