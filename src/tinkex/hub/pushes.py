"""Adapters on the Hugging Face hub, by way of huggingface_hub; single files and the token are in
`tinkex.hub.hub_files`.

A checkpoint is downloaded, checked, given a model card and uploaded. A repository that holds the
adapter of another checkpoint is left alone. The token is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinkex.client.futures.api_future import start
from tinkex.client.rest import RestClient
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    ConfigurationError,
    RequestFailedError,
    TinkerError,
)
from tinkex.hub.downloads import DownloadError, Progress, download_async
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
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath, WeightsInfoResponse
from tinkex.wire.redaction import Scrubber

T = TypeVar("T")

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG, COMPLETE, CARD = "adapter_config.json", "checkpoint_complete", "README.md"
SHOWN_BYTES = 500
WORKPLACE = "tinkex-push-"
"""What the names of directories that a push works in begin with."""
KEPT_SECONDS = 7 * 86400.0
"""How long what a broken-off push has fetched is kept for the next one."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where an adapter lies on the hub."""

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
        Where it is now.

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
        public: Whether a repository that is made can be seen by all.
        commit_message: What to say of the upload.
        create_pr: Propose the upload instead.
        allow_patterns: Upload only files that match one of these; `*` stops at a slash, `**` does
            not.
        ignore_patterns: Leave out files that match one of these.
        hf_token: The token; see `tinkex.hub.hub_files.resolve_token`.
        add_model_card: Write a README.md where the checkpoint has none.
        endpoint: The hub's address; HF_ENDPOINT by default.
        http_timeout_ms: How long the hub may be silent.
        progress: Is told how far the download of the checkpoint is.
        uploading: Is called when the checkpoint is here, and its upload begins.
        cache_dir: Where to keep what was fetched when the push fails or is stopped: the next push
            of the checkpoint goes on from there, and one that succeeds removes it. By default
            nothing is kept.

    Returns:
        Where it is now.

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
        raise HubError(f"{tinker_path!r} has blanks in it: no checkpoint has")
    if (
        isinstance(http_timeout_ms, bool)
        or not isinstance(http_timeout_ms, int)
        or http_timeout_ms <= 0
    ):
        raise HubError(f"http_timeout_ms must be a positive whole number, got {http_timeout_ms!r}")
    hub = _Hub(resolve_token(hf_token=hf_token), endpoint_of(endpoint), http_timeout_ms)
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
        upload = _Upload(full, branch, public, message, create_pr, tinker_path, directory, files)
        if uploading is not None:
            uploading()
        found = await asyncio.to_thread(hub.push, upload)
    return Pushed(found, branch, public, config)


@contextlib.contextmanager
def _workplace(cache_dir: str | os.PathLike[str] | None, what: str) -> Iterator[Path]:
    """A directory to work in. In a cache, a push takes over what one before it has left, and leaves
    what it has.
    """
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix=WORKPLACE) as scratch:
            yield Path(scratch)
        return
    root = Path(cache_dir).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{WORKPLACE}*"):  # nothing else: the directory may be anyone's
        with contextlib.suppress(OSError):  # another push may have taken it
            if time.time() - left.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(left)
    kept = root / f"{WORKPLACE}{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    own = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        kept.rename(own)  # of several pushes at once, one has it
    own.mkdir(mode=0o700, exist_ok=True)  # weights are for nobody else to read
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


# ── the hub ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Upload:
    repo_id: str
    revision: str
    public: bool
    message: str
    create_pr: bool
    tinker_path: str
    directory: Path
    files: list[str]


