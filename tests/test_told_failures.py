"""Work that was lost with its engine: once that is told it stays undone, else it is done again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from support import pass_json, sample_json, step_json
from test_survival import Life, killed, life, played, until
from tinkex.engine.fake import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Mortal(FakeEngine):
    """An engine that dies at a pass, or fails one, when it is asked to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fail=self._at, **options)
        self.fatal: BaseException | None = None
        self.at, self.gate = "forward_backward", threading.Event()

    def _at(self, method: str, subject: str) -> None:
        if self.fatal is not None and method == self.at:
            fatal, self.fatal = self.fatal, None
            assert self.gate.wait(20)
            raise fatal


def pair() -> dict[str, FakeEngine]:
    return {"left": Mortal(), "right": FakeEngine()}


async def trained(server: Life, model: str, numbers: list[int]) -> list[Any]:
    """Passes and steps under the numbers given, odd and even; their results."""
    results = []
    for number in numbers:
        kind, body = ("forward_backward", pass_json) if number % 2 else ("optim_step", step_json)
        results.append(await server.run(kind, body(model, number)))
    return results


async def lost(server: Life, engine: FakeEngine, model: str, number: int) -> list[str]:
    """Ask for a pass and a step, and have the engine die at the pass; their ids."""
    assert isinstance(engine, Mortal)
    engine.fatal = SystemExit("driver gone")
    ids = [
        await server.submit("forward_backward", pass_json(model, number)),
        await server.submit("optim_step", step_json(model, number + 1)),
    ]
    engine.gate.set()
    for request_id in ids:
        promise = server.state.promises.get(request_id)
        assert promise is not None
        await until(promise.done.is_set)
    return ids


async def alone(directory: Path, numbers: list[int]) -> list[Any]:
    """The results of a run that was never asked for anything else."""
    async with life(directory) as server:
        return await trained(server, await server.model(), numbers)


def test_failure_that_was_told_stays_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Mortal()
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            before = await trained(first, model, [1, 2])
            ids = await lost(first, engine, model, 3)
            told = [await first.result(request_id) for request_id in ids]
            assert all("has died" in result["error"] for result in told)
            image = killed(tmp_path / "a")
        for _ in range(2):  # and after the next one
            async with life(image) as second:
                assert [await second.result(request_id) for request_id in ids] == told
        async with life(image) as second:
            after = await trained(second, model, [5, 6])
        # the run goes on as if the calls had not been made
        assert before + after == await alone(tmp_path / "b", [1, 2, 3, 4])

    played(scenario)


def test_failure_that_was_not_told_is_carried_out_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Mortal()
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            before = await trained(first, model, [1, 2])
            ids = await lost(first, engine, model, 3)
            image = killed(tmp_path / "a")
        async with life(image) as second:
            after = [await second.result(request_id) for request_id in ids]
        assert before + after == await alone(tmp_path / "b", [1, 2, 3, 4])

    played(scenario)


@pytest.mark.parametrize("is_told", [True, False])
def test_rebuilt_run_carries_out_what_was_not_told(tmp_path: Path, is_told: bool) -> None:
    async def scenario() -> None:
        engines = pair()
        async with life(tmp_path / "a", engines) as server:
            model = await server.model()
            before = await trained(server, model, [1, 2])
            ids = await lost(server, engines["left"], model, 3)
            told = [await server.result(request_id) for request_id in ids] if is_told else []
            await server.state.replay.rebuild(model)
            results = [await server.result(request_id) for request_id in ids]
            after = await trained(server, model, [5, 6])
        if is_told:
            assert results == told
            assert before + after == await alone(tmp_path / "b", [1, 2, 3, 4])
        else:
            assert before + results + after == await alone(tmp_path / "b", [1, 2, 3, 4, 5, 6])

    played(scenario)


