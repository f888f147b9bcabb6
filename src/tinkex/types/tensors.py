"""TensorData: a tensor of the protocol, kept in one numpy array."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tinkex.types.record import Fixed, is_same, put

if TYPE_CHECKING:
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]
"""The kinds of numbers that tensors are sent as."""
Array: TypeAlias = npt.NDArray[Any]
"""A numpy array."""

MAX_CELLS = 1 << 28
"""Most cells a sparse tensor may stand for: it is read as a dense one."""
MAX_COLUMNS = 1 << 16
"""Most columns of a sparse tensor: they cost its sender nothing, and its reader memory."""
MAX_DIMENSIONS = 32
MAX_LENGTH = 1 << 40
DTYPES: dict[str, npt.DTypeLike] = {"int64": np.int64, "float32": np.float32}


def dtype_of(array: Array | np.dtype[Any], *, warn: bool = False) -> TensorDtype:
    """The wire dtype an array is sent as: floats as float32; integers and booleans as int64.

    Args:
        array: An array, or a numpy dtype.
        warn: Say so, as a `UserWarning`, when values may be rounded or wrap around.

    Returns:
        The dtype.

    Raises:
        ValueError: It cannot be sent: complex numbers, text, objects.

    Example:
        >>> dtype_of(np.zeros(3)), dtype_of(np.array([True, False]))
        ('float32', 'int64')
    """
    dtype = array if isinstance(array, np.dtype) else array.dtype
    if dtype.kind not in "fiub":
        raise ValueError(f"a tensor of dtype {dtype} cannot be sent; use floats or integers")
    if warn and (lost := check_precision_loss(dtype)) is not None:
        warnings.warn(lost[1], UserWarning, stacklevel=2)
    return "float32" if dtype.kind == "f" else "int64"


def check_precision_loss(array: Array | np.dtype[Any]) -> tuple[TensorDtype, str] | None:
    """Return the wire dtype and the reason if sending an array loses precision, else None.

    Args:
        array: The array.

    Returns:
        The dtype and the reason, or None.

    Example:
        >>> check_precision_loss(np.zeros(3)), check_precision_loss(np.zeros(3, dtype=np.float32))
        (('float32', 'float64 is sent as float32: values keep about seven digits'), None)
    """
    dtype = array if isinstance(array, np.dtype) else array.dtype
    if dtype.kind == "f" and dtype.itemsize > 4:
        return "float32", f"{dtype} is sent as float32: values keep about seven digits"
    if dtype == np.uint64:
        return "int64", "uint64 is sent as int64: values of 2**63 and more wrap around"
    return None


def _pad(value: Any, dtype: np.dtype[Any]) -> Any:
    """The value of unlisted cells, if a tensor of that dtype can hold it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"pad_value must be a number, got {type(value).__name__}")
    if dtype.kind in "iu" and value != int(value):
        raise TypeError(f"pad_value of an integer tensor must be an integer, got {value!r}")
    return value


def packed_list(values: list[Any], code: str, dtype: npt.DTypeLike) -> Array | None:
    """Return a flat list of numbers as an array, or None for anything else.

    This takes a third of numpy's time.
    """
    if not values or type(values[0]) not in (int, float):
        return None
    try:
        return np.frombuffer(bytearray(struct.pack(f"{len(values)}{code}", *values)), dtype=dtype)
    except (struct.error, OverflowError, TypeError):
        return None


def _numbers(values: Any, dtype: TensorDtype, name: str) -> Array:
    """Numbers that came as JSON, as an array that holds each of them."""
    rule = f"{name} must be a list of numbers that {dtype} can hold"
    if not isinstance(values, list):
        raise ValueError(f"{rule}, got {type(values).__name__}")
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{rule}, and rectangular if it is nested") from None
    if array.size == 0:
        return np.zeros(0, dtype=DTYPES[dtype])
    if array.dtype.kind not in ("if" if dtype == "float32" else "i"):
        raise ValueError(rule)
    with np.errstate(over="ignore"):
        narrow: Array = array.astype(DTYPES[dtype])
    if dtype == "float32" and not np.isfinite(narrow).all():
        raise ValueError(rule)
    return narrow


