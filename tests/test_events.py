"""The bus: who is called, when, and what a faulty handler costs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tinkex import events


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {known.handler_id for known in events.handlers()}
    yield
    for known in events.handlers():
        if known.handler_id not in before:
            events.detach(known.handler_id)


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, float], dict[str, Any]]] = []
        self.threads: list[int] = []

    def __call__(self, name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        self.events.append((name, dict(measurements), dict(metadata)))
        self.threads.append(threading.get_ident())

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


@pytest.mark.covers("1.4.1")
def test_a_handler_hears_exactly_the_names_it_asked_for() -> None:
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


@pytest.mark.covers("1.4.1")
def test_ids_are_unique_and_unknown_ones_are_reported() -> None:
    events.attach("one", None, Heard())
    with pytest.raises(ValueError, match="'one' is attached already"):
        events.attach("one", None, Heard())
    with pytest.raises(TypeError, match="list of event names"):
        events.attach("two", "tinkex.http.request.stop", Heard())
    assert [known.handler_id for known in events.handlers()][-1:] == ["one"]
    assert events.detach("one") is True
    assert events.detach("one") is False


@pytest.mark.covers("1.4.1")
def test_a_failing_handler_is_detached_and_nobody_else_suffers(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.covers("1.4.1")
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


@pytest.mark.covers("1.4.1")
def test_a_handler_may_attach_detach_and_emit() -> None:
    late = Heard()

    def once(name: str, *_: object) -> None:
        if name == "first":
            assert events.detach("once")
            events.attach("late", None, late)
            events.emit("second", {}, {})

    events.attach("once", None, once)
    events.emit("first", {}, {})
    assert late.names == ["second"]


@pytest.mark.covers("1.4.1")
def test_attaching_and_emitting_from_many_threads_loses_nothing() -> None:
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


def test_a_finalizer_may_detach_while_its_thread_holds_the_lock() -> None:
    class Leaving:
        def __del__(self) -> None:
            events.detach("leaving")

    events.attach("leaving", None, Heard())
    with events._lock:  # garbage may be collected anywhere, here too
        Leaving()
    assert not events.is_heard()


def test_nobody_listening_is_known_and_costs_next_to_nothing() -> None:
    assert not events.is_heard()
    began = time.perf_counter()
    for _ in range(100_000):
        events.emit("x", {}, {})
    assert time.perf_counter() - began < 1.0  # 10 µs each would be a scandal
    events.attach("one", [events.HTTP_STOP], Heard())
    assert events.is_heard()
    assert events.is_heard(events.HTTP_STOP)
    assert not events.is_heard(events.HTTP_START)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_the_bus_was_locked_can_use_it() -> None:
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


@pytest.mark.covers("1.4.2", "C26", "C63")
def test_the_catalogue_names_every_event_with_its_contents() -> None:
    groups = {
        "http.request": "start stop exception",
        "queue": "state_change",
        "future": "timeout api_error connection_error request_failed validation_error",
        "retry.attempt": "start stop retry failed",
        "recovery": "detected poll_error started checkpoint_selected client_created completed failed exhausted",
        "custom_loss": "start stop exception",
        "regularizer.compute": "start stop exception",
    }
    expected = [f"tinkex.{group}.{leaf}" for group, leaves in groups.items() for leaf in leaves.split()]
    assert list(events.CATALOGUE) == expected
    assert events.CATALOGUE[events.HTTP_STOP] == events.Contents(
        ("duration",), ("method", "path", "pool_type", "base_url", "result", "retry_count")
    )
    assert events.CATALOGUE[events.QUEUE_STATE_CHANGE].measurements == ()
    assert events.CATALOGUE[events.RETRY_RETRY].measurements == ("duration", "delay_ms")
    assert all(events.CATALOGUE[name].measurements == ("elapsed_time",) for name in events.FUTURE_EVENTS)
    for group in ("custom_loss", "regularizer.compute"):
        assert events.CATALOGUE[f"tinkex.{group}.start"].measurements == ("system_time",)
        assert "duration" in events.CATALOGUE[f"tinkex.{group}.stop"].measurements
