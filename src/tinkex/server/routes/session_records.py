"""Sessions as they are looked up: what belongs to one, where it stands, what it did and when."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import hmac
import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tinkex.server.database.store import user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.usage import texts
from tinkex.types.record import to_json
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    Empty,
    GetSessionResponse,
    ListSessionsResponse,
    SessionActive,
    SessionCancelled,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    SessionTraceExportResponse,
    UserSearchOwner,
)

if TYPE_CHECKING:
    from tinkex.server.calls import Call
    from tinkex.server.state import State

FINISHED = {
    "success": ClientSessionFinishSuccess,
    "errored": ClientSessionFinishErrored,
    "interrupted": ClientSessionFinishInterrupted,
}
NO_PROJECT = "default"
"""The project of sessions that were given none."""
MOST = 1000
"""Most sessions in one answer."""
LINK_SECONDS = 3600
MICROSECOND = "CAST(ROUND(sessions.created * 1000000) AS INTEGER)"
"""When a session was made, as exactly as a cursor can say."""


def status_of(reason: str | None, detail: str | None) -> SessionStatus:
    """Where a session stands, from how it ended."""
    if reason is None:
        return SessionActive()
    if reason in FINISHED:
        return ClientSessionFinished(reason=FINISHED[reason](), detail=detail)
    return SessionCancelled(detail=f"{reason}: {detail}" if detail else reason)


# ── one session ───────────────────────────────────────────────────────────────────────────────────


@handler
async def get_session(state: State, call: Call) -> GetSessionResponse:
    """The training runs and samplers of a session."""
    _scope(call)
    session = call.path["session_id"]

    def read() -> GetSessionResponse:
        rows = state.store.rows("SELECT * FROM sessions WHERE session_id = ?", session)
        if not rows:
            raise Refusal(404, f"there is no session {session!r}")
        runs = state.store.rows(
            "SELECT model_id FROM runs WHERE session_id = ? ORDER BY created", session
        )
        samplers = state.store.rows(
            "SELECT sampler_id FROM samplers WHERE session_id = ? ORDER BY created", session
        )
        return GetSessionResponse(
            training_run_ids=[row["model_id"] for row in runs],
            sampler_ids=[row["sampler_id"] for row in samplers],
            user_metadata=texts(json.loads(rows[0]["user_metadata"])),
            display_name=rows[0]["display_name"],
        )

    return await asyncio.to_thread(read)


@handler
async def assign_session_project(state: State, call: Call) -> Empty:
    """Move a session, and the checkpoints of its runs, into a project."""
    request: AssignSessionProjectRequest = call.request
    session, project = call.path["session_id"], request.project_id
    if not project or len(project) > 200:
        raise Refusal(400, f"project_id must have 1 to 200 characters, got {len(project)}")
    sql = "UPDATE sessions SET project_id = ? WHERE session_id = ? RETURNING session_id"
    if not await asyncio.to_thread(state.store.rows, sql, project, session):
        raise Refusal(404, f"there is no session {session!r}")
    sql = (
        "UPDATE checkpoints SET project_id = ? WHERE model_id IN (SELECT model_id FROM runs "
        "WHERE session_id = ?)"
    )
    await asyncio.to_thread(state.store.rows, sql, project, session)
    return Empty()


# ── many sessions ─────────────────────────────────────────────────────────────────────────────────


@handler
async def list_sessions(state: State, call: Call) -> ListSessionsResponse:
    """The ids of one's sessions, newest first."""
    _scope(call)
    limit, offset = (
        whole_number(call, "limit", 20, 0, MOST),
        whole_number(call, "offset", 0, 0, 1 << 53),
    )
    sql = (
        "SELECT session_id FROM sessions WHERE owner = ? ORDER BY created DESC, session_id DESC "
        "LIMIT ? OFFSET ?"
    )
    rows = await asyncio.to_thread(state.store.rows, sql, call.owner, limit, offset)
    return ListSessionsResponse(sessions=[row["session_id"] for row in rows])


