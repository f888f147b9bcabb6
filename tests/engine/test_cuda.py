"""On an accelerator: the CPU's numbers in float32, and near them in bfloat16. Skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.references import adapter_of, randomise
from tinkex.engine import run_pass
from tinkex.engine.torch_engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampling import SampleRequest, SampleResponse, SamplingParams
from tinkex.types.training import AdamParams, LoraConfig

if TYPE_CHECKING:
    from engine.conftest import Checkpoint, Data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")

FAMILIES = ["llama", "llama-bias", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "smollm3", "qwen3-moe"]


def engine_of(checkpoint: Checkpoint, family: str, device: str, dtype: torch.dtype) -> TorchEngine:
    engine = TorchEngine({"m": checkpoint(family)}, device=device, dtype=dtype, micro_batch_tokens=64)
    engine.create("a", "m", LoraConfig(rank=4))
    randomise(adapter_of(engine))
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu(checkpoint: Checkpoint, data: Data, family: str) -> None:
    given = data(9, 4, 12, 9, 30, 1)
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        engine = engine_of(checkpoint, family, device, dtype)
        output = run_pass(engine, "a", given, "cross_entropy", {})
        grad = adapter_of(engine).grad
        assert grad is not None
        logprobs = np.concatenate([o["logprobs"].to_numpy() for o in output.loss_fn_outputs])
        engine.optim_step("a", AdamParams(learning_rate=0.01))
        results[device, dtype] = (logprobs, grad.float().cpu())
    exact, same, near = results.values()
    assert np.abs(same[0] - exact[0]).max() < 1e-3
    assert float((same[1] - exact[1]).norm() / exact[1].norm()) < 1e-3
    assert np.abs(near[0] - exact[0]).mean() < 0.05
    assert float((near[1] - exact[1]).norm() / exact[1].norm()) < 0.1


def test_adapters_beside_each_other_are_as_alone(checkpoint: Checkpoint, data: Data) -> None:
    engine = engine_of(checkpoint, "qwen3", "cuda", torch.bfloat16)
    engine.create("b", "m", LoraConfig(rank=8, seed=5))
    randomise(adapter_of(engine, "b"))
    given = {"a": data(9, 12, seed=1), "b": data(20, 3, seed=2)}
    alone = {name: run_pass(engine, name, d, "cross_entropy", {}).metrics["loss:sum"] for name, d in given.items()}
    for name, d in given.items():
        engine.pass_start(name, name, d, "cross_entropy", {})
    while engine.passing():
        for done in engine.pass_step():
            assert not isinstance(done.result, Exception)
            assert done.result.metrics["loss:sum"] == pytest.approx(alone[done.job], rel=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window", "gemma2", "gemma3", "qwen3-moe"])
def test_samples_have_the_trainers_log_probabilities(checkpoint: Checkpoint, family: str) -> None:
    engine = engine_of(checkpoint, family, "cuda", torch.bfloat16)
    engine.snapshot("a", "s")
    prompt = np.arange(3, 12)
    request = SampleRequest(
        prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(max_tokens=20, stop=[]), num_samples=6
    )
    for job in ("one", "two"):
        engine.sample_start(job, "s", request, 7)
    ended: dict[str, SampleResponse] = {}
    while engine.sampling():
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception), done.result
            ended[done.job] = done.result
    gaps = []
    for one, two in zip(ended["one"].sequences, ended["two"].sequences, strict=True):
        assert one.tokens == two.tokens
        whole = np.concatenate([prompt, one.tokens])
        output = run_pass(
            engine,
            "a",
            [Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})],
            "cross_entropy",
            {},
            backward=False,
        )
        assert one.logprobs is not None
        gaps.append(output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :] - np.array(one.logprobs))
    gap = np.concatenate(gaps)
    kl = float((np.exp(gap) - 1 - gap).mean())
    print(f"{family}: mean |difference| {np.abs(gap).mean():.5f}, KL {kl:.2e}")
    assert kl < 1e-2
