"""Order on the server: lanes release by number, the worker does things in turn and tells the right
one."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st

from tinkex.engine.api import EngineError, PassJob, SampleJob
from tinkex.engine.fake import FakeEngine
from tinkex.server.runs.work import Lane
from tinkex.server.workers.worker import Worker
from tinkex.types import Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

few = settings(max_examples=60, deadline=None)

# ── lanes ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S11")
@given(st.permutations(list(range(1, 9))))
@few
def test_any_order_of_arrival_gives_the_order_of_numbers(order: list[int]) -> None:
    lane: Lane[int] = Lane()
    released: list[int] = []
    for arrived, number in enumerate(order, 1):
        released += lane.offer(number, number)
        assert released == list(range(1, len(released) + 1))
        assert lane.next == len(released) + 1
        assert (lane.missing is None) == (len(released) == arrived)
    assert released == list(range(1, 9))


@pytest.mark.covers("S11", "S12")
@given(st.lists(st.integers(1, 9), max_size=25), st.lists(st.integers(0, 24), max_size=3))
@few
def test_numbers_are_released_once_in_every_case(
    arrivals: list[int], surrenders: list[int]
) -> None:
    """Compare with the plainest model: a set of numbers, and a floor below which all passed."""
    lane: Lane[int] = Lane()
    floor, waiting, out = 1, set[int](), list[int]()
    for index, number in enumerate(arrivals):
        if index in surrenders:
            assert lane.give_up() == sorted(waiting)
            floor = max([floor - 1, *waiting]) + 1
            waiting = set()
            assert lane.missing is None
        if number < floor or number in waiting:
            with pytest.raises(ValueError, match=str(number)):
                lane.offer(number, number)
        else:
            waiting.add(number)
            expected = []
            while floor in waiting:
                expected.append(floor)
                waiting.discard(floor)
                floor += 1
            assert lane.offer(number, number) == expected
            out += expected
        assert lane.next == floor
        assert lane.missing == (floor if waiting else None)
        assert lane.free == max([floor - 1, *waiting]) + 1
    assert out == sorted(set(out))


def test_refused_number_has_no_effect() -> None:
    lane: Lane[str] = Lane()
    lane.offer(1, "a")
    lane.offer(3, "c")
    for number in (0, 1, 3, -5):
        with pytest.raises(ValueError, match="next one is 2"):
            lane.offer(number, "x")
    assert lane.offer(2, "b") == ["b", "c"]


@pytest.mark.covers("S11")
def test_run_continues_after_a_gap() -> None:
    lane: Lane[str] = Lane()
    lane.offer(2, "b")
    lane.offer(5, "e")
    assert lane.give_up() == ["b", "e"]
    assert lane.offer(6, "f") == ["f"]
    with pytest.raises(ValueError, match="4"):
        lane.offer(4, "late")


# ── the worker ────────────────────────────────────────────────────────────────────────────────────


def with_worker(engine: Any, body: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        worker = Worker(engine)
        worker.start()
        try:
            async with asyncio.timeout(20):
                await body(worker)
        finally:
            await worker.stop()

    asyncio.run(run())


def request(tokens: int = 2) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=tokens),
        num_samples=1,
    )


def sampling_engine(**options: Any) -> FakeEngine:
    engine = FakeEngine(**options)
    engine.load_sampler("s", "fake", None)
    return engine


def test_work_runs_in_order_on_one_thread() -> None:
    async def body(worker: Worker) -> None:
        done: list[int] = []
        threads: set[int] = set()

        def work(number: int) -> int:
            done.append(number)
            threads.add(threading.get_ident())
            return number * 2

        results = await asyncio.gather(*(worker.run(work, number) for number in range(50)))
        assert results == [2 * number for number in range(50)]
        assert done == list(range(50))
        assert len(threads) == 1
        assert threading.get_ident() not in threads

    with_worker(FakeEngine(), body)


@pytest.mark.covers("S13")
def test_failure_reaches_its_own_future_only() -> None:
    def fail() -> None:
        raise EngineError("only this one")

    async def body(worker: Worker) -> None:
        before, bad, after = worker.run(int), worker.run(fail), worker.run(int, "7")
        with pytest.raises(EngineError, match="only this one"):
            await bad
        assert await before == 0
        assert await after == 7

    with_worker(FakeEngine(), body)


def training_engine(*runs: str, **options: Any) -> FakeEngine:
    engine = sampling_engine(**options)
    for run in runs:
        engine.create(run, "fake", LoraConfig(rank=2))
    return engine


def start(engine: FakeEngine, run: str, job: str) -> Callable[[], None]:
    """Starts a pass."""
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    return lambda: engine.pass_start(PassJob(job, run, [datum], "cross_entropy", {}))


def test_work_of_a_run_waits_for_its_own_passes_only() -> None:
    engine = training_engine("a", "b")
    events: list[str] = []
    inner = engine.pass_step
    engine.pass_step = lambda: events.append("pass") or inner()  # type: ignore[method-assign,func-returns-value]
    gate = threading.Event()

    async def body(worker: Worker) -> None:
        worker.run(gate.wait, 5)
        passes = [worker.run_pass("a", f"a{n}", start(engine, "a", f"a{n}")) for n in range(3)]
        stepped = worker.run_for("a", events.append, "step a")
        other = worker.run_for("b", events.append, "step b")
        late = worker.run_pass("a", "late", start(engine, "a", "late"))
        gate.set()
        await asyncio.gather(stepped, other, late, *passes)
        assert events == ["step b", "pass", "pass", "pass", "step a", "pass"]
        assert (await late).metrics["loss:sum"] > 0
        assert not worker._order._waiting
        assert not worker._order.open

    with_worker(engine, body)


def test_passes_of_several_runs_are_with_the_engine_at_the_same_time() -> None:
    engine = training_engine("a", "b", "c")
    most = [0]
    inner = engine.pass_step

    def step() -> Any:
        most[0] = max(most[0], len(engine._passes))
        return inner()

    engine.pass_step = step  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        await asyncio.gather(*(worker.run_pass(run, run, start(engine, run, run)) for run in "abc"))

    with_worker(engine, body)
    assert most[0] > 1


def test_pass_that_is_refused_or_fails_lets_its_run_go_on() -> None:
    engine = training_engine("a")
    failing = [True]

    def fail(method: str, subject: str) -> None:
        if method == "forward_backward" and failing and failing.pop():
            raise EngineError("ran out")

    engine.fail = fail

    async def body(worker: Worker) -> None:
        refused = worker.run_pass("a", "1", start(engine, "nobody", "1"))
        failed = worker.run_pass("a", "2", start(engine, "a", "2"))
        good = worker.run_pass("a", "3", start(engine, "a", "3"))
        after = worker.run_for("a", int, "7")
        with pytest.raises(EngineError, match="nobody"):
            await refused
        with pytest.raises(EngineError, match="ran out"):
            await failed
        await good
        assert await after == 7

    with_worker(engine, body)


def test_broken_training_step_loses_only_its_own_passes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = training_engine("a")
    inner, broken = engine.pass_step, [True]

    def step() -> Any:
        ended = inner()
        if broken.pop() if broken else False:
            raise RuntimeError("device lost")
        return ended

    engine.pass_step = step  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        with pytest.raises(RuntimeError, match="device lost"):
            await worker.run_pass("a", "1", start(engine, "a", "1"))
        await worker.run_pass("a", "2", start(engine, "a", "2"))

    with_worker(engine, body)
    assert "step of training failed" in caplog.text


class Clock:
    """The time as the scheduler sees it: it passes when a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for place in ("engine.stepping", "server.workers.worker"):
        monkeypatch.setattr(f"tinkex.{place}.time", made)
    return made


