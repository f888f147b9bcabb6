"""Copies between host and device for which neither waits.

A plain copy waits until the device has done all that it was given before. These are put in line;
what goes to the host is looked at when a mark says that it is there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.types.tensors import Array

STAGING = 1 << 22
"""How many numbers go to the host at a time while the device works on."""


def to_device(
    values: Array
    | Sequence[int]
    | Sequence[float]
    | Sequence[Sequence[int]]
    | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Numbers of the host, on the device."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy that is complete once the device has come so far."""
    return x.to("cpu", non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """To wait until the device has done all it has been given so far; None where nothing is ever
    outstanding.
    """
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host_beside(x: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
    """A flat tensor on the host, for a thread that is not the engine's; whatever the device does
    meanwhile goes on.

    `ready` is a mark that was made when the tensor was: it is not read before.
    """
    if ready is None:
        return x
    stream, host = _stream(x.device), torch.empty(x.shape, dtype=x.dtype)
    staging = torch.empty(min(STAGING, x.numel()), dtype=x.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        for begin in range(0, x.numel(), STAGING):
            part = x[begin : begin + STAGING]
            staging[: part.numel()].copy_(part, non_blocking=True)
            stream.synchronize()
            host.numpy()[begin : begin + STAGING] = staging.numpy()[: part.numel()]
    return host


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all such copies. PyTorch hands out a few of each priority in turn: of this one nobody
    else has any.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
