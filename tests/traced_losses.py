"""Losses of many shapes, as a program would write them: for tests of tracing, of the wire form and
of rebuilding."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tinkex.client.losses.loss_graphs import PerDatumLossFn
from tinkex.types.custom_losses import CustomLossInputRank


class Example(NamedTuple):
    """A loss, the ranks of its inputs, and the kind of values each input takes."""

    fn: PerDatumLossFn
    ranks: dict[str, CustomLossInputRank]
    kinds: dict[str, str] = {}  # noqa: RUF012


def neg_ll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs.clamp(min=-1e9, max=math.inf)[1:].to(torch.float64) * weights[1:]).sum()
    return loss, {"custom/neg_ll:sum": loss}


def ppo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    was_clipped = ((ratio - clipped).abs() > 0).to(logprobs.dtype).mean()
    return loss, {"custom/ppo/clipped:mean": was_clipped, "custom/ppo/ratio:mean": ratio.mean()}


def dpo_pairs(logprobs: Any, reference: Any, beta: Any) -> Any:
    margin = (logprobs - reference).view(-1, 2)
    chosen, rejected = margin[:, 0], margin[:, 1]
    logits = beta * (chosen - rejected)
    return -F.logsigmoid(logits).sum(), {"custom/accuracy:mean": (logits > 0).double().mean()}


def entropy_bonus(logprobs: Any, weights: Any) -> Any:
    entropy = -(logprobs.exp() * logprobs).sum()
    return -(weights * logprobs).sum() - 0.01 * entropy, {"custom/entropy:sum": entropy}


def focal(logprobs: Any, weights: Any) -> Any:
    loss = -(((1 - logprobs.exp()) ** 2.0) * logprobs * weights).sum()
    return loss, {}


def top_k(logprobs: Any, teacher: Any) -> Any:
    student = torch.log_softmax(logprobs, dim=-1)
    target = F.softmax(teacher, dim=-1)
    kl = (target * (target.clamp_min(1e-8).log() - student)).sum(dim=-1)
    return kl.sum(), {"custom/kl:mean": kl.mean(), "custom/kl_max:mean": kl.max()}


def best_of_candidates(logprobs: Any) -> Any:
    best = torch.topk(logprobs, 2, dim=1)
    gap = best.values[:, 0] - best[0][:, 1]
    return -gap.mean(), {"custom/gap:mean": gap.detach().mean()}


def masked(logprobs: Any, mask: Any) -> Any:
    keep = mask > 0.5
    kept = logprobs[keep]
    return -kept.sum() / (keep.sum() + 1), {"custom/kept:sum": keep.sum()}


def filled(logprobs: Any, mask: Any) -> Any:
    value = logprobs.masked_fill(~(mask > 0.5), 0.0)
    return -value.mean(), {}


def discounted(logprobs: Any, rewards: Any, gamma: Any) -> Any:
    steps = torch.arange(logprobs.shape[0], device=logprobs.device, dtype=logprobs.dtype)
    discount = gamma**steps
    returns = torch.flip(torch.cumsum(torch.flip(rewards * discount, [0]), dim=0), [0])
    baseline = returns - returns.mean()
    return -(logprobs * baseline).sum() / math.sqrt(logprobs.size(0)), {
        "custom/return:sum": returns[0]
    }


def huber_to_target(logprobs: Any, target: Any) -> Any:
    delta = logprobs - target
    small = 0.5 * delta**2
    large = torch.abs(delta) - 0.5
    return torch.where(delta.abs() < 1.0, small, large).sum(), {}


def smooth(logprobs: Any) -> Any:
    steps = logprobs[1:] - logprobs[:-1]
    return steps.pow(2).sum() + steps[..., None].squeeze(-1).std(unbiased=False), {}


def ranked(logprobs: Any, score: Any) -> Any:
    order = torch.argsort(score, descending=True)
    picked = torch.gather(logprobs, 0, order)
    tail = torch.logsumexp(torch.stack([picked, picked - 1.0], dim=0), dim=(0, 1))
    return tail - picked[0], {"custom/tail:mean": tail}


def pairwise(logprobs: Any, score: Any) -> Any:
    better = (score[:, None] > score[None, :]).to(logprobs.dtype)
    margin = logprobs.unsqueeze(1) - logprobs.unsqueeze(0)
    return (better * F.softplus(-margin)).sum() / (better.sum() + 1e-6), {}


def indexed(logprobs: Any, picks: Any) -> Any:
    chosen = torch.gather(logprobs, 1, picks.long().unsqueeze(-1)).squeeze(-1)
    return -chosen.sum(), {"custom/chosen:mean": chosen.mean()}


def weighted_groups(logprobs: Any, groups: Any) -> Any:
    hot = F.one_hot(groups.long(), num_classes=3).to(logprobs.dtype)
    sums = hot.transpose(0, 1) @ logprobs
    counts = hot.sum(0).clamp(min=1)
    return -(sums / counts).sum(), {"custom/groups:mean": (hot.sum(0) > 0).float().sum()}


def not_finite(logprobs: Any, weights: Any) -> Any:
    clean = torch.nan_to_num(weights, nan=math.nan, posinf=math.inf, neginf=-math.inf)
    top = torch.where(clean > 0, logprobs, -math.inf)
    return torch.logsumexp(top, -1), {"custom/top:mean": torch.amax(top, dim=0)}


def operators(logprobs: Any, weights: Any, scale: Any) -> Any:
    value = operator.sub(operator.mul(logprobs, weights), 2) / 3
    value = +value - (-value) * abs(value) + value % 2.0 + value.detach() // 4
    both = (weights > 0) & (weights < 2) | (weights == 5)
    return (value * both * scale).sum() * logprobs.ndim, {}


def made_here(logprobs: Any) -> Any:
    count = logprobs.shape[0]
    ramp = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    ones = (
        torch.ones(count, dtype=torch.float64)[:, None] * torch.full_like(logprobs, 2.0)[None, :1]
    )
    zeros = logprobs.new_zeros(count)
    tilted = torch.cat([zeros, ramp, ones.reshape(-1)]).view(3, count).sum(0)
    return (tilted * logprobs).sum(), {}


def normalised(logprobs: Any, weights: Any) -> Any:
    unit = logprobs / (torch.linalg.norm(logprobs) + 1e-6)
    kl = F.kl_div(F.log_softmax(logprobs, dim=-1), torch.softmax(weights, -1), reduction="sum")
    close = F.mse_loss(unit, weights) + F.smooth_l1_loss(unit, weights, reduction="sum")
    return kl + close - torch.einsum("i,i->", unit, weights), {"custom/kl:mean": kl}


EXAMPLES: dict[str, Example] = {
    "neg_ll": Example(neg_ll, {"logprobs": 1, "weights": 1}),
    "ppo": Example(ppo, {"logprobs": 1, "old": 1, "advantages": 1}),
    "dpo_pairs": Example(dpo_pairs, {"logprobs": 1, "reference": 1, "beta": 0}),
    "entropy_bonus": Example(entropy_bonus, {"logprobs": 1, "weights": 1}),
    "focal": Example(focal, {"logprobs": 1, "weights": 1}),
    "top_k": Example(top_k, {"logprobs": 2, "teacher": 2}),
    "best_of_candidates": Example(best_of_candidates, {"logprobs": 2}),
    "masked": Example(masked, {"logprobs": 1, "mask": 1}, {"mask": "binary"}),
    "filled": Example(filled, {"logprobs": 1, "mask": 1}, {"mask": "binary"}),
    "discounted": Example(discounted, {"logprobs": 1, "rewards": 1, "gamma": 0}),
    "huber_to_target": Example(huber_to_target, {"logprobs": 1, "target": 1}),
    "smooth": Example(smooth, {"logprobs": 1}),
    "ranked": Example(ranked, {"logprobs": 1, "score": 1}),
    "pairwise": Example(pairwise, {"logprobs": 1, "score": 1}),
    "indexed": Example(indexed, {"logprobs": 2, "picks": 1}, {"picks": "index"}),
    "weighted_groups": Example(weighted_groups, {"logprobs": 1, "groups": 1}, {"groups": "index"}),
    "not_finite": Example(not_finite, {"logprobs": 1, "weights": 1}),
    "operators": Example(operators, {"logprobs": 1, "weights": 1, "scale": 0}),
    "made_here": Example(made_here, {"logprobs": 1}),
    "normalised": Example(normalised, {"logprobs": 1, "weights": 1}),
}


def values(example: Example, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Values for the inputs of a loss, in float64; `length` is even, and a token has three
    candidates."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, rank in example.ranks.items():
        shape = [(), (length,), (length, 3)][rank]
        kind = example.kinds.get(name)
        if kind in ("binary", "index"):
            made[name] = torch.randint(0, 2 if kind == "binary" else 3, shape, generator=random)
        else:
            made[name] = torch.rand(shape, generator=random, dtype=torch.float64) + 0.05
        if name == "logprobs":
            made[name] = torch.log(made[name] / 1.1)
    return made
