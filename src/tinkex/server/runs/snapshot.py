"""Snapshots: the state of a run on disk, with its unread results.

Every so often an optimizer step, when no gradient is pending, also takes the state of its run. Its
files are written beside what comes next. With the unread results and the nameless samplers in
memory it comes into force by a rename, and the journal before it is dropped. A run is rebuilt from
its last snapshot and the calls that its journal holds after it.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.engine.api import EngineError, Writer
from tinkex.server.database.interface import Run
from tinkex.server.files.data_dir import is_full_disk, sync_path
from tinkex.server.files.seals import check, write_whole
from tinkex.server.http_errors import complain
from tinkex.server.parts import Parts
from tinkex.server.runs.journal import Entry, encode as encode_entry, read_records
from tinkex.server.runs.promises import JUST_READ, Promise, encode
from tinkex.server.runs.work import LiveRun
from tinkex.server.workers.worker import Worker
from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.optimizers import OptimizerConfigBase
from tinkex.wire import codec
from tinkex.wire.protocol import BY_NAME

UNFINISHED = "unfinished-"
"""The first part of a snapshot's name while its files are written."""
RESULTS = "results.log"
COMPLAINT = "the state of a run could not be written; its journal stays"
STATE_OPERATIONS = 32
"""After so many operations of a run, or …"""
STATE_SECONDS = 30.0
"""… so many seconds, its next optimizer step makes a snapshot."""
STATE_REST = 40
"""But not before so many times the time that its last one took: that of a large model takes
seconds, and a disk and processors have other things to do."""
KINDS: dict[str, type[Any]] = {
    op.result.__name__: op.result for op in BY_NAME.values() if op.result is not None
} | {"RequestFailedResponse": RequestFailedResponse}
"""The types of results, by name."""


class Snapshots:
    """The snapshots of all runs."""

    def __init__(self, parts: Parts) -> None:
        self._journals, self._promises = parts.journals, parts.promises
        self._nameless, self._recordings = parts.nameless, parts.recordings
        self._journal_bytes = parts.limits.journal_bytes

    # ── making one, on the worker ─────────────────────────────────────────────────────────────────

    def freeze_when_due(self, live: LiveRun, number: int) -> None:
        """Make a snapshot after an optimizer step, if it is time and none is being written."""
        if self._is_overdue(live) and not self._journals.writing.locked():
            try:
                self._freeze(live, number)
            except Exception as error:  # the step was made, and must not be called a failure
                complain(COMPLAINT, error, about=live.name)

    def _is_overdue(self, live: LiveRun) -> bool:
        held = self._journals.of_run(live.name).held_bytes
        if held >= self._journal_bytes // 2 and live.snapshot_rest != math.inf:
            return True
        waited = time.monotonic() - live.snapshot_time
        return waited >= live.snapshot_rest and (
            live.since_snapshot >= STATE_OPERATIONS or waited >= STATE_SECONDS
        )

    def _freeze(self, live: LiveRun, number: int) -> None:
        """Begin a snapshot of the present state; its files are written in the background."""
        writer = live.worker.engine.writer(live.name, optimizer=True)
        live.since_snapshot, live.snapshot_rest = 0, math.inf  # until it is written
        live.new_snapshot = (number, writer)

    def freeze_last(self, live: LiveRun) -> None:
        """Make the last snapshot of this life of the server."""
        if live.since_snapshot and live.is_between_steps:
            self._freeze(live, live.done)

    def write(self, live: LiveRun, number: int) -> None:
        """Make a snapshot and write its files at once, as what was loaded may soon be deleted."""
        began = time.monotonic()
        writer = live.worker.engine.writer(live.name, optimizer=True)
        try:
            _write_files(self._journals.run_directory(live.name), number, writer)
        except Exception as error:
            if not is_full_disk(error):
                raise
            raise EngineError(
                "the server's disk is full: what was loaded cannot be kept for a restart; make "
                "room and load it again",
                "server",
            ) from error
        _rest(live, time.monotonic() - began)
        live.new_snapshot, live.since_snapshot = (number, None), 0

    # ── putting it in force, on the event loop ────────────────────────────────────────────────────

    def commit(self, live: LiveRun) -> None:
        """Begin to put a new snapshot in force, if there is one."""
        if live.new_snapshot is not None:
            (number, writer), live.new_snapshot = live.new_snapshot, None
            live.commit = asyncio.ensure_future(self._commit_in_turn(live, number, writer))
            self._promises.keep(live.commit)

    async def _commit_in_turn(self, live: LiveRun, number: int, writer: Writer | None) -> None:
        async with live.committing:
            await self._commit(live, number, writer)

    async def _commit(self, live: LiveRun, number: int, writer: Writer | None) -> None:
        """Put the snapshot in force, with all that must outlive the journal it replaces."""
        directory = self._journals.run_directory(live.name)
        written = directory / f"state-{number}.new"
        journal = self._journals.of(directory)
        try:
            journal.rotate()
            if writer is not None:
                async with self._journals.writing:
                    began = time.monotonic()
                    try:
                        await asyncio.to_thread(_write_files, directory, number, writer)
                    finally:
                        _rest(live, time.monotonic() - began)
            await self._put_samplers(live, number)
            now = time.monotonic()
            covered = {key: promise for key, promise in live.recent.items() if key <= number}
            wanted = {
                key: p for key, p in covered.items() if not p.read or now - p.read < JUST_READ
            }
            for promise in wanted.values():
                await promise.done.wait()
            await asyncio.to_thread(write_results, written / RESULTS, list(wanted.values()))
            await asyncio.to_thread(_put_in_force, written, directory / f"state-{number}")
        except Exception as error:
            if live.snapshot_rest == math.inf:
                _rest(live, 0)
            if directory.exists():  # else the run was let go meanwhile: there is nothing to keep
                complain(COMPLAINT, error, about=live.name)
            return
        for key in covered.keys() - wanted.keys():
            live.recent.pop(key, None)
        await asyncio.to_thread(_drop_before, directory, number)
        journal.drop_until(number)
        self._recordings.release(live.name, number)

    async def _put_samplers(self, live: LiveRun, number: int) -> None:
        """Put the nameless samplers on disk that the journal will not have any more."""
        for sampler, saved in live.unsaved_samplers.copy().items():
            if saved <= number and sampler in self._nameless.directories:
                await self._nameless.put(sampler)
            # else it was made again meanwhile
            if saved <= number and live.unsaved_samplers.get(sampler) == saved:
                del live.unsaved_samplers[sampler]

    # ── reading it ────────────────────────────────────────────────────────────────────────────────

    def in_force(self, run: str) -> tuple[int, Path | None]:
        """Return the number and directory of the last snapshot, or -1; delete unfinished ones."""
        directory = self._journals.run_directory(run)
        for unfinished in directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        numbers = [_number_of(path) for path in directory.glob("state-*") if path.suffix != ".new"]
        number = max(numbers, default=-1)
        return number, directory / f"state-{number}" if numbers else None

    def loaded_before(self, run: str, number: int) -> Path | None:
        """Return what a load gave when it was first carried out, if it was.

        The checkpoint may be another by now, or gone.
        """
        written = self._journals.run_directory(run) / f"state-{number}.new"
        return written if written.is_dir() else None

    def read_results(self, live: LiveRun, snapshot: Path) -> None:
        """Promise the results again that were not read when a snapshot was made."""
        path = snapshot / RESULTS
        data = path.read_bytes() if path.exists() else b""
        for entry, _ in read_records(path, data, may_be_torn=False):
            facts = entry.facts
            promise = self._promises.get(facts["id"])
            if promise is None and self._promises.is_gone(facts["id"]):
                continue
            if promise is None:
                promise = self._promises.add(
                    facts["id"], bytes.fromhex(facts["digest"]), live.run.session_id
                )
            promise.settle(codec.decode(KINDS[facts["kind"]], entry.body, facts["type"]))
            live.recent[entry.number] = promise


