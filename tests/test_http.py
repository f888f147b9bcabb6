"""HttpClient: any endpoint by its path, against a scripted server; and answers with everything
about them."""

from __future__ import annotations

import asyncio
import datetime as dt
import email
import gc
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import wait_until
from tinkex import Config, HttpClient, LocalBackend, RestClient, Timeout, events, types
from tinkex.client.http.http_client import EventStream
from tinkex.client.http.responses import APIResponse
from tinkex.engine.fake import FakeEngine
from tinkex.wire.json_values import NOT_GIVEN, OMIT

KEY = "tml-very-secret"


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def http(faulty: FaultyServer) -> Iterator[HttpClient]:
    with HttpClient(base_url=faulty.base_url, api_key=KEY) as client:
        yield client


def last(faulty: FaultyServer) -> Seen:
    return faulty.seen[-1]


# ── the four methods ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C12")
@pytest.mark.parametrize(
    ("method", "args", "body"),
    [
        ("get", (), b""),
        ("post", ({"a": 1},), b'{"a":1}'),
        ("put", ({"a": 1},), b'{"a":1}'),
        ("delete", (), b""),
        ("post", (), b"{}"),
        ("put", (), b"{}"),
        ("post", ([1, None],), b"[1,null]"),
        ("post", ('{"as": "is"}',), b'{"as": "is"}'),
        ("post", (b"\x00bytes",), b"\x00bytes"),
        ("post", (types.AdamParams(learning_rate=0.5, beta1=0.25),), None),
    ],
)
def test_each_method(
    faulty: FaultyServer, http: HttpClient, method: str, args: tuple[Any, ...], body: Any
) -> None:
    faulty.script("things/1", Answer(body={"found": [1, 2.5, None]}))
    assert getattr(http, method)("things/1", *args).result(10) == {"found": [1, 2.5, None]}
    seen = last(faulty)
    assert (seen.method, seen.path, seen.headers["x-api-key"]) == (method.upper(), "things/1", KEY)
    assert seen.headers.get("content-type") == (None if method == "get" else "application/json")
    assert ("x-idempotency-key" in seen.headers) is (method != "get")
    if body is None:
        assert (seen.json["learning_rate"], seen.json["beta1"]) == (0.5, 0.25)
    else:
        assert seen.body == body


@pytest.mark.covers("C13")
def test_leading_slash_means_from_the_base_url_on(faulty: FaultyServer) -> None:
    with HttpClient(base_url=f"{faulty.base_url}/services/x") as http:
        faulty.script("/services/x/status", Answer(body=1))
        faulty.script("/services/x/api/v1/things", Answer(body=2))
        assert http.get("/status").result(10) == 1
        assert http.get("things").result(10) == 2
        assert http.get("/api/v1/things").result(10) == 2


@pytest.mark.covers("C13", "24.http.10")
def test_query_precedence(faulty: FaultyServer) -> None:
    faulty.script("things", Answer(body={}))
    config = Config(
        base_url=faulty.base_url,
        default_query={"a": "default", "b": "default", "c": "default", "d": "x"},
    )
    with HttpClient(config=config) as http:
        http.get(
            "things?b=path&c=path&e=1&e=2&f=",
            params={"c": "call", "d": None, " n ": 1.5, "t": True},
        ).result(10)
        assert last(faulty).path == "things?a=default&b=path&e=1&e=2&f=&c=call&n=1.5&t=true"
        http.get("things", params={"e": "ä b&c"}).result(10)
        assert last(faulty).path == "things?a=default&b=default&c=default&d=x&e=%C3%A4+b%26c"
        http.get("things?e=1&e=2", params={"e": None}).result(10)
        assert last(faulty).path == "things?a=default&b=default&c=default&d=x"


@pytest.mark.parametrize(
    "params",
    [{" ": 1}, {"": 1}, {"a": [1]}, {"a": {}}, {"a": object()}],
    ids=["blank", "empty", "list", "mapping", "object"],
)
def test_invalid_query_is_refused_at_once(
    faulty: FaultyServer, http: HttpClient, params: Any
) -> None:
    with pytest.raises(ValueError, match="query parameter"):
        http.get("things", params=params)
    assert faulty.seen == []


