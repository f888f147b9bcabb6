"""Requests of the creation of clients, and the knowledge that clients keep from them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from tinkex import SamplingClient, ServiceClient, types

INFO = {"model_id": "elsewhere", "model_data": {"model_name": "base"}, "model_name": "own"}
STATE = "tinker://run/weights/a"
WEIGHTS = "tinker://run/sampler_weights/a"
QUIET = {
    "client/config",
    "client/dynamic_config",
    "create_session",
    "session_heartbeat",
    "sessions/s/finish",
}
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """A server that makes runs and samplers, and says what they are."""
    with faulty_server() as server:

        def result(seen: Seen) -> Answer:
            kind = seen.json["request_id"]
            nameless: dict[str, Any] = {"path": None, "sampling_session_id": "s:sample:7"}
            return Answer(
                body={
                    "model": {"model_id": "s:train:0", "type": "create_model"},
                    "load": {"path": STATE, "type": "load_weights"},
                    "save": nameless | {"type": "save_weights_for_sampler"},
                    "step": {"metrics": {}},
                }[kind]
            )

        server.script("create_model", Answer(body={"request_id": "model"}))
        server.script("load_weights", Answer(body={"request_id": "load"}))
        server.script("save_weights_for_sampler", Answer(body={"request_id": "save"}))
        server.script("optim_step", Answer(body={"request_id": "step"}))
        server.script("retrieve_future", result)
        server.script("get_info", Answer(body=INFO))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        server.script(
            "samplers/s:sample:0", Answer(body={"sampler_id": "s:sample:0", "base_model": "base"})
        )
        yield server


@pytest.fixture
def service(faulty: FaultyServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as client:
        yield client


def asked(faulty: FaultyServer) -> list[str]:
    """The paths of the requests so far, without those of the session."""
    return [seen.path for seen in faulty.seen if seen.path not in QUIET]


class Letters:
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.covers("U18", "U19")
def test_new_run_is_made_and_described_in_three_requests(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result(10)
    assert asked(faulty) == ["create_model", "retrieve_future", "get_info"]
    assert faulty.requests("get_info")[0].json["model_id"] == "s:train:0"
    assert client.model_id == "s:train:0"
    assert client.get_info() == types.GetInfoResponse.model_validate(INFO)
    assert isinstance(client.get_tokenizer(load_fun=lambda name, options: Letters()), Letters)
    service.close().result(10)
    assert client.get_info().model_data.model_name == "base"
    assert len(asked(faulty)) == 3


@pytest.mark.covers("U19", "U20")
@pytest.mark.parametrize(
    "says", [{}, {"create_model_via_load_weights": False}, {"create_model_via_load_weights": True}]
)
@pytest.mark.parametrize("method", ["", "_with_optimizer"])
def test_resumed_run_is_one_load(
    faulty: FaultyServer, service: ServiceClient, says: dict[str, Any], method: str
) -> None:
    faulty.script("client/config", Answer(body=says))
    service.create_sampling_client(base_model="m").result(10)
    faulty.seen.clear()
    resume = getattr(service, f"create_training_client_from_state{method}")
    client = resume(STATE, weights_access_token="tml-foreign").result(10)
    assert asked(faulty) == ["load_weights", "retrieve_future", "get_info"]
    [loaded, fetched, info] = [seen.json for seen in faulty.seen]
    assert loaded == {
        "session_id": "s",
        "model_seq_id": 0,
        "path": STATE,
        "optimizer": bool(method),
        "weights_access_token": "tml-foreign",
        "type": "load_weights",
    }
    assert fetched["request_id"] == "load"
    assert info["model_id"] == client.model_id == "s:train:0"  # derived: the answer names no run
    client.optim_step(types.AdamParams()).result(10)
    assert faulty.requests("optim_step")[0].json["seq_id"] == 1


@pytest.mark.covers("U19")
def test_run_that_cannot_be_described_is_not_made(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    faulty.script("get_info", Answer(404, {"detail": "no such run"}))
    with pytest.raises(tinkex.NotFoundError, match="no such run"):
        service.create_lora_training_client("m").result(10)


def test_older_server_describes_a_run_when_it_is_asked(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    faulty.script("client/config", Answer(404))
    faulty.script("get_info", Answer(404, {"detail": "not yet"}), Answer(body=INFO))
    faulty.script(
        "samplers/s:sample:0", Answer(404), Answer(body={"sampler_id": "x", "base_model": "base"})
    )
    client = service.create_lora_training_client("m").result(10)
    sampler = service.create_sampling_client(WEIGHTS).result(10)
    for _ in range(2):
        assert client.get_info().model_data.model_name == sampler.get_base_model() == "base"
    assert len(faulty.requests("get_info")) == len(faulty.requests("samplers/s:sample:0")) == 2


@pytest.mark.covers("U18", "U21")
@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ({"model_path": WEIGHTS}, ["create_sampling_session", "samplers/s:sample:0"]),
        ({"model_path": WEIGHTS, "base_model": "base"}, ["create_sampling_session"]),
        ({"base_model": "base"}, ["create_sampling_session"]),
    ],
)
def test_sampler_learns_its_base_model_when_it_is_opened(
    faulty: FaultyServer, service: ServiceClient, options: dict[str, Any], requests: list[str]
) -> None:
    sampler = service.create_sampling_client(**options).result(10)
    assert asked(faulty) == requests
    for _ in range(2):
        assert sampler.get_base_model() == "base"
        assert isinstance(sampler.get_tokenizer(load_fun=lambda name, options: Letters()), Letters)
    assert asked(faulty) == requests


@pytest.mark.covers("U21")
def test_sampler_of_a_training_client_fetches_missing_info(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result(10)
    faulty.seen.clear()
    nameless = client.save_weights_and_get_sampling_client().result(10)
    assert asked(faulty) == ["save_weights_for_sampler", "retrieve_future"]
    assert (nameless.sampling_session_id, nameless.get_base_model()) == ("s:sample:7", "base")
    faulty.seen.clear()
    client.create_sampling_client(WEIGHTS).result(10)
    assert asked(faulty) == ["create_sampling_session", "samplers/s:sample:0"]


@pytest.mark.covers("U21")
def test_nameless_sampler_of_a_run_without_a_name_asks_for_its_model(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    faulty.script("get_info", Answer(body={"model_id": "s:train:0", "model_data": {}}))
    client = service.create_lora_training_client("m").result(10)
    assert client.save_weights_and_get_sampling_client().result(10).get_base_model() == "m"
    assert len(faulty.requests("samplers/s:sample:7")) == 1


@pytest.mark.covers("U22")
def test_saves_for_sampling_carry_their_kind(faulty: FaultyServer, service: ServiceClient) -> None:
    faulty.script("optim_step", Answer(body={"request_id": "step"}))
    client = service.create_lora_training_client("m").result(10)
    client.save_weights_and_get_sampling_client().result(10)
    client.save_weights_and_get_sampling_client(None, None, False, "inflight").result(10)
    wrong = client.save_weights_and_get_sampling_client(kind="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind is 'x'; expected one of snapshot, inflight"):
        wrong.result(10)
    client.optim_step(types.AdamParams()).result(10)
    client.save_weights_for_sampler("named")
    sent = faulty.requests
    support = [seen.json for seen in sent("save_weights_for_sampler")]
    assert [body["kind"] for body in support[:2]] == ["snapshot", "inflight"]
    assert [body["seq_id"] for body in support[:2]] == [1, 2]
    assert sent("optim_step")[0].json["seq_id"] == 3  # the refused call took none


# ── handles ───────────────────────────────────────────────────────────────────────────────────────


def changed(handle: str, change: Callable[[dict[str, Any]], object]) -> str:
    state = json.loads(base64.urlsafe_b64decode(handle))
    change(state)
    return base64.urlsafe_b64encode(json.dumps(state).encode()).decode()


@pytest.mark.covers("U33")
def test_handle_carries_the_base_model(faulty: FaultyServer, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(WEIGHTS).result(10)
    handle = sampler.get_sampler_handle()
    assert json.loads(base64.urlsafe_b64decode(handle))["base_model"] == "base"
    faulty.seen.clear()
    newer = changed(handle, lambda state: state.update(colour="blue"))
    for text in (handle, newer):
        assert SamplingClient.from_sampler_handle(text, api_key="tml-x").get_base_model() == "base"
    assert asked(faulty) == []
    older = SamplingClient.from_sampler_handle(
        changed(handle, lambda state: state.pop("base_model")), api_key="tml-x"
    )
    for _ in range(2):
        assert older.get_base_model() == "base"
    assert asked(faulty) == ["samplers/s:sample:0"]


# ── closing ───────────────────────────────────────────────────────────────────────────────────────


def test_closing_waits_for_clients_that_are_being_made(faulty: FaultyServer) -> None:
    opened = threading.Event()
    service = ServiceClient(base_url=faulty.base_url, api_key="tml-x")
    service.create_sampling_client(base_model="m").result(10)
    faulty.script("create_model", Answer(body={"request_id": "model"}, until=opened.is_set))
    making = service.create_lora_training_client("m")
    closing = service.close()
    opened.set()
    closing.result(20)
    assert making.result(0).model_id == "s:train:0"
    assert asked(faulty)[-1] == "get_info"
    assert faulty.seen[-1].path == "sessions/s/finish"
