"""Run tinkex and the official client side by side on the same work against the same null server,
and print ratios.

python bench/client/run.py [--quick] [--only NAME] [--json FILE]

The null server has one core to itself, the client under measurement the other. Each measurement is
a process of its own. CPU time is that of all threads of the client's process.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLIENTS = ("tinkex", "tinker")
GROUPS = ("import", "help", "sampling", "forward_backward", "idle", "growth")
ENVIRONMENT = {"TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}


@dataclass
class Row:
    """One line of the table: a figure of both clients, the smaller the better."""

    group: str
    name: str
    unit: str
    tinkex: float
    tinker: float
    target: str = ""
    met: bool | None = None

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.tinkex / self.tinker if self.tinker else float("nan")


def cores() -> tuple[int, int]:
    """A core for the server and one for the client; the same one where there is no second."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[-1]


def environment() -> dict[str, str]:
    """What a client's process finds in its environment: a key, no telemetry, no proxies."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return kept | ENVIRONMENT


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Have tinkex imported from byte code, as an installed wheel is, even where it is installed
    from its sources.
    """
    found = importlib.util.find_spec("tinkex")
    assert found is not None
    assert found.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(found.origin).parent, Path(folder, "tinkex"))
        compileall.compile_dir(folder, quiet=1)
        ENVIRONMENT["PYTHONPATH"] = folder
        yield


def spent(command: list[str]) -> tuple[float, float, str]:
    """CPU seconds, wall seconds and output of a command, pinned to the client's core."""
    core = cores()[1]
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begun, output


