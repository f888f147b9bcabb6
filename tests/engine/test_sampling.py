"""Sampling: against transformers and the trainer, its distribution, its stop rules, its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from tinkex.engine.api import DrawnToken, EngineError, SampleJob, run_pass
from tinkex.engine.sample import jobs, prompt_scores
from tinkex.engine.sample.passes import Source
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.sample.token_choice import choose, uniforms
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.chunks import EncodedTextChunk, ImageChunk
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import EMPTY_CELL
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.conftest import Checkpoint, Data, Sample

PROMPT = [5, 17, 80, 33, 9]
FOREVER: dict[str, Any] = {"stop": []}


@pytest.fixture
def trained(engine: TorchEngine, data: Data) -> TorchEngine:
    """An engine whose sampler `s` is not the base model."""
    for seed in range(3):
        run_pass(engine, "a", data(9, 12, seed=seed), "cross_entropy", {})
        engine.optim_step("a", AdamParams(learning_rate=1e-2))
    engine.snapshot("a", "s")
    return engine


@pytest.mark.covers("S36")
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mistral", "llama-tied"])
def test_greedy_equals_generate(family: str, checkpoint: Checkpoint, sample: Sample) -> None:
    engine = TorchEngine({"m": checkpoint(family)}, threads=1)
    engine.load_sampler("s", "m", None)
    result = sample(engine, PROMPT, temperature=0.0, max_tokens=40, num_samples=2, **FOREVER)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)),
        do_sample=False, max_new_tokens=40,
        eos_token_id=[], pad_token_id=0,
    )  # fmt: skip
    for sequence in result.sequences:
        assert sequence.tokens == expected[0, len(PROMPT) :].tolist()
        assert sequence.stop_reason == "length"


def trainer_logprobs(engine: TorchEngine, tokens: list[int]) -> Any:
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    output = run_pass(engine, "a", [datum], "cross_entropy", {}, backward=False)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


@pytest.mark.covers("S35")
def test_logprobs_equal_the_trainers(trained: TorchEngine, sample: Sample) -> None:
    request = {"prompt_logprobs": True}
    result = sample(trained, PROMPT, num_samples=3, max_tokens=30, request=request, **FOREVER)
    assert len({tuple(sequence.tokens) for sequence in result.sequences}) == 3
    for sequence in result.sequences:
        theirs = trainer_logprobs(trained, PROMPT + sequence.tokens)
        assert result.prompt_logprobs_np is not None
        ours = np.concatenate([result.prompt_logprobs_np[1:], sequence.logprobs_np])
        assert np.abs(ours - theirs).max() <= 1e-4


@pytest.mark.covers("S36")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}])
def test_seed_determines_the_samples(
    params: dict[str, Any], trained: TorchEngine, sample: Sample
) -> None:
    def tokens(seed: int, count: int) -> list[list[int]]:
        result = sample(
            trained, PROMPT, seed=seed, num_samples=count, max_tokens=20, **FOREVER, **params
        )
        return [sequence.tokens for sequence in result.sequences]

    assert tokens(3, 4) == tokens(3, 4)
    assert tokens(3, 1) == tokens(3, 4)[:1]
    assert tokens(3, 4) != tokens(4, 4)
    assert len({tuple(t) for t in tokens(3, 4)}) == 4


@pytest.mark.covers("S36")
def test_job_results_are_independent_of_other_jobs(trained: TorchEngine, sample: Sample) -> None:
    trained._sampler = Sampler(Limits(max_rows=8))  # not all at once
    alone = sample(trained, PROMPT, seed=5, num_samples=3, max_tokens=15)
    for index in range(7):
        prompt = PROMPT if index == 4 else [index + 3, 4] * (index + 1)
        request = SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            num_samples=3,
            sampling_params=SamplingParams(max_tokens=15),
        )
        trained.sample_start(SampleJob(f"job{index}", "s", request, 5))
    trained.drop_sampler("s")  # jobs under way are not disturbed
    order, results = [], {}
    while trained.sampling():
        for done in trained.sample_step():
            order.append(done.job)
            results[done.job] = done.result
    assert sorted(order) == [f"job{index}" for index in range(7)]
    crowded = results["job4"]
    assert not isinstance(crowded, Exception)
    for one, two in zip(alone.sequences, crowded.sequences, strict=True):
        assert one.tokens == two.tokens
        assert one.logprobs == two.logprobs  # to the bit


def test_uniforms() -> None:
    rows, positions = np.meshgrid(np.arange(100), np.arange(200))
    numbers = uniforms(7, rows.ravel(), positions.ravel())
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert np.unique(numbers).size == numbers.size
    histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 45  # chi-squared with 19 degrees, p < 0.001
    table = numbers.reshape(200, 100)
    assert abs(np.corrcoef(table[:, 0], table[:, 1])[0, 1]) < 0.25
    assert abs(np.corrcoef(table[0], table[1])[0, 1]) < 0.35
    assert not np.array_equal(uniforms(8, rows.ravel(), positions.ravel()), numbers)
    assert uniforms(-1, 0, 0).shape == uniforms(2**80, 0, 0).shape == (1,)
    assert uniforms(7, np.arange(5), 3)[2] == uniforms(7, 2, 3)[0]


@pytest.mark.covers("S35")
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 100}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # of 9/9, 4/9 + 3/9 reach 0.7
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_distribution(params: dict[str, Any], expected: list[float]) -> None:
    count = 20000
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    logits = (probabilities.log() + 3.0).expand(count, -1)
    tokens, logprobs = choose(
        logits, uniforms(11, np.arange(count), 0), [SamplingParams(**params)] * count
    )
    found = np.bincount(tokens.numpy(), minlength=4) / count
    np.testing.assert_allclose(found, expected, atol=0.012)
    assert not found[np.array(expected) == 0].any()
    scaled = (probabilities.log() / (params.get("temperature") or 1.0)).log_softmax(-1)
    torch.testing.assert_close(logprobs[0], scaled)  # not truncated


def first_end(sequence: list[int], is_end: Any) -> list[int]:
    for length in range(1, len(sequence) + 1):
        if is_end(sequence[:length]):
            return sequence[:length]
    return sequence


@pytest.mark.covers("S34")
def test_stop_rules(trained: TorchEngine, sample: Sample) -> None:
    free = sample(trained, PROMPT, num_samples=4, max_tokens=43, **FOREVER).sequences
    lists = [sequence.tokens for sequence in free]
    assert all(len(tokens) == 43 for tokens in lists)

    stops = [next(t for t in lists[a][3:] if t not in lists[b]) for a, b in ((0, 1), (1, 0))]
    ended = sample(trained, PROMPT, num_samples=4, max_tokens=43, stop=stops).sequences
    for tokens, sequence, unstopped in zip(lists, ended, free, strict=True):
        expected = first_end(tokens, lambda t: t[-1] in stops)
        assert sequence.tokens == expected
        assert sequence.stop_reason == ("stop" if expected[-1] in stops else "length")
        assert sequence.logprobs is not None
        assert unstopped.logprobs is not None
        np.testing.assert_allclose(
            sequence.logprobs, unstopped.logprobs[: len(expected)], atol=1e-5
        )
    assert len({len(sequence.tokens) for sequence in ended}) > 1

    eos = sample(trained, PROMPT, num_samples=40, max_tokens=43).sequences
    assert {sequence.stop_reason for sequence in eos} == {"stop", "length"}
    for sequence in eos:
        assert (sequence.tokens[-1] == 2) == (sequence.stop_reason == "stop")
        assert 2 not in sequence.tokens[:-1]


@pytest.mark.covers("S34")
def test_stop_strings_across_token_borders(
    trained: TorchEngine, sample: Sample, tokenizer: Tokenizer
) -> None:
    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    free = sample(trained, PROMPT, max_tokens=43, **FOREVER).sequences[0].tokens
    crossing = text_of(free)[11:16]  # five characters: more than one token
    for stop in (crossing, [crossing], ["\n", crossing], [crossing, "zzzz"]):
        ended = sample(trained, PROMPT, max_tokens=43, stop=stop).sequences[0]
        assert ended.tokens == first_end(free, lambda t: crossing in text_of(t))
        assert ended.stop_reason == "stop"
        assert len(ended.tokens) < 43
        assert ended.logprobs is not None
        assert len(ended.logprobs) == len(ended.tokens)
    assert sample(trained, PROMPT, max_tokens=43, stop="\n\n").sequences[0].stop_reason == "length"


@pytest.mark.covers("S34")
def test_stop_string_of_several_bytes(tokenizer: Tokenizer) -> None:
    source = Source(None, None, frozenset(), lambda: tokenizer)  # type: ignore[arg-type]
    rule = jobs.StopRule(source, ["é"], rows=2)
    first, second = (tokenizer.token_to_id(piece) for piece in ("Ã", "©"))
    assert rule(np.array([0, 1]), np.array([first, second])).tolist() == [False, False]
    assert rule(np.array([0, 1]), np.array([second, first])).tolist() == [True, False]
    assert rule(np.array([1]), np.array([second])).tolist() == [True]


def test_stop_strings_are_found_in_a_window(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        tokens = random.integers(3, 94, 60).tolist()
        start = int(random.integers(0, 50))
        stop = tokenizer.decode(tokens)[start : start + int(random.integers(1, 6))]
        row, ended = jobs._Text(tokenizer), None
        for length, token in enumerate(tokens, 1):
            if stop in row.add(token, len(stop)):
                ended = length
                break
        whole = next(n for n in range(1, 61) if stop in tokenizer.decode(tokens[:n]))
        assert ended == whole
        assert len(row._tokens) <= 3 * (len(stop) + jobs.MARGIN)
        found += whole > 20
    assert found > 10


@pytest.mark.covers("S34")
def test_stop_strings_are_found_across_jointly_decoded_bytes() -> None:
    """As Llama 2, Mistral and Gemma have it: bytes side by side that are no text are none of them
    text."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(["<unk>", *pieces, "▁the", "▁end", "x"])}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    source = Source(None, None, frozenset(), lambda: tokenizer)  # type: ignore[arg-type]
    words = {"the": vocab["▁the"], "end": vocab["▁end"], "x": vocab["x"]}

    def tokens(text: str) -> list[int]:
        return [words[text]] if text in words else [1 + byte for byte in text.encode()]

    random = np.random.default_rng(1)
    late = 0
    for _ in range(60):
        parts = random.choice(
            ["你", "好", "世", "界", "😀", "é", "the", "x", "a"], int(random.integers(5, 40))
        ).tolist()
        stop = str(random.choice(["吗", "😎", "结束", "end", "吗 the"]))
        row = [
            token
            for part in [*parts, *stop.replace(" the", "|the").split("|"), "x"]
            for token in tokens(part)
        ]
        rule = jobs.StopRule(source, [stop], rows=1)
        ended = next(
            (at for at, token in enumerate(row) if rule(np.array([0]), np.array([token]))[0]), None
        )
        assert ended == len(row) - 2, (parts, stop)
        late += len(row) > 3 * (len(stop) + jobs.MARGIN)
        assert len(rule._texts[0]._tokens) <= 2 * jobs.BYTES * (len(stop) + jobs.MARGIN)
    assert late > 20


