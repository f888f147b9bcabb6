"""Distillation: a small adapter learns from the likeliest tokens of a better one, without a single
right answer.

What it shows: asking a sampler for the k likeliest tokens at each position
(`topk_sample_logprobs`), and training on several targets at a position: `target_tokens` and
`weights` of shape [N, K] make `cross_entropy` one against the teacher's distribution. A
distribution tells more than the one token that was drawn from it.

The teacher, of rank 32, is trained on right answers first. The student, of rank 4, sees questions
and the teacher only.
"""

from __future__ import annotations

import random

import numpy as np
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

import tinkex
from tinkex.models import addition
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

TEACHER_STEPS = 30
STUDENT_STEPS = 36
BATCH = 64
QUESTIONS = 576
K = 8
SEED = 0
STATED = 0.75


def taught_by(teacher: tinkex.SamplingClient, questions: list[str]) -> tuple[list[Datum], float]:
    """The teacher's answers as data, and the entropy of its distributions: a loss below it cannot
    be.
    """
    tokenizer = teacher.get_tokenizer()
    params = SamplingParams(
        max_tokens=addition.MAX_ANSWER_TOKENS, temperature=0.0, stop=addition.STOP
    )
    prompts = [tokenizer.encode(text) for text in questions]
    futures = [
        teacher.sample(ModelInput.from_ints(p), 1, params, topk_sample_logprobs=K) for p in prompts
    ]
    data, entropy, count = [], 0.0, 0
    for asked, future in zip(prompts, futures, strict=True):
        sample = future.result().sequences[0]
        likeliest = sample.topk_logprobs_np
        assert likeliest is not None
        shares = np.exp(likeliest.logprobs)
        # what the k likeliest leave over is shared out among them
        shares /= shares.sum(axis=-1, keepdims=True)
        entropy -= float((shares * np.log(np.maximum(shares, 1e-12))).sum())
        count += sample.length
        tokens = [*asked, *sample.tokens]
        # Row i says what should follow token i: nothing within the question, the teacher's view
        # within the answer.
        targets = np.zeros((len(tokens) - 1, K), dtype=np.int64)
        weights = np.zeros((len(tokens) - 1, K), dtype=np.float32)
        targets[len(asked) - 1 :] = likeliest.token_ids
        weights[len(asked) - 1 :] = shares
        data.append(
            Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets, "weights": weights})
        )
    return data, entropy / count


def main() -> None:
    """Train a teacher, let it answer questions, and train a student on what it thought of every
    token.
    """
    chosen = random.Random(SEED)
    train, held_out = problems(held_out=200, seed=SEED)

    with connect() as service:
        base = service.create_sampling_client(base_model=BASE_MODEL).result()
        before = accuracy(base, held_out)

        teaching = service.create_lora_training_client(BASE_MODEL, rank=32, seed=SEED).result()
        tokenizer = teaching.get_tokenizer()
        for step in range(TEACHER_STEPS):
            batch = [
                example(tokenizer, addition.prompt(*p), addition.answer(*p))
                for p in chosen.sample(train, BATCH)
            ]
            teaching.forward_backward(batch, "cross_entropy")
            teaching.optim_step(
                AdamParams(learning_rate=1e-3 * (1 - step / TEACHER_STEPS))
            ).result()
        # A snapshot: the student's teacher stays as it is, whatever becomes of the run behind it.
        snapshot = teaching.save_weights_for_sampler("teacher").result().path
        teacher = service.create_sampling_client(model_path=snapshot).result()
        of_teacher = accuracy(teacher, held_out)
        console.print(
            f"{BASE_MODEL}: {before:.1%}, teacher of rank 32: {of_teacher:.1%} of {len(held_out)} "
            "right"
        )

        data, entropy = taught_by(
            teacher, [addition.prompt(a, b) for a, b in chosen.sample(train, QUESTIONS)]
        )
        console.print(
            f"{len(data)} questions answered by the teacher, {K} likeliest tokens at each "
            "position\n"
        )

        student = service.create_lora_training_client(BASE_MODEL, rank=4, seed=SEED).result()
        divergences: list[float] = []
        for step in range(1, STUDENT_STEPS + 1):
            batch = chosen.sample(data, BATCH)
            passed = student.forward_backward(batch, "cross_entropy")
            student.optim_step(
                AdamParams(learning_rate=2e-3 * (1 - (step - 1) / STUDENT_STEPS))
            ).result()
            counted = sum(
                float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch
            )
            divergences.append(passed.result().metrics["loss:sum"] / counted - entropy)
            if step % 6 == 0:
                console.print(
                    f"step {step:2}  divergence from the teacher {divergences[-1]:.3f} nats per "
                    "token"
                )
        draw("distillation", {"divergence from the teacher, nats per token": divergences})

        pupil = student.save_weights_and_get_sampling_client().result()
        of_student = accuracy(pupil, held_out)
        asked = [addition.prompt(a, b) for a, b in held_out]
        agreeing = np.mean(
            [x == y for x, y in zip(answers(pupil, asked), answers(teacher, asked), strict=True)]
        )

    table = Table(title="held-out problems", title_justify="left")
    for column in ("model", "rank", "learned from", "right"):
        table.add_column(column)
    table.add_row("base", "-", "-", f"{before:.1%}")
    table.add_row("teacher", "32", "right answers", f"{of_teacher:.1%}")
    table.add_row("student", "4", f"the teacher's {K} likeliest tokens", f"{of_student:.1%}")
    console.print(table)
    conclude(
        f"the student gets from under 40% to at least {STATED:.0%}, and within 15 points of its "
        "teacher",
        f"from {before:.1%} to {of_student:.1%}, teacher {of_teacher:.1%}, same answer in "
        f"{agreeing:.1%}",
        before < 0.4 and of_student >= STATED and of_teacher - of_student <= 0.15,
    )


if __name__ == "__main__":
    main()
