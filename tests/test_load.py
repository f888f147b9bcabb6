"""A server under load, through our own client: nothing lost, nothing twice, memory bounded, nobody
starved."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from support import MODEL, make_data, serving
from tinkex import types
from tinkex.engine.api import PassJob, SampleJob
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.types.sampling import SampleRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLIENTS, STEPS = 16, 12
IN_FLIGHT, SAMPLES = 300, 900
GROWTH_MB = 6.0
SERVER = """
import socket, sys, uvicorn
from pathlib import Path
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = create_app(FakeEngine(delay=0.0005, step_delay=0.02), Path(sys.argv[1]))
uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on")).run(sockets=[listener])
"""


@contextmanager
def server(data_dir: Path) -> Iterator[tuple[int, str]]:
    """A server in a process of its own, so that its memory can be told from ours."""
    command = [sys.executable, "-c", SERVER, str(data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def resident(pid: int) -> float:
    """Megabytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_operations(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return sum(
        int(count)
        for count in re.findall(r"^tinkex_open_operations\{.*\} (\d+)$", text, re.MULTILINE)
    )


def expected_losses(seed: int, steps: int) -> list[float]:
    """Return the results of a run's passes, each carried out once and in order."""
    engine = FakeEngine()
    engine.create("a", "fake", types.LoraConfig(rank=4))
    losses = []
    for step in range(steps):
        engine.pass_start(
            PassJob("p", "a", make_data(types, seed=100 * seed + step), "cross_entropy", {})
        )
        result = engine.pass_step()[0].result
        assert not isinstance(result, Exception)
        losses.append(result.metrics["loss:sum"])
        engine.optim_step("a", types.AdamParams(learning_rate=0.01))
    return losses


def prompt_of(number: int) -> types.ModelInput:
    return types.ModelInput.from_ints([number % 97 + 3, number % 89 + 3, number % 7 + 3])


def params_of(number: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=5, seed=number)


def expected_samples(numbers: range) -> list[list[int]]:
    engine = FakeEngine()
    engine.load_sampler("s", "fake", None)
    for number in numbers:
        request = SampleRequest(prompt=prompt_of(number), sampling_params=params_of(number))
        engine.sample_start(SampleJob(str(number), "s", request, number))
    found: dict[int, list[int]] = {}
    while engine.sampling():
        for done in engine.sample_step():
            assert not isinstance(done.result, Exception)
            found[int(done.job)] = done.result.sequences[0].tokens
    return [found[number] for number in numbers]


async def train(client: Any, seed: int, first: int) -> list[float]:
    """Steps, three of them under way at a time."""
    losses, under_way = [], []
    for step in range(first, first + STEPS):
        passed = client.forward_backward(make_data(types, seed=100 * seed + step), "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.01))
        under_way.append((passed, stepped))
        if len(under_way) == 3 or step == first + STEPS - 1:
            for passing, stepping in under_way:
                losses.append((await passing).metrics["loss:sum"])
                await stepping
            under_way = []
        if step % 5 == 4:
            await client.save_state(f"at-{step}")
    return losses


async def draw(sampler: Any, numbers: range) -> list[tuple[list[int], str]]:
    """Samples, so many of them in flight."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> tuple[list[int], str]:
        async with room:
            response = await sampler.sample(prompt_of(number), 1, params_of(number))
            return response.sequences[0].tokens, response.sequences[0].sequence_id

    return await asyncio.gather(*(one(number) for number in numbers))


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc"
)
def test_load_loses_and_repeats_nothing_in_bounded_memory(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        pid, url = stack.enter_context(server(tmp_path))
        services = [stack.enter_context(tinkex.ServiceClient(base_url=url)) for _ in range(CLIENTS)]
        runs = [
            service.create_lora_training_client("fake", rank=4).result() for service in services
        ]
        sampler = services[0].create_sampling_client(base_model="fake").result()

        async def half(number: int) -> tuple[list[list[float]], list[tuple[list[int], str]]]:
            training = [train(run, seed, STEPS * number) for seed, run in enumerate(runs)]
            *losses, drawn = await asyncio.gather(
                *training, draw(sampler, range(SAMPLES * number, SAMPLES * (number + 1)))
            )
            return losses, drawn  # type: ignore[return-value]

        first, drawn = asyncio.run(half(0))
        between = resident(pid)
        second, more = asyncio.run(half(1))
        after = resident(pid)
        assert open_operations(url) == 0
    for seed in range(CLIENTS):
        assert first[seed] + second[seed] == expected_losses(seed, 2 * STEPS)
    assert [tokens for tokens, _ in drawn + more] == expected_samples(range(2 * SAMPLES))
    assert len({sequence_id for _, sequence_id in drawn + more}) == 2 * SAMPLES
    assert after - between < GROWTH_MB


def test_owner_of_many_runs_does_not_starve_owner_of_one(tmp_path: Path, model_dir: Path) -> None:
    from tinkex.engine.torch.engine import TorchEngine

    with closing(SqliteDatabase(tmp_path)) as store:
        keys = [create_key(store, "k", owner)[1] for owner in ("many", "one")]
    data = make_data(types, lengths=(30, 30))
    order: list[str] = []
    ended = threading.Condition()

    def note(owner: str) -> Any:
        def noted(_: Any) -> None:
            with ended:
                order.append(owner)
                ended.notify_all()

        return noted

    # A step has room for little more than a pass, so that who comes first is a choice.
    engine = TorchEngine({MODEL: model_dir}, micro_batch_tokens=64)
    with ExitStack() as stack:
        url = stack.enter_context(serving(engine, tmp_path))
        many, one = (
            stack.enter_context(tinkex.ServiceClient(base_url=url, api_key=key)) for key in keys
        )
        crowd = [
            many.create_lora_training_client(MODEL, rank=4, seed=number).result()
            for number in range(15)
        ]
        single = one.create_lora_training_client(MODEL, rank=4, seed=1).result()
        for run in crowd:
            for _ in range(8):
                run.forward_backward(data, "cross_entropy").add_done_callback(note("many"))
        with ended:
            assert ended.wait_for(lambda: order, 60)
        for _ in range(8):
            single.forward_backward(data, "cross_entropy").add_done_callback(note("one"))
        with ended:
            assert ended.wait_for(lambda: len(order) == 16 * 8, 120)
    last = max(place for place, owner in enumerate(order) if owner == "one")
    before = order[:last].count("many")
    assert before < 60, (
        f"{before} of 120 passes of the owner of many runs came before the last of 8"
    )
    assert np.mean([owner == "one" for owner in order[:last]]) > 0.1
