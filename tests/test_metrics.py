"""Metrics of clients: counters, gauges, histograms, and the text that Prometheus reads."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tinkex import NotFoundError, RestClient, ServiceClient, events, metrics
from tinkex.metrics import Histogram, HistogramSummary, Metrics, Snapshot
from tinkex.types.telemetry import TelemetrySendRequest
from tinkex.wire import protocol


@pytest.fixture
def kept() -> Iterator[Metrics]:
    kept = Metrics()
    yield kept
    kept.close()


@pytest.fixture
def fresh() -> Iterator[None]:
    """The process's own numbers, as if nobody had asked for them."""
    metrics.configure()
    yield
    metrics.configure()


def stop(result: str, **measurements: float) -> None:
    events.emit(events.HTTP_STOP, measurements, {"result": result})


# ── the calls ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.10/1", "1.10/2", "1.10/3", "1.10/4", "1.10/6", "1.10/10")
def test_counters_add_gauges_replace_and_histograms_collect(fresh: None) -> None:
    for delta in (1, 5, -2):
        metrics.increment("seen", delta)
    metrics.increment("seen")
    for value in (3.0, 1.5):
        metrics.set_gauge("level", value)
    for sample in (5, 15):
        metrics.record_histogram("took", sample)
    metrics.flush()
    seen = metrics.snapshot()
    assert seen.counters == {"seen": 5}
    assert seen.gauges == {"level": 1.5}
    took = seen.histograms["took"]
    assert (took.count, took.mean, took.min, took.max, took.p50, took.p95, took.p99) == (
        2,
        10,
        5,
        15,
        10,
        15,
        15,
    )


@pytest.mark.covers("1.10/5")
def test_reset_forgets_everything(fresh: None) -> None:
    metrics.increment("a")
    metrics.set_gauge("b", 1)
    metrics.record_histogram("c", 1)
    metrics.reset()
    assert metrics.snapshot() == Snapshot(counters={}, gauges={}, histograms={})
    metrics.set_gauge("a", 2)  # the name is free again, for any kind
    assert metrics.snapshot().gauges == {"a": 2}


@pytest.mark.covers("1.10/4")
def test_snapshot_is_of_its_moment(kept: Metrics) -> None:
    kept.increment("a")
    before = kept.snapshot()
    kept.increment("a")
    assert (before.counters, kept.snapshot().counters) == ({"a": 1}, {"a": 2})


@pytest.mark.covers("1.10/3")
@pytest.mark.parametrize("value", ["5", None, True, float("nan"), float("inf"), [1]])
def test_sample_that_is_no_number_is_ignored(kept: Metrics, value: Any) -> None:
    kept.record_histogram("took", 2)
    kept.record_histogram("took", value)
    assert kept.snapshot().histograms["took"].count == 1


@pytest.mark.covers("1.10/1", "1.10/2")
@pytest.mark.parametrize("value", ["5", None, True])
def test_counter_or_gauge_that_is_no_number_is_refused(kept: Metrics, value: Any) -> None:
    with pytest.raises(TypeError, match="takes a number"):
        kept.increment("a", value)
    with pytest.raises(TypeError, match="takes a number"):
        kept.set_gauge("b", value)


@pytest.mark.covers("1.10/1", "1.10/2")
def test_name_stands_for_one_kind_of_number(kept: Metrics) -> None:
    kept.increment("a")
    with pytest.raises(ValueError, match="'a' already exists and is of another kind"):
        kept.set_gauge("a", 1)
    with pytest.raises(ValueError, match="another kind"):
        kept.record_histogram("a", 1)


