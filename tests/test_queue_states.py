"""Held-up work: what the log says and how often, who is told of changes, observers of every shape.
Time is faked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tinkex import events
from tinkex.client.futures import queue_states
from tinkex.client.futures.queue_states import QueueStateLogger, QueueStateTracker, notify
from tinkex.types import QueueState

CAPACITY, RATE, ACTIVE = QueueState.PAUSED_CAPACITY, QueueState.PAUSED_RATE_LIMIT, QueueState.ACTIVE


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Mapping[str, float], Mapping[str, Any]]]]:
    """Record the events of the bus while a test runs."""
    found: list[tuple[str, Mapping[str, float], Mapping[str, Any]]] = []
    events.attach("test", None, lambda *event: found.append(event))
    yield found
    events.detach("test")


# ── the log ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.19/2", "C85")
@pytest.mark.parametrize(
    ("kind", "state", "reason", "shown"),
    [
        ("Sampling", RATE, None, "concurrent sampler weights limit hit"),
        ("Training", RATE, "", "concurrent training clients rate limit hit"),
        ("Sampling", CAPACITY, None, "Tinker backend is running short on capacity, please wait"),
        (
            "Training",
            "Paused_Capacity",
            " ",
            "Tinker backend is running short on capacity, please wait",
        ),
        ("Training", QueueState.UNKNOWN, None, "unknown"),
        ("Training", "resting", None, "unknown"),
        ("Sampling", CAPACITY, "the server says so", "the server says so"),
        ("Sampling", "resting", "two\r\nlines", "two lines"),
    ],
)
def test_log_names_stuck_work_and_its_cause(
    kind: Any, state: Any, reason: str | None, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    QueueStateLogger(kind, grace=0).on_queue_state_change(state, reason, name="s-1")
    assert caplog.record_tuples == [
        ("tinkex", logging.WARNING, f"{kind} is paused for s-1. Reason: {shown}")
    ]


@pytest.mark.covers("1.19/2", "C85")
def test_running_work_is_never_logged_as_stuck(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = QueueStateLogger("Sampling", Clock())
    log.on_queue_state_change(ACTIVE, "busy", name="m")
    log.on_queue_state_change("ACTIVE", name="m")
    assert caplog.messages == []
    log.on_queue_state_change(CAPACITY, name="m")
    assert len(caplog.messages) == 1


@pytest.mark.covers("1.19/2", "C85")
def test_log_speaks_once_a_minute_of_each_client(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = QueueStateLogger("Sampling", clock)
    log.on_queue_state_change(CAPACITY, "first", name="a")
    clock.now = 30.0
    log.on_queue_state_change(RATE, "too soon", name="a")
    log.on_queue_state_change(CAPACITY, "another", name="b")
    clock.now = 59.999
    log.on_queue_state_change(CAPACITY, "too soon", name="a")
    clock.now = 60.0
    log.on_queue_state_change(CAPACITY, "again", name="a")
    log.on_queue_state_change(CAPACITY, "too soon", name="b")
    assert [message.rpartition(" ")[2] for message in caplog.messages] == [
        "first",
        "another",
        "again",
    ]


@pytest.mark.covers("U28")
def test_training_pauses_are_logged_after_15_minutes_of_the_same_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = QueueStateLogger("Training", clock)

    def said(seconds: float, state: QueueState, name: str = "m") -> bool:
        clock.now, before = seconds, len(caplog.messages)
        log.on_queue_state_change(state, name=name)
        return len(caplog.messages) > before

    minutes = 60.0
    assert not said(0, CAPACITY)
    assert not said(5 * minutes, CAPACITY, "other")
    assert not said(15 * minutes - 1, CAPACITY)
    assert said(15 * minutes, CAPACITY)
    assert not said(16 * minutes - 1, CAPACITY)
    assert said(16 * minutes, CAPACITY)  # once a minute
    assert not said(18 * minutes, RATE)  # another state begins again
    assert not said(33 * minutes - 1, RATE)
    assert said(33 * minutes, RATE)
    assert not said(34 * minutes, ACTIVE)
    assert not said(35 * minutes, RATE)
    assert said(50 * minutes, RATE)
    assert said(51 * minutes, CAPACITY, "other")
    log.clear("other")
    assert not said(52 * minutes, CAPACITY, "other")


@pytest.mark.covers("U28")
def test_sampling_pauses_are_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    QueueStateLogger("Sampling", Clock()).on_queue_state_change(CAPACITY, name="s")
    assert len(caplog.messages) == 1


@pytest.mark.covers("C85")
def test_client_that_is_forgotten_is_spoken_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    log = QueueStateLogger("Sampling", Clock())
    for name in ("a", "b"):
        log.on_queue_state_change(CAPACITY, name=name)
    log.clear("a")
    log.clear("never seen")
    for name in ("a", "b"):
        log.on_queue_state_change(CAPACITY, name=name)
    assert [message.split()[4] for message in caplog.messages] == ["a.", "b.", "a."]


@pytest.mark.covers("C85")
@pytest.mark.parametrize(
    ("kind", "metadata", "name"),
    [
        ("Sampling", {"sampling_session_id": "ss", "session_id": "s"}, "ss"),
        ("Sampling", {"sampling_session_id": None, "session_id": "s"}, "s"),
        ("Sampling", {"model_id": "m"}, "unknown"),
        ("Training", {"model_id": "m", "session_id": "s"}, "m"),
        ("Training", {"session_id": "s"}, "unknown"),
    ],
)
def test_metadata_holds_the_id_and_the_reason(
    kind: Any, metadata: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    QueueStateLogger(kind, grace=0).on_queue_state_change(
        CAPACITY, metadata | {"queue_state_reason": "why"}
    )
    assert caplog.messages == [f"{kind} is paused for {name}. Reason: why"]


def test_log_remembers_no_more_than_it_needs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_states, "REMEMBERED", 100)
    clock = Clock()
    log = QueueStateLogger("Sampling", clock)
    for number in range(250):
        log.on_queue_state_change(CAPACITY, name=f"{number}")
    assert list(log._spoken) == [str(number) for number in range(150, 250)]
    clock.now = 60.0
    log.on_queue_state_change(CAPACITY, name="new")
    assert list(log._spoken) == ["new"]
    training = QueueStateLogger("Training", clock)
    for number in range(250):
        training.on_queue_state_change(CAPACITY, name=f"{number}")
    assert list(training._paused) == [str(number) for number in range(150, 250)]


class SlowName(str):
    """A name that is so slow to look up that other threads come in between."""

    def __hash__(self) -> int:
        time.sleep(0.002)
        return super().__hash__()


def test_threads_that_ask_at_once_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log, start = QueueStateLogger("Sampling"), threading.Barrier(4)

    def ask() -> None:
        start.wait()
        log.on_queue_state_change(CAPACITY, name=SlowName("m"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.messages) == 1


# ── observers ─────────────────────────────────────────────────────────────────────────────────────


class Watcher:
    """Notes its calls; subclasses take them in different forms."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []


