"""Several adapters in one pass: base products over all rows, each adapter's share over its own.

`RowAdapters` takes the adapters one by one: exact, without copies, with any shapes. `Bank` has the
factors of all adapters side by side at fixed addresses and masks those of other rows: few large
products of fixed shapes, which a CUDA graph can hold.

On a CPU the bits of a row of a product depend on the number of rows, unless that is a multiple of
`ROWS`. So rows are padded to a multiple, and a row's result does not depend on its neighbours.

Axes: T rows of a pass, D inputs, N outputs, R rank (times the projections that share an input).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model import matmul_check
from tinkex.engine.model.decoder import Decoder, Lora
from tinkex.engine.model.matmul import add_product, add_small, base_product, lowered
from tinkex.engine.model.mlp import Adaptation
from tinkex.engine.native.c_passes import Native
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.lora import Factors, Linear
from tinkex.engine.torch.openmp import Threads
from tinkex.engine.train.span_adapters import ROWS


def padded(rows: int) -> int:
    """Return a number of rows, rounded up."""
    return -(-rows // ROWS) * ROWS


class Products:
    """Products with the frozen weights, in float32 on a CPU from a second copy in another layout.

    C computes them where there is a compiler, else oneDNN if its rows are steady. For 4 to 32 rows
    oneDNN takes half to a third of the time of MKL, which packs the weights each time, and C takes
    four fifths of oneDNN's.
    """

    def __init__(self, model: Decoder, most_bytes: int, native: Native | None = None) -> None:
        self._native = native
        size = sum(
            linear.weight_ND.numel() * linear.weight_ND.element_size() for linear in model.linears()
        )
        like = model.embed_VD
        fits = like.device.type == "cpu" and like.dtype == torch.float32 and size <= most_bytes
        self._fits = fits
        self._threads = (
            Threads(torch.get_num_threads()) if like.device.type == "cpu" else nullcontext()
        )
        self._packed: dict[str, Tensor] = {}

    def __call__(self, x_TD: Tensor, linear: Linear) -> Tensor:
        """Return the output of a linear layer of the base model."""
        if self._native is not None:
            return self._native.product(x_TD, linear)
        rows = x_TD.shape[0]
        if rows % ROWS:  # the rows of one expert
            return self(F.pad(x_TD, (0, 0, 0, padded(rows) - rows)), linear)[:rows]
        with self._threads:
            multiply = matmul_check.onednn() if self._fits else None
            if (
                multiply is None
                or matmul_check.choice(linear.weight_ND, is_packed=True) != "onednn"
            ):
                return base_product(x_TD, linear)
            weight = self._packed.get(linear.name)
            if weight is None:
                weight = self._packed[linear.name] = torch.ops.mkldnn._reorder_linear_weight(
                    linear.weight_ND
                )
            return multiply(x_TD, weight, linear.bias_N, "none", [], "")


class Span(NamedTuple):
    """The rows `[start, stop)` of a pass that belong to one adapter."""

    lora: Lora
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Rows of spans, each span padded by repeating its last row: their sources and targets."""

    source: Tensor
    result: Tensor
    target: Tensor

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], like: Tensor) -> Spread:
        """Make it for spans with these bounds, one after the other."""
        source: list[int] = []
        result: list[int] = []
        target: list[int] = []
        for start, stop in bounds:
            result += range(len(source), len(source) + stop - start)
            target += range(start, stop)
            source += [min(row, stop - 1) for row in range(start, start + padded(stop - start))]
        return cls(*(to_device(rows, like.device) for rows in (source, result, target)))


