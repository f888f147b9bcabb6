"""One exchange: what is retried and for how long, what is sent, what errors say; against a server
that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import pickle
import platform
import re
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest

import tinkex
import tinkex.telemetry
from faulty import Answer, FaultyServer, faulty_server
from support import wait_until
from test_otel import StandIn
from tinkex import events, types
from tinkex.client.http import limits, retry, transport
from tinkex.client.http.exchange import HttpRequest, Reply, StreamReply
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config, configure
from tinkex.client.settings.delays import Delays
from tinkex.wire import protocol
from tinkex.wire.redacted_http import redact_headers, redact_url
from tinkex.wire.redaction import Scrubber

OK = Answer(body={"session_id": "s"})
HELLO = types.CreateSessionRequest()
SECRET = "tml-very-secret"


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were decided on; nobody waits for them."""
    decided: list[float] = []

    after = Delays.after

    def quick(*args: Any, **kwargs: Any) -> float:
        decided.append(after(*args, **kwargs))
        return 0.001

    monkeypatch.setattr(Delays, "after", quick)
    return decided


def call(
    url: str,
    op: protocol.Operation = protocol.CREATE_SESSION,
    request: Any = HELLO,
    *,
    key: str | None = None,
    **kw: Any,
) -> Any:
    """One call over a transport of its own."""

    async def run() -> Any:
        carrier = Transport(Config(base_url=url, api_key=key))
        try:
            return await carrier.call(op, request, **kw)
        finally:
            await carrier.close()
            await asyncio.sleep(0)

    return asyncio.run(run())


# ── retries ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C15", "24.http.1", "24.http.6", "24.code.2")
@pytest.mark.parametrize(
    "fault",
    [
        Answer(500),
        Answer(503, b"<html>busy</html>", content_type="text/html"),
        Answer(529),
        Answer(429),
        Answer(408),
        Answer(409),
        Answer(drop=True),
        Answer(body={"session_id": "lost"}, cut=5),
    ],
    ids=lambda fault: f"{fault.status}{'-drop' * fault.drop}{'-cut' * (fault.cut is not None)}",
)
def test_passing_faults_are_tried_again(
    faulty: FaultyServer, waits: list[float], fault: Answer
) -> None:
    faulty.script("create_session", fault, fault, OK)
    assert call(faulty.base_url).session_id == "s"
    seen = faulty.requests("create_session")
    assert len(seen) == 3
    assert len(waits) == 2
    assert [request.headers["x-stainless-retry-count"] for request in seen] == ["0", "1", "2"]
    assert len({request.headers["x-idempotency-key"] for request in seen}) == 1
    assert len({request.body for request in seen}) == 1


@pytest.mark.covers("C15")
def test_each_call_has_its_own_key(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url)
    call(faulty.base_url)
    assert (
        len({request.headers["x-idempotency-key"] for request in faulty.requests("create_session")})
        == 2
    )
    faulty.script("healthz", Answer(body={"status": "ok"}))
    call(faulty.base_url, protocol.HEALTHZ, None)
    assert "x-idempotency-key" not in faulty.requests("healthz")[0].headers


@pytest.mark.covers("D12", "W17")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 413, 418, 422, 302])
def test_refusals_are_final(faulty: FaultyServer, waits: list[float], status: int) -> None:
    faulty.script("create_session", Answer(status, {"detail": "no, because"}), OK)
    with pytest.raises(tinkex.APIStatusError, match="no, because") as caught:
        call(faulty.base_url)
    error = caught.value
    assert len(faulty.requests("create_session")) == 1
    assert error.status_code == status
    assert error.attempts == 1
    assert "create_session" in error.message
    assert faulty.base_url.removeprefix("http://") in error.message
    assert str(status) in error.message


@pytest.mark.covers("W17")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, tinkex.BadRequestError),
        (401, tinkex.AuthenticationError),
        (402, tinkex.BillingError),
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (409, tinkex.ConflictError),
        (410, tinkex.GoneError),
        (422, tinkex.UnprocessableEntityError),
        (429, tinkex.RateLimitError),
        (500, tinkex.InternalServerError),
        (599, tinkex.InternalServerError),
        (418, tinkex.APIStatusError),
    ],
)
def test_each_status_has_its_error(
    faulty: FaultyServer, status: int, kind: type[tinkex.APIStatusError]
) -> None:
    faulty.script("create_session", Answer(status, b"plain words", content_type="text/plain"))
    with pytest.raises(kind, match="plain words") as caught:
        call(faulty.base_url, patience=0)
    assert type(caught.value) is kind
    assert caught.value.body == "plain words"


def test_waits_grow_and_are_bounded() -> None:
    for failures in range(1, 12):
        nominal = min(0.5 * 2 ** (failures - 1), 10)
        for _ in range(20):
            assert 0.75 * nominal <= Delays().after(failures) <= nominal
    assert Delays().after(1, 7.5) == 7.5
    assert Delays().after(10, 0.1) >= 7.5
    assert len({Delays().after(3) for _ in range(20)}) > 1


@pytest.mark.covers("C21", "24.http.2")
@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after-ms": "2500"}, 2.5),
        ({"Retry-After": "61"}, None),
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("status", [429, 503])
def test_server_may_ask_for_time(
    faulty: FaultyServer,
    waits: list[float],
    headers: dict[str, str],
    wait: float | None,
    status: int,
) -> None:
    faulty.script("create_session", Answer(status, headers=headers), OK)
    call(faulty.base_url)
    [decided] = waits
    assert decided == wait if wait is not None else decided <= 0.5


