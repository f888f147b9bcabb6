"""Small random checkpoints, written by transformers, and makers of data and samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from engine.accelerator import accelerator
from tinkex.engine.api import SampleJob
from tinkex.engine.families.family import TINY, TINY_WINDOW, families
from tinkex.engine.model import matmul_check
from tinkex.engine.native.library import load
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig

__all__ = ["accelerator"]  # a fixture

SMALL = dict(TINY)
VOCAB, CONTEXT, WINDOW = SMALL["vocab_size"], SMALL["max_position_embeddings"], TINY_WINDOW
HEADS = ("num_attention_heads", "num_key_value_heads")
LONG: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in HEADS},
    "max_position_embeddings": 400,
}
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family.name, {**SMALL, **changes})
    for family in families().values()
    for name, changes in family.tiny.items()
}
"""The models that every family brings along, with the `model_type` and the fields of each."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **COMPARED,
    "llama": ("llama", SMALL),
    "llama-tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "llama-linear": (
        "llama",
        {
            **SMALL,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("mistral", {**SMALL, "sliding_window": None, "head_dim": 16}),
    "long-narrow": (
        "llama",
        {**LONG, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "long-wide": (
        "llama",
        {**LONG, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "long-window": (
        "gemma2",
        {
            **LONG,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 40,
            "query_pre_attn_scalar": 10,
            "sliding_window": 70,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
        },
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
            arch, fields = FAMILIES[family]
            config = AutoConfig.for_model(arch, **fields)
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
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
        engine.sample_start(SampleJob("job", sampler, message, seed))
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
