"""Runs that are loaded: a request becomes a promise, once and in the order of its number.

A number that was refused is used up all the same, and one that never comes is given up after a
time: nothing behind it waits for ever.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tinkex.engine.api import EngineError, EngineLost
from tinkex.server.calls import GIVEN_UP, UNKNOWN, Call, refused_call
from tinkex.server.database.interface import LOCAL_OWNER
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.journal import Entry
from tinkex.server.runs.promises import Promise, fail_again
from tinkex.server.runs.snapshot import Snapshots
from tinkex.server.runs.work import (
    Creation,
    Discard,
    LaneItem,
    LiveRun,
    Load,
    Pass,
    Refused,
    Save,
    Step,
    Unload,
    Work,
)
from tinkex.server.workers.worker import Postponed
from tinkex.types.training import UntypedAPIFuture

logger = logging.getLogger("tinkex.server")

MOST_AHEAD = 100_000
"""The most numbers that a request may leave out; after they are given up, the run goes on."""
UNLOAD_GAP_SECONDS = 60.0
"""The longest time that a missing request delays the unloading of its run."""
CARRY_ON = "carry on from a saved state with create_training_client_from_state_with_optimizer"


class Runs(Mapping[str, LiveRun]):
    """The runs that are loaded, by id."""

    def __init__(
        self, parts: Parts, snapshots: Snapshots, prepare: Callable[[Call], Awaitable[Any]]
    ) -> None:
        """Take the parts; `prepare` says what kind of work a call asks for."""
        self._database, self._journals = parts.database, parts.journals
        self._promises, self._workers = parts.promises, parts.workers
        self._sessions, self._revivals = parts.sessions, parts.revivals
        self._snapshots = snapshots
        self._prepare = prepare
        self._live: dict[str, LiveRun] = {}
        self.gaps = Gaps(parts, self._begin)
        self.asked: dict[str, float] = {}
        """The time of the last request of each run, until it is on record."""

    def __getitem__(self, run: str) -> LiveRun:
        return self._live[run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    # ── which there are ───────────────────────────────────────────────────────────────────────────

    async def live(self, run: str) -> LiveRun:
        """Return a run that something is asked of; one of an earlier life is taken up again."""
        live = self._live.get(run)
        if live is None or (live.is_rebuilding and not live.is_parked):
            await self._revivals.revived(run)
            live = self._live.get(run)
        if live is not None:
            self._sessions.last_seen[live.run.session_id] = time.monotonic()
            self.asked[run] = time.time()
            return live
        if await asyncio.to_thread(self._database.runs.get, run) is None:
            raise Refusal(404, f"there is no model {run!r}")
        raise Refusal(
            410,
            f"model {run!r} is no longer loaded (it was unloaded, its session has ended, or it "
            f"could not be restored after a restart); {CARRY_ON}",
        )

    async def replayed(self, run: str, is_found: Callable[[], bool]) -> None:
        """Wait until a run that is made again gives something, or all of its journal is done."""
        waited: asyncio.Task[None] | None = None
        while not is_found():
            await self._revivals.revived(run)
            task = self._revivals.task(run)
            if task is None or task is waited:
                return
            if not task.done():  # the run is made again once more
                continue
            waited, live = task, self._live.get(run)
            while live is not None and live.again and not is_found():
                await asyncio.wait(live.again, return_when=asyncio.FIRST_COMPLETED)
            for promise in list(live.recent.values()) if live is not None else ():
                if is_found() or self._revivals.task(run) is not task:
                    break
                await promise.done.wait()

    def is_loaded(self, run: str) -> bool:
        """Return whether a run takes requests: at once, or after it is taken up again."""
        return run in self._live or self._revivals.is_asleep(run)

    # ── creating ──────────────────────────────────────────────────────────────────────────────────

    async def _create(self, call: Call) -> UntypedAPIFuture:
        """Make a run or a custom loss; the same request again gets the same receipt."""
        creation: Creation = await self._prepare(call)
        name, request_id = creation.name, creation.request_id
        await self._revivals.revived(name)
        promise, live = self._promises.get(request_id), self._live.get(name)
        is_same = live is None or creation.fits(live.run)
        if not is_same or (promise is not None and promise.digest not in (call.digest, UNKNOWN)):
            return self._fail(request_id, creation.session_id, call, name)
        if promise is None:
            promise = self._promises.add(request_id, call.digest, creation.session_id)
            added = promise

            def begin() -> None:
                self._promises.follow(added, self._made(call, creation))

            await self._promises.take(promise, self._journals.of_run(name), 0, call, begin)
        elif promise.recorded is not None:
            await asyncio.shield(promise.recorded)
        return UntypedAPIFuture(request_id=request_id, model_id=name)

    async def _made(self, call: Call, creation: Creation) -> Any:
        """Make what is asked for; on another worker if the first one is lost meanwhile."""
        try:
            while True:
                try:
                    return await creation.make()
                except EngineLost:
                    self._workers.leave(creation.name)
                    await self._workers.available(creation.base_model)
                    call.is_replayed = True
                    creation = await self._prepare(call)
        finally:
            if creation.name not in self._live:
                self._workers.leave(creation.name)

    async def create_again(self, call: Call) -> None:
        """Make a run or a custom loss that a journal has, and wait for it."""
        creation: Creation = await self._prepare(call)
        journal = self._journals.of_run(creation.name)
        promise = self._promises.repeat(creation.request_id, call, creation.session_id, journal, 0)
        await self._promises.fulfil(promise, self._made(call, creation))

    def _fail(self, request_id: str, session_id: str, call: Call, run: str) -> UntypedAPIFuture:
        """Return the receipt of a failure: the number was used before, for another request."""
        receipt = self._promises.refuse_reused(request_id, session_id, call.digest, call.owner)
        return UntypedAPIFuture(request_id=receipt, model_id=run)

    def enter(self, live: LiveRun) -> None:
        """Take a run in whose adapter has been made."""
        run = live.name
        if live.run.session_id not in self._sessions:
            live.worker.drop_run(run)
            raise EngineError("the session has ended")
        if (creation := self._promises.get(f"{run}:0")) is not None:
            live.recent[0] = creation  # its result goes beside the first snapshot, like any other
        self._live[run] = live
        self._snapshots.commit(live)

    # ── what runs are asked for ───────────────────────────────────────────────────────────────────

    async def admit(self, call: Call) -> UntypedAPIFuture:
        """Take a request: a repeated number gives the original receipt."""
        run = getattr(call.request, "model_id", None)
        if run is None:
            return await self._create(call)
        return await self._admit(call, run, call.request.seq_id)

    async def consume_seq_id(
        self, run: str, seq_id: int | None, digest: bytes, why: str, owner: str = LOCAL_OWNER
    ) -> UntypedAPIFuture:
        """Let a refused request use its number up: later requests must not wait for it."""
        return await self._admit(refused_call(digest, why, owner), run, seq_id)

    async def _admit(self, call: Call, run: str, seq_id: int | None) -> UntypedAPIFuture:
        await self.live(run)
        work: Work = _refused(call) or await self._prepare(call)
        if isinstance(work, Refused):
            call = refused_call(call.digest, work.why, call.owner)
        live = await self.live(run)  # it may have ended meanwhile
        number = call.number = self.free(live) if seq_id is None else seq_id
        if number < 1:
            raise Refusal(400, f"seq_id must be at least 1, got {number}")
        if number > live.lane.free + MOST_AHEAD:
            raise Refusal(
                400, f"seq_id {number} is too far ahead; the next one is {live.lane.next}"
            )
        request_id = f"{run}:{number}"
        known = self._promises.get(request_id)
        if known is not None and known.digest != call.digest:
            return self._fail(request_id, live.run.session_id, call, run)
        receipt = UntypedAPIFuture(request_id=request_id, model_id=run)
        if known is not None:
            if known.recorded is not None:
                await asyncio.shield(known.recorded)
            return receipt
        if live.last is not None and number >= live.last:
            raise Refusal(410, f"model {run!r} has been unloaded; {CARRY_ON}")
        self.gaps.check(live, number, call)
        promise = self._promises.add(request_id, call.digest, live.run.session_id)
        if number < live.lane.next:  # it will not be carried out, so it need not be on disk
            _fail_as_passed(live, promise)
            return receipt
        if isinstance(work, Pass) and work.admitted is not None:
            work.admitted(number)
        live.lane.hold(number, call.size)
        begin = functools.partial(self.offer, live, LaneItem(promise, number, work))
        try:
            await self._promises.take(promise, self._journals.of_run(run), number, call, begin)
        except Exception:
            live.lane.let_go(number)
            raise
        return receipt

    async def admit_again(self, live: LiveRun, call: Call, failed: Entry | None = None) -> None:
        """Put a request that a journal has into its run's lane; one that failed fails again."""
        run, number = live.name, call.number
        assert number is not None
        refused = _refused(call) if failed is None else Refused("")
        # first, for it may change the digest
        work: Work = refused or await self._prepare(call)
        journal = self._journals.of_run(run)
        promise = self._promises.repeat(
            f"{run}:{number}", call, live.run.session_id, journal, number
        )
        if failed is not None:
            fail_again(promise, failed)
        if isinstance(work, Pass) and work.admitted is not None:
            work.admitted(number)
        live.lane.hold(number, call.size)
        self.offer(live, LaneItem(promise, number, work))

    def free(self, live: LiveRun) -> int:
        """Return the next number for a request without one; some may be on their way to disk."""
        number = live.lane.free
        while self._promises.get(f"{live.name}:{number}") is not None:
            number += 1
        return number

    def offer(self, live: LiveRun, item: LaneItem) -> None:
        """Begin with an operation that is on disk when all numbers before it have come."""
        if self._live.get(live.name) is not live:
            if not live.is_rebuilding:  # else it is read in the journal
                item.promise.fail("the session has ended")
            return
        if not isinstance(item.work, Unload):
            live.recent[item.seq_id] = item.promise
        try:
            released = live.lane.offer(item.seq_id, item)
        except ValueError:
            live.lane.let_go(item.seq_id)
            _fail_as_passed(live, item.promise)
            released = []
        for ready in released:
            self._begin(live, ready)
        if (missing := live.lane.missing) != live.gap:
            self.gaps.watch(live, missing)

    def _begin(self, live: LiveRun, item: LaneItem) -> None:
        run, worker = live.name, live.worker
        carry_out = functools.partial(self._carry_out, live, item)
        match item.work:
            case Pass():
                running = worker.run_pass(run, item.promise.request_id, carry_out)
            case Save():
                running = worker.run_save(run, carry_out)
            case _:
                running = worker.run_for(run, carry_out)
        following = self._promises.follow(item.promise, self._finish(live, item.work, running))
        if live.is_rebuilding:
            live.again.add(following)
            following.add_done_callback(live.again.discard)

    def _carry_out(self, live: LiveRun, item: LaneItem) -> Any:
        """Carry an operation out, and make a snapshot where one is due; on the worker."""
        if self._promises.are_left:
            raise Postponed("the server is stopping")
        work = item.work
        if isinstance(work, Unload):
            return work.do(live)
        live.done = item.seq_id
        live.since_snapshot += 1
        if isinstance(work, Pass):
            live.is_between_steps &= not work.job.backward
            return live.worker.engine.pass_start(replace(work.job, job=item.promise.request_id))
        if isinstance(work, Refused):
            item.promise.place = None  # its journal says why
            raise EngineError(work.why)
        result = work.do(live)
        if isinstance(work, Step | Discard | Load):
            live.is_between_steps = True
        if isinstance(work, Load):
            self._snapshots.write(live, item.seq_id)
        elif isinstance(work, Step):
            self._snapshots.freeze_when_due(live, item.seq_id)
        return result

    async def _finish(self, live: LiveRun, work: Work, running: asyncio.Future[Any]) -> Any:
        try:
            result = await running
            if isinstance(work, Save | Unload) and work.after is not None:
                result = work.after(live, result)
            return result
        finally:
            if live.new_snapshot is not None:
                self._snapshots.commit(live)

    # ── letting go ────────────────────────────────────────────────────────────────────────────────

    def put(self, live: LiveRun) -> None:
        """Have a run that is being rebuilt."""
        self._live[live.name] = live

    def remove(self, run: str) -> None:
        """Forget a run that its worker has dropped."""
        live = self._live.pop(run, None)
        if live is not None:
            self.gaps.stop(live)
            live.worker.runs.discard(run)

    def forget(self, run: str) -> None:
        """Drop a run, whatever it is at."""
        live = self._live.get(run)
        self.remove(run)
        if live is not None:
            live.worker.drop_run(run)


