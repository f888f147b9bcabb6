"""Choose tokens: counted random numbers, and the token that a number picks from a row of logits.

The number that decides a token is a hash of the seed, the sample's index and the position, not the
next of a stream. Rows of different requests are chosen together; what a row gets depends on that
row.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.train.target_logprobs import log_softmax
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensors import Array

GREEDY_BELOW = 1e-30
"""Temperatures below this count as 0: the quotient would overflow float32."""
COLD_BELOW = 1e-3
"""Below this the largest logit is subtracted before dividing, to avoid overflow."""
UNSORTED = 0
SPAN = 256
"""Weights are summed by spans; only the span that is hit is searched."""


def uniforms(seeds: int | Sequence[int], samples: Array | int, positions: Array | int) -> Array:
    """Return one number in [0, 1) for each (seed, sample, position)."""
    each = [seeds] if isinstance(seeds, int) else seeds
    state = _mix(np.array([seed % 2**64 for seed in each], dtype=np.uint64))
    for counter in (samples, positions):
        state = _mix(state ^ _mix(np.atleast_1d(counter).astype(np.uint64) + np.uint64(1)))
    return (state >> np.uint64(12)) * 2.0**-52


def _mix(x: Array) -> Array:
    """Apply splitmix64's finaliser after its odd increment: each input bit reaches all outputs."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


def choose(
    logits_BV: Tensor, uniforms_B: Array, params_B: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Return a token for each row, and the log-probabilities `[B, V]`: scaled, not truncated."""
    temperatures = np.array([params.temperature for params in params_B])
    greedy = temperatures < GREEDY_BELOW
    logprobs_BV = log_softmax(_scaled(logits_BV, np.where(greedy, 1.0, temperatures)))
    if greedy.all():
        return logits_BV.argmax(-1), logprobs_BV
    probs_BV = logprobs_BV.exp()
    numbers_B1 = to_device(uniforms_B, logits_BV.device, torch.float64)[:, None]
    tokens_B = _invert(probs_BV, numbers_B1)
    for rows, top_k in _alike(params_B, greedy):
        rows_b = to_device(rows, logits_BV.device)
        if top_k is None:
            tokens_B[rows_b] = logits_BV[rows_b].argmax(-1)
        else:
            cut = [[params_B[row].min_p, params_B[row].top_p] for row in rows]
            min_p_b1, top_p_b1 = to_device(cut, logits_BV.device, torch.float64)[:, :, None].unbind(
                1
            )
            probs_bV, numbers_b1 = _likely(probs_BV[rows_b], min_p_b1), numbers_B1[rows_b]
            if top_k == UNSORTED:
                tokens_B[rows_b] = _invert(probs_bV, numbers_b1)
            else:
                tokens_B[rows_b] = _draw_truncated(probs_bV, numbers_b1, top_k, top_p_b1)
    return tokens_B, logprobs_BV


def _alike(params_B: Sequence[SamplingParams], greedy: Array) -> list[tuple[list[int], int | None]]:
    """Return the rows that are not simply drawn, by top_k: None is greedy, UNSORTED min_p alone."""
    kinds: dict[int | None, list[int]] = {}
    for row, params in enumerate(params_B):
        if greedy[row]:
            kinds.setdefault(None, []).append(row)
        elif params.top_k != -1 or params.top_p != 1:
            kinds.setdefault(params.top_k, []).append(row)
        elif params.min_p:
            kinds.setdefault(UNSORTED, []).append(row)
    return [(rows, top_k) for top_k, rows in kinds.items()]


def _likely(probs_BV: Tensor, min_p_B1: Tensor) -> Tensor:
    """Return probabilities, with 0 for those below this share of the largest."""
    least_B1 = (probs_BV.amax(-1, keepdim=True) * min_p_B1).to(probs_BV.dtype)
    return probs_BV.masked_fill(probs_BV < least_B1, 0)


def _scaled(logits_BV: Tensor, temperatures: Array) -> Tensor:
    """Return logits over temperatures.

    Subtracting 0 and dividing by 1 change no bit, so rows do not affect each other.
    """
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    column = to_device(temperatures, logits_BV.device, logits_BV.dtype)[:, None]
    if (temperatures < COLD_BELOW).any():
        logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True) * (column < COLD_BELOW)
    return logits_BV / column if (temperatures != 1).any() else logits_BV


def _invert(weights_BV: Tensor, numbers_B1: Tensor) -> Tensor:
    """Return the first index where the cumulated weight exceeds the number's share of the sum."""
    size = weights_BV.shape[1]
    if size <= SPAN:
        cumulated = weights_BV.cumsum(-1, dtype=torch.float64)
        return _first_above(weights_BV, cumulated, numbers_B1 * cumulated[:, -1:])[:, 0]
    whole_BV = F.pad(weights_BV, (0, -size % SPAN)) if size % SPAN else weights_BV
    spans_BNS = whole_BV.view(weights_BV.shape[0], -1, SPAN)
    sums_BN = spans_BNS.sum(-1)
    cumulated_BN = sums_BN.cumsum(-1, dtype=torch.float64)
    wanted_B1 = numbers_B1 * cumulated_BN[:, -1:]
    span_B1 = _first_above(sums_BN, cumulated_BN, wanted_B1)
    before_B1 = cumulated_BN.gather(1, span_B1) - sums_BN.gather(1, span_B1)
    inside_BS = spans_BNS.gather(1, span_B1[:, :, None].expand(-1, -1, SPAN))[:, 0]
    # rounding may make it negative, and a weight of 0 would be hit
    rest_B1 = (wanted_B1 - before_B1).clamp_min(0)
    at_B1 = _first_above(inside_BS, inside_BS.cumsum(-1, dtype=torch.float64), rest_B1)
    return (span_B1 * SPAN + at_B1)[:, 0]


def _first_above(weights_BN: Tensor, cumulated_BN: Tensor, wanted_B1: Tensor) -> Tensor:
    """Return the place where the cumulated weight first exceeds what is wanted.

    If rounding prevents that, it is the place of the largest weight.
    """
    at_B1 = torch.searchsorted(cumulated_BN, wanted_B1, right=True)
    largest_B1 = weights_BN.argmax(-1, keepdim=True)
    return torch.where(at_B1 < weights_BN.shape[1], at_B1, largest_B1)


def _draw_truncated(probs_BV: Tensor, numbers_B1: Tensor, top_k: int, top_p_B1: Tensor) -> Tensor:
    """Draw among the top_k likeliest, then among the fewest of those whose share reaches top_p."""
    if 0 < top_k < probs_BV.shape[-1]:
        values, order = probs_BV.topk(top_k, dim=-1)
    else:
        values, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1, dtype=torch.float64) - values
    values = values.masked_fill(
        before >= top_p_B1 * values.sum(-1, keepdim=True, dtype=torch.float64), 0
    )
    return order.gather(1, _invert(values, numbers_B1)[:, None])[:, 0]