class _Hub:
    """huggingface_hub's client, its errors told as ours."""

    def __init__(self, token: str, endpoint: str, http_timeout_ms: int) -> None:
        try:
            self._library: Any = importlib.import_module("huggingface_hub")
        except ImportError:
            raise ConfigurationError(
                "putting an adapter on the hub needs the package 'huggingface_hub'",
                hint="pip install 'tinkex[text]'",
            ) from None
        self._api: Any = self._library.HfApi(endpoint=endpoint, token=token)
        self._endpoint, self._token, self._http_timeout_ms = endpoint, token, http_timeout_ms
        self._scrubber = Scrubber([token])

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Gives the library's requests a time limit, and takes secrets out of what is logged of
        them.

        Its session is the whole process's, so both are done on the way. Our requests are known by
        the token; large files go to signed addresses that need none, by PUT, which nothing else
        here uses.
        """
        hooks = self._library.get_session().event_hooks["request"]
        limits = dict.fromkeys(("connect", "read", "write", "pool"), self._http_timeout_ms / 1000)

        def limit(request: Any) -> None:
            if (
                request.method == "PUT"
                or request.headers.get("authorization") == f"Bearer {self._token}"
            ):
                request.extensions = {**request.extensions, "timeout": limits}

        loggers = [
            logging.getLogger(name)
            for name in (*logging.root.manager.loggerDict, "httpx")
            if _names_addresses(name)
        ]
        hooks.append(limit)
        for logger in loggers:
            logger.addFilter(self._clean)
        try:
            yield
        finally:
            hooks.remove(limit)
            for logger in loggers:
                logger.removeFilter(self._clean)

    def _clean(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._scrubber.text(record.getMessage()), ()
        return True

    def user(self) -> str:
        """Whose token it is."""
        told = self._asked(self._api.whoami)
        name = told.get("name") if isinstance(told, dict) else None
        name = name or ((told.get("user") or {}).get("name") if isinstance(told, dict) else None)
        if not name:
            raise HubError("the hub does not say whose token this is")
        return str(name)

    def push(self, upload: _Upload) -> str:
        """Make the repository and the branch where they are not there, and upload; the repository's
        full name.
        """
        return self._asked(lambda: self._push(upload))

    def _push(self, upload: _Upload) -> str:
        made = self._api.create_repo(upload.repo_id, private=not upload.public, exist_ok=True)
        repo = str(made.repo_id or upload.repo_id)
        self._require_ours(repo, upload)
        if upload.revision != "main":
            self._api.create_branch(repo, branch=upload.revision, exist_ok=True)
        add = self._library.CommitOperationAdd
        self._api.create_commit(
            repo,
            operations=[
                add(path_in_repo=name, path_or_fileobj=upload.directory / name)
                for name in upload.files
            ],
            commit_message=upload.message,
            revision=upload.revision,
            create_pr=upload.create_pr,
        )
        return repo

    def _asked(self, ask: Callable[[], T]) -> T:
        """What the library answers; its errors become ours, and are not behind them: they may hold
        signed addresses.
        """
        failure: TinkerError
        try:
            with self._watched():
                return ask()
        except TinkerError:
            raise
        except Exception as error:
            failure = self._failure(error)
        raise failure

    def _require_ours(self, repo: str, upload: _Upload) -> None:
        """Refuse a repository whose card names another checkpoint: it would be overwritten."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                card = resolve_file(
                    repo,
                    upload.revision,
                    CARD,
                    cache_dir=scratch,
                    endpoint=self._endpoint,
                    token=self._token,
                    http_timeout_ms=self._http_timeout_ms,
                )
            except HubError as error:
                if error.status == 404:
                    return
                raise
            text = card.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"tinker://[^\s\"'`<>)\]]+", text)
        if found and upload.tinker_path not in found:
            raise HubError(
                f"{repo} holds the adapter of another checkpoint: {found[0]}",
                hint="give another repo_id or revision",
                body={"found": found[0], "expected": upload.tinker_path},
            )

    def _failure(self, error: Exception) -> TinkerError:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        said = " ".join(str(one) for one in (error, error.__cause__) if one is not None)
        text = self._scrubber.text(said, SHOWN_BYTES)
        if _status(error) == 401:
            return HubError(
                "the hub does not know this token", hint="make a new one, with leave to write"
            )
        if "TimeoutException" in kinds:  # of the HTTP library, whichever it is
            return APITimeoutError(
                f"the hub at {self._endpoint} was silent for {self._http_timeout_ms} ms"
            )
        if kinds & {"TransportError", "OSError"} and _status(error) is None:
            return APIConnectionError(f"the hub at {self._endpoint} cannot be reached: {text}")
        return RequestFailedError(
            f"the hub refused: {text}", "", "server", status_code=_status(error)
        )


def _names_addresses(logger: str) -> bool:
    """Whether a logger is huggingface_hub's, which names addresses too, or of an HTTP client that
    it may use.
    """
    return (
        re.match(r"((httpx|httpcore|urllib3|requests)\d*|huggingface_hub)(\.|$)", logger)
        is not None
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, or behind what caused it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if status or error.__cause__ is None else _status(error.__cause__)


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def _prepare(directory: Path, info: WeightsInfoResponse) -> dict[str, Any]:
    """Check that an adapter is whole, and have it name its base model; return its configuration."""
    if not (directory / CONFIG).is_file():
        raise HubError(f"the checkpoint has no {CONFIG}: it is no adapter")
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
    """A name as the hub takes it.

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
    """Whether a pattern fits a path or its last part: `**` stands for anything, `*` for anything
    but a slash.

    Example:
        >>> matches("a/b.json", "*.json"), matches("a/b.json", "x/*"), matches("a/b/c", "a/**")
        (True, False, True)
    """
    parts = re.split(r"(\*\*|\*)", pattern)
    rule = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
    return any(re.fullmatch(rule, text, re.DOTALL) for text in (name, name.rpartition("/")[2]))


def model_card(repo_id: str, tinker_path: str, info: WeightsInfoResponse) -> str:
    """What is said of an adapter on the hub."""
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
    loading = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}")',
        f'model = PeftModel.from_pretrained(base, "{repo_id}")',
    ]
    body = [
        f"# {repo_id.rpartition('/')[2]}",
        "",
        "A LoRA adapter trained through the Tinker API.",
        "",
        "## Use",
        "",
    ]
    body += [
        "```python",
        *loading,
        "```",
        "",
        "## Source",
        "",
        "```",
        tinker_path,
        "```",
        "",
        "## Details",
        "",
    ]
    return "\n".join([*front, "", *body, *details, ""])
