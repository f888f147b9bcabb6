"""Polls for the result of one operation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import msgspec

from tinkex import events
from tinkex.client.http.exchange import Reply
from tinkex.client.http.reply_errors import RejectedError
from tinkex.client.http.retry import DELAYS, Patience, persist
from tinkex.client.http.transport import OFF_LOOP_BYTES, Transport
from tinkex.client.settings.config import poll_delay
from tinkex.client.settings.delays import LONGEST_RETRY_AFTER, Delays
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    GoneError,
    RequestFailedError,
    TinkerError,
    is_retryable,
)
from tinkex.types.future_requests import FutureRetrieveRequest, RequestErrorCategory
from tinkex.wire import codec
from tinkex.wire.protocol import RETRIEVE_FUTURE, Operation

logger = logging.getLogger("tinkex")

POLL_TIMEOUT = 45.0
HELD = 1.0
"""A poll without a result that the server held for so long has run out: poll again at once."""
MALFORMED_ATTEMPTS = 3
"""Retries after a refusal without a reason."""
PAUSED_SECONDS = 1.0
"""The wait after an answer that says the queue is paused."""
EARLY_DELAYS = Delays(first=0.05, most=1.0)
"""Delays after polls that the server does not hold, which must not become a hot loop."""


class Receipt(msgspec.Struct, frozen=True):
    """The answer to a submission: the name of a future or, from some servers, the result."""

    op: Operation
    submitted: float
    """The start of the submission, on the monotonic clock."""
    request_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    result: Any = None


QueueNotice: TypeAlias = Callable[..., object]
"""Receives the queue's state, its reason, and `request_id`, from every answer that names them."""


def retrieve(
    transport: Transport,
    receipt: Receipt,
    *,
    timeout: float | None = None,
    notice: QueueNotice | None = None,
) -> Coroutine[Any, Any, Any]:
    """Poll until an operation has ended; return its result, or raise RequestFailedError.

    A poll that runs out is repeated without limit, or for `timeout` seconds. Faults are repeated
    within the transport's patience. At the timeout the last fault is raised, else APITimeoutError.
    """
    if receipt.request_id is None:
        return _given(receipt.result)
    poll = _Poll(
        transport, receipt.op, receipt.request_id, receipt.submitted, notice, time.monotonic()
    )
    return poll.run() if timeout is None else poll.run_within(timeout)


async def _given(result: Any) -> Any:
    return result


