"""On an accelerator: the CPU's numbers in float32, and near them in bfloat16. Skipped where there
is none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.references import adapter_of, assert_near, randomise
from engine.test_overlap import EVENTFUL, check, crowd_of, each_alone, limited, model_path, together
from engine.test_stability import experience, gradient
from tinkex.engine.api import Directory, PassJob, SampleJob, run_pass
from tinkex.engine.model.decoder import BARE
from tinkex.engine.sample.blocks import RESERVED
from tinkex.engine.sample.passes import Pool, Row
from tinkex.engine.sample.static_decoding import StaticDecoding
from tinkex.engine.torch import device_copies
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint, Data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")

__all__ = ["model_path"]  # a fixture

FAMILIES = [
    "llama",
    "llama-bias",
    "qwen2",
    "qwen3",
    "mistral-window",
    "gemma2",
    "gemma3",
    "smollm3",
    "qwen3-moe",
]


def engine_of(checkpoint: Checkpoint, family: str, device: str, dtype: torch.dtype) -> TorchEngine:
    engine = TorchEngine(
        {"m": checkpoint(family)}, device=device, dtype=dtype, micro_batch_tokens=64
    )
    engine.create("a", "m", LoraConfig(rank=4))
    randomise(adapter_of(engine))
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu(checkpoint: Checkpoint, data: Data, family: str) -> None:
    given = data(9, 4, 12, 9, 30, 1)
    results = {}
    for device, dtype in (
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.bfloat16),
    ):
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


def test_adapters_in_one_batch_equal_separate_runs(checkpoint: Checkpoint, data: Data) -> None:
    engine = engine_of(checkpoint, "qwen3", "cuda", torch.bfloat16)
    engine.create("b", "m", LoraConfig(rank=8, seed=5))
    randomise(adapter_of(engine, "b"))
    given = {"a": data(9, 12, seed=1), "b": data(20, 3, seed=2)}
    alone = {
        name: run_pass(engine, name, d, "cross_entropy", {}).metrics["loss:sum"]
        for name, d in given.items()
    }
    for name, d in given.items():
        engine.pass_start(PassJob(name, name, d, "cross_entropy", {}))
    while engine.passing():
        for done in engine.pass_step():
            assert not isinstance(done.result, Exception)
            assert done.result.metrics["loss:sum"] == pytest.approx(alone[done.job], rel=1e-2)


def test_weights_are_written_beside_steps_and_while_graphs_are_recorded(
    checkpoint: Checkpoint, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that a thread copies to the host again and again stays the same."""
    monkeypatch.setattr(device_copies, "STAGING", 1000)  # in many pieces
    engine = engine_of(checkpoint, "qwen3", "cuda", torch.bfloat16)
    run_pass(engine, "a", data(9, 12), "cross_entropy", {})
    engine.optim_step("a", AdamParams(learning_rate=0.01))
    expected = {
        name: view.cpu().clone()
        for name, view in adapter_of(engine).layout.tensors(adapter_of(engine).state.weights)
    }
    write, over = engine.writer("a", optimizer=True), threading.Event()
    written: list[Path] = []
    failures: list[BaseException] = []

    def keep_writing() -> None:
        try:
            while not over.is_set() or not written:
                written.append(tmp_path / str(len(written)))
                written[-1].mkdir()
                write.write(Directory(written[-1]))
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        for step in range(4):
            run_pass(engine, "a", data(9, 12, 30, seed=step), "cross_entropy", {})
            engine.optim_step("a", AdamParams(learning_rate=0.01))
            engine.snapshot("a", f"s{step}")
            request = SampleRequest(
                prompt=ModelInput.from_ints([3, 4, 5]),
                sampling_params=SamplingParams(max_tokens=6, stop=[]),
                num_samples=1 + 8 * step,  # batches of other sizes: graphs are recorded
            )
            engine.sample_start(SampleJob("job", f"s{step}", request, 7))
            while engine.sampling():
                for done in engine.sample_step():
                    assert not isinstance(done.result, Exception), done.result
    finally:
        over.set()
        thread.join()
    assert not failures
    for directory in written:
        saved = load_file(directory / "adapter_model.safetensors")
        assert saved.keys() == {f"base_model.model.{name}.weight" for name in expected}
        assert all(
            torch.equal(saved[f"base_model.model.{name}.weight"], view)
            for name, view in expected.items()
        )


@pytest.mark.parametrize("blocks", [12, None], ids=["little room", "room"])
def test_jobs_that_stop_fail_and_are_cancelled_are_as_on_the_cpu(
    model_path: Path, blocks: int | None
) -> None:
    """Adapters that come and go beside the bare model, tokens read a step later, rows put back and
    fed again."""
    expected = each_alone(crowd_of(model_path, dtype=torch.float32))
    engine = limited(crowd_of(model_path, "cuda", torch.float32), blocks, max_rows=16)
    for _ in range(2):  # recorded, then replayed
        ran = together(engine, EVENTFUL)
        assert ran.overlapped
        assert ran.cancelled == {4, 13}
        check(engine, EVENTFUL, ran, expected, gap=1e-3)


def test_inputs_are_not_overwritten_while_the_device_is_behind(checkpoint: Checkpoint) -> None:
    """Rows that are fed again draw nothing, so that nobody waits for their passes."""
    model = engine_of(checkpoint, "qwen3", "cuda", torch.float32)._bases["m"].model
    with torch.inference_mode():
        decoding = StaticDecoding(model, Pool(model, 1), 1)

        def logits(token: int) -> torch.Tensor:
            return decoding.logits([Row(BARE, 0, [RESERVED], 0, token)]).clone()

        expected = []
        for token in range(6):
            expected.append(logits(token))
            torch.cuda.synchronize()
        torch.cuda._sleep(1 << 29)  # type: ignore[no-untyped-call]
        for token, got in enumerate([logits(token) for token in range(6)]):
            assert torch.equal(got, expected[token]), token


@pytest.mark.covers("U52", "U54")
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_recordings_and_their_loss_are_those_of_the_cpu(
    checkpoint: Checkpoint, family: str
) -> None:
    config = {"kl_coeff": 0.3, "tinkex_divergence_limit": 0.05}
    results = {}
    for device, dtype in (
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.bfloat16),
    ):
        engine = engine_of(checkpoint, family, device, dtype)
        drawn = experience(engine)
        randomise(adapter_of(engine), seed=9)
        results[device, dtype] = drawn, *gradient(engine, drawn, "stable_reinforce", config)
    (ours, output, grad), (theirs, same, other), (half, _, rough) = results.values()
    for mine, its in zip(ours.recalled, theirs.recalled, strict=True):
        np.testing.assert_array_equal(mine.recording.tokens, its.recording.tokens)
        np.testing.assert_array_equal(mine.recording.top_tokens, its.recording.top_tokens)
        np.testing.assert_allclose(
            mine.recording.top_logprobs, its.recording.top_logprobs, atol=1e-4
        )
        np.testing.assert_allclose(
            mine.recording.model_logprobs, its.recording.model_logprobs, atol=1e-4
        )
    assert same.metrics["loss:sum"] == pytest.approx(output.metrics["loss:sum"], rel=1e-4)
    assert_near(other.cpu(), grad, 1e-3)
    assert all(
        (np.diff(known.recording.top_logprobs, axis=1) <= 0).all() for known in half.recalled
    )
    assert torch.isfinite(rough).all()
