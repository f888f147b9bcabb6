"""Owners of what requests name: ids begin with their session's, whose owner is on record."""

from __future__ import annotations

import asyncio

from tinkex.server.state import DIRECT, State

KNOWN_OWNERS = 10_000
OWNER = """
    SELECT session_id AS id, owner FROM sessions WHERE session_id = ?
    UNION ALL SELECT model_id, owner FROM runs WHERE model_id = ?
"""


async def is_own(state: State, owner: str, field: str, name: str) -> bool:
    """Return whether a thing is someone's own; an absent one has no other owner."""
    return await _owner(state, field, name) in (None, owner)


async def _owner(state: State, field: str, name: str) -> str | None:
    """Return an object's owner: its name begins with its session's."""
    # of no session; it says itself who asked
    if field == "request_id" and name.startswith(f"{DIRECT}:"):
        promise = state.promises.get(name)
        return None if promise is None else promise.owner
    session = name.partition(":")[0]
    for known in (session, name):
        if known in state.owners:
            return state.owners[known]
    rows = await asyncio.to_thread(state.store.rows, OWNER, session, name)
    if not rows:
        return None
    if len(state.owners) >= KNOWN_OWNERS:
        state.owners.clear()
    state.owners[rows[0]["id"]] = owner = str(rows[0]["owner"])
    return owner
