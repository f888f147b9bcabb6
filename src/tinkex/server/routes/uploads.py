"""Receive external weights at signed addresses; make checkpoints of them."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
import uuid
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.api import Directory, EngineError
from tinkex.engine.file_formats import (
    ADAPTER_CONFIG as CONFIG,
    ADAPTER_WEIGHTS as WEIGHTS,
    MAX_RANK,
)
from tinkex.server.calls import Call
from tinkex.server.database.interface import Run
from tinkex.server.files.checkpoint_files import SaveSpec
from tinkex.server.files.data_dir import sync_path
from tinkex.server.files.imports import GROUPS, Adapter, most_bytes, read_adapter
from tinkex.server.files.upload_files import COMING, Upload, find_upload, unfinished
from tinkex.server.http_errors import FULL_DISK, Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.queries import moment
from tinkex.server.routes.signed_addresses import SignedAddress
from tinkex.server.state import State
from tinkex.types.saves import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
)
from tinkex.wire.protocol import PREFIX

UPLOAD = SignedAddress("upload", f"{PREFIX}/uploads/{{upload_id}}/{{file}}", "start another upload")
LIFETIME = 6 * 3600
"""Seconds until an upload must be finished."""
MOST_UNFINISHED = 8
"""Uploads that an owner may have begun and not finished."""
CONFIG_BYTES = 64 << 10
IDLE_SECONDS = 60.0
"""Seconds without data until an upload is given up."""
PIECE = 1 << 20
NAME, ADAMW = "uploaded", {"type": "adamw"}


# ── beginning ─────────────────────────────────────────────────────────────────────────────────────


@handler
async def external_weights_upload_start(
    state: State, call: Call
) -> ExternalWeightsUploadStartResponse:
    """Begin an upload: give a signed address for each file."""
    request: ExternalWeightsUploadStartRequest = call.request
    upload = await asyncio.to_thread(_begin, state, request, call.owner)
    expires = int(upload.expires)
    urls = {
        name: UPLOAD.make(state.accounts, call, {"upload_id": upload.id, "file": name}, expires)
        for name in upload.sizes
    }
    until = moment(expires)
    return ExternalWeightsUploadStartResponse(upload_id=upload.id, urls=urls, expires=until)


def _begin(state: State, request: ExternalWeightsUploadStartRequest, owner: str) -> Upload:
    lora, project = request.lora_config, request.destination_project_id
    if project is not None and not 1 <= len(project) <= 200:
        raise Refusal(400, f"destination_project_id must have 1 to 200 characters: {project!r}")
    if not 1 <= lora.rank <= MAX_RANK:
        raise Refusal(400, f"lora_config.rank must be between 1 and {MAX_RANK}, got {lora.rank}")
    if not any(getattr(lora, f"train_{group}") for group in GROUPS):
        raise Refusal(400, "lora_config has no layers: set train_attn, train_mlp or train_unembed")
    try:
        weights = most_bytes(_files_of(state, request.base_model), lora)
    except EngineError as error:
        raise Refusal(400, str(error)) from None
    if unfinished(state.upload_dir, owner) >= MOST_UNFINISHED:
        why = f"{MOST_UNFINISHED} uploads have begun, which is the limit"
        raise Refusal(400, f"{why}: finish one, or wait")
    name = secrets.token_hex(16)
    sizes = {CONFIG: CONFIG_BYTES, WEIGHTS: weights}
    expires = float(int(time.time() + LIFETIME))
    upload = Upload(name, state.upload_dir / name, owner, expires, sizes, request)
    upload.write()
    return upload


def _files_of(state: State, base_model: str) -> Path:
    directory = state.workers.base_model(base_model).directory
    if directory is None:
        raise EngineError(f"this server takes no uploads for base model {base_model!r}")
    return directory


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


async def upload(state: State, call: Call) -> Response:
    """Take a file at its signed address."""
    request = call.http
    assert request is not None
    upload_id, file = call.path["upload_id"], call.path["file"]
    await UPLOAD.check(state.accounts, call)
    found = await asyncio.to_thread(find_upload, state.upload_dir, upload_id)
    if found is None or file not in found.sizes:
        raise Refusal(403, "this address has expired: start another upload")
    most = found.sizes[file]
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "compressed files are not supported: leave Content-Encoding out")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or len(length) > 18 or int(length) > most:
        raise Refusal(413, f"{file} must have at most {most} bytes, as lora_config says")
    target = found.directory / file
    if target in state.arriving or upload_id in state.finishing:
        raise Refusal(409, f"{file} is arriving, or the upload is being finished: wait for that")
    state.arriving.add(target)
    try:
        await _receive(request, target, most)
    finally:
        state.arriving.discard(target)
    return Response(status_code=200)


async def _receive(request: Request, target: Path, most: int) -> None:
    """Write a body to a file; a part of it never becomes the file."""
    scratch = target.with_name(target.name + COMING)
    chunks, size, held = request.stream(), 0, bytearray()
    try:
        with await asyncio.to_thread(scratch.open, "wb") as file:
            while True:
                try:
                    chunk = await asyncio.wait_for(anext(chunks), IDLE_SECONDS)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    why = f"no data came for {IDLE_SECONDS:g} s: send the file again"
                    raise Refusal(408, why) from None
                size += len(chunk)
                if size > most:
                    raise Refusal(413, f"{target.name} must have at most {most} bytes")
                held += chunk
                if len(held) >= PIECE:
                    await asyncio.to_thread(file.write, bytes(held))
                    held.clear()
            await asyncio.to_thread(file.write, bytes(held))
            await asyncio.to_thread(_flush, file)
        await asyncio.to_thread(os.replace, scratch, target)
        await asyncio.to_thread(sync_path, target.parent)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise Refusal(503, f"{target.name} was not stored: {FULL_DISK}") from None
    finally:
        await asyncio.to_thread(scratch.unlink, missing_ok=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


@handler
async def external_weights_upload_finish(
    state: State, call: Call
) -> ExternalWeightsUploadFinishResponse:
    """Make a checkpoint of an upload's files; a repeated request gets the same one."""
    request: ExternalWeightsUploadFinishRequest = call.request
    upload = await asyncio.to_thread(find_upload, state.upload_dir, request.upload_id)
    if upload is None or upload.owner != call.owner:
        given = request.upload_id[:64]
        raise Refusal(404, f"there is no upload {given!r}; it never began, or has expired")
    if upload.id in state.finishing:
        raise Refusal(409, f"upload {upload.id} is being finished already: wait for that")
    state.finishing.add(upload.id)
    try:
        path = await asyncio.to_thread(_finish, state, upload)
    except EngineError as error:
        # The caller cannot see the server's files.
        told = str(error).replace(f"{upload.directory}{os.sep}", "")
        told = told.replace(str(upload.directory), "the upload")
        raise Refusal(400 if error.category == "user" else 500, told) from None
    finally:
        state.finishing.discard(upload.id)
    return ExternalWeightsUploadFinishResponse(tinker_path=path)


