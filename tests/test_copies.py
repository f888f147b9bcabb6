"""Sampling clients that travel: pickles and handles, into this process and into others."""

from __future__ import annotations

import base64
import itertools
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import Wire, serving
from tinkex import ModelInput, SamplingParams, ServiceClient
from tinkex.client.http.retry import RetryConfig
from tinkex.engine.fake import FakeEngine

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4, seed=5)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(FakeEngine(), tmp_path) as address:
        yield address


def draw(client: tinkex.SamplingClient) -> list[list[int]]:
    """Run the work of a worker process."""
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    return [future.result(20).sequences[0].tokens for future in futures]


def draw_by_handle(handle: str) -> list[list[int]]:
    return draw(tinkex.SamplingClient.from_sampler_handle(handle))


def test_pickled_client_samples_in_another_process(url: str) -> None:
    with ServiceClient(base_url=url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        expected = draw(sampler)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(draw, (sampler,)) == expected
            assert pool.apply(draw_by_handle, (sampler.get_sampler_handle(),)) == expected
        assert draw(sampler) == expected  # the copies have not ended the session they came from


def test_copy_neither_ends_the_session_nor_repeats_numbers(url: str) -> None:
    with ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        copy = pickle.loads(pickle.dumps(sampler))
        first, second = (
            client.sample(PROMPT, 1, PARAMS).result(10).sequences[0] for client in (sampler, copy)
        )
        assert first.tokens == second.tokens
        assert first.sequence_id != second.sequence_id
        assert int(second.sequence_id.split(":")[-2]) >= 1_000_000_000
        session = sampler.sampling_session_id.split(":")[0]
        assert pickle.loads(pickle.dumps(sampler))._session is copy._session
        del copy
        assert Wire(url).send("session_heartbeat", {"session_id": session}).status == 200


def test_handle_carries_no_credential() -> None:
    service = ServiceClient(base_url="https://example.invalid", api_key="tml-very-secret")
    client = tinkex.SamplingClient(service._session, sampling_session_id="s:sample:0")
    text = base64.urlsafe_b64decode(client.get_sampler_handle()).decode()
    assert "secret" not in text
    assert "s:sample:0" in text
    assert pickle.loads(pickle.dumps(client))._session.config.api_key == "tml-very-secret"


@pytest.mark.parametrize("text", ["", "nonsense", "e30=", "bnVsbA=="])
def test_invalid_handle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no sampler handle"):
        tinkex.SamplingClient.from_sampler_handle(text)


def test_other_clients_cannot_be_pickled(url: str) -> None:
    with ServiceClient(base_url=url) as service:
        with pytest.raises(TypeError, match="a ServiceClient cannot be pickled"):
            pickle.dumps(service)
        with pytest.raises(TypeError, match="a TrainingClient cannot be pickled"):
            pickle.dumps(service.create_lora_training_client("fake", rank=2).result())


# ── the numbers of copies ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def joining() -> Iterator[FaultyServer]:
    """A server that counts the clients of a sampling session."""
    with faulty_server() as server:
        counter = itertools.count(1)
        server.script("client/config", Answer(body={"sample_join_sampling_session": True}))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        server.script(
            "join_sampling_session", lambda _: Answer(body={"client_counter": next(counter)})
        )
        server.script("asample", Answer(body={"sequences": [{"tokens": [7], "logprobs": [-1.0]}]}))
        yield server


def numbers(server: FaultyServer) -> list[int]:
    return [seen.json["seq_id"] for seen in server.requests("asample")]


def test_copies_request_their_number_if_the_server_counts(joining: FaultyServer) -> None:
    with ServiceClient(base_url=joining.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        draw(sampler)
        assert joining.requests("join_sampling_session") == []
        copies = [pickle.loads(pickle.dumps(sampler)), pickle.loads(pickle.dumps(sampler))]
        copies.append(
            tinkex.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-x")
        )
        for copy in copies:
            draw(copy)  # three samples at once, of which one asks
        again = pickle.loads(pickle.dumps(copies[0]))  # a copy of a copy is another one
        draw(again)
    joined = [seen.json for seen in joining.requests("join_sampling_session")]
    assert joined == [{"sampling_session_id": "s:sample:0", "type": "join_sampling_session"}] * 4
    blocks = [number // 1_000_000_000 for number in numbers(joining)]
    assert sorted(blocks) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert sorted(number % 1_000_000_000 for number in numbers(joining)) == sorted([0, 1, 2] * 5)


def test_copy_requests_its_number_again_after_a_failure(joining: FaultyServer) -> None:
    with ServiceClient(base_url=joining.base_url) as service:
        copy = pickle.loads(pickle.dumps(service.create_sampling_client(base_model="m").result()))
        joining.script(
            "join_sampling_session",
            Answer(403, {"detail": "full"}),
            Answer(body={"client_counter": 9}),
        )
        with pytest.raises(tinkex.PermissionDeniedError, match="full"):
            copy.sample(PROMPT, 1, PARAMS).result(5)
        assert numbers(joining) == []
        copy.sample(PROMPT, 1, PARAMS).result(5)
        assert numbers(joining) == [9_000_000_000]


def test_copies_draw_random_numbers_if_the_server_does_not_count(joining: FaultyServer) -> None:
    joining.script("client/config", Answer(body={}))
    with ServiceClient(base_url=joining.base_url) as service:
        sampler = service.create_sampling_client(base_model="m").result()
        for _ in range(4):
            draw(pickle.loads(pickle.dumps(sampler)))
    blocks = {number // 1_000_000_000 for number in numbers(joining)}
    assert len(blocks) == 4
    assert min(blocks) >= 1
    assert joining.requests("join_sampling_session") == []


def test_pickle_keeps_the_retry_policy_and_a_handle_does_not(
    joining: FaultyServer,
) -> None:
    """A pickle is the client for the user's own workers; a handle says where the sampler is, and no
    more."""
    once = RetryConfig(enable_retry_logic=False, max_connections=3)
    with ServiceClient(base_url=joining.base_url) as service:
        sampler = service.create_sampling_client(
            base_model="m", retry_config=once, record_stability_info=True
        ).result()
        copy = pickle.loads(pickle.dumps(sampler))
        plain = tinkex.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
        assert copy.retry_handler.config == once
        assert plain.retry_handler.config.enable_retry_logic
        joining.script(
            "asample",
            Answer(500),
            Answer(body={"sequences": [{"tokens": [7], "logprobs": [-1.0]}]}),
        )
        with pytest.raises(tinkex.InternalServerError):
            copy.sample(PROMPT, 1, PARAMS).result(5)
        assert len(numbers(joining)) == 1
        plain.sample(PROMPT, 1, PARAMS).result(5)
    assert [seen.json["record_stability_info"] for seen in joining.requests("asample")] == [
        True
    ] * 2


def test_key_of_a_handle_is_that_of_the_process(
    joining: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServiceClient(base_url=joining.base_url, api_key="tml-mine") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        monkeypatch.setenv("TINKER_API_KEY", "tml-theirs")
        copy = tinkex.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
        copy.sample(PROMPT, 1, PARAMS).result(5)
        pickle.loads(pickle.dumps(sampler)).sample(PROMPT, 1, PARAMS).result(5)
    assert [seen.headers["x-api-key"] for seen in joining.requests("asample")] == [
        "tml-theirs",
        "tml-mine",
    ]
