"""Accounts: keys, the short-lived tokens given for them, and the account each belongs to.

A key is 256 random bits, so a plain SHA-256 of it is kept: it cannot be guessed, and a slow hash
would slow every request down. Keys are read from the database, so that one made or revoked by the
command line counts at once: an unknown key is always looked up, a known one is trusted for a
second.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hmac
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tinkex.client.settings.config import LOOPBACK
from tinkex.server.access.endpoints import Access
from tinkex.server.access.keys import has_keys, hash_of
from tinkex.server.database.interface import LOCAL_OWNER, Database, user_urn
from tinkex.server.files.data_dir import signing_secret
from tinkex.server.http_errors import Refusal

TRUSTED_SECONDS = 1.0
"""Seconds until a key that was found is looked up again."""


TOKEN_SECONDS = 3600


ISSUER = "passport-tinkex"


ORGANIZATION = "tinkex"


@dataclass(frozen=True, slots=True)
class Account:
    """The owner who asks, and the key; 0 is the key that the server was started with, or no key."""

    owner: str = LOCAL_OWNER
    key_id: int = 0


NOBODY = Account("")
"""The account of a caller that was not asked for a key. It owns nothing."""


class Accounts:
    """Finds the account of each request.

    Args:
        database: The keys, and the directory of the secret that tokens are signed with.
        api_key: A key besides those on record, of the owner `local`.
        embedded: Whether the only caller is this very program, which needs no key on record.
    """

    def __init__(
        self, database: Database, api_key: str | None = None, *, embedded: bool = False
    ) -> None:
        self._database = database
        self._given = hash_of(api_key) if api_key else None
        self._embedded = embedded
        self._secret = signing_secret(database.root)
        self._trusted: dict[bytes, tuple[float, Account]] = {}
        self._valid: dict[int, float] = {}
        self._closed = self._given is not None
        self._looked = 0.0

    async def needs_key(self) -> bool:
        """Return whether a key has been configured or made."""
        if (
            not self._closed
            and not self._embedded
            and time.monotonic() - self._looked > TRUSTED_SECONDS
        ):
            self._closed = await asyncio.to_thread(has_keys, self._database)
            self._looked = time.monotonic()
        return self._closed

    async def authorize(
        self, headers: Headers, access: Access, *, takes_bearer: bool = False
    ) -> Account:
        """Return the account of a request.

        Raises:
            Refusal: 401 without a valid key; 403 from another machine, when the server is open.
        """
        if access is Access.PUBLIC:
            return NOBODY
        if await self.needs_key():
            if access is Access.NO_KEY:
                return Account()
            key = headers.get("x-api-key")
            if not key and takes_bearer:
                key = _bearer(headers.get("authorization", ""))
            return await self.account(key)
        # An open server is for programs of this machine: a web page must not drive it.
        for name in ("host", "origin"):
            given = headers.getlist(name)
            if len(given) > 1 or not all(map(_is_here, given)):
                told = ", ".join(map(repr, given))
                raise Refusal(403, f"this server is open to this machine only; {name} is {told}")
        return Account()

    async def account(self, credential: str | None) -> Account:
        """Return the account of a key or token; refuse others with 401."""
        if not credential:
            raise Refusal(
                401,
                "this server needs an API key: send it as X-API-Key (TINKER_API_KEY in clients)",
            )
        if credential.startswith("eyJ"):
            return await self._holder(credential)
        digest = hash_of(credential)
        if self._given is not None and hmac.compare_digest(digest, self._given):
            return Account()
        found = self._trusted.get(digest)
        if found is None or time.monotonic() - found[0] > TRUSTED_SECONDS:
            account = await asyncio.to_thread(self._find, digest)
            if account is None:
                self._trusted.pop(digest, None)
                raise Refusal(
                    401,
                    "this API key is not known here, or has been revoked; `tinkex key create` "
                    "makes one",
                )
            found = self._trusted[digest] = (time.monotonic(), account)
        return found[1]

    async def reader(self, owner: str, token: str | None) -> str:
        """Return the account that reads a checkpoint: the token's, or else the caller's."""
        if not token or not await self.needs_key():
            return owner
        try:
            return (await self.account(token)).owner
        except (
            Refusal
        ) as refusal:  # not 401: the caller's own key is valid, and a new token does not help
            raise Refusal(403, f"the access token of the checkpoint: {refusal.detail}") from None

    def _find(self, digest: bytes) -> Account | None:
        found = self._database.keys.use(digest)
        return None if found is None else Account(found[1], found[0])

    # ── tokens ────────────────────────────────────────────────────────────────────────────────────

    def token(self, account: Account) -> str:
        """Return a token for an account, valid for an hour or until its key is revoked."""
        now = int(time.time())
        said = {
            "iss": ISSUER,
            "sub": user_urn(account.owner),
            "org_id": ORGANIZATION,
            "email": account.owner if "@" in account.owner else "",
            "iat": now,
            "exp": now + TOKEN_SECONDS,
            "key": account.key_id,
        }
        text = f"{_encode({'alg': 'HS256', 'typ': 'JWT'})}.{_encode(said)}"
        return f"{text}.{_text(self.sign(text, account.key_id))}"

    def sign(self, text: str, key_id: int = 0) -> bytes:
        """Return a signature that only this data directory can make.

        Signatures of the server's own key (0) end with that key.
        """
        secret = self._secret + (self._given or b"") if key_id == 0 else self._secret
        return hmac.digest(secret, text.encode(), "sha256")

    async def check_key(self, key_id: int) -> None:
        """Refuse a signed address whose key was revoked; 0 is the server's own key, or none."""
        if key_id and not await asyncio.to_thread(self._database.keys.is_valid, key_id):
            raise Refusal(403, "the API key that this address was made for has been revoked")

    async def _holder(self, token: str) -> Account:
        unknown = _rejected("this token was not given by this server")
        text, _, signature = token.rpartition(".")
        try:
            said: dict[str, Any] = json.loads(_bytes(text.split(".")[1]))
            owner, key_id, expires = (
                said["sub"].removeprefix(user_urn("")),
                int(said["key"]),
                float(said["exp"]),
            )
            given = _bytes(signature)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise unknown from None
        # only this server can sign
        if not hmac.compare_digest(self.sign(text, key_id), given):
            raise unknown
        if expires <= time.time():
            raise _rejected(
                "this token has expired: exchange the API key for a new one at auth/token"
            )
        if (
            key_id
            and time.monotonic() - self._valid.get(key_id, -TRUSTED_SECONDS) >= TRUSTED_SECONDS
        ):
            if not await asyncio.to_thread(self._database.keys.is_valid, key_id):
                raise _rejected("the API key that this token was given for has been revoked")
            self._valid[key_id] = time.monotonic()
        return Account(owner, key_id)


def _rejected(detail: str) -> Refusal:
    """Return the answer to an invalid token, which makes clients exchange their key once more."""
    return Refusal(401, detail, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})


def _encode(fields: dict[str, Any]) -> str:
    return _text(json.dumps(fields, separators=(",", ":")).encode())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _bearer(authorization: str) -> str | None:
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


@functools.lru_cache(64)
def _is_here(place: str) -> bool:
    """Return whether a Host or Origin header names this machine."""
    try:
        parts = urlsplit(place if "//" in place else f"//{place}")
        return "@" not in parts.netloc and parts.hostname in LOOPBACK
    except ValueError:  # it is no address at all
        return False
