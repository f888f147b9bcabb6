r"""Speed of training: tokens a second and peak memory, for one adapter and for several.

    PYTHONPATH=src python bench/engine/train.py --shape 135m
    PYTHONPATH=src python bench/engine/train.py --shape 8b --device cuda --tokens 65536 \
        --longest 2048

`--peft` also runs transformers + peft on the same data (padded, as it takes them).
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, random_engine

from tinkex.engine.api import PassJob
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.training import LoraConfig


def mixed(tokens: int, longest: int, vocab: int, seed: int = 0) -> list[Datum]:
    """Data of so many tokens in all, of lengths from an eighth of the longest up to it."""
    random = np.random.default_rng(seed)
    data, total = [], 0
    while total < tokens:
        length = min(int(random.integers(longest // 8, longest + 1)), tokens - total)
        ids = random.integers(0, vocab, length + 1)
        data.append(Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]}))
        total += length
    return data


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def ours(engine: TorchEngine, device: str, parts: dict[str, list[Datum]]) -> float:
    """Seconds for a pass of each adapter, begun together, and a step of its optimizer."""
    synchronize(device)
    began = time.perf_counter()
    for name, data in parts.items():
        engine.pass_start(PassJob(name, name, data, "cross_entropy", {}))
    while engine.passing():
        for done in engine.pass_step():
            if isinstance(done.result, Exception):
                raise done.result
    for name in parts:
        engine.optim_step(name, AdamParams(learning_rate=1e-5))
    synchronize(device)
    return time.perf_counter() - began


def theirs(
    shape: str, device: str, rank: int, data: list[Datum], batch: int, rounds: int
) -> tuple[float, float]:
    """Seconds and peak memory of transformers + peft for the same data, padded batch by batch,
    sorted by length.
    """
    from peft import LoraConfig as PeftConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in SHAPES[shape].items() if k != "model_type"}
    config = AutoConfig.for_model(
        SHAPES[shape]["model_type"], **fields, max_position_embeddings=8192
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = get_peft_model(model, PeftConfig(r=rank, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    data = sorted(data, key=lambda datum: datum.model_input.length)
    best = float("inf")
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        for start in range(0, len(data), batch):
            group = data[start : start + batch]
            longest = max(datum.model_input.length for datum in group)
            ids = torch.zeros(len(group), longest, dtype=torch.int64)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
            for row, datum in enumerate(group):
                length = datum.model_input.length
                ids[row, :length] = torch.from_numpy(datum.model_input.to_numpy().astype(np.int64))
                mask[row, :length] = 1
                labels[row, :length] = torch.from_numpy(
                    datum.loss_fn_inputs["target_tokens"].to_numpy()
                )
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1),
                labels.flatten().to(device),
                reduction="sum",
                ignore_index=-100,
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best, peak(device)


def peak(device: str) -> float:
    """The most memory that was ever in use, in GB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--budget", type=int, default=None, help="tokens in a step")
    parser.add_argument("--adapters", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--batch", type=int, default=8, help="sequences that peft takes at once")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    data = mixed(given.tokens, given.longest, SHAPES[given.shape]["vocab_size"])
    total = sum(datum.model_input.length for datum in data)
    if given.peft:
        seconds, memory = theirs(
            given.shape, given.device, given.rank, data, given.batch, given.rounds
        )
        print(
            f"transformers + peft      {total / seconds:9.0f} tok/s   peak {memory:6.2f} GB",
            flush=True,
        )
        return  # the peak of a process never goes down: one subject in each
    engine = random_engine(given.shape, given.device, micro_batch_tokens=given.budget)
    for count in given.adapters:
        if count > len(data):
            parser.error(
                f"--adapters {count} needs more data than --tokens {given.tokens} make: there are "
                f"{len(data)}"
            )
        names = [f"a{index}" for index in range(count)]
        for index, name in enumerate(names):
            engine.create(name, "m", LoraConfig(rank=given.rank, seed=index, train_unembed=False))
        parts = {name: data[index::count] for index, name in enumerate(names)}
        times = [ours(engine, given.device, parts) for _ in range(given.rounds + 1)][1:]
        print(
            f"tinkex, {count:2d} adapter{'s' if count > 1 else ' '}      {total / min(times):9.0f} "
            "tok/s   "
            f"peak {peak(given.device):6.2f} GB   rounds {' '.join(f'{t:.2f}' for t in times)} s",
            flush=True,
        )
        if given.profile:
            profile(engine, given.device, parts)
        for name in names:
            engine.drop(name)


def profile(engine: TorchEngine, device: str, parts: dict[str, list[Datum]]) -> None:
    """Where the time goes."""
    from torch.profiler import ProfilerActivity, profile as profiler

    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profiler(activities=kinds) as seen:
        ours(engine, device, parts)
    key = "cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


if __name__ == "__main__":
    main()
