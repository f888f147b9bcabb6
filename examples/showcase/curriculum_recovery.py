"""A curriculum that survives a crash: the server is killed in the middle, its run is lost, and
nothing changes.

What it shows: `tinkex.resilient`. The same curriculum runs twice, each time on a real `tinkex
serve` of its own. The first run is left in peace. In the second one two things go wrong while calls
are on their way:

- the server process is killed (SIGKILL) and started again on the same directory: what it had
  acknowledged is on disk, and the client asks until the answer comes;
- the run itself is taken away, as an operator would do who unloads it: the trainer makes a new run
  of its last saved state and repeats the calls made since.

At the end, the losses of all steps and the log-probabilities of a test set must be the same in both
runs, bit by bit. This program needs servers that it may kill, so TINKER_BASE_URL has no say here.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.table import Table
from setting import BASE_MODEL, accuracy, conclude, console, draw, example, problems

import tinkex
from tinkex.models import addition
from tinkex.types import AdamParams

STEPS = 24
BATCH = 48
KILLED_AT, UNLOADED_AT = 9, 17
LEARNING_RATE = 1e-3
STATED = 0.8
SEED = 0

LEVELS: list[tuple[str, Callable[[int, int], bool]]] = [
    ("no carry", lambda a, b: a % 10 + b % 10 < 10 and a + b < 100),
    ("sums below 100", lambda a, b: a + b < 100),
    ("all sums", lambda a, b: True),
]
GOOD_ENOUGH = 1.2  # loss per problem at which the next level begins


class Server:
    """A `tinkex serve` process that can be killed and restarted on the same port."""

    def __init__(self, data_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable,
            "-c",
            "from tinkex.cli.main import main; main()",
            "serve",
            "--no-hub-cache",
        ]
        self._command += ["--device", "cpu", "--port", str(self.port), "--data-dir", str(data_dir)]
        self.start()

    def start(self) -> None:
        """Start the process; it says so when it can be reached."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def stop(self, how: signal.Signals) -> None:
        """End the process."""
        self._process.send_signal(how)
        self._process.communicate()


def curriculum(
    url: str, disaster: Callable[[int, str], None]
) -> tuple[list[float], list[str], list[bytes], float, int]:
    """Train through the levels; `disaster` strikes while a step's calls are on their way."""
    train, held_out = problems(held_out=150, seed=SEED)
    losses: list[float] = []
    reached: list[str] = []
    with tinkex.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=32, seed=SEED).result()
        tokenizer = client.get_tokenizer()
        # `every=5`: a state is saved after every fifth step, so at most five steps are ever
        # computed again.
        with tinkex.resilient(
            client, every=5, policy={"enabled": True, "backoff_ms": 200}
        ) as trainer:
            level = 0
            for step in range(1, STEPS + 1):
                name, belongs = LEVELS[level]
                at_hand = [(a, b) for a, b in train if belongs(a, b)]
                # The batch depends on the step's number alone: a loop of which steps are repeated
                # sees the same data.
                pairs = random.Random(step).sample(at_hand, BATCH)
                batch = [
                    example(tokenizer, addition.prompt(a, b), addition.answer(a, b))
                    for a, b in pairs
                ]
                passed = trainer.forward_backward(batch, "cross_entropy")
                stepped = trainer.optim_step(AdamParams(learning_rate=LEARNING_RATE))
                disaster(step, trainer.model_id)
                losses.append(passed.result().metrics["loss:sum"] / BATCH)
                stepped.result()
                reached.append(name)
                if losses[-1] < GOOD_ENOUGH and level + 1 < len(LEVELS):
                    level += 1
            tested = [
                example(tokenizer, addition.prompt(a, b), addition.answer(a, b))
                for a, b in held_out
            ]
            outputs = trainer.forward(tested, "cross_entropy").result().loss_fn_outputs
            after = accuracy(trainer.save_weights_and_get_sampling_client().result(), held_out)
        bits = [output["logprobs"].to_numpy().astype(np.float32).tobytes() for output in outputs]
        return losses, reached, bits, after, trainer.recoveries


def main() -> None:
    """The same curriculum in peace and in trouble."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "peace")
        console.print("first run: left in peace")
        losses, levels, bits, after, _ = curriculum(server.url, lambda step, run: None)
        server.stop(signal.SIGTERM)

        server = Server(Path(folder) / "trouble")
        console.print("second run: in trouble")

        def disaster(step: int, run: str) -> None:
            if step == KILLED_AT:
                server.stop(signal.SIGKILL)
                console.print(f"  step {step}: the server process is killed …")
                began = time.perf_counter()
                server.start()
                console.print(f"  … and is back after {time.perf_counter() - began:.1f} s")
            if step == UNLOADED_AT:
                with tinkex.RestClient(base_url=server.url) as operator:
                    operator.unload_model(run).result()
                console.print(f"  step {step}: the run {run} is unloaded; it is gone")

        losses_2, levels_2, bits_2, after_2, recoveries = curriculum(server.url, disaster)
        server.stop(signal.SIGTERM)

    table = Table(title="\nthe curriculum, step by step", title_justify="left")
    for column in ("step", "level", "loss in peace", "loss in trouble", ""):
        table.add_column(column, justify="right" if "loss" in column else "left")
    notes = {KILLED_AT: "server killed", UNLOADED_AT: "run lost"}
    for step in sorted({*range(1, STEPS + 1, 4), *notes, STEPS}):
        row = (
            levels_2[step - 1],
            f"{losses[step - 1]:.6f}",
            f"{losses_2[step - 1]:.6f}",
            notes.get(step, ""),
        )
        table.add_row(str(step), *row)
    console.print(table)
    draw("a curriculum in trouble", {"loss per problem": losses_2})

    same = losses == losses_2 and levels == levels_2 and bits == bits_2
    conclude(
        f"a killed server and a lost run change no bit, and {STATED:.0%} of the held-out problems "
        "are right at the end",
        f"{'the same bits' if same else 'OTHER bits'}, {recoveries} run made anew, {after:.1%} and "
        f"{after_2:.1%} right",
        same and recoveries == 1 and after == after_2 and after >= STATED,
    )


if __name__ == "__main__":
    main()
