"""Penalties, biases, banned words and min_p: each token against a float64 reference, in every way
of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.conftest import SMALL, Checkpoint, Sample
from tinkex.engine.api import EngineError, SampleJob
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.logit_changes import Shape, Shaped, Shaper
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.sample.token_choice import choose, uniforms
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import ModelInput
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams

VOCAB = 300
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = pytest.mark.parametrize("way", ["native", "slabs", "static"])
BORDER = 2e-4
"""Numbers so near to where another token begins decide nothing."""
PROMPT = [5, 17, 80, 33, 9, 17]
EACH: list[dict[str, Any]] = [
    {"min_p": 0.3},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.7},
    {"logit_bias": {5: 4.0, 6: -100.0, 299: 3.5}},
    {
        "bad_words": [[7], [3, 4], [4, 3], [9, 3, 9], [8, 3]],
        "logit_bias": {3: 6.0, 4: 6.0, 7: 9.0, 9: 6.0},
    },
]
TOGETHER: list[dict[str, Any]] = [
    {"min_p": 0.1, "temperature": 0.7},
    {"min_p": 0.05, "top_k": 9, "temperature": 1.4},
    {"min_p": 0.02, "top_p": 0.7},
    {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"frequency_penalty": 2.0, "presence_penalty": 0.5, "temperature": 0.0},
    {"presence_penalty": 1.0, "frequency_penalty": -0.3, "temperature": 0.5, "top_p": 0.8},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 5.0, 4: 5.0, 12: -1.0},
        "bad_words": [[3, 4], [10], [4, 4]],
        "min_p": 0.01,
        "top_k": 50,
        "top_p": 0.95,
        "temperature": 0.8,
    },
]


def changed(logits: Any, prompt: list[int], said: list[int], params: SamplingParams) -> Any:
    """Changed logits of one position, in float64."""
    logits = np.array(logits, np.float64)
    for word in params.bad_words or []:
        assert not isinstance(word, str)
        before = list(word[:-1])
        if not before or said[-len(before) :] == before:
            logits[word[-1]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *said}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(said):
        logits[token] -= params.presence_penalty + params.frequency_penalty * said.count(token)
    return logits


def candidates(logits: Any, number: float, params: SamplingParams) -> set[int]:
    """The tokens that a number may pick of changed logits; several where it is near to a border."""
    if params.temperature == 0:
        best = logits.max()
        return {int(token) for token in np.flatnonzero(logits > best - 1e-4)}
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights /= weights.sum()
    found: set[int] = set()
    near = weights.max() * params.min_p
    for slack in (1 - 1e-4, 1 + 1e-4) if params.min_p else (1,):
        kept = np.where(weights < near * slack, 0, weights)
        order = np.arange(len(kept))
        if params.top_k != -1 or params.top_p != 1:
            order = np.argsort(-kept, kind="stable")[: params.top_k if params.top_k > 0 else None]
        for top_p in (params.top_p - 1e-4, params.top_p + 1e-4) if params.top_p < 1 else (1.0,):
            values = kept[order]
            values = (
                np.where(values.cumsum() - values >= top_p * values.sum(), 0, values)
                if top_p < 1
                else values
            )
            shares = values.cumsum() / values.sum()
            for offset in (-BORDER, 0, BORDER):
                share = min(max(number + offset, 0), 1 - 1e-12)
                found.add(int(order[np.searchsorted(shares, share, side="right")]))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for several blocks."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("shaped")
    shape = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 4 * BLOCK}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """The same model in float64, by transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


@pytest.fixture(scope="module")
def engine(directory: Path) -> TorchEngine:
    engine = TorchEngine({"m": directory}, threads=1, device=DEVICE, dtype=torch.float32)
    engine.load_sampler("s", "m", None)
    return engine


def limited(engine: TorchEngine, **limits: Any) -> TorchEngine:
    if DEVICE == "cuda":
        limits.pop("way", None)
    engine._sampler = Sampler(Limits(**limits))
    return engine


def ask(
    samples: int = 2, tokens: int = 25, prompt: list[int] = PROMPT, **params: Any
) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints(prompt),
        num_samples=samples,
        sampling_params=SamplingParams(max_tokens=tokens, **{"stop": [], **params}),
    )


def finish(engine: TorchEngine) -> dict[str, SampleResponse]:
    results = {}
    while engine.sampling():
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception), done.result
            results[done.job] = done.result
    return results


