"""A mounted group of endpoints: it has the same middleware as the operations."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from starlette.responses import Response, StreamingResponse

from support import Heard, Keyed, serving
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.access.keys import create_key
from tinkex.server.calls import Call
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.http_errors import Refusal
from tinkex.server.middleware import CONTROL_BYTES
from tinkex.server.state import State
from tinkex.server.tracing import Tracing
from tinkex.types.record import Record
from tinkex.wire.protocol import BY_HANDLER, OPEN


class Question(Record, frozen=True, kw_only=True):
    session_id: str | None = None
    text: str = ""


class Reply(Record, frozen=True, kw_only=True):
    text: str
    owner: str


async def ask(state: State, call: Call) -> Reply:
    assert isinstance(call.request, Question)
    if call.request.text == "fail":
        raise RuntimeError("a secret")
    if call.request.text == "refuse":
        raise Refusal(409, f"not in {state.data_dir}", headers={"Retry-After": "1"})
    return Reply(text=call.request.text, owner=call.owner)


async def stream(state: State, call: Call) -> Response:
    loop, step = asyncio.get_running_loop(), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        for number in range(3):
            yield f"data: {number}\n\n".encode()
            await step.wait()

    STEPS.append(lambda: loop.call_soon_threadsafe(step.set))

    return StreamingResponse(events(), media_type="text/event-stream")


async def broken(state: State, call: Call) -> Response:
    async def events() -> AsyncIterator[str]:
        yield "data: 0\n\n"
        raise RuntimeError("a secret")

    return StreamingResponse(events(), headers={"Content-Type": "text/event-stream"})


async def echo(state: State, call: Call) -> Response:
    assert call.http is None
    return Response(call.request, media_type=call.content_type)


def told(refusal: Refusal) -> Response:
    return Response(f"refused: {refusal.detail}", refusal.status)


STEPS: list[Callable[[], object]] = []
GROUP = Group(
    "/group",
    [
        Endpoint("ask", "POST", "/ask", ask, Question, owned_by="session_id"),
        Endpoint("stream", "POST", "/stream/{name}", stream, owned_by=OPEN),
        Endpoint("broken", "POST", "/broken", broken, owned_by=OPEN),
    ],
)
OTHER = Group(
    "/other",
    [
        Endpoint("echo", "POST", "/echo", echo, bytes, owned_by=OPEN),
        Endpoint("broken", "POST", "/broken", broken, owned_by=OPEN),
    ],
    takes_bearer=True,
    refused=told,
)


class Traced(Tracing):
    """Remembers its spans, without OpenTelemetry."""

    spans: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self) -> None:
        self.spans.clear()

    @contextlib.contextmanager
    def request(
        self, method: str, route: str, operation: str, headers: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        told: dict[str, Any] = {}
        yield told
        self.spans.append((f"{method} {route} {operation}", told))


class Site:
    """A server with the groups, and two accounts."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self.url, self.keys = url, keys

    def send(
        self, path: str, body: Any = None, *, key: str | None = "ada", **headers: str
    ) -> Heard:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)
        given = {"X-API-Key": self.keys[key]} if key else {}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        with closing(connection):
            connection.request("GET" if data is None else "POST", path, data, given | headers)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Heard(response.status, named, response.read())

    def counted(self) -> set[str]:
        lines = self.send("/metrics").body.decode().splitlines()
        return {line for line in lines if line.startswith("tinkex_requests_total")}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(SqliteDatabase(tmp_path)) as database:
        keys = {name: create_key(database, name, name)[1] for name in ("ada", "bob")}
    with serving(FakeEngine(), tmp_path, groups=(GROUP, OTHER), tracing=Traced()) as url:
        yield Site(url, keys)


def test_mounted_endpoint_answers_with_its_account(site: Site) -> None:
    heard = site.send("/group/ask", {"text": "hello"})
    assert (heard.status, heard.json) == (200, {"text": "hello", "owner": "ada"})


def test_mounted_endpoint_needs_a_key(site: Site) -> None:
    heard = site.send("/group/ask", {"text": "hello"}, key=None)
    assert heard.status == 401
    assert "needs an API key" in heard.json["detail"]
    bearer = {"Authorization": f"Bearer {site.keys['ada']}"}
    assert site.send("/group/ask", {}, key=None, **bearer).status == 401
    assert site.send("/other/echo", b"x", key=None, **bearer).status == 200


