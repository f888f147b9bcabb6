"""Checks of a compiled `step.c`: right products, and the same bits for a row alone or in a batch.

A compiler may change the order or the rounding of sums in one loop and not in another. So a small
model is run before a library is used. The result is kept in a file beside the library.
"""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from tinkex.engine.native import bindings as c
from tinkex.engine.native.bindings import PANEL, PARTS, Factors, Int, Library, Linear, Model, Team
from tinkex.types.tensors import Array

AGREE, DIFFER = "rows agree", "rows differ"
LAYERS, HIDDEN, HEADS, GROUPS, CHANNELS, MLP, VOCAB, RANK = 2, 44, 4, 2, 24, 40, 70, 5
BLOCKS, BLOCK = 5, 16
PROMPTS = ((21, (1, 2)), (9, (3, 4)))
"""The lengths of two sequences, and the blocks of each."""
NO_MEMORY = "no memory to check the compiled library"


def check_product(library: Library) -> None:
    """Raise OSError if a product is wrong: a compiler can be wrong about a machine."""
    random = np.random.default_rng(0)
    rows, outputs, inputs = 11, 37, 29
    weight, x = (
        random.normal(size=(count, inputs)).astype(np.float32) for count in (outputs, rows)
    )
    y = np.empty((rows, outputs), np.float32)
    panels = np.zeros((-(-outputs // PANEL), inputs, PANEL), np.float32)
    for output, values in enumerate(weight):
        panels[output // PANEL, :, output % PANEL] = values
    linear = c.Linear(panels.ctypes.data, None, inputs, 1, (Int * PARTS)(outputs))
    team = Team(library, 2)
    library.product(linear, x.ctypes.data, rows, y.ctypes.data, team.address)
    if not np.allclose(y, x @ weight.T, atol=1e-4):
        raise OSError("its products are wrong on this machine")


def remembered(library: Library, path: Path, machine: bytes) -> bool:
    """Return whether rows agree, as found before for this file and processor or now."""
    digest = hashlib.blake2b(path.read_bytes() + b"\0" + machine, digest_size=12).hexdigest()
    note = path.with_suffix(".checked")
    with suppress(OSError, ValueError):
        found, _, made_for = note.read_text(encoding="ascii").strip().rpartition(" ")
        if made_for == digest and found in (AGREE, DIFFER):
            return found == AGREE
    agree = rows_agree(library)
    with suppress(OSError):  # it is checked again next time
        note.write_text(f"{AGREE if agree else DIFFER} {digest}\n", encoding="ascii")
    return agree


def rows_agree(library: Library) -> bool:
    """Check that positions give the same logits alone, together and by threads."""
    return _Trial(library).rows_agree() and _matrices_agree(library)


class _Trial:
    """A small model with random weights, described for C."""

    def __init__(self, library: Library) -> None:
        self._library, self._kept = library, [np.zeros(1, np.float32)]
        self._random = np.random.default_rng(0)
        self._cache = np.zeros((LAYERS, 2, BLOCKS, GROUPS, BLOCK * CHANNELS), np.float32)
        self._factors = (c.Factors * (4 * LAYERS + 1))(*self._all_factors())
        self._model = self._describe()

    def rows_agree(self) -> bool:
        """Return whether all logits have the same bits."""
        rows = [(at, table) for count, table in PROMPTS for at in range(count)]
        whole = self._logits(rows, 1)
        alone = np.concatenate(
            [self._logits([row], 1, keeps=index > 0) for index, row in enumerate(rows)]
        )
        if not np.isfinite(whole).all() or whole.tobytes() != alone.tobytes():
            return False
        before = self._library.share.value
        self._library.share.value = 1  # share even this little work among threads
        try:
            return self._logits(rows, 3).tobytes() == whole.tobytes()
        finally:
            self._library.share.value = before

    def _logits(
        self, rows: list[tuple[int, tuple[int, int]]], threads: int, *, keeps: bool = False
    ) -> Array:
        if not keeps:
            self._cache[:] = 0
        positions = np.array([at for at, _ in rows], np.int64)
        tables = np.array([table for _, table in rows], np.int64)
        tokens = (7 * positions + 3 * tables[:, 0]) % VOCAB
        own = int((tables[:, 0] == 1).sum())  # the first sequence has an adapter
        spans = (c.Span * 1)(c.Span(0, own, self._factors))
        logits = np.empty((len(rows), VOCAB), np.float32)
        step = c.Step(
            rows=len(rows),
            spans=1 if own else 0,
            width=2,
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            tables=tables.ctypes.data,
            span=spans,
            hidden=None,
            logits=logits.ctypes.data,
        )
        team = Team(self._library, threads)
        if self._library.run_rows(ctypes.byref(self._model), ctypes.byref(step), team.address):
            raise OSError(NO_MEMORY)
        return logits

    def _describe(self) -> Model:
        layers = (c.Layer * LAYERS)()
        for index, layer in enumerate(layers):
            for name in ("input", "mlp", "post_attention", "post_mlp"):
                setattr(layer, f"{name}_norm", self._numbers(HIDDEN, around=1))
            layer.q_norm, layer.k_norm = (self._numbers(CHANNELS, around=1) for _ in range(2))
            layer.qkv = self._linear(HIDDEN, HEADS * CHANNELS, GROUPS * CHANNELS, GROUPS * CHANNELS)
            layer.o = self._linear(HEADS * CHANNELS, HIDDEN)
            layer.gate_up = self._linear(HIDDEN, MLP, MLP)
            layer.down = self._linear(MLP, HIDDEN)
            layer.window, layer.scale, layer.softcap = 6 * index, CHANNELS**-0.5, 20.0 * index
        model: Model = c.Model(
            layers=LAYERS, hidden=HIDDEN, heads=HEADS, groups=GROUPS, channels=CHANNELS, mlp=MLP
        )
        model.vocab, model.blocks, model.block, model.kinds = VOCAB, BLOCKS, BLOCK, 1
        model.eps, model.embed_scale, model.logit_cap = 1e-5, 1.5, 30.0
        model.embed, model.norm = self._numbers(VOCAB * HIDDEN), self._numbers(HIDDEN, around=1)
        model.frequencies, model.head = self._numbers(CHANNELS // 2), self._linear(HIDDEN, VOCAB)
        model.layer, model.cache = layers, self._cache.ctypes.data
        return model

    def _all_factors(self) -> list[Factors]:
        sizes = [
            (HIDDEN, (HEADS * CHANNELS, GROUPS * CHANNELS, GROUPS * CHANNELS)),
            (HEADS * CHANNELS, (HIDDEN,)),
            (HIDDEN, (MLP, MLP)),
            (MLP, (HIDDEN,)),
        ]
        made: list[Factors] = []
        for inputs, outputs in [*sizes * LAYERS, (HIDDEN, (VOCAB,))]:
            b = [self._panels(RANK, size) for size in outputs]
            addresses = (c.Pointer * PARTS)(*b)
            made.append(c.Factors(self._panels(inputs, RANK * len(outputs)), addresses, RANK))
        return made

    def _linear(self, inputs: int, *sizes: int) -> Linear:
        panels = sum(-(-size // PANEL) for size in sizes)
        weight, bias = self._panels(inputs, panels * PANEL), self._numbers(sum(sizes))
        return c.Linear(weight, bias, inputs, len(sizes), (Int * PARTS)(*sizes))

    def _panels(self, inputs: int, outputs: int) -> int:
        return self._numbers(-(-outputs // PANEL) * PANEL * inputs, scale=inputs**-0.5)

    def _numbers(self, size: int, *, scale: float = 1.0, around: float = 0.0) -> int:
        values = (around + scale * self._random.normal(size=size)).astype(np.float32)
        self._kept.append(values)
        return values.ctypes.data


def _matrices_agree(library: Library) -> bool:
    """Return whether rows of general products agree, for both layouts of the weights."""
    random = np.random.default_rng(1)
    rows, inputs, outputs = 41, 530, 75
    x, w = (
        random.normal(size=size).astype(np.float32) for size in ((rows, inputs), (inputs, outputs))
    )

    team = Team(library, 1)

    def multiplied(first: int, count: int, strides: tuple[int, int]) -> bytes:
        y = np.empty((count, outputs), np.float32)
        addresses = (x[first:].ctypes.data, w.ctypes.data, None, y.ctypes.data)
        given = c.Matrices(
            *(*addresses, count, inputs, outputs, inputs), *(*strides, outputs, 1.0, 0)
        )
        if library.matrices(ctypes.byref(given), team.address):
            raise OSError(NO_MEMORY)
        return y.tobytes()

    return all(
        multiplied(0, rows, strides) == b"".join(multiplied(row, 1, strides) for row in range(rows))
        for strides in ((outputs, 1), (1, inputs))
    )