@pytest.mark.parametrize("count", [1, 12, 20])
def test_stop_strings_are_found_after_text_that_is_broken(count: int) -> None:
    """They may be as many tokens as they have bytes."""
    vocab = {
        piece: index
        for index, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "x"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    source = Source(None, None, frozenset(), lambda: tokenizer)  # type: ignore[arg-type]
    spelled = [1 + byte for byte in ("😎" * count).encode()]
    for before in range(1, 250, 3):
        rule = jobs.StopRule(source, ["😎" * count], rows=1)
        row = [*([1 + 0xC3, vocab["x"]] * before)[:before], vocab["x"], *spelled]
        ended = next(
            (at for at, token in enumerate(row) if rule(np.array([0]), np.array([token]))[0]), None
        )
        assert ended == len(row) - 1, before


def test_undecodable_bytes_are_dropped(tokenizer: Tokenizer) -> None:
    row, half = jobs._Text(tokenizer), tokenizer.token_to_id("Ã")
    assert half is not None
    for _ in range(600):
        row.add(half, 3)
        assert len(row._tokens) <= 2 * jobs.BYTES * (3 + jobs.MARGIN)


def test_stop_strings_need_a_tokenizer(
    checkpoint: Checkpoint, tmp_path: Path, sample: Sample
) -> None:
    for path in checkpoint("llama").iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    engine = TorchEngine({"m": tmp_path}, threads=1)
    engine.load_sampler("s", "m", None)
    with pytest.raises(
        EngineError, match=r"stop strings need a tokenizer, and m has no tokenizer\.json"
    ):
        sample(engine, PROMPT, max_tokens=3, stop="x")
    assert sample(engine, PROMPT, max_tokens=3, stop=[1]).sequences


@pytest.mark.covers("S37")
def test_prompt_logprobs(
    trained: TorchEngine, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trainer_logprobs(trained, PROMPT)
    monkeypatch.setattr(prompt_scores, "LOGITS_BUDGET", 2 * 96)  # several chunks
    result = sample(
        trained, PROMPT, max_tokens=1, temperature=0.3, request={"prompt_logprobs": True}
    )
    found = result.prompt_logprobs_np
    assert found is not None
    assert found.dtype == np.float32
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], expected, atol=1e-5)
    assert result.topk_prompt_logprobs_np is None

    last = sample(
        trained,
        PROMPT,
        max_tokens=1,
        request={"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
    )
    assert last.prompt_logprobs_np is not None
    np.testing.assert_array_equal(
        np.isnan(last.prompt_logprobs_np), [True, True, True, False, False]
    )
    np.testing.assert_allclose(last.prompt_logprobs_np[3:], expected[2:], atol=1e-5)
    # needs the other rows too
    more = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 1}
    assert (
        sample(trained, PROMPT, max_tokens=1, request=more).prompt_logprobs == last.prompt_logprobs
    )
    assert sample(trained, PROMPT, max_tokens=1).prompt_logprobs is None
    assert sample(
        trained, [5], max_tokens=1, request={"prompt_logprobs": True}
    ).prompt_logprobs == [None]