def whole_number(call: Call, name: str, default: int, least: int, most: int) -> int:
    """A number of the query."""
    text = call.query.get(name, str(default))
    if not is_number(text) or not least <= int(text) <= most:
        raise Refusal(400, f"{name} must be a whole number from {least} to {most}, got {text!r}")
    return int(text)


def is_number(text: str) -> bool:
    """Whether a text is a whole number from 0 on; one that is longer than any that is meant is
    none.
    """
    return text.isascii() and text.isdigit() and len(text) <= 18


def _scope(call: Call) -> None:
    """One may see one's own sessions and no others, so both scopes come to the same."""
    if (scope := call.query.get("access_scope", "owned")) not in ("owned", "accessible"):
        raise Refusal(400, f"access_scope is {scope!r}; expected owned or accessible")


@handler
async def search_sessions(state: State, call: Call) -> SessionSearchResponse:
    """One's sessions that match everything that is asked, newest first.

    Metadata must hold every pair that is given; a display name is found by any part of it, in any
    letter case.
    """
    request: SessionSearchRequest = call.request
    if (
        isinstance(request.owner, UserSearchOwner)
        and user_urn(call.owner) not in request.owner.owner_urns
    ):
        return SessionSearchResponse(sessions=[])
    conditions = _conditions(request, call.owner)
    sql = f"""
        WITH page AS (
            SELECT sessions.*, {MICROSECOND} AS microsecond FROM sessions
            WHERE {" AND ".join(sql for sql, _ in conditions)}
            ORDER BY microsecond DESC, session_id DESC LIMIT ?
        )
        SELECT page.*, COUNT(tinker_path) AS count, SUM(size_bytes) AS size
        FROM page LEFT JOIN runs USING (session_id)
        LEFT JOIN checkpoints ON checkpoints.model_id = runs.model_id AND (expires IS NULL OR expires > ?)
        GROUP BY session_id ORDER BY microsecond DESC, session_id DESC
    """
    values = [value for _, values in conditions for value in values]
    rows = await _search(state, call.owner, sql, *values, request.limit + 1, time.time())
    page = [_summary(row) for row in rows[: request.limit]]
    cursor = None
    if len(rows) > request.limit:
        cursor = SessionSearchCursor(
            last_created_at=page[-1].created_at, last_session_id=page[-1].session_id
        )
    return SessionSearchResponse(sessions=page, next_cursor=cursor)


async def _search(state: State, owner: str, sql: str, *values: Any) -> list[Any]:
    """Search beside everything else; an owner has one search at a time."""
    if owner in state.searching:
        raise Refusal(
            429, "another search of this account is under way", headers={"Retry-After": "1"}
        )
    state.searching.add(owner)
    try:
        search = functools.partial(state.store.search, sql, *values)
        return await asyncio.get_running_loop().run_in_executor(state.store.searchers, search)
    except TimeoutError as error:
        raise Refusal(
            400, f"the search was given up: {error}; ask for less, such as one project"
        ) from None
    finally:
        state.searching.discard(owner)


def _conditions(request: SessionSearchRequest, owner: str) -> list[tuple[str, list[Any]]]:
    found: list[tuple[str, list[Any]]] = [("sessions.owner = ?", [owner])]
    if request.session_id is not None:
        found.append(("session_id = ?", [request.session_id]))
    if request.project_ids is not None:
        marks = ", ".join("?" * len(request.project_ids))
        found.append(
            (
                f"COALESCE(sessions.project_id, '{NO_PROJECT}') IN ({marks})",
                list(request.project_ids),
            )
        )
    for name, value in request.user_metadata.items():
        pair = (
            "EXISTS (SELECT 1 FROM json_each(sessions.user_metadata) WHERE key = ? AND value = ?)"
        )
        found.append((pair, [name, value]))
    if request.display_name is not None:
        found.append(("instr(lower(display_name), lower(?)) > 0", [request.display_name]))
    if request.statuses is not None:
        pairs = [_status_condition(query) for query in request.statuses]
        found.append(
            (
                f"({' OR '.join(sql for sql, _ in pairs)})",
                [v for _, values in pairs for v in values],
            )
        )
    if request.cursor is not None:
        since = round(request.cursor.last_created_at.timestamp() * 1e6)
        found.append(
            (f"({MICROSECOND}, session_id) < (?, ?)", [since, request.cursor.last_session_id])
        )
    return found


