"""Addresses of requests: built from operations, followed through redirects, compared by origin."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urldefrag, urlencode, urljoin, urlsplit

from tinkex.client.settings.config import is_address, is_embedded
from tinkex.wire.protocol import PREFIX, Operation

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 5


def target(
    op: Operation, path: Mapping[str, str] | None = None, query: Mapping[str, object] | None = None
) -> str:
    """Return the path and query of a request; query values that are None are left out."""
    url = f"{PREFIX}/{op.path}"
    if path or "{" in url:
        url = url.format_map({name: quote(value, safe=":") for name, value in (path or {}).items()})
    if not query:
        return url
    pairs = [(name, str(value)) for name, value in query.items() if value is not None]
    return f"{url}?{urlencode(pairs, quote_via=quote, safe='')}" if pairs else url


def redirection(address: str, status: int, headers: Mapping[str, str]) -> str | None:
    """Return the address that an answer redirects to; None without a usable one."""
    if status not in REDIRECTS or "location" not in headers:
        return None
    try:
        found = urldefrag(urljoin(address, headers["location"])).url
    except ValueError:
        return None
    # A signed address must not change, except for characters that are not allowed in addresses.
    found = quote(found, safe="!$%&'()*+,/:;=?@[]~")
    return found if is_address(found) else None


def origin(address: str) -> tuple[str, str, int | None]:
    """Return the scheme, host and port of an address."""
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def origin_of(base_url: str) -> str:
    """Return a base URL without its path in one spelling, as a key of what its clients share."""
    if is_embedded(base_url):
        return base_url
    scheme, host, port = origin(base_url)
    return f"{scheme}://{host}:{port}"
