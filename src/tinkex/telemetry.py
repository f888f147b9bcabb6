"""Telemetry of a session: a reporter that sends in the background, and its users.

By itself, telemetry goes to the hosted service only, and not when it is switched off
(`Config.telemetry`, or `TINKER_TELEMETRY=0`). A reporter never delays an error or the end of a
program by more than a second, keeps a bounded amount of memory, and sends nothing that looks like a
secret (`redaction.py`).

Example:
    >>> handler = attach_logger()  # a line in the log for every request
    >>> detach(handler)
    True
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import datetime as dt
import functools
import inspect
import itertools
import logging
import os
import platform
import random
import threading
import time
import traceback
import uuid
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable
from urllib.parse import urlsplit

from tinkex import events as bus
from tinkex.client.futures.api_future import start
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.settings import environment
from tinkex.client.settings.config import HOSTED_URL, Config
from tinkex.errors import APIStatusError, ConfigurationError, TinkerError, is_retryable
from tinkex.types.sessions import TelemetryResponse, TelemetrySendRequest
from tinkex.types.telemetry import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetryBatch,
    TelemetryEvent,
    UnhandledExceptionEvent,
    as_severity,
)
from tinkex.wire.protocol import PROTOCOL_VERSION, TELEMETRY, Operation
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber, secrets_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("tinkex")

Send: TypeAlias = Callable[[TelemetrySendRequest], Awaitable[TelemetryResponse | None]]
"""Posts one batch, or raises."""

CLOSE_SECONDS = 1.0
"""Longest wait for the last events at the end of a session or a program."""
HTTP_SECONDS = 5.0
MOST_QUEUE_CHARACTERS = 8 * 1024 * 1024
"""Texts that wait to be sent, of all events together."""
MOST_BATCH_CHARACTERS = 1024 * 1024
SERVICE_BATCH = 100
"""The most events that the service takes at once."""

LOGGED_EVENTS = (*bus.HTTP_EVENTS, bus.QUEUE_STATE_CHANGE)
"""Events of the console logger by default."""
REPORTED_EVENTS = (bus.HTTP_EXCEPTION, bus.QUEUE_STATE_CHANGE, *bus.FUTURE_EVENTS)
"""Events of the bus that a reporter sends by default: failures; single requests would be too many.
"""

_printed = Scrubber()
"""For lines of the log: no secrets there either."""

# ── the console logger ────────────────────────────────────────────────────────────────────────────

_numbers = itertools.count(1)
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

Line: TypeAlias = Callable[[str, Mapping[str, float], Mapping[str, Any]], str]
"""Makes a line of an event."""


def attach_logger(
    handler_id: str | None = None, events: Iterable[str] = LOGGED_EVENTS, level: str | int = "info"
) -> str:
    """Log a line to "tinkex" for every event of these names; return the id for `detach`.

    Args:
        handler_id: A name for the logger; one is made up by default.
        events: The names; the usual four by default.
        level: The level of the lines.

    Returns:
        The id.

    Raises:
        ValueError: There is no such level, or the id is taken.

    Example:
        >>> handler = attach_logger(events=[bus.QUEUE_STATE_CHANGE], level="warning")
        >>> detach(handler)
        True
    """
    return attach_lines(_line, events, handler_id or f"tinkex-logger-{next(_numbers)}", level)


def attach_lines(
    line: Line, events: Iterable[str], handler_id: str, level: str | int = "info"
) -> str:
    """Log `line(event)` to "tinkex", without secrets; a failed request is logged as an error.

    Raises:
        ValueError: There is no such level, or the id is taken.

    Example:
        >>> handler = attach_lines(
        ...     lambda name, numbers, facts: f"{name} {numbers}", ["my.epoch"], "epochs"
        ... )
        >>> detach(handler)
        True
    """
    number = level if isinstance(level, int) else _LEVELS.get(level.lower())
    if number is None:
        raise ValueError(f"unknown level {level!r}; known are {', '.join(_LEVELS)}")

    def write(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        said = _printed.text(line(name, measurements, metadata))
        logger.log(logging.ERROR if name == bus.HTTP_EXCEPTION else number, "%s", said)

    bus.attach(handler_id, events, write)
    return handler_id


def detach(handler_id: str) -> bool:
    """Stop a logger; False when there is none of this id.

    Args:
        handler_id: What `attach_logger` gave.

    Returns:
        Whether there was one.

    Example:
        >>> handler = attach_logger()
        >>> detach(handler), detach(handler)
        (True, False)
    """
    return bus.detach(handler_id)


def _line(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> str:
    fact = metadata.get
    request = f"{fact('method')} {fact('path')}"
    milliseconds = f"{measurements.get('duration', 0):.0f} ms"
    if name == bus.HTTP_START:
        return f"HTTP start {request} pool={fact('pool_type')} base={fact('base_url')}"
    if name == bus.HTTP_STOP:
        retries = f"retries={fact('retry_count', 0)}"
        return (
            f"HTTP stop {request} result={fact('result')} {milliseconds} {retries} "
            f"base={fact('base_url')}"
        )
    if name == bus.HTTP_EXCEPTION:
        return f"HTTP exception {request} {milliseconds} reason={fact('reason')}"
    if name == bus.QUEUE_STATE_CHANGE:
        return f"queue state {fact('queue_state')} request_id={fact('request_id')}"
    return f"{name} {_printed.mapping(measurements)} {_printed.mapping(metadata)}"


# ── whether, and how, it is sent ──────────────────────────────────────────────────────────────────


def is_enabled(config: Config, explicit: bool | None = None) -> bool:
    """Return True if telemetry is on: the argument, else the configuration, else the environment.

    Example:
        >>> is_enabled(Config(base_url="http://127.0.0.1:8000", telemetry=False))
        False
    """
    said = getattr(config, "telemetry", None) if explicit is None else explicit
    if not isinstance(said, bool):
        said = environment.flag("TINKER_TELEMETRY")
    return said is not False


def goes_by_itself(config: Config) -> bool:
    """Return True if a session reports by default: on the hosted service, if it is on.

    Example:
        >>> goes_by_itself(Config(base_url="http://127.0.0.1:8000"))  # not the hosted service
        False
    """
    return (
        is_enabled(config) and urlsplit(config.base_url).hostname == urlsplit(HOSTED_URL).hostname
    )


class Caller(Protocol):
    """Sends requests: a transport."""

    async def call(
        self,
        op: Operation,
        request: Any = None,
        *,
        timeout: float | None = None,
        patience: float | None = None,
    ) -> Any:
        """Make the exchange and decode the answer, or raise."""


def sender(transport: Caller, timeout: float = HTTP_SECONDS) -> Send:
    """Return a function that posts batches through a transport, with at most one retry."""

    async def send(batch: TelemetrySendRequest) -> TelemetryResponse:
        answer: TelemetryResponse = await transport.call(
            TELEMETRY, batch, timeout=timeout, patience=1.0
        )
        return answer

    return send


def send(sender: Send, request: TelemetrySendRequest) -> None:
    """Send a batch in the background and return at once; a failure is only logged.

    Example:
        >>> async def post(batch: TelemetrySendRequest) -> TelemetryResponse:
        ...     return TelemetryResponse(status="accepted")
        >>> send(post, TelemetrySendRequest(events=[], session_id="session-1"))
    """
    start(_send_quietly(sender, request))


async def _send_quietly(sender: Send, request: TelemetrySendRequest) -> None:
    _reporting.set(True)
    try:
        await sender(request)
    except TinkerError as error:
        logger.warning("telemetry could not be sent: %s", _printed.text(str(error)))
    except Exception as error:
        logger.error(
            "sending telemetry crashed: %s: %s", type(error).__qualname__, _printed.text(str(error))
        )


def send_sync(
    sender: Send, request: TelemetrySendRequest, timeout: float = HTTP_SECONDS
) -> TelemetryResponse | None:
    """Send a batch and wait for the answer; the error, if there is one, is raised.

    Example:
        >>> async def post(batch: TelemetrySendRequest) -> TelemetryResponse:
        ...     return TelemetryResponse(status="accepted")
        >>> send_sync(post, TelemetrySendRequest(events=[], session_id="session-1")).status
        'accepted'
    """

    async def deliver() -> TelemetryResponse | None:
        _reporting.set(True)
        return await sender(request)

    return start(deliver()).result(timeout)


# ── the reporter ──────────────────────────────────────────────────────────────────────────────────

_reporting: contextvars.ContextVar[bool] = contextvars.ContextVar("reporting", default=False)
"""Set while telemetry is sent, so that sending is not reported itself."""
_process_uuid = str(uuid.uuid4())
_named: weakref.WeakValueDictionary[str, Reporter] = weakref.WeakValueDictionary()
_named_lock = threading.Lock()


def _start_afresh() -> None:
    """In a forked child: another process, with none of its parent's reporters."""
    global _process_uuid, _named_lock
    _process_uuid = str(uuid.uuid4())
    _named.clear()
    _named_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


