"""Sampling many jobs at once: neighbours change no bit, prefixes are shared, room is bounded,
chunks do not block."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.conftest import FAMILIES, SMALL, Checkpoint
from engine.references import adapter_of, randomise
from tinkex.engine.api import EngineError, SampleJob, run_pass
from tinkex.engine.model.decoder import BARE, Lora
from tinkex.engine.sample import prefill, slab_decoding, token_choice
from tinkex.engine.sample.blocks import BLOCK, Blocks, namespace, prompt_keys
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.row_adapters import Bank
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.sample.static_decoding import StaticDecoding
from tinkex.engine.sample.token_choice import choose, uniforms
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

ADAPTERS = {
    "one": LoraConfig(rank=4),
    "two": LoraConfig(rank=7, train_mlp=False),
    "three": LoraConfig(rank=16, seed=5),
}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
WAYS = pytest.mark.parametrize("way", ["native", "slabs", "static"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with several blocks, nine heads on three, and a vocabulary of several spans."""
    torch.manual_seed(3)
    shape = {
        **SMALL,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 700,
        "max_position_embeddings": 640,
    }
    path = tmp_path_factory.mktemp("long")
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def crowd(directory: Path) -> TorchEngine:
    """Samplers of three adapters, of different ranks and places, and of the bare model."""
    engine = TorchEngine({"m": directory}, threads=1)
    for index, (name, lora) in enumerate(ADAPTERS.items()):
        engine.create(name, "m", lora)
        weights = engine._adapters[name].state.weights
        weights.add_(
            torch.randn(weights.shape, generator=torch.Generator().manual_seed(index)), alpha=0.05
        )
        engine.snapshot(name, name)
    engine.load_sampler("bare", "m", None)
    return engine


@pytest.fixture
def limits(crowd: TorchEngine) -> Iterator[Any]:
    """Give the engine a sampler with other limits."""

    def set_to(**options: Any) -> TorchEngine:
        crowd._sampler = Sampler(Limits(**options))
        return crowd

    yield set_to
    crowd._sampler = Sampler()


def tokens_of(seed: int, length: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(0, 700, length)]


def ask(prompt: list[int], samples: int = 1, tokens: int = 20, **options: Any) -> SampleRequest:
    scores = {name: options.pop(name) for name in list(options) if "logprobs" in name}
    return SampleRequest(
        prompt=ModelInput.from_ints(prompt),
        num_samples=samples,
        sampling_params=SamplingParams(max_tokens=tokens, **{"stop": [], **options}),
        **scores,
    )


def finish(engine: TorchEngine) -> dict[str, SampleResponse]:
    results = {}
    while engine.sampling():
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception), done.result
            results[done.job] = done.result
    return results


def alone(engine: TorchEngine, sampler: str, request: SampleRequest, seed: int) -> SampleResponse:
    engine.sample_start(SampleJob("alone", sampler, request, seed))
    return finish(engine)["alone"]


def same(one: SampleResponse, two: SampleResponse) -> None:
    """To the bit."""
    assert len(one.sequences) == len(two.sequences)
    for first, second in zip(one.sequences, two.sequences, strict=True):
        assert first.tokens == second.tokens
        assert np.array_equal(first.logprobs_np, second.logprobs_np)  # type: ignore[arg-type]
        assert first.stop_reason == second.stop_reason
        assert first.topk_logprobs_np == second.topk_logprobs_np
    for a, b in ((one.prompt_logprobs_np, two.prompt_logprobs_np),):
        assert (a is None) == (b is None)
        assert a is None or np.array_equal(a, b, equal_nan=True)  # type: ignore[arg-type]
    assert one.topk_prompt_logprobs_np == two.topk_prompt_logprobs_np


MIXED: list[tuple[str, SampleRequest, int]] = [
    ("one", ask(tokens_of(1, 5), 3, 40), 1),
    ("two", ask(tokens_of(2, 150), 2, 60, temperature=0.6, top_k=9), 2),
    ("bare", ask(tokens_of(3, 64), 1, 130, temperature=0.0), 3),
    ("three", ask(tokens_of(4, 300), 5, 30, top_p=0.8, topk_sample_logprobs=3), 4),
    ("one", ask(tokens_of(5, 129), 1, 30, prompt_logprobs=True, topk_prompt_logprobs=2), 5),
    ("three", ask([*tokens_of(4, 200), 1, 2, 3], 2, 25), 6),
]


