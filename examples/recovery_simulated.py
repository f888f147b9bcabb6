"""Recovery without a server: a run is marked corrupted, a monitor notices, an executor makes it
anew.

Run it:  python examples/recovery_simulated.py      (needs no server)

Stand-ins take the place of the service and of the client that looks runs up; the monitor and the
executor are real.
"""

import datetime as dt
import threading
from types import SimpleNamespace
from typing import Any

import common

from tinkex import Checkpoint, RecoveryPolicy, TrainingRun
from tinkex.recovery import Executor, Monitor

RUN = "run-simulated"


class Backend:
    """What a server would know of one run: its checkpoints, and whether it is corrupted."""

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.corrupted = False

    def save(self, name: str) -> Checkpoint:
        """Record a checkpoint."""
        saved = Checkpoint(
            checkpoint_id=f"weights/{name}",
            checkpoint_type="training",
            time=dt.datetime.now(dt.UTC),
            tinker_path=f"tinker://{RUN}/weights/{name}",
        )
        self.checkpoints.append(saved)
        return saved

    async def get_training_run(self, run_id: str) -> TrainingRun:
        """What a `RestClient` would answer."""
        return TrainingRun(
            training_run_id=run_id,
            base_model="simulated",
            model_owner="you",
            is_lora=True,
            corrupted=self.corrupted,
            last_request_time=dt.datetime.now(dt.UTC),
            last_checkpoint=self.checkpoints[-1],
        )

    async def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        """What a `ServiceClient` would make."""
        self.corrupted = False
        return SimpleNamespace(model_id=f"{RUN}-again", restored_from=path)

    @property
    def holder(self) -> Any:
        """A session that is not open."""
        return SimpleNamespace(session_id=None)


def main() -> None:
    """Lose a run, and get it back."""
    backend: Any = Backend()
    first = backend.save("0001")
    print(f"1. saved {first.tinker_path}")

    done = threading.Event()
    told: list[Any] = []

    def on_recovery(old: Any, new: Any, checkpoint: str) -> None:
        told.extend([old, new, checkpoint])
        done.set()

    policy = RecoveryPolicy(enabled=True, poll_interval_ms=150, on_recovery=on_recovery)
    monitor = Monitor(Executor(), policy, rest_client_fun=lambda service: backend)
    monitor.monitor_run(RUN, backend, {"training_client": "the old client"})
    backend.corrupted = True
    print("2. the run is marked corrupted; the monitor looks every 150 ms")

    common.proof(done.wait(3), "the recovery was completed within 3 s")
    old, new, checkpoint = told
    print(f"3. recovered from {checkpoint}: {old} became {new.model_id}")
    second = backend.save("0002")
    print(f"4. training goes on: saved {second.tinker_path}")

    print(
        f"status: corrupted {backend.corrupted}, checkpoints "
        f"{[one.checkpoint_id for one in backend.checkpoints]}"
    )
    common.proof(checkpoint == first.tinker_path == new.restored_from, "it went on from 0001")
    common.proof(len(backend.checkpoints) == 2, "both checkpoints are on record")
    common.proof(
        not backend.corrupted and not monitor.run_ids, "the run is well, and no longer watched"
    )


if __name__ == "__main__":
    common.run(main)
