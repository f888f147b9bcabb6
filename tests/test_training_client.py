"""The clients over the fake engine: order, chunks, pipelining, and that no call ever holds up
another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import wait_until
from tinkex import ServiceClient, TrainingClient, types
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.server.runs.admission import Runs
from tinkex.server.server_limits import Limits

Make = Callable[..., ServiceClient]
STEP = types.AdamParams(learning_rate=0.1)


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    targets = {"target_tokens": [token + 1 for token in tokens]}
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {**targets, **inputs})


DATA = [datum(1, 2, 3)]


class Log:
    """Calls that reached the engine, in order; fails or waits on request."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[int, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, method: str, subject: str) -> None:
        if method.startswith("sample_"):
            return
        self.calls.append(method)
        assert self.gate.wait(20)
        if error := self.errors.pop(len(self.calls), None):
            raise error


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seq_ids in the order in which the server got them."""
    arrived: list[int] = []
    original = Runs._admit

    async def admit(runs: Runs, call: Any, run: str, seq_id: int) -> Any:
        arrived.append(seq_id)
        return await original(runs, call, run, seq_id)

    monkeypatch.setattr(Runs, "_admit", admit)
    return arrived


@pytest.fixture
def service(fake_service: Make, log: Log, numbers: list[int]) -> ServiceClient:
    return fake_service(FakeEngine(fail=log), limits=Limits(gap_seconds=10))


@pytest.fixture
def client(service: ServiceClient, log: Log) -> TrainingClient:
    made = service.create_lora_training_client("fake", rank=4).result()
    log.calls.clear()
    return made


def reset(client: TrainingClient, **changes: Any) -> None:
    """Change what the server's configuration told the client."""
    session = client._session
    session.client_config = session.client_config.model_copy(update=changes)


# ── order ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C42", "D27")
def test_calls_are_executed_in_the_order_they_were_made(
    client: TrainingClient, log: Log, numbers: list[int]
) -> None:
    futures: list[Any] = []
    for _ in range(5):
        futures += [client.forward_backward(DATA, "cross_entropy"), client.optim_step(STEP)]
    futures.append(client.save_state("end"))
    for future in futures:
        future.result(20)
    assert log.calls == ["forward_backward", "optim_step"] * 5 + ["save"]
    assert numbers == list(range(1, 12))


@pytest.mark.covers("4.1/13")
def test_calls_return_before_anything_is_done(client: TrainingClient, log: Log) -> None:
    log.gate.clear()
    # the engine waits for the gate
    futures = [client.forward_backward(DATA, "cross_entropy") for _ in range(20)]
    time.sleep(0.2)
    assert not any(future.done() for future in futures)
    log.gate.set()
    assert len({future.result(20).metrics["loss:sum"] for future in futures}) == 1


@pytest.mark.covers("C42")
def test_calls_are_submitted_without_waiting_for_results(
    client: TrainingClient, log: Log, numbers: list[int]
) -> None:
    log.gate.clear()
    futures = [client.optim_step(STEP) for _ in range(6)]
    wait_until(lambda: len(numbers) >= 6)
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert len(log.calls) <= 1
    log.gate.set()
    for future in futures:
        future.result(20)


@pytest.mark.covers("D27")
def test_many_threads_share_a_client(client: TrainingClient, log: Log, numbers: list[int]) -> None:
    """Each thread's own calls stay in its order, and no number is used twice or left out."""
    lock = threading.Lock()
    made: list[str] = []

    def work(thread: int) -> None:
        futures = []
        for step in range(5):
            with lock:  # the order of making is the order of the lock
                made.append("forward_backward" if (thread + step) % 2 else "optim_step")
                futures.append(
                    client.forward_backward(DATA, "cross_entropy")
                    if (thread + step) % 2
                    else client.optim_step(STEP)
                )
        for future in futures:
            future.result(20)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result(30)
    # the server puts the run's state on disk meanwhile
    assert [call for call in log.calls if call != "save"] == made
    assert numbers == list(range(1, 41))


