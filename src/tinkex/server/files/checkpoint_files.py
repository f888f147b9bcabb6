"""Checkpoints on disk: whole or not there, and each mistake in naming one gets its own message."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.engine.api import EngineError
from tinkex.engine.places import Directory
from tinkex.server.database.entities import Run, Save, SavedCheckpoint
from tinkex.server.database.interface import Database
from tinkex.server.files.data_dir import discard, is_full_disk, sync_above
from tinkex.server.files.seals import contents, write_whole
from tinkex.server.runs.scheduler import Beside
from tinkex.server.state import State
from tinkex.types.checkpoints import KINDS, SCHEME, ParsedCheckpointTinkerPath

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
NAME_RULE = "use letters, digits, '.', '_' and '-', at most 200, and no '.' or '-' in front"
WEIGHTS = "adapter_model.safetensors"
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600


def check_name(name: str) -> None:
    """Refuse a name that a checkpoint cannot have."""
    if not NAME.fullmatch(name):
        raise EngineError(f"checkpoint name {name!r} is not allowed: {NAME_RULE}")


def expiry(ttl_seconds: int | None) -> float | None:
    """When something expires that lives so long from now on; refuses what is out of range."""
    if ttl_seconds is None:
        return None
    if not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise EngineError(
            f"ttl_seconds must lie between {MIN_TTL} and {MAX_TTL}, got {ttl_seconds}"
        )
    return time.time() + ttl_seconds


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checkpoint that is to be made."""

    kind: str
    name: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    overwrite: bool = False
    project_id: str | None = None
    request_id: str | None = None
    """Who asks for it: carried out again after a crash, a request finds its own work done."""


def saving(
    state: State,
    run: Run,
    wanted: Wanted,
    answer: Callable[[Save], Any],
    *,
    optimizer: bool,
    finish: Callable[[Path], None] | None = None,
) -> Beside:
    """Save what a run has learnt so far; `finish` may change the files before they are in place. On
    the worker.

    A request that was met in an earlier life is not met again: what it saved may have been replaced
    or deleted since.
    """
    writer = state.engine.writer(run.model_id, optimizer=optimizer)

    def write(directory: Directory) -> None:
        writer.write(directory)
        if finish is not None:
            finish(directory.path)

    def begin() -> Save | Path:
        done = (
            None
            if wanted.request_id is None
            else state.database.checkpoints.save(wanted.request_id)
        )
        return done or _write_files(state.database, state.checkpoint_dir, run, wanted, write)

    def end(written: Save | Path) -> Any:
        if isinstance(written, Save):
            return answer(written)
        saved = _place_files(state.database, run, wanted, written)
        return answer(Save(saved.tinker_path, saved.size_bytes))

    return Beside(begin, end)


def put_files(
    database: Database, root: Path, run: Run, wanted: Wanted, write: Callable[[Directory], None]
) -> SavedCheckpoint:
    """Write to a temporary name, flush, rename, then record: a checkpoint is whole or not there."""
    return _place_files(database, run, wanted, _write_files(database, root, run, wanted, write))


def _free_path(database: Database, run: Run, wanted: Wanted) -> str:
    """The path of a checkpoint that may be made."""
    path = f"{SCHEME}{run.model_id}/{wanted.kind}/{wanted.name}"
    if not wanted.overwrite and database.checkpoints.get(path) is not None:
        hint = "; pass overwrite=True to replace it" if wanted.kind == "weights" else ""
        raise EngineError(f"checkpoint {path} exists already{hint}")
    return path


def _write_files(
    database: Database, root: Path, run: Run, wanted: Wanted, write: Callable[[Directory], None]
) -> Path:
    """Write to a temporary name, and flush."""
    check_name(wanted.name)
    expiry(wanted.ttl_seconds)
    path = _free_path(database, run, wanted)
    parent = _place(root, run.model_id) / wanted.kind

    with _telling_of_a_full_disk(path):
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
        write_whole(write, scratch)
    return scratch


def _place_files(database: Database, run: Run, wanted: Wanted, scratch: Path) -> SavedCheckpoint:
    """Let files that were written be a checkpoint. Saves do it on the worker, as loads do: neither
    sees half of it.
    """
    parent = scratch.parent
    target = parent / wanted.name
    try:
        path = _free_path(database, run, wanted)  # another save may have been quicker
        if target.exists():  # what is replaced stays whole until its successor is on record
            target = parent / f"{wanted.name}.{secrets.token_hex(4)}"
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_above(target, 3)  # up to the directory of all checkpoints
    replaced = database.checkpoints.directory(path)
    saved = SavedCheckpoint(
        tinker_path=path,
        model_id=run.model_id,
        directory=target,
        created=time.time(),
        base_model=run.base_model,
        lora=run.lora,
        optimizer=run.optimizer,
        size_bytes=sum(file.stat().st_size for file in contents(target)),
        expires=expiry(wanted.ttl_seconds),
        user_metadata=wanted.user_metadata,
        owner=run.owner,
        project_id=wanted.project_id,
        base_digest=run.base_digest,
    )
    database.checkpoints.put(saved, wanted.request_id)
    if replaced is not None:
        discard(replaced)
    return saved


@contextlib.contextmanager
def _telling_of_a_full_disk(path: str) -> Iterator[None]:
    """Makes one line of it: whoever saves can make room, and a traceback tells nothing more."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise EngineError(f"{path} was not saved: the server's disk is full", "server") from error


def _place(root: Path, model_id: str) -> Path:
    return root / model_id.replace(":", "_")


def clear_leftovers(state: State, model_id: str) -> None:
    """Delete what a killed server left of saving and deleting a run's checkpoints: whatever is not
    on record.
    """
    kept = state.database.checkpoints.directories(model_id)
    for directory in _place(state.checkpoint_dir, model_id).glob("*/*"):
        if directory not in kept:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def reading(directory: Path, name: str) -> Iterator[None]:
    """Say so when files were deleted while they were read."""
    try:
        yield
    except (FileNotFoundError, EngineError):
        if directory.is_dir():
            raise
        raise EngineError(f"{name} was deleted while it was read") from None


def readable(state: State, path: str, reader: str) -> SavedCheckpoint | None:
    """A checkpoint that is there, and that someone may read."""
    saved = state.database.checkpoints.get(path)
    return saved if saved is not None and saved.is_shown_to(reader) else None


def find_checkpoint(
    state: State, path: str, kind: str, base_model: str | None = None, *, reader: str
) -> SavedCheckpoint:
    """A checkpoint of the kind (and the base model) an operation needs; each mistake gets its own
    message.

    One that its reader may not see is not there for them.
    """
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise EngineError(str(error)) from None
    if parsed.checkpoint_type not in (KINDS[kind], "external"):
        raise EngineError(
            f"{path} is a {parsed.checkpoint_type} checkpoint; this needs a {KINDS[kind]} one "
            f"(tinker://<run>/{kind}/<name>)"
        )
    saved = readable(state, path, reader)
    if saved is None:
        raise EngineError(
            f"there is no checkpoint {path}; it was never saved, or has been deleted or expired"
        )
    if parsed.checkpoint_type == "external" and not (saved.directory / WEIGHTS).exists():
        raise EngineError(
            f"{path} is encrypted for its recipients, so that this server cannot read it"
        )
    if base_model is not None and saved.base_model != base_model:
        raise EngineError(
            f"checkpoint {path} is of base model {saved.base_model!r}, this is {base_model!r}"
        )
    return saved
