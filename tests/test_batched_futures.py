"""Polls for many samples at once, cancelling, joining, unloading, and results announced before they
are sent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, sample_json, serving, step_json, wait_until
from tinkex.engine.api import EngineError, SampleJob
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.routes import future_calls, server_pages
from tinkex.server.routes.handler_table import HANDLERS
from tinkex.server.runs.promises import KEEP_READ, Promises
from tinkex.server.runs.result_log import Log
from tinkex.server.server_limits import Limits
from tinkex.server.state import State
from tinkex.server.workers.worker import Worker
from tinkex.types.future_requests import FuturesRetrieveResponse, RequestFailedResponse
from tinkex.types.inputs import ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.wire import codec

CLONE = 1_000_000_000
HANDLERS_CONFIG = server_pages.client_config


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Wire]]:
    """Starts a server on the test's data directory, after the one before has ended; its polls are
    held."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, limits: Limits | None = None) -> Wire:
            stack.close()
            limits = limits or Limits(poll_seconds=15, gap_seconds=30)
            return Wire(
                stack.enter_context(serving(engine or FakeEngine(), tmp_path, limits=limits))
            )

        yield start


@pytest.fixture(autouse=True)
def _from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cursors that can be read: as if this were the first microsecond of all."""
    monkeypatch.setattr("tinkex.server.runs.promises.first_cursor", lambda: 0)


@pytest.fixture
def wire(serve: Callable[..., Wire]) -> Wire:
    return serve()


def sampler_of(wire: Wire, session: str | None = None) -> str:
    body = {
        "session_id": session or wire.session(),
        "sampling_session_seq_id": 0,
        "base_model": "fake",
    }
    return str(wire.post("create_sampling_session", body)["sampling_session_id"])


def asked(sampler: str, cursor: int = 0, clone: int = 0, **fields: Any) -> dict[str, Any]:
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampler,
        "cloned_sampler_id": clone,
    }
    return {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **fields}


def ids_of(answer: Any) -> list[str]:
    return [completion["request_id"] for completion in answer["completions"]]


def carried(
    wire: Wire, body: dict[str, Any]
) -> tuple[FuturesRetrieveResponse, dict[str, tuple[str, bytes]]]:
    """A batched poll with results in it."""
    heard = wire.send("retrieve_futures", body)
    assert heard.status == 200, heard
    assert heard.headers["content-type"] == codec.BATCH
    return codec.decode_batch(heard.body)


def drain(
    wire: Wire, sampler: str, count: int, cursor: int = 0, **fields: Any
) -> tuple[list[str], int]:
    """Poll until so many samples have ended."""
    ended: list[str] = []
    while len(ended) < count:
        answer = wire.post("retrieve_futures", asked(sampler, cursor, **fields))
        assert answer["cursor"] >= cursor
        ended += ids_of(answer)
        cursor = answer["cursor"]
    return ended, cursor


def watch_encoder(monkeypatch: pytest.MonkeyPatch, note: Callable[[], object]) -> None:
    """Be told when a sample's result is encoded."""
    real = codec.ENCODERS[SampleResponse]

    def encode(value: Any) -> Any:
        note()
        return real(value)

    monkeypatch.setitem(codec.ENCODERS, SampleResponse, encode)


class Gate:
    """Holds a method of the engine up until it is opened."""

    def __init__(self, method: str) -> None:
        self.method, self.opened, self.calls = method, threading.Event(), list[tuple[str, str]]()

    def __call__(self, method: str, subject: str) -> None:
        self.calls.append((method, subject))
        if method == self.method:
            assert self.opened.wait(20)


# ── the official form ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S29")
def test_poll_lists_finished_samples_in_order_once(wire: Wire) -> None:
    sampler = sampler_of(wire)
    sent = [wire.post("asample", sample_json(sampler, number))["request_id"] for number in range(5)]
    ended, cursor = drain(wire, sampler, 5)
    assert sorted(ended) == sorted(sent)
    assert cursor == 5
    assert wire.post("retrieve_futures", asked(sampler, 5, timeout=0)) == {
        "completions": [],
        "cursor": 5,
    }
    late = wire.post("asample", sample_json(sampler, 5))["request_id"]
    assert drain(wire, sampler, 1, 5) == ([late], 6)


def test_numbering_starts_at_one_and_answers_repeat_until_acknowledged(
    wire: Wire,
) -> None:
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0))["request_id"]
    first = wire.post("retrieve_futures", asked(sampler))
    assert first["cursor"] == 1
    assert first["completions"][0]["state"] == "finished"
    assert ids_of(first) == [request_id]
    assert wire.post("retrieve_futures", asked(sampler)) == first
    assert wire.post("retrieve_futures", asked(sampler, 1, timeout=0))["completions"] == []
    assert len(wire.result(request_id)["sequences"]) == 1, (
        "acknowledged, and still there to be fetched"
    )


