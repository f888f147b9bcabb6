"""Serve the files and archives of checkpoints at signed addresses, also in pieces.

An address has terms of its own: the checkpoint, by its time of creation, and the reader.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import tarfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import format_datetime
from pathlib import Path
from typing import BinaryIO, TypeAlias

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from tinkex.engine.api import EngineError
from tinkex.server.access.accounts import Accounts
from tinkex.server.calls import Call
from tinkex.server.database.interface import SavedCheckpoint
from tinkex.server.files.seals import check, contents
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.handler_table import handler
from tinkex.server.routes.queries import moment
from tinkex.server.routes.records import checkpoint_path, nothing_at
from tinkex.server.routes.signed_addresses import SignedAddress
from tinkex.server.state import State
from tinkex.types.saves import ExternalWeightsUrlsResponse
from tinkex.wire.protocol import PREFIX

DOWNLOAD = SignedAddress(
    "download",
    f"{PREFIX}/downloads/{{training_run_id}}/{{kind}}/{{name}}/{{file}}",
    "ask for a new one",
)
LIFETIME = 15 * 60
ARCHIVE = "archive.tar"
CHUNK = 1 << 20


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────


@handler
async def get_external_weights_urls(state: State, call: Call) -> ExternalWeightsUrlsResponse:
    """Return signed addresses of the files of an export."""
    saved = await _readable(state, call)
    if call.path["kind"] != "external_weights":
        raise Refusal(400, f"{saved.tinker_path} is no export: use save_weights_external")
    expires = _expiry(saved)
    try:
        files = await asyncio.to_thread(contents, saved.directory)
    except FileNotFoundError:  # deleted meanwhile
        raise nothing_at(saved.tinker_path) from None
    urls = {file.name: _address(state, call, saved, file.name, expires) for file in files}
    return ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires))


@handler
async def get_checkpoint_archive(state: State, call: Call) -> Response:
    """Redirect to the signed address of an archive, for older clients."""
    saved = await _readable(state, call)
    expires = _expiry(saved)
    until = format_datetime(moment(expires), usegmt=True)
    return RedirectResponse(_address(state, call, saved, ARCHIVE, expires), 302, {"Expires": until})


async def _readable(state: State, call: Call) -> SavedCheckpoint:
    path = checkpoint_path(call)
    saved = await asyncio.to_thread(state.checkpoints.readable, path, call.owner)
    if saved is None:
        raise nothing_at(path)
    return saved


def _expiry(saved: SavedCheckpoint) -> int:
    until = time.time() + LIFETIME
    return int(until if saved.expires is None else min(until, saved.expires))


def _address(state: State, call: Call, saved: SavedCheckpoint, file: str, expires: int) -> str:
    terms = {"saved": _identity(saved), "reader": _mark(state.accounts, call.owner)}
    return DOWNLOAD.make(state.accounts, call, call.path | {"file": file}, expires, **terms)


def _identity(saved: SavedCheckpoint) -> str:
    """Return an id that differs from those of earlier checkpoints of the same name."""
    return saved.created.hex()


def _mark(accounts: Accounts, reader: str) -> str:
    """Return an id of a reader that does not reveal the name."""
    return accounts.sign(f"reader {reader}", 1).hex()[:32]


# ── downloading ───────────────────────────────────────────────────────────────────────────────────


async def download(state: State, call: Call) -> Response:
    """Send a file, or a part of it, to the caller with a signed address."""
    assert call.http is not None
    terms = await DOWNLOAD.check(state.accounts, call, "saved", "reader")
    path = checkpoint_path(call)
    saved = await asyncio.to_thread(state.database.checkpoints.get, path)
    owner = "" if saved is None else _mark(state.accounts, saved.owner)
    if saved is None or not (saved.public or owner == terms["reader"]):
        raise nothing_at(path)
    if _identity(saved) != terms["saved"]:
        raise Refusal(404, f"{path} was saved again after this address was made: ask for a new one")
    pieces = await asyncio.to_thread(_pieces, saved, call.path["file"])
    try:
        digest = await asyncio.to_thread(_digest, pieces)
        files = await asyncio.to_thread(_opened, pieces)
    except FileNotFoundError:  # deleted meanwhile
        raise nothing_at(path) from None
    return _respond(call.http, pieces, files, digest)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: bytes, or a file as it was when the sending began."""

    size: int
    data: bytes = b""
    path: Path | None = None
    changed: int = 0

    @classmethod
    def of(cls, path: Path) -> Piece:
        """Return the piece of a whole file."""
        stat = path.stat()
        return cls(stat.st_size, path=path, changed=stat.st_mtime_ns)


