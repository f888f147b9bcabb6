"""Lines of the log for events of the bus, without secrets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from tinkex import events as bus
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex")

LOGGED_EVENTS = (*bus.HTTP_EVENTS, bus.QUEUE_STATE_CHANGE)
"""Events of the console logger by default."""
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

Line: TypeAlias = Callable[[str, Mapping[str, float], Mapping[str, Any]], str]
"""Makes a line of an event."""

_numbers = itertools.count(1)
_printed = Scrubber()


def attach_logger(
    handler_id: str | None = None, events: Iterable[str] = LOGGED_EVENTS, level: str | int = "info"
) -> str:
    """Log a line to "tinkex" for every event of these names; return the id for `detach`.

    Args:
        handler_id: A name for the logger; one is made up by default.
        events: The names; the usual four by default.
        level: The level of the lines.

    Returns:
        The id.

    Raises:
        ValueError: There is no such level, or the id is taken.

    Example:
        >>> handler = attach_logger(events=[bus.QUEUE_STATE_CHANGE], level="warning")
        >>> detach(handler)
        True
    """
    return attach_lines(_line, events, handler_id or f"tinkex-logger-{next(_numbers)}", level)


def attach_lines(
    line: Line, events: Iterable[str], handler_id: str, level: str | int = "info"
) -> str:
    """Log `line(event)` to "tinkex", without secrets; a failed request is logged as an error.

    Raises:
        ValueError: There is no such level, or the id is taken.

    Example:
        >>> handler = attach_lines(
        ...     lambda name, numbers, facts: f"{name} {numbers}", ["my.epoch"], "epochs"
        ... )
        >>> detach(handler)
        True
    """
    number = level if isinstance(level, int) else LEVELS.get(level.lower())
    if number is None:
        raise ValueError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")

    def write(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        said = _printed.text(line(name, measurements, metadata))
        logger.log(logging.ERROR if name == bus.HTTP_EXCEPTION else number, "%s", said)

    bus.attach(handler_id, events, write)
    return handler_id


def detach(handler_id: str) -> bool:
    """Stop a logger; return False if there is none of this id.

    Args:
        handler_id: The id that `attach_logger` returned.

    Returns:
        True if there was one.

    Example:
        >>> handler = attach_logger()
        >>> detach(handler), detach(handler)
        (True, False)
    """
    return bus.detach(handler_id)


def _line(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> str:
    fact = metadata.get
    request = f"{fact('method')} {fact('path')}"
    milliseconds = f"{measurements.get('duration', 0):.0f} ms"
    if name == bus.HTTP_START:
        return f"HTTP start {request} pool={fact('pool_type')} base={fact('base_url')}"
    if name == bus.HTTP_STOP:
        retries = f"retries={fact('retry_count', 0)}"
        return (
            f"HTTP stop {request} result={fact('result')} {milliseconds} {retries} "
            f"base={fact('base_url')}"
        )
    if name == bus.HTTP_EXCEPTION:
        return f"HTTP exception {request} {milliseconds} reason={fact('reason')}"
    if name == bus.QUEUE_STATE_CHANGE:
        return f"queue state {fact('queue_state')} request_id={fact('request_id')}"
    return f"{name} {_printed.mapping(measurements)} {_printed.mapping(metadata)}"
