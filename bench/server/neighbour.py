"""The owner who does nothing wrong, while another uses every limit. Prints JSON lines, the figures
last.

First nobody else is there; that is the baseline. Then this process says so, waits for a line on its
standard input, and measures again. A submit is timed as in `load.py`. Engine steps are those of
`/metrics`, read before a sample is submitted and after its result has come, so that none is missed
and some may be counted that were not needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter, defaultdict
from typing import Any

from load import Line, mark

PAUSE_SECONDS = 0.25
"""Between a submit and the next, in each of the tasks."""
CONNECT_SECONDS = 3.0
WARM_SECONDS = 3.0
RANK = 8
STEPS = re.compile(rb'tinkex_engine_steps_total\{kind="(\w+)"\} (\S+)')
DATUM = {
    "model_input": {"chunks": [{"tokens": list(range(3, 19)), "type": "encoded_text"}]},
    "loss_fn_inputs": {"target_tokens": {"data": list(range(4, 20)), "dtype": "int64"}},
}


class Neighbour:
    """Its session, run and sampler, and all that it notes."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.phase = "warm"
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.why: list[str] = []
        self.is_over = False
        self.numbers: Counter[str] = Counter()

    def note(self, what: str, value: float) -> None:
        """Keep a value of this phase."""
        self.seen[f"{self.phase} {what}"].append(value)

    def complain(self, what: str) -> None:
        """Note something that should not have happened."""
        self.counts[f"{self.phase} wrong"] += 1
        self.why.append(f"{self.phase}: {what}"[:300])

    async def line(self) -> Line:
        """A new connection."""
        return await Line.to(self.url, self.key)

    async def open(self) -> None:
        """Make a session, a run and a sampler."""
        line = await self.line()
        session = (await line.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))[
            "session_id"
        ]
        self.session = session
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinkex/tiny"}
        self.sampler = (await line.post("create_sampling_session", wanted))["sampling_session_id"]
        lora = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tinkex/tiny",
            "lora_config": {"rank": RANK},
        }
        receipt = await line.post("create_model", lora)
        self.model_id = receipt["model_id"]
        await self.result(line, receipt["request_id"])

    async def submit(self, line: Line, path: str, message: Any) -> str | None:
        """Submit an operation and note how long its receipt took; its id."""
        status, answer, seconds = await line.ask(path, json.dumps(message).encode())
        self.note("submit", seconds)
        if status == 200:
            return str(json.loads(answer)["request_id"])
        self.complain(f"{path}: {status} {answer[:200]!r}")
        return None

    async def result(self, line: Line, request_id: str | None) -> None:
        """Poll for a result."""
        if request_id is None:
            return
        status, body = 408, json.dumps({"request_id": request_id}).encode()
        while status == 408:
            status, answer, _ = await line.ask("retrieve_future", body)
        if status != 200 or b'"error"' in answer[:200]:
            self.complain(f"{request_id}: {status} {answer[:200]!r}")

    def sample(self, tokens: int) -> dict[str, Any]:
        """A request for a sample."""
        self.numbers["sample"] += 1
        return {
            "sampling_session_id": self.sampler,
            "seq_id": self.numbers["sample"],
            "prompt": {"chunks": [{"tokens": list(range(3, 13)), "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": tokens, "seed": 1, "stop": []},
            "num_samples": 1,
        }

    # ── what it does ──────────────────────────────────────────────────────────────────────────────

    async def sampling(self) -> None:
        """Sample two tokens, again and again, and count the steps of the engine meanwhile."""
        line = await self.line()
        while not self.is_over:
            before, began, phase = await self.steps(line), time.perf_counter(), self.phase
            await self.result(line, await self.submit(line, "asample", self.sample(2)))
            seconds, after = time.perf_counter() - began, await self.steps(line)
            if phase == self.phase:
                self.note("sample", seconds)
                self.note("steps", sum(after.values()) - sum(before.values()))
                self.note("sampling steps", after["sampling"] - before["sampling"])
            await asyncio.sleep(PAUSE_SECONDS)

    async def steps(self, line: Line) -> dict[str, float]:
        """Return the number of steps of each kind that the engine has made."""
        found = STEPS.findall(await line.get("/metrics"))
        if not found:
            raise SystemExit("/metrics says nothing of tinkex_engine_steps_total")
        return {kind.decode(): float(count) for kind, count in found}

    async def training(self) -> None:
        """Train: a small pass and a step."""
        line = await self.line()
        while not self.is_over:
            began, phase = time.perf_counter(), self.phase
            body = {"data": [DATUM], "loss_fn": "cross_entropy"}
            wanted = {
                "model_id": self.model_id,
                "seq_id": self.next(),
                "forward_backward_input": body,
            }
            passed = await self.submit(line, "forward_backward", wanted)
            wanted = {
                "model_id": self.model_id,
                "seq_id": self.next(),
                "adam_params": {"learning_rate": 1e-3},
            }
            stepped = await self.submit(line, "optim_step", wanted)
            await self.result(line, passed)
            await self.result(line, stepped)
            if phase == self.phase:
                self.note("training step", time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)

    def next(self) -> int:
        """The next number of the run."""
        self.numbers["run"] += 1
        return self.numbers["run"]

    async def submitting(self) -> None:
        """Submit samples of one token at an even pace, whatever becomes of them."""
        line, reading = await self.line(), await self.line()
        waiting: asyncio.Queue[str | None] = asyncio.Queue()

        async def read() -> None:
            while (request_id := await waiting.get()) is not None:
                await self.result(reading, request_id)

        reader = asyncio.create_task(read())
        while not self.is_over:
            if (request_id := await self.submit(line, "asample", self.sample(1))) is not None:
                waiting.put_nowait(request_id)
            await asyncio.sleep(PAUSE_SECONDS)
        waiting.put_nowait(None)
        await reader

    async def connecting(self) -> None:
        """Open a connection now and then, and ask for something that needs the key."""
        body = json.dumps({"session_id": self.session}).encode()
        while not self.is_over:
            began = time.perf_counter()
            try:
                line = await self.line()
                status, answer, _ = await asyncio.wait_for(line.ask("session_heartbeat", body), 30)
                line.transport.close()
                if status != 200:
                    self.complain(f"a new connection: {status} {answer[:200]!r}")
            except (OSError, TimeoutError) as error:
                self.complain(f"a new connection: {type(error).__name__} {error}")
            self.note("connect", time.perf_counter() - began)
            await asyncio.sleep(CONNECT_SECONDS)


async def go(args: argparse.Namespace) -> dict[str, Any]:
    """Measure alone, then beside the other owner."""
    owner = Neighbour(args.url, args.key)
    await owner.open()
    working = asyncio.gather(
        owner.sampling(), owner.training(), owner.submitting(), owner.connecting()
    )

    async def phase(name: str, seconds: float) -> None:
        owner.phase = name
        await asyncio.wait([working], timeout=seconds)
        if working.done():
            await working

    await phase("warm", WARM_SECONDS)
    await phase("baseline", args.baseline)
    owner.phase = "between"
    mark("alone")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    mark("begun")
    await phase("load", args.seconds)
    mark("ended")
    owner.phase, owner.is_over = "drain", True
    done, _ = await asyncio.wait([working], timeout=args.patience)
    if not done:
        owner.complain(f"results had not come {args.patience:.0f} s after the end")
        working.cancel()
    return {"seen": owner.seen, "counts": owner.counts, "why": owner.why[:10]}


def main() -> None:
    """Print marks and figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--baseline", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--patience", type=float, default=30)
    args = parser.parse_args()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(go(args))), flush=True)


if __name__ == "__main__":
    main()
