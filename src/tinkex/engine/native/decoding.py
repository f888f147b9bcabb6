"""Decoding by `step.c`, from blocks where they lie: see `tinkex.engine.decoding`, whose way for a CPU it takes over.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.cache import BLOCK
from tinkex.engine.decoder import Mlp
from tinkex.engine.native import library as c
from tinkex.engine.native.weights import Native, PackedLora, address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.cache import Pool
    from tinkex.engine.decoder import Decoder, Lora
    from tinkex.engine.decoding import Row

KEPT_ADAPTERS = 256 << 20
"""Adapters that no row has just now are kept packed, the last ones up to so many bytes."""


def covers(model: Decoder) -> bool:
    """Whether all layers of a model are of the kinds that C has: experts are not."""
    return all(isinstance(layer.mlp, Mlp) for layer in model.layers)


class NativeDecoding:
    """One more token of every row, by one call."""

    ahead = False

    def __init__(self, native: Native, pool: Pool) -> None:
        self._native, self._pool = native, pool
        self._linears = native.model.linears()
        self._model, self._kept = _describe(native, pool)
        self._packed: dict[int, PackedLora] = {}
        """By the number of their weights, those used last at the end."""
        self._logits_BV = torch.empty(0, native.model.config.vocab)

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Give the row its own copy of the block in which the prompt ends."""
        if row.length % BLOCK:
            self._pool.copy(prompt[-1], row.blocks[len(prompt) - 1])

    def leave(self, row: Row) -> None:
        """Nothing is kept besides the blocks."""

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Equal weights side by side."""
        return sorted(rows, key=lambda row: row.weights)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decode one token of each row. The logits are overwritten by the next call."""
        count, width = len(rows), max(len(row.blocks) for row in rows)
        tokens = np.array([row.token for row in rows], np.int64)
        positions = np.array([row.length for row in rows], np.int64)
        tables = np.array([row.blocks + [0] * (width - len(row.blocks)) for row in rows], np.int64)
        spans = self._spans(rows)
        if self._logits_BV.shape[0] < count:
            self._logits_BV = torch.empty(count, self._logits_BV.shape[1])
        step = c.Step(
            rows=count,
            spans=len(spans),
            width=width,
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            tables=tables.ctypes.data,
            span=spans,
            logits=self._logits_BV.data_ptr(),
        )
        if self._native.library.decode(self._model, step, self._native.team):
            raise MemoryError("no memory for a step of decoding")
        for row in rows:
            row.length += 1
        return self._logits_BV[:count]

    def keep(self, tokens_B: torch.Tensor) -> None:
        """Tokens are always read at once."""

    def _spans(self, rows: Sequence[Row]) -> ctypes.Array[c.Span]:
        bounds: list[tuple[Row, int, int]] = []
        for at, row in enumerate(rows):
            if bounds and bounds[-1][0].weights == row.weights:
                bounds[-1] = (row, bounds[-1][1], at + 1)
            else:
                bounds.append((row, at, at + 1))
        spans = [
            c.Span(start, stop, self._adapter(row.weights, row.lora).factors)
            for row, start, stop in bounds
            if row.lora.factors
        ]
        self._forget({row.weights for row, *_ in bounds})
        return (c.Span * len(spans))(*spans)

    def _adapter(self, number: int, lora: Lora) -> PackedLora:
        packed = self._packed.pop(number, None) or PackedLora(lora, self._linears)
        self._packed[number] = packed
        return packed

    def _forget(self, used: set[int]) -> None:
        idle = [number for number in self._packed if number not in used]
        left = sum(self._packed[number].bytes for number in idle)
        for number in idle:
            if left <= KEPT_ADAPTERS:
                return
            left -= self._packed.pop(number).bytes


def _describe(native: Native, pool: Pool) -> tuple[c.Model, object]:
    """The model as C knows it, and what has to be kept for as long."""
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
