"""Steps of an engine: training and sampling take turns by the time they take."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tinkex.engine.api import Engine, PassDone, SampleDone
from tinkex.engine.fair_share import Shares

logger = logging.getLogger("tinkex.server")

Kind: TypeAlias = Literal["training", "sampling"]


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
        return self._engine.passing() or self._engine.sampling()

    def advance(self) -> Sequence[Ended]:
        """Make a step of training or of sampling, whichever has had less time."""
        kinds: list[Kind] = []
        if self._engine.passing():
            kinds.append(TRAINING)
        if self._engine.sampling():
            kinds.append(SAMPLING)
        if not kinds:
            return ()
        self._shares.note(kinds)
        kind: Kind = TRAINING if self._shares.first(kinds) == TRAINING else SAMPLING
        began = time.perf_counter()
        ended = self.step(kind)
        self._shares.charge(kind, time.perf_counter() - began)
        self.steps[kind] += 1
        return ended

    def step(self, kind: Kind) -> Sequence[Ended]:
        """Make a step of one kind."""
        try:
            return self._engine.pass_step() if kind == TRAINING else self._engine.sample_step()
        except Exception as error:
            logger.exception("a step of %s failed; the running work is lost", kind)
            return [Failed(kind, error)]
