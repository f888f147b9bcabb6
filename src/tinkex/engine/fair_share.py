"""Fair turns: whoever has had least comes first."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Shares:
    """How much each of several parties has had of something that they share.

    Whoever comes, or comes back after a rest, begins where the one is that has had least: what it
    did not use is not owed to it.

    Example:
        >>> shares = Shares()
        >>> shares.note(["a", "b"])
        >>> shares.charge("a", 10)
        >>> shares.first(["a", "b"])
        'b'
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._least = 0.0

    def note(self, waiting: Collection[str]) -> None:
        """Say who waits for a turn now; whoever does not, and is level with the others, is
        forgotten.
        """
        for party in waiting:
            self._had.setdefault(party, self._least)
        self._least = min((self._had[party] for party in waiting), default=self._least)
        self._had = {
            party: had for party, had in self._had.items() if had > self._least or party in waiting
        }

    def first(self, parties: Iterable[str]) -> str:
        """Return the party that has had least; the earlier one of two that are level."""
        return min(parties, key=self._had.__getitem__)

    def had(self, party: str) -> float:
        """Return the share that a waiting owner has had."""
        return self._had[party]

    def charge(self, party: str, cost: float) -> None:
        """Let a party that waits have its turn."""
        self._had[party] += cost
