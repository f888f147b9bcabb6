"""RetryConfig and RetryHandler: counts, delays, concurrency, and when they give up."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import settled, wait_until
from tinkex import (
    APIConnectionError,
    APITimeoutError,
    ModelInput,
    RetryConfig,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    events,
)
from tinkex.client.http.limits import DispatchGate
from tinkex.client.http.retry import RetryHandler
from tinkex.errors import (
    APIResponseValidationError,
    BadRequestError,
    GoneError,
    InternalServerError,
    RateLimitError,
    RequestFailedError,
)
from tinkex.types.future_requests import RequestErrorCategory
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3)
QUICK = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002)

# ── the configuration ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.19/1", "C72", "C87")
def test_numbers_of_the_policy_can_be_read() -> None:
    config = RetryConfig()
    assert (config.max_retries, config.retry_delay_base, config.retry_delay_max) == (
        None,
        0.5,
        10.0,
    )
    assert (config.jitter_factor, config.progress_timeout, config.max_connections) == (
        0.25,
        7200.0,
        1000,
    )
    assert (config.enable_retry_logic, config.enable_stuck_detection) == (True, True)


@pytest.mark.covers("C72")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_connections", 0),
        ("progress_timeout", 0.0),
        ("retry_delay_base", 0.0),
        ("retry_delay_base", -1.0),
        ("retry_delay_max", 0.1),
        ("jitter_factor", -0.1),
        ("jitter_factor", 1.1),
        ("max_retries", -1),
    ],
)
def test_invalid_option_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RetryConfig(**{field: value})  # type: ignore[arg-type]


def test_values_at_the_limits_are_accepted() -> None:
    RetryConfig(
        max_connections=1, jitter_factor=0, max_retries=0, retry_delay_base=1, retry_delay_max=1
    )
    RetryConfig(jitter_factor=1)


@pytest.mark.covers("1.19/1", "C86")
def test_waits_double_up_to_the_most() -> None:
    config = RetryConfig(jitter_factor=0)
    assert [config.delay(attempt) for attempt in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert config.delay(10_000) == 10


@pytest.mark.covers("1.19/1", "C86", "C72")
@pytest.mark.parametrize("attempt", [0, 2, 4, 9])
def test_jitter_stays_within_its_share_and_under_the_most(attempt: int) -> None:
    config = RetryConfig()
    plain = min(0.5 * 2**attempt, 10)
    assert config.delay(attempt, jitter=0.0) == pytest.approx(0.75 * plain)
    assert config.delay(attempt, jitter=0.5) == pytest.approx(plain)
    assert config.delay(attempt, jitter=1.0) == pytest.approx(min(1.25 * plain, 10))
    drawn = {config.delay(attempt) for _ in range(200)}
    assert len(drawn) > 1
    assert all(0.75 * plain <= delay <= min(1.25 * plain, 10) for delay in drawn)


def status(kind: type[Any], code: int) -> Exception:
    error: Exception = kind("no", status_code=code)
    return error


@pytest.mark.covers("D12", "C72")
@pytest.mark.parametrize(
    ("error", "again"),
    [
        (status(RateLimitError, 429), True),
        (status(InternalServerError, 500), True),
        (status(InternalServerError, 503), True),
        (status(tinkex.ConflictError, 409), True),
        (status(GoneError, 410), True),
        (APIConnectionError("cut off"), True),
        (APITimeoutError("late"), True),
        (TimeoutError(), True),
        (status(BadRequestError, 400), False),
        (status(tinkex.AuthenticationError, 401), False),
        (APIResponseValidationError("not a sample"), False),
        (
            RequestFailedError("bad input", request_id="q", category=RequestErrorCategory.Server),
            False,
        ),
        (ValueError("a mistake"), False),
    ],
)
def test_only_passing_failures_are_tried_again(error: Exception, again: bool) -> None:
    assert RetryConfig().is_retryable(error) is again


def test_server_may_overrule_and_so_may_the_user() -> None:
    error = InternalServerError("no", status_code=500)
    error.should_retry = False
    assert not RetryConfig().is_retryable(error)
    refused = BadRequestError("no", status_code=400)
    refused.should_retry = True
    assert RetryConfig().is_retryable(refused)
    assert RetryConfig(retryable_exceptions=(KeyError,)).is_retryable(KeyError("x"))
    assert not RetryConfig(retryable_exceptions=()).is_retryable(APIConnectionError("cut off"))


# ── the handler, on a user's own function ─────────────────────────────────────────────────────────


async def pause(seconds: float, value: str = "") -> str:
    await asyncio.sleep(seconds)
    return value


class Flaky:
    """Fails so many times, then gives what it was called with."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return args, kwargs


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """The events of retries, shortly named."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    names = [events.RETRY_START, events.RETRY_STOP, events.RETRY_RETRY, events.RETRY_FAILED]
    events.attach(
        "retries",
        names,
        lambda name, numbers, facts: found.append((name.split(".")[-1], {**numbers}, {**facts})),
    )
    yield found
    events.detach("retries")


@pytest.mark.covers("1.19/1", "1.4.2/6", "C86", "4.1/9")
async def test_any_function_can_be_tried_again(
    heard: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(APIConnectionError("one"), TimeoutError("two"))
    handler = RetryHandler(QUICK, "my calls")
    with caplog.at_level(logging.WARNING, "tinkex"):
        assert await handler.execute(flaky, 1, key=2) == ((1,), {"key": 2})
    assert flaky.calls == 3
    assert "my calls: one; trying again in 0.0 s" in caplog.text
    assert [(name, facts["attempt"]) for name, _, facts in heard] == [
        ("start", 0),
        ("retry", 0),
        ("start", 1),
        ("retry", 1),
        ("start", 2),
        ("stop", 2),
    ]
    for name, numbers, facts in heard:
        contents = events.CATALOGUE[f"tinkex.retry.attempt.{name}"]
        assert set(numbers) == set(contents.measurements)
        assert set(facts) == {*contents.metadata, "name"}
    assert 0.75 <= heard[1][1]["delay_ms"] <= 1.25
    assert str(heard[3][2]["error"]) == "two"


@pytest.mark.covers("1.19/1", "C86")
async def test_last_failure_is_raised_as_it_was(heard: list[Any]) -> None:
    failures = [APIConnectionError(str(number)) for number in range(5)]
    flaky = Flaky(*failures)
    with pytest.raises(APIConnectionError) as caught:
        await RetryHandler(RetryConfig(retry_delay_base=0.001, max_retries=2)).execute(flaky)
    assert caught.value is failures[2]
    assert flaky.calls == 3
    assert [name for name, *_ in heard] == ["start", "retry", "start", "retry", "start", "failed"]


@pytest.mark.parametrize(
    "config", [RetryConfig(enable_retry_logic=False), RetryConfig(max_retries=0)]
)
async def test_function_without_retries_is_called_once(config: RetryConfig) -> None:
    flaky = Flaky(APIConnectionError("cut off"))
    with pytest.raises(APIConnectionError):
        await RetryHandler(config).execute(flaky)
    assert flaky.calls == 1


@pytest.mark.covers("1.19/1")
async def test_mistakes_are_not_repeated() -> None:
    flaky = Flaky(ZeroDivisionError("a mistake"))
    with pytest.raises(ZeroDivisionError):
        await RetryHandler(QUICK).execute(flaky)
    assert flaky.calls == 1


async def test_server_that_asks_for_more_time_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("tinkex.client.http.retry.asyncio.sleep", sleep)
    await RetryHandler(QUICK).execute(Flaky(RateLimitError("no", status_code=429, retry_after=7.0)))
    assert slept == [7.0]


@pytest.mark.covers("C73", "24.sampling.6")
@pytest.mark.parametrize("limit", [1, 3])
async def test_concurrency_is_limited(limit: int) -> None:
    running, most = 0, 0

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    handler = RetryHandler(RetryConfig(max_connections=limit))
    await asyncio.gather(*(handler.execute(call) for _ in range(10)))
    assert most == limit


@pytest.mark.covers("C73")
async def test_dispatch_slot_is_held_through_all_attempts() -> None:
    handler, order = (
        RetryHandler(RetryConfig(max_connections=1, retry_delay_base=0.01)),
        list[str](),
    )
    flaky = Flaky(APIConnectionError("cut off"))

    async def call(name: str) -> None:
        order.append(name)
        if name == "first":
            await flaky()

    await asyncio.gather(handler.execute(call, "first"), handler.execute(call, "second"))
    assert order == ["first", "first", "second"]
    cancelled = asyncio.ensure_future(handler.execute(pause, 10))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await asyncio.wait_for(handler.execute(call, "third"), 20)


# ── when nothing comes through ────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.19/1", "C72", "C86")
async def test_stuck_calls_fail_with_a_clear_error() -> None:
    handler = RetryHandler(RetryConfig(progress_timeout=0.1), "sampling from x")
    outcomes = await asyncio.gather(
        *(handler.execute(pause, 10) for _ in range(3)), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, APIConnectionError)
        assert "sampling from x: nothing has come through for 0.1 s" in str(outcome)
        assert "progress_timeout" in (outcome.hint or "")
    assert await handler.execute(pause, 0, "fine") == "fine"


@pytest.mark.parametrize("ending", ["success", "refusal"])
async def test_progress_keeps_all_calls_alive(ending: str) -> None:
    now = 0.0
    handler = RetryHandler(RetryConfig(progress_timeout=15), clock=lambda: now)
    slow = asyncio.ensure_future(handler.execute(pause, 0.1, "slow but sure"))
    for _ in range(6):
        await asyncio.sleep(0)
        now += 10
        flaky = Flaky() if ending == "success" else Flaky(BadRequestError("no", status_code=400))
        await asyncio.gather(handler.execute(flaky), return_exceptions=True)
        handler._look()
    assert await slow == "slow but sure"


async def test_cancelled_call_is_no_progress() -> None:
    handler = RetryHandler(RetryConfig(progress_timeout=0.15))
    stuck = asyncio.ensure_future(handler.execute(pause, 10))
    for _ in range(6):
        other = asyncio.ensure_future(handler.execute(pause, 10))
        await asyncio.sleep(0.04)
        other.cancel()
    with pytest.raises(APIConnectionError, match="nothing has come through"):
        await asyncio.wait_for(stuck, 9)


async def test_later_calls_time_out_later() -> None:
    now = 0.0
    handler = RetryHandler(RetryConfig(progress_timeout=20), clock=lambda: now)
    first = asyncio.ensure_future(handler.execute(pause, 10))
    await asyncio.sleep(0)
    now = 15
    second = asyncio.ensure_future(handler.execute(pause, 0.05, "in time"))
    await asyncio.sleep(0)
    now = 30
    handler._look()
    with pytest.raises(APIConnectionError):
        await first
    assert await second == "in time"


async def test_stuck_detection_can_be_turned_off() -> None:
    handler = RetryHandler(RetryConfig(progress_timeout=0.05, enable_stuck_detection=False))
    assert await handler.execute(pause, 0.15, "late") == "late"


async def test_cancellation_at_the_same_moment_is_respected() -> None:
    handler = RetryHandler(RetryConfig(progress_timeout=10))
    call = asyncio.ensure_future(handler.execute(pause, 10))
    await asyncio.sleep(0.01)
    handler._progress -= 20
    for task in handler._running:
        handler._running[task] -= 20
    handler._look()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.covers("C72")
async def test_failures_are_repeated_for_as_long_as_progress_allows() -> None:
    now = [0.0]

    async def failing() -> None:
        now[0] += 40
        raise APIConnectionError("cut off")

    handler = RetryHandler(
        RetryConfig(progress_timeout=100, retry_delay_base=0.001, enable_stuck_detection=False),
        clock=lambda: now[0],
    )
    with pytest.raises(APIConnectionError, match="cut off"):
        await handler.execute(failing)
    assert now[0] == 120


@pytest.mark.covers("1.19/4")
async def test_four_hundred_samples_are_submitted_at_once_and_no_more_than_the_bytes_allow() -> (
    None
):
    gate, inside, release = DispatchGate(5 * 1024 * 1024), list[int](), asyncio.Event()

    async def submit(size: int) -> None:
        async with gate.passed(size):
            inside.append(size)
            await release.wait()

    many = [asyncio.create_task(submit(10)) for _ in range(450)]
    await asyncio.sleep(0.05)
    assert len(inside) == 400
    release.set()
    await asyncio.gather(*many)
    release.clear()
    inside.clear()
    # the second overdraws, the third waits
    large = [asyncio.create_task(submit(3 * 1024 * 1024)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert len(inside) == 2
    release.set()
    await asyncio.gather(*large)


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


def bulk(tokens: list[int]) -> Answer:
    response = SampleResponse([SampledSequence("length", tokens_np=np.array(tokens, np.int32))])
    return Answer(body=codec.encode(response).data, content_type=codec.PROTOBUF)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server of samples, each polled for by itself, and short waits."""
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.01)
    with faulty_server() as server:
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
        server.script(
            "asample", lambda seen: Answer(body={"request_id": f"q{seen.json['seq_id']}"})
        )
        server.script("retrieve_future", lambda seen: bulk([int(seen.json["request_id"][1:])]))
        yield server


