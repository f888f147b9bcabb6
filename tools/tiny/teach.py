"""Rehearses how the bundled model is taught addition: a LoRA fine-tune on examples, then
reinforcement learning.

It shows, in plain PyTorch and apart from the package's own engine, that the stored model can be
taught within a small budget, and how accuracy on held-out problems moves over seeds.

Run ``PYTHONPATH=src python -m tools.tiny.teach --model src/tinkex/models/tiny --seeds 3``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tools.tiny import corpus, evaluate
from torch import nn

from tinkex.models import addition


@dataclass(frozen=True)
class Recipe:
    """Settings of the training of the model."""

    rank: int = 32
    steps: int = 10
    batch: int = 128
    learning_rate: float = 1e-3
    final_share: float = 1.0
    rl_steps: int = 30
    rl_prompts: int = 32
    rl_group: int = 8
    rl_learning_rate: float = 5e-4
    rl_temperature: float = 1.0


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank addition of scale 1."""

    def __init__(self, inner: nn.Linear, rank: int, generator: torch.Generator) -> None:
        """Wrap a layer; the second factor starts at zero, so the output is unchanged at first."""
        super().__init__()
        self.inner = inner
        bound = 1.0 / math.sqrt(inner.in_features)
        start = (torch.rand(rank, inner.in_features, generator=generator) * 2 - 1) * bound
        self.a = nn.Parameter(start.to(inner.weight.device))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank, device=inner.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output plus the low-rank addition."""
        changed: torch.Tensor = self.inner(x) + (x @ self.a.T) @ self.b.T
        return changed


def add_lora(model: nn.Module, rank: int, seed: int) -> list[nn.Parameter]:
    """Wrap every linear layer of the blocks and return the trained parameters."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    trained: list[nn.Parameter] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                layer = LoraLinear(child, rank, generator)
                setattr(parent, name, layer)
                trained += [layer.a, layer.b]
    return trained


class Classroom:
    """A model with LoRA layers, its optimizer, and the two ways to teach it."""

    def __init__(
        self, folder: Path, recipe: Recipe, seed: int, device: str, begin: bool = True
    ) -> None:
        """Load the stored model in float32 and prepare it for training."""
        self.recipe, self.device = recipe, device
        self.random = random.Random(seed)
        self.sampler = torch.Generator(device=device).manual_seed(seed)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.begin = [evaluate.token_id(self.tokenizer, corpus.BOS)] if begin else []
        self.stop = self.tokenizer.encode(addition.STOP, add_special_tokens=False).ids[0]
        self.model = evaluate.load(folder, device)
        self.parameters = add_lora(self.model, recipe.rank, seed)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.training, self.held_out = addition.training_problems(), addition.held_out_problems()

    def accuracy(self) -> float:
        """Return the greedy accuracy on all held-out problems."""
        return evaluate.addition_accuracy(
            self.model, self.tokenizer, self.held_out, self.device, self.begin
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _step(self, loss: torch.Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _logprobs(self, rows: list[list[int]], skip: int) -> torch.Tensor:
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits[:, skip - 1 :].float()
        chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, skip:, None]).squeeze(-1)
        mask = torch.tensor(
            [[j < len(row) for j in range(skip, width)] for row in rows], device=self.device
        )
        return chosen * mask

    def supervised(self, step: int) -> float:
        """Take one step on right answers; return the mean loss per problem."""
        recipe = self.recipe
        problems = self.random.sample(self.training, recipe.batch)
        rows = [
            self.begin + self._encode(addition.prompt(a, b)) + self._encode(addition.answer(a, b))
            for a, b in problems
        ]
        skip = len(self.begin) + len(self._encode(addition.prompt(10, 10)))
        loss = -self._logprobs(rows, skip).sum()
        left = 1.0 - step / recipe.steps
        share = recipe.final_share + (1.0 - recipe.final_share) * left
        self._step(loss, recipe.learning_rate * share)
        return float(loss.detach()) / len(rows)

    def reinforce(self) -> float:
        """Sample groups of answers, take one step of RL, and return the mean reward."""
        recipe = self.recipe
        problems = self.random.sample(self.training, recipe.rl_prompts)
        asked = [p for p in problems for _ in range(recipe.rl_group)]
        starts = [self.begin + self._encode(addition.prompt(a, b)) for a, b in asked]
        prompts = torch.tensor(starts, device=self.device)
        sampled = evaluate.generate(
            self.model, prompts, addition.MAX_ANSWER_TOKENS, recipe.rl_temperature, self.sampler
        ).tolist()
        answers = [row[: row.index(self.stop) + 1] if self.stop in row else row for row in sampled]
        rewards = torch.tensor(
            [
                addition.reward(self.tokenizer.decode(row), a, b)
                for row, (a, b) in zip(answers, asked, strict=True)
            ],
            device=self.device,
        )
        groups = rewards.view(-1, recipe.rl_group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        rows = [start + row for start, row in zip(starts, answers, strict=True)]
        logprobs = self._logprobs(rows, len(starts[0]))
        ratio = (logprobs - logprobs.detach()).exp() * (logprobs != 0)
        self._step(-(ratio * advantages[:, None]).sum(), recipe.rl_learning_rate)
        return float(rewards.mean())


def teach(
    folder: Path, recipe: Recipe, seed: int, device: str, begin: bool = True
) -> dict[str, Any]:
    """Teach a stored model and return the held-out accuracies and times of each phase."""
    room = Classroom(folder, recipe, seed, device, begin)
    result: dict[str, Any] = {"seed": seed, "base": room.accuracy()}
    began = time.perf_counter()
    losses = [room.supervised(step) for step in range(recipe.steps)]
    result["supervised_seconds"] = round(time.perf_counter() - began, 1)
    result["losses"] = [round(loss, 3) for loss in losses[:: max(1, len(losses) // 8)]]
    result["supervised"] = room.accuracy()
    began = time.perf_counter()
    rewards = [room.reinforce() for _ in range(recipe.rl_steps)]
    result["rl_seconds"] = round(time.perf_counter() - began, 1)
    result["rewards"] = [round(reward, 3) for reward in rewards]
    result["reinforced"] = room.accuracy()
    return result


def main() -> None:
    """Teach a stored model over several seeds and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("src/tinkex/models/tiny"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--log", type=Path, default=None, help="where to write the results for the card"
    )
    parser.add_argument("--no-begin", action="store_true", help="leave out the begin token")
    for name, value in asdict(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = parser.parse_args()
    recipe = Recipe(**{name: getattr(options, name) for name in asdict(Recipe())})
    print(json.dumps(asdict(recipe)))
    results = []
    for seed in range(1, options.seeds + 1):
        results.append(teach(options.model, recipe, seed, options.device, not options.no_begin))
        print(json.dumps(results[-1]), flush=True)
    if options.log is not None:
        options.log.write_text(
            json.dumps({"recipe": asdict(recipe), "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
