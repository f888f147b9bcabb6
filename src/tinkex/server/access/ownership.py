"""Owners of the objects that requests name.

An id begins with the id of its session, and the owner of a session is on record. Each endpoint
declares the fields of its requests that must name objects of the caller's account (`owned_by`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.server.http_errors import Refusal
from tinkex.server.runs.journals import DIRECT
from tinkex.server.state import State
from tinkex.wire.protocol import OWNED_FIELDS

KNOWN_OWNERS = 10_000


async def check_ownership(
    state: State, fields: Sequence[str], owner: str, path: Mapping[str, str], request: Any
) -> None:
    """Answer 404, as for an object that does not exist, when a request names another owner's."""
    for declared in fields:
        *places, field = declared.split(".")
        holder = request
        for place in places:
            holder = getattr(holder, place)
        name = path.get(field) or getattr(holder, field, None)
        if isinstance(name, str) and not await is_own(state, owner, field, name):
            raise Refusal(404, f"there is no {OWNED_FIELDS[field]} {name!r}")


async def is_own(state: State, owner: str, field: str, name: str) -> bool:
    """Return whether an object is an account's own; a missing object has no other owner."""
    return await _owner(state, field, name) in (None, owner)


async def _owner(state: State, field: str, name: str) -> str | None:
    """Return an object's owner, or None if there is no such object."""
    # a sample without a session: its promise has the owner
    if field == "request_id" and name.startswith(f"{DIRECT}:"):
        promise = state.promises.get(name)
        return None if promise is None else promise.owner
    session = name.partition(":")[0]
    for known in (session, name):
        if known in state.owners:
            return state.owners[known]
    found = await asyncio.to_thread(state.database.sessions.owner_of, session, name)
    if found is None:
        return None
    if len(state.owners) >= KNOWN_OWNERS:
        state.owners.clear()
    known, owner = found
    state.owners[known] = owner
    return owner
