"""Bodies of requests: how far they may grow, where they are expanded, and what is kept of them on
disk."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, serving, step_json
from tinkex.engine.fake import FakeEngine
from tinkex.server import middleware
from tinkex.server.calls import Call
from tinkex.server.runs import journal
from tinkex.server.server_limits import Limits
from tinkex.wire import codec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZSTD = {"Content-Encoding": "zstd"}
GIB = 1 << 30


def padded(body: Any, size: int) -> bytes:
    """JSON with spaces behind it, compressed: a few kilobytes for a gigabyte."""
    compressor = zstd.ZstdCompressor(level=1)
    parts = [compressor.compress(json.dumps(body).encode())]
    spaces = b" " * (1 << 20)
    parts += [compressor.compress(spaces) for _ in range(size >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The threads on which bodies were expanded, and how far each was allowed to grow."""
    seen: list[tuple[str, int]] = []
    original = codec.decompress

    def decompress(data: bytes, encoding: str | None, limit: int = codec.MAX_BODY) -> bytes:
        if encoding:
            try:
                asyncio.get_running_loop()
                seen.append(("loop", limit))
            except RuntimeError:
                seen.append((threading.current_thread().name, limit))
        return original(data, encoding, limit)

    monkeypatch.setattr(codec, "decompress", decompress)
    return seen


@pytest.mark.parametrize(
    "operation", ["optim_step", "session_heartbeat", "create_session", "retrieve_future"]
)
def test_small_body_that_opens_to_a_gigabyte_is_refused_off_the_loop(
    tmp_path: Path, where: list[tuple[str, int]], operation: str
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        body = padded(
            step_json(wire.model(), 1) | {"session_id": "x", "request_id": "x", "tags": []}, GIB
        )
        assert len(body) < 100_000
        began = time.monotonic()
        heard = wire.send(operation, body, headers=ZSTD)
        assert time.monotonic() - began < 5
        assert heard.status == 413
        assert f"of {operation}" in heard.json["detail"]
        assert [limit for _, limit in where] == [middleware.CONTROL_BYTES]
        assert all(thread != "loop" for thread, _ in where)


def test_json_body_is_limited_on_routes_with_data(
    tmp_path: Path, where: list[tuple[str, int]]
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        body = padded(pass_json(wire.model(), 1), GIB)
        heard = wire.send("forward_backward", body, headers=ZSTD)
        assert heard.status == 413
        assert "of JSON" in heard.json["detail"]
        assert all(thread != "loop" for thread, _ in where)


def test_requests_are_answered_while_a_body_is_expanded(
    tmp_path: Path, where: list[tuple[str, int]]
) -> None:
    """The same pass with 100 MiB of spaces, several times; each of the others' requests is answered
    soon."""
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        bomb = padded(pass_json(model, 1), 100 << 20)
        senders = [
            threading.Thread(
                target=wire.send, args=("forward_backward", bomb), kwargs={"headers": ZSTD}
            )
            for _ in range(3)
        ]
        for sender in senders:
            sender.start()
        slowest = 0.0
        while any(sender.is_alive() for sender in senders):
            began = time.monotonic()
            wire.get("healthz")
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 15
        assert "metrics" in wire.result(f"{model}:1")
        assert len(where) == 3
        assert all(thread != "loop" for thread, _ in where)


def test_small_bodies_are_decoded_at_once(where: list[tuple[str, int]], tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        body = zstd.compress(json.dumps(step_json(wire.model(), 1)).encode())
        assert "metrics" in wire.result(
            wire.send("optim_step", body, headers=ZSTD).json["request_id"]
        )
        assert [thread for thread, _ in where] == ["loop"]


def test_body_is_journalled_as_it_was_sent_and_carried_out_again(tmp_path: Path) -> None:
    def passed(model: str) -> bytes:
        return padded(pass_json(model, 1), 32 << 20)

    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        first = wire.send("forward_backward", passed(model), headers=ZSTD)
        result = wire.result(first.json["request_id"])
    journal = sum(path.stat().st_size for path in (tmp_path / "runs").glob("*/segment-*.log"))
    assert 0 < journal < 1 << 20
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        # the same request, so the same receipt
        again = wire.send("forward_backward", passed(model), headers=ZSTD)
        assert again.json == first.json
        assert wire.result(again.json["request_id"]) == result
        plain = json.dumps(pass_json(model, 1)).encode() + b" " * (32 << 20)
        assert wire.send("forward_backward", plain).json == first.json
        assert "metrics" in wire.run("optim_step", step_json(model, 2))


@pytest.mark.parametrize("declared", [True, False])
def test_frame_is_limited_whether_or_not_it_says_its_size(declared: bool) -> None:
    plain = b" " * (1 << 20)
    if declared:
        body = zstd.compress(plain)
    else:
        compressor = zstd.ZstdCompressor()
        body = compressor.compress(plain) + compressor.flush()
    assert (codec.expanded_size(body, "zstd") is None) is not declared
    assert codec.decompress(body, "zstd", len(plain)) == plain
    with pytest.raises(codec.TooLarge, match="decompressed"):
        codec.decompress(body, "zstd", len(plain) - 1)


def test_unreadable_body_is_looked_at_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the number that it uses up."""
    seen: list[bool] = []
    original: Callable[..., Any] = codec.peek

    def peek(*args: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread() or _is_loop())
        return original(*args)

    monkeypatch.setattr(codec, "peek", peek)
    with serving(FakeEngine(), tmp_path, limits=Limits()) as url:
        wire = Wire(url)
        model = wire.model()
        body = json.dumps(pass_json(model, 1) | {"forward_backward_input": "x" * 200_000}).encode()
        assert wire.send("forward_backward", body).status == 400
        assert "metrics" in wire.run("optim_step", step_json(model, 2))
    assert seen == [False]


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_body_that_is_on_disk_is_not_kept_while_its_operation_waits(tmp_path: Path) -> None:
    engine, opened = FakeEngine(), threading.Event()
    with serving(engine, tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        engine.fail = lambda method, _: None if method != "optim_step" else assert_opened(opened)
        requests = [wire.post("optim_step", step_json(model, 1))["request_id"]]
        body = json.dumps(pass_json(model, 2)).encode().ljust(1 << 20)
        requests.append(json.loads(wire.send("forward_backward", body).body)["request_id"])
        kept = [len(call.body) for call in gc.get_objects() if type(call) is Call]
        opened.set()
        for request in requests:
            wire.result(request)
    assert sum(kept) < 1 << 20


def assert_opened(event: threading.Event) -> None:
    assert event.wait(20)


def test_large_body_is_made_a_record_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[tuple[bool, bool]] = []
    original = journal.encode

    def encode(entry: journal.Entry) -> bytes:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            on_loop.append((len(entry.body) > middleware.OFF_LOOP_BYTES, True))
            return original(entry)
        on_loop.append((len(entry.body) > middleware.OFF_LOOP_BYTES, False))
        return original(entry)

    monkeypatch.setattr(journal, "encode", encode)
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        body = json.dumps(pass_json(wire.model(), 1)).encode().ljust(1 << 20)
        wire.result(json.loads(wire.send("forward_backward", body).body)["request_id"])
    assert set(on_loop) == {(False, True), (True, False)}
