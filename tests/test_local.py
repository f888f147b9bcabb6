"""The embedded backend: shared and let go, closed with a clear error, and as honest about faults as
a socket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex import LocalBackend, RestClient, ServiceClient, local
from tinkex.client.futures.api_future import start
from tinkex.client.http.asgi_exchange import AsgiExchange
from tinkex.client.http.exchange import HttpRequest
from tinkex.engine.api import EngineError
from tinkex.engine.base_models import describe
from tinkex.engine.fake import FakeEngine
from tinkex.engine.lazy import LazyEngine

STEP = tinkex.AdamParams(learning_rate=0.1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FakeEngine]]:
    """The engines that `base_url="local"` made, fake ones here; the data directory is the test's
    own."""
    engines: list[FakeEngine] = []

    def make(models: Any = None) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    monkeypatch.setattr(local, "lazy_engine", make)
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    yield engines
    assert local._shared == {}


def eventually(condition: Callable[[], bool]) -> bool:
    """Return True if something becomes true within a few seconds."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def engine_threads() -> int:
    return sum(thread.name == "tinkex-engine" for thread in threading.enumerate())


def test_clients_share_one_backend_and_the_last_closes_it(made: list[FakeEngine]) -> None:
    before = engine_threads()
    first, second = ServiceClient(base_url="local"), ServiceClient(base_url="local")
    assert made == []  # nothing before the first call
    client = first.create_lora_training_client("fake", rank=4).result()
    sampler = second.create_sampling_client(base_model="fake").result()
    assert len(made) == 1
    assert engine_threads() == before + 1
    first.close().result(10)
    assert sampler.get_base_model() == "fake"
    assert len(local._shared) == 1
    second.close().result(10)
    assert local._shared == {}
    assert eventually(lambda: engine_threads() == before)
    with (  # another one starts afresh
        ServiceClient(base_url="local") as third,
        pytest.raises(tinkex.GoneError, match="create_training_client_from_state"),
    ):
        third._session.call(_step, third, client.model_id).result(10)
    assert len(made) == 2


async def _step(service: ServiceClient, model_id: str) -> Any:
    from tinkex.types import OptimStepRequest
    from tinkex.wire import protocol

    request = OptimStepRequest(model_id=model_id, seq_id=1, adam_params=STEP)
    return await service._session.transport.call(protocol.OPTIM_STEP, request)


def test_dropped_client_releases_its_engine(made: list[FakeEngine]) -> None:
    before = engine_threads()
    service = ServiceClient(base_url="local")
    client = service.create_lora_training_client("fake", rank=4).result()
    assert client.optim_step(STEP).result(10).metrics is not None
    del service
    gc.collect()
    assert client.optim_step(STEP).result(10).metrics is not None  # a client of it is enough
    del client
    assert eventually(lambda: local._shared == {})
    assert eventually(lambda: engine_threads() == before)


def test_unused_client_releases_its_engine(made: list[FakeEngine]) -> None:
    service = ServiceClient(base_url="local")
    assert len(local._shared) == 1
    del service
    assert eventually(lambda: local._shared == {})
    with ServiceClient(base_url="local"):
        pass
    assert local._shared == {}
    assert made == []


def test_checkpoints_outlive_a_backend(made: list[FakeEngine]) -> None:
    with ServiceClient(base_url="local") as service:
        path = (
            service.create_lora_training_client("fake", rank=4)
            .result()
            .save_state("a")
            .result(10)
            .path
        )
    with ServiceClient(base_url="local") as service:
        assert service.create_training_client_from_state(path).result().get_info().lora_rank == 4


def test_environment_can_select_the_local_engine(
    made: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    with ServiceClient() as service:
        assert service.get_server_capabilities().supported_models[0].model_name == "fake"


def test_engine_is_created_on_first_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[FakeEngine, str]] = []

    def make(models: Any) -> FakeEngine:
        about = [describe(name, directory) for name, directory in models.items()]
        made.append((FakeEngine(about), threading.current_thread().name))
        return made[-1][0]

    monkeypatch.setattr(local, "make_engine", make)
    with LocalBackend(data_dir=tmp_path) as backend:
        with ServiceClient(base_url=backend.base_url) as service:
            assert service.get_server_capabilities().model_names() == ["tinkex/tiny"]
            assert RestClient(service.holder).list_user_checkpoints().result().checkpoints == []
        assert made == []  # also not for the end of a session, when there is nothing to forget
        with ServiceClient(base_url=backend.base_url) as service:
            client = service.create_lora_training_client("tinkex/tiny", rank=4).result()
            client.optim_step(STEP)
            client.save_weights_and_get_sampling_client().result()
    ((_, thread),) = made
    assert thread == "tinkex-engine"  # the loop goes on while torch is imported