class Reporter:
    """Collects events of one session and sends them in batches, in the background.

    Nothing here raises because of telemetry, and only calls that are asked to wait do. A call on a
    reporter that has ended, or that was made before the process forked, does nothing and returns
    False. Times are seconds.

    Args:
        send: Posts one batch.
        session_id: Whose events they are.
        owner: The session; not kept alive. The reporter ends when it is dropped, or when its
            `closed` is true.
        secrets: Texts that must not be sent, apart from everything that looks like a secret.
        events: Names of the events of the bus that are sent, those of this session.
        attach_events: Whether to listen to the bus from the start; `listen` does so later.
        handler_id: The id on the bus; one is made up by default.
        flush_interval: Time between two flushes; 0 for none.
        flush_threshold: How many waiting events cause a flush.
        flush_timeout: How long a flush that waits does so at most.
        http_timeout: How long one attempt to send a batch may take.
        max_retries: How often a batch that could not be sent is sent again, before it is given up.
        retry_base_delay: Time before the first of these; it doubles each time.
        max_queue_size: How many events may wait; more are dropped.
        max_batch_size: How many are sent at once.

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
        self._send = send
        self._names = tuple(events)
        self._scrubber = Scrubber(secrets)
        self._flush_interval = flush_interval
        self._flush_threshold = flush_threshold
        self._flush_timeout = flush_timeout
        self._http_timeout = http_timeout
        self._max_retries = max_retries
        self._retry_base_delay = retry_base_delay
        self._max_queue_size = max_queue_size
        self._max_batch_size = max_batch_size
        self._pid = os.getpid()
        self._runtime = runtime()
        self._began = time.monotonic()
        # Guards what follows, and is told when events have gone out. A finalizer that reports
        # something may run while this thread holds it: it can be taken twice.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[tuple[TelemetryEvent, int]] = deque()
        self._characters = 0
        self._next_index = 0
        # events accepted, taken to be sent, sent or given up
        self._pushed = self._taken = self._gone = 0
        self._wanted = 0  # events up to this count are to be sent now
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
            name: What happened.
            data: What is known of it.
            severity: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL".

        Returns:
            Whether it was taken.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> (
            ...     reporter.log("epoch_end", {"epoch": 3, "loss": 0.31}),
            ...     reporter.stop(),
            ...     reporter.log("too late"),
            ... )
            (True, True, False)
        """
        if not self.is_alive:
            return False
        try:
            plain = self._scrubber.mapping(data)
            fields = {"event_name": self._scrubber.text(name), "event_data": plain}
            return self._queue(
                GenericEvent, _size(fields), severity=as_severity(severity), **fields
            )
        except Exception:
            logger.warning("telemetry: an event %r could not be written down", name, exc_info=True)
            return False

    def log_exception(self, error: BaseException, severity: str = "error") -> bool:
        """Report an exception and send it soon; mark the user's own mistakes.

        Args:
            error: The exception.
            severity: How bad it is.

        Returns:
            Whether it was taken.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> try:
            ...     {}["loss"]
            ... except KeyError as error:
            ...     reporter.log_exception(error)
            True
            >>> reporter.stop()
            True
        """
        taken = self._describe(error, severity)
        return self.flush() and taken

    def log_fatal_exception(self, error: BaseException, severity: str = "error") -> bool:
        """Report an exception that ends the program and the session, and send it at once.

        Args:
            error: The exception.
            severity: How bad it is.

        Returns:
            Whether it was taken.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.log_fatal_exception(RuntimeError("out of data")), reporter.stop()
            (True, True)
        """
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
                return self.log("user_error", _facts(culprit), "warning")
            lines = (
                "".join(traceback.format_exception(error))
                if error.__traceback__ or error.__cause__
                else ""
            )
            fields = {
                "error_type": _type_name(error),
                "error_message": self._scrubber.text(_message(error)),
                "traceback": self._scrubber.text(lines, MOST_TRACEBACK, end=True) or None,
            }
            return self._queue(
                UnhandledExceptionEvent, _size(fields), severity=as_severity(severity), **fields
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
            elif metadata.get("session_id") == reporter.session_id and not _reporting.get():
                reporter._hear(name, measurements, metadata)

        bus.attach(handler_id, self._names, hear)
        return handler_id

    def _hear(
        self, name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> None:
        facts = {key: value for key, value in metadata.items() if key != "session_id"}
        severity = "error" if name == bus.HTTP_EXCEPTION else "info"
        self.log(
            name,
            _without_headers({"measurements": dict(measurements), "metadata": facts}),
            severity,
        )

    # ── what is sent ──

    def flush(self, sync: bool = False, wait_drained: bool = False) -> bool:
        """Have everything sent that waits.

        Args:
            sync: Wait until it has been (or was given up), `flush_timeout` at most.
            wait_drained: Wait until nothing waits at all, including what is added meanwhile.

        Returns:
            Whether the reporter still works and, where it was waited for, everything went in time.

        Example:
            >>> sent = []
            >>> async def post(batch: TelemetrySendRequest) -> None:
            ...     sent.extend(batch.events)
            >>> reporter = Reporter(post, "session-1")
            >>> (
            ...     reporter.log("epoch_end"),
            ...     reporter.flush(sync=True),
            ...     sent[-1]["event_name"],
            ...     reporter.stop(),
            ... )
            (True, True, 'epoch_end', True)
        """
        if not self.is_alive:
            return False
        target = self._ask()
        if sync and not self._wait(lambda: self._gone >= target, self._flush_timeout):
            return False
        return self.wait_until_drained(self._flush_timeout) if wait_drained else True

    def wait_until_drained(self, timeout: float = 30.0) -> bool:
        """Wait until nothing waits to be sent any more; False when that takes too long.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether everything was sent.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
            >>> reporter.flush(), reporter.wait_until_drained(timeout=30.0), reporter.stop()
            (True, True, True)
        """
        return self.is_alive and self._wait(lambda: self._gone >= self._pushed, timeout)

    def stop(self, timeout: float = 5.0) -> bool:
        """Report the end of the session and wait until all is sent; False if it had ended before.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether this call ended it.

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
            self._wait(lambda: self._gone >= self._pushed, timeout)
            self._runtime.call(self._release)
        return True

    async def aclose(self, timeout: float = CLOSE_SECONDS) -> None:
        """End within `timeout`, sent or not; await it on the runtime's loop, any number of times.

        Args:
            timeout: Seconds it may take.

        Example:
            >>> async def post(batch: TelemetrySendRequest) -> None: ...
            >>> reporter = Reporter(post, "session-1")
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

    async def _end_with_the_program(self) -> None:
        await self.aclose(CLOSE_SECONDS)

    def _finish(self) -> bool:
        """Take no more events and have the rest sent; False when that was done before."""
        if not self.is_alive:
            return False
        bus.detach(self.handler_id)
        self._say_end()
        with self._changed:
            first, self._ended = not self._ended, True
        self._ask()
        return first

    def _say_end(self) -> None:
        """Report the end of the session, once."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            first, self._has_end = not self._has_end, True
        if first:
            self._queue(
                SessionEndEvent,
                0,
                severity="INFO",
                duration=duration_text(time.monotonic() - self._began),
            )

    def _queue(self, kind: type[TelemetryEvent], size: int, **fields: Any) -> bool:
        """Number an event and queue it if there is room; the end of a session always has room."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if self._ended:
                return False
            index, self._next_index = self._next_index, self._next_index + 1
            full = kind is not SessionEndEvent and (
                len(self._waiting) >= self._max_queue_size
                or self._characters + size > MOST_QUEUE_CHARACTERS
            )
            warn, self._is_full = full and not self._is_full, full
            if not full:
                common: dict[str, Any] = {
                    "event_id": uuid.uuid4().hex,
                    "event_session_index": index,
                }
                common["timestamp"] = dt.datetime.now(dt.UTC)
                self._waiting.append((kind(**common, **fields), size))
                self._characters += size
                self._pushed += 1
            enough = len(self._waiting) >= self._flush_threshold
        if warn:
            logger.warning(
                "telemetry: the queue of session %s is full, events are dropped", self.session_id
            )
        if enough:
            self._ask()
        return not full

    def _ask(self) -> int:
        """Have everything sent that waits now; how many events will have gone out then."""
        with self._changed:
            self._wanted = self._pushed
            asked, self._is_asked = self._is_asked, True
            target = self._wanted
        if not asked:
            self._runtime.call(self._start_pump)
        return target

    def _start_pump(self) -> None:
        with self._changed:
            self._is_asked = False
            idle = self._taken >= self._wanted
        if not idle and (self._pump is None or self._pump.done()):
            self._pump = self._runtime.task(self._send_wanted())

    async def _send_wanted(self) -> None:
        _reporting.set(True)
        while batch := self._take():
            try:
                await self._deliver(batch)
            finally:
                with self._changed:
                    self._gone += len(batch)
                    self._changed.notify_all()

    def _take(self) -> list[TelemetryEvent]:
        """The next events to be sent together, out of those that are wanted."""
        batch: list[TelemetryEvent] = []
        with self._changed:
            room = MOST_BATCH_CHARACTERS
            while self._taken < self._wanted and len(batch) < self._max_batch_size:
                event, size = self._waiting[0]
                if batch and size > room:
                    break
                self._waiting.popleft()
                batch.append(event)
                room -= size
                self._characters -= size
                self._taken += 1
        return batch

    async def _deliver(self, batch: list[TelemetryEvent]) -> None:
        """Send a batch, again if that fails; a refused batch is dropped at once."""
        request = TelemetryBatch(
            events=batch,
            platform=platform.system(),
            sdk_version=PROTOCOL_VERSION,
            session_id=self.session_id,
            process_uuid=_process_uuid,
        ).to_request()
        for attempt in range(self._max_retries + 1):
            try:
                async with asyncio.timeout(self._http_timeout):
                    await self._send(request)
                return
            except Exception as error:
                reason = self._scrubber.text(str(error) or type(error).__qualname__)
                if isinstance(error, APIStatusError) and not is_retryable(error):
                    logger.warning(
                        "telemetry: %d events dropped, the server refused them: %s",
                        len(batch),
                        reason,
                    )
                    return
                if attempt == self._max_retries:
                    break
                delay = retry_delay(attempt, self._retry_base_delay)
                logger.warning(
                    "telemetry could not be sent (attempt %d): %s; again in %.2f s",
                    attempt + 1,
                    reason,
                    delay,
                )
                await asyncio.sleep(delay)
        logger.warning(
            "telemetry: %d events given up after %d retries: %s",
            len(batch),
            self._max_retries,
            reason,
        )

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            # nobody would send meanwhile
            hopeless = self._runtime.is_current or self._runtime.stopped
            return self._changed.wait_for(condition, 0 if hopeless else timeout)

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
        with self._changed:
            self._waiting.clear()
            self._characters = 0
            self._gone = self._taken = self._wanted = self._pushed
            self._changed.notify_all()


def _watch(reference: weakref.ref[Reporter]) -> None:
    """Set up what belongs to the loop; nothing of it keeps the reporter alive."""
    if (reporter := reference()) is not None:
        reporter._runtime.at_stop(weakref.WeakMethod(reporter._end_with_the_program))
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


def init(
    session_id: str | None = None,
    config: Config | None = None,
    send: Send | None = None,
    *,
    enabled: bool | None = None,
    name: str | None = None,
    **options: Any,
) -> Reporter | None:
    """A reporter, if telemetry is on; None if it is off. It posts wherever `send` does.

    Args:
        session_id: Whose events are reported.
        config: Says whether telemetry is on, and which secrets must not be sent.
        send: Posts one batch; `sender(transport)` makes one.
        enabled: Decides instead of the configuration and the environment.
        name: A name for the reporter; while one of this name is alive, that one is returned.
        options: Those of `Reporter`.

    Returns:
        The reporter, or None.

    Raises:
        ConfigurationError: The session id, the configuration or the way to send is missing.

    Example:
        >>> async def post(batch: TelemetrySendRequest) -> None: ...
        >>> config = Config(base_url="http://127.0.0.1:8000")
        >>> reporter = init("session-1", config, post, enabled=True)
        >>> log(reporter, "epoch_end", {"loss": 0.31}), stop(reporter)
        (True, True)
    """
    if session_id is None or config is None or send is None:
        given = {"session_id": session_id, "config": config, "send": send}
        missing = next(option for option, value in given.items() if value is None)
        raise ConfigurationError(f"missing required option: {missing}")
    if not is_enabled(config, enabled):
        return None
    secrets = (*secrets_of(config), *options.pop("secrets", ()))
    if name is None:
        return Reporter(send, session_id, secrets=secrets, **options)
    with _named_lock:
        reporter = _named.get(name)
        if reporter is None or not reporter.is_alive:
            reporter = _named[name] = Reporter(send, session_id, secrets=secrets, **options)
        return reporter


# ── the same calls on a reporter that may not be there ────────────────────────────────────────────


def log(
    reporter: Reporter | None,
    name: str,
    data: Mapping[str, Any] | None = None,
    severity: str = "info",
) -> bool:
    """`reporter.log`; False without a reporter.

    Example:
        >>> log(None, "epoch_end", {"loss": 0.31})  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.log(name, data, severity)


def log_exception(reporter: Reporter | None, error: BaseException, severity: str = "error") -> bool:
    """`reporter.log_exception`; False without a reporter.

    Example:
        >>> log_exception(None, KeyError("loss"))  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.log_exception(error, severity)


def log_fatal_exception(
    reporter: Reporter | None, error: BaseException, severity: str = "error"
) -> bool:
    """`reporter.log_fatal_exception`; False without a reporter.

    Example:
        >>> log_fatal_exception(None, KeyError("loss"))  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.log_fatal_exception(error, severity)


def flush(reporter: Reporter | None, sync: bool = False, wait_drained: bool = False) -> bool:
    """`reporter.flush`; False without a reporter.

    Example:
        >>> flush(None, sync=True)  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.flush(sync, wait_drained)


def wait_until_drained(reporter: Reporter | None, timeout: float = 30.0) -> bool:
    """`reporter.wait_until_drained`; False without a reporter.

    Example:
        >>> wait_until_drained(None)  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.wait_until_drained(timeout)


def stop(reporter: Reporter | None, timeout: float = 5.0) -> bool:
    """`reporter.stop`; False without a reporter.

    Example:
        >>> stop(None)  # service.get_telemetry() may give None
        False
    """
    return reporter is not None and reporter.stop(timeout)


# ── small rules ───────────────────────────────────────────────────────────────────────────────────


def retry_delay(attempt: int, base: float = 1.0) -> float:
    """Return the delay before a batch is sent again: doubled per attempt, plus 1 to 10 percent.

    Example:
        >>> 4.0 < retry_delay(2) < 4.5
        True
    """
    delay: float = base * 2**attempt
    return round(delay * (1 + random.uniform(0.01, 0.1)), 3)


def duration_text(seconds: float) -> str:
    """A duration as `H:MM:SS`, with microseconds where there are some.

    Example:
        >>> duration_text(3.220668), duration_text(90061)
        ('0:00:03.220668', '25:01:01')
    """
    whole, micros = divmod(round(seconds * 1_000_000), 1_000_000)
    text = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{text}.{micros:06}" if micros else text


def user_error(error: BaseException) -> object | None:
    """Return the user's mistake (4xx) behind an exception, or None.

    For an error of tinkex its cause does not count, and 410 is not the user's mistake.

    Example:
        >>> user_error(TinkerError("no such loss", category="user")), user_error(KeyError("loss"))
        (TinkerError('no such loss'), None)
    """
    if isinstance(error, TinkerError):
        return error if _is_users(error, (408, 410, 429)) else None
    stack: list[object] = [error]
    seen: set[int] = set()
    kept: list[object] = []  # an object that is dropped meanwhile could lend its id to another
    while stack and len(seen) < 1000:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        if _is_users(item, (408, 429)):
            return item
        links = [_attribute(item, name) for name in ("cause", "reason", "__cause__", "__context__")]
        stack += [link for link in reversed(links) if _is_object(link)]
    return None


def _is_users(item: object, excepted: tuple[int, ...]) -> bool:
    category = _attribute(item, "category")
    if str(getattr(category, "value", category)).lower() == "user":
        return True
    status = _status(item)
    return status is not None and 400 <= status < 500 and status not in excepted


def _status(item: object) -> int | None:
    values = (_attribute(item, name) for name in ("status", "status_code", "plug_status"))
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool)), None
    )


def _attribute(item: object, name: str) -> object:
    try:
        return getattr(item, name, None)
    except Exception:  # a property may fail in any way
        return None


def _is_object(value: object) -> bool:
    return not (
        value is None or isinstance(value, str | bytes | int | float | type) or callable(value)
    )


def _facts(error: object) -> dict[str, Any]:
    """Return the reported facts of a user's mistake."""
    facts: dict[str, Any] = {"error_type": _type_name(error), "message": _message(error)}
    if (status := _status(error)) is not None:
        facts["status_code"] = status
    body = next(
        (
            found
            for name in ("body", "data")
            if isinstance(found := _attribute(error, name), Mapping)
        ),
        None,
    )
    if body is not None:
        facts["body"] = dict(body)
    return facts


def _type_name(item: object) -> str:
    kind = type(item)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(item: object) -> str:
    try:
        return str(item)
    except Exception:
        return f"<{type(item).__qualname__} that cannot be printed>"


def _size(value: object) -> int:
    """About how many characters a plain value has."""
    if isinstance(value, dict):
        return sum(len(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 8


def _without_headers(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same without headers and bodies, at any depth of mappings."""
    return {
        key: _without_headers(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
        if not str(key).lower().endswith(("headers", "body"))
    }


# ── capturing exceptions ──────────────────────────────────────────────────────────────────────────


@runtime_checkable
class Provider(Protocol):
    """An object that may have a reporter; by default it has none.

    Example:
        >>> class Trainer(Provider):
        ...     def get_telemetry(self) -> Reporter | None:
        ...         return service.get_telemetry()
        >>> isinstance(Trainer(), Provider)
        True
    """

    def get_telemetry(self) -> Reporter | None:
        """The reporter, if there is one."""
        return None


class capture_exceptions(contextlib.ContextDecorator):
    """Report exceptions of a block or a function (sync or async), and let them pass.

    An exception that passes through several of these is reported once. Cancellation and a normal
    exit are not reported.

    Args:
        reporter: Where to, or what has one; nothing is reported without.
        fatal: Whether the exception ends the program.
        severity: How bad it is.

    Example:
        >>> with capture_exceptions(reporter=None):
        ...     print("nothing happened")
        nothing happened
    """

    def __init__(
        self,
        reporter: Reporter | Provider | None = None,
        *,
        fatal: bool = False,
        severity: str = "error",
    ) -> None:
        self._reporter = reporter
        self._fatal = fatal
        self._severity = severity

    def __call__(self, function: F) -> F:
        """The function, with its exceptions reported."""
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def captured(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return cast("F", captured)

    def __enter__(self) -> capture_exceptions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or _is_no_failure(error):
            return
        # what is captured must get through, whatever happens here
        with contextlib.suppress(Exception):
            reporter = (
                self._reporter.get_telemetry()
                if isinstance(self._reporter, Provider)
                else self._reporter
            )
            if reporter is not None and not _was_reported(error, reporter):
                tell = reporter.log_fatal_exception if self._fatal else reporter.log_exception
                tell(error, self._severity)


with_telemetry = capture_exceptions
"""Another name of `capture_exceptions`."""


async def async_capture(
    work: Coroutine[Any, Any, T] | Callable[[], T],
    *,
    reporter: Reporter | Provider | None = None,
    fatal: bool = False,
    severity: str = "error",
) -> T:
    """Run a coroutine, or a function in a thread, report its exceptions, and return its value.

    Args:
        work: The coroutine or the function.
        reporter: Where to report to; None for nowhere.
        fatal: Whether an exception ends the session.
        severity: How bad it is.

    Returns:
        What the work gives.

    Example:
        >>> async def epoch() -> float:
        ...     return 0.31
        >>> asyncio.run(async_capture(epoch(), reporter=None))  # reporter=service.get_telemetry()
        0.31
    """
    with capture_exceptions(reporter, fatal=fatal, severity=severity):
        if inspect.isawaitable(work):
            return await cast("Awaitable[T]", work)
        return await asyncio.to_thread(work)


def _is_no_failure(error: BaseException) -> bool:
    """Return True for a cancellation or a normal exit."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(
        error, asyncio.CancelledError | concurrent.futures.CancelledError | GeneratorExit
    )


def _was_reported(error: BaseException, reporter: Reporter) -> bool:
    """Return True if this reporter knew the exception already, and remember it."""
    told = getattr(error, "_tinkex_reported_by", None) == reporter.handler_id
    with contextlib.suppress(AttributeError):
        error._tinkex_reported_by = reporter.handler_id  # type: ignore[attr-defined]
    return told