def test_path_parameters_cannot_smuggle_segments(faulty: FaultyServer, http: HttpClient) -> None:
    evil = "things HTTP/1.1\r\nX-Evil: 1\r\n\r\n"
    faulty.script("things%20HTTP/1.1%0D%0AX-Evil:%201%0D%0A%0D%0A", Answer(body="one path"))
    assert http.get(evil).result(10) == "one path"
    assert "x-evil" not in last(faulty).headers
    faulty.script("a%2Fb:c/%C3%A4", Answer(body=2))
    assert http.get("a%2Fb:c/ä").result(10) == 2
    with pytest.raises(ValueError, match="a path, not an address"):
        http.get("https://elsewhere.example/x")


# ── options ───────────────────────────────────────────────────────────────────────────────────────


def test_extra_fields_are_added_to_the_body(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(body={}))
    http.post(
        "things", {"a": 1, "b": 2, "c": 3}, extra_json={"b": None, "c": OMIT, "d": [4]}
    ).result(10)
    assert last(faulty).json == {"a": 1, "b": None, "d": [4]}
    http.post("things", extra_json={"only": 1}).result(10)
    assert last(faulty).json == {"only": 1}
    for body in ([1], "text", b"bytes"):
        with pytest.raises(TypeError, match=r"extra_json|as it is"):
            http.post("things", body, extra_json={"a": 1})


@pytest.mark.covers("C18", "D21")
def test_not_given_omit_and_none_are_distinct(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(body={}))
    body = {
        "absent": NOT_GIVEN,
        "omitted": OMIT,
        "none": None,
        "zero": 0,
        "when": dt.datetime(2026, 1, 2, 3, 4),
    }
    http.post("things", body).result(10)
    assert last(faulty).json == {"none": None, "zero": 0, "when": "2026-01-02T03:04:00"}
    form = {
        "aliases": {"when": "at"},
        "drop_none": True,
        "formats": {"when": lambda when: when.year},
    }
    http.post("things", body, transform=form).result(10)
    assert last(faulty).json == {"zero": 0, "at": 2026}
    http.post("things", body, transform=form, extra_json={"more": dt.date(2026, 5, 6)}).result(10)
    assert last(faulty).json == {"zero": 0, "at": 2026, "more": "2026-05-06"}
    with pytest.raises(TypeError, match="as it is"):
        http.post("things", "text", transform=form)


@pytest.mark.covers("C15")
def test_caller_may_choose_or_omit_the_idempotency_key(
    faulty: FaultyServer, http: HttpClient
) -> None:
    faulty.script("things", Answer(body={}))
    http.post("things", idempotency_key="mine").result(10)
    assert last(faulty).headers["x-idempotency-key"] == "mine"
    http.post("things", idempotency_key=OMIT).result(10)
    assert "x-idempotency-key" not in last(faulty).headers
    http.post("things", headers={"X-IDEMPOTENCY-KEY": "by hand"}).result(10)
    assert last(faulty).headers["x-idempotency-key"] == "by hand"
    http.delete("things").result(10)
    assert last(faulty).headers["x-idempotency-key"].startswith("tinkex-")


@pytest.mark.covers("C22", "24.http.4")
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_retries_of_one_call_can_be_counted(
    faulty: FaultyServer, http: HttpClient, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.001)
    faulty.script("things", Answer(503))
    with pytest.raises(tinkex.InternalServerError) as caught:
        http.get("things", max_retries=retries).result(10)
    assert len(faulty.seen) == caught.value.attempts == retries + 1


def test_timeout_can_be_set_for_one_call(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(body={}, delay=60))
    for timeout in (0.2, Timeout(0.2), Timeout(5, read=0.2)):
        with pytest.raises(tinkex.APITimeoutError, match=r"GET things at .* within 0\.2 s"):
            http.get("things", timeout=timeout, max_retries=0).result(10)
        assert last(faulty).headers["x-stainless-read-timeout"] == "0.2"


def test_timeout_in_the_official_words() -> None:
    assert Timeout(30.0) == Timeout(30.0, 30.0, 30.0, 30.0, 30.0)
    assert Timeout(30.0, read=5.0).read == 5.0
    assert Timeout().read is None
    with pytest.raises(ValueError, match="a connect timeout of its own has no effect"):
        Timeout(30.0, connect=1.0)


