"""Requests and answers without credentials and within bounds, fit to keep and show."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit, urlunsplit

REDACTED = "[REDACTED]"
SHOWN_CHARACTERS = 300
"""Most characters of a body in a message …"""
KEPT_CHARACTERS = 2000
"""… and how much of one that is mere text into an error."""


_SECRET_NAME = re.compile(
    r"(?:.*-)?(?:api-?keys?|(?:aws)?access-?keys?(?:-?id)?|(?:private|secret|signing)-?keys?"
    r"|secrets?|passw(?:or)?ds?|pwd|passphrase|authorization|(?:set-?)?cookies?2?"
    r"|credentials?(?:-cmd)?|tokens?-secret"
    r"|(?:access|auth|bearer|csrf|hf|id|refresh|security|session)?token|jwt|sig|signature)"
    r"(?:-(?:value|hash))?"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret_name(name: str) -> bool:
    """Return True if a header, parameter, field or variable of this name holds a secret.

    Example:
        >>> is_secret_name("X-Api-Key"), is_secret_name("hfToken"), is_secret_name("max_tokens")
        (True, True, False)
    """
    plain = re.sub(r"[\s_.]+", "-", _CAMEL.sub("-", name.strip())).lower()
    return _SECRET_NAME.fullmatch(plain) is not None


def forms_of(secret: str) -> set[str]:
    """Return the spellings of a secret: plain, in an address, in base64 from its first byte.

    Example:
        >>> sorted(forms_of("a/b"))
        ['YS9i', 'a%2Fb', 'a/b']
    """
    forms = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        code = encode(secret.encode()).decode()
        forms |= {code, code.rstrip("=")}
    return forms


def redact_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that can be shown; addresses in them, too, as `redact_url` shows them.

    Example:
        >>> redact_headers(
        ...     {"Accept": "*/*", "X-API-Key": "tml-1", "Location": "https://me:pw@host/x"}
        ... )
        {'Accept': '*/*', 'X-API-Key': '[REDACTED]', 'Location': 'https://host/x'}
    """
    return {
        name: REDACTED if is_secret_name(name) else redact_url(value) if "://" in value else value
        for name, value in headers.items()
    }


def redact_url(url: str) -> str:
    """Return a URL without user, password and the values of secret parameters.

    Example:
        >>> redact_url("https://me:pw@host/x?page=2&token=abc")
        'https://host/x?page=2&token=[REDACTED]'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.rpartition("@")[2]
    pairs = [pair.partition("=") for pair in parts.query.split("&")] if parts.query else []
    query = "&".join(
        name + sign + (REDACTED if value and is_secret_name(unquote(name)) else value)
        for name, sign, value in pairs
    )
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


class Headers(Mapping[str, str]):
    """Headers that are found under their names in any case.

    Example:
        >>> Headers({"Retry-After": "3"})["retry-after"]
        '3'
    """

    __slots__ = ("_items",)

    def __init__(self, headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        self._items = {name.lower(): (name, value) for name, value in dict(headers).items()}

    def __getitem__(self, name: str) -> str:
        return self._items[name.lower()][1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Headers({dict(self)!r})"

    def __reduce__(self) -> tuple[type[Headers], tuple[dict[str, str]]]:
        return Headers, (dict(self),)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was sent, stored without its credentials."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=Headers)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", redact_url(str(self.url)))
        object.__setattr__(self, "headers", Headers(redact_headers(self.headers)))


@dataclass(frozen=True, slots=True, repr=False)
class Response:
    """An answer that came. Cookies, and secrets of addresses, are taken out of its headers."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=Headers)
    content: bytes = b""
    request: Request | None = None
    elapsed: float = 0.0
    """Seconds from the request to the end of the answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", Headers(redact_headers(self.headers)))

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The body, decoded; `ValueError` when it is no JSON."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None

    @property
    def is_success(self) -> bool:
        """True if the status is one of the 200s."""
        return 200 <= self.status_code < 300

    def __repr__(self) -> str:
        return f"<Response [{self.status_code}]>"


def wait_asked(headers: Mapping[str, str], body: object = None) -> float | None:
    """Return the seconds that an answer asks to wait, from its headers or `retry_after_ms`.

    A date in the header counts from now; a past date means no wait.
    """
    found = Headers(headers)
    told = body.get("retry_after_ms") if isinstance(body, Mapping) else None
    for value, scale in (
        (found.get("retry-after-ms"), 1e-3),
        (found.get("retry-after"), 1.0),
        (told, 1e-3),
    ):
        try:
            seconds = float(value) * scale  # type: ignore[arg-type]  # what is no number is passed over
        except (OverflowError, TypeError, ValueError):
            seconds = _until(value)
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def _until(date: object) -> float:
    """Seconds from now to a date as HTTP writes it; -1 for anything else."""
    from email.utils import parsedate_to_datetime  # rarely needed, and not free to import

    try:
        return max(0.0, parsedate_to_datetime(str(date)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return -1.0


def bounded(body: object) -> object:
    """A body that may be kept: what was decoded as it is, mere text up to a limit."""
    return body[:KEPT_CHARACTERS] if isinstance(body, str | bytes) else body


def describe_body(body: object) -> str:
    """Return a short description of a body: its detail, message, error, title, or beginning.

    Example:
        >>> describe_body({"detail": "no such model"})
        'no such model'
        >>> describe_body(b"<html><head><title>502 Bad Gateway</title></head>")
        'an HTML page: 502 Bad Gateway'
    """
    if isinstance(body, bytes):
        text = body.decode(errors="replace")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = text
    if isinstance(body, str):
        return _short(
            _page(body) if re.match(r"\s*<(!doctype|html|head|body|\?xml)", body, re.I) else body
        )
    if isinstance(body, Mapping):
        told = next((body[name] for name in ("detail", "message", "error") if body.get(name)), None)
        return (
            describe_body(told)
            if told is not None
            else _short(_written(dict(body)) if body else "")
        )
    if (
        isinstance(body, list)
        and body
        and all(isinstance(item, Mapping) and "msg" in item for item in body)
    ):
        # What a validator found, as `{"loc": ["body", "rank"], "msg": "…"}` each.
        return _short(
            "; ".join(
                ": ".join([*map(str, item.get("loc", ())[-1:]), str(item["msg"])]) for item in body
            )
        )
    return "" if body is None else _short(_written(body))


def _written(body: object) -> str:
    try:
        return json.dumps(body, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(body)


def _page(html: str) -> str:
    """The title of a page, else its first words."""
    html = html[: 10 * KEPT_CHARACTERS]
    title = re.search(r"<title[^>]*>(.*?)</title", html, re.I | re.S)
    words = (
        title[1]
        if title
        else re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", html, flags=re.I | re.S)
    )
    return f"an HTML page: {' '.join(words.split()) or 'blank'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS] + " …"