@pytest.mark.covers("1.10/1", "4.1/10")
def test_updates_of_many_threads_are_all_counted(kept: Metrics) -> None:
    def work() -> None:
        for number in range(500):
            kept.increment("a")
            kept.record_histogram("b", number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.flush()
    seen = kept.snapshot()
    assert (seen.counters["a"], seen.histograms["b"].count) == (4000, 4000)


@pytest.mark.covers("1.10/6")
def test_flush_waits_for_an_update_that_has_begun(kept: Metrics) -> None:
    inside, go, flushed = threading.Event(), threading.Event(), threading.Event()

    def update() -> None:
        with kept._lock:
            inside.set()
            go.wait(10)
            kept.increment("a")

    def flush() -> None:
        kept.flush()
        flushed.set()

    threads = [threading.Thread(target=update), threading.Thread(target=flush)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not flushed.wait(0.05)
    go.set()
    assert flushed.wait(10)
    assert kept.snapshot().counters == {"a": 1}
    for thread in threads:
        thread.join()


@pytest.mark.covers("1.10/7")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"latency_buckets": []}, "rising order"),
        ({"latency_buckets": [1, 1]}, "rising order"),
        ({"histogram_max_samples": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Metrics(**options)


# ── histograms ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.10/9")
def test_sample_on_a_bound_belongs_to_its_bucket_and_the_largest_overflow() -> None:
    histogram = Histogram([1, 2, 5])
    for sample in (0, 1, 1.5, 2, 2.001, 5, 6, 1e9):
        histogram.add(sample)
    assert histogram.counts == [2, 2, 2, 2]


@pytest.mark.covers("1.10/9")
def test_percentiles_are_of_the_newest_samples_and_the_rest_of_all() -> None:
    histogram = Histogram(max_samples=4)
    for sample in (1000, 1, 2, 3, 4):
        histogram.add(sample)
    summary = histogram.summary()
    assert (summary.count, summary.mean, summary.min, summary.max) == (5, 202, 1, 1000)
    assert (summary.p50, summary.p95, summary.p99) == (2.5, 4, 4)


@pytest.mark.covers("1.10/9")
@pytest.mark.parametrize(
    ("count", "p95", "p99"), [(1, 1, 1), (20, 19, 20), (100, 95, 99), (101, 96, 100)]
)
def test_high_percentiles_are_nearest_ranks(count: int, p95: int, p99: int) -> None:
    histogram = Histogram()
    for sample in range(count, 0, -1):
        histogram.add(sample)
    summary = histogram.summary()
    assert (summary.p95, summary.p99) == (p95, p99)


@pytest.mark.covers("1.10/9")
def test_empty_histogram_has_no_numbers() -> None:
    empty = Histogram().summary()
    assert empty == HistogramSummary(count=0)
    assert [getattr(empty, name) for name in ("mean", "min", "max", "p50", "p95", "p99")] == [
        None
    ] * 6


@pytest.mark.covers("1.10/7")
def test_histogram_defaults() -> None:
    assert metrics.LATENCY_BUCKETS == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    histogram = Histogram()
    for sample in range(1001):
        histogram.add(sample)
    summary = histogram.summary()
    # the median is of 1 to 1000: 0 is the oldest of 1001
    assert (summary.min, summary.p50) == (0, 500.5)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.10/8", "1.10/10")
def test_requests_are_counted_by_their_outcome(kept: Metrics) -> None:
    for duration, result in ((10, "ok"), (20, "ok"), (40, "error")):
        stop(result, duration=duration)
    seen = kept.snapshot()
    assert seen.counters == {
        "tinkex_requests_total": 3,
        "tinkex_requests_success": 2,
        "tinkex_requests_failure": 1,
    }
    took = seen.histograms["tinkex_request_duration_ms"]
    assert took.mean == pytest.approx(23.3333, abs=1e-3)
    assert (took.p50, took.p95, took.p99) == (20, 40, 40)


@pytest.mark.covers("1.10/8")
def test_durations_are_kept_to_the_microsecond(kept: Metrics) -> None:
    stop("ok", duration=1.23456)
    assert kept.snapshot().histograms["tinkex_request_duration_ms"].max == 1.235


@pytest.mark.covers("1.10/8")
def test_request_without_a_duration_and_other_events_do_not_count(kept: Metrics) -> None:
    stop("ok")
    events.emit(events.HTTP_START, {"system_time": 1.0}, {})
    events.emit(events.HTTP_EXCEPTION, {"duration": 1.0}, {})
    assert kept.snapshot().counters == {}


@pytest.mark.covers("1.10/7")
def test_requests_do_not_count_when_that_is_off_but_a_programs_own_numbers_do() -> None:
    off = Metrics(enabled=False)
    stop("ok", duration=1)
    off.increment("mine")
    assert off.snapshot().counters == {"mine": 1}


def test_closed_metrics_listen_no_longer() -> None:
    before = events.handlers()  # the process's own numbers may be among them
    kept = Metrics()
    assert len(events.handlers()) == len(before) + 1
    kept.close()
    stop("ok", duration=1)
    assert kept.snapshot().counters == {}
    assert events.handlers() == before


@pytest.mark.covers("1.10/7", "4.1/10")
def test_process_has_one_set_of_numbers_and_configuring_starts_it_afresh(fresh: None) -> None:
    assert metrics.shared() is metrics.shared()
    stop("ok", duration=1)
    assert metrics.snapshot().counters["tinkex_requests_total"] == 1
    metrics.configure(latency_buckets=[7], histogram_max_samples=1)
    assert metrics.snapshot().counters == {}
    for duration in (3.0, 9.0):
        stop("ok", duration=duration)
    # the old ones listen no longer
    assert metrics.snapshot().counters["tinkex_requests_total"] == 2
    assert metrics.snapshot().histograms["tinkex_request_duration_ms"].p50 == 9
    assert '_bucket{le="7"} 1' in metrics.to_prometheus()


@pytest.mark.covers("1.10/8")
def test_clients_requests_are_counted(
    fresh: None, fake_service: Callable[..., ServiceClient]
) -> None:
    metrics.reset()
    service = fake_service()
    service.create_lora_training_client(
        "fake", rank=4
    ).result().save_weights_and_get_sampling_client().result()
    seen = metrics.snapshot()
    assert seen.counters["tinkex_requests_total"] == seen.counters["tinkex_requests_success"] >= 3
    took = seen.histograms["tinkex_request_duration_ms"]
    assert took.p50 is not None
    assert took.p95 is not None
    assert took.p99 is not None
    assert 0 < took.p50 <= took.p95 <= took.p99
    with pytest.raises(NotFoundError):
        RestClient(base_url=service.holder.transport.config.base_url).get_training_run(
            "no-such-run"
        ).result(20)
    assert metrics.snapshot().counters["tinkex_requests_failure"] == 1


@pytest.mark.covers("1.10/8")
def test_requests_for_telemetry_count_like_any_other(
    fresh: None, fake_service: Callable[..., ServiceClient]
) -> None:
    service = fake_service()
    service.get_server_capabilities()
    session = service.holder
    before = metrics.snapshot().counters["tinkex_requests_total"]
    batch = TelemetrySendRequest(session_id="s", platform="p", sdk_version="0", events=[])
    session.call(session.transport.call, protocol.TELEMETRY, batch).result(20)
    assert metrics.snapshot().counters["tinkex_requests_total"] == before + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_process_can_count_although_a_thread_was_counting_when_it_forked(
    fresh: None,
) -> None:
    shared = metrics.shared()
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        with shared._lock:
            inside.set()
            go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends it, if it waits for a thread that it has not
        metrics.increment("a")
        os._exit(0 if metrics.snapshot().counters == {"a": 1} else 1)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


# ── Prometheus ────────────────────────────────────────────────────────────────────────────────────


def test_text_for_prometheus_has_every_number(kept: Metrics) -> None:
    kept.increment("tinkex_requests_total", 2)
    kept.set_gauge("1st.loss", 0.5)
    for sample in (0.5, 3, 9000):
        kept.record_histogram("took_ms", sample)
    text = kept.to_prometheus()
    lines = text.splitlines()
    assert "# TYPE tinkex_requests_total counter" in lines
    assert "tinkex_requests_total 2" in lines
    assert "# TYPE _1st_loss gauge" in lines
    assert "_1st_loss 0.5" in lines
    assert "# TYPE took_ms histogram" in lines
    buckets = re.findall(r'took_ms_bucket\{le="([^"]+)"\} (\d+)', text)
    assert buckets[:3] == [("1", "1"), ("2", "1"), ("5", "2")]
    assert buckets[-2:] == [("5000", "2"), ("+Inf", "3")]
    assert "took_ms_sum 9003.5" in lines
    assert "took_ms_count 3" in lines
    assert all(
        re.fullmatch(r"# (HELP|TYPE) \S+ .+|[a-zA-Z_:][\w:]*(\{.*\})? \S+", line) for line in lines
    )
    assert text.endswith("\n")


def test_labels_are_escaped() -> None:
    from tinkex.wire.prometheus import labels

    assert labels(path='a"b\\c\nd') == r'{path="a\"b\\c\nd"}'
