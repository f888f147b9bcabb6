"""Save a training run, and go on from it: weights and optimizer state, in a run that is there or in
a new one.

Run it:  python examples/training_persistence_live.py
Where to go: see common.py.
"""

import time
import warnings

import common

from tinkex import AdamParams, ServiceClient, TrainingClient

STEP = AdamParams(learning_rate=1e-3)


def main() -> None:
    """Train, save, load twice, and compare what the runs do next."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        client = common.trained_a_little(service, model)
        data = [
            common.next_token_datum(
                common.tokenizer_of(model).encode("A sentence to train on, twice.")
            )
        ]

        name = f"demo-checkpoint-{int(time.time())}"
        saved = client.save_state(name, ttl_seconds=common.DAY).result()
        print(f"checkpoint {name}, to expire in {common.DAY} s\npath {saved.path}")
        common.proof(
            saved.path.startswith("tinker://") and f"/weights/{name}" in saved.path,
            "the run's state was saved",
        )

        # Into a run that is there. The hosted service takes this as a run's first operation only,
        # and wants programs to use the other way, hence the warning that is silenced here.
        other = service.create_lora_training_client(model, rank=8).result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loaded = other.load_state_with_optimizer(saved.path).result()
        print(f"reloaded {loaded.path}")
        common.proof(loaded.path == saved.path, "its state was loaded into another run")

        restored = service.create_training_client_from_state_with_optimizer(saved.path).result()
        print(f"new client {restored.model_id}")
        common.proof(
            restored.model_id not in (client.model_id, other.model_id), "a new run was made of it"
        )

        def next_losses(run: TrainingClient) -> list[float]:
            """Return the loss before and after one more step, which uses the optimizer's state."""
            first = run.forward_backward(data, "cross_entropy")
            run.optim_step(STEP)
            second = run.forward(data, "cross_entropy")
            return [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]

        losses = [next_losses(run) for run in (client, other, restored)]
    for run, pair in zip(
        ("the first run", "loaded into another", "made anew"), losses, strict=True
    ):
        print(f"{run:<20} loss {pair[0]:.6f}, after one more step {pair[1]:.6f}")
    spread = max(abs(pair[place] - losses[0][place]) for pair in losses for place in (0, 1))
    common.proof(spread < 1e-3 * abs(losses[0][0]), "all three go on alike")


if __name__ == "__main__":
    common.run(main)
