"""In-flight samplers on a server: sessions follow their run's newest save, also after a restart;
snapshots do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support import MODEL, Wire, pass_json, sample_json, step_json
from test_streams_server import Reader, asking, events_of, read_all, sampler_of, serve
from test_survival import Held, Life, killed, life, played, until
from tinkex.client.http.exchange import HttpRequest
from tinkex.engine.fake import FakeEngine
from tinkex.server.runs import snapshot
from tinkex.server.server_limits import Limits

__all__ = ["serve"]  # a fixture

Serve = Callable[..., Wire]
OFFICIAL = """
import os
import pickle
import tinker
from support import MODEL, make_data, train

prompt = tinker.ModelInput.from_ints([7 + number % 50 for number in range(100)])
params = tinker.SamplingParams(max_tokens=5, seed=3)

def drawn(sampler):
    result = sampler.sample(prompt, num_samples=2, sampling_params=params).result(60)
    return [sequence.logprobs for sequence in result.sequences], result.prompt_cache_hit_tokens

with tinker.ServiceClient() as service:
    trainer = service.create_lora_training_client(MODEL, rank=4).result()
    first = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = trainer.save_weights_and_get_sampling_client().result()
    before = drawn(first)
    assert before[1] == 0
    assert drawn(snapshot) == before
    train(trainer, tinker, make_data(tinker), 2)
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    after = drawn(first)
    assert after[0] != before[0]
    assert after[1] == 64
    assert drawn(pickle.loads(pickle.dumps(first)))[1] == 64
    assert drawn(second)[1] == 0
    assert drawn(snapshot) == (before[0], 64)
print("in-flight sampling done with", tinker.__version__, flush=True)
os._exit(0)  # the official client may abort at the end of a program that has unpickled a sampler
"""


class Run:
    """A training run whose saves and steps are numbered by themselves."""

    def __init__(self, life: Life, model: str, number: int = 0, sessions: int = 0) -> None:
        self.life, self.model, self.number, self.sessions = life, model, number, sessions
        self.session = model.partition(":")[0]

    async def step(self) -> None:
        await self.life.run("forward_backward", pass_json(self.model, self.number + 1))
        await self.life.run("optim_step", step_json(self.model, self.number + 2, learning_rate=1))
        self.number += 2

    def saving(self, kind: str | None = "inflight", **fields: Any) -> dict[str, Any]:
        self.number += 1
        body = {"model_id": self.model, "seq_id": self.number} | ({"kind": kind} if kind else {})
        if "path" not in fields:
            body["sampling_session_seq_id"] = self.sessions
            self.sessions += 1
        return body | fields

    async def save(self, kind: str | None = "inflight") -> str:
        saved = await self.life.run("save_weights_for_sampler", self.saving(kind))
        return str(saved["sampling_session_id"])

    async def sample(self, sampler: str, number: int, **fields: Any) -> dict[str, Any]:
        """A sample's only sequence."""
        result = await self.life.run("asample", sample_json(sampler, number, **fields))
        sequence: dict[str, Any] = result["sequences"][0]
        return sequence


# ── following ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U41", "U47", "U50", "U55")
def test_sessions_follow_the_newest_save_and_snapshots_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            run = Run(server, await server.model())
            first, snapshot, absent = (
                await run.save(),
                await run.save("snapshot"),
                await run.save(None),
            )
            before = [await run.sample(sampler, 1) for sampler in (first, snapshot, absent)]
            assert before[0]["weights_versions"] == [1, 1, 1]
            assert before[0]["logprobs"] == before[1]["logprobs"]
            assert before[1] == before[2]
            assert "weights_versions" not in before[1]
            await run.step()
            second = await run.save()
            assert len({first, second, snapshot, absent}) == 4
            after = [await run.sample(sampler, 2) for sampler in (first, second)]
            assert after[0] == after[1]
            assert after[0]["weights_versions"] == [2, 2, 2]
            assert after[0]["logprobs"] != before[0]["logprobs"]
            assert [await run.sample(sampler, 3) for sampler in (snapshot, absent)] == before[1:]
            told = json.loads(
                (
                    await server._exchange.send(HttpRequest("GET", f"/api/v1/samplers/{first}", {}))
                ).body
            )
            assert told == {"sampler_id": first, "base_model": "fake"}

    played(scenario)


