"""Attention of a layer: its rule, and several ways to compute it.

A layer's `AttentionRule` is all that training, prefill and decoding need to agree on. `causal`
attends whole sequences, `attend` any queries to any keys under a mask, which `visible` makes;
neither knows about caches.

Axes: T packed tokens, B sequences, L their length, Q queries, K keys, H query heads, G key/value
heads (H is a multiple of G), C channels of a head.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.matmul_check import steady_batch
from tinkex.engine.torch.device_copies import to_device

SHORT = 64
"""The longest sequences that plain products attend on a CPU; then the fused kernel is quicker."""
BLOCK = 512
"""The queries of a sequence that are attended at once where a mask has to be written out."""
KERNEL_ERROR = 0.02
"""The largest share by which our attention and its gradient may differ from PyTorch's, since both
round to 16 bits on the way."""

logger = logging.getLogger("tinkex.engine")


def visible(queries: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
    """Return True where the query at a position sees the key at another.

    Positions `[..., Q]` and `[..., K]` give `[..., Q, K]`.
    """
    back = queries[..., :, None] - keys[..., None, :]
    return back >= 0 if rule.window is None else (back >= 0) & (back < rule.window)


def soft_cap(x: Tensor, bound: float | None) -> Tensor:
    """Squash values into ±bound: bound * tanh(x / bound); x itself without a bound."""
    return x if bound is None else torch.tanh(x / bound) * bound


def soft_cap_slope(capped: Tensor, bound: float) -> Tensor:
    """Return the derivative of `soft_cap`, from its result."""
    return 1 - (capped / bound).square()


def widened(x: Tensor) -> Tensor:
    """Return x in float32 at least: near a bound, 16 bits cannot tell values apart."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(
    q_BQHC: Tensor,
    k_BKGC: Tensor,
    v_BKGC: Tensor,
    seen: Tensor,
    rule: AttentionRule,
) -> Tensor:
    """Attend under a mask, `[Q, K]` or `[B, Q, K]`, in which every query sees a key.

    The result is `[B, Q, H*C]`.
    """
    count, queries, heads, channels = q_BQHC.shape
    groups = k_BKGC.shape[2]
    seen = seen[..., None, :, :]
    if rule.softcap is None:
        q, k, v = (x.transpose(1, 2) for x in (q_BQHC, k_BKGC, v_BKGC))
        # there, kernels that take a mask want a key for every head
        if heads != groups and q.device.type != "cpu":
            k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.transpose(1, 2).reshape(count, queries, -1)
    # Heads that share keys are one more axis of the product, so that keys need no copies.
    q = q_BQHC.view(count, queries, groups, -1, channels).permute(0, 2, 3, 1, 4)
    k, v = (x.transpose(1, 2)[:, :, None] for x in (k_BKGC, v_BKGC))
    with steady_batch(q.shape[:3].numel()) if q.is_cpu else nullcontext():
        scores = soft_cap(widened((q * rule.scale) @ k.transpose(3, 4)), rule.softcap)
        probs = scores.masked_fill(~seen[..., None, :, :], -torch.inf).softmax(-1).to(v.dtype)
        mixed = probs @ v
    return mixed.permute(0, 3, 1, 2, 4).reshape(count, queries, -1)


