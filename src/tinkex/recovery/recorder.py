"""Recorder: the outbox of a run that may be lost; it can make its calls again.

It keeps the calls since the last saved state. An outcome goes to the caller unless it shows that
the run is lost; then the recorder waits for another run, and makes the calls again there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.outbox import Outbox, Turn
from tinkex.client.rest import RestClient
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    GoneError,
    NotFoundError,
    RequestFailedError,
    TinkerError,
)
from tinkex.recovery.policies import RecoveryError
from tinkex.types.saves import SaveWeightsResponse
from tinkex.wire import protocol

T = TypeVar("T")
logger = logging.getLogger("tinkex")

LOST = (GoneError, NotFoundError)
"""Errors of a server that does not have the run, sampler or session of a call."""
TRAINS = frozenset(
    {"forward_backward", "forward_backward_custom", "optim_step", "load_weights", "drop_gradients"}
)
"""Calls that later results depend on: they are made again even if their result is known."""


@dataclass(eq=False, slots=True)
class Entry:
    """A call since the last state: a function that makes it, and its future."""

    name: str
    make: Callable[[Outbox], Future[Any]]
    future: Future[Any]
    is_state: bool = False
    trains: bool = False
    over: bool = False
    saved: str | None = None
    """The path of a state that was saved and is sound."""


class Recorder(Outbox):
    """An outbox that keeps calls, and makes them again on another run.

    Args:
        outbox: The outbox of the first run.
        rest: Asks the server about runs.
        keep: The number of saved states to keep.
        after_step: Called after each optimizer step, before any other call is made.
        on_loss: Called when the run is lost.
    """

    def __init__(
        self,
        outbox: Outbox,
        rest: RestClient,
        keep: int,
        after_step: weakref.WeakMethod[Callable[[], None]],
        on_loss: weakref.WeakMethod[Callable[[Exception], Coroutine[Any, Any, None]]],
    ) -> None:
        super().__init__(outbox.session, outbox.model_id, poison=outbox.poison)
        self._outbox, self._keep = outbox, keep
        self._after_step, self._on_loss = after_step, on_loss
        self.rest = rest
        self.lock = threading.RLock()
        self.log: list[Entry] = []
        self.states: list[str] = []
        """The paths of the states that were saved and count, the last one last."""
        self.life = 0
        """The number of recoveries; outcomes of an earlier run are ignored."""
        self.losses = 0
        """The number of losses since the last call that gave a new result."""
        self.failure: Exception | None = None
        self.is_open = False
        self.knows_runs = True
        """False if the server does not know runs by their ids, and cannot report corrupted ones."""
        self._is_between = False

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    def put(
        self, name: str, turn: Turn[T], place: int | None = None, *, spoils: bool = False
    ) -> Future[T]:
        """Make a call now, and keep it."""
        if name == protocol.UNLOAD_MODEL.name:
            with self.lock:
                self.failure = self.failure or RuntimeError("the run was unloaded")
            return self._outbox.put(name, turn, place)
        with self.lock:
            future = self.record(name, turn, spoils=spoils)
            if name == protocol.OPTIM_STEP.name and (after_step := self._after_step()):
                after_step()
        return future

    def record(
        self, name: str, turn: Turn[T], *, spoils: bool = False, is_state: bool = False
    ) -> Future[T]:
        """Make a call and keep it; `is_state` marks a saved state to go on from."""
        if not self.is_open:
            raise RuntimeError(
                "use the resilient training client in a with block: `with tinkex.resilient(…) as …`"
            )
        place = self.poison.place()
        future: Future[T] = Future()
        future._runtime = runtime()
        entry = Entry(
            name,
            lambda outbox: outbox.put(name, turn, place, spoils=spoils),
            future,
            is_state,
            name in TRAINS,
        )
        with self.lock:
            if self.failure is not None:
                raise self.failure
            self._make(entry)
            self.log.append(entry)
        self.session.track(future)
        return future

    def _make(self, entry: Entry) -> None:
        # Between two runs the outcome is ignored: the call is made again.
        life = -1 if self._is_between else self.life
        made = entry.make(self._outbox)
        made.add_done_callback(lambda done: runtime().call(self._ended, entry, life, done))

    # ── outcomes, on the loop ─────────────────────────────────────────────────────────────────────

    def _is_stale(self, life: int) -> bool:
        return life != self.life or self._is_between

    def _ended(self, entry: Entry, life: int, done: concurrent.futures.Future[Any]) -> None:
        if self._is_stale(life):
            return
        if done.cancelled():
            self._deliver(entry, error=asyncio.CancelledError())
        elif (error := done.exception()) is None:
            self.losses = 0 if not entry.over else self.losses
            if entry.is_state:
                start(self._examine(entry, life, done.result()))
            else:
                self._deliver(entry, done.result())
        elif not isinstance(error, Exception) or self.failure is not None:
            self._deliver(entry, error=error)
        elif _shows_loss(error):
            self._lose(life, error)
        elif isinstance(error, RequestFailedError):
            start(self._judge(entry, life, error))
        else:
            self._deliver(entry, error=error)

    async def _judge(self, entry: Entry, life: int, error: RequestFailedError) -> None:
        """Tell a wrong call from one that failed because the run is gone."""
        try:
            lost = await self._is_corrupted() or await self._is_gone()
        except Exception as unknown:
            logger.debug("cannot ask whether run %s is lost: %s", self.model_id, unknown)
            lost = False
        if self._is_stale(life):
            return
        if lost:
            self._lose(life, error)
        else:
            self._deliver(entry, error=error)

    async def _is_corrupted(self) -> bool:
        if not self.knows_runs:
            return False
        try:
            return (await self.rest.get_training_run(self.model_id)).corrupted
        except LOST:
            return True
        except TinkerError as error:
            logger.debug("cannot ask whether run %s is corrupted: %s", self.model_id, error)
            return False

    async def _is_gone(self) -> bool:
        """Ask whether the server refuses calls of this run, with a used number."""
        try:
            await self._outbox.touch(1)
        except LOST:
            return True
        except TinkerError as error:
            logger.debug("run %s exists, and answers %s", self.model_id, error)
        return False

    async def _examine(self, entry: Entry, life: int, saved: SaveWeightsResponse) -> None:
        """Accept a saved state, unless the run was corrupted by then."""
        corrupted = await self._is_corrupted()
        if self._is_stale(life):
            return
        if corrupted:
            self._lose(life, TinkerError(f"the server says that run {self.model_id} is corrupted"))
            return
        entry.saved = saved.path
        self._deliver(entry, saved)

    def _deliver(
        self, entry: Entry, result: Any = None, error: BaseException | None = None
    ) -> None:
        """Give an outcome to the caller."""
        if entry.over:
            if error is not None:
                self.fail(
                    f"{entry.name}, which had succeeded, failed when it was made again: {error}",
                    error,
                )
            return
        with self.lock:
            entry.over = True
            if error is not None and not isinstance(error, APITimeoutError):
                entry.trains = False  # it was not executed
            self.trim()
        if entry.is_state and error is not None:
            logger.warning("a state to recover from could not be saved: %s", error)
        if isinstance(error, asyncio.CancelledError):
            entry.future.cancel()
            return
        # the caller may have given up
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            entry.future.set_exception(error) if error is not None else entry.future.set_result(
                result
            )

    def trim(self) -> None:
        """Forget the calls before the last sound state, once all of them are over."""
        last = -1
        for index, entry in enumerate(self.log):
            if not entry.over:
                break
            if entry.saved is not None:
                last = index
        if last < 0:
            return
        self.states += [entry.saved for entry in self.log[: last + 1] if entry.saved is not None]
        del self.log[: last + 1]
        while len(self.states) > self._keep:
            runtime().task(self._discard(self.states.pop(0)))

    async def _discard(self, path: str) -> None:
        with contextlib.suppress(TinkerError):
            await self.rest.delete_checkpoint_from_tinker_path(path)

    # ── the loss of a run ─────────────────────────────────────────────────────────────────────────

    def _lose(self, life: int, error: Exception) -> None:
        with self.lock:
            if self._is_stale(life) or self.failure is not None:
                return
            self._is_between = True
            self.losses += 1
        if on_loss := self._on_loss():
            runtime().task(on_loss(error))

    def replay(self, outbox: Outbox) -> None:
        """Go over to another run, and make the calls since the last state again."""
        failed: list[tuple[Entry, Exception]] = []
        with self.lock:
            outbox.poison = self.poison
            self._outbox, self.model_id = outbox, outbox.model_id
            self._is_between, self.life = False, self.life + 1
            for entry in self.log:
                if entry.over and not entry.trains:
                    continue
                try:
                    self._make(entry)
                except Exception as error:
                    failed.append((entry, error))
        for entry, refusal in failed:
            self._deliver(entry, error=refusal)

    def fail(self, message: str, cause: BaseException) -> None:
        """Give up: all open calls and all later ones fail with this."""
        reason = cause.reason if isinstance(cause, RecoveryError) else "exhausted"
        last = self.states[-1] if self.states else None
        failure = RecoveryError(message, reason, hint=f"the last state is {last}")
        failure.__cause__ = cause
        with self.lock:
            self.failure, self._is_between = failure, False
            left = [entry for entry in self.log if not entry.over]
        for entry in left:
            self._deliver(entry, error=failure)


def _shows_loss(error: Exception) -> bool:
    """Tell whether an error means that the run or the call may be lost."""
    return isinstance(error, LOST) or (
        isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)
    )
