"""Small random checkpoints, written by transformers, and builders of data and adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from engine.accelerator import accelerator
from tinkex.engine.model import matmul_check
from tinkex.engine.native.library import load
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampling import SampleRequest, SampleResponse, SamplingParams
from tinkex.types.training import LoraConfig

__all__ = ["accelerator"]  # a fixture

VOCAB, CONTEXT = 96, 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # large enough for its absence to show
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    # of the four frequencies one is kept, one interpolated, two are divided
    "low_freq_factor": 0.1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SLOW = {"rope_type": "default", "rope_theta": 100000.0}
WINDOW = 6
SLIDES: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW}
FOUR: dict[str, Any] = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
GEMMA: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 10,
}
HEADS = ("num_attention_heads", "num_key_value_heads")
LONG: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in HEADS},
    "max_position_embeddings": 400,
}
MOSTLY_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[Callable[..., PreTrainedModel], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama-bias": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LINEAR)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None, head_dim=16)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
    "llama2": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": 4})),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL, tie_word_embeddings=True, rope_parameters=SLOW),
    ),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**FOUR, no_rope_layer_interval=2, tie_word_embeddings=True),
    ),
    "smollm3-window": (
        SmolLM3ForCausalLM,
        SmolLM3Config(
            **FOUR,
            **SLIDES,
            no_rope_layers=[1, 0, 0, 1],
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "mistral-window": (
        MistralForCausalLM,
        MistralConfig(**SMALL, sliding_window=WINDOW, head_dim=16),
    ),
    "qwen2-window": (Qwen2ForCausalLM, Qwen2Config(**SMALL, **SLIDES, max_window_layers=1)),
    "qwen3-window": (
        Qwen3ForCausalLM,
        Qwen3Config(**SMALL, **SLIDES, max_window_layers=1, head_dim=16),
    ),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True)),
    "qwen3-moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**FOUR, **EXPERTS, **SLIDES, mlp_only_layers=[1], decoder_sparse_step=2),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GEMMA, rope_parameters={"full_attention": LINEAR}, layer_types=MOSTLY_SLIDING
        ),
    ),
    "long-narrow": (
        LlamaForCausalLM,
        LlamaConfig(**LONG, num_attention_heads=16, num_key_value_heads=1, head_dim=24),
    ),
    "long-wide": (
        LlamaForCausalLM,
        LlamaConfig(**LONG, num_attention_heads=8, num_key_value_heads=2, head_dim=128),
    ),
    "long-window": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **LONG,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            query_pre_attn_scalar=10,
            sliding_window=70,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=None,
        ),
    ),
    "gemma3-untied": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GEMMA,
            tie_word_embeddings=False,
            attention_bias=True,
            final_logit_softcapping=3.0,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
}

Checkpoint: TypeAlias = Callable[[str], Path]
Data: TypeAlias = Callable[..., list[Datum]]
Sample: TypeAlias = Callable[..., SampleResponse]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level pieces: ids 3 to 95 are printable ASCII and a few merges, so that stop strings can
    cross tokens."""
    letters = [chr(code) for code in range(33, 33 + 86)]
    vocab = {
        piece: index
        for index, piece in enumerate(["<pad>", "<s>", "</s>", "Ġ", *letters, "ab", "cd", "Ã", "©"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Checkpoint:
    """The directory of a small checkpoint of a family."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            torch.manual_seed(7)
            kind, config = FAMILIES[family]
            model = kind(config)
            # norms and biases start at one and zero, where mistakes would not show
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name or name.endswith("bias"):
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(made[family])
            tokenizer.save(str(made[family] / "tokenizer.json"))
        return made[family]

    return get


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small as the work is, in C it is done by as many threads as there are."""
    if (library := load()) is not None:
        monkeypatch.setattr(library.share, "value", 1)


@pytest.fixture
def engine(checkpoint: Checkpoint) -> TorchEngine:
    """An engine with one small model and a fresh adapter `a`."""
    engine = TorchEngine({"small": checkpoint("llama")}, threads=1)
    engine.create("a", "small", LoraConfig(rank=4))
    return engine


@pytest.fixture
def data() -> Data:
    """Random data for any loss, of the lengths given."""

    def make(*lengths: int, seed: int = 0, **inputs: Any) -> list[Datum]:
        random = np.random.default_rng(seed)
        return [
            Datum(
                ModelInput.from_ints(random.integers(0, VOCAB, length)),
                {
                    "target_tokens": random.integers(0, VOCAB, length),
                    "weights": random.normal(size=length).astype(np.float32),
                    "logprobs": (-4.5 + 0.3 * random.normal(size=length)).astype(np.float32),
                    "advantages": random.normal(size=length).astype(np.float32),
                    **inputs,
                },
            )
            for length in lengths
        ]

    return make


@pytest.fixture
def sample() -> Sample:
    """Run one request to its end."""

    def run(
        engine: TorchEngine,
        prompt: list[int],
        *,
        sampler: str = "s",
        seed: int = 1,
        num_samples: int = 1,
        request: dict[str, Any] | None = None,
        **params: Any,
    ) -> SampleResponse:
        message = SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(**params),
            num_samples=num_samples,
            **(request or {}),
        )
        engine.sample_start("job", sampler, message, seed)
        while engine.sampling():
            for done in engine.sample_step():
                if isinstance(done.result, Exception):
                    raise done.result
                return done.result
        raise AssertionError("the job vanished")

    return run


def _otherwise_for_few_rows(
    multiply: Callable[..., torch.Tensor],
    onto: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    """Batched products that add up in another order where a matrix has few rows, as some libraries
    do."""
    if x.shape[1] >= 24:
        return multiply(onto, x, y, alpha=alpha)
    return multiply(onto, x.flip(2).contiguous(), y.flip(1).contiguous(), alpha=alpha)


@pytest.fixture(params=["small", "large", "c"])
def every_library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Products as for weights of this size, as for large ones, and as where no library's rows are
    steady."""
    if request.param == "c" and load() is None:
        pytest.skip("there is no C compiler")
    if request.param == "c":
        monkeypatch.setattr(matmul_check, "is_steady", lambda *_, **__: False)
        # with its name: PyTorch lists its functions by name when a custom loss is traced
        changed = functools.partial(_otherwise_for_few_rows, torch.baddbmm)
        monkeypatch.setattr(torch, "baddbmm", functools.wraps(torch.baddbmm)(changed))
    elif request.param == "large":
        monkeypatch.setattr(matmul_check, "LEAST_FOR_ONEDNN", 0)
    matmul_check._choice.cache_clear()
    yield
    matmul_check._choice.cache_clear()
