"""Lifetimes: calls and closing, sessions and their work, programs and their ends, names
and checkpoints."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, faulty_server
from support import MODEL, Wire, make_data, sample_json, serving, step_json, wait_until
from tinkex import AdamParams, LocalBackend, ModelInput, SamplingParams, ServiceClient
from tinkex.client.futures.api_future import start
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.server_limits import Limits
from tinkex.types import Datum

Make = Callable[..., ServiceClient]
DATA = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]
STEP = AdamParams(learning_rate=0.1)
PROMPT = ModelInput.from_ints([1, 2, 3])


def run_program(
    text: str, *arguments: str, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own."""
    places = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    environment = os.environ | {"PYTHONPATH": places, "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


# ── calls and closing ─────────────────────────────────────────────────────────────────────────────


def test_leaving_the_block_waits_for_the_calls_made_in_it(tmp_path: Path) -> None:
    with LocalBackend(data_dir=tmp_path, engine=FakeEngine(delay=0.02)) as backend:
        with ServiceClient(base_url=backend.base_url) as service:
            client = service.create_lora_training_client("fake", rank=4).result()
            for _ in range(5):
                client.forward_backward(DATA, "cross_entropy")
                client.optim_step(STEP)
            saved = client.save_state("final")
        assert saved.done()
        assert saved.result().path.endswith("/weights/final")
        with ServiceClient(base_url=backend.base_url) as second:
            assert (
                second.create_training_client_from_state(saved.result().path)
                .result()
                .get_info()
                .lora_rank
                == 4
            )


def test_error_in_the_block_reaches_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(base_url: str) -> None:
        with ServiceClient(base_url=base_url) as service:
            client = service.create_lora_training_client("fake", rank=4).result()
            for _ in range(3):
                client.optim_step(STEP)
            raise KeyError("mine")

    with LocalBackend(data_dir=tmp_path, engine=FakeEngine(delay=0.1)) as backend:
        with pytest.raises(KeyError, match="mine"):
            fail(backend.base_url)
        assert "3 calls under way: they are dropped" in caplog.text or "2 calls" in caplog.text


@pytest.mark.covers("C33")
@pytest.mark.parametrize(
    ("error", "reason"),
    [(None, "success"), (KeyError("mine"), "errored"), (KeyboardInterrupt(), "interrupted")],
    ids=["success", "errored", "interrupted"],
)
def test_first_reason_for_the_end_stays(
    error: BaseException | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_server() as server:

        def use(service: ServiceClient) -> None:
            with service:
                service.get_server_capabilities()
                if error is not None:
                    raise error

        service = ServiceClient(base_url=server.base_url)
        with pytest.raises(type(error)) if error is not None else contextlib.nullcontext():
            use(service)
        service.close("interrupted", "once more").result(5)
        asyncio.run(_closed(service))
        (finished,) = server.requests("sessions/s/finish")
        assert finished.json == {
            "reason": {"type": reason},
            "detail": repr(error) if error is not None else None,
        }
        with pytest.raises(RuntimeError, match="closed"):
            service.get_server_capabilities()
    assert caplog.text == ""


async def _closed(service: ServiceClient) -> None:
    await service.close()


@pytest.mark.covers("C33")
def test_unused_client_closes_without_request() -> None:
    with faulty_server() as server:
        with ServiceClient(base_url=server.base_url):
            pass
        assert server.seen == []


@pytest.mark.covers("C33")
@pytest.mark.parametrize(
    ("answer", "word"), [(Answer(404), ""), (Answer(403, {"detail": "no"}), "403: no")]
)
def test_server_that_cannot_end_a_session_is_no_error(
    answer: Answer, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_server() as server:
        server.script("sessions/s/finish", answer)
        with ServiceClient(base_url=server.base_url) as service:
            service.get_server_capabilities()
        assert len(server.requests("sessions/s/finish")) == 1
        wait_until(lambda: server.open_connections == 0)
    assert (word in caplog.text) if word else caplog.text == ""


@pytest.mark.covers("C33")
def test_closing_while_the_session_is_being_opened_ends_the_call_that_waits() -> None:
    with faulty_server() as server:
        server.script("create_session", Answer(body={"session_id": "s"}, delay=60))
        service = ServiceClient(base_url=server.base_url)
        waiting = tinkex.SamplingClient.create(service.holder, base_model="m")
        wait_until(lambda: server.requests("create_session"))
        began = time.monotonic()
        service.close().result(20)
        with pytest.raises(tinkex.TinkerError):
            waiting.result(20)
        assert time.monotonic() - began < 30


@pytest.mark.covers("W06")
def test_user_code_in_losses_may_wait_for_the_service(fake_service: Make) -> None:
    """More losses at once than a pool has threads, each waiting for samples."""
    service = fake_service()
    sampler = service.create_sampling_client(base_model="fake").result()

    def loss(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result(20)
        return -logprobs[0].sum(), {}

    clients = [service.create_lora_training_client("fake", rank=4).result() for _ in range(40)]
    futures = [client.forward_backward_custom(DATA, loss) for client in clients]
    assert all("loss:sum" in future.result(30).metrics for future in futures)


# ── programs and their ends ───────────────────────────────────────────────────────────────────────

FAKE = """
import atexit, os, sys, tempfile, threading, time
import tinkex
from tinkex.engine.fake import FakeEngine
backend = tinkex.LocalBackend(data_dir=tempfile.mkdtemp(), engine=FakeEngine())
"""


def test_closing_in_an_exit_handler_does_not_hang() -> None:
    done = run_program(
        FAKE
        + """
service = tinkex.ServiceClient(base_url=backend.base_url)
def late():
    try:
        service.close().result(10)
    except RuntimeError as error:
        print("late:", error)
atexit.register(late)
service.create_sampling_client(base_model="fake").result()
"""
    )
    assert done.returncode == 0, done.stderr
    assert "the program is ending" in done.stdout
    assert done.stderr == ""


def test_program_that_forgets_to_close_ends_quietly_and_its_session_is_finished(
    tmp_path: Path,
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        done = run_program(
            "import sys, tinkex\n"
            "service = tinkex.ServiceClient(base_url=sys.argv[1])\n"
            "print(service.create_lora_training_client('fake', rank=2).result().model_id)",
            url,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        session = done.stdout.strip().split(":")[0]
        assert Wire(url).send("session_heartbeat", {"session_id": session}).status == 410


@pytest.mark.covers("W15")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_can_make_its_own_clients() -> None:
    done = run_program(
        """
import os, sys, tempfile, warnings
warnings.simplefilter("ignore", DeprecationWarning)
os.environ["TINKEX_DATA_DIR"] = tempfile.mkdtemp()
import tinkex, tinkex.local
from tinkex.engine.fake import FakeEngine
tinkex.local.lazy_engine = lambda models=None: FakeEngine()
service = tinkex.ServiceClient(base_url="local")
service.get_server_capabilities()
child = os.fork()
if child == 0:
    try:
        service.get_server_capabilities()
    except tinkex.TinkerError as error:
        print("inherited:", error.message, flush=True)
    with tinkex.ServiceClient(base_url="local") as fresh:
        print("fresh:", fresh.get_server_capabilities().supported_models[0].model_name, flush=True)
    os._exit(0)
os.waitpid(child, 0)
service.close("success").result(10)
"""
    )
    assert done.returncode == 0, done.stderr
    assert (
        "inherited: get_server_capabilities: this client was made before the process forked"
        in done.stdout
    )
    assert "fresh: fake" in done.stdout


FORKING = """
import gc, os, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1])
service.get_server_capabilities()
waiting = tinkex.SamplingClient.create(service.holder, base_model="m")
time.sleep(0.2)
child = os.fork()
if child == 0:
    if sys.argv[2] == "drops":
        del service, waiting
        gc.collect()
        time.sleep(0.2)
        os._exit(0)
    elif sys.argv[2] == "closes":
        service.close().result(5)
        os._exit(0)
    sys.exit(0)
os.waitpid(child, 0)
began = time.monotonic()
service.get_server_capabilities()
print(time.monotonic() - began)
waiting.result(5)
service.close("errored", "by the parent").result(5)
"""


@pytest.mark.covers("W15")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["drops", "closes", "ends"])
def test_forked_child_leaves_connections_of_its_parent_alone(way: str) -> None:
    """Whatever it does to the client that it inherited, the parent's goes on, over the connections
    it had.

    One of them is idle when the process forks, and one waits for an answer.
    """
    with faulty_server() as server:
        server.script(
            "create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}, delay=1.0)
        )
        done = run_program(FORKING, server.base_url, way)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 10
        assert "Unclosed" not in done.stderr
        asked = server.requests("get_server_capabilities")
        assert asked[0].connection == asked[1].connection
        assert len(server.requests("create_sampling_session")) == 1
        (finished,) = server.requests("sessions/s/finish")
        assert finished.json == {"reason": {"type": "errored"}, "detail": "by the parent"}


# ── sessions and their work ───────────────────────────────────────────────────────────────────────


def test_session_that_ends_takes_its_samples_with_it(tmp_path: Path) -> None:
    engine = FakeEngine(delay=0.01)
    with serving(engine, tmp_path) as url:
        with ServiceClient(base_url=url) as service:
            sampler = service.create_sampling_client(base_model="fake").result()
            for _ in range(30):
                sampler.sample(PROMPT, 1, SamplingParams(max_tokens=50_000))
            wait_until(engine.sampling)
        wire = Wire(url)
        wire.model()  # the worker has come round to it
        assert not engine.sampling()


def test_journal_of_session_ended_during_cleanup_stays_deleted(
    tmp_path: Path,
) -> None:
    with (
        LocalBackend(engine=FakeEngine(), data_dir=tmp_path) as backend,
        ServiceClient(base_url=backend.base_url) as one,
        ServiceClient(base_url=backend.base_url) as other,
    ):
        for service in (one, other):
            sampler = service.create_sampling_client(base_model="fake").result()
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result(20)
        assert backend._exchange is not None
        state = backend._exchange._app.state.server
        first, second = state.samples.numbers

        async def tidy() -> bool:
            for session_id in (first, second):
                state.promises.forget_session(session_id)  # as if they had been read long ago
            noting = asyncio.create_task(state.samples.note_read())
            await asyncio.sleep(0)  # until it waits for the disk
            state.sessions.end(second)
            await noting
            return bool(state.journals.samples_directory(second).exists())

        assert not start(tidy()).result(20)


def test_model_is_dropped_if_its_session_ends_during_creation(tmp_path: Path) -> None:
    gate = threading.Event()

    def hold(method: str, subject: str) -> None:
        if method == "optim_step":
            assert gate.wait(20)

    engine = FakeEngine(fail=hold)
    with serving(engine, tmp_path) as url:
        wire = Wire(url)
        busy = wire.model()
        wire.post("optim_step", step_json(busy, 1))
        session = wire.session()
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "fake",
            "lora_config": {"rank": 4},
        }
        wire.post("create_model", body)
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        gate.set()
        wire.model()
        assert f"{session}:train:0" not in engine._adapters
        refused = wire.send("optim_step", step_json(f"{session}:train:0", 1))
        assert refused.status in (404, 410)


def test_run_unloaded_during_its_write_is_no_error(
    fake_service: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gone = threading.Event(), threading.Event()

    def write_results(path: Path, promises: object) -> None:
        begun.set()
        assert gone.wait(10)
        path.write_bytes(b"")  # the directory is not there any more

    service = fake_service()
    path = (
        service.create_lora_training_client("fake", rank=4).result().save_state("s").result(10).path
    )
    monkeypatch.setattr("tinkex.server.runs.snapshot.write_results", write_results)
    client = service.create_training_client_from_state(path).result()
    assert begun.wait(10)
    client.unload_model()
    gone.set()
    service.close().result(10)
    assert "could not be written" not in caplog.text


def test_nameless_samplers_beyond_the_limit_go_to_disk_and_come_back(
    fake_service: Make, tmp_path: Path
) -> None:
    engine = FakeEngine()
    service = fake_service(engine, limits=Limits(snapshots=2))
    client = service.create_lora_training_client("fake", rank=4).result()
    params = SamplingParams(max_tokens=4, seed=1)
    samplers, expected = [], []
    for _ in range(6):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        expected.append(samplers[-1].sample(PROMPT, 1, params).result().sequences[0].logprobs)
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(STEP).result()
    assert len(list((tmp_path / "snapshots").iterdir())) == 4
    drawn = [sampler.sample(PROMPT, 1, params) for sampler in samplers]
    assert [future.result().sequences[0].logprobs for future in drawn] == expected
    assert len({tuple(row) for row in expected if row}) == 6
    service.close("success").result(10)
    deadline = time.monotonic() + 10
    while list((tmp_path / "snapshots").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list((tmp_path / "snapshots").iterdir())


def test_many_checkpoints_sampled_at_once_share_sampler_slots(fake_service: Make) -> None:
    service = fake_service(FakeEngine(), limits=Limits(samplers=2))
    client = service.create_lora_training_client("fake", rank=4).result()
    paths = [client.save_weights_for_sampler(f"c{n}").result().path for n in range(6)]
    samplers = [service.create_sampling_client(model_path=path).result() for path in paths]
    futures = [
        s.sample(PROMPT, 1, SamplingParams(max_tokens=2, seed=n))
        for n in range(4)
        for s in samplers
    ]
    assert all(len(future.result(20).sequences) == 1 for future in futures)


# ── checkpoints and their names ───────────────────────────────────────────────────────────────────


def test_name_saved_again_after_it_expired_gives_the_new_weights(
    fake_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_service()
    client = service.create_lora_training_client("fake", rank=4).result()
    params = SamplingParams(max_tokens=4, seed=1)
    path = client.save_weights_for_sampler("x", ttl_seconds=3600).result().path
    old = service.create_sampling_client(model_path=path).result()
    before = old.sample(PROMPT, 1, params).result().sequences[0].logprobs
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(STEP).result()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 4000)
    assert client.save_weights_for_sampler("x").result().path == path
    # what it began with is in memory
    assert old.sample(PROMPT, 1, params).result().sequences[0].logprobs == before
    after = (
        service.create_sampling_client(model_path=path)
        .result()
        .sample(PROMPT, 1, params)
        .result()
        .sequences[0]
        .logprobs
    )
    assert after != before


def test_data_directory_can_be_relative_and_can_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        LocalBackend(data_dir="rel", engine=FakeEngine()) as backend,
        ServiceClient(base_url=backend.base_url) as one,
    ):
        path = (
            one.create_lora_training_client("fake", rank=4).result().save_state("a").result().path
        )
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        one.create_training_client_from_state(path).result()
    (tmp_path / "rel").rename(tmp_path / "moved")
    moved = LocalBackend(data_dir=tmp_path / "moved", engine=FakeEngine())
    with moved, ServiceClient(base_url=moved.base_url) as two:
        assert (
            two.create_training_client_from_state_with_optimizer(path).result().get_info().lora_rank
            == 4
        )


def test_checkpoint_of_another_base_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    backend = LocalBackend({MODEL: model_dir, "other": model_dir}, data_dir=tmp_path)
    with backend, ServiceClient(base_url=backend.base_url) as service:
        path = (
            service.create_lora_training_client(MODEL, rank=2)
            .result()
            .save_state("a")
            .result()
            .path
        )
        other = service.create_lora_training_client("other", rank=2).result()
        with pytest.warns(FutureWarning, match="load_state"):
            loading = other.load_state(path)
        with pytest.raises(
            tinkex.RequestFailedError, match=r"is of base model 'test/small', this is 'other'"
        ):
            loading.result()


@pytest.mark.covers("W05")
def test_nameless_save_sent_again_with_another_number_is_the_same_request(tmp_path: Path) -> None:
    """As the official client sends it: the sampler's number counts up when a reply was lost."""
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        first = wire.run("save_weights_for_sampler", body)
        assert first["sampling_session_id"].endswith(":sample:0")
        assert wire.run("save_weights_for_sampler", body | {"sampling_session_seq_id": 1}) == first


# ── numbers that are too large, places that are not here ──────────────────────────────────────────


def test_step_that_overflows_is_refused_and_can_be_clipped(service: ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=2).result()
    data = make_data(tinkex.types)
    plain = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    huge = [
        Datum(d.model_input, {**d.loss_fn_inputs, "weights": [1e25] * d.model_input.length})
        for d in data
    ]
    client.forward_backward(huge, "cross_entropy").result()
    with pytest.raises(tinkex.RequestFailedError, match=r"the step overflows.*clip"):
        client.optim_step(STEP).result(20)
    assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] == plain
    metrics = (
        client.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result(20).metrics
    )
    assert metrics is not None
    assert 1e20 < metrics["grad_norm:mean"] < float("inf")


def test_result_that_cannot_be_sent_fails_in_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "optim_step", lambda *_: {"grad_norm:mean": float("inf")})
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        outcome = wire.run("optim_step", step_json(wire.model(), 1))
    assert outcome["category"] == "server"
    assert "cannot be sent" in outcome["error"]


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-31, 1e-20])
def test_tiny_temperatures_are_greedy(service: ServiceClient, temperature: float) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    greedy, tiny = (
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=5, temperature=t, seed=1))
        .result(20)
        .sequences[0]
        .tokens
        for t in (0.0, temperature)
    )
    assert tiny == greedy


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "[::1]:80"}, 200),
    ],
)
def test_open_server_is_not_driven_by_web_pages(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        body = {"tags": [], "sdk_version": "0.36.0"}
        assert Wire(url).send("create_session", body, headers=headers).status == status


def test_gap_times_out_despite_other_arrivals(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path, limits=Limits(gap_seconds=0.6)) as url:
        wire = Wire(url)
        model = wire.model()
        first = wire.post("optim_step", step_json(model, 2))["request_id"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting, numbers = pool.submit(wire.result, first), iter(range(3, 300))
            while not waiting.done():  # it does not begin anew with each that comes
                wire.post("optim_step", step_json(model, next(numbers)))
                time.sleep(0.05)
        assert "never arrived" in waiting.result()["error"]


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        body = b'{"prompt":' * 20_000 + b"1" + b"}" * 20_000
        assert wire.send("asample", body).status == 400
        assert wire.send("forward_backward", body).status == 400
        assert wire.run("asample", sample_json(_sampler(wire)))["sequences"]


def _sampler(wire: Wire) -> str:
    body = {"session_id": wire.session(), "sampling_session_seq_id": 0, "base_model": "fake"}
    return str(wire.post("create_sampling_session", body)["sampling_session_id"])


def test_sparse_tensor_is_checked_before_it_is_spread_out() -> None:
    from tinkex.engine.losses.examples import Room, read_examples
    from tinkex.engine.losses.table import LOSSES

    columns = 1 << 16
    targets = tinkex.TensorData([1], "int64", [3, columns], [0, 1, 1, 1], [0])
    datum = Datum(PROMPT, {"target_tokens": targets})
    with pytest.raises(EngineError, match=rf"shape \[3, {columns}\]; at most"):
        read_examples([datum], LOSSES["cross_entropy"], {}, Room(vocab=100, context=100))
