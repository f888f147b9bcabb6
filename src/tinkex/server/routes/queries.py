"""Read parameters of queries, and convert values for lists."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.server.calls import Call
from tinkex.server.database.interface import user_urn
from tinkex.server.http_errors import Refusal
from tinkex.types.search_requests import UserSearchOwner

SCOPES = ("owned", "accessible")
MOST_DIGITS = 15


def whole_number(
    call: Call, name: str, default: int, *, least: int = 0, most: int | None = None
) -> int:
    """Return a number of the query; refuse one out of range."""
    text = call.query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    if not is_number or not least <= int(text) <= (int(text) if most is None else most):
        span = f"from {least} on" if most is None else f"from {least} to {most}"
        raise Refusal(400, f"{name} must be a whole number {span}, got {text[:20]!r}")
    return int(text)


def choice(call: Call, name: str, options: Sequence[str]) -> str:
    """Return a parameter that is one of some words, the first of them by default."""
    text = call.query.get(name, options[0])
    if text not in options:
        raise Refusal(400, f"{name} must be one of {', '.join(options)}, got {text!r}")
    return text


def is_sought(owner: str, wanted: object) -> bool:
    """Return whether a search for the objects of some owners includes those of one."""
    return not isinstance(wanted, UserSearchOwner) or user_urn(owner) in wanted.owner_urns


def moment(seconds: float = 0, *, microseconds: int = 0) -> dt.datetime:
    """Return a time since 1970; a whole number of microseconds stays exact."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC) + dt.timedelta(microseconds=microseconds)


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as lists show it: other values than texts become JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }
