"""The headers that name the public method a request is made for: on which requests, and by which
name."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import is_coroutine_function, wait_until
from tinkex import ModelInput, SamplingParams, ServiceClient
from tinkex.client.http.request_headers import UNNAMED, headers_of, name_requests
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec
from tinkex.wire.protocol import OPERATIONS, SEARCH_CHECKPOINTS

PROMPT, PARAMS, STEP = (
    ModelInput.from_ints([1]),
    SamplingParams(max_tokens=1),
    tinkex.AdamParams(learning_rate=1e-3),
)
CLASSES = [
    tinkex.ServiceClient,
    tinkex.TrainingClient,
    tinkex.SamplingClient,
    tinkex.RestClient,
    tinkex.AdminClient,
    tinkex.BackcompatTrainingClientFuture,
    tinkex.BackcompatSamplingClientFuture,
]


def drawn(seen: Seen) -> Answer:
    """A result by the name of its request."""
    results: dict[str, Any] = {
        "created": {"model_id": "s:train:0"},
        "step": {"metrics": {}},
        "saved": {"path": "tinker://s:train:0/weights/a"},
        "sampler": {"sampling_session_id": "ss"},
    }
    name = seen.json["request_id"]
    if name in results:
        return Answer(body=results[name])
    body = codec.encode(
        SampleResponse([SampledSequence("length", tokens_np=np.array([7], np.int32))])
    )
    return Answer(body=body.data, content_type=codec.PROTOBUF)


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        server.script("create_model", Answer(body={"request_id": "created"}))
        server.script(
            "get_info", Answer(body={"model_id": "s:train:0", "model_data": {"model_name": "m"}})
        )
        server.script("optim_step", Answer(body={"request_id": "step"}))
        server.script("save_weights", Answer(body={"request_id": "saved"}))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "ss"}))
        server.script(
            "asample", Answer(body={"request_id": "sample", "sample_sequence_ids": ["a"]})
        )
        server.script("retrieve_future", drawn)
        server.script("sessions", Answer(body={"sessions": []}))
        server.script("telemetry", Answer(body={"status": "accepted"}))
        yield server


def named(server: FaultyServer, path: str) -> list[str | None]:
    """The method that each request for a path was made for."""
    return [seen.headers.get("x-sdk-method") for seen in server.requests(path)]


def method_of(server: FaultyServer) -> dict[str, set[str | None]]:
    """The methods that the requests for each path were made for."""
    found: dict[str, set[str | None]] = {}
    for seen in list(server.seen):
        found.setdefault(seen.path.partition("?")[0], set()).add(seen.headers.get("x-sdk-method"))
    return found


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U23")
def test_requests_carry_the_method_they_are_made_for(faulty: FaultyServer) -> None:
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        training = service.create_lora_training_client("m").result()
        assert named(faulty, "create_model") == ["ServiceClient.create_lora_training_client"]
        assert named(faulty, "retrieve_future") == ["ServiceClient.create_lora_training_client"]
        assert set(named(faulty, "get_info")) <= {"ServiceClient.create_lora_training_client"}
        training.optim_step(STEP).result(10)
        assert named(faulty, "optim_step") == ["TrainingClient.optim_step"]
        assert named(faulty, "retrieve_future")[1:] == ["TrainingClient.optim_step"]
        sampler = service.create_sampling_client(base_model="m").result()
        sampler.sample(PROMPT, 1, PARAMS).result(10)
        sampler.compute_logprobs(PROMPT).future().exception(10)
        assert named(faulty, "create_sampling_session") == ["ServiceClient.create_sampling_client"]
        assert named(faulty, "asample") == [
            "SamplingClient.sample",
            "SamplingClient.compute_logprobs",
        ]
        tinkex.RestClient(service.holder).list_sessions().result(10)
        assert method_of(faulty)["sessions"] == {"RestClient.list_sessions"}
    assert named(faulty, "sessions/s/finish") == ["ServiceClient.close"]
    versions = {
        seen.headers.get("x-sdk-version") for seen in faulty.seen if "x-sdk-method" in seen.headers
    }
    assert versions == {"0.38.0"}


@pytest.mark.covers("U23")
def test_twins_keep_their_names(faulty: FaultyServer) -> None:
    async def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            service = ServiceClient(base_url=faulty.base_url, api_key="tml-x")
            training = await service.create_lora_training_client_async("m")
            await (await training.optim_step_async(STEP))
            sampler = await service.create_sampling_client_async(base_model="m")
            await sampler.sample_async(PROMPT, 1, PARAMS)
            await tinkex.RestClient(service.holder).list_sessions_async()
            await service.close()

    asyncio.run(main())
    found = method_of(faulty)
    assert found["create_model"] == {"ServiceClient.create_lora_training_client_async"}
    assert found["optim_step"] == {"TrainingClient.optim_step_async"}
    assert found["asample"] == {"SamplingClient.sample_async"}
    assert found["sessions"] == {"RestClient.list_sessions_async"}
    assert len(found["retrieve_future"]) == 3


@pytest.mark.covers("U23")
def test_futures_of_clients_name_their_own_methods(faulty: FaultyServer) -> None:
    async def main(training: Any) -> None:
        await (await training.optim_step_async(STEP))

    with (
        ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        training: Any = service.create_lora_training_client("m")
        training.optim_step(STEP).result(10)
        asyncio.run(main(training))
        service.create_sampling_client(base_model="m").sample(PROMPT, 1, PARAMS).result(10)
    own = "BackcompatTrainingClientFuture."
    assert named(faulty, "optim_step") == [f"{own}optim_step", f"{own}optim_step_async"]
    assert named(faulty, "asample") == ["BackcompatSamplingClientFuture.sample"]


@pytest.mark.covers("U23")
def test_outermost_call_names_all_requests(faulty: FaultyServer) -> None:
    faulty.script("copy_weights", Answer(body={"tinker_path": "tinker://new/weights/x"}))
    faulty.script("organizations/audit_log", Answer(body={"events": []}))
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x", project_id="p") as service:
        service.copy_weights("tinker://a/weights/b").result(10)
        rest = tinkex.RestClient(service.holder)
        with pytest.warns(FutureWarning):
            rest.get_audit_log().future().exception(10)
        with pytest.warns(tinkex.ExperimentalWarning):
            rest.search_checkpoints(tinkex.types.CheckpointSearchRequest()).future().exception(10)
    found = method_of(faulty)
    assert found["copy_weights"] == {"ServiceClient.copy_weights"}
    assert found[SEARCH_CHECKPOINTS.path] == {"RestClient.search_checkpoints"}
    assert {name for names in found.values() for name in names if name and "audit" in name} == {
        "RestClient.get_audit_log"
    }


@pytest.mark.covers("U23")
def test_calls_at_the_same_time_keep_their_names_apart(faulty: FaultyServer) -> None:
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        training = service.create_lora_training_client("m").result()
        calls: list[Callable[[], Any]] = [
            lambda: training.optim_step(STEP),
            lambda: training.save_state("a"),
        ]
        futures: list[Any] = []
        threads = [
            threading.Thread(target=lambda call=call: futures.append(call())) for call in calls * 5
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for future in futures:
            future.result(20)
    assert set(named(faulty, "optim_step")) == {"TrainingClient.optim_step"}
    assert set(named(faulty, "save_weights")) == {"TrainingClient.save_state"}
    assert headers_of("optim_step") == {}


# ── no names ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U23")
def test_requests_of_the_session_and_of_many_calls_have_no_name(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    for place in ("client.settings.config", "telemetry.sending"):
        monkeypatch.setattr(f"tinkex.{place}.HOSTED_URL", faulty.base_url)
    faulty.script("client/config", Answer(body={"sample_use_retrieve_futures": True}))
    faulty.script("client/dynamic_config", Answer(body={"sample_cancel_enabled": True}))
    ended = {"completions": [{"state": "finished", "request_id": "sample"}], "cursor": 1}
    waits = Answer(body={"completions": [], "cursor": 1}, delay=0.05)
    faulty.script("retrieve_futures", Answer(body=ended, delay=0.05), waits)
    faulty.script("cancel_future", Answer(body={}))
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        sampler.sample(PROMPT, 1, PARAMS).result(10)
        faulty.script("asample", Answer(body={"request_id": "never", "sample_sequence_ids": ["a"]}))
        future = sampler.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: sampler._poller is not None and bool(sampler._poller._waiting))
        future.future().cancel()
        wait_until(
            lambda: faulty.requests("cancel_future") and faulty.requests("session_heartbeat")
        )
    wait_until(lambda: faulty.requests("telemetry"))
    found = method_of(faulty)
    for path in (
        "client/config",
        "client/dynamic_config",
        "create_session",
        "session_heartbeat",
        "telemetry",
        "retrieve_futures",
        "cancel_future",
    ):
        assert found[path] == {None}, path
    assert all(
        "x-sdk-version" not in seen.headers
        for seen in faulty.seen
        if "x-sdk-method" not in seen.headers
    )
    assert {operation.name for operation in OPERATIONS} >= UNNAMED


@pytest.mark.covers("U23")
def test_tokens_are_named_when_a_call_has_to_wait_for_one(faulty: FaultyServer) -> None:
    lives = iter((4.0, 1000.0, 1000.0))
    rejected = Answer(
        401, {"detail": "no"}, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'}
    )

    def exchange(seen: Seen) -> Answer:
        now = time.time()
        said = json.dumps({"iat": now, "exp": now + next(lives)}).encode()
        return Answer(body={"jwt": f"eyJh.{base64.urlsafe_b64encode(said).decode().rstrip('=')}.s"})

    faulty.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
    faulty.script("auth/token", exchange)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        wait_until(lambda: len(faulty.requests("auth/token")) == 2)  # in the background
        faulty.script(
            "asample", rejected, Answer(body={"request_id": "q", "sample_sequence_ids": ["a"]})
        )
        sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert named(faulty, "auth/token") == [None, None, "SamplingClient.sample"]


# ── the methods themselves ───────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U23")
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_public_methods_stay_plain_functions(kind: type[Any]) -> None:
    methods: dict[str, Any] = {
        name: member
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert len(methods) >= 3
    for name, method in methods.items():
        original = method.__wrapped__
        assert inspect.signature(method) == inspect.signature(original), name
        assert method.__annotations__ == original.__annotations__
        assert (method.__name__, method.__module__) == (name, original.__module__)
        assert method.__doc__ == original.__doc__
        assert method.__globals__ is original.__globals__
        assert is_coroutine_function(method) == is_coroutine_function(original)
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(original)


def test_only_public_functions_of_the_class_are_named() -> None:
    class Base:
        def inherited(self) -> dict[str, str]:
            return headers_of("x")

    @name_requests
    class Client(Base):
        def call(self) -> dict[str, str]:
            return headers_of("x")

        def fails(self) -> None:
            raise ValueError("on purpose")

        async def call_async(self) -> dict[str, str]:
            await asyncio.sleep(0)
            return headers_of("x")

        def nested(self) -> dict[str, str]:
            return self.call()

        def _private(self) -> dict[str, str]:
            return headers_of("x")

        @property
        def shown(self) -> dict[str, str]:
            return headers_of("x")

        @staticmethod
        def static() -> dict[str, str]:
            return headers_of("x")

    client = Client()
    assert client.call()["x-sdk-method"] == "Client.call"
    assert client.nested()["x-sdk-method"] == "Client.nested"
    assert [client.inherited(), client._private(), client.shown, client.static()] == [{}] * 4
    with pytest.raises(ValueError, match="on purpose"):
        client.fails()
    assert headers_of("x") == {}

    async def main() -> None:
        both = await asyncio.gather(client.call_async(), client.call_async())
        assert [headers["x-sdk-method"] for headers in both] == ["Client.call_async"] * 2
        assert headers_of("x") == {}

    asyncio.run(main())


OFFICIAL = """
import os, sys, warnings
warnings.simplefilter("ignore")
import tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
training = service.create_lora_training_client("m").result()
training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
service.create_lora_training_client("m").optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
training.save_state("a").result()
sampler = service.create_sampling_client(base_model="m").result()
sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result()
service.create_sampling_client(base_model="m").sample(
    tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)
).result()
tinker.RestClient(base_url=sys.argv[1], api_key="tml-x").list_sessions().result()
service.close("success").result()
os._exit(0)  # its threads sometimes bring an orderly end down
"""


@pytest.mark.covers("U23")
def test_official_client_names_the_same_requests(faulty: FaultyServer) -> None:
    body = codec.encode(
        SampleResponse([SampledSequence("length", tokens_np=np.array([7], np.int32))])
    )
    assert body.data
    command = [sys.executable, "-c", OFFICIAL, faulty.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = method_of(faulty)
    faulty.seen.clear()
    with (
        ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        training = service.create_lora_training_client("m").result()
        training.optim_step(STEP).result(10)
        service.create_lora_training_client("m").optim_step(STEP).result(10)
        training.save_state("a").result(10)
        service.create_sampling_client(base_model="m").result().sample(PROMPT, 1, PARAMS).result(10)
        service.create_sampling_client(base_model="m").sample(PROMPT, 1, PARAMS).result(10)
        tinkex.RestClient(base_url=faulty.base_url, api_key="tml-x").list_sessions().result(10)
    ours = method_of(faulty)
    both = sorted((theirs.keys() & ours.keys()) - {"telemetry", "session_heartbeat"})
    assert set(both) >= {
        "create_model",
        "optim_step",
        "save_weights",
        "asample",
        "retrieve_future",
        "sessions",
    }
    assert {path: ours[path] for path in both} == {path: theirs[path] for path in both}