def test_poll_is_held_until_something_ends(serve: Callable[..., Wire]) -> None:
    gate = Gate("sample_start")
    # longer than a request may take here
    wire = serve(FakeEngine(fail=gate), Limits(poll_seconds=60))
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0))["request_id"]
    threading.Timer(0.3, gate.opened.set).start()
    assert ids_of(wire.post("retrieve_futures", asked(sampler))) == [request_id]


def test_poll_without_results_ends_in_time_with_the_same_cursor(
    serve: Callable[..., Wire],
) -> None:
    wire = serve(limits=Limits(poll_seconds=0.3))
    sampler = sampler_of(wire)
    began = time.monotonic()
    assert wire.post("retrieve_futures", asked(sampler)) == {"completions": [], "cursor": 0}
    assert time.monotonic() - began > 0.28
    patient = serve(limits=Limits(poll_seconds=60))  # longer than a request may take here
    assert (
        patient.post("retrieve_futures", asked(sampler_of(patient), timeout=0))["completions"] == []
    )


def test_sizes_are_those_of_the_results(wire: Wire) -> None:
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0, num_samples=3))["request_id"]
    [completion] = wire.post("retrieve_futures", asked(sampler))["completions"]
    heard = wire.send(
        "retrieve_future", {"request_id": request_id}, headers={"Accept": codec.PROTOBUF}
    )
    assert completion["response_payload_uncompressed_size"] == len(heard.body) > 20
    assert len(codec.decode(SampleResponse, heard.body, codec.PROTOBUF).sequences) == 3


def test_failures_are_named_as_such(wire: Wire) -> None:
    sampler = sampler_of(wire)
    prompt = {"chunks": [{"tokens": [1] * 65, "type": "encoded_text"}]}
    bad = wire.post("asample", sample_json(sampler, 0, prompt=prompt))["request_id"]
    [completion] = wire.post("retrieve_futures", asked(sampler))["completions"]
    assert completion == {"state": "failed", "request_id": bad}
    assert "65" in wire.result(bad)["error"]
    again = wire.post("asample", sample_json(sampler, 0, num_samples=2))["request_id"]
    assert drain(wire, sampler, 1, 1) == ([again], 2), (
        "another request under a used number has its place too"
    )


def test_each_client_of_a_sampler_has_its_own_log(wire: Wire) -> None:
    sampler = sampler_of(wire)
    mine = wire.post("asample", sample_json(sampler, 0))["request_id"]
    theirs = wire.post("asample", sample_json(sampler, 3 * CLONE + 1))["request_id"]
    assert drain(wire, sampler, 1) == ([mine], 1)
    assert drain(wire, sampler, 1, clone=3) == ([theirs], 1)
    assert wire.post("retrieve_futures", asked(sampler, clone=2, timeout=0.2))["completions"] == []
    other = sampler_of(wire)
    assert wire.post("retrieve_futures", asked(other, timeout=0.2))["completions"] == []


def test_unknown_samplers_and_unknown_cursors_are_refused(wire: Wire) -> None:
    assert wire.send("retrieve_futures", asked("nobody:sample:0")).status == 404
    sampler = sampler_of(wire)
    heard = wire.send("retrieve_futures", asked(sampler, 7))
    assert heard.status == 410
    assert "before a restart of this server" in heard.json["detail"]
    assert wire.send("retrieve_futures", {"target": {"type": "other"}}).status == 400


