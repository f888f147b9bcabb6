"""sample_stream: each token when it is drawn, in any thread and loop, as sample() would give it,
hung up at will."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import MODEL, serving, wait_until
from tinkex import (
    APIConnectionError,
    APITimeoutError,
    LocalBackend,
    ModelInput,
    RetryConfig,
    SamplingClient,
    SamplingParams,
    ServiceClient,
)
from tinkex.client.futures.streams import SampleStream
from tinkex.engine.fake import FakeEngine
from tinkex.errors import (
    APIResponseValidationError,
    InternalServerError,
    RateLimitError,
    RequestFailedError,
)
from tinkex.types.sampling import SampleStreamChunk

PROMPT = ModelInput.from_ints([5, 6, 7])


def gathered(chunks: list[SampleStreamChunk]) -> list[tuple[list[Any], list[Any], str | None]]:
    """Tokens, log-probabilities and the reason to stop of each sample."""
    found = []
    for index in sorted({chunk.index for chunk in chunks if chunk.index is not None}):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.is_done for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].total_tokens == len(mine) - 1
        drawn = mine[:-1]
        found.append(
            ([c.token_id for c in drawn], [c.logprob for c in drawn], mine[-1].finish_reason)
        )
    return found


# ── against our own server ────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C76", "D07", "24.sampling.10")
@pytest.mark.parametrize("count", [1, 3])
def test_stream_equals_sample(service: ServiceClient, count: int) -> None:
    """Of the real engine, over a socket and in process."""
    sampler = service.create_sampling_client(base_model=MODEL).result()
    params = SamplingParams(max_tokens=12, seed=11, temperature=0.8)
    expected = sampler.sample(PROMPT, count, params).result(20).sequences
    chunks = list(sampler.sample_stream(PROMPT, params, count))
    same: list[Any] = [(s.tokens, pytest.approx(s.logprobs), s.stop_reason) for s in expected]
    assert gathered(chunks) == same


def test_token_that_ends_a_sample_is_in_its_stream(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    free = (
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=8, seed=4))
        .result(20)
        .sequences[0]
        .tokens
    )
    params = SamplingParams(max_tokens=8, seed=4, stop=[free[3]])
    (tokens, _, reason), *_ = gathered(list(sampler.sample_stream(PROMPT, params)))
    assert reason == "stop"
    assert tokens == free[: free.index(free[3]) + 1]


class Gate:
    """An engine whose steps are let through one by one."""

    def __init__(self) -> None:
        self.engine = FakeEngine(fail=self)
        self._steps = threading.Semaphore(0)

    def __call__(self, method: str, subject: str) -> None:
        if method == "sample_step":
            assert self._steps.acquire(timeout=10)

    def step(self, count: int = 1) -> None:
        self._steps.release(count)


@pytest.fixture(params=["socket", "embedded"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[FakeEngine], SamplingClient]]:
    """Makes a sampler over a fake engine, both ways."""
    with ExitStack() as stack:

        def make(engine: FakeEngine) -> SamplingClient:
            if request.param == "socket":
                url = stack.enter_context(serving(engine, tmp_path))
            else:
                url = stack.enter_context(LocalBackend(engine=engine, data_dir=tmp_path)).base_url
            service = stack.enter_context(ServiceClient(base_url=url))
            return service.create_sampling_client(base_model="fake").result()

        yield make


@pytest.mark.covers("C76", "D07", "Q-24", "4.1/1")
def test_each_token_comes_before_the_next_is_drawn(start: Callable[..., SamplingClient]) -> None:
    gate = Gate()
    sampler = start(gate.engine)
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=4, seed=1))
    chunks = iter(stream)
    for _ in range(4):
        gate.step()
        chunk = next(chunks)
        assert chunk.token_id is not None
    assert next(chunks).is_done
    assert list(chunks) == []


def test_stream_longer_than_the_timeout_is_no_silence(
    start: Callable[..., SamplingClient],
) -> None:
    """The limit is on silence, not on the whole."""
    sampler = start(FakeEngine(step_delay=0.2))
    chunks = list(sampler.sample_stream(PROMPT, SamplingParams(max_tokens=7, seed=1), timeout=1.2))
    assert len(chunks) == 8


@pytest.mark.covers("4.1/1")
@pytest.mark.parametrize("how", ["close", "with", "async with"])
def test_hanging_up_frees_the_engine(start: Callable[..., SamplingClient], how: str) -> None:
    engine = FakeEngine(step_delay=0.005)
    sampler = start(engine)
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=100_000, seed=1))
    if how == "close":
        assert next(iter(stream)).token_id is not None
        stream.close()
    elif how == "with":
        with stream:
            assert next(iter(stream)).token_id is not None
    else:

        async def leave() -> None:
            async with stream:
                async for chunk in stream:
                    assert chunk.token_id is not None
                    return

        asyncio.run(leave())
    wait_until(lambda: not engine.sampling())
    assert all(not chunk.is_done for chunk in stream)  # what had come is still there, then it ends


def test_async_for_and_the_twin(start: Callable[..., SamplingClient]) -> None:
    sampler = start(FakeEngine())
    params = SamplingParams(max_tokens=5, seed=2)

    async def both() -> tuple[list[SampleStreamChunk], list[SampleStreamChunk]]:
        first = [chunk async for chunk in sampler.sample_stream(PROMPT, params)]
        return first, [chunk async for chunk in await sampler.sample_stream_async(PROMPT, params)]

    first, second = asyncio.run(both())
    assert first == second
    assert len(first) == 6


def test_another_thread_and_another_loop_may_read(start: Callable[..., SamplingClient]) -> None:
    sampler = start(FakeEngine(step_delay=0.002))
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=20, seed=2))
    found: list[SampleStreamChunk] = []

    async def few() -> None:
        async for chunk in stream:
            found.append(chunk)
            if len(found) == 5:
                return

    asyncio.run(few())
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    thread.join(10)
    (tokens, _, reason), *_ = gathered(found)
    assert (len(tokens), reason) == (20, "length")


def test_stream_allows_one_reader_at_a_time(start: Callable[..., SamplingClient]) -> None:
    gate = Gate()
    sampler = start(gate.engine)
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=1, seed=2))
    found: list[SampleStreamChunk] = []
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    wait_until(lambda: stream._reader is not None)
    with pytest.raises(RuntimeError, match="one reader at a time"):
        next(iter(stream))
    gate.step()
    thread.join(10)
    assert len(found) == 2


def test_reader_that_gives_up_makes_room_for_the_next(
    start: Callable[..., SamplingClient],
) -> None:
    gate = Gate()
    sampler = start(gate.engine)
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=1, seed=2))

    async def whole() -> list[SampleStreamChunk]:
        return [chunk async for chunk in stream]

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(whole(), 0.05))
    gate.step()
    assert len(asyncio.run(whole())) == 2


def test_stream_failure_raises_the_error_of_sample(
    start: Callable[..., SamplingClient],
) -> None:
    sampler = start(FakeEngine())
    stream = sampler.sample_stream(ModelInput.from_ints([1] * 65), SamplingParams(max_tokens=2))
    with pytest.raises(RequestFailedError, match="65 tokens do not fit") as caught:
        list(stream)
    assert caught.value.category.value == "user"
    with pytest.raises(RequestFailedError):
        list(stream)  # it stays that way


@pytest.mark.covers("24.sampling.10")
def test_closed_client_is_a_clear_error(
    start: Callable[..., SamplingClient], tmp_path: Path
) -> None:
    with LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "own") as backend:
        service = ServiceClient(base_url=backend.base_url)
        sampler = service.create_sampling_client(base_model="fake").result()
        service.close().result(10)
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            sampler.sample_stream(PROMPT, SamplingParams(max_tokens=2))
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


def token(number: int, index: int = 0) -> bytes:
    return (
        b"data: "
        + json.dumps({"token_id": number, "logprob": -0.5, "index": index}).encode()
        + b"\n\n"
    )


def done(total: int, index: int = 0) -> bytes:
    fields = {"finish_reason": "length", "total_tokens": total, "index": index}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


END = b"data: [DONE]\n\n"
STREAM = "text/event-stream"


def streamed(*parts: bytes, **options: Any) -> Answer:
    return Answer(body=b"".join(parts), content_type=STREAM, **options)


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
        yield server


@pytest.fixture
def sampler(faulty: FaultyServer) -> Iterator[SamplingClient]:
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        yield service.create_sampling_client(base_model="m").result()


def read(sampler: SamplingClient, count: int = 1, **options: Any) -> list[SampleStreamChunk]:
    return list(sampler.sample_stream(PROMPT, SamplingParams(max_tokens=3), count, **options))


@pytest.mark.covers("C76")
def test_stream_is_asked_for_in_one_request(faulty: FaultyServer, sampler: SamplingClient) -> None:
    faulty.script("stream_sample", streamed(token(1), token(2), done(2), END))
    assert [chunk.token_id for chunk in read(sampler)] == [1, 2, None]
    (seen,) = faulty.requests("stream_sample")
    assert seen.headers["accept"] == STREAM
    assert seen.json["seq_id"] == 0
    assert seen.json["num_samples"] == 1
    assert seen.json["sampling_session_id"] == "x"
    assert "seed" not in seen.json["sampling_params"]


@pytest.mark.covers("D07", "C76")
def test_compressed_stream_is_read(faulty: FaultyServer, sampler: SamplingClient) -> None:
    body = gzip.compress(token(1) + token(2) + done(2) + END)
    faulty.script(
        "stream_sample",
        Answer(body=body, content_type=STREAM, headers={"Content-Encoding": "gzip"}, pieces=4),
    )
    assert [chunk.token_id for chunk in read(sampler)] == [1, 2, None]


@pytest.mark.covers("C76")
def test_foreign_events_are_skipped(faulty: FaultyServer, sampler: SamplingClient) -> None:
    noise = b": waiting\n\ndata: \n\ndata: not JSON\n\ndata: [1]\n\n"
    faulty.script("stream_sample", streamed(noise, token(1), noise, done(1), END))
    assert len(read(sampler)) == 2


@pytest.mark.covers("24.sampling.10", "D08")
@pytest.mark.parametrize(
    ("status", "kind"), [(500, InternalServerError), (400, tinkex.BadRequestError)]
)
def test_bad_status_is_an_error(
    faulty: FaultyServer, sampler: SamplingClient, status: int, kind: type[Exception]
) -> None:
    faulty.script("stream_sample", Answer(status, {"detail": "no luck"}))
    with pytest.raises(kind, match="no luck"):
        read(sampler)
    assert len(faulty.requests("stream_sample")) == 1


@pytest.mark.covers("Q-24", "4.1/1")
@pytest.mark.parametrize(
    "event",
    [
        b'event: error\ndata: {"error": "out of memory", "category": "server"}\n\n',
        b'data: {"error": "out of memory"}\n\n',
    ],
)
def test_error_event_raises(faulty: FaultyServer, sampler: SamplingClient, event: bytes) -> None:
    faulty.script("stream_sample", streamed(token(1), event, END))
    stream = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=3))
    chunks = iter(stream)
    assert next(chunks).token_id == 1
    with pytest.raises(RequestFailedError, match="out of memory"):
        next(chunks)


@pytest.mark.parametrize("cut", ["a clean end", "within an event", "one of two"])
def test_stream_cut_short_is_an_error(
    faulty: FaultyServer, sampler: SamplingClient, cut: str
) -> None:
    whole = token(1) + token(2) + done(2) + token(3, 1)
    answers = {
        "a clean end": streamed(token(1), token(2)),
        "within an event": streamed(whole, cut=len(token(1)) + 5),
        "one of two": streamed(whole),
    }
    faulty.script("stream_sample", answers[cut])
    with pytest.raises(APIConnectionError):
        read(sampler, 2 if cut == "one of two" else 1)


def test_farewell_that_is_missing_is_no_error(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    whole = token(1) + done(1)
    faulty.script("stream_sample", streamed(whole + END, cut=len(whole)), streamed(whole))
    assert len(read(sampler)) == 2
    assert len(read(sampler)) == 2


def test_event_that_makes_no_sense_is_an_error(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    faulty.script("stream_sample", streamed(b'data: {"token_id": "seven"}\n\n', done(1)))
    with pytest.raises(APIResponseValidationError, match="sampling at "):
        read(sampler)


def test_silence_ends_a_stream(faulty: FaultyServer, sampler: SamplingClient) -> None:
    faulty.script("stream_sample", streamed(token(1), done(1), pieces=2, pause=60))
    with pytest.raises(APITimeoutError, match=r"0.2 s"):
        read(sampler, timeout=0.2)


@pytest.mark.covers("C74")
def test_back_pressure_before_a_stream_is_waited_out(
    faulty: FaultyServer,
    sampler: SamplingClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(
        "tinkex.client.http.limits.Backoff.pause", lambda self, seconds: waited.append(seconds)
    )
    busy = Answer(429, {"detail": "busy", "queue_state": "paused_capacity"}, {"Retry-After": "3"})
    faulty.script("stream_sample", busy, streamed(token(1), done(1), END))
    assert len(read(sampler)) == 2
    assert waited == [3.0]
    assert [seen.json["seq_id"] for seen in faulty.requests("stream_sample")] == [0, 0]
    assert "Sampling is paused for x" in caplog.text


def test_back_pressure_without_retries_is_an_error(faulty: FaultyServer) -> None:
    faulty.script("stream_sample", Answer(429, {"detail": "busy"}))
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        config = RetryConfig(enable_retry_logic=False)
        sampler = service.create_sampling_client(base_model="m", retry_config=config).result()
        with pytest.raises(RateLimitError):
            read(sampler)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_server_that_knows_no_streams_gives_all_tokens_at_the_end(
    faulty: FaultyServer, sampler: SamplingClient, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    faulty.script("stream_sample", Answer(status, {"detail": "Not Found"}))

    def answer(seen: Seen) -> Answer:
        sequences = [
            {"tokens": [7, 8], "logprobs": [-0.5, -1.5], "stop_reason": "length"}
        ] * seen.json["num_samples"]
        return Answer(body={"sequences": sequences})

    faulty.script("asample", answer)
    with caplog.at_level(logging.INFO, "tinkex"):
        for _ in range(3):
            assert gathered(read(sampler, 2)) == [([7, 8], [-0.5, -1.5], "length")] * 2
    assert caplog.text.count("does not stream") == 1
    assert len(faulty.requests("stream_sample")) == 1


def test_missing_sampler_is_not_taken_for_a_missing_endpoint(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    faulty.script("stream_sample", Answer(404, {"detail": "there is no sampling session 'x'"}))
    with pytest.raises(tinkex.NotFoundError, match="no sampling session"):
        read(sampler)


def test_closing_the_client_ends_its_streams(faulty: FaultyServer) -> None:
    faulty.script("stream_sample", streamed(token(1), done(1), pieces=2, pause=5))
    service = ServiceClient(base_url=faulty.base_url, api_key="tml-x")
    stream: SampleStream = (
        service.create_sampling_client(base_model="m")
        .result()
        .sample_stream(PROMPT, SamplingParams(max_tokens=3))
    )
    chunks = iter(stream)
    next(chunks)
    service.close().result(10)
    with pytest.raises(tinkex.TinkerError):
        next(chunks)