@pytest.mark.covers("S37")
def test_topk_prompt_logprobs(trained: TorchEngine, sample: Sample) -> None:
    result = sample(trained, PROMPT, max_tokens=1, request={"topk_prompt_logprobs": 96})
    table = result.topk_prompt_logprobs_np
    assert table is not None
    assert result.prompt_logprobs_np is not None
    assert table.token_ids.shape == table.logprobs.shape == (5, 96)
    assert (table.logprobs[0] == EMPTY_CELL).all()
    assert not table.token_ids[0].any()
    for position in range(1, 5):
        assert (np.diff(table.logprobs[position]) <= 0).all()
        assert np.exp(table.logprobs[position]).sum() == pytest.approx(1, abs=1e-4)
        where = table.token_ids[position].tolist().index(PROMPT[position])
        assert table.logprobs[position, where] == pytest.approx(
            result.prompt_logprobs_np[position], abs=1e-6
        )
    assert result.topk_prompt_logprobs is not None
    assert result.topk_prompt_logprobs[0] is None
    last = sample(
        trained,
        PROMPT,
        max_tokens=1,
        request={"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 1},
    )
    assert last.topk_prompt_logprobs is not None
    assert [row is None for row in last.topk_prompt_logprobs] == [True] * 4 + [False]


@pytest.mark.covers("S35")
def test_topk_sample_logprobs(trained: TorchEngine, sample: Sample) -> None:
    result = sample(
        trained,
        PROMPT,
        max_tokens=6,
        num_samples=2,
        temperature=0.5,
        request={"topk_sample_logprobs": 96},
        **FOREVER,
    )
    for sequence in result.sequences:
        table = sequence.topk_logprobs_np
        assert table is not None
        assert table.token_ids.shape == (6, 96)
        assert sequence.logprobs is not None
        for at, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
            assert np.exp(table.logprobs[at]).sum() == pytest.approx(1, abs=1e-4)
            where = table.token_ids[at].tolist().index(token)
            assert table.logprobs[at, where] == pytest.approx(logprob, abs=1e-6)


def test_temperature_zero_reports_temperature_one(trained: TorchEngine, sample: Sample) -> None:
    (sequence,) = sample(trained, PROMPT, max_tokens=8, temperature=0.0, **FOREVER).sequences
    expected = trainer_logprobs(trained, PROMPT + sequence.tokens)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.covers("S37")
@pytest.mark.parametrize("sparse", [False, True])
def test_target_prompt_logprobs(sparse: bool, trained: TorchEngine, sample: Sample) -> None:
    whole = sample(
        trained, PROMPT, max_tokens=1, request={"topk_prompt_logprobs": 96}
    ).topk_prompt_logprobs
    assert whole is not None
    targets = np.array([[1, 2], [3, -1], [-1, -1], [50, 95]])
    asked = TensorData.from_numpy(targets)
    if sparse:
        asked = TensorData([1, 2, 3, 50, 95], "int64", [4, 2], [0, 2, 3, 3, 5], [0, 1, 0, 0, 1])
    result = sample(
        trained, PROMPT, max_tokens=1, request={"target_prompt_logprobs": asked}
    ).target_prompt_logprobs
    assert result is not None
    assert result.shape == [4, 2]
    assert result.is_sparse == sparse
    found = result.to_numpy(pad_value=float("nan"))
    for row, column in np.ndindex(4, 2):
        token = int(targets[row, column])
        if token < 0:
            assert np.isnan(found[row, column])
        else:
            assert found[row, column] == pytest.approx(dict(whole[row + 1] or [])[token], abs=1e-6)


def test_alternative_prompt_tokens(trained: TorchEngine, sample: Sample) -> None:
    whole = sample(
        trained, PROMPT, max_tokens=1, request={"topk_prompt_logprobs": 96}
    ).topk_prompt_logprobs
    assert whole is not None
    first, again, other = (
        sample(
            trained, PROMPT, seed=seed, max_tokens=1, request={"prompt_alt_tokens_k": 6}
        ).prompt_alt_tokens
        for seed in (1, 1, 2)
    )
    assert first is not None
    assert again is not None
    assert other is not None
    tokens, logprobs = first.tokens.to_numpy(), first.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (4, 6)
    assert np.array_equal(tokens, again.tokens.to_numpy())
    assert not np.array_equal(tokens, other.tokens.to_numpy())
    for row, column in np.ndindex(4, 6):
        expected = dict(whole[row + 1] or [])[int(tokens[row, column])]
        assert logprobs[row, column] == pytest.approx(expected, abs=1e-5)


@pytest.mark.covers("S38")
def test_limits(trained: TorchEngine, sample: Sample) -> None:
    assert len(sample(trained, PROMPT, **FOREVER).sequences[0].tokens) == 43  # up to the window
    assert len(sample(trained, PROMPT, max_tokens=43, **FOREVER).sequences[0].tokens) == 43
    nothing = sample(
        trained, PROMPT, max_tokens=0, num_samples=2, request={"prompt_logprobs": True}
    )
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in nothing.sequences] == [
        ([], [], "length")
    ] * 2
    assert nothing.prompt_logprobs is not None
    full = sample(trained, [5] * 48, max_tokens=1, request={"prompt_logprobs": True})
    assert full.prompt_logprobs is not None
    assert len(full.prompt_logprobs) == 48
    assert len(full.sequences[0].tokens) == 1
    assert sample(trained, [5] * 48).sequences[0].tokens == []


