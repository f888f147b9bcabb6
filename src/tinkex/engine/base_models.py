"""Base models on disk: directories, and descriptions before weights are read."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tinkex.engine.api import BaseModel, EngineError
from tinkex.engine.families.family import read_config
from tinkex.engine.file_formats import read_object
from tinkex.errors import ConfigurationError
from tinkex.text.json_tokenizer import Tokenizer
from tinkex.tokenizers import BUNDLED

CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
DIGEST_BLOCK, DIGEST_BLOCKS = 4096, 256
"""The size of a sample of a weights file, and about the number of samples in a digest."""


def locate_models(models: Mapping[str, str | Path]) -> dict[str, Path]:
    """Return the directory of each model; a name without a place is bundled or a hub id."""
    return {
        name: BUNDLED[name] if not place and name in BUNDLED else resolve(place or name)
        for name, place in models.items()
    }


def resolve(source: str | Path) -> Path:
    """Return the directory of a checkpoint, given as a directory or a hub id.

    The offline cache is asked before the hub.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise EngineError(
            f"{source} is not a directory; give a checkpoint directory or a hub id such as "
            "Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(
            snapshot_download(source, local_files_only=True, allow_patterns=CHECKPOINT_FILES)
        )
    except LocalEntryNotFoundError:
        cached = None
    # a cached tokenizer alone is no checkpoint
    if cached is not None and any(cached.glob("*.safetensors")):
        return cached
    if HF_HUB_OFFLINE:
        raise EngineError(
            f"{source} is not in the Hugging Face cache and HF_HUB_OFFLINE is set; "
            "download it first (hf download) or give a directory"
        )
    try:
        return Path(snapshot_download(source, allow_patterns=CHECKPOINT_FILES))
    except Exception as error:
        raise EngineError(
            f"{source} is neither a directory nor a model that can be downloaded: {error}"
        ) from error


def eos_tokens(directory: Path, vocab: int) -> frozenset[int]:
    """Return the end-of-text tokens that a model's configuration and tokenizer files name.

    Some files say -1 for none.
    """
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    about = _read_json(directory / "tokenizer_config.json")
    ends = about.get("eos_token")
    content = ends.get("content") if isinstance(ends, Mapping) else ends
    if isinstance(content, str):
        found.append(_token_id(directory, about, content))
    return frozenset(token for token in found if type(token) is int and 0 <= token < vocab)


def _token_id(directory: Path, about: Mapping[str, Any], content: str) -> int | None:
    """Return the id of a token that a tokenizer's settings name."""
    for number, token in (about.get("added_tokens_decoder") or {}).items():
        if isinstance(token, Mapping) and token.get("content") == content:
            return int(number)
    tokenizer = _read_json(directory / "tokenizer.json")
    for token in tokenizer.get("added_tokens") or []:
        if isinstance(token, Mapping) and token.get("content") == content:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    found = vocabulary.get(content) if isinstance(vocabulary, Mapping) else None
    return None if found is None else int(found)


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional file, which has to hold a JSON object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def describe(name: str, directory: Path) -> BaseModel:
    """Describe a base model before its weights are read, without importing torch."""
    config = read_config(directory)
    return BaseModel(
        name=name,
        context_length=config.context,
        vocab_size=config.vocab,
        arch=config.arch,
        directory=directory,
        eos_tokens=eos_tokens(directory, config.vocab),
        digest=weights_digest(directory),
        tokenizer=functools.cache(partial(read_tokenizer, name, directory)),
    )


def read_tokenizer(name: str, directory: Path) -> Tokenizer:
    """Read the tokenizer of a base model, and its chat template.

    Raises:
        EngineError: There is none, or its files cannot be read.
    """
    try:
        return Tokenizer.from_directory(directory)
    except (ConfigurationError, ValueError) as error:
        raise EngineError(f"the tokenizer of {name} cannot be read: {error}", "server") from error


def weights_digest(directory: Path) -> str:
    """Return a digest of a base model's configuration and of samples of its weights.

    All names, shapes and sizes enter it, and blocks at regular distances of each file. Reading all
    of the weights would take minutes for a large model.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(head, size)))
            first = 8 + head
            for at in range(first, size, max(DIGEST_BLOCK, (size - first) // DIGEST_BLOCKS)):
                file.seek(at)
                digest.update(file.read(DIGEST_BLOCK))
    return digest.hexdigest()
