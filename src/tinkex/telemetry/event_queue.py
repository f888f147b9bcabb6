"""The events of a reporter that wait to be sent."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections import deque
from typing import Any

from tinkex.types.telemetry import SessionEndEvent, TelemetryEvent

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
