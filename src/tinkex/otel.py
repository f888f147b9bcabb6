"""OpenTelemetry, if it is used: trace headers on requests, contexts read from headers, and spans
of client calls.

Nothing of it is on by default. Headers are added when `Config.otel_propagate` (or
`TINKEX_OTEL_PROPAGATE`) says so; spans are made after `trace()`. Needs `pip install
"tinkex[otel]"`: without it, headers stay as they are and `trace()` says what is missing.

Example:
    >>> inject({"accept": "*/*"})  # no span is active
    {'accept': '*/*'}
"""

from __future__ import annotations

import contextvars
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tinkex import events
from tinkex.client.settings import environment
from tinkex.client.settings.config import Config
from tinkex.errors import ConfigurationError
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex")

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_numbers = itertools.count(1)


def is_available() -> bool:
    """Return True if the API of OpenTelemetry is installed.

    Example:
        >>> is_available()
        True
    """
    try:
        import opentelemetry.propagate  # noqa: F401
    except Exception:  # not there, or there and broken
        return False
    return True


def is_enabled(config: Config) -> bool:
    """Return True if requests carry their trace: by the configuration, else the environment.

    Example:
        >>> is_enabled(Config(base_url="http://127.0.0.1:8000", otel_propagate=True))
        True
    """
    said = getattr(config, "otel_propagate", None)
    if not isinstance(said, bool):
        said = environment.flag("TINKEX_OTEL_PROPAGATE")
    return said is True


def inject(headers: Mapping[str, str], config: Config | None = None) -> dict[str, str]:
    """Return headers with the trace of the current span; keep a trace that is there already.

    With a configuration, only if it enables this. Only `traceparent` and `tracestate` are added:
    other baggage of a program is not for the server. It never raises.

    Example:
        >>> attached = extract(
        ...     {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        ... )
        >>> inject({"accept": "*/*"})
        {'accept': '*/*', 'traceparent': '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'}
        >>> release(attached)
    """
    unchanged = dict(headers)
    taken = {name.lower() for name in headers}
    if TRACEPARENT in taken or (config is not None and not is_enabled(config)):
        return unchanged
    try:
        from opentelemetry import propagate

        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        found = {name.lower(): value for name, value in carrier.items() if isinstance(value, str)}
        added = {
            name: found[name]
            for name in (TRACEPARENT, TRACESTATE)
            if name in found and name not in taken
        }
        return unchanged | added if TRACEPARENT in added else unchanged
    except Exception:
        logger.debug("no trace headers were added", exc_info=True)
        return unchanged


@dataclass(frozen=True, slots=True)
class Attached:
    """A context that `extract` made current.

    Example:
        >>> attached = extract(
        ...     {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        ... )
        >>> isinstance(attached, Attached), release(attached)
        (True, None)
    """

    token: Any


def extract(headers: Mapping[str, str], config: Config | None = None) -> Attached | None:
    """Make the trace of headers current; `release` undoes it. None if there is none or it is off.

    Example:
        >>> attached = extract(
        ...     {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        ... )
        >>> inject({})["traceparent"].split("-")[1]
        '0af7651916cd43dd8448eb211c80319c'
        >>> release(attached)
    """
    if config is not None and not is_enabled(config):
        return None
    carrier = {name.lower(): value for name, value in headers.items()}
    if TRACEPARENT not in carrier:
        return None
    try:
        from opentelemetry import context, propagate

        before = context.get_current()
        found = propagate.extract(
            {name: carrier[name] for name in (TRACEPARENT, TRACESTATE) if name in carrier}
        )
        return None if found == before else Attached(context.attach(found))
    except Exception:
        logger.debug("no trace could be read from the headers", exc_info=True)
        return None


def release(attached: Attached | None) -> None:
    """Restore the context from before `extract`.

    Example:
        >>> release(extract({"accept": "*/*"}))  # there was no trace: nothing to do
    """
    if attached is None:
        return
    try:
        from opentelemetry import context

        context.detach(attached.token)
    except Exception:
        logger.debug("a trace context could not be left", exc_info=True)


# ── spans of client calls ─────────────────────────────────────────────────────────────────────────

_ATTRIBUTES = {
    "method": "http.request.method",
    "path": "url.path",
    "retry_count": "http.request.resend_count",
}
_IDS = (
    "session_id",
    "sampling_session_id",
    "model_id",
    "model_seq_id",
    "seq_id",
    "request_id",
    "pool_type",
    "result",
)


@dataclass(frozen=True, slots=True)
class _Open:
    """A span that this task began, and the context before it."""

    span: Any
    token: Any
    outer: _Open | None


_innermost: contextvars.ContextVar[_Open | None] = contextvars.ContextVar(
    "innermost span", default=None
)


def trace(tracer: Any = None, handler_id: str | None = None) -> str:
    """Make a span of every request from now on; the id is what `events.detach` takes to end that.

    A span is a child of the one that is current where the call was made, and is itself current
    while the request is made, so that `inject` names it.

    Args:
        tracer: An OpenTelemetry tracer; by default the global one of "tinkex".
        handler_id: The id on the bus; one is made up by default.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.

    Example:
        >>> handler = trace()
        >>> events.detach(handler)
        True
    """
    if not is_available():
        raise ConfigurationError(
            "OpenTelemetry is not installed", hint='pip install "tinkex[otel]"'
        )
    from opentelemetry import context, trace as api

    chosen = handler_id or f"tinkex-otel-{next(_numbers)}"
    maker = api.get_tracer("tinkex") if tracer is None else tracer
    scrubber = Scrubber()

    def begin(metadata: Mapping[str, Any]) -> None:
        span = maker.start_span(
            f"{metadata.get('method')} {metadata.get('path')}",
            kind=api.SpanKind.CLIENT,
            attributes=_attributes(metadata, scrubber),
        )
        token = context.attach(api.set_span_in_context(span))
        _innermost.set(_Open(span, token, _innermost.get()))

    def finish(name: str, metadata: Mapping[str, Any]) -> None:
        opened = _innermost.get()
        if opened is None:  # it began before anybody listened
            return
        _innermost.set(opened.outer)
        context.detach(opened.token)
        opened.span.set_attributes(_attributes(metadata, scrubber))
        if name == events.HTTP_EXCEPTION:
            reason = metadata.get("reason")
            opened.span.set_attribute(
                "error.type", str(metadata.get("kind") or type(reason).__qualname__)
            )
            opened.span.set_status(api.Status(api.StatusCode.ERROR, scrubber.text(str(reason))))
        elif metadata.get("result") != "ok":
            opened.span.set_status(api.Status(api.StatusCode.ERROR))
        opened.span.end()

    def hear(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        begin(metadata) if name == events.HTTP_START else finish(name, metadata)

    events.attach(chosen, events.HTTP_EVENTS, hear)
    return chosen


def _attributes(metadata: Mapping[str, Any], scrubber: Scrubber) -> dict[str, Any]:
    """Return the attributes of a span: known facts only, never a caller's metadata."""
    told = {
        _ATTRIBUTES.get(name, f"tinkex.{name}"): metadata.get(name)
        for name in (*_ATTRIBUTES, *_IDS)
    }
    told["server.address"] = urlsplit(str(metadata.get("base_url") or "")).hostname
    plain = scrubber.mapping({name: value for name, value in told.items() if value is not None})
    return {
        name: value for name, value in plain.items() if isinstance(value, str | int | float | bool)
    }
