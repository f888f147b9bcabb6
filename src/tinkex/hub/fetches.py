"""Files fetched piece by piece, checked, and continued where a connection broke off."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.client.http.retry import persist
from tinkex.client.http.transport import Transport
from tinkex.client.settings.delays import Delays
from tinkex.errors import TinkerError

logger = logging.getLogger("tinkex")

Progress: TypeAlias = Callable[[int, int], object]
"""Called in a thread of its own, with the bytes so far and in all."""
ATTEMPTS = 5
"""Failures in a row without a new byte after which a fetch is given up."""
EXPIRED = frozenset({401, 403, 410})
"""Statuses of an address that has expired, or never was valid."""
BROKEN_OFF_DELAYS = Delays(first=0.2)
WRITE_BYTES = 1 << 20
READ_CHUNK = 1 << 20
NOTE = ".fetch"
"""Suffix of the note beside an unfinished file, which identifies the whole file."""


class DownloadError(TinkerError):
    """A checkpoint could not be downloaded; `reason` says why in one word.

    Reasons: invalid_path, exists, download_failed, extraction_failed.

    Example:
        >>> try:
        ...     download(rest, "tinker://run-1")
        ... except DownloadError as error:
        ...     print(error.reason)
        invalid_path
    """

    reason: str

    def __init__(
        self, message: str, reason: str, *, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(message, hint=hint, **details)
        self.reason = reason


async def fetch(
    transport: Transport,
    address: Callable[[], Awaitable[str]],
    path: Path,
    progress: Progress | None = None,
    *,
    ask_again: bool = False,
) -> None:
    """Fetch a file; an unfinished one is continued if the server still has the same.

    Args:
        transport: Its connections are used; its credential is not sent.
        address: Returns the file's address; called again when one has expired.
        path: The file to write.
        progress: Called with the bytes so far.
        ask_again: Leave a note beside the whole file, so that the next fetch asks whether the
            server has the same.

    Raises:
        DownloadError: It did not arrive, or not whole.
    """
    part = _Part(path)
    if await asyncio.to_thread(part.is_whole):
        return
    fetching = _Fetch(transport, address, part, progress)
    status = await persist(fetching.attempt, fetching.delay_after)
    if status != 200:
        message = f"{path.name}{fetching.problem}"
        raise DownloadError(message, "download_failed", status_code=status)
    await asyncio.to_thread(part.check, ask_again)


@dataclass(slots=True)
class _Fetch:
    """Attempts to fetch one file, until it is whole or several in a row bring nothing."""

    transport: Transport
    address: Callable[[], Awaitable[str]]
    part: _Part
    progress: Progress | None
    url: str | None = None
    failures: int = 0
    size: int = 0
    has_grown: bool = False
    problem: str = ""
    """The last failure, as the end of a sentence about the file."""

    async def attempt(self) -> int:
        """Fetch what is missing; return 200, the status of a failure, or 0 without an answer."""
        if self.url is None:
            self.url = await self.address()
        had = await asyncio.to_thread(self.part.size)
        try:
            status = await self.part.read(self.transport, self.url, self.progress)
            self.problem = f": the server answered {status}"
        except (ConnectionError, TimeoutError) as error:
            status, self.problem = 0, f" did not arrive: {str(error) or type(error).__name__}"
        self.size = await asyncio.to_thread(self.part.size)
        self.has_grown = self.size > had
        return status

    def delay_after(self, status: int | Exception) -> float | None:
        """Decide on the next attempt; an address that has expired is asked for again once."""
        if isinstance(status, Exception) or status == 200:
            return None
        if status in EXPIRED:
            self.failures, self.url = self.failures + 1, None
            self.problem = f": {status}"
            return 0.0 if self.failures == 1 else None
        if status not in (0, 408, 416, 429) and status < 500:
            return None
        if status:
            self.problem = f" did not arrive: the server answered {status}"
        self.failures = 0 if self.has_grown else self.failures + 1
        if self.failures >= ATTEMPTS:
            return None
        logger.debug("%s%s; going on at %d", self.part.path.name, self.problem, self.size)
        return BROKEN_OFF_DELAYS.after(self.failures)


class _Part:
    """A file that is being fetched."""

    def __init__(self, path: Path) -> None:
        self.path, self._note = path, path.with_name(path.name + NOTE)
        self._facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._facts = dict(json.loads(self._note.read_text()))

    def is_whole(self) -> bool:
        """Return True if an earlier fetch has finished."""
        return self.path.exists() and not self._note.exists()

    def size(self) -> int:
        """Return the bytes that are on disk."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def read(self, transport: Transport, url: str, progress: Progress | None) -> int:
        """Request the rest of the file once; return 200 when it is whole, else the bad status."""
        have, tag = await asyncio.to_thread(self.size), self._facts.get("etag")
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if have and tag:
            headers |= {"Range": f"bytes={have}-", "If-Range": tag}
        async with transport.fetch(url, headers, transport.config.timeout) as reply:
            if reply.status == 416:
                if have and self._facts.get("size") == have:
                    return 200
                await asyncio.to_thread(self._restart, {})
                return 416
            if reply.status == 206:
                span = re.fullmatch(
                    r"bytes (\d+)-(\d+)/(\d+|\*)", reply.headers.get("content-range", "")
                )
                if span is None or int(span[1]) != have:
                    await asyncio.to_thread(self._restart, {})
                    return 416
                total = int(span[3]) if span[3] != "*" else None
            elif reply.status == 200:
                length = reply.headers.get("content-length", "")
                total = int(length) if length.isdigit() else None
                await asyncio.to_thread(self._restart, _facts(reply.headers, total))
                have = 0
            else:
                return reply.status
            await self._take(reply.chunks, have, total, progress)
        have = await asyncio.to_thread(self.size)
        if total is not None and have != total:
            raise ConnectionError(f"{have} of {total} bytes came")
        return 200

    async def _take(
        self, chunks: Any, have: int, total: int | None, progress: Progress | None
    ) -> None:
        waiting: list[bytes] = []

        def write() -> None:
            nonlocal have
            with self.path.open("ab") as file:
                for chunk in waiting:
                    file.write(chunk)
                    have += len(chunk)
            waiting.clear()
            if progress is not None and total is not None:
                progress(have, total)

        try:
            size = 0
            async for chunk in chunks:
                waiting.append(chunk)
                size += len(chunk)
                if size >= WRITE_BYTES:
                    await asyncio.to_thread(write)
                    size = 0
        finally:
            if waiting:
                await asyncio.to_thread(write)

    def _restart(self, facts: dict[str, Any]) -> None:
        # In this order a file without a note is always whole, and a note always fits its file.
        self._facts = facts
        self.path.unlink(missing_ok=True)
        self._note.write_text(json.dumps(facts))
        self.path.touch()

    def check(self, ask_again: bool) -> None:
        """Compare the whole file with the server's checksum, if there is one."""
        expected = self._facts.get("sha256")
        if expected is not None:
            digest = hashlib.sha256()
            with self.path.open("rb") as file:
                while chunk := file.read(READ_CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != expected:
                self.path.unlink()
                self._note.unlink(missing_ok=True)
                raise DownloadError(
                    f"{self.path.name} arrived damaged: its checksum does not match",
                    "download_failed",
                )
        if not ask_again:
            self._note.unlink(missing_ok=True)


def _facts(headers: Mapping[str, str], total: int | None) -> dict[str, Any]:
    """Read the facts of a whole answer; a weak tag does not prove that bytes are equal."""
    tag = headers.get("etag", "")
    return {
        "etag": tag if tag.startswith('"') else None,
        "size": total,
        "sha256": _sha256(headers.get("repr-digest", "")),
    }


def _sha256(header: str) -> str | None:
    found = re.search(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):", header)
    try:
        return base64.b64decode(found[1], validate=True).hex() if found else None
    except binascii.Error:
        return None
