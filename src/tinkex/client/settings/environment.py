"""Settings of the environment.

Values are trimmed, and a blank one counts as unset. Every reader takes another mapping, for tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.wire.redacted_http import REDACTED, redact_headers, redact_url

Variables: TypeAlias = Mapping[str, str] | None
"""A mapping to read in place of the environment."""
TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off"}
PARITY = {
    **dict.fromkeys(("python", "Python", "PYTHON"), "python"),
    **dict.fromkeys(("beam", "BEAM", "elixir", "ELIXIR"), "beam"),
}

LEVELS = {"debug": "debug", "info": "info", "warn": "warn", "warning": "warn", "error": "error"}
POOL_SIZE, POOL_COUNT = 50, 20
"""The connections of a pool, and the number of pools, if the environment names only one."""


def text(name: str, environment: Variables = None) -> str | None:
    """Return a trimmed value; None if it is unset or blank."""
    value = (os.environ if environment is None else environment).get(name, "").strip()
    return value or None


def flag(name: str, environment: Variables = None) -> bool | None:
    """Return a yes or no; None if it is unset or neither."""
    value = (text(name, environment) or "").lower()
    return True if value in TRUE else False if value in FALSE else None


def words(name: str, environment: Variables = None) -> tuple[str, ...] | None:
    """Return a comma-separated list without blanks; None if it is empty."""
    parts = tuple(
        part.strip() for part in (text(name, environment) or "").split(",") if part.strip()
    )
    return parts or None


def _json(name: str, environment: Variables) -> Any:
    """Return a JSON value; None if it is unset or malformed."""
    try:
        return json.loads(text(name, environment) or "null")
    except json.JSONDecodeError:
        return None


def mapping(name: str, environment: Variables = None) -> dict[str, str] | None:
    """Return a JSON object of text; None if it is unset or not one."""
    value = _json(name, environment)
    if not isinstance(value, dict):
        return None
    return {
        key: item if isinstance(item, str) else json.dumps(item)
        for key, item in value.items()
        if item is not None
    }


def pairs(name: str, environment: Variables = None) -> tuple[tuple[str, str], ...] | None:
    """Return a JSON array of [name, value] pairs, without other items."""
    value = _json(name, environment)
    if not isinstance(value, list):
        return None
    return tuple(
        (item[0], item[1])
        for item in value
        if isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) for part in item)
    )


def choice(name: str, choices: Mapping[str, str], environment: Variables = None) -> str | None:
    """Return one of several words; None if it is unset or another."""
    return choices.get(text(name, environment) or "")


def positive(name: str, environment: Variables = None) -> int | None:
    """Return a whole number above zero; None if it is unset or something else."""
    value = text(name, environment) or ""
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None


def level(name: str, environment: Variables = None) -> str | None:
    """Return a level of logging: debug, info, warn or error; else None."""
    return LEVELS.get((text(name, environment) or "").lower())


def poll_backoff(environment: Variables = None) -> str | None:
    """Return "exponential" if polls of a failing server shall back off, else None."""
    name = "TINKEX_POLL_BACKOFF"
    chosen = flag(name, environment) or (text(name, environment) or "").lower() == "exponential"
    return "exponential" if chosen else None


def pool_sizes(environment: Variables = None) -> dict[str, int] | None:
    """Return the connections for sampling: TINKEX_POOL_SIZE times TINKEX_POOL_COUNT."""
    size = positive("TINKEX_POOL_SIZE", environment)
    count = positive("TINKEX_POOL_COUNT", environment)
    if size is None and count is None:
        return None
    return {"sample": (size or POOL_SIZE) * (count or POOL_COUNT)}


def http_client(environment: Variables = None) -> str | None:
    """Return the name of a client factory, "module:callable", if its module exists."""
    name = text("TINKEX_HTTP_CLIENT", environment) or ""
    module, colon, member = name.partition(":")
    try:
        found = importlib.util.find_spec(module) if module and colon and member else None
    except (ImportError, ValueError):
        return None
    return name if found else None


def hf_token(environment: Variables = None) -> str | None:
    """Return the token for Hugging Face: HF_TOKEN, else HUGGING_FACE_HUB_TOKEN."""
    return text("HF_TOKEN", environment) or text("HUGGING_FACE_HUB_TOKEN", environment)


def hf_home(environment: Variables = None) -> Path:
    """Return the folder of Hugging Face: HF_HOME, else one in the user's cache."""
    cache = text("XDG_CACHE_HOME", environment) or "~/.cache"
    return Path(text("HF_HOME", environment) or f"{cache}/huggingface").expanduser()


def hf_token_path(environment: Variables = None) -> Path:
    """Return the path of the file with the token of a login to Hugging Face."""
    named = text("HF_TOKEN_PATH", environment)
    return Path(named).expanduser() if named else hf_home(environment) / "token"


def snapshot(environment: Variables = None) -> dict[str, object]:
    """Return the settings of the environment, by names of Config's fields."""
    return {
        "api_key": text("TINKER_API_KEY", environment),
        "base_url": text("TINKER_BASE_URL", environment),
        "project_id": text("TINKER_PROJECT_ID", environment),
        "credential_cmd": text("TINKER_CREDENTIAL_CMD", environment),
        "tags": words("TINKER_TAGS", environment),
        "cf_access_client_id": text("CLOUDFLARE_ACCESS_CLIENT_ID", environment),
        "cf_access_client_secret": text("CLOUDFLARE_ACCESS_CLIENT_SECRET", environment),
        "dump_headers": flag("TINKEX_DUMP_HEADERS", environment),
        "default_headers": mapping("TINKEX_DEFAULT_HEADERS", environment),
        "default_query": mapping("TINKEX_DEFAULT_QUERY", environment),
        "proxy": text("TINKEX_PROXY", environment),
        "proxy_headers": pairs("TINKEX_PROXY_HEADERS", environment),
        "parity_mode": choice("TINKEX_PARITY", PARITY, environment),
        "poll_backoff": poll_backoff(environment),
        "feature_gates": words("TINKER_FEATURE_GATES", environment),
        "telemetry": flag("TINKER_TELEMETRY", environment),
        "log_level": level("TINKER_LOG", environment),
        "otel_propagate": flag("TINKEX_OTEL_PROPAGATE", environment),
        "pool_sizes": pool_sizes(environment),
        "http_client": http_client(environment),
    }


def mask_secret(value: str | None) -> str | None:
    """Return the replacement of a secret in output; None stays None."""
    return None if value is None else REDACTED


def redact(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, such as a `snapshot`, without their secrets.

    Example:
        >>> redact({"api_key": "tml-1", "base_url": "local"})
        {'api_key': '[REDACTED]', 'base_url': 'local'}
    """
    shown = dict(settings)
    for name in ("api_key", "cf_access_client_secret", "credential_cmd"):
        if name in shown:
            shown[name] = mask_secret(shown[name])
    for name in ("default_headers", "default_query"):
        if shown.get(name):
            shown[name] = redact_headers(dict(shown[name]))
    if shown.get("proxy"):
        shown["proxy"] = redact_url(str(shown["proxy"]))
    if shown.get("proxy_headers"):
        shown["proxy_headers"] = tuple((name, REDACTED) for name, _ in shown["proxy_headers"])
    return shown
