"""What a server does, in numbers: the text that Prometheus reads, and a line of log for each
request.
"""

from __future__ import annotations

import bisect
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tinkex.server.workers.worker import SAMPLING, TRAINING
from tinkex.wire import prometheus
from tinkex.wire.prometheus import family, labels
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber

if TYPE_CHECKING:
    from tinkex.server.state import State

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TOKENS = {"training": "training", "prefill": "prefill", "sample": "sampled"}

FREQUENT = {"retrieve_future", "retrieve_futures", "session_heartbeat"}
"""What clients ask all the time: logged at the level debug when all is well."""

access = logging.getLogger("tinkex.server.access")
scrubber = Scrubber()


class Metrics:
    """Requests by operation and status, and how long they took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._began = time.time()

    def observe(
        self,
        operation: str,
        method: str,
        status: int,
        seconds: float,
        owner: str | None,
        request_id: str | None = None,
    ) -> None:
        """Count a request and log it; nothing that its sender made up is logged but ids, and those
        without secrets.
        """
        self._requests[operation, status] += 1
        counts = self._buckets.setdefault(operation, [0] * (len(BUCKETS) + 1))
        counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._seconds[operation] += seconds
        level = logging.DEBUG if operation in FREQUENT and status in (200, 408) else logging.INFO
        if access.isEnabledFor(level):
            fields = {
                "operation": operation,
                "method": method,
                "status": status,
                "ms": round(seconds * 1000, 3),
            }
            fields |= {"owner": owner, "request_id": request_id and scrubber.text(request_id)}
            access.log(level, "%s %s", operation, status, extra={"fields": fields})

    def render(self, state: State) -> str:
        """Everything there is to know, as Prometheus reads it."""
        return "".join(
            f"{line}\n" for line in (*self._of_requests(), *_of_state(state, self._began))
        )

    def _of_requests(self) -> Iterator[str]:
        requests = {
            labels(operation=op, status=status): count
            for (op, status), count in self._requests.items()
        }
        yield from family(
            "tinkex_requests_total", "counter", "Requests by operation and status.", requests
        )
        name = "tinkex_request_seconds"
        yield from prometheus.heading(
            name, "histogram", "How long requests took; polls are held on purpose."
        )
        for operation, counts in self._buckets.items():
            yield from prometheus.histogram(
                name, BUCKETS, counts, self._seconds[operation], operation=operation
            )


def _of_state(state: State, began: float) -> Iterator[str]:
    meter = state.meter
    tokens = {labels(kind=name): int(meter.totals[kind]) for kind, name in TOKENS.items()}
    yield from family(
        "tinkex_tokens_total", "counter", "Tokens, by what was done with them.", tokens
    )
    made = state.workers.steps()
    steps = {labels(kind=kind): made[kind] for kind in (TRAINING, SAMPLING)}
    yield from family(
        "tinkex_engine_steps_total", "counter", "Steps of the engine, by kind.", steps
    )
    waiting: Counter[str] = Counter()
    for (_, operation), count in meter.open.items():
        waiting[operation] += count
    queued = {labels(operation=operation): count for operation, count in waiting.items()}
    yield from family(
        "tinkex_open_operations",
        "gauge",
        "Operations taken and not ended, queued or at work.",
        queued,
    )
    sampling = {"": waiting["asample"]}
    yield from family(
        "tinkex_samples_in_flight", "gauge", "Sample requests that have not ended.", sampling
    )
    yield from family(
        "tinkex_live_runs",
        "gauge",
        "Training runs whose adapters are loaded.",
        {"": len(state.runs)},
    )
    samplers = {"": len(state.samplers.loaded) + len(state.samplers.nameless.in_memory())}
    yield from family(
        "tinkex_samplers", "gauge", "Weights held in memory to sample from.", samplers
    )
    yield from family(
        "tinkex_open_sessions", "gauge", "Sessions that are open.", {"": len(state.sessions)}
    )
    yield from family(
        "tinkex_kept_results",
        "gauge",
        "Futures on record, ended or not.",
        {"": len(state.promises)},
    )
    yield from family(
        "tinkex_start_time_seconds", "gauge", "When the server was started.", {"": began}
    )


class JsonFormatter(logging.Formatter):
    """Log records as lines of JSON, without secrets; an access record's fields are members of their
    own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrubber.text(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["error"] = scrubber.text(
                self.formatException(record.exc_info), MOST_TRACEBACK, end=True
            )
        return json.dumps(said)
