"""A step begins before the results of the one before are read: nothing is lost, doubled or given to
another.

Fixed shapes run on a CPU too, and so does a trainer that reads a step later; both then do what they
do on a GPU, and what comes out is compared with each job alone on the plain path. In float64, so
that no token hangs on a rounding.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from engine.conftest import SMALL
from engine.references import CASES, adapter_of
from engine.test_splits import examples
from engine.test_steps import Memory
from tinkex.engine.api import EngineError, PassJob, SampleJob, run_pass
from tinkex.engine.sample import passes, slab_decoding
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.sampler import Limits, Runner, Sampler
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.device_step import Results
from tinkex.server.workers.worker import Worker
from tinkex.types.inputs import ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import ForwardBackwardOutput, LoraConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

    from engine.conftest import Checkpoint, Data
    from tinkex.engine.api import DrawnToken
    from tinkex.types.inputs import Datum

CONTEXT = 3 * BLOCK
ADAPTERS = {  # any two of them are too wide for the first bank
    "one": LoraConfig(rank=8),
    "two": LoraConfig(rank=30, train_mlp=False),
    "three": LoraConfig(rank=25, seed=5),
}


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


def crowd_of(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float64) -> TorchEngine:
    """Samplers of three adapters and of the bare model that lies here."""
    engine = TorchEngine({"m": path}, threads=1, device=device, dtype=dtype)
    for index, (name, lora) in enumerate(ADAPTERS.items()):
        engine.create(name, "m", lora)
        weights = adapter_of(engine, name).state.weights
        generator = torch.Generator().manual_seed(index)
        weights.add_(
            torch.randn(weights.shape, generator=generator, dtype=torch.float64).to(weights),
            alpha=0.05,
        )
        engine.snapshot(name, name)
    engine.load_sampler("bare", "m", None)
    return engine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model with room for three blocks, and heads that are wide enough for a kernel."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("overlap")
    shape = {**SMALL, "max_position_embeddings": CONTEXT, "head_dim": 16}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def crowd(model_path: Path) -> TorchEngine:
    """On a CPU."""
    return crowd_of(model_path)


def limited(engine: TorchEngine, blocks: int | None = None, **options: Any) -> TorchEngine:
    """The same engine with a new sampler, of fixed shapes unless said otherwise."""
    if blocks is not None:
        options["cache_bytes"] = blocks * block_bytes(engine._bases["m"].model)
    engine._sampler = Sampler(Limits(**{"way": "static", **options}))
    return engine


def runner_of(engine: TorchEngine) -> Runner:
    return next(iter(engine._sampler._runners.values()))


def ask(prompt: int, samples: int, tokens: int | None, **options: Any) -> SampleRequest:
    scores = {name: options.pop(name) for name in list(options) if "logprobs" in name}
    given = np.random.default_rng(prompt).integers(3, 96, prompt)
    return SampleRequest(
        prompt=ModelInput.from_ints(given),
        num_samples=samples,
        sampling_params=SamplingParams(max_tokens=tokens, **{"stop": [], **options}),
        **scores,
    )


SOMETIMES = list(range(0, 96, 7))
"""One token in seven: samples that stop at these have a handful of tokens, each another number."""

JOBS: list[tuple[str, SampleRequest]] = [
    ("one", ask(5, 3, 30, stop=SOMETIMES)),
    ("two", ask(63, 2, 70, stop=list(range(0, 96, 31)), temperature=0.7)),
    ("three", ask(64, 4, 12, topk_sample_logprobs=3)),
    ("bare", ask(65, 1, 40, temperature=0.0)),
    ("one", ask(100, 5, 25, stop=SOMETIMES, topk_sample_logprobs=2)),
    ("bare", ask(1, 6, 20, stop=["a", "b", "Z"])),
    ("two", ask(190, 2, None)),
    ("three", ask(191, 2, None, prompt_logprobs=True)),
    ("two", ask(192, 1, 1, prompt_logprobs=True)),
    ("one", ask(20, 2, 0, prompt_logprobs=True)),
    ("bare", ask(30, 7, 1)),
    ("three", ask(60, 2, 8, top_k=4, stop=SOMETIMES)),
    ("one", ask(63, 3, 6, top_p=0.6)),
    ("two", ask(40, 1, 90, top_k=5, top_p=0.9, stop=[90])),
    ("bare", ask(130, 3, 2, stop=list(range(48)))),
    ("one", ask(60, 3, 72)),
    ("three", ask(41, 1, 75)),
    ("bare", ask(62, 2, 3)),  # its last token would need another block
]


@pytest.fixture(scope="module")
def expected(crowd: TorchEngine) -> list[SampleResponse]:
    return each_alone(crowd)


def each_alone(crowd: TorchEngine) -> list[SampleResponse]:
    """Each job alone, in slabs."""
    responses = []
    for seed, (sampler, request) in enumerate(JOBS):
        limited(crowd, way="slabs").sample_start(SampleJob("alone", sampler, request, seed))
        while crowd.sampling():
            for done in crowd.sample_step():
                assert isinstance(done.result, SampleResponse), done.result
                responses.append(done.result)
    assert {sequence.stop_reason for response in responses for sequence in response.sequences} == {
        "stop",
        "length",
    }
    return responses


@dataclass
class Ran:
    """Results of jobs that ran together."""

    results: dict[int, SampleResponse | Exception] = field(default_factory=dict)
    heard: dict[int, list[DrawnToken]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    overlapped: bool = False
    """Whether anything was unread between two steps."""


@dataclass(frozen=True)
class Plan:
    """Start of a job, and its later events."""

    job: int
    start: int = 0
    cancel: int | None = None
    """How many steps later it is cancelled."""
    deaf: int | None = None
    """At which call its listener fails."""


def together(engine: TorchEngine, plans: Sequence[Plan], *, ahead: bool = True) -> Ran:
    ran = Ran()

    def listener(plan: Plan) -> Callable[[Sequence[DrawnToken]], None]:
        calls = 0

        def hear(drawn: Sequence[DrawnToken]) -> None:
            nonlocal calls
            calls += 1
            if calls == plan.deaf:
                raise ValueError("nobody listens")
            ran.heard.setdefault(plan.job, []).extend(drawn)

        return hear

    for step in range(5000):
        for plan in plans:
            if plan.start == step:
                sampler, request = JOBS[plan.job]
                engine.sample_start(
                    SampleJob(f"job {plan.job}", sampler, request, plan.job, listener(plan))
                )
                runner_of(engine)._decoding.ahead = ahead
            if (
                plan.cancel is not None
                and plan.start + plan.cancel == step
                and plan.job not in ran.results
            ):
                engine.sample_cancel(f"job {plan.job}")
                ran.cancelled.add(plan.job)
        if step > max(plan.start for plan in plans) and not engine.sampling():
            return ran
        for done in engine.sample_step():
            job = int(done.job.removeprefix("job "))
            assert job not in ran.results, "told twice"
            assert job not in ran.cancelled
            ran.results[job] = done.result
        ran.overlapped |= any(
            runner._unread is not None for runner in engine._sampler._runners.values()
        )
    raise AssertionError("it does not end")


def assert_same(ours: SampleResponse, theirs: SampleResponse, gap: float = 1e-6) -> None:
    for one, two in zip(ours.sequences, theirs.sequences, strict=True):
        assert one.tokens == two.tokens
        assert one.stop_reason == two.stop_reason
        assert one.logprobs_np is not None
        assert two.logprobs_np is not None
        np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, rtol=gap, atol=gap)
        assert (one.topk_logprobs_np is None) == (two.topk_logprobs_np is None)
        if one.topk_logprobs_np is not None and two.topk_logprobs_np is not None:
            assert np.array_equal(one.topk_logprobs_np.token_ids, two.topk_logprobs_np.token_ids)
            np.testing.assert_allclose(
                one.topk_logprobs_np.logprobs, two.topk_logprobs_np.logprobs, rtol=gap, atol=gap
            )
    assert (ours.prompt_logprobs_np is None) == (theirs.prompt_logprobs_np is None)
    if ours.prompt_logprobs_np is not None and theirs.prompt_logprobs_np is not None:
        np.testing.assert_allclose(
            ours.prompt_logprobs_np, theirs.prompt_logprobs_np, rtol=gap, atol=gap
        )


def check(
    engine: TorchEngine,
    plans: Sequence[Plan],
    ran: Ran,
    expected: Sequence[SampleResponse],
    gap: float = 1e-6,
) -> None:
    """Everyone has what it has alone, in order and once; nothing is held."""
    assert {plan.job for plan in plans} == ran.results.keys() | ran.cancelled
    for plan in plans:
        heard: dict[int, list[DrawnToken]] = {}
        for drawn in ran.heard.get(plan.job, []):
            heard.setdefault(drawn.index, []).append(drawn)
        alone = [sequence.tokens for sequence in expected[plan.job].sequences]
        for index, tokens in heard.items():
            said = [drawn.token for drawn in tokens]
            assert said == alone[index][: len(said)]
            assert all(drawn.stop_reason is None for drawn in tokens[:-1]), "a token after the end"
        result = ran.results.get(plan.job)
        if isinstance(result, SampleResponse):
            assert_same(result, expected[plan.job], gap)
            assert [[d.token for d in heard.get(i, [])] for i in range(len(alone))] == alone
            assert [heard[i][-1].stop_reason for i in sorted(heard)] == [
                sequence.stop_reason for sequence in result.sequences if sequence.tokens
            ]
        elif result is not None:
            assert plan.deaf is not None, result
            assert str(result) == "nobody listens"
    runner = runner_of(engine)
    assert runner._pool.blocks.free == runner._pool.blocks.count
    assert not runner._pool.blocks._holders
    assert not engine._sampler._names


PLANS = st.lists(
    st.builds(
        Plan,
        st.sampled_from(range(len(JOBS))),
        st.integers(0, 25),
        st.one_of(st.none(), st.none(), st.integers(0, 30)),
        st.one_of(st.none(), st.none(), st.none(), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda plan: plan.job,
)


EVENTFUL = [Plan(job, job % 5) for job in range(len(JOBS))]
EVENTFUL[4], EVENTFUL[13], EVENTFUL[12] = (
    Plan(4, cancel=6),
    Plan(13, 3, cancel=27),
    Plan(12, 3, deaf=3),
)
"""All jobs at once, of which two are cancelled and one fails."""


@pytest.mark.covers("S36")
@pytest.mark.parametrize("blocks", [12, None])
def test_job_in_a_batch_equals_the_job_alone(
    crowd: TorchEngine, expected: list[SampleResponse], blocks: int | None
) -> None:
    """With room for a fourth of them, and for all."""
    engine = limited(crowd, blocks, max_rows=16)
    ran = together(engine, EVENTFUL)
    assert ran.overlapped
    assert ran.cancelled == {4, 13}
    check(engine, EVENTFUL, ran, expected)


def try_cases(engine: TorchEngine, expected: Sequence[SampleResponse], number: int) -> None:
    """Jobs that come, go, stop and fail at any time, in any room."""

    @settings(
        max_examples=number, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )
    @given(
        plans=PLANS,
        blocks=st.sampled_from([6, 7, 9, 12, 30]),
        rows=st.sampled_from([1, 2, 5, 8, 256]),
        chunk=st.sampled_from([40, 512]),
        ahead=st.sampled_from([True, True, True, False]),
    )
    def case(plans: list[Plan], blocks: int, rows: int, chunk: int, ahead: bool) -> None:
        limited(engine, blocks, max_rows=rows, prefill_tokens=chunk, share_prefixes=chunk > 100)
        check(engine, plans, together(engine, plans, ahead=ahead), expected)

    case()


@pytest.mark.covers("S36")
def test_jobs_joining_at_any_time_equal_jobs_alone(
    crowd: TorchEngine, expected: list[SampleResponse]
) -> None:
    try_cases(crowd, expected, 5)


@pytest.mark.slow
def test_overlapped_samples_are_equal_in_many_cases(
    crowd: TorchEngine, expected: list[SampleResponse]
) -> None:
    try_cases(crowd, expected, 100)


def test_rows_run_ahead_of_reading(crowd: TorchEngine) -> None:
    """One token is under way between steps, except when all that are allowed have been drawn."""
    engine = limited(crowd)
    heard: list[DrawnToken] = []
    engine.sample_start(SampleJob("job", "one", ask(5, 1, 4), 1, heard.extend))
    seen = []
    while engine.sampling():
        ended = engine.sample_step()
        runner = runner_of(engine)
        rows = [sample for running in runner.scheduler.running for sample in running.rows]
        seen.append((len(heard), sum(sample.drawn for sample in rows), len(ended)))
    assert seen == [(1, 0, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0), (4, 0, 1)]


@pytest.mark.parametrize("steps", range(1, 7))
def test_cancelled_job_gets_no_further_tokens(
    crowd: TorchEngine, expected: list[SampleResponse], steps: int
) -> None:
    """At any time, also when its next token has been drawn and not been read; its neighbour feels
    nothing."""
    engine = limited(crowd)
    plans = [Plan(0), Plan(3)]
    heard: list[DrawnToken] = []
    engine.sample_start(SampleJob("cancelled", "one", ask(5, 3, 30), 0, heard.extend))
    for plan in plans:
        engine.sample_start(SampleJob(f"job {plan.job}", *JOBS[plan.job], plan.job))
    for _ in range(steps):
        engine.sample_step()
    engine.sample_cancel("cancelled")
    before = len(heard)
    engine.sample_start(SampleJob("cancelled", "one", ask(6, 1, 3), 0))
    results = {done.job: done.result for _ in range(60) for done in engine.sample_step()}
    assert len(heard) == before == 3 * max(1, steps - 1)
    for plan in plans:
        result = results[f"job {plan.job}"]
        assert isinstance(result, SampleResponse)
        assert_same(result, expected[plan.job])
    assert isinstance(results["cancelled"], SampleResponse)


@pytest.mark.parametrize("deaf", range(68, 71))
def test_failure_during_eviction_is_reported(
    crowd: TorchEngine, expected: list[SampleResponse], deaf: int
) -> None:
    """Three rows need a block at once and none is free: what is unread is read first, and shows who
    has failed."""
    plans = [Plan(15), Plan(16, deaf=deaf)]
    engine = limited(crowd, 10)
    ran = together(engine, plans)
    check(engine, plans, ran, expected)
    assert isinstance(ran.results[16], ValueError), "put back as if it had not"


def alone(engine: TorchEngine, request: SampleRequest) -> list[int]:
    """The tokens of the one sample of the bare model."""
    engine.sample_start(SampleJob("alone", "bare", request, 1))
    while True:
        for done in engine.sample_step():
            assert isinstance(done.result, SampleResponse), done.result
            return done.result.sequences[0].tokens


@pytest.mark.parametrize("cancelled", [False, True])
def test_extra_decoded_token_is_harmless(crowd: TorchEngine, cancelled: bool) -> None:
    """It may be no number; in a block that another gets it is masked, but 0 times NaN is NaN."""
    engine = limited(crowd, 3, share_prefixes=False)
    # the end of one's prompt goes where the other was decoded
    fine, broken = ask(66, 1, 20), ask(4, 1, 60)
    whole, drawn = alone(engine, fine), alone(engine, broken)
    fed = {*fine.prompt.to_ints(), *broken.prompt.to_ints(), *whole}
    at = next(at for at, token in enumerate(drawn) if at > 2 and token not in {*fed, *drawn[:at]})
    embeddings = crowd._bases["m"].model.embed_VD
    kept = embeddings[drawn[at]].clone()
    embeddings[drawn[at]] = float("nan")
    try:
        engine.sample_start(
            SampleJob("broken", "bare", ask(4, 1, 60, stop=[] if cancelled else [drawn[at]]), 1)
        )
        for _ in range(at + 2):  # the first token; one step for each further; and one behind
            ended = engine.sample_step()
        if cancelled:
            engine.sample_cancel("broken")
        assert [done.job for done in ended] == ([] if cancelled else ["broken"])
        assert alone(engine, fine) == whole
    finally:
        embeddings[drawn[at]] = kept


class Ear:
    """A listener that can be watched."""

    def __call__(self, drawn: Sequence[DrawnToken]) -> None:
        """Hear, and forget."""


@pytest.mark.parametrize("cancelled", [False, True])
def test_idle_sampler_holds_no_blocks(crowd: TorchEngine, cancelled: bool) -> None:
    """Unread results name jobs, and those have weights."""
    engine, ear = limited(crowd), Ear()
    gone = weakref.ref(ear)
    engine.sample_start(
        SampleJob("job", "one", ask(5, 2, 30, stop=[] if cancelled else SOMETIMES), 0, ear)
    )
    del ear
    for _ in range(3):
        engine.sample_step()
    if cancelled:
        engine.sample_cancel("job")
    while engine.sampling():
        engine.sample_step()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("room", ["a longer slab", "more slots", "a seat"])
def test_row_without_memory_does_not_affect_later_rows(
    crowd: TorchEngine, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    monkeypatch.setattr(slab_decoding, "SMALLEST_SLAB", BLOCK)
    monkeypatch.setattr(slab_decoding, "FIRST_SLOTS", 2 if room == "more slots" else 32)
    engine, fine = limited(crowd, way="slabs"), ask(BLOCK - 6, 1, 30)
    expected = alone(engine, fine)
    runner, put = runner_of(engine), passes.put
    free, failed, slabs = runner._pool.blocks.free, list[str](), vars(runner._decoding)["_slabs"]

    def refuse(*given: Any, **_: Any) -> Any:
        if room == "a seat" and given[1] is not runner._pool.kv:
            return put(*given)
        raise MemoryError("no more memory")

    engine.sample_start(SampleJob("one", "bare", fine, 1))
    engine.sample_start(SampleJob("two", "bare", ask(BLOCK - 8, 2, 30), 2))
    for _ in range(3):
        engine.sample_step()
    with monkeypatch.context() as fault:
        if room == "a seat":
            fault.setattr(slab_decoding, "put", refuse)
            engine.sample_start(SampleJob("three", "bare", ask(5, 1, 30), 3))
        elif room == "more slots":
            fault.setattr(torch, "zeros_like", refuse)
        else:
            del slabs[slab_decoding._slab_size(BLOCK + 1)]  # which the first has left
            fault.setattr(slab_decoding, "zeros", refuse)
        while not failed and engine.sampling():
            try:
                failed += [
                    done.job
                    for done in engine.sample_step()
                    if isinstance(done.result, MemoryError)
                ]
            except MemoryError:  # of all
                failed.append(room)
    for job in ("one", "two", "three"):
        engine.sample_cancel(job)
    assert not engine.sampling()
    assert runner._pool.blocks.free == free
    assert failed == (["three"] if room == "a seat" else [room])
    assert alone(engine, fine) == expected


# ── training ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work:
    """A pass: of which adapter, over data of which lengths, and of which kind."""

    adapter: str
    lengths: tuple[int, ...]
    kind: str = "fine"

    def start(self, engine: TorchEngine, job: str, data: Data) -> None:
        """Begin it; what is bad about a bad one shows when its numbers are looked at."""
        given: Sequence[Datum] = data(*self.lengths, seed=sum(self.lengths))
        if self.kind == "bad":
            given = [
                *given[1:],
                *examples(CASES["importance_sampling"], lengths=(9,), logprobs=-1000.0),
            ]
        loss = "importance_sampling" if self.kind == "bad" else "cross_entropy"
        engine.pass_start(
            PassJob(
                job,
                self.adapter,
                given,
                loss,
                {},
                backward=self.kind != "forward",
                owner=self.adapter,
            )
        )


WORKS = [
    Work("a", (9, 4, 12, 9, 30)),
    Work("a", (3,)),
    Work("b", (20, 20, 20, 20)),
    Work("b", (20, 7, 16), "bad"),
    Work("b", (5, 5), "forward"),
    Work("c", (1, 2, 3, 4)),
    Work("c", (40, 4)),
    Work("a", (6, 25, 6), "bad"),
]


def trainer_of(checkpoint: Checkpoint, *, ahead: bool = True) -> TorchEngine:
    engine = TorchEngine({"m": checkpoint("llama")}, micro_batch_tokens=24, threads=1)
    engine._trainer.ahead = ahead
    for index, name in enumerate("abc"):
        engine.create(name, "m", LoraConfig(rank=2 + index, seed=index))
    return engine


@dataclass(frozen=True)
class Alone:
    """Return the result of a pass that runs alone."""

    result: ForwardBackwardOutput | Exception
    grad: torch.Tensor | None


@pytest.fixture(scope="module")
def passes_alone(checkpoint: Checkpoint) -> Callable[[Data], list[Alone]]:
    made: list[Alone] = []

    def get(data: Data) -> list[Alone]:
        if not made:
            engine = trainer_of(checkpoint, ahead=False)
            for work in WORKS:
                work.start(engine, "alone", data)
                (result,) = [done.result for _ in range(20) for done in engine.pass_step()]
                made.append(Alone(result, adapter_of(engine, work.adapter).grad))
                adapter_of(engine, work.adapter).grad = None
        return made

    return get


def assert_alike(
    ours: ForwardBackwardOutput | Exception, theirs: ForwardBackwardOutput | Exception
) -> None:
    if isinstance(theirs, Exception):
        assert str(ours) == str(theirs)
        return
    assert isinstance(ours, ForwardBackwardOutput), ours
    assert ours.metrics == theirs.metrics
    for one, two in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        assert one["logprobs"].to_numpy().tobytes() == two["logprobs"].to_numpy().tobytes()


def try_passes(checkpoint: Checkpoint, data: Data, alone: Sequence[Alone], number: int) -> None:
    @settings(
        max_examples=number, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )
    @given(
        starts=st.lists(
            st.tuples(st.sampled_from(range(len(WORKS))), st.integers(0, 6)),
            min_size=1,
            max_size=8,
            unique_by=lambda start: start[0],
        ),
        drop=st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(0, 6))),
        ahead=st.sampled_from([True, True, False]),
    )
    def case(starts: list[tuple[int, int]], drop: tuple[str, int] | None, ahead: bool) -> None:
        engine = trainer_of(checkpoint, ahead=ahead)
        ended: list[tuple[int, ForwardBackwardOutput | Exception]] = []
        begun: list[int] = []
        for step in range(60):
            for work, start in starts:
                if start == step and (
                    drop is None or WORKS[work].adapter != drop[0] or step < drop[1]
                ):
                    WORKS[work].start(engine, str(work), data)
                    begun.append(work)
            if drop is not None and step == drop[1]:
                engine.drop(drop[0])
            ended += [(int(done.job), done.result) for done in engine.pass_step()]
        assert not engine.passing()
        assert engine._trainer._unread is None
        assert sorted(work for work, _ in ended) == sorted(begun), "each once"
        for name in "abc":
            own = [
                work
                for work, _ in ended
                if WORKS[work].adapter == name and WORKS[work].kind == "fine"
            ]
            assert own == [work for work in begun if work in own], "in order"
            if drop is not None and name == drop[0]:
                continue
            grads = [grad for work in own if (grad := alone[work].grad) is not None]
            got = adapter_of(engine, name).grad
            assert (got is None) == (not grads)
            if got is not None:
                assert torch.equal(got, sum(grads[1:], grads[0]))
        for work, result in ended:
            if drop is not None and WORKS[work].adapter == drop[0] and "dropped" in str(result):
                continue
            assert_alike(result, alone[work].result)

    case()


@pytest.mark.covers("S14", "S15")
def test_passes_joining_at_any_time_equal_passes_alone(
    checkpoint: Checkpoint, data: Data, passes_alone: Callable[[Data], list[Alone]]
) -> None:
    try_passes(checkpoint, data, passes_alone(data), 5)


@pytest.mark.slow
def test_overlapped_passes_are_equal_in_many_cases(
    checkpoint: Checkpoint, data: Data, passes_alone: Callable[[Data], list[Alone]]
) -> None:
    try_passes(checkpoint, data, passes_alone(data), 60)


def test_results_are_read_one_step_later_under_load(checkpoint: Checkpoint, data: Data) -> None:
    engine = trainer_of(checkpoint)
    for job, name in enumerate("ab"):
        engine.pass_start(PassJob(str(job), name, data(24), "cross_entropy", {}))
    assert engine.pass_step() == []
    assert engine._trainer._unread is not None
    assert [done.job for done in engine.pass_step()] == ["0", "1"]
    assert not engine.passing()


@pytest.mark.parametrize("ahead", [False, True])
def test_passes_of_one_adapter_may_be_of_several_owners(
    checkpoint: Checkpoint, data: Data, ahead: bool
) -> None:
    engine = trainer_of(checkpoint, ahead=ahead)
    for job, owner in enumerate(["one", "two", "one"]):
        engine.pass_start(PassJob(str(job), "a", data(8, 24), "cross_entropy", {}, owner=owner))
    assert list(step_on(engine)) == ["0", "1", "2"]


def test_unread_results_do_not_hold_a_dropped_adapter(checkpoint: Checkpoint, data: Data) -> None:
    engine = trainer_of(checkpoint)
    engine.pass_start(PassJob("1", "a", data(24, 24, 24), "cross_entropy", {}))
    engine.pass_step()
    assert engine._trainer._unread is not None
    gone = weakref.ref(adapter_of(engine, "a"))
    engine.drop("a")
    gc.collect()
    assert gone() is None
    assert [done.job for done in engine.pass_step()] == ["1"]


def test_adapter_does_not_inherit_from_dropped_adapter_of_same_name(
    checkpoint: Checkpoint, data: Data
) -> None:
    engine = trainer_of(checkpoint)
    engine.pass_start(PassJob("1", "a", data(24, 24), "cross_entropy", {}))
    engine.pass_start(PassJob("2", "b", data(24, 24, 24), "cross_entropy", {}))
    while engine._trainer._unread is None or "1" not in [
        work.job for work, _ in engine._trainer._unread.chosen
    ]:
        engine.pass_step()
    engine.drop("a")
    engine.create("a", "m", LoraConfig(rank=2))
    engine.pass_start(PassJob("1", "a", data(3), "cross_entropy", {}))
    ended: list[Any] = []
    while engine.passing():
        ended += engine.pass_step()
    assert [done.job for done in ended if isinstance(done.result, EngineError)] == ["1"]
    grad = adapter_of(engine, "a").grad
    engine.create("alone", "m", LoraConfig(rank=2))
    run_pass(engine, "alone", data(3), "cross_entropy", {})
    alone = adapter_of(engine, "alone").grad
    assert grad is not None
    assert alone is not None
    assert torch.equal(grad, alone)


def step_on(engine: TorchEngine, most: int = 60) -> dict[str, ForwardBackwardOutput | Exception]:
    ended = [done for _ in range(most) for done in engine.pass_step()]
    assert not engine.passing(), "it does not end"
    assert len({done.job for done in ended}) == len(ended)
    return {done.job: done.result for done in ended}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_short_datum_that_memory_has_no_room_for_fails_in_the_end(
    checkpoint: Checkpoint, data: Data, monkeypatch: pytest.MonkeyPatch, length: int, ahead: bool
) -> None:
    """Halving goes on to one token, and then it is over."""
    engine = trainer_of(checkpoint, ahead=ahead)
    Memory(monkeypatch, 0)
    engine.pass_start(PassJob("1", "a", data(length), "cross_entropy", {}))
    engine.pass_start(PassJob("2", "b", data(length), "cross_entropy", {}, backward=False))
    for result in step_on(engine).values():
        assert f"datum 0: {length} tokens need more memory" in str(result)


def test_out_of_memory_counts_unread_tokens_once(
    checkpoint: Checkpoint, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that begins anew has had pieces read already, and one whose results are still to be
    read."""
    engine = trainer_of(checkpoint)
    engine.create("alone", "m", LoraConfig(rank=2, seed=0))
    expected = run_pass(engine, "alone", data(*[10] * 8), "cross_entropy", {})
    alone = adapter_of(engine, "alone").grad
    memory = Memory(monkeypatch, 20)
    bad = [*data(10, 10), *examples(CASES["importance_sampling"], lengths=(11,), logprobs=-1000.0)]
    engine.pass_start(PassJob("1", "a", data(*[10] * 8), "cross_entropy", {}))
    engine.pass_start(PassJob("bad", "b", bad, "importance_sampling", {}))
    for _ in range(3):
        assert engine.pass_step() == []
    assert engine._trainer._unread is not None
    memory.tokens = 15
    results = step_on(engine)
    assert memory.refused == [20]
    assert "datum 2" in str(results["bad"])
    assert isinstance(results["1"], ForwardBackwardOutput)
    assert results["1"].metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    grad = adapter_of(engine, "a").grad
    assert grad is not None
    assert alone is not None
    torch.testing.assert_close(grad, alone, rtol=1e-4, atol=1e-5)


