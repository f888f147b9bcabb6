"""Uploads on disk: their requests, and the files that have arrived."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tinkex.server.files.data_dir import make_directory, write_durably
from tinkex.types.record import from_json, to_json
from tinkex.types.saves import ExternalWeightsUploadStartRequest

ABOUT = "upload.json"
COMING = ".coming"
"""The end of the name of a file that is still arriving."""
ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that has begun."""

    id: str
    directory: Path
    owner: str
    expires: float
    sizes: dict[str, int]
    """The names of the files, and the largest size of each."""
    request: ExternalWeightsUploadStartRequest

    def write(self) -> None:
        """Write its record."""
        make_directory(self.directory)
        about = {"owner": self.owner, "expires": self.expires, "sizes": self.sizes}
        text = {**about, "request": json.loads(to_json(self.request))}
        write_durably(self.directory / ABOUT, json.dumps(text).encode())

    def missing(self) -> list[str]:
        """Return the files that have not arrived."""
        return [name for name in self.sizes if not (self.directory / name).exists()]

    def clear(self) -> None:
        """Delete the files that have arrived."""
        for name in self.sizes:
            (self.directory / name).unlink(missing_ok=True)


def find_upload(root: Path, upload_id: str) -> Upload | None:
    """Return an upload that has begun and has not expired."""
    if not ID.fullmatch(upload_id):
        return None
    directory = root / upload_id
    try:
        about = json.loads((directory / ABOUT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if about["expires"] <= time.time():
        return None
    request = from_json(ExternalWeightsUploadStartRequest, json.dumps(about["request"]).encode())
    return Upload(upload_id, directory, about["owner"], about["expires"], about["sizes"], request)


def unfinished(root: Path, owner: str) -> int:
    """Return the number of an owner's open uploads."""
    found = [find_upload(root, path.name) for path in root.glob("*")]
    own = [one for one in found if one is not None and one.owner == owner]
    return sum(not (one.directory / "done").exists() for one in own)


def sweep_uploads(root: Path) -> None:
    """Delete the uploads that have expired, and what a crash left of their beginning."""
    for path in root.glob("*"):
        old = time.time() - path.stat().st_mtime > 3600
        if find_upload(root, path.name) is None and (old or (path / ABOUT).exists()):
            shutil.rmtree(path, ignore_errors=True)
