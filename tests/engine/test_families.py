"""Every family of models against transformers: logits, gradients of LoRA factors, samples, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from engine.conftest import VOCAB
from engine.references import adapter_of, assert_near, gradients, randomise
from tinkex.engine import attention, run_pass, trainer
from tinkex.engine.attention import PackedAttention
from tinkex.engine.decoder import Decoder, hidden_states
from tinkex.engine.torch_engine import TorchEngine
from tinkex.engine.weights import load_decoder
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from engine.conftest import Checkpoint, Data
    from tinkex.types.inputs import Datum

DENSE = [
    "llama2",
    "llama3",
    "llama-bias",
    "smollm2",
    "smollm3",
    "smollm3-window",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "gemma2",
    "gemma3",
    "gemma3-untied",
]
MIXTURES = ["qwen3-moe", "qwen3-moe-mixed"]
LENGTHS = [3, 7, 7, 7, 40]
RUNS = [(1, 3), (3, 7), (1, 40)]


def sequences(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def packed_logits(model: Decoder) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = PackedAttention(RUNS, model.attention)
    with torch.no_grad():
        return model.logits(hidden_states(model, torch.cat(sequences()), positions, attend))


def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(sequence[None]).logits[0] for sequence in sequences()])


def transformers_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """By plain products also for experts: the grouped ones know no float64."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, experts_implementation="eager"
    )
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(directory, dtype, torch.device("cpu"))


@pytest.mark.parametrize("block", [8, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", DENSE + MIXTURES)
def test_logits_match_transformers(
    family: str, dtype: torch.dtype, block: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    reference = transformers_model(checkpoint(family), dtype)
    ours, theirs = packed_logits(load(checkpoint(family), dtype)), reference_logits(reference)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def merged_gradients(
    directory: Path, factors: dict[str, torch.Tensor], data: list[Datum], scale: dict[str, float]
) -> tuple[float, list[Any], dict[str, torch.Tensor]]:
    """Loss, log-probabilities and gradients by transformers in float64, its weights W + scale B A."""
    model = transformers_model(directory, torch.float64)
    leaves = {name: value.double().clone().requires_grad_() for name, value in factors.items()}
    merged: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))

    def change(module: str) -> torch.Tensor:
        if f"{module}.lora_B" not in leaves:
            return torch.zeros((), dtype=torch.float64)
        return scale[module] * leaves[f"{module}.lora_B"] @ leaves[f"{module}.lora_A"]

    for name, weight in list(merged.items()):
        owner, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            each = [[change(f"{owner}.{e}.{p}_proj") for p in ("gate", "up")] for e in range(len(weight))]
            merged[name] = weight + torch.stack([torch.cat(pair) for pair in each])
        elif kind == "down_proj":
            merged[name] = weight + torch.stack([change(f"{owner}.{e}.down_proj") for e in range(len(weight))])
        elif kind == "weight":
            merged[name] = weight + change(owner)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        tokens = torch.from_numpy(datum.model_input.to_numpy()).long()[None]
        logits = functional_call(model, merged, (tokens,), tie_weights=False).logits[0]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        total = total - (torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy()).double() * p).sum()
        logprobs.append(p.detach().numpy())
    grads = torch.autograd.grad(total, list(leaves.values()))
    return float(total.detach()), logprobs, dict(zip(leaves, grads, strict=True))


@pytest.mark.covers("S10", "S15")
@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 512), (torch.float64, 8)])
@pytest.mark.parametrize("family", DENSE + MIXTURES)
def test_passes_equal_autograd_through_transformers(
    family: str,
    dtype: torch.dtype,
    block: int,
    checkpoint: Checkpoint,
    data: Data,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)  # long sequences in several blocks, capped ones computed twice
    monkeypatch.setattr(trainer, "LOGITS_BUDGET", 10 * VOCAB)
    engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, threads=1, micro_batch_tokens=40)
    engine.create("a", "m", LoraConfig(rank=8))
    adapter = adapter_of(engine)
    randomise(adapter)
    layout, batch = adapter.layout, data(5, 17, 9, 17, 1, 30, 9)
    scale = {module: 32 / layout.rank(linear) for linear in layout.linears for module in linear.modules}
    factors = dict(layout.tensors(adapter.state.weights))
    total, logprobs, grads = merged_gradients(checkpoint(family), factors, batch, scale)

    output = run_pass(engine, "a", batch, "cross_entropy", {})

    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for ours, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs, 1e-5)
    for name, grad in gradients(adapter).items():
        assert_near(grad, grads[name], 1e-5)