def test_results_can_be_waited_for_in_any_order(client: TrainingClient) -> None:
    futures = [client.forward([datum(index, index + 1)], "cross_entropy") for index in range(10)]
    seen = {index: futures[index].result(20) for index in reversed(range(10))}
    again = client.forward([datum(3, 4)], "cross_entropy").result(20)
    assert seen[3].metrics == again.metrics


# ── chunks ────────────────────────────────────────────────────────────────────────────────────────


def many(count: int) -> list[types.Datum]:
    return [datum(index, index + 1, index + 2) for index in range(count)]


@pytest.mark.covers("C43", "D01")
@pytest.mark.parametrize(
    ("changes", "count", "chunks"),
    [
        ({"fwdbwd_max_chunk_len": 2}, 5, 3),
        ({"fwdbwd_max_chunk_len": 1}, 3, 3),
        ({"fwdbwd_max_chunk_len": 5}, 5, 1),
        ({"fwdbwd_max_chunk_bytes_count": 2 * 36}, 5, 3),
        ({"fwdbwd_max_chunk_bytes_count": 1}, 2, 2),
    ],
    ids=str,
)
def test_large_calls_are_cut_and_joined(
    client: TrainingClient,
    log: Log,
    numbers: list[int],
    changes: dict[str, int],
    count: int,
    chunks: int,
) -> None:
    whole = client.forward(many(count), "cross_entropy").result(20)
    numbers.clear()
    log.calls.clear()
    reset(client, **changes)
    cut = client.forward(many(count), "cross_entropy").result(20)
    assert sorted(numbers[:-1]) == list(range(3, 2 + chunks))
    assert numbers[-1] == 2  # the first one last
    assert len(log.calls) == chunks
    assert cut.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-12)
    for one, other in zip(whole.loss_fn_outputs, cut.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())


def test_chunks_can_be_compressed(client: TrainingClient) -> None:
    plain = client.forward(many(3), "cross_entropy").result(20)
    reset(client, proto_compress_fwdbwd=True)
    assert client.forward(many(3), "cross_entropy").result(20).metrics == plain.metrics


def test_gradient_of_chunks_is_the_gradient_of_the_whole(service: ServiceClient) -> None:
    norms = []
    for length in (1024, 2):
        client = service.create_lora_training_client("fake", rank=4).result()
        reset(client, fwdbwd_max_chunk_len=length)
        client.forward_backward(many(7), "cross_entropy")
        norms.append(client.optim_step(STEP).result(20).metrics)
    assert norms[0] == norms[1]


@pytest.mark.covers("C44", "C45", "C46")
def test_forward_pass_computes_the_same_and_adds_no_gradient(service: ServiceClient) -> None:
    forward, plain = (
        service.create_lora_training_client("fake", rank=4).result() for _ in range(2)
    )
    looked = forward.forward(many(3), "cross_entropy")
    futures = [each.forward_backward(many(3), "cross_entropy") for each in (forward, plain)]
    steps = [each.optim_step(STEP).result(20) for each in (forward, plain)]
    results = [future.result(20) for future in (looked, *futures)]
    assert results[0] == results[1] == results[2]
    assert steps[0] == steps[1]
    assert len(results[0].loss_fn_outputs) == 3
    forward.forward_backward(many(3), "cross_entropy")
    forward.forward_backward(many(3), "cross_entropy")
    assert forward.optim_step(STEP).result(20) != steps[0]  # two gradients are more than one


# ── nothing is held up ────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C56", "D13")
def test_failed_call_does_not_hold_up_the_next(
    client: TrainingClient, log: Log, numbers: list[int]
) -> None:
    log.errors = {1: EngineError("not this one"), 2: RuntimeError("nor this one")}
    bad, worse = client.forward_backward(DATA, "cross_entropy"), client.optim_step(STEP)
    good = client.optim_step(STEP)
    assert good.result(2).metrics is not None
    with pytest.raises(
        tinkex.RequestFailedError, match=r"forward_backward.*not this one"
    ) as caught:
        bad.result(2)
    assert caught.value.category == "user"
    with pytest.raises(tinkex.RequestFailedError, match="RuntimeError") as other:
        worse.result(2)
    assert other.value.category == "server"
    assert numbers == [1, 2, 3]


