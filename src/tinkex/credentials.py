"""Credentials: where they are found, and the short-lived tokens that some servers want instead.

A key comes from the argument, TINKER_API_KEY, the command in TINKER_CREDENTIAL_CMD, or the file that a login leaves
behind. When a server asks for tokens, the credential is exchanged for one, which is renewed before it expires.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigurationError, TinkerError

COMMAND_SECONDS = 60
RENEW_BEFORE = 300.0
"""A token is renewed in the background when it has less than this left, …"""
RENEW_NOW = 60.0
"""… and before the next request when it has less than this."""


def credentials_file() -> Path:
    """Where a login keeps keys."""
    return Path("~/.tinker/credentials.json").expanduser()


def stored_key(path: Path | None = None, *, server: str | None = None) -> str | None:
    """The default key of the credentials file; None when there is none that can be read.

    A login at a server of one's own leaves a key for that one alone.

    Args:
        path: The file; by default the user's.
        server: An address; only a key that a login has left for it counts. None: only one that is for no such server.
    """
    try:
        stored = json.loads((path or credentials_file()).read_text())
        entry = stored["keys"][stored["default"]]
        key = entry["key"] if entry.get("base_url") == server else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return key if isinstance(key, str) and key else None


_running: dict[str, asyncio.Task[str]] = {}
"""Commands under way: clients that start together ask once, for some commands ask the user in turn."""


async def run_command(command: str) -> str:
    """The credential that a shell command prints; run in a thread, once for all who ask meanwhile, and never shown."""
    task = _running.get(command)
    if task is None or task.get_loop() is not asyncio.get_running_loop():
        task = _running[command] = asyncio.create_task(_run(command))
        task.add_done_callback(functools.partial(_ended, command))
    return await asyncio.shield(task)


def _ended(command: str, task: asyncio.Task[str]) -> None:
    """Let the next who asks run a command anew; its failure may have nobody left to hear of it."""
    if _running.get(command) is task:
        del _running[command]
    if not task.cancelled():
        task.exception()


async def _run(command: str) -> str:
    def run() -> str:
        try:
            done = subprocess.run(  # the user's own command, in the user's own shell
                command, shell=True, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=os.environ
            )
        except subprocess.TimeoutExpired:
            raise ConfigurationError(f"TINKER_CREDENTIAL_CMD gave nothing within {COMMAND_SECONDS} s") from None
        if done.returncode:
            raise ConfigurationError(f"TINKER_CREDENTIAL_CMD failed with exit code {done.returncode}")
        if not done.stdout.strip():
            raise ConfigurationError("TINKER_CREDENTIAL_CMD printed nothing")
        return done.stdout.strip()

    return await asyncio.to_thread(run)


def claims(token: str) -> dict[str, Any]:
    """What a token says of itself. Its signature is the server's business."""
    try:
        payload = token.split(".")[1]
        decoded = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error):
        raise TinkerError("the server gave a token that cannot be read") from None
    if not isinstance(decoded, dict):
        raise TinkerError("the server gave a token that cannot be read")
    return decoded


class Token:
    """A short-lived token, exchanged for a credential and renewed in time; one renewal at a time.

    Args:
        exchange: Gives a new token.
        clock: The time of day, in seconds; for tests.
    """

    def __init__(self, exchange: Callable[[], Awaitable[str]], clock: Callable[[], float] = time.time) -> None:
        self._exchange = exchange
        self._clock = clock
        self._lock = asyncio.Lock()
        self._value = ""
        self._expires = 0.0
        self._renewal: asyncio.Task[None] | None = None

    @property
    def left(self) -> float:
        """Seconds until the token expires."""
        return self._expires - self._clock()

    async def value(self) -> str:
        """A token that is good now; an old one is kept while it lasts when it cannot be renewed."""
        if not self._value or self.left <= RENEW_NOW:
            try:
                await self._renew(RENEW_NOW)
            except TinkerError:
                if not self._value:
                    raise
        elif self.left <= RENEW_BEFORE and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._renew_quietly())
        return self._value

    async def _renew(self, margin: float) -> None:
        async with self._lock:
            if self._value and self.left > margin:
                return  # someone else did it while we waited
            value = await self._exchange()
            self._expires = float(claims(value).get("exp", 0)) or self._clock() + 3600
            self._value = value

    async def _renew_quietly(self) -> None:
        try:
            await self._renew(RENEW_BEFORE)
        except TinkerError:
            return  # the next request tries again
