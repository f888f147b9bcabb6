"""Attention within packed sequences on a GPU: PyTorch's kernels and ours, with several tilings.

    python bench/engine/attention.py
    python bench/engine/attention.py --keys 128x64x8x3 64x64x4x2 --queries 128x64x8x3

A tiling is written as tokens of a program x tokens of a step x warps x stages. The best ones belong
into `FORWARD`, `KEYS` and `QUERIES` of `flash_gradients.py`. Rates count the products that a kernel
has to make, each pair of tokens once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from tinkex.engine.kernels.flash import forward, gradients, tables, tiles
from tinkex.engine.kernels.flash_gradients import (
    Backward,
    Tiling,
    keys_gradient,
    queries_gradient,
    row_numbers,
)
from tinkex.engine.model.attention import flash

FORWARD = ["64x64x4x3", "128x64x8x3", "128x128x8x3", "64x64x4x2", "128x32x8x4"]
KEYS = ["128x64x8x3", "64x32x4x3", "128x64x8x2", "64x64x4x2", "128x64x8x4", "128x32x8x4"]
QUERIES = ["128x64x8x3", "64x64x4x2", "128x64x8x4", "128x128x8x2", "64x32x4x3", "64x32x4x2"]
DEVICE = torch.device("cuda")
Run: TypeAlias = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


def lengths_of(tokens: int, shortest: int, longest: int) -> list[int]:
    """Lengths that add up, drawn evenly; the last takes what is left."""
    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > longest:
        lengths.append(min(int(draw.integers(shortest, longest + 1)), left - shortest))
    return [*lengths, left]


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """The median round, by the device's clock."""
    run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for before, after in marks:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in marks)


def off(got: torch.Tensor, expected: torch.Tensor) -> str:
    """How far one gradient is from another."""
    difference = (got.float() - expected.float()).abs()
    share = float(difference.norm() / expected.float().norm())
    return (
        f"largest difference {float(difference.max()):.4f} of "
        f"{float(expected.abs().max()):.2f}, in all {share:.1e}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=[256, 2048], metavar=("SHORTEST", "LONGEST")
    )
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--forward", nargs="*", default=FORWARD, help="tilings for forward")
    parser.add_argument(
        "--keys", nargs="*", default=KEYS, help="tilings for the gradient of keys and values"
    )
    parser.add_argument(
        "--queries", nargs="*", default=QUERIES, help="tilings for the gradient of queries"
    )
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    heads, groups, channels, window = given.heads, given.groups, given.channels, given.window
    lengths = lengths_of(given.tokens, *given.lengths)
    sides = [min(n, window or n) for n in lengths]
    pairs = sum(
        side * (side + 1) // 2 + (n - side) * side for n, side in zip(lengths, sides, strict=True)
    )
    product = 2 * pairs * heads * channels
    scale, longest = channels**-0.5, max(lengths)
    print(
        f"{len(lengths)} sequences of {min(lengths)} to {longest}, {sum(lengths)} tokens",
        flush=True,
    )
    torch.manual_seed(0)
    q, dout = (
        torch.randn(given.tokens, heads, channels, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2)
    )
    k, v = (
        torch.randn(given.tokens, groups, channels, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2)
    )
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)

    def tell(name: str, took: float, products: int, more: str = "") -> None:
        print(
            f"{name}: {took:.3f} ms, {products * product / took / 1e9:.0f} TFLOP/s {more}",
            flush=True,
        )

    attend = partial(flash, q, k, v, bounds, longest, scale, window)
    out, lse, state, unused = attend()[:4]
    tell("PyTorch's forward", milliseconds(attend, given.rounds), 2)
    theirs = partial(
        torch.ops.aten._flash_attention_backward,
        *(dout, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True, state, unused),
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    dq, dk, dv = theirs()
    tell("PyTorch's backward", milliseconds(theirs, given.rounds), 5)
    shared = Backward((q, k, v), dout, row_numbers(dout, out, lse), scale, window)
    took = milliseconds(partial(row_numbers, dout, out, lse), given.rounds)
    print(f"sums of rows: {took:.3f} ms", flush=True)

    def compare(
        name: str,
        choices: list[str],
        products: int,
        expected: list[torch.Tensor],
        run_of: Callable[[Tiling], Run],
    ) -> None:
        quickest: tuple[float, str] | None = None
        for choice in choices:
            run = run_of(Tiling(*map(int, choice.split("x"))))
            began = time.perf_counter()
            try:
                got = run()
                torch.cuda.synchronize()
                compiled = time.perf_counter() - began
                took = milliseconds(run, given.rounds)
            except Exception as reason:  # too large for the device: the next one may fit
                print(f"{name}, {choice}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
                continue
            pairs_of = zip(got if isinstance(got, tuple) else [got], expected, strict=True)
            more = "; ".join([*(off(a, b) for a, b in pairs_of), f"{compiled:.1f} s"])
            tell(f"{name}, {choice}", took, products, more)
            if quickest is None or took < quickest[0]:
                quickest = took, choice
        if quickest is not None:
            print(f"best for {name}: {quickest[1]}", flush=True)

    def forward_run(tiling: Tiling) -> Run:
        return partial(
            forward,
            (q, k, v),
            tiles(lengths, tiling.block, DEVICE, of_keys=False),
            scale,
            window,
            tiling,
        )

    def keys_run(tiling: Tiling) -> Run:
        table = tiles(lengths, tiling.block, DEVICE, of_keys=True)
        return partial(keys_gradient, shared, table, tiling)

    def queries_run(tiling: Tiling) -> Run:
        table = tiles(lengths, tiling.block, DEVICE, of_keys=False)
        return partial(queries_gradient, shared, table, tiling)

    compare("forward", given.forward, 2, [out, lse], forward_run)
    compare("keys and values", given.keys, 4, [dk, dv], keys_run)
    compare("queries", given.queries, 3, [dq], queries_run)

    ours = partial(
        gradients, dout, (q, k, v), out, lse, tables(lengths, channels, DEVICE), scale, window
    )
    tell("our backward as it is set", milliseconds(ours, given.rounds), 5)
    same = all(torch.equal(a, b) for a, b in zip(ours(), ours(), strict=True))
    print("the same bits twice" if same else "NOT the same bits twice", flush=True)


if __name__ == "__main__":
    main()
