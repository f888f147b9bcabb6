"""Qwen3-MoE: Qwen3 with mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from tinkex.engine.api import EngineError
from tinkex.engine.families.family import TINY_SLIDES
from tinkex.engine.families.model_config import ExpertsConfig, Fields
from tinkex.engine.families.qwen3 import Qwen3

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}


class Qwen3Moe(Qwen3):
    """Experts in every layer, or in those that `decoder_sparse_step` chooses."""

    name = "qwen3_moe"
    tiny: ClassVar = {
        "qwen3-moe": {**EXPERTS, "norm_topk_prob": True},
        "qwen3-moe-mixed": {
            **EXPERTS,
            **TINY_SLIDES,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
        },
    }
    names = replace(
        Qwen3.names,
        expert_ranks={
            r"mlp\.experts\.\d+\.(gate|up)_proj": 1,
            r"mlp\.experts\.(\d+\.)?down_proj": 1,
            r"mlp\.experts\.gate_up_proj": 2,
        },
    )
    is_uniform = True
    head_dim: ClassVar[int | None] = None

    def slides(self, fields: Fields, layers: int) -> Sequence[bool]:
        """Let every layer slide."""
        return [True] * layers

    def experts(self, fields: Fields, layers: int) -> ExpertsConfig | None:
        """Return the sparse layers."""
        dense, step = fields.get("mlp_only_layers") or [], int(fields.get("decoder_sparse_step", 1))
        count = int(fields.get("num_local_experts") or fields.get("num_experts", 128))
        sparse = frozenset(
            i for i in range(layers) if count > 0 and i not in dense and (i + 1) % step == 0
        )
        if not sparse:
            return None
        chosen = int(fields.get("num_experts_per_tok", 8))
        if not 1 <= chosen <= count:
            raise EngineError(
                f"num_experts_per_tok is {chosen}, and must be between 1 and the {count} experts"
            )
        return ExpertsConfig(
            layers=sparse,
            count=count,
            chosen=chosen,
            mlp=int(fields.get("moe_intermediate_size", 768)),
            normed=bool(fields.get("norm_topk_prob", False)),
        )


FAMILY = Qwen3Moe()
