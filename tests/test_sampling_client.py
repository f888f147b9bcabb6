"""SamplingClient: what is sent, how back-pressure is shared, time limits, cancelling, and
log-probabilities."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from faulty import Answer, FaultyServer, Seen, faulty_server
from support import wait_until
from tinkex import (
    APIResponseValidationError,
    APITimeoutError,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
)
from tinkex.client.http import limits
from tinkex.engine.fake import FakeEngine
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec

PROMPT = ModelInput.from_ints([1, 2, 3])
LARGE = ModelInput.from_ints([1] * 14_000)
PARAMS = SamplingParams(max_tokens=3)


def bulk(response: SampleResponse, **options: Any) -> Answer:
    return Answer(body=codec.encode(response).data, content_type=codec.PROTOBUF, **options)


ONE = SampleResponse([SampledSequence("length", tokens_np=np.array([7, 8], np.int32))])


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """A server of samples, each polled for by itself."""
    with faulty_server() as server:
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
        server.script(
            "asample", lambda seen: Answer(body={"request_id": f"q{seen.json['seq_id']}"})
        )
        server.script("retrieve_future", bulk(ONE))
        yield server


@pytest.fixture
def open_service(faulty: FaultyServer) -> Iterator[Callable[..., ServiceClient]]:
    services: list[ServiceClient] = []

    def make(key: str = "tml-x") -> ServiceClient:
        services.append(ServiceClient(base_url=faulty.base_url, api_key=key))
        return services[-1]

    yield make
    for service in services:
        service.close().result(10)


@pytest.fixture
def sampler(open_service: Callable[..., ServiceClient]) -> SamplingClient:
    return open_service().create_sampling_client(base_model="m").result()


@pytest.fixture
def small_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are a tenth of what was asked for; these are what was."""
    asked: list[float] = []
    real = limits.Backoff.pause

    def pause(self: limits.Backoff, seconds: float) -> None:
        asked.append(seconds)
        real(self, seconds / 10)

    monkeypatch.setattr(limits.Backoff, "pause", pause)
    return asked


def numbers(faulty: FaultyServer) -> list[int]:
    return [seen.json["seq_id"] for seen in faulty.requests("asample")]


# ── creation and the request ──────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C66")
def test_client_gets_its_own_sampling_session(
    faulty: FaultyServer, open_service: Callable[..., ServiceClient]
) -> None:
    service = open_service()
    first = service.create_sampling_client(base_model="m").result()
    second = service.create_sampling_client(model_path="tinker://run/sampler_weights/a").result()
    assert first.sampling_session_id == second.sampling_session_id == "x"
    sent = [seen.json for seen in faulty.requests("create_sampling_session")]
    assert [body["sampling_session_seq_id"] for body in sent] == [0, 1]
    assert [body.get("base_model") for body in sent] == ["m", None]
    assert [body.get("model_path") for body in sent] == [None, "tinker://run/sampler_weights/a"]
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client().result()


@pytest.mark.covers("D02", "C66")
def test_existing_sampling_session_needs_no_model(
    faulty: FaultyServer, open_service: Callable[..., ServiceClient]
) -> None:
    holder = open_service()._session
    sampler = SamplingClient.create(holder, sampling_session_id="mine").result(10)
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [7, 8]
    assert faulty.requests("create_sampling_session") == []
    assert faulty.requests("asample")[0].json["sampling_session_id"] == "mine"


