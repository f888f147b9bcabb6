"""The recovery policy, the monitor that notices corrupted runs, and the executor that makes them
anew."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tinkex
from support import serving
from tinkex import RecoveryError, RecoveryPolicy, ServiceClient, TrainingClient, events, types
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.settings.config import Config
from tinkex.engine.fake import FakeEngine
from tinkex.recovery.monitor import (
    Executor,
    Monitor,
    best_checkpoint,
    metrics_metadata,
    rest_client_of,
)
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.types.checkpoints import TrainingRun

# ── the policy ────────────────────────────────────────────────────────────────────────────────────

DEFAULTS = RecoveryPolicy()


@pytest.mark.covers(
    "1.11/1",
    "1.11.1/1",
    "1.11.1/2",
    "1.11.1/3",
    "1.11.1/4",
    "1.11.1/5",
    "1.11.1/6",
    "1.11.1/7",
    "1.11.1/8",
    "1.11.1/9",
)
def test_defaults_are_the_documented_ones() -> None:
    assert (DEFAULTS.enabled, DEFAULTS.max_attempts, DEFAULTS.backoff_ms) == (False, 3, 5_000)
    assert (DEFAULTS.max_backoff_ms, DEFAULTS.poll_interval_ms) == (60_000, 30_000)
    assert (DEFAULTS.checkpoint_strategy, DEFAULTS.restore_optimizer) == ("latest", True)
    assert (DEFAULTS.on_recovery, DEFAULTS.on_failure) == (None, None)


@pytest.mark.covers(
    "1.11.1/1", "1.11.1/2", "1.11.1/3", "1.11.1/4", "1.11.1/5", "1.11.1/7", "1.11.1/8", "1.11.1/9"
)
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("enabled", True, ["yes", 1, None]),
        ("max_attempts", 7, [0, -1, 2.5, True, "3"]),
        ("backoff_ms", 10, [0, -5, None]),
        ("max_backoff_ms", 10, [0, 1.0]),
        ("poll_interval_ms", 10, [0, "10"]),
        ("restore_optimizer", False, ["no", 0]),
        ("on_recovery", lambda a, b, c: None, [lambda a: None, "f", 3]),
        ("on_failure", lambda a, b: None, [lambda: None, lambda a, b, c: None]),
        ("metric", "reward", ["", 3]),
        ("metric_mode", "max", ["most", None]),
    ],
)
def test_value_of_the_wrong_kind_counts_as_its_default(
    name: str, good: Any, bad: list[Any]
) -> None:
    assert getattr(RecoveryPolicy.of({name: good}), name) == good
    for value in bad:
        assert getattr(RecoveryPolicy.of({name: value}), name) == getattr(DEFAULTS, name), value


@pytest.mark.covers("1.11.1/6")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("latest", "latest"),
        ("BEST", "best"),
        (" Latest ", "latest"),
        (("specific", "tinker://a/weights/b"), ("specific", "tinker://a/weights/b")),
        (["Specific", "tinker://a/weights/b"], ("specific", "tinker://a/weights/b")),
        (("specific", ""), "latest"),
        (("specific",), "latest"),
        ("oldest", "latest"),
        (7, "latest"),
    ],
)
def test_strategies_are_read_in_any_letter_case(given: Any, expected: Any) -> None:
    assert RecoveryPolicy.of({"checkpoint_strategy": given}).checkpoint_strategy == expected


@pytest.mark.covers("1.11.1/10")
def test_policy_is_made_of_a_policy_a_mapping_pairs_or_none() -> None:
    policy = RecoveryPolicy(enabled=True)
    assert RecoveryPolicy.of(policy) is policy
    assert RecoveryPolicy.of(None) == DEFAULTS
    assert RecoveryPolicy.of([("enabled", True), ("unheard_of", 1)]) == policy
    for wrong in ("enabled", 7, [1, 2]):
        with pytest.raises(TypeError, match="recovery policy"):
            RecoveryPolicy.of(wrong)  # type: ignore[arg-type]


@pytest.mark.covers("1.11.1/11")
def test_config_takes_a_recovery_policy_or_a_mapping() -> None:
    config = Config(base_url="local", recovery={"enabled": True, "max_attempts": 9})
    assert config.recovery == RecoveryPolicy(enabled=True, max_attempts=9)
    with pytest.raises(tinkex.ConfigurationError, match="recovery"):
        Config(base_url="local", recovery=7)  # type: ignore[arg-type]


@pytest.mark.covers("1.11.3/3")
def test_waits_double_up_to_a_limit() -> None:
    assert [DEFAULTS.backoff(attempt) for attempt in (1, 2, 3, 4, 5, 99)] == [5, 10, 20, 40, 60, 60]


# ── a server whose runs can be marked ─────────────────────────────────────────────────────────────


class Place:
    """A server, a service, and a run with checkpoints."""

    def __init__(self, url: str, data_dir: Path, service: ServiceClient) -> None:
        self.url, self.data_dir, self.service = url, data_dir, service

    def run(self, *losses: float) -> TrainingClient:
        """A run with a checkpoint for each loss, and a step between one and the next."""
        client = self.service.create_lora_training_client("fake", rank=4).result()
        data = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
        for number, loss in enumerate(losses):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=0.1))
            client.save_state(f"s{number}", user_metadata=metrics_metadata(loss=loss)).result(20)
        return client

    def corrupt(self, client: TrainingClient) -> None:
        with closing(SqliteDatabase(self.data_dir)) as store:
            store.connection.rows(
                "UPDATE runs SET corrupted = 1 WHERE model_id = ?", client.model_id
            )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        yield Place(url, tmp_path, service)


class Heard:
    """The recovery's events, as they come."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, float], dict[str, Any]]] = []
        self._news = threading.Condition()

    def __call__(self, name: str, numbers: Any, facts: Any) -> None:
        with self._news:
            self.events.append((name.removeprefix("tinkex.recovery."), dict(numbers), dict(facts)))
            self._news.notify_all()

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]

    def wait(self, name: str, count: int = 1) -> dict[str, Any]:
        with self._news:
            assert self._news.wait_for(lambda: self.names.count(name) >= count, 20), self.names
            return [facts for known, _, facts in self.events if known == name][count - 1]


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    events.attach(
        "recovery-test", [n for n in events.CATALOGUE if n.startswith("tinkex.recovery.")], listener
    )
    yield listener
    events.detach("recovery-test")


