"""The search for checkpoints: what it matches, its pages, and who sees what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, faulty_server
from support import Wire, serving
from tinkex.client.rest import RestClient
from tinkex.engine.api import BaseModel
from tinkex.engine.fake import FakeEngine
from tinkex.server.database.sqlite import DATABASE
from tinkex.types import (
    Checkpoint,
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    UserSearchOwner,
)

BASES = tuple(
    BaseModel(name, context_length=512, vocab_size=128, arch="fake") for name in ("fake", "other")
)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(FakeEngine(BASES), tmp_path) as url:
        yield Wire(url)


def save(
    wire: Wire, name: str, kind: str = "save_weights", base: str = "fake", **fields: Any
) -> str:
    session = str(
        wire.post(
            "create_session", {"tags": [], "sdk_version": "0.38.0", **fields.pop("session", {})}
        )["session_id"]
    )
    model = wire.model(session, base_model=base)
    return str(wire.run(kind, {"model_id": model, "path": name, "seq_id": 1, **fields})["path"])


def search(wire: Wire, **fields: Any) -> list[str]:
    return [
        found["tinker_path"] for found in wire.post("checkpoints/search", fields)["checkpoints"]
    ]


@pytest.mark.covers("U39")
def test_search_matches_everything_that_is_asked(wire: Wire) -> None:
    one = save(wire, "one", user_metadata={"task": "add", "size": "small"})
    two = save(wire, "two", "save_weights_for_sampler", base="other", user_metadata={"task": "add"})
    three = save(wire, "three", "save_weights_external", session={"project_id": "p-1"})
    assert search(wire) == [three, two, one]
    assert search(wire, checkpoint_type="training") == [one]
    assert search(wire, checkpoint_type="sampler") == [two]
    assert search(wire, checkpoint_type="external") == [three]
    assert search(wire, user_metadata={"task": "add"}) == [two, one]
    assert search(wire, user_metadata={"task": "add", "size": "small"}) == [one]
    assert search(wire, user_metadata={"task": "ad"}) == []
    assert search(wire, base_models=["other"]) == [two]
    assert search(wire, base_models=["other", "fake"]) == [three, two, one]
    assert search(wire, base_models=[]) == []
    assert search(wire, project_ids=["p-1"]) == [three]
    assert search(wire, project_ids=["default"]) == [two, one]
    assert search(wire, project_ids=[]) == []
    assert search(wire, owner={"type": "user", "owner_urns": ["tml:user:local"]}) == [
        three,
        two,
        one,
    ]
    assert search(wire, owner={"type": "user", "owner_urns": ["tml:user:ada"]}) == []
    run = one.removeprefix("tinker://").split("/")[0]
    wire.send(f"training_runs/{run}/checkpoints/weights/one", method="DELETE")
    assert search(wire) == [three, two]


@pytest.mark.covers("U39")
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"project_ids": ["nobody's"]}, 404, "there is no project"),
        ({"limit": 0}, 400, "limit"),
        ({"limit": 201}, 400, "limit"),
        ({"checkpoint_type": "other"}, 400, "checkpoint_type"),
        ({"base_models": ["x"] * 201}, 400, "base_models"),
        ({"colour": "red"}, 400, "colour"),
        (
            {"cursor": {"last_created_at": "2026-07-13T00:00:00", "last_checkpoint_uuid": "x"}},
            400,
            "time zone",
        ),
    ],
    ids=str,
)
def test_search_that_makes_no_sense_is_refused(
    wire: Wire, fields: dict[str, Any], status: int, words: str
) -> None:
    heard = wire.send("checkpoints/search", fields)
    assert heard.status == status
    assert words in heard.json["detail"]
    if status == 400:
        with pytest.raises(ValueError, match=words):
            CheckpointSearchRequest.model_validate(fields)


@pytest.mark.covers("U39")
def test_pages_of_checkpoints_neither_omit_nor_repeat_checkpoints(
    wire: Wire, tmp_path: Path
) -> None:
    made = [save(wire, f"c{number}") for number in range(7)]
    with closing(sqlite3.connect(tmp_path / DATABASE)) as facts, facts:  # in the same microsecond
        facts.execute("UPDATE checkpoints SET created = 1700000000.123457")
    made.insert(0, save(wire, "last"))
    found, cursor, pages = [], None, 0
    with RestClient(base_url=wire.url) as rest:
        while True:
            with pytest.warns(tinkex.ExperimentalWarning, match="search_checkpoints"):
                page = rest.search_checkpoints(
                    CheckpointSearchRequest(limit=3, cursor=cursor)
                ).result(10)
            found += [checkpoint.tinker_path for checkpoint in page.checkpoints]
            assert {checkpoint.base_model for checkpoint in page.checkpoints} == {"fake"}
            cursor, pages = page.next_cursor, pages + 1
            if cursor is None:
                break
    assert pages == 3
    assert found == [made[0], *sorted(made[1:], reverse=True)]


@pytest.mark.covers("U39")
def test_lists_have_the_base_model_except_on_older_servers(wire: Wire) -> None:
    path = save(wire, "one", base="other")
    run = path.removeprefix("tinker://").split("/")[0]
    (listed,) = wire.get(f"training_runs/{run}/checkpoints")["checkpoints"]
    assert listed["base_model"] == "other"
    assert Checkpoint.model_validate(listed).base_model == "other"
    assert Checkpoint.model_validate({**listed, "base_model": None}).base_model is None
    del listed["base_model"]
    assert Checkpoint.model_validate(listed).base_model is None


@pytest.mark.covers("U39")
def test_request_holds_given_fields_only() -> None:
    cursor = {"last_created_at": "2026-07-13T00:00:00Z", "last_checkpoint_uuid": "c-1"}
    with faulty_server() as faulty, RestClient(base_url=faulty.base_url, api_key="tml-x") as rest:
        faulty.script("checkpoints/search", Answer(body={"checkpoints": [], "next_cursor": cursor}))
        request = CheckpointSearchRequest(
            base_models=[],
            owner=UserSearchOwner(owner_urns=["tml:user:ada"]),
            cursor=CheckpointSearchCursor.model_validate(cursor),
        )
        with pytest.warns(tinkex.ExperimentalWarning):
            page = rest.search_checkpoints(request).result(10)
        (seen,) = faulty.requests("checkpoints/search")
    assert seen.json == {
        "user_metadata": {},
        "base_models": [],
        "owner": {"type": "user", "owner_urns": ["tml:user:ada"]},
        "limit": 50,
        "cursor": cursor,
    }
    assert page.next_cursor == request.cursor
    with pytest.raises(TypeError):
        CheckpointSearchRequest(colour="red")  # type: ignore[call-arg]
