"""The passes under way, and the choice of what each step of training computes.

A pass is cut into pieces under a token budget: its data are sorted by length, so that sequences of
equal length lie side by side and share one attention call. A step takes pieces of as many passes as
fit the budget, of any adapters of one base model, fairly by owner, and runs them together. The cut
of a pass depends on that pass alone, and nothing is ever reduced over tokens of two pieces: so its
results do not depend on its neighbours. The gradient of a pass is complete before it is added to an
adapter's: a pass that fails leaves no trace. A datum that is longer than a step's budget keeps only
its layers' states for backward. Where the device runs on its own, the results of a step are read
when the next one is under way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from tinkex.engine.api import EngineError, PassDone, PassJob
from tinkex.engine.losses.examples import Objective, Room
from tinkex.engine.stepping import Shares
from tinkex.engine.train.device_step import Launched, Pass, launch
from tinkex.engine.train.optim import Adapter
from tinkex.types.training import ForwardBackwardOutput

logger = logging.getLogger("tinkex.engine")

SPARE_BEYOND = 4
"""The factor by which a datum may exceed the budget on a CPU before its layers run twice: a CPU has
more memory than time."""

GROW_AFTER = 500
"""The steps after which a halved budget is doubled again: the memory may be free by then."""

MOST_PIECES = 64
"""The most pieces in a step: each costs some small products of its own."""


class Trainer:
    """The passes under way on any adapters, advanced by a step at a time."""

    def __init__(self, budget: int, *, ahead: bool = False) -> None:
        self.budget = budget
        """The most tokens of a step; halved when memory runs out."""
        self._whole, self._since_halved = budget, 0
        self.ahead = ahead
        """True if a step may begin before the results of the one before have been read."""
        self._passes: dict[str, deque[Pass]] = {}
        """The passes of each adapter, in order."""
        self._owners = Shares()
        self._adapters: dict[str, Shares] = {}
        """The shares of each owner's adapters."""
        self._unread: Launched | None = None

    def start(self, work: PassJob, adapter: Adapter, objective: Objective) -> None:
        """Validate and admit a pass."""
        config = adapter.model.config
        examples = objective.read(work.data, Room(config.vocab, config.context))
        admitted = Pass(
            work.job, work.owner, work.adapter, adapter, examples, objective, work.backward
        )
        admitted.begin(self.budget)
        self._passes.setdefault(work.adapter, deque()).append(admitted)

    def busy(self) -> bool:
        """Return True if any pass is unfinished."""
        return bool(self._passes)

    def drop(self, name: str) -> list[PassDone]:
        """Forget an adapter; its passes fail."""
        dropped = [
            PassDone(p.job, EngineError("the run was dropped")) for p in self._passes.pop(name, ())
        ]
        if not self._passes:  # the results are not needed, and they hold the adapter
            self._unread = None
        return dropped

    def step(self) -> list[PassDone]:
        """Run a few pieces together, and return the passes that ended.

        After an internal fault all of them end.
        """
        done: list[PassDone] = []
        try:
            self._step(done)
        except Exception as error:
            logger.exception("a step of training failed; the passes under way are lost")
            done += [
                PassDone(work.job, error) for passes in self._passes.values() for work in passes
            ]
            self._passes, self._unread = {}, None
        return done

    def _step(self, done: list[PassDone]) -> None:
        """Add the passes that ended to `done` at once, so that a later fault cannot lose them."""
        chosen, before, self._unread = self._choose(), self._unread, None
        if not chosen:
            done += self._read(before)
            return
        try:
            is_long = sum(work.size(piece) for work, piece in chosen) > self.budget
            launched = launch(chosen, keep_logits=not is_long, sparing=self._sparing(chosen))
        except Exception as error:
            done += self._read(before)  # which may hold other pieces of the same passes
            if _is_out_of_memory(error):
                done += self._ended(chosen, self._halve(chosen, error))
            else:
                done += self._ended(chosen, dict.fromkeys((work.job for work, _ in chosen), error))
            return
        self._grow()
        done += self._read(before)
        if self.ahead and self._next(None) is not None:
            self._unread = launched
        else:  # there is nothing to run meanwhile
            done += self._read(launched)

    def _sparing(self, chosen: Sequence[tuple[Pass, list[int]]]) -> bool:
        """Return True if a step holds one datum that is too long to keep its layers' results."""
        return sum(work.size(piece) for work, piece in chosen) > self.budget * (
            1 if self.ahead else SPARE_BEYOND
        )

    def _read(self, launched: Launched | None) -> list[PassDone]:
        """Read the results of a step."""
        if launched is None:
            return []
        outcomes: dict[str, Exception | None] = {}
        try:
            for work, error in launched.read():
                outcomes[work.job] = outcomes.get(work.job) or error
        except Exception as error:
            outcomes = dict.fromkeys((work.job for work, _ in launched.chosen), error)
        return self._ended(launched.chosen, outcomes, launched.largest)

    def _choose(self) -> list[tuple[Pass, list[int]]]:
        """Take pieces of one base model, with or without gradients, fairly by owner."""
        self._note()
        chosen: list[tuple[Pass, list[int]]] = []
        total = 0
        while (
            len(chosen) < MOST_PIECES
            and (work := self._next(chosen[0][0] if chosen else None)) is not None
        ):
            size = work.weight(work.pieces[0], self.budget)
            if chosen and total + size > self.budget:
                break
            chosen.append((work, work.pieces.popleft()))
            total += size
            self._owners.charge(work.owner, size)
            self._adapters[work.owner].charge(work.name, size)
        return chosen

    def _next(self, like: Pass | None) -> Pass | None:
        open_: dict[str, dict[str, Pass]] = {}
        for name, passes in self._passes.items():
            work = next((work for work in passes if work.pieces), None)
            if work is not None and (like is None or _go_together(work, like)):
                open_.setdefault(work.owner, {})[name] = work
        if not open_:
            return None
        owner = self._owners.first(open_)
        return open_[owner][self._adapters[owner].first(open_[owner])]

    def _note(self) -> None:
        waiting: dict[str, list[str]] = {}
        for name, passes in self._passes.items():
            for owner in dict.fromkeys(work.owner for work in passes):
                waiting.setdefault(owner, []).append(name)
        self._owners.note(waiting.keys())
        self._adapters = {owner: self._adapters.get(owner, Shares()) for owner in waiting}
        for owner, names in waiting.items():
            self._adapters[owner].note(names)

    def _ended(
        self,
        chosen: Sequence[tuple[Pass, list[int]]],
        outcomes: dict[str, Exception | None],
        largest: Mapping[str, torch.Tensor] | None = None,
    ) -> list[PassDone]:
        done = []
        works = {work.job: work for work, _ in chosen}
        for job, error in outcomes.items():
            work = works[job]
            passes = self._passes.get(work.name, deque())
            if work not in passes or (error is None and work.left):
                continue  # its adapter was dropped, or it has more pieces
            try:
                peak = 0.0 if largest is None or job not in largest else float(largest[job])
                result: ForwardBackwardOutput | Exception = error or work.finish(peak)
            except Exception as refusal:  # there may be no memory left for the sum of gradients
                result = refusal
            passes.remove(work)
            if not passes:
                del self._passes[work.name]
            done.append(PassDone(job, result))
        return done

    def _halve(
        self, chosen: list[tuple[Pass, list[int]]], error: Exception
    ) -> dict[str, Exception | None]:
        """Restart the passes of a step under half the budget.

        A single datum that already took the least memory fails; the failure is returned.
        """
        works = {work.job: work for work, _ in chosen}
        if (
            len(chosen) == 1
            and len(chosen[0][1]) == 1
            and (self._sparing(chosen) or self.budget == 1)
        ):
            (work, [index]), size = chosen[0], chosen[0][0].size(chosen[0][1])
            text = f"datum {index}: {size} tokens need more memory than there is; nothing was added"
            refusal = EngineError(text, "server")
            refusal.__cause__ = error
            return {work.job: refusal}
        tokens = sum(work.size(piece) for work, piece in chosen)
        self.budget, self._since_halved = max(1, min(self.budget, tokens) // 2), 0
        logger.warning(
            "memory ran out at %d tokens in a step; steps take at most %d tokens now",
            tokens,
            self.budget,
        )
        for work in works.values():
            work.begin(self.budget)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {}

    def _grow(self) -> None:
        """After many steps under a halved budget, try twice as much."""
        self._since_halved += 1
        if self.budget < self._whole and self._since_halved >= GROW_AFTER:
            self.budget, self._since_halved = min(self._whole, 2 * self.budget), 0


def _go_together(one: Pass, other: Pass) -> bool:
    return one.adapter.model is other.adapter.model and one.backward == other.backward


def _is_out_of_memory(error: Exception) -> bool:
    """Recognise a lack of memory, also of the machine's, for which torch has no class."""
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)
