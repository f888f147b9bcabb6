"""Helpers of several tests: a server on a socket, and the whole training loop, once for any
client."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import pytest

if TYPE_CHECKING:
    from tinkex.engine.api import Engine
    from tinkex.server.database.sqlite_connection import Connection
    from tinkex.server.state import State
    from tinkex.server.workers.fleet import Fleet

MODEL = "test/small"
T = TypeVar("T")


def is_coroutine_function(function: Any) -> bool:
    """Return True if asyncio takes a function for a coroutine function, as it does twins."""
    return inspect.iscoroutinefunction(function) or hasattr(function, "_is_coroutine")


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for what comes by itself; how long that takes on this machine is no matter."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


class Clock:
    """The time as a module sees it: the real one, and as much later as a test says."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time() + self.ahead

    def time_ns(self) -> int:
        return time.time_ns() + int(self.ahead * 1e9)


def let_pass(seconds: float) -> None:
    """Give others time, in small pieces: a machine that stands still for a moment takes one of
    them, not all."""
    for _ in range(round(seconds / 0.01)):
        time.sleep(0.01)


def settled(value: Callable[[], T], looks: int = 25) -> T:
    """Return the value once it stops changing; fail if it never does.

    Many looks, a hundredth of a second apart: what is already under way when it is stopped may
    still arrive, and a machine that stands still for a moment makes one look late, not all of them.
    """
    deadline, last, same = time.monotonic() + 5, value(), 0
    while same < looks:
        assert time.monotonic() < deadline, f"it does not come to rest: {last!r}"
        time.sleep(0.01)
        now = value()
        last, same = now, same + 1 if now == last else 0
    return last


def listening(port: int = 0) -> socket.socket:
    """A socket on a loopback port that asyncio answers through at once.

    `socket.create_server` does not name the protocol, and asyncio then leaves small packets to be
    held back: 40 ms for each answer.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


async def hold_the_door(listener: Any) -> None:
    """Accept nobody any more, and let in who was accepted: asyncio loses them if the door is closed
    meanwhile."""
    asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):
        await asyncio.sleep(0)


@contextmanager
def serving(
    engine: Engine | Mapping[str, Engine] | Fleet, data_dir: Path, port: int = 0, **options: Any
) -> Iterator[str]:
    """A real server on a loopback port, a free one by default, in a thread of its own."""
    import uvicorn

    from tinkex.server.app import create_app

    listener = listening(port)
    app = create_app(engine, data_dir, **options)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def main_loop() -> None:
        await server.on_tick(0)
        # uvicorn's own looks ten times a second, and every test that has a server would wait for it
        await stop.wait()
        await hold_the_door(listener)

    server.main_loop = main_loop  # type: ignore[method-assign]

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        ready.set()
        await task
        # one that was accepted at the last moment is there some turns of the loop later
        for _ in range(3):
            await asyncio.sleep(0)
            for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
                transport.abort()  # whoever reads no more would keep it open for what was not sent
        await asyncio.sleep(0)

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
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
    client = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    losses = train(client, types, data, 4)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)

    state = client.save_state("resume").result(60).path
    assert state.startswith("tinker://")
    assert state.endswith("/weights/resume")
    straight = train(client, types, data, 3)
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert train(resumed, types, data, 3) == straight
    weights_only = service.create_training_client_from_state(state).result()
    assert train(weights_only, types, data, 3) != straight

    sampler_path = client.save_weights_for_sampler("final").result(60).path
    assert sampler_path.endswith("/sampler_weights/final")
    sampler = service.create_sampling_client(model_path=sampler_path).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.9)
    drawn = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result(60)
    assert [len(sequence.tokens) for sequence in drawn.sequences] == [6, 6, 6]
    assert len({tuple(sequence.tokens) for sequence in drawn.sequences}) > 1
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3

    nameless = client.save_weights_and_get_sampling_client().result()
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
    """A custom loss equal to cross-entropy must give cross-entropy's value and take a step of its
    own."""
    reference = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]

    def loss(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum(-item.sum() for item in logprobs)
        return total, {"seen": float(len(logprobs))}

    output = client.forward_backward_custom(data, loss).result(60)
    assert output.metrics["loss:sum"] == pytest.approx(reference, rel=1e-5)
    assert output.metrics["seen"] == 3.0
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
    assert client.forward(data, "cross_entropy").result(60).metrics["loss:sum"] < reference


def logprobs_by_peft(model_dir: Path, adapter: Path, data: list[Any]) -> list[Any]:
    """Load an adapter's unchanged files with transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter))
    found = []
    for datum in data:
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy())
        with torch.no_grad():
            rows = model(torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
        found.append(rows[torch.arange(len(targets)), targets].numpy())
    return found


def assert_peft_agrees(client: Any, types: Any, model_dir: Path, adapter: Path) -> None:
    """A training client must compute what peft computes with these files."""
    data = make_data(types, seed=9)
    output = client.forward(data, "cross_entropy").result(60)
    for ours, theirs in zip(
        output.loss_fn_outputs, logprobs_by_peft(model_dir, adapter, data), strict=True
    ):
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), theirs, rtol=2e-5, atol=2e-5)