def test_training_and_sampling_share_the_time(clock: Clock) -> None:
    """Long steps of the one do not leave the other with one short step for each."""
    engine = training_engine("a", delay=0.0)
    spent = {"train": 0, "sample": 0}
    inner_pass, inner_step = engine.pass_step, engine.sample_step

    def pass_step() -> Any:
        spent["train"] += 1
        clock.now += 0.02
        return inner_pass()

    def sample_step() -> Any:
        spent["sample"] += 1
        clock.now += 0.002
        return inner_step()

    engine.pass_step, engine.sample_step = pass_step, sample_step  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        sample = worker.samples.draw(SampleJob("job", "s", request(1_000_000), 0))
        await asyncio.gather(
            *(worker.run_pass("a", str(n), start(engine, "a", str(n))) for n in range(10))
        )
        worker.samples.cancel("job")
        with pytest.raises(EngineError):
            await sample

    with_worker(engine, body)
    assert spent["train"] == 10
    assert spent["sample"] > 20


def test_work_is_admitted_between_sampling_steps(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A long sample does not hold up operations, and operations do not hold up a sample."""
    monkeypatch.setattr("tinkex.server.workers.worker.TAKING_SECONDS", 0.01)
    engine, steps, done = sampling_engine(delay=0.0), threading.Semaphore(0), list[int]()
    inner_step, done_by_step = engine.sample_step, list[int]()

    def sample_step() -> Any:
        assert steps.acquire(timeout=20)
        done_by_step.append(len(done))
        return inner_step()

    def slow() -> None:
        clock.now += 0.015
        done.append(1)

    engine.sample_step = sample_step  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        sample = worker.samples.draw(SampleJob("job", "s", request(50), 0))
        for _ in range(10):
            steps.release()
            await worker.run(int)
        assert not sample.done()
        queued = [worker.run(slow) for _ in range(60)]
        steps.release(100)
        await sample
        await asyncio.gather(*queued)

    with_worker(engine, body)
    assert done_by_step[49] < 60


def test_samples_advance_together() -> None:
    async def body(worker: Worker) -> None:
        short, long = (
            worker.samples.draw(SampleJob("a", "s", request(1), 0)),
            worker.samples.draw(SampleJob("b", "s", request(10), 0)),
        )
        done, pending = await asyncio.wait({short, long}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {short}
        assert pending == {long}
        assert len((await long).response.sequences[0].tokens) == 10

    with_worker(sampling_engine(delay=0.002), body)


def test_sample_that_is_refused_fails_alone() -> None:
    async def body(worker: Worker) -> None:
        good, bad = (
            worker.samples.draw(SampleJob("a", "s", request(), 0)),
            worker.samples.draw(SampleJob("b", "nowhere", request(), 0)),
        )
        with pytest.raises(EngineError, match="nowhere"):
            await bad
        assert len((await good).response.sequences) == 1

    with_worker(sampling_engine(), body)


def test_sample_that_fails_on_its_way_fails_alone() -> None:
    def fail(method: str, subject: str) -> None:
        if (method, subject) == ("sample_step", "b"):
            raise EngineError("ran out")

    async def body(worker: Worker) -> None:
        good, bad = (
            worker.samples.draw(SampleJob("a", "s", request(5), 0)),
            worker.samples.draw(SampleJob("b", "s", request(5), 0)),
        )
        with pytest.raises(EngineError, match="ran out"):
            await bad
        assert len((await good).response.sequences[0].tokens) == 5

    engine = sampling_engine()
    engine.fail = fail
    with_worker(engine, body)


def test_broken_step_loses_only_its_own_samples(caplog: pytest.LogCaptureFixture) -> None:
    engine = sampling_engine()
    inner, broken = engine.sample_step, [True]

    def step() -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("device lost")
        return inner()

    engine.sample_step = step  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        lost = worker.samples.draw(SampleJob("a", "s", request(), 0))
        with pytest.raises(RuntimeError, match="device lost"):
            await lost
        assert not engine.sampling()
        assert (
            len((await worker.samples.draw(SampleJob("b", "s", request(), 0))).response.sequences)
            == 1
        )

    with_worker(engine, body)
    assert "step of sampling failed" in caplog.text


def test_sample_that_the_engine_cannot_drop_concerns_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = sampling_engine(delay=0.002)

    def refuse(job: str) -> None:
        raise RuntimeError(f"cannot drop {job}")

    engine.sample_cancel = refuse  # type: ignore[method-assign]

    async def body(worker: Worker) -> None:
        dropped, other = (
            worker.samples.draw(SampleJob("a", "s", request(1000), 0)),
            worker.samples.draw(SampleJob("b", "s", request(20), 0)),
        )
        await worker.run(int)  # both are with the engine now
        worker.samples.cancel("a")
        with pytest.raises(EngineError, match="cancelled"):
            await dropped
        assert len((await other).response.sequences[0].tokens) == 20
        ended = worker.samples.draw(SampleJob("of:1", "s", request(1000), 0))
        worker.samples.cancel_all("of:")
        with pytest.raises(EngineError, match="session has ended"):
            await ended
        assert await worker.run(int) == 0
        assert worker.failure is None

    with_worker(engine, body)
    assert "cannot drop the sample a" in caplog.text


@pytest.mark.parametrize("death", [RuntimeError("driver gone"), SystemExit(3)])
def test_dead_worker_thread_fails_all_work_at_once(
    death: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """What is under way, what waits, what is queued, what is asked for later: nobody waits for
    ever."""
    engine = training_engine("a", delay=0.002)
    gate = threading.Event()

    def die() -> None:
        raise death

    def look() -> bool:
        raise death

    async def body(worker: Worker) -> None:
        sample = worker.samples.draw(SampleJob("job", "s", request(10_000), 0))
        await worker.run(int)
        worker.run(gate.wait, 5)
        passed = worker.run_pass("a", "1", start(engine, "a", "1"))
        stepped = worker.run_for("a", int)
        last: asyncio.Future[Any]
        if isinstance(death, SystemExit):
            last = worker.run(die)
        else:
            engine.sampling = look  # type: ignore[method-assign]
            last = worker.run(int)
        behind = worker.run(int)
        gate.set()
        outcomes = await asyncio.gather(
            sample, passed, stepped, last, behind, return_exceptions=True
        )
        assert [outcome for outcome in outcomes if "engine has died" not in str(outcome)] in (
            [],
            [0],
            [0, 0],
        )
        assert worker.failure is not None
        for later in (
            worker.run(int),
            worker.run_for("a", int),
            worker.samples.draw(SampleJob("b", "s", request(), 0)),
        ):
            with pytest.raises(EngineError, match="engine has died"):
                await later

    with_worker(engine, body)
    assert "the engine's thread has died" in caplog.text


def test_stop_finishes_running_work_and_fails_the_rest() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        begun.set()
        go_on.wait(10)
        done.append(0)

    async def run() -> None:
        worker = Worker(FakeEngine())
        worker.start()
        first = worker.run(slow)
        others = [worker.run(done.append, number) for number in range(1, 20)]
        await asyncio.to_thread(begun.wait, 10)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0.01)
        go_on.set()
        await stopping
        await first
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        assert all("stopped" in str(outcome) for outcome in outcomes)
        await worker.stop()  # a second time does nothing

    asyncio.run(run())
    assert done == [0]


def test_stopping_does_not_leave_samples_without_an_answer() -> None:
    async def run() -> None:
        worker = Worker(sampling_engine(delay=0.01))
        worker.start()
        sample = worker.samples.draw(SampleJob("a", "s", request(1000), 0))
        await asyncio.sleep(0.05)
        await worker.stop()
        await asyncio.sleep(0)
        assert sample.done()
        assert sample.exception() is not None

    asyncio.run(run())