def test_cursor_of_an_earlier_process_hides_no_result(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart as many samples may have ended again as the client had acknowledged: they are
    other ones."""
    monkeypatch.undo()
    before = serve()
    sampler = sampler_of(before)
    sent = [
        before.post("asample", sample_json(sampler, number))["request_id"] for number in range(3)
    ]
    named, cursor = drain(before, sampler, 3)
    assert sorted(named) == sorted(sent)
    after = serve()
    later = [
        after.post("asample", sample_json(sampler, number))["request_id"] for number in range(3, 7)
    ]
    assert sorted(drain(after, sampler, 4, cursor)[0])[-4:] == sorted(later)


def test_new_log_leaves_out_results_already_read(wire: Wire) -> None:
    sampler = sampler_of(wire)
    wire.run("asample", sample_json(sampler, 0))
    unread = wire.post("asample", sample_json(sampler, 1))["request_id"]
    assert drain(wire, sampler, 1)[0] == [unread]


def test_end_of_a_session_ends_its_polls(serve: Callable[..., Wire]) -> None:
    wire = serve(limits=Limits(poll_seconds=60))  # longer than a request may take here
    session = wire.session()
    sampler = sampler_of(wire, session)
    finish = (f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    timer = threading.Timer(0.2, wire.post, finish)
    timer.start()
    heard = wire.send("retrieve_futures", asked(sampler))
    timer.join()
    assert heard.status == 410
    assert "ended" in heard.json["detail"]


# ── with the results in it ────────────────────────────────────────────────────────────────────────


def test_results_come_along(wire: Wire) -> None:
    sampler = sampler_of(wire)
    prompt = {"chunks": [{"tokens": [1] * 65, "type": "encoded_text"}]}
    good = wire.post("asample", sample_json(sampler, 0))["request_id"]
    bad = wire.post("asample", sample_json(sampler, 1, prompt=prompt))["request_id"]
    payloads: dict[str, tuple[str, bytes]] = {}
    cursor = 0
    while len(payloads) < 2:
        head, more = carried(wire, asked(sampler, cursor, inline_bytes=1 << 20))
        assert [completion.request_id for completion in head.completions] == list(more)
        payloads, cursor = payloads | more, head.cursor
    kind, data = payloads[good]
    assert kind == codec.PROTOBUF
    [sequence] = codec.decode(SampleResponse, data, kind).sequences
    assert len(sequence.tokens) == 3
    kind, data = payloads[bad]
    assert kind == codec.JSON
    assert "65" in codec.decode(RequestFailedResponse, data, kind).error
    assert cursor == 2


def test_results_that_came_along_are_kept_until_they_are_acknowledged(wire: Wire) -> None:
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0))["request_id"]
    first = carried(wire, asked(sampler, inline_bytes=1 << 20))
    assert carried(wire, asked(sampler, inline_bytes=1 << 20)) == first, (
        "the reply may have been lost"
    )
    assert wire.send("retrieve_future", {"request_id": request_id}).status == 200
    head, payloads = carried(wire, asked(sampler, 1, inline_bytes=1 << 20, timeout=0))
    assert (head.completions, head.cursor, payloads) == ([], 1, {})
    heard = wire.send("retrieve_future", {"request_id": request_id})
    assert heard.status == 410
    assert wire.post("asample", sample_json(sampler, 0))["request_id"] == request_id
    assert wire.send("retrieve_future", {"request_id": request_id}).status == 410, (
        "a late repetition is not drawn"
    )


def test_batch_takes_the_events_that_fit(wire: Wire) -> None:
    sampler = sampler_of(wire)
    sent = [wire.post("asample", sample_json(sampler, number))["request_id"] for number in range(5)]
    wire.result(wire.post("asample", sample_json(sampler, 99))["request_id"])
    head, payloads = carried(wire, asked(sampler, inline_bytes=1 << 20))
    size = head.completions[0].inline_size
    assert size is not None
    assert len(payloads) == 5
    seen: list[str] = []
    cursor, rounds = 0, 0
    while len(seen) < 5:
        head, payloads = carried(wire, asked(sampler, cursor, inline_bytes=2 * size + 1))
        assert len(payloads) <= 2
        assert len(payloads) == len(head.completions)
        seen, cursor, rounds = seen + list(payloads), head.cursor, rounds + 1
    assert sorted(seen) == sorted(sent)
    assert rounds == 3


def test_result_that_is_too_large_comes_alone_or_is_only_named(wire: Wire) -> None:
    sampler = sampler_of(wire)
    for number in range(2):
        wire.post("asample", sample_json(sampler, number))
    wire.result(wire.post("asample", sample_json(sampler, 99))["request_id"])
    head, _ = carried(wire, asked(sampler, inline_bytes=1 << 20))
    size = head.completions[0].inline_size
    assert size is not None
    head, payloads = carried(wire, asked(sampler, inline_bytes=size // 8 + 1))
    assert len(payloads) == 1, "alone it may be eight times as large"
    assert head.cursor == 1
    head, payloads = carried(wire, asked(sampler, inline_bytes=size // 8 - 1))
    assert payloads == {}
    assert [completion.inline_size for completion in head.completions] == [None, None]
    assert head.cursor == 2
    request_id = head.completions[0].request_id
    wire.post("retrieve_futures", asked(sampler, 2, timeout=0))
    head, payloads = carried(wire, asked(sampler, 2, inline_bytes=0, timeout=0))
    assert (head.completions, payloads) == ([], {})
    assert wire.send("retrieve_future", {"request_id": request_id}).status == 200, (
        "it was only named the last time"
    )


def test_results_beyond_the_loops_share_are_encoded_in_a_thread(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    watch_encoder(monkeypatch, lambda: threads.add(threading.current_thread().name))
    wire = serve()
    sampler = sampler_of(wire)
    wire.post("asample", sample_json(sampler, 0, sampling_params={"max_tokens": 3}, num_samples=2))
    carried(wire, asked(sampler, inline_bytes=1 << 20))
    small = set(threads)
    threads.clear()
    wire.post(
        "asample", sample_json(sampler, 1, sampling_params={"max_tokens": 20}, num_samples=1000)
    )
    head, payloads = carried(wire, asked(sampler, 1, inline_bytes=1 << 20))
    assert len(payloads) == len(head.completions) == 1
    assert not any(name.startswith("asyncio_") for name in small)
    assert all(name.startswith("asyncio_") for name in threads)
    threads.clear()
    [request_id] = payloads
    wire.send("retrieve_future", {"request_id": request_id}, headers={"Accept": codec.PROTOBUF})
    assert threads
    assert all(name.startswith("asyncio_") for name in threads)


# ── nothing is left ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Inside:
    """An application without a socket, and everything it knows."""

    app: Any
    state: Any

    async def send(self, path: str, body: Any) -> tuple[int, bytes]:
        messages: list[Any] = []
        pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
        }
        scope |= {"path": f"/api/v1/{path}", "raw_path": b"", "query_string": b"", "headers": []}

        async def receive() -> Any:
            return pending.pop() if pending else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])

    async def post(self, path: str, body: Any) -> Any:
        status, data = await self.send(path, body)
        assert status == 200, data
        return json.loads(data)

    async def sampler(self) -> tuple[str, str]:
        session = (await self.post("create_session", {"tags": []}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
        return session, (await self.post("create_sampling_session", body))["sampling_session_id"]


def inside(
    engine: FakeEngine,
    data_dir: Path,
    body: Callable[[Inside], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run a test against an application whose state can be looked into."""
    made: list[Any] = []

    class Seen(State):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("tinkex.server.app.State", Seen)

    async def run() -> None:
        app = create_app(engine, data_dir, limits=Limits(poll_seconds=15))
        async with app.router.lifespan_context(app):
            await body(Inside(app, made[0]))

    asyncio.run(run())


def sizes(state: Any, engine: FakeEngine) -> dict[str, int]:
    """Return the number of objects in each part of a server."""
    (worker,), promises = state.workers, state.promises
    return {
        "promises": len(promises),
        "tasks": len(promises._tasks),
        "logged": sum(len(log) for log in promises._logs.values()),
        "logs": len(promises._logs),
        "samples": len(worker.samples),
        "cancelled": len(worker.samples.cancelled),
        "jobs": len(engine._jobs),
        "loading": len(state.samplers.loaded),
    }


def test_two_thousand_samples_leave_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    async def body(server: Inside) -> None:
        session, sampler = await server.sampler()
        cursor, seen, most = 0, 0, 0
        for start in range(0, 2000, 100):
            params = {"max_tokens": 1, "seed": 1}
            await asyncio.gather(
                *(
                    server.post("asample", sample_json(sampler, number, sampling_params=params))
                    for number in range(start, start + 100)
                )
            )
            while seen < start + 100:
                _, data = await server.send(
                    "retrieve_futures", asked(sampler, cursor, inline_bytes=4000)
                )
                head, payloads = codec.decode_batch(data)
                cursor, seen = head.cursor, seen + len(payloads)
            most = max(most, len(server.state.promises))
        assert (seen, cursor) == (2000, 2000)
        assert most <= 200
        await server.send("retrieve_futures", asked(sampler, cursor, inline_bytes=0, timeout=0))
        expected = dict.fromkeys(sizes(server.state, engine), 0) | {"logs": 1, "loading": 1}
        assert sizes(server.state, engine) == expected
        finish = {"reason": {"type": "success"}, "detail": None}
        await server.post(f"sessions/{session}/finish", finish)
        assert sizes(server.state, engine) == expected | {"logs": 0}

    inside(engine, tmp_path, body, monkeypatch)


def test_samples_fetched_one_by_one_make_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    async def body(server: Inside) -> None:
        _, sampler = await server.sampler()
        for number in range(50):
            receipt = await server.post("asample", sample_json(sampler, number))
            await server.post("retrieve_future", {"request_id": receipt["request_id"]})
        expected = {**dict.fromkeys(sizes(server.state, engine), 0), "promises": 50, "loading": 1}
        async with asyncio.timeout(20):
            while sizes(server.state, engine) != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        now = time.monotonic()
        server.state.promises._clock = lambda: now + KEEP_READ + 1
        server.state.promises.sweep()
        assert len(server.state.promises) == 0

    inside(engine, tmp_path, body, monkeypatch)


@dataclass
class Clock:
    now: float = 1000.0
    promises: Promises = field(init=False)

    def __post_init__(self) -> None:
        self.promises = Promises(clock=lambda: self.now)

    def pass_by(self, seconds: float, sessions: set[str]) -> None:
        self.now += seconds
        self.promises.sweep()
        self.promises.sweep_logs(sessions)


def test_logs_end_with_their_sessions_and_results_with_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        clock = Clock()
        monkeypatch.setattr("tinkex.server.runs.promises.time.monotonic", lambda: clock.now)
        promises = clock.promises
        used, idle = ("s:sample:0", 0), ("s:sample:0", 1)
        for target in (used, idle):
            promises.open_log(target, "s")
        log = promises.log(used)
        assert isinstance(log, Log)
        sent, named = (promises.add(name, b"", "s", used) for name in ("sent", "named"))
        sent.settle(1)
        sent.is_sent = True
        named.settle(2)
        assert len(log) == 2
        promises.acknowledge(log, 2)
        assert promises.get("sent") is None
        assert promises.is_gone("sent")
        assert promises.get("named") is named
        clock.pass_by(KEEP_READ - 1, {"s"})
        assert promises.get("named") is named
        clock.pass_by(2, {"s"})
        assert promises.is_gone("named"), "it was acknowledged, and nobody came for it"
        assert promises.log(idle) is None, "there was never anything in it"
        assert promises.log(used) is log, "an idle client goes on from its cursor"
        clock.pass_by(1, set())
        assert promises.log(used) is None
        assert log.is_closed

    asyncio.run(run())


def test_result_that_expires_leaves_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = Clock()
        monkeypatch.setattr("tinkex.server.runs.promises.time.monotonic", lambda: clock.now)
        clock.promises.open_log(("x", 0), "s")
        promise = clock.promises.add("x:0", b"", "s", ("x", 0))
        promise.settle(1)
        promise.touch()
        clock.pass_by(KEEP_READ + 1, {"s"})
        log = clock.promises.log(("x", 0))
        assert log is not None
        assert log.after(0) == []
        assert log.cursor == 1

    asyncio.run(run())


@pytest.mark.covers("U44")
def test_results_that_a_client_reports_as_fetched_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(server: Inside) -> None:
        promises = server.state.promises
        (_, sampler), (_, other) = await server.sampler(), await server.sampler()
        mine = (await server.post("asample", sample_json(sampler, 0)))["request_id"]
        foreign = (await server.post("asample", sample_json(other, 0)))["request_id"]
        await promises.get(mine).done.wait()
        await promises.get(foreign).done.wait()
        cursor = (await server.post("retrieve_futures", asked(sampler)))["cursor"]
        assert not promises.get(mine).read
        reported = [mine, foreign, "nothing"]
        answer = await server.post(
            "retrieve_futures", asked(sampler, cursor, timeout=0, retrieved_request_ids=reported)
        )
        assert answer == {"completions": [], "cursor": cursor}
        assert promises.get(mine) is None
        assert promises.is_gone(mine)
        assert not promises.get(foreign).read

    inside(FakeEngine(), tmp_path, body, monkeypatch)


@pytest.mark.covers("U44")
def test_poll_with_timeout_0_is_answered_at_once(wire: Wire) -> None:
    sampler = sampler_of(wire)
    began = time.monotonic()
    assert wire.post("retrieve_futures", asked(sampler, timeout=0.0)) == {
        "completions": [],
        "cursor": 0,
    }
    name = wire.post("asample", sample_json(sampler, 0))["request_id"]
    assert ids_of(wire.post("retrieve_futures", asked(sampler))) == [name]
    again = wire.post("retrieve_futures", asked(sampler, timeout=0.0))
    assert (ids_of(again), again["cursor"]) == ([name], 1)
    assert wire.post("retrieve_futures", asked(sampler, 1, timeout=0.0)) == {
        "completions": [],
        "cursor": 1,
    }
    assert time.monotonic() - began < 10  # others are held for 15 s


@pytest.mark.covers("U44")
def test_results_that_are_never_reported_are_freed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By age: soon after they were read, after a day otherwise; and with their session."""

    async def body(server: Inside) -> None:
        promises = server.state.promises
        session, sampler = await server.sampler()
        names = [
            (await server.post("asample", sample_json(sampler, number)))["request_id"]
            for number in range(3)
        ]
        for name in names:
            await promises.get(name).done.wait()
        await server.post("retrieve_futures", asked(sampler))
        await server.post("retrieve_future", {"request_id": names[0]})
        promises.sweep()
        assert len(promises) == 3
        now = promises._clock
        promises._clock = lambda: now() + KEEP_READ + 1
        promises.sweep()
        assert [promises.get(name) is not None for name in names] == [False, True, True]
        promises._clock = lambda: now() + 25 * 3600
        promises.sweep()
        assert len(promises) == 0
        last = (await server.post("asample", sample_json(sampler, 3)))["request_id"]
        await promises.get(last).done.wait()
        server.state.sessions.end(session)
        assert len(promises) == 0

    inside(FakeEngine(), tmp_path, body, monkeypatch)


# ── cancelling ────────────────────────────────────────────────────────────────────────────────────


def test_running_sample_can_be_cancelled(serve: Callable[..., Wire]) -> None:
    engine = FakeEngine(step_delay=0.01)
    wire = serve(engine)
    sampler = sampler_of(wire)
    body = sample_json(sampler, 0, sampling_params={"max_tokens": 5000})
    request_id = wire.post("asample", body)["request_id"]
    while not engine.sampling():
        time.sleep(0.005)
    assert wire.post("cancel_future", {"request_id": request_id}) == {}
    assert wire.result(request_id) == {"error": "the request was cancelled", "category": "user"}
    wait_until(lambda: not engine.sampling())
    # it has been read
    assert ids_of(wire.post("retrieve_futures", asked(sampler, 0, timeout=0))) == []
    assert wire.post("asample", body)["request_id"] == request_id
    assert "cancelled" in wire.result(request_id)["error"]
    assert not engine.sampling()


def test_queued_sample_can_be_cancelled_and_never_starts(serve: Callable[..., Wire]) -> None:
    gate = Gate("optim_step")
    wire = serve(FakeEngine(fail=gate))
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    step = wire.post("optim_step", step_json(model, 1))["request_id"]
    first, second = (
        wire.post("asample", sample_json(sampler, number))["request_id"] for number in range(2)
    )
    wire.post("cancel_future", {"request_id": first})
    assert "cancelled" in wire.result(first)["error"]
    assert [
        c["state"] for c in wire.post("retrieve_futures", asked(sampler, timeout=0))["completions"]
    ] == []
    gate.opened.set()
    assert "sequences" in wire.result(second)
    assert "metrics" in wire.result(step)
    assert [subject for method, subject in gate.calls if method == "sample_start"] == [second]


def test_cancelling_ended_or_unknown_futures_has_no_effect(wire: Wire) -> None:
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0))["request_id"]
    result = wire.result(request_id)
    assert wire.post("cancel_future", {"request_id": request_id}) == {}
    assert wire.result(request_id) == result
    assert wire.post("cancel_future", {"request_id": "nobody:sample:0:1"}) == {}


def test_place_in_the_order_of_a_run_cannot_be_cancelled(wire: Wire) -> None:
    model = wire.model()
    second = wire.post("optim_step", step_json(model, 2))["request_id"]
    assert wire.post("cancel_future", {"request_id": second}) == {}
    wire.post("optim_step", step_json(model, 1))
    assert "metrics" in wire.result(second)


def test_cancel_does_not_wait_for_the_queue() -> None:
    async def run() -> None:
        engine = FakeEngine(step_delay=0.01)
        engine.load_sampler("s", "fake", None)
        worker = Worker(engine)
        worker.start()
        try:
            request = SampleRequest(
                prompt=ModelInput.from_ints([1]),
                num_samples=1,
                sampling_params=SamplingParams(max_tokens=10_000),
            )
            sample = worker.samples.draw(SampleJob("job", "s", request, 0))
            while not engine.sampling():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            turns = threading.Semaphore(0)
            queued = [worker.run(lambda: turns.acquire(timeout=20)) for _ in range(50)]
            worker.samples.cancel("job")
            turns.release(9)  # so many of them can be done before the sample has ended
            with pytest.raises(EngineError, match="cancelled"):
                await asyncio.wait_for(sample, 20)
            assert sum(future.done() for future in queued) < 10
            assert not engine.sampling()
            turns.release(50)
            await asyncio.gather(*queued)
            await worker.run(int)
            assert worker.samples.cancelled == set()
            worker.samples.cancel("job")  # long gone
            await worker.run(int)
            assert worker.samples.cancelled == set()
        finally:
            await worker.stop()

    asyncio.run(run())


# ── joining and unloading ─────────────────────────────────────────────────────────────────────────


def test_clients_of_a_sampler_are_numbered_and_no_number_comes_twice(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        sampler, other = sampler_of(wire, session), sampler_of(wire)
        joined = [
            wire.post("join_sampling_session", {"sampling_session_id": sampler}) for _ in range(3)
        ]
        assert [answer["client_counter"] for answer in joined] == [1, 2, 3]
        assert (
            wire.post("join_sampling_session", {"sampling_session_id": other})["client_counter"]
            == 1
        )
        assert sampler_of(wire, session) == sampler, "the same sampler again is no new one"
        assert (
            wire.post("join_sampling_session", {"sampling_session_id": sampler})["client_counter"]
            == 4
        )
        assert wire.send("join_sampling_session", {"sampling_session_id": "nobody"}).status == 404
    with serving(FakeEngine(), tmp_path) as url:
        assert (
            Wire(url).post("join_sampling_session", {"sampling_session_id": sampler})[
                "client_counter"
            ]
            == 5
        )


def test_unload_runs_after_earlier_calls(serve: Callable[..., Wire]) -> None:
    gate = Gate("optim_step")
    engine = FakeEngine(fail=gate)
    wire = serve(engine)
    model = wire.model()
    wire.post("forward_backward", pass_json(model, 1))
    step = wire.post("optim_step", step_json(model, 2))["request_id"]
    unload = wire.post("unload_model", {"model_id": model, "type": "unload_model"})["request_id"]
    refused = wire.send("optim_step", step_json(model, 3))
    assert refused.status == 410
    assert "create_training_client_from_state" in refused.json["detail"]
    assert wire.post("optim_step", step_json(model, 2))["request_id"] == step, (
        "the same request again is no news"
    )
    gate.opened.set()
    assert wire.result(unload) == {"model_id": model, "type": "unload_model"}
    assert "metrics" in wire.result(step)
    assert engine._adapters == {}
    for number in (3, 4, None):
        refused = wire.send("optim_step", step_json(model, number))
        assert refused.status == 410
        assert "create_training_client_from_state" in refused.json["detail"]
    assert wire.run("unload_model", {"model_id": model}) == {
        "model_id": model,
        "type": "unload_model",
    }
    assert wire.send("unload_model", {"model_id": "nobody:train:0"}).status == 404
    assert wire.post("get_info", {"model_id": model})["lora_rank"] == 4


def test_chunk_that_comes_late_is_carried_out_before_the_run_is_unloaded(wire: Wire) -> None:
    model = wire.model()
    second = wire.post("optim_step", step_json(model, 2))["request_id"]
    unload = wire.post("unload_model", {"model_id": model})["request_id"]
    first = wire.post("forward_backward", pass_json(model, 1))["request_id"]
    assert "loss:sum" in wire.result(first)["metrics"]
    assert wire.result(second)["metrics"]["grad_norm:mean"] > 0
    assert wire.result(unload)["model_id"] == model


def test_number_that_never_comes_does_not_keep_a_run_loaded(serve: Callable[..., Wire]) -> None:
    engine = FakeEngine()
    wire = serve(engine, Limits(gap_seconds=0.3))
    model = wire.model()
    second = wire.post("optim_step", step_json(model, 2))["request_id"]
    unload = wire.post("unload_model", {"model_id": model})["request_id"]
    assert "never arrived" in wire.result(second)["error"]
    assert wire.result(unload) == {"model_id": model, "type": "unload_model"}
    assert engine._adapters == {}
    assert wire.send("optim_step", step_json(model, 4)).status == 410


def test_run_of_an_earlier_life_counts_as_unloaded(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        model = Wire(url).model()
    with serving(FakeEngine(), tmp_path) as url:
        assert Wire(url).run("unload_model", {"model_id": model}) == {
            "model_id": model,
            "type": "unload_model",
        }


# ── results that are announced ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("accept", [codec.PROTOBUF, codec.JSON])
def test_large_result_is_announced_to_clients_that_support_it(
    serve: Callable[..., Wire], accept: str
) -> None:
    wire = serve(limits=Limits(announced_bytes=400))
    model = wire.model()
    request_id = wire.post("forward_backward", pass_json(model, 1, tokens=tuple(range(200))))[
        "request_id"
    ]
    headers = {"Accept": accept}
    asked_for = {"request_id": request_id, "allow_metadata_only": True}
    announced = wire.send("retrieve_future", asked_for, headers=headers)
    assert announced.headers["content-type"] == codec.JSON
    assert announced.json.keys() == {"status", "response_payload_size"}
    assert announced.json["status"] == "complete_metadata"
    whole = wire.send(
        "retrieve_future", asked_for | {"allow_metadata_only": False}, headers=headers
    )
    assert whole.headers["content-type"] == accept
    assert len(whole.body) == announced.json["response_payload_size"] > 400
    other = {"Accept": codec.JSON if accept == codec.PROTOBUF else codec.PROTOBUF}
    wire.send("retrieve_future", asked_for, headers=headers)
    assert (
        wire.send("retrieve_future", {"request_id": request_id}, headers=other).headers[
            "content-type"
        ]
        != accept
    )
    small = wire.post("optim_step", step_json(model, 2))["request_id"]
    assert "metrics" in wire.post(
        "retrieve_future", {"request_id": small, "allow_metadata_only": True}
    )


def test_announced_result_is_encoded_once(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = list[float]()
    watch_encoder(monkeypatch, lambda: times.append(time.monotonic()))
    wire = serve(limits=Limits(poll_seconds=15, announced_bytes=10))
    sampler = sampler_of(wire)
    request_id = wire.post("asample", sample_json(sampler, 0))["request_id"]
    headers = {"Accept": codec.PROTOBUF}
    wire.post("retrieve_futures", asked(sampler))
    wire.send(
        "retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, headers=headers
    )
    heard = wire.send("retrieve_future", {"request_id": request_id}, headers=headers)
    assert len(times) == 1
    assert (
        wire.send("retrieve_future", {"request_id": request_id}, headers=headers).body == heard.body
    )
    assert len(times) == 2, "once fetched, the bytes are not kept"
    for is_announced in (True, False):
        fields = {"request_id": request_id, "allow_metadata_only": is_announced}
        heard = wire.send("retrieve_future", fields, headers=headers)
    assert len(codec.decode(SampleResponse, heard.body, codec.PROTOBUF).sequences) == 1
    assert len(times) == 3


def test_capabilities_reach_the_clients(wire: Wire) -> None:
    config = wire.post("client/config", {"sdk_version": "0.36.0"})
    assert config["batched_results"] is True
    assert config["sample_use_retrieve_futures"] is False
    assert config["sample_join_sampling_session"] is True
    assert config["create_model_via_load_weights"] is True
    assert config["custom_loss_server_side"] is True
    assert (
        wire.post("client/dynamic_config", {"sdk_version": "0.36.0"})["sample_cancel_enabled"]
        is True
    )


OFFICIAL = """
import pickle, time, tinker
prompt = tinker.types.ModelInput.from_ints([1, 2, 3])
params = tinker.types.SamplingParams(max_tokens=3, seed=1)
with tinker.ServiceClient() as service:
    sampler = service.create_sampling_client(base_model="fake").result()
    futures = [
        sampler.sample(prompt=prompt, num_samples=2, sampling_params=params) for _ in range(40)
    ]
    results = [future.result(30) for future in futures]
    assert all(len(result.sequences) == 2 for result in results)
    copy = pickle.loads(pickle.dumps(sampler))
    for result in (
        copy.sample(prompt=prompt, num_samples=2, sampling_params=params).result(30)
        for _ in range(3)
    ):
        assert [s.tokens for s in result.sequences] == [s.tokens for s in results[0].sequences]
    try:
        sampler.sample(tinker.types.ModelInput.from_ints([1] * 65), 1, params).result(30)
    except tinker.RequestFailedError as error:
        assert "65" in str(error)
    else:
        raise AssertionError("a prompt beyond the window was sampled from")
    endless = sampler.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=10**6))
    time.sleep(0.5)
    endless.cancel()
    time.sleep(1.5)
