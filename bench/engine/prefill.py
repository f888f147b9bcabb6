"""How quickly the engine runs prompts: from the start of so many jobs to the first token of each.

PYTHONPATH=src python bench/engine/prefill.py PYTHONPATH=src python bench/engine/prefill.py --shape
8b --device cuda --prompts 64x64 8x512 2x2048 1x8000 64x500
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from shapes import SHAPES, random_engine
from train import synchronize

from tinkex.engine.api import SampleJob
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import LoraConfig


def first_tokens(engine: TorchEngine, device: str, prompts: list[ModelInput]) -> float:
    """Seconds for a token of each."""
    params = SamplingParams(max_tokens=1, stop=[])
    for at, prompt in enumerate(prompts):
        engine.sample_start(
            SampleJob(str(at), "s", SampleRequest(prompt=prompt, sampling_params=params), 0)
        )
    synchronize(device)
    began = time.perf_counter()
    while engine.sampling():
        for done in engine.sample_step():
            if isinstance(done.result, Exception):
                raise done.result
    synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["1x64", "8x64", "1x512", "1x2000"],
        help="how many x how long",
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    engine = random_engine(given.shape, given.device)
    engine.create("a", "m", LoraConfig(rank=32, train_unembed=False))
    engine.snapshot("a", "s")
    random, vocab = np.random.default_rng(0), SHAPES[given.shape]["vocab_size"]
    for what in given.prompts:
        jobs, size = map(int, what.split("x"))
        times = []
        # never the same prompts, for those would be found; the first warms up
        for _ in range(given.rounds + 1):
            prompts = [ModelInput.from_ints(random.integers(0, vocab, size)) for _ in range(jobs)]
            times.append(first_tokens(engine, given.device, prompts))
        best = min(times[1:])
        print(
            f"{jobs:3d} prompts of {size:5d} tokens {1e3 * best:8.1f} ms {jobs * size / best:8.0f} "
            "tok/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