def _status_condition(query: SessionStatusQuery) -> tuple[str, list[Any]]:
    if isinstance(query, ClientFinishedSessionStatusQuery):
        reasons = list(query.reasons or FINISHED)
        return f"reason IN ({', '.join('?' * len(reasons))})", reasons
    if query.type == "active":
        return "reason IS NULL", []
    if query.type == "cancelled":
        return f"(reason IS NOT NULL AND reason NOT IN ({', '.join('?' * len(FINISHED))}))", list(
            FINISHED
        )
    # no session is said to have failed here: operations fail, and the session goes on
    return "0", []


def _summary(row: Any) -> SessionSummary:
    return SessionSummary(
        session_id=row["session_id"],
        created_at=dt.datetime.fromtimestamp(0, dt.UTC)
        + dt.timedelta(microseconds=row["microsecond"]),
        owner=user_urn(row["owner"]),
        project_id=row["project_id"] or NO_PROJECT,
        status=status_of(row["reason"], row["detail"]),
        checkpoints_count=row["count"],
        display_name=row["display_name"],
        user_metadata=texts(json.loads(row["user_metadata"])),
        checkpoint_storage_bytes=row["size"] or 0,
    )


# ── traces ────────────────────────────────────────────────────────────────────────────────────────


@handler
async def export_session_trace(state: State, call: Call) -> SessionTraceExportResponse:
    """Where a session's timeline can be fetched: a link that is good for an hour, or a file for
    programs inside.
    """
    session = call.path["session_id"]
    await state.meter.flush()
    if not await asyncio.to_thread(
        state.store.rows, "SELECT 1 FROM sessions WHERE session_id = ?", session
    ):
        raise Refusal(404, f"there is no session {session!r}")
    if call.base_url is None:
        url = await asyncio.to_thread(_write_trace, state, session)
    else:
        expires = int(time.time()) + LINK_SECONDS
        signed = f"expires={expires}&key={call.key_id}&signature={_signature(state, session, expires, call.key_id)}"
        url = f"{call.base_url}{trace_path(quote(session))}?{signed}"
    return SessionTraceExportResponse(status="ready", url=url)


def trace_path(session: str) -> str:
    """Where a session's timeline is served."""
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
    """The timeline behind a link, if the link is of this server and still good."""
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
    """A session's timeline in Chrome's trace format, which Perfetto reads: a track per run or
    sampler.

    An operation is drawn from when it was taken to when its result was there; several of one track
    may overlap.
    """
    sql = (
        "SELECT request_id, operation, began, ended, error FROM spans WHERE session_id = ? ORDER "
        "BY began"
    )
    rows = state.store.rows(sql, session)
    tracks = {
        name: number
        for number, name in enumerate(dict.fromkeys(_track(row["request_id"]) for row in rows), 1)
    }
    events = [_metadata("process_name", 0, f"session {session}")]
    events += [_metadata("thread_name", number, name) for name, number in tracks.items()]
    for row in rows:
        events += _drawn(row, tracks[_track(row["request_id"])])
    return to_json({"traceEvents": events, "displayTimeUnit": "ms"})


def _track(request_id: str) -> str:
    return ":".join(request_id.split(":")[:3])


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": name, "args": {"name": value}}


def _drawn(row: Any, thread: int) -> Iterable[dict[str, Any]]:
    common = {
        "cat": "operation",
        "id": row["request_id"],
        "pid": 1,
        "tid": thread,
        "name": row["operation"],
    }
    told = {"request_id": row["request_id"], "error": row["error"]}
    yield {**common, "ph": "b", "ts": row["began"] * 1e6, "args": told}
    yield {**common, "ph": "e", "ts": row["ended"] * 1e6}
