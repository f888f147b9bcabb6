"""Find the account behind a request: by its key, or by its place on an open server."""

from __future__ import annotations

import functools
from urllib.parse import urlsplit

from starlette.requests import Request

from tinkex.client.settings.config import LOOPBACK
from tinkex.server.access.accounts import Account
from tinkex.server.access.endpoints import Access
from tinkex.server.http_errors import Refusal
from tinkex.server.state import State

NOBODY = Account("")
"""The account of a caller that was not asked for a key. It owns nothing."""


async def authorize(
    state: State, request: Request, access: Access, *, takes_bearer: bool = False
) -> Account:
    """Return the account of a request.

    Raises:
        Refusal: 401 without a valid key; 403 from another machine, when the server is open.
    """
    if access is Access.PUBLIC:
        return NOBODY
    if await state.accounts.needs_key():
        if access is Access.NO_KEY:
            return Account()
        key = request.headers.get("x-api-key")
        if not key and takes_bearer:
            key = _bearer(request.headers.get("authorization", ""))
        return await state.accounts.account(key)
    # An open server is for programs of this machine: a web page that found it must not drive it.
    for name in ("host", "origin"):
        given = request.headers.getlist(name)
        if len(given) > 1 or not all(map(_is_here, given)):
            told = ", ".join(map(repr, given))
            raise Refusal(403, f"this server is open to this machine only; {name} is {told}")
    return Account()


def _bearer(authorization: str) -> str | None:
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


@functools.lru_cache(64)
def _is_here(place: str) -> bool:
    """Return whether a Host or Origin header names this machine."""
    try:
        parts = urlsplit(place if "//" in place else f"//{place}")
        return "@" not in parts.netloc and parts.hostname in LOOPBACK
    except ValueError:  # it is no address at all
        return False
