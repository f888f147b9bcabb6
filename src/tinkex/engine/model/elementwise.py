"""The operations between matrix products: norms, rotations, gates.

Each goes over memory once, forward and backward. On a CPU that takes a few operations in place,
with gradients by hand; on an accelerator each is a kernel of `kernels/fused.py`.

Axes: T packed tokens, D hidden, H query heads, G key/value heads, C channels of a head, N outputs
of a linear layer, F mlp (N = 2 F).
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger("tinkex.engine")


@functools.cache
def _load_kernels() -> Any:
    try:
        from tinkex.engine.kernels import fused
    except ImportError:
        logger.warning("triton is not installed: the accelerator will be slower than it could be")
        return None
    return fused


def kernels_for(x: Tensor) -> Any:
    """Return the module of kernels for a tensor on an accelerator that has them."""
    return _load_kernels() if x.is_cuda else None


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last axis, in the precision of its weight."""
    if not x.requires_grad:
        return _normed(x, weight, eps)
    normed: Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class States(NamedTuple):
    """The states of tokens, and the part that rounding has cut off them, if any."""

    rounded: Tensor
    rest: Tensor | None = None


def add_norm(states: States, share: Tensor, weight: Tensor, eps: float) -> tuple[States, Tensor]:
    """Add a share to the states of tokens.

    The results are the sum, and the norm of the sum before rounding.

    In half precision a state is rounded at every sum, and every layer reads it: with the rests,
    sums are as good as in single precision, and half of the difference between trainer and sampler
    is gone. In single precision there are none.
    """
    if not (states.rounded.requires_grad or share.requires_grad):
        return _summed_normed(states, share, weight, eps)
    *summed, normed = _AddNorm.apply(*states, share, weight, eps)  # type: ignore[no-untyped-call]
    return States(*summed), normed


