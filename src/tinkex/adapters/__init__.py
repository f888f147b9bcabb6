"""Training platforms: one protocol of five calls, and three that keep it.

`TinkexPlatform` trains through our clients, `PeftPlatform` with plain transformers and peft,
`MemoryPlatform` in numpy for tests. Names are resolved when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.adapters.clients import TinkexPlatform as TinkexPlatform
    from tinkex.adapters.memory import MemoryPlatform as MemoryPlatform
    from tinkex.adapters.peft import PeftPlatform as PeftPlatform
    from tinkex.adapters.platforms import SessionConfig as SessionConfig
    from tinkex.adapters.platforms import TrainingPlatform as TrainingPlatform

_HOME_OF = {
    "MemoryPlatform": "memory",
    "PeftPlatform": "peft",
    "SessionConfig": "platforms",
    "TinkexPlatform": "clients",
    "TrainingPlatform": "platforms",
}

__all__ = ["MemoryPlatform", "PeftPlatform", "SessionConfig", "TinkexPlatform", "TrainingPlatform"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinkex.adapters' has no attribute {name!r}")
    value = getattr(import_module(f"tinkex.adapters.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
