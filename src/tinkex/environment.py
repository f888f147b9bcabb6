"""Settings as the environment gives them: trimmed, blank means unset; every reader takes another mapping for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off"}
PARITY = {"python": "python", "Python": "python", "PYTHON": "python", "beam": "beam", "BEAM": "beam"} | {
    "elixir": "beam",
    "ELIXIR": "beam",
}


def text(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """A trimmed value; None when unset or blank."""
    value = (os.environ if environment is None else environment).get(name, "").strip()
    return value or None


def flag(name: str, environment: Mapping[str, str] | None = None) -> bool | None:
    """A yes or no; None when unset or neither."""
    value = (text(name, environment) or "").lower()
    return True if value in TRUE else False if value in FALSE else None


def words(name: str, environment: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """A comma-separated list without its blanks; None when nothing is left."""
    parts = tuple(part.strip() for part in (text(name, environment) or "").split(",") if part.strip())
    return parts or None


def mapping(name: str, environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """A JSON object of text; None when unset, not JSON or not an object."""
    try:
        value = json.loads(text(name, environment) or "null")
    except json.JSONDecodeError:
        return None
    if not isinstance(value, dict):
        return None
    return {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items() if item is not None}


def pairs(name: str, environment: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...] | None:
    """A JSON array of [name, value] pairs; what is not one is left out."""
    try:
        value = json.loads(text(name, environment) or "null")
    except json.JSONDecodeError:
        return None
    if not isinstance(value, list):
        return None
    return tuple(
        (item[0], item[1])
        for item in value
        if isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) for part in item)
    )


def choice(name: str, choices: Mapping[str, str], environment: Mapping[str, str] | None = None) -> str | None:
    """One of several words; None when unset or another."""
    return choices.get(text(name, environment) or "")


def snapshot(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Everything the environment says, by the names of Config's fields; None where it says nothing."""
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
    }
