"""Copies between host and device for which neither waits.

A plain copy waits until the device has done all that it was given before. These are put in line; what goes to the host
is looked at when a mark says that it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.types.tensors import Array


def to_device(
    values: Array | Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Numbers of the host, on the device."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy that is complete once the device has come so far."""
    return x.to("cpu", non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """To wait until the device has done all it has been given so far; None where nothing is ever outstanding."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
