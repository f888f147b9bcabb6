"""Queue states: the server's notes that queued work is paused.

A poll passes them to a `QueueStateTracker`. It passes changes on to the bus and to observers, and
every note to the client's own observer, which logs it through a `QueueStateLogger`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from tinkex import events
from tinkex.types.future_requests import QueueState

logger = logging.getLogger("tinkex")

QUIET_SECONDS = 60.0
"""Least time between two log lines about the same client."""

GRACE_SECONDS: dict[str, float] = {"Sampling": 0.0, "Training": 900.0}
"""Time that a state must last before it is logged; training often waits for a while."""

REMEMBERED = 10_000
"""Limit of clients for which the last log line is remembered."""

NO_CAPACITY = "Tinker backend is running short on capacity, please wait"

Kind: TypeAlias = Literal["Sampling", "Training"]
_RATE_LIMITS: dict[str, str] = {
    "Sampling": "concurrent sampler weights limit hit",
    "Training": "concurrent training clients rate limit hit",
}
_IDS: dict[str, tuple[str, ...]] = {
    "Sampling": ("sampling_session_id", "session_id"),
    "Training": ("model_id",),
}


class ReasonObserver(Protocol):
    """Receives the state and the server's reason; a callable with these parameters works too."""

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None, /
    ) -> object:
        """Take note."""


class StateObserver(Protocol):
    """Receives the state only."""

    def on_queue_state_change(self, queue_state: QueueState, /) -> object:
        """Take note."""


class MetadataObserver(Protocol):
    """Receives the state and all that is known about it, in a parameter named `metadata`."""

    def on_queue_state_change(self, queue_state: QueueState, metadata: Mapping[str, Any]) -> object:
        """Take note."""


Observer: TypeAlias = ReasonObserver | StateObserver | MetadataObserver | Callable[..., object]
"""An object with `on_queue_state_change`, or a callable; anything else is ignored."""


