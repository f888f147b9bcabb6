"""Calls in a journal: each is written before it is acknowledged, and read to be repeated."""

from __future__ import annotations

import sys
from typing import Any

from tinkex.server.calls import Call, Recorded, digest_of
from tinkex.server.runs.journal import Entry
from tinkex.wire import codec
from tinkex.wire.protocol import BY_NAME

UNKNOWN = b""
"""The digest of a request of which only its outcome is left."""
GIVEN_UP = "given_up"
"""The operation that a journal names for a number that was given up."""
READ = "read"
"""The operation that a journal of samples names for results that were read."""


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
        recorded=Recorded(facts.get("id")),
        reader=facts.get("reader"),
        owner=facts.get("owner", "local"),
    )