@pytest.mark.covers("W01")
def test_failed_chunk_does_not_hold_up_the_next_call(client: TrainingClient, log: Log) -> None:
    reset(client, fwdbwd_max_chunk_len=1)
    log.errors = {2: EngineError("the second of three")}
    bad, good = client.forward_backward(many(3), "cross_entropy"), client.optim_step(STEP)
    with pytest.raises(tinkex.RequestFailedError, match="the second of three"):
        bad.result(2)
    assert good.result(2).metrics is not None


@pytest.mark.covers("W02")
def test_call_cancelled_while_it_waits_leaves_no_gap(
    client: TrainingClient, log: Log, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call's submission is slow; of the three behind it the middle one is given up."""
    release = threading.Event()
    original = client._session.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await original(*args, **kwargs)

    monkeypatch.setattr(client._session, "submit", slow)
    first, second, given_up, last = (client.optim_step(STEP) for _ in range(4))
    time.sleep(0.05)
    assert given_up.cancel()
    release.set()
    assert last.result(5).metrics is not None
    assert first.result(5) == second.result(5)
    assert given_up.cancelled()
    assert numbers == [1, 2, 3]
    assert log.calls == ["optim_step"] * 3


@pytest.mark.covers("W02")
def test_call_cancelled_while_it_is_sent_still_arrives(
    client: TrainingClient, log: Log, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, release = threading.Event(), threading.Event()
    original = client._session.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        sending.set()
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await original(*args, **kwargs)

    monkeypatch.setattr(client._session, "submit", slow)
    given_up, last = client.forward_backward(DATA, "cross_entropy"), client.optim_step(STEP)
    assert sending.wait(20)
    assert given_up.cancel()
    release.set()
    assert last.result(5).metrics is not None
    assert numbers == [1, 2]
    assert log.calls == ["forward_backward", "optim_step"]


@pytest.mark.covers("W02", "W26")
def test_timed_out_wait_does_not_hold_up_the_next(client: TrainingClient, log: Log) -> None:
    log.gate.clear()
    first = client.forward_backward(DATA, "cross_entropy")
    with pytest.raises(TimeoutError):
        first.result(0.05)

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await first.result_async(0.05)

    asyncio.run(wait())
    second = client.optim_step(STEP)
    log.gate.set()
    assert second.result(5).metrics is not None
    assert first.result(5).metrics["loss:sum"] > 0


UNSENDABLE: dict[str, Callable[[TrainingClient], Any]] = {
    "not-a-number": lambda client: client.optim_step(types.AdamParams(learning_rate=float("nan"))),
}
REFUSED: dict[str, Callable[[TrainingClient], Any]] = {
    "number-for-a-name": lambda client: client.save_state(5),  # type: ignore[arg-type]
}


@pytest.mark.covers("C56", "W01")
@pytest.mark.parametrize("call", UNSENDABLE | REFUSED)
def test_call_that_cannot_be_sent_does_not_hold_up_the_next(fake_service: Make, call: str) -> None:
    service = fake_service(FakeEngine(), limits=Limits(gap_seconds=30))
    client = service.create_lora_training_client("fake", rank=4).result()
    bad = (UNSENDABLE | REFUSED)[call](client)
    good = client.optim_step(STEP)
    assert bad.exception(5) is not None
    assert good.result(10).metrics is not None


@pytest.mark.parametrize("call", UNSENDABLE)
def test_unsendable_call_is_a_clear_error(client: TrainingClient, call: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        UNSENDABLE[call](client).result(5)


@pytest.mark.covers("W01")
def test_refused_chunk_does_not_hold_up_the_next_call(fake_service: Make) -> None:
    """One of three chunks is too large for the server."""
    service = fake_service(FakeEngine(), limits=Limits(gap_seconds=30, body_bytes=3000))
    client = service.create_lora_training_client("fake", rank=4).result()
    reset(client, fwdbwd_max_chunk_len=1)
    bad = client.forward_backward([datum(1, 2), datum(*range(500)), datum(3, 4)], "cross_entropy")
    good = client.optim_step(STEP)
    assert isinstance(bad.exception(5), tinkex.APIStatusError)
    assert good.result(10).metrics is not None


def test_oversize_body_is_refused_in_words(fake_service: Make) -> None:
    service = fake_service(FakeEngine(), limits=Limits(body_bytes=3000))
    client = service.create_lora_training_client("fake", rank=4).result()
    with pytest.raises(tinkex.APIStatusError, match=r"413.*3000"):
        client.forward_backward([datum(*range(500))], "cross_entropy").result(5)


@pytest.mark.covers("24.code.17")
def test_empty_batch_is_refused_at_once(client: TrainingClient, numbers: list[int]) -> None:
    for method in (client.forward, client.forward_backward):
        with pytest.raises(ValueError, match="data is empty"):
            method([], "cross_entropy")
    assert numbers == []


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────


def weighted(
    _: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.stack([-2 * item.sum() for item in logprobs]).sum()
    return loss, {"seen:sum": float(len(logprobs))}


@pytest.mark.covers("C55", "24.custom.3")
def test_custom_loss_trains_through_cross_entropy(service: ServiceClient, log: Log) -> None:
    custom = service.create_lora_training_client("fake", rank=4).result()
    plain = service.create_lora_training_client("fake", rank=4).result()
    log.calls.clear()
    output = custom.forward_backward_custom(many(3), weighted).result(20)
    doubled = [datum(*item.model_input.to_ints(), weights=[2.0] * 3) for item in many(3)]
    expected = plain.forward_backward(doubled, "cross_entropy").result(20)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(
        expected.metrics["loss:sum"], rel=1e-6
    )
    assert output.metrics["seen:sum"] == 3.0
    assert len(output.loss_fn_outputs) == 3
    assert custom.optim_step(STEP).result(20) == plain.optim_step(STEP).result(20)
    assert log.calls == ["forward_backward"] * 3 + ["optim_step"] * 2


@pytest.mark.covers("C55")
def test_custom_loss_takes_its_turn(client: TrainingClient, log: Log) -> None:
    before = client.optim_step(STEP)
    custom = client.forward_backward_custom(DATA, weighted)
    after = client.optim_step(STEP)
    for future in (before, custom, after):
        future.result(20)
    assert log.calls == ["optim_step", "forward_backward", "forward_backward", "optim_step"]


@pytest.mark.covers("W06")
def test_custom_loss_runs_off_the_network_thread(client: TrainingClient) -> None:
    names: list[str] = []
    told = threading.Event()

    def slow(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        names.append(threading.current_thread().name)
        assert told.wait(20)
        return weighted(data, logprobs)

    future = client.forward_backward_custom(DATA, slow)
    wait_until(lambda: names)
    client.get_info()
    told.set()
    future.result(20)
    assert names != ["tinkex"]


def failing(*_: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda data, logprobs: (torch.tensor(1.0), {}), ValueError, "no gradient"),
        (lambda data, logprobs: (1.0, {}), ValueError, "no gradient"),
        (lambda data, logprobs: (logprobs[0].detach().sum(), {}), ValueError, "no gradient"),
        (failing, KeyError, "mine"),
        (lambda data, logprobs: None, ValueError, "must return"),
        (lambda data, logprobs: (logprobs[0], {}), ValueError, "a single number"),
        (
            lambda data, logprobs: ((logprobs[0] - logprobs[0]).sqrt().sum(), {}),
            ValueError,
            "NaN or infinity",
        ),
    ],
    ids=["constant", "float", "detached", "raises", "nothing", "vector", "not-a-number"],
)
def test_bad_custom_loss_is_reported_and_ends_the_training_of_its_client_only(
    service: ServiceClient, client: TrainingClient, loss: Any, error: type[Exception], words: str
) -> None:
    other = service.create_lora_training_client("fake", rank=4).result()
    bad, stepped = client.forward_backward_custom(DATA, loss), client.optim_step(STEP)
    with pytest.raises(error, match=words) as caught:
        bad.result(20)
    with pytest.raises(RuntimeError, match="custom loss") as refused:
        stepped.result(20)
    assert refused.value.__cause__ is caught.value
    other.forward_backward(DATA, "cross_entropy").result(20)
    assert other.optim_step(STEP).result(20).metrics


def test_custom_loss_needs_targets(client: TrainingClient, numbers: list[int]) -> None:
    bare = types.Datum(types.ModelInput.from_ints([1, 2]), {"weights": [1.0, 1.0]})
    with pytest.raises(ValueError, match="datum 1 has none"):
        client.forward_backward_custom([DATA[0], bare], weighted)
    with pytest.raises(ValueError, match="data is empty"):
        client.forward_backward_custom([], weighted)
    assert numbers == []


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────


def test_optimizer_step_needs_one_set_of_parameters(
    client: TrainingClient, numbers: list[int]
) -> None:
    with pytest.raises(ValueError, match="not both"):
        client.optim_step(STEP, adam_params=STEP)
    with pytest.raises(TypeError, match="NoneType"):
        client.optim_step()
    with pytest.raises(TypeError, match="dict"):
        client.optim_step({"learning_rate": 0.1})  # type: ignore[arg-type]
    assert numbers == []
    assert client.optim_step(adam_params=STEP).result(5).metrics is not None
    with pytest.raises(tinkex.RequestFailedError, match="adamw"):
        client.optim_step(types.DimuonParams(learning_rate=0.1)).result(5)


def test_run_needs_something_to_train(service: ServiceClient) -> None:
    with pytest.raises(AssertionError, match="train_mlp"):
        service.create_lora_training_client(
            "fake", train_mlp=False, train_attn=False, train_unembed=False
        ).result()


def test_wrong_model_name_lists_the_known_models(service: ServiceClient) -> None:
    with pytest.raises(tinkex.BadRequestError, match=r"'flake'.*: fake"):
        service.create_lora_training_client("flake").result()
    with pytest.raises(tinkex.BadRequestError, match=r"'flake'.*: fake"):
        service.create_sampling_client(base_model="flake").result()


@pytest.mark.covers("C37", "24.service.4")
def test_sampler_needs_a_source(service: ServiceClient) -> None:
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client().result()
    with pytest.raises(ValueError, match="tinker://"):
        service.create_sampling_client(model_path="weights/a").result()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": types.TensorData.from_any([1])}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": types.TensorData.from_any([[1.0]])}, "target_prompt_logprobs"),
    ],
    ids=str,
)
def test_contradicting_options_of_a_sample_are_refused(
    service: ServiceClient, arguments: dict[str, Any], words: str
) -> None:
    sampler = service.create_sampling_client(base_model="fake").result()
    prompt = types.ModelInput.from_ints([1, 2])
    with pytest.raises(ValueError, match=words):
        sampler.sample(
            prompt, **{"num_samples": 1, "sampling_params": types.SamplingParams(), **arguments}
        )


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=4, seed=1)


