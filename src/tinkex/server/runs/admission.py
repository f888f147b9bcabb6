"""How a request becomes a promise: once, in the order of its number, and never twice.

A number that was refused is spent all the same, and one that never comes is given up after a time:
nothing behind it waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tinkex.engine.api import EngineError
from tinkex.engine.places import Writer
from tinkex.server.calls import Call
from tinkex.server.complaints import complain
from tinkex.server.files.data_dir import is_full_disk, sync_directory
from tinkex.server.files.seals import write_whole
from tinkex.server.http_errors import Refusal
from tinkex.server.runs.encoded_results import encode
from tinkex.server.runs.journal import Entry, Journal, encode as encode_entry
from tinkex.server.runs.metering import watch
from tinkex.server.runs.promises import JUST_READ, Left, Promise, Target
from tinkex.server.runs.scheduler import Beside
from tinkex.server.state import CARRY_ON, LiveRun, Queued, State
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import UnloadModelResponse, UntypedAPIFuture

logger = logging.getLogger("tinkex.server")

UNKNOWN = b""
"""The digest of a request of which only its outcome is left."""
GIVEN_UP = "given_up"
"""What the journal says instead of an operation where a number was no longer waited for."""
UNFINISHED = "unfinished-"
"""What the name of a state begins with while its files are written."""
UNLOAD = ":unload"
"""What follows a run's id in the id of the request that unloads it."""
UNLOAD_GAP_SECONDS = 60.0
"""How long a missing request holds up the unloading of its run."""
MOST_AHEAD = 100_000
"""How many numbers a request may leave out: once they are given up, the run goes on behind it."""
STATE_OPERATIONS = 32
"""After so many operations of a run, or …"""
STATE_SECONDS = 30.0
"""… so many seconds, its next optimizer step puts its state on disk."""
STATE_REST = 40
"""But not before so many times the time that its last one took: that of a large model takes
seconds, and a disk and processors have other things to do."""

LEAVE_SECONDS = 10.0
"""How long a server that stops may take to put its runs on disk."""


async def promise_once(
    state: State,
    request_id: str,
    session_id: str,
    call: Call,
    begin: Callable[[], Awaitable[Any]],
    model_id: str,
) -> UntypedAPIFuture:
    """A receipt for the creation of a run; the same request again gets the same receipt, another
    one a failure.
    """
    if not call.is_replayed:
        await state.revived(model_id)
    promise = state.promises.get(request_id)
    if promise is not None and promise.digest not in (call.digest, UNKNOWN):
        failed = failed_receipt(state, request_id, session_id, call)
        return UntypedAPIFuture(request_id=failed, model_id=model_id)
    if promise is None:
        promise = state.promises.add(request_id, call.digest, session_id)
        journal = state.journals.of_run(model_id)
        await _taken(
            state, promise, journal, 0, call, lambda: state.promises.follow(promise, begin())
        )
    elif promise.recorded is not None:
        await asyncio.shield(promise.recorded)
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def _taken(
    state: State,
    promise: Promise,
    journal: Journal,
    number: int,
    call: Call,
    begin: Callable[[], None],
) -> None:
    """Put a request on disk, then begin with it: both or neither, even if nobody waits for the
    receipt any more.
    """
    if call.is_replayed:
        begin()
        return

    async def taking() -> None:
        facts: dict[str, Any] = {"op": call.op, "type": call.content_type, "owner": call.owner}
        if call.encoding:
            facts["encoding"] = call.encoding
        if not call.op or call.reader is not None:
            # the body is the reason, or lacks the token: not what came
            facts["digest"] = call.digest.hex()
        if call.reader is not None:
            facts["reader"] = call.reader
        if call.seed is not None:
            facts |= {"seed": call.seed, "id": promise.request_id}
        await journal.append(number, facts, call.body)
        if call.op:  # it is on disk, and thousands may wait for their turn
            call.body = b""
        begin()

    task = promise.recorded = asyncio.ensure_future(taking())
    state.promises.keep(task)
    try:
        await asyncio.shield(task)
    except OSError as error:
        state.promises.take_back(promise)
        raise Refusal(
            503, f"the request cannot be put on disk, so it was not taken: {error}"
        ) from None
    except Exception:  # a fault of ours: whoever asks again must not wait for what nobody does
        state.promises.take_back(promise)
        raise