@torch.no_grad()
def cut_off(states: States, normed: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Return the part that rounding has cut off the norm of `add_norm`, in float32.

    None if nothing was cut off.
    """
    if states.rest is None:
        return None
    wide = states.rounded.float() + states.rest
    return F.rms_norm(wide, weight.shape, weight.float(), eps) - normed


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if (fused := kernels_for(x)) is not None and _fits(x):
        out: Tensor = fused.norm_forward(x, weight, eps)
        return out
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _fits(x: Tensor) -> bool:
    """Return True if the kernels take a tensor: contiguous rows, not too long."""
    return x.dim() == 2 and x.is_contiguous() and x.shape[1] <= 16384


def _summed_normed(
    states: States, share: Tensor, weight: Tensor, eps: float
) -> tuple[States, Tensor]:
    x, rest = states
    if (fused := kernels_for(x)) is not None and _fits(x):
        *added, normed = fused.add_norm_forward(x, rest, share, weight, eps)
        return States(*added), normed
    if torch.finfo(x.dtype).bits >= 32:
        summed = x + share
        return States(summed), _normed(summed, weight, eps)
    wide = x.float() + share if rest is None else x.float() + rest + share
    summed = wide.to(x.dtype)
    left = (wide - summed).to(x.dtype)
    normed = F.rms_norm(wide, weight.shape, weight.float(), eps).to(x.dtype)
    return States(summed, left), normed


def _norm_gradient(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return dx = r (g - x r^2 mean(g x)), with y = x r w, r = 1 / rms(x), g = dy w."""
    if x.dtype != weight.dtype:
        return _norm_gradient(dy.to(weight.dtype), x.to(weight.dtype), weight, eps).to(x.dtype)
    size = x.shape[-1]
    mean_square = torch.linalg.vecdot(x, x)[..., None].div_(size)
    scale = torch.rsqrt_(mean_square.add_(eps))
    g = dy * weight
    pull = torch.linalg.vecdot(g, x)[..., None] * scale**3 / size
    return g.mul_(scale).addcmul_(x, pull, value=-1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if (fused := kernels_for(x)) is not None and _fits(x):
            return fused.norm_backward(None, grads[0], x, weight, ctx.eps), None, None
        return _norm_gradient(grads[0], x, weight, ctx.eps), None, None


class _AddNorm(torch.autograd.Function):
    """The sum and its norm; their gradients are added up where they are computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rest: Tensor | None,
        share: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Any:
        (summed, left), normed = _summed_normed(States(x, rest), share, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.set_materialize_grads(False)
        if left is not None:
            ctx.mark_non_differentiable(left)
        ctx.eps = eps
        return summed, left, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (summed, weight), (dsummed, _, dnormed) = ctx.saved_tensors, grads
        assert dnormed is not None
        if (fused := kernels_for(summed)) is not None and _fits(summed):
            dx = fused.norm_backward(dsummed, dnormed, summed, weight, ctx.eps)
        else:
            dx = _norm_gradient(dnormed, summed, weight, ctx.eps)
            if dsummed is not None:
                dx.add_(dsummed)
        return dx, None, dx, None, None


# ── rotations ─────────────────────────────────────────────────────────────────────────────────────


def rotate(x_THC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings: channel c turns together with channel c + C/2."""
    if not x_THC.requires_grad:
        return _rotated(x_THC, cos, sin)
    rotated: Tensor = _Rotate.apply(x_THC, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is the rotation back, in two passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


# ── heads: the fused projection into queries, keys and values, normed and turned ──────────────────


def turned_heads(
    qkv_TN: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[Tensor, Tensor] | None,
    turn: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys, values `[T, heads, C]` of their fused projection.

    `turn` has cosines and sines `[T, 1, C/2]`.
    """
    if (
        turn is not None
        and (fused := kernels_for(qkv_TN)) is not None
        and _is_power(turn[0].shape[-1])
    ):
        if not qkv_TN.requires_grad:
            q, k, v = fused.heads_forward(qkv_TN, sizes, norms, *turn, eps)
            return q, k, v
        q, k, v = _TurnedHeads.apply(  # type: ignore[no-untyped-call]
            qkv_TN, sizes, norms, turn, eps
        )
        return q, k, v
    heads, groups, _ = sizes
    heads_THC = qkv_TN.view(qkv_TN.shape[0], sum(sizes), -1)
    if norms is None and turn is not None:  # queries and keys turn together
        q, k = torch.split(rotate(heads_THC[:, : heads + groups], *turn), [heads, groups], dim=1)
        return q, k, heads_THC[:, heads + groups :]
    q, k, v = torch.split(heads_THC, list(sizes), dim=1)
    if norms is not None:
        q, k = norm(q, norms[0], eps), norm(k, norms[1], eps)
    if turn is not None:
        q, k = rotate(q, *turn), rotate(k, *turn)
    return q, k, v


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        sizes: tuple[int, int, int],
        norms: tuple[Tensor, Tensor] | None,
        turn: tuple[Tensor, Tensor],
        eps: float,
    ) -> Any:
        ctx.save_for_backward(qkv, *turn)
        ctx.norms, ctx.eps = norms, eps
        return kernels_for(qkv).heads_forward(qkv, sizes, norms, *turn, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        qkv, *turn = ctx.saved_tensors
        dqkv = kernels_for(qkv).heads_backward(*grads, qkv, ctx.norms, *turn, ctx.eps)
        return dqkv, None, None, None, None


# ── gates ─────────────────────────────────────────────────────────────────────────────────────────


def gated(gate_up_TN: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, of the two halves of the fused projection."""
    if not gate_up_TN.requires_grad:
        return _gated(gate_up_TN, activation)
    out: Tensor = _Gated.apply(gate_up_TN, activation)  # type: ignore[no-untyped-call]
    return out


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    if (fused := kernels_for(gate_up)) is not None:
        out: Tensor = fused.gate_forward(gate_up, activation)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


class _Gated(torch.autograd.Function):
    """A gate that keeps only the fused projection, and writes its gradient in place."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _gated(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        if (fused := kernels_for(gate_up)) is not None:
            return fused.gate_backward(grads[0], gate_up, ctx.activation), None
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], up, out=d_gate)
        if ctx.activation == "silu":
            torch.ops.aten.silu.out(gate, out=d_up)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        else:
            torch.ops.aten.gelu.out(gate, approximate="tanh", out=d_up)
            torch.ops.aten.gelu_backward.grad_input(
                d_gate, gate, approximate="tanh", grad_input=d_gate
            )
        d_up.mul_(grads[0])
        return out, None