class Bench:
    """One run of the whole comparison."""

    def __init__(self, quick: bool, samples: int) -> None:
        self.quick = quick
        self.hold = 6 if quick else 20
        self.samples = samples
        self.rows: list[Row] = []
        self.ports: list[int] = []

    @contextlib.contextmanager
    def server(self, hold: float) -> Iterator[None]:
        """The null server, for as long as it is needed."""
        command = [
            sys.executable,
            str(HERE / "null_server.py"),
            "--core",
            str(cores()[0]),
            "--hold",
            str(hold),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            self.ports = json.loads(process.stdout.readline())
            try:
                yield
            finally:
                process.terminate()

    def subject(self, client: str, case: str, *, batched: bool = False, **options: Any) -> Any:
        """One measurement of one client."""
        url = f"http://127.0.0.1:{self.ports[batched]}"
        command = [sys.executable, str(HERE / "subject.py"), client, case, "--base-url", url]
        command += ["--core", str(cores()[1])]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return json.loads(spent(command)[2].splitlines()[-1])

    def both(self, case: str, **options: Any) -> tuple[Any, Any]:
        """One measurement of both clients; where they decode the same bytes, they must have read
        the same values.
        """
        ours, theirs = (self.subject(client, case, **options) for client in CLIENTS)
        if ours.get("digest") != theirs.get("digest"):
            raise SystemExit(f"{case}: the clients read different values from the same bytes")
        return ours, theirs

    def add(
        self,
        group: str,
        name: str,
        unit: str,
        ours: float,
        theirs: float,
        *,
        ratio: float | None = None,
        most: float | None = None,
    ) -> None:
        """Add a row, with the ratio or the figure that it is to stay under."""
        row = Row(group, name, unit, ours, theirs)
        if ratio is not None:
            row.target, row.met = f"ratio <= {ratio:.3g}", row.ratio <= ratio
        elif most is not None:
            row.target, row.met = f"<= {most:g} {unit}", ours <= most
        self.rows.append(row)
        print(show(row), flush=True)

    def imports(self) -> None:
        """Importing alone, and importing what a program needs first."""
        repeats = 1 if self.quick else 5
        for name, after in (
            ("import", ""),
            ("import, ServiceClient and types", "; m.ServiceClient; m.types.Datum"),
        ):
            code = (
                f"import time; a = time.process_time(); import {{}} as m{after}; "
                "print(time.process_time() - a)"
            )
            figures = []
            for client in CLIENTS:
                command = [sys.executable, "-c", code.format(client)]
                figures.append(median([float(spent(command)[2]) for _ in range(repeats)]))
            self.add("import", name, "CPU s", *figures, most=0.15)
        rounds = [self.both("sampling", plan="1:1") for _ in range(repeats)]
        figures = [median([pair[index]["first"] for pair in rounds]) for index in (0, 1)]
        self.add("import", "from the start of Python to the first sample", "CPU s", *figures)

    def helps(self) -> None:
        """The whole process behind `--help`."""
        figures = []
        for client in CLIENTS:
            command = [str(Path(sys.executable).parent / client), "--help"]
            figures.append([spent(command)[:2] for _ in range(1 if self.quick else 5)])
        for index, (name, unit) in enumerate((("--help", "CPU s"), ("--help, wall", "s"))):
            ours, theirs = (median([sample[index] for sample in samples]) for samples in figures)
            self.add("help", name, unit, ours, theirs)

    def sampling(self) -> None:
        """A sample at three concurrencies, in both polling modes."""
        plan = "1:100,64:500,512:1000" if self.quick else "1:500,64:4000,512:6000"
        for batched in (False, True):
            if batched and self.quick:
                continue
            ours, theirs = self.both("sampling", batched=batched, plan=plan)
            mode = "batched polling" if batched else "a poll per future"
            for width in ("1", "64", "512"):
                name = f"sample, {width} in flight, {mode}"
                target = None if width == "1" else 0.2
                self.add(
                    "sampling",
                    name,
                    "CPU ms",
                    *(1e3 * r[width]["cpu"] for r in (ours, theirs)),
                    ratio=target,
                )
                self.add(
                    "sampling",
                    f"{name}, wall",
                    "ms",
                    *(1e3 * r[width]["wall"] for r in (ours, theirs)),
                )

    def passes(self) -> None:
        """forward_backward of three kinds of input at two sizes."""
        for count in (128,) if self.quick else (128, 1024):
            for kind in ("numpy", "torch", "list"):
                repeats = 5 if self.quick else 61 if count == 128 else 15
                both = self.both("forward_backward", kind=kind, count=count, repeats=repeats)
                name = f"forward_backward, {count:,} x 2,048, {kind}"
                target = 1 / 2 if kind == "list" else 1 / 3
                group = "forward_backward"
                self.add(group, name, "CPU s/Mtok", *(r["cpu"] for r in both), ratio=target)
                self.add(group, f"{name}, wall", "s/Mtok", *(r["wall"] for r in both))
                self.add(
                    group,
                    f"{name}, peak memory",
                    "MB",
                    *(r["peak"] / 1e6 for r in both),
                    ratio=1 / 2,
                )

    def idle(self) -> None:
        """What 500 futures cost that nothing happens to."""
        seconds = self.hold
        for batched in (False,) if self.quick else (False, True):
            both = self.both("idle", batched=batched, count=500, seconds=seconds)
            name = (
                f"500 pending futures, {'batched polling' if batched else 'a poll per future'}, "
                f"held {seconds} s"
            )
            self.add("idle", name, "% of a core", *(100 * r["cpu"] for r in both), most=1.0)

    def growth(self) -> None:
        """Memory over many samples."""
        count = 1000 if self.quick else self.samples
        both = self.both("growth", count=count)
        thousands = count * 0.9 / 1000
        name = f"memory growth over {count:,} samples"
        self.add(
            "growth",
            name,
            "kB/1,000",
            *(max(0.0, r["growth"] / 1000 / thousands) for r in both),
            most=None if self.quick else 20,
        )

    def run(self, only: str | None) -> None:
        """All of it, or one group."""
        with self.server(self.hold):
            for group, step in zip(
                GROUPS,
                (self.imports, self.helps, self.sampling, self.passes, self.idle, self.growth),
                strict=True,
            ):
                if only in (None, group):
                    step()


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def show(row: Row) -> str:
    """A row of the Markdown table."""
    met = {None: "", True: "met", False: "missed"}[row.met]
    ours, theirs = (
        f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in (row.tinkex, row.tinker)
    )
    return (
        f"| {row.name} | {row.unit} | {ours} | {theirs} | {row.ratio:.2f} | {row.target} | {met} |"
    )


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description="Compare tinkex with the official client against a null server."
    )
    parser.add_argument("--quick", action="store_true", help="less of everything; under a minute")
    parser.add_argument("--only", choices=GROUPS, help="one group of rows")
    parser.add_argument(
        "--samples", type=int, default=20_000, help="samples in the memory row (default 20,000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in CLIENTS)
    server, client = cores()
    print(
        f"{versions}; Python {platform.python_version()}, {platform.machine()}; server on core "
        f"{server}, ",
        end="",
    )
    print(
        f"client on core {client}\n\n| | unit | tinkex | tinker | ratio | target | "
        "|\n|---|---|--:|--:|--:|---|---|"
    )
    bench = Bench(args.quick, args.samples)
    begun = time.perf_counter()
    with compiled():
        bench.run(args.only)
    print(f"\n{time.perf_counter() - begun:.0f} s")
    if args.json:
        rows = [asdict(row) | {"ratio": row.ratio} for row in bench.rows]
        args.json.write_text(
            json.dumps({"versions": versions, "quick": args.quick, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