async def take_sample(
    state: State,
    promise: Promise,
    call: Call,
    request: SampleRequest,
    draw: Callable[[int], Awaitable[Any]],
) -> None:
    """Put a request for samples on disk with the seed that is used for it, and draw meanwhile.

    A sample changes nothing, so it need not wait for the disk; its receipt does, and whoever could
    read its result.
    """
    if call.seed is None:
        seed = request.sampling_params.seed
        call.seed = secrets.randbits(63) if seed is None else seed
    journal = state.journals.of_samples(promise.session_id)
    if call.number is None:
        call.number = time.time_ns()
    state.samples.setdefault(promise.session_id, {})[promise.request_id] = call.number
    drawing = asyncio.ensure_future(draw(call.seed))
    state.promises.keep(drawing)

    def begin() -> None:
        if not call.is_replayed:
            # it may have been drawn, and end at once
            watch(state, call.op, call, promise.request_id)
        state.promises.follow(promise, drawing)

    try:
        await _taken(state, promise, journal, call.number, call, begin)
    except Exception:  # it was not taken
        # which nobody is to hear of
        drawing.add_done_callback(lambda done: done.cancelled() or done.exception())
        state.worker.cancel(promise.request_id)
        raise


async def live_run(state: State, model_id: str) -> LiveRun:
    """The run an operation is for; one of an earlier life of the server is taken up again."""
    live = state.runs.get(model_id)
    if live is None:
        await state.revived(model_id)
        live = state.runs.get(model_id)
    if live is not None:
        state.heard[live.run.session_id] = time.monotonic()
        state.asked[model_id] = time.time()
        return live
    if await asyncio.to_thread(state.database.runs.get, model_id) is None:
        raise Refusal(404, f"there is no model {model_id!r}")
    raise Refusal(
        410,
        f"model {model_id!r} is no longer loaded (it was unloaded, its session has ended, or it "
        "could not be taken up "
        f"again after a restart); {CARRY_ON}",
    )


async def enqueue(
    state: State,
    call: Call,
    model_id: str,
    seq_id: int | None,
    work: Callable[..., Any],
    after: Callable[[Any], Any] | None = None,
    *,
    is_pass: bool = False,
    is_save: bool = False,
) -> UntypedAPIFuture:
    """Put an operation into its run's lane; a repeated number gives the original receipt.

    The work of a pass is to start it on the engine, under a name that it is given; other work is
    done when it returns, or goes on beside the engine, as saves do.
    """
    live = await live_run(state, model_id)
    if call.number is None:
        call.number = _free(state, live) if seq_id is None else seq_id
    number = call.number
    if number < 1:
        raise Refusal(400, f"seq_id must be at least 1, got {number}")
    if number > live.lane.free + MOST_AHEAD:
        raise Refusal(400, f"seq_id {number} is too far ahead; the next one is {live.lane.next}")
    request_id = f"{model_id}:{number}"
    known = state.promises.get(request_id)
    if known is not None and known.digest == call.digest:
        if known.recorded is not None:
            await asyncio.shield(known.recorded)
        return UntypedAPIFuture(request_id=request_id, model_id=model_id)
    if known is not None:
        receipt = failed_receipt(state, request_id, live.run.session_id, call)
        return UntypedAPIFuture(request_id=receipt, model_id=model_id)
    if live.last is not None and number >= live.last:
        raise Refusal(410, f"model {model_id!r} has been unloaded; {CARRY_ON}")
    _check_gap(state, live, number, call)
    promise = state.promises.add(request_id, call.digest, live.run.session_id)
    if number < live.lane.next:  # it will not be carried out, so it need not be on disk
        promise.fail(
            f"request number {number} of this run has passed; the next one is {live.lane.next}"
        )
        return UntypedAPIFuture(request_id=request_id, model_id=model_id)

    def begin() -> None:
        if state.runs.get(model_id) is not live:
            promise.fail("the session has ended")
            return
        live.recent[number] = promise
        doing = functools.partial(work, request_id) if is_pass else work
        carry_out = functools.partial(_work, state, live, number, call, doing)
        queued = Queued(promise, carry_out, after, is_pass=is_pass, is_save=is_save)
        try:
            released = live.lane.offer(number, queued)
        except ValueError:
            live.lane.let_go(number)
            promise.fail(
                f"request number {number} of this run has passed; the next one is {live.lane.next}"
            )
            released = []
        _release(state, live, released)

    live.lane.hold(number, call.size)
    try:
        await _taken(state, promise, state.journals.of_run(model_id), number, call, begin)
    except Exception:
        live.lane.let_go(number)
        raise
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


