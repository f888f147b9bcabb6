"""Models of a known shape with random weights, made where they are used: throughput does not depend
on the weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tinkex.engine.families.family import read_config
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.model_files import Parts

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


class RandomTensors:
    """Stands in for the tensors of a checkpoint."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._random = torch.Generator(device).manual_seed(0)
        self._device, self._dtype = device, dtype

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Weights that keep activations in their range; norms are one."""
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.normal_(0, shape[1] ** -0.5, generator=self._random)


def random_engine(shape: str, device: str, **options: Any) -> TorchEngine:
    """An engine that serves a model `m` of this shape."""
    directory = Path(tempfile.mkdtemp(prefix="tinkex-bench-"))
    fields = SHAPES[shape] | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(fields))
    engine = TorchEngine({"m": directory}, device=device, **options)
    base = engine._bases["m"]
    config = read_config(directory)
    tensors = RandomTensors(device, base.dtype)
    base.__dict__["model"] = Parts(config, tensors, base.dtype, base.device).decoder()
    return engine
