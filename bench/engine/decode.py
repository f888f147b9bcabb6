"""How quickly the sampler decodes, beside transformers' generate: one process, the same threads, the same weights.

    PYTHONPATH=src python bench/engine/decode.py [--tokens 64] [--prompt 64] [--only ours] [--device cpu]

The checkpoint is random, in the shape of SmolLM2-135M (or of an 8B model with `--shape 8b`), and is written to a
temporary directory. Ours samples with a LoRA adapter of rank 32 and log-probabilities; generate samples without either.
A rate is tokens over the time from the first to the last decoding step, prefill left out, best of the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def checkpoint(shape: str, directory: Path) -> Path:
    """Write a random checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if shape == "135m" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=8192))
    torch.set_default_dtype(before)
    model.save_pretrained(directory)
    return directory


def engine_of(directory: Path, device: str, adapters: int) -> Any:
    """An engine with samplers s0, s1, …, whose adapters are not zero."""
    from tinkex.engine.torch_engine import TorchEngine
    from tinkex.types.training import LoraConfig

    engine = TorchEngine({"m": directory}, device=device, threads=torch.get_num_threads())
    for index in range(adapters):
        engine.create("a", "m", LoraConfig(rank=32, seed=index))
        weights = engine._adapters["a"].state.weights
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(index)).to(weights.device)
        weights.add_(noise, alpha=1e-3)
        engine.snapshot("a", f"s{index}")
        engine.drop("a")
    return engine


def ours(engine: Any, jobs: int, samples: int, prompt: int, tokens: int, adapters: int) -> tuple[float, float, float]:
    """Tokens per second of decoding, CPU seconds per second, and seconds of prefill."""
    from tinkex.types.inputs import ModelInput
    from tinkex.types.sampling import SampleRequest, SamplingParams

    random = np.random.default_rng(int(time.time_ns() % 2**31))
    for job in range(jobs):
        text = ModelInput.from_ints(random.integers(0, 49152, prompt))
        params = SamplingParams(max_tokens=tokens, stop=[])
        request = SampleRequest(prompt=text, sampling_params=params, num_samples=samples)
        engine.sample_start(f"job{job}", f"s{job % adapters}", request, job)
    begin = time.perf_counter()
    steps: list[tuple[float, float]] = []
    while engine.sampling():
        for done in engine.sample_step():
            if isinstance(done.result, Exception):
                raise done.result
        steps.append((time.perf_counter(), time.process_time()))
    first = max(0, len(steps) - tokens)
    last = len(steps) - 1
    wall, cpu = (steps[last][i] - steps[first][i] for i in (0, 1))
    return jobs * samples * (last - first) / wall, cpu / wall, steps[first][0] - begin


def theirs(model: Any, rows: int, prompt: int, tokens: int) -> tuple[float, float]:
    """The same of generate: the time of one token is subtracted as prefill."""
    ids = torch.randint(0, 49152, (rows, prompt), device=model.device)

    def run(count: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=count, min_new_tokens=count,
            pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - wall, time.process_time() - cpu

    short, long = run(1), run(tokens)
    wall, cpu = (b - a for a, b in zip(short, long, strict=True))
    return rows * (tokens - 1) / wall, cpu / wall


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", choices=["ours", "theirs"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = checkpoint(options.shape, Path(scratch))
        if options.only != "theirs":
            engine = engine_of(directory, options.device, max(options.rows))
            for rows in options.rows:
                kinds = {"one job": (1, rows, 1), "jobs": (rows, 1, 1), "jobs, an adapter each": (rows, 1, rows)}
                for kind, (jobs, samples, adapters) in kinds.items():
                    if rows == 1 and kind != "one job":
                        continue
                    report(f"ours, {kind}", rows, options.rounds, lambda j=jobs, s=samples, a=adapters: ours(  # type: ignore[misc]
                        engine, j, s, options.prompt, options.tokens, a))  # fmt: skip
        if options.only != "ours":
            from transformers import AutoModelForCausalLM

            dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(options.device)
            for rows in options.rows:
                run = lambda r=rows: theirs(model, r, options.prompt, options.tokens)  # type: ignore[misc] # noqa: E731
                report("transformers generate", rows, options.rounds, run)


def report(what: str, rows: int, rounds: int, run: Callable[[], tuple[float, ...]]) -> None:
    """The best of some rounds."""
    rate, cores, *prefill = max(run() for _ in range(rounds))
    extra = f"  prefill {prefill[0]:.2f} s" if prefill else ""
    print(f"{what:32} {rows:4} samples  {rate:9.1f} tok/s  {cores:4.2f} cores{extra}", flush=True)


if __name__ == "__main__":
    main()
