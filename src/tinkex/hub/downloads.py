"""Checkpoints on your own disk: fetched piece by piece, checked, unpacked with distrust, and there
whole or not at all.

A connection that breaks is taken up where it broke off. What is there already is replaced at the
very end, by a rename.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tarfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tinkex.client.futures.api_future import start
from tinkex.client.http.retry import persist
from tinkex.client.http.transport import Transport
from tinkex.client.rest import RestClient
from tinkex.client.rest_parts.rest_checkpoints import ARCHIVE_ATTEMPTS, ARCHIVE_RETRY_SECONDS
from tinkex.client.settings.delays import Delays
from tinkex.errors import APIError, TinkerError
from tinkex.hub.archives import ArchiveLimits, UnsafeArchiveError, extract
from tinkex.types.checkpoints import SCHEME, ParsedCheckpointTinkerPath

logger = logging.getLogger("tinkex")

Progress: TypeAlias = Callable[[int, int], object]
"""Is told how many bytes are there, and how many there will be; in a thread of its own."""
ATTEMPTS = 5
"""How often in a row a fetch may break off without a byte having come."""
EXPIRED = frozenset({401, 403, 410})
"""Statuses of an address that has expired, or never was valid."""
BROKEN_OFF_DELAYS = Delays(first=0.2)
WRITE_BYTES = 1 << 20
STOP_SECONDS = 5.0
"""How long a download that is cancelled is waited for."""
READ_CHUNK = 1 << 20


class DownloadError(TinkerError):
    """A checkpoint did not arrive; `reason` says why in one word.

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


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A checkpoint that is there."""

    destination: Path
    checkpoint_path: str


def download(
    rest_client: RestClient,
    tinker_path: str,
    output_dir: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    limits: ArchiveLimits | None = None,
    max_retries: int = ARCHIVE_ATTEMPTS,
    retry_delay: float = ARCHIVE_RETRY_SECONDS,
) -> Downloaded:
    """Fetch a checkpoint into a directory of its own, named after its path.

    Args:
        rest_client: Knows the server.
        tinker_path: A `tinker://` path. Of an export (`external_weights`) the files are fetched one
            by one, of other checkpoints an archive.
        output_dir: Where to put that directory; the current directory by default.
        force: Replace a directory that is there; it stays until the new one is whole.
        progress: Is told how far it is, when the server says how much there is.
        resume: Leave what was fetched when the download fails, and go on from there the next time.
        limits: What an archive may hold at most.
        max_retries: How many times to ask for an archive that is being packed.
        retry_delay: Seconds between one try and the next.

    Returns:
        Where it is now, and what it was.

    Raises:
        DownloadError: The path is no checkpoint's, the directory is there already, or the files did
            not arrive whole.
        APIStatusError: The server has no such checkpoint.

    Example:
        >>> download(rest, path, "models").destination
        PosixPath('.../models/..._weights_step-100')
    """
    work = _Download(
        rest_client,
        tinker_path,
        output_dir,
        force,
        progress,
        resume,
        limits,
        max_retries,
        retry_delay,
    )
    return start(work.run()).result()


async def download_async(
    rest_client: RestClient,
    tinker_path: str,
    output_dir: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    keep_archive: bool = False,
    limits: ArchiveLimits | None = None,
    max_retries: int = ARCHIVE_ATTEMPTS,
    retry_delay: float = ARCHIVE_RETRY_SECONDS,
) -> Downloaded:
    """Like `download`; one that is cancelled has stopped writing when it is left.

    With `keep_archive`, which needs `resume`, the archive stays beside the directory: the next
    download of the same checkpoint asks the server whether it is still the same, and does not fetch
    it again if it is.
    """
    work = _Download(
        rest_client,
        tinker_path,
        output_dir,
        force,
        progress,
        resume,
        limits,
        max_retries,
        retry_delay,
    )
    work.keep_archive = keep_archive
    working = start(work.run())
    try:
        return await working
    except asyncio.CancelledError:
        working.cancel()
        await asyncio.to_thread(work.ended.wait, STOP_SECONDS)
        raise


def target_of(tinker_path: str, output_dir: Path) -> Path:
    """The directory that a checkpoint goes to: below the output directory, whatever the path says.

    Raises:
        DownloadError: It is no checkpoint's path.
    """
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    except ValueError as error:
        raise DownloadError(str(error), "invalid_path") from None
    name = tinker_path.removeprefix(SCHEME).replace("/", "_")
    target = output_dir / name
    dots = {".", ".."} & {parsed.training_run_id, parsed.name}
    if dots or target.parent != output_dir or name != target.name or "\\" in name or "\0" in name:
        raise DownloadError(f"{tinker_path!r} cannot be the name of a directory", "invalid_path")
    return target


class _Download:
    """One download: everything it writes before the end lies in one directory beside the target."""

    def __init__(
        self,
        rest: RestClient,
        tinker_path: str,
        output_dir: str | os.PathLike[str] | None,
        force: bool,
        progress: Progress | None,
        resume: bool,
        limits: ArchiveLimits | None,
        attempts: int,
        delay: float,
    ) -> None:
        self._rest, self._path, self._force, self._progress = rest, tinker_path, force, progress
        self._resume, self._limits, self._attempts, self._delay = resume, limits, attempts, delay
        self._target = target_of(tinker_path, Path(output_dir or ".").expanduser().resolve())
        if os.path.lexists(self._target) and not force:
            raise DownloadError(
                f"{self._target} is there already",
                "exists",
                hint="force=True replaces it",
                path=self._target,
            )
        mark = "partial" if resume else f"partial-{secrets.token_hex(4)}"
        self._scratch = self._target.with_name(f".{self._target.name}.{mark}")
        self.keep_archive = False
        self.ended = threading.Event()

    async def run(self) -> Downloaded:
        """Fetch, unpack, swap; whatever happens, nothing is left behind that was not asked for."""
        files = self._scratch / "files"
        keep = False
        try:
            await asyncio.to_thread(_make, files)
            if "/external_weights/" in self._path:
                await self._fetch_files(files)
            else:
                await self._fetch_archive(files)
            await _undisturbed(self._swap, files)
            keep = self.keep_archive and self._can_resume()
        except DownloadError as error:
            keep = error.reason == "download_failed" and self._can_resume()
            raise
        except (APIError, asyncio.CancelledError):
            keep = self._can_resume()
            raise
        finally:
            try:
                if not keep:
                    await asyncio.shield(asyncio.to_thread(shutil.rmtree, self._scratch, True))
            finally:
                self.ended.set()
        return Downloaded(self._target, self._path)

    def _can_resume(self) -> bool:
        """Whether there is anything that the next download could go on from."""
        begun = [self._scratch / "archive", *(self._scratch / "parts").glob("*")]
        return self._resume and any(file.exists() for file in begun)

    async def _fetch_archive(self, files: Path) -> None:
        archive = self._scratch / "archive"

        async def address() -> str:
            answer = await self._rest.get_checkpoint_archive_url_from_tinker_path(
                self._path, max_retries=self._attempts, retry_delay=self._delay
            )
            return answer.url

        await fetch(
            self._rest.transport, address, archive, self._progress, ask_again=self.keep_archive
        )
        try:
            await _undisturbed(extract, archive, files, self._limits)
        except (UnsafeArchiveError, tarfile.TarError, OSError, EOFError, ValueError) as error:
            message = f"the archive of {self._path} was not unpacked: {error}"
            raise DownloadError(message, "extraction_failed") from error

    async def _fetch_files(self, files: Path) -> None:
        urls = (await self._rest.get_external_weights_urls(self._path)).urls
        parts = self._scratch / "parts"
        await asyncio.to_thread(_make, parts)
        for name in urls:
            if name in ("", ".", "..") or set(name) & set("/\\\0"):
                raise DownloadError(
                    f"{self._path} has a file with an unsafe name: {name!r}", "extraction_failed"
                )
        for name in sorted(urls):

            async def address(name: str = name) -> str:
                nonlocal urls
                if name not in urls:
                    urls = (await self._rest.get_external_weights_urls(self._path)).urls
                return urls.pop(name)

            await fetch(self._rest.transport, address, parts / name, self._progress)
        for name in await asyncio.to_thread(os.listdir, parts):
            if not name.endswith(NOTE):
                os.replace(parts / name, files / name)

    def _swap(self, files: Path) -> None:
        """Put the new directory in the place of the old one, which is removed after that."""
        if self._force and os.path.lexists(self._target):
            old = self._scratch / "old"
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self._target, old)
            try:
                os.replace(files, self._target)
            except OSError:
                os.replace(old, self._target)
                raise
            shutil.rmtree(old, ignore_errors=True)  # here, for what lies beside it may be kept
            return
        if os.path.lexists(self._target):  # it has come there meanwhile
            raise DownloadError(f"{self._target} is there already", "exists", path=self._target)
        os.replace(files, self._target)


async def _undisturbed(function: Callable[..., object], *args: object) -> None:
    """Call a function on a thread; who is cancelled meanwhile waits for its end, and only then
    tidies up.
    """
    working = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _make(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True) if directory.name == "files" else None
    directory.mkdir(parents=True, exist_ok=True)


# ── one file ──────────────────────────────────────────────────────────────────────────────────────

NOTE = ".fetch"
"""Beside a file that is not whole yet: what it was part of, so that it is never continued with
another's bytes."""


