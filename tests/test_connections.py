"""Connections to a server: how many there may be, and how long they may take."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import Wire, listening, wait_until
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.connections import OTHER_FILES, RESERVE, Doors, guarded
from tinkex.server.app import create_app
from tinkex.server.server_limits import Limits

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OTHER = b"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = (
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@contextmanager
def guarding(data_dir: Path, doors: Doors, **options: Any) -> Iterator[tuple[str, int]]:
    """A server as `tinkex serve` starts it, in a thread; where it listens."""
    import uvicorn

    listener = listening()
    app = create_app(FakeEngine(), data_dir, **options)
    config = uvicorn.Config(
        app, http=guarded(doors), log_config=None, lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


Serve = Callable[..., tuple[str, int]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(api_key: str | None = None, **limits: Any) -> tuple[str, int]:
            chosen = Limits(**limits)
            return stack.enter_context(
                guarding(tmp_path, Doors(chosen), limits=chosen, api_key=api_key)
            )

        yield start


def heard(place: tuple[str, int], data: bytes, seconds: float = 10.0) -> tuple[bytes, float]:
    """Return the answer before the connection closes, and the seconds until then."""
    began = time.monotonic()
    with closing(socket.create_connection(place, timeout=seconds)) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer, time.monotonic() - began


@pytest.mark.parametrize("data", [b"", b"GET /api/v1/hea", HEALTH[:-2]])
def test_connection_without_a_whole_header_is_closed(serve: Serve, data: bytes) -> None:
    answer, seconds = heard(serve(header_seconds=0.3), data)
    assert answer == b""
    assert 0.2 < seconds < 5


def test_half_a_header_after_a_whole_request_is_closed(serve: Serve) -> None:
    answer, seconds = heard(serve(header_seconds=0.5), HEALTH + b"GET /api/")
    assert b"200 OK" in answer
    assert 0.4 < seconds < 8


def test_dripping_header_is_no_excuse(serve: Serve) -> None:
    place = serve(header_seconds=0.5)
    with closing(socket.create_connection(place, timeout=5)) as sock:
        for byte in HEALTH[:-2]:
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                return
            time.sleep(0.05)
    pytest.fail("it was never closed")


def test_body_that_does_not_come_is_refused(serve: Serve) -> None:
    answer, seconds = heard(serve(body_seconds=0.3), BODY + b"Content-Length: 100\r\n\r\n{")
    assert b"408 " in answer.partition(b"\r\n")[0]
    assert b"the body did not arrive in time: 1 bytes" in answer
    assert 0.2 < seconds < 5


def test_body_that_drips_is_refused(serve: Serve) -> None:
    place = serve(body_seconds=0.6)
    with closing(socket.create_connection(place, timeout=5)) as sock:
        sock.sendall(BODY + b"Content-Length: 100000\r\n\r\n")
        began = time.monotonic()
        sock.setblocking(False)
        answer = b""
        while not answer and time.monotonic() < began + 5:
            sock.send(b" ")
            time.sleep(0.05)
            try:
                answer = sock.recv(65536)
            except BlockingIOError:
                continue
    assert b"408 " in answer.partition(b"\r\n")[0]


def test_slow_answer_is_waited_for(serve: Serve) -> None:
    """A poll is held longer than a header may take."""
    place = serve(header_seconds=0.2, poll_seconds=1.0)
    wire = Wire(f"http://{place[0]}:{place[1]}")
    session = wire.session()
    sampler = wire.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"},
    )["sampling_session_id"]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    assert wire.post(
        "retrieve_futures", {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
    )


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_crowd_does_not_keep_the_health_check_out(serve: Serve, limit: str) -> None:
    place = serve(**{limit: 3})
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(closing(socket.create_connection(place)))
        wait_until(lambda: b"200 OK" in heard(place, HEALTH)[0])
        answer, _ = heard(place, OTHER)
        assert b"503 " in answer.partition(b"\r\n")[0]
        assert b"connections_per_address" in answer
        for _ in range(RESERVE):
            stack.enter_context(closing(socket.create_connection(place)))
        wait_until(lambda: _is_shut(place))
    wait_until(lambda: b"supported_models" in answered(place))


def _is_shut(place: tuple[str, int]) -> bool:
    try:
        return heard(place, HEALTH)[0] == b""
    except ConnectionError:
        return True


def answered(place: tuple[str, int]) -> bytes:
    """The answer to a request that ends with its connection."""
    try:
        return heard(place, OTHER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))[0]
    except ConnectionError:
        return b""


def test_health_check_needs_no_key(serve: Serve) -> None:
    place = serve(api_key="tml-secret")
    wire = Wire(f"http://{place[0]}:{place[1]}")
    assert wire.get("healthz") == {"status": "ok"}
    assert wire.send("get_server_capabilities", method="GET").status == 401


def test_connections_leave_files_for_the_rest() -> None:
    assert Doors(Limits(), 1024).most == 1024 - OTHER_FILES - RESERVE
    assert Doors(Limits(connections=10), 1024).most == 10
    assert Doors(Limits(), None).most == Limits().connections
