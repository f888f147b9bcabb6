"""Which samples have ended, in order: what one poll tells a client about all that it waits for.

A log begins with the first poll for it, so that clients which ask for each result cost nothing. Its
numbers are acknowledged by the next poll; only then is a result that was sent along forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeAlias

from tinkex.server.http_errors import Refusal
from tinkex.server.runs.encoded_results import encode, encoding, is_heavy
from tinkex.server.runs.promises import Promise, Target
from tinkex.server.state import State
from tinkex.types.sessions import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
)
from tinkex.wire import codec

OVERSIZE = 8
"""A result that is alone may be so many times what a batch may hold."""
MANY = 200
"""More results than this are encoded in a thread, however small they are."""
CLONE = 1_000_000_000
"""Each client of a sampling session numbers its requests in a block of its own."""

Carried: TypeAlias = tuple[Promise, codec.Body, bool]
"""A result, its bytes, and whether these go along."""


def target_of(sampler_id: str, seq_id: int | None) -> Target:
    """Whose log a sample is noted in."""
    return sampler_id, (seq_id or 0) // CLONE


async def poll(
    state: State, request: FuturesRetrieveRequest
) -> FuturesRetrieveResponse | codec.Body:
    """What has ended since the cursor; held for as long as a poll may be held when nothing has."""
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
            f"cursor {request.prev_cursor} is of an earlier life of this server; ask for each "
            "request by its id",
        )
    state.sessions.note(log.session_id)
    state.promises.acknowledge(log, request.prev_cursor)
    for request_id in request.retrieved_request_ids:
        promise = state.promises.get(request_id)
        if promise is not None and promise.target == target and promise.done.is_set():
            state.promises.free(promise)
    seconds = (
        state.limits.poll_seconds
        if request.timeout is None
        else min(request.timeout, state.limits.poll_seconds)
    )
    with contextlib.suppress(TimeoutError):
        async with state.promises.holding(seconds):
            await log.wait(request.prev_cursor)
    if log.is_closed:
        raise Refusal(410, f"the session of {target[0]!r} has ended")
    ended = log.after(request.prev_cursor)
    if not ended:
        state.refuse_if_stopping()
    if request.inline_bytes is None:
        return await _list(ended, request.prev_cursor)
    return await _carry(
        ended, request.prev_cursor, min(request.inline_bytes, state.limits.inline_bytes)
    )


async def _list(ended: Sequence[Promise], cursor: int) -> FuturesRetrieveResponse:
    """Name what has ended. Each result is encoded once, here, and kept until it is fetched: so its
    size is known.
    """
    completions: list[FutureCompletion] = []
    for promise in ended:
        promise.kept = await encoding(promise, as_protobuf=True)
        promise.is_sent = False
        completions.append(_completion(promise, promise.kept))
    return FuturesRetrieveResponse(completions=completions, cursor=_last(ended, cursor))


async def _carry(ended: Sequence[Promise], cursor: int, budget: int) -> codec.Body:
    """Bring results along, as many as the budget holds; the others come with the next poll."""
    off_loop = len(ended) > MANY or any(map(is_heavy, ended))
    carried = await asyncio.to_thread(_pack, ended, budget) if off_loop else _pack(ended, budget)
    completions: list[FutureCompletion] = []
    payloads = []
    for promise, body, is_inline in carried:
        completion = _completion(promise, body)
        if is_inline:
            payloads.append(body.data)
            fields = {"content_type": body.content_type, "inline_size": len(body.data)}
            completion = completion.model_copy(update=fields)
            promise.kept = None
            promise.touch()  # should no poll come after this one, it need not be kept for long
        else:
            promise.kept = body
        promise.is_sent = is_inline
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


def _completion(promise: Promise, body: codec.Body) -> FutureCompletion:
    if isinstance(promise.result, RequestFailedResponse):
        return FutureFailed(request_id=promise.request_id)
    return FutureFinished(
        request_id=promise.request_id, response_payload_uncompressed_size=len(body.data)
    )


def _last(ended: Sequence[Promise], cursor: int) -> int:
    return ended[-1].number if ended else cursor
