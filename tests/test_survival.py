"""What a server acknowledged and then died of, case by case: a copy of its data directory is what
kill -9 leaves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support import Clock, pass_json, sample_json, sqlite, step_json
from tinkex.client.http.asgi_exchange import AsgiExchange
from tinkex.client.http.exchange import HttpRequest
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.app import create_app
from tinkex.server.database import commit_log
from tinkex.server.database.sqlite import DATABASE
from tinkex.server.files.data_dir import DataDirError
from tinkex.server.runs import promises, snapshot
from tinkex.server.runs.journal import Committer, Journal
from tinkex.server.runs.journals import UNPLACED
from tinkex.server.server_limits import Limits
from tinkex.server.state import State
from tinkex.server.workers.fleet import Fleet

POLL = Limits(poll_seconds=5)


class Life:
    """One life of a server, spoken to without a socket."""

    def __init__(self, app: Any, exchange: AsgiExchange) -> None:
        self.state: State = app.state.server
        self._exchange = exchange

    async def send(
        self, path: str, body: Any, key: str | None = None, method: str = "POST"
    ) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
        data = json.dumps(body).encode() if body is not None else None
        reply = await self._exchange.send(HttpRequest(method, f"/api/v1/{path}", headers, data, 20))
        return reply.status, json.loads(reply.body)

    async def post(self, path: str, body: Any, key: str | None = None) -> Any:
        status, answer = await self.send(path, body, key)
        assert status == 200, answer
        return answer

    async def submit(self, path: str, body: Any, key: str | None = None) -> str:
        return str((await self.post(path, body, key))["request_id"])

    async def result(self, request_id: str, key: str | None = None) -> Any:
        return await self.post("retrieve_future", {"request_id": request_id}, key)

    async def run(self, path: str, body: Any, key: str | None = None) -> Any:
        return await self.result(await self.submit(path, body, key), key)

    async def session(self, key: str | None = None) -> str:
        return str(
            (await self.post("create_session", {"tags": [], "sdk_version": "0"}, key))["session_id"]
        )

    async def model(self, key: str | None = None) -> str:
        session = await self.session(key)
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "fake",
            "lora_config": {"rank": 4},
        }
        return str((await self.run("create_model", body, key))["model_id"])


@asynccontextmanager
async def life(
    data_dir: Path,
    engine: FakeEngine | Mapping[str, FakeEngine] | Fleet | None = None,
    limits: Limits = POLL,
) -> AsyncIterator[Life]:
    app = create_app(engine or FakeEngine(), data_dir, limits=limits)
    exchange = AsgiExchange(app)
    await exchange.open()
    try:
        yield Life(app, exchange)
    finally:
        await exchange.close()


def killed(data_dir: Path) -> Path:
    """Copy the data directory of this moment, for another life to begin with."""
    target = data_dir.with_name(f"{data_dir.name}-killed")
    record = commit_log.record_of(data_dir / DATABASE)
    while True:
        recorded = record.read_bytes()  # first: it must not be newer than the log
        try:
            shutil.copytree(data_dir, target, ignore=shutil.ignore_patterns("*-shm"))
        except shutil.Error:  # the server has deleted a file meanwhile: copy again
            shutil.rmtree(target)
            continue
        (target / record.name).write_bytes(recorded)
        return target


def played(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what is done in the background."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Held:
    """Holds the engine up in one of its methods until it is let go."""

    def __init__(self, named: str) -> None:
        self.named, self.subjects = named, list[str]()
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self, method: str, subject: str) -> None:
        if method == self.named:
            self.subjects.append(subject)
            self.begun.set()
            assert self.gate.wait(20)


def failing(named: str) -> Callable[[str, str], None]:
    """A fault of the engine in one of its methods."""

    def fail(method: str, subject: str) -> None:
        if method == named:
            raise EngineError("the disk is full", "server")

    return fail


def save_json(model: str, number: int | None, name: str, **fields: Any) -> dict[str, Any]:
    return {"model_id": model, "seq_id": number, "path": name, **fields}


# ── saving and loading ────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S44")
def test_save_that_was_replaced_or_deleted_since_is_not_done_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            saves = [
                save_json(model, 1, "x"),
                save_json(model, 2, "y"),
                save_json(model, 3, "x", overwrite=True),
            ]
            ids = [await first.submit("save_weights", body) for body in saves]
            ids.append(await first.submit("save_weights_external", save_json(model, 4, "out")))
            ids.append(await first.submit("save_weights", save_json(model, None, "unnumbered")))
            told = [await first.result(request_id) for request_id in ids]
            assert not any("error" in answer for answer in told), told
            status, _ = await first.send(
                f"training_runs/{model}/checkpoints/weights/y", None, method="DELETE"
            )
            assert status == 200
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert [await second.result(request_id) for request_id in ids] == told
            left = {
                saved.tinker_path.rpartition("/")[2]
                for saved in second.state.database.checkpoints.page("local", limit=-1, offset=0)[0]
            }
            assert left == {"x", "out", "unnumbered"}, "what was deleted came back"

    played(scenario)


@pytest.mark.covers("S44")
def test_server_that_stops_finishes_the_save_that_it_is_at(tmp_path: Path) -> None:
    held = Held("save")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            model = await first.model()
            # with a gradient pending, no state is written
            await first.run("forward_backward", pass_json(model, 1))
            request_id = await first.submit("save_weights", save_json(model, 2, "x"))
            await until(held.begun.is_set)
            asyncio.get_running_loop().call_later(0.2, held.gate.set)
        made = len(held.subjects)
        async with life(tmp_path / "a", FakeEngine(fail=held)) as second:
            assert (await second.result(request_id))["path"] == f"tinker://{model}/weights/x"
            assert len(held.subjects) == made, "it was on record"

    played(scenario)


@pytest.mark.covers("S44")
def test_stopping_server_begins_no_save(tmp_path: Path) -> None:
    """The next life saves what was promised, as of the time of the request."""
    held = Held("save")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            models = [await first.model() for _ in range(3)]
            for model in models:  # with a gradient pending, no state is written
                await first.run("forward_backward", pass_json(model, 1))
            ids = [await first.submit("save_weights", save_json(model, 2, "x")) for model in models]
            await until(held.begun.is_set)
            asyncio.get_running_loop().call_later(0.2, held.gate.set)
        assert held.subjects == models[:1]
        async with life(tmp_path / "a") as second:
            told = [(await second.result(request_id))["path"] for request_id in ids]
            assert told == [f"tinker://{model}/weights/x" for model in models]

    played(scenario)


def test_saves_that_wait_for_each_other_outlive_their_session(tmp_path: Path) -> None:
    held = Held("save")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as server:
            model = await server.model()
            for number, name in enumerate("xyz", 1):
                await server.submit("save_weights", save_json(model, number, name))
            server.state.sessions.end(model.partition(":")[0])
            held.gate.set()

            def kept() -> int:
                return len(server.state.database.checkpoints.page("local", limit=-1, offset=0)[0])

            await until(lambda: kept() == 3)

    played(scenario)


def test_first_of_two_racing_saves_gets_the_name(tmp_path: Path) -> None:
    """Both are written before either is in place, since the engine is busy."""
    loading, saving = Held("load"), Held("save")
    saving.gate.set()

    def hold(method: str, subject: str) -> None:
        loading(method, subject)
        saving(method, subject)

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=hold)) as server:
            model, other = await server.model(), await server.model()
            path = (await server.run("save_weights", save_json(other, 1, "x")))["path"]
            saving.begun.clear()
            saving.gate.clear()
            ids = [
                await server.submit("save_weights", save_json(model, number, "x"))
                for number in (1, 2)
            ]
            await until(saving.begun.is_set)
            await server.submit(
                "load_weights", {"model_id": other, "seq_id": 2, "path": path, "optimizer": True}
            )
            await until(loading.begun.is_set)
            saving.gate.set()
            await until(lambda: saving.subjects == [other, model, model])
            await asyncio.sleep(0.05)
            loading.gate.set()
            assert (await server.result(ids[0]))["path"] == f"tinker://{model}/weights/x"
            assert "exists already" in (await server.result(ids[1]))["error"]
            assert not list((tmp_path / "a").rglob(".saving-*"))

    played(scenario)


def test_load_never_sees_half_of_a_replacing_save(tmp_path: Path) -> None:
    saving, written, found, gate = (threading.Event() for _ in range(4))
    saved: list[str] = []

    def slow(method: str, subject: str) -> None:
        if saved and method == "save" and subject == saved[0]:
            saving.set()
            assert written.wait(20)
        if saved and method == "load":
            found.set()
            assert gate.wait(20)

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=slow)) as server:
            model, other = await server.model(), await server.model()
            path = (await server.run("save_weights", save_json(model, 1, "x")))["path"]
            saved.append(model)
            again = await server.submit("save_weights", save_json(model, 2, "x", overwrite=True))
            await until(saving.is_set)
            load = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
            loading = await server.submit("load_weights", load)
            await until(found.is_set)
            written.set()
            await asyncio.sleep(0.1)
            gate.set()
            assert (await server.result(loading))["path"] == path
            assert (await server.result(again))["path"] == path

    played(scenario)


@pytest.mark.covers("S44")
def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            await first.run("save_weights", save_json(model, 1, "x"))
            image = killed(tmp_path / "a")
        (place,) = (image / "checkpoints").glob("*/weights")
        old, new = (
            image / "checkpoints/a/weights/.saving-1",
            image / "checkpoints/a/weights/.saving-2",
        )
        for elsewhere in (old, new):
            elsewhere.mkdir(parents=True)
        os.utime(old, (1, 1))
        for leftover in (".saving-1", ".deleting-2", "never-recorded"):
            (place / leftover).mkdir()
        async with life(image) as second:
            await second.run("save_weights", save_json(model, 2, "never-recorded"))
            assert {path.name for path in place.iterdir()} == {"x", "never-recorded"}
            assert (old.exists(), new.exists()) == (False, True), (
                "another process may be at the new one"
            )

    played(scenario)


@pytest.mark.covers("S44")
def test_replayed_load_survives_a_deleted_checkpoint(tmp_path: Path) -> None:
    """A client may delete a checkpoint before the state it loaded is in force."""

    async def scenario() -> None:
        engine = FakeEngine()
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            await first.run("forward_backward", pass_json(model, 1))
            await first.run("optim_step", step_json(model, 2))
            path = (await first.run("save_weights", save_json(model, 3, "x")))["path"]
            await first.run("forward_backward", pass_json(model, 4))
            await first.run("optim_step", step_json(model, 5))
            body = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}
            await first.run("save_weights_for_sampler", body)
            engine.fail = failing("save_sampler")
            loaded = await first.submit(
                "load_weights", {"model_id": model, "seq_id": 7, "path": path, "optimizer": True}
            )
            assert (await first.result(loaded))["path"] == path
            again = {
                "session_id": model.partition(":")[0],
                "model_seq_id": 1,
                "path": path,
                "optimizer": True,
            }
            created = await first.submit("load_weights", again)
            other = (await first.result(created))["model_id"]
            expected = [
                await first.run("forward_backward", pass_json(run, number))
                for run, number in ((model, 8), (other, 1))
            ]
            await first.send(f"training_runs/{model}/checkpoints/weights/x", None, method="DELETE")
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert await second.result(loaded) == {
                "path": path,
                "model_id": model,
                "type": "load_weights",
            }
            assert [
                await second.result(f"{run}:{number}") for run, number in ((model, 8), (other, 1))
            ] == expected

    played(scenario)


@pytest.mark.covers("S44")
def test_unload_is_not_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(delay=0.2)) as first:
            model = await first.model()
            last = await first.submit("forward_backward", pass_json(model, 1))
            unloading = await first.submit("unload_model", {"model_id": model})
            early = killed(tmp_path / "a")
            done = await first.result(unloading)
            late = shutil.copytree(
                tmp_path / "a",
                tmp_path / "late",
                ignore=shutil.ignore_patterns("*-shm", "*-flushed"),
            )
        async with life(early) as second:
            assert await second.result(unloading) == done
            assert "metrics" in await second.result(last)
            assert (await second.send("forward_backward", pass_json(model, 2)))[0] == 410
            assert not list((early / "runs").iterdir())
        async with life(late) as third:
            assert await third.result(unloading) == done
            assert await third.submit("unload_model", {"model_id": model}) == unloading

    played(scenario)


@pytest.mark.covers("S44")
def test_given_up_number_is_on_disk_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fdatasync

    def slow(handle: int) -> None:
        time.sleep(0.3)
        flush(handle)

    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(gap_seconds=0.1)) as first:
            model = await first.model()
            monkeypatch.setattr(os, "fdatasync", slow)
            waiting = await first.submit("forward_backward", pass_json(model, 2))
            # what is flushed for it holds up what comes after it
            other = asyncio.create_task(first.model())
            told = await first.result(waiting)
            assert "number 1 of this run never arrived" in told["error"]
            image = killed(tmp_path / "a")
            monkeypatch.undo()
            await other
        async with life(image) as second:
            assert await second.result(waiting) == told
            assert (
                "has passed" in (await second.run("forward_backward", pass_json(model, 1)))["error"]
            )

    played(scenario)


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S44")
def test_samples_that_were_not_read_outlive_any_number_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "JUST_READ", -1.0)

    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            session = await first.session()
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
            sampler = (await first.post("create_sampling_session", body))["sampling_session_id"]
            params = {"max_tokens": 4}  # no seed: the one that was drawn must be used again
            ids = [
                await first.submit("asample", sample_json(sampler, number, sampling_params=params))
                for number in range(3)
            ]
            expected = [await first.result(request_id) for request_id in ids]
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert await second.result(ids[0]) == expected[0]
            await second.state.samples.note_read()
            image = killed(image)
        async with life(image) as third:
            assert [await third.result(request_id) for request_id in ids[1:]] == expected[1:]

    played(scenario)


@pytest.mark.covers("S44")
def test_samples_without_a_session_or_a_number_are_found_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            session = await first.session()
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
            sampler = (await first.post("create_sampling_session", body))["sampling_session_id"]
            direct = sample_json("", None, base_model="fake", sampling_params={"max_tokens": 4})
            del direct["sampling_session_id"]
            ids = [
                await first.submit("asample", body) for body in (direct, sample_json(sampler, None))
            ]
            expected = [await first.result(request_id) for request_id in ids]
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert [await second.result(request_id) for request_id in ids] == expected

    played(scenario)


@pytest.mark.covers("S44")
def test_sample_without_a_session_stays_its_owners_after_a_restart(tmp_path: Path) -> None:
    direct = sample_json("", None, base_model="fake", sampling_params={"max_tokens": 4})
    del direct["sampling_session_id"]

    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            mine, other = (
                create_key(first.state.database, name, name)[1] for name in ("mine", "other")
            )
            request_id = await first.submit("asample", direct, mine)
            expected = await first.result(request_id, mine)
            image = killed(tmp_path / "a")
        async with life(image) as second:
            for _ in range(2):  # the first has it drawn again
                status, answer = await second.send(
                    "retrieve_future", {"request_id": request_id}, other
                )
                assert (status, answer["detail"]) == (404, f"there is no request '{request_id}'")
            # does nothing
            assert await second.send("cancel_future", {"request_id": request_id}, other) == (
                200,
                {},
            )
            assert await second.result(request_id, mine) == expected

    played(scenario)


@pytest.mark.covers("S44")
def test_unfinished_record_is_not_taken_for_a_torn_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        committer = Committer()
        earlier, journal = Journal(tmp_path, committer), Journal(tmp_path, committer)
        await earlier.append(1, {"op": "a"}, b"body")
        await journal.append(2, {"op": "b"}, b"body")
        first, second = (tmp_path / f"segment-{number:08d}.log" for number in (1, 2))
        for path in (first, second):
            with path.open("ab") as file:
                file.write(b"TXJ1 and not all of it")
        sizes = first.stat().st_size, second.stat().st_size
        assert [entry.number for entry in journal.read()] == [1]
        assert (first.stat().st_size < sizes[0], second.stat().st_size) == (True, sizes[1])
        committer.stop()
        earlier.close()
        journal.close()

    played(scenario)


# ── nameless samplers ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S44")
def test_nameless_sampler_is_written_once_and_only_for_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 4)
    monkeypatch.setattr(snapshot, "STATE_REST", 0)
    written: Counter[str] = Counter()

    def note(method: str, subject: str) -> None:
        if method == "save_sampler":
            written[subject.rpartition(":")[2]] += 1

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=note), Limits(snapshots=2)) as first:
            model = await first.model()

            async def steps(number: int) -> int:
                for seq in (number, number + 2):
                    await first.run("forward_backward", pass_json(model, seq))
                    await first.run("optim_step", step_json(model, seq + 1))
                return number + 4

            async def sampler(number: int, name: int) -> int:
                body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": name}
                await first.run("save_weights_for_sampler", body)
                return number + 1

            number = await sampler(1, 0)
            assert not written, "no state needs it yet"
            number = await steps(number)
            await until(lambda: written == {"0": 1})
            number = await steps(await steps(number))
            number = await sampler(number, 1)
            await asyncio.sleep(0.1)
            assert written == {"0": 1}, "states that come later do not write it again"
            # beyond two, the oldest make room in memory
            number = await sampler(await sampler(number, 2), 3)
            await steps(number)
            await until(lambda: written == {"0": 1, "1": 1, "2": 1, "3": 1})
            session = model.partition(":")[0]
            ids = [
                await first.submit("asample", sample_json(f"{session}:sample:{name}", 0))
                for name in range(4)
            ]
            expected = [await first.result(request_id) for request_id in ids]
            image = killed(tmp_path / "a")
        written.clear()
        async with life(image, FakeEngine(fail=note)) as second:
            assert [await second.result(request_id) for request_id in ids] == expected
        assert not written

    played(scenario)


@pytest.mark.covers("S44")
def test_nameless_sampler_recreated_during_its_write_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever trains and samples meanwhile does not wait."""
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 3)
    monkeypatch.setattr(snapshot, "STATE_REST", 0)
    held = Held("save_sampler")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            model = await first.model()
            sampler = f"{model.partition(':')[0]}:sample:0"

            async def train(number: int) -> None:
                taken = {"model_id": model, "seq_id": number, "sampling_session_seq_id": 0}
                await first.run("save_weights_for_sampler", taken)
                await first.run("forward_backward", pass_json(model, number + 1))
                await first.run("optim_step", step_json(model, number + 2, learning_rate=5))

            try:
                await train(1)
                await until(held.begun.is_set)
                await train(4)
                drawn = await first.run("asample", sample_json(sampler))
                assert not list((tmp_path / "a").glob("runs/*/state-*[0-9]")), (
                    "the first state still waits for it"
                )
            finally:
                held.gate.set()
            await until(lambda: bool(list((tmp_path / "a").glob("runs/*/state-3"))))
            await first.run("forward_backward", pass_json(model, 7))
            await first.run("optim_step", step_json(model, 8))
            await until(lambda: bool(list((tmp_path / "a").glob("runs/*/state-8"))))
            assert len(list((tmp_path / "a").glob("snapshots/*"))) == 1, (
                "nothing is left of the old one"
            )
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert await second.run("asample", sample_json(sampler, 1)) == drawn

    played(scenario)


