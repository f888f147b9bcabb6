"""Custom losses in the client: numbers, order, the thread they run on, and what follows when one
fails."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from support import serving, wait_until
from tinkex import ServiceClient, TrainingClient, types
from tinkex.client.losses import custom_passes
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.http_errors import Refusal
from tinkex.server.runs.admission import Runs
from tinkex.server.server_limits import Limits

STEP = types.AdamParams(learning_rate=0.1)


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    targets = {"target_tokens": [token + 1 for token in tokens]}
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {**targets, **inputs})


DATA = [datum(1, 2, 3)]
TWO = [datum(1, 2, 3), datum(4, 5, 6)]


def doubled(
    _: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Twice the cross-entropy."""
    return torch.stack([-2 * each.sum() for each in logprobs]).sum(), {}


class Held:
    """A loss that waits until it is let go."""

    def __init__(self) -> None:
        self.began, self.free = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        self.threads.append(threading.current_thread())
        self.began.set()
        assert self.free.wait(20)
        return doubled(data, logprobs)


class Log:
    """What reached the engine, and under which numbers it reached the server; fails where it is
    told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.numbers: list[int] = []
        self.sizes: list[tuple[bool, int]] = []
        self.errors: dict[int, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, method: str, subject: str) -> None:
        if method == "create" or method.startswith(("sample_", "drop")):
            return
        self.calls.append(method)
        assert self.gate.wait(20)
        if error := self.errors.pop(len(self.calls), None):
            raise error


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made, original = Log(), Runs._admit

    async def admit(runs: Runs, call: Any, run: str, seq_id: int) -> Any:
        made.numbers.append(seq_id)
        if call.op in ("forward_backward", "forward"):
            made.sizes.append(
                (call.request.forward_only, len(call.request.forward_backward_input.data))
            )
        return await original(runs, call, run, seq_id)

    monkeypatch.setattr(Runs, "_admit", admit)
    return made


@pytest.fixture
def service(fake_service: Callable[..., ServiceClient], log: Log) -> ServiceClient:
    return fake_service(FakeEngine(fail=log), limits=Limits(gap_seconds=30))


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("fake", rank=4).result()


def configure(client: TrainingClient, **changes: Any) -> None:
    """Change what the server's configuration told the client."""
    session = client.holder
    session.client_config = session.client_config.model_copy(update=changes)


# ── numbers and order ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U29")
def test_two_chunks_use_four_numbers_and_the_step_submitted_ahead_comes_after_them(
    client: TrainingClient, log: Log
) -> None:
    configure(client, fwdbwd_max_chunk_len=1)
    loss = Held()
    custom = client.forward_backward_custom(TWO, loss)
    stepped = client.optim_step(STEP)
    assert loss.began.wait(20)
    assert not custom.done()
    assert not stepped.done()
    assert log.numbers == [2, 1]
    loss.free.set()
    assert custom.result(20).metrics["loss:sum"] > 0
    assert stepped.result(20).metrics
    assert log.numbers == [2, 1, 4, 3, 5]
    assert log.calls == ["forward_backward"] * 4 + ["optim_step"]


@pytest.mark.covers("U29")
def test_custom_pass_returns_at_once(client: TrainingClient, log: Log) -> None:
    log.gate.clear()
    began = time.monotonic()
    futures = [client.forward_backward_custom(DATA, doubled) for _ in range(20)]
    assert time.monotonic() - began < 2
    assert not any(future.done() for future in futures)
    log.gate.set()
    assert all(future.result(20).metrics["loss:sum"] > 0 for future in futures)


@pytest.mark.covers("U29")
def test_step_submitted_ahead_applies_the_gradient_of_the_loss(service: ServiceClient) -> None:
    custom, plain = (service.create_lora_training_client("fake", rank=4).result() for _ in range(2))
    passed, stepped = custom.forward_backward_custom(TWO, doubled), custom.optim_step(STEP)
    weighted = [datum(*one.model_input.to_ints(), weights=[2.0] * 3) for one in TWO]
    plain.forward_backward(weighted, "cross_entropy")
    assert stepped.result(20) == plain.optim_step(STEP).result(20)
    assert passed.result(20).metrics["loss:sum"] > 0


