"""The choice of the library that multiplies float32 matrices on a CPU.

It is the first library whose rows are steady, as a check on this machine finds. A row is steady if
its bits are the same beside any other rows. oneDNN's and MKL's are on some processors and for some
shapes. Elsewhere the order of their sums depends on the number of rows, and neighbours would change
last bits of results. The products in C (`native/c_matmul.py`) have one order everywhere.

A shape is checked before its first product, which takes milliseconds. PyTorch's number of threads
is part of it.
"""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.native import c_matmul, library as c
from tinkex.engine.torch.openmp import Threads

Name: TypeAlias = Literal["onednn", "pytorch", "c"]

LEAST_FOR_ONEDNN = 1 << 16
"""The size from which weights go through oneDNN; PyTorch's own product begins sooner."""

MOST_ROWS = 516
PARTS = ((0, 4), (8, 16), (40, 64), (100, 152), (4, 136), (96, 292))
"""Rows that are multiplied alone and together with all others, in multiples of four."""
WORK = 1 << 28
"""The most multiplications of a check, which limits its rows …"""
LEAST_ROWS = 64
"""… but to no fewer than these."""

BATCH = 32
BATCHES = ((3, 128, 64), (3, 1024, 64), (192, 64, 64))
"""Queries, keys and channels of attention by batched products."""

logger = logging.getLogger("tinkex.engine")


def choice(weight_ND: Tensor, *, is_small: bool = False, is_packed: bool = False) -> Name:
    """Return the library for products with a matrix of this shape: `x @ weight.t()`.

    Factors of adapters count as small. With packed weights, oneDNN begins quickly.
    """
    outputs, inputs = weight_ND.shape
    is_large = is_packed or (not is_small and outputs * inputs >= LEAST_FOR_ONEDNN)
    turned = weight_ND.stride(0) == 1 and outputs > 1
    return _choice(outputs, inputs, turned, is_large, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _choice(outputs: int, inputs: int, turned: bool, is_large: bool, threads: int) -> Name:
    order: list[Name] = ["onednn", "pytorch"] if is_large else ["pytorch"]
    for name in order:
        if is_available(name) and is_steady(name, outputs, inputs, turned=turned):
            return name
    if is_available("c"):
        return "c"
    _warn()
    return "pytorch"


def steady_batch(count: int) -> AbstractContextManager[None]:
    """Return a block in which each matrix of a batch gets the same bits in any batch.

    With several threads a library may split single products, if there are few of them, and then
    adds up in another order.
    """
    threads = torch.get_num_threads()
    if threads == 1 or (count > 1 and are_batches_steady(threads)):
        return nullcontext()
    return Threads(1)


@functools.cache
@torch.no_grad()
def are_batches_steady(threads: int) -> bool:
    """Return True if a matrix gets the same bits in small and large batches."""
    random = torch.Generator().manual_seed(0)
    for queries, keys, channels in BATCHES:
        shapes = ((queries, keys), (queries, channels), (keys, channels))
        bias, q, k = (torch.randn(BATCH, *shape, generator=random) for shape in shapes)
        with Threads(threads):
            scores, mixed = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.3), torch.bmm(bias, k)
            for count in range(2, min(BATCH, 2 * threads) + 1):
                some = torch.baddbmm(bias[:count], q[:count], k[:count].transpose(1, 2), alpha=0.3)
                if not (
                    torch.equal(some, scores[:count])
                    and torch.equal(torch.bmm(bias[:count], k[:count]), mixed[:count])
                ):
                    return False
    return True


def is_safe(outputs: int, inputs: int) -> bool:
    """Return True if a library keeps rows steady for weights of this shape."""
    weight_ND = torch.empty(outputs, inputs)
    names = [choice(weight_ND), choice(weight_ND[:32], is_small=True)]
    return all(
        n == "c" or is_steady(n, *shape)
        for n, shape in zip(names, ((outputs, inputs), (32, inputs)), strict=True)
    )


@functools.cache
def _warn() -> None:
    logger.warning(
        "the libraries of this machine compute a row of a product differently beside other rows: "
        "requests that run together may change the last bits of each other's results. Install a C "
        "compiler to avoid that; see `tinkex doctor`"
    )


def is_available(name: Name) -> bool:
    """Return True if the library is installed."""
    if name == "onednn":
        return onednn() is not None
    return name == "pytorch" or c.load() is not None


@torch.no_grad()
def is_steady(name: Name, outputs: int, inputs: int, *, turned: bool = False) -> bool:
    """Return True if a row gets the same bits in few rows and in many."""
    random = torch.Generator().manual_seed(0)
    rows = min(MOST_ROWS, max(LEAST_ROWS, WORK // (outputs * inputs)))
    x_TD = torch.randn(rows, inputs, generator=random)
    weight_ND = torch.randn(outputs, inputs, generator=random)
    if turned:
        weight_ND = weight_ND.t().contiguous().t()
    return all(_rows_agree(multiply, x_TD) for multiply in _ways(name, weight_ND))


def _ways(name: Name, weight_ND: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Return the calls of a library by which rows are multiplied with a matrix."""
    if name == "onednn" and (operator := onednn()) is not None:
        layouts = [weight_ND, torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous())]
        return [functools.partial(_by_onednn, operator, layout) for layout in layouts]
    if name == "c":
        return [lambda x_TD: c_matmul.multiply(x_TD, weight_ND.t())]
    return [lambda x_TD: F.linear(x_TD, weight_ND), lambda x_TD: _added(x_TD, weight_ND)]


def _by_onednn(operator: Callable[..., Tensor], weight: Tensor, x_TD: Tensor) -> Tensor:
    return operator(x_TD, weight, None, "none", [], "")


def _added(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return x_TD.new_ones(x_TD.shape[0], weight_ND.shape[0]).addmm_(x_TD, weight_ND.t(), alpha=0.7)


def _rows_agree(multiply: Callable[[Tensor], Tensor], x_TD: Tensor) -> bool:
    whole = multiply(x_TD)
    parts: Sequence[tuple[int, int]] = [part for part in PARTS if part[1] <= x_TD.shape[0]]
    return all(torch.equal(multiply(x_TD[start:stop]), whole[start:stop]) for start, stop in parts)


@functools.cache
def onednn() -> Callable[..., Tensor] | None:
    """Return oneDNN's product with a weight, plain or packed, if PyTorch has it.

    It is used on x86 only.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    is_available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if is_available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        operator: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        return operator
    return None
