"""List runs and checkpoints; publish, copy and delete checkpoints, and set their time to live.

To others than its owner, an object does not exist, unless it was published. Everyone can read what
was published; only its owner can change it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.engine.api import Directory
from tinkex.server.calls import Call
from tinkex.server.database.entities import Run, RunRecord, SavedCheckpoint
from tinkex.server.files.checkpoint_files import (
    NAME,
    NAME_RULE,
    SaveSpec,
    expiry,
)
from tinkex.server.files.data_dir import discard
from tinkex.server.files.seals import check, contents
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
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
from tinkex.types.sessions import Empty
from tinkex.wire.protocol import PREFIX, RUN

PAGE, CHECKPOINT_PAGE, LARGEST_PAGE = 20, 100, 1000
ID_RULE = (
    "expected training_runs/<run>/checkpoints/<kind>/<name>, where <kind> is one of "
    f"{', '.join(KINDS)}"
)


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────


@handler
async def list_training_runs(state: State, call: Call) -> TrainingRunsResponse:
    """List a page of the caller's runs, or of all runs that the caller may see."""
    limit, offset = _number(call, "limit", PAGE), _number(call, "offset", 0)
    limit = min(limit, LARGEST_PAGE)

    found, total = await asyncio.to_thread(
        state.database.runs.page,
        call.owner,
        accessible=_is_accessible(call),
        project_id=call.query.get("project_id"),
        limit=limit,
        offset=offset,
    )
    return TrainingRunsResponse(
        training_runs=[_training_run(state, record, call.owner) for record in found],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@handler
async def get_training_run(state: State, call: Call) -> TrainingRun:
    """Describe one run."""
    return _training_run(
        state, await _run_of(state, call, accessible=_is_accessible(call)), call.owner
    )


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
    limit, offset = _number(call, "limit", CHECKPOINT_PAGE), _number(call, "offset", 0)
    limit = -1 if whole else min(limit, LARGEST_PAGE)

    page = state.database.checkpoints.page
    found, total = await asyncio.to_thread(
        page, call.owner, model_id=model_id, limit=limit, offset=offset
    )
    return CheckpointsListResponse(
        checkpoints=[checkpoint_record(saved) for saved in found],
        cursor=Cursor(offset=offset, limit=len(found) if whole else limit, total_count=total),
    )


async def _run_of(state: State, call: Call, *, accessible: bool) -> RunRecord:
    model_id = call.path["training_run_id"]

    record = await asyncio.to_thread(
        state.database.runs.record, model_id, call.owner, accessible=accessible
    )
    if record is None:
        raise Refusal(404, f"there is no training run {model_id!r}")
    return record


def _number(call: Call, name: str, default: int) -> int:
    text = call.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise Refusal(400, f"{name} must be a whole number from 0 on, got {text!r}")
    return int(text)


def _is_accessible(call: Call) -> bool:
    scope = call.query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise Refusal(400, f"access_scope must be owned or accessible, got {scope!r}")
    return scope == "accessible"


def _training_run(state: State, record: RunRecord, reader: str) -> TrainingRun:
    run = record.run
    return TrainingRun(
        training_run_id=run.model_id,
        base_model=run.base_model,
        model_owner=run.owner,
        is_lora=True,
        corrupted=record.corrupted,
        lora_rank=run.lora.rank,
        last_request_time=_moment(
            max(record.last_request, state.runs.asked.get(run.model_id, 0.0))
        ),
        last_checkpoint=checkpoint_record(record.last_training) if record.last_training else None,
        last_sampler_checkpoint=checkpoint_record(record.last_sampler)
        if record.last_sampler
        else None,
        user_metadata=(texts(run.user_metadata) or None) if run.owner == reader else None,
        loaded=state.runs.is_loaded(run.model_id),
    )


def checkpoint_record(saved: SavedCheckpoint) -> Checkpoint:
    """Return a checkpoint as lists show it."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(saved.tinker_path)
    return Checkpoint(
        checkpoint_id=parsed.checkpoint_id,
        checkpoint_type=parsed.checkpoint_type,
        time=_moment(saved.created),
        tinker_path=saved.tinker_path,
        size_bytes=saved.size_bytes,
        public=saved.public,
        user_metadata=saved.user_metadata or None,
        expires_at=None if saved.expires is None else _moment(saved.expires),
        base_model=saved.base_model,
    )


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as lists show it: other values than texts become JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


# ── changes ───────────────────────────────────────────────────────────────────────────────────────


def checkpoint_path(call: Call) -> str:
    """Return the path of the checkpoint in a request's address; refuse a malformed one."""
    run, kind, name = (call.path[part] for part in ("training_run_id", "kind", "name"))
    if kind not in KINDS:
        raise Refusal(400, f"{kind!r} is not a kind of checkpoint: {ID_RULE}")
    if not NAME.fullmatch(name):
        raise Refusal(400, f"{name!r} is not a checkpoint's name: {NAME_RULE}")
    return f"{SCHEME}{run}/{kind}/{name}"


def nothing_at(path: str) -> Refusal:
    """Return the answer for a checkpoint that does not exist, or belongs to another."""
    return Refusal(
        404, f"there is no checkpoint {path}; it was never saved, or has been deleted or expired"
    )


@handler
async def delete_checkpoint(state: State, call: Call) -> Empty:
    """Delete a checkpoint: record and files. Samplers that have it in memory keep it."""
    path = checkpoint_path(call)
    directory = await asyncio.to_thread(state.database.checkpoints.remove, path, call.owner)
    if directory is None:
        raise nothing_at(path)
    await asyncio.to_thread(discard, directory)
    return Empty()


@handler
async def publish_checkpoint(state: State, call: Call) -> Empty:
    """Let everyone read a checkpoint; doing it again changes nothing."""
    return await _publish(state, call, True)


@handler
async def unpublish_checkpoint(state: State, call: Call) -> Empty:
    """Make a checkpoint private; doing it again changes nothing."""
    return await _publish(state, call, False)


async def _publish(state: State, call: Call, public: bool) -> Empty:
    path = checkpoint_path(call)
    if not await asyncio.to_thread(state.database.checkpoints.set_public, path, call.owner, public):
        raise nothing_at(path)
    return Empty()


@handler
async def set_checkpoint_ttl(state: State, call: Call) -> Empty:
    """Let a checkpoint expire after a time from now, or never."""
    request: SetCheckpointTtlRequest = call.request
    path = checkpoint_path(call)
    if not await asyncio.to_thread(
        state.database.checkpoints.set_expiry, path, call.owner, expiry(request.ttl_seconds)
    ):
        raise nothing_at(path)
    return Empty()


# ── copies ────────────────────────────────────────────────────────────────────────────────────────

_copying = threading.Lock()


@handler
async def copy_weights(state: State, call: Call) -> CopyWeightsResponse:
    """Copy a checkpoint into a project, as a new run; a repeated request gives the same copy."""
    request: CopyWeightsRequest = call.request
    if not request.destination_project_id:
        raise Refusal(400, "copy_weights needs a destination_project_id")
    if request.session_id is not None or request.model_seq_id is not None:
        raise Refusal(
            400,
            "copy_weights makes a run of its own here: session_id and model_seq_id have no place "
            "in it",
        )
    try:
        ParsedCheckpointTinkerPath.from_tinker_path(request.source_path)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    key = call.headers.get("x-idempotency-key")
    copy_id = (
        uuid.uuid4()
        if key is None
        else uuid.uuid5(uuid.NAMESPACE_URL, f"{call.owner} {key} {call.digest.hex()}")
    )
    reader = await state.accounts.reader(
        call.owner, call.headers.get("x-tinker-weights-access-token")
    )
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
    kind, name = ParsedCheckpointTinkerPath.from_tinker_path(
        source.tinker_path
    ).checkpoint_id.split("/")
    run = Run(
        f"{copy_id}:train:0",
        copy_id,
        source.base_model,
        source.lora,
        source.optimizer,
        source.user_metadata,
        owner,
        source.base_digest,
    )
    spec = SaveSpec(
        kind,
        name,
        request.ttl_seconds,
        source.user_metadata,
        project_id=request.destination_project_id,
    )

    def write(directory: Directory) -> None:
        check(source.directory)
        for file in contents(source.directory):
            _link(file, directory.path / file.name)

    with _copying:
        made = state.database.checkpoints.get(f"{SCHEME}{run.model_id}/{kind}/{name}")
        try:
            made = made or state.checkpoints.put(run, spec, write)
        except FileNotFoundError:  # the source was deleted meanwhile
            return None
        if state.database.runs.get(run.model_id) is None:
            state.database.runs.add(run)
    return made


def _link(source: Path, target: Path) -> None:
    """Link a file: files of checkpoints never change. Copy it where links are not possible."""
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