@pytest.fixture
def make(faulty: FaultyServer) -> Iterator[Callable[..., SamplingClient]]:
    services: list[ServiceClient] = []

    def sampler(config: RetryConfig | None = None, **flags: Any) -> SamplingClient:
        faulty.script("client/config", Answer(body=flags))
        services.append(ServiceClient(base_url=faulty.base_url, api_key="tml-x"))
        return services[-1].create_sampling_client(base_model="m", retry_config=config).result()

    yield sampler
    for service in services:
        service.close().result(10)


def numbers(faulty: FaultyServer) -> list[int]:
    return [seen.json["seq_id"] for seen in faulty.requests("asample")]


def drawn(sampler: SamplingClient) -> list[int]:
    return sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens


@pytest.mark.covers("24.code.14", "C72", "24.sampling.1", "C67")
def test_result_that_is_gone_makes_a_sample_be_submitted_again_under_a_new_number(
    faulty: FaultyServer, make: Callable[..., SamplingClient], heard: list[Any]
) -> None:
    sampler = make(QUICK)
    faulty.script("retrieve_future", Answer(410, {"detail": "expired"}), lambda seen: bulk([9]))
    assert drawn(sampler) == [9]
    assert numbers(faulty) == [0, 1]
    assert [name for name, *_ in heard] == ["start", "retry", "start", "stop"]
    assert heard[0][2]["name"] == "sampling from x"


