"""What several tests need: a server on a socket, and the whole training loop written once for any client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tinkex.engine import Engine

MODEL = "test/small"


@contextmanager
def serving(engine: Engine, data_dir: Path, **options: Any) -> Iterator[str]:
    """A real server on a free loopback port, in a thread of its own."""
    import uvicorn

    from tinkex.server.app import create_app

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, data_dir, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    ready = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)


def make_data(types: Any, seed: int = 0, lengths: tuple[int, ...] = (5, 11, 3)) -> list[Any]:
    """Random next-token examples of mixed lengths."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(2, 300, length + 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": tokens[1:].astype(np.int64),
                    "weights": np.ones(length, dtype=np.float32),
                },
            )
        )
    return data


def train(client: Any, types: Any, data: list[Any], steps: int) -> list[float]:
    """Supervised steps, pipelined; the losses."""
    passes = []
    for _ in range(steps):
        passes.append(client.forward_backward(data, "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=0.01))
    return [future.result(60).metrics["loss:sum"] for future in passes]


def whole_loop(service: Any, types: Any) -> None:
    """Create, train, save, resume bit-equal, sample, score, custom loss."""
    data = make_data(types)
    client = service.create_lora_training_client(MODEL, rank=4, seed=7)
    losses = train(client, types, data, 4)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)

    state = client.save_state("resume").result(60).path
    assert state.startswith("tinker://")
    assert state.endswith("/weights/resume")
    straight = train(client, types, data, 3)
    resumed = service.create_training_client_from_state_with_optimizer(state)
    assert train(resumed, types, data, 3) == straight
    weights_only = service.create_training_client_from_state(state)
    assert train(weights_only, types, data, 3) != straight

    sampler_path = client.save_weights_for_sampler("final").result(60).path
    assert sampler_path.endswith("/sampler_weights/final")
    sampler = service.create_sampling_client(model_path=sampler_path)
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.9)
    drawn = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result(60)
    assert [len(sequence.tokens) for sequence in drawn.sequences] == [6, 6, 6]
    assert len({tuple(sequence.tokens) for sequence in drawn.sequences}) > 1
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3

    nameless = client.save_weights_and_get_sampling_client()
    again = nameless.sample(prompt=prompt, num_samples=3, sampling_params=params).result(60)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in drawn.sequences]
    train(client, types, data, 2)
    still = nameless.sample(prompt=prompt, num_samples=3, sampling_params=params).result(60)
    assert [s.logprobs for s in still.sequences] == [s.logprobs for s in again.sequences]

    scores = sampler.compute_logprobs(prompt).result(60)
    assert scores[0] is None
    assert all(score < 0 for score in scores[1:])
    assert len(scores) == 4

    custom_loss(client, types, data)


def custom_loss(client: Any, types: Any, data: list[Any]) -> None:
    """A custom loss equal to cross-entropy must give cross-entropy's value and take a step of its own."""
    reference = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]

    def loss(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum(-item.sum() for item in logprobs)
        return total, {"seen": float(len(logprobs))}

    output = client.forward_backward_custom(data, loss).result(60)
    assert output.metrics["loss:sum"] == pytest.approx(reference, rel=1e-5)
    assert output.metrics["seen"] == 3.0
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
    assert client.forward(data, "cross_entropy").result(60).metrics["loss:sum"] < reference
