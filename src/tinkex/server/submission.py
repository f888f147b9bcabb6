"""How a request becomes a promise: once, in the order of its number, and never twice.

A number that was refused is spent all the same, and one that never comes is given up after a time: nothing behind it
waits for ever.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tinkex.engine import EngineError
from tinkex.server.promises import Target
from tinkex.server.state import CARRY_ON, Call, LiveRun, Queued, Refusal, State
from tinkex.types.training import UnloadModelResponse, UntypedAPIFuture


def promise_once(
    state: State,
    request_id: str,
    session_id: str,
    call: Call,
    begin: Callable[[], Awaitable[Any]],
    model_id: str | None = None,
) -> UntypedAPIFuture:
    """A receipt for work that has no place in a lane; the same request again gets the same receipt."""
    if state.promises.get(request_id) is None:
        promise = state.promises.add(request_id, call.digest, session_id)
        state.promises.follow(promise, begin())
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def live_run(state: State, model_id: str) -> LiveRun:
    """The run an operation is for."""
    live = state.runs.get(model_id)
    if live is not None:
        state.heard[live.run.session_id] = time.monotonic()
        state.asked[model_id] = time.time()
        return live
    if await asyncio.to_thread(state.store.run, model_id) is None:
        raise Refusal(404, f"there is no model {model_id!r}")
    raise Refusal(
        410,
        f"model {model_id!r} is no longer loaded (it was unloaded, its session ended or the server was restarted); "
        f"{CARRY_ON}",
    )


async def enqueue(
    state: State,
    call: Call,
    model_id: str,
    seq_id: int | None,
    work: Callable[[], Any],
    after: Callable[[Any], Any] | None = None,
) -> UntypedAPIFuture:
    """Put an operation into its run's lane; a repeated number gives the original receipt."""
    live = await live_run(state, model_id)
    number = live.lane.free if seq_id is None else seq_id
    if number < 1:
        raise Refusal(400, f"seq_id must be at least 1, got {number}")
    request_id = f"{model_id}:{number}"
    known = state.promises.get(request_id)
    if known is not None and known.digest == call.digest:
        return UntypedAPIFuture(request_id=request_id, model_id=model_id)
    if known is not None:
        receipt = failed_receipt(state, request_id, live.run.session_id, call)
        return UntypedAPIFuture(request_id=receipt, model_id=model_id)
    if live.last is not None and number >= live.last:
        raise Refusal(410, f"model {model_id!r} has been unloaded; {CARRY_ON}")
    promise = state.promises.add(request_id, call.digest, live.run.session_id)
    try:
        released = live.lane.offer(number, Queued(promise, work, after))
    except ValueError:
        promise.fail(f"request number {number} of this run has passed; the next one is {live.lane.next}")
        released = []
    _release(state, live, released)
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def enqueue_unload(state: State, call: Call, model_id: str) -> UntypedAPIFuture:
    """Drop a run's adapter after everything that was asked of it; to drop it again changes nothing."""
    request_id, response = f"{model_id}:unload", UnloadModelResponse(model_id=model_id, type="unload_model")
    receipt = UntypedAPIFuture(request_id=request_id, model_id=model_id)
    if state.promises.get(request_id) is not None:
        return receipt
    live = state.runs.get(model_id)
    if live is None:
        run = await asyncio.to_thread(state.store.run, model_id)
        if run is None:
            raise Refusal(404, f"there is no model {model_id!r}")
        state.promises.add(request_id, call.digest, run.session_id).settle(response)
        return receipt

    def after(_: None) -> UnloadModelResponse:
        state.runs.pop(model_id, None)
        return response

    promise = state.promises.add(request_id, call.digest, live.run.session_id)
    live.last = live.lane.free
    work = functools.partial(state.engine.drop, model_id)
    _release(state, live, live.lane.offer(live.last, Queued(promise, work, after, is_due_anyway=True)))
    return receipt


def _release(state: State, live: LiveRun, released: Iterable[Queued]) -> None:
    for queued in released:
        _begin(state, queued)
    _watch_gap(state, live)


def _begin(state: State, queued: Queued) -> None:
    state.promises.follow(queued.promise, _execute(state.worker.run(queued.work), queued.after))


async def spend_number(state: State, numbered: tuple[str, int] | None, body: bytes, why: str) -> None:
    """Let a refused request use its number up: its client has moved on, and later requests must not wait for it."""
    if numbered is None or numbered[0] not in state.runs:
        return

    def work() -> None:
        raise EngineError(why)

    await enqueue(state, Call(None, {}, digest_of("", body)), *numbered, work)


def failed_receipt(state: State, request_id: str, session_id: str, call: Call, target: Target | None = None) -> str:
    """The id of a failure for a request whose number belongs to another: it is read like any other result."""
    failed_id = f"{request_id}:{call.digest.hex()[:12]}"
    if state.promises.get(failed_id) is None:
        number = request_id.rpartition(":")[2]
        promise = state.promises.add(failed_id, call.digest, session_id, target)
        promise.fail(f"request number {number} was used before, for another request")
    return failed_id


async def _execute(running: asyncio.Future[Any], after: Callable[[Any], Any] | None) -> Any:
    result = await running
    return after(result) if after else result


def _watch_gap(state: State, live: LiveRun) -> None:
    """Start, or stop, the clock of a missing number; others that arrive meanwhile do not set it back."""
    missing = live.lane.missing
    if missing == live.gap:
        return
    live.gap = missing
    if live.gap_timer is not None:
        live.gap_timer.cancel()
        live.gap_timer = None
    if missing is not None:
        loop = asyncio.get_running_loop()
        live.gap_timer = loop.call_later(state.limits.gap_seconds, _close_gap, state, live, missing)


def _close_gap(state: State, live: LiveRun, missing: int) -> None:
    live.gap = live.gap_timer = None
    waiting = live.lane.give_up()
    abandoned = [queued for queued in waiting if not queued.is_due_anyway]
    for queued in abandoned:
        queued.promise.fail(
            f"request number {missing} of this run never arrived, so the {len(abandoned)} after it were not "
            "executed; the run goes on with the next request"
        )
    for queued in waiting:
        if queued.is_due_anyway:
            _begin(state, queued)


def digest_of(path: str, body: bytes) -> bytes:
    """What makes two requests the same request."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