@pytest.mark.covers("S44")
def test_results_that_were_just_read_outlive_a_second_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 2)
    monkeypatch.setattr(snapshot, "STATE_REST", 0)

    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model, told = await first.model(), {}
            for number in (1, 3, 5):
                told[number] = await first.run("forward_backward", pass_json(model, number))
                told[number + 1] = await first.run("optim_step", step_json(model, number + 1))
                in_force = f"runs/*/state-{number + 1}"
                await until(lambda pattern=in_force: bool(list((tmp_path / "a").glob(pattern))))  # type: ignore[misc]
            image = killed(tmp_path / "a")
        async with life(image) as second:
            for number, result in told.items():
                assert await second.result(f"{model}:{number}") == result

    played(scenario)


@pytest.mark.covers("S44")
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the names of open files are read from /proc"
)
def test_directories_of_acknowledged_files_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, flush = set[Path](), os.fsync

    def fsync(handle: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)

    async def scenario() -> None:
        async with life(tmp_path / "new" / "a") as server:
            model = await server.model()
            await server.run("save_weights", save_json(model, 1, "x"))
            (journal,) = (tmp_path / "new" / "a").glob("runs/*/segment-*.log")
            (checkpoint,) = (tmp_path / "new" / "a").glob("checkpoints/*/weights/x")
            above = {directory for path in (journal, checkpoint) for directory in path.parents}
            assert {
                directory for directory in above if directory.is_relative_to(tmp_path)
            } <= flushed

    played(scenario)


