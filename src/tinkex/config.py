"""Settings of a client, from four tiers: the argument, else `configure()`, else the environment, else the default.

A Config is complete when it is made: requests read nothing else, so that clients of several tenants share a process.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tinkex import environment
from tinkex.credentials import stored_key
from tinkex.errors import ConfigurationError
from tinkex.exchanges import REDACTED
from tinkex.exchanges import redact_headers as redact_headers

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OWN_TAG = "tinkex-python"
PARITY_PRESETS: dict[str, dict[str, Any]] = {
    "python": {"timeout": 60.0},
    "beam": {"timeout": 120.0, "max_retries": 2},
}
"""Defaults of the two older SDKs: the official one's, and the Elixir one's."""


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


def is_open_address(base_url: str) -> bool:
    """Whether a base URL may be used without a key: it never leaves this machine."""
    return is_embedded(base_url) or (is_address(base_url) and urlsplit(base_url).hostname in LOOPBACK)


def mask_api_key(key: str | None) -> str | None:
    """A key that can be shown: its first and last few characters, or stars when it is short.

    Example:
        >>> mask_api_key("tml-abcdef123456")
        'tml-ab...3456'
    """
    if key is None:
        return None
    return "*" * len(key) if len(key) <= 4 else f"{key[: min(6, len(key) - 2)]}...{key[-4:]}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """What a client needs to know before its first request. Times are seconds; secrets are masked in the repr."""

    base_url: str
    api_key: str | None = None
    credential_cmd: str | None = None
    """A shell command whose output is the credential; run when one is needed, when there is no key."""
    project_id: str | None = None
    user_metadata: Mapping[str, str] | None = None
    tags: tuple[str, ...] = (OWN_TAG,)
    timeout: float = 60.0
    """Seconds an ordinary request may take."""
    max_retries: int | None = None
    """How often a request that failed for a passing reason is sent again; None: for as long as `patience` lasts."""
    patience: float = 300.0
    """Seconds during which it is."""
    first_contact_patience: float = 10.0
    """The same for the very first request: an address that is wrong should say so soon."""
    default_headers: Mapping[str, str] = field(default_factory=dict)
    default_query: Mapping[str, str] = field(default_factory=dict)
    cf_access_client_id: str | None = None
    cf_access_client_secret: str | None = None
    proxy: str | None = None
    proxy_headers: tuple[tuple[str, str], ...] = ()
    circuit_breaker: bool = False
    """Stop calling an endpoint that keeps failing, for half a minute; see `ServiceClient.circuit_breakers`."""
    dump_headers: bool = False
    """Log every request with its (redacted) headers, at level INFO."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not is_embedded(self.base_url) and not is_address(self.base_url):
            shown = self.base_url.rpartition("@")[2]
            raise ConfigurationError(
                f"invalid base_url: {shown!r} is not an http(s) address without a password in it",
                hint='give a full URL, or "local"',
            )
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ConfigurationError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        retries = 0 if self.max_retries is None else self.max_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(f"max_retries must be a non-negative integer, got {self.max_retries!r}")
        if self.proxy is not None and urlsplit(self.proxy).scheme not in ("http", "https"):
            raise ConfigurationError("proxy URL scheme must be http or https, as in http://user:pass@host:8080")
        if self.project_id is not None and not self.project_id.strip():
            raise ConfigurationError("project_id must not be blank")

    @classmethod
    def resolve(cls, **explicit: Any) -> Config:
        """Fill each field from the first tier that says something; None says nothing, False and empty do.

        Raises:
            ConfigurationError: Nothing says where to go, or a setting makes no sense.
        """
        known = {item.name for item in fields(cls)} | {"parity_mode"}
        if unknown := explicit.keys() - known:
            raise TypeError(f"unknown setting {min(unknown)!r}; known are {', '.join(sorted(known))}")
        blank = {name for name in ("base_url", "api_key") if not str(explicit.get(name) or "").strip()}
        given = {name: value for name, value in explicit.items() if name not in blank}
        settings = _first(given, _defaults, environment.snapshot())
        preset = PARITY_PRESETS.get(str(settings.pop("parity_mode", "python")), PARITY_PRESETS["python"])
        settings = {**preset, **settings}
        settings["base_url"] = _address(settings)
        settings["tags"] = (OWN_TAG, *(tag for tag in settings.get("tags", ()) if tag != OWN_TAG))
        for name in ("default_headers", "default_query"):
            settings[name] = _texts(name, settings.get(name) or {})
        return cls(**settings)

    @property
    def proxy_url(self) -> str | None:
        """The proxy without the name and password in it."""
        if self.proxy is None:
            return None
        parts = urlsplit(self.proxy)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def proxy_authorization(self) -> dict[str, str]:
        """Headers for the proxy: those given, else the name and password of its URL."""
        if self.proxy_headers:
            return dict(self.proxy_headers)
        account = urlsplit(self.proxy).netloc.rpartition("@")[0] if self.proxy else ""
        if not account:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(unquote(account).encode()).decode()}

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in fields(self)}
        shown["api_key"] = mask_api_key(self.api_key)
        shown["default_headers"] = dict.fromkeys(self.default_headers, REDACTED)
        shown["proxy"] = self.proxy_url
        for secret in ("cf_access_client_secret", "proxy_headers", "credential_cmd"):
            shown[secret] = REDACTED if shown[secret] else shown[secret]
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


