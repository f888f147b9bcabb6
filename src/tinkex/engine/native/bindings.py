"""The structures and functions of `step.c`, as ctypes sees them, and the threads that compute."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any


class Team:
    """Threads that compute in C, for one caller at a time; they end with this object."""

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self.threads = library, threads
        self._address, self._process = self._gather(), os.getpid()

    @property
    def address(self) -> int:
        """Return the address of the threads.

        A forked child has none of its parent's threads and would wait for them forever, so it gets
        its own.
        """
        if self._process != os.getpid():
            self._address, self._process = self._gather(), os.getpid()
        return self._address

    def _gather(self) -> int:
        team: int | None = self.library.team_new(self.threads)
        if team is None:
            raise MemoryError("no memory for a team of threads")
        dismissal = weakref.finalize(self, _dismiss, self.library, team, os.getpid())
        # a daemon thread may be in a call at exit, and waiting for it would never end
        dismissal.atexit = False
        return team


def _dismiss(library: Library, team: int, process: int) -> None:
    if process == os.getpid():  # other processes have no such threads
        library.team_free(team)


PANEL = 16
"""Outputs that lie side by side; as in step.c."""
PARTS = 3
Pointer, Int, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Linear(ctypes.Structure):
    """A linear layer: packed weights, a bias or none, and the projections it consists of."""

    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("inputs", Int),
        ("parts", Int),
        ("sizes", Int * PARTS),
    )


class Layer(ctypes.Structure):
    """A layer; norms that a family does not have are null."""

    _fields_ = (
        *(
            (f"{name}_norm", Pointer)
            for name in ("input", "mlp", "q", "k", "post_attention", "post_mlp")
        ),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("rotary", Int),
        ("window", Int),
        ("scale", Real),
        ("softcap", Real),
    )


class Model(ctypes.Structure):
    """A model, and the address of its cache of keys and values."""

    _fields_ = (
        *(
            (name, Int)
            for name in ("layers", "hidden", "heads", "groups", "channels", "mlp", "vocab", "gelu")
        ),
        *((name, Int) for name in ("blocks", "block", "kinds")),
        *((name, Real) for name in ("eps", "embed_scale", "logit_cap")),
        *((name, Pointer) for name in ("embed", "norm", "frequencies")),
        ("head", Linear),
        ("layer", ctypes.POINTER(Layer)),
        ("cache", Pointer),
    )


class Factors(ctypes.Structure):
    """An adapter's factors for one linear layer; `a` is null if it has none."""

    _fields_ = (("a", Pointer), ("b", Pointer * PARTS), ("rank", Int))


class Span(ctypes.Structure):
    """Rows that have the same adapter."""

    _fields_ = (("start", Int), ("stop", Int), ("factors", ctypes.POINTER(Factors)))


class Step(ctypes.Structure):
    """The rows of a step, and where their results go."""

    _fields_ = (
        *((name, Int) for name in ("rows", "spans", "width")),
        *((name, Pointer) for name in ("tokens", "positions", "tables")),
        ("span", ctypes.POINTER(Span)),
        ("hidden", Pointer),
        ("logits", Pointer),
    )


class Matrices(ctypes.Structure):
    """A product of matrices in row, column or transposed layout."""

    _fields_ = (
        *((name, Pointer) for name in ("x", "w", "bias", "y")),
        *(
            (name, Int)
            for name in ("rows", "inputs", "outputs", "x_row", "w_input", "w_output", "y_row")
        ),
        ("scale", ctypes.c_double),
        ("onto", Int),
    )


class Library:
    """The functions of a compiled `step.c`. Calls release the interpreter lock."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.team_new = _function(library.team_new, Pointer, ctypes.c_int)
        self.team_free = _function(library.team_free, None, Pointer)
        self.run_rows = _function(
            library.run_rows, ctypes.c_int, ctypes.POINTER(Model), ctypes.POINTER(Step), Pointer
        )
        self.draw = _function(library.draw, ctypes.c_int, Pointer, Int, Int, *([Pointer] * 5))
        self.share = Int.in_dll(library, "share")
        """Multiplications per thread; a smaller piece of work is not worth waking a thread."""
        self.product = _function(
            library.product, None, ctypes.POINTER(Linear), Pointer, Int, Pointer, Pointer
        )
        self.matrices = _function(library.matrices, ctypes.c_int, ctypes.POINTER(Matrices), Pointer)


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
