"""Speed of the sampler's decoding, beside transformers' generate, in one process.

    PYTHONPATH=src python bench/engine/decode.py [--tokens 64] [--prompt 64] [--only ours]

The model has random weights in the shape of SmolLM2-135M (or of an 8B model with `--shape 8b`).
Ours samples with a LoRA adapter of rank 32 and log-probabilities, generate without either. A rate
is tokens over the time from the first to the last decoding step, without prefill, the best of the
rounds.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, random_engine

from tinkex.engine.api import SampleJob


def engine_of(shape: str, device: str, adapters: int) -> Any:
    """An engine with samplers s0, s1, …, whose adapters are not zero."""
    from tinkex.types.training import LoraConfig

    engine = random_engine(shape, device, threads=torch.get_num_threads())
    for index in range(adapters):
        engine.create("a", "m", LoraConfig(rank=32, seed=index, train_unembed=False))
        weights = engine._adapters["a"].state.weights
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(index)).to(
            weights.device
        )
        weights.add_(noise, alpha=1e-3)
        engine.snapshot("a", f"s{index}")
        engine.drop("a")
    return engine


def ours(
    engine: Any, jobs: int, samples: int, prompt: int, tokens: int, adapters: int
) -> tuple[float, float, float]:
    """Tokens per second of decoding, CPU seconds per second, and seconds of prefill."""
    from tinkex.types.inputs import ModelInput
    from tinkex.types.sampling import SampleRequest, SamplingParams

    random = np.random.default_rng(int(time.time_ns() % 2**31))
    for job in range(jobs):
        text = ModelInput.from_ints(random.integers(0, 49152, prompt))
        params = SamplingParams(max_tokens=tokens, stop=[])
        request = SampleRequest(prompt=text, sampling_params=params, num_samples=samples)
        engine.sample_start(SampleJob(f"job{job}", f"s{job % adapters}", request, job))
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
            ids, attention_mask=torch.ones_like(ids), do_sample=True,
            max_new_tokens=count, min_new_tokens=count,
            pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - wall, time.process_time() - cpu

    short, long = run(1), run(tokens)
    wall, cpu = (b - a for a, b in zip(short, long, strict=True))
    return rows * (tokens - 1) / wall, cpu / wall


def batched(model: Any, rows: int, prompt: int, tokens: int) -> tuple[float, float]:
    """The same of transformers' continuous batching, prompts included."""
    from transformers import GenerationConfig

    prompts = [torch.randint(0, 49152, (prompt,)).tolist() for _ in range(rows)]
    settings = GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        eos_token_id=-1,
        pad_token_id=0,
        use_cuda_graph=True,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings)
    drawn = sum(len(output.generated_tokens) for output in outputs.values())
    seconds = time.perf_counter() - wall
    return drawn / seconds, (time.process_time() - cpu) / seconds


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
    parser.add_argument(
        "--profile",
        action="store_true",
        help="where the time of many jobs goes, on host and device",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only != "theirs":
        engine = engine_of(options.shape, options.device, min(8, max(options.rows)))
        for rows in options.rows:
            each = min(8, rows)
            kinds = {
                "one job": (1, rows, 1),
                "jobs": (rows, 1, 1),
                f"jobs, {each} adapters": (rows, 1, each),
            }
            for kind, (jobs, samples, adapters) in kinds.items():
                if rows == 1 and kind != "one job":
                    continue
                run = functools.partial(
                    ours, engine, jobs, samples, options.prompt, options.tokens, adapters
                )
                report(f"ours, {kind}", rows, options.rounds, run)
                if options.profile:
                    profile(run, options.device)
    if options.only != "ours":
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        fields = {
            name: value for name, value in SHAPES[options.shape].items() if name != "model_type"
        }
        config = AutoConfig.for_model(
            SHAPES[options.shape]["model_type"], **fields, max_position_embeddings=8192
        )
        with torch.device(options.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for rows in options.rows:
            run = functools.partial(theirs, model, rows, options.prompt, options.tokens)
            report("transformers generate", rows, options.rounds, run)
        if options.device == "cuda":
            run = functools.partial(
                batched, model, max(options.rows), options.prompt, options.tokens
            )
            report("transformers continuous batching", max(options.rows), 1, run)


def profile(run: Callable[[], object], device: str) -> None:
    """Where the time goes: Python's functions, and the device's kernels."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile as profiler

    host = cProfile.Profile()
    host.enable()
    run()
    host.disable()
    pstats.Stats(host).sort_stats("tottime").print_stats(14)
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profiler(activities=kinds) as seen:
        run()
    key = "cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=60))


def report(what: str, rows: int, rounds: int, run: Callable[[], tuple[float, ...]]) -> None:
    """The best of some rounds."""
    rate, cores, *prefill = max(run() for _ in range(rounds))
    extra = f"  prefill {prefill[0]:.2f} s" if prefill else ""
    print(f"{what:32} {rows:4} samples  {rate:9.1f} tok/s  {cores:4.2f} cores{extra}", flush=True)


if __name__ == "__main__":
    main()
