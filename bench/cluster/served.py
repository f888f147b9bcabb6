"""`tinkex serve` with a fleet of fake engines, in a process of its own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tinkex.cli import serve as command
from tinkex.cluster.layout import ReplicaPlan, WorkersOption, make_engines
from tinkex.cluster.link import Recipe
from tinkex.engine.fake import FakeEngine
from tinkex.server.runs import promises, snapshot
from tinkex.server.workers.fleet import Fleet


def fake_fleet(workers: str, replicas: int, data_dir: Path, **options: Any) -> Fleet:
    """Return a fleet of fake engines."""
    recipe = Recipe("tinkex.engine.fake:FakeEngine", options=options)
    return fleet_of(workers, recipe, replicas, data_dir)


def fleet_of(workers: str, recipe: Recipe, replicas: int, data_dir: Path) -> Fleet:
    """Return a fleet of equal engines."""
    plans = [ReplicaPlan(f"worker-{number}", recipe) for number in range(replicas)]
    return Fleet(make_engines(WorkersOption.parse(workers), plans, data_dir))


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="local:2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--keep-read", type=float, help="seconds that read results are kept")
    args, rest = parser.parse_known_args()
    if args.keep_read is not None:
        promises.KEEP_READ = promises.JUST_READ = snapshot.JUST_READ = args.keep_read

    delays = {"delay": args.delay, "step_delay": args.delay}

    def make_fleet(*_: object, data_dir: Path, **options: object) -> Fleet | None:
        if args.workers == "local":
            return None
        return fake_fleet(args.workers, args.replicas, data_dir, **delays)

    command.make_fleet = make_fleet
    command.make_engine = lambda *_: FakeEngine(**delays)  # type: ignore[assignment]
    command.serve(rest)


if __name__ == "__main__":
    main()
