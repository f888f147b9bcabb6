"""Products of float32 matrices by `step.c`: a row's sums have the same order among any other rows.

Weights are packed for each product, so that none is kept twice. Every thread of Python has its own
team.

Axes: T rows, D inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

from tinkex.engine.native import bindings as c
from tinkex.engine.native.bindings import Library, Team
from tinkex.engine.native.library import load

_local = threading.local()


def multiply(
    x_TD: Tensor, w_DN: Tensor, bias_N: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Return a product with scaled weights and a bias."""
    y_TN = x_TD.new_empty(x_TD.shape[0], w_DN.shape[1])
    _run(y_TN, x_TD, w_DN, bias_N, scale, onto=False)
    return y_TN


def add_product(y_TN: Tensor, x_TD: Tensor, w_DN: Tensor, scale: float = 1.0) -> None:
    """Add a scaled product to `y_TN`."""
    if y_TN.stride(1) == 1 or y_TN.shape[1] == 1:
        _run(y_TN, x_TD, w_DN, None, scale, onto=True)
    else:
        y_TN += multiply(x_TD, w_DN, scale=scale)


def _run(
    y_TN: Tensor,
    x_TD: Tensor,
    w_DN: Tensor,
    bias_N: Tensor | None,
    scale: float,
    *,
    onto: bool,
) -> None:
    (rows, inputs), outputs = x_TD.shape, w_DN.shape[1]
    tensors = [y_TN, x_TD, w_DN] if bias_N is None else [y_TN, x_TD, w_DN, bias_N]
    shapes_fit = (
        w_DN.shape[0] == inputs
        and y_TN.shape == (rows, outputs)
        and (bias_N is None or len(bias_N) == outputs)
    )
    # C checks nothing
    if not shapes_fit or any(t.dtype != torch.float32 or not t.is_cpu for t in tensors):
        raise ValueError(
            f"no such product: {[(tuple(t.shape), t.dtype, t.device.type) for t in tensors]}"
        )
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    bias_N = None if bias_N is None else bias_N.contiguous()
    given = c.Matrices(
        x=x_TD.data_ptr(),
        w=w_DN.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        y=y_TN.data_ptr(),
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        x_row=x_TD.stride(0),
        w_input=w_DN.stride(0),
        w_output=w_DN.stride(1),
        y_row=y_TN.stride(0),
        scale=scale,
        onto=onto,
    )
    team = _team()
    if team.library.matrices(ctypes.byref(given), team.address):
        raise MemoryError("no memory for a product")


def _team() -> Team:
    library = load()
    assert library is not None  # callers have checked
    teams: dict[tuple[Library, int], Team] | None = getattr(_local, "teams", None)
    if teams is None:
        teams = _local.teams = {}
    key = library, torch.get_num_threads()
    if key not in teams:
        teams[key] = Team(*key)
    return teams[key]
