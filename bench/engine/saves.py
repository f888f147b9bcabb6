"""What others notice of a save: the time between tokens of a sample while another run is saved
again and again.

    PYTHONPATH=src python bench/engine/saves.py
    PYTHONPATH=src python bench/engine/saves.py --shape 8b --device cuda

A save writes weights and optimizer state, and so does what makes a run survive a kill.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time

import numpy as np
import torch
from shapes import SHAPES, random_engine
from stack import prompt, service

from tinkex import SamplingClient, SamplingParams, TrainingClient


def gaps(sampler: SamplingClient, tokens: int) -> list[float]:
    """Seconds between the tokens of one sample, as they reach the caller."""
    params = SamplingParams(max_tokens=tokens, stop=[], seed=1)
    with sampler.sample_stream(prompt(np.random.default_rng(0), 16), params) as stream:
        times = [time.perf_counter() for _ in stream]
    return [after - before for before, after in itertools.pairwise(times)]


def save_until(training: TrainingClient, over: threading.Event, took: list[float]) -> None:
    """Save under one name until told otherwise."""
    while not over.is_set():
        began = time.perf_counter()
        training.save_state("kept", overwrite=True).result()
        took.append(time.perf_counter() - began)


def told(name: str, between: list[float]) -> None:
    """Print how long tokens took."""
    middle, longest, total = statistics.median(between), max(between), sum(between)
    print(
        f"{name}: {1e3 * middle:.1f} ms a token, the longest {1e3 * longest:.0f}, {total:.2f} s in "
        "all",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engine = random_engine(given.shape, given.device, threads=given.threads)
    with service(engine, socket=False) as client:
        training = client.create_lora_training_client("m", rank=32).result()
        sampler = client.create_sampling_client(base_model="m").result()
        gaps(sampler, 8)
        for _ in range(given.rounds):
            told("alone", gaps(sampler, given.tokens))
            over, took = threading.Event(), list[float]()
            thread = threading.Thread(target=save_until, args=(training, over, took))
            thread.start()
            try:
                told("beside saves", gaps(sampler, given.tokens))
            finally:
                over.set()
                thread.join()
            print(f"  {len(took)} saves, {statistics.mean(took):.2f} s each", flush=True)


if __name__ == "__main__":
    main()