@pytest.mark.covers("C72")
def test_sample_is_resubmitted_if_its_poll_is_lost_too_long(
    faulty: FaultyServer, make: Callable[..., SamplingClient]
) -> None:
    sampler = make(QUICK)
    transport = sampler._session.transport
    transport.config = dataclasses.replace(transport.config, patience=0.05)
    broken = [Answer(drop=True)] * 40

    def poll(seen: Seen) -> Answer:
        return broken.pop() if seen.json["request_id"] == "q0" else bulk([1])

    faulty.script("retrieve_future", poll)
    assert drawn(sampler) == [1]
    assert numbers(faulty) == [0, 1]


@pytest.mark.covers("C72")
def test_retries_can_be_bounded(faulty: FaultyServer, make: Callable[..., SamplingClient]) -> None:
    sampler = make(RetryConfig(max_retries=2, retry_delay_base=0.001))
    faulty.script("retrieve_future", Answer(410, {"detail": "expired"}))
    with pytest.raises(GoneError, match="expired"):
        drawn(sampler)
    assert numbers(faulty) == [0, 1, 2]


@pytest.mark.covers("24.sampling.7", "C68")
@pytest.mark.parametrize("status_code", [400, 500])
@pytest.mark.parametrize("how", ["the client's wish", "the server's"])
def test_failure_without_retries_surfaces_once(
    faulty: FaultyServer, make: Callable[..., SamplingClient], status_code: int, how: str
) -> None:
    config = RetryConfig(enable_retry_logic=False) if how == "the client's wish" else None
    sampler = make(config, sample_no_retries=how == "the server's")
    faulty.script("asample", Answer(status_code, {"detail": "no such luck"}))
    with pytest.raises(tinkex.APIStatusError, match="no such luck") as caught:
        drawn(sampler)
    assert caught.value.status_code == status_code
    assert len(numbers(faulty)) == 1
    gate = sampler._session.gate
    assert gate.backoff.until == 0
    assert not gate.backoff.recently


