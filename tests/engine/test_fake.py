"""The fake engine: deterministic, and enough of an engine to test a server with."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tinkex.engine.api import Directory, Engine, EngineError, SampleJob, run_pass
from tinkex.engine.fake import FakeEngine
from tinkex.engine.lazy import LazyEngine
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

DATA = [
    Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})
]
STEP = AdamParams(learning_rate=0.1)


@pytest.fixture
def fake() -> FakeEngine:
    engine = FakeEngine()
    engine.create("a", "fake", LoraConfig(rank=4))
    return engine


def run(engine: Engine, **params: Any) -> SampleResponse:
    request = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]), num_samples=2,
        prompt_logprobs=True, topk_prompt_logprobs=2,
        sampling_params=SamplingParams(**params),
    )  # fmt: skip
    engine.sample_start(SampleJob("job", "s", request, 7))
    while engine.sampling():
        for done in engine.sample_step():
            assert isinstance(done.result, SampleResponse)
            return done.result
    raise AssertionError("the job vanished")


ENGINES: list[type[Engine]] = [TorchEngine, FakeEngine, LazyEngine]
"""mypy takes no class here that lacks a method of the Protocol or has another signature."""


@pytest.mark.parametrize("kind", ENGINES)
def test_engine_has_every_method_of_the_protocol(kind: type[Engine]) -> None:
    for name, method in vars(Engine).items():
        if not name.startswith("_"):
            own = signature(vars(kind)[name]).parameters
            assert list(own) == list(signature(method).parameters), name


def test_training_changes_and_repeats(fake: FakeEngine) -> None:
    other = FakeEngine()
    other.create("b", "fake", LoraConfig(rank=4))
    losses = []
    for engine, name in ((fake, "a"), (other, "b")):
        first = run_pass(engine, name, DATA, "cross_entropy", {})
        assert engine.optim_step(name, STEP)["grad_norm:mean"] > 0
        assert engine.optim_step(name, STEP)["grad_norm:mean"] == 0
        second = run_pass(engine, name, DATA, "cross_entropy", {}, backward=False)
        assert engine.optim_step(name, STEP)["grad_norm:mean"] == 0
        losses.append((first.metrics["loss:sum"], second.metrics["loss:sum"]))
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


def test_save_load_and_snapshot(fake: FakeEngine, tmp_path: Path) -> None:
    fake.snapshot("a", "s")
    before = run(fake, max_tokens=5)
    run_pass(fake, "a", DATA, "cross_entropy", {})
    fake.optim_step("a", STEP)
    fake.writer("a", optimizer=True).write(Directory(tmp_path))
    assert run(fake, max_tokens=5).sequences[0].logprobs == before.sequences[0].logprobs
    fake.create("b", "fake", LoraConfig(rank=4))
    fake.load("b", tmp_path, optimizer=True)
    outputs = [run_pass(fake, n, DATA, "cross_entropy", {}).metrics for n in ("a", "b")]
    assert outputs[0] == outputs[1]
    fake.load_sampler("s", "fake", tmp_path)
    assert run(fake, max_tokens=5).prompt_logprobs != before.prompt_logprobs


def test_sampling(fake: FakeEngine) -> None:
    fake.load_sampler("s", "fake", None)
    one, two = run(fake, max_tokens=5), run(fake, max_tokens=5)
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert one.sequences[0].tokens != one.sequences[1].tokens
    assert len(one.sequences[0].tokens) == 5
    assert one.prompt_logprobs is not None
    assert one.topk_prompt_logprobs is not None
    assert [p is None for p in one.prompt_logprobs] == [True, False, False]
    assert one.topk_prompt_logprobs[0] is None
    assert run(fake, max_tokens=0).sequences[0].tokens == []


def test_errors_and_the_hook(fake: FakeEngine) -> None:
    with pytest.raises(EngineError, match="there is no adapter 'b'"):
        fake.optim_step("b", STEP)
    with pytest.raises(EngineError, match="there is no base model 'x'; there are fake"):
        fake.create("b", "x", LoraConfig(rank=1))
    with pytest.raises(EngineError, match="unknown loss 'sft'"):
        run_pass(fake, "a", DATA, "sft", {})
    bad = [Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([1, 2])})]
    with pytest.raises(
        EngineError, match="datum 0: 'target_tokens' has length 2 but the model input has length 1"
    ):
        run_pass(fake, "a", bad, "cross_entropy", {})

    def fail(method: str, subject: str) -> None:
        if (method, subject) == ("optim_step", "a"):
            raise RuntimeError("boom")

    fake.fail = fail
    run_pass(fake, "a", DATA, "cross_entropy", {})
    with pytest.raises(RuntimeError, match="boom"):
        fake.optim_step("a", STEP)


def test_neither_the_seam_nor_the_fake_imports_torch() -> None:
    code = "import sys, tinkex.engine, tinkex.engine.fake; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
