"""The events of a reporter: the facts they hold, and the queue of those that wait to be sent."""

from __future__ import annotations

import datetime as dt
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

from tinkex.errors import TinkerError
from tinkex.types.telemetry import SessionEndEvent, TelemetryEvent
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber

MOST_QUEUE_CHARACTERS = 8 * 1024 * 1024
"""Limit on the texts of all waiting events together."""
MOST_BATCH_CHARACTERS = 1024 * 1024


class EventQueue:
    """A bounded queue of events, each numbered; safe to use from any thread.

    Args:
        limit: The most events that may wait.
    """

    def __init__(self, limit: int) -> None:
        # Guards everything here, and is notified when events have gone out. A finalizer that
        # reports something may run while this thread holds it: it can be taken twice.
        self.changed = threading.Condition(threading.RLock())
        self._limit = limit
        self._waiting: deque[tuple[TelemetryEvent, int]] = deque()
        self._characters = 0
        self._next_index = 0
        # events accepted, taken to be sent, sent or given up, and to be sent now
        self._pushed = self._taken = self._gone = self._wanted = 0

    @property
    def count(self) -> int:
        """The number of events that wait."""
        return len(self._waiting)

    @property
    def is_drained(self) -> bool:
        """True when every event was sent or given up."""
        return self._gone >= self._pushed

    @property
    def wants_more(self) -> bool:
        """True while events that are to be sent now wait."""
        return self._taken < self._wanted

    def has_gone(self, number: int) -> bool:
        """Return True when the first `number` events were sent or given up."""
        return self._gone >= number

    def add(self, kind: type[TelemetryEvent], size: int, **fields: Any) -> bool:
        """Number an event and queue it if there is room; a session's end always has room."""
        with self.changed:
            index, self._next_index = self._next_index, self._next_index + 1
            if kind is not SessionEndEvent and (
                self.count >= self._limit or self._characters + size > MOST_QUEUE_CHARACTERS
            ):
                return False
            event = kind(
                event_id=uuid.uuid4().hex,
                event_session_index=index,
                timestamp=dt.datetime.now(dt.UTC),
                **fields,
            )
            self._waiting.append((event, size))
            self._characters += size
            self._pushed += 1
            return True

    def want_all(self) -> int:
        """Mark all waiting events to be sent now; return how many have gone out by then."""
        with self.changed:
            self._wanted = self._pushed
            return self._wanted

    def take(self, limit: int) -> list[TelemetryEvent]:
        """Remove and return the next batch of events that are to be sent now."""
        batch: list[TelemetryEvent] = []
        with self.changed:
            room = MOST_BATCH_CHARACTERS
            while self.wants_more and len(batch) < limit:
                event, size = self._waiting[0]
                if batch and size > room:
                    break
                self._waiting.popleft()
                batch.append(event)
                room -= size
                self._characters -= size
                self._taken += 1
        return batch

    def note_gone(self, count: int) -> None:
        """Count events that were sent or given up, and wake who waits for them."""
        with self.changed:
            self._gone += count
            self.changed.notify_all()

    def clear(self) -> None:
        """Give up all waiting events."""
        with self.changed:
            self._waiting.clear()
            self._characters = 0
            self._gone = self._taken = self._wanted = self._pushed
            self.changed.notify_all()


# ── facts ─────────────────────────────────────────────────────────────────────────────────────────


def duration_text(seconds: float) -> str:
    """A duration as `H:MM:SS`, with microseconds where there are some.

    Example:
        >>> duration_text(3.220668), duration_text(90061)
        ('0:00:03.220668', '25:01:01')
    """
    whole, micros = divmod(round(seconds * 1_000_000), 1_000_000)
    text = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{text}.{micros:06}" if micros else text


def user_error(error: BaseException) -> object | None:
    """Return the user's mistake (4xx) behind an exception, or None.

    For an error of tinkex its cause does not count, and 410 is not the user's mistake.

    Example:
        >>> user_error(TinkerError("no such loss", category="user")), user_error(KeyError("loss"))
        (TinkerError('no such loss'), None)
    """
    if isinstance(error, TinkerError):
        return error if _is_users(error, (408, 410, 429)) else None
    stack: list[object] = [error]
    seen: set[int] = set()
    kept: list[object] = []  # an object that is dropped meanwhile could lend its id to another
    while stack and len(seen) < 1000:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        if _is_users(item, (408, 429)):
            return item
        links = [_attribute(item, name) for name in ("cause", "reason", "__cause__", "__context__")]
        stack += [link for link in reversed(links) if _is_object(link)]
    return None


def _is_users(item: object, excepted: tuple[int, ...]) -> bool:
    category = _attribute(item, "category")
    if str(getattr(category, "value", category)).lower() == "user":
        return True
    status = _status(item)
    return status is not None and 400 <= status < 500 and status not in excepted


def _status(item: object) -> int | None:
    values = (_attribute(item, name) for name in ("status", "status_code", "plug_status"))
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool)), None
    )


def _attribute(item: object, name: str) -> object:
    try:
        return getattr(item, name, None)
    except Exception:  # a property may fail in any way
        return None


def _is_object(value: object) -> bool:
    return not (
        value is None or isinstance(value, str | bytes | int | float | type) or callable(value)
    )


def facts_of(error: object) -> dict[str, Any]:
    """Return the reported facts of a user's mistake."""
    facts: dict[str, Any] = {"error_type": type_name(error), "message": message_of(error)}
    if (status := _status(error)) is not None:
        facts["status_code"] = status
    for name in ("body", "data"):
        if isinstance(found := _attribute(error, name), Mapping):
            facts.setdefault("body", dict(found))
    return facts


def type_name(item: object) -> str:
    """Return the full name of an object's class."""
    kind = type(item)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def message_of(item: object) -> str:
    """Return the text of an exception, also of one that cannot be printed."""
    try:
        return str(item)
    except Exception:
        return f"<{type(item).__qualname__} that cannot be printed>"


def size_of(value: object) -> int:
    """About how many characters a plain value has."""
    if isinstance(value, dict):
        return sum(len(key) + size_of(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, str) else 8


def without_headers(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same without headers and bodies, at any depth of mappings."""
    return {
        key: without_headers(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if not str(key).lower().endswith(("headers", "body"))
    }


def exception_fields(error: BaseException, scrubber: Scrubber) -> dict[str, Any]:
    """Return an exception's type, message and traceback, without secrets."""
    has_trace = error.__traceback__ or error.__cause__
    lines = "".join(traceback.format_exception(error)) if has_trace else ""
    return {
        "error_type": type_name(error),
        "error_message": scrubber.text(message_of(error)),
        "traceback": scrubber.text(lines, MOST_TRACEBACK, end=True) or None,
    }