def test_early_bound_method_of_a_lazy_engine_reaches_the_engine() -> None:
    engine = FakeEngine()
    late = LazyEngine({}, lambda: engine)
    drop, create = late.drop, late.create
    drop("a")
    create("a", "fake", tinkex.LoraConfig(rank=4))
    with pytest.raises(EngineError, match="already"):
        engine.create("a", "fake", tinkex.LoraConfig(rank=4))
    drop("a")
    engine.create("a", "fake", tinkex.LoraConfig(rank=4))


LISTING = """
import sys
from tinkex import LocalBackend, ServiceClient
from tinkex.tokenizers import BUNDLED

with (
    LocalBackend({"mine": BUNDLED["tinkex/tiny"]}, data_dir=sys.argv[1]) as backend,
    ServiceClient(base_url=backend.base_url) as service,
):
    print(service.get_server_capabilities().model_names(), "torch" in sys.modules)
"""


def test_own_models_are_listed_without_torch(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", LISTING, str(tmp_path)],
        env={**os.environ, "TINKEX_HUB_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == "['mine'] False\n"


def test_engine_failure_reaches_every_waiting_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reasons = iter(
        ["libgomp.so.1: cannot open", "torch is only half initialised", "and so on", "and so on"]
    )

    def fail(models: Any) -> FakeEngine:
        raise OSError(next(reasons))

    monkeypatch.setattr(local, "make_engine", fail)
    why = "the engine cannot be made: OSError: libgomp.so.1: cannot open"
    with (
        LocalBackend(data_dir=tmp_path) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
        prompt, params = tinkex.ModelInput.from_ints([1]), tinkex.SamplingParams(max_tokens=1)
        with pytest.raises(tinkex.RequestFailedError, match=why):
            sampler.sample(prompt, 1, params).result(20)
        with pytest.raises(tinkex.RequestFailedError, match=why):
            service.create_lora_training_client("tinkex/tiny", rank=4).result()
        # needs no engine
        assert RestClient(service.holder).list_user_checkpoints().result().checkpoints == []


def test_two_backends_are_two(tmp_path: Path) -> None:
    with (
        LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "a") as one,
        LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "b") as other,
        ServiceClient(base_url=one.base_url) as service,
        ServiceClient(base_url=other.base_url) as stranger,
    ):
        assert one.base_url != other.base_url
        path = service.create_lora_training_client("fake").result().save_state("a").result(10).path
        with pytest.raises(tinkex.RequestFailedError, match="no checkpoint"):
            stranger.create_training_client_from_state(path).result()


def test_closed_backend_is_a_clear_error(tmp_path: Path) -> None:
    engine = FakeEngine()
    with LocalBackend(engine=engine, data_dir=tmp_path) as backend:
        service = ServiceClient(base_url=backend.base_url)
        client = service.create_lora_training_client("fake").result()
    before = engine_threads()
    for call in (
        lambda: client.optim_step(STEP).result(5),
        lambda: service.create_sampling_client(base_model="fake").result(),
        lambda: service.get_server_capabilities(),
    ):
        began = time.monotonic()
        with pytest.raises(tinkex.TinkerError, match="closed"):
            call()
        assert time.monotonic() - began < 20
    assert engine_threads() == before
    service.close().result(10)
    with pytest.raises(tinkex.ConfigurationError, match=backend.base_url):
        ServiceClient(base_url=backend.base_url)
    backend.close()


def test_closed_backend_fails_pending_calls(tmp_path: Path) -> None:
    backend = LocalBackend(engine=FakeEngine(delay=0.02), data_dir=tmp_path)
    service = ServiceClient(base_url=backend.base_url)
    sampler = service.create_sampling_client(base_model="fake").result()
    future = sampler.sample(
        tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams(max_tokens=100_000)
    )
    time.sleep(0.2)
    backend.close()
    assert isinstance(future.future().exception(5), tinkex.TinkerError)
    service.close().result(10)


def test_backend_is_closed_from_any_event_loop(tmp_path: Path) -> None:
    backend = LocalBackend(engine=FakeEngine(), data_dir=tmp_path)

    async def use() -> None:
        service = ServiceClient(base_url=backend.base_url)
        await service.get_server_capabilities_async()
        await service.close()
        await backend.aclose()

    asyncio.run(use())
    with pytest.raises(tinkex.ConfigurationError, match=backend.base_url):
        ServiceClient(base_url=backend.base_url)


def test_backend_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "file") as backend:
        service = ServiceClient(base_url=backend.base_url)
        with pytest.raises(
            tinkex.errors.ConfigurationError, match=r"data directory .*file cannot be used: "
        ) as raised:
            service.get_server_capabilities()
        assert "TINKEX_DATA_DIR" in str(raised.value)
        service.close().result(10)