def _refused(call: Call) -> Refused | None:
    """Return the work of a call that was refused: the reason is left of it."""
    return None if call.op else Refused(call.body.decode())


def _fail_as_passed(live: LiveRun, promise: Promise) -> None:
    number = promise.request_id.rpartition(":")[2]
    promise.fail(
        f"request number {number} of this run has passed; the next one is {live.lane.next}"
    )


class Gaps:
    """The clocks of missing numbers."""

    def __init__(self, parts: Parts, begin: Callable[[LiveRun, LaneItem], None]) -> None:
        self._journals, self._promises = parts.journals, parts.promises
        self._limits, self._begin = parts.limits, begin

    def check(self, live: LiveRun, number: int, call: Call) -> None:
        """Refuse a request for now if too much waits for a missing one, which is always taken."""
        held, limit = live.lane.held_bytes + call.size, self._limits.gap_bytes
        if number > live.lane.next and held > limit:
            raise Refusal(
                429,
                f"{live.lane.held_bytes} bytes of requests of this run wait for request number "
                f"{live.lane.next}, which has not arrived; the limit gap_bytes is {limit}",
                headers={"Retry-After": "1"},
            )

    def watch(self, live: LiveRun, missing: int | None) -> None:
        """Start the clock of a missing number; others that arrive do not set it back."""
        self.stop(live)
        live.gap = missing
        if missing is not None:
            patience = self._limits.gap_seconds
            if live.last is not None:
                patience = min(patience, UNLOAD_GAP_SECONDS)
            live.gap_timer = asyncio.get_running_loop().call_later(
                patience, self._close, live, missing
            )

    def stop(self, live: LiveRun) -> None:
        """Stop the clock of a run."""
        live.gap = None
        if live.gap_timer is not None:
            live.gap_timer.cancel()
            live.gap_timer = None

    def _close(self, live: LiveRun, missing: int) -> None:
        live.gap = live.gap_timer = None
        self._promises.keep(asyncio.ensure_future(self._give_up_durably(live, missing)))

    async def _give_up_durably(self, live: LiveRun, missing: int) -> None:
        """Record that a number is given up before it is: another life must not carry it out."""
        try:
            await self._journals.of_run(live.name).append(missing, {"op": GIVEN_UP})
        except OSError:
            logger.exception(
                "request %d of %s was given up, but writing that to disk failed",
                missing,
                live.name,
            )
        self.give_up(live, missing)

    def give_up(self, live: LiveRun, missing: int) -> None:
        """Stop waiting for a number: what waited for it fails, and the run goes on."""
        if live.lane.missing != missing:  # it came while this was put on disk
            return
        waiting = live.lane.give_up()
        abandoned = [item for item in waiting if not isinstance(item.work, Unload)]
        for item in abandoned:
            item.promise.fail(
                f"request number {missing} of this run never arrived, so the {len(abandoned)} "
                "after it were not executed; the run goes on with the next request"
            )
        for item in waiting:
            if isinstance(item.work, Unload):
                self._begin(live, item)
