"""Polling: every form of an answer, every wait, every end. The server is scripted; nobody waits for
long waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import settled
from tinkex import ServiceClient, events, types
from tinkex.client.futures import queue_states, result_polling
from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.await_many import await_many, await_many_async
from tinkex.client.futures.result_polling import Receipt, retrieve
from tinkex.client.http import limits, retry
from tinkex.client.http.limits import ByteBudget
from tinkex.client.http.retry import CONFLICT_PATIENCE
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.client.settings.delays import LONGEST_RETRY_AFTER
from tinkex.wire import codec, protocol

LOGPROBS = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData.from_numpy(np.array([-1.0], np.float32))}],
    {"loss:sum": 1.0},
)
PASSED = Answer(body=codec.encode(LOGPROBS).data, content_type=codec.PROTOBUF)
METRICS = {"lr:mean": 0.5}
STEPPED = Answer(body={"metrics": METRICS})
STEP = types.AdamParams(learning_rate=0.1)
DATA = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


class Quick:
    """asyncio as the polls see it: waits are noted instead of kept."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0.001)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between polls, which take no time."""
    quick = Quick()
    monkeypatch.setattr(retry, "asyncio", quick)
    return quick.waits


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Mapping[str, float], Mapping[str, Any]]]]:
    """Record the events of polls and queues while a test runs."""
    found: list[tuple[str, Mapping[str, float], Mapping[str, Any]]] = []
    names = [*events.FUTURE_EVENTS, events.QUEUE_STATE_CHANGE]
    events.attach("polls", names, lambda *event: found.append(event))
    yield found
    events.detach("polls")


def poll(
    faulty: FaultyServer,
    *answers: Any,
    op: protocol.Operation = protocol.OPTIM_STEP,
    timeout: float | None = None,
    notice: Any = None,
    prepare: Callable[[Transport], None] = lambda _: None,
    **settings: Any,
) -> Any:
    """Wait for a result that the server gives in this way."""
    faulty.script("retrieve_future", *answers)

    async def run() -> Any:
        carrier = Transport(Config(base_url=faulty.base_url, **settings))
        prepare(carrier)
        try:
            return await retrieve(
                carrier, Receipt(op, time.monotonic(), "r1"), timeout=timeout, notice=notice
            )
        finally:
            await carrier.close()

    return asyncio.run(run())


def count(faulty: FaultyServer) -> int:
    return len(faulty.requests("retrieve_future"))


# ── forms of an answer ────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.futures.1", "C58")
@pytest.mark.parametrize(
    "body",
    [
        {"metrics": METRICS},
        {"status": "completed", "result": {"metrics": METRICS}},
        {"status": "COMPLETED", "result": {"metrics": METRICS}},
        {"status": "completed", "result": {"metrics": METRICS}, "error": None},
        {"type": "optim_step", "metrics": METRICS},
        {"status": "completed", "metrics": METRICS},
    ],
    ids=str,
)
def test_result_is_taken_plain_or_in_an_envelope(
    faulty: FaultyServer, waits: list[float], body: Any
) -> None:
    assert poll(faulty, Answer(body=body)) == types.OptimStepResponse(metrics=METRICS)
    assert count(faulty) == 1
    assert waits == []


@pytest.mark.covers("C58")
def test_pass_in_an_envelope_is_read_like_any_other(faulty: FaultyServer) -> None:
    body = {"status": "Completed", "result": LOGPROBS.to_wire()}
    assert poll(faulty, Answer(body=body), op=protocol.FORWARD_BACKWARD) == LOGPROBS


@pytest.mark.covers("24.futures.1", "C58", "D24")
@pytest.mark.parametrize(
    "body",
    [
        {"status": "pending"},
        {"status": "Pending", "queue_state": "active"},
        {"type": "try_again"},
        {"type": "TRY_AGAIN", "queue_state": "active"},
        {"type": "Try_Again", "queue_state": 7, "retry_after_ms": "soon"},
        {"type": "try_again", "retry_after_ms": True},
        {"type": "try_again", "retry_after_ms": -5},
    ],
    ids=str,
)
def test_answer_without_a_result_is_polled_again_after_a_wait(
    faulty: FaultyServer, waits: list[float], body: Any
) -> None:
    assert poll(faulty, Answer(body=body), Answer(body=body), STEPPED).metrics == METRICS
    assert count(faulty) == 3
    assert len(waits) == 2
    assert all(0 < wait <= 0.1 for wait in waits)