@pytest.mark.covers("S36")
@pytest.mark.parametrize("way", ["native", "slabs"])
@pytest.mark.parametrize("family", ["long-narrow", "long-wide"])
def test_longer_neighbours_change_no_bit_with_shared_keys(
    family: str, way: Literal["native", "slabs"], checkpoint: Checkpoint
) -> None:
    """There, products sum up long sequences in another order than short ones."""
    engine = TorchEngine({"m": checkpoint(family)}, threads=1)
    engine.load_sampler("bare", "m", None)
    engine._sampler = Sampler(Limits(way=way))

    def ask_for(length: int) -> SampleRequest:
        prompt = [token % 96 for token in tokens_of(length, length)]
        return SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=40, stop=[]),
        )

    expected = {length: alone(engine, "bare", ask_for(length), 1) for length in (100, 170)}
    for length in (*expected, 250, 330):
        engine.sample_start(SampleJob(str(length), "bare", ask_for(length), 1))
    results = finish(engine)
    for length, response in expected.items():
        same(response, results[str(length)])


@pytest.mark.covers("S36")
@pytest.mark.parametrize(
    ("prefixes", "threads"),
    [(True, 1), (False, 1), (True, 2)],
    ids=["sharing", "not-sharing", "two-threads"],
)
@pytest.mark.parametrize("way", ["native", "slabs"])
@pytest.mark.usefixtures("every_library")
def test_neighbours_change_no_bit(
    way: str, prefixes: bool, threads: int, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    monkeypatch.setattr(
        slab_decoding, "LONG_ATTENTION", 1 << 14
    )  # some steps are over it, some under
    expected = []
    for sampler, request, seed in MIXED:
        expected.append(alone(limits(way=way, share_prefixes=False), sampler, request, seed))
    engine = limits(way=way, share_prefixes=prefixes, prefill_tokens=100, max_rows=24)
    random = np.random.default_rng(9)
    neighbours = [
        (list(ADAPTERS)[int(random.integers(3))], int(random.integers(1, 400))) for _ in range(20)
    ]
    results: dict[str, Any] = {}
    pending = [(f"job{i}", *MIXED[i]) for i in range(len(MIXED))]
    pending += [
        (f"n{i}", s, ask(tokens_of(i, n), 1 + i % 3, 1 + i * 3), i)
        for i, (s, n) in enumerate(neighbours)
    ]
    order = random.permutation(len(pending))
    for index in order:
        engine.sample_start(SampleJob(*pending[index]))
        for _ in range(int(random.integers(4))):
            results |= {done.job: done.result for done in engine.sample_step()}
    results |= finish(engine)
    assert len(results) == len(pending)
    for index, response in enumerate(expected):
        same(response, results[f"job{index}"])


@pytest.mark.covers("S36")
def test_fixed_shapes_give_the_same_tokens(limits: Any) -> None:
    """The form for a GPU: equal tokens, log-probabilities within 1e-5."""
    engine = limits()
    for sampler, request, seed in MIXED:
        engine.sample_start(SampleJob(f"{sampler}{seed}", sampler, request, seed))
    expected = finish(engine)
    engine = limits(way="static")
    for sampler, request, seed in MIXED:
        engine.sample_start(SampleJob(f"{sampler}{seed}", sampler, request, seed))
    for name, result in finish(engine).items():
        for one, two in zip(expected[name].sequences, result.sequences, strict=True):
            assert one.tokens == two.tokens
            np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


@WAYS
@pytest.mark.covers("S35")
def test_logprobs_of_every_adapter_equal_the_trainers(way: str, limits: Any) -> None:
    engine = limits(way=way)
    for name in ADAPTERS:
        engine.sample_start(
            SampleJob(name, name, ask(tokens_of(8, 90), 2, 50, prompt_logprobs=True), 3)
        )
    for name, result in finish(engine).items():
        for sequence in result.sequences:
            tokens = tokens_of(8, 90) + sequence.tokens
            datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            output = run_pass(engine, name, [datum], "cross_entropy", {}, backward=False)
            theirs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
            ours = np.concatenate([result.prompt_logprobs_np[1:], sequence.logprobs_np])  # type: ignore[index]
            assert np.abs(ours - theirs).max() <= 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_decode_equally_in_every_form(family: str, checkpoint: Checkpoint) -> None:
    """Windows, bounds, scales and experts; neighbours change no bit here either."""
    engine = TorchEngine({"m": checkpoint(family)}, threads=1)
    engine.create("a", "m", LoraConfig(rank=8))
    weights = engine._adapters["a"].state.weights
    weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    engine.snapshot("a", "adapter")
    engine.load_sampler("bare", "m", None)
    prompts = [[5, 17, 80, 33, 9], list(range(3, 30)), [4]]
    ways: tuple[Literal["slabs", "native", "static"], ...] = ("slabs", "native", "static")
    expected: list[SampleResponse] = []
    for way in ways:
        engine._sampler = Sampler(Limits(way=way))
        own = [alone(engine, "adapter", ask(prompt, 2, 15), 1) for prompt in prompts]
        expected = expected or own
        for index, prompt in enumerate(prompts):
            engine.sample_start(SampleJob(f"job{index}", "adapter", ask(prompt, 2, 15), 1))
            engine.sample_start(SampleJob(f"other{index}", "bare", ask(prompt, 1, 9 + index), 1))
            assert not engine.sample_step()
        results = finish(engine)
        for index, response in enumerate(expected):
            for one, two in zip(response.sequences, results[f"job{index}"].sequences, strict=True):
                assert one.tokens == two.tokens
                np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
            if way != "static":
                same(own[index], results[f"job{index}"])


def passes_of(engine: TorchEngine) -> list[int]:
    """Record the number of tokens of each prefill step from now on."""
    runner = next(iter(engine._sampler._runners.values()))
    sizes: list[int] = []
    original = runner._prefill.hidden

    def counted(pieces: Any) -> torch.Tensor:
        sizes.append(sum(piece.stop - piece.start for piece in pieces))
        return original(pieces)

    runner._prefill.hidden = counted  # type: ignore[method-assign]
    return sizes


def test_sampler_that_is_dropped_frees_its_cache_at_once(limits: Any) -> None:
    engine = limits(way="slabs")
    alone(engine, "one", ask(tokens_of(1, 10)), 1)
    (runner,) = engine._sampler._runners.values()
    pool = weakref.ref(runner._pool)
    gc.disable()
    try:
        del runner
        engine._sampler = Sampler()
        assert pool() is None
    finally:
        gc.enable()


@WAYS
def test_prefixes_are_run_once(way: str, limits: Any) -> None:
    engine = limits(way=way)
    prompt = tokens_of(1, 200)
    first = alone(engine, "one", ask(prompt, 2), 1)
    sizes = passes_of(engine)
    same(first, alone(engine, "one", ask(prompt, 2), 1))
    assert sizes == [200 - 3 * BLOCK]
    alone(engine, "one", ask(prompt[:130] + [5] * 30), 1)  # alike in two blocks
    alone(engine, "two", ask(prompt), 1)  # other weights
    scored = alone(engine, "one", ask(prompt, prompt_logprobs=True), 1)  # needs all positions
    late = alone(engine, "one", ask(prompt, prompt_logprobs=True, prompt_logprobs_last_n=40), 1)
    assert sizes[1:] == [160 - 2 * BLOCK, 200, 200, 200 - 2 * BLOCK]
    assert scored.prompt_logprobs_np is not None
    assert late.prompt_logprobs_np is not None
    assert np.array_equal(scored.prompt_logprobs_np[-40:], late.prompt_logprobs_np[-40:])


def test_jobs_of_one_step_share_their_prefix(limits: Any) -> None:
    engine = limits()
    alone(engine, "one", ask([1]), 1)
    sizes = passes_of(engine)
    for index in range(5):
        engine.sample_start(SampleJob(f"job{index}", "one", ask(tokens_of(2, 150)), 7))
    results = finish(engine)
    assert sizes == [150 + 4 * (150 - 2 * BLOCK)]
    for result in results.values():
        same(results["job0"], result)
    same(results["job0"], alone(limits(share_prefixes=False), "one", ask(tokens_of(2, 150)), 7))


def test_long_prompts_do_not_block_short_prompts(limits: Any) -> None:
    engine = limits(prefill_tokens=64)
    heard: list[Any] = []
    engine.sample_start(SampleJob("short", "one", ask([1, 2, 3], tokens=30), 1, heard.append))
    engine.sample_step()
    engine.sample_start(SampleJob("long", "two", ask(tokens_of(3, 400)), 1))
    engine.sample_start(SampleJob("next", "two", ask(tokens_of(4, 20)), 1))
    sizes = passes_of(engine)
    for step in range(7):
        engine.sample_step()
        assert len(heard) == 2 + step  # a token each step
    assert sizes == [64, 64, 64, 64, 64, 64, 16 + 20]
    assert len(finish(engine)) == 3


@WAYS
def test_rows_without_room_wait_or_are_preempted(way: str, limits: Any) -> None:
    """Eleven blocks: nobody fails, results are those of an engine with room, listeners hear of a
    token once."""
    jobs = [("one", ask(tokens_of(1, 60), 6, 150), 1), ("two", ask(tokens_of(2, 130), 2, 100), 2)]
    jobs += [("three", ask(tokens_of(3, 30), 4, 70), 3), ("bare", ask(tokens_of(4, 200), 1, 90), 4)]
    roomy = limits(way=way)
    expected = [alone(roomy, *job) for job in jobs]
    engine = limits(way=way, cache_bytes=11 * block_bytes(roomy._bases["m"].model))
    heard: dict[str, list[Any]] = {}
    for index, job in enumerate(jobs):
        heard[f"job{index}"] = []
        engine.sample_start(SampleJob(f"job{index}", *job, heard[f"job{index}"].extend))
    runner = next(iter(engine._sampler._runners.values()))
    returned = []
    for name in ("_put_back", "unseat"):
        original = getattr(runner.scheduler, name)

        def counted(*args: Any, original: Any = original, name: str = name, **options: Any) -> None:
            if options.get("again", True):
                returned.append(name)
            original(*args, **options)

        setattr(runner.scheduler, name, counted)
    results = finish(engine)
    assert "unseat" in returned
    for index, response in enumerate(expected):
        got = results[f"job{index}"]
        for one, two in zip(response.sequences, got.sequences, strict=True):
            assert one.tokens == two.tokens
            np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
            assert [
                drawn.token
                for drawn in heard[f"job{index}"]
                if drawn.index == got.sequences.index(two)
            ] == two.tokens
        if way != "static":
            same(response, got)
    assert runner._pool.blocks.free == 11


def test_job_that_can_never_fit_is_refused(limits: Any) -> None:
    engine = limits(cache_bytes=3 * block_bytes(limits()._bases["m"].model))
    with pytest.raises(
        EngineError, match=r"a prompt of 100 tokens and 100 more need 5 blocks of 64 .* has 3"
    ):
        engine.sample_start(SampleJob("job", "one", ask(tokens_of(1, 100), tokens=100), 1))
    assert not engine.sampling()
    assert alone(engine, "one", ask(tokens_of(1, 60), tokens=60), 1).sequences[0].tokens


@WAYS
def test_broken_weights_fail_alone(way: str, limits: Any) -> None:
    """What they leave in blocks that others get next is masked, but 0 times NaN is NaN."""
    request = ask(tokens_of(1, 70), 2, 40)
    expected = alone(limits(way=way), "one", request, 1)
    engine = limits(way=way)
    engine.create("broken", "m", LoraConfig(rank=2))
    engine._adapters["broken"].state.weights.fill_(float("nan"))
    engine.snapshot("broken", "broken")
    engine.drop("broken")
    results: dict[str, Any] = {}
    for round_ in range(3):
        engine.sample_start(SampleJob(f"broken{round_}", "broken", ask(tokens_of(1, 90), 1, 40), 1))
        results |= {done.job: done.result for done in engine.sample_step()}
        engine.sample_start(SampleJob(f"fine{round_}", "one", request, 1))
        engine.sample_step()
    results |= finish(engine)
    for round_ in range(3):
        assert "not finite" in str(results[f"broken{round_}"])
        for one, two in zip(expected.sequences, results[f"fine{round_}"].sequences, strict=True):
            assert one.tokens == two.tokens
        if way != "static":
            same(expected, results[f"fine{round_}"])


def test_pass_that_fails_takes_only_its_jobs(limits: Any) -> None:
    engine = limits()
    expected = alone(engine, "one", ask(tokens_of(1, 150), 1, 40), 1)
    engine = limits()
    engine.sample_start(SampleJob("early", "one", ask(tokens_of(1, 20), 1, 40), 1))
    engine.sample_step()
    runner = next(iter(engine._sampler._runners.values()))
    original = runner._prefill.hidden

    def fail(pieces: Any) -> torch.Tensor:
        raise MemoryError("no room on the device")

    runner._prefill.hidden = fail
    engine.sample_start(SampleJob("lost", "one", ask(tokens_of(1, 150), 1, 40), 1))
    (done,) = engine.sample_step()
    assert done.job == "lost"
    assert isinstance(done.result, MemoryError)
    runner._prefill.hidden = original
    # finds nothing of what was not computed
    engine.sample_start(SampleJob("again", "one", ask(tokens_of(1, 150), 1, 40), 1))
    results = finish(engine)
    assert results.keys() == {"early", "again"}
    same(expected, results["again"])


def test_many_samples_take_turns(limits: Any) -> None:
    whole = alone(limits(), "one", ask([4, 5, 6], 40, 12), 1)
    same(whole, alone(limits(max_rows=3), "one", ask([4, 5, 6], 40, 12), 1))


def test_blocks_are_evicted_oldest_first() -> None:
    blocks = Blocks(4)
    keys = prompt_keys(namespace(1, ""), np.arange(3 * BLOCK))
    assert len(set(keys)) == 3
    assert prompt_keys(namespace(2, ""), np.arange(3 * BLOCK))[0] != keys[0]
    assert prompt_keys(namespace(1, "session"), np.arange(3 * BLOCK))[0] != keys[0]
    assert prompt_keys(namespace(1, ""), np.arange(2 * BLOCK + 5)) == keys[:2]
    taken = blocks.take(3)
    for block, key in zip(taken, keys, strict=True):
        blocks.publish(block, key)
    blocks.release(taken)
    assert blocks.free == 4
    assert blocks.find(keys) == taken
    assert blocks.free == 1
    blocks.release(taken)
    mine = blocks.take(2)  # the unused one, and the end of the prompt
    assert taken[2] in mine
    assert blocks.find(keys) == taken[:2]
    blocks.release(taken[:2])
    blocks.withdraw(taken[:1])
    assert blocks.find(keys) == []
    assert blocks.free == 2


@pytest.mark.parametrize("size", [256, 257, 700, 1024])
def test_wide_vocabularies_are_drawn_by_spans(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 3
    rows = logits.expand(3000, -1)
    numbers = uniforms(5, np.arange(3000), 0)
    tokens, logprobs = choose(rows, numbers, [SamplingParams()] * 3000)
    cumulated = logprobs[0].double().exp().cumsum(0)
    expected = torch.searchsorted(cumulated, torch.from_numpy(numbers) * cumulated[-1], right=True)
    assert (tokens != expected).float().mean() < 0.002  # rounding at a border
    monkeypatch.setattr(token_choice, "SPAN", 1 << 20)
    direct, _ = choose(rows, numbers, [SamplingParams()] * 3000)
    assert (tokens != direct).float().mean() < 0.002


def test_rows_with_different_settings_are_chosen_together() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(0)) * 4
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3, top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=1e-20),
        SamplingParams(temperature=2.0, top_k=3, top_p=0.9),
    ]
    numbers = uniforms([1, 2, 3, 4, 5, 6], np.arange(6), np.arange(6))
    tokens, logprobs = choose(logits, numbers, params)
    for row in range(6):
        token, logprob = choose(
            logits[row : row + 1], numbers[row : row + 1], params[row : row + 1]
        )
        assert token == tokens[row]
        assert torch.equal(logprob[0], logprobs[row])