def _check_gap(state: State, live: LiveRun, number: int, call: Call) -> None:
    """Ask for a request again later if too much waits for a missing one; that one is always taken."""
    held, limit = live.lane.held_bytes + call.size, state.limits.gap_bytes
    if number > live.lane.next and held > limit and not call.is_replayed:
        raise Refusal(
            429,
            f"{live.lane.held_bytes} bytes of requests of this run wait for request number "
            f"{live.lane.next}, which "
            f"has not come; the limit gap_bytes is {limit}",
            headers={"Retry-After": "1"},
        )


def _free(state: State, live: LiveRun) -> int:
    """The next number for a request that brings none; some may be on their way to the disk."""
    number = live.lane.free
    while state.promises.get(f"{live.run.model_id}:{number}") is not None:
        number += 1
    return number


def _work(state: State, live: LiveRun, number: int, call: Call, work: Callable[[], Any]) -> Any:
    """Carry an operation out; where nothing is pending after it, the run's state may go to disk. On
    the worker.
    """
    if state.promises.are_left:
        raise Left()
    if call.op in ("forward_backward", "forward") and not call.request.forward_only:
        live.is_between_steps = False
    live.done = number
    live.since_state += 1
    result = work()
    if call.op in ("optim_step", "load_weights", "drop_gradients"):
        live.is_between_steps = True
    if call.op == "load_weights":
        write_state(state, live, number)
    elif call.op == "optim_step" and _is_overdue(state, live) and not state.writing.locked():
        freeze_state(state, live, number)
    return result


def _is_overdue(state: State, live: LiveRun) -> bool:
    held = state.journals.of_run(live.run.model_id).held_bytes
    if held >= state.limits.journal_bytes // 2 and live.state_rest != math.inf:
        return True
    waited = time.monotonic() - live.state_time
    return waited >= live.state_rest and (
        live.since_state >= STATE_OPERATIONS or waited >= STATE_SECONDS
    )


def freeze_state(state: State, live: LiveRun, number: int) -> None:
    """Have the run as it is now become a state; its files are written beside what comes next. On
    the worker.
    """
    write = state.engine.writer(live.run.model_id, optimizer=True)
    live.since_state, live.state_rest = 0, math.inf  # until it is written
    live.new_state = (number, write)


def write_state(state: State, live: LiveRun, number: int) -> None:
    """The same, with its files written at once, for what was loaded may be deleted as soon as the
    client knows of it.

    On the worker.
    """
    began = time.monotonic()
    write = state.engine.writer(live.run.model_id, optimizer=True)
    try:
        _write_files(state.journals.run_directory(live.run.model_id), number, write)
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise EngineError(
            "the server's disk is full: what was loaded cannot be kept for a restart; make room "
            "and load it again",
            "server",
        ) from error
    _rest(live, time.monotonic() - began)
    live.new_state, live.since_state = (number, None), 0


