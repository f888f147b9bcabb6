"""Observers: who is told when a server pauses the queue that a request waits in.

Run it:  OBSERVER_MODE=custom python examples/queue_state_observer_demo.py Settings: OBSERVER_MODE
is builtin (the client's own log line), custom (a function of yours) or telemetry (the event bus);
where to go: see common.py.

Servers pause only when they must, so a rehearsal shows first what an observer is told.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import common

from tinkex import ModelInput, SamplingParams, ServiceClient, events
from tinkex.client.futures.queue_states import Observer, QueueStateLogger, QueueStateTracker
from tinkex.types import QueueState

MODES = ("builtin", "custom", "telemetry")
MODE = common.text("OBSERVER_MODE", "builtin").lower()
LOGGER = QueueStateLogger("Sampling")
TOLD: list[str] = []


def builtin_observer(queue_state: QueueState, queue_state_reason: str | None) -> None:
    """What clients do by themselves: a warning in the log, once a minute at most."""
    LOGGER.on_queue_state_change(queue_state, queue_state_reason, name="rehearsal")


def custom_observer(queue_state: QueueState, metadata: Mapping[str, Any]) -> None:
    """An observer of one's own: takes the state, or the state and the reason, or, by this name, all
    that is known.
    """
    TOLD.append(queue_state.value)
    print(f"custom observer: {queue_state.value}, reason {metadata.get('queue_state_reason')!r}")


def tell_event(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    """What a listener on the event bus sees."""
    TOLD.append(metadata["queue_state"])
    print(f"event {name}: {metadata['queue_state']}, reason {metadata['queue_state_reason']!r}")


def main() -> None:
    """A rehearsal, a sample and a training pass, observed."""
    if MODE not in MODES:
        common.fail(f"OBSERVER_MODE must be one of {', '.join(MODES)}, got {MODE!r}")
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s"
    )
    observer: Observer | None = custom_observer if MODE == "custom" else None
    if MODE == "telemetry":
        events.attach("observer", [events.QUEUE_STATE_CHANGE], tell_event)

    common.section(f"Rehearsal ({MODE})")
    tracker = QueueStateTracker([builtin_observer, observer])
    changes = [
        tracker.heard("paused_capacity"),
        tracker.heard("paused_capacity"),
        tracker.heard("active"),
    ]
    common.proof(changes == [True, False, True], "a state that is told twice is news once")
    expected = [] if MODE == "builtin" else ["paused_capacity", "active"]
    common.proof(
        expected == TOLD,
        f"what was told: {TOLD if TOLD else 'a line in the log, and nothing else'}",
    )

    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        tokens = common.tokenizer_of(model).encode("Hello from the queue observers!")
        common.section("A sample")
        sampler = service.create_sampling_client(base_model=model).result()
        sampled = sampler.sample(
            ModelInput.from_ints(tokens),
            1,
            SamplingParams(max_tokens=16),
            timeout=60,
            queue_state_observer=observer,
        ).result()
        print(f"{len(sampled.sequences[0].tokens)} tokens")

        common.section("A training pass")
        client = service.create_lora_training_client(model, rank=8).result()
        options: Any = {} if observer is None else {"queue_state_observer": observer}
        passed = client.forward_backward(
            [common.next_token_datum(tokens)], "cross_entropy", **options
        ).result()
        print(f"metrics {passed.metrics}")
    events.detach("observer")
    common.proof(
        sampled.sequences[0].tokens and "loss:sum" in passed.metrics, "both were carried out"
    )


if __name__ == "__main__":
    common.run(main)
