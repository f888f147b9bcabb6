"""Reporters by name, and their calls on a reporter that may be None."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from tinkex.client.settings.config import Config
from tinkex.errors import ConfigurationError
from tinkex.telemetry.reporter import Reporter
from tinkex.telemetry.sending import Send, is_enabled
from tinkex.wire.redaction import secrets_of

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