@pytest.fixture
def kept_waits(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> list[float]:
    """The same, and by the transport's clock nothing but these takes time."""

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return sum(waits)

    monkeypatch.setattr(retry, "time", Clock)
    return waits


def test_patience_ends(faulty: FaultyServer, kept_waits: list[float]) -> None:
    faulty.script("create_session", Answer(503, {"detail": "busy"}))
    with pytest.raises(tinkex.InternalServerError, match=r"busy.*after \d attempts in") as caught:
        call(faulty.base_url, patience=1.0)
    assert 0.3 < kept_waits[0] <= 1.0 < sum(kept_waits)
    assert caught.value.attempts == len(faulty.requests("create_session")) == 2


@pytest.mark.covers("W23")
def test_conflict_has_two_seconds(faulty: FaultyServer, kept_waits: list[float]) -> None:
    faulty.script("create_session", Answer(409, {"detail": "taken"}))
    with pytest.raises(tinkex.ConflictError, match="taken"):
        call(faulty.base_url)
    assert 1.0 < sum(kept_waits[:-1]) <= 2.0 < sum(kept_waits)


def test_zero_patience_makes_one_attempt(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(503))
    with pytest.raises(tinkex.InternalServerError) as caught:
        call(faulty.base_url, patience=0)
    assert len(faulty.requests("create_session")) == 1
    assert "attempts" not in caught.value.message


@pytest.mark.covers("W14")
def test_slow_answer_times_out(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(body={"session_id": "s"}, delay=60))
    with pytest.raises(tinkex.APITimeoutError, match=r"create_session.*within 0.2 s") as caught:
        call(faulty.base_url, timeout=0.2, patience=0)
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.covers("W03")
def test_first_retry_is_logged_without_the_key(
    faulty: FaultyServer, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    faulty.script("create_session", Answer(503), Answer(503), Answer(503), OK)
    call(faulty.base_url, key=SECRET)
    warnings = [
        record
        for record in caplog.records
        if record.name == "tinkex" and record.levelname == "WARNING"
    ]
    assert len(warnings) == 1
    assert "create_session" in warnings[0].getMessage()
    assert SECRET not in caplog.text


@pytest.mark.covers("C22", "24.http.3")
@pytest.mark.parametrize(
    ("status", "told", "requests"),
    [
        (503, "false", 1),
        (503, "False", 1),
        (400, "true", 2),
        (404, "TRUE", 2),
        (400, "perhaps", 1),
        (503, "", 2),
    ],
)
def test_server_may_overrule(
    faulty: FaultyServer, waits: list[float], status: int, told: str, requests: int
) -> None:
    refusal = Answer(status, {"detail": "no"}, headers={"X-Should-Retry": told})
    faulty.script("create_session", refusal, OK)
    if requests == 1:
        with pytest.raises(tinkex.APIStatusError, match="no"):
            call(faulty.base_url)
    else:
        assert call(faulty.base_url).session_id == "s"
    assert len(faulty.requests("create_session")) == requests


@pytest.mark.covers("C22", "24.code.5")
def test_successful_answer_may_ask_for_a_retry(faulty: FaultyServer, waits: list[float]) -> None:
    again = Answer(
        body={"session_id": "not yet"}, headers={"x-should-retry": "true", "retry-after": "3"}
    )
    faulty.script("create_session", again, again, OK)
    assert call(faulty.base_url).session_id == "s"
    assert len(faulty.requests("create_session")) == 3
    assert waits == [3.0, 3.0]
    faulty.script("create_session", again)
    # it was a good one, after all
    assert call(faulty.base_url, max_retries=2).session_id == "not yet"
    assert len(faulty.requests("create_session")) == 3 + 3
    assert call(faulty.base_url, patience=0).session_id == "not yet"
    faulty.script(
        "create_session", Answer(body={"session_id": "s"}, headers={"x-should-retry": "false"})
    )
    assert call(faulty.base_url).session_id == "s"


@pytest.mark.covers("C22", "24.http.4")
def test_one_retry_makes_two_requests(faulty: FaultyServer, waits: list[float]) -> None:
    faulty.script("create_session", Answer(503))
    with pytest.raises(tinkex.InternalServerError, match="after 2 attempts"):
        call(faulty.base_url, max_retries=1)
    assert len(faulty.requests("create_session")) == 2


@pytest.mark.covers("D20", "24.code.6")
@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
@pytest.mark.parametrize(("ahead", "honoured"), [(20, True), (3600, False), (-50, False)])
def test_server_may_name_a_date(
    faulty: FaultyServer,
    waits: list[float],
    name: str,
    ahead: int,
    honoured: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty.script(
        "create_session",
        Answer(429, headers={name: formatdate(time.time() + ahead, usegmt=True)}),
        OK,
    )
    call(faulty.base_url)
    [decided] = waits
    assert ahead - 5 < decided <= ahead if honoured else decided <= 0.5
    assert "cannot be read" not in caplog.text


@pytest.mark.covers("D20", "C21")
@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "60"}, {}, 60),
        ({"Retry-After": "61"}, {}, None),
        ({"retry-after-ms": "90000"}, {}, None),
        ({}, {"retry_after_ms": 1500}, 1.5),
        ({}, {"retry_after_ms": 3_600_000}, None),
        ({"Retry-After": "soon"}, {}, None),
    ],
)
def test_retry_after_is_at_most_a_minute(
    faulty: FaultyServer,
    headers: dict[str, str],
    body: Any,
    seconds: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty.script("create_session", Answer(429, body, headers=headers))
    with pytest.raises(tinkex.RateLimitError) as caught:
        call(faulty.base_url, patience=0)
    assert caught.value.retry_after == seconds
    assert ("a retry-after that cannot be read: 'soon'" in caplog.text) is (
        headers.get("Retry-After") == "soon"
    )


# ── a proxy's rejections ──────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C22")
def test_400_without_a_word_is_a_proxys_and_tried_again(
    faulty: FaultyServer, waits: list[float]
) -> None:
    faulty.script("create_session", Answer(400), Answer(400), OK)
    assert call(faulty.base_url).session_id == "s"
    assert len(faulty.requests("create_session")) == 3


def test_endless_rejections_are_a_clear_error(faulty: FaultyServer, waits: list[float]) -> None:
    faulty.script("create_session", Answer(400))
    with pytest.raises(
        tinkex.APIConnectionError, match=r"create_session .*a proxy on the way rejected it"
    ) as caught:
        call(faulty.base_url)
    error = caught.value
    assert error.attempts == len(faulty.requests("create_session")) == retry.REJECTED_ATTEMPTS + 1
    assert f"after {error.attempts} attempts" in error.message
    assert (error.request.method, error.request.url) == (
        "POST",
        f"{faulty.base_url}/api/v1/create_session",
    )
    assert error.response.status_code == 400
    faulty.script("create_session", Answer(400, headers={"x-should-retry": "false"}))
    faulty.seen.clear()
    with pytest.raises(tinkex.APIConnectionError):
        call(faulty.base_url)
    assert len(faulty.seen) == 1


# ── an account that must be topped up ─────────────────────────────────────────────────────────────

BROKE = Answer(402, {"detail": "top up"})


@pytest.fixture
def billing(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the pauses: each moves it by 25 seconds, and takes none."""
    now = [1000.0]
    original = limits.BillingPause

    async def sleep(seconds: float) -> None:
        now[0] += 25.0

    monkeypatch.setattr(retry, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(transport, "BillingPause", lambda: original(clock=lambda: now[0]))
    return now


def test_work_resumes_after_a_top_up(
    faulty: FaultyServer, billing: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    faulty.script("create_session", *[BROKE] * 8, OK)
    assert call(faulty.base_url, max_retries=0).session_id == "s"  # pauses count for nothing
    seen = faulty.requests("create_session")
    assert len(seen) == 9
    assert len({request.headers["x-idempotency-key"] for request in seen}) == 1
    told = [record.getMessage() for record in caplog.records if "paused" in record.getMessage()]
    assert len(told) == 3  # at 0, 75 and 150 of the 200 seconds: once a minute
    assert "create_session" in told[0]
    assert "top up" in told[0]
    assert "in 60 minutes" in told[0]


def test_account_that_is_never_topped_up_is_an_error(
    faulty: FaultyServer, billing: list[float]
) -> None:
    faulty.script("create_session", BROKE)
    with pytest.raises(tinkex.BillingError, match="top up"):
        call(faulty.base_url)
    assert billing[0] == 1000 + 3600
    assert len(faulty.requests("create_session")) == 3600 / 25 + 1


def test_heartbeats_and_calls_with_final_402_do_not_pause(
    faulty: FaultyServer, billing: list[float]
) -> None:
    faulty.script("session_heartbeat", BROKE, Answer(body={}))
    beat = types.SessionHeartbeatRequest(session_id="s")
    with pytest.raises(tinkex.BillingError):
        call(faulty.base_url, protocol.SESSION_HEARTBEAT, beat, patience=0)
    faulty.script("create_session", BROKE)
    with pytest.raises(tinkex.BillingError):
        call(faulty.base_url, final=(402,))
    assert len(faulty.seen) == 2
    assert billing == [1000.0]


def test_deprecations_warn(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    note = {"X-Deprecation-Note": f"use the new one, {SECRET}"}
    faulty.script("create_session", Answer(body={"session_id": "s"}, headers=note))
    call(faulty.base_url, key=SECRET)
    faulty.script(
        "create_session",
        Answer(body={"session_id": "s"}, headers={**note, "X-Deprecation-Level": "error"}),
    )
    call(faulty.base_url, key=SECRET)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    line = "create_session: use the new one, [REDACTED]"
    assert told == [("WARNING", line), ("ERROR", line)]


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────


def test_missing_key_sends_no_header(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url)
    [seen] = faulty.requests("create_session")
    assert "x-api-key" not in seen.headers
    assert "authorization" not in seen.headers
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["accept"] == "application/json"
    assert seen.headers["user-agent"].startswith("tinkex/")


@pytest.mark.covers("W03")
def test_key_travels_in_one_header(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url, key=SECRET)
    [seen] = faulty.requests("create_session")
    assert seen.headers["x-api-key"] == SECRET
    assert SECRET not in "".join(
        value for name, value in seen.headers.items() if name != "x-api-key"
    )
    assert SECRET.encode() not in seen.body


@pytest.mark.covers("W03")
@pytest.mark.parametrize(
    "fault", [Answer(401, {"detail": "bad key"}), Answer(500), Answer(drop=True), Answer(body=b"{")]
)
def test_errors_do_not_give_the_key_away(faulty: FaultyServer, fault: Answer) -> None:
    faulty.script("create_session", fault)
    with pytest.raises(tinkex.APIError) as caught:
        call(faulty.base_url, key=SECRET, patience=0)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in repr(error)
        assert SECRET not in str(error)
        assert SECRET not in repr(vars(error))
        error = error.__cause__ or error.__context__


@pytest.mark.covers("W04")
def test_redirects_are_not_followed(faulty: FaultyServer) -> None:
    with faulty_server() as elsewhere:
        elsewhere.script("create_session", OK)
        target = f"{elsewhere.base_url}/api/v1/create_session"
        for status in (301, 302, 303, 307, 308):
            faulty.script("create_session", Answer(status, headers={"Location": target}))
            with pytest.raises(tinkex.APIStatusError) as caught:
                call(faulty.base_url, key=SECRET)
            assert caught.value.status_code == status
        assert elsewhere.seen == []


def test_extra_headers_are_sent(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)

    async def run() -> None:
        carrier = Transport(
            Config(base_url=faulty.base_url, default_headers={"CF-Access-Client-Id": "gate"})
        )
        await carrier.call(protocol.CREATE_SESSION, HELLO, headers={"X-One": "1"})
        await carrier.close()

    asyncio.run(run())
    [seen] = faulty.requests("create_session")
    assert (seen.headers["cf-access-client-id"], seen.headers["x-one"]) == ("gate", "1")


def test_ids_keep_only_their_colons(faulty: FaultyServer) -> None:
    answer = {"sampler_id": "x", "base_model": "b"}
    faulty.script("samplers/s:sample:0", Answer(body=answer))
    call(faulty.base_url, protocol.GET_SAMPLER, None, path={"sampler_id": "s:sample:0"})
    faulty.script("samplers/..%2F%3Fa%23", Answer(body=answer))
    call(faulty.base_url, protocol.GET_SAMPLER, None, path={"sampler_id": "../?a#"})


def test_path_in_the_base_url_stays(faulty: FaultyServer) -> None:
    faulty.script("/prefix/api/v1/create_session", OK)
    assert call(f"{faulty.base_url}/prefix").session_id == "s"


def headers_of(faulty: FaultyServer, **settings: Any) -> dict[str, str]:
    """Return the headers of a request under these settings."""
    given = settings.pop("headers", None)

    async def run() -> None:
        carrier = Transport(Config(base_url=faulty.base_url, **settings))
        await carrier.call(protocol.CREATE_SESSION, HELLO, headers=given)
        await carrier.close()

    faulty.script("create_session", OK)
    asyncio.run(run())
    return faulty.requests("create_session")[-1].headers


@pytest.mark.covers("C08", "C14", "24.code.3")
def test_requests_identify_the_client(faulty: FaultyServer) -> None:
    sent = headers_of(faulty)
    assert sent["x-stainless-package-version"] == protocol.PROTOCOL_VERSION == "0.38.0"
    assert sent["user-agent"] == f"tinkex/{tinkex.__version__} (python)"
    assert sent["x-stainless-os"] == {"Darwin": "MacOS"}.get(platform.system(), platform.system())
    assert sent["x-stainless-arch"] in ("x64", "arm64", "x32", platform.machine().lower())
    assert sent["x-stainless-runtime"] == platform.python_implementation()
    assert sent["x-stainless-runtime-version"] == platform.python_version()
    assert sent["x-stainless-async"] == "async:asyncio"
    assert sent["x-stainless-read-timeout"] == "60"
    assert sent["x-stainless-retry-count"] == "0"
    assert "gzip" in sent["accept-encoding"]
    assert headers_of(faulty, timeout=7.5)["x-stainless-read-timeout"] == "7.5"
    assert headers_of(faulty, user_agent="mine/1")["user-agent"] == "mine/1"


@pytest.mark.covers("C14", "24.code.3")
def test_polls_and_samples_have_headers_of_their_own(faulty: FaultyServer) -> None:
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(body={"request_id": "r"}))
    faulty.script("retrieve_future", Answer(408, delay=1.1), Answer(body={"sequences": []}))
    configure(default_query={"tenant": "t"}, default_headers={"x-gate": "g", "ACCEPT": "text/odd"})
    try:
        with tinkex.ServiceClient(base_url=faulty.base_url, api_key=SECRET) as service:
            sampler = service.create_sampling_client(base_model="m").result()
            prompt = types.ModelInput.from_ints([1])
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(15)
    finally:
        configure()
    [sample] = faulty.requests("asample?tenant=t")
    first, second = faulty.requests("retrieve_future?tenant=t")
    assert sample.headers["x-tinker-sampling-backpressure"] == "1"
    assert (
        first.headers["x-tinker-request-type"],
        first.headers["x-tinker-request-iteration"],
    ) == ("Sample", "0")
    assert second.headers["x-tinker-request-iteration"] == "1"
    assert float(first.headers["x-tinker-create-promise-roundtrip-time"]) >= 0
    assert "x-tinker-create-promise-roundtrip-time" not in second.headers
    assert first.headers["x-stainless-raw-response"] == "raw"
    assert first.headers["x-stainless-read-timeout"] == "45"
    assert "text/odd" not in first.headers["accept"]  # a poll knows what it can read
    for seen in faulty.seen:
        assert seen.path.endswith("?tenant=t")
        assert (seen.headers["x-gate"], seen.headers["x-api-key"]) == ("g", SECRET)


@pytest.mark.covers("C14", "24.http.9")
def test_gate_headers_are_sent_if_configured(faulty: FaultyServer) -> None:
    gate = {"cf_access_client_id": "id", "cf_access_client_secret": "hush"}
    sent = headers_of(faulty, **gate)
    assert (sent["cf-access-client-id"], sent["cf-access-client-secret"]) == ("id", "hush")
    for less in ({}, {"cf_access_client_id": "id"}):
        assert not [name for name in headers_of(faulty, **less) if name.startswith("cf-")]


@pytest.mark.covers("C14")
def test_later_header_wins_in_any_case(faulty: FaultyServer) -> None:
    gate = {"cf_access_client_id": "id", "cf_access_client_secret": "hush"}
    default = {
        "USER-agent": "default",
        "x-api-key": "tml-default",
        "cf-access-client-ID": "other",
        "accept": "a/b",
    }
    sent = headers_of(faulty, api_key=SECRET, default_headers=default, **gate)
    assert (sent["user-agent"], sent["x-api-key"], sent["cf-access-client-id"]) == (
        "default",
        "tml-default",
        "other",
    )
    assert sent["content-type"] == "application/json"
    own = {
        "User-AGENT": "call",
        "X-Api-Key": "tml-call",
        "X-IDEMPOTENCY-key": "k",
        "x-stainless-READ-timeout": "9",
    }
    sent = headers_of(faulty, api_key=SECRET, default_headers=default, headers=own)
    assert (sent["user-agent"], sent["x-api-key"], sent["accept"]) == ("call", "tml-call", "a/b")
    assert (sent["x-idempotency-key"], sent["x-stainless-read-timeout"]) == ("k", "9")


def test_each_header_is_sent_once() -> None:
    """The scripted server keeps the last of two; here the bytes are looked at."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(
            int(heads[-1].lower().split(b"content-length:")[1].split(b"\r\n")[0])
        )
        writer.write(b"HTTP/1.1 408 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = Config(
            base_url=url,
            api_key="k",
            default_headers={"user-AGENT": "d", "ACCEPT": "d", "x-api-key": "d"},
        )
        carrier = Transport(config)
        with pytest.raises(tinkex.APIStatusError):
            await carrier.call(
                protocol.CREATE_SESSION,
                HELLO,
                headers={"accept": "c", "Content-type": "c"},
                patience=0,
            )
        await carrier.poll(
            protocol.RETRIEVE_FUTURE,
            types.FutureRetrieveRequest(request_id="r"),
            {"Accept": "c"},
            5,
        )
        await carrier.close()
        server.close()

    asyncio.run(run())
    assert len(heads) == 2
    for head in heads:
        names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line]
        assert len(names) == len(set(names))
        assert b"accept: c\r\n" in head.lower()


