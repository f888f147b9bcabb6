"""The server in numbers and in the log, its limits, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tinkex
from support import Keyed, Wire, pass_json, sample_json, serving, step_json
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.server_limits import Limits
from tinkex.server.server_metrics import JsonFormatter
from tinkex.server.state import State

Serve = Callable[..., Wire]


class Gate:
    """Holds the engine at a method until it is opened."""

    def __init__(self, method: str) -> None:
        self.method, self.opened = method, threading.Event()

    def __call__(self, method: str, subject: str) -> None:
        if method == self.method:
            assert self.opened.wait(20)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def begin(engine: FakeEngine | None = None, **options: Any) -> Wire:
            return Wire(stack.enter_context(serving(engine or FakeEngine(), tmp_path, **options)))

        yield begin


def fetch(url: str, path: str, key: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    with closing(connection):
        connection.request("GET", path, headers={"X-API-Key": key} if key else {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def values(url: str, key: str = "") -> dict[str, float]:
    """All samples of /metrics; each line must be one that Prometheus can read."""
    status, text = fetch(url, "/metrics", key)
    assert status == 200
    assert text.endswith("\n")
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            matched = re.fullmatch(r'([a-z_]+(?:\{(?:[a-z]+="[^"\\\n]*",?)+\})?) (\S+)', line)
            assert matched, line
            found[matched[1]] = float(matched[2])
        else:
            assert re.fullmatch(r"# (HELP|TYPE) [a-z_]+ .+", line), line
    return found


def test_metrics_count_requests_and_tokens(serve: Serve) -> None:
    wire = serve()
    model = wire.model()
    wire.run("forward_backward", pass_json(model, 1, tokens=(1, 2, 3, 4)))
    wire.run("asample", sample_json("", sampling_session_id=None, base_model="fake"))
    wire.send("get_info", {"model_id": "nothing"})
    seen = values(wire.url)
    assert seen['tinkex_requests_total{operation="forward_backward",status="200"}'] == 1
    assert seen['tinkex_requests_total{operation="get_info",status="404"}'] == 1
    assert seen['tinkex_request_seconds_count{operation="forward_backward"}'] == 1
    assert seen['tinkex_request_seconds_bucket{operation="forward_backward",le="+Inf"}'] == 1
    assert seen['tinkex_request_seconds_sum{operation="forward_backward"}'] > 0
    assert seen['tinkex_tokens_total{kind="training"}'] == 4
    assert seen['tinkex_tokens_total{kind="prefill"}'] == 3
    assert seen['tinkex_tokens_total{kind="sampled"}'] == 3
    assert seen["tinkex_live_runs"] == 1
    assert seen["tinkex_samplers"] == 1
    assert seen["tinkex_open_sessions"] == 1
    assert seen["tinkex_samples_in_flight"] == 0
    assert seen['tinkex_engine_steps_total{kind="training"}'] == 1
    assert seen['tinkex_engine_steps_total{kind="sampling"}'] >= 1
    counts = [
        value
        for name, value in seen.items()
        if name.startswith('tinkex_request_seconds_bucket{operation="fo')
    ]
    assert counts == sorted(counts)


def test_metrics_show_work_in_progress(serve: Serve) -> None:
    gate = Gate("optim_step")
    engine = FakeEngine()
    engine.fail = gate
    wire = serve(engine)
    model = wire.model()
    requests = [
        wire.post("optim_step", step_json(model, number))["request_id"] for number in (1, 2)
    ]
    draw = sample_json("", sampling_session_id=None, base_model="fake")
    requests.append(wire.post("asample", draw)["request_id"])
    # the same again is no other one
    assert wire.post("optim_step", step_json(model, 2))["request_id"] == requests[1]
    seen = values(wire.url)
    assert seen['tinkex_open_operations{operation="optim_step"}'] == 2
    assert seen["tinkex_samples_in_flight"] == 1
    gate.opened.set()
    for request in requests:
        wire.result(request)
    seen = values(wire.url)
    assert seen['tinkex_open_operations{operation="optim_step"}'] == 0
    assert seen["tinkex_samples_in_flight"] == 0


def test_metrics_need_the_key_but_the_front_page_does_not(serve: Serve) -> None:
    url = serve(api_key="tml-x").url
    assert fetch(url, "/metrics")[0] == 401
    assert fetch(url, "/metrics", "tml-y")[0] == 401
    assert fetch(url, "/metrics", "tml-x")[0] == 200
    status, text = fetch(url, "/")
    assert status == 200
    assert json.loads(text) == {
        "name": "tinkex",
        "version": tinkex.__version__,
        "api": "/api/v1",
        "access": "key required",
    }


def test_access_log_has_a_line_for_each_request_and_no_secrets(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Keyed(serve(api_key="tml-hidden").url, "tml-hidden")
    with caplog.at_level(logging.INFO, "tinkex.server.access"):
        wire.post("create_session", {"sdk_version": "x", "user_metadata": {"token": "hunter2"}})
        Wire(wire.url).send(
            "get_server_capabilities", method="GET", headers={"X-API-Key": "tml-guess"}
        )
        trace = wire.get(f"sessions/{wire.session()}/trace_export")["url"]
        assert fetch(wire.url, trace.removeprefix(wire.url))[0] == 200
    lines = [
        JsonFormatter().format(record)
        for record in caplog.records
        if record.name == "tinkex.server.access"
    ]
    first, second = (json.loads(line) for line in lines[:2])
    assert (first["operation"], first["method"], first["status"], first["owner"]) == (
        "create_session",
        "POST",
        200,
        "local",
    )
    assert first["ms"] > 0
    assert (second["operation"], second["status"], second["owner"]) == (
        "get_server_capabilities",
        401,
        None,
    )
    for secret in ("hidden", "guess", "hunter2", trace.split("signature=")[1]):
        assert secret not in "".join(lines)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def test_limit_must_make_sense() -> None:
    for name in [field.name for field in dataclasses.fields(Limits)]:
        with pytest.raises(ValueError, match=name):
            Limits(**{name: -1})
    with pytest.raises(ValueError, match="adapters"):
        Limits(adapters=0)


def test_sequences_beyond_the_limit_fail_by_its_name(serve: Serve) -> None:
    wire = serve(limits=Limits(sequence_tokens=4))
    model = wire.model()
    outcome = wire.run("forward_backward", pass_json(model, 1, tokens=(1, 2, 3, 4, 5)))
    assert outcome["category"] == "user"
    assert "sequence_tokens" in outcome["error"]
    assert "metrics" in wire.run("forward_backward", pass_json(model, 2, tokens=(1, 2, 3, 4)))
    draw = sample_json("", sampling_session_id=None, base_model="fake")
    draw["prompt"]["chunks"][0]["tokens"] = [1, 2, 3, 4, 5]
    refused = wire.send("asample", draw)
    assert refused.status == 400
    assert "sequence_tokens" in refused.json["detail"]


def test_samples_and_bodies_beyond_the_limit_fail_by_its_name(serve: Serve) -> None:
    wire = serve(limits=Limits(samples=2, body_bytes=3000))
    many = wire.send("asample", sample_json("x", num_samples=3))
    assert many.status == 400
    assert "limit samples" in many.json["detail"]
    big = wire.send("forward_backward", pass_json("x", 1, tokens=(7,) * 1000))
    assert big.status == 413
    assert "body_bytes" in big.json["detail"]


def test_runs_beyond_the_limit_of_an_owner_fail_by_its_name(serve: Serve) -> None:
    wire = serve(limits=Limits(adapters=2))
    session = wire.session()
    first = wire.model(session, 0)
    path = wire.run("save_weights", {"model_id": first, "path": "a", "seq_id": 1})["path"]
    wire.model(session, 1)
    body = {"session_id": session, "model_seq_id": 2, "base_model": "fake"}
    assert "limit adapters" in wire.run("create_model", body)["error"]
    load = {"session_id": session, "model_seq_id": 3, "path": path, "optimizer": True}
    assert "limit adapters" in wire.run("load_weights", load)["error"]
    assert wire.send("create_model", {**body, "session_id": "nothing"}).status == 404
    wire.run("unload_model", {"model_id": first})
    assert wire.model(session, 4)


def test_runs_that_are_asked_for_at_once_are_counted_too(serve: Serve) -> None:
    gate, engine = Gate("create"), FakeEngine()
    engine.fail = gate
    wire = serve(engine, limits=Limits(adapters=2))
    session = wire.session()
    bodies = [
        {"session_id": session, "model_seq_id": number, "base_model": "fake"} for number in range(4)
    ]
    requests = [wire.post("create_model", body)["request_id"] for body in bodies]
    gate.opened.set()
    outcomes = [wire.result(request) for request in requests]
    assert ["error" in outcome for outcome in outcomes] == [False, False, True, True]


@pytest.mark.covers("S30")
def test_too_many_open_requests_hold_samples_up_and_fail_training_in_band(serve: Serve) -> None:
    gate, engine = Gate("optim_step"), FakeEngine()
    engine.fail = gate
    wire = serve(engine, limits=Limits(open_requests=2, poll_seconds=0.1))
    model = wire.model()
    held = [wire.post("optim_step", step_json(model, number))["request_id"] for number in (1, 2)]
    draw = sample_json("", sampling_session_id=None, base_model="fake")
    refused = wire.send("asample", draw)
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json["queue_state"] == "paused_capacity"
    assert "open_requests" in refused.json["detail"]
    over = wire.post("optim_step", step_json(model, 3))["request_id"]
    gate.opened.set()
    assert all("metrics" in wire.result(request) for request in held)
    outcome = wire.result(over)
    assert "open_requests" in outcome["error"]
    # the number was spent: nothing waits for it
    assert "metrics" in wire.run("optim_step", step_json(model, 4))
    assert "error" not in wire.run("asample", draw)


@pytest.mark.covers("S30")
def test_client_waits_for_free_sampling_slots(serve: Serve) -> None:
    wire = serve(limits=Limits(open_requests=3))
    with tinkex.ServiceClient(base_url=wire.url) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        prompt, params = tinkex.ModelInput.from_ints([5, 6]), tinkex.SamplingParams(max_tokens=2)
        futures = [sampler.sample(prompt, 1, params) for _ in range(8)]
        assert all(future.result(15).sequences for future in futures)


@pytest.mark.covers("S27")
def test_result_can_be_read_again_and_unknown_result_is_not_found(serve: Serve) -> None:
    wire = serve()
    model = wire.model()
    wire.run("optim_step", step_json(model, 1))
    assert wire.result(f"{model}:1") == wire.result(f"{model}:1")
    for unknown in (f"{model}:77", "nothing"):
        assert wire.send("retrieve_future", {"request_id": unknown}).status == 404


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


def test_stopping_server_finishes_work_and_refuses_new(
    tmp_path: Path,
) -> None:
    gate, engine = Gate("optim_step"), FakeEngine()
    engine.fail = gate

    async def scenario() -> None:
        app = create_app(engine, tmp_path)
        state: State = app.state.server
        async with app.router.lifespan_context(app):
            ask = _asker(app)
            session = (await ask("create_session", {"sdk_version": "x"}))[1]["session_id"]
            await ask(
                "create_model", {"session_id": session, "model_seq_id": 0, "base_model": "fake"}
            )
            model = f"{session}:train:0"
            await state.promises.get(f"{model}:0").done.wait()  # type: ignore[union-attr]
            assert (await ask("optim_step", step_json(model, 1)))[0] == 200
            draining = asyncio.create_task(state.drain())
            await asyncio.sleep(0.1)
            assert not draining.done()
            status, said = await ask("optim_step", step_json(model, 2))
            assert status == 503
            assert "shutting down" in said["detail"]
            gate.opened.set()
            await asyncio.wait_for(draining, 20)
            status, result = await ask("retrieve_future", {"request_id": f"{model}:1"})
            assert status == 200
            assert "metrics" in result

    asyncio.run(scenario())


def test_server_does_not_wait_for_ever_to_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = create_app(FakeEngine(), tmp_path, limits=Limits(drain_seconds=0.1))
        state: State = app.state.server
        state.meter.open["ada", "asample"] = 1
        await asyncio.wait_for(state.drain(), 20)
        state.database.close()

    asyncio.run(scenario())


def _asker(app: Any) -> Callable[[str, Any], Any]:
    async def ask(path: str, body: Any) -> tuple[int, Any]:
        sent: list[Any] = []
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": f"/api/v1/{path}",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"], json.loads(
            b"".join(message.get("body", b"") for message in sent[1:])
        )

    return ask
