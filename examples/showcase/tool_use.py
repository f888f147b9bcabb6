"""Multi-turn reinforcement learning with a tool: the model learns to read before it answers.

What it shows: an episode of several turns, in which the program answers the model's calls and the
model goes on from there; one reward at the very end; and data in which only the tokens that the
model chose have an advantage. What the tool wrote is context, like the question.

The question is about a story that the model has not seen, so an answer from the top of its head is
a guess. It may ask for the story first. A short warm-up on demonstrations teaches it how to ask,
and that half of the time nobody does. Which habit pays, the model has to find out by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from setting import BASE_MODEL, answers, conclude, connect, console, draw

import tinkex
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

WARM_UP_STEPS = 12
STEPS = 10
QUESTIONS = 8
GROUP = 8
TURNS = 3
STATED = 0.85
SEED = 0

CALL = "Read the story."
LOOKS = ["bright", "tiny", "silver", "blue", "red", "green"]
NAMES = ["Peter", "Jack", "Leo", "Ben", "Finn", "Paul", "Karl", "Felix", "Milo", "Noah"]
TOYS = ["kite", "lantern", "drum", "ball", "boat", "bell", "basket", "teapot"]


@dataclass(frozen=True)
class Story:
    """What happened; the model has to find out."""

    name: str
    look: str
    toy: str

    @property
    def question(self) -> str:
        """What an episode begins with."""
        return f"Question: What did {self.name} lose?\n"

    @property
    def text(self) -> str:
        """What the tool has to tell, and the question once more."""
        return (
            f"One sunny day, {self.name} was at the hill. He had a {self.look} {self.toy} with "
            "him. "
            f"While he was playing, the {self.toy} got lost.\n{self.question}"
        )

    @property
    def answer(self) -> str:
        """The right answer."""
        return f"Answer: {self.name} lost a {self.look} {self.toy}.\n"


@dataclass
class Episode:
    """A conversation as tokens, with what is needed to learn from it."""

    story: Story
    text: str
    tokens: list[int]
    logprobs: list[float]
    chosen: list[bool]
    """Which tokens the model chose, as against the question and the tool's replies."""
    calls: int = 0
    reward: float = 0.0
    over: bool = False

    def append(self, text: str, tokens: list[int], logprobs: list[float] | None) -> None:
        """Go on with what the model chose or, without log-probabilities, with what it was told."""
        self.text += text
        self.tokens = [*self.tokens, *tokens]
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.chosen += [logprobs is not None] * len(tokens)


def library(line: str, story: Story) -> str | None:
    """The tool: what it replies to a line of the model, None if the line does not call it."""
    return story.text if line == CALL else None


def play(
    sampler: tinkex.SamplingClient, stories: list[Story], group: int, seed: int
) -> list[Episode]:
    """A group of episodes for each question, all of them moved on by a turn at a time: a turn is
    one batch.
    """
    tokenizer = sampler.get_tokenizer()
    episodes = [Episode(story, "", [], [], []) for story in stories for _ in range(group)]
    for episode in episodes:
        episode.append(episode.story.question, tokenizer.encode(episode.story.question), None)
    for turn in range(TURNS):
        going = [episode for episode in episodes if not episode.over]
        futures = []
        for number, episode in enumerate(going):
            params = SamplingParams(
                max_tokens=20, stop="\n", seed=100_000 * seed + 10_000 * turn + number
            )
            futures.append(sampler.sample(ModelInput.from_ints(episode.tokens), 1, params))
        for episode, future in zip(going, futures, strict=True):
            sample = future.result().sequences[0]
            line = tokenizer.decode(sample.tokens, skip_special_tokens=True)
            episode.append(line, sample.tokens, sample.logprobs)
            reply = library(line.strip(), episode.story)
            if reply is not None:
                episode.append(reply, tokenizer.encode(reply, add_special_tokens=False), None)
                episode.calls += 1
            else:  # not a call, so this is the answer, or nonsense
                episode.over = True
                episode.reward = float(line == episode.story.answer)
    return episodes


