"""One decoder for the Llama line and its relatives, configured by `config.json`.

Choices:
- Tokens are packed: linear layers see `[T, D]` without padding; only attention knows where
  sequences begin.
- Attention is a callable, so that training, prefill and decoding share every other line of the
  model, and their log-probabilities agree.
- Families differ in data: flags of the config, a rule per layer for attention, norms that are
  absent.
- q, k, v are one matrix, and gate and up are another: fewer, larger products.
- Base weights are frozen; gradients reach LoRA factors only (see `lora.py`).

Axes: T packed tokens, D hidden, N outputs of a linear layer, H query heads, G key/value heads, C
channels of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkex.engine.families.family import TRAINED
from tinkex.engine.families.model_config import AttentionRule, DecoderConfig, Fields
from tinkex.engine.model.attention import soft_cap, widened
from tinkex.engine.model.elementwise import States, add_norm, cut_off, norm, turned_heads
from tinkex.engine.model.mlp import Adaptation, Experts, Mlp
from tinkex.engine.torch.lora import Factors, Linear
from tinkex.engine.train.span_adapters import Share, forward

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer, q_THC, k_TGC, v_TGC) -> [T, H*C]."""


@dataclass(frozen=True, slots=True)
class Lora(Adaptation):
    """One adapter for all tokens: factors per linear layer."""

    factors: Mapping[str, Factors]

    def linear(self, x_TD: Tensor, linear: Linear, rows_T: Tensor | None = None) -> Tensor:
        """Return a linear layer's results with this adapter's share added to all of them."""
        factors = self.factors.get(linear.name)
        shares = [] if factors is None else [Share(0, x_TD.shape[0], factors, None)]
        return forward(x_TD, linear, shares)[0]


BARE = Lora({})
"""No adapter: the base model as it is."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; families leave some norms out."""

    input_norm_D: Tensor
    qkv: Linear
    o: Linear
    mlp_norm_D: Tensor
    mlp: Mlp | Experts
    q_norm_C: Tensor | None = None
    k_norm_C: Tensor | None = None
    post_attention_norm_D: Tensor | None = None
    post_mlp_norm_D: Tensor | None = None

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """The norms of queries and keys, in families that have them."""
        q_norm_C, k_norm_C = self.q_norm_C, self.k_norm_C
        return None if q_norm_C is None or k_norm_C is None else (q_norm_C, k_norm_C)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A base model: frozen weights and the configuration that gives them meaning."""

    config: DecoderConfig
    embed_VD: Tensor
    layers: Sequence[Layer]
    norm_D: Tensor
    head: Linear
    frequencies: Tensor
    """Of each kind of rotary embedding."""

    def linears(self) -> list[Linear]:
        """Return every layer that can carry LoRA factors, in a fixed order."""
        inner = [
            linear for layer in self.layers for linear in (layer.qkv, layer.o, *layer.mlp.linears())
        ]
        return [*inner, self.head]

    @property
    def is_dense(self) -> bool:
        """True if no layer has experts."""
        return all(isinstance(layer.mlp, Mlp) for layer in self.layers)

    @property
    def attention(self) -> Sequence[AttentionRule]:
        """The attention of each layer."""
        return self.config.attention

    def logits(self, hidden_TD: Tensor, lora: Adaptation = BARE) -> Tensor:
        """Return the logits of hidden states, within the model's bound."""
        return cap_logits(lora.linear(hidden_TD, self.head), self.config.logit_cap)


def cap_logits(logits_TV: Tensor, bound: float | None) -> Tensor:
    """Bound logits, if the model does, and then in float32 at least."""
    return logits_TV if bound is None else soft_cap(widened(logits_TV), bound)


def hidden_states(
    model: Decoder,
    tokens_T: Tensor,
    positions_T: Tensor,
    attend: Attend,
    lora: Adaptation = BARE,
    *,
    sparing: bool = False,
) -> Tensor:
    """Run the decoder on packed tokens.

    The result is the normalised hidden states `[T, D]` that the head reads. If `sparing`, only one
    state per layer is kept for backward, which computes the rest again.
    """
    config, eps = model.config, model.config.norm_eps
    x_TD = F.embedding(tokens_T, model.embed_VD)
    if config.embed_scale != 1.0:
        # rounded as the weights are
        x_TD = x_TD * torch.tensor(config.embed_scale, dtype=x_TD.dtype)
    turns = _turns(model, positions_T, x_TD.dtype)
    norms_D = [*(layer.input_norm_D for layer in model.layers[1:]), model.norm_D]
    normed_TD = norm(x_TD, model.layers[0].input_norm_D, eps)
    rest_TD: Tensor | None = None
    for index, next_norm_D in enumerate(norms_D):
        kind = config.rotary[index]
        run = partial(
            _layer, model, index, next_norm_D, attend, lora, None if kind is None else turns[kind]
        )
        if sparing:
            x_TD, rest_TD, normed_TD = checkpoint(
                run, x_TD, rest_TD, normed_TD, use_reentrant=False, preserve_rng_state=False
            )
        else:
            x_TD, rest_TD, normed_TD = run(x_TD, rest_TD, normed_TD)
    return normed_TD


def _layer(
    model: Decoder,
    index: int,
    next_norm_D: Tensor,
    attend: Attend,
    lora: Adaptation,
    turn: tuple[Tensor, Tensor] | None,
    x_TD: Tensor,
    rest_TD: Tensor | None,
    normed_TD: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a layer.

    The results are the state of each token, the part of it that rounding has cut off, and its norm,
    which the next layer reads.
    """
    config, layer, eps = model.config, model.layers[index], model.config.norm_eps
    sizes = (config.heads, config.kv_heads, config.kv_heads)
    q, k, v = turned_heads(lora.linear(normed_TD, layer.qkv), sizes, layer.head_norms, turn, eps)
    mixed_TD = lora.linear(attend(index, q, k, v), layer.o)
    mixed_TD = _optional_norm(mixed_TD, layer.post_attention_norm_D, eps)
    states, normed_TD = add_norm(States(x_TD, rest_TD), mixed_TD, layer.mlp_norm_D, eps)
    if isinstance(layer.mlp, Mlp):
        fed_TD = layer.mlp(normed_TD, lora)
    else:
        fed_TD = layer.mlp(normed_TD, lora, cut_off(states, normed_TD, layer.mlp_norm_D, eps))
    fed_TD = _optional_norm(fed_TD, layer.post_mlp_norm_D, eps)
    states, normed_TD = add_norm(states, fed_TD, next_norm_D, eps)
    return *states, normed_TD


def _turns(model: Decoder, positions_T: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return cosines and sines `[T, 1, C/2]` of each kind of rotary embedding."""
    angles = [
        positions_T[:, None, None].to(torch.float32) * frequencies
        for frequencies in model.frequencies
    ]
    return [(torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)) for angle in angles]


def _optional_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else norm(x, weight, eps)


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Return the angle per position of each pair of channels.

    The shape is `[kinds of rotary embedding, C/2]`; scaling is applied.
    """
    return torch.stack([_frequencies(rope, config.head_dim) for rope in config.ropes])


def _frequencies(rope: Fields, channels: int) -> Tensor:
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    return _llama3(frequencies, rope) if rope["rope_type"] == "llama3" else frequencies


def _llama3(frequencies: Tensor, rope: Fields) -> Tensor:
    """Divide slow rotations by `factor`, keep quick ones, and interpolate between."""
    trained, low, high = (
        float(rope[name]) for name in (TRAINED, "low_freq_factor", "high_freq_factor")
    )
    turns = trained * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / float(rope["factor"]) + keep * frequencies
