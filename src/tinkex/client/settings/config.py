"""Settings of a client, from four tiers: the argument, else `configure()`, else the environment,
else the default.

A Config is complete when it is made: requests read nothing else, so that clients of several tenants
share a process.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from tinkex.client.settings import environment
from tinkex.client.settings.credentials import stored_key
from tinkex.client.settings.delays import Delays
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
"""Defaults of the two older SDKs, the official one's and the Elixir one's; without a parity mode,
ours apply."""
POOL_SIZES = {"session": 10, "train": 16, "sample": 1000, "poll": 0, "rest": 50, "telemetry": 5}
"""Connections for each class of traffic, so that one cannot starve another; 0: as many as there are
requests."""
LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
FIRST_POLL_DELAY, MOST_POLL_DELAY = 1.0, 30.0
PROXY_PORTS = {"http": 80, "https": 443}
PROXY_FORMS = (
    "proxy must be a URL string or a tuple (scheme, host, port, options), as in "
    "http://user:pass@host:8080"
)
CLIENT_METHODS = ("send", "stream", "close")

PollBackoff: TypeAlias = str | tuple[str, float, float] | Callable[[int], float]
"""How long polls wait while the server fails: "exponential", ("exponential", first, most), or
seconds by number."""


def is_embedded(base_url: str) -> bool:
    """Whether a base URL names a backend inside this process: `local`, or `local:NAME`.

    Args:
        base_url: The address.

    Returns:
        True for `local` and what begins with `local:`.

    Example:
        >>> is_embedded("local"), is_embedded("http://127.0.0.1:8000")
        (True, False)
    """
    return base_url == LOCAL or base_url.startswith(f"{LOCAL}:")


def is_address(base_url: str) -> bool:
    """Whether a base URL can be connected to: http or https, a host, a numeric port if any, and no
    password in it.

    Args:
        base_url: The address.

    Returns:
        Whether it has all of that.

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
    """Whether a base URL may be used without a key: it never leaves this machine.

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
    """A key that can be shown: its first and last few characters, or stars when it is short.

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
    """Seconds to wait before polling a failing server again, after so many polls; no policy means
    not at all.

    Args:
        policy: How long polls wait.
        number: How many polls there were.

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
        usable = (
            isinstance(seconds, int | float)
            and not isinstance(seconds, bool)
            and 0 <= seconds < math.inf
        )
        return float(seconds) if usable else 0.0
    first, most = (FIRST_POLL_DELAY, MOST_POLL_DELAY) if isinstance(policy, str) else policy[1:]
    return Delays(first, most, low=1.0).after(number + 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """What a client needs to know before its first request. Times are seconds; secrets are masked
    in the repr.

    A base URL other than the `configure()`d one costs nothing, and so is not warned of: every
    client has connections of its own, by `pool_sizes`.

    Example:
        >>> config = Config(base_url="local", timeout=30.0, max_retries=2)
        >>> with ServiceClient(config=config) as service:
        ...     client = service.create_lora_training_client("tinkex/tiny").result()
    """

    base_url: str
    api_key: str | None = None
    credential_cmd: str | None = None
    """A shell command whose output is the credential; run when one is needed, when there is no key.
    """
    project_id: str | None = None
    user_metadata: Mapping[str, str] | None = None
    tags: tuple[str, ...] = (OWN_TAG,)
    feature_gates: tuple[str, ...] = ("async_sampling",)
    """Kept for programs that ask for them; they are not sent, and nothing here depends on them."""
    timeout: float = PYTHON_TIMEOUT
    """Seconds an ordinary request may take."""
    max_retries: int | None = None
    """How often a request that failed for a passing reason is sent again; None: for as long as
    `patience` lasts."""
    patience: float = 300.0
    """Seconds during which it is."""
    first_contact_patience: float = 10.0
    """The same for the very first request: an address that is wrong should say so soon."""
    poll_backoff: PollBackoff | None = None
    """How long polls wait while the server fails; see `poll_delay`."""
    default_headers: Mapping[str, str] = field(default_factory=dict)
    default_query: Mapping[str, str] = field(default_factory=dict)
    user_agent: str | None = None
    """Sent in place of our own name."""
    cf_access_client_id: str | None = None
    cf_access_client_secret: str | None = None
    proxy: str | None = None
    """A URL; a tuple (scheme, host, port, options) is made into one. Its port is always written
    out."""
    proxy_headers: tuple[tuple[str, str], ...] = ()
    pool_sizes: Mapping[str, int] = field(default_factory=dict)
    """Connections by class of traffic; classes that are not named have those of `POOL_SIZES`."""
    http_client: str | Callable[[Config], Any] | None = None
    """What makes the object that requests go through, or its name, "module:callable"; see
    `make_http_client`."""
    telemetry: bool = True
    log_level: str | None = None
    """debug, info, warn or error. Only `configure()` and TINKER_LOG have an effect: there is one
    logger for all."""
    otel_propagate: bool = False
    """Send the current trace's context along with requests."""
    circuit_breaker: bool = False
    """Stop calling an endpoint that keeps failing, for half a minute; see
    `ServiceClient.circuit_breakers`."""
    dump_headers: bool = False
    """Log every request with its (redacted) headers, at level INFO."""
    recovery: RecoveryPolicy | Mapping[str, Any] | None = None
    """The policy of monitors that are given none; see `tinkex.recovery`."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, the address first; bring what has several forms into one."""
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
            "poll_backoff": _backoff_policy(self.poll_backoff),
            "tags": _words("tags", self.tags),
            "feature_gates": _words("feature_gates", self.feature_gates),
            "proxy": _proxy(self.proxy),
            "proxy_headers": _proxy_headers(self.proxy_headers),
            "default_headers": _texts("default_headers", self.default_headers),
            "default_query": _texts("default_query", self.default_query),
            "pool_sizes": _pool_sizes(self.pool_sizes),
            "recovery": _recovery(self.recovery),
        }
        for name, value in forms.items():
            object.__setattr__(self, name, value)

    def _check_kinds(self) -> None:
        if not _is_number(self.timeout) or not 0 < self.timeout < math.inf:
            raise ConfigurationError(
                f"timeout must be a positive integer or fraction of seconds, got {self.timeout!r}"
            )
        retries = 0 if self.max_retries is None else self.max_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(
                f"max_retries must be a non-negative integer, got {self.max_retries!r}"
            )
        for name in ("patience", "first_contact_patience"):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not seconds >= 0:
                raise ConfigurationError(
                    f"{name} must be a number of seconds, 0 or more, got {seconds!r}"
                )
        for name in ("telemetry", "otel_propagate", "circuit_breaker", "dump_headers"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        for name in ("project_id", "user_agent"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigurationError(f"{name} must not be blank")
        if self.log_level is not None and self.log_level not in LOG_LEVELS:
            raise ConfigurationError(
                f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}"
            )
        if self.user_metadata is not None and not isinstance(self.user_metadata, Mapping):
            raise ConfigurationError(f"user_metadata must be a mapping, got {self.user_metadata!r}")
        named = isinstance(self.http_client, str) and all(self.http_client.partition(":"))
        if self.http_client is not None and not named and not callable(self.http_client):
            raise ConfigurationError(
                _client_rule(f"{self.http_client!r} is neither callable nor 'module:callable'")
            )

    @classmethod
    def resolve(cls, **explicit: Any) -> Config:
        """Fill each field from the first tier that says something; None says nothing, False and
        empty do.

        Args:
            explicit: The first tier, by the names of the fields; also `parity_mode`.

        Returns:
            A complete Config.

        Raises:
            ConfigurationError: Nothing says where to go, or a setting makes no sense.
            TypeError: There is no setting of that name.

        Example:
            >>> Config.resolve(base_url="local", timeout=30).timeout
            30
        """
        known = {item.name for item in fields(cls)} | {"parity_mode"}
        if unknown := explicit.keys() - known:
            raise TypeError(
                f"unknown setting {min(unknown)!r}; known are {', '.join(sorted(known))}"
            )
        blank = {
            name for name in ("base_url", "api_key") if not str(explicit.get(name) or "").strip()
        }
        given = {name: value for name, value in explicit.items() if name not in blank}
        tiers = given, _defaults, environment.snapshot()
        settings = _first(*tiers)
        if (mode := settings.pop("parity_mode", None)) is not None:
            settings = PARITY_PRESETS[environment.PARITY.get(str(mode), "python")] | settings
        settings["base_url"] = _address(settings)
        if "tags" in settings:
            settings["tags"] = (
                OWN_TAG,
                *(tag for tag in _words("tags", settings["tags"]) if tag != OWN_TAG),
            )
        if "pool_sizes" in settings:
            settings["pool_sizes"] = _first(*(_sizes(tier.get("pool_sizes")) for tier in tiers))
        config = cls(**settings)
        apply_log_level()
        return config

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
        return {
            "Proxy-Authorization": "Basic " + base64.b64encode(unquote(account).encode()).decode()
        }

    def make_http_client(self) -> Any:
        """What `http_client` makes of this Config: an object with `send`, `stream` and `close`;
        None without one.

        Returns:
            The object, or None.

        Raises:
            ConfigurationError: There is no such callable, or what it makes lacks a method.

        Example:
            >>> from tinkex.client.http.http_exchange import HttpExchange
            >>> counting = lambda config: HttpExchange(config.base_url)  # or what derives from it
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
        if lacking := [
            name for name in CLIENT_METHODS if not callable(getattr(client, name, None))
        ]:
            raise ConfigurationError(
                _client_rule(f"{type(client).__name__} lacks {', '.join(lacking)}")
            )
        return client

    def __repr__(self) -> str:
        shown = environment.redact({item.name: getattr(self, item.name) for item in fields(self)})
        shown["api_key"] = mask_api_key(self.api_key)
        # names of gates vary: none is shown
        shown["default_headers"] = dict.fromkeys(self.default_headers, REDACTED)
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


_defaults: dict[str, Any] = {}
_applied_levels: list[int] = []


def configure(**defaults: Any) -> None:
    """Set defaults for every client made later in this process; an argument still wins, the
    environment does not.

    Called with nothing, it forgets them.

    Args:
        defaults: Settings, by the names of Config's fields; also `parity_mode`.

    Raises:
        TypeError: There is no setting of that name.

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


def apply_log_level() -> None:
    """Set the level of the "tinkex" logger to the `configure()`d one, else TINKER_LOG's; once, with
    the first client.

    Where a program has set up no logging at all, what the level lets through is written to standard
    error.
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
        # a program that sets up its own later has it all
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)


def maybe_set_level(level: str | None) -> None:
    """Set the level of the "tinkex" logger: debug, info, warn or error, as TINKER_LOG has them;
    None leaves it.

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


def _recovery(given: RecoveryPolicy | Mapping[str, Any] | None) -> RecoveryPolicy | None:
    try:
        return None if given is None else RecoveryPolicy.of(given)
    except TypeError as error:
        raise ConfigurationError(f"recovery: {error}") from None


def _first(*tiers: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tier in tiers:
        merged = {**{name: value for name, value in tier.items() if value is not None}, **merged}
    return merged


def _address(settings: dict[str, Any]) -> str:
    """Where to go; and a check that there is a credential where one is needed."""
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _client_rule(reason: str) -> str:
    return (
        "http_client must implement send, stream and close, as what a callable makes of a "
        f"Config; {reason}"
    )


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ConfigurationError(f"{name} must be a list of text, got {value!r}")
    return tuple(value)


def _backoff_policy(value: Any) -> PollBackoff | None:
    if value is None or value is False or value == "none":
        return None
    if value is True or value == "exponential":
        return "exponential"
    if callable(value):
        policy: Callable[[int], float] = value
        return policy
    if isinstance(value, list | tuple) and len(value) == 3 and value[0] == "exponential":
        first, most = value[1:]
        if _is_number(first) and _is_number(most) and 0 < first <= most < math.inf:
            return ("exponential", first, most)
    raise ConfigurationError(
        'poll_backoff must be None, "exponential", ("exponential", first, most) in seconds, or a '
        "callable; "
        f"got {value!r}"
    )


def _proxy(value: Any) -> str | None:
    """A proxy as a URL with its port. Errors do not show the value: there may be a password in it."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = _proxy_of_parts(*value) if len(value) in (3, 4) else None
    if not isinstance(value, str):
        raise ConfigurationError(PROXY_FORMS)
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ConfigurationError(PROXY_FORMS) from None
    if parts.scheme and parts.scheme not in PROXY_PORTS:
        raise ConfigurationError(
            "proxy URL scheme must be http or https, as in http://user:pass@host:8080"
        )
    if not parts.scheme or not parts.hostname or port == 0:
        raise ConfigurationError(PROXY_FORMS)
    place = parts.netloc if port else f"{parts.netloc.rstrip(':')}:{PROXY_PORTS[parts.scheme]}"
    return urlunsplit((parts.scheme, place, parts.path, "", ""))


def _proxy_of_parts(scheme: Any, host: Any, port: Any, options: Any = None) -> str:
    if (
        scheme not in PROXY_PORTS
        or not isinstance(host, str)
        or not host
        or quote(host, safe=":") != host
    ):
        raise ConfigurationError(
            f"{PROXY_FORMS}; scheme must be http or https, host a name or an address"
        )
    port = PROXY_PORTS[scheme] if port is None else port
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigurationError(f"{PROXY_FORMS}; port must be 1 to 65535")
    if options:
        raise ConfigurationError(
            f"{PROXY_FORMS}; no options are known: headers go into proxy_headers"
        )
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _proxy_headers(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list | tuple):
        raise ConfigurationError("proxy_headers must be a list of (name, value) pairs")
    for pair in value:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise ConfigurationError("proxy_headers must be a list of (name, value) pairs of text")
    return tuple((name, text) for name, text in value)


def _sizes(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"pool_sizes must be a mapping of traffic to connections, got {value!r}"
        )
    return dict(value)


def _pool_sizes(value: Any) -> dict[str, int]:
    """The sizes of all pools, those given before the usual ones."""
    given = _sizes(value)
    for name, size in given.items():
        if name not in POOL_SIZES:
            raise ConfigurationError(
                f"pool_sizes has no class {name!r}; there are {', '.join(POOL_SIZES)}"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigurationError(
                f"pool_sizes[{name!r}] must be a number of connections or 0, got {size!r}"
            )
    return POOL_SIZES | given


def _texts(name: str, value: Any) -> dict[str, str]:
    """A map of text from a map or pairs: keys trimmed, numbers written out, absent values left out."""
    try:
        items = dict(value).items()
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{name} must be a mapping of text to text, got a {type(value).__name__}"
        ) from None
    texts = {}
    for key, item in items:
        if not str(key).strip():
            raise ConfigurationError(f"{name} has a blank key")
        if item is None:
            continue
        if not isinstance(item, str | int | float) or isinstance(item, bool):
            raise ConfigurationError(
                f"{name}[{key!r}] must be text or a number, got a {type(item).__name__}"
            )
        texts[str(key).strip()] = str(item)
    return texts
