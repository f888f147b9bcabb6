"""Compare losses on samples of an older policy: the demo's task, learned from rewards.

    PYTHONPATH=src python bench/reinforce.py --seeds 0 1 2 3 4 --workers 2

A small model learns two-digit addition from a few examples, then from rewards alone, as in
`tinkex demo`. Each row is a loss and the age of its samples in optimizer steps. Every run of a seed
has the same problems and the same number of steps. The table has the greedy accuracy on held-out
problems after the last step, for each seed and on average, and the mean reward of the last samples.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

LAST = 5
"""Batches of samples whose mean reward is shown."""


class Row(NamedTuple):
    """A loss on samples of an age."""

    loss: str
    age: int


ROWS = [
    Row("importance_sampling", 0),
    Row("importance_sampling", 2),
    Row("stable_reinforce", 0),
    Row("stable_reinforce", 2),
]


class Outcome(NamedTuple):
    """The outcome of a run."""

    before: float
    accuracy: float
    reward: float


def learn(row: Row, seed: int, steps: int, rate: float, threads: int) -> Outcome:
    """One run, in a process of its own."""
    os.environ |= {"TINKER_TELEMETRY": "0", "TINKEX_HUB_CACHE": "0"}
    from rich.console import Console

    import tinkex
    from tinkex.cli.demo import Demo, Recipe
    from tinkex.models import addition
    from tinkex.types import Datum, PromptProvenanceSpan, SampledProvenanceSpan, SampledSequence

    class Run(Demo):
        """The demo, with samples that are trained on some steps after they were drawn."""

        def reinforce_late(self, loss: str, age: int) -> list[float]:
            waiting: deque[list[Datum]] = deque()
            rewards = []
            for _ in range(self.recipe.reward_steps + age):
                data, reward = self.batch()
                waiting.append(data)
                rewards.append(reward)
                if len(waiting) > age and (due := waiting.popleft()):
                    self.step(due, loss, self.recipe.reward_rate)
            return rewards

        def batch(self) -> tuple[list[Datum], float]:
            recipe = self.recipe
            problems = self.random.sample(self.problems, recipe.prompts_per_step)
            sampler = self.client.save_weights_and_get_sampling_client(record_stability_info=True)
            if isinstance(sampler, tinkex.APIFuture):
                sampler = sampler.result()
            groups = self.ask(sampler, problems, recipe.samples_per_prompt, 1.0)
            data: list[Datum] = []
            scores = []
            for problem, group in zip(problems, groups, strict=True):
                score = np.array([addition.reward(self.text(sample), *problem) for sample in group])
                scores.append(score.mean())
                if score.std() > 0:
                    pairs = zip(group, score - score.mean(), strict=True)
                    data += [named(self.experience(problem, *pair), pair[0]) for pair in pairs]
            return data, float(np.mean(scores))

    def named(datum: Datum, sample: SampledSequence) -> Datum:
        count, name = sample.length, sample.sequence_id
        before = datum.model_input.length - count
        read = [
            PromptProvenanceSpan(sequence_id=name, offset=at, length=before + 1 - at)
            for at in (0, 1)
        ]
        drawn = [SampledProvenanceSpan(sequence_id=name, length=count - less) for less in (1, 0)]
        return datum.with_provenance([read[0], drawn[0]], [read[1], drawn[1]])

    import torch

    torch.set_num_threads(threads)
    recipe = Recipe(reward_steps=steps, reward_rate=rate)
    with tempfile.TemporaryDirectory() as directory:
        backend = tinkex.LocalBackend(data_dir=Path(directory))
        with backend, tinkex.ServiceClient(base_url=backend.base_url) as service:
            run = Run(service, "tinkex/tiny", recipe, Console(quiet=True), random.Random(seed))
            run.supervise()
            before, _ = run.examine(service.create_sampling_client(model_path=saved(run, "before")))
            rewards = run.reinforce_late(row.loss, row.age)
            after, _ = run.examine(service.create_sampling_client(model_path=saved(run, "after")))
    return Outcome(before, after, float(np.mean(rewards[-LAST:])))


def saved(run: object, name: str) -> str:
    """The path of the present weights."""
    path: str = run.client.save_weights_for_sampler(name).result().path  # type: ignore[attr-defined]
    return path


def table(seeds: Sequence[int], outcomes: dict[tuple[Row, int], Outcome]) -> str:
    """The rows as text."""
    lines = [
        f"{'loss':20} {'age':>3}  {'  '.join(f'seed {seed}' for seed in seeds)}    mean  reward"
    ]
    before = [outcomes[ROWS[0], seed].before for seed in seeds]
    lines.append(f"{'after the examples':20} {'':3}  {_cells(before)}  {np.mean(before):6.1%}")
    for row in ROWS:
        found = [outcomes[row, seed] for seed in seeds]
        accuracies = [outcome.accuracy for outcome in found]
        rewards = np.mean([outcome.reward for outcome in found])
        lines.append(
            f"{row.loss:20} {row.age:3}  {_cells(accuracies)}  {np.mean(accuracies):6.1%}  "
            f"{rewards:6.3f}"
        )
    return "\n".join(lines)


def _cells(values: Sequence[float]) -> str:
    return "  ".join(f"{value:6.1%}" for value in values)


def main() -> None:
    """Run all rows of all seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps on rewards")
    parser.add_argument("--rate", type=float, default=7e-4, help="learning rate of those")
    parser.add_argument("--workers", type=int, default=1, help="runs beside each other")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    given = parser.parse_args()
    jobs = [(row, seed) for seed in given.seeds for row in ROWS]
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        futures = {
            job: pool.submit(learn, *job, given.steps, given.rate, given.threads) for job in jobs
        }
        outcomes = {}
        for (row, seed), future in futures.items():
            outcomes[row, seed] = future.result()
            print(
                f"seed {seed}, {row.loss}, age {row.age}: {outcomes[row, seed]}",
                file=sys.stderr,
                flush=True,
            )
    print(table(given.seeds, outcomes))


if __name__ == "__main__":
    main()
