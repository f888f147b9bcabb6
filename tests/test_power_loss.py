"""A busy server loses its power at any moment: what it acknowledged is there, keys stay keys, no
run is deleted.

One life is recorded, call by call (`disk_recorder.c`). A disk is played from the records up to 200
moments, and keeps what was flushed, with or without some of the rest. On each a server starts and
is asked for everything that was acknowledged by then; then both stories are told to it from the
beginning, and end as they did without the loss.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from busy_server import OWNERS, Owner, heard, loaded, story, write_states_often
from power_loss import Disk, records
from test_survival import Life, life
from tinkex.server.runs import snapshot

MOMENTS = 200


def recorded_life(root: Path) -> list[dict[str, Any]]:
    """Live in a process of its own, with a record of every write; what was heard."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("recording what a process writes takes Linux and a C compiler (cc)")
    source, library = Path(__file__).with_name("disk_recorder.c"), root.with_name("recorder.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    root.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(root.with_name("records")),
    }
    program = Path(__file__).with_name("busy_server.py")
    subprocess.run(
        [sys.executable, str(program), str(root)], env=environment, check=True, timeout=120
    )
    return [json.loads(line) for line in (root / "heard").read_text().splitlines()]


def same_files(one: Path, other: Path) -> bool:
    def files(root: Path) -> dict[str, bytes]:
        found = (
            path for path in root.rglob("*") if path.is_file() and not path.name.endswith("-shm")
        )
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    return files(one) == files(other)


class Expected:
    """What a life without a loss gives: the result of each step, and of a pass with each
    checkpoint."""

    def __init__(self, owners: dict[str, Owner]) -> None:
        self.results = {name: owner.results for name, owner in owners.items()}
        self.passes: dict[tuple[str, str], Any] = {}

    async def learn_passes(self, server: Life, owners: dict[str, Owner]) -> None:
        for owner in owners.values():
            for path in saved(owner, list(owner.results)):
                self.passes[owner.name, path] = await loaded(
                    server, owner, path.replace("{s}", str(owner.session))
                )
                assert "error" not in self.passes[owner.name, path]


def saved(owner: Owner, steps: list[int]) -> list[str]:
    """The checkpoints that some steps saved."""
    return [
        f"tinker://{{s}}:train:0/weights/{step.body['path']}"
        for number, step in enumerate(story(owner.name))
        if step.path == "save_weights" and number in steps
    ]


async def check(server: Life, owners: dict[str, Owner], expected: Expected) -> int:
    """Ask for what was acknowledged; how many things that were."""
    assert {key.owner for key in server.state.database.keys.all()} >= set(owners)
    asked = 0
    if owners:
        assert (await server.send("training_runs", None, method="GET"))[0] == 401, (
            "the server is open"
        )
    for owner in owners.values():
        status, runs = await server.send("training_runs", None, owner.key, "GET")
        assert status == 200, runs
        asked += 1
        if owner.session is None:
            continue
        made = {run["training_run_id"] for run in runs["training_runs"]}
        results, steps = expected.results[owner.name], story(owner.name)
        if 0 in owner.results:
            assert f"{owner.session}:train:0" in made
        if not owner.ended:
            assert server.state.database.sessions.state(owner.session) == "active"
            for number, request_id in owner.taken.items():
                if not steps[number].is_future or (
                    steps[number].path == "asample" and number in owner.results
                ):
                    continue  # a sample that was read is not kept for ever
                answer = await server.result(request_id, owner.key)
                assert owner.plain(answer) == results[number], (
                    owner.name,
                    number,
                    steps[number].path,
                )
                asked += 1
        elif owner.ended == "told":
            assert server.state.database.sessions.state(owner.session) == "finished"
        for path in saved(owner, list(owner.results)):
            found = await loaded(server, owner, path.replace("{s}", owner.session))
            assert found == expected.passes[owner.name, path], path
            asked += 1
        if not owner.ended:
            await tell_again(server, owner, results)
    return asked


async def tell_again(server: Life, owner: Owner, results: dict[int, Any]) -> None:
    """Send a story from its beginning, as a client does that heard no answer; the numbers are those
    of before."""
    assert owner.session is not None
    for number, step in enumerate(story(owner.name)):
        answer = await server.post(*step.of(owner.session), owner.key)
        if step.is_future:
            result = await server.result(answer["request_id"], owner.key)
            assert owner.plain(result) == results[number], (owner.name, number, step.path)


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(1800)
def test_power_loss_keeps_everything_acknowledged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(1_000_000))
    with capsys.disabled():
        print(f"\nCRASH_SEED={seed}", flush=True)
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", snapshot.STATE_OPERATIONS)
    monkeypatch.setattr(snapshot, "STATE_REST", snapshot.STATE_REST)
    write_states_often()
    caplog.set_level(logging.CRITICAL)
    rng, root = random.Random(seed), tmp_path / "root"
    lines = recorded_life(root)
    calls = list(records(tmp_path / "records"))
    whole: dict[str, Owner] = {}
    for line in lines:
        heard(line, whole)
    assert set(whole) == set(OWNERS)
    assert all(len(owner.results) > 15 for owner in whole.values())
    assert not [
        result for owner in whole.values() for result in owner.results.values() if "error" in result
    ]
    expected = Expected(whole)

    ack_path = os.fsencode(root / "heard")
    paths: dict[int, bytes] = {}
    acknowledged = [0]
    for number, call in enumerate(calls):
        if call.op == "o":
            paths[call.fd] = call.first
        elif call.op == "w" and paths[call.fd] == ack_path:
            acknowledged.append(number + 1)
    moments = sorted(
        rng.sample(range(1, len(calls)), MOMENTS - len(acknowledged)) + acknowledged[:MOMENTS]
    )

    disk, told, played, asked = Disk(root), 0, 0, 0
    owners: dict[str, Owner] = {}

    async def start(image: Path) -> int:
        async with life(image) as server:
            return await check(server, owners, expected)

    last = Disk(root)
    for call in calls:
        last.play(call)
    last.everything(tmp_path / "all")
    assert same_files(tmp_path / "all", root), "the records are not complete"
    asyncio.run(learn(tmp_path / "all" / "data", expected, whole))
    for index, moment in enumerate(moments):
        for call in calls[played:moment]:
            if disk.play(call) == ack_path:
                heard(lines[told], owners)
                told += 1
        played = moment
        image = tmp_path / f"image-{index}"
        disk.leave(image, rng if index % 3 else None)
        (image / "data").mkdir(exist_ok=True)
        try:
            asked += asyncio.run(asyncio.wait_for(start(image / "data"), 60))
        except BaseException as error:
            error.add_note(
                f"moment {moment} of {len(calls)}, image {index}, CRASH_SEED={seed}: {image}"
            )
            raise
        shutil.rmtree(image, ignore_errors=True)
    with capsys.disabled():
        print(
            f"power loss: {len(moments)} moments of {len(calls)} calls, {asked} acknowledged "
            "things asked for"
        )
    assert asked > 10 * MOMENTS


async def learn(image: Path, expected: Expected, owners: dict[str, Owner]) -> None:
    async with life(image) as server:
        await expected.learn_passes(server, owners)