@pytest.mark.parametrize(
    ("method", "options", "error", "words"),
    [
        ("get", {"colour": 1}, TypeError, "unknown option 'colour'; known are headers"),
        ("get", {"extra_json": {"a": 1}}, TypeError, "a GET has no body"),
        ("get", {"files": {"a": b"1"}}, TypeError, "a GET has no body"),
        ("get", {"transform": {}}, TypeError, "a GET has no body"),
        ("post", {"response": "raw"}, ValueError, 'response must be "data" or "wrapped"'),
        ("post", {"timeout": 0}, ValueError, "timeout must be a positive"),
        ("post", {"timeout": -1.0}, ValueError, "timeout must be a positive"),
        ("post", {"timeout": Timeout(float("nan"))}, ValueError, "timeout must be a positive"),
    ],
)
def test_options_without_effect_are_refused(
    faulty: FaultyServer,
    http: HttpClient,
    method: str,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        getattr(http, method)("things", **options)
    assert faulty.seen == []


def test_settings_are_given_once(faulty: FaultyServer) -> None:
    with pytest.raises(ValueError, match="not both"):
        HttpClient(base_url=faulty.base_url, config=Config(base_url="local"))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def parts(seen: Seen) -> dict[str, tuple[str | None, bytes]]:
    """The fields and files of a form, as another program reads them."""
    message = email.message_from_bytes(
        f"Content-Type: {seen.headers['content-type']}\r\n\r\n".encode() + seen.body
    )
    found = {}
    for part in message.get_payload():
        assert not isinstance(part, str)
        name = part.get_param("name", header="content-disposition")
        found[str(name)] = (part.get_filename(), part.get_payload(decode=True))
    return found  # type: ignore[return-value]


@pytest.mark.covers("1.17.5/1", "C17", "24.http.11")
def test_files_make_the_body_a_form(faulty: FaultyServer, http: HttpClient, tmp_path: Path) -> None:
    faulty.script("things", Answer(body={}))
    place = tmp_path / "weights.bin"
    place.write_bytes(b"\x00\x01")
    with place.open("rb") as opened:
        files = {"path": place, "bytes": b"content", "open": opened}
        body = {"a": {"b": 1}, "when": dt.date(2026, 1, 2), "none": None}
        http.post("things", body, files=files, transform={"drop_none": True}).result(10)
    seen = last(faulty)
    assert seen.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert parts(seen) == {
        "a[b]": (None, b"1"),
        "when": (None, b"2026-01-02"),
        "path": ("weights.bin", b"\x00\x01"),
        "bytes": (None, b"content"),
        "open": ("weights.bin", b"\x00\x01"),
    }
    http.post("things", {"a": 1}, files={}).result(10)
    assert last(faulty).headers["content-type"] == "application/json"


@pytest.mark.covers("C17")
def test_content_type_may_ask_for_a_form(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(body={}))
    http.put(
        "things", {"a": 1}, headers={"content-TYPE": "multipart/form-data; boundary=mine"}
    ).result(10)
    assert last(faulty).headers["content-type"] == "multipart/form-data; boundary=mine"
    assert parts(last(faulty)) == {"a": (None, b"1")}


@pytest.mark.covers("C17")
def test_missing_file_is_reported_before_sending(
    faulty: FaultyServer, http: HttpClient, tmp_path: Path
) -> None:
    future = http.post("things", files={"a": tmp_path / "nowhere"})
    with pytest.raises(ValueError, match="Failed to prepare request: there is no file"):
        future.result(10)
    assert faulty.seen == []


@pytest.mark.covers("1.17.2/7")
async def test_files_are_read_off_the_loop(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(body={}))
    readers, gone_on = [], threading.Event()

    class Slow:
        def read(self) -> bytes:
            readers.append(threading.current_thread())
            assert gone_on.wait(20)
            return b"slow"

    sending = http.post("things", files={"a": ("a", Slow())})
    faulty.script("quick", Answer(body=1))
    while not readers:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert await http.get("quick") == 1
    gone_on.set()  # neither this loop nor the one behind the client was held up
    await sending
    assert readers[0] is not threading.current_thread()
    assert parts(last(faulty))["a"] == ("a", b"slow")


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C20")
@pytest.mark.parametrize("status", [200, 201, 204])
def test_empty_answer_is_an_empty_mapping(
    faulty: FaultyServer, http: HttpClient, status: int
) -> None:
    faulty.script("things", Answer(status))
    assert http.delete("things").result(10) == {}


@pytest.mark.covers("C20")
def test_good_answer_that_is_not_json_is_an_error(faulty: FaultyServer, http: HttpClient) -> None:
    page = f"<html>hello {KEY}</html>".encode()
    faulty.script("things", Answer(body=page, content_type="text/html"))
    with pytest.raises(
        tinkex.APIResponseValidationError, match=r"GET things at .*: the answer is not JSON"
    ) as caught:
        http.get("things").result(10)
    error = caught.value
    assert error.status is None
    assert error.status_code == 200
    assert error.category == types.RequestErrorCategory.User
    assert error.response.text == "<html>hello [REDACTED]</html>"
    assert error.response.request.url == f"{faulty.base_url}/api/v1/things"
    assert error.body == b"<html>hello [REDACTED]</html>"
    assert len(faulty.seen) == 1


@pytest.mark.covers("C20", "24.http.5")
@pytest.mark.parametrize(
    ("status", "body", "category", "words"),
    [
        (422, {"message": "rank is odd"}, "user", "422: rank is odd"),
        (422, {"error": "bad", "category": "server"}, "server", "422: bad"),
        (500, {"error": "oops", "category": "user"}, "user", "500: oops"),
        (500, b"plain", "server", "500: plain"),
        (429, {"message": "slow down", "category": "user"}, "server", "429: slow down"),
        (404, {"detail": "none such"}, "user", "404: none such"),
    ],
)
def test_bad_status_is_a_typed_error_with_the_servers_text(
    faulty: FaultyServer, http: HttpClient, status: int, body: Any, category: str, words: str
) -> None:
    faulty.script("things/1", Answer(status, body, headers={"X-Note": "n"}))
    with pytest.raises(tinkex.APIStatusError, match=words) as caught:
        http.post("things/1?token=hush", max_retries=0).result(10)
    error = caught.value
    assert error.status_code == error.response.status_code == status
    assert str(error.category) == category
    assert error.body == (body if isinstance(body, dict) else body.decode())
    assert (error.request.method, error.request.url) == (
        "POST",
        f"{faulty.base_url}/api/v1/things/1?token=[REDACTED]",
    )
    assert error.response.headers["x-note"] == "n"
    assert error.response.elapsed > 0


@pytest.mark.covers("C20", "D19")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["get", "post"])
def test_redirect_may_be_the_answer(
    faulty: FaultyServer, http: HttpClient, status: int, method: str
) -> None:
    headers = {
        "Location": "https://elsewhere.example/x?sig=abc",
        "Expires": "Fri, 02 Jan 2026 00:00:00 GMT",
    }
    faulty.script("archive", Answer(status, headers=headers))
    heard: list[dict[str, Any]] = []
    events.attach("redirects", [events.HTTP_STOP], lambda _, __, facts: heard.append(dict(facts)))
    try:
        answer = getattr(http, method)("archive", follow_redirects=False).result(10)
    finally:
        events.detach("redirects")
    assert answer == {"url": headers["Location"], "status": status, "expires": headers["Expires"]}
    assert [facts["result"] for facts in heard] == ["ok"]
    assert len(faulty.seen) == 1


