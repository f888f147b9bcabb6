"""RestAccounts: the methods of RestClient and AdminClient about the account and its usage."""

from __future__ import annotations

import datetime as dt
from typing import Any, get_args

from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import deprecated, value_twin
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


class UsageCalls(RestBase):
    """Requests for the usage and the audit log of an organization."""

    def _audit_log(
        self, event_type: AuditEventType, day: dt.date | None
    ) -> APIFuture[AuditLogResponse]:
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

    def _billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        span = GetBillingUsageRequest(
            starting_on=_time("starting_on", starting_on),
            ending_before=_time("ending_before", ending_before),
        )
        return self._call(protocol.GET_BILLING_USAGE, query=to_builtins(span))

    def _storage_usage(
        self, project_id: str | None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        op = protocol.GET_CURRENT_CHECKPOINT_STORAGE_USAGE
        return self._call(op, query={"project_id": project_id})


class RestAccounts(UsageCalls):
    """The owner of the key, and the usage by its deprecated names."""

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return the user and the organization of the key, from the token that the server gives for it.

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

    @deprecated("call AdminClient.get_audit_log(); an AdminClient is made the same way")
    def get_audit_log(
        self, event_type: AuditEventType = "all", day: dt.date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient.get_audit_log`."""
        return self._audit_log(event_type, day)

    get_audit_log_async = value_twin(get_audit_log, "await AdminClient.get_audit_log()")

    @deprecated("call AdminClient.get_billing_usage(); an AdminClient is made the same way")
    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        return self._billing_usage(starting_on, ending_before)

    get_billing_usage_async = value_twin(get_billing_usage, "await AdminClient.get_billing_usage()")

    @deprecated(
        "call AdminClient.get_current_checkpoint_storage_usage(); an AdminClient is made the same "
        "way"
    )
    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        return self._storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = value_twin(
        get_current_checkpoint_storage_usage,
        "await AdminClient.get_current_checkpoint_storage_usage()",
    )


def _time(name: str, value: dt.datetime | str) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    try:
        return dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a datetime or RFC 3339 text, got {value!r}") from None


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
