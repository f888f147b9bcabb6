"""Metrics of requests, for Prometheus, and a log line for each request."""

from __future__ import annotations

import bisect
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tinkex.wire.prometheus import family, heading, histogram, labels
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

FREQUENT = {"retrieve_future", "retrieve_futures", "session_heartbeat", "metrics"}
"""Requests that come all the time; logged at level debug when they succeed."""

access = logging.getLogger("tinkex.server.access")
scrubber = Scrubber()


class Metrics:
    """Counts of requests by operation and status, and their times."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.began = time.time()

    def observe(
        self,
        operation: str,
        method: str,
        status: int,
        seconds: float,
        owner: str | None,
        request_id: str | None = None,
    ) -> None:
        """Count a request and log it.

        Of what the caller sent, only the id of a request is logged, without secrets.
        """
        self._requests[operation, status] += 1
        counts = self._buckets.setdefault(operation, [0] * (len(BUCKETS) + 1))
        counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._seconds[operation] += seconds
        level = logging.DEBUG if operation in FREQUENT and status in (200, 408) else logging.INFO
        if access.isEnabledFor(level):
            fields = {"operation": operation, "method": method, "status": status}
            fields |= {"ms": round(seconds * 1000, 3), "owner": owner}
            fields["request_id"] = request_id and scrubber.text(request_id)
            access.log(level, "%s %s", operation, status, extra={"fields": fields})

    def lines(self) -> Iterator[str]:
        """Return the figures of requests, in the form that Prometheus reads."""
        requests = {
            labels(operation=op, status=status): count
            for (op, status), count in self._requests.items()
        }
        total = "Requests by operation and status."
        yield from family("tinkex_requests_total", "counter", total, requests)
        name, meaning = "tinkex_request_seconds", "Duration of requests; polls are held on purpose."
        yield from heading(name, "histogram", meaning)
        for operation, counts in self._buckets.items():
            seconds = self._seconds[operation]
            yield from histogram(name, BUCKETS, counts, seconds, operation=operation)


class JsonFormatter(logging.Formatter):
    """A formatter of log records as lines of JSON, without secrets.

    Access records keep their fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        said: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrubber.text(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            said["error"] = scrubber.text(trace, MOST_TRACEBACK, end=True)
        return json.dumps(said)
