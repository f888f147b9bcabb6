"""Answers that mean harm, or are broken: each is an error of tinkex, soon, and takes bounded
memory."""

from __future__ import annotations

import base64
import gzip
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import serving
from tinkex import ServiceClient, types
from tinkex.client.http import http_exchange
from tinkex.engine.fake import FakeEngine
from tinkex.wire import codec
from tinkex.wire.redacted_http import Response, wait_asked

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
LIST = b"[" * 100_000 + b"]" * 100_000
PROMPT = types.ModelInput.from_ints([1, 2])


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        server.script("asample", Answer(body={"request_id": "r"}))
        tinkex.configure(patience=0.5)
        yield server
        tinkex.configure()


@pytest.fixture
def service(faulty: FaultyServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=faulty.base_url) as client:
        yield client


def sample(service: ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model="m").result(20)
    return sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result(20)


def result_with(tokens: str) -> Answer:
    body = '{"sequences":[{"stop_reason":"length","tokens":[TOKENS],"logprobs":[-1.0]}]}'.replace(
        "TOKENS", tokens
    )
    return Answer(body=body.encode(), content_type=codec.JSON)


@pytest.mark.parametrize(
    "token", [str(2**70), "1" + "0" * 5000, '"x"', "1.5"], ids=["2**70", "5000", "text", "float"]
)
def test_invalid_tokens_are_an_error_of_the_answer(
    faulty: FaultyServer, service: ServiceClient, token: str
) -> None:
    faulty.script("retrieve_future", result_with(token))
    with pytest.raises(tinkex.APIResponseValidationError):
        sample(service)


@pytest.mark.parametrize("body", [DEEP, LIST], ids=["objects", "lists"])
@pytest.mark.parametrize("path", ["asample", "retrieve_future"])
@pytest.mark.parametrize("status", [200, 400, 422])
def test_deep_json_is_an_error_of_the_answer(
    faulty: FaultyServer, service: ServiceClient, body: bytes, path: str, status: int
) -> None:
    faulty.script(path, Answer(status, body=body, content_type=codec.JSON))
    with pytest.raises(tinkex.TinkerError):
        sample(service)


def test_deep_json_is_a_value_error_for_every_reader() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        codec.loads(LIST)
    with pytest.raises(ValueError, match="nested too deeply"):
        Response(200, {}, LIST, None).json()
    handle = base64.urlsafe_b64encode(LIST).decode()
    with pytest.raises(ValueError, match="no sampler handle"):
        tinkex.SamplingClient.from_sampler_handle(handle)
    assert wait_asked({}, {"retry_after_ms": 10**400}) is None


def test_compressed_answer_is_read_up_to_a_limit(
    faulty: FaultyServer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "ANSWER_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (200 << 20), 1)
    assert len(bomb) < 1 << 20
    faulty.script(
        "retrieve_future",
        Answer(body=bomb, content_type=codec.JSON, headers={"Content-Encoding": "gzip"}),
    )
    with pytest.raises(tinkex.APIResponseValidationError, match="more than 1048576 bytes"):
        sample(service)
    faulty.script("retrieve_future", result_with("7"))
    assert sample(service).sequences[0].tokens == [7]  # the connection was not used again


def test_short_answers_have_a_lower_limit(faulty: FaultyServer) -> None:
    spaces = b" " * (http_exchange.SHORT_ANSWER_BYTES + 1)
    faulty.script("client/config", Answer(body=b"{" + spaces + b"}", content_type=codec.JSON))
    short = pytest.raises(tinkex.APIResponseValidationError, match="the limit")
    with ServiceClient(base_url=faulty.base_url) as service, short:
        sample(service)


def test_endless_answer_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never stops talking."""
    monkeypatch.setattr(http_exchange, "ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(http_exchange, "SHORT_ANSWER_BYTES", 1 << 20)
    sent = 0
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: "
                b"chunked\r\n\r\n"
            )
            chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
            try:
                while True:
                    connection.sendall(chunk)
                    sent += 65536
            except OSError:
                return

    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    with ServiceClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as service:
        with pytest.raises(tinkex.APIResponseValidationError, match="more than 1048576 bytes"):
            sample(service)
        talker.join(20)
        assert not talker.is_alive()
        listener.close()
    assert sent < 64 << 20


FORKED = """
import asyncio, os, sys
import tinkex
from tinkex import types
service = tinkex.ServiceClient(base_url=sys.argv[1])
client = service.create_lora_training_client("fake", rank=4).result()
data = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
done = client.forward(data, "cross_entropy")
done.result()
pending = tinkex.client.futures.api_future.start(asyncio.sleep(5))
plain = tinkex.client.futures.api_future.Future(pending)
child = os.fork()
if child == 0:
    ways = {
        "result": lambda: pending.result(),
        "exception": lambda: pending.exception(),
        "await": lambda: asyncio.run(pending.coroutine()),
        "wrapped": lambda: plain.result(),
    }
    for name, way in ways.items():
        try:
            way()
        except RuntimeError as error:
            print(name, error, flush=True)
    print("done", done.result().metrics is not None, flush=True)
    os._exit(0)
os.waitpid(child, 0)
pending.result(20)
print("parent", flush=True)
service.close().result()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_future_pending_at_a_fork_fails_in_the_child(tmp_path: Any) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        program = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKED, url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    lines = program.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "result",
        "exception",
        "await",
        "wrapped",
        "done",
        "parent",
    ]
    assert all("pending when the process was forked" in line for line in lines[:4])
    assert lines[4] == "done True"
