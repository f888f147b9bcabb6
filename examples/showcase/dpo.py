"""Direct preference optimization: a loss of your own, written in torch, on pairs of answers.

What it shows: `forward_backward_custom`. The server computes log-probabilities, your function turns
them into a loss on this machine, and the server trains on its gradient. The reference model of DPO
costs nothing: a fresh adapter changes nothing, so one `forward` before the first step gives its
log-probabilities.

Asked for a sum in words, the bundled model answers in several ways: "37 plus 48 is 85.", "37 and 48
make 85." and more. Our annotator likes one of them. The model learns the taste from pairs of its
own answers, and must still add right.
"""

from __future__ import annotations

import random
import re

import torch
from setting import BASE_MODEL, Problem, ask, conclude, connect, console, draw, example, problems

import tinkex
from tinkex.types import AdamParams, Datum

STEPS = 16
PAIRS = 16
BETA = 0.2
LEARNING_RATE = 3e-4
STATED = 0.9
SEED = 0
PREFERRED = re.compile(r"The sum of (\d+) and (\d+) is (\d+)\.")


def prompt(a: int, b: int) -> str:
    """A question in the model's chat format."""
    return f"<|user|>What is {a} plus {b}?<|end|><|assistant|>"


def written(
    sampler: tinkex.SamplingClient, asked: list[Problem], samples: int, seed: int
) -> list[list[str]]:
    """Answers as text, several for each problem."""
    tokenizer = sampler.get_tokenizer()
    prompts = [prompt(a, b) for a, b in asked]
    groups = ask(
        sampler, prompts, samples=samples, temperature=1.0, max_tokens=24, stop="<|end|>", seed=seed
    )
    return [
        [tokenizer.decode(s.tokens, skip_special_tokens=True).strip() for s in group]
        for group in groups
    ]


def judged(sampler: tinkex.SamplingClient, asked: list[Problem]) -> tuple[float, float]:
    """How many answers have the wording that is liked, and how many end in the right sum, in
    whatever words.
    """
    texts = [group[0] for group in written(sampler, asked, samples=1, seed=99)]
    liked = sum(bool(PREFERRED.fullmatch(text)) for text in texts)
    right = sum(
        str(a + b) in re.findall(r"\d+", text)[-1:]
        for text, (a, b) in zip(texts, asked, strict=True)
    )
    return liked / len(asked), right / len(asked)


def main() -> None:
    """Collect pairs from the model itself, train on them, and look at taste and ability."""
    chosen = random.Random(SEED)
    train, held_out = problems(held_out=128, seed=SEED)

    with connect() as service:
        base = service.create_sampling_client(base_model=BASE_MODEL).result()
        liked_before, right_before = judged(base, held_out)
        console.print(
            f"before: {liked_before:.0%} of the answers are worded as liked, {right_before:.0%} "
            "are right\n"
        )

        client = service.create_lora_training_client(BASE_MODEL, rank=16, seed=SEED).result()
        tokenizer = client.get_tokenizer()
        # Pairs: of several answers to the same question, one that the annotator likes and one that
        # it does not.
        asked = chosen.sample(train, 160)
        pairs: list[tuple[Datum, Datum]] = []
        for (a, b), texts in zip(asked, written(base, asked, samples=8, seed=SEED), strict=True):
            good = [text for text in texts if PREFERRED.fullmatch(text)]
            bad = [text for text in texts if not PREFERRED.fullmatch(text)]
            if good and bad:
                question = prompt(a, b)
                pairs.append(
                    (
                        example(tokenizer, question, good[0] + "<|end|>"),
                        example(tokenizer, question, bad[0] + "<|end|>"),
                    )
                )
        console.print(f"{len(pairs)} pairs of {len(asked)} questions\n")

        flat = [datum for pair in pairs for datum in pair]
        reference = client.forward(flat, "cross_entropy").result().loss_fn_outputs
        # What the untrained model gives each answer: one sum per answer, over the answer's tokens
        # only.
        weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in flat]
        sums = [
            float(out["logprobs"].to_numpy() @ weight)
            for out, weight in zip(reference, weights, strict=True)
        ]
        of_reference = {id(datum): value for datum, value in zip(flat, sums, strict=True)}

        def dpo(
            data: list[Datum], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            """Good and bad answers in turn; the loss falls as the good ones gain on the reference
            more than the bad.
            """
            gains = torch.stack(
                [
                    logprob @ datum.loss_fn_inputs["weights"].to_torch() - of_reference[id(datum)]
                    for datum, logprob in zip(data, logprobs, strict=True)
                ]
            )
            margins = BETA * (gains[0::2] - gains[1::2])
            loss = -torch.nn.functional.logsigmoid(margins).sum()
            seen = margins.detach()
            return loss, {"margin": float(seen.mean()), "ranked": float((seen > 0).float().mean())}

        losses: list[float] = []
        margins: list[float] = []
        for step in range(1, STEPS + 1):
            batch = [datum for pair in chosen.sample(pairs, PAIRS) for datum in pair]
            passed = client.forward_backward_custom(batch, dpo)
            client.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()
            metrics = passed.result().metrics
            losses.append(metrics["loss:sum"] / PAIRS)
            margins.append(metrics["margin"])
            if step % 2 == 0:
                ranked = f"{metrics['ranked']:.0%} of the pairs ranked right"
                console.print(
                    f"step {step:2}  loss {losses[-1]:.3f}  margin {margins[-1]:.2f}  {ranked}"
                )

        draw("preference training", {"loss per pair": losses, "margin": margins})
        liked, right = judged(client.save_weights_and_get_sampling_client().result(), held_out)

    conclude(
        f"answers worded as liked rise from under 60% to at least {STATED:.0%}, and at least "
        f"{STATED:.0%} are right",
        f"worded as liked from {liked_before:.1%} to {liked:.1%}, right from {right_before:.1%} to "
        f"{right:.1%}",
        liked_before < 0.6 and liked >= STATED and right >= STATED,
    )


if __name__ == "__main__":
    main()
