"""Numbers of a run that come late or never: who waits, for how long, and what is freed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, serving, step_json, wait_until
from tinkex.engine.fake import FakeEngine
from tinkex.server import app as server_app
from tinkex.server.runs import admission
from tinkex.server.runs.work import Lane
from tinkex.server.server_limits import Limits
from tinkex.server.state import State

Serve = Callable[..., Wire]


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The state that the servers of a test share."""
    made: list[State] = []

    def state(*args: Any, **options: Any) -> State:
        made.append(State(*args, **options))
        return made[-1]

    monkeypatch.setattr(server_app, "State", state)
    return made


@pytest.fixture
def serve(states: list[State], tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(**limits: Any) -> Wire:
            options = {"poll_seconds": 0.3} | limits
            return Wire(
                stack.enter_context(serving(FakeEngine(), tmp_path, limits=Limits(**options)))
            )

        yield start


def is_waiting(wire: Wire, request_id: str) -> bool:
    return wire.send("retrieve_future", {"request_id": request_id}).status == 408


@pytest.mark.covers("U46")
def test_number_that_comes_late_is_waited_for_and_blocks_no_other_run(serve: Serve) -> None:
    """A client that sends its step ahead while it computes a custom loss."""
    assert Limits().gap_seconds >= 3600
    wire = serve()
    session = wire.session()
    model, neighbour = wire.model(session, 0), wire.model(session, 1)
    wire.run("forward_backward", pass_json(model, 1))
    stepped = wire.post("optim_step", step_json(model, 3))["request_id"]
    for number in range(1, 6):
        assert "metrics" in wire.run("optim_step", step_json(neighbour, number))
    assert is_waiting(wire, stepped)
    wire.run("forward_backward", pass_json(model, 2))
    assert wire.result(stepped)["metrics"]["grad_norm:mean"] > 0


@pytest.mark.covers("U46")
@pytest.mark.parametrize("ending", ["finish", "silence"])
def test_session_end_frees_work_behind_a_gap(
    serve: Serve, states: list[State], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.state.SWEEP_SECONDS", 0.5)
    wire = serve(session_seconds=60)
    session, other = wire.session(), wire.session()
    model, neighbour = wire.model(session), wire.model(other)
    waiting = [
        wire.post("forward_backward", pass_json(model, number))["request_id"] for number in (2, 3)
    ]
    outcome: list[Any] = []
    poll = threading.Thread(target=lambda: outcome.append(wire.result(waiting[0])))
    poll.start()
    [state] = states
    live = state.runs[model]
    timer = live.gap_timer
    assert timer is not None
    began = time.monotonic()
    if ending == "finish":
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    else:  # as if nothing had been heard for an hour
        state.sessions.last_seen[session] -= 3600
        wait_until(lambda: session not in state.sessions, 40)
    poll.join(20)
    assert time.monotonic() - began < 40
    assert "the session has ended" in outcome[0]["error"]
    assert timer.cancelled()
    assert model not in state.runs
    assert all(state.promises.get(request_id) is None for request_id in waiting)
    assert not state.journals.run_directory(model).exists()
    assert "metrics" in wire.run("optim_step", step_json(neighbour, 1))


@pytest.mark.covers("U46")
def test_requests_behind_a_missing_number_are_limited_in_bytes(
    serve: Serve, states: list[State]
) -> None:
    one = pass_json("m" * 46, 2, tuple(range(1, 400)))
    wire = serve(gap_bytes=3 * len(str(one)))
    model, neighbour = wire.model(), wire.model()
    number, taken, refused = 2, [], None
    while refused is None and number < 20:
        heard = wire.send("forward_backward", pass_json(model, number, tuple(range(1, 400))))
        if heard.status == 200:
            taken.append(heard.json["request_id"])
            number += 1
        else:
            refused = heard
    assert refused is not None
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert "gap_bytes" in refused.json["detail"]
    assert 2 <= len(taken) <= 4
    assert "metrics" in wire.run("optim_step", step_json(neighbour, 1))
    # the missing one is always taken
    wire.run("forward_backward", pass_json(model, 1, tuple(range(1, 400))))
    assert all("metrics" in wire.result(request_id) for request_id in taken)
    assert "metrics" in wire.run("forward_backward", pass_json(model, number, tuple(range(1, 400))))
    assert states[0].runs[model].lane.held_bytes == 0


def test_run_is_unloaded_although_a_number_never_came(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "UNLOAD_GAP_SECONDS", 0.2)
    wire = serve()
    model = wire.model()
    waiting = wire.post("optim_step", step_json(model, 2))["request_id"]
    assert wire.run("unload_model", {"model_id": model})["model_id"] == model
    assert "never arrived" in wire.result(waiting)["error"]


def test_lane_counts_the_bytes_that_it_holds() -> None:
    lane: Lane[str] = Lane()
    lane.hold(2, 10)
    lane.offer(2, "b")
    lane.hold(4, 5)
    lane.offer(4, "d")
    assert lane.held_bytes == 15
    lane.hold(1, 1)
    assert lane.offer(1, "a") == ["a", "b"]
    assert lane.held_bytes == 5
    lane.give_up()
    assert lane.held_bytes == 0
