"""Traces: headers out and in, and spans of requests; with a stand-in for OpenTelemetry, and with
the real one."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from faulty import Answer, faulty_server
from support import silence
from tinkex import AdamParams, ServiceClient, events, otel
from tinkex.client.futures.api_future import start
from tinkex.client.settings.config import Config, configure
from tinkex.errors import ConfigurationError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALL = {
    "method": "POST",
    "path": "/api/v1/asample",
    "pool_type": "sample",
    "base_url": "https://example.com/x",
}


@dataclasses.dataclass
class Settings:
    otel_propagate: bool | None = None


def settings(value: bool | None) -> Config:
    return typing.cast("Config", Settings(value))


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    silence()
    yield
    silence()


# ── a stand-in: the parts of the API that are used, and no more ───────────────────────────────────


@dataclasses.dataclass
class Span:
    name: str
    kind: str
    attributes: dict[str, Any]
    parent: Span | None = None
    status: tuple[str, str] | None = None
    ended: bool = False
    number: int = 0

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        self.attributes |= attributes

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def set_status(self, status: tuple[str, str]) -> None:
        self.status = status

    def end(self) -> None:
        assert not self.ended
        self.ended = True


class StandIn:
    """The current context is a dictionary in a context variable, as it is in OpenTelemetry."""

    def __init__(self) -> None:
        self.current: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("current")
        self.current.set({})
        self.spans: list[Span] = []

    def get_current(self) -> dict[str, Any]:
        return self.current.get({})

    def attach(self, context: dict[str, Any]) -> Any:
        return self.current.set(context)

    def detach(self, token: Any) -> None:
        self.current.reset(token)

    def inject(self, carrier: dict[str, str]) -> None:
        context = self.get_current()
        if "span" in context:
            carrier["traceparent"] = f"00-span-{context['span'].number}"
        elif "traceparent" in context:
            carrier["traceparent"] = context["traceparent"]
            carrier["tracestate"] = context.get("tracestate", "vendor=1")
        carrier["baggage"] = "user=alice"

    def extract(self, carrier: dict[str, str]) -> dict[str, Any]:
        assert set(carrier) <= {"traceparent", "tracestate"}
        return (
            {**self.get_current(), **carrier}
            if carrier["traceparent"].startswith("00-")
            else self.get_current()
        )

    def start_span(self, name: str, kind: str, attributes: dict[str, Any]) -> Span:
        span = Span(
            name, kind, dict(attributes), self.get_current().get("span"), number=len(self.spans) + 1
        )
        self.spans.append(span)
        return span

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = {
            name: types.ModuleType(name) for name in ("opentelemetry", "opentelemetry.propagate")
        }
        modules |= {
            name: types.ModuleType(name)
            for name in ("opentelemetry.context", "opentelemetry.trace")
        }
        parts: dict[str, dict[str, Any]] = {
            "opentelemetry.propagate": {"inject": self.inject, "extract": self.extract},
            "opentelemetry.context": {
                "get_current": self.get_current,
                "attach": self.attach,
                "detach": self.detach,
            },
            "opentelemetry.trace": {
                "get_tracer": lambda name: self,
                "SpanKind": types.SimpleNamespace(CLIENT="client"),
                "StatusCode": types.SimpleNamespace(ERROR="error"),
                "Status": lambda code, description="": (code, description),
                "set_span_in_context": lambda span: {**self.get_current(), "span": span},
            },
        }
        for name, module in modules.items():
            for attribute, value in parts.get(name, {}).items():
                setattr(module, attribute, value)
            monkeypatch.setitem(sys.modules, name, module)
            if "." in name:
                setattr(modules["opentelemetry"], name.partition(".")[2], module)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


# ── headers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.8/1", "1.9/4", "C16")
@pytest.mark.parametrize(
    ("said", "variable", "on"),
    [
        (True, None, True),
        (True, "0", True),
        (False, "1", False),
        (None, "1", True),
        (None, "yes", True),
        (None, "off", False),
        (None, "perhaps", False),
        (None, None, False),
    ],
)
def test_tracing_is_off_by_default(
    said: bool | None,
    variable: str | None,
    on: bool,
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("TINKEX_OTEL_PROPAGATE", variable)
    stand_in.attach({"traceparent": PARENT})
    assert otel.is_enabled(settings(said)) is on
    assert ("traceparent" in otel.inject({}, settings(said))) is on
    assert (otel.extract({"traceparent": PARENT + "x"}, settings(said)) is not None) is on


@pytest.mark.covers("1.8/2", "1.8/4", "C16")
def test_only_the_current_trace_is_added(stand_in: StandIn) -> None:
    headers = {"Accept": "*/*"}
    assert otel.inject(headers) == headers  # no span is active
    stand_in.attach({"traceparent": PARENT})
    assert otel.inject(headers) == {
        "Accept": "*/*",
        "traceparent": PARENT,
        "tracestate": "vendor=1",
    }
    assert headers == {"Accept": "*/*"}
    assert (otel.TRACEPARENT, otel.TRACESTATE) == ("traceparent", "tracestate")


@pytest.mark.covers("1.8/2", "C16")
def test_existing_headers_are_kept(stand_in: StandIn) -> None:
    stand_in.attach({"traceparent": PARENT})
    assert otel.inject({"TraceParent": "mine"}) == {"TraceParent": "mine"}
    assert otel.inject({"Tracestate": "mine"}) == {"Tracestate": "mine", "traceparent": PARENT}


@pytest.mark.covers("1.8/2", "C16")
def test_failure_leaves_the_headers_unchanged(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken propagator")

    for name in ("inject", "extract"):
        monkeypatch.setattr(sys.modules["opentelemetry.propagate"], name, fail)
    monkeypatch.setattr(sys.modules["opentelemetry.context"], "detach", fail)
    assert otel.inject({"a": "b"}) == {"a": "b"}
    assert otel.extract({"traceparent": PARENT}) is None
    otel.release(otel.Attached("token"))


@pytest.mark.covers("1.8/2", "1.8/4", "1.8/5", "C16")
@pytest.mark.usefixtures("missing")
def test_missing_opentelemetry_keeps_headers() -> None:
    assert otel.is_available() is False
    assert otel.inject({"a": "b"}) == {"a": "b"}
    assert otel.extract({"traceparent": PARENT}) is None
    otel.release(None)
    with pytest.raises(ConfigurationError, match="not installed") as caught:
        otel.trace()
    assert "tinkex[otel]" in str(caught.value)
    assert not events.is_heard()


@pytest.mark.covers("1.8/3", "1.8/4", "Q-10", "4.1/3")
def test_trace_is_read_from_headers_and_left_again(stand_in: StandIn) -> None:
    assert otel.is_available()
    assert otel.extract({}) is None
    assert otel.extract({"traceparent": "rubbish"}) is None
    attached = otel.extract({"TRACEPARENT": PARENT, "Tracestate": "a=1", "baggage": "x"})
    assert attached is not None
    assert stand_in.get_current() == {"traceparent": PARENT, "tracestate": "a=1"}
    assert otel.inject({})["traceparent"] == PARENT
    otel.release(attached)
    assert stand_in.get_current() == {}


# ── spans ─────────────────────────────────────────────────────────────────────────────────────────


async def request(
    path: str = "/api/v1/asample", end: Callable[[], Any] | None = None
) -> dict[str, str]:
    """Act as a transport: report the start, add headers, wait, report the end."""
    metadata = {**CALL, "path": path, "session_id": "s", "team": "x-api-key: tml-secret"}
    events.emit(events.HTTP_START, {"system_time": 1.0}, metadata)
    headers = otel.inject({})
    try:
        await asyncio.sleep(0.01)
        if end is not None:
            end()
    except RuntimeError as error:
        events.emit(
            events.HTTP_EXCEPTION, {"duration": 1}, {**metadata, "kind": "error", "reason": error}
        )
        raise
    events.emit(events.HTTP_STOP, {"duration": 1}, {**metadata, "result": "ok", "retry_count": 1})
    return headers


@pytest.mark.covers("1.8/6")
def test_request_is_a_span_that_its_headers_name(stand_in: StandIn) -> None:
    handler = otel.trace(handler_id="spans")
    assert handler == "spans"

    async def main() -> dict[str, str]:
        headers = await request()
        assert stand_in.get_current() == {}
        return headers

    assert asyncio.run(main()) == {"traceparent": "00-span-1"}
    (span,) = stand_in.spans
    assert (span.name, span.kind, span.ended, span.status) == (
        "POST /api/v1/asample",
        "client",
        True,
        None,
    )
    assert span.attributes == {
        "http.request.method": "POST",
        "url.path": "/api/v1/asample",
        "http.request.resend_count": 1,
        "server.address": "example.com",
        "tinkex.session_id": "s",
        "tinkex.pool_type": "sample",
        "tinkex.result": "ok",
    }
    assert events.detach(handler)
    asyncio.run(request())
    assert len(stand_in.spans) == 1


@pytest.mark.covers("1.8/6")
def test_failures_hold_no_secrets(stand_in: StandIn) -> None:
    otel.trace(tracer=stand_in)

    def fail() -> None:
        raise RuntimeError("refused: x-api-key: tml-secret")

    with pytest.raises(RuntimeError):
        asyncio.run(request(end=fail))
    events.emit(events.HTTP_START, {}, CALL)
    events.emit(events.HTTP_STOP, {}, {**CALL, "result": "error"})
    first, second = stand_in.spans
    assert first.status == ("error", "refused: x-api-key: [REDACTED]")
    assert first.attributes["error.type"] == "error"
    assert second.status == ("error", "")
    assert first.ended
    assert second.ended
    assert "tml-" not in str(stand_in.spans)


@pytest.mark.covers("1.8/6")
def test_requests_at_the_same_time_do_not_mix(stand_in: StandIn) -> None:
    otel.trace()

    async def main() -> list[dict[str, str]]:
        return await asyncio.gather(*(request(f"/{number}") for number in range(20)))

    headers = asyncio.run(main())
    assert [one["traceparent"] for one in headers] == [
        f"00-span-{span.number}" for span in stand_in.spans
    ]
    assert all(span.ended and span.parent is None for span in stand_in.spans)
    assert [span.attributes["url.path"] for span in stand_in.spans] == [
        f"/{number}" for number in range(20)
    ]


@pytest.mark.covers("1.8/6")
def test_span_is_a_child_of_the_callers_span(stand_in: StandIn) -> None:
    otel.trace()
    outer = stand_in.start_span("mine", "internal", {})
    token = stand_in.attach({"span": outer})
    # on the runtime's loop, in another thread
    assert start(request()).result(5) == {"traceparent": "00-span-2"}
    stand_in.detach(token)
    assert stand_in.spans[1].parent is outer


@pytest.mark.covers("1.8/6")
def test_request_within_a_request_is_its_child(stand_in: StandIn) -> None:
    otel.trace()
    for path in ("/outer", "/inner"):  # a token is fetched for a request, say
        events.emit(events.HTTP_START, {}, {**CALL, "path": path})
    for _ in range(2):
        events.emit(events.HTTP_STOP, {}, {**CALL, "result": "ok"})
    outer, inner = stand_in.spans
    assert inner.parent is outer
    assert outer.parent is None
    assert inner.ended
    assert outer.ended
    assert stand_in.get_current() == {}


def test_end_without_a_beginning_is_passed_over(stand_in: StandIn) -> None:
    otel.trace()
    events.emit(events.HTTP_STOP, {}, {**CALL, "result": "ok"})
    assert stand_in.spans == []
    assert events.is_heard()


@pytest.mark.covers("1.8/2", "1.8/6", "4.1/3")
def test_request_spans_are_children_of_the_callers_span(stand_in: StandIn) -> None:
    otel.trace()
    configure(otel_propagate=True)
    try:
        with faulty_server() as server, ServiceClient(base_url=server.base_url) as service:
            server.script(
                "retrieve_future",
                Answer(body={"model_id": "s:train:0"}),
                Answer(body={"metrics": {}}),
            )
            server.script("optim_step", Answer(body={"request_id": "r"}))
            client = service.create_lora_training_client("m").result()
            outer = stand_in.start_span("my step", "internal", {})
            token = stand_in.attach({"span": outer})
            future = client.optim_step(AdamParams(learning_rate=0.1))
            stand_in.detach(token)
            future.result(10)
            [seen] = server.requests("optim_step")
    finally:
        configure()
    [span] = [span for span in stand_in.spans if span.name == "POST /api/v1/optim_step"]
    assert seen.headers["traceparent"] == f"00-span-{span.number}"
    assert span.parent is outer
    assert span.ended
    expected = {
        "tinkex.session_id": "s",
        "tinkex.model_id": "s:train:0",
        "tinkex.seq_id": 1,
        "tinkex.result": "ok",
    }
    assert span.attributes.items() >= expected.items()


# ── the real thing ────────────────────────────────────────────────────────────────────────────────

real = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None, reason="needs opentelemetry-api"
)


@real
@pytest.mark.covers("1.8/2", "1.8/3", "Q-10")
def test_headers_with_opentelemetry_itself() -> None:
    from opentelemetry import baggage, context, trace

    assert otel.inject({"a": "b"}) == {"a": "b"}
    attached = otel.extract({"Traceparent": PARENT, "tracestate": "a=1"})
    assert attached is not None
    assert (
        format(trace.get_current_span().get_span_context().trace_id, "032x") == PARENT.split("-")[1]
    )
    token = context.attach(baggage.set_baggage("user", "alice"))
    assert otel.inject({"a": "b"}) == {"a": "b", "traceparent": PARENT, "tracestate": "a=1"}
    context.detach(token)
    otel.release(attached)
    assert otel.inject({}) == {}
    assert otel.extract({"traceparent": "rubbish"}) is None


@real
@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.sdk") is None, reason="needs opentelemetry-sdk"
)
@pytest.mark.covers("1.8/6")
def test_spans_with_opentelemetry_itself() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    otel.trace(tracer)

    def fail() -> None:
        raise RuntimeError("refused")

    with tracer.start_as_current_span("outer") as outer:
        headers = start(request()).result(5)
        with pytest.raises(RuntimeError):
            start(request(end=fail)).result(5)
    fine, failed, parent = exporter.get_finished_spans()
    assert headers["traceparent"].split("-")[2] == format(fine.context.span_id, "016x")
    assert fine.parent.span_id == failed.parent.span_id == parent.context.span_id
    assert fine.kind is trace.SpanKind.CLIENT
    assert fine.attributes["url.path"] == "/api/v1/asample"
    assert (failed.status.status_code, failed.status.description) == (
        trace.StatusCode.ERROR,
        "refused",
    )
    assert outer.get_span_context() == parent.context
