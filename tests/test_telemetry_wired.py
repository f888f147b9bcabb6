"""Telemetry as sessions use it: what the hosted service is told by itself, and that nobody waits
for it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import wait_until
from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient

KEY = "tml-very-secret"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2, seed=1)
STEP = AdamParams(learning_rate=0.1)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server that is taken for the hosted service, with telemetry on."""
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_TELEMETRY", "1")
        monkeypatch.setattr("tinkex.client.settings.config.HOSTED_URL", server.base_url)
        monkeypatch.setattr("tinkex.telemetry.sending.HOSTED_URL", server.base_url)
        server.script("telemetry", Answer(body={"status": "accepted"}))
        server.script("retrieve_future", Answer(body={"model_id": "s:train:0"}))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        yield server


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the work inside takes longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def told(server: FaultyServer) -> list[dict[str, Any]]:
    """The events that arrived so far."""
    return [event for seen in server.requests("telemetry") for event in seen.json["events"]]


def kinds(server: FaultyServer) -> list[str]:
    return [event["event"] for event in told(server)]


@pytest.mark.covers("1.4.4/4", "1.7/2")
def test_session_tells_its_beginning_and_its_end(hosted: FaultyServer) -> None:
    with ServiceClient(api_key=KEY) as service:
        assert service.get_telemetry() is None  # there is no session yet
        service.get_server_capabilities()
        reporter = service.get_telemetry()
        assert reporter is not None
        assert service.create_lora_training_client("m").result().get_telemetry() is reporter
        assert service.create_sampling_client(base_model="m").result().get_telemetry() is reporter
        assert reporter.flush(sync=True)
        assert kinds(hosted) == ["SESSION_START"]
    wait_until(lambda: "SESSION_END" in kinds(hosted))
    assert kinds(hosted) == ["SESSION_START", "SESSION_END"]
    batches = [seen.json for seen in hosted.requests("telemetry")]
    assert {(batch["session_id"], batch["sdk_version"]) for batch in batches} == {("s", "0.38.0")}
    assert [event["event_session_index"] for event in told(hosted)] == [0, 1]
    assert not reporter.is_alive


@pytest.mark.covers("1.6/5", "W03")
def test_failed_call_is_reported_once_without_the_key(hosted: FaultyServer) -> None:
    with ServiceClient(api_key=KEY) as service:
        client = service.create_lora_training_client("m").result()
        hosted.script(
            "optim_step",
            Answer(500, {"detail": f"bad key {KEY}"}, headers={"x-should-retry": "false"}),
        )
        with pytest.raises(tinkex.InternalServerError):
            client.optim_step(STEP).result(10)
        wait_until(lambda: "UNHANDLED_EXCEPTION" in kinds(hosted))
        hosted.script("create_sampling_session", Answer(404, {"detail": f"no model for {KEY}"}))
        with pytest.raises(tinkex.NotFoundError):
            service.create_sampling_client(base_model="nothing").result()
        wait_until(lambda: "GENERIC_EVENT" in kinds(hosted))
    wait_until(lambda: "SESSION_END" in kinds(hosted))
    events = told(hosted)
    (failure,) = [event for event in events if event["event"] == "UNHANDLED_EXCEPTION"]
    assert failure["error_type"].endswith("InternalServerError")
    assert "optim_step" in failure["error_message"]
    users = [event for event in events if event.get("event_name") == "user_error"]
    assert len(users) == 1
    assert users[0]["event_data"]["status_code"] == 404
    for seen in hosted.seen:
        assert KEY.encode() not in seen.body
    assert {seen.headers["x-api-key"] for seen in hosted.requests("telemetry")} == {KEY}


