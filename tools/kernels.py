"""Compiles every kernel of the engine for GPUs that need not be here, and says what each takes of
them.

Run `make kernels`, or `python tools/kernels.py --arch 80 90`. Triton and its assembler need no GPU.
It ends with 1 if a kernel does not compile, or needs more shared memory than such a GPU has and
nothing else could do its work.

    python tools/kernels.py --arch 90 --against COMMIT

says which kernels have other instructions than at that commit: what was measured there holds for
those that do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
ROOM = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""Shared memory of a multiprocessor in KiB, by architecture; a program may have all but one of
them."""
OPTIONAL = ("_forward", "_delta", "_keys_gradient", "_queries_gradient", "_decode")
"""Attention: where these do not fit, PyTorch's own kernel takes their place."""
TOKENS = 4096
VOCABULARY = 151936


class Shape(NamedTuple):
    """Sizes of a model that kernels are compiled for."""

    name: str
    hidden: int
    mlp: int
    heads: int
    groups: int
    channels: int
    normed: bool
    activation: str = "silu"


SHAPES = (
    Shape("8b", 4096, 12288, 32, 8, 128, normed=True),
    Shape("0.6b", 1024, 3072, 16, 8, 128, normed=True),
    Shape("135m", 576, 1536, 9, 3, 64, normed=False),
    Shape("gelu, heads of 32", 640, 2048, 4, 1, 32, normed=True, activation="gelu"),
)


class Made(NamedTuple):
    """A kernel in one variant."""

    name: str
    of: str
    shared: int
    registers: int
    spilled: int
    digest: str
    """Of its instructions, without where in the source they come from."""


