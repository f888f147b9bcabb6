"""List and search runs and checkpoints; change, copy and delete checkpoints.

To others than its owner, an object does not exist, unless it was published. Everyone can read what
was published; only its owner can change it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinkex.engine.api import Directory
from tinkex.server.calls import Call
from tinkex.server.database.interface import Run, RunRecord, SavedCheckpoint
from tinkex.server.files.checkpoint_files import (
    NAME,
    NAME_RULE,
    SaveSpec,
    expiry,
    no_checkpoint,
)
from tinkex.server.files.data_dir import discard
from tinkex.server.files.seals import check, contents
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.queries import SCOPES, choice, is_sought, moment, texts, whole_number
from tinkex.server.state import State
from tinkex.types.checkpoints import (
    KINDS,
    SCHEME,
    Checkpoint,
    CheckpointsListResponse,
    Cursor,
    ParsedCheckpointTinkerPath,
    TrainingRun,
    TrainingRunsResponse,
)
from tinkex.types.saves import CopyWeightsRequest, CopyWeightsResponse, SetCheckpointTtlRequest
from tinkex.types.search_requests import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
)
from tinkex.types.sessions import Empty
from tinkex.wire.protocol import PREFIX, RUN

T = TypeVar("T")

PAGE, CHECKPOINT_PAGE, LARGEST_PAGE = 20, 100, 1000
ID_RULE = (
    "expected training_runs/<run>/checkpoints/<kind>/<name>, where <kind> is one of "
    f"{', '.join(KINDS)}"
)


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────


@handler
async def list_training_runs(state: State, call: Call) -> TrainingRunsResponse:
    """List a page of the caller's runs, or of all runs that the caller may see."""
    limit, offset = _page(call, PAGE)
    page = partial(state.database.runs.page, project_id=call.query.get("project_id"))
    found, total = await asyncio.to_thread(
        page, call.owner, accessible=_is_accessible(call), limit=limit, offset=offset
    )
    return TrainingRunsResponse(
        training_runs=[_training_run(state, record, call.owner) for record in found],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@handler
async def get_training_run(state: State, call: Call) -> TrainingRun:
    """Describe one run."""
    record = await _run_of(state, call, accessible=_is_accessible(call))
    return _training_run(state, record, call.owner)


@handler
async def list_checkpoints(state: State, call: Call) -> CheckpointsListResponse:
    """List the checkpoints of a run: all of them, unless a page is asked for."""
    record = await _run_of(state, call, accessible=True)
    return await _checkpoints(state, call, record.run.model_id)


@handler
async def list_user_checkpoints(state: State, call: Call) -> CheckpointsListResponse:
    """List a page of the caller's checkpoints, of all runs."""
    return await _checkpoints(state, call, None)


async def _checkpoints(state: State, call: Call, model_id: str | None) -> CheckpointsListResponse:
    whole = model_id is not None and "limit" not in call.query
    limit, offset = _page(call, CHECKPOINT_PAGE)
    limit = -1 if whole else limit
    page = partial(state.database.checkpoints.page, call.owner, model_id=model_id)
    found, total = await asyncio.to_thread(page, limit=limit, offset=offset)
    return CheckpointsListResponse(
        checkpoints=[checkpoint_record(saved) for saved in found],
        cursor=Cursor(offset=offset, limit=len(found) if whole else limit, total_count=total),
    )


async def _run_of(state: State, call: Call, *, accessible: bool) -> RunRecord:
    model_id = call.path["training_run_id"]
    find = state.database.runs.record
    record = await asyncio.to_thread(find, model_id, call.owner, accessible=accessible)
    if record is None:
        raise Refusal(404, f"there is no training run {model_id!r}")
    return record


def _page(call: Call, size: int) -> tuple[int, int]:
    """Return the limit, at most LARGEST_PAGE, and the offset of a list."""
    limit = whole_number(call, "limit", size)
    return min(limit, LARGEST_PAGE), whole_number(call, "offset", 0)


def _is_accessible(call: Call) -> bool:
    return choice(call, "access_scope", SCOPES) == "accessible"


def _training_run(state: State, record: RunRecord, reader: str) -> TrainingRun:
    run = record.run
    asked = state.runs.asked.get(run.model_id, 0.0)
    training, sampler = (
        checkpoint_record(saved) if saved else None
        for saved in (record.last_training, record.last_sampler)
    )
    return TrainingRun(
        training_run_id=run.model_id,
        base_model=run.base_model,
        model_owner=run.owner,
        is_lora=True,
        corrupted=record.corrupted,
        lora_rank=run.lora.rank,
        last_request_time=moment(max(record.last_request, asked)),
        last_checkpoint=training,
        last_sampler_checkpoint=sampler,
        user_metadata=(texts(run.user_metadata) or None) if run.owner == reader else None,
        loaded=state.runs.is_loaded(run.model_id),
    )


def checkpoint_record(saved: SavedCheckpoint) -> Checkpoint:
    """Return a checkpoint as lists show it."""
    parsed = parsed_path(saved.tinker_path)
    return Checkpoint(
        checkpoint_id=parsed.checkpoint_id,
        checkpoint_type=parsed.checkpoint_type,
        time=moment(saved.created),
        tinker_path=saved.tinker_path,
        size_bytes=saved.size_bytes,
        public=saved.public,
        user_metadata=saved.user_metadata or None,
        expires_at=None if saved.expires is None else moment(saved.expires),
        base_model=saved.base_model,
    )


# ── searches ──────────────────────────────────────────────────────────────────────────────────────


@handler
async def search_checkpoints(state: State, call: Call) -> CheckpointSearchResponse:
    """Return a page of the caller's own checkpoints; other owners' are never shown."""
    request: CheckpointSearchRequest = call.request
    if request.project_ids is not None:
        await _check_projects(state, request.project_ids, call.owner)
    if not is_sought(call.owner, request.owner):
        return CheckpointSearchResponse(checkpoints=[])
    found = await asyncio.to_thread(state.database.checkpoints.search, request, call.owner)
    page, cursor = found[: request.limit], None
    if len(found) > request.limit:
        last, microsecond = page[-1]
        cursor = CheckpointSearchCursor(
            last_created_at=moment(microseconds=microsecond), last_checkpoint_uuid=last.tinker_path
        )
    records = [checkpoint_record(saved) for saved, _ in page]
    return CheckpointSearchResponse(checkpoints=records, next_cursor=cursor)


async def _check_projects(state: State, projects: list[str], owner: str) -> None:
    """Refuse projects that an owner cannot list."""
    unknown = state.database.checkpoints.unknown_projects
    if missing := await asyncio.to_thread(unknown, projects, owner):
        why = f"there is no project {missing[0]!r} that you can list"
        raise Refusal(404, f"{why}: leave it out of project_ids")


# ── changes ───────────────────────────────────────────────────────────────────────────────────────


def checkpoint_path(call: Call) -> str:
    """Return the path of the checkpoint in an address; refuse a malformed one."""
    run, kind, name = (call.path[part] for part in ("training_run_id", "kind", "name"))
    if kind not in KINDS:
        raise Refusal(400, f"{kind!r} is not a kind of checkpoint: {ID_RULE}")
    if not NAME.fullmatch(name):
        raise Refusal(400, f"{name!r} is not a checkpoint's name: {NAME_RULE}")
    return f"{SCHEME}{run}/{kind}/{name}"


def parsed_path(path: str) -> ParsedCheckpointTinkerPath:
    """Return the parts of a checkpoint's path; refuse a malformed one."""
    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise Refusal(400, str(error)) from None


def nothing_at(path: str) -> Refusal:
    """Return the answer for a checkpoint that does not exist, or belongs to another."""
    return Refusal(404, no_checkpoint(path))


async def _changed(call: Call, change: Callable[..., T], *values: object) -> T:
    """Change a checkpoint of the caller; refuse one that does not exist."""
    path = checkpoint_path(call)
    if not (found := await asyncio.to_thread(change, path, call.owner, *values)):
        raise nothing_at(path)
    return found


@handler
async def delete_checkpoint(state: State, call: Call) -> Empty:
    """Delete a checkpoint: record and files. Samplers that have it in memory keep it."""
    directory = await _changed(call, state.database.checkpoints.remove)
    assert directory is not None
    await asyncio.to_thread(discard, directory)
    return Empty()


@handler
async def publish_checkpoint(state: State, call: Call) -> Empty:
    """Let everyone read a checkpoint; doing it again changes nothing."""
    await _changed(call, state.database.checkpoints.set_public, True)
    return Empty()


@handler
async def unpublish_checkpoint(state: State, call: Call) -> Empty:
    """Make a checkpoint private; doing it again changes nothing."""
    await _changed(call, state.database.checkpoints.set_public, False)
    return Empty()


@handler
async def set_checkpoint_ttl(state: State, call: Call) -> Empty:
    """Let a checkpoint expire after a time from now, or never."""
    request: SetCheckpointTtlRequest = call.request
    expires = expiry(request.ttl_seconds)
    await _changed(call, state.database.checkpoints.set_expiry, expires)
    return Empty()


# ── copies ────────────────────────────────────────────────────────────────────────────────────────

_copying = threading.Lock()


@handler
async def copy_weights(state: State, call: Call) -> CopyWeightsResponse:
    """Copy a checkpoint into a project, as a new run; a repeat gives the same."""
    request: CopyWeightsRequest = call.request
    if not request.destination_project_id:
        raise Refusal(400, "copy_weights needs a destination_project_id")
    if request.session_id is not None or request.model_seq_id is not None:
        why = "copy_weights makes a run of its own"
        raise Refusal(400, f"{why}: leave session_id and model_seq_id out")
    parsed_path(request.source_path)
    key = call.headers.get("x-idempotency-key")
    copy_id = uuid.uuid4()
    if key is not None:
        copy_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{call.owner} {key} {call.digest.hex()}")
    token = call.headers.get("x-tinker-weights-access-token")
    reader = await state.accounts.reader(call.owner, token)
    saved = await asyncio.to_thread(_copy, state, request, call.owner, reader, str(copy_id))
    if saved is None:
        raise nothing_at(request.source_path)
    return CopyWeightsResponse(tinker_path=saved.tinker_path)


def _copy(
    state: State, request: CopyWeightsRequest, owner: str, reader: str, copy_id: str
) -> SavedCheckpoint | None:
    source = state.checkpoints.readable(request.source_path, reader)
    if source is None:
        return None
    kind, name = parsed_path(source.tinker_path).checkpoint_id.split("/")
    trained = (source.base_model, source.lora, source.optimizer, source.user_metadata)
    run = Run(f"{copy_id}:train:0", copy_id, *trained, owner, source.base_digest)
    project = request.destination_project_id
    spec = SaveSpec(kind, name, request.ttl_seconds, source.user_metadata, project_id=project)

    def write(directory: Directory) -> None:
        check(source.directory)
        for file in contents(source.directory):
            _link(file, directory.path / file.name)

    with _copying:
        try:
            return state.checkpoints.put_once(run, spec, write)
        except FileNotFoundError:  # the source was deleted meanwhile
            return None


def _link(source: Path, target: Path) -> None:
    """Link a file of a checkpoint, as it never changes; else copy it."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


# ── misnamed ──────────────────────────────────────────────────────────────────────────────────────


MISNAMED = f"{PREFIX}/{RUN}/checkpoints/{{rest:path}}"


async def misnamed(state: State, call: Call) -> None:
    """Explain the rule for the ids of checkpoints to a request with another id."""
    assert call.http is not None
    given = call.path["rest"]
    if given.split("/")[0] in KINDS and given.count("/") >= 1:
        raise Refusal(404, f"there is no {call.http.method} {call.http.url.path} here")
    raise Refusal(400, f"{given!r} is not a checkpoint's id: {ID_RULE}")
