"""Exchange a key for a token, describe it, revoke it."""

from __future__ import annotations

import asyncio

from tinkex.server.access.accounts import ORGANIZATION, Account
from tinkex.server.access.keys import revoke_key
from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.state import State
from tinkex.types.account import ApiKeyResponse, AuthTokenResponse
from tinkex.types.sessions import Empty


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
        raise Refusal(
            400,
            "there is no key on record to revoke: the server was started with its key, or is open",
        )
    await asyncio.to_thread(revoke_key, state.database, call.key_id)
    return Empty()