@pytest.mark.covers("U29")
def test_several_custom_passes_and_steps_are_in_flight_at_once(
    client: TrainingClient, log: Log
) -> None:
    losses = [Held() for _ in range(3)]
    futures: list[Any] = []
    for loss in losses:
        futures += [client.forward_backward_custom(DATA, loss), client.optim_step(STEP)]
    for loss in losses:
        assert loss.began.wait(20)
        assert not any(future.done() for future in futures[-2:])
        loss.free.set()
    for future in futures:
        future.result(20)
    assert log.numbers == list(range(1, 10))
    assert log.calls == ["forward_backward", "forward_backward", "optim_step"] * 3


@pytest.mark.covers("U29")
def test_backward_passes_keep_the_chunks_of_the_forward_passes(
    client: TrainingClient, log: Log
) -> None:
    """Integer weights of eight bytes are sent forward, those of a gradient have four."""
    data = [
        datum(1, 2, 3, weights=types.TensorData.from_numpy(np.ones(3, np.int64))) for _ in range(6)
    ]
    prepared = tinkex.client.losses.custom_passes.forward_data(data)
    configure(client, fwdbwd_max_chunk_bytes_count=2 * prepared[0].nbytes)
    client.forward_backward_custom(data, doubled).result(20)
    assert log.sizes == [(True, 2)] * 3 + [(False, 2)] * 3
    assert sorted(log.numbers) == list(range(1, 7))


# ── the thread ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U30")
def test_losses_run_on_one_daemon_thread_for_all_clients(
    service: ServiceClient, client: TrainingClient
) -> None:
    seen: list[threading.Thread] = []
    under_way: list[int] = []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        assert under_way == []
        under_way.append(1)
        seen.append(threading.current_thread())
        time.sleep(0.02)
        under_way.clear()
        return doubled(data, logprobs)

    other = service.create_lora_training_client("fake", rank=4).result()
    futures = [
        each.forward_backward_custom(DATA, loss) for each in (client, other) for _ in range(2)
    ]
    for future in futures:
        future.result(20)
    assert len({thread.ident for thread in seen}) == 1
    assert seen[0] is not threading.current_thread()
    assert seen[0].name == "tinkex-custom-loss"
    assert seen[0].daemon


@pytest.mark.covers("U30")
def test_loss_sees_the_context_of_its_call(client: TrainingClient) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nothing")
    seen: list[str] = []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        seen.append(name.get())
        return doubled(data, logprobs)

    token = name.set("mine")
    future = client.forward_backward_custom(DATA, loss)
    name.reset(token)
    future.result(20)
    client.forward_backward_custom(DATA, loss).result(20)
    assert seen == ["mine", "nothing"]


