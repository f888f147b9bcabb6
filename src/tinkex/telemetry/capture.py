"""Reporting the exceptions of a block, a function or a coroutine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from tinkex.telemetry.reporter import Reporter

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
