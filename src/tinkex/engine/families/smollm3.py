"""SmolLM3: layers that do not mark positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tinkex.engine.api import EngineError
from tinkex.engine.families.family import TINY_SLIDES, Family, read_size
from tinkex.engine.families.model_config import Fields

FOUR = {"num_hidden_layers": 4, "pad_token_id": 0}


class SmolLM3(Family):
    """Every fourth layer does not mark positions, and slides if any layer does."""

    name = "smollm3"
    tiny: ClassVar = {
        "smollm3": {**FOUR, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        "smollm3-window": {
            **FOUR,
            **TINY_SLIDES,
            "no_rope_layers": [1, 0, 0, 1],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    }
    tied = True
    rope_theta = 2000000.0

    def window(self, fields: Fields) -> Any:
        """Return the window, if it is switched on."""
        return fields.get("sliding_window") if fields.get("use_sliding_window", False) else None

    def slides(self, fields: Fields, layers: int) -> Sequence[bool]:
        """Let layers without positions slide."""
        return [not roped for roped in self.roped(fields, layers)]

    def roped(self, fields: Fields, layers: int) -> list[bool]:
        """Say of each layer if it marks positions: as listed, else all but every fourth."""
        if (listed := fields.get("no_rope_layers")) is not None:
            if len(listed) < layers:
                raise EngineError(f"no_rope_layers has {len(listed)} entries for {layers} layers")
            return [bool(roped) for roped in listed[:layers]]
        interval = read_size({"no_rope_layer_interval": 4, **fields}, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(layers)]


FAMILY = SmolLM3()
