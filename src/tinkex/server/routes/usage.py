"""What was used and what was done: tokens and storage by the hour, an audit trail, a timeline per
session.

Everything is noted in memory, once per operation and never per token, and written to the store
every few seconds in one transaction. Nothing costs anything here: amounts are counted, prices are
zero.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from tinkex.server.complaints import complain
from tinkex.server.database.store import LOCAL_OWNER, Sampler, Store, user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.runs.encoded_results import most_of, size_of
from tinkex.types.account import (
    AuditEventType,
    AuditLogEntry,
    AuditLogResponse,
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)
from tinkex.types.sampling import SampleRequest, SampleResponse
from tinkex.types.sessions import RequestFailedResponse

if TYPE_CHECKING:
    from tinkex.server.calls import Call
    from tinkex.server.runs.promises import Promise
    from tinkex.server.state import State

logger = logging.getLogger("tinkex.server")

HOUR = 3600
FLUSH_SECONDS = 5.0
STORAGE_SECONDS = 60.0
"""How often the room that checkpoints take is added up."""
SPANS_PER_SESSION = 20_000
KEEP_SPANS_SECONDS = 30 * 24 * 3600.0
LONGEST = dt.timedelta(days=14)
GIGABYTE = 1e9

Kind: TypeAlias = Literal["training", "prefill", "sample", "checkpoint", "storage"]
Use: TypeAlias = tuple[int, str, str, str, Kind]
"""The hour, the owner, the session, the base model, and what of."""

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
"""Operations that leave a trace in the audit log when they succeed: under which type, and by what
name."""
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
ADD_AUDIT = (
    "INSERT INTO audit (at, owner, category, event, model_id, tinker_path, details) VALUES "
    "(?, ?, ?, ?, ?, ?, ?)"
)
ADD_USE = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (bucket, owner, session_id, base_model, kind) DO UPDATE SET amount = amount + excluded.amount
"""


def record(
    store: Store, owner: str, category: str, event: str, *, details: Mapping[str, Any]
) -> None:
    """Write one entry of the audit log at once; for those who are no running server."""
    store.change(
        (ADD_AUDIT, [(time.time(), owner, category, event, None, None, json.dumps(details))])
    )


