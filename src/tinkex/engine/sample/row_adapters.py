"""Several adapters in one pass: products with the base weights over all rows, each adapter's share
over its own.

`RowAdapters` goes through the adapters one by one: exact, no copies, any shapes. `Bank` lays the
factors of all adapters side by side in memory of fixed addresses and masks what is not a row's own:
few large products of fixed shapes, which a CUDA graph can hold.

On a CPU the bits of a row of a product depend on its neighbours' number unless that is a multiple
of `ROWS`; therefore rows are padded to one. Then what a row gets does not depend on what else is in
the pass.

Axes: T rows of a pass, D inputs, N outputs, R rank (times the projections that share an input).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tinkex.engine.model import matmul_check
from tinkex.engine.model.matmul import add_product, add_small, base_product, lowered
from tinkex.engine.model.mlp import Adaptation
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.openmp import Threads
from tinkex.engine.train.span_adapters import ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.engine.model.decoder import Decoder, Lora
    from tinkex.engine.native.weights import Native
    from tinkex.engine.torch.lora import Factors, Linear


def padded(rows: int) -> int:
    """So many rows, rounded up."""
    return -(-rows // ROWS) * ROWS


class Products:
    """Products with the frozen weights. On a CPU in float32 they are made from a second copy in
    another layout.

    By C where there is a compiler, else by oneDNN if its rows are steady. Measured for 4 to 32 rows
    the latter takes half to a third of the time of MKL, which lays out the weights each time, and C
    four fifths of that.
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
        self._packed: dict[str, torch.Tensor] = {}

    def __call__(self, x_TD: torch.Tensor, linear: Linear) -> torch.Tensor:
        """A linear layer of the base model."""
        if self._native is not None:
            return self._native.product(x_TD, linear)
        rows = x_TD.shape[0]
        if rows % ROWS:  # what experts got
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


