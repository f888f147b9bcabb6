r"""Rates of the whole stack (client, server, engine), beside those of the engine alone.

    PYTHONPATH=src python bench/engine/stack.py --shape 135m
    PYTHONPATH=src python bench/engine/stack.py --shape 8b --device cuda --tokens 16384 \
        --longest 2048 --rows 1 64 256

Everything runs in one process, on one engine, in turn. The client speaks to the embedded server
with the bytes that would go over a socket. `--socket` puts a socket between them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from shapes import SHAPES, random_engine
from train import mixed, ours, synchronize

from tinkex import (
    AdamParams,
    LocalBackend,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
)
from tinkex.engine.api import SampleJob
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import LoraConfig


@contextmanager
def service(engine: TorchEngine, *, socket: bool) -> Iterator[ServiceClient]:
    """A client of a server over this engine."""
    directory = Path(tempfile.mkdtemp(prefix="tinkex-bench-"))
    if not socket:
        with (
            LocalBackend(engine=engine, data_dir=directory) as backend,
            ServiceClient(base_url=backend.base_url) as client,
        ):
            yield client
        return
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support import serving

    with serving(engine, directory) as url, ServiceClient(base_url=url) as client:
        yield client


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of one run."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def prompt(random: np.random.Generator, tokens: int) -> ModelInput:
    """Some tokens, never the same."""
    return ModelInput.from_ints(random.integers(0, 49152, tokens))


def draw(engine: TorchEngine, sampler: str, text: ModelInput, params: SamplingParams) -> None:
    """A sample of the engine alone."""
    engine.sample_start(
        SampleJob("job", sampler, SampleRequest(prompt=text, sampling_params=params), 0)
    )
    while engine.sampling():
        engine.sample_step()


def rate(sampler: SamplingClient, rows: int, size: int, tokens: int, *, jobs: bool) -> float:
    """Tokens a second of so many samples, from the first request to the last answer, prompts
    included.
    """
    random = np.random.default_rng()
    params = SamplingParams(max_tokens=tokens, stop=[])
    began = time.perf_counter()
    if jobs:
        futures = [sampler.sample(prompt(random, size), 1, params) for _ in range(rows)]
    else:
        futures = [sampler.sample(prompt(random, size), rows, params)]
    drawn = sum(
        len(sequence.tokens_np) for future in futures for sequence in future.result().sequences
    )
    return drawn / (time.perf_counter() - began)


def training(
    engine: TorchEngine, client: ServiceClient, data: list[Datum], device: str, rounds: int
) -> None:
    """A step of training, both ways."""
    total = sum(datum.model_input.length for datum in data)
    trainer = client.create_lora_training_client("m", rank=32, train_unembed=False).result()
    engine.create("alone", "m", LoraConfig(rank=32, train_unembed=False))

    def step() -> None:
        passed = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(AdamParams(learning_rate=1e-5))
        passed.result()
        stepped.result()

    one: list[float] = []
    other: list[float] = []
    for _ in range(rounds + 1):  # in turn, since machines have moods; the first is not counted
        one.append(timed(lambda: ours(engine, device, {"alone": data}), device))
        other.append(timed(step, device))
    alone, whole = statistics.median(one[1:]), statistics.median(other[1:])
    engine.drop("alone")
    print(
        f"training step of {total} tokens: engine alone {alone:.3f} s ({total / alone:.0f} tok/s)",
        flush=True,
    )
    print(
        f"whole stack {whole:.3f} s ({total / whole:.0f} tok/s): {1e3 * (whole - alone):+.1f} ms, "
        f"{100 * (whole / alone - 1):+.1f} %; of all steps "
        f"{total / statistics.mean(other[1:]):.0f} tok/s, "
        f"the longest {max(other[1:]):.3f} s",
        flush=True,
    )


def single(engine: TorchEngine, client: ServiceClient, rounds: int) -> SamplingClient:
    """One short sample after the other, both ways."""
    trainer = client.create_lora_training_client("m", rank=32, train_unembed=False).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    engine.create("alone", "m", LoraConfig(rank=32, train_unembed=False))
    engine.snapshot("alone", "alone")
    random, params = np.random.default_rng(0), SamplingParams(max_tokens=4, stop=[])
    alone: list[float] = []
    whole: list[float] = []
    for _ in range(rounds):  # in turn, here too
        # The server's thread looks once more whether there is anything to do, and an engine has one
        # thread.
        time.sleep(0.02)
        texts = prompt(random, 16), prompt(random, 16)
        began = time.perf_counter()
        draw(engine, "alone", texts[0], params)
        middle = time.perf_counter()
        sampler.sample(texts[1], 1, params).result()
        alone.append(middle - began)
        whole.append(time.perf_counter() - middle)
    one, other = statistics.median(alone[2:]), statistics.median(whole[2:])
    print(
        f"a sample of 4 tokens: engine alone {1e3 * one:.2f} ms, whole stack {1e3 * other:.2f} ms: "
        f"{1e3 * (other - one):+.2f} ms",
        flush=True,
    )
    return sampler


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="in a step of training")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drawn", type=int, default=128, help="tokens of each sample")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=40)
    parser.add_argument("--socket", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engine = random_engine(given.shape, given.device, threads=given.threads)
    with service(engine, socket=given.socket) as client:
        data = mixed(given.tokens, given.longest, SHAPES[given.shape]["vocab_size"])
        training(engine, client, data, given.device, given.rounds)
        sampler = single(engine, client, given.singles)
        for rows in given.rows:
            for jobs in (False, True) if rows > 1 else (True,):
                rates = [
                    rate(sampler, rows, given.prompt, given.drawn, jobs=jobs) for _ in range(3)
                ]
                kind = "jobs" if jobs else "samples of one job"
                print(
                    f"{rows} {kind}, whole stack, prompts included: {max(rates):.0f} tok/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
