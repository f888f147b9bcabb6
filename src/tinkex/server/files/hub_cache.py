"""Copy the tokenizers of local models into the Hugging Face cache.

`AutoTokenizer.from_pretrained(name)` then finds them without a network. The cache keeps a
repository as `models--ORG--NAME/{refs/main, snapshots/REVISION/…}`. A repository that was
downloaded is left alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger("tinkex.server")

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
MARK = ".tinkex"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def cache_root() -> Path:
    """Return the hub's cache directory, by the rules of its library."""
    if path := os.environ.get("HF_HUB_CACHE"):
        return Path(path).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = os.environ.get("HF_HOME") or caches / "huggingface"
    return Path(home).expanduser() / "hub"


def publish_tokenizer(name: str, directory: Path) -> Path | None:
    """Copy a model's tokenizer into the cache; return None if nothing was done."""
    files = [directory / file for file in FILES if (directory / file).is_file()]
    has_tokenizer = any(file.name.startswith("tokenizer") for file in files)
    if not has_tokenizer or not REPOSITORY.fullmatch(name):
        return None
    repository = cache_root() / ("models--" + name.replace("/", "--"))
    if repository.exists() and not (repository / MARK).exists():
        return None
    digest = hashlib.sha1(b"".join(file.name.encode() + file.read_bytes() for file in files))
    revision = digest.hexdigest()
    snapshot = repository / "snapshots" / revision
    try:
        if not snapshot.exists():
            _fill(snapshot, files)
        ours = {*_lines(repository / MARK), revision}
        _write(repository / MARK, "\n".join(sorted(ours)))
        refs = repository / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        # a real download has come since: leave it alone
        if all(line in ours for line in _lines(refs / "main")):
            _write(refs / "main", revision)
    except OSError as error:
        logger.warning("copying the tokenizer of %s to the hub cache failed: %s", name, error)
        return None
    return snapshot


def _fill(snapshot: Path, files: list[Path]) -> None:
    """Create the snapshot directory at once, so that it is never seen half filled."""
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=snapshot.parent) as scratch:
        staged = Path(scratch) / "files"
        staged.mkdir()
        for file in files:
            shutil.copyfile(file, staged / file.name)
        try:
            staged.rename(snapshot)
        except OSError:
            if not snapshot.exists():  # another process may have created it
                raise


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
