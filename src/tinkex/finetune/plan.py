"""The plan of a fine-tune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tinkex.types.tensors import Array

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
ORDER = 2
"""Part of the seed of an epoch's order, beside the user's seed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The batch, the learning rate and the extra work of each step, by its number."""

    examples: int
    steps: int
    batch_size: int = 16
    seed: int = 0
    learning_rate: float = 3e-4
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    eval_every: int = 0
    save_every: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch; the last batch may be smaller."""
        return math.ceil(self.examples / self.batch_size)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0): warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = 1.0 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * left
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 - math.cos(math.pi * left))
        return self.learning_rate

    def batch(self, step: int) -> Array:
        """Return the indices of a step's examples; each epoch has its own order of all."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, ORDER, epoch]).permutation(self.examples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def is_eval(self, done: int) -> bool:
        """Return True if the held-out loss is computed after `done` steps."""
        return done in (0, self.steps) or (self.eval_every > 0 and done % self.eval_every == 0)

    def is_save(self, done: int) -> bool:
        """Return True if a checkpoint is saved after `done` steps."""
        return done == self.steps or (self.save_every > 0 and done % self.save_every == 0)
