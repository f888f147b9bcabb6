"""One decoder for the Llama line and its relatives, configured by the checkpoint's own `config.json`.

Choices:
- Tokens are packed: linear layers see `[T, D]` without padding; only attention knows where sequences begin.
- Attention is a callable, so that training, prefill and decoding share every other line of the model, and their
  log-probabilities agree.
- What families differ in is data: flags of the config, a rule per layer for attention, norms that are absent.
- q, k, v are one matrix, and gate and up are another: fewer, larger products.
- Base weights are frozen; gradients reach LoRA factors only (see `lora.py`).

Axes: T packed tokens, D hidden, N outputs of a linear layer, H query heads, G key/value heads, C channels of a
head, F mlp, V vocabulary, B sequences of equal length, L their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from tinkex.engine.attention import AttentionRule, soft_cap, widened
from tinkex.engine.config import DecoderConfig
from tinkex.engine.lora import Factors, Gradients, Linear, lora_linear

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one layer: (layer, q_THC, k_TGC, v_TGC) -> [T, H*C]."""


class Adaptation(Protocol):
    """What is added to the linear layers of a pass: one adapter, several beside each other, or none."""

    def linear(self, x_TD: torch.Tensor, linear: Linear, rows_T: torch.Tensor | None = None) -> torch.Tensor:
        """A linear layer with its share added; `rows_T`, ascending, names the tokens of the pass in x, if not all."""


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a pass: factors per linear layer, and where their gradients go when there is a backward pass."""

    factors: Mapping[str, Factors]
    gradients: Gradients | None = None

    def linear(self, x_TD: torch.Tensor, linear: Linear, rows_T: torch.Tensor | None = None) -> torch.Tensor:
        """A linear layer with this adapter's share added, whichever tokens these are."""
        return lora_linear(x_TD, linear, self.factors.get(linear.name), self.gradients)


BARE = Lora({})
"""No adapter: the base model as it is."""


class FeedForward(Protocol):
    """What a layer does to each token by itself: one mlp, or several experts of which some are chosen."""

    def __call__(self, x_TD: torch.Tensor, lora: Adaptation) -> torch.Tensor:
        """The share that is added to the tokens of a pass."""

    def linears(self) -> Iterator[Linear]:
        """Its layers that can carry LoRA factors, in a fixed order."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated mlp."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x_TD: torch.Tensor, lora: Adaptation, rows_T: torch.Tensor | None = None) -> torch.Tensor:
        """The share that is added; `rows_T` as for `Adaptation.linear`."""
        gated_TF = gated(lora.linear(x_TD, self.gate_up, rows_T), self.activation)
        return lora.linear(gated_TF, self.down, rows_T)

    def linears(self) -> Iterator[Linear]:
        """The two stacked projections up, and the one down."""
        yield from (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; families leave some norms out."""

    input_norm_D: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm_D: torch.Tensor
    mlp: FeedForward
    q_norm_C: torch.Tensor | None = None
    k_norm_C: torch.Tensor | None = None
    post_attention_norm_D: torch.Tensor | None = None
    post_mlp_norm_D: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A base model: frozen weights and the configuration that gives them meaning."""

    config: DecoderConfig
    embed_VD: torch.Tensor
    layers: Sequence[Layer]
    norm_D: torch.Tensor
    head: Linear
    frequencies: torch.Tensor
    """Of each kind of rotary embedding."""

    def linears(self) -> list[Linear]:
        """Every layer that can carry LoRA factors, in a fixed order."""
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.o, *layer.mlp.linears())]
        return [*inner, self.head]

    @property
    def attention(self) -> Sequence[AttentionRule]:
        """How each layer attends: for whoever passes an `Attend`."""
        return self.config.attention

    def logits(
        self, hidden_TD: torch.Tensor, lora: Adaptation = BARE, rows_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the head makes of hidden states, within the model's bound; `rows_T` as for `Adaptation.linear`."""
        return cap_logits(lora.linear(hidden_TD, self.head, rows_T), self.config.logit_cap)


