"""Sampling clients that travel: pickles and handles, into this process and into others."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from support import Wire, serving
from tinkex import ModelInput, SamplingParams, ServiceClient
from tinkex.engine.fake import FakeEngine

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4, seed=5)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(FakeEngine(), tmp_path) as address:
        yield address


def draw(client: tinkex.SamplingClient) -> list[list[int]]:
    """What a worker process does."""
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    return [future.result(20).sequences[0].tokens for future in futures]


def draw_by_handle(handle: str) -> list[list[int]]:
    return draw(tinkex.SamplingClient.from_sampler_handle(handle))


def test_a_pickled_client_samples_in_another_process(url: str) -> None:
    with ServiceClient(base_url=url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="fake")
        expected = draw(sampler)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(draw, (sampler,)) == expected
            assert pool.apply(draw_by_handle, (sampler.get_sampler_handle(),)) == expected
        assert draw(sampler) == expected  # the copies have not ended the session they came from


def test_a_copy_neither_ends_the_session_nor_repeats_numbers(url: str) -> None:
    with ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model="fake")
        copy = pickle.loads(pickle.dumps(sampler))
        first, second = (client.sample(PROMPT, 1, PARAMS).result(10).sequences[0] for client in (sampler, copy))
        assert first.tokens == second.tokens
        assert first.sequence_id != second.sequence_id
        assert int(second.sequence_id.split(":")[-2]) >= 1_000_000_000
        session = sampler.sampling_session_id.split(":")[0]
        assert pickle.loads(pickle.dumps(sampler))._session is copy._session
        del copy
        assert Wire(url).send("session_heartbeat", {"session_id": session}).status == 200


def test_a_handle_carries_no_credential() -> None:
    service = ServiceClient(base_url="https://example.invalid", api_key="tml-very-secret")
    client = tinkex.SamplingClient(service._session, sampling_session_id="s:sample:0")
    text = base64.urlsafe_b64decode(client.get_sampler_handle()).decode()
    assert "secret" not in text
    assert "s:sample:0" in text
    assert pickle.loads(pickle.dumps(client))._session.config.api_key == "tml-very-secret"


@pytest.mark.parametrize("text", ["", "nonsense", "e30=", "bnVsbA=="])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no sampler handle"):
        tinkex.SamplingClient.from_sampler_handle(text)


def test_other_clients_cannot_be_pickled(url: str) -> None:
    with ServiceClient(base_url=url) as service:
        with pytest.raises(TypeError):
            pickle.dumps(service)
        with pytest.raises(TypeError):
            pickle.dumps(service.create_lora_training_client("fake", rank=2))
