"""What an earlier life of the server had promised is taken up again, when somebody asks for it.

A run is rebuilt from its last state on disk and the requests that its journal holds after it: they
go through the same handlers as when they came, and give the same results. Samples are drawn again
with the seeds that were drawn for them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.engine.api import EngineError
from tinkex.server.calls import Call, digest_of
from tinkex.server.database.entities import Run
from tinkex.server.files.checkpoint_files import clear_leftovers
from tinkex.server.files.seals import check
from tinkex.server.http_errors import Refusal
from tinkex.server.runs.admission import GIVEN_UP, UNFINISHED, UNKNOWN, give_up_gap, spend
from tinkex.server.runs.journal import DamagedJournalError, Entry, read_records
from tinkex.server.runs.journals import DIRECT
from tinkex.server.runs.scheduler import Lane
from tinkex.server.state import READ, UNPLACED, LiveRun, Queued, State
from tinkex.types.sessions import RequestFailedResponse
from tinkex.types.training import CreateModelResponse, OptimizerConfigBase
from tinkex.wire import codec
from tinkex.wire.protocol import BY_NAME

logger = logging.getLogger("tinkex.server")

SCRATCH = ("checkpoints/*/*/.saving-*", "checkpoints/*/*/.deleting-*", f"snapshots/*{UNPLACED}*")
"""What saving and deleting leaves when it is not finished, and …"""
ABANDONED_SECONDS = 3600.0
"""… after how long nobody can be at it any more, another process with the same data directory
included."""

Handlers: TypeAlias = Mapping[str, Callable[[State, Call], Awaitable[Any]]]


def enable(state: State, handlers: Handlers) -> None:
    """Let what is asked for and not in memory be looked for on disk."""
    state.revive = functools.partial(_revive, state, handlers)


def take_up_sessions(state: State) -> None:
    """Count the silence of open sessions from now on, and delete the files of those that ended.

    Files of a session that is not on record are set aside: the database may have lost it.
    """
    now = time.monotonic()
    for session_id in state.database.sessions.open_ids():
        state.heard.setdefault(session_id, now)
    for directory in list(state.journals.directories()):
        session_id = re.split(r"_(?:train|sample|loss)_", directory.name)[0]
        known = "active" if session_id == DIRECT else state.database.sessions.state(session_id)
        if known is None:
            state.journals.set_aside(directory, "belongs to a session that is not on record")
        elif known != "active":
            shutil.rmtree(directory, ignore_errors=True)
    for pattern in SCRATCH:  # runs that are taken up again have theirs removed at once
        for directory in state.data_dir.glob(pattern):
            if time.time() - directory.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(directory, ignore_errors=True)


async def _revive(state: State, handlers: Handlers, name: str) -> None:
    directory = state.journals.run_directory(name)
    if await asyncio.to_thread(directory.is_dir):
        try:
            await _revive_run(state, handlers, name, directory)
        except Exception as error:
            logger.exception("%s could not be taken up again", name)
            state.runs.pop(name, None)
            state.worker.run(state.engine.drop, name)
            # A server that stops, or has no memory left, says nothing about the run: the next life
            # tries again.
            if not (isinstance(error, EngineError) and error.category == "server"):
                await asyncio.to_thread(state.database.runs.mark_corrupted, name)
                state.journals.set_aside(directory, "cannot be taken up again")
        return
    directory = state.journals.samples_directory(name)
    if await asyncio.to_thread(directory.is_dir):
        try:
            await _revive_samples(state, handlers, name, directory)
        except DamagedJournalError as error:
            logger.error("%s", error)
            state.journals.set_aside(directory, "is damaged: samples that nobody had read are lost")
        except Exception:
            logger.exception("the samples of %s could not be taken up again", name)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────


async def _revive_run(state: State, handlers: Handlers, model_id: str, directory: Path) -> None:
    started = time.monotonic()
    entries = await asyncio.to_thread(state.journals.of(directory).read)
    # has a journal as runs have, of one request
    if entries and entries[0].facts["op"] == "create_custom_loss":
        await handlers["create_custom_loss"](state, call_of(entries[0]))
        return
    run = await asyncio.to_thread(state.database.runs.get, model_id)
    number, frozen = await asyncio.to_thread(_last_state, directory)
    session_id = model_id.rpartition(":train:")[0]
    if await asyncio.to_thread(state.database.sessions.state, session_id) != "active":
        return
    if run is not None:
        state.check_base(run.base_model, run.base_digest, model_id, "server")
    state.heard[session_id] = time.monotonic()
    await asyncio.to_thread(clear_leftovers, state, model_id)
    await asyncio.to_thread(_clear_unfinished, directory)
    await state.worker.run(state.clear_unplaced, session_id)
    if run is not None and frozen is not None:
        live = LiveRun(run, Lane[Queued](number + 1))
        await state.worker.run(_thaw, state, run, frozen)
        await asyncio.to_thread(_read_results, state, live, frozen / "results.log")
        # not before its results are known: one that is asked for again is not a new one
        state.runs[model_id] = live
        if state.promises.get(f"{model_id}:0") is None:
            state.promises.add(f"{model_id}:0", UNKNOWN, session_id).settle(
                CreateModelResponse(model_id=model_id)
            )
    else:
        number = 0
        creation = next((entry for entry in entries if entry.number == 0), None)
        if creation is None:
            return
        await handlers[creation.facts["op"]](state, call_of(creation))
        created = state.promises.get(f"{model_id}:0")
        assert created is not None
        await created.done.wait()
        if model_id not in state.runs:
            return
    live = state.runs[model_id]
    later = [entry for entry in entries if entry.number > number]
    for entry in later:
        await _replay(state, handlers, live, entry)
    logger.info(
        "%s is taken up again: %d requests after state %d, in %.2f s",
        model_id,
        len(later),
        number,
        time.monotonic() - started,
    )


def _clear_unfinished(directory: Path) -> None:
    for unfinished in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _thaw(state: State, run: Run, directory: Path) -> None:
    state.engine.create(
        run.model_id, run.base_model, run.lora, OptimizerConfigBase.from_wire(run.optimizer)
    )
    check(directory)
    state.engine.load(run.model_id, directory, optimizer=True)


async def _replay(state: State, handlers: Handlers, live: LiveRun, entry: Entry) -> None:
    op = entry.facts["op"]
    if op == GIVEN_UP:
        give_up_gap(state, live, entry.number)
        return
    call = await asyncio.to_thread(call_of, entry)
    try:
        if op:
            await handlers[op](state, call)
        else:
            await spend(state, call, live.run.model_id, entry.number)
    except Refusal as refusal:
        logger.warning(
            "request %d of %s cannot be repeated: %s",
            entry.number,
            live.run.model_id,
            refusal.detail,
        )


def call_of(entry: Entry) -> Call:
    """A journalled request as it came."""
    name, content_type = entry.facts["op"], entry.facts.get("type", codec.JSON)
    op = BY_NAME.get(name)
    encoding = entry.facts.get("encoding")
    plain = codec.decompress(entry.body, encoding, sys.maxsize - 1)  # it was taken
    request = codec.decode(op.request, plain or b"{}", content_type) if op and op.request else None
    told = entry.facts.get("digest")
    return Call(
        request,
        {},
        bytes.fromhex(told) if told else digest_of(op.path if op else "", plain),
        op=name,
        body=entry.body,
        content_type=content_type,
        encoding=encoding,
        size=len(plain),
        is_replayed=True,
        number=entry.number,
        request_id=entry.facts.get("id"),
        seed=entry.facts.get("seed"),
        reader=entry.facts.get("reader"),
        owner=entry.facts.get("owner", "local"),
    )


def _last_state(directory: Path) -> tuple[int, Path | None]:
    """The state in force: the last that was finished."""
    states = {
        int(path.name.removeprefix("state-")): path
        for path in directory.glob("state-*")
        if path.suffix != ".new"
    }
    number = max(states, default=-1)
    return number, states.get(number)


KINDS: dict[str, type[Any]] = {
    op.result.__name__: op.result for op in BY_NAME.values() if op.result is not None
} | {"RequestFailedResponse": RequestFailedResponse}


def _read_results(state: State, live: LiveRun, path: Path) -> None:
    """Results that were not read when the state was made."""
    data = path.read_bytes() if path.exists() else b""
    for entry, _ in read_records(path, data, may_be_torn=False):
        facts = entry.facts
        promise = state.promises.add(
            facts["id"], bytes.fromhex(facts["digest"]), live.run.session_id
        )
        promise.settle(codec.decode(KINDS[facts["kind"]], entry.body, facts["type"]))
        live.recent[entry.number] = promise


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


async def _revive_samples(
    state: State, handlers: Handlers, session_id: str, directory: Path
) -> None:
    """Draw what was asked for again; what nobody asks for any more costs a little time, no more."""
    if session_id != DIRECT:
        if await asyncio.to_thread(state.database.sessions.state, session_id) != "active":
            return
        state.heard[session_id] = time.monotonic()
    entries = await asyncio.to_thread(state.journals.of(directory).read)
    over = {
        request_id
        for entry in entries
        if entry.facts["op"] == READ
        for request_id in entry.facts["ids"]
    }
    for entry in entries:
        if (
            entry.facts["op"] == READ
            or entry.facts["id"] in over
            or state.promises.get(entry.facts["id"]) is not None
        ):
            continue
        try:
            await handlers[entry.facts["op"]](state, await asyncio.to_thread(call_of, entry))
        except Refusal as refusal:
            logger.warning("sample %s cannot be drawn again: %s", entry.facts["id"], refusal.detail)
