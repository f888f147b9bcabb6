"""Pack weights as `step.c` reads them: in panels of outputs, input after input.

Axes: N outputs, D inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.decoder import Decoder, Lora
from tinkex.engine.native import bindings as c
from tinkex.engine.native.bindings import Library
from tinkex.engine.native.library import load
from tinkex.engine.native.team import Team
from tinkex.engine.torch.lora import Factors, Linear
from tinkex.types.tensors import Array

LINE = 64
"""Bytes of a cache line; numbers are read in such units."""


class Native:
    """A model's linear layers, packed at their first use, and the threads that multiply."""

    def __init__(self, library: Library, model: Decoder, threads: int) -> None:
        self.library, self.model, self._team = library, model, Team(library, threads)
        self._room = _room(sum(map(packed_size, model.linears())))
        self._linears: dict[str, c.Linear] = {}

    @property
    def team(self) -> int:
        """Return the address of the threads."""
        return self._team.address

    def linear(self, linear: Linear) -> c.Linear:
        """Return a linear layer of the model, described for C."""
        known = self._linears.get(linear.name)
        if known is None:
            size = packed_size(linear)
            whole, self._room = self._room[:size], self._room[size:]
            at = 0
            for part in torch.split(linear.weight_ND, linear.sizes):
                panels = packed(part)
                whole[at : at + panels.numel()].view(panels.shape).copy_(panels)
                at += panels.numel()
            sizes = (c.Int * c.PARTS)(*linear.sizes)
            inputs, bias = linear.weight_ND.shape[1], linear.bias_N
            known = c.Linear(whole.data_ptr(), address(bias), inputs, len(linear.sizes), sizes)
            self._linears[linear.name] = known
        return known

    def product(self, x_TD: Tensor, linear: Linear) -> Tensor:
        """Return the output of a linear layer of the base model."""
        x_TD = x_TD.contiguous()
        y_TN = x_TD.new_empty(x_TD.shape[0], linear.weight_ND.shape[0])
        self.library.product(
            self.linear(linear), x_TD.data_ptr(), x_TD.shape[0], y_TN.data_ptr(), self.team
        )
        return y_TN

    def draw(
        self, logits_BV: Tensor, uniforms_B: Array, temperatures_B: Array
    ) -> tuple[Array, Array]:
        """Return a token for each row and its log-probability; at temperature 0 the likeliest."""
        rows, vocab = logits_BV.shape
        logits_BV = logits_BV.contiguous()
        tokens_B, logprobs_B = np.empty(rows, np.int64), np.empty(rows, np.float64)
        arrays = [np.ascontiguousarray(x, dtype=np.float64) for x in (uniforms_B, temperatures_B)]
        given = [array.ctypes.data for array in (*arrays, tokens_B, logprobs_B)]
        if self.library.draw(logits_BV.data_ptr(), rows, vocab, *given, self.team):
            raise MemoryError("no memory to choose tokens")
        return tokens_B, logprobs_B


class PackedLora:
    """The factors of an adapter in the order of the model's linear layers; B includes the scale."""

    def __init__(self, lora: Lora, linears: Sequence[Linear]) -> None:
        self._kept: list[Tensor] = []
        self.factors = (c.Factors * len(linears))(
            *(self._pack(lora.factors.get(x.name)) for x in linears)
        )
        self.bytes = sum(tensor.nbytes for tensor in self._kept)

    def _pack(self, factors: Factors | None) -> c.Factors:
        if factors is None:
            return c.Factors()
        a, *b = packed(factors.a_RD), *(packed(b_NR * factors.scale) for b_NR in factors.b_NR)
        self._kept += [a, *b]
        addresses = (c.Pointer * c.PARTS)(*(part.data_ptr() for part in b))
        return c.Factors(a.data_ptr(), addresses, factors.b_NR[0].shape[1])


def _room(floats: int) -> Tensor:
    """Return memory in one piece from a cache line on; it gets large pages where there are any."""
    memory = np.empty(floats + LINE // 4, np.float32)
    return torch.from_numpy(memory)[-memory.ctypes.data % LINE // 4 :][:floats]


def packed_size(linear: Linear) -> int:
    """Return how many numbers a packed linear layer has."""
    return sum(-(-size // c.PANEL) * c.PANEL for size in linear.sizes) * linear.weight_ND.shape[1]


def packed(weight_ND: Tensor) -> Tensor:
    """Return `[panels, D, PANEL]`; zeros fill up the last panel."""
    outputs, inputs = weight_ND.shape
    whole = F.pad(weight_ND, (0, 0, 0, -outputs % c.PANEL)) if outputs % c.PANEL else weight_ND
    return whole.view(-1, c.PANEL, inputs).transpose(1, 2).contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor, or None without one."""
    return None if tensor is None else tensor.data_ptr()


def find(model: Decoder, most_bytes: int) -> Native | None:
    """Return the C form of a model, if this machine compiles C and a copy of the weights fits."""
    like = model.embed_VD
    size = sum(linear.weight_ND.nbytes for linear in model.linears())
    if like.device.type != "cpu" or like.dtype != torch.float32 or size > most_bytes:
        return None
    library = load()
    return None if library is None else Native(library, model, torch.get_num_threads())
