"""A fake engine whose steps take time and whose batch has an end, as those of a GPU do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.engine.api import SampleDone
from tinkex.engine.fake import FakeEngine


@dataclass
class SimulatedEngine(FakeEngine):
    """A fake engine that draws for at most `slots` jobs in a step; others wait."""

    slots: int = 32

    def sample_step(self) -> Sequence[SampleDone]:
        """Advance the oldest jobs by one token."""
        oldest = dict(itertools.islice(self._jobs.items(), self.slots))
        waiting = {name: job for name, job in self._jobs.items() if name not in oldest}
        self._jobs = oldest
        try:
            return super().sample_step()
        finally:
            self._jobs = self._jobs | waiting