@pytest.mark.covers("S44")
def test_nameless_sampler_with_reused_number_after_a_crash_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was put on disk, the second was taken and not made; it must not be mistaken for
    saved."""
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 3)
    held = Held("forward_backward")
    held.gate.set()

    def in_force(directory: Path, number: int) -> Callable[[], bool]:
        return lambda: bool(list(directory.glob(f"runs/*/state-{number}")))

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            model = await first.model()
            sampler = f"{model.partition(':')[0]}:sample:0"
            taken = {"model_id": model, "sampling_session_seq_id": 0}
            await first.run("save_weights_for_sampler", taken | {"seq_id": 1})
            await first.run("forward_backward", pass_json(model, 2))
            await first.run("optim_step", step_json(model, 3, learning_rate=5))
            await until(in_force(tmp_path / "a", 3))
            held.gate.clear()
            await first.submit("forward_backward", pass_json(model, 4))
            await first.submit("save_weights_for_sampler", taken | {"seq_id": 5})
            image = killed(tmp_path / "a")
            held.gate.set()
        async with life(image) as second:
            await second.result(f"{model}:5")
            drawn = await second.run("asample", sample_json(sampler))
            await second.run("optim_step", step_json(model, 6))
            await until(in_force(image, 6))
            image = killed(image)
        async with life(image) as third:
            assert await third.run("asample", sample_json(sampler, 1)) == drawn

    played(scenario)


@pytest.mark.covers("S44")
def test_nameless_samplers_outlive_the_run_they_were_made_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            sampler = f"{model.partition(':')[0]}:sample:0"
            taken = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
            ids = [await first.submit("save_weights_for_sampler", taken)]
            ids.append(await first.submit("unload_model", {"model_id": model}))
            told = [await first.result(request_id) for request_id in ids]
            assert not any("error" in answer for answer in told), told
            drawn = await first.run("asample", sample_json(sampler))
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert await second.run("asample", sample_json(sampler, 1)) == drawn

    played(scenario)


@pytest.mark.covers("S44")
def test_leftovers_of_a_nameless_sampler_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            image = killed(tmp_path / "a")
        left = image / "snapshots" / f"{model.partition(':')[0]}_sample_0{UNPLACED}x1"
        left.mkdir(parents=True)
        async with life(image) as second:
            await second.run("forward_backward", pass_json(model, 1))
            assert not left.exists()

    played(scenario)


def test_result_that_made_room_while_a_state_was_written_is_not_kept_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For there is nothing left of it, and a run must not break of that."""
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 3)
    monkeypatch.setattr(promises, "KEEP_READ_BYTES", 10)
    held, clock = Held("save_sampler"), Clock()

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            monkeypatch.setattr(first.state.promises, "_clock", clock.monotonic)
            model = await first.model()
            taken = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
            await first.run("save_weights_for_sampler", taken)
            await first.run("forward_backward", pass_json(model, 2))
            await first.run("optim_step", step_json(model, 3))
            await until(held.begun.is_set)
            clock.ahead = 130
            first.state.promises.sweep()
            held.gate.set()
            await until(lambda: bool(list((tmp_path / "a").glob("runs/*/state-3"))))
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert "metrics" in await second.run("forward_backward", pass_json(model, 4))

    played(scenario)


