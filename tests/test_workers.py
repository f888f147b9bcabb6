"""A server with two workers: each has an engine of its own, and runs are at home on one of them."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, sample_json, serving, step_json, wait_until
from test_survival import Held, Life, killed, life, played, save_json, until
from tinkex.engine.api import BaseModel, EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.database.sqlite import DATABASE
from tinkex.server.runs import snapshot
from tinkex.server.workers.pool import SPREAD, Workers


def pair(**options: Any) -> dict[str, FakeEngine]:
    return {"left": FakeEngine(**options), "right": FakeEngine(**options)}


def homes(engines: dict[str, FakeEngine]) -> dict[str, list[str]]:
    """The runs that each engine has."""
    return {name: sorted(engine._adapters) for name, engine in engines.items()}


def train(wire: Wire, model: str, first: int) -> list[Any]:
    """Two passes and a step; their results."""
    results = [wire.run("forward_backward", pass_json(model, first + n)) for n in range(2)]
    return [*results, wire.run("optim_step", step_json(model, first + 2))]


def sampled(wire: Wire, model: str, seq_id: int, number: int) -> Any:
    """A sample of what a run has learnt, from a nameless sampler."""
    saved = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number}
    sampler = wire.run("save_weights_for_sampler", saved)["sampling_session_id"]
    return wire.run("asample", sample_json(sampler))["sequences"]


def test_two_runs_land_on_different_workers_and_a_restart_finds_them_there(tmp_path: Path) -> None:
    engines = pair()
    with serving(engines, tmp_path) as url:
        wire = Wire(url)
        models = [wire.model(), wire.model()]
        assert homes(engines) == {"left": [models[0]], "right": [models[1]]}
        trained = [train(wire, model, 1) for model in models]
        assert trained[0] == trained[1]
        drawn = [sampled(wire, model, 4, 0) for model in models]
        assert drawn[0] == drawn[1]
        later = [train(wire, model, 5) for model in models]
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        rows = database.execute("SELECT model_id, home FROM runs").fetchall()
    assert dict(rows) == {models[0]: "left", models[1]: "right"}
    engines = {name: FakeEngine() for name in ("right", "left")}
    with serving(engines, tmp_path) as url:
        wire = Wire(url)
        # the second first: it is not the number of runs that decides, but the record
        again = [train(wire, model, 8) for model in reversed(models)]
        assert homes(engines) == {"left": [models[0]], "right": [models[1]]}
        assert again[0] == again[1] != later[0]
        for model in models:
            sampler = f"{model.partition(':')[0]}:sample:0"
            assert wire.run("asample", sample_json(sampler))
    with serving(FakeEngine(), tmp_path) as url:  # one is left: it takes them all
        wire = Wire(url)
        assert train(wire, models[0], 11) == train(wire, models[1], 11)


def test_workers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    held = Held("forward_backward")
    engines = {"slow": FakeEngine(fail=held), "quick": FakeEngine()}

    async def scenario() -> None:
        async with life(tmp_path, engines) as server:
            slow, quick = await server.model(), await server.model()
            waiting = await server.submit("forward_backward", pass_json(slow, 1))
            await until(held.begun.is_set)
            assert "metrics" in await server.run("forward_backward", pass_json(quick, 1))
            held.gate.set()
            assert "metrics" in await server.result(waiting)

    played(scenario)


def test_custom_loss_exists_on_every_worker(tmp_path: Path) -> None:
    engines = pair()
    with serving(engines, tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        body: dict[str, Any] = {"session_id": session, "custom_loss_seq_id": 1, "name": "x"}
        body |= {"inputs": [], "graph": {"nodes": []}}
        loss_id = wire.run("create_custom_loss", body)["loss_id"]
        assert [engine._losses for engine in engines.values()] == [{loss_id}, {loss_id}]
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        wait_until(lambda: not any(engine._losses for engine in engines.values()))


def test_busy_sampler_moves_to_another_worker() -> None:
    workers = Workers(pair())
    left, right = workers
    loaded = {left: None}
    assert workers.for_sample("fake", {}) is left
    left.samples.open = SPREAD - 1
    assert workers.for_sample("fake", loaded) is left
    left.samples.open = SPREAD
    assert workers.for_sample("fake", loaded) is right
    right.failure = EngineError("dead")
    assert workers.for_sample("fake", loaded) is left


def test_run_goes_to_a_worker_with_its_base_model() -> None:
    big = (BaseModel("big", context_length=8, vocab_size=256, arch="fake"),)
    workers = Workers({"small": FakeEngine(), "large": FakeEngine(base_models=big)})
    assert sorted(workers.models()) == ["big", "fake"]
    assert [workers.home(name, "big").name for name in "ab"] == ["large", "large"]
    assert workers.home("c", "fake").name == "small"
    with pytest.raises(EngineError, match="there is no base model 'huge'; this server has: big"):
        workers.home("d", "huge")


def test_run_that_was_not_made_is_at_home_nowhere(tmp_path: Path) -> None:
    def refuse(method: str, subject: str) -> None:
        if method == "create":
            raise EngineError("no room", "server")

    async def scenario() -> None:
        async with life(tmp_path, pair(fail=refuse)) as server:
            body = {"model_seq_id": 0, "base_model": "fake", "session_id": await server.session()}
            assert "no room" in (await server.run("create_model", body))["error"]
            assert not any(worker.runs for worker in server.state.workers)

    played(scenario)


# ── rebuilding ────────────────────────────────────────────────────────────────────────────────────


async def story(server: Life, model: str, *, rebuilt: Held | None = None) -> list[Any]:
    """Send a run its calls without waiting, rebuild it meanwhile if asked, return the results."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(1, 16, 5):
        asked += [
            ("forward_backward", pass_json(model, number)),
            ("forward_backward", pass_json(model, number + 1)),
            ("optim_step", step_json(model, number + 2)),
            ("save_weights", save_json(model, number + 3, f"at-{number}")),
            (
                "save_weights_for_sampler",
                {"model_id": model, "seq_id": number + 4, "sampling_session_seq_id": number},
            ),
        ]
    ids = [await server.submit(path, body) for path, body in asked]
    if rebuilt is not None:
        await until(rebuilt.begun.is_set)
        rebuilding = server.state.replay.rebuild(model)
        await asyncio.sleep(0)
        late = asyncio.create_task(server.submit("forward_backward", pass_json(model, 16)))
        await asyncio.sleep(0.05)
        rebuilt.gate.set()
        await rebuilding
        ids.append(await late)
    else:
        ids.append(await server.submit("forward_backward", pass_json(model, 16)))
    results = [await server.result(request_id) for request_id in ids]
    session = model.partition(":")[0]
    for number in (1, 6, 11):
        request = sample_json(f"{session}:sample:{number}")
        results.append((await server.run("asample", request))["sequences"])
    return [str(result).replace(session, "session") for result in results]


