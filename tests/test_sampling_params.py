"""Settings of sampling that are tinkex's own, from a client to the engine and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import MODEL, Wire, sample_json, serving
from tinkex import ModelInput, SamplingParams, ServiceClient
from tinkex.engine.fake import FakeEngine
from tinkex.errors import TinkerError

PROMPT = ModelInput.from_ints([5, 6, 7])


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0, stop=[], **settings)


def test_client_s_settings_reach_the_engine(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    plain = sampler.sample(PROMPT, 1, greedy()).result(20).sequences[0]
    first, second = plain.tokens[:2]
    for changes in ({"bad_words": [[first]]}, {"logit_bias": {first: -100.0}}):
        drawn = sampler.sample(PROMPT, 1, greedy(**changes)).result(20).sequences[0]
        assert first not in drawn.tokens
    pair = sampler.sample(PROMPT, 1, greedy(bad_words=[[first, second]])).result(20).sequences[0]
    assert pair.tokens[0] == first
    assert pair.tokens[1] != second
    assert pair.logprobs is not None
    assert plain.logprobs is not None
    assert pair.logprobs[0] == pytest.approx(plain.logprobs[0])
    spread = (
        sampler.sample(PROMPT, 1, greedy(frequency_penalty=2, presence_penalty=2))
        .result(20)
        .sequences[0]
    )
    assert len(set(spread.tokens)) >= len(set(plain.tokens))
    sharp = SamplingParams(max_tokens=8, min_p=1.0, stop=[], seed=1)
    assert sampler.sample(PROMPT, 1, sharp).result(20).sequences[0].tokens == plain.tokens
    streamed = list(sampler.sample_stream(PROMPT, greedy(bad_words=[[first]])))
    assert first not in [chunk.token_id for chunk in streamed]


def test_arguments_in_the_wrong_order_are_a_clear_error(service: ServiceClient) -> None:
    sampler: Any = service.create_sampling_client(base_model=MODEL).result()
    with pytest.raises(TypeError, match="the order is prompt, number of samples, sampling_params"):
        sampler.sample(PROMPT, greedy(), 1)
    with pytest.raises(TypeError, match="num_samples must be a whole number, got float"):
        sampler.sample(PROMPT, 1.5, greedy())


@pytest.mark.parametrize("changes", [{"logit_bias": {10**6: 1.0}}, {"bad_words": [[10**6]]}])
def test_token_outside_the_vocabulary_is_the_callers_fault(
    service: ServiceClient, changes: dict[str, Any]
) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    with pytest.raises(TinkerError, match="outside the vocabulary"):
        sampler.sample(PROMPT, 1, greedy(**changes)).result(20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": -9}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[1] * 300]}, "bad_words"),
    ],
    ids=str,
)
def test_server_refuses_requests_beyond_its_limits(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        asked = {"session_id": wire.session(), "sampling_session_seq_id": 0, "base_model": "fake"}
        request = sample_json(wire.post("create_sampling_session", asked)["sampling_session_id"])
        request["sampling_params"] |= changes
        heard = wire.send("asample", request)
        assert heard.status in (400, 422)
        assert words in heard.json["detail"]
