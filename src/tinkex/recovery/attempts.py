"""Attempts to recover a run: their events, and the waits between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinkex import events
from tinkex.recovery.policies import RecoveryPolicy


@dataclass(slots=True)
class Attempts:
    """The attempts to recover one run, counted from 1."""

    run_id: str
    policy: RecoveryPolicy
    metadata: dict[str, Any] = field(default_factory=dict)
    final: tuple[type[Exception], ...] = ()
    """Errors after which there is no other attempt."""
    attempt: int = 0

    def begin(self) -> None:
        """Count an attempt, and report it."""
        self.attempt += 1
        self.tell(events.RECOVERY_STARTED)

    def tell(self, name: str, **facts: Any) -> None:
        """Emit an event about the present attempt."""
        said = {
            **self.metadata,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "strategy": self.policy.strategy_name,
        }
        events.emit(name, {"attempt": self.attempt}, {**said, **facts})

    def delay_after(self, outcome: object) -> float | None:
        """Return the wait before the next attempt; None if there is none."""
        if not isinstance(outcome, Exception):
            return None
        self.tell(events.RECOVERY_FAILED, error=outcome)
        is_last = isinstance(outcome, self.final) or self.attempt >= self.policy.max_attempts
        return None if is_last else self.policy.backoff(self.attempt)
