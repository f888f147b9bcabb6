"""Headers of requests: the client's, the credential, a body's, and the caller's name.

The credential is the API key, or a short-lived token in its place.

The outermost call of a public method names every request that it causes, in two headers. The name
is kept in a context variable, which tasks inherit. Background work of a session has no name.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import platform
import time
import types
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tinkex._version import __version__
from tinkex.client.settings.config import Config, is_embedded
from tinkex.client.settings.credentials import (
    Token,
    check_token,
    is_token,
    rejects_token,
    run_command,
)
from tinkex.errors import TinkerError
from tinkex.wire import codec
from tinkex.wire.protocol import AUTH_TOKEN, CLIENT_CONFIG, PROTOCOL_VERSION, Operation
from tinkex.wire.redaction import Scrubber, secrets_of

C = TypeVar("C")
logger = logging.getLogger("tinkex")

KEY_HEADER = "X-API-Key"
OUR_NAMES = frozenset(
    {
        "Accept",
        "Content-Encoding",
        "Content-Type",
        "X-Idempotency-Key",
        "X-Stainless-Raw-Response",
        "X-Tinker-Create-Promise-Roundtrip-Time",
        "X-Tinker-Request-Iteration",
        "X-Tinker-Request-Type",
        "X-Tinker-Sampling-Backpressure",
    }
)
"""Our own headers. They are always spelt so and need no comparison without regard to case."""
UNNAMED = frozenset(
    {
        "client_config",
        "client_dynamic_config",
        "create_session",
        "session_heartbeat",
        "telemetry",
        "retrieve_futures",
        "cancel_future",
    }
)
"""Operations that belong to a session or to many calls at once; their requests are not named."""


def client_headers(config: Config) -> dict[str, str]:
    """Return the headers of every request with these settings."""
    headers = {
        "User-Agent": config.user_agent or f"tinkex/{__version__} (python)",
        "Accept": codec.JSON,
        **_platform_headers(),
    }
    if config.cf_access_client_id and config.cf_access_client_secret:
        headers["CF-Access-Client-Id"] = config.cf_access_client_id
        headers["CF-Access-Client-Secret"] = config.cf_access_client_secret
    return headers


def keyed_headers(content: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a body, or of an empty JSON body, with a new idempotency key."""
    key = {"X-Idempotency-Key": f"tinkex-{uuid.uuid4()}"}
    return {**(content or {"Content-Type": codec.JSON}), **key}


def merge(
    own: dict[str, str], configured: Mapping[str, str], *more: Mapping[str, str]
) -> dict[str, str]:
    """Add headers to `own`; later ones win, and names are compared without regard to case."""
    if not configured:
        for headers in more:
            if not OUR_NAMES.issuperset(headers):
                break
            own.update(headers)
        else:
            return own
    known = {name.lower(): name for name in own}
    for headers in (configured, *more):
        for name, value in headers.items():
            own.pop(known.get(name.lower(), ""), None)
            known[name.lower()] = name
            own[name] = value
    return own


@functools.cache
def _platform_headers() -> dict[str, str]:
    """Return the headers in which the official SDK describes its platform."""
    system = {"Darwin": "MacOS"}.get(platform.system(), platform.system() or "Unknown")
    machine = platform.machine().lower()
    arch = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "i386": "x32", "i686": "x32"}.get(
        machine, machine
    )
    return {
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": system,
        "X-Stainless-Arch": arch or "unknown",
        "X-Stainless-Runtime": platform.python_implementation(),
        "X-Stainless-Runtime-Version": platform.python_version(),
        "X-Stainless-Async": "async:asyncio",
    }


# ── the credential ────────────────────────────────────────────────────────────────────────────────


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


# ── the caller's name ─────────────────────────────────────────────────────────────────────────────

_method: contextvars.ContextVar[str | None] = contextvars.ContextVar("tinkex_method", default=None)


def name_requests(client: type[C], owner: str = "") -> type[C]:
    """Have the public methods of a class name the requests that they cause.

    Functions that the class itself defines are replaced by functions with the same name, signature
    and annotations. Properties, static methods and private names are left alone.

    Args:
        client: The class.
        owner: The class that is named; the same class by default.

    Returns:
        The class, so that this can decorate it.
    """
    for name, member in list(vars(client).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(client, name, _naming(f"{owner or client.__name__}.{name}", member))
    return client


def forget_caller() -> None:
    """Remove the name in this task: its later requests belong to no method."""
    _method.set(None)


def headers_of(operation: str) -> dict[str, str]:
    """Return the headers that name a request's method; empty if there is none."""
    method = _method.get()
    if method is None or operation in UNNAMED:
        return {}
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}


def _naming(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that wraps a public method.

    The variable is None again afterwards, since only the outermost call sets it.
    """
    method, coroutine_type = _method, types.CoroutineType

    async def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
        method.set(name)
        try:
            return await coroutine
        finally:
            method.set(None)

    def call(*args: Any, **kwargs: Any) -> Any:
        if method.get() is not None:
            return function(*args, **kwargs)
        method.set(name)
        try:
            result = function(*args, **kwargs)
        finally:
            method.set(None)
        return finish(result) if type(result) is coroutine_type else result

    async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
        if method.get() is not None:
            return await function(*args, **kwargs)
        return await finish(function(*args, **kwargs))

    chosen: Any = call_coroutine if function.__code__.co_flags & inspect.CO_COROUTINE else call
    # Doctests and warnings take a function to belong to the module of its globals.
    made = types.FunctionType(
        chosen.__code__, function.__globals__, function.__name__, None, chosen.__closure__
    )
    return functools.update_wrapper(made, function)
