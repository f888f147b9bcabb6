"""The bus: who is called, when, what a faulty handler costs, and that a client at work says all
that is listed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import serving, silence
from tinkex import RecoveryPolicy, RetryConfig, ServiceClient, events, types
from tinkex.engine.fake import FakeEngine
from tinkex.recovery.monitor import Executor, Monitor
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    silence()
    yield
    silence()


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, float], dict[str, Any]]] = []
        self.threads: list[int] = []

    def __call__(
        self, name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> None:
        self.events.append((name, dict(measurements), dict(metadata)))
        self.threads.append(threading.get_ident())

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


@pytest.mark.covers("1.4.1/1", "1.4.1/3")
def test_handler_hears_exactly_the_names_it_asked_for() -> None:
    some, everything = Heard(), Heard()
    events.attach("some", [events.HTTP_STOP, "mine"], some)
    events.attach("all", None, everything)
    events.emit(events.HTTP_STOP, {"duration": 5}, {"path": "/x"})
    events.emit(events.HTTP_START, {}, {})
    events.emit("mine", {}, {})
    events.emit("mine.too", {}, {})
    assert some.events == [(events.HTTP_STOP, {"duration": 5}, {"path": "/x"}), ("mine", {}, {})]
    assert everything.names == [events.HTTP_STOP, events.HTTP_START, "mine", "mine.too"]
    assert set(some.threads) == {threading.get_ident()}


@pytest.mark.covers("1.4.1/2")
def test_ids_are_unique_and_unknown_ids_are_reported() -> None:
    events.attach("one", None, Heard())
    with pytest.raises(ValueError, match="'one' is attached already"):
        events.attach("one", None, Heard())
    with pytest.raises(TypeError, match="list of event names"):
        events.attach("two", "tinkex.http.request.stop", Heard())
    assert [known.handler_id for known in events.handlers()][-1:] == ["one"]
    assert events.detach("one") is True
    assert events.detach("one") is False


@pytest.mark.covers("1.4.1/4")
def test_failing_handler_is_detached_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken handler")

    before, after = Heard(), Heard()
    events.attach("before", None, before)
    events.attach("faulty", None, fail)
    events.attach("after", None, after)
    with caplog.at_level(logging.WARNING, "tinkex"):
        events.emit("x", {}, {})
        events.emit("y", {}, {})
    assert before.names == after.names == ["x", "y"]
    assert not events.detach("faulty")
    assert [record.getMessage() for record in caplog.records] == [
        "the event handler 'faulty' failed on x and was detached"
    ]


@pytest.mark.covers("1.4.1/4")
def test_only_the_handler_that_failed_is_detached_when_its_id_was_taken_meanwhile() -> None:
    successor = Heard()

    def replace_myself(*_: object) -> None:
        events.detach("id")
        events.attach("id", None, successor)
        raise RuntimeError

    events.attach("id", None, replace_myself)
    events.emit("x", {}, {})
    events.emit("y", {}, {})
    assert successor.names == ["y"]


@pytest.mark.covers("1.4.1/1")
def test_handler_may_attach_detach_and_emit() -> None:
    late = Heard()

    def once(name: str, *_: object) -> None:
        if name == "first":
            assert events.detach("once")
            events.attach("late", None, late)
            events.emit("second", {}, {})

    events.attach("once", None, once)
    events.emit("first", {}, {})
    assert late.names == ["second"]


@pytest.mark.covers("1.4.1/1")
def test_attaching_and_emitting_from_many_threads_loses_no_event() -> None:
    steady = Heard()
    events.attach("steady", ["tick"], steady)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(200):
                events.attach(f"{number}-{turn}", ["tick"], lambda *_: None)
                events.emit("tick", {}, {})
                assert events.detach(f"{number}-{turn}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(steady.events) == 1600
    assert [known.handler_id for known in events.handlers("tick")] == ["steady"]


def test_finalizer_may_detach_while_its_thread_holds_the_lock() -> None:
    class Leaving:
        def __del__(self) -> None:
            events.detach("leaving")

    events.attach("leaving", None, Heard())
    with events._lock:  # garbage may be collected anywhere, here too
        Leaving()
    assert not events.is_heard()


def test_event_without_listeners_is_cheap() -> None:
    assert not events.is_heard()
    began = time.thread_time()
    for _ in range(100_000):
        events.emit("x", {}, {})
    assert time.thread_time() - began < 1.0  # 10 µs each would be a scandal
    events.attach("one", [events.HTTP_STOP], Heard())
    assert events.is_heard()
    assert events.is_heard(events.HTTP_STOP)
    assert not events.is_heard(events.HTTP_START)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_forked_while_the_bus_was_locked_can_use_it() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with events._lock:
            held.set()
            free.wait()

    threading.Thread(target=hold).start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        try:
            events.attach("child", None, Heard())
            os._exit(0 if events.detach("child") else 1)
        finally:
            os._exit(2)
    free.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs on the lock of its parent")


@pytest.mark.covers("C26", "C63")
def test_catalogue_names_every_event_with_its_contents() -> None:
    groups = {
        "http.request": "start stop exception",
        "queue": "state_change",
        "future": "timeout api_error connection_error request_failed validation_error",
        "retry.attempt": "start stop retry failed",
        "recovery": "detected poll_error started checkpoint_selected client_created completed "
        "failed exhausted",
        "custom_loss": "start stop exception",
        "regularizer.compute": "start stop exception",
    }
    expected = [
        f"tinkex.{group}.{leaf}" for group, leaves in groups.items() for leaf in leaves.split()
    ]
    assert list(events.CATALOGUE) == expected
    assert events.CATALOGUE[events.HTTP_STOP] == events.Contents(
        ("duration",), ("method", "path", "pool_type", "base_url", "result", "retry_count")
    )
    assert events.CATALOGUE[events.QUEUE_STATE_CHANGE].measurements == ()
    assert events.CATALOGUE[events.RETRY_RETRY].measurements == ("duration", "delay_ms")
    assert all(
        events.CATALOGUE[name].measurements == ("elapsed_time",) for name in events.FUTURE_EVENTS
    )
    for group in ("custom_loss", "regularizer.compute"):
        assert events.CATALOGUE[f"tinkex.{group}.start"].measurements == ("system_time",)
        assert "duration" in events.CATALOGUE[f"tinkex.{group}.stop"].measurements


# ── a client at work ──────────────────────────────────────────────────────────────────────────────

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=1)
STEP = types.AdamParams(learning_rate=0.1)
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def wait_for_results(faulty: FaultyServer, client: Any) -> None:
    """Every way in which waiting for a result goes on or ends."""
    stepped = Answer(body={"metrics": {}})
    paused = Answer(
        body={"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    )
    faulty.script("optim_step", Answer(body={"request_id": "r"}))
    faulty.script("retrieve_future", paused, Answer(500), Answer(drop=True), stepped)
    client.optim_step(STEP).result(10)
    for answer in (Answer(body={"error": "no", "category": "user"}), Answer(body=[])):
        faulty.script("retrieve_future", answer)
        with pytest.raises(tinkex.TinkerError):
            client.optim_step(STEP).result(10)
    faulty.script("retrieve_future", Answer(408, delay=0.05))
    with pytest.raises(tinkex.APITimeoutError):
        client.optim_step(STEP, timeout=0.1).result(10)


def sample_again(faulty: FaultyServer, service: ServiceClient) -> None:
    """A sample whose result is gone is asked for again; then one that is not."""
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(body={"request_id": "q"}))
    drawn = SampleResponse([SampledSequence("length", tokens_np=np.array([1], np.int32))])
    result = Answer(body=codec.encode(drawn).data, content_type=codec.PROTOBUF)
    faulty.script("retrieve_future", Answer(410), result)
    once = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.001, max_retries=1)
    sampler = service.create_sampling_client(base_model="m", retry_config=once).result()
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    faulty.script("retrieve_future", Answer(410))
    with pytest.raises(tinkex.GoneError):
        sampler.sample(PROMPT, 1, PARAMS).result(10)


def recover(service: ServiceClient, heard: Heard) -> None:
    """A run that is recovered, one that is not, and one that cannot be looked at."""
    policy = RecoveryPolicy(enabled=True, backoff_ms=1, max_attempts=2, poll_interval_ms=5)
    run = service.create_lora_training_client("fake", rank=4).result()
    path = run.save_state("s").result(20).path
    executor = Executor()

    def corrupted(_: ServiceClient) -> Any:
        return _Reports(run.model_id)

    monitor = Monitor(executor, policy, rest_client_fun=corrupted)
    monitor.monitor_run(run.model_id, service, {"last": path})
    monitor.monitor_run("nobody", service)
    until(
        lambda: (
            events.RECOVERY_COMPLETED in heard.names and events.RECOVERY_POLL_ERROR in heard.names
        )
    )
    monitor.stop_monitoring("nobody")
    nothing = RecoveryPolicy(
        enabled=True,
        backoff_ms=1,
        max_attempts=1,
        checkpoint_strategy=("specific", "tinker://run/weights/none"),
    )
    executor.recover("lost", service, nothing)
    until(lambda: events.RECOVERY_EXHAUSTED in heard.names)


class _Reports:
    """Says that a run is corrupted, as no server in order would."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    async def get_training_run(self, run_id: str) -> types.TrainingRun:
        if run_id != self._run_id:
            raise tinkex.NotFoundError("no such run", status_code=404)
        checkpoint = {
            "checkpoint_id": "weights/s",
            "checkpoint_type": "training",
            "time": "2026-01-01T00:00:00Z",
        }
        return types.TrainingRun.model_validate(
            {
                "training_run_id": run_id,
                "base_model": "fake",
                "model_owner": "me",
                "is_lora": True,
                "corrupted": True,
                "last_request_time": "2026-01-01T00:00:00Z",
                "last_checkpoint": {**checkpoint, "tinker_path": f"tinker://{run_id}/weights/s"},
            }
        )


