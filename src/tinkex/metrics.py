"""Metrics of this process: counters, gauges and histograms of its clients.

The functions of this module keep one set of numbers for the whole process. The first call of one
makes the set; from then on it counts every HTTP request of the clients, with a handler on the event
bus. Before that nothing is counted. A `Metrics` of your own works in the same way.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import statistics
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tinkex import events
from tinkex.types.record import Record
from tinkex.wire import prometheus

LATENCY_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Upper bounds of a histogram's buckets, in milliseconds."""
HISTOGRAM_MAX_SAMPLES = 1000
"""The number of newest samples that percentiles are taken over."""

REQUESTS_TOTAL = "tinkex_requests_total"
REQUESTS_SUCCESS = "tinkex_requests_success"
REQUESTS_FAILURE = "tinkex_requests_failure"
REQUEST_DURATION_MS = "tinkex_request_duration_ms"

_HELP = {
    REQUESTS_TOTAL: "Requests that ended.",
    REQUESTS_SUCCESS: "Requests that were answered with what was asked for.",
    REQUESTS_FAILURE: "Requests that failed or were given up.",
    REQUEST_DURATION_MS: "How long requests took, in milliseconds.",
}

_numbers = itertools.count(1)

Statistic: TypeAlias = float | None
"""A number of a histogram; None while the histogram is empty."""


class HistogramSummary(Record, frozen=True, kw_only=True):
    """The summary of a histogram; all but the count are None while it is empty.

    Mean, minimum and maximum are over all samples, percentiles over the newest.

    Example:
        >>> numbers = Metrics(enabled=False)
        >>> for step_ms in (5, 15, 40):
        ...     numbers.record_histogram("step_ms", step_ms)
        >>> numbers.snapshot().histograms["step_ms"].p50
        15
    """

    count: int = 0
    mean: Statistic = None
    min: Statistic = None
    max: Statistic = None
    p50: Statistic = None
    p95: Statistic = None
    p99: Statistic = None


class Snapshot(Record, frozen=True, kw_only=True):
    """All numbers at one moment, by name.

    Example:
        >>> numbers = Metrics(enabled=False)
        >>> numbers.increment("batches", 4)
        >>> numbers.snapshot().counters
        {'batches': 4}
    """

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, HistogramSummary]