class Meter:
    """Counts what a server's operations use and notes what they do; on the event loop, except for
    the writing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uses: defaultdict[Use, float] = defaultdict(float)
        self._spans: list[tuple[str, str, str, float, float, str | None]] = []
        self._entries: list[tuple[float, str, str, str, str | None, str | None, str]] = []
        self._lengths: Counter[str] = Counter()
        """How many spans of a session have been noted in this life of the server."""
        self._weighed = time.monotonic()
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.open: Counter[tuple[str, str]] = Counter()
        """Operations that have been taken and have not ended, by owner and name."""
        self.unread: Counter[str] = Counter()
        """Bytes of results that wait to be read, by owner …"""
        self.expected: Counter[str] = Counter()
        """… and the most that the samples may give which have been taken and have not ended."""
        self.held: Counter[str] = Counter()
        """Bytes of requests that arrive or have not ended, by owner."""
        self.creating: Counter[str] = Counter()
        """Runs on their way, by owner."""

    def open_of(self, owner: str) -> int:
        """How many operations of an owner have not ended."""
        return sum(count for (whose, _), count in self.open.items() if whose == owner)

    def let_go(self, owner: str, size: int) -> None:
        """Count bytes of a request no longer as held."""
        self.held[owner] -= size
        if self.held[owner] <= 0:
            del self.held[owner]

    def was_read(self, owner: str, waiting: int) -> None:
        """Count a result of so many bytes no longer as unread."""
        self.unread[owner] -= waiting
        if self.unread[owner] <= 0:
            del self.unread[owner]

    def count(
        self, owner: str, session_id: str, base_model: str, kind: Kind, amount: float
    ) -> None:
        """Add to what was used in this hour."""
        if amount:
            self._uses[int(time.time()) // HOUR * HOUR, owner, session_id, base_model, kind] += (
                amount
            )
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
        """Note that an operation succeeded, if it is one to be noted."""
        if operation in AUDITED:
            category, event = AUDITED[operation]
            said = json.dumps(dict(details or {}))
            self._entries.append((time.time(), owner, category, event, model_id, tinker_path, said))

    def span(
        self, session_id: str, request_id: str, operation: str, began: float, error: str | None
    ) -> None:
        """Note that an operation has ended; what a session does beyond a limit is not kept."""
        self._lengths[session_id] += 1
        if self._lengths[session_id] <= SPANS_PER_SESSION:
            self._spans.append((session_id, request_id, operation, began, time.time(), error))

    async def flush(self) -> None:
        """Write what was noted since the last time; what cannot be written now is kept for the next
        time.
        """
        uses, self._uses = self._uses, defaultdict(float)
        spans, self._spans = self._spans, []
        entries, self._entries = self._entries, []
        try:
            await asyncio.to_thread(self._write, uses, spans, entries)
        except Exception:
            for use, amount in uses.items():
                self._uses[use] += amount
            self._spans[:0] = spans[-SPANS_PER_SESSION:]
            self._entries[:0] = entries
            raise

    def _write(self, uses: Mapping[Use, float], spans: list[Any], entries: list[Any]) -> None:
        if uses or spans or entries:
            self._store.change(
                (ADD_USE, [(*use, amount) for use, amount in uses.items()]),
                ("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", spans),
                (ADD_AUDIT, entries),
                flush=bool(entries),
            )

    async def weigh(self) -> None:
        """Add the room that checkpoints have taken since the last time."""
        now = time.monotonic()
        hours, self._weighed = (now - self._weighed) / HOUR, now
        sql = """
            SELECT owner, model_id, base_model, SUM(size_bytes) AS size FROM checkpoints
            WHERE expires IS NULL OR expires > ? GROUP BY owner, model_id, base_model
        """
        for row in await asyncio.to_thread(self._store.rows, sql, time.time()):
            session_id = row["model_id"].partition(":")[0]
            self.count(
                row["owner"],
                session_id,
                row["base_model"],
                "storage",
                row["size"] / GIGABYTE * hours,
            )

    async def run(self) -> None:
        """Until cancelled: write, weigh, and forget old timelines."""
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
                    await asyncio.to_thread(
                        self._store.rows, "DELETE FROM spans WHERE began < ?", old
                    )
                    tidied = time.monotonic()
            except Exception as error:
                complain("usage could not be written; it is tried again", error)


@dataclass(slots=True)
class Watch:
    """Waits for the end of one operation: called by its promise, in place of whoever was to be
    called before.
    """

    meter: Meter
    operation: str
    owner: str
    model_id: str | None
    base_model: str
    tokens: int
    path: str | None
    creates: bool
    began: float
    bound: int
    size: int
    """Bytes of the request, once it is expanded."""
    before: Any

    def __call__(self, promise: Promise) -> None:
        """Note how the operation ended, and pass the news on."""
        try:
            self._note(promise)
        finally:
            if self.before is not None:
                self.before(promise)

    def _note(self, promise: Promise) -> None:
        meter, result = self.meter, promise.result
        meter.open[self.owner, self.operation] -= 1
        meter.expected[self.owner] -= self.bound
        meter.let_go(self.owner, self.size)
        if waiting := size_of(result):
            meter.unread[self.owner] += waiting
            promise.on_read = functools.partial(meter.was_read, self.owner, waiting)
        if self.creates:
            meter.creating[self.owner] -= 1
        failed = result.error if isinstance(result, RequestFailedResponse) else None
        meter.span(promise.session_id, promise.request_id, self.operation, self.began, failed)
        if failed is not None:
            return
        meter.count(self.owner, promise.session_id, self.base_model, "training", self.tokens)
        path = getattr(result, "path", None) or self.path
        if path is not None:  # a nameless snapshot is no checkpoint
            meter.count(
                self.owner,
                promise.session_id,
                self.base_model,
                "checkpoint",
                self.operation in SAVES,
            )
            meter.audit(self.owner, self.operation, model_id=self.model_id, tinker_path=path)


def watch(state: State, operation: str, call: Call, request_id: str) -> None:
    """See an operation through to its end, if it has just been taken: a repeated one is watched
    already.
    """
    promise = state.promises.get(request_id)
    if promise is None or promise.done.is_set() or isinstance(promise.on_settled, Watch):
        return
    request, meter = call.request, state.meter
    model_id = getattr(request, "model_id", None)
    live = state.runs.get(model_id) if model_id else None
    creates = operation == "create_model" or (operation == "load_weights" and model_id is None)
    bound = (
        most_of(request, max(state.windows.values())) if isinstance(request, SampleRequest) else 0
    )
    promise.on_settled = Watch(
        meter,
        operation,
        call.owner,
        model_id,
        live.run.base_model if live else "",
        sum(lengths(request)),
        request.path if operation == "load_weights" else None,
        creates,
        time.time(),
        bound,
        call.size,
        promise.on_settled,
    )
    meter.open[call.owner, operation] += 1
    meter.expected[call.owner] += bound
    meter.held[call.owner] += call.size
    if creates:
        meter.creating[call.owner] += 1


def lengths(request: Any) -> list[int]:
    """How long the sequences are that a training request brings; one whose length is unknown counts
    as nothing.
    """
    body = getattr(request, "forward_backward_input", None) or getattr(
        request, "forward_input", None
    )
    return [_length(datum.model_input) for datum in body.data] if body is not None else []


def _length(model_input: Any) -> int:
    try:
        return int(model_input.length)
    except ValueError:  # an image that does not say how many tokens it takes; the engine refuses it
        return 0


async def metered_stream(
    state: State,
    call: Call,
    sampler: Sampler,
    request: SampleRequest,
    drawing: Awaitable[SampleResponse],
) -> SampleResponse:
    """A sample that no promise stands for: its time is noted here, and its tokens like any other's."""
    name, began, error = "stream_sample", time.time(), None
    state.meter.open[call.owner, name] += 1
    try:
        return await metered(state, call, sampler, request, drawing)
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        state.meter.open[call.owner, name] -= 1
        state.meter.span(
            sampler.session_id, f"{sampler.sampler_id}:{name}:{began}", name, began, error
        )


