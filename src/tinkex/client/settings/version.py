"""The version of this package, and the version of the Tinker SDK that it reports."""

from __future__ import annotations

from tinkex._version import __version__
from tinkex.wire.protocol import PROTOCOL_VERSION


def current() -> str:
    """Return the version of this package."""
    return __version__


def tinker_sdk() -> str:
    """Return the version of the Tinker SDK that servers are told; it is fixed."""
    return PROTOCOL_VERSION
