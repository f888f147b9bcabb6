"""What is reported, when, how often, and never: the console logger, the reporter, capturing, and
what is left out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import datetime as dt
import enum
import gc
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faulty import Answer, FaultyServer, faulty_server
from support import silence, wait_until
from tinkex import events, telemetry, types
from tinkex.client.futures.api_future import start
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import HOSTED_URL, Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    BadRequestError,
    ConfigurationError,
    GoneError,
    InternalServerError,
    RateLimitError,
    RequestFailedError,
)
from tinkex.telemetry import Provider, Reporter, capture_exceptions, event_queue
from tinkex.types.record import literal_values, parse_literal
from tinkex.types.telemetry import (
    EventType,
    Severity,
    TelemetryResponse,
    TelemetrySendRequest,
    as_severity,
    parse_event,
)
from tinkex.wire.protocol import PROTOCOL_VERSION
from tinkex.wire.redaction import (
    MOST_CHARACTERS,
    MOST_ITEMS,
    MOST_TEXT,
    MOST_TRACEBACK,
    Scrubber,
    is_secret_name,
    secrets_of,
)

ACCEPTED = Answer(body={"status": "accepted"})
Make = Callable[..., Reporter]


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    silence()
    yield
    silence()


class Post:
    """Takes batches in place of a server.

    `failures` of them are refused first; each takes `delay` seconds, and none is taken before the
    gate is open.
    """

    def __init__(
        self, failures: int = 0, delay: float = 0.0, gate: threading.Event | None = None
    ) -> None:
        self.requests: list[TelemetrySendRequest] = []
        self.times: list[float] = []
        self.failures = failures
        self.delay = delay
        self.gate = gate

    async def __call__(self, request: TelemetrySendRequest) -> TelemetryResponse:
        self.times.append(time.monotonic())
        await asyncio.sleep(self.delay)
        while self.gate is not None and not self.gate.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if self.failures > 0:
            self.failures -= 1
            raise APIConnectionError("cannot reach the server with x-api-key: tml-topsecret")
        self.requests.append(request)
        return TelemetryResponse(status="accepted")

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for request in self.requests for event in request.events]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def names(self) -> list[str]:
        return [event.get("event_name", event["event"]) for event in self.events]


@pytest.fixture
def make() -> Iterator[Make]:
    """Reporters that do nothing by themselves unless told, and that end with the test."""
    made: list[weakref.ref[Reporter]] = []

    def build(send: Any, session_id: str = "s", **options: Any) -> Reporter:
        reporter = Reporter(
            send, session_id, **{"flush_interval": 0, "retry_base_delay": 0.01, **options}
        )
        made.append(weakref.ref(reporter))
        return reporter

    yield build
    for reference in made:
        if (reporter := reference()) is not None:
            reporter.stop(0.5)
    for known in events.handlers():
        events.detach(known.handler_id)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with faulty_server() as faulty:
        yield faulty


@pytest.fixture
def faulty(server: FaultyServer) -> FaultyServer:
    server.seen.clear()
    server.script("telemetry", ACCEPTED)
    return server


@pytest.fixture
def transport(faulty: FaultyServer) -> Iterator[Transport]:
    transport = Transport(Config(base_url=faulty.base_url, api_key="tml-topsecret"))
    yield transport
    start(transport.close()).result(5)


REQUEST = TelemetrySendRequest(
    events=[], platform="p", sdk_version="1", session_id="s", process_uuid="u"
)

# ── the console logger ────────────────────────────────────────────────────────────────────────────

CALL = {
    "method": "POST",
    "path": "/api/v1/asample",
    "pool_type": "sample",
    "base_url": "https://example.com",
}


@pytest.mark.covers("1.4.3/1", "1.4.3/2", "C26")
def test_logger_writes_a_line_per_event(caplog: pytest.LogCaptureFixture) -> None:
    handler = telemetry.attach_logger()
    caplog.set_level(logging.DEBUG, "tinkex")
    events.emit(events.HTTP_START, {"system_time": 1.0}, CALL)
    events.emit(events.HTTP_STOP, {"duration": 12.4}, {**CALL, "result": "ok", "retry_count": 2})
    events.emit(
        events.HTTP_EXCEPTION, {"duration": 3.6}, {**CALL, "kind": "error", "reason": "no route"}
    )
    events.emit(
        events.QUEUE_STATE_CHANGE, {}, {"queue_state": "paused_capacity", "request_id": "r1"}
    )
    events.emit(events.FUTURE_TIMEOUT, {"elapsed_time": 1}, {"request_id": "r1"})
    assert telemetry.detach(handler) is True
    assert telemetry.detach(handler) is False
    events.emit(events.HTTP_START, {}, CALL)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "HTTP start POST /api/v1/asample pool=sample base=https://example.com"),
        (
            "INFO",
            "HTTP stop POST /api/v1/asample result=ok 12 ms retries=2 base=https://example.com",
        ),
        ("ERROR", "HTTP exception POST /api/v1/asample 4 ms reason=no route"),
        ("INFO", "queue state paused_capacity request_id=r1"),
    ]


@pytest.mark.covers("1.4.3/2")
def test_logger_takes_other_events_a_level_and_an_id(caplog: pytest.LogCaptureFixture) -> None:
    handler = telemetry.attach_logger("mine", [events.FUTURE_TIMEOUT], level="debug")
    other = telemetry.attach_logger(level=logging.WARNING)
    assert (handler, other == handler) == ("mine", False)
    with pytest.raises(ValueError, match="attached already"):
        telemetry.attach_logger("mine")
    with pytest.raises(ValueError, match="unknown level 'loud'"):
        telemetry.attach_logger(level="loud")
    caplog.set_level(logging.DEBUG, "tinkex")
    events.emit(
        events.FUTURE_TIMEOUT, {"elapsed_time": 5}, {"request_id": "r", "api_key": "tml-abc"}
    )
    events.emit(events.HTTP_START, {}, CALL)
    telemetry.detach(handler)
    telemetry.detach(other)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]
    assert (
        caplog.records[0]
        .getMessage()
        .startswith("tinkex.future.timeout {'elapsed_time': 5} {'request_id': 'r'")
    )
    assert "tml-" not in caplog.text


# ── whether, and how, it is sent ──────────────────────────────────────────────────────────────────


def config(base_url: str = HOSTED_URL) -> Config:
    return Config.resolve(base_url=base_url, api_key="tml-topsecret")


@pytest.mark.covers("1.4.4/2", "1.9/2", "1.9/6")
@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((text, True) for text in ("1", "TRUE", "yes", "on", "perhaps", "", None)),
        *((text, False) for text in ("0", "false", "No", "off")),
    ],
)
def test_environment_switches_telemetry(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_TELEMETRY")
    if value is not None:
        monkeypatch.setenv("TINKER_TELEMETRY", value)
    undecided = typing.cast("Config", object())
    assert telemetry.is_enabled(undecided) is on
    assert telemetry.is_enabled(undecided, explicit=not on) is not on


@pytest.mark.covers("1.4.4/2")
def test_configuration_decides_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Settings:
        telemetry: bool
        base_url: str = HOSTED_URL

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    assert telemetry.is_enabled(typing.cast("Config", Settings(True)))
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    off = typing.cast("Config", Settings(False))
    assert not telemetry.is_enabled(off)
    assert not telemetry.goes_by_itself(off)


def test_automatic_telemetry_needs_the_hosted_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    assert telemetry.goes_by_itself(config())
    lookalike = HOSTED_URL.replace(".dev", ".dev.example.com")
    for other in ("local", "local:x", "http://127.0.0.1:8000", "https://example.com", lookalike):
        assert not telemetry.goes_by_itself(config(other))
    monkeypatch.setenv("TINKER_TELEMETRY", "off")
    assert not telemetry.goes_by_itself(config())


@pytest.mark.covers("1.4.4/1", "1.4.4/3", "1.5.1/1", "1.5.1/13", "1.5.1/14")
def test_init_returns_a_reporter_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post()
    with pytest.raises(ConfigurationError, match="missing required option: session_id"):
        telemetry.init(config=config(), send=post)
    with pytest.raises(ConfigurationError, match="missing required option: config"):
        telemetry.init("s", send=post)
    with pytest.raises(ConfigurationError, match="missing required option: send"):
        telemetry.init("s", config())
    assert telemetry.init("s", config(), post, enabled=False) is None
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    assert telemetry.init("s", config(), post) is None
    first = telemetry.init("s", config(), post, enabled=True, name="one", flush_interval=0)
    assert first is not None
    assert telemetry.init("other", config(), post, enabled=True, name="one") is first
    assert first.log("x", {"key": "the key is topsecret-literal", "api": config().api_key})
    assert first.stop()
    second = telemetry.init(
        "s", config(), post, enabled=True, name="one", secrets=["literal"], flush_interval=0
    )
    assert second is not None
    assert second is not first
    assert second.log("y", {"text": "a literal thing"})
    assert second.stop()
    assert post.of("GENERIC_EVENT")[1]["event_data"] == {"text": "a [REDACTED] thing"}
    assert "tml-topsecret" not in str(post.requests)


@pytest.mark.covers("1.4.5/1", "1.4.5/2", "C28")
def test_sending_in_the_background_returns_at_once_and_only_logs(
    faulty: FaultyServer, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    faulty.script("telemetry", Answer(500, {"detail": "api_key='abcdef'"}, until=gate.is_set))
    telemetry.send(telemetry.sender(transport), REQUEST)
    assert caplog.records == []
    gate.set()
    wait_until(
        lambda: any(
            "telemetry could not be sent" in record.getMessage() for record in caplog.records
        )
    )
    assert len(faulty.requests("telemetry")) <= 2
    assert "abcdef" not in caplog.records[-1].getMessage()

    async def crash(request: TelemetrySendRequest) -> None:
        raise ZeroDivisionError("oh")

    telemetry.send(crash, REQUEST)
    wait_until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert caplog.records[-1].getMessage() == "sending telemetry crashed: ZeroDivisionError: oh"


@pytest.mark.covers("1.4.5/3", "C28")
def test_sending_and_waiting_gives_the_answer_or_the_error(
    faulty: FaultyServer, transport: Transport
) -> None:
    send = telemetry.sender(transport)
    assert telemetry.send_sync(send, REQUEST) == TelemetryResponse(status="accepted")
    faulty.script("telemetry", Answer(422, {"detail": "no"}))
    with pytest.raises(APIStatusError, match="422"):
        telemetry.send_sync(send, REQUEST)
    faulty.script("telemetry", Answer(body={"status": "perhaps"}))
    with pytest.raises(APIResponseValidationError):
        telemetry.send_sync(send, REQUEST)
    faulty.script("telemetry", Answer(503), ACCEPTED)
    assert telemetry.send_sync(send, REQUEST) == TelemetryResponse(status="accepted")


# ── the reporter: options, calls, queue ───────────────────────────────────────────────────────────


@pytest.mark.covers(
    "1.5.1/2",
    "1.5.1/3",
    "1.5.1/4",
    "1.5.1/5",
    "1.5.1/6",
    "1.5.1/7",
    "1.5.1/8",
    "1.5.1/9",
    "1.5.1/10",
    "1.5.1/11",
    "1.5.1/12",
)
def test_options_have_their_defaults() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(Reporter).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert defaults == {
        "owner": None,
        "secrets": (),
        "events": telemetry.REPORTED_EVENTS,
        "attach_events": True,
        "handler_id": None,
        "flush_interval": 10.0,
        "flush_threshold": 100,
        "flush_timeout": 30.0,
        "http_timeout": 5.0,
        "max_retries": 3,
        "retry_base_delay": 1.0,
        "max_queue_size": 10_000,
        "max_batch_size": 100,
    }
    wrong: list[dict[str, Any]] = [
        {"max_batch_size": 101},
        {"max_batch_size": 0},
        {"flush_threshold": 0},
    ]
    wrong += [{"max_queue_size": 0}, {"max_retries": -1}]
    for options in wrong:
        with pytest.raises(ConfigurationError, match=min(options)):
            Reporter(Post(), "s", **options)


@pytest.mark.covers(
    "1.5.2/1",
    "1.5.2/2",
    "1.5.2/6",
    "1.5.3/1",
    "1.5.5/1",
    "1.5.5/2",
    "1.5.5/3",
    "1.5.5/4",
    "1.5.5/5",
    "1.5.5/6",
)
def test_session_from_its_start_to_its_end_on_the_wire(
    faulty: FaultyServer, transport: Transport, make: Make
) -> None:
    reporter = make(telemetry.sender(transport), "session-1")
    assert reporter.log("step", {"loss": 0.5}) is True
    assert reporter.log_exception(ValueError("bad")) is True
    assert reporter.stop() is True
    bodies = [seen.json for seen in faulty.requests("telemetry")]
    for body in bodies:
        assert set(body) == {"events", "platform", "sdk_version", "session_id", "process_uuid"}
        assert body["session_id"] == "session-1"
        assert body["sdk_version"] == PROTOCOL_VERSION == "0.38.0"
        assert body["platform"] == "Linux" if sys.platform == "linux" else body["platform"]
    assert len({body["process_uuid"] for body in bodies}) == 1
    begun, step, failed, ended = (event for body in bodies for event in body["events"])
    common = {"event", "event_id", "event_session_index", "severity", "timestamp"}
    assert set(begun) == common
    assert set(ended) == common | {"duration"}
    assert set(step) == common | {"event_name", "event_data"}
    # it was never raised: it has no traceback
    assert set(failed) == common | {"error_type", "error_message"}
    assert [event["event"] for event in (begun, step, failed, ended)] == [
        "SESSION_START",
        "GENERIC_EVENT",
        "UNHANDLED_EXCEPTION",
        "SESSION_END",
    ]
    assert [event["severity"] for event in (begun, step, failed, ended)] == [
        "INFO",
        "INFO",
        "ERROR",
        "INFO",
    ]
    assert [event["event_session_index"] for event in (begun, step, failed, ended)] == [0, 1, 2, 3]
    assert (step["event_name"], step["event_data"]) == ("step", {"loss": 0.5})
    assert (failed["error_type"], failed["error_message"]) == ("ValueError", "bad")
    assert ended["duration"].startswith("0:00:0")
    for event in (begun, step, failed, ended):
        assert len(bytes.fromhex(event["event_id"])) == 16
        when = dt.datetime.fromisoformat(event["timestamp"])
        assert event["timestamp"].endswith("Z")
        assert abs((dt.datetime.now(dt.UTC) - when).total_seconds()) < 60
    # where it belongs, and only there
    assert faulty.requests("telemetry")[0].headers["x-api-key"] == "tml-topsecret"
    assert b"tml-" not in b"".join(seen.body for seen in faulty.requests("telemetry"))


@pytest.mark.covers("1.5.2/1", "1.5.2/2", "1.5.2/3", "1.5.2/4", "1.5.2/5", "1.5.2/6", "1.5.2/7")
def test_calls_without_live_reporter_return_false(make: Make) -> None:
    post = Post()
    dead = make(post)
    assert dead.stop()
    sent = len(post.events)
    for reporter in (None, dead):
        assert telemetry.log(reporter, "x") is False
        assert telemetry.log_exception(reporter, ValueError()) is False
        assert telemetry.log_fatal_exception(reporter, ValueError()) is False
        assert telemetry.flush(reporter, sync=True, wait_drained=True) is False
        assert telemetry.wait_until_drained(reporter, 0.1) is False
        assert telemetry.stop(reporter) is False
    assert len(post.events) == sent == 2
    live = make(post, attach_events=False)
    assert telemetry.log(live, "x")
    assert telemetry.log_exception(live, ValueError())
    assert telemetry.log_fatal_exception(live, ValueError())
    assert telemetry.flush(live, sync=True)
    assert telemetry.wait_until_drained(live, 5)
    assert telemetry.stop(live)


@pytest.mark.covers("1.5.2/1", "1.5.5/7")
def test_severities_ignore_case_and_unknown_severities_are_info(make: Make) -> None:
    post = Post()
    reporter = make(post)
    given = ["debug", "Info", "WARNING", "error", "critical", "loud"]
    for severity in given:
        assert reporter.log(severity, severity=severity)
    assert reporter.flush(sync=True)
    told = {event["event_name"]: event["severity"] for event in post.of("GENERIC_EVENT")}
    assert [told[name] for name in given] == [
        "DEBUG",
        "INFO",
        "WARNING",
        "ERROR",
        "CRITICAL",
        "INFO",
    ]


@pytest.mark.covers("1.5.1/11", "1.5.2/1", "1.5.3/1", "1.5.3/2")
def test_full_queue_drops_events_with_a_warning_and_numbers_go_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    post = Post()
    reporter = make(post, max_queue_size=3)
    assert [reporter.log(str(number)) for number in range(5)] == [True, True, False, False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "telemetry: the queue of session s is full, events are dropped"
    ]
    assert reporter.flush(sync=True)
    assert reporter.log("later")
    assert reporter.stop()
    assert post.names == ["SESSION_START", "0", "1", "later", "SESSION_END"]
    assert [event["event_session_index"] for event in post.events] == [0, 1, 2, 6, 7]


@pytest.mark.covers("1.5.1/6", "1.5.3/3")
def test_full_batch_of_events_is_sent_without_a_flush(make: Make) -> None:
    post = Post()
    reporter = make(post, flush_threshold=5)
    for number in range(3):
        reporter.log(str(number))
    time.sleep(0.1)
    assert post.requests == []
    reporter.log("3")
    assert reporter.wait_until_drained(5)
    assert post.names == ["SESSION_START", "0", "1", "2", "3"]


@pytest.mark.covers("1.5.1/5", "1.5.3/3", "Q-6")
def test_threshold_flushes_keep_a_single_timer(make: Make) -> None:
    post = Post()
    reporter = make(post, flush_threshold=1, flush_interval=0.25)
    armed: list[int] = []

    def count() -> None:
        timers = [handle for handle in reporter._runtime.loop._scheduled if not handle._cancelled]  # type: ignore[attr-defined]
        armed.append(
            sum(weakref.ref(reporter) in handle._args for handle in timers if handle._args)
        )

    for number in range(20):
        reporter.log(str(number))
        assert reporter.flush(sync=True)
    reporter._runtime.call(count)
    wait_until(lambda: armed)
    assert armed == [1]
    quiet = make(post, flush_interval=0.15)
    wait_until(lambda: len(post.of("SESSION_START")) == 2)
    quiet.log("again")
    wait_until(lambda: post.names[-1] == "again")  # the timer is armed again after it has rung


@pytest.mark.covers("1.5.1/12", "1.5.3/4")
def test_batches_are_in_order_and_no_larger_than_allowed(make: Make) -> None:
    post = Post()
    reporter = make(post, flush_threshold=1000, max_batch_size=100)
    for number in range(250):
        assert reporter.log(str(number))
    assert reporter.flush(sync=True)
    assert [len(request.events) for request in post.requests] == [100, 100, 51]
    assert post.names == ["SESSION_START", *map(str, range(250))]


@pytest.mark.covers("1.5.3/4")
def test_batches_are_sent_one_after_another(make: Make) -> None:
    under_way: list[int] = []
    most: list[int] = []

    async def send(request: TelemetrySendRequest) -> None:
        under_way.append(1)
        most.append(len(under_way))
        await asyncio.sleep(0.01)
        under_way.pop()

    reporter = make(send, max_batch_size=2, flush_threshold=1)
    for number in range(20):
        reporter.log(str(number))
    assert reporter.flush(sync=True, wait_drained=True)
    assert max(most) == 1
    assert len(most) >= 10


@pytest.mark.covers("1.5.1/7", "1.5.2/4", "1.5.2/5", "1.5.3/4")
def test_waiting_until_drained_has_a_limit(make: Make) -> None:
    gate = threading.Event()
    reporter = make(Post(gate=gate))
    assert reporter.wait_until_drained(0.05) is False  # nobody has asked for a flush
    assert reporter.flush() is True
    assert reporter.wait_until_drained(0.05) is False
    gate.set()
    assert reporter.wait_until_drained(20) is True
    slow = make(Post(delay=60), flush_timeout=0.1)
    began = time.monotonic()
    assert slow.flush(sync=True) is False
    assert slow.flush(wait_drained=True) is False
    assert slow.stop(0.2) is True
    assert time.monotonic() - began < 20


@pytest.mark.covers("1.5.2/2", "Q-7")
def test_exception_is_sent_soon(make: Make) -> None:
    post = Post()
    reporter = make(post)
    assert reporter.log_exception(ValueError("x"), "critical")
    wait_until(lambda: post.of("UNHANDLED_EXCEPTION"))
    assert post.of("UNHANDLED_EXCEPTION")[0]["severity"] == "CRITICAL"
    assert post.of("SESSION_END") == []
    assert reporter.is_alive


@pytest.mark.covers("1.5.2/3", "W08")
def test_fatal_exception_ends_the_session_once_without_waiting(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    gate = threading.Event()
    post = Post(gate=gate)
    reporter = make(post, "session-9")
    began = time.monotonic()
    assert reporter.log_fatal_exception(ValueError("x"))
    assert reporter.log_fatal_exception(ValueError("y"))
    assert time.monotonic() - began < 8  # no flush is waited for so short a time
    assert post.requests == []
    gate.set()
    assert "a fatal exception in session session-9 has been reported" in caplog.messages
    assert reporter.stop()
    assert [event["event"] for event in post.events].count("SESSION_END") == 1
    assert len(post.of("UNHANDLED_EXCEPTION")) == 2


@pytest.mark.covers("1.5.2/6")
def test_stopping_detaches_and_reports_the_end_once(make: Make) -> None:
    post = Post()
    reporter = make(post)
    assert [known.handler_id for known in events.handlers()] == [reporter.handler_id]
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(reporter.stop())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 4 + [True]
    assert not events.is_heard()
    assert post.names == ["SESSION_START", "SESSION_END"]


@pytest.mark.covers("1.5.2/4", "1.5.2/5", "1.5.2/6")
def test_calls_from_the_loop_itself_never_wait(make: Make) -> None:
    gate = threading.Event()
    post = Post(gate=gate)
    reporter = make(post, flush_timeout=60)

    async def on_the_loop() -> float:
        began = time.monotonic()
        assert reporter.flush(sync=True) is False
        assert reporter.wait_until_drained(60) is False
        assert reporter.stop(60) is True
        return time.monotonic() - began

    assert start(on_the_loop()).result(20) < 20
    assert post.requests == []
    gate.set()
    wait_until(lambda: post.names == ["SESSION_START", "SESSION_END"])


# ── retries ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.5.4/2")
def test_delays_double_and_are_spread_by_up_to_a_tenth() -> None:
    for attempt, least in enumerate((1.0, 2.0, 4.0)):
        drawn = [telemetry.retry_delay(attempt) for _ in range(200)]
        assert least < min(drawn) <= max(drawn) <= least * 1.1
        assert max(drawn) - min(drawn) > 0.05 * least
        assert all(round(delay, 3) == delay for delay in drawn)


@pytest.mark.covers("1.5.1/10", "1.5.4/1", "1.5.4/2", "1.5.4/3", "Q-8")
@pytest.mark.parametrize("sync", [True, False])
def test_batch_is_sent_again_until_it_arrives(
    make: Make, sync: bool, caplog: pytest.LogCaptureFixture
) -> None:
    post = Post(failures=3)
    reporter = make(post, retry_base_delay=0.02)
    assert reporter.flush(sync=sync)
    assert reporter.wait_until_drained(5)
    assert post.names == ["SESSION_START"]
    gaps = [after - before for before, after in zip(post.times, post.times[1:], strict=False)]
    assert len(gaps) == 3
    assert gaps[0] >= 0.02
    assert gaps[1] >= 0.04
    assert gaps[2] >= 0.08
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:40] for line in lines] == [
        f"telemetry could not be sent (attempt {n}):"[:40] for n in (1, 2, 3)
    ]
    assert all("again in 0.0" in line and "tml-" not in line for line in lines)


@pytest.mark.covers("1.5.1/9", "1.5.3/5", "1.5.4/1", "1.5.4/3")
def test_permanently_failed_batch_is_dropped_and_the_next_is_sent(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    post = Post(failures=3)
    reporter = make(post, max_retries=2)
    assert reporter.log("lost")
    assert reporter.flush(sync=True)
    assert len(post.times) == 3
    assert caplog.messages[-1].startswith(
        "telemetry: 2 events given up after 2 retries: cannot reach the server"
    )
    assert reporter.wait_until_drained(0)
    assert reporter.log("kept")
    assert reporter.flush(sync=True)
    assert post.names == ["kept"]


@pytest.mark.covers("1.5.4/4")
@pytest.mark.parametrize(
    "answer", [Answer(429), Answer(500), Answer(drop=True), Answer(body={"status": "no"})]
)
def test_any_failure_is_tried_again(
    answer: Answer, faulty: FaultyServer, transport: Transport, make: Make
) -> None:
    faulty.script("telemetry", answer, answer, ACCEPTED)
    reporter = make(telemetry.sender(transport))
    assert reporter.flush(sync=True)
    assert len(faulty.requests("telemetry")) == 3


@pytest.mark.covers("U27")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_batch_that_is_refused_is_dropped_with_one_warning(
    status: int,
    faulty: FaultyServer,
    transport: Transport,
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty.script("telemetry", Answer(status, {"detail": "not here"}), ACCEPTED)
    reporter = make(telemetry.sender(transport))
    assert reporter.log("lost")
    assert reporter.flush(sync=True)
    assert len(faulty.requests("telemetry")) == 1
    (line,) = [record for record in caplog.records if record.name == "tinkex"]
    assert (line.levelname, line.getMessage()[:19]) == ("WARNING", "telemetry: 2 events")
    assert reporter.log("kept")
    assert reporter.flush(sync=True)
    assert [event["event_name"] for event in faulty.requests("telemetry")[1].json["events"]] == [
        "kept"
    ]


@pytest.mark.covers("1.5.1/8", "1.5.1/9")
def test_attempt_that_takes_too_long_is_a_failure(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = make(Post(delay=60), http_timeout=0.05, max_retries=1)
    assert reporter.flush(sync=True)
    assert caplog.messages[-1] == "telemetry: 1 events given up after 1 retries: TimeoutError"


# ── what the bus says ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.5.3/6", "C63", "W03")
def test_events_of_the_reporters_session_have_no_headers(make: Make) -> None:
    post = Post()
    reporter = make(post, "mine")
    failed: dict[str, Any] = {**CALL, "session_id": "mine", "kind": "error", "stacktrace": None}
    failed["reason"] = APIConnectionError("refused")
    failed |= {
        "request_headers": {"x-api-key": "k"},
        "nested": {"response_headers": {}, "fine": 1},
        "body": b"prompt",
    }
    events.emit(events.HTTP_EXCEPTION, {"duration": 1.5}, failed)
    events.emit(events.HTTP_EXCEPTION, {"duration": 1.5}, {**failed, "session_id": "another"})
    events.emit(events.HTTP_EXCEPTION, {"duration": 1.5}, CALL)
    events.emit(events.HTTP_START, {"system_time": 1}, {**CALL, "session_id": "mine"})
    events.emit(
        events.QUEUE_STATE_CHANGE,
        {},
        {"session_id": "mine", "queue_state": "active", "request_id": "r"},
    )
    for name in events.FUTURE_EVENTS:
        events.emit(name, {"elapsed_time": 7}, {"session_id": "mine", "request_id": "r"})
    assert reporter.flush(sync=True)
    told = post.of("GENERIC_EVENT")
    assert [event["event_name"] for event in told] == [
        events.HTTP_EXCEPTION,
        events.QUEUE_STATE_CHANGE,
        *events.FUTURE_EVENTS,
    ]
    assert told[0]["severity"] == "ERROR"
    assert {event["severity"] for event in told[1:]} == {"INFO"}
    assert told[0]["event_data"] == {
        "measurements": {"duration": 1.5},
        "metadata": {
            **CALL,
            "kind": "error",
            "reason": "APIConnectionError: refused",
            "stacktrace": None,
            "nested": {"fine": 1},
        },
    }
    assert told[1]["event_data"] == {
        "measurements": {},
        "metadata": {"queue_state": "active", "request_id": "r"},
    }


@pytest.mark.covers("1.5.1/2", "1.5.1/3", "1.5.1/4")
def test_reported_events_can_be_chosen(make: Make) -> None:
    post = Post()
    deaf = make(post, attach_events=False)
    assert not events.is_heard()
    assert deaf.listen() == deaf.handler_id
    chosen = make(post, "mine", events=telemetry.LOGGED_EVENTS, handler_id="by-name")
    assert chosen.handler_id == "by-name"
    for name in events.HTTP_EVENTS:
        events.emit(name, {}, {"session_id": "mine"})
    assert chosen.flush(sync=True)
    assert post.names == ["SESSION_START", *events.HTTP_EVENTS]


def test_reporting_is_not_reported(make: Make) -> None:
    post = Post()

    async def send(request: TelemetrySendRequest) -> None:
        events.emit(events.HTTP_EXCEPTION, {}, {"session_id": "s", "path": "/api/v1/telemetry"})
        await asyncio.to_thread(events.emit, events.HTTP_EXCEPTION, {}, {"session_id": "s"})
        await post(request)

    reporter = make(send)
    assert reporter.flush(sync=True)
    assert reporter.stop()
    assert post.names == ["SESSION_START", "SESSION_END"]
    telemetry.send(send, REQUEST)
    assert telemetry.send_sync(send, REQUEST) is None


# ── what is written down ──────────────────────────────────────────────────────────────────────────


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    api_key: str = "plain"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.covers("1.5.5/8", "Q-9")
@pytest.mark.parametrize(
    ("given", "written"),
    [
        (True, True),
        (None, None),
        (5, 5),
        (0.5, 0.5),
        ("text", "text"),
        ([1, (2, "a"), None], [1, [2, "a"], None]),
        ({1: "a", "b": {None: False}}, {"1": "a", "b": {"None": False}}),
        (Colour.RED, "red"),
        (Point(1), {"x": 1, "api_key": "[REDACTED]"}),
        (types.AdamParams(learning_rate=0.5), {"learning_rate": 0.5}),
        (2**80, str(2**80)),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (b"bytes", "bytes"),
        (ValueError("no"), "ValueError: no"),
        (Path("a/b"), "a/b"),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02T00:00:00+00:00"),
        (Unprintable(), "<Unprintable that cannot be printed>"),
        ("half a pair \ud800", "half a pair ?"),
        (complex(1, 2), "(1+2j)"),
    ],
)
def test_data_is_written_as_json_has_it(given: Any, written: Any, make: Make) -> None:
    post = Post()
    reporter = make(post)
    assert reporter.log("x", {"value": given})
    assert reporter.flush(sync=True)
    told = post.of("GENERIC_EVENT")[0]["event_data"]["value"]
    if isinstance(written, dict) and "learning_rate" in written:
        assert told["learning_rate"] == 0.5
    else:
        assert told == written
        assert type(told) is type(written)
    json.dumps(post.requests[0].model_dump(mode="json"), allow_nan=False)


def test_name_of_an_operation_hides_no_message() -> None:
    told = "get_api_key: cannot reach 127.0.0.1:9"
    assert Scrubber().text(told) == told
    assert Scrubber().text("api_key: abcdefgh") == "api_key: [REDACTED]"
    assert "tml-" not in Scrubber().text("get_api_key: tml-abc is refused")


def test_large_data_is_cut() -> None:
    scrubber = Scrubber()
    wide = scrubber.mapping({str(number): number for number in range(1000)})
    assert len(wide) == MOST_ITEMS + 1
    assert wide["…"] == f"{1000 - MOST_ITEMS} more"
    assert len(scrubber.data(list(range(1000)))) == MOST_ITEMS + 1
    assert len(scrubber.text("word " * 10_000)) == MOST_TEXT
    nested: Any = "end"
    for _ in range(50):
        nested = {"deeper": [nested]}
    assert "end" not in json.dumps(scrubber.data(nested))
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    scrubber.data(cyclic)
    heavy = scrubber.mapping({str(number): "word " * 800 for number in range(60)})
    assert len(json.dumps(heavy)) < MOST_CHARACTERS * 1.2
    assert heavy["…"].endswith(" more")
    assert len(heavy) < 20
    assert len(json.dumps(scrubber.mapping({"k" * 100_000: 1}))) < MOST_TEXT * 2
    traced = scrubber.text(
        "\n".join(f"line {number}" for number in range(10_000)), MOST_TRACEBACK, end=True
    )
    assert len(traced) == MOST_TRACEBACK
    assert traced.endswith("line 9999")


def test_memory_is_bounded_while_sending_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_queue.MOST_QUEUE_CHARACTERS <= 8 * 2**20
    monkeypatch.setattr(event_queue, "MOST_QUEUE_CHARACTERS", 2**19)
    reporter = make(Post(delay=60), flush_threshold=10**9)
    tracemalloc.start()
    try:
        taken = [
            reporter.log("big", {str(key): "x" * 4000 for key in range(10)}) for _ in range(40)
        ]
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken[0]
    assert not taken[-1]
    assert used < 3 * 2**19


def test_heavy_batches_are_split(make: Make) -> None:
    post = Post()
    reporter = make(post, flush_threshold=10**9)
    for _ in range(60):
        assert reporter.log("big", {str(key): "x" * 4000 for key in range(8)})
    assert reporter.flush(sync=True)
    assert len(post.requests) == 2
    assert len(post.events) == 61


@pytest.mark.covers("1.5.5/4")
@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (3.220668, "0:00:03.220668"),
        (59.9999999, "0:01:00"),
        (3661, "1:01:01"),
        (360000.5, "100:00:00.500000"),
    ],
)
def test_durations_are_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert telemetry.duration_text(seconds) == text


# ── whose mistake it was ──────────────────────────────────────────────────────────────────────────


class Foreign(Exception):
    """An exception of another library, with any attributes."""

    def __init__(self, message: str = "foreign", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def in_context(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    return error


class Hostile(Exception):
    @property
    def status(self) -> int:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


USER = Foreign("inner", status_code=404)


@pytest.mark.covers("1.5.6/1", "1.5.6/2", "1.5.6/3", "1.5.6/4")
@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        (ValueError("x"), False),
        (Foreign(status=400), True),
        (Foreign(status_code=499), True),
        (Foreign(plug_status=404), True),
        (Foreign(status=408), False),
        (Foreign(status=429), False),
        (Foreign(status=410), True),
        (Foreign(status=500), False),
        (Foreign(status=399), False),
        (Foreign(status=True), False),
        (Foreign(status="404"), False),
        (Foreign(category="user"), True),
        (Foreign(category="USER"), True),
        (Foreign(category="server"), False),
        (Foreign(cause=USER), USER),
        (Foreign(reason=USER), USER),
        (Foreign(reason="text", cause=5), False),
        (chained(ValueError(), USER), USER),
        (in_context(ValueError(), USER), USER),
        (chained(ValueError(), chained(KeyError(), in_context(OSError(), USER))), USER),
        (chained(ValueError(), GoneError("gone", status_code=410)), True),
        (Hostile(), False),
        (BadRequestError("no", status_code=400), True),
        (RateLimitError("slow", status_code=429), False),
        (APIStatusError("late", status_code=408), False),
        (GoneError("gone", status_code=410), False),
        (InternalServerError("oh", status_code=500), False),
        (chained(InternalServerError("oh", status_code=500), USER), False),
        (RequestFailedError("no", request_id="r1", category="user"), True),
        (RequestFailedError("no", request_id="r1", category="server"), False),
    ],
    ids=map(str, range(60)),
)
def test_user_errors_are_marked(error: BaseException, culprit: object, make: Make) -> None:
    found = telemetry.user_error(error)
    assert (found is not None) is bool(culprit)
    if isinstance(culprit, BaseException):
        assert found is culprit
    post = Post()
    reporter = make(post)
    assert reporter.log_exception(error, "critical")
    assert reporter.flush(sync=True)
    event = post.events[-1]
    if culprit:
        assert (event["event"], event["event_name"], event["severity"]) == (
            "GENERIC_EVENT",
            "user_error",
            "WARNING",
        )
    else:
        assert (event["event"], event["severity"]) == ("UNHANDLED_EXCEPTION", "CRITICAL")


@pytest.mark.covers("1.5.6/1")
def test_first_hit_depth_first_is_the_culprit() -> None:
    deep, shallow = Foreign("deep", status=404), Foreign("shallow", status=404)
    error = Foreign(cause=Foreign("middle", reason=deep), reason=shallow)
    assert telemetry.user_error(error) is deep
    ring = Foreign("ring")
    ring.cause = ring.reason = chained(ValueError(), ring)  # type: ignore[attr-defined]
    assert telemetry.user_error(ring) is None


@pytest.mark.covers("1.5.6/2")
def test_user_error_is_reported_with_its_facts(make: Make) -> None:
    post = Post()
    reporter = make(post)
    reporter.log_exception(
        BadRequestError(
            "no such field", status_code=400, body={"detail": "x", "api_key": "secret1"}
        )
    )
    reporter.log_exception(Foreign(category="user", data={"field": 1}))
    reporter.log_exception(Foreign(category="user", data="text"))
    assert reporter.flush(sync=True)
    first, second, third = (event["event_data"] for event in post.of("GENERIC_EVENT"))
    assert first == {
        "error_type": "tinkex.errors.BadRequestError",
        "message": "no such field",
        "status_code": 400,
        "body": {"detail": "x", "api_key": "[REDACTED]"},
    }
    assert second["body"] == {"field": 1}
    assert set(third) == {"error_type", "message"}
    assert third["error_type"].endswith("test_telemetry.Foreign")


@pytest.mark.covers("1.5.5/6", "1.5.6/3")
def test_unhandled_exception_has_its_own_trace(make: Make) -> None:
    post = Post()
    reporter = make(post)
    try:
        int("missing")
    except ValueError as error:
        reporter.log_exception(error)
    assert reporter.flush(sync=True)
    event = post.of("UNHANDLED_EXCEPTION")[0]
    assert event["error_type"] == "ValueError"
    assert 'in test_unhandled_exception_has_its_own_trace\n    int("missing")' in event["traceback"]


# ── types ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.5.7/1", "1.5.7/2", "1.5.7/3", "1.5.7/4", "1.5.7/5", "C90")
def test_events_and_batches_as_types() -> None:
    assert literal_values(EventType) == (
        "SESSION_START",
        "SESSION_END",
        "UNHANDLED_EXCEPTION",
        "GENERIC_EVENT",
    )
    assert literal_values(Severity) == ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    assert parse_literal(EventType, "SESSION_START") == "SESSION_START"
    assert parse_literal(EventType, "session_start") is None
    assert parse_literal(Severity, "ERROR") == "ERROR"
    assert parse_literal(Severity, "error") is None
    assert as_severity(" error ") == "ERROR"
    assert as_severity(None) == "INFO"
    common = {"event_id": "a", "event_session_index": 0, "timestamp": "2026-01-01T00:00:00Z"}
    maps = [
        {"event": "SESSION_START", **common},
        {"event": "SESSION_END", **common},
        {"event": "UNHANDLED_EXCEPTION", "error_type": "E", "error_message": "m", **common},
        {"event": "GENERIC_EVENT", "event_name": "n", **common},
    ]
    parsed = [parse_event(item) for item in maps]
    assert [event.severity for event in parsed if event] == ["INFO", "INFO", "ERROR", "INFO"]
    assert isinstance(parsed[3], types.GenericEvent)
    assert parsed[3].event_data == {}
    assert parse_event({"event": "NEWS", **common}) is None
    metadata = {"platform": "p", "sdk_version": "1", "session_id": "s", "process_uuid": "u"}
    batch = types.TelemetryBatch.from_list([*maps, {"event": "NEWS"}], **metadata)
    assert batch.size == 4
    assert batch.metadata == metadata
    assert [item["event"] for item in batch.to_list()] == list(literal_values(EventType))
    assert "duration" not in batch.to_list()[1]
    assert "traceback" not in batch.to_list()[2]
    assert types.TelemetryBatch.from_list(batch.to_list(), **metadata) == batch
    assert batch.to_request() == TelemetrySendRequest(events=batch.to_list(), **metadata)
    assert TelemetryResponse.model_validate({"status": "accepted"}).status == "accepted"
    with pytest.raises(ValueError, match="status"):
        TelemetryResponse.model_validate({"status": "refused"})


# ── capturing ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.6/1", "1.6/2")
def test_block_passes_its_exception_on_and_reports_it(make: Make) -> None:
    post = Post()
    reporter = make(post)
    error = ValueError("x")
    with (
        pytest.raises(ValueError, match="x") as caught,
        capture_exceptions(reporter, severity="critical"),
    ):
        raise error
    assert caught.value is error
    with capture_exceptions(reporter):
        value = 5
    assert value == 5
    with pytest.raises(ValueError, match="x"), capture_exceptions(None):
        raise error
    assert reporter.flush(sync=True)
    assert [event["severity"] for event in post.of("UNHANDLED_EXCEPTION")] == ["CRITICAL"]
    assert post.of("SESSION_END") == []
    assert telemetry.with_telemetry is capture_exceptions


@pytest.mark.covers("1.6/1")
def test_fatal_exception_ends_the_session(make: Make) -> None:
    post = Post()
    reporter = make(post)
    with pytest.raises(KeyError), capture_exceptions(reporter, fatal=True):
        raise KeyError("x")
    wait_until(lambda: post.names[-1:] == ["SESSION_END"])
    assert len(post.of("UNHANDLED_EXCEPTION")) == 1


@pytest.mark.covers("1.6/1")
def test_functions_and_coroutine_functions_are_captured(make: Make) -> None:
    post = Post()
    reporter = make(post)

    @capture_exceptions(reporter)
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    @capture_exceptions(reporter)
    async def divide_later(a: int, b: int) -> float:
        await asyncio.sleep(0)
        return a / b

    assert divide(4, 2) == 2
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")
    assert inspect.iscoroutinefunction(divide_later)
    assert asyncio.run(divide_later(4, 2)) == 2
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(divide_later(1, 0))
    assert reporter.flush(sync=True)
    assert len(post.of("UNHANDLED_EXCEPTION")) == 2


@pytest.mark.covers("1.6/3")
def test_tasks_are_captured(make: Make) -> None:
    post = Post()
    reporter = make(post)

    async def fine() -> int:
        return 7

    async def bad() -> int:
        raise LookupError("bad")

    def bad_in_a_thread() -> int:
        raise LookupError(f"bad in {threading.current_thread().name}")

    async def main() -> None:
        assert await asyncio.create_task(telemetry.async_capture(fine(), reporter=reporter)) == 7
        assert await telemetry.async_capture(lambda: 8, reporter=reporter) == 8
        with pytest.raises(LookupError, match=r"^bad$"):
            await asyncio.create_task(telemetry.async_capture(bad(), reporter=reporter))
        with pytest.raises(LookupError, match="bad in asyncio"):
            await telemetry.async_capture(bad_in_a_thread, reporter=reporter, fatal=True)

    asyncio.run(main())
    assert reporter.flush(sync=True)
    assert len(post.of("UNHANDLED_EXCEPTION")) == 2
    assert len(post.of("SESSION_END")) == 1


@pytest.mark.covers("1.6/4")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), True),
        (SystemExit(3), True),
        (SystemExit("no"), True),
        (SystemExit(0), False),
        (SystemExit(), False),
        (asyncio.CancelledError(), False),
        (concurrent.futures.CancelledError(), False),
        (GeneratorExit(), False),
    ],
    ids=map(str, range(8)),
)
def test_ends_are_reported_and_cancellation_is_not(
    error: BaseException, told: bool, make: Make
) -> None:
    post = Post()
    reporter = make(post)
    with pytest.raises(type(error)) as caught, capture_exceptions(reporter):
        raise error
    assert caught.value is error
    assert reporter.flush(sync=True)
    assert len(post.of("UNHANDLED_EXCEPTION")) == told


@pytest.mark.covers("1.6/1")
def test_exception_that_passes_through_several_is_reported_once(make: Make) -> None:
    post = Post()
    reporter, other = make(post), make(post, "other")
    inner, middle, outer = (
        capture_exceptions(reporter),
        capture_exceptions(reporter),
        capture_exceptions(other),
    )
    with pytest.raises(ValueError, match="x"), outer, middle, inner:
        raise ValueError("x")
    assert reporter.flush(sync=True)
    assert other.flush(sync=True)
    assert sorted(
        request.session_id for request in post.requests for e in request.events if "error_type" in e
    ) == [
        "other",
        "s",
    ]


@pytest.mark.covers("1.7/1")
def test_providers_have_no_reporter_by_default(make: Make) -> None:
    post = Post()
    reporter = make(post)

    class Client(Provider):
        def get_telemetry(self) -> Reporter | None:
            return reporter

    class Broken(Provider):
        def get_telemetry(self) -> Reporter | None:
            raise RuntimeError("no reporter today")

    class Plain(Provider):
        pass

    class Alike:
        def get_telemetry(self) -> Reporter | None:
            return reporter

    assert Plain().get_telemetry() is None
    providers: list[Provider] = [Plain(), Client(), Alike(), Broken()]
    for provider in providers:
        with pytest.raises(ValueError, match="x"), capture_exceptions(provider):
            raise ValueError("x")
    assert reporter.flush(sync=True)
    assert len(post.of("UNHANDLED_EXCEPTION")) == 2


# ── what outlives what ────────────────────────────────────────────────────────────────────────────


class Owner:
    """Stands for a session."""

    def __init__(self) -> None:
        self.closed = False


@pytest.mark.covers("W16", "Q-5")
def test_reporter_ends_when_its_session_is_dropped_and_does_not_hold_it(make: Make) -> None:
    post = Post()
    owner = Owner()
    gone = weakref.ref(owner)
    reporter = make(post, owner=owner, flush_interval=3600)
    events.emit(events.QUEUE_STATE_CHANGE, {}, {"session_id": "s"})
    gc.disable()
    try:
        del owner
        assert gone() is None  # by counting alone: nothing refers to it in a circle either
    finally:
        gc.enable()
    wait_until(lambda: post.names == ["SESSION_START", events.QUEUE_STATE_CHANGE, "SESSION_END"])
    assert not reporter.is_alive
    assert not events.is_heard()


@pytest.mark.covers("W16")
def test_reporter_ends_when_its_session_was_closed(make: Make) -> None:
    post = Post()
    owner = Owner()
    reporter = make(post, owner=owner, flush_interval=0.05)
    wait_until(lambda: post.names == ["SESSION_START"])
    owner.closed = True
    wait_until(lambda: post.names == ["SESSION_START", "SESSION_END"])
    assert not reporter.is_alive


def test_dropped_reporter_leaves_no_thread() -> None:
    post = Post()
    reporter = Reporter(post, "s", flush_interval=0.05)
    wait_until(lambda: post.names == ["SESSION_START"])
    gone = weakref.ref(reporter)
    del reporter
    wait_until(lambda: gc.collect() is not None and gone() is None)
    wait_until(lambda: not events.is_heard())


def test_closing_has_a_limit_and_can_be_repeated(make: Make) -> None:
    reporter = make(Post(delay=60))

    async def close() -> None:
        await asyncio.gather(reporter.aclose(0.2), reporter.aclose(0.2), reporter.aclose(60))

    began = time.monotonic()
    start(close()).result(20)
    assert time.monotonic() - began < 20
    assert reporter.wait_until_drained(0) is False
    assert reporter._events.count == 0


def test_cancelled_close_still_ends_the_reporter(make: Make) -> None:
    gate = threading.Event()
    post = Post(gate=gate)
    reporter = make(post)

    async def close() -> None:
        patient = asyncio.ensure_future(reporter.aclose(60))
        await asyncio.sleep(0.05)
        await reporter.aclose(0.05)
        patient.cancel()

    start(close()).result(20)
    assert post.requests == []
    gate.set()
    wait_until(lambda: post.names == ["SESSION_START", "SESSION_END"])


PROGRAM = """
import sys, time, os, atexit
from tinkex import telemetry
from tinkex.client.settings.config import Config
from tinkex.client.http.transport import Transport
transport = Transport(Config(base_url=sys.argv[1], api_key="tml-topsecret"))
reporter = telemetry.Reporter(telemetry.sender(transport), "program")
reporter.log("step")
"""


def run(program: str, *arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a program and say how long its last part took: from the line it prints to its end."""
    code = textwrap.dedent(program)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    head = process.stdout.readline()
    began = time.monotonic()
    out, err = process.communicate(timeout=40)
    return time.monotonic() - began, subprocess.CompletedProcess(
        [], process.returncode, head + out, err
    )


