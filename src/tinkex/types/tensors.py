"""TensorData: a tensor as the protocol carries it, kept in one numpy array from the first touch to the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tinkex.types.record import pydantic_schema

if TYPE_CHECKING:
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]
Array: TypeAlias = npt.NDArray[Any]

MAX_CELLS = 1 << 28
"""Most cells a sparse tensor may stand for: it is read as a dense one."""
DTYPES: dict[str, npt.DTypeLike] = {"int64": np.int64, "float32": np.float32}


def dtype_of(array: Array) -> TensorDtype:
    """The wire dtype an array is sent as: floats as float32; integers and booleans as int64."""
    if array.dtype.kind == "f":
        return "float32"
    if array.dtype.kind in "iub":
        return "int64"
    raise ValueError(f"a tensor of dtype {array.dtype} cannot be sent; use floats or integers")


class TensorData:
    """A dense or CSR-sparse tensor of int64 or float32.

    `data` reads as a flat list for convenience; `to_numpy()` is the fast way in and out.

    Example:
        >>> TensorData.from_numpy(np.array([[1.0, 2.0]])).shape
        [1, 2]
    """

    __slots__ = ("_col", "_crow", "_values", "dtype", "shape")

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
        values = np.asarray([] if data is None else data, dtype=DTYPES[dtype]).reshape(-1)
        self._values: Array = values
        self.dtype: TensorDtype = dtype
        self.shape: list[int] | None = None if shape is None else [int(n) for n in shape]
        self._crow = None if sparse_crow_indices is None else np.asarray(sparse_crow_indices, dtype=np.int64)
        self._col = None if sparse_col_indices is None else np.asarray(sparse_col_indices, dtype=np.int64)
        self._check()

    def _check(self) -> None:
        if (self._crow is None) != (self._col is None):
            raise ValueError("a sparse tensor needs both sparse_crow_indices and sparse_col_indices")
        if self.shape is not None and any(n < 0 for n in self.shape):
            raise ValueError(f"tensor shape {self.shape} has a negative dimension")
        if self._crow is None or self._col is None:
            if self.shape is not None and math.prod(self.shape) != self._values.size:
                raise ValueError(f"tensor has {self._values.size} values but shape {self.shape}")
            return
        if self.shape is None or len(self.shape) != 2:
            raise ValueError("a sparse tensor needs a two-dimensional shape")
        rows, cols = self.shape
        if rows * cols > MAX_CELLS:
            raise ValueError(f"a sparse tensor of shape {self.shape} is too large: at most {MAX_CELLS} cells")
        well_formed = (
            self._crow.size == rows + 1
            and self._crow[0] == 0
            and self._crow[-1] == self._col.size == self._values.size
            and bool(np.all(np.diff(self._crow) >= 0))
            and (self._col.size == 0 or (int(self._col.min()) >= 0 and int(self._col.max()) < cols))
        )
        if not well_formed:
            raise ValueError(f"malformed CSR indices for a sparse tensor of shape {self.shape}")

    @property
    def data(self) -> list[Any]:
        """The values as a flat list (of the stored cells, if sparse)."""
        return cast("list[Any]", self._values.tolist())

    @property
    def values(self) -> Array:
        """The stored values as a flat array, without a copy."""
        return self._values

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is stored as compressed sparse rows."""
        return self._crow is not None

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """Row starts of a sparse tensor."""
        return None if self._crow is None else cast("list[int]", self._crow.tolist())

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """Column indices of a sparse tensor."""
        return None if self._col is None else cast("list[int]", self._col.tolist())

    @property
    def csr(self) -> tuple[Array, Array] | None:
        """Row starts and columns as arrays, or None when dense."""
        return None if self._crow is None or self._col is None else (self._crow, self._col)

    @property
    def nbytes(self) -> int:
        """Size of the payload on the wire, as the protocol estimates it."""
        return self._values.nbytes + sum(index.nbytes for index in (self._crow, self._col) if index is not None)

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        """Wrap an array; no copy when it already is contiguous int64 or float32."""
        return cls(data=np.ascontiguousarray(array), dtype=dtype_of(array), shape=array.shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Copy a torch tensor of any device; half types are widened."""
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()
        return cls.from_numpy(tensor.numpy())

    @classmethod
    def from_any(cls, value: Any, dtype: TensorDtype | None = None) -> Self:
        """Turn a TensorData, torch tensor, numpy array or (nested) list into TensorData."""
        if isinstance(value, cls):
            return value
        if hasattr(value, "detach"):
            return cls.from_torch(value)
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"a tensor must be rectangular: {error}") from None
        if array.size == 0 and not isinstance(value, np.ndarray):
            array = array.astype(DTYPES[dtype or "float32"])
        elif dtype is not None and array.dtype.kind in "iubf" and not isinstance(value, np.ndarray):
            if dtype == "int64" and array.dtype.kind == "f" and not np.all(array == np.floor(array)):
                raise ValueError("expected integers")
            array = array.astype(DTYPES[dtype])
        return cls.from_numpy(array)

    def to_numpy(self, pad_value: float = 0) -> Array:
        """The dense array; cells that a sparse tensor does not list read as `pad_value`."""
        if self._crow is None or self._col is None or self.shape is None:
            return self._values if self.shape is None else self._values.reshape(self.shape)
        dense = np.full(self.shape, pad_value, dtype=self._values.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self._crow))
        dense[rows, self._col] = self._values
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        """The dense tensor, as a copy."""
        import torch

        return torch.from_numpy(np.array(self.to_numpy(pad_value)))

    def tolist(self, pad_value: float = 0) -> list[Any]:
        """The dense tensor as nested lists."""
        return cast("list[Any]", self.to_numpy(pad_value).tolist())

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        wire: dict[str, Any] = {"data": self.data, "dtype": self.dtype}
        if self.shape is not None:
            wire["shape"] = self.shape
        if self._crow is not None:
            wire["sparse_crow_indices"] = self.sparse_crow_indices
            wire["sparse_col_indices"] = self.sparse_col_indices
        return wire

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        if not isinstance(value, dict):
            raise ValueError(f"a tensor must be an object with data and dtype, got {type(value).__name__}")
        data, dtype = value.get("data", []), value.get("dtype")
        if dtype not in DTYPES:
            raise ValueError(f"unknown tensor dtype {dtype!r}; use 'int64' or 'float32'")
        try:
            array = np.asarray(data)
            if array.size and array.dtype.kind not in ("iuf" if dtype == "float32" else "iu"):
                raise ValueError(f"expected {dtype} numbers")
            return cls(
                data=array,
                dtype=dtype,
                shape=value.get("shape"),
                sparse_crow_indices=value.get("sparse_crow_indices"),
                sparse_col_indices=value.get("sparse_col_indices"),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"bad tensor: {error}") from None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        return self.to_wire()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    def __repr__(self) -> str:
        shape = self.shape if self.shape is not None else [self._values.size]
        preview = np.array2string(self._values[:6], separator=", ", threshold=6)
        sparse = ", sparse" if self.is_sparse else ""
        return f"TensorData({preview}{'…' if self._values.size > 6 else ''}, {self.dtype}, shape={shape}{sparse})"

    def __reduce__(self) -> Any:
        return (type(self), (self._values, self.dtype, self.shape, self._crow, self._col))
