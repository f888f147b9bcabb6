"""RestAccounts and RestUsage: the methods of RestClient and AdminClient about accounts."""

from __future__ import annotations

import datetime as dt
from typing import Any

from tinkex.client.checkpoint_arguments import checked_choice
from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import moved, value_twin
from tinkex.client.http.transport import Transport
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.client.settings.credentials import claims
from tinkex.errors import TinkerError
from tinkex.types.account import (
    AuditEventType,
    AuditLogResponse,
    AuthTokenResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    WhoamiResponse,
)
from tinkex.types.record import to_builtins
from tinkex.types.sessions import ClientConfigRequest, ClientConfigResponse, Empty
from tinkex.wire import protocol
from tinkex.wire.protocol import PROTOCOL_VERSION


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
        checked_choice("event_type", event_type, AuditEventType)
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


class RestAccounts(RestBase):
    """The owner of the key, and methods that have moved to AdminClient."""

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return the user and the organization of the key.

        They are in the token that the server gives for the key.

        Raises:
            RuntimeError: Raised by the future when the server gives no token for the key.

        Example:
            >>> RestClient(api_key=token).whoami().result().email
            'ada@example.org'
        """
        key = self._config.api_key or ""

        async def work(transport: Transport) -> WhoamiResponse:
            said = _claims(key) if key.startswith("eyJ") else {}
            if not str(said.get("iss", "")).startswith("passport-"):
                said = await _exchange_key(transport)
            try:
                return WhoamiResponse(
                    user_urn=said["sub"],
                    org_urn=f"tml:organization:{said['org_id']}",
                    email=said.get("email") or None,
                )
            except KeyError as error:
                raise RuntimeError(
                    f"the token does not say who it is for: {error} is missing"
                ) from None

        return self._start(work)

    get_audit_log = moved(RestUsage.get_audit_log, "AdminClient")
    get_audit_log_async = value_twin(get_audit_log, "await AdminClient.get_audit_log()")
    get_billing_usage = moved(RestUsage.get_billing_usage, "AdminClient")
    get_billing_usage_async = value_twin(get_billing_usage, "await AdminClient.get_billing_usage()")
    get_current_checkpoint_storage_usage = moved(
        RestUsage.get_current_checkpoint_storage_usage, "AdminClient"
    )
    get_current_checkpoint_storage_usage_async = value_twin(
        get_current_checkpoint_storage_usage,
        "await AdminClient.get_current_checkpoint_storage_usage()",
    )


def _claims(token: str) -> dict[str, Any]:
    """Return the claims of a token; none if it cannot be read."""
    try:
        return claims(token)
    except TinkerError:
        return {}


async def _exchange_key(transport: Transport) -> dict[str, Any]:
    """Return the claims of the token that the server gives for the key."""
    hello = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
    config: ClientConfigResponse = await transport.call(protocol.CLIENT_CONFIG, hello)
    if not config.pjwt_auth_enabled:
        raise RuntimeError(
            "whoami needs a token: there is none, and this server gives none in exchange for keys"
        )
    token: AuthTokenResponse = await transport.call(protocol.AUTH_TOKEN, Empty())
    return _claims(token.jwt)


def _time(name: str, value: dt.datetime | str) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    try:
        return dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a datetime or RFC 3339 text, got {value!r}") from None
