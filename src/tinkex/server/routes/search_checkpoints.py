"""The search for checkpoints: one's own that match everything that is asked, newest first."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from typing import Any

from tinkex.server.calls import Call
from tinkex.server.database.store import user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.records import checkpoint_record
from tinkex.server.routes.session_records import NO_PROJECT
from tinkex.server.state import State
from tinkex.types.checkpoint_search import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
)
from tinkex.types.checkpoints import KINDS
from tinkex.types.record import to_json
from tinkex.types.sessions import UserSearchOwner

MICROSECOND = "CAST(ROUND(c.created * 1000000) AS INTEGER)"
"""When a checkpoint was made, as exactly as a cursor can say."""
PROJECT = f"COALESCE(c.project_id, s.project_id, '{NO_PROJECT}')"
TABLES = (
    "checkpoints c LEFT JOIN runs r ON r.model_id = c.model_id LEFT JOIN sessions s ON "
    "s.session_id = r.session_id"
)
PROJECTS = f"""
    SELECT value FROM json_each(?) WHERE value NOT IN (
        SELECT {PROJECT} FROM {TABLES} WHERE c.owner = ?
        UNION SELECT COALESCE(project_id, '{NO_PROJECT}') FROM sessions WHERE owner = ?
        UNION SELECT '{NO_PROJECT}'
    )
"""
"""Projects in which someone has nothing."""


@handler
async def search_checkpoints(state: State, call: Call) -> CheckpointSearchResponse:
    """A page of one's checkpoints. One may see one's own and no others, so that all owners come to
    the same.
    """
    request: CheckpointSearchRequest = call.request
    if request.project_ids is not None:
        await _check_projects(state, request.project_ids, call.owner)
    if (
        isinstance(request.owner, UserSearchOwner)
        and user_urn(call.owner) not in request.owner.owner_urns
    ):
        return CheckpointSearchResponse(checkpoints=[])
    conditions = _conditions(request, call.owner)
    sql = f"""
        SELECT c.*, {MICROSECOND} AS microsecond FROM {TABLES}
        WHERE {" AND ".join(sql for sql, _ in conditions)}
        ORDER BY microsecond DESC, c.tinker_path DESC LIMIT ?
    """
    values = [value for _, values in conditions for value in values]
    rows = await asyncio.to_thread(state.store.rows, sql, *values, request.limit + 1)
    page, cursor = rows[: request.limit], None
    if len(rows) > request.limit:
        last = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(
            microseconds=page[-1]["microsecond"]
        )
        cursor = CheckpointSearchCursor(
            last_created_at=last, last_checkpoint_uuid=page[-1]["tinker_path"]
        )
    found = [checkpoint_record(state.store.saved(row)) for row in page]
    return CheckpointSearchResponse(checkpoints=found, next_cursor=cursor)


async def _check_projects(state: State, projects: list[str], owner: str) -> None:
    """Refuse projects that someone cannot list."""
    given = to_json(projects).decode()
    if missing := await asyncio.to_thread(state.store.rows, PROJECTS, given, owner, owner):
        raise Refusal(
            404,
            f"there is no project {missing[0]['value']!r} that you can list; leave project_ids out",
        )


def _conditions(request: CheckpointSearchRequest, owner: str) -> list[tuple[str, list[Any]]]:
    found: list[tuple[str, list[Any]]] = [
        ("c.owner = ?", [owner]),
        ("(c.expires IS NULL OR c.expires > ?)", [time.time()]),
    ]
    for column, wanted in ((PROJECT, request.project_ids), ("c.base_model", request.base_models)):
        if wanted is not None:
            found.append(
                (f"{column} IN (SELECT value FROM json_each(?))", [to_json(wanted).decode()])
            )
    for name, value in request.user_metadata.items():
        pair = "EXISTS (SELECT 1 FROM json_each(c.user_metadata) WHERE key = ? AND value = ?)"
        found.append((pair, [name, value]))
    if request.checkpoint_type is not None:
        kind = next(kind for kind, type in KINDS.items() if type == request.checkpoint_type)
        found.append(("instr(c.tinker_path, ?) > 0", [f"/{kind}/"]))
    if request.cursor is not None:
        since = round(request.cursor.last_created_at.timestamp() * 1e6)
        found.append(
            (
                f"({MICROSECOND}, c.tinker_path) < (?, ?)",
                [since, request.cursor.last_checkpoint_uuid],
            )
        )
    return found