@pytest.mark.covers("S38")
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: the model input is empty"),
        ([5] * 49, {}, "prompt: 49 tokens exceed the context window of 48"),
        (
            PROMPT,
            {"max_tokens": 44},
            r"exceeds the context window: 5 prompt tokens \+ 44 max_tokens > 48; at most 43",
        ),
        ([5] * 48, {"max_tokens": 1}, r"48 prompt tokens \+ 1 max_tokens > 48"),
        (
            [5] * 48,
            {"max_tokens": 2, "request": {"prompt_logprobs": True}},
            "exceeds the context window",
        ),
        ([5, 96], {}, "prompt: token 96 is outside the vocabulary of 96"),
        (PROMPT, {"num_samples": 0}, "num_samples must be between 1 and 1024, got 0"),
        (PROMPT, {"num_samples": 1025}, "num_samples must be between 1 and 1024, got 1025"),
        (PROMPT, {"stop": [""]}, "a stop string must not be empty"),
        (
            PROMPT,
            {"request": {"topk_prompt_logprobs": 97}},
            "topk_prompt_logprobs must be between 0 and 96, got 97",
        ),
        (PROMPT, {"request": {"topk_sample_logprobs": -1}}, "topk_sample_logprobs"),
        (
            PROMPT,
            {"request": {"prompt_logprobs_last_n": 2}},
            "prompt_logprobs_last_n .* needs prompt_logprobs",
        ),
        (PROMPT, {"request": {"prompt_logprobs": True, "prompt_logprobs_last_n": 0}}, "at least 1"),
        (
            PROMPT,
            {"request": {"target_prompt_logprobs": TensorData([1], "int64", [1, 1])}},
            r"of shape \[4, K\]",
        ),
        (
            PROMPT,
            {"request": {"target_prompt_logprobs": TensorData([96] * 4, "int64", [4, 1])}},
            "outside the vocab",
        ),
        (PROMPT, {"sampler": "none"}, "there is no sampler 'none'"),
    ],
)
def test_bad_requests(
    prompt: list[int], options: dict[str, Any], message: str, trained: TorchEngine, sample: Sample
) -> None:
    with pytest.raises(EngineError, match=message):
        sample(
            trained,
            prompt,
            **{"max_tokens": 1, **options} if "max_tokens" not in options else options,
        )
    assert not trained.sampling()


