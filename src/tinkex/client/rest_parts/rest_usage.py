"""RestUsage: the methods of AdminClient, about the usage of an organization."""

from __future__ import annotations

import datetime as dt
from typing import get_args

from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import value_twin
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.types.account import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
)
from tinkex.types.record import to_builtins
from tinkex.wire import protocol


class RestUsage(RestBase):
    """The audit log, and the usage of compute and storage."""

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: dt.date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Return the audit log of a day.

        Args:
            event_type: "all", "checkpoints", "projects", "teams" or "organizations".
            day: The day, from midnight to midnight UTC; today by default.

        Returns:
            A future of the day's events.

        Raises:
            ValueError: There is no such kind of events, or the day is not a date.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> admin.get_audit_log("checkpoints").result().entries[-1].event
            'checkpoint_saved'
        """
        if event_type not in get_args(AuditEventType):
            raise ValueError(
                f"event_type is {event_type!r}; expected one of "
                f"{', '.join(get_args(AuditEventType))}"
            )
        if day is not None and not isinstance(day, dt.date):
            raise ValueError(f"day must be a date, got {day!r}")
        date = day.date() if isinstance(day, dt.datetime) else day
        query = {"event_type": event_type, "day": date.isoformat() if date else None}
        return self._call(protocol.GET_AUDIT_LOG, query=query)

    get_audit_log_async = value_twin(get_audit_log)

    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Return the usage, hour by hour.

        Args:
            starting_on: The first hour: a datetime, or text such as `2026-07-13T00:00:00Z`. It is
                in UTC if it has no zone.
            ending_before: The hour after the last one; at most 14 days later.

        Returns:
            A future of the usage, by hour.

        Raises:
            ValueError: A time cannot be read.

        Example:
            >>> admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
            BillingUsageResponse(...)
        """
        span = GetBillingUsageRequest(
            starting_on=_time("starting_on", starting_on),
            ending_before=_time("ending_before", ending_before),
        )
        return self._call(protocol.GET_BILLING_USAGE, query=to_builtins(span))

    get_billing_usage_async = value_twin(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Return the storage that checkpoints use now, in one project or in all.

        Args:
            project_id: The project; all by default.

        Returns:
            A future of count and bytes, by project and owner.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> [
            ...     item.size_bytes
            ...     for item in admin.get_current_checkpoint_storage_usage().result().data
            ... ]
            [...]
        """
        op = protocol.GET_CURRENT_CHECKPOINT_STORAGE_USAGE
        return self._call(op, query={"project_id": project_id})

    get_current_checkpoint_storage_usage_async = value_twin(get_current_checkpoint_storage_usage)


def _time(name: str, value: dt.datetime | str) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    try:
        return dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a datetime or RFC 3339 text, got {value!r}") from None
