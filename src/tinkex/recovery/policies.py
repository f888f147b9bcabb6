"""When and how a training run that was lost is taken up again: a policy, and the error when that
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from tinkex.client.settings.delays import Delays
from tinkex.errors import TinkerError

Strategy: TypeAlias = Literal["latest", "best"] | tuple[Literal["specific"], str]
"""Which checkpoint to go on from: the last one, the one with the best metric, or one that is named.
"""
METRIC_PREFIX = "metric:"
"""What metrics are called in a checkpoint's own metadata, where its other entries are the user's.
"""


class RecoveryError(TinkerError):
    """A run was not taken up again; `reason` says why in one word.

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
    """How lost runs are taken up again. A value of the wrong kind counts as its default.

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
    """The wait after the first attempt that fails; it doubles with each further one."""
    max_backoff_ms: int = 60_000
    poll_interval_ms: int = 30_000
    """How often a monitor looks at its runs."""
    checkpoint_strategy: Strategy = "latest"
    restore_optimizer: bool = True
    on_recovery: Callable[[Any, Any, str], object] | None = None
    """Is told the old client, the new one and the checkpoint between them; in a thread of its own.
    """
    on_failure: Callable[[str, BaseException], object] | None = None
    """Is told the run and the last error, when all attempts have failed; in a thread of its own."""
    metric: str = "loss"
    """What `best` goes by; see `metrics_metadata`."""
    metric_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Put defaults in the place of what makes no sense."""
        for item in fields(self):
            value = getattr(self, item.name)
            kept = _CHECKS[item.name](value)
            object.__setattr__(self, item.name, item.default if kept is None else kept)

    @classmethod
    def of(
        cls, given: RecoveryPolicy | Mapping[str, Any] | Iterable[tuple[str, Any]] | None
    ) -> RecoveryPolicy:
        """A policy of a policy, a mapping or pairs; names that it does not know are passed over.

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
        """The strategy in one word."""
        return (
            self.checkpoint_strategy
            if isinstance(self.checkpoint_strategy, str)
            else self.checkpoint_strategy[0]
        )

    def backoff(self, attempt: int) -> float:
        """Seconds to wait after the n-th attempt, counted from 1.

        Args:
            attempt: Which attempt, counted from 1.

        Returns:
            Seconds.

        Example:
            >>> [RecoveryPolicy().backoff(attempt) for attempt in (1, 2, 9)]
            [5.0, 10.0, 60.0]
        """
        return Delays(self.backoff_ms / 1000, self.max_backoff_ms / 1000, low=1.0).after(attempt)


def metrics_metadata(
    metrics: Mapping[str, float] | None = None, /, **named: float
) -> dict[str, str]:
    """Metrics in the form in which a checkpoint keeps them, for `save_state(user_metadata=…)`;
    `best` reads them.

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