def test_media_are_refused(trained: TorchEngine) -> None:
    image = ImageChunk(data=b"x", format="png", expected_tokens=3)
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), image])
    with pytest.raises(EngineError, match="prompt: image chunks are not supported by this model"):
        trained.sample_start(
            SampleJob("job", "s", SampleRequest(prompt=prompt, sampling_params=SamplingParams()), 0)
        )


def test_cancelling_and_failing(trained: TorchEngine) -> None:
    request = SampleRequest(
        prompt=ModelInput.from_ints(PROMPT), sampling_params=SamplingParams(max_tokens=9, stop=[])
    )
    trained._sampler = Sampler(Limits(max_rows=2))
    heard: list[DrawnToken] = []

    def break_off(drawn: Sequence[DrawnToken]) -> None:
        heard.extend(drawn)
        if len(heard) == 3:
            raise ZeroDivisionError

    for name in ("running", "broken", "waiting", "fine"):
        trained.sample_start(
            SampleJob(name, "s", request, 0, break_off if name == "broken" else None)
        )
    with pytest.raises(EngineError, match="there is a sampling job 'waiting' already"):
        trained.sample_start(SampleJob("waiting", "s", request, 0))
    trained.sample_step()
    for name in ("running", "waiting", "unknown"):
        trained.sample_cancel(name)
    results: dict[str, Any] = {}
    while trained.sampling():
        results |= {done.job: done.result for done in trained.sample_step()}
    assert results.keys() == {"broken", "fine"}
    assert isinstance(results["broken"], ZeroDivisionError)
    assert not isinstance(results["fine"], Exception)
    assert len(results["fine"].sequences[0].tokens) == 9
    trained.drop_sampler("unknown")


def test_job_that_has_begun_to_decode_can_be_cancelled(trained: TorchEngine) -> None:
    """As it happens when whoever reads a stream hangs up: the row leaves, the others and the engine
    go on."""
    request = SampleRequest(
        prompt=ModelInput.from_ints(PROMPT), sampling_params=SamplingParams(max_tokens=9, stop=[])
    )
    for name in ("left", "stays"):
        trained.sample_start(SampleJob(name, "s", request, 0))
    for _ in range(4):
        assert not trained.sample_step()
    trained.sample_cancel("left")
    results: dict[str, Any] = {}
    while trained.sampling():
        results |= {done.job: done.result for done in trained.sample_step()}
    assert results.keys() == {"stays"}
    assert len(results["stays"].sequences[0].tokens) == 9
