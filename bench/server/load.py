"""The clients of the load, in one process. Prints JSON lines: marks with their times, then the
figures.

They speak bare HTTP/1.1, so that what a client library costs is not what is measured. A submit is
timed from the writing of its bytes to the arrival of its receipt's last one, in the callback of the
socket, before any task is woken. What the kernel and this process's event loop add is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepResponse,
)
from tinkex.wire import codec

DEPTH = 2
"""Steps that a training client has under way."""
SAVE_EVERY = 12
WARM_STEPS = 2
"""The first steps of a run take the memory of its gradient and its optimizer."""
SUBMITTERS = 16
"""Connections that samples are submitted on, each with one submit at a time."""
TOKENS, DATUMS = 32, 2
PROMPT = 24
FILL_SECONDS = 60.0
"""A server that ends samples faster than they are submitted is never full."""
COMPARED_STEPS, COMPARED_CLIENTS, COMPARED_SAMPLES = 4, 3, 12


def mark(name: str, **facts: Any) -> None:
    """Tell the parent process."""
    print(json.dumps({"mark": name, "at": time.monotonic(), **facts}), flush=True)


class Line(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, key: str = "") -> None:
        self.transport: Any = None
        self.arrived = 0.0
        self._key = f"x-api-key: {key}\r\n" if key else ""
        self._buffer = bytearray()
        self._waiting: asyncio.Future[tuple[int, bytes]] | None = None
        self._is_closed = False

    @classmethod
    async def to(cls, url: str, key: str = "", source: str | None = None) -> Line:
        """Connect to a server, with a key if it wants one, from an address if that matters."""
        place, local = urlsplit(url), None if source is None else (source, 0)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: cls(key), place.hostname, place.port, local_addr=local
        )
        return line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self._is_closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error or ConnectionError("closed by the server"))

    def data_received(self, data: bytes) -> None:
        """Take bytes in; the clock is read here."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.index(b"content-length:") + 15
        size = int(head[at:].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + size:
            return
        self.arrived = time.perf_counter()
        body = bytes(self._buffer[end + 4 : end + 4 + size])
        self._buffer.clear()
        assert self._waiting is not None
        if not self._waiting.done():
            self._waiting.set_result((int(head[9:12]), body))

    async def ask(
        self, path: str, body: bytes, kind: str = codec.JSON, more: str = ""
    ) -> tuple[int, bytes, float]:
        """Status, body and seconds of one exchange."""
        if self._is_closed:
            raise ConnectionError("closed by the server")
        self._waiting = asyncio.get_running_loop().create_future()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
            f"{kind}\r\naccept: {codec.PROTOBUF}\r\n"
        )
        begun = time.perf_counter()
        self.transport.write(
            f"{head}{self._key}{more}content-length: {len(body)}\r\n\r\n".encode() + body
        )
        status, answer = await self._waiting
        return status, answer, self.arrived - begun

    async def get(self, path: str) -> bytes:
        """Fetch a page."""
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{self._key}\r\n".encode())
        status, answer = await self._waiting
        if status != 200:
            raise SystemExit(f"{path}: {status} {answer[:300]!r}")
        return answer

    async def post(self, path: str, message: Any) -> Any:
        """One exchange in JSON that must succeed."""
        status, answer, _ = await self.ask(path, json.dumps(message).encode())
        if status != 200:
            raise SystemExit(f"{path}: {status} {answer[:300]!r}")
        return json.loads(answer)

    async def result(self, request_id: str, kind: Any) -> Any:
        """Poll for the result of a future; a failure ends the whole run."""
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            status, answer, _ = await self.ask("retrieve_future", body)
            if status == 408:
                continue
            if status != 200 or b'"error"' in answer[:200]:
                raise SystemExit(f"{request_id}: {status} {answer[:300]!r}")
            return codec.decode(
                kind, answer, codec.PROTOBUF if codec.has_protobuf(kind) else codec.JSON
            )