def cap_logits(logits_TV: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Logits within a model's bound, if it has one, and then in float32 at least."""
    return logits_TV if bound is None else soft_cap(widened(logits_TV), bound)


def hidden_states(
    model: Decoder, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, lora: Adaptation = BARE
) -> torch.Tensor:
    """Run the decoder on packed tokens; returns the normalised hidden states `[T, D]` that the head reads."""
    config = model.config
    x_TD = F.embedding(tokens_T, model.embed_VD)
    if config.embed_scale != 1.0:
        x_TD = x_TD * torch.tensor(config.embed_scale, dtype=x_TD.dtype)  # rounded as the weights are
    turns = _turns(model, positions_T, x_TD.dtype)
    for index, layer in enumerate(model.layers):
        normed_TD = _norm(x_TD, layer.input_norm_D, config.norm_eps)
        q, k, v = _heads(config, layer, lora.linear(normed_TD, layer.qkv))
        if (kind := config.rotary[index]) is not None:
            q, k = rotate(q, *turns[kind]), rotate(k, *turns[kind])
        mixed_TD = lora.linear(attend(index, q, k, v), layer.o)
        x_TD = x_TD + _optional_norm(mixed_TD, layer.post_attention_norm_D, config.norm_eps)
        fed_TD = layer.mlp(_norm(x_TD, layer.mlp_norm_D, config.norm_eps), lora)
        x_TD = x_TD + _optional_norm(fed_TD, layer.post_mlp_norm_D, config.norm_eps)
    return _norm(x_TD, model.norm_D, config.norm_eps)


def _turns(model: Decoder, positions_T: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines `[T, 1, C/2]` of each kind of rotary embedding."""
    angles = [positions_T[:, None, None].to(torch.float32) * frequencies for frequencies in model.frequencies]
    return [(torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)) for angle in angles]


def _optional_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else _norm(x, weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis, in the precision of its weight."""
    if x.dtype != weight.dtype:
        return _norm(x.to(weight.dtype), weight, eps).to(x.dtype)
    if not x.requires_grad:
        return F.rms_norm(x, weight.shape, weight, eps)
    normed: torch.Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _Norm(torch.autograd.Function):
    """With y = x r w and r = 1 / rms(x): dx = r (g - x r^2 mean(g x)), g = dy w. Half of autograd's time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        size = x.shape[-1]
        mean_square = torch.linalg.vecdot(x, x)[..., None].div_(size)
        scale = torch.rsqrt_(mean_square.add_(ctx.eps))
        g = grads[0] * weight
        pull = torch.linalg.vecdot(g, x)[..., None] * scale**3 / size
        return g.mul_(scale).addcmul_(x, pull, value=-1), None, None


def _heads(
    config: DecoderConfig, layer: Layer, qkv_TN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = [config.heads, config.kv_heads, config.kv_heads]
    q, k, v = torch.split(qkv_TN.view(qkv_TN.shape[0], -1, config.head_dim), sizes, dim=1)
    return _optional_norm(q, layer.q_norm_C, config.norm_eps), _optional_norm(k, layer.k_norm_C, config.norm_eps), v


def rotate(x_THC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: channel c turns together with channel c + C/2."""
    if not x_THC.requires_grad:
        return _rotated(x_THC, cos, sin)
    rotated: torch.Tensor = _Rotate.apply(x_THC, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: two passes over memory instead of autograd's eight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def gated(gate_up_TN: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up, of the two halves of the fused projection."""
    if not gate_up_TN.requires_grad:
        return _gated(gate_up_TN, activation)
    out: torch.Tensor = _Gated.apply(gate_up_TN, activation)  # type: ignore[no-untyped-call]
    return out


def _gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


class _Gated(torch.autograd.Function):
    """Keeps the fused projection alone and writes its gradient in place: no split, no concatenation."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _gated(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], up, out=d_gate)
        if ctx.activation == "silu":
            torch.ops.aten.silu.out(gate, out=d_up)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        else:
            torch.ops.aten.gelu.out(gate, approximate="tanh", out=d_up)
            torch.ops.aten.gelu_backward.grad_input(d_gate, gate, approximate="tanh", grad_input=d_gate)
        d_up.mul_(grads[0])
        return out, None