@pytest.mark.covers("1.8/2", "C16")
def test_trace_travels_with_every_kind_of_request(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn()
    stand_in.install(monkeypatch)

    def requests(propagate: bool, **headers: str) -> list[str | None]:
        faulty.seen.clear()
        faulty.script("create_session", Answer(503), OK)
        faulty.script("retrieve_future", Answer(408))
        faulty.script("stream_sample", Answer(body=b"", content_type="text/event-stream"))

        async def run() -> None:
            stand_in.attach({"traceparent": "00-abc"})
            carrier = Transport(Config(base_url=faulty.base_url, otel_propagate=propagate))
            await carrier.call(protocol.CREATE_SESSION, HELLO, headers=headers)
            await carrier.poll(
                protocol.RETRIEVE_FUTURE, types.FutureRetrieveRequest(request_id="r"), headers, 5
            )
            async with carrier.stream(protocol.STREAM_SAMPLE, headers=headers):
                pass
            await carrier.close()

        asyncio.run(run())
        return [seen.headers.get("traceparent") for seen in faulty.seen]

    monkeypatch.setattr(Delays, "after", lambda *_, **__: 0.001)
    assert requests(True) == ["00-abc"] * 4
    assert requests(False) == [None] * 4
    assert requests(True, traceparent="00-mine") == ["00-mine"] * 4
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", None)
    assert requests(True) == [None] * 4  # and nothing breaks


# ── what is told of a request ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, float], dict[str, Any]]]]:
    told: list[tuple[str, dict[str, float], dict[str, Any]]] = []
    events.attach(
        "test",
        events.HTTP_EVENTS,
        lambda name, numbers, facts: told.append((name, {**numbers}, {**facts})),
    )
    yield told
    events.detach("test")


@pytest.mark.covers("1.4.2/1", "1.4.2/2", "C26", "24.http.7")
def test_request_has_a_start_and_a_stop(
    faulty: FaultyServer, waits: list[float], heard: list[Any]
) -> None:
    faulty.script("create_session", Answer(503), Answer(503), OK)

    async def run() -> None:
        carrier = Transport(
            Config(
                base_url=faulty.base_url, api_key=SECRET, user_metadata={"run": "7", "b": "config"}
            )
        )
        carrier.facts["session_id"] = "s1"
        await carrier.call(protocol.CREATE_SESSION, HELLO, metadata={"b": "call", "seq_id": 3})
        await carrier.close()

    asyncio.run(run())
    (first, began, before), (second, took, after) = heard
    assert (first, second) == (events.HTTP_START, events.HTTP_STOP)
    assert abs(began["system_time"] - time.time()) < 60
    assert 0 < took["duration"] < 10_000
    assert before == {
        "method": "POST",
        "path": "/api/v1/create_session",
        "pool_type": "session",
        "base_url": faulty.base_url,
        "session_id": "s1",
        "run": "7",
        "b": "call",
        "seq_id": 3,
    }
    assert after == {**before, "result": "ok", "retry_count": 2}
    assert SECRET not in repr(heard)


@pytest.mark.covers("C26", "24.http.7")
@pytest.mark.parametrize("op", protocol.OPERATIONS, ids=lambda op: op.name)
def test_events_name_the_class_of_traffic(
    faulty: FaultyServer, heard: list[Any], op: protocol.Operation
) -> None:
    parts = dict.fromkeys(re.findall(r"{(\w+)}", op.path), "x")
    with pytest.raises(tinkex.NotFoundError):
        call(faulty.base_url, dataclasses.replace(op, path=f"nowhere/{op.path}"), None, path=parts)
    assert [facts["pool_type"] for _, _, facts in heard] == [op.traffic] * 2
    assert heard[1][2]["result"] == "error"
    assert heard[1][2]["retry_count"] == 0


@pytest.mark.covers("C26", "D19")
def test_result_of_a_poll_is_its_status(faulty: FaultyServer, heard: list[Any]) -> None:
    statuses = {200: "ok", 408: "ok", 404: "error", 500: "error", 302: "error"}
    faulty.script("retrieve_future", *(Answer(status) for status in statuses))
    archive = {"training_run_id": "r", "kind": "weights", "name": "n"}
    faulty.script(
        "training_runs/r/checkpoints/weights/n/archive",
        Answer(302, headers={"Location": "/x"}),
        Answer(503),
    )

    async def run() -> None:
        carrier = Transport(Config(base_url=faulty.base_url))
        for _ in statuses:
            await carrier.poll(
                protocol.RETRIEVE_FUTURE, types.FutureRetrieveRequest(request_id="r"), {}, 5
            )
        for _ in range(2):
            await carrier.poll(protocol.GET_CHECKPOINT_ARCHIVE, path=archive)
        await carrier.close()

    asyncio.run(run())
    results = [facts["result"] for name, _, facts in heard if name == events.HTTP_STOP]
    assert results == [*statuses.values(), "ok", "error"]


@pytest.mark.covers("1.4.2/3", "C26")
def test_malformed_answer_is_an_exception(faulty: FaultyServer, heard: list[Any]) -> None:
    class Broken:
        async def send(self, *args: Any) -> Any:
            raise KeyError(f"lost {SECRET}")

        stream = close = send

    async def run() -> None:
        carrier = Transport(
            Config(base_url=faulty.base_url, api_key=SECRET, http_client=lambda _: Broken())
        )
        with pytest.raises(KeyError):
            await carrier.call(protocol.CREATE_SESSION, HELLO)

    asyncio.run(run())
    name, numbers, facts = heard[1]
    assert name == events.HTTP_EXCEPTION
    assert numbers["duration"] >= 0
    assert (facts["kind"], facts["reason"]) == ("KeyError", "'lost [REDACTED]'")
    assert "in send" in facts["stacktrace"]
    assert SECRET not in repr(heard)


@pytest.mark.covers("C26")
def test_cancelled_request_ends(faulty: FaultyServer, heard: list[Any]) -> None:
    faulty.script("create_session", Answer(body={"session_id": "s"}, delay=60))

    async def run() -> None:
        carrier = Transport(Config(base_url=faulty.base_url))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(carrier.call(protocol.CREATE_SESSION, HELLO), 0.1)
        await carrier.close()

    asyncio.run(run())
    assert [(name, facts.get("result")) for name, _, facts in heard] == [
        (events.HTTP_START, None),
        (events.HTTP_STOP, "cancelled"),
    ]


@pytest.mark.covers("1.4.3/1", "C26")
def test_console_logger_shows_a_real_request(
    faulty: FaultyServer, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    faulty.script("create_session", Answer(503), OK)
    logger = tinkex.telemetry.attach_logger()
    try:
        call(faulty.base_url, key=SECRET)
    finally:
        assert tinkex.telemetry.detach(logger)
    told = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert told[0] == f"HTTP start POST /api/v1/create_session pool=session base={faulty.base_url}"
    stop = (
        r"HTTP stop POST /api/v1/create_session result=ok \d+ ms retries=1 "
        rf"base={re.escape(faulty.base_url)}"
    )
    assert re.fullmatch(stop, told[1])


# ── another carrier ───────────────────────────────────────────────────────────────────────────────


class Carrier:
    """Carries requests by itself, and notes what it carried."""

    def __init__(self, config: Config) -> None:
        self.carried: list[tuple[str, str, str]] = []
        self.closed = False

    async def send(self, request: HttpRequest) -> Reply:
        self.carried.append((request.method, request.path, request.traffic))
        answers = {
            "/api/v1/create_session": b'{"session_id":"carried"}',
            "/api/v1/client/config": b"{}",
        }
        return Reply(200, {}, answers.get(request.path, b'{"supported_models":[]}'))

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamReply]:
        self.carried.append((request.method, request.path, request.traffic))

        async def chunks() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"

        yield StreamReply(200, {}, chunks())

    async def close(self) -> None:
        self.closed = True


@pytest.mark.covers("C12")
def test_every_request_uses_the_given_client() -> None:
    made: list[Carrier] = []

    def bring(config: Config) -> Carrier:
        made.append(Carrier(config))
        return made[-1]

    configure(http_client=bring)
    try:
        with tinkex.ServiceClient(base_url="http://localhost:1") as service:
            service.get_server_capabilities()
            assert service._session.session_id == "carried"
        with tinkex.HttpClient(base_url="http://localhost:1") as http:
            assert list(http.stream_get("events")) == [1]
    finally:
        configure()
    service_carrier, http_carrier = made
    paths = [path.removeprefix("/api/v1/") for _, path, _ in service_carrier.carried]
    asked = [path for path in paths if path != "client/dynamic_config"]
    assert asked == [
        "client/config",
        "create_session",
        "get_server_capabilities",
        "sessions/carried/finish",
    ]
    assert http_carrier.carried == [("GET", "/api/v1/events", "rest")]
    assert service_carrier.closed
    assert http_carrier.closed


# ── secrets ───────────────────────────────────────────────────────────────────────────────────────

PLANTED = {
    "key": "planted-api-key",
    "gate": "planted-gate",
    "cookie": "planted-cookie",
    "query": "planted-query",
}


@pytest.mark.covers("C05", "C25", "24.config.6", "W03")
@pytest.mark.parametrize(
    "answer",
    [
        Answer(401, {"detail": "bad key planted-api-key", "nested": [{"echo": "planted-api-key"}]}),
        Answer(
            503,
            b"you said planted-api-key, planted-gate and planted-query",
            content_type="text/plain",
        ),
        Answer(302, headers={"Location": "http://me:planted-other@127.0.0.1/x?sig=planted-other"}),
        Answer(body=b"<html>planted-api-key</html>"),
        Answer(body={"session_id": 5, "planted-api-key": "planted-gate"}),
        Answer(400),
        Answer(drop=True),
    ],
    ids=["detail", "text", "location", "page", "misread", "rejected", "dropped"],
)
def test_secrets_appear_nowhere(
    faulty: FaultyServer, heard: list[Any], caplog: pytest.LogCaptureFixture, answer: Answer
) -> None:
    caplog.set_level(logging.DEBUG)
    echo = {
        "Set-Cookie": PLANTED["cookie"],
        "X-Echo": PLANTED["key"],
        "Retry-After": PLANTED["key"],
    }
    faulty.script("create_session", dataclasses.replace(answer, headers={**echo, **answer.headers}))
    config = Config(
        base_url=faulty.base_url,
        api_key=PLANTED["key"],
        cf_access_client_id="id",
        cf_access_client_secret=PLANTED["gate"],
        default_query={"access_token": PLANTED["query"]},
        default_headers={"X-Note": f"for {PLANTED['key']}"},
        dump_headers=True,
    )

    async def run() -> tinkex.APIError:
        carrier = Transport(config)
        logger = tinkex.telemetry.attach_logger()
        try:
            await carrier.call(protocol.CREATE_SESSION, HELLO, max_retries=1)
        except tinkex.APIError as error:
            return error
        finally:
            tinkex.telemetry.detach(logger)
            await carrier.close()
        raise AssertionError

    error: BaseException | None = asyncio.run(run())
    assert isinstance(error, tinkex.APIError)
    assert error.request.url == f"{faulty.base_url}/api/v1/create_session?access_token=[REDACTED]"
    if error.response is not None:
        assert error.response.headers["x-echo"] == "[REDACTED]"
        shown = repr((error.response.content, error.response.headers, error.response.request))
        assert "planted" not in shown
    assert "planted" not in repr(pickle.loads(pickle.dumps(error)).__dict__)
    while error is not None:
        told = (
            "".join(traceback.format_exception_only(error))
            + repr(error)
            + str(error)
            + repr(vars(error))
        )
        assert "planted" not in told
        error = error.__cause__ or error.__context__
    assert "planted" not in repr(heard)
    assert "planted" not in repr(config)
    dumped = [record.getMessage() for record in caplog.records if "headers=" in record.getMessage()]
    assert dumped
    assert (
        f"POST {faulty.base_url}/api/v1/create_session?access_token=[REDACTED] headers="
        in dumped[0]
    )
    assert "'X-Note': 'for [REDACTED]'" in dumped[0]
    assert "planted" not in caplog.text


@pytest.mark.covers("C25")
def test_every_attempt_is_dumped_also_of_streams(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    faulty.script("create_session", Answer(503), OK)
    faulty.script("stream_sample", Answer(body=b""))

    async def run(dump: bool) -> None:
        carrier = Transport(Config(base_url=faulty.base_url, dump_headers=dump))
        await carrier.call(protocol.CREATE_SESSION, HELLO)
        async with carrier.stream(protocol.STREAM_SAMPLE):
            pass
        await carrier.close()

    asyncio.run(run(True))
    lines = [record.getMessage() for record in caplog.records if "headers=" in record.getMessage()]
    assert len(lines) == 3
    assert "'X-Stainless-Retry-Count': '1'" in lines[1]
    assert f"body={len(faulty.seen[0].body)} bytes" in lines[0]
    assert "stream_sample" in lines[2]
    caplog.clear()
    asyncio.run(run(False))
    assert "headers=" not in caplog.text


@pytest.mark.covers("C05")
def test_token_or_a_commands_key_is_a_secret_too(faulty: FaultyServer) -> None:
    faulty.script(
        "create_session", Answer(401, {"detail": "odd: from-a-command", "echo": "from-a-command"})
    )

    async def run() -> None:
        carrier = Transport(Config(base_url=faulty.base_url, credential_cmd="echo from-a-command"))
        with pytest.raises(tinkex.AuthenticationError) as caught:
            await carrier.call(protocol.CREATE_SESSION, HELLO)
        await carrier.close()
        assert faulty.seen[-1].headers["x-api-key"] == "from-a-command"
        assert "from-a-command" not in repr(vars(caught.value)) + str(caught.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("secret", "plain"),
    [
        ("X-Api-Key", "X-Key-Count"),
        ("hfToken", "max_tokens"),
        ("Set-Cookie", "Cookie-Policy"),
        ("X-Amz-Signature", "Signature-Version"),
        ("sig", "signal"),
        ("AWSAccessKeyId", "access_scope"),
        ("client_secret", "secretary"),
        ("secret_key", "primary_key"),
        ("accesstoken", "token_count"),
        ("Proxy-Authorization", "author"),
        ("CF-Access-Client-Secret", "CF-Access-Client-Id"),
        ("X-Amz-Security-Token", "tokens"),
        ("db.password", "passed"),
        ("credential_cmd", "path"),
    ],
)
def test_secret_names_are_recognized(secret: str, plain: str) -> None:
    shown = redact_headers({secret: "hush", plain: "seen"})
    assert shown == {secret: "[REDACTED]", plain: "seen"}
    assert (
        redact_url(f"https://host/x?{secret}=hush&{plain}=seen")
        == f"https://host/x?{secret}=[REDACTED]&{plain}=seen"
    )
    assert Scrubber().mapping({secret: "hush", plain: "seen"}) == shown


# ── the catalogue ─────────────────────────────────────────────────────────────────────────────────

CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{kind}/{name}"
CATALOGUE = {
    "create_session": ("POST", "create_session", "session"),
    "session_heartbeat": ("POST", "session_heartbeat", "session"),
    "create_model": ("POST", "create_model", "train"),
    "create_sampling_session": ("POST", "create_sampling_session", "session"),
    "get_server_capabilities": ("GET", "get_server_capabilities", "rest"),
    "healthz": ("GET", "healthz", "rest"),
    "get_info": ("POST", "get_info", "rest"),
    "unload_model": ("POST", "unload_model", "train"),
    "forward_backward": ("POST", "forward_backward", "train"),
    "forward": ("POST", "forward", "train"),
    "optim_step": ("POST", "optim_step", "train"),
    "save_weights": ("POST", "save_weights", "train"),
    "load_weights": ("POST", "load_weights", "train"),
    "save_weights_for_sampler": ("POST", "save_weights_for_sampler", "train"),
    "asample": ("POST", "asample", "sample"),
    "stream_sample": ("POST", "stream_sample", "sample"),
    "retrieve_future": ("POST", "retrieve_future", "poll"),
    "telemetry": ("POST", "telemetry", "telemetry"),
    "get_session": ("GET", "sessions/{session_id}", "rest"),
    "list_sessions": ("GET", "sessions", "rest"),
    "list_checkpoints": ("GET", "training_runs/{training_run_id}/checkpoints", "rest"),
    "list_user_checkpoints": ("GET", "checkpoints", "rest"),
    "get_checkpoint_archive": ("GET", f"{CHECKPOINT}/archive", "rest"),
    "delete_checkpoint": ("DELETE", CHECKPOINT, "rest"),
    "set_checkpoint_ttl": ("PUT", f"{CHECKPOINT}/ttl", "rest"),
    "publish_checkpoint": ("POST", f"{CHECKPOINT}/publish", "rest"),
    "unpublish_checkpoint": ("DELETE", f"{CHECKPOINT}/publish", "rest"),
    "get_training_run": ("GET", "training_runs/{training_run_id}", "rest"),
    "list_training_runs": ("GET", "training_runs", "rest"),
    "get_sampler": ("GET", "samplers/{sampler_id}", "rest"),
    "weights_info": ("POST", "weights_info", "rest"),
}


@pytest.mark.covers("C27", "4.2/1")
@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_of_endpoints(faulty: FaultyServer, name: str) -> None:
    method, path, traffic = CATALOGUE[name]
    op = protocol.BY_NAME[name]
    assert (op.method, op.path, op.traffic) == (method, path, traffic)
    parts = dict.fromkeys(re.findall(r"{(\w+)}", path), "a/b c")
    where = re.sub(r"{\w+}", "a%2Fb%20c", path)
    faulty.script(f"{where}?limit=1&text=a%20b%26", Answer(404, {"detail": "asked and answered"}))
    with pytest.raises(tinkex.NotFoundError, match=f"{op.title} at .*asked and answered") as caught:
        call(
            faulty.base_url, op, None, path=parts, query={"limit": 1, "none": None, "text": "a b&"}
        )
    assert faulty.seen[-1].method == method
    assert caught.value.request.url == f"{faulty.base_url}/api/v1/{where}?limit=1&text=a%20b%26"


@pytest.mark.covers("C13")
def test_query_of_a_call_wins_over_the_configured_one(faulty: FaultyServer) -> None:
    faulty.script("healthz", Answer(body={"status": "ok"}))

    async def run() -> None:
        carrier = Transport(
            Config(base_url=faulty.base_url, default_query={"a": "1", "b": "2", "c": "3"})
        )
        await carrier.call(protocol.HEALTHZ, query={"b": "call", "c": None})
        await carrier.close()

    asyncio.run(run())
    assert faulty.seen[-1].path == "healthz?a=1&b=call"


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("D12", "W17")
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b"<html>welcome to our proxy</html>", "text/html"),
        (b'{"session_id": 5}', "application/json"),
        (b'{"session_id":"s","type":"other"}', "application/json"),
        (b"\x0a\x01s", "application/x-protobuf"),
    ],
    ids=repr,
)
def test_answers_out_of_form_name_the_endpoint(
    faulty: FaultyServer, body: bytes, content_type: str
) -> None:
    faulty.script("create_session", Answer(body=body, content_type=content_type))
    with pytest.raises(
        tinkex.APIResponseValidationError, match=r"create_session at 127.0.0.1:\d+"
    ) as caught:
        call(faulty.base_url)
    assert "CreateSessionResponse" in caught.value.message
    assert len(faulty.requests("create_session")) == 1


