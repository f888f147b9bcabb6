"""Futures: waited for in every way there is, never cancelled by accident, polled with care."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import Clock, settled, wait_until
from tinkex import types
from tinkex.client.futures import result_polling
from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.loop_thread import Inbox
from tinkex.client.futures.reductions import combine
from tinkex.client.futures.result_polling import Receipt, retrieve
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.client.settings.delays import Delays
from tinkex.wire import codec, protocol

# ── waiting ───────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """Work that goes on until it is let go, and knows how it ended."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.ended = threading.Event()
        self.cancelled = False

    async def work(self) -> str:
        try:
            while not self.open.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            return "done"
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def soon(value: Any = "done", delay: float = 0.01) -> Any:
    await asyncio.sleep(delay)
    if isinstance(value, Exception):
        raise value
    return value


def test_thread_can_wait() -> None:
    assert start(soon()).result(5) == "done"
    with pytest.raises(ZeroDivisionError, match="oops"):
        start(soon(ZeroDivisionError("oops"))).result(5)
    assert isinstance(start(soon(ZeroDivisionError("oops"))).exception(5), ZeroDivisionError)


@pytest.mark.covers("W25")
def test_any_loop_can_wait() -> None:
    async def mine() -> list[Any]:
        future = start(soon())
        first = await future
        again = await future  # a second time, when it is done
        return [first, again]

    assert asyncio.run(mine()) == ["done", "done"]

    async def theirs() -> Any:
        return await start(soon(3))  # on the loop that produces it

    assert start(theirs()).result(5) == 3


def test_several_loops_and_threads_can_wait_for_one_future(gate: Gate) -> None:
    future = start(gate.work())

    async def wait() -> Any:
        return await future

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(asyncio.run, wait()) for _ in range(4)] + [
            pool.submit(future.result) for _ in range(4)
        ]
        time.sleep(0.05)
        gate.open.set()
        assert [item.result(5) for item in waiting] == ["done"] * 8


@pytest.mark.covers("24.futures.10", "W26")
def test_timeout_leaves_the_work_running(gate: Gate) -> None:
    future = start(gate.work())
    with pytest.raises(TimeoutError):
        future.result(0.02)
    with pytest.raises(TimeoutError):
        future.exception(0.02)
    assert not future.done()
    gate.open.set()
    assert future.result(5) == "done"
    assert not gate.cancelled


@pytest.mark.covers("24.futures.10", "W26")
def test_async_timeout_leaves_the_work_running(gate: Gate) -> None:
    async def run() -> None:
        future = start(gate.work())
        with pytest.raises(TimeoutError):
            await future.result_async(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.02)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await future
        assert not future.done()
        gate.open.set()
        assert await future.result_async(5) == "done"

    asyncio.run(run())
    assert not gate.cancelled


@pytest.mark.covers("W26")
def test_cancelled_waiter_leaves_the_work_running(gate: Gate) -> None:
    async def run() -> None:
        future = start(gate.work())

        async def wait() -> str:
            return await future

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        gate.open.set()
        assert await future == "done"

    asyncio.run(run())
    assert not gate.cancelled


def test_closed_user_loop_is_harmless(gate: Gate) -> None:
    future = start(gate.work())

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.02)

    asyncio.run(give_up())
    gate.open.set()
    assert future.result(5) == "done"


def test_cancelling_gives_the_work_up(gate: Gate) -> None:
    future = start(gate.work())
    time.sleep(0.02)
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert gate.ended.wait(5)
    assert gate.cancelled
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(5)

    async def wait() -> None:
        with pytest.raises(concurrent.futures.CancelledError):
            await future

    asyncio.run(wait())
    done = start(soon())
    done.result(5)
    assert not done.cancel()


def test_cancelling_before_the_start_is_quiet() -> None:
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        release.wait(5)

    first = start(block())
    assert blocked.wait(5)
    second = start(work())
    assert second.cancel()
    release.set()
    first.result(5)
    start(soon()).result(5)
    assert ran == []