@pytest.mark.covers("C75", "D16", "24.sampling.8")
def test_samples_carry_ids_and_log_probabilities(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="fake").result()
    drawn = sampler.sample(
        PROMPT, 3, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result(10)
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3
    assert all(
        sequence.sequence_id.startswith(sampler.sampling_session_id) for sequence in drawn.sequences
    )
    assert drawn.prompt_logprobs is not None
    assert drawn.prompt_logprobs[0] is None
    assert drawn.topk_prompt_logprobs is not None
    assert drawn.topk_prompt_logprobs[0] is None
    again = sampler.sample(PROMPT, 3, PARAMS).result(10)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in drawn.sequences]
    assert sampler.compute_logprobs(PROMPT).result(10) == drawn.prompt_logprobs
    assert sampler.compute_logprobs(PROMPT, 1).result(10)[:2] == [None, None]
    assert sampler.get_base_model() == "fake"


def test_many_samples_at_once(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="fake").result()
    futures = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, seed=seed))
        for seed in range(100)
    ]
    drawn = [future.result(20).sequences[0] for future in futures]
    assert len({sequence.sequence_id for sequence in drawn}) == 100
    assert len({tuple(sequence.tokens) for sequence in drawn}) > 50


@pytest.mark.covers("C50", "C51", "C52")
def test_sampler_of_the_present_weights(service: ServiceClient, client: TrainingClient) -> None:
    before = client.save_weights_and_get_sampling_client().result()
    client.forward_backward([datum(*range(60))], "cross_entropy")
    client.optim_step(STEP)
    after = client.save_weights_and_get_sampling_client().result()
    one, other = (
        sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].logprobs
        for sampler in (before, after)
    )
    assert one != other
    named = client.save_weights_for_sampler("a").result(10).path
    same = (
        client.create_sampling_client(named)
        .result()
        .sample(PROMPT, 1, PARAMS)
        .result(10)
        .sequences[0]
        .logprobs
    )
    assert same == other