def test_mounted_endpoint_hides_objects_of_other_accounts(site: Site) -> None:
    session = Keyed(site.url, site.keys["bob"]).session()
    heard = site.send("/group/ask", {"session_id": session})
    assert (heard.status, heard.json) == (404, {"detail": f"there is no session {session!r}"})
    assert site.send("/group/ask", {"session_id": session}, key="bob").status == 200


def test_mounted_endpoint_limits_bodies(site: Site) -> None:
    heard = site.send("/group/ask", b" " * (CONTROL_BYTES + 1))
    assert heard.status == 413
    assert "limit" in heard.json["detail"]
    assert site.send("/other/echo", bytes(CONTROL_BYTES)).body == bytes(CONTROL_BYTES)


def test_mounted_endpoint_refuses_a_malformed_body(site: Site) -> None:
    heard = site.send("/group/ask", {"text": 5})
    assert heard.status == 400
    assert heard.json["detail"].startswith("ask: ")


def test_failure_of_a_mounted_endpoint_is_an_error_in_json(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = site.send("/group/ask", {"text": "fail"})
    assert (heard.status, heard.json) == (500, {"detail": "internal error: RuntimeError"})
    assert "a secret" in caplog.text
    heard = site.send("/group/ask", {"text": "refuse"})
    assert (heard.status, heard.json) == (409, {"detail": "not in the data directory"})
    assert heard.headers["retry-after"] == "1"


def test_group_may_have_its_own_form_of_errors(site: Site) -> None:
    heard = site.send("/other/echo", b"x", key=None)
    assert (heard.status, heard.body[:17]) == (401, b"refused: this ser")


def test_mounted_endpoint_is_counted_logged_and_traced(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tinkex.server.access"):
        site.send("/group/ask", {"text": "hello"})
        site.send("/group/ask", {"text": "fail"})
    counted = site.counted()
    assert 'tinkex_requests_total{operation="ask",status="200"} 1' in counted
    assert 'tinkex_requests_total{operation="ask",status="500"} 1' in counted
    lines = [record for record in caplog.records if record.name == "tinkex.server.access"]
    assert [record.getMessage() for record in lines] == ["ask 200", "ask 500"]
    assert Traced.spans[:2] == [
        ("POST /group/ask ask", {"status": 200, "owner": "ada", "request_id": None}),
        ("POST /group/ask ask", {"status": 500, "owner": "ada", "request_id": None}),
    ]


def test_pages_outside_the_table_are_counted(site: Site) -> None:
    assert site.send("/", key=None).status == 200
    assert site.send("/metrics", key=None).status == 401
    counted = site.counted()
    assert 'tinkex_requests_total{operation="front",status="200"} 1' in counted
    assert 'tinkex_requests_total{operation="metrics",status="401"} 1' in counted


def test_mounted_endpoint_streams_its_answer(site: Site) -> None:
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=20)
    with closing(connection):
        connection.request("POST", "/group/stream/a", b"", {"X-API-Key": site.keys["ada"]})
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.read1() == b"data: 0\n\n"  # while the handler waits
        STEPS.pop()()
        assert response.read() == b"data: 1\n\ndata: 2\n\n"


def test_stream_that_fails_ends_with_an_error_event(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    heard = site.send("/group/broken", b"")
    assert heard.body == (
        b'data: 0\n\n\n\nevent: error\ndata: {"detail":"internal error: RuntimeError"}\n\n'
    )
    assert "a secret" in caplog.text
    heard = site.send("/other/broken", b"")
    assert heard.body == (
        b"data: 0\n\n\n\nevent: error\ndata: refused: internal error: RuntimeError\n\n"
    )


def test_endpoint_without_ownership_does_not_import() -> None:
    with pytest.raises(TypeError, match="owned_by"):
        Endpoint("ask", "POST", "/ask", ask, Question)  # type: ignore[call-arg]
    for owned_by in (OPEN, "model_id", "text"):
        with pytest.raises(ValueError, match="ask: owned_by"):
            Endpoint("ask", "POST", "/ask", ask, Question, owned_by=owned_by)
    Endpoint("ask", "POST", "/ask/{session_id}", ask, Question, owned_by=BY_HANDLER)