# ── secrets ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S44")
def test_no_key_and_no_access_token_is_put_on_disk(tmp_path: Path) -> None:
    """And yet the load that a token allowed is repeated after a crash, when the token is good no
    more."""

    async def scenario() -> None:
        engine = FakeEngine()
        async with life(tmp_path / "a", engine) as first:
            (ada_id, ada), (_, bob) = (
                create_key(first.state.database, name, name) for name in ("ada", "bob")
            )
            body = {"model_seq_id": 0, "base_model": "fake", "lora_config": {"rank": 4}}
            hers, his = await first.session(ada), await first.session(bob)
            model = (await first.run("create_model", {**body, "session_id": hers}, ada))["model_id"]
            path = (await first.run("save_weights", save_json(model, 1, "x"), ada))["path"]
            own = (await first.run("create_model", {**body, "session_id": his}, bob))["model_id"]
            body = {"model_id": own, "seq_id": 1, "sampling_session_seq_id": 0}
            await first.run("save_weights_for_sampler", body, bob)
            # so that no state comes into force, and the load must be repeated
            engine.fail = failing("save_sampler")
            load = {"path": path, "optimizer": True, "weights_access_token": ada}
            ids = [
                await first.submit("load_weights", {**load, "model_id": own, "seq_id": 2}, bob),
                await first.submit(
                    "load_weights", {**load, "session_id": his, "model_seq_id": 1}, bob
                ),
            ]
            told = [await first.result(request_id, bob) for request_id in ids]
            assert not any("error" in answer for answer in told), told
            again = {**load, "session_id": his, "model_seq_id": 1}
            assert await first.submit("load_weights", again, bob) == ids[1]
            # a refusal is journalled, for its number is spent
            for wrong in (["tml-planted"], {"a": "tml-planted"}):
                status, _ = await first.send(
                    "load_weights",
                    {**load, "model_id": own, "seq_id": 3, "weights_access_token": wrong},
                    bob,
                )
                assert status == 400
            await first.send(
                "load_weights",
                {**load, "model_id": own, "weights_access_token": "tml-planted"},
                bob,
            )
            await first.state.meter.flush()
            image = killed(tmp_path / "a")
        for directory in (tmp_path / "a", image):
            for file in directory.rglob("*"):
                if file.is_file():
                    data = file.read_bytes()
                    assert not any(
                        secret in data for secret in (ada.encode(), bob.encode(), b"tml-planted")
                    ), file
        for left in image.glob("runs/*/state-*.new"):
            shutil.rmtree(left)
        async with life(image) as second:
            sqlite(second.state).rows("UPDATE keys SET revoked = 1 WHERE id = ?", ada_id)
            assert [await second.result(request_id, bob) for request_id in ids] == told
            assert (await second.run("forward_backward", pass_json(f"{his}:train:1", 1), bob))[
                "metrics"
            ]

    played(scenario)


