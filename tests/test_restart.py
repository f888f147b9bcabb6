"""A server that is killed and started again on the same data directory: its clients carry on and notice nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import tinkex
from tinkex import ServiceClient, types

PROGRAM = Path(__file__).parent / "crashing_server.py"


class Supervised:
    """A server process that is started again whenever it dies; each life has its own moment of death."""

    def __init__(self, data_dir: Path, deaths: list[int], model_dir: Path | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._data_dir, self._deaths, self._model_dir = data_dir, list(deaths), model_dir
        self.lives = 0
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def _run(self) -> None:
        while not self._stopping:
            event = self._deaths.pop(0) if self._deaths else 0
            model = [str(self._model_dir)] if self._model_dir else []
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(self.port), str(self._data_dir), str(event), *model],
                env=os.environ,
            )
            self.lives += 1
            self._process.wait()

    def kill(self) -> None:
        """Kill this life, as an operator would not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        self._stopping = True
        if self._process is not None:
            self._process.kill()
        self._thread.join(10)


@contextmanager
def supervised(data_dir: Path, deaths: list[int], model_dir: Path | None = None) -> Iterator[Supervised]:
    server = Supervised(data_dir, deaths, model_dir)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def datum(*tokens: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": [t + 1 for t in tokens]})


def train(base_url: str, model: str, steps: int = 8) -> dict[str, Any]:
    """A pipelined loop with everything in it; what it gave."""
    given: dict[str, Any] = {"losses": [], "norms": [], "tokens": []}
    tinkex.configure(patience=60, first_contact_patience=30)
    try:
        with ServiceClient(base_url=base_url) as service:
            client = service.create_lora_training_client(model, rank=4, seed=3)
            prompt = types.ModelInput.from_ints([5, 6, 7])
            passes, stepped, samples = [], [], []
            for step in range(steps):
                passes.append(client.forward_backward([datum(1 + step, 2, 3), datum(4, 5)], "cross_entropy"))
                passes.append(client.forward_backward([datum(7, 8 + step)], "cross_entropy"))
                stepped.append(client.optim_step(types.AdamParams(learning_rate=0.01)))
                if step % 3 == 2:
                    sampler = client.save_weights_and_get_sampling_client()
                    samples += [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, seed=s)) for s in (1, 2)]
                    given[f"saved-{step}"] = client.save_state(f"at-{step}").result(60).path.rpartition("/")[2]
            given["losses"] = [future.result(60).metrics["loss:sum"] for future in passes]
            given["norms"] = [future.result(60).metrics for future in stepped]
            given["tokens"] = [
                [(tuple(s.tokens), tuple(s.logprobs or ())) for s in future.result(60).sequences] for future in samples
            ]
            again = service.create_training_client_from_state_with_optimizer(client.save_state("end").result(60).path)
            given["after"] = again.forward_backward([datum(1, 2, 3)], "cross_entropy").result(60).metrics
            given["at-the-end"] = client.forward_backward([datum(1, 2, 3)], "cross_entropy").result(60).metrics
    finally:
        tinkex.configure()
    return given


def files_of(data_dir: Path) -> dict[str, str]:
    """The tensors of a data directory's checkpoints, by name; the files' headers are in no order of their own."""
    found = {}
    for file in sorted((data_dir / "checkpoints").rglob("*.safetensors")):
        tensors = load_file(file)
        content = b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))
        found[f"{file.parent.name}/{file.name}"] = hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with supervised(data_dir, []) as server:
        given = train(server.base_url, "fake")
        assert server.lives == 1
    return given, files_of(data_dir)


@pytest.mark.covers("S44")
@pytest.mark.timeout(120)
def test_a_killed_server_loses_nothing_and_does_nothing_twice(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    with supervised(tmp_path, [12, 31, 44, 57]) as server:
        assert train(server.base_url, "fake") == undisturbed[0]
        assert server.lives == 5
    assert files_of(tmp_path) == undisturbed[1]


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10))
def test_every_write_may_be_the_last(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, first: int
) -> None:
    deaths = list(range(2 + first, 120, 10))
    with supervised(tmp_path, deaths) as server:
        assert train(server.base_url, "fake") == undisturbed[0]
        assert server.lives > 4
    assert files_of(tmp_path) == undisturbed[1]


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(600)
def test_the_real_engine_gives_the_same_bits(model_dir: Path, tmp_path: Path) -> None:
    """Killed at moments of the clock, in the middle of whatever it does."""
    with supervised(tmp_path / "calm", [], model_dir) as server:
        expected = train(server.base_url, "test/small", 6)
    with supervised(tmp_path / "killed", [], model_dir) as server:
        killer = threading.Event()

        def kill() -> None:
            for pause in (0.3, 4.2, 4.7, 5.1):
                if killer.wait(pause):
                    return
                server.kill()

        threading.Thread(target=kill, daemon=True).start()
        try:
            assert train(server.base_url, "test/small", 6) == expected
        finally:
            killer.set()
        assert server.lives > 1
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "calm")


OFFICIAL = """
import sys
import tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-any")
client = service.create_lora_training_client("fake", rank=4, seed=3)
datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
losses, steps, drawn = [], [], []
for step in range(8):
    losses.append(client.forward_backward([datum], "cross_entropy"))
    steps.append(client.optim_step(types.AdamParams(learning_rate=0.01)))
    if step % 3 == 2:
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=5, seed=step)
        drawn.append(sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params))
print([future.result().metrics["loss:sum"] for future in losses])
print([future.result().metrics for future in steps])
print([[s.tokens for s in future.result().sequences] for future in drawn])
"""


@pytest.mark.slow
@pytest.mark.covers("S44")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("deaths", [[], [9, 26, 41], [14, 33, 50]], ids=["calm", "early", "late"])
def test_the_official_client_carries_on_too(tmp_path: Path, deaths: list[int]) -> None:
    said = []
    for number, chosen in enumerate(([], deaths)):
        with supervised(tmp_path / str(number), chosen) as server:
            done = subprocess.run(
                [sys.executable, "-c", OFFICIAL, server.base_url],
                env=os.environ,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert server.lives > len(chosen) - 1
            said.append(done.stdout)
    assert said[0] == said[1]
    assert said[0].count("\n") == 3
