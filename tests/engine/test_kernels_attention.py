"""Our kernels for attention, against plain attention in float32."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from tinkex.engine import attention
from tinkex.engine.attention import PackedAttention, attend, visible
from tinkex.engine.config import AttentionRule

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTHS = [[1, 7, 64, 65, 127, 128, 129, 300], [300, 129, 1, 1], [128], [2], [1]]
FEWER = [[7, 129, 1, 64], [1]]
"""Where an interpreter takes a thousand times as long."""
HEADS = [(2, 2), (4, 1), (6, 2)]
SIZES = list(product([16, 32, 64, 128], [None, 1, 50, 100, 128]))
NEAR = 0.02
"""As a share: weights and their gradients are rounded to bfloat16 on the way."""


def random(*size: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def plain(lengths: Sequence[int], rule: AttentionRule, *qkv: torch.Tensor) -> torch.Tensor:
    mixed = []
    for q, k, v in zip(*(torch.split(x, list(lengths)) for x in qkv), strict=True):
        at = torch.arange(q.shape[0], device=q.device)
        mixed.append(attend(q[None], k[None], v[None], visible(at, at, rule), rule)[0])
    return torch.cat(mixed)


def attended(
    lengths: Sequence[int], rule: AttentionRule, qkv: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """What queries see, and the gradients."""
    packed = PackedAttention([(1, length) for length in lengths], [rule], grad.device)
    out = packed(0, *qkv)
    assert "VarlenAttention" in type(out.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(packed(0, *qkv), out)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


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
            a, b = ours[start : start + length].float(), theirs[start : start + length]
            start += length
            # Of a token that sees itself alone the gradient by queries and keys is zero, but for rounding.
            assert float((a - b).norm()) < NEAR * float(b.norm()) + 0.02 * b.numel() ** 0.5 * (1 in (length, window))
    if device == "cuda":
        again = attended(lengths, rule, qkv, grad)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize(("channels", "window"), SIZES)
def test_it_is_what_plain_attention_gives(accelerator: str, channels: int, window: int | None) -> None:
    if accelerator == "cuda":
        for lengths, (heads, groups) in product(LENGTHS, HEADS):
            check(accelerator, lengths, heads, groups, channels, window)
    else:
        heads, groups = HEADS[SIZES.index((channels, window)) % len(HEADS)]
        for lengths in FEWER:
            check(accelerator, lengths, heads, groups, channels, window)


@pytest.mark.parametrize("window", [None, 50])
def test_heads_may_lie_within_one_projection(accelerator: str, window: int | None) -> None:
    check(accelerator, LENGTHS[0] if accelerator == "cuda" else FEWER[0], 4, 2, 128, window, strided=True)


@pytest.mark.parametrize("channels", [8, 96, 256])
def test_heads_of_other_sizes_are_left_to_pytorch(accelerator: str, channels: int) -> None:
    heads = (4, 2, channels, torch.bfloat16, torch.device(accelerator), False)
    assert attention._packed_kernels(*heads) is None