def test_loss_that_turns_gradients_off_does_so_for_itself_only(client: TrainingClient) -> None:
    def careless(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        answer = doubled(data, logprobs)
        torch.set_grad_enabled(False)
        return answer

    for _ in range(2):
        assert client.forward_backward_custom(DATA, careless).result(20).metrics["loss:sum"] > 0


@pytest.mark.covers("U30", "U31")
def test_cancelled_loss_does_not_block_other_losses(
    service: ServiceClient, client: TrainingClient
) -> None:
    stuck = Held()
    cancelled = client.forward_backward_custom(DATA, stuck)
    assert stuck.began.wait(20)
    other = service.create_lora_training_client("fake", rank=4).result()
    waiting = other.forward_backward_custom(DATA, doubled)
    assert cancelled.cancel()
    waiting.result(20)
    other.forward_backward_custom(DATA, doubled).result(20)
    stuck.free.set()
    stuck.threads[0].join(20)
    assert not stuck.threads[0].is_alive()


# ── a loss that fails ─────────────────────────────────────────────────────────────────────────────

CALLS: dict[str, Callable[[TrainingClient], Any]] = {
    "forward": lambda client: client.forward(DATA, "cross_entropy"),
    "forward_backward": lambda client: client.forward_backward(DATA, "cross_entropy"),
    "forward_future": lambda client: client.receipts.forward(DATA, "cross_entropy"),
    "custom": lambda client: client.forward_backward_custom(DATA, doubled),
    "optim_step": lambda client: client.optim_step(STEP),
    "save_state": lambda client: client.save_state("a"),
    "save_weights_for_sampler": lambda client: client.save_weights_for_sampler("a"),
}


def refuse(future: Any, cause: type[BaseException]) -> None:
    with pytest.raises(
        RuntimeError, match=r"an earlier custom loss .* takes no more training requests"
    ) as refused:
        future.result(20)
    assert isinstance(refused.value.__cause__, cause)


@pytest.mark.covers("U31")
def test_failed_loss_refuses_queued_and_later_calls_of_its_client_only(
    service: ServiceClient, client: TrainingClient, log: Log
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("mine")

    other = service.create_lora_training_client("fake", rank=4).result()
    before = client.optim_step(STEP)
    bad = client.forward_backward_custom(DATA, broken)
    queued = [call(client) for call in CALLS.values()]
    before.result(20)
    with pytest.raises(KeyError, match="mine"):
        bad.result(20)
    for future in [*queued, *(call(client) for call in CALLS.values())]:
        refuse(future, KeyError)
    assert client.get_info().model_data.model_name == "fake"
    assert log.numbers == [1, 2]
    other.forward_backward_custom(DATA, doubled)
    assert other.optim_step(STEP).result(20).metrics
    client.unload_model()


@pytest.mark.covers("U31")
@pytest.mark.parametrize(
    "raised", [SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError]
)
def test_loss_may_raise_anything(client: TrainingClient, raised: type[BaseException]) -> None:
    def broken(*_: Any) -> Any:
        raise raised("mine")

    with pytest.raises(
        RuntimeError, match=f"the custom loss raised {raised.__name__}: mine"
    ) as caught:
        client.forward_backward_custom(DATA, broken).result(20)
    assert isinstance(caught.value.__cause__, raised)
    refuse(client.optim_step(STEP), RuntimeError)
    assert client.get_info().model_data.model_name == "fake"


@pytest.mark.covers("U31")
@pytest.mark.parametrize("where", ["queue", "forward", "loss", "backward"])
def test_cancelled_custom_pass_refuses_later_calls(
    client: TrainingClient, log: Log, where: str
) -> None:
    loss = Held()
    before = None
    if where in ("queue", "forward"):
        log.gate.clear()
    if where == "queue":
        before = client.forward_backward_custom(DATA, doubled), client.optim_step(STEP)
    custom = client.forward_backward_custom(DATA, loss)
    behind = client.optim_step(STEP)
    if where in ("queue", "forward"):
        wait_until(lambda: log.calls)
    elif where == "loss":
        assert loss.began.wait(20)
    else:
        assert loss.began.wait(20)
        log.gate.clear()
        loss.free.set()
        wait_until(lambda: len(log.calls) == 2)
    assert custom.cancel()
    later = client.save_state("later")
    log.gate.set()
    loss.free.set()
    for future in before or ():
        future.result(20)
    refuse(later, asyncio.CancelledError)
    if where != "backward":  # there it was sent before the cancel
        refuse(behind, asyncio.CancelledError)
    assert custom.cancelled()


@pytest.mark.covers("U31")
def test_timed_out_custom_pass_refuses_later_calls(client: TrainingClient, log: Log) -> None:
    log.gate.clear()
    late = client.forward_backward_custom(DATA, doubled, timeout=0.2)
    behind = client.optim_step(STEP)
    with pytest.raises(tinkex.APITimeoutError):
        late.result(20)
    refuse(behind, tinkex.APITimeoutError)
    log.gate.set()


# ── a call that fails otherwise ───────────────────────────────────────────────────────────────────


@pytest.mark.covers("U32")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_chunk_that_fails_on_the_server_does_not_delay_others(
    client: TrainingClient, log: Log, number: int
) -> None:
    configure(client, fwdbwd_max_chunk_len=1)
    log.errors[number] = EngineError("not this chunk")
    bad, stepped = client.forward_backward_custom(TWO, doubled), client.optim_step(STEP)
    with pytest.raises(tinkex.RequestFailedError, match="not this chunk"):
        bad.result(20)
    assert stepped.result(20).metrics
    assert client.forward_backward_custom(TWO, doubled).result(20).metrics["loss:sum"] > 0


@pytest.mark.covers("U32")
@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_rejected_chunk_does_not_delay_others(
    client: TrainingClient, log: Log, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(client, fwdbwd_max_chunk_len=1)
    original = Runs._admit  # which may be the one that keeps the log

    async def admit(runs: Runs, call: Any, run: str, seq_id: int) -> Any:
        if seq_id == refused and call.request.forward_backward_input.data:
            raise Refusal(400, "not this chunk")
        return await original(runs, call, run, seq_id)

    monkeypatch.setattr(Runs, "_admit", admit)
    bad, stepped = client.forward_backward_custom(TWO, doubled), client.optim_step(STEP)
    with pytest.raises(tinkex.BadRequestError, match="not this chunk"):
        bad.result(20)
    began = time.monotonic()
    assert stepped.result(20).metrics
    assert time.monotonic() - began < 10
    assert client.forward_backward_custom(TWO, doubled).result(20).metrics["loss:sum"] > 0


@pytest.mark.covers("U32")
def test_cancelled_step_behind_a_custom_loss_leaves_no_gap(
    client: TrainingClient, log: Log
) -> None:
    loss = Held()
    custom, step, saved = (
        client.forward_backward_custom(DATA, loss),
        client.optim_step(STEP),
        client.save_state("a"),
    )
    assert loss.began.wait(20)
    assert step.cancel()
    loss.free.set()
    custom.result(20)
    saved.result(20)
    assert log.numbers == [1, 2, 3]


@pytest.mark.covers("U29")
def test_custom_loss_without_torch_is_refused_in_the_call(
    client: TrainingClient, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        client.forward_backward_custom(DATA, doubled)
    assert log.numbers == []
    monkeypatch.undo()


# ── around it ─────────────────────────────────────────────────────────────────────────────────────


async def test_awaited_custom_pass_does_not_block_the_loop(
    client: TrainingClient,
) -> None:
    loss, ticks = Held(), 0
    custom = client.forward_backward_custom(DATA, loss)
    stepped = client.optim_step(STEP)
    while not loss.began.is_set():
        await asyncio.sleep(0.01)
        ticks += 1
    loss.free.set()
    assert (await custom).metrics["loss:sum"] > 0
    assert (await stepped).metrics
    assert ticks > 0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(FakeEngine(), tmp_path) as served:
        yield served


@pytest.mark.covers("U29")
def test_closing_waits_for_a_loss_and_the_step_behind_it(url: str) -> None:
    loss = Held()
    with ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        custom, stepped = client.forward_backward_custom(DATA, loss), client.optim_step(STEP)
        assert loss.began.wait(20)
        threading.Timer(0.1, loss.free.set).start()
    assert custom.result(0).metrics["loss:sum"] > 0
    assert stepped.result(0).metrics


def test_leaving_with_an_error_drops_a_loss_that_runs(url: str) -> None:
    loss = Held()
    began = time.monotonic()
    with ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        custom, stepped = client.forward_backward_custom(DATA, loss), client.optim_step(STEP)
        assert loss.began.wait(20)
        service.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert time.monotonic() - began < 20
    loss.free.set()
    for future in (custom, stepped):
        assert isinstance(future.exception(20), tinkex.TinkerError | RuntimeError)


INTERRUPTED = """
import sys, time
import tinkex
from tinkex import types

def slow(data, logprobs):
    print("loss", flush=True)
    time.sleep(600)

with tinkex.ServiceClient(base_url=sys.argv[1]) as service:
    client = service.create_lora_training_client("fake", rank=4).result()
    data = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
    custom = client.forward_backward_custom(data, slow)
    stepped = client.optim_step(types.AdamParams(learning_rate=0.1))
    custom.result()
"""


def test_interrupt_ends_a_program_during_its_loss(url: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "default"},
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "loss\n"
    began = time.monotonic()
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert "KeyboardInterrupt" in errors
    assert program.returncode in (1, 130, -signal.SIGINT)


@pytest.mark.covers("U31")
def test_resilient_client_stays_poisoned_after_recovery(url: str) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("mine")

    with ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        with tinkex.resilient(client, every=5) as trainer:
            assert trainer.forward_backward_custom(DATA, doubled).result(20).metrics["loss:sum"] > 0
            trainer.optim_step(STEP).result(20)
            with pytest.raises(KeyError):
                trainer.forward_backward_custom(DATA, broken).result(20)
            fresh = service.create_lora_training_client("fake", rank=4).result()
            trainer._outbox.replay(fresh._outbox)
            refuse(trainer.optim_step(STEP), KeyError)


def test_forked_child_has_its_own_thread_for_losses(client: TrainingClient) -> None:
    client.forward_backward_custom(DATA, doubled).result(20)

    async def run() -> int:
        return await custom_passes.loss_thread().run(lambda: 7)

    if (child := os.fork()) == 0:
        os._exit(asyncio.run(run()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_each_loop_has_its_own_thread_for_losses() -> None:
    async def run() -> list[int]:
        thread = custom_passes.loss_thread()
        return [await thread.run(threading.get_native_id) for _ in range(2)]

    first, second = asyncio.run(run()), asyncio.run(run())
    assert len({*first}) == len({*second}) == 1
    assert first != second
