"""Delays before retries: the one formula, with numbers that each caller sets."""

from __future__ import annotations

import random

import msgspec

LONGEST_RETRY_AFTER = 60.0
"""Longer waits that a server asks for are ignored."""


class Delays(msgspec.Struct, frozen=True):
    """Delays that double after each failure in a row, with jitter. Times are seconds.

    Example:
        >>> [Delays(first=1.0, most=3.0, low=1.0).after(failures) for failures in (1, 2, 3)]
        [1.0, 2.0, 3.0]
    """

    first: float = 0.5
    most: float = 10.0
    low: float = 0.75
    """The smallest factor of the jitter."""
    high: float = 1.0
    """The largest factor of the jitter."""

    def after(
        self, failures: int, asked: float | None = None, jitter: float | None = None
    ) -> float:
        """Return the delay after the n-th failure, counted from 1.

        Args:
            failures: The number of failures in a row.
            asked: The delay that the server asks for; a longer one than a minute is ignored.
            jitter: A number in [0, 1] in place of a random one.

        Returns:
            Seconds.
        """
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.most)
        share = random.random() if jitter is None else jitter
        delay = min(plain * (self.low + (self.high - self.low) * share), self.most)
        return max(delay, asked) if asked and asked <= LONGEST_RETRY_AFTER else delay
