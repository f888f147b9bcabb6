"""Every family against transformers: logits, gradients of LoRA factors, samples, files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from engine.conftest import COMPARED, VOCAB, WINDOW
from engine.references import adapter_of, assert_near, gradients, randomise
from tinkex.engine.api import ADAMW, DIMUON, Directory, EngineError, run_pass
from tinkex.engine.base_models import eos_tokens
from tinkex.engine.families import family as family_module
from tinkex.engine.families.family import families, parse_config, read_config
from tinkex.engine.families.llama import Llama
from tinkex.engine.families.model_config import AttentionRule, DecoderConfig, TensorNames
from tinkex.engine.model import attention, matmul_check
from tinkex.engine.model.attention import PackedAttention, attend, causal, trusted, visible
from tinkex.engine.model.decoder import BARE, Decoder, Lora, hidden_states
from tinkex.engine.model.mlp import Adaptation
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.model_files import load_decoder
from tinkex.engine.train import target_logprobs
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams, DimuonParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from engine.conftest import Checkpoint, Data, Sample
    from tinkex.engine.torch.lora import Linear
    from tinkex.types.optimizers import OptimizerConfigBase, OptimParams

MIXTURES = [name for name, (_, fields) in COMPARED.items() if "num_experts" in fields]
DENSE = [name for name in COMPARED if name not in MIXTURES]
LENGTHS = [3, 7, 7, 7, 40]
RUNS = [(1, 3), (3, 7), (1, 40)]


def sequences(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def packed_logits(model: Decoder, lora: Adaptation = BARE) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = PackedAttention(RUNS, model.attention)
    with torch.no_grad():
        return model.logits(
            hidden_states(model, torch.cat(sequences()), positions, packed, lora), lora
        )


def reference_logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(sequence[None]).logits[0] for sequence in sequences()])


def transformers_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """By plain products: grouped ones for experts know no float64, and other attention may leave
    out a soft cap."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(directory, dtype, torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 8), (torch.float64, 512)])
@pytest.mark.parametrize("family", DENSE + MIXTURES)
def test_logits_match_transformers(
    family: str,
    dtype: torch.dtype,
    block: int,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    reference = transformers_model(checkpoint(family), dtype)
    ours, theirs = packed_logits(load(checkpoint(family), dtype)), reference_logits(reference)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def merged_gradients(
    directory: Path, factors: dict[str, torch.Tensor], data: list[Datum], scale: dict[str, float]
) -> tuple[float, list[Any], dict[str, torch.Tensor]]:
    """Loss, log-probabilities and gradients by transformers, in float64."""
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
            each = [
                [change(f"{owner}.{e}.{p}_proj") for p in ("gate", "up")]
                for e in range(len(weight))
            ]
            merged[name] = weight + torch.stack([torch.cat(pair) for pair in each])
        elif kind == "down_proj":
            merged[name] = weight + torch.stack(
                [change(f"{owner}.{e}.down_proj") for e in range(len(weight))]
            )
        elif kind == "weight":
            merged[name] = weight + change(owner)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        tokens = torch.from_numpy(datum.model_input.to_numpy()).long()[None]
        logits = functional_call(model, merged, (tokens,), tie_weights=False).logits[0]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        total = (
            total
            - (torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy()).double() * p).sum()
        )
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
    monkeypatch.setattr(matmul_check, "LEAST_FOR_ONEDNN", 0)
    matmul_check._choice.cache_clear()
    # long sequences in several blocks, capped ones computed twice
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(target_logprobs, "LOGITS_BUDGET", 10 * VOCAB)
    engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, threads=1, micro_batch_tokens=40)
    engine.create("a", "m", LoraConfig(rank=8))
    adapter = adapter_of(engine)
    randomise(adapter)
    layout, batch = adapter.layout, data(5, 17, 9, 17, 1, 30, 9)
    scale = {
        module: 32 / layout.rank(linear) for linear in layout.linears for module in linear.modules
    }
    factors = dict(layout.tensors(adapter.state.weights))
    total, logprobs, grads = merged_gradients(checkpoint(family), factors, batch, scale)

    output = run_pass(engine, "a", batch, "cross_entropy", {})

    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for ours, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs, 1e-5)
    for name, grad in gradients(adapter).items():
        assert_near(grad, grads[name], 1e-5)