DATA = [tinkex.types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})]
PATH = "tinker://run/weights/x"
ENTRIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "get_info": lambda service, training, sampler: service.create_lora_training_client(
        "m"
    ).result(),
    "get_server_capabilities": lambda service, training, sampler: service.get_server_capabilities(),
    "create_model": lambda service, training, sampler: service.create_lora_training_client(
        "m"
    ).result(),
    "create_sampling_session": lambda service, training, sampler: service.create_sampling_client(
        base_model="m"
    ).result(),
    "load_weights": lambda service, training, sampler: service.create_training_client_from_state(
        PATH
    ).result(),
    "forward_backward": lambda service, training, sampler: training.forward_backward(
        DATA, "cross_entropy"
    ).result(10),
    "optim_step": lambda service, training, sampler: training.optim_step(STEP).result(10),
    "save_weights": lambda service, training, sampler: training.save_state("x").result(10),
    "save_weights_for_sampler": lambda service, training, sampler: (
        training.save_weights_for_sampler("x").result(10)
    ),
    "asample": lambda service, training, sampler: sampler.sample(PROMPT, 1, PARAMS).result(10),
}


@pytest.mark.covers("1.6/5")
def test_failed_client_call_is_reported_once_and_session_lives(
    hosted: FaultyServer,
) -> None:
    hosted.script("create_session", Answer(body={"session_id": "s"}))
    with ServiceClient(api_key=KEY) as service:
        training, sampler = (
            service.create_lora_training_client("m").result(),
            service.create_sampling_client(base_model="m").result(),
        )
        for entry, call in ENTRIES.items():
            hosted.script(entry, Answer(422, {"detail": f"no {entry} today"}))
            with pytest.raises(tinkex.UnprocessableEntityError, match=f"no {entry} today"):
                call(service, training, sampler)
        reporter = service.get_telemetry()
        assert reporter is not None
        assert reporter.flush(sync=True)
        messages = [
            event["event_data"]["message"]
            for event in told(hosted)
            if event.get("event_name") == "user_error"
        ]
        counts = {
            entry: sum(f": no {entry} today" in message for message in messages)
            for entry in ENTRIES
        }
        assert counts == dict.fromkeys(ENTRIES, 1)
        assert "SESSION_END" not in kinds(hosted)


STUCK = {
    "401": Answer(401),
    "404": Answer(404),
    "500": Answer(500),
    "hangs": Answer(delay=30),
    "dropped": Answer(drop=True),
    "nonsense": Answer(body=b"nonsense"),
}