def regularize(service: ServiceClient) -> None:
    """A custom loss with a term, and one whose term fails."""
    from tinkex.regularizers import L1, RegularizerError, RegularizerSpec

    def loss(_: Any, logprobs: list[Any]) -> tuple[Any, dict[str, Any]]:
        return sum(-item.sum() for item in logprobs), {}

    def broken(_: Any, logprobs: Any) -> Any:
        raise KeyError("mine")

    client = service.create_lora_training_client("fake", rank=4).result()
    client.forward_backward_custom(DATA, loss, regularizers=[RegularizerSpec(L1(), 0.5)]).result(20)
    with pytest.raises(RegularizerError):
        client.forward_backward_custom(
            DATA, loss, regularizers=[RegularizerSpec(broken, 1.0, "bad")]
        ).result(20)


def break_down() -> None:
    """A request that ends in something that is no answer and no fault of the line."""

    class Broken:
        async def send(self, *args: Any) -> Any:
            raise KeyError("lost")

        async def close(self) -> None:
            pass

        stream = send

    tinkex.configure(http_client=lambda config: Broken())
    try:
        with tinkex.RestClient(base_url="http://127.0.0.1:1") as rest, pytest.raises(KeyError):
            rest.get_training_run("x").result(10)
    finally:
        tinkex.configure()


