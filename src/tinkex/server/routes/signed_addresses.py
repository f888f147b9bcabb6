"""Signed addresses, which need no key, so that any program can use them.

An address is signed with a secret of the data directory. The signature covers its path, its time of
expiry, the key that asked for it, and the other terms of its kind. All of that is checked when the
address is used.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from tinkex.server.access.accounts import Accounts
from tinkex.server.calls import Call
from tinkex.server.http_errors import Refusal

IN_PROCESS = "http://local"
"""The base of addresses of an embedded server, which its clients take for their own."""


@dataclass(frozen=True, slots=True)
class SignedAddress:
    """A kind of signed address."""

    name: str
    path: str
    """The path, with variables in braces."""
    renewal: str
    """Advice to the user of an address that is not valid."""

    def make(
        self,
        accounts: Accounts,
        call: Call,
        variables: Mapping[str, str],
        expires: int,
        **others: str,
    ) -> str:
        """Return an address for a caller's key; `others` are more terms of its kind."""
        terms = {"expires": str(expires), **others, "key": str(call.key_id)}
        signed = terms | {"signature": self.signature(accounts, variables, terms)}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in signed.items())
        return f"{call.base_url or IN_PROCESS}{self._place(variables)}?{query}"

    async def check(self, accounts: Accounts, call: Call, *others: str) -> dict[str, str]:
        """Return the terms of the address that was called, with those named in `others`.

        Raises:
            Refusal: 403 if it was changed or has expired, or its key was revoked.
        """
        terms = {name: call.query.get(name, "") for name in ("expires", *others, "key")}
        expected = self.signature(accounts, call.path, terms)
        if not hmac.compare_digest(call.query.get("signature", "").encode(), expected.encode()):
            why = "this address is not signed by this server"
            raise Refusal(403, f"{why}: use it unchanged, or {self.renewal}")
        if int(terms["expires"]) <= time.time():
            raise Refusal(403, f"this address has expired: {self.renewal}")
        await accounts.check_key(int(terms["key"]))
        return terms

    def signature(
        self, accounts: Accounts, variables: Mapping[str, str], terms: Mapping[str, str]
    ) -> str:
        """Return a signature; the server's own key is part of those of its addresses."""
        own_key = 0 if terms["key"] == "0" else 1
        text = "\n".join([self.name, self._place(variables), *terms.values()])
        return accounts.sign(text, own_key).hex()

    def _place(self, variables: Mapping[str, str]) -> str:
        quoted = {name: quote(value, safe=":") for name, value in variables.items()}
        return self.path.format_map(quoted)