class Clock:
    """Sleeps that last until they are let go; what they were to last is noted."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._news = threading.Condition()

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._news:
            self.asked.append(seconds)
            self._waiting.append(future)
            self._news.notify_all()
        await future

    def tick(self, count: int = 1) -> None:
        """Let the count-th sleep end, once it has begun."""
        self.wait(count)
        self.release()

    def wait(self, count: int) -> None:
        """Wait until the count-th sleep has begun."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= count, 20), self.asked

    def release(self) -> None:
        """Let what sleeps now wake up."""
        with self._news:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            runtime().call(lambda future=future: None if future.done() else future.set_result(None))


QUICK = RecoveryPolicy(enabled=True, backoff_ms=1, max_attempts=2)


# ── the monitor ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers(
    "1.11.2/2",
    "1.11.2/3",
    "1.11.2/4",
    "1.11.2/6",
    "1.11.2/7",
    "1.11.3/5",
    "1.11.3/7",
    "1.11.4/1",
    "1.11.4/3",
    "1.11.4/4",
    "1.11.4/5",
    "1.11.4/6",
    "1.11.4/9",
)
def test_corrupted_run_is_recovered_from_its_checkpoint(place: Place, heard: Heard) -> None:
    told: list[Any] = []
    policy = replace(
        QUICK, on_recovery=lambda *facts: told.append((*facts, threading.current_thread()))
    )
    healthy, client, clock = place.run(0.5), place.run(0.5), Clock()
    monitor = Monitor(Executor(), policy, sleep=clock.sleep)
    monitor.monitor_run(client.model_id, place.service, {"training_client": client, "who": "me"})
    monitor.monitor_run(healthy.model_id, place.service)
    clock.tick(1)
    clock.tick(2)
    assert heard.names == []
    place.corrupt(client)
    clock.tick(3)
    facts = heard.wait("completed")
    assert heard.names == [
        "detected",
        "started",
        "checkpoint_selected",
        "client_created",
        "completed",
    ]
    path = f"tinker://{client.model_id}/weights/s0"
    for name, numbers, given in heard.events:
        assert given["run_id"] == client.model_id
        assert given["who"] == "me"
        assert numbers == ({} if name == "detected" else {"attempt": 1})
        assert name == "detected" or (given["attempt"], given["strategy"]) == (1, "latest")
    assert heard.events[0][2]["checkpoint"].tinker_path == path
    assert facts["checkpoint"] == path
    assert facts["client"].optim_step(types.AdamParams()).result(20) is not None
    clock.tick(4)  # the healthy one is still looked at, the other one is not
    assert monitor.run_ids == [healthy.model_id]
    assert clock.asked[0] == 30.0
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    [(old, new, checkpoint, thread)] = told
    assert (old, new, checkpoint) == (client, facts["client"], path)
    assert not runtime().is_current
    assert thread.name != "tinkex"  # off the loop
    monitor.stop_monitoring(healthy.model_id)
    monitor.stop_monitoring("unheard of")
    clock.release()


