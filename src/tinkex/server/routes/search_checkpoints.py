"""Search for checkpoints: an owner's own that match all conditions, newest first."""

from __future__ import annotations

import asyncio

from tinkex.server.calls import Call
from tinkex.server.database.entities import user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.records import checkpoint_record
from tinkex.server.routes.session_records import moment
from tinkex.server.state import State
from tinkex.types.search_requests import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    UserSearchOwner,
)


@handler
async def search_checkpoints(state: State, call: Call) -> CheckpointSearchResponse:
    """Return a page of the caller's own checkpoints; other owners' are never shown."""
    request: CheckpointSearchRequest = call.request
    if request.project_ids is not None:
        await _check_projects(state, request.project_ids, call.owner)
    if (
        isinstance(request.owner, UserSearchOwner)
        and user_urn(call.owner) not in request.owner.owner_urns
    ):
        return CheckpointSearchResponse(checkpoints=[])
    found = await asyncio.to_thread(state.database.checkpoints.search, request, call.owner)
    page, cursor = found[: request.limit], None
    if len(found) > request.limit:
        last, microsecond = page[-1]
        cursor = CheckpointSearchCursor(
            last_created_at=moment(microsecond), last_checkpoint_uuid=last.tinker_path
        )
    return CheckpointSearchResponse(
        checkpoints=[checkpoint_record(saved) for saved, _ in page], next_cursor=cursor
    )


async def _check_projects(state: State, projects: list[str], owner: str) -> None:
    """Refuse projects that an owner cannot list."""
    unknown = state.database.checkpoints.unknown_projects
    if missing := await asyncio.to_thread(unknown, projects, owner):
        raise Refusal(
            404, f"there is no project {missing[0]!r} that you can list; leave project_ids out"
        )