def test_back_pressure_without_retries_surfaces_once_and_pauses_others(
    faulty: FaultyServer, make: Callable[..., SamplingClient]
) -> None:
    sampler = make(RetryConfig(enable_retry_logic=False))
    faulty.script("asample", Answer(429, {"detail": "slow down"}))
    with pytest.raises(RateLimitError, match="slow down"):
        drawn(sampler)
    assert len(numbers(faulty)) == 1
    assert sampler._session.gate.backoff.recently


def test_removed_sampler_is_not_polled_again(
    faulty: FaultyServer, make: Callable[..., SamplingClient]
) -> None:
    sampler = make(QUICK)
    faulty.script("asample", Answer(410, {"detail": "the session has ended"}))
    with pytest.raises(GoneError, match="the session has ended"):
        drawn(sampler)
    assert numbers(faulty) == [0]


@pytest.mark.covers("C73", "24.sampling.6")
@pytest.mark.parametrize(("wished", "allowed", "most"), [(2, 5, 2), (5, 2, 2), (None, 3, 3)])
def test_samples_in_flight_respect_both_limits(
    faulty: FaultyServer,
    make: Callable[..., SamplingClient],
    wished: int | None,
    allowed: int,
    most: int,
) -> None:
    config = RetryConfig(max_connections=wished) if wished else None
    sampler = make(config, sample_max_concurrent_requests=allowed)
    gate = threading.Event()
    held = Answer(body=bulk([1]).body, content_type=codec.PROTOBUF, until=gate.is_set)
    faulty.script("retrieve_future", held)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(6)]
    wait_until(lambda: len(faulty.requests("asample")) >= most)
    assert settled(lambda: len(faulty.requests("asample"))) == most
    gate.set()
    for future in futures:
        future.result(10)


def test_stuck_samples_are_reported(
    faulty: FaultyServer, make: Callable[..., SamplingClient]
) -> None:
    sampler = make(RetryConfig(progress_timeout=0.2))
    faulty.script("retrieve_future", Answer(408, {"queue_state": "active"}, delay=60))
    with pytest.raises(
        APIConnectionError, match=r"sampling from x: nothing has come through for 0.2 s"
    ):
        drawn(sampler)


def test_server_may_turn_stuck_detection_off(
    faulty: FaultyServer, make: Callable[..., SamplingClient]
) -> None:
    sampler = make(RetryConfig(progress_timeout=0.05), sample_enable_stuck_detection=False)
    faulty.script(
        "retrieve_future", Answer(body=bulk([4]).body, content_type=codec.PROTOBUF, delay=0.2)
    )
    assert drawn(sampler) == [4]