def thaw(worker: Worker, run: Run, snapshot: Path) -> None:
    """Make a run's adapter as it was in a snapshot; on the worker."""
    optimizer = OptimizerConfigBase.from_wire(run.optimizer)
    worker.engine.create(run.model_id, run.base_model, run.lora, optimizer)
    check(snapshot)
    worker.engine.load(run.model_id, snapshot, optimizer=True)


def _rest(live: LiveRun, seconds: float) -> None:
    """Make no snapshot for a time, after one that took so long to write."""
    live.snapshot_time, live.snapshot_rest = time.monotonic(), STATE_REST * seconds


def _write_files(directory: Path, number: int, writer: Writer) -> None:
    """Have the files of a snapshot in a directory, whole or not at all."""
    written, scratch = directory / f"state-{number}.new", directory / f"{UNFINISHED}{number}"
    if written.is_dir():  # an earlier life got so far, with the same bits
        return
    scratch.mkdir()  # in a directory that is there, unless the run was let go
    write_whole(writer.write, scratch)
    scratch.rename(written)


def _put_in_force(written: Path, final: Path) -> None:
    written.rename(final)
    sync_path(final.parent)


def _drop_before(directory: Path, number: int) -> None:
    """Delete the snapshots before one."""
    for old in directory.glob("state-*"):
        if _number_of(old) < number:
            shutil.rmtree(old, ignore_errors=True)


def _number_of(directory: Path) -> int:
    return int(directory.name.removeprefix("state-").removesuffix(".new"))


def write_results(path: Path, promises: Sequence[Promise]) -> None:
    """Write the results that outlive the journal of their run."""
    with path.open("wb") as file:
        for promise in promises:
            if promise.result is None:  # it was read, and had to make room
                continue
            body = encode(promise, as_protobuf=True)
            facts = {
                "id": promise.request_id,
                "digest": promise.digest.hex(),
                "kind": type(promise.result).__name__,
                "type": body.content_type,
            }
            number = int(promise.request_id.rpartition(":")[2])
            file.write(encode_entry(Entry(number, facts, body.data)))
        file.flush()
        os.fsync(file.fileno())
    sync_path(path.parent)