class Histogram:
    """A histogram: counts by bucket, and the newest samples for percentiles.

    Example:
        >>> times = Histogram(buckets=[10, 100])
        >>> for milliseconds in (5, 250):
        ...     times.add(milliseconds)
        >>> times.counts, times.summary().max
        ([1, 0, 1], 250)
    """

    def __init__(
        self, buckets: Sequence[float] = LATENCY_BUCKETS, max_samples: int = HISTOGRAM_MAX_SAMPLES
    ) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self.total = 0.0
        self._least, self._greatest = math.inf, -math.inf
        self._newest: deque[float] = deque(maxlen=max_samples)

    def add(self, value: float) -> None:
        """Add a sample to the first bucket whose bound is not lower, else the last."""
        self.counts[bisect.bisect_left(self.buckets, value)] += 1
        self.total += value
        self._least, self._greatest = min(self._least, value), max(self._greatest, value)
        self._newest.append(value)

    def summary(self) -> HistogramSummary:
        """Return the numbers of a snapshot."""
        if not self._newest:
            return HistogramSummary()
        count, ordered = sum(self.counts), sorted(self._newest)
        return HistogramSummary(
            count=count,
            mean=self.total / count,
            min=self._least,
            max=self._greatest,
            p50=statistics.median(ordered),
            p95=_nearest_rank(ordered, 95),
            p99=_nearest_rank(ordered, 99),
        )


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    # whole numbers: a rounded quotient could be one too high
    return ordered[-(-len(ordered) * percent // 100) - 1]


class Metrics:
    """A set of numbers; all methods may be called from any thread.

    Args:
        enabled: Count the HTTP requests of clients. The program's own numbers are always counted.
        latency_buckets: Upper bounds of the histograms' buckets, rising.
        histogram_max_samples: The number of newest samples that percentiles are taken over.

    Example:
        >>> numbers = Metrics(enabled=False)  # without the requests that clients make
        >>> numbers.increment("batches")
        >>> numbers.snapshot().counters["batches"]
        1
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        latency_buckets: Sequence[float] = LATENCY_BUCKETS,
        histogram_max_samples: int = HISTOGRAM_MAX_SAMPLES,
    ) -> None:
        buckets = tuple(latency_buckets)
        if not buckets or any(not low < high for low, high in itertools.pairwise(buckets)):
            raise ValueError(
                f"latency_buckets must be numbers in rising order, got {list(buckets)}"
            )
        if isinstance(histogram_max_samples, bool) or not histogram_max_samples >= 1:
            raise ValueError(
                f"histogram_max_samples must be at least 1, got {histogram_max_samples!r}"
            )
        self._buckets, self._max_samples = buckets, histogram_max_samples
        # a handler on the bus may be called while its thread is in here
        self._lock = threading.RLock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._handler_id: str | None = None
        if enabled:
            self._handler_id = f"tinkex-metrics-{next(_numbers)}"
            events.attach(self._handler_id, [events.HTTP_STOP], self._on_stop)

    def close(self) -> None:
        """Stop counting HTTP requests; the numbers stay.

        Example:
            >>> numbers = Metrics()
            >>> numbers.close()
            >>> numbers.snapshot().counters
            {}
        """
        if self._handler_id is not None:
            events.detach(self._handler_id)
            self._handler_id = None

    def increment(self, name: str, delta: float = 1) -> None:
        """Add to a counter.

        Args:
            name: The counter.
            delta: The number to add.

        Raises:
            TypeError: The delta is not a number.
            ValueError: The name belongs to a gauge or a histogram.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.increment("tokens", 512)
            >>> numbers.snapshot().counters["tokens"]
            512
        """
        _check_number(name, delta)
        with self._lock:
            self._check_name(name, self._counters)
            self._counters[name] = self._counters.get(name, 0) + delta

    def set_gauge(self, name: str, value: float) -> None:
        """Set a gauge; it raises the errors of `increment`.

        Args:
            name: The gauge.
            value: Its new value.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.set_gauge("learning_rate", 1e-4)
            >>> numbers.snapshot().gauges["learning_rate"]
            0.0001
        """
        _check_number(name, value)
        with self._lock:
            self._check_name(name, self._gauges)
            self._gauges[name] = value

    def record_histogram(self, name: str, value: Any) -> None:
        """Add a sample to a histogram; ignore it if it is not a finite number.

        Args:
            name: The histogram.
            value: The sample, in milliseconds.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.record_histogram("step_ms", 12.5)
            >>> numbers.snapshot().histograms["step_ms"].mean
            12.5
        """
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            return
        with self._lock:
            self._check_name(name, self._histograms)
            if name not in self._histograms:
                self._histograms[name] = Histogram(self._buckets, self._max_samples)
            self._histograms[name].add(value)

    def snapshot(self) -> Snapshot:
        """Return all numbers at this moment.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.set_gauge("epoch", 3)
            >>> numbers.snapshot().gauges
            {'epoch': 3}
        """
        with self._lock:
            return Snapshot(
                counters=dict(self._counters),
                gauges=dict(self._gauges),
                histograms={
                    name: histogram.summary() for name, histogram in self._histograms.items()
                },
            )

    def reset(self) -> None:
        """Remove all numbers.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.increment("batches")
            >>> numbers.reset()
            >>> numbers.snapshot().counters
            {}
        """
        with self._lock:
            for kind in (self._counters, self._gauges, self._histograms):
                kind.clear()

    def flush(self) -> None:
        """Wait until all updates that have begun are visible.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.flush()  # before the numbers of other threads are read
        """
        self._lock.acquire()
        self._lock.release()

    def to_prometheus(self) -> str:
        """Return all numbers as text for Prometheus.

        Its content type is `tinkex.wire.prometheus.CONTENT_TYPE`.

        Example:
            >>> numbers = Metrics(enabled=False)
            >>> numbers.increment("batches", 2)
            >>> print(numbers.to_prometheus().splitlines()[-1])
            batches 2
        """
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for kind, values in (("counter", self._counters), ("gauge", self._gauges)):
            for name, value in values.items():
                yield from prometheus.family(
                    prometheus.name_of(name), kind, _help(name), {"": value}
                )
        for name, found in self._histograms.items():
            written = prometheus.name_of(name)
            yield from prometheus.heading(written, "histogram", _help(name))
            yield from prometheus.histogram(written, found.buckets, found.counts, found.total)

    def _check_name(self, name: str, kind: Mapping[str, Any]) -> None:
        """Raise if a name already belongs to another kind of number."""
        if any(
            name in other
            for other in (self._counters, self._gauges, self._histograms)
            if other is not kind
        ):
            raise ValueError(f"the metric {name!r} already exists and is of another kind")

    def _on_stop(
        self, event: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> None:
        if (duration := measurements.get("duration")) is None:
            return
        with self._lock:
            self.increment(REQUESTS_TOTAL)
            self.increment(REQUESTS_SUCCESS if metadata.get("result") == "ok" else REQUESTS_FAILURE)
            self.record_histogram(REQUEST_DURATION_MS, round(duration, 3))


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"the metric {name!r} takes a number, got {type(value).__name__}")


def _help(name: str) -> str:
    return _HELP.get(name, "Kept by the program.")


# ── the numbers of the process ────────────────────────────────────────────────────────────────────

_shared: Metrics | None = None
_making = threading.Lock()


def shared() -> Metrics:
    """Return the metrics of this process; the first call makes them.

    Example:
        >>> shared() is shared()
        True
    """
    global _shared
    with _making:
        if _shared is None:
            _shared = Metrics()
        return _shared


def configure(
    *,
    enabled: bool = True,
    latency_buckets: Sequence[float] = LATENCY_BUCKETS,
    histogram_max_samples: int = HISTOGRAM_MAX_SAMPLES,
) -> Metrics:
    """Replace the metrics of this process by new ones; see `Metrics`.

    Args:
        enabled: Count the HTTP requests of clients.
        latency_buckets: Upper bounds of the buckets, in milliseconds.
        histogram_max_samples: The number of newest samples that percentiles are taken over.

    Returns:
        The new metrics.

    Example:
        >>> numbers = configure(latency_buckets=[10, 100, 1000], histogram_max_samples=200)
        >>> numbers is shared()
        True
    """
    global _shared
    made = Metrics(
        enabled=enabled,
        latency_buckets=latency_buckets,
        histogram_max_samples=histogram_max_samples,
    )
    with _making:
        _shared, old = made, _shared
    if old is not None:
        old.close()
    return made


def increment(name: str, delta: float = 1) -> None:
    """Like `Metrics.increment`, of the process.

    Example:
        >>> reset()
        >>> increment("tokens", 512)
        >>> snapshot().counters["tokens"]
        512
    """
    shared().increment(name, delta)


def set_gauge(name: str, value: float) -> None:
    """Like `Metrics.set_gauge`, of the process.

    Example:
        >>> set_gauge("learning_rate", 1e-4)
        >>> snapshot().gauges["learning_rate"]
        0.0001
    """
    shared().set_gauge(name, value)


def record_histogram(name: str, value: Any) -> None:
    """Like `Metrics.record_histogram`, of the process.

    Example:
        >>> reset()
        >>> record_histogram("step_ms", 12.5)
        >>> snapshot().histograms["step_ms"].count
        1
    """
    shared().record_histogram(name, value)


def snapshot() -> Snapshot:
    """Return all numbers of the process at this moment.

    Example:
        >>> reset()
        >>> increment("batches")
        >>> snapshot().counters["batches"]
        1
    """
    return shared().snapshot()


def reset() -> None:
    """Remove the numbers of the process.

    Example:
        >>> increment("batches")
        >>> reset()
        >>> "batches" in snapshot().counters
        False
    """
    shared().reset()


def flush() -> None:
    """Wait until all updates that have begun are visible.

    Example:
        >>> flush()  # before the numbers of other threads are read
    """
    shared().flush()


def to_prometheus() -> str:
    """Return the numbers of the process as text for Prometheus.

    Example:
        >>> set_gauge("epoch", 3)
        >>> "epoch 3" in to_prometheus().splitlines()
        True
    """
    return shared().to_prometheus()


def _renew_locks() -> None:
    global _making
    _making = threading.Lock()
    if _shared is not None:
        _shared._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # another thread may have held one when the process forked
    os.register_at_fork(after_in_child=_renew_locks)