class _NoDriver:
    """Says what GPU there is, and that is all: nothing can be launched."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_all(arch: int) -> Iterator[Made]:
    """Call what launches the kernels, as the engine does, and compile where it would launch."""
    from triton.runtime import driver, jit

    driver.set_active(_NoDriver(arch))
    room: Any = SimpleNamespace(shared_memory_per_multiprocessor=ROOM[arch] << 10)
    setattr(torch.cuda, "get_device_properties", lambda _: room)  # noqa: B010
    launch, compiled = jit.JITFunction.run, []

    def run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        made = launch(kernel, *args, warmup=True, **options)
        compiled.append((kernel.fn.__name__, made))
        return made

    jit.JITFunction.run = run
    seen = set()
    for label in _launches():
        for name, kernel in compiled:
            made = Made(name, label, kernel.metadata.shared, *_resources(kernel.asm["cubin"]))
            if (name, made.digest) not in seen:
                seen.add((name, made.digest))
                yield made
        compiled.clear()


def _launches() -> Iterator[str]:
    """Every kernel in the variants that models of these shapes use; says what was launched."""
    from tinkex.engine.kernels import flash, fused, paged

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    cpu = torch.device("cpu")
    for shape in SHAPES:
        heads, groups, channels = shape[3:6]
        x, weight = empty(TOKENS, shape.hidden), empty(shape.hidden)
        fused.norm_forward(x, weight, 1e-6)
        for rest in (None, x):
            fused.add_norm_forward(x, rest, x, weight, 1e-6)
            fused.norm_backward(rest, x, x, weight, 1e-6)
        yield shape.name
        both, narrow = empty(TOKENS, 2 * shape.mlp), empty(TOKENS, shape.mlp)
        fused.gate_forward(both, shape.activation)
        fused.gate_backward(narrow, both, shape.activation)
        yield shape.name
        qkv, turn = empty(TOKENS, (heads + 2 * groups) * channels), empty(TOKENS, 1, channels // 2)
        norms = (empty(channels), empty(channels)) if shape.normed else None
        q, k, v = fused.heads_forward(qkv, (heads, groups, groups), norms, turn, turn, 1e-6)
        fused.heads_backward(q, k, k, qkv, norms, turn, turn, 1e-6)
        fused.store(empty(2, 64, 32, groups, channels), empty(TOKENS, dtype=torch.int64), k, v)
        yield shape.name
        for rank in (8, 32, 64, 128):
            low, factors = empty(TOKENS, rank), (empty(shape.mlp, rank), empty(shape.mlp, rank))
            fused.add_product(x, low, empty(shape.hidden, rank).t(), 0.5)
            fused.add_product(x, low, empty(rank, shape.hidden), 0.5)
            lows = empty(TOKENS, 2 * rank)
            fused.shared_gate(both, lows, factors, 0.5, shape.activation, narrow)
            fused.shared_gate(both, lows, factors, 0.5, shape.activation, both, narrow)
            yield f"{shape.name}, rank {rank}"
        for window in (None, 512):
            tables = flash.tables([TOKENS], channels, cpu)
            mixed, sums = flash.forward((q, k, v), tables.forward_N3, 0.1, window)
            flash.gradients(mixed, (q, k, v), mixed, sums, tables, 0.1, window)
            for softcap in (None, 30.0):
                blocks, places = empty(64, 16, dtype=torch.int64), empty(64, dtype=torch.int64)
                cache = empty(2, 64, 32, groups, channels)
                paged.paged_attention(q[:64], cache, blocks, places, 0.1, window, softcap)
            yield shape.name if window is None else f"{shape.name}, window"
    for dtype in (torch.bfloat16, torch.float32):
        logits, column = empty(256, VOCABULARY, dtype=dtype), empty(256, 1, dtype=torch.float32)
        fused.log_sums(logits)
        fused.softmax_gradient(logits, column, column, torch.bfloat16)
        yield str(dtype)


def _resources(cubin: bytes) -> tuple[int, int, str]:
    """Registers, bytes that did not fit into them, and a digest of the instructions."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(*options: str) -> str:
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            return subprocess.run(
                [str(tool), *options, file.name], check=True, capture_output=True, text=True
            ).stdout

        used = dump("-res-usage")
        # The instructions and their encodings; the rest are names of files and functions.
        code = "\n".join(re.findall(r"/\*.+", dump("-sass")))
    registers, spilled = (int(re.search(rf"{word}:(\d+)", used)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return registers, spilled, hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def compiled_at(commit: str, arch: int) -> dict[tuple[str, str, int], str]:
    """The digests of another commit's kernels, in the order they are made."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(tree), commit], cwd=ROOT, check=True
        )
        try:
            path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
            tool = str(tree / "tools/kernels.py")  # that knows how to call the kernels of its time
            command = [sys.executable, tool, "--arch", str(arch), "--json"]
            environment = {**os.environ, "PYTHONPATH": path}
            listed = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True
            )
    return numbered(Made(*row) for row in json.loads(listed))


def numbered(made: Any) -> dict[tuple[str, str, int], str]:
    """Digests by kernel, shape and which of its variants it is."""
    found: dict[tuple[str, str, int], str] = {}
    for row in made:
        variant = 0
        while (row.name, row.of, variant) in found:
            variant += 1
        found[row.name, row.of, variant] = row.digest
    return found


def show(made: Made, most: int) -> bool:
    """One line; returns whether it will do."""
    remark = ""
    if made.shared > most:
        remark = "does not fit, PyTorch's is used" if made.name in OPTIONAL else "DOES NOT FIT"
    print(
        f"{made.name:18} {made.of:26} {made.shared:7,} B shared {made.registers:4} registers"
        f"{f' {made.spilled} B spilled' if made.spilled else ''}  {made.digest}  {remark}".rstrip(),
        flush=True,
    )
    return not remark or made.name in OPTIONAL


def main() -> int:
    """Compile, list, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=list(ROOM), default=[80, 89, 90], help="80 90 …"
    )
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare instructions with those of another commit"
    )
    parser.add_argument("--json", action="store_true", help="rows for a program")
    options = parser.parse_args()
    good = True
    for arch in options.arch:
        if options.json:
            print(json.dumps(list(compile_all(arch))))
            continue
        print(f"sm_{arch}, {ROOM[arch]} KiB of shared memory")
        here = []
        for made in compile_all(arch):
            good &= show(made, (ROOM[arch] - 1) << 10)
            here.append(made)
        if options.against is None:
            continue
        ours, theirs = numbered(here), compiled_at(options.against, arch)
        other = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        print(
            f"{len(ours) - len(other)} of {len(ours)} have the instructions they had at "
            f"{options.against}"
        )
        for name, of, variant in other:
            print(f"  not {name} ({of}, variant {variant})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
