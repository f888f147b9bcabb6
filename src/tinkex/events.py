"""The client's event bus: named events with measurements and metadata for handlers.

Handlers are called at once, in the thread (and task) that emits. Nothing is computed for an event
without a handler. A handler that fails is detached and never breaks the call.

Durations (`duration`, `elapsed_time`) and `delay_ms` are milliseconds; `system_time` is seconds
since 1970.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

logger = logging.getLogger("tinkex")

Handler: TypeAlias = Callable[[str, Mapping[str, float], Mapping[str, Any]], object]
"""Takes the event's name, its measurements and its metadata."""

# ── the catalogue ─────────────────────────────────────────────────────────────────────────────────

HTTP_START = "tinkex.http.request.start"
HTTP_STOP = "tinkex.http.request.stop"
HTTP_EXCEPTION = "tinkex.http.request.exception"
QUEUE_STATE_CHANGE = "tinkex.queue.state_change"
FUTURE_TIMEOUT = "tinkex.future.timeout"
FUTURE_API_ERROR = "tinkex.future.api_error"
FUTURE_CONNECTION_ERROR = "tinkex.future.connection_error"
FUTURE_REQUEST_FAILED = "tinkex.future.request_failed"
FUTURE_VALIDATION_ERROR = "tinkex.future.validation_error"
RETRY_START = "tinkex.retry.attempt.start"
RETRY_STOP = "tinkex.retry.attempt.stop"
RETRY_RETRY = "tinkex.retry.attempt.retry"
RETRY_FAILED = "tinkex.retry.attempt.failed"
RECOVERY_DETECTED = "tinkex.recovery.detected"
RECOVERY_POLL_ERROR = "tinkex.recovery.poll_error"
RECOVERY_STARTED = "tinkex.recovery.started"
RECOVERY_CHECKPOINT_SELECTED = "tinkex.recovery.checkpoint_selected"
RECOVERY_CLIENT_CREATED = "tinkex.recovery.client_created"
RECOVERY_COMPLETED = "tinkex.recovery.completed"
RECOVERY_FAILED = "tinkex.recovery.failed"
RECOVERY_EXHAUSTED = "tinkex.recovery.exhausted"
CUSTOM_LOSS_START = "tinkex.custom_loss.start"
CUSTOM_LOSS_STOP = "tinkex.custom_loss.stop"
CUSTOM_LOSS_EXCEPTION = "tinkex.custom_loss.exception"
REGULARIZER_START = "tinkex.regularizer.compute.start"
REGULARIZER_STOP = "tinkex.regularizer.compute.stop"
REGULARIZER_EXCEPTION = "tinkex.regularizer.compute.exception"

HTTP_EVENTS = (HTTP_START, HTTP_STOP, HTTP_EXCEPTION)
FUTURE_EVENTS = (
    FUTURE_TIMEOUT,
    FUTURE_API_ERROR,
    FUTURE_CONNECTION_ERROR,
    FUTURE_REQUEST_FAILED,
    FUTURE_VALIDATION_ERROR,
)


@dataclass(frozen=True, slots=True)
class Contents:
    """Names of an event's measurements and metadata, without those that callers add.

    Example:
        >>> CATALOGUE[HTTP_STOP].measurements
        ('duration',)
    """

    measurements: tuple[str, ...]
    metadata: tuple[str, ...]


_REQUEST = ("method", "path", "pool_type", "base_url")
_POLL = ("request_id", "request_type", "iteration")
_FAILED_POLL = Contents(("elapsed_time",), (*_POLL, "status", "category", "error_type"))
_ATTEMPT = ("run_id", "attempt", "strategy")
_TERM = ("regularizer_name", "weight")

CATALOGUE: Mapping[str, Contents] = {
    HTTP_START: Contents(("system_time",), _REQUEST),
    HTTP_STOP: Contents(("duration",), (*_REQUEST, "result", "retry_count")),
    HTTP_EXCEPTION: Contents(("duration",), (*_REQUEST, "kind", "reason", "stacktrace")),
    QUEUE_STATE_CHANGE: Contents((), ("request_id", "queue_state", "queue_state_reason")),
    FUTURE_TIMEOUT: Contents(("elapsed_time",), _POLL),
    FUTURE_API_ERROR: _FAILED_POLL,
    FUTURE_CONNECTION_ERROR: _FAILED_POLL,
    FUTURE_REQUEST_FAILED: _FAILED_POLL,
    FUTURE_VALIDATION_ERROR: _FAILED_POLL,
    RETRY_START: Contents(("system_time",), ("attempt",)),
    RETRY_STOP: Contents(("duration",), ("attempt", "result")),
    RETRY_RETRY: Contents(("duration", "delay_ms"), ("attempt", "error")),
    RETRY_FAILED: Contents(("duration",), ("attempt", "error")),
    RECOVERY_DETECTED: Contents((), ("run_id", "checkpoint")),
    RECOVERY_POLL_ERROR: Contents((), ("run_id", "error")),
    RECOVERY_STARTED: Contents(("attempt",), _ATTEMPT),
    RECOVERY_CHECKPOINT_SELECTED: Contents(("attempt",), (*_ATTEMPT, "checkpoint")),
    RECOVERY_CLIENT_CREATED: Contents(("attempt",), (*_ATTEMPT, "client", "checkpoint")),
    RECOVERY_COMPLETED: Contents(("attempt",), (*_ATTEMPT, "client", "checkpoint")),
    RECOVERY_FAILED: Contents(("attempt",), (*_ATTEMPT, "error")),
    RECOVERY_EXHAUSTED: Contents(("attempt",), (*_ATTEMPT, "error")),
    CUSTOM_LOSS_START: Contents(("system_time",), ("regularizer_count", "track_grad_norms")),
    CUSTOM_LOSS_STOP: Contents(
        ("duration", "loss_total", "regularizer_total"), ("regularizer_count",)
    ),
    CUSTOM_LOSS_EXCEPTION: Contents(("duration",), ("reason",)),
    REGULARIZER_START: Contents(("system_time",), (*_TERM, "async")),
    REGULARIZER_STOP: Contents(
        ("duration", "value", "contribution", "grad_norm"), (*_TERM, "async")
    ),
    REGULARIZER_EXCEPTION: Contents(("duration",), (*_TERM, "reason")),
}
"""Every event by name.

Events of a session also carry `session_id`, and `sampling_session_id`, `model_id` or `model_seq_id`
where there is one.
"""

