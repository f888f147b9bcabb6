"""Reporters by name, calls on a reporter that may be None, and the capture of exceptions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from tinkex.client.settings.config import Config
from tinkex.errors import ConfigurationError
from tinkex.telemetry.reporter import Reporter
from tinkex.telemetry.sending import Send, is_enabled
from tinkex.wire.redaction import secrets_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_named: weakref.WeakValueDictionary[str, Reporter] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """Drop the parent's reporters in a forked child."""
    global _lock
    _named.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


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
        session_id: The session of the events.
        config: The switch of telemetry, and the secrets that must not be sent.
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
    with _lock:
        reporter = _named.get(name)
        if reporter is None or not reporter.is_alive:
            reporter = _named[name] = Reporter(send, session_id, secrets=secrets, **options)
        return reporter


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


# ── capture ───────────────────────────────────────────────────────────────────────────────────────


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
        reporter: A reporter, or an object that has one; None reports nothing.
        fatal: True if the exception ends the program.
        severity: The severity of the event.

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
            reporter = self._reporter
            if isinstance(reporter, Provider):
                reporter = reporter.get_telemetry()
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
        reporter: A reporter, or an object that has one; None reports nothing.
        fatal: True if an exception ends the session.
        severity: The severity of the event.

    Returns:
        The result of the work.

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
