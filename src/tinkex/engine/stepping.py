"""Steps of an engine: training and sampling take turns by the time they take."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tinkex.engine.api import Engine, PassDone, SampleDone

logger = logging.getLogger("tinkex.server")

Kind: TypeAlias = Literal["training", "sampling"]


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


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that failed: all work of its kind that the engine had begun is lost."""

    kind: Kind
    error: Exception


Ended: TypeAlias = PassDone | SampleDone | Failed
TRAINING: Kind = "training"
SAMPLING: Kind = "sampling"


class Advancing(Protocol):
    """Something whose work goes on by steps."""

    steps: Counter[str]
    """The number of steps so far, by kind."""

    def has_work(self) -> bool:
        """Return True if `advance` would do something now."""

    def advance(self) -> Sequence[Ended]:
        """Go on with the work, and return what has ended."""

    def step(self, kind: Kind) -> Sequence[Ended]:
        """Go on with work of one kind."""


class Stepper(Advancing):
    """Advances an engine, so that neither training nor sampling stops the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shares = Shares()
        self.steps: Counter[str] = Counter()

    def has_work(self) -> bool:
        """Return True if a step would do something."""
        return bool(self._kinds())

    def advance(self) -> Sequence[Ended]:
        """Make a step of training or of sampling, whichever has had less time."""
        if not (kinds := self._kinds()):
            return ()
        self._shares.note(kinds)
        kind: Kind = TRAINING if self._shares.first(kinds) == TRAINING else SAMPLING
        began = time.perf_counter()
        ended = self.step(kind)
        self._shares.charge(kind, time.perf_counter() - began)
        self.steps[kind] += 1
        return ended

    def _kinds(self) -> list[Kind]:
        kinds: list[Kind] = []
        if self._engine.passing():
            kinds.append(TRAINING)
        if self._engine.sampling():
            kinds.append(SAMPLING)
        return kinds

    def step(self, kind: Kind) -> Sequence[Ended]:
        """Make a step of one kind."""
        try:
            return self._engine.pass_step() if kind == TRAINING else self._engine.sample_step()
        except Exception as error:
            logger.exception("a step of %s failed; the running work is lost", kind)
            return [Failed(kind, error)]