_defaults: dict[str, Any] = {}


def configure(**defaults: Any) -> None:
    """Set defaults for every client made later in this process; an argument still wins, the environment does not.

    Called with nothing, it forgets them.

    Example:
        >>> configure(timeout=30)
        >>> configure()
    """
    known = {item.name for item in fields(Config)} | {"parity_mode"}
    if unknown := defaults.keys() - known:
        raise TypeError(f"unknown setting {min(unknown)!r}; known are {', '.join(sorted(known))}")
    if not defaults:
        _defaults.clear()
    _defaults.update(defaults)


def _first(*tiers: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tier in tiers:
        merged = {**{name: value for name, value in tier.items() if value is not None}, **merged}
    return merged


def _address(settings: dict[str, Any]) -> str:
    """Where to go; and a check that there is a credential where one is needed."""
    url = str(settings.get("base_url") or "").rstrip("/")
    key = str(settings.get("api_key") or "").strip() or None
    if key is None and not settings.get("credential_cmd") and not (url and is_open_address(url)):
        key = stored_key()
    settings["api_key"] = key
    credential = key or settings.get("credential_cmd")
    if not url and not credential:
        raise ConfigurationError(
            "no API key and no base URL: there is nothing to connect to",
            hint="set TINKER_API_KEY (or pass api_key=…) to use the hosted service, "
            'or pass base_url="local" (or set TINKER_BASE_URL=local) to run on this machine without a key',
        )
    url = url or HOSTED_URL
    if (is_embedded(url) or is_address(url)) and not credential and not is_open_address(url):
        raise ConfigurationError(
            f"{url} needs an API key", hint='set TINKER_API_KEY or pass api_key=…; base_url="local" needs none'
        )
    return url


def _texts(name: str, value: Any) -> dict[str, str]:
    """A map of text from a map or pairs: keys trimmed, numbers written out, absent values left out."""
    try:
        items = dict(value).items()
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a mapping of text to text, got {value!r}") from None
    texts = {}
    for key, item in items:
        if not str(key).strip():
            raise ConfigurationError(f"{name} has a blank key")
        if item is None:
            continue
        if not isinstance(item, str | int | float) or isinstance(item, bool):
            raise ConfigurationError(f"{name}[{key!r}] must be text or a number, got {item!r}")
        texts[str(key).strip()] = str(item)
    return texts
