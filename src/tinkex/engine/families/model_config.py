"""What a checkpoint's `config.json` says about a decoder, in our words; what we would get wrong is
refused.

Where a file leaves something out, the family's own default holds, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.engine.api import EngineError
from tinkex.engine.json_files import read_object

if TYPE_CHECKING:
    import torch

ARCHITECTURES = (
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
GEMMAS = ("gemma2", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
HEAD_DIMS = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Sizes of a head that do not follow from the hidden size, where a file does not give them."""
ROPE_TYPES = ("default", "linear", "llama3")
SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
TRAINED = "original_max_position_embeddings"
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
}

Fields: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends: the factor on q.k, how many tokens back it sees (itself included), its
    scores' bound.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def window_within(self, length: int) -> int | None:
        """The window, if a sequence of this length is longer than it; else it hides nothing, and is
        none.
        """
        return self.window if self.window is not None and self.window < length else None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sparse layers of a mixture: how many experts each has, how many of them see a token, and
    their size.
    """

    layers: frozenset[int]
    count: int
    chosen: int
    mlp: int
    normed: bool
    """Whether the weights of the chosen experts are made to sum to one."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of a decoder and the turns its family takes."""

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
    post_norms: bool
    """Whether what attention and mlp return is normalised too, before it is added."""
    centred_norms: bool
    """Whether files hold the weights of norms less one."""
    activation: str
    embed_scale: float
    logit_cap: float | None
    attention: tuple[AttentionRule, ...]
    ropes: tuple[Fields, ...]
    """The kinds of rotary embedding that the layers use."""
    rotary: tuple[int | None, ...]
    """For each layer the index of its rotary embedding, or None where positions are not marked."""
    experts: ExpertsConfig | None

    @classmethod
    def read(cls, directory: Path) -> DecoderConfig:
        """From the `config.json` in a checkpoint directory."""
        path = directory / "config.json"
        try:
            fields = read_object(path)
        except FileNotFoundError:
            raise EngineError(
                f"{directory} has no config.json: not a Hugging Face checkpoint"
            ) from None
        try:
            return cls.from_json(fields)
        except KeyError as error:
            raise EngineError(f"{path} does not say {error}") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EngineError(
                f"{path} holds something of another kind than it should: {error}"
            ) from None

    @classmethod
    def from_json(cls, fields: Fields) -> DecoderConfig:
        """From the contents of `config.json`; anything the decoder would get wrong is refused."""
        _refuse_uncovered(fields)
        arch = str(fields["model_type"])
        gemma = arch in GEMMAS
        names = (
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "vocab_size",
            "intermediate_size",
        )
        hidden, heads, layers, vocab, mlp = (_size(fields, name) for name in names)
        head_dim, kv_heads = _heads(fields, hidden, heads)
        attention_bias = bool(fields.get("attention_bias", False))
        windows = _windows(fields, layers)
        scale = float(fields.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5
        softcap = fields.get("attn_logit_softcapping", 50.0) if arch == "gemma2" else None
        ropes, rotary = _ropes(fields, windows)
        return cls(
            arch=arch,
            vocab=vocab,
            hidden=hidden,
            mlp=mlp,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=_size(fields, "max_position_embeddings"),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tied=bool(fields.get("tie_word_embeddings", gemma or arch == "smollm3")),
            qkv_bias=arch == "qwen2" or attention_bias,
            o_bias=arch != "qwen2" and attention_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            qk_norm=arch in ("qwen3", "qwen3_moe", "gemma3_text"),
            post_norms=gemma,
            centred_norms=gemma,
            activation=_activation(fields),
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            logit_cap=fields.get("final_logit_softcapping", 30.0 if arch == "gemma2" else None)
            if gemma
            else None,
            attention=tuple(AttentionRule(scale, window, softcap) for window in windows),
            ropes=ropes,
            rotary=rotary,
            experts=_experts(fields, layers) if arch == "qwen3_moe" else None,
        )


def _refuse_uncovered(fields: Fields) -> None:
    arch = fields.get("model_type")
    covered = f"covered are {', '.join(ARCHITECTURES)}"
    if arch not in ARCHITECTURES:
        raise EngineError(f"model_type {arch!r} is not supported; {covered}")
    if _activation(fields) not in ACTIVATIONS:
        raise EngineError(
            f"hidden_act {_activation(fields)!r} is not supported; {covered}, with "
            f"{' or '.join(ACTIVATIONS)}"
        )
    if fields.get("quantization_config"):
        raise EngineError(f"quantized checkpoints are not supported; {covered}, in floating point")
    if fields.get("use_bidirectional_attention") or fields.get("is_causal") is False:
        raise EngineError(
            f"attention to later tokens is not supported; {covered}, with causal attention"
        )
    if arch == "gemma3_text" and fields.get("attn_logit_softcapping") is not None:
        raise EngineError(
            "gemma3_text with attn_logit_softcapping is not supported: transformers ignores it "
            "there"
        )


def _activation(fields: Fields) -> str:
    if fields.get("model_type") in GEMMAS:
        return str(fields.get("hidden_activation") or "gelu_pytorch_tanh")
    return str(fields.get("hidden_act", "silu"))


def _size(fields: Fields, name: str) -> int:
    """A number that has to be a whole one, and more than none."""
    value = fields[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value < 1
        or not float(value).is_integer()
    ):
        raise EngineError(f"{name} must be a positive whole number, and is {value!r}")
    return int(value)


def _heads(fields: Fields, hidden: int, heads: int) -> tuple[int, int]:
    """The channels of a head, and how many heads of keys and values there are."""
    channels = fields.get("head_dim", HEAD_DIMS.get(fields["model_type"])) or hidden // heads
    channels = _size({"head_dim": channels}, "head_dim")
    if channels % 2:
        raise EngineError(
            f"heads of {channels} channels are not supported: rotary embeddings turn them in pairs"
        )
    groups = _size(
        {"num_key_value_heads": fields.get("num_key_value_heads") or heads}, "num_key_value_heads"
    )
    if heads % groups:
        raise EngineError(
            f"num_attention_heads is {heads}, which num_key_value_heads, {groups}, does not divide"
        )
    return channels, groups


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """For each layer how many tokens it sees back, or None where it sees all."""
    arch, listed = fields["model_type"], fields.get("layer_types")
    if listed is not None:
        _check_layer_types(listed, layers)
    windows = _windows_by(fields, listed, layers)
    if listed is not None and [kind == SLIDING for kind in listed] != [
        window is not None for window in windows
    ]:
        # Llama, Mistral and Qwen3-MoE have one kind of layer, and elsewhere something says that
        # there is no window.
        raise EngineError(
            f"layer_types of this {arch} contradict what else its config says of sliding windows"
        )
    return windows


def _check_layer_types(kinds: Sequence[Any], layers: int) -> None:
    if unknown := [kind for kind in kinds if kind not in LAYER_TYPES]:
        raise EngineError(
            f"layers of type {unknown[0]!r} are not supported; covered are {', '.join(LAYER_TYPES)}"
        )
    if len(kinds) != layers:
        raise EngineError(f"layer_types has {len(kinds)} entries for {layers} layers")


def _windows_by(fields: Fields, listed: Sequence[str] | None, layers: int) -> list[int | None]:
    arch = fields["model_type"]
    always = arch in ("mistral", *GEMMAS)  # these have no switch for it
    if arch == "llama" or not (always or fields.get("use_sliding_window", False)):
        return [None] * layers
    window = fields.get("sliding_window", None if arch == "smollm3" else 4096)
    if window is None:
        return [None] * layers
    if int(window) < 1:
        raise EngineError(f"a sliding window of {window} tokens sees nothing")
    if arch in ("mistral", "qwen3_moe"):
        return [int(window)] * layers
    slides = _sliding(fields, layers) if listed is None else [kind == SLIDING for kind in listed]
    return [int(window) if slide else None for slide in slides]


def _sliding(fields: Fields, layers: int) -> list[bool]:
    """Which layers have the window, where the file does not list them."""
    arch = fields["model_type"]
    if arch == "smollm3":
        return [not roped for roped in _roped(fields, layers)]
    if arch in GEMMAS:
        pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
        every = 2 if arch == "gemma2" else int(pattern)
        return [(index + 1) % every != 0 for index in range(layers)]
    return [index >= fields.get("max_window_layers", 28) for index in range(layers)]


def _roped(fields: Fields, layers: int) -> list[bool]:
    """Which layers mark positions."""
    if fields["model_type"] != "smollm3":
        return [True] * layers
    if (listed := fields.get("no_rope_layers")) is not None:
        return [bool(roped) for roped in _per_layer("no_rope_layers", listed, layers)]
    interval = _size({"no_rope_layer_interval": 4, **fields}, "no_rope_layer_interval")
    return [(index + 1) % interval != 0 for index in range(layers)]


def _per_layer(name: str, values: Sequence[Any], layers: int) -> Sequence[Any]:
    if len(values) < layers:
        raise EngineError(f"{name} has {len(values)} entries for {layers} layers")
    return values[:layers]


def _ropes(
    fields: Fields, windows: Sequence[int | None]
) -> tuple[tuple[Fields, ...], tuple[int | None, ...]]:
    """The kinds of rotary embedding, and which one each layer has."""
    arch = fields["model_type"]
    if arch != "gemma3_text":
        theta = 2000000.0 if arch == "smollm3" else 10000.0
        parameters = fields.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise EngineError(
                f"rotary embeddings by the type of a layer are not supported for {arch}"
            )
        kind = _rope(fields, theta, parameters)
        return (kind,), tuple(0 if roped else None for roped in _roped(fields, len(windows)))
    given = fields.get("rope_parameters") or {}
    if not all(isinstance(value, Mapping | None) for value in given.values()):
        raise EngineError(f"rope_parameters of {arch} have to say which type of layer they are for")
    everywhere = _rope(fields, 1000000.0, given.get("full_attention"))
    # scaling is for the layers that see all
    local = {"rope_theta": fields.get("rope_local_base_freq")}
    nearby = _rope(local, 10000.0, given.get(SLIDING))
    return (everywhere, nearby), tuple(0 if window is None else 1 for window in windows)


def _rope(fields: Fields, theta: float, parameters: Fields | None) -> Fields:
    """The rotary parameters, from the form before transformers 5 (`rope_theta`, `rope_scaling`) or
    the one after.
    """
    scaling, given = _typed(fields.get("rope_scaling") or {}), _typed(parameters or {})
    if scaling and given and not scaling.items() <= given.items():
        raise EngineError(
            "rope_scaling and rope_parameters say different things: keep the one that is meant"
        )
    rope = {"rope_theta": fields.get("rope_theta") or theta, **scaling, **given}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise EngineError(
            f"rope type {kind!r} is not supported; covered are {', '.join(ROPE_TYPES)}"
        )
    if (rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise EngineError("partial rotary embeddings are not supported")
    if kind == "llama3":  # what stands outside comes first, as in transformers
        rope[TRAINED] = (
            fields.get(TRAINED) or rope.get(TRAINED) or fields.get("max_position_embeddings")
        )
    for name in ("rope_theta", *ROPE_NEEDS.get(kind, ())):
        rope[name] = _positive(rope, name, kind)
    return {**rope, "rope_type": kind}


def _typed(rope: Fields) -> dict[str, Any]:
    """Rotary parameters whose type has the name it has today."""
    older = {"rope_type": rope["type"]} if "type" in rope else {}
    return {**older, **{name: value for name, value in rope.items() if name != "type"}}


def _positive(rope: Fields, name: str, kind: str) -> float:
    try:
        value = float(rope[name])
    except (KeyError, TypeError, ValueError):
        value = 0.0
    if not 0 < value < math.inf:
        raise EngineError(
            f"rope type {kind!r} needs {name}, a positive number, and has {rope.get(name)!r}"
        )
    return value


def _experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    dense, step = fields.get("mlp_only_layers") or [], int(fields.get("decoder_sparse_step", 1))
    count = int(fields.get("num_local_experts") or fields.get("num_experts", 128))
    sparse = frozenset(
        i for i in range(layers) if count > 0 and i not in dense and (i + 1) % step == 0
    )
    if not sparse:
        return None
    chosen = int(fields.get("num_experts_per_tok", 8))
    if not 1 <= chosen <= count:
        raise EngineError(f"num_experts_per_tok is {chosen}, of {count} experts")
    return ExpertsConfig(
        layers=sparse,
        count=count,
        chosen=chosen,
        mlp=int(fields.get("moe_intermediate_size", 768)),
        normed=bool(fields.get("norm_topk_prob", False)),
    )


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Angle per position of each of the C/2 channel pairs, `[kinds of rotary embedding, C/2]`,
    scaled.
    """
    import torch

    return torch.stack([_frequencies(rope, config.head_dim) for rope in config.ropes])


def _frequencies(rope: Fields, channels: int) -> torch.Tensor:
    import torch

    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    return _llama3(frequencies, rope) if rope["rope_type"] == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: Fields) -> torch.Tensor:
    """Slow rotations are divided by `factor`, quick ones kept, and those between interpolated."""
    trained, low, high = (
        float(rope[name]) for name in (TRAINED, "low_freq_factor", "high_freq_factor")
    )
    turns = trained * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / float(rope["factor"]) + keep * frequencies
