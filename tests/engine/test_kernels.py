"""Our kernels, each against its formula, and the engine that is made of them against the CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.references import adapter_of, randomise
from tinkex.engine.api import PassJob, SampleJob, run_pass
from tinkex.engine.model.elementwise import States, add_norm, gated, norm, turned_heads
from tinkex.engine.sample import static_decoding
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.target_logprobs import Scored
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.conftest import Checkpoint, Data

HALF = 2**-8
"""What rounding to bfloat16 may cut off, as a share."""


def normal(
    device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def compare(
    ours: Callable[..., Sequence[torch.Tensor]],
    formula: Callable[..., Sequence[torch.Tensor]],
    *given: torch.Tensor,
    near: float,
) -> None:
    """Results, and gradients by what is given of a random sum of them."""
    found = []
    for function, dtype in ((ours, given[0].dtype), (formula, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        results = function(*leaves)
        into = [
            normal(str(x.device), *x.shape, seed=9 + n).to(x.dtype) for n, x in enumerate(results)
        ]
        grads = torch.autograd.grad(results, leaves, into)
        found.append([x.detach().double() for x in (*results, *grads)])
    for one, exact in zip(*found, strict=True):
        assert one.shape == exact.shape
        assert float((one - exact).abs().max()) < near * float(exact.abs().max())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 5e-6), (torch.bfloat16, HALF)])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 1500)])
def test_norms(accelerator: str, rows: int, width: int, dtype: torch.dtype, near: float) -> None:
    weight = 1 + normal(accelerator, width, seed=3, dtype=dtype)
    x = normal(accelerator, rows, width, dtype=dtype) * 3
    share = normal(accelerator, rows, width, seed=1, dtype=dtype)
    compare(
        lambda x: [norm(x, weight, 0.1)],
        lambda x: [F.rms_norm(x, (width,), weight.double(), 0.1)],
        x,
        near=near,
    )

    def ours(x: torch.Tensor, share: torch.Tensor) -> list[torch.Tensor]:
        states, normed = add_norm(States(x), share, weight, 0.1)
        return [states.rounded, normed]

    def formula(x: torch.Tensor, share: torch.Tensor) -> list[torch.Tensor]:
        return [x + share, F.rms_norm(x + share, (width,), weight.double(), 0.1)]

    compare(ours, formula, x, share, near=2 * near)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 5e-6), (torch.bfloat16, HALF)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates(accelerator: str, activation: str, dtype: torch.dtype, near: float) -> None:
    both = normal(accelerator, 3, 2 * 2500, dtype=dtype)  # more than a block

    def formula(both: torch.Tensor) -> list[torch.Tensor]:
        gate, up = both.chunk(2, dim=1)
        return [(F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up]

    compare(lambda both: [gated(both, activation)], formula, both, near=near)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 5e-6), (torch.bfloat16, 2 * HALF)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "groups", "channels"), [(4, 2, 16), (9, 3, 64), (2, 1, 128)])
def test_heads(
    accelerator: str,
    heads: int,
    groups: int,
    channels: int,
    normed: bool,
    dtype: torch.dtype,
    near: float,
) -> None:
    rows, eps = 5, 0.1
    angles = torch.linspace(0, 3, rows * channels // 2, dtype=torch.float64, device=accelerator)
    angles = angles.view(rows, 1, channels // 2)
    turn = (angles.cos().float(), angles.sin().float())
    norms = None
    if normed:
        norms = tuple(1 + normal(accelerator, channels, seed=seed, dtype=dtype) for seed in (5, 6))

    def ours(qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        return turned_heads(qkv, (heads, groups, groups), norms, turn, eps)  # type: ignore[arg-type]

    def formula(qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        q, k, v = torch.split(qkv.view(rows, -1, channels), [heads, groups, groups], dim=1)
        if norms is not None:
            q, k = (
                F.rms_norm(x, (channels,), w.double(), eps)
                for x, w in zip((q, k), norms, strict=True)
            )
        c, s = angles.cos(), angles.sin()
        q, k = (
            torch.cat([first * c - second * s, second * c + first * s], dim=-1)
            for first, second in (x.chunk(2, dim=-1) for x in (q, k))
        )
        return q, k, v

    compare(
        ours,
        formula,
        normal(accelerator, rows, (heads + 2 * groups) * channels, dtype=dtype),
        near=near,
    )


@pytest.mark.parametrize("vocabulary", [96, 4097])
def test_softmax_of_logits_and_its_gradient(accelerator: str, vocabulary: int) -> None:
    logits = normal(accelerator, 6, vocabulary, dtype=torch.float32) * 4
    logits[1, :50] = -torch.inf
    rows, targets = (
        torch.tensor(x, device=accelerator) for x in ([0, 1, 1, 3, 5, 5], [3, 60, 61, 95, 2, 2])
    )
    grads = normal(accelerator, 6, seed=2, dtype=torch.float32)
    exact = logits.double().requires_grad_()
    expected = torch.log_softmax(exact, -1)[rows, targets]
    expected.backward(grads.double())  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, HALF)):
        scored = Scored.of(logits.clone())
        assert float((scored.at(rows, targets) - expected.detach()).abs().max()) < 2e-5
        got = scored.gradient(rows, targets, grads, dtype, distinct=False)
        assert got.dtype == dtype
        assert float((got.double() - exact.grad).abs().max()) < near * float(exact.grad.abs().max())


@pytest.mark.parametrize("rank", [1, 8, 33, 64, 128])
def test_share_of_an_adapter_is_added_as_plainly(accelerator: str, rank: int) -> None:
    """To columns of something wider, by a part of something wider and a factor that lies either
    way."""
    kernels = pytest.importorskip("tinkex.engine.kernels.fused")
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(accelerator, torch.bfloat16)

    for rows, columns in ((1, 1), (63, 100), (64, 64), (65, 129), (300, 520)):
        wide, lows = normal(rows, columns + 24), normal(rows, 3 * rank)
        low = lows.chunk(3, dim=1)[1]
        for high in (normal(columns, rank).t(), normal(rank, columns)):
            given = wide.clone()
            y = given[:, 8 : 8 + columns]
            kernels.add_product(y, low, high, 0.7)
            whole = wide.float()
            whole[:, 8 : 8 + columns] += 0.7 * (low.float() @ high.float())
            torch.testing.assert_close(given.float(), whole, rtol=2**-7, atol=2**-7)
            assert torch.equal(given[:, :8], wide[:, :8])
            assert torch.equal(given[:, 8 + columns :], wide[:, 8 + columns :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "channels"), [(1, 8), (2, 64), (3, 80), (8, 128)])
def test_keys_and_values_are_stored_at_their_places(
    accelerator: str, dtype: torch.dtype, groups: int, channels: int
) -> None:
    """As parts of one projection, and where their channels do not lie side by side."""
    kernels = pytest.importorskip("tinkex.engine.kernels.fused")
    generator = torch.Generator().manual_seed(channels)
    blocks, heads, rows = 7, 2 * groups, 37

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(accelerator, dtype)

    places = torch.randperm(blocks * BLOCK, generator=generator)[:rows].to(accelerator)
    qkv = normal(rows, heads + 2 * groups, channels)
    parts = [
        (qkv[:, heads : heads + groups], qkv[:, heads + groups :]),
        (normal(rows, groups, channels), qkv[:, heads + groups :]),
        (
            normal(rows, channels, groups).transpose(1, 2),
            normal(groups, rows, channels).transpose(0, 1),
        ),
    ]
    for k, v in parts:
        kv = normal(2, blocks, BLOCK, groups, channels)
        expected = kv.clone()
        for part, x in zip(expected, (k, v), strict=True):
            part.view(-1, groups, channels).index_copy_(0, places, x)
        kernels.store(kv, places, k, v)
        assert torch.equal(kv, expected)
        # as in a pass of decoding, where they lie among other inputs
        columns = torch.stack([places, places], 1)
        kernels.store(kv, columns[:, 0], v, k)
        kernels.store(kv, columns[:, 0], k, v)
        assert torch.equal(kv, expected)


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
WIDE = ["qwen3", "mistral-window", "gemma2", "gemma3", "qwen3-moe"]
"""Those whose heads are large enough for the kernel that decodes."""


def engine_of(checkpoint: Checkpoint, family: str, device: str, dtype: torch.dtype) -> TorchEngine:
    """As it is on a GPU: with fixed shapes."""
    engine = TorchEngine(
        {"m": checkpoint(family)}, device=device, dtype=dtype, micro_batch_tokens=64
    )
    engine._sampler = Sampler(Limits(way="static"))
    for name, rank in (("a", 4), ("b", 8)):
        engine.create(name, "m", LoraConfig(rank=rank))
        randomise(adapter_of(engine, name), seed=rank)
    return engine


@pytest.mark.parametrize("family", WIDE)
def test_decoding_attends_as_plainly(accelerator: str, checkpoint: Checkpoint, family: str) -> None:
    paged = pytest.importorskip("tinkex.engine.kernels.paged")
    model = engine_of(checkpoint, family, accelerator, torch.float32)._base("m").model
    assert static_decoding._kernel_error(paged.paged_attention, model) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_beside_each_other_are_near_those_of_the_cpu(
    checkpoint: Checkpoint, data: Data, family: str, request: pytest.FixtureRequest
) -> None:
    given = {"a": data(9, 4, 30), "b": data(12, 1, 9, seed=2)}

    def train(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        engine = engine_of(checkpoint, family, device, dtype)
        for name, datums in given.items():
            engine.pass_start(PassJob(name, name, datums, "cross_entropy", {}))
        while engine.passing():
            for done in engine.pass_step():
                assert not isinstance(done.result, Exception), done.result
        found = {name: adapter_of(engine, name).grad for name in given}
        return {name: grad.double().cpu() for name, grad in found.items() if grad is not None}

    exact = train("cpu", torch.float32)
    device = request.getfixturevalue("accelerator")  # not before: it changes what a CPU does
    near = train(device, torch.bfloat16)
    assert near.keys() == exact.keys() == given.keys()
    for name, grad in near.items():
        assert float((grad - exact[name]).norm()) < 0.1 * float(exact[name].norm())
        assert F.cosine_similarity(grad, exact[name], dim=0) > 0.995


@pytest.mark.parametrize("family", WIDE)
def test_samples_have_the_trainers_log_probabilities(
    accelerator: str, checkpoint: Checkpoint, family: str
) -> None:
    engine = engine_of(checkpoint, family, accelerator, torch.bfloat16)
    # as sharp as a trained model's: that makes differences larger
    engine._base("m").model.norm_D.mul_(3)
    jobs = {
        "one": ("a", np.arange(3, 12)),
        "two": ("b", np.arange(5, 25)),
        "again": ("a", np.arange(3, 12)),
    }
    for name in ("a", "b"):
        engine.snapshot(name, name)
    for job, (name, prompt) in jobs.items():
        request = SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=20 if accelerator == "cuda" else 5, stop=[]),
            num_samples=6 if accelerator == "cuda" else 2,
        )
        engine.sample_start(SampleJob(job, name, request, 7))
    ended: dict[str, SampleResponse] = {}
    while engine.sampling():
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception), done.result
            ended[done.job] = done.result
    assert [s.tokens for s in ended["one"].sequences] == [
        s.tokens for s in ended["again"].sequences
    ]
    gaps = []
    for job, (name, prompt) in jobs.items():
        for sequence in ended[job].sequences:
            whole = np.concatenate([prompt, sequence.tokens])
            datum = Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})
            output = run_pass(engine, name, [datum], "cross_entropy", {}, backward=False)
            assert sequence.logprobs is not None
            trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]
            gaps.append(trained - np.array(sequence.logprobs))
    gap = np.concatenate(gaps)
    kl = float((np.exp(gap) - 1 - gap).mean())
    print(f"{family}: mean |difference| {np.abs(gap).mean():.5f}, KL {kl:.2e}")
    assert kl < (0.05 if family == "qwen3-moe" else 1e-3)
