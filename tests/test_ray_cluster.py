"""A fleet on a small cluster of Ray: `make cluster`, and the longer `make crash-cluster`.

CLUSTER_KILLS, CLUSTER_RAYLETS and CLUSTER_HEADS say how many deaths there are.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervision import Death, files_of, run_loop, supervised
from support import serving
from test_fleet import SLOW, Killer
from tinkex.cluster.layout import ReplicaPlan, WorkersOption, make_engines
from tinkex.engine.fake import FakeEngine
from tinkex.server.workers import fleet as fleets
from tinkex.server.workers.fleet import Fleet

ray = pytest.importorskip("ray", reason="make cluster has Ray")
STEPS = 8
KILLS = int(os.environ.get("CLUSTER_KILLS", "12"))
RAYLETS = int(os.environ.get("CLUSTER_RAYLETS", "1"))
HEADS = int(os.environ.get("CLUSTER_HEADS", "0"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 20))))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        made.add_node(num_cpus=2)
    from tinkex.cluster.ray_link import join

    join(made.address)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with serving(FakeEngine(), data_dir) as url:
        given = run_loop(url, "tinkex", "fake", STEPS)
    return given, files_of(data_dir)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "FIRST_PAUSE", 0.02)


def fleet_at(cluster: Any, data_dir: Path, count: int = 2) -> Fleet:
    plans = [ReplicaPlan("abcd"[number], SLOW) for number in range(count)]
    return Fleet(make_engines(WorkersOption("ray", 1, cluster.address), plans, data_dir))


@pytest.mark.covers("K2")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("client", ["tinkex", "tinker"])
def test_cluster_gives_both_clients_the_same_bits(
    cluster: Any, undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, client: str
) -> None:
    with serving(fleet_at(cluster, tmp_path), tmp_path) as url:
        assert run_loop(url, client, "fake", STEPS) == undisturbed[0]
    assert files_of(tmp_path) == undisturbed[1]


@pytest.mark.covers("K5")
@pytest.mark.timeout(180 + 20 * KILLS)
def test_killed_workers_lose_and_double_nothing(
    cluster: Any, undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    kills = number = 0
    while kills < KILLS:
        data_dir, number = tmp_path / str(number), number + 1
        fleet = fleet_at(cluster, data_dir)
        with serving(fleet, data_dir) as url, Killer(fleet, 0.5) as killer:
            assert run_loop(url, "tinkex", "fake", STEPS) == undisturbed[0]
        assert files_of(data_dir) == undisturbed[1]
        kills += killer.kills
    print(f"{kills} kills of workers")


@pytest.mark.covers("K5", "K6")
@pytest.mark.timeout(120 + 60 * RAYLETS)
def test_killed_raylet_loses_and_doubles_nothing(
    cluster: Any, undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    for number in range(RAYLETS):
        data_dir = tmp_path / str(number)
        node = cluster.add_node(num_cpus=2)
        with serving(fleet_at(cluster, data_dir), data_dir) as url:
            [process] = node.all_processes["raylet"]
            import threading

            timer = threading.Timer(1.0, process.process.kill)
            timer.start()
            assert run_loop(url, "tinkex", "fake", STEPS) == undisturbed[0]
            timer.join()
        assert files_of(data_dir) == undisturbed[1]
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.covers("K5")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HEADS, reason="make crash-cluster kills heads")
def test_killed_head_takes_its_workers_over(
    cluster: Any,
    undisturbed: tuple[dict[str, Any], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKEX_TEST_FLEET", f"ray:{cluster.address}")
    rng, kills, number = random.Random(SEED), 0, 0
    while kills < HEADS:
        data_dir, number = tmp_path / str(number), number + 1
        deaths = [Death("clock", rng.uniform(0.5, 3.0)) for _ in range(min(2, HEADS - kills))]
        with supervised(data_dir, deaths) as server:
            assert run_loop(server.base_url, "tinkex", "fake", STEPS) == undisturbed[0], SEED
            kills += server.toll.kills
        assert files_of(data_dir) == undisturbed[1]
    print(f"{kills} kills of heads, seed {SEED}")


def test_workers_log_and_leave_nothing_behind(cluster: Any, tmp_path: Path) -> None:
    fleet = fleet_at(cluster, tmp_path)
    with serving(fleet, tmp_path):
        pids = [
            int(engine.process.info.place.rpartition(" ")[2])
            for engine in fleet._engines
            if engine.process.info is not None
        ]
        assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
