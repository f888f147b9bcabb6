"""Measure engines in other processes against one in the server's own.

    python bench/cluster/run.py [--quick] [--only link,scaling,deaths,memory]

- link: a pass and samples through the link against in process, with the fake engine and with
  tinkex/tiny on a CPU, over child processes and, where Ray can be imported, over its actors. Both
  are open at the same time and measured in turns, so that other load on the machine falls on both.
- scaling: 1, 2 and 4 replicas of a fake engine with simulated step times.
- deaths: submits of 64 clients (`bench/server/load.py`) while a replica is killed again and again,
  against nobody dying, in turns.
- memory: resident memory of the head over 10,000 operations, with results that were read kept for
  a second in place of ten minutes.

Prints a table with the target of each figure. Everything is in temporary directories.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import operator
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import fleet_of
from simulated import timed_tiny

import tinkex
from tinkex import AdamParams, Datum, LocalBackend, ModelInput, SamplingParams, ServiceClient
from tinkex.cluster.link import Recipe
from tinkex.engine.fake import FakeEngine

HERE = Path(__file__).parent
SERVER = HERE.parent / "server"
sys.path.insert(0, str(SERVER))

from process import Gauge, environment, quantile  # noqa: E402

FAKE = "tinkex.engine.fake:FakeEngine"
ADAM = AdamParams(learning_rate=1e-3)
STEPS = "steps.txt"
FAKE_STEP = 0.02
"""Seconds of a step of the fake engine where samples are drawn through the link."""
PASS_SECONDS, DRAW_SECONDS, SLOTS = 0.1, 0.05, 32
"""A simulated GPU: seconds of a pass and of a step of sampling, and jobs in one step."""
MOST = 4
KILL_SECONDS = 3.0
SERVED_DELAY = 0.004
SWEPT_SECONDS = 18.0
"""The head looks every 15 s for results that it may forget."""
GROWTH_MB = 6.0


@dataclass(frozen=True)
class Row:
    """A figure, and what it should be."""

    name: str
    shown: str
    target: str = ""
    is_met: bool | None = None

    def __str__(self) -> str:
        verdict = "" if self.is_met is None else "met" if self.is_met else "missed"
        return f"| {self.name} | {self.shown} | {self.target} | {verdict} |"


def data(count: int, length: int) -> list[Datum]:
    """Return the data of a pass."""
    tokens = [3 + 7 * at % 240 for at in range(length + 1)]
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    return [datum] * count


@contextlib.contextmanager
def opened(engine: Any, data_dir: Path) -> Iterator[ServiceClient]:
    """Open a backend over an engine or a fleet."""
    with (
        LocalBackend(data_dir=data_dir, engine=engine) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        yield service


# ── link ──────────────────────────────────────────────────────────────────────────────────────────


class Side:
    """One of the servers that are compared: a run, a sampler and their figures."""

    def __init__(self, service: ServiceClient, model: str) -> None:
        self.run = service.create_lora_training_client(model, rank=8, seed=1).result()
        self.sampler = self.run.save_weights_and_get_sampling_client().result()
        self.passes: list[float] = []
        self.rates: list[float] = []

    def train(self) -> None:
        """Make a pass, and note its seconds."""
        began = time.perf_counter()
        self.run.forward_backward(data(2, 32), "cross_entropy").result()
        self.passes.append(time.perf_counter() - began)

    def draw(self, samples: int, tokens: int) -> None:
        """Draw samples beside each other, and note the tokens of a second."""
        prompt = ModelInput.from_ints(list(range(3, 19)))
        began = time.perf_counter()
        futures = [
            self.sampler.sample(prompt, 1, SamplingParams(max_tokens=tokens, seed=seed))
            for seed in range(samples)
        ]
        drawn = sum(len(future.result().sequences[0].tokens) for future in futures)
        self.rates.append(drawn / (time.perf_counter() - began))


def measure_link(args: argparse.Namespace) -> Iterator[Row]:
    """Compare each kind of engine in process and through each kind of link."""
    for link in ("local:1", *(["ray"] if importlib.util.find_spec("ray") else [])):
        place = "a child" if link == "local:1" else "an actor of Ray"
        for model in ("fake", "tinkex/tiny"):
            with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
                folders = [Path(first), Path(second)]
                sides = compare(link, model, folders, args.quick)
                steps = [read_steps(folder, len(sides[0].passes)) for folder in folders]
            yield from link_rows(f"{model}, through {place}", sides, steps)


def compare(link: str, model: str, folders: list[Path], is_quick: bool) -> list[Side]:
    """Return the figures in process and through a link."""
    if model == "fake":
        recipe, inside = (
            Recipe(FAKE, options={"step_delay": FAKE_STEP}),
            FakeEngine(step_delay=FAKE_STEP),
        )
    else:
        inside = timed_tiny(str(folders[0] / STEPS))
        recipe = Recipe("simulated:timed_tiny", options={"path": str(folders[1] / STEPS)})
    fleet = fleet_of(link, recipe, 1, folders[1])
    with opened(inside, folders[0]) as one, opened(fleet, folders[1]) as other:
        sides = [Side(one, model), Side(other, model)]
        take_turns(sides, 40 if is_quick else 200, 2 if is_quick else 6)
    return sides


def read_steps(folder: Path, count: int) -> list[float]:
    """Return the seconds of an engine's last passes, if they were noted."""
    path = folder / STEPS
    return [float(line) for line in path.read_text().split()][-count:] if path.exists() else []