@pytest.mark.covers("W17")
def test_missing_field_is_named(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(body={"other": 1}))
    with pytest.raises(tinkex.APIResponseValidationError, match="session_id"):
        call(faulty.base_url)


@pytest.mark.covers("C19", "24.code.1")
def test_compressed_answers_are_read(faulty: FaultyServer) -> None:
    import gzip

    faulty.script(
        "create_session",
        Answer(body=gzip.compress(b'{"session_id":"s"}'), headers={"Content-Encoding": "gzip"}),
    )
    assert call(faulty.base_url).session_id == "s"


# ── a server that is not there ────────────────────────────────────────────────────────────────────


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.covers("24.http.6", "W10")
@pytest.mark.usefixtures("kept_waits")
def test_unreachable_server_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact has a patience of its own, here shortened."""
    original = Config.resolve
    monkeypatch.setattr(
        Config,
        "resolve",
        lambda **kw: Config(**{**_fields(original(**kw)), "first_contact_patience": 0.6}),
    )
    port = closed_port()
    service = tinkex.ServiceClient(base_url=f"http://127.0.0.1:{port}")
    with pytest.raises(tinkex.APIConnectionError) as caught:
        service.get_server_capabilities()
    text = str(caught.value)
    assert f"127.0.0.1:{port}" in text
    assert "client_config" in text
    assert "hint: " in text
    assert "base URL" in text
    assert caught.value.attempts == 2
    service.close().result(5)


def _fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in Config.__dataclass_fields__}


@pytest.mark.covers("W10")
def test_first_contact_is_not_awaited_for_minutes() -> None:
    assert Config(base_url="local").first_contact_patience <= 10


def test_failed_session_start_is_retried_by_the_next_call(faulty: FaultyServer) -> None:
    faulty.script("client/config", Answer(403, {"detail": "not yet"}), Answer(body={}))
    faulty.script(
        "get_server_capabilities", Answer(body={"supported_models": [{"model_name": "m"}]})
    )
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        with pytest.raises(tinkex.PermissionDeniedError, match="not yet"):
            service.get_server_capabilities()
        assert service.get_server_capabilities().supported_models[0].model_name == "m"


def test_session_opens_with_the_first_call(faulty: FaultyServer) -> None:
    service = tinkex.ServiceClient(base_url=faulty.base_url)
    service.close().result(5)
    assert faulty.seen == []


@pytest.mark.covers("C10", "C33")
def test_session_is_opened_once_for_many_callers(faulty: FaultyServer) -> None:
    import threading

    faulty.script("client/config", Answer(body={}, delay=0.05))
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        threads = [threading.Thread(target=service.get_server_capabilities) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(faulty.requests("client/config")) == len(faulty.requests("create_session")) == 1
    assert len(faulty.requests("get_server_capabilities")) == 8
    [finish] = faulty.requests("sessions/s/finish")
    assert finish.json == {"reason": {"type": "success"}, "detail": None}


@pytest.mark.covers("C33")
@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("oops"), "errored"), (KeyboardInterrupt(), "interrupted")]
)
def test_session_reports_its_outcome(
    faulty: FaultyServer, error: BaseException, reason: str
) -> None:
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    with pytest.raises(type(error)), tinkex.ServiceClient(base_url=faulty.base_url) as service:  # noqa: PT012
        service.get_server_capabilities()
        raise error
    [finish] = faulty.requests("sessions/s/finish")
    assert finish.json["reason"] == {"type": reason}
    assert finish.json["detail"] == repr(error)


@pytest.mark.parametrize("fault", [Answer(404), Answer(500, {"detail": "no"}), Answer(drop=True)])
def test_session_that_cannot_be_finished_does_not_break_the_program(
    faulty: FaultyServer, fault: Answer, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Delays, "after", lambda *_, **__: 6.0)
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    faulty.script("sessions/s/finish", fault)
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
    faulty.script("sessions/s/finish", Answer(body={}))


def test_messages_of_the_server_reach_the_log(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    told = {
        "session_id": "s",
        "info_message": "hello",
        "warning_message": "beware",
        "error_message": "alas",
    }
    faulty.script("create_session", Answer(body=told))
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
    found = {record.getMessage(): record.levelname for record in caplog.records}
    assert found["hello"] == "INFO"
    assert found["beware"] == "WARNING"
    assert found["alas"] == "ERROR"


@pytest.mark.covers("W16")
def test_dropped_client_lets_its_connections_go(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    service = tinkex.ServiceClient(base_url=faulty.base_url)
    service.get_server_capabilities()
    exchange: Any = service._session.transport._exchange
    del service
    wait_until(lambda: gc.collect() >= 0 and all(pool.closed for pool in exchange._pools.values()))
    assert exchange._pools