async def fetch(
    transport: Transport,
    address: Callable[[], Awaitable[str]],
    path: Path,
    progress: Progress | None = None,
    *,
    ask_again: bool = False,
) -> None:
    """Fetch a file; one that is there in part is continued if the server still has the same.

    Args:
        transport: Whose connections to use; its credential is not sent.
        address: Gives the file's address; it is asked again when one has expired.
        path: Where to put the file.
        progress: Is told how far it is.
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


class _Fetch:
    """Attempts to fetch one file, until it is whole or several in a row bring nothing."""

    def __init__(
        self,
        transport: Transport,
        address: Callable[[], Awaitable[str]],
        part: _Part,
        progress: Progress | None,
    ) -> None:
        self._transport, self._address = transport, address
        self._part, self._progress = part, progress
        self._url: str | None = None
        self._failures = self._size = 0
        self._has_grown = False
        self.problem = ""
        """The last failure, as the end of a sentence about the file."""

    async def attempt(self) -> int:
        """Fetch what is missing; return 200, the status of a failure, or 0 without an answer."""
        if self._url is None:
            self._url = await self._address()
        had = await asyncio.to_thread(self._part.size)
        try:
            status = await self._part.read(self._transport, self._url, self._progress)
            self.problem = f": the server answered {status}"
        except (ConnectionError, TimeoutError) as error:
            status, self.problem = 0, f" did not arrive: {str(error) or type(error).__name__}"
        self._size = await asyncio.to_thread(self._part.size)
        self._has_grown = self._size > had
        return status

    def delay_after(self, status: int | Exception) -> float | None:
        """Decide on the next attempt; an address that has expired is asked for again once."""
        if isinstance(status, Exception) or status == 200:
            return None
        if status in EXPIRED:
            self._failures, self._url = self._failures + 1, None
            self.problem = f": {status}"
            return 0.0 if self._failures == 1 else None
        if status not in (0, 408, 416, 429) and status < 500:
            return None
        if status:
            self.problem = f" did not arrive: the server answered {status}"
        self._failures = 0 if self._has_grown else self._failures + 1
        if self._failures >= ATTEMPTS:
            return None
        logger.debug("%s%s; going on at %d", self._part.path.name, self.problem, self._size)
        return BROKEN_OFF_DELAYS.after(self._failures)


class _Part:
    """A file on its way."""

    def __init__(self, path: Path) -> None:
        self.path, self._note = path, path.with_name(path.name + NOTE)
        self._facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._facts = dict(json.loads(self._note.read_text()))

    def is_whole(self) -> bool:
        """Whether an earlier fetch has ended well."""
        return self.path.exists() and not self._note.exists()

    def size(self) -> int:
        """How much is there."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def read(self, transport: Transport, url: str, progress: Progress | None) -> int:
        """Ask once, from where the file ends; 200 when it is whole, else the status that says why
        it is not.
        """
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
        # In this order a file without a note is a whole one, and a note is never beside another's
        # bytes.
        self._facts = facts
        self.path.unlink(missing_ok=True)
        self._note.write_text(json.dumps(facts))
        self.path.touch()

    def check(self, ask_again: bool) -> None:
        """Compare the whole file with the checksum that the server gave, if it gave one."""
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
                    f"{self.path.name} arrived damaged: its checksum is another", "download_failed"
                )
        if not ask_again:
            self._note.unlink(missing_ok=True)


def _facts(headers: Mapping[str, str], total: int | None) -> dict[str, Any]:
    """What a whole answer says of what it brings; a weak tag is no proof that bytes are the same."""
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
