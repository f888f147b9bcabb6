"""One kind of load of the hostile owner, as a process: it goes as far as the server lets it, until
it is ended.

Everything comes from one address of its own (127.0.0.2), so that the limit of connections from one
address is the attacker's. What the server refuses is counted and tried again. Prints its counts as
one line of JSON in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from load import Line

from tinkex.wire import codec

SOURCE = "127.0.0.2"
MODEL = "tinkex/tiny"
WINDOW = 512
OPEN = 15_000
"""Requests for samples that are kept open: most of what an owner may have, the rest is for the
other kinds."""
BACK_OFF = 1.0
BOMB_BYTES = 1 << 30
JSON_BYTES = 16 << 20
SESSIONS = 1_000
"""Sessions that a search has to look through."""
SIDE = 2048
"""Matrices of the custom loss: their product takes all the work that one product may."""


class Peer:
    """A connection that is made again when the server has closed it."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self._line: Peer | None = None

    async def ask(self, path: str, body: bytes, **how: Any) -> tuple[int, bytes, float]:
        """Status, body and seconds of one exchange; status 0 when the connection ended without an
        answer.
        """
        try:
            if self._line is None:
                self._line = await Line.to(self._attack.args.url, self._attack.args.key, SOURCE)
            return await self._line.ask(path, body, **how)
        except OSError:
            if self._line is not None:
                self._line.transport.abort()
            self._line = None
            self._attack.counts["connections lost"] += 1
            await asyncio.sleep(BACK_OFF)
            return 0, b"", 0.0


class Attack:
    """The common part of all kinds: connections with the owner's key, and counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts: Counter[str] = Counter()

    def line(self) -> Peer:
        """A new connection."""
        return Peer(self)

    async def ask(self, line: Peer, path: str, message: Any, **how: Any) -> Any:
        """Ask for something; the answer in JSON, or None when it was refused."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        status, answer, _ = await line.ask(path, body, **how)
        self.counts[f"{path} {status}"] += 1
        if status == 200:
            return json.loads(answer)
        if status in (429, 503):
            await asyncio.sleep(BACK_OFF)
        return None

    async def sure(self, line: Peer, path: str, message: Any) -> Any:
        """Ask until it is granted."""
        while True:
            if (answer := await self.ask(line, path, message)) is not None:
                return answer
            await asyncio.sleep(BACK_OFF)

    async def read(self, line: Peer, request_id: str) -> bytes:
        """Read a result, whatever it is."""
        status = 408
        while status in (0, 408):
            status, answer, _ = await line.ask(
                "retrieve_future", json.dumps({"request_id": request_id}).encode()
            )
        self.counts["results failed" if b'"error"' in answer[:200] else "results read"] += 1
        if b'"error"' in answer[:200] and self.counts["results failed"] == 1:
            print(json.dumps({"failed": answer[:300].decode(errors="replace")}), flush=True)
        return answer

    async def session(self, line: Peer, **fields: Any) -> str:
        """A new session."""
        wanted = {"tags": [], "sdk_version": "0.38.0", **fields}
        return str((await self.sure(line, "create_session", wanted))["session_id"])

    async def run(self, line: Peer) -> tuple[str, str]:
        """A new session with a run; their ids."""
        session = await self.session(line)
        wanted = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 8},
        }
        receipt = await self.sure(line, "create_model", wanted)
        await self.read(line, receipt["request_id"])
        return session, receipt["model_id"]

    async def sampler(self, line: Peer) -> str:
        """A new sampler of the base model."""
        wanted = {
            "session_id": await self.session(line),
            "sampling_session_seq_id": 0,
            "base_model": MODEL,
        }
        return str(
            (await self.sure(line, "create_sampling_session", wanted))["sampling_session_id"]
        )


def prompt(length: int) -> dict[str, Any]:
    """A prompt of so many tokens."""
    return {"chunks": [{"tokens": [3 + at % 2000 for at in range(length)], "type": "encoded_text"}]}


def datum(length: int) -> dict[str, Any]:
    """Data for a pass."""
    targets = {"data": [4 + at % 2000 for at in range(length)], "dtype": "int64"}
    return {"model_input": prompt(length), "loss_fn_inputs": {"target_tokens": targets}}


# ── the kinds ─────────────────────────────────────────────────────────────────────────────────────