def _rest(live: LiveRun, seconds: float) -> None:
    """Let a run be, after a state that took so long to write."""
    live.state_time, live.state_rest = time.monotonic(), STATE_REST * seconds


def _write_files(directory: Path, number: int, writer: Writer) -> None:
    """Have the files of a state in a directory, whole or not at all."""
    written, scratch = directory / f"state-{number}.new", directory / f"{UNFINISHED}{number}"
    if written.is_dir():  # an earlier life got so far, with the same bits
        return
    scratch.mkdir()  # in a directory that is there, unless the run was let go
    write_whole(writer.write, scratch)
    scratch.rename(written)


def loaded_before(state: State, call: Call, model_id: str, number: int) -> Path | None:
    """What a load gave in an earlier life of the server: the checkpoint may be another by now, or
    gone.
    """
    written = state.journals.run_directory(model_id) / f"state-{number}.new"
    return written if call.is_replayed and written.is_dir() else None


def settle_state(state: State, live: LiveRun) -> asyncio.Task[None] | None:
    """Have a state that was written come into force, with the results and samplers that go with it."""
    if live.new_state is None:
        return None
    (number, write), live.new_state = live.new_state, None
    task = asyncio.ensure_future(_enforce_in_turn(state, live, number, write))
    state.promises.keep(task)
    return task


async def leave(state: State) -> None:
    """Begin nothing more, send those who wait away, and put the runs on disk as they stand: the
    next life is quick.

    What does not get done within a time is left to the journals, like everything else that was
    promised.
    """
    if state.promises.are_left:
        return
    state.is_draining = True
    state.promises.leave()
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            for live in list(state.runs.values()):
                await state.worker.run(_freeze_last_state, state, live)
                if (settling := settle_state(state, live)) is not None:
                    await settling
                async with live.enforcing:  # one that was on its way
                    pass
    except (TimeoutError, EngineError) as error:
        why = str(error) or "it took too long"
        logger.warning(
            "not every run could be put on disk (%s); the next start takes them up from their "
            "journals",
            why,
        )


def _freeze_last_state(state: State, live: LiveRun) -> None:
    if live.since_state and live.is_between_steps:
        freeze_state(state, live, live.done)


async def _enforce_in_turn(state: State, live: LiveRun, number: int, write: Writer | None) -> None:
    async with live.enforcing:
        await _enforce(state, live, number, write)


async def _enforce(state: State, live: LiveRun, number: int, write: Writer | None) -> None:
    """Write a state's files and what must outlive the journal, make it the one in force, drop what
    it stands for.
    """
    directory = state.journals.run_directory(live.run.model_id)
    written = directory / f"state-{number}.new"
    journal = state.journals.of(directory)
    try:
        journal.rotate()
        if write is not None:
            async with state.writing:
                began = time.monotonic()
                try:
                    await asyncio.to_thread(_write_files, directory, number, write)
                finally:
                    _rest(live, time.monotonic() - began)
        for sampler, taken in live.unsaved_samplers.copy().items():
            if taken <= number and sampler in state.snapshots:
                await state.put_snapshot(sampler)
            # else it was made anew meanwhile
            if taken <= number and live.unsaved_samplers.get(sampler) == taken:
                del live.unsaved_samplers[sampler]
        now = time.monotonic()
        covered = {key: promise for key, promise in live.recent.items() if key <= number}
        wanted = {key: p for key, p in covered.items() if not p.read or now - p.read < JUST_READ}
        for promise in wanted.values():
            await promise.done.wait()
        await asyncio.to_thread(_write_results, written / "results.log", list(wanted.values()))
        await asyncio.to_thread(_put_in_force, written, directory / f"state-{number}")
    except Exception as error:
        if live.state_rest == math.inf:
            _rest(live, 0)
        if directory.exists():  # else the run was let go meanwhile, and there is nothing to keep
            complain(
                "the state of a run could not be put on disk; its journal stays",
                error,
                about=live.run.model_id,
            )
        return
    for key in covered.keys() - wanted.keys():
        live.recent.pop(key, None)
    await asyncio.to_thread(_drop_states, directory, number)
    journal.drop_until(number)
    state.recordings.release(live.run.model_id, number)


