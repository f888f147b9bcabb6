"""Products with the weights of the base model, and small ones with adapters' factors.

On a CPU the bits of a row of a float32 product must not depend on the other rows. `matmul_check`
says which library keeps to that for a shape: oneDNN, which is quicker than MKL by a sixth where the
processor is not Intel's, MKL, or C.

Axes: T tokens, D inputs, N outputs, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model import matmul_check
from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.native import c_matmul
from tinkex.engine.torch.lora import Linear

MOST_FUSED = 128
"""The highest rank for which an accelerator adds an adapter's share by a kernel of its own."""


def base_product(x_TD: Tensor, linear: Linear) -> Tensor:
    """Return the results of a linear layer of the base model."""
    if linear.wide and _can_widen(x_TD):
        y_TN = torch.mm(x_TD, linear.weight_ND.t(), out_dtype=torch.float32)
        return y_TN if linear.bias_N is None else y_TN.add_(linear.bias_N)
    return weighed(x_TD, linear.weight_ND, linear.bias_N)


def weighed(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Multiply with a weight of the base model.

    The library is chosen by the weight, never by the rows.
    """
    if not _is_checked(x_TD):
        return F.linear(x_TD, weight_ND, bias_N)
    name = matmul_check.choice(weight_ND)
    if name == "onednn" and (multiply := matmul_check.onednn()) is not None:
        return multiply(x_TD, weight_ND, bias_N, "none", [], "")
    if name == "c":
        return c_matmul.multiply(x_TD, weight_ND.t(), bias_N)
    return F.linear(x_TD, weight_ND, bias_N)


def lowered(x_TD: Tensor, low_RD: Tensor) -> Tensor:
    """Multiply with a small matrix, `x @ low.t()`.

    It is a factor of an adapter, or the router of experts.
    """
    if _is_checked(x_TD) and matmul_check.choice(low_RD, is_small=True) == "c":
        return c_matmul.multiply(x_TD, low_RD.t())
    return F.linear(x_TD, low_RD)


def add_small(y_TN: Tensor, low_TR: Tensor, high_RN: Tensor, scale: float) -> None:
    """Add the scaled product with a factor of an adapter, all of one precision."""
    if _is_checked(low_TR) and matmul_check.choice(high_RN.t(), is_small=True) == "c":
        c_matmul.add_product(y_TN, low_TR, high_RN, scale)
    else:
        y_TN.addmm_(low_TR, high_RN, alpha=scale)


def _is_checked(x: Tensor) -> bool:
    """Return True if a library is chosen for products with this."""
    return x.is_cpu and x.dtype == torch.float32


def add_product(y_TN: Tensor, low_TR: Tensor, high_RN: Tensor, scale: float) -> None:
    """Add the scaled product of two low-rank factors, which may be of less precision."""
    if (
        low_TR.shape[1] <= MOST_FUSED
        and (fused := kernels_for(y_TN)) is not None
        and low_TR.dtype == torch.bfloat16
    ):
        fused.add_product(y_TN, low_TR, high_RN, scale)
    elif y_TN.dtype == low_TR.dtype:
        add_small(y_TN, low_TR, high_RN, scale)
    else:
        y_TN.add_(product(low_TR, high_RN), alpha=scale)


def write_product(y_TN: Tensor, low_TR: Tensor, high_RN: Tensor, scale: float) -> None:
    """Overwrite a tensor with the scaled product of two low-rank factors."""
    torch.addmm(y_TN, low_TR, high_RN, beta=0, alpha=scale, out=y_TN)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply without rounding sums to half precision, if the device can do that."""
    return torch.mm(left, right, out_dtype=torch.float32) if _can_widen(left) else left @ right


def _can_widen(x: Tensor) -> bool:
    """Return True if factors in half precision can have a product in float32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
