"""A bit of a data directory flips: no server that starts on it gives another number and says
nothing.

A busy server leaves two directories: one as kill -9 leaves it, one as a clean stop does. Again and
again a bit of one of their files flips, every file in turn and then by chance, and a server starts
and is asked for everything: keys, lists, results, samples, checkpoints, and passes that go on with
the runs. It has to refuse to start and name the file, or to answer the same as without the flip, or
to fail and name the file. Only SQLite's `-shm` is left out: it is made again at every start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from busy_server import Owner, heard, live, loaded, make_keys, story, write_states_often
from support import pass_json, sample_json
from test_power_loss import saved
from test_sampling_records import datum
from test_survival import Life, killed, life
from tinkex.server.database.interface import DatabaseError
from tinkex.server.files.data_dir import DataDirError
from tinkex.server.runs import snapshot

FLIPS = 500
CHANGING = ("last_request_time", "updated_at", "corrupted", "loaded")
"""Fields of a run that tell of its last request, and the mark itself."""


async def busy_images(place: Path) -> tuple[dict[str, Owner], list[Path]]:
    """Two data directories of a busy server, killed and stopped."""
    owners: dict[str, Owner] = {}

    def hear(facts: dict[str, Any]) -> None:
        heard(facts, owners)

    make_keys(place / "stopped", hear)
    async with life(place / "stopped") as server:
        await live(server, owners, hear)
        image = killed(place / "stopped")
    return owners, [image, place / "stopped"]


class Questions:
    """Everything that a server is asked for, each by a name; failures are answers as well."""

    def __init__(self, server: Life) -> None:
        self._server = server
        self.answers: dict[str, Any] = {}

    async def ask(self, name: str, path: str, owner: Owner, body: Any = None) -> Any:
        """A request, and its result if it is a future."""
        status, answer = await self._server.send(
            path, body, owner.key, "GET" if body is None else "POST"
        )
        if status == 200 and isinstance(answer, dict) and "request_id" in answer:
            status, answer = await self._server.send(
                "retrieve_future", {"request_id": answer["request_id"]}, owner.key
            )
        self.answers[f"{owner.name}: {name}"] = (
            answer if status == 200 else {"error": answer, "status": status}
        )
        return answer

    async def all(self, owners: dict[str, Owner]) -> None:
        server = self._server
        self.answers["keys"] = [
            [key.id, key.owner, key.name, key.revoked] for key in server.state.database.keys.all()
        ]
        self.answers["open"] = (await server.send("training_runs", None, method="GET"))[0]
        for owner in owners.values():
            assert owner.session is not None
            runs = await self.ask("runs", "training_runs", owner)
            for run in runs.get("training_runs", []):
                for changing in CHANGING:
                    run.pop(changing, None)
            await self.ask("checkpoints", "checkpoints", owner)
            self.answers[f"{owner.name}: session"] = server.state.database.sessions.state(
                owner.session
            )
            if not owner.ended:
                await self._story(owner, owner.session)
            for path in saved(owner, list(owner.results)):
                try:
                    found = await loaded(server, owner, path.replace("{s}", owner.session))
                except AssertionError as refused:
                    found = {"error": str(refused)}
                self.answers[f"{owner.name}: {path}"] = found

    async def _story(self, owner: Owner, session: str) -> None:
        """Repeat the acknowledged requests, then continue from there."""
        steps = story(owner.name)
        for number, request_id in owner.taken.items():
            # a sample that was read is not kept for ever
            if request_id and steps[number].path != "asample":
                await self.ask(
                    f"result {number}", "retrieve_future", owner, {"request_id": request_id}
                )
        for number, step in enumerate(steps):
            await self.ask(f"again {number}", *_swapped(step.of(session), owner))
        last = max(
            step.body["seq_id"] for step in steps if step.body.get("model_id") == "{s}:train:0"
        )
        await self.ask(
            "next pass",
            "forward_backward",
            owner,
            pass_json(f"{session}:train:0", last + 1, (4, 5, 6)),
        )
        for sampler in (0, 1):
            await self.ask(
                f"sampler {sampler}",
                "asample",
                owner,
                sample_json(f"{session}:sample:{sampler}", 9),
            )
        drawn = [number for number, step in enumerate(steps) if step.path == "asample"]
        for later, number in enumerate(drawn, 2):
            sample = owner.results[number]["sequences"][0] | {"id": f"{owner.taken[number]}:0"}
            body = {
                "data": [datum(sample)],
                "loss_fn": "stable_reinforce",
                "loss_fn_config": {"kl_coeff": 0.0},
            }
            request = {"model_id": f"{session}:train:1", "seq_id": later, "forward_only": True}
            await self.ask(
                f"record {number}",
                "forward_backward",
                owner,
                request | {"forward_backward_input": body},
            )


def _swapped(request: tuple[str, Any], owner: Owner) -> tuple[str, Owner, Any]:
    return request[0], owner, request[1]


class Log(logging.Handler):
    """Keeps what a server says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def observe(image: Path, owners: dict[str, Owner]) -> tuple[dict[str, Any], str]:
    """Start a server and ask it for everything; the answers, and what it said meanwhile."""
    log, logger = Log(), logging.getLogger("tinkex.server")
    logger.addHandler(log)

    async def scenario() -> dict[str, Any]:
        async with life(image) as server:
            questions = Questions(server)
            await questions.all(owners)
            return questions.answers

    try:
        return asyncio.run(asyncio.wait_for(scenario(), 60)), "\n".join(log.lines)
    finally:
        logger.removeHandler(log)


