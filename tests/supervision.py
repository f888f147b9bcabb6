"""A server that is killed and started again, what its deaths left on disk, and the loop that must
not notice."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tinkex.server.database.sqlite import DATABASE
from tinkex.server.files.seals import SEAL
from tinkex.server.runs.journal import read_records

PROGRAM = Path(__file__).parent / "crashing_server.py"
LOOP = Path(__file__).parent / "crash_loop.py"


@dataclass(frozen=True)
class Death:
    """How a life ends: `flush` and `write` by its own hand at the n-th, `start` by ours, so long
    after it was started.

    `clock` comes so many seconds after it can be reached, and so does `stop`, which is no death: it
    is told to stop.
    """

    kind: str = "never"
    at: float = 0


@dataclass
class Toll:
    """Counts over the lives of a server, or of several."""

    runs: int = 0
    lives: int = 0
    kills: int = 0
    torn: Counter[str] = field(default_factory=Counter)
    """Kills that left something half done on disk, by what it was: one kill may have left several
    things."""
    mid_write: int = 0
    """Kills that left anything half done."""

    def add(self, other: Toll) -> None:
        self.runs += other.runs
        self.lives += other.lives
        self.kills += other.kills
        self.mid_write += other.mid_write
        self.torn.update(other.torn)


class Supervised:
    """A server process that is started again whenever it dies; each life has its own way to die,
    the last has none."""

    def __init__(
        self,
        data_dir: Path,
        deaths: Sequence[Death],
        model_dir: Path | None = None,
        rng: random.Random | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.toll = Toll(runs=1)
        self._data_dir, self._deaths, self._model_dir = data_dir, list(deaths), model_dir
        self._rng = rng or random.Random(0)
        self._seen: set[tuple[str, str]] = set()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def lives(self) -> int:
        return self.toll.lives

    def start(self) -> None:
        self._thread.start()
        self._wait()

    def _wait(self) -> None:
        for _ in range(2400):
            with socket.socket() as probe:
                if self._stopping.is_set() or probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def _run(self) -> None:
        while not self._stopping.is_set():
            death = self._deaths.pop(0) if self._deaths else Death()
            told = f"{death.kind}:{death.at:.0f}" if death.kind in ("flush", "write") else "never:0"
            model = [str(self._model_dir)] if self._model_dir else []
            arguments = [
                str(self.port),
                str(self._data_dir),
                told,
                str(self._rng.randrange(1 << 30)),
                *model,
            ]
            self._process = process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments], env=os.environ
            )
            self.toll.lives += 1
            if death.kind in ("clock", "stop"):
                self._wait()
            if death.kind in ("start", "clock", "stop"):
                self._stopping.wait(death.at)
                process.send_signal(signal.SIGTERM if death.kind == "stop" else signal.SIGKILL)
            code = process.wait()
            if not self._stopping.is_set():
                assert code == (-signal.SIGTERM if death.kind == "stop" else -signal.SIGKILL), (
                    f"it ended with {code}"
                )
                self._look()

    def _look(self) -> None:
        """Return the unfinished files of a dead server, before the next life mends them."""
        new = half_done(self._data_dir) - self._seen
        self._seen |= new
        self.toll.kills += 1
        self.toll.mid_write += bool(new)
        self.toll.torn.update({kind for kind, _ in new})

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(10)


@contextmanager
def supervised(
    data_dir: Path,
    deaths: Sequence[Death],
    model_dir: Path | None = None,
    rng: random.Random | None = None,
) -> Iterator[Supervised]:
    server = Supervised(data_dir, deaths, model_dir, rng)
    server.start()
    try:
        yield server
    finally:
        server.stop()


# ── what is on disk ───────────────────────────────────────────────────────────────────────────────


def half_done(data_dir: Path) -> set[tuple[str, str]]:
    """Return the unfinished files after a death, as (kind, name): torn records, directories, a
    torn database log."""
    found: set[tuple[str, str]] = set()
    for path in [*data_dir.glob("*/*/segment-*.log"), *data_dir.glob("runs/*/state-*/results.log")]:
        data = path.read_bytes()
        whole = max((end for _, end in read_records(path, data)), default=0)
        if whole < len(data):
            found.add(("record", f"{path} {len(data)}"))
    for pattern in (
        "runs/*/unfinished-*",
        "runs/*/state-*.new",
        "snapshots/*.new",
        "checkpoints/*/*/.saving-*",
        "checkpoints/*/*/.deleting-*",
    ):
        found |= {("directory", str(path)) for path in data_dir.glob(pattern)}
    log = data_dir / f"{DATABASE}-wal"
    if log.exists() and _is_torn(data := log.read_bytes()):
        found.add(("database", hashlib.sha256(data).hexdigest()))
    return found


def _is_torn(log: bytes) -> bool:
    """Return True if a write-ahead log ends inside a transaction; ignore checksums."""
    if len(log) < 32:
        return bool(log)
    page = struct.unpack_from(">I", log, 8)[0]
    salt, committed = log[16:24], True
    for start in range(32, len(log), page + 24):
        frame = log[start : start + page + 24]
        if len(frame) < page + 24:
            return frame[8:16] in (salt, b"") or len(frame) < 16
        if frame[8:16] != salt:
            return not committed
        committed = frame[4:8] != bytes(4)
    return not committed


def files_of(data_dir: Path) -> dict[str, str]:
    """The saved tensors of a data directory by name, and what the fake engine saves instead."""
    found = {}
    for file in sorted((data_dir / "checkpoints").glob("*/*/*/*")):
        if file.name == SEAL:  # made of the files as they are, headers and all
            continue
        name = f"{file.parent.parent.name}/{file.parent.name}/{file.name}"
        content = file.read_bytes()
        if file.suffix == ".safetensors":  # their headers are in no order of their own
            tensors = load_file(file)
            content = b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))
        found[name] = hashlib.sha256(content).hexdigest()
    return found


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────


def run_loop(
    base_url: str, client: str, model: str, steps: int, seconds: float = 400
) -> dict[str, Any]:
    """Return the results of the loop, with `client` (the name of a package) against a server."""
    done = subprocess.run(
        [sys.executable, str(LOOP), base_url, client, model, str(steps)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    given: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return given