@pytest.mark.covers("1.11/1", "1.11.2/1", "1.11.2/2")
def test_monitor_reports_why_it_does_not_watch(place: Place) -> None:
    for monitor, reason in (
        (Monitor(Executor()), "recovery_disabled"),
        (Monitor(Executor(), RecoveryPolicy()), "recovery_disabled"),
        (Monitor(None, QUICK), "no_executor"),
    ):
        with pytest.raises(RecoveryError) as caught:
            monitor.monitor_run("run", place.service)
        assert caught.value.reason == reason

    def refuse(service: ServiceClient) -> Any:
        raise OSError("no rest today")

    with pytest.raises(OSError, match="no rest today"):
        Monitor(Executor(), QUICK, rest_client_fun=refuse).monitor_run("run", place.service)


@pytest.mark.covers("1.11.1/11", "1.11.2/1", "1.11.2/4", "1.11.2/9")
def test_monitor_without_its_own_policy_uses_the_config(place: Place) -> None:
    clock = Clock()
    tinkex.configure(recovery={"enabled": True, "poll_interval_ms": 7_000})
    try:
        with ServiceClient(base_url=place.url) as service:
            monitor = Monitor(Executor(), sleep=clock.sleep)
            monitor.monitor_run("run", service, "no mapping")  # type: ignore[arg-type]
            clock.tick()
            assert clock.asked[0] == 7.0
            clock.wait(2)  # the look in between is over
            monitor.stop_monitoring("run")
            clock.release()
    finally:
        tinkex.configure()


@pytest.mark.covers("1.11.2/6", "1.11.4/2")
def test_failed_poll_is_reported_and_the_run_stays_watched(place: Place, heard: Heard) -> None:
    clock = Clock()
    monitor = Monitor(Executor(), QUICK, sleep=clock.sleep)
    monitor.monitor_run("nobody", place.service, {"who": "me"})
    clock.tick()
    facts = heard.wait("poll_error")
    assert isinstance(facts["error"], tinkex.NotFoundError)
    assert (facts["run_id"], facts["who"]) == ("nobody", "me")
    assert monitor.run_ids == ["nobody"]
    clock.wait(2)
    monitor.stop_monitoring("nobody")
    clock.release()


@pytest.mark.covers("1.11.2/8", "1.11.2/2", "1.11.2/3")
def test_monitor_has_one_timer_while_it_watches_runs(place: Place) -> None:
    clock = Clock()
    monitor = Monitor(Executor(), QUICK, sleep=clock.sleep)
    assert clock.asked == []  # nobody is watched: nothing waits
    for run_id in ("a", "b", "a"):
        monitor.monitor_run(run_id, place.service)
    assert sorted(monitor.run_ids) == ["a", "b"]
    clock.tick(1)
    clock.wait(2)
    assert len(clock.asked) == 2  # one timer for all, and one look
    for run_id in ("a", "b"):
        monitor.stop_monitoring(run_id)
    clock.release()
    time.sleep(0.05)
    assert len(clock.asked) == 2  # not armed again
    monitor.monitor_run("c", place.service)
    clock.wait(3)
    monitor.stop_monitoring("c")
    clock.release()


@pytest.mark.covers("1.11.2/9")
def test_runs_are_looked_at_one_after_another(place: Place, heard: Heard) -> None:
    under_way, most, looked = 0, 0, list[str]()

    class Slow:
        async def get_training_run(self, run_id: str) -> TrainingRun:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.01)
            under_way -= 1
            looked.append(run_id)
            raise OSError("not now")

    clock = Clock()
    monitor = Monitor(Executor(), QUICK, rest_client_fun=lambda service: Slow(), sleep=clock.sleep)  # type: ignore[arg-type, return-value]
    for run_id in "abc":
        monitor.monitor_run(run_id, place.service)
    clock.tick()
    clock.wait(2)
    assert (looked, most) == (["a", "b", "c"], 1)
    for run_id in "abc":
        monitor.stop_monitoring(run_id)
    clock.release()


