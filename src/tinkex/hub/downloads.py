"""Checkpoints on your own disk: fetched, checked and unpacked with care, all of it or nothing.

A fetch continues where the connection broke off. An existing directory is replaced at the very end,
by a rename.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from tinkex.client.futures.api_future import start
from tinkex.client.rest import RestClient
from tinkex.client.rest_parts.rest_checkpoints import ARCHIVE_ATTEMPTS, ARCHIVE_RETRY_SECONDS
from tinkex.errors import APIError
from tinkex.hub.archives import ArchiveLimits, UnsafeArchiveError, extract
from tinkex.hub.fetches import NOTE, DownloadError as DownloadError, Progress, fetch
from tinkex.types.checkpoints import SCHEME, ParsedCheckpointTinkerPath

STOP_SECONDS = 5.0
"""Longest wait for a download that was cancelled."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A downloaded checkpoint."""

    destination: Path
    checkpoint_path: str


class DownloadOptions(TypedDict, total=False):
    """Options of `download`; see there."""

    resume: bool
    limits: ArchiveLimits | None
    max_retries: int
    retry_delay: float


def download(
    rest_client: RestClient,
    tinker_path: str,
    output_dir: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **options: Unpack[DownloadOptions],
) -> Downloaded:
    """Fetch a checkpoint into a directory of its own, named after its path.

    Args:
        rest_client: A client of the server.
        tinker_path: A `tinker://` path. The files of an export (`external_weights`) are fetched one
            by one, other checkpoints as an archive.
        output_dir: The directory above; the current directory by default.
        force: Replace an existing directory; it stays until the new one is whole.
        progress: Called with the bytes so far and in all, if the server says how many there are.
        options: `resume=True` keeps what was fetched when a download fails, for the next one to
            continue. `limits` bound the contents of an archive. An archive that is being packed is
            asked for `max_retries` times, `retry_delay` seconds apart.

    Returns:
        The new directory, and the path.

    Raises:
        DownloadError: The path is no checkpoint's, the directory exists, or the files did not
            arrive whole.
        APIStatusError: The server has no such checkpoint.

    Example:
        >>> download(rest, path, "models").destination
        PosixPath('.../models/..._weights_step-100')
    """
    work = download_async(rest_client, tinker_path, output_dir, force, progress, **options)
    return start(work).result()


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
    """Like `download`; after a cancellation nothing more is written.

    With `keep_archive`, which needs `resume`, the archive stays beside the directory. The next
    download of the same checkpoint fetches it again only if the server has another one.
    """
    work = _Download(
        rest_client, tinker_path, output_dir, force, progress, resume, limits, keep_archive
    )
    work.attempts, work.delay = max_retries, retry_delay
    working = start(work.run())
    try:
        return await working
    except asyncio.CancelledError:
        working.cancel()
        await asyncio.to_thread(work.ended.wait, STOP_SECONDS)
        raise


def target_of(tinker_path: str, output_dir: Path) -> Path:
    """Return the directory of a checkpoint, always below the output directory.

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
    """One download; all its unfinished files are in one directory beside the target."""

    def __init__(
        self,
        rest: RestClient,
        tinker_path: str,
        output_dir: str | os.PathLike[str] | None,
        force: bool,
        progress: Progress | None,
        resume: bool,
        limits: ArchiveLimits | None,
        keep_archive: bool,
    ) -> None:
        self._rest, self._path, self._force, self._progress = rest, tinker_path, force, progress
        self._resume, self._limits, self._keep_archive = resume, limits, keep_archive
        self.attempts, self.delay = ARCHIVE_ATTEMPTS, ARCHIVE_RETRY_SECONDS
        self._target = target_of(tinker_path, Path(output_dir or ".").expanduser().resolve())
        if os.path.lexists(self._target) and not force:
            raise DownloadError(
                f"{self._target} already exists",
                "exists",
                hint="force=True replaces it",
                path=self._target,
            )
        mark = "partial" if resume else f"partial-{secrets.token_hex(4)}"
        self._scratch = self._target.with_name(f".{self._target.name}.{mark}")
        self.ended = threading.Event()

    async def run(self) -> Downloaded:
        """Fetch, unpack and swap; leave nothing else behind."""
        files = self._scratch / "files"
        keep = False
        try:
            await asyncio.to_thread(_make, files)
            if "/external_weights/" in self._path:
                await self._fetch_files(files)
            else:
                await self._fetch_archive(files)
            await _undisturbed(self._swap, files)
            keep = self._keep_archive and self._can_resume()
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
        """Return True if the next download could continue from something."""
        begun = [self._scratch / "archive", *(self._scratch / "parts").glob("*")]
        return self._resume and any(file.exists() for file in begun)

    async def _fetch_archive(self, files: Path) -> None:
        archive = self._scratch / "archive"

        async def address() -> str:
            answer = await self._rest.get_checkpoint_archive_url_from_tinker_path(
                self._path, max_retries=self.attempts, retry_delay=self.delay
            )
            return answer.url

        await fetch(
            self._rest.transport, address, archive, self._progress, ask_again=self._keep_archive
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
        """Put the new directory in the place of the old one, and remove that."""
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
            raise DownloadError(f"{self._target} already exists", "exists", path=self._target)
        os.replace(files, self._target)


async def _undisturbed(function: Callable[..., object], *args: object) -> None:
    """Call a function on a thread; a cancelled caller waits for its end first."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _make(directory: Path) -> None:
    if directory.name == "files":
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
