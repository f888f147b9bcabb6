"""Poll for results, one or many at once, and cancel samples.

A poll is held until there is a result, the time of a poll is over, or the server stops. One request
asks for one result. Another asks for all samples of a client: these are noted in a log, in the
order in which they ended. A log begins with the first poll for it, so that clients which ask for
each result cost nothing. Its numbers are acknowledged by the next poll; only then is a result that
was sent along forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from starlette.responses import Response

from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.middleware import is_own
from tinkex.server.routes.cluster_pages import waiting_reason
from tinkex.server.routes.handler_table import handler
from tinkex.server.runs.journals import DIRECT
from tinkex.server.runs.promises import Promise, encode, encoding, is_heavy
from tinkex.server.runs.result_log import Log
from tinkex.server.runs.unloading import UNLOAD
from tinkex.server.state import State
from tinkex.server.workers.sample_jobs import CANCELLED
from tinkex.types.future_requests import (
    CancelFutureRequest,
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
)
from tinkex.types.record import to_json
from tinkex.types.sessions import Empty
from tinkex.wire import codec

OVERSIZE = 8
"""A result that is alone may be so many times what a batch may hold."""
MANY = 200
"""More results than this are encoded in a thread, however small they are."""

Carried: TypeAlias = tuple[Promise, codec.Body, bool]
"""A result, its bytes, and whether they go along."""


# ── one result ────────────────────────────────────────────────────────────────────────────────────


@handler
async def retrieve_future(state: State, call: Call) -> Response | codec.Body:
    """Answer with a result once it is there; 408 when the time of a poll is over."""
    wanted: FutureRetrieveRequest = call.request
    promise = state.promises.get(wanted.request_id) or await _take_up(
        state, wanted.request_id, call.owner
    )
    try:
        async with state.promises.holding(state.limits.poll_seconds):
            while not promise.done.is_set():  # a failure may have been taken back
                await promise.done.wait()
    except TimeoutError:
        if (reason := await waiting_reason(state, wanted.request_id)) is not None:
            paused = {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return _json(paused, 408)
        return _json({"queue_state": "active"}, 408)
    if promise.is_lost:
        await state.promises.keep_failures([promise])
    as_protobuf = codec.PROTOBUF in call.headers.get("accept", "")
    promise.touch()
    body = await encoding(promise, as_protobuf=as_protobuf)
    promise.size = len(body.data)
    is_inline = not wanted.allow_metadata_only or promise.size <= state.limits.announced_bytes
    promise.hand_over(body, is_inline=is_inline)
    if is_inline:
        return body
    return _json({"status": "complete_metadata", "response_payload_size": promise.size})


def _json(fields: Mapping[str, object], status: int = 200) -> Response:
    return Response(to_json(fields), status_code=status, media_type=codec.JSON)


async def _take_up(state: State, request_id: str, owner: str) -> Promise:
    """Return a promise that an earlier life of the server made.

    Raises:
        Refusal: 404 if there was none; 410 if it has expired or was lost.
    """
    unknown = Refusal(404, f"there is no request {request_id!r}")
    if not state.promises.is_gone(request_id):
        await _revive(state, request_id)
        # before, it was not known whose it is
        if not await is_own(state, owner, "request_id", request_id):
            raise unknown
    if (promise := state.promises.get(request_id)) is not None:
        return promise
    if state.promises.is_gone(request_id):
        raise Refusal(410, f"the result of request {request_id!r} has expired")
    if advice := await asyncio.to_thread(state.after_loss, request_id):
        raise Refusal(
            410, f"request {request_id!r} was lost when the server was restarted; {advice}"
        )
    raise unknown


async def _revive(state: State, request_id: str) -> None:
    """Take up what an earlier life of the server had of the run or session of a request."""
    owner = request_id.rpartition(":")[0]
    for name in (owner, request_id):  # a custom loss is a request of its own
        await state.revivals.revived(name)
    if request_id.endswith(UNLOAD) and state.promises.get(request_id) is None:
        await state.unloading.recall(owner)
    if (sampler := await asyncio.to_thread(state.database.samplers.get, owner)) is not None:
        await state.revivals.revived(sampler.session_id)
    elif owner.startswith(f"{DIRECT}:"):
        await state.revivals.revived(DIRECT)


# ── many results ──────────────────────────────────────────────────────────────────────────────────


@handler
async def retrieve_futures(state: State, call: Call) -> FuturesRetrieveResponse | codec.Body:
    """Say which samples of a client have ended; bring their results along if that is asked for."""
    request: FuturesRetrieveRequest = call.request
    log = await _log(state, request)
    most, cursor = state.limits.poll_seconds, request.prev_cursor
    seconds = most if request.timeout is None else min(request.timeout, most)
    with contextlib.suppress(TimeoutError):
        async with state.promises.holding(seconds):
            await log.wait(cursor)
    if log.is_closed:
        raise Refusal(410, f"the session of {request.target.sampling_session_id!r} has ended")
    ended = log.after(cursor)
    await state.promises.keep_failures(ended)
    if request.inline_bytes is None:
        return await _list(ended, cursor)
    return await _carry(ended, cursor, min(request.inline_bytes, state.limits.inline_bytes))


async def _log(state: State, request: FuturesRetrieveRequest) -> Log[Promise]:
    """Return the log that a poll is for, without what the client says it knows."""
    target = (request.target.sampling_session_id, request.target.cloned_sampler_id)
    if state.promises.log(target) is None:
        sampler = await asyncio.to_thread(state.database.samplers.get, target[0])
        if sampler is None:
            raise Refusal(404, f"there is no sampling session {target[0]!r}")
        # what was asked for before a restart ends in this log, too
        await state.revivals.revived(sampler.session_id)
        state.promises.open_log(target, sampler.session_id)
    log = state.promises.log(target)
    assert log is not None
    if request.prev_cursor > log.cursor:
        raise Refusal(
            410,
            f"cursor {request.prev_cursor} is from before a restart of this server; poll for each "
            "request by its id",
        )
    state.sessions.note(log.session_id)
    state.promises.acknowledge(log, request.prev_cursor)
    for request_id in request.retrieved_request_ids:
        promise = state.promises.get(request_id)
        if promise is not None and promise.target == target and promise.done.is_set():
            state.promises.forget(promise)
    return log


async def _list(ended: Sequence[Promise], cursor: int) -> FuturesRetrieveResponse:
    """Name what has ended; each result is encoded here, for its size, and kept until it is read."""
    completions: list[FutureCompletion] = []
    for promise in ended:
        body = await encoding(promise, as_protobuf=True)
        completions.append(_completion(promise, body, is_inline=False))
    return FuturesRetrieveResponse(completions=completions, cursor=_last(ended, cursor))


async def _carry(ended: Sequence[Promise], cursor: int, budget: int) -> codec.Body:
    """Bring results along, as many as the budget holds; the others come with the next poll."""
    off_loop = len(ended) > MANY or any(map(is_heavy, ended))
    carried = await asyncio.to_thread(_pack, ended, budget) if off_loop else _pack(ended, budget)
    completions: list[FutureCompletion] = []
    payloads = []
    for promise, body, is_inline in carried:
        completion = _completion(promise, body, is_inline=is_inline)
        if is_inline:
            payloads.append(body.data)
            fields = {"content_type": body.content_type, "inline_size": len(body.data)}
            completion = completion.model_copy(update=fields)
        completions.append(completion)
    head = FuturesRetrieveResponse(
        completions=completions, cursor=_last([promise for promise, *_ in carried], cursor)
    )
    return codec.encode_batch(head, payloads)


def _pack(ended: Sequence[Promise], budget: int) -> list[Carried]:
    carried: list[Carried] = []
    total = 0
    for promise in ended:
        body = encode(promise, as_protobuf=True)
        size = len(body.data)
        fits = total + size <= budget or (total == 0 and size <= OVERSIZE * budget)
        if not fits and total:
            promise.kept = body
            break
        carried.append((promise, body, fits))
        total += size if fits else 0
    return carried


def _completion(promise: Promise, body: codec.Body, *, is_inline: bool) -> FutureCompletion:
    promise.hand_over(body, is_inline=is_inline)
    promise.is_sent = is_inline
    if isinstance(promise.result, RequestFailedResponse):
        return FutureFailed(request_id=promise.request_id)
    return FutureFinished(
        request_id=promise.request_id, response_payload_uncompressed_size=len(body.data)
    )


def _last(ended: Sequence[Promise], cursor: int) -> int:
    return ended[-1].number if ended else cursor


# ── cancelling ────────────────────────────────────────────────────────────────────────────────────


@handler
async def cancel_future(state: State, call: Call) -> Empty:
    """Cancel a sample. Operations of a run are carried out all the same, and results stay."""
    request: CancelFutureRequest = call.request
    promise = state.promises.get(request.request_id)
    if (
        promise is not None
        and promise.cancel is not None
        and await is_own(state, call.owner, "request_id", request.request_id)
    ):
        promise.cancel()
        promise.fail(CANCELLED)
    return Empty()
