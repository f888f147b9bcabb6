"""Gemma 3 (text): two kinds of rotary embedding, and norms on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from tinkex.engine.api import EngineError
from tinkex.engine.families.family import read_rope
from tinkex.engine.families.gemma2 import NAMES, TINY_GEMMA, Gemma2
from tinkex.engine.families.model_config import FULL, SLIDING, Fields


class Gemma3(Gemma2):
    """Gemma 2 with normed heads in place of capped scores."""

    name = "gemma3_text"
    tiny: ClassVar = {
        "gemma3": {
            **TINY_GEMMA,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
            },
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        "gemma3-untied": {
            **TINY_GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "layer_types": [FULL, SLIDING, FULL],
        },
    }
    names = replace(NAMES, q_norm="q_norm", k_norm="k_norm")
    score_cap = None
    default_logit_cap = None

    def check(self, fields: Fields) -> None:
        """Refuse capped scores."""
        if fields.get("attn_logit_softcapping") is not None:
            raise EngineError(
                "gemma3_text with attn_logit_softcapping is not supported: transformers ignores "
                "it there"
            )

    def turn(self, fields: Fields) -> int:
        """Return how many layers there are from one that sees all to the next."""
        named = ("sliding_window_pattern", "_sliding_window_pattern")
        return int(next((fields[name] for name in named if fields.get(name)), 6))

    def ropes(
        self, fields: Fields, kinds: Sequence[str]
    ) -> tuple[tuple[Fields, ...], tuple[int | None, ...]]:
        """Return the rotary embeddings of layers that see all and of those that slide."""
        given = fields.get("rope_parameters") or {}
        if not all(isinstance(value, Mapping | None) for value in given.values()):
            raise EngineError("rope_parameters of gemma3_text must be given for each type of layer")
        everywhere = read_rope(fields, 1000000.0, given.get(FULL))
        # scaling is for the layers that see all
        local = {"rope_theta": fields.get("rope_local_base_freq")}
        nearby = read_rope(local, 10000.0, given.get(SLIDING))
        return (everywhere, nearby), tuple(int(kind == SLIDING) for kind in kinds)


FAMILY = Gemma3()
