"""The life of a busy server with two keyed owners, and the questions that show what a later life
still knows.

Run as a program (ROOT), it lives in ROOT/data and appends what it was answered to ROOT/heard.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import pass_json, sample_json, step_json
from test_survival import Life, life
from tinkex.server.access.keys import create_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.files.data_dir import make_directory
from tinkex.server.runs import snapshot

OWNERS = ("ada", "bob")
Hear = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Step:
    """A request of a story; `{s}` in its path and body stands for the session."""

    path: str
    body: dict[str, Any]
    waits: bool = False
    """True if all results before it are read first."""
    is_future: bool = True

    def of(self, session: str) -> tuple[str, Any]:
        return self.path.replace("{s}", session), json.loads(
            json.dumps(self.body).replace("{s}", session)
        )


def story(owner: str) -> list[Step]:
    """Everything that an owner asks for after the session, in order."""
    first, model = (3 if owner == "ada" else 40), "{s}:train:0"
    session: dict[str, Any] = {"session_id": "{s}"}
    lora = {"base_model": "fake", "lora_config": {"rank": 4}}
    steps = [Step("create_model", session | {"model_seq_id": 0} | lora)]

    def numbered(operation: str, **fields: Any) -> Step:
        return Step(operation, {"model_id": model, "seq_id": len(steps), **fields})

    def train(count: int) -> None:
        for _ in range(count):
            chosen = tuple(range(first + len(steps), first + len(steps) + 4))
            steps.append(Step("forward_backward", pass_json(model, len(steps), chosen)))
            steps.append(Step("optim_step", step_json(model, len(steps), 0.01 * first)))

    train(2)
    steps.append(numbered("save_weights", path="early"))
    steps.append(numbered("save_weights_for_sampler", path="drawn"))
    train(2)
    steps.append(numbered("save_weights_for_sampler", sampling_session_seq_id=0))
    steps.append(
        numbered("load_weights", path="tinker://{s}:train:0/weights/early", optimizer=True)
    )
    train(1)
    steps.append(numbered("save_weights", path="late"))
    recorded = {"record_stability_info": True, "num_samples": 2}
    drawn = session | {
        "sampling_session_seq_id": 1,
        "model_path": "tinker://{s}:train:0/sampler_weights/drawn",
    }
    steps.append(Step("create_sampling_session", drawn, waits=True, is_future=False))
    steps += [
        Step("asample", sample_json(f"{{s}}:sample:{number}", at, **recorded))
        for number in (0, 1)
        for at in (0, 1)
    ]
    path = "tinker://{s}:train:0/weights/late"
    steps.append(
        Step("load_weights", session | {"model_seq_id": 1, "path": path, "optimizer": True})
    )
    steps.append(Step("forward_backward", pass_json("{s}:train:1", 1, (first, 5, 7)), waits=True))
    return steps


@dataclass
class Owner:
    """An owner's part in a life: what was answered."""

    name: str
    key: str
    session: str | None = None
    taken: dict[int, str] = field(default_factory=dict)
    """The request id of each step that was acknowledged."""
    results: dict[int, Any] = field(default_factory=dict)
    ended: str = ""
    """Empty, "asked" or "told": the end of the session."""

    def plain(self, answer: Any) -> Any:
        """An answer without the session's id."""
        assert self.session is not None
        return json.loads(json.dumps(answer).replace(self.session, "{s}"))


def heard(facts: dict[str, Any], owners: dict[str, Owner]) -> None:
    """Learn one line of what a life was answered."""
    owner = owners.setdefault(facts["owner"], Owner(facts["owner"], facts.get("key", "")))
    match facts["what"]:
        case "session":
            owner.session = facts["session"]
        case "taken":
            owner.taken[facts["step"]] = facts["request"]
        case "result":
            owner.results[facts["step"]] = facts["result"]
        case "asked" | "told":
            owner.ended = facts["what"]


async def play(server: Life, owner: Owner, hear: Hear) -> None:
    """Ask for a whole story, many requests ahead."""
    assert owner.session is not None
    read: set[int] = set()

    async def catch_up() -> None:
        for number, request_id in owner.taken.items():
            if number not in read and request_id:
                result = owner.plain(await server.result(request_id, owner.key))
                hear({"owner": owner.name, "what": "result", "step": number, "result": result})
                read.add(number)

    for number, step in enumerate(story(owner.name)):
        if step.waits or number == 1:
            await catch_up()
        answer = await server.post(*step.of(owner.session), owner.key)
        request_id = answer["request_id"] if step.is_future else ""
        hear({"owner": owner.name, "what": "taken", "step": number, "request": request_id})
    await catch_up()


def make_keys(data_dir: Path, hear: Hear) -> None:
    make_directory(data_dir)
    store = SqliteDatabase(data_dir)
    for name in OWNERS:
        hear({"owner": name, "what": "key", "key": create_key(store, name, name)[1]})
    store.close()


async def live(server: Life, owners: dict[str, Owner], hear: Hear) -> None:
    """Both stories at the same time; one session ends in the end."""

    async def one(owner: Owner) -> None:
        hear({"owner": owner.name, "what": "session", "session": await server.session(owner.key)})
        await play(server, owner, hear)
        if owner.name == "bob":
            hear({"owner": owner.name, "what": "asked"})
            await server.post(
                f"sessions/{owner.session}/finish", {"reason": {"type": "success"}}, owner.key
            )
            hear({"owner": owner.name, "what": "told"})

    await asyncio.gather(*(one(owner) for owner in owners.values()))


def write_states_often() -> None:
    snapshot.STATE_OPERATIONS, snapshot.STATE_REST = 4, 0


async def loaded(server: Life, owner: Owner, path: str) -> Any:
    """The result of a pass with the weights of a checkpoint, in a session of its own."""
    session = await server.session(owner.key)
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    made = await server.run("load_weights", body, owner.key)
    if "error" in made:
        return made
    return await server.run(
        "forward_backward", pass_json(f"{session}:train:0", 1, (9, 8, 7)), owner.key
    )


def main() -> None:
    root = Path(sys.argv[1])
    log = os.open(root / "heard", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    owners: dict[str, Owner] = {}

    def hear(facts: dict[str, Any]) -> None:
        os.write(log, (json.dumps(facts) + "\n").encode())
        heard(facts, owners)

    async def run() -> None:
        make_keys(root / "data", hear)
        async with life(root / "data") as server:
            await live(server, owners, hear)
            os._exit(0)  # as by kill -9

    write_states_often()
    asyncio.run(run())


if __name__ == "__main__":
    main()
