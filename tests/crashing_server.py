"""A server in a process of its own that can kill itself at a chosen moment of its writing. Run as a
program.

`flush:N` dies just before (even N) or after (odd N) the N//2-th call of fsync, fdatasync, rename,
replace, link, unlink, rmdir or mkdir. `write:N` dies in the middle of the N-th write, after some of
its bytes. What of that is real:

- journals, results, weights and JSON files: the write(2) itself is cut, the rest of its bytes
  never leaves the process;
- SQLite: the statement is carried out, then the bytes that it changed in the write-ahead log are
  taken back from a random place on, before anybody can have heard of it (a write to the database
  file itself is not cut).
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import random
import signal
import socket
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

CALLS = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "rmdir", "mkdir")


def die() -> NoReturn:
    """End as by kill -9; no other thread gets to do anything in between."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def crash_at_call(event: int) -> None:
    """Die around the n-th call that makes something last."""
    count = itertools.count(1)

    def around(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(count)
            if number == event // 2 and event % 2 == 0:
                die()
            result = function(*args, **kwargs)
            if number == event // 2 and event % 2 == 1:
                die()
            return result

        return call

    for name in CALLS:
        setattr(os, name, around(getattr(os, name)))


class Cuts:
    """Counts writes of all kinds, and knows which of them is not to be finished."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self._left, self._rng, self._lock = number, rng, threading.Lock()

    def is_next(self) -> bool:
        """Return True if this write is the one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def within(self, size: int) -> int:
        """Return the bytes of a write that are still done; seldom none, never all."""
        return self._rng.randrange(size) if size else 0


def crash_in_write(cuts: Cuts) -> None:
    """Die in the middle of the n-th write."""

    class Torn(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) and cuts.is_next():
                os.write(self.fileno(), bytes(data)[: cuts.within(len(data))])
                die()
            return super().write(data) or 0

    ordinary = Path.open

    def open_path(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa"):
            return ordinary(self, mode, *args, **kwargs)
        writer = io.BufferedWriter(Torn(str(self), mode.replace("b", "").replace("t", "")))
        return writer if "b" in mode else io.TextIOWrapper(writer, encoding="utf-8")

    Path.open = open_path  # type: ignore[method-assign]

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            log = Path(f"{self.path}-wal")
            before = log.read_bytes() if log.exists() else b""
            cursor = super().execute(*args)
            after = log.read_bytes() if log.exists() else b""
            if after != before and cuts.is_next():
                first = next(
                    (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                    len(before),
                )
                end = first + cuts.within(len(after) - first)
                log.write_bytes(after[:end] + before[end:])
                die()
            return cursor

        path = ""

    connect = sqlite3.connect

    def connecting(path: Any, **options: Any) -> sqlite3.Connection:
        made: Connection = connect(path, factory=Connection, **options)
        made.path = str(path)
        return made

    sqlite3.connect = connecting  # type: ignore[assignment]


def main() -> None:
    """Serve: PORT DATA_DIR DEATH SEED [MODEL_DIR], where DEATH is `flush:N`, `write:N` or
    `never:0`."""
    port, data_dir = int(sys.argv[1]), Path(sys.argv[2])
    kind, _, number = sys.argv[3].partition(":")
    cuts = Cuts(int(number), random.Random(int(sys.argv[4])))
    from tinkex.cli.serve import run_app
    from tinkex.engine.api import Engine
    from tinkex.server.app import create_app
    from tinkex.server.runs import snapshot
    from tinkex.server.server_limits import Limits
    from tinkex.server.workers.fleet import Fleet

    snapshot.STATE_OPERATIONS, snapshot.STATE_REST = 5, 0
    engine: Engine | Fleet
    if where := os.environ.get("TINKEX_TEST_FLEET"):
        from tinkex.cluster.layout import ReplicaPlan, WorkersOption, make_engines
        from tinkex.cluster.link import Recipe

        plans = [ReplicaPlan(name, Recipe("fleet_engines:slow")) for name in "ab"]
        engine = Fleet(make_engines(WorkersOption.parse(where), plans, data_dir))
    elif len(sys.argv) > 5:
        from tinkex.engine.torch.engine import TorchEngine

        engine = TorchEngine({"test/small": Path(sys.argv[5])})
    else:
        from tinkex.engine.fake import FakeEngine

        engine = FakeEngine(delay=0.002)
    if kind == "write":
        crash_in_write(cuts)
    app = create_app(engine, data_dir, limits=Limits(drain_seconds=0.05))
    if kind == "flush":
        crash_at_call(int(number))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    asyncio.run(run_app(app, listener, lambda: None))


if __name__ == "__main__":
    main()