@pytest.mark.covers("W25")
def test_standard_tools_take_them() -> None:
    several = [start(soon(number, delay=0.01 * (3 - number))) for number in range(3)]
    done, pending = concurrent.futures.wait(several, timeout=5)
    assert (len(done), len(pending)) == (3, 0)
    order = [future.result() for future in concurrent.futures.as_completed(several, timeout=5)]
    assert sorted(order) == [0, 1, 2]

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*(start(soon(number)) for number in range(3))))

    assert asyncio.run(gathered()) == [0, 1, 2]

    async def grouped() -> list[int]:
        async def one(number: int) -> int:
            return int(await start(soon(number)))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(3)]
        return [task.result() for task in tasks]

    assert asyncio.run(grouped()) == [0, 1, 2]
    called = threading.Event()
    future = start(soon())
    future.add_done_callback(lambda _: called.set())
    assert called.wait(5)
    assert future.future() is future


def test_cancelled_future_does_not_hold_up_wait(gate: Gate) -> None:
    future = start(gate.work())
    threading.Timer(0.02, future.cancel).start()
    done, _ = concurrent.futures.wait([future], timeout=5)
    assert done == {future}


def test_waiting_on_the_own_loop_is_refused_with_advice(gate: Gate) -> None:
    future = start(gate.work())

    async def wrong() -> None:
        future.result()

    with pytest.raises(RuntimeError, match="await the future"):
        start(wrong()).result(5)

    async def fine() -> Any:
        finished = start(soon())
        await finished
        return finished.result()  # it is there: nothing blocks

    assert start(fine()).result(5) == "done"


def test_waiting_on_a_running_loop_warns_and_works() -> None:
    async def run() -> Any:
        with pytest.warns(RuntimeWarning, match="await the future") as caught:
            value = start(soon()).result(5)
        assert caught[0].filename == __file__
        return value

    assert asyncio.run(run()) == "done"


@pytest.mark.covers("W15")
def test_forked_child_gets_its_own_loop() -> None:
    import os

    assert start(soon()).result(5) == "done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, str(start(soon("child")).result(5)).encode())
            finally:
                os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"child"
    os.close(reader)
    assert start(soon()).result(5) == "done"


# ── combining ─────────────────────────────────────────────────────────────────────────────────────


def output(count: int, **metrics: float) -> types.ForwardBackwardOutput:
    records = [
        {"logprobs": types.TensorData.from_any([float(count), float(index)])}
        for index in range(count)
    ]
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    return types.ForwardBackwardOutput("ArrayRecord", records, named)


@pytest.mark.covers("C64")
def test_outputs_are_joined_in_order() -> None:
    joined = combine([output(2), output(1), output(3)])
    assert [record["logprobs"].data[0] for record in joined.loss_fn_outputs] == [2, 2, 1, 3, 3, 3]
    assert joined.loss_fn_output_type == "ArrayRecord"


@pytest.mark.covers("C65")
def test_every_reduction() -> None:
    first = {
        "a__mean": 1.0,
        "b__sum": 1.0,
        "c__min": 1.0,
        "d__max": 1.0,
        "e__slack": 1.0,
        "f__hash2": 2.0**63,
    }
    second = {
        "a__mean": 4.0,
        "b__sum": 4.0,
        "c__min": 4.0,
        "d__max": 4.0,
        "e__slack": 4.0,
        "f__hash2": 2.0**63,
    }
    joined = combine([output(1, **first, g__unique=1.0), output(3, **second, g__unique=4.0)])
    assert joined.metrics == {
        "a:mean": (1 * 1 + 3 * 4) / 4,
        "b:sum": 5.0,
        "c:min": 1.0,
        "d:max": 4.0,
        "e:slack": 4 - 13 / 4,
        "f:hash2": 0.0,
        "g:unique": 1.0,
        "g:unique_1": 4.0,
    }


def test_metrics_without_a_known_reduction_are_averaged() -> None:
    joined = combine(
        [output(1, a__last=1.0, plain=2.0, b__sum=1.0), output(3, a__last=3.0, plain=6.0)]
    )
    assert joined.metrics == {"a:last": 2.5, "plain": 5.0, "b:sum": 1.0}


