"""Events of a request: that it starts, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from tinkex import events
from tinkex.client.http.request_headers import RequestKeys
from tinkex.errors import APIError
from tinkex.wire.redaction import MOST_TRACEBACK


@contextlib.contextmanager
def announced(facts: Mapping[str, Any], keys: RequestKeys) -> Iterator[dict[str, Any]]:
    """Emit the events of a request around a block; the block may add to the outcome.

    Args:
        facts: Metadata of the events.
        keys: Knows the secrets, which are left out of unexpected errors.
    """
    outcome: dict[str, Any] = {}
    started = time.monotonic()

    def end(name: str, **more: Any) -> None:
        duration = (time.monotonic() - started) * 1000
        events.emit(name, {"duration": duration}, {**facts, **more})

    events.emit(events.HTTP_START, {"system_time": time.time()}, dict(facts))
    try:
        yield outcome
    except APIError as error:
        end(events.HTTP_STOP, result="error", retry_count=error.attempts - 1)
        raise
    except (asyncio.CancelledError, GeneratorExit):  # the caller gave up, which is no failure
        end(events.HTTP_STOP, result="cancelled", retry_count=outcome.get("retry_count", 0))
        raise
    except Exception as error:
        end(
            events.HTTP_EXCEPTION,
            kind=type(error).__name__,
            reason=keys.scrubber.text(str(error)),
            stacktrace=keys.scrubber.text(traceback.format_exc(), MOST_TRACEBACK, end=True),
        )
        raise
    end(events.HTTP_STOP, **{"result": "ok", "retry_count": 0, **outcome})