def _pieces(saved: SavedCheckpoint, file: str) -> tuple[Piece, ...]:
    """Return the pieces of one of a checkpoint's files, or of its archive."""
    try:
        check(saved.directory)
        paths = {path.name: path for path in contents(saved.directory)}
        if file == ARCHIVE:
            return tuple(_tar(paths.values(), int(saved.created)))
        if file in paths:
            return (Piece.of(paths[file]),)
    except FileNotFoundError:
        raise nothing_at(saved.tinker_path) from None
    except EngineError as error:
        if not saved.directory.is_dir():
            raise nothing_at(saved.tinker_path) from None
        raise Refusal(500, str(error), headers={"X-Should-Retry": "false"}) from None
    raise Refusal(404, f"{saved.tinker_path} has no file {file!r}")


def _tar(paths: Iterable[Path], created: int) -> Iterator[Piece]:
    """Yield the pieces of a tar; its bytes are the same each time."""
    for path in paths:
        piece = Piece.of(path)
        header = tarfile.TarInfo(path.name)
        header.size, header.mtime, header.mode = piece.size, created, 0o644
        head = header.tobuf(tarfile.GNU_FORMAT)
        yield Piece(len(head), head)
        yield piece
        if padding := -piece.size % tarfile.BLOCKSIZE:
            yield Piece(padding, bytes(padding))
    yield Piece(2 * tarfile.BLOCKSIZE, bytes(2 * tarfile.BLOCKSIZE))


@functools.lru_cache(maxsize=256)
def _digest(pieces: tuple[Piece, ...]) -> bytes:
    """Return the SHA-256 of pieces; it is computed once for files that do not change."""
    digest = hashlib.sha256()
    for piece in pieces:
        if piece.path is None:
            digest.update(piece.data)
        else:
            with piece.path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
    return digest.digest()


Files: TypeAlias = Mapping[Path, BinaryIO]


def _opened(pieces: tuple[Piece, ...]) -> Files:
    """Open the files of pieces; they can be sent even if they are deleted."""
    return {piece.path: piece.path.open("rb") for piece in pieces if piece.path is not None}


def _close(files: Files) -> None:
    for file in files.values():
        file.close()


def _respond(request: Request, pieces: tuple[Piece, ...], files: Files, digest: bytes) -> Response:
    size = sum(piece.size for piece in pieces)
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{digest.hex()}"',
        "Repr-Digest": f"sha-256=:{base64.b64encode(digest).decode()}:",
        "Content-Type": "application/octet-stream",
        "Cache-Control": "private, no-store",
    }
    start, stop, status = 0, size, 200
    if request.headers.get("if-range", headers["ETag"]) == headers["ETag"]:
        wanted = _range(request.headers.get("range", ""), size)
        if wanted is not None:
            start, stop = wanted
            if start >= stop:
                _close(files)
                headers["Content-Range"] = f"bytes */{size}"
                return Response(status_code=416, headers=headers)
            status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        _close(files)
        return Response(status_code=status, headers=headers)
    return StreamingResponse(_read(pieces, files, start, stop), status, headers)


def _range(header: str, size: int) -> tuple[int, int] | None:
    """Return the span of a Range header, perhaps empty; None for everything."""
    match = re.fullmatch(r"\s*bytes\s*=\s*(\d{0,18})-(\d{0,18})\s*", header)
    # a server may answer several ranges with everything
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


async def _read(
    pieces: tuple[Piece, ...], files: Files, start: int, stop: int
) -> AsyncIterator[bytes]:
    """Yield the bytes of a span."""
    position = 0
    try:
        for piece in pieces:
            first, last = max(start - position, 0), min(stop - position, piece.size)
            position += piece.size
            if first >= last:
                continue
            if piece.path is None:
                yield piece.data[first:last]
                continue
            file = files[piece.path]
            file.seek(first)
            while first < last:
                chunk = await asyncio.to_thread(file.read, min(CHUNK, last - first))
                if not chunk:  # the reader must not take it for whole
                    raise ConnectionError(f"{piece.path.name} has become shorter")
                first += len(chunk)
                yield chunk
    finally:
        _close(files)