def causal(q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, rule: AttentionRule) -> Tensor:
    """Attend B sequences of one length causally; return `[B*L, H*C]`."""
    count, length, heads, channels = q_BLHC.shape
    groups = k_BLGC.shape[2]
    if rule.softcap is not None or rule.window_within(length) is not None:
        return _by_blocks(q_BLHC, k_BLGC, v_BLGC, rule).view(count * length, -1)
    if length > SHORT or q_BLHC.device.type != "cpu":
        q, k, v = (x.transpose(1, 2) for x in (q_BLHC, k_BLGC, v_BLGC))
        mixed_BHLC = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=rule.scale, enable_gqa=heads != groups
        )
        return mixed_BHLC.transpose(1, 2).reshape(count * length, -1)
    # The heads that share keys become more rows of one product: (B G, H/G L, C) against (B G, L,
    # C).
    split = (count, length, groups, heads // groups, channels)
    q = q_BLHC.reshape(split).permute(0, 2, 3, 1, 4).reshape(count * groups, -1, channels)
    k, v = (x.transpose(1, 2).reshape(count * groups, length, channels) for x in (k_BLGC, v_BLGC))
    mixed: Tensor = _ShortAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, rule.scale
    )
    split = (count, groups, heads // groups, length, channels)
    return mixed.view(split).permute(0, 3, 1, 2, 4).reshape(count * length, -1)


def _by_blocks(q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, rule: AttentionRule) -> Tensor:
    """Attend block after block of queries, each against the keys that it can see."""
    length = q_BLHC.shape[1]
    positions = torch.arange(length, device=q_BLHC.device)
    # No kernel takes capped scores, and all would be kept for backward: it computes those of a
    # block again instead.
    again = rule.softcap is not None and length > BLOCK and torch.is_grad_enabled()
    mixed = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        keys = slice(0 if rule.window is None else max(0, start - rule.window + 1), rows.stop)
        seen = visible(positions[rows], positions[keys], rule)
        parts = (q_BLHC[:, rows], k_BLGC[:, keys], v_BLGC[:, keys], seen, rule)
        if again:
            mixed.append(checkpoint(attend, *parts, use_reentrant=False, preserve_rng_state=False))
        else:
            mixed.append(attend(*parts))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)