def test_cancelling_a_derived_future_gives_its_work_up(
    client: TrainingClient, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    original = client._session.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await original(*args, **kwargs)

    monkeypatch.setattr(client._session, "submit", slow)
    client.optim_step(STEP)
    saving = client.save_weights_for_sampler("never")
    time.sleep(0.05)
    assert saving.cancel()
    release.set()
    assert client.optim_step(STEP).result(5).metrics is not None
    assert log.calls == ["optim_step", "optim_step"]


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


def train(client: TrainingClient, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(client.forward_backward(many(3), "cross_entropy"))
        client.optim_step(STEP)
    return [future.result(20).metrics["loss:sum"] for future in losses]


@pytest.mark.covers("C36", "C48")
def test_run_resumes_at_its_last_step(
    service: ServiceClient, client: TrainingClient, numbers: list[int]
) -> None:
    train(client)
    path = client.save_state("a", user_metadata={"why": "test"}).result(10).path
    expected = train(client)
    numbers.clear()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed) == expected
    assert numbers == [1, 2, 3, 4]
    with pytest.warns(FutureWarning, match="create_training_client_from_state_with_optimizer"):
        assert client.load_state_with_optimizer(path).result(10).path == path
    assert train(client) == expected
    with pytest.warns(FutureWarning, match="TrainingClient.load_state"):
        assert client.load_state(path).result(10).model_id == client.model_id
    assert resumed.get_info().lora_rank == 4
    assert resumed.model_id != client.model_id


def test_wrong_checkpoint_is_recognized(service: ServiceClient, client: TrainingClient) -> None:
    sampler = client.save_weights_for_sampler("a").result(10).path
    training = client.save_state("a").result(10).path
    with pytest.raises(tinkex.RequestFailedError, match="sampler checkpoint"):
        service.create_training_client_from_state(sampler).result()
    with pytest.raises(tinkex.BadRequestError, match="training checkpoint"):
        service.create_sampling_client(model_path=training).result()
    with pytest.raises(tinkex.RequestFailedError, match="nothing"):
        service.create_training_client_from_state(training.replace("/a", "/nothing")).result()
    with pytest.raises(tinkex.RequestFailedError, match="overwrite=True"):
        client.save_state("a").result(10)
    assert client.save_state("a", overwrite=True).result(10).path == training


# ── async twins ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C38", "C40")
def test_whole_surface_from_a_loop(service: ServiceClient) -> None:
    async def run() -> None:
        capabilities = await service.get_server_capabilities_async()
        assert capabilities.supported_models[0].model_name == "fake"
        client = await service.create_lora_training_client("fake", rank=4)
        passed = client.forward_backward(DATA, "cross_entropy")
        stepped = client.optim_step(STEP)
        assert (await passed).metrics["loss:sum"] > 0
        assert (await stepped.result_async()).metrics is not None
        assert (await client.forward(DATA, "cross_entropy")).metrics["loss:sum"] > 0
        custom = await client.forward_backward_custom(DATA, weighted)
        assert custom.metrics["seen:sum"] == 1
        state = (await client.save_state("a")).path
        weights = (await client.save_weights_for_sampler("a")).path
        with pytest.warns(FutureWarning, match="TrainingClient.load_state"):
            loading = await client.load_state_async(state)
        assert (await loading).path == state
        with pytest.warns(FutureWarning, match="TrainingClient.load_state_with_optimizer"):
            loading = await client.load_state_with_optimizer_async(state)
        assert (await loading).path == state
        assert client.get_info().model_id == client.model_id
        for resumed in (
            await service.create_training_client_from_state(state),
            await service.create_training_client_from_state_with_optimizer(state),
        ):
            assert resumed.get_info().lora_rank == 4
        samplers = [
            await service.create_sampling_client(base_model="fake"),
            await service.create_sampling_client(model_path=weights),
            await client.create_sampling_client(weights),
            await client.save_weights_and_get_sampling_client(),
        ]
        drawn = await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for sampler in samplers))
        assert [len(response.sequences) for response in drawn] == [1, 1, 1, 1]
        assert len(await samplers[0].compute_logprobs(PROMPT)) == 3
        assert samplers[0].get_base_model() == "fake"

    asyncio.run(run())


