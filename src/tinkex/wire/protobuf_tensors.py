"""Arrays and tensors in protobuf: packed little-endian bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinkex.types.tensors import Array, TensorData

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def packed(array: Array | Sequence[float | None], dtype: str) -> bytes:
    """Return little-endian bytes of an array, or of a list in which None means NaN."""
    plain = np.ascontiguousarray(array, dtype=dtype)
    return plain.tobytes() if sys.byteorder == "little" else plain.astype(f"<{dtype}").tobytes()


def unpacked(body: bytes, dtype: str, what: str) -> Array:
    """Return the array of raw bytes, without a copy."""
    size = np.dtype(dtype).itemsize
    if len(body) % size:
        raise ValueError(
            f"malformed protobuf: {what} has {len(body)} bytes, not a multiple of {size}"
        )
    return np.frombuffer(body, dtype=np.dtype(dtype).newbyteorder("<"))


def put_tensor(target: Any, tensor: TensorData) -> None:
    """Write a tensor into a Tensor message."""
    values = packed(tensor.values, tensor.dtype)
    if (csr := tensor.csr) is not None:
        target.sparse_csr.values = values
        target.sparse_csr.crow_indices = packed(csr[0], "int64")
        target.sparse_csr.col_indices = packed(csr[1], "int64")
    else:
        target.dense = values
    target.dtype = FLOAT32 if tensor.dtype == "float32" else INT64
    target.shape.extend(tensor.shape if tensor.shape is not None else [tensor.values.size])


def get_values(body: bytes, dtype: int, what: str) -> Array:
    """Read raw values as int64 or float32, widening the two narrower kinds."""
    match dtype:
        case 1:
            return unpacked(body, "float32", what)
        case 2:
            return unpacked(body, "int64", what)
        case 3:
            return unpacked(body, "int32", what).astype(np.int64)
        case 4:
            return (unpacked(body, "uint16", what).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"malformed protobuf: {what} has no known dtype")


def get_tensor(source: Any, what: str) -> TensorData:
    """Read a Tensor message."""
    encoding = source.WhichOneof("encoding")
    if encoding is None:
        raise ValueError(f"malformed protobuf: {what} has no values")
    shape = list(source.shape)
    raw = source.dense if encoding == "dense" else source.sparse_csr.values
    values = get_values(raw, source.dtype, what)
    dtype = "float32" if values.dtype == np.float32 else "int64"
    crow = col = None
    if encoding != "dense":
        crow = unpacked(source.sparse_csr.crow_indices, "int64", what)
        col = unpacked(source.sparse_csr.col_indices, "int64", what)
    try:
        return TensorData(values, dtype, shape or None, crow, col)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"malformed protobuf: {what}: {error}") from None
