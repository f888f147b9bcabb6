"""Messages about the account: who calls, what was used and what it costs, what was done."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.types.forms import Stamped, Variant
from tinkex.types.record import Record


class AuthTokenResponse(Record, frozen=True, kw_only=True):
    """A short-lived token in exchange for a key."""

    jwt: str


class ApiKeyResponse(Record, frozen=True, kw_only=True):
    """The key in use, as its owner named it."""

    key_id: int | str
    name: str = ""
    note: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class WhoamiResponse(Record, frozen=True, kw_only=True):
    """Whom the key in use belongs to."""

    user_urn: str
    org_urn: str
    email: str | None = None


# ── audit ────────────────────────────────────────────────────────────────────────────────────────────────────────

AuditEventType: TypeAlias = Literal["all", "checkpoints", "projects", "teams", "organizations"]
"""Which entries of the audit log to read."""


class AuditLogEntry(Stamped, frozen=True, kw_only=True):
    """Something that was done, by whom and to what."""

    timestamp: dt.datetime
    event: str
    event_details: dict[str, Any] = msgspec.field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Record, frozen=True, kw_only=True):
    """What was done on a day."""

    entries: list[AuditLogEntry]


# ── billing ──────────────────────────────────────────────────────────────────────────────────────────────────────


class BillingEventMark(Variant):
    """What a billing event is about."""

    __slots__ = ()


class TrainingBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Tokens trained on."""

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Prompt tokens, read anew or from the cache."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Tokens sampled."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Checkpoints saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Record, BillingEventMark, frozen=True, kw_only=True):
    """Room that checkpoints took."""

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)
"""What was used."""
if TYPE_CHECKING:
    _EventInfo: TypeAlias = BillingEventInfo
else:
    _EventInfo = BillingEventMark


class GetBillingUsageRequest(Stamped, frozen=True, kw_only=True):
    """A span of hours to account for."""

    starting_on: dt.datetime
    ending_before: dt.datetime


class BillingUsageEvent(Stamped, frozen=True, kw_only=True):
    """What one hour of one kind of use came to."""

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
    """What is known of a session that events name."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Stamped, frozen=True, kw_only=True):
    """What was used in a span of hours."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    cost_data_through: dt.datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Record, frozen=True, kw_only=True):
    """Ask what checkpoints take up, in one project or all."""

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Record, frozen=True, kw_only=True):
    """What one owner's checkpoints in one project take up."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Record, frozen=True, kw_only=True):
    """What checkpoints take up now."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
