"""Fair turns: the party that has had least is next."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Shares:
    """The shares that several parties have had of a common resource.

    A party that comes, or comes back after a rest, begins level with the one that has had least: it
    has no claim on turns that it did not use.

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
        """Set the parties that wait for a turn now.

        A party that does not wait, and is level with the others, is forgotten.
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
        """Return the share that a waiting party has had."""
        return self._had[party]

    def charge(self, party: str, cost: float) -> None:
        """Add a turn to the share of a waiting party."""
        self._had[party] += cost
