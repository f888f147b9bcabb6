"""Messages about the account: who calls, what was used and what it costs, what was done."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.types.forms import Stamped, Variant
from tinkex.types.record import Record


class WhoamiResponse(Record, frozen=True, kw_only=True):
    """Whom the key in use belongs to.

    Example:
        >>> who = WhoamiResponse(user_urn="user:1", org_urn="org:1", email="ann@example.org")
        >>> who.email  # as `rest.whoami().result()` gives it
        'ann@example.org'
    """

    user_urn: str
    org_urn: str
    email: str | None = None


class ApiKeyResponse(Record, frozen=True, kw_only=True):
    """The key in use, as its owner named it.

    Example:
        >>> ApiKeyResponse(key_id=7, name="laptop").name
        'laptop'
    """

    key_id: int | str
    name: str = ""
    note: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class AuthTokenResponse(Record, frozen=True, kw_only=True):
    """A short-lived token in exchange for a key.

    Example:
        >>> AuthTokenResponse(jwt="eyJhbGciOi").jwt
        'eyJhbGciOi'
    """

    jwt: str


# ── audit ─────────────────────────────────────────────────────────────────────────────────────────

AuditEventType: TypeAlias = Literal["all", "checkpoints", "projects", "teams", "organizations"]
"""Entries of the audit log to read."""


class AuditLogEntry(Stamped, frozen=True, kw_only=True):
    """Something that was done, by whom and to what.

    Example:
        >>> entry = AuditLogEntry(timestamp=dt.datetime(2026, 1, 2, 12), event="checkpoint.deleted")
        >>> entry.event, entry.timestamp.isoformat()
        ('checkpoint.deleted', '2026-01-02T12:00:00+00:00')
    """

    timestamp: dt.datetime
    event: str
    event_details: dict[str, Any] = msgspec.field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Record, frozen=True, kw_only=True):
    """The audit log of one day.

    Example:
        >>> entry = AuditLogEntry(timestamp=dt.datetime(2026, 1, 2, 12), event="project.created")
        >>> [
        ...     f"{entry.timestamp:%H:%M} {entry.event}"
        ...     for entry in AuditLogResponse(entries=[entry]).entries
        ... ]
        ['12:00 project.created']
    """

    entries: list[AuditLogEntry]


# ── billing ───────────────────────────────────────────────────────────────────────────────────────


class BillingEventMark(Variant):
    """The subject of a billing event."""

    __slots__ = ()


class TrainingBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Tokens trained on.

    Example:
        >>> TrainingBillingEvent(token_count=4096).type
        'training'
    """

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Prompt tokens, read anew or from the cache.

    Example:
        >>> SamplingPrefillBillingEvent(cached=True, token_count=512).cached
        True
    """

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Tokens sampled.

    Example:
        >>> SamplingSampleBillingEvent(token_count=128).token_count
        128
    """

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Checkpoints saved.

    Example:
        >>> CheckpointBillingEvent(count=2).count
        2
    """

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Room that checkpoints took.

    Example:
        >>> StorageBillingEvent(gigabyte_hours=1.5).gigabyte_hours
        1.5
    """

    type: Literal["storage"] = "storage"
    gigabyte_hours: float
    free: bool = False


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)
"""The work that an event bills."""
if TYPE_CHECKING:
    _EventInfo: TypeAlias = BillingEventInfo
else:
    _EventInfo = BillingEventMark


class GetBillingUsageRequest(Stamped, frozen=True, kw_only=True):
    """A span of hours to account for.

    Example:
        >>> first, last = dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 2)
        >>> GetBillingUsageRequest(
        ...     starting_on=first, ending_before=last
        ... ).starting_on.isoformat()  # without a zone: UTC
        '2026-01-01T00:00:00+00:00'
    """

    starting_on: dt.datetime
    ending_before: dt.datetime


class BillingUsageEvent(Stamped, frozen=True, kw_only=True):
    """Usage of one kind in one hour.

    Example:
        >>> hour = {"bucket_start": "2026-01-01T10:00:00Z", "bucket_end": "2026-01-01T11:00:00Z"}
        >>> info = {"type": "training", "token_count": 4096}
        >>> event = BillingUsageEvent.model_validate({**hour, "event_info": info})
        >>> event.event_info
        TrainingBillingEvent(type='training', token_count=4096)
    """

    bucket_start: dt.datetime
    bucket_end: dt.datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: _EventInfo


class BillingUsageSession(Record, frozen=True, kw_only=True):
    """Description of a session that events name.

    Example:
        >>> BillingUsageSession(user_metadata={"experiment": "lr-sweep"}).user_metadata[
        ...     "experiment"
        ... ]
        'lr-sweep'
    """

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Stamped, frozen=True, kw_only=True):
    """Usage in a span of hours.

    Example:
        >>> hour = {"bucket_start": "2026-01-01T10:00:00Z", "bucket_end": "2026-01-01T11:00:00Z"}
        >>> event = {
        ...     **hour,
        ...     "estimated_cost_usd": 0.25,
        ...     "event_info": {"type": "checkpoint", "count": 1},
        ... }
        >>> usage = BillingUsageResponse.model_validate({"data": [event]})
        >>> sum(event.estimated_cost_usd or 0 for event in usage.data)
        0.25
    """

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    cost_data_through: dt.datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Record, frozen=True, kw_only=True):
    """Ask what checkpoints take up, in one project or all.

    Example:
        >>> GetCurrentCheckpointStorageUsageRequest(project_id="project-1").project_id
        'project-1'
    """

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Record, frozen=True, kw_only=True):
    """Storage of one owner's checkpoints in one project.

    Example:
        >>> item = CurrentCheckpointStorageUsageItem(
        ...     checkpoint_count=3, size_bytes=6 * 10**9, size_gigabytes=6.0
        ... )
        >>> item.size_gigabytes / item.checkpoint_count
        2.0
    """

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Record, frozen=True, kw_only=True):
    """Storage that checkpoints use now.

    Example:
        >>> item = CurrentCheckpointStorageUsageItem(
        ...     checkpoint_count=3, size_bytes=6 * 10**9, size_gigabytes=6.0
        ... )
        >>> usage = CurrentCheckpointStorageUsageResponse(data=[item])
        >>> sum(item.checkpoint_count for item in usage.data)
        3
    """

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
