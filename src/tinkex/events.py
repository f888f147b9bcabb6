"""The bus on which the client says what happens: named events with numbers and facts, for whoever listens.

Nothing is computed for an event that nobody listens to, and a listener that fails never breaks the call it listens to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

logger = logging.getLogger("tinkex")

Handler: TypeAlias = Callable[[str, Mapping[str, float], Mapping[str, Any]], object]
"""Takes the event's name, its measurements and its metadata."""

_handlers: dict[str, tuple[frozenset[str] | None, Handler]] = {}


def attach(handler_id: str, names: Iterable[str] | None, handler: Handler) -> None:
    """Have a handler called for events of these names (all of them for None); an id that is taken is replaced."""
    _handlers[handler_id] = (None if names is None else frozenset(names), handler)


def detach(handler_id: str) -> None:
    """Stop calling a handler; an unknown id is fine."""
    _handlers.pop(handler_id, None)


def is_heard() -> bool:
    """Whether anybody listens: what only an event needs need not be computed otherwise."""
    return bool(_handlers)


def emit(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    """Tell everybody who listens to this name."""
    for handler_id, (names, handler) in list(_handlers.items()):
        if names is None or name in names:
            try:
                handler(name, measurements, metadata)
            except Exception:
                logger.warning("the event handler %r failed on %s", handler_id, name, exc_info=True)
