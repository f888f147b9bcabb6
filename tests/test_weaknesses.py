"""The weaknesses that were seen in the official client, one by one: none of them is ours.

Each test is named after a weakness (W01 to W27) and fails on the behaviour that was seen. The
client is the public one; the server is a scripted one where it has to misbehave, and ours over the
fake engine otherwise.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import serving, wait_until
from tinkex import AdminClient, RestClient, ServiceClient, TrainingClient, types
from tinkex.client.futures.batch_polling import ACK_DELAY
from tinkex.engine.fake import FakeEngine
from tinkex.wire import codec, protobuf_passes, protobuf_schema

KEY = "tml-very-secret"
STEP = types.AdamParams(learning_rate=0.1)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3, seed=1)
RUN = "sess:train:0"
PATH = f"tinker://{RUN}/weights/a"


def data(count: int) -> list[types.Datum]:
    """Small examples, each another."""
    tokens = [[index, index + 1, index + 2] for index in range(count)]
    return [
        types.Datum(
            types.ModelInput.from_ints(each), {"target_tokens": [token + 1 for token in each]}
        )
        for each in tokens
    ]


PASSED = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData.from_numpy(np.array([-1.0], np.float32))}],
    {"loss:sum": 1.0},
)
SAMPLED = types.SampleResponse(
    [
        types.SampledSequence(
            "length", tokens_np=np.array([7], np.int32), logprobs_np=np.array([-1.0], np.float32)
        )
    ]
)


def bulk(value: Any) -> Answer:
    """A result as the servers send it."""
    return Answer(body=codec.encode(value).data, content_type=codec.PROTOBUF)


RESULTS: dict[str, Answer] = {
    "created": Answer(body={"model_id": RUN}),
    "pass": bulk(PASSED),
    "step": Answer(body={"metrics": {}}),
    "sampler": Answer(body={"sampling_session_id": "sess:sample:1"}),
    "sample": bulk(SAMPLED),
}


def result(seen: Seen) -> Answer:
    """The result that a request's id asks for, there at once."""
    return RESULTS[seen.json["request_id"]]


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """A server on which everything works, until it is told otherwise."""
    with faulty_server() as server:
        server.script("forward_backward", Answer(body={"request_id": "pass"}))
        server.script("optim_step", Answer(body={"request_id": "step"}))
        server.script("save_weights_for_sampler", Answer(body={"request_id": "sampler"}))
        server.script(
            "create_sampling_session", Answer(body={"sampling_session_id": "sess:sample:0"})
        )
        server.script(
            "asample", Answer(body={"request_id": "sample", "sample_sequence_ids": ["q:0"]})
        )
        server.script("retrieve_future", result)
        yield server


@pytest.fixture
def service(faulty: FaultyServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=faulty.base_url, api_key=KEY) as client:
        yield client


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits before a retry are short."""
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.01)


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """Sets program defaults that are forgotten afterwards."""
    yield tinkex.configure
    tinkex.configure()


def numbers(faulty: FaultyServer) -> list[int]:
    """The numbers of the requests of a run in the order of arrival; a pass over nothing only spends
    its number."""
    found = []
    for seen in list(faulty.seen):
        if seen.path == "forward_backward":
            request = codec.decode(
                types.ForwardBackwardRequest, seen.body, seen.headers["content-type"]
            )
            if request.forward_backward_input.data:
                found.append(request.seq_id or 0)
        elif seen.path == "optim_step":
            found.append(seen.json["seq_id"])
    return found


def cut_into_ones(faulty: FaultyServer) -> None:
    """Have calls cut into chunks of one example."""
    faulty.script("client/config", Answer(body={"fwdbwd_max_chunk_len": 1}))


class Counted:
    """Requests that reached our server, and those that are still being answered."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.open: list[str] = []

    def polls(self) -> list[str]:
        return [path for path in self.open if "retrieve_future" in path]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts the requests to the servers that the test starts."""
    from tinkex.server import app

    count, original = Counted(), app.create_app

    def create_app(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await made(scope, receive, send)
                return
            path = scope["path"].removeprefix("/api/v1/")
            count.paths.append(path)
            count.open.append(path)
            try:
                await made(scope, receive, send)
            finally:
                count.open.remove(path)

        return counting

    monkeypatch.setattr(app, "create_app", create_app)
    return count


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def run_program(code: str, *arguments: str, seconds: float = 60) -> str:
    """Return the output of a separate program."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ── order ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W01")
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_w01_a_failed_chunk_does_not_wedge_the_client(
    faulty: FaultyServer, service: ServiceClient, refused: int
) -> None:
    """Whichever of three chunks is refused, all were sent, and the next call goes out and is
    answered."""
    cut_into_ones(faulty)
    client = service.create_lora_training_client("m").result()

    def refuse(seen: Seen) -> Answer:
        request = codec.decode(
            types.ForwardBackwardRequest, seen.body, seen.headers["content-type"]
        )
        good = request.seq_id != refused or not request.forward_backward_input.data
        return (
            Answer(body={"request_id": "pass"})
            if good
            else Answer(422, {"detail": "this chunk is bad"})
        )

    faulty.script("forward_backward", refuse)
    bad = client.forward_backward(data(3), "cross_entropy")
    after = client.optim_step(STEP)
    assert after.result(5).metrics == {}
    with pytest.raises(tinkex.UnprocessableEntityError, match="this chunk is bad"):
        bad.result(5)
    # what the first answer refuses is also tried as JSON
    assert sorted(set(numbers(faulty))) == [1, 2, 3, 4]
    assert numbers(faulty)[-1] == 4