@pytest.mark.covers("D25", "W13")
def test_means_over_empty_data_are_no_error() -> None:
    assert combine([output(0, a__mean=1.0), output(0, a__mean=2.0)]).metrics == {"a:mean": 0.0}


@pytest.mark.covers("C65", "D25")
def test_slack_over_no_tokens_is_zero() -> None:
    assert combine([output(0, a__slack=3.0), output(0, a__slack=1.0)]).metrics == {"a:slack": 0.0}
    assert combine([output(1, a__slack=3.0), output(0, a__slack=1.0)]).metrics == {"a:slack": 0.0}
    assert combine([output(1, a__slack=3.0), output(1, a__slack=1.0)]).metrics == {"a:slack": 1.0}


@pytest.mark.covers("C65")
def test_anchors_of_the_weighted_mean() -> None:
    three = [output(1, a__mean=1.0), output(3, a__mean=3.0), output(2, a__mean=5.0)]
    assert combine(three).metrics["a:mean"] == pytest.approx(20 / 6)
    assert combine([output(1, loss=1.0), output(3, loss=3.0)]).metrics == {"loss": 2.5}


@pytest.mark.covers("C65")
def test_unordered_hash_is_the_same_in_any_order_and_differs_between_sets() -> None:
    def hashed(*values: float) -> float:
        return combine([output(1, h__hash_unordered=value) for value in values]).metrics[
            "h:hash_unordered"
        ]

    assert hashed(1.0, 2.0, 3.0) == hashed(3.0, 1.0, 2.0)
    assert len({hashed(1.0, 2.0), hashed(1.0, 3.0), hashed(1.0, 1.0, 2.0), hashed(12.0, 0.0)}) == 4
    assert hashed(1.0, 2.0) == int(hashed(1.0, 2.0)) < 2**53
    assert hashed(1.0, 2.0) == hashed(1, 2)


@pytest.mark.covers("W13")
def test_reducer_accepts_mixed_metrics() -> None:
    """Values that are no numbers, infinite hashes, metrics that only a later chunk has."""
    odd: dict[str, Any] = {"a:mean": None, "b:hash2": float("inf"), "c:sum": 1.0}
    first = types.ForwardBackwardOutput("ArrayRecord", [], odd)
    joined = combine([first, output(1, a__mean=2.0, b__hash2=1.0, d__max=4.0)])
    assert math.isnan(joined.metrics.pop("b:hash2"))
    assert joined.metrics == {"a:mean": 2.0, "c:sum": 1.0, "d:max": 4.0}


@pytest.mark.covers("C64")
def test_mixed_kinds_of_outputs_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    other = types.ForwardBackwardOutput("Another", [], {})
    assert combine([output(1), other, output(1)]).loss_fn_output_type == "ArrayRecord"
    assert [message for message in caplog.messages if "mixed loss_fn_output_type" in message] == [
        "the chunks of one call have mixed loss_fn_output_type; 'ArrayRecord' is taken"
    ]
    with pytest.raises(ValueError, match="at least one"):
        combine([])


def test_single_chunk_is_passed_on() -> None:
    only = output(2, a__last=1.0)
    assert combine([only]) is only


# ── polling ───────────────────────────────────────────────────────────────────────────────────────

LOGPROBS = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData.from_numpy(np.array([-1.0], np.float32))}],
    {"loss:sum": 1.0},
)
RESULT = Answer(body=codec.encode(LOGPROBS).data, content_type=codec.PROTOBUF)
STEPPED = Answer(body={"metrics": {"lr:mean": 0.5}})


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were decided on; nobody waits for them."""
    decided: list[float] = []

    after = Delays.after

    def quick(*args: Any, **kwargs: Any) -> float:
        decided.append(after(*args, **kwargs))
        return 0.001

    monkeypatch.setattr(Delays, "after", quick)
    return decided


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time as polls see it."""
    made = Clock()
    monkeypatch.setattr(result_polling, "time", made)
    return made


def taking(seconds: float, clock: Clock, answer: Answer) -> Callable[[Seen], Answer]:
    """An answer that takes so long by that clock."""

    def answered(_: Seen) -> Answer:
        clock.ahead += seconds
        return answer

    return answered


