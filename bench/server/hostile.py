"""One owner uses every limit of a server; what another owner notices of it, and what the server
takes.

The server is `tinkex serve` with a key for each of the two and `tinkex/tiny`. Each kind of load is
a process (`attacks.py`); the other owner is one more (`neighbour.py`), which measures alone first
and then beside the load. Memory and disk are bounded if they stay under a cap, and if the last
third of the time takes little more than the second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attacks import KINDS
from process import HERE, Gauge, environment, latency_row, quantile, served

SUBMIT_MS = 100.0
STEPS = 20
GROWTH, SLACK_MB = 1.1, 64.0
"""The last third may take so many times what the second took, and so much more."""
DISK_SECONDS = 3.0
LATE = {"samples": 0.2}
"""Kinds that begin after a part of the time: others of the same owner would wait behind them."""
WATCHED = {"begun": signal.SIGUSR1, "ended": signal.SIGUSR2}
OWNERS = ("hostile", "neighbour")


def add_options(group: Any) -> None:
    """Add the options of this mode."""
    group.add_argument(
        "--hostile", action="store_true", help="one owner uses every limit, another measures"
    )
    group.add_argument("--only", help=f"kinds of load, of {','.join(KINDS)} (default: all)")
    group.add_argument(
        "--baseline",
        type=float,
        default=30,
        help="seconds that are measured without load (default 30)",
    )
    group.add_argument(
        "--most-memory", type=float, default=6000, help="MB that the server may take (default 6000)"
    )
    group.add_argument(
        "--most-disk", type=float, default=6000, help="MB of its data directory (default 6000)"
    )
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of tinkex serve, as open-requests=500",
    )


class Disk(threading.Thread):
    """Reads, every few seconds, how much a directory takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.readings: list[tuple[float, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Read until told to stop."""
        while not self.over.wait(DISK_SECONDS):
            self.readings.append((time.monotonic(), size_of(self.folder)))


def size_of(folder: Path) -> float:
    """MB that the files of a directory take."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total / 1e6


@dataclass
class Told:
    """The results of a run."""

    marks: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Requests that the other owner was refused, or lost."""
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    memory: list[tuple[float, float]] = field(default_factory=list)
    disk: list[tuple[float, float]] = field(default_factory=list)
    stopped: str = ""
    """Why it was ended early."""


def measure(args: argparse.Namespace, kinds: list[str]) -> Told:
    """Run the server, the other owner, and the load."""
    told = Told()
    args.limits = [tuple(limit.partition("=")[::2]) for limit in ["drain-seconds=1", *args.limit]]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        keys = {owner: key_of(folder, owner) for owner in OWNERS}
        pid, url = stack.enter_context(served(args, folder))
        gauge, disk = Gauge(pid), Disk(folder)
        gauge.start()
        disk.start()
        try:
            _carry_out(args, told, kinds, url, keys, gauge, disk)
        finally:
            gauge.over.set()
            disk.over.set()
            gauge.join()
            disk.join()
        told.memory = [(reading.at, reading.memory) for reading in gauge.readings]
        told.disk = disk.readings
    return told


def key_of(folder: Path, owner: str) -> str:
    """A key for an owner, made as an operator would."""
    command = [
        sys.executable,
        "-m",
        "tinkex",
        "key",
        "create",
        owner,
        "--owner",
        owner,
        "--data-dir",
        str(folder),
    ]
    made = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return made.stdout.strip()


def _carry_out(
    args: argparse.Namespace,
    told: Told,
    kinds: list[str],
    url: str,
    keys: dict[str, str],
    gauge: Gauge,
    disk: Disk,
) -> None:
    command = [sys.executable, str(HERE / "neighbour.py"), "--url", url, "--key", keys["neighbour"]]
    command += ["--baseline", str(args.baseline), "--seconds", str(args.seconds)]
    attackers: dict[str, subprocess.Popen[str]] = {}
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        watching = threading.Thread(
            target=_watch, args=(args, told, neighbour, gauge, disk), daemon=True
        )
        watching.start()
        starting: list[threading.Timer] = []
        try:
            for said in _said(neighbour.stdout):
                if "mark" in said:
                    told.marks[said["mark"]] = said["at"]
                if args.watch and said.get("mark") in WATCHED:
                    os.kill(gauge.pid, WATCHED[said["mark"]])
                if said.get("mark") == "alone":
                    for kind in kinds:
                        late = args.seconds * LATE.get(kind, 0) if len(kinds) > 1 else 0
                        attack = [
                            sys.executable,
                            str(HERE / "attacks.py"),
                            "--url",
                            url,
                            "--key",
                            keys["hostile"],
                        ]
                        attack += ["--kind", kind]
                        starting.append(
                            threading.Timer(late, _start, (attackers, kind, attack, args.nice))
                        )
                        starting[-1].start()
                    neighbour.stdin.write("\n")
                    neighbour.stdin.flush()
                elif said.get("mark") == "ended":
                    for timer in starting:
                        timer.cancel()
                    told.counts = {kind: _end(attacker) for kind, attacker in attackers.items()}
                elif "seen" in said:
                    told.seen, told.wrong = said["seen"], said["why"]
        finally:
            for timer in starting:
                timer.cancel()
            for attacker in attackers.values():
                attacker.kill()
                attacker.wait()
    if not told.seen and not told.stopped:
        told.stopped = f"the other owner's process ended with {neighbour.returncode}"


def _said(lines: IO[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def _start(
    attackers: dict[str, subprocess.Popen[str]], kind: str, command: list[str], nice: int
) -> None:
    attackers[kind] = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(nice),
    )


def _end(attacker: subprocess.Popen[str]) -> Counter[str]:
    was_running = attacker.poll() is None
    attacker.terminate()
    try:
        out, _ = attacker.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        attacker.kill()
        out, _ = attacker.communicate()
    counts = Counter[str]()
    for said in map(json.loads, out.splitlines()):
        counts.update(said.get("counts", {}))
        if "failed" in said:
            counts[said["failed"]] += 1
    if not was_running:
        counts[f"ended by itself with {attacker.returncode}"] += 1
    return counts


def _watch(
    args: argparse.Namespace, told: Told, neighbour: subprocess.Popen[str], gauge: Gauge, disk: Disk
) -> None:
    """End the run when the server takes more than it may: the machine must survive it."""
    while neighbour.poll() is None:
        memory = gauge.readings[-1].memory if gauge.readings else 0.0
        taken = disk.readings[-1][1] if disk.readings else 0.0
        if memory > args.most_memory or taken > args.most_disk:
            told.stopped = f"the server took {memory:.0f} MB of memory and {taken:.0f} MB of disk"
            neighbour.terminate()
            return
        if not gauge.is_alive():
            told.stopped = "the server ended"
            neighbour.terminate()
            return
        time.sleep(0.5)


# ── what is printed ───────────────────────────────────────────────────────────────────────────────


def thirds(readings: list[tuple[float, float]], start: float, end: float) -> list[float]:
    """The most in each third of a time."""
    length = (end - start) / 3
    parts = [
        [v for at, v in readings if start + n * length <= at < start + (n + 1) * length]
        for n in range(3)
    ]
    return [max(part, default=0.0) for part in parts]


def misses(args: argparse.Namespace, told: Told) -> Iterator[str]:
    """The targets that were missed, each with the reason."""
    if told.stopped:
        yield f"the run was ended early: {told.stopped}"
    submits, steps = told.seen.get("load submit", []), told.seen.get("load steps", [])
    if submits and (p99 := 1000 * quantile(submits, 0.99)) > SUBMIT_MS:
        alone = 1000 * quantile(told.seen["baseline submit"], 0.99)
        yield (
            f"p99 of submits is {p99:.1f} ms, more than {SUBMIT_MS:.0f}; without any load it is "
            f"{alone:.1f} ms"
        )
    if steps and max(steps) > STEPS:
        yield f"a sample of two tokens took {max(steps):.0f} engine steps, more than {STEPS}"
    if not told.stopped and not (submits and steps):
        yield (
            f"nothing to judge by: {len(submits)} submits and {len(steps)} samples ended under load"
        )
    if told.wrong:
        yield f"the other owner was refused or lost something: {'; '.join(told.wrong)}"
    for kind, counts in told.counts.items():
        for ended in (what for what in counts if what.startswith("ended by itself")):
            yield f"the load {kind} {ended}"
    start = told.marks.get("begun", 0.0)
    end = told.marks.get("ended", told.memory[-1][0] if told.memory else 0.0)
    for name, readings in (("memory", told.memory), ("disk", told.disk)):
        _, second, third = thirds(readings, start, end)
        if second and third > GROWTH * second + SLACK_MB:
            yield (
                f"{name} grows: {second:.0f} MB at most in the second third of the time, "
                f"{third:.0f} in the last"
            )


def report(args: argparse.Namespace, told: Told) -> list[str]:
    """Print everything; the targets that were missed."""
    rows = {"submit, alone": "baseline submit", "**submit, under load**": "load submit"}
    rows |= {
        "sample of two tokens, alone": "baseline sample",
        "sample of two tokens, under load": "load sample",
    }
    rows |= {
        "training step, alone": "baseline training step",
        "training step, under load": "load training step",
    }
    rows |= {
        "new connection, alone": "baseline connect",
        "new connection, under load": "load connect",
    }
    print("| the other owner, ms | count | p50 | p90 | p99 | max |\n|---|--:|--:|--:|--:|--:|")
    for name, what in rows.items():
        if values := told.seen.get(what):
            print(latency_row(name, values))
    print(
        "\n| engine steps of a sample of two tokens | count | p50 | p90 | max "
        "|\n|---|--:|--:|--:|--:|"
    )
    for phase in ("baseline", "load"):
        for what in ("steps", "sampling steps"):
            if values := told.seen.get(f"{phase} {what}"):
                p50, p90 = (f"{quantile(values, share):.0f}" for share in (0.5, 0.9))
                print(f"| {what}, {phase} | {len(values)} | {p50} | {p90} | {max(values):.0f} |")
    print("\n| | |\n|---|--:|")
    for name, value in facts(told):
        print(f"| {name} | {value} |")
    missed = list(misses(args, told))
    print()
    for why in missed:
        print(f"missed: {why}")
    if not missed:
        print(
            f"met: p99 of submits <= {SUBMIT_MS:.0f} ms, samples <= {STEPS} steps, memory and disk "
            "bounded"
        )
    return missed


def facts(told: Told) -> Iterator[tuple[str, str]]:
    """Further figures, by name."""
    start, end = told.marks.get("begun"), told.marks.get("ended")
    if start is not None and end is not None:
        yield "load held for", f"{end - start:.0f} s"
    if (alone := told.seen.get("baseline submit")) and (beside := told.seen.get("load submit")):
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            yield (
                f"{name} of submits, under load over alone",
                f"{quantile(beside, share) / quantile(alone, share):.1f}",
            )
    for name, readings in (
        ("server: resident memory", told.memory),
        ("server: data directory", told.disk),
    ):
        values = [value for at, value in readings if start is None or at >= start]
        if values:
            shown = [values[round(part * (len(values) - 1) / 6)] for part in range(7)]
            yield (
                f"{name}, from the beginning to the end",
                f"{', '.join(f'{each:.0f}' for each in shown)} MB",
            )
            yield f"{name}, peak", f"{max(values):.0f} MB"
    for kind, counts in told.counts.items():
        said = ", ".join(f"{what}: {count:,}" for what, count in counts.most_common(9))
        yield f"load: {kind}", said or "nothing"


def run_hostile(args: argparse.Namespace) -> None:
    """Measure and report; the exit status says whether all targets were met."""
    kinds = list(KINDS) if args.only is None else args.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise SystemExit(
            f"--only: no kind of load is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(KINDS)}"
        )
    print(
        f"one owner: {', '.join(kinds)}; tinkex/tiny on torch (CPU); load average "
        f"{os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    if report(args, measure(args, kinds)):
        raise SystemExit(1)
