"""Messages of telemetry: what a client reports about itself."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.types.record import Record, from_builtins, settle

EventType: TypeAlias = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(Record, frozen=True, kw_only=True):
    """A session began."""

    event_id: str
    event_session_index: int
    timestamp: dt.datetime
    severity: Severity = "INFO"
    event: EventType = "SESSION_START"


class SessionEndEvent(Record, frozen=True, kw_only=True):
    """A session ended; its duration is an ISO 8601 text."""

    event_id: str
    event_session_index: int
    timestamp: dt.datetime
    duration: str | None = None
    severity: Severity = "INFO"
    event: EventType = "SESSION_END"


class UnhandledExceptionEvent(Record, frozen=True, kw_only=True):
    """An exception that nobody caught."""

    event_id: str
    event_session_index: int
    timestamp: dt.datetime
    error_type: str
    error_message: str
    traceback: str | None = None
    severity: Severity = "ERROR"
    event: EventType = "UNHANDLED_EXCEPTION"


class GenericEvent(Record, frozen=True, kw_only=True):
    """Anything else, under a name of its own."""

    event_id: str
    event_session_index: int
    timestamp: dt.datetime
    event_name: str
    event_data: dict[str, Any] = msgspec.field(default_factory=dict)
    severity: Severity = "INFO"
    event: EventType = "GENERIC_EVENT"


TelemetryEvent: TypeAlias = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
EVENTS: dict[str, type[TelemetryEvent]] = {
    "SESSION_START": SessionStartEvent,
    "SESSION_END": SessionEndEvent,
    "UNHANDLED_EXCEPTION": UnhandledExceptionEvent,
    "GENERIC_EVENT": GenericEvent,
}

if TYPE_CHECKING:
    Events: TypeAlias = list[TelemetryEvent]
else:
    # msgspec tells members of a union apart only by tags, which cannot be fields as well: they are read by hand.
    Events = list[Any]


def parse_event(value: Any) -> TelemetryEvent | None:
    """An event from its JSON form; None when its type is not known here."""
    if isinstance(value, SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent):
        return value
    kind = EVENTS.get(str(value.get("event"))) if isinstance(value, dict) else None
    return None if kind is None else from_builtins(kind, value)


class TelemetryBatch(Record, frozen=True, kw_only=True):
    """Events of one session; those of unknown types are dropped when a batch is read."""

    events: Events
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str

    def __post_init__(self) -> None:
        settle(self, "events", [event for item in self.events if (event := parse_event(item)) is not None])

    @property
    def size(self) -> int:
        """How many events there are."""
        return len(self.events)
