"""Messages of telemetry: what a client reports about itself."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import msgspec

from tinkex.types.record import Record, from_builtins, literal_values, settle, to_builtins

EventType: TypeAlias = Literal[
    "SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"
]
"""The kinds of reported events."""
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
"""Severity of an event."""


def as_severity(value: object) -> Severity:
    """A severity written in any case; INFO for what is none.

    Example:
        >>> as_severity("warning"), as_severity("loud")
        ('WARNING', 'INFO')
    """
    wanted = str(value).strip().upper()
    found: Severity = next((known for known in literal_values(Severity) if known == wanted), "INFO")
    return found


class _Event(Record, frozen=True, kw_only=True):
    event_id: str
    event_session_index: int
    timestamp: dt.datetime


class SessionStartEvent(_Event, frozen=True, kw_only=True):
    """A session began.

    Example:
        >>> now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> SessionStartEvent(event_id="e-1", event_session_index=0, timestamp=now).event
        'SESSION_START'
    """

    severity: Severity = "INFO"
    event: EventType = "SESSION_START"


class SessionEndEvent(_Event, frozen=True, kw_only=True):
    """A session ended; its duration is a text like `0:00:03.220668`.

    Example:
        >>> now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> SessionEndEvent(
        ...     event_id="e-9", event_session_index=8, timestamp=now, duration="0:01:30"
        ... ).duration
        '0:01:30'
    """

    duration: str | None = None
    severity: Severity = "INFO"
    event: EventType = "SESSION_END"


class UnhandledExceptionEvent(_Event, frozen=True, kw_only=True):
    """An exception that nobody caught.

    Example:
        >>> told = {"event_id": "e-2", "event_session_index": 1}
        >>> told["timestamp"] = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> UnhandledExceptionEvent(error_type="KeyError", error_message="'loss'", **told).severity
        'ERROR'
    """

    error_type: str
    error_message: str
    traceback: str | None = None
    severity: Severity = "ERROR"
    event: EventType = "UNHANDLED_EXCEPTION"


class GenericEvent(_Event, frozen=True, kw_only=True):
    """Anything else, under a name of its own.

    Example:
        >>> GenericEvent(
        ...     event_id="e-2",
        ...     event_session_index=1,
        ...     timestamp=dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        ...     event_name="epoch_end",
        ...     event_data={"loss": 0.31},
        ... ).event_data
        {'loss': 0.31}
    """

    event_name: str
    event_data: dict[str, Any] = msgspec.field(default_factory=dict)
    severity: Severity = "INFO"
    event: EventType = "GENERIC_EVENT"


TelemetryEvent: TypeAlias = (
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
)
"""An event that is reported."""
EVENTS: dict[str, type[TelemetryEvent]] = {
    "SESSION_START": SessionStartEvent,
    "SESSION_END": SessionEndEvent,
    "UNHANDLED_EXCEPTION": UnhandledExceptionEvent,
    "GENERIC_EVENT": GenericEvent,
}

if TYPE_CHECKING:
    Events: TypeAlias = list[TelemetryEvent]
else:
    # msgspec tells members of a union apart only by tags, which cannot be fields as well: they are
    # read by hand.
    Events = list[Any]


def parse_event(value: Any) -> TelemetryEvent | None:
    """An event from its JSON form; None when its type is not known here.

    Example:
        >>> told = {
        ...     "event_id": "e-1",
        ...     "event_session_index": 0,
        ...     "timestamp": "2026-01-02T00:00:00Z",
        ... }
        >>> (
        ...     type(parse_event({"event": "SESSION_START", **told})).__name__,
        ...     parse_event({"event": "NEWS", **told}),
        ... )
        ('SessionStartEvent', None)
    """
    if isinstance(value, _Event):
        return cast("TelemetryEvent", value)
    kind = EVENTS.get(str(value.get("event"))) if isinstance(value, dict) else None
    return None if kind is None else from_builtins(kind, value)


class TelemetrySendRequest(Record, frozen=True, kw_only=True):
    """A batch of client events.

    Example:
        >>> len(
        ...     TelemetrySendRequest(
        ...         events=[{"event": "SESSION_START"}], session_id="session-1"
        ...     ).events
        ... )
        1
    """

    events: list[dict[str, Any]]
    platform: str = ""
    sdk_version: str = ""
    session_id: str = ""
    process_uuid: str = ""


class TelemetryResponse(Record, frozen=True, kw_only=True):
    """Events were taken.

    Example:
        >>> TelemetryResponse(status="accepted").status
        'accepted'
    """

    status: Literal["accepted"]


class TelemetryBatch(Record, frozen=True, kw_only=True):
    """Events of one session; those of unknown types are dropped when a batch is read.

    Example:
        >>> now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> start = SessionStartEvent(event_id="e-1", event_session_index=0, timestamp=now)
        >>> fields = ("platform", "sdk_version", "session_id", "process_uuid")
        >>> TelemetryBatch.from_list([start], **dict.fromkeys(fields, "any")).size
        1
    """

    events: Events
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str

    def __post_init__(self) -> None:
        known = [event for item in self.events if (event := parse_event(item)) is not None]
        settle(self, "events", known)

    @classmethod
    def from_list(cls, events: Iterable[Any], **metadata: str) -> TelemetryBatch:
        """A batch from events or their JSON forms, and the fields that they share.

        Args:
            events: The events.
            metadata: What they share.

        Returns:
            The batch.

        Example:
            >>> client = {"platform": "Linux", "sdk_version": "0.38.0", "process_uuid": "p"}
            >>> TelemetryBatch.from_list([], session_id="session-1", **client).metadata[
            ...     "session_id"
            ... ]
            'session-1'
        """
        return cls(events=list(events), **metadata)

    def to_list(self) -> list[dict[str, Any]]:
        """The JSON forms of the events.

        Example:
            >>> now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
            >>> start = SessionStartEvent(event_id="e-1", event_session_index=0, timestamp=now)
            >>> fields = ("platform", "sdk_version", "session_id", "process_uuid")
            >>> batch = TelemetryBatch.from_list([start], **dict.fromkeys(fields, "any"))
            >>> batch.to_list()[0]["timestamp"]
            '2026-01-02T00:00:00Z'
        """
        return [to_builtins(event) for event in self.events]

    @property
    def size(self) -> int:
        """Number of events."""
        return len(self.events)

    @property
    def metadata(self) -> dict[str, str]:
        """Fields that the events share."""
        return self.model_dump(exclude={"events"})

    def to_request(self) -> TelemetrySendRequest:
        """The request that sends this batch.

        Example:
            >>> client = {"platform": "Linux", "sdk_version": "0.38.0", "process_uuid": "p"}
            >>> TelemetryBatch.from_list(
            ...     [], session_id="session-1", **client
            ... ).to_request().session_id
            'session-1'
        """
        return TelemetrySendRequest(events=self.to_list(), **self.metadata)