class RowAdapters(Adaptation):
    """Adapters, each over a span of rows; rows in no span use the base model alone."""

    def __init__(self, products: Products, spans: Sequence[Span]) -> None:
        self._products, self._spans = products, spans
        self._spread: Spread | None = None

    @classmethod
    def of(cls, products: Products, lora_T: Sequence[Lora], rows: int) -> RowAdapters:
        """Make it for rows with these adapters, equal ones side by side.

        Padding up to `rows` belongs to the last.
        """
        spans: list[Span] = []
        for row, lora in enumerate(lora_T):
            if spans and spans[-1].lora is lora:
                spans[-1] = Span(lora, spans[-1].start, row + 1)
            else:
                spans.append(Span(lora, row, row + 1))
        spans[-1] = Span(spans[-1].lora, spans[-1].start, rows)
        return cls(products, [span for span in spans if span.lora.factors])

    def linear(self, x_TD: Tensor, linear: Linear, rows_T: Tensor | None = None) -> Tensor:
        """Return a linear layer's output, with each adapter's share added to its rows."""
        y_TN = self._products(x_TD, linear)
        bounds = (
            [(s.start, s.stop) for s in self._spans]
            if rows_T is None
            else _within(self._spans, rows_T)
        )
        if all((stop - start) % ROWS == 0 for start, stop in bounds):
            self._add(x_TD, y_TN, linear, bounds)
            return y_TN
        spread = (
            Spread.of(bounds, x_TD) if rows_T is not None or self._spread is None else self._spread
        )
        if rows_T is None:  # the same for every layer
            self._spread = spread
        x, y = x_TD[spread.source], y_TN[spread.source]
        ends = list(accumulate(padded(stop - start) for start, stop in bounds))
        self._add(x, y, linear, list(zip([0, *ends], ends, strict=False)))
        y_TN[spread.target] = y[spread.result]
        return y_TN

    def _add(self, x: Tensor, y: Tensor, linear: Linear, bounds: Sequence[tuple[int, int]]) -> None:
        for span, (start, stop) in zip(self._spans, bounds, strict=True):
            factors = span.lora.factors.get(linear.name)
            if factors is None or start == stop:
                continue
            # often there is one; a slice would take a tenth of a product's time
            if stop - start == x.shape[0]:
                _add_share(x, y, linear, factors)
            else:
                _add_share(x[start:stop], y[start:stop], linear, factors)


def _within(spans: Sequence[Span], rows_T: Tensor) -> list[tuple[int, int]]:
    """Return the begins and ends of spans among some rows of the pass."""
    edges = rows_T.new_tensor([edge for span in spans for edge in (span.start, span.stop)])
    places = torch.searchsorted(rows_T, edges).tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def _add_share(x: Tensor, y: Tensor, linear: Linear, factors: Factors) -> None:
    low = lowered(x, factors.a_RD)
    if len(linear.sizes) == 1:
        _add_product(y, low, factors.b_NR[0].t(), factors.scale)
        return
    lows = low.chunk(len(linear.sizes), dim=1)
    for part, low_part, b_NR in zip(
        y.split_with_sizes(linear.sizes, 1), lows, factors.b_NR, strict=True
    ):
        add_small(part, low_part, b_NR.t(), factors.scale)


def _add_product(y_TN: Tensor, low_TR: Tensor, high_RN: Tensor, scale: float) -> None:
    """Add a product, by a library for few rows and by our kernel for logits of more precision."""
    if y_TN.dtype == low_TR.dtype:
        add_small(y_TN, low_TR, high_RN, scale)
    else:
        add_product(y_TN, low_TR, high_RN, scale)


def widest(lora: Lora) -> int:
    """Return the rank of an adapter, the largest of its layers."""
    return max(factors.b_NR[0].shape[1] for factors in lora.factors.values())