def test_only_the_told_one_of_two_lost_calls_stays_undone(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = pair()
        async with life(tmp_path / "a", engines) as server:
            model = await server.model()
            before = await trained(server, model, [1, 2])
            first, second = await lost(server, engines["left"], model, 3)
            assert "has died" in (await server.result(first))["error"]
            await server.state.replay.rebuild(model)
            assert "metrics" in await server.result(second)
            after = await trained(server, model, [5, 6])
        # a step without a gradient changes nothing
        assert before + after == await alone(tmp_path / "b", [1, 2, 3, 4])

    played(scenario)


def test_poll_during_a_rebuild_waits_for_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engines = pair()
        async with life(tmp_path / "a", engines) as server:
            model = await server.model()
            before = await trained(server, model, [1, 2])
            ids = await lost(server, engines["left"], model, 3)
            may_go_on, runs = asyncio.Event(), server.state.runs
            original = runs.admit_again

            async def admit_again(*given: Any) -> None:
                await may_go_on.wait()
                await original(*given)

            monkeypatch.setattr(runs, "admit_again", admit_again)
            rebuilding = server.state.replay.rebuild(model)
            await until(lambda: model in runs and runs[model].is_rebuilding)
            polling = [asyncio.create_task(server.result(request_id)) for request_id in ids]
            await asyncio.sleep(0.05)
            may_go_on.set()
            await rebuilding
            results = [await poll for poll in polling]
        assert before + results == await alone(tmp_path / "b", [1, 2, 3, 4])

    played(scenario)


def test_failure_of_an_engine_that_lives_stays_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Mortal()
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            before = await trained(first, model, [1, 2])
            engine.fatal = MemoryError("no room")
            engine.gate.set()
            failed = await first.submit("forward_backward", pass_json(model, 3))
            stepped = await first.run("optim_step", step_json(model, 4))  # before that is told
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert "MemoryError" in (await second.result(failed))["error"]
            assert await second.result(f"{model}:4") == stepped
            after = await trained(second, model, [5, 6])
        assert before + after == await alone(tmp_path / "b", [1, 2, 3, 4])

    played(scenario)


@pytest.mark.parametrize("fails", [True, False])
def test_save_that_is_repeated_after_a_restart_keeps_its_receipt(
    tmp_path: Path, fails: bool
) -> None:
    def saving(model: str, sampler: int) -> dict[str, Any]:
        return {"model_id": model, "seq_id": 1, "sampling_session_seq_id": sampler}

    async def scenario() -> None:
        engine = Mortal()
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            if fails:
                engine.fatal, engine.at = MemoryError("no room"), "snapshot"
                engine.gate.set()
            saved = await first.run("save_weights_for_sampler", saving(model, 0))
            assert ("error" in saved) is fails
            image = killed(tmp_path / "a")
        async with life(image) as second:
            # the official client counts up when it asks again
            assert await second.run("save_weights_for_sampler", saving(model, 1)) == saved

    played(scenario)


def test_run_whose_creation_failed_is_not_made_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Mortal()
        engine.fatal, engine.at = SystemExit("driver gone"), "create"
        engine.gate.set()
        async with life(tmp_path / "a", engine) as first:
            session = await first.session()
            body = {"session_id": session, "model_seq_id": 0, "base_model": "fake"}
            body |= {"lora_config": {"rank": 4}}
            created = await first.submit("create_model", body)
            told = await first.result(created)
            assert "has died" in told["error"]
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert await second.result(created) == told
            assert not second.state.runs

    played(scenario)


@pytest.mark.parametrize("is_told", [True, False])
def test_lost_sample_is_drawn_again_unless_that_was_told(tmp_path: Path, is_told: bool) -> None:
    async def scenario() -> None:
        engine = Mortal()
        engine.at = "sample_step"
        async with life(tmp_path / "a", engine) as first:
            session = await first.session()
            opened = {
                "session_id": session,
                "sampling_session_seq_id": 0,
                "base_model": "fake",
            }
            sampler = (await first.post("create_sampling_session", opened))["sampling_session_id"]
            engine.fatal = SystemExit("driver gone")
            engine.gate.set()
            asked = await first.submit("asample", sample_json(sampler) | {"seq_id": 1})
            promise = first.state.promises.get(asked)
            assert promise is not None
            await until(promise.done.is_set)
            told = await first.result(asked) if is_told else None
            image = killed(tmp_path / "a")
        async with life(image) as second:
            result = await second.result(asked)
            assert result == told if is_told else "sequences" in result

    played(scenario)


def test_failure_that_cannot_be_put_on_disk_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engines = pair()
        async with life(tmp_path / "a", engines) as server:
            model = await server.model()
            asked, _ = await lost(server, engines["left"], model, 1)
            journal = server.state.journals.of_run(model)
            append = journal.append

            async def full(*given: Any) -> Any:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(journal, "append", full)
            status, reply = await server.send("retrieve_future", {"request_id": asked})
            assert (status, reply["detail"][:24]) == (503, "the result cannot be put")
            monkeypatch.setattr(journal, "append", append)
            await asyncio.gather(*(server.result(asked) for _ in range(2)))
            assert "has died" in (await server.result(asked))["error"]

    played(scenario)
