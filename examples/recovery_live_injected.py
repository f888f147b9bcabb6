"""Recovery with a server: a run is said to be corrupted, once, and is made anew from its last
checkpoint.

Run it:  python examples/recovery_live_injected.py Where to go: see common.py. A loop that just
wants to go on uses `tinkex.resilient`; see docs/recovery.md.
"""

import threading

import common

from tinkex import RecoveryPolicy, RestClient, ServiceClient, TrainingClient, TrainingRun
from tinkex.recovery import Executor, Monitor


class OneLie(RestClient):
    """Looks runs up as ever, but calls the first one corrupted."""

    told = False

    async def get_training_run(
        self, training_run_id: str, access_scope: object = "owned"
    ) -> TrainingRun:
        """What the server says, with a fault put in once."""
        run = await super().get_training_run(training_run_id)
        if self.told:
            return run
        self.told = True
        print(f"injected: {training_run_id} is corrupted")
        return run.model_copy(update={"corrupted": True})


def main() -> None:
    """Save, lose, recover, save again."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        OneLie(base_url=common.BASE_URL) as rest,
    ):
        client = common.trained_a_little(service, common.base_model())
        first = client.save_state("recovery-live-1", ttl_seconds=common.DAY).result().path
        print(f"saved {first}")

        done = threading.Event()
        paths: list[str] = []

        def on_recovery(old: TrainingClient, new: TrainingClient, checkpoint: str) -> None:
            """Called in a thread of its own, so it may wait."""
            print(f"recovered from {checkpoint}: {old.model_id} became {new.model_id}")
            paths.append(checkpoint)
            paths.append(new.save_state("recovery-live-2", ttl_seconds=common.DAY).result().path)
            done.set()

        policy = RecoveryPolicy(
            enabled=True,
            poll_interval_ms=1_000,
            backoff_ms=2_000,
            max_backoff_ms=10_000,
            max_attempts=5,
            on_recovery=on_recovery,
            on_failure=lambda run_id, error: print(f"{run_id} could not be recovered: {error}"),
        )
        monitor = Monitor(Executor(), policy, rest_client_fun=lambda service: rest)
        monitor.monitor_run(client.model_id, service, {"training_client": client})
        common.proof(done.wait(120), "the run was made anew")
        source, second = paths
        print(f"saved {second}")
    common.proof(source == first, "it went on from the checkpoint that was saved")
    common.proof(
        second.partition("/weights/")[0] != first.partition("/weights/")[0],
        "the second save is a new run's",
    )


if __name__ == "__main__":
    common.run(main)
