"""Usage by the hour, an audit log, and a timeline for each session.

Everything is noted in memory, once per operation and never per token, and written to the database
every few seconds in one transaction. Amounts are counted; all prices are zero.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tinkex.server.database.interface import AuditEntry, Database, Span, UsageKind, Use
from tinkex.server.http_errors import Refusal, complain

HOUR = 3600
FLUSH_SECONDS = 5.0
STORAGE_SECONDS = 60.0
"""Seconds between two sums of the room that checkpoints take."""
SPANS_PER_SESSION = 20_000
KEEP_SPANS_SECONDS = 30 * 24 * 3600.0
GIGABYTE = 1e9


AUDITED = {
    "save_weights": ("checkpoints", "checkpoint_saved"),
    "save_weights_for_sampler": ("checkpoints", "checkpoint_saved"),
    "save_weights_external": ("checkpoints", "checkpoint_exported"),
    "external_weights_upload_finish": ("checkpoints", "checkpoint_uploaded"),
    "load_weights": ("checkpoints", "checkpoint_loaded"),
    "copy_weights": ("checkpoints", "checkpoint_copied"),
    "delete_checkpoint": ("checkpoints", "checkpoint_deleted"),
    "publish_checkpoint": ("checkpoints", "checkpoint_published"),
    "unpublish_checkpoint": ("checkpoints", "checkpoint_unpublished"),
    "set_checkpoint_ttl": ("checkpoints", "checkpoint_ttl_set"),
    "assign_session_project": ("projects", "session_assigned"),
}
"""Operations that are noted in the audit log when they succeed, with the type and name there."""


class Meter:
    """Counts what operations use, and notes what they do.

    Everything but the writing happens on the event loop.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._uses: defaultdict[Use, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._entries: list[AuditEntry] = []
        self._lengths: Counter[str] = Counter()
        """Spans of each session that were noted in this life of the server."""
        self._weighed = time.monotonic()
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.open: Counter[tuple[str, str]] = Counter()
        """Operations that were accepted and have not ended, by owner and name."""
        self.unread: Counter[str] = Counter()
        """Bytes of results that wait to be read, by owner."""
        self.expected: Counter[str] = Counter()
        """Most bytes of the results of samples that have not ended, by owner."""
        self.held: Counter[str] = Counter()
        """Bytes of requests that arrive or have not ended, by owner."""
        self.creating: Counter[str] = Counter()
        """Runs that are being created, by owner."""

    def open_of(self, owner: str) -> int:
        """Return the number of an owner's operations that have not ended."""
        return sum(count for (whose, _), count in self.open.items() if whose == owner)

    def let_go(self, owner: str, size: int) -> None:
        """Stop counting bytes of a request as held."""
        _subtract(self.held, owner, size)

    def was_read(self, owner: str, waiting: int) -> None:
        """Stop counting the bytes of a result as unread."""
        _subtract(self.unread, owner, waiting)

    def count(
        self, owner: str, session_id: str, base_model: str, kind: UsageKind, amount: float
    ) -> None:
        """Add to the usage of this hour."""
        if amount:
            hour = int(time.time()) // HOUR * HOUR
            self._uses[hour, owner, session_id, base_model, kind] += amount
            self.totals[kind] += amount

    def audit(
        self,
        owner: str,
        operation: str,
        *,
        model_id: str | None = None,
        tinker_path: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Note that an operation succeeded, if it belongs in the audit log."""
        if operation in AUDITED:
            category, event = AUDITED[operation]
            said = json.dumps(dict(details or {}))
            about = (category, event, model_id, tinker_path, said)
            self._entries.append(AuditEntry(time.time(), owner, *about))

    def span(
        self, session_id: str, request_id: str, operation: str, began: float, error: str | None
    ) -> None:
        """Note that an operation has ended; only the first SPANS_PER_SESSION are kept."""
        self._lengths[session_id] += 1
        if self._lengths[session_id] <= SPANS_PER_SESSION:
            self._spans.append(Span(session_id, request_id, operation, began, time.time(), error))

    async def flush(self) -> None:
        """Write what was noted since the last time; keep it if that fails."""
        uses, self._uses = self._uses, defaultdict(float)
        spans, self._spans = self._spans, []
        entries, self._entries = self._entries, []
        if not (uses or spans or entries):
            return
        try:
            await asyncio.to_thread(self._database.activity.add, uses, spans, entries)
        except Exception:
            for use, amount in uses.items():
                self._uses[use] += amount
            self._spans[:0] = spans[-SPANS_PER_SESSION:]
            self._entries[:0] = entries
            raise

    async def weigh(self) -> None:
        """Count the room that checkpoints took since the last time."""
        now = time.monotonic()
        hours, self._weighed = (now - self._weighed) / HOUR, now
        for owner, model_id, base_model, size in await asyncio.to_thread(
            self._database.checkpoints.sizes
        ):
            session_id = model_id.partition(":")[0]
            self.count(owner, session_id, base_model, "storage", size / GIGABYTE * hours)

    async def run(self) -> None:
        """Write, weigh and forget old timelines until cancelled."""
        weighed = tidied = 0.0
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                if time.monotonic() - weighed > STORAGE_SECONDS:
                    await self.weigh()
                    weighed = time.monotonic()
                await self.flush()
                if time.monotonic() - tidied > HOUR:
                    old = time.time() - KEEP_SPANS_SECONDS
                    await asyncio.to_thread(self._database.activity.forget_spans, old)
                    tidied = time.monotonic()
            except Exception as error:
                complain("writing the usage failed; it is tried again", error)


def _subtract(counter: Counter[str], owner: str, size: int) -> None:
    counter[owner] -= size
    if counter[owner] <= 0:
        del counter[owner]


def check_held(held: int, size: int, limit: int) -> None:
    """Refuse a request while its owner's requests take too much memory.

    A single request may take more than the limit.
    """
    if held > limit and held > size:
        why = f"{held - size} bytes of your other requests are arriving or have not ended"
        how = f"the limit held_bytes is {limit}; send this request again later"
        raise Refusal(429, f"{why}; {how}", headers={"Retry-After": "1"})
