"""Runs that are lost are noticed and trained on from a checkpoint."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.recovery.monitor import Executor as Executor
    from tinkex.recovery.monitor import Monitor as Monitor
    from tinkex.recovery.monitor import best_checkpoint as best_checkpoint
    from tinkex.recovery.monitor import metric_of as metric_of
    from tinkex.recovery.monitor import select_checkpoint as select_checkpoint
    from tinkex.recovery.policies import RecoveryError as RecoveryError
    from tinkex.recovery.policies import RecoveryPolicy as RecoveryPolicy
    from tinkex.recovery.policies import metrics_metadata as metrics_metadata

_HOMES = {
    "tinkex.recovery.monitor": [
        "Executor",
        "Monitor",
        "best_checkpoint",
        "metric_of",
        "select_checkpoint",
    ],
    "tinkex.recovery.policies": ["RecoveryError", "RecoveryPolicy", "metrics_metadata"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinkex.recovery' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