class OfReasons(Watcher):
    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        self.calls.append((queue_state, queue_state_reason))


class OfMetadata(Watcher):
    def on_queue_state_change(self, queue_state: QueueState, metadata: Mapping[str, Any]) -> None:
        self.calls.append((queue_state, metadata))


class OfStates(Watcher):
    def on_queue_state_change(self, queue_state: QueueState) -> None:
        self.calls.append((queue_state,))


class OfStatesWithOptions(Watcher):
    def on_queue_state_change(
        self, queue_state: QueueState, *, option: bool = False, **more: Any
    ) -> None:
        self.calls.append((queue_state,))


class OfAnything(Watcher):
    def on_queue_state_change(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.mark.covers("1.19/3", "C84")
@pytest.mark.parametrize(
    ("kind", "second"),
    [
        (OfReasons, ["why"]),
        (OfMetadata, [{"model_id": "m"}]),
        (OfStates, []),
        (OfStatesWithOptions, []),
        (OfAnything, ["why"]),
    ],
)
def test_observers_get_their_accepted_arguments(kind: type[Any], second: list[Any]) -> None:
    watcher = kind()
    notify(watcher, CAPACITY, "why", {"model_id": "m"})
    notify(watcher.on_queue_state_change, RATE, "why", {"model_id": "m"})
    assert watcher.calls == [(CAPACITY, *second), (RATE, *second)]
    assert type(watcher.calls[0][0]) is QueueState


def test_function_that_does_not_tell_its_parameters_gets_both() -> None:
    class Opaque:
        __signature__ = 3  # as unreadable as that of some built-in functions

        def __call__(self, *arguments: Any) -> None:
            found.append(arguments)

    found: list[Any] = []
    notify(Opaque(), CAPACITY, "why", {"model_id": "m"})
    assert found == [(CAPACITY, "why")]


@pytest.mark.covers("C84")
@pytest.mark.parametrize("observer", [None, object(), 3])
def test_object_without_observer_methods_is_ignored(
    observer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    notify(observer, CAPACITY, "why")
    assert caplog.messages == []


@pytest.mark.covers("1.19/3", "C84")
def test_failing_observer_is_logged_and_the_next_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(state: QueueState) -> None:
        raise RuntimeError("no")

    def too_many(state: QueueState, reason: str | None, third: int) -> None:
        raise AssertionError("is never reached")

    async def asynchronous(state: QueueState) -> None:
        raise AssertionError("is never reached")

    watcher = OfReasons()
    assert QueueStateTracker([broken, None, too_many, asynchronous, watcher]).heard(
        "paused_capacity"
    )
    assert watcher.calls == [(CAPACITY, None)]
    assert caplog.messages == ["an observer failed on the queue state paused_capacity"] * 3
    assert all(record.levelno == logging.WARNING and record.exc_info for record in caplog.records)


# ── changes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.19/3", "C84")
def test_only_changes_of_state_or_reason_are_passed_on() -> None:
    watcher = OfReasons()
    tracker = QueueStateTracker([watcher])
    assert tracker.state is None
    said = [
        ("active", None),
        ("active", None),
        ("paused_capacity", None),
        ("PAUSED_CAPACITY ", None),
        ("paused_capacity", "why"),
        ("paused_capacity", "why"),
        ("resting", "why"),
        (None, "why"),
        ("active", None),
    ]
    assert [tracker.heard(state, reason) for state, reason in said] == [
        True, False, True, False, True, False, True, False, True,
    ]  # fmt: skip
    assert watcher.calls == [
        (ACTIVE, None),
        (CAPACITY, None),
        (CAPACITY, "why"),
        (QueueState.UNKNOWN, "why"),
        (ACTIVE, None),
    ]
    assert tracker.state is ACTIVE


def test_stream_reports_every_token_and_the_end() -> None:
    watcher, listener = OfReasons(), OfReasons()
    tracker = QueueStateTracker([watcher], listener=listener)
    for _ in range(2):
        tracker.heard("paused_capacity", "why")
    tracker.ended()
    assert watcher.calls == [(CAPACITY, "why")]
    assert listener.calls == [(CAPACITY, "why"), (CAPACITY, "why"), (ACTIVE, None)]


@pytest.mark.covers("C84")
def test_first_unknown_state_counts_as_change_unless_initial() -> None:
    watcher = OfReasons()
    QueueStateTracker([watcher]).heard("resting")
    QueueStateTracker([watcher], initial="Active").heard("active")
    QueueStateTracker([watcher], initial=ACTIVE).heard("active", "why")
    assert watcher.calls == [(QueueState.UNKNOWN, None), (ACTIVE, "why")]


@pytest.mark.covers("1.4.2/4", "C84")
def test_change_is_an_event_with_all_that_is_known(heard: list[Any]) -> None:
    watcher = OfMetadata()
    tracker = QueueStateTracker([watcher], {"model_id": "m", "session_id": "s"})
    tracker.heard("paused_rate_limit", "why", request_id="r1")
    tracker.heard("paused_rate_limit", "why", request_id="r2")
    metadata = {
        "model_id": "m",
        "session_id": "s",
        "request_id": "r1",
        "queue_state": "paused_rate_limit",
        "queue_state_reason": "why",
    }
    assert heard == [("tinkex.queue.state_change", {}, metadata)]
    assert watcher.calls == [(RATE, metadata)]
    assert type(heard[0][2]["queue_state"]) is str
