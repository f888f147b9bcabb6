"""The handlers of all operations, collected from the modules of this package.

To add an endpoint, add its row to `wire.protocol.OPERATIONS` and a function of that name with
`@handler` to any module here. A handler checks what must be known before anything is promised, and
refuses with an HTTP status. Then it queues the work and returns a receipt. Later failures are
reported in the future's result.
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


def handler(function: H) -> H:
    """Register a function as the handler of the operation that has its name."""
    name = getattr(function, "__name__", "")
    if name not in BY_NAME:
        raise ValueError(f"there is no operation {name!r}; add it to wire.protocol.OPERATIONS")
    if name in HANDLERS:
        raise ValueError(f"the operation {name!r} has two handlers")
    HANDLERS[name] = function
    return function


def collect() -> Mapping[str, Handler]:
    """Import all modules of this package, and return the handlers that they register."""
    for module in pkgutil.iter_modules(routes.__path__):
        importlib.import_module(f"{routes.__name__}.{module.name}")
    return HANDLERS