@pytest.mark.covers("W07")
def test_clients_do_not_block_the_event_loop(fake_service: Make) -> None:
    asked, ticked = threading.Event(), threading.Event()

    def hold(method: str, subject: str) -> None:
        asked.set()
        assert ticked.wait(20), "the loop that awaits does nothing else meanwhile"

    service = fake_service(FakeEngine(fail=hold))

    async def run() -> None:
        async def tick() -> None:
            while not asked.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            ticked.set()

        ticking = asyncio.create_task(tick())
        client = await service.create_lora_training_client("fake", rank=4)
        await ticking
        asked.clear()
        ticked.clear()
        ticking = asyncio.create_task(tick())
        await client.save_weights_and_get_sampling_client()
        await ticking

    asyncio.run(run())


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


def test_closed_client_is_a_clear_error(fake_service: Make) -> None:
    service = fake_service()
    client = service.create_lora_training_client("fake", rank=4).result()
    sampler = service.create_sampling_client(base_model="fake").result()
    service.close().result(10)
    service.close().result(10)
    for call in (
        lambda: client.optim_step(STEP),
        lambda: client.forward_backward(DATA, "cross_entropy"),
        lambda: client.save_state("a"),
        lambda: client.save_weights_for_sampler("a"),
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: sampler.compute_logprobs(PROMPT),
        lambda: service.create_lora_training_client("fake").result(),
        lambda: service.create_sampling_client(base_model="fake").result(),
    ):
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            call()
    assert client.get_info().model_id == client.model_id  # what needs no request still works


def test_clients_have_a_plain_repr_and_are_not_pickled(
    service: ServiceClient, client: TrainingClient
) -> None:
    assert repr(client) == f"TrainingClient({client.model_id!r})"
    assert repr(service).startswith("ServiceClient(base_url='local:")
    for each in (service, client):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(each)


# ── a server that comes and goes ──────────────────────────────────────────────────────────────────


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def test_lost_receipt_does_not_run_a_call_twice(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a submission is lost: the same bytes go out again under the same number."""
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.01)
    created = Answer(body={"model_id": "m"})
    faulty.script("retrieve_future", created, Answer(body={}))
    faulty.script("optim_step", Answer(drop=True), Answer(503), Answer(body={"request_id": "r"}))
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("x").result()
        client.optim_step(STEP).result(10)
        client.optim_step(STEP).result(10)
    sent = faulty.requests("optim_step")
    assert [request.json["seq_id"] for request in sent] == [1, 1, 1, 2]
    assert len({request.body for request in sent[:3]}) == 1