class _ShortAttention(torch.autograd.Function):
    """Causal attention by batched products.

    For many short sequences on a CPU it is twice as quick as the fused kernel.
    """

    @staticmethod
    def forward(ctx: Any, q_NRC: Tensor, k_NLC: Tensor, v_NLC: Tensor, scale: float) -> Tensor:
        length = k_NLC.shape[1]
        future = torch.full(
            (length, length), -torch.inf, dtype=q_NRC.dtype, device=q_NRC.device
        ).triu_(1)
        mask = future.repeat(q_NRC.shape[1] // length, 1)
        with steady_batch(q_NRC.shape[0]):
            probs = torch.baddbmm(mask, q_NRC, k_NLC.transpose(1, 2), alpha=scale).softmax(-1)
            mixed = probs @ v_NLC
        ctx.save_for_backward(q_NRC, k_NLC, v_NLC, probs)
        ctx.scale = scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, probs = ctx.saved_tensors
        with steady_batch(q.shape[0]):
            d_probs = grads[0] @ v.transpose(1, 2)
            d_scores = torch.ops.aten._softmax_backward_data(d_probs, probs, -1, probs.dtype).mul_(
                ctx.scale
            )
            d_k, d_v = d_scores.transpose(1, 2) @ q, probs.transpose(1, 2) @ grads[0]
            return d_scores @ k, d_k, d_v, None


class PackedAttention:
    """Causal attention within packed sequences, given as runs of (count B, length L).

    On a CPU a run is one call: sequences of equal length are packed side by side. On an accelerator
    one kernel takes sequences of any lengths.
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        rules: Sequence[AttentionRule],
        device: torch.device | str = "cpu",
    ) -> None:
        self._runs, self._rules = runs, rules
        self._longest = max(length for _, length in runs)
        self._bounds: Tensor | None = None
        self._tables: dict[int, Any] = {}
        """Tables by head size, the same for all layers."""
        if torch.device(device).type == "cuda":
            self._bounds = to_device(
                np.cumsum([0, *self._lengths()]), torch.device(device), torch.int32
            )

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        """Attend by the layer's rule."""
        rule = self._rules[layer]
        if self._bounds is not None and takes_packed(q_THC, rule):
            return self._at_once(q_THC, k_TGC, v_TGC, self._bounds, rule)
        rows = [count * length for count, length in self._runs]
        parts = zip(self._runs, *(torch.split(x, rows) for x in (q_THC, k_TGC, v_TGC)), strict=True)
        split = ([x.view(*run, *x.shape[1:]) for x in qkv] for run, *qkv in parts)
        mixed = [causal(q, k, v, rule) for q, k, v in split]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _at_once(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        window, channels = rule.window_within(self._longest), q.shape[2]
        kernels = _packed_kernels(
            _Heads(q.shape[1], k.shape[1], channels, q.dtype, q.device, window is not None)
        )
        if kernels is None:
            return flash(q, k, v, bounds, self._longest, rule.scale, window)[0].flatten(1)
        if channels not in self._tables:
            self._tables[channels] = kernels.tables(self._lengths(), channels, q.device)
        mixed: Tensor = kernels.VarlenAttention.apply(
            q, k, v, rule.scale, window, self._tables[channels]
        )
        return mixed.flatten(1)

    def _lengths(self) -> list[int]:
        return [length for count, length in self._runs for _ in range(count)]


def takes_packed(q: Tensor, rule: AttentionRule) -> bool:
    """Return True if `flash` can be used."""
    return q.is_cuda and rule.softcap is None and q.dtype in (torch.bfloat16, torch.float16)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    keys: tuple[Tensor, int] | None = None,
) -> Sequence[Tensor]:
    """Attend packed sequences by PyTorch's kernel.

    The results are the output, log-sum-exp, and the state that its own backward needs. `keys` are
    their bounds and the most of a sequence, where keys reach further back than queries; both end
    together.
    """
    bounds_k, longest_k = keys or (bounds, longest)
    parts: Sequence[Tensor] = torch.ops.aten._flash_attention_forward(
        *(q, k, v, bounds, bounds_k, longest, longest_k, 0.0, True, False),
        scale=scale,
        **_sides(window),
    )
    return parts


def _sides(window: int | None) -> dict[str, int | None]:
    """Return how far a query sees to either side, besides itself."""
    return {
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
    }


class _Heads(NamedTuple):
    """Heads of packed sequences, for which kernels are checked."""

    heads: int
    groups: int
    channels: int
    dtype: torch.dtype
    device: torch.device
    windowed: bool


@functools.cache
def _packed_kernels(heads: _Heads) -> Any:
    """Return our kernels for packed sequences.

    None if Triton is missing, or if they differ from PyTorch's on such heads.
    """

    def measured() -> tuple[Any, float]:
        from tinkex.engine.kernels import flash

        if not flash.fits(heads.channels):
            return None, 0.0
        return flash, _kernel_error(flash, heads)

    return trusted("training", measured, KERNEL_ERROR)


def trusted(who: str, measured: Callable[[], tuple[Any, float]], most: float) -> Any:
    """Return a kernel for attention, or None if its error is not below `most`.

    There is always the plain way; a warning says why the kernel is not used.
    """
    try:
        kernel, error = measured()
    except torch.OutOfMemoryError:  # says nothing about the kernel: there may be room the next time
        raise
    except Exception as reason:  # whatever it is, there is another way
        logger.warning("%s runs without its attention kernel and is slower: %s", who, reason)
        return None
    if not error < most:
        logger.warning("%s runs without its attention kernel, whose error here is %s", who, error)
        return None
    return kernel


def _kernel_error(kernels: Any, heads: _Heads) -> float:
    """Return the share by which our kernels differ from PyTorch's on some sequences."""
    count, groups, channels, dtype, device, windowed = heads
    lengths, window, scale = [300, 1, 65, 128, 7], 50 if windowed else None, channels**-0.5
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        q, k, v, d_out = (
            torch.empty(sum(lengths), number, channels, dtype=dtype, device=device).normal_(
                generator=generator
            )
            for number in (count, groups, groups, count)
        )
        bounds = to_device(np.cumsum([0, *lengths]), device, torch.int32)
        out, lse, *state = flash(q, k, v, bounds, max(lengths), scale, window)
        tensors, longest = (d_out, q, k, v, out, lse, bounds, bounds), max(lengths)
        expected = torch.ops.aten._flash_attention_backward(
            *(*tensors, longest, longest, 0.0, True, *state[:2]), scale=scale, **_sides(window)
        )
        tables = kernels.tables(lengths, channels, device)
        mixed, sums = kernels.forward((q, k, v), tables.forward_N3, scale, window)
        got = kernels.gradients(d_out, (q, k, v), mixed, sums, tables, scale, window)
        pairs = zip((mixed, *got), (out, *expected), strict=True)
        return float(
            torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]).max()
        )