def poll(
    faulty: FaultyServer,
    *answers: Any,
    op: protocol.Operation = protocol.FORWARD_BACKWARD,
    patience: float = 30,
) -> Any:
    """Wait for a result that the server gives in this way."""
    faulty.script("retrieve_future", *answers)

    async def run() -> Any:
        carrier = Transport(Config(base_url=faulty.base_url, patience=patience))
        try:
            return await retrieve(carrier, Receipt(op, time.monotonic() - 0.5, "r1"))
        finally:
            await carrier.close()

    return asyncio.run(run())


@pytest.mark.covers("C57", "W20")
def test_ready_result_takes_one_request(faulty: FaultyServer, waits: list[float]) -> None:
    result = poll(faulty, RESULT)
    assert result.metrics == {"loss:sum": 1.0}
    [seen] = faulty.requests("retrieve_future")
    assert seen.json == {"request_id": "r1", "allow_metadata_only": True}
    assert seen.headers["accept"] == "application/x-protobuf"
    assert seen.headers["x-tinker-request-type"] == "ForwardBackward"
    assert seen.headers["x-tinker-request-iteration"] == "0"
    assert 0.5 <= float(seen.headers["x-tinker-create-promise-roundtrip-time"]) < 5
    assert waits == []


def test_small_results_are_json(faulty: FaultyServer) -> None:
    result = poll(faulty, STEPPED, op=protocol.OPTIM_STEP)
    assert result == types.OptimStepResponse(metrics={"lr:mean": 0.5})
    [seen] = faulty.requests("retrieve_future")
    assert seen.headers["accept"] == "application/json"
    assert seen.headers["x-tinker-request-type"] == "OptimStep"


def test_json_answer_is_accepted_instead_of_protobuf(faulty: FaultyServer) -> None:
    body = codec.encode(LOGPROBS, as_protobuf=False).data
    assert poll(faulty, Answer(body=body)).metrics == {"loss:sum": 1.0}


PENDING = [
    Answer(408),
    Answer(408, {"queue_state": "active"}),
    Answer(408, b"<html>", content_type="text/html"),
    Answer(body={"type": "try_again", "request_id": "r1", "queue_state": "active"}),
]


@pytest.mark.covers("24.futures.3", "W09")
@pytest.mark.parametrize(
    "pending", PENDING, ids=lambda answer: f"{answer.status}-{len(answer.data)}"
)
def test_early_empty_poll_is_not_repeated_at_once(
    faulty: FaultyServer, waits: list[float], pending: Answer
) -> None:
    assert poll(faulty, *[pending] * 5, RESULT).metrics == {"loss:sum": 1.0}
    assert len(waits) == 5
    assert waits[0] <= 0.1
    assert waits[4] > waits[0]
    seen = faulty.requests("retrieve_future")
    assert [request.headers["x-tinker-request-iteration"] for request in seen] == list("012345")
    assert "x-tinker-create-promise-roundtrip-time" not in seen[1].headers


@pytest.mark.covers("24.futures.3")
@pytest.mark.parametrize("pending", [PENDING[0], PENDING[3]], ids=["408", "try_again"])
def test_held_empty_poll_is_repeated_at_once(
    faulty: FaultyServer, waits: list[float], monkeypatch: pytest.MonkeyPatch, pending: Answer
) -> None:
    monkeypatch.setattr(result_polling, "HELD", 0.05)
    held = Answer(pending.status, pending.body, delay=0.06)
    assert poll(faulty, held, held, RESULT).metrics == {"loss:sum": 1.0}
    assert waits == []


def test_only_a_poll_of_a_second_counts_as_held() -> None:
    assert result_polling.HELD == 1.0
    assert result_polling.POLL_TIMEOUT == 45.0


@pytest.mark.covers("24.futures.6")
def test_large_results_are_announced_first(faulty: FaultyServer, waits: list[float]) -> None:
    announced = Answer(body={"status": "complete_metadata", "response_payload_size": 1000})
    assert poll(faulty, announced, RESULT).metrics == {"loss:sum": 1.0}
    first, second = faulty.requests("retrieve_future")
    assert first.json["allow_metadata_only"] is True
    assert second.json["allow_metadata_only"] is False
    assert waits == []


