"""OpenTelemetry on the server: a span for each request.

Spans join the trace that the headers of a request name.

The destination of spans is configured outside, as for any program: `opentelemetry-instrument tinkex
serve` does it from the OTEL_ variables. Unless spans are wanted, OpenTelemetry is not imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tinkex import otel
from tinkex.errors import ConfigurationError
from tinkex.wire.redaction import Scrubber


def is_wanted(variables: Mapping[str, str]) -> bool:
    """Return whether the environment asks for spans and does not disable them."""
    named = {name: value.strip().lower() for name, value in variables.items()}
    return (
        any(name.startswith("OTEL_") for name in named)
        and named.get("OTEL_SDK_DISABLED") != "true"
        and named.get("OTEL_TRACES_EXPORTER") != "none"
    )


class Tracing:
    """Makes the spans.

    Args:
        tracer: An OpenTelemetry tracer; by default the global one of "tinkex.server".

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """

    def __init__(self, tracer: Any = None) -> None:
        if not otel.is_available():
            how = 'pip install "tinkex[otel]"'
            raise ConfigurationError("OpenTelemetry is not installed", hint=how)
        from opentelemetry import context, trace

        self._api, self._context = trace, context
        self._tracer = trace.get_tracer("tinkex.server") if tracer is None else tracer
        self._scrubber = Scrubber()

    @contextlib.contextmanager
    def request(
        self, method: str, route: str, operation: str, headers: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Make a span; the dictionary takes its owner, status and request_id."""
        attached = otel.extract(headers)
        told: dict[str, Any] = {}
        try:
            span = self._tracer.start_span(
                f"{method} {route}",
                kind=self._api.SpanKind.SERVER,
                attributes={
                    "http.request.method": method,
                    "http.route": route,
                    "tinkex.operation": operation,
                },
            )
            current = self._context.attach(self._api.set_span_in_context(span))
            try:
                yield told
            finally:
                self._context.detach(current)
                self._end(span, told)
        finally:
            otel.release(attached)

    def _end(self, span: Any, told: Mapping[str, Any]) -> None:
        status = told.get("status")
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        for name in ("owner", "request_id"):
            if told.get(name) is not None:
                span.set_attribute(f"tinkex.{name}", self._scrubber.text(str(told[name])))
        if status is None or status >= 500:  # no answer, or a fault of the server
            span.set_status(self._api.Status(self._api.StatusCode.ERROR))
        span.end()