@pytest.mark.covers("C20", "24.code.4")
@pytest.mark.parametrize("follow", [True, False])
def test_redirect_without_an_address_is_an_error(
    faulty: FaultyServer, http: HttpClient, follow: bool
) -> None:
    faulty.script("archive", Answer(302))
    with pytest.raises(tinkex.APIStatusError, match="302") as caught:
        http.get("archive", follow_redirects=follow).result(10)
    assert caught.value.status_code == 302


@pytest.mark.covers("W04")
def test_redirect_is_followed_without_the_key(faulty: FaultyServer, http: HttpClient) -> None:
    with faulty_server() as elsewhere:
        elsewhere.script("/there", Answer(body={"found": True}))
        faulty.script("archive", Answer(302, headers={"Location": f"{elsewhere.base_url}/there"}))
        raw = http.with_raw_response.get(
            "archive", headers={"user-agent": "mine", "X-Own": "1"}
        ).result(10)
        assert raw.data == {"found": True}
        assert raw.url == f"{elsewhere.base_url}/there"
        [there] = elsewhere.seen
    assert there.headers["user-agent"] == "mine"
    assert not {"x-api-key", "x-own"} & there.headers.keys()


# ── answers with everything about them ────────────────────────────────────────────────────────────


@pytest.mark.covers("C23", "24.http.12")
@pytest.mark.parametrize("how", ["option", "property"])
def test_wrapped_answer(
    faulty: FaultyServer, http: HttpClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.05)
    faulty.script(
        "things", Answer(503), Answer(201, {"status": "ok"}, headers={"X-Request-ID": "r1"})
    )
    options: Any = {"response": "wrapped"} if how == "option" else {}
    client = http if how == "option" else http.with_raw_response
    answer: APIResponse = client.post("things", {}, params={"a": 1}, **options).result(10)
    assert (answer.status, answer.status_code, answer.method) == (201, 201, "POST")
    assert answer.url == f"{faulty.base_url}/api/v1/things?a=1"
    assert (answer.data, answer.body) == ({"status": "ok"}, b'{"status": "ok"}')
    assert answer.headers["x-request-id"] == answer.header("X-REQUEST-id") == "r1"
    assert answer.header("nowhere") is None
    assert answer.retries == 1
    assert 0.05 < answer.elapsed < 5
    assert http.get("things").result(10) == {"status": "ok"}  # the client itself goes on as before