@pytest.mark.covers("W02")
def test_w02_a_cancelled_or_timed_out_call_does_not_wedge_the_client(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """Behind a slow submission one call is given up, waits for two others run out, and the last is
    answered."""
    client, gate = service.create_lora_training_client("m").result(), threading.Event()
    faulty.script("forward_backward", Answer(body={"request_id": "pass"}, until=gate.is_set))
    slow = client.forward_backward(data(1), "cross_entropy")
    timed_out, given_up, waited = (client.optim_step(STEP) for _ in range(3))
    with pytest.raises(TimeoutError):
        timed_out.result(0.05)
    assert given_up.cancel()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waited, 0.05)

    asyncio.run(impatient())
    gate.set()
    assert client.optim_step(STEP).result(5).metrics == {}
    for future in (slow, timed_out, waited):
        future.result(5)
    # a pass and three steps: no gap where the fourth would have been
    assert numbers(faulty) == [1, 2, 3, 4]


# ── the key ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W03")
@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_w03_the_key_is_in_no_telemetry_and_no_log(
    faulty: FaultyServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    """After a failed poll with telemetry on, the key went out in its own header only."""
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    caplog.set_level(logging.DEBUG)
    faulty.script("telemetry", Answer(body={"status": "accepted"}))
    refused = Answer(status, {"detail": "no"})
    faulty.script(
        "retrieve_future",
        lambda seen: result(seen) if seen.json["request_id"] == "created" else refused,
    )
    with ServiceClient(base_url=faulty.base_url, api_key=KEY) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.APIStatusError) as caught:
            client.optim_step(STEP).result(5)
    assert faulty.requests("optim_step")[0].headers["x-api-key"] == KEY
    for seen in faulty.seen:
        assert KEY.encode() not in seen.body
        assert KEY not in seen.path
        assert KEY not in str(
            {name: value for name, value in seen.headers.items() if name != "x-api-key"}
        )
    assert faulty.requests("telemetry") == []  # only the hosted service is told anything
    assert KEY not in caplog.text
    assert KEY not in f"{caught.value} {vars(caught.value)}"


@pytest.mark.covers("W04")
def test_w04_the_key_does_not_follow_redirects_to_another_origin(faulty: FaultyServer) -> None:
    with faulty_server() as elsewhere:
        elsewhere.script(
            "/there", Answer(body={"entries": [], "training_run_ids": [], "sampler_ids": []})
        )
        moved = Answer(302, headers={"Location": f"{elsewhere.base_url}/there"})
        faulty.script("audit", moved)
        faulty.script("sessions/s", moved)
        with AdminClient(base_url=faulty.base_url, api_key=KEY) as admin:
            assert admin.get_audit_log().result(5).entries == []
        with RestClient(base_url=faulty.base_url, api_key=KEY) as client:
            assert client.get_session("s").result(5).sampler_ids == []
        assert [seen.headers["x-api-key"] for seen in faulty.seen] == [KEY, KEY]
        assert len(elsewhere.seen) == 2
        assert KEY not in repr(elsewhere.seen)


