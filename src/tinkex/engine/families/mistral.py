"""Mistral: the Llama line with a sliding window."""

from __future__ import annotations

from typing import Any, ClassVar

from tinkex.engine.families.family import TINY_WINDOW, Family
from tinkex.engine.families.model_config import Fields


class Mistral(Family):
    """One window for every layer, if there is one."""

    name = "mistral"
    is_uniform = True
    tiny: ClassVar = {"mistral-window": {"sliding_window": TINY_WINDOW, "head_dim": 16}}

    def window(self, fields: Fields) -> Any:
        """Return the window; there is no switch for it."""
        return fields.get("sliding_window", 4096)


FAMILY = Mistral()
