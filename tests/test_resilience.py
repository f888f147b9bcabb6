"""Training loops whose run is really lost, in every way there is: they end with the weights of one
that was not."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tinkex
from support import MODEL, Wire, serving
from tinkex import Future, RecoveryError, RecoveryPolicy, ServiceClient, events, types
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.errors import GoneError
from tinkex.recovery.recorder import Entry
from tinkex.recovery.resilient import ResilientSamplingClient, ResilientTrainingClient
from tinkex.server.database.sqlite import DATABASE, SqliteDatabase
from tinkex.server.runs.journal import Committer, Segment
from tinkex.server.runs.promises import Promises

QUICK = RecoveryPolicy(enabled=True, backoff_ms=1, max_attempts=2)
STEPS = 7


def datum(*tokens: int) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints(list(tokens)), {"target_tokens": [t + 1 for t in tokens]}
    )


class World:
    """A server that can lose what it has, and the loop that is run against it."""

    def __init__(
        self, root: Path, engine: Callable[[], Any] = FakeEngine, model: str = "fake"
    ) -> None:
        self.root, self.make_engine, self.model = root, engine, model
        self.life = 0
        self.engine = engine()
        self._serving: Any = None
        self.url = ""

    @property
    def data_dir(self) -> Path:
        return self.root / f"life-{self.life}"

    def begin(self, port: int = 0) -> None:
        self._serving = serving(self.engine, self.data_dir, port, embedded=True)
        self.url = self._serving.__enter__()

    def end(self) -> None:
        self._serving.__exit__(None, None, None)

    @property
    def wire(self) -> Wire:
        return Wire(self.url)

    def sql(self, statement: str, *values: Any) -> None:
        with closing(SqliteDatabase(self.data_dir)) as store:
            store.connection.rows(statement, *values)

    # ── ways to lose a run ────────────────────────────────────────────────────────────────────────

    def unload(self, trainer: ResilientTrainingClient) -> None:
        self.wire.run("unload_model", {"model_id": trainer.model_id})

    def finish_session(self, trainer: ResilientTrainingClient) -> None:
        session = trainer.holder.session_id
        heard = self.wire.send(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
        assert heard.status == 200, heard

    def forget_everything(self, trainer: ResilientTrainingClient) -> None:
        """The server comes back on an empty directory; only the checkpoints were rescued."""
        port = int(self.url.rpartition(":")[2])
        self.end()
        old, self.engine = self.data_dir, self.make_engine()
        self.life += 1
        self.data_dir.mkdir(parents=True)
        (old / "checkpoints").rename(self.data_dir / "checkpoints")
        new = self.data_dir / DATABASE
        with (
            closing(sqlite3.connect(old / DATABASE)) as source,
            closing(sqlite3.connect(new)) as target,
        ):
            source.backup(target)
        with closing(SqliteDatabase(self.data_dir)) as store:
            for table in ("sessions", "runs", "samplers"):
                store.connection.rows(f"DELETE FROM {table}")
        self.begin(port)

    def corrupt(self, trainer: ResilientTrainingClient) -> None:
        """The weights are nonsense from now on, and the server knows."""
        adapter = self.engine._adapters[trainer.model_id]
        adapter.weights = np.full_like(adapter.weights, 7.0)
        self.sql("UPDATE runs SET corrupted = 1 WHERE model_id = ?", trainer.model_id)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.begin()
    tinkex.configure(patience=20)
    yield made
    tinkex.configure()
    made.end()


@contextmanager
def service_of(world: World) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=world.url) as service:
        yield service


def loop(
    client: Any,
    steps: int = STEPS,
    before: Callable[[int], object] = lambda step: None,
    wait: bool = True,
) -> Any:
    """Two passes and a step, over and over; the losses, and the weights at the end."""
    passes: list[Any] = []
    for step in range(steps):
        before(step)
        passes.append(
            client.forward_backward([datum(1 + step, 2, 3), datum(4, 5)], "cross_entropy")
        )
        passes.append(client.forward_backward([datum(7, 8 + step)], "cross_entropy"))
        stepped = client.optim_step(types.AdamParams(learning_rate=0.1))
        if wait:
            stepped.result(50)
    return [one.result(50).metrics["loss:sum"] for one in passes]


def weights_of(world: World, path: str) -> Any:
    run, kind, name = path.removeprefix("tinker://").split("/")
    [directory] = world.root.glob(f"*/checkpoints/{run.replace(':', '_')}/{kind}/{name}")
    if (directory / "fake.json").is_file():
        return json.loads((directory / "fake.json").read_text())
    return {
        f"{file.name}/{key}": value.tobytes()
        for file in sorted(directory.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def undisturbed(world: World) -> tuple[list[float], Any]:
    with service_of(world) as service:
        client = service.create_lora_training_client(world.model, rank=4, seed=3).result()
        losses = loop(client)
        return losses, weights_of(world, client.save_state("end").result(50).path)


LOSSES = ["unload", "finish_session", "forget_everything", "corrupt"]


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(True, id="one-by-one", marks=pytest.mark.slow),
        pytest.param(False, id="pipelined"),
    ],
)
@pytest.mark.parametrize("how", LOSSES)
def test_recovered_loop_ends_with_the_weights_of_an_uninterrupted_loop(
    world: World, how: str, wait: bool
) -> None:
    losses, weights = undisturbed(world)
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
            first = trainer.model_id

            def lose(step: int) -> None:
                if step == 5:
                    getattr(world, how)(trainer)

            given = loop(trainer, before=lose, wait=wait)
            saved = trainer.save_state("end").result(50).path
        assert trainer.recoveries == 1
        assert trainer.model_id != first
        assert weights_of(world, saved) == weights
        # what was given before it was known to be nonsense cannot be taken back
        if how != "corrupt":
            assert given == losses


def test_several_losses_one_after_the_other(world: World) -> None:
    losses, weights = undisturbed(world)
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=3, policy=QUICK) as trainer:
            ways = {
                1: world.unload,
                2: world.finish_session,
                4: world.forget_everything,
                6: world.unload,
            }
            given = loop(trainer, before=lambda step: ways.get(step, lambda _: None)(trainer))
            assert weights_of(world, trainer.save_state("end").result(50).path) == weights
        assert given == losses
        assert trainer.recoveries == 4


def test_loss_after_the_last_call_is_mended_when_the_block_is_left(world: World) -> None:
    _, weights = undisturbed(world)
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=4, policy=QUICK) as trainer:
            loop(trainer)
            world.corrupt(trainer)
        assert trainer.recoveries == 1
        assert weights_of(world, trainer.save_state("end").result(50).path) == weights


@pytest.mark.parametrize("how", ["finish_session", "forget_everything"])
def test_samplers_stay_usable_with_equal_results(world: World, how: str) -> None:
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=6, seed=1)
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
            loop(trainer, 3)
            nameless = trainer.save_weights_and_get_sampling_client().result()
            path = trainer.save_weights_for_sampler("named").result(50).path
            named = trainer.create_sampling_client(path).result()
            before = [sampler.sample(prompt, 2, params).result(50) for sampler in (nameless, named)]
            getattr(world, how)(trainer)
            loop(trainer, 2)
            after = [sampler.sample(prompt, 2, params).result(50) for sampler in (nameless, named)]
            streamed = [
                chunk.token_id
                for chunk in named.sample_stream(prompt, params)
                if chunk.token_id is not None
            ]
            scores = nameless.compute_logprobs(prompt).result(50)
    assert [[s.logprobs for s in one.sequences] for one in after] == [
        [s.logprobs for s in one.sequences] for one in before
    ]
    assert len(streamed) == 6
    assert len(scores) == 2


@pytest.mark.covers("U2", "U36")
def test_resilient_client_is_made_of_a_future_and_gives_futures(world: World) -> None:
    with (
        service_of(world) as service,
        tinkex.resilient(service.create_lora_training_client("fake", rank=4)) as trainer,
    ):
        named = trainer.save_weights_for_sampler("named").result(20).path
        futures = [
            trainer.save_weights_and_get_sampling_client(),
            trainer.create_sampling_client(named),
        ]
        for future in futures:
            assert isinstance(future, tinkex.BackcompatSamplingClientFuture)
            sampler = future.result(20)
            assert type(sampler) is ResilientSamplingClient
            assert sampler.get_base_model() == trainer.get_info().model_data.model_name == "fake"
        with pytest.raises(ValueError, match="'snapshot' only"):
            trainer.save_weights_and_get_sampling_client(kind="inflight")
        [receipt] = trainer.receipts.forward_backward([datum(1, 2)], "cross_entropy").result(20)
        assert trainer.receipts.retrieve(receipt).result(20).metrics
        first = trainer.get_info()
        world.unload(trainer)
        stepped = trainer.optim_step(types.AdamParams(learning_rate=0.1))
        stepped.result(20)
        assert trainer.recoveries == 1
        assert trainer.get_info().model_id == trainer.model_id != first.model_id


def test_users_service_survives_a_lost_session(world: World) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
            lost = trainer.holder.session_id
            world.finish_session(trainer)
            loop(trainer, 1)
            other = service.create_lora_training_client("fake", rank=4).result()
            assert other.model_id.startswith(trainer.holder.session_id)
            assert trainer.holder.session_id != lost


async def test_same_in_an_event_loop(world: World) -> None:
    _, weights = await asyncio.to_thread(undisturbed, world)
    service = ServiceClient(base_url=world.url)
    client = await service.create_lora_training_client("fake", rank=4, seed=3)
    async with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
        for step in range(STEPS):
            if step == 4:
                await asyncio.to_thread(world.unload, trainer)
            trainer.forward_backward([datum(1 + step, 2, 3), datum(4, 5)], "cross_entropy")
            trainer.forward_backward([datum(7, 8 + step)], "cross_entropy")
            await trainer.optim_step(types.AdamParams(learning_rate=0.1))
        saved = await trainer.save_state("end")
    assert trainer.recoveries == 1
    assert weights_of(world, saved.path) == weights
    await service.close()


# ── what is kept and told ─────────────────────────────────────────────────────────────────────────


def test_journal_keeps_records_after_the_last_state_only(
    world: World,
) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        rest = tinkex.RestClient(base_url=world.url)
        with tinkex.resilient(client, every=2, keep=2, name="mine", policy=QUICK) as trainer:
            loop(trainer, 9)
            deadline = time.monotonic() + 10
            while len(trainer._outbox.log) > 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert [entry.name for entry in trainer._outbox.log] == [
                "forward_backward",
                "forward_backward",
                "optim_step",
            ]
            assert trainer.checkpoint is not None
            assert trainer.checkpoint.endswith("-8")
            while time.monotonic() < deadline:
                names = [
                    c.checkpoint_id
                    for c in rest.list_checkpoints(trainer.model_id).result(50).checkpoints
                ]
                if len(names) == 2:
                    break
                time.sleep(0.01)
            assert all(name.startswith("weights/mine-") for name in names)
            assert sorted(name.rpartition("-")[2] for name in names) == ["6", "8"]


def test_recovery_reports_on_the_bus_and_to_the_callback(world: World) -> None:
    heard: list[tuple[str, dict[str, float], dict[str, Any]]] = []
    told: list[Any] = []
    policy = RecoveryPolicy(
        enabled=True, backoff_ms=1, on_recovery=lambda *facts: told.append(facts)
    )
    names = [name for name in events.CATALOGUE if name.startswith("tinkex.recovery.")]
    events.attach(
        "test", names, lambda name, numbers, facts: heard.append((name, dict(numbers), dict(facts)))
    )
    try:
        with service_of(world) as service:
            client = service.create_lora_training_client(
                "fake", rank=4, user_metadata={"who": "me"}
            ).result()
            with tinkex.resilient(client, every=2, policy=policy) as trainer:
                loop(trainer, 2)
                deadline = time.monotonic() + 10
                while not str(trainer.checkpoint).endswith("-2") and time.monotonic() < deadline:
                    time.sleep(0.01)  # it is saved in the background
                checkpoint = trainer.checkpoint
                world.unload(trainer)
                loop(trainer, 1)
            run = (
                tinkex.RestClient(base_url=world.url).get_training_run(trainer.model_id).result(50)
            )
            assert run.user_metadata == {"who": "me"}
    finally:
        events.detach("test")
    assert [name.rpartition(".")[2] for name, _, _ in heard] == [
        "detected",
        "started",
        "checkpoint_selected",
        "client_created",
        "completed",
    ]
    assert all(facts["run_id"] == client.model_id for _, _, facts in heard)
    assert all(numbers == {"attempt": 1} for _, numbers, _ in heard[1:])
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    [(old, new, path)] = told
    assert old is client
    assert new.model_id == trainer.model_id
    assert path == checkpoint


# ── failures that are no loss, and losses without an end ──────────────────────────────────────────


def test_mistake_is_a_user_error_and_loses_no_state(world: World) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
            with pytest.raises(ValueError, match="there is no loss"):
                trainer.forward_backward([datum(1)], "nonsense")
            with pytest.raises(ValueError, match="data is empty"):
                trainer.forward_backward([], "cross_entropy")
            wrong = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2, 3]})
            with pytest.raises(tinkex.TinkerError):
                trainer.forward_backward([wrong], "cross_entropy").result(50)
            loop(trainer, 2)
        assert trainer.recoveries == 0


def test_call_that_failed_is_not_made_again(world: World) -> None:
    wrong = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2, 3]})
    _, weights = undisturbed(world)
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=50, policy=QUICK) as trainer:
            with pytest.raises(tinkex.TinkerError):
                trainer.forward_backward([wrong], "cross_entropy").result(50)
            loop(trainer, before=lambda step: world.unload(trainer) if step == 5 else None)
            assert weights_of(world, trainer.save_state("end").result(50).path) == weights


def test_lost_run_without_saved_states_stays_lost(world: World) -> None:
    failed: list[Any] = []
    policy = RecoveryPolicy(
        enabled=True, max_attempts=2, backoff_ms=1, on_failure=lambda *facts: failed.append(facts)
    )
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        trainer = tinkex.resilient(client, every=2, policy=policy)

        def go() -> None:
            with trainer:
                loop(trainer, 3)
                world.sql("DELETE FROM checkpoints")
                world.unload(trainer)
                with pytest.raises(RecoveryError, match="there is no checkpoint") as caught:
                    trainer.forward_backward([datum(1, 2)], "cross_entropy").result(50)
                assert caught.value.reason == "exhausted"
                with pytest.raises(RecoveryError):
                    trainer.optim_step(types.AdamParams())

        # the block says so again
        with pytest.raises(RecoveryError, match="could not be recovered"):
            go()
        deadline = time.monotonic() + 10
        while not failed and time.monotonic() < deadline:
            time.sleep(0.01)
        [(run_id, error)] = failed
        assert run_id == client.model_id
        assert "no checkpoint" in str(error)


def test_repeatedly_lost_run_fails(world: World) -> None:
    def lose(method: str, subject: str) -> None:
        if method == "forward_backward":
            world.sql("UPDATE runs SET corrupted = 1")
            raise EngineError("the weights are gone", "server")

    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        trainer = tinkex.resilient(client, every=2, policy=QUICK)

        def go() -> None:
            with trainer:
                world.engine.fail = lose
                trainer.forward_backward([datum(1, 2)], "cross_entropy").result(50)

        with pytest.raises(RecoveryError, match="the weights are gone"):
            go()
        assert trainer.recoveries == QUICK.max_attempts


def test_unloaded_run_is_not_recovered(world: World) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
            loop(trainer, 1)
            trainer.unload_model()
            with pytest.raises(RuntimeError, match="was unloaded"):
                trainer.optim_step(types.AdamParams())
        assert trainer.recoveries == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be"),
        ({"every": True}, "every must be"),
        ({"keep": 0}, "keep must be"),
        ({"policy": {"enabled": False}}, "not enabled"),
        ({"policy": {"enabled": True, "checkpoint_strategy": "best"}}, "only the latest state"),
        ({"policy": {"enabled": True, "restore_optimizer": False}}, "only the latest state"),
    ],
)
def test_options_that_cannot_work_are_refused(
    world: World, options: dict[str, Any], message: str
) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with pytest.raises(ValueError, match=message):
            tinkex.resilient(client, **options)
        with pytest.raises(ValueError, match="already"):
            tinkex.resilient(tinkex.resilient(client))
        with pytest.raises(RuntimeError, match="with block"):
            tinkex.resilient(client).optim_step(types.AdamParams())


def test_real_model_weights_are_the_same_bits(tmp_path: Path, model_dir: Path) -> None:
    from tinkex.engine.torch.engine import TorchEngine

    world = World(tmp_path, lambda: TorchEngine({MODEL: model_dir}), MODEL)
    world.begin()
    try:
        losses, weights = undisturbed(world)
        with service_of(world) as service:
            client = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
            with tinkex.resilient(client, every=2, policy=QUICK) as trainer:
                ways = {2: world.unload, 5: world.finish_session}
                given = loop(trainer, before=lambda step: ways.get(step, lambda _: None)(trainer))
                saved = weights_of(world, trainer.save_state("end").result(50).path)
            assert trainer.recoveries == 2
        assert given == losses
        assert saved == weights
        assert any(key.startswith("optimizer") for key in saved)
    finally:
        world.end()


def test_state_counts_only_once_everything_before_it_has_its_result(world: World) -> None:
    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with tinkex.resilient(client, every=50, policy=QUICK) as trainer:
            first = trainer.checkpoint
            open_pass, state = (
                Entry(name, lambda _: Future(), Future()) for name in ("pass", "state")
            )
            state.saved, state.over = "tinker://later", True
            trainer._outbox.log += [open_pass, state]
            trainer._outbox.trim()
            assert trainer.checkpoint == first
            open_pass.over = True
            trainer._outbox.trim()
            assert trainer.checkpoint == "tinker://later"
            assert trainer._outbox.log == []


async def test_new_completion_log_serves_old_cursors() -> None:
    promises, target = Promises(), ("session:sample:0", 0)
    seen = 0
    # each session's end closes the log; samples of saved weights go on all the same
    for number in range(3):
        promise = promises.add(f"session:sample:0:{number}", b"", "session", target)
        promise.settle(None)
        promises.open_log(target, "session")
        log = promises.log(target)
        assert log is not None
        assert [ended.request_id for ended in log.after(seen)] == [promise.request_id]
        seen = log.cursor
        promises.forget_session("session")


async def test_closed_journal_does_not_stop_other_journals(
    tmp_path: Path,
) -> None:
    committer = Committer(flush=False)
    closed, other = Segment(tmp_path / "a"), Segment(tmp_path / "b")
    closed.close()  # its session was finished while a request was on its way to the disk
    with pytest.raises(OSError, match="is closed"):
        await asyncio.wait_for(committer.write(closed, b"lost"), 10)
    await asyncio.wait_for(committer.write(other, b"kept"), 10)
    committer.stop()
    other.close()
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b").read_bytes() == b"kept"


def test_calls_before_a_failed_custom_loss_are_made_again(world: World) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("mine")

    def weights(run: str) -> Any:
        adapter = world.engine._adapters.get(run)
        return None if adapter is None else adapter.weights.tolist()

    with service_of(world) as service:
        client = service.create_lora_training_client("fake", rank=4, seed=3).result()
        with tinkex.resilient(client, every=50, policy=QUICK) as trainer:
            loop(trainer)
            before = weights(trainer.model_id)
            with pytest.raises(KeyError):
                trainer.forward_backward_custom([datum(1, 2)], broken).result(50)
            with pytest.raises(RuntimeError, match="an earlier custom loss"):
                trainer.optim_step(types.AdamParams()).result(50)
            trainer._outbox._lose(trainer._outbox.life, GoneError("the run is gone"))
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if trainer.recoveries and weights(trainer.model_id) == before:
                    break
                time.sleep(0.01)
            assert trainer.recoveries == 1
            assert weights(trainer.model_id) == before
            with pytest.raises(RuntimeError, match="an earlier custom loss"):
                trainer.optim_step(types.AdamParams()).result(50)