@dataclass(frozen=True)
class Heard:
    """Answer of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """Speaks to a server without any client: what is sent is what the test says."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Heard:
        """One request; `body` is bytes, or anything JSON can write."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)
        with closing(connection):
            kind = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, f"/api/v1/{path}", data, kind | (headers or {}))
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Heard(response.status, named, response.read())

    def get(self, path: str) -> Any:
        """The answer to a GET that must succeed."""
        heard = self.send(path, method="GET")
        assert heard.status == 200, heard
        return heard.json

    def post(self, path: str, body: Any) -> Any:
        """The answer to a POST that must succeed."""
        heard = self.send(path, body)
        assert heard.status == 200, heard
        return heard.json

    def result(self, request_id: str) -> Any:
        """The outcome of a future, as JSON."""
        while True:
            heard = self.send("retrieve_future", {"request_id": request_id})
            if heard.status != 408:
                assert heard.status == 200, heard
                return heard.json

    def run(self, path: str, body: Any) -> Any:
        """Submit an operation and wait for its outcome."""
        return self.result(self.post(path, body)["request_id"])

    def session(self) -> str:
        """A new session."""
        return str(self.post("create_session", {"tags": [], "sdk_version": "0.36.0"})["session_id"])

    def model(
        self, session: str | None = None, number: int = 0, base_model: str = "fake", rank: int = 4
    ) -> str:
        """A new training run."""
        body = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": rank},
        }
        return str(self.run("create_model", body)["model_id"])


def pass_json(
    model_id: str, seq_id: int | None, tokens: tuple[int, ...] = (1, 2, 3), **inputs: Any
) -> dict[str, Any]:
    """A forward_backward request in JSON, targets one further on."""
    tensors = {
        "target_tokens": {"data": [token + 1 for token in tokens], "dtype": "int64"},
        **inputs,
    }
    datum = {
        "model_input": {"chunks": [{"tokens": list(tokens), "type": "encoded_text"}]},
        "loss_fn_inputs": tensors,
    }
    body = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": body}


def step_json(model_id: str, seq_id: int | None, learning_rate: float = 0.1) -> dict[str, Any]:
    """An optim_step request in JSON."""
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": learning_rate}}


def sample_json(sampler: str, seq_id: int | None = 0, **fields: Any) -> dict[str, Any]:
    """An asample request in JSON."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
        "num_samples": 1,
        **fields,
    }


class Keyed(Wire):
    """The same, with a key."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url)
        self.key = key

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Heard:
        """One request, with the key."""
        return super().send(
            path, body, method=method, headers={"X-API-Key": self.key, **(headers or {})}
        )


def silence() -> None:
    """Take everybody off the bus of events: also whom an earlier test of this process has left
    there."""
    from tinkex import events

    for known in events.handlers():
        events.detach(known.handler_id)


def sqlite(state: State) -> Connection:
    """The connection of a running server to its database."""
    from tinkex.server.database.sqlite import SqliteDatabase

    assert isinstance(state.database, SqliteDatabase)
    return state.database.connection