@pytest.mark.covers("24.futures.1", "C58", "D06")
@pytest.mark.parametrize(
    ("body", "category", "words"),
    [
        ({"error": "bad datum", "category": "user"}, "user", "bad datum"),
        ({"status": "failed", "error": "bad datum"}, "unknown", "bad datum"),
        (
            {"status": "FAILED", "error": {"message": "bad datum", "category": "USER"}},
            "user",
            "bad datum",
        ),
        (
            {"status": "failed", "error": {"error": "bad datum"}, "category": "server"},
            "server",
            "bad datum",
        ),
        ({"status": "failed", "error": None}, "unknown", "no reason"),
        ({"status": "failed"}, "unknown", "no reason"),
        ({"error": {}}, "unknown", "no reason"),
        (
            {"status": "completed", "result": {"error": "bad datum", "category": "user"}},
            "user",
            "bad datum",
        ),
    ],
    ids=str,
)
def test_failure_in_any_form_is_final_and_typed(
    faulty: FaultyServer, waits: list[float], body: Any, category: str, words: str
) -> None:
    with pytest.raises(tinkex.RequestFailedError, match=f"optim_step failed.*{words}") as caught:
        poll(faulty, Answer(body=body), STEPPED)
    assert (caught.value.category, caught.value.request_id) == (category, "r1")
    assert count(faulty) == 1
    assert waits == []


# ── waits that the server asks for ────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.futures.1")
@pytest.mark.parametrize(
    ("asked", "seconds"),
    [(250, 0.25), (0, 0.0), (3000, 3.0), (60_000, 60.0), (10**9, LONGEST_RETRY_AFTER)],
)
@pytest.mark.parametrize(
    "said",
    [{"type": "try_again", "queue_state": "paused_capacity"}, {"status": "pending"}],
    ids=["again", "pending"],
)
def test_server_states_the_retry_delay(
    faulty: FaultyServer, waits: list[float], said: dict[str, Any], asked: int, seconds: float
) -> None:
    poll(faulty, Answer(body={**said, "retry_after_ms": asked}), STEPPED)
    assert waits == [seconds]


def test_408_may_state_the_retry_delay(faulty: FaultyServer, waits: list[float]) -> None:
    poll(faulty, Answer(408, {"queue_state": "active", "retry_after_ms": 1500}), STEPPED)
    assert waits == [1.5]


@pytest.mark.covers("24.futures.1")
@pytest.mark.parametrize("state", ["paused_rate_limit", "paused_capacity", " Paused_Capacity "])
def test_paused_queue_is_asked_once_a_second(
    faulty: FaultyServer, waits: list[float], state: str
) -> None:
    again = Answer(body={"type": "try_again", "queue_state": state})
    poll(faulty, again, again, Answer(body={"type": "try_again", "queue_state": "active"}), STEPPED)
    assert waits[:2] == [1.0, 1.0]
    assert waits[2] <= 0.1


# ── large results ─────────────────────────────────────────────────────────────────────────────────


def announced(size: Any = 1000) -> Answer:
    return Answer(body={"status": "complete_metadata", "response_payload_size": size})


@pytest.mark.covers("24.code.8")
def test_result_announced_a_second_time_is_an_error(
    faulty: FaultyServer, waits: list[float]
) -> None:
    with pytest.raises(
        tinkex.APIResponseValidationError, match=r"optim_step.*r1 was announced a second time"
    ):
        poll(faulty, announced(), announced(), STEPPED)
    assert [seen.json["allow_metadata_only"] for seen in faulty.requests("retrieve_future")] == [
        True,
        False,
    ]


@pytest.mark.covers("24.futures.6")
@pytest.mark.parametrize("size", [0, 5, None, "many", -3], ids=str)
def test_announced_result_is_fetched_through_faults(
    faulty: FaultyServer, waits: list[float], size: Any
) -> None:
    body = {"status": "Complete_Metadata", "response_payload_size": size}
    assert poll(faulty, Answer(body=body), Answer(503), Answer(408), STEPPED).metrics == METRICS
    asked = [seen.json["allow_metadata_only"] for seen in faulty.requests("retrieve_future")]
    assert asked == [True, False, False, False]