def _shape_of(tensor: TensorData) -> list[int]:
    return [tensor.values.size] if tensor.shape is None else tensor.shape


class TensorData(Fixed):
    """A dense or CSR-sparse tensor of int64 or float32.

    `data` reads as a flat list for convenience; `to_numpy()` is the fast way in and out.

    Example:
        >>> TensorData.from_numpy(np.array([[1.0, 2.0]])).shape
        [1, 2]
    """

    __slots__ = ("csr", "dtype", "shape", "values")
    FIELDS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")

    dtype: TensorDtype
    shape: list[int] | None
    values: Array
    """The stored values as a flat array, without a copy."""
    csr: tuple[Array, Array] | None
    """Row starts and columns as arrays, or None when dense."""

    def __init__(
        self,
        data: Sequence[float] | Array | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | Array | None = None,
        sparse_col_indices: Sequence[int] | Array | None = None,
    ) -> None:
        if dtype is None:
            raise TypeError("TensorData needs a dtype: 'int64' or 'float32'")
        if dtype not in DTYPES:
            raise ValueError(f"unknown tensor dtype {dtype!r}; use 'int64' or 'float32'")
        try:
            values = np.asarray([] if data is None else data, dtype=DTYPES[dtype]).reshape(-1)
        except OverflowError:
            raise ValueError(f"data must be numbers that {dtype} can hold") from None
        put(self, "values", values)
        put(self, "dtype", dtype)
        put(self, "shape", None if shape is None else [int(n) for n in shape])
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise ValueError(
                "a sparse tensor needs both sparse_crow_indices and sparse_col_indices"
            )
        csr = None
        if sparse_crow_indices is not None:
            rows, columns = (sparse_crow_indices, sparse_col_indices)
            csr = (np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64))
        put(self, "csr", csr)
        if self.shape is not None and len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"tensor shape has {len(self.shape)} dimensions; at most {MAX_DIMENSIONS} are "
                "allowed"
            )
        if self.shape is not None and any(n < 0 for n in self.shape):
            raise ValueError(f"tensor shape {self.shape} has a negative dimension")
        if csr is not None:
            self._check_sparse(*csr)
        else:
            # beside a dimension of 0
            if self.shape is not None and any(n > MAX_LENGTH for n in self.shape):
                raise ValueError(f"tensor shape {self.shape} has a dimension that is too large")
            if self.shape is not None and math.prod(self.shape) != values.size:
                raise ValueError(f"tensor has {values.size} values but shape {self.shape}")

    def _check_sparse(self, crow: Array, col: Array) -> None:
        if self.shape is None or len(self.shape) != 2:
            raise ValueError("a sparse tensor needs a two-dimensional shape")
        rows, cols = self.shape
        if rows * cols > MAX_CELLS or cols > MAX_COLUMNS:
            most = f"at most {MAX_CELLS} cells and {MAX_COLUMNS} columns"
            raise ValueError(f"a sparse tensor of shape {self.shape} is too large: {most}")
        well_formed = (
            crow.ndim == col.ndim == 1
            and crow.size == rows + 1
            and crow[0] == 0
            and crow[-1] == col.size == self.values.size
            and bool(np.all(np.diff(crow) >= 0))
            and (col.size == 0 or (int(col.min()) >= 0 and int(col.max()) < cols))
        )
        if not well_formed:
            raise ValueError(f"malformed CSR indices for a sparse tensor of shape {self.shape}")

    @property
    def data(self) -> list[Any]:
        """The values as a flat list (of the stored cells, if sparse)."""
        return cast("list[Any]", self.values.tolist())

    @property
    def is_sparse(self) -> bool:
        """True if the tensor is stored as compressed sparse rows."""
        return self.csr is not None

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """Row starts of a sparse tensor."""
        return None if self.csr is None else cast("list[int]", self.csr[0].tolist())

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """Column indices of a sparse tensor."""
        return None if self.csr is None else cast("list[int]", self.csr[1].tolist())

    @property
    def nbytes(self) -> int:
        """Size of the payload on the wire, as the protocol estimates it."""
        return self.values.nbytes + sum(array.nbytes for array in self.csr or ())

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        """Wrap an array; no copy when it already is contiguous int64 or float32.

        Args:
            array: The array.

        Returns:
            The tensor.

        Example:
            >>> TensorData.from_numpy(np.array([0.5, 1.0]))
            TensorData([0.5, 1. ], float32, shape=[2])
        """
        dtype = dtype_of(array)
        values = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1)
        return cls._dense(values, dtype, list(array.shape))

    @classmethod
    def _dense(cls, values: Array, dtype: TensorDtype, shape: list[int]) -> Self:
        """Wrap an array of the right dtype and size without checking it."""
        tensor = cls.__new__(cls)
        put(tensor, "values", values)
        put(tensor, "dtype", dtype)
        put(tensor, "shape", shape)
        put(tensor, "csr", None)
        return tensor

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Take a torch tensor of any device; half types are widened.

        Args:
            tensor: The tensor.

        Returns:
            The tensor, on the CPU.

        Example:
            >>> import torch
            >>> TensorData.from_torch(torch.tensor([0.5, 1.0], dtype=torch.bfloat16)).dtype
            'float32'
        """
        if tensor.requires_grad:
            tensor = tensor.detach()
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()
        return cls.from_numpy(tensor.numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: float = 0) -> Self:
        """Copy a 2-D torch tensor as compressed sparse rows if that is smaller, else as it is.

        Args:
            tensor: Any torch tensor; one that is not two-dimensional stays dense.
            pad_value: The value of the cells that need not be listed.

        Returns:
            The tensor.

        Example:
            >>> import torch
            >>> weights = torch.zeros(4, 16)
            >>> weights[0, 3] = 1.0
            >>> TensorData.from_torch_sparse(weights)
            TensorData([1.], float32, shape=[4, 16], sparse)
        """
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:
            tensor = tensor.float()
        array = tensor.numpy()
        pad = _pad(pad_value, array.dtype)
        if array.ndim != 2:
            return cls.from_numpy(array)
        listed = array != pad
        count = int(np.count_nonzero(listed))
        rows, cols = array.shape
        if rows + 1 + 2 * count >= rows * cols or cols > MAX_COLUMNS:
            return cls.from_numpy(array)
        starts = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.count_nonzero(listed, axis=1), out=starts[1:])
        return cls(array[listed], dtype_of(array), array.shape, starts, np.nonzero(listed)[1])

    @classmethod
    def from_any(cls, value: Any, dtype: TensorDtype | None = None) -> Self:
        """Turn a TensorData, torch tensor, numpy array or (nested) list into TensorData.

        Args:
            value: What there is.
            dtype: What it is sent as; by its own kind by default.

        Returns:
            The tensor.

        Raises:
            ValueError: It is ragged, or holds fractions where integers are wanted.

        Example:
            >>> TensorData.from_any([[1, 2], [3, 4]], "int64").shape
            [2, 2]
        """
        if isinstance(value, cls):
            return value
        if hasattr(value, "detach"):
            return cls.from_torch(value)
        if dtype is not None and type(value) is list:
            flat = packed_list(value, "q" if dtype == "int64" else "f", DTYPES[dtype])
            if flat is not None:
                return cls._dense(flat, dtype, [flat.size])
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"a tensor must be rectangular: {error}") from None
        if array.size == 0 and not isinstance(value, np.ndarray):
            array = array.astype(DTYPES[dtype or "float32"])
        elif dtype is not None and array.dtype.kind in "iubf" and not isinstance(value, np.ndarray):
            if (
                dtype == "int64"
                and array.dtype.kind == "f"
                and not np.all(array == np.floor(array))
            ):
                raise ValueError("expected integers")
            array = array.astype(DTYPES[dtype])
        return cls.from_numpy(array)

    def to_numpy(self, pad_value: float = 0) -> Array:
        """The dense array; cells that a sparse tensor does not list read as `pad_value`.

        Args:
            pad_value: What stands in cells that a sparse tensor does not list.

        Returns:
            The array; without a copy where the tensor is dense.

        Example:
            >>> output = {
            ...     "logprobs": TensorData([-0.5, -0.25], "float32", [2])
            ... }  # one of result.loss_fn_outputs
            >>> float(output["logprobs"].to_numpy().mean())
            -0.375
        """
        if self.csr is None or self.shape is None:
            return self.values if self.shape is None else self.values.reshape(self.shape)
        dense = np.full(self.shape, _pad(pad_value, self.values.dtype), dtype=self.values.dtype)
        crow, col = self.csr
        rows = np.repeat(np.arange(self.shape[0]), np.diff(crow))
        dense[rows, col] = self.values
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        """The dense tensor, as a copy.

        Args:
            pad_value: What stands in cells that a sparse tensor does not list.

        Returns:
            The tensor.

        Example:
            >>> TensorData([1, 2, 3, 4], "int64", [2, 2]).to_torch()
            tensor([[1, 2],
                    [3, 4]])
        """
        import torch

        return torch.from_numpy(np.array(self.to_numpy(pad_value)))

    def tolist(self, pad_value: float = 0) -> list[Any]:
        """Like `to_torch`, as nested lists.

        Example:
            >>> TensorData([1, 2, 3, 4], "int64", [2, 2]).tolist()
            [[1, 2], [3, 4]]
        """
        return cast("list[Any]", self.to_numpy(pad_value).tolist())

    def to_wire(self) -> dict[str, Any]:
        """JSON form.

        Example:
            >>> TensorData([1, 2], "int64", [2]).to_wire()
            {'data': [1, 2], 'dtype': 'int64', 'shape': [2]}
        """
        wire: dict[str, Any] = {"data": self.data, "dtype": self.dtype}
        if self.shape is not None:
            wire["shape"] = self.shape
        if self.csr is not None:
            wire["sparse_crow_indices"] = self.sparse_crow_indices
            wire["sparse_col_indices"] = self.sparse_col_indices
        return wire

    @classmethod
    def _read(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise ValueError(
                f"a tensor must be an object with data and dtype, got {type(value).__name__}"
            )
        dtype, shape = value.get("dtype"), value.get("shape")
        if dtype != "int64" and dtype != "float32":
            raise ValueError(f"unknown tensor dtype {dtype!r}; use 'int64' or 'float32'")
        if shape is not None and not (
            isinstance(shape, list) and all(type(n) is int for n in shape)
        ):
            raise ValueError("bad tensor: shape must be a list of whole numbers")
        try:
            data = _numbers(value.get("data", []), dtype, "data")
            indices = {
                name: _numbers(value[name], "int64", name)
                for name in ("sparse_crow_indices", "sparse_col_indices")
                if value.get(name) is not None
            }
            return cls(data, dtype, shape, **indices)
        except ValueError as error:
            raise ValueError(f"bad tensor: {error}") from None

    def _full(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def _state(self) -> tuple[Any, ...]:
        return (self.values, self.dtype, self.shape, *(self.csr or (None, None)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TensorData):
            return NotImplemented
        mine, theirs = (
            (one.dtype, _shape_of(one), one.values, *(one.csr or ())) for one in (self, other)
        )
        return len(mine) == len(theirs) and all(map(is_same, mine, theirs))

    def __hash__(self) -> int:
        return hash((self.dtype, self.is_sparse, *_shape_of(self)))

    def __repr__(self) -> str:
        shape = _shape_of(self)
        preview = np.array2string(self.values[:6], separator=", ", threshold=6)
        sparse = ", sparse" if self.is_sparse else ""
        return (
            f"TensorData({preview}{'…' if self.values.size > 6 else ''}, {self.dtype}, "
            f"shape={shape}{sparse})"
        )
