"""Numbers that never come: they are given up after a time, so that a run goes on behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.parts import Parts
from tinkex.server.runs.call_records import GIVEN_UP
from tinkex.server.runs.work import LaneItem, LiveRun, Unload

logger = logging.getLogger("tinkex.server")

UNLOAD_GAP_SECONDS = 60.0
"""The longest time that a missing request delays the unloading of its run."""


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
                f"{live.lane.next}, which has not come; the limit gap_bytes is {limit}",
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
            await self._journals.of_run(live.run.model_id).append(missing, {"op": GIVEN_UP})
        except OSError:
            logger.exception(
                "that request %d of %s was given up cannot be put on disk",
                missing,
                live.run.model_id,
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
