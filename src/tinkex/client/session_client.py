"""SessionClient: the part that the clients of a session have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.client.session import Session
    from tinkex.telemetry import Reporter


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