@pytest.mark.covers("24.futures.2", "24.futures.3", "D15", "W09")
@pytest.mark.parametrize(
    "fault", [Answer(500), Answer(503, {"detail": "x"}), Answer(429), Answer(drop=True)], ids=str
)
def test_passing_faults_back_off(faulty: FaultyServer, waits: list[float], fault: Answer) -> None:
    assert poll(faulty, fault, fault, fault, RESULT).metrics == {"loss:sum": 1.0}
    assert len(waits) == 3
    assert 0.375 <= waits[0] <= 0.5
    assert 1.5 <= waits[2] <= 2.0


def test_result_cut_short_is_fetched_again(faulty: FaultyServer, waits: list[float]) -> None:
    cut = Answer(body=RESULT.body, content_type=codec.PROTOBUF, cut=10)
    assert poll(faulty, cut, RESULT).metrics == {"loss:sum": 1.0}
    assert len(waits) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_server_may_ask_for_time(faulty: FaultyServer, waits: list[float], status: int) -> None:
    poll(faulty, Answer(status, headers={"Retry-After": "7"}), RESULT)
    assert waits == [7.0]


@pytest.mark.covers("W17")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, tinkex.BadRequestError),
        (401, tinkex.AuthenticationError),
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (410, tinkex.GoneError),
        (422, tinkex.UnprocessableEntityError),
    ],
)
def test_refusals_are_final_and_typed(
    faulty: FaultyServer, waits: list[float], status: int, kind: type[tinkex.APIStatusError]
) -> None:
    with pytest.raises(kind, match="it is so") as caught:
        poll(faulty, Answer(status, {"detail": "it is so"}), RESULT)
    assert caught.value.status_code == status
    assert caught.value.request_id == "r1"
    assert waits == []
    assert len(faulty.requests("retrieve_future")) == 1


@pytest.mark.covers("24.futures.5")
def test_patience_with_a_broken_server_ends(
    faulty: FaultyServer, waits: list[float], clock: Clock
) -> None:
    with pytest.raises(tinkex.InternalServerError, match="broken") as caught:
        poll(faulty, taking(5, clock, Answer(500, {"detail": "broken"})), patience=18)
    assert caught.value.attempts == 4
    assert caught.value.request_id == "r1"


def test_patience_counts_from_the_first_failure_in_a_row(
    faulty: FaultyServer, waits: list[float], clock: Clock
) -> None:
    """A long wait for a slow result does not use up the patience with a fault at its end."""
    slow = taking(5, clock, Answer(408))
    fault = Answer(500)
    assert poll(faulty, fault, *[slow] * 6, fault, slow, fault, RESULT, patience=20).metrics == {
        "loss:sum": 1.0
    }


def test_waiting_for_a_slow_result_has_no_end(
    faulty: FaultyServer, waits: list[float], clock: Clock
) -> None:
    assert poll(faulty, *[taking(5, clock, Answer(408))] * 6, RESULT, patience=20).metrics == {
        "loss:sum": 1.0
    }


@pytest.mark.covers("W17")
@pytest.mark.parametrize(
    ("given", "category"),
    [
        ("user", "user"),
        ("server", "server"),
        ("unknown", "unknown"),
        ("USER", "user"),
        ("martian", "unknown"),
        (None, "unknown"),
    ],
)
@pytest.mark.parametrize(
    "op", [protocol.FORWARD_BACKWARD, protocol.OPTIM_STEP], ids=lambda op: str(op.name)
)
def test_failed_operation_is_final(
    faulty: FaultyServer, op: protocol.Operation, given: str | None, category: str
) -> None:
    body = {"error": "datum 3 is bad"} | ({} if given is None else {"category": given})
    with pytest.raises(tinkex.RequestFailedError, match=f"{op.name}.*datum 3 is bad") as caught:
        poll(faulty, Answer(body=body), RESULT, op=op)
    error = caught.value
    assert (error.request_id, error.category) == ("r1", category)
    assert len(faulty.requests("retrieve_future")) == 1
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.category, back.request_id) == (str(error), error.category, "r1")


