"""Supervised fine-tuning with an evaluation split: a small model learns two-digit addition from
right answers.

What it shows: the plain training loop (`forward_backward`, `optim_step`), an evaluation that trains
nothing (`forward`), and keeping the checkpoint with the best evaluation loss instead of the last
one.

The bundled model can add when it is asked in words, but in the notation `37+45=` it has only seen
sums without a carry. A hash splits all pairs: those of the evaluation half occur in no training
text, so to get them right is to add, not to remember.
"""

from __future__ import annotations

import random

from rich.table import Table
from setting import (
    BASE_MODEL,
    accuracy,
    answers,
    conclude,
    connect,
    console,
    draw,
    example,
    problems,
)

from tinkex.models import addition
from tinkex.types import AdamParams

STEPS = 30
BATCH = 64
LEARNING_RATE = 1e-3
EVALUATE_EVERY = 3
STATED = 0.85
SEED = 0


def main() -> None:
    """Train, evaluate on the way, keep the best, and test it."""
    chosen = random.Random(SEED)
    train, held_out = problems(held_out=300, seed=SEED)
    # Two splits of what is held out: one to pick the checkpoint by, and one that nothing was picked
    # by.
    validation, test = held_out[:100], held_out[100:]

    with connect() as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=32, seed=SEED).result()
        tokenizer = client.get_tokenizer()
        before = accuracy(service.create_sampling_client(base_model=BASE_MODEL).result(), test)
        console.print(f"{BASE_MODEL} before: {before:.1%} of {len(test)} test problems right\n")

        unseen = [
            example(tokenizer, addition.prompt(a, b), addition.answer(a, b)) for a, b in validation
        ]
        training_losses: list[float] = []
        validation_losses: list[float] = []
        best_loss, best_path = float("inf"), ""
        for step in range(1, STEPS + 1):
            batch = [
                example(tokenizer, addition.prompt(a, b), addition.answer(a, b))
                for a, b in chosen.sample(train, BATCH)
            ]
            # Both calls are sent before either is waited for: the server never waits for the
            # network in between.
            passed = client.forward_backward(batch, "cross_entropy")
            stepped = client.optim_step(
                AdamParams(learning_rate=LEARNING_RATE * (1 - (step - 1) / STEPS))
            )
            training_losses.append(passed.result().metrics["loss:sum"] / BATCH)
            stepped.result()

            if step % EVALUATE_EVERY == 0:
                # `forward` gives the same loss without a gradient: what is evaluated on is never
                # trained on.
                loss = client.forward(unseen, "cross_entropy").result().metrics["loss:sum"] / len(
                    unseen
                )
                validation_losses.append(loss)
                note = ""
                if loss < best_loss:
                    best_loss, note = loss, "  best so far, saved"
                    best_path = client.save_weights_for_sampler(f"best-at-{step}").result().path
                console.print(
                    f"step {step:2}  training loss {training_losses[-1]:.3f}  validation loss "
                    f"{loss:.3f}{note}"
                )

        draw(
            "loss per problem",
            {"training loss per problem": training_losses, "validation loss": validation_losses},
        )
        best = service.create_sampling_client(model_path=best_path).result()
        after = accuracy(best, test)

        table = Table(title="test problems, answered by the best checkpoint", title_justify="left")
        for column in ("problem", "answer", "truth"):
            table.add_column(column, justify="right")
        shown = test[:6]
        for (a, b), text in zip(
            shown, answers(best, [addition.prompt(a, b) for a, b in shown]), strict=True
        ):
            table.add_row(f"{a} + {b}", text, str(a + b))
        console.print(table)

    conclude(
        f"accuracy on problems never trained on rises from under 40% to at least {STATED:.0%}",
        f"from {before:.1%} to {after:.1%}",
        before < 0.4 and after >= STATED,
    )


if __name__ == "__main__":
    main()