@dataclass
class Load:
    """Everything that is counted."""

    url: str
    model: str
    tokens: int
    """How many a sample draws."""
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    phase: str = "fill"
    counts: Counter[str] = field(default_factory=Counter)
    losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    drawn: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    is_over: bool = False

    async def submit(self, line: Line, path: str, body: bytes, kind: str = codec.JSON) -> str:
        """Send an operation; the id of its future."""
        while True:
            status, answer, seconds = await line.ask(path, body, kind)
            self.latencies[f"{self.phase} {path}"].append(seconds)
            if status == 200:
                self.counts[f"{path} submitted"] += 1
                return str(json.loads(answer)["request_id"])
            if status != 429:
                raise SystemExit(f"{path}: {status} {answer[:300]!r}")
            self.counts["refused"] += 1
            await asyncio.sleep(1)


# ── training ──────────────────────────────────────────────────────────────────────────────────────


def batch(client: int, step: int) -> ForwardBackwardInput:
    """The data of a step: the same for the same client and step."""
    rng = np.random.default_rng([client, step])
    data = []
    for _ in range(DATUMS):
        tokens = rng.integers(3, 250, TOKENS + 1)
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(TOKENS, np.float32),
        }
        data.append(
            Datum(model_input=ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        )
    return ForwardBackwardInput(data=data, loss_fn="cross_entropy")


class Trainer:
    """A training client: one session, one run, steps pipelined."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.seq = 0
        self.steps = 0
        self.collected = 0
        self.warm = asyncio.Event()

    async def open(self) -> None:
        """Make the run."""
        self.line, self.poll = await Line.to(self.load.url), await Line.to(self.load.url)
        session = (await self.line.post("create_session", {"tags": [], "sdk_version": "0.36.0"}))[
            "session_id"
        ]
        lora = {"rank": 8, "seed": self.number}
        wanted = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": self.load.model,
            "lora_config": lora,
        }
        receipt = await self.line.post("create_model", wanted)
        self.model_id = receipt["model_id"]
        status = 408
        while status == 408:
            body = json.dumps({"request_id": receipt["request_id"]}).encode()
            status, answer, _ = await self.poll.ask("retrieve_future", body)
        if status != 200 or b'"error"' in answer:
            raise SystemExit(f"create_model: {status} {answer!r}")

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    async def step(self) -> tuple[str, str]:
        """Submit a pass and a step of the optimizer."""
        request = ForwardBackwardRequest(
            batch(self.number, self.steps), self.model_id, self._next()
        )
        encoded = codec.encode(request)
        passed = await self.load.submit(
            self.line, "forward_backward", encoded.data, encoded.content_type
        )
        adam = {
            "model_id": self.model_id,
            "seq_id": self._next(),
            "adam_params": {"learning_rate": 1e-3},
        }
        stepped = await self.load.submit(self.line, "optim_step", json.dumps(adam).encode())
        self.steps += 1
        return passed, stepped

    async def collect(self, passed: str, stepped: str) -> None:
        """Fetch what a step gave."""
        output = await self.poll.result(passed, ForwardBackwardOutput)
        self.load.counts["forward_backward arrived"] += 1
        if len(output.loss_fn_outputs) != DATUMS:
            raise SystemExit(f"{passed}: {len(output.loss_fn_outputs)} outputs")
        self.load.losses[self.number].append(output.metrics["loss:sum"])
        await self.poll.result(stepped, OptimStepResponse)
        self.load.counts["optim_step arrived"] += 1
        self.collected += 1
        if self.collected == WARM_STEPS:
            self.warm.set()

    async def save(self) -> None:
        """Save, now and then."""
        wanted = {"model_id": self.model_id, "path": f"at-{self.steps}", "seq_id": self._next()}
        saved = await self.load.submit(self.line, "save_weights", json.dumps(wanted).encode())
        status = 408
        while status == 408:
            status, answer, _ = await self.poll.ask(
                "retrieve_future", json.dumps({"request_id": saved}).encode()
            )
        if status != 200 or b"tinker://" not in answer:
            raise SystemExit(f"{saved}: {status} {answer!r}")
        self.load.counts["save_weights arrived"] += 1

    async def run(self, steps: int | None = None) -> None:
        """Train until the load is over, or for so many steps."""
        under_way: deque[tuple[str, str]] = deque()
        while self.steps < steps if steps is not None else not self.load.is_over:
            under_way.append(await self.step())
            if len(under_way) >= DEPTH:
                await self.collect(*under_way.popleft())
            if steps is None and (self.steps + self.number) % SAVE_EVERY == 0:
                await self.save()
        for pair in under_way:
            await self.collect(*pair)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


class Sampler:
    """A sampling client: one batched poll, and so many samples in flight."""

    def __init__(self, load: Load, number: int, wanted: int, lines: list[Line]) -> None:
        self.load, self.number, self.wanted, self.lines = load, number, wanted, lines
        self.open_ids: dict[str, int] = {}
        self.over: set[str] = set()
        self.seq = 0
        self.room = asyncio.Semaphore(wanted)
        self.full = asyncio.Event()
        self.submitters = len(lines)

    async def open(self) -> None:
        """Make the sampling session."""
        self.poll = await Line.to(self.load.url)
        session = (await self.poll.post("create_session", {"tags": [], "sdk_version": "0.36.0"}))[
            "session_id"
        ]
        wanted = {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "base_model": self.load.model,
        }
        self.sampler = (await self.poll.post("create_sampling_session", wanted))[
            "sampling_session_id"
        ]

    def body(self, seq: int) -> bytes:
        """A request for a sample: prompt and seed are those of its number."""
        tokens = np.random.default_rng([self.number, seq, 1]).integers(3, 250, PROMPT).tolist()
        return json.dumps(
            {
                "sampling_session_id": self.sampler,
                "seq_id": seq,
                "prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
                "sampling_params": {
                    "max_tokens": self.load.tokens,
                    "seed": seq,
                    "temperature": 1.0,
                },
                "num_samples": 1,
            }
        ).encode()

    async def submitting(self, line: Line) -> None:
        """Submit on one connection, as long as there is room."""
        while not self.load.is_over:
            await self.room.acquire()
            if self.load.is_over:
                break
            seq = self.seq = self.seq + 1
            request_id = await self.load.submit(line, "asample", self.body(seq))
            if request_id not in self.over:  # its result may have come before its receipt
                self.open_ids[request_id] = seq
            if len(self.open_ids) >= self.wanted - len(self.lines):
                self.full.set()
        self.submitters -= 1

    async def polling(self) -> None:
        """Take results in until nothing is in flight and nothing more comes."""
        cursor = 0
        target = {
            "sampling_session_id": self.sampler,
            "cloned_sampler_id": 0,
            "type": "sampling_session",
        }
        while self.submitters or self.open_ids:
            wanted = {
                "target": target,
                "prev_cursor": cursor,
                "inline_bytes": 1 << 20,
                "timeout": 2,
            }
            status, answer, _ = await self.poll.ask("retrieve_futures", json.dumps(wanted).encode())
            if status != 200:
                raise SystemExit(f"retrieve_futures: {status} {answer[:300]!r}")
            head, results = codec.decode_batch(answer)
            cursor = head.cursor
            for request_id, (kind, data) in results.items():
                self.take(request_id, kind, data)

    def take(self, request_id: str, kind: str, data: bytes) -> None:
        """Count a result."""
        if request_id in self.over:
            self.load.counts["asample twice"] += 1
            return
        self.over.add(request_id)
        self.open_ids.pop(request_id, None)
        if kind != codec.PROTOBUF:
            failed = codec.decode(RequestFailedResponse, data)
            raise SystemExit(f"{request_id}: {failed.error}")
        self.load.counts["asample arrived"] += 1
        seq = int(request_id.rpartition(":")[2])
        if self.number == 0 and seq <= COMPARED_SAMPLES:
            self.load.drawn[seq] = drawn(codec.decode(SampleResponse, data, kind))
        self.room.release()


def drawn(response: SampleResponse) -> tuple[bytes, bytes]:
    """What was drawn, to the bit."""
    sequence = response.sequences[0]
    logprobs = b"" if sequence.logprobs_np is None else sequence.logprobs_np.tobytes()
    return np.asarray(sequence.tokens, np.int64).tobytes(), logprobs


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────


async def compare(load: Load) -> dict[str, int]:
    """Ask the server, idle now, for some of it again: the same must come."""
    idle = Load(load.url, load.model, load.tokens)
    numbers = sorted(load.losses)[:: max(1, len(load.losses) // COMPARED_CLIENTS)][
        :COMPARED_CLIENTS
    ]
    different = compared = 0
    for number in numbers:
        trainer = Trainer(idle, number)
        await trainer.open()
        await trainer.run(min(COMPARED_STEPS, len(load.losses[number])))
        again = idle.losses[number]
        compared += len(again)
        different += sum(a != b for a, b in zip(load.losses[number], again, strict=False))
    if load.drawn:
        sampler = Sampler(idle, 0, 1, [])
        await sampler.open()
        for seq, before in sorted(load.drawn.items()):
            request_id = await idle.submit(sampler.poll, "asample", sampler.body(seq))
            compared += 1
            different += drawn(await sampler.poll.result(request_id, SampleResponse)) != before
    return {"compared": compared, "different": different}


async def go(args: argparse.Namespace) -> dict[str, Any]:
    """Fill, hold, drain, compare."""
    load = Load(args.url, args.model, args.tokens)
    trainers = [Trainer(load, number) for number in range(args.clients)]
    for trainer in trainers:
        await trainer.open()
    count = min(args.samplers, args.samples)
    samplers = []
    for number in range(count):
        lines = [await Line.to(args.url) for _ in range(SUBMITTERS // count)]
        samplers.append(Sampler(load, number, args.samples // count, lines))
        await samplers[-1].open()
    gc.collect()
    gc.freeze()
    gc.disable()
    tasks = [asyncio.create_task(trainer.run()) for trainer in trainers]
    tasks += [asyncio.create_task(sampler.polling()) for sampler in samplers]
    submitting = [
        asyncio.create_task(sampler.submitting(line))
        for sampler in samplers
        for line in sampler.lines
    ]
    failing = asyncio.gather(*tasks, *submitting)
    mark("begun")
    ready = [*(sampler.full for sampler in samplers), *(trainer.warm for trainer in trainers)]
    full = asyncio.ensure_future(asyncio.gather(*(event.wait() for event in ready)))
    await asyncio.wait([full, failing], timeout=FILL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    full.cancel()
    before = dict(load.counts)
    load.phase = "load"
    mark("full", in_flight=sum(len(sampler.open_ids) for sampler in samplers))
    cpu = time.process_time()
    await asyncio.wait([failing], timeout=args.seconds)
    counted = Counter(load.counts)
    counted.subtract(before)
    spent = time.process_time() - cpu
    mark("held", in_flight=sum(len(sampler.open_ids) for sampler in samplers))
    load.is_over, load.phase = True, "drain"
    for sampler in samplers:
        for _ in sampler.lines:
            sampler.room.release()
    await failing
    mark("drained")
    told: dict[str, Any] = {
        "latencies": load.latencies,
        "held": counted,
        "counts": load.counts,
        "client_cpu": spent / args.seconds,
        "lost": sum(
            load.counts[f"{op} submitted"] - load.counts[f"{op} arrived"] for op in OPERATIONS
        ),
    }
    return told | await compare(load)


OPERATIONS = ("forward_backward", "optim_step", "save_weights", "asample")


def main() -> None:
    """Print marks and figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--samplers", type=int, default=4)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--core", type=int)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(go(args))), flush=True)


if __name__ == "__main__":
    main()
