"""Adapters on the Hugging Face hub, by way of huggingface_hub; single files and the token are in
`tinkex.hub.hub_files`.

A checkpoint is downloaded, checked, given a model card and uploaded. A repository that holds the
adapter of another checkpoint is left alone. The token is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.client.futures.api_future import start
from tinkex.client.rest import RestClient
from tinkex.hub.downloads import download_async
from tinkex.hub.fetches import DownloadError, Progress
from tinkex.hub.hub_files import (
    HTTP_TIMEOUT_MS,
    HubError as HubError,
    build_hf_url as build_hf_url,
    default_cache_dir as default_cache_dir,
    endpoint_of,
    resolve_file as resolve_file,
    resolve_token,
    sanitize_repo_id as sanitize_repo_id,
)
from tinkex.hub.repositories import CARD, Repositories, Upload
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath
from tinkex.types.saves import WeightsInfoResponse

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG, COMPLETE = "adapter_config.json", "checkpoint_complete"
WORKPLACE = "tinkex-push-"
"""Prefix of the directories that pushes work in."""
KEPT_SECONDS = 7 * 86400.0
"""Time for which the files of a push that broke off are kept for the next one."""

CARD_BODY = """\
# {title}

A LoRA adapter trained through the Tinker API.

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{repo}")
```

## Source

```
{path}
```

## Details
"""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The place of an adapter on the hub."""

    repo_id: str
    revision: str
    public: bool
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The adapter's `adapter_config.json`, as it was uploaded."""


def push_checkpoint_adapter(rest_client: RestClient, tinker_path: str, **options: Any) -> Pushed:
    """Put a checkpoint's adapter on the hub; takes what `push_checkpoint_adapter_async` takes.

    Args:
        rest_client: Looks the checkpoint up.
        tinker_path: The checkpoint.
        options: As `push_checkpoint_adapter_async` has them.

    Returns:
        The place of the adapter on the hub.

    Example:
        >>> push_checkpoint_adapter(rest, path, repo_id="me/adder", public=True)
        Pushed(repo_id='me/adder', revision='main', public=True)
    """
    return start(push_checkpoint_adapter_async(rest_client, tinker_path, **options)).result()


async def push_checkpoint_adapter_async(
    rest_client: RestClient,
    tinker_path: str,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    public: bool = False,
    commit_message: str | None = None,
    create_pr: bool = False,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    hf_token: str | None = None,
    add_model_card: bool = True,
    endpoint: str | None = None,
    http_timeout_ms: int = HTTP_TIMEOUT_MS,
    progress: Progress | None = None,
    uploading: Callable[[], object] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Pushed:
    """Put a checkpoint's adapter on the hub.

    Args:
        rest_client: Knows the server that has the checkpoint.
        tinker_path: The checkpoint.
        repo_id: The repository; one named after the base model and the run by default.
        revision: The branch, made when it is not there; `main`, or the checkpoint's name in a
            repository made up here.
        public: Make a new repository public.
        commit_message: The message of the upload.
        create_pr: Propose the upload instead.
        allow_patterns: Upload only files that match one of these; `*` stops at a slash, `**` does
            not.
        ignore_patterns: Leave out files that match one of these.
        hf_token: The token; see `tinkex.hub.hub_files.resolve_token`.
        add_model_card: Write a README.md where the checkpoint has none.
        endpoint: The hub's address; HF_ENDPOINT by default.
        http_timeout_ms: The longest silence of the hub, in milliseconds.
        progress: Called with the bytes of the checkpoint so far and in all.
        uploading: Called when the download has ended and the upload begins.
        cache_dir: Where to keep what was fetched when the push fails or is stopped: the next push
            of the checkpoint goes on from there, and one that succeeds removes it. By default
            nothing is kept.

    Returns:
        The place of the adapter on the hub.

    Raises:
        HubError: The path, the token or the files are not as they should be, or the repository is
            another's.
        APIConnectionError: The hub cannot be reached, or was silent for too long.
        RequestFailedError: The hub did not do it.

    Example:
        >>> import asyncio
        >>> asyncio.run(push_checkpoint_adapter_async(rest, path, repo_id="me/adder-2"))
        Pushed(repo_id='me/adder-2', revision='main', public=False)
    """
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    except ValueError as error:
        raise HubError(str(error)) from None
    if re.search(r"\s", tinker_path):
        raise HubError(f"{tinker_path!r} contains spaces; a checkpoint's path has none")
    if (
        isinstance(http_timeout_ms, bool)
        or not isinstance(http_timeout_ms, int)
        or http_timeout_ms <= 0
    ):
        raise HubError(f"http_timeout_ms must be a positive whole number, got {http_timeout_ms!r}")
    hub = Repositories(resolve_token(hf_token=hf_token), endpoint_of(endpoint), http_timeout_ms)
    user = await asyncio.to_thread(hub.user)
    info = await rest_client.get_weights_info_by_tinker_path(tinker_path)
    with _workplace(cache_dir, f"{rest_client.transport.config.base_url} {tinker_path}") as scratch:
        keep = cache_dir is not None
        try:
            fetched = await download_async(
                rest_client,
                tinker_path,
                scratch,
                force=keep,
                progress=progress,
                resume=keep,
                keep_archive=keep,
            )
        except DownloadError as error:
            raise HubError(error.message) from error
        directory = fetched.destination
        config = await asyncio.to_thread(_prepare, directory, info)
        repo, branch = _destination(repo_id, revision, info.base_model, parsed)
        if add_model_card and not (directory / CARD).exists():
            (directory / CARD).write_text(model_card(repo, tinker_path, info), encoding="utf-8")
        message = commit_message or f"Upload the adapter of {tinker_path}"
        ignored = [*(ignore_patterns or ())] + ([COMPLETE] if allow_patterns is None else [])
        files = list(_chosen(directory, allow_patterns, ignored))
        if not files:
            raise HubError("no file is left to upload: the patterns leave all of them out")
        full = repo if "/" in repo else f"{user}/{repo}"
        upload = Upload(full, branch, public, message, create_pr, tinker_path, directory, files)
        if uploading is not None:
            uploading()
        found = await asyncio.to_thread(hub.push, upload)
    return Pushed(found, branch, public, config)


@contextlib.contextmanager
def _workplace(cache_dir: str | os.PathLike[str] | None, what: str) -> Iterator[Path]:
    """Give a directory to work in; in a cache, pushes of the same thing share their files."""
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix=WORKPLACE) as scratch:
            yield Path(scratch)
        return
    root = Path(cache_dir).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{WORKPLACE}*"):  # only ours: the directory may be shared
        with contextlib.suppress(OSError):  # another push may have taken it
            if time.time() - left.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(left)
    kept = root / f"{WORKPLACE}{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    own = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        kept.rename(own)  # of several pushes at once, one gets it
    own.mkdir(mode=0o700, exist_ok=True)  # other users must not read weights
    os.utime(own)  # in use, however old what it holds
    try:
        yield own
    except BaseException:
        for made in own.iterdir():
            if not made.name.endswith(".partial"):
                shutil.rmtree(made, ignore_errors=True)
        if any(own.iterdir()):
            with contextlib.suppress(OSError):
                own.rename(kept)
        shutil.rmtree(own, ignore_errors=True)  # empty, or another push has left the same
        raise
    shutil.rmtree(own, ignore_errors=True)


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def _prepare(directory: Path, info: WeightsInfoResponse) -> dict[str, Any]:
    """Check that an adapter is whole, and have it name its base model; return its configuration."""
    if not (directory / CONFIG).is_file():
        raise HubError(f"the checkpoint has no {CONFIG}: it is not an adapter")
    if not any((directory / name).is_file() for name in WEIGHTS):
        raise HubError(f"the checkpoint has neither {WEIGHTS[0]} nor {WEIGHTS[1]}")
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise HubError(f"{CONFIG} of the checkpoint is not a JSON object")
    if (
        not isinstance(config.get("base_model_name_or_path"), str)
        or not config["base_model_name_or_path"]
    ):
        config["base_model_name_or_path"] = info.base_model or "unknown"
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def _destination(
    repo_id: str | None,
    revision: str | None,
    base_model: str | None,
    parsed: ParsedCheckpointTinkerPath,
) -> tuple[str, str]:
    if repo_id is not None:
        return repo_id, revision or "main"
    model = (base_model or "").rpartition("/")[2] or "adapter"
    return clean_name(f"tinker-{model}-{parsed.training_run_id}"), revision or clean_name(
        parsed.name
    )


def clean_name(name: str) -> str:
    """Return a name in the form that the hub takes.

    Example:
        >>> clean_name("tinker-Qwen3 8B-uuid:train:0")
        'tinker-Qwen3-8B-uuid-train-0'
    """
    return re.sub(r"-+", "-", re.sub(r"[^A-Za-z0-9_.-]", "-", name)).strip("-_. ")


def _chosen(
    directory: Path, allowed: Sequence[str] | None, ignored: Sequence[str]
) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        wanted = allowed is None or any(matches(name, pattern) for pattern in allowed)
        if path.is_file() and wanted and not any(matches(name, pattern) for pattern in ignored):
            yield name


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a path or its last part.

    `**` stands for anything, `*` for anything but a slash.

    Example:
        >>> matches("a/b.json", "*.json"), matches("a/b.json", "x/*"), matches("a/b/c", "a/**")
        (True, False, True)
    """
    parts = re.split(r"(\*\*|\*)", pattern)
    rule = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
    return any(re.fullmatch(rule, text, re.DOTALL) for text in (name, name.rpartition("/")[2]))


def model_card(repo_id: str, tinker_path: str, info: WeightsInfoResponse) -> str:
    """Return the model card of an adapter."""
    base = info.base_model or ""
    tags = ["tinker", "peft", "lora", *([f"base_model:adapter:{base}"] if base else [])]
    modules = {"attn": info.train_attn, "mlp": info.train_mlp, "unembed": info.train_unembed}
    trained = [name for name, on in modules.items() if on]
    details = [f"- Base model: `{base or 'unknown'}`"]
    details += [f"- LoRA rank: {info.lora_rank}"] if info.lora_rank else []
    if any(on is not None for on in modules.values()):
        details.append(f"- Trained modules: {', '.join(trained) or 'none'}")
    front = ["---", *([f"base_model: {base}"] if base else []), "library_name: peft", "tags:"]
    front += [f"- {tag}" for tag in tags] + [f"tinker_path: {tinker_path}", "---"]
    body = CARD_BODY.format(
        title=repo_id.rpartition("/")[2],
        base=base or "BASE_MODEL",
        repo=repo_id,
        path=tinker_path,
    )
    return "\n".join([*front, "", body, *details, ""])