# ── the same request again ────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W05")
@pytest.mark.usefixtures("hurried")
def test_w05_a_nameless_save_sent_again_is_the_same_request(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result()
    faulty.script(
        "save_weights_for_sampler",
        Answer(503),
        Answer(drop=True),
        Answer(503),
        Answer(body={"request_id": "sampler"}),
    )
    client.save_weights_and_get_sampling_client().result()
    client.save_weights_and_get_sampling_client().result()
    *tries, other = [seen.json for seen in faulty.requests("save_weights_for_sampler")]
    assert len(tries) == 4
    assert all(again == tries[0] for again in tries)
    assert (other["seq_id"], other["sampling_session_seq_id"]) == (
        tries[0]["seq_id"] + 1,
        tries[0]["sampling_session_seq_id"] + 1,
    )


# ── loops that are not blocked ────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W06")
def test_w06_user_code_does_not_block_the_network_loop(tmp_path: Path) -> None:
    """A loss function thinks until a sample has been drawn meanwhile."""
    began, drawn = threading.Event(), threading.Event()

    def thoughtful(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        began.set()
        assert drawn.wait(30)
        return -logprobs[0].sum(), {}

    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        sampler = service.create_sampling_client(base_model="fake").result()
        sampler.sample(PROMPT, 1, PARAMS).result(5)
        future = client.forward_backward_custom(data(1), thoughtful)
        assert began.wait(20)
        sampler.sample(PROMPT, 1, PARAMS).result(20)
        drawn.set()
        assert "loss:sum" in future.result(10).metrics


@pytest.mark.covers("W06")
def test_w06_large_bodies_are_not_written_on_the_network_loop(
    faulty: FaultyServer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No encoding on the loop's own thread takes more than a few milliseconds of its time."""
    taken: list[tuple[str, float]] = []
    original = codec.encode

    def encode(*args: Any, **kwargs: Any) -> Any:
        before = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            taken.append((threading.current_thread().name, time.thread_time() - before))

    monkeypatch.setattr(codec, "encode", encode)
    client = service.create_lora_training_client("m").result()
    sampler = service.create_sampling_client(base_model="m").result()
    tokens = np.arange(4096) % 1000
    many = [
        types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})
        for _ in range(1000)
    ]
    client.forward_backward(many, "cross_entropy").result(20)
    sampler.sample(types.ModelInput.from_ints(np.arange(32_768) % 1000), 1, PARAMS).result(20)
    assert any(name != "tinkex" for name, _ in taken)
    assert max((seconds for name, seconds in taken if name == "tinkex"), default=0.0) < 0.01


@pytest.mark.covers("W07")
def test_w07_async_methods_do_not_block_the_callers_loop(faulty: FaultyServer) -> None:
    """The server answers each first step after the caller's loop has ticked on."""
    ticks, stood_still = 0, list[str]()

    def ticked_on(seen: Seen) -> Callable[[], bool]:
        wanted, latest = ticks + 5, time.monotonic() + 10

        def ticked() -> bool:
            if ticks < wanted and time.monotonic() < latest:
                return False
            if ticks < wanted:
                stood_still.append(seen.path)
            return True

        return ticked

    for path, body in {
        "client/config": {},
        "create_session": {"session_id": "s"},
        "create_model": {"request_id": "created"},
        "save_weights_for_sampler": {"request_id": "sampler"},
    }.items():
        faulty.script(path, lambda seen, body=body: Answer(body=body, until=ticked_on(seen)))  # type: ignore[misc]

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        service = ServiceClient(base_url=faulty.base_url)
        client = await service.create_lora_training_client("m")
        await client.save_weights_and_get_sampling_client()
        await service.create_sampling_client(base_model="m")
        await service.get_server_capabilities_async()
        await client.optim_step(STEP)
        ticking.cancel()
        await service.close()

    asyncio.run(run())
    assert ticks > 15
    assert stood_still == []


# ── errors in time ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W08")
def test_w08_errors_do_not_wait_for_telemetry(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    faulty.script("telemetry", Answer(500, delay=60))
    faulty.script("asample", Answer(422, {"detail": "bad prompt"}))
    service = ServiceClient(base_url=faulty.base_url, api_key=KEY)
    sampler = service.create_sampling_client(base_model="m").result()
    with within(10), pytest.raises(tinkex.UnprocessableEntityError, match="bad prompt"):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    with within(10):
        service.close().result(20)
    with pytest.raises(RuntimeError, match="closed"):
        sampler.sample(PROMPT, 1, PARAMS).result(20)


IMPATIENT = {
    "500": Answer(500),
    "408": Answer(408),
    "try_again": Answer(body={"type": "try_again", "request_id": "step", "queue_state": "active"}),
}


@pytest.mark.covers("W09", "24.futures.3")
@pytest.mark.parametrize("kind", IMPATIENT)
def test_w09_a_failing_server_is_not_polled_in_a_hot_loop(
    faulty: FaultyServer, service: ServiceClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A server that answers each poll at once and without a result hears from a future a few times
    a second."""
    client = service.create_lora_training_client("m").result()
    caplog.set_level(logging.WARNING)
    faulty.script("retrieve_future", IMPATIENT[kind])
    before = len(faulty.requests("retrieve_future"))
    began = time.monotonic()
    future = client.optim_step(STEP)
    time.sleep(1.5)
    wait_until(lambda: len(faulty.requests("retrieve_future")) >= before + 2)
    polls, warnings = len(faulty.requests("retrieve_future")) - before, len(caplog.records)
    assert polls <= 8 * (time.monotonic() - began)
    faulty.script("retrieve_future", result)
    assert future.result(10).metrics == {}
    assert warnings <= 2


@pytest.mark.covers("W10", "24.http.6")
def test_w10_an_unreachable_server_is_named_soon(
    configured: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert tinkex.Config.resolve(base_url=f"http://127.0.0.1:{port}").first_contact_patience <= 10
    configured(first_contact_patience=1.0)
    service = ServiceClient(base_url=f"http://127.0.0.1:{port}")
    with within(20), pytest.raises(tinkex.APIConnectionError) as caught:
        service.get_server_capabilities()
    text = str(caught.value)
    assert f"127.0.0.1:{port}" in text
    assert "refused" in text.lower() or "connect call failed" in text.lower()
    assert "hint:" in text
    assert f"127.0.0.1:{port}" in caplog.text  # and something was said before it was given up
    service.close().result(5)


# ── cost ──────────────────────────────────────────────────────────────────────────────────────────

COST = """
import sys, time
began = time.process_time()
{code}
spent = time.process_time() - began
try:
    lines = open("/proc/self/status").read().splitlines()
    most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
except OSError:
    most = 0
print(spent, most, "torch" in sys.modules)
"""
COMMAND = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    sys.argv = ["tinkex", {argument!r}]
    from tinkex.cli.main import main
    main()
"""
IMPORTS = {
    "import": "import tinkex; tinkex.ServiceClient; tinkex.types.AdamParams",
    "version": COMMAND.format(argument="--version"),
    "help": COMMAND.format(argument="--help"),
}


@pytest.mark.covers("W11")
@pytest.mark.parametrize("what", IMPORTS)
def test_w11_importing_is_quick_also_for_the_command_line(what: str) -> None:
    runs = [run_program(COST.format(code=IMPORTS[what])).split() for _ in range(2)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.8
    assert min(int(megabytes) for _, megabytes, _ in runs) < 100
    assert runs[0][2] == "False"


@pytest.mark.covers("W12")
def test_w12_bfloat16_tensors_are_read_right(faulty: FaultyServer, service: ServiceClient) -> None:
    """In a tensor of its own, and among those of many examples."""
    raw, brain_float = struct.pack("<2H", 0x3F80, 0xC000), 4
    sampled = protobuf_schema.message("SampleResponse")()
    sampled.target_prompt_logprobs.dense = raw
    sampled.target_prompt_logprobs.dtype = brain_float
    sampled.target_prompt_logprobs.shape.extend([2, 1])
    passed = protobuf_schema.message("ForwardBackwardOutput")()
    field = passed.loss_fn_outputs.add(num_datums=1).fields["logprobs"]
    field.data, field.dtype, field.offsets = raw, brain_float, struct.pack("<2q", 0, 4)
    answers = RESULTS | {
        "sample": Answer(body=sampled.SerializeToString(), content_type=codec.PROTOBUF),
        "pass": Answer(body=passed.SerializeToString(), content_type=codec.PROTOBUF),
    }
    faulty.script("retrieve_future", lambda seen: answers[seen.json["request_id"]])
    response = (
        service.create_sampling_client(base_model="m").result().sample(PROMPT, 1, PARAMS).result(5)
    )
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.tolist() == [[1.0], [-2.0]]
    output = (
        service.create_lora_training_client("m")
        .result()
        .forward(data(1), "cross_entropy")
        .result(5)
    )
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == [1.0, -2.0]


ODD_METRICS = {"plain": 1.0, "a:b:mean": 2.0, "c:mean": 3.0, "d:last": 4.0, "loss:sum": 5.0}


@pytest.mark.covers("W13")
@pytest.mark.parametrize("chunks", [1, 2])
def test_w13_metrics_reducer_accepts_mixed_metrics(
    faulty: FaultyServer, service: ServiceClient, caplog: pytest.LogCaptureFixture, chunks: int
) -> None:
    """Names without a colon or with two, means over no records, unknown reductions: nothing raises
    or is lost."""
    cut_into_ones(faulty)
    answers = RESULTS | {"pass": bulk(types.ForwardBackwardOutput("ArrayRecord", [], ODD_METRICS))}
    faulty.script("retrieve_future", lambda seen: answers[seen.json["request_id"]])
    client = service.create_lora_training_client("m").result()
    metrics = client.forward_backward(data(chunks), "cross_entropy").result(5).metrics
    assert metrics["loss:sum"] == 5.0 * chunks
    lost = [name for name in ODD_METRICS if name not in metrics]
    assert [name for name in lost if name not in caplog.text] == []


@pytest.mark.covers("W14")
@pytest.mark.parametrize(
    "late",
    [
        Answer(body={"supported_models": []}, delay=60),
        Answer(body={"supported_models": []}, pieces=20, pause=1.5),
    ],
    ids=["silent", "trickling"],
)
def test_w14_configured_timeouts_are_used(
    faulty: FaultyServer, configured: Callable[..., None], late: Answer
) -> None:
    configured(timeout=1.0, max_retries=0)
    with ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
        faulty.script("get_server_capabilities", late)
        began = time.monotonic()
        with pytest.raises(tinkex.APITimeoutError, match=r"get_server_capabilities.* 1 s"):
            service.get_server_capabilities()
        assert 0.9 < time.monotonic() - began < 20


# ── lifetimes ─────────────────────────────────────────────────────────────────────────────────────

FORKED = """
import multiprocessing, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import tinkex
prompt, params = tinkex.ModelInput.from_ints([1, 2, 3]), tinkex.SamplingParams(max_tokens=3, seed=1)

def draw(sampler):
    return sampler.sample(prompt, 1, params).result(8).sequences[0].tokens

service = tinkex.ServiceClient(base_url=sys.argv[1])
sampler = service.create_sampling_client(base_model="fake").result()
expected = draw(sampler)
child = os.fork()
if child == 0:
    try:
        print("inherited:", draw(sampler) == expected, flush=True)
    except tinkex.TinkerError as error:
        said = str(error)
        print("inherited:", "forked" in said and "ServiceClient in the child" in said, flush=True)
    except BaseException as error:
        print("inherited:", type(error).__name__, flush=True)
    with tinkex.ServiceClient(base_url=sys.argv[1]) as fresh:
        sampler = fresh.create_sampling_client(base_model="fake").result()
        print("fresh:", draw(sampler) == expected, flush=True)
    os._exit(0)
os.waitpid(child, 0)
with multiprocessing.get_context("fork").Pool(1) as pool:
    print("worker:", pool.apply_async(draw, (sampler,)).get(8) == expected, flush=True)
print("parent:", draw(sampler) == expected, flush=True)
service.close().result(5)
"""


@pytest.mark.covers("W15")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_w15_nothing_hangs_after_a_fork(tmp_path: Path) -> None:
    """An inherited client works or says at once why not; a new one, one handed to a worker and the
    parent's work."""
    with serving(FakeEngine(), tmp_path) as url, within(20):
        shown = run_program(FORKED, url)
    assert shown.split("\n") == [
        "inherited: True",
        "fresh: True",
        "worker: True",
        "parent: True",
        "",
    ]


@pytest.mark.covers("W16", "C32")
def test_w16_dropped_clients_stop_their_heartbeats(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four sessions two are dropped, one lives on in its service client and one in a training
    client."""
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_SECONDS", 0.1)
    opened = iter(range(10))
    faulty.script("create_session", lambda _: Answer(body={"session_id": f"s{next(opened)}"}))
    services = [ServiceClient(base_url=faulty.base_url) for _ in range(4)]
    clients = [service.create_lora_training_client("m").result() for service in services]

    def beats(name: str) -> int:
        return [seen.json["session_id"] for seen in faulty.requests("session_heartbeat")].count(
            name
        )

    def go_on(*names: str) -> None:
        """A few more beats of each of these."""
        for name in names:
            count = beats(name)
            wait_until(lambda name=name, count=count: beats(name) >= count + 3)  # type: ignore[misc]

    wait_until(lambda: all(beats(f"s{number}") for number in range(4)))
    kept = clients[3]
    del services[1:], clients
    gc.collect()
    go_on("s0", "s3")  # what was under way has ended by then
    dropped = beats("s1"), beats("s2")
    go_on("s0", "s3")
    assert (beats("s1"), beats("s2")) == dropped
    assert kept.optim_step(STEP).result(5).metrics == {}
    services[0].close().result(5)
    go_on("s3")
    closed = beats("s0")
    go_on("s3")
    assert beats("s0") == closed  # what was closed is as silent as what was dropped
    assert (beats("s1"), beats("s2")) == dropped
    del kept
    gc.collect()


# ── errors that say something ─────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W17")
@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(403, {"detail": "not yours"}), tinkex.PermissionDeniedError, ["403", "not yours"]),
        (
            Answer(404, {"detail": "no such request"}),
            tinkex.NotFoundError,
            ["404", "no such request"],
        ),
        (Answer(410, {"detail": "expired"}), tinkex.GoneError, ["410", "expired"]),
        (Answer(400, {"detail": "bad id"}), tinkex.BadRequestError, ["400", "bad id"]),
        (
            Answer(body={"path": 5}),
            tinkex.APIResponseValidationError,
            ["SaveWeightsResponse", "path"],
        ),
        (Answer(body={}), tinkex.APIResponseValidationError, ["SaveWeightsResponse", "path"]),
        (
            Answer(body={"error": "disk full", "category": "server"}),
            tinkex.RequestFailedError,
            ["disk full"],
        ),
    ],
    ids=["403", "404", "410", "400", "wrong-field", "missing-field", "failed"],
)
def test_w17_errors_have_types_and_reasons(
    faulty: FaultyServer,
    service: ServiceClient,
    answer: Answer,
    kind: type[Exception],
    words: list[str],
) -> None:
    client = service.create_lora_training_client("m").result()
    faulty.script("save_weights", Answer(body={"request_id": "saved:7"}))
    faulty.script("retrieve_future", answer)
    with pytest.raises(kind) as caught:
        client.save_state("a").result(10)
    error = caught.value
    assert isinstance(error, tinkex.TinkerError)
    text = str(error)
    for word in ["save_weights", *words]:
        assert word in text
    assert not [internal for internal in ("self.", "<class", "model_cls") if internal in text]
    if not isinstance(error, tinkex.APIResponseValidationError):
        assert vars(error)["request_id"] == "saved:7"


@pytest.mark.covers("W17")
def test_w17_a_submission_without_an_id_names_the_field(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result()
    faulty.script("optim_step", Answer(body={"else": 1}))
    with pytest.raises(
        tinkex.APIResponseValidationError, match=r"optim_step at 127.0.0.1.*request_id"
    ):
        client.optim_step(STEP).result(5)


@pytest.mark.covers("W18")
def test_w18_errors_survive_pickling(faulty: FaultyServer, configured: Callable[..., None]) -> None:
    """Every class that can be raised, and one that was."""
    kinds = {kind for name in tinkex.__all__ if inspect.isclass(kind := getattr(tinkex, name))}
    errors: list[Any] = [tinkex.RequestFailedError("what", "r1", "user", hint="do this")]
    errors += [
        tinkex.RecoveryError("what", "exhausted", hint="do this"),
        tinkex.DownloadError("what", "refused", hint="do"),
    ]
    kinds -= {type(error) for error in errors}
    errors += [
        kind("what", hint="do this") for kind in kinds if issubclass(kind, tinkex.TinkerError)
    ]
    assert len(errors) > 12
    configured(timeout=1.0, max_retries=0)
    with ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
        faulty.script("get_server_capabilities", Answer(delay=60))
        with pytest.raises(tinkex.APITimeoutError) as caught:
            service.get_server_capabilities()
    for error in [*errors, caught.value]:
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert vars(back) == vars(error)


# ── connections and round trips ───────────────────────────────────────────────────────────────────


@pytest.mark.covers("W19")
def test_w19_connections_of_training_are_bounded(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """Sixty-four chunks sent together share sixteen connections at most."""
    cut_into_ones(faulty)
    faulty.script("forward_backward", Answer(body={"request_id": "pass"}, delay=0.05))
    client = service.create_lora_training_client("m").result()
    client.forward_backward(data(64), "cross_entropy").result(20)
    sent = faulty.requests("forward_backward")
    assert len(sent) == 64
    assert len({seen.connection for seen in sent}) <= 16


@pytest.mark.covers("W20")
def test_w20_an_operation_takes_two_round_trips(tmp_path: Path, counted: Counted) -> None:
    """One to submit and one that brings the result, also when the result takes a while."""
    with serving(FakeEngine(delay=0.02), tmp_path) as url, ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        client = service.create_lora_training_client("fake", rank=4).result()
        counted.paths.clear()
        for seed in range(10):
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=seed)).result(10)
        assert len(counted.paths) <= 2 * 10 + 2
        counted.paths.clear()
        for _ in range(5):
            client.forward_backward(data(2), "cross_entropy").result(10)
            client.optim_step(STEP).result(10)
        assert len(counted.paths) <= 2 * 10 + 2
        counted.paths.clear()
        futures = [
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=seed))
            for seed in range(50)
        ]
        for future in futures:
            future.result(20)
        assert len(counted.paths) <= 2 * 50 + 5


@pytest.mark.covers("W21")
def test_w21_polling_stops_without_waiters(tmp_path: Path, counted: Counted) -> None:
    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        client = service.create_lora_training_client("fake", rank=4).result()
        for future in [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]:
            future.result(10)
        client.optim_step(STEP).result(10)
        wait_until(lambda: not counted.polls())
        time.sleep(2 * ACK_DELAY)  # the last results are acknowledged once
        counted.paths.clear()
        time.sleep(0.7)
        assert counted.polls() == []
        assert [path for path in counted.paths if path != "session_heartbeat"] == []


ENCODING = """
import json, time
import tinker, tinkex
from tinker._compat import model_dump
from tinkex.wire import codec

tokens = [index % 50_000 for index in range(32_768)]

def theirs():
    prompt = tinker.ModelInput.from_ints(tokens)
    request = tinker.types.SampleRequest(
        prompt=prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=2),
        sampling_session_id="s:sample:0", seq_id=0,
    )
    body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

def ours():
    prompt = tinkex.ModelInput.from_ints(tokens)
    request = tinkex.types.SampleRequest(
        prompt=prompt, num_samples=1, sampling_params=tinkex.SamplingParams(max_tokens=2),
        sampling_session_id="s:sample:0", seq_id=0,
    )
    return codec.encode(request).data

def seconds(function):
    best = 1e9
    for _ in range(15):
        began = time.process_time()
        function()
        best = min(best, time.process_time() - began)
    return best

assert json.loads(theirs())["prompt"] == json.loads(ours())["prompt"]
print(json.dumps([seconds(theirs), seconds(ours)]))
"""


@pytest.mark.slow
@pytest.mark.covers("W22")
def test_w22_prompts_are_encoded_cheaply() -> None:
    """A prompt of 32k tokens, from a list of ints to the bytes of its request: half of the official
    client's CPU."""
    theirs, ours = json.loads(run_program(ENCODING, seconds=100))
    assert ours <= 0.5 * theirs


@pytest.mark.covers("W23")
def test_w23_conflict_fails_soon(faulty: FaultyServer) -> None:
    path = f"training_runs/{RUN}/checkpoints/weights/a/publish"
    faulty.script(path, Answer(409, {"detail": "already public"}))
    conflict = pytest.raises(tinkex.ConflictError, match="already public")
    with RestClient(base_url=faulty.base_url) as client, within(20), conflict:
        client.publish_checkpoint(PATH).result(30)
    assert len(faulty.requests(path)) <= 5


# ── one rule for all ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W24")
def test_w24_the_same_input_follows_the_same_rules_everywhere(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """Tokens and tensors of every kind of number are taken, and mean what the same numbers in a
    list mean."""
    client = service.create_lora_training_client("m").result()
    sampler = service.create_sampling_client(base_model="m").result()
    for kind in (None, np.int64, np.int32, np.uint16, np.uint64):
        tokens: Any = [1, 2, 3] if kind is None else np.array([1, 2, 3], kind)
        values: Any = [0.5, 1, 2] if kind is None else tokens
        datum = types.Datum(
            types.ModelInput.from_ints(tokens), {"target_tokens": tokens, "unlisted": values}
        )
        client.forward_backward([datum], "cross_entropy").result(5)
        sampler.sample(types.ModelInput.from_ints(tokens), 1, PARAMS).result(5)
    flags = types.Datum(
        PROMPT, {"target_tokens": [1, 2, 3], "weights": np.array([True, False, True])}
    )
    client.forward_backward([flags], "cross_entropy").result(5)
    sent = [
        protobuf_passes.decode_forward_backward(seen.body)
        for seen in faulty.requests("forward_backward")
    ]
    passed = [request.forward_backward_input.data[0] for request in sent]
    assert {tuple(datum.model_input.to_ints()) for datum in passed} == {(1, 2, 3)}
    assert {tuple(datum.loss_fn_inputs["target_tokens"].tolist()) for datum in passed} == {
        (1, 2, 3)
    }
    assert passed[0].loss_fn_inputs["unlisted"].tolist() == [0.5, 1.0, 2.0]
    assert passed[-1].loss_fn_inputs["weights"].tolist() == [1.0, 0.0, 1.0]
    prompts = [seen.json["prompt"] for seen in faulty.requests("asample")]
    assert prompts == [{"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}] * 5


@pytest.mark.covers("W24")
def test_w24_asset_pointers_are_sent_in_training_too(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """The protobuf form of a pass has no place for them: the pass is sent as JSON."""
    client = service.create_lora_training_client("m").result()
    pointer = types.ImageAssetPointerChunk(format="png", location="there", expected_tokens=1)
    image = types.Datum(types.ModelInput(chunks=[pointer]), {"target_tokens": [1]})
    assert client.forward_backward([image], "cross_entropy").result(5) is not None
    [seen] = faulty.requests("forward_backward")
    assert seen.headers["content-type"] == "application/json"
    [sent] = seen.json["forward_backward_input"]["data"]
    assert sent["model_input"]["chunks"] == [
        {"type": "image_asset_pointer", "format": "png", "location": "there", "expected_tokens": 1}
    ]


@pytest.mark.covers("W25")
def test_w25_every_call_returns_a_future_for_threads_and_loops(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result()
    sampler = service.create_sampling_client(base_model="m").result()
    faulty.script("sessions", Answer(body={"sessions": []}))

    def calls() -> list[Any]:
        with pytest.warns(FutureWarning, match="RestClient"):
            rest = service.create_rest_client()
        return [
            client.forward(data(1), "cross_entropy"),
            client.forward_backward(data(1), "cross_entropy"),
            client.optim_step(STEP),
            sampler.sample(PROMPT, 1, PARAMS),
            sampler.compute_logprobs(PROMPT),
            rest.list_sessions(),
        ]

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*calls()))

    waited = [future.result(5) for future in calls()]
    awaited = asyncio.run(gathered())
    assert [type(value) for value in waited] == [type(value) for value in awaited]
    for kind in (TrainingClient, tinkex.SamplingClient, RestClient, AdminClient):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or name.endswith("_async") or name == "get_telemetry":
                continue
            if "Future" not in str(inspect.signature(method).return_annotation):
                assert not hasattr(kind, f"{name}_async") or name in ANSWERED_AT_ONCE, name


ANSWERED_AT_ONCE = {
    "drop_gradients",
    "get_base_model",
    "get_info",
    "get_tokenizer",
    "sample_stream",
    "unload_model",
}
"""What gives its value without a future: most of it is known already."""


@pytest.mark.covers("W26", "24.futures.10")
def test_w26_a_timeout_means_the_same_in_threads_and_loops(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """Either way the call goes on, and waiting again, either way, gives its result."""
    client = service.create_lora_training_client("m").result()
    gate = threading.Event()
    faulty.script("retrieve_future", Answer(body={"metrics": {}}, until=gate.is_set))
    future = client.optim_step(STEP)

    async def impatient(limit: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(TimeoutError):
            await limit()

    with pytest.raises(TimeoutError):
        future.result(0.05)
    asyncio.run(impatient(lambda: future.result_async(0.05)))
    asyncio.run(impatient(lambda: asyncio.wait_for(future, 0.05)))
    assert not future.cancelled()
    gate.set()

    async def patient() -> Any:
        return await future

    assert future.result(5) == asyncio.run(patient()) == types.OptimStepResponse(metrics={})
    assert len(faulty.requests("optim_step")) == 1


@pytest.mark.covers("W27")
def test_w27_a_rejected_call_leaves_no_partial_batch(tmp_path: Path, counted: Counted) -> None:
    """One bad example in three thousand: the call fails as a whole, and the next step finds no
    gradient of it."""
    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        clean = service.create_lora_training_client("fake", rank=4).result()
        examples = [data(1)[0]] * 2999
        bad = types.Datum(PROMPT, {"target_tokens": [1, 2, 3], "weights": [1.0]})
        with pytest.raises(tinkex.RequestFailedError, match="datum 2999"):
            client.forward_backward([*examples, bad], "cross_entropy").result(20)
        assert counted.paths.count("forward_backward") == 1
        for each in (client, clean):
            each.forward_backward(data(2), "cross_entropy")
        assert client.optim_step(STEP).result(10) == clean.optim_step(STEP).result(10)
