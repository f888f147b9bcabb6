"""The server as a process of its own, and what it takes: shared by all modes of `run.py`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, str]:
    """No proxies, no settings of the user's."""
    dropped = ("proxy", "tinker_", "tinkex_")
    return {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.lower() for word in dropped)
    }


@dataclass(frozen=True)
class Reading:
    """The memory and disk of a process at a moment."""

    at: float
    memory: float
    """Resident MB."""
    cpu: float
    """Seconds, of all threads …"""
    loop: float
    """… and of the main one, which runs the event loop."""
    kept_waiting: float
    """Seconds in which the main thread could have run and was given no core."""
    machine: float
    """CPU seconds of everything on the machine."""


class Gauge(threading.Thread):
    """Reads, twice a second, what a process takes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.process = Path("/proc", str(pid))
        self.main = self.process / "task" / str(pid)
        self.readings: list[Reading] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Until told to stop, or the process is gone."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while not self.over.wait(0.5):
                self.readings.append(self.read())

    def read(self) -> Reading:
        """One reading."""
        pages = int((self.process / "statm").read_text().split()[1])
        busy = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return Reading(
            at=time.monotonic(),
            memory=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            cpu=_ticks(self.process / "stat"),
            loop=_ticks(self.main / "stat"),
            kept_waiting=int((self.main / "schedstat").read_text().split()[1]) / 1e9,
            machine=(sum(busy[:3]) + sum(busy[5:8])) / TICKS,
        )

    def between(self, start: float, end: float) -> list[Reading]:
        """The readings of a time."""
        return [reading for reading in self.readings if start <= reading.at <= end]


def _ticks(path: Path) -> float:
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def served(args: argparse.Namespace, folder: Path) -> Iterator[tuple[int, str]]:
    """The server, for as long as it is needed: its process id and its address."""
    command = [
        sys.executable,
        str(HERE / "served.py"),
        "--engine",
        args.engine,
        "--delay",
        str(args.delay),
    ]
    command += ["--watch", str(args.watch)] if args.watch else []
    command += [
        word for name, value in getattr(args, "limits", ()) for word in (f"--{name}", value)
    ]
    command += ["--port", "0", "--data-dir", str(folder), "--no-hub-cache"]
    variables = environment() | ({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        try:
            yield process.pid, found.group()
        finally:
            process.terminate()
            process.wait(60)


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency_row(name: str, seconds: list[float]) -> str:
    """A row of the Markdown table."""
    p50, p90, p99 = (f"{1000 * quantile(seconds, share):.1f}" for share in (0.5, 0.9, 0.99))
    return f"| {name} | {len(seconds):,} | {p50} | {p90} | {p99} | {1000 * max(seconds):.1f} |"
