"""One decoder for the Llama line, configured by the checkpoint's own `config.json`.

Choices:
- Tokens are packed: linear layers see `[T, D]` without padding; only attention knows where sequences begin.
- Attention is a callable, so that training, prefill and decoding share every other line of the model, and their
  log-probabilities agree.
- q, k, v are one matrix, and gate and up are another: fewer, larger products.
- Base weights are frozen; gradients reach LoRA factors only (see `lora.py`).

Axes: T packed tokens, D hidden, N outputs of a linear layer, H query heads, G key/value heads, C channels of a
head, F mlp, V vocabulary, B sequences of equal length, L their length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from tinkex.engine import EngineError
from tinkex.engine.attention import AttentionRule, soft_cap
from tinkex.engine.lora import Factors, Gradients, Linear, lora_linear

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What `config.json` says, in our words."""

    arch: str
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Mapping[str, Any]
    attention: tuple[AttentionRule, ...]
    logit_cap: float | None

    @classmethod
    def read(cls, directory: Path) -> DecoderConfig:
        """From the `config.json` in a checkpoint directory."""
        path = directory / "config.json"
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise EngineError(f"{directory} has no config.json: not a Hugging Face checkpoint") from None
        except json.JSONDecodeError as error:
            raise EngineError(f"{path} is not valid JSON: {error}") from None
        try:
            return cls.from_json(fields)
        except KeyError as error:
            raise EngineError(f"{path} does not say {error}") from None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DecoderConfig:
        """From the contents of `config.json`; anything the decoder would get wrong is refused."""
        arch = fields.get("model_type")
        _refuse_uncovered(fields)
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        head_dim, layers = int(fields.get("head_dim") or hidden // heads), int(fields["num_hidden_layers"])
        attention_bias = bool(fields.get("attention_bias", False))
        return cls(
            arch=str(arch),
            vocab=int(fields["vocab_size"]),
            hidden=hidden,
            mlp=int(fields["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            context=int(fields["max_position_embeddings"]),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tied=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=arch == "qwen2" or attention_bias,
            o_bias=arch != "qwen2" and attention_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            qk_norm=arch == "qwen3",
            rope=_rope(fields),
            attention=(AttentionRule(head_dim**-0.5),) * layers,
            logit_cap=None,
        )


def _refuse_uncovered(fields: Mapping[str, Any]) -> None:
    arch = fields.get("model_type")
    covered = f"covered are {', '.join(ARCHITECTURES)}"
    if arch not in ARCHITECTURES:
        raise EngineError(f"model_type {arch!r} is not supported; {covered}")
    if fields.get("hidden_act", "silu") != "silu":
        raise EngineError(f"hidden_act {fields['hidden_act']!r} is not supported; {covered}, with silu")
    window = fields.get("sliding_window")
    if fields.get("use_sliding_window", arch == "mistral") and window and window < fields["max_position_embeddings"]:
        raise EngineError(
            f"sliding-window attention ({window} tokens) is not supported; {covered}, with full attention"
        )
    if fields.get("quantization_config"):
        raise EngineError(f"quantized checkpoints are not supported; {covered}, in floating point")


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, from the form before transformers 5 (`rope_theta`, `rope_scaling`) or the one after."""
    rope = {"rope_theta": fields.get("rope_theta", 10000.0)}
    rope |= fields.get("rope_scaling") or {}
    rope |= fields.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise EngineError(f"rope type {kind!r} is not supported; covered are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise EngineError("partial rotary embeddings are not supported")
    return {**rope, "rope_type": kind}


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Angle per position of each of the C/2 channel pairs, with the checkpoint's scaling applied."""
    rope, channels = config.rope, config.head_dim
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    return _llama3(frequencies, rope) if rope["rope_type"] == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Slow rotations are divided by `factor`, quick ones kept, and those between interpolated."""
    trained, low, high = (
        float(rope[name]) for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    turns = trained * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / float(rope["factor"]) + keep * frequencies


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm_D: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm_C: torch.Tensor | None = None
    k_norm_C: torch.Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class Decoder:
    """A base model: frozen weights and the configuration that gives them meaning."""

    config: DecoderConfig
    embed_VD: torch.Tensor
    layers: Sequence[Layer]
    norm_D: torch.Tensor
    head: Linear
    frequencies: torch.Tensor

    def linears(self) -> list[Linear]:
        """Every layer that can carry LoRA factors, in a fixed order."""
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*inner, self.head]

    @property
    def attention(self) -> Sequence[AttentionRule]:
        """How each layer attends: for whoever passes an `Attend`."""
        return self.config.attention

    def logits(
        self, hidden_TD: torch.Tensor, lora: Adaptation = BARE, rows_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the head makes of hidden states, within the model's bound; `rows_T` as for `Adaptation.linear`."""
        return soft_cap(lora.linear(hidden_TD, self.head, rows_T), self.config.logit_cap)


def hidden_states(
    model: Decoder, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, lora: Adaptation = BARE
) -> torch.Tensor:
    """Run the decoder on packed tokens; returns the normalised hidden states `[T, D]` that the head reads."""
    eps = model.config.norm_eps
    x_TD = F.embedding(tokens_T, model.embed_VD)
    angles = positions_T[:, None].to(torch.float32) * model.frequencies
    cos_T1C, sin_T1C = (f(angles)[:, None].to(x_TD.dtype) for f in (torch.cos, torch.sin))
    for index, layer in enumerate(model.layers):
        q, k, v = _heads(model.config, layer, lora.linear(_norm(x_TD, layer.input_norm_D, eps), layer.qkv))
        mixed = attend(index, rotate(q, cos_T1C, sin_T1C), rotate(k, cos_T1C, sin_T1C), v)
        x_TD = x_TD + lora.linear(mixed, layer.o)
        gated = swiglu(lora.linear(_norm(x_TD, layer.mlp_norm_D, eps), layer.gate_up))
        x_TD = x_TD + lora.linear(gated, layer.down)
    return _norm(x_TD, model.norm_D, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis."""
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
    if layer.q_norm_C is not None and layer.k_norm_C is not None:
        q, k = _norm(q, layer.q_norm_C, config.norm_eps), _norm(k, layer.k_norm_C, config.norm_eps)
    return q, k, v


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


def swiglu(gate_up_TN: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of the two halves of the fused projection."""
    if not gate_up_TN.requires_grad:
        return _gated(gate_up_TN)
    gated: torch.Tensor = _SwiGLU.apply(gate_up_TN)  # type: ignore[no-untyped-call]
    return gated


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """Keeps the fused projection alone and writes its gradient in place: no split, no concatenation."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=d_up).mul_(grads[0])
        torch.mul(grads[0], up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return out
