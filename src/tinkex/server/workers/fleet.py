"""A fleet: workers whose engines are in other processes, which may die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinkex.cluster.remote import RemoteEngine
from tinkex.engine.api import EngineError, EngineLost
from tinkex.server.workers.pool import Workers
from tinkex.server.workers.worker import Worker

logger = logging.getLogger("tinkex.server")

EPOCH_STARTS = 1_000_000
"""Epochs of one life of the server: one for each start of a process."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a process is started again; the pause doubles with each failure."""
PING_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""A process that does not answer for so long is given up."""


@dataclass(slots=True)
class Replica:
    """One engine of the fleet, and its worker.

    Attributes:
        starts: The number of times that its process was started.
        since: The time of the last start or loss.
        is_drained: True if it takes nothing more in.
    """

    engine: RemoteEngine
    worker: Worker
    starts: int = 1
    since: float = field(default_factory=time.time)
    is_drained: bool = False

    @property
    def state(self) -> str:
        """Its state, in a word."""
        if self.is_drained:
            return "drained"
        return "lost" if self.worker.is_lost else "ready"


class Fleet:
    """Starts the processes of engines, and starts them again when they are lost."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        """Take engines that have not been connected."""
        names = [engine.name for engine in engines]
        if len({*names}) != len(names):
            raise ValueError(f"two workers have the same name: {', '.join(sorted(names))}")
        self._engines = engines
        self._epoch = 0
        self.replicas: dict[str, Replica] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        self._lose_weights: Callable[[Worker], object] = lambda worker: None
        self._rebuild: Callable[[str], object] = lambda run: None

    def connect(self, life: int) -> Mapping[str, RemoteEngine]:
        """Start all processes, beside each other; return the engines by name.

        Args:
            life: The number of this life of the server, above those of all earlier ones.

        Raises:
            EngineError: One of them cannot be started.
        """
        self._epoch = life * EPOCH_STARTS
        epochs = [self._next_epoch() for _ in self._engines]
        try:
            with ThreadPoolExecutor(len(self._engines)) as pool:
                list(
                    pool.map(
                        lambda pair: pair[0].connect(pair[1]),
                        zip(self._engines, epochs, strict=True),
                    )
                )
        except BaseException:
            self.close()
            raise
        _check_digests(self._engines)
        return {engine.name: engine for engine in self._engines}

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def start(
        self,
        workers: Workers,
        lose_weights: Callable[[Worker], object],
        rebuild: Callable[[str], object],
    ) -> None:
        """Watch over the workers; called on the event loop once they have started.

        Args:
            workers: The workers of the engines.
            lose_weights: Forgets the weights that a worker had in memory.
            rebuild: Begins to make a run again, on a worker that is there.
        """
        self._lose_weights, self._rebuild, self._workers = lose_weights, rebuild, workers
        for worker in workers:
            engine = worker.engine
            assert isinstance(engine, RemoteEngine)
            replica = self.replicas[worker.name] = Replica(engine, worker)
            engine.process.wake = worker.wake
            worker.on_lost = partial(self._lost, replica)
            self._keep(self._watch(replica))
            worker.wake()

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, replica: Replica) -> None:
        """Give a process up that does not answer."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if replica.worker.is_lost or replica.is_drained:
                continue
            process = replica.engine.process
            if not await asyncio.to_thread(process.ping, SILENT_SECONDS) and process.lost is None:
                await asyncio.to_thread(
                    process.give_up, f"it has not answered for {SILENT_SECONDS:.0f} s"
                )

    def _lost(self, replica: Replica, error: EngineLost) -> None:
        """Have the runs of a lost worker made again, and its process started again."""
        if self._is_stopping:
            return
        replica.since = time.time()
        runs = sorted(replica.worker.runs)
        logger.warning("%s; %d runs are made again", error, len(runs))
        self._lose_weights(replica.worker)
        for run in runs:
            self._rebuild(run)
        if not replica.is_drained:
            self._keep(self._restart(replica))

    async def _restart(self, replica: Replica) -> None:
        """Start a process again, until it is there."""
        pause, engine = FIRST_PAUSE, replica.engine
        await asyncio.to_thread(engine.process.close)
        while not self._is_stopping and not replica.is_drained:
            try:
                began = time.monotonic()
                await asyncio.to_thread(engine.connect, self._next_epoch())
                break
            except EngineError as error:
                logger.warning(
                    "worker %r cannot be started; it is tried again in %.1f s: %s",
                    engine.name,
                    pause,
                    error,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            return
        replica.starts, replica.since = replica.starts + 1, time.time()
        replica.worker.failure = None
        replica.worker.wake()
        for loss_id, request in self._workers.losses.items():
            replica.worker.run(engine.create_loss, loss_id, request)
        self._workers.note_restored()
        logger.info("worker %r is back after %.1f s", engine.name, time.monotonic() - began)

    async def drain(self, names: Sequence[str]) -> None:
        """Move what is at home on some workers to others, and end their processes.

        Raises:
            EngineError: No worker would be left for a base model.
        """
        for replica in [self.replicas[name] for name in names]:
            for model in replica.engine.models():
                left = [
                    other
                    for name, other in self.replicas.items()
                    if name not in names
                    and not other.is_drained
                    and model.name in {one.name for one in other.engine.models()}
                ]
                if not left:
                    raise EngineError(
                        f"worker {replica.engine.name!r} is the last one for {model.name!r}; start "
                        "another one first"
                    )
        for replica in [self.replicas[name] for name in names]:
            replica.is_drained = True
            await asyncio.to_thread(replica.engine.process.give_up, "it is drained")

    async def stop(self) -> None:
        """End the watch; the processes end with `close`."""
        self._is_stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """End all processes."""
        for engine in self._engines:
            engine.process.close()

    def not_ready(self) -> list[str]:
        """Return why workers are not ready, those that were drained excepted."""
        return [
            str(replica.worker.failure)
            for replica in self.replicas.values()
            if replica.worker.failure is not None and not replica.is_drained
        ]


def _check_digests(engines: Sequence[RemoteEngine]) -> None:
    """Refuse workers that have different weights under one name."""
    digests: dict[str, tuple[str, str]] = {}
    for engine in engines:
        for model in engine.models():
            digest, first = digests.setdefault(model.name, (model.digest, engine.name))
            if digest != model.digest:
                raise EngineError(
                    f"workers {first!r} and {engine.name!r} have different weights of "
                    f"{model.name!r}; give all of them the same checkpoint",
                    "server",
                )
