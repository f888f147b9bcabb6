"""Futures: what every call returns, how a result is fetched, and how the results of several chunks become one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from tinkex import codec
from tinkex.errors import APIConnectionError, APIStatusError, RequestFailedError, is_retryable
from tinkex.protocol import RETRIEVE_FUTURE, Operation
from tinkex.runtime import Runtime, runtime
from tinkex.transport import OFF_LOOP_BYTES, Reply, Transport, backoff
from tinkex.types.sessions import FutureRetrieveRequest, RequestErrorCategory
from tinkex.types.training import ForwardBackwardOutput

T = TypeVar("T")
logger = logging.getLogger("tinkex")

POLL_TIMEOUT = 45.0
HELD = 1.0
"""A poll that the server held for this long and left without a result has run out: poll again at once."""


class Future(concurrent.futures.Future[T], Generic[T]):
    """The outcome of a call that has already begun.

    `await` it in any event loop, or call `.result(timeout)` in any thread. A timeout, or a cancelled waiter, never
    cancels the work; `cancel()` does. It is a `concurrent.futures.Future`, so `wait` and `as_completed` take it too.

    Example:
        >>> loss = client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]  # doctest: +SKIP
    """

    def __init__(self) -> None:
        super().__init__()
        self._runtime: Runtime | None = None

    def result(self, timeout: float | None = None) -> T:
        """Block until the outcome is there; `TimeoutError` after `timeout` seconds leaves the work running."""
        self._check_thread()
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise
            raise TimeoutError(f"not done after {timeout} s; the work goes on, result() can be called again") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the outcome is there and return its error, if it is one."""
        self._check_thread()
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Give the work up; False when it has already ended."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        return True

    def _check_thread(self) -> None:
        if self.done():
            return
        if self._runtime is not None and self._runtime.is_current:
            raise RuntimeError("result() would block tinkex's own event loop for ever: await the future instead")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if "ipykernel" not in sys.modules:  # a notebook always runs inside a loop, and blocking there is what is meant
            message = "result() blocks the running event loop; await the future instead"
            warnings.warn(message, RuntimeWarning, stacklevel=_users_level())

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake(_: object) -> None:
            if not woken.done():
                woken.set_result(None)

        self.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(wake, None))
        await woken
        return super().result(0)

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the outcome; `TimeoutError` after `timeout` seconds leaves the work running."""
        async with asyncio.timeout(timeout):
            return await self

    def future(self) -> concurrent.futures.Future[T]:
        """This future, as the plain concurrent one that it is."""
        return self


def _users_level() -> int:
    """How far up the stack, counted from the caller, the user's own line is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinkex."):
        level, frame = level + 1, frame.f_back
    return level


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the runtime; the future is its outcome."""
    future: Future[T] = Future()
    future._runtime = runtime()
    future._runtime.feed(coroutine, future)
    return future


METADATA = object()
"""The answer that says how large the result is, to be asked for again."""
PENDING = object()
"""The answer that says there is no result yet."""


async def retrieve(transport: Transport, op: Operation, request_id: str, submitted: float) -> Any:
    """Poll until an operation has ended: its result, or RequestFailedError when it failed."""
    iteration = failures = early = 0
    metadata_only, failing_since = True, 0.0
    while True:
        sent = time.monotonic()
        headers = {"X-Tinker-Request-Iteration": str(iteration)}
        if iteration == 0:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{sent - submitted:.6f}"
        iteration += 1
        try:
            request = FutureRetrieveRequest(request_id=request_id, allow_metadata_only=metadata_only)
            answer = await _ask(transport, op, request, headers)
        except (APIConnectionError, APIStatusError) as error:
            failures += 1
            failing_since = failing_since if failures > 1 else sent
            if not is_retryable(error) or time.monotonic() - failing_since > transport.config.patience:
                error.request_id, error.attempts = request_id, failures
                raise
            if failures == 2:
                logger.warning("waiting for %s: %s; still trying", request_id, error.message)
            await asyncio.sleep(backoff(failures, getattr(error, "retry_after", None)))
            continue
        failures = 0
        if answer is METADATA:
            metadata_only = False
        elif answer is not PENDING:
            return answer
        elif time.monotonic() - sent >= HELD:
            early = 0
        else:  # a server that does not hold polls must not be polled in a hot loop
            early += 1
            await asyncio.sleep(backoff(early, first=0.05, most=1.0))


async def _ask(transport: Transport, op: Operation, request: FutureRetrieveRequest, headers: Mapping[str, str]) -> Any:
    """One poll: a result, METADATA, PENDING, or an error that says what came instead."""
    wants_protobuf = op.result is not None and codec.has_protobuf(op.result)
    accept = {"Accept": codec.PROTOBUF if wants_protobuf else codec.JSON, "X-Tinker-Request-Type": op.request_type}
    reply = await transport.poll(RETRIEVE_FUTURE, request, {**accept, **headers}, POLL_TIMEOUT)
    if reply.status == 408:
        return PENDING
    if reply.status >= 300:
        raise transport.refusal(op, reply)
    return await _read(transport, op, reply, request.request_id)


async def _read(transport: Transport, op: Operation, reply: Reply, request_id: str) -> Any:
    """A result, or METADATA / PENDING for the two answers that ask to poll again."""
    assert op.result is not None
    if codec.PROTOBUF not in reply.content_type:
        try:
            # Only the small answers are JSON when protobuf was asked for; a peek at the keys is cheap either way.
            envelope = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            envelope = None
        if isinstance(envelope, dict):
            if "error" in envelope:
                raise _failure(envelope, request_id, op)
            if envelope.get("type") == "try_again":
                return PENDING
            if envelope.get("status") == "complete_metadata":
                return METADATA
    if len(reply.body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(transport.decode, op, op.result, reply)
    return transport.decode(op, op.result, reply)


def _failure(envelope: Mapping[str, Any], request_id: str, op: Operation) -> RequestFailedError:
    try:
        category = RequestErrorCategory(str(envelope.get("category", "unknown")).lower())
    except ValueError:
        category = RequestErrorCategory.Unknown
    return RequestFailedError(
        f"{op.name} failed ({category.value} error): {envelope['error']}",
        request_id=request_id,
        category=category,
    )


# ── several chunks, one result ───────────────────────────────────────────────────────────────────────────────────


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _weighted_mean,
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: max(values) - _weighted_mean(values, weights),
    "hash2": lambda values, _: float(sum(int(v) for v in values) % 2**64),
}


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Join the results of one call's chunks: outputs in order, metrics by the reduction their names end in."""
    if len(outputs) == 1:
        return outputs[0]
    weights = [len(output.loss_fn_outputs) for output in outputs]
    metrics: dict[str, float] = {}
    for key in outputs[0].metrics:
        values = [output.metrics[key] for output in outputs if key in output.metrics]
        reduction = key.rpartition(":")[2]
        if reduction == "unique":
            metrics |= {key if i == 0 else f"{key}_{i}": value for i, value in enumerate(values)}
        elif reduction in REDUCTIONS and len(values) == len(outputs):
            metrics[key] = REDUCTIONS[reduction](values, weights)
    joined = [item for output in outputs for item in output.loss_fn_outputs]
    return ForwardBackwardOutput(outputs[0].loss_fn_output_type, joined, metrics)
