"""Prompts and decoding by `step.c`, as `tinkex.engine.sample.passes` describes them.

A position of a prompt is a row like any other, so the cut of a prompt changes no bit. C keeps the
keys and values of a block in panels, so only C can read them; blocks are copied and cleared whole.
Weights are packed in panels of outputs, input after input.

Axes: T tokens of a pass, B rows, N blocks of a row or outputs, D hidden or inputs, R rank, V
vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.decoder import Decoder, Lora
from tinkex.engine.model.mlp import Mlp
from tinkex.engine.native import bindings as c
from tinkex.engine.native.bindings import Library, Team
from tinkex.engine.native.library import load
from tinkex.engine.sample.blocks import BLOCK
from tinkex.engine.sample.passes import Decoding, Piece, Pool, Row
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


KEPT_ADAPTERS = 256 << 20
"""The most bytes of packed adapters that are kept while no row has them, last used first."""


class NativeSteps:
    """A model without experts and its cache, described for C, and the adapters of the last rows."""

    def __init__(self, native: Native, pool: Pool) -> None:
        self._native, self.config = native, native.model.config
        self._linears = native.model.linears()
        self._model, self._kept = _describe(native, pool)
        self._packed: dict[int, PackedLora] = {}
        """By the number of their weights, the last used ones at the end."""

    def run(
        self,
        tokens_B: Array,
        positions_B: Array,
        tables_BN: Array,
        adapters: Sequence[tuple[int, Lora, int]],
        *,
        hidden_BD: Tensor | None = None,
        logits_BV: Tensor | None = None,
    ) -> None:
        """Run rows of these tokens at these positions, and fill the tensors that are given.

        `adapters` has the number of the weights, their factors and their rows; equal ones are side
        by side.
        """
        spans = self._spans(adapters)
        step = c.Step(
            rows=len(tokens_B),
            spans=len(spans),
            width=tables_BN.shape[1],
            tokens=tokens_B.ctypes.data,
            positions=positions_B.ctypes.data,
            tables=tables_BN.ctypes.data,
            span=spans,
            hidden=address(hidden_BD),
            logits=address(logits_BV),
        )
        if self._native.library.run_rows(self._model, step, self._native.team):
            raise MemoryError("no memory for a step")

    def _spans(self, adapters: Sequence[tuple[int, Lora, int]]) -> ctypes.Array[c.Span]:
        spans, start = [], 0
        for number, some in groupby(adapters, key=itemgetter(0)):
            alike = list(some)
            lora, stop = alike[0][1], start + sum(count for *_, count in alike)
            if lora.factors:
                spans.append(c.Span(start, stop, self._adapter(number, lora).factors))
            start = stop
        self._forget({number for number, *_ in adapters})
        return (c.Span * len(spans))(*spans)

    def _adapter(self, number: int, lora: Lora) -> PackedLora:
        packed = self._packed.pop(number, None) or PackedLora(lora, self._linears)
        self._packed[number] = packed
        return packed

    def forget(self, number: int) -> None:
        """Free what is kept of an adapter."""
        self._packed.pop(number, None)

    def _forget(self, used: set[int]) -> None:
        idle = [number for number in self._packed if number not in used]
        left = sum(self._packed[number].bytes for number in idle)
        for number in idle:
            if left <= KEPT_ADAPTERS:
                return
            left -= self._packed.pop(number).bytes


class NativePrefill:
    """Prompts, whose positions are rows."""

    def __init__(self, steps: NativeSteps) -> None:
        self._steps = steps

    def hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the hidden states as `Prompts` says."""
        counts = [piece.stop - piece.start for piece in pieces]
        tokens = np.concatenate(
            [piece.tokens[piece.start : piece.stop] for piece in pieces]
        ).astype(np.int64)
        positions = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        tables = np.repeat(_tables([piece.blocks for piece in pieces]), counts, axis=0)
        hidden_TD = torch.empty(len(tokens), self._steps.config.hidden)
        adapters = [
            (piece.weights, piece.lora, count) for piece, count in zip(pieces, counts, strict=True)
        ]
        self._steps.run(tokens, positions, tables, adapters, hidden_BD=hidden_TD)
        return hidden_TD


class NativeDecoding(Decoding):
    """One more token of every row."""

    def __init__(self, steps: NativeSteps, pool: Pool) -> None:
        super().__init__(pool)
        self._steps = steps
        self._logits_BV = torch.empty(0, steps.config.vocab)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Decode one token of each row. The logits are overwritten by the next call."""
        tokens = np.array([row.token for row in rows], np.int64)
        positions = np.array([row.length for row in rows], np.int64)
        adapters = [(row.weights, row.lora, 1) for row in rows]
        if self._logits_BV.shape[0] < len(rows):
            self._logits_BV = torch.empty(len(rows), self._logits_BV.shape[1])
        tables = _tables([row.blocks for row in rows])
        self._steps.run(tokens, positions, tables, adapters, logits_BV=self._logits_BV)
        for row in rows:
            row.length += 1
        return self._logits_BV[: len(rows)]

    def forget(self, weights: int) -> None:
        """Free the packed copy; if needed, it is packed again."""
        self._steps.forget(weights)


def _tables(blocks: Sequence[Sequence[int]]) -> Array:
    """Return lists of blocks as rows of one width."""
    tables = np.zeros((len(blocks), max(map(len, blocks))), np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return tables


def _describe(native: Native, pool: Pool) -> tuple[c.Model, object]:
    """Return the model as C knows it, and the arrays that must live as long."""
    model, config = native.model, native.model.config
    layers = (c.Layer * config.layers)()
    for index, (layer, rule) in enumerate(zip(model.layers, config.attention, strict=True)):
        assert isinstance(layer.mlp, Mlp)
        kind = config.rotary[index]
        layers[index] = c.Layer(
            input_norm=address(layer.input_norm_D),
            mlp_norm=address(layer.mlp_norm_D),
            q_norm=address(layer.q_norm_C),
            k_norm=address(layer.k_norm_C),
            post_attention_norm=address(layer.post_attention_norm_D),
            post_mlp_norm=address(layer.post_mlp_norm_D),
            qkv=native.linear(layer.qkv),
            o=native.linear(layer.o),
            gate_up=native.linear(layer.mlp.gate_up),
            down=native.linear(layer.mlp.down),
            rotary=-1 if kind is None else kind,
            window=rule.window or 0,
            scale=rule.scale,
            softcap=rule.softcap or 0.0,
        )
    frequencies = model.frequencies.contiguous()
    described = c.Model(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        groups=config.kv_heads,
        channels=config.head_dim,
        mlp=config.mlp,
        vocab=config.vocab,
        gelu=config.activation != "silu",
        blocks=pool.shape[2],
        block=BLOCK,
        kinds=len(frequencies),
        eps=config.norm_eps,
        embed_scale=config.embed_scale,
        logit_cap=config.logit_cap or 0.0,
        embed=address(model.embed_VD),
        norm=address(model.norm_D),
        frequencies=address(frequencies),
        head=native.linear(model.head),
        layer=layers,
        cache=address(pool.kv),
    )
    return described, (layers, frequencies)
