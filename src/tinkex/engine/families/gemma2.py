"""Gemma 2 (text): capped scores and logits, and windows in every second layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from tinkex.engine.families.family import TINY_WINDOW, Family
from tinkex.engine.families.model_config import Fields, TensorNames

TINY_GEMMA = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": TINY_WINDOW,
    "query_pre_attn_scalar": 10,
}
NAMES = TensorNames(
    # "post attention" names the norm before the mlp elsewhere
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


class Gemma2(Family):
    """Norms after attention and mlp too, scaled embeddings, and gelu."""

    name = "gemma2"
    tiny: ClassVar = {
        "gemma2": {**TINY_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    }
    names = NAMES
    tied = True
    centred_norms = True
    head_dim = 256
    score_cap: ClassVar[float | None] = 50.0
    default_logit_cap: ClassVar[float | None] = 30.0

    def activation(self, fields: Fields) -> str:
        """Return the activation of the mlp, which has a name of its own here."""
        return str(fields.get("hidden_activation") or "gelu_pytorch_tanh")

    def scale(self, fields: Fields, head_dim: int) -> float:
        """Return the factor on q·k, which does not follow from the size of a head."""
        scale: float = float(fields.get("query_pre_attn_scalar", 256)) ** -0.5
        return scale

    def embed_scale(self, hidden: int) -> float:
        """Return the factor on embeddings."""
        return math.sqrt(hidden)

    def logit_cap(self, fields: Fields) -> float | None:
        """Return the bound of logits."""
        cap: float | None = fields.get("final_logit_softcapping", self.default_logit_cap)
        return cap

    def window(self, fields: Fields) -> Any:
        """Return the window; there is no switch for it."""
        return fields.get("sliding_window", 4096)

    def slides(self, fields: Fields, layers: int) -> Sequence[bool]:
        """Let all layers but the last of each turn slide."""
        turn = self.turn(fields)
        return [(index + 1) % turn != 0 for index in range(layers)]

    def turn(self, fields: Fields) -> int:
        """Return how many layers there are from one that sees all to the next."""
        return 2


FAMILY = Gemma2()
