"""Public classes that are written in parts, one subject per module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tinkex.client.http.request_headers import name_requests

C = TypeVar("C")


def made_of(*parts: type[Any]) -> Callable[[type[C]], type[C]]:
    """Make public methods and properties of base classes the class's own.

    Programs that trace or replace methods look for them in the class itself, not in its bases.

    Args:
        parts: Base classes of the class that is decorated. No other class may be made of a part
            that has deprecated methods.

    Returns:
        A decorator; it also has the methods name the requests that they cause.
    """

    def decorate(client: type[C]) -> type[C]:
        for part in parts:
            for name, member in list(vars(part).items()):
                if name.startswith("_") or name in vars(client):
                    continue
                if inspect.isfunction(member):
                    _rename(member, part.__name__, client.__name__)
                setattr(client, name, member)
        return name_requests(client)

    return decorate


def _rename(method: Any, part: str, owner: str) -> None:
    old, method.__qualname__ = method.__qualname__, f"{owner}.{method.__name__}"
    if hasattr(method, "__deprecated__"):
        text = method.__deprecated__.replace(f"{old}(", f"{method.__qualname__}(")
        method.__deprecated__ = text.replace(f"{part}.", f"{owner}.")
