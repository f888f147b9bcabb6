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


def words_form(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of text as a tuple."""
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ConfigurationError(f"{name} must be a list of text, got {value!r}")
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


def proxy_headers_form(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the headers of a proxy as pairs of text."""
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


def sizes_form(value: Any) -> dict[str, Any]:
    """Return a mapping of pool sizes; an empty one for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"pool_sizes must be a mapping of traffic to connections, got {value!r}"
        )
    return dict(value)


def pool_sizes_form(value: Any) -> dict[str, int]:
    """Return the sizes of all pools: the given ones, else the default ones."""
    given = sizes_form(value)
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
