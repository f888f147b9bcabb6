"""Put a server under load and print what its clients notice of it, and what it takes.

python bench/server/run.py --hostile [--seconds 300] [--only samples,unread] python
bench/server/run.py [--quick] [--engine fake --delay 0.001] [--clients 64] [--samples 2000]
[--seconds 30]

The server is a process of its own (`tinkex serve`) on all cores; the clients are another
(`load.py`), on the last core and with a lower priority, so that they do not take the server's.
Nothing is left behind: the server's data is in a temporary directory. Latency of a submit is what a
bare HTTP client sees, from the last byte of the request to the last of the receipt, after the
samples have been filled up and while training and sampling go on.

With `--hostile` one owner uses every limit of the server, and what another owner notices of it is
measured (`hostile.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile import add_options, run_hostile
from process import HERE, Gauge, environment, latency_row, quantile, served

OPERATIONS = ("forward_backward", "optim_step", "save_weights", "asample")
TARGET_MS = 50.0
WATCHED = {"full": signal.SIGUSR1, "held": signal.SIGUSR2}


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], Gauge]:
    """One run: the clients' figures, the moments of its phases, and what the server took."""
    with tempfile.TemporaryDirectory() as folder, served(args, Path(folder)) as (pid, url):
        gauge = Gauge(pid)
        gauge.start()
        model = "fake" if args.engine == "fake" else "tinkex/tiny"
        command = [sys.executable, str(HERE / "load.py"), "--url", url, "--model", model]
        command += [
            "--clients",
            str(args.clients),
            "--samples",
            str(args.samples),
            "--seconds",
            str(args.seconds),
        ]
        command += ["--tokens", str(args.tokens or (4 if args.engine == "torch" else 256))]
        command += ["--core", str(max(os.sched_getaffinity(0)))]
        marks: dict[str, Any] = {}
        with subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.nice(args.nice),
        ) as clients:
            assert clients.stdout is not None
            said: dict[str, Any] = {}
            for line in clients.stdout:
                said = json.loads(line)
                if "mark" in said:
                    marks[said["mark"]] = said
                    if args.watch and said["mark"] in WATCHED:
                        os.kill(pid, WATCHED[said["mark"]])
        gauge.over.set()
        gauge.join()
        if clients.returncode or "latencies" not in said:
            raise SystemExit(f"the clients ended with {clients.returncode}")
        return said, marks, gauge


def facts(
    args: argparse.Namespace, told: dict[str, Any], marks: dict[str, Any], gauge: Gauge
) -> Iterator[tuple[str, str]]:
    """Further figures, by name."""
    full, held = marks["full"], marks["held"]
    seconds = held["at"] - full["at"]
    yield "training clients", f"{args.clients}"
    yield (
        "samples in flight, at the beginning and the end",
        f"{full['in_flight']:,}, {held['in_flight']:,}",
    )
    yield (
        "held for",
        f"{seconds:.0f} s, after {full['at'] - marks['begun']['at']:.0f} s to fill up and warm up",
    )
    for operation in ("forward_backward", "optim_step", "asample"):
        yield (
            f"{operation} ended",
            f"{told['held'].get(f'{operation} arrived', 0) / seconds:.1f} a second",
        )
    readings = gauge.between(full["at"], held["at"])
    first, last = readings[0], readings[-1]
    seconds = last.at - first.at
    server = (last.cpu - first.cpu) / seconds
    machine = (last.machine - first.machine) / seconds
    yield "server: CPU, all threads", f"{server:.2f} cores"
    yield "server: CPU, event loop", f"{(last.loop - first.loop) / seconds:.2f} cores"
    kept_waiting = 1000 * (last.kept_waiting - first.kept_waiting) / seconds
    yield "server: event loop kept waiting for a core", f"{kept_waiting:.0f} ms a second"
    yield "clients: CPU", f"{told['client_cpu']:.2f} cores"
    yield (
        "everything else on the machine: CPU",
        f"{max(0.0, machine - server - told['client_cpu']):.2f} cores",
    )
    shown = [readings[round(part * (len(readings) - 1) / 6)].memory for part in range(7)]
    yield (
        "server: resident memory, from the beginning to the end",
        f"{', '.join(f'{each:.0f}' for each in shown)} MB",
    )
    yield (
        "server: resident memory, peak",
        f"{max(reading.memory for reading in gauge.readings):.0f} MB",
    )
    counts = told["counts"]
    for what in ("submitted", "arrived"):
        yield (
            f"operations {what}",
            f"{sum(counts.get(f'{operation} {what}', 0) for operation in OPERATIONS):,}",
        )
    yield (
        "results lost, results that came twice",
        f"{told['lost']}, {counts.get('asample twice', 0)}",
    )
    yield "refused for want of room", f"{counts.get('refused', 0)}"
    yield "results asked for again when idle, different", f"{told['compared']}, {told['different']}"


