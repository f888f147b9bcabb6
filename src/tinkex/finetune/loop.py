"""The plan and the loop of a fine-tune."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tinkex.client.futures.api_future import Future
from tinkex.client.training_client import TrainingClient
from tinkex.errors import GoneError, NotFoundError, RequestFailedError, TinkerError
from tinkex.finetune.example_files import datum, summed_loss
from tinkex.finetune.run_folder import RunFolder
from tinkex.text.chat_format import Rendered
from tinkex.types.future_requests import RequestErrorCategory
from tinkex.types.optimizers import AdamParams
from tinkex.types.saves import SaveWeightsResponse
from tinkex.types.tensors import Array
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
ORDER = 2
"""Part of the seed of an epoch's order, beside the user's seed."""
FULL = re.compile(r"disk is full|no space left on device|disk quota exceeded", re.IGNORECASE)
AHEAD = 1
"""Steps sent before the previous one is answered."""


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


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step."""

    step: int
    loss: float | None
    eval_loss: float | None
    made: int
    """Steps made by this loop."""
    tokens: int
    """Tokens of these steps."""
    seconds: float
    """Seconds since the loop began."""


@dataclass(frozen=True)
class _Sent:
    """A step in flight; after it, `done` steps have been made."""

    done: int
    rows: list[Rendered]
    passed: Future[ForwardBackwardOutput] | None
    stepped: Future[OptimStepResponse] | None
    evaluated: list[tuple[Future[ForwardBackwardOutput], Sequence[Rendered]]]
    saved: Future[SaveWeightsResponse] | None


class FineTune:
    """The loop of a supervised fine-tune.

    Steps, evaluations and checkpoints are sent before the last one is answered.

    Args:
        client: The run to train, restored from the folder's last checkpoint if it has one.
        plan: The plan of the steps.
        train: The examples.
        folder: The folder for metrics and checkpoints.
        held_out: Examples to evaluate on.
        name: The prefix of checkpoint names.
        listener: Called after every step.
    """

    def __init__(
        self,
        client: TrainingClient,
        plan: Plan,
        train: Sequence[Rendered],
        folder: RunFolder,
        *,
        held_out: Sequence[Rendered] = (),
        name: str = "train",
        listener: Callable[[Progress], object] = lambda progress: None,
    ) -> None:
        self.client, self.plan, self.folder = client, plan, folder
        self._train, self._held_out, self._name, self._listener = train, held_out, name, listener
        self._stopping = False
        self._made = self._tokens = 0
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End after the steps in flight, with a checkpoint; safe in a signal handler."""
        self._stopping = True

    def run(self) -> bool:
        """Make the remaining steps; return True if all were made."""
        done = self.folder.checkpoint[0] if self.folder.checkpoint else 0
        self.folder.rewind()
        self._began = time.perf_counter()
        sent: deque[_Sent] = deque()
        if done == 0 and self._held_out:
            sent.append(_Sent(0, [], None, None, self._evaluate(), None))
        while done < self.plan.steps and not self._stopping:
            sent.append(self._send(done))
            done += 1
            while len(sent) > AHEAD:
                self._receive(sent.popleft())
        while sent:
            self._receive(sent.popleft())
        if (self.folder.checkpoint or (0, ""))[0] < done:
            self.folder.add_checkpoint(done, self._save(done).result().path)
        return done == self.plan.steps

    def _send(self, step: int) -> _Sent:
        plan, done = self.plan, step + 1
        rows = [self._train[index] for index in plan.batch(step)]
        passed = self.client.forward_backward([datum(row) for row in rows], "cross_entropy")
        stepped = self.client.optim_step(AdamParams(learning_rate=plan.rate(step)))
        evaluated = self._evaluate() if plan.is_eval(done) else []
        return _Sent(
            done, rows, passed, stepped, evaluated, self._save(done) if plan.is_save(done) else None
        )

    def _save(self, done: int) -> Future[SaveWeightsResponse]:
        return self.client.save_state(f"{self._name}-{done:06d}")

    def _evaluate(self) -> list[tuple[Future[ForwardBackwardOutput], Sequence[Rendered]]]:
        return [
            (self.client.forward([datum(row) for row in rows], "cross_entropy"), rows)
            for rows in _groups(self._held_out, self.plan.batch_size)
        ]

    def _receive(self, sent: _Sent) -> None:
        """Wait for a step and record its results, the checkpoint last."""
        loss = eval_loss = None
        if sent.passed is not None and sent.stepped is not None:
            total, weight = summed_loss(sent.passed.result(), sent.rows)
            sent.stepped.result()
            loss, step = total / weight, sent.done - 1
            tokens = sum(row.tokens.size for row in sent.rows)
            self._made += 1
            self._tokens += tokens
            self.folder.log(
                {
                    "step": sent.done,
                    "epoch": step // self.plan.steps_per_epoch + 1,
                    "loss": loss,
                    "learning_rate": self.plan.rate(step),
                    "examples": len(sent.rows),
                    "tokens": tokens,
                }
            )
        if sent.evaluated:
            sums = np.array(
                [summed_loss(future.result(), rows) for future, rows in sent.evaluated]
            ).sum(axis=0)
            eval_loss = float(sums[0] / sums[1])
            self.folder.log({"step": sent.done, "eval_loss": eval_loss})
        if sent.saved is not None:
            self.folder.add_checkpoint(sent.done, sent.saved.result().path, eval_loss)
        seconds = time.perf_counter() - self._began
        self._listener(Progress(sent.done, loss, eval_loss, self._made, self._tokens, seconds))


def _groups(rows: Sequence[Rendered], size: int) -> Iterator[Sequence[Rendered]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def is_lost(error: TinkerError) -> bool:
    """Return True if the server has lost the run, so that resuming from a checkpoint may help."""
    if isinstance(error, RequestFailedError):
        return error.category != RequestErrorCategory.User
    return isinstance(error, GoneError | NotFoundError)


def is_full(error: TinkerError) -> bool:
    """Return True if the server has no space left to save; a retry would not help."""
    return FULL.search(error.message) is not None