print("done with", tinker.__version__)
"""


@pytest.mark.slow  # it does so only when a server asks it to, and ours does not
@pytest.mark.covers("U44")
def test_official_client_can_poll_in_batches_and_join_and_cancel(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def client_config(state: Any, call: Any) -> Any:
        answer = await HANDLERS_CONFIG(state, call)
        return answer.model_copy(update={"sample_use_retrieve_futures": True})

    clones, cancelled = set[int](), list[str]()
    real_poll, real_cancel = future_calls.retrieve_futures, future_calls.cancel_future

    freed, unheld = set[str](), list[float]()

    async def poll(state: Any, call: Any) -> Any:
        request = call.request
        clones.add(request.target.cloned_sampler_id)
        began = time.monotonic()
        answer = await real_poll(state, call)
        if request.timeout == 0:
            unheld.append(time.monotonic() - began)
        freed.update(
            name for name in request.retrieved_request_ids if state.promises.get(name) is None
        )
        return answer

    async def cancel_future(state: Any, call: Any) -> Any:
        cancelled.append(call.request.request_id)
        return await real_cancel(state, call)

    monkeypatch.setitem(HANDLERS, "cancel_future", cancel_future)
    monkeypatch.setitem(HANDLERS, "client_config", client_config)
    monkeypatch.setitem(HANDLERS, "retrieve_futures", poll)
    wire = serve(FakeEngine(step_delay=0.001), Limits(poll_seconds=5))
    environment = {
        **os.environ,
        "TINKER_BASE_URL": wire.url,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", OFFICIAL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "done with" in run.stdout
    assert clones == {0, 1}, "the copy joined and polls for itself"
    assert len(cancelled) == 1
    assert len(freed) >= 44  # all that it fetched
    assert unheld
    assert min(unheld) < 0.5