def _put_in_force(written: Path, final: Path) -> None:
    written.rename(final)
    sync_directory(final.parent)


def _drop_states(directory: Path, number: int) -> None:
    """Delete the states before one."""
    for old in directory.glob("state-*"):
        if _number_of(old) < number:
            shutil.rmtree(old, ignore_errors=True)


def _write_results(path: Path, promises: Sequence[Promise]) -> None:
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
    sync_directory(path.parent)


def _number_of(directory: Path) -> int:
    return int(directory.name.removeprefix("state-").removesuffix(".new"))


async def enqueue_unload(state: State, call: Call, model_id: str) -> UntypedAPIFuture:
    """Drop a run's adapter after everything that was asked of it; to drop it again changes nothing."""
    request_id = f"{model_id}{UNLOAD}"
    receipt = UntypedAPIFuture(request_id=request_id, model_id=model_id)
    if not call.is_replayed:
        await state.revived(model_id)
    known = state.promises.get(request_id)
    if known is not None:
        if known.recorded is not None:
            await asyncio.shield(known.recorded)
        return receipt
    live = state.runs.get(model_id)
    if live is None:
        if not await recall_unload(state, model_id):
            raise Refusal(404, f"there is no model {model_id!r}")
        return receipt

    def after(_: None) -> UnloadModelResponse:
        state.runs.pop(model_id, None)
        state.recordings.release(model_id, last)
        state.journals.forget(state.journals.run_directory(model_id))
        return UnloadModelResponse(model_id=model_id, type="unload_model")

    def begin() -> None:
        work = functools.partial(_drop, state, live)
        released = live.lane.offer(last, Queued(promise, work, after, is_due_anyway=True))
        _stop_clock(live)  # it is set to a shorter time
        _release(state, live, released)

    promise = state.promises.add(request_id, call.digest, live.run.session_id)
    last = live.last = _free(state, live) if call.number is None else call.number
    try:
        await _taken(state, promise, state.journals.of_run(model_id), last, call, begin)
    except Refusal:
        live.last = None
        raise
    return receipt


def _drop(state: State, live: LiveRun) -> Beside:
    """Drop a run's adapter, once the samplers that were made of it are on disk: there is no journal
    any more then.
    """
    if state.promises.are_left:
        raise Left()
    begun: dict[str, tuple[Writer, Path]] = {}
    for sampler in live.unsaved_samplers.copy():
        with contextlib.suppress(EngineError):  # it may have been dropped
            if (found := state.begin_snapshot(sampler)) is not None:
                begun[sampler] = found

    def write() -> None:
        for sampler, (writer, scratch) in begun.items():
            try:
                write_whole(writer.write, scratch)
            except Exception:
                logger.exception(
                    "the sampler %s could not be put on disk; a restart will lose it", sampler
                )

    def drop(_: None) -> None:
        for sampler, found in begun.items():
            if found[1].is_dir():
                state.place_snapshot(sampler, found[1])
        state.engine.drop(live.run.model_id)

    return Beside(write, drop)


async def recall_unload(state: State, model_id: str) -> bool:
    """Promise the unloading of a run that is not loaded: it is done. False when there is no such
    run.
    """
    run = await asyncio.to_thread(state.database.runs.get, model_id)
    if run is None or model_id in state.runs:
        return False
    response = UnloadModelResponse(model_id=model_id, type="unload_model")
    state.promises.add(f"{model_id}{UNLOAD}", b"", run.session_id).settle(response)
    return True


def _release(state: State, live: LiveRun, released: Iterable[Queued]) -> None:
    for queued in released:
        _begin(state, live, queued)
    _watch_gap(state, live)


