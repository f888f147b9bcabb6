"""Log lines and traces of requests: JSON, and spans in the traces of the callers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, Tracer

from support import Keyed, Wire, serving, step_json
from tinkex.cli.main import cli
from tinkex.engine.fake import FakeEngine
from tinkex.server.server_metrics import JsonFormatter, access
from tinkex.server.tracing import Tracing, is_wanted

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
Serve = Callable[..., Wire]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a server over the fake engine."""
    with ExitStack() as stack:
        yield lambda engine=None, **options: Wire(
            stack.enter_context(serving(engine or FakeEngine(), tmp_path, **options))
        )


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def listening(caplog: pytest.LogCaptureFixture, level: int) -> Iterator[list[dict[str, Any]]]:
    """The lines of the access log, as they would be written."""
    lines: list[dict[str, Any]] = []
    with caplog.at_level(level, access.name):
        yield lines
    found = [record for record in caplog.records if record.name == access.name]
    lines += [json.loads(JsonFormatter().format(record)) for record in found]
    caplog.clear()


def test_log_line_names_operation_owner_time_and_future(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Keyed(serve(api_key="tml-hidden").url, "tml-hidden")
    model = wire.model()
    with listening(caplog, logging.DEBUG) as lines:
        asked = wire.post("optim_step", step_json(model, 1))["request_id"]
        wire.result(asked)
    stepped, polled = lines
    assert set(stepped) == {
        "time", "level", "logger", "message", "operation", "method", "status", "ms", "owner",
        "request_id",
    }  # fmt: skip
    assert (stepped["operation"], stepped["status"], stepped["owner"]) == (
        "optim_step",
        200,
        "local",
    )
    assert (stepped["level"], stepped["message"], stepped["request_id"]) == (
        "info",
        "optim_step 200",
        asked,
    )
    assert 0 < stepped["ms"] < 20_000
    assert (polled["operation"], polled["level"], polled["request_id"]) == (
        "retrieve_future",
        "debug",
        asked,
    )
    assert "tml-hidden" not in json.dumps(lines)


def test_polls_are_logged_at_info_only_if_they_fail(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    wire = serve()
    model = wire.model()
    with listening(caplog, logging.INFO) as lines:
        wire.run("optim_step", step_json(model, 1))
        wire.send("retrieve_future", {"request_id": "nothing"})
    assert [(line["operation"], line["status"]) for line in lines] == [
        ("optim_step", 200),
        ("retrieve_future", 404),
    ]


def test_log_lines_hold_no_secrets(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    wire = serve()
    with listening(caplog, logging.INFO) as lines:
        wire.send("retrieve_future", {"request_id": "tml-of-somebody-else"})
    assert lines[0]["status"] == 404
    assert "somebody" not in json.dumps(lines)
    try:
        raise ValueError("Authorization: Bearer abcdefgh12345")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 1, "key %s", ("tml-0123456789",), sys.exc_info()
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert said["message"].startswith("key ")
    assert "ValueError" in said["error"]
    assert "0123456789" not in line
    assert "abcdefgh12345" not in line


# ── spans ─────────────────────────────────────────────────────────────────────────────────────────


class Span(NonRecordingSpan):
    """A span that remembers what it was told."""

    def __init__(self, name: str, kind: SpanKind, attributes: dict[str, Any], number: int) -> None:
        parent = trace.get_current_span().get_span_context()
        super().__init__(
            SpanContext(parent.trace_id or 1, number, is_remote=False, trace_flags=TraceFlags(1))
        )
        self.name, self.kind, self.parent = name, kind, parent
        self.attributes = dict(attributes)
        self.status: Any = None
        self.ended = 0

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.ended += 1


class Recording(Tracer):
    """The API of OpenTelemetry has no tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, *args: Any, **options: Any) -> Span:
        span = Span(name, options["kind"], options["attributes"], len(self.spans) + 1)
        self.spans.append(span)
        return span

    def start_as_current_span(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def test_request_has_a_span_in_the_trace_that_it_came_with(serve: Serve) -> None:
    recording = Recording()
    wire = serve(tracing=Tracing(recording), api_key="tml-hidden")
    headers = {
        "X-API-Key": "tml-hidden",
        "Traceparent": f"00-{TRACE}-{PARENT}-01",
        "Baggage": "user=alice",
    }
    assert wire.send("healthz", method="GET", headers=headers).status == 200
    span = recording.spans[0]
    assert (span.name, span.kind, span.ended) == ("GET /api/v1/healthz", SpanKind.SERVER, 1)
    assert f"{span.parent.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes == {
        "http.request.method": "GET",
        "http.route": "/api/v1/healthz",
        "http.response.status_code": 200,
        "tinkex.operation": "healthz",
        "tinkex.owner": "local",
    }
    assert span.status is None


def test_request_without_a_trace_begins_its_own(serve: Serve) -> None:
    recording = Recording()
    wire = serve(tracing=Tracing(recording))
    model = wire.model()
    asked = wire.post("optim_step", step_json(model, 1))["request_id"]
    span = recording.spans[-1]
    assert span.attributes["tinkex.request_id"] == asked
    assert {each.parent.is_valid for each in recording.spans} == {False}
    assert [each.ended for each in recording.spans] == [1] * len(recording.spans)


def test_span_is_current_while_the_request_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, seen = Recording(), []
    models = FakeEngine.models

    def look(self: FakeEngine) -> Sequence[Any]:
        seen.append(trace.get_current_span())
        return models(self)

    monkeypatch.setattr(FakeEngine, "models", look)
    wire = serve(tracing=Tracing(recording))
    seen.clear()
    wire.get("get_server_capabilities")
    assert seen == recording.spans
    assert not trace.get_current_span().get_span_context().is_valid


def test_refusal_is_a_user_error_and_failure_a_server_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording()
    wire = serve(tracing=Tracing(recording), api_key="tml-hidden")
    assert wire.send("get_server_capabilities", method="GET").status == 401
    refused = recording.spans[-1]
    assert refused.attributes["http.response.status_code"] == 401
    assert "tinkex.owner" not in refused.attributes
    assert refused.status is None

    def fail(self: FakeEngine) -> Sequence[Any]:
        raise RuntimeError("broken")

    monkeypatch.setattr(FakeEngine, "models", fail)
    assert Keyed(wire.url, "tml-hidden").send("get_server_capabilities", method="GET").status == 500
    assert recording.spans[-1].status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"PATH": "/bin"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_SERVICE_NAME": "tinkex", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_SERVICE_NAME": "tinkex", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_environment_enables_spans(variables: dict[str, str], wanted: bool) -> None:
    assert is_wanted(variables) is wanted


def test_spans_without_the_package_give_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    asked = CliRunner().invoke(cli, ["serve", "--otel", "--data-dir", str(tmp_path)])
    assert asked.exit_code == 2
    assert 'pip install "tinkex[otel]"' in asked.output


def test_opentelemetry_is_not_imported_by_default() -> None:
    code = (
        "import sys, tinkex.server.app, tinkex.cli.serve as s; s._tracing(None); "
        "print('opentelemetry' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "False"
