"""Which version this is, and which version of the Tinker SDK it speaks for."""

from __future__ import annotations

from tinkex._version import __version__
from tinkex.wire.protocol import PROTOCOL_VERSION


def current() -> str:
    """The version of this package."""
    return __version__


def tinker_sdk() -> str:
    """The version of the Tinker SDK that servers are told: in sessions, telemetry and headers. It
    is fixed.
    """
    return PROTOCOL_VERSION
