"""Open, finish, list, search and move sessions, and export their timelines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from tinkex.server.calls import Call
from tinkex.server.database.interface import (
    CLIENT_REASONS,
    NO_PROJECT,
    FoundSession,
    Span,
    user_urn,
)
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.queries import SCOPES, choice, is_sought, moment, texts, whole_number
from tinkex.server.routes.signed_addresses import SignedAddress
from tinkex.server.state import State
from tinkex.types.record import to_json
from tinkex.types.search_requests import (
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    SessionActive,
    SessionCancelled,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionSummary,
)
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    Empty,
    FinishSessionRequest,
    GetSessionResponse,
    ListSessionsResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionTraceExportResponse,
)
from tinkex.wire.codec import JSON

ENDS = (ClientSessionFinishSuccess, ClientSessionFinishErrored, ClientSessionFinishInterrupted)
FINISHED = dict(zip(CLIENT_REASONS, ENDS, strict=True))
MOST = 1000
"""Most sessions in one answer."""
LINK_SECONDS = 3600
TRACE = SignedAddress("trace", "/traces/{session_id}.json", "export the trace again")


def status_of(reason: str | None, detail: str | None) -> SessionStatus:
    """Return the status of a session from the reason of its end."""
    if reason is None:
        return SessionActive()
    if reason in FINISHED:
        return ClientSessionFinished(reason=FINISHED[reason](), detail=detail)
    return SessionCancelled(detail=f"{reason}: {detail}" if detail else reason)


# ── one session ───────────────────────────────────────────────────────────────────────────────────


@handler
async def create_session(state: State, call: Call) -> CreateSessionResponse:
    """Open a session."""
    request: CreateSessionRequest = call.request
    session_id = str(uuid.uuid4())
    fields, add = request.model_dump(mode="json"), state.database.sessions.add
    await asyncio.to_thread(add, session_id, fields, call.owner)
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
        raise _no_session(session_id)
    await state.sessions.finish(session_id, request.reason.type, request.detail)
    return Empty()


@handler
async def get_session(state: State, call: Call) -> GetSessionResponse:
    """Describe a session with its training runs and samplers."""
    choice(call, "access_scope", SCOPES)
    session = call.path["session_id"]
    found = await asyncio.to_thread(state.database.sessions.get, session)
    if found is None:
        raise _no_session(session)
    return GetSessionResponse(
        training_run_ids=found.run_ids,
        sampler_ids=found.sampler_ids,
        user_metadata=texts(found.user_metadata),
        display_name=found.display_name,
    )


def _no_session(session: str) -> Refusal:
    return Refusal(404, f"there is no session {session!r}")


@handler
async def assign_session_project(state: State, call: Call) -> Empty:
    """Move a session, and the checkpoints of its runs, into a project."""
    request: AssignSessionProjectRequest = call.request
    session, project = call.path["session_id"], request.project_id
    if not project or len(project) > 200:
        raise Refusal(400, f"project_id must have 1 to 200 characters, got {len(project)}")
    if not await asyncio.to_thread(state.database.sessions.set_project, session, project):
        raise _no_session(session)
    return Empty()


# ── many sessions ─────────────────────────────────────────────────────────────────────────────────


@handler
async def list_sessions(state: State, call: Call) -> ListSessionsResponse:
    """List the ids of the caller's sessions, newest first."""
    choice(call, "access_scope", SCOPES)
    limit, offset = whole_number(call, "limit", 20, most=MOST), whole_number(call, "offset", 0)
    ids = await asyncio.to_thread(state.database.sessions.ids, call.owner, limit, offset)
    return ListSessionsResponse(sessions=ids)


@handler
async def search_sessions(state: State, call: Call) -> SessionSearchResponse:
    """Search the caller's sessions for those that match all conditions, newest first.

    Metadata must hold every given pair. A display name is found by any part of it, in any letter
    case.
    """
    request: SessionSearchRequest = call.request
    if not is_sought(call.owner, request.owner):
        return SessionSearchResponse(sessions=[])
    rows = await state.searches.run(call.owner, state.database.sessions.search, request)
    page = [_summary(row) for row in rows[: request.limit]]
    cursor = None
    if len(rows) > request.limit:
        created, last = page[-1].created_at, page[-1].session_id
        cursor = SessionSearchCursor(last_created_at=created, last_session_id=last)
    return SessionSearchResponse(sessions=page, next_cursor=cursor)


def _summary(found: FoundSession) -> SessionSummary:
    return SessionSummary(
        session_id=found.session_id,
        created_at=moment(microseconds=found.microsecond),
        owner=user_urn(found.owner),
        project_id=found.project_id or NO_PROJECT,
        status=status_of(found.reason, found.detail),
        checkpoints_count=found.checkpoints,
        display_name=found.display_name,
        user_metadata=texts(found.user_metadata),
        checkpoint_storage_bytes=found.size_bytes,
    )


# ── traces ────────────────────────────────────────────────────────────────────────────────────────


@handler
async def export_session_trace(state: State, call: Call) -> SessionTraceExportResponse:
    """Return a link to a session's timeline; a file, for embedded programs."""
    session = call.path["session_id"]
    await state.meter.flush()
    if await asyncio.to_thread(state.database.sessions.state, session) is None:
        raise _no_session(session)
    if call.base_url is None:
        url = await asyncio.to_thread(_write_trace, state, session)
    else:
        expires = int(time.time()) + LINK_SECONDS
        url = TRACE.make(state.accounts, call, {"session_id": session}, expires)
    return SessionTraceExportResponse(status="ready", url=url)


def _write_trace(state: State, session: str) -> str:
    directory = state.data_dir / "traces"
    directory.mkdir(exist_ok=True)
    path = directory / f"{session}.json"
    path.write_bytes(trace_of(state, session))
    return path.as_uri()


async def trace(state: State, call: Call) -> Response:
    """Send the timeline at a signed address."""
    await TRACE.check(state.accounts, call)
    await state.meter.flush()
    timeline = await asyncio.to_thread(trace_of, state, call.path["session_id"])
    return Response(timeline, media_type=JSON)


def trace_of(state: State, session: str) -> bytes:
    """Return a timeline in Chrome's trace format, with a track per run or sampler.

    An operation lasts from its arrival to its result; operations of one track may overlap.
    """
    spans = state.database.activity.spans(session)
    names = dict.fromkeys(_track(span.request_id) for span in spans)
    tracks = {name: number for number, name in enumerate(names, 1)}
    events = [_metadata("process_name", 0, f"session {session}")]
    events += [_metadata("thread_name", number, name) for name, number in tracks.items()]
    for span in spans:
        events += _drawn(span, tracks[_track(span.request_id)])
    return to_json({"traceEvents": events, "displayTimeUnit": "ms"})


def _track(request_id: str) -> str:
    return ":".join(request_id.split(":")[:3])


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": name, "args": {"name": value}}


def _drawn(span: Span, thread: int) -> Iterable[dict[str, Any]]:
    common = {"cat": "operation", "id": span.request_id, "pid": 1, "tid": thread}
    common["name"] = span.operation
    told = {"request_id": span.request_id, "error": span.error}
    yield {**common, "ph": "b", "ts": span.began * 1e6, "args": told}
    yield {**common, "ph": "e", "ts": span.ended * 1e6}
