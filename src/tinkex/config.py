"""Settings of a client: the argument, else the environment, else the default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tinkex.errors import ConfigurationError

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def is_embedded(base_url: str) -> bool:
    """Whether a base URL names a backend inside this process: `local`, or `local:NAME`."""
    return base_url == LOCAL or base_url.startswith(f"{LOCAL}:")


def is_address(base_url: str) -> bool:
    """Whether a base URL can be connected to: http or https, a host, a numeric port if any, and no password in it."""
    try:
        parts = urlsplit(base_url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        return False


def is_open(base_url: str) -> bool:
    """Whether a base URL may be used without a key: it never leaves this machine."""
    return is_embedded(base_url) or urlsplit(base_url).hostname in LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a client needs to know before its first request. The key is left out of the repr."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    project_id: str | None = None
    tags: tuple[str, ...] = ("tinkex-python",)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 60.0
    """Seconds an ordinary request may take."""
    patience: float = 300.0
    """Seconds during which a request that fails for a passing reason is tried again."""
    first_contact_patience: float = 10.0
    """The same for the very first request: an address that is wrong should say so soon."""

    @classmethod
    def resolve(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Config:
        """Fill what was not given from the environment; raise ConfigurationError when nothing says where to go."""
        environment = os.environ
        url = (base_url or environment.get("TINKER_BASE_URL") or "").rstrip("/")
        key = (api_key or environment.get("TINKER_API_KEY") or "").strip() or None
        if not url and not key:
            raise ConfigurationError(
                "no API key and no base URL: there is nothing to connect to",
                hint="set TINKER_API_KEY (or pass api_key=…) to use the hosted service, "
                'or pass base_url="local" (or set TINKER_BASE_URL=local) to run on this machine without a key',
            )
        url = url or HOSTED_URL
        if not is_embedded(url) and not is_address(url):
            shown = url.rpartition("@")[2]
            raise ConfigurationError(
                f"base URL {shown!r} is not an http(s) address without a password in it",
                hint='give a full URL, or "local"',
            )
        if not key and not is_open(url):
            raise ConfigurationError(
                f"{url} needs an API key",
                hint='set TINKER_API_KEY or pass api_key=…; base_url="local" needs none',
            )
        tags = tuple(tag.strip() for tag in environment.get("TINKER_TAGS", "").split(",") if tag.strip())
        return cls(
            base_url=url,
            api_key=key,
            project_id=project_id or environment.get("TINKER_PROJECT_ID") or None,
            tags=("tinkex-python", *tags),
            headers=dict(headers or {}),
        )