async def samples(attack: Attack) -> None:
    """Requests for 1,024 long samples, as many as may be open; their results are read."""
    first = attack.line()
    sampler, waiting = await attack.sampler(first), asyncio.Queue[str](OPEN)
    numbers = iter(range(1, 1 << 40))

    async def submitting() -> None:
        line = attack.line()
        while True:
            params = {"max_tokens": 400, "stop": []}
            wanted = {"sampling_session_id": sampler, "seq_id": next(numbers), "prompt": prompt(24)}
            wanted |= {"sampling_params": params, "num_samples": 1024}
            if (receipt := await attack.ask(line, "asample", wanted)) is not None:
                await waiting.put(receipt["request_id"])

    async def reading() -> None:
        line = attack.line()
        while True:
            await attack.read(line, await waiting.get())

    await asyncio.gather(*(submitting() for _ in range(8)), reading())


async def unread(attack: Attack) -> None:
    """Ask for the most log-probabilities of each prompt, and never read a result."""
    first = attack.line()
    sampler, numbers = await attack.sampler(first), iter(range(1, 1 << 40))

    async def submitting() -> None:
        line = attack.line()
        while True:
            wanted = {
                "sampling_session_id": sampler,
                "seq_id": next(numbers),
                "prompt": prompt(WINDOW - 2),
            }
            wanted |= {"sampling_params": {"max_tokens": 1, "stop": []}, "num_samples": 1}
            wanted |= {"prompt_logprobs": True, "topk_prompt_logprobs": attack.args.topk}
            await attack.ask(line, "asample", wanted)

    await asyncio.gather(*(submitting() for _ in range(4)))


async def passes(attack: Attack) -> None:
    """Passes of 8,000 tokens from 16 runs, four steps ahead, with a save now and then."""

    async def training() -> None:
        line = attack.line()
        _, model = await attack.run(line)
        number, open_ids = 0, []
        body = {"data": [datum(500) for _ in range(16)], "loss_fn": "cross_entropy"}
        while True:
            for path, fields in (
                ("forward_backward", {"forward_backward_input": body}),
                ("optim_step", {"adam_params": {"learning_rate": 1e-4}}),
                *(
                    [("save_weights", {"path": "latest", "overwrite": True})]
                    if number % 24 == 22
                    else []
                ),
            ):
                number += 1
                receipt = await attack.sure(
                    line, path, {"model_id": model, "seq_id": number, **fields}
                )
                open_ids.append(receipt["request_id"])
            while len(open_ids) > 8:
                await attack.read(line, open_ids.pop(0))

    await asyncio.gather(*(training() for _ in range(16)))


async def losses(attack: Attack) -> None:
    """Passes with a custom loss that takes all the work that a pass may, from two runs."""

    async def training() -> None:
        line = attack.line()
        session, model = await attack.run(line)
        wanted = {"session_id": session, "custom_loss_seq_id": 0, "name": "heavy", "graph": heavy()}
        wanted["inputs"] = [{"name": "logprobs", "rank": 1}]
        receipt = await attack.sure(line, "create_custom_loss", wanted)
        await attack.read(line, receipt["request_id"])
        number, open_ids = 0, []
        body = {
            "data": [datum(1), datum(1)],
            "loss_fn": "custom",
            "loss_fn_config": {"loss_id": receipt["request_id"]},
        }
        while True:
            number += 1
            wanted = {"model_id": model, "seq_id": number, "forward_backward_input": body}
            open_ids.append((await attack.sure(line, "forward_backward", wanted))["request_id"])
            if len(open_ids) > 3:
                await attack.read(line, open_ids.pop(0))

    await asyncio.gather(*(training() for _ in range(2)))


def heavy() -> dict[str, Any]:
    """A loss that multiplies the largest matrices that it may, whatever its data are."""

    def step(name: str, target: str, *args: Any, op: str = "call_function") -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    ref = {
        name: {"ref": name} for name in ("logprobs", "total", "ones", "scaled", "product", "sum")
    }
    nodes = [
        step("logprobs", "logprobs", op="placeholder"),
        step("total", "sum", ref["logprobs"], op="call_method"),
        step("ones", "torch.ones", SIDE, SIDE),
        step("scaled", "operator.mul", ref["ones"], ref["total"]),
        step("product", "operator.matmul", ref["scaled"], ref["ones"]),
        step("sum", "sum", ref["product"], op="call_method"),
        step("output", "output", {"tuple": [ref["sum"], {"dict": {}}]}, op="output"),
    ]
    return {"format": 1, "nodes": nodes}