def test_budget_is_released_after_every_fetch(faulty: FaultyServer, waits: list[float]) -> None:
    budget = ByteBudget(10)

    def prepare(carrier: Transport) -> None:
        carrier.response_budget = budget

    for ending in (STEPPED, Answer(404, {"detail": "no"}), Answer(body={"error": "no"})):
        with contextlib.suppress(tinkex.TinkerError):
            poll(faulty, announced(), ending, prepare=prepare)
        assert budget.left == 10


HELD = 0.15


def held_fetches(faulty: FaultyServer, *keys: str | None, together: int = 1) -> list[float]:
    """Return the times of the polls for one pass with each of these keys.

    Each takes its time to come, and comes when so many were asked for.
    """

    def fetches() -> list[Seen]:
        return [
            seen
            for seen in faulty.requests("retrieve_future")
            if not seen.json["allow_metadata_only"]
        ]

    def result(seen: Seen) -> Answer:
        if seen.json["request_id"] == "created":
            return Answer(body={"model_id": "m"})
        held = {"delay": HELD, "until": lambda: len(fetches()) >= together}
        return (
            announced(1000) if seen.json["allow_metadata_only"] else Answer(**vars(PASSED) | held)
        )

    faulty.script("client/config", Answer(body={"inflight_response_bytes_semaphore_size": 10}))
    faulty.script("retrieve_future", result)
    faulty.script("forward_backward", Answer(body={"request_id": "r"}))
    services = [ServiceClient(base_url=faulty.base_url, api_key=key) for key in keys]
    try:
        clients = [service.create_lora_training_client("m").result() for service in services]
        passes = [client.forward_backward(DATA, "cross_entropy") for client in clients]
        for future in passes:
            assert future.result(10) == LOGPROBS
    finally:
        for service in services:
            service.close().result(10)
    return sorted(seen.when for seen in fetches())


@pytest.mark.covers("C59", "24.code.9")
def test_large_results_of_one_account_are_fetched_one_after_the_other(faulty: FaultyServer) -> None:
    times = held_fetches(faulty, "tml-same", "tml-same", "tml-same")
    assert [later - earlier >= HELD for earlier, later in itertools.pairwise(times)] == [True, True]


@pytest.mark.covers("C59")
def test_accounts_do_not_delay_results_of_other_accounts(faulty: FaultyServer) -> None:
    assert len(held_fetches(faulty, "tml-one", "tml-other", together=2)) == 2


# ── refusals without a reason ─────────────────────────────────────────────────────────────────────

SILENT = [b"", {}, {"message": ""}, {"message": None}, {"error": ""}, {"detail": None}, b"null"]


@pytest.mark.covers("C60", "24.futures.7")
@pytest.mark.parametrize("body", SILENT, ids=repr)
def test_two_refusals_without_a_reason_then_the_result(
    faulty: FaultyServer, waits: list[float], body: Any
) -> None:
    assert poll(faulty, Answer(400, body), Answer(400, body), STEPPED).metrics == METRICS
    assert count(faulty) == 3
    assert len(waits) == 2


@pytest.mark.covers("C60", "24.code.7")
@pytest.mark.parametrize("body", SILENT, ids=repr)
def test_refusals_without_a_reason_come_to_an_end(
    faulty: FaultyServer, waits: list[float], body: Any
) -> None:
    with pytest.raises(tinkex.APIError, match="optim_step") as caught:
        poll(faulty, Answer(400, body))
    assert isinstance(caught.value, tinkex.BadRequestError | tinkex.APIConnectionError)
    assert (count(faulty), caught.value.attempts, caught.value.request_id) == (4, 4, "r1")


@pytest.mark.covers("C60")
def test_only_refusals_in_a_row_count(faulty: FaultyServer, waits: list[float]) -> None:
    silent, other = Answer(400, {}), Answer(500)
    assert poll(faulty, *[silent] * 3, other, *[silent] * 3, STEPPED).metrics == METRICS
    with pytest.raises(tinkex.BadRequestError):
        # no result is no news of the refusals
        poll(faulty, *[silent] * 2, Answer(408), *[silent] * 2, STEPPED)


@pytest.mark.covers("24.futures.1")
@pytest.mark.parametrize(
    "body", [{"detail": "so"}, {"message": "so"}, {"error": "so"}, b"so"], ids=repr
)
def test_refusal_with_a_reason_is_final(
    faulty: FaultyServer, waits: list[float], body: Any
) -> None:
    with pytest.raises(tinkex.BadRequestError, match="so"):
        poll(faulty, Answer(400, body), STEPPED)
    assert count(faulty) == 1


