"""Open samplers and draw samples.

A stream sends samples as they are drawn: a server-sent event for each token. It is not a future:
nothing is kept, and a client that disconnects ends its sample. Tokens are sent as numbers; the
client's tokenizer knows how to join the pieces of a character.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex.engine.api import DrawnToken, EngineError, Listener
from tinkex.server.calls import Call
from tinkex.server.database.interface import Sampler
from tinkex.server.http_errors import Refusal, internal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.operations import watch
from tinkex.server.state import State
from tinkex.types.record import to_json
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.sessions import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from tinkex.types.training import UntypedAPIFuture
from tinkex.wire import codec

logger = logging.getLogger("tinkex.server")

WAITING = b": waiting\n\n"
END = b"data: [DONE]\n\n"
"""The end of every stream, also after a failure; a stream without it was cut short."""

Draw: TypeAlias = Callable[[Listener], Awaitable[SampleResponse]]


@handler
async def create_sampling_session(state: State, call: Call) -> CreateSamplingSessionResponse:
    """Bind a sampler to a base model or a checkpoint."""
    request: CreateSamplingSessionRequest = call.request
    await state.sessions.require(request.session_id)
    base_model = await state.samplers.base_of(call.owner, request.base_model, request.model_path)
    sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = Sampler(
        sampler_id, request.session_id, base_model, request.model_path, owner=call.owner
    )
    known = await asyncio.to_thread(state.database.samplers.get, sampler_id)
    if known is not None and (known.base_model, known.model_path, known.model_id) != (
        base_model,
        request.model_path,
        None,
    ):
        raise Refusal(
            400,
            f"sampling session {sampler_id!r} was opened before, with other weights; "
            "use another sampling_session_seq_id",
        )
    await asyncio.to_thread(state.database.samplers.add, sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@handler
async def get_sampler(state: State, call: Call) -> GetSamplerResponse:
    """Describe a sampler."""
    sampler = await asyncio.to_thread(state.database.samplers.get, call.path["sampler_id"])
    if sampler is None:
        raise Refusal(404, f"there is no sampler {call.path['sampler_id']!r}")
    return GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
    )


@handler
async def asample(state: State, call: Call) -> UntypedAPIFuture:
    """Draw samples; a repeated number gives the original receipt, and draws nothing."""
    return await state.samples.admit(call, functools.partial(watch, state, call.op, call))


@handler
async def stream_sample(state: State, call: Call) -> SampleStream:
    """Draw samples and send each token when it is there; the number is not used, for nothing is
    kept under it.
    """
    request: SampleRequest = call.request
    sampler = await state.samplers.named(request, call.owner)
    source = await state.samplers.find(sampler)
    request = request.model_copy(update={"record_stability_info": None})  # its samples have no ids
    job = f"{sampler.sampler_id}:stream:{secrets.token_hex(8)}"

    async def start(listener: Listener) -> SampleResponse:
        with _streaming(state, call.owner, sampler):
            return await state.samplers.draw(
                job, sampler, source, request, listener=listener, owner=call.owner
            )

    return SampleStream(start, lambda: state.samplers.cancel(job), state.limits.quiet_seconds)


@contextlib.contextmanager
def _streaming(state: State, owner: str, sampler: Sampler) -> Iterator[None]:
    """Note the time of a sample that has no promise."""
    name, began, error = "stream_sample", time.time(), None
    state.meter.open[owner, name] += 1
    try:
        yield
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        state.meter.open[owner, name] -= 1
        request_id = f"{sampler.sampler_id}:{name}:{began}"
        state.meter.span(sampler.session_id, request_id, name, began, error)


@handler
async def join_sampling_session(state: State, call: Call) -> JoinSamplingSessionResponse:
    """Give another client of a sampler its own number, under which it counts its requests."""
    request: JoinSamplingSessionRequest = call.request
    if await asyncio.to_thread(state.database.samplers.get, request.sampling_session_id) is None:
        raise Refusal(404, f"there is no sampling session {request.sampling_session_id!r}")
    number = await asyncio.to_thread(state.database.samplers.join, request.sampling_session_id)
    return JoinSamplingSessionResponse(client_counter=number)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────


def event(fields: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(fields) + b"\n\n"


class SampleStream(Response):
    """The answer to a request for a stream; `draw` starts the sample, `cancel` drops it.

    Events wait here for a slow client; there are at most as many as the request asked for tokens.
    """

    def __init__(self, draw: Draw, cancel: Callable[[], object], quiet_seconds: float) -> None:
        # A proxy must not buffer events.
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "Content-Type": codec.EVENT_STREAM,
        }
        super().__init__(None, headers=headers)
        del self.headers["content-length"]
        self._draw, self._cancel, self._quiet_seconds = draw, cancel, quiet_seconds
        self._events: list[bytes] = []
        self._lengths: dict[int, int] = {}
        self._ended: set[int] = set()
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the sample has ended or the client has disconnected."""
        drawing = asyncio.ensure_future(self._draw(self._hear))
        drawing.add_done_callback(lambda _: self._news.set())
        gone, writing = (
            asyncio.ensure_future(_disconnect(receive)),
            asyncio.ensure_future(self._write(drawing, send)),
        )
        try:
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not drawing.done():
                self._cancel()
                drawing.add_done_callback(_retrieve)
            gone.cancel()
            writing.cancel()
        await asyncio.wait({writing})
        if not writing.cancelled():
            with contextlib.suppress(OSError):  # the connection is broken
                writing.result()

    def _hear(self, drawn: Sequence[DrawnToken]) -> None:
        for token in drawn:
            self._lengths[token.index] = self._lengths.get(token.index, 0) + 1
            logprob = token.logprob if math.isfinite(token.logprob) else None
            fields = {
                "token_id": token.token,
                "token": None,
                "logprob": logprob,
                "index": token.index,
            }
            if token.version is not None:
                fields["weights_version"] = token.version
            self._events.append(event(fields | {"event_type": "token"}))
            if token.stop_reason is not None:
                self._end(token.index, token.stop_reason, self._lengths[token.index], token.reused)
        self._news.set()

    def _end(self, index: int, reason: str, total: int, reused: int) -> None:
        self._ended.add(index)
        fields = {
            "index": index,
            "finish_reason": reason,
            "total_tokens": total,
            "event_type": "done",
        }
        if reused:
            fields["prompt_cache_hit_tokens"] = reused
        self._events.append(event(fields))

    async def _write(self, drawing: asyncio.Future[SampleResponse], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not drawing.done():
            try:
                async with asyncio.timeout(self._quiet_seconds):
                    await self._news.wait()
            except TimeoutError:
                self._events.append(WAITING)
            self._news.clear()
            if not drawing.done():
                await _send(send, self._take())
        self._conclude(drawing)
        await _send(send, self._take() + END, more=False)

    def _take(self) -> bytes:
        """Return the new events; tokens of several steps may go out together."""
        events, self._events = self._events, []
        return b"".join(events)

    def _conclude(self, drawing: asyncio.Future[SampleResponse]) -> None:
        try:
            result = drawing.result()
        except EngineError as error:
            self._fail(str(error), error.category)
        except Exception as error:
            logger.exception("a stream of samples failed")
            self._fail(internal(error), "server")
        else:
            for index, sequence in enumerate(result.sequences):
                if index not in self._ended:  # a sample without tokens has had no event
                    self._end(
                        index, sequence.stop_reason, sequence.length, result.prompt_cache_hit_tokens
                    )

    def _fail(self, message: str, category: str) -> None:
        self._events.append(
            event({"error": message, "category": category, "event_type": "error"}, "error")
        )


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _retrieve(drawing: asyncio.Future[Any]) -> None:
    """Take the failure of a sample whose client has gone, or asyncio would log it."""
    if not drawing.cancelled():
        drawing.exception()
