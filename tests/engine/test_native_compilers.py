"""The C step as several compilers make it: a row gets the same bits alone and among others."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinkex.engine.native import bindings, library

pytestmark = pytest.mark.skipif(not list(library.compilers()), reason="there is no C compiler")
X86 = platform.machine() in ("x86_64", "AMD64")
SPLITS = "--param=avoid-fma-max-bits=512"
"""What gcc sets where it tunes for some processors. It then splits sums like `a * b + c` in some
loops alone."""
COMPILERS = ("gcc-11", "gcc-12", "gcc", "clang-16", "clang-19", "zig")
AVX512 = {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}
ICELAKE = AVX512 | {
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_vnni",
    "avx512_bitalg",
    "avx512_vpopcntdq",
    "vaes",
    "gfni",
}
PROCESSORS = {
    "haswell": {"avx2", "fma", "bmi2"},
    "skylake-avx512": AVX512,
    "icelake-server": ICELAKE,
    "sapphirerapids": ICELAKE | {"avx512_bf16", "avx512_fp16"},
    "znver4": ICELAKE | {"avx512_bf16", "sse4a", "clzero"},
}
"""With what a processor has to have to run code for them."""
HOT = """
#include "{source}"
void hot_products(int64_t rows, int panels, const float *x, int64_t stride,
                  const float *const *weight, int64_t inputs,
                  vec sums[ROWS][2][VECTORS]) {{
    multiply(rows, panels, x, stride, weight, inputs, sums);
}}
void hot_exponential(float *x) {{ store(x, exponential(load(x))); }}
"""


def build(command: list[str], target: Path) -> Path:
    subprocess.run(
        [*command, "-o", str(target), str(library.SOURCE), "-lm"], check=True, capture_output=True
    )
    return target


def rows_that_differ(path: Path) -> list[int]:
    """Numbers of rows that are multiplied together and get other bits than they get alone."""
    loaded, random = bindings.Library(path), np.random.default_rng(0)
    inputs, panels, most = 77, 3, 45
    weight, x = (
        random.normal(size=size).astype(np.float32)
        for size in ((panels, inputs, 16), (most, inputs))
    )
    linear = bindings.Linear(
        weight.ctypes.data, None, inputs, 1, (bindings.Int * bindings.PARTS)(panels * 16)
    )
    team = loaded.team_new(1)

    def multiplied(rows: int, first: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        y = np.empty((rows, panels * 16), np.float32)
        loaded.product(linear, x[first:].ctypes.data, rows, y.ctypes.data, team)
        return y

    alone = np.concatenate([multiplied(1, row) for row in range(most)])
    found = [
        rows for rows in range(1, most + 1) if multiplied(rows).tobytes() != alone[:rows].tobytes()
    ]
    loaded.team_free(team)
    return found


def counts(command: list[str], directory: Path) -> dict[str, dict[str, int]]:
    """Count additions, multiplications and multiply-adds of the hot functions."""
    source = directory / "hot.c"
    source.write_text(HOT.format(source=library.SOURCE))
    options = [option for option in command if option != "-shared"]
    subprocess.run(
        [*options, "-S", "-o", str(directory / "hot.s"), str(source)],
        check=True,
        capture_output=True,
    )
    text = (directory / "hot.s").read_text(encoding="utf-8", errors="replace")
    kinds = {
        "add": r"\tv?(?:add|sub)[ps]s\b",
        "multiply": r"\tv?mul[ps]s\b",
        "both": r"\tvfn?m(?:add|sub)\d+[ps]s\b",
    }
    found: dict[str, dict[str, int]] = {}
    for name, body in re.findall(r"^(\w[\w.]*):(.*?)^\t?\.size\s", text, re.DOTALL | re.MULTILINE):
        if name.startswith(("hot_", "multiply.", "tile")) or name == "multiply":
            found[name] = {kind: len(re.findall(pattern, body)) for kind, pattern in kinds.items()}
    return found


def command_of(compiler: str) -> list[str]:
    """Return a compiler's command; skip the test where it is not installed."""
    if (path := shutil.which(compiler)) is not None:
        return [path, "cc"] if compiler == "zig" else [path]
    if compiler == "zig" and importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.skip(f"{compiler} is not installed")


def runs_here(processor: str) -> bool:
    """Return whether this processor runs code made for that one."""
    try:
        flags = set(
            Path("/proc/cpuinfo")
            .read_text(encoding="ascii")
            .partition("\nflags")[2]
            .partition("\n")[0]
            .split()
        )
    except OSError:
        return False
    return flags >= PROCESSORS[processor]


@pytest.mark.skipif(not X86, reason="the setting is one of x86")
@pytest.mark.parametrize("tuning", ["native", "haswell"])
def test_compiler_that_may_split_multiply_adds_changes_no_row(tmp_path: Path, tuning: str) -> None:
    compiler = next(iter(library.compilers()))
    command = [*compiler, *library.FLAGS, f"-march={tuning}", SPLITS]
    try:
        path = build(command, tmp_path / "step.so")
    except subprocess.CalledProcessError:
        pytest.skip(f"{Path(compiler[0]).name} does not know {SPLITS}")
    assert not rows_that_differ(path)


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the processors are x86")
@pytest.mark.parametrize("splits", [False, True], ids=["as-tuned", "may-split"])
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_compiler_splits_multiply_adds(
    tmp_path: Path, compiler: str, processor: str, splits: bool
) -> None:
    program = command_of(compiler)
    if splits and not compiler.startswith("gcc"):
        pytest.skip(f"{compiler} has no setting that splits multiply-adds")
    tuning = processor.replace("-", "_") if compiler == "zig" else processor
    command = [*program, *library.FLAGS, f"-march={tuning}", *[SPLITS] * splits]
    if subprocess.run(
        [*program, f"-march={tuning}", "-E", "-x", "c", os.devnull], capture_output=True
    ).returncode:
        pytest.skip(f"this {compiler} does not know {processor}")
    found = counts(command, tmp_path)
    products = [count for name, count in found.items() if name != "hot_exponential"]
    assert sum(count["both"] for count in products) >= sum(range(1, 7)), found
    assert all(count["add"] == count["multiply"] == 0 for count in products), found
    assert found["hot_exponential"] == {"add": 2, "multiply": 2, "both": 9}
    if runs_here(processor):
        assert not rows_that_differ(build(command, tmp_path / "step.so"))
