"""Forms of settings: each is checked, and brought from its several forms into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit, urlunsplit

from tinkex.errors import ConfigurationError
from tinkex.recovery.policies import RecoveryPolicy

POOL_SIZES = {"session": 10, "train": 16, "sample": 1000, "poll": 0, "rest": 50, "telemetry": 5}
"""Connections for each class of traffic, so that one cannot starve another; 0 sets no limit."""
PROXY_PORTS = {"http": 80, "https": 443}
PROXY_FORMS = (
    "proxy must be a URL string or a tuple (scheme, host, port, options), as in "
    "http://user:pass@host:8080"
)

PollBackoff: TypeAlias = str | tuple[str, float, float] | Callable[[int], float]
"""The wait of polls while the server fails: "exponential", ("exponential", first, most), or a
function from the number of polls to seconds."""


def is_number(value: Any) -> bool:
    """Tell whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(holds: bool, message: str) -> None:
    """Raise a ConfigurationError unless a condition holds."""
    if not holds:
        raise ConfigurationError(message)


def words_form(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of text as a tuple."""
    is_list = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
    require(is_list, f"{name} must be a list of text, got {value!r}")
    return tuple(value)


def backoff_form(value: Any) -> PollBackoff | None:
    """Return a policy of polls in one of its forms."""
    if value is None or value is False or value == "none":
        return None
    if value is True or value == "exponential":
        return "exponential"
    if callable(value):
        policy: Callable[[int], float] = value
        return policy
    if isinstance(value, list | tuple) and len(value) == 3 and value[0] == "exponential":
        first, most = value[1:]
        if is_number(first) and is_number(most) and 0 < first <= most < math.inf:
            return ("exponential", first, most)
    raise ConfigurationError(
        'poll_backoff must be None, "exponential", ("exponential", first, most) in seconds, or a '
        "callable; "
        f"got {value!r}"
    )


def proxy_form(value: Any) -> str | None:
    """Return a proxy as a URL with its port; errors never show its password."""
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
    require(
        not parts.scheme or parts.scheme in PROXY_PORTS,
        "proxy URL scheme must be http or https, as in http://user:pass@host:8080",
    )
    require(bool(parts.scheme and parts.hostname and port != 0), PROXY_FORMS)
    place = parts.netloc if port else f"{parts.netloc.rstrip(':')}:{PROXY_PORTS[parts.scheme]}"
    return urlunsplit((parts.scheme, place, parts.path, "", ""))


def _proxy_of_parts(scheme: Any, host: Any, port: Any, options: Any = None) -> str:
    is_host = isinstance(host, str) and host != "" and quote(host, safe=":") == host
    require(
        scheme in PROXY_PORTS and is_host,
        f"{PROXY_FORMS}; scheme must be http or https, host a name or an address",
    )
    port = PROXY_PORTS[scheme] if port is None else port
    is_port = isinstance(port, int) and is_number(port) and 1 <= port <= 65535
    require(is_port, f"{PROXY_FORMS}; port must be 1 to 65535")
    require(not options, f"{PROXY_FORMS}; no options are known: headers go into proxy_headers")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def proxy_headers_form(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the headers of a proxy as pairs of text."""
    rule = "proxy_headers must be a list of (name, value) pairs"
    require(isinstance(value, list | tuple), rule)
    for pair in value:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        require(is_pair and all(isinstance(part, str) for part in pair), f"{rule} of text")
    return tuple((name, text) for name, text in value)


def sizes_form(value: Any) -> dict[str, Any]:
    """Return a mapping of pool sizes; an empty one for None."""
    if value is None:
        return {}
    require(
        isinstance(value, Mapping),
        f"pool_sizes must be a mapping of traffic to connections, got {value!r}",
    )
    return dict(value)


def pool_sizes_form(value: Any) -> dict[str, int]:
    """Return the sizes of all pools: the given ones, else the default ones."""
    given = sizes_form(value)
    for name, size in given.items():
        require(
            name in POOL_SIZES,
            f"pool_sizes has no class {name!r}; there are {', '.join(POOL_SIZES)}",
        )
        require(
            isinstance(size, int) and is_number(size) and size >= 0,
            f"pool_sizes[{name!r}] must be a number of connections or 0, got {size!r}",
        )
    return POOL_SIZES | given


def texts_form(name: str, value: Any) -> dict[str, str]:
    """Return a map of text: trim keys, write numbers as text, drop None."""
    try:
        items = dict(value).items()
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{name} must be a mapping of text to text, got a {type(value).__name__}"
        ) from None
    texts = {}
    for key, item in items:
        require(bool(str(key).strip()), f"{name} has a blank key")
        if item is None:
            continue
        require(
            isinstance(item, str) or is_number(item),
            f"{name}[{key!r}] must be text or a number, got a {type(item).__name__}",
        )
        texts[str(key).strip()] = str(item)
    return texts


def recovery_form(given: RecoveryPolicy | Mapping[str, Any] | None) -> RecoveryPolicy | None:
    """Return a policy of recovery from its mapping."""
    try:
        return None if given is None else RecoveryPolicy.of(given)
    except TypeError as error:
        raise ConfigurationError(f"recovery: {error}") from None


def first_given(*tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings; of several values for a name, take the first that is not None."""
    merged: dict[str, Any] = {}
    for tier in tiers:
        merged = {**{name: value for name, value in tier.items() if value is not None}, **merged}
    return merged