def test_owners_take_turns_if_not_all_fit(checkpoint: Checkpoint) -> None:
    """Twenty jobs of one owner do not keep another's single job waiting."""
    engine = TorchEngine({"m": checkpoint("llama")})
    engine._sampler = Sampler(Limits(max_rows=2))
    engine.load_sampler("s", "m", None)
    request = SampleRequest(
        prompt=ModelInput.from_ints([3, 4, 5]),
        sampling_params=SamplingParams(max_tokens=4, stop=[]),
        num_samples=1,
    )
    for index in range(20):
        engine.sample_start(SampleJob(f"many{index}", "s", request, index, owner="many"))
    engine.sample_step()
    engine.sample_start(SampleJob("one", "s", request, 0, owner="one"))
    order: list[str] = []
    while engine.sampling():
        order += [done.job for done in engine.sample_step()]
    assert order.index("one") <= 4
    assert [name for name in order if name != "one"] == [f"many{index}" for index in range(20)]
    assert not engine._sampler._names


def test_short_prompts_run_as_rows_and_long_prompts_in_chunks(
    limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where decoding has fixed shapes. Adapters of the rows that are being decoded stay where they
    are meanwhile."""
    expected = {}
    for name, size, seed in (("one", 10, 1), ("two", 300, 2), ("three", 200, 3)):
        expected[name] = alone(
            limits(way="slabs"), name, ask(tokens_of(seed, size), 2, 40, prompt_logprobs=True), seed
        )
    engine = limits(way="static")
    engine.sample_start(
        SampleJob("one", "one", ask(tokens_of(1, 10), 2, 40, prompt_logprobs=True), 1)
    )
    runner = next(iter(engine._sampler._runners.values()))
    chunks: list[int] = []
    rows: list[int] = []
    placed: list[int] = []
    results: dict[str, SampleResponse] = {}

    def noted(owner: Any, name: str, notes: list[int], note: Callable[[Any], int]) -> None:
        original = getattr(owner, name)

        def run(self: Any, first: Any, *rest: Any) -> Any:
            notes.append(note(first))
            return original(self, first, *rest)

        monkeypatch.setattr(owner, name, run)

    noted(prefill.Prefill, "hidden", chunks, len)
    noted(StaticDecoding, "hidden", rows, len)
    noted(Bank, "_put", placed, int)
    for name, size, seed in (("", 0, 0), ("two", 300, 2), ("three", 200, 3)):
        if name:
            engine.sample_start(
                SampleJob(name, name, ask(tokens_of(seed, size), 2, 40, prompt_logprobs=True), seed)
            )
        for _ in range(3):
            results |= {done.job: done.result for done in engine.sample_step()}
    results |= finish(engine)
    assert chunks == [1]
    assert rows == [10, 200]
    assert isinstance(runner._decoding, StaticDecoding)
    assert len(placed) <= 5  # three adapters, and once more when there has to be more room
    for name, result in results.items():
        found, wanted = result.prompt_logprobs_np, expected[name].prompt_logprobs_np
        assert found is not None
        assert wanted is not None
        np.testing.assert_allclose(found[1:], wanted[1:], atol=1e-5)
        for one, two in zip(expected[name].sequences, result.sequences, strict=True):
            assert one.tokens == two.tokens
            np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_bank_holds_the_latest_rows_only(device: str, directory: Path) -> None:
    """Adapters of several kinds come and go, some into the place of another."""
    engine = TorchEngine({"m": directory}, device=device, dtype=torch.float32)
    kinds = [
        LoraConfig(rank=4),
        LoraConfig(rank=4, train_mlp=False),
        LoraConfig(rank=7),
        LoraConfig(rank=8),
    ]
    loras: dict[int, Lora] = {}
    for number in range(1, 9):
        engine.create(str(number), "m", kinds[number % len(kinds)])
        randomise(adapter_of(engine, str(number)), number)
        loras[number] = Lora(adapter_of(engine, str(number)).factors())
    linears = adapter_of(engine, "1").model.linears()
    bank, random = Bank(adapter_of(engine, "1").model, 24), np.random.default_rng(5)
    overwritten = 0
    for _ in range(60):
        wanted = sorted(
            random.choice(list(loras), int(random.integers(1, 4)), replace=False).tolist()
        )
        before = {place.start for number, place in bank._places.items() if number not in wanted}
        stayed = set(bank._places)
        if not bank.place({number: loras[number] for number in wanted}):
            bank = Bank(adapter_of(engine, "1").model, 24)
            assert bank.place({number: loras[number] for number in wanted})
        overwritten += sum(
            bank._places[number].start in before for number in wanted if number not in stayed
        )
        share = bank.share(torch.tensor([*wanted, 0], device=device))
        for linear in linears:
            x = torch.randn(1, linear.weight_ND.shape[1], device=device).expand(len(wanted) + 1, -1)
            ours = share.linear(x, linear)
            for row, number in enumerate(wanted):
                torch.testing.assert_close(
                    ours[row], loras[number].linear(x, linear)[row], atol=1e-4, rtol=1e-4
                )
            torch.testing.assert_close(ours[-1], BARE.linear(x, linear)[-1], atol=1e-4, rtol=1e-4)
            if len(wanted) == 1:  # with no mask, what had stayed of another would show
                torch.testing.assert_close(
                    bank.whole().linear(x, linear)[0], ours[0], atol=1e-4, rtol=1e-4
                )
    assert overwritten > 10
