"""What the machine allows: the rate of matrix products, memory bandwidth, and a step of products
with nothing else.

    python bench/engine/limits.py --shape 135m --rows 1 8 32
    python bench/engine/limits.py --shape 8b --device cuda --rows 1 64 256

The products of a decoding step are all those with the base weights, for so many rows; on a GPU
under one CUDA graph. Those of training are forward and backward of the frozen weights. Neither has
adapters, attention or anything else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from shapes import SHAPES

from tinkex.engine.native.c_passes import Native
from tinkex.engine.native.library import load
from tinkex.engine.torch.lora import Linear


def shapes_of(shape: str) -> list[tuple[int, int, int]]:
    """(outputs, inputs, how often) of the linear layers."""
    given = SHAPES[shape]
    hidden, heads, groups = (
        given["hidden_size"],
        given["num_attention_heads"],
        given["num_key_value_heads"],
    )
    channels = given.get("head_dim", hidden // heads)
    layers, inner = given["num_hidden_layers"], given["intermediate_size"]
    return [
        ((heads + 2 * groups) * channels, hidden, layers),
        (hidden, heads * channels, layers),
        (2 * inner, hidden, layers),
        (hidden, inner, layers),
        (given["vocab_size"], hidden, 1),
    ]


def best(run: Callable[[], object], device: str, rounds: int) -> float:
    """Seconds of the quickest round."""
    shortest = float("inf")
    for _ in range(rounds + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def recorded(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The same as one CUDA graph, on a GPU."""
    if device != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


Multiply: TypeAlias = Callable[[torch.Tensor, int], object]
"""Some rows with the weight of this number."""


def ways(weights: list[torch.Tensor], device: str, threads: int) -> dict[str, Multiply]:
    """Who could multiply few rows: on a CPU also oneDNN and our own C, each with weights in its own
    layout.
    """
    if device == "cuda":
        return {"cuBLAS": lambda x, index: F.linear(x, weights[index])}
    laid_out = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    found: dict[str, Multiply] = {
        "oneDNN": lambda x, index: torch.ops.mkldnn._linear_pointwise.default(
            x, laid_out[index], None, "none", [], ""
        )
    }
    if (library := load()) is not None:
        layers = [Linear(f"{i}", "", w, None, [""], [w.shape[0]]) for i, w in enumerate(weights)]
        native = Native(library, SimpleNamespace(linears=lambda: layers), threads)  # type: ignore[arg-type]
        found["C"] = lambda x, index: native.product(x, layers[index])
    return found


def products(multiply: Multiply, inputs: list[torch.Tensor]) -> None:
    """Each input with its weight."""
    for index, x in enumerate(inputs):
        multiply(x, index)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=None, help="of a step of training")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cuda = given.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    tokens = given.tokens or (8192 if cuda else 1024)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=given.device, dtype=dtype)

    with torch.inference_mode():
        size = 8192 if cuda else 1536
        left, right = random(size, size), random(size, size)
        seconds = best(partial(torch.mm, left, right), given.device, given.rounds)
        print(
            f"a product of {size} x {size}: {2 * size**3 / seconds / 1e12:.3f} TFLOP/s", flush=True
        )
        array = random(1 << (30 if cuda else 26))
        seconds = best(partial(array.mul_, 1.0), given.device, given.rounds)
        print(
            f"read and write: {2 * array.numel() * array.element_size() / seconds / 1e9:.1f} GB/s",
            flush=True,
        )
        del left, right, array
        weights = [
            random(outputs, inputs)
            for outputs, inputs, often in shapes_of(given.shape)
            for _ in range(often)
        ]
        multiplies = ways(weights, given.device, given.threads)
        for rows in given.rows:
            x = {weight.shape[1]: random(rows, weight.shape[1]) for weight in weights}
            inputs = [x[weight.shape[1]] for weight in weights]
            times = {
                name: best(
                    recorded(partial(products, multiply, inputs), given.device),
                    given.device,
                    given.rounds,
                )
                for name, multiply in multiplies.items()
            }
            name = min(times, key=lambda name: times[name])
            print(
                f"products of a decoding step, {rows} rows: {rows / times[name]:.1f} tok/s "
                f"({name})",
                flush=True,
            )
        x = {weight.shape[1]: random(tokens, weight.shape[1]) for weight in weights}
        dy = {weight.shape[0]: random(tokens, weight.shape[0]) for weight in weights}
        seconds = best(
            lambda: [(F.linear(x[w.shape[1]], w), dy[w.shape[0]] @ w) for w in weights],
            given.device,
            1 + cuda,
        )
        print(f"products of training, {tokens} tokens: {tokens / seconds:.1f} tok/s", flush=True)


if __name__ == "__main__":
    main()