def _finish(state: State, upload: Upload) -> str:
    request, session = upload.request, str(uuid.UUID(upload.id))
    base, lora = state.workers.base_model(request.base_model), request.lora_config
    run_id, base_model = f"{session}:train:0", base.name
    run = Run(run_id, session, base_model, lora, ADAMW, {}, upload.owner, base.digest)

    def write(place: Directory) -> None:
        _adapter(upload, _files_of(state, request.base_model)).writer(base.name, lora)(place)

    spec = SaveSpec("external_weights", NAME, project_id=request.destination_project_id)
    saved = state.checkpoints.put_once(run, spec, write)
    (upload.directory / "done").touch()
    upload.clear()
    return saved.tinker_path


def _adapter(upload: Upload, base_directory: Path) -> Adapter:
    """Read the files of an upload; refuse those that are not what was announced."""
    if missing := upload.missing():
        names = " and ".join(missing)
        raise EngineError(f"{names} has not been uploaded: send it with PUT to its address")
    adapter, lora = read_adapter(upload.directory, base_directory), upload.request.lora_config
    if adapter.source.rank != lora.rank:
        rank = f"r is {adapter.source.rank}, but lora_config has rank {lora.rank}"
        raise EngineError(f"{CONFIG}: {rank}; start an upload with the same rank")
    found = adapter.shape()
    for group in GROUPS:
        if getattr(found, f"train_{group}") and not getattr(lora, f"train_{group}"):
            why = f"{WEIGHTS} changes {group} layers, but lora_config does not train them"
            raise EngineError(f"{why}: start an upload with train_{group}=True")
    return adapter
