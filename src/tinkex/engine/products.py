"""Products with the weights of the base model, and the small ones that adapters add to them.

On a CPU PyTorch multiplies float32 matrices by MKL, which does little for processors that are not Intel's: there
oneDNN, which PyTorch carries as well, is quicker by a sixth. On Intel's own MKL is the quicker one by a twentieth, and
adds up long sums (1,536 numbers, not 576) in an order that depends on the rows when they are few: below 200, neighbours
may change a last bit there.

Axes: T tokens, D inputs, N outputs, R rank.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tinkex.engine.elementwise import kernels_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.engine.lora import Linear

MOST_FUSED = 128
"""Up to this rank an accelerator adds an adapter's share with a kernel of its own."""

LEAST_FOR_ONEDNN = 1 << 16
"""Weights of fewer numbers go through PyTorch's own product on any CPU, which is quicker to begin."""


def base_product(x_TD: torch.Tensor, linear: Linear) -> torch.Tensor:
    """A linear layer of the base model."""
    if linear.wide and _can_widen(x_TD):
        y_TN = torch.mm(x_TD, linear.weight_ND.t(), out_dtype=torch.float32)
        return y_TN if linear.bias_N is None else y_TN.add_(linear.bias_N)
    return weighed(x_TD, linear.weight_ND, linear.bias_N)


def weighed(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """The product with a weight of the base model. Which library makes it depends on the weight, never on the rows."""
    is_large = x_TD.is_cpu and x_TD.dtype == torch.float32 and weight_ND.numel() >= LEAST_FOR_ONEDNN
    if is_large and not is_intel() and (multiply := onednn()) is not None:
        return multiply(x_TD, weight_ND, bias_N, "none", [], "")
    return F.linear(x_TD, weight_ND, bias_N)


@functools.cache
def is_intel() -> bool:
    """Whether the processor is one that MKL was made for."""
    with contextlib.suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    return "GenuineIntel" in platform.processor()


@functools.cache
def onednn() -> Callable[..., torch.Tensor] | None:
    """OneDNN's product with a weight, as it lies or packed, where PyTorch has it; elsewhere than on x86 not tried."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        operator: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
        return operator
    return None


def add_product(y_TN: torch.Tensor, low_TR: torch.Tensor, high_RN: torch.Tensor, scale: float) -> None:
    """Add the scaled product of two low-rank factors, which may be of less precision."""
    if low_TR.shape[1] <= MOST_FUSED and (fused := kernels_for(y_TN)) is not None and low_TR.dtype == torch.bfloat16:
        fused.add_product(y_TN, low_TR, high_RN, scale)
    elif y_TN.dtype == low_TR.dtype:
        y_TN.addmm_(low_TR, high_RN, alpha=scale)
    else:
        y_TN.add_(product(low_TR, high_RN), alpha=scale)


def write_product(y_TN: torch.Tensor, low_TR: torch.Tensor, high_RN: torch.Tensor, scale: float) -> None:
    """Write the scaled product of two low-rank factors over whatever is there."""
    torch.addmm(y_TN, low_TR, high_RN, beta=0, alpha=scale, out=y_TN)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums that are not rounded to the half precision of their factors where the device allows it."""
    return torch.mm(left, right, out_dtype=torch.float32) if _can_widen(left) else left @ right


def _can_widen(x: torch.Tensor) -> bool:
    """Whether products of factors in half precision can be had in single precision."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
