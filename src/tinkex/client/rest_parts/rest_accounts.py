"""RestAccounts: the methods of RestClient about the account."""

from __future__ import annotations

from typing import Any

from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import moved, value_twin
from tinkex.client.http.transport import Transport
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.client.rest_parts.rest_usage import RestUsage
from tinkex.client.settings.credentials import claims
from tinkex.errors import TinkerError
from tinkex.types.account import AuthTokenResponse, WhoamiResponse
from tinkex.types.sessions import ClientConfigRequest, ClientConfigResponse, Empty
from tinkex.wire import protocol
from tinkex.wire.protocol import PROTOCOL_VERSION


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
