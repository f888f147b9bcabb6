"""Recovery of lost runs: training goes on from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import names_of

if TYPE_CHECKING:
    from tinkex.recovery.monitor import (
        Executor as Executor,
        Monitor as Monitor,
        best_checkpoint as best_checkpoint,
        metric_of as metric_of,
        select_checkpoint as select_checkpoint,
    )
    from tinkex.recovery.policies import (
        RecoveryError as RecoveryError,
        RecoveryPolicy as RecoveryPolicy,
        metrics_metadata as metrics_metadata,
    )

__all__, __getattr__, __dir__ = names_of(__name__, __file__)