@pytest.mark.covers("1.11.2/7")
def test_run_that_the_executor_refuses_is_offered_again(place: Place, heard: Heard) -> None:
    client, clock, busy = place.run(0.5), Clock(), Clock()
    executor = Executor(sleep=busy.sleep)
    executor.recover(
        client.model_id,
        place.service,
        replace(QUICK, checkpoint_strategy=("specific", "tinker://x")),
    )
    heard.wait("failed")  # and waits for another attempt
    place.corrupt(client)
    monitor = Monitor(executor, QUICK, sleep=clock.sleep)
    monitor.monitor_run(client.model_id, place.service)
    clock.tick()
    heard.wait("detected")
    clock.tick(2)
    heard.wait("detected", 2)
    assert monitor.run_ids == [client.model_id]
    busy.tick()
    heard.wait("exhausted")
    clock.tick(3)
    heard.wait("completed")
    deadline = time.monotonic() + 10
    while monitor.run_ids and time.monotonic() < deadline:
        time.sleep(0.01)
    assert monitor.run_ids == []


@pytest.mark.covers("1.11.2/5")
@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, True), ("true", True), ("TRUE", True), ("no", False), (False, False)],
)
def test_corrupted_may_be_written_as_text(given: Any, expected: bool) -> None:
    facts = {
        "training_run_id": "a",
        "base_model": "b",
        "model_owner": "c",
        "is_lora": True,
        "corrupted": given,
    }
    run = TrainingRun.model_validate({**facts, "last_request_time": "2026-01-01T00:00:00Z"})
    assert run.corrupted is expected


# ── the executor ──────────────────────────────────────────────────────────────────────────────────


def recovered(
    place: Place, heard: Heard, policy: RecoveryPolicy, client: TrainingClient, **known: Any
) -> str:
    Executor().recover(client.model_id, place.service, policy, **known)
    return str(heard.wait("completed")["checkpoint"].rpartition("/")[2])


@pytest.mark.covers("1.11.3/6")
@pytest.mark.parametrize(
    ("strategy", "losses", "expected"),
    [
        ({"checkpoint_strategy": "latest"}, (3.0, 1.0, 2.0), "s2"),
        ({"checkpoint_strategy": "best"}, (3.0, 1.0, 2.0), "s1"),
        ({"checkpoint_strategy": "best", "metric_mode": "max"}, (3.0, 1.0, 2.0), "s0"),
        ({"checkpoint_strategy": "best"}, (float("nan"), 4.0, float("nan")), "s1"),
    ],
)
def test_checkpoint_is_chosen_by_the_strategy(
    place: Place, heard: Heard, strategy: dict[str, Any], losses: tuple[float, ...], expected: str
) -> None:
    policy = RecoveryPolicy.of({"enabled": True, **strategy})
    assert recovered(place, heard, policy, place.run(*losses)) == expected


@pytest.mark.covers("1.11.3/6")
def test_known_run_info_spares_a_request(place: Place, heard: Heard) -> None:
    client = place.run(1.0, 2.0)
    path = f"tinker://{client.model_id}/weights/s0"
    run = rest_client_of(place.service).get_training_run(client.model_id).result(20)
    first = next(
        c
        for c in rest_client_of(place.service)
        .list_checkpoints(client.model_id)
        .result(20)
        .checkpoints
        if c.tinker_path == path
    )
    for known in (path, {"tinker_path": path}, {"path": path}, first):
        assert recovered(place, heard, QUICK, client, last_checkpoint=known) == "s0"
        heard.events.clear()
    assert recovered(place, heard, QUICK, client, run=run) == "s1"
    heard.events.clear()
    assert (
        recovered(
            place, heard, replace(QUICK, checkpoint_strategy=("specific", path)), client, run=run
        )
        == "s0"
    )


@pytest.mark.covers("1.11.3/6")
def test_recovery_without_a_checkpoint_fails(place: Place, heard: Heard) -> None:
    client = place.run()
    run = rest_client_of(place.service).get_training_run(client.model_id).result(20)
    once = replace(QUICK, max_attempts=1)
    for number, (policy, known) in enumerate(
        [(once, None), (once, run), (replace(once, checkpoint_strategy="best"), None)], 1
    ):
        Executor().recover(client.model_id, place.service, policy, run=known)
        error = heard.wait("exhausted", number)["error"]
        assert isinstance(error, RecoveryError)
        assert error.reason == "missing_checkpoint"
    with pytest.raises(RecoveryError, match="metric 'loss'"):
        best_checkpoint([], once)


