"""Exchange keys for tokens; report usage, stored checkpoints and the audit log."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from typing import get_args

from tinkex.server.access.accounts import ORGANIZATION, Account
from tinkex.server.access.keys import revoke_key
from tinkex.server.calls import Call
from tinkex.server.database.interface import LOCAL_OWNER, Used, user_urn
from tinkex.server.http_errors import Refusal
from tinkex.server.meter import GIGABYTE, HOUR
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.queries import choice, moment, texts
from tinkex.server.state import State
from tinkex.types.account import (
    ApiKeyResponse,
    AuditEventType,
    AuditLogEntry,
    AuditLogResponse,
    AuthTokenResponse,
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
from tinkex.types.sessions import Empty

LONGEST = dt.timedelta(days=14)
HOUR_EXAMPLE = "2026-07-13T00:00:00Z"


# ── the key ───────────────────────────────────────────────────────────────────────────────────────


@handler
async def auth_token(state: State, call: Call) -> AuthTokenResponse:
    """Exchange the caller's key for a token."""
    return AuthTokenResponse(jwt=state.accounts.token(Account(call.owner, call.key_id)))


@handler
async def get_api_key(state: State, call: Call) -> ApiKeyResponse:
    """Describe the caller's key."""
    name, note = "TINKEX_SERVER_API_KEY", "the key that the server was started with"
    if call.key_id:
        name, note = await asyncio.to_thread(state.database.keys.name, call.key_id), ""
    elif not await state.accounts.needs_key():
        name, note = "open", "this server is open: no key is needed"
    user = {"name": call.owner, "email": call.owner if "@" in call.owner else ""}
    details = {"org_details": {"name": ORGANIZATION}, "user_details": user}
    return ApiKeyResponse(key_id=call.key_id, name=name, note=note, details=details)


@handler
async def delete_api_key(state: State, call: Call) -> Empty:
    """Revoke the caller's key."""
    if not call.key_id:
        why = "the server is open, or was started with its key"
        raise Refusal(400, f"there is no key on record to revoke: {why}")
    await asyncio.to_thread(revoke_key, state.database, call.key_id)
    return Empty()


# ── reports ───────────────────────────────────────────────────────────────────────────────────────


def _only(owner: str) -> str | None:
    """Return the owner whose usage is shown, or None for all to the operator."""
    return None if owner == LOCAL_OWNER else owner


@handler
async def get_billing_usage(state: State, call: Call) -> BillingUsageResponse:
    """Report usage by the hour; the cost is zero."""
    start, end = _hour(call, "starting_on"), _hour(call, "ending_before")
    if end <= start:
        raise Refusal(400, "ending_before must be later than starting_on")
    if end - start > LONGEST:
        days = (end - start).days
        why = f"starting_on and ending_before are {days} days apart"
        raise Refusal(400, f"{why}: ask for {LONGEST.days} or fewer")
    await state.meter.flush()
    span, find = (int(start.timestamp()), int(end.timestamp())), state.database.activity.used
    used, metadata = await asyncio.to_thread(find, *span, _only(call.owner))
    sessions = {
        session: BillingUsageSession(user_metadata=texts(fields))
        for session, fields in metadata.items()
    }
    events, now = [_event(one) for one in used], dt.datetime.now(dt.UTC)
    return BillingUsageResponse(data=events, sessions=sessions, cost_data_through=now)


def _hour(call: Call, name: str) -> dt.datetime:
    text = call.query.get(name)
    if not text:
        raise Refusal(400, f"{name} is missing: give a full hour such as {HOUR_EXAMPLE}")
    try:
        hour = dt.datetime.fromisoformat(text)
        hour = hour.replace(tzinfo=hour.tzinfo or dt.UTC).astimezone(dt.UTC)
    except (ValueError, OverflowError):  # the year 1 may begin before it in UTC
        raise Refusal(400, f"{name} must be a time such as {HOUR_EXAMPLE}, got {text!r}") from None
    if (hour.minute, hour.second, hour.microsecond) != (0, 0, 0):
        raise Refusal(400, f"{name} must be a full hour such as {HOUR_EXAMPLE}, got {text!r}")
    return hour


def _event(used: Used) -> BillingUsageEvent:
    start = moment(used.bucket)
    kind, amount = used.kind, used.amount
    infos: dict[str, BillingEventInfo] = {
        "training": TrainingBillingEvent(token_count=int(amount)),
        "prefill": SamplingPrefillBillingEvent(cached=False, token_count=int(amount)),
        "sample": SamplingSampleBillingEvent(token_count=int(amount)),
        "checkpoint": CheckpointBillingEvent(count=int(amount)),
        "storage": StorageBillingEvent(gigabyte_hours=amount),
    }
    is_of_tokens = kind in ("training", "prefill", "sample")
    return BillingUsageEvent(
        bucket_start=start,
        bucket_end=start + dt.timedelta(hours=1),
        base_model=used.base_model or None,
        user_id=user_urn(used.owner),
        user_name=used.owner,
        session_id=used.session_id,
        project_id=used.project_id,
        estimated_cost_usd=0.0,
        effective_rate_usd_per_million_tokens=0.0 if is_of_tokens else None,
        effective_rate_usd_per_gigabyte_month=0.0 if kind == "storage" else None,
        event_info=infos[kind],
    )


@handler
async def get_current_checkpoint_storage_usage(
    state: State, call: Call
) -> CurrentCheckpointStorageUsageResponse:
    """Report the room that checkpoints take now, by project and owner."""
    project, find = call.query.get("project_id"), state.database.checkpoints.stored_bytes
    stored = await asyncio.to_thread(find, _only(call.owner), project)
    return CurrentCheckpointStorageUsageResponse(
        effective_rate_usd_per_gigabyte_month=0.0,
        data=[
            CurrentCheckpointStorageUsageItem(
                project_id=one.project,
                org_user_urn=user_urn(one.owner),
                user_email=one.owner if "@" in one.owner else None,
                user_name=one.owner,
                checkpoint_count=one.count,
                size_bytes=one.size,
                size_gigabytes=one.size / GIGABYTE,
                estimated_monthly_cost_usd=0.0,
            )
            for one in stored
        ],
    )


@handler
async def get_audit_log(state: State, call: Call) -> AuditLogResponse:
    """Report the audit log of a day in UTC, by default today."""
    category = choice(call, "event_type", get_args(AuditEventType))
    text = call.query.get("day")
    try:
        day = dt.date.fromisoformat(text) if text else dt.datetime.now(dt.UTC).date()
    except ValueError:
        raise Refusal(400, f"day must be a date such as 2026-07-13, got {text!r}") from None
    start = dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC).timestamp()
    await state.meter.flush()
    span, kind = (start, start + 24 * HOUR), None if category == "all" else category
    find = state.database.activity.audit
    entries = await asyncio.to_thread(find, *span, _only(call.owner), kind)
    return AuditLogResponse(
        entries=[
            AuditLogEntry(
                timestamp=moment(entry.at),
                event=entry.event,
                event_details={"owner": entry.owner, **json.loads(entry.details)},
                model_id=entry.model_id,
                tinker_path=entry.tinker_path,
            )
            for entry in entries
        ]
    )