# ── an account that must be topped up ─────────────────────────────────────────────────────────────


def test_402_pauses_the_poll_and_uses_up_no_patience(
    faulty: FaultyServer,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(limits, "BILLING_SECONDS", 0.06)
    unpaid = Answer(402, {"detail": "top up"})
    assert (
        poll(faulty, Answer(500), *[unpaid] * 4, Answer(500), STEPPED, patience=0.2).metrics
        == METRICS
    )
    assert len([record for record in caplog.records if "top up" in record.message]) == 1


def test_402_becomes_an_error_after_a_time_limit(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BILLING_SECONDS", 0.02)

    def prepare(carrier: Transport) -> None:
        carrier.billing.limit = 1.0

    with pytest.raises(tinkex.BillingError, match="top up") as caught:
        poll(faulty, Answer(402, {"detail": "top up"}), prepare=prepare)
    assert caught.value.request_id == "r1"
    assert count(faulty) >= 3


# ── waits that the caller chooses ─────────────────────────────────────────────────────────────────


@pytest.mark.covers("C61", "24.code.10", "24.futures.4")
@pytest.mark.parametrize(
    "answer", [Answer(500), Answer(503), Answer(408)], ids=lambda answer: str(answer.status)
)
@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        ("exponential", [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (True, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (("exponential", 0.5, 3), [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0]),
        (
            lambda number: 0.025 if number == 0 else 0.04,
            [0.025, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04],
        ),
        (lambda number: -1, [0.0] * 7),
    ],
    ids=["exponential", "yes", "tuple", "function", "nonsense"],
)
def test_caller_chooses_the_waits(
    faulty: FaultyServer, waits: list[float], answer: Answer, policy: Any, seconds: list[float]
) -> None:
    poll(faulty, *[answer] * 7, STEPPED, poll_backoff=policy)
    assert waits == seconds


@pytest.mark.covers("C61")
def test_chosen_waits_are_for_failing_servers_alone(
    faulty: FaultyServer, waits: list[float]
) -> None:
    chosen = lambda number: 9.0  # noqa: E731
    poll(
        faulty,
        Answer(429),
        Answer(drop=True),
        Answer(body={"status": "pending"}),
        STEPPED,
        poll_backoff=chosen,
    )
    assert len(waits) == 3
    assert max(waits) <= 1.0


@pytest.mark.covers("C61")
@pytest.mark.parametrize(
    "answer",
    [
        Answer(503, headers={"Retry-After": "7"}),
        Answer(503, {"detail": "x", "retry_after_ms": 7000}),
        Answer(408, {"retry_after_ms": 7000}),
    ],
    ids=["header", "body", "408"],
)
def test_longer_wait_that_the_server_asks_for_wins(
    faulty: FaultyServer, waits: list[float], answer: Answer
) -> None:
    poll(faulty, answer, STEPPED, poll_backoff=("exponential", 1, 1))
    assert waits == [7.0]


def test_no_policy_leaves_the_usual_waits(faulty: FaultyServer, waits: list[float]) -> None:
    poll(faulty, Answer(500), STEPPED, poll_backoff="none")
    assert 0.375 <= waits[0] <= 0.5


# ── time limits ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.futures.1", "C62", "D22")
@pytest.mark.parametrize(
    "answer",
    [
        Answer(408),
        Answer(body={"status": "pending"}),
        Answer(408, delay=60),
        Answer(body={"type": "try_again", "retry_after_ms": 60_000}),
        Answer(402, {"detail": "top up"}),
    ],
    ids=["408", "pending", "held", "asked-to-wait", "unpaid"],
)
def test_time_limit_ends_every_kind_of_wait(
    faulty: FaultyServer, heard: list[Any], answer: Answer
) -> None:
    began = time.monotonic()
    with pytest.raises(
        tinkex.APITimeoutError, match=r"optim_step.*r1 had no result after \d\.\d s"
    ) as caught:
        poll(faulty, answer, timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 20
    assert caught.value.request_id == "r1"
    settled(lambda: count(faulty))
    assert heard[-1][0] == events.FUTURE_TIMEOUT


@pytest.mark.covers("24.futures.5")
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Answer(500, {"detail": "broken"}), tinkex.InternalServerError),
        (Answer(429, {"detail": "broken"}), tinkex.RateLimitError),
        (Answer(drop=True), tinkex.APIConnectionError),
    ],
    ids=["500", "429", "drop"],
)
def test_time_limit_gives_the_last_failure(
    faulty: FaultyServer, failure: Answer, kind: type[tinkex.APIError]
) -> None:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        poll(faulty, failure, Answer(408), timeout=1.0)
    assert not isinstance(caught.value, tinkex.APITimeoutError)
    assert 1.0 <= time.monotonic() - began < 20


def test_time_limit_covers_the_wait_for_the_budget(faulty: FaultyServer) -> None:
    def prepare(carrier: Transport) -> None:
        carrier.response_budget = ByteBudget(-1)

    with pytest.raises(tinkex.APITimeoutError):
        poll(faulty, announced(), STEPPED, timeout=0.5, prepare=prepare)
    assert count(faulty) == 1


def test_silent_exchange_is_not_taken_for_the_time_limit(
    faulty: FaultyServer, waits: list[float], heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_polling, "POLL_TIMEOUT", 0.05)
    with pytest.raises(tinkex.APITimeoutError, match=r"no answer within 0\.05 s"):
        poll(faulty, Answer(408, delay=60), timeout=20, patience=0)
    assert [name for name, _, _ in heard] == [events.FUTURE_CONNECTION_ERROR]


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.code.11")
def test_404_is_final_429_backs_off_and_409_passes(
    faulty: FaultyServer, waits: list[float]
) -> None:
    with pytest.raises(tinkex.NotFoundError, match="unknown"):
        poll(faulty, Answer(404, {"detail": "unknown"}), STEPPED)
    assert waits == []
    assert (
        poll(faulty, Answer(429, headers={"Retry-After": "7"}), Answer(409), STEPPED).metrics
        == METRICS
    )
    assert waits[0] == 7.0
    assert 0.75 <= waits[1] <= 1.0  # the second failure in a row


@pytest.mark.covers("24.code.11")
def test_lasting_conflict_fails_soon(
    faulty: FaultyServer, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONFLICT_PATIENCE == 2.0
    looks = itertools.count()

    class Clock:
        """The time as the polls see it: a tenth of a second later at each look."""

        @staticmethod
        def monotonic() -> float:
            return next(looks) / 10

    monkeypatch.setattr(result_polling, "time", Clock)
    with pytest.raises(tinkex.ConflictError):
        poll(faulty, Answer(409, {"detail": "busy"}))
    assert 2 < count(faulty) < 25


@pytest.mark.covers("24.futures.9", "24.futures.1")
@pytest.mark.parametrize(
    ("body", "category"),
    [({"detail": "expired"}, "server"), ({"detail": "expired", "category": "user"}, "user")],
)
def test_expired_result_gives_advice(
    faulty: FaultyServer, heard: list[Any], body: dict[str, str], category: str
) -> None:
    with pytest.raises(
        tinkex.GoneError, match=r"expired(.|\n)*hint: .*submit the request again"
    ) as caught:
        poll(faulty, Answer(410, body, delay=0.02), STEPPED)
    assert caught.value.category == category
    [(name, measured, facts)] = heard
    assert name == events.FUTURE_API_ERROR
    assert measured["elapsed_time"] >= 20
    assert (facts["status"], facts["category"]) == (410, category)


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C63", "1.4.2/5")
@pytest.mark.parametrize(
    ("answers", "name", "facts"),
    [
        (
            [Answer(500)],
            events.FUTURE_API_ERROR,
            {"status": 500, "category": "server", "error_type": "api_status"},
        ),
        (
            [Answer(401)],
            events.FUTURE_API_ERROR,
            {"status": 401, "category": "user", "error_type": "api_status"},
        ),
        ([Answer(402)], events.FUTURE_API_ERROR, {"status": 402}),
        (
            [Answer(drop=True)],
            events.FUTURE_CONNECTION_ERROR,
            {"status": None, "error_type": "api_connection"},
        ),
        (
            [Answer(body={"error": "no", "category": "user"})],
            events.FUTURE_REQUEST_FAILED,
            {"category": "user", "error_type": "request_failed"},
        ),
        ([Answer(body=[])], events.FUTURE_VALIDATION_ERROR, {"error_type": "validation"}),
        ([announced(), announced()], events.FUTURE_VALIDATION_ERROR, {"iteration": 1}),
    ],
    ids=["500", "401", "402", "drop", "failed", "out-of-form", "announced-twice"],
)
def test_every_failure_of_a_poll_is_an_event(
    faulty: FaultyServer,
    waits: list[float],
    heard: list[Any],
    answers: list[Answer],
    name: str,
    facts: dict[str, Any],
) -> None:
    def prepare(carrier: Transport) -> None:
        carrier.facts["session_id"] = "s"
        carrier.billing.limit = 0

    with contextlib.suppress(tinkex.TinkerError):
        poll(
            faulty,
            *answers,
            STEPPED,
            prepare=prepare,
            user_metadata={"team": "red", "iteration": "mine"},
        )
    [(heard_name, measured, told)] = heard
    assert heard_name == name
    assert 0 < measured["elapsed_time"] < 10_000
    expected = {
        "request_id": "r1",
        "request_type": "OptimStep",
        "session_id": "s",
        "team": "red",
        **facts,
    }
    expected["iteration"] = "mine"  # the user's own words win
    assert told.items() >= expected.items()
    assert set(events.CATALOGUE[name].metadata) <= told.keys()


def test_successful_answers_are_not_reported(
    faulty: FaultyServer, waits: list[float], heard: list[Any]
) -> None:
    poll(faulty, Answer(408), Answer(body={"status": "pending"}), announced(), STEPPED)
    assert heard == []


# ── word of the queue ─────────────────────────────────────────────────────────────────────────────


def paused(reason: str | None = "busy", state: str = "paused_capacity") -> Answer:
    return Answer(
        body={
            "type": "try_again",
            "queue_state": state,
            "queue_state_reason": reason,
            "retry_after_ms": 0,
        }
    )


@pytest.fixture
def service(faulty: FaultyServer) -> Iterator[ServiceClient]:
    faulty.script("client/config", Answer(body={}))
    faulty.script("retrieve_future", Answer(body={"model_id": "m"}))
    faulty.script("optim_step", Answer(body={"request_id": "r"}))
    with ServiceClient(base_url=faulty.base_url) as client:
        yield client


@pytest.mark.covers("24.futures.8", "C84", "C85", "C63")
def test_observer_event_and_log_receive_the_queue_reason(
    faulty: FaultyServer, service: ServiceClient, heard: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    client = service.create_lora_training_client("m").result()
    found: list[tuple[Any, ...]] = []
    faulty.script(
        "retrieve_future",
        paused(),
        paused(),
        Answer(408, {"queue_state": "active"}),
        paused("worse"),
        STEPPED,
    )
    client.optim_step(
        STEP, queue_state_observer=lambda state, reason: found.append((state, reason))
    ).result(5)
    changes = [("paused_capacity", "busy"), ("active", None), ("paused_capacity", "worse")]
    assert found == changes
    said = [facts for name, _, facts in heard if name == events.QUEUE_STATE_CHANGE]
    assert [(facts["queue_state"], facts["queue_state_reason"]) for facts in said] == changes
    assert all(facts["request_id"] == "r" and facts["model_id"] == "m" for facts in said)
    assert all(facts["session_id"] == "s" for facts in said)
    # not before 15 minutes
    assert not [record for record in caplog.records if "paused" in record.message]


class States:
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_queue_state_change(self, queue_state: Any) -> None:
        self.found.append(queue_state)


class Facts(States):
    def on_queue_state_change(self, queue_state: Any, metadata: Any = None) -> None:
        self.found.append((queue_state, metadata["model_id"], metadata["queue_state_reason"]))


class Broken(States):
    def on_queue_state_change(self, queue_state: Any) -> None:
        raise RuntimeError("not my day")


@pytest.mark.covers("C84")
@pytest.mark.parametrize(
    ("observer", "found"),
    [
        (States(), ["paused_capacity"]),
        (Facts(), [("paused_capacity", "m", "busy")]),
        (Broken(), []),
    ],
    ids=["states", "metadata", "broken"],
)
def test_every_kind_of_call_takes_an_observer_of_any_form(
    faulty: FaultyServer,
    service: ServiceClient,
    observer: States,
    found: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = service.create_lora_training_client("m").result()
    faulty.script("forward_backward", Answer(body={"request_id": "pass"}))
    faulty.script("save_weights", Answer(body={"request_id": "save"}))
    results = {"pass": PASSED, "save": Answer(body={"path": "tinker://m/weights/a"}), "r": STEPPED}
    calls: list[Callable[[], Future[Any]]] = [
        lambda: client.forward(DATA, "cross_entropy", queue_state_observer=observer),
        lambda: client.optim_step(STEP, queue_state_observer=observer),
        lambda: client.save_state("a", queue_state_observer=observer),
        lambda: client.receipts.retrieve("r", "optim_step", queue_state_observer=observer),
    ]
    for call in calls:
        observer.found.clear()
        faulty.script("retrieve_future", paused(), lambda seen: results[seen.json["request_id"]])
        call().result(5)
        assert observer.found == found
    if isinstance(observer, Broken):
        assert [record.message for record in caplog.records].count(
            "an observer failed on the queue state paused_capacity"
        ) == len(calls)


@pytest.mark.covers("C84", "C85")
def test_clients_own_observer_can_be_replaced(
    faulty: FaultyServer,
    service: ServiceClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(queue_states.GRACE_SECONDS, "Training", 0.0)
    client = service.create_lora_training_client("m").result()
    client.on_queue_state_change("paused_rate_limit")
    assert (
        caplog.messages[-1]
        == "Training is paused for m. Reason: concurrent training clients rate limit hit"
    )
    said = len(caplog.messages)
    found: list[Any] = []
    monkeypatch.setattr(
        client, "on_queue_state_change", lambda state, reason: found.append((state, reason))
    )
    faulty.script("retrieve_future", paused(), STEPPED)
    client.optim_step(STEP).result(5)
    assert found == [("paused_capacity", "busy"), ("active", None)]  # the request has ended
    assert len(caplog.messages) == said


@pytest.mark.covers("U28")
@pytest.mark.parametrize("kind", ["training", "creation"])
def test_long_pauses_of_training_are_logged(
    faulty: FaultyServer,
    service: ServiceClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The same state is repeated by each poll, and the log has to hear all of them."""
    monkeypatch.setitem(queue_states.GRACE_SECONDS, "Training", 0.3)
    pauses: list[Answer | Callable[[Seen], Answer]] = [
        replace(paused(), delay=0.1) for _ in range(8)
    ]
    client = service.create_lora_training_client("m").result()
    if kind == "training":
        faulty.script("retrieve_future", *pauses, STEPPED)
        client.optim_step(STEP).result(10)
    else:
        faulty.script("retrieve_future", *pauses, Answer(body={"model_id": "m"}))
        with ServiceClient(base_url=faulty.base_url) as other:
            other.create_lora_training_client("m").result().get_telemetry()
    name = {"training": "m", "creation": "s:train:0"}[kind]
    lines = [record.message for record in caplog.records if "paused" in record.message]
    assert lines == [f"Training is paused for {name}. Reason: busy"]


@pytest.mark.covers("U28")
def test_end_of_a_request_ends_its_pause(
    faulty: FaultyServer,
    service: ServiceClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pauses that are shorter than the time are not one long pause, whether requests succeed or
    fail."""
    monkeypatch.setitem(queue_states.GRACE_SECONDS, "Training", 0.3)
    client = service.create_lora_training_client("m").result()
    for last in (STEPPED, Answer(body={"error": "no", "category": "user"}), STEPPED):
        faulty.script("retrieve_future", *[replace(paused(), delay=0.08) for _ in range(3)], last)
        with contextlib.suppress(tinkex.RequestFailedError):
            client.optim_step(STEP).result(10)
    assert not [record for record in caplog.records if "paused" in record.message]


@pytest.mark.covers("U28")
def test_queue_of_a_sampler_is_observed_as_well(
    faulty: FaultyServer, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "ss"}))
    faulty.script("asample", Answer(body={"request_id": "q", "sample_sequence_ids": ["q:0"]}))
    drawn = types.SampleResponse(
        [
            types.SampledSequence(
                "length",
                tokens_np=np.array([7], np.int32),
                logprobs_np=np.array([-1.0], np.float32),
            )
        ]
    )
    faulty.script(
        "retrieve_future",
        paused(),
        Answer(body=codec.encode(drawn).data, content_type=codec.PROTOBUF),
    )
    sampler = service.create_sampling_client(base_model="m").result()
    watcher = States()
    prompt = types.ModelInput.from_ints([1])
    sampler.sample(prompt, 1, types.SamplingParams(), queue_state_observer=watcher).result(5)
    assert watcher.found == ["paused_capacity"]
    assert "Sampling is paused for ss. Reason: busy" in caplog.messages


# ── waiting for many ──────────────────────────────────────────────────────────────────────────────


async def later(value: Any, seconds: float = 0.01) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def several() -> list[Future[Any]]:
    """One that takes a while, one that crashes, one that stalls, one that was given up, one that is
    quick."""
    given_up = start(later("never", 30))
    given_up.cancel()
    return [
        start(later(1, 0.1)),
        start(later(KeyError("oops"))),
        start(later(3, 30)),
        given_up,
        start(later(5)),
    ]


def check(outcomes: list[Any], waiting: list[Future[Any]]) -> None:
    assert [outcomes[0], outcomes[4]] == [1, 5]
    assert isinstance(outcomes[1], KeyError)
    assert isinstance(outcomes[2], TimeoutError)
    assert isinstance(outcomes[3], concurrent.futures.CancelledError)
    assert not waiting[2].done()  # whoever is late goes on
    waiting[2].cancel()


@pytest.mark.covers("C62", "24.futures.11")
def test_await_many_keeps_order_despite_failures() -> None:
    waiting = several()
    check(await_many(waiting, timeout=1.0), waiting)
    assert await_many([]) == []


@pytest.mark.covers("C62", "24.futures.11")
def test_many_are_waited_for_together_in_a_loop() -> None:
    async def run() -> None:
        waiting = several()
        check(await await_many_async(waiting, timeout=1.0), waiting)
        assert await await_many_async([]) == []

    asyncio.run(run())


def test_each_of_many_has_the_whole_time() -> None:
    class Slow(concurrent.futures.Future[str]):
        def result(self, timeout: float | None = None) -> str:
            given.append(timeout)
            return "x"

    given: list[float | None] = []
    assert await_many([Slow(), Slow()], 0.5) == ["x", "x"]
    assert given == [0.5, 0.5]
    assert await_many([Slow()]) == ["x"]
    assert given[-1] is None


# ── what is raised elsewhere ──────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.training.4", "C56")
def test_crash_while_polling_is_an_error_of_its_call_and_the_client_lives(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    def crash(number: int) -> float:
        raise ZeroDivisionError("in the caller's own function")

    tinkex.configure(poll_backoff=crash)
    try:
        other = ServiceClient(base_url=faulty.base_url)
    finally:
        tinkex.configure()
    with other:
        client = other.create_lora_training_client("m").result()
        faulty.script("retrieve_future", Answer(500), STEPPED)
        with pytest.raises(ZeroDivisionError, match="own function"):
            client.optim_step(STEP).result(5)
        assert client.optim_step(STEP).result(5).metrics == METRICS


def test_cancelled_poll_ends(faulty: FaultyServer, service: ServiceClient) -> None:
    client = service.create_lora_training_client("m").result()
    faulty.script("retrieve_future", Answer(body={"type": "try_again", "retry_after_ms": 20}))
    future = client.optim_step(STEP)
    while count(faulty) < 4:
        time.sleep(0.01)
    assert future.cancel()
    settled(lambda: count(faulty))


def test_lasting_fault_is_logged_once(
    faulty: FaultyServer, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinkex")
    poll(faulty, *[Answer(500, {"detail": "broken"})] * 6, STEPPED)
    assert [record.message for record in caplog.records if "still trying" in record.message] == [
        f"waiting for r1: optim_step at {faulty.base_url.removeprefix('http://')}: 500: broken; "
        "still trying"
    ]


def test_polls_of_several_threads_do_not_share_their_state(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    """Two at once, one failing: each has its own count of failures and its own outcome."""
    client = service.create_lora_training_client("m").result()
    answers = {"good": STEPPED, "bad": Answer(body={"error": "no"})}
    faulty.script("retrieve_future", lambda seen: answers[seen.json["request_id"]])
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = client.receipts.retrieve(name, "optim_step").exception(5)

    threads = [threading.Thread(target=ask, args=(name,)) for name in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["good"] is None
    assert isinstance(found["bad"], tinkex.RequestFailedError)
