"""The server is killed again and again while it trains, saves and samples: no client gets anything
but what was due.

Deaths come around every flush, rename and removal in turn, in the middle of writes, and at random
moments of the clock; to our client and to the official one; mostly over the fake engine, some over
the real one. After each run of the loop everything it was given and everything that was saved is
compared, to the bit, with a run that nobody disturbed. `make crash` runs it and prints what was
counted; `CRASH_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from supervision import Death, Toll, files_of, run_loop, supervised
from support import MODEL

CLIENTS = ("tinkex", "tinker")
STEPS = {"fake": 12, MODEL: 6}
FAKE_KILLS = {
    "tinkex": {"flush": 126, "write": 40, "clock": 20},
    "tinker": {"flush": 60, "write": 30, "clock": 15},
}
"""How many kills there are to be at least, by client and kind, over the fake engine …"""
REAL_KILLS = {"flush": 4, "write": 4, "clock": 4}
"""… and over the real one."""
DEATHS_PER_RUN = {"fake": 10, MODEL: 4}


@dataclass(frozen=True)
class Scene:
    """One row of the table."""

    client: str
    model: str
    kind: str


def deaths(scene: Scene, rng: random.Random) -> Iterator[Death]:
    """Deaths without end: each n-th event in turn, writes and moments by chance."""
    if scene.kind == "flush":
        # Each in turn, before and after it; far apart within a run, so that lives which replay much
        # get beyond that.
        for start in count(2 if scene.client == "tinkex" else 9):
            yield from (
                Death("flush", 2 * event + start % 2) for event in range(1 + start // 2 % 7, 60, 7)
            )
    while scene.kind == "write":
        yield Death("write", rng.randrange(1, 45))
    while True:
        yield (
            Death("start", rng.uniform(0, 2))
            if rng.random() < 0.2
            else Death("clock", rng.uniform(0, 1.5))
        )


Undisturbed = Callable[[str, str], tuple[dict[str, Any], dict[str, str]]]


def play(
    scene: Scene, kills: int, place: Path, undisturbed: Undisturbed, model_dir: Path, seed: int
) -> Toll:
    """Run the loop until the server has been killed often enough; results must not change."""
    rng = random.Random(f"{seed} {scene}")
    due, total = deaths(scene, rng), Toll()
    expected, files = undisturbed(scene.client, scene.model)
    for number in count():
        data_dir = place / f"{scene.client}-{scene.model.replace('/', '-')}-{scene.kind}-{number}"
        chosen = [next(due) for _ in range(DEATHS_PER_RUN[scene.model])]
        with supervised(
            data_dir, chosen, model_dir if scene.model == MODEL else None, rng
        ) as server:
            given = run_loop(server.base_url, scene.client, scene.model, STEPS[scene.model])
        where = f"{scene}, run {number}, seed {seed}, {chosen}"
        assert given == expected, where
        assert files_of(data_dir) == files, where
        total.add(server.toll)
        if total.kills >= kills:
            return total
    raise AssertionError


HEAD = (
    "client  engine  death   runs  lives  kills  in the middle of a write (record, directory, "
    "database)"
)


def row(scene: Scene, toll: Toll) -> str:
    """A line of the table."""
    torn = ", ".join(str(toll.torn[kind]) for kind in ("record", "directory", "database"))
    engine = "fake" if scene.model == "fake" else "torch"
    counts = f"{toll.runs:5} {toll.lives:6} {toll.kills:6}  {toll.mid_write:4} ({torn})"
    return f"{scene.client}  {engine:6}  {scene.kind:6} {counts}"


def summary(tolls: dict[Scene, Toll], seconds: float, seed: int) -> str:
    """All of it in one line."""
    sums: defaultdict[str, Toll] = defaultdict(Toll)
    for scene, toll in tolls.items():
        sums[scene.client].add(toll)
    parts = [
        f"{client} {toll.kills} kills ({toll.mid_write} in the middle of a write) over {toll.runs} "
        "runs"
        for client, toll in sums.items()
    ]
    return (
        f"crash test: {'; '.join(parts)}; all results and files bit-equal; seed {seed}, "
        f"{seconds:.0f} s"
    )


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(1800)
def test_server_restarts_are_invisible_to_clients(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(1_000_000))
    with capsys.disabled():
        print(f"\nCRASH_SEED={seed}", flush=True)
    began = time.monotonic()
    calm: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]] = {}
    for model in STEPS:
        for client in CLIENTS:
            data_dir = tmp_path / f"calm-{client}-{model.replace('/', '-')}"
            with supervised(data_dir, [], model_dir if model == MODEL else None) as server:
                given = run_loop(server.base_url, client, model, STEPS[model])
            calm[client, model] = given, files_of(data_dir)
            assert len(calm[client, model][1]) > 5
        assert calm["tinkex", model] == calm["tinker", model]
    scenes = {
        Scene(client, model, kind): kills
        for client in CLIENTS
        for model, wanted in (("fake", FAKE_KILLS[client]), (MODEL, REAL_KILLS))
        for kind, kills in wanted.items()
    }
    with ThreadPoolExecutor(2) as pool:
        scene_of = {
            pool.submit(
                play, scene, kills, tmp_path, lambda c, m: calm[c, m], model_dir, seed
            ): scene
            for scene, kills in scenes.items()
        }
        with capsys.disabled():
            print(HEAD, flush=True)
            for done in as_completed(scene_of):
                if done.exception() is not None:
                    pool.shutdown(wait=False, cancel_futures=True)  # no more than what is under way
                print(row(scene_of[done], done.result()), flush=True)
            tolls = {scene: done.result() for done, scene in scene_of.items()}
            print(summary(tolls, time.monotonic() - began, seed), flush=True)
    for client in CLIENTS:
        assert sum(toll.kills for scene, toll in tolls.items() if scene.client == client) >= 50
        assert sum(toll.mid_write for scene, toll in tolls.items() if scene.client == client) >= 20