@pytest.mark.parametrize(
    ("family", "trait", "value"),
    [
        ("gemma2", "embed_scale", 1.0),
        ("gemma2", "logit_cap", None),
        ("gemma2", "attention", "window"),
        ("gemma2", "attention", "softcap"),
        ("gemma2", "attention", "scale"),
        ("gemma3", "attention", "window"),
        ("gemma3", "rotary", (0, 0, 0)),
        ("gemma3", "rotary", (1, 1, 1)),
        ("smollm3", "rotary", (0, 0, 0, 0)),
        ("smollm3-window", "attention", "window"),
        ("mistral-window", "attention", "window"),
        ("qwen3-moe-mixed", "attention", "window"),
    ],
)
def test_each_trait_matters_to_the_small_models(
    family: str, trait: str, value: Any, checkpoint: Checkpoint
) -> None:
    model = load(checkpoint(family))
    if trait == "attention":
        plain: dict[str, Any] = {"window": None, "softcap": None, "scale": 0.25}
        value = tuple(replace(rule, **{value: plain[value]}) for rule in model.attention)
    without = replace(model, config=replace(model.config, **{trait: value}))
    assert float((packed_logits(model) - packed_logits(without)).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        *((family, torch.float32, 2e-5) for family in DENSE + MIXTURES),
        *((family, torch.bfloat16, 0.2) for family in ("gemma2", "gemma3", "smollm3-window")),
    ],
)
def test_sampled_logprobs_equal_the_trainers(
    family: str, dtype: torch.dtype, tolerance: float, checkpoint: Checkpoint, sample: Sample
) -> None:
    engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, threads=1)
    engine.create("a", "m", LoraConfig(rank=8))
    randomise(adapter_of(engine))
    engine.snapshot("a", "s")
    prompt = [int(token) for token in sequences()[-1][: WINDOW + 4]]
    response = sample(
        engine,
        prompt,
        num_samples=3,
        max_tokens=3 * WINDOW,
        stop=[],
        request={"prompt_logprobs": True},
    )
    assert response.prompt_logprobs is not None
    for sequence in response.sequences:
        tokens = [*prompt, *sequence.tokens]
        datum = Datum(
            ModelInput.from_ints(tokens[:-1]),
            {
                "target_tokens": np.array(tokens[1:]),
                "weights": np.ones(len(tokens) - 1, np.float32),
            },
        )
        output = run_pass(engine, "a", [datum], "cross_entropy", {}, backward=False)
        theirs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert len(sequence.tokens) == 3 * WINDOW
        np.testing.assert_allclose(
            np.array(sequence.logprobs), theirs[len(prompt) - 1 :], atol=tolerance
        )
        np.testing.assert_allclose(
            np.array(response.prompt_logprobs[1:], float), theirs[: len(prompt) - 1], atol=tolerance
        )


