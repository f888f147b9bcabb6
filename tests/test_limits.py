"""Byte budgets, the shared back-off, the dispatch gate and the circuit breaker; time is faked,
tasks are real."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable

import pytest

from tinkex.client.http.limits import (
    DISPATCHES,
    THROTTLED_DISPATCHES,
    Backoff,
    BreakerRegistry,
    ByteBudget,
    CircuitBreaker,
    CircuitOpenError,
    DispatchGate,
    shared_gate,
)
from tinkex.errors import BadRequestError, InternalServerError


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def settled() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def holder(budget: ByteBudget, size: int, release: asyncio.Event, log: list[int]) -> None:
    async with budget.taken(size):
        log.append(size)
        await release.wait()


@pytest.mark.covers("C71")
async def test_budget_may_be_overdrawn_once_and_then_blocks_in_order() -> None:
    budget, log = ByteBudget(1000), list[int]()
    releases = [asyncio.Event() for _ in range(5)]
    sizes = [500, 600, 100, 7000, 1]
    tasks = [
        asyncio.create_task(holder(budget, s, r, log)) for s, r in zip(sizes, releases, strict=True)
    ]
    await settled()
    assert log == [500, 600]
    assert budget.left == -100
    releases[0].set()
    await settled()
    # 400 were left for 100; then 300 for 7,000, which overdraws
    assert log == [500, 600, 100, 7000]
    releases[3].set()
    await settled()
    assert log[-1] == 1
    for release in releases:
        release.set()
    await asyncio.gather(*tasks)
    assert budget.left == 1000


async def test_cancelled_waiter_does_not_cancel_the_operation() -> None:
    budget, log, release = ByteBudget(10), list[int](), asyncio.Event()
    first = asyncio.create_task(holder(budget, 20, release, log))
    await settled()
    waiting = [asyncio.create_task(holder(budget, 5, release, log)) for _ in range(3)]
    await settled()
    waiting[0].cancel()
    release.set()
    waiting[1].cancel()  # its turn may just have come
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert budget.left == 10
    assert log == [20, 5]


@pytest.mark.covers("C71")
async def test_failing_holder_gives_back() -> None:
    budget = ByteBudget(10)
    with pytest.raises(RuntimeError):
        async with budget.taken(7):
            raise RuntimeError
    assert budget.left == 10


@pytest.mark.covers("D26")
def test_longer_pause_is_not_shortened() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    assert not backoff.recently
    backoff.pause(5)
    backoff.pause(1)
    assert backoff.until == 105
    clock.now = 114.9
    assert backoff.recently
    clock.now = 115.1
    assert not backoff.recently


@pytest.mark.covers("D29")
async def test_pause_is_waited_for_even_when_prolonged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = Clock(), list[float]()
    backoff = Backoff(clock)
    backoff.pause(2)

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        clock.now += seconds
        if len(slept) == 1:
            backoff.pause(3)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await backoff.wait()
    assert slept == [2, 3]


@pytest.mark.covers("1.19/5", "24.sampling.2")
@pytest.mark.parametrize(
    ("size", "retry_after", "seconds"),
    [(10, None, 1), (131_072, None, 1), (131_073, None, 5), (10, 7.0, 7), (200_000, 2.0, 5)],
)
def test_back_pressure_pauses_by_size_or_retry_delay(
    size: int, retry_after: float | None, seconds: float
) -> None:
    clock = Clock()
    gate = DispatchGate(1000, Backoff(clock))
    gate.refused(size, retry_after)
    assert gate.backoff.until == pytest.approx(clock.now + seconds)


@pytest.mark.covers("1.19/4", "C70", "24.code.13")
async def test_few_pass_after_back_pressure_and_their_bytes_weigh_more() -> None:
    clock = Clock()
    gate, inside, release = DispatchGate(100_000, Backoff(clock)), list[int](), asyncio.Event()

    async def dispatch(number: int, size: int) -> None:
        async with gate.passed(size):
            inside.append(number)
            await release.wait()

    free = [asyncio.create_task(dispatch(n, 10)) for n in range(50)]
    await settled()
    assert len(inside) == 50
    release.set()
    await asyncio.gather(*free)
    release.clear()
    inside.clear()
    gate.refused(10, None)
    clock.now += 5  # the pause is over, its aftermath is not
    few = [asyncio.create_task(dispatch(n, 10)) for n in range(50)]
    await settled()
    assert len(inside) == THROTTLED_DISPATCHES
    release.set()
    await asyncio.gather(*few)
    release.clear()
    inside.clear()
    # 80,000 each while throttled
    heavy = [asyncio.create_task(dispatch(n, 4000)) for n in range(4)]
    await settled()
    assert len(inside) == 2
    release.set()
    await asyncio.gather(*heavy)


# ── circuit breaker ───────────────────────────────────────────────────────────────────────────────


def failing(error: Exception) -> Callable[[], asyncio.Future[None]]:
    def function() -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    return function


async def fine() -> str:
    return "fine"


@pytest.mark.covers("C88", "4.1/4")
async def test_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker("r", failure_threshold=3, reset_seconds=30, clock=clock)
    states = list[str]()
    for _ in range(3):
        states.append(breaker.state)
        with pytest.raises(InternalServerError):
            await breaker.call(failing(InternalServerError("no", status_code=500)))
    states.append(breaker.state)
    with pytest.raises(CircuitOpenError, match="'r' is open after 3 failures") as caught:
        await breaker.call(fine)
    assert (
        pickle.loads(pickle.dumps(caught.value)).hint == "the next attempt is let through in 30 s"
    )
    clock.now += 30
    states.append(breaker.state)
    with pytest.raises(InternalServerError):
        await breaker.call(failing(InternalServerError("no", status_code=500)))
    states.append(breaker.state)
    clock.now += 30
    assert await breaker.call(fine) == "fine"
    states.append(breaker.state)
    assert states == ["closed", "closed", "closed", "open", "half_open", "open", "closed"]
    assert breaker.failures == 0


async def test_refusals_are_answers() -> None:
    breaker = CircuitBreaker(failure_threshold=1)
    with pytest.raises(BadRequestError):
        await breaker.call(failing(BadRequestError("no", status_code=400)))
    assert breaker.state == "closed"


@pytest.mark.covers("C88")
async def test_success_forgets_failures_in_a_row() -> None:
    breaker = CircuitBreaker(failure_threshold=2)
    for _ in range(3):
        with pytest.raises(OSError, match="down"):
            await breaker.call(failing(OSError("down")))
        await breaker.call(fine)
    assert breaker.state == "closed"


@pytest.mark.covers("D09", "24.code.22", "Q-26", "4.1/4")
async def test_probes_are_limited() -> None:
    clock, release = Clock(), asyncio.Event()
    breaker = CircuitBreaker(failure_threshold=1, half_open_calls=1, clock=clock)
    breaker.fail()
    clock.now += 31

    async def slow() -> None:
        await release.wait()

    probe = asyncio.create_task(breaker.call(slow))
    await settled()
    with pytest.raises(CircuitOpenError):
        await breaker.call(fine)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert await breaker.call(fine) == "fine"  # a cancelled probe tells nothing and frees its place


@pytest.mark.covers("4.1/4")
async def test_registry_shares_breakers_by_name() -> None:
    registry = BreakerRegistry(failure_threshold=20)
    await asyncio.gather(
        *(registry.get("POST asample").call(failing(OSError("x"))) for _ in range(20)),
        return_exceptions=True,
    )
    registry.get("GET healthz")
    assert registry.states() == {"POST asample": "open", "GET healthz": "closed"}
    registry.reset("POST asample")
    registry.reset("unknown")
    assert registry.get("POST asample").state == "closed"
    registry.delete("POST asample")
    assert registry.states() == {"GET healthz": "closed"}


@pytest.mark.covers("C89")
def test_no_failure_is_lost_between_threads() -> None:
    registry, together = BreakerRegistry(failure_threshold=8 * 500), threading.Barrier(8)

    def fail() -> None:
        together.wait()
        for _ in range(500):
            registry.get("POST asample").fail()

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.states() == {"POST asample": "open"}


@pytest.mark.covers("C89")
def test_settings_apply_to_future_breakers() -> None:
    registry = BreakerRegistry(failure_threshold=2)
    breaker = registry.get("a")
    assert registry.get("a") is breaker
    assert breaker.failure_threshold == 2
    assert registry.states() == {"a": "closed"}


@pytest.mark.covers("C70", "D28")
async def test_cancelled_wait_at_the_gate_frees_its_place() -> None:
    clock = Clock()
    gate = DispatchGate(1000, Backoff(clock))
    gate.backoff.pause(3600)
    waiting = [asyncio.create_task(gate.enter(10)) for _ in range(THROTTLED_DISPATCHES + 5)]
    await settled()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    clock.now += 4000
    async with gate.passed(10):
        assert gate._bytes.left == 990
    assert gate._bytes.left == 1000
    assert gate._few._value == THROTTLED_DISPATCHES
    assert gate._all._value == DISPATCHES
    with pytest.raises(RuntimeError):
        async with gate.passed(10):
            raise RuntimeError
    assert gate._bytes.left == 1000


@pytest.mark.covers("C69")
async def test_gates_are_shared_by_their_key() -> None:
    first = shared_gate(("https://a", "k1"), 10)
    assert shared_gate(("https://a", "k1"), 99) is first
    assert shared_gate(("https://a", "k2"), 10) is not first
    assert shared_gate(("https://b", "k1"), 10) is not first


@pytest.mark.covers("C89", "D09")
def test_half_open_breaker_admits_one_probe() -> None:
    def clock() -> float:
        time.sleep(0.002)  # whoever looks at the clock gives the others time to look as well
        return 100.0

    breaker = CircuitBreaker(failure_threshold=1, reset_seconds=0, clock=clock)
    breaker.fail()
    release, let_through, refused = threading.Event(), list[int](), list[int]()

    async def probe(number: int) -> None:
        let_through.append(number)
        await asyncio.to_thread(release.wait, 10)

    def ask(number: int) -> None:
        try:
            asyncio.run(breaker.call(lambda: probe(number)))
        except CircuitOpenError:
            refused.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(refused) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    release.set()
    for thread in threads:
        thread.join(10)
    assert (len(let_through), len(refused)) == (1, 5)
