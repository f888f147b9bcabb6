"""Streams of samples: tokens go out as they are drawn, are those of the result, and end with
whoever asked for them."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support import MODEL, Wire, let_pass, sample_json, serving, wait_until
from tinkex.engine.api import EngineError, SampleJob
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.server_limits import Limits
from tinkex.types.sampling import SampleStreamChunk


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Wire]]:
    """Starts servers on the test's data directory."""
    with ExitStack() as stack:
        yield lambda engine, **options: Wire(
            stack.enter_context(serving(engine, tmp_path, **options))
        )


def sampler_of(wire: Wire, base_model: str = "fake", session: str | None = None) -> str:
    body = {
        "session_id": session or wire.session(),
        "sampling_session_seq_id": 0,
        "base_model": base_model,
    }
    return str(wire.post("create_sampling_session", body)["sampling_session_id"])


def asking(sampler: str, tokens: int = 3, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": tokens, "seed": 1} | fields.pop("params", {})
    return sample_json(sampler, sampling_params=params, **fields)


class Reader:
    """Reads a stream's events as they come."""

    def __init__(self, wire: Wire, body: Any) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(wire.url).netloc, timeout=20)
        self.connection.request("POST", "/api/v1/stream_sample", json.dumps(body))
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.getheader("content-type") == "text/event-stream"

    def __iter__(self) -> Iterator[str]:
        """Each event's text."""
        lines: list[str] = []
        while line := self.response.readline().decode():
            if line == "\n":
                yield "\n".join(lines)
                lines = []
            else:
                lines.append(line.rstrip("\n"))
        assert lines == []


def events_of(text: list[str]) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end as streams do."""
    assert text[-1] == "data: [DONE]"
    return [
        json.loads(item.rpartition("data: ")[2]) for item in text[:-1] if not item.startswith(":")
    ]


def read_all(wire: Wire, body: Any) -> list[dict[str, Any]]:
    reader = Reader(wire, body)
    with closing(reader.connection):
        return events_of(list(reader))


def assert_same_as_result(events: list[dict[str, Any]], sequences: list[dict[str, Any]]) -> None:
    """The streamed tokens and ends must be the sequences of the result."""
    for index, sequence in enumerate(sequences):
        mine = [event for event in events if event["index"] == index]
        *tokens, end = mine
        assert [event["token_id"] for event in tokens] == sequence["tokens"]
        assert [event["logprob"] for event in tokens] == pytest.approx(
            sequence["logprobs"], abs=1e-5
        )
        assert all(event["event_type"] == "token" and event["token"] is None for event in tokens)
        expected = {
            "finish_reason": sequence["stop_reason"],
            "total_tokens": len(tokens),
            "event_type": "done",
        }
        assert end == {"index": index, **expected}
        assert events[events.index(end) - 1] is tokens[-1], (
            "a sample's end is told with its last token"
        )


# ── as they are drawn ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C76", "D07")
def test_tokens_reach_a_socket_before_the_last_one_is_computed(serve: Callable[..., Wire]) -> None:
    steps = Steps()
    wire = serve(FakeEngine(fail=steps))
    steps.allowed.release()  # a stream begins with its first token
    reader = Reader(wire, asking(sampler_of(wire), 10))
    with closing(reader.connection):
        stream = iter(reader)
        text = [next(stream)]
        for _ in range(9):  # the next one is computed when this one is here
            steps.allowed.release()
            text.append(next(stream))
        text += stream
    assert len(events_of(text)) == 11


class Steps:
    """Holds the engine up before each step of sampling until that is allowed."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)

    def __call__(self, method: str, _: str) -> None:
        if method == "sample_step":
            assert self.allowed.acquire(timeout=20)