@pytest.mark.parametrize("held_in", ["forward_backward", "optim_step", "save", "snapshot"])
@pytest.mark.parametrize("operations", [3, 1000])
def test_run_that_is_rebuilt_gives_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_in: str, operations: int
) -> None:
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", operations)
    monkeypatch.setattr(snapshot, "STATE_REST", 0)
    expected, found = list[str](), list[str]()

    async def alone() -> None:
        async with life(tmp_path / "a") as server:
            expected.extend(await story(server, await server.model()))

    async def scenario() -> None:
        held = Held(held_in)
        passed = 0

        def hold_third(method: str, subject: str) -> None:
            nonlocal passed
            passed += method == held_in
            if passed == 3 or method != held_in:
                held(method, subject)

        engine = FakeEngine(fail=hold_third)
        async with life(tmp_path / "b", engine) as server:
            model, other = await server.model(), await server.model()
            found.extend(await story(server, model, rebuilt=held))
            assert "metrics" in await server.run("forward_backward", pass_json(other, 1))
            live = server.state.runs[model]
            assert live.lane.next == 17
            assert live.worker.runs == {model, other}
            assert server.state.database.checkpoints.page("local", limit=9, offset=0)[1] == 3

    played(alone)
    played(scenario)
    assert found == expected
    assert not any("error" in result for result in found)