def report(
    args: argparse.Namespace, told: dict[str, Any], marks: dict[str, Any], gauge: Gauge
) -> bool:
    """Print everything; whether what was promised was kept."""
    latencies = {name: values for name, values in told["latencies"].items() if values}
    print("| submit latency, ms | count | p50 | p90 | p99 | max |\n|---|--:|--:|--:|--:|--:|")
    held = []
    for operation in OPERATIONS:
        if values := latencies.get(f"load {operation}"):
            held += values
            print(latency_row(operation, values))
    print(latency_row("**all, under load**", held))
    filling = [
        value for name, values in latencies.items() if name.startswith("fill ") for value in values
    ]
    print(latency_row("all, while samples fill up", filling))

    print("\n| | |\n|---|--:|")
    for name, value in facts(args, told, marks, gauge):
        print(f"| {name} | {value} |")
    p99 = 1000 * quantile(held, 0.99)
    print(f"\np99 of all submits under load: {p99:.1f} ms, target < {TARGET_MS:.0f} ms: ", end="")
    print("met" if p99 < TARGET_MS else "missed")
    return not (told["lost"] or told["different"] or told["counts"].get("asample twice", 0))


def main() -> None:
    """Print two Markdown tables; the exit status says whether every result arrived once and was
    right.
    """
    parser = argparse.ArgumentParser(description="Measure a server under load.")
    parser.add_argument("--quick", action="store_true", help="8 clients, 200 samples, 10 seconds")
    parser.add_argument(
        "--engine", choices=("torch", "fake"), default="torch", help="fake: the API layer alone"
    )
    parser.add_argument(
        "--delay", type=float, default=0.004, help="seconds of each call of the fake engine"
    )
    parser.add_argument(
        "--clients", type=int, default=64, help="training clients, each with a run of its own"
    )
    parser.add_argument("--samples", type=int, default=2000, help="samples in flight")
    parser.add_argument(
        "--seconds", type=float, help="how long the load is held (default: 30; with --hostile 300)"
    )
    parser.add_argument(
        "--tokens", type=int, help="tokens of a sample (default: 4; with the fake engine 256)"
    )
    parser.add_argument(
        "--threads", type=int, help="threads of torch (default: as many as there are cores)"
    )
    parser.add_argument(
        "--nice", type=int, default=5, help="how much the clients step back (default 5)"
    )
    parser.add_argument(
        "--watch", type=Path, help="write here what holds the event loop up; slows the server down"
    )
    add_options(parser.add_argument_group("with --hostile"))
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}",
        flush=True,
    )
    if args.hostile:
        args.seconds = 300.0 if args.seconds is None else args.seconds
        run_hostile(args)
        return
    args.seconds = 30.0 if args.seconds is None else args.seconds
    if args.quick:
        args.clients, args.samples, args.seconds = (
            min(args.clients, 8),
            min(args.samples, 200),
            min(args.seconds, 10),
        )
    engine = "fake engine" if args.engine == "fake" else "tinkex/tiny on torch (CPU)"
    print(f"{engine}\n", flush=True)
    if not report(args, *measure(args)):
        raise SystemExit("results were lost, came twice or were wrong")


if __name__ == "__main__":
    main()