def test_gradient_that_is_not_finite_is_refused_also_when_read_later(
    checkpoint: Checkpoint, data: Data
) -> None:
    engine = trainer_of(checkpoint)
    large = data(24, 24, weights=np.full(24, 2e37, np.float32))
    engine.pass_start(PassJob("large", "a", large, "cross_entropy", {}))
    engine.pass_start(PassJob("fine", "b", data(24, 24), "cross_entropy", {}))
    results = step_on(engine)
    assert "the gradient is not finite" in str(results["large"])
    assert isinstance(results["fine"], ForwardBackwardOutput)
    assert adapter_of(engine, "a").grad is None
    assert adapter_of(engine, "b").grad is not None


def test_gradient_that_cannot_be_added_fails_its_pass_alone(
    checkpoint: Checkpoint, data: Data
) -> None:
    """As when there is no memory for the sum; who asks learns of it, and the next one finds nothing
    left over."""
    engine = trainer_of(checkpoint)
    adapter_of(engine, "a").grad = torch.zeros(3)
    engine.pass_start(PassJob("1", "a", data(24, 24), "cross_entropy", {}))
    engine.pass_start(PassJob("2", "b", data(24), "cross_entropy", {}))
    results = step_on(engine)
    assert isinstance(results["1"], RuntimeError)
    assert isinstance(results["2"], ForwardBackwardOutput)