async def metered(
    state: State,
    call: Call,
    sampler: Sampler,
    request: SampleRequest,
    drawing: Awaitable[SampleResponse],
) -> SampleResponse:
    """A sample, counted once it is there."""
    response = await drawing
    session = sampler.session_id
    state.meter.count(call.owner, session, sampler.base_model, "prefill", _length(request.prompt))
    drawn = sum(sequence.length for sequence in response.sequences)
    state.meter.count(call.owner, session, sampler.base_model, "sample", drawn)
    return response


# ── handlers ──────────────────────────────────────────────────────────────────────────────────────


def sees_all(owner: str) -> bool:
    """Whether an owner sees everyone's usage and audit log: the operator of the server does, others
    see their own.
    """
    return owner == LOCAL_OWNER


@handler
async def get_billing_usage(state: State, call: Call) -> BillingUsageResponse:
    """What was used, hour by hour; the cost is zero."""
    start, end = _hour(call, "starting_on"), _hour(call, "ending_before")
    if end <= start:
        raise Refusal(400, "ending_before must be later than starting_on")
    if end - start > LONGEST:
        days = (end - start).days
        raise Refusal(
            400, f"from starting_on to ending_before are {days} days; the most is {LONGEST.days}"
        )
    await state.meter.flush()
    rows = await asyncio.to_thread(
        state.store.rows,
        """
        SELECT usage.*, sessions.project_id, sessions.user_metadata FROM usage LEFT JOIN sessions USING (session_id)
        WHERE bucket >= ? AND bucket < ? AND (? OR usage.owner = ?) ORDER BY bucket, usage.owner, session_id, kind
        """,
        int(start.timestamp()),
        int(end.timestamp()),
        sees_all(call.owner),
        call.owner,
    )
    metadata = {
        row["session_id"]: row["user_metadata"] for row in rows if row["user_metadata"] is not None
    }
    return BillingUsageResponse(
        data=[_event(row) for row in rows],
        sessions={
            session: BillingUsageSession(user_metadata=texts(json.loads(text)))
            for session, text in metadata.items()
        },
        cost_data_through=dt.datetime.now(dt.UTC),
    )


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as lists show it: values that are no text are written as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


def _hour(call: Call, name: str) -> dt.datetime:
    text = call.query.get(name)
    if not text:
        raise Refusal(400, f"{name} is missing: give a full hour such as 2026-07-13T00:00:00Z")
    try:
        moment = dt.datetime.fromisoformat(text)
        moment = (
            moment.replace(tzinfo=dt.UTC) if moment.tzinfo is None else moment.astimezone(dt.UTC)
        )
    except (
        ValueError,
        OverflowError,
    ):  # in UTC, the first hours of the year 1 elsewhere are before all years
        raise Refusal(
            400, f"{name} is {text!r}; expected a time such as 2026-07-13T00:00:00Z"
        ) from None
    if (moment.minute, moment.second, moment.microsecond) != (0, 0, 0):
        raise Refusal(
            400, f"{name} is {text!r}; usage is kept by the hour: give a full hour, in UTC"
        )
    return moment


