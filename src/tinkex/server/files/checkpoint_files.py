"""Checkpoints on disk: each is complete, or does not exist."""

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

from tinkex.engine.api import Directory, EngineError, Writer
from tinkex.server.database.interface import Database, Run, Save, SavedCheckpoint
from tinkex.server.files.data_dir import discard, is_full_disk, sync_above
from tinkex.server.files.seals import contents, write_whole
from tinkex.server.http_errors import FULL_DISK
from tinkex.server.workers.worker import OffThread
from tinkex.types.checkpoints import KINDS, SCHEME, ParsedCheckpointTinkerPath

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
NAME_RULE = "use letters, digits, '.', '_' and '-', at most 200, and no '.' or '-' in front"
WEIGHTS = "adapter_model.safetensors"
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600


def check_name(name: str) -> None:
    """Refuse a name that a checkpoint cannot have."""
    if not NAME.fullmatch(name):
        raise EngineError(f"checkpoint name {name!r} is not allowed: {NAME_RULE}")


def no_checkpoint(path: str) -> str:
    """Return the message for a checkpoint that the caller cannot find."""
    return f"there is no checkpoint {path}; it was never saved, or has been deleted or expired"


def expiry(ttl_seconds: int | None) -> float | None:
    """Return the time at which a time to live ends; refuse one that is out of range."""
    if ttl_seconds is None:
        return None
    if not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise EngineError(f"ttl_seconds must be between {MIN_TTL} and {MAX_TTL}, got {ttl_seconds}")
    return time.time() + ttl_seconds


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """A checkpoint to make."""

    kind: str
    name: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    overwrite: bool = False
    project_id: str | None = None
    request_id: str | None = None
    """The id of the request: repeated after a crash, it finds its own work done."""


class Checkpoints:
    """The checkpoints of a data directory: their files, and what is on record of them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._root = database.root / "checkpoints"

    # ── making ────────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        run: Run,
        spec: SaveSpec,
        writer: Writer,
        answer: Callable[[Save], Any],
        finish: Callable[[Path], None] | None = None,
    ) -> OffThread:
        """Save a run, on the worker; `finish` may change the files first.

        A request that was met in an earlier life is not met again: what it saved may have been
        replaced or deleted since.
        """

        def write(directory: Directory) -> None:
            writer.write(directory)
            if finish is not None:
                finish(directory.path)

        def begin() -> Save | Path:
            done = spec.request_id and self._database.checkpoints.save(spec.request_id)
            return done or self._write(run, spec, write)

        def end(written: Save | Path) -> Any:
            if isinstance(written, Save):
                return answer(written)
            saved = self._place(run, spec, written)
            return answer(Save(saved.tinker_path, saved.size_bytes))

        return OffThread(begin, end)

    def put(self, run: Run, spec: SaveSpec, write: Callable[[Directory], None]) -> SavedCheckpoint:
        """Make a checkpoint: write it elsewhere, flush, rename and record it."""
        return self._place(run, spec, self._write(run, spec, write))

    def put_once(
        self, run: Run, spec: SaveSpec, write: Callable[[Directory], None]
    ) -> SavedCheckpoint:
        """Make a checkpoint and its run, or return what an equal request has made."""
        path = f"{SCHEME}{run.model_id}/{spec.kind}/{spec.name}"
        saved = self._database.checkpoints.get(path) or self.put(run, spec, write)
        if self._database.runs.get(run.model_id) is None:
            self._database.runs.add(run)
        return saved

    def _free_path(self, run: Run, spec: SaveSpec) -> str:
        """Return the path of a checkpoint that may be made."""
        path = f"{SCHEME}{run.model_id}/{spec.kind}/{spec.name}"
        if not spec.overwrite and self._database.checkpoints.get(path) is not None:
            hint = "; pass overwrite=True to replace it" if spec.kind == "weights" else ""
            raise EngineError(f"checkpoint {path} exists already{hint}")
        return path

    def _write(self, run: Run, spec: SaveSpec, write: Callable[[Directory], None]) -> Path:
        """Write to a temporary name, and flush."""
        check_name(spec.name)
        expiry(spec.ttl_seconds)
        path = self._free_path(run, spec)
        parent = self._directory(run.model_id) / spec.kind
        try:
            parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
            write_whole(write, scratch)
        except Exception as error:
            if not is_full_disk(error):
                raise
            # without a traceback: the user can make room
            raise EngineError(f"{path} was not saved: {FULL_DISK}", "server") from error
        return scratch

    def _place(self, run: Run, spec: SaveSpec, scratch: Path) -> SavedCheckpoint:
        """Let files that were written be a checkpoint.

        Saves do it on the worker, as loads do: neither sees half of the other.
        """
        parent = scratch.parent
        target = parent / spec.name
        try:
            path = self._free_path(run, spec)  # another save may have been quicker
            if target.exists():  # what is replaced stays whole until its successor is on record
                target = parent / f"{spec.name}.{secrets.token_hex(4)}"
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_above(target, 3)  # up to the directory of all checkpoints
        replaced = self._database.checkpoints.directory(path)
        saved = SavedCheckpoint(
            tinker_path=path,
            model_id=run.model_id,
            directory=target,
            created=time.time(),
            base_model=run.base_model,
            lora=run.lora,
            optimizer=run.optimizer,
            size_bytes=sum(file.stat().st_size for file in contents(target)),
            expires=expiry(spec.ttl_seconds),
            user_metadata=spec.user_metadata,
            owner=run.owner,
            project_id=spec.project_id,
            base_digest=run.base_digest,
        )
        self._database.checkpoints.put(saved, spec.request_id)
        if replaced is not None:
            discard(replaced)
        return saved

    def _directory(self, run: str) -> Path:
        return self._root / run.replace(":", "_")

    def clear_leftovers(self, run: str) -> None:
        """Delete the files of a run's checkpoints that are not on record.

        A killed server leaves such files.
        """
        kept = self._database.checkpoints.directories(run)
        for directory in self._directory(run).glob("*/*"):
            if directory not in kept:
                shutil.rmtree(directory, ignore_errors=True)

    # ── finding ───────────────────────────────────────────────────────────────────────────────────

    def readable(self, path: str, reader: str) -> SavedCheckpoint | None:
        """Return a checkpoint that is there and that its reader may see, or None."""
        saved = self._database.checkpoints.get(path)
        return saved if saved is not None and saved.is_shown_to(reader) else None

    def find(
        self, path: str, kind: str, base_model: str | None = None, *, reader: str
    ) -> SavedCheckpoint:
        """Return a checkpoint of the kind (and the base model) that an operation needs.

        Each mistake has its own message. A checkpoint that the reader may not see does not exist.
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
        saved = self.readable(path, reader)
        if saved is None:
            raise EngineError(no_checkpoint(path))
        if parsed.checkpoint_type == "external" and not (saved.directory / WEIGHTS).exists():
            raise EngineError(f"{path} is encrypted: this server cannot read it")
        if base_model is not None and saved.base_model != base_model:
            raise EngineError(
                f"checkpoint {path} is of base model {saved.base_model!r}, this is {base_model!r}"
            )
        return saved


@contextlib.contextmanager
def reading(directory: Path, name: str) -> Iterator[None]:
    """Report that files were deleted while they were read."""
    try:
        yield
    except (FileNotFoundError, EngineError):
        if directory.is_dir():
            raise
        raise EngineError(f"{name} was deleted while it was read") from None