@pytest.mark.covers("1.11.3/5")
@pytest.mark.parametrize(("restore", "step"), [(True, 2), (False, 1)])
def test_optimizers_state_comes_along_unless_it_is_not_wanted(
    place: Place, heard: Heard, restore: bool, step: int
) -> None:
    client = place.run(1.0)
    recovered(place, heard, replace(QUICK, restore_optimizer=restore), client)
    fresh: TrainingClient = heard.wait("completed")["client"]
    data = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
    fresh.forward_backward(data, "cross_entropy")
    fresh.optim_step(types.AdamParams(learning_rate=0.1)).result(20)
    saved = fresh.save_state("then").result(20).path
    directory = (
        place.data_dir / "checkpoints" / fresh.model_id.replace(":", "_") / "weights" / "then"
    )
    assert saved.endswith("then")
    assert f'"step": {step}' in (directory / "fake.json").read_text()


@pytest.mark.covers("1.11.3/2", "1.11.3/3", "1.11.4/7", "1.11.4/8", "1.11.4/9")
def test_failed_attempts_are_counted_and_reported(place: Place, heard: Heard) -> None:
    failed: list[Any] = []
    clock = Clock()
    executor = Executor(sleep=clock.sleep)
    policy = RecoveryPolicy(
        enabled=True,
        max_attempts=3,
        checkpoint_strategy=("specific", "tinker://run/weights/none"),
        on_failure=lambda *facts: failed.append(facts),
    )
    executor.recover("run", place.service, policy)
    with pytest.raises(RecoveryError) as caught:
        executor.recover("run", place.service, policy)
    assert caught.value.reason == "already_pending"
    heard.wait("failed")
    assert executor.pending == ["run"]
    clock.tick(1)
    heard.wait("failed", 2)
    clock.tick(2)
    heard.wait("exhausted")
    assert clock.asked == [5.0, 10.0]
    assert heard.names == ["started", "checkpoint_selected", "failed"] * 3 + ["exhausted"]
    assert [numbers["attempt"] for _, numbers, _ in heard.events] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    deadline = time.monotonic() + 10
    while not failed and time.monotonic() < deadline:
        time.sleep(0.01)
    [(run_id, error)] = failed
    assert run_id == "run"
    assert error is heard.events[-1][2]["error"]
    assert executor.pending == []


@pytest.mark.covers("1.11.3/1", "1.11.3/4")
def test_waiting_run_does_not_block_others(place: Place, heard: Heard) -> None:
    clock, client = Clock(), place.run(1.0)
    executor = Executor(max_concurrent=0, sleep=clock.sleep)  # one, at least
    executor.recover(
        "bad", place.service, replace(QUICK, checkpoint_strategy=("specific", "tinker://nothing"))
    )
    executor.recover(client.model_id, place.service, QUICK)
    heard.wait("completed")
    told = [(name, facts["run_id"]) for name, _, facts in heard.events]
    assert told[:2] == [("started", "bad"), ("checkpoint_selected", "bad")]
    # The slot is free as soon as the attempt has ended: the next one may begin before the failure
    # is told.
    assert told.index(("failed", "bad")) < told.index(("checkpoint_selected", client.model_id))
    clock.tick()
    heard.wait("exhausted")


@pytest.mark.covers("1.11.3/7")
def test_failing_callback_has_no_effect(
    place: Place, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*facts: Any) -> None:
        raise KeyError("mine")

    client = place.run(1.0)
    executor = Executor()
    for number in (1, 2):
        executor.recover(client.model_id, place.service, replace(QUICK, on_recovery=fail))
        heard.wait("completed", number)
    deadline = time.monotonic() + 10
    while (
        caplog.text.count("a callback of the recovery policy failed") < 2
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert caplog.text.count("a callback of the recovery policy failed") == 2


@pytest.mark.covers("1.11/1", "1.11.3/2")
def test_disabled_policy_does_not_recover(place: Place) -> None:
    with pytest.raises(RecoveryError) as caught:
        Executor().recover("run", place.service, RecoveryPolicy())
    assert caught.value.reason == "recovery_disabled"


@pytest.mark.covers("1.11.3/5")
def test_lost_session_is_reopened(place: Place, heard: Heard) -> None:
    from support import Wire

    client = place.run(1.0)
    lost = place.service.holder.session_id
    Wire(place.url).send(f"sessions/{lost}/finish", {"reason": {"type": "interrupted"}})
    assert recovered(place, heard, QUICK, client) == "s0"
    assert place.service.holder.session_id != lost
