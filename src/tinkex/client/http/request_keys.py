"""The credential of a transport's requests: the API key, or a short-lived token in its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from tinkex.client.settings.config import Config, is_embedded
from tinkex.client.settings.credentials import (
    Token,
    check_token,
    is_token,
    rejects_token,
    run_command,
)
from tinkex.errors import TinkerError
from tinkex.wire.protocol import AUTH_TOKEN, CLIENT_CONFIG, Operation
from tinkex.wire.redaction import Scrubber, secrets_of

logger = logging.getLogger("tinkex")

KEY_HEADER = "X-API-Key"


class RequestKeys:
    """Gives requests their credential, and a scrubber that knows all credentials in use.

    Args:
        config: The settings.
        exchange: Asks the server for a token.
    """

    def __init__(self, config: Config, exchange: Callable[[], Awaitable[str]]) -> None:
        self.scrubber = Scrubber(secrets_of(config))
        self._config = config
        self._exchange = exchange
        self._credential = config.api_key
        self._token: Token | None = None
        self._known = {config.api_key} if config.api_key else set()
        self._fixed: dict[str, str] | None = None
        """The headers of every request without a token, unless they must be checked each time."""
        if config.api_key is None:
            self._fixed = None if config.credential_cmd else {}
        elif not is_token(config.api_key) or is_embedded(config.base_url):
            self._fixed = {KEY_HEADER: config.api_key}

    def use_tokens(self) -> None:
        """Send a short-lived token from now on, which the credential is exchanged for."""
        self._token = self._token or Token(self._exchange_credential)

    def stop_renewal(self) -> None:
        """Stop renewing tokens in the background: few requests follow, if any."""
        if self._token is not None:
            self._token.stop()

    async def headers(self, op: Operation) -> dict[str, str]:
        """Return a request's credential: the token where tokens are used, except to get one."""
        if self._token is None and self._fixed is not None:
            return self._fixed
        if self._token is not None and op not in (AUTH_TOKEN, CLIENT_CONFIG):
            key: str | None = await self._token.value()
        else:
            key = await self._raw()
        if key is None:
            return {}
        self._keep_secret(key)
        return {KEY_HEADER: key}

    async def renew(self, headers: dict[str, str]) -> None:
        """Put a valid token into the headers of a request that is sent again."""
        if self._token is not None and self._token.gave(headers.get(KEY_HEADER)):
            headers[KEY_HEADER] = await self._token.value()
            self._keep_secret(headers[KEY_HEADER])

    async def replace(
        self, op: Operation, headers: dict[str, str], answered: Mapping[str, str]
    ) -> bool:
        """Put a new token into the headers of a request that was answered 401, if that may help."""
        rejected = headers.get(KEY_HEADER)
        if self._token is None or rejected is None or op in (AUTH_TOKEN, CLIENT_CONFIG):
            return False
        if not rejects_token(answered) or not self._token.gave(rejected):
            return False
        headers[KEY_HEADER] = await self._token.replaced(rejected)
        self._keep_secret(headers[KEY_HEADER])
        logger.debug("%s: the token was rejected; sent once more with a new one", op.name)
        return True

    async def _exchange_credential(self) -> str:
        if self._config.credential_cmd and not self._config.api_key:
            self._credential = None  # run the command again
        return await self._exchange()

    async def _raw(self) -> str | None:
        """Return the credential itself; raise if it is a token that cannot be used."""
        command = self._config.credential_cmd
        if self._credential is None and command:
            self._credential = await run_command(command)
        if (
            self._credential is not None
            and is_token(self._credential)
            and not is_embedded(self._config.base_url)
        ):
            try:
                check_token(self._credential, time.time())
            except TinkerError:
                if command and not self._config.api_key:
                    self._credential = None  # the next request runs the command again
                raise
        return self._credential

    def _keep_secret(self, key: str) -> None:
        """Have the scrubber remove a key that is not in the settings."""
        if key not in self._known:
            self._known = {known for known in (self._credential, key) if known}
            self.scrubber = Scrubber((*secrets_of(self._config), *self._known))