@pytest.mark.covers("U48")
def test_save_moves_running_samples_and_waits_for_none(serve: Serve) -> None:
    wire = serve(FakeEngine(step_delay=0.01))
    model = wire.model()

    def save(number: int) -> str:
        body = {
            "model_id": model,
            "seq_id": number,
            "sampling_session_seq_id": number,
            "kind": "inflight",
        }
        return str(wire.run("save_weights_for_sampler", body)["sampling_session_id"])

    sampler = save(1)
    alone = wire.post("asample", asking(sampler, 300))["request_id"]
    reader = Reader(wire, asking(sampler, 300))
    with closing(reader.connection):
        stream = iter(reader)
        text = [next(stream)]
        wire.run("forward_backward", pass_json(model, 2))
        wire.run("optim_step", step_json(model, 3))
        save(4)
        text += stream
    *tokens, end = events_of(text)
    assert end["total_tokens"] == 300
    sequence = wire.result(alone)["sequences"][0]
    for versions in ([event["weights_version"] for event in tokens], sequence["weights_versions"]):
        assert len(versions) == 300
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (1, 2)  # the save was over before the sample was
    assert sequence["stop_reason"] == "length"


@pytest.mark.covers("U51")
def test_inflight_save_refuses_a_path_a_time_to_live_and_other_kinds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            run = Run(server, await server.model())
            for fields in (
                {"path": "name"},
                {"ttl_seconds": 3600},
                {"path": "name", "ttl_seconds": 3600},
            ):
                answer = await server.run("save_weights_for_sampler", run.saving(**fields))
                assert answer["category"] == "user"
                assert f"kind 'inflight' takes no {next(iter(fields))}" in answer["error"]
            status, answer = await server.send("save_weights_for_sampler", run.saving("moving"))
            assert status in (400, 422)
            assert "kind" in json.dumps(answer)
            sampler = await run.save()  # none of the numbers is waited for
            assert (await run.sample(sampler, 1))["weights_versions"] == [1, 1, 1]

    played(scenario)


@pytest.mark.covers("U55")
def test_replaced_versions_are_freed_in_memory_and_on_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with life(tmp_path / "a", engine, Limits(snapshots=3)) as server:
            run = Run(server, await server.model())
            samplers = [await run.save() for _ in range(8)]
            await next(iter(server.state.workers)).run(lambda: None)
            weights = [name for name in engine._samplers if ":inflight:" in name]
            assert weights == [f"{run.model}:inflight:8"]
            assert not list((tmp_path / "a").glob("snapshots/*"))
            # the target has to make room
            snapshots = [await run.save("snapshot") for _ in range(4)]
            await next(iter(server.state.workers)).run(lambda: None)
            assert [name for name in engine._samplers if ":inflight" in name] == []
            for number, sampler in enumerate(samplers + snapshots):
                drawn = await run.sample(sampler, number)
                assert drawn.get("weights_versions", [8] * 3) == [8] * 3
            samplers.append(await run.save())
            for number, sampler in enumerate(samplers):
                assert (await run.sample(sampler, 100 + number))["weights_versions"] == [9] * 3
            await server.post(f"sessions/{run.session}/finish", {"reason": {"type": "success"}})
            await next(iter(server.state.workers)).run(lambda: None)
            assert engine._samplers == {}
            assert engine._targets == {}
            assert server.state.samplers.targets.versions == {}
            assert (await server.send("asample", sample_json(samplers[0], 999)))[0] == 410

    played(scenario)


@pytest.mark.covers("U55")
def test_weights_that_make_room_while_a_sample_runs_are_loaded_for_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(samplers=1, snapshots=1)) as server:
            run = Run(server, await server.model())
            inflight, other = await run.save(), await run.save("snapshot")
            drawn = await run.sample(inflight, 1)
            for number in range(2, 6):
                assert (await run.sample(other, number))["logprobs"] == drawn["logprobs"]
                assert await run.sample(inflight, number) == drawn
                last = await run.save("snapshot")
                assert (await run.sample(last, number))["logprobs"] == drawn["logprobs"]

    played(scenario)


@pytest.mark.covers("U55")
def test_sampler_that_is_made_anew_is_not_dropped_as_loaded_weights_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(samplers=1, snapshots=1)) as server:
            run = Run(server, await server.model())
            first, second = await run.save("snapshot"), await run.save("snapshot")
            await run.sample(first, 1)  # it had made room, and is loaded
            run.sessions = 0
            assert await run.save("snapshot") == first
            drawn = await run.sample(second, 1)  # it has made room for that, and is loaded
            assert await run.sample(first, 2) == drawn

    played(scenario)


