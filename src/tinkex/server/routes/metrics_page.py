"""Report the state of the server as text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tinkex.engine.stepping import SAMPLING, TRAINING
from tinkex.server.routes.cluster_pages import worker_metrics
from tinkex.server.state import State
from tinkex.wire.prometheus import family, labels

TOKENS = {"training": "training", "prefill": "prefill", "sample": "sampled"}


def metrics_text(state: State) -> str:
    """Return all figures of a server."""
    return "".join(f"{line}\n" for line in (*state.metrics.lines(), *_of_state(state)))


def _of_state(state: State) -> Iterator[str]:
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
    yield from worker_metrics(state)
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
    in_memory = len(state.samplers.nameless.in_memory())
    samplers = {"": len(state.samplers.loaded) + in_memory}
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
        "tinkex_start_time_seconds",
        "gauge",
        "When the server was started.",
        {"": state.metrics.began},
    )
