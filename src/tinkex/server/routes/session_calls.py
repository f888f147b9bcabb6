"""Open, heartbeat and finish sessions."""

from __future__ import annotations

import asyncio
import time
import uuid

from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.state import EXPIRED, State
from tinkex.types.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)


@handler
async def create_session(state: State, call: Call) -> CreateSessionResponse:
    """Open a session."""
    request: CreateSessionRequest = call.request
    session_id = str(uuid.uuid4())
    await asyncio.to_thread(
        state.database.sessions.add, session_id, request.model_dump(mode="json"), call.owner
    )
    state.heard[session_id] = time.monotonic()
    return CreateSessionResponse(session_id=session_id)


@handler
async def session_heartbeat(state: State, call: Call) -> SessionHeartbeatResponse:
    """Note that a client is alive."""
    request: SessionHeartbeatRequest = call.request
    await require_session(state, request.session_id)
    return SessionHeartbeatResponse()


async def require_session(state: State, session_id: str) -> None:
    """Refuse what comes for a session that is not open; a known one is heard from."""
    if session_id not in state.heard:
        known = await asyncio.to_thread(state.database.sessions.state, session_id)
        if known is None:
            raise Refusal(404, f"there is no session {session_id!r}")
        if known == EXPIRED:
            seconds = state.limits.session_seconds
            why = f"nothing was heard for {seconds:g} s (session_seconds)"
            raise Refusal(410, f"session {session_id!r} is finished: {why}")
        if known == "finished":
            raise Refusal(410, f"session {session_id!r} is finished")
    state.heard[session_id] = time.monotonic()


@handler
async def finish_session(state: State, call: Call) -> Empty:
    """Close a session; the first reason stays."""
    request: FinishSessionRequest = call.request
    session_id = call.path["session_id"]
    if await asyncio.to_thread(state.database.sessions.state, session_id) is None:
        raise Refusal(404, f"there is no session {session_id!r}")
    state.heard.pop(session_id, None)  # from here on the record says whether it is open
    await asyncio.to_thread(
        state.database.sessions.finish, session_id, request.reason.type, request.detail
    )
    state.end_session(session_id)
    return Empty()