@pytest.mark.covers(
    "1.4.2/1", "1.4.2/2", "1.4.2/3", "1.4.2/4", "1.4.2/5", "1.4.2/6", "1.4.2/7", "1.4.2/8",
    "1.4.2/9", "C26", "C63"
)  # fmt: skip
def test_working_clients_emit_every_event_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    events.attach("everything", None, heard)
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.001)
    with (
        faulty_server() as faulty,
        ServiceClient(base_url=faulty.base_url, user_metadata={"team": "red"}) as service,
    ):
        faulty.script("retrieve_future", Answer(body={"model_id": "s:train:0"}))
        wait_for_results(faulty, service.create_lora_training_client("m").result())
        sample_again(faulty, service)
    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        recover(service, heard)
        regularize(service)
    break_down()
    told = heard.events
    assert {name for name, _, _ in told} == set(events.CATALOGUE)
    for name, numbers, facts in told:
        contents = events.CATALOGUE[name]
        untracked = {"grad_norm"} if name == events.REGULARIZER_STOP else set()
        assert set(numbers) == set(contents.measurements) - untracked, name
        assert set(contents.metadata) <= set(facts), name
    by_path: dict[str, list[dict[str, Any]]] = {}
    for name, _, facts in told:
        if name == events.HTTP_STOP:
            by_path.setdefault(facts["path"].removeprefix("/api/v1/"), []).append(facts)
    assert (
        by_path["create_model"][0].items()
        >= {"session_id": "s", "model_seq_id": 0, "team": "red"}.items()
    )
    assert (
        by_path["optim_step"][0].items()
        >= {"session_id": "s", "model_id": "s:train:0", "seq_id": 1}.items()
    )
    assert (
        by_path["asample"][0].items()
        >= {"session_id": "s", "sampling_session_id": "s:sample:0"}.items()
    )
    for name, _, facts in told:
        if name.startswith("tinkex.retry."):
            assert (facts["session_id"], facts["sampling_session_id"]) == ("s", "s:sample:0")
        if name.startswith("tinkex.future.") and facts["session_id"] == "s":
            assert facts["team"] == "red"