@pytest.mark.covers("C23")
def test_wrapped_answer_is_parsed(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("healthz", Answer(body={"status": "ok"}))
    answer = http.get("healthz", response="wrapped").result(10)
    assert answer.parse() == {"status": "ok"}
    assert answer.parse(types.HealthResponse) == types.HealthResponse(status="ok")
    assert answer.parse(lambda data: data["status"].upper()) == "OK"
    for parser in (types.Checkpoint, lambda data: data["nowhere"]):
        with pytest.raises(
            tinkex.APIResponseValidationError, match="not what was asked for"
        ) as caught:
            answer.parse(parser)
        assert "GET" in caught.value.message
    with pytest.raises(TypeError, match="a parser is a record type or a function, got str"):
        answer.parse("json")


@pytest.mark.covers("C23")
def test_failures_are_not_wrapped(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("things", Answer(404, {"detail": "none"}))
    with pytest.raises(tinkex.NotFoundError):
        http.with_raw_response.get("things").result(10)


@pytest.mark.covers("C23")
def test_rest_client_gives_wrapped_answers_too(faulty: FaultyServer) -> None:
    run = {"training_run_id": "r", "base_model": "b", "model_owner": "o", "is_lora": True}
    run |= {"last_request_time": "2026-01-01T00:00:00Z"}
    faulty.script("training_runs/r:1", Answer(body=run, headers={"X-Request-ID": "7"}))
    faulty.script("training_runs/r/checkpoints/weights/c", Answer(204))
    with RestClient(base_url=faulty.base_url) as rest:
        answer: Any = rest.with_raw_response.get_training_run("r:1", None).result(10)
        assert (
            answer.data.training_run_id
            == rest.get_training_run("r:1", None).result(10).training_run_id
            == "r"
        )
        assert (answer.status, answer.header("x-request-id"), answer.retries) == (200, "7", 0)
        assert answer.url == f"{faulty.base_url}/api/v1/training_runs/r:1"
        gone: Any = rest.with_raw_response.delete_checkpoint("r", "weights/c").result(10)
        assert (gone.status, gone.data, gone.method) == (204, None, "DELETE")


# ── lifetimes ─────────────────────────────────────────────────────────────────────────────────────


def none_is_open(faulty: FaultyServer, before: int = 0) -> bool:
    for _ in range(2000):
        gc.collect()
        if faulty.open_connections <= before:
            return True
        time.sleep(0.01)
    return False


def test_dropped_client_lets_its_connections_go() -> None:
    with faulty_server() as faulty:
        faulty.script("things", Answer(body=1))
        raw = HttpClient(base_url=faulty.base_url).with_raw_response
        gc.collect()
        assert raw.get("things").result(10).data == 1  # the view keeps the client
        assert faulty.open_connections == 1
        del raw
        assert none_is_open(faulty)


def test_closed_client_is_a_clear_error(faulty: FaultyServer) -> None:
    client = HttpClient(base_url=faulty.base_url)
    client.close().result(5)
    with pytest.raises(tinkex.TinkerError, match="closed"):
        client.get("things").result(5)


async def test_client_in_an_event_loop(faulty: FaultyServer) -> None:
    faulty.script("things", Answer(body=1))
    async with HttpClient(base_url=faulty.base_url) as client:
        assert await client.get("things") == 1


def test_embedded_server_is_asked_the_same_way(tmp_path: Path) -> None:
    with (
        LocalBackend(data_dir=tmp_path, engine=FakeEngine()) as backend,
        HttpClient(base_url=backend.base_url) as http,
    ):
        assert http.get("healthz").result(10) == {"status": "ok"}
        with pytest.raises(tinkex.NotFoundError) as caught:
            http.get("nowhere", params={"a": 1}).result(10)
        assert caught.value.request.url.endswith("/api/v1/nowhere?a=1")


# ── streams of events ─────────────────────────────────────────────────────────────────────────────

SSE = "text/event-stream"
EVENTS = (
    b'data: {"a": 1}\n\ndata: plain\n\n: nothing\n\ndata:\n\ndata: null\n\nevent: x\rdata: '
    b"two\rdata: lines\r\r"
)


@pytest.mark.covers("C24", "24.code.19")
@pytest.mark.parametrize("pieces", [1, 7, len(EVENTS)])
def test_events_are_read_however_they_are_cut(
    faulty: FaultyServer, http: HttpClient, pieces: int
) -> None:
    faulty.script("events", Answer(body=EVENTS, content_type=SSE, pieces=pieces))
    assert list(http.stream_get("events")) == [{"a": 1}, "plain", "two\nlines"]
    seen = last(faulty)
    assert (seen.method, seen.headers["accept"]) == ("GET", SSE)


@pytest.mark.covers("C24")
@pytest.mark.parametrize(
    ("parser", "found"),
    [
        ("raw", ['{"a": 1}', "plain", "null", "two\nlines"]),
        (lambda event: event.event, ["x"]),
        (lambda event: event.data.upper(), ['{"A": 1}', "PLAIN", "NULL", "TWO\nLINES"]),
    ],
    ids=["raw", "names", "upper"],
)
def test_events_are_decoded(
    faulty: FaultyServer, http: HttpClient, parser: Any, found: list[Any]
) -> None:
    faulty.script("events", Answer(body=EVENTS, content_type=SSE))
    assert list(http.stream_get("events", event_parser=parser)) == found


def test_unknown_parser_is_refused(faulty: FaultyServer, http: HttpClient) -> None:
    bad: Any = "xml"
    with pytest.raises(ValueError, match="event_parser must be"):
        http.stream_get("events", event_parser=bad)
    assert faulty.seen == []


def test_parser_errors_pass_through(faulty: FaultyServer, http: HttpClient) -> None:
    def fail(event: object) -> None:
        raise ConnectionError("the reader's own")

    faulty.script("events", Answer(body=EVENTS, content_type=SSE))
    with pytest.raises(ConnectionError, match="the reader's own") as caught:
        list(http.stream_get("events", event_parser=fail))
    assert not isinstance(caught.value, tinkex.TinkerError)


def test_stream_has_a_head_and_takes_options(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("events?a=1", Answer(body=EVENTS, content_type=SSE, headers={"X-One": "1"}))
    stream = http.stream_get("events", params={"a": 1}, headers={"X-Own": "2"}, timeout=Timeout(7))
    head = stream.head.result(5)
    assert (head.status, head.headers["x-one"], head.method) == (200, "1", "GET")
    assert head.url == f"{faulty.base_url}/api/v1/events?a=1"
    assert len(list(stream)) == 3
    sent = last(faulty).headers
    assert (sent["x-own"], sent["x-stainless-read-timeout"], sent["x-api-key"]) == ("2", "7", KEY)


def test_events_that_are_packed_are_unpacked(faulty: FaultyServer, http: HttpClient) -> None:
    packed = gzip.compress(EVENTS)
    faulty.script(
        "events",
        Answer(body=packed, content_type=SSE, headers={"Content-Encoding": "gzip"}, pieces=3),
    )
    assert list(http.stream_get("events")) == [{"a": 1}, "plain", "two\nlines"]


@pytest.mark.covers("D08")
@pytest.mark.parametrize("status", [302, 400, 401, 404, 429, 500, 503])
def test_stream_with_a_bad_status_is_an_error(
    faulty: FaultyServer, http: HttpClient, status: int
) -> None:
    faulty.script("events", Answer(status, {"detail": f"no stream for {KEY}"}))
    stream = http.stream_get("events")
    with pytest.raises(
        tinkex.APIStatusError, match=f"GET events at .*{status}: no stream for"
    ) as caught:
        list(stream)
    assert caught.value.status_code == status
    assert caught.value.request.url == f"{faulty.base_url}/api/v1/events"
    assert KEY not in str(caught.value)
    assert KEY not in repr(vars(caught.value))
    with pytest.raises(tinkex.APIStatusError):
        stream.head.result(5)
    assert len(faulty.seen) == 1  # asked for once


def test_error_that_never_ends_is_not_read_to_its_end(
    http: HttpClient, faulty: FaultyServer
) -> None:
    faulty.script(
        "events", Answer(500, b"x" * 4_000_000, content_type="text/plain", pieces=40, pause=2)
    )
    began = time.monotonic()
    with pytest.raises(tinkex.InternalServerError):
        list(http.stream_get("events"))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Answer(drop=True), tinkex.APIConnectionError),
        (Answer(body=EVENTS, content_type=SSE, cut=20), tinkex.APIConnectionError),
        (Answer(body=EVENTS, content_type=SSE, pieces=2, pause=60), tinkex.APITimeoutError),
    ],
    ids=["dropped", "cut", "silent"],
)
def test_stream_that_breaks_is_an_error(
    faulty: FaultyServer, http: HttpClient, fault: Answer, kind: type[Exception]
) -> None:
    faulty.script("events", fault)
    with pytest.raises(kind, match="GET events"):
        list(http.stream_get("events", timeout=0.3))