def _begin(state: State, live: LiveRun, queued: Queued) -> None:
    run, worker = live.run.model_id, state.worker
    running: asyncio.Future[Any]
    if queued.is_pass:
        running = worker.run_pass(run, queued.promise.request_id, queued.work)
    elif queued.is_save:
        running = worker.run_save(run, queued.work)
    else:
        running = worker.run_for(run, queued.work)
    state.promises.follow(queued.promise, _execute(state, live, running, queued.after))


async def spend_number(state: State, numbered: tuple[str, int], digest: bytes, why: str) -> None:
    """Let a refused request use its number up: its client has moved on, and later requests must not
    wait for it.
    """
    await state.revived(numbered[0])
    if numbered[0] in state.runs:
        await spend(state, Call(None, {}, digest, op="", body=why.encode()), *numbered)


async def spend(state: State, call: Call, model_id: str, number: int | None) -> UntypedAPIFuture:
    """Use a number up with a failure whose reason is the call's body."""

    def work() -> None:
        raise EngineError(call.body.decode())

    return await enqueue(state, call, model_id, number, work)


def failed_receipt(
    state: State, request_id: str, session_id: str, call: Call, target: Target | None = None
) -> str:
    """The id of a failure for a request whose number belongs to another: it is read like any other
    result.
    """
    failed_id = f"{request_id}:{call.digest.hex()[:12]}"
    if state.promises.get(failed_id) is None:
        number = request_id.rpartition(":")[2]
        promise = state.promises.add(failed_id, call.digest, session_id, target, owner=call.owner)
        promise.fail(f"request number {number} was used before, for another request")
    return failed_id


async def _execute(
    state: State, live: LiveRun, running: asyncio.Future[Any], after: Callable[[Any], Any] | None
) -> Any:
    try:
        result = await running
        return after(result) if after else result
    finally:
        settle_state(state, live)


def _watch_gap(state: State, live: LiveRun) -> None:
    """Start, or stop, the clock of a missing number; others that arrive meanwhile do not set it
    back.
    """
    missing = live.lane.missing
    if missing == live.gap:
        return
    _stop_clock(live)
    live.gap = missing
    if missing is not None:
        patience = state.limits.gap_seconds
        if live.last is not None:
            patience = min(patience, UNLOAD_GAP_SECONDS)
        live.gap_timer = asyncio.get_running_loop().call_later(
            patience, _close_gap, state, live, missing
        )


def _stop_clock(live: LiveRun) -> None:
    live.gap = None
    if live.gap_timer is not None:
        live.gap_timer.cancel()
        live.gap_timer = None


def _close_gap(state: State, live: LiveRun, missing: int) -> None:
    live.gap = live.gap_timer = None
    state.promises.keep(asyncio.ensure_future(_give_up_durably(state, live, missing)))


async def _give_up_durably(state: State, live: LiveRun, missing: int) -> None:
    """Put it on disk before anybody is told that a number was given up: another life must not carry
    it out.
    """
    try:
        await state.journals.of_run(live.run.model_id).append(missing, {"op": GIVEN_UP})
    except OSError:
        logger.exception(
            "that request %d of %s was given up cannot be put on disk", missing, live.run.model_id
        )
    give_up_gap(state, live, missing)


def give_up_gap(state: State, live: LiveRun, missing: int) -> None:
    """Stop waiting for a number: what waited for it fails, and the run goes on."""
    if live.lane.missing != missing:  # it came while this was put on disk
        return
    waiting = live.lane.give_up()
    abandoned = [queued for queued in waiting if not queued.is_due_anyway]
    for queued in abandoned:
        queued.promise.fail(
            f"request number {missing} of this run never arrived, so the {len(abandoned)} after it "
            "were not "
            "executed; the run goes on with the next request"
        )
    for queued in waiting:
        if queued.is_due_anyway:
            _begin(state, live, queued)
