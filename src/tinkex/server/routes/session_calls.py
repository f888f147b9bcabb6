"""Open, heartbeat and finish sessions."""

from __future__ import annotations

import asyncio
import uuid

from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.state import State
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
    state.sessions.see(session_id)
    return CreateSessionResponse(session_id=session_id)


@handler
async def session_heartbeat(state: State, call: Call) -> SessionHeartbeatResponse:
    """Note that a client is alive."""
    request: SessionHeartbeatRequest = call.request
    await state.sessions.require(request.session_id)
    return SessionHeartbeatResponse()


@handler
async def finish_session(state: State, call: Call) -> Empty:
    """Close a session; the first reason stays."""
    request: FinishSessionRequest = call.request
    session_id = call.path["session_id"]
    if await asyncio.to_thread(state.database.sessions.state, session_id) is None:
        raise Refusal(404, f"there is no session {session_id!r}")
    await state.sessions.finish(session_id, request.reason.type, request.detail)
    return Empty()
