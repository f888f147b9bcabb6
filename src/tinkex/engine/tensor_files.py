"""The safetensors format, written piece by piece with numpy alone.

The library writes a file in one call, from memory that shares nothing, and to a path only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from tinkex.types.tensors import Array

PIECE = 1 << 23
"""The most bytes that are written at a time."""


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str],
    wrote: Callable[[int], object] | None = None,
) -> None:
    """Write contiguous tensors as float32, in the order given.

    `wrote` is called with the number of bytes of each piece.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.size
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = tensor.astype("<f4", copy=False).data.cast("B")
        for start in range(0, len(data), PIECE):
            count = file.write(data[start : start + PIECE])
            if wrote is not None:
                wrote(count)
