"""A family of models: all that sets the checkpoints of one `model_type` apart.

Each family is one module of this package that names its `FAMILY`. It overrides the attributes and
the methods in which it differs from the plain Llama line. Where a `config.json` leaves something
out, the family's own default holds, as in transformers. `read_config` finds the family of a
`config.json`, and refuses one that would be computed wrongly.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tinkex.engine import families as package
from tinkex.engine.api import EngineError
from tinkex.engine.families.model_config import (
    FULL,
    SLIDING,
    AttentionRule,
    DecoderConfig,
    ExpertsConfig,
    Fields,
    TensorNames,
)
from tinkex.engine.file_formats import read_object

TRAINED = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "llama3")
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
}


def read_rope(fields: Fields, theta: float, parameters: Fields | None) -> Fields:
    """Return rotary parameters, from the form before transformers 5 or the one after.

    The older form is `rope_theta` and `rope_scaling` in `fields`, the newer one `parameters`.
    """
    scaling, given = _typed(fields.get("rope_scaling") or {}), _typed(parameters or {})
    if scaling and given and not scaling.items() <= given.items():
        raise EngineError(
            "rope_scaling and rope_parameters contradict each other; remove the wrong one"
        )
    rope = {"rope_theta": fields.get("rope_theta") or theta, **scaling, **given}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise EngineError(
            f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
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
    """Return rotary parameters whose type has its present name, `rope_type`."""
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


TINY_WINDOW = 6
TINY: Fields = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # large enough for its absence to show
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The `config.json` of the models that the tests compare with transformers."""
TINY_SLIDES: Fields = {"use_sliding_window": True, "sliding_window": TINY_WINDOW}


