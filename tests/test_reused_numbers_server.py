"""A number that is used again for something else is refused; for the same it gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, serving, step_json
from tinkex.engine.fake import FakeEngine


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(FakeEngine(), tmp_path) as url:
        yield Wire(url)


def creation(session: str, number: int = 0, rank: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "fake",
        "lora_config": {"rank": rank},
        **fields,
    }


def is_refused(wire: Wire, path: str, body: dict[str, Any], number: int) -> None:
    failed = wire.run(path, body)
    named = "model_seq_id" if "model_seq_id" in body else "request number"
    assert failed["error"] == f"{named} {number} was used before, for another request"
    assert failed["category"] == "user"


def test_run_with_the_number_of_another_is_refused(wire: Wire) -> None:
    session = wire.session()
    first = wire.post("create_model", creation(session))
    assert wire.post("create_model", creation(session)) == first
    assert wire.result(first["request_id"])["model_id"] == first["model_id"]
    for other in (
        creation(session, rank=8),
        creation(session, user_metadata={"a": "b"}),
        creation(session, lora_config={"rank": 4, "seed": 7}),
    ):
        is_refused(wire, "create_model", other, 0)
    assert wire.post("create_model", creation(session)) == first
    saved = wire.run("save_weights", {"model_id": first["model_id"], "seq_id": 1, "path": "a"})[
        "path"
    ]
    load = {"session_id": session, "model_seq_id": 0, "path": saved, "optimizer": False}
    is_refused(wire, "load_weights", load, 0)
    again = load | {"model_seq_id": 1}
    assert wire.run("load_weights", again)["model_id"].endswith(":train:1")
    is_refused(wire, "load_weights", again | {"optimizer": True}, 1)
    is_refused(wire, "create_model", creation(session, 1), 1)
    assert "metrics" in wire.run("optim_step", step_json(first["model_id"], 2))


def test_run_with_the_number_of_another_is_refused_after_a_restart(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        for number in range(1, 5):
            wire.run("optim_step", step_json(model, number))
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        is_refused(wire, "create_model", creation(session, rank=8), 0)
        assert wire.run("create_model", creation(session))["model_id"] == model
        assert "metrics" in wire.run("optim_step", step_json(model, 5))


def test_sampling_session_with_the_number_of_another_is_refused(wire: Wire) -> None:
    session = wire.session()
    model, other = wire.model(session), wire.model(session, 1)
    path = wire.run("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})[
        "path"
    ]
    plain = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    first = wire.post("create_sampling_session", plain)
    assert wire.post("create_sampling_session", plain) == first
    heard = wire.send("create_sampling_session", plain | {"model_path": path})
    assert heard.status == 400
    assert "opened before, with other weights" in heard.json["detail"]
    nameless = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    assert (
        "opened before, not for this run" in wire.run("save_weights_for_sampler", nameless)["error"]
    )
    mine = wire.run(
        "save_weights_for_sampler", nameless | {"seq_id": 3, "sampling_session_seq_id": 1}
    )
    assert mine["sampling_session_id"].endswith(":sample:1")
    theirs = {"model_id": other, "seq_id": 1, "sampling_session_seq_id": 1}
    assert (
        "opened before, not for this run" in wire.run("save_weights_for_sampler", theirs)["error"]
    )
    assert (
        wire.send("create_sampling_session", plain | {"sampling_session_seq_id": 1}).status == 400
    )


def test_creation_without_room_does_not_answer_for_another(tmp_path: Path) -> None:
    from tinkex.server.server_limits import Limits

    with serving(FakeEngine(), tmp_path, limits=Limits(adapters=1)) as url:
        wire = Wire(url)
        session = wire.session()
        wire.model(session)
        is_refused(wire, "create_model", creation(session, rank=8), 0)
        assert "adapters" in wire.run("create_model", creation(session, 1))["error"]
        is_refused(wire, "create_model", creation(session, 1, rank=8), 1)


def test_pass_with_the_number_of_another_is_refused(wire: Wire) -> None:
    model = wire.model()
    first = wire.post("forward_backward", pass_json(model, 1))
    is_refused(wire, "forward_backward", pass_json(model, 1, (4, 5, 6)), 1)
    assert wire.post("forward_backward", pass_json(model, 1)) == first