class AsgiCall:
    """One request to the application itself; notes each message."""

    def __init__(self, path: str, body: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
        }
        self.scope |= {
            "path": f"/api/v1/{path}",
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        self._body: bytes | None = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.first_token = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if b"token_id" in message.get("body", b""):
            self.first_token.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@dataclass
class Inside:
    """An application without a socket."""

    app: Any

    async def post(self, path: str, body: Any) -> Any:
        call = AsgiCall(path, body)
        await self.app(call.scope, call.receive, call.send)
        return json.loads(call.body)

    async def sampler(self) -> str:
        session = (await self.post("create_session", {"tags": []}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
        return str((await self.post("create_sampling_session", body))["sampling_session_id"])


def inside(engine: FakeEngine, data_dir: Path, body: Callable[[Inside], Any]) -> None:
    async def run() -> None:
        app = create_app(engine, data_dir)
        async with app.router.lifespan_context(app):
            await body(Inside(app))

    asyncio.run(run())


def test_tokens_come_one_by_one_in_process(tmp_path: Path) -> None:
    async def body(server: Inside) -> None:
        call = AsgiCall("stream_sample", asking(await server.sampler(), 6))
        running = asyncio.create_task(server.app(call.scope, call.receive, call.send))
        for count in range(1, 7):  # the next one is computed when this one has come
            steps.allowed.release()
            async with asyncio.timeout(20):
                while call.body.count(b"token_id") < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        await running
        kinds = [message["type"] for message in call.messages]
        assert kinds[0] == "http.response.start"
        assert set(kinds[1:]) == {"http.response.body"}
        assert [message["more_body"] for message in call.messages[1:]] == [True] * (
            len(kinds) - 2
        ) + [False]
        assert (
            len([message for message in call.messages if b"token_id" in message.get("body", b"")])
            == 6
        )

    steps = Steps()
    inside(FakeEngine(fail=steps), tmp_path, body)


# ── the same tokens ───────────────────────────────────────────────────────────────────────────────


def test_streams_of_several_samples_are_interleaved(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    sampler = sampler_of(wire)
    body = asking(sampler, 5, num_samples=3)
    events = read_all(wire, body)
    assert_same_as_result(events, wire.run("asample", body)["sequences"])
    assert [event["index"] for event in events if event["event_type"] == "token"] == [0, 1, 2] * 5


def test_events_read_as_chunks(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    chunks = [
        SampleStreamChunk.from_map(event) for event in read_all(wire, asking(sampler_of(wire), 2))
    ]
    assert [chunk.event_type for chunk in chunks] == ["token", "token", "done"]
    assert chunks[2].total_tokens == 2
    assert [chunk.is_done for chunk in chunks] == [False, False, True]


def test_sample_of_no_tokens_only_ends(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    (end,) = read_all(wire, asking(sampler_of(wire), 0))
    assert end == {"index": 0, "finish_reason": "length", "total_tokens": 0, "event_type": "done"}


@pytest.mark.parametrize(
    "stop",
    [None, [], "border", "nowhere to be found", "token"],
    ids=["eos", "never", "border", "absent", "token"],
)
def test_streams_of_the_real_engine_are_its_results(
    server_url: str, model_dir: Path, stop: Any
) -> None:
    """Stop strings across the borders of tokens too: the stopping token is part of a sample, so
    nothing is cut."""
    from tokenizers import Tokenizer

    wire = Wire(server_url)
    sampler = sampler_of(wire, MODEL)
    plain = wire.run("asample", asking(sampler, 40, params={"stop": []}, num_samples=3))[
        "sequences"
    ]
    tokens = plain[1]["tokens"]
    if stop == "token":
        stop = [tokens[11]]
    elif stop == "border":
        stop = across_a_border(Tokenizer.from_file(str(model_dir / "tokenizer.json")), tokens)
    body = asking(sampler, 40, params={"stop": stop}, num_samples=3, seq_id=1)
    result = wire.run("asample", body)["sequences"]
    assert_same_as_result(read_all(wire, body), result)
    if stop is not None:
        assert (result[1]["stop_reason"] == "stop") == (stop not in ([], "nowhere to be found"))


def across_a_border(tokenizer: Any, tokens: list[int]) -> str:
    """The last character of one token and the first of the next, somewhere inside a sample."""
    for end in range(8, len(tokens)):
        before, both = (
            tokenizer.decode(tokens[:stop], skip_special_tokens=False) for stop in (end, end + 1)
        )
        pair: str = both[len(before) - 1 : len(before) + 1]
        if both.startswith(before) and len(pair) == 2 and pair.isascii() and pair not in before:
            return pair
    raise AssertionError("all borders lie inside characters")


def test_only_streams_have_their_tokens_gathered(serve: Callable[..., Wire]) -> None:
    listeners: list[Any] = []

    class Spy(FakeEngine):
        def sample_start(self, work: SampleJob) -> None:
            listeners.append(work.listener)
            super().sample_start(work)

    wire = serve(Spy())
    sampler = sampler_of(wire)
    wire.run("asample", asking(sampler))
    read_all(wire, asking(sampler))
    assert [listener is None for listener in listeners] == [True, False]


def test_number_is_not_used_up_by_a_stream(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    sampler = sampler_of(wire)
    first = read_all(wire, asking(sampler, seq_id=4))
    assert read_all(wire, asking(sampler, seq_id=4)) == first
    assert "sequences" in wire.run("asample", asking(sampler, 9, seq_id=4))


# ── refusals and failures ─────────────────────────────────────────────────────────────────────────


def test_invalid_arguments_are_refused_before_a_stream(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    sampler = sampler_of(wire)
    for body in (
        asking(sampler, num_samples=0),
        asking("nobody:sample:0"),
        asking(sampler, params={"temperature": -1}),
        asking(sampler, prompt=5),
        b"{",
    ):
        heard, reference = wire.send("stream_sample", body), wire.send("asample", body)
        assert heard.status == reference.status >= 400
        assert heard.headers["content-type"] == "application/json"
        assert heard.json["detail"].split(":")[-1] == reference.json["detail"].split(":")[-1]


def test_prompt_beyond_the_window_is_an_error_in_the_stream(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine())
    body = asking(
        sampler_of(wire), prompt={"chunks": [{"tokens": [1] * 65, "type": "encoded_text"}]}
    )
    reader = Reader(wire, body)
    with closing(reader.connection):
        error, end = list(reader)
    assert error.startswith("event: error\ndata: ")
    fields = json.loads(error.partition("data: ")[2])
    assert fields.pop("error").startswith("prompt: 65 tokens")
    assert fields == {"category": "user", "event_type": "error"}
    assert end == "data: [DONE]"
    assert (
        SampleStreamChunk.from_map(json.loads(error.partition("data: ")[2])).event_type == "error"
    )


@pytest.mark.parametrize(
    ("failure", "category"),
    [(EngineError("ran out"), "user"), (RuntimeError("ran out"), "server")],
    ids=str,
)
def test_failure_on_the_way_comes_after_the_tokens_before_it(
    serve: Callable[..., Wire], failure: Exception, category: str
) -> None:
    steps = iter(range(100))

    def fail(method: str, subject: str) -> None:
        if method == "sample_step" and next(steps) == 4:
            raise failure

    wire = serve(FakeEngine(fail=fail))
    *tokens, error = read_all(wire, asking(sampler_of(wire), 10))
    assert [event["event_type"] for event in tokens] == ["token"] * 4
    assert "ran out" in error["error"]
    assert error["category"] == category


def test_end_of_its_session_ends_a_stream(serve: Callable[..., Wire]) -> None:
    engine = FakeEngine(step_delay=0.02)
    wire = serve(engine)
    session = wire.session()
    reader = Reader(wire, asking(sampler_of(wire, session=session), 2000))
    with closing(reader.connection):
        text = iter(reader)
        first = next(text)
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        events = events_of([first, *text])
    assert "session has ended" in events[-1]["error"]
    assert 1 < len(events) < 1500
    assert not engine.sampling()


# ── going away, and waiting ───────────────────────────────────────────────────────────────────────


def test_client_that_goes_away_frees_the_engine_at_once(serve: Callable[..., Wire]) -> None:
    engine = FakeEngine(step_delay=0.02)
    wire = serve(engine)
    sampler = sampler_of(wire)
    reader = Reader(wire, asking(sampler, 5000))
    assert "token_id" in next(iter(reader))
    other = wire.post("asample", asking(sampler, 30))["request_id"]
    assert engine.sampling()
    reader.response.close()
    reader.connection.close()
    wait_until(lambda: not any(":stream:" in job for job in engine._jobs))
    assert len(wire.result(other)["sequences"][0]["tokens"]) == 30
    assert not engine.sampling()


def test_caller_inside_the_process_that_goes_away_frees_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(step_delay=0.01)

    async def body(server: Inside) -> None:
        sampler = await server.sampler()
        for leave in ("disconnects", "is cancelled"):
            call = AsgiCall("stream_sample", asking(sampler, 5000))
            running = asyncio.create_task(server.app(call.scope, call.receive, call.send))
            await call.first_token.wait()
            if leave == "disconnects":
                call.gone.set()
                await running
            else:
                running.cancel()
                await asyncio.wait({running})
            assert not call.body.endswith(b"[DONE]\n\n")
            async with asyncio.timeout(20):
                while engine.sampling():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    inside(engine, tmp_path, body)


def test_stream_closed_before_its_turn_never_starts(serve: Callable[..., Wire]) -> None:
    gate, started = threading.Event(), list[str]()

    def fail(method: str, subject: str) -> None:
        if method == "create":
            assert gate.wait(20)
        if method == "sample_start":
            started.append(subject)

    wire = serve(FakeEngine(fail=fail))
    session = wire.session()
    wire.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "fake"})
    reader = Reader(wire, asking(sampler_of(wire, session=session), 5000))
    reader.response.close()
    reader.connection.close()
    let_pass(0.2)  # the server must have noticed
    gate.set()
    assert "sequences" in wire.run("asample", asking(sampler_of(wire, session=session)))
    assert len(started) == 1
    assert ":stream:" not in started[0]


def test_idle_stream_sends_keepalive_comments(serve: Callable[..., Wire]) -> None:
    gate = threading.Event()

    def fail(method: str, subject: str) -> None:
        if method == "sample_start":
            assert gate.wait(20)

    wire = serve(FakeEngine(fail=fail), limits=Limits(quiet_seconds=0.05))
    reader = Reader(wire, asking(sampler_of(wire), 2))
    with closing(reader.connection):
        text = iter(reader)
        assert [next(text), next(text)] == [": waiting", ": waiting"]
        gate.set()
        events = events_of(list(text))
    assert [event["event_type"] for event in events] == ["token", "token", "done"]


def test_stream_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    engine = FakeEngine(step_delay=0.02)
    with serving(engine, tmp_path) as url:
        wire = Wire(url)
        reader = Reader(wire, asking(sampler_of(wire), 100_000))
        assert "token_id" in next(iter(reader))
        began = time.monotonic()
    assert time.monotonic() - began < 9
    assert not engine.sampling()
    reader.response.close()
    reader.connection.close()