def test_result_that_cannot_be_made_leaves_no_gradient(
    checkpoint: Checkpoint, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError("no more memory")

    engine = trainer_of(checkpoint)
    engine.pass_start(PassJob("1", "a", data(24, 24), "cross_entropy", {}))
    monkeypatch.setattr(Results, "output", refuse)
    assert isinstance(step_on(engine)["1"], MemoryError)
    assert adapter_of(engine, "a").grad is None


def test_server_applies_a_gradient_only_when_all_passes_before_have_been_read(
    checkpoint: Checkpoint, data: Data
) -> None:
    """Passes and steps of three runs at once, as a server queues them: the weights are those of one
    after the other."""
    weights = []
    for ahead in (True, False):
        engine = trainer_of(checkpoint, ahead=ahead)
        if ahead:
            asyncio.run(_serve(engine, data))
        else:
            for turn in range(3):
                for index, name in enumerate("abc"):
                    for part in range(2):
                        run_pass(
                            engine,
                            name,
                            data(24, 9, 24, seed=10 * turn + 3 * index + part),
                            "cross_entropy",
                            {},
                        )
                    engine.optim_step(name, AdamParams(learning_rate=0.01))
        weights.append([adapter_of(engine, name).state.weights for name in "abc"])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.equal(ours, theirs)


async def _serve(engine: TorchEngine, data: Data) -> None:
    worker = Worker(engine)
    worker.start()
    waiting: list[asyncio.Future[Any]] = []
    for turn in range(3):
        for index, name in enumerate("abc"):
            for part in range(2):
                job, seed = f"{turn} {name} {part}", 10 * turn + 3 * index + part
                batch = data(24, 9, 24, seed=seed)
                work = PassJob(job, name, batch, "cross_entropy", {}, owner=name)
                start = functools.partial(engine.pass_start, work)
                waiting.append(worker.run_pass(name, job, start))
            waiting.append(
                worker.run_for(name, engine.optim_step, name, AdamParams(learning_rate=0.01))
            )
    await asyncio.gather(*waiting)
    await worker.stop()
