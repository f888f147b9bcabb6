"""Group-relative reinforcement learning: addition from rewards alone.

What it shows: sampling from the weights being trained (`save_weights_and_get_sampling_client`), a
reward that a program can check, and the `ppo` loss on the advantages of GRPO: several answers to
each problem, each compared with the mean of its own group. Nobody shows the model a right answer;
it tries, and tries more of what worked.
"""

from __future__ import annotations

import random

import numpy as np
from setting import BASE_MODEL, Problem, accuracy, ask, conclude, connect, console, draw, problems

from tinkex.models import addition
from tinkex.types import AdamParams, Datum, ModelInput, SampledSequence

STEPS = 24
PROBLEMS = 24
GROUP = 16
LEARNING_RATE = 7e-4
STATED = 0.7
SEED = 0


def experience(asked: list[int], sample: SampledSequence, advantage: float) -> Datum:
    """A sampled answer as data: where it was drawn, how likely each token was then, and how good it
    turned out.
    """
    tokens = np.array([*asked, *sample.tokens])
    logprobs, advantages = np.zeros((2, tokens.size - 1), dtype=np.float32)
    # The prompt was given, not chosen: its advantage stays zero, and so does its gradient.
    logprobs[len(asked) - 1 :] = sample.logprobs
    advantages[len(asked) - 1 :] = advantage
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def main() -> None:
    """Sample, reward, compare within the group, step; over and over."""
    chosen = random.Random(SEED)
    train, held_out = problems(held_out=200, seed=SEED)

    with connect() as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=32, seed=SEED).result()
        tokenizer = client.get_tokenizer()
        before = accuracy(service.create_sampling_client(base_model=BASE_MODEL).result(), held_out)
        console.print(
            f"{BASE_MODEL} before: {before:.1%} of {len(held_out)} held-out problems right\n"
        )

        rewards: list[float] = []
        told: list[float] = []
        for step in range(1, STEPS + 1):
            batch: list[Problem] = chosen.sample(train, PROBLEMS)
            prompts = [addition.prompt(a, b) for a, b in batch]
            sampler = client.save_weights_and_get_sampling_client().result()
            groups = ask(
                sampler,
                prompts,
                samples=GROUP,
                temperature=1.0,
                max_tokens=addition.MAX_ANSWER_TOKENS,
                seed=step,
            )

            data: list[Datum] = []
            scores = []
            for (a, b), prompt, group in zip(batch, prompts, groups, strict=True):
                score = np.array(
                    [addition.reward(tokenizer.decode(sample.tokens), a, b) for sample in group]
                )
                scores.append(score.mean())
                if score.std() == 0:
                    continue  # all right or all wrong: nothing to tell them apart by
                advantages = (score - score.mean()) / score.std()
                asked = tokenizer.encode(prompt)
                data += [experience(asked, *pair) for pair in zip(group, advantages, strict=True)]
            rewards.append(float(np.mean(scores)))
            told.append(len(data) / (PROBLEMS * GROUP))

            if data:
                passed = client.forward_backward(
                    data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
                )
                client.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()
                passed.result()
            console.print(
                f"step {step:2}  mean reward {rewards[-1]:.2f}  groups that disagree {told[-1]:.0%}"
            )

        draw("mean reward", {"mean reward": rewards, "share of groups that disagree": told})
        after = accuracy(client.save_weights_and_get_sampling_client().result(), held_out)

    conclude(
        f"accuracy on held-out problems rises from under 40% to at least {STATED:.0%} without one "
        "right answer shown",
        f"from {before:.1%} to {after:.1%}",
        before < 0.4 and after >= STATED,
    )


if __name__ == "__main__":
    main()