class _Poll(msgspec.Struct):
    """One operation's polls, until there is an outcome."""

    transport: Transport
    op: Operation
    request_id: str
    submitted: float
    notice: QueueNotice | None
    started: float
    sent: float = 0.0
    failing_since: float = 0.0
    iteration: int = 0
    failures: int = 0
    early: int = 0
    malformed: int = 0
    metadata_only: bool = True
    """True until a size was announced."""
    last_failure: Exception | None = None
    asked: tuple[bool, codec.Body] | None = None
    """True if the last poll allowed an announcement, and its body: most are repeated."""

    async def run_within(self, seconds: float) -> Any:
        """Poll until a result or the timeout."""
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self.run()
        except TimeoutError:
            if limit.expired():
                raise self._late() from None
            raise  # of one exchange, which has its own limit

    async def run(self) -> Any:
        """Poll; a result whose size was announced is fetched under the budget for large results."""
        answer = await persist(self._ask, self._delay_after)
        if not isinstance(answer, _Announced):
            return answer
        if not self.metadata_only:
            raise self._told(
                APIResponseValidationError(
                    f"{self.op.title} at {self.transport.place}: the size of the result of "
                    f"{self.request_id} was announced a second time instead of the result"
                )
            )
        async with self.transport.response_budget.taken(answer.size):
            self.metadata_only = False
            return await self.run()

    def _delay_after(self, outcome: Any) -> float | None:
        """Return the wait before the next poll; None at the end."""
        if isinstance(outcome, BillingError):
            outcome.request_id = self.request_id
            self.failures = 0  # earlier failures are long ago when it goes on
            delay = self.transport.billing.delay_after(outcome)
            if delay is None:
                self._told(outcome)
            return delay
        if isinstance(outcome, APIConnectionError | APIStatusError):
            return self._delay_after_failure(outcome)
        if isinstance(outcome, Exception):
            if isinstance(outcome, TinkerError):
                self._told(outcome)
            return None
        self.failures = 0
        return self._delay_after_pending(outcome) if isinstance(outcome, _Pending) else None

    def _delay_after_failure(self, error: APIConnectionError | APIStatusError) -> float | None:
        self.failures += 1
        self.failing_since = self.failing_since if self.failures > 1 else self.sent
        self.last_failure = error
        error.request_id, error.attempts = self.request_id, self.failures
        self._told(error)
        self.malformed = self.malformed + 1 if _says_nothing(error) else 0
        hopeless = (
            self.malformed > MALFORMED_ATTEMPTS if self.malformed else not is_retryable(error)
        )
        config = self.transport.config
        allowed = Patience(config.patience).of(error.status or 0)
        if hopeless or time.monotonic() - self.failing_since > allowed:
            if isinstance(error, GoneError) and error.hint is None:
                error.hint = "the result was kept for a time and is gone: submit the request again"
            return None
        if self.failures == 2:
            logger.warning("waiting for %s: %s; still trying", self.request_id, error.message)
        if config.poll_backoff is not None and (error.status or 0) >= 500:
            asked = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER)
            return max(poll_delay(config.poll_backoff, self.iteration - 1), asked)
        return DELAYS.after(self.failures, error.retry_after)

    def _delay_after_pending(self, pending: _Pending) -> float:
        """Return 0 after a poll that the server held."""
        if pending.delay is not None:
            return pending.delay
        if time.monotonic() - self.sent >= HELD:
            self.early = 0
            return 0.0
        self.early += 1
        return EARLY_DELAYS.after(self.early)

    def _late(self) -> Exception:
        """Return the error for a timeout: the last failure, if there was one."""
        waited = time.monotonic() - self.started
        error = self.last_failure or APITimeoutError(
            f"{self.op.title} at {self.transport.place}: request {self.request_id} had no result "
            f"after {waited:.1f} s",
            request_id=self.request_id,
            hint="the server carries it out all the same",
        )
        self._tell(events.FUTURE_TIMEOUT, {})
        return error

    def _told(self, error: TinkerError) -> TinkerError:
        """Emit the event of a failure."""
        name = next((name for kind, name in _EVENTS.items() if isinstance(error, kind)), None)
        if name is not None:
            category = None if error.category is None else error.category.value
            self._tell(
                name, {"status": error.status, "category": category, "error_type": error.type}
            )
        return error

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        if events.is_heard(name):
            named = {
                "request_id": self.request_id,
                "request_type": self.op.request_type,
                "iteration": self.iteration - 1,
                **facts,
                **self.transport.facts,
                **(self.transport.config.user_metadata or {}),
            }
            events.emit(name, {"elapsed_time": (time.monotonic() - self.started) * 1000}, named)

    async def _ask(self) -> Any:
        """Poll once; return a result, an announcement or `_Pending`."""
        op, self.sent = self.op, time.monotonic()
        if self.asked is None or self.asked[0] is not self.metadata_only:
            request = FutureRetrieveRequest(
                request_id=self.request_id, allow_metadata_only=self.metadata_only
            )
            self.asked = self.metadata_only, codec.encode(request)
        wants_protobuf = op.result is not None and codec.has_protobuf(op.result)
        headers = {
            "Accept": codec.PROTOBUF if wants_protobuf else codec.JSON,
            "X-Tinker-Request-Type": op.request_type,
            "X-Tinker-Request-Iteration": str(self.iteration),
            "X-Stainless-Raw-Response": "raw",
        }
        if self.iteration == 0:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{self.sent - self.submitted:.6f}"
        self.iteration += 1
        reply = await self.transport.poll(RETRIEVE_FUTURE, self.asked[1], headers, POLL_TIMEOUT)
        if reply.status == 408:
            delay = self._heed(_mapping(reply.body))
            if (chosen := self.transport.config.poll_backoff) is not None:
                delay = max(delay or 0.0, poll_delay(chosen, self.iteration - 1))
            return _Pending(delay)
        if reply.status >= 300:
            raise self.transport.errors.refusal(op, reply)
        return await self._read(reply)

    async def _read(self, reply: Reply) -> Any:
        """Read a good answer; decode a large one in a thread."""
        if codec.PROTOBUF not in reply.content_type:
            # Only the small answers are JSON when protobuf was asked for; a look at the keys is
            # cheap either way.
            envelope = _mapping(reply.body)
            status = str(envelope.get("status", "")).lower()
            if str(envelope.get("type", "")).lower() == "try_again":
                return _Pending(self._heed(envelope, PAUSED_SECONDS))
            if status == "pending":
                return _Pending(self._heed(envelope))
            if status == "complete_metadata":
                size = envelope.get("response_payload_size")
                return _Announced(size if isinstance(size, int) and size > 0 else 0)
            if status == "completed" and "result" in envelope:
                reply = msgspec.structs.replace(reply, body=msgspec.json.encode(envelope["result"]))
                envelope = _mapping(reply.body)
            if "error" in envelope or status == "failed":
                raise failure_of(self.transport, self.op, envelope, self.request_id)
        assert self.op.result is not None
        if len(reply.body) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self.transport.decode, self.op, self.op.result, reply)
        return self.transport.decode(self.op, self.op.result, reply)

    def _heed(self, envelope: Mapping[str, Any], paused: float | None = None) -> float | None:
        """Pass the queue's state on; return the seconds that the server asks to wait."""
        state, reason = envelope.get("queue_state"), envelope.get("queue_state_reason")
        reason = self.transport.errors.without_keys(reason) if isinstance(reason, str) else None
        if self.notice is not None and isinstance(state, str):
            self.notice(state, reason, request_id=self.request_id)
        asked = envelope.get("retry_after_ms")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            return min(asked / 1000, LONGEST_RETRY_AFTER)
        return (
            paused
            if isinstance(state, str) and state.strip().lower().startswith("paused")
            else None
        )


