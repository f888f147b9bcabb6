"""A decoded request, as handlers get it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from tinkex.server.database.interface import LOCAL_OWNER
from tinkex.wire import codec


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of a call in a journal."""

    request_id: str | None = None
    """The id that a sample was acknowledged under."""


@dataclass(slots=True)
class Call:
    """A decoded request and what came with it."""

    request: Any
    path: dict[str, str]
    digest: bytes
    op: str = ""
    """The operation's name; with the body and its type, all that is needed to carry it out again.
    """
    body: bytes = b""
    """The body as it was sent."""
    content_type: str = codec.JSON
    encoding: str | None = None
    """The compression of the body, if any."""
    size: int = 0
    """Bytes of the body once it is expanded."""
    number: int | None = None
    """The place in its run's order, or in the journal of samples, once it has one."""
    seed: int | None = None
    """The seed that was drawn for a sample, once it has one."""
    recorded: Recorded | None = None
    """Its record, if the call was read from a journal."""
    reader: str | None = None
    """The account of an access token that came along; it is kept instead of the token."""
    owner: str = LOCAL_OWNER
    """The account of the key."""
    key_id: int = 0
    """The key on record that was used; 0 when it was the server's own, or none."""
    base_url: str | None = None
    """The address that the caller used; None when it is in the same process."""
    query: dict[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    http: Request | None = None
    """The HTTP request, for an endpoint whose handler reads the body itself."""


def digest_of(path: str, body: bytes) -> bytes:
    """Return the digest of a request; equal requests have equal digests."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