class QueueStateLogger:
    """Logs that a client is paused and why, at most once a minute each; safe in any thread.

    A pause of training is logged after 15 minutes, one of sampling at once.

    Args:
        kind: The kind of work; it begins the message and picks the usual reasons.
        clock: Seconds that never go back.
        grace: Seconds that a state has to last; by default those of the kind.
    """

    def __init__(
        self, kind: Kind, clock: Callable[[], float] = time.monotonic, grace: float | None = None
    ) -> None:
        self.kind = kind
        self._clock = clock
        self._grace = GRACE_SECONDS[kind] if grace is None else grace
        self._lock = threading.Lock()
        self._paused: OrderedDict[str, tuple[QueueState, float]] = OrderedDict()
        """The state of each paused client and its start, the oldest first."""
        self._spoken: OrderedDict[str, float] = OrderedDict()  # the oldest first

    def on_queue_state_change(
        self,
        queue_state: QueueState | str,
        queue_state_reason: str | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Log a pause that has lasted long enough, once a minute for each client.

        Args:
            queue_state: The state, or its text.
            queue_state_reason: The server's reason, or metadata that holds it; a usual one is given
                where it is empty.
            name: The id of the client; by default the one in the metadata, else "unknown".
        """
        state = (
            queue_state if isinstance(queue_state, QueueState) else QueueState.parse(queue_state)
        )
        metadata = queue_state_reason if isinstance(queue_state_reason, Mapping) else {}
        reason = (
            metadata.get("queue_state_reason")
            if metadata is queue_state_reason
            else queue_state_reason
        )
        if name is None:
            name = next(
                (str(metadata[key]) for key in _IDS[self.kind] if metadata.get(key)), "unknown"
            )
        if state is QueueState.ACTIVE:
            self._resume(name)
        elif self._has_lasted(name, state) and self._is_due(name):
            logger.warning(
                "%s is paused for %s. Reason: %s", self.kind, name, self._reason(state, reason)
            )

    def clear(self, name: str) -> None:
        """Forget a client; an unknown one is fine."""
        with self._lock:
            self._spoken.pop(name, None)
            self._paused.pop(name, None)

    def _resume(self, name: str) -> None:
        if self._paused:
            with self._lock:
                self._paused.pop(name, None)

    def _has_lasted(self, name: str, state: QueueState) -> bool:
        if self._grace <= 0:
            return True
        with self._lock:
            now = self._clock()
            known = self._paused.get(name)
            if known is not None and known[0] is state:
                return now - known[1] >= self._grace
            if known is None and len(self._paused) >= REMEMBERED:
                self._paused.popitem(last=False)
            self._paused[name] = state, now
            return False

    def _is_due(self, name: str) -> bool:
        with self._lock:
            now = self._clock()
            while self._spoken and now - next(iter(self._spoken.values())) >= QUIET_SECONDS:
                self._spoken.popitem(last=False)
            if name in self._spoken:
                return False
            if len(self._spoken) >= REMEMBERED:
                self._spoken.popitem(last=False)
            self._spoken[name] = now
            return True

    def _reason(self, state: QueueState, reason: Any) -> str:
        # one line, whatever the server sends
        given = " ".join(reason.split()) if isinstance(reason, str) else ""
        if given:
            return given
        usual = {
            QueueState.PAUSED_RATE_LIMIT: _RATE_LIMITS[self.kind],
            QueueState.PAUSED_CAPACITY: NO_CAPACITY,
        }
        return usual.get(state, "unknown")


class QueueStateTracker:
    """Passes on the queue states of one request when the state or the reason changes.

    Args:
        observers: Receive the changes, in this order; `None` among them is skipped.
        metadata: Facts about the request, passed along with every change.
        initial: The state to start from, which is then no change.
        listener: Receives every state, changed or not, before the observers.
    """

    def __init__(
        self,
        observers: Iterable[Observer | None] = (),
        metadata: Mapping[str, Any] | None = None,
        initial: QueueState | str | None = None,
        listener: Observer | None = None,
    ) -> None:
        self._listener = listener
        self._observers = [observer for observer in observers if observer is not None]
        self._metadata = dict(metadata or {})
        begun = None if initial is None else QueueState.parse(initial)
        self._last: tuple[QueueState | None, str | None] = (begun, None)

    @property
    def state(self) -> QueueState | None:
        """The last state; None before the first."""
        return self._last[0]

    def heard(
        self, queue_state: Any, queue_state_reason: str | None = None, *, request_id: str = ""
    ) -> bool:
        """Take a state from the server; return True if it is a change."""
        state = QueueState.parse(queue_state)
        if self._listener is not None:
            notify(self._listener, state, queue_state_reason, self._metadata)
        if (state, queue_state_reason) == self._last:
            return False
        self._last = (state, queue_state_reason)
        metadata = self._metadata | {
            "request_id": request_id,
            "queue_state": state.value,
            "queue_state_reason": queue_state_reason,
        }
        events.emit(events.QUEUE_STATE_CHANGE, {}, metadata)
        for observer in self._observers:
            notify(observer, state, queue_state_reason, metadata)
        return True

    def ended(self) -> None:
        """Report an active queue to the listener: the request has ended."""
        if self._listener is not None:
            notify(self._listener, QueueState.ACTIVE, None, self._metadata)


def notify(
    observer: Observer | None,
    state: QueueState,
    reason: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Call an observer with the arguments it takes; its errors are logged, never raised.

    With one parameter it gets the state. A second one gets the metadata if its name is `metadata`,
    else the reason.
    """
    call = getattr(observer, "on_queue_state_change", observer)
    if not callable(call):
        return
    try:
        answer = call(*_arguments(call, state, reason, metadata or {}))
        if inspect.iscoroutine(answer):
            answer.close()
            raise TypeError("an observer of queue states cannot be a coroutine function")
    except Exception:
        logger.warning("an observer failed on the queue state %s", state, exc_info=True)


def _arguments(
    call: Callable[..., object], state: QueueState, reason: str | None, metadata: Mapping[str, Any]
) -> tuple[Any, ...]:
    function = getattr(call, "__func__", None)
    second = _second_of(call) if function is None else _second_of_method(function)
    return (state,) if second is None else (state, metadata if second == "metadata" else reason)


@functools.lru_cache(256)
def _second_of_method(function: Callable[..., object]) -> Literal["metadata", "reason"] | None:
    """Return what a method takes besides the state; cached, since it is asked for every sample."""
    return _second_of(function, skipped=1)


def _second_of(
    call: Callable[..., object], skipped: int = 0
) -> Literal["metadata", "reason"] | None:
    """Return what an observer takes besides the state, by its parameters."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return "reason"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][
        skipped:
    ]
    if len(positional) < 2:
        return "reason" if any(p.kind is p.VAR_POSITIONAL for p in parameters) else None
    return "metadata" if positional[1].name == "metadata" else "reason"
