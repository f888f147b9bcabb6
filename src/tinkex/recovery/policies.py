"""The policy of recovery from lost runs, the attempts under it, and the error when they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from tinkex import events
from tinkex.client.settings.delays import Delays
from tinkex.errors import TinkerError

Strategy: TypeAlias = Literal["latest", "best"] | tuple[Literal["specific"], str]
"""The checkpoint to go on from: the last, the one with the best metric, or a named one."""
METRIC_PREFIX = "metric:"
"""The prefix of metrics in the metadata of a checkpoint."""


class RecoveryError(TinkerError):
    """A run was not recovered; `reason` is the cause in one word.

    Reasons: recovery_disabled, no_executor, already_pending, missing_checkpoint, exhausted.

    Example:
        >>> from tinkex.recovery import Executor
        >>> try:
        ...     Executor().recover("run-1", service, RecoveryPolicy(enabled=False))
        ... except RecoveryError as error:
        ...     print(error.reason)
        recovery_disabled
    """

    reason: str

    def __init__(self, message: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """A policy of recovery; a value of a wrong type counts as its default.

    Example:
        >>> policy = RecoveryPolicy(
        ...     enabled=True, checkpoint_strategy="best", metric="accuracy", metric_mode="max"
        ... )
        >>> policy.max_attempts
        3
    """

    enabled: bool = False
    max_attempts: int = 3
    backoff_ms: int = 5_000
    """The wait after the first failed attempt; it doubles with each further one."""
    max_backoff_ms: int = 60_000
    poll_interval_ms: int = 30_000
    """The time between two polls of a monitor."""
    checkpoint_strategy: Strategy = "latest"
    restore_optimizer: bool = True
    on_recovery: Callable[[Any, Any, str], object] | None = None
    """Called with the old client, the new client and the checkpoint, in a new thread."""
    on_failure: Callable[[str, BaseException], object] | None = None
    """Called with the run and the last error when all attempts have failed, in a new thread."""
    metric: str = "loss"
    """The metric of `best`; see `metrics_metadata`."""
    metric_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Replace invalid values by their defaults."""
        for item in fields(self):
            value = getattr(self, item.name)
            kept = _CHECKS[item.name](value)
            object.__setattr__(self, item.name, item.default if kept is None else kept)

    @classmethod
    def of(
        cls, given: RecoveryPolicy | Mapping[str, Any] | Iterable[tuple[str, Any]] | None
    ) -> RecoveryPolicy:
        """Make a policy of a policy, a mapping or pairs; ignore unknown names.

        Args:
            given: The policy, or its fields.

        Returns:
            The policy.

        Raises:
            TypeError: It is something else.

        Example:
            >>> policy = RecoveryPolicy.of(
            ...     {"enabled": True, "checkpoint_strategy": "BEST", "max_attempts": 0}
            ... )
            >>> policy.checkpoint_strategy, policy.max_attempts
            ('best', 3)
        """
        if isinstance(given, RecoveryPolicy):
            return given
        if isinstance(given, str | bytes) or not (given is None or isinstance(given, Iterable)):
            raise TypeError(
                "a recovery policy is a RecoveryPolicy, a mapping or None, got "
                f"{type(given).__name__}"
            )
        try:
            values = dict(given or {})
        except (TypeError, ValueError):
            raise TypeError(
                "a recovery policy must be a mapping, or pairs of a name and a value"
            ) from None
        known = {item.name for item in fields(cls)}
        return cls(**{str(name): value for name, value in values.items() if str(name) in known})

    @property
    def strategy_name(self) -> str:
        """The name of the strategy."""
        strategy = self.checkpoint_strategy
        return strategy if isinstance(strategy, str) else strategy[0]

    def backoff(self, attempt: int) -> float:
        """Return the seconds to wait after an attempt.

        Args:
            attempt: The attempt, counted from 1.

        Returns:
            Seconds.

        Example:
            >>> [RecoveryPolicy().backoff(attempt) for attempt in (1, 2, 9)]
            [5.0, 10.0, 60.0]
        """
        return Delays(self.backoff_ms / 1000, self.max_backoff_ms / 1000, low=1.0).after(attempt)


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


def metrics_metadata(
    metrics: Mapping[str, float] | None = None, /, **named: float
) -> dict[str, str]:
    """Return metrics in the form of a checkpoint, for `save_state(user_metadata=…)`.

    The strategy `best` reads them.

    Args:
        metrics: Numbers by name.
        named: Further ones, as keywords.

    Returns:
        Texts by name.

    Example:
        >>> metrics_metadata(loss=0.25)
        {'metric:loss': '0.25'}
    """
    return {
        f"{METRIC_PREFIX}{name}": repr(float(value))
        for name, value in {**(metrics or {}), **named}.items()
    }


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _mode(value: Any) -> str | None:
    return value if value in ("min", "max") else None


def _strategy(value: Any) -> Strategy | None:
    if isinstance(value, str):
        return {"latest": "latest", "best": "best"}.get(value.strip().lower())  # type: ignore[return-value]
    if isinstance(value, tuple | list) and len(value) == 2 and str(value[0]).lower() == "specific":
        return ("specific", value[1]) if isinstance(value[1], str) and value[1] else None
    return None


def _taking(count: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not callable(value):
            return None
        from inspect import signature  # not free to import, and asked for by few

        try:
            signature(value).bind(*[None] * count)
        except TypeError:
            return None
        except ValueError:  # a builtin that does not say
            pass
        return value

    return check


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "enabled": _flag,
    "max_attempts": _count,
    "backoff_ms": _count,
    "max_backoff_ms": _count,
    "poll_interval_ms": _count,
    "checkpoint_strategy": _strategy,
    "restore_optimizer": _flag,
    "on_recovery": _taking(3),
    "on_failure": _taking(2),
    "metric": _text,
    "metric_mode": _mode,
}
