"""A decoded request, as handlers get it and as a journal keeps it.

A call is written to its journal before it is acknowledged, and read to be repeated.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from tinkex.server.database.interface import LOCAL_OWNER
from tinkex.server.runs.journal import Entry
from tinkex.wire import codec
from tinkex.wire.protocol import BY_NAME

UNKNOWN = b""
"""The digest of a request of which only its outcome is left."""
GIVEN_UP = "given_up"
"""The operation that a journal names for a number that was given up."""
FAILED = "failed"
"""The operation that a journal names for a request that failed for good, with the reason."""
READ = "read"
"""The operation that a journal of samples names for results that were read."""


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
    is_replayed: bool = False
    """True if the call was read from a journal."""
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


def refused_call(digest: bytes, why: str, owner: str) -> Call:
    """Return what is journalled instead of a refused call: its reason."""
    return Call(None, {}, digest, op="", body=why.encode(), owner=owner)


def facts_of(call: Call, request_id: str) -> dict[str, Any]:
    """Return what a journal says of a call besides its body."""
    facts: dict[str, Any] = {"op": call.op, "type": call.content_type, "owner": call.owner}
    if call.encoding:
        facts["encoding"] = call.encoding
    if not call.op or call.reader is not None:
        # the body is the reason, or lacks the token: not what came
        facts["digest"] = call.digest.hex()
    if call.reader is not None:
        facts["reader"] = call.reader
    if call.seed is not None:
        facts |= {"seed": call.seed, "id": request_id}
    return facts


def call_of(entry: Entry) -> Call:
    """Return a journalled call as it came."""
    facts = entry.facts
    content_type, encoding = facts.get("type", codec.JSON), facts.get("encoding")
    op = BY_NAME.get(facts["op"])
    plain = codec.decompress(entry.body, encoding, sys.maxsize - 1)  # it was taken
    request = codec.decode(op.request, plain or b"{}", content_type) if op and op.request else None
    digest = facts.get("digest")
    return Call(
        request,
        {},
        bytes.fromhex(digest) if digest else digest_of(op.path if op else "", plain),
        op=facts["op"],
        body=entry.body,
        content_type=content_type,
        encoding=encoding,
        size=len(plain),
        number=entry.number,
        seed=facts.get("seed"),
        is_replayed=True,
        reader=facts.get("reader"),
        owner=facts.get("owner", "local"),
    )


def number_named(request_id: str) -> str:
    """Return the number of a request with its name; a request that makes a run has the run's."""
    head, _, number = request_id.rpartition(":")
    prefix, _, run = head.rpartition(":")
    makes_run = number == "0" and prefix.endswith(":train")
    return f"model_seq_id {run}" if makes_run else f"request number {number}"
