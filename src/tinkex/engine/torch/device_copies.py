"""Copies between host and device for which neither waits.

A plain copy waits until the device has done all its earlier work. These are queued; a mark says
when a copy to the host is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.types.tensors import Array

STAGING = 1 << 22
"""The numbers that go to the host at a time while the device works on."""


def to_device(
    values: Array
    | Sequence[int]
    | Sequence[float]
    | Sequence[Sequence[int]]
    | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Copy numbers of the host to the device."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Return a copy that is complete once the device has reached it."""
    return x.to("cpu", non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that follows all present work of the device; None on a CPU."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host_beside(x: Tensor, ready: torch.cuda.Event | None) -> Tensor:
    """Copy a flat tensor to the host, on a thread that is not the engine's.

    The device goes on meanwhile. `ready` is a mark that was made with the tensor, which is not read
    before.
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
    """Return the stream for all such copies.

    PyTorch hands out a few of each priority in turn; no other code asks for this priority.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
