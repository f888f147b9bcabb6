"""Training platforms: one protocol of five calls, and three implementations.

`TinkexPlatform` uses the clients of tinkex, `PeftPlatform` transformers and peft, `MemoryPlatform`
numpy, for tests. Names are resolved when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import names_of

if TYPE_CHECKING:
    from tinkex.adapters.memory import MemoryPlatform as MemoryPlatform
    from tinkex.adapters.peft import PeftPlatform as PeftPlatform
    from tinkex.adapters.platforms import (
        SessionConfig as SessionConfig,
        TinkexPlatform as TinkexPlatform,
        TrainingPlatform as TrainingPlatform,
    )

__all__, __getattr__, __dir__ = names_of(__name__, __file__)
