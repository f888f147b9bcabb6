"""Weights that were loaded from files to sample from; those longest unused make room for others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.server.files.checkpoint_files import reading
from tinkex.server.files.seals import check
from tinkex.server.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of a sampler: their worker, their name there, and the files behind them."""

    worker: Worker
    name: str
    base_model: str
    directory: Path | None = None
    is_loadable: bool = True
    target: str | None = None
    """The in-flight target that is sampled from; the weights are those it points to."""
    version: int = 0
    cache: str = ""
    """The namespace of cached prompts, where it is not that of the weights."""


class LoadedWeights:
    """The weights that each worker has loaded, those last used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loading: defaultdict[Worker, dict[str, asyncio.Future[None]]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._loading.values()))

    def having(self, name: str) -> Mapping[Worker, object]:
        """Return the workers that have some weights, or are loading them."""
        return {worker: name for worker, loading in self._loading.items() if name in loading}

    def load(self, source: WeightSource) -> asyncio.Future[None]:
        """Load weights unless they are there or on their way; a failure is not kept."""
        worker, name = source.worker, source.name
        here = self._loading[worker]
        loading = here.pop(name, None)
        if loading is None:
            loading = worker.run(_load, source)
            loading.add_done_callback(
                lambda done: here.pop(name, None) if done.exception() else None
            )
        here[name] = loading
        while len(here) > self._most:
            oldest = next(iter(here))
            del here[oldest]
            worker.run(worker.engine.drop_sampler, oldest)
        return loading

    def disown(self, name: str) -> None:
        """Do not count weights as loaded ones any more; the engine keeps them."""
        for loading in self._loading.values():
            loading.pop(name, None)


def _load(source: WeightSource) -> None:
    """Load weights whose files are as they were written; on the worker."""
    engine = source.worker.engine
    if source.directory is None:
        engine.load_sampler(source.name, source.base_model, None)
        return
    with reading(source.directory, source.name.partition("@")[0]):
        check(source.directory)
        engine.load_sampler(source.name, source.base_model, source.directory)
