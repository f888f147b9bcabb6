"""Credentials, and the short-lived tokens that some servers want instead.

A key comes from the argument, TINKER_API_KEY, the command in TINKER_CREDENTIAL_CMD, or the file
that a login writes. If a server asks for tokens, the credential is exchanged for a token. The token
is renewed before it expires, and when the server rejects it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextvars
import functools
import json
import logging
import os
import random
import re
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tinkex.errors import AuthenticationError, ConfigurationError, TinkerError

T = TypeVar("T")
logger = logging.getLogger("tinkex")

COMMAND_SECONDS = 60
RENEW_AFTER = (0.45, 0.55)
"""The part of its life, drawn between these, after which a token is renewed in the background."""
RENEW_AGAIN = 60.0
"""Seconds between failed background attempts, and between attempts for a token of unknown life."""
RENEW_NOW = 60.0
"""A request first renews a token that has this many seconds left, or a quarter of its life."""
NO_HOPE = 120.0
"""Background attempts end if the credential is refused and the token has fewer seconds left."""
ASSUMED_LIFE = 3600.0
"""Seconds that a token is taken to live if it does not say when it expires."""
REMEMBERED = 8
"""Tokens that are known to have been given out, the last ones."""
_INVALID_TOKEN = re.compile(r'\berror\s*=\s*"?invalid_token\b', re.IGNORECASE)


def credentials_file() -> Path:
    """Return the path of the file in which a login keeps keys."""
    return Path("~/.tinker/credentials.json").expanduser()


def stored_key(path: Path | None = None, *, server: str | None = None) -> str | None:
    """Return a key of the credentials file; None if there is none.

    A login at a server of your own writes a key for that server only.

    Args:
        path: The file; that of the user by default.
        server: Return the key for this address only; with None, the key for no address.
    """
    try:
        stored = json.loads((path or credentials_file()).read_text())
        entry = stored["keys"][stored["default"]]
        key = entry["key"] if entry.get("base_url") == server else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return key if isinstance(key, str) and key else None


_running: dict[str, asyncio.Task[str]] = {}
"""Commands that run now. Clients that start together share one, as some commands ask the user."""


async def run_command(command: str) -> str:
    """Return the credential that a shell command prints; it is never shown.

    The command runs in a thread, once for all who ask meanwhile.
    """
    return await _shared(_running, command, lambda: _run(command))


async def _shared(
    running: dict[str, asyncio.Task[T]], name: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Do some work, once for all who ask meanwhile."""

    def ended(done: asyncio.Task[T]) -> None:
        if running.get(name) is done:
            del running[name]
        if not done.cancelled():
            done.exception()  # mark as seen: those who asked may be gone

    task = running.get(name)
    if task is None or task.get_loop() is not asyncio.get_running_loop():
        task = running[name] = asyncio.create_task(work())
        task.add_done_callback(ended)
    return await asyncio.shield(task)


async def _run(command: str) -> str:
    def run() -> str:
        try:
            done = subprocess.run(  # the user's own command, in the user's own shell
                command,
                shell=True,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                env=os.environ,
            )
        except subprocess.TimeoutExpired:
            raise ConfigurationError(
                f"TINKER_CREDENTIAL_CMD gave nothing within {COMMAND_SECONDS} s"
            ) from None
        if done.returncode:
            raise ConfigurationError(
                f"TINKER_CREDENTIAL_CMD failed with exit code {done.returncode}"
            )
        if not done.stdout.strip():
            raise ConfigurationError("TINKER_CREDENTIAL_CMD printed nothing")
        return done.stdout.strip()

    return await asyncio.to_thread(run)


def claims(token: str) -> dict[str, Any]:
    """Return the claims of a token; the server checks its signature."""
    try:
        payload = token.split(".")[1]
        decoded = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, RecursionError, ValueError, binascii.Error):
        decoded = None
    if not isinstance(decoded, dict):
        raise TinkerError("the server gave a token that cannot be read")
    return decoded


def is_token(key: str) -> bool:
    """Return whether a credential is a token, not an API key."""
    return key.startswith("eyJ")


