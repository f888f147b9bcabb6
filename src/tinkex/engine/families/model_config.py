"""The sizes and traits of a decoder, as its code reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Fields: TypeAlias = Mapping[str, Any]
"""The contents of a `config.json`, or a part of it."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as `layer_types` names them."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The attention of one layer.

    Attributes:
        scale: The factor on q·k.
        window: How many tokens back a query sees, itself included; None for all.
        softcap: The bound of the scores, if there is one.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def window_within(self, length: int) -> int | None:
        """Return the window if it hides anything of a sequence of this length, else None."""
        return self.window if self.window is not None and self.window < length else None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sparse layers of a mixture of experts.

    Attributes:
        layers: The layers that have experts.
        count: The number of experts in each.
        chosen: The number of experts that see a token.
        mlp: The size of an expert.
        normed: True if the weights of the chosen experts are made to sum to one.
    """

    layers: frozenset[int]
    count: int
    chosen: int
    mlp: int
    normed: bool


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of modules in a checkpoint. Names within a layer follow the layer's own.

    A norm without a name does not exist in the family.
    """

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn."
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    q_norm: str | None = None
    k_norm: str | None = None
    o: str = "o_proj"
    post_attention_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    router: str = "gate"
    expert: str = "experts.{}."
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    post_mlp_norm: str | None = None
    expert_ranks: Mapping[str, int] = field(default_factory=dict)
    """Patterns of the experts' names in peft, each with its multiple of an expert's rank.

    In peft experts are modules or are fused; the patterns cover both.
    """

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The modules that LoRA trains, by the group that `train_<group>` switches."""
        return {
            "attn": (*self.qkv, self.o),
            "mlp": (*self.gate_up, self.down),
            "unembed": (self.head,),
        }


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of a decoder and the traits of its family.

    Attributes:
        centred_norms: True if files hold the weights of norms less one.
        attention: The attention of each layer.
        ropes: The kinds of rotary embedding that the layers use.
        rotary: The index of each layer's rotary embedding; None if it does not mark positions.
    """

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
    centred_norms: bool
    activation: str
    embed_scale: float
    logit_cap: float | None
    attention: tuple[AttentionRule, ...]
    ropes: tuple[Fields, ...]
    rotary: tuple[int | None, ...]
    experts: ExpertsConfig | None
    names: TensorNames