@pytest.mark.parametrize("family", ["smollm3", "mistral-window", "gemma2", "gemma3", "qwen3-moe"])
def test_sharded_half_precision_checkpoints(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    transformers_model(checkpoint(family), torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    exact = reference_logits(transformers_model(tmp_path, torch.float32))
    torch.testing.assert_close(packed_logits(load(tmp_path)), exact, atol=1e-5, rtol=0)
    theirs = reference_logits(transformers_model(tmp_path, torch.bfloat16)).float()
    ours = packed_logits(load(tmp_path, torch.bfloat16)).float()
    assert rms(ours - exact) < 1.25 * rms(theirs - exact) < 0.1 * rms(exact)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings", "ignore:The following .*_pattern keys"
)
@pytest.mark.parametrize("family", [*DENSE, "qwen3-moe"])
def test_peft_loads_saved_adapters(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    engine = TorchEngine({"m": checkpoint(family)}, threads=1)
    engine.create("a", "m", LoraConfig(rank=8))
    adapter = adapter_of(engine)
    randomise(adapter)
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    base = transformers_model(checkpoint(family), torch.float32)
    theirs = reference_logits(PeftModel.from_pretrained(base, str(tmp_path)))
    torch.testing.assert_close(
        packed_logits(adapter.model, Lora(adapter.factors())), theirs, atol=2e-5, rtol=0
    )


@pytest.mark.covers("S10", "S41")
@pytest.mark.parametrize(("rank", "each"), [(8, 2), (7, 1), (2, 1)])
def test_experts_divide_the_rank(
    rank: int, each: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    engine = TorchEngine({"m": checkpoint("qwen3-moe-mixed")}, threads=1)
    engine.create("a", "m", LoraConfig(rank=rank))
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.{}.mlp.{}.lora_{}.weight".format
    for number in range(4):
        assert saved[layer(3, f"experts.{number}.up_proj", "A")].shape == (each, 32)
        assert saved[layer(3, f"experts.{number}.down_proj", "A")].shape == (each, 24)
        assert saved[layer(3, f"experts.{number}.down_proj", "B")].shape == (32, each)
    assert saved[layer(1, "up_proj", "A")].shape == (rank, 32)
    assert not any("mlp.gate." in name for name in saved)


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [(ADAMW, AdamParams(learning_rate=1e-2)), (DIMUON, DimuonParams(learning_rate=1e-2))],
)
def test_mixtures_learn_and_their_adapters_come_back(
    optimizer: OptimizerConfigBase,
    params: OptimParams,
    checkpoint: Checkpoint,
    data: Data,
    tmp_path: Path,
) -> None:
    engine = TorchEngine({"m": checkpoint("qwen3-moe-mixed")}, threads=1)
    for name in ("a", "b"):
        engine.create(name, "m", LoraConfig(rank=8), optimizer)
    (datum,) = data(20)
    batch = [Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": np.ones(20, np.float32)})]
    losses = []
    for _ in range(6):
        losses.append(run_pass(engine, "a", batch, "cross_entropy", {}).metrics["loss:sum"])
        engine.optim_step("a", params)
    assert losses[-1] < losses[0] - 1
    engine.writer("a", optimizer=True).write(Directory(tmp_path))
    engine.load("b", tmp_path, optimizer=True)
    assert torch.equal(adapter_of(engine, "b").state.weights, adapter_of(engine, "a").state.weights)


def test_dimuon_steps_go_by_the_rank_that_experts_have(checkpoint: Checkpoint, data: Data) -> None:
    engine = TorchEngine({"m": checkpoint("qwen3-moe")}, threads=1)
    engine.create("a", "m", LoraConfig(rank=8), DIMUON)
    run_pass(engine, "a", data(30), "cross_entropy", {})
    engine.optim_step("a", DimuonParams(learning_rate=0.1))
    adapter = adapter_of(engine)
    moved = {
        n: b
        for n, b in adapter.layout.tensors(adapter.state.weights)
        if n.endswith("lora_B") and bool(b.any())
    }
    assert {b.shape[1] for b in moved.values()} == {2, 8}
    for b in moved.values():
        assert float(b.norm()) == pytest.approx(0.1 * b.shape[1] ** 0.5, rel=1e-3)


@dataclass(frozen=True)
class Beside(Adaptation):
    """Two adapters in one pass: the first for tokens before a border, the second for the others."""

    first: Lora
    second: Lora
    border: int

    def linear(
        self, x_TD: torch.Tensor, linear: Linear, rows_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = torch.arange(len(x_TD)) if rows_T is None else rows_T
        assert bool((rows.diff() > 0).all()), "rows ascend"
        cut = int((rows < self.border).sum())
        return torch.cat(
            [self.first.linear(x_TD[:cut], linear), self.second.linear(x_TD[cut:], linear)]
        )


def test_experts_report_their_tokens(checkpoint: Checkpoint) -> None:
    """So that adapters beside each other in a pass each change their own tokens."""
    engine = TorchEngine({"m": checkpoint("qwen3-moe")}, threads=1)
    loras = []
    for seed, name in enumerate("ab"):
        engine.create(name, "m", LoraConfig(rank=8))
        randomise(adapter_of(engine, name), seed)
        loras.append(Lora(adapter_of(engine, name).factors()))
    model, border = adapter_of(engine).model, sum(LENGTHS[:2])
    first, second = (packed_logits(model, lora) for lora in loras)
    beside = packed_logits(model, Beside(loras[0], loras[1], border))
    torch.testing.assert_close(
        beside, torch.cat([first[:border], second[border:]]), atol=1e-5, rtol=0
    )
    assert float((first - second).abs().max()) > 0.1


@pytest.mark.parametrize(
    "rule", [AttentionRule(0.3), AttentionRule(0.3, 5), AttentionRule(0.3, 5, 1.5)]
)
def test_masked_attention_equals_whole_sequences(rule: AttentionRule) -> None:
    """Queries of two sequences at different places; some keys are unused room."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = causal(q, k, v, rule).view(2, 12, 32)
    at = torch.tensor([[3, 4], [10, 11]])
    some = torch.stack([q[0, 3:5], q[1, 10:12]])
    mixed = attend(some, k, v, visible(at, torch.arange(12).expand(2, 12), rule), rule)
    torch.testing.assert_close(
        mixed, torch.stack([whole[0, 3:5], whole[1, 10:12]]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (lambda: ("kernel", 0.001), None),
        (lambda: (None, 0.0), None),
        (
            lambda: ("kernel", 0.5),
            "decoding runs without its attention kernel, whose error here is 0.5",
        ),
        (
            lambda: ("kernel", float("nan")),
            "decoding runs without its attention kernel, whose error here is nan",
        ),
        (
            lambda: 1 // 0,
            "decoding runs without its attention kernel and is slower: integer division",
        ),
    ],
    ids=["right", "none", "wrong", "not a number", "broken"],
)
def test_kernel_is_trusted_if_it_equals_the_plain_way(
    measured: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = trusted("decoding", measured, 0.03)
    assert kernel == (measured()[0] if said is None else None)
    assert (said in caplog.text) if said is not None else not caplog.records


@pytest.mark.parametrize(
    ("window", "length", "left"), [(None, 9, None), (8, 9, 8), (8, 8, None), (2**31, 9, None)]
)
def test_window_larger_than_the_sequence_is_none(
    window: int | None, length: int, left: int | None
) -> None:
    assert AttentionRule(scale=1.0, window=window).window_within(length) == left


def test_out_of_memory_error_does_not_blame_a_kernel() -> None:
    def measured() -> Any:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        trusted("training", measured, 0.03)


def test_other_architectures_are_refused_with_the_list(checkpoint: Checkpoint) -> None:
    fields = json.loads((checkpoint("llama2") / "config.json").read_text())
    for arch in ("mixtral", "gemma3", "gpt2", None):
        with pytest.raises(
            EngineError, match=f"{arch}.* is not supported; supported are {', '.join(families())}"
        ):
            parse_config({**fields, "model_type": arch})
    assert {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "gemma2",
        "gemma3_text",
    } <= set(families())


class Renamed(Llama):
    """Llama under other names, whose layers call themselves differently."""

    name = "renamed"
    names = TensorNames(
        embed="tok",
        layer="blocks.{}.",
        norm="last_norm",
        head="out",
        input_norm="norm1",
        attention="attn.",
        qkv=("wq", "wk", "wv"),
        o="wo",
        mlp_norm="norm2",
        mlp="ffn.",
        gate_up=("w1", "w3"),
        down="w2",
    )


def test_names_of_tensors_are_the_familys_alone(
    checkpoint: Checkpoint, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base model, of adapters, and of their files."""
    monkeypatch.setattr(family_module, "families", lambda: {"renamed": Renamed()})
    ours, theirs = Renamed.names, TensorNames()
    pairs = [
        (theirs.embed, ours.embed),
        ("model.layers.", "blocks."),
        (theirs.attention, ours.attention),
        (theirs.mlp, ours.mlp),
        (theirs.input_norm, ours.input_norm),
        (theirs.mlp_norm, ours.mlp_norm),
        (theirs.norm, ours.norm),
        (theirs.head, ours.head),
        *zip((*theirs.qkv, theirs.o), (*ours.qkv, ours.o), strict=True),
        *zip((*theirs.gate_up, theirs.down), (*ours.gate_up, ours.down), strict=True),
    ]

    def renamed(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    tensors = load_file(checkpoint("llama") / "model.safetensors")
    save_file({renamed(name): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    fields = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "renamed"}))
    model = load(tmp_path)
    monkeypatch.undo()
    assert torch.equal(packed_logits(model), packed_logits(load(checkpoint("llama"))))

    monkeypatch.setattr(family_module, "families", lambda: {"renamed": Renamed()})
    engine = TorchEngine({"m": tmp_path}, threads=1)
    engine.create("a", "m", LoraConfig(rank=4))
    run_pass(engine, "a", data(9, 4), "cross_entropy", {})
    engine.optim_step("a", AdamParams(learning_rate=0.1))
    saved = tmp_path / "saved"
    saved.mkdir()
    engine.writer("a", optimizer=True).write(Directory(saved))
    settings = json.loads((saved / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(sum(ours.groups.values(), ()))
    engine.create("b", "m", LoraConfig(rank=4, seed=9))
    engine.load("b", saved, optimizer=True)
    assert torch.equal(adapter_of(engine, "a").state.weights, adapter_of(engine, "b").state.weights)
    engine.load_sampler("s", "m", saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "gemma3_text with attn_logit_softcapping",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "attention to later tokens",
        ),
        ({"is_causal": False}, "attention to later tokens"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4, and must be a multiple of num_key_value_heads, which is 3",
        ),
        (
            {"num_key_value_heads": 8},
            "num_attention_heads is 4, and must be a multiple of num_key_value_heads, which is 8",
        ),
        (
            {"num_attention_heads": [4, 4]},
            r"num_attention_heads must be a positive whole number, and is \[4, 4\]",
        ),
        ({"vocab_size": None}, "vocab_size must be a positive whole number, and is None"),
        ({"vocab_size": float("inf")}, "vocab_size must be a positive whole number, and is inf"),
        ({"head_dim": 5}, "head_dim is 5, and must be even"),
        ({"head_dim": -8}, "head_dim must be a positive"),
        (
            {"layer_types": ["chunked_attention"] * 2},
            "layers of type 'chunked_attention' are not supported",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types of this llama contradict"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
            "layer_types of this qwen2 contradict",
        ),
        (
            {
                "model_type": "gemma2",
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": None,
            },
            "layer_types of this gemma2 contradict",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn"}},
            "rope type 'yarn' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope type 'linear' needs factor, a positive number, and has",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "rope type 'llama3' needs low_freq_factor",
        ),
        (
            {"rope_parameters": {"rope_theta": "much"}},
            "needs rope_theta, a positive number, and has 'much'",
        ),
        (
            {
                "model_type": "qwen3",
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
            },
            "rotary embeddings by the type of a layer are not supported for qwen3",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_parameters of gemma3_text must be given for each type of layer",
        ),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be a positive",
        ),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "'relu' is not supported"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 2 layers",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers has 1 entries for 2 layers",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4},
            "num_experts_per_tok is 8, and must be between 1 and the 4 experts",
        ),
    ],
)
def test_configs_that_would_be_got_wrong_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    fields = json.loads((checkpoint("llama2") / "config.json").read_text())
    with pytest.raises(EngineError, match=message):
        parse_config({**fields, **changes})


def test_config_of_another_kind_of_thing_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = json.loads((checkpoint("llama2") / "config.json").read_text())
    wrong: dict[str, Any] = {
        "rope_parameters": [1],
        "rms_norm_eps": {},
        "layer_types": 5,
        "sliding_window": "x",
    }
    for name, value in wrong.items():
        changes = {"model_type": "mistral", name: value}
        (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
        with pytest.raises(EngineError, match=r"config\.json holds a value of a wrong type"):
            read_config(tmp_path)


def test_windows_of_families_that_have_no_switch_for_them(checkpoint: Checkpoint) -> None:
    for family in ("mistral-window", "gemma2", "gemma3"):
        fields = json.loads((checkpoint(family) / "config.json").read_text())
        plain = parse_config(fields)
        assert any(rule.window for rule in plain.attention)
        assert parse_config({**fields, "use_sliding_window": False}) == plain


def test_length_that_rotations_were_trained_for_may_be_the_models_own(
    checkpoint: Checkpoint,
) -> None:
    fields = json.loads((checkpoint("llama3") / "config.json").read_text())
    shorter = {
        name: x
        for name, x in fields["rope_parameters"].items()
        if name != "original_max_position_embeddings"
    }
    for given in (shorter, {**shorter, "original_max_position_embeddings": None}):
        (rope,) = parse_config({**fields, "rope_parameters": given}).ropes
        assert rope["original_max_position_embeddings"] == fields["max_position_embeddings"]
    (rope,) = parse_config({**fields, "original_max_position_embeddings": 20}).ropes
    assert rope["original_max_position_embeddings"] == 20


def test_separate_output_head_overrides_tied_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As transformers does."""
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    models = [
        load_decoder(path, torch.float32, torch.device("cpu"))
        for path in (tmp_path, checkpoint("llama"))
    ]
    assert torch.equal(models[0].head.weight_ND, models[1].head.weight_ND)
    assert not torch.equal(models[0].head.weight_ND, models[0].embed_VD)
    tied = load_decoder(checkpoint("llama-tied"), torch.float32, torch.device("cpu"))
    assert tied.head.weight_ND is tied.embed_VD


@pytest.mark.covers("S34")
def test_ends_of_text_are_those_that_any_file_names(tmp_path: Path) -> None:
    def ends(**files: Any) -> set[int]:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, fields in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(fields))
        return set(eos_tokens(tmp_path, 96))

    assert ends() == set()
    assert ends(config={"eos_token_id": 2}, generation_config={"eos_token_id": [2, 5]}) == {2, 5}
    assert (
        ends(
            config={"eos_token_id": -1},
            generation_config={"eos_token_id": [96, "2", None, {"a": 1}]},
        )
        == set()
    )
    named = {"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "</s>"}}}
    assert ends(config={"eos_token_id": 2}, tokenizer_config=named) == {2, 7}
    added = {"added_tokens": [{"id": 8, "content": "<end>"}], "model": {"vocab": {"</s>": 9}}}
    assert ends(tokenizer_config={"eos_token": {"content": "<end>"}}, tokenizer=added) == {8}
    assert ends(tokenizer_config={"eos_token": "</s>"}, tokenizer=added) == {9}
    assert ends(tokenizer_config={"eos_token": "<none>"}, tokenizer=added) == set()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2')
    with pytest.raises(EngineError, match=r"generation_config\.json is not valid JSON"):
        eos_tokens(tmp_path, 96)


def test_configs_of_older_files_mean_the_same(checkpoint: Checkpoint) -> None:
    """Before transformers 5: `rope_theta`, `rope_scaling`; and fields left out where they have the
    family's default."""

    def older(family: str, *gone: str, **others: Any) -> tuple[DecoderConfig, DecoderConfig]:
        fields = json.loads((checkpoint(family) / "config.json").read_text())
        changed = {name: value for name, value in {**fields, **others}.items() if name not in gone}
        return parse_config(changed), parse_config(fields)

    old, new = older(
        "gemma2", "layer_types", "tie_word_embeddings", "hidden_activation", "rope_parameters"
    )
    assert replace(old, ropes=new.ropes) == new
    assert [rule.window for rule in new.attention] == [WINDOW, None, WINDOW]
    scaling = {"rope_type": "linear", "factor": 4.0}
    gone = ["layer_types", "_sliding_window_pattern", "tie_word_embeddings", "rope_parameters"]
    local = {"rope_theta": 10000.0, "rope_local_base_freq": 10000.0, "rope_scaling": scaling}
    old, new = older("gemma3", *gone, sliding_window_pattern=2, **local)
    assert old == new
    assert [rope["rope_type"] for rope in old.ropes] == ["linear", "default"]
    old, _ = older("gemma3", *gone)
    assert [rule.window for rule in old.attention] == [WINDOW] * 3
    assert [rope["rope_theta"] for rope in old.ropes] == [1000000.0, 10000.0]
    old, new = older("smollm3", "no_rope_layers", "layer_types", "tie_word_embeddings")
    assert old == new
    assert old.rotary == (0, None, 0, None)
    old, _ = older("smollm3", "no_rope_layers", "no_rope_layer_interval", "rope_parameters")
    assert old.rotary == (0, 0, 0, None)
    assert old.ropes[0]["rope_theta"] == 2000000.0
    old, new = older("smollm3-window", "layer_types")
    assert old == new
    assert [rule.window for rule in old.attention] == [None, WINDOW, WINDOW, None]
    old, new = older("qwen3-moe", "num_local_experts", num_experts=4)
    assert old == new
    old, new = older("qwen2-window", "layer_types")
    assert old == new
    assert [rule.window for rule in old.attention] == [None, WINDOW]
    old, new = older("llama-linear", rope_scaling={"type": "linear", "factor": 4.0})
    assert old == new
    old, new = older("llama", partial_rotary_factor=None, max_position_embeddings=48.0)
    assert old == new
    old, new = older("llama", "rope_parameters", rope_theta=None)
    assert old == new