class Family:
    """The families of the plain Llama line; others override.

    Attributes:
        name: The `model_type`.
        tiny: Models that the tests compare with transformers: a name for each, and its changes to
            `TINY`.
        names: The names of its tensors, and by them the modules that LoRA trains.
        kinds: The kinds of layers that it may have.
        is_uniform: True if all layers slide or none does, whatever a file lists.
        tied: The default of `tie_word_embeddings`.
        qkv_bias: True if queries, keys and values always have biases.
        o_bias: True if `attention_bias` gives the output projection of attention one.
        centred_norms: True if files hold the weights of norms less one.
        head_dim: The default size of a head; None if it follows from the hidden size.
        rope_theta: The default base of rotary embeddings.
        score_cap: The default bound of attention scores; None if they never have one.
    """

    name: ClassVar[str]
    tiny: ClassVar[Mapping[str, Fields]]
    names: ClassVar[TensorNames] = TensorNames()
    kinds: ClassVar[tuple[str, ...]] = (FULL, SLIDING)
    is_uniform: ClassVar[bool] = False
    tied: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    o_bias: ClassVar[bool] = True
    centred_norms: ClassVar[bool] = False
    head_dim: ClassVar[int | None] = None
    rope_theta: ClassVar[float] = 10000.0
    score_cap: ClassVar[float | None] = None

    def check(self, fields: Fields) -> None:
        """Refuse a configuration that would be computed wrongly."""

    def activation(self, fields: Fields) -> str:
        """Return the activation of the mlp."""
        return str(fields.get("hidden_act", "silu"))

    def scale(self, fields: Fields, head_dim: int) -> float:
        """Return the factor on q·k."""
        scale: float = float(head_dim) ** -0.5
        return scale

    def embed_scale(self, hidden: int) -> float:
        """Return the factor on embeddings."""
        return 1.0

    def logit_cap(self, fields: Fields) -> float | None:
        """Return the bound of logits."""
        return None

    def window(self, fields: Fields) -> Any:
        """Return how many tokens back sliding layers see; None if none slide."""
        return None

    def layer_kinds(self, fields: Fields, layers: int) -> Sequence[str]:
        """Return the kind of each layer, where there is no window."""
        return [FULL] * layers

    def slides(self, fields: Fields, layers: int) -> Sequence[bool]:
        """Say of each layer if it slides, where there is a window and no list of layers."""
        return [True] * layers

    def roped(self, fields: Fields, layers: int) -> list[bool]:
        """Say of each layer if it marks positions."""
        return [True] * layers

    def ropes(
        self, fields: Fields, kinds: Sequence[str]
    ) -> tuple[tuple[Fields, ...], tuple[int | None, ...]]:
        """Return the kinds of rotary embedding, and the index of each layer's."""
        parameters = fields.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise EngineError(
                f"rotary embeddings by the type of a layer are not supported for {self.name}"
            )
        rope = read_rope(fields, self.rope_theta, parameters)
        return (rope,), tuple(0 if roped else None for roped in self.roped(fields, len(kinds)))

    def experts(self, fields: Fields, layers: int) -> ExpertsConfig | None:
        """Return the sparse layers."""
        return None

    def read(self, fields: Fields) -> DecoderConfig:
        """Return the configuration of a decoder."""
        names = (
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "vocab_size",
            "intermediate_size",
        )
        hidden, heads, layers, vocab, mlp = (read_size(fields, name) for name in names)
        head_dim, kv_heads = self._heads(fields, hidden, heads)
        attention_bias = bool(fields.get("attention_bias", False))
        kinds, window = self._layers(fields, layers)
        scale = self.scale(fields, head_dim)
        cap = self.score_cap and fields.get("attn_logit_softcapping", self.score_cap)
        ropes, rotary = self.ropes(fields, kinds)
        return DecoderConfig(
            arch=self.name,
            vocab=vocab,
            hidden=hidden,
            mlp=mlp,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=read_size(fields, "max_position_embeddings"),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tied=bool(fields.get("tie_word_embeddings", self.tied)),
            qkv_bias=self.qkv_bias or attention_bias,
            o_bias=self.o_bias and attention_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            centred_norms=self.centred_norms,
            activation=self.activation(fields),
            embed_scale=self.embed_scale(hidden),
            logit_cap=self.logit_cap(fields),
            attention=tuple(
                AttentionRule(scale, window if kind == SLIDING else None, cap) for kind in kinds
            ),
            ropes=ropes,
            rotary=rotary,
            experts=self.experts(fields, layers),
            names=self.names,
        )

    def _heads(self, fields: Fields, hidden: int, heads: int) -> tuple[int, int]:
        """Return the channels of a head, and the number of heads of keys and values."""
        channels = fields.get("head_dim", self.head_dim) or hidden // heads
        channels = read_size({"head_dim": channels}, "head_dim")
        if channels % 2:
            raise EngineError(
                f"head_dim is {channels}, and must be even: rotary embeddings rotate pairs of "
                "channels"
            )
        groups = fields.get("num_key_value_heads") or heads
        groups = read_size({"num_key_value_heads": groups}, "num_key_value_heads")
        if heads % groups:
            raise EngineError(
                f"num_attention_heads is {heads}, and must be a multiple of num_key_value_heads, "
                f"which is {groups}"
            )
        return channels, groups

    def _layers(self, fields: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
        """Return the kind of each layer, and the window of those that slide."""
        listed = fields.get("layer_types")
        if listed is not None:
            self._check_kinds(listed, layers)
        window = self.window(fields)
        if window is not None and int(window) < 1:
            raise EngineError(f"sliding_window is {window}, and must be at least 1")
        if window is None:
            kinds = self.layer_kinds(fields, layers)
        elif listed is None or self.is_uniform:
            kinds = [SLIDING if slides else FULL for slides in self.slides(fields, layers)]
        else:
            kinds = listed
        if listed is not None and list(listed) != list(kinds):
            raise EngineError(
                f"layer_types of this {self.name} contradict its other settings of sliding windows"
            )
        return tuple(kinds), None if window is None else int(window)

    def _check_kinds(self, listed: Sequence[Any], layers: int) -> None:
        if unknown := [kind for kind in listed if kind not in self.kinds]:
            raise EngineError(
                f"layers of type {unknown[0]!r} are not supported; supported are "
                f"{', '.join(self.kinds)}"
            )
        if len(listed) != layers:
            raise EngineError(f"layer_types has {len(listed)} entries for {layers} layers")


def read_size(fields: Fields, name: str) -> int:
    """Return a number that has to be whole and positive."""
    value = fields[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value < 1
        or not float(value).is_integer()
    ):
        raise EngineError(f"{name} must be a positive whole number, and is {value!r}")
    return int(value)


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@functools.cache
def families() -> Mapping[str, Family]:
    """Return every `FAMILY` that a module of this package names, by its `model_type`."""
    found = {}
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return dict(sorted(found.items()))


def read_config(directory: Path) -> DecoderConfig:
    """Read the `config.json` in a checkpoint directory.

    Raises:
        EngineError: There is none, or it is of a model that is not supported.
    """
    path = directory / "config.json"
    try:
        fields = read_object(path)
    except FileNotFoundError:
        raise EngineError(
            f"{directory} has no config.json: not a Hugging Face checkpoint"
        ) from None
    try:
        return parse_config(fields)
    except KeyError as error:
        raise EngineError(f"{path} has no {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(f"{path} holds a value of a wrong type: {error}") from None


def parse_config(fields: Fields) -> DecoderConfig:
    """Return the configuration that the contents of a `config.json` stand for.

    Raises:
        EngineError: The model is not supported.
    """
    arch = fields.get("model_type")
    covered = f"supported are {', '.join(families())}"
    family = families().get(arch) if isinstance(arch, str) else None
    if family is None:
        raise EngineError(f"model_type {arch!r} is not supported; {covered}")
    activation = family.activation(fields)
    if activation not in ACTIVATIONS:
        raise EngineError(
            f"hidden_act {activation!r} is not supported; {covered}, with "
            f"{' or '.join(ACTIVATIONS)}"
        )
    if fields.get("quantization_config"):
        raise EngineError(f"quantized checkpoints are not supported; {covered}, in floating point")
    if fields.get("use_bidirectional_attention") or fields.get("is_causal") is False:
        raise EngineError(
            f"attention to later tokens is not supported; {covered}, with causal attention"
        )
    family.check(fields)
    return family.read(fields)