class Bank:
    """Adapters side by side: A `[R, D]` and B `[N, R]` of each linear layer, and each rank's owner.

    The share of all adapters is two products; between them, ranks of other rows are multiplied by
    zero. Where several projections share an input, B has zeros off its diagonal of blocks: one
    product instead of three.
    """

    def __init__(self, model: Decoder, ranks: int) -> None:
        like = model.embed_VD
        self.ranks = ranks
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        for linear in model.linears():
            outputs, inputs = linear.weight_ND.shape
            wide = ranks * len(linear.sizes)
            self._a[linear.name] = torch.zeros(wide, inputs, dtype=like.dtype, device=like.device)
            self._b[linear.name] = torch.zeros(outputs, wide, dtype=like.dtype, device=like.device)
        self._owner_R = torch.zeros(ranks, dtype=torch.int64, device=like.device)
        self._dtype = like.dtype
        self._places: dict[int, _Place] = {}

    def place(self, adapters: Mapping[int, Lora]) -> bool:
        """Put these adapters into the bank, by number (0 is the bare model); return False if full.

        A new adapter overwrites one of its kind that leaves. Other places that become free are
        zeroed first.
        """
        left = [self._places.pop(number) for number in list(self._places) if number not in adapters]
        new = {n: lora for n, lora in adapters.items() if lora.factors and n not in self._places}
        for number, lora in list(new.items()):
            kind = _kind(lora)
            if (found := next((place for place in left if place.kind == kind), None)) is not None:
                left.remove(found)
                self._put(number, new.pop(number), found)
        for place in left:  # the owner of zeros does not matter
            torch._foreach_zero_([*place.a, *place.b])
        for number, lora in new.items():
            start = self._gap(widest(lora))
            if start is None:
                return False
            self._put(number, lora, self._windows(start, lora))
        return True

    def share(self, numbers_T: Tensor) -> BankShare:
        """Return the adaptation of a pass whose rows belong to the adapters of these numbers."""
        return BankShare(self._a, self._b, (numbers_T[:, None] == self._owner_R).to(self._dtype))

    def whole(self) -> BankShare:
        """Return the adaptation of a pass whose rows all belong to the only adapter."""
        return BankShare(self._a, self._b, None)

    def _put(self, number: int, lora: Lora, place: _Place) -> None:
        self._places[number] = place
        self._owner_R[place.start : place.stop] = number
        every = lora.factors.values()
        torch._foreach_copy_(place.a, [a for x in every for a in x.a_RD.chunk(len(x.b_NR))])
        torch._foreach_copy_(
            place.b, [b if x.scale == 1 else b * x.scale for x in every for b in x.b_NR]
        )

    def _gap(self, rank: int) -> int | None:
        """Return the first run of free ranks that is long enough."""
        start = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - start >= rank:
                break
            start = place.stop
        return start if start + rank <= self.ranks else None

    def _windows(self, start: int, lora: Lora) -> _Place:
        """Return the place of an adapter that begins at this rank."""
        a, b = [], []
        for name, factors in lora.factors.items():
            row = 0
            for module, b_NR in enumerate(factors.b_NR):
                size, rank = b_NR.shape
                first = module * self.ranks + start
                a.append(self._a[name][first : first + rank])
                b.append(self._b[name][row : row + size, first : first + rank])
                row += size
        return _Place(start, start + widest(lora), _kind(lora), a, b)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The ranks `[start, stop)` of a bank, and an adapter's parts of its matrices."""

    start: int
    stop: int
    kind: list[tuple[str, int]]
    a: list[Tensor]
    b: list[Tensor]


def _kind(lora: Lora) -> list[tuple[str, int]]:
    """Return the linear layers of an adapter with their ranks; one kind has one layout."""
    return [(name, factors.b_NR[0].shape[1]) for name, factors in lora.factors.items()]


@dataclass(frozen=True, slots=True)
class BankShare(Adaptation):
    """The share of a bank in the rows of one pass."""

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    mask_TR: Tensor | None
    """1 for each row's own ranks; None if all are."""

    def linear(self, x_TD: Tensor, linear: Linear, rows_T: Tensor | None = None) -> Tensor:
        """Return a linear layer's output with the share of each row's adapter added."""
        y_TN = base_product(x_TD, linear)
        low_TR = lowered(x_TD, self.a[linear.name])
        if self.mask_TR is not None:
            mask_TR = self.mask_TR if rows_T is None else self.mask_TR[rows_T]
            low_TR = (low_TR.view(x_TD.shape[0], -1, mask_TR.shape[1]) * mask_TR[:, None]).view(
                low_TR.shape
            )
        _add_product(y_TN, low_TR, self.b[linear.name].t(), 1.0)
        return y_TN
