"""Why a queue is paused, and how a client holds back: server reasons, a shared pause, a budget of
bytes.

Run it:  python examples/queue_reasons_and_sampling_throttling.py
Settings: TINKER_PROMPT; where to go: see common.py.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import common

from tinkex import ModelInput, SamplingParams, ServiceClient, events
from tinkex.client.futures.queue_states import QueueStateLogger, QueueStateTracker
from tinkex.client.http.limits import DispatchGate
from tinkex.types import QueueState

PROMPT = common.text("TINKER_PROMPT", "Hello from throttling + queue reasons!")
BUDGET = 5 * 1024 * 1024
LARGE = 6_000_000


def queue_reasons() -> None:
    """What is logged and told when a server says why work waits."""
    heard: list[tuple[Any, Any]] = []

    def tell(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        heard.append((metadata["queue_state"], metadata["queue_state_reason"]))
        print(f"event {name}: {heard[-1]}")

    events.attach("queue", [events.QUEUE_STATE_CHANGE], tell)
    logger = QueueStateLogger("Sampling")

    def warn(queue_state: QueueState, queue_state_reason: str | None) -> None:
        logger.on_queue_state_change(queue_state, queue_state_reason, name="demo-sampler")

    # Every request of a client is followed by such a tracker; here it is told by hand what a server
    # would say.
    tracker = QueueStateTracker([warn])
    tracker.heard("paused_rate_limit", "server says: running short on capacity")
    # no news: nobody is told
    tracker.heard("paused_rate_limit", "server says: running short on capacity")
    tracker.heard("active")
    events.detach("queue")
    common.proof(
        [state for state, _ in heard] == ["paused_rate_limit", "active"],
        "changes are told, and only those",
    )


async def throttling() -> list[str]:
    """Send two prompts of 6 MB under a budget of 5 MiB while the server asks for a pause."""
    gate = DispatchGate(BUDGET)
    gate.backoff.pause(1.0)
    began = time.monotonic()
    order: list[str] = []

    async def submit(name: str) -> None:
        async with gate.passed(LARGE):
            order.append(f"{name} in")
            print(f"  {time.monotonic() - began:4.1f} s: {name} is let through")
            await asyncio.sleep(0.2)
            order.append(f"{name} out")
            print(f"  {time.monotonic() - began:4.1f} s: {name} is done")

    await asyncio.gather(submit("first"), submit("second"))
    common.proof(time.monotonic() - began > 1.0, "the pause was kept")
    return order


def main() -> None:
    """Reasons, throttling, sizes, and a sample under all of it."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s"
    )
    common.section("Queue reasons")
    queue_reasons()

    common.section("Throttling")
    order = asyncio.run(throttling())
    common.proof(
        order == ["first in", "first out", "second in", "second out"],
        "the second waits for the first",
    )

    common.section("Sizes")
    nine = ModelInput.from_ints(range(9))
    print(f"9 tokens count as {nine.estimated_bytes} bytes")
    common.proof(
        nine.estimated_bytes == 90,
        "ten bytes a token (in Llama 3's tokens this prompt has nine: 90 bytes)",
    )

    common.section("A sample")
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        tokenizer = common.tokenizer_of(model)
        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        print(f"{PROMPT!r}: {prompt.length} tokens, {prompt.estimated_bytes} bytes")
        sampler = service.create_sampling_client(base_model=model).result()
        response = sampler.sample(prompt, 1, SamplingParams(max_tokens=32), timeout=60).result()
        common.show_samples(response.sequences, tokenizer)
    common.proof(response.sequences[0].tokens, "the sample came back")


if __name__ == "__main__":
    common.run(main)
