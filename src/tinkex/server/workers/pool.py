"""The workers of a server: which base models they offer, and which runs are at home on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from tinkex.engine.api import BaseModel, Engine, EngineError
from tinkex.server.http_errors import Refusal
from tinkex.server.workers.worker import Worker
from tinkex.types.sessions import CreateCustomLossRequest

SPREAD = 16
"""A sampler goes to one more worker when its own have so many more samples than the idlest."""


class Workers:
    """The workers of a server, each with an engine of its own."""

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        """Make a worker for each engine.

        Args:
            engines: One engine, or several by names that stay the same from one start to the next:
                runs are recorded with the name of their home.
        """
        named = engines if isinstance(engines, Mapping) else {"": engines}
        if not named:
            raise ValueError("a server needs at least one engine")
        self._workers = {name: Worker(engine, name) for name, engine in named.items()}
        self.windows = {model.name: model.context_length for model in self.models().values()}
        """The number of tokens that each base model takes."""
        self._restored = asyncio.Event()
        self.losses: dict[str, CreateCustomLossRequest] = {}
        """The custom losses that every worker has."""
        self.longest_window = max(self.windows.values(), default=0)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def start(self) -> None:
        """Start all workers; must be called on the event loop that results go to."""
        for worker in self:
            worker.start()

    async def stop(self) -> None:
        """Let all workers finish what they have begun."""
        for worker in self:
            worker.interrupt()
        for worker in self:
            await worker.stop()

    # ── base models ───────────────────────────────────────────────────────────────────────────────

    def models(self) -> dict[str, BaseModel]:
        """Return the base models on offer, by name."""
        return {model.name: model for worker in self for model in worker.engine.models()}

    def base_model(self, name: str) -> BaseModel:
        """Return a base model by name; the error lists those there are."""
        models = self.models()
        if name not in models:
            raise EngineError(
                f"there is no base model {name!r}; this server has: {', '.join(sorted(models))}"
            )
        return models[name]

    def check_base(
        self, name: str, digest: str, what: str, category: Literal["user", "server"] = "user"
    ) -> None:
        """Refuse weights that were trained on another base model of the same name."""
        if digest and (now := self.base_model(name).digest) and now != digest:
            raise EngineError(
                f"{what} was trained on other weights of {name!r} than this server has under that "
                "name; start the server with the base model it was trained on",
                category,
            )

    def of_model(self, base_model: str) -> list[Worker]:
        """Return the workers that offer a base model, those that have failed last."""
        if len(self._workers) == 1:
            return list(self)
        self.base_model(base_model)
        offering = [
            worker
            for worker in self
            if any(model.name == base_model for model in worker.engine.models())
        ]
        return sorted(offering, key=lambda worker: worker.failure is not None)

    # ── runs and samplers ─────────────────────────────────────────────────────────────────────────

    def home(self, run: str, base_model: str, recorded: str | None = None) -> Worker:
        """Return the worker that a run is at home on, and count the run there.

        A run stays on the worker that it is on, or that was recorded for it, as long as that is
        there. Otherwise the worker with the fewest runs gets it.
        """
        offering = [one for one in self.of_model(base_model) if one.role != "sampler"]
        found = next((worker for worker in offering if run in worker.runs), None) or next(
            (worker for worker in offering if worker.name == recorded), None
        )
        if found is None or found.failure is not None:
            alive = [worker for worker in offering if worker.failure is None] or offering
            found = min(alive, key=lambda worker: len(worker.runs))
        found.runs.add(run)
        return found

    async def available(self, base_model: str | None) -> None:
        """Wait until a worker is there that offers a base model, or any worker without one."""
        while all(worker.is_lost for worker in (self.of_model(base_model) if base_model else self)):
            self._restored.clear()
            await self._restored.wait()

    def note_restored(self) -> None:
        """Let what waits for a worker go on."""
        self._restored.set()

    def waiting_for(self, base_model: str) -> str | None:
        """Return the reason why work on a base model waits, if no worker is there for it."""
        lost = [worker for worker in self.of_model(base_model) if worker.is_lost]
        if len(lost) < len(self.of_model(base_model)):
            return None
        return f"waiting for a worker: {lost[0].failure}"

    def leave(self, run: str) -> None:
        """Count a run on no worker any more."""
        for worker in self:
            worker.runs.discard(run)

    def for_sample(self, base_model: str, loaded: Mapping[Worker, object]) -> Worker:
        """Return the worker to draw a sample on: one that has the weights, unless it is busy."""
        offering = self.of_model(base_model)
        if len(offering) == 1:
            return offering[0]
        alive = [worker for worker in offering if worker.failure is None] or offering
        alive = [worker for worker in alive if worker.role != "trainer"] or alive
        idlest = min(alive, key=lambda worker: worker.samples.open)
        having = [worker for worker in alive if worker in loaded]
        best = min(having, key=lambda worker: worker.samples.open, default=idlest)
        return best if best.samples.open < idlest.samples.open + SPREAD else idlest

    def forget_session(self, session_id: str) -> None:
        """Drop the custom losses and the samples of a session."""
        for loss_id in [name for name in self.losses if name.startswith(f"{session_id}:")]:
            del self.losses[loss_id]
        for worker in self:
            worker.run(worker.engine.drop_losses, f"{session_id}:")
            worker.samples.cancel_all(f"{session_id}:")

    def refuse_if_dead(self) -> None:
        """Take nothing in that cannot be carried out; asking again helps only after a restart."""
        if all(worker.failure is not None and not worker.is_lost for worker in self):
            raise Refusal(503, str(next(iter(self)).failure), headers={"X-Should-Retry": "false"})

    def steps(self) -> Counter[str]:
        """Return the number of steps that the engines have made, by kind."""
        return sum((worker.stepper.steps for worker in self), Counter())
