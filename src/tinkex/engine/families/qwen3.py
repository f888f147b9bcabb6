"""Qwen3: norms on queries and keys."""

from __future__ import annotations

from typing import ClassVar

from tinkex.engine.families.family import TINY_SLIDES
from tinkex.engine.families.model_config import TensorNames
from tinkex.engine.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Qwen2 with normed heads, and biases only where `attention_bias` asks for them."""

    name = "qwen3"
    tiny: ClassVar = {
        "qwen3": {"head_dim": 16},
        "qwen3-window": {**TINY_SLIDES, "max_window_layers": 1, "head_dim": 16},
    }
    names = TensorNames(q_norm="q_norm", k_norm="k_norm")
    qkv_bias = False
    o_bias = True
    head_dim: ClassVar[int | None] = 128


FAMILY = Qwen3()
