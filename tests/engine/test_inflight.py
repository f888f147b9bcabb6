"""In-flight targets: samples go on with new weights over the keys and values they have; versions
say who drew what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from engine.references import adapter_of
from engine.test_sampling_batches import (
    WAYS,
    alone,
    ask,
    directory,
    finish,
    passes_of,
    same,
    tokens_of,
)
from tinkex.engine.api import Directory, DrawnToken, EngineError, SampleJob
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.sample.static_decoding import StaticDecoding
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.optim import make_state
from tinkex.types.sampled import SampleResponse
from tinkex.types.training import LoraConfig

__all__ = ["directory"]  # a fixture

Make = Callable[..., TorchEngine]


@pytest.fixture
def make(directory: Path) -> Make:
    """An engine whose target `t` has version 1 of three; samplers `v2`, `v3` wait."""

    def make(**limits: Any) -> TorchEngine:
        engine = TorchEngine({"m": directory}, threads=1)
        engine._sampler = Sampler(Limits(**limits))
        engine.create("a", "m", LoraConfig(rank=4))
        adapter = adapter_of(engine)
        for version in (1, 2, 3):
            noise = torch.randn(
                adapter.layout.size, generator=torch.Generator().manual_seed(version)
            )
            adapter.state = make_state(type(adapter.state), adapter.state.weights + 0.05 * noise)
            engine.snapshot("a", f"v{version}")
        engine.point("t", "v1", 1)
        return engine

    return make


def run(
    engine: TorchEngine, moves: dict[int, int], results: dict[str, SampleResponse] | None = None
) -> Any:
    """Step to the end, and move the target to a version before these steps."""
    found = results or {}
    step = 0
    while engine.sampling():
        if step in moves:
            engine.point("t", f"v{moves[step]}", moves[step])
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception), done.result
            found[done.job] = done.result
        step += 1
    return found


class Reference:
    """transformers and peft in float64, with a cache that outlasts a change of adapters."""

    def __init__(self, engine: TorchEngine, directory: Path, place: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.model: Any = None
        for version in (1, 2, 3):
            saved = place / f"v{version}"
            saved.mkdir()
            engine.sampler_writer(f"v{version}").write(Directory(saved))
            if self.model is None:
                self.model = PeftModel.from_pretrained(
                    base, str(saved), "v1", autocast_adapter_dtype=False
                ).double()
            else:
                self.model.load_adapter(str(saved), f"v{version}", autocast_adapter_dtype=False)
        self.model.double().eval()

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], tokens: list[int], versions: list[int], *, keeps: bool = True
    ) -> Any:
        """The log-probability of each token by the weights of its version; without `keeps` they
        read all before it."""
        cache, fed, found = DynamicCache(), prompt, []
        for at, (token, version) in enumerate(zip(tokens, versions, strict=True)):
            self.model.set_adapter(f"v{version}")
            if not keeps:
                cache, fed = DynamicCache(), prompt + tokens[:at]
            logits = self.model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[
                0, -1
            ]
            found.append(float(logits.log_softmax(-1)[token]))
            fed = [token]
        return np.array(found)


@pytest.mark.covers("U48")
@WAYS
def test_running_sample_takes_new_weights_and_keeps_its_cache(
    way: str, make: Make, directory: Path, tmp_path: Path
) -> None:
    engine = make(way=way)
    reference = Reference(engine, directory, tmp_path)
    prompts = {"long": tokens_of(1, 150), "short": tokens_of(2, 5)}
    heard: list[DrawnToken] = []
    engine.sample_start(SampleJob("long", "t", ask(prompts["long"], 2, 40), 1))
    engine.sample_start(SampleJob("short", "t", ask(prompts["short"], 1, 70), 2, heard.extend))
    results = run(engine, {12: 2, 30: 3})
    for name, prompt in prompts.items():
        for sequence in results[name].sequences:
            tokens, versions = sequence.tokens, sequence.weights_versions
            assert versions is not None
            assert versions == sorted(versions)
            assert set(versions) == {1, 2, 3}
            assert versions.index(2) == 12  # the next token, that of the step after the move
            kept = reference.logprobs(prompt, tokens, versions)
            np.testing.assert_allclose(sequence.logprobs_np, kept, atol=2e-5)
            anew = reference.logprobs(prompt, tokens, versions, keeps=False)
            assert np.abs(anew - kept)[13:].max() > 1e-3  # else nothing would be shown
    assert [drawn.version for drawn in heard] == results["short"].sequences[0].weights_versions


@pytest.mark.covers("U48", "U50")
@WAYS
def test_move_concerns_its_own_target_only(way: str, make: Make) -> None:
    engine = make(way=way)
    request = ask(tokens_of(3, 130), 3, 30)
    engine.load_sampler("bare", "m", None)
    before = {name: alone(engine, name, request, 5) for name in ("v1", "v2", "bare")}
    engine.point("other", "v1", 7)
    for name in before:
        engine.sample_start(SampleJob(name, name, request, 5))
    engine.sample_start(SampleJob("followed", "t", request, 5))
    engine.sample_start(SampleJob("other", "other", request, 5))
    results = run(engine, {9: 2})
    for name, expected in before.items():
        assert results[name].sequences[0].weights_versions is None
        assert results[name].sequences[0].tokens == expected.sequences[0].tokens
        if way != "static":
            same(results[name], expected)
    assert results["other"].sequences[0].weights_versions == [7] * 30
    assert results["other"].sequences[0].tokens == before["v1"].sequences[0].tokens
    assert results["followed"].sequences[0].tokens[:9] == before["v1"].sequences[0].tokens[:9]
    assert results["followed"].sequences[0].tokens != before["v1"].sequences[0].tokens


@pytest.mark.covers("U47")
@WAYS
def test_target_never_goes_back(way: str, make: Make) -> None:
    engine = make(way=way)
    request = ask(tokens_of(4, 20), 1, 10)
    engine.point("t", "v3", 3)
    engine.point("t", "v2", 2)
    result = alone(engine, "t", request, 1)
    assert result.sequences[0].weights_versions == [3] * 10
    assert result.sequences[0].tokens == alone(engine, "v3", request, 1).sequences[0].tokens
    with pytest.raises(EngineError, match="there is no sampler 'v9'"):
        engine.point("t", "v9", 9)


@pytest.mark.covers("U49", "U56")
@WAYS
def test_prefixes_are_shared_within_a_cache_and_survive_a_move(way: str, make: Make) -> None:
    engine = make(way=way)
    prompt = tokens_of(5, 200)

    def hits(sampler: str, cache: str = "") -> int:
        engine.sample_start(SampleJob("job", sampler, ask(prompt, 1, 3), 1, None, "", cache))
        return finish(engine)["job"].prompt_cache_hit_tokens

    assert hits("t", "session-1") == 0
    sizes = passes_of(engine)
    assert hits("t", "session-1") == 3 * BLOCK
    assert sizes == [200 - 3 * BLOCK]
    assert hits("t", "session-2") == 0
    assert hits("v1") == 0  # a snapshot of the very weights
    assert hits("v1") == 3 * BLOCK
    engine.point("t", "v2", 2)
    assert hits("t", "session-1") == 3 * BLOCK
    assert hits("v2") == 0
    assert hits("t", "session-3") == 0


@pytest.mark.parametrize("way", ["native", "slabs"])
def test_scored_prompt_is_read_by_one_version(way: str, make: Make) -> None:
    engine = make(way=way, prefill_tokens=64)
    prompt = tokens_of(6, 300)
    expected = alone(engine, "v1", ask(prompt, 1, 1, prompt_logprobs=True), 1)
    engine.sample_start(
        SampleJob("scored", "t", ask(prompt, 1, 8, prompt_logprobs=True), 1, None, "", "one")
    )
    engine.sample_start(SampleJob("plain", "t", ask(prompt, 1, 8), 1, None, "", "two"))
    results = run(engine, {2: 2})
    scored = results["scored"]
    assert scored.prompt_logprobs_np is not None
    assert expected.prompt_logprobs_np is not None
    assert np.array_equal(scored.prompt_logprobs_np, expected.prompt_logprobs_np, equal_nan=True)
    assert scored.sequences[0].weights_versions == [1] + [2] * 7
    assert results["plain"].sequences[0].weights_versions == [2] * 8


@WAYS
def test_samples_that_make_room_come_back_with_the_newest_weights(way: str, make: Make) -> None:
    roomy = make(way=way)
    model = roomy._bases["m"].model
    engine = make(way=way, cache_bytes=9 * block_bytes(model))
    for name in ("first", "second", "third"):
        engine.sample_start(
            SampleJob(name, "t", ask(tokens_of(len(name), 60), 3, 120), 1, None, "", name)
        )
    results = run(engine, {20: 2, 150: 3})
    assert set(results) == {"first", "second", "third"}
    for result in results.values():
        for sequence in result.sequences:
            assert len(sequence.tokens) == 120
            assert sequence.weights_versions is not None
            assert sequence.weights_versions == sorted(sequence.weights_versions)
    runner = next(iter(engine._sampler._runners.values()))
    assert runner._pool.blocks.free == 9


@WAYS
def test_unused_version_is_freed(way: str, make: Make) -> None:
    engine = make(way=way)
    engine.sample_start(SampleJob("job", "t", ask(tokens_of(7, 80), 2, 40), 1))
    for _ in range(5):
        engine.sample_step()
    first = weakref.ref(engine._frozen["v1"][2])
    runner = next(iter(engine._sampler._runners.values()))
    before = engine._samplers["t"].weights
    engine.point("t", "v2", 2)
    engine.drop_sampler("v1")
    engine.sample_step()
    gc.collect()
    assert first() is None
    if way == "native":
        assert before not in runner._decoding._steps._packed  # type: ignore[attr-defined]
    if isinstance(runner._decoding, StaticDecoding):
        assert before not in runner._decoding._bank._places
        assert len(runner._decoding._bank._places) == 1
    engine.drop_sampler("v2")  # which takes the target along, and disturbs nobody
    with pytest.raises(EngineError, match="there is no sampler 't'"):
        engine.sample_start(SampleJob("late", "t", ask([1, 2]), 1))
    assert finish(engine)["job"].sequences[1].weights_versions == [1] * 5 + [2] * 35