def link_rows(name: str, sides: list[Side], steps: list[list[float]]) -> Iterator[Row]:
    """Yield the figures of a link."""
    here, there = sides
    before, after = (1000 * statistics.median(side.passes) for side in sides)
    added = 1000 * median_of(operator.sub, there.passes, here.passes)
    shown = f"{added:.1f} ms ({before:.1f} in process, {after:.1f})"
    yield Row(f"pass, {name}: added at the median", shown, "<= 10 ms", added <= 10)
    if all(steps):
        beside = [
            list(map(operator.sub, side.passes, noted))
            for side, noted in zip(sides, steps, strict=True)
        ]
        added = 1000 * median_of(operator.sub, beside[1], beside[0])
        yield Row("of it, outside of the engine's step", f"{added:.1f} ms")
    before, after = (statistics.median(side.rates) for side in sides)
    ratio = median_of(operator.truediv, there.rates, here.rates)
    shown = f"{ratio:.2f} of in process ({before:,.0f}, {after:,.0f})"
    yield Row(f"sampling, {name}: tokens a second", shown, ">= 0.85", ratio >= 0.85)


def median_of(
    function: Callable[[float, float], float], first: list[float], second: list[float]
) -> float:
    """Return the median over pairs, each measured one right after the other."""
    return statistics.median(map(function, first, second))


def take_turns(sides: list[Side], passes: int, draws: int) -> None:
    """Measure two servers in turns, the first of a turn changing."""
    for side in sides:
        side.train()
        side.draw(4, 4)
        side.passes.clear()
        side.rates.clear()
    for turn in range(passes):
        for side in sides if turn % 2 else sides[::-1]:
            side.train()
    for turn in range(draws):
        for side in sides if turn % 2 else sides[::-1]:
            side.draw(64, 32)


# ── scaling ───────────────────────────────────────────────────────────────────────────────────────


def measure_scaling(args: argparse.Namespace) -> Iterator[Row]:
    """Train many runs, and sample one checkpoint, on more and more replicas."""
    options = {"delay": 0.0, "step_delay": DRAW_SECONDS, "slots": SLOTS}
    trained: dict[int, float] = {}
    drawn: dict[int, float] = {}
    for replicas in (1, 2, MOST):
        for kind, rates, measured in (
            ({"delay": PASS_SECONDS}, trained, train_many),
            (options, drawn, sample_many),
        ):
            recipe = Recipe("simulated:SimulatedEngine", options=kind)
            with tempfile.TemporaryDirectory() as folder:
                fleet = fleet_of(f"local:{replicas}", recipe, replicas, Path(folder))
                with opened(fleet, Path(folder)) as service:
                    rates[replicas] = measured(service, 6.0 if args.quick else 20.0)
    for name, rates, unit in (
        (f"training of {4 * MOST} runs", trained, "steps a second"),
        ("samples of one checkpoint", drawn, "tokens a second"),
    ):
        for replicas in (1, 2, MOST):
            share = rates[replicas] / (replicas * rates[1])
            yield Row(
                f"{name}, {replicas} replicas",
                f"{rates[replicas]:,.1f} {unit}, {share:.3f} of linear",
                "" if replicas == 1 else ">= 0.95",
                None if replicas == 1 else share >= 0.95,
            )


