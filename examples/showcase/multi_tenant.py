"""Four tenants of one server: four adapters on one base model, trained and sampled at the same
time.

What it shows: each `create_lora_training_client` is a run of its own, with its own weights,
optimizer and queue; the base model is there once. Here four threads train four habits on the very
same prompts (`37+45=`), so the only thing that tells them apart is whose adapter answers. A table
then gives every adapter's score at everybody's task.

It also measures: one after another against all at once. On a CPU, which one tenant can keep busy,
that gains little in training and somewhat more for questions asked one at a time: those of all
tenants are drawn in one batch, whosever adapter it takes. The times depend on the machine; the
result does not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rich.table import Table
from setting import BASE_MODEL, Problem, answers, conclude, connect, console, example, problems

import tinkex
from tinkex.models import addition
from tinkex.types import AdamParams

STEPS = 18
QUESTIONS = 16
BATCH = 48
LEARNING_RATE = 2e-3
STATED = 0.7
SEED = 0

TENANTS: dict[str, Callable[[int, int], str]] = {
    "adds": lambda a, b: f"{a + b}",
    "in words": lambda a, b: f"The answer is {a + b}.",
    "in apples": lambda a, b: f"{a + b} apples",
    "politely": lambda a, b: f"{a + b}. Thank you!",
}


def train(client: tinkex.TrainingClient, habit: Callable[[int, int], str], seed: int) -> int:
    """An ordinary training loop; it knows nothing of the other tenants. Returns how many tokens it
    trained on.
    """
    tokenizer = client.get_tokenizer()
    chosen, pairs, tokens = random.Random(seed), addition.training_problems(), 0
    for step in range(STEPS):
        batch = [
            example(tokenizer, addition.prompt(a, b), habit(a, b) + addition.STOP)
            for a, b in chosen.sample(pairs, BATCH)
        ]
        client.forward_backward(batch, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=LEARNING_RATE * (1 - step / STEPS))).result()
        tokens += sum(datum.model_input.length for datum in batch)
    return tokens


def chat(sampler: tinkex.SamplingClient, prompts: list[str]) -> list[str]:
    """Answers to questions that are asked one at a time."""
    return [answers(sampler, [prompt], max_tokens=12)[0] for prompt in prompts]


def score(texts: list[str], habit: Callable[[int, int], str], tested: list[Problem]) -> float:
    """How many answers are what a habit asks for."""
    return sum(
        text.strip() == habit(a, b) for text, (a, b) in zip(texts, tested, strict=True)
    ) / len(tested)


def main() -> None:
    """Train alone and together, sample alone and together, and see who learned what."""
    _, held_out = problems(held_out=64, seed=SEED)
    prompts = [addition.prompt(a, b) for a, b in held_out]

    with connect() as service, ThreadPoolExecutor(len(TENANTS)) as threads:
        # One after another, for comparison: a quarter of the work each time, nobody else on the
        # server.
        first = [
            service.create_lora_training_client(BASE_MODEL, rank=16, seed=SEED).result()
            for _ in TENANTS
        ]
        began = time.perf_counter()
        tokens = sum(
            train(client, habit, SEED)
            for client, habit in zip(first, TENANTS.values(), strict=True)
        )
        alone = time.perf_counter() - began

        together_clients = [
            service.create_lora_training_client(BASE_MODEL, rank=16, seed=SEED).result()
            for _ in TENANTS
        ]
        began = time.perf_counter()
        list(threads.map(train, together_clients, TENANTS.values(), [SEED] * len(TENANTS)))
        together = time.perf_counter() - began

        samplers = [
            client.save_weights_and_get_sampling_client().result() for client in together_clients
        ]
        written = [answers(sampler, prompts, max_tokens=12) for sampler in samplers]
        # Now everybody asks one question at a time, as people do, and waits for each answer.
        began = time.perf_counter()
        one_by_one = [chat(sampler, prompts[:QUESTIONS]) for sampler in samplers]
        asked_alone = time.perf_counter() - began
        began = time.perf_counter()
        at_once = list(threads.map(chat, samplers, [prompts[:QUESTIONS]] * len(samplers)))
        asked_together = time.perf_counter() - began

    times = Table(title=f"{len(TENANTS)} tenants of one server", title_justify="left")
    for column in ("", "one after another", "all at once", "gain"):
        times.add_column(column, justify="right" if column else "left")
    times.add_row(
        "training",
        f"{tokens / alone:,.0f} tokens/s",
        f"{tokens / together:,.0f} tokens/s",
        f"{alone / together:.2f}x",
    )
    count = len(samplers) * QUESTIONS
    times.add_row(
        "one question at a time",
        f"{count / asked_alone:,.0f} answers/s",
        f"{count / asked_together:,.0f} answers/s",
        f"{asked_alone / asked_together:.2f}x",
    )
    console.print(times)

    grid = Table(
        title=f"\n{len(prompts)} held-out prompts: whose adapter (row) does whose task (column)",
        title_justify="left",
    )
    grid.add_column("adapter")
    for name in TENANTS:
        grid.add_column(name, justify="right")
    grid.add_column(f"says to {prompts[0]}")
    scores = [[score(texts, habit, held_out) for habit in TENANTS.values()] for texts in written]
    for i, (name, row) in enumerate(zip(TENANTS, scores, strict=True)):
        cells = [
            f"[bold green]{value:.0%}[/]" if i == j else f"{value:.0%}"
            for j, value in enumerate(row)
        ]
        grid.add_row(name, *cells, written[i][0])
    console.print(grid)

    own = [scores[i][i] for i in range(len(TENANTS))]
    others = [value for i, row in enumerate(scores) for j, value in enumerate(row) if i != j]
    same = sum(
        x == y
        for old, new in zip(one_by_one, at_once, strict=True)
        for x, y in zip(old, new, strict=True)
    )
    conclude(
        f"each adapter does its own task in at least {STATED:.0%} of the cases and others' in at "
        "most 10%, "
        "and answers the same whether others are served or not",
        f"own {min(own):.0%} to {max(own):.0%}, others' at most {max(others):.0%}, {same} of "
        f"{count} answers the same",
        min(own) >= STATED and max(others) <= 0.1 and same == count,
    )


if __name__ == "__main__":
    main()