@pytest.mark.covers("C67", "24.sampling.1", "C68")
def test_sample_on_the_wire(faulty: FaultyServer, sampler: SamplingClient) -> None:
    for _ in range(2):
        sampler.sample(PROMPT, 2, PARAMS, headers={"X-Mine": "yes"}).result(10)
    first, second = faulty.requests("asample")
    assert (first.json["seq_id"], second.json["seq_id"]) == (0, 1)
    assert first.headers["x-tinker-sampling-backpressure"] == "1"
    assert first.headers["x-mine"] == "yes"
    assert first.json["prompt"] == {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
    assert first.json["num_samples"] == 2
    assert first.json["type"] == "sample"
    assert first.json["sampling_params"]["max_tokens"] == 3
    poll = faulty.requests("retrieve_future")[0]
    assert poll.json["request_id"] == "q0"
    assert poll.headers["x-tinker-request-type"] == "Sample"


@pytest.mark.covers("C67")
def test_every_option_is_sent(faulty: FaultyServer, sampler: SamplingClient) -> None:
    targets = TensorData.from_numpy(np.array([[1, 2], [3, -1]], np.int64))
    sampler.sample(PROMPT, 1, PARAMS, True, 2, 3, targets, 4, 5).result(10)
    sent = faulty.requests("asample")[0].json
    assert sent["prompt_logprobs"] is True
    assert (sent["topk_prompt_logprobs"], sent["topk_sample_logprobs"]) == (2, 3)
    assert (sent["prompt_alt_tokens_k"], sent["prompt_logprobs_last_n"]) == (4, 5)
    assert sent["target_prompt_logprobs"]["shape"] == [2, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 2}, "needs include_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True}, "at least 1"),
        (
            {"target_prompt_logprobs": TensorData.from_numpy(np.zeros(3, np.int64))},
            "two-dimensional",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_a_request(
    faulty: FaultyServer, sampler: SamplingClient, options: dict[str, Any], words: str
) -> None:
    fields: dict[str, Any] = {"num_samples": 1} | options
    with pytest.raises(ValueError, match=words):
        sampler.sample(PROMPT, sampling_params=PARAMS, **fields)
    with pytest.raises(TypeError, match=r"ModelInput.from_ints"):
        sampler.sample("text", 1, PARAMS)  # type: ignore[arg-type]
    assert faulty.requests("asample") == []


def test_ids_are_the_servers_or_made_up_of_the_request(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    two = SampleResponse([*ONE.sequences, *ONE.sequences])
    faulty.script("retrieve_future", bulk(two))
    drawn = sampler.sample(PROMPT, 2, PARAMS).result(10)
    assert [sequence.sequence_id for sequence in drawn.sequences] == ["q0:0", "q0:1"]
    faulty.script("asample", Answer(body={"request_id": "q", "sample_sequence_ids": ["a", "b"]}))
    drawn = sampler.sample(PROMPT, 2, PARAMS).result(10)
    assert [sequence.sequence_id for sequence in drawn.sequences] == ["a", "b"]
    faulty.script("asample", Answer(body={"sequences": [{"tokens": [1], "stop_reason": "stop"}]}))
    drawn = sampler.sample(PROMPT, 1, PARAMS).result(10)  # a server that answers at once
    assert (drawn.sequences[0].tokens, drawn.sequences[0].sequence_id) == ([1], "x:2:0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        drawn.sequences[0].sequence_id = "other"  # type: ignore[misc]


@pytest.mark.covers("D12")
def test_answer_that_cannot_be_read_is_final(faulty: FaultyServer, sampler: SamplingClient) -> None:
    faulty.script("retrieve_future", Answer(body=b"\xff\xff", content_type=codec.PROTOBUF))
    with pytest.raises(APIResponseValidationError):
        sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(faulty) == [0]


# ── back-pressure ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C74", "24.sampling.2", "24.code.14")
@pytest.mark.parametrize(
    ("prompt", "retry_after", "seconds"),
    [
        (PROMPT, None, 1.0),
        (LARGE, None, 5.0),
        (PROMPT, "2", 2.0),
        (LARGE, "2", 5.0),
        (LARGE, "7", 7.0),
    ],
)
def test_429_pauses_and_the_same_request_is_sent_again(
    faulty: FaultyServer,
    sampler: SamplingClient,
    small_pause: list[float],
    prompt: ModelInput,
    retry_after: str | None,
    seconds: float,
) -> None:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    faulty.script(
        "asample", Answer(429, {"detail": "busy"}, headers), Answer(body={"request_id": "q"})
    )
    assert sampler.sample(prompt, 1, PARAMS).result(10).sequences
    assert small_pause == [seconds]
    first, second = faulty.requests("asample")
    assert first.json["seq_id"] == second.json["seq_id"] == 0
    assert second.when - first.when >= 0.9 * seconds / 10


@pytest.mark.covers("C69", "24.sampling.3", "24.sampling.5", "24.sampling.4")
def test_clients_of_an_account_share_a_pause_and_others_do_not(
    faulty: FaultyServer, open_service: Callable[..., ServiceClient], small_pause: list[float]
) -> None:
    first, second = (
        open_service("tml-a").create_sampling_client(base_model="m").result() for _ in range(2)
    )
    stranger = open_service("tml-b").create_sampling_client(base_model="m").result()
    assert first._session.gate is second._session.gate
    assert first._session.gate is not stranger._session.gate

    def normal(seen: Seen) -> Answer:
        return Answer(body={"request_id": f"q{seen.json['seq_id']}"})

    faulty.script("asample", Answer(429, {"detail": "busy"}, {"Retry-After": "1"}), normal)
    now = 100.0
    # the pause lasts until the test says that its time is over
    first._session.gate.backoff.clock = lambda: now

    def by_key() -> list[Seen]:
        return [seen for seen in faulty.requests("asample") if seen.headers["x-api-key"] == "tml-a"]

    refused = first.sample(PROMPT, 1, PARAMS)
    wait_until(lambda: len(small_pause) == 1)
    others = [second.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    stranger.sample(PROMPT, 1, PARAMS).result(10)
    time.sleep(0.15)
    assert len(by_key()) == 1
    now += 0.11
    for future in (refused, *others):
        future.result(10)
    assert len(by_key()) == 22
    assert sorted(seen.json["seq_id"] for seen in by_key()[1:]) == sorted([0, *range(20)])


@pytest.mark.covers("C74", "24.sampling.9")
def test_reason_in_a_429_reaches_the_log_and_the_observer(
    faulty: FaultyServer,
    sampler: SamplingClient,
    small_pause: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Any] = []
    body = {
        "detail": "busy",
        "queue_state": "paused_rate_limit",
        "queue_state_reason": "too many weights",
    }
    faulty.script("asample", Answer(429, body), Answer(body={"request_id": "q"}))
    observer: Callable[[Any, Any], None] = lambda state, reason: told.append((state.value, reason))  # noqa: E731
    sampler.sample(PROMPT, 1, PARAMS, queue_state_observer=observer).result(10)
    assert "Sampling is paused for x. Reason: too many weights" in caplog.text
    assert told == [("paused_rate_limit", "too many weights")]


@pytest.mark.covers("D28")
def test_permits_are_held_while_submitting_and_not_while_waiting(
    faulty: FaultyServer,
    open_service: Callable[..., ServiceClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "DISPATCHES", 2)
    faulty.script("retrieve_future", bulk(ONE, until=lambda: len(faulty.requests("asample")) == 8))
    sampler = open_service("tml-permits").create_sampling_client(base_model="m").result()
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(8)]
    for future in futures:
        future.result(10)  # which there is none of before all of them are submitted
    assert len(faulty.requests("asample")) == 8


# ── time limits and cancelling ────────────────────────────────────────────────────────────────────


@pytest.mark.covers("D31")
def test_limit_of_the_result_and_that_of_the_exchange_are_two(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    transport = sampler._session.transport
    transport.config = dataclasses.replace(transport.config, timeout=0.2)
    faulty.script("retrieve_future", bulk(ONE, delay=0.5))
    # the exchange's limit is not the result's
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences
    faulty.script("retrieve_future", bulk(ONE, delay=60))
    with pytest.raises(APITimeoutError, match=r"no samples within 0.1 s"):
        sampler.sample(PROMPT, 1, PARAMS, timeout=0.1).result(20)


@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.parametrize("enabled", [True, False])
def test_server_learns_of_a_cancelled_sample(
    faulty: FaultyServer, open_service: Callable[..., ServiceClient], how: str, enabled: bool
) -> None:
    faulty.script("client/config", Answer(body={"sample_max_concurrent_requests": 1}))
    faulty.script("client/dynamic_config", Answer(body={"sample_cancel_enabled": enabled}))
    faulty.script("cancel_future", Answer(body={}))
    faulty.script("retrieve_future", bulk(ONE, delay=60))
    sampler = open_service().create_sampling_client(base_model="m").result()
    if how == "timeout":
        # the time may be over before it has come so far
        while not faulty.requests("retrieve_future"):
            with pytest.raises(APITimeoutError):
                sampler.sample(PROMPT, 1, PARAMS, timeout=0.1).result(10)
    else:
        future = sampler.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: len(faulty.requests("retrieve_future")) == 1)
        assert future.future().cancel()
    unwanted = faulty.requests("retrieve_future")[0].json["request_id"]
    faulty.script("retrieve_future", bulk(ONE))
    # the only place is free again
    assert sampler.sample(PROMPT, 1, PARAMS, timeout=20).result(20).sequences
    if enabled:
        wait_until(
            lambda: (
                {"request_id": unwanted} in [seen.json for seen in faulty.requests("cancel_future")]
            )
        )
    else:
        assert faulty.requests("cancel_future") == []


def test_cancelled_sample_is_dropped_by_our_server(
    fake_service: Callable[..., ServiceClient],
) -> None:
    engine = FakeEngine(step_delay=0.002)
    sampler = fake_service(engine).create_sampling_client(base_model="fake").result()
    with pytest.raises(APITimeoutError):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=10**6), timeout=0.2).result(10)
    wait_until(lambda: not engine.sampling())


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C75", "D16", "24.sampling.8")
def test_log_probabilities_keep_their_gaps_and_their_options(
    faulty: FaultyServer, sampler: SamplingClient
) -> None:
    scores = np.array([np.nan, -0.5, -1.5], np.float32)
    faulty.script("retrieve_future", bulk(SampleResponse(ONE.sequences, prompt_logprobs_np=scores)))
    assert sampler.compute_logprobs(PROMPT, 2).result(10) == [None, -0.5, -1.5]
    sent = faulty.requests("asample")[0].json
    assert (sent["prompt_logprobs"], sent["prompt_logprobs_last_n"]) == (True, 2)
    assert (sent["num_samples"], sent["sampling_params"]["max_tokens"]) == (1, 1)
    faulty.script("retrieve_future", bulk(ONE, delay=60))
    with pytest.raises(APITimeoutError, match=r"0.1 s"):
        sampler.compute_logprobs(PROMPT, timeout=0.1).result(10)


@pytest.mark.covers("D16")
def test_observers_see_log_probabilities(
    faulty: FaultyServer, sampler: SamplingClient, small_pause: list[float]
) -> None:
    told: list[Any] = []
    body = {"detail": "busy", "queue_state": "paused_capacity"}
    faulty.script("asample", Answer(429, body), Answer(body={"request_id": "q"}))
    observer: Callable[[Any], None] = lambda state: told.append(state.value)  # noqa: E731
    assert sampler.compute_logprobs(PROMPT, queue_state_observer=observer).result(10) == []
    assert told == ["paused_capacity"]


@pytest.mark.covers("C66", "4.1/12")
def test_closed_client_is_a_clear_error(open_service: Callable[..., ServiceClient]) -> None:
    service = open_service()
    sampler = service.create_sampling_client(base_model="m").result()
    service.close().result(10)
    for call in (
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: sampler.compute_logprobs(PROMPT),
    ):
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            call()
    assert sampler.get_base_model() == "m"  # which needs no request
