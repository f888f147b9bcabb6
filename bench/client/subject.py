"""One client under measurement, in a process of its own: `subject.py {tinkex,tinker} CASE …` prints
one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import importlib
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

PROMPT = [(7 * i) % 50000 for i in range(512)]
TOKENS = 2048


def rss() -> int:
    """Resident memory now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> bool:
    """Set the peak of resident memory back to what it is now; False where the kernel does not let
    us.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak() -> int:
    """Peak resident memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """CPU time of the whole process, all threads, and wall time."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Seconds of CPU and of wall time since the start."""
        return time.process_time() - self.cpu, time.perf_counter() - self.wall


def digest(values: list[float]) -> str:
    """A short name for some values."""
    return hashlib.sha256(",".join(f"{value:.9g}" for value in values).encode()).hexdigest()[:16]


class Subject:
    """A client that is open and ready."""

    def __init__(self, name: str, base_url: str) -> None:
        self.module: Any = importlib.import_module(name)
        self.types: Any = importlib.import_module(f"{name}.types")
        self.service: Any = self.module.ServiceClient(base_url=base_url, api_key="tml-x")

    async def draw(self, sampler: Any) -> Any:
        """One sample, made and read as a user does: a list of ints in, lists of ints and floats
        out.
        """
        prompt = self.types.ModelInput.from_ints(list(PROMPT))
        params = self.types.SamplingParams(max_tokens=128)
        response = await sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
        sequence = response.sequences[0]
        if len(sequence.tokens) != 128 or len(sequence.logprobs) != 128:
            raise AssertionError("not the sample that the server sent")
        return sequence

    async def samples(self, sampler: Any, count: int, width: int) -> None:
        """Draw `count` samples with `width` of them in flight."""
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self.draw(sampler)

        await asyncio.gather(*(worker() for _ in range(width)))

    def sampling(self, plan: list[tuple[int, int]]) -> dict[str, Any]:
        """CPU and wall time of a sample at each concurrency."""

        async def go() -> dict[str, Any]:
            sampler = await self.service.create_sampling_client(base_model="null")
            sequence = await self.draw(sampler)
            result: dict[str, Any] = {"first": time.process_time()}
            result["digest"] = digest([*sequence.tokens, *sequence.logprobs])
            for width, count in plan:
                await self.samples(sampler, max(2 * width, 20), width)
                watch = Stopwatch()
                await self.samples(sampler, count, width)
                cpu, wall = watch.read()
                result[str(width)] = {"cpu": cpu / count, "wall": wall / count}
            return result

        return asyncio.run(go())

    def growth(self, count: int) -> dict[str, Any]:
        """Resident memory over many samples, after the first tenth."""

        async def go() -> dict[str, Any]:
            sampler = await self.service.create_sampling_client(base_model="null")
            marks = []
            watch = Stopwatch()
            for _ in range(10):
                await self.samples(sampler, count // 10, 64)
                gc.collect()
                marks.append(rss())
            cpu, wall = watch.read()
            return {
                "cpu": cpu / count,
                "wall": wall / count,
                "marks": marks,
                "growth": marks[-1] - marks[0],
            }

        return asyncio.run(go())

    def idle(self, count: int, seconds: float) -> dict[str, Any]:
        """CPU time of pending futures, as a share of one core."""
        sampler = self.service.create_sampling_client(base_model="hold").result()
        prompt = self.types.ModelInput.from_ints(list(PROMPT))
        params = self.types.SamplingParams(max_tokens=128)
        futures = [
            sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
            for _ in range(count)
        ]
        time.sleep(4)
        watch = Stopwatch()
        time.sleep(seconds)
        cpu, wall = watch.read()
        if any(future.future().done() for future in futures):
            raise AssertionError("a future that the server holds has ended")
        return {"cpu": cpu / wall, "wall": wall}

    def passes(self, kind: str, count: int, repeats: int) -> dict[str, Any]:
        """CPU and wall time of forward_backward per million tokens, and peak memory above the raw
        data.
        """
        client = self.service.create_lora_training_client("null", rank=8).result()
        small, raw = raw_data(kind, 2), raw_data(kind, count)
        takes_arrays = self.module.__name__ == "tinkex"

        def once(data: list[dict[str, Any]]) -> Any:
            datums = []
            for item in data:
                tokens = item["tokens"]
                if not takes_arrays and not isinstance(tokens, list):
                    tokens = tokens.tolist()
                inputs = {"target_tokens": item["target_tokens"], "weights": item["weights"]}
                model_input = self.types.ModelInput.from_ints(tokens)
                datums.append(self.types.Datum(model_input=model_input, loss_fn_inputs=inputs))
            output = client.forward_backward(datums, "cross_entropy").result()
            if sum(
                out["logprobs"].to_numpy().size for out in output.loss_fn_outputs
            ) != TOKENS * len(data):
                raise AssertionError("not the output that the server sent")
            return output

        output = once(small)
        first = output.loss_fn_outputs[1]["logprobs"].to_numpy().tolist()
        result: dict[str, Any] = {"digest": digest([*first, *output.metrics.values()])}
        del output, first
        gc.collect()
        exact = reset_peak()
        before = rss() if exact else peak()
        once(raw)
        result["peak"] = peak() - before
        times = []
        for _ in range(repeats):
            watch = Stopwatch()
            once(raw)
            times.append(watch.read())
        million = count * TOKENS / 1e6
        result["cpu"] = sorted(cpu for cpu, _ in times)[len(times) // 2] / million
        result["wall"] = sorted(wall for _, wall in times)[len(times) // 2] / million
        return result


def raw_data(kind: str, count: int) -> list[dict[str, Any]]:
    """Tokens, targets and weights of some datums, as numpy arrays, torch tensors or lists."""
    import numpy as np

    random = np.random.default_rng(0)
    data: list[dict[str, Any]] = []
    for _ in range(count):
        line = random.integers(0, 150000, TOKENS + 1, dtype=np.int64)
        item: dict[str, Any] = {
            "tokens": line[:-1].copy(),
            "target_tokens": line[1:].copy(),
            "weights": np.ones(TOKENS, dtype=np.float32),
        }
        if kind == "list":
            item = {name: value.tolist() for name, value in item.items()}
        elif kind == "torch":
            import torch

            item = {name: torch.from_numpy(value) for name, value in item.items()}
        data.append(item)
    return data


def main() -> None:
    """Run one case and print what it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=("tinkex", "tinker"))
    parser.add_argument("case", choices=("sampling", "forward_backward", "idle", "growth"))
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument(
        "--plan", default="1:200,64:2000,512:4000", help="sampling: concurrency:requests, …"
    )
    parser.add_argument("--kind", choices=("numpy", "torch", "list"), default="numpy")
    parser.add_argument("--count", type=int, default=128, help="datums, futures or samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--profile",
        default=None,
        help="write a cProfile of all threads here; the figures are then too high",
    )
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    if args.profile:
        profile_threads()
    subject = Subject(args.client, args.base_url)
    if args.case == "sampling":
        plan = [
            (int(width), int(count))
            for width, count in (part.split(":") for part in args.plan.split(","))
        ]
        result = subject.sampling(plan)
    elif args.case == "forward_backward":
        result = subject.passes(args.kind, args.count, args.repeats)
    elif args.case == "idle":
        result = subject.idle(args.count, args.seconds)
    else:
        result = subject.growth(args.count)
    print(json.dumps(result), flush=True)
    if args.profile:
        write_profiles(args.profile)
    os._exit(0)  # neither client's farewell is under measurement


PROFILES: list[Any] = []


def profile_threads() -> None:
    """Have every thread started from now on profiled, and this one."""
    import cProfile
    import threading

    run = threading.Thread.run

    def profiled(self: threading.Thread) -> None:
        profile = cProfile.Profile(time.thread_time)
        PROFILES.append(profile)
        profile.enable()
        run(self)

    threading.Thread.run = profiled  # type: ignore[method-assign]
    main_profile = cProfile.Profile(time.thread_time)
    PROFILES.append(main_profile)
    main_profile.enable()


def write_profiles(path: str) -> None:
    """Add the threads' profiles up and write them."""
    import pstats

    stats: pstats.Stats | None = None
    for profile in PROFILES:
        profile.create_stats()
        if not profile.stats:
            continue
        if stats is None:
            stats = pstats.Stats(profile)
        else:
            stats.add(profile)
    if stats is not None:
        stats.dump_stats(path)


if __name__ == "__main__":
    main()
