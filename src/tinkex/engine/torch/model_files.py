"""Files of base checkpoints and adapters.

Checkpoints have Hugging Face's layout, adapters PEFT's, with the optimizer's state beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkex.engine.api import EngineError, Place, Writer
from tinkex.engine.families.family import read_config
from tinkex.engine.families.model_config import DecoderConfig, ExpertsConfig
from tinkex.engine.file_formats import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ALPHA,
    OPTIMIZER,
    PREFIX,
    read_lora_config,
    read_object,
    write_tensors,
)
from tinkex.engine.model.attention import widened
from tinkex.engine.model.decoder import Decoder, Layer, inverse_frequencies
from tinkex.engine.model.mlp import Experts, Mlp
from tinkex.engine.torch.device_copies import mark, to_host_beside
from tinkex.engine.torch.lora import Layout, Linear
from tinkex.engine.train.optim import State, make_state
from tinkex.types.tensors import Array


class _Tensors:
    """The tensors of a checkpoint, single or sharded.

    They are read one by one from memory-mapped files.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        paths = sorted(directory.glob("model*.safetensors"))
        if not paths:
            raise EngineError(
                f"{directory} has no model*.safetensors; only safetensors checkpoints are read"
            )
        self._directory = directory
        self._where: dict[str, Any] = {}
        for path in paths:
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise EngineError(f"{path} cannot be read: {error}") from None
            self._where |= dict.fromkeys(opened.keys(), opened)
        self._check_index()
        self._unread = {name for name in self._where if not name.endswith("rotary_emb.inv_freq")}

    def _check_index(self) -> None:
        index = self._directory / "model.safetensors.index.json"
        named = read_object(index).get("weight_map") if index.exists() else {}
        if not isinstance(named, dict):
            raise EngineError(f"{index} has no weight_map")
        if lost := named.keys() - self._where.keys():
            raise EngineError(
                f"{self._directory} lacks the shards of {len(lost)} tensors, such as {min(lost)}"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, which must have this shape."""
        if name not in self._where:
            raise EngineError(
                f"{self._directory} has no tensor {name}, which its config.json needs"
            )
        self._unread.discard(name)
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"{self._directory}: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor

    def differ(self, one: str, other: str) -> bool:
        """Return True if both tensors exist, in the same shape, and are not the same."""
        if one not in self._where or other not in self._where:
            return False
        first, second = (self._where[name].get_tensor(name) for name in (one, other))
        return first.shape == second.shape and not torch.equal(first, second)

    def finish(self, ignored: Iterable[str]) -> None:
        """Refuse tensors that were not read: they mean another architecture."""
        if left := self._unread - set(ignored):
            raise EngineError(
                f"{self._directory} has {len(left)} tensors that the decoder does not use, such as "
                f"{min(left)}"
            )


def load_decoder(directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Read a base model."""
    config = read_config(directory)
    head, embed = f"{config.names.head}.weight", f"{config.names.embed}.weight"
    with ExitStack() as stack:
        tensors = _Tensors(directory, stack)
        if config.tied and tensors.differ(head, embed):
            # as transformers 5 has it: a head of its own is there to be used
            config = replace(config, tied=False)
        decoder = Parts(config, tensors, dtype, device).decoder()
        tensors.finish([head] if config.tied else [])
    return decoder


class Tensors(Protocol):
    """A source of a model's weights."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, which must have this shape."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a decoder, read from a checkpoint's tensors."""

    config: DecoderConfig
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device

    def decoder(self) -> Decoder:
        """Put the decoder together."""
        config, names = self.config, self.config.names
        layers = [self.layer(index) for index in range(config.layers)]
        embed = self.get(f"{names.embed}.weight", config.vocab, config.hidden)
        head = (
            embed if config.tied else self.get(f"{names.head}.weight", config.vocab, config.hidden)
        )
        return Decoder(
            config=config,
            embed_VD=embed,
            layers=layers,
            norm_D=self.norm(names.norm, config.hidden),
            head=Linear(names.head, "unembed", head, None, [names.head], [config.vocab], wide=True),
            frequencies=inverse_frequencies(config).to(self.device),
        )

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device, in the model's precision."""
        return self.tensors.read(name, shape).to(device=self.device, dtype=self.dtype)

    def norm(self, module: str, size: int) -> Tensor:
        """Return the weight of a norm.

        A weight that files hold less one would lose bits in 16 of them: it stays in float32.
        """
        if not self.config.centred_norms:
            return self.get(f"{module}.weight", size)
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.tensors.read(f"{module}.weight", (size,)).to(device=self.device, dtype=wide) + 1

    def optional_norm(self, prefix: str, module: str | None, size: int) -> Tensor | None:
        """Return the weight of a norm that only some families name."""
        return None if module is None else self.norm(prefix + module, size)

    def linear(
        self,
        prefix: str,
        name: str,
        group: str,
        inputs: int,
        bias: bool,
        outputs: Mapping[str, int],
        *,
        wide: bool = False,
    ) -> Linear:
        """Stack projections of one input."""
        modules, sizes = [prefix + module for module in outputs], list(outputs.values())
        parts = [
            self.get(f"{module}.weight", size, inputs)
            for module, size in zip(modules, sizes, strict=True)
        ]
        biases = [
            self.get(f"{module}.bias", size)
            for module, size in zip(modules, sizes, strict=True)
            if bias
        ]
        bias_N = torch.cat(biases) if bias else None
        return Linear(prefix + name, group, torch.cat(parts), bias_N, modules, sizes, wide=wide)

    def layer(self, index: int) -> Layer:
        """Return a layer."""
        config, names, channels = self.config, self.config.names, self.config.head_dim
        hidden, query, key = config.hidden, config.heads * channels, config.kv_heads * channels
        prefix = names.layer.format(index)
        attn = prefix + names.attention
        qkv = dict(zip(names.qkv, (query, key, key), strict=True))
        is_mixture = config.experts is not None
        return Layer(
            input_norm_D=self.norm(prefix + names.input_norm, hidden),
            qkv=self.linear(attn, "qkv", "attn", hidden, config.qkv_bias, qkv),
            o=self.linear(
                attn, "o", "attn", query, config.o_bias, {names.o: hidden}, wide=is_mixture
            ),
            mlp_norm_D=self.norm(prefix + names.mlp_norm, hidden),
            mlp=self.feed_forward(index, prefix + names.mlp),
            q_norm_C=self.optional_norm(attn, names.q_norm, channels),
            k_norm_C=self.optional_norm(attn, names.k_norm, channels),
            post_attention_norm_D=self.optional_norm(prefix, names.post_attention_norm, hidden),
            post_mlp_norm_D=self.optional_norm(prefix, names.post_mlp_norm, hidden),
        )

    def feed_forward(self, index: int, prefix: str) -> Mlp | Experts:
        """Return the mlp of a layer, or its experts."""
        config, names = self.config, self.config.names
        hidden, size = config.hidden, config.mlp
        if config.experts is not None and index in config.experts.layers:
            return self.experts(config.experts, prefix)
        gate_up = dict.fromkeys(names.gate_up, size)
        return Mlp(
            gate_up=self.linear(prefix, "gate_up", "mlp", hidden, config.mlp_bias, gate_up),
            down=self.linear(prefix, "down", "mlp", size, config.mlp_bias, {names.down: hidden}),
            activation=config.activation,
        )

    def experts(self, about: ExpertsConfig, prefix: str) -> Experts:
        """Return the experts of a layer, each a view of two tensors that hold them all."""
        hidden, size, names = self.config.hidden, about.mlp, self.config.names
        gate_up_END = torch.empty(
            about.count, 2 * size, hidden, dtype=self.dtype, device=self.device
        )
        down_END = torch.empty(about.count, hidden, size, dtype=self.dtype, device=self.device)
        linear = partial(
            Linear,
            group="mlp",
            bias_N=None,
            sharers=about.count,
            rank_patterns=names.expert_ranks,
        )

        def expert(number: int) -> Mlp:
            own = prefix + names.expert.format(number)
            gate, up, down = (own + name for name in (*names.gate_up, names.down))
            gate_up_ND, down_ND = gate_up_END[number], down_END[number]
            gate_up_ND[:size] = self.tensors.read(f"{gate}.weight", (size, hidden))
            gate_up_ND[size:] = self.tensors.read(f"{up}.weight", (size, hidden))
            down_ND[:] = self.tensors.read(f"{down}.weight", (hidden, size))
            return Mlp(
                linear(own + "gate_up", weight_ND=gate_up_ND, modules=[gate, up], sizes=[size] * 2),
                linear(own + "down", weight_ND=down_ND, modules=[down], sizes=[hidden], wide=True),
                self.config.activation,
            )

        return Experts(
            router_ED=widened(self.get(f"{prefix}{names.router}.weight", about.count, hidden)),
            each=[expert(number) for number in range(about.count)],
            chosen=about.chosen,
            normed=about.normed,
        )


@dataclass(frozen=True, slots=True)
class AdapterWriter(Writer):
    """The PEFT files of an adapter, and its optimizer's state.

    Nothing of it is ever changed in place, so that it can be written later. `ready` was marked when
    the weights were made.
    """

    base_model: str
    layout: Layout
    weights: Tensor
    state: State | None
    ready: torch.cuda.Event | None

    @classmethod
    def of(
        cls, base_model: str, layout: Layout, weights: Tensor, state: State | None = None
    ) -> AdapterWriter:
        """Return a writer of weights that the device may still be computing."""
        return cls(base_model, layout, weights, state, mark(weights.device))

    def write(self, place: Place) -> None:
        """Write the files."""
        config = json.dumps(_peft_config(self.base_model, self.layout), indent=2) + "\n"
        with place.file(ADAPTER_CONFIG) as file:
            file.write(config.encode())
        with place.file(ADAPTER_WEIGHTS) as file:
            write_tensors(file, self._named({PREFIX: self.weights}), {"format": "pt"})
        if self.state is not None:
            moments = {f"{name}.": getattr(self.state, name) for name in self.state.MOMENTS}
            about = {"format": "pt", "optimizer": self.state.KIND, "step": str(self.state.step)}
            with place.file(OPTIMIZER) as file:
                write_tensors(file, self._named(moments), about)

    def _named(self, flats: Mapping[str, Tensor]) -> dict[str, Array]:
        """Return the tensors of flat buffers on the host, by name."""
        named = {
            name: view.numpy()
            for prefix, flat in flats.items()
            for name, view in _views(self.layout, to_host_beside(flat, self.ready), prefix)
        }
        return dict(sorted(named.items()))


def _peft_config(base_model: str, layout: Layout) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": layout.lora.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in layout.modules}),
        "rank_pattern": {
            pattern: times * layout.rank(linear)
            for linear in layout.linears
            for pattern, times in linear.rank_patterns.items()
        },
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def load_adapter(directory: Path, layout: Layout, like: State, *, optimizer: bool) -> State:
    """Read a saved adapter for a layout, and its optimizer state; it has to fit."""
    weights = load_factors(directory, layout, like.weights)
    if not optimizer:
        return make_state(type(like), weights)
    prefixes = [f"{name}." for name in like.MOMENTS]
    moments, about = _read_flat(directory / OPTIMIZER, layout, like.weights, prefixes, like.KIND)
    return make_state(type(like), weights, moments, int(about["step"]))


def load_factors(directory: Path, layout: Layout, like: Tensor) -> Tensor:
    """Read the weights of a saved adapter for a layout; they have to fit."""
    saved = read_lora_config(directory, layout.groups)
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        ours, theirs = getattr(layout.lora, name), getattr(saved, name)
        if ours != theirs:
            raise EngineError(
                f"the adapter saved in {directory} has {name} {theirs}, this one has {ours}"
            )
    weights, _ = _read_flat(directory / ADAPTER_WEIGHTS, layout, like, [PREFIX])
    return weights[0]


def _read_flat(
    path: Path,
    layout: Layout,
    like: Tensor,
    prefixes: list[str],
    optimizer: str | None = None,
) -> tuple[list[Tensor], dict[str, str]]:
    """Read flat buffers, one per prefix, from a file with exactly these tensors."""
    if not path.exists():
        raise EngineError(f"{path.parent} has no {path.name}")
    flats = [torch.empty(layout.size, dtype=like.dtype) for _ in prefixes]
    views = {
        name: view
        for p, flat in zip(prefixes, flats, strict=True)
        for name, view in _views(layout, flat, p)
    }
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
            if metadata.get("optimizer") != optimizer:
                raise EngineError(
                    f"{path} holds the state of optimizer {metadata.get('optimizer')}, this run's "
                    f"is {optimizer}: "
                    "load the weights alone, or create the run with the other optimizer"
                )
            if differing := views.keys() ^ set(opened.keys()):
                raise EngineError(
                    f"{path} does not fit: only one of file and run has tensor {min(differing)}"
                )
            for name, view in views.items():
                tensor = opened.get_tensor(name)
                if tensor.shape != view.shape:
                    raise EngineError(
                        f"{path}: {name} has shape {list(tensor.shape)}, expected "
                        f"{list(view.shape)}"
                    )
                view.copy_(tensor)
    except SafetensorError as error:
        raise EngineError(f"{path} cannot be read: {error}") from None
    if not all(bool(torch.isfinite(flat).all()) for flat in flats):
        raise EngineError(f"{path} holds NaN or infinity")
    return [flat.to(like.device) for flat in flats], metadata


def _views(layout: Layout, flat: Tensor, prefix: str) -> Iterable[tuple[str, Tensor]]:
    return ((f"{prefix}{name}.weight", view) for name, view in layout.tensors(flat))