def train_many(service: ServiceClient, seconds: float) -> float:
    """Return the steps a second of many runs, each with two steps under way."""
    runs = [
        service.create_lora_training_client("fake", rank=4, seed=number).result()
        for number in range(4 * MOST)
    ]
    batch = data(1, 32)
    steps: list[float] = []
    end = time.perf_counter() + WARM_SECONDS + seconds

    def loop(run: Any) -> None:
        under_way: list[Any] = []
        while time.perf_counter() < end:
            run.forward_backward(batch, "cross_entropy")
            under_way.append(run.optim_step(ADAM))
            if len(under_way) == 2:
                under_way.pop(0).result()
                steps.append(time.perf_counter())
        for future in under_way:
            future.result()

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(loop, runs))
    return sum(end - seconds <= at < end for at in steps) / seconds


WARM_SECONDS = 3.0


def sample_many(service: ServiceClient, seconds: float) -> float:
    """Return the tokens a second of one checkpoint, with more samples than all replicas take."""
    run = service.create_lora_training_client("fake", rank=4, seed=1).result()
    path = run.save_weights_for_sampler("kept").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    prompt, tokens = ModelInput.from_ints(list(range(3, 19))), 40
    ended: list[float] = []
    end = time.perf_counter() + WARM_SECONDS + seconds

    def loop(number: int) -> None:
        seed = 1000 * number
        while time.perf_counter() < end:
            seed += 1
            params = SamplingParams(max_tokens=tokens, seed=seed)
            sampler.sample(prompt, 1, params).result()
            ended.append(time.perf_counter())

    count = MOST * SLOTS * 3 // 2
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(loop, range(count)))
    return tokens * sum(end - seconds <= at < end for at in ended) / seconds


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served(
    folder: Path, delay: float = 0.0, workers: str = "local:2", keep_read: float | None = None
) -> Iterator[tuple[int, str]]:
    """Serve fake engines from a process of its own; yield its id and address."""
    command = [sys.executable, str(HERE / "served.py"), "--delay", str(delay)]
    command += ["--workers", workers]
    command += ["--keep-read", str(keep_read)] if keep_read is not None else []
    command += ["--port", "0", "--data-dir", str(folder), "--no-hub-cache", "--log-level", "error"]
    command += ["--engine", "fake"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        try:
            yield process.pid, found.group()
        finally:
            process.terminate()
            process.wait(60)


def children(pid: int) -> list[int]:
    """Return the worker processes of a server."""
    found = []
    for task in Path("/proc", str(pid), "task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return sorted(found)


def measure_deaths(args: argparse.Namespace) -> Iterator[Row]:
    """Compare submits while a replica dies with submits while none does."""
    calm: list[list[float]] = []
    dying: list[list[float]] = []
    kills = wrong = 0
    for _ in range(1 if args.quick else 3):
        for values, is_dying in ((calm, False), (dying, True)):
            told, killed = load(args, is_dying)
            kills += killed
            wrong += told["lost"] + told["different"] + told["counts"].get("asample twice", 0)
            values.append(
                [
                    seconds
                    for name, found in told["latencies"].items()
                    if name.startswith("load ")
                    for seconds in found
                ]
            )
    before, after = (
        1000 * statistics.median(quantile(found, 0.99) for found in values)
        for values in (calm, dying)
    )
    middle, under = (
        1000 * statistics.median(quantile(found, 0.5) for found in values)
        for values in (calm, dying)
    )
    yield Row("submits, nobody dies: p50, p99", f"{middle:.1f}, {before:.1f} ms")
    yield Row(
        f"submits, a replica dies ({kills} kills): p50, p99",
        f"{under:.1f}, {after:.1f} ms",
        "p99 within 10 %",
        after <= 1.1 * before,
    )
    yield Row("results lost, told twice or different", f"{wrong}", "0", wrong == 0)


def load(args: argparse.Namespace, is_dying: bool) -> tuple[dict[str, Any], int]:
    """Put a fleet under load; return the clients' figures and the number of kills."""
    command = [sys.executable, str(SERVER / "load.py"), "--model", "fake"]
    command += ["--clients", "64", "--samples", "64", "--tokens", "32"]
    command += ["--seconds", "10" if args.quick else "20"]
    command += ["--core", str(max(os.sched_getaffinity(0)))]
    over, kills = threading.Event(), 0

    def kill(pid: int) -> None:
        nonlocal kills
        while not over.wait(KILL_SECONDS):
            if workers := children(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(workers[0], signal.SIGKILL)
                    kills += 1

    with tempfile.TemporaryDirectory() as folder, served(Path(folder), SERVED_DELAY) as (pid, url):
        with subprocess.Popen(
            [*command, "--url", url], env=environment(), stdout=subprocess.PIPE, text=True
        ) as clients:
            assert clients.stdout is not None
            said: dict[str, Any] = {}
            for line in clients.stdout:
                said = json.loads(line)
                if said.get("mark") == "full" and is_dying:
                    threading.Thread(target=kill, args=(pid,), daemon=True).start()
                elif said.get("mark") == "held":
                    over.set()
        over.set()
        if clients.returncode or "latencies" not in said:
            raise SystemExit(f"the clients ended with {clients.returncode}")
    return said, kills


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


def measure_memory(args: argparse.Namespace) -> Iterator[Row]:
    """Read the memory of the head as operations pass, each time when it has forgotten results."""
    most, parts = (2_000, 2) if args.quick else (10_000, 5)
    for workers in ("local", "local:2"):
        readings = []
        with (
            tempfile.TemporaryDirectory() as folder,
            served(Path(folder), workers=workers, keep_read=1.0) as (pid, url),
            ServiceClient(base_url=url, api_key="tml-bench") as service,
        ):
            gauge = Gauge(pid)
            runs = [Worked(service, number) for number in range(4)]
            for _ in range(parts):
                with ThreadPoolExecutor(len(runs)) as pool:
                    list(pool.map(Worked.work, runs, [most // parts // len(runs)] * len(runs)))
                time.sleep(SWEPT_SECONDS)
                readings.append(gauge.read().memory)
        grown = readings[-1] - readings[0]
        where = "engine in the head" if workers == "local" else "two workers"
        yield Row(
            f"memory of the head after each {most // parts:,} of {most:,} operations, {where}",
            f"{', '.join(f'{reading:.0f}' for reading in readings)} MB",
            f"grows by < {GROWTH_MB:.0f} MB",
            grown < GROWTH_MB,
        )


class Worked:
    """A run and its sampler that are kept busy."""

    def __init__(self, service: ServiceClient, number: int) -> None:
        self.run = service.create_lora_training_client("fake", rank=4, seed=number).result()
        self.sampler = self.run.save_weights_and_get_sampling_client().result()

    def work(self, operations: int) -> None:
        """Carry out operations: of five, two passes, two steps and a sample."""
        batch, futures = data(2, 64), deque[Any]()
        prompt, params = ModelInput.from_ints([3, 4, 5]), SamplingParams(max_tokens=4, seed=1)
        for _ in range(operations // 5):
            for _ in range(2):
                futures.append(self.run.forward_backward(batch, "cross_entropy"))
                futures.append(self.run.optim_step(ADAM))
            futures.append(self.sampler.sample(prompt, 1, params))
            while len(futures) > 10:
                futures.popleft().result()
        for future in futures:
            future.result()


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "link": measure_link,
    "scaling": measure_scaling,
    "deaths": measure_deaths,
    "memory": measure_memory,
}


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="Measure engines in other processes.")
    parser.add_argument("--quick", action="store_true", help="a minute or two, smaller sizes")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help=f"parts to measure, of {','.join(PARTS)}",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(PARTS)}")
    print(
        f"tinkex {tinkex.__version__}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {platform.machine()}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| figure | measured | target | |\n|---|--:|---|---|", flush=True)
    for name in args.only:
        for row in PARTS[name](args):
            print(row, flush=True)


if __name__ == "__main__":
    main()