def _event(row: Any) -> BillingUsageEvent:
    start = dt.datetime.fromtimestamp(row["bucket"], dt.UTC)
    kind, amount = row["kind"], row["amount"]
    infos: dict[str, BillingEventInfo] = {
        "training": TrainingBillingEvent(token_count=int(amount)),
        "prefill": SamplingPrefillBillingEvent(cached=False, token_count=int(amount)),
        "sample": SamplingSampleBillingEvent(token_count=int(amount)),
        "checkpoint": CheckpointBillingEvent(count=int(amount)),
        "storage": StorageBillingEvent(gigabyte_hours=amount),
    }
    return BillingUsageEvent(
        bucket_start=start,
        bucket_end=start + dt.timedelta(hours=1),
        base_model=row["base_model"] or None,
        user_id=user_urn(row["owner"]),
        user_name=row["owner"],
        session_id=row["session_id"],
        project_id=row["project_id"],
        estimated_cost_usd=0.0,
        effective_rate_usd_per_million_tokens=0.0
        if kind in ("training", "prefill", "sample")
        else None,
        effective_rate_usd_per_gigabyte_month=0.0 if kind == "storage" else None,
        event_info=infos[kind],
    )


@handler
async def get_current_checkpoint_storage_usage(
    state: State, call: Call
) -> CurrentCheckpointStorageUsageResponse:
    """What checkpoints take up now, by project and owner."""
    project = call.query.get("project_id")
    rows = await asyncio.to_thread(
        state.store.rows,
        """
        SELECT COALESCE(checkpoints.project_id, sessions.project_id) AS project, checkpoints.owner AS owner,
            COUNT(*) AS count, SUM(size_bytes) AS size
        FROM checkpoints LEFT JOIN runs USING (model_id) LEFT JOIN sessions USING (session_id)
        WHERE (expires IS NULL OR expires > ?) AND (? OR checkpoints.owner = ?)
        GROUP BY project, checkpoints.owner HAVING ? IS NULL OR project = ? ORDER BY project, checkpoints.owner
        """,
        time.time(),
        sees_all(call.owner),
        call.owner,
        project,
        project,
    )
    return CurrentCheckpointStorageUsageResponse(
        effective_rate_usd_per_gigabyte_month=0.0,
        data=[
            CurrentCheckpointStorageUsageItem(
                project_id=row["project"],
                org_user_urn=user_urn(row["owner"]),
                user_email=row["owner"] if "@" in row["owner"] else None,
                user_name=row["owner"],
                checkpoint_count=row["count"],
                size_bytes=row["size"],
                size_gigabytes=row["size"] / GIGABYTE,
                estimated_monthly_cost_usd=0.0,
            )
            for row in rows
        ],
    )


@handler
async def get_audit_log(state: State, call: Call) -> AuditLogResponse:
    """What was done on a day, UTC; today unless another is named."""
    category = call.query.get("event_type", "all")
    if category not in get_args(AuditEventType):
        raise Refusal(
            400,
            f"event_type is {category!r}; expected one of {', '.join(get_args(AuditEventType))}",
        )
    text = call.query.get("day")
    try:
        day = dt.date.fromisoformat(text) if text else dt.datetime.now(dt.UTC).date()
    except ValueError:
        raise Refusal(400, f"day is {text!r}; expected a date such as 2026-07-13") from None
    start = dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC).timestamp()
    await state.meter.flush()
    rows = await asyncio.to_thread(
        state.store.rows,
        "SELECT * FROM audit WHERE at >= ? AND at < ? AND (? OR owner = ?) AND (? = 'all' OR "
        "category = ?) ORDER BY at",
        start,
        start + 24 * HOUR,
        sees_all(call.owner),
        call.owner,
        category,
        category,
    )
    return AuditLogResponse(
        entries=[
            AuditLogEntry(
                timestamp=dt.datetime.fromtimestamp(row["at"], dt.UTC),
                event=row["event"],
                event_details={"owner": row["owner"], **json.loads(row["details"])},
                model_id=row["model_id"],
                tinker_path=row["tinker_path"],
            )
            for row in rows
        ]
    )