@pytest.mark.covers("C58", "D06", "W17")
@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=b"\xff\xff", content_type=codec.PROTOBUF),
        Answer(body=b"<html>", content_type="text/html"),
        Answer(body=b""),
        Answer(body=[]),
        Answer(body={"loss_fn_outputs": [5]}),
        Answer(body={"sequences": []}),
    ],
    ids=lambda answer: repr(answer.data),
)
def test_results_out_of_form_name_the_operation(faulty: FaultyServer, answer: Answer) -> None:
    with pytest.raises(tinkex.APIResponseValidationError, match=r"forward_backward at 127.0.0.1"):
        poll(faulty, answer, RESULT)


@pytest.mark.covers("W06")
def test_large_result_is_decoded_off_the_loop(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    original = Transport.decode

    def decode(self: Transport, *args: Any) -> Any:
        threads.append(threading.get_ident())
        return original(self, *args)

    monkeypatch.setattr(Transport, "decode", decode)
    rows = [{"logprobs": types.TensorData.from_numpy(np.zeros(50_000, np.float32))}]
    large = codec.encode(types.ForwardBackwardOutput("x", rows)).data
    poll(faulty, Answer(body=large, content_type=codec.PROTOBUF))
    assert threads
    assert threads[0] != threading.get_ident()


@pytest.mark.covers("24.sampling.1")
def test_futures_of_a_closed_client_end(faulty: FaultyServer) -> None:
    """Closing the client ends what still waits, at once, and opens nothing again."""
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(body={"request_id": "q", "sample_sequence_ids": ["q:0"]}))
    faulty.script("retrieve_future", Answer(408, delay=0.3))
    service = tinkex.ServiceClient(base_url=faulty.base_url)
    sampler = service.create_sampling_client(base_model="m").result()
    future = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams())
    wait_until(lambda: faulty.requests("retrieve_future"))
    service.close().result(5)
    assert isinstance(
        future.future().exception(20),
        tinkex.TinkerError | RuntimeError | concurrent.futures.CancelledError,
    )
    settled(lambda: len(faulty.requests("retrieve_future")), 50)
    assert json.loads(faulty.requests("asample")[0].body)["seq_id"] == 0


def test_futures_are_typed() -> None:
    assert issubclass(Future, concurrent.futures.Future)


def test_inbox_batch_wakes_the_loop_once_and_keeps_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, inbox = asyncio.new_event_loop(), Inbox()
    ran: list[int] = []
    wakes: list[object] = []
    wake = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any) -> object:
        wakes.append(callback)
        return wake(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    for number in range(100):
        inbox.put(loop, ran.append, number)
    inbox.put(loop, lambda: 1 / 0)
    inbox.put(loop, ran.append, 100)
    loop.run_until_complete(asyncio.sleep(0.01))
    assert ran == list(range(101))  # one that fails keeps none from its turn
    inbox.put(loop, ran.append, 101)
    loop.run_until_complete(asyncio.sleep(0.01))
    assert ran[-1] == 101
    assert len(wakes) == 2
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        inbox.put(loop, ran.append, 102)


def test_future_used_as_its_result_is_a_clear_error() -> None:
    future: Any = Future()
    with pytest.raises(AttributeError, match=r"no attribute 'metrics': `.result\(\)`, or `await`"):
        future.metrics  # noqa: B018
    assert not hasattr(future, "_nothing")


@pytest.mark.parametrize(
    "line",
    [
        "tinkex.ServiceClient().create_sampling_client(base_model='m').result()",
        "tinkex.RestClient().list_sessions().result()",
    ],
)
def test_client_that_is_dropped_as_the_program_ends_leaves_no_noise(
    faulty: FaultyServer, line: str
) -> None:
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("sessions", Answer(body={"sessions": []}))
    done = subprocess.run(
        [sys.executable, "-c", f"import tinkex; {line}"],
        env={**os.environ, "TINKER_BASE_URL": faulty.base_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
