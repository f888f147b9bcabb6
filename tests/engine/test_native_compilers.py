"""The C step as several compilers make it: a row gets the same bits alone and among others."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tinkex.engine.native import library

pytestmark = pytest.mark.skipif(not list(library.compilers()), reason="there is no C compiler")
X86 = platform.machine() in ("x86_64", "AMD64")
SPLITS = "--param=avoid-fma-max-bits=512"
"""What gcc sets where it tunes for some processors. It then splits sums like `a * b + c` in some loops alone."""


def build(command: list[str], target: Path) -> Path:
    subprocess.run([*command, "-o", str(target), str(library.SOURCE), "-lm"], check=True, capture_output=True)
    return target


def rows_that_differ(path: Path) -> list[int]:
    """Numbers of rows that are multiplied together and get other bits than they get alone."""
    loaded, random = library.Library(path), np.random.default_rng(0)
    inputs, panels, most = 77, 3, 45
    weight, x = (random.normal(size=size).astype(np.float32) for size in ((panels, inputs, 16), (most, inputs)))
    linear = library.Linear(weight.ctypes.data, None, inputs, 1, (library.Int * library.PARTS)(panels * 16))
    team = loaded.team_new(1)

    def multiplied(rows: int, first: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        y = np.empty((rows, panels * 16), np.float32)
        loaded.product(linear, x[first:].ctypes.data, rows, y.ctypes.data, team)
        return y

    alone = np.concatenate([multiplied(1, row) for row in range(most)])
    found = [rows for rows in range(1, most + 1) if multiplied(rows).tobytes() != alone[:rows].tobytes()]
    loaded.team_free(team)
    return found


@pytest.mark.skipif(not X86, reason="the setting is one of x86")
@pytest.mark.parametrize("tuning", ["native", "haswell"])
def test_a_compiler_that_may_split_multiply_adds_changes_no_row(tmp_path: Path, tuning: str) -> None:
    compiler = next(iter(library.compilers()))
    command = [*compiler, *library.FLAGS, f"-march={tuning}", SPLITS]
    try:
        path = build(command, tmp_path / "step.so")
    except subprocess.CalledProcessError:
        pytest.skip(f"{Path(compiler[0]).name} does not know {SPLITS}")
    assert not rows_that_differ(path)
