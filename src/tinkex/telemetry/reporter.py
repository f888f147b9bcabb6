"""A reporter: collects events of one session and sends them in the background."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import platform
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinkex import events as bus
from tinkex.client.futures.loop_thread import runtime
from tinkex.errors import ConfigurationError
from tinkex.telemetry.event_queue import (
    EventQueue,
    duration_text,
    exception_fields,
    facts_of,
    size_of,
    user_error,
    without_headers,
)
from tinkex.telemetry.sending import HTTP_SECONDS, Send, deliver, is_sending
from tinkex.types.telemetry import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetryBatch,
    TelemetryEvent,
    UnhandledExceptionEvent,
    as_severity,
)
from tinkex.wire.protocol import PROTOCOL_VERSION
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex")

CLOSE_SECONDS = 1.0
"""Longest wait for the last events at the end of a session or a program."""
SERVICE_BATCH = 100
"""The most events that the service takes at once."""
REPORTED_EVENTS = (bus.HTTP_EXCEPTION, bus.QUEUE_STATE_CHANGE, *bus.FUTURE_EVENTS)
"""Events of the bus that a reporter sends by default: failures. Requests would be too many."""

_numbers = itertools.count(1)


@functools.cache
def _process_uuid(pid: int) -> str:
    """Return the id of this process; a forked child gets its own."""
    return str(uuid.uuid4())


class Reporter:
    """Collects events of one session and sends them in batches, in the background.

    Nothing here raises because of telemetry, and only calls that are asked to wait do. A call on a
    reporter that has ended, or that was made before the process forked, does nothing and returns
    False. Times are seconds.

    Args:
        send: Posts one batch.
        session_id: The session of the events.
        owner: The session; not kept alive. The reporter ends when it is dropped, or when its
            `closed` is true.
        secrets: Texts that must not be sent, apart from everything that looks like a secret.
        events: Names of the events of the bus that are sent, those of this session.
        attach_events: Listen to the bus from the start; `listen` does so later.
        handler_id: The id on the bus; one is made up by default.
        flush_interval: Time between two flushes; 0 for none.
        flush_threshold: The number of waiting events that causes a flush.
        flush_timeout: The longest wait of a flush that waits.
        http_timeout: The longest time of one attempt to send a batch.
        max_retries: The number of retries before a batch is given up.
        retry_base_delay: Time before the first of these; it doubles each time.
        max_queue_size: The most events that wait; more are dropped.
        max_batch_size: The most events of a batch.

    Example:
        >>> sent = []
        >>> async def post(batch: TelemetrySendRequest) -> None:
        ...     sent.extend(event["event"] for event in batch.events)
        >>> reporter = Reporter(post, "session-1")
        >>> reporter.log("epoch_end", {"loss": 0.31}), reporter.stop(), sent
        (True, True, ['SESSION_START', 'GENERIC_EVENT', 'SESSION_END'])
    """

    def __init__(
        self,
        send: Send,
        session_id: str,
        *,
        owner: object | None = None,
        secrets: Iterable[str] = (),
        events: Iterable[str] = REPORTED_EVENTS,
        attach_events: bool = True,
        handler_id: str | None = None,
        flush_interval: float = 10.0,
        flush_threshold: int = 100,
        flush_timeout: float = 30.0,
        http_timeout: float = HTTP_SECONDS,
        max_retries: int = 3,
        retry_base_delay: float = 1.0,
        max_queue_size: int = 10_000,
        max_batch_size: int = SERVICE_BATCH,
    ) -> None:
        if not 1 <= max_batch_size <= SERVICE_BATCH:
            raise ConfigurationError(
                f"max_batch_size must be 1 to {SERVICE_BATCH}, got {max_batch_size!r}"
            )
        if flush_threshold < 1 or max_queue_size < 1 or max_retries < 0:
            raise ConfigurationError(
                "flush_threshold and max_queue_size must be positive, max_retries not negative"
            )
        self.session_id = session_id
        self.handler_id = handler_id or f"tinkex-reporter-{next(_numbers)}"
        self._names = tuple(events)
        self._scrubber = Scrubber(secrets)
        self._flush_interval = flush_interval
        self._flush_threshold = flush_threshold
        self._flush_timeout = flush_timeout
        self._deliver = functools.partial(
            deliver,
            send,
            self._scrubber,
            timeout=http_timeout,
            retries=max_retries,
            base_delay=retry_base_delay,
        )
        self._max_batch_size = max_batch_size
        self._pid = os.getpid()
        self._runtime = runtime()
        self._began = time.monotonic()
        self._events = EventQueue(max_queue_size)
        self._is_full = self._is_asked = self._has_end = self._ended = False
        self._pump: asyncio.Task[None] | None = None  # this and what follows belong to the loop
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._owner = None if owner is None else weakref.ref(owner)
        if owner is not None:
            weakref.finalize(owner, _owner_is_gone, self).atexit = False
        self._queue(SessionStartEvent, 0, severity="INFO")
        if attach_events:
            self.listen()
        self._runtime.call(_watch, weakref.ref(self))

    @property
    def is_alive(self) -> bool:
        """True while it takes events: it has not ended, and the process has not forked."""
        return not self._ended and os.getpid() == self._pid

    # ── what is told ──

    def log(self, name: str, data: Mapping[str, Any] | None = None, severity: str = "info") -> bool:
        """Report an event; False when it is dropped.

        Args:
            name: The name of the event.
            data: The data of the event.
            severity: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL".

        Returns:
            True if the event was queued.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.log("epoch_end", {"loss": 0.31}), reporter.stop(), reporter.log("late")
            (True, True, False)
        """
        if not self.is_alive:
            return False
        try:
            plain = self._scrubber.mapping(data)
            fields = {"event_name": self._scrubber.text(name), "event_data": plain}
            return self._queue(
                GenericEvent, size_of(fields), severity=as_severity(severity), **fields
            )
        except Exception:
            logger.warning("telemetry: an event %r could not be written down", name, exc_info=True)
            return False

    def log_exception(self, error: BaseException, severity: str = "error") -> bool:
        """Like `log`, for an exception: send it soon, and mark the user's own mistakes.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.log_exception(KeyError("loss")), reporter.stop()
            (True, True)
        """
        taken = self._describe(error, severity)
        return self.flush() and taken

    def log_fatal_exception(self, error: BaseException, severity: str = "error") -> bool:
        """Like `log_exception`, for one that ends the program: report the session's end as well."""
        taken = self._describe(error, severity)
        self._say_end()
        if not self.flush():
            return False
        logger.info("a fatal exception in session %s has been reported", self.session_id)
        return taken

    def _describe(self, error: BaseException, severity: str) -> bool:
        if not self.is_alive:
            return False
        try:
            culprit = user_error(error)
            if culprit is not None:
                return self.log("user_error", facts_of(culprit), "warning")
            fields = exception_fields(error, self._scrubber)
            return self._queue(
                UnhandledExceptionEvent, size_of(fields), severity=as_severity(severity), **fields
            )
        except Exception:
            logger.warning("telemetry: an exception could not be written down", exc_info=True)
            return False

    def listen(self) -> str:
        """Report what the bus says about this session from now on; the id of the handler.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1", attach_events=False)
            >>> reporter.listen() == reporter.handler_id, reporter.stop()
            (True, True)
        """
        this = weakref.ref(self)
        handler_id = self.handler_id

        def hear(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
            reporter = this()
            if reporter is None or not reporter.is_alive:
                bus.detach(handler_id)
            elif metadata.get("session_id") == reporter.session_id and not is_sending.get():
                reporter._hear(name, measurements, metadata)

        bus.attach(handler_id, self._names, hear)
        return handler_id

    def _hear(
        self, name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> None:
        facts = {key: value for key, value in metadata.items() if key != "session_id"}
        severity = "error" if name == bus.HTTP_EXCEPTION else "info"
        data = without_headers({"measurements": dict(measurements), "metadata": facts})
        self.log(name, data, severity)

    # ── what is sent ──

    def flush(self, sync: bool = False, wait_drained: bool = False) -> bool:
        """Have everything sent that waits.

        Args:
            sync: Wait until it has been (or was given up), `flush_timeout` at most.
            wait_drained: Wait until nothing waits at all, including what is added meanwhile.

        Returns:
            True if the reporter still works and, after a wait, everything was sent in time.

        Example:
            >>> sent = []
            >>> async def post(batch: TelemetrySendRequest) -> None:
            ...     sent.extend(batch.events)
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.log("epoch_end"), reporter.flush(sync=True), reporter.stop()
            (True, True, True)
            >>> sent[1]["event_name"]
            'epoch_end'
        """
        if not self.is_alive:
            return False
        target = self._ask()
        if sync and not self._wait(lambda: self._events.has_gone(target), self._flush_timeout):
            return False
        return self.wait_until_drained(self._flush_timeout) if wait_drained else True

    def wait_until_drained(self, timeout: float = 30.0) -> bool:
        """Wait until nothing waits to be sent any more; False when that takes too long.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            True if everything was sent.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.flush(), reporter.wait_until_drained(timeout=30.0), reporter.stop()
            (True, True, True)
        """
        return self.is_alive and self._wait(lambda: self._events.is_drained, timeout)

    def stop(self, timeout: float = 5.0) -> bool:
        """Report the end of the session and wait until all is sent; False if it had ended before.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            True if this call ended it.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.stop(), reporter.stop(), reporter.is_alive
            (True, False, False)
        """
        if not self._finish():
            return False
        if self._runtime.is_current:  # waiting here would stop what is waited for
            self._runtime.task(self.aclose(timeout))
        else:
            self._wait(lambda: self._events.is_drained, timeout)
            self._runtime.call(self._release)
        return True

    async def aclose(self, timeout: float = CLOSE_SECONDS) -> None:
        """End within `timeout`, sent or not; await it on the runtime's loop, any number of times.

        Args:
            timeout: Seconds it may take.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> from tinkex.client.futures.api_future import start
            >>> start(reporter.aclose()).result()  # on the loop of the clients
            >>> reporter.is_alive
            False
        """
        if os.getpid() != self._pid:
            return
        if self._ending is None:
            self._ending = self._runtime.task(self._end(timeout))
        await asyncio.wait({self._ending}, timeout=timeout)

    async def _end(self, timeout: float) -> None:
        self._finish()
        self._start_pump()
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=timeout)
        self._release()

    def _finish(self) -> bool:
        """Take no more events and have the rest sent; False when that was done before."""
        if not self.is_alive:
            return False
        bus.detach(self.handler_id)
        self._say_end()
        with self._events.changed:
            first, self._ended = not self._ended, True
        self._ask()
        return first

    def _say_end(self) -> None:
        """Report the end of the session, once."""
        if os.getpid() != self._pid:
            return
        with self._events.changed:
            first, self._has_end = not self._has_end, True
        if first:
            self._queue(
                SessionEndEvent,
                0,
                severity="INFO",
                duration=duration_text(time.monotonic() - self._began),
            )

    def _queue(self, kind: type[TelemetryEvent], size: int, **fields: Any) -> bool:
        """Queue an event if there is room; the end of a session always has room."""
        if os.getpid() != self._pid:
            return False
        with self._events.changed:
            if self._ended:
                return False
            queued = self._events.add(kind, size, **fields)
            warn, self._is_full = not queued and not self._is_full, not queued
        if warn:
            logger.warning(
                "telemetry: the queue of session %s is full, events are dropped", self.session_id
            )
        if self._events.count >= self._flush_threshold:
            self._ask()
        return queued

    def _ask(self) -> int:
        """Have all waiting events sent now; return how many have gone out by then."""
        with self._events.changed:
            target = self._events.want_all()
            asked, self._is_asked = self._is_asked, True
        if not asked:
            self._runtime.call(self._start_pump)
        return target

    def _start_pump(self) -> None:
        with self._events.changed:
            self._is_asked = False
            idle = not self._events.wants_more
        if not idle and (self._pump is None or self._pump.done()):
            self._pump = self._runtime.task(self._send_wanted())

    async def _send_wanted(self) -> None:
        is_sending.set(True)
        while batch := self._events.take(self._max_batch_size):
            request = TelemetryBatch(
                events=batch,
                platform=platform.system(),
                sdk_version=PROTOCOL_VERSION,
                session_id=self.session_id,
                process_uuid=_process_uuid(os.getpid()),
            ).to_request()
            try:
                await self._deliver(request)
            finally:
                self._events.note_gone(len(batch))

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        with self._events.changed:
            # on the loop, or after it, waiting would keep events from being sent
            hopeless = self._runtime.is_current or self._runtime.stopped
            return self._events.changed.wait_for(condition, 0 if hopeless else timeout)

    # ── on the loop ──

    def _tick(self) -> None:
        """Flush, and do so again after a while; a reporter whose session has ended does, too."""
        owner = None if self._owner is None else self._owner()
        if self._owner is not None and (owner is None or getattr(owner, "closed", False)):
            self._runtime.task(self.aclose(CLOSE_SECONDS))
        else:
            self._ask()
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._flush_interval > 0 and self.is_alive:
            self._timer = self._runtime.loop.call_later(
                self._flush_interval, _tick, weakref.ref(self), self.handler_id
            )

    def _release(self) -> None:
        """Let go of everything: the timer, what is being sent, what waits."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()
        self._events.clear()


def _watch(reference: weakref.ref[Reporter]) -> None:
    """Set up what belongs to the loop; nothing of it keeps the reporter alive."""
    if (reporter := reference()) is not None:
        reporter._runtime.at_stop(weakref.WeakMethod(reporter.aclose))
        reporter._set_timer()


def _tick(reference: weakref.ref[Reporter], handler_id: str) -> None:
    if (reporter := reference()) is not None:
        reporter._tick()
    else:
        bus.detach(handler_id)


def _owner_is_gone(reporter: Reporter) -> None:
    """Handle a dropped session.

    This may run anywhere, even under a lock of this thread, so the loop does the rest.
    """
    if os.getpid() == reporter._pid:
        reporter._runtime.call(lambda: reporter._runtime.task(reporter.aclose(CLOSE_SECONDS)))
