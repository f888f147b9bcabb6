"""The base of the clients of a session, and a decorator for clients written in parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client.http.request_headers import name_requests

if TYPE_CHECKING:
    from tinkex.client.session import Session
    from tinkex.telemetry import Reporter

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


class SessionClient:
    """A client of a session."""

    _session: Session

    @property
    def holder(self) -> Session:
        """The session of this client; its interface may change in any release."""
        return self._session

    def get_telemetry(self) -> Reporter | None:
        """Return the reporter of this session's events, or None.

        It sends them to the hosted service.

        Example:
            >>> from tinkex import telemetry
            >>> telemetry.log(
            ...     client.get_telemetry(), "evaluated", {"accuracy": 0.9}
            ... )  # False: there is no reporter
            False
        """
        return self._session.telemetry