async def searches(attack: Attack) -> None:
    """Searches that find nothing among a thousand sessions, eight at a time."""
    first = attack.line()
    metadata = {f"key{at}": f"value{at}" for at in range(8)}
    asking: set[asyncio.Task[None]] = set()

    async def searching() -> None:
        line = attack.line()
        while True:
            none = metadata | {"key7": "none"}
            await attack.ask(
                line,
                "sessions/search",
                {"user_metadata": none, "display_name": "z" * 200, "limit": 200},
            )
            await attack.ask(line, "sessions/search", {"user_metadata": metadata, "limit": 200})
            await attack.ask(line, "checkpoints/search", {"user_metadata": none, "limit": 200})

    for number in range(8):
        asking.add(asyncio.create_task(searching()))
        for _ in range(SESSIONS // 8):
            await attack.session(
                first, user_metadata=metadata, display_name=f"a session {number}" * 8
            )
    await asyncio.gather(*asking)


async def connections(attack: Attack) -> None:
    """As many connections as one address may have and more: silent, with half a header, or with
    half a body.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(3000, (hard if hard != resource.RLIM_INFINITY else 1 << 20) - 64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most + 64), hard))
    place = urlsplit(attack.args.url)
    starts = (
        b"",
        b"POST /api/v1/asample HTTP/1.1\r\nhost: 127.0.0.1\r\nx-wait: ",
        b"POST /api/v1/asample HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"x-api-key: "
        + attack.args.key.encode()
        + b'\r\ncontent-length: 1000000\r\n\r\n{"prompt": ',
    )
    room = asyncio.Semaphore(64)

    async def holding(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with room:
                    reader, writer = await asyncio.open_connection(
                        place.hostname, place.port, local_addr=(SOURCE, 0)
                    )
                attack.counts["opened"] += 1
                writer.write(starts[number % len(starts)])
                while not reader.at_eof():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(4096), 5)
                        continue
                    writer.write(b" " if number % len(starts) else b"")
                writer.close()
                attack.counts["closed by the server"] += 1
            await asyncio.sleep(BACK_OFF)

    await asyncio.gather(*(holding(number) for number in range(most)))


async def bodies(attack: Attack) -> None:
    """Small bodies that open to a gigabyte, and large ones in JSON."""
    first = attack.line()
    session, model = await attack.run(first)
    bomb, packed = spaces(session, BOMB_BYTES), {"more": "content-encoding: zstd\r\n"}

    async def bombing() -> None:
        line = attack.line()
        while True:
            for path in ("session_heartbeat", "optim_step", "forward_backward"):
                await attack.ask(line, path, bomb, **packed)

    async def filling() -> None:
        line, number = attack.line(), 0
        while True:
            number += 1
            data = {"data": [datum(500)], "loss_fn": "cross_entropy"}
            wanted = json.dumps(
                {"model_id": model, "seq_id": number, "forward_backward_input": data}
            )
            await attack.sure(line, "forward_backward", wanted.encode().ljust(JSON_BYTES))
            number += 1  # a step, so that the journal can be dropped now and then
            wanted = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-4}}
            receipt = await attack.sure(line, "optim_step", wanted)
            await attack.read(line, receipt["request_id"])

    await asyncio.gather(bombing(), filling())


def spaces(session: str, size: int) -> bytes:
    """A message that is followed by so many spaces, compressed."""
    packer = codec.zstd.ZstdCompressor(1)
    packed = packer.compress(json.dumps({"session_id": session}).encode())
    return (
        packed
        + b"".join(packer.compress(b" " * (1 << 20)) for _ in range(size >> 20))
        + packer.flush()
    )


KINDS: dict[str, Callable[[Attack], Coroutine[Any, Any, None]]] = {
    "samples": samples,
    "unread": unread,
    "passes": passes,
    "losses": losses,
    "searches": searches,
    "connections": connections,
    "bodies": bodies,
}


async def go(args: argparse.Namespace) -> Counter[str]:
    """Attack until the process is told to end."""
    attack = Attack(args)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    attacking = asyncio.create_task(KINDS[args.kind](attack))
    ending = asyncio.create_task(over.wait())
    await asyncio.wait([attacking, ending], return_when=asyncio.FIRST_COMPLETED)
    if attacking.done():
        attacking.result()
    attacking.cancel()
    return attack.counts


def main() -> None:
    """Print counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--topk", type=int, default=1024)
    args = parser.parse_args()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        counts = runner.run(go(args))
        print(json.dumps({"counts": counts}), flush=True)


if __name__ == "__main__":
    main()