@pytest.mark.covers("U47")
def test_session_that_is_made_anew_under_an_id_is_the_new_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            run = Run(server, await server.model())
            first = await run.save("snapshot")
            await run.step()
            run.sessions = 0
            assert await run.save() == first
            inflight = await run.sample(first, 1)
            assert inflight["weights_versions"] == [1] * 3
            await run.step()
            run.sessions = 0
            assert await run.save("snapshot") == first
            snapshot = await run.sample(first, 2)
            assert "weights_versions" not in snapshot
            assert snapshot["logprobs"] != inflight["logprobs"]

    played(scenario)


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U47", "U55")
@pytest.mark.parametrize("where", ["journal", "state", "unloaded"])
def test_target_and_floors_outlive_a_killed_server(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the requests in the journal, from weights beside a state, and from those of a run that
    was let go."""

    async def in_force(number: int, place: Path = tmp_path / "a") -> None:
        await until(
            lambda: [path.name for path in place.glob("runs/*/state-*")] == [f"state-{number}"]
        )

    if where == "state":
        monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 1)
        monkeypatch.setattr(snapshot, "STATE_REST", 0)

    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            run = Run(first, await first.model())
            samplers = [await run.save()]
            await run.step()
            if where == "state":
                await in_force(run.number)
            samplers += [await run.save(), await run.save("snapshot")]
            if where == "state":
                await run.step()
                await in_force(run.number)
                assert [
                    path.name.rpartition("_")[2]
                    for path in (tmp_path / "a").glob("snapshots/*inflight*")
                ] == ["2"]
            if where == "unloaded":
                await first.run("unload_model", {"model_id": run.model})
            drawn = [await run.sample(sampler, 1) for sampler in samplers]
            assert drawn[0]["weights_versions"] == [2] * 3
            image = killed(tmp_path / "a")
        async with life(image) as second:
            run.life = second
            assert [await run.sample(sampler, 2) for sampler in samplers] == drawn
            if where == "unloaded":
                return
            await run.step()
            if where == "state":
                await in_force(run.number, image)
            samplers.append(await run.save())
            assert (await run.sample(samplers[0], 3))["weights_versions"] == [3] * 3
            drawn = [await run.sample(sampler, 4) for sampler in samplers]
            image = killed(image)
        async with life(image) as third:
            run.life = third
            assert [await run.sample(sampler, 5) for sampler in samplers] == drawn

    played(scenario)


@pytest.mark.covers("U47")
def test_rebuilt_run_never_serves_an_older_version(tmp_path: Path) -> None:
    """The second save of three is met again while the third waits: even the first session waits for
    the third."""
    held = Held("forward_backward")
    held.gate.set()

    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            run = Run(first, await first.model())
            samplers = [await run.save(), await run.save()]
            await run.step()
            samplers.append(await run.save())
            drawn = await run.sample(samplers[0], 1)
            image = killed(tmp_path / "a")
        held.gate.clear()
        async with life(image, FakeEngine(fail=held)) as second:
            run.life = second
            await second.submit("forward_backward", pass_json(run.model, run.number + 1))
            held.begun.wait(20)
            assert run.model not in second.state.samplers.targets.versions
            held.gate.set()
            assert await run.sample(samplers[0], 2) == drawn
            assert drawn["weights_versions"] == [3] * 3

    played(scenario)


# ── what else clients of 0.38 ask for ─────────────────────────────────────────────────────────────


@pytest.mark.covers("U42", "U43")
@pytest.mark.parametrize("optimizer", [True, False])
def test_get_info_answers_for_created_and_for_loaded_models(serve: Serve, optimizer: bool) -> None:
    wire = serve(FakeEngine())
    session = wire.session()
    model = wire.model(session, rank=6)
    info = wire.post("get_info", {"model_id": model})
    assert (info["model_data"]["model_name"], info["lora_rank"], info["model_id"]) == (
        "fake",
        6,
        model,
    )
    for number in (1, 3):
        wire.run("forward_backward", pass_json(model, number))
        wire.run("optim_step", step_json(model, number + 1))
    path = wire.run("save_weights", {"model_id": model, "seq_id": 5, "path": "saved"})["path"]
    body = {"session_id": session, "model_seq_id": 3, "path": path, "optimizer": optimizer}
    loaded = wire.run("load_weights", body)
    assert loaded["model_id"] == f"{session}:train:3"
    told = wire.post("get_info", {"model_id": loaded["model_id"]})
    assert told == info | {"model_id": loaded["model_id"]}
    engine_knows = wire.run(
        "save_weights", {"model_id": loaded["model_id"], "seq_id": 1, "path": "again"}
    )
    assert "path" in engine_knows
    missing = wire.send("get_info", {"model_id": f"{session}:train:9"})
    assert missing.status == 404


@pytest.mark.covers("U43")
@pytest.mark.parametrize("optimizer", [True, False])
def test_model_made_of_a_checkpoint_has_its_rank_its_flags_and_its_optimizer_if_asked(
    server_url: str, optimizer: bool
) -> None:
    wire = Wire(server_url)
    session = wire.session()
    lora = {"rank": 3, "train_unembed": False, "train_attn": False}
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
    model = wire.run("create_model", body)["model_id"]

    def train(model: str, number: int) -> Any:
        wire.run("forward_backward", pass_json(model, number))
        wire.run("optim_step", step_json(model, number + 1))
        return wire.run(
            "forward", {"model_id": model, "seq_id": number + 2, "forward_input": forward}
        )["metrics"]

    forward = pass_json(model, None)["forward_backward_input"]
    for number in (1, 4):
        train(model, number)
    path = wire.run("save_weights", {"model_id": model, "seq_id": 7, "path": f"of-{optimizer}"})[
        "path"
    ]
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": optimizer}
    loaded = wire.run("load_weights", body)["model_id"]
    assert loaded == f"{session}:train:1"
    told = wire.post("weights_info", {"tinker_path": path})
    again = wire.run("save_weights", {"model_id": loaded, "seq_id": 1, "path": "copy"})["path"]
    assert wire.post("weights_info", {"tinker_path": again}) == told
    assert (told["lora_rank"], told["train_unembed"], told["train_attn"], told["train_mlp"]) == (
        3,
        False,
        False,
        True,
    )
    assert wire.post("get_info", {"model_id": loaded})["model_data"]["model_name"] == MODEL
    assert (train(loaded, 2) == train(model, 8)) is optimizer


@pytest.mark.covers("U49", "U56")
def test_cached_prompts_are_told_of_and_are_a_sessions_own(server_url: str) -> None:
    wire = Wire(server_url)
    session = wire.session()
    model = wire.model(session, base_model=MODEL)
    prompt = {
        "chunks": [{"tokens": [7 + number % 50 for number in range(100)], "type": "encoded_text"}]
    }

    def save(number: int, kind: str) -> str:
        body = {
            "model_id": model,
            "seq_id": number,
            "sampling_session_seq_id": number,
            "kind": kind,
        }
        return str(wire.run("save_weights_for_sampler", body)["sampling_session_id"])

    def hits(sampler: str, number: int) -> int:
        told: int = wire.run("asample", asking(sampler, seq_id=number, prompt=prompt)).get(
            "prompt_cache_hit_tokens", 0
        )
        return told

    first, snapshot, second = save(1, "inflight"), save(2, "snapshot"), save(3, "inflight")
    assert [hits(sampler, 1) for sampler in (first, snapshot, second)] == [0, 0, 0]
    assert [hits(sampler, 2) for sampler in (first, snapshot, second)] == [64, 64, 64]
    wire.run("forward_backward", pass_json(model, 4))
    wire.run("optim_step", step_json(model, 5))
    third = save(6, "inflight")
    assert hits(first, 3) == 64  # kept through the save
    assert hits(third, 1) == 0
    clone = wire.post("join_sampling_session", {"sampling_session_id": first})["client_counter"]
    assert hits(first, clone * 1_000_000_000 + 1) == 64
    events = read_all(wire, asking(first, prompt=prompt))
    assert events[-1]["prompt_cache_hit_tokens"] == 64
    assert {event["weights_version"] for event in events[:-1]} == {3}
    bare = sampler_of(wire, MODEL, session)
    assert "prompt_cache_hit_tokens" not in read_all(wire, asking(bare))[-1]


@pytest.mark.covers("U41", "U47", "U49", "U56")
def test_official_client_trains_and_samples_in_flight(server_url: str) -> None:
    """In a process of its own, as its users run it: it leaves sockets and threads behind."""
    environment = os.environ | {
        "TINKER_BASE_URL": server_url,
        "TINKER_API_KEY": "tml-any-key-will-do",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", OFFICIAL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in-flight sampling done with 0.38.0" in done.stdout
