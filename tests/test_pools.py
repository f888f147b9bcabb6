"""Connections by class of traffic; and what ends a request: silence if it may be large, the time it
takes if not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from tinkex import types
from tinkex.client.http.exchange import HttpRequest, Reply, origin_of
from tinkex.client.http.http_exchange import HttpExchange
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.wire import protocol
from tinkex.wire.protocol import Traffic

BEAT = types.SessionHeartbeatRequest(session_id="s")


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@asynccontextmanager
async def exchange(url: str) -> AsyncIterator[HttpExchange]:
    opened = HttpExchange(url)
    try:
        yield opened
    finally:
        await opened.close()


async def send(
    opened: HttpExchange, path: str, traffic: Traffic, timeout: float = 5, body: bytes = b"{}"
) -> Reply:
    return await opened.send(HttpRequest("POST", f"/api/v1/{path}", {}, body, timeout, traffic))


# ── pools ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C11")
@pytest.mark.parametrize(
    ("traffic", "most"), [("train", 16), ("session", 10), ("telemetry", 5), ("rest", 50)]
)
async def test_connections_per_class_are_limited(
    faulty: FaultyServer, traffic: Traffic, most: int
) -> None:
    faulty.script("x", Answer(body={}, until=lambda: len(faulty.seen) >= most, delay=0.1))
    async with exchange(faulty.base_url) as opened:
        replies = await asyncio.gather(*(send(opened, "x", traffic) for _ in range(most + 5)))
    assert {reply.status for reply in replies} == {200}
    assert faulty.connections == most
    first, last = faulty.seen[most - 1].when, faulty.seen[most].when
    assert last - first > 0.05  # the next one waited for a connection


@pytest.mark.covers("C11")
async def test_flood_of_held_polls_delays_no_heartbeat(faulty: FaultyServer) -> None:
    faulty.script("retrieve_future", Answer(408, delay=60))
    faulty.script("forward_backward", Answer(body={"request_id": "r"}, delay=60))
    transport = Transport(Config(base_url=faulty.base_url))
    poll = types.FutureRetrieveRequest(request_id="r")
    work = types.ForwardBackwardRequest(
        model_id="m",
        forward_backward_input=types.ForwardBackwardInput(data=[], loss_fn="cross_entropy"),
    )
    held = [
        asyncio.create_task(transport.poll(protocol.RETRIEVE_FUTURE, poll, {}, 40))
        for _ in range(200)
    ]
    held += [
        asyncio.create_task(transport.call(protocol.FORWARD_BACKWARD, work)) for _ in range(40)
    ]
    while (  # noqa: ASYNC110
        len(faulty.requests("retrieve_future")) < 200
        or len(faulty.requests("forward_backward")) < 16
    ):
        await asyncio.sleep(0.01)
    await transport.call(protocol.SESSION_HEARTBEAT, BEAT, timeout=20, patience=0)
    assert len(faulty.requests("forward_backward")) == 16
    assert faulty.connections == 200 + 16 + 1
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await transport.close()


@pytest.mark.covers("C11")
async def test_sizes_of_pools_can_be_chosen(faulty: FaultyServer) -> None:
    faulty.script("session_heartbeat", Answer(body={}, delay=0.02))
    transport = Transport(Config(base_url=faulty.base_url, pool_sizes={"session": 1}))
    await asyncio.gather(*(transport.call(protocol.SESSION_HEARTBEAT, BEAT) for _ in range(4)))
    await transport.close()
    assert faulty.connections == 1


async def test_connections_are_reused_and_closed(faulty: FaultyServer) -> None:
    faulty.script("x", Answer(body={}))
    async with exchange(faulty.base_url) as opened:
        for _ in range(5):
            await send(opened, "x", "rest")
        assert faulty.connections == 1
    await _until_none_is_open(faulty)


@pytest.mark.covers("C11")
def test_addresses_of_different_spelling_are_equal() -> None:
    assert origin_of("https://EXAMPLE.com:443/some/path") == origin_of("https://example.com")
    assert origin_of("http://example.com:80") == origin_of("http://Example.com/x")
    assert (
        len(
            {
                origin_of(url)
                for url in ("https://a", "http://a", "https://a:81", "https://b", "local")
            }
        )
        == 5
    )


@pytest.mark.covers("24.http.8")
def test_twenty_calls_at_once(faulty: FaultyServer) -> None:
    together = threading.Barrier(20, timeout=10)

    def meet(seen: Seen) -> Answer:
        return Answer(body={"echo": seen.json["number"]}, until=lambda: len(faulty.seen) >= 20)

    faulty.script("x", meet)
    answers: dict[int, object] = {}
    with tinkex.HttpClient(base_url=faulty.base_url) as http:

        def ask(number: int) -> None:
            together.wait()
            answers[number] = http.post("x", {"number": number}).result(10)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
    assert answers == {number: {"echo": number} for number in range(20)}
    assert faulty.connections == 20


# ── timeouts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C12")
@pytest.mark.parametrize("traffic", ["poll", "train"])
async def test_large_answers_over_slow_lines_arrive(faulty: FaultyServer, traffic: Traffic) -> None:
    faulty.script("x", Answer(body=b"x" * 1000, pieces=13, pause=0.1))
    async with exchange(faulty.base_url) as opened:
        began = time.monotonic()
        assert len((await send(opened, "x", traffic, 1.0)).body) == 1000
        assert time.monotonic() - began > 1.1


async def test_ordinary_request_has_so_much_time_in_all(faulty: FaultyServer) -> None:
    faulty.script("x", Answer(body=b"x" * 1000, pieces=10, pause=0.1))
    async with exchange(faulty.base_url) as opened:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.6 s"):
            await send(opened, "x", "rest", 0.6)


@pytest.mark.parametrize("traffic", ["poll", "train", "rest"])
async def test_silence_ends_any_request(faulty: FaultyServer, traffic: Traffic) -> None:
    faulty.script("x", Answer(body=b"x" * 1000, pieces=2, pause=60))
    faulty.script("y", Answer(body={}))
    async with exchange(faulty.base_url) as opened:
        await send(opened, "y", traffic)  # there is a connection: none is waited for
        with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
            await send(opened, "x", traffic, 0.2)


async def test_wait_for_a_connection_does_not_count_for_passes(faulty: FaultyServer) -> None:
    faulty.script("x", Answer(body={}, delay=0.25))
    opened = HttpExchange(faulty.base_url, pool_sizes={"train": 1})
    replies = await asyncio.gather(*(send(opened, "x", "train", 1.0) for _ in range(5)))
    await opened.close()
    assert len(replies) == 5


@asynccontextmanager
async def taking(pause: float, stop_after: int) -> AsyncIterator[str]:
    """A server that takes a body slowly, and no more of it than so many bytes; one that was taken
    whole is answered."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            left = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            taken = 0
            while left and taken < stop_after:
                piece = await reader.read(min(left, 1 << 16))
                taken, left = taken + len(piece), left - len(piece)
                await asyncio.sleep(pause)
            if left:
                await gone.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        gone.set()
        server.close()