def check(reference: Any, request: SampleRequest, seed: int, result: SampleResponse) -> int:
    """Each token is one that its number may pick; how many could have been no other."""
    params, prompt, certain = request.sampling_params, request.prompt.to_ints(), 0
    for index, sequence in enumerate(result.sequences):
        tokens = sequence.tokens
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0].numpy()
        for at, token in enumerate(tokens):
            number = float(uniforms(seed, index, at)[0])
            row = logits[len(prompt) - 1 + at]
            may = candidates(changed(row, prompt, tokens[:at], params), number, params)
            assert token in may, (index, at)
            certain += len(may) == 1
            scaled = row / (params.temperature or 1)
            expected = scaled[token] - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
            assert sequence.logprobs is not None
            assert abs(sequence.logprobs[at] - expected) < 1e-3  # of the unchanged logits
    return certain


@WAYS
@pytest.mark.parametrize("params", [*EACH, *TOGETHER])
def test_every_token_equals_the_reference(
    way: str, params: dict[str, Any], engine: TorchEngine, reference: Any
) -> None:
    limited(engine, way=way).sample_start(
        SampleJob("one", "s", request := ask(4, 30, **params), 11)
    )
    result = finish(engine)["one"]
    assert check(reference, request, 11, result) >= 80
    limited(engine, way=way).sample_start(
        SampleJob("one", "s", ask(4, 30, temperature=params.get("temperature", 1.0)), 11)
    )
    plain = finish(engine)["one"]
    assert [one.tokens for one in result.sequences] != [one.tokens for one in plain.sequences]


@WAYS
def test_neighbours_are_not_changed_by_a_bit(way: str, engine: TorchEngine) -> None:
    requests = {
        f"shaped{index}": ask(2, 20 + index, **params)
        for index, params in enumerate(EACH + TOGETHER)
    }
    plain = {"whole": ask(3, 30), "cut": ask(2, 30, top_k=7), "greedy": ask(1, 30, temperature=0.0)}
    alone: dict[str, SampleResponse] = {}
    for name, request in (plain | requests).items():
        limited(engine, way=way).sample_start(SampleJob(name, "s", request, 4))
        alone |= finish(engine)
    limited(engine, way=way)
    for name, request in (requests | plain).items():
        engine.sample_start(SampleJob(name, "s", request, 4))
    together = finish(engine)
    for name, result in alone.items():
        for one, two in zip(result.sequences, together[name].sequences, strict=True):
            assert one.tokens == two.tokens, name
            if DEVICE == "cpu" and way != "static":  # fixed shapes are an accelerator's way
                assert np.array_equal(one.logprobs_np, two.logprobs_np), name  # type: ignore[arg-type]


