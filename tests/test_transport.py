"""One exchange: what is retried and for how long, what is sent, what errors say; against a server that misbehaves."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from tinkex import protocol, transport, types
from tinkex.config import Config
from tinkex.transport import Transport, backoff

OK = Answer(body={"session_id": "s"})
HELLO = types.CreateSessionRequest()
SECRET = "tml-very-secret"


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(faulty: FaultyServer) -> None:
    faulty.seen.clear()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were decided on; nobody waits for them."""
    decided: list[float] = []

    def quick(*args: Any, **kwargs: Any) -> float:
        decided.append(backoff(*args, **kwargs))
        return 0.001

    monkeypatch.setattr(transport, "backoff", quick)
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


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_passing_faults_are_tried_again(faulty: FaultyServer, waits: list[float], fault: Answer) -> None:
    faulty.script("create_session", fault, fault, OK)
    assert call(faulty.base_url).session_id == "s"
    seen = faulty.requests("create_session")
    assert len(seen) == 3
    assert len(waits) == 2
    assert [request.headers["x-stainless-retry-count"] for request in seen] == ["0", "1", "2"]
    assert len({request.headers["x-idempotency-key"] for request in seen}) == 1
    assert len({request.body for request in seen}) == 1


@pytest.mark.covers("C15")
def test_each_call_has_a_key_of_its_own(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url)
    call(faulty.base_url)
    assert len({request.headers["x-idempotency-key"] for request in faulty.requests("create_session")}) == 2
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
def test_each_status_has_its_error(faulty: FaultyServer, status: int, kind: type[tinkex.APIStatusError]) -> None:
    faulty.script("create_session", Answer(status, b"plain words", content_type="text/plain"))
    with pytest.raises(kind, match="plain words") as caught:
        call(faulty.base_url, patience=0)
    assert type(caught.value) is kind
    assert caught.value.body == "plain words"


def test_waits_grow_and_are_bounded() -> None:
    for failures in range(1, 12):
        nominal = min(0.5 * 2 ** (failures - 1), 10)
        for _ in range(20):
            assert 0.75 * nominal <= backoff(failures) <= nominal
    assert backoff(1, retry_after=7.5) == 7.5
    assert backoff(10, retry_after=0.1) >= 7.5
    assert len({backoff(3) for _ in range(20)}) > 1


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
def test_the_server_may_ask_for_time(
    faulty: FaultyServer, waits: list[float], headers: dict[str, str], wait: float | None, status: int
) -> None:
    faulty.script("create_session", Answer(status, headers=headers), OK)
    call(faulty.base_url)
    [decided] = waits
    assert decided == wait if wait is not None else decided <= 0.5


def test_patience_ends(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(503, {"detail": "busy"}))
    began = time.monotonic()
    with pytest.raises(tinkex.InternalServerError, match=r"busy.*after \d attempts in") as caught:
        call(faulty.base_url, patience=1.0)
    assert 0.3 < time.monotonic() - began < 1.5
    assert caught.value.attempts == len(faulty.requests("create_session")) == 2


@pytest.mark.covers("W23")
def test_a_conflict_has_two_seconds(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(409, {"detail": "taken"}))
    began = time.monotonic()
    with pytest.raises(tinkex.ConflictError, match="taken"):
        call(faulty.base_url)
    assert 1.0 < time.monotonic() - began < 2.5


def test_without_patience_there_is_one_attempt(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(503))
    with pytest.raises(tinkex.InternalServerError) as caught:
        call(faulty.base_url, patience=0)
    assert len(faulty.requests("create_session")) == 1
    assert "attempts" not in caught.value.message