@pytest.mark.covers("W08")
def test_ending_program_sends_remaining_events(faulty: FaultyServer) -> None:
    _, done = run(PROGRAM + "print('end', flush=True)", faulty.base_url)
    assert done.returncode == 0, done.stderr
    told = [event for seen in faulty.requests("telemetry") for event in seen.json["events"]]
    assert [event.get("event_name", event["event"]) for event in told] == [
        "SESSION_START",
        "step",
        "SESSION_END",
    ]


@pytest.mark.covers("W08")
@pytest.mark.parametrize("answer", [Answer(delay=30), Answer(500)], ids=["silent", "broken"])
def test_program_ends_soon_although_telemetry_cannot_be_sent(
    faulty: FaultyServer, answer: Answer
) -> None:
    faulty.script("telemetry", answer)
    ended = (
        PROGRAM + "reporter.log_fatal_exception(ValueError('x'))\nprint('end', flush=True)\nraise "
        "SystemExit(3)"
    )
    seconds, done = run(ended, faulty.base_url)
    assert done.returncode == 3
    # 1 s, and what the interpreter itself takes on a busy machine; the retries alone take 7
    assert seconds < 6
    assert faulty.requests("telemetry")


@pytest.mark.covers("W08")
def test_error_never_waits_for_telemetry(make: Make) -> None:
    reporter = make(Post(delay=60))
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(ValueError, match="x"), capture_exceptions(reporter, fatal=True):
            raise ValueError("x")
    assert time.monotonic() - began < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.covers("W15")