@pytest.mark.covers("24.code.20")
def test_error_events_reach_the_reader(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script(
        "events", Answer(body=b'event: error\ndata: {"error": "no"}\n\n', content_type=SSE)
    )
    told = list(http.stream_get("events", event_parser=lambda event: (event.event, event.json())))
    assert told == [("error", {"error": "no"})]


@pytest.mark.parametrize(
    "leave",
    [EventStream.close, lambda stream: stream.__exit__(None, None, None)],
    ids=["close", "with"],
)
def test_leaving_a_stream_hangs_up(leave: Callable[[EventStream], None]) -> None:
    with faulty_server() as faulty, HttpClient(base_url=faulty.base_url) as http:
        faulty.script(
            "events", Answer(body=b"data: 1\n\n" * 600, content_type=SSE, pieces=600, pause=0.05)
        )
        heard: list[Any] = []
        events.attach(
            "streams",
            events.HTTP_EVENTS,
            lambda name, _, facts: heard.append((name, facts.get("result"))),
        )
        stream = http.stream_get("events")
        assert next(iter(stream)) == 1
        assert faulty.open_connections == 1
        leave(stream)
        assert none_is_open(faulty)
        events.detach("streams")
        assert heard == [(events.HTTP_START, None), (events.HTTP_STOP, "cancelled")]


def test_stream_closed_before_its_head_has_no_head(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("events", Answer(body=EVENTS, content_type=SSE, delay=60))
    stream = http.stream_get("events")
    wait_until(lambda: faulty.seen)
    stream.close()
    assert list(stream) == []
    wait_until(stream.head.cancelled)


async def test_stream_in_an_event_loop(faulty: FaultyServer, http: HttpClient) -> None:
    faulty.script("events", Answer(body=EVENTS, content_type=SSE, pieces=5, pause=0.01))
    async with http.stream_get("events") as stream:
        assert [event async for event in stream] == [{"a": 1}, "plain", "two\nlines"]
