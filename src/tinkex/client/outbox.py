"""Submissions: what a session sends, and a training run's in the order of its calls.

The newest protocol sends passes as protobuf and answers every long operation with the name of a
future. Older servers know only JSON, a separate endpoint for forward passes and fewer fields, and
may answer with the result at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import math
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Mapping,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from tinkex.client.futures.api_future import Future
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.result_polling import Receipt, failure_of
from tinkex.client.http.exchange import Reply
from tinkex.client.http.limits import ByteBudget
from tinkex.client.http.transport import Transport
from tinkex.errors import APIConnectionError, APIStatusError, TinkerError
from tinkex.types.inputs import Datum
from tinkex.types.record import to_builtins
from tinkex.types.sessions import ClientConfigResponse
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    UntypedAPIFuture,
)
from tinkex.wire import codec, protocol
from tinkex.wire.protobuf_schema import NotInProtobuf
from tinkex.wire.protocol import Operation

if TYPE_CHECKING:
    from tinkex.telemetry import Reporter

T = TypeVar("T")
logger = logging.getLogger("tinkex")

PARTIAL = "the gradient of {} counts in the next optim_step: load a saved state to be rid of it"
SPEND_PATIENCE = 5.0

Fetch: TypeAlias = Callable[[], Awaitable[T]]
"""Waits for the result of a call that was sent."""
Turn: TypeAlias = Callable[["Outbox", int], Awaitable[Fetch[T]]]
"""Sends a call when its turn comes; takes the outbox and the call's place."""
NEWER_FIELDS: dict[Operation, dict[str, Any]] = {
    protocol.ASAMPLE: {
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "prompt_logprobs": False,
    },
    protocol.CREATE_MODEL: {"optimizer_config": {"type": "adamw"}},
    protocol.SAVE_WEIGHTS: {"overwrite": False},
    protocol.SAVE_WEIGHTS_FOR_SAMPLER: {"kind": "snapshot"},
    protocol.OPTIM_STEP: {"type": "optim_step"},
    protocol.FORWARD_BACKWARD: {"forward_only": False},
}
"""Fields that older servers may refuse, with their default values, which are not sent."""
UNREADABLE = frozenset({400, 415, 422, 501})
"""Statuses with which a server refuses a body in an unknown form."""
FORWARD_ONLY = replace(protocol.FORWARD, path=protocol.FORWARD_BACKWARD.path)
"""A forward pass as the newest protocol sends it: to the endpoint of all passes."""


