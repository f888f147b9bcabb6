"""Log lines for each loss and each regularizer that is computed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tinkex import events as bus
from tinkex.telemetry import attach_lines, detach as detach

EVENTS = (
    bus.CUSTOM_LOSS_START,
    bus.CUSTOM_LOSS_STOP,
    bus.CUSTOM_LOSS_EXCEPTION,
    bus.REGULARIZER_START,
    bus.REGULARIZER_STOP,
    bus.REGULARIZER_EXCEPTION,
)

_numbers = itertools.count(1)


def events() -> list[str]:
    """The names of the events that losses and regularizers emit.

    Example:
        >>> [name for name in events() if name.endswith("stop")]
        ['tinkex.custom_loss.stop', 'tinkex.regularizer.compute.stop']
    """
    return list(EVENTS)


def attach_logger(handler_id: str | None = None, level: str | int = "info") -> str:
    """Like `tinkex.telemetry.attach_logger`, for the events of losses and regularizers.

    Example:
        >>> handler = attach_logger(level="debug")  # a line for every loss and every term
        >>> detach(handler)
        True
    """
    return attach_lines(_line, EVENTS, handler_id or f"tinkex-regularizers-{next(_numbers)}", level)


def _line(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> str:
    fact = metadata.get
    took = f"in {measurements.get('duration', 0):.0f} ms"

    def number(key: str) -> str:
        return f"{key}={measurements[key]:.4f}" if key in measurements else f"{key}=none"

    term = f"regularizer {fact('regularizer_name')} weight={fact('weight')}"
    if name == bus.CUSTOM_LOSS_START:
        return (
            f"custom loss start regularizers={fact('regularizer_count')} "
            f"grad_norms={fact('track_grad_norms')}"
        )
    if name == bus.CUSTOM_LOSS_STOP:
        sums = f"{number('loss_total')} {number('regularizer_total')}"
        return f"custom loss stop {sums} regularizers={fact('regularizer_count')} {took}"
    if name == bus.CUSTOM_LOSS_EXCEPTION:
        return f"custom loss failed {took}: {fact('reason')}"
    if name == bus.REGULARIZER_START:
        return f"{term} start async={fact('async')}"
    if name == bus.REGULARIZER_STOP:
        return (
            f"{term} stop {number('value')} {number('contribution')} {number('grad_norm')} {took}"
        )
    return f"{term} failed {took}: {fact('reason')}"
