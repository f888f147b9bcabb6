"""LoRA factors: their layout in one flat buffer, and their seeded start.

    y = x W^T + (32 / r) (x A^T) B^T        A [r, in] seeded, B [out, r] zero, W frozen;
                                            r is less for experts

`span_adapters` and `row_adapters` apply them. All factors of an adapter are views of one flat
float32 tensor, and so are their gradients: optimizer steps, clipping and copies are single
operations. A tensor of weights is never changed in place, only replaced; therefore a snapshot is a
reference.

Axes: T packed tokens, D inputs, N outputs, R rank (times the projections that share an input, for
stacked A).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.engine.file_formats import ALPHA, MAX_RANK
from tinkex.types.training import LoraConfig

DEFAULT_SEED = 0


@dataclass(frozen=True, slots=True)
class Linear:
    """A frozen projection, or several of one input stacked along N.

    Attributes:
        modules: The names of the projections in a checkpoint.
        sharers: The number of layers that share an adapter's rank: all experts of a layer, or one.
        wide: True if results are not rounded to half precision where the device can leave that out.
            Logits are the largest numbers there are, and rounding one moves a probability by
            percents; and rounded states of a mixture send tokens to other experts.
        rank_patterns: Of experts: their names in peft, as `TensorNames.expert_ranks` has them.
    """

    name: str
    group: str
    weight_ND: Tensor
    bias_N: Tensor | None
    modules: Sequence[str]
    sizes: list[int]
    sharers: int = 1
    wide: bool = False
    rank_patterns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one linear layer: A stacked over its modules, one B for each."""

    a_RD: Tensor
    b_NR: Sequence[Tensor]
    scale: float


def trained_groups(lora: LoraConfig) -> tuple[str, ...]:
    """Return the groups of modules that an adapter trains."""
    flags = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return tuple(group for group, on in flags.items() if on)


def module_groups(linears: Sequence[Linear]) -> dict[str, tuple[str, ...]]:
    """Return the last names of modules, by the group that trains them."""
    groups: dict[str, dict[str, None]] = {}
    for linear in linears:
        names = [module.rpartition(".")[2] for module in linear.modules]
        groups.setdefault(linear.group, {}).update(dict.fromkeys(names))
    return {group: tuple(names) for group, names in groups.items()}


class Layout:
    """The place of each factor of an adapter in its flat buffer."""

    def __init__(self, linears: Sequence[Linear], lora: LoraConfig) -> None:
        if not 1 <= lora.rank <= MAX_RANK:
            raise EngineError(f"LoRA rank must be between 1 and {MAX_RANK}, got {lora.rank}")
        groups = trained_groups(lora)
        if not groups:
            raise EngineError(
                "at least one of train_attn, train_mlp and train_unembed must be true"
            )
        self.lora = lora
        self.groups = module_groups(linears)
        self.linears = [linear for linear in linears if linear.group in groups]
        self.size = sum(
            self.rank(x) * (w.shape[1] * len(x.sizes) + w.shape[0])
            for x in self.linears
            for w in [x.weight_ND]
        )

    def rank(self, linear: Linear) -> int:
        """Return the rank of a linear layer's factors: experts divide the adapter's."""
        return max(1, self.lora.rank // linear.sharers)

    @property
    def modules(self) -> list[str]:
        """The checkpoint names of the modules that are trained."""
        return [module for linear in self.linears for module in linear.modules]

    def factors(self, flat: Tensor) -> dict[str, Factors]:
        """Return views of a flat buffer, by the name of the linear layer."""
        views, start = {}, 0

        def take(rows: int, columns: int) -> Tensor:
            nonlocal start
            view = flat[start : start + rows * columns].view(rows, columns)
            start += rows * columns
            return view

        for linear in self.linears:
            rank = self.rank(linear)
            a_RD = take(rank * len(linear.sizes), linear.weight_ND.shape[1])
            views[linear.name] = Factors(
                a_RD, [take(size, rank) for size in linear.sizes], ALPHA / rank
            )
        return views

    def tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (`<module>.lora_A` or `<module>.lora_B`, view) for every factor."""
        views = self.factors(flat)
        for linear in self.linears:
            factors = views[linear.name]
            a_each = torch.split(factors.a_RD, self.rank(linear))
            for module, a, b in zip(linear.modules, a_each, factors.b_NR, strict=True):
                yield f"{module}.lora_A", a
                yield f"{module}.lora_B", b

    def initial(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return fresh weights: A uniform in ±1/sqrt(in), as peft draws it, B zero.

        Each module has a stream of its own, which depends on the seed and its name alone.
        """
        seed = DEFAULT_SEED if self.lora.seed is None else self.lora.seed
        flat = torch.zeros(self.size, dtype=torch.float32)
        for name, view in self.tensors(flat):
            if name.endswith("lora_A"):
                bound = 1 / math.sqrt(view.shape[1])
                view.uniform_(-bound, bound, generator=_stream(seed, name))
        return flat.to(device=device, dtype=dtype)


def _stream(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