_EVENTS: dict[type[TinkerError], str] = {
    RequestFailedError: events.FUTURE_REQUEST_FAILED,
    APIStatusError: events.FUTURE_API_ERROR,
    APIConnectionError: events.FUTURE_CONNECTION_ERROR,
    APIResponseValidationError: events.FUTURE_VALIDATION_ERROR,
}


class _Pending(msgspec.Struct, frozen=True):
    """An answer without a result."""

    delay: float | None
    """Seconds to wait before the next poll, if the server or the settings say so."""


class _Announced(msgspec.Struct, frozen=True):
    """An answer that announces the size of a result, to be asked for again."""

    size: int


def read_result(transport: Transport, op: Operation, reply: Reply, request_id: str) -> Any:
    """Decode the result in a reply, or raise RequestFailedError."""
    assert op.result is not None
    if codec.PROTOBUF not in reply.content_type and "error" in (envelope := _mapping(reply.body)):
        raise failure_of(transport, op, envelope, request_id)
    return transport.decode(op, op.result, reply)


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        value = codec.loads(body) if body else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _says_nothing(error: APIError) -> bool:
    """Return True for a 400 without a reason: a proxy may have garbled the request."""
    if isinstance(error, RejectedError):
        return True
    if not isinstance(error, APIStatusError) or error.status_code != 400:
        return False
    body = error.body
    return not body or (
        isinstance(body, dict)
        and not any(body.get(name) for name in ("message", "error", "detail"))
    )


def failure_of(
    transport: Transport, op: Operation, envelope: Mapping[str, Any], request_id: str
) -> RequestFailedError:
    """Return the error that an answer reports, in any of the forms that servers use."""
    told = envelope.get("error")
    inner: Mapping[str, Any] = told if isinstance(told, dict) else {}
    text = transport.errors.without_keys(
        str((inner.get("message") or inner.get("error")) if inner else told or "")
    )
    category = RequestErrorCategory.parse(inner.get("category") or envelope.get("category"))
    return RequestFailedError(
        f"{op.title} failed ({category.value} error): {text or 'the server gives no reason'}",
        request_id=request_id,
        category=category,
    )