def check_token(token: str, now: float) -> None:
    """Raise if a token that is given as credential cannot be used.

    Raises:
        ConfigurationError: It cannot be read.
        TinkerError: It has expired.
    """
    try:
        expires = _seconds(claims(token), "exp")
    except TinkerError:
        raise ConfigurationError(
            "the credential begins as a token (eyJ…) and cannot be read as one",
            hint="check TINKER_API_KEY, or the api_key that was passed",
        ) from None
    if expires is not None and expires <= now:
        raise TinkerError(
            f"the token that was given as key expired {now - expires:.0f} s ago",
            hint="pass a fresh one, or set TINKER_CREDENTIAL_CMD to a command that prints one",
        )


def rejects_token(headers: Mapping[str, str]) -> bool:
    """Return whether an answer 401 says that a new token may help."""
    return _INVALID_TOKEN.search(headers.get("www-authenticate", "")) is not None


def _seconds(said: Mapping[str, Any], name: str) -> float | None:
    value = said.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Token:
    """A short-lived token, exchanged for a credential and renewed in time.

    All methods are for one event loop.

    Args:
        exchange: Returns a new token.
        clock: Returns the time of day in seconds; for tests.
    """

    def __init__(
        self, exchange: Callable[[], Awaitable[str]], clock: Callable[[], float] = time.time
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._value = ""
        self._expires = 0.0
        self._margin = RENEW_NOW
        self._given: deque[str] = deque(maxlen=REMEMBERED)
        self._renewal: dict[str, asyncio.Task[None]] = {}
        self._attempt: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._is_stopped = False

    @property
    def left(self) -> float:
        """Seconds until the token expires."""
        return self._expires - self._clock()

    def gave(self, value: str | None) -> bool:
        """Return whether this object gave out a token recently."""
        return value in self._given

    async def value(self) -> str:
        """Return a token that is valid now.

        An old token is used until it expires if there is no new one.

        Raises:
            AuthenticationError: The credential is refused.
            TinkerError: There is no token, for another reason.
        """
        if not self._value or self.left <= self._margin:
            try:
                await _shared(self._renewal, "", self._renew)
            except AuthenticationError:
                raise
            except TinkerError:
                if not self._value or self.left <= 0:
                    raise
        return self._value

    async def replaced(self, rejected: str) -> str:
        """Return a new token in place of a rejected one.

        All requests that were rejected with the same token share one exchange.
        """
        if rejected == self._value:
            self._value = ""
        return await self.value()

    def stop(self) -> None:
        """Stop the renewal in the background."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def _renew(self) -> None:
        value = await self._exchange()
        said, now = claims(value), self._clock()
        expires, issued = _seconds(said, "exp"), _seconds(said, "iat")
        if expires is not None and expires <= now:
            raise TinkerError(
                f"the server gave a token that expired {now - expires:.0f} s ago",
                hint="check this machine's clock",
            )
        # Both times are the server's: a clock that is wrong here does not matter.
        life = None
        if expires is not None and issued is not None and expires > issued:
            life = expires - issued
        self._value, self._expires = value, now + ASSUMED_LIFE if expires is None else expires
        self._margin = RENEW_NOW if life is None else min(RENEW_NOW, life / 4)
        self._given.append(value)
        self._failures = 0
        self._renew_in(RENEW_AGAIN if life is None else life * random.uniform(*RENEW_AFTER))

    def _renew_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_stopped:
            call = functools.partial(_renew_token, weakref.ref(self))
            # An empty context: the renewal is no part of the call that caused it.
            self._timer = asyncio.get_running_loop().call_later(
                seconds, call, context=contextvars.Context()
            )

    def renew_in_background(self) -> None:
        """Begin a renewal that no request waits for."""
        if not self._is_stopped:
            self._attempt = asyncio.create_task(self._try_to_renew())

    async def _try_to_renew(self) -> None:
        try:
            await _shared(self._renewal, "", self._renew)
        except TinkerError as error:
            self._failures += 1
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            logger.log(level, "the access token could not be renewed, trying again: %s", error)
            if not isinstance(error, AuthenticationError) or self.left >= NO_HOPE:
                self._renew_in(RENEW_AGAIN)


def _renew_token(reference: weakref.ref[Token]) -> None:
    if (token := reference()) is not None:
        token.renew_in_background()