# ── the bus ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Attachment:
    """A handler and what it listens to; `names` is None for everything.

    Example:
        >>> Attachment("printer", frozenset([HTTP_STOP]), print).hears(HTTP_STOP)
        True
    """

    handler_id: str
    names: frozenset[str] | None
    handler: Handler

    def hears(self, name: str) -> bool:
        """Return True if events of this name are for the handler.

        Example:
            >>> everything = Attachment("printer", None, print)
            >>> everything.hears(HTTP_STOP), everything.hears("my.event")
            (True, True)
        """
        return self.names is None or name in self.names


# Replaced as a whole under the lock and never changed, so that emitting takes no lock. A finalizer
# that detaches may run while its thread holds the lock: it can be taken twice.
_attached: tuple[Attachment, ...] = ()
_lock = threading.RLock()


def attach(handler_id: str, names: Iterable[str] | None, handler: Handler) -> None:
    """Have a handler called for events of exactly these names (all of them for None).

    Args:
        handler_id: A name for the handler, by which it is detached.
        names: The events to hear; None for all.
        handler: Called with name, measurements and metadata.

    Raises:
        ValueError: The id is taken.
        TypeError: The names are a single text.

    Example:
        >>> attach(
        ...     "printer", [HTTP_STOP], lambda name, measurements, metadata: print(metadata["path"])
        ... )
        >>> detach("printer")
        True
    """
    global _attached
    if isinstance(names, str):
        raise TypeError(f"names must be a list of event names, got the text {names!r}")
    attachment = Attachment(handler_id, None if names is None else frozenset(names), handler)
    with _lock:
        if any(known.handler_id == handler_id for known in _attached):
            raise ValueError(f"an event handler {handler_id!r} is attached already")
        _attached = (*_attached, attachment)


def detach(handler_id: str) -> bool:
    """Stop calling a handler; return False if there is none of this id.

    Args:
        handler_id: The id that it was attached with.

    Returns:
        True if there was one.

    Example:
        >>> attach("printer", ["my.event"], print)
        >>> detach("printer"), detach("printer")
        (True, False)
    """
    global _attached
    with _lock:
        kept = tuple(known for known in _attached if known.handler_id != handler_id)
        found = len(kept) < len(_attached)
        _attached = kept
    return found


def handlers(name: str | None = None) -> list[Attachment]:
    """Return the attached handlers in calling order; with a name, those of that event.

    Args:
        name: An event.

    Returns:
        The attachments.

    Example:
        >>> attach("printer", ["my.event"], print)
        >>> (
        ...     [known.handler_id for known in handlers("my.event") if known.names is not None],
        ...     detach("printer"),
        ... )
        (['printer'], True)
    """
    return [known for known in _attached if name is None or known.hears(name)]


def is_heard(name: str | None = None) -> bool:
    """Return True if any handler listens (to this name, if given).

    Check it before computing a costly measurement.

    Args:
        name: An event.

    Returns:
        True if a handler listens.

    Example:
        >>> attach("printer", ["my.event"], print)
        >>> is_heard("my.event"), is_heard("other.event"), detach("printer")
        (True, False, True)
    """
    return bool(_attached) if name is None else any(known.hears(name) for known in _attached)


def emit(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    """Call the handlers of an event; one that fails is detached, with a warning.

    Args:
        name: The name of the event.
        measurements: Numbers that go with it.
        metadata: Other facts.

    Example:
        >>> attach(
        ...     "printer",
        ...     ["my.epoch"],
        ...     lambda name, measurements, metadata: print(name, measurements["loss"]),
        ... )
        >>> emit("my.epoch", {"loss": 0.31}, {"epoch": 3})
        my.epoch 0.31
        >>> detach("printer")
        True
    """
    for known in _attached:
        if known.hears(name):
            try:
                known.handler(name, measurements, metadata)
            except Exception:
                _drop(known)
                logger.warning(
                    "the event handler %r failed on %s and was detached",
                    known.handler_id,
                    name,
                    exc_info=True,
                )


def _drop(failed: Attachment) -> None:
    """Detach this very handler; another one may have taken its id since."""
    global _attached
    with _lock:
        _attached = tuple(known for known in _attached if known is not failed)


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # another thread may have held it when the process forked
    os.register_at_fork(after_in_child=_renew_lock)
