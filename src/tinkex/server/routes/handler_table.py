"""The handlers of all operations, collected from the modules of this package.

To add an endpoint, add its row to `wire.protocol.OPERATIONS` and a function of that name to any
module here:

- with `@handler`, a function that answers the request. It checks what must be known before anything
  is promised, and refuses with an HTTP status.
- with `@run_operation`, a function that returns the kind of work that a run is asked for, or how a
  run is made. The request then has its turn in the order of its run, and the result is the
  future's. The request is journalled, and the function is called again when that is replayed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from tinkex.server import routes
from tinkex.wire.protocol import BY_NAME

Handler: TypeAlias = Callable[..., Awaitable[Any]]
"""Takes the server's state and a call."""
H = TypeVar("H", bound=Handler)

HANDLERS: dict[str, Handler] = {}
"""By the name of the operation; complete once `collect` was called."""
JOURNALLED: set[str] = set()
"""The operations whose handlers return work."""


def handler(function: H) -> H:
    """Register a function as the handler of the operation that has its name."""
    name = getattr(function, "__name__", "")
    if name not in BY_NAME:
        raise ValueError(f"there is no operation {name!r}; add it to wire.protocol.OPERATIONS")
    if name in HANDLERS:
        raise ValueError(f"the operation {name!r} has two handlers")
    HANDLERS[name] = function
    return function


def run_operation(function: H) -> H:
    """Register what returns the work of the operation that has its name."""
    JOURNALLED.add(function.__name__)
    return handler(function)


def collect() -> Mapping[str, Handler]:
    """Import all modules of this package, and return the handlers that they register."""
    for module in pkgutil.iter_modules(routes.__path__):
        importlib.import_module(f"{routes.__name__}.{module.name}")
    return HANDLERS