def experience(episode: Episode, advantage: float) -> Datum:
    """A whole episode as one datum; the advantage stands at the model's own tokens and nowhere
    else.
    """
    tokens = np.array(episode.tokens)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": np.array(episode.logprobs[1:], dtype=np.float32),
        "advantages": np.where(episode.chosen[1:], advantage, 0.0).astype(np.float32),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def demonstration(tokenizer: Any, pieces: list[tuple[str, bool]]) -> Datum:
    """An episode to imitate, piece by piece; only what the model shall write itself is learned."""
    tokens: list[int] = []
    weights: list[float] = []
    for text, own in pieces:
        piece = tokenizer.encode(text, add_special_tokens=not tokens)
        tokens += piece
        weights += [float(own)] * len(piece)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "weights": np.array(weights[1:], dtype=np.float32),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def measured(episodes: list[Episode]) -> tuple[float, float]:
    """How many episodes ask for the story, and how many end with the right answer."""
    return float(np.mean([e.calls > 0 for e in episodes])), float(
        np.mean([e.reward for e in episodes])
    )


def main() -> None:
    """Warm up, then let rewards decide between guessing and reading."""
    chosen = random.Random(SEED)
    stories = [Story(name, look, toy) for name in NAMES for look in LOOKS for toy in TOYS]
    chosen.shuffle(stories)
    train, held_out = stories[96:], stories[:96]

    with connect() as service:
        base = service.create_sampling_client(base_model=BASE_MODEL).result()
        console.print(
            f"{BASE_MODEL} guesses: {answers(base, [train[0].question + 'Answer:'])[0].strip()}"
        )

        client = service.create_lora_training_client(BASE_MODEL, rank=32, seed=SEED).result()
        tokenizer = client.get_tokenizer()
        for _ in range(WARM_UP_STEPS):
            batch = []
            for number, story in enumerate(chosen.sample(train, 32)):
                guess = Story(story.name, chosen.choice(LOOKS), chosen.choice(TOYS))
                reading = [(f"{CALL}\n", True), (story.text, False), (story.answer, True)]
                pieces = [
                    (story.question, False),
                    *([(guess.answer, True)] if number % 2 else reading),
                ]
                batch.append(demonstration(tokenizer, pieces))
            client.forward_backward(batch, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=2e-3)).result()

        reads_before, right_before = measured(
            play(client.save_weights_and_get_sampling_client().result(), held_out, 1, SEED)
        )
        console.print(
            f"after the warm-up: {reads_before:.0%} read the story, {right_before:.0%} are right\n"
        )

        rewards: list[float] = []
        reads: list[float] = []
        for step in range(1, STEPS + 1):
            sampler = client.save_weights_and_get_sampling_client().result()
            episodes = play(sampler, chosen.sample(train, QUESTIONS), GROUP, seed=step)
            data: list[Datum] = []
            for first in range(0, len(episodes), GROUP):
                group = episodes[first : first + GROUP]
                score = np.array([episode.reward for episode in group])
                if score.std() > 0:  # a group that agrees has nothing to teach
                    advantages = (score - score.mean()) / score.std()
                    data += [
                        experience(episode, a) for episode, a in zip(group, advantages, strict=True)
                    ]
            if data:
                client.forward_backward(data, "importance_sampling")
                client.optim_step(AdamParams(learning_rate=5e-4)).result()
            share, reward = measured(episodes)
            reads.append(share)
            rewards.append(reward)
            console.print(
                f"step {step:2}  mean reward {reward:.2f}  episodes that read {share:.0%}"
            )

        draw("reading pays", {"mean reward": rewards, "episodes that read": reads})
        episodes = play(client.save_weights_and_get_sampling_client().result(), held_out, 1, SEED)
        reads_after, right_after = measured(episodes)
        console.print("\nan episode about a story that was not trained on:\n")
        console.print(
            next((episode.text for episode in episodes if episode.calls), "(none reads)"),
            soft_wrap=True,
        )

    conclude(
        f"right answers about other stories rise by 20 points or more, to at least {STATED:.0%}, "
        "by reading them",
        f"right from {right_before:.0%} to {right_after:.0%}, read from {reads_before:.0%} to "
        f"{reads_after:.0%}",
        right_after >= STATED and right_after - right_before >= 0.2 and reads_after >= STATED,
    )


if __name__ == "__main__":
    main()