def test_rows_without_changes_take_no_work(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before = Shaper.choose

    def spy(self: Shaper, *args: Any) -> Any:
        seen.append(len(args[3]))
        return before(self, *args)

    monkeypatch.setattr(Shaper, "choose", spy)
    limited(engine, way="slabs").sample_start(
        SampleJob("plain", "s", ask(3, 5, min_p=0.1, top_k=4), 1)
    )
    finish(engine)
    assert seen == []
    engine.sample_start(SampleJob("plain", "s", ask(3, 5), 1))
    engine.sample_start(SampleJob("shaped", "s", ask(1, 5, presence_penalty=1), 1))
    engine.sample_start(SampleJob("biased", "s", ask(1, 5, logit_bias={3: 1.0}), 1))
    engine.sample_step()
    (runner,) = engine._sampler._runners.values()
    assert len(runner._drawer._shaper._slots) == 1  # a bias does not look back
    finish(engine)
    assert set(seen) == {2}
    assert not runner._drawer._shaper._slots
    assert runner._drawer._shaper._tokens.numel() == 0
    assert runner._drawer._shaper._plan is None


@pytest.mark.parametrize("way", ["native", "static"])
def test_preempted_samples_resume_equally(way: str, engine: TorchEngine, reference: Any) -> None:
    params = {
        "presence_penalty": 1.2,
        "bad_words": [[3, 4], [4, 3]],
        "logit_bias": {3: 5.0, 4: 5.0},
    }
    request = ask(2, 3 * BLOCK, list(range(20, 20 + BLOCK - 4)), **params)
    limited(engine, way=way).sample_start(SampleJob("roomy", "s", request, 5))
    expected = finish(engine)["roomy"]
    check(reference, request, 5, expected)
    model = next(iter(engine._samplers.values())).model
    limited(engine, way=way, cache_bytes=8 * block_bytes(model))
    for name in ("a", "b", "c"):
        engine.sample_start(SampleJob(name, "s", request, 5))
    returned = 0
    results = {}
    while engine.sampling():
        for done in engine.sample_step():
            results[done.job] = done.result
        (runner,) = engine._sampler._runners.values()
        returned += bool(
            runner.scheduler.queues
            or any(one.tokens for run in runner.scheduler.running for one in run.waiting)
        )
    assert returned
    for result in results.values():
        assert not isinstance(result, Exception)
        assert [one.tokens for one in result.sequences] == [
            one.tokens for one in expected.sequences
        ]


@WAYS
def test_banned_sequences_are_never_drawn(way: str, engine: TorchEngine) -> None:
    words: list[Any] = [[7], [3, 4], [3, 3, 3]]
    tempting = {3: 100.0, 4: 99.0, 7: 100.0}
    limited(engine, way=way).sample_start(
        SampleJob("one", "s", ask(6, 40, bad_words=words, logit_bias=tempting), 2)
    )
    for sequence in finish(engine)["one"].sequences:
        text = " ".join(map(str, sequence.tokens))
        assert not any(f" {' '.join(map(str, word))} " in f" {text} " for word in words)
        assert " 3 3 " in f" {text} "  # the beginning of a sequence may be drawn


def test_banned_text_is_banned_within_and_at_the_start_of_a_word(
    checkpoint: Checkpoint, sample: Sample
) -> None:
    engine = TorchEngine({"m": checkpoint("llama")}, threads=1)
    engine.load_sampler("s", "m", None)
    tokenizer = next(iter(engine._samplers.values())).tokenizer()
    text, ab = "cab", tokenizer.encode("ab", add_special_tokens=False).ids
    assert len(ab) == 1
    shape = Shape.of(
        SamplingParams(bad_words=["ab", text]), np.array(PROMPT), 96, lambda: tokenizer
    )
    assert shape is not None
    assert ab[0] in shape.banned
    assert shape.lasts_W.tolist() == ab
    result = sample(
        engine,
        PROMPT,
        max_tokens=30,
        num_samples=8,
        stop=[],
        bad_words=["ab"],
        logit_bias={ab[0]: 50.0},
    )
    assert all(
        "ab" not in tokenizer.decode(one.tokens)
        for one in result.sequences
        if isinstance(one, SampledSequence)
    )


def test_seed_determines_the_samples(engine: TorchEngine) -> None:
    drawn = []
    for seed in (1, 1, 2):
        limited(engine).sample_start(SampleJob("one", "s", ask(2, 20, **TOGETHER[-1]), seed))
        drawn.append([one.tokens for one in finish(engine)["one"].sequences])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"logit_bias": {VOCAB: 1.0}},
            f"logit_bias holds token {VOCAB}, outside the vocabulary of {VOCAB}",
        ),
        (
            {"bad_words": [[1, VOCAB]]},
            f"bad_words holds token {VOCAB}, outside the vocabulary of {VOCAB}",
        ),
        (
            {"bad_words": [[token] for token in range(VOCAB)]},
            f"bad_words ban all {VOCAB} tokens",
        ),
    ],
)
def test_token_outside_the_vocabulary_is_refused(
    params: dict[str, Any], message: str, engine: TorchEngine
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        engine.sample_start(SampleJob("one", "s", ask(**params), 1))
    assert caught.value.category == "user"


def test_min_p_keeps_the_likely() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    rows = probabilities.log().expand(4000, -1)
    numbers = uniforms(3, np.arange(4000), 0)
    for min_p, kept in ((0.0, 4), (0.3, 3), (0.6, 2), (0.8, 1), (1.0, 1)):
        tokens, _ = choose(rows, numbers, [SamplingParams(min_p=min_p)] * 4000)
        assert len(set(tokens.tolist())) == kept
    hot, _ = choose(rows, numbers, [SamplingParams(min_p=0.6, temperature=2.0)] * 4000)
    assert len(set(hot.tolist())) == 3  # the share is of the probability after the temperature


def test_many_rows_are_changed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=generator)
    numbers, params = uniforms(3, np.arange(9), 0), [SamplingParams(frequency_penalty=1.0)] * 9
    shapes = [Shape.of(one, np.array([1]), 50, lambda: None) for one in params]  # type: ignore[arg-type, return-value]

    def drawn() -> list[list[int]]:
        shaper, said = Shaper(torch.device("cpu"), 50), [[] for _ in range(9)]  # type: ignore[var-annotated]
        for at in range(300):
            rows = [
                Shaped(row, shape, said[row], at)
                for row, shape in enumerate(shapes)
                if shape is not None
            ]
            for row, token in enumerate(shaper.choose(logits, numbers, params, rows).tolist()):
                said[row].append(token)
        return said

    whole = drawn()
    monkeypatch.setattr("tinkex.engine.sample.logit_changes.ROWS_BUDGET", 100)
    assert drawn() == whole
    assert all(max(row.count(token) for token in row) <= 30 for row in whole)
