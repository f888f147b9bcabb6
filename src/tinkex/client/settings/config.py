"""Settings of a client.

Each comes from an argument, else `configure()`, else the environment, else a default.

A Config is complete when it is made. Requests read nothing else, so clients of several tenants can
share a process.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tinkex.client.settings import environment
from tinkex.client.settings.credentials import stored_key
from tinkex.client.settings.delays import Delays
from tinkex.client.settings.setting_forms import (
    PollBackoff,
    backoff_form,
    first_given,
    is_number,
    pool_sizes_form,
    proxy_form,
    proxy_headers_form,
    recovery_form,
    require,
    sizes_form,
    texts_form,
    words_form,
)
from tinkex.errors import ConfigurationError
from tinkex.recovery.policies import RecoveryPolicy
from tinkex.wire.redacted_http import REDACTED

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OWN_TAG = "tinkex-python"
KEY_PREFIX, TOKEN_PREFIX = "tml-", "eyJ"
PYTHON_TIMEOUT, PYTHON_MAX_RETRIES = 60.0, 10
BEAM_TIMEOUT, BEAM_MAX_RETRIES = 120.0, 2
PARITY_PRESETS: dict[str, dict[str, Any]] = {
    "python": {"timeout": PYTHON_TIMEOUT, "max_retries": PYTHON_MAX_RETRIES},
    "beam": {"timeout": BEAM_TIMEOUT, "max_retries": BEAM_MAX_RETRIES},
}
"""Defaults of the two older SDKs, the official one and the Elixir one."""
LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
FIRST_POLL_DELAY, MOST_POLL_DELAY = 1.0, 30.0
CLIENT_METHODS = ("send", "stream", "close")


def is_embedded(base_url: str) -> bool:
    """Tell whether a base URL is `local` or `local:NAME`, a backend in this process.

    Args:
        base_url: The address.

    Returns:
        True for `local`, and for names that begin with `local:`.

    Example:
        >>> is_embedded("local"), is_embedded("http://127.0.0.1:8000")
        (True, False)
    """
    return base_url == LOCAL or base_url.startswith(f"{LOCAL}:")


def is_address(base_url: str) -> bool:
    """Tell whether a base URL is valid: http or https, a host, no password.

    Args:
        base_url: The address.

    Returns:
        True if it is.

    Example:
        >>> is_address("https://tinker.example.org"), is_address("tinker.example.org")
        (True, False)
    """
    try:
        parts = urlsplit(base_url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and "@" not in parts.netloc
        )
    except ValueError:
        return False


def is_open_address(base_url: str) -> bool:
    """Tell whether a base URL needs no key, because it stays on this machine.

    Args:
        base_url: The address.

    Returns:
        True for embedded backends and loopback.

    Example:
        >>> is_open_address("http://127.0.0.1:8000"), is_open_address("https://tinker.example.org")
        (True, False)
    """
    return is_embedded(base_url) or (
        is_address(base_url) and urlsplit(base_url).hostname in LOOPBACK
    )


def mask_api_key(key: str | None) -> str | None:
    """Return the first and last characters of a key, or stars if it is short.

    Args:
        key: The key, if there is one.

    Returns:
        The text, or None without a key.

    Example:
        >>> mask_api_key("tml-abcdef123456")
        'tml-ab...3456'
    """
    if key is None:
        return None
    return "*" * len(key) if len(key) <= 4 else f"{key[: min(6, len(key) - 2)]}...{key[-4:]}"


def poll_delay(policy: PollBackoff | None, number: int) -> float:
    """Return the seconds to wait before a failing server is polled again.

    Args:
        policy: The policy of the waits; None for no wait.
        number: The number of polls so far.

    Returns:
        Seconds.

    Example:
        >>> [poll_delay(("exponential", 0.5, 3), number) for number in range(4)]
        [0.5, 1.0, 2.0, 3.0]
    """
    if policy is None:
        return 0.0
    if callable(policy):
        seconds = policy(number)
        return float(seconds) if is_number(seconds) and 0 <= seconds < math.inf else 0.0
    first, most = (FIRST_POLL_DELAY, MOST_POLL_DELAY) if isinstance(policy, str) else policy[1:]
    return Delays(first, most, low=1.0).after(number + 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """Settings of a client. Times are in seconds; secrets are masked in the repr.

    Every client has connections of its own, as many as `pool_sizes` says, so clients may have
    different base URLs.

    Example:
        >>> config = Config(base_url="local", timeout=30.0, max_retries=2)
        >>> with ServiceClient(config=config) as service:
        ...     client = service.create_lora_training_client("tinkex/tiny").result()
    """

    base_url: str
    api_key: str | None = None
    credential_cmd: str | None = None
    """A shell command that prints the credential; it runs if there is no key."""
    project_id: str | None = None
    user_metadata: Mapping[str, str] | None = None
    tags: tuple[str, ...] = (OWN_TAG,)
    feature_gates: tuple[str, ...] = ("async_sampling",)
    """Kept for programs that read them; they are not sent and have no effect."""
    timeout: float = PYTHON_TIMEOUT
    """Seconds an ordinary request may take."""
    max_retries: int | None = None
    """The most retries of a request; None for no limit but `patience`."""
    patience: float = 300.0
    """Seconds during which a request is retried."""
    first_contact_patience: float = 10.0
    """The same for the first request: a wrong address should fail soon."""
    poll_backoff: PollBackoff | None = None
    """The wait of polls while the server fails; see `poll_delay`."""
    default_headers: Mapping[str, str] = field(default_factory=dict)
    default_query: Mapping[str, str] = field(default_factory=dict)
    user_agent: str | None = None
    """The User-Agent header, in place of that of tinkex."""
    cf_access_client_id: str | None = None
    cf_access_client_secret: str | None = None
    proxy: str | None = None
    """A URL with a port, or a tuple (scheme, host, port, options)."""
    proxy_headers: tuple[tuple[str, str], ...] = ()
    pool_sizes: Mapping[str, int] = field(default_factory=dict)
    """Connections by class of traffic; other classes have those of `POOL_SIZES`."""
    http_client: str | Callable[[Config], Any] | None = None
    """A function that makes the object which sends requests, or its name, "module:callable"; see
    `make_http_client`."""
    telemetry: bool = True
    log_level: str | None = None
    """debug, info, warn or error. Only `configure()` and TINKER_LOG have an effect, because all
    clients share one logger."""
    otel_propagate: bool = False
    """Send the context of the current trace with requests."""
    circuit_breaker: bool = False
    """Stop calls to an endpoint that keeps failing, for half a minute; see
    `ServiceClient.circuit_breakers`."""
    dump_headers: bool = False
    """Log every request with its (redacted) headers, at level INFO."""
    recovery: RecoveryPolicy | Mapping[str, Any] | None = None
    """The default policy of monitors; see `tinkex.recovery`."""

    def __post_init__(self) -> None:
        """Check all settings, the address first, and bring each into one form."""
        if not is_embedded(self.base_url) and not is_address(self.base_url):
            shown = self.base_url.rpartition("@")[2]
            raise ConfigurationError(
                f"invalid base_url: {shown!r} is no address that begins with http:// or https:// "
                "and holds no password",
                hint='give a full URL such as http://127.0.0.1:8000, or "local"',
            )
        known = not self.api_key or self.api_key.startswith((KEY_PREFIX, TOKEN_PREFIX))
        if not known and not is_open_address(self.base_url):
            raise ConfigurationError(
                "api_key must start with the 'tml-' prefix, or be a token (eyJ…)",
                hint="check TINKER_API_KEY, or the api_key that was passed",
            )
        self._check_kinds()
        forms = {
            "poll_backoff": backoff_form(self.poll_backoff),
            "tags": words_form("tags", self.tags),
            "feature_gates": words_form("feature_gates", self.feature_gates),
            "proxy": proxy_form(self.proxy),
            "proxy_headers": proxy_headers_form(self.proxy_headers),
            "default_headers": texts_form("default_headers", self.default_headers),
            "default_query": texts_form("default_query", self.default_query),
            "pool_sizes": pool_sizes_form(self.pool_sizes),
            "recovery": recovery_form(self.recovery),
        }
        for name, value in forms.items():
            object.__setattr__(self, name, value)

    def _check_kinds(self) -> None:
        require(
            is_number(self.timeout) and 0 < self.timeout < math.inf,
            f"timeout must be a positive integer or fraction of seconds, got {self.timeout!r}",
        )
        retries = 0 if self.max_retries is None else self.max_retries
        require(
            isinstance(retries, int) and is_number(retries) and retries >= 0,
            f"max_retries must be a non-negative integer, got {self.max_retries!r}",
        )
        for name in ("patience", "first_contact_patience"):
            seconds = getattr(self, name)
            require(
                is_number(seconds) and seconds >= 0,
                f"{name} must be a number of seconds, 0 or more, got {seconds!r}",
            )
        for name in ("telemetry", "otel_propagate", "circuit_breaker", "dump_headers"):
            flag = getattr(self, name)
            require(isinstance(flag, bool), f"{name} must be True or False, got {flag!r}")
        for name in ("project_id", "user_agent"):
            value = getattr(self, name)
            is_text = isinstance(value, str) and bool(value.strip())
            require(value is None or is_text, f"{name} must not be blank")
        require(
            self.log_level is None or self.log_level in LOG_LEVELS,
            f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}",
        )
        require(
            self.user_metadata is None or isinstance(self.user_metadata, Mapping),
            f"user_metadata must be a mapping, got {self.user_metadata!r}",
        )
        named = isinstance(self.http_client, str) and all(self.http_client.partition(":"))
        require(
            self.http_client is None or named or callable(self.http_client),
            _client_rule(f"{self.http_client!r} is neither callable nor 'module:callable'"),
        )

    @classmethod
    def resolve(cls, **explicit: Any) -> Config:
        """Fill each field from the first tier that has a value; None is no value.

        Args:
            explicit: The first tier, by names of fields; also `parity_mode`.

        Returns:
            A complete Config.

        Raises:
            ConfigurationError: There is no address, or a setting is wrong.
            TypeError: There is no setting of that name.

        Example:
            >>> Config.resolve(base_url="local", timeout=30).timeout
            30
        """
        _check_names(explicit)
        blank = {
            name for name in ("base_url", "api_key") if not str(explicit.get(name) or "").strip()
        }
        given = {name: value for name, value in explicit.items() if name not in blank}
        tiers = given, _defaults, environment.snapshot()
        settings = first_given(*tiers)
        if (mode := settings.pop("parity_mode", None)) is not None:
            settings = PARITY_PRESETS[environment.PARITY.get(str(mode), "python")] | settings
        settings["base_url"] = _address(settings)
        if "tags" in settings:
            settings["tags"] = (
                OWN_TAG,
                *(tag for tag in words_form("tags", settings["tags"]) if tag != OWN_TAG),
            )
        if "pool_sizes" in settings:
            settings["pool_sizes"] = first_given(
                *(sizes_form(tier.get("pool_sizes")) for tier in tiers)
            )
        config = cls(**settings)
        apply_log_level()
        return config

    @property
    def proxy_url(self) -> str | None:
        """The proxy without its name and password."""
        if self.proxy is None:
            return None
        parts = urlsplit(self.proxy)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def proxy_authorization(self) -> dict[str, str]:
        """The headers for the proxy, else the name and password of its URL as a header."""
        if self.proxy_headers:
            return dict(self.proxy_headers)
        account = urlsplit(self.proxy).netloc.rpartition("@")[0] if self.proxy else ""
        if not account:
            return {}
        return {
            "Proxy-Authorization": "Basic " + base64.b64encode(unquote(account).encode()).decode()
        }

    def make_http_client(self) -> Any:
        """Make the object that sends requests, with the function in `http_client`.

        Returns:
            An object with `send`, `stream` and `close`; None if `http_client` is not set.

        Raises:
            ConfigurationError: There is no such function, or its object lacks a method.

        Example:
            >>> from tinkex.client.http.http_exchange import HttpExchange
            >>> counting = lambda config: HttpExchange(config.base_url)  # or a subclass
            >>> Config(base_url="http://127.0.0.1:8000", http_client=counting).make_http_client()
            <tinkex.client.http.http_exchange.HttpExchange object at ...>
        """
        factory: Any = self.http_client
        if isinstance(factory, str):
            module, _, member = factory.partition(":")
            try:
                factory = getattr(import_module(module), member)
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(
                    _client_rule(f"{self.http_client!r} is not there: {error}")
                ) from error
        if factory is None:
            return None
        client = factory(self)
        lacking = [name for name in CLIENT_METHODS if not callable(getattr(client, name, None))]
        require(not lacking, _client_rule(f"{type(client).__name__} lacks {', '.join(lacking)}"))
        return client

    def __repr__(self) -> str:
        shown = environment.redact({item.name: getattr(self, item.name) for item in fields(self)})
        shown["api_key"] = mask_api_key(self.api_key)
        # the names of secret headers vary, so no value is shown
        shown["default_headers"] = dict.fromkeys(self.default_headers, REDACTED)
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


_defaults: dict[str, Any] = {}
_applied_levels: list[int] = []


def configure(**defaults: Any) -> None:
    """Set defaults for all later clients of this process.

    An argument of a client comes before them, the environment after them. A call without arguments
    removes them.

    Args:
        defaults: Settings, by names of Config's fields; also `parity_mode`.

    Raises:
        TypeError: There is no setting of that name.

    Example:
        >>> configure(timeout=30)
        >>> configure()
    """
    _check_names(defaults)
    if not defaults:
        _defaults.clear()
    _defaults.update(defaults)


def _check_names(settings: Mapping[str, Any]) -> None:
    known = {item.name for item in fields(Config)} | {"parity_mode"}
    if unknown := settings.keys() - known:
        raise TypeError(f"unknown setting {min(unknown)!r}; known are {', '.join(sorted(known))}")


def apply_log_level() -> None:
    """Set the level of the "tinkex" logger: that of `configure()`, else TINKER_LOG's.

    This happens once, with the first client. If the program has not set up logging, records are
    written to standard error.
    """
    chosen = _defaults.get("log_level") or environment.level("TINKER_LOG")
    if chosen not in LOG_LEVELS or _applied_levels:
        return
    _applied_levels.append(LOG_LEVELS[chosen])
    logger = logging.getLogger("tinkex")
    logger.setLevel(LOG_LEVELS[chosen])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        # silent once the program sets up its own
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)


def maybe_set_level(level: str | None) -> None:
    """Set the level of the "tinkex" logger: debug, info, warn or error.

    Args:
        level: The level, or None.

    Raises:
        ValueError: There is no such level.

    Example:
        >>> maybe_set_level("info")
    """
    if level is None:
        return
    chosen = environment.level("level", {"level": level})
    if chosen is None:
        raise ValueError(f"level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    logging.getLogger("tinkex").setLevel(LOG_LEVELS[chosen])


def _address(settings: dict[str, Any]) -> str:
    """Return the address; raise if it needs a credential and there is none."""
    url = str(settings.get("base_url") or "").rstrip("/")
    key = str(settings.get("api_key") or "").strip() or None
    if key is None and not settings.get("credential_cmd") and not is_embedded(url):
        key = stored_key(server=url or None)
        if key is None and url and not is_open_address(url):
            key = stored_key()
    settings["api_key"] = key
    credential = key or settings.get("credential_cmd")
    if not url and not credential:
        raise ConfigurationError(
            "api_key is required: no API key and no base URL, so there is nothing to connect to",
            hint="set TINKER_API_KEY (or pass api_key=…) to use the hosted service, "
            'or pass base_url="local" (or set TINKER_BASE_URL=local) to run on this machine '
            "without a key",
        )
    url = url or HOSTED_URL
    if (is_embedded(url) or is_address(url)) and not credential and not is_open_address(url):
        raise ConfigurationError(
            f"api_key is required: {url} needs an API key",
            hint='set TINKER_API_KEY or pass api_key=…; base_url="local" needs none',
        )
    return url


def _client_rule(reason: str) -> str:
    return (
        "http_client must implement send, stream and close, as what a callable makes of a "
        f"Config; {reason}"
    )
