"""Checkpoints on disk: whole or not there, and each mistake in naming one gets its own message."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from tinkex.engine import EngineError
from tinkex.server.state import State
from tinkex.server.store import Run, SavedCheckpoint
from tinkex.types.checkpoints import KINDS, SCHEME, ParsedCheckpointTinkerPath

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600


def save_checkpoint(
    state: State,
    run: Run,
    kind: str,
    name: str,
    *,
    optimizer: bool,
    overwrite: bool,
    ttl_seconds: int | None,
    user_metadata: dict[str, str] | None,
) -> str:
    """Write to a temporary name, rename, then record: a checkpoint is whole or not there. On the worker."""
    if not NAME.fullmatch(name):
        raise EngineError(
            f"checkpoint name {name!r} is not allowed: use letters, digits, '.', '_' and '-', at most 200"
        )
    if ttl_seconds is not None and not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise EngineError(f"ttl_seconds must lie between {MIN_TTL} and {MAX_TTL}, got {ttl_seconds}")
    path = f"{SCHEME}{run.model_id}/{kind}/{name}"
    existing = state.store.checkpoint(path)
    if existing is not None and not overwrite:
        hint = "; pass overwrite=True to replace it" if kind == "weights" else ""
        raise EngineError(f"checkpoint {path} exists already{hint}")
    parent = state.checkpoint_dir / run.model_id.replace(":", "_") / kind
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / (name if existing is None else f"{name}.{secrets.token_hex(4)}")
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        state.engine.save(run.model_id, scratch, optimizer=optimizer)
        if target.exists():  # an expired checkpoint, or one whose record was lost: the name is free
            shutil.rmtree(target)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _sync_directory(parent)
    state.store.put_checkpoint(
        SavedCheckpoint(
            tinker_path=path,
            model_id=run.model_id,
            directory=target,
            created=time.time(),
            base_model=run.base_model,
            lora=run.lora,
            optimizer=run.optimizer,
            size_bytes=sum(file.stat().st_size for file in target.iterdir()),
            expires=None if ttl_seconds is None else time.time() + ttl_seconds,
            user_metadata=user_metadata or {},
            owner=run.owner,
        )
    )
    if existing is not None:
        shutil.rmtree(existing.directory, ignore_errors=True)
    return path


def _sync_directory(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def find_checkpoint(
    state: State, path: str, kind: str, base_model: str | None = None, *, reader: str
) -> SavedCheckpoint:
    """A checkpoint of the kind (and the base model) an operation needs; each mistake gets its own message.

    One that its reader may not see is not there for them.
    """
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise EngineError(str(error)) from None
    if parsed.checkpoint_type != KINDS[kind]:
        raise EngineError(
            f"{path} is a {parsed.checkpoint_type} checkpoint; this needs a {KINDS[kind]} one "
            f"(tinker://<run>/{kind}/<name>)"
        )
    saved = state.store.checkpoint(path)
    if saved is None or not saved.is_shown_to(reader):
        raise EngineError(f"there is no checkpoint {path}; it was never saved, or has been deleted or expired")
    if base_model is not None and saved.base_model != base_model:
        raise EngineError(f"checkpoint {path} is of base model {saved.base_model!r}, this is {base_model!r}")
    return saved
