"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tinkex.engine.families.family import TINY_SLIDES, Family
from tinkex.engine.families.model_config import Fields


class Qwen2(Family):
    """Upper layers slide if `use_sliding_window` says so."""

    name = "qwen2"
    tiny: ClassVar = {"qwen2": {}, "qwen2-window": {**TINY_SLIDES, "max_window_layers": 1}}
    qkv_bias = True
    o_bias = False

    def window(self, fields: Fields) -> Any:
        """Return the window, if it is switched on."""
        return (
            fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
        )

    def slides(self, fields: Fields, layers: int) -> Sequence[bool]:
        """Let layers from `max_window_layers` on slide."""
        return [index >= fields.get("max_window_layers", 28) for index in range(layers)]


FAMILY = Qwen2()
