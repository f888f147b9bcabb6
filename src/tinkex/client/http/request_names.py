"""Names the public method that requests are made for, in two headers of each request.

The outermost call of a public method names every request that it causes. The name is kept in a
context variable, which tasks inherit. Background work of a session has no name.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinkex.wire.protocol import PROTOCOL_VERSION

C = TypeVar("C")

UNNAMED = frozenset(
    {
        "client_config",
        "client_dynamic_config",
        "create_session",
        "session_heartbeat",
        "telemetry",
        "retrieve_futures",
        "cancel_future",
    }
)
"""Operations that belong to a session or to many calls at once; their requests are not named."""

_method: contextvars.ContextVar[str | None] = contextvars.ContextVar("tinkex_method", default=None)


def name_requests(client: type[C], owner: str = "") -> type[C]:
    """Have the public methods of a class name the requests that they cause.

    Functions that the class itself defines are replaced by functions with the same name, signature
    and annotations. Properties, static methods and private names are left alone.

    Args:
        client: The class.
        owner: The class that is named; the same class by default.

    Returns:
        The class, so that this can decorate it.
    """
    for name, member in list(vars(client).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(client, name, _naming(f"{owner or client.__name__}.{name}", member))
    return client


def forget_caller() -> None:
    """Remove the name in this task: its later requests belong to no method."""
    _method.set(None)


def headers_of(operation: str) -> dict[str, str]:
    """Return the headers that name a request's method; empty if there is none."""
    method = _method.get()
    if method is None or operation in UNNAMED:
        return {}
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}


def _naming(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that wraps a public method.

    The variable is None again afterwards, since only the outermost call sets it.
    """
    method, coroutine_type = _method, types.CoroutineType

    async def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
        method.set(name)
        try:
            return await coroutine
        finally:
            method.set(None)

    def call(*args: Any, **kwargs: Any) -> Any:
        if method.get() is not None:
            return function(*args, **kwargs)
        method.set(name)
        try:
            result = function(*args, **kwargs)
        finally:
            method.set(None)
        return finish(result) if type(result) is coroutine_type else result

    async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
        if method.get() is not None:
            return await function(*args, **kwargs)
        return await finish(function(*args, **kwargs))

    chosen: Any = call_coroutine if function.__code__.co_flags & inspect.CO_COROUTINE else call
    # Doctests and warnings take a function to belong to the module of its globals.
    made = types.FunctionType(
        chosen.__code__, function.__globals__, function.__name__, None, chosen.__closure__
    )
    return functools.update_wrapper(made, function)
