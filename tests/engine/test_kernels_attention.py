"""Our kernels for attention, against plain attention in float32."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model import attention
from tinkex.engine.model.attention import PackedAttention, attend, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTHS = [[1, 7, 64, 65, 127, 128, 129, 300], [300, 129, 1, 1], [128], [2], [1]]
FEWER = [[7, 129, 1, 64], [1]]
"""Where an interpreter takes a thousand times as long."""
HEADS = [(2, 2), (4, 1), (6, 2)]
SIZES = list(product([16, 32, 64, 128], [None, 1, 50, 100, 128]))
ROUNDING = 2.0**-8
"""The largest error of a number that is rounded to bfloat16, as a share of it."""
FACTOR = 1.5
"""How many `roundings` an error may be: more than three standard deviations, as one rounding's is
less than half of its largest error."""


def random(*size: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(
        device, torch.bfloat16
    )


def plain(lengths: Sequence[int], rule: AttentionRule, *qkv: torch.Tensor) -> torch.Tensor:
    mixed = []
    for q, k, v in zip(*(torch.split(x, list(lengths)) for x in qkv), strict=True):
        at = torch.arange(q.shape[0], device=q.device)
        mixed.append(attend(q[None], k[None], v[None], visible(at, at, rule), rule)[0])
    return torch.cat(mixed)


def attended(
    lengths: Sequence[int], rule: AttentionRule, qkv: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """Visible keys of the queries, and the gradients."""
    packed = PackedAttention([(1, length) for length in lengths], [rule], grad.device)
    out = packed(0, *qkv)
    assert "VarlenAttention" in type(out.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(packed(0, *qkv), out)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def roundings(
    rule: AttentionRule,
    q_THC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    grad_THC: torch.Tensor,
) -> list[torch.Tensor]:
    """The errors to expect of what one sequence sees and of the gradients by q, k and v, in the
    shapes of those.

    Rounded to bfloat16 are the weights P, the output, the gradient S of the scores, and each
    result. S is P * (grad V^T - D), where D is the sum of out * grad, and so has the errors of P
    and out as well. That counts where both terms are nearly equal, above all in short sequences,
    whose gradients by q and k are therefore small.
    """
    heads, groups = q_THC.shape[1], k_TGC.shape[1]
    q, g = q_THC.transpose(0, 1), grad_THC.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(heads // groups, dim=0) for x in (k_TGC, v_TGC))
    at = torch.arange(q.shape[1], device=q.device)
    scores = (q @ k.mT * rule.scale).masked_fill(~visible(at, at, rule), -torch.inf)
    P = scores.softmax(-1)
    out, dP = P @ v, g @ v.mT
    S = P * (dP - (out * g).sum(-1, keepdim=True))
    of_D = (P * dP).square().sum(-1, keepdim=True) + (out * g).square().sum(-1, keepdim=True)
    of_O = P.square() @ v.square() + out.square()
    of_q = rule.scale**2 * (of_D * (P @ k).square() + S.square() @ k.square() + (S @ k).square())
    of_k = rule.scale**2 * ((of_D * P.square() + S.square()).mT @ q.square())
    of_v = P.square().mT @ g.square()
    of_k, of_v, dk, dv = (
        x.view(groups, -1, *x.shape[1:]).sum(1)
        for x in (of_k, of_v, rule.scale * S.mT @ q, P.mT @ g)
    )
    squares = of_O.transpose(0, 1).flatten(1), of_q.transpose(0, 1)
    return [
        ROUNDING * x.sqrt()
        for x in (*squares, *(x.transpose(0, 1) for x in (of_k + dk**2, of_v + dv**2)))
    ]


def check(
    device: str,
    lengths: Sequence[int],
    heads: int,
    groups: int,
    channels: int,
    window: int | None,
    *,
    strided: bool = False,
) -> None:
    rule = AttentionRule(scale=channels**-0.5, window=window, softcap=None)
    tokens, sizes = sum(lengths), [heads, groups, groups]
    projected = random(tokens, sum(sizes), channels, seed=1, device=device)
    qkv = [x if strided else x.contiguous() for x in torch.split(projected, sizes, dim=1)]
    qkv = [x.detach().requires_grad_() for x in qkv]
    assert qkv[0].is_contiguous() != strided or tokens == 1
    grad = random(tokens, heads * channels, seed=2, device=device)
    exact = [x.detach().float().requires_grad_() for x in qkv]
    mixed = plain(lengths, rule, *exact)
    expected = [mixed.detach(), *torch.autograd.grad(mixed, exact, grad.float())]
    got = attended(lengths, rule, qkv, grad)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == torch.bfloat16
    start = 0
    for length in lengths:  # each by itself, so that none can be wrong behind the others
        here = slice(start, start := start + length)
        inputs = (x[here].detach() for x in (*exact, grad.float().view(tokens, heads, channels)))
        for ours, theirs, error in zip(got, expected, roundings(rule, *inputs), strict=True):
            assert float((ours[here].float() - theirs[here]).norm()) <= FACTOR * float(error.norm())
    if device == "cuda":
        again = attended(lengths, rule, qkv, grad)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize(("channels", "window"), SIZES)
def test_kernel_equals_plain_attention(accelerator: str, channels: int, window: int | None) -> None:
    if accelerator == "cuda":
        for lengths, (heads, groups) in product(LENGTHS, HEADS):
            check(accelerator, lengths, heads, groups, channels, window)
    else:
        heads, groups = HEADS[SIZES.index((channels, window)) % len(HEADS)]
        for lengths in FEWER:
            check(accelerator, lengths, heads, groups, channels, window)


@pytest.mark.parametrize("window", [None, 50])
def test_heads_may_lie_within_one_projection(accelerator: str, window: int | None) -> None:
    check(
        accelerator,
        LENGTHS[0] if accelerator == "cuda" else FEWER[0],
        4,
        2,
        128,
        window,
        strided=True,
    )


@pytest.mark.parametrize("channels", [8, 96, 256])
def test_heads_of_other_sizes_are_left_to_pytorch(accelerator: str, channels: int) -> None:
    heads = attention._Heads(4, 2, channels, torch.bfloat16, torch.device(accelerator), False)
    assert attention._packed_kernels(heads) is None
