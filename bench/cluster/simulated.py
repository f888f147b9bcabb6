"""Engines to measure with: one whose batch has an end, as a GPU's has, and one that is timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.engine.api import Engine, PassDone, SampleDone
from tinkex.engine.fake import FakeEngine
from tinkex.local import make_engine


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


def timed_tiny(path: str) -> Engine:
    """Return an engine over tinkex/tiny on one thread that notes the seconds of each pass.

    Args:
        path: The file for them, one in a line.
    """
    engine = make_engine({"tinkex/tiny": ""})
    import torch

    torch.set_num_threads(1)
    step = engine.pass_step
    file = open(path, "a", buffering=1)  # noqa: SIM115 — as long as the process lives

    def pass_step() -> Sequence[PassDone]:
        began = time.perf_counter()
        ended = step()
        file.write(f"{time.perf_counter() - began}\n")
        return ended

    engine.pass_step = pass_step  # type: ignore[method-assign]
    return engine
