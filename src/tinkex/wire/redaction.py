"""Redaction of reports: plain, small data without anything that looks like a secret.

It removes too much rather than too little: a missing word does no harm, and a key that was sent
cannot be recalled.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tinkex.client.settings.config import Config
from tinkex.types.record import Record, to_builtins
from tinkex.wire.redacted_http import REDACTED, forms_of, is_secret_name as is_secret_name

MOST_TEXT = 4_096
"""Characters of one text; of a longer one, the beginning is kept."""
MOST_TRACEBACK = 16_384
"""Characters of a traceback, of which the end is kept."""
MOST_ITEMS = 64
"""Keys of one mapping, items of one list."""
MOST_DEPTH = 6
MOST_CHARACTERS = 32_768
"""Characters of one event's data, keys and values together."""
SHORTEST_SECRET = 4
"""A known secret that is shorter is not looked for: it would be found in every other word."""
CUT = "…"

# A name that says what follows it: in headers, queries, settings, and the printed forms of mappings
# and of pairs. But after `get_api_key:`, which is an operation, a message follows.
_NAMED = (
    r"(?:(?<!\bget_)(?<!\bdelete_)api[-_]?key|access[-_]?key(?:[-_]?id)?|private[-_]?key|secret"
    r"|passw(?:or)?d|passphrase|credentials?"
    r"|(?:access|auth|bearer|csrf|hf|id|refresh|security|session)[-_]?token|\btoken|\bjwt"
    r"|\bsig(?:nature)?)"
)
_WHOLE_LINE = r"(?:authorization|cookie)"
_MARK = r"(?:\\*[\"']\]?\s{0,8},|\\*[\"']?\]?\s{0,8}(?:=>|=|(?P<colon>:)))\s{0,8}"
_QUOTED = r"b?(?P<quote>\\*[\"'])(?:\\.|(?!(?P=quote)).){0,4096}"
_LINE = r"[^\r\n]{1,4096}"
_WORD = r"[^\s\"',;&}\])]{1,4096}"

_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-F]{2}))tml-[\w.~+/=-]+", re.I), REDACTED),
    # tml- and hf_ in base64
    (re.compile(r"(?<![A-Za-z0-9+/])(?:dG1sL|aGZf)[A-Za-z0-9+/_-]{12,}={0,2}"), REDACTED),
    (re.compile(r"eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"), REDACTED),
    (re.compile(r"(?<![A-Za-z0-9])(?:hf_|sk-|gh[pousr]_|AKIA)[A-Za-z0-9_-]{12,}"), REDACTED),
)
"""Shapes of keys, found anywhere in a text."""

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = _SHAPES + tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        # addresses: who is asked in whose name, and everything a signature could be in
        (r"://[^/?#\s\"'<>]{1,1024}@", 0, f"://{REDACTED}@"),
        (r"(://[^\s\"'<>/:]{1,256}:)[^\s\"'<>]{1,256}@", 0, rf"\g<1>{REDACTED}@"),
        (r"(://[^\s\"'<>?]{1,2048}\?)[^\s\"'<>]+", 0, rf"\g<1>{REDACTED}"),
        (r"([?&;](?:x-(?:amz|goog)-[\w-]{1,40}|awsaccesskeyid|googleaccessid|key-pair-id|policy|expires|key|code)=)"
         r"[^&\s\"'<>]+", re.I, rf"\g<1>{REDACTED}"),
        # what follows a word that says so
        (r"\b(bearer\s{1,8})[\w.~+/=-]+", re.I, rf"\g<1>{REDACTED}"),
        (r"\b(Basic\s{1,8})(?=[A-Za-z+/]*[A-Z0-9=])"
         r"[A-Za-z0-9+/]{4,}={0,2}", 0, rf"\g<1>{REDACTED}"),
        # names
        (rf"({_WHOLE_LINE}{_MARK})(?:{_QUOTED}|{_LINE})", re.I, rf"\g<1>\g<quote>{REDACTED}"),
        (rf"({_NAMED}{_MARK})(?:{_QUOTED}|[\[({{]{_LINE}|(?(colon){_LINE}|{_WORD}))", re.I,
         rf"\g<1>\g<quote>{REDACTED}"),
    )
)  # fmt: skip


def secrets_of(config: Config) -> tuple[str, ...]:
    """The secrets that a configuration knows."""
    found = {config.api_key, config.cf_access_client_secret, config.credential_cmd}
    for name, value in config.default_headers.items():
        if is_secret_name(name):
            _, _, bare = value.partition(" ")
            # with its scheme, as in "Bearer …", and without
            found |= {value} if " " in bare else {value, bare}
    found |= {value for name, value in config.default_query.items() if is_secret_name(name)}
    found |= {value for _, value in config.proxy_headers}
    if config.proxy is not None:
        account = urlsplit(config.proxy).netloc.rpartition("@")[0]
        password = account.partition(":")[2]
        found |= {
            account,
            password,
            unquote(password),
            base64.b64encode(unquote(account).encode()).decode(),
        }
    return tuple(sorted((secret for secret in found if secret), key=len, reverse=True))