# ── stopping ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S44")
def test_stopping_server_fails_no_work_and_saves_its_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_delay=0.02)
        async with life(tmp_path / "a", engine) as first:
            model = await first.model()
            session = model.partition(":")[0]
            for number in (1, 3, 5):
                await first.run("forward_backward", pass_json(model, number))
                stepped = await first.run("optim_step", step_json(model, number + 1))
            await first.run(
                "save_weights_for_sampler",
                {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0},
            )
            params = {"max_tokens": 400, "seed": 3}
            drawn = await first.submit(
                "asample", sample_json(f"{session}:sample:0", 0, sampling_params=params)
            )
            engine.delay = 0.5
            later = [
                await first.submit("forward_backward", pass_json(model, number))
                for number in range(9, 14)
            ]
            asking = [
                asyncio.create_task(first.send("retrieve_future", {"request_id": i}))
                for i in [drawn, *later]
            ]
            await asyncio.sleep(0.05)
            await first.state.leave()
            assert {status for status, _ in await asyncio.gather(*asking)} == {503}
            assert (await first.send("retrieve_future", {"request_id": later[-1]}))[0] == 503
            assert (await first.send("forward_backward", pass_json(model, 8)))[0] == 503
        (run,) = (tmp_path / "a" / "runs").iterdir()
        assert [path.name for path in run.glob("state-*")] == ["state-7"]
        async with life(tmp_path / "a") as second:
            assert await second.result(f"{model}:6") == stepped
            await second.submit("forward_backward", pass_json(model, 8))
            for request_id in later:
                assert "metrics" in await second.result(request_id)
            assert len((await second.result(drawn))["sequences"][0]["tokens"]) == 400

    played(scenario)


