"""The order of a run's requests: numbers, turns, cancelled calls and calls behind a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tinkex.client.futures.api_future import Future
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.outbox import Fetch, Outbox, Turn
from tinkex.types.optimizers import AdamParams
from tinkex.types.sessions import ClientConfigResponse
from tinkex.types.training import OptimStepRequest
from tinkex.wire import protocol

STEP = OptimStepRequest(model_id="elsewhere", adam_params=AdamParams())


class Line:
    """A session that notes what is submitted; the gate holds submissions up."""

    closed = False
    client_config = ClientConfigResponse()

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.gate = asyncio.Event()

    def track(self, future: Future[Any]) -> None:
        pass

    def report(self, error: Exception) -> None:
        pass

    async def submit(self, op: Any, request: Any, **options: Any) -> Any:
        await self.gate.wait()
        self.sent.append((request.model_id, request.seq_id))
        return request.seq_id


@pytest.fixture
def line() -> Line:
    return Line()


def step(outbox: Outbox, place: int | None = None, **options: Any) -> Future[Any]:
    async def turn(own: Outbox, place: int) -> Fetch[Any]:
        receipt = await own.send(protocol.OPTIM_STEP, STEP)

        async def fetch() -> Any:
            return receipt

        return fetch

    made: Turn[Any] = turn
    return outbox.put("optim_step", made, place, **options)


def test_numbers_follow_the_order_of_calls(line: Line) -> None:
    outbox = Outbox(line, "run", first_seq_id=4)  # type: ignore[arg-type]
    runtime().call(line.gate.set)
    assert [step(outbox).result(10) for _ in range(3)] == [4, 5, 6]
    assert line.sent == [("run", 4), ("run", 5), ("run", 6)]


def test_call_cancelled_while_it_waits_leaves_no_gap(line: Line) -> None:
    outbox = Outbox(line, "run")  # type: ignore[arg-type]
    first, second, third = step(outbox), step(outbox), step(outbox)
    second.cancel()
    runtime().call(line.gate.set)
    assert (first.result(10), third.result(10)) == (1, 2)


def test_calls_behind_a_cancelled_custom_loss_are_refused(line: Line) -> None:
    outbox = Outbox(line, "run")  # type: ignore[arg-type]
    runtime().call(line.gate.set)
    before = outbox.poison.place()
    spoiled, behind = step(outbox, spoils=True), outbox.poison.place()
    spoiled.result(10)
    outbox.poison.spread(outbox.poison.place(), KeyError("mine"))
    assert step(outbox, behind).result(10) == 2
    with pytest.raises(RuntimeError, match="an earlier custom loss"):
        step(outbox).result(10)
    assert step(outbox, before).result(10) == 3


def test_outbox_shares_the_poison_of_the_run_before(line: Line) -> None:
    runtime().call(line.gate.set)
    outbox = Outbox(line, "run")  # type: ignore[arg-type]
    outbox.poison.spread(outbox.poison.place(), KeyError("mine"))
    with pytest.raises(RuntimeError, match="an earlier custom loss"):
        step(Outbox(line, "next", poison=outbox.poison)).result(10)  # type: ignore[arg-type]


def test_cancelling_a_call_that_spoils_refuses_the_calls_behind(line: Line) -> None:
    outbox = Outbox(line, "run")  # type: ignore[arg-type]
    step(outbox)
    step(outbox, spoils=True).cancel()
    behind = step(outbox)
    runtime().call(line.gate.set)
    with pytest.raises(RuntimeError, match="an earlier custom loss"):
        behind.result(10)