def test_full_disk_gives_one_error_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(method: str, subject: str) -> None:
        if method == "save":
            raise full.pop()

    engine = FakeEngine()
    engine.fail = fail
    full: list[Exception] = [
        OSError(errno.ENOSPC, "x"),
        ValueError("I/O error: No space left on device (os error 28)"),
    ]
    with (
        LocalBackend(engine=engine, data_dir=tmp_path) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        client = service.create_lora_training_client(engine.models()[0].name, rank=4).result()
        for name in ("a", "b"):
            with pytest.raises(
                tinkex.RequestFailedError,
                match=f"weights/{name} was not saved: the server's disk is full",
            ):
                client.save_state(name).result()
    assert not caplog.records
    assert not list(tmp_path.rglob(".saving-*"))


def test_key_works_in_process_too(tmp_path: Path) -> None:
    with LocalBackend(engine=FakeEngine(), data_dir=tmp_path, api_key="tml-x") as backend:
        with (
            ServiceClient(base_url=backend.base_url) as service,
            pytest.raises(tinkex.AuthenticationError, match="X-API-Key"),
        ):
            service.get_server_capabilities()
        with ServiceClient(base_url=backend.base_url, api_key="tml-x") as service:
            assert service.get_server_capabilities().supported_models


# ── the bridge ────────────────────────────────────────────────────────────────────────────────────


class Application:
    """An ASGI application that does as it is told and remembers what it saw."""

    def __init__(self, behaviour: str = "answer") -> None:
        self.behaviour = behaviour
        self.events: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            if self.behaviour == "no start":
                await send({"type": "lifespan.startup.failed", "message": "cannot begin"})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.events.append("shutdown")
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = await receive()
        self.events.append(f"{scope['method']} {scope['path']} {len(body['body'])}")
        if self.behaviour == "hang":
            try:
                await receive()
            finally:  # a disconnect, or a cancellation
                self.events.append("left")
            return
        if self.behaviour == "raise":
            raise ZeroDivisionError("a fault of its own")
        if self.behaviour == "silent":
            return
        await send({"type": "http.response.start", "status": 201, "headers": [(b"X-Made", b"yes")]})
        for part in (b"one ", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if self.behaviour == "half":
            return
        await send({"type": "http.response.body", "body": b""})


def exchange(application: Application, timeout: float = 5, between: Any = None) -> Any:
    async def run() -> Any:
        bridge = AsgiExchange(application)
        await bridge.open()
        try:
            sending = asyncio.ensure_future(
                bridge.send(HttpRequest("POST", "/x", {"A": "b"}, b"body", timeout))
            )
            if between is not None:
                await asyncio.sleep(0.05)
                between(sending)
            return await sending
        finally:
            await asyncio.sleep(0.01)
            await bridge.close()

    return start(run()).result(10)


def test_answer_comes_back_whole() -> None:
    application = Application()
    reply = exchange(application)
    assert (reply.status, reply.headers, reply.body) == (201, {"x-made": "yes"}, b"one two")
    assert application.events == ["POST /x 4", "shutdown"]


def test_timeout_is_reported_to_both_sides() -> None:
    application = Application("hang")
    with pytest.raises(TimeoutError, match=r"0.05 s"):
        exchange(application, timeout=0.05)
    assert application.events == ["POST /x 4", "left", "shutdown"]


def test_timeout_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            exchange(Application("hang"), timeout=0.02)
    gc.collect()
    start(asyncio.sleep(0.05)).result(5)
    assert "was destroyed" not in caplog.text
    assert "never retrieved" not in caplog.text


def test_cancelled_caller_is_released() -> None:
    application = Application("hang")
    with pytest.raises(concurrent.futures.CancelledError):
        exchange(application, between=lambda sending: sending.cancel())
    assert application.events == ["POST /x 4", "left", "shutdown"]


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ("raise", ZeroDivisionError, "of its own"),
        ("silent", ConnectionError, "no answer"),
        ("half", ConnectionError, "no answer"),
    ],
)
def test_application_errors_are_reported(
    behaviour: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        exchange(Application(behaviour))


def test_failed_start_is_reported() -> None:
    with pytest.raises(RuntimeError, match="cannot begin"):
        exchange(Application("no start"))


def test_closed_reporter_sends_nothing() -> None:
    async def run() -> None:
        bridge = AsgiExchange(Application())
        await bridge.open()
        await bridge.close()
        with pytest.raises(ConnectionError, match="closed"):
            await bridge.send(HttpRequest("GET", "/x", {}))

    start(run()).result(5)