class Submissions:
    """A transport, the server's configuration of what is sent over it, and the open calls."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.client_config = ClientConfigResponse()
        self.closed = False
        self.telemetry: Reporter | None = None
        self.pending: set[Future[Any]] = set()
        """The calls that closing waits for."""
        self._trials: set[asyncio.Future[Reply]] = set()

    def track(self, future: Future[Any]) -> None:
        """Remember a call until it has ended, so that closing can wait for it."""
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)

    def report(self, error: Exception) -> None:
        """Report the failure of a call to telemetry; this does not wait."""
        if self.telemetry is not None:
            self.telemetry.log_exception(error)

    async def submit(
        self,
        op: Operation,
        request: Any,
        *,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
        final: Container[int] = (),
    ) -> Receipt:
        """Submit an operation; the receipt names its future, or holds the result."""
        named = ("model_id", "model_seq_id", "seq_id", "sampling_session_id")
        facts = {
            name: value for name in named if (value := getattr(request, name, None)) is not None
        }
        started = time.monotonic()
        options = {"headers": headers, "patience": patience, "final": final, "metadata": facts}
        is_pass = op is protocol.FORWARD_BACKWARD
        if is_pass and request.forward_only:
            op = FORWARD_ONLY
        # the answer to a pass shows the server's dialect, but an empty pass is always refused
        if self.transport.is_older is None and is_pass and request.forward_backward_input.data:
            reply = await self._try_both(functools.partial(self._post, op, request, options))
        else:
            reply = await self._post(op, request, options, self.transport.is_older or False)
        return read_receipt(self.transport, op, reply, started)

    async def _post(
        self, op: Operation, request: Any, options: dict[str, Any], older: bool, **other: Any
    ) -> Reply:
        """Encode and send a request; passes are large, so they are encoded in a thread."""
        if older:
            op, body = await asyncio.to_thread(_for_older, op, request)
        elif isinstance(request, ForwardBackwardRequest):
            compress = self.client_config.proto_compress_fwdbwd
            body = await asyncio.to_thread(_write_pass, request, compress)
        else:
            body = codec.encode(request)
        return await self.transport.request(op, body, **(options | other))

    async def _try_both(self, post: Callable[..., Coroutine[Any, Any, Reply]]) -> Reply:
        """Send a first pass in the newer form, else in the older one."""
        trial = asyncio.ensure_future(post(False))
        self._trials.add(trial)
        trial.add_done_callback(self._trials.discard)
        try:
            reply = await trial
        except APIStatusError as refused:
            if refused.status_code not in UNREADABLE:
                raise
            # if another is read, this one was refused for its content
            if others := self._trials - {trial}:
                await asyncio.wait(others)
            if self.transport.is_older is False:
                raise
            if self.transport.is_older:
                return await post(True)
            try:
                reply = await post(True, patience=0.0)
            except TinkerError:
                raise refused from None
            self.transport.is_older = True
            logger.info("%s reads no protobuf: passes are sent to it as JSON", self.transport.place)
            return reply
        self.transport.is_older = False
        return reply


def _write_pass(request: ForwardBackwardRequest, compress: bool) -> codec.Body:
    """Encode a pass as protobuf, or as JSON if the protobuf schema lacks something in it."""
    try:
        return codec.encode(request, compress=compress)
    except NotInProtobuf:
        return codec.encode(request, as_protobuf=False, compress=compress)


def _for_older(op: Operation, request: Any) -> tuple[Operation, codec.Body]:
    """Encode a request for older servers: as JSON, without the newer fields."""
    if isinstance(request, ForwardBackwardRequest) and request.forward_only:
        op, request = (
            protocol.FORWARD,
            ForwardRequest(
                forward_input=request.forward_backward_input,
                model_id=request.model_id,
                seq_id=request.seq_id,
            ),
        )
    plain: dict[str, Any] = to_builtins(request)
    silent = NEWER_FIELDS.get(op, {})
    kept = {
        name: value for name, value in plain.items() if name not in silent or value != silent[name]
    }
    return op, codec.Body(msgspec.json.encode(kept))


def read_receipt(transport: Transport, op: Operation, reply: Reply, submitted: float) -> Receipt:
    """Read the answer to a submission, which may be the result itself."""
    assert op.result is not None
    try:
        told = codec.loads(reply.body)
    except ValueError:
        told = None
    if isinstance(told, dict) and "request_id" not in told:
        if "error" in told or told.get("status") == "failed":
            raise failure_of(transport, op, told, "")
        if told.get("status") == "completed" and isinstance(told.get("result"), dict):
            told = told["result"]
            reply = msgspec.structs.replace(reply, body=msgspec.json.encode(told))
        if told.keys() & set(_fields(op.result)):
            return Receipt(op, submitted, result=transport.decode(op, op.result, reply))
    named: UntypedAPIFuture = transport.decode(op, UntypedAPIFuture, reply)
    return Receipt(op, submitted, named.request_id, named.sample_sequence_ids)


def _fields(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields of a result, by which it is recognised."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(inspect.signature(kind).parameters)


# ── a training run's calls ────────────────────────────────────────────────────────────────────────


class Poison:
    """Refuses the calls of a client after a custom pass that did not finish."""

    ALWAYS = -1
    """The place of a call that is never refused."""

    def __init__(self) -> None:
        self._places = itertools.count()
        self._lock = threading.Lock()
        self._place = math.inf
        self._cause: BaseException | None = None

    def place(self) -> int:
        """Return the place of a call made now among all calls."""
        return next(self._places)

    def spread(self, place: float, cause: BaseException) -> None:
        """Refuse every call behind this place; of two failures the one in front counts."""
        with self._lock:
            if place < self._place:
                self._place, self._cause = place, cause

    def check(self, place: int) -> None:
        """Raise if the call at this place is behind a failure."""
        if place > self._place:
            raise RuntimeError(
                "an earlier custom loss of this training client failed or was cancelled, so its "
                "gradient is missing "
                "and the client takes no more training requests; make another client from a saved "
                "state"
            ) from self._cause


class Outbox:
    """Sends the calls of a run one at a time, in the order they were made.

    A request takes its number when it is sent, so a call that is cancelled while it waits leaves no
    gap. A submission that has begun is always finished, so the server never waits for a number that
    was taken and not sent. A call that fails or is cancelled gives its turn up like any other. Each
    result is then fetched on its own.
    """

    def __init__(
        self,
        session: Submissions,
        model_id: str,
        first_seq_id: int = 1,
        poison: Poison | None = None,
    ) -> None:
        self.session, self.model_id = session, model_id
        self.poison = poison or Poison()
        self._next = first_seq_id
        self._turn = asyncio.Lock()  # hands over in the order of asking
        # Chunks being encoded and sent are in memory a second time. Two or so at once keep the
        # line busy.
        config = session.client_config
        self._budget = ByteBudget(
            min(config.fwdbwd_dispatch_bytes_semaphore_size, config.fwdbwd_max_chunk_bytes_count)
        )

    def put(
        self, name: str, turn: Turn[T], place: int | None = None, *, spoils: bool = False
    ) -> Future[T]:
        """Queue a call that is made now.

        Args:
            name: The name of the call.
            turn: Sends its requests.
            place: Its place among all calls, which decides whether a failure refuses it; the next
                one by default.
            spoils: Refuse the calls behind this one when it is cancelled.

        Returns:
            A future of the result.
        """
        if self.session.closed:
            raise RuntimeError("ServiceClient is closed")
        place = self.poison.place() if place is None else place
        future: Future[T] = Future()
        if spoils:  # before the cancel reaches the call, whose turn the next call then takes
            future.add_done_callback(lambda done: self._spoil(place, done.cancelled()))
        runtime().feed(self._take_turn(turn, place), future)
        self.session.track(future)
        return future

    def _spoil(self, place: int, is_cancelled: bool) -> None:
        if is_cancelled:
            self.poison.spread(place, asyncio.CancelledError("the custom loss was cancelled"))

    async def _take_turn(self, turn: Turn[T], place: int) -> T:
        try:
            async with self._turn:
                self.poison.check(place)
                fetch = await turn(self, place)
            return await fetch()
        except Exception as error:
            self.session.report(error)
            raise

    # ── sending, by the call whose turn it is ─────────────────────────────────────────────────────

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    async def send(self, op: Operation, request: Any) -> Receipt:
        """Send a request under the next number."""
        update = {"model_id": self.model_id, "seq_id": self._take()}
        return await _carried(self._submit(op, request.model_copy(update=update)))

    async def send_pass(
        self,
        chunks: list[list[Datum]],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        forward_only: bool,
    ) -> list[Receipt]:
        """Send a pass over data, one request per chunk."""
        requests = [
            ForwardBackwardRequest(
                model_id=self.model_id,
                seq_id=self._take(),
                forward_only=forward_only,
                forward_backward_input=ForwardBackwardInput(
                    data=chunk, loss_fn=loss_fn, loss_fn_config=dict(config) if config else None
                ),
            )
            for chunk in chunks
        ]
        return await _carried(self._submit_chunks(requests))

    def chunks(self, data: list[Datum]) -> list[list[Datum]]:
        """Cut data into chunks within the limits; a larger datum goes alone."""
        config = self.session.client_config
        chunks: list[list[Datum]] = [[]]
        size = 0
        for datum in data:
            full, added = len(chunks[-1]) >= config.fwdbwd_max_chunk_len, datum.nbytes
            if chunks[-1] and (full or size + added > config.fwdbwd_max_chunk_bytes_count):
                chunks.append([])
                size = 0
            chunks[-1].append(datum)
            size += added
        return chunks

    async def _submit_chunks(self, requests: list[ForwardBackwardRequest]) -> list[Receipt]:
        """Send the chunks of one call, the first one last.

        The server can then take them together.

        Every chunk is sent even when another is refused, so that no number is left out.
        """
        sent = [_outcome(self._submit(protocol.FORWARD_BACKWARD, one)) for one in requests]
        if self.session.client_config.parallel_fwdbwd_chunks:
            later = await asyncio.gather(*sent[1:])
            outcomes = [await sent[0], *later]
        else:
            outcomes = [await one for one in sent]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if not failures:
            return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
        error, accepted = failures[0], len(outcomes) - len(failures)
        is_partial = accepted and not requests[0].forward_only
        if is_partial and isinstance(error, TinkerError) and error.hint is None:
            error.hint = (
                f"{accepted} of the call's {len(outcomes)} chunks were accepted; "
                f"{PARTIAL.format('those')}"
            )
        raise error

    async def _submit(self, op: Operation, request: Any) -> Receipt:
        """Send a numbered request; if it is refused or cannot be sent, spend its number."""
        is_pass = isinstance(request, ForwardBackwardRequest)
        size = sum(one.nbytes for one in request.forward_backward_input.data) if is_pass else 0
        try:
            async with self._budget.taken(size):
                return await self.session.submit(op, request)
        except APIConnectionError:
            # It may have arrived or not. The caller need not wait until that is settled.
            runtime().task(self._spend(request.seq_id))
            raise
        except Exception:
            await self._spend(request.seq_id)
            raise

    async def _spend(self, seq_id: int) -> None:
        """Use up a number, which later calls wait for, with an empty pass that fails."""
        with contextlib.suppress(TinkerError):
            await self.touch(seq_id, patience=SPEND_PATIENCE)

    async def touch(self, seq_id: int, patience: float | None = None) -> None:
        """Send a pass over nothing under a given number."""
        nothing = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            model_id=self.model_id, seq_id=seq_id, forward_only=True, forward_backward_input=nothing
        )
        await self.session.submit(protocol.FORWARD_BACKWARD, request, patience=patience)


async def _carried(submission: Coroutine[Any, Any, T]) -> T:
    """Finish a submission even if its caller is cancelled meanwhile."""
    task = runtime().task(submission)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _outcome(work: Awaitable[T]) -> T | Exception:
    """Return the result of some work, or the error that it ends with."""
    try:
        return await work
    except Exception as error:
        return error