def plain(answers: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(answer, sort_keys=True) for name, answer in answers.items()}


def is_failure(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer


def judged(image: Path, flipped: Path, owners: dict[str, Owner], expected: dict[str, Any]) -> str:
    """Tell in one word how a flip ended; "silent" and what follows is what must not be."""
    names = {flipped.name}
    if flipped.parent != image and flipped.relative_to(image).parts[0] != "recordings":
        names.add(flipped.parent.name)
    try:
        found, said = observe(image, owners)
    except (DataDirError, DatabaseError) as error:
        return (
            "refused"
            if flipped.name.partition("-")[0] in str(error)
            else f"silent about the file: {error!r}"
        )
    other = [name for name, answer in plain(found).items() if answer != plain(expected)[name]]
    if not other:
        return "harmless"
    wrong = [name for name in other if not is_failure(found[name])]
    if wrong:
        return f"silent: {[(name, found[name], expected[name]) for name in wrong]}\n{said}"
    told = said + json.dumps([found[name] for name in other])
    if not any(name in told for name in names):
        return f"silent about the file: {[(name, found[name]) for name in other]}\n{said}"
    return "marked"


def flip(path: Path, rng: random.Random) -> tuple[int, int]:
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return at, bit


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(1800)
def test_flipped_bit_never_gives_another_number_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(1_000_000))
    count = int(os.environ.get("FLIPS") or FLIPS)
    monkeypatch.setattr(snapshot, "STATE_OPERATIONS", snapshot.STATE_OPERATIONS)
    monkeypatch.setattr(snapshot, "STATE_REST", snapshot.STATE_REST)
    write_states_often()
    rng = random.Random(seed)
    owners, images = asyncio.run(busy_images(tmp_path))
    files, expected = [], {}
    for image in images:
        found = [path for path in image.rglob("*") if path.is_file() and path.stat().st_size]
        files += [(image, path) for path in sorted(found) if not path.name.endswith("-shm")]
        copy = tmp_path / "unflipped"
        shutil.copytree(image, copy)
        expected[image], _ = observe(copy, owners)
        shutil.rmtree(copy, ignore_errors=True)
        failures = {name: answer for name, answer in expected[image].items() if is_failure(answer)}
        assert not failures, failures
        assert len(expected[image]) > 40
    database = [(image, path) for image, path in files if path.name.startswith("tinkex.sqlite3")]
    chosen = files + [rng.choice(rng.choice((files, database))) for _ in range(count)]
    ends: Counter[str] = Counter()
    silent = []
    for number, (image, path) in enumerate(chosen[:count]):
        copy = tmp_path / f"flip-{number}"
        shutil.copytree(image, copy)
        flipped = copy / path.relative_to(image)
        at, bit = flip(flipped, rng)
        try:
            end = judged(copy, flipped, owners, expected[image])
        except (Exception, asyncio.CancelledError) as error:
            end = f"silent: {error!r}"
        if end.startswith("silent"):
            silent.append(f"{image.name}/{path.relative_to(image)}, byte {at}, bit {bit}: {end}")
            with capsys.disabled():
                print(silent[-1][:1500], flush=True)
        ends[end.partition(" ")[0].strip(":")] += 1
        shutil.rmtree(copy, ignore_errors=True)
    with capsys.disabled():
        print(
            f"\nbit flips: {dict(ends)} of {count} in {len(files)} files, CRASH_SEED={seed}",
            flush=True,
        )
    assert not silent, f"CRASH_SEED={seed}\n" + "\n".join(silent)
    assert set(ends) == {"refused", "marked", "harmless"}