def test_forked_child_starts_afresh(faulty: FaultyServer) -> None:
    program = PROGRAM + textwrap.dedent(
        """
        reporter.flush(sync=True)
        reporter.log("before the fork")
        from tinkex import events
        import threading
        held, free = threading.Event(), threading.Event()
        def hold():
            with reporter._events.changed:
                held.set()
                free.wait()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()  # while another thread is logging
        free.set()
        if child == 0:
            assert not reporter.is_alive
            assert not reporter.log("x") and not reporter.flush(sync=True) and not reporter.stop()
            assert not reporter.log_fatal_exception(ValueError())
            assert not reporter.wait_until_drained(5)
            events.emit(events.QUEUE_STATE_CHANGE, {}, {"session_id": "program"})
            assert not events.is_heard()
            own = Transport(Config(base_url=sys.argv[1], api_key="tml-topsecret"))
            fresh = telemetry.Reporter(telemetry.sender(own), "child")
            fresh.log("in the child")
            assert fresh.stop(10)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print('child', status, flush=True)
        """
    )
    _, done = run(program, faulty.base_url)
    assert done.stdout.splitlines() == ["child 0"], done.stderr
    told: dict[str, list[str]] = {}
    processes = set()
    for seen in faulty.requests("telemetry"):
        processes.add((seen.json["session_id"], seen.json["process_uuid"]))
        for event in seen.json["events"]:
            told.setdefault(seen.json["session_id"], []).append(
                event.get("event_name", event["event"])
            )
    assert told == {
        "program": ["SESSION_START", "step", "before the fork", "SESSION_END"],
        "child": ["SESSION_START", "in the child", "SESSION_END"],
    }
    assert len({uuid for _, uuid in processes}) == 2