async def test_large_body_over_a_slow_line_is_not_cut() -> None:
    body = b"x" * (24 << 20)
    async with taking(0.0045, len(body)) as url, exchange(url) as opened:
        began = time.monotonic()
        assert (await send(opened, "x", "train", 1.5, body)).status == 200
        assert time.monotonic() - began > 1.6


async def test_slow_answer_to_a_large_body_is_not_cut(faulty: FaultyServer) -> None:
    faulty.script("x", Answer(body=b"x" * 1000, pieces=13, pause=0.1))
    async with exchange(faulty.base_url) as opened:
        assert len((await send(opened, "x", "train", 1.0, b"x" * 200_000)).body) == 1000


async def test_server_that_stops_reading_a_body_times_out() -> None:
    body = b"x" * (24 << 20)
    async with taking(0, 1 << 20) as url, exchange(url) as opened:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
            await send(opened, "x", "train", 0.3, body)
        assert time.monotonic() - began < 20


async def test_stream_lasts_as_long_as_something_comes(faulty: FaultyServer) -> None:
    faulty.script(
        "x",
        Answer(body=b"x" * 1000, pieces=13, pause=0.1),
        Answer(body=b"x" * 1000, pieces=2, pause=60),
    )
    async with exchange(faulty.base_url) as opened:
        async with opened.stream(HttpRequest("GET", "/api/v1/x", {}, None, 1.0)) as reply:
            assert len(b"".join([chunk async for chunk in reply.chunks])) == 1000
        async with opened.stream(HttpRequest("GET", "/api/v1/x", {}, None, 0.2)) as reply:
            with pytest.raises(TimeoutError):
                b"".join([chunk async for chunk in reply.chunks])


async def _until_none_is_open(faulty: FaultyServer) -> None:
    for _ in range(2000):
        if not faulty.open_connections:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{faulty.open_connections} connections are still open")
