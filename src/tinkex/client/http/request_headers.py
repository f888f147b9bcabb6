"""Headers of requests: those of every client, those of a body, and how they are merged."""

from __future__ import annotations

import functools
import platform
import uuid
from collections.abc import Mapping

from tinkex._version import __version__
from tinkex.client.settings.config import Config
from tinkex.wire import codec
from tinkex.wire.protocol import PROTOCOL_VERSION

OUR_NAMES = frozenset(
    {
        "Accept",
        "Content-Encoding",
        "Content-Type",
        "X-Idempotency-Key",
        "X-Stainless-Raw-Response",
        "X-Tinker-Create-Promise-Roundtrip-Time",
        "X-Tinker-Request-Iteration",
        "X-Tinker-Request-Type",
        "X-Tinker-Sampling-Backpressure",
    }
)
"""Our own headers. They are always spelt so and need no comparison without regard to case."""


def client_headers(config: Config) -> dict[str, str]:
    """Return the headers of every request with these settings."""
    headers = {
        "User-Agent": config.user_agent or f"tinkex/{__version__} (python)",
        "Accept": codec.JSON,
        **_platform_headers(),
    }
    if config.cf_access_client_id and config.cf_access_client_secret:
        headers["CF-Access-Client-Id"] = config.cf_access_client_id
        headers["CF-Access-Client-Secret"] = config.cf_access_client_secret
    return headers


def keyed_headers(content: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a body, or of an empty JSON body, with a new idempotency key."""
    key = {"X-Idempotency-Key": f"tinkex-{uuid.uuid4()}"}
    return {**(content or {"Content-Type": codec.JSON}), **key}


def merge(
    own: dict[str, str], configured: Mapping[str, str], *more: Mapping[str, str]
) -> dict[str, str]:
    """Add headers to `own`; later ones win, and names are compared without regard to case."""
    if not configured:
        for headers in more:
            if not OUR_NAMES.issuperset(headers):
                break
            own.update(headers)
        else:
            return own
    known = {name.lower(): name for name in own}
    for headers in (configured, *more):
        for name, value in headers.items():
            own.pop(known.get(name.lower(), ""), None)
            known[name.lower()] = name
            own[name] = value
    return own


@functools.cache
def _platform_headers() -> dict[str, str]:
    """Return the headers in which the official SDK describes its platform."""
    system = {"Darwin": "MacOS"}.get(platform.system(), platform.system() or "Unknown")
    machine = platform.machine().lower()
    arch = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "i386": "x32", "i686": "x32"}.get(
        machine, machine
    )
    return {
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": system,
        "X-Stainless-Arch": arch or "unknown",
        "X-Stainless-Runtime": platform.python_implementation(),
        "X-Stainless-Runtime-Version": platform.python_version(),
        "X-Stainless-Async": "async:asyncio",
    }