def test_finalizer_may_report_while_its_thread_reports(make: Make) -> None:
    post = Post()
    reporter = make(post)

    class Talkative:
        def __del__(self) -> None:
            reporter.log("finalizer")

    with reporter._events.changed:  # garbage may be collected anywhere, here too
        Talkative()
    assert reporter.stop()
    assert post.names == ["SESSION_START", "finalizer", "SESSION_END"]


@pytest.mark.covers("W08")
def test_calls_after_the_program_ended_do_not_wait() -> None:
    late = PROGRAM + textwrap.dedent(
        """
        import tinkex.client.futures.loop_thread
        print('end', flush=True)
        tinkex.client.futures.loop_thread.runtime().stop()
        assert not reporter.flush(sync=True)
        late = telemetry.Reporter(telemetry.sender(transport), "late")
        assert not late.flush(sync=True) and not late.wait_until_drained() and late.stop()
        """
    )
    seconds, done = run(late, "http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert seconds < 4


def test_many_threads_report_at_once(make: Make) -> None:
    post = Post()
    reporter = make(post, flush_threshold=10)

    def work(number: int) -> None:
        for turn in range(100):
            assert reporter.log(f"{number}-{turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reporter.stop()
    assert [event["event_session_index"] for event in post.events] == list(range(802))
    assert len({event["event_id"] for event in post.events}) == 802


# ── what is never sent ────────────────────────────────────────────────────────────────────────────

KEY = "tml-5ecretKEY-abc_DEF.1"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJlLXBsYW50ZWQ"
PLANTED = {
    KEY: "5ecretKEY",
    JWT: "eyJ",
    "planted-header": "planted-header",
    "planted-cookie": "planted-cookie",
    "planted-user:planted-password": "planted-password",
    "planted-signature": "planted-signature",
    "planted-cf": "planted-cf",
    "planted-literal": "planted-literal",
    "cGxhbnRlZDpiYXNpYw==": "cGxhbnRlZDpiYXNpYw",
    "hf_plantedheader0123": "plantedheader",
}
TEXTS = [
    f"401: the key {KEY} is unknown",
    f"key={KEY}&x=1",
    f'{{"detail": "{KEY}"}}',
    f"token {JWT} has expired",
    "x-api-key: planted-header",
    "X-API-Key = 'planted-header'",
    "{'x-api-key': 'planted-header', 'accept': '*/*'}",
    '{"X-Api-Key":"planted-header"}',
    '{\\"x-api-key\\": \\"planted-header\\"}',
    "[(b'X-Api-Key', b'planted-header')]",
    "<CIMultiDict('X-API-Key': 'planted-header')>",
    "headers={'x-api-key': ['planted-header', 'planted-header']}",
    "Authorization: Bearer planted-header",
    "authorization: Digest username=planted-header, response=planted-header",
    "Proxy-Authorization: Basic cGxhbnRlZDpiYXNpYw==",
    "sent Basic cGxhbnRlZDpiYXNpYw== to the proxy",
    'Cookie: a="planted-cookie"; b=planted-cookie\r\nHost: x',
    "set-cookie: id=planted-cookie; Path=/",
    "CF-Access-Client-Secret: planted-cf",
    "cf_access_client_secret='planted-cf'",
    "proxy http://planted-user:planted-password@proxy:3128 refused",
    "https://planted-user:planted-password@host/path",
    "https://store.example.com/a.tar?X-Amz-Credential=planted-signature&X-Amz-Signature=planted-signature",
    "https://store.example.com/a?sv=1&sig=planted-signature",
    "https://store.example.com/a?unknown=planted-signature",
    "GET /a?x=1&GoogleAccessId=planted-signature&Policy=planted-signature",
    "http://planted-password@host",
    "http://someone:a/planted-password@host",
    "logged in with hf_plantedheader0123, sk-plantedheader0123 and ghp_plantedheader0123",
    "sent bearer planted-header to the server",
    "GET /a?X-Goog-Signature=planted-signature&x=1",
    "password: planted-password planted-password",
    "HF_TOKEN=planted-header",
    "access_token=planted-header",
    "a planted-literal in the middle",
    "planted%2Dliteral and more planted-literal",
]
DATA: list[Any] = [
    {
        "headers": {
            "X-Api-Key": "planted-header",
            "Authorization": "Bearer planted-header",
            "Cookie": "planted-cookie",
        }
    },
    {"api_key": "planted-header", "apiKey": "planted-header", "TINKER_API_KEY": "planted-header"},
    {"deep": [{"deeper": ({"proxy_authorization": "planted-header"},)}]},
    [["x-api-key", "planted-header"], ("Authorization", "planted-header")],
    [(b"X-Api-Key", b"planted-header")],
    ["accept", "*/*", "x-api-key", "planted-header"],
    {"name": "x-api-key", "value": "planted-header"},
    {KEY: 1, b"tml-5ecretKEY": 2},
    {
        "set": {KEY},
        "bytes": KEY.encode(),
        "error": ValueError(KEY),
        "point": Point(1, "planted-header"),
    },
    {
        "credential_cmd": "cat planted-header",
        "cfAccessClientSecret": "planted-cf",
        "password": ["planted-password"],
    },
    {
        "x-amz-security-token": "planted-signature",
        "hf_token": "planted-header",
        "jwt": "planted-header",
    },
    Config(
        base_url="https://example.com", api_key=KEY, proxy="http://planted-user:planted-password@p"
    ),
    types.CreateSessionRequest(
        tags=[KEY], user_metadata={"cookie": "planted-cookie"}, sdk_version="1"
    ),
]


def raise_with(text: str) -> BaseException:
    try:
        try:
            raise ConnectionError(text)
        except ConnectionError as inner:
            raise RuntimeError(f"wrapped: {text}") from inner
    except RuntimeError as error:
        return error


@pytest.mark.covers("W03")
def test_no_key_is_ever_sent(
    faulty: FaultyServer, transport: Transport, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tinkex")
    faulty.script("telemetry", Answer(500, {"detail": f"x-api-key: {KEY}"}), ACCEPTED)
    reporter = make(telemetry.sender(transport), secrets=["planted-literal"], flush_threshold=10**9)
    logger = telemetry.attach_logger(events=[events.FUTURE_API_ERROR, events.HTTP_EXCEPTION])
    for text in TEXTS:
        assert reporter.log(text, {"text": text, text: 1, "list": [text, {"text": text}]})
        assert reporter.log_exception(raise_with(text))
        assert reporter.log_exception(
            BadRequestError(text, status_code=400, body={"detail": [text], "text": text})
        )
        assert reporter.log_exception(RequestFailedError(text, "r1", "user"))
        metadata = {
            "session_id": "s",
            "reason": raise_with(text),
            "stacktrace": raise_with(text).__traceback__,
        }
        events.emit(
            events.HTTP_EXCEPTION, {"duration": 1}, {**metadata, "note": text, "path": text}
        )
        events.emit(events.FUTURE_API_ERROR, {"elapsed_time": 1}, {"session_id": "s", text: text})
    for data in DATA:
        assert reporter.log("data", {"data": data})
        assert reporter.log_exception(BadRequestError("x", status_code=400, body={"data": data}))
        events.emit(events.FUTURE_API_ERROR, {"elapsed_time": 1}, {"session_id": "s", "data": data})
    assert reporter.stop(20)
    sent = b"\n".join(seen.body for seen in faulty.requests("telemetry")).decode()
    assert (
        len([event for seen in faulty.requests("telemetry") for event in seen.json["events"]]) > 200
    )
    for form in PLANTED.values():
        at = sent.find(form)
        assert at < 0, sent[max(0, at - 200) : at + 100]
    for form in ("5ecretKEY", "eyJ", "planted-header", "planted-cookie", "planted-password"):
        own_lines = [
            record.getMessage() for record in caplog.records if "telemetry" in record.pathname
        ]
        assert len(own_lines) > 50
        assert form not in "\n".join(own_lines)
    telemetry.detach(logger)


def test_harmless_text_stays() -> None:
    scrubber = Scrubber(["abc"])  # too short to be looked for
    for text in (
        "html-parser and abc",
        "Basic authentication failed",
        "max_tokens=5, token_count: 7",
        "POST /api/v1/asample at example.com:443 refused",
        "KeyError: 'target_tokens'",
        "tinker://run/weights/0001",
        "the key is missing",
        'File "a.py", line 3, in step',
    ):
        assert scrubber.text(text) == text
    for name in (
        "path",
        "max_tokens",
        "tokens",
        "token_count",
        "request_id",
        "session_id",
        "secretary",
        "keys",
    ):
        assert not is_secret_name(name)


def test_secrets_of_a_configuration_are_known() -> None:
    known = secrets_of(
        Config(
            base_url="https://example.com",
            api_key="tml-plainkey",
            credential_cmd="cat secretfile",
            cf_access_client_id="id",
            cf_access_client_secret="cfsecret",
            default_headers={"X-Api-Key": "headerkey", "X-Team": "team"},
            default_query={"token": "querytoken", "page": "first"},
            proxy="http://user:p%40ss@proxy",
            proxy_headers=(("X-Proxy", "proxyvalue"),),
        )
    )
    assert {
        "tml-plainkey",
        "cat secretfile",
        "cfsecret",
        "headerkey",
        "querytoken",
        "p@ss",
        "proxyvalue",
    } <= set(known)
    assert {"team", "first", "id", ""}.isdisjoint(known)
    shown = Scrubber(known).text(
        "tml-plainkey, user:p%40ss, p@ss, cat%20secretfile, dXNlcjpwQHNz, team"
    )
    assert shown == ", ".join(["[REDACTED]"] * 5 + ["team"])
    assert list(known) == sorted(known, key=len, reverse=True)


@pytest.mark.parametrize(
    "piece", ["a", "://", "token", "api_key='", "'", "\\", "Basic ", "authorization:", "://a:", "="]
)
def test_every_text_is_scrubbed_quickly(piece: str) -> None:
    began = time.process_time()
    Scrubber(["planted"]).text(piece * (200_000 // len(piece)), MOST_TRACEBACK)
    assert time.process_time() - began < 3