@pytest.mark.covers("U27", "W08", "W03")
@pytest.mark.parametrize("stuck", STUCK)
def test_errors_and_closing_do_not_wait_for_telemetry(
    hosted: FaultyServer, stuck: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosted.script("telemetry", STUCK[stuck])
    service = ServiceClient(api_key=KEY)
    sampler = service.create_sampling_client(base_model="m").result()
    hosted.script("asample", Answer(422, {"detail": "bad prompt"}))
    waits = []
    for _ in range(3):
        began = time.monotonic()
        with within(5), pytest.raises(tinkex.UnprocessableEntityError, match="bad prompt"):
            sampler.sample(PROMPT, 1, PARAMS).result(10)
        waits.append(time.monotonic() - began)
    assert min(waits) < 0.5
    wait_until(lambda: hosted.requests("telemetry"))
    with within(5):
        service.close().result(10)
    assert hosted.requests("sessions/s/finish")
    # What was not sent is let go of; the server that hangs does not hear of it.
    wait_until(lambda: hosted.open_connections == (1 if stuck == "hangs" else 0))
    assert KEY not in caplog.text


def test_long_session_keeps_its_connections_while_telemetry_fails(hosted: FaultyServer) -> None:
    hosted.script("telemetry", Answer(500))
    with ServiceClient(api_key=KEY) as service:
        service.get_server_capabilities()
        reporter = service.get_telemetry()
        assert reporter is not None
        for _ in range(3):
            reporter.flush()
            service.get_server_capabilities()
        assert reporter.is_alive
        hosted.script("telemetry", Answer(body={"status": "accepted"}))
        reporter.log("later")
    wait_until(lambda: "SESSION_END" in kinds(hosted))


@pytest.mark.covers("1.4.4/4")
def test_disabled_telemetry_sends_nothing(
    hosted: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ServiceClient(api_key=KEY) as service:
        hosted.script("create_sampling_session", Answer(404))
        with pytest.raises(tinkex.NotFoundError):
            service.create_sampling_client(base_model="m").result()
        assert service.get_telemetry() is None
    time.sleep(0.1)
    assert hosted.requests("telemetry") == []


def test_redirect_to_another_server_carries_no_secret(hosted: FaultyServer) -> None:
    """The same socket under another name stands for it."""
    elsewhere = hosted.base_url.replace("127.0.0.1", "localhost")
    with ServiceClient(base_url=elsewhere, api_key=KEY) as service:
        hosted.script("create_sampling_session", Answer(404))
        with pytest.raises(tinkex.NotFoundError):
            service.create_sampling_client(base_model="m").result()
        assert service.get_telemetry() is None
    time.sleep(0.1)
    assert hosted.requests("create_session")
    assert hosted.requests("telemetry") == []


def test_dropped_client_reports_its_end(hosted: FaultyServer) -> None:
    service = ServiceClient(api_key=KEY)
    service.get_server_capabilities()
    reporter = service.get_telemetry()
    assert reporter is not None
    del service
    gc.collect()
    wait_until(lambda: "SESSION_END" in kinds(hosted))
    wait_until(lambda: not reporter.is_alive)
    wait_until(lambda: hosted.open_connections == 0)


@pytest.mark.covers("1.4.4/4", "D10")
def test_children_that_are_closed_or_dropped_leave_the_reporter_alone(hosted: FaultyServer) -> None:
    with ServiceClient(api_key=KEY) as service:
        client, sampler = (
            service.create_lora_training_client("m").result(),
            service.create_sampling_client(base_model="m").result(),
        )
        reporter = service.get_telemetry()
        with pytest.warns(FutureWarning, match="RestClient"):
            rest = service.create_rest_client()
        rest.close().result(5)
        del client, sampler, rest
        gc.collect()
        time.sleep(0.1)
        assert reporter is not None
        assert reporter.is_alive
        assert reporter.log("still here")
        assert reporter.flush(sync=True)
        assert "SESSION_END" not in kinds(hosted)
    wait_until(lambda: "SESSION_END" in kinds(hosted))
    names = [event.get("event_name") for event in told(hosted)]
    assert "still here" in names


def test_session_that_cannot_be_opened_reveals_no_secret(hosted: FaultyServer) -> None:
    hosted.script("create_session", Answer(403, {"detail": "not you"}))
    with (
        ServiceClient(api_key=KEY) as service,
        pytest.raises(tinkex.PermissionDeniedError, match="not you"),
    ):
        service.get_server_capabilities()
    time.sleep(0.1)
    assert hosted.requests("telemetry") == []


PROGRAM = """
import atexit, sys, time
import tinkex, tinkex.client.settings.config as config, tinkex.telemetry
config.HOSTED_URL = tinkex.telemetry.sending.HOSTED_URL = sys.argv[1]
service = tinkex.ServiceClient(api_key="tml-very-secret")
service.create_sampling_client(base_model="m").result()
ended = time.monotonic()
atexit.register(lambda: print(time.monotonic() - ended))
"""


@pytest.mark.parametrize(
    "answer", [Answer(body={"status": "accepted"}), Answer(delay=30)], ids=["heard", "hangs"]
)
def test_ending_program_reports_its_end_and_exits_soon(
    hosted: FaultyServer, answer: Answer
) -> None:
    hosted.script("telemetry", answer)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, hosted.base_url],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "SESSION_START" in kinds(hosted)
    if not answer.delay:
        assert kinds(hosted)[-1] == "SESSION_END"
    assert float(done.stdout) < 6
    assert hosted.requests("sessions/s/finish")