def test_stopping_server_does_not_wait_for_gaps(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as first:
            model = await first.model()
            await first.submit("forward_backward", pass_json(model, 2))
            await asyncio.wait_for(first.state.drain(), 20)

    played(scenario)


@pytest.mark.parametrize(("rest", "fewest", "most"), [(0, 6, 6), (4, 2, 3)])
def test_states_that_take_long_are_written_less_often(
    rest: int, fewest: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a second, and there is a step a second besides: of six steps, some rest."""
    clock, saves = Clock(), []
    monkeypatch.setattr(snapshot, "time", clock)
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 2)
    monkeypatch.setattr(snapshot, "STATE_REST", rest)

    def slow(method: str, subject: str) -> None:
        if method == "save":
            saves.append(subject)
            clock.ahead += 1

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=slow)) as server:
            model = await server.model()
            for number in range(1, 12, 2):
                await server.run("forward_backward", pass_json(model, number))
                clock.ahead += 1
                await server.run("optim_step", step_json(model, number + 1))
                await until(lambda: not server.state.runs[model].committing.locked())
            assert fewest <= len(saves) <= most

    played(scenario)


@pytest.mark.covers("S44")
@pytest.mark.parametrize("is_written", [False, True])
def test_run_continues_while_its_state_is_written(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """… which is the state as it was, and the next life goes on as this one did, whether it was
    written or not."""
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 2)
    held = Held("save")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as first:
            try:
                model = await first.model()
                told = []
                for number in range(1, 8, 2):
                    told.append(await first.run("forward_backward", pass_json(model, number)))
                    told.append(await first.run("optim_step", step_json(model, number + 1)))
                    assert held.begun.wait(5)
                assert len(held.subjects) == 1, "one at a time"
                directory = first.state.journals.run_directory(model)
                if is_written:
                    held.gate.set()
                    await until(lambda: (directory / "state-2").is_dir())
                    assert (
                        json.loads((directory / "state-2" / "fake.json").read_text())["step"] == 1
                    )
                else:
                    assert [path.name for path in directory.glob("*-2")] == ["unfinished-2"]
                image = killed(tmp_path / "a")
                told.append(await first.run("forward", forward_json(model, 9)))
            finally:
                held.gate.set()
        async with life(image) as second:
            assert await second.run("forward", forward_json(model, 9)) == told[-1]
            assert [await second.result(f"{model}:{number}") for number in range(1, 10)] == told
            directory = second.state.journals.run_directory(model)
            # what is left, and its own
            await until(lambda: not list(directory.glob("unfinished-*")))

    played(scenario)


def forward_json(model: str, number: int) -> dict[str, Any]:
    body = pass_json(model, number)
    return {**body, "forward_input": body.pop("forward_backward_input")}


@pytest.mark.covers("S44")
def test_load_is_answered_after_its_state_is_written(tmp_path: Path) -> None:
    """For what was loaded may be deleted then."""
    held = Held("save")
    held.gate.set()

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as server:
            try:
                model = await server.model()
                path = (await server.run("save_weights", save_json(model, 1, "x")))["path"]
                held.begun.clear()
                held.gate.clear()
                load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
                request_id = await server.submit("load_weights", load)
                await until(held.begun.is_set)
                promise = server.state.promises.get(request_id)
                assert promise is not None
                await asyncio.sleep(0.05)
                assert not promise.done.is_set()
                held.gate.set()
                assert "error" not in await server.result(request_id)
                assert list(server.state.journals.run_directory(model).glob("state-2*"))
            finally:
                held.gate.set()

    played(scenario)


def test_state_that_cannot_be_written_fails_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 2)

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=failing("save"))) as first:
            model = await first.model()
            told = [await first.run("forward_backward", pass_json(model, 1))]
            told.append(await first.run("optim_step", step_json(model, 2)))
            await until(lambda: "could not be written; its journal stays" in caplog.text)
            assert not list(first.state.journals.run_directory(model).glob("*-2*"))
            image = killed(tmp_path / "a")
        async with life(image) as second:
            assert [await second.result(f"{model}:{number}") for number in (1, 2)] == told

    played(scenario)


def test_run_unloaded_during_its_write_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", 2)
    held = Held("save")

    async def scenario() -> None:
        async with life(tmp_path / "a", FakeEngine(fail=held)) as server:
            try:
                # one is written, the other waits for that
                models = [await server.model(), await server.model()]
                for model in models:
                    await server.run("forward_backward", pass_json(model, 1))
                    await server.run("optim_step", step_json(model, 2))
                    assert held.begun.wait(5)
                lives = list(server.state.runs.values())
                for model in models:
                    await server.run("unload_model", {"model_id": model})
            finally:
                held.gate.set()
            await until(lambda: not any(live.committing.locked() for live in lives))
            assert list((tmp_path / "a" / "runs").iterdir()) == []

    played(scenario)
    assert "could not be written" not in caplog.text


def test_unrestorable_run_is_marked_corrupted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state on disk is damaged: nothing goes on with half of it, and whoever asks is told."""

    async def scenario() -> None:
        submission_before = snapshot.STATE_OPERATIONS
        snapshot.STATE_OPERATIONS = 1
        try:
            async with life(tmp_path / "a") as server:
                model = await server.model()
                await server.run("forward_backward", pass_json(model, 1))
                await server.run("optim_step", step_json(model, 2))
                directory = server.state.journals.run_directory(model)
                while not list(directory.glob("state-2")):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                left = killed(tmp_path / "a")
        finally:
            snapshot.STATE_OPERATIONS = submission_before
        [damaged] = (left / "runs").glob("*/state-2/fake.json")
        damaged.write_text("{")
        async with life(left) as server:
            _, run = await server.send(f"training_runs/{model}", None, method="GET")
            assert run["corrupted"] is False
            status, answer = await server.send("forward_backward", pass_json(model, 3))
            assert status == 410
            assert "could not be restored" in answer["detail"]
            _, run = await server.send(f"training_runs/{model}", None, method="GET")
            assert run["corrupted"] is True
            assert model not in server.state.runs

    played(scenario)
    assert "could not be restored" in caplog.text


def test_run_with_a_damaged_journal_is_marked_and_its_files_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            model = await server.model()
            for number in (1, 2, 3):
                await server.run("forward_backward", pass_json(model, number))
            left = killed(tmp_path / "a")
        [segment] = (left / "runs").glob("*/segment-*.log")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        async with life(left) as server:
            status, _ = await server.send("optim_step", step_json(model, 4))
            assert status == 410
            _, run = await server.send(f"training_runs/{model}", None, method="GET")
            assert run["corrupted"] is True
            session = model.partition(":")[0]
            await server.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        [kept] = (left / "set-aside").glob("*/segment-*.log")
        assert kept.read_bytes() == data

    played(scenario)
    assert "segment-00000001.log is damaged" in caplog.text
    assert "set-aside" in caplog.text


def test_runs_of_a_session_that_is_not_on_record_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            model = await server.model()
            await server.run("forward_backward", pass_json(model, 1))
            await server.run("optim_step", step_json(model, 2))
            left = killed(tmp_path / "a")
        (left / "tinkex.sqlite3-wal").unlink()  # what a power loss could take before it was flushed
        for path in left.glob("tinkex.sqlite3*"):
            path.unlink()
        before = {path.name: path.read_bytes() for path in (left / "runs").glob("*/segment-*")}
        async with life(left) as server:
            assert not server.state.runs
        kept = {path.name: path.read_bytes() for path in (left / "set-aside").glob("*/segment-*")}
        assert kept == before

    played(scenario)
    assert "is not on record" in caplog.text


def test_two_servers_cannot_use_one_data_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a"):
            with pytest.raises(DataDirError, match="another tinkex server"):
                create_app(FakeEngine(), tmp_path / "a")
        async with life(tmp_path / "a"):  # the lock ends with its server
            pass

    played(scenario)


def test_programs_with_an_embedded_server_share_a_data_directory(tmp_path: Path) -> None:
    first = create_app(FakeEngine(), tmp_path / "a", embedded=True).state.server
    second = create_app(FakeEngine(), tmp_path / "a", embedded=True).state.server
    with pytest.raises(DataDirError):
        create_app(FakeEngine(), tmp_path / "a")
    for each in (first, second):
        each.database.close()
        each.unlock()


def test_server_that_has_no_memory_for_a_run_does_not_call_it_corrupted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            model = await server.model()
            await server.run("forward_backward", pass_json(model, 1))
            left = killed(tmp_path / "a")
        async with life(left) as server:
            directory = server.state.journals.run_directory(model)
            server.state.journals.of(directory).read = _no_room  # type: ignore[method-assign]
            status, _ = await server.send("forward_backward", pass_json(model, 2))
            assert status == 410
            _, run = await server.send(f"training_runs/{model}", None, method="GET")
            assert run["corrupted"] is False

    played(scenario)


def _no_room() -> Any:
    raise EngineError("no memory is left", "server")
