"""A sweep: learning rate x rank, nine runs at the same time over one service.

What it shows: the client in an event loop. Futures are awaitable, `asyncio.gather` runs the whole
grid, and one server holds all nine adapters over one copy of the base model. The checkpoints carry
rate and rank as metadata, so that they can be told apart by anybody who lists them later.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from rich.table import Table
from setting import BASE_MODEL, Problem, conclude, connect, console, example, problems

import tinkex
from tinkex.models import addition
from tinkex.types import AdamParams, ModelInput, SamplingParams

RATES = (2e-4, 2e-3, 2e-2)
RANKS = (2, 8, 32)
STEPS = 12
BATCH = 48
STATED = 0.6
SEED = 0


@dataclass(frozen=True)
class Outcome:
    """What one cell of the grid came to."""

    rate: float
    rank: int
    loss: float
    accuracy: float
    path: str


async def right(sampler: tinkex.SamplingClient, tested: list[Problem]) -> float:
    """The share of sums that the likeliest answer gets right."""
    tokenizer = await sampler.get_tokenizer_async()
    params = SamplingParams(
        max_tokens=addition.MAX_ANSWER_TOKENS, temperature=0, stop=addition.STOP
    )
    prompts = [ModelInput.from_ints(tokenizer.encode(addition.prompt(a, b))) for a, b in tested]
    found = await asyncio.gather(*(sampler.sample(prompt, 1, params) for prompt in prompts))
    texts = [tokenizer.decode(response.sequences[0].tokens) for response in found]
    return sum(
        addition.reward(text, a, b) for text, (a, b) in zip(texts, tested, strict=True)
    ) / len(tested)


async def run(
    service: tinkex.ServiceClient, rate: float, rank: int, tested: list[Problem]
) -> Outcome:
    """One run of the grid: a loop like any other. All runs see the same batches, so only rate and
    rank differ.
    """
    client = await service.create_lora_training_client(BASE_MODEL, rank=rank, seed=SEED)
    tokenizer = await client.get_tokenizer_async()
    chosen, train = random.Random(SEED), addition.training_problems()
    loss = 0.0
    for _ in range(STEPS):
        pairs = chosen.sample(train, BATCH)
        batch = [example(tokenizer, addition.prompt(a, b), addition.answer(a, b)) for a, b in pairs]
        passed = client.forward_backward(batch, "cross_entropy")
        stepped = client.optim_step(AdamParams(learning_rate=rate))
        loss = (await passed).metrics["loss:sum"] / BATCH
        await stepped
    saved = await client.save_weights_for_sampler(
        "sweep", user_metadata={"rate": f"{rate:g}", "rank": str(rank)}
    )
    accuracy = await right(await service.create_sampling_client(model_path=saved.path), tested)
    console.print(f"rate {rate:<7g} rank {rank:<3} loss {loss:6.3f}  accuracy {accuracy:.1%}")
    return Outcome(rate, rank, loss, accuracy, saved.path)


async def sweep(service: tinkex.ServiceClient, tested: list[Problem]) -> list[Outcome]:
    """The whole grid at once."""
    return await asyncio.gather(
        *(run(service, rate, rank, tested) for rate in RATES for rank in RANKS)
    )


def main() -> None:
    """Run the grid, show it as a table and name the best."""
    _, held_out = problems(held_out=100, seed=SEED)
    with connect() as service:
        outcomes = asyncio.run(sweep(service, held_out))

    best = max(outcomes, key=lambda outcome: outcome.accuracy)
    worst = min(outcomes, key=lambda outcome: outcome.accuracy)
    table = Table(
        title=f"\naccuracy on {len(held_out)} held-out problems after {STEPS} steps",
        title_justify="left",
    )
    table.add_column("learning rate", justify="right")
    for rank in RANKS:
        table.add_column(f"rank {rank}", justify="right")
    for rate in RATES:
        row = [outcome for outcome in outcomes if outcome.rate == rate]
        table.add_row(
            f"{rate:g}",
            *(
                f"[bold green]{o.accuracy:.0%}[/]" if o is best else f"{o.accuracy:.0%}"
                for o in row
            ),
        )
    console.print(table)
    console.print(
        f"best: rate {best.rate:g}, rank {best.rank}, to sample from: {best.path}", soft_wrap=True
    )
    conclude(
        f"the best of {len(outcomes)} runs reaches at least {STATED:.0%}, and 20 points more than "
        "the worst",
        f"best {best.accuracy:.1%}, worst {worst.accuracy:.1%}",
        best.accuracy >= STATED and best.accuracy - worst.accuracy >= 0.2,
    )


if __name__ == "__main__":
    main()