def test_runs_proceed_while_another_run_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with life(tmp_path) as server:
            model, other = await server.model(), await server.model()
            for number in range(1, 9):
                await server.run("forward_backward", pass_json(model, number))
            may_go_on = asyncio.Event()
            replay, original = server.state.replay, server.state.runs.admit_again

            async def admit_again(*given: Any) -> None:
                await may_go_on.wait()
                await original(*given)

            monkeypatch.setattr(server.state.runs, "admit_again", admit_again)
            rebuilding = replay.rebuild(model)
            waiting = asyncio.create_task(server.run("optim_step", step_json(model, 9)))
            for number in range(1, 4):
                assert "metrics" in await server.run("forward_backward", pass_json(other, number))
            assert not rebuilding.done()
            assert not waiting.done()
            may_go_on.set()
            await rebuilding
            assert "metrics" in await waiting

    played(scenario)


def test_unrebuildable_run_fails_its_pending_calls(tmp_path: Path) -> None:
    held = Held("forward_backward")

    async def scenario() -> None:
        engine = FakeEngine(fail=held)
        async with life(tmp_path, engine) as server:
            model = await server.model()
            begun = await server.submit("forward_backward", pass_json(model, 1))
            behind = await server.submit("forward_backward", pass_json(model, 2))
            await until(held.begun.is_set)
            rebuilding = server.state.replay.rebuild(model)
            await asyncio.sleep(0.02)
            engine.base_models = ()
            held.gate.set()
            await rebuilding
            assert "metrics" in await server.result(begun)
            assert "could not be rebuilt" in (await server.result(behind))["error"]
            status, _ = await server.send("optim_step", step_json(model, 3))
            assert status == 410

    played(scenario)


def test_request_that_comes_again_during_a_replay_is_not_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            ids = [await first.submit("optim_step", step_json(model, n)) for n in range(1, 6)]
            results = [await first.result(request_id) for request_id in ids]
            image = killed(tmp_path / "a")
        async with life(image) as second:
            may_go_on, original = asyncio.Event(), second.state.runs.admit_again

            async def admit_again(*given: Any) -> None:
                await may_go_on.wait()
                await original(*given)

            monkeypatch.setattr(second.state.runs, "admit_again", admit_again)
            asking = [asyncio.create_task(second.result(request_id)) for request_id in ids]
            await until(lambda: model in second.state.runs)
            again = asyncio.create_task(second.submit("optim_step", step_json(model, 4)))
            await asyncio.sleep(0.05)
            may_go_on.set()
            assert await again == ids[3]
            assert [await task for task in asking] == results

    played(scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_run_is_rebuilt_on_another_worker_when_its_own_has_died(tmp_path: Path) -> None:
    engines = pair()

    def die() -> None:
        raise SystemExit

    async def scenario() -> None:
        async with life(tmp_path, engines) as server:
            model = await server.model()
            before = await server.run("forward_backward", pass_json(model, 1))
            await server.run("optim_step", step_json(model, 2))
            home = server.state.runs[model].worker
            with pytest.raises(EngineError, match="has died"):
                await home.run(die)
            assert "has died" in (await server.run("optim_step", step_json(model, 3)))["error"]
            await server.state.replay.rebuild(model)
            assert server.state.runs[model].worker is not home
            after = await server.run("forward_backward", pass_json(model, 4))
            assert after["metrics"] != before["metrics"]
            assert homes(engines)["right"] == [model]
            assert "metrics" in await server.run("optim_step", step_json(await server.model(), 1))

    played(scenario)
