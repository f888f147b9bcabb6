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

from tinkex.telemetry.event_queue import (
    duration_text as duration_text,
    user_error as user_error,
)
from tinkex.telemetry.log_lines import (
    LOGGED_EVENTS as LOGGED_EVENTS,
    Line as Line,
    attach_lines as attach_lines,
    attach_logger as attach_logger,
    detach as detach,
)
from tinkex.telemetry.reporter import (
    CLOSE_SECONDS as CLOSE_SECONDS,
    REPORTED_EVENTS as REPORTED_EVENTS,
    Reporter as Reporter,
)
from tinkex.telemetry.reporters import (
    Provider as Provider,
    async_capture as async_capture,
    capture_exceptions as capture_exceptions,
    flush as flush,
    init as init,
    log as log,
    log_exception as log_exception,
    log_fatal_exception as log_fatal_exception,
    stop as stop,
    wait_until_drained as wait_until_drained,
    with_telemetry as with_telemetry,
)
from tinkex.telemetry.sending import (
    Caller as Caller,
    Send as Send,
    goes_by_itself as goes_by_itself,
    is_enabled as is_enabled,
    retry_delay as retry_delay,
    send as send,
    send_sync as send_sync,
    sender as sender,
)