@dataclass(frozen=True, slots=True)
class Span:
    """The rows `[start, stop)` of a pass that belong to one adapter."""

    lora: Lora
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Rows of spans, each span padded by repeating its last: where they come from, and where they
    go back to.
    """

    source: torch.Tensor
    result: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], like: torch.Tensor) -> Spread:
        """For spans with these bounds, one after the other."""
        source: list[int] = []
        result: list[int] = []
        target: list[int] = []
        for start, stop in bounds:
            result += range(len(source), len(source) + stop - start)
            target += range(start, stop)
            source += [min(row, stop - 1) for row in range(start, start + padded(stop - start))]
        return cls(*(to_device(rows, like.device) for rows in (source, result, target)))


class RowAdapters(Adaptation):
    """Adapters beside each other, each over a span of rows; rows in no span are the base model's."""

    def __init__(self, products: Products, spans: Sequence[Span]) -> None:
        self._products, self._spans = products, spans
        self._spread: Spread | None = None

    @classmethod
    def of(cls, products: Products, lora_T: Sequence[Lora], rows: int) -> RowAdapters:
        """For rows whose adapters are given, equal ones side by side; padding up to `rows` goes
        with the last.
        """
        spans: list[Span] = []
        for row, lora in enumerate(lora_T):
            if spans and spans[-1].lora is lora:
                spans[-1] = Span(lora, spans[-1].start, row + 1)
            else:
                spans.append(Span(lora, row, row + 1))
        spans[-1] = Span(spans[-1].lora, spans[-1].start, rows)
        return cls(products, [span for span in spans if span.lora.factors])

    def linear(
        self, x_TD: torch.Tensor, linear: Linear, rows_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A linear layer, with the share of each adapter added to its rows."""
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

    def _add(
        self, x: torch.Tensor, y: torch.Tensor, linear: Linear, bounds: Sequence[tuple[int, int]]
    ) -> None:
        for span, (start, stop) in zip(self._spans, bounds, strict=True):
            factors = span.lora.factors.get(linear.name)
            if factors is None or start == stop:
                continue
            # alone, which is common, and here a slice takes a tenth of a product's time
            if stop - start == x.shape[0]:
                _add_share(x, y, linear, factors)
            else:
                _add_share(x[start:stop], y[start:stop], linear, factors)


def _within(spans: Sequence[Span], rows_T: torch.Tensor) -> list[tuple[int, int]]:
    """Where spans begin and end among some rows of the pass."""
    edges = rows_T.new_tensor([edge for span in spans for edge in (span.start, span.stop)])
    places = torch.searchsorted(rows_T, edges).tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def _add_share(x: torch.Tensor, y: torch.Tensor, linear: Linear, factors: Factors) -> None:
    low = lowered(x, factors.a_RD)
    if len(linear.sizes) == 1:
        _add_product(y, low, factors.b_NR[0].t(), factors.scale)
        return
    lows = low.chunk(len(linear.sizes), dim=1)
    for part, low_part, b_NR in zip(
        y.split_with_sizes(linear.sizes, 1), lows, factors.b_NR, strict=True
    ):
        add_small(part, low_part, b_NR.t(), factors.scale)


def _add_product(
    y_TN: torch.Tensor, low_TR: torch.Tensor, high_RN: torch.Tensor, scale: float
) -> None:
    """For few rows a library's product is quicker than our kernel, which logits of more precision
    need.
    """
    if y_TN.dtype == low_TR.dtype:
        add_small(y_TN, low_TR, high_RN, scale)
    else:
        add_product(y_TN, low_TR, high_RN, scale)


def widest(lora: Lora) -> int:
    """The rank of an adapter; that of experts is less."""
    return max(factors.b_NR[0].shape[1] for factors in lora.factors.values())


class Bank:
    """Adapters side by side: for each linear layer A `[R, D]` and B `[N, R]` of them all, and who
    owns which rank.

    The share of all adapters is two products; between them, what is not a row's own is multiplied
    by zero. Where several projections share an input, B has zeros off its diagonal of blocks: one
    product instead of three.
    """

    def __init__(self, model: Decoder, ranks: int) -> None:
        like = model.embed_VD
        self.ranks = ranks
        self._a: dict[str, torch.Tensor] = {}
        self._b: dict[str, torch.Tensor] = {}
        for linear in model.linears():
            outputs, inputs = linear.weight_ND.shape
            wide = ranks * len(linear.sizes)
            self._a[linear.name] = torch.zeros(wide, inputs, dtype=like.dtype, device=like.device)
            self._b[linear.name] = torch.zeros(outputs, wide, dtype=like.dtype, device=like.device)
        self._owner_R = torch.zeros(ranks, dtype=torch.int64, device=like.device)
        self._dtype = like.dtype
        self._places: dict[int, _Place] = {}

    def place(self, adapters: Mapping[int, Lora]) -> bool:
        """See that these adapters, by number (0 is the bare model), are in the bank; False if it is
        too small.

        One that comes where one of its kind leaves is written over it. Otherwise what leaves is
        wiped out first.
        """
        left = [self._places.pop(number) for number in list(self._places) if number not in adapters]
        new = {n: lora for n, lora in adapters.items() if lora.factors and n not in self._places}
        for number, lora in list(new.items()):
            kind = _kind(lora)
            if (found := next((place for place in left if place.kind == kind), None)) is not None:
                left.remove(found)
                self._put(number, new.pop(number), found)
        for place in left:  # who owns zeros does not matter
            torch._foreach_zero_([*place.a, *place.b])
        for number, lora in new.items():
            start = self._gap(widest(lora))
            if start is None:
                return False
            self._put(number, lora, self._windows(start, lora))
        return True

    def share(self, numbers_T: torch.Tensor) -> BankShare:
        """The adaptation of a pass whose rows belong to the adapters of these numbers."""
        return BankShare(self._a, self._b, (numbers_T[:, None] == self._owner_R).to(self._dtype))

    def whole(self) -> BankShare:
        """The adaptation of a pass whose rows all belong to the one adapter there is."""
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
        """The first run of free ranks that is long enough."""
        start = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - start >= rank:
                break
            start = place.stop
        return start if start + rank <= self.ranks else None

    def _windows(self, start: int, lora: Lora) -> _Place:
        """Where an adapter is written when it begins at this rank."""
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
    """The ranks `[start, stop)` of a bank, and the parts of its matrices that one adapter takes
    there.
    """

    start: int
    stop: int
    kind: list[tuple[str, int]]
    a: list[torch.Tensor]
    b: list[torch.Tensor]


def _kind(lora: Lora) -> list[tuple[str, int]]:
    """The linear layers that an adapter changes, with their ranks: adapters of one kind lie alike."""
    return [(name, factors.b_NR[0].shape[1]) for name, factors in lora.factors.items()]


@dataclass(frozen=True, slots=True)
class BankShare(Adaptation):
    """What a bank adds to the rows of one pass."""

    a: Mapping[str, torch.Tensor]
    b: Mapping[str, torch.Tensor]
    mask_TR: torch.Tensor | None
    """What is each row's own; None if everything is."""

    def linear(
        self, x_TD: torch.Tensor, linear: Linear, rows_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A linear layer with each row's adapter's share added."""
        y_TN = base_product(x_TD, linear)
        low_TR = lowered(x_TD, self.a[linear.name])
        if self.mask_TR is not None:
            mask_TR = self.mask_TR if rows_T is None else self.mask_TR[rows_T]
            low_TR = (low_TR.view(x_TD.shape[0], -1, mask_TR.shape[1]) * mask_TR[:, None]).view(
                low_TR.shape
            )
        _add_product(y_TN, low_TR, self.b[linear.name].t(), 1.0)
        return y_TN
