"""List, search, describe and move sessions, and export their timelines."""

from __future__ import annotations

import asyncio
import datetime as dt
import hmac
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tinkex.server.database.entities import CLIENT_REASONS, NO_PROJECT, FoundSession, Span, user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.records import texts
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
    UserSearchOwner,
)
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    Empty,
    GetSessionResponse,
    ListSessionsResponse,
    SessionTraceExportResponse,
)

if TYPE_CHECKING:
    from tinkex.server.calls import Call
    from tinkex.server.state import State

FINISHED = dict(
    zip(
        CLIENT_REASONS,
        (ClientSessionFinishSuccess, ClientSessionFinishErrored, ClientSessionFinishInterrupted),
        strict=True,
    )
)
MOST = 1000
"""Most sessions in one answer."""
LINK_SECONDS = 3600


def status_of(reason: str | None, detail: str | None) -> SessionStatus:
    """Return the status of a session from the reason of its end."""
    if reason is None:
        return SessionActive()
    if reason in FINISHED:
        return ClientSessionFinished(reason=FINISHED[reason](), detail=detail)
    return SessionCancelled(detail=f"{reason}: {detail}" if detail else reason)


# ── one session ───────────────────────────────────────────────────────────────────────────────────


@handler
async def get_session(state: State, call: Call) -> GetSessionResponse:
    """Describe a session with its training runs and samplers."""
    _scope(call)
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
    _scope(call)
    limit, offset = (
        whole_number(call, "limit", 20, 0, MOST),
        whole_number(call, "offset", 0, 0, 1 << 53),
    )
    ids = await asyncio.to_thread(state.database.sessions.ids, call.owner, limit, offset)
    return ListSessionsResponse(sessions=ids)


def whole_number(call: Call, name: str, default: int, least: int, most: int) -> int:
    """Return a number of the query; refuse one out of range."""
    text = call.query.get(name, str(default))
    if not is_number(text) or not least <= int(text) <= most:
        raise Refusal(400, f"{name} must be a whole number from {least} to {most}, got {text!r}")
    return int(text)


def is_number(text: str) -> bool:
    """Return whether a text is a whole number from 0 on, of at most 18 digits."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def _scope(call: Call) -> None:
    """Check the scope; both mean the same, as sessions of others are never shown."""
    if (scope := call.query.get("access_scope", "owned")) not in ("owned", "accessible"):
        raise Refusal(400, f"access_scope is {scope!r}; expected owned or accessible")


@handler
async def search_sessions(state: State, call: Call) -> SessionSearchResponse:
    """Search the caller's sessions for those that match all conditions, newest first.

    Metadata must hold every given pair. A display name is found by any part of it, in any letter
    case.
    """
    request: SessionSearchRequest = call.request
    if (
        isinstance(request.owner, UserSearchOwner)
        and user_urn(call.owner) not in request.owner.owner_urns
    ):
        return SessionSearchResponse(sessions=[])
    rows = await state.searches.run(call.owner, state.database.sessions.search, request)
    page = [_summary(row) for row in rows[: request.limit]]
    cursor = None
    if len(rows) > request.limit:
        cursor = SessionSearchCursor(
            last_created_at=page[-1].created_at, last_session_id=page[-1].session_id
        )
    return SessionSearchResponse(sessions=page, next_cursor=cursor)


def moment(microsecond: int) -> dt.datetime:
    """Return a time that is exact to the microsecond."""
    return dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=microsecond)


def _summary(found: FoundSession) -> SessionSummary:
    return SessionSummary(
        session_id=found.session_id,
        created_at=moment(found.microsecond),
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
    """Return a link to a session's timeline, valid for an hour; a file, for embedded programs."""
    session = call.path["session_id"]
    await state.meter.flush()
    if await asyncio.to_thread(state.database.sessions.state, session) is None:
        raise _no_session(session)
    if call.base_url is None:
        url = await asyncio.to_thread(_write_trace, state, session)
    else:
        expires = int(time.time()) + LINK_SECONDS
        signature = _signature(state, session, expires, call.key_id)
        signed = f"expires={expires}&key={call.key_id}&signature={signature}"
        url = f"{call.base_url}{trace_path(quote(session))}?{signed}"
    return SessionTraceExportResponse(status="ready", url=url)


def trace_path(session: str) -> str:
    """Return the path at which a session's timeline is served."""
    return f"/traces/{session}.json"


def _signature(state: State, session: str, expires: int, key_id: int) -> str:
    return state.accounts.sign(f"trace {session} {expires} {key_id}", key_id).hex()


def _write_trace(state: State, session: str) -> str:
    directory = state.data_dir / "traces"
    directory.mkdir(exist_ok=True)
    path = directory / f"{session}.json"
    path.write_bytes(trace_of(state, session))
    return path.as_uri()


async def signed_trace(state: State, session: str, expires: str, key: str, signature: str) -> bytes:
    """Return the timeline behind a link; refuse a link that is not signed or has expired."""
    moment, key_id = (int(text) if is_number(text) else 0 for text in (expires, key))
    if not hmac.compare_digest(
        _signature(state, session, moment, key_id).encode(), signature.encode()
    ):
        raise Refusal(403, "this link is not signed by this server")
    if moment < time.time():
        raise Refusal(403, "this link has expired: export the trace again")
    await state.accounts.check_key(key_id)
    await state.meter.flush()
    return await asyncio.to_thread(trace_of, state, session)


def trace_of(state: State, session: str) -> bytes:
    """Return a timeline in Chrome's trace format, for Perfetto, with a track per run or sampler.

    An operation lasts from its arrival to its result; operations of one track may overlap.
    """
    spans = state.database.activity.spans(session)
    tracks = {
        name: number
        for number, name in enumerate(dict.fromkeys(_track(span.request_id) for span in spans), 1)
    }
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
    common = {
        "cat": "operation",
        "id": span.request_id,
        "pid": 1,
        "tid": thread,
        "name": span.operation,
    }
    told = {"request_id": span.request_id, "error": span.error}
    yield {**common, "ph": "b", "ts": span.began * 1e6, "args": told}
    yield {**common, "ph": "e", "ts": span.ended * 1e6}