@pytest.mark.covers("W14")
def test_a_slow_answer_times_out(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(body={"session_id": "s"}, delay=5))
    with pytest.raises(tinkex.APITimeoutError, match=r"create_session.*within 0.2 s") as caught:
        call(faulty.base_url, timeout=0.2, patience=0)
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.covers("W03")
def test_the_first_retry_is_logged_without_the_key(
    faulty: FaultyServer, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    faulty.script("create_session", Answer(503), Answer(503), Answer(503), OK)
    call(faulty.base_url, key=SECRET)
    warnings = [record for record in caplog.records if record.name == "tinkex" and record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "create_session" in warnings[0].getMessage()
    assert SECRET not in caplog.text


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_key_is_sent_when_there_is_none(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url)
    [seen] = faulty.requests("create_session")
    assert "x-api-key" not in seen.headers
    assert "authorization" not in seen.headers
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["accept"] == "application/json"
    assert seen.headers["user-agent"].startswith("tinkex/")


@pytest.mark.covers("W03")
def test_the_key_travels_in_one_header(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    call(faulty.base_url, key=SECRET)
    [seen] = faulty.requests("create_session")
    assert seen.headers["x-api-key"] == SECRET
    assert SECRET not in "".join(value for name, value in seen.headers.items() if name != "x-api-key")
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
        carrier = Transport(Config(base_url=faulty.base_url, default_headers={"CF-Access-Client-Id": "gate"}))
        await carrier.call(protocol.CREATE_SESSION, HELLO, headers={"X-One": "1"})
        await carrier.close()

    asyncio.run(run())
    [seen] = faulty.requests("create_session")
    assert (seen.headers["cf-access-client-id"], seen.headers["x-one"]) == ("gate", "1")


def test_ids_keep_their_colons_and_nothing_else(faulty: FaultyServer) -> None:
    answer = {"sampler_id": "x", "base_model": "b"}
    faulty.script("samplers/s:sample:0", Answer(body=answer))
    call(faulty.base_url, protocol.GET_SAMPLER, None, path={"sampler_id": "s:sample:0"})
    faulty.script("samplers/..%2F%3Fa%23", Answer(body=answer))
    call(faulty.base_url, protocol.GET_SAMPLER, None, path={"sampler_id": "../?a#"})


def test_a_path_in_the_base_url_stays(faulty: FaultyServer) -> None:
    faulty.script("/prefix/api/v1/create_session", OK)
    assert call(f"{faulty.base_url}/prefix").session_id == "s"


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_answers_out_of_form_name_the_endpoint(faulty: FaultyServer, body: bytes, content_type: str) -> None:
    faulty.script("create_session", Answer(body=body, content_type=content_type))
    with pytest.raises(tinkex.APIResponseValidationError, match=r"create_session at 127.0.0.1:\d+") as caught:
        call(faulty.base_url)
    assert "CreateSessionResponse" in caught.value.message
    assert len(faulty.requests("create_session")) == 1


@pytest.mark.covers("W17")
def test_a_missing_field_is_named(faulty: FaultyServer) -> None:
    faulty.script("create_session", Answer(body={"other": 1}))
    with pytest.raises(tinkex.APIResponseValidationError, match="session_id"):
        call(faulty.base_url)


@pytest.mark.covers("C19", "24.code.1")
def test_compressed_answers_are_read(faulty: FaultyServer) -> None:
    import gzip

    faulty.script(
        "create_session", Answer(body=gzip.compress(b'{"session_id":"s"}'), headers={"Content-Encoding": "gzip"})
    )
    assert call(faulty.base_url).session_id == "s"


# ── a server that is not there ───────────────────────────────────────────────────────────────────────────────────


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.covers("24.http.6", "W10")
def test_an_unreachable_server_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact has a patience of its own, here shortened."""
    original = Config.resolve
    monkeypatch.setattr(
        Config,
        "resolve",
        lambda **kw: Config(**{**_fields(original(**kw)), "first_contact_patience": 0.6}),
    )
    port = closed_port()
    service = tinkex.ServiceClient(base_url=f"http://127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(tinkex.APIConnectionError) as caught:
        service.get_server_capabilities()
    assert time.monotonic() - began < 2
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
def test_the_first_contact_is_not_awaited_for_minutes() -> None:
    assert Config(base_url="local").first_contact_patience <= 10


def test_a_failed_opening_is_made_anew_by_the_next_call(faulty: FaultyServer) -> None:
    faulty.script("client/config", Answer(403, {"detail": "not yet"}), Answer(body={}))
    faulty.script("get_server_capabilities", Answer(body={"supported_models": [{"model_name": "m"}]}))
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        with pytest.raises(tinkex.PermissionDeniedError, match="not yet"):
            service.get_server_capabilities()
        assert service.get_server_capabilities().supported_models[0].model_name == "m"


def test_nothing_is_sent_before_the_first_call(faulty: FaultyServer) -> None:
    service = tinkex.ServiceClient(base_url=faulty.base_url)
    service.close().result(5)
    assert faulty.seen == []


@pytest.mark.covers("C10", "C33")
def test_the_session_is_opened_once_for_many_callers(faulty: FaultyServer) -> None:
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
@pytest.mark.parametrize(("error", "reason"), [(ValueError("oops"), "errored"), (KeyboardInterrupt(), "interrupted")])
def test_the_session_says_how_it_ended(faulty: FaultyServer, error: BaseException, reason: str) -> None:
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    with pytest.raises(type(error)), tinkex.ServiceClient(base_url=faulty.base_url) as service:  # noqa: PT012
        service.get_server_capabilities()
        raise error
    [finish] = faulty.requests("sessions/s/finish")
    assert finish.json["reason"] == {"type": reason}
    assert finish.json["detail"] == repr(error)


@pytest.mark.parametrize("fault", [Answer(404), Answer(500, {"detail": "no"}), Answer(drop=True)])
def test_a_session_that_cannot_be_finished_does_not_break_the_program(
    faulty: FaultyServer, fault: Answer, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "backoff", lambda *_, **__: 6.0)
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    faulty.script("sessions/s/finish", fault)
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
    faulty.script("sessions/s/finish", Answer(body={}))


def test_messages_of_the_server_reach_the_log(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    told = {"session_id": "s", "info_message": "hello", "warning_message": "beware", "error_message": "alas"}
    faulty.script("create_session", Answer(body=told))
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        service.get_server_capabilities()
    found = {record.getMessage(): record.levelname for record in caplog.records}
    assert found["hello"] == "INFO"
    assert found["beware"] == "WARNING"
    assert found["alas"] == "ERROR"


@pytest.mark.covers("W16")
def test_a_dropped_client_lets_its_connections_go(faulty: FaultyServer) -> None:
    faulty.script("create_session", OK)
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}))
    service = tinkex.ServiceClient(base_url=faulty.base_url)
    service.get_server_capabilities()
    exchange: Any = service._session.transport._exchange
    del service
    for _ in range(100):
        gc.collect()
        if all(pool.closed for pool in exchange._pools.values()):
            break
        time.sleep(0.01)
    assert exchange._pools
    assert all(pool.closed for pool in exchange._pools.values())