def secrets_in(url: str) -> tuple[str, ...]:
    """Return the values of a signed address's secret parameters."""
    query = url.partition("?")[2].partition("#")[0]
    return tuple(value for name, value in parse_qsl(query) if is_secret_name(name))


class Scrubber:
    """Makes texts and data fit to be sent.

    `secrets` are known ones, left out wherever they are found, also as they are written in
    addresses and in base64.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {
            form
            for secret in secrets
            if len(secret) >= SHORTEST_SECRET
            for form in forms_of(secret)
        }
        ordered = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, value: str, most: int = MOST_TEXT, *, end: bool = False) -> str:
        """Return a text without secrets, cut to `most` characters (the last, if `end` is set)."""
        value = _window(value.encode(errors="replace").decode(), 4 * most, end)
        value = self._without_known(value)
        for pattern, replacement in _PATTERNS:
            value = pattern.sub(replacement, value)
        if len(value) <= most:
            return value
        return CUT + value[1 - most :] if end else value[: most - 1] + CUT

    def without_keys(self, value: str) -> str:
        """Return a text without known secrets and keys; bodies stay readable."""
        value = self._without_known(value)
        for pattern, replacement in _SHAPES:
            value = pattern.sub(replacement, value)
        return value

    def _without_known(self, value: str) -> str:
        return value if self._known is None else self._known.sub(REDACTED, value)

    def data(self, value: Any) -> Any:
        """Return data as JSON values; anything that JSON does not have is printed."""
        return _Walk(self).plain(value, 0)

    def mapping(self, value: Mapping[Any, Any] | None) -> dict[str, Any]:
        """The same for a mapping."""
        plain: dict[str, Any] = self.data(dict(value or {}))
        return plain


class _Walk:
    """One walk through data, with what is left of the characters that may be kept."""

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrubber = scrubber
        self._left = MOST_CHARACTERS

    def plain(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.plain(value.value, depth)
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**63 else self._text(str(value))
        if isinstance(value, float):
            return float(value) if -float("inf") < value < float("inf") else str(float(value))
        if isinstance(value, str):
            return self._text(value)
        # a number of numpy's or torch's
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self.plain(value.item(), depth)
        fields = _fields(value)
        if depth >= MOST_DEPTH and (
            fields is not None or isinstance(value, list | tuple | set | frozenset)
        ):
            return CUT
        if fields is not None:
            return self._mapping(fields, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._list(value, depth)
        return self._text(_printed(value), end=isinstance(value, TracebackType))

    def _text(self, value: str, *, end: bool = False) -> str:
        most = MOST_TRACEBACK if end else MOST_TEXT
        text = self._scrubber.text(value, max(1, min(most, self._left)), end=end)
        self._left -= len(text)
        return text

    def _mapping(self, fields: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        # {"name": "x-api-key", "value": "…"} is a header too
        named = any(
            is_secret_name(_name(fields[key]))
            for key in ("name", "key", "header")
            if _is_name(fields.get(key))
        )
        plain: dict[str, Any] = {}
        for count, (key, value) in enumerate(fields.items()):
            if count == MOST_ITEMS or self._left <= 0:
                plain[CUT] = f"{len(fields) - count} more"
                break
            name = _name(key)
            secret = is_secret_name(name) or (named and name.lower() == "value")
            plain[self._text(name)] = (
                REDACTED if secret and value is not None else self.plain(value, depth + 1)
            )
        return plain

    def _list(self, items: Iterable[Any], depth: int) -> list[Any]:
        plain: list[Any] = []
        secret = False
        for count, item in enumerate(items):
            if count == MOST_ITEMS or self._left <= 0:
                plain.append(CUT)
                break
            plain.append(REDACTED if secret else self.plain(item, depth + 1))
            # the next item is its value, as in a pair
            secret = _is_name(item) and is_secret_name(_name(item))
        return plain


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the fields of a value with named parts, or None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Record):
        fields: dict[str, Any] = to_builtins(value)
        return fields
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    return None


def _is_name(value: Any) -> bool:
    return isinstance(value, str | bytes)


def _name(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _printed(value: Any) -> str:
    """The printed form of anything; never fails."""
    try:
        if isinstance(value, dt.datetime | dt.date):
            return value.isoformat()
        if isinstance(value, BaseException):
            return f"{type(value).__qualname__}: {value}"
        if isinstance(value, TracebackType):
            return "".join(traceback.format_tb(value))
        if isinstance(value, os.PathLike):
            return str(value)
        if isinstance(value, bytes | bytearray):
            return bytes(value[:MOST_TEXT]).decode(errors="replace")
        return repr(value)
    except Exception:
        return f"<{type(value).__qualname__} that cannot be printed>"


def _window(value: str, most: int, end: bool) -> str:
    """Return the part of a huge text that is searched, cut between words."""
    if len(value) <= most:
        return value
    if end:
        return value[-most:].partition("\n")[2] or value[-most:].partition(" ")[2]
    return value[:most].rpartition(" ")[0] or value[:most]
